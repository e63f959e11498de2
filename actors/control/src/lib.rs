//! The controller's actors, as a library that the `groupcast` binary embeds.
//!
//! Empty so far. Here will live one actor per file: sources, registrar, compiler, fanout, snapshot service, convergence
//! and reaper. Each moves messages between the bus and a pure core; the cores are in `groupcast-policy` (compiler) and
//! `groupcast-topics` (writer, snapshot service, convergence), not here. Actors hold recipients, not addresses, and answer
//! a full mailbox: nothing is sent without looking at the outcome.
//!
//! It may use `groupcast-topics` and what is below it. Only `gateway` uses it.
