//! `growth`: one scenario at several sizes, one table; and on paper what a fleet ten times as large would take.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Args;
use comfy_table::{Table, presets::UTF8_BORDERS_ONLY};
use serde_json::{Value, json};

use crate::bench::say;

/// The load is the same for each host: so many member changes a second for a thousand of them, each for ten hosts.
const CHANGES_PER_THOUSAND_HOSTS: u64 = 100;
/// Hosts on one leafnode of the estimate, and in all.
const LEAF_HOSTS: f64 = 10_000.0;
const PAPER_HOSTS: f64 = 100_000.0;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Numbers of hosts, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "100,1000,10000")]
    sizes: Vec<u32>,
    /// The scenario that is run.
    #[arg(long, default_value = "growth")]
    scenario: String,
    /// How long each takes.
    #[arg(long, value_name = "TIME")]
    duration: Option<String>,
    /// What everything random is drawn from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The groupcast binary; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_BIN")]
    groupcast: Option<PathBuf>,
    /// Prints one JSON object on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

/// What one size showed.
#[derive(Debug, Clone)]
pub struct Row {
    pub hosts: f64,
    pub measured: Value,
}

impl Row {
    fn get(&self, name: &str) -> f64 {
        self.measured[name].as_f64().unwrap_or(f64::NAN)
    }
}

/// Name and unit of every column.
const COLUMNS: [(&str, &str); 13] = [
    ("enforced_p50", "ms"),
    ("enforced_p99", "ms"),
    ("hot_last_p50", "ms"),
    ("join", "ms"),
    ("arrivals", ""),
    ("bytes_per_host", "B"),
    ("bytes_unneeded", "B"),
    ("server_cpu", "%"),
    ("controller_cpu", "%"),
    ("fleet_cpu", "%"),
    ("server_mb", "MB"),
    ("controller_mb", "MB"),
    ("fleet_mb", "MB"),
];

/// Whether every size went through; prints the table and the estimate.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    ensure!(!options.sizes.is_empty(), "name at least one size");
    let mut rows = Vec::new();
    let mut right = true;
    for hosts in &options.sizes {
        say(format_args!("== {hosts} hosts"));
        let rate = (u64::from(*hosts) * CHANGES_PER_THOUSAND_HOSTS / 1_000).max(1);
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", &options.scenario, "--json", "--seed", &options.seed.to_string()]);
        for set in [format!("hosts={hosts}"), format!("phase.0.members_per_s={rate}"), format!("phase.1.members_per_s={rate}")] {
            command.args(["--set", &set]);
        }
        if let Some(duration) = &options.duration {
            command.args(["--duration", duration]);
        }
        if let Some(path) = &options.groupcast {
            command.arg("--groupcast").arg(path);
        }
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        let summary: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{hosts} hosts: the run ended with {} and printed no summary", output.status))?;
        for words in summary["violations"].as_array().into_iter().flatten() {
            say(format_args!("VIOLATION with {hosts} hosts: {words}"));
        }
        right &= output.status.success();
        rows.push(Row { hosts: f64::from(*hosts), measured: summary["measured"].clone() });
    }
    let estimate = estimate(&rows);
    if options.json {
        let sizes: Vec<&Value> = rows.iter().map(|row| &row.measured).collect();
        println!("{}", json!({ "format_version": "1", "sizes": sizes, "estimate": estimate }));
    } else {
        println!("{}\n{}", table(&rows), estimate.join("\n"));
    }
    Ok(right)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    let heading = rows.iter().map(|row| format!("{} hosts", row.hosts));
    table.load_style(UTF8_BORDERS_ONLY).set_header(std::iter::once("measured".to_owned()).chain(heading));
    for (name, unit) in COLUMNS {
        let values = rows.iter().map(|row| match row.get(name) {
            missing if missing.is_nan() => "-".to_owned(),
            value => format!("{value:.1} {unit}"),
        });
        table.add_row(std::iter::once(name.to_owned()).chain(values));
    }
    table
}

/// What one more host costs, between the two largest sizes.
fn slope(rows: &[Row], name: &str) -> Option<f64> {
    let [.., small, large] = rows else { return None };
    let per_host = (large.get(name) - small.get(name)) / (large.hosts - small.hosts);
    per_host.is_finite().then_some(per_host.max(0.0))
}

/// On paper: 100,000 hosts on leafnodes of 10,000 each, with the same changes per host. What a leafnode carries is what one server carries
/// for as many hosts; what everybody shares grows with all of them.
fn estimate(rows: &[Row]) -> Vec<String> {
    let Some(largest) = rows.last() else { return Vec::new() };
    let at = |name: &str, hosts: f64| slope(rows, name).map(|slope| largest.get(name) + slope * (hosts - largest.hosts));
    let leaves = PAPER_HOSTS / LEAF_HOSTS;
    let mut lines = vec![format!(
        "estimate for {PAPER_HOSTS} hosts on {leaves} leafnodes of {LEAF_HOSTS}, by the slope between the two largest sizes:"
    )];
    let mut loads: Vec<(f64, String)> = Vec::new();
    if let Some(cpu) = at("server_cpu", LEAF_HOSTS) {
        lines.push(format!("  a leafnode: {cpu:.0} % of a core, {:.0} MB", at("server_mb", LEAF_HOSTS).unwrap_or(f64::NAN)));
        loads.push((cpu, "a leafnode's server".to_owned()));
    }
    if let Some(cpu) = at("controller_cpu", PAPER_HOSTS) {
        lines.push(format!(
            "  the controllers: {cpu:.0} % of a core, {:.0} MB each",
            at("controller_mb", PAPER_HOSTS).unwrap_or(f64::NAN)
        ));
        loads.push((cpu, "the leading controller, which hears every acknowledgement and compiles every change".to_owned()));
    }
    if let Some(hub) = at("server_cpu", PAPER_HOSTS) {
        // A message leaves the hub once for each leafnode with a host that wants it, and a group's ten hosts are spread over ten of them at worst.
        lines.push(format!("  the hub, if no two hosts of a group share a leafnode: {hub:.0} % of a core"));
        loads.push((hub, "the hub's server".to_owned()));
    }
    if let Some(hot) = at("hot_last_p50", LEAF_HOSTS) {
        lines.push(format!(
            "  a change of everybody's group: {hot:.0} ms on each leafnode, and one hop more, instead of {:.0} ms on one server",
            at("hot_last_p50", PAPER_HOSTS).unwrap_or(f64::NAN)
        ));
    }
    loads.sort_by(|a, b| b.0.total_cmp(&a.0));
    if let Some((cpu, name)) = loads.first() {
        let times = 100.0 / cpu.max(1e-9);
        lines.push(format!("  first to be short of a core: {name} ({times:.2} × this load fills one)"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_follows_the_slope_and_names_what_is_short_first() {
        let row = |hosts: f64, server: f64, controller: f64| Row {
            hosts,
            measured: json!({ "server_cpu": server, "server_mb": hosts / 10.0, "controller_cpu": controller, "controller_mb": 50.0 + hosts / 100.0, "hot_last_p50": hosts / 100.0 }),
        };
        let lines = estimate(&[row(1_000.0, 5.0, 1.0), row(10_000.0, 50.0, 19.0)]).join("\n");
        assert!(lines.contains("a leafnode: 50 % of a core, 1000 MB"), "{lines}");
        assert!(lines.contains("the controllers: 199 % of a core, 1050 MB"), "{lines}");
        assert!(lines.contains("100 ms on each leafnode"), "{lines}");
        assert!(lines.contains("first to be short of a core: the hub's server (0.20 ×"), "{lines}");
        assert!(estimate(&[]).is_empty());
        assert_eq!(estimate(&[row(10.0, 1.0, 1.0)]).len(), 1);
    }
}
