use clap::{Parser, Subcommand};
use groupcast_simulator::bench::{self, Bench};

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
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Bench { bench, json } => {
            let report = bench::run(&bench)?;
            match json {
                true => println!("{}", report.json()),
                false => println!("{}", report.table()),
            }
        }
    }
    Ok(())
}
