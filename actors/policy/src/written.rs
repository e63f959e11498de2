//! Documents as people and sources write them: YAML and JSON into the model and back, and the dialects of Cloud Foundry and
//! Neutron. Every problem names document, rule and field and says what would be right; all problems of a document come at once.
//!
//! ```yaml
//! kind: group
//! id: web
//! rules:
//!   - ingress tcp 443 from any
//!   - {rule: "egress tcp 5432 to group:db", description: the database}
//!   - {direction: egress, protocol: udp, ports: [53, 5353], remote: [10.0.0.53, 10.0.0.54]}
//! bindings:
//!   - space:shop
//!   - app:frontend staging
//!   - {labels: "env=prod,tier in (web,cache)", within: space:shop, phase: running}
//! members: [192.0.2.0/24]
//! ```

pub mod cloud_foundry;
mod group;
pub mod neutron;
mod node;
mod output;
mod reader;
mod registry;

use std::fmt;

pub use group::{BINDINGS_MAX, DESCRIPTION_LEN_MAX, GROUP_RULES_MAX, NAME_LEN_MAX, STATIC_MEMBERS_MAX};
pub use node::Node;
pub use output::Write;

use crate::model::{Event, Group, Template, Workload};
use crate::text::shorten;
use reader::Reader;

/// Longest text that is parsed, in bytes.
pub const INPUT_LEN_MAX: usize = 64 * 1024 * 1024;
/// Most problems reported at once: enough to fix a document, never a flood.
pub const PROBLEMS_MAX: usize = 200;

/// How a problem is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// The document is wrong by itself (400).
    Invalid,
    /// It names something that does not exist (404).
    Unknown,
    /// It contradicts what else exists (409).
    Conflict,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Problem {
    pub fault: Fault,
    /// Kind and id, or where in the input it stands.
    pub document: String,
    /// Index of the rule, from 0.
    pub rule: Option<usize>,
    pub field: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.document)?;
        match self.rule {
            Some(rule) if self.field.is_empty() || self.field == "rule" => write!(f, "rules[{rule}]: ")?,
            Some(rule) => write!(f, "rules[{rule}].{}: ", self.field)?,
            None if self.field.is_empty() => {}
            None => write!(f, "{}: ", self.field)?,
        }
        f.write_str(&self.message)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Yaml,
    Json,
}

/// One document of the desired state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    Group(Group),
    Template(Template),
    Workload(Workload),
}

impl From<Written> for Event {
    fn from(written: Written) -> Self {
        match written {
            Written::Group(group) => Event::group(group),
            Written::Template(template) => Event::template(template),
            Written::Workload(workload) => Event::workload(workload),
        }
    }
}

/// Reads text into trees. YAML may hold several documents; a list at the top is a list of documents.
pub fn nodes(format: Format, text: &str) -> Result<Vec<Node>, Problem> {
    let problem =
        |message: String| Problem { fault: Fault::Invalid, document: "input".into(), rule: None, field: String::new(), message };
    if text.len() > INPUT_LEN_MAX {
        return Err(problem(format!("longer than {INPUT_LEN_MAX} bytes: split it")));
    }
    let documents: Vec<Node> = match format {
        Format::Json => vec![serde_json::from_str(text).map_err(|e| problem(format!("not JSON: {e}")))?],
        Format::Yaml => {
            // Only `true` and `false` are booleans: a network called `n` or a space called `no` stays what it is.
            let options = serde_saphyr::options! { strict_booleans: true };
            let parsed = serde_saphyr::from_multiple_with_options(text, options);
            parsed.map_err(|e| problem(format!("not YAML: {}", e.without_snippet())))?
        }
    };
    Ok(documents
        .into_iter()
        .flat_map(|node| match node {
            Node::List(list) => list,
            Node::Null => Vec::new(),
            node => vec![node],
        })
        .collect())
}

/// Reads all documents of a text. One bad document does not hide the problems of the others.
pub fn read(format: Format, text: &str) -> Result<Vec<Written>, Vec<Problem>> {
    let nodes = nodes(format, text).map_err(|problem| vec![problem])?;
    let mut problems = Vec::new();
    let mut all = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        match document(node, index) {
            Ok(written) => all.push(written),
            Err(found) => problems.extend(found),
        }
        if problems.len() > PROBLEMS_MAX {
            problems.truncate(PROBLEMS_MAX);
            break;
        }
    }
    if problems.is_empty() { Ok(all) } else { Err(problems) }
}

/// Reads one document that says its kind.
pub fn document(node: &Node, index: usize) -> Result<Written, Vec<Problem>> {
    let kind = match node.get("kind") {
        Some(Node::Text(kind)) => kind.as_str(),
        _ => "",
    };
    match kind {
        "group" => group(node, index).map(Written::Group),
        "template" => template(node, index).map(Written::Template),
        "workload" => workload(node, index).map(Written::Workload),
        other => {
            let message = format!("found {:?}: write group, template or workload", shorten(other));
            let document = Reader::name_of("document", node, index);
            Err(vec![Problem { fault: Fault::Invalid, document, rule: None, field: "kind".into(), message }])
        }
    }
}

/// Reads a group; `kind` may be missing, `index` names it while its id is not known.
pub fn group(node: &Node, index: usize) -> Result<Group, Vec<Problem>> {
    let mut reader = Reader::new("group", node, index);
    let group = group::read(&mut reader, node);
    reader.finish(group)
}

pub fn template(node: &Node, index: usize) -> Result<Template, Vec<Problem>> {
    let mut reader = Reader::new("template", node, index);
    let template = registry::read_template(&mut reader, node);
    reader.finish(template)
}

pub fn workload(node: &Node, index: usize) -> Result<Workload, Vec<Problem>> {
    let mut reader = Reader::new("workload", node, index);
    let workload = registry::read_workload(&mut reader, node);
    reader.finish(workload)
}

#[cfg(test)]
mod tests;
