//! What is right by itself but contradicts what else exists. The gateway asks before it writes; what is committed all the same
//! has a meaning (see [`model`](crate::model)), so the compiler never needs to refuse anything.

use std::collections::BTreeSet;

use crate::ids::GroupId;
use crate::model::{Event, Group, Target, World};
use crate::rule::{Action, Remote, Rule};
use crate::written::{Fault, Problem};

fn problem(fault: Fault, group: &GroupId, rule: Option<usize>, field: &str, message: String) -> Problem {
    Problem { fault, document: format!("group \"{group}\""), rule, field: field.into(), message }
}

/// Applies a change to a copy and says what speaks against it; empty if nothing does.
pub fn change(before: &World, events: &[Event]) -> Vec<Problem> {
    let mut after = before.clone();
    events.iter().for_each(|event| after.apply(event));
    let mut problems = Vec::new();
    for event in events {
        match event {
            Event::GroupRemoved(id) if !after.catalogue.groups.contains_key(id) => problems.extend(named_by_deny(&after, id)),
            Event::Group { group, .. } if after.catalogue.groups.get(&group.id).is_some_and(|g| g.value == *group) => {
                problems.extend(mixed_state(&after, group));
            }
            _ => {}
        }
    }
    problems
}

/// A deny over a group that is gone would deny every remote: the deny goes first.
fn named_by_deny(after: &World, id: &GroupId) -> Option<Problem> {
    for stored in after.catalogue.groups.values() {
        let names = |rule: &Rule| rule.action == Action::Deny && rule.remote == Remote::Group(id.clone());
        if let Some(index) = stored.value.rules.iter().position(|r| names(&r.rule)) {
            let by = &stored.value.id;
            let message = format!("cannot be deleted: deny rules[{index}] of group {by} names it; remove that rule first");
            return Some(problem(Fault::Conflict, id, None, "", message));
        }
    }
    None
}

/// A stateful and a stateless group where both surely meet on a workload: the same scope, or one of them global. Where only labels
/// or the registry bring them together, stateful wins and [`mixed_workloads`] reports it.
fn mixed_state(after: &World, group: &Group) -> Vec<Problem> {
    let mut problems = Vec::new();
    for other in after.catalogue.groups.values().map(|s| &*s.value).filter(|o| o.stateful != group.stateful) {
        let meets = group.bound().into_iter().any(|(target, phases)| {
            other.bound().into_iter().any(|(theirs, their_phases)| {
                let explicit = |t: &Target| !matches!(t, Target::Selector(_));
                let same_place = target == theirs || *target == Target::Global || *theirs == Target::Global;
                phases.bits() & their_phases.bits() != 0 && same_place && explicit(target) && explicit(theirs)
            })
        });
        if meets {
            let (one, another) = if group.stateful { ("stateful", "stateless") } else { ("stateless", "stateful") };
            let message =
                format!("is {one} and bound where {another} group {} is: make both alike, or bind one elsewhere", other.id);
            problems.push(problem(Fault::Conflict, &group.id, None, "stateful", message));
        }
    }
    problems
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
pub fn refused_members(world: &World) -> Vec<(GroupId, crate::ids::WorkloadId, crate::net::Prefix)> {
    let mut refused = Vec::new();
    for workload in world.registry.workloads.values() {
        for (group, _) in world.groups_of(workload) {
            let wide = workload.all_addresses().filter(|prefix| !group.value.admits(*prefix));
            refused.extend(wide.map(|prefix| (group.value.id.clone(), workload.id.clone(), prefix)));
        }
    }
    refused.sort();
    refused.dedup();
    refused
}

/// Rules of the group that name a group which does not exist (404 where references must resolve).
pub fn unknown_remotes(world: &World, group: &Group) -> Vec<Problem> {
    let unknown = |(index, rule): (usize, &crate::model::GroupRule)| match &rule.rule.remote {
        Remote::Group(id) if *id != group.id && !world.catalogue.groups.contains_key(id) => {
            let message = format!("names group {id}, which does not exist: create it first");
            Some(problem(Fault::Unknown, &group.id, Some(index), "remote", message))
        }
        _ => None,
    };
    group.rules.iter().enumerate().filter_map(unknown).collect()
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
