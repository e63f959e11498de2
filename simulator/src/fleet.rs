//! Fleets: thousands of hosts on a real server with real controllers, under load and while things break. Scenarios are TOML files.

mod agents;
mod faults;
pub mod growth;
mod judge;
mod load;
mod machine;
mod marks;
mod member;
mod others;
mod outside;
mod page;
mod plot;
mod report;
mod resources;
mod scenario;
mod stage;
mod threshold;
mod topology;
mod trouble;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use report::Run;
use scenario::Scenario;
use stage::Stage;
use threshold::Threshold;
use trouble::Sabotage;

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
    /// The agent's binary, for scenarios with real agents; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_AGENT_BIN")]
    agent: Option<PathBuf>,
    /// Leaves a part of the protocol out at all simulated hosts, to see that it is missed: gap, companions or term.
    #[arg(long)]
    sabotage: Option<Sabotage>,
    /// Prints summary.json on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

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
    let run = Stage::set(&scenario, options).await?.play(&scenario, options).await?;
    let broken = broken(&run, &thresholds);
    run.write(&thresholds, &broken, options.out.as_deref())?;
    match options.json {
        true => println!("{}", run.summary(&thresholds, &broken)),
        false => println!("{}", run.table(&thresholds, &broken)),
    }
    Ok(broken.is_empty() && run.violated == 0)
}

fn broken(run: &Run, thresholds: &[Threshold]) -> Vec<String> {
    let measured = run.measured();
    thresholds.iter().filter_map(|threshold| threshold.broken(&measured)).collect()
}
