//! Fleets: thousands of hosts on a real server with real controllers, under load and while things break. Scenarios are TOML files.

mod faults;
mod load;
mod marks;
mod member;
mod page;
mod report;
mod resources;
mod scenario;
mod threshold;
mod topology;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{connect, streams};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::compiler::Compiler;
use groupcast_policy::doc::Document as TopicDocument;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::Event;
use groupcast_policy::topic::Topic;
use groupcast_topics::reader;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::bench::fleet::Finish;
use crate::bench::{bus, say};
use faults::{Happened, Hurting, Processes, follow_leader};
use load::{Desk, Written};
use marks::Marks;
use member::{Member, RAW_SUBJECT, Shared, judge};
use report::{PhaseReport, Run};
use scenario::Scenario;
use threshold::Threshold;
use topology::World;

pub use report::compare;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The scenario's file, or the name of one that comes with groupcast.
    scenario: String,
    /// Sets a value of the scenario: KEY=VALUE, `topology.members=20`, `phase.0.duration=10s`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// What must be reached beside what the scenario demands: `enforced_p99<2s`. Exits with 1 when broken.
    #[arg(long = "threshold", value_name = "NAME<VALUE")]
    thresholds: Vec<String>,
    /// What everything random is drawn from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long all phases take together; each gets its share.
    #[arg(long, value_parser = humantime::parse_duration)]
    duration: Option<Duration>,
    /// Where the report goes: summary.json, enforced.hdr and report.html.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The groupcast binary; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_BIN")]
    groupcast: Option<PathBuf>,
    /// Prints summary.json on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

/// Groups written in one change when a run is prepared.
const GROUPS_PER_CHANGE: usize = 1_000;
const REGISTERING_MAX: usize = 64;
const SYNCED_WITHIN: Duration = Duration::from_secs(300);
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Plain messages to everybody, for comparison.
const RAW_ROUNDS: usize = 15;

fn find(name: &str) -> PathBuf {
    let plain = PathBuf::from(name);
    let ours = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios")).join(format!("{name}.toml"));
    if plain.exists() || !ours.exists() { plain } else { ours }
}

/// Whether everything that was demanded was reached, and nothing happened that must not.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(play(options))
}

async fn play(options: &Options) -> anyhow::Result<bool> {
    let mut scenario = Scenario::read(&find(&options.scenario), &options.sets)?;
    if let Some(duration) = options.duration {
        scenario.stretch(duration);
    }
    let demanded = scenario.thresholds.iter().chain(&options.thresholds);
    let thresholds: Vec<Threshold> = demanded.map(|text| Threshold::parse(text)).collect::<anyhow::Result<_>>()?;
    let stage = Stage::set(&scenario, options).await?;
    let run = stage.play(&scenario, options).await?;
    let broken: Vec<String> = thresholds.iter().filter_map(|threshold| threshold.broken(&run.measured())).collect();
    run.write(&thresholds, &broken, options.out.as_deref())?;
    if options.json {
        println!("{}", run.summary(&thresholds, &broken));
    } else {
        println!("{}", run.table(&thresholds, &broken));
    }
    Ok(broken.is_empty() && run.violations.is_empty())
}

/// Everything that a run needs, ready.
struct Stage {
    world: Arc<World>,
    processes: Arc<Mutex<Processes>>,
    catalog: Catalog,
    client: async_nats::Client,
    shared: Arc<Shared>,
    members: Arc<Vec<Member>>,
    written: Vec<Written>,
    join_ms: f64,
}

impl Stage {
    async fn set(scenario: &Scenario, options: &Options) -> anyhow::Result<Self> {
        let world = Arc::new(World::draw(scenario, options.seed)?);
        let needed = u64::from(scenario.hosts) + 256;
        let allowed = rlimit::increase_nofile_limit(needed)?;
        ensure!(allowed >= needed, "{} hosts need {needed} open files and only {allowed} are allowed", scenario.hosts);
        let server = bus::start_server().await?;
        let address = bus::address(&server);
        let named = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("fleet")?);
        let (client, _events) = connect::connect(named).await?;
        streams::ensure(&client, 1).await?;
        let mut processes = Processes::new(server, options.groupcast.clone(), scenario.lease);
        (0..scenario.controllers).try_for_each(|_| processes.add_controller())?;
        let catalog = Catalog::new(client.clone());
        let written = publish(&world, &catalog, &client).await?;

        let changes = scenario.phase.iter().map(|phase| {
            let rate = phase.members_per_s + phase.hot_per_s + phase.rules_per_s;
            (f64::from(rate) * phase.duration.as_secs_f64()) as usize
        });
        // Retries take marks too.
        let marks = Marks::new(changes.sum::<usize>() * 2 + 10_000)?;
        let shared = Arc::new(Shared {
            marks,
            address,
            ended: AtomicBool::new(false),
            synced: AtomicU32::new(0),
            connected: AtomicU32::new(0),
            reconnect_jitter: scenario.reconnect_jitter,
            raw: Finish::default(),
            violations: Default::default(),
        });
        let kernels = scenario.kernels.unwrap_or(scenario.hosts) as usize;
        say(format_args!("{} hosts join", scenario.hosts));
        let begun = Instant::now();
        let mut members = Vec::new();
        for (number, id) in world.hosts.iter().enumerate() {
            members.push(member::spawn(&shared, id.clone(), number, number < kernels, reader::Settings::default())?);
        }
        let stage = Self {
            world,
            processes: Arc::new(Mutex::new(processes)),
            catalog,
            client,
            shared,
            members: Arc::new(members),
            written,
            join_ms: 0.0,
        };
        stage.everybody_synced(SYNCED_WITHIN).await?;
        Ok(Self { join_ms: begun.elapsed().as_secs_f64() * 1e3, ..stage })
    }

    async fn everybody_synced(&self, within: Duration) -> anyhow::Result<()> {
        let (begun, hosts) = (Instant::now(), self.world.hosts.len() as u32);
        loop {
            let synced = self.shared.synced.load(Ordering::Relaxed);
            if synced >= hosts {
                return Ok(());
            }
            ensure!(begun.elapsed() < within, "only {synced} of {hosts} hosts are synced after {within:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn play(mut self, scenario: &Scenario, options: &Options) -> anyhow::Result<Run> {
        let leader = follow_leader(self.client.clone()).await?;
        let desk = Arc::new(Desk::new(Arc::clone(&self.world), self.catalog.clone(), Arc::clone(&self.shared)));
        let hurting = Arc::new(Hurting {
            processes: Arc::clone(&self.processes),
            members: Arc::clone(&self.members),
            shared: Arc::clone(&self.shared),
            leader,
            seed: options.seed,
        });
        let (happened, faults) = schedule(&hurting, scenario);
        let sampled = resources::sample(Arc::clone(&self.processes), Arc::clone(&desk), SAMPLE_EVERY);
        let begun_s = self.shared.marks.now_s();
        let mut phases = Vec::new();
        for (number, phase) in scenario.phase.iter().enumerate() {
            say(format_args!("phase {}", phase.name));
            let (from_s, accepted) = (self.shared.marks.now_s(), desk.accepted.load(Ordering::Relaxed));
            let written = std::mem::take(&mut self.written);
            self.written = load::run(&desk, phase, written, options.seed ^ ((number as u64) << 32)).await?;
            // What was written last is on its way.
            tokio::time::sleep(Duration::from_millis(200)).await;
            phases.push(PhaseReport {
                name: phase.name.clone(),
                warm_up: phase.warm_up,
                from_s,
                to_s: self.shared.marks.now_s(),
                changes: desk.accepted.load(Ordering::Relaxed) - accepted,
                latency: self.shared.marks.end_phase(),
            });
        }
        let faults_ended = faults.await?;
        let violations_of_faults: Vec<String> =
            faults_ended.into_iter().filter_map(|one| one.err().map(|error| format!("{error:#}"))).collect();
        say("settling");
        let settled_ms = self.settle(scenario.settle).await;
        let raw_ms = self.raw().await?;
        let samples = sampled.end().await?;
        let happened: Vec<Happened> = happened.lock().await.clone();
        let hot_ms = self.hot_ms();
        self.shared.ended.store(true, Ordering::Relaxed);
        let mut violations = self.shared.violations.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        violations.extend(violations_of_faults);
        if settled_ms.is_none() {
            violations.push(format!("not every host had the last changes within {:?}", scenario.settle));
        }
        let desired = self.compile()?;
        let members = Arc::try_unwrap(self.members).or_else(|shared| {
            drop(hurting);
            Arc::try_unwrap(shared)
        });
        let members = members.map_err(|_| anyhow::anyhow!("somebody still holds the hosts"))?;
        let mut equal = 0;
        for member in members {
            let id = member.id.clone();
            match member.end().await {
                None => violations.push(format!("host {id} is gone")),
                Some(host) => match judge(&host, &id, &desired) {
                    None => equal += 1,
                    Some(words) if violations.len() < 40 => violations.push(words),
                    Some(_) => {}
                },
            }
        }
        let given_up = desk.given_up.load(Ordering::Relaxed);
        if given_up > 0 {
            violations.push(format!("{given_up} changes were taken by nobody within a minute"));
        }
        Ok(Run {
            scenario: scenario.clone(),
            seed: options.seed,
            topics_per_host: self.world.topics_per_host(),
            groups: self.world.groups.len(),
            members_per_group: scenario.topology.members,
            spans: (0..self.world.groups.len()).map(|group| self.world.span(group)).collect(),
            join_ms: self.join_ms,
            begun_s,
            phases,
            samples,
            happened,
            settled_ms,
            raw_ms,
            hot_ms,
            equal,
            accepted: desk.accepted.load(Ordering::Relaxed),
            retried: desk.retried.load(Ordering::Relaxed),
            deliveries: self.shared.marks.deliveries.load(Ordering::Relaxed),
            delivered_bytes: self.shared.marks.delivered_bytes.load(Ordering::Relaxed),
            incidents: self.shared.marks.incidents.load(Ordering::Relaxed),
            violations,
        })
    }

    /// Until every host that uses a group has its last version; in milliseconds.
    async fn settle(&self, within: Duration) -> Option<f64> {
        let begun = Instant::now();
        loop {
            let lacking = self.written.iter().enumerate().any(|(group, written)| {
                written.mark > 0 && (self.shared.marks.arrivals(written.mark) as usize) < self.world.span(group)
            });
            if !lacking {
                return Some(begun.elapsed().as_secs_f64() * 1e3);
            }
            if begun.elapsed() > within {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A plain message to everybody, until the last has it: the median.
    async fn raw(&self) -> anyhow::Result<Option<f64>> {
        if self.world.of_all == 0 || self.shared.connected.load(Ordering::Relaxed) as usize != self.world.hosts.len() {
            return Ok(None);
        }
        let mut took = Vec::new();
        for _ in 0..RAW_ROUNDS {
            self.shared.raw.expect(self.world.hosts.len());
            let begun = Instant::now();
            self.client.publish(RAW_SUBJECT, vec![0x5a; 48].into()).await?;
            self.client.flush().await?;
            took.push(self.shared.raw.wait().await?.duration_since(begun).as_secs_f64() * 1e3);
        }
        took.sort_by(f64::total_cmp);
        Ok(took.get(took.len() / 2).copied())
    }

    /// Changes of everybody's groups, to the last host: the median.
    fn hot_ms(&self) -> Option<f64> {
        let hosts = self.world.hosts.len();
        let mut took: Vec<f64> = self.written[..self.world.of_all]
            .iter()
            .filter_map(|written| self.shared.marks.last_ms(written.mark, hosts))
            .collect();
        took.sort_by(f64::total_cmp);
        took.get(took.len() / 2).copied()
    }

    /// What every topic should be, from scratch.
    fn compile(&self) -> anyhow::Result<HashMap<Topic, TopicDocument>> {
        let mut events: Vec<Event> = self.written.iter().map(|written| Event::group((*written.group).clone())).collect();
        for host in 0..self.world.hosts.len() {
            events.push(Event::workload(self.world.workload(host)?));
        }
        let mut documents: HashMap<Topic, TopicDocument> = HashMap::new();
        for (topic, edit) in Compiler::new().apply(&events).edits {
            documents.entry(topic).or_default().apply(&edit)?;
        }
        Ok(documents)
    }
}

/// Writes what there is before the run begins.
async fn publish(world: &Arc<World>, catalog: &Catalog, client: &async_nats::Client) -> anyhow::Result<Vec<Written>> {
    say(format_args!("writing {} groups and {} workloads", world.groups.len(), world.hosts.len()));
    let mut written = Vec::with_capacity(world.groups.len());
    for first in (0..world.groups.len()).step_by(GROUPS_PER_CHANGE) {
        let groups = (first..world.groups.len().min(first + GROUPS_PER_CHANGE)).map(|index| world.group(index, 0));
        let groups: Vec<_> = groups.collect::<anyhow::Result<_>>()?;
        let writes = groups.iter().map(|group| Write::put(Document::Group(Arc::clone(group)), Expected::Absent)).collect();
        let change = Change { author: "fleet".into(), reason: "before the run".into(), key: None, writes };
        let revisions = catalog.write(&change, None).await?.revisions;
        written.extend(groups.into_iter().zip(revisions).map(|(group, revision)| Written { revision, mark: 0, group }));
    }
    let registry = Registry::new(client.clone());
    futures::stream::iter(0..world.hosts.len())
        .map(|host| {
            let (registry, world) = (&registry, Arc::clone(world));
            async move {
                let workload = world.workload(host)?;
                registry.register(&world.hosts[host], &[workload], Elsewhere::Refuse).await.context("registering a workload")
            }
        })
        .buffer_unordered(REGISTERING_MAX)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    Ok(written)
}

type Ends = tokio::task::JoinHandle<Vec<anyhow::Result<()>>>;

/// Lets every fault of the scenario happen in its time.
fn schedule(hurting: &Arc<Hurting>, scenario: &Scenario) -> (Arc<Mutex<Vec<Happened>>>, Ends) {
    let happened: Arc<Mutex<Vec<Happened>>> = Arc::default();
    let (begun, faults) = (tokio::time::Instant::now(), scenario.fault.clone());
    let (hurting, told) = (Arc::clone(hurting), Arc::clone(&happened));
    let task = tokio::spawn(async move {
        let mut all = JoinSet::new();
        for fault in faults {
            let (hurting, told) = (Arc::clone(&hurting), Arc::clone(&told));
            all.spawn(async move {
                tokio::time::sleep_until(begun + fault.at).await;
                say(format_args!("fault: {}", fault.kind.name()));
                told.lock().await.push(hurting.hurt(&fault).await?);
                anyhow::Ok(())
            });
        }
        let mut ends = Vec::new();
        while let Some(end) = all.join_next().await {
            ends.push(end.map_err(anyhow::Error::from).and_then(|end| end));
        }
        ends
    });
    (happened, task)
}
