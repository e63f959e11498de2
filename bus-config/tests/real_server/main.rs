//! Everything here runs on real servers, each test on its own.

mod attack;
mod configurations;
mod credentials;
mod crossing;

mod roles;
mod server;
mod streams;
mod world;
