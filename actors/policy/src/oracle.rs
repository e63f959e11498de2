//! Verdict and explanation, written straight from the semantics in [`model`](crate::model): plain loops over catalogue and
//! registry, no index, nothing shared with the compiler. It is slow and obviously right, and so it is the oracle of every packet
//! test.
//!
//! A flow has two judges: the sender's egress and the receiver's ingress. Both must allow it. An end that is no workload of ours
//! is not judged.

mod near;

use std::fmt;
use std::net::IpAddr;

pub use near::NearMiss;

use crate::ids::{GroupId, NetworkId, WorkloadId};
use crate::model::{Group, Stored, Target, Tier, Workload, World};
use crate::packet::{Payload, family_of};
use crate::rule::{Action, Direction, Remote, Rule};

/// Why a workload has a group.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    Binding(Target),
    /// The registry entry names the group.
    Entry,
}

impl Reach {
    /// When the group's allows are tried.
    pub fn tier(&self) -> Tier {
        match self {
            Reach::Binding(target) => target.tier(),
            Reach::Entry => Tier::Workload,
        }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reach::Binding(Target::Global) => f.write_str("global"),
            Reach::Binding(Target::Space(id)) => write!(f, "space:{id}"),
            Reach::Binding(Target::App(id)) => write!(f, "app:{id}"),
            Reach::Binding(Target::Workload(id)) => write!(f, "workload:{id}"),
            Reach::Binding(Target::Selector(selector)) => write!(f, "labels {selector}"),
            Reach::Entry => f.write_str("the workload's own entry"),
        }
    }
}

/// The rule that decided, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deciding {
    pub group: GroupId,
    pub revision: u64,
    pub scope: Reach,
    pub rule: Rule,
    /// The rule names a group that does not exist, so it denies every remote.
    pub unknown_remote: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A rule allows or denies.
    Rule(Box<Deciding>),
    /// The direction is not enforced for this workload.
    NotEnforced,
    /// No rule allows it; what comes nearest, if anything does.
    NothingAllows(Option<Box<NearMiss>>),
    /// The workload is not registered.
    UnknownWorkload,
}

/// What one end of a flow says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    pub workload: WorkloadId,
    pub direction: Direction,
    pub allowed: bool,
    pub reason: Reason,
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workload, direction, .. } = self;
        let verdict = if self.allowed { "allowed" } else { "denied" };
        write!(f, "{verdict} at {direction} of {workload}: ")?;
        match &self.reason {
            Reason::Rule(deciding) => {
                let Deciding { group, revision, scope, rule, unknown_remote } = &**deciding;
                write!(f, "group {group} (revision {revision}, {scope}) says {rule} (in logs: {group}/{})", rule.key())?;
                if *unknown_remote {
                    f.write_str("; the group it names does not exist, so it denies every remote")
                } else {
                    Ok(())
                }
            }
            Reason::NotEnforced => write!(f, "{direction} is not enforced there"),
            Reason::NothingAllows(None) => f.write_str("no rule allows it, and none comes near"),
            Reason::NothingAllows(Some(near)) => near.fmt(f),
            Reason::UnknownWorkload => f.write_str("the workload is not registered"),
        }
    }
}

/// One end of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    Workload(WorkloadId),
    Address(IpAddr),
}

/// A flow in its original direction, with the addresses that its packets carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    pub from: End,
    pub to: End,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub payload: Payload,
}

/// Both judges' words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub allowed: bool,
    pub egress: Option<Judgement>,
    pub ingress: Option<Judgement>,
}

impl World {
    /// Every group the workload has, with every reason, in the order in which allows are tried.
    pub fn groups_of<'w>(&'w self, workload: &Workload) -> Vec<(&'w Stored<Group>, Reach)> {
        let mut found = Vec::new();
        for stored in self.catalogue.groups.values() {
            found.extend(self.reaches(&stored.value, workload).into_iter().map(|reach| (stored, reach)));
        }
        found.sort_by(|(a, x), (b, y)| (x.tier(), &a.value.id, x).cmp(&(y.tier(), &b.value.id, y)));
        found
    }

    /// Why the workload has the group; empty if it has it not.
    pub fn reaches(&self, group: &Group, workload: &Workload) -> Vec<Reach> {
        let labels = self.labels_of(workload);
        let mut found = Vec::new();
        for binding in group.bindings.iter().filter(|b| b.phases.contains(workload.phase)) {
            let reached = match &binding.target {
                Target::Global => true,
                Target::Space(id) => workload.space.as_ref() == Some(id),
                Target::App(id) => workload.app.as_ref() == Some(id),
                Target::Workload(id) => workload.id == *id,
                Target::Selector(selector) => workload.is_in(&selector.within) && selector.matches(&labels),
            };
            if reached {
                found.push(Reach::Binding(binding.target.clone()));
            }
        }
        if workload.groups.contains(&group.id) {
            found.push(Reach::Entry);
        }
        found.dedup();
        found
    }

    /// Whether the address is a member of the group.
    pub fn is_member(&self, group: &Group, address: IpAddr) -> bool {
        group.members.iter().any(|prefix| prefix.contains(address))
            || self.registry.workloads.values().any(|workload| {
                group.counts(workload)
                    && !self.reaches(group, workload).is_empty()
                    && group.admitted(workload).any(|prefix| prefix.contains(address))
            })
    }

    /// Whether the rule's remote is the address, as the rule's action takes it.
    pub(crate) fn remote_matches(&self, rule: &Rule, address: IpAddr) -> bool {
        match &rule.remote {
            Remote::Any => true,
            Remote::Addresses(set) => set.contains(address),
            Remote::Group(id) => match self.catalogue.groups.get(id) {
                Some(group) => self.is_member(&group.value, address),
                None => rule.action == Action::Deny,
            },
        }
    }

    /// Whether replies of allowed flows pass by themselves.
    pub fn is_stateful(&self, workload: &Workload) -> bool {
        let groups = self.groups_of(workload);
        groups.is_empty() || groups.iter().any(|(group, _)| group.value.stateful)
    }

    /// What the workload's policy in one direction says of traffic with a remote.
    pub fn judge(&self, workload: &WorkloadId, direction: Direction, remote: IpAddr, payload: &Payload) -> Judgement {
        let judgement = |allowed, reason| Judgement { workload: workload.clone(), direction, allowed, reason };
        let Some(entry) = self.registry.workloads.get(workload) else { return judgement(false, Reason::UnknownWorkload) };
        let enforced = self.enforced_of(entry);
        let is_enforced = match direction {
            Direction::Ingress => enforced.ingress,
            Direction::Egress => enforced.egress,
        };
        if !is_enforced {
            return judgement(true, Reason::NotEnforced);
        }
        let groups = self.groups_of(entry);
        for action in [Action::Deny, Action::Allow] {
            for (group, scope) in &groups {
                for rule in group.value.distinct_rules() {
                    if rule.action == action
                        && rule.matches_payload(direction, family_of(remote), payload)
                        && self.remote_matches(rule, remote)
                    {
                        let unknown_remote = matches!(&rule.remote, Remote::Group(id) if !self.catalogue.groups.contains_key(id));
                        let deciding = Deciding {
                            group: group.value.id.clone(),
                            revision: group.revision,
                            scope: scope.clone(),
                            rule: rule.clone(),
                            unknown_remote,
                        };
                        return judgement(action == Action::Allow, Reason::Rule(Box::new(deciding)));
                    }
                }
            }
        }
        let near = near::nearest(self, entry, direction, remote, payload);
        judgement(false, Reason::NothingAllows(near.map(Box::new)))
    }

    /// The flow between two ends. `None`: they have no addresses of one family.
    pub fn flow(&self, from: End, to: End, payload: Payload) -> Option<Flow> {
        let addresses = |end: &End| -> Vec<IpAddr> {
            match end {
                End::Address(address) => vec![*address],
                End::Workload(id) => {
                    let entry = self.registry.workloads.get(id);
                    entry.into_iter().flat_map(|w| w.addresses.iter().map(|p| p.net().addr())).collect()
                }
            }
        };
        let sources = addresses(&from);
        let destinations = addresses(&to);
        let pairs = sources.iter().flat_map(|s| destinations.iter().map(move |d| (*s, *d)));
        let (source, destination) = pairs.filter(|(s, d)| s.is_ipv4() == d.is_ipv4()).min()?;
        Some(Flow { from, to, source, destination, payload })
    }

    /// The flow that a packet on a network belongs to: its ends are the workloads there that own its addresses.
    pub fn packet(&self, network: &NetworkId, source: IpAddr, destination: IpAddr, payload: Payload) -> Flow {
        let end = |address: IpAddr| {
            let mut on_network = self.registry.workloads.values().filter(|w| w.network == *network);
            match on_network.find(|w| w.addresses.iter().any(|prefix| prefix.contains(address))) {
                Some(workload) => End::Workload(workload.id.clone()),
                None => End::Address(address),
            }
        };
        Flow { from: end(source), to: end(destination), source, destination, payload }
    }

    /// The flow's first packet, and with it, where state is kept, every packet of the flow.
    pub fn verdict(&self, flow: &Flow) -> Verdict {
        let judge = |end: &End, direction, remote| match end {
            End::Workload(id) => Some(self.judge(id, direction, remote, &flow.payload)),
            End::Address(_) => None,
        };
        let egress = judge(&flow.from, Direction::Egress, flow.destination);
        let ingress = judge(&flow.to, Direction::Ingress, flow.source);
        let allowed = [&egress, &ingress].into_iter().flatten().all(|judgement| judgement.allowed);
        Verdict { allowed, egress, ingress }
    }

    /// The flow's answers. A stateful end lets the answers of a flow pass that it allows; a stateless one judges them by its
    /// rules like any other packet.
    pub fn reply_verdict(&self, flow: &Flow) -> Verdict {
        let reply = flow.payload.reply();
        let judge = |end: &End, direction, reply_direction, remote| {
            let End::Workload(id) = end else { return None };
            match self.registry.workloads.get(id) {
                Some(entry) if !self.is_stateful(entry) => Some(self.judge(id, reply_direction, remote, &reply)),
                _ => Some(self.judge(id, direction, remote, &flow.payload)),
            }
        };
        let egress = judge(&flow.to, Direction::Ingress, Direction::Egress, flow.source);
        let ingress = judge(&flow.from, Direction::Egress, Direction::Ingress, flow.destination);
        let allowed = [&egress, &ingress].into_iter().flatten().all(|judgement| judgement.allowed);
        Verdict { allowed, egress, ingress }
    }
}

#[cfg(test)]
mod tests;
