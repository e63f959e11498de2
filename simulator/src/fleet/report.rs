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
use super::others::{self, Other};
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
    /// Simulated hosts that use each group.
    pub spans: Vec<usize>,
    pub join_ms: f64,
    pub connected_ms: f64,
    pub begun_s: f64,
    pub phases: Vec<PhaseReport>,
    pub samples: Vec<Sample>,
    pub happened: Vec<Happened>,
    pub settled_ms: Option<f64>,
    /// Until the last host had a change of everybody's group, and a plain message of the same bytes.
    pub hot_ms: Vec<f64>,
    pub raw_ms: Vec<f64>,
    pub accepted: u64,
    pub deployed: u64,
    pub retried: u64,
    pub deliveries: u64,
    pub delivered_bytes: u64,
    pub unneeded_bytes: u64,
    pub lost: u64,
    pub pending_max: usize,
    pub probes: u64,
    pub incidents: BTreeMap<&'static str, u64>,
    pub violated: u64,
    pub violations: Vec<String>,
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

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

    /// Over the phases that count.
    fn mean(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        let counted = |at: f64| self.phases.iter().any(|phase| !phase.warm_up && (phase.from_s..phase.to_s).contains(&at));
        let values: Vec<f64> = self.samples.iter().filter(|sample| counted(sample.second.at_s)).map(of).collect();
        values.iter().sum::<f64>() / values.len().max(1) as f64
    }

    /// Real agents are among the hosts, and not measured.
    fn simulated(&self) -> f64 {
        f64::from(self.scenario.hosts - self.scenario.agents)
    }

    pub fn others(&self) -> Vec<Other> {
        let topology = &self.scenario.topology;
        let hosts = self.simulated().max(1.0);
        others::others(&others::Shape {
            hosts,
            groups: self.groups as f64,
            groups_per_host: self.spans.iter().sum::<usize>() as f64 / hosts,
            members_per_group: f64::from(topology.members) + self.spans.iter().sum::<usize>() as f64 / self.groups.max(1) as f64,
            rules_per_group: 1.0 + f64::from(topology.rules),
            changes_per_host: self.phases.iter().map(|phase| phase.latency.len()).sum::<u64>() as f64 / hosts,
            seconds: self.phases.iter().map(|phase| phase.to_s - phase.from_s).sum(),
        })
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
            ("connected", self.connected_ms),
            ("join", self.join_ms),
            ("settled", self.settled_ms.unwrap_or(f64::NAN)),
            ("deployed", self.deployed as f64),
            ("violations", self.violated as f64),
            ("incidents", self.incidents.values().sum::<u64>() as f64),
            ("deliveries", self.deliveries as f64),
            ("deliveries_lost", self.lost as f64),
            ("pending_max", self.pending_max as f64),
            ("bytes_per_host", self.delivered_bytes as f64 / self.simulated().max(1.0)),
            ("bytes_unneeded", self.unneeded_bytes as f64),
            ("server_cpu", self.mean(|sample| sample.server_cpu)),
            ("controller_cpu", self.mean(|sample| sample.controller_cpu)),
            ("fleet_cpu", self.mean(|sample| sample.own_cpu)),
            ("fleet_and_server_mb", most(|sample| sample.server_mb + sample.own_mb)),
            ("server_mb", most(|sample| sample.server_mb)),
            ("controller_mb", most(|sample| sample.controller_mb)),
            ("fleet_mb", most(|sample| sample.own_mb)),
            ("controller_growth_mb", self.growth(|sample| sample.controller_mb)),
            ("server_growth_mb", self.growth(|sample| sample.server_mb)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let Some(hot) = median(&self.hot_ms) {
            measured.insert("hot_last_p50".into(), hot);
            if let Some(raw) = median(&self.raw_ms) {
                measured.insert("raw_last_p50".into(), raw);
                measured.insert("ratio".into(), hot / raw.max(1e-6));
            }
        }
        // A fault from which not everybody came back is no number, and so breaks every threshold.
        let cut_off = self.happened.iter().filter(|fault| fault.kind.cuts_off());
        let back = cut_off.map(|fault| fault.back_ms.unwrap_or(f64::NAN)).reduce(|a, b| if a.is_nan() { a } else { a.max(b) });
        measured.extend(back.map(|back| ("back_max".to_owned(), back)));
        if self.scenario.agents > 0 {
            measured.insert("real_packet_rounds".into(), self.probes as f64);
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
            .map(|fault| {
                let [from_s, to_s] = [fault.from_s, fault.to_s].map(|at| at - self.begun_s);
                json!({ "kind": fault.kind.name(), "from_s": from_s, "to_s": to_s, "back_ms": fault.back_ms })
            })
            .collect();
        let others: BTreeMap<&str, f64> =
            self.others().into_iter().map(|other| (other.name, other.bytes_per_host.round())).collect();
        json!({
            "format_version": "1", "scenario": self.scenario.name, "seed": self.seed, "measured": rounded, "phases": phases,
            "faults": faults, "others_bytes_per_host": others, "incidents": self.incidents,
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
        if !self.incidents.is_empty() {
            let kinds: Vec<String> = self.incidents.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
            text += &format!("repaired by hosts: {}\n", kinds.join(", "));
        }
        if self.violated == 0 {
            text += &format!("all {} hosts ended equal to a compile from scratch\n", self.scenario.hosts);
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
