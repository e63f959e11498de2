//! What a batch has touched so far: first states, and toggles whose parity says whether something changed in the end.

use std::sync::Arc;

use super::Compiler;
use super::few::{Map, MemberCounts};
use super::mixed::Kinds;
use crate::doc::{Phases, Placement};
use crate::model::Group;
use crate::net::Prefix;
use crate::normal::Families;

/// A topic by slots, small enough to be noted by the hundred thousand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TopicSlot {
    Scope(u32),
    Host(u32),
    Rules(u32),
    Members(u32),
}

pub(super) struct MembersBefore {
    pub existed: bool,
    pub families: Families,
    /// Members that came or went, once per transition.
    pub toggles: Vec<Prefix>,
    /// The content before the batch, if the set was dropped within it.
    pub dropped: Option<Vec<Prefix>>,
}

#[derive(Default)]
pub(super) struct Pending {
    pub groups: Map<u32, Option<Arc<Group>>>,
    pub members: Map<u32, MembersBefore>,
    /// (scope, group, phases before); the first of a pair counts.
    pub scopes: Vec<(u32, u32, Option<Phases>)>,
    pub scope_was_empty: Map<u32, bool>,
    /// Of scopes where a binding changed: the kinds of groups before.
    pub kinds: Map<u32, Kinds>,
    /// Workloads that have a group directly which became stateful or stateless.
    pub rekinded: Vec<u32>,
    /// Host and placement before.
    pub workloads: Map<u32, Option<(u32, Placement)>>,
    /// Whether the host had workloads before.
    pub hosts: Map<u32, bool>,
    /// (topic, host), once per transition between following and not.
    pub follows: Vec<(TopicSlot, u32)>,
}

impl Pending {
    pub fn toggle_host(&mut self, h: u32) {
        self.follows.push((TopicSlot::Host(h), h));
    }

    pub fn toggle_scope(&mut self, s: u32, h: u32) {
        self.follows.push((TopicSlot::Scope(s), h));
    }

    pub fn toggle_rules(&mut self, g: u32, h: u32) {
        self.follows.push((TopicSlot::Rules(g), h));
    }

    pub fn toggle_members(&mut self, g: u32, h: u32) {
        self.follows.push((TopicSlot::Members(g), h));
    }

    pub fn note_scope(&mut self, s: u32, g: u32, before: Option<Phases>, was_empty: bool) {
        self.scope_was_empty.entry(s).or_insert(was_empty);
        self.scopes.push((s, g, before));
    }

    /// A member came or went. Without a note the document existed before the batch, with these families.
    pub fn toggle_member(&mut self, g: u32, member: Prefix, families: Families) {
        let unchanged = || MembersBefore { existed: true, families, toggles: Vec::new(), dropped: None };
        let before = self.members.entry(g).or_insert_with(unchanged);
        if before.existed && before.dropped.is_none() {
            before.toggles.push(member);
        }
    }

    pub fn members_dropped(&mut self, g: u32, members: &MemberCounts) {
        if let Some(before) = self.members.get_mut(&g)
            && before.existed
            && before.dropped.is_none()
        {
            before.dropped = Some(undo(members.keys().collect(), std::mem::take(&mut before.toggles)));
        }
    }
}

/// The members that changed in the end: those with an odd number of toggles, sorted.
pub(super) fn odd<T: Ord + Copy>(mut toggles: Vec<T>) -> Vec<T> {
    toggles.sort_unstable();
    toggles.chunk_by(|a, b| a == b).filter(|chunk| chunk.len() % 2 == 1).map(|chunk| chunk[0]).collect()
}

/// The set before the toggles.
pub(super) fn undo(mut now: Vec<Prefix>, toggles: Vec<Prefix>) -> Vec<Prefix> {
    // What was there and what changed: a member in one of the lists was there before, in both or none it was not.
    now.extend(odd(toggles));
    odd(now)
}

impl Compiler {
    pub(super) fn note_workload(&mut self, w: u32) {
        if self.pending.workloads.contains_key(&w) {
            return;
        }
        let before = self.placement(w).map(|placement| (self.workloads[w].host, placement));
        self.pending.workloads.insert(w, before);
    }

    pub(super) fn note_host(&mut self, h: u32) {
        let had = self.hosts[h].workloads > 0;
        self.pending.hosts.entry(h).or_insert(had);
    }

    /// Must come before anything changes a group's members or which families are named.
    pub(super) fn note_members(&mut self, g: u32) {
        let row = &self.groups[g];
        let (existed, families) = (row.members.is_some(), row.families());
        let fresh = || MembersBefore { existed, families, toggles: Vec::new(), dropped: None };
        self.pending.members.entry(g).or_insert_with(fresh);
    }
}
