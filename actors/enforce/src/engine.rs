//! The host's ruleset, kept up to date: changes of documents, attachments and settings in, transactions out.
//!
//! A change costs what it touches: a member one element, a workload its own elements, a rule the chains of its group, a binding one jump
//! in the chains of its scope. What reaches further (settings, a form of attachment that did not occur) and whatever comes after a
//! failure is compared as a whole. Both ways lead to the same table, which depends on the current inputs alone.

mod adopted;
mod index;

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use groupcast_policy::doc::Edit;
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::Family;
use groupcast_policy::topic::Topic;

use crate::Name;
use crate::delta::{self, Transaction, Uses, uses_of};
use crate::names;
use crate::ruleset::{Refusal, build};
use crate::settings::{Attached, Attachments, Settings, Stamp};
use crate::stamp;
use crate::table::{Data, Elements, Key, SetKind, Table};

use index::{Index, Inputs, Touched};

/// One step, not taken yet.
#[derive(Debug, Clone)]
pub struct Plan {
    pub transaction: Transaction,
    /// The stamp once it is taken.
    pub stamp: Stamp,
    /// All stamps are used up: our bits must be zeroed in every connection before this is committed.
    pub wrapped: bool,
    /// Everything was looked at, not only what changed.
    pub whole: bool,
    refused: Vec<Refusal>,
    /// The policy in the table is what it was, whatever the documents say: it is not to be relied on for a shorter step.
    leaves_policy: bool,
}

/// Which interfaces a table holds, by number.
pub fn held_in(table: &Table) -> BTreeSet<u32> {
    let Some(Elements::Keyed(held)) = table.sets.get(&names::held()).map(|set| &set.elements) else { return BTreeSet::new() };
    let numbers = held.keys().filter_map(|key| match key {
        Key::Number(index) => Some(*index),
        _ => None,
    });
    numbers.collect()
}

fn numbered<'i>(indexes: impl Iterator<Item = &'i u32>) -> Elements {
    Elements::Keyed(indexes.map(|index| (Key::Number(*index), Data::Nothing)).collect())
}

#[derive(Debug)]
pub struct Engine {
    host: HostId,
    settings: Settings,
    attachments: Attachments,
    stamp: Stamp,
    /// What the kernel holds.
    actual: Table,
    /// Moves with each plan, which is why it is in a cell: it is too large to be copied for each. `None`: no step but the comparison of
    /// everything.
    index: RefCell<Option<Box<Index>>>,
    refused: Vec<Refusal>,
    /// Whether the index speaks of the actual table: not between a plan and its commit, nor after a failure, when documents may have
    /// moved on without us.
    trusted: Cell<bool>,
}

impl Engine {
    /// For a kernel that holds nothing of ours. `stamp` is one that no connection carries.
    pub fn new(host: HostId, settings: Settings, attachments: Attachments, stamp: Stamp) -> Self {
        let (actual, refused) = (Table::default(), Vec::new());
        Self { host, settings, attachments, stamp, actual, index: RefCell::new(None), refused, trusted: Cell::new(false) }
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
        &self.refused
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
        self.trusted.set(false);
    }

    /// The step that a change of documents needs. `None` as an edit: the document was replaced, or is gone. The documents are those
    /// after the change. Until [`Engine::committed`] every further step compares everything.
    pub fn change(&self, edits: &[(Topic, Option<Edit>)], documents: &impl Documents) -> Plan {
        let touched = Touched::by(edits, &self.host);
        if let Some(plan) = self.step(&touched, documents, false) {
            return plan;
        }
        let moved = edits.iter().filter_map(|(topic, _)| match topic {
            Topic::Members(group) => Some(group.clone()),
            _ => None,
        });
        let known = self.trusted.take().then(|| moved.collect());
        self.whole(documents, known)
    }

    /// The step that attaches a workload, or with `None` detaches it.
    pub fn attach(&mut self, workload: &WorkloadId, attached: Option<Attached>, documents: &impl Documents) -> Plan {
        match attached {
            Some(attached) => _ = self.attachments.insert(workload.clone(), attached),
            None => _ = self.attachments.remove(workload),
        }
        if let Some(plan) = self.step(&Touched::workload(workload), documents, true) {
            return plan;
        }
        let known = self.trusted.take().then(BTreeSet::new);
        self.whole(documents, known)
    }

    /// The step that follows interfaces as they come and go. What is held is closed by its name as long as it has one that is claimed, so
    /// nothing that passes is decided by this: it needs no other step with it.
    pub fn hold(&mut self, held: BTreeSet<u32>) -> Plan {
        let (set, kind) = (names::held(), SetKind::Indexes);
        let mut transaction = Transaction::default();
        // A table that has no such set is made as it should be with the next comparison.
        if self.actual.sets.contains_key(&set) {
            let there = held_in(&self.actual);
            let (missing, surplus) = (numbered(held.difference(&there)), numbered(there.difference(&held)));
            delta::element_ops(&mut transaction.ops, &set, kind, missing, surplus);
        }
        if let Some(index) = &mut *self.index.borrow_mut() {
            index.hold(held.clone());
        }
        self.settings.held = held;
        let (stamp, refused) = (self.stamp, self.refused.clone());
        Plan { transaction, stamp, wrapped: false, whole: false, refused, leaves_policy: !self.trusted.get() }
    }

    /// The step that makes everything as it should be, members included.
    pub fn compare(&self, documents: &impl Documents) -> Plan {
        self.trusted.set(false);
        self.whole(documents, None)
    }

    /// The step was taken.
    pub fn committed(&mut self, plan: Plan) {
        let leaves_policy = plan.leaves_policy;
        if self.actual.take(plan.transaction).is_err() {
            // Cannot be: the kernel took it. Whatever it is, it is found out by comparing.
            self.trusted.set(false);
            return;
        }
        self.stamp = plan.stamp;
        self.refused = plan.refused;
        self.trusted.set(!leaves_policy);
    }

    /// The step was refused: the kernel holds what it held, and the next step compares everything.
    pub fn failed(&mut self) {
        self.trusted.set(false);
    }

    /// `None`: everything is to be compared. Changes `trusted` only if there is a plan.
    fn step(&self, touched: &Touched, documents: &impl Documents, attachments_moved: bool) -> Option<Plan> {
        let mut index = self.index.take().filter(|_| self.trusted.get())?;
        let inputs = Inputs {
            host: &self.host,
            documents,
            attachments: &self.attachments,
            settings: &self.settings,
            actual: Some(&self.actual),
        };
        let mut outcome = index.step(&inputs, touched, attachments_moved)?;
        let transaction = std::mem::take(&mut outcome.transaction);
        let (transaction, stamp) = self.stamped(transaction, |set| outcome.uses(&index, set));
        let refused = index.refused.clone();
        *self.index.borrow_mut() = Some(index);
        self.trusted.set(false);
        Some(Plan { transaction, stamp, wrapped: stamp < self.stamp, whole: false, refused, leaves_policy: false })
    }

    fn fresh_index(&self, documents: &impl Documents) -> Option<Box<Index>> {
        let (host, attachments, settings) = (&self.host, &self.attachments, &self.settings);
        Index::from_scratch(&Inputs { host, documents, attachments, settings, actual: None }).map(Box::new)
    }

    /// `known`: the table is what it should be, but for the members of these groups and whatever is not members.
    fn whole(&self, documents: &impl Documents, known: Option<BTreeSet<GroupId>>) -> Plan {
        *self.index.borrow_mut() = self.fresh_index(documents);
        let (host, attachments, settings) = (&self.host, &self.attachments, &self.settings);
        let build = |stamp| build(host, documents, attachments, settings, stamp);
        let next = self.stamp.next().unwrap_or(Stamp::FIRST);
        let plan = |transaction, stamp, refused| Plan {
            transaction,
            stamp,
            wrapped: stamp < self.stamp,
            whole: true,
            refused,
            leaves_policy: false,
        };
        // A table made anew carries a stamp that no connection has met under another policy.
        if !stamp::has_stamp(settings, &self.actual) {
            let desired = build(next);
            let transaction = if self.actual == Table::default() {
                delta::diff(&self.actual, &desired, |_| false)
            } else {
                delta::anew(&desired)
            };
            return plan(transaction, next, desired.refused);
        }
        let desired = build(self.stamp);
        let moved = known.map(|groups: BTreeSet<GroupId>| {
            let sets = |group: &GroupId| [Family::V4, Family::V6].map(|family| names::members(group, family));
            groups.iter().flat_map(sets).collect::<BTreeSet<Name>>()
        });
        let trusted = |set: &Name| moved.as_ref().is_some_and(|moved| names::is_members(set) && !moved.contains(set));
        let transaction = delta::diff(&self.actual, &desired, trusted);
        if transaction.anew {
            let desired = build(next);
            return plan(delta::anew(&desired), next, desired.refused);
        }
        let (old_uses, new_uses) = (uses_of(&self.actual.chains), uses_of(&desired.chains));
        let uses = |set: &Name| {
            let old = old_uses.get(set).copied().unwrap_or_default();
            let new = new_uses.get(set).copied().unwrap_or_default();
            Uses { allows: old.allows || new.allows, denies: old.denies || new.denies }
        };
        let (transaction, stamp) = self.stamped(transaction, uses);
        plan(transaction, stamp, desired.refused)
    }

    /// With a new stamp where one is needed.
    fn stamped(&self, mut transaction: Transaction, uses: impl Fn(&Name) -> Uses) -> (Transaction, Stamp) {
        let stamp = if stamp::needs_bump(&self.actual, &transaction.ops, uses) {
            self.stamp.next().unwrap_or(Stamp::FIRST)
        } else {
            self.stamp
        };
        match self.trusted.get() {
            true if stamp == self.stamp => {}
            true => transaction.ops.extend(stamp::exchange(&self.settings, self.stamp, stamp)),
            false => transaction.ops.extend(stamp::ops(&self.actual, &self.settings, stamp)),
        }
        (transaction, stamp)
    }
}
