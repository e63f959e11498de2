//! A simulated bus for the machines: one thread, a simulated clock, everything random drawn from one seed.
//!
//! It loses, delays, duplicates and reorders messages, crashes hosts and controllers, partitions them, restarts the server with and
//! without its stream, and answers publishes late, wrongly or not at all. Checkers watch every state a host exposes, and
//! compare the end with what was desired. A failure names its seed, and the seed replays it.

mod bus;
mod check;
mod clients;
mod faults;
mod message;
mod policy;
mod server;
#[cfg(test)]
mod tests;

pub use bus::{Outcome, World};
pub use faults::{Faults, Sabotage};
pub use policy::{Controller, Moment, Script, Universe};
