//! Topics: replicated documents with one writer, over NATS.
//!
//! The machines are pure: events and the time in, effects out. The controller, the agent and the simulator run the same ones.
//!
//! - [`reader`]: a host's side: follows what it needs, exposes whole changes only, repairs itself
//! - [`node`]: a controller's side: follows everything, serves snapshots, leads when it is its turn
//! - [`replica`]: everything that is published, with the recent past
//! - [`hashes`]: topics by the hash they have on the wire
//! - [`batch`]: one change as the messages of one atomic batch
//! - [`term`]: what CATALOG stores about terms and lives of the stream
//! - [`convergence`]: which hosts have which change, and who has to be nudged
//! - [`admission`]: how much one host may send
//! - [`sim`]: a simulated bus for all of them
//! - [`nats`]: the only module that knows the network

pub mod admission;
pub mod batch;
pub mod convergence;
pub mod hashes;
pub mod nats;
pub mod node;
pub mod random;
pub mod reader;
pub mod replica;
pub mod sim;
pub mod term;

/// A hash map whose order depends on its contents only: a simulated run must replay exactly from its seed. The keys come from the
/// one writer that everybody trusts, so nobody can craft collisions who could not do worse.
pub type Map<K, V> = std::collections::HashMap<K, V, foldhash::fast::FixedState>;

/// What can be published in one atomic batch, lead included. The server's limit is configured to the same (see the server
/// configurations) and verified at start.
pub const BATCH_MESSAGES_MAX: usize = 20_000;

/// A change of more topics than this is tallied per host instead of listing companions in every delta.
pub const LISTED_TOPICS_MAX: usize = 32;
