//! Changes, written to the catalogue at a rate by many writers, each with groups of its own so that none meets another.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::model::Group;
use tokio::task::JoinSet;

use super::marks::Marks;
use super::scenario::Phase;
use super::topology::{MARKS_MAX, World};
use super::watch::{RAW_SUBJECT, Shared};
use crate::bench::say;
use crate::random::Random;

/// Writers, each with one change under way at most.
pub const WRITERS: usize = 64;
const RETRY: Duration = Duration::from_millis(100);
/// A change that nobody takes for this long is given up, and said so.
const GIVEN_UP: Duration = Duration::from_secs(60);
/// What is asked of a server that was killed is never answered.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long everybody may take to have a change of everybody's group before the next plain message is sent.
const HOT_WITHIN: Duration = Duration::from_secs(10);
/// Workloads that are registered at one time in a deploy wave.
const DEPLOYED_MAX: usize = 64;

/// What is written of one group.
#[derive(Debug, Clone)]
pub struct Written {
    pub revision: u64,
    pub mark: u32,
    pub group: Arc<Group>,
}

/// What all writers share.
pub struct Desk {
    pub world: Arc<World>,
    catalog: Catalog,
    registry: Registry,
    client: async_nats::Client,
    pub shared: Arc<Shared>,
    next_mark: AtomicU32,
    /// By group: the last version that was accepted.
    versions: Vec<AtomicU32>,
    /// By host: whether its workload has the extra group.
    extras: Vec<tokio::sync::Mutex<bool>>,
    pub accepted: AtomicU64,
    pub deployed: AtomicU64,
    pub retried: AtomicU64,
    pub given_up: AtomicU64,
    /// Of changes of everybody's groups and of plain messages: until the last host has it, in milliseconds.
    pub hot_ms: Mutex<Vec<f64>>,
    pub raw_ms: Mutex<Vec<f64>>,
}

impl Desk {
    pub fn new(client: async_nats::Client, shared: Arc<Shared>) -> Self {
        let world = Arc::clone(&shared.world);
        Self {
            catalog: Catalog::new(client.clone()),
            registry: Registry::new(client.clone()),
            client,
            next_mark: AtomicU32::new(1),
            versions: world.groups.iter().map(|_| AtomicU32::new(0)).collect(),
            extras: world.hosts.iter().map(|_| tokio::sync::Mutex::new(false)).collect(),
            world,
            shared,
            accepted: AtomicU64::new(0),
            deployed: AtomicU64::new(0),
            retried: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            hot_ms: Mutex::default(),
            raw_ms: Mutex::default(),
        }
    }

    fn marks(&self) -> &Marks {
        &self.shared.marks
    }

    /// By group, what was accepted last.
    pub fn versions(&self) -> Vec<u32> {
        self.versions.iter().map(|mark| mark.load(Ordering::Relaxed)).collect()
    }

    /// How old the oldest change is that some host it concerns does not have.
    pub fn lag_ms(&self) -> f64 {
        let open = self.versions.iter().enumerate().filter_map(|(group, mark)| {
            let mark = mark.load(Ordering::Relaxed);
            if mark == 0 { None } else { self.marks().open_ms(mark, self.world.span(group)) }
        });
        open.fold(0.0, f64::max)
    }

    /// Which workloads have the extra group.
    pub async fn extras(&self) -> Vec<bool> {
        let mut all = Vec::with_capacity(self.extras.len());
        for extra in &self.extras {
            all.push(*extra.lock().await);
        }
        all
    }

    /// One change of a group; gives what it is now, or what it was if nobody took the change.
    async fn write(&self, index: usize, was: &Written, rule: bool) -> anyhow::Result<Written> {
        let mark = (self.next_mark.fetch_add(1, Ordering::Relaxed) * 2 + u32::from(rule)) % MARKS_MAX;
        let group = self.world.group(index, mark)?;
        let begun = Instant::now();
        let mut revision = was.revision;
        self.marks().written(mark);
        let accepted = |revision| {
            self.accepted.fetch_add(1, Ordering::Relaxed);
            self.versions[index].store(mark, Ordering::Relaxed);
            Written { revision, mark, group: Arc::clone(&group) }
        };
        loop {
            let write = Write::put(Document::Group(Arc::clone(&group)), Expected::Revision(revision));
            let change = Change { author: "load".into(), reason: "measured".into(), key: None, writes: vec![write] };
            let refused = match tokio::time::timeout(ANSWER_WITHIN, self.catalog.write(&change, None)).await {
                Ok(Ok(taken)) => return Ok(accepted(taken.number)),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {ANSWER_WITHIN:?}"),
            };
            if begun.elapsed() > GIVEN_UP {
                self.given_up.fetch_add(1, Ordering::Relaxed);
                say(format_args!("a change of group {} is given up: {refused}", group.id));
                return Ok(was.clone());
            }
            self.retried.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(RETRY).await;
            // Nobody knows whether it was taken: what is there says so.
            let name = Document::Group(Arc::clone(&group)).name();
            if let Ok(Ok(Some(version))) = tokio::time::timeout(ANSWER_WITHIN, self.catalog.read(&name)).await {
                if matches!(&version.document, Ok(Some(Document::Group(there))) if *there == group) {
                    return Ok(accepted(version.revision));
                }
                revision = version.revision;
            }
        }
    }

    /// Gives the host's workload its extra group, or takes it away.
    pub async fn deploy(&self, host: usize) -> anyhow::Result<()> {
        let mut extra = self.extras[host].lock().await;
        register(&self.registry, &self.world, host, !*extra).await?;
        *extra = !*extra;
        self.deployed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Many at once.
    pub async fn deploy_all(&self, hosts: Vec<usize>) -> anyhow::Result<()> {
        let all = futures::stream::iter(hosts).map(|host| self.deploy(host)).buffer_unordered(DEPLOYED_MAX);
        all.collect::<Vec<_>>().await.into_iter().collect()
    }

    /// A plain message to everybody with the bytes of one of ours, until the last has it.
    async fn raw_round(&self) -> anyhow::Result<()> {
        let hosts = self.world.hosts.len() - self.world.agents;
        let sample = self.shared.sample.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some((headers, payload)) = sample else { return Ok(()) };
        let mut map = async_nats::HeaderMap::new();
        headers.iter().for_each(|(name, value)| map.append(name.as_str(), value.as_str()));
        self.shared.raw.expect(hosts);
        let begun = Instant::now();
        self.client.publish_with_headers(RAW_SUBJECT, map, payload.into()).await?;
        self.client.flush().await?;
        let took = self.shared.raw.wait().await?.duration_since(begun).as_secs_f64() * 1e3;
        self.raw_ms.lock().unwrap_or_else(PoisonError::into_inner).push(took);
        Ok(())
    }
}

/// Registers the workload of a host, again and again until it is known to be written: to repeat it does no harm.
pub async fn register(registry: &Registry, world: &World, host: usize, with_extra: bool) -> anyhow::Result<()> {
    let (begun, workload) = (Instant::now(), world.workload(host, with_extra)?);
    loop {
        let registering = registry.register(&world.hosts[host], std::slice::from_ref(&workload), Elsewhere::Refuse);
        match tokio::time::timeout(ANSWER_WITHIN, registering).await {
            Ok(Ok(_)) => return Ok(()),
            refused if begun.elapsed() > GIVEN_UP => {
                let why = refused
                    .map_or_else(|_| "no answer".to_owned(), |outcome| outcome.map_or_else(|e| e.to_string(), |_| String::new()));
                anyhow::bail!("workload {} is registered by nobody: {why}", workload.id)
            }
            _ => tokio::time::sleep(RETRY).await,
        }
    }
}

/// What a phase wants of one writer.
#[derive(Debug, Clone, Copy)]
struct Share {
    pause: Option<Duration>,
    /// Of so many changes, how many are of rules.
    rules: u64,
    of: u64,
    first: tokio::time::Instant,
    end: tokio::time::Instant,
}

type Part = Vec<(usize, Written)>;

/// Runs a phase's changes; what was written comes back.
pub async fn run(desk: &Arc<Desk>, phase: &Phase, written: Vec<Written>, seed: u64) -> anyhow::Result<Vec<Written>> {
    let begun = tokio::time::Instant::now();
    let end = begun + phase.duration;
    let (of_all, rate) = (desk.world.of_all, phase.members_per_s + phase.rules_per_s);
    // Everybody's groups have a writer of their own.
    let writers = WRITERS.min(rate as usize).min(written.len() - of_all);
    let mut parts: Vec<Part> = vec![Vec::new(); 1 + writers.max(1)];
    for (index, group) in written.into_iter().enumerate() {
        let part = if index < of_all { 0 } else { 1 + index % writers.max(1) };
        parts[part].push((index, group));
    }
    let mut tasks = JoinSet::new();
    for (number, part) in parts.into_iter().enumerate() {
        let random = Random::new(seed ^ number as u64);
        let pause = if number == 0 { phase.hot_every } else { pause(writers, rate) };
        // Not all at the same time.
        let first = begun + pause.unwrap_or_default().mul_f64(number as f64 / (writers + 1) as f64);
        let share = Share { pause, rules: u64::from(phase.rules_per_s), of: u64::from(rate.max(1)), first, end };
        match number {
            0 => tasks.spawn(hot_writer(Arc::clone(desk), part, share, random, rate == 0)),
            _ => tasks.spawn(writer(Arc::clone(desk), part, share, random)),
        };
    }
    let deploying = tokio::spawn(deployer(Arc::clone(desk), pause(1, phase.workloads_per_s), end, Random::new(seed ^ 0xdeb1)));
    let mut all = Vec::new();
    while let Some(part) = tasks.join_next().await {
        all.extend(part??);
    }
    deploying.await??;
    tokio::time::sleep_until(end).await;
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, written)| written).collect())
}

/// Between two changes of one of so many writers; `None` if there are to be none.
fn pause(writers: usize, per_s: u32) -> Option<Duration> {
    (per_s > 0).then(|| Duration::from_secs_f64(writers.max(1) as f64 / f64::from(per_s)))
}

async fn writer(desk: Arc<Desk>, mut part: Part, share: Share, mut random: Random) -> anyhow::Result<Part> {
    let Some(pause) = share.pause else { return Ok(part) };
    let mut next = share.first;
    while next < share.end && !part.is_empty() {
        tokio::time::sleep_until(next).await;
        let at = random.next() as usize % part.len();
        let (index, was) = &part[at];
        let rule = random.next() % share.of < share.rules;
        part[at].1 = desk.write(*index, was, rule).await?;
        next = after(next, pause);
    }
    Ok(part)
}

/// What the bus could not take in time is not made up for: it would be a burst.
fn after(next: tokio::time::Instant, pause: Duration) -> tokio::time::Instant {
    let now = tokio::time::Instant::now();
    (next + pause).max(now.checked_sub(pause).unwrap_or(now))
}

/// Everybody's groups; `alone`: nothing else is written meanwhile, so that a plain message in between shows what the bus takes.
async fn hot_writer(desk: Arc<Desk>, mut part: Part, share: Share, mut random: Random, mut alone: bool) -> anyhow::Result<Part> {
    let Some(pause) = share.pause else { return Ok(part) };
    let hosts = desk.world.hosts.len() - desk.world.agents;
    let mut next = share.first;
    while next < share.end && !part.is_empty() {
        tokio::time::sleep_until(next).await;
        let at = random.next() as usize % part.len();
        let (index, was) = &part[at];
        part[at].1 = desk.write(*index, was, false).await?;
        let (mark, begun) = (part[at].1.mark, Instant::now());
        while desk.marks().last_ms(mark, hosts).is_none() && begun.elapsed() < HOT_WITHIN {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if let Some(took) = desk.marks().last_ms(mark, hosts) {
            desk.hot_ms.lock().unwrap_or_else(PoisonError::into_inner).push(took);
        }
        if alone && desk.shared.connected.load(Ordering::Relaxed) as usize == hosts {
            // Acknowledgements of ten thousand hosts take a second: when they are over the bus is as quiet as it was for the change.
            tokio::time::sleep_until((next + pause.mul_f64(0.75)).max(tokio::time::Instant::now() + pause.mul_f64(0.05))).await;
            if let Err(error) = desk.raw_round().await {
                say(format_args!("no more plain messages: {error}"));
                alone = false;
            }
        }
        next = after(next, pause);
    }
    Ok(part)
}

async fn deployer(desk: Arc<Desk>, pause: Option<Duration>, end: tokio::time::Instant, mut random: Random) -> anyhow::Result<()> {
    let Some(pause) = pause else { return Ok(()) };
    let mut next = tokio::time::Instant::now() + pause;
    while next < end {
        tokio::time::sleep_until(next).await;
        desk.deploy(random.next() as usize % desk.world.hosts.len()).await?;
        next = after(next, pause);
    }
    Ok(())
}
