//! Sources: other systems that say which groups there are, and where workloads run.
//!
//! Each poll ends in a *complete* [`Observation`] or in an error, never in between. A complete one is compared with what the source owns
//! ([`diff`]), held back if it would delete most of it ([`guard`]), and written as one change; an error changes nothing. When to poll,
//! whom to answer and what to remember is decided by the [`machine`], without clock and IO.
//!
//! - [`config`]: the `[[source]]` tables of `groupcast.toml`
//! - [`transport`]: what a poll needs of the world, as a trait; [`http`] is the real one
//! - [`cloud_controller`], [`neutron`], [`directory`]: the kinds, each a conversation over the transport; [`poller`] chooses
//! - [`united`]: what its workloads add up to in one group
//! - [`owned`]: what the source owns; [`step`]: what the machine is told and tells
//! - [`status`]: what operators see; [`ask`]: what is asked over the bus

pub mod ask;
pub mod cloud_controller;
pub mod config;
pub mod diff;
pub mod directory;
pub mod guard;
pub mod heads;
pub mod http;
pub mod machine;
pub mod neutron;
pub mod owned;
pub mod page;
pub mod poller;
pub mod service;
pub mod session;
pub mod status;
pub mod step;
pub mod store;
pub mod transport;
pub mod turns;
pub mod united;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use groupcast_policy::ids::{GroupId, WorkloadId};
use groupcast_policy::model::{Group, Workload};

/// Malformed items that are remembered by name; of more than these only the number is known.
pub const PROBLEMS_MAX: usize = 100;
/// Longest description of a malformed item in characters; the end of a longer one is cut.
pub const PROBLEM_LEN_MAX: usize = 400;

/// What is said of something that may be any of what is known.
const NAMELESS: &str = "nothing is deleted until this is mended, it may be anything that is known";

/// Everything a source says, complete as of one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observation {
    pub groups: BTreeMap<GroupId, Arc<Group>>,
    pub workloads: BTreeMap<WorkloadId, Arc<Workload>>,
    /// What is there but cannot be read: its last good version stays.
    pub kept_groups: BTreeSet<GroupId>,
    pub kept_workloads: BTreeSet<WorkloadId>,
    pub problems: Problems,
    /// By what the source can tell cheaply that nothing has changed since.
    pub marker: Option<String>,
    /// Only what moved was fetched: no full sync.
    pub partial: bool,
    /// It says nothing at all where that is more likely a mishap than meant: only an operator makes that believed.
    pub doubtful: bool,
    /// The source cannot say cheaply whether anything is new: it is asked less often.
    pub costly: bool,
}

/// What is wrong with single items.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems {
    pub named: Vec<String>,
    pub count: usize,
    /// Something cannot be read that does not even say its id: it may be any of what is known, so nothing is deleted.
    pub nameless: bool,
}

impl Problems {
    pub fn add(&mut self, words: impl ToString) {
        self.count += 1;
        if self.named.len() < PROBLEMS_MAX {
            self.named.push(words.to_string().chars().take(PROBLEM_LEN_MAX).collect());
        }
    }

    /// Something that does not say which of the known things it is.
    pub fn add_nameless(&mut self, words: impl ToString) {
        self.count += 1;
        let words = format!("{NAMELESS}: {}", words.to_string());
        // First, so that the one that has this effect is always shown.
        self.named.insert(0, words.chars().take(PROBLEM_LEN_MAX).collect());
        self.named.truncate(PROBLEMS_MAX);
        self.nameless = true;
    }

    pub fn extend(&mut self, other: &Problems) {
        other.named.iter().for_each(|words| self.add(words));
        self.count += other.count - other.named.len();
        self.nameless |= other.nameless;
    }
}

/// What came of a poll.
#[derive(Debug, Clone, PartialEq)]
pub enum Polled {
    /// The source says that nothing has changed since the marker.
    Unchanged,
    Observed(Box<Observation>),
}

/// A poll that told nothing: what was known before stays.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failed {
    pub message: String,
    /// The source asked not to be bothered for so long.
    pub retry_after: Option<Duration>,
}

impl Failed {
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), retry_after: None }
    }
}
