//! `bench control`: the whole control plane as it runs, two controllers as processes of their own. How long after a change is
//! committed it is published, how many changes a second it sustains, and how long a change waits while another controller takes over.
//! Beside it the least that the bus itself needs for the same messages, in the same run.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::server::Server;
use groupcast_bus_config::{connect, streams, subjects};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_messages::{Delta, Lead};
use groupcast_policy::doc::Edit;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Group, GroupRule, Workload};
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;
use hdrhistogram::Histogram;
use tokio::sync::mpsc;

use super::process::Process;
use super::{Report, bus, control_raw, fixture, say};

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Single changes, one after the other.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    singles: u32,
    /// Changes written as fast as the bus takes them.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    burst: u32,
    /// Take-overs and hand-overs, each.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The leader's lease in milliseconds.
    #[arg(long, default_value_t = 3_000, value_parser = clap::value_parser!(u32).range(100..=60_000))]
    lease_ms: u32,
    /// Hosts that are registered; none is connected.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hosts: u32,
    /// The groupcast binary; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_BIN")]
    groupcast: Option<PathBuf>,
}

/// The burst and the bus alone are measured in turns, so often: what else the machine does meanwhile then weighs on both.
const TURNS: u32 = 3;

pub(super) const GROUPS: usize = 100;
/// Writers of the burst, each with one change under way.
pub(super) const WRITERS: usize = 100;
/// Changes written and published for each document that the bus alone stores in the same time, with as many writers. An idle machine with
/// two cores stores 4,600 a second, so this is 4,000 changes a second there, whatever else a machine does.
const CHANGES_OF_RAW_MIN: f64 = 0.87;
const DEADLINE: Duration = Duration::from_secs(60);

impl Options {
    /// Changes of one turn: as many for each writer.
    fn per_turn(&self) -> u32 {
        let writers = WRITERS as u32;
        (self.burst / TURNS / writers).max(1) * writers
    }
}

/// What the bus republishes, with the time it arrived here.
enum Seen {
    /// A group's members now hold this number.
    Mark(usize, u32, Instant),
    Lead(Lead),
}

struct Bench<'a> {
    options: &'a Options,
    server: &'a Server,
    catalog: Catalog,
    seen: mpsc::UnboundedReceiver<Seen>,
    controllers: Vec<Process>,
    started: usize,
    leader: String,
    revisions: Vec<u64>,
    next: u32,
}

pub(super) fn group(index: usize, mark: u32) -> anyhow::Result<Group> {
    let id = fixture::group_id(index)?;
    let mut group = Group::new(id.clone());
    group.rules.push(GroupRule::from(fixture::rule(&format!("ingress tcp 443 from group:{id}"))?));
    group.members.insert(Prefix::v4(mark, 32).context("an address")?);
    Ok(group)
}

fn change(writes: Vec<Write>) -> Change {
    Change { author: "bench".to_owned(), reason: "measured".to_owned(), key: None, writes }
}

fn put(index: usize, mark: u32, expected: Expected) -> anyhow::Result<Write> {
    Ok(Write::put(Document::Group(Arc::new(group(index, mark)?)), expected))
}

/// Watches everything that is republished.
async fn observe(server: &Server) -> anyhow::Result<mpsc::UnboundedReceiver<Seen>> {
    let options = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("observer")?);
    let (client, _events) = connect::connect(options).await?;
    let mut messages = client.subscribe(subjects::READ_ALL).await?;
    client.flush().await?;
    let groups: std::collections::HashMap<Topic, usize> =
        (0..GROUPS).map(|index| Ok((Topic::Members(fixture::group_id(index)?), index))).collect::<anyhow::Result<_>>()?;
    let (sender, seen) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let _client = client;
        while let Some(message) = messages.next().await {
            let now = Instant::now();
            let event = if message.subject.as_str() == subjects::LEAD_READ {
                Lead::decode(&message.payload).ok().map(Seen::Lead)
            } else {
                subjects::parse_read(&message.subject).and_then(|topic| {
                    let index = groups.get(&topic)?;
                    let Edit::Members { add, .. } = Delta::decode(&topic, &message.payload).ok()?.edit else { return None };
                    let mark = add.iter().filter_map(|prefix| match prefix.net().addr() {
                        std::net::IpAddr::V4(address) => Some(address.to_bits()),
                        std::net::IpAddr::V6(_) => None,
                    });
                    Some(Seen::Mark(*index, mark.max()?, now))
                })
            };
            if event.is_some_and(|event| sender.send(event).is_err()) {
                return;
            }
        }
    });
    Ok(seen)
}

impl Bench<'_> {
    fn add_controller(&mut self) -> anyhow::Result<()> {
        self.started += 1;
        let (binary, name) = (self.options.groupcast.as_deref(), format!("c{}", self.started));
        let process = Process::start(binary, &self.server.url(), name, self.options.lease_ms)?;
        self.controllers.push(process);
        Ok(())
    }

    async fn next_seen(&mut self) -> anyhow::Result<Seen> {
        let seen = tokio::time::timeout(DEADLINE, self.seen.recv()).await.context("nothing is published any more")?;
        let seen = seen.context("the observer lives")?;
        if let Seen::Lead(lead) = &seen {
            self.leader.clone_from(&lead.leader);
        }
        Ok(seen)
    }

    /// When the group was published with this mark.
    async fn published(&mut self, group: usize, mark: u32) -> anyhow::Result<Instant> {
        loop {
            if let Seen::Mark(index, found, at) = self.next_seen().await?
                && index == group
                && found == mark
            {
                return Ok(at);
            }
        }
    }

    /// Writes one document; the group, its mark, and when it was committed.
    async fn write_one(&mut self) -> anyhow::Result<(usize, u32, Instant)> {
        let (index, mark) = (self.next as usize % GROUPS, 0x0b00_0000 + self.next);
        self.next += 1;
        let write = put(index, mark, Expected::Revision(self.revisions[index]))?;
        let accepted = self.catalog.write(&change(vec![write]), None).await?;
        self.revisions[index] = accepted.number;
        Ok((index, mark, Instant::now()))
    }

    /// Waits until somebody leads and publishes what is written: what was there before comes by reference, without its marks.
    async fn leads(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < DEADLINE {
            let (group, mark, _) = self.write_one().await?;
            if let Ok(published) = tokio::time::timeout(Duration::from_secs(1), self.published(group, mark)).await {
                published?;
                return Ok(());
            }
        }
        bail!("no controller publishes what is written")
    }

    async fn singles(&mut self) -> anyhow::Result<Histogram<u64>> {
        let mut took = Histogram::new(3)?;
        // The first ones warm up.
        for round in 0..self.options.singles + 20 {
            let (group, mark, committed) = self.write_one().await?;
            let published = self.published(group, mark).await?;
            if round >= 20 {
                took.record(published.saturating_duration_since(committed).as_micros() as u64)?;
            }
        }
        Ok(took)
    }

    /// Changes a second until the last is published, and until the last was written.
    async fn burst(&mut self) -> anyhow::Result<(f64, f64)> {
        let begun = Instant::now();
        let per_writer = self.options.per_turn() as usize / WRITERS;
        let mut writers = Vec::new();
        for writer in 0..WRITERS.min(GROUPS) {
            let (catalog, mut revision, first) = (self.catalog.clone(), self.revisions[writer], self.next);
            writers.push(tokio::spawn(async move {
                for number in 0..per_writer as u32 {
                    let write = put(writer, 0x0b00_0000 + first + number, Expected::Revision(revision))?;
                    revision = catalog.write(&change(vec![write]), None).await?.number;
                }
                anyhow::Ok(revision)
            }));
        }
        let last = 0x0b00_0000 + self.next + per_writer as u32 - 1;
        self.next += per_writer as u32;
        let mut open: std::collections::HashSet<usize> = (0..writers.len()).collect();
        let mut published = begun;
        while !open.is_empty() {
            if let Seen::Mark(group, mark, at) = self.next_seen().await?
                && mark == last
            {
                open.remove(&group);
                published = published.max(at);
            }
        }
        let count = (per_writer * writers.len()) as f64;
        for (index, writer) in writers.into_iter().enumerate() {
            self.revisions[index] = writer.await??;
        }
        let written = begun.elapsed().min(published - begun).as_secs_f64();
        Ok((count / (published - begun).as_secs_f64(), written))
    }

    /// How long a change waits that is written right after the leader ends in this way.
    async fn replaced(&mut self, crash: bool) -> anyhow::Result<Duration> {
        // The standby must be ready, and the leader known by its own lead message.
        for process in &self.controllers {
            process.ready().await?;
        }
        self.leads().await?;
        while let Ok(seen) = self.seen.try_recv() {
            if let Seen::Lead(lead) = seen {
                self.leader = lead.leader;
            }
        }
        let Some(at) = self.controllers.iter().position(|process| process.name == self.leader) else {
            bail!("{} leads, which is none of ours", self.leader)
        };
        let mut old = self.controllers.remove(at);
        let begun = Instant::now();
        if crash {
            old.kill()?
        } else {
            old.terminate()?
        }
        // What counts is a change that the other publishes; one that the old one still publishes is followed by the next.
        let published = loop {
            let (group, mark, _) = self.write_one().await?;
            let published = self.published(group, mark).await?;
            if self.leader != old.name {
                break published;
            }
        };
        ensure!(self.leader != old.name, "{} still leads", old.name);
        self.add_controller()?;
        Ok(published - begun)
    }
}

pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let server = bus::start_server().await?;
    let named = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("bench")?);
    let (client, _events) = connect::connect(named).await?;
    streams::ensure(&client, 1).await?;
    let seen = observe(&server).await?;
    let catalog = Catalog::new(client.clone());
    let writes = (0..GROUPS).map(|index| put(index, 0x0a00_0000, Expected::Absent)).collect::<anyhow::Result<Vec<_>>>()?;
    let revisions = catalog.write(&change(writes), None).await?.revisions;
    let registry = Registry::new(client.clone());
    for number in 0..options.hosts {
        let host = fixture::host_id(number as usize)?;
        let mut workload = Workload::new(format!("w{number}").parse()?, host.clone(), "net".parse()?);
        workload.groups.insert(fixture::group_id(number as usize % GROUPS)?);
        registry.register(&host, &[workload], Elsewhere::Refuse).await?;
    }
    let (controllers, leader) = (Vec::new(), String::new());
    let mut bench = Bench { options, server: &server, catalog, seen, controllers, started: 0, leader, revisions, next: 0 };
    bench.add_controller()?;
    bench.add_controller()?;
    bench.leads().await?;
    say("single changes");
    let took = bench.singles().await?;
    say("the same messages without us");
    let raw = control_raw::chain(&client, options.singles).await?;
    say("changes as fast as the bus takes them");
    let (mut ours_s, mut written_s, mut raw_s) = (0.0, 0.0, 0.0);
    let per_turn = f64::from(options.per_turn());
    for _ in 0..TURNS {
        let (per_s, written) = bench.burst().await?;
        ours_s += per_turn / per_s;
        written_s += written;
        raw_s += per_turn / control_raw::writes(&client, options.per_turn()).await?;
    }
    let all = f64::from(TURNS) * per_turn;
    let (changes_per_s, raw_per_s) = (all / ours_s, all / raw_s);
    let (mut takeovers, mut handovers) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        say(format_args!("taking over and handing over, round {round} of {}", options.rounds));
        takeovers.push(bench.replaced(true).await?.as_secs_f64() * 1e3);
        handovers.push(bench.replaced(false).await?.as_secs_f64() * 1e3);
    }
    // The worst of the rounds.
    let worst = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    let ms = |micros: u64| micros as f64 / 1e3;
    Ok(Report::new("control")
        .with("singles", u64::from(options.singles))
        .with("burst", u64::from(options.burst))
        .with("lease_ms", u64::from(options.lease_ms))
        .with_goal("commit_to_publish_ms_p50", ms(took.value_at_quantile(0.5)), 1.0)
        .with("commit_to_publish_ms_p99", ms(took.value_at_quantile(0.99)))
        .with("raw_commit_to_publish_ms_p50", ms(raw.value_at_quantile(0.5)))
        .with("raw_commit_to_publish_ms_p99", ms(raw.value_at_quantile(0.99)))
        .with_floor("changes_per_s", changes_per_s, 4_000.0)
        .with("burst_written_s", written_s)
        .with("raw_writes_per_s", raw_per_s)
        .with_floor("changes_of_raw_writes", changes_per_s / raw_per_s, CHANGES_OF_RAW_MIN)
        .with_goal("takeover_ms", worst(&takeovers), 2.0 * f64::from(options.lease_ms))
        .with_goal("handover_ms", worst(&handovers), 300.0))
}
