//! Groups: rules as lines or mappings, bindings, static members.

use super::{Node, reader::Reader};
use crate::doc::Phases;
use crate::ids::{GroupId, SourceId};
use crate::model::{Binding, Group, GroupRule, Owner, Selector, Target, are_internet, is_internet, parse_selector};
use crate::net::{Family, PortSet};
use crate::normal::Impossible;
use crate::packet::{ICMP, ICMPV6, has_ports};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};
use crate::text::{
    FieldError, PORTS_MAX, REMOTES_MAX, address_list, icmp_number, parse_rule, port_list, protocol_number, shorten,
};
use crate::topic::Scope;

/// Longest name in characters.
pub const NAME_LEN_MAX: usize = 255;
/// Longest description of a rule in characters.
pub const DESCRIPTION_LEN_MAX: usize = 1_000;
/// Most rules in one group.
pub const GROUP_RULES_MAX: usize = 10_000;
/// Most bindings of one group.
pub const BINDINGS_MAX: usize = 100_000;
/// Most static members of one group.
pub const STATIC_MEMBERS_MAX: usize = 100_000;

const FIELDS: &[&str] =
    &["kind", "id", "name", "stateful", "rules", "bindings", "members", "owner", "internet_member", "healthy_members"];

pub(super) fn read(reader: &mut Reader, node: &Node) -> Option<Group> {
    reader.map(node, "", FIELDS)?;
    kind(reader, node, "group");
    let id: Option<GroupId> = reader.parsed(node.get("id"), "id");
    let id = reader.required(id, node.get("id"), "id", "the group's id");
    let name = reader.line(node.get("name"), "name", NAME_LEN_MAX);
    let stateful = reader.flag(node.get("stateful"), "stateful", true);
    let internet_member = reader.flag(node.get("internet_member"), "internet_member", false);
    let healthy_members = reader.flag(node.get("healthy_members"), "healthy_members", false);
    let owner = match reader.text(node.get("owner"), "owner") {
        None | Some("gateway") => Owner::Gateway,
        Some(source) => match SourceId::new(source.strip_prefix("source:").unwrap_or(source)) {
            Ok(source) => Owner::Source(source),
            Err(error) => {
                reader.problem("owner", error);
                Owner::Gateway
            }
        },
    };
    let mut rules = Vec::new();
    for (index, rule) in reader.list(node.get("rules"), "rules", GROUP_RULES_MAX).iter().enumerate() {
        reader.in_rule(Some(index));
        rules.extend(read_rule(reader, rule));
        reader.in_rule(None);
    }
    let mut bindings = Vec::new();
    for (index, binding) in reader.list(node.get("bindings"), "bindings", BINDINGS_MAX).iter().enumerate() {
        bindings.extend(read_binding(reader, binding, &format!("bindings[{index}]")));
    }
    let members = reader.prefixes(node.get("members"), "members", STATIC_MEMBERS_MAX);
    if !internet_member && are_internet(members.iter().copied()) {
        let wide = members.iter().find(|m| is_internet(**m)).map_or("all prefixes together".to_owned(), ToString::to_string);
        reader
            .problem("members", format!("{wide} makes the internet a member: name what is meant, or set internet_member: true"));
    }
    let id = id?;
    let name = name.unwrap_or_else(|| id.to_string());
    Some(Group { id, name, stateful, rules, bindings, members, owner, internet_member, healthy_members })
}

pub(super) fn kind(reader: &mut Reader, node: &Node, expected: &str) {
    match reader.text(node.get("kind"), "kind") {
        Some(kind) if kind != expected => reader.problem("kind", format!("is {:?}: write {expected}", shorten(kind))),
        _ => {}
    }
}

const RULE_FIELDS: &[&str] =
    &["rule", "action", "direction", "family", "protocol", "ports", "icmp_type", "icmp_code", "remote", "log", "description"];

fn read_rule(reader: &mut Reader, node: &Node) -> Option<GroupRule> {
    if let Node::Text(line) = node {
        return match parse_rule(line) {
            Ok(rule) => Some(rule.into()),
            Err(errors) => {
                reader.field_errors(errors);
                None
            }
        };
    }
    reader.map(node, "", RULE_FIELDS)?;
    let description = reader.line(node.get("description"), "description", DESCRIPTION_LEN_MAX).unwrap_or_default();
    if let Some(line) = node.get("rule") {
        let line = reader.text(Some(line), "rule")?;
        for field in RULE_FIELDS.iter().filter(|f| !["rule", "description"].contains(*f)) {
            if node.get(field).is_some() {
                reader.problem(field, "stands beside rule, which says it all: keep one of them");
            }
        }
        return match parse_rule(line) {
            Ok(rule) => Some(GroupRule { rule, description }),
            Err(errors) => {
                reader.field_errors(errors);
                None
            }
        };
    }
    let before = reader.count();
    let action = match reader.text(node.get("action"), "action") {
        None | Some("allow") => Action::Allow,
        Some("deny") => Action::Deny,
        Some(other) => {
            reader.problem("action", format!("is {:?}: write allow or deny", shorten(other)));
            Action::Allow
        }
    };
    let direction = match reader.text(node.get("direction"), "direction") {
        Some("ingress") => Direction::Ingress,
        Some("egress") => Direction::Egress,
        other => {
            let found = other.map_or("missing".into(), |o| format!("is {:?}", shorten(o)));
            reader.problem("direction", format!("{found}: write ingress or egress"));
            Direction::Ingress
        }
    };
    let mut family = match reader.text(node.get("family"), "family") {
        None => None,
        Some("ipv4") => Some(Family::V4),
        Some("ipv6") => Some(Family::V6),
        Some(other) => {
            reader.problem("family", format!("is {:?}: write ipv4, ipv6, or leave it out for both", shorten(other)));
            None
        }
    };
    let traffic = traffic(reader, node, &mut family);
    let remote = remote(reader, node.get("remote"));
    let log = reader.flag(node.get("log"), "log", false);
    let (traffic, remote) = (traffic?, remote?);
    if reader.count() > before {
        return None;
    }
    match (Rule { action, direction, family, traffic, remote, log }).normalised() {
        Ok(rule) => Some(GroupRule { rule, description }),
        Err(error) => {
            reader.field_errors([FieldError::from(error)]);
            None
        }
    }
}

fn traffic(reader: &mut Reader, node: &Node, family: &mut Option<Family>) -> Option<Traffic> {
    let number = match node.get("protocol") {
        None | Some(Node::Null) => 0,
        Some(Node::Int(number)) => match u8::try_from(*number) {
            Ok(number) => number,
            Err(_) => {
                reader.problem("protocol", format!("protocol {number} does not exist: numbers are 0 to 255"));
                return None;
            }
        },
        other => match protocol_number(reader.text(other, "protocol")?) {
            Ok(number) => number,
            Err(error) => {
                reader.problem("protocol", error);
                return None;
            }
        },
    };
    let ports = match node.get("ports") {
        None | Some(Node::Null) => None,
        Some(node) => Some(ports(reader, node)?),
    };
    let kind = icmp(reader, node.get("icmp_type"), "icmp_type", "type")?;
    let code = icmp(reader, node.get("icmp_code"), "icmp_code", "code")?;
    let is_icmp = number == ICMP || number == ICMPV6;
    if !is_icmp && (node.get("icmp_type").is_some() || node.get("icmp_code").is_some()) {
        reader.problem("icmp_type", "stands without protocol icmp: leave it out, or write protocol: icmp");
        return None;
    }
    if number == ICMPV6 {
        if *family == Some(Family::V4) {
            reader.field_errors([FieldError::from(Impossible::Icmpv6InV4)]);
            return None;
        }
        *family = Some(Family::V6);
    }
    match ports {
        Some(ports) if has_ports(number) => Some(Traffic::Ports { protocol: number, ports }),
        Some(_) => {
            reader.problem("ports", format!("protocol {number} has no ports: leave them out, or write protocol: tcp or udp"));
            None
        }
        None if is_icmp => Some(Traffic::Icmp { kind, code }),
        None => Some(Traffic::Protocol(number)),
    }
}

fn ports(reader: &mut Reader, node: &Node) -> Option<PortSet> {
    let text = match node {
        Node::Int(number) => number.to_string(),
        Node::Text(text) => text.clone(),
        Node::List(list) if !list.is_empty() && list.len() <= PORTS_MAX => {
            let items = list.iter().map(|item| match item {
                Node::Int(number) => Some(number.to_string()),
                Node::Text(text) => Some(text.clone()),
                _ => None,
            });
            match items.collect::<Option<Vec<String>>>() {
                Some(items) => items.join(","),
                None => {
                    reader.problem("ports", "an item is neither a number nor a string: write 443 or 8000-8999");
                    return None;
                }
            }
        }
        Node::List(list) => {
            reader.problem("ports", format!("{} items: write 1 to {PORTS_MAX}", list.len()));
            return None;
        }
        other => {
            reader.problem("ports", format!("is {}: write 443, \"80,443\" or [80, 8000-8999]", other.kind()));
            return None;
        }
    };
    match port_list(&text) {
        Ok(ports) => Some(ports),
        Err(errors) => {
            errors.into_iter().for_each(|error| reader.problem("ports", error));
            None
        }
    }
}

/// Outer `None`: a problem was told.
fn icmp(reader: &mut Reader, node: Option<&Node>, field: &str, what: &str) -> Option<Option<u8>> {
    let text = match node {
        None | Some(Node::Null) => return Some(None),
        Some(Node::Int(number)) => number.to_string(),
        Some(other) => reader.text(Some(other), field)?.to_string(),
    };
    icmp_number(&text, what).map_err(|error| reader.problem(field, error)).ok()
}

/// `any`, `group:ID`, or addresses as one comma-separated string or a list. Missing means any.
fn remote(reader: &mut Reader, node: Option<&Node>) -> Option<Remote> {
    let items: Vec<&str> = match node {
        None | Some(Node::Null) => return Some(Remote::Any),
        Some(Node::List(list)) => {
            let texts: Vec<&str> = list.iter().filter_map(|item| reader.text(Some(item), "remote")).collect();
            if texts.len() < list.len() || list.is_empty() {
                reader.problem("remote", "every item must be a string, and there must be one: write any, group:ID or addresses");
                return None;
            }
            texts
        }
        other => reader.text(other, "remote")?.split(',').map(str::trim).collect(),
    };
    if items.len() > REMOTES_MAX {
        reader.problem("remote", format!("more than {REMOTES_MAX} items: use prefixes, or a group with static members"));
        return None;
    }
    match items[..] {
        ["any"] => return Some(Remote::Any),
        [one] if one.starts_with("group:") => {
            return match GroupId::new(&one["group:".len()..]) {
                Ok(id) => Some(Remote::Group(id)),
                Err(error) => {
                    reader.problem("remote", error);
                    None
                }
            };
        }
        _ => {}
    }
    if items.iter().any(|item| *item == "any" || item.starts_with("group:")) {
        reader.problem("remote", "two kinds of remote at once: write any, one group, or addresses; use several rules for more");
        return None;
    }
    match address_list(items) {
        Ok(set) => Some(Remote::Addresses(set)),
        Err(errors) => {
            errors.into_iter().for_each(|error| reader.problem("remote", error));
            None
        }
    }
}

pub(super) fn phases(reader: &mut Reader, text: Option<&str>, field: &str) -> Option<Phases> {
    match text {
        None | Some("both") => Some(Phases::BOTH),
        Some("running") => Some(Phases::RUNNING),
        Some("staging") => Some(Phases::STAGING),
        Some(other) => {
            reader.problem(field, format!("phase is {:?}: write running, staging or both", shorten(other)));
            None
        }
    }
}

/// `global`, `space:ID`, `app:ID` or `workload:ID`.
fn target(text: &str) -> Result<Target, String> {
    let target = match text.split_once(':') {
        None if text == "global" => Ok(Target::Global),
        Some(("space", id)) => id.parse().map(Target::Space),
        Some(("app", id)) => id.parse().map(Target::App),
        Some(("workload", id)) => id.parse().map(Target::Workload),
        _ => return Err(format!("{:?} is not a target: write global, space:ID, app:ID, workload:ID or labels", shorten(text))),
    };
    target.map_err(|error| error.to_string())
}

fn read_binding(reader: &mut Reader, node: &Node, field: &str) -> Option<Binding> {
    if let Node::Text(text) = node {
        let mut words = text.split_whitespace();
        let (first, phase, extra) = (words.next().unwrap_or(""), words.next(), words.next());
        if extra.is_some() {
            reader.problem(field, "has more than a target and a phase: write space:ID staging");
        }
        let target = target(first).map_err(|error| reader.problem(field, error)).ok();
        let phases = phases(reader, phase, field);
        return Some(Binding { target: target?, phases: phases? });
    }
    reader.map(node, field, &["target", "labels", "within", "phase"])?;
    let phase = reader.text(node.get("phase"), field);
    let phases = phases(reader, phase, field);
    let to = reader.text(node.get("target"), field);
    let labels = reader.text(node.get("labels"), field);
    let within = reader.text(node.get("within"), field);
    let target = match (to, labels) {
        (Some(to), None) if within.is_none() => target(to).map_err(|error| reader.problem(field, error)).ok(),
        (None, Some(labels)) => {
            let within = match target(within.unwrap_or("global")).map(|t| t.scope()) {
                Ok(Some(scope)) => Some(scope),
                Ok(None) => {
                    reader.problem(field, "within is a workload: write global, space:ID or app:ID");
                    None
                }
                Err(error) => {
                    reader.problem(field, error);
                    None
                }
            };
            match parse_selector(labels) {
                Ok(requirements) => within.map(|scope| Target::Selector(Selector::new(scope, requirements))),
                Err(errors) => {
                    errors.into_iter().for_each(|error| reader.problem(field, error));
                    None
                }
            }
        }
        _ => {
            reader.problem(field, "says not exactly one place: write target, or labels with an optional within");
            None
        }
    };
    Some(Binding { target: target?, phases: phases? })
}

pub(super) fn target_text(target: &Target) -> Option<String> {
    Some(match target {
        Target::Global => "global".into(),
        Target::Space(id) => format!("space:{id}"),
        Target::App(id) => format!("app:{id}"),
        Target::Workload(id) => format!("workload:{id}"),
        Target::Selector(_) => return None,
    })
}

pub(super) fn scope_text(scope: &Scope) -> String {
    match scope {
        Scope::Global => "global".into(),
        Scope::Space(id) => format!("space:{id}"),
        Scope::App(id) => format!("app:{id}"),
    }
}
