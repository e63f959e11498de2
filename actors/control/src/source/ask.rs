//! What gateways and registrars ask the leading controller about sources over the bus, as JSON.

use serde::{Deserialize, Serialize};

use super::status::Status;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Ask {
    List,
    /// Reads all of this source now; answered when what it says is compiled and published.
    Poll {
        id: String,
    },
    /// What was held back is meant.
    Confirm {
        id: String,
    },
    /// Asks every source whether something is new; answered when that is written.
    Fresh,
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
