use std::sync::Arc;

use crate::text::shorten;

/// Longest key or value in bytes.
pub const LABEL_LEN_MAX: usize = 128;
/// Most labels on one workload or template.
pub const LABELS_MAX: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("label {what} {text:?} is not valid: use up to {LABEL_LEN_MAX} characters out of A-Z a-z 0-9 . _ / -{hint}")]
pub struct InvalidLabel {
    what: &'static str,
    text: String,
    hint: &'static str,
}

/// Labels sorted by key, each key once. Shared, because many workloads carry equal ones.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels(Arc<[(Arc<str>, Arc<str>)]>);

impl Default for Labels {
    fn default() -> Self {
        Self(Arc::from([]))
    }
}

impl Labels {
    pub fn get(&self, key: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(k, _)| (**k).cmp(key)).ok()?;
        Some(&self.0[at].1)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<str>)> {
        self.0.iter().map(|(k, v)| (k, v))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn key(text: &str) -> Result<Arc<str>, InvalidLabel> {
        match !text.is_empty() && is_plain(text) {
            true => Ok(Arc::from(text)),
            false => Err(InvalidLabel { what: "key", text: shorten(text), hint: ", at least one" }),
        }
    }

    /// A value may be empty.
    pub fn value(text: &str) -> Result<Arc<str>, InvalidLabel> {
        match is_plain(text) {
            true => Ok(Arc::from(text)),
            false => Err(InvalidLabel { what: "value", text: shorten(text), hint: "" }),
        }
    }
}

fn is_plain(text: &str) -> bool {
    text.len() <= LABEL_LEN_MAX && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._/-".contains(&b))
}

/// Of a key that comes twice the later value stays.
impl FromIterator<(Arc<str>, Arc<str>)> for Labels {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Arc<str>)>>(labels: I) -> Self {
        let map: std::collections::BTreeMap<Arc<str>, Arc<str>> = labels.into_iter().collect();
        Self(map.into_iter().collect())
    }
}
