//! Hosts that know their topics and fetch them, by any of the ways. They count what arrives and decode it only after the clock has
//! stopped: a host of its own does that on processors of its own.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use groupcast_bus_config::server::Server;
use groupcast_bus_config::subjects;
use groupcast_messages::{Ask, Body, CHUNK_BYTES_MAX, Chunk, ChunkWriter, Cut, TopicRef};
use groupcast_policy::doc::Document;
use groupcast_policy::topic::Topic;
use serde_json::json;

use super::Installation;
use crate::bench::fleet::{self, Finish};
use crate::bench::{bus, fixture, say};
use crate::lean::{self, Frame, Handler, Wire};

const STREAM: &str = "BASELINE";
const PREFIX: &str = "baseline";
/// The server's answer to a batched get ends with this status.
const END_OF_BATCH: u16 = 204;

/// One host in this many keeps what it receives, to be checked.
pub const CHECKED_EVERY: usize = 20;

/// A chunk says that it is the last with this key and value, among its first fields.
const LAST: &[u8] = b"\xa1l\xc3";
const LAST_WITHIN: usize = 24;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    SnapshotService,
    DirectGet,
    /// Nobody asks, nothing is looked up or encoded: a bare publisher sends each host as many bytes as it needs, in chunks of at
    /// most so many. What the bus itself takes to carry them, so what no service on it can be faster than.
    Bare(usize),
}

fn subject(topic: &Topic) -> String {
    format!("{PREFIX}.{topic}")
}

/// Stores every document as the last message of its subject, in the encoding the snapshot service would send. Gives the bytes one
/// host needs of it.
pub async fn store(server: &Server, installation: &Installation) -> anyhow::Result<usize> {
    let mut writer = bus::connect(server, "baseline").await?;
    let config = json!({
        "name": STREAM, "subjects": [format!("{PREFIX}.>")], "storage": "memory", "num_replicas": 1,
        "max_msgs_per_subject": 1, "allow_direct": true,
    });
    bus::create_stream(&mut writer, &config).await?;
    let mut bytes = HashMap::new();
    for (topic, edit) in &installation.documents {
        let mut document = Document::absent();
        document.apply(edit)?;
        let mut chunks = ChunkWriter::new(1, Cut { term: 1, lead: 1 }, CHUNK_BYTES_MAX);
        chunks.push_document(TopicRef::Named(topic.clone()), true, 1, &document);
        let payload = chunks.finish().concat();
        writer.request(&subject(topic), &[], &payload).await?;
        bytes.insert(topic, payload.len());
    }
    Ok(installation.topics_of(0)?.iter().filter_map(|topic| bytes.get(topic)).sum())
}

/// From the moment connected hosts ask until the last of them has every document.
pub async fn all(way: Way, server: &Server, installation: &Installation, bytes_per_host: usize) -> anyhow::Result<Duration> {
    let finish = Arc::new(Finish::default());
    let mut fleet = Vec::with_capacity(installation.hosts);
    for (number, connection) in fleet::connect(bus::address(server), installation.hosts).await?.into_iter().enumerate() {
        let kept = (number % CHECKED_EVERY == 0).then(Vec::new);
        let kept = kept.filter(|_| !matches!(way, Way::Bare(_)));
        fleet.push(lean::spawn(connection, Fetcher::new(way, number, installation, bytes_per_host, kept, Arc::clone(&finish))?));
    }
    // Everybody listens for answers before anybody asks.
    finish.expect(installation.hosts);
    fleet.iter().for_each(|member| member.commands.send(Command::Listen));
    finish.wait().await?;

    let mut publisher = bus::connect(server, "bare").await?;
    let hosts: Vec<String> = (0..installation.hosts).map(answers_of).collect::<anyhow::Result<_>>()?;
    finish.expect(installation.hosts);
    let (begun, cpu_before) = (Instant::now(), fleet::cpu(server));
    if let Way::Bare(chunk) = way {
        let bytes = vec![0x5a; chunk];
        for answers in &hosts {
            let mut left = bytes_per_host;
            while left > 0 {
                let next = left.min(chunk);
                publisher.outbound().publish(answers, None, &bytes[..next]);
                left -= next;
            }
            publisher.send().await?;
        }
    } else {
        fleet.iter().for_each(|member| member.commands.send(Command::Ask));
    }
    let took = finish.wait().await?.duration_since(begun);
    let cpu = fleet::cpu(server).saturating_sub(cpu_before);

    let mut received = 0;
    for (number, running) in fleet.into_iter().enumerate() {
        drop(running.commands);
        let (fetcher, end) = running.task.await?;
        end.context("a host's connection ended early")?;
        received += fetcher.received;
        if let Some(kept) = fetcher.kept {
            check(way, number, installation, &kept)?;
        }
    }
    say(format_args!("{way:?}: {took:?}, {cpu:?} of processor time, {received} bytes"));
    Ok(took)
}

/// What arrived must be every topic of the host.
pub fn check(way: Way, number: usize, installation: &Installation, payloads: &[Vec<u8>]) -> anyhow::Result<()> {
    let topics = installation.topics_of(number)?;
    let mut missing: BTreeSet<Topic> = topics.iter().cloned().collect();
    for payload in payloads {
        for entry in Chunk::decode(payload)?.entries {
            let topic = match entry.topic {
                TopicRef::Named(topic) => topic,
                TopicRef::Asked(place) => {
                    topics.get(place as usize).context("an entry refers to nothing that was asked")?.clone()
                }
            };
            ensure!(matches!(entry.body, Body::Part { .. }), "{way:?}: {topic} came without its content");
            missing.remove(&topic);
        }
    }
    ensure!(missing.is_empty(), "{way:?}: host {number} lacks {} topics, the first is {:?}", missing.len(), missing.first());
    Ok(())
}

fn answers_of(number: usize) -> anyhow::Result<String> {
    Ok(subjects::answers(&fixture::host_id(number)?))
}

pub enum Command {
    Listen,
    Ask,
}

pub struct Fetcher {
    pub way: Way,
    pub answers: String,
    pub subject: String,
    pub payload: Vec<u8>,
    received: usize,
    needed: usize,
    pub kept: Option<Vec<Vec<u8>>>,
    finish: Arc<Finish>,
}

impl Fetcher {
    pub fn new(
        way: Way,
        number: usize,
        installation: &Installation,
        needed: usize,
        kept: Option<Vec<Vec<u8>>>,
        finish: Arc<Finish>,
    ) -> anyhow::Result<Self> {
        let host = fixture::host_id(number)?;
        let topics = installation.topics_of(number)?;
        let (answers, subject, payload) = match way {
            Way::SnapshotService => {
                let held = topics.iter().map(|topic| (topic.hash64(), 0)).collect();
                (subjects::answers(&host), subjects::snap(&host), Ask { ask: 1, held, ..Ask::default() }.encode())
            }
            Way::Bare(_) => (subjects::answers(&host), subjects::snap(&host), Vec::new()),
            Way::DirectGet => {
                let wanted: Vec<String> = topics.iter().map(subject).collect();
                let request = json!({ "multi_last": wanted, "batch": wanted.len() }).to_string();
                (format!("{}.get", subjects::inbox_prefix(&host)), format!("$JS.API.DIRECT.GET.{STREAM}"), request.into_bytes())
            }
        };
        Ok(Self { way, answers, subject, payload, received: 0, needed, kept, finish })
    }

    /// Takes what has arrived; tells whether it was the last.
    pub fn take(&mut self, payload: &[u8], status: Option<u16>) -> bool {
        self.received += payload.len();
        if let Some(kept) = self.kept.as_mut().filter(|_| !payload.is_empty()) {
            kept.push(payload.to_vec());
        }
        match self.way {
            Way::SnapshotService => payload[..payload.len().min(LAST_WITHIN)].windows(LAST.len()).any(|found| found == LAST),
            Way::DirectGet => status == Some(END_OF_BATCH),
            Way::Bare(_) => self.received == self.needed,
        }
    }
}

impl Handler for Fetcher {
    type Command = Command;

    fn on_frame(&mut self, frame: Frame<'_>, _wire: &mut Wire<'_>) {
        match frame {
            Frame::Pong => self.finish.arrive(),
            Frame::Message(message) => {
                if self.take(message.payload, message.headers.status()) {
                    self.finish.arrive();
                }
            }
            Frame::Info(_) | Frame::Ping | Frame::Ok | Frame::Error(_) => {}
        }
    }

    fn on_command(&mut self, command: Command, wire: &mut Wire<'_>) {
        match (command, self.way) {
            (Command::Listen, _) => {
                wire.outbound.subscribe(&self.answers, 1);
                wire.outbound.ping();
            }
            (Command::Ask, Way::SnapshotService) => {
                let token = [(subjects::ANSWER_TOKEN, "s")];
                wire.outbound.publish_with_headers(&self.subject, None, &token, &self.payload);
            }
            (Command::Ask, Way::Bare(_)) => {}
            (Command::Ask, Way::DirectGet) => wire.outbound.publish(&self.subject, Some(&self.answers), &self.payload),
        }
    }
}
