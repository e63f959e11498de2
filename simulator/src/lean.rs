//! A NATS client for thousands of connections in one process.
//!
//! async-nats gives every subscription its own channel: 5 KB each, and the order between subjects is lost. Here a connection is a
//! socket, a few bytes of state and one callback that sees every message in wire order; bytes are read into a buffer shared by all
//! connections of a thread and parsed in place, so that an idle connection holds no buffer at all.

mod client;
mod connection;
mod encode;
mod fleet;
mod parse;

pub use client::{Client, ClientError, Message};
pub use connection::{ClosedReason, ConnectError, ConnectOptions, Connection, Credentials, OUTBOUND_BYTES_MAX, Wire};
pub use encode::Outbound;
pub use fleet::{CommandSender, Handler, Running, Stall, spawn};
pub use parse::{CONTROL_LINE_BYTES_MAX, Decoder, Frame, Headers, MessageFrame, PAYLOAD_BYTES_MAX, ParseError, Parsed, parse};
