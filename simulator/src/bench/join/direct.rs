//! The baseline: every document as the last message of its subject, fetched by one batched direct get per host.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use groupcast_bus_config::server::Server;
use groupcast_messages::{CHUNK_BYTES_MAX, ChunkWriter, Cut, TopicRef};
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

pub struct Baseline {
    /// Of each stored document.
    bytes: HashMap<Topic, usize>,
    bytes_per_host: usize,
}

fn subject(topic: &Topic) -> String {
    format!("{PREFIX}.{topic}")
}

impl Baseline {
    /// Stores every document in the encoding the snapshot service would send.
    pub async fn store(server: &Server, installation: &Installation) -> anyhow::Result<Self> {
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
            bytes.insert(topic.clone(), payload.len());
        }
        let bytes_per_host = installation.topics_of(0)?.iter().filter_map(|topic| bytes.get(topic)).sum();
        Ok(Self { bytes, bytes_per_host })
    }

    pub fn bytes_per_host(&self) -> usize {
        self.bytes_per_host
    }

    /// From the moment connected hosts ask until the last of them has every document.
    pub async fn get_all(&self, server: &Server, installation: &Installation) -> anyhow::Result<Duration> {
        let finish = Arc::new(Finish::default());
        finish.expect(installation.hosts);
        let mut fleet = Vec::with_capacity(installation.hosts);
        for (number, connection) in fleet::connect(bus::address(server), installation.hosts).await?.into_iter().enumerate() {
            let topics = installation.topics_of(number)?;
            let expected = topics.iter().filter_map(|topic| self.bytes.get(topic)).sum();
            let subjects: Vec<String> = topics.iter().map(subject).collect();
            let request = json!({ "multi_last": subjects, "batch": subjects.len() }).to_string();
            let getter = Getter {
                inbox: format!("_INBOX.{}", fixture::host_id(number)?),
                request,
                expected,
                received: 0,
                finish: Arc::clone(&finish),
            };
            fleet.push(lean::spawn(connection, getter));
        }
        let begun = Instant::now();
        for member in &fleet {
            member.commands.send(());
        }
        let took = finish.wait().await?.duration_since(begun);
        for running in fleet {
            drop(running.commands);
            let (getter, end) = running.task.await?;
            end.context("a host's connection ended early")?;
            ensure!(getter.received == getter.expected, "a host received {} bytes of {}", getter.received, getter.expected);
        }
        say(format_args!("direct get {took:?}"));
        Ok(took)
    }
}

/// A host that fetches its documents and does nothing with them: the baseline is given every advantage.
struct Getter {
    inbox: String,
    request: String,
    expected: usize,
    received: usize,
    finish: Arc<Finish>,
}

impl Handler for Getter {
    type Command = ();

    fn on_frame(&mut self, frame: Frame<'_>, _wire: &mut Wire<'_>) {
        if let Frame::Message(message) = frame {
            self.received += message.payload.len();
            if message.headers.status() == Some(END_OF_BATCH) {
                self.finish.arrive();
            }
        }
    }

    fn on_command(&mut self, (): (), wire: &mut Wire<'_>) {
        wire.outbound.subscribe(&self.inbox, 1);
        wire.outbound.publish(&format!("$JS.API.DIRECT.GET.{STREAM}"), Some(&self.inbox), self.request.as_bytes());
    }
}
