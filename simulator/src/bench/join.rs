//! `bench join`: many hosts come up at once and each needs its topics: through the snapshot service (`ours_ms`), against the same
//! documents by batched direct get from a stream (`direct_get_ms`). Both are from asking until the last host has received the last
//! byte, by hosts that know their topics and decode afterwards. `synced_ms` is the whole way by the real reader: finding out which
//! topics there are, subscribing to them, asking twice, verifying and applying everything, with the readers of all hosts on the
//! processors of this one machine. `bare_ms` is what the bus takes to carry these bytes when a program sends them without being
//! asked, in the best of several chunk sizes: no service on it can be faster, so `floor` (`bare_ms / direct_get_ms`) is the best
//! ratio there can be on this machine. These clients count bytes and do nothing else; `agents_ms` and `agents_direct_get_ms` are the
//! same two ways with the client library that agents use, which has to handle each message.

mod agents;
mod fetch;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use groupcast_bus_config::server::Server;
use groupcast_messages::{CHUNK_BYTES_MAX, Cut};
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::GroupId;
use groupcast_policy::topic::{Scope, Topic};
use groupcast_topics::node::ANSWER_CHUNK_BYTES;
use groupcast_topics::reader::{Commit, Incident, Reader, Settings};

use super::controller::Controller;
use super::fleet::{self, Finish, Incidents};
use super::{Report, bus, fixture, say};
use crate::host::{Command, Host, Observer};
use crate::lean;
use crate::random::Random;
use fetch::Way;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// How many hosts join at once, each on a connection of its own.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    hosts: u32,
    /// Topics each host needs: its own, the global scope, and rules and members of groups.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(4..=1_000))]
    topics: u32,
    /// Groups in the installation, each with rules and members; neighbouring hosts use the same ones.
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(500..=50_000))]
    groups: u32,
    /// Rounds of each kind; the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
}

/// Addresses that make a members topic, and rules that make a rules topic, of about 600 bytes.
const MEMBERS_PER_GROUP: usize = 32;
const RULES_PER_GROUP: usize = 9;
const PREFIXES_PER_RULE: usize = 7;

/// Chunk sizes tried for the bare bus; the first is the service's own.
const BARE_CHUNK_BYTES: [usize; 4] = [ANSWER_CHUNK_BYTES, CHUNK_BYTES_MAX, 30_000, 8_000];

/// Between rounds, for the server to let go of the connections of the last one.
const SETTLE: Duration = Duration::from_millis(500);

/// Everything that is published, and who needs what of it.
struct Installation {
    documents: Vec<(Topic, Edit)>,
    groups: Vec<GroupId>,
    used: usize,
    hosts: usize,
}

impl Installation {
    fn new(options: &Options) -> anyhow::Result<Self> {
        let used = (options.topics as usize - 2) / 2;
        let mut random = Random::new(1);
        let groups: Vec<GroupId> = (0..options.groups as usize).map(fixture::group_id).collect::<anyhow::Result<_>>()?;
        let mut documents = vec![fixture::global_scope()];
        for group in &groups {
            let mut rules = vec![fixture::rule(&format!("ingress tcp 443 from group:{group}"))?];
            while rules.len() < RULES_PER_GROUP {
                let port = 1024 + random.next() % 50_000;
                let prefixes: Vec<String> = (0..PREFIXES_PER_RULE).map(|_| format!("{}/24", prefix_v4(&mut random))).collect();
                rules.push(fixture::rule(&format!("egress tcp 443,{port} to {}", prefixes.join(",")))?);
            }
            documents.push(fixture::rules(group, rules));
            // Dual-stack workloads: one IPv4 and one IPv6 address each.
            let members = (0..MEMBERS_PER_GROUP).flat_map(|_| [address_v4(&mut random), address_v6(&mut random)]);
            let distinct: BTreeSet<IpAddr> = members.collect();
            documents.push(fixture::members(group, distinct));
        }
        let mut installation = Self { documents, groups, used, hosts: options.hosts as usize };
        for number in 0..installation.hosts {
            let host = fixture::host(number, installation.groups_of(number))?;
            installation.documents.push(host);
        }
        Ok(installation)
    }

    fn groups_of(&self, host: usize) -> impl Iterator<Item = GroupId> + '_ {
        // Neighbours share most of their groups, distant hosts none.
        (0..self.used).map(move |at| self.groups[(host * 3 + at) % self.groups.len()].clone())
    }

    fn topics_of(&self, host: usize) -> anyhow::Result<Vec<Topic>> {
        let mut topics = vec![Topic::Host(fixture::host_id(host)?), Topic::Scope(Scope::Global)];
        topics.extend(self.groups_of(host).flat_map(|group| [Topic::Rules(group.clone()), Topic::Members(group)]));
        Ok(topics)
    }

    fn topics_per_host(&self) -> usize {
        2 + 2 * self.used
    }
}

pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let installation = Arc::new(Installation::new(options)?);
    let server = bus::start_server().await?;
    let mut controller = Controller::start(&server).await?;
    say(format_args!("publishing {} topics", installation.documents.len()));
    controller.prepare(installation.documents.clone()).await?;
    let bytes_per_host = fetch::store(&server, &installation).await?;

    let (mut ours, mut direct, mut synced) = (Vec::new(), Vec::new(), Vec::new());
    let (mut agents_ours, mut agents_direct) = (Vec::new(), Vec::new());
    let mut bare = [const { Vec::new() }; BARE_CHUNK_BYTES.len()];
    for round in 1..=options.rounds {
        say(format_args!("round {round} of {}", options.rounds));
        let lean = [(Way::SnapshotService, &mut ours), (Way::DirectGet, &mut direct)].into_iter();
        for (way, times) in lean.chain(BARE_CHUNK_BYTES.into_iter().map(Way::Bare).zip(&mut bare)) {
            times.push(fetch::all(way, &server, &installation, bytes_per_host).await?);
            tokio::time::sleep(SETTLE).await;
        }
        for (way, times) in [(Way::SnapshotService, &mut agents_ours), (Way::DirectGet, &mut agents_direct)] {
            times.push(agents::all(way, &server, &installation, bytes_per_host).await?);
            tokio::time::sleep(SETTLE).await;
        }
        synced.push(sync(&server, &installation).await?);
        tokio::time::sleep(SETTLE).await;
    }
    let (ours_ms, direct_get_ms) = (median_ms(&mut ours), median_ms(&mut direct));
    let (agents_ms, agents_direct_get_ms) = (median_ms(&mut agents_ours), median_ms(&mut agents_direct));
    let bare_ms = bare.iter_mut().map(|times| median_ms(times)).fold(f64::INFINITY, f64::min);
    Ok(Report::new("join")
        .with("hosts", installation.hosts)
        .with("topics", installation.topics_per_host())
        .with("rounds", u64::from(options.rounds))
        .with("bytes_per_host", bytes_per_host)
        .with_goal("ours_ms", ours_ms, 500.0)
        .with("direct_get_ms", direct_get_ms)
        .with_goal("ratio", ours_ms / direct_get_ms.max(0.001), 0.2)
        .with("bare_ms", bare_ms)
        .with("floor", bare_ms / direct_get_ms.max(0.001))
        .with("agents_ms", agents_ms)
        .with("agents_direct_get_ms", agents_direct_get_ms)
        .with("agents_ratio", agents_ms / agents_direct_get_ms.max(0.001))
        .with("synced_ms", median_ms(&mut synced)))
}

fn prefix_v4(random: &mut Random) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a00_0000 | (random.next() as u32 & 0x00ff_ff00))
}

fn address_v4(random: &mut Random) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 | (random.next() as u32 & 0x00ff_ffff)))
}

fn address_v6(random: &mut Random) -> IpAddr {
    let bits = u128::from(random.next() & 0xffff_ffff) << 64 | u128::from(random.next());
    IpAddr::V6(Ipv6Addr::from_bits(0x2001_0db8 << 96 | bits))
}

fn median_ms(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1000.0
}

struct Watch {
    finish: Arc<Finish>,
    incidents: Arc<Incidents>,
    synced: Option<Cut>,
}

impl Observer for Watch {
    fn on_commit(&mut self, commit: &Commit, _reader: &Reader) {
        if self.synced.is_none() {
            self.synced = Some(commit.cut);
            self.finish.arrive();
        }
    }

    fn on_incident(&mut self, incident: Incident) {
        self.incidents.add(&incident);
    }
}

/// From the moment connected hosts begin until the last of them has all its topics.
async fn sync(server: &Server, installation: &Installation) -> anyhow::Result<Duration> {
    let (finish, incidents) = (Arc::new(Finish::default()), Arc::new(Incidents::default()));
    finish.expect(installation.hosts);
    let mut fleet = Vec::with_capacity(installation.hosts);
    for (number, connection) in fleet::connect(bus::address(server), installation.hosts).await?.into_iter().enumerate() {
        let watch = Watch { finish: Arc::clone(&finish), incidents: Arc::clone(&incidents), synced: None };
        fleet.push(lean::spawn(connection, Host::new(fixture::host_id(number)?, Settings::default(), number as u64, watch)));
    }
    let (begun, cpu_before) = (Instant::now(), fleet::cpu(server));
    for member in &fleet {
        member.commands.send(Command::Start);
    }
    let last = finish.wait().await;
    let cpu = fleet::cpu(server).saturating_sub(cpu_before);
    incidents.say();
    let took = last?.duration_since(begun);

    let mut cuts = BTreeSet::new();
    for running in fleet {
        drop(running.commands);
        let (host, end) = running.task.await?;
        end.context("a host's connection ended early")?;
        let held = host.reader().documents().filter(|(_, document)| **document != Document::absent()).count();
        ensure!(held == installation.topics_per_host(), "a host holds {held} of {} topics", installation.topics_per_host());
        cuts.insert(host.reader().cut());
    }
    say(format_args!("readers synced: {took:?}, {cpu:?} of processor time, {} cuts", cuts.len()));
    Ok(took)
}
