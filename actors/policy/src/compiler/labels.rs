//! Label sets against selectors. Equal ones exist once, so a selector is tried once per distinct label set, and an index by label
//! leads from either side to the few candidates of the other.

use std::sync::Arc;

use super::table::{Counts, Map};
use super::{Compiler, NONE};
use crate::model::{Labels, Requirement, Selector};
use crate::topic::Scope;

/// Where selectors of the global scope are looked for: each under labels without which it cannot match.
#[derive(Default)]
pub(super) struct Anchors {
    pairs: Map<(Arc<str>, Arc<str>), Anchor>,
    keys: Map<Arc<str>, Anchor>,
    /// Selectors that demand no label.
    rest: Vec<u32>,
}

#[derive(Default)]
struct Anchor {
    selectors: Vec<u32>,
    labels: Counts<u32>,
}

/// A requirement that names labels one of which must be there.
enum Place<'s> {
    Pairs(Vec<(Arc<str>, Arc<str>)>),
    Key(&'s Arc<str>),
    Rest,
}

fn place(selector: &Selector) -> Place<'_> {
    let pairs = selector.requirements().iter().find_map(|requirement| match requirement {
        Requirement::In { key, values } => Some(values.iter().map(|value| (key.clone(), value.clone())).collect()),
        _ => None,
    });
    let key = selector.requirements().iter().find_map(|requirement| match requirement {
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
            candidates.extend(&pair.selectors);
            let anchor = self.anchors.keys.entry(key.clone()).or_default();
            anchor.labels.add(slot);
            candidates.extend(&anchor.selectors);
        }
        candidates.retain(|selector| self.selectors.key(*selector).matches(labels));
        candidates.sort_unstable();
        candidates.dedup();
        self.labels[slot].matches = candidates;
        slot
    }

    pub(super) fn sweep_labels(&mut self) {
        let anchors = &mut self.anchors;
        self.labels.sweep(|slot, labels, _| {
            for (key, value) in labels.iter() {
                let pair = (key.clone(), value.clone());
                if let Some(anchor) = anchors.pairs.get_mut(&pair) {
                    anchor.labels.sub(slot);
                    if anchor.labels.is_empty() && anchor.selectors.is_empty() {
                        anchors.pairs.remove(&pair);
                    }
                }
                if let Some(anchor) = anchors.keys.get_mut(key) {
                    anchor.labels.sub(slot);
                    if anchor.labels.is_empty() && anchor.selectors.is_empty() {
                        anchors.keys.remove(key);
                    }
                }
            }
        });
    }

    /// The slot of a selector, known to everything it could match.
    pub(super) fn ensure_selector(&mut self, selector: &Selector) -> u32 {
        let (slot, _) = self.selectors.ensure(selector);
        // A selector without groups is registered nowhere.
        if !self.selectors[slot].groups.is_empty() {
            return slot;
        }
        if selector.within != Scope::Global {
            let (scope, _) = self.scopes.ensure(&selector.within);
            self.scopes[scope].selectors.push(slot);
            return slot;
        }
        let mut sets: Vec<u32> = Vec::new();
        match place(selector) {
            Place::Pairs(pairs) => {
                for pair in pairs {
                    let anchor = self.anchors.pairs.entry(pair).or_default();
                    anchor.selectors.push(slot);
                    sets.extend(anchor.labels.keys());
                }
            }
            Place::Key(key) => {
                let anchor = self.anchors.keys.entry(key.clone()).or_default();
                anchor.selectors.push(slot);
                sets.extend(anchor.labels.keys());
            }
            Place::Rest => {
                self.anchors.rest.push(slot);
                sets.extend(self.labels.slots());
            }
        }
        for set in sets {
            if selector.matches(self.labels.key(set)) && !self.labels[set].matches.contains(&slot) {
                self.labels[set].matches.push(slot);
            }
        }
        slot
    }

    /// Forgets a selector that no group uses any more.
    pub(super) fn forget_selector(&mut self, slot: u32) {
        self.selectors.touch(slot);
        let selector = self.selectors.key(slot).clone();
        if selector.within != Scope::Global {
            if let Some(scope) = self.scopes.get(&selector.within) {
                self.scopes[scope].selectors.retain(|s| *s != slot);
                self.scopes.touch(scope);
            }
            return;
        }
        for set in self.label_sets_of(&selector) {
            self.labels[set].matches.retain(|s| *s != slot);
        }
        match place(&selector) {
            Place::Pairs(pairs) => {
                for pair in pairs {
                    if let Some(anchor) = self.anchors.pairs.get_mut(&pair) {
                        anchor.selectors.retain(|s| *s != slot);
                        if anchor.labels.is_empty() && anchor.selectors.is_empty() {
                            self.anchors.pairs.remove(&pair);
                        }
                    }
                }
            }
            Place::Key(key) => {
                if let Some(anchor) = self.anchors.keys.get_mut(key) {
                    anchor.selectors.retain(|s| *s != slot);
                    if anchor.labels.is_empty() && anchor.selectors.is_empty() {
                        self.anchors.keys.remove(key);
                    }
                }
            }
            Place::Rest => self.anchors.rest.retain(|s| *s != slot),
        }
    }

    /// Label sets that a selector of the global scope could match.
    fn label_sets_of(&self, selector: &Selector) -> Vec<u32> {
        match place(selector) {
            Place::Pairs(pairs) => {
                let anchors = pairs.iter().filter_map(|pair| self.anchors.pairs.get(pair));
                anchors.flat_map(|anchor| anchor.labels.keys()).collect()
            }
            Place::Key(key) => self.anchors.keys.get(key).into_iter().flat_map(|anchor| anchor.labels.keys()).collect(),
            Place::Rest => self.labels.slots().collect(),
        }
    }

    /// The workloads a selector selects, of every phase.
    pub(super) fn selected(&self, slot: u32) -> Vec<u32> {
        let selector = self.selectors.key(slot);
        if selector.within == Scope::Global {
            let sets = self.label_sets_of(selector).into_iter().filter(|set| self.labels[*set].matches.contains(&slot));
            return sets.flat_map(|set| self.labels[set].workloads.keys()).collect();
        }
        let Some(scope) = self.scopes.get(&selector.within) else { return Vec::new() };
        let inside = self.scopes[scope].workloads.iter().flat_map(Counts::keys);
        inside.filter(|w| selector.matches(self.labels.key(self.workloads[*w].labels))).collect()
    }

    /// The selectors that select a registered workload.
    pub(super) fn selectors_of(&self, w: u32, mut put: impl FnMut(u32)) {
        let row = &self.workloads[w];
        if row.labels == NONE {
            return;
        }
        self.labels[row.labels].matches.iter().for_each(|selector| put(*selector));
        let labels = self.labels.key(row.labels);
        for scope in [row.space, row.app].into_iter().filter(|scope| *scope != NONE) {
            let inside = self.scopes[scope].selectors.iter();
            inside.filter(|s| self.selectors.key(**s).matches(labels)).for_each(|selector| put(*selector));
        }
    }
}
