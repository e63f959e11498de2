//! Documents as they lie in CATALOG and REGISTRY: `{"format_version":"1","document":{…}}`, JSON, because operators read streams with
//! the bus's own tools when nothing else works. An empty payload says that the document was deleted.
//!
//! One that cannot be read is refused by name and spoils only itself: whoever follows keeps the last version it could read.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_policy::ids::{GroupId, HostId, InvalidId, NetworkId, TemplateId, WorkloadId};
use groupcast_policy::model::{Group, Template, Workload};
use groupcast_policy::written::{self, Format, Node, Problem, Write};
use serde::{Deserialize, Serialize};

/// Of every document. A reader refuses any other.
pub const FORMAT_VERSION: &str = "1";

/// Longest document in bytes: what a server with its default settings takes in one message, less room for headers.
pub const DOCUMENT_BYTES_MAX: usize = 1_000_000;

/// Problems of one document that a refusal repeats.
const PROBLEMS_TOLD_MAX: usize = 3;

/// What a CATALOG document is called.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    pub kind: CatalogKind,
    id: Arc<str>,
}

impl Name {
    pub fn new(kind: CatalogKind, id: &str) -> Result<Self, InvalidId> {
        subjects::catalog(kind, id).map(|_| Self { kind, id: Arc::from(id) })
    }

    pub fn group(id: &GroupId) -> Self {
        Self { kind: CatalogKind::Group, id: Arc::from(id.as_str()) }
    }

    pub fn template(id: &TemplateId) -> Self {
        Self { kind: CatalogKind::Template, id: Arc::from(id.as_str()) }
    }

    pub fn parse(subject: &str) -> Option<Self> {
        subjects::parse_catalog(subject).map(|(kind, id)| Self { kind, id: Arc::from(id) })
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn subject(&self) -> String {
        // The id was checked when the name was made.
        subjects::catalog(self.kind, &self.id).unwrap_or_default()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.id)
    }
}

/// What a document says. Kinds whose meaning others define are carried as they are.
#[derive(Debug, Clone, PartialEq)]
pub enum Document {
    Group(Arc<Group>),
    Template(Arc<Template>),
    Other { name: Name, body: serde_json::Value },
}

impl Document {
    pub fn name(&self) -> Name {
        match self {
            Self::Group(group) => Name::group(&group.id),
            Self::Template(template) => Name::template(&template.id),
            Self::Other { name, .. } => name.clone(),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Group(group) => envelop(&group.write(Format::Json)),
            Self::Template(template) => envelop(&template.write(Format::Json)),
            Self::Other { body, .. } => envelop(&body.to_string()),
        }
    }

    /// Reads what lies under `name`; `None` for a document that was deleted.
    pub fn decode(name: &Name, payload: &[u8]) -> Result<Option<Self>, Refused> {
        if payload.is_empty() {
            return Ok(None);
        }
        let refused = |why: String| Refused { name: name.to_string(), why };
        let other_id = |id: &str| refused(format!("it says that its id is {id}: write it under its own name"));
        let document = match name.kind {
            CatalogKind::Group => {
                let group = read(payload, written::group).map_err(refused)?;
                if group.id.as_str() != name.id() {
                    return Err(other_id(group.id.as_str()));
                }
                Self::Group(Arc::new(group))
            }
            CatalogKind::Template => {
                let template = read(payload, written::template).map_err(refused)?;
                if template.id.as_str() != name.id() {
                    return Err(other_id(template.id.as_str()));
                }
                Self::Template(Arc::new(template))
            }
            CatalogKind::Change
            | CatalogKind::Confirm
            | CatalogKind::Host
            | CatalogKind::Installation
            | CatalogKind::Source
            | CatalogKind::Term
            | CatalogKind::Token => Self::Other { name: name.clone(), body: open(payload).map_err(refused)? },
        };
        Ok(Some(document))
    }
}

/// A registered workload, as REGISTRY holds it.
pub fn encode_workload(workload: &Workload) -> Vec<u8> {
    envelop(&workload.write(Format::Json))
}

/// Reads the workload under this key; `None` for one that was removed.
pub fn decode_workload(id: &WorkloadId, payload: &[u8]) -> Result<Option<Workload>, Refused> {
    if payload.is_empty() {
        return Ok(None);
    }
    let refused = |why: String| Refused { name: format!("workload {id}"), why };
    let workload = read(payload, written::workload).map_err(refused)?;
    if workload.id != *id {
        return Err(refused(format!("it says that it is workload {}: write it under its own name", workload.id)));
    }
    Ok(Some(workload))
}

/// Who holds an address, as REGISTRY stores it under the address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    pub workload: String,
    pub host: String,
}

/// Who holds which prefixes of a network that are wider than one address, as REGISTRY stores it under the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ranges {
    /// Sorted.
    pub ranges: Vec<Range>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    pub prefix: String,
    pub workload: String,
    pub host: String,
}

/// A host and what it has registered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostEntry {
    pub host: String,
    /// (network, workload), sorted.
    pub workloads: Vec<(String, String)>,
    /// How many addresses and prefixes each workload has that the host enrolled, by id.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub addresses: BTreeMap<String, u64>,
    /// Nothing for a host that only a source speaks of: nobody expects to hear from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enrolled: Option<Enrolled>,
}

/// A host that enrolled itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Enrolled {
    /// Which boot of the machine this is, in hexadecimal: readers of JSON elsewhere take numbers for floating ones.
    pub boot: String,
    /// What it enrolled with, sorted.
    pub templates: Vec<String>,
    /// Not heard of for a lease.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspect: bool,
}

/// Why a host was last refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefusalRecord {
    pub host: String,
    pub reason: String,
}

/// That nothing of a template is deleted at present, and what an operator has said about its silent hosts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuardRecord {
    pub template: String,
    /// Hosts that fell silent; none once only confirmed ones are missing.
    pub missing: u64,
    /// Of so many.
    pub hosts: u64,
    /// Hosts that an operator has confirmed to be gone and that are still there, sorted. Whoever leads next goes by it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub confirmed: Vec<String>,
}

impl GuardRecord {
    /// Whether deletions are frozen, and not only confirmed ones under way.
    pub fn is_frozen(&self) -> bool {
        self.missing > 0
    }
}

impl HostEntry {
    pub fn new(host: &HostId, workloads: impl IntoIterator<Item = (NetworkId, WorkloadId)>) -> Self {
        let mut workloads: Vec<_> = workloads.into_iter().map(|(network, id)| (network.to_string(), id.to_string())).collect();
        workloads.sort();
        Self { host: host.to_string(), workloads, addresses: BTreeMap::new(), enrolled: None }
    }
}

/// Encodes a small record of ours.
pub fn encode_record<T: Serialize>(record: &T) -> Vec<u8> {
    // Structs of strings, numbers and lists have no way to fail.
    envelop(&serde_json::to_string(record).unwrap_or_default())
}

pub fn decode_record<T: for<'a> Deserialize<'a>>(payload: &[u8]) -> Result<T, String> {
    open(payload)
}

/// A document that is not taken, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is refused: {why}")]
pub struct Refused {
    pub name: String,
    pub why: String,
}

fn envelop(document: &str) -> Vec<u8> {
    format!("{{\"format_version\":\"{FORMAT_VERSION}\",\"document\":{document}}}").into_bytes()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<T> {
    format_version: String,
    document: T,
}

/// Looked at first, so that a version this one does not know is called by its name and not by what it added.
#[derive(Deserialize)]
struct Version {
    format_version: String,
}

fn open<T: for<'a> Deserialize<'a>>(payload: &[u8]) -> Result<T, String> {
    if payload.len() > DOCUMENT_BYTES_MAX {
        return Err(format!("{} bytes, at most {DOCUMENT_BYTES_MAX} are read: split it", payload.len()));
    }
    match serde_json::from_slice::<Envelope<T>>(payload) {
        Ok(envelope) if envelope.format_version == FORMAT_VERSION => Ok(envelope.document),
        other => Err(match (serde_json::from_slice::<Version>(payload), other) {
            (Ok(Version { format_version }), _) if format_version != FORMAT_VERSION => {
                let shown: String = format_version.chars().take(16).collect();
                format!("format_version {shown:?} is not known here, only {FORMAT_VERSION:?}: upgrade this process")
            }
            (_, Err(error)) => format!("it is not a document: {error}; write it again through the gateway"),
            (_, Ok(_)) => "it is not a document: write it again through the gateway".to_owned(),
        }),
    }
}

fn read<T>(payload: &[u8], parse: fn(&Node, usize) -> Result<T, Vec<Problem>>) -> Result<T, String> {
    let node: Node = open(payload)?;
    parse(&node, 0).map_err(|problems| {
        let told: Vec<String> = problems.iter().take(PROBLEMS_TOLD_MAX).map(Problem::to_string).collect();
        let more = problems.len().saturating_sub(PROBLEMS_TOLD_MAX);
        let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
        format!("{}{tail}; write it again through the gateway", told.join("; "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(id: &str) -> Name {
        Name::new(CatalogKind::Group, id).unwrap()
    }

    fn group(id: &str) -> Document {
        Document::Group(Arc::new(Group::new(GroupId::new(id).unwrap())))
    }

    #[test]
    fn documents_read_back() {
        let (template, network) = (TemplateId::new("t").unwrap(), NetworkId::new("n").unwrap());
        let source = Name::new(CatalogKind::Source, "cc").unwrap();
        let all = [
            group("web"),
            Document::Template(Arc::new(Template::new(template, network))),
            Document::Other { name: source, body: serde_json::json!({"url": "https://cc.example", "n": 1}) },
        ];
        for document in all {
            assert_eq!(Document::decode(&document.name(), &document.encode()), Ok(Some(document.clone())));
            assert_eq!(Document::decode(&document.name(), b""), Ok(None), "empty means deleted");
        }
        let mut workload = Workload::new("w".parse().unwrap(), "h".parse().unwrap(), "n".parse().unwrap());
        workload.addresses.insert(groupcast_policy::net::Prefix::v4(0x0a000001, 32).unwrap());
        let payload = encode_workload(&workload);
        assert_eq!(decode_workload(&workload.id, &payload), Ok(Some(workload.clone())));
        assert!(decode_workload(&"other".parse().unwrap(), &payload).is_err());
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_name() {
        let good = String::from_utf8(group("web").encode()).unwrap();
        let rows = [
            ("not json", "it is not a document"),
            ("{}", "it is not a document"),
            (r#"{"format_version":"2","document":{}}"#, "format_version \"2\" is not known"),
            (r#"{"format_version":"2","document":{},"signature":"x"}"#, "format_version \"2\" is not known"),
            (r#"{"format_version":"1","document":{},"more":1}"#, "unknown field"),
            (r#"{"format_version":"1","document":{"kind":"group","id":"web","rules":["allow everything"]}}"#, "rules[0]"),
            (r#"{"format_version":"1","document":{"kind":"group","id":"db"}}"#, "its id is db"),
        ];
        assert!(Document::decode(&name("web"), good.as_bytes()).is_ok());
        for (payload, words) in rows {
            let refused = Document::decode(&name("web"), payload.as_bytes()).unwrap_err();
            assert_eq!(refused.name, "group web", "{payload}");
            assert!(refused.to_string().contains(words), "{payload}: {refused}");
        }
        assert!(Document::decode(&name("web"), &[0xff, 0xfe]).is_err());
    }

    #[test]
    fn length_is_bounded() {
        let body = |bytes: usize| serde_json::Value::String("x".repeat(bytes));
        let name = Name::new(CatalogKind::Source, "s").unwrap();
        let frame = Document::Other { name: name.clone(), body: body(0) }.encode().len();
        let fits = Document::Other { name: name.clone(), body: body(DOCUMENT_BYTES_MAX - frame) }.encode();
        assert_eq!(fits.len(), DOCUMENT_BYTES_MAX);
        assert!(Document::decode(&name, &fits).is_ok());
        let over = Document::Other { name: name.clone(), body: body(DOCUMENT_BYTES_MAX - frame + 1) }.encode();
        assert!(Document::decode(&name, &over).unwrap_err().why.contains("split it"));
    }

    #[test]
    fn any_bytes_are_taken_without_a_panic() {
        let good = group("web").encode();
        for at in 0..good.len() {
            for byte in [0u8, b'"', b'{', 0xff] {
                let mut bytes = good.clone();
                bytes[at] = byte;
                let _ = Document::decode(&name("web"), &bytes);
            }
            let _ = Document::decode(&name("web"), &good[..at]);
        }
    }
}
