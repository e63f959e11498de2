//! The agent as a process: a real bus, a real kernel, a network namespace of its own.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_enforce::trial::{self, Stage};
use groupcast_host::state::State;
use groupcast_policy::doc::Edit;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target, Workload};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::Proposal;
use groupcast_topics::nats::{NodeHandle, compiled, spawn_node};
use groupcast_topics::node;
use nix::sched::{CloneFlags, unshare};

const DEADLINE: Duration = Duration::from_secs(60);

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A folder and an agent in it, both gone at the end, also of a failed test.
struct Agent {
    folder: PathBuf,
    process: Option<Child>,
}

impl Agent {
    fn new(servers: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("groupcast-agent-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut config = std::fs::File::create(folder.join("agent.toml")).unwrap();
        writeln!(config, "host = 'h0'\nservers = ['{servers}']\nclaims = ['gcw*']").unwrap();
        writeln!(config, "state = '{0}/state'\nsocket = '{0}/agent.sock'", folder.display()).unwrap();
        Self { folder, process: None }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_groupcast-agent"));
        command.arg("--config").arg(self.folder.join("agent.toml")).args(arguments);
        command
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log")).unwrap();
        self.process = Some(self.command(&["run"]).stderr(log).stdout(Stdio::null()).spawn().unwrap());
        eventually("the agent answers", || self.ask(&["status"]).status.success());
    }

    fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// What should be in the kernel, if it is what is there.
    fn ruleset(&self) -> Option<String> {
        let output = self.ask(&["ruleset"]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn status(&self) -> serde_json::Value {
        serde_json::from_slice(&self.ask(&["status"]).stdout).unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.folder.join("log")).unwrap_or_default());
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

async fn lead(server: &Server) -> NodeHandle {
    let options = Options::new(&[server.url()], Role::Controller, &HostId::new("c1").unwrap());
    let (client, events) = connect::connect(options).await.unwrap();
    streams::ensure(&client, 1).await.unwrap();
    let settings = node::Settings { name: "c1".into(), ..Default::default() };
    let node = spawn_node(client, events, settings, 1, 1, Box::new(|| compiled(node::Desired::default())));
    let start = Instant::now();
    while node.leading().borrow().is_none() {
        assert!(start.elapsed() < DEADLINE, "nobody leads");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    node
}

struct Writer {
    stage: Stage,
    node: NodeHandle,
    runtime: tokio::runtime::Runtime,
    number: u64,
}

impl Writer {
    fn write(&mut self, events: &[Event]) {
        self.number += 1;
        let edits: Vec<(Topic, Edit)> =
            self.stage.change(events).into_iter().filter_map(|(topic, edit)| Some((topic, edit?))).collect();
        let proposal = Proposal { number: self.number, change: self.number, catalog: self.number, edits, ..Default::default() };
        self.runtime.block_on(self.node.propose(proposal)).unwrap();
    }
}

fn web(members: &[&str]) -> Event {
    let members: BTreeSet<Prefix> = members.iter().map(|text| Prefix::host(text.parse().unwrap())).collect();
    let rule = GroupRule::from(parse_rule("ingress tcp 443 from group:g0").unwrap());
    let binding = Binding { target: Target::Global, phases: groupcast_policy::doc::Phases::BOTH };
    Event::group(Group { rules: vec![rule], bindings: vec![binding], members, ..Group::new(trial::group_id(0)) })
}

fn place() -> Event {
    let addresses = [Family::V4, Family::V6].map(|family| Prefix::host(trial::address(0, family))).into();
    Event::workload(Workload { addresses, ..Workload::new(trial::workload_id(0), trial::host(), "n0".parse().unwrap()) })
}

fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().unwrap();
    assert!(output.status.success(), "nft {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What holds the policy, and the other way round: change by change into the kernel; killed, the kernel keeps it; without the bus, the
/// disk knows it; cleaned up, nobody else's table is touched.
#[test]
fn from_the_bus_into_the_kernel_and_through_every_death() {
    let run = std::thread::spawn(|| {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            eprintln!("not run: no network namespace ({error})");
            return;
        }
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        live();
    });
    run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn live() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let server = runtime.block_on(Server::start(Config::plain())).unwrap();
    let node = runtime.block_on(lead(&server));
    let mut agent = Agent::new(&server.url());
    let mut writer = Writer { stage: Stage::default(), node, runtime, number: 0 };
    nft(&["add", "table", "inet", "neighbour"]);

    writer.write(&[web(&["10.9.9.1"]), place()]);
    agent.start();
    let holds = |agent: &Agent, text: &str| agent.ruleset().is_some_and(|ruleset| ruleset.contains(text));
    // Registered, but attached nowhere: nothing leads to it.
    eventually("the topics arrive", || agent.status()["topics"].as_u64() > Some(2));
    assert!(!holds(&agent, "\"gcw0\""));
    let added = agent.ask(&["workload", "add", "w0", "--interface", "gcw0"]);
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
    assert!(holds(&agent, "\"gcw0\" : goto p_") && holds(&agent, "10.9.9.1"));
    let counters = agent.ask(&["counters"]);
    assert!(String::from_utf8_lossy(&counters.stdout).contains("a_c_g0_in\t0\t0\t0"), "{counters:?}");
    let locked = agent.ask(&["lockdown", "a test"]);
    assert!(locked.status.success() && agent.status()["mode"] == "lockdown" && agent.status()["reason"] == "a test");
    assert!(agent.ask(&["resume", "it is over"]).status.success() && agent.status()["mode"] == "enforce");
    // Frozen, nothing changes; thawed, everything that was missed is made good.
    assert!(agent.ask(&["freeze", "a test"]).status.success());
    writer.write(&[web(&["10.9.9.1", "10.9.9.3"])]);
    let number = writer.number;
    eventually("the frozen agent hears", || agent.status()["heard_change"].as_u64() == Some(number));
    assert!(!holds(&agent, "10.9.9.3") && agent.status()["change"].as_u64() < Some(number));
    assert!(agent.ask(&["resume", "it is over"]).status.success());
    eventually("a thawed agent makes good", || holds(&agent, "10.9.9.3"));
    let refused = agent.ask(&["workload", "add", "w1", "--interface", "eth0"]);
    assert_eq!(refused.status.code(), Some(0), "not registered yet, so nothing to refuse");

    writer.write(&[web(&["10.9.9.1", "10.9.9.2"])]);
    eventually("a member joins", || holds(&agent, "10.9.9.2"));
    writer.write(&[web(&["10.9.9.2"])]);
    eventually("a member leaves", || agent.ruleset().is_some_and(|ruleset| !ruleset.contains("10.9.9.1")));
    let change = writer.number;
    eventually("the change is in force", || agent.status()["change"].as_u64() == Some(change));

    // Killed: the kernel keeps everything; with nobody on the bus, the disk knows everything.
    let saved = |path: &Path| {
        let held = State::read(path).ok().flatten().and_then(|state| {
            let members = state.documents.get(&Topic::Members(trial::group_id(0)))?.members()?;
            let holds = |text: &str| members.holds(Prefix::host(text.parse().unwrap()));
            Some(holds("10.9.9.2") && !holds("10.9.9.1") && !state.facts.attachments.is_empty())
        });
        held.unwrap_or_default()
    };
    let path = agent.folder.join("state");
    eventually("the state is on disk", || saved(&path));
    let before = agent.status()["stamp"].clone();
    agent.kill();
    // Not the whole table: nft 1.0.6 aborts on a look-up in two steps.
    assert!(nft(&["list", "set", "inet", "gc", "m4_g0"]).contains("10.9.9.2"), "the table is gone with the agent");
    drop(server);
    agent.start();
    assert!(holds(&agent, "\"gcw0\" : goto p_") && holds(&agent, "10.9.9.2"));
    let status = agent.status();
    assert_eq!((&status["stamp"], status["transactions"].as_u64()), (&before, Some(0)), "a restart changed something: {status}");

    // Somebody flushes everything while nobody owns it: the boot brings it back.
    agent.kill();
    nft(&["flush", "ruleset"]);
    assert!(agent.ask(&["boot"]).status.success());
    assert!(nft(&["list", "set", "inet", "gc", "m4_g0"]).contains("10.9.9.2"));
    let dry = agent.ask(&["dry-run"]);
    assert!(String::from_utf8_lossy(&dry.stdout).contains("10.9.9.2"));

    // A damaged file is not believed, and claims stay closed.
    std::fs::write(&path, b"nonsense").unwrap();
    assert!(agent.ask(&["cleanup"]).status.success());
    nft(&["add", "table", "inet", "neighbour"]);
    assert!(agent.ask(&["boot"]).status.success());
    let sets = nft(&["list", "sets", "inet"]);
    assert!(sets.contains("gcw*") && !sets.contains("m4_g0"), "{sets}");
    assert!(agent.ask(&["cleanup"]).status.success());
    let tables = nft(&["list", "tables"]);
    assert!(tables.contains("neighbour") && !tables.contains("inet gc"), "{tables}");
}
