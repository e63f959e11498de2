//! `bench wire`: how many bytes a member's join and a whole group take.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, bail, ensure};
use groupcast_bus_config::streams::TOPICS;
use groupcast_bus_config::subjects;
use groupcast_messages::{CHUNK_BYTES_MAX, ChunkWriter, Companions, Cut, Delta, Lead, TopicRef};
use groupcast_policy::doc::{Content, Document, Edit, Members};
use groupcast_policy::ids::GroupId;
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;

use super::{Report, bus, say};
use crate::lean::Client;
use crate::random::Random;

/// The magnitudes of an installation that has run for a while: numbers of this many digits are what travels.
const TOPICS_SEQUENCE: u64 = 1_000_000;
const CHANGE: u64 = 10_000_000;
const TERM: u64 = 12;
/// A subscription number of a host that follows some hundred topics.
const SID: u64 = 200;
/// As long as the UUIDs that platforms give to their groups.
const GROUP: &str = "7a0b6b0e-3f0c-4a53-9d0e-6f2c51b7a9d4";
const GROUP_MEMBERS: usize = 1_000;
const SNAPSHOT_MEMBERS: usize = 10_000;

pub async fn run() -> anyhow::Result<Report> {
    let topic = Topic::Members(GroupId::new(GROUP)?);
    let mut group = Document::new(Content::Members(members(GROUP_MEMBERS, dense_v4)));
    let joins = Edit::Members { add: vec![Prefix::host(IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3)))], remove: Vec::new() };
    let before = delta(&group, &Edit::empty(&topic))?;
    let join = delta(&group, &joins)?;
    group.apply(&joins)?;

    say("one member joins a group on a real server");
    let join_wire_bytes = wire_bytes(&topic, &before, &join).await?;
    say("snapshots");
    Ok(Report::new("wire")
        .with_goal("join_payload_bytes", join.encode().len(), 48.0)
        .with_goal("join_wire_bytes", join_wire_bytes, 420.0)
        .with_goal("snapshot_dense_10k_bytes", snapshot_bytes(&topic, dense_v4), 20_000.0)
        .with_goal("snapshot_scattered_10k_bytes", snapshot_bytes(&topic, scattered_v4), 50_000.0)
        .with_goal("snapshot_dense_v6_10k_bytes", snapshot_bytes(&topic, dense_v6), 40_000.0))
}

fn delta(document: &Document, edit: &Edit) -> anyhow::Result<Delta> {
    let digest = document.outcome(edit)?.digest;
    Ok(Delta {
        term: TERM,
        change: CHANGE,
        position: 1,
        edit: edit.clone(),
        digest,
        companions: Companions::NONE,
        tally: None,
        spread_ms: 0,
    })
}

/// Publishes both deltas through a TOPICS stream and counts what a host's socket receives for the second.
async fn wire_bytes(topic: &Topic, before: &Delta, join: &Delta) -> anyhow::Result<u64> {
    let server = bus::start_server().await?;
    let mut writer = bus::connect(&server, "writer").await?;
    let mut config = TOPICS.config(1);
    config["first_seq"] = TOPICS_SEQUENCE.into();
    bus::create_stream(&mut writer, &config).await?;

    let mut host = bus::connect(&server, "host").await?;
    let subject = subjects::read(topic);
    host.outbound().subscribe(&subject, SID);
    host.flush().await?;

    let lead = publish(&mut writer, topic, before, 0).await?;
    host.next().await?;
    host.flush().await?;
    let received = host.received_bytes();
    publish(&mut writer, topic, join, lead).await?;
    let message = host.next().await?;
    let bytes = host.received_bytes() - received;

    let sequence = message.headers().get("Nats-Sequence").context("a republished message names its sequence")?;
    ensure!(message.subject == subject && message.payload == join.encode(), "the host received something else than the join");
    say(format_args!("sequence {sequence}, header block {} bytes", message.headers().raw().len()));
    Ok(bytes)
}

/// One batch: the lead message, which must follow `expected`, and the delta. Gives the lead's sequence.
async fn publish(writer: &mut Client, topic: &Topic, delta: &Delta, expected: u64) -> anyhow::Result<u64> {
    let batch = expected + 1;
    let lead = Lead {
        term: TERM,
        since: TERM,
        batch,
        count: 1,
        catalog: CHANGE,
        registry: CHANGE,
        resigning: false,
        incomplete: false,
        leader: "bench".to_owned(),
    };
    // As many characters as the controllers' batch ids have.
    let id = format!("{batch:07x}");
    let expected = expected.to_string();
    let fence =
        [("Nats-Batch-Id", id.as_str()), ("Nats-Batch-Sequence", "1"), ("Nats-Expected-Last-Subject-Sequence", &expected)];
    writer.outbound().publish_with_headers(subjects::LEAD_WRITE, None, &fence, &lead.encode());
    let commit = [("Nats-Batch-Id", id.as_str()), ("Nats-Batch-Sequence", "2"), ("Nats-Batch-Commit", "1")];
    let answer = writer.request(&subjects::write(topic), &commit, &delta.encode()).await?;
    let answer: serde_json::Value = serde_json::from_slice(&answer.payload)?;
    match answer["seq"].as_u64() {
        Some(last) => Ok(last - 1),
        None => bail!("the batch was refused: {answer}"),
    }
}

/// What the snapshot service sends for one members topic, all chunks together.
fn snapshot_bytes(topic: &Topic, address: fn(&mut Random) -> IpAddr) -> usize {
    let document = Document::new(Content::Members(members(SNAPSHOT_MEMBERS, address)));
    let mut chunks = ChunkWriter::new(1, Cut { term: TERM, lead: TOPICS_SEQUENCE }, CHUNK_BYTES_MAX);
    chunks.push_document(TopicRef::Named(topic.clone()), true, TOPICS_SEQUENCE, &document);
    chunks.finish().iter().map(Vec::len).sum()
}

/// Exactly `count` different members.
fn members(count: usize, address: fn(&mut Random) -> IpAddr) -> Members {
    let mut random = Random::new(count as u64);
    let mut members = Members::default();
    while members.len() < count {
        match address(&mut random) {
            IpAddr::V4(address) => members.v4.insert(address.to_bits()),
            IpAddr::V6(address) => members.v6.insert(address.to_bits()),
        };
    }
    members
}

/// Addresses out of a pool of 2^16, as a platform hands them out.
fn dense_v4(random: &mut Random) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0a64_0000 | (random.next() as u32 & 0xffff)))
}

/// Anywhere in the world.
fn scattered_v4(random: &mut Random) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(random.next() as u32))
}

fn dense_v6(random: &mut Random) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from_bits(0xfd00_0001_0002_0003_0000_0000_0000_0000 | u128::from(random.next() & 0xffff)))
}
