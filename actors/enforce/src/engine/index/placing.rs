//! Workloads: whom a change moves, and the elements that lead their packets to their profile.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::ids::WorkloadId;
use groupcast_policy::needs::Documents;
use groupcast_policy::net::Prefix;

use super::{Profile, Record, Step, Which};
use crate::Name;
use crate::delta::element_ops;
use crate::names;
use crate::ruleset::{
    Contents, DesiredSet, Element, Found, Owners, ProfileKey, Refusal, elements_of, lone_number, own_addresses, source_spans,
};
use crate::table::{Data, Elements, Key, SetKind};

/// Refused because of another, who may go or change.
fn is_contested(refusal: &Refusal) -> bool {
    !matches!(refusal, Refusal::Unclaimed { .. } | Refusal::NoAddress { .. })
}

impl<D: Documents> Step<'_, '_, D> {
    pub(super) fn place(&mut self, which: &Which<WorkloadId>) -> Option<()> {
        if let Which::Some(ids) = which {
            let is_settled = !self.index.refused.iter().any(is_contested);
            if ids.is_empty() || (is_settled && self.place_some(ids)?) {
                return Some(());
            }
        }
        // All, in the order of their ids: earlier ones win.
        let mut all: BTreeSet<WorkloadId> = self.index.workloads.keys().cloned().collect();
        all.extend(self.placements().into_iter().flat_map(BTreeMap::keys).cloned());
        self.index.owners = Owners::default();
        self.index.refused.clear();
        for id in &all {
            self.place_one(id)?;
        }
        Some(())
    }

    /// `false`: two want the same, so that all are to be looked at.
    fn place_some(&mut self, ids: &BTreeSet<WorkloadId>) -> Option<bool> {
        for record in ids.iter().filter_map(|id| self.index.workloads.get(id)) {
            self.index.owners.release(&record.attached.attachment, &record.addresses);
        }
        self.index.refused.retain(|refusal| !ids.contains(refusal.workload()));
        let refused = self.index.refused.len();
        for id in ids {
            self.place_one(id)?;
        }
        if self.index.refused[refused..].iter().any(is_contested) {
            return Some(false);
        }
        self.index.refused.sort_by(|a, b| a.workload().cmp(b.workload()));
        Some(true)
    }

    fn place_one(&mut self, id: &WorkloadId) -> Option<()> {
        let inputs = self.inputs;
        let wanted = self.placements().and_then(|placements| placements.get(id)).zip(inputs.attachments.get(id));
        let placed = wanted.and_then(|(placement, attached)| {
            let addresses = own_addresses(placement, &attached.attachment);
            match self.index.owners.objection(id, &attached.attachment, &addresses, inputs.settings) {
                Some(refusal) => {
                    self.index.refused.push(refusal);
                    None
                }
                None => {
                    self.index.owners.admit(id, &attached.attachment, &addresses);
                    Some((placement, attached, addresses))
                }
            }
        });
        let Some((placement, attached, addresses)) = placed else {
            self.displace(id);
            return Some(());
        };
        let key = ProfileKey::of(placement);
        let is_same = |old: &Record| {
            (&old.attached, old.enforced, &old.addresses) == (attached, placement.enforced, &addresses)
                && self.index.profiles.get(&old.profile).is_some_and(|profile| profile.key == key)
        };
        if self.index.workloads.get(id).is_some_and(is_same) {
            return Some(());
        }
        self.displace(id);
        let profile = self.join_profile(id, key)?;
        self.workloads.entry(id.clone()).or_default();
        if !addresses.iter().all(Prefix::is_host) {
            self.index.ranged.insert(id.clone());
            self.ranges_moved = true;
        }
        let record =
            Record { profile, attached: attached.clone(), enforced: placement.enforced, addresses, elements: Vec::new() };
        self.index.workloads.insert(id.clone(), record);
        Some(())
    }

    /// Takes away what there was of a workload.
    fn displace(&mut self, id: &WorkloadId) {
        let Some(old) = self.index.workloads.remove(id) else { return };
        if let Some(profile) = self.index.profiles.get_mut(&old.profile) {
            profile.workloads.remove(id);
            if profile.workloads.is_empty() {
                self.profiles.insert(old.profile);
            }
        }
        self.ranges_moved |= self.index.ranged.remove(id);
        // Moved twice, it has only its first elements in the kernel.
        self.workloads.entry(id.clone()).or_insert(old.elements);
    }

    fn join_profile(&mut self, id: &WorkloadId, key: ProfileKey) -> Option<u32> {
        let number = lone_number(&key)?;
        match self.index.profiles.get_mut(&number) {
            Some(profile) if profile.key != key => return None,
            Some(profile) => _ = profile.workloads.insert(id.clone()),
            None => {
                let profile = Profile { key: key.clone(), workloads: [id.clone()].into(), shape: None };
                self.index.profiles.insert(number, profile);
                self.name_profile(number, &key);
            }
        }
        Some(number)
    }

    /// Elements of workloads that moved, or whose profile is of another view now. `None`: the frame must follow.
    pub(super) fn write_elements(&mut self) -> Option<()> {
        let (mut missing, mut surplus) = (Keyed::default(), Keyed::default());
        for (id, old) in std::mem::take(&mut self.workloads) {
            surplus.extend(&old);
            let Some(record) = self.index.workloads.get_mut(&id) else { continue };
            let shape = self.index.profiles.get(&record.profile).and_then(|profile| profile.shape)?;
            let found = Found { number: record.profile, stateful: shape.stateful };
            record.elements = elements_of(&record.attached, record.enforced, &record.addresses, &found);
            missing.extend(&record.elements);
        }
        if self.ranges_moved {
            self.write_ranges()?;
        }
        if self.inputs.actual.is_none() {
            return Some(());
        }
        missing.without(&mut surplus);
        for (set, (kind, elements)) in surplus.0 {
            element_ops(&mut self.parts.elements, &set, kind, Elements::of(kind), Elements::Keyed(elements));
        }
        for (set, (kind, elements)) in missing.0 {
            element_ops(&mut self.parts.elements, &set, kind, Elements::Keyed(elements), Elements::of(kind));
        }
        Some(())
    }

    fn write_ranges(&mut self) -> Option<()> {
        let index = &mut *self.index;
        let records = index.ranged.iter().filter_map(|id| index.workloads.get(id));
        let sources = records.flat_map(|record| {
            let interface = record.attached.attachment.interface();
            record.addresses.iter().map(move |prefix| (interface, *prefix))
        });
        let (spans4, spans6) = source_spans(sources);
        let keys = (!spans4.is_empty(), !spans6.is_empty());
        let Some(actual) = self.inputs.actual else {
            (index.keys.span4, index.keys.span6) = keys;
            return Some(());
        };
        // The first range brings rules to the frame, the last takes them away.
        if keys != (index.keys.span4, index.keys.span6) {
            return None;
        }
        let sets =
            [(names::source_span4(), SetKind::InterfaceSpan4, spans4), (names::source_span6(), SetKind::InterfaceSpan6, spans6)];
        for (name, kind, spans) in sets.into_iter().filter(|(_, _, spans)| !spans.is_empty()) {
            let want = DesiredSet { kind, contents: Contents::Owned(Elements::Keyed(spans)) };
            self.parts.set(&name, actual.sets.get(&name), &want);
        }
        Some(())
    }
}

/// Elements by set.
#[derive(Debug, Default)]
struct Keyed(BTreeMap<Name, (SetKind, BTreeMap<Key, Data>)>);

impl Keyed {
    fn extend(&mut self, elements: &[Element]) {
        for (set, kind, key, data) in elements {
            let (_, map) = self.0.entry(set.clone()).or_insert_with(|| (*kind, BTreeMap::new()));
            map.insert(key.clone(), data.clone());
        }
    }

    /// Takes out of both what is in both.
    fn without(&mut self, other: &mut Keyed) {
        for (set, (_, mine)) in &mut self.0 {
            if let Some((_, theirs)) = other.0.get_mut(set) {
                mine.retain(|key, data| {
                    let same = theirs.get(key) == Some(data);
                    if same {
                        theirs.remove(key);
                    }
                    !same
                });
            }
        }
    }
}
