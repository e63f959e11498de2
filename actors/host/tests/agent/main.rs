//! The agent as a process: a real bus, a real kernel, a network namespace of its own.

mod cases;
mod doors;
mod guest;
mod kernel;
mod life;
mod world;
