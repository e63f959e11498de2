//! `input => what it means` or `input => error FIELD: words`; several errors are separated by ` && `.

use groupcast_policy::ids::SourceId;
use groupcast_policy::written::{self, Format, Node, Problem, Write, Written};

use super::lines;

fn table(text: &str, format: Format, convert: impl Fn(&Node) -> Result<String, Vec<Problem>>) {
    for (number, line) in lines(text) {
        let (input, expected) = line.split_once("=>").unwrap_or_else(|| panic!("line {number}: no =>"));
        let expected = expected.trim();
        let found = match written::nodes(format, input) {
            Ok(nodes) => nodes.first().map_or(Ok(String::new()), &convert),
            Err(problem) => Err(vec![problem]),
        };
        match (expected.strip_prefix("error "), found) {
            (None, Ok(found)) => assert_eq!(found, expected, "line {number}"),
            (None, Err(problems)) => panic!("line {number}: {problems:?}"),
            (Some(_), Ok(found)) => panic!("line {number}: accepted as {found}"),
            (Some(errors), Err(problems)) => {
                let expected: Vec<&str> = errors.split(" && ").collect();
                assert_eq!(problems.len(), expected.len(), "line {number}: {problems:?}");
                for error in expected {
                    let (field, words) = error.split_once(':').unwrap_or((error, ""));
                    let matches = |p: &Problem| {
                        let at = match p.rule {
                            Some(rule) => format!("rules[{rule}].{}", p.field),
                            None => p.field.clone(),
                        };
                        (at == field.trim() || p.field == field.trim()) && p.message.contains(words.trim())
                    };
                    assert!(problems.iter().any(matches), "line {number}: {error} is not in {problems:?}");
                }
            }
        }
    }
}

fn source() -> SourceId {
    SourceId::new("src").unwrap()
}

pub fn cloud_foundry(text: &str) {
    table(text, Format::Json, |node| written::cloud_foundry::rule(node).map(|rule| rule.rule.to_string()));
}

pub fn cloud_foundry_groups(text: &str) {
    table(text, Format::Json, |node| written::cloud_foundry::group(&source(), node, 0).map(|g| g.write(Format::Json)));
}

pub fn neutron(text: &str) {
    table(text, Format::Json, |node| written::neutron::rule(&source(), node).map(|rule| rule.rule.to_string()));
}

/// A document is written back as JSON, without its kind, id and name; reading that again gives the same.
pub fn documents(text: &str) {
    table(text, Format::Yaml, |node| {
        let written = written::document(node, 0)?;
        let again = written::read(Format::Json, &written.write(Format::Json))?;
        assert_eq!(again, std::slice::from_ref(&written));
        let yaml = written.write(Format::Yaml);
        assert_eq!(written::read(Format::Yaml, &yaml)?, std::slice::from_ref(&written), "{yaml}");
        if let Written::Group(group) = &written {
            assert_eq!(written::group(&group.node(), 0)?, *group);
        }
        Ok(match written.node() {
            Node::Map(fields) => {
                let shown = fields.into_iter().filter(|(key, _)| !["kind", "id", "name"].contains(&key.as_str()));
                serde_json::to_string(&Node::Map(shown.collect())).unwrap()
            }
            _ => String::new(),
        })
    });
}
