//! The agent as a process: a real bus, a real kernel, a network namespace of its own.

mod cases;
mod doors;
mod files;
mod guest;
mod kernel;
mod life;
mod orders;
mod orders_in_force;
mod ports;
mod told;
mod world;
