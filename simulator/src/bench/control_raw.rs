//! The least that the bus itself needs for the messages of `bench control`: a document swapped in a file, read by a consumer, and one
//! atomic batch in memory that is republished.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::message::PublishMessage;
use async_nats::{Client, HeaderMap};
use bytes::Bytes;
use futures::StreamExt;
use groupcast_bus_config::streams;
use groupcast_control::document::Document;
use hdrhistogram::Histogram;

use super::control::{GROUPS, WRITERS, group};

/// The bus alone: a document stored in a file, read by a consumer, its topic stored in memory and republished.
pub async fn chain(client: &async_nats::Client, rounds: u32) -> anyhow::Result<Histogram<u64>> {
    let context = async_nats::jetstream::new(client.clone());
    let file = async_nats::jetstream::stream::Config {
        name: "RAWFILE".to_owned(),
        subjects: vec!["raw.c.>".to_owned()],
        max_messages_per_subject: streams::CATALOG_HISTORY,
        ..Default::default()
    };
    let memory = async_nats::jetstream::stream::Config {
        name: "RAWMEMORY".to_owned(),
        subjects: vec!["raw.w.>".to_owned()],
        storage: async_nats::jetstream::stream::StorageType::Memory,
        max_messages_per_subject: 1,
        allow_atomic_publish: true,
        republish: Some(async_nats::jetstream::stream::Republish {
            source: "raw.w.>".to_owned(),
            destination: "raw.t.>".to_owned(),
            headers_only: false,
        }),
        ..Default::default()
    };
    let stream = context.create_stream(file).await?;
    context.create_stream(memory).await?;
    let config = pull::OrderedConfig { deliver_policy: DeliverPolicy::All, ..Default::default() };
    let mut documents = stream.create_consumer(config).await?.messages().await?;
    let publisher = client.clone();
    let relay = tokio::spawn(async move {
        let mut number = 0u64;
        while let Some(Ok(document)) = documents.next().await {
            number += 1;
            if batch(&publisher, number, document.payload.clone()).await.is_err() {
                return;
            }
        }
    });
    let mut topics = client.subscribe("raw.t.topic").await?;
    client.flush().await?;
    let payload = Document::Group(Arc::new(group(0, 1)?)).encode();
    let mut took = Histogram::new(3)?;
    let mut last = vec![0; GROUPS];
    for round in 0..rounds + 20 {
        let group = round as usize % GROUPS;
        last[group] = swap(&context, group, last[group], payload.clone().into()).await?;
        let committed = Instant::now();
        topics.next().await.context("the topic is republished")?;
        if round >= 20 {
            took.record(committed.elapsed().as_micros() as u64)?;
        }
    }
    relay.abort();
    Ok(took)
}

/// A document, if its last version is this one.
async fn swap(context: &Context, group: usize, last: u64, payload: Bytes) -> anyhow::Result<u64> {
    let message = PublishMessage::build().payload(payload).expected_last_subject_sequence(last);
    Ok(context.send_publish(format!("raw.c.{group}"), message).await?.await?.sequence)
}

/// What leads and one topic, as one atomic batch.
async fn batch(client: &Client, number: u64, payload: Bytes) -> anyhow::Result<()> {
    let headers = |sequence: &str| {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Batch-Id", number.to_string().as_str());
        headers.insert("Nats-Batch-Sequence", sequence);
        headers
    };
    client.publish_with_headers("raw.w.leader", headers("1"), payload.clone()).await?;
    let mut commit = headers("2");
    commit.insert("Nats-Batch-Commit", "1");
    client.request_with_headers("raw.w.topic", commit, payload).await?;
    Ok(())
}

/// How many documents a second the bus stores, with as many under way as in the burst.
pub async fn writes(client: &async_nats::Client, count: u32) -> anyhow::Result<f64> {
    let context = async_nats::jetstream::new(client.clone());
    let payload = Bytes::from(Document::Group(Arc::new(group(0, 1)?)).encode());
    let begun = Instant::now();
    // As in the burst: every writer has its own document, and swaps its versions one after the other.
    let writer = |group: usize| {
        let (context, payload) = (context.clone(), payload.clone());
        async move {
            let stream = context.get_stream("RAWFILE").await?;
            let found = stream.get_last_raw_message_by_subject(&format!("raw.c.{group}")).await;
            let mut last = found.map_or(0, |message| message.sequence);
            for _ in 0..count as usize / WRITERS {
                last = swap(&context, group, last, payload.clone()).await?;
            }
            anyhow::Ok(())
        }
    };
    futures::future::try_join_all((0..WRITERS.min(GROUPS)).map(writer)).await?;
    Ok(f64::from(count) / begun.elapsed().as_secs_f64())
}
