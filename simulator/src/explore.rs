//! `explore`: the pure cores in one thread, on a simulated bus with a simulated clock and everything going wrong that can. Compiler,
//! leaders, snapshots, convergence, registration, the hosts' readers, rulesets and model kernels are the ones that run everywhere else. A seed
//! decides everything, so a failure replays from its seed; before it is reported it is made as small as it gets.

mod guests;
mod story;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use groupcast_topics::sim::{Faults, Outcome, Sabotage, World};

use serde::Serialize;

use guests::Rates;
use story::{HOSTS_MAX, Story};

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// How many worlds.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    seeds: u64,
    /// The first seed; one that failed replays with `--seeds 1`.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Simulated milliseconds during which things go wrong; three times as many in every second world, where less does and more gets done.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    faulty_ms: u64,
    /// Controllers in each world.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=9))]
    controllers: u64,
    /// Leaves a part of the protocol out, to see that it is missed: fence, companions, gap or deaf.
    #[arg(long, value_parser = missed)]
    sabotage: Option<Missing>,
    /// Prints one JSON object on stdout instead of words.
    #[arg(long)]
    pub json: bool,
}

/// What is left out: of the topics, or of the registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    OfTopics(Sabotage),
    /// Controllers are not told that they were cut off.
    Deaf,
}

fn missed(text: &str) -> Result<Missing, String> {
    match text {
        "deaf" => Ok(Missing::Deaf),
        "fence" | "companions" | "gap" => text.parse().map(Missing::OfTopics),
        other => Err(format!("{other:?} is nothing that can be left out: fence, companions, gap or deaf")),
    }
}

/// One world, small enough to be told in a line.
#[derive(Debug, Clone, Copy)]
struct Plan {
    seed: u64,
    faulty_ms: u64,
    hosts: u64,
    controllers: u64,
    faults: Faults,
    /// Controllers are not told that they were cut off.
    deaf: bool,
}

impl Plan {
    fn new(seed: u64, faulty_ms: u64, controllers: u64, missing: Option<Missing>) -> Self {
        let sabotage = match missing {
            Some(Missing::OfTopics(sabotage)) => Some(sabotage),
            Some(Missing::Deaf) | None => None,
        };
        // Where everything fails all the time nobody leads for long, and hosts hear little: so there are calmer worlds too.
        let calmer =
            Faults { crash_node: 1, crash_host: 2, partition: 2, lose_stream: seed / 2 % 2, confuse: 30, ..Faults::all() };
        let (faults, faulty_ms) = if seed.is_multiple_of(2) { (Faults::all(), faulty_ms) } else { (calmer, 3 * faulty_ms) };
        let faults = Faults { sabotage, ..faults };
        Self { seed, faulty_ms, hosts: HOSTS_MAX, controllers, faults, deaf: missing == Some(Missing::Deaf) }
    }

    fn run(&self) -> Result<Outcome, String> {
        let rates = Rates { lose: self.faults.lose, crash: self.faults.crash_host, deaf: self.deaf };
        let story = Story::new(self.seed, self.hosts, self.controllers, rates).map_err(|error| error.to_string())?;
        let world = World::new(self.seed, story, self.controllers as usize, self.faults);
        // A panic is a failure like any other, with a seed: nothing of the world is used after it.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run(self.faulty_ms)));
        ended.unwrap_or_else(|_| Err("something panicked, and said so".to_owned()))
    }

    fn words(&self) -> String {
        let Faults { lose, duplicate, reorder, confuse, crash_host, crash_node, partition, lose_stream, corrupt, .. } =
            self.faults;
        let kinds = [
            ("messages lost", lose),
            ("doubled", duplicate),
            ("reordered", reorder),
            ("answers confused", confuse),
            ("hosts crash", crash_host),
            ("controllers crash", crash_node),
            ("connections cut", partition),
            ("the stream lost", lose_stream),
            ("bytes damaged", corrupt),
        ];
        let needed: Vec<&str> = kinds.iter().filter(|(_, rate)| *rate > 0).map(|(name, _)| *name).collect();
        let needed = if needed.is_empty() { "nothing goes wrong".to_owned() } else { needed.join(", ") };
        format!("seed {}, {} ms, {} hosts, {} controllers; {needed}", self.seed, self.faulty_ms, self.hosts, self.controllers)
    }
}

/// Switches one kind of fault off.
type Without = fn(&mut Faults);

const WITHOUT: [Without; 9] = [
    |faults| faults.corrupt = 0,
    |faults| faults.duplicate = 0,
    |faults| faults.reorder = 0,
    |faults| faults.lose_stream = 0,
    |faults| faults.partition = 0,
    |faults| faults.crash_host = 0,
    |faults| faults.crash_node = 0,
    |faults| faults.confuse = 0,
    |faults| faults.lose = 0,
];

/// How often a smaller world is tried before what was found is good enough.
const TRIALS_MAX: usize = 200;

/// The smallest plan found that still fails, with what it fails by.
#[derive(Debug, Clone)]
struct Smallest {
    plan: Plan,
    failure: String,
    trials: usize,
}

impl Smallest {
    /// Smaller worlds draw other numbers, so each is only kept if it fails.
    fn find(plan: Plan, failure: String) -> Self {
        let mut smallest = Self { plan, failure, trials: 0 };
        for without in WITHOUT {
            let mut next = smallest.plan;
            without(&mut next.faults);
            smallest.take(next);
        }
        while smallest.plan.hosts > 1 && smallest.take(Plan { hosts: smallest.plan.hosts - 1, ..smallest.plan }) {}
        while smallest.plan.controllers > 1 && smallest.take(Plan { controllers: smallest.plan.controllers - 1, ..smallest.plan })
        {
        }
        // Time last, by halves: what happens after the failure does not matter, and less before it is easier to follow.
        let mut step = smallest.plan.faulty_ms / 2;
        while step > 0 {
            let left = smallest.plan.faulty_ms.saturating_sub(step);
            if left == 0 || !smallest.take(Plan { faulty_ms: left, ..smallest.plan }) {
                step /= 2;
            }
        }
        smallest
    }

    fn take(&mut self, next: Plan) -> bool {
        if self.trials == TRIALS_MAX {
            return false;
        }
        self.trials += 1;
        match next.run() {
            Ok(_) => false,
            Err(failure) => {
                (self.plan, self.failure) = (next, failure);
                true
            }
        }
    }
}

#[derive(Debug, Serialize)]
struct Found {
    seed: u64,
    failure: String,
    smallest: String,
    smallest_failure: String,
    replays: bool,
    trials: usize,
}

#[derive(Debug, Default, Serialize)]
struct Summary {
    format_version: &'static str,
    seeds: u64,
    first_seed: u64,
    seconds: f64,
    seeds_per_minute: f64,
    batches: u64,
    commits: u64,
    leaders: u64,
    crashes: u64,
    stream_lives: u64,
    failure: Option<Found>,
}

/// What all threads share: the next seed, and the lowest that failed.
struct Work {
    next: AtomicU64,
    end: u64,
    failed: AtomicU64,
}

impl Work {
    /// Runs worlds until there are none left, or none below one that failed.
    fn through(&self, options: &Options) -> (Summary, Option<(Plan, String)>) {
        let mut summary = Summary::default();
        loop {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end || seed > self.failed.load(Ordering::Relaxed) {
                return (summary, None);
            }
            let plan = Plan::new(seed, options.faulty_ms, options.controllers, options.sabotage);
            summary.seeds += 1;
            match plan.run() {
                Ok(outcome) => {
                    summary.batches += outcome.batches;
                    summary.commits += outcome.commits;
                    summary.leaders += outcome.leaders;
                    summary.crashes += outcome.crashes;
                    summary.stream_lives += outcome.lives;
                }
                Err(failure) => {
                    self.failed.fetch_min(seed, Ordering::Relaxed);
                    return (summary, Some((plan, failure)));
                }
            }
        }
    }
}

/// Whether every world ended well.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let mut summary = Summary { format_version: "1", first_seed: options.seed, ..Summary::default() };
    let end = options.seed.saturating_add(options.seeds);
    let work = Work { next: AtomicU64::new(options.seed), end, failed: AtomicU64::new(u64::MAX) };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let parts: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| work.through(options))).collect();
        running.into_iter().map(|thread| thread.join()).collect()
    });
    let mut failures = Vec::new();
    for part in parts {
        let (part, failure) = part.map_err(|_| anyhow::anyhow!("a world ended in a panic, which is said above"))?;
        summary.seeds += part.seeds;
        summary.batches += part.batches;
        summary.commits += part.commits;
        summary.leaders += part.leaders;
        summary.crashes += part.crashes;
        summary.stream_lives += part.stream_lives;
        failures.extend(failure);
    }
    // The lowest seed, whoever was faster.
    if let Some((plan, failure)) = failures.into_iter().min_by_key(|(plan, _)| plan.seed) {
        let seed = plan.seed;
        let replays = plan.run().is_err_and(|again| again == failure);
        let Smallest { plan, failure: smallest_failure, trials } = Smallest::find(plan, failure.clone());
        let smallest = plan.words();
        summary.failure = Some(Found { seed, failure, smallest, smallest_failure, replays, trials });
    }
    summary.seconds = begun.elapsed().as_secs_f64();
    summary.seeds_per_minute = summary.seeds as f64 * 60.0 / summary.seconds.max(1e-9);
    if options.json {
        println!("{}", serde_json::to_string(&summary).context("the summary is plain data")?);
    } else {
        tell(&summary);
    }
    Ok(summary.failure.is_none())
}

fn tell(summary: &Summary) {
    println!(
        "{} worlds in {:.1} s ({:.0} a minute): {} changes published, {} states enforced, {} times somebody began to lead, \
         {} crashes, {} lives of the stream",
        summary.seeds,
        summary.seconds,
        summary.seeds_per_minute,
        summary.batches,
        summary.commits,
        summary.leaders,
        summary.crashes,
        summary.stream_lives
    );
    if let Some(found) = &summary.failure {
        println!("FAILED: seed {}: {}", found.seed, found.failure);
        println!("it {} from its seed", if found.replays { "replays exactly" } else { "DOES NOT replay" });
        println!("the smallest world of {} tried: {}", found.trials, found.smallest);
        println!("there: {}", found.smallest_failure);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_failure(missing: Missing, seeds: u64) -> Option<(Plan, String)> {
        (0..seeds).find_map(|seed| {
            let mut plan = Plan::new(seed, 2_000, 3, Some(missing));
            // Lossier than usual: what is lost must be followed by something before it is repaired.
            plan.faults.lose = 150;
            plan.run().err().map(|failure| (plan, failure))
        })
    }

    #[test]
    fn worlds_in_which_everything_goes_wrong_end_well() {
        let seeds = if std::env::var_os("GROUPCAST_FULL").is_some() { 10_000 } else { 300 };
        assert!(run(&Options { seeds, seed: 0, faulty_ms: 2_000, controllers: 3, sabotage: None, json: true }).unwrap());
    }

    /// What is left out is missed, the same way every time, and the world in which it shows becomes no larger.
    #[test]
    fn a_part_left_out_is_found_replayed_and_made_small() {
        for sabotage in
            [Sabotage::Fence, Sabotage::Companions, Sabotage::Gap].map(Missing::OfTopics).into_iter().chain([Missing::Deaf])
        {
            let (plan, failure) = first_failure(sabotage, 300).unwrap_or_else(|| panic!("{sabotage:?} is never missed"));
            assert_eq!(plan.run().unwrap_err(), failure, "{sabotage:?}");
            let smallest = Smallest::find(plan, failure);
            eprintln!("{sabotage:?} in {} trials: {}: {}", smallest.trials, smallest.plan.words(), smallest.failure);
            assert_eq!(smallest.plan.run().unwrap_err(), smallest.failure, "{sabotage:?}");
            assert!(smallest.plan.faulty_ms <= plan.faulty_ms && smallest.trials <= TRIALS_MAX);
            assert!(smallest.plan.words().len() <= plan.words().len());
        }
    }
}
