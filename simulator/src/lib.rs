//! Fleets of simulated hosts, faults and benchmarks. The `groupcast-sim` binary is a thin shell over this library.
//!
//! - [`lean`]: a NATS client for thousands of connections in one process
//! - [`host`]: a simulated host: the real reader of topics over that client
//! - [`mod@bench`]: the benchmarks

pub mod bench;
pub mod host;
pub mod lean;
mod random;
