//! The least that the bus takes: a request and its answer; a message that a stream on disk has acknowledged; and a chain of what every
//! change must go through, one message into a stream on disk, one batch into a stream in memory that is republished, to a subscriber.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use async_nats::jetstream::{self, stream};
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect;
use groupcast_policy::ids::HostId;
use hdrhistogram::Histogram;

use super::bus;

const PAYLOAD_BYTES: usize = 200;
const DEADLINE: Duration = Duration::from_secs(10);

pub struct Raw {
    pub request: Histogram<u64>,
    pub publish_ack: Histogram<u64>,
    pub chain: Histogram<u64>,
}

pub async fn measure(count: u32) -> anyhow::Result<Raw> {
    let server = bus::start_server().await?;
    let named = |name: &str| anyhow::Ok(connect::Options::new(&[server.url()], Role::Controller, &HostId::new(name)?));
    let (client, _events) = connect::connect(named("asks")?).await?;
    let (other, _other_events) = connect::connect(named("answers")?).await?;
    let mut raw = Raw { request: Histogram::new(3)?, publish_ack: Histogram::new(3)?, chain: Histogram::new(3)? };
    let payload = bytes::Bytes::from(vec![7; PAYLOAD_BYTES]);

    let mut requests = other.subscribe("raw.ask").await?;
    other.flush().await?;
    let answering = tokio::spawn(async move {
        while let Some(message) = requests.next().await {
            if let Some(reply) = message.reply {
                let _ = other.publish(reply, message.payload).await;
            }
        }
    });
    for _ in 0..count {
        let start = Instant::now();
        client.request("raw.ask", payload.clone()).await?;
        raw.request.record(start.elapsed().as_micros() as u64)?;
    }
    answering.abort();

    let context = jetstream::new(client.clone());
    let on_disk = stream::Config { name: "RAWDISK".into(), subjects: vec!["raw.disk".into()], ..Default::default() };
    context.create_stream(on_disk).await?;
    let republish = stream::Republish { source: "raw.memory".into(), destination: "raw.seen".into(), headers_only: false };
    let in_memory = stream::Config {
        name: "RAWMEMORY".into(),
        subjects: vec!["raw.memory".into()],
        storage: stream::StorageType::Memory,
        republish: Some(republish),
        ..Default::default()
    };
    context.create_stream(in_memory).await?;
    for _ in 0..count {
        let start = Instant::now();
        context.publish("raw.disk", payload.clone()).await?.await?;
        raw.publish_ack.record(start.elapsed().as_micros() as u64)?;
    }

    // A follower of the first stream writes what it sees into the second, as the controller does.
    let mut followed = client.subscribe("raw.disk").await?;
    let (between, _between_events) = connect::connect(named("between")?).await?;
    let onward = jetstream::new(between);
    let mut seen = client.subscribe("raw.seen").await?;
    client.flush().await?;
    for _ in 0..count {
        let start = Instant::now();
        let written = context.publish("raw.disk", payload.clone()).await?;
        let message = tokio::time::timeout(DEADLINE, followed.next()).await?.context("the bus ended")?;
        written.await?;
        onward.publish("raw.memory", message.payload).await?.await?;
        let last = tokio::time::timeout(DEADLINE, seen.next()).await?.context("the bus ended")?;
        ensure!(last.payload.len() == PAYLOAD_BYTES, "another message than ours");
        raw.chain.record(start.elapsed().as_micros() as u64)?;
    }
    Ok(raw)
}
