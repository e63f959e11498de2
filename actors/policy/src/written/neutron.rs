//! Neutron's security groups, address groups and ports.
//!
//! Equal meaning becomes equal data: `6` is `tcp`, `0.0.0.0/0` is nothing, ports 1 to 65535 are nothing, protocol 0 is any. A
//! port names its groups itself. Host names may hold dots and be long, ids may not: see [`HostId::of_name`].

use super::group::{DESCRIPTION_LEN_MAX, GROUP_RULES_MAX, NAME_LEN_MAX, STATIC_MEMBERS_MAX};
use super::{Node, Problem, reader::Reader};
use crate::doc::Enforced;
use crate::ids::{GroupId, HostId, NetworkId, SourceId, SpaceId, WorkloadId};
use crate::model::{Group, GroupRule, Owner, Workload};
use crate::net::{AddressSet, Family, Span};
use crate::normal::{Impossible, UNTRACKED, is_every_port};
use crate::packet::{DCCP, ICMP, ICMPV6, has_ports};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};
use crate::text::{FieldError, prefix_text, protocol_number, shorten};

/// Most addresses, pairs or groups of one port.
const PORT_LIST_MAX: usize = 10_000;

fn own_id(source: &SourceId, id: &str) -> Result<GroupId, crate::ids::InvalidId> {
    GroupId::new(&format!("{source}-{id}"))
}

/// Converts one of `GET /v2.0/security-groups`. Rules that mean the same collapse.
pub fn group(source: &SourceId, node: &Node, index: usize) -> Result<Group, Vec<Problem>> {
    let mut reader = Reader::new("security group", node, index);
    let group = read_group(&mut reader, source, node);
    reader.finish(group)
}

fn read_group(reader: &mut Reader, source: &SourceId, node: &Node) -> Option<Group> {
    let id = read_id(reader, source, node);
    let name = reader.line(node.get("name"), "name", NAME_LEN_MAX);
    let stateful = reader.flag(node.get("stateful"), "stateful", true);
    let mut rules: Vec<GroupRule> = Vec::new();
    let list = reader.list(node.get("security_group_rules"), "security_group_rules", GROUP_RULES_MAX);
    for (index, rule) in list.iter().enumerate() {
        reader.in_rule(Some(index));
        rules.extend(read_rule(reader, source, rule).filter(|rule| rules.iter().all(|held| held.rule != rule.rule)));
        reader.in_rule(None);
    }
    let mut group = Group::new(id?);
    group.name = name.unwrap_or(group.name);
    group.stateful = stateful;
    group.rules = rules;
    group.owner = Owner::Source(source.clone());
    Some(group)
}

fn read_id(reader: &mut Reader, source: &SourceId, node: &Node) -> Option<GroupId> {
    let id = reader.text(node.get("id"), "id");
    let id = reader.required(id, node.get("id"), "id", "the id")?;
    own_id(source, id).map_err(|error| reader.problem("id", error)).ok()
}

/// Converts one of `GET /v2.0/address-groups`: a group of static members.
pub fn address_group(source: &SourceId, node: &Node, index: usize) -> Result<Group, Vec<Problem>> {
    let mut reader = Reader::new("address group", node, index);
    let id = read_id(&mut reader, source, node);
    let members = reader.prefixes(node.get("addresses"), "addresses", STATIC_MEMBERS_MAX);
    let group = id.map(|id| {
        let mut group = Group::new(id);
        group.members = members;
        group.owner = Owner::Source(source.clone());
        // An address group is written by hand; there `0.0.0.0/0` says what it means.
        group.internet_member = true;
        group
    });
    reader.finish(group)
}

/// Converts one rule.
pub fn rule(source: &SourceId, node: &Node) -> Result<GroupRule, Vec<Problem>> {
    let mut reader = Reader::new("rule", &Node::Null, 0);
    let rule = read_rule(&mut reader, source, node);
    reader.finish(rule)
}

fn read_rule(reader: &mut Reader, source: &SourceId, node: &Node) -> Option<GroupRule> {
    let before = reader.count();
    if !matches!(node, Node::Map(_)) {
        reader.problem("", format!("is {}: write a rule", node.kind()));
        return None;
    }
    let direction = match reader.text(node.get("direction"), "direction") {
        Some("ingress") => Direction::Ingress,
        Some("egress") => Direction::Egress,
        other => {
            let found = other.map_or("missing".to_string(), |o| format!("is {:?}", shorten(o)));
            reader.problem("direction", format!("{found}: write ingress or egress"));
            Direction::Ingress
        }
    };
    let family = match reader.text(node.get("ethertype"), "ethertype") {
        None | Some("IPv4") => Family::V4,
        Some("IPv6") => Family::V6,
        Some(other) => {
            reader.problem("ethertype", format!("is {:?}: write IPv4 or IPv6", shorten(other)));
            return None;
        }
    };
    let traffic = read_traffic(reader, node, family);
    let remote = read_remote(reader, source, node, family);
    let description = reader.remark(node.get("description"), "description", DESCRIPTION_LEN_MAX);
    let (traffic, remote) = (traffic?, remote?);
    if reader.count() > before {
        return None;
    }
    let rule = Rule { action: Action::Allow, direction, family: Some(family), traffic, remote, log: false };
    match rule.normalised() {
        Ok(rule) => Some(GroupRule { rule, description }),
        Err(error) => {
            reader.field_errors([FieldError::from(error)]);
            None
        }
    }
}

fn read_traffic(reader: &mut Reader, node: &Node, family: Family) -> Option<Traffic> {
    let protocol = match node.get("protocol") {
        None | Some(Node::Null) => None,
        Some(Node::Int(number)) => Some(number.to_string()),
        other => Some(reader.text(other, "protocol")?.to_ascii_lowercase()),
    };
    let number = match protocol.as_deref().map_or(Ok(0), protocol_number) {
        Ok(number) => number,
        Err(error) => {
            reader.problem("protocol", error);
            return None;
        }
    };
    if number == ICMPV6 && family == Family::V4 {
        reader.field_errors([FieldError::from(Impossible::Icmpv6InV4)]);
        return None;
    }
    let is_icmp = number == ICMP || number == ICMPV6;
    let max = if is_icmp { 255 } else { i64::from(u16::MAX) };
    let min_allowed = i64::from(!is_icmp);
    let min = read_number(reader, node.get("port_range_min"), "port_range_min", min_allowed, max)?;
    let max = read_number(reader, node.get("port_range_max"), "port_range_max", min_allowed, max)?;
    if is_icmp {
        if min.is_none() && max.is_some() {
            reader.problem("port_range_max", "is an icmp code without a type: give the type as port_range_min");
            return None;
        }
        return Some(Traffic::Icmp { kind: min.map(|n| n as u8), code: max.map(|n| n as u8) });
    }
    let (min, max) = match (min, max) {
        (None, None) => return Some(Traffic::Protocol(number)),
        (Some(min), Some(max)) => (min as u16, max as u16),
        _ => {
            reader.problem("port_range_min", "only one of port_range_min and port_range_max is given: give both");
            return None;
        }
    };
    if number == 0 {
        reader.problem("protocol", "missing but ports are given: write tcp or udp, or leave the ports out");
        return None;
    }
    if !has_ports(number) {
        reader.problem("port_range_min", format!("protocol {number} has no ports: leave them out"));
        return None;
    }
    let Some(span) = Span::new(min, max) else {
        reader.problem("port_range_min", format!("{min} is above port_range_max {max}: swap them"));
        return None;
    };
    let ports = [span].into_iter().collect();
    if number == DCCP && !is_every_port(&ports) {
        reader.problem("port_range_min", UNTRACKED);
        return None;
    }
    Some(Traffic::Ports { protocol: number, ports })
}

/// Outer `None`: a problem was told.
fn read_number(reader: &mut Reader, node: Option<&Node>, field: &str, min: i64, max: i64) -> Option<Option<i64>> {
    let number = match node {
        None | Some(Node::Null) => return Some(None),
        Some(Node::Int(number)) => Some(*number),
        Some(Node::Text(text)) => text.parse().ok(),
        Some(_) => None,
    };
    match number {
        Some(number) if (min..=max).contains(&number) => Some(Some(number)),
        _ => {
            reader.problem(field, format!("is not a number from {min} to {max}: correct it, or leave it out for any"));
            None
        }
    }
}

fn read_remote(reader: &mut Reader, source: &SourceId, node: &Node, family: Family) -> Option<Remote> {
    const KINDS: [&str; 3] = ["remote_ip_prefix", "remote_group_id", "remote_address_group_id"];
    let given: Vec<&str> = KINDS.into_iter().filter(|field| !matches!(node.get(field), None | Some(Node::Null))).collect();
    match given[..] {
        [] => Some(Remote::Any),
        ["remote_ip_prefix"] => {
            let text = reader.text(node.get("remote_ip_prefix"), "remote_ip_prefix")?;
            match prefix_text(text) {
                Ok(prefix) if prefix.family() == family => Some(Remote::Addresses(AddressSet::from_prefixes([prefix]))),
                Ok(prefix) => {
                    reader.problem("remote_ip_prefix", format!("{prefix} is not {family}: match it with the ethertype"));
                    None
                }
                Err(error) => {
                    reader.problem("remote_ip_prefix", error);
                    None
                }
            }
        }
        [field] => {
            let id = reader.text(node.get(field), field)?;
            own_id(source, id).map(Remote::Group).map_err(|error| reader.problem(field, error)).ok()
        }
        _ => {
            reader.problem(given[0], format!("two kinds of remote at once ({}): give one", given.join(", ")));
            None
        }
    }
}

/// Converts one of `GET /v2.0/ports`. `None`: it is bound to no host.
///
/// Without port security, and on trusted `network:` ports, nothing is filtered. A port that does not say where it is bound is not an unbound
/// one: whoever may not see the binding is shown none.
pub fn port(source: &SourceId, node: &Node, index: usize) -> Result<Option<Workload>, Vec<Problem>> {
    let mut reader = Reader::new("port", node, index);
    if node.get("binding:host_id") == Some(&Node::from("")) {
        return Ok(None);
    }
    let workload = read_port(&mut reader, source, node);
    reader.finish(workload).map(Some)
}

fn read_port(reader: &mut Reader, source: &SourceId, node: &Node) -> Option<Workload> {
    let id = reader.text(node.get("id"), "id");
    let id = reader.required(id, node.get("id"), "id", "the port's id");
    let id = id.and_then(|id| WorkloadId::new(&format!("{source}-{id}")).map_err(|e| reader.problem("id", e)).ok());
    let host = reader.text(node.get("binding:host_id"), "binding:host_id");
    let host =
        reader.required(host, node.get("binding:host_id"), "binding:host_id", "a host, or \"\" where it is bound to none")?;
    let host = HostId::of_name(host).map_err(|error| reader.problem("binding:host_id", error)).ok();
    let network = reader.text(node.get("network_id"), "network_id");
    let network = reader.required(network, node.get("network_id"), "network_id", "the port's network");
    let network = network.and_then(|id| NetworkId::new(id).map_err(|error| reader.problem("network_id", error)).ok());
    let space = reader.text(node.get("project_id"), "project_id").filter(|id| !id.is_empty());
    let space = space.and_then(|id| SpaceId::new(id).map_err(|error| reader.problem("project_id", error)).ok());
    let addresses = |reader: &mut Reader, field: &str| {
        let list = reader.list(node.get(field), field, PORT_LIST_MAX);
        let list: Vec<Node> = list.iter().map(|item| item.get("ip_address").cloned().unwrap_or(Node::Null)).collect();
        reader.prefixes(Some(&Node::List(list)), field, PORT_LIST_MAX)
    };
    let own = addresses(reader, "fixed_ips");
    let pairs = addresses(reader, "allowed_address_pairs");
    let secured = reader.flag(node.get("port_security_enabled"), "port_security_enabled", true);
    let trusted = reader.text(node.get("device_owner"), "device_owner").is_some_and(|owner| owner.starts_with("network:"));
    let mut workload = Workload::new(id?, host?, network?);
    for group in reader.list(node.get("security_groups"), "security_groups", PORT_LIST_MAX) {
        match reader.text(Some(group), "security_groups").map(|id| own_id(source, id)) {
            Some(Ok(id)) => {
                workload.groups.insert(id);
            }
            Some(Err(error)) => reader.problem("security_groups", error),
            None => {}
        }
    }
    workload.addresses = own;
    workload.pairs = pairs;
    workload.space = space;
    workload.enforced = (!secured || trusted).then_some(Enforced { ingress: false, egress: false });
    Some(workload)
}
