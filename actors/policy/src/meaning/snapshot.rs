//! A world with what the meaning of a change asks for again and again: who has which groups, and who is a member.

use std::collections::{BTreeMap, BTreeSet};

use super::State;
use crate::doc::Phases;
use crate::ids::{GroupId, WorkloadId};
use crate::model::{Group, Selector, Target, Workload, World};
use crate::net::{AddressSet, Prefix};
use crate::rule::{Direction, Remote, Rule};
use crate::topic::Scope;

pub(super) struct Snapshot<'w> {
    world: &'w World,
    /// Sorted groups of each workload.
    groups: BTreeMap<&'w WorkloadId, Vec<&'w GroupId>>,
    rules: BTreeMap<&'w GroupId, Vec<&'w Rule>>,
    /// Of groups that a rule names and that exist.
    members: BTreeMap<&'w GroupId, AddressSet>,
}

impl<'w> Snapshot<'w> {
    pub fn new(world: &'w World) -> Self {
        let mut bound: BTreeMap<Scope, Vec<(&GroupId, Phases)>> = BTreeMap::new();
        let mut by_id: BTreeMap<&WorkloadId, Vec<(&GroupId, Phases)>> = BTreeMap::new();
        let mut selectors: BTreeMap<&Scope, Vec<(&Selector, &GroupId, Phases)>> = BTreeMap::new();
        let mut rules: BTreeMap<&GroupId, Vec<&Rule>> = BTreeMap::new();
        for (id, stored) in &world.catalogue.groups {
            rules.insert(id, stored.value.distinct_rules());
            for binding in &stored.value.bindings {
                match &binding.target {
                    Target::Workload(workload) => by_id.entry(workload).or_default().push((id, binding.phases)),
                    Target::Selector(s) => selectors.entry(&s.within).or_default().push((s, id, binding.phases)),
                    scope => {
                        if let Some(scope) = scope.scope() {
                            bound.entry(scope).or_default().push((id, binding.phases));
                        }
                    }
                }
            }
        }
        let mut groups: BTreeMap<&WorkloadId, Vec<&GroupId>> = BTreeMap::new();
        for (id, workload) in &world.registry.workloads {
            let labels = world.labels_of(workload);
            let scopes = [Some(Scope::Global), workload.space.clone().map(Scope::Space), workload.app.clone().map(Scope::App)];
            let mut found: BTreeSet<&GroupId> = BTreeSet::new();
            for scope in scopes.iter().flatten() {
                let here = bound.get(scope).into_iter().flatten();
                found.extend(here.filter(|(_, phases)| phases.contains(workload.phase)).map(|(group, _)| *group));
                for (selector, group, phases) in selectors.get(scope).into_iter().flatten() {
                    if phases.contains(workload.phase) && selector.matches(&labels) {
                        found.insert(group);
                    }
                }
            }
            let by_id = by_id.get(id).into_iter().flatten();
            found.extend(by_id.filter(|(_, phases)| phases.contains(workload.phase)).map(|(group, _)| *group));
            found.extend(workload.groups.iter().filter_map(|id| world.catalogue.groups.get_key_value(id)).map(|(id, _)| id));
            groups.insert(id, found.into_iter().collect());
        }
        let members = members(world, &groups, &rules);
        Self { world, groups, rules, members }
    }

    pub fn workloads(&self) -> impl Iterator<Item = &'w WorkloadId> + '_ {
        self.groups.keys().copied()
    }

    pub fn entry(&self, id: &WorkloadId) -> Option<&'w Workload> {
        self.world.registry.workloads.get(id).map(|workload| &**workload)
    }

    pub fn groups(&self, id: &WorkloadId) -> &[&'w GroupId] {
        self.groups.get(id).map_or(&[], Vec::as_slice)
    }

    pub fn rules(&self, group: &GroupId) -> &[&'w Rule] {
        self.rules.get(group).map_or(&[], Vec::as_slice)
    }

    pub fn members(&self, group: &GroupId) -> Option<&AddressSet> {
        self.members.get(group)
    }

    pub fn is_stateful(&self, id: &WorkloadId) -> Option<bool> {
        let groups = self.groups.get(id)?;
        let stateful = |id: &&GroupId| self.world.catalogue.groups.get(*id).is_some_and(|g| g.value.stateful);
        Some(groups.is_empty() || groups.iter().any(stateful))
    }

    /// The workloads that have a group.
    pub fn workloads_with<'s>(&'s self, group: &'s GroupId) -> impl Iterator<Item = &'w WorkloadId> + 's {
        self.groups.iter().filter(move |(_, groups)| groups.binary_search(&group).is_ok()).map(|(id, _)| *id)
    }

    pub fn state(&self, id: &WorkloadId, direction: Direction) -> State {
        let Some(workload) = self.entry(id) else { return State::Absent };
        let enforced = self.world.enforced_of(workload);
        let is_enforced = match direction {
            Direction::Ingress => enforced.ingress,
            Direction::Egress => enforced.egress,
        };
        if !is_enforced {
            return State::Open;
        }
        State::Groups(self.groups(id).iter().map(|group| (*group).clone()).collect())
    }
}

fn members<'w>(
    world: &'w World,
    groups: &BTreeMap<&'w WorkloadId, Vec<&'w GroupId>>,
    rules: &BTreeMap<&'w GroupId, Vec<&'w Rule>>,
) -> BTreeMap<&'w GroupId, AddressSet> {
    let mut prefixes: BTreeMap<&GroupId, (&Group, Vec<Prefix>)> = BTreeMap::new();
    for rule in rules.values().flatten() {
        if let Remote::Group(remote) = &rule.remote
            && let Some((id, stored)) = world.catalogue.groups.get_key_value(remote)
        {
            prefixes.entry(id).or_insert_with(|| (&stored.value, stored.value.members.iter().copied().collect()));
        }
    }
    for (id, groups) in groups {
        for group in groups {
            if let (Some((group, list)), Some(workload)) = (prefixes.get_mut(*group), world.registry.workloads.get(*id)) {
                list.extend(workload.all_addresses().filter(|prefix| group.counts(workload) && group.admits(*prefix)));
            }
        }
    }
    prefixes.into_iter().map(|(id, (_, list))| (id, AddressSet::from_prefixes(list))).collect()
}

/// Groups whose rules differ, or name a group whose members differ.
pub(super) fn changed_groups(old: &Snapshot<'_>, new: &Snapshot<'_>) -> BTreeSet<GroupId> {
    let ids: BTreeSet<&GroupId> = old.rules.keys().chain(new.rules.keys()).copied().collect();
    let differs = |id: &&&GroupId| {
        let rules = new.rules(id);
        let remote_differs = |rule: &&Rule| match &rule.remote {
            Remote::Group(remote) => old.members(remote) != new.members(remote),
            _ => false,
        };
        old.rules(id) != rules || rules.iter().any(remote_differs)
    };
    ids.iter().filter(differs).map(|id| (*id).clone()).collect()
}
