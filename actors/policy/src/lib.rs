//! The pure core of groupcast: no IO, no async, no clock.
//!
//! - [`ids`]: the validated names of everything
//! - [`net`]: prefixes, port sets and address sets that cannot be malformed
//! - [`rule`]: one rule of a group, normalised
//! - [`topic`]: the replicated documents' names
//! - [`doc`]: the replicated documents' contents, the edits to them and their digests
//! - [`needs`]: which topics a host needs, from scratch and incrementally

pub mod doc;
pub mod ids;
pub mod needs;
pub mod net;
pub mod rule;
pub mod topic;
