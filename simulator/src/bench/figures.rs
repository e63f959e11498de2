//! What `bench all --json` printed, as the tables of BENCHMARKS.md, so that nobody types a figure.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use serde_json::Value;

use super::all::FORMAT_VERSION;

/// What is between these is written by this program.
const BEGIN: &str = "<!-- figures: written by `groupcast-sim bench page FILE --into BENCHMARKS.md` -->";
const END: &str = "<!-- end of figures -->";

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// What `bench all --json` printed.
    file: PathBuf,
    /// Puts the tables into this file, in place of those that it has; without it they are printed.
    #[arg(long)]
    into: Option<PathBuf>,
}

fn number(value: &Value) -> String {
    match (value.as_u64(), value.as_f64()) {
        (Some(count), _) => grouped(count),
        (_, Some(measure)) if measure.abs() >= 1_000.0 => {
            format!("{}{}", if measure < 0.0 { "-" } else { "" }, grouped(measure.round().abs() as u64))
        }
        (_, Some(measure)) if measure.abs() >= 100.0 => format!("{measure:.0}"),
        (_, Some(measure)) if measure.abs() >= 1.0 => format!("{measure:.2}"),
        (_, Some(measure)) => format!("{measure:.3}"),
        _ => "–".to_owned(),
    }
}

/// With commas between thousands.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Of one benchmark, or of a fleet's run.
fn section(name: &str, report: &Value) -> String {
    let empty = serde_json::Map::new();
    let results = [&report["results"], &report["measured"]].into_iter().find_map(Value::as_object).unwrap_or(&empty);
    let seconds = number(&report["seconds"]);
    let command = report["command"].as_str().unwrap_or(name);
    let mut text =
        format!("#### {name}\n\n`groupcast-sim {command}`, {seconds} s\n\n| measured | value | to reach |\n|---|---:|---|\n");
    let thresholds: Vec<&str> = report["thresholds"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, value) in results {
        let goal = report["reach"][name].as_str().map(str::to_owned);
        let demanded = thresholds.iter().find(|text| text.split(['<', '>']).next() == Some(name.as_str()));
        let goal = goal.or_else(|| demanded.map(|text| text.replace('<', " ≤ ").replace('>', " ≥ ").replacen(name, "", 1)));
        let _ = writeln!(text, "| {name} | {} | {} |", number(value), goal.unwrap_or_default().trim());
    }
    for words in report["violations"].as_array().into_iter().flatten().chain(report["broken"].as_array().into_iter().flatten()) {
        let _ = writeln!(text, "\n**{}**", words.as_str().unwrap_or_default());
    }
    text.push('\n');
    text
}

fn render(all: &Value) -> anyhow::Result<String> {
    ensure!(all["format_version"] == FORMAT_VERSION, "the file is of another version than this program reads");
    let machine = &all["machine"];
    let mut text = format!(
        "Measured at {} on {} cores ({}), {} MB, Linux {}; load before: {}.\n\n",
        all["at"].as_str().context("no time of the measurement in the file")?,
        machine["cores"],
        machine["processor"].as_str().unwrap_or("?"),
        number(&machine["memory_mb"]),
        machine["kernel"].as_str().unwrap_or("?"),
        machine["load_before"].as_str().unwrap_or("?"),
    );
    for (name, report) in all["benches"].as_object().context("no benchmarks in the file")? {
        text += &section(name, report);
    }
    for (name, why) in all["failed"].as_object().into_iter().flatten() {
        let _ = writeln!(text, "**{name} failed: {}**\n", why.as_str().unwrap_or_default());
    }
    Ok(text)
}

/// The page with these figures in place of those it has.
fn put(page: &str, figures: &str) -> anyhow::Result<String> {
    let (before, rest) = page.split_once(BEGIN).with_context(|| format!("the page has no line {BEGIN}"))?;
    let (_, after) = rest.rsplit_once(END).with_context(|| format!("the page has no line {END}"))?;
    Ok(format!("{before}{BEGIN}\n\n{}\n{END}{after}", figures.trim_end().to_owned() + "\n"))
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

pub fn run(options: &Options) -> anyhow::Result<String> {
    let all: Value =
        serde_json::from_str(&read(&options.file)?).with_context(|| format!("{} is no JSON", options.file.display()))?;
    let figures = render(&all)?;
    let Some(path) = &options.into else { return Ok(figures) };
    std::fs::write(path, put(&read(path)?, &figures)?).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(format!("{} has the figures of {}", path.display(), options.file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_replace_figures_and_nothing_else() {
        let all = json!({
            "format_version": "1", "at": "2026-01-02T03:04:05Z",
            "machine": { "cores": 2, "processor": "a processor", "memory_mb": 24_000, "kernel": "6.1", "load_before": "0.1" },
            "benches": {
                "wire": { "results": { "join_wire_bytes": 380, "big": 1_234_567 }, "reach": { "join_wire_bytes": "≤ 420" }, "seconds": 3 },
                "control": { "results": { "growth": -1_234.5 }, "seconds": 1 },
                "churn": { "measured": { "enforced_p99": 12.3456 }, "thresholds": ["enforced_p99<250ms"], "violations": ["bad"], "seconds": 90 },
            },
            "failed": { "packets": "no root" },
        });
        let figures = render(&all).unwrap();
        for words in [
            "2 cores (a processor), 24,000 MB, Linux 6.1",
            "| join_wire_bytes | 380 | ≤ 420 |",
            "| big | 1,234,567 |  |",
            "| growth | -1,235 |  |",
            "| enforced_p99 | 12.35 | ≤ 250ms |",
            "**bad**",
            "**packets failed: no root**",
        ] {
            assert!(figures.contains(words), "{words} is not in\n{figures}");
        }
        let page = include_str!("../../../BENCHMARKS.md");
        let (once, twice) = (put(page, &figures).unwrap(), put(&put(page, "other").unwrap(), &figures).unwrap());
        assert_eq!(once, twice);
        assert!(once.starts_with(page.split_once(BEGIN).unwrap().0) && once.ends_with(page.rsplit_once(END).unwrap().1));
        assert_eq!(put(&format!("{page}{END}"), &figures).unwrap().matches(END).count(), 1, "one that was left behind goes");
        assert!(put("nothing", &figures).is_err());
        assert!(render(&json!({ "format_version": "2" })).is_err());
    }
}
