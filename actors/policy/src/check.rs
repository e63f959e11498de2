//! What is right by itself but contradicts what else exists. The gateway asks before it writes; what is committed all the same
//! has a meaning (see [`model`](crate::model)), so the compiler never needs to refuse anything.

use std::collections::{BTreeMap, BTreeSet};

use crate::doc::Phases;
use crate::ids::GroupId;
use crate::model::{Event, Group, Target, World};
use crate::net::Prefix;
use crate::rule::{Action, Remote, Rule};
use crate::written::{Fault, PROBLEMS_MAX, Problem};

fn problem(fault: Fault, group: &GroupId, rule: Option<usize>, field: &str, message: String) -> Problem {
    Problem { fault, document: format!("group \"{group}\""), rule, field: field.into(), message }
}

type Groups<'g> = BTreeMap<&'g GroupId, &'g Group>;

/// Says what speaks against a change; empty if nothing does. Beyond [`PROBLEMS_MAX`] it is not told more.
pub fn change(before: &World, events: &[Event]) -> Vec<Problem> {
    // Only references: what a change costs must not depend on how many workloads there are.
    let mut after: Groups<'_> = before.catalogue.groups.iter().map(|(id, stored)| (id, &*stored.value)).collect();
    for event in events {
        match event {
            Event::Group { group, .. } => drop(after.insert(&group.id, group)),
            Event::GroupRemoved(id) => drop(after.remove(id)),
            _ => {}
        }
    }
    let removed = events.iter().filter_map(|event| match event {
        Event::GroupRemoved(id) if !after.contains_key(id) => Some(id),
        _ => None,
    });
    let mut problems = crate::collide::colliding(before, events);
    problems.extend(named_by_denies(&after, &removed.collect()));
    let written = events.iter().filter_map(|event| match event {
        Event::Group { group, .. } => after.get(&group.id).copied().filter(|now| std::ptr::eq(*now, &**group)),
        _ => None,
    });
    let places = Places::new(&after);
    for group in written {
        problems.extend(mixed_state(&places, group));
        if problems.len() >= PROBLEMS_MAX {
            break;
        }
    }
    problems.truncate(PROBLEMS_MAX);
    problems
}

/// A deny over a group that is gone would deny every remote: the deny goes first.
fn named_by_denies(after: &Groups<'_>, removed: &BTreeSet<&GroupId>) -> Vec<Problem> {
    let mut named: BTreeMap<&GroupId, (&GroupId, usize)> = BTreeMap::new();
    for group in after.values().filter(|_| !removed.is_empty()) {
        for (index, rule) in group.rules.iter().enumerate() {
            if let (Action::Deny, Remote::Group(remote)) = (rule.rule.action, &rule.rule.remote)
                && removed.contains(remote)
            {
                named.entry(remote).or_insert((&group.id, index));
            }
        }
    }
    let told = |(id, (by, index)): (&GroupId, (&GroupId, usize))| {
        let message = format!("cannot be deleted: deny rules[{index}] of group {by} names it; remove that rule first");
        problem(Fault::Conflict, id, None, "", message)
    };
    named.into_iter().take(PROBLEMS_MAX).map(told).collect()
}

/// Where groups are bound, for both kinds of state, so that a group meets only those that are bound where it is.
struct Places<'g> {
    at: BTreeMap<(bool, &'g Target), Vec<(&'g GroupId, Phases)>>,
    /// Groups that are bound anywhere but by labels, with the union of their phases: a global group meets all of them.
    bound: BTreeMap<bool, Vec<(&'g GroupId, Phases)>>,
}

impl<'g> Places<'g> {
    fn new(groups: &Groups<'g>) -> Self {
        let mut places = Self { at: BTreeMap::new(), bound: BTreeMap::new() };
        for group in groups.values() {
            let mut everywhere: Option<u8> = None;
            for (target, phases) in group.bound().into_iter().filter(|(target, _)| is_explicit(target)) {
                places.at.entry((group.stateful, target)).or_default().push((&group.id, phases));
                *everywhere.get_or_insert(0) |= phases.bits();
            }
            if let Some(phases) = everywhere.and_then(Phases::from_bits) {
                places.bound.entry(group.stateful).or_default().push((&group.id, phases));
            }
        }
        places
    }
}

fn is_explicit(target: &Target) -> bool {
    !matches!(target, Target::Selector(_))
}

/// A stateful and a stateless group where both surely meet on a workload: the same scope, or one of them global. Where only labels
/// or the registry bring them together, stateful wins and [`mixed_workloads`] reports it.
fn mixed_state<'g>(places: &'g Places<'g>, group: &'g Group) -> Vec<Problem> {
    let others = !group.stateful;
    let own: Vec<(&Target, Phases)> = group.bound().into_iter().filter(|(target, _)| is_explicit(target)).collect();
    let mut met: BTreeSet<&GroupId> = BTreeSet::new();
    let mut meet = |bits: u8, list: Option<&'g Vec<(&'g GroupId, Phases)>>| {
        for (other, _) in list.into_iter().flatten().filter(|(_, theirs)| bits & theirs.bits() != 0) {
            // A group that meets very many is told about some of them.
            if met.len() >= PROBLEMS_MAX {
                return;
            }
            met.insert(other);
        }
    };
    for (target, phases) in &own {
        let here = match target {
            Target::Global => places.bound.get(&others),
            _ => places.at.get(&(others, target)),
        };
        meet(phases.bits(), here);
    }
    let everywhere = own.iter().fold(0, |bits, (_, phases)| bits | phases.bits());
    meet(everywhere, places.at.get(&(others, &Target::Global)));
    let (one, another) = if group.stateful { ("stateful", "stateless") } else { ("stateless", "stateful") };
    let told = |other: &GroupId| {
        let message = format!("is {one} and bound where {another} group {other} is: make both alike, or bind one elsewhere");
        problem(Fault::Conflict, &group.id, None, "stateful", message)
    };
    met.into_iter().map(told).collect()
}

/// Workloads that have stateful and stateless groups at once.
pub fn mixed_workloads(world: &World) -> BTreeSet<crate::ids::WorkloadId> {
    let mixed = world.registry.workloads.values().filter(|workload| {
        let groups = world.groups_of(workload);
        groups.iter().any(|(g, _)| g.value.stateful) && groups.iter().any(|(g, _)| !g.value.stateful)
    });
    mixed.map(|workload| workload.id.clone()).collect()
}

/// Members that are refused because they are the internet and the group does not say so.
pub fn refused_members(world: &World) -> Vec<(GroupId, crate::ids::WorkloadId, Prefix)> {
    let mut refused = Vec::new();
    for workload in world.registry.workloads.values() {
        for (group, _) in world.groups_of(workload) {
            let admitted: BTreeSet<Prefix> = group.value.admitted(workload).collect();
            let wide = workload.all_addresses().filter(|prefix| !admitted.contains(prefix));
            refused.extend(wide.map(|prefix| (group.value.id.clone(), workload.id.clone(), prefix)));
        }
    }
    refused.sort();
    refused.dedup();
    refused
}

/// Rules of the group that name a group which does not exist (404 where references must resolve).
pub fn unknown_remotes(exists: impl Fn(&GroupId) -> bool, group: &Group) -> Vec<Problem> {
    let unknown = |(index, rule): (usize, &crate::model::GroupRule)| match &rule.rule.remote {
        Remote::Group(id) if *id != group.id && !exists(id) => {
            let message = format!("names group {id}, which does not exist: create it first");
            Some(problem(Fault::Unknown, &group.id, Some(index), "remote", message))
        }
        _ => None,
    };
    group.rules.iter().enumerate().filter_map(unknown).take(PROBLEMS_MAX).collect()
}

/// Rules that mean the same as an earlier one (409 where each must be distinct; harmless elsewhere).
pub fn duplicate_rules(group: &Group) -> Vec<Problem> {
    let mut seen: std::collections::BTreeMap<&Rule, usize> = Default::default();
    let mut problems = Vec::new();
    for (index, rule) in group.rules.iter().enumerate() {
        if let Some(first) = seen.get(&rule.rule) {
            let message = format!("means the same as rules[{first}]: remove one");
            problems.push(problem(Fault::Conflict, &group.id, Some(index), "", message));
        } else {
            seen.insert(&rule.rule, index);
        }
    }
    problems
}

/// A group some workload has (409 where such a group must not be deleted).
pub fn in_use(world: &World, id: &GroupId) -> Option<Problem> {
    let group = &world.catalogue.groups.get(id)?.value;
    let user = world.registry.workloads.values().find(|workload| !world.reaches(group, workload).is_empty())?;
    let message = format!("is in use by workload {}: take it away there first", user.id);
    Some(problem(Fault::Conflict, id, None, "", message))
}

/// A document that a source owns is edited there.
pub fn owned_elsewhere(world: &World, id: &GroupId) -> Option<Problem> {
    match &world.catalogue.groups.get(id)?.value.owner {
        crate::model::Owner::Gateway => None,
        crate::model::Owner::Source(source) => {
            let message = format!("belongs to source {source}: edit it there");
            Some(problem(Fault::Conflict, id, None, "owner", message))
        }
    }
}
