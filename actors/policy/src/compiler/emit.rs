//! The end of a batch: what is noted is compared with what is, and becomes edits and span changes.

use std::collections::BTreeMap;

use super::pending::{MembersBefore, Pending, TopicSlot, odd, undo};
use super::{Change, Compiler, PHASES, SpanChange, in_phase};
use crate::doc::{Edit, Placement, RuleKey};
use crate::ids::WorkloadId;
use crate::model::Group;
use crate::net::Prefix;
use crate::normal::Families;
use crate::rule::Rule;
use crate::topic::Topic;

impl Compiler {
    pub(super) fn finish(&mut self) -> Change {
        let pending = std::mem::take(&mut self.pending);
        let mut edits = Vec::with_capacity(pending.groups.len() + pending.members.len());
        let mixed = self.mixed_change(&pending);
        let Pending { groups, members, scopes, scope_was_empty, workloads, hosts, follows, .. } = pending;
        for (g, before) in groups {
            let edit = rules_edit(before.as_deref(), self.groups[g].group.as_deref());
            edits.extend(edit.map(|edit| (TopicSlot::Rules(g), edit)));
        }
        for (g, before) in members {
            edits.extend(self.members_edit(g, before).map(|edit| (TopicSlot::Members(g), edit)));
        }
        self.scope_edits(scopes, &scope_was_empty, &mut edits);
        self.host_edits(workloads, &hosts, &mut edits);
        // By slots: a hundred thousand names would take longer to compare than all the rest.
        edits.sort_unstable_by_key(|(slot, _)| *slot);
        let edits = edits.into_iter().map(|(slot, edit)| (self.topic(slot), edit)).collect();
        let spans = self.span_changes(follows);
        self.sweep();
        Change { edits, spans, mixed }
    }

    fn topic(&self, slot: TopicSlot) -> Topic {
        match slot {
            TopicSlot::Scope(s) => Topic::Scope(self.scopes.key(s).clone()),
            TopicSlot::Host(h) => Topic::Host(self.hosts.key(h).clone()),
            TopicSlot::Rules(g) => Topic::Rules(self.groups.key(g).clone()),
            TopicSlot::Members(g) => Topic::Members(self.groups.key(g).clone()),
        }
    }

    fn sweep(&mut self) {
        // Each may free the next: workloads hold nothing, the others are held by workloads and groups.
        self.workloads.sweep(|_, _| {});
        self.groups.sweep(|_, _| {});
        self.scopes.sweep(|_, _| {});
        self.hosts.sweep(|_, _| {});
        self.conditions.sweep(|_, _| {});
        self.templates.sweep(|_, _| {});
        self.sweep_labels();
    }

    fn members_edit(&self, g: u32, before: MembersBefore) -> Option<Edit> {
        let row = &self.groups[g];
        let MembersBefore { existed, families, toggles, dropped } = before;
        let Some(now) = &row.members else { return existed.then_some(Edit::Retire) };
        let families_now = row.families();
        if !existed {
            let mut add: Vec<Prefix> = now.keys().filter(|m| families_now.contains(m.family())).collect();
            add.sort_unstable();
            return Some(Edit::Members { add, remove: Vec::new() });
        }
        let (add, remove) = if dropped.is_none() && families == families_now {
            let changed = odd(toggles).into_iter().filter(|m| families.contains(m.family()));
            changed.partition(|member| now.contains(*member))
        } else {
            let of = |members: Vec<Prefix>, families: Families| {
                let mut members: Vec<Prefix> = members.into_iter().filter(|m| families.contains(m.family())).collect();
                members.sort_unstable();
                members
            };
            let new = of(now.keys().collect(), families_now);
            let old = of(dropped.unwrap_or_else(|| undo(now.keys().collect(), toggles)), families);
            let lacking = |from: &[Prefix], other: &[Prefix]| -> Vec<Prefix> {
                from.iter().filter(|member| other.binary_search(member).is_err()).copied().collect()
            };
            (lacking(&new, &old), lacking(&old, &new))
        };
        let edit = Edit::Members { add, remove };
        (!edit.is_empty()).then_some(edit)
    }

    fn scope_edits(
        &self,
        mut noted: Vec<(u32, u32, Option<crate::doc::Phases>)>,
        was_empty: &super::few::Map<u32, bool>,
        edits: &mut Vec<(TopicSlot, Edit)>,
    ) {
        // Stable: the first note of a pair stays first.
        noted.sort_by_key(|(s, g, _)| (*s, *g));
        for chunk in noted.chunk_by(|a, b| a.0 == b.0) {
            let s = chunk[0].0;
            let row = &self.scopes[s];
            let was_empty = was_empty.get(&s).copied().unwrap_or(true);
            if row.bound.is_empty() {
                if !was_empty {
                    edits.push((TopicSlot::Scope(s), Edit::Retire));
                }
                continue;
            }
            let (mut put, mut remove) = (Vec::new(), Vec::new());
            for pair in chunk.chunk_by(|a, b| a.1 == b.1) {
                let (_, g, before) = pair[0];
                let now = row.bound.binary_search_by_key(&g, |(slot, _)| *slot).ok().map(|at| row.bound[at].1);
                match now {
                    Some(phases) if before != now => put.push((self.groups.key(g).clone(), phases)),
                    None if before.is_some() => remove.push(self.groups.key(g).clone()),
                    _ => {}
                }
            }
            put.sort_unstable();
            remove.sort_unstable();
            let edit = Edit::Scope { put, remove };
            if !edit.is_empty() {
                edits.push((TopicSlot::Scope(s), edit));
            }
        }
    }

    fn host_edits(
        &self,
        workloads: super::few::Map<u32, Option<(u32, Placement)>>,
        hosts: &super::few::Map<u32, bool>,
        edits: &mut Vec<(TopicSlot, Edit)>,
    ) {
        let mut touched: BTreeMap<u32, (Vec<Placement>, Vec<WorkloadId>)> = BTreeMap::new();
        for (w, before) in workloads {
            let now = self.placement(w).map(|placement| (self.workloads[w].host, placement));
            if before == now {
                continue;
            }
            if let Some((h, placement)) = before
                && now.as_ref().is_none_or(|(host, _)| *host != h)
            {
                touched.entry(h).or_default().1.push(placement.workload);
            }
            if let Some((h, placement)) = now {
                touched.entry(h).or_default().0.push(placement);
            }
        }
        for (h, (mut put, mut remove)) in touched {
            let had = hosts.get(&h).copied().unwrap_or(true);
            let has = self.hosts[h].workloads > 0;
            let topic = TopicSlot::Host(h);
            if !has {
                if had {
                    edits.push((topic, Edit::Retire));
                }
                continue;
            }
            put.sort_unstable_by(|a, b| a.workload.cmp(&b.workload));
            remove.sort_unstable();
            edits.push((topic, Edit::Host { put, remove }));
        }
    }

    fn span_changes(&self, follows: Vec<(TopicSlot, u32)>) -> Vec<SpanChange> {
        let changed = odd(follows);
        let mut spans: Vec<SpanChange> = Vec::new();
        for chunk in changed.chunk_by(|a, b| a.0 == b.0) {
            let slot = chunk[0].0;
            let follows = |h: u32| match slot {
                TopicSlot::Scope(s) => PHASES.into_iter().any(|phase| self.scopes[s].hosts.contains(in_phase(h, phase))),
                TopicSlot::Host(host) => self.hosts[host].workloads > 0,
                TopicSlot::Rules(g) => self.groups[g].hosts.contains(h),
                TopicSlot::Members(g) => self.groups[g].member_hosts.contains(h),
            };
            let (gained, lost): (Vec<_>, Vec<_>) = chunk.iter().map(|(_, h)| *h).partition(|h| follows(*h));
            let names = |slots: Vec<u32>| {
                let mut hosts: Vec<_> = slots.into_iter().map(|h| self.hosts.key(h).clone()).collect();
                hosts.sort_unstable();
                hosts
            };
            let topic = self.topic(slot);
            spans.push(SpanChange { topic, gained: names(gained), lost: names(lost) });
        }
        spans
    }
}

fn rules_edit(old: Option<&Group>, new: Option<&Group>) -> Option<Edit> {
    let Some(new) = new else { return old.map(|_| Edit::Retire) };
    let Some(old) = old else {
        let put = new.distinct_rules().into_iter().cloned().collect();
        // A document begins stateful.
        return Some(Edit::Rules { stateful: (!new.stateful).then_some(false), put, remove: Vec::new() });
    };
    let stateful = (new.stateful != old.stateful).then_some(new.stateful);
    let (mut put, mut remove): (Vec<Rule>, Vec<RuleKey>) = (Vec::new(), Vec::new());
    if new.rules != old.rules {
        let (before, now) = (old.distinct_rules(), new.distinct_rules());
        put.extend(now.iter().filter(|rule| before.binary_search(rule).is_err()).map(|rule| (*rule).clone()));
        remove.extend(before.iter().filter(|rule| now.binary_search(rule).is_err()).map(|rule| rule.key()));
        remove.sort_unstable();
    }
    let edit = Edit::Rules { stateful, put, remove };
    (!edit.is_empty()).then_some(edit)
}
