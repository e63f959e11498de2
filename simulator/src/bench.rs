//! Benchmarks: one file each. Every one starts what it needs, measures, and cleans up; what it prints was measured in that run.

mod bus;
mod report;
mod wire;

use clap::Subcommand;

pub use report::Report;

#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// Bytes: of one member's join, as payload and as all a host's socket receives, and of snapshots.
    Wire,
}

impl Bench {
    pub fn name(&self) -> &'static str {
        match self {
            Bench::Wire => "wire",
        }
    }
}

/// Runs one benchmark to its end, on a runtime of its own.
pub fn run(bench: &Bench) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match bench {
            Bench::Wire => wire::run().await,
        }
    })
}

/// Says on stderr what is being done, for people who wait.
fn say(words: impl std::fmt::Display) {
    eprintln!("{words}");
}
