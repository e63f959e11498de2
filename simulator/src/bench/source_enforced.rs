//! From a change in a Cloud Controller until the kernel of a host has committed it, everything as it runs: by the source's own polls, and when a
//! gateway is asked to have it read at once, as whoever hears of the change can.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use groupcast_control::place::Place;
use hdrhistogram::Histogram;
use reqwest::Method;
use serde_json::{Value, json};

use super::e2e::{Bench, DEADLINE, PAUSE};
use super::e2e_commits::Commits;
use super::source::Served;

const PLACES: [Place; 1] = [Place { workload: "w1", host: "h1", app: "one" }];
/// The source's interval, as it is where nothing is configured: changes come at any moment of it.
const INTERVAL_MS: u64 = 1_000;
const WARM_UP: usize = 2;

/// Where the programs are; without them, beside this one.
#[derive(Debug, Clone, clap::Args)]
pub struct Programs {
    /// The groupcast binary; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_BIN")]
    groupcast: Option<PathBuf>,
    /// The agent; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_AGENT_BIN")]
    agent: Option<PathBuf>,
}

/// Microseconds from the change to the kernel.
pub struct Enforced {
    pub polled: Histogram<u64>,
    pub told: Histogram<u64>,
}

/// `None` where it cannot be measured, which is said.
pub async fn measure(programs: &Programs, served: &Served, groups: usize, rounds: usize) -> anyhow::Result<Option<Enforced>> {
    if !groupcast_bus_config::lab::is_allowed() {
        super::say("NOT MEASURED: from a change to the kernel needs network namespaces; run as root");
        return Ok(None);
    }
    if let Some(missing) = missing(programs) {
        super::say(format_args!("NOT MEASURED: from a change to the kernel needs {}; build it", missing.display()));
        return Ok(None);
    }
    let file = served.folder().join("groupcast.toml");
    std::fs::write(&file, served.toml()?)?;
    let bench = Bench::start(&programs.groupcast, &programs.agent, &PLACES, &["--config", &file.display().to_string()]).await?;
    served.order("edit", json!({"edit": {"globalise": "group-0"}})).await?;
    let begun = Instant::now();
    loop {
        let shown = bench.ask(Method::GET, "/v1/sources/cf", None).await.unwrap_or_default();
        if shown["groups"] == groups {
            break;
        }
        ensure!(begun.elapsed() < DEADLINE, "the source is not read: {shown}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bench.ask(Method::POST, "/v1/sources/cf/poll", None).await?;
    let mut commits = Commits::watch(&bench.lab.hosts.get("h1").context("a host")?.namespace)?;
    let polled = rounds_of(&bench, &mut commits, served, rounds, false).await?;
    let told = rounds_of(&bench, &mut commits, served, rounds, true).await?;
    Ok(Some(Enforced { polled, told }))
}

fn missing(programs: &Programs) -> Option<PathBuf> {
    let beside = |named: &Option<PathBuf>, name: &str| {
        named.clone().unwrap_or_else(|| std::env::current_exe().unwrap_or_default().with_file_name(name))
    };
    let all = [beside(&programs.groupcast, "groupcast"), beside(&programs.agent, "groupcast-agent")];
    all.into_iter().find(|path| !Path::exists(path))
}

async fn rounds_of(
    bench: &Bench,
    commits: &mut Commits,
    served: &Served,
    rounds: usize,
    told: bool,
) -> anyhow::Result<Histogram<u64>> {
    let mut took = Histogram::new(3)?;
    for round in 0..rounds + WARM_UP {
        // At another moment of the interval each time.
        let moment = Duration::from_millis(round as u64 * 379 % INTERVAL_MS);
        tokio::time::sleep(PAUSE + moment).await;
        commits.forget();
        served.order("touch", json!({"path": "group-0"})).await?;
        let changed = Instant::now();
        if told {
            let _: Value = bench.ask(Method::POST, "/v1/sources/cf/poll?full=false", None).await?;
        }
        let committed = commits.next(DEADLINE).await.context("the kernel heard of no change")?;
        if round >= WARM_UP {
            took.record(committed.duration_since(changed).as_micros() as u64)?;
        }
    }
    Ok(took)
}
