//! What a run showed: a table for people, `summary.json` for programs, an HDR log for statisticians and a page to look at.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use comfy_table::{Table, presets::UTF8_BORDERS_ONLY};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};
use serde_json::{Value, json};

use super::faults::Happened;
use super::page;
use super::resources::Sample;
use super::scenario::Scenario;
use super::threshold::Threshold;

pub struct PhaseReport {
    pub name: String,
    pub warm_up: bool,
    pub from_s: f64,
    pub to_s: f64,
    pub changes: u64,
    /// In microseconds, one for each change and host.
    pub latency: Histogram<u64>,
}

pub struct Run {
    pub scenario: Scenario,
    pub seed: u64,
    pub topics_per_host: f64,
    pub groups: usize,
    pub members_per_group: u32,
    /// Hosts that use each group.
    pub spans: Vec<usize>,
    pub join_ms: f64,
    pub begun_s: f64,
    pub phases: Vec<PhaseReport>,
    pub samples: Vec<Sample>,
    pub happened: Vec<Happened>,
    pub settled_ms: Option<f64>,
    pub raw_ms: Option<f64>,
    pub hot_ms: Option<f64>,
    pub equal: usize,
    pub accepted: u64,
    pub retried: u64,
    pub deliveries: u64,
    pub delivered_bytes: u64,
    pub incidents: u64,
    pub violations: Vec<String>,
}

/// What others would have sent, in bytes, for the same changes on the same topology. Each is a formula with its source.
pub struct Others {
    pub name: &'static str,
    pub how: &'static str,
    pub bytes_per_host: f64,
}

/// Bytes of a member in the compact form that Neutron answers a host with: 70,193 for a group of a thousand.
const NEUTRON_COMPACT_MEMBER: f64 = 70.193;
/// Bytes of a port that Neutron pushes to every host.
const NEUTRON_PUSH: f64 = 3_994.0;
/// Seconds between polls in Cloud Foundry, twice in a row: of the cloud controller, and by each host.
const POLL_S: f64 = 60.0;
/// Bytes of a group in what is polled: its rules as JSON, about as much as one of ours with its names.
const POLLED_RULE: f64 = 180.0;

fn ms(us: u64) -> f64 {
    us as f64 / 1e3
}

impl Run {
    fn all(&self) -> Histogram<u64> {
        let counted = self.phases.iter().filter(|phase| !phase.warm_up);
        let mut all: Option<Histogram<u64>> = None;
        for phase in counted {
            match &mut all {
                None => all = Some(phase.latency.clone()),
                Some(sum) => _ = sum.add(&phase.latency),
            }
        }
        all.unwrap_or_else(|| self.phases[0].latency.clone())
    }

    /// Of memory: the last third of the run against the third before it.
    fn growth(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        let third = self.samples.len() / 3;
        let mean = |part: &[Sample]| part.iter().map(&of).sum::<f64>() / part.len().max(1) as f64;
        mean(&self.samples[self.samples.len() - third..]) - mean(&self.samples[third..self.samples.len() - third])
    }

    pub fn others(&self) -> Vec<Others> {
        let hosts = f64::from(self.scenario.hosts);
        let changes = self.accepted as f64;
        let span = self.spans.iter().sum::<usize>() as f64 / self.spans.len().max(1) as f64;
        let seconds: f64 = self.phases.iter().map(|phase| phase.to_s - phase.from_s).sum();
        let members = f64::from(self.members_per_group) + span;
        let rules = 1.0 + f64::from(self.scenario.topology.rules);
        let groups_per_host = (self.topics_per_host - 2.0) / 2.0;
        vec![
            Others {
                name: "whole groups (Neutron, compact)",
                how: "each change sends the group's members again to every host that uses it, 70.2 B a member",
                bytes_per_host: changes * span * members * NEUTRON_COMPACT_MEMBER / hosts,
            },
            Others {
                name: "push to every host (Neutron)",
                how: "each change is pushed to every host, 3,994 B",
                bytes_per_host: changes * NEUTRON_PUSH,
            },
            Others {
                name: "two polls of 60 s (Cloud Foundry)",
                how: "every 60 s each host fetches the rules of all groups it uses, 180 B a rule; up to 120 s late",
                bytes_per_host: seconds / POLL_S * groups_per_host * rules * POLLED_RULE,
            },
        ]
    }

    /// Names as in thresholds; times in milliseconds.
    pub fn measured(&self) -> BTreeMap<String, f64> {
        let all = self.all();
        let most = |of: fn(&Sample) -> f64| self.samples.iter().map(of).fold(0.0, f64::max);
        let mut measured: BTreeMap<String, f64> = [
            ("hosts", f64::from(self.scenario.hosts)),
            ("topics_per_host", self.topics_per_host),
            ("groups", self.groups as f64),
            ("changes", self.accepted as f64),
            ("retried", self.retried as f64),
            ("arrivals", all.len() as f64),
            ("enforced_p50", ms(all.value_at_quantile(0.5))),
            ("enforced_p90", ms(all.value_at_quantile(0.9))),
            ("enforced_p99", ms(all.value_at_quantile(0.99))),
            ("enforced_max", ms(all.max())),
            ("join", self.join_ms),
            ("settled", self.settled_ms.unwrap_or(f64::NAN)),
            ("hosts_equal", self.equal as f64),
            ("violations", self.violations.len() as f64),
            ("incidents", self.incidents as f64),
            ("deliveries", self.deliveries as f64),
            ("bytes_per_host", self.delivered_bytes as f64 / f64::from(self.scenario.hosts)),
            ("server_mb", most(|sample| sample.server_mb)),
            ("controller_mb", most(|sample| sample.controller_mb)),
            ("fleet_mb", most(|sample| sample.own_mb)),
            ("controller_growth_mb", self.growth(|sample| sample.controller_mb)),
            ("server_growth_mb", self.growth(|sample| sample.server_mb)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let (Some(hot), Some(raw)) = (self.hot_ms, self.raw_ms) {
            measured.insert("hot_last_p50".into(), hot);
            measured.insert("raw_last_p50".into(), raw);
            measured.insert("ratio".into(), hot / raw.max(1e-6));
        }
        measured
    }

    pub fn summary(&self, thresholds: &[Threshold], broken: &[String]) -> Value {
        let rounded: BTreeMap<String, Value> = self
            .measured()
            .into_iter()
            .map(|(name, value)| (name, if value.is_finite() { json!((value * 1000.0).round() / 1000.0) } else { Value::Null }))
            .collect();
        let phases: Vec<Value> = self
            .phases
            .iter()
            .map(|phase| {
                json!({
                    "name": phase.name, "warm_up": phase.warm_up, "changes": phase.changes,
                    "seconds": phase.to_s - phase.from_s, "arrivals": phase.latency.len(),
                    "enforced_p50": ms(phase.latency.value_at_quantile(0.5)),
                    "enforced_p99": ms(phase.latency.value_at_quantile(0.99)),
                    "enforced_max": ms(phase.latency.max()),
                })
            })
            .collect();
        let faults: Vec<Value> = self
            .happened
            .iter()
            .map(|fault| json!({ "kind": fault.kind.name(), "from_s": fault.from_s - self.begun_s, "to_s": fault.to_s - self.begun_s }))
            .collect();
        let others: BTreeMap<&str, f64> =
            self.others().into_iter().map(|other| (other.name, other.bytes_per_host.round())).collect();
        json!({
            "format_version": "1", "scenario": self.scenario.name, "seed": self.seed, "measured": rounded, "phases": phases,
            "faults": faults, "others_bytes_per_host": others,
            "thresholds": thresholds.iter().map(|threshold| &threshold.text).collect::<Vec<_>>(),
            "broken": broken, "violations": self.violations,
        })
    }

    pub fn table(&self, thresholds: &[Threshold], broken: &[String]) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_BORDERS_ONLY).set_header(["measured", "value"]);
        for (name, value) in self.measured() {
            table.add_row([name, format!("{value:.3}")]);
        }
        let mut text = format!("{}: {}\n{table}\n", self.scenario.name, self.scenario.about);
        for threshold in thresholds {
            let words = broken.iter().find(|words| words.starts_with(&threshold.text));
            text += &words.map_or_else(|| format!("reached: {}\n", threshold.text), |words| format!("BROKEN: {words}\n"));
        }
        for violation in &self.violations {
            text += &format!("VIOLATION (seed {}): {violation}\n", self.seed);
        }
        if self.violations.is_empty() {
            text += &format!("all {} hosts ended equal to a compile from scratch\n", self.equal);
        }
        text
    }

    pub fn write(&self, thresholds: &[Threshold], broken: &[String], folder: Option<&Path>) -> anyhow::Result<()> {
        let Some(folder) = folder else { return Ok(()) };
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let summary = self.summary(thresholds, broken);
        std::fs::write(folder.join("summary.json"), serde_json::to_string_pretty(&summary)?)?;
        std::fs::write(folder.join("report.html"), page::page(self, thresholds, broken))?;
        std::fs::write(folder.join("enforced.hdr"), self.hdr_log()?)?;
        Ok(())
    }

    /// In the format of HdrHistogram's logs, a line for each phase, in microseconds.
    fn hdr_log(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut serializer = V2DeflateSerializer::new();
        let mut log = IntervalLogWriterBuilder::new()
            .add_comment("enforced latency in microseconds, by phase")
            .begin_log_with(&mut bytes, &mut serializer)
            .map_err(|error| anyhow::anyhow!("the log cannot begin: {error}"))?;
        for phase in &self.phases {
            let tag: String = phase.name.chars().filter(char::is_ascii_alphanumeric).collect();
            let length = std::time::Duration::from_secs_f64((phase.to_s - phase.from_s).max(0.001));
            let start = std::time::Duration::from_secs_f64((phase.from_s - self.begun_s).max(0.0));
            log.write_histogram(&phase.latency, start, length, Tag::new(&tag))
                .map_err(|error| anyhow::anyhow!("phase {}: {error:?}", phase.name))?;
        }
        Ok(bytes)
    }
}

/// Two summaries side by side.
pub fn compare(a: &Path, b: &Path) -> anyhow::Result<String> {
    let read = |folder: &Path| -> anyhow::Result<Value> {
        let path = if folder.is_dir() { folder.join("summary.json") } else { folder.to_owned() };
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let summary: Value = serde_json::from_str(&text).with_context(|| format!("{} is no summary", path.display()))?;
        ensure!(summary["format_version"] == "1", "{} is of another version than this program reads", path.display());
        Ok(summary)
    };
    let (first, second) = (read(a)?, read(b)?);
    let empty = serde_json::Map::new();
    let [one, two] = [&first, &second].map(|summary| summary["measured"].as_object().unwrap_or(&empty));
    let names: std::collections::BTreeSet<&String> = one.keys().chain(two.keys()).collect();
    let mut table = Table::new();
    let title = |summary: &Value| format!("{} (seed {})", summary["scenario"].as_str().unwrap_or("?"), summary["seed"]);
    table.load_style(UTF8_BORDERS_ONLY).set_header([
        "measured".to_owned(),
        title(&first),
        title(&second),
        "second / first".to_owned(),
    ]);
    for name in names {
        let [x, y] = [one, two].map(|measured| measured.get(name).and_then(Value::as_f64));
        let text = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
        let ratio = x.zip(y).filter(|(x, _)| *x != 0.0).map(|(x, y)| y / x);
        table.add_row([name.clone(), text(x), text(y), text(ratio)]);
    }
    Ok(table.to_string())
}
