//! Everything that a run needs, set up; the run itself; and the judgement at its end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{connect, streams, subjects};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::registry::Registry;
use groupcast_messages::Lead;
use groupcast_policy::compiler::Compiler;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Event, Group};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::Options;
use super::agents::{self, Agents};
use super::faults::{Happened, Hurting, Processes, follow_leader};
use super::judge::{self, Desired};
use super::load::{self, Desk, Written};
use super::marks::Marks;
use super::member::{self, Member};
use super::outside::Source;
use super::report::{PhaseReport, Run};
use super::resources::{self, InForce};
use super::scenario::Scenario;
use super::topology::World;
use super::watch::Shared;
use crate::bench::{bus, say};

/// Groups written in one change when a run is prepared.
const GROUPS_PER_CHANGE: usize = 1_000;
const REGISTERING_MAX: usize = 512;
const SYNCED_WITHIN: Duration = Duration::from_secs(600);
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Descriptors beside the hosts' own.
const OTHER_DESCRIPTORS: u64 = 256;
/// What was written last in a phase is on its way for so long.
const PHASE_TAIL: Duration = Duration::from_millis(200);

pub struct Stage {
    world: Arc<World>,
    processes: Arc<Mutex<Processes>>,
    agents: Arc<Mutex<Agents>>,
    source: Option<Arc<Source>>,
    client: async_nats::Client,
    shared: Arc<Shared>,
    members: Arc<Vec<Member>>,
    written: Vec<Written>,
    join_ms: f64,
    connected_ms: f64,
}

impl Stage {
    pub async fn set(scenario: &Scenario, options: &Options) -> anyhow::Result<Self> {
        let world = Arc::new(World::draw(scenario, options.seed)?);
        let needed = u64::from(scenario.hosts) + OTHER_DESCRIPTORS;
        let allowed = rlimit::increase_nofile_limit(needed)?;
        ensure!(allowed >= needed, "{} hosts need {needed} open files and only {allowed} are allowed", scenario.hosts);
        let server = bus::start_server().await?;
        let address = bus::address(&server);
        let named = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("fleet")?);
        let (client, _events) = connect::connect(named).await?;
        streams::ensure(&client, 1).await?;
        let source = scenario.source.then(Source::start).transpose()?;
        let arguments = source.as_ref().map(|source| source.arguments()).unwrap_or_default();
        let mut processes = Processes::new(server, options.groupcast.clone(), scenario.lease, arguments);
        (0..scenario.controllers).try_for_each(|_| processes.add_controller())?;
        let mut leads = client.subscribe(subjects::LEAD_READ).await?;
        let written = publish(&world, &client).await?;
        let last = written.iter().map(|written| written.revision).max().unwrap_or(0);
        say("waiting until it is published");
        let published = async {
            while let Some(message) = leads.next().await {
                if Lead::decode(&message.payload).is_ok_and(|lead| lead.catalog >= last) {
                    return;
                }
            }
        };
        tokio::time::timeout(SYNCED_WITHIN, published).await.context("nobody publishes what was written")?;
        drop(leads);

        let changes = scenario.phase.iter().map(|phase| phase.changes_per_s() * phase.duration.as_secs_f64());
        // Each takes two: one with a rule of its own, one without.
        let marks = Marks::new(changes.sum::<f64>() as usize * 2 + 20_000)?;
        let shared =
            Shared { sabotage: options.sabotage, ..Shared::new(Arc::clone(&world), marks, address, scenario.reconnect_jitter) };
        let shared = Arc::new(shared);
        let kernels = scenario.kernels.unwrap_or(scenario.hosts) as usize;
        let simulated = world.hosts.len() - world.agents;
        say(format_args!("{simulated} hosts join"));
        let begun = Instant::now();
        let members = (0..simulated).map(|number| member::spawn(&shared, number, number < kernels));
        let members: Vec<Member> = members.collect::<anyhow::Result<_>>()?;
        let connected_ms = until(simulated, SYNCED_WITHIN, "connected", || shared.connected.load(Ordering::Relaxed)).await?;
        until(simulated, SYNCED_WITHIN, "synced", || shared.synced.load(Ordering::Relaxed)).await?;
        let join_ms = begun.elapsed().as_secs_f64() * 1e3;
        let (of, binary) = (Arc::clone(&world), options.agent.clone());
        let agents = tokio::task::spawn_blocking(move || Agents::start(&of, address, binary)).await??;
        Ok(Self {
            world,
            processes: Arc::new(Mutex::new(processes)),
            agents: Arc::new(Mutex::new(agents)),
            source,
            client,
            shared,
            members: Arc::new(members),
            written,
            join_ms,
            connected_ms,
        })
    }

    pub async fn play(mut self, scenario: &Scenario, options: &Options) -> anyhow::Result<Run> {
        let leader = follow_leader(self.client.clone()).await?;
        let desk = Arc::new(Desk::new(self.client.clone(), Arc::clone(&self.shared)));
        let hurting = Arc::new(Hurting {
            processes: Arc::clone(&self.processes),
            members: Arc::clone(&self.members),
            agents: Arc::clone(&self.agents),
            source: self.source.clone(),
            desk: Arc::clone(&desk),
            client: self.client.clone(),
            leader,
            seed: options.seed,
        });
        let in_force = InForce::default();
        let faults = schedule(&hurting, scenario, &in_force);
        let probing = agents::probe(Arc::clone(&self.agents), Arc::clone(&self.shared));
        let changing = self.source.clone().map(|source| tokio::spawn(source.change(Arc::clone(&self.shared))));
        let sampled = resources::sample(Arc::clone(&self.processes), Arc::clone(&desk), in_force.clone(), SAMPLE_EVERY);
        let begun_s = self.shared.marks.now_s();
        let phases = self.phases(&desk, scenario, options.seed, &in_force).await?;
        let mut happened = Vec::new();
        for end in faults.await? {
            match end {
                Ok(one) => happened.push(one),
                Err(error) => self.shared.violated(format!("a fault could not be carried out: {error:#}")),
            }
        }
        happened.sort_by(|a, b| a.from_s.total_cmp(&b.from_s));
        say("settling");
        in_force.say("settling");
        if let Some(changing) = changing {
            changing.abort();
        }
        let settled_ms = self.settle(&desk, scenario.settle).await?;
        let samples = sampled.end().await?;
        self.shared.ended.store(true, Ordering::Release);
        let probes = probing.await?;
        let given_up = desk.given_up.load(Ordering::Relaxed);
        if given_up > 0 {
            self.shared.violated(format!("{given_up} changes were taken by nobody within a minute"));
        }
        drop(hurting);
        let taken = |list: &std::sync::Mutex<Vec<f64>>| std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner));
        let marks = &self.shared.marks;
        let run = Run {
            scenario: scenario.clone(),
            seed: options.seed,
            topics_per_host: self.world.topics_per_host(),
            groups: self.world.groups.len(),
            spans: (0..self.world.groups.len()).map(|group| self.world.span(group)).collect(),
            join_ms: self.join_ms,
            connected_ms: self.connected_ms,
            begun_s,
            phases,
            samples,
            happened,
            settled_ms,
            hot_ms: taken(&desk.hot_ms),
            raw_ms: taken(&desk.raw_ms),
            accepted: desk.accepted.load(Ordering::Relaxed),
            deployed: desk.deployed.load(Ordering::Relaxed),
            retried: desk.retried.load(Ordering::Relaxed),
            deliveries: marks.deliveries.load(Ordering::Relaxed),
            delivered_bytes: marks.delivered_bytes.load(Ordering::Relaxed),
            unneeded_bytes: self.shared.unneeded_bytes.load(Ordering::Relaxed),
            lost: self.shared.lost.load(Ordering::Relaxed),
            pending_max: self.shared.pending_max.load(Ordering::Relaxed),
            probes,
            incidents: marks.incidents(),
            violated: self.shared.violated.load(Ordering::Relaxed),
            violations: self.shared.violations.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        let members = Arc::try_unwrap(self.members).map_err(|_| anyhow::anyhow!("somebody still holds the hosts"))?;
        for member in members {
            member.end().await;
        }
        Ok(run)
    }

    async fn phases(
        &mut self,
        desk: &Arc<Desk>,
        scenario: &Scenario,
        seed: u64,
        in_force: &InForce,
    ) -> anyhow::Result<Vec<PhaseReport>> {
        let mut phases = Vec::new();
        for (number, phase) in scenario.phase.iter().enumerate() {
            say(format_args!("phase {}", phase.name));
            in_force.say(&phase.name);
            let (from_s, accepted) = (self.shared.marks.now_s(), desk.accepted.load(Ordering::Relaxed));
            let written = std::mem::take(&mut self.written);
            self.written = load::run(desk, phase, written, seed ^ ((number as u64) << 32)).await?;
            tokio::time::sleep(PHASE_TAIL).await;
            phases.push(PhaseReport {
                name: phase.name.clone(),
                warm_up: phase.warm_up,
                from_s,
                to_s: self.shared.marks.now_s(),
                changes: desk.accepted.load(Ordering::Relaxed) - accepted,
                latency: self.shared.marks.end_phase(),
            });
        }
        Ok(phases)
    }

    /// Until every host holds what a compile from scratch gives and nothing else; in milliseconds.
    async fn settle(&self, desk: &Desk, within: Duration) -> anyhow::Result<Option<f64>> {
        let begun = Instant::now();
        let sourced = match &self.source {
            None => Vec::new(),
            Some(source) => source.settled(&Catalog::new(self.client.clone()), within).await.unwrap_or_else(|error| {
                self.shared.violated(format!("{error:#}"));
                Vec::new()
            }),
        };
        let desired = Arc::new(self.compile(sourced, &desk.extras().await)?);
        let (world, of) = (Arc::clone(&self.world), Arc::clone(&desired));
        let differs = move |number: usize, reader: &_| judge::difference(&world.hosts[number], reader, &of);
        let equal = judge::until_nothing_is_said(&self.members, within, differs).await;
        let settled_ms = begun.elapsed().as_secs_f64() * 1e3;
        let (agents, world, versions) = (Arc::clone(&self.agents).lock_owned().await, Arc::clone(&self.world), desk.versions());
        let real = tokio::task::spawn_blocking(move || agents.settled(&world, &versions, within)).await??;
        let real_are_right = real.is_empty();
        real.into_iter().for_each(|words| self.shared.violated(words));
        match equal {
            Ok(_) => Ok(real_are_right.then_some(settled_ms)),
            Err(said) => {
                let count = said.len();
                self.shared
                    .violated(format!("{count} hosts do not hold what a compile from scratch gives, {within:?} after the end"));
                said.into_iter().for_each(|words| self.shared.violated(words));
                Ok(None)
            }
        }
    }

    /// What every topic should be, from scratch.
    fn compile(&self, sourced: Vec<Arc<Group>>, extras: &[bool]) -> anyhow::Result<Desired> {
        let groups = self.written.iter().map(|written| &written.group).chain(&sourced);
        let mut events: Vec<Event> = groups.map(|group| Event::group((**group).clone())).collect();
        for (host, extra) in extras.iter().enumerate() {
            events.push(Event::workload(self.world.workload(host, *extra)?));
        }
        let mut documents = Desired::new();
        for (topic, edit) in Compiler::new().apply(&events).edits {
            documents.entry(topic).or_default().apply(&edit)?;
        }
        Ok(documents)
    }
}

/// Waits until so many hosts are; in milliseconds.
async fn until(hosts: usize, within: Duration, what: &str, count: impl Fn() -> u32) -> anyhow::Result<f64> {
    let (begun, mut told) = (Instant::now(), Instant::now());
    loop {
        let found = count() as usize;
        if found >= hosts {
            return Ok(begun.elapsed().as_secs_f64() * 1e3);
        }
        ensure!(begun.elapsed() < within, "only {found} of {hosts} hosts are {what} after {within:?}");
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            say(format_args!("{found} of {hosts} hosts are {what}"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes what there is before the run begins.
async fn publish(world: &Arc<World>, client: &async_nats::Client) -> anyhow::Result<Vec<Written>> {
    say(format_args!("writing {} groups and {} workloads", world.groups.len(), world.hosts.len()));
    // Workloads first: a group that finds its workloads there is published once, one that they come to is published for each of them.
    let registry = Registry::shared(client.clone(), &tokio::runtime::Handle::current());
    futures::stream::iter(0..world.hosts.len())
        .map(|host| load::register(&registry, world, host, false))
        .buffer_unordered(REGISTERING_MAX)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    let catalog = Catalog::new(client.clone());
    let mut written = Vec::with_capacity(world.groups.len());
    for first in (0..world.groups.len()).step_by(GROUPS_PER_CHANGE) {
        let groups = (first..world.groups.len().min(first + GROUPS_PER_CHANGE)).map(|index| world.group(index, 0));
        let groups: Vec<_> = groups.collect::<anyhow::Result<_>>()?;
        let writes = groups.iter().map(|group| Write::put(Document::Group(Arc::clone(group)), Expected::Absent)).collect();
        let change = Change { author: "fleet".into(), reason: "before the run".into(), key: None, writes };
        let revisions = catalog.write(&change, None).await?.revisions;
        written.extend(groups.into_iter().zip(revisions).map(|(group, revision)| Written { revision, mark: 0, group }));
    }
    Ok(written)
}

type Ends = tokio::task::JoinHandle<Vec<anyhow::Result<Happened>>>;

/// Lets every fault of the scenario happen in its time.
fn schedule(hurting: &Arc<Hurting>, scenario: &Scenario, in_force: &InForce) -> Ends {
    let (begun, faults) = (tokio::time::Instant::now(), scenario.fault.clone());
    let (hurting, in_force) = (Arc::clone(hurting), in_force.clone());
    tokio::spawn(async move {
        let mut all = JoinSet::new();
        for fault in faults {
            let (hurting, in_force) = (Arc::clone(&hurting), in_force.clone());
            all.spawn(async move {
                tokio::time::sleep_until(begun + fault.at).await;
                let _shown = in_force.begin(fault.kind);
                hurting.hurt(&fault).await
            });
        }
        let mut ends = Vec::new();
        while let Some(end) = all.join_next().await {
            ends.push(end.map_err(anyhow::Error::from).and_then(|end| end));
        }
        ends
    })
}
