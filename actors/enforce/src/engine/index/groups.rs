//! Groups: their chains, the sets those name, and the members of the groups those name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use groupcast_policy::doc::Members;
use groupcast_policy::ids::GroupId;
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{Family, Prefix};

use super::{FAMILIES, Remote, Step, UseCount, VIEWS, Which, WrittenGroup, family_index, view_index};
use crate::Name;
use crate::delta::{Uses, element_ops, uses_of_rules};
use crate::names::{self, Role, View, set_role};
use crate::ruleset::{Contents, DesiredSet, Written, group_chains, has_spans, member_sets, member_spans, members_of, rules_of};
use crate::table::{Elements, Set, SetKind, Table};

impl<D: Documents> Step<'_, '_, D> {
    /// A group's members came, went, or are others: who names them may have to say it otherwise.
    pub(super) fn reread_members(&mut self, group: &GroupId) {
        let Some(remote) = self.index.remotes.get_mut(group) else { return };
        let (known, spans) = state(members_of(self.inputs.documents, group));
        if (remote.known, remote.spans) != (known, spans) {
            (remote.known, remote.spans) = (known, spans);
            self.rewritten.extend(remote.namers.iter().map(|(_, group)| group.clone()));
        }
        self.remotes.insert(group.clone());
    }

    pub(super) fn write_groups(&mut self) {
        let mut sets: BTreeMap<Name, Option<(SetKind, Elements)>> = BTreeMap::new();
        let mut groups = std::mem::take(&mut self.groups);
        groups.extend(self.rewritten.iter().cloned());
        for id in groups {
            for view in VIEWS {
                self.write_group(&id, view, &mut sets);
            }
            if self.index.groups.get(&id).is_some_and(|group| group.scopes.is_empty() && group.profiles.is_empty()) {
                self.index.groups.remove(&id);
            }
        }
        let Some(actual) = self.inputs.actual else { return };
        for (name, content) in sets {
            match (actual.sets.get(&name), self.index.sets.contains_key(&name), content) {
                (None, true, Some((kind, elements))) => {
                    self.parts.set(&name, None, &DesiredSet { kind, contents: Contents::Owned(elements) });
                }
                (Some(_), false, _) => self.parts.set_gone(&name),
                // Named by a hash of its content that nobody finds twice: what is there is what it should be.
                _ => {}
            }
        }
    }

    fn write_group(&mut self, id: &GroupId, view: View, sets: &mut BTreeMap<Name, Option<(SetKind, Elements)>>) {
        let Some(group) = self.index.groups.get(id) else { return };
        let at = view_index(view);
        let (was, is) = (group.written[at].is_some(), group.rules.is_some() && self.is_used(group, view));
        if was == is && !(is && self.rewritten.contains(id)) {
            return;
        }
        let inputs = self.inputs;
        let rules = rules_of(inputs.documents, id).filter(|_| is);
        let written = rules.map(|rules| group_chains(view, id, rules, inputs.documents, inputs.settings));
        let after = written.as_ref().map(summed);
        let before = match self.index.groups.get_mut(id) {
            Some(group) => std::mem::replace(&mut group.written[at], after.clone()),
            None => None,
        };
        // What stays named is never unnamed in between.
        if let Some(after) = &after {
            self.count(id, view, after, true);
        }
        if let Some(before) = &before {
            self.count(id, view, before, false);
        }
        for name in before.iter().flat_map(|before| &before.contents) {
            // Its content may be known already, from another group that names it.
            sets.entry(name.clone()).or_insert(None);
        }
        let Some(actual) = inputs.actual else { return };
        let Written { chains, sets: contents, .. } = written.unwrap_or_default();
        sets.extend(contents.into_iter().map(|(name, content)| (name, Some(content))));
        for (name, rules) in &chains {
            self.parts.chain(name, actual.chains.get(name), None, rules);
        }
        let gone = before.iter().flat_map(|before| &before.chains).filter(|name| !chains.contains_key(*name));
        gone.for_each(|name| self.parts.chain_gone(name));
    }

    fn count(&mut self, id: &GroupId, view: View, written: &WrittenGroup, more: bool) {
        let step = |count: &mut usize| *count = if more { *count + 1 } else { count.saturating_sub(1) };
        for (name, uses) in &written.sets {
            let held = self.index.sets.entry(name.clone()).or_default();
            self.before.entry(name.clone()).or_insert_with(|| held.uses());
            if uses.allows {
                step(&mut held.allows);
            }
            if uses.denies {
                step(&mut held.denies);
            }
            if *held == UseCount::default() {
                self.index.sets.remove(name);
            }
        }
        let documents = self.inputs.documents;
        for (group, families) in &written.remotes {
            self.renamed.insert(group.clone());
            let remote = self.index.remotes.entry(group.clone()).or_insert_with(|| {
                let (known, spans) = state(members_of(documents, group));
                Remote { known, spans, ..Remote::default() }
            });
            families.iter().zip(&mut remote.families).filter(|(named, _)| **named).for_each(|(_, count)| step(count));
        }
        if more {
            for group in written.remotes.keys() {
                if let Some(remote) = self.index.remotes.get_mut(group) {
                    remote.namers.insert((view, id.clone()));
                }
            }
        } else {
            let now = self.index.groups.get(id).and_then(|group| group.written[view_index(view)].as_ref());
            let still: BTreeSet<GroupId> = now.into_iter().flat_map(|now| now.remotes.keys().cloned()).collect();
            for group in written.remotes.keys().filter(|group| !still.contains(*group)) {
                if let Some(remote) = self.index.remotes.get_mut(group) {
                    remote.namers.remove(&(view, id.clone()));
                    if remote.namers.is_empty() {
                        self.index.remotes.remove(group);
                    }
                }
            }
        }
    }

    /// The sets of members that rules look into.
    pub(super) fn write_members(&mut self, touched: &BTreeMap<GroupId, Which<Prefix>>) {
        let Some(actual) = self.inputs.actual else { return };
        let mut groups = std::mem::take(&mut self.remotes);
        groups.extend(self.renamed.iter().cloned());
        for group in groups {
            let members = members_of(self.inputs.documents, &group);
            let named = self.index.remotes.get(&group).map(|remote| remote.families).unwrap_or_default();
            let moved = touched.get(&group);
            for family in FAMILIES {
                let is_named = named[family_index(family)] > 0;
                if !is_named && !self.renamed.contains(&group) {
                    // Nor was it: there is nothing of it.
                    continue;
                }
                let members = members.filter(|_| is_named);
                match (members, moved) {
                    // What happens all the time.
                    (Some(members), Some(Which::Some(moved))) => {
                        let name = names::members(&group, family);
                        if let Some(held) = actual.sets.get(&name) {
                            self.write_moved(&name, held, members, moved);
                            if moved.iter().all(|prefix| prefix.is_host() || prefix.family() != family) {
                                continue;
                            }
                            self.write_ranges_of(actual, &group, Some(members), family);
                            continue;
                        }
                        self.write_hosts_of(actual, &group, Some(members), family, true);
                    }
                    (members, moved) => self.write_hosts_of(actual, &group, members, family, moved.is_some()),
                }
                self.write_ranges_of(actual, &group, members, family);
            }
        }
    }

    /// The set of a group's single addresses. `compared`: what is in it may be something else.
    fn write_hosts_of(&mut self, actual: &Table, group: &GroupId, members: Option<&Members>, family: Family, compared: bool) {
        let name = names::members(group, family);
        match (actual.sets.get(&name), members) {
            (Some(_), None) => self.parts.set_gone(&name),
            (Some(_), Some(_)) if !compared => {}
            (held, Some(members)) => {
                if let Some((_, want)) = member_sets(group, members, family).next() {
                    self.parts.set(&name, held, &want);
                }
            }
            (None, None) => {}
        }
    }

    /// The set of a group's ranges, which are few.
    fn write_ranges_of(&mut self, actual: &Table, group: &GroupId, members: Option<&Members>, family: Family) {
        let name = names::member_spans(group, family);
        match (actual.sets.get(&name), members.filter(|members| has_spans(members, family))) {
            (Some(_), None) => self.parts.set_gone(&name),
            (held, Some(members)) => {
                let kind = if family == Family::V4 { SetKind::Spans4 } else { SetKind::Spans6 };
                let contents = Contents::Owned(member_spans(members, family));
                self.parts.set(&name, held, &DesiredSet { kind, contents });
            }
            (None, None) => {}
        }
    }

    /// Single addresses that came or went, found without looking at any other.
    fn write_moved(&mut self, name: &Name, held: &Set, members: &Members, moved: &BTreeSet<Prefix>) {
        let (mut missing, mut surplus) = (Elements::of(held.kind), Elements::of(held.kind));
        for address in moved.iter().filter(|prefix| prefix.is_host()).map(|prefix| prefix.net().addr()) {
            match (address, &held.elements, &mut missing, &mut surplus) {
                (IpAddr::V4(a), Elements::V4(held), Elements::V4(missing), Elements::V4(surplus)) => {
                    let a = a.to_bits();
                    differs(held.contains(a), members.v4.contains(a), missing, surplus).map(|set| set.insert(a));
                }
                (IpAddr::V6(a), Elements::V6(held), Elements::V6(missing), Elements::V6(surplus)) => {
                    let a = a.to_bits();
                    differs(held.contains(&a), members.v6.contains(&a), missing, surplus).map(|set| set.insert(a));
                }
                _ => {}
            }
        }
        element_ops(&mut self.parts.elements, name, held.kind, missing, surplus);
    }
}

/// Which of the two an address belongs to that is there and should not be, or should be and is not.
fn differs<S>(have: bool, want: bool, missing: S, surplus: S) -> Option<S> {
    match (have, want) {
        (false, true) => Some(missing),
        (true, false) => Some(surplus),
        _ => None,
    }
}

/// Whether members are known, and in which families there are ranges among them.
fn state(members: Option<&Members>) -> (bool, [bool; 2]) {
    (members.is_some(), FAMILIES.map(|family| members.is_some_and(|members| has_spans(members, family))))
}

fn summed(written: &Written) -> WrittenGroup {
    let named = |(name, uses): (Name, Uses)| (set_role(&name) == Role::Named).then_some((name, uses));
    let uses = uses_of_rules(written.chains.iter().map(|(name, rules)| (name, &rules[..])));
    WrittenGroup {
        chains: written.chains.keys().cloned().collect(),
        contents: written.sets.keys().cloned().collect(),
        sets: uses.into_iter().filter_map(named).collect(),
        remotes: written
            .remotes
            .iter()
            .map(|(group, families)| (group.clone(), FAMILIES.map(|family| families.contains(family))))
            .collect(),
    }
}
