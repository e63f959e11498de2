//! Why a flow passes or does not: the path through scopes and groups, the rule that decides, and which versions said so. Pure.

use std::net::IpAddr;

use groupcast_control::document::Name;
use groupcast_policy::ids::{GroupId, NetworkId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_policy::net::Family;
use groupcast_policy::oracle::{End, Flow, Judgement, Reason};
use groupcast_policy::packet::{Payload, has_ports};
use groupcast_policy::rule::Remote;
use groupcast_policy::text::protocol_number;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::local::Local;

const ECHO_REQUEST_V4: u8 = 8;
const ECHO_REQUEST_V6: u8 = 128;

/// A group that was asked, in the order in which groups are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Step {
    pub group: String,
    pub revision: u64,
    /// Why the workload has it.
    pub scope: String,
    /// Whether its rule decided.
    pub decides: bool,
}

/// What one end of the flow says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Side {
    pub workload: String,
    pub host: Option<String>,
    pub direction: String,
    pub allowed: bool,
    /// In words.
    pub why: String,
    /// The rule that decided, if one did.
    pub rule: Option<String>,
    pub path: Vec<Step>,
    /// The latest change among what decided.
    pub change: Option<u64>,
    /// Whether its host has that change and enforces it; nothing when nobody knows any more.
    pub enforced: Option<bool>,
    /// Whether packets pass here, with what the host does at present; nothing when it is not known.
    pub passes: Option<bool>,
    /// The same in words.
    pub happens: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    pub format_version: String,
    pub from: String,
    pub to: String,
    pub source: String,
    pub destination: String,
    pub traffic: String,
    /// By the policy.
    pub allowed: bool,
    /// Whether its packets pass, with what the hosts at both ends do at present; nothing when it is not known.
    pub passes: Option<bool>,
    /// The sender's word, where it is one of ours.
    pub egress: Option<Side>,
    /// The receiver's word, where it is one of ours.
    pub ingress: Option<Side>,
    /// Whether answers pass.
    pub replies_allowed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cannot {
    #[error("{0:?} is neither an address nor a workload's id: write 10.0.0.1 or web-1")]
    End(String),
    #[error("workload {0} is not registered: see `groupcast get workloads`")]
    Unknown(String),
    #[error("{0:?} is no traffic: write tcp/5432, udp/53, icmp/8/0, or a protocol such as gre")]
    Traffic(String),
    #[error("{from} and {to} have no addresses of one family that {traffic} could go between")]
    Families { from: String, to: String, traffic: String },
    #[error("{address} is an address of {first} and of {second}, which are on different networks: name the workload instead")]
    Ambiguous { address: IpAddr, first: String, second: String },
}

/// An end as it was asked for: with an address, that one counts and no other of the workload that has it.
struct Asked {
    end: End,
    address: Option<IpAddr>,
}

impl Asked {
    fn addresses(&self, local: &Local) -> Vec<IpAddr> {
        match (&self.end, self.address) {
            (_, Some(address)) => vec![address],
            (End::Address(address), None) => vec![*address],
            (End::Workload(id), None) => {
                let entry = local.world().registry.workloads.get(id);
                entry.into_iter().flat_map(|workload| workload.addresses.iter().map(|prefix| prefix.net().addr())).collect()
            }
        }
    }
}

fn network_of<'l>(local: &'l Local, text: &str) -> Option<&'l NetworkId> {
    Some(&local.world().registry.workloads.get(&WorkloadId::new(text).ok()?)?.network)
}

/// `beside` is the other end, whose network counts where several have the address.
fn end(local: &Local, text: &str, beside: &str) -> Result<Asked, Cannot> {
    let workloads = &local.world().registry.workloads;
    if let Ok(address) = text.parse::<IpAddr>() {
        let address = address.to_canonical();
        let owns = |workload: &&Workload| workload.addresses.iter().any(|prefix| prefix.contains(address));
        let owners: Vec<&Workload> = workloads.values().map(AsRef::as_ref).filter(owns).collect();
        let near = network_of(local, beside);
        let owner = owners.iter().find(|owner| Some(&owner.network) == near).or(owners.first());
        if let (Some(first), Some(second)) =
            (owner, owners.iter().find(|other| Some(&other.network) != owner.map(|o| &o.network)))
            && Some(&first.network) != near
        {
            return Err(Cannot::Ambiguous { address, first: first.id.to_string(), second: second.id.to_string() });
        }
        let end = owner.map_or(End::Address(address), |workload| End::Workload(workload.id.clone()));
        return Ok(Asked { end, address: Some(address) });
    }
    let id = WorkloadId::new(text).map_err(|_| Cannot::End(text.chars().take(80).collect()))?;
    if !workloads.contains_key(&id) {
        return Err(Cannot::Unknown(id.to_string()));
    }
    Ok(Asked { end: End::Workload(id), address: None })
}

/// `tcp/5432`, `icmp/8/0`, `gre`, `47`.
pub fn payload(text: &str) -> Result<Payload, Cannot> {
    let wrong = || Cannot::Traffic(text.chars().take(80).collect());
    let mut parts = text.split('/');
    let name = parts.next().unwrap_or_default();
    let numbers: Vec<&str> = parts.collect();
    if name == "icmp" || name == "icmpv6" {
        let byte = |at: usize, default: u8| numbers.get(at).map_or(Ok(default), |n| n.parse().map_err(|_| wrong()));
        let echo = if name == "icmp" { ECHO_REQUEST_V4 } else { ECHO_REQUEST_V6 };
        return if numbers.len() > 2 { Err(wrong()) } else { Ok(Payload::Icmp { kind: byte(0, echo)?, code: byte(1, 0)? }) };
    }
    let protocol = protocol_number(name).ok().filter(|number| *number != 0).ok_or_else(wrong)?;
    match (has_ports(protocol), numbers.as_slice()) {
        (true, [port]) => {
            let destination = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
            Ok(Payload::Ports { protocol, source: 40_000, destination })
        }
        (false, []) => Ok(Payload::Other(protocol)),
        _ => Err(wrong()),
    }
}

fn end_text(end: &End) -> String {
    match end {
        End::Workload(id) => format!("workload:{id}"),
        End::Address(address) => address.to_string(),
    }
}

/// The payload as a packet of this family carries it: an echo request that was not given by its number is the family's own. Nothing where
/// the family has no such thing.
fn in_family(traffic: &str, payload: Payload, address: IpAddr) -> Option<Payload> {
    match (traffic, address.is_ipv4()) {
        ("icmp", false) => Some(Payload::Icmp { kind: ECHO_REQUEST_V6, code: 0 }),
        (name, true) if name.split('/').next() == Some("icmpv6") => None,
        _ => Some(payload),
    }
}

pub fn explain(local: &Local, from: &str, to: &str, traffic: &str) -> Result<Explanation, Cannot> {
    let payload = payload(traffic)?;
    let (from, to) = (end(local, from, to)?, end(local, to, from)?);
    let families = || Cannot::Families { from: end_text(&from.end), to: end_text(&to.end), traffic: traffic.to_owned() };
    let world = local.world();
    let (sources, destinations) = (from.addresses(local), to.addresses(local));
    let pairs = sources.iter().flat_map(|source| destinations.iter().map(|destination| (*source, *destination)));
    let of_one_family = pairs.filter(|(source, destination)| source.is_ipv4() == destination.is_ipv4());
    let carried =
        of_one_family.filter_map(|(source, destination)| Some((source, destination, in_family(traffic, payload, source)?)));
    let (source, destination, payload) =
        carried.min_by_key(|(source, destination, _)| (*source, *destination)).ok_or_else(families)?;
    let flow = Flow { from: from.end.clone(), to: to.end.clone(), source, destination, payload };
    let (from, to) = (from.end, to.end);
    let verdict = world.verdict(&flow);
    let family = if flow.source.is_ipv4() { Family::V4 } else { Family::V6 };
    let traffic = match payload {
        Payload::Icmp { .. } if family == Family::V6 => format!("{payload} (IPv6)"),
        _ => payload.to_string(),
    };
    Ok(Explanation {
        format_version: "1".to_owned(),
        from: end_text(&from),
        to: end_text(&to),
        source: flow.source.to_string(),
        destination: flow.destination.to_string(),
        traffic,
        allowed: verdict.allowed,
        passes: None,
        egress: verdict.egress.map(|judgement| side(local, judgement)),
        ingress: verdict.ingress.map(|judgement| side(local, judgement)),
        replies_allowed: world.reply_verdict(&flow).allowed,
    })
}

fn side(local: &Local, judgement: Judgement) -> Side {
    let world = local.world();
    let entry = world.registry.workloads.get(&judgement.workload);
    let deciding = match &judgement.reason {
        Reason::Rule(deciding) => Some(deciding),
        _ => None,
    };
    let mut path: Vec<Step> = Vec::new();
    let mut changes: Vec<u64> = Vec::new();
    let change_of = |group: &GroupId| local.kept(&Name::group(group)).map(|kept| (kept.revision, kept.change));
    for (stored, reach) in entry.map(|entry| world.groups_of(entry)).unwrap_or_default() {
        let group = &stored.value.id;
        let (revision, change) = change_of(group).unwrap_or((stored.revision, 0));
        let decides = deciding.is_some_and(|d| d.group == *group && d.scope == reach);
        path.push(Step { group: group.to_string(), revision, scope: reach.to_string(), decides });
        changes.push(change);
    }
    if let Some(Remote::Group(remote)) = deciding.map(|deciding| &deciding.rule.remote) {
        changes.extend(change_of(remote).map(|(_, change)| change));
    }
    Side {
        workload: judgement.workload.to_string(),
        host: entry.map(|entry| entry.host.to_string()),
        direction: judgement.direction.to_string(),
        allowed: judgement.allowed,
        why: judgement.to_string(),
        rule: deciding.map(|deciding| deciding.rule.to_string()),
        path,
        change: changes.into_iter().max().filter(|change| *change > 0),
        enforced: None,
        passes: None,
        happens: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_read_or_refused() {
        for (text, expected) in [
            ("tcp/5432", Payload::tcp(5432)),
            ("udp/53", Payload::udp(53)),
            ("6/80", Payload::tcp(80)),
            ("icmp", Payload::Icmp { kind: 8, code: 0 }),
            ("icmp/3/1", Payload::Icmp { kind: 3, code: 1 }),
            ("gre", Payload::Other(47)),
            ("200", Payload::Other(200)),
        ] {
            assert_eq!(payload(text), Ok(expected), "{text}");
        }
        for text in ["", "tcp", "tcp/", "tcp/0", "tcp/65536", "tcp/1/2", "gre/1", "icmp/256", "icmp/1/2/3", "any", "nonsense/1"] {
            assert!(payload(text).is_err(), "{text}");
        }
    }
}
