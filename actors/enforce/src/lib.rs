//! What a host's kernel should hold, and the shortest way there. Pure: no IO, no async, no clock.
//!
//! Empty so far. Here will live, in the order data flows through them:
//!
//! - the ruleset: the tables, sets, maps, chains and rules that follow from the documents a host holds
//! - the delta: desired against actual, as the list of edits of one transaction
//! - the same in nft text, for people and for `nft -c` as a test oracle
//! - the port `Enforcer`, which the agent implements over netlink, and a model kernel that implements it in memory
//! - the types of the agent's local API
//!
//! It may use `groupcast-policy` and pure crates named in the layout test, nothing else.
