//! All benchmarks and the fleets' scenarios, one after the other, each as a process of its own: what one leaves behind, in memory or in
//! descriptors, is not measured with the next.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde_json::{Map, Value, json};

use super::say;

pub const FORMAT_VERSION: &str = "1";
/// Nothing takes longer than this on a slow machine.
const DEADLINE: Duration = Duration::from_secs(3_600);

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Only these, separated by commas.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// All but these, separated by commas.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// At sizes that show that everything runs, and nothing else.
    #[arg(long)]
    small: bool,
}

/// One of them: its name, its command line, and the same at a small size.
struct Entry {
    name: &'static str,
    command: &'static [&'static str],
    small: &'static [&'static str],
}

const ENTRIES: [Entry; 14] = [
    Entry { name: "wire", command: &["bench", "wire"], small: &["bench", "wire"] },
    Entry { name: "compile", command: &["bench", "compile"], small: &["bench", "compile"] },
    Entry {
        name: "fanout",
        command: &["bench", "fanout", "--hosts", "10000"],
        small: &["bench", "fanout", "--hosts", "10", "--rounds", "2"],
    },
    Entry {
        name: "fanout-1000",
        command: &["bench", "fanout", "--hosts", "1000"],
        small: &["bench", "fanout", "--hosts", "5", "--rounds", "2"],
    },
    Entry {
        name: "join",
        command: &["bench", "join"],
        small: &["bench", "join", "--hosts", "10", "--topics", "20", "--rounds", "1"],
    },
    Entry {
        name: "control",
        command: &["bench", "control"],
        small: &["bench", "control", "--singles", "5", "--burst", "50", "--rounds", "1", "--lease-ms", "500"],
    },
    Entry {
        name: "e2e",
        command: &["bench", "e2e"],
        small: &["bench", "e2e", "--puts", "3", "--applies", "3", "--read-seconds", "1"],
    },
    Entry { name: "enforce", command: &["bench", "enforce"], small: &["bench", "enforce"] },
    Entry { name: "packets", command: &["bench", "packets"], small: &["bench", "packets"] },
    Entry {
        name: "register",
        command: &["bench", "register"],
        small: &["bench", "register", "--hosts", "20", "--steady-seconds", "2"],
    },
    Entry { name: "source", command: &["bench", "source"], small: &["bench", "source", "--groups", "300", "--rounds", "3"] },
    Entry {
        name: "hot-group",
        command: &["run", "hot-group"],
        small: &["run", "hot-group", "--set", "hosts=100", "--duration", "6s"],
    },
    Entry {
        name: "churn",
        command: &["run", "churn"],
        small: &[
            "run",
            "churn",
            "--set",
            "hosts=100",
            "--set",
            "phase.0.members_per_s=20",
            "--set",
            "phase.1.members_per_s=20",
            "--duration",
            "6s",
        ],
    },
    Entry {
        name: "join-storm",
        command: &["run", "join-storm"],
        small: &["run", "join-storm", "--set", "hosts=100", "--set", "reconnect_jitter=1s"],
    },
];

/// The machine that everything ran on.
fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory_kb: u64 =
        field(&read("/proc/meminfo"), "MemTotal").split_whitespace().next().and_then(|kb| kb.parse().ok()).unwrap_or(0);
    let load = read("/proc/loadavg").split_whitespace().next().map(str::to_owned).unwrap_or_default();
    json!({
        "cores": cores, "processor": field(&read("/proc/cpuinfo"), "model name"), "memory_mb": memory_kb / 1024,
        "kernel": read("/proc/sys/kernel/osrelease").trim(), "load_before": load,
    })
}

/// Runs it to its end; the JSON object it prints. A fleet that broke a threshold prints one too.
fn one(arguments: &[&str]) -> anyhow::Result<Value> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .arg("--json")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("this program runs")?;
    let mut output = child.stdout.take().context("its output")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        output.read_to_string(&mut text).map(|_| text)
    });
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > DEADLINE {
            child.kill()?;
            child.wait()?;
            bail!("it did not end within {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = reader.join().map_err(|_| anyhow::anyhow!("its output could not be read"))??;
    match serde_json::from_str::<Value>(text.trim()) {
        Ok(mut report) => {
            report["seconds"] = json!(begun.elapsed().as_secs());
            Ok(report)
        }
        Err(_) => bail!("it ended with {status} and printed no result"),
    }
}

/// Everything as one object: `{"format_version", "at", "machine", "benches": {NAME: what it printed}, "failed": {NAME: why}}`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let names: Vec<&str> = ENTRIES.iter().map(|entry| entry.name).collect();
    for name in options.only.iter().chain(&options.skip) {
        ensure!(names.contains(&name.as_str()), "there is no {name:?}: {}", names.join(", "));
    }
    let chosen = |name: &str| {
        (options.only.is_empty() || options.only.iter().any(|only| only == name)) && !options.skip.iter().any(|skip| skip == name)
    };
    let (at, machine) = (humantime::format_rfc3339_seconds(SystemTime::now()).to_string(), machine());
    let (mut benches, mut failed) = (Map::new(), Map::new());
    for entry in ENTRIES.iter().filter(|entry| chosen(entry.name)) {
        let arguments = if options.small { entry.small } else { entry.command };
        say(format_args!("== {}", arguments.join(" ")));
        match one(arguments) {
            Ok(mut report) => {
                report["command"] = json!(arguments.join(" "));
                benches.insert(entry.name.to_owned(), report);
            }
            Err(error) => {
                say(format_args!("{} failed: {error:#}", entry.name));
                failed.insert(entry.name.to_owned(), json!(format!("{error:#}")));
            }
        }
    }
    Ok(json!({ "format_version": FORMAT_VERSION, "at": at, "machine": machine, "benches": benches, "failed": failed }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_names_what_is_not_there_is_told_what_is() {
        let options = Options { only: vec!["wires".into()], skip: Vec::new(), small: true };
        assert!(run(&options).unwrap_err().to_string().contains("wire, compile"));
    }

    /// The page says of each how it is measured.
    #[test]
    fn every_benchmark_is_described() {
        let page = include_str!("../../../BENCHMARKS.md");
        for entry in &ENTRIES {
            assert!(page.contains(&format!("### {}\n", entry.name)), "{} is not described in BENCHMARKS.md", entry.name);
        }
    }

    #[test]
    fn the_machine_says_what_it_is() {
        let machine = machine();
        assert!(machine["cores"].as_u64() > Some(0) && machine["memory_mb"].as_u64() > Some(0), "{machine}");
    }
}
