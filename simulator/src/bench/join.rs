//! `bench join`: many hosts come up at once and each needs its topics: through the snapshot service, against the same documents by
//! batched direct get from a stream.

mod direct;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use groupcast_bus_config::server::Server;
use groupcast_messages::Cut;
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::GroupId;
use groupcast_policy::topic::{Scope, Topic};
use groupcast_topics::reader::{Commit, Incident, Reader, Settings};

use super::controller::Controller;
use super::fleet::{self, Finish};
use super::{Report, bus, fixture, say};
use crate::host::{Command, Host, Observer};
use crate::lean;
use crate::random::Random;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// How many hosts join at once, each on a connection of its own.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    hosts: u32,
    /// Topics each host needs: its own, the global scope, and rules and members of groups.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(4..=1_000))]
    topics: u32,
    /// Rounds of each kind; the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
}

/// Groups in the installation for each one that a host uses.
const GROUPS_PER_USED: usize = 5;

/// Addresses that make a members topic, and rules that make a rules topic, of about 600 bytes.
const MEMBERS_PER_GROUP: usize = 200;
const RULES_PER_GROUP: u32 = 20;

/// Between rounds, for the server to let go of the connections of the last one.
const SETTLE: Duration = Duration::from_millis(500);

/// Everything that is published, and who needs what of it.
struct Installation {
    documents: Vec<(Topic, Edit)>,
    groups: Vec<GroupId>,
    used: usize,
    /// Rules topics without members beside them, to make an odd number of topics.
    hosts: usize,
}

impl Installation {
    fn new(options: &Options) -> anyhow::Result<Self> {
        let used = (options.topics as usize - 2) / 2;
        let mut random = Random::new(1);
        let groups: Vec<GroupId> = (0..used * GROUPS_PER_USED).map(fixture::group_id).collect::<anyhow::Result<_>>()?;
        let mut documents = vec![fixture::global_scope()];
        for group in &groups {
            let mut rules = vec![fixture::rule(&format!("ingress tcp 443 from group:{group}"))?];
            for _ in 1..RULES_PER_GROUP {
                let bits = random.next();
                let net = Ipv4Addr::from_bits(0x0a00_0000 | (bits as u32 & 0x00ff_ff00));
                rules.push(fixture::rule(&format!("egress tcp {} to {net}/24", 1024 + (bits >> 40) % 50_000))?);
            }
            documents.push(fixture::rules(group, rules));
            let members = (0..MEMBERS_PER_GROUP)
                .map(|_| IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 | (random.next() as u32 & 0x00ff_ffff))));
            let distinct: std::collections::BTreeSet<IpAddr> = members.collect();
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
    let baseline = direct::Baseline::store(&server, &installation).await?;

    let (mut ours, mut direct) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        say(format_args!("round {round} of {}", options.rounds));
        ours.push(join(&server, &installation).await?);
        tokio::time::sleep(SETTLE).await;
        direct.push(baseline.get_all(&server, &installation).await?);
        tokio::time::sleep(SETTLE).await;
    }
    let (ours_ms, direct_get_ms) = (median_ms(&mut ours), median_ms(&mut direct));
    Ok(Report::new("join")
        .with("hosts", installation.hosts)
        .with("topics", installation.topics_per_host())
        .with("rounds", u64::from(options.rounds))
        .with("bytes_per_host", baseline.bytes_per_host())
        .with_goal("ours_ms", ours_ms, 500.0)
        .with("direct_get_ms", direct_get_ms)
        .with_goal("ratio", ours_ms / direct_get_ms.max(0.001), 0.2))
}

fn median_ms(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1000.0
}

struct Watch {
    finish: Arc<Finish>,
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
        say(format_args!("a host reports: {incident:?}"));
    }
}

/// From the moment connected hosts begin until the last of them has all its topics.
async fn join(server: &Server, installation: &Installation) -> anyhow::Result<Duration> {
    let finish = Arc::new(Finish::default());
    finish.expect(installation.hosts);
    let mut fleet = Vec::with_capacity(installation.hosts);
    for (number, connection) in fleet::connect(bus::address(server), installation.hosts).await?.into_iter().enumerate() {
        let watch = Watch { finish: Arc::clone(&finish), synced: None };
        fleet.push(lean::spawn(connection, Host::new(fixture::host_id(number)?, Settings::default(), number as u64, watch)));
    }
    let begun = Instant::now();
    for member in &fleet {
        member.commands.send(Command::Start);
    }
    let took = finish.wait().await?.duration_since(begun);

    let mut cuts = std::collections::BTreeSet::new();
    for running in fleet {
        drop(running.commands);
        let (host, end) = running.task.await?;
        end.context("a host's connection ended early")?;
        let held = host.reader().documents().filter(|(_, document)| **document != Document::absent()).count();
        ensure!(held == installation.topics_per_host(), "a host holds {held} of {} topics", installation.topics_per_host());
        cuts.insert(host.reader().cut());
    }
    say(format_args!("ours {took:?}, {} cuts", cuts.len()));
    Ok(took)
}
