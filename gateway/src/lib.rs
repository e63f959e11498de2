//! The gateway (HTTP API), the operator's command line and the controller, in one binary `groupcast`.
//!
//! So far: `controller`, `export` and `import`. Here will live the API, bearer tokens, plan and explain (which run the pure engine of
//! `groupcast-policy` locally on documents followed from the bus), and `groupcast up`, which runs everything on one machine.
//!
//! It may use `groupcast-control` and what is below it. It drives the agent as a process, never as a library.

pub mod bus;
pub mod config;
pub mod controller;
pub mod telemetry;
pub mod transfer;
pub mod watch;
