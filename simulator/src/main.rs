use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use groupcast_simulator::bench::{self, Bench};
use groupcast_simulator::fake::command as fake;
use groupcast_simulator::{explore, fleet};

/// With the system's allocator a change took a fortieth longer to the last of ten thousand hosts in one process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Fleets of simulated hosts, faults and benchmarks for groupcast.
#[derive(Parser)]
#[command(name = "groupcast-sim", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures one thing against a baseline in the same run.
    Bench {
        #[command(subcommand)]
        bench: Bench,
        /// Prints one JSON object on stdout instead of a table.
        #[arg(long, global = true)]
        json: bool,
    },
    /// Serves what pretends to be a source, until it is told to end.
    Fake {
        #[command(subcommand)]
        server: fake::Command,
    },
    /// Runs the pure cores through simulated worlds in which everything goes wrong, one for each seed; exits with 1 if one ends badly.
    Explore(explore::Options),
    /// Runs a fleet of hosts through a scenario; exits with 1 if a threshold is broken or something happened that must not.
    Run(fleet::Options),
    /// Runs a scenario at several sizes and prints one table, and an estimate for a larger fleet.
    Growth(fleet::growth::Options),
    /// Sets two runs side by side: the folders that `--out` named, or their summary.json.
    Compare { first: PathBuf, second: PathBuf },
}

fn main() -> anyhow::Result<ExitCode> {
    match Arguments::parse().command {
        Command::Bench { bench, json } => {
            let output = bench::run(&bench)?;
            output.print(json);
            if !output.is_whole() {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Fake { server } => fake::run(&server)?,
        Command::Run(options) => {
            if !fleet::run(&options)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Growth(options) => {
            if !fleet::growth::run(&options)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Compare { first, second } => println!("{}", fleet::compare(&first, &second)?),
        Command::Explore(options) => {
            if !explore::run(&options)? {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
