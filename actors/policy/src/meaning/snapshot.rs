//! A world with what the meaning of a change asks for again and again: who has which groups, and who is a member.

use std::collections::{BTreeMap, BTreeSet};

use super::State;
use super::budget::{Budget, Exceeded};
use crate::doc::{Phase, Phases};
use crate::ids::{AppId, GroupId, SpaceId, WorkloadId};
use crate::model::{Group, Labels, Selector, Target, Workload, World};
use crate::net::{AddressSet, Prefix};
use crate::rule::{Direction, Remote, Rule};
use crate::topic::Scope;

/// What decides which groups a workload has.
type Standing<'w> = (Option<&'w SpaceId>, Option<&'w AppId>, Labels, Phase, &'w BTreeSet<GroupId>, Option<&'w WorkloadId>);

pub(super) struct Snapshot<'w> {
    world: &'w World,
    /// Which of the lists each workload has.
    list_of: BTreeMap<&'w WorkloadId, usize>,
    /// Distinct lists of groups, sorted. Workloads that have the same share one.
    lists: Vec<Vec<&'w GroupId>>,
    /// How many workloads have a group.
    counts: BTreeMap<&'w GroupId, usize>,
    rules: BTreeMap<&'w GroupId, Vec<&'w Rule>>,
    /// Of groups that a rule names and that exist.
    members: BTreeMap<&'w GroupId, AddressSet>,
}

impl<'w> Snapshot<'w> {
    pub fn new(world: &'w World, budget: &mut Budget<'_>) -> Result<Self, Exceeded> {
        let mut bound: BTreeMap<Scope, Vec<(&GroupId, Phases)>> = BTreeMap::new();
        let mut by_id: BTreeMap<&WorkloadId, Vec<(&GroupId, Phases)>> = BTreeMap::new();
        let mut selectors: BTreeMap<&Scope, Vec<(&Selector, &GroupId, Phases)>> = BTreeMap::new();
        let mut rules: BTreeMap<&GroupId, Vec<&Rule>> = BTreeMap::new();
        for (id, stored) in &world.catalogue.groups {
            budget.spend(1 + stored.value.rules.len() + stored.value.bindings.len())?;
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
        let mut known: BTreeMap<Standing<'w>, usize> = BTreeMap::new();
        let (mut lists, mut sizes): (Vec<Vec<&GroupId>>, Vec<usize>) = Default::default();
        let mut list_of: BTreeMap<&WorkloadId, usize> = BTreeMap::new();
        for (id, workload) in &world.registry.workloads {
            budget.spend(1)?;
            let (space, app) = (workload.space.as_ref(), workload.app.as_ref());
            let own = by_id.get(id);
            let standing = (space, app, world.labels_of(workload), workload.phase, &workload.groups, own.map(|_| id));
            if let Some(list) = known.get(&standing) {
                list_of.insert(id, *list);
                sizes[*list] += 1;
                continue;
            }
            let scopes = [Some(Scope::Global), space.cloned().map(Scope::Space), app.cloned().map(Scope::App)];
            let mut found: BTreeSet<&GroupId> = BTreeSet::new();
            for scope in scopes.iter().flatten() {
                let here = bound.get(scope).map_or(&[][..], Vec::as_slice);
                budget.spend(here.len())?;
                found.extend(here.iter().filter(|(_, phases)| phases.contains(workload.phase)).map(|(group, _)| *group));
                for (selector, group, phases) in selectors.get(scope).into_iter().flatten() {
                    budget.spend(1 + selector.requirements().len())?;
                    if phases.contains(workload.phase) && selector.matches(&standing.2) {
                        found.insert(group);
                    }
                }
            }
            let own = own.map_or(&[][..], Vec::as_slice);
            budget.spend(own.len())?;
            found.extend(own.iter().filter(|(_, phases)| phases.contains(workload.phase)).map(|(group, _)| *group));
            found.extend(workload.groups.iter().filter_map(|id| world.catalogue.groups.get_key_value(id)).map(|(id, _)| id));
            budget.hold(found.len())?;
            known.insert(standing, lists.len());
            list_of.insert(id, lists.len());
            lists.push(found.into_iter().collect());
            sizes.push(1);
        }
        let mut counts: BTreeMap<&GroupId, usize> = BTreeMap::new();
        for (list, size) in lists.iter().zip(&sizes) {
            list.iter().for_each(|group| *counts.entry(group).or_default() += size);
        }
        let members = members(world, &list_of, &lists, &rules, budget)?;
        Ok(Self { world, list_of, lists, counts, rules, members })
    }

    pub fn workloads(&self) -> impl Iterator<Item = &'w WorkloadId> + '_ {
        self.list_of.keys().copied()
    }

    pub fn has(&self, id: &WorkloadId) -> bool {
        self.list_of.contains_key(id)
    }

    pub fn lists(&self) -> &[Vec<&'w GroupId>] {
        &self.lists
    }

    pub fn list(&self, list: usize) -> &[&'w GroupId] {
        &self.lists[list]
    }

    pub fn entry(&self, id: &WorkloadId) -> Option<&'w Workload> {
        self.world.registry.workloads.get(id).map(|workload| &**workload)
    }

    pub fn groups(&self, id: &WorkloadId) -> &[&'w GroupId] {
        self.list_of.get(id).map_or(&[], |list| self.list(*list))
    }

    pub fn rules(&self, group: &GroupId) -> &[&'w Rule] {
        self.rules.get(group).map_or(&[], Vec::as_slice)
    }

    pub fn members(&self, group: &GroupId) -> Option<&AddressSet> {
        self.members.get(group)
    }

    pub fn is_stateful(&self, list: usize) -> bool {
        let stateful = |id: &&GroupId| self.world.catalogue.groups.get(*id).is_some_and(|g| g.value.stateful);
        self.lists[list].is_empty() || self.lists[list].iter().any(stateful)
    }

    pub fn list_of(&self, id: &WorkloadId) -> Option<usize> {
        self.list_of.get(id).copied()
    }

    /// How many workloads have a group.
    pub fn count(&self, group: &GroupId) -> usize {
        self.counts.get(group).copied().unwrap_or(0)
    }

    pub fn state(&self, id: &WorkloadId, direction: Direction) -> State {
        let (Some(workload), Some(list)) = (self.entry(id), self.list_of(id)) else { return State::Absent };
        let enforced = self.world.enforced_of(workload);
        let is_enforced = match direction {
            Direction::Ingress => enforced.ingress,
            Direction::Egress => enforced.egress,
        };
        if is_enforced { State::Groups(list) } else { State::Open }
    }
}

fn members<'w>(
    world: &'w World,
    list_of: &BTreeMap<&'w WorkloadId, usize>,
    lists: &[Vec<&'w GroupId>],
    rules: &BTreeMap<&'w GroupId, Vec<&'w Rule>>,
    budget: &mut Budget<'_>,
) -> Result<BTreeMap<&'w GroupId, AddressSet>, Exceeded> {
    let mut prefixes: BTreeMap<&GroupId, (&Group, Vec<Prefix>)> = BTreeMap::new();
    for rule in rules.values().flatten() {
        if let Remote::Group(remote) = &rule.remote
            && !prefixes.contains_key(remote)
            && let Some((id, stored)) = world.catalogue.groups.get_key_value(remote)
        {
            budget.hold(stored.value.members.len())?;
            prefixes.insert(id, (&stored.value, stored.value.members.iter().copied().collect()));
        }
    }
    let named = |list: &Vec<&'w GroupId>| list.iter().copied().filter(|group| prefixes.contains_key(group)).collect();
    let named: Vec<Vec<&GroupId>> = lists.iter().map(named).collect();
    for (id, list) in list_of {
        let Some(workload) = world.registry.workloads.get(*id) else { continue };
        for group in &named[*list] {
            let Some((group, members)) = prefixes.get_mut(group) else { continue };
            let before = members.len();
            members.extend(group.admitted(workload).filter(|_| group.counts(workload)));
            budget.hold(1 + members.len() - before)?;
        }
    }
    Ok(prefixes.into_iter().map(|(id, (_, list))| (id, AddressSet::from_prefixes(list))).collect())
}

/// Groups whose rules differ, or name a group whose members differ.
pub(super) fn changed_groups<'w>(old: &Snapshot<'w>, new: &Snapshot<'w>) -> BTreeSet<&'w GroupId> {
    let ids: BTreeSet<&GroupId> = old.rules.keys().chain(new.rules.keys()).copied().collect();
    // Once for each group that is named, however many rules name it.
    let named: BTreeSet<&GroupId> = old.members.keys().chain(new.members.keys()).copied().collect();
    let moved: BTreeSet<&GroupId> = named.into_iter().filter(|id| old.members(id) != new.members(id)).collect();
    let differs = |id: &&GroupId| {
        let rules = new.rules(id);
        let remote_differs = |rule: &&Rule| matches!(&rule.remote, Remote::Group(remote) if moved.contains(remote));
        old.rules(id) != rules || rules.iter().any(remote_differs)
    };
    ids.into_iter().filter(differs).collect()
}
