//! Fleets of simulated hosts, faults and benchmarks. The `groupcast-sim` binary is a thin shell over this library.

pub mod lean;
