//! The nearest miss: of all allows, the one that would have matched with the least different.

use std::fmt;
use std::net::IpAddr;

use crate::ids::GroupId;
use crate::model::{Workload, World};
use crate::packet::{Payload, family_of};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};

/// An allow that almost matches, and why it does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearMiss {
    pub group: GroupId,
    pub revision: u64,
    pub rule: Rule,
    /// What stands in the way, nearest first; never empty.
    pub obstacles: Vec<Obstacle>,
}

/// The order is the one of nearness: a wrong port is nearer than a wrong protocol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// The rule names a group that does not exist.
    UnknownGroup(GroupId),
    /// The remote is not in the group the rule names, but it is in these.
    NotMember {
        group: GroupId,
        remote: String,
        is_in: Vec<GroupId>,
    },
    NotInPrefixes {
        remote: IpAddr,
    },
    Port {
        port: u16,
    },
    IcmpType {
        kind: u8,
        code: u8,
    },
    /// The workload lacks the group the rule belongs to.
    NotBound {
        group: GroupId,
        workload: String,
    },
    Protocol {
        protocol: u8,
    },
    Family,
}

impl Obstacle {
    fn weight(&self) -> u32 {
        match self {
            Obstacle::UnknownGroup(_) => 2,
            Obstacle::NotMember { .. } | Obstacle::Port { .. } | Obstacle::IcmpType { .. } => 3,
            Obstacle::NotInPrefixes { .. } => 4,
            Obstacle::NotBound { .. } => 5,
            Obstacle::Protocol { .. } => 6,
            Obstacle::Family => 7,
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |groups: &[GroupId]| groups.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Obstacle::UnknownGroup(group) => write!(f, "group {group} does not exist"),
            Obstacle::NotMember { remote, is_in, .. } if is_in.is_empty() => write!(f, "{remote} is in no group"),
            Obstacle::NotMember { remote, is_in, .. } => write!(f, "{remote} is in group {}", list(is_in)),
            Obstacle::NotInPrefixes { remote } => write!(f, "{remote} is not among its addresses"),
            Obstacle::Port { port } => write!(f, "the port is {port}"),
            Obstacle::IcmpType { kind, code } => write!(f, "the icmp type and code are {kind}/{code}"),
            Obstacle::NotBound { group, workload } => write!(f, "{workload} does not have group {group}"),
            Obstacle::Protocol { protocol } => match crate::text::protocol_name(*protocol) {
                Some(name) => write!(f, "the protocol is {name}"),
                None => write!(f, "the protocol is {protocol}"),
            },
            Obstacle::Family => f.write_str("the packet is of the other address family"),
        }
    }
}

impl fmt::Display for NearMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let preposition = match self.rule.direction {
            Direction::Ingress => "from",
            Direction::Egress => "to",
        };
        let traffic = self.rule.traffic.to_string().replace(' ', "/");
        write!(f, "group {} allows {traffic} {preposition} {}", self.group, self.rule.remote)?;
        for obstacle in &self.obstacles {
            write!(f, "; {obstacle}")?;
        }
        Ok(())
    }
}

pub(super) fn nearest(
    world: &World,
    workload: &Workload,
    direction: Direction,
    remote: IpAddr,
    payload: &Payload,
) -> Option<NearMiss> {
    let mut best: Option<(u32, NearMiss)> = None;
    for stored in world.catalogue.groups.values() {
        let group = &stored.value;
        let has = !world.reaches(group, workload).is_empty();
        for rule in group.distinct_rules() {
            if rule.action != Action::Allow || rule.direction != direction {
                continue;
            }
            let mut obstacles = Vec::new();
            if !has {
                obstacles.push(Obstacle::NotBound { group: group.id.clone(), workload: workload.id.to_string() });
            }
            obstacles.extend(traffic_obstacle(rule, remote, payload));
            obstacles.extend(remote_obstacle(world, workload, rule, remote));
            // An allow of a foreign group that misses in yet another way has nothing to do with the question.
            if !has && obstacles.len() > 1 {
                continue;
            }
            let weight: u32 = obstacles.iter().map(Obstacle::weight).sum();
            if best.as_ref().is_none_or(|(least, _)| weight < *least) {
                obstacles.sort();
                let near = NearMiss { group: group.id.clone(), revision: stored.revision, rule: rule.clone(), obstacles };
                best = Some((weight, near));
            }
        }
    }
    best.map(|(_, near)| near)
}

fn traffic_obstacle(rule: &Rule, remote: IpAddr, payload: &Payload) -> Option<Obstacle> {
    let family = family_of(remote);
    if rule.family.is_some_and(|of| of != family) {
        return Some(Obstacle::Family);
    }
    if rule.traffic.matches(family, payload) {
        return None;
    }
    let protocol = payload.protocol(family);
    match (&rule.traffic, payload) {
        (Traffic::Ports { protocol: of, .. }, Payload::Ports { destination, .. }) if *of == protocol => {
            Some(Obstacle::Port { port: *destination })
        }
        (Traffic::Icmp { .. }, Payload::Icmp { kind, code }) => Some(Obstacle::IcmpType { kind: *kind, code: *code }),
        _ => Some(Obstacle::Protocol { protocol }),
    }
}

fn remote_obstacle(world: &World, workload: &Workload, rule: &Rule, remote: IpAddr) -> Option<Obstacle> {
    if world.remote_matches(rule, remote) {
        return None;
    }
    let Remote::Group(group) = &rule.remote else { return Some(Obstacle::NotInPrefixes { remote }) };
    if !world.catalogue.groups.contains_key(group) {
        return Some(Obstacle::UnknownGroup(group.clone()));
    }
    // The workload behind the address, first on the judged one's own network.
    let owns = |w: &&std::sync::Arc<Workload>| w.addresses.iter().any(|prefix| prefix.contains(remote));
    let all = world.registry.workloads.values();
    let owner = all.clone().filter(owns).find(|w| w.network == workload.network).or_else(|| all.clone().find(owns));
    let is_in = match owner {
        Some(owner) => {
            let mut ids: Vec<GroupId> = world.groups_of(owner).into_iter().map(|(g, _)| g.value.id.clone()).collect();
            ids.dedup();
            ids
        }
        None => {
            let groups = world.catalogue.groups.values().filter(|g| world.is_member(&g.value, remote));
            groups.map(|g| g.value.id.clone()).collect()
        }
    };
    let remote = owner.map_or_else(|| remote.to_string(), |owner| owner.id.to_string());
    Some(Obstacle::NotMember { group: group.clone(), remote, is_in })
}
