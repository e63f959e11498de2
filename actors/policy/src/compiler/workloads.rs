//! Workloads and templates: taken out of every index and put in again with their new slots.

use std::sync::Arc;

use super::few::List;
use super::{Compiler, GLOBAL, NONE, in_phase, slots_in};
use crate::doc::Phase;
use crate::ids::{TemplateId, WorkloadId};
use crate::model::{Template, Workload};
use crate::net::Prefix;
use crate::topic::Scope;

impl Compiler {
    pub(super) fn set_workload(&mut self, id: &WorkloadId, new: Option<&Arc<Workload>>) {
        let (w, _) = self.workloads.ensure(id);
        if self.workloads[w].entry.as_ref() == new {
            return;
        }
        self.note_workload(w);
        self.detach(w);
        self.workloads[w].entry = new.cloned();
        self.workloads.touch(w);
        self.attach(w);
    }

    pub(super) fn set_template(&mut self, id: &TemplateId, new: Option<&Arc<Template>>) {
        let (t, _) = self.templates.ensure(id);
        if self.templates[t].template.as_ref() == new {
            return;
        }
        let users: Vec<u32> = self.templates[t].workloads.iter().collect();
        for w in &users {
            self.note_workload(*w);
            self.detach(*w);
        }
        self.templates[t].template = new.cloned();
        self.templates.touch(t);
        users.into_iter().for_each(|w| self.attach(w));
    }

    /// The scopes a registered workload is in.
    pub(super) fn scopes_of(&self, w: u32) -> impl Iterator<Item = u32> + use<> {
        let row = &self.workloads[w];
        [GLOBAL, row.space, row.app].into_iter().filter(|scope| *scope != NONE)
    }

    /// The registered workloads of one phase in a scope.
    pub(super) fn workloads_in(&self, s: u32, phase: Phase) -> Vec<u32> {
        if s != GLOBAL {
            return slots_in(phase, self.scopes[s].workloads.iter()).collect();
        }
        let attached = self.workloads.slots().filter(|w| self.workloads[*w].host != NONE);
        attached.filter(|w| self.workloads[*w].entry.as_ref().is_some_and(|entry| entry.phase == phase)).collect()
    }

    fn attach(&mut self, w: u32) {
        let Some(entry) = self.workloads[w].entry.clone() else { return };
        let (h, _) = self.hosts.ensure(&entry.host);
        self.note_host(h);
        self.hosts[h].workloads += 1;
        if self.hosts[h].workloads == 1 {
            self.pending.toggle_host(h);
        }
        let space = entry.space.as_ref().map_or(NONE, |id| self.scopes.ensure(&Scope::Space(id.clone())).0);
        let app = entry.app.as_ref().map_or(NONE, |id| self.scopes.ensure(&Scope::App(id.clone())).0);
        let template = entry.template.as_ref().map_or(NONE, |id| self.templates.ensure(id).0);
        let labels = if template == NONE {
            self.ensure_labels(&entry.labels)
        } else {
            self.templates[template].workloads.add(w);
            let labels = entry.effective_labels(self.templates[template].template.as_deref());
            self.ensure_labels(&labels)
        };
        self.labels[labels].workloads.add(w);
        let row = &mut self.workloads[w];
        (row.host, row.space, row.app, row.labels, row.template) = (h, space, app, labels, template);

        for scope in self.scopes_of(w) {
            if scope != GLOBAL {
                self.scopes[scope].workloads.add(in_phase(w, entry.phase));
            }
            if self.scopes[scope].hosts.add(in_phase(h, entry.phase)) {
                if !self.scopes[scope].hosts.contains(in_phase(h, entry.phase.other())) {
                    self.pending.toggle_scope(scope, h);
                }
                for index in 0..self.scopes[scope].bound.len() {
                    let (g, phases) = self.scopes[scope].bound[index];
                    if phases.contains(entry.phase) {
                        self.host_gains(g, h);
                    }
                }
            }
            for index in 0..self.scopes[scope].bound.len() {
                let (g, phases) = self.scopes[scope].bound[index];
                if phases.contains(entry.phase) {
                    self.add_members(g, &entry);
                }
            }
        }
        for id in &entry.groups {
            let (g, _) = self.groups.ensure(id);
            self.groups[g].claims.get_or_insert_default().add(w);
        }
        let direct = self.direct_groups(w);
        for g in direct.iter() {
            self.gain_direct(*g, h, &entry);
        }
        self.workloads[w].direct = direct;
    }

    fn detach(&mut self, w: u32) {
        let Some(entry) = self.workloads[w].entry.clone() else { return };
        let h = self.workloads[w].host;
        let direct = std::mem::take(&mut self.workloads[w].direct);
        for g in direct.iter() {
            self.lose_direct(*g, h, &entry);
        }
        for id in &entry.groups {
            if let Some(g) = self.groups.get(id) {
                let claims = &mut self.groups[g].claims;
                if let Some(held) = claims {
                    held.sub(w);
                }
                claims.take_if(|held| held.is_empty());
                self.groups.touch(g);
            }
        }
        for scope in self.scopes_of(w) {
            for index in 0..self.scopes[scope].bound.len() {
                let (g, phases) = self.scopes[scope].bound[index];
                if phases.contains(entry.phase) {
                    self.sub_members(g, &entry);
                }
            }
            if scope != GLOBAL {
                self.scopes[scope].workloads.sub(in_phase(w, entry.phase));
            }
            if self.scopes[scope].hosts.sub(in_phase(h, entry.phase)) {
                if !self.scopes[scope].hosts.contains(in_phase(h, entry.phase.other())) {
                    self.pending.toggle_scope(scope, h);
                }
                for index in 0..self.scopes[scope].bound.len() {
                    let (g, phases) = self.scopes[scope].bound[index];
                    if phases.contains(entry.phase) {
                        self.host_loses(g, h);
                    }
                }
            }
            self.scopes.touch(scope);
        }
        let row = &self.workloads[w];
        let (labels, template) = (row.labels, row.template);
        self.labels[labels].workloads.sub(w);
        self.labels.touch(labels);
        if template != NONE {
            self.templates[template].workloads.sub(w);
            self.templates.touch(template);
        }
        self.note_host(h);
        self.hosts[h].workloads -= 1;
        if self.hosts[h].workloads == 0 {
            self.pending.toggle_host(h);
            self.hosts.touch(h);
        }
        let row = &mut self.workloads[w];
        (row.host, row.space, row.app, row.labels, row.template) = (NONE, NONE, NONE, NONE, NONE);
    }

    /// Groups a registered workload has by id, by its entry or by a selector; sorted, distinct.
    fn direct_groups(&self, w: u32) -> List<u32, 4> {
        let row = &self.workloads[w];
        let mut direct: List<u32, 4> = List::default();
        let Some(entry) = &row.entry else { return direct };
        let mut put = |g: u32| {
            if let Err(at) = direct.binary_search(&g) {
                direct.insert(at, g);
            }
        };
        let named = entry.groups.iter().filter_map(|id| self.groups.get(id));
        named.filter(|g| self.groups[*g].group.is_some()).for_each(&mut put);
        row.bound.iter().filter(|(_, phases)| phases.contains(entry.phase)).for_each(|(g, _)| put(*g));
        self.selected_groups(w, entry.phase, put);
        direct
    }

    /// Recomputes what a workload has directly, after a binding or a group's existence changed.
    pub(super) fn refresh_direct(&mut self, w: u32) {
        let Some(entry) = self.workloads[w].entry.clone() else { return };
        let new = self.direct_groups(w);
        if *new == *self.workloads[w].direct {
            return;
        }
        self.note_workload(w);
        let h = self.workloads[w].host;
        let old = std::mem::replace(&mut self.workloads[w].direct, new.clone());
        for g in new.iter().filter(|g| old.binary_search(g).is_err()) {
            self.gain_direct(*g, h, &entry);
        }
        for g in old.iter().filter(|g| new.binary_search(g).is_err()) {
            self.lose_direct(*g, h, &entry);
        }
    }

    fn gain_direct(&mut self, g: u32, h: u32, entry: &Workload) {
        self.host_gains(g, h);
        self.add_members(g, entry);
    }

    fn lose_direct(&mut self, g: u32, h: u32, entry: &Workload) {
        self.host_loses(g, h);
        self.sub_members(g, entry);
    }

    /// One more reason for a host to follow a group's rules.
    pub(super) fn host_gains(&mut self, g: u32, h: u32) {
        if !self.groups[g].hosts.add(h) {
            return;
        }
        self.pending.toggle_rules(g, h);
        for index in 0..self.groups[g].remotes.len() {
            let (remote, _) = self.groups[g].remotes[index];
            if self.groups[remote].member_hosts.add(h) {
                self.pending.toggle_members(remote, h);
            }
        }
    }

    pub(super) fn host_loses(&mut self, g: u32, h: u32) {
        if !self.groups[g].hosts.sub(h) {
            return;
        }
        self.groups.touch(g);
        self.pending.toggle_rules(g, h);
        for index in 0..self.groups[g].remotes.len() {
            let (remote, _) = self.groups[g].remotes[index];
            if self.groups[remote].member_hosts.sub(h) {
                self.pending.toggle_members(remote, h);
                self.groups.touch(remote);
            }
        }
    }

    /// One more reason for a workload's addresses to be members.
    pub(super) fn add_members(&mut self, g: u32, entry: &Workload) {
        if self.keeps_members_of(g, entry) {
            let internet_member = self.groups[g].admits_internet;
            entry.members(internet_member).for_each(|member| self.add_member(g, member));
        }
    }

    pub(super) fn sub_members(&mut self, g: u32, entry: &Workload) {
        if self.keeps_members_of(g, entry) {
            let internet_member = self.groups[g].admits_internet;
            entry.members(internet_member).for_each(|member| self.sub_member(g, member));
        }
    }

    /// The same answer when the entry comes and when it goes: a change of health is a new entry, and a group that asks otherwise
    /// than before is emptied first.
    fn keeps_members_of(&self, g: u32, entry: &Workload) -> bool {
        let row = &self.groups[g];
        row.members.is_some() && !(row.wants_health && entry.unhealthy)
    }

    /// One that is admitted: a static member was written by hand and needs no admission.
    pub(super) fn add_member(&mut self, g: u32, member: Prefix) {
        let row = &mut self.groups[g];
        if row.members.as_mut().is_some_and(|members| members.add(member)) {
            let families = row.families();
            self.pending.toggle_member(g, member, families);
        }
    }

    pub(super) fn sub_member(&mut self, g: u32, member: Prefix) {
        let row = &mut self.groups[g];
        if row.members.as_mut().is_some_and(|members| members.sub(member)) {
            let families = row.families();
            self.pending.toggle_member(g, member, families);
        }
    }
}
