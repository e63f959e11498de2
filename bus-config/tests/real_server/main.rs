//! Everything here runs on real servers, each test on its own.

mod credentials;
mod crossing;

mod server;
mod streams;
mod world;
