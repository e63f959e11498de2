//! The pure core of groupcast: no IO, no async, no clock.
//!
//! - [`ids`]: the validated names of everything
//! - [`net`]: prefixes, port sets and address sets that cannot be malformed
//! - [`rule`]: one rule of a group, normalised
//! - [`topic`]: the replicated documents' names
//! - [`doc`]: the replicated documents' contents, the edits to them and their digests
//! - [`needs`]: which topics a host needs, from scratch and incrementally
//! - [`packet`]: what a packet shows to a rule
//! - [`normal`]: the normal form of rules
//! - [`text`]: the one-line text form of rules
//! - [`model`]: the desired state and its meaning
//! - [`written`]: documents in YAML and JSON, and the dialects of Cloud Foundry and Neutron
//! - [`check`]: contradictions between documents; [`collide`]: names that cannot be told apart
//! - [`oracle`]: verdict and explanation, straight from the semantics
//! - [`compiler`]: events in, edits per topic and span changes out; [`scratch`] is its from-scratch twin
//! - [`resolve`]: from a host's documents to the policy of its workloads
//! - [`safe`]: what of a change may be in force before all of it can
//! - [`meaning`]: the flows a change gains and loses

pub mod check;
pub mod collide;
pub mod compiler;
pub mod doc;
pub mod ids;
pub mod meaning;
pub mod model;
pub mod needs;
pub mod net;
pub mod normal;
pub mod oracle;
pub mod packet;
pub mod resolve;
pub mod rule;
pub mod safe;
pub mod scratch;
pub mod text;
pub mod topic;
pub mod written;

#[cfg(test)]
mod testing;
