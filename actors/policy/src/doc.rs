//! The contents of topics, the edits that change them, and the digest that proves two replicas equal.
//!
//! A document is a set of keyed items. Its digest is the wrapping sum of the items' hashes plus a constant for its presence, so
//! that it does not depend on order, an edit updates it in O(edit), and "absent" differs from "empty".

mod digest;
mod document;
mod members;

use std::collections::{BTreeMap, BTreeSet};

pub use digest::Digest;
pub use document::Document;
pub use members::{Members, V4Addresses};

use crate::ids::{AppId, GroupId, NetworkId, SpaceId, WorkloadId};
use crate::net::Prefix;
use crate::rule::Rule;
use crate::topic::Topic;

/// The life stage of a workload, and which of them a binding covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    Running,
    Staging,
}

impl Phase {
    pub fn other(self) -> Self {
        match self {
            Phase::Running => Phase::Staging,
            Phase::Staging => Phase::Running,
        }
    }
}

/// A non-empty set of phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Phases(u8);

impl Phases {
    pub const RUNNING: Phases = Phases(1);
    pub const STAGING: Phases = Phases(2);
    pub const BOTH: Phases = Phases(3);

    pub fn from_bits(bits: u8) -> Option<Self> {
        (1..=3).contains(&bits).then_some(Self(bits))
    }

    pub fn bits(self) -> u8 {
        self.0
    }

    pub fn contains(self, phase: Phase) -> bool {
        let bit = match phase {
            Phase::Running => 1,
            Phase::Staging => 2,
        };
        self.0 & bit != 0
    }
}

/// In which directions a workload's policy is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Enforced {
    pub ingress: bool,
    pub egress: bool,
}

impl Enforced {
    pub const BOTH: Enforced = Enforced { ingress: true, egress: true };
}

/// One workload as its host must know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub workload: WorkloadId,
    /// Which life of the workload this is.
    pub incarnation: u64,
    pub network: NetworkId,
    pub addresses: BTreeSet<Prefix>,
    pub space: Option<SpaceId>,
    pub app: Option<AppId>,
    pub phase: Phase,
    pub enforced: Enforced,
    /// Groups bound to the workload itself, by id or by selector.
    pub groups: BTreeSet<GroupId>,
}

/// Names a rule within its group: the hash of its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleKey(pub u64);

/// As logs and explanations name it.
impl std::fmt::Display for RuleKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    pub stateful: bool,
    pub rules: BTreeMap<RuleKey, Rule>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { stateful: true, rules: BTreeMap::new() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Scope(BTreeMap<GroupId, Phases>),
    Host(BTreeMap<WorkloadId, Placement>),
    Rules(Rules),
    Members(Members),
}

/// One topic's change within a change. The writer never sends an item both as put and as removed: that is corruption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    Scope {
        put: Vec<(GroupId, Phases)>,
        remove: Vec<GroupId>,
    },
    Host {
        put: Vec<Placement>,
        remove: Vec<WorkloadId>,
    },
    /// `stateful` stands only where it changes.
    Rules {
        stateful: Option<bool>,
        put: Vec<Rule>,
        remove: Vec<RuleKey>,
    },
    Members {
        add: Vec<Prefix>,
        remove: Vec<Prefix>,
    },
    /// The topic's object is gone: the document becomes absent.
    Retire,
    /// The writer knows the document's digest but not how readers get there (it has no record of what was published before):
    /// readers fetch the content.
    Reset,
}

impl Edit {
    /// How many items it touches.
    pub fn len(&self) -> usize {
        match self {
            Edit::Scope { put, remove } => put.len() + remove.len(),
            Edit::Host { put, remove } => put.len() + remove.len(),
            Edit::Rules { stateful, put, remove } => usize::from(stateful.is_some()) + put.len() + remove.len(),
            Edit::Members { add, remove } => add.len() + remove.len(),
            Edit::Retire | Edit::Reset => 1,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The edit of the topic's kind that touches nothing: on an absent document it creates the empty one.
    pub fn empty(topic: &Topic) -> Self {
        match topic {
            Topic::Scope(_) => Edit::Scope { put: vec![], remove: vec![] },
            Topic::Host(_) => Edit::Host { put: vec![], remove: vec![] },
            Topic::Rules(_) => Edit::Rules { stateful: None, put: vec![], remove: vec![] },
            Topic::Members(_) => Edit::Members { add: vec![], remove: vec![] },
        }
    }

    pub fn fits(&self, topic: &Topic) -> bool {
        matches!(
            (self, topic),
            (Edit::Scope { .. }, Topic::Scope(_))
                | (Edit::Host { .. }, Topic::Host(_))
                | (Edit::Rules { .. }, Topic::Rules(_))
                | (Edit::Members { .. }, Topic::Members(_))
                | (Edit::Retire | Edit::Reset, _)
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    #[error("the edit is of another kind than the topic")]
    Kind,
    #[error("the edit names one item twice")]
    Contradiction,
    #[error("the edit carries no content: fetch the topic")]
    Reset,
}

/// What an edit would do, computed without doing it: a batch is verified whole before any of it is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub digest: Digest,
    /// Removals of absent items and additions of present ones: harmless, but worth counting.
    pub no_ops: usize,
}

#[cfg(test)]
mod tests;
