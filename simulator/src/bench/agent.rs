//! What needs the kernel is measured by the agent, which the simulator drives as a process: `groupcast-agent bench NAME`.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde_json::Value;

use super::say;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The agent; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_AGENT_BIN")]
    agent: Option<PathBuf>,
}

/// What the agent found.
pub struct Figures(Value);

impl Figures {
    pub fn number(&self, name: &str) -> anyhow::Result<f64> {
        self.0[name].as_f64().with_context(|| format!("the agent measured no {name}: it is of another version than this program"))
    }

    pub fn count(&self, name: &str) -> anyhow::Result<u64> {
        self.0[name].as_u64().with_context(|| format!("the agent counted no {name}: it is of another version than this program"))
    }
}

pub fn measure(options: &Options, name: &str) -> anyhow::Result<Figures> {
    let path = match &options.agent {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("groupcast-agent"),
    };
    say(format!("{} measures on this machine's kernel", path.display()));
    let output = Command::new(&path).args(["bench", name, "--json"]).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| {
        format!("{} does not start: build it (cargo build --release -p groupcast-host) or name it with --agent", path.display())
    })?;
    if !output.status.success() {
        bail!("{} bench {name} failed ({}), and said why above", path.display(), output.status);
    }
    let report: Value = serde_json::from_slice(&output.stdout).context("the agent's report")?;
    ensure!(report["format_version"] == "1" && report["bench"] == name, "the agent's report is not one of {name}: {report}");
    Ok(Figures(report["results"].clone()))
}
