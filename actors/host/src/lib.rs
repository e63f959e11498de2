//! The host agent: topics in, nftables out. GPL-3.0-or-later, because it links [`rustables`]; no other crate may use this one.
//!
//! - [`config`]: what `agent.toml` says
//! - [`keeper`], [`holder`]: documents, engine and enforcer together, and what they need of a kernel
//! - [`state`], [`orders`], [`files`]: the last good state on disk, what was ordered on the local socket, and how both are written
//! - [`inbox`], [`enforcement`], [`disk`]: commits in, the kernel's table, the disk; the last two are actors
//! - [`mode`], [`pace`], [`explain`], [`report`]: what operators order, how often flows are judged again, why, and what is said about it
//! - [`join`], [`renew`]: how this host gets its credential and keeps it
//! - [`enrol`], [`registration`], [`probe`]: what it registers, and whether that is well
//! - [`api`], [`command`], [`http`], [`notify`]: the local socket and its command line, metrics, the service manager
//! - [`mod@bench`]: what enforcing costs
//! - [`run`]: all of it as a process
//! - [`netlink`]: the kernel as an enforcer
//!
//! What the kernel should hold is decided in `groupcast-enforce`; which topics the host needs and whether they are whole, in
//! `groupcast-topics`.

pub mod api;
pub mod bench;
pub mod command;
pub mod config;
pub mod disk;
pub mod enforcement;
pub mod enrol;
pub mod explain;
pub mod files;
pub mod holder;
pub mod host;
pub mod http;
pub mod inbox;
pub mod join;
pub mod keeper;
pub mod mode;
pub mod netlink;
pub mod notify;
pub mod orders;
pub mod pace;
pub mod probe;
pub mod reached;
pub mod registration;
pub mod renew;
pub mod report;
pub mod run;
pub mod state;
pub mod terminal;
