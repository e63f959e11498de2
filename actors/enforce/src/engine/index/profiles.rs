//! Profiles, and the scopes they jump to.

use groupcast_policy::doc::Content;
use groupcast_policy::ids::GroupId;
use groupcast_policy::needs::Documents;
use groupcast_policy::topic::{Scope, Topic};

use super::{Bound, Group, Place, Profile, Step, Summary, Which, view_index};
use crate::Name;
use crate::delta::{Op, element_ops};
use crate::expression::{Statement, Verdict};
use crate::names::{self, View};
use crate::ruleset::{
    CHAINS, ProfileKey, Shape, bound, has, jumps, onward_rules, profile_chains, profile_rules, profile_verdicts, rules_of,
};
use crate::table::{Elements, Rule, SetKind};

impl<D: Documents> Step<'_, '_, D> {
    /// A profile that nobody had: its scopes and groups learn of it.
    pub(super) fn name_profile(&mut self, number: u32, key: &ProfileKey) {
        self.profiles.insert(number);
        for scope in key.scopes() {
            let place = (scope, key.phase);
            if !self.index.scopes.contains_key(&place) {
                let groups = bound(self.inputs.documents, &place.0, place.1);
                let mut scope = Bound { synced: groups.is_some(), ..Bound::default() };
                for group in groups.unwrap_or_default() {
                    let known = self.known_group(&group);
                    known.scopes.insert(place.clone());
                    scope.count(known.rules, true);
                    scope.groups.insert(group);
                }
                self.index.scopes.insert(place.clone(), scope);
            }
            if let Some(scope) = self.index.scopes.get_mut(&place) {
                scope.profiles.insert(number);
            }
        }
        for group in &key.groups {
            self.known_group(group).profiles.insert(number);
        }
    }

    /// The opposite. It is not complete any more, so nothing counts it.
    fn forget_profile(&mut self, number: u32, key: &ProfileKey) {
        for scope in key.scopes() {
            let place = (scope, key.phase);
            let Some(scope) = self.index.scopes.get_mut(&place) else { continue };
            scope.profiles.remove(&number);
            if scope.profiles.is_empty() {
                for group in std::mem::take(&mut scope.groups) {
                    if let Some(known) = self.index.groups.get_mut(&group) {
                        known.scopes.remove(&place);
                    }
                    self.groups.insert(group);
                }
                self.index.scopes.remove(&place);
            }
        }
        for group in &key.groups {
            if let Some(known) = self.index.groups.get_mut(group) {
                known.profiles.remove(&number);
            }
            self.groups.insert(group.clone());
        }
    }

    fn known_group(&mut self, group: &GroupId) -> &mut Group {
        self.groups.insert(group.clone());
        let documents = self.inputs.documents;
        self.index.groups.entry(group.clone()).or_insert_with(|| Group { rules: summary(documents, group), ..Group::default() })
    }

    /// What is bound to a scope is something else.
    pub(super) fn rebind(&mut self, place: &Place, which: &Which<GroupId>) {
        let Some(scope) = self.index.scopes.get(place) else { return };
        let before = scope.flags();
        let document = self.inputs.documents.document(&Topic::Scope(place.0.clone()));
        let content = match document.and_then(|document| document.content()) {
            Some(Content::Scope(bound)) => Some(bound),
            _ => None,
        };
        let is_bound =
            |group: &GroupId| content.and_then(|bound| bound.get(group)).is_some_and(|phases| phases.contains(place.1));
        let touched: Vec<GroupId> = match which {
            Which::Some(groups) => groups.iter().cloned().collect(),
            Which::All => scope.groups.iter().chain(content.into_iter().flat_map(|bound| bound.keys())).cloned().collect(),
        };
        for group in touched {
            let (was, now) = (self.index.scopes.get(place).is_some_and(|s| s.groups.contains(&group)), is_bound(&group));
            if was == now {
                continue;
            }
            let known = self.known_group(&group);
            if now {
                _ = known.scopes.insert(place.clone())
            } else {
                _ = known.scopes.remove(place)
            }
            let rules = known.rules;
            let Some(scope) = self.index.scopes.get_mut(place) else { return };
            scope.count(rules, now);
            if now {
                _ = scope.groups.insert(group.clone())
            } else {
                _ = scope.groups.remove(&group)
            }
            self.set_jumps(place, &group, rules.filter(|_| now));
        }
        let Some(scope) = self.index.scopes.get_mut(place) else { return };
        scope.synced = document.is_some();
        if scope.flags() != before {
            self.profiles.extend(scope.profiles.iter().copied());
        }
    }

    /// A group's rules are others.
    pub(super) fn reread_rules(&mut self, group: &GroupId) {
        let Some(known) = self.index.groups.get_mut(group) else { return };
        let now = summary(self.inputs.documents, group);
        let was = std::mem::replace(&mut known.rules, now);
        self.groups.insert(group.clone());
        self.rewritten.insert(group.clone());
        if was == now {
            return;
        }
        self.profiles.extend(known.profiles.iter().copied());
        for place in known.scopes.clone() {
            if let Some(scope) = self.index.scopes.get_mut(&place) {
                let before = scope.flags();
                scope.count(was, false);
                scope.count(now, true);
                if scope.flags() != before {
                    self.profiles.extend(scope.profiles.iter().copied());
                }
            }
            self.set_jumps(&place, group, now);
        }
    }

    /// Which of a group's chains a scope is to jump to.
    fn set_jumps(&mut self, place: &Place, group: &GroupId, rules: Option<Summary>) {
        let has = rules.map(|summary| summary.has).unwrap_or_default();
        for view in super::VIEWS {
            for ((action, direction), wanted) in CHAINS.into_iter().zip(has) {
                for view in view.written() {
                    let chain = names::scope(*view, action, direction, &place.0, place.1);
                    let target = names::group(*view, action, direction, group);
                    self.jumps.entry(chain).or_default().insert(target, wanted);
                }
            }
        }
    }

    fn shape(&self, key: &ProfileKey) -> Shape {
        let (mut incomplete, mut stateful, mut known) = (false, false, false);
        for scope in key.scopes() {
            let flags = self.index.scopes.get(&(scope, key.phase)).map(Bound::flags);
            incomplete |= flags.is_none_or(|flags| flags.incomplete);
            stateful |= flags.is_some_and(|flags| flags.stateful);
            known |= flags.is_some_and(|flags| flags.known);
        }
        for group in &key.groups {
            match self.index.groups.get(group).and_then(|group| group.rules) {
                Some(summary) => {
                    known = true;
                    stateful |= summary.stateful;
                }
                None => incomplete = true,
            }
        }
        Shape { stateful: stateful || !known, incomplete }
    }

    /// Counts a profile, if it is complete, where it jumps to.
    fn count_views(&mut self, key: &ProfileKey, shape: Option<Shape>, more: bool) {
        let Some(shape) = shape.filter(|shape| !shape.incomplete) else { return };
        let view = shape.view();
        for scope in key.scopes() {
            let place = (scope, key.phase);
            let Some(scope) = self.index.scopes.get_mut(&place) else { continue };
            let count = &mut scope.views[view_index(view)];
            self.views.entry((place, view)).or_insert(*count > 0);
            *count = if more { *count + 1 } else { count.saturating_sub(1) };
        }
        self.groups.extend(key.groups.iter().cloned());
    }

    pub(super) fn write_profiles(&mut self) {
        for number in std::mem::take(&mut self.profiles) {
            let Some(profile) = self.index.profiles.get(&number) else { continue };
            let (key, was, is_gone) = (profile.key.clone(), profile.shape, profile.workloads.is_empty());
            self.count_views(&key, was, false);
            if is_gone {
                self.forget_profile(number, &key);
                self.index.profiles.remove(&number);
                self.erase_profile(number, was);
                continue;
            }
            let shape = self.shape(&key);
            self.count_views(&key, Some(shape), true);
            if let Some(profile) = self.index.profiles.get_mut(&number) {
                profile.shape = Some(shape);
                if was.is_some_and(|was| was.stateful != shape.stateful) {
                    for id in &profile.workloads {
                        let elements = self.index.workloads.get(id).map(|record| record.elements.clone());
                        self.workloads.entry(id.clone()).or_insert(elements.unwrap_or_default());
                    }
                }
            }
            self.write_profile(number, &key, shape);
        }
    }

    fn write_profile(&mut self, number: u32, key: &ProfileKey, shape: Shape) {
        let Some(actual) = self.inputs.actual else { return };
        let groups = &self.index.groups;
        let has = |group: &GroupId| groups.get(group).and_then(|group| group.rules).map(|s| s.has).unwrap_or_default();
        let scopes = &self.index.scopes;
        let denies = |scope: &Scope| {
            let scope = scopes.get(&(scope.clone(), key.phase));
            scope.map(|scope| scope.flags().denies).unwrap_or_default()
        };
        let chains = profile_chains(number);
        let is_new = chains.iter().any(|(chain, ..)| !actual.chains.contains_key(chain));
        for (chain, direction, onward) in chains {
            let rules = match onward {
                true => onward_rules(key, number, shape, direction, has, denies),
                false => profile_rules(key, shape, shape.view(), direction, has, denies),
            };
            self.parts.chain(&chain, actual.chains.get(&chain), None, &rules);
        }
        if is_new {
            let elements = Elements::Keyed(profile_verdicts(number).into());
            let kind = SetKind::NumberToVerdict;
            element_ops(&mut self.parts.verdicts, &names::profiles(), kind, elements, Elements::of(kind));
        }
    }

    fn erase_profile(&mut self, number: u32, was: Option<Shape>) {
        if self.inputs.actual.is_none() || was.is_none() {
            return;
        }
        let elements = Elements::Keyed(profile_verdicts(number).into());
        let kind = SetKind::NumberToVerdict;
        element_ops(&mut self.parts.verdicts, &names::profiles(), kind, Elements::of(kind), elements);
        profile_chains(number).iter().for_each(|(chain, ..)| self.parts.chain_gone(chain));
    }

    /// Scopes that came into use or went out of it as a whole; of the others, single jumps.
    pub(super) fn write_scopes(&mut self) {
        for ((place, view), was) in std::mem::take(&mut self.views) {
            let scope = self.index.scopes.get(&place);
            let is = scope.is_some_and(|scope| scope.views[view_index(view)] > 0);
            if was == is {
                continue;
            }
            self.groups.extend(scope.into_iter().flat_map(|scope| scope.groups.iter().cloned()));
            for (index, (action, direction)) in CHAINS.into_iter().enumerate() {
                for view in view.written() {
                    let chain = names::scope(*view, action, direction, &place.0, place.1);
                    self.jumps.remove(&chain);
                    let Some(actual) = self.inputs.actual else { continue };
                    if !is {
                        self.parts.chain_gone(&chain);
                        continue;
                    }
                    let groups = &self.index.groups;
                    let has = |group: &&GroupId| groups.get(*group).and_then(|g| g.rules).is_some_and(|rules| rules.has[index]);
                    let bound = scope.into_iter().flat_map(|scope| &scope.groups).filter(has);
                    self.parts.chain(&chain, actual.chains.get(&chain), None, &jumps(*view, action, direction, bound));
                }
            }
        }
        let Some(actual) = self.inputs.actual else { return };
        for (chain, wanted) in std::mem::take(&mut self.jumps) {
            if let Some(held) = actual.chains.get(&chain) {
                jump_ops(&chain, &held.rules, wanted, &mut self.parts.rules);
            }
        }
    }

    /// Whether something that is in force jumps to a group's chains.
    pub(super) fn is_used(&self, group: &Group, view: View) -> bool {
        let in_scope = |place: &Place| self.index.scopes.get(place).is_some_and(|scope| scope.views[view_index(view)] > 0);
        let in_profile = |number: &u32| {
            let shape = self.index.profiles.get(number).and_then(|profile: &Profile| profile.shape);
            shape.is_some_and(|shape| !shape.incomplete && shape.view() == view)
        };
        group.scopes.iter().any(in_scope) || group.profiles.iter().any(in_profile)
    }
}

fn summary(documents: &impl Documents, group: &GroupId) -> Option<Summary> {
    rules_of(documents, group).map(|rules| Summary { stateful: rules.stateful, has: has(rules) })
}

fn target(rule: &Rule) -> Option<&Name> {
    match &rule[..] {
        [Statement::Verdict(Verdict::Jump(chain))] => Some(chain),
        _ => None,
    }
}

/// Jumps stand in the order of their names, so that the place of each is found without looking at the others.
fn jump_ops(chain: &Name, held: &[Rule], wanted: std::collections::BTreeMap<Name, bool>, ops: &mut Vec<Op>) {
    let place = |name: &Name| held.binary_search_by(|rule| target(rule).cmp(&Some(name)));
    let gone: Vec<usize> = wanted.iter().filter(|(_, wanted)| !**wanted).filter_map(|(name, _)| place(name).ok()).collect();
    // From the end, so that places before stay what they are.
    ops.extend(gone.iter().rev().map(|at| Op::DeleteRule { chain: chain.clone(), at: *at }));
    let mut added = 0;
    for (name, _) in wanted.iter().filter(|(_, wanted)| **wanted) {
        if let Err(at) = place(name) {
            let at = at - gone.partition_point(|gone| *gone < at) + added;
            ops.push(Op::AddRule { chain: chain.clone(), at, rule: vec![Statement::jump(name)] });
            added += 1;
        }
    }
}
