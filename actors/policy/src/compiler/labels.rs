//! Label sets against selectors. Equal label sets exist once, and so do equal conditions of selectors. Those of the global scope are
//! tried once per distinct label set, and an index by label leads from either side to the few candidates of the other; those of
//! another scope are few, and are tried when a workload comes into it.

use std::sync::Arc;

use super::few::{Map, Set};
use super::groups::replace;
use super::{Compiler, NONE, ScopedSelector};
use crate::doc::{Phase, Phases};
use crate::model::{Labels, Requirement, Selector, fulfils};
use crate::topic::Scope;

/// Where conditions of the global scope are looked for: each under labels without which they cannot hold.
#[derive(Default)]
pub(super) struct Anchors {
    pairs: Map<(Arc<str>, Arc<str>), Anchor>,
    keys: Map<Arc<str>, Anchor>,
    /// Conditions that demand no label.
    rest: Vec<u32>,
}

#[derive(Default)]
struct Anchor {
    conditions: Vec<u32>,
    labels: Set<u32, 1>,
}

/// A requirement that names labels one of which must be there.
enum Place<'s> {
    Pairs(Vec<(Arc<str>, Arc<str>)>),
    Key(&'s Arc<str>),
    Rest,
}

fn place(conditions: &[Requirement]) -> Place<'_> {
    let pairs = conditions.iter().find_map(|requirement| match requirement {
        Requirement::In { key, values } => Some(values.iter().map(|value| (key.clone(), value.clone())).collect()),
        _ => None,
    });
    let key = conditions.iter().find_map(|requirement| match requirement {
        Requirement::Exists(key) => Some(key),
        _ => None,
    });
    match (pairs, key) {
        (Some(pairs), _) => Place::Pairs(pairs),
        (None, Some(key)) => Place::Key(key),
        (None, None) => Place::Rest,
    }
}

impl Compiler {
    /// The slot of a label set; a new one is matched against the selectors of the global scope.
    pub(super) fn ensure_labels(&mut self, labels: &Labels) -> u32 {
        let (slot, is_new) = self.labels.ensure(labels);
        if !is_new {
            return slot;
        }
        let mut candidates = self.anchors.rest.clone();
        for (key, value) in labels.iter() {
            let pair = self.anchors.pairs.entry((key.clone(), value.clone())).or_default();
            pair.labels.add(slot);
            candidates.extend(&pair.conditions);
            let anchor = self.anchors.keys.entry(key.clone()).or_default();
            anchor.labels.add(slot);
            candidates.extend(&anchor.conditions);
        }
        candidates.retain(|conditions| fulfils(labels, self.conditions.key(*conditions)));
        candidates.sort_unstable();
        candidates.dedup();
        self.labels[slot].matches = candidates;
        slot
    }

    pub(super) fn sweep_labels(&mut self) {
        let anchors = &mut self.anchors;
        self.labels.sweep(|slot, labels| {
            for (key, value) in labels.iter() {
                let pair = (key.clone(), value.clone());
                if let Some(anchor) = anchors.pairs.get_mut(&pair) {
                    anchor.labels.sub(slot);
                    if anchor.labels.is_empty() && anchor.conditions.is_empty() {
                        anchors.pairs.remove(&pair);
                    }
                }
                if let Some(anchor) = anchors.keys.get_mut(key) {
                    anchor.labels.sub(slot);
                    if anchor.labels.is_empty() && anchor.conditions.is_empty() {
                        anchors.keys.remove(key);
                    }
                }
            }
        });
    }

    /// Sets or removes what a selector leads to.
    pub(super) fn set_selector(&mut self, selector: &Selector, g: u32, new: Option<Phases>) {
        let (conditions, _) = self.conditions.ensure(selector.requirements());
        if selector.within == Scope::Global {
            if self.conditions[conditions].groups.is_empty() {
                self.anchor(conditions);
            }
            replace(&mut self.conditions[conditions].groups, g, new);
            if self.conditions[conditions].groups.is_empty() {
                self.weigh_anchor(conditions);
            }
        } else {
            let (scope, _) = self.scopes.ensure(&selector.within);
            let list = &mut self.scopes[scope].selectors;
            match (list.binary_search_by_key(&(conditions, g), |s| (s.conditions, s.group)), new) {
                (Ok(at), Some(phases)) => list.get_mut(at).phases = phases.bits(),
                (Ok(at), None) => {
                    list.remove(at);
                    self.conditions[conditions].scoped -= 1;
                }
                (Err(at), Some(phases)) => {
                    list.insert(at, ScopedSelector { conditions, group: g, phases: phases.bits() });
                    self.conditions[conditions].scoped += 1;
                }
                (Err(_), None) => {}
            }
            self.scopes.touch(scope);
        }
        self.conditions.touch(conditions);
    }

    /// Makes conditions of the global scope known to everything that could fulfil them.
    fn anchor(&mut self, slot: u32) {
        let conditions = self.conditions.key(slot);
        let mut sets: Vec<u32> = Vec::new();
        match place(conditions) {
            Place::Pairs(pairs) => {
                for pair in pairs {
                    let anchor = self.anchors.pairs.entry(pair).or_default();
                    anchor.conditions.push(slot);
                    sets.extend(anchor.labels.iter());
                }
            }
            Place::Key(key) => {
                let anchor = self.anchors.keys.entry(key.clone()).or_default();
                anchor.conditions.push(slot);
                sets.extend(anchor.labels.iter());
            }
            Place::Rest => {
                self.anchors.rest.push(slot);
                sets.extend(self.labels.slots());
            }
        }
        for set in sets {
            if fulfils(self.labels.key(set), conditions) && !self.labels[set].matches.contains(&slot) {
                self.labels[set].matches.push(slot);
            }
        }
    }

    /// Forgets conditions that no selector of the global scope has any more.
    fn weigh_anchor(&mut self, slot: u32) {
        let conditions = self.conditions.key(slot);
        for set in self.label_sets_of(conditions) {
            self.labels[set].matches.retain(|s| *s != slot);
        }
        match place(conditions) {
            Place::Pairs(pairs) => {
                for pair in pairs {
                    if let Some(anchor) = self.anchors.pairs.get_mut(&pair) {
                        anchor.conditions.retain(|s| *s != slot);
                        if anchor.labels.is_empty() && anchor.conditions.is_empty() {
                            self.anchors.pairs.remove(&pair);
                        }
                    }
                }
            }
            Place::Key(key) => {
                if let Some(anchor) = self.anchors.keys.get_mut(key) {
                    anchor.conditions.retain(|s| *s != slot);
                    if anchor.labels.is_empty() && anchor.conditions.is_empty() {
                        self.anchors.keys.remove(key);
                    }
                }
            }
            Place::Rest => self.anchors.rest.retain(|s| *s != slot),
        }
    }

    /// Label sets that could fulfil conditions of the global scope.
    fn label_sets_of(&self, conditions: &[Requirement]) -> Vec<u32> {
        match place(conditions) {
            Place::Pairs(pairs) => {
                let anchors = pairs.iter().filter_map(|pair| self.anchors.pairs.get(pair));
                anchors.flat_map(|anchor| anchor.labels.iter()).collect()
            }
            Place::Key(key) => self.anchors.keys.get(key).into_iter().flat_map(|anchor| anchor.labels.iter()).collect(),
            Place::Rest => self.labels.slots().collect(),
        }
    }

    /// The workloads a selector selects, of every phase.
    pub(super) fn selected(&self, selector: &Selector) -> Vec<u32> {
        let conditions = selector.requirements();
        let fulfils = |set: u32| fulfils(self.labels.key(set), conditions);
        if selector.within == Scope::Global {
            let sets = self.label_sets_of(conditions).into_iter().filter(|set| fulfils(*set));
            return sets.flat_map(|set| self.labels[set].workloads.iter()).collect();
        }
        let Some(scope) = self.scopes.get(&selector.within) else { return Vec::new() };
        let inside = self.scopes[scope].workloads.iter().map(|key| key / 2);
        inside.filter(|w| fulfils(self.workloads[*w].labels)).collect()
    }

    /// The groups that selectors give to a registered workload; some perhaps more than once.
    pub(super) fn selected_groups(&self, w: u32, phase: Phase, mut put: impl FnMut(u32)) {
        let row = &self.workloads[w];
        if row.labels == NONE {
            return;
        }
        for conditions in &self.labels[row.labels].matches {
            let groups = self.conditions[*conditions].groups.iter();
            groups.filter(|(_, phases)| phases.contains(phase)).for_each(|(g, _)| put(*g));
        }
        let labels = self.labels.key(row.labels);
        for scope in [row.space, row.app].into_iter().filter(|scope| *scope != NONE) {
            for alike in self.scopes[scope].selectors.chunk_by(|a, b| a.conditions == b.conditions) {
                if fulfils(labels, self.conditions.key(alike[0].conditions)) {
                    alike.iter().filter(|selector| selector.covers(phase)).for_each(|selector| put(selector.group));
                }
            }
        }
    }
}
