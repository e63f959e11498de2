//! Which workloads have stateful and stateless groups at once. [`mixed_workloads`](crate::check::mixed_workloads) computes the same
//! from scratch.

use super::pending::Pending;
use super::{Compiler, MixedChange, PHASES, phase_index};
use crate::doc::{Phase, Phases};
use crate::ids::WorkloadId;
use crate::model::Group;

/// Numbers of groups, by phase, stateful ones first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kinds([[u32; 2]; 2]);

impl Kinds {
    fn of(&mut self, phase: Phase, is_stateless: bool) -> &mut u32 {
        &mut self.0[phase_index(phase) as usize][usize::from(is_stateless)]
    }

    /// Whether there are stateful ones, and whether there are stateless ones.
    fn present(&self, phase: Phase) -> [bool; 2] {
        self.0[phase_index(phase) as usize].map(|count| count > 0)
    }
}

impl Compiler {
    /// A group's binding to a scope has changed; its kind has not.
    pub(super) fn count_kind(&mut self, s: u32, g: u32, old: Option<Phases>, new: Option<Phases>) {
        let is_stateless = self.groups[g].is_stateless;
        let kinds = &mut self.scopes[s].kinds;
        self.pending.kinds.entry(s).or_insert(*kinds);
        for phase in PHASES {
            if old.is_some_and(|phases| phases.contains(phase)) {
                *kinds.of(phase, is_stateless) -= 1;
            }
            if new.is_some_and(|phases| phases.contains(phase)) {
                *kinds.of(phase, is_stateless) += 1;
            }
        }
    }

    /// Must come before a group's bindings change. A group that goes keeps its kind until they are gone.
    pub(super) fn set_kind(&mut self, g: u32, old: Option<&Group>, new: Option<&Group>) {
        let counts = |group: Option<&Group>| usize::from(group.is_some_and(|group| !group.stateful));
        self.stateless = self.stateless - counts(old) + counts(new);
        let Some(new) = new else { return };
        let Some(old) = old.filter(|old| old.stateful != new.stateful) else {
            self.groups[g].is_stateless = !new.stateful;
            return;
        };
        let bound = old.bound();
        let scopes = bound.iter().filter_map(|(target, phases)| Some((self.scopes.get(&target.scope()?)?, *phases)));
        let scopes: Vec<(u32, Phases)> = scopes.collect();
        scopes.iter().for_each(|(s, phases)| self.count_kind(*s, g, Some(*phases), None));
        self.groups[g].is_stateless = !new.stateful;
        scopes.iter().for_each(|(s, phases)| self.count_kind(*s, g, None, Some(*phases)));
        let direct = self.having_directly(g, old);
        self.pending.rekinded.extend(direct);
    }

    /// What the batch has changed. Workloads that came, went or have other groups of their own are noted; of a scope all are looked
    /// at, but only when a kind of group has come to it or gone from it.
    pub(super) fn mixed_change(&mut self, pending: &Pending) -> MixedChange {
        if self.stateless == 0 && self.mixed.is_empty() {
            return MixedChange::default();
        }
        let mut candidates: Vec<u32> = pending.workloads.keys().chain(&pending.rekinded).copied().collect();
        for (s, before) in &pending.kinds {
            for phase in PHASES {
                if before.present(phase) != self.scopes[*s].kinds.present(phase) {
                    candidates.extend(self.workloads_in(*s, phase));
                }
            }
        }
        candidates.sort_unstable();
        candidates.dedup();
        let (mut gained, mut lost) = (Vec::new(), Vec::new());
        for w in candidates {
            if self.is_mixed(w) {
                if self.mixed.insert(w) {
                    gained.push(w);
                }
            } else if self.mixed.remove(&w) {
                lost.push(w);
            }
        }
        MixedChange { gained: self.names(gained.into_iter()), lost: self.names(lost.into_iter()) }
    }

    fn is_mixed(&self, w: u32) -> bool {
        let row = &self.workloads[w];
        let Some(entry) = &row.entry else { return false };
        let mut present = [false; 2];
        for s in self.scopes_of(w) {
            let [stateful, stateless] = self.scopes[s].kinds.present(entry.phase);
            present = [present[0] || stateful, present[1] || stateless];
        }
        row.direct.iter().for_each(|g| present[usize::from(self.groups[*g].is_stateless)] = true);
        present == [true; 2]
    }

    pub(super) fn names(&self, workloads: impl Iterator<Item = u32>) -> Vec<WorkloadId> {
        let mut names: Vec<WorkloadId> = workloads.map(|w| self.workloads.key(w).clone()).collect();
        names.sort_unstable();
        names
    }
}
