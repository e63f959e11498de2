//! `./quickstart` as a person runs it: twice, after it was killed, and with the bus's usual port taken.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use groupcast_tests::control::{agent_binary, binary};
use groupcast_tests::field::possible;
use groupcast_tests::gateway::Folder;
use groupcast_tests::world::DEADLINE;
use serde_json::Value;

fn quickstart(data: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../quickstart"));
    assert_eq!(binary().parent(), agent_binary().parent(), "both are built in one place");
    command.args(arguments).env("GROUPCAST_BIN_DIR", binary().parent().expect("a folder")).env("GROUPCAST_DATA", data);
    command.stdin(Stdio::null());
    command
}

fn steps(output: &Output) -> Vec<Value> {
    let words = || format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {}", output.status, words());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// The story, to its end, with everything as it must be.
fn told(data: &Path, packets: bool) {
    let steps = steps(&quickstart(data, &["--exit", "--json"]).output().expect("it runs"));
    let (end, steps) = steps.split_last().expect("an end");
    assert_eq!((&end["step"], &end["ok"], &end["packets"]), (&"end".into(), &true.into(), &packets.into()), "{end}");
    for step in steps {
        assert_eq!((&step["format_version"], &step["ok"]), (&"1".into(), &true.into()), "{step}");
    }
    let names: Vec<&str> = steps.iter().filter_map(|step| step["step"].as_str()).collect();
    let expected = [
        "up",
        "hosts",
        "refused",
        "plan",
        "apply",
        "connects",
        "still-refused",
        "explain",
        "explain-denied",
        "live",
        "revoke",
        "cut",
        "refused-again",
        "undo",
        "connects-again",
    ];
    let expected: Vec<&str> = expected.into_iter().filter(|name| packets || !["live", "cut"].contains(name)).collect();
    assert_eq!(names, expected);
    for timed in ["up", "hosts", "apply", "revoke", "undo"] {
        let step = steps.iter().find(|step| step["step"] == timed).expect("there");
        assert!(step["ms"].as_f64().is_some_and(|ms| ms > 0.0), "{step}");
    }
}

/// Runs until it stays up.
fn staying(data: &Path) -> Child {
    let mut child = quickstart(data, &[]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let stays =
        lines.by_ref().map_while(Result::ok).any(|line| line.contains("a real connection") || line.contains("get changes"));
    assert!(stays, "it ended: {:?}", child.try_wait());
    // Read on, so that it never writes into a closed pipe.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

/// Whether something of it still runs.
fn runs(data: &Path) -> Vec<String> {
    let shown = data.display().to_string();
    let processes = std::fs::read_dir("/proc").expect("proc").flatten();
    let lines = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).filter(|line| line.contains(&shown)).collect()
}

fn gone(data: &Path) {
    let start = Instant::now();
    while !runs(data).is_empty() {
        assert!(start.elapsed() < DEADLINE, "left behind: {:?}", runs(data));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_story_is_told_twice_after_a_kill_and_with_the_usual_port_taken() {
    if !possible() {
        return;
    }
    let folder = Folder::new("quickstart");
    let data = folder.0.join("data");
    // Held to the end, by us or by whoever has it already.
    let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 4222));
    told(&data, true);
    gone(&data);
    told(&data, true);
    gone(&data);

    // Killed while it stays up: nothing of it lives on, and it starts again.
    let mut child = staying(&data);
    assert!(runs(&data).len() >= 6, "bus, gateway, agents: {:?}", runs(&data));
    // Nobody else runs in the same folder meanwhile.
    let second = quickstart(&data, &["--exit", "--json"]).output().expect("it runs");
    assert!(!second.status.success() && String::from_utf8_lossy(&second.stderr).contains("another one runs"), "{second:?}");
    child.kill().expect("it lives");
    child.wait().expect("it ends");
    gone(&data);
    told(&data, true);
    gone(&data);

    // Ctrl-C cleans up.
    let mut child = staying(&data);
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(interrupted.success() && child.wait().expect("it ends").success());
    gone(&data);
}

#[test]
fn without_root_it_runs_dry_and_says_so() {
    if !possible() {
        return;
    }
    let folder = Folder::new("dry");
    let data = folder.0.join("data");
    std::fs::create_dir_all(&data).expect("made");
    // Somebody who may nothing: the binaries must be readable, and so they are looked at where a test keeps things.
    let bin = folder.0.join("bin");
    std::fs::create_dir_all(&bin).expect("made");
    for from in [binary(), agent_binary()] {
        std::fs::copy(from, bin.join(from.file_name().expect("a name"))).expect("copied");
    }
    let server = std::env::var("GROUPCAST_NATS_SERVER")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../.nats-server/nats-server").into());
    std::fs::copy(server, bin.join("nats-server")).expect("copied");
    let all = Command::new("chown").args(["-R", "65534:65534"]).arg(&folder.0).status().expect("chown runs");
    assert!(all.success());
    let output = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"])
        .arg(bin.join("groupcast"))
        .args(["up", "--demo", "--exit", "--json", "--data"])
        .arg(&data)
        .env("GROUPCAST_NATS_SERVER", bin.join("nats-server"))
        .current_dir(&folder.0)
        .output()
        .expect("it runs");
    let steps = steps(&output);
    let end = steps.last().expect("an end");
    assert_eq!((&end["ok"], &end["packets"]), (&true.into(), &false.into()), "{end}");
    assert!(steps.iter().any(|step| step["outcome"].as_str().is_some_and(|words| words.contains("WITHOUT ROOT"))));
    gone(&data);
}
