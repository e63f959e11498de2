//! Label selectors: `env=prod, tier in (web,db), zone notin (z1), canary, !legacy`.
//!
//! Every requirement must hold. `key!=value` and `notin` also match a workload that lacks the key, as everywhere else.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::Labels;
use crate::text::shorten;
use crate::topic::Scope;

/// Most requirements in one selector, and most values in one requirement.
pub const REQUIREMENTS_MAX: usize = 64;

/// Equality is `In` with one value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Requirement {
    In { key: Arc<str>, values: BTreeSet<Arc<str>> },
    NotIn { key: Arc<str>, values: BTreeSet<Arc<str>> },
    Exists(Arc<str>),
    Missing(Arc<str>),
}

impl Requirement {
    pub fn matches(&self, labels: &Labels) -> bool {
        match self {
            Requirement::In { key, values } => labels.get(key).is_some_and(|value| values.contains(value)),
            Requirement::NotIn { key, values } => labels.get(key).is_none_or(|value| !values.contains(value)),
            Requirement::Exists(key) => labels.get(key).is_some(),
            Requirement::Missing(key) => labels.get(key).is_none(),
        }
    }
}

/// Requirements sorted and distinct, so that equal selectors are equal data.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector {
    /// Only workloads in this scope are selected.
    pub within: Scope,
    requirements: Vec<Requirement>,
}

impl Selector {
    pub fn new(within: Scope, requirements: impl IntoIterator<Item = Requirement>) -> Self {
        let distinct: BTreeSet<Requirement> = requirements.into_iter().collect();
        Self { within, requirements: distinct.into_iter().collect() }
    }

    pub fn requirements(&self) -> &Vec<Requirement> {
        &self.requirements
    }

    /// Whether the labels fulfil it; the scope is not looked at.
    pub fn matches(&self, labels: &Labels) -> bool {
        fulfils(labels, &self.requirements)
    }
}

/// Whether the labels fulfil every requirement.
pub(crate) fn fulfils(labels: &Labels, requirements: &[Requirement]) -> bool {
    requirements.iter().all(|requirement| requirement.matches(labels))
}

/// Parses the requirements; every bad one is told. At least one is needed: a binding to a whole scope is written as one.
pub fn parse_selector(text: &str) -> Result<Vec<Requirement>, Vec<String>> {
    let mut requirements = Vec::new();
    let mut errors = Vec::new();
    for item in split_outside_brackets(text) {
        if requirements.len() + errors.len() >= REQUIREMENTS_MAX {
            errors.push(format!("more than {REQUIREMENTS_MAX} requirements: use fewer"));
            break;
        }
        match requirement(item.trim()) {
            Ok(requirement) => requirements.push(requirement),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(requirements) } else { Err(errors) }
}

fn split_outside_brackets(text: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let (mut depth, mut start) = (0u32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    items
}

fn requirement(item: &str) -> Result<Requirement, String> {
    let key = |text: &str| Labels::key(text.trim()).map_err(|e| e.to_string());
    let one = |text: &str| Labels::value(text.trim()).map(|v| BTreeSet::from([v])).map_err(|e| e.to_string());
    if item.is_empty() {
        return Err("a requirement is empty: write key=value, key in (a,b), key notin (a,b), key or !key".into());
    }
    if let Some(k) = item.strip_prefix('!') {
        return Ok(Requirement::Missing(key(k)?));
    }
    if let Some((k, v)) = item.split_once("!=") {
        return Ok(Requirement::NotIn { key: key(k)?, values: one(v)? });
    }
    if let Some((k, v)) = item.split_once('=') {
        return Ok(Requirement::In { key: key(k)?, values: one(v.strip_prefix('=').unwrap_or(v))? });
    }
    let Some((head, list)) = item.split_once('(') else { return Ok(Requirement::Exists(key(item)?)) };
    let list = list.strip_suffix(')').ok_or_else(|| format!("{:?} lacks the closing bracket", shorten(item)))?;
    let mut head = head.split_whitespace();
    let (Some(k), Some(operator), None) = (head.next(), head.next(), head.next()) else {
        return Err(format!("{:?} is not a requirement: write key in (a,b) or key notin (a,b)", shorten(item)));
    };
    if list.split(',').nth(REQUIREMENTS_MAX).is_some() {
        return Err(format!("more than {REQUIREMENTS_MAX} values in one requirement: use fewer"));
    }
    let values: Result<BTreeSet<Arc<str>>, _> = list.split(',').map(|v| Labels::value(v.trim())).collect();
    let values = values.map_err(|e| e.to_string())?;
    match operator {
        "in" => Ok(Requirement::In { key: key(k)?, values }),
        "notin" => Ok(Requirement::NotIn { key: key(k)?, values }),
        other => Err(format!("operator {:?} is not known: write in or notin", shorten(other))),
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |values: &BTreeSet<Arc<str>>| values.iter().map(|v| &**v).collect::<Vec<_>>().join(",");
        match self {
            Requirement::In { key, values } if values.len() == 1 => write!(f, "{key}={}", list(values)),
            Requirement::In { key, values } => write!(f, "{key} in ({})", list(values)),
            Requirement::NotIn { key, values } if values.len() == 1 => write!(f, "{key}!={}", list(values)),
            Requirement::NotIn { key, values } => write!(f, "{key} notin ({})", list(values)),
            Requirement::Exists(key) => f.write_str(key),
            Requirement::Missing(key) => write!(f, "!{key}"),
        }
    }
}

/// The requirements only; the scope is written where the binding is.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, requirement) in self.requirements.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            requirement.fmt(f)?;
        }
        Ok(())
    }
}
