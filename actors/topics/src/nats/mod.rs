//! The network side of the machines, over async-nats: the only module here that knows sockets and clocks.

mod ears;
mod js;
mod node;
mod order;
mod reader;
mod unheard;

use std::time::Instant;

use groupcast_bus_config::{connect, subjects};
use groupcast_policy::topic::Topic;

pub use async_nats::{Client, Subscriber};
pub use ears::{DEAF_AFTER, Ears, HEARD_MAX, Hearing, Kind, Tallied};
pub use node::{Compile, NodeHandle, compiled, spawn_node, spawn_node_hearing};
pub use reader::{Hooks, OnCommit, ReaderHandle, request, spawn_reader};

/// Whether requests have a chance to be answered.
pub fn is_connected(client: &Client) -> bool {
    client.connection_state() == async_nats::connection::State::Connected
}

/// What happened to a connection, in the words of the machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Up,
    Down,
    /// Messages were dropped on this side.
    Lost,
    /// Nothing that matters here.
    Same,
    Closed,
}

async fn link(events: &mut connect::Events) -> Link {
    match events.next().await {
        // Missed events may hide a reconnect, and a reconnect is what asks for everything.
        Some(connect::Event::Connected | connect::Event::Missed) => Link::Up,
        Some(connect::Event::Disconnected) => Link::Down,
        Some(connect::Event::SlowConsumer) => Link::Lost,
        Some(connect::Event::Denied(_) | connect::Event::LeavingServer | connect::Event::Trouble(_)) => Link::Same,
        Some(connect::Event::Closed) | None => Link::Closed,
    }
}

/// Commands and events that may queue for a machine's task.
const MAILBOX_MAX: usize = 4_096;

#[derive(Debug, Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn until(&self, deadline_ms: Option<u64>) {
        match deadline_ms {
            Some(deadline) => tokio::time::sleep_until((self.0 + std::time::Duration::from_millis(deadline)).into()).await,
            None => std::future::pending().await,
        }
    }
}

/// What a republished message says about itself. Anything else on a topic's subject is not from the stream and is ignored.
#[derive(Debug, PartialEq, Eq)]
pub struct Republished {
    pub sequence: u64,
    /// The sequence of the message before it on the same subject.
    pub previous: u64,
}

impl Republished {
    /// `None` unless the headers name the stream and the written subject that belongs to `subject`.
    pub fn of(message: &async_nats::Message) -> Option<Self> {
        let headers = message.headers.as_ref()?;
        let number = |name: &str| headers.get(name)?.as_str().parse().ok();
        let read = message.subject.as_str();
        let stream = headers.get("Nats-Stream")?.as_str();
        let written = headers.get("Nats-Subject")?.as_str();
        let authentic = stream == groupcast_bus_config::streams::TOPICS.name && subjects::is_republished(written, read);
        authentic.then_some(())?;
        Some(Self { sequence: number("Nats-Sequence")?, previous: number("Nats-Last-Sequence")? })
    }
}

fn topic_of(message: &async_nats::Message) -> Option<Topic> {
    subjects::parse_read(message.subject.as_str())
}
