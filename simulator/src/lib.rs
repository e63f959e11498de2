//! Fleets of simulated hosts, faults and benchmarks. The `groupcast-sim` binary is a thin shell over this library.
//!
//! - [`lean`]: a NATS client for thousands of connections in one process
//! - [`host`]: a simulated host: the real reader of topics over that client
//! - [`fake`]: servers that pretend to be what sources are polled from
//! - [`mod@bench`]: the benchmarks
//! - [`fleet`]: thousands of hosts under load while things break, and reports of it
//! - [`explore`]: the pure cores on a simulated bus, a world for each seed

pub mod bench;
pub mod explore;
pub mod fake;
pub mod fleet;
pub mod host;
pub mod lean;
mod random;
