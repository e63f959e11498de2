//! Small fleets from end to end: they end well, and a bug put in on purpose is caught, by the checker that is meant for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A leader is deposed, deltas are lost, and the deposed leader's are published.
const SCENARIO: &str = r#"
name = "bugs"
about = "What a bug would show in."
hosts = 40
kernels = 10
controllers = 2
lease = "600ms"
reconnect_jitter = "200ms"
settle = "60s"
thresholds = ["violations<0", "bytes_unneeded<0"]

[topology]
groups_per_host = 6
span_mean = 4
span_max = 20
groups_of_all = 1
members = 5
rules = 2
references_percent = 30
spaces = 4
groups_per_space = 1

[[phase]]
name = "load"
duration = "8s"
members_per_s = 60
rules_per_s = 30
hot_every = "1s"
workloads_per_s = 2

[[fault]]
kind = "kill-leader"
at = "500ms"

[[fault]]
kind = "lose-deliveries"
at = "1s"
lasts = "5s"
loss = 15

[[fault]]
kind = "delay-hosts"
at = "2s"
lasts = "1s"
delay = "30ms"
percent = 50

[[fault]]
kind = "crash-hosts"
at = "3s"
percent = 20

[[fault]]
kind = "stale-leader"
at = "7s"
"#;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("groupcast-fleets-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary is of another package, so it is where the build left it, or where one says.
fn groupcast() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_BIN_EXE_groupcast-sim")).with_file_name("groupcast");
    let path = std::env::var_os("GROUPCAST_BIN").map_or(beside, Into::into);
    if !path.exists() {
        eprintln!("not run: no groupcast at {}", path.display());
        return None;
    }
    Some(path)
}

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_groupcast-sim"))
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .expect("groupcast-sim runs")
}

/// Runs it; whether it ended well, and its summary.
fn run(folder: &Folder, binary: &Path, more: &[&str]) -> (bool, Value) {
    let (scenario, binary) = (folder.0.join("bugs.toml"), binary.display().to_string());
    std::fs::write(&scenario, SCENARIO).expect("written");
    let mut arguments = vec!["run", scenario.to_str().expect("text"), "--json", "--groupcast", &binary];
    arguments.extend(more);
    let output = sim(&arguments);
    let text = String::from_utf8(output.stdout).expect("text");
    (output.status.success(), serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}")))
}

#[test]
fn a_fleet_that_suffers_ends_well_and_is_reported() {
    let Some(binary) = groupcast() else { return };
    let folder = Folder::new("well");
    let out = folder.0.join("out").display().to_string();
    let (well, summary) = run(&folder, &binary, &["--out", &out, "--threshold", "changes>100"]);
    assert!(well, "{summary:#}");
    let measured = &summary["measured"];
    for name in ["changes", "arrivals", "deliveries", "deliveries_lost", "deployed", "enforced_p50", "back_max", "bytes_per_host"]
    {
        assert!(measured[name].as_f64() > Some(0.0), "{name}: {measured:#}");
    }
    // What was lost and what was forged was noticed, and repaired.
    assert!(summary["incidents"]["gap"].as_u64().or(summary["incidents"]["incomplete"].as_u64()) > Some(0), "{summary:#}");
    assert!(summary["incidents"]["lower_term"].as_u64() > Some(0), "{summary:#}");
    assert_eq!(summary["faults"].as_array().map(Vec::len), Some(5));
    let page = std::fs::read_to_string(Path::new(&out).join("report.html")).expect("a page");
    assert!(page.contains("All 40 hosts ended equal") && page.contains("crash-hosts") && !page.contains("http"), "{page}");
    assert!(std::fs::read_to_string(Path::new(&out).join("enforced.hdr")).expect("a log").contains("Tag=load"));
    let compared = sim(&["compare", &out, &out]);
    let text = String::from_utf8(compared.stdout).expect("text");
    assert!(compared.status.success() && text.contains("enforced_p99") && text.contains("1.000"), "{text}");
    let broken = sim(&["compare", &out, "nowhere"]);
    assert!(!broken.status.success());
}

#[test]
fn a_threshold_that_is_broken_ends_it_with_one() {
    let Some(binary) = groupcast() else { return };
    let folder = Folder::new("broken");
    let (well, summary) = run(&folder, &binary, &["--duration", "3s", "--threshold", "enforced_p99<0.001ms"]);
    assert!(!well && summary["broken"].as_array().map(Vec::len) == Some(1), "{summary:#}");
    assert!(summary["violations"].as_array().is_some_and(Vec::is_empty), "{summary:#}");
}

/// What is left out at the hosts, and what the checker that notices says.
fn is_caught(missing: &str, words: &str) {
    let Some(binary) = groupcast() else { return };
    let folder = Folder::new(missing);
    let (well, summary) = run(&folder, &binary, &["--sabotage", missing, "--set", "settle=5s"]);
    assert!(!well, "{missing} is not missed: {summary:#}");
    let violations = summary["violations"].as_array().cloned().unwrap_or_default();
    let said = violations.iter().filter_map(Value::as_str).find(|said| said.contains(words));
    let said = said.unwrap_or_else(|| panic!("nobody says {words:?}: {violations:#?}"));
    // Time, host and topic; the seed stands beside.
    assert!(said.starts_with("at ") && said.contains("host-000") && summary["seed"] == 1, "{said}");
    eprintln!("{missing}: {said}");
}

#[test]
fn a_lost_delta_that_is_ignored_is_caught() {
    is_caught("gap", "at once");
}

#[test]
fn a_companion_that_is_not_waited_for_is_caught() {
    is_caught("companions", "the change is there in part");
}

#[test]
fn a_deposed_leader_that_is_believed_is_caught() {
    is_caught("term", "at once");
}

/// Every fault there is, with real agents and real packets among it; long enough to show something only with the large counts.
#[test]
fn chaos_is_survived() {
    let (Some(binary), true) = (groupcast(), std::env::var_os("GROUPCAST_FULL").is_some()) else {
        eprintln!("not run: only with the large counts");
        return;
    };
    let binary = binary.display().to_string();
    let agent = Path::new(env!("CARGO_BIN_EXE_groupcast-sim")).with_file_name("groupcast-agent");
    let agent = std::env::var_os("GROUPCAST_AGENT_BIN").map_or(agent, Into::into);
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    let agents = if is_root && agent.exists() { "agents=2" } else { "agents=0" };
    let agent = agent.display().to_string();
    let output =
        sim(&["run", "chaos", "--json", "--duration", "120s", "--set", agents, "--groupcast", &binary, "--agent", &agent]);
    let summary: Value = serde_json::from_slice(&output.stdout).expect("a summary");
    assert!(output.status.success(), "{summary:#}");
    assert_eq!(summary["measured"]["violations"].as_f64(), Some(0.0));
}
