//! What a host's kernel should hold, and the shortest way there. Pure: no IO, no async, no clock.
//!
//! In the order data flows through them:
//!
//! - [`interface`], [`expression`], [`table`]: an nftables table as plain data
//! - [`settings`]: what the operator and whoever starts workloads say
//! - [`names`], [`ruleset`]: the desired table
//! - [`delta`], [`stamp`]: desired against actual, as the operations of one transaction; when every flow is judged again
//! - [`engine`]: the two kept up to date, change by change
//! - [`enforcer`]: the port that a kernel, a dry run and a model implement
//! - [`kernel`]: a model kernel that decides packets on such a table
//! - [`trial`]: random policies, changes and packets for tests
//! - [`text`]: the same in nft text, for people and for `nft -c` as a witness in tests

use std::sync::Arc;

pub mod delta;
pub mod enforcer;
pub mod engine;
pub mod expression;
pub mod interface;
pub mod kernel;
pub mod names;
pub mod ruleset;
pub mod settings;
pub mod stamp;
pub mod table;
pub mod text;
pub mod trial;

/// The name of a chain, set or map. Cheap to clone: it stands in every rule that names it.
pub type Name = Arc<str>;
