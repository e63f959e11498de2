//! `bench fanout`: one change of a group that every host uses, against a plain NATS message of the same bytes to the same
//! subscriptions. Rounds of both kinds alternate, so that they see the same machine. A third kind tells where the difference comes
//! from: the same bytes stored in a plain stream that republishes them, received by hosts that do nothing with them.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use groupcast_bus_config::subjects;
use groupcast_policy::doc::Edit;
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;
use groupcast_topics::reader::{Commit, Incident, Reader, Settings};
use hdrhistogram::Histogram;
use serde_json::json;

use super::controller::Controller;
use super::fleet::{self, Finish, Incidents};
use super::{Report, bus, fixture, say};
use crate::host::{Command, Host, Observer};
use crate::lean::{self, MessageFrame};

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// How many hosts follow the group, each on a connection of its own.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    hosts: u32,
    /// Rounds of each kind.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
}

/// Members of the group before the first round.
const MEMBERS: u32 = 1_000;

/// Between rounds, besides the time over which acknowledgements are spread: none may fall into the next round.
const SETTLE: Duration = Duration::from_millis(150);

/// A stream that does nothing but republish.
const PLAIN_STREAM: &str = "PLAIN";
const PLAIN_WRITE: &str = "plain.w.group";
const PLAIN_READ: &str = "plain.t.group";

const SYNCING: u8 = 0;
const RAW: u8 = 1;
const OURS: u8 = 2;

#[derive(Default)]
struct Shared {
    phase: AtomicU8,
    finish: Finish,
    incidents: Incidents,
    /// Headers and payload of one real delta: what the plain messages consist of.
    sample: OnceLock<(Vec<u8>, Vec<u8>)>,
}

struct Watch(Arc<Shared>);

impl Observer for Watch {
    fn on_delivery(&mut self, message: &MessageFrame<'_>) -> bool {
        if self.0.phase.load(Ordering::Relaxed) == RAW {
            self.0.finish.arrive();
            return false;
        }
        self.0.sample.get_or_init(|| (message.headers.raw().to_vec(), message.payload.to_vec()));
        true
    }

    fn on_commit(&mut self, _commit: &Commit, _reader: &Reader) {
        self.0.finish.arrive();
    }

    fn on_incident(&mut self, incident: Incident) {
        self.0.incidents.add(&incident);
    }
}

pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let hosts = options.hosts as usize;
    let server = bus::start_server().await?;
    let mut controller = Controller::start(&server).await?;
    let group = fixture::group_id(0)?;
    let topic = Topic::Members(group.clone());
    let mut edits = vec![
        fixture::global_scope(),
        fixture::rules(&group, vec![fixture::rule(&format!("ingress tcp 443 from group:{group}"))?]),
        fixture::members(&group, (0..MEMBERS).map(member)),
    ];
    for number in 0..hosts {
        edits.push(fixture::host(number, [group.clone()])?);
    }
    controller.prepare(edits).await?;

    let shared = Arc::new(Shared::default());
    shared.finish.expect(hosts);
    let mut fleet = Vec::with_capacity(hosts);
    for (number, connection) in fleet::connect(bus::address(&server), hosts).await?.into_iter().enumerate() {
        let host = Host::new(fixture::host_id(number)?, Settings::default(), number as u64, Watch(Arc::clone(&shared)));
        fleet.push(lean::spawn(connection, host));
    }
    say("joining");
    for member in &fleet {
        member.commands.send(Command::Start);
    }
    let synced = shared.finish.wait().await;
    shared.incidents.say();
    synced?;
    // Every host looks again whether it missed something while it subscribed, the last time after five seconds.
    let last_recheck = Settings::default().rechecks_ms.into_iter().max().unwrap_or(0);
    tokio::time::sleep(Duration::from_millis(last_recheck) + SETTLE).await;

    let mut raw_writer = bus::connect(&server, "raw").await?;
    let republishing = json!({
        "name": PLAIN_STREAM, "subjects": [PLAIN_WRITE], "storage": "memory", "num_replicas": 1, "max_msgs_per_subject": 1,
        "republish": { "src": PLAIN_WRITE, "dest": PLAIN_READ },
    });
    bus::create_stream(&mut raw_writer, &republishing).await?;
    for member in &fleet {
        member.commands.send(Command::Overhear(PLAIN_READ.to_owned()));
    }
    let settle = SETTLE + Duration::from_millis(u64::from(groupcast_topics::batch::spread_ms(hosts)));
    tokio::time::sleep(settle).await;
    let subject = subjects::read(&topic);
    let mut joined = MEMBERS;
    let (mut raw, mut ours, mut plain) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    // The first round of each kind warms up and brings the sample.
    for round in 0..=options.rounds {
        say(format_args!("round {round} of {}", options.rounds));
        let edit = Edit::Members { add: vec![Prefix::host(member(joined))], remove: Vec::new() };
        joined += 1;
        shared.phase.store(OURS, Ordering::SeqCst);
        shared.finish.expect(hosts);
        let begun = Instant::now();
        controller.publish(vec![(topic.clone(), edit)]).await?;
        let ours_took = shared.finish.wait().await?.duration_since(begun);
        tokio::time::sleep(settle).await;

        let (headers, payload) = shared.sample.get().context("a delta was delivered")?;
        shared.phase.store(RAW, Ordering::SeqCst);
        shared.finish.expect(hosts);
        let begun = Instant::now();
        raw_writer.outbound().publish_with_header_block(&subject, None, headers, payload);
        raw_writer.flush().await?;
        let raw_took = shared.finish.wait().await?.duration_since(begun);
        tokio::time::sleep(SETTLE).await;

        shared.finish.expect(hosts);
        let begun = Instant::now();
        raw_writer.outbound().publish(PLAIN_WRITE, None, payload);
        raw_writer.flush().await?;
        let plain_took = shared.finish.wait().await?.duration_since(begun);
        tokio::time::sleep(SETTLE).await;
        if round > 0 {
            plain.record(plain_took.as_micros() as u64)?;
            ours.record(ours_took.as_micros() as u64)?;
            raw.record(raw_took.as_micros() as u64)?;
        }
    }
    shared.phase.store(SYNCING, Ordering::SeqCst);
    shared.incidents.say();
    check_equal(fleet, &topic, joined as usize).await?;

    let ms = |micros: u64| micros as f64 / 1000.0;
    let ratio = ours.value_at_quantile(0.5) as f64 / raw.value_at_quantile(0.5).max(1) as f64;
    Ok(Report::new("fanout")
        .with("hosts", hosts)
        .with("rounds", u64::from(options.rounds))
        .with("raw_last_ms_p50", ms(raw.value_at_quantile(0.5)))
        .with("raw_last_ms_p99", ms(raw.value_at_quantile(0.99)))
        .with("republished_last_ms_p50", ms(plain.value_at_quantile(0.5)))
        .with("ours_last_ms_p50", ms(ours.value_at_quantile(0.5)))
        .with("ours_last_ms_p99", ms(ours.value_at_quantile(0.99)))
        .with_goal("ratio", ratio, 1.3))
}

fn member(number: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0a64_0000 + number))
}

/// What was measured counts only if every host really holds the group as published.
async fn check_equal(fleet: Vec<lean::Running<Host<Watch>>>, topic: &Topic, members: usize) -> anyhow::Result<()> {
    for running in fleet {
        drop(running.commands);
        let (host, end) = running.task.await?;
        end.context("a host's connection ended early")?;
        let held = host.reader().document(topic).and_then(|document| document.members()).map_or(0, |members| members.len());
        ensure!(held == members, "a host holds {held} members of {members}");
    }
    Ok(())
}
