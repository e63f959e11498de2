//! What travels on the simulated bus.

use groupcast_policy::topic::Topic;

use crate::node::{self, Fate, Request};
use crate::term::Reserved;

pub(super) enum Message {
    Lead {
        sequence: u64,
        previous: u64,
        payload: Vec<u8>,
    },
    Delta {
        topic: Topic,
        sequence: u64,
        previous: u64,
        payload: Vec<u8>,
    },
    Flushed(u64),
    Answer(Vec<u8>),
    EntropyAnswer(Vec<u8>),
    Nudge(Vec<u8>),
    Request {
        id: u64,
        request: Request,
    },
    Ack {
        host: usize,
        payload: Vec<u8>,
    },
    Head(node::Head),
    Term(Option<Reserved>),
    TermRead(u64),
    LifeBegun(bool),
    Published {
        batch: u64,
        fate: Fate,
    },
    Records(node::Records),
    /// A peer asks for everything; the answer goes back to it.
    PeerAnswer(Vec<u8>),
    Connected,
    Disconnected,
}

impl Message {
    pub(super) fn describe(&self) -> String {
        match self {
            Message::Lead { sequence, previous, .. } => format!("lead {sequence} after {previous}"),
            Message::Delta { topic, sequence, previous, .. } => format!("delta {topic} {sequence} after {previous}"),
            Message::Flushed(number) => format!("flushed {number}"),
            Message::Answer(_) => "answer".to_owned(),
            Message::EntropyAnswer(payload) => format!("{:?}", groupcast_messages::EntropyAnswer::decode(payload)),
            Message::Nudge(_) => "nudge".to_owned(),
            Message::Request { id, .. } => format!("request {id}"),
            Message::Ack { host, .. } => format!("ack of {host}"),
            Message::Head(head) => format!("head {:?}", head.as_ref().map(|(sequence, _)| sequence)),
            Message::TermRead(term) => format!("highest term {term}"),
            Message::LifeBegun(begun) => format!("life begun: {begun}"),
            Message::Term(term) => format!("term {term:?}"),
            Message::Published { batch, fate } => format!("published {batch} {fate:?}"),
            Message::Records(records) => format!("{} records", records.topics.len()),
            Message::PeerAnswer(_) => "answer of a peer".to_owned(),
            Message::Connected => "connected".to_owned(),
            Message::Disconnected => "disconnected".to_owned(),
        }
    }
}
