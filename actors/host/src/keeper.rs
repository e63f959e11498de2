//! Keeps the kernel as it should be: the documents at hand, the engine, and whatever enforces. Plain: the actor around it moves messages
//! and waits.

mod begin;

use std::collections::{BTreeSet, HashMap};

use groupcast_enforce::engine::{Engine, Plan};
use groupcast_enforce::ruleset::Refusal;
use groupcast_enforce::settings::{Attached, Settings};
use groupcast_enforce::table::Table;
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::WorkloadId;
use groupcast_policy::needs::Documents;
use groupcast_policy::topic::Topic;

use crate::holder::Holder;
use crate::state::Replica;
use begin::Marks;

pub use begin::{Known, STAMPS_BEHIND_MAX};

/// One commit of the inbox, with the contents of documents that were replaced.
#[derive(Debug, Clone)]
pub struct Moved {
    pub number: u64,
    pub change: u64,
    /// These are all the documents there are.
    pub whole: bool,
    pub edits: Vec<(Topic, MovedDocument)>,
    pub dropped: Vec<Topic>,
}

#[derive(Debug, Clone)]
pub enum MovedDocument {
    Edited(Edit),
    Replaced(Box<Document>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    pub transactions: u64,
    pub operations: u64,
    pub bumps: u64,
    pub failures: u64,
    /// The table was not what we had left there, and was put right.
    pub repairs: u64,
    /// Connections whose stamp was taken away, because it could have been another policy's.
    pub unmarked: u64,
}

pub struct Keeper<E> {
    engine: Engine,
    enforcer: E,
    documents: Replica,
    /// Documents come from the disk until the first commit of this run: nothing of theirs is mixed with what the bus says.
    cached: bool,
    /// What is in force instead of the documents: what they were when everything was frozen, or the safe part of a change that
    /// cannot be put in force whole yet.
    shown: Option<Replica>,
    frozen: bool,
    adopted: bool,
    /// The kernel's table carries a later stamp than the disk knows, so something was taken away that the disk still gives: until the
    /// bus is heard its policy stays as it is, and orders are put in force on top of it.
    stale: bool,
    /// What was adopted is nobody else's to touch. Until then it is an orphan.
    taken_over: bool,
    marks: Marks,
    pub counts: Counts,
}

/// A topic not held is not synced.
struct Held<'r>(&'r Replica);

impl Documents for Held<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.get(topic)
    }
}

impl<E: Holder> Keeper<E> {
    /// Makes everything as it should be by what is known. Also the way to try again after a failure.
    pub fn settle(&mut self) -> Result<(), E::Error> {
        let plan = self.plan();
        self.take(plan)
    }

    /// What is to be done by what is known. While the table knows better than the documents, only what is ordered is: its policy stays.
    fn plan(&self) -> Plan {
        if self.stale { self.engine.reframe() } else { self.engine.compare(&Held(self.in_force())) }
    }

    /// Whether what is known leads to the table that is there.
    pub fn agrees(&self) -> bool {
        self.engine.compare(&Held(self.in_force())).transaction.is_empty()
    }

    /// A table that was there is ours from now on, as it is.
    pub fn take_over(&mut self) -> Result<(), E::Error> {
        if self.adopted && !self.taken_over {
            self.enforcer.take_over()?;
            self.taken_over = true;
        }
        Ok(())
    }

    /// The documents by which the kernel is told.
    pub fn in_force(&self) -> &Replica {
        self.shown.as_ref().unwrap_or(&self.documents)
    }

    /// All commits that came out of one event, together.
    pub fn moved(&mut self, commits: &[Moved]) -> Result<(), E::Error> {
        let (edits, whole) = self.hear(commits);
        if self.frozen || self.stale {
            return Ok(());
        }
        let held = Held(self.in_force());
        let plan = if whole { self.engine.compare(&held) } else { self.engine.change(&edits, &held) };
        self.take(plan)
    }

    /// Takes commits into the documents and touches nothing else: the edits, and whether only a comparison of everything helps.
    pub fn hear(&mut self, commits: &[Moved]) -> (Vec<(Topic, Option<Edit>)>, bool) {
        let mut edits: Vec<(Topic, Option<Edit>)> = Vec::new();
        let mut whole = self.cached || self.shown.is_some();
        if commits.is_empty() {
            return (edits, whole);
        }
        if !self.frozen {
            self.shown = None;
        }
        self.stale = false;
        if self.cached {
            self.documents = HashMap::new();
            self.cached = false;
        }
        for commit in commits {
            if commit.whole {
                self.documents = HashMap::new();
                whole = true;
            }
            for (topic, moved) in &commit.edits {
                match moved {
                    MovedDocument::Replaced(document) => {
                        self.documents.insert(topic.clone(), (**document).clone());
                        edits.push((topic.clone(), None));
                    }
                    MovedDocument::Edited(edit) => {
                        // The reader applied the same edit; if it does not apply here, only a comparison helps.
                        whole |= self.documents.entry(topic.clone()).or_default().apply(edit).is_err();
                        edits.push((topic.clone(), Some(edit.clone())));
                    }
                }
            }
            for topic in &commit.dropped {
                self.documents.remove(topic);
                edits.push((topic.clone(), None));
            }
        }
        (edits, whole)
    }

    /// The safe part of a change that is overdue; in force until the next commit.
    pub fn overdue(&mut self, safe: Replica) -> Result<(), E::Error> {
        self.show(safe);
        self.settle()
    }

    /// The same, in force with the next [`Keeper::settle`].
    pub fn show(&mut self, safe: Replica) {
        if !self.frozen && !self.cached {
            self.shown = Some(safe);
        }
    }

    pub fn attach(&mut self, workload: WorkloadId, attached: Attached) -> Result<(), E::Error> {
        self.move_attachment(&workload, Some(attached))
    }

    /// `false`: it was not attached.
    pub fn detach(&mut self, workload: &WorkloadId) -> Result<bool, E::Error> {
        let was = self.engine.attachments().contains_key(workload);
        self.move_attachment(workload, None)?;
        Ok(was)
    }

    fn move_attachment(&mut self, workload: &WorkloadId, attached: Option<Attached>) -> Result<(), E::Error> {
        if self.stale {
            self.want(workload.clone(), attached);
            return self.settle();
        }
        let held = Held(self.shown.as_ref().unwrap_or(&self.documents));
        let plan = self.engine.attach(workload, attached, &held);
        // Other documents than those heard of last are in force: what the engine would do for one workload may not rest on these.
        let plan = if self.shown.is_some() { self.engine.compare(&held) } else { plan };
        self.take(plan)
    }

    /// Notes how a workload is to be attached, or that it is not to be; in force with the next [`Keeper::settle`]. Whether it was.
    pub fn want(&mut self, workload: WorkloadId, attached: Option<Attached>) -> bool {
        let mut attachments = self.engine.attachments().clone();
        let was = match attached {
            Some(attached) => attachments.insert(workload, attached),
            None => attachments.remove(&workload),
        };
        self.engine.set_attachments(attachments);
        was.is_some()
    }

    /// Which interfaces are held, by number, from now on.
    pub fn hold(&mut self, held: BTreeSet<u32>) -> Result<(), E::Error> {
        let plan = self.engine.hold(held);
        self.take(plan)
    }

    pub fn set_settings(&mut self, settings: Settings) -> Result<(), E::Error> {
        self.want_settings(settings);
        self.settle()
    }

    /// In force with the next [`Keeper::settle`].
    pub fn want_settings(&mut self, settings: Settings) {
        self.engine.set_settings(settings);
    }

    /// While frozen the kernel keeps what it has; what was missed is made good by thawing.
    pub fn set_frozen(&mut self, frozen: bool) -> Result<(), E::Error> {
        self.want_frozen(frozen);
        if frozen { Ok(()) } else { self.settle() }
    }

    /// In force with the next [`Keeper::settle`].
    pub fn want_frozen(&mut self, frozen: bool) {
        if frozen && !self.frozen && self.shown.is_none() {
            self.shown = Some(self.documents.clone());
        }
        if !frozen && self.frozen {
            self.shown = None;
        }
        self.frozen = frozen;
    }

    /// Looks whether the table is what we left there, and puts it right if not; whether it was not.
    pub fn repair(&mut self) -> Result<bool, E::Error> {
        let found = self.enforcer.found()?;
        if found == *self.engine.actual() {
            return Ok(false);
        }
        self.engine.set_actual(found);
        self.counts.repairs += 1;
        // It knows no more than the disk any longer.
        self.stale = false;
        self.settle()?;
        Ok(true)
    }

    fn take(&mut self, plan: Plan) -> Result<(), E::Error> {
        if plan.transaction.is_empty() {
            self.take_over()?;
            self.engine.committed(plan);
            return Ok(());
        }
        let (operations, stamp) = (plan.transaction.ops.len() as u64, plan.stamp);
        match self.commit(&plan) {
            Ok(()) => {
                self.counts.transactions += 1;
                self.counts.operations += operations;
                self.counts.bumps += u64::from(stamp != self.engine.stamp());
                self.engine.committed(plan);
                Ok(())
            }
            Err(error) => {
                self.counts.failures += 1;
                self.engine.failed();
                // Perhaps it is not what we think: look, and if so, put it right at once.
                let found = self.enforcer.found()?;
                if found == *self.engine.actual() {
                    return Err(error);
                }
                self.engine.set_actual(found);
                let plan = self.plan();
                self.commit(&plan)?;
                self.engine.committed(plan);
                self.counts.repairs += 1;
                Ok(())
            }
        }
    }

    /// Commits, and sees to it that no connection carries the plan's stamp from another policy.
    fn commit(&mut self, plan: &Plan) -> Result<(), E::Error> {
        let bits = self.engine.settings().mark;
        let (now, next) = (self.engine.stamp(), plan.stamp);
        let current = |stamp| [bits.judged(stamp), bits.half_judged(stamp)];
        if self.marks == Marks::Unknown {
            self.counts.unmarked += self.enforcer.zero_marks(bits.mask(), &[])?;
        } else if plan.wrapped {
            // What the table stamps meanwhile carries the last of the old stamps, which is not the next.
            self.counts.unmarked += self.enforcer.zero_marks(bits.mask(), &current(now))?;
        }
        self.enforcer.commit(&plan.transaction)?;
        self.taken_over = true;
        let stale = self.marks == Marks::Behind || plan.wrapped;
        self.marks = Marks::Known;
        if stale {
            // None of these is current; but one day their stamps will be used again. It is in force already: not a failure.
            match self.enforcer.zero_marks(bits.mask(), &current(next)) {
                Ok(count) => self.counts.unmarked += count,
                Err(error) => tracing::warn!(%error, "old stamps stay on idle connections"),
            }
        }
        Ok(())
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn documents(&self) -> &Replica {
        &self.documents
    }

    /// Whether it began with a table that was there.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Whether nothing was heard from the bus yet.
    pub fn is_cached(&self) -> bool {
        self.cached
    }

    /// Whether the policy in the kernel's table stays as it is until the bus is heard.
    pub fn is_stale(&self) -> bool {
        self.stale
    }

    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    pub fn refused(&self) -> &[Refusal] {
        self.engine.refused()
    }

    /// To look at it, not to commit past the keeper.
    pub fn enforcer(&mut self) -> &mut E {
        &mut self.enforcer
    }

    /// What is there, as the enforcer says.
    pub fn read(&mut self) -> Result<Option<Table>, E::Error> {
        self.enforcer.read()
    }
}

#[cfg(test)]
mod tests;
