//! `groupcast up --demo`: three hosts with agents on this machine, in network namespaces of their own, and a story that shows with real
//! packets what groupcast does. `./quickstart` builds and runs it.
//!
//! - [`steps`]: what happened, for people or as JSON lines
//! - `stage`: bus, controller, gateway, hosts, agents and workloads, all processes that end with this one
//! - `story`: what is done with them, and what must come of it
//! - [`echo`]: what the workloads do

pub mod echo;
mod stage;
pub mod steps;
mod story;

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{Failure, Result};
use steps::Teller;

/// How long what an earlier run left may take to go away.
const LEFT_BEHIND_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Args)]
pub struct DemoOptions {
    /// Three hosts with agents in network namespaces of their own, and a story that shows what groupcast does. The data folder is
    /// begun anew.
    #[arg(long)]
    pub demo: bool,
    /// End after the story; the exit code says whether every step had the outcome that it should have.
    #[arg(long, requires = "demo")]
    exit: bool,
    /// Print the steps of the story as JSON, one object a line.
    #[arg(long, requires = "demo")]
    json: bool,
    /// The agent's binary; the one beside this one if not said.
    // Asks for no `--demo`: the variable may be set for another program.
    #[arg(long, env = "GROUPCAST_AGENT_BIN")]
    agent: Option<PathBuf>,
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::failed(error.to_string())
}

/// Runs alone in its folder, and begins with nothing in it.
fn prepared(data: &Path) -> Result<(File, PathBuf)> {
    let broken = |error: std::io::Error| failed(format!("{}: {error}", data.display()));
    crate::serve::private_folder(data)?;
    let lock = File::create(data.join("lock")).map_err(broken)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message = format!("another one runs in {}", data.display());
            return Err(Failure::failed(message).hint("end it with Ctrl-C, or name another folder with --data"));
        }
        Err(TryLockError::Error(error)) => return Err(broken(error)),
    }
    let run = data.join("run");
    let start = Instant::now();
    // A server of a run that was killed may still be writing its last.
    while let Err(error) = std::fs::remove_dir_all(&run) {
        if error.kind() == std::io::ErrorKind::NotFound {
            break;
        }
        if start.elapsed() > LEFT_BEHIND_DEADLINE {
            return Err(broken(error));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    crate::serve::private_folder(&run)?;
    Ok((lock, run))
}

pub async fn run(data: &Path, options: DemoOptions) -> Result {
    let binary = std::env::current_exe().map_err(failed)?;
    let agent = options.agent.clone().unwrap_or_else(|| binary.with_file_name("groupcast-agent"));
    if !agent.exists() {
        let message = format!("there is no agent at {}", agent.display());
        return Err(Failure::failed(message).hint("build it (cargo build -p groupcast-host), or name it with --agent"));
    }
    let data = std::path::absolute(data).map_err(failed)?;
    let (_lock, folder) = prepared(&data)?;
    let mut teller = Teller::new(options.json);
    // Heard from the beginning: whoever ends it in the middle of the story wants everything gone too.
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let told = tokio::select! {
        told = story::tell(&mut teller, &binary, &agent, &folder) => told,
        _ = terminate.recv() => return Err(failed("ended before the story did")),
        _ = interrupt.recv() => return Err(failed("ended before the story did")),
    };
    let stage = told?;
    let good = teller.end(stage.has_packets());
    if !options.exit {
        teller.words(&stage.farewell());
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        teller.words("\nending; nothing stays behind but what is in the data folder");
    }
    stage.end();
    if good { Ok(()) } else { Err(failed("not every step had the outcome that it should have")) }
}
