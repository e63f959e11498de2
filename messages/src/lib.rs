//! What groupcast's processes say to each other: the wire types, their encodings and their limits.
//!
//! Every message is one MessagePack map with single-letter keys that begins with its schema version `v`. Values at their default
//! are not written. Within a major version fields are only ever added, so old readers skip what they do not know and new readers
//! supply defaults; that is why no minor version travels. Whatever *narrows* the meaning of a message comes as a new value of a kind
//! field (`k`, `b`, `t`, `r`, `x`), which an old reader refuses, never as a new field, which it would skip.
//!
//! Every decoder is total: any input gives a value or an error, in memory proportional to the input, whatever lengths the input
//! claims.
//!
//! - [`delta`], [`lead`]: what the leader writes to topics
//! - [`ask`], [`chunk`], [`writer`]: join and repair
//! - [`status`]: acknowledgements, entropy checks, nudges
//! - [`registration`]: beats and enrolment
//! - [`request`]: what a host asks of the registrar beside that: freshness, and to be forgotten

pub mod ask;
pub mod chunk;
pub mod delta;
mod edit;
mod error;
pub mod lead;
mod pack;
pub mod registration;
pub mod request;
pub mod status;
mod wire;
pub mod writer;

pub use ask::{ASK_TOPICS_MAX, Ask};
pub use chunk::{Answer, Body, CHUNK_ENTRIES_MAX, Chunk, ENTRY_DELTAS_MAX, Entry, Past, TopicRef};
pub use delta::{COMPANIONS_MAX, Companions, Delta, Tally};
pub use edit::{
    EDIT_ITEMS_MAX, PLACEMENT_ADDRESSES_MAX, PLACEMENT_GROUPS_MAX, RULE_ADDRESS_SPANS_MAX, RULE_PORT_SPANS_MAX, check_edit,
};
pub use error::DecodeError;
pub use lead::{Cut, LEADER_BYTES_MAX, Lead};
pub use registration::{
    Beat, BeatAnswer, LABEL_KEY_BYTES_MAX, LABEL_VALUE_BYTES_MAX, LABELS_MAX, REGISTER_WORKLOADS_MAX, Register, RegisterAnswer,
    RegisterWorkload, VERSION_BYTES_MAX,
};
pub use request::{FRESH_WITHIN_MS_MAX, HealthReport, HostRequest, HostRequestAnswer};
pub use status::{
    ACK_TOPICS_MAX, AUDITED_NAMED_MAX, Ack, ENTROPY_TOPICS_MAX, EntropyAnswer, EntropyCheck, HostState, NUDGE_TOPICS_MAX, Nudge,
    STATE_NAME_BYTES_MAX, entropy_item,
};
pub use wire::PAYLOAD_BYTES_MAX;
pub use writer::{CHUNK_BYTES_MAX, ChunkWriter, EncodedDocument, PART_BYTES_MAX};

/// Version of all messages. A reader refuses every other one: the same major means "at most more fields".
pub const SCHEMA_MAJOR: u8 = 1;

/// Longest reason in bytes, wherever one is given. Encoders cut longer ones.
pub const REASON_BYTES_MAX: usize = 256;
