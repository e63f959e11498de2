//! The two steps that happen all the time, without looking at anything they do not touch. Whatever is not one of them, in whole, gives
//! `None`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use groupcast_policy::doc::{Document, Edit, Members, Placement};
use groupcast_policy::ids::{GroupId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::rule::Direction;
use groupcast_policy::topic::Topic;

use super::{After, Engine, Plan};
use crate::Name;
use crate::delta::{Op, Transaction, element_ops};
use crate::names;
use crate::ruleset::{Element, Record, elements_for, has_spans, member_spans};
use crate::settings::Attachment;
use crate::table::{Data, Elements, Key, SetKind};

impl Engine {
    pub(super) fn fast(&self, edits: &[(Topic, Option<Edit>)], documents: &impl Documents) -> Option<Plan> {
        // Two edits of one topic in one step would each be compared with what is there before both.
        let topics: BTreeSet<&Topic> = edits.iter().map(|(topic, _)| topic).collect();
        if topics.len() != edits.len() {
            return None;
        }
        let mut ops = Vec::new();
        let mut workloads = BTreeMap::new();
        for (topic, edit) in edits {
            match (topic, edit) {
                (Topic::Members(group), Some(Edit::Members { add, remove })) => {
                    self.members(group, add, remove, documents.document(topic).and_then(Document::members), &mut ops)?;
                }
                (Topic::Host(host), Some(Edit::Host { put, remove })) if *host == self.host => {
                    self.workloads(put, remove, &mut ops, &mut workloads)?;
                }
                _ => return None,
            }
        }
        let uses = |set: &Name| self.index.uses.get(set).copied().unwrap_or_default();
        let (transaction, stamp) = self.stamped(Transaction { anew: false, ops }, uses);
        Some(Plan { transaction, stamp, wrapped: stamp < self.stamp, after: After::Part(workloads) })
    }

    fn members(
        &self,
        group: &GroupId,
        add: &[Prefix],
        remove: &[Prefix],
        members: Option<&Members>,
        ops: &mut Vec<Op>,
    ) -> Option<()> {
        let members = members?;
        let mut known = false;
        for family in [Family::V4, Family::V6] {
            let set = names::members(group, family);
            let Some(held) = self.actual.sets.get(&set) else { continue };
            known = true;
            let (mut missing, mut surplus) = (Elements::of(held.kind), Elements::of(held.kind));
            for (list, into, wanted) in [(remove, &mut surplus, false), (add, &mut missing, true)] {
                for address in list.iter().filter(|prefix| prefix.is_host()).map(|prefix| prefix.net().addr()) {
                    match (address, &held.elements, &mut *into) {
                        (IpAddr::V4(a), Elements::V4(held), Elements::V4(into)) if held.contains(&a.to_bits()) != wanted => {
                            into.insert(a.to_bits());
                        }
                        (IpAddr::V6(a), Elements::V6(held), Elements::V6(into)) if held.contains(&a.to_bits()) != wanted => {
                            into.insert(a.to_bits());
                        }
                        _ => {}
                    }
                }
            }
            element_ops(ops, &set, held.kind, missing, surplus);

            let ranges = |list: &[Prefix]| list.iter().any(|prefix| !prefix.is_host() && prefix.family() == family);
            if ranges(add) || ranges(remove) {
                let set = names::member_spans(group, family);
                let held = self.actual.sets.get(&set);
                // The first range brings rules, the last takes them away.
                if has_spans(members, family) != held.is_some() {
                    return None;
                }
                if let Some(held) = held {
                    let want = member_spans(members, family);
                    let (missing, surplus) = (held.elements.missing_from(&want)?, want.missing_from(&held.elements)?);
                    element_ops(ops, &set, held.kind, missing, surplus);
                }
            }
        }
        known.then_some(())
    }

    fn workloads(
        &self,
        put: &[Placement],
        remove: &[WorkloadId],
        ops: &mut Vec<Op>,
        workloads: &mut BTreeMap<WorkloadId, Option<Record>>,
    ) -> Option<()> {
        // Who is refused may be let in by any change.
        if !self.index.refused.is_empty() {
            return None;
        }
        let (mut missing, mut surplus) = (Keyed::default(), Keyed::default());
        let mut leaving: BTreeMap<u32, usize> = BTreeMap::new();
        let mut wanted = BTreeSet::new();
        let mut has_ranges = false;
        for id in remove {
            if let Some(old) = self.index.workloads.get(id) {
                has_ranges |= !old.addresses.iter().all(Prefix::is_host);
                *leaving.entry(old.profile).or_insert(0) += 1;
                surplus.extend(&old.elements);
                workloads.insert(id.clone(), None);
            }
        }
        for placement in put {
            let id = &placement.workload;
            let Some(attached) = self.attachments.get(id) else { continue };
            let profile = self.index.profiles.find(placement)?;
            let interface = attached.attachment.interface();
            if attached.attachment != Attachment::Host && !self.settings.claims.iter().any(|claim| claim.covers(&interface)) {
                return None;
            }
            let (elements, addresses) = elements_for(placement, attached, &profile)?;
            let old = self.index.workloads.get(id);
            // An address or interface that is somebody's already, or is wanted twice, is settled where all are looked at.
            let own = |address: &Prefix| self.index.owners.get(address).is_none_or(|owner| owner == id);
            if !addresses.iter().all(|address| own(address) && wanted.insert(*address)) {
                return None;
            }
            match old {
                Some(old) => {
                    has_ranges |= !old.addresses.iter().all(Prefix::is_host);
                    *leaving.entry(old.profile).or_insert(0) += 1;
                    surplus.extend(&old.elements);
                }
                None if self.is_taken(&attached.attachment) => return None,
                None => {}
            }
            let known = |(set, ..): &Element| self.actual.sets.contains_key(set);
            if !elements.iter().all(known) || !missing.extend(&elements) {
                return None;
            }
            workloads.insert(id.clone(), Some(Record { profile: profile.number, elements, addresses }));
        }
        let mut joining: BTreeMap<u32, usize> = BTreeMap::new();
        for record in workloads.values().flatten() {
            *joining.entry(record.profile).or_insert(0) += 1;
        }
        // A profile without users goes; ranges of one interface are merged.
        if has_ranges
            || leaving.iter().any(|(number, count)| self.index.profiles.users(*number) == *count && !joining.contains_key(number))
        {
            return None;
        }
        missing.without(&mut surplus);
        for (set, (kind, elements)) in surplus.0 {
            element_ops(ops, &set, kind, Elements::of(kind), Elements::Keyed(elements));
        }
        for (set, (kind, elements)) in missing.0 {
            element_ops(ops, &set, kind, Elements::Keyed(elements), Elements::of(kind));
        }
        Some(())
    }

    /// Whether the interface as a whole is somebody's, or is the host itself, which brings rules.
    fn is_taken(&self, attachment: &Attachment) -> bool {
        let Attachment::Interface(interface) = attachment else { return *attachment == Attachment::Host };
        let set = names::dispatch(Direction::Egress, false, names::Keyed::Interface);
        match self.actual.sets.get(&set).map(|set| &set.elements) {
            Some(Elements::Keyed(held)) => held.contains_key(&Key::Interface(*interface)),
            _ => true,
        }
    }
}

/// Elements by set.
#[derive(Debug, Default)]
struct Keyed(BTreeMap<Name, (SetKind, BTreeMap<Key, Data>)>);

impl Keyed {
    /// `false` if a key was there already.
    fn extend(&mut self, elements: &[Element]) -> bool {
        let mut fresh = true;
        for (set, kind, key, data) in elements {
            let (_, map) = self.0.entry(set.clone()).or_insert_with(|| (*kind, BTreeMap::new()));
            fresh &= map.insert(key.clone(), data.clone()).is_none();
        }
        fresh
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
