//! The gateway (HTTP API), the operator's command line and the controller, in one binary `groupcast`.
//!
//! Plain data and judgement, without clock and IO:
//! - [`local`]: what a gateway knows by following the streams
//! - [`token`], [`scope`], [`attempts`]: who may do what
//! - [`shares`], [`doors`]: how much one client may take, and where it comes from
//! - [`basis`]: what a change is judged on
//! - [`bounds`]: whether a change fits into one batch
//! - [`plan`], [`explained`]: what a change would mean, and why a flow passes
//!
//! On the bus and towards clients: [`follow`], the streams into the local state; [`submit`], the one way a change goes; [`heavy`], threads for what takes long; [`confirm`], changes that take themselves back; [`progress`],
//! how far changes are; [`registrations`], who is registered and how they are; [`stores`], whether what is stored is safe; [`api`], the routes; [`server`] and [`tls`], connections; [`gateway`], all of it together. [`cli`] is what operators type.
//!
//! It may use `groupcast-control` and what is below it. It drives the agent as a process, never as a library.

pub mod api;
pub mod attempts;
pub mod basis;
pub mod bounds;
pub mod bus;
pub mod checks;
pub mod cli;
pub mod config;
pub mod confirm;
pub mod controller;
pub mod demo;
pub mod doors;
pub mod expiry;
pub mod explained;
pub mod follow;
pub mod gateway;
pub mod happens;
pub mod heavy;
pub mod host_bits;
pub mod local;
pub mod plan;
pub mod problem;
pub mod progress;
pub mod registrations;
pub mod scope;
pub mod secret;
pub mod serve;
pub mod server;
pub mod shares;
pub mod stores;
pub mod submit;
pub mod telemetry;
pub mod tls;
pub mod token;
pub mod transfer;
pub mod watch;
