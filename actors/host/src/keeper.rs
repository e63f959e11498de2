//! Keeps the kernel as it should be: the documents at hand, the engine, and whatever enforces. Plain: the actor around it moves messages
//! and waits.

use std::collections::HashMap;

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::{Engine, Plan};
use groupcast_enforce::ruleset::Refusal;
use groupcast_enforce::settings::{Attached, Attachments, Settings, Stamp};
use groupcast_enforce::table::Table;
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::topic::Topic;

use crate::state::Replica;

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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub transactions: u64,
    pub operations: u64,
    pub bumps: u64,
    pub failures: u64,
    /// The table was not what we had left there, and was put right.
    pub repairs: u64,
}

pub struct Keeper<E> {
    engine: Engine,
    enforcer: E,
    documents: Replica,
    /// Documents come from the disk until the first commit of this run: nothing of theirs is mixed with what the bus says.
    cached: bool,
    frozen: bool,
    adopted: bool,
    pub counts: Counts,
}

/// A topic not held is not synced.
struct Held<'r>(&'r Replica);

impl Documents for Held<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.get(topic)
    }
}

impl<E: Enforcer> Keeper<E> {
    /// Takes over the table that the enforcer holds, if it does. `stamp` is what the disk says, or a random one.
    pub fn start(
        host: HostId,
        settings: Settings,
        attachments: Attachments,
        stamp: Stamp,
        documents: Replica,
        mut enforcer: E,
    ) -> Result<Self, E::Error> {
        let held = enforcer.read()?;
        let adopted = held.is_some();
        let engine = match held {
            Some(table) => Engine::adopt(host, settings, attachments, stamp, table),
            None => Engine::new(host, settings, attachments, stamp),
        };
        Ok(Self { engine, enforcer, documents, cached: true, frozen: false, adopted, counts: Counts::default() })
    }

    /// Makes everything as it should be by what is known. Also the way to try again after a failure.
    pub fn settle(&mut self) -> Result<(), E::Error> {
        let plan = self.engine.compare(&Held(&self.documents));
        self.take(plan)
    }

    /// All commits that came out of one event, together.
    pub fn moved(&mut self, commits: &[Moved]) -> Result<(), E::Error> {
        let mut edits: Vec<(Topic, Option<Edit>)> = Vec::new();
        let mut whole = self.cached || self.frozen;
        if self.cached && !commits.is_empty() {
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
        if self.frozen {
            return Ok(());
        }
        let held = Held(&self.documents);
        let plan = if whole { self.engine.compare(&held) } else { self.engine.change(&edits, &held) };
        self.take(plan)
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
        let plan = self.engine.attach(workload, attached, &Held(&self.documents));
        // Frozen, documents have moved on without the engine: what it would do for one workload may rest on what is not in force.
        let plan = if self.frozen { self.engine.compare(&Held(&self.documents)) } else { plan };
        self.take(plan)
    }

    /// The settings at a start. A table that was there is newer than the disk, which may be some changes behind: what those revoked must
    /// not come back, so nothing is touched before the bus, or somebody here, says something.
    pub fn begin_with(&mut self, settings: Settings) -> Result<(), E::Error> {
        self.engine.set_settings(settings);
        if self.adopted { Ok(()) } else { self.settle() }
    }

    pub fn set_settings(&mut self, settings: Settings) -> Result<(), E::Error> {
        self.engine.set_settings(settings);
        self.settle()
    }

    /// While frozen the kernel keeps what it has; what was missed is made good by thawing.
    pub fn set_frozen(&mut self, frozen: bool) -> Result<(), E::Error> {
        self.frozen = frozen;
        if frozen { Ok(()) } else { self.settle() }
    }

    fn take(&mut self, plan: Plan) -> Result<(), E::Error> {
        if plan.transaction.is_empty() {
            self.engine.committed(plan);
            return Ok(());
        }
        let (operations, stamp) = (plan.transaction.ops.len() as u64, plan.stamp);
        match self.enforcer.commit(&plan.transaction) {
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
                let found = self.enforcer.read()?.unwrap_or_default();
                if found == *self.engine.actual() {
                    return Err(error);
                }
                self.engine.set_actual(found);
                let plan = self.engine.compare(&Held(&self.documents));
                self.enforcer.commit(&plan.transaction)?;
                self.engine.committed(plan);
                self.counts.repairs += 1;
                Ok(())
            }
        }
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
