//! Walks a document's tree and collects what is wrong with it.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::str::FromStr;

use super::{Fault, Node, PROBLEMS_MAX, Problem};
use crate::net::Prefix;
use crate::text::{FieldError, is_deceptive, prefix_text, shorten};

pub(super) struct Reader {
    document: String,
    rule: Option<usize>,
    problems: Vec<Problem>,
}

impl Reader {
    pub fn new(kind: &str, node: &Node, index: usize) -> Self {
        Self { document: Self::name_of(kind, node, index), rule: None, problems: Vec::new() }
    }

    /// By its id if it has one that can be printed, else by where it stands.
    pub fn name_of(kind: &str, node: &Node, index: usize) -> String {
        let id = ["id", "guid", "name"].iter().find_map(|key| node.get(key).and_then(Node::text));
        match id {
            Some(id) => format!("{kind} {:?}", shorten(id)),
            None => format!("{kind} at index {index}"),
        }
    }

    pub fn in_rule(&mut self, rule: Option<usize>) {
        self.rule = rule;
    }

    pub fn problem(&mut self, field: &str, message: impl Display) {
        if self.problems.len() < PROBLEMS_MAX {
            let (document, rule) = (self.document.clone(), self.rule);
            let message = message.to_string();
            self.problems.push(Problem { fault: Fault::Invalid, document, rule, field: field.to_string(), message });
        }
    }

    pub fn field_errors(&mut self, errors: impl IntoIterator<Item = FieldError>) {
        errors.into_iter().for_each(|error| self.problem(error.field, error.message));
    }

    /// How many problems there are so far: a rule is whole if it added none.
    pub fn count(&self) -> usize {
        self.problems.len()
    }

    pub fn finish<T>(self, value: Option<T>) -> Result<T, Vec<Problem>> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ if self.problems.is_empty() => {
                let message = "could not be read".to_string();
                Err(vec![Problem { fault: Fault::Invalid, document: self.document, rule: None, field: String::new(), message }])
            }
            _ => Err(self.problems),
        }
    }

    /// The entries of a mapping whose keys are all known.
    pub fn map<'n>(&mut self, node: &'n Node, field: &str, known: &[&str]) -> Option<&'n [(String, Node)]> {
        let Node::Map(entries) = node else {
            self.problem(field, format!("is {}: write a mapping with the fields {}", node.kind(), known.join(", ")));
            return None;
        };
        for (key, _) in entries {
            if !known.contains(&key.as_str()) {
                self.problem(&shorten(key), format!("is not a field: known are {}", known.join(", ")));
            }
        }
        Some(entries)
    }

    /// A list; nothing counts as an empty one.
    pub fn list<'n>(&mut self, node: Option<&'n Node>, field: &str, max: usize) -> &'n [Node] {
        match node {
            None | Some(Node::Null) => &[],
            Some(Node::List(list)) if list.len() <= max => list,
            Some(Node::List(list)) => {
                self.problem(field, format!("{} items: at most {max} are allowed", list.len()));
                &[]
            }
            Some(other) => {
                self.problem(field, format!("is {}: write a list", other.kind()));
                &[]
            }
        }
    }

    pub fn text<'n>(&mut self, node: Option<&'n Node>, field: &str) -> Option<&'n str> {
        match node {
            None | Some(Node::Null) => None,
            Some(Node::Text(text)) => Some(text),
            Some(other) => {
                self.problem(field, format!("is {}: write a string", other.kind()));
                None
            }
        }
    }

    pub fn flag(&mut self, node: Option<&Node>, field: &str, default: bool) -> bool {
        match node {
            None | Some(Node::Null) => default,
            Some(Node::Bool(flag)) => *flag,
            Some(other) => {
                self.problem(field, format!("is {}: write true or false", other.kind()));
                default
            }
        }
    }

    /// Text of at most `max` characters, none of them one that a terminal does not show as it is.
    pub fn line(&mut self, node: Option<&Node>, field: &str, max: usize) -> Option<String> {
        let text = self.text(node, field)?;
        if text.chars().count() > max {
            self.problem(field, format!("longer than {max} characters: shorten it"));
        } else if text.chars().any(is_deceptive) {
            self.problem(field, "has control characters, or marks that turn the text around: remove them");
        }
        Some(text.to_string())
    }

    /// Words of a foreign system that change no meaning: fitted into `max` characters of one line rather than refused.
    pub fn remark(&mut self, node: Option<&Node>, field: &str, max: usize) -> String {
        let text = self.text(node, field).unwrap_or_default();
        text.chars().take(max).map(|c| if is_deceptive(c) { ' ' } else { c }).collect()
    }

    pub fn parsed<T: FromStr<Err: Display>>(&mut self, node: Option<&Node>, field: &str) -> Option<T> {
        let number;
        let text = match node {
            // An id of digits only is a number to YAML.
            Some(Node::Int(n)) => {
                number = n.to_string();
                number.as_str()
            }
            node => self.text(node, field)?,
        };
        text.parse().map_err(|error| self.problem(field, error)).ok()
    }

    pub fn required<T>(&mut self, value: Option<T>, node: Option<&Node>, field: &str, what: &str) -> Option<T> {
        if value.is_none() && matches!(node, None | Some(Node::Null)) {
            self.problem(field, format!("missing: write {what}"));
        }
        value
    }

    pub fn set<T: FromStr<Err: Display> + Ord>(&mut self, node: Option<&Node>, field: &str, max: usize) -> BTreeSet<T> {
        self.list(node, field, max).iter().filter_map(|item| self.parsed(Some(item), field)).collect()
    }

    pub fn prefixes(&mut self, node: Option<&Node>, field: &str, max: usize) -> BTreeSet<Prefix> {
        let mut set = BTreeSet::new();
        for (i, item) in self.list(node, field, max).iter().enumerate() {
            let field = format!("{field}[{i}]");
            match self.text(Some(item), &field).map(prefix_text) {
                Some(Ok(prefix)) => {
                    set.insert(prefix);
                }
                Some(Err(error)) => self.problem(&field, error),
                None if *item == Node::Null => self.problem(&field, "is empty: write an address or a prefix"),
                None => {}
            }
        }
        set
    }
}
