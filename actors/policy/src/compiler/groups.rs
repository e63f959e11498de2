//! Groups: what changed between the old and the new document, and the indexes it touches.

use std::sync::Arc;

use super::{Compiler, PHASES, slots_in};
use crate::doc::Phases;
use crate::ids::GroupId;
use crate::model::{Group, Target};
use crate::net::Family;
use crate::normal::Families;
use crate::rule::Remote;

impl Compiler {
    pub(super) fn set_group(&mut self, id: &GroupId, new: Option<&Arc<Group>>) {
        let (g, _) = self.groups.ensure(id);
        let old = self.groups[g].group.clone();
        if old.as_ref() == new {
            return;
        }
        self.pending.groups.entry(g).or_insert_with(|| old.clone());
        self.note_members(g);
        // A group that goes or admits other members is emptied first and filled again when all else stands.
        let admission = |group: &Arc<Group>| (group.internet_member, group.healthy_members);
        let admits_alike = old.as_ref().map(admission) == new.map(admission);
        if !admits_alike {
            self.drop_members(g);
        }
        let row = &mut self.groups[g];
        row.group = new.cloned();
        row.admits_internet = new.is_some_and(|group| group.internet_member);
        row.wants_health = new.is_some_and(|group| group.healthy_members);
        self.groups.touch(g);
        self.set_kind(g, old.as_deref(), new.map(|n| &**n));
        let mut renamed = self.set_remotes(g, new.map(|n| &**n));
        self.set_bindings(g, old.as_deref(), new.map(|n| &**n));
        if let (Some(old), Some(new)) = (&old, new)
            && self.groups[g].members.is_some()
        {
            new.members.difference(&old.members).for_each(|member| self.add_member(g, *member));
            old.members.difference(&new.members).for_each(|member| self.sub_member(g, *member));
        }
        renamed.push(g);
        renamed.into_iter().for_each(|r| self.settle_members(r));
    }

    /// The groups that a group's rules name, each once.
    fn remotes(&mut self, group: Option<&Group>) -> Vec<(u32, Families)> {
        let mut remotes: Vec<(u32, Families)> = Vec::new();
        for rule in group.iter().flat_map(|group| &group.rules) {
            if let Remote::Group(id) = &rule.rule.remote {
                remotes.push((self.groups.ensure(id).0, rule.rule.families()));
            }
        }
        remotes.sort_unstable();
        remotes.dedup_by(|later, earlier| {
            let same = later.0 == earlier.0;
            if same {
                earlier.1 = earlier.1.union(later.1);
            }
            same
        });
        remotes
    }

    /// Returns the groups that are named differently now.
    fn set_remotes(&mut self, g: u32, group: Option<&Group>) -> Vec<u32> {
        let new = self.remotes(group);
        if *new == *self.groups[g].remotes {
            return Vec::new();
        }
        let old = std::mem::replace(&mut self.groups[g].remotes, new.iter().copied().collect());
        let hosts: Vec<u32> = self.groups[g].hosts.keys().collect();
        let mut touched = Vec::new();
        for (remote, families) in new.iter().filter(|r| !old.contains(r)) {
            self.note_members(*remote);
            let row = &mut self.groups[*remote];
            row.named += 1;
            families.iter().for_each(|family| row.named_families[family_index(family)] += 1);
            touched.push(*remote);
        }
        for (remote, families) in old.iter().filter(|r| !new.contains(r)) {
            self.note_members(*remote);
            let row = &mut self.groups[*remote];
            row.named -= 1;
            families.iter().for_each(|family| row.named_families[family_index(family)] -= 1);
            self.groups.touch(*remote);
            touched.push(*remote);
        }
        let has = |list: &[(u32, Families)], remote: u32| list.binary_search_by_key(&remote, |(r, _)| *r).is_ok();
        for (remote, _) in new.iter().filter(|(r, _)| !has(&old, *r)) {
            for h in &hosts {
                if self.groups[*remote].member_hosts.add(*h) {
                    self.pending.toggle_members(*remote, *h);
                }
            }
        }
        for (remote, _) in old.iter().filter(|(r, _)| !has(&new, *r)) {
            for h in &hosts {
                if self.groups[*remote].member_hosts.sub(*h) {
                    self.pending.toggle_members(*remote, *h);
                }
            }
        }
        touched
    }

    fn set_bindings(&mut self, g: u32, old: Option<&Group>, new: Option<&Group>) {
        let mut affected: Vec<u32> = Vec::new();
        if old.is_some() != new.is_some() {
            affected.extend(self.groups[g].claims.iter().flat_map(|claims| claims.iter()));
        }
        if old.map(|o| &o.bindings) != new.map(|n| &n.bindings) {
            let old = old.map(Group::bound).unwrap_or_default();
            let new = new.map(Group::bound).unwrap_or_default();
            for (target, phases) in &new {
                let before = old.get(target).copied();
                if before != Some(*phases) {
                    self.rebind(g, target, before, Some(*phases), &mut affected);
                }
            }
            for (target, phases) in old.iter().filter(|(target, _)| !new.contains_key(*target)) {
                self.rebind(g, target, Some(*phases), None, &mut affected);
            }
        }
        affected.sort_unstable();
        affected.dedup();
        affected.into_iter().for_each(|w| self.refresh_direct(w));
    }

    /// Changes one binding; workloads whose direct groups may change are added to `affected`.
    fn rebind(&mut self, g: u32, target: &Target, old: Option<Phases>, new: Option<Phases>, affected: &mut Vec<u32>) {
        if let Some(scope) = target.scope() {
            let (s, _) = self.scopes.ensure(&scope);
            return self.rebind_scope(s, g, old, new);
        }
        match target {
            Target::Workload(id) => {
                let (w, _) = self.workloads.ensure(id);
                replace(&mut self.workloads[w].bound, g, new);
                self.workloads.touch(w);
                affected.push(w);
            }
            Target::Selector(selector) => {
                affected.extend(self.selected(selector));
                self.set_selector(selector, g, new);
            }
            Target::Global | Target::Space(_) | Target::App(_) => {}
        }
    }

    fn rebind_scope(&mut self, s: u32, g: u32, old: Option<Phases>, new: Option<Phases>) {
        self.pending.note_scope(s, g, old, self.scopes[s].bound.is_empty());
        replace(&mut self.scopes[s].bound, g, new);
        self.count_kind(s, g, old, new);
        self.scopes.touch(s);
        for phase in PHASES {
            let had = old.is_some_and(|phases| phases.contains(phase));
            let has = new.is_some_and(|phases| phases.contains(phase));
            if had == has {
                continue;
            }
            let hosts: Vec<u32> = slots_in(phase, self.scopes[s].hosts.keys()).collect();
            for h in hosts {
                if has { self.host_gains(g, h) } else { self.host_loses(g, h) }
            }
            if self.groups[g].members.is_some() {
                let workloads = self.workloads_in(s, phase);
                for w in workloads {
                    let Some(entry) = self.workloads[w].entry.clone() else { continue };
                    if has { self.add_members(g, &entry) } else { self.sub_members(g, &entry) }
                }
            }
        }
    }

    /// Makes the members document exist exactly when it must.
    fn settle_members(&mut self, g: u32) {
        let row = &self.groups[g];
        let needed = row.group.is_some() && row.named > 0;
        match (needed, row.members.is_some()) {
            (true, false) => self.build_members(g),
            (false, true) => self.drop_members(g),
            _ => {}
        }
    }

    fn drop_members(&mut self, g: u32) {
        if let Some(members) = self.groups[g].members.take() {
            self.pending.members_dropped(g, &members);
        }
    }

    /// Counts every reason there is.
    fn build_members(&mut self, g: u32) {
        let Some(group) = self.groups[g].group.clone() else { return };
        self.groups[g].members = Some(Default::default());
        group.members.iter().for_each(|member| self.add_member(g, *member));
        for (target, phases) in group.bound() {
            let Some(s) = target.scope().and_then(|scope| self.scopes.get(&scope)) else { continue };
            for phase in PHASES.into_iter().filter(|phase| phases.contains(*phase)) {
                let workloads = self.workloads_in(s, phase);
                workloads.into_iter().for_each(|w| self.add_members_of(g, w));
            }
        }
        self.having_directly(g, &group).into_iter().for_each(|w| self.add_members_of(g, w));
    }

    /// The workloads that have a group directly. Not kept: only a group that comes to be named asks.
    pub(super) fn having_directly(&self, g: u32, group: &Group) -> Vec<u32> {
        let mut workloads: Vec<u32> = self.groups[g].claims.iter().flat_map(|claims| claims.iter()).collect();
        for target in group.bound().into_keys() {
            match target {
                Target::Workload(id) => workloads.extend(self.workloads.get(id)),
                Target::Selector(selector) => workloads.extend(self.selected(selector)),
                Target::Global | Target::Space(_) | Target::App(_) => {}
            }
        }
        workloads.retain(|w| self.workloads[*w].direct.binary_search(&g).is_ok());
        workloads.sort_unstable();
        workloads.dedup();
        workloads
    }

    fn add_members_of(&mut self, g: u32, w: u32) {
        if let Some(entry) = self.workloads[w].entry.clone() {
            self.add_members(g, &entry);
        }
    }
}

fn family_index(family: Family) -> usize {
    match family {
        Family::V4 => 0,
        Family::V6 => 1,
    }
}

/// Sets or removes a group's entry in a list sorted by group.
pub(super) fn replace(list: &mut Vec<(u32, Phases)>, g: u32, new: Option<Phases>) {
    match (list.binary_search_by_key(&g, |(slot, _)| *slot), new) {
        (Ok(at), Some(phases)) => list[at].1 = phases,
        (Ok(at), None) => {
            list.remove(at);
        }
        (Err(at), Some(phases)) => list.insert(at, (g, phases)),
        (Err(_), None) => {}
    }
}
