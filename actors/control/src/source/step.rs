//! What goes into a source's [`Machine`](super::machine::Machine), and what comes out.

use std::collections::BTreeMap;

use groupcast_policy::ids::{GroupId, WorkloadId};

use super::diff::Difference;
use super::owned::Owned;
use super::{Failed, Polled};
use crate::change::Write;

#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Leading(bool),
    Tick,
    /// Somebody wants a poll that begins after now; a full one does not trust the source's word that nothing has changed.
    PollNow {
        ask: u64,
        full: bool,
    },
    /// An operator says that what was held back is meant.
    Confirm {
        ask: u64,
    },
    Loaded {
        run: u64,
        result: Result<Box<Owned>, String>,
    },
    Polled {
        run: u64,
        result: Result<Polled, Failed>,
    },
    Written {
        run: u64,
        result: Result<Written, NotWritten>,
    },
}

/// What was written, and where it lies now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Written {
    pub revisions: BTreeMap<GroupId, u64>,
    pub incarnations: BTreeMap<WorkloadId, u64>,
    /// Workloads that were not placed because somebody else holds their name or address, and who.
    pub withheld: BTreeMap<WorkloadId, String>,
    /// The last sequence in each stream, where something was written to it.
    pub catalog: Option<u64>,
    pub registry: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotWritten {
    pub message: String,
    /// Somebody else has written the same: worth another look at once.
    pub conflict: bool,
}

/// What is to be written, in this order: changes, registrations, removals.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub changes: Vec<Vec<Write>>,
    pub difference: Difference,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    Load { run: u64 },
    Poll { run: u64, full: bool, marker: Option<String> },
    Write { run: u64, plan: Box<Plan> },
    Answer { ask: u64, answer: Answer },
    WakeAt(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The source was read; topics that reflect these sequences have what it says.
    Done {
        catalog: u64,
        registry: u64,
    },
    /// It says that most of what it owns is gone: nothing was written.
    Held {
        deletions: usize,
    },
    Failed(String),
    NotLeading,
    /// There is nothing to confirm.
    NothingHeld,
}
