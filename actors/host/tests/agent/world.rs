//! A network namespace with a bus in it, a leader that writes topics, and an agent as a process. All of it is gone at the end, also of
//! a failed test.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::{streams, subjects};
use groupcast_enforce::trial::{self, Stage};
use groupcast_messages::{Companions, Cut, Delta};
use groupcast_policy::doc::{Edit, Phases};
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target, Workload};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::Proposal;
use groupcast_topics::nats::{Client, NodeHandle, compiled, spawn_node};
use groupcast_topics::node;
use nix::sched::{CloneFlags, unshare};

pub const DEADLINE: Duration = Duration::from_secs(60);

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs in a fresh network namespace with loopback up; says so where that is not allowed.
pub fn isolated(test: impl FnOnce() + Send + 'static) {
    let run = std::thread::spawn(move || {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            eprintln!("not run: no network namespace ({error})");
            return;
        }
        ip("link set lo up");
        test();
    });
    run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// The same with a bus, a leader and an agent that is not started yet.
pub fn with_world(test: impl FnOnce(World) + Send + 'static) {
    isolated(|| test(World::new()));
}

pub fn ip(arguments: &str) {
    run("ip", &arguments.split(' ').collect::<Vec<_>>());
}

/// An interface with nobody behind it.
pub fn interface(name: &str) {
    ip(&format!("link add {name} type veth peer name v{name}"));
}

pub fn nft(text: &str) -> String {
    run("nft", &[text])
}

pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A folder and an agent in it.
pub struct Agent {
    pub folder: PathBuf,
    process: Option<Child>,
    environment: Vec<(String, String)>,
    /// What runs it, if not we ourselves.
    pub runner: Vec<String>,
}

impl Agent {
    pub fn new(servers: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("groupcast-agent-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut config = std::fs::File::create(folder.join("agent.toml")).unwrap();
        writeln!(config, "host = 'h0'\nservers = ['{servers}']\nclaims = ['gcw*']").unwrap();
        writeln!(config, "state = '{0}/state'\nsocket = '{0}/agent.sock'", folder.display()).unwrap();
        Self { folder, process: None, environment: Vec::new(), runner: Vec::new() }
    }

    /// The last good state, as the disk has it.
    pub fn state(&self) -> Option<groupcast_host::state::State> {
        groupcast_host::state::State::read(&self.folder.join("state")).ok().flatten()
    }

    /// Another line of `agent.toml`.
    pub fn configure(&self, line: &str) {
        let mut config = std::fs::File::options().append(true).open(self.folder.join("agent.toml")).unwrap();
        writeln!(config, "{line}").unwrap();
    }

    pub fn environment(&mut self, name: &str, value: &str) {
        self.environment.push((name.into(), value.into()));
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_groupcast-agent"));
        command.arg("--config").arg(self.folder.join("agent.toml")).args(arguments);
        command
    }

    pub fn ask(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Asks for something that must succeed.
    pub fn does(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", words(&output));
        words(&output)
    }

    pub fn spawn(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log")).unwrap();
        let mut command = self.command(&["run"]);
        if let [runner, arguments @ ..] = &self.runner[..] {
            let agent = command;
            command = Command::new(runner);
            command.args(arguments).arg(agent.get_program()).args(agent.get_args());
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        self.process = Some(command.stderr(log).stdout(Stdio::null()).spawn().unwrap());
    }

    pub fn start(&mut self) {
        self.spawn();
        eventually("the agent answers", || self.ask(&["status"]).status.success());
    }

    pub fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Of its process.
    pub fn id(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Asks it to end, as a service manager does.
    pub fn stop(&mut self) {
        let mut process = self.process.take().unwrap();
        run("kill", &["-TERM", &process.id().to_string()]);
        assert!(process.wait().unwrap().success());
    }

    /// What should be in the kernel, if it is what is there.
    pub fn ruleset(&self) -> Option<String> {
        let output = self.ask(&["ruleset"]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn holds(&self, text: &str) -> bool {
        self.ruleset().is_some_and(|ruleset| ruleset.contains(text))
    }

    pub fn status(&self) -> serde_json::Value {
        let output = self.ask(&["status"]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", words(&output)))
    }

    pub fn number(&self, name: &str) -> u64 {
        let status = self.status();
        status[name].as_u64().unwrap_or_else(|| panic!("{name} in {status}"))
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

pub struct World {
    pub agent: Agent,
    pub stage: Stage,
    /// Leads and answers, as long as it is there.
    node: Option<NodeHandle>,
    /// As a controller has it.
    pub client: Client,
    pub number: u64,
    pub server: Option<Server>,
    pub runtime: tokio::runtime::Runtime,
}

impl World {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(Server::start(Config::plain())).unwrap();
        let (node, client) = runtime.block_on(lead(&server));
        let agent = Agent::new(&server.url());
        Self { agent, stage: Stage::default(), node: Some(node), client, number: 0, server: Some(server), runtime }
    }

    /// One change.
    pub fn write(&mut self, events: &[Event]) {
        let edits = self.edits(events);
        let proposal = Proposal { number: self.number, change: self.number, catalog: self.number, edits, ..Default::default() };
        self.runtime.block_on(self.node.as_ref().unwrap().propose(proposal)).unwrap();
    }

    fn edits(&mut self, events: &[Event]) -> Vec<(Topic, Edit)> {
        self.number += 1;
        self.stage.change(events).into_iter().filter_map(|(topic, edit)| Some((topic, edit?))).collect()
    }

    /// One change, of which only this topic is published, as the leader would; and then nobody is there to answer requests.
    pub fn write_unanswered(&mut self, events: &[Event], only: &Topic) {
        let cut = self.cut();
        self.node = None;
        let edits = self.edits(events);
        let others = edits.iter().filter(|(topic, _)| topic != only).map(|(topic, _)| topic.hash64()).collect();
        let (_, edit) = edits.iter().find(|(topic, _)| topic == only).unwrap();
        let digest = self.stage.document(only).unwrap().digest();
        let delta = Delta {
            term: cut.term,
            change: self.number,
            position: 1,
            edit: edit.clone(),
            digest,
            companions: Companions::Listed(others),
            tally: None,
            spread_ms: 0,
        };
        let (client, subject) = (self.client.clone(), subjects::write(only));
        self.runtime.block_on(async {
            client.publish(subject, delta.encode().into()).await.unwrap();
            client.flush().await.unwrap();
        });
    }

    /// Where the agent stands.
    pub fn cut(&self) -> Cut {
        eventually("the agent is in step", || self.agent.status()["heard"]["cut"].is_array());
        let cut = self.agent.status()["heard"]["cut"].clone();
        Cut { term: cut[0].as_u64().unwrap(), lead: cut[1].as_u64().unwrap() }
    }

    /// One change, and waits until it is in force.
    pub fn enforce(&mut self, events: &[Event]) {
        self.write(events);
        let number = self.number;
        eventually("the change is in force", || self.agent.number("change") == number);
    }

    /// The bus is gone, and everybody on it.
    pub fn end_bus(&mut self) {
        self.node = None;
        self.server = None;
    }
}

async fn lead(server: &Server) -> (NodeHandle, Client) {
    let options = || Options::new(&[server.url()], Role::Controller, &HostId::new("c1").unwrap());
    let (client, events) = connect::connect(options()).await.unwrap();
    streams::ensure(&client, 1).await.unwrap();
    let settings = node::Settings { name: "c1".into(), ..Default::default() };
    let node = spawn_node(client, events, settings, 1, 1, Box::new(|| compiled(node::Desired::default())));
    let start = Instant::now();
    while node.leading().borrow().is_none() {
        assert!(start.elapsed() < DEADLINE, "nobody leads");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (client, _) = connect::connect(options()).await.unwrap();
    (node, client)
}

/// A group bound everywhere.
pub fn group(number: u8, rules: &[&str], members: &[&str]) -> Event {
    let members: BTreeSet<Prefix> = members.iter().map(|text| Prefix::host(text.parse().unwrap())).collect();
    let rules = rules.iter().map(|text| GroupRule::from(parse_rule(text).unwrap())).collect();
    let bindings = vec![Binding { target: Target::Global, phases: Phases::BOTH }];
    Event::group(Group { rules, bindings, members, ..Group::new(trial::group_id(number)) })
}

/// A group that is nothing but its members.
pub fn addresses(id: &str, members: &[&str]) -> Event {
    let members = members.iter().map(|text| Prefix::host(text.parse().unwrap())).collect();
    Event::group(Group { members, ..Group::new(GroupId::new(id).unwrap()) })
}

/// A workload on a host.
pub fn place(id: &str, host: &str, address: &str) -> Event {
    let addresses = [Prefix::host(address.parse().unwrap())].into();
    let (id, host) = (WorkloadId::new(id).unwrap(), HostId::new(host).unwrap());
    Event::workload(Workload { addresses, ..Workload::new(id, host, "n0".parse().unwrap()) })
}
