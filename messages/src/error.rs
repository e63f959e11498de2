//! Why a message was refused.

use groupcast_policy::ids::InvalidId;
use groupcast_policy::topic::InvalidTopic;

use crate::SCHEMA_MAJOR;
use crate::wire::PAYLOAD_BYTES_MAX;

/// The message was not understood and nothing of it was used. For a topic's message the remedy is to ask for the topic again; where
/// the same error comes back, the two sides run versions that do not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("schema version {found} is not known here (this side speaks {SCHEMA_MAJOR}): upgrade the older side")]
    Version { found: u64 },
    #[error("the message does not begin with its schema version: whatever sent it does not speak groupcast's protocol")]
    NoVersion,
    #[error("{found} bytes are more than the {PAYLOAD_BYTES_MAX} a message may have: the sender must split it")]
    Oversized { found: usize },
    #[error("the message ends inside {item}: ask for it again")]
    Truncated { item: &'static str },
    #[error("{item} is malformed or out of its range: ask for it again")]
    Malformed { item: &'static str },
    #[error("{item} is missing: ask for it again")]
    Missing { item: &'static str },
    #[error("{item} stands twice: ask for it again")]
    Duplicate { item: &'static str },
    #[error("{item} is of kind {found}, which is not known here: upgrade this side")]
    Unknown { item: &'static str, found: u64 },
    #[error("{item} contradicts the rest of the message: ask for it again")]
    Contradiction { item: &'static str },
    #[error("{found} {item} are more than the {max} allowed: the sender must split the message or send less")]
    TooMany { item: &'static str, found: usize, max: usize },
    #[error("{bytes} bytes follow the end of the message: ask for it again")]
    Trailing { bytes: usize },
    #[error(transparent)]
    Id(#[from] InvalidId),
    #[error(transparent)]
    Topic(#[from] InvalidTopic),
}
