//! What gateways and registrars ask the leading controller about sources over the bus, as JSON.

use serde::{Deserialize, Serialize};

use super::status::Status;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Ask {
    List,
    /// Reads this source now, all of it unless it need not be full; answered when what it says is compiled and published.
    Poll {
        id: String,
        #[serde(default = "yes")]
        full: bool,
    },
    /// What was held back is meant.
    Confirm {
        id: String,
    },
    /// Asks every source whether something is new; answered when that is written.
    Fresh,
}

const fn yes() -> bool {
    true
}

impl Ask {
    /// The source it is about, where it is about one.
    pub fn source(&self) -> Option<&str> {
        match self {
            Self::Poll { id, .. } | Self::Confirm { id } => Some(id),
            Self::List | Self::Fresh => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Told {
    List {
        sources: Vec<Status>,
        /// The term of whoever answers.
        #[serde(default)]
        term: u64,
    },
    /// Written: topics that reflect these sequences of CATALOG and REGISTRY have it.
    Done {
        catalog: u64,
        registry: u64,
    },
    Held {
        deletions: usize,
    },
    NothingHeld,
    Unknown,
    Failed {
        message: String,
    },
}
