//! Every benchmark at a small size: it runs to its end and prints one JSON object with the keys it promises.

use std::process::{Command, Stdio};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_groupcast-sim"))
        .arg("bench")
        .args(arguments)
        .arg("--json")
        .stderr(Stdio::inherit())
        .output()
        .expect("groupcast-sim runs");
    assert!(output.status.success(), "{arguments:?} ended with {}", output.status);
    let text = String::from_utf8(output.stdout).expect("text");
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"));
    assert_eq!(report["format_version"], "1");
    assert_eq!(report["bench"], arguments[0]);
    report["results"].clone()
}

/// The named results, which must all be numbers.
fn numbers<const N: usize>(results: &Value, names: [&str; N]) -> [f64; N] {
    names.map(|name| results[name].as_f64().unwrap_or_else(|| panic!("no number {name} in {results}")))
}

#[test]
fn wire_reaches_its_figures() {
    let results = bench(&["wire"]);
    let names = [
        "join_payload_bytes",
        "join_wire_bytes",
        "snapshot_dense_10k_bytes",
        "snapshot_scattered_10k_bytes",
        "snapshot_dense_v6_10k_bytes",
    ];
    // Bytes do not depend on the machine: what is promised is asserted.
    let reach = [48.0, 420.0, 20_000.0, 50_000.0, 40_000.0];
    for ((found, at_most), name) in numbers(&results, names).into_iter().zip(reach).zip(names) {
        assert!(found > 0.0 && found <= at_most, "{name}: {found}, at most {at_most}");
    }
}

#[test]
fn fanout_measures_both_kinds_of_rounds() {
    let results = bench(&["fanout", "--hosts", "10", "--rounds", "2"]);
    let names = ["hosts", "raw_last_ms_p50", "raw_last_ms_p99", "ours_last_ms_p50", "ours_last_ms_p99", "ratio"];
    assert_eq!(results["hosts"], 10);
    assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
}

#[test]
fn join_measures_both_ways() {
    let results = bench(&["join", "--hosts", "10", "--topics", "20", "--rounds", "1"]);
    let names = ["hosts", "topics", "bytes_per_host", "ours_ms", "direct_get_ms", "ratio", "synced_ms"];
    assert_eq!((&results["hosts"], &results["topics"]), (&10.into(), &20.into()));
    assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
}

/// The binary is of another package, so it is where the build left it, or where one says.
#[test]
fn register_leaves_no_orphans() {
    let beside = std::path::Path::new(env!("CARGO_BIN_EXE_groupcast-sim")).with_file_name("groupcast");
    let path = std::env::var_os("GROUPCAST_BIN").map_or(beside, Into::into);
    if !path.exists() {
        eprintln!("not run: no groupcast at {}", path.display());
        return;
    }
    let binary = path.display().to_string();
    let results =
        bench(&["register", "--hosts", "40", "--steady-seconds", "3", "--churn-percent", "100", "--groupcast", &binary]);
    let names = ["all_registered_ms", "p99_ms", "peak_queue", "controller_rss_mb"];
    assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
    numbers(&results, ["cpu_percent", "rss_growth_mb"]);
    assert_eq!(results["orphans"], 0, "{results}");
}

/// The agent is of another package, so it is where the build left it, or where one says.
fn agent() -> Option<std::path::PathBuf> {
    let beside = std::path::Path::new(env!("CARGO_BIN_EXE_groupcast-sim")).with_file_name("groupcast-agent");
    let path = std::env::var_os("GROUPCAST_AGENT_BIN").map_or(beside, Into::into);
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    if !is_root || !path.exists() {
        eprintln!("not run: no root, or no agent at {}", path.display());
        return None;
    }
    Some(path)
}

/// What the figures are on this machine and build is nobody's promise here; that they are there, and that ours beat `nft`, is.
#[test]
fn enforce_has_the_agent_measure_the_kernel() {
    if agent().is_none() {
        return;
    }
    let results = bench(&["enforce"]);
    let names = [
        "raw_us_p50",
        "ours_us_p50",
        "ratio",
        "ours_100k_us_p50",
        "leave_us_p50",
        "workload_add_us_p50",
        "nft_cli_us_p50",
        "full_load_ms",
        "rss_mb",
    ];
    assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
    let [ours, cli] = numbers(&results, ["ours_us_p50", "nft_cli_us_p50"]);
    assert!(ours < cli, "{results}");
}

#[test]
fn packets_has_the_agent_measure_the_kernel() {
    if agent().is_none() {
        return;
    }
    let results = bench(&["packets"]);
    let names = [
        "none_pps",
        "ours_pps",
        "ratio",
        "judged_ratio",
        "iptables_ratio",
        "iptables_judged_ratio",
        "rules_in_kernel",
        "iptables_rules",
    ];
    assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
    let [ours, theirs] = numbers(&results, ["rules_in_kernel", "iptables_rules"]);
    assert!(ours < theirs && theirs > 10_000.0, "{results}");
}

#[test]
fn a_table_goes_to_people() {
    let output = Command::new(env!("CARGO_BIN_EXE_groupcast-sim")).args(["bench", "wire"]).output().expect("groupcast-sim runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.contains("join_wire_bytes") && text.contains("≤ 420"), "{text}");
}

#[test]
fn source_measures_polls_of_all_kinds() {
    let results = bench(&["source", "--groups", "300", "--rounds", "3"]);
    let names = ["full_sync_ms", "full_sync_unchanged_ms", "noop_poll_ms", "one_group_changed_ms", "rss_mb"];
    assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
    // Where there are namespaces and the other programs, also until a kernel has it.
    if results.get("change_to_enforced_ms_p50").is_some() {
        let names = ["change_to_enforced_ms_p50", "told_to_enforced_ms_p50"];
        assert!(numbers(&results, names).into_iter().all(|found| found > 0.0), "{results}");
    }
    // Requests do not depend on the machine.
    assert_eq!(
        (&results["groups"], &results["noop_requests"], &results["full_sync_changes"]),
        (&300.into(), &1.into(), &1.into())
    );
}

/// Each as a process of its own, all of it one object, and that object as a page.
#[test]
fn all_become_one_object_and_a_page() {
    let sim = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_groupcast-sim"));
        command.args(arguments).stderr(Stdio::inherit()).output().expect("groupcast-sim runs")
    };
    let output = sim(&["bench", "all", "--small", "--only", "wire,fanout", "--json"]);
    assert!(output.status.success());
    let all: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!(all["benches"]["wire"]["reach"]["join_wire_bytes"], "≤ 420", "{all}");
    assert_eq!(all["benches"]["fanout"]["results"]["hosts"], 10, "{all}");
    let file = std::env::temp_dir().join(format!("groupcast-figures-{}.json", std::process::id()));
    std::fs::write(&file, &output.stdout).expect("written");
    let page = sim(&["bench", "page", file.to_str().expect("text")]);
    std::fs::remove_file(&file).expect("removed");
    let text = String::from_utf8(page.stdout).expect("text");
    assert!(page.status.success() && text.contains("| join_wire_bytes |") && text.contains("#### fanout"), "{text}");
}
