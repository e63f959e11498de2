//! Changes, written to the catalogue at a rate by many writers, each with groups of its own so that none meets another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_policy::model::Group;
use groupcast_policy::text::parse_rule;
use tokio::task::JoinSet;

use super::marks::Marks;
use super::scenario::Phase;
use super::topology::{MARKS_MAX, World};
use crate::bench::say;
use crate::random::Random;

/// Writers, each with one change under way at most.
pub const WRITERS: usize = 64;
const RETRY: Duration = Duration::from_millis(100);
/// A change that nobody takes for this long is given up, and said so.
const GIVEN_UP: Duration = Duration::from_secs(60);

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
    pub catalog: Catalog,
    pub marks: Arc<super::member::Shared>,
    next_mark: AtomicU32,
    pub accepted: AtomicU64,
    pub retried: AtomicU64,
    pub given_up: AtomicU64,
    pub stop: AtomicBool,
}

impl Desk {
    pub fn new(world: Arc<World>, catalog: Catalog, marks: Arc<super::member::Shared>) -> Self {
        Self {
            world,
            catalog,
            marks,
            next_mark: AtomicU32::new(1),
            accepted: AtomicU64::new(0),
            retried: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    fn marks(&self) -> &Marks {
        &self.marks.marks
    }

    /// One change of a group; gives what it is now, or what it was if nobody took the change.
    async fn write(&self, index: usize, was: &Written, rule: bool) -> anyhow::Result<Written> {
        let mark = self.next_mark.fetch_add(1, Ordering::Relaxed) % MARKS_MAX;
        let mut group = (*self.world.group(index, mark)?).clone();
        if rule {
            let port = 1_024 + mark % 60_000;
            let line = parse_rule(&format!("egress udp {port} to any")).map_err(|error| anyhow::anyhow!("{error:?}"))?;
            group.rules.push(line.into());
        }
        let group = Arc::new(group);
        let begun = Instant::now();
        let mut revision = was.revision;
        self.marks().written(mark);
        loop {
            let write = Write::put(Document::Group(Arc::clone(&group)), Expected::Revision(revision));
            let change = Change { author: "load".into(), reason: "measured".into(), key: None, writes: vec![write] };
            match self.catalog.write(&change, None).await {
                Ok(accepted) => {
                    self.accepted.fetch_add(1, Ordering::Relaxed);
                    return Ok(Written { revision: accepted.number, mark, group });
                }
                Err(error) if begun.elapsed() > GIVEN_UP => {
                    self.given_up.fetch_add(1, Ordering::Relaxed);
                    say(format_args!("a change of group {} is given up: {error}", group.id));
                    return Ok(was.clone());
                }
                Err(_) => {
                    self.retried.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(RETRY).await;
                }
            }
            // Nobody knows whether it was taken: what is there says so.
            let name = Document::Group(Arc::clone(&group)).name();
            if let Ok(Some(version)) = self.catalog.read(&name).await {
                if matches!(&version.document, Ok(Some(Document::Group(there))) if *there == group) {
                    self.accepted.fetch_add(1, Ordering::Relaxed);
                    return Ok(Written { revision: version.revision, mark, group });
                }
                revision = version.revision;
            }
        }
    }
}

/// What a phase wants of one writer.
#[derive(Debug, Clone, Copy)]
struct Share {
    pause: Duration,
    /// Of so many changes, how many are of rules.
    rules: u64,
    of: u64,
}

/// Runs a phase's changes; what was written comes back.
pub async fn run(desk: &Arc<Desk>, phase: &Phase, written: Vec<Written>, seed: u64) -> anyhow::Result<Vec<Written>> {
    let begun = tokio::time::Instant::now();
    let end = begun + phase.duration;
    let (of_all, rate) = (desk.world.of_all, phase.members_per_s + phase.rules_per_s);
    // Everybody's groups have a writer of their own.
    let writers = WRITERS.min(rate as usize).min(written.len() - of_all);
    let mut parts: Vec<Vec<(usize, Written)>> = vec![Vec::new(); 1 + writers.max(1)];
    for (index, group) in written.into_iter().enumerate() {
        let part = if index < of_all { 0 } else { 1 + index % writers.max(1) };
        parts[part].push((index, group));
    }
    let mut tasks = JoinSet::new();
    for (number, part) in parts.into_iter().enumerate() {
        let share = match number {
            0 => Share { pause: pause(1, phase.hot_per_s), rules: 0, of: 1 },
            _ => Share { pause: pause(writers, rate), rules: u64::from(phase.rules_per_s), of: u64::from(rate.max(1)) },
        };
        // Not all at the same time.
        let first = begun + share.pause.mul_f64(number as f64 / (writers + 1) as f64);
        tasks.spawn(writer(Arc::clone(desk), part, share, first, end, Random::new(seed ^ number as u64)));
    }
    let mut all = Vec::new();
    while let Some(part) = tasks.join_next().await {
        all.extend(part??);
    }
    tokio::time::sleep_until(end).await;
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, written)| written).collect())
}

/// Between two changes of one of so many writers; for ever, if there are to be none.
fn pause(writers: usize, per_s: u32) -> Duration {
    if per_s == 0 { Duration::from_secs(86_400) } else { Duration::from_secs_f64(writers.max(1) as f64 / f64::from(per_s)) }
}

async fn writer(
    desk: Arc<Desk>,
    mut part: Vec<(usize, Written)>,
    share: Share,
    first: tokio::time::Instant,
    end: tokio::time::Instant,
    mut random: Random,
) -> anyhow::Result<Vec<(usize, Written)>> {
    let mut next = first;
    while next < end && !part.is_empty() && share.pause < Duration::from_secs(86_400) && !desk.stop.load(Ordering::Relaxed) {
        tokio::time::sleep_until(next).await;
        let at = random.next() as usize % part.len();
        let (index, was) = &part[at];
        let rule = random.next() % share.of < share.rules;
        part[at].1 = desk.write(*index, was, rule).await?;
        next += share.pause;
        // What the bus could not take in time is not made up for: it would be a burst.
        next = next.max(tokio::time::Instant::now().checked_sub(share.pause).unwrap_or(next));
    }
    Ok(part)
}
