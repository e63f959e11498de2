//! Benchmarks: one file each. Every one starts what it needs, measures, and cleans up; what it prints was measured in that run.

mod agent;
mod all;
pub(crate) mod bus;
mod compile;
mod control;
mod control_raw;
mod controller;
mod e2e;
mod e2e_commits;
mod e2e_raw;
mod enforce;
mod fanout;
mod figures;
mod fixture;
pub(crate) mod fleet;
mod join;
mod packets;
pub(crate) mod process;
mod register;
mod register_raw;
mod report;
mod source;
mod source_enforced;
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
    /// Everything as it runs, with real agents: from an HTTP request to the kernel of a host, against the bus alone.
    E2e(e2e::Options),
    /// A change's way into the kernel of a host: from its bytes to the committed transaction, against bare netlink.
    Enforce(agent::Options),
    /// One change of a group that all hosts use: until the last host has applied it, against a plain message of the same bytes.
    Fanout(fanout::Options),
    /// Many hosts come up at once: until the last has all its topics, against batched direct get of the same bytes.
    Join(join::Options),
    /// A source of many groups read for the first time, when nothing is new, and when one group is.
    Source(source::Options),
    /// Packets a second through the policy of a full host, against connection tracking alone and against iptables.
    Packets(agent::Options),
    /// All of them and the scenarios of fleets, one after the other.
    All(all::Options),
    /// What `all --json` printed, as the tables of BENCHMARKS.md.
    Page(figures::Options),
    /// A fleet registers at once, and then lives: beats, leaves, comes back, vanishes. What it costs, and what is left behind.
    Register(register::Options),
}

/// Runs one benchmark to its end, on a runtime of its own.
pub fn run(bench: &Bench) -> anyhow::Result<Output> {
    match bench {
        Bench::All(options) => return all::run(options).map(Output::All),
        Bench::Page(options) => return figures::run(options).map(Output::Words),
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        match bench {
            Bench::All(_) | Bench::Page(_) => anyhow::bail!("these are no benchmarks of their own"),
            Bench::Compile => compile::run(),
            Bench::Control(options) => control::run(options).await,
            Bench::E2e(options) => e2e::run(options).await,
            Bench::Enforce(options) => enforce::run(options),
            Bench::Packets(options) => packets::run(options),
            Bench::Source(options) => source::run(options).await,
            Bench::Wire => wire::run().await,
            Bench::Fanout(options) => fanout::run(options).await,
            Bench::Join(options) => join::run(options).await,
            Bench::Register(options) => register::run(options).await,
        }
    });
    report.map(Output::One)
}

/// What there is to print.
pub enum Output {
    One(Report),
    All(serde_json::Value),
    Words(String),
}

impl Output {
    pub fn print(&self, json: bool) {
        match self {
            Output::One(report) if json => println!("{}", report.json()),
            Output::One(report) => println!("{}", report.table()),
            Output::All(all) if json => println!("{all}"),
            // The same file that the page is made of, for people who only look.
            Output::All(all) => println!("{}", serde_json::to_string_pretty(all).unwrap_or_default()),
            Output::Words(words) => println!("{words}"),
        }
    }

    /// Everything that was asked for was measured.
    pub fn is_whole(&self) -> bool {
        match self {
            Output::All(all) => all["failed"].as_object().is_some_and(serde_json::Map::is_empty),
            Output::One(_) | Output::Words(_) => true,
        }
    }
}

/// Says on stderr what is being done, for people who wait.
pub(crate) fn say(words: impl std::fmt::Display) {
    eprintln!("{words}");
}
