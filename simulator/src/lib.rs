//! Fleets of simulated hosts, faults and benchmarks. The `groupcast-sim` binary is a thin shell over this library.
//!
//! - [`lean`]: a NATS client for thousands of connections in one process
//! - [`bench`]: the benchmarks

pub mod bench;
pub mod lean;
mod random;
