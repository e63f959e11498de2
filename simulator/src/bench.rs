//! Benchmarks: one file each. Every one starts what it needs, measures, and cleans up; what it prints was measured in that run.

mod agent;
mod bus;
mod compile;
mod control;
mod control_raw;
mod controller;
mod enforce;
mod fanout;
mod fixture;
mod fleet;
mod join;
mod packets;
mod process;
mod report;
mod wire;

use clap::Subcommand;

pub use report::Report;

#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// A large catalogue compiled from scratch, and single changes in it, against the same at a tenth of the size.
    Compile,
    /// The whole control plane: from a committed change to its topics, changes a second, take-over and hand-over, against the bus alone.
    Control(control::Options),
    /// Bytes: of one member's join, as payload and as all a host's socket receives, and of snapshots.
    Wire,
    /// A change's way into the kernel of a host: from its bytes to the committed transaction, against bare netlink.
    Enforce(agent::Options),
    /// One change of a group that all hosts use: until the last host has applied it, against a plain message of the same bytes.
    Fanout(fanout::Options),
    /// Many hosts come up at once: until the last has all its topics, against batched direct get of the same bytes.
    Join(join::Options),
    /// Packets a second through the policy of a full host, against connection tracking alone and against iptables.
    Packets(agent::Options),
}

impl Bench {
    pub fn name(&self) -> &'static str {
        match self {
            Bench::Compile => "compile",
            Bench::Control(_) => "control",
            Bench::Enforce(_) => "enforce",
            Bench::Packets(_) => "packets",
            Bench::Wire => "wire",
            Bench::Fanout(_) => "fanout",
            Bench::Join(_) => "join",
        }
    }
}

/// Runs one benchmark to its end, on a runtime of its own.
pub fn run(bench: &Bench) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match bench {
            Bench::Compile => compile::run(),
            Bench::Control(options) => control::run(options).await,
            Bench::Enforce(options) => enforce::run(options),
            Bench::Packets(options) => packets::run(options),
            Bench::Wire => wire::run().await,
            Bench::Fanout(options) => fanout::run(options).await,
            Bench::Join(options) => join::run(options).await,
        }
    })
}

/// Says on stderr what is being done, for people who wait.
fn say(words: impl std::fmt::Display) {
    eprintln!("{words}");
}
