//! Cloud Foundry's application security groups.
//!
//! Rules are egress allows. `globally_enabled` and the space relationships become bindings; a group that is global and bound to
//! a space too counts once, because the union of its bindings does. `-1` as ICMP type or code means any.

use super::group::{BINDINGS_MAX, DESCRIPTION_LEN_MAX, GROUP_RULES_MAX, NAME_LEN_MAX};
use super::{Node, Problem, reader::Reader};
use crate::doc::{Enforced, Phases};
use crate::ids::{GroupId, SourceId, SpaceId};
use crate::model::{Binding, Group, GroupRule, Owner, Target};
use crate::packet::{TCP, UDP};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};
use crate::text::{FieldError, REMOTES_MAX, address_list, port_list, shorten};

/// Cloud Foundry polices what applications send, not what they receive.
pub const ENFORCED: Enforced = Enforced { ingress: false, egress: true };

const RULE_FIELDS: &[&str] = &["protocol", "destination", "ports", "type", "code", "description", "log"];

/// Converts one resource of `GET /v3/security_groups`. Fields of the resource that we do not need are ignored; those of a rule
/// are not, because an unknown one could narrow it.
pub fn group(source: &SourceId, resource: &Node, index: usize) -> Result<Group, Vec<Problem>> {
    let mut reader = Reader::new("security group", resource, index);
    let group = read(&mut reader, source, resource);
    reader.finish(group)
}

fn read(reader: &mut Reader, source: &SourceId, resource: &Node) -> Option<Group> {
    let guid = reader.text(resource.get("guid"), "guid");
    let guid = reader.required(guid, resource.get("guid"), "guid", "the group's guid");
    let id = guid.and_then(|guid| GroupId::new(&format!("{source}-{guid}")).map_err(|error| reader.problem("guid", error)).ok());
    let name = reader.line(resource.get("name"), "name", NAME_LEN_MAX);
    let name = reader.required(name, resource.get("name"), "name", "the group's name");
    let mut rules = Vec::new();
    if matches!(resource.get("rules"), None | Some(Node::Null)) {
        reader.problem("rules", "missing: write a list, empty if nothing is allowed");
    }
    for (index, rule) in reader.list(resource.get("rules"), "rules", GROUP_RULES_MAX).iter().enumerate() {
        reader.in_rule(Some(index));
        rules.extend(read_rule(reader, rule));
        reader.in_rule(None);
    }
    let mut bindings = Vec::new();
    let globally = told(reader, Some(resource), "globally_enabled", "globally_enabled");
    let related = told(reader, Some(resource), "relationships", "relationships");
    for (field, spaces, phases) in
        [("running", "running_spaces", Phases::RUNNING), ("staging", "staging_spaces", Phases::STAGING)]
    {
        let at = format!("globally_enabled.{field}");
        let enabled = told(reader, globally, field, &at);
        if reader.flag(enabled, &at, false) {
            bindings.push(Binding { target: Target::Global, phases });
        }
        let at = format!("relationships.{spaces}");
        let listed = told(reader, related, spaces, &at);
        let data = told(reader, listed, "data", &format!("{at}.data"));
        // Two lists of spaces make one list of bindings.
        for (index, space) in reader.list(data, spaces, BINDINGS_MAX / 2 - 1).iter().enumerate() {
            let at = format!("relationships.{spaces}.data[{index}].guid");
            let guid = reader.text(space.get("guid"), &at);
            match reader.required(guid, space.get("guid"), &at, "the space's guid").map(SpaceId::new) {
                Some(Ok(space)) => bindings.push(Binding { target: Target::Space(space), phases }),
                Some(Err(error)) => reader.problem(&at, error),
                None => {}
            }
        }
    }
    let mut group = Group::new(id?);
    group.name = name?;
    group.rules = rules;
    group.bindings = bindings;
    group.owner = Owner::Source(source.clone());
    Some(group)
}

/// A field of what was told. That it is missing is a problem: a group whose bindings are not told is not one without.
fn told<'n>(reader: &mut Reader, within: Option<&'n Node>, field: &str, at: &str) -> Option<&'n Node> {
    let found = within?.get(field).filter(|node| !matches!(node, Node::Null));
    if found.is_none() {
        reader.problem(at, "missing: nothing is known about where the group applies");
    }
    found
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    All,
    Ports(u8),
    Icmp,
    Icmpv6,
}

/// Converts one rule.
pub fn rule(node: &Node) -> Result<GroupRule, Vec<Problem>> {
    let mut reader = Reader::new("rule", &Node::Null, 0);
    let rule = read_rule(&mut reader, node);
    reader.finish(rule)
}

fn read_rule(reader: &mut Reader, node: &Node) -> Option<GroupRule> {
    let before = reader.count();
    reader.map(node, "", RULE_FIELDS)?;
    let kind = match reader.text(node.get("protocol"), "protocol") {
        Some("tcp") => Some(Kind::Ports(TCP)),
        Some("udp") => Some(Kind::Ports(UDP)),
        Some("icmp") => Some(Kind::Icmp),
        Some("icmpv6") => Some(Kind::Icmpv6),
        Some("all") => Some(Kind::All),
        other => {
            let found = other.map_or("missing".to_string(), |o| format!("is {:?}", shorten(o)));
            reader.problem("protocol", format!("{found}: write tcp, udp, icmp, icmpv6 or all"));
            None
        }
    };
    let destination = destination(reader, node.get("destination"), kind);
    let traffic = traffic(reader, node, kind);
    let log = reader.flag(node.get("log"), "log", false);
    let description = reader.remark(node.get("description"), "description", DESCRIPTION_LEN_MAX);
    let (traffic, remote) = (traffic?, destination?);
    if reader.count() > before {
        return None;
    }
    let rule = Rule { action: Action::Allow, direction: Direction::Egress, family: None, traffic, remote, log };
    match rule.normalised() {
        Ok(rule) => Some(GroupRule { rule, description }),
        Err(error) => {
            reader.field_errors([FieldError::from(error)]);
            None
        }
    }
}

fn destination(reader: &mut Reader, node: Option<&Node>, kind: Option<Kind>) -> Option<Remote> {
    let text = reader.text(node, "destination");
    let text = reader.required(text, node, "destination", "an address, a prefix, a range, or a comma-separated list")?;
    if text.chars().any(char::is_whitespace) {
        reader.problem("destination", "contains whitespace: remove it");
        return None;
    }
    if text.split(',').nth(REMOTES_MAX).is_some() {
        reader.problem("destination", format!("more than {REMOTES_MAX} items: split the rule"));
        return None;
    }
    let set = match address_list(text.split(',')) {
        Ok(set) => set,
        Err(errors) => {
            errors.into_iter().for_each(|error| reader.problem("destination", error));
            return None;
        }
    };
    if kind == Some(Kind::Icmp) && !set.v6.is_empty() {
        reader.problem("destination", "is IPv6 with protocol icmp: write icmpv6, or IPv4 destinations");
    }
    if kind == Some(Kind::Icmpv6) && !set.v4.is_empty() {
        reader.problem("destination", "is IPv4 with protocol icmpv6: write icmp, or IPv6 destinations");
    }
    Some(Remote::Addresses(set))
}

fn traffic(reader: &mut Reader, node: &Node, kind: Option<Kind>) -> Option<Traffic> {
    let kind = kind?;
    let given = |field: &str| !matches!(node.get(field), None | Some(Node::Null));
    if !matches!(kind, Kind::Ports(_)) && given("ports") {
        reader.problem("ports", "given for a protocol without ports: leave them out, or write tcp or udp");
    }
    // Cloud Controller takes a type and a code with every protocol, and heeds them for icmp only.
    match kind {
        Kind::All => Some(Traffic::Any),
        Kind::Ports(protocol) => {
            let text = reader.text(node.get("ports"), "ports");
            let text = reader.required(text, node.get("ports"), "ports", "443, 80,443 or 8080-8090")?;
            match port_list(text) {
                Ok(ports) => Some(Traffic::Ports { protocol, ports }),
                Err(errors) => {
                    errors.into_iter().for_each(|error| reader.problem("ports", error));
                    None
                }
            }
        }
        Kind::Icmp | Kind::Icmpv6 => {
            let kind = icmp(reader, node.get("type"), "type");
            let code = icmp(reader, node.get("code"), "code");
            Some(Traffic::Icmp { kind: kind?, code: code? })
        }
    }
}

/// Outer `None`: a problem was told.
fn icmp(reader: &mut Reader, node: Option<&Node>, field: &str) -> Option<Option<u8>> {
    match node {
        Some(Node::Int(-1)) => Some(None),
        Some(Node::Int(number)) if (0..=255).contains(number) => Some(Some(*number as u8)),
        other => {
            let found = match other {
                None | Some(Node::Null) => "missing".to_string(),
                Some(Node::Int(number)) => format!("is {number}"),
                Some(other) => format!("is {}", other.kind()),
            };
            reader.problem(field, format!("{found}: write a number from 0 to 255, or -1 for any"));
            None
        }
    }
}
