//! Every subject of the bus. What stands here is the wire: a change is a change of protocol.
//!
//! # Answers to hosts
//!
//! A host asks on `gc.<service>.<host>` and is answered on `gc.answer.<host>.<token>`, never through the reply field. The server
//! does not check a reply field against any permission: with answers sent to it, one host could have the controller's answer to
//! it delivered to another host's inbox or topic. So a request carries its answer token in the header [`ANSWER_TOKEN`], the
//! controller publishes to [`answer_to`] the request's subject, whose host the bus has verified, and no controller credential
//! may publish to a reply from the hosts' account at all. A host keeps one subscription to [`answers`] for all its requests.

use std::net::IpAddr;

use groupcast_policy::ids::{HostId, InvalidId, NetworkId, TemplateId, WorkloadId};
use groupcast_policy::topic::Topic;

/// Root of what the leader writes; TOPICS captures it. Only the leading controller publishes below it, nobody subscribes.
const WRITE: &str = "gc.w.";
/// Root of what TOPICS republishes; only the server itself publishes below it.
const READ: &str = "gc.t.";

pub const WRITE_ALL: &str = "gc.w.>";
pub const READ_ALL: &str = "gc.t.>";
/// First message of every batch: fence, progress mark and lease.
pub const LEAD_WRITE: &str = "gc.w.leader";
pub const LEAD_READ: &str = "gc.t.leader";
/// Where the batch limit is measured at start; nothing is ever committed here.
pub const PROBE_WRITE: &str = "gc.w.probe";

/// Which topics any host may read besides its own: hosts choose among them, the bus does not.
pub const READ_SCOPES: &str = "gc.t.scope.>";
pub const READ_RULES: &str = "gc.t.rules.>";
pub const READ_MEMBERS: &str = "gc.t.members.>";
/// Every host's own topic: for exports, never for a host.
pub const READ_HOSTS: &str = "gc.t.host.*";

pub fn write(topic: &Topic) -> String {
    format!("{WRITE}{topic}")
}

pub fn read(topic: &Topic) -> String {
    format!("{READ}{topic}")
}

/// A host's own topic, as the host reads it.
pub fn read_host(host: &HostId) -> String {
    read(&Topic::Host(host.clone()))
}

/// The topic a republished message belongs to; `None` for the leader's chain and for anything that is no topic.
pub fn parse_read(subject: &str) -> Option<Topic> {
    Topic::parse(subject.strip_prefix(READ)?).ok()
}

/// The topic a written message belongs to, as the republish header `Nats-Subject` names it.
pub fn parse_write(subject: &str) -> Option<Topic> {
    Topic::parse(subject.strip_prefix(WRITE)?).ok()
}

/// What a host asks of the controllers, or is told by them. One row a line: function, wildcard, root.
macro_rules! per_host {
    ($($(#[$doc:meta])* $function:ident, $all:ident, $root:literal;)*) => {
        $(
            $(#[$doc])*
            pub fn $function(host: &HostId) -> String {
                format!(concat!($root, ".{}"), host)
            }
            pub const $all: &str = concat!($root, ".*");
        )*
        const PER_HOST_ROOTS: &[&str] = &[$($root),*];
    };
}

per_host! {
    /// Asks for topics, with the revisions held.
    snap, SNAP_ALL, "gc.snap";
    /// Announces a workload of this host, or its end.
    register, REGISTER_ALL, "gc.register";
    /// Says that the host lives.
    beat, BEAT_ALL, "gc.beat";
    /// Says which revisions the kernel enforces.
    ack, ACK_ALL, "gc.ack";
    /// Compares the hash of all revisions held.
    entropy, ENTROPY_ALL, "gc.entropy";
    /// To the host: nudges and orders.
    ctl, CTL_ALL, "gc.ctl";
}

/// The services hosts may call. `gc.ctl` is not among them: it goes the other way.
pub const SERVICES_ALL: [&str; 5] = [SNAP_ALL, REGISTER_ALL, BEAT_ALL, ACK_ALL, ENTROPY_ALL];

/// The services of one host, in the order of [`SERVICES_ALL`].
pub fn services(host: &HostId) -> [String; 5] {
    [snap(host), register(host), beat(host), ack(host), entropy(host)]
}

/// The host that a service request came from or an order goes to. The bus lets a host publish its own name only, so on the
/// controller's side this is an authenticated identity.
pub fn host_of(subject: &str) -> Option<HostId> {
    let (root, host) = subject.rsplit_once('.')?;
    if !PER_HOST_ROOTS.contains(&root) {
        return None;
    }
    HostId::new(host).ok()
}

/// Header of a request that names the token its answer is to be sent under.
pub const ANSWER_TOKEN: &str = "Gc-Answer";
/// Longest answer token in bytes.
pub const ANSWER_TOKEN_LEN_MAX: usize = groupcast_policy::ids::ID_LEN_MAX;
/// Everything controllers answer to hosts.
pub const ANSWER_ALL: &str = "gc.answer.*.*";

/// What a host subscribes to in order to receive the answers to all its requests.
pub fn answers(host: &HostId) -> String {
    format!("gc.answer.{host}.*")
}

/// Where an answer with this token goes; `None` when the token is not a subject-safe token of 1 to [`ANSWER_TOKEN_LEN_MAX`] bytes.
pub fn answer(host: &HostId, token: &str) -> Option<String> {
    // Answer tokens obey the rule of ids, which is what keeps a hostile token from naming another subject.
    let token = WorkloadId::new(token).ok()?;
    Some(format!("gc.answer.{host}.{token}"))
}

/// The token under which a controller says something to a host that the host has not asked for.
pub const TOLD_TOKEN: &str = "told";

/// Where the answer to a request goes, given the request's subject and its [`ANSWER_TOKEN`] header; always to the host that asked.
pub fn answer_to(request_subject: &str, token: &str) -> Option<String> {
    answer(&host_of(request_subject)?, token)
}

/// The token of an answer that arrived.
pub fn answer_token(subject: &str) -> Option<&str> {
    let (host, token) = subject.strip_prefix("gc.answer.")?.split_once('.')?;
    (HostId::new(host).is_ok() && WorkloadId::new(token).is_ok()).then_some(token)
}

/// A controller asks another for everything it holds. Never exported to hosts.
pub const REPLICA: &str = "gc.replica";

/// A gateway asks how far a change is: the controller that published it answers, the others are silent. Never exported to hosts.
pub const PROGRESS: &str = "gc.progress";
/// The leading controller tells gateways how far changes are, as they move. Never exported to hosts.
pub const PROGRESSED: &str = "gc.progressed";

/// Gateways and registrars ask about sources: the leading controller answers, the others are silent. Never exported to hosts.
pub const SOURCE: &str = "gc.source";
/// A gateway asks who is registered and how they are, or has an operator's word carried out: the leading controller answers, the
/// others are silent. Never exported to hosts.
pub const REGISTRATIONS: &str = "gc.registrations";

/// Kinds of documents in CATALOG.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CatalogKind {
    /// Leads an atomic batch of documents and makes it idempotent.
    Change,
    /// Says that the change it was written with is taken back unless it is confirmed in time.
    Confirm,
    Group,
    /// A host's grant: where its addresses may lie, and the token with which it joins.
    Host,
    /// Says that the bus was new when its first word was written. Without it, or any group or template, nobody leads.
    Installation,
    Source,
    Template,
    /// The highest leader term.
    Term,
    /// An operator's token, hashed.
    Token,
}

impl CatalogKind {
    pub const ALL: [Self; 9] = [
        Self::Change,
        Self::Confirm,
        Self::Group,
        Self::Host,
        Self::Installation,
        Self::Source,
        Self::Template,
        Self::Term,
        Self::Token,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Change => "change",
            Self::Confirm => "confirm",
            Self::Group => "group",
            Self::Host => "host",
            Self::Installation => "installation",
            Self::Source => "source",
            Self::Template => "template",
            Self::Term => "term",
            Self::Token => "token",
        }
    }
}

pub const CATALOG_ALL: &str = "gc.cat.>";
/// Where the highest leader term is stored, by compare-and-swap.
pub const CATALOG_TERM: &str = "gc.cat.term.leader";
/// What only controllers write in CATALOG.
pub const CATALOG_TERMS: &str = "gc.cat.term.>";
/// The term of whoever leads: what a leader writes into the stream expects that this was not written since it took over.
pub const CATALOG_FENCE: &str = "gc.cat.term.fence";
/// The message that carries this expectation, first in each of a leader's batches.
pub const CATALOG_FENCED: &str = "gc.cat.term.fenced";
/// The same in REGISTRY.
pub const REGISTRY_FENCE: &str = "gc.reg.l.fence";
pub const REGISTRY_FENCED: &str = "gc.reg.l.fenced";

/// What controllers write about leading, in either stream: no document and no entry.
pub fn is_about_leading(subject: &str) -> bool {
    matches!(subject, CATALOG_TERM | CATALOG_FENCE | CATALOG_FENCED | REGISTRY_FENCE | REGISTRY_FENCED)
}

/// Whether this is the record of a change, which says nothing about the policy.
pub fn is_change_record(catalog_subject: &str) -> bool {
    matches!(parse_catalog(catalog_subject), Some((CatalogKind::Change, _)))
}

/// What an import brings back into AUDIT: documents as they were on the bus that was exported, below their own names.
pub const AUDITED_ALL: &str = "gc.audit.>";

/// Where an import puts a former version of a document.
pub fn audited(catalog_subject: &str) -> Option<String> {
    parse_catalog(catalog_subject)?;
    Some(format!("gc.audit.{}", catalog_subject.strip_prefix("gc.")?))
}

/// The document's own subject.
pub fn parse_audited(subject: &str) -> Option<String> {
    let catalog = format!("gc.{}", subject.strip_prefix("gc.audit.")?);
    parse_catalog(&catalog)?;
    Some(catalog)
}

/// Documents of a kind, or one of them, or all, in CATALOG and in AUDIT alike; and the same of what was imported.
pub fn catalog_filters(kind: Option<CatalogKind>, id: Option<&str>) -> Result<[String; 2], InvalidId> {
    let filter = match (kind, id) {
        (Some(kind), Some(id)) => catalog(kind, id)?,
        (Some(kind), None) => catalog_kind_all(kind),
        (None, Some(id)) => {
            let checked = WorkloadId::new(id).map_err(|error| InvalidId { kind: "document", ..error })?;
            format!("gc.cat.*.{checked}")
        }
        (None, None) => CATALOG_ALL.to_owned(),
    };
    let imported = format!("gc.audit.{}", filter.trim_start_matches("gc."));
    Ok([filter, imported])
}

/// A document's subject; the id obeys the rule of all ids.
pub fn catalog(kind: CatalogKind, id: &str) -> Result<String, InvalidId> {
    let checked = WorkloadId::new(id).map_err(|error| InvalidId { kind: kind.as_str(), ..error })?;
    Ok(format!("gc.cat.{}.{checked}", kind.as_str()))
}

/// All documents of a kind.
pub fn catalog_kind_all(kind: CatalogKind) -> String {
    format!("gc.cat.{}.*", kind.as_str())
}

/// Kind and id of a CATALOG subject. An id that came from the bus is checked like any other.
pub fn parse_catalog(subject: &str) -> Option<(CatalogKind, &str)> {
    let (kind, id) = subject.strip_prefix("gc.cat.")?.split_once('.')?;
    let kind = CatalogKind::ALL.into_iter().find(|known| known.as_str() == kind)?;
    WorkloadId::new(id).ok()?;
    Some((kind, id))
}

pub const REGISTRY_ALL: &str = "gc.reg.>";

/// A workload's entry. Its network is not part of the name: an id has one holder, whatever the network, and compare-and-swap on this
/// subject decides who.
pub fn registry_workload(workload: &WorkloadId) -> String {
    format!("gc.reg.w.{workload}")
}

/// The claim on an address. An IPv4 address written as IPv6 (`::ffff:a.b.c.d`) is the same claim.
pub fn registry_address(network: &NetworkId, address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(v4) => format!("gc.reg.a.{network}.{:08x}", v4.to_bits()),
        IpAddr::V6(v6) => format!("gc.reg.a.{network}.{:032x}", v6.to_bits()),
    }
}

/// Every claim on an address of a network.
pub fn registry_addresses(network: &NetworkId) -> String {
    format!("gc.reg.a.{network}.*")
}

pub fn registry_host(host: &HostId) -> String {
    format!("gc.reg.h.{host}")
}

/// Workloads as earlier versions named them.
pub const REGISTRY_FORMER_WORKLOADS: &str = "gc.reg.w.*.*";
/// Every host's entry.
pub const REGISTRY_HOSTS: &str = "gc.reg.h.*";
/// Templates of which nothing is deleted, and what operators said of their silent hosts.
pub const REGISTRY_GUARDS: &str = "gc.reg.g.*";

/// What a REGISTRY subject is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegistryKey {
    Workload(WorkloadId),
    /// A workload as versions before this one named it. Nobody writes it; [`RegistryKey::Workload`] takes its place.
    FormerWorkload(NetworkId, WorkloadId),
    Address(NetworkId, IpAddr),
    /// Who holds the prefixes of a network that are wider than one address.
    Ranges(NetworkId),
    /// Nothing in itself: a message whose expectation holds a host's new addresses to the [`RegistryKey::Ranges`] they were judged by.
    RangesSeen(NetworkId, HostId),
    Host(HostId),
    /// Why a host was last refused.
    Refusal(HostId),
    /// That nothing of a template is deleted at present, and why.
    Guard(TemplateId),
    /// The term of whoever leads.
    Fence,
    /// First in each batch of a leader.
    Fenced,
}

pub fn parse_registry(subject: &str) -> Option<RegistryKey> {
    let (kind, rest) = subject.strip_prefix("gc.reg.")?.split_once('.')?;
    let in_network = || {
        let (network, id) = rest.split_once('.')?;
        Some((NetworkId::new(network).ok()?, id))
    };
    let key = match kind {
        "w" => match in_network() {
            Some((network, id)) => RegistryKey::FormerWorkload(network, WorkloadId::new(id).ok()?),
            None => RegistryKey::Workload(WorkloadId::new(rest).ok()?),
        },
        "p" => RegistryKey::Ranges(NetworkId::new(rest).ok()?),
        "f" => in_network().and_then(|(network, host)| Some(RegistryKey::RangesSeen(network, HostId::new(host).ok()?)))?,
        "a" => in_network().and_then(|(network, hex)| {
            let address = match hex.len() {
                8 => IpAddr::from(u32::from_str_radix(hex, 16).ok()?.to_be_bytes()),
                32 => IpAddr::from(u128::from_str_radix(hex, 16).ok()?.to_be_bytes()),
                _ => return None,
            };
            Some(RegistryKey::Address(network, address))
        })?,
        "h" => RegistryKey::Host(HostId::new(rest).ok()?),
        "r" => RegistryKey::Refusal(HostId::new(rest).ok()?),
        "g" => RegistryKey::Guard(TemplateId::new(rest).ok()?),
        "l" if subject == REGISTRY_FENCE => RegistryKey::Fence,
        "l" if subject == REGISTRY_FENCED => RegistryKey::Fenced,
        _ => return None,
    };
    // One spelling per key, so that no two subjects claim the same thing.
    (key.subject() == subject).then_some(key)
}

impl RegistryKey {
    pub fn subject(&self) -> String {
        match self {
            Self::Workload(workload) => registry_workload(workload),
            Self::FormerWorkload(network, workload) => format!("gc.reg.w.{network}.{workload}"),
            Self::Ranges(network) => format!("gc.reg.p.{network}"),
            Self::RangesSeen(network, host) => format!("gc.reg.f.{network}.{host}"),
            Self::Address(network, address) => registry_address(network, *address),
            Self::Host(host) => registry_host(host),
            Self::Refusal(host) => format!("gc.reg.r.{host}"),
            Self::Guard(template) => format!("gc.reg.g.{template}"),
            Self::Fence => REGISTRY_FENCE.to_owned(),
            Self::Fenced => REGISTRY_FENCED.to_owned(),
        }
    }
}

/// JetStream's answer to "what may this account use".
pub const JS_ACCOUNT_INFO: &str = "$JS.API.INFO";

/// One operation of JetStream's API on one stream, for example `STREAM.INFO`.
pub fn js_api(operation: &str, stream: &str) -> String {
    format!("$JS.API.{operation}.{stream}")
}

/// What reading a stream takes: its state, single messages, and short-lived consumers with their acknowledgements and flow control.
pub fn js_reading(stream: &str) -> Vec<String> {
    let mut subjects: Vec<String> = ["STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET", "CONSUMER.CREATE"]
        .iter()
        .map(|operation| js_api(operation, stream))
        .collect();
    for operation in ["DIRECT.GET", "CONSUMER.CREATE", "CONSUMER.INFO", "CONSUMER.DELETE", "CONSUMER.MSG.NEXT"] {
        subjects.push(format!("{}.>", js_api(operation, stream)));
    }
    subjects.push(format!("$JS.ACK.{stream}.>"));
    subjects.push(format!("$JS.FC.{stream}.>"));
    subjects
}

/// The server's word that TOPICS has a new stream leader: what the old one was about to republish may be lost.
pub const TOPICS_LEADER_ELECTED: &str = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.TOPICS";
/// The same of REGISTRY: the servers were busy with themselves, and silence meanwhile says nothing about hosts.
pub const REGISTRY_LEADER_ELECTED: &str = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.REGISTRY";

/// Whether a message read on `read` can have been republished from `written`.
pub fn is_republished(written: &str, read: &str) -> bool {
    match (written.strip_prefix("gc.w."), read.strip_prefix("gc.t.")) {
        (Some(written), Some(read)) => written == read,
        _ => false,
    }
}

/// Where the system account takes a new version of an account's token.
pub const CLAIMS_UPDATE: &str = "$SYS.REQ.CLAIMS.UPDATE";

/// What the controllers' account hands to the hosts' account as streams: topics without the leader's chain, orders, answers.
pub const TO_HOSTS: [&str; 6] = [READ_SCOPES, READ_RULES, READ_MEMBERS, READ_HOSTS, CTL_ALL, ANSWER_ALL];

/// Inbox of a host's client library: the token names the host, so that a credential can be confined to it.
pub fn inbox_prefix(host: &HostId) -> String {
    format!("_INBOX_{host}")
}

/// Inbox of a controller, gateway or viewer. Two tokens, unlike a host's, so that controllers can be allowed to answer each
/// other on `_INBOX.>` without being allowed anything else.
pub fn control_inbox_prefix(name: &HostId) -> String {
    format!("_INBOX.{name}")
}

/// All inboxes of controllers, gateways and viewers.
pub const CONTROL_INBOXES: &str = "_INBOX.>";

/// Everything below an inbox.
pub fn inbox_all(prefix: &str) -> String {
    format!("{prefix}.>")
}

#[cfg(test)]
#[path = "subjects_tests.rs"]
mod tests;
