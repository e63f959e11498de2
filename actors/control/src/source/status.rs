//! What operators see of a source.

use serde::{Deserialize, Serialize};

use super::guard::Held;

/// Names that are shown of what is held back.
pub const HELD_NAMED_MAX: usize = 20;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub id: String,
    pub kind: String,
    pub polling: bool,
    pub last_success_ms_ago: Option<u64>,
    /// How old what is known may be: since the last successful poll began.
    pub lag_ms: Option<u64>,
    pub last_error: Option<LastError>,
    /// Polls that failed since the last that did not.
    pub failures: u32,
    pub groups: usize,
    pub workloads: usize,
    pub held: Option<HeldBack>,
    /// Items that cannot be read; their last good versions are in force.
    pub malformed: usize,
    pub malformed_named: Vec<String>,
    /// One of these does not say which it is: nothing is deleted until it is mended.
    #[serde(default)]
    pub deletions_stopped: bool,
    /// What the source says and is not done, because of what others say: deletions of groups that denies name, workloads whose
    /// address somebody else holds.
    #[serde(default)]
    pub withheld: usize,
    #[serde(default)]
    pub withheld_named: Vec<String>,
    pub polls: u64,
    pub full_syncs: u64,
    pub last_change: Option<u64>,
    pub poll_interval_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastError {
    pub message: String,
    pub ms_ago: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBack {
    pub deletions: usize,
    pub named: Vec<String>,
    pub ms_ago: u64,
    pub confirmed: bool,
}

impl HeldBack {
    pub fn new(held: &Held, now_ms: u64) -> Self {
        // They are sorted, groups before workloads: from both ends, so that each kind is seen.
        let last = held.deletions.len().min(HELD_NAMED_MAX) / 2;
        let first = held.deletions.len().min(HELD_NAMED_MAX) - last;
        let mut named: Vec<String> = held.deletions.iter().rev().take(last).cloned().collect();
        named.reverse();
        named.splice(..0, held.deletions.iter().take(first).cloned());
        Self { deletions: held.deletions.len(), named, ms_ago: now_ms.saturating_sub(held.since_ms), confirmed: held.confirmed }
    }
}

/// How a poll ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The source said that nothing has changed.
    Unchanged,
    /// All of it was read, and is what was known.
    Observed,
    Changed,
    Held,
    Failed,
}

impl Outcome {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unchanged => "unchanged",
            Self::Observed => "observed",
            Self::Changed => "changed",
            Self::Held => "held",
            Self::Failed => "failed",
        }
    }
}
