//! A change: documents that are written together, by one author, for one reason.

use groupcast_policy::model::{Event, World};
use groupcast_policy::written::Problem;
use groupcast_topics::BATCH_MESSAGES_MAX;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::document::{DOCUMENT_BYTES_MAX, Document, Name};
use crate::estimate::Estimate;
use crate::log::WRITE_MESSAGES_MAX;

/// Documents of one change: what can be stored together, less the change record that leads it.
pub const CHANGE_DOCUMENTS_MAX: usize = WRITE_MESSAGES_MAX - 1;
/// All documents of one change together, in bytes.
pub const CHANGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest author in bytes.
pub const AUTHOR_BYTES_MAX: usize = 256;
/// Longest reason in bytes.
pub const REASON_BYTES_MAX: usize = 1_024;
/// Longest idempotency key in bytes.
pub const KEY_BYTES_MAX: usize = 256;

/// What must be there now for a document to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Whatever there is: the last writer wins.
    Any,
    /// Nothing, or one that was deleted.
    Absent,
    /// This very version.
    Revision(u64),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    Put(Document),
    Delete,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Write {
    pub name: Name,
    pub expected: Expected,
    pub body: Body,
}

impl Write {
    pub fn put(document: Document, expected: Expected) -> Self {
        Self { name: document.name(), expected, body: Body::Put(document) }
    }

    pub fn delete(name: Name, expected: Expected) -> Self {
        Self { name, expected, body: Body::Delete }
    }

    pub fn payload(&self) -> Vec<u8> {
        match &self.body {
            Body::Put(document) => document.encode(),
            Body::Delete => Vec::new(),
        }
    }

    /// What it means to the policy; `None` for kinds that are none of its business.
    pub fn event(&self) -> Option<Event> {
        use groupcast_bus_config::subjects::CatalogKind;
        match (&self.body, self.name.kind) {
            (Body::Put(Document::Group(group)), _) => Some(Event::Group { revision: 0, group: group.clone() }),
            (Body::Put(Document::Template(template)), _) => Some(Event::Template { revision: 0, template: template.clone() }),
            (Body::Delete, CatalogKind::Group) => self.name.id().parse().ok().map(Event::GroupRemoved),
            (Body::Delete, CatalogKind::Template) => self.name.id().parse().ok().map(Event::TemplateRemoved),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Change {
    pub author: String,
    pub reason: String,
    /// A change repeated with the same key is written once. Without one the caller cannot repeat it.
    pub key: Option<String>,
    pub writes: Vec<Write>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("the change has no document: name at least one")]
    Empty,
    #[error("the change has {documents} documents, at most {CHANGE_DOCUMENTS_MAX} fit into one: split it")]
    TooMany { documents: usize },
    #[error("{name} is named twice in one change: merge the two")]
    Twice { name: Name },
    #[error("{name} is {bytes} bytes, at most {DOCUMENT_BYTES_MAX} fit into one message: split it")]
    DocumentTooLong { name: Name, bytes: usize },
    #[error("the change is {bytes} bytes, at most {CHANGE_BYTES_MAX} are taken at once: split it")]
    TooLong { bytes: usize },
    #[error("the {field} is {bytes} bytes long or holds control characters: write at most {max} bytes of plain text on one line")]
    Field { field: &'static str, bytes: usize, max: usize },
    #[error("{name} cannot be written by a change: only controllers write it")]
    NotWritable { name: Name },
    #[error("the change would be published as {messages} messages, at most {BATCH_MESSAGES_MAX} fit into one batch: split it")]
    TooWide { messages: usize },
    #[error("{}", told(.0))]
    Contradicts(Vec<Problem>),
}

fn told(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}

impl Change {
    /// What is wrong with it by itself; the encoded documents if nothing is.
    pub fn encode(&self) -> Result<Vec<Vec<u8>>, Invalid> {
        use groupcast_bus_config::subjects::CatalogKind;
        plain("author", &self.author, AUTHOR_BYTES_MAX)?;
        plain("reason", &self.reason, REASON_BYTES_MAX)?;
        plain("idempotency key", self.key.as_deref().unwrap_or_default(), KEY_BYTES_MAX)?;
        match self.writes.len() {
            0 => return Err(Invalid::Empty),
            documents if documents > CHANGE_DOCUMENTS_MAX => return Err(Invalid::TooMany { documents }),
            _ => {}
        }
        let mut names = std::collections::BTreeSet::new();
        let mut payloads = Vec::with_capacity(self.writes.len());
        let mut total = 0;
        for write in &self.writes {
            let name = || write.name.clone();
            if matches!(write.name.kind, CatalogKind::Change | CatalogKind::Term) {
                return Err(Invalid::NotWritable { name: name() });
            }
            if !names.insert(&write.name) {
                return Err(Invalid::Twice { name: name() });
            }
            let payload = write.payload();
            if payload.len() > DOCUMENT_BYTES_MAX {
                return Err(Invalid::DocumentTooLong { name: name(), bytes: payload.len() });
            }
            total += payload.len();
            payloads.push(payload);
        }
        if total > CHANGE_BYTES_MAX { Err(Invalid::TooLong { bytes: total }) } else { Ok(payloads) }
    }

    /// What speaks against it, given everything else.
    pub fn check(&self, world: &World) -> Result<(), Invalid> {
        let events: Vec<Event> = self.writes.iter().filter_map(Write::event).collect();
        let problems = groupcast_policy::check::change(world, &events);
        if problems.is_empty() { Ok(()) } else { Err(Invalid::Contradicts(problems)) }
    }
}

impl Change {
    /// Whether it can be published as one batch; how many messages that takes at most.
    pub fn fits(&self, estimate: &dyn Estimate) -> Result<usize, Invalid> {
        let events: Vec<Event> = self.writes.iter().filter_map(Write::event).collect();
        let messages = estimate.messages(&events);
        if messages > BATCH_MESSAGES_MAX { Err(Invalid::TooWide { messages }) } else { Ok(messages) }
    }
}

fn plain(field: &'static str, text: &str, max: usize) -> Result<(), Invalid> {
    if text.len() <= max && !text.chars().any(groupcast_policy::text::is_deceptive) {
        return Ok(());
    }
    Err(Invalid::Field { field, bytes: text.len(), max })
}

/// Leads the batch of a change of several documents, or goes before a document of its own, under a name made from the idempotency key. It says nothing about which
/// documents follow: they lie right behind it, and a list of them would not fit into one message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub author: String,
    pub reason: String,
    pub key: String,
    /// How many follow; the change's number is this record's sequence plus this.
    pub documents: u64,
    /// Tells a repetition from another change with the same key.
    pub content: String,
    /// Where its one document is written by itself. Who does not know this field cannot read the record, and takes the key for used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<Promised>,
}

/// The one place in the stream where a promised document may be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promised {
    pub subject: String,
    /// The sequence of the version that it replaces, 0 for none.
    pub after: u64,
}

/// Names the record of a change with this key.
pub fn record_id(key: &str) -> String {
    format!("k{:032x}", xxh3_128_with_seed(key.as_bytes(), 7))
}

/// A hash of what a change writes.
pub fn content_hash(writes: &[Write], payloads: &[Vec<u8>]) -> String {
    let mut hash = 0u64;
    for (write, payload) in writes.iter().zip(payloads) {
        hash = xxh3_64_with_seed(write.name.subject().as_bytes(), hash);
        hash = xxh3_64_with_seed(payload, hash);
    }
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_bus_config::subjects::CatalogKind;
    use groupcast_policy::model::{Binding, Group, Target};
    use std::sync::Arc;

    fn put(id: &str) -> Write {
        let group = Group::new(id.parse().unwrap());
        Write::put(Document::Group(Arc::new(group)), Expected::Any)
    }

    fn change(writes: Vec<Write>) -> Change {
        Change { author: "ann".into(), reason: "because".into(), key: None, writes }
    }

    #[test]
    fn what_is_wrong_by_itself_is_named() {
        assert_eq!(change(vec![]).encode(), Err(Invalid::Empty));
        assert!(matches!(change(vec![put("a"), put("a")]).encode(), Err(Invalid::Twice { .. })));
        let term = Write::delete(Name::new(CatalogKind::Term, "leader").unwrap(), Expected::Any);
        assert!(matches!(change(vec![term]).encode(), Err(Invalid::NotWritable { .. })));
        assert_eq!(change(vec![put("a")]).encode().unwrap().len(), 1);
    }

    #[test]
    fn documents_are_bounded() {
        let many = |n: usize| {
            change(
                (0..n).map(|i| Write::delete(Name::new(CatalogKind::Group, &format!("g{i}")).unwrap(), Expected::Any)).collect(),
            )
        };
        assert!(many(CHANGE_DOCUMENTS_MAX).encode().is_ok());
        assert_eq!(many(CHANGE_DOCUMENTS_MAX + 1).encode(), Err(Invalid::TooMany { documents: CHANGE_DOCUMENTS_MAX + 1 }));
    }

    #[test]
    fn bytes_are_bounded() {
        let other = |id: usize, bytes: usize| {
            let name = Name::new(CatalogKind::Source, &format!("s{id}")).unwrap();
            Write::put(Document::Other { name, body: "x".repeat(bytes).into() }, Expected::Any)
        };
        let frame = other(0, 0).payload().len();
        assert!(change(vec![other(0, DOCUMENT_BYTES_MAX - frame)]).encode().is_ok());
        assert!(matches!(change(vec![other(0, DOCUMENT_BYTES_MAX - frame + 1)]).encode(), Err(Invalid::DocumentTooLong { .. })));
        let fits = CHANGE_BYTES_MAX / DOCUMENT_BYTES_MAX;
        assert!(change((0..fits).map(|i| other(i, DOCUMENT_BYTES_MAX - frame)).collect()).encode().is_ok());
        let over = change((0..fits + 1).map(|i| other(i, DOCUMENT_BYTES_MAX - frame)).collect());
        assert!(matches!(over.encode(), Err(Invalid::TooLong { .. })));
    }

    #[test]
    fn words_are_bounded_and_on_one_line() {
        for (field, max) in [("author", AUTHOR_BYTES_MAX), ("reason", REASON_BYTES_MAX), ("key", KEY_BYTES_MAX)] {
            let with = |text: String| {
                let mut change = change(vec![put("a")]);
                match field {
                    "author" => change.author = text,
                    "reason" => change.reason = text,
                    _ => change.key = Some(text),
                }
                change.encode()
            };
            assert!(with("x".repeat(max)).is_ok());
            assert!(matches!(with("x".repeat(max + 1)), Err(Invalid::Field { .. })), "{field}");
            assert!(matches!(with("a\r\nNats-Batch-Commit: 1".into()), Err(Invalid::Field { .. })), "{field}");
        }
    }

    #[test]
    fn contradictions_are_refused_with_the_groups_name() {
        let mut world = World::default();
        let bound = |id: &str, stateful: bool| {
            let mut group = Group::new(id.parse().unwrap());
            group.stateful = stateful;
            group.bindings.push(Binding { target: Target::Global, phases: groupcast_policy::doc::Phases::BOTH });
            group
        };
        world.apply(&Event::group(bound("old", true)));
        let new = Write::put(Document::Group(Arc::new(bound("new", false))), Expected::Absent);
        let invalid = change(vec![new]).check(&world).unwrap_err();
        assert!(invalid.to_string().contains("group \"new\""), "{invalid}");
        assert_eq!(change(vec![put("fine")]).check(&world), Ok(()));
    }

    #[test]
    fn a_change_that_no_batch_can_hold_is_refused_at_the_bound() {
        struct Always(usize);
        impl Estimate for Always {
            fn messages(&self, _: &[Event]) -> usize {
                self.0
            }
        }
        assert_eq!(change(vec![put("a")]).fits(&Always(BATCH_MESSAGES_MAX)), Ok(BATCH_MESSAGES_MAX));
        let refused = change(vec![put("a")]).fits(&Always(BATCH_MESSAGES_MAX + 1));
        assert_eq!(refused, Err(Invalid::TooWide { messages: BATCH_MESSAGES_MAX + 1 }));
    }

    #[test]
    fn a_key_names_one_record_and_the_content_tells_changes_apart() {
        assert_eq!(record_id("a"), record_id("a"));
        assert_ne!(record_id("a"), record_id("b"));
        assert!(Name::new(CatalogKind::Change, &record_id(&"k".repeat(KEY_BYTES_MAX))).is_ok());
        let hash = |writes: &[Write]| content_hash(writes, &writes.iter().map(Write::payload).collect::<Vec<_>>());
        assert_ne!(hash(&[put("a")]), hash(&[put("b")]));
        assert_ne!(hash(&[put("a")]), hash(&[Write::delete(put("a").name, Expected::Any)]));
    }
}
