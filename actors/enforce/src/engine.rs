//! The host's ruleset, kept up to date: changes of documents, attachments and settings in, transactions out.
//!
//! A member's coming or going is one element, found without looking at anything else; a workload with a known profile is its own
//! elements. Everything else compares the whole structure (not the members) with what is there. Both ways lead to the same table, which
//! depends on the current inputs alone.

mod fast;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::Edit;
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::resolve::resolve;
use groupcast_policy::topic::Topic;

use crate::Name;
use crate::delta::{self, Transaction, Uses, uses_of};
use crate::names;
use crate::ruleset::{Desired, Profiles, Record, Refusal, build};
use crate::settings::{Attachments, Settings, Stamp};
use crate::stamp;
use crate::table::Table;

/// One step, not taken yet.
#[derive(Debug, Clone)]
pub struct Plan {
    pub transaction: Transaction,
    /// The stamp once it is taken.
    pub stamp: Stamp,
    /// All stamps are used up: our bits must be zeroed in every connection before this is committed.
    pub wrapped: bool,
    after: After,
}

#[derive(Debug, Clone)]
enum After {
    Whole(Box<Index>),
    /// Workloads that come (with what), or go.
    Part(BTreeMap<WorkloadId, Option<Record>>),
}

/// What is known about the table beside its contents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Index {
    settings: Settings,
    uses: BTreeMap<Name, Uses>,
    profiles: Profiles,
    workloads: BTreeMap<WorkloadId, Record>,
    owners: BTreeMap<Prefix, WorkloadId>,
    refused: Vec<Refusal>,
}

#[derive(Debug)]
pub struct Engine {
    host: HostId,
    settings: Settings,
    attachments: Attachments,
    stamp: Stamp,
    /// What the kernel holds.
    actual: Table,
    index: Index,
    /// Whether the index speaks of the actual table. After a failure documents may have moved on without us.
    trusted: bool,
}

impl Engine {
    /// For a kernel that holds nothing of ours. `stamp` is one that no connection carries.
    pub fn new(host: HostId, settings: Settings, attachments: Attachments, stamp: Stamp) -> Self {
        let index = Index::default();
        Self { host, settings, attachments, stamp, actual: Table::default(), index, trusted: false }
    }

    /// For a kernel that holds a table of ours, read back. Its stamp goes on.
    pub fn adopt(host: HostId, settings: Settings, attachments: Attachments, stamp: Stamp, actual: Table) -> Self {
        let stamp = stamp::stamp_of(&settings, &actual).map_or(stamp, |held| held.max(stamp));
        Self { actual, stamp, ..Self::new(host, settings, attachments, stamp) }
    }

    pub fn actual(&self) -> &Table {
        &self.actual
    }

    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    /// What is in force but for these.
    pub fn refused(&self) -> &[Refusal] {
        &self.index.refused
    }

    /// Takes effect with the next [`Engine::compare`].
    pub fn set_settings(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Takes effect with the next [`Engine::compare`].
    pub fn set_attachments(&mut self, attachments: Attachments) {
        self.attachments = attachments;
    }

    /// The table was found to be another than thought: read back, or gone.
    pub fn set_actual(&mut self, actual: Table) {
        self.actual = actual;
        self.trusted = false;
    }

    /// The step that a change of documents needs. `None` as an edit: the document was replaced. The documents are those after the
    /// change. Nothing counts until [`Engine::committed`].
    pub fn change(&self, edits: &[(Topic, Option<Edit>)], documents: &impl Documents) -> Plan {
        if self.trusted
            && self.index.settings == self.settings
            && let Some(plan) = self.fast(edits, documents)
        {
            return plan;
        }
        let moved: BTreeSet<&GroupId> = edits
            .iter()
            .filter_map(|(topic, _)| match topic {
                Topic::Members(group) => Some(group),
                _ => None,
            })
            .collect();
        self.whole(documents, self.trusted.then_some(&moved))
    }

    /// The step that makes everything as it should be, members included.
    pub fn compare(&self, documents: &impl Documents) -> Plan {
        self.whole(documents, None)
    }

    /// The step was taken.
    pub fn committed(&mut self, plan: Plan) {
        if self.actual.apply(&plan.transaction).is_err() {
            // Cannot be: the kernel took it. Whatever it is, it is found out by comparing.
            self.trusted = false;
            return;
        }
        self.stamp = plan.stamp;
        match plan.after {
            After::Whole(index) => self.index = *index,
            After::Part(workloads) => self.index.move_workloads(workloads),
        }
        self.trusted = true;
    }

    /// The step was refused: the kernel holds what it held, and the next step compares everything.
    pub fn failed(&mut self) {
        self.trusted = false;
    }

    fn whole(&self, documents: &impl Documents, moved: Option<&BTreeSet<&GroupId>>) -> Plan {
        let policy = resolve(&self.host, documents);
        let build = |stamp| build(&policy, &self.attachments, &self.settings, stamp);
        let next = self.stamp.next().unwrap_or(Stamp::FIRST);
        // A table made anew carries a stamp that no connection has met under another policy.
        if !stamp::has_stamp(&self.actual) {
            let desired = build(next);
            let transaction = if self.actual == Table::default() {
                delta::diff(&self.actual, &desired, |_| false)
            } else {
                delta::anew(&desired)
            };
            return self.plan(transaction, next, Index::of(&self.settings, desired));
        }
        let mut trusted_sets = BTreeSet::new();
        if let Some(moved) = moved {
            for group in policy.remotes.keys().filter(|group| !moved.contains(group)) {
                trusted_sets.extend([Family::V4, Family::V6].map(|family| names::members(group, family)));
            }
        }
        let desired = build(self.stamp);
        let transaction = delta::diff(&self.actual, &desired, |set| trusted_sets.contains(set));
        if transaction.anew {
            let desired = build(next);
            return self.plan(delta::anew(&desired), next, Index::of(&self.settings, desired));
        }
        let index = Index::of(&self.settings, desired);
        let old_uses = if self.trusted { None } else { Some(uses_of(&self.actual.chains)) };
        let uses = |set: &Name| {
            let old = old_uses.as_ref().unwrap_or(&self.index.uses).get(set).copied().unwrap_or_default();
            let new = index.uses.get(set).copied().unwrap_or_default();
            Uses { allows: old.allows || new.allows, denies: old.denies || new.denies }
        };
        let (transaction, stamp) = self.stamped(transaction, uses);
        self.plan(transaction, stamp, index)
    }

    fn plan(&self, transaction: Transaction, stamp: Stamp, index: Index) -> Plan {
        Plan { transaction, stamp, wrapped: stamp < self.stamp, after: After::Whole(Box::new(index)) }
    }

    /// With a new stamp where one is needed.
    fn stamped(&self, mut transaction: Transaction, uses: impl Fn(&Name) -> Uses) -> (Transaction, Stamp) {
        let stamp = if stamp::needs_bump(&self.actual, &transaction.ops, uses) {
            self.stamp.next().unwrap_or(Stamp::FIRST)
        } else {
            self.stamp
        };
        transaction.ops.extend(stamp::ops(&self.actual, &self.settings, stamp));
        (transaction, stamp)
    }
}

impl Index {
    fn of(settings: &Settings, desired: Desired<'_>) -> Self {
        let own = |(id, record): (&WorkloadId, &Record)| record.addresses.iter().map(|a| (*a, id.clone())).collect::<Vec<_>>();
        Self {
            settings: settings.clone(),
            uses: uses_of(&desired.chains),
            profiles: desired.profiles,
            owners: desired.records.iter().flat_map(own).collect(),
            workloads: desired.records,
            refused: desired.refused,
        }
    }

    fn move_workloads(&mut self, workloads: BTreeMap<WorkloadId, Option<Record>>) {
        for (id, record) in workloads {
            if let Some(old) = self.workloads.remove(&id) {
                self.profiles.leave(old.profile);
                old.addresses.iter().for_each(|address| _ = self.owners.remove(address));
            }
            if let Some(record) = record {
                self.profiles.join(record.profile);
                self.owners.extend(record.addresses.iter().map(|address| (*address, id.clone())));
                self.workloads.insert(id, record);
            }
        }
    }
}
