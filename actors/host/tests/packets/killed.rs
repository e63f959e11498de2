//! The agent as a process, with a real bus: killed again and again while changes come in, it lets nothing pass that neither the old nor
//! the new policy allows, and loses no packet that both allow.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_enforce::trial::{self, Dice, Stage, WORKLOADS};
use groupcast_host::orders::Orders;
use groupcast_host::state::State;
use groupcast_policy::doc::Content;
use groupcast_policy::model::Event;
use groupcast_policy::packet::{TCP, UDP};
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::Proposal;
use groupcast_topics::nats::{NodeHandle, compiled, spawn_node};
use groupcast_topics::node;

use crate::Machine;
use crate::rows::{place, rules};
use crate::stage::isolated;
use crate::streams::{Stream, packet, some_lines};

const OUTSIDE: u8 = WORKLOADS;
const DEADLINE: Duration = Duration::from_secs(60);

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Agent {
    folder: PathBuf,
    process: Option<Child>,
}

impl Agent {
    fn new(server: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("groupcast-killed-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let text = format!(
            "host = 'h0'\nservers = ['{server}']\nclaims = ['gcw*']\nstate = '{0}/state'\nsocket = '{0}/agent.sock'\n",
            folder.display()
        );
        std::fs::write(folder.join("agent.toml"), text).unwrap();
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
    }

    fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Whether the kernel holds what it should, and that names this port.
    fn holds(&self, port: u16) -> bool {
        let output = self.ask(&["ruleset"]);
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains(&port.to_string())
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
    let options = Options::new(&[server.url()], Role::Controller, &"c1".parse().unwrap());
    let (client, events) = connect::connect(options).await.unwrap();
    streams::ensure(&client, 1).await.unwrap();
    let settings = node::Settings { name: "c1".into(), ..Default::default() };
    let node = spawn_node(client, events, settings, 1, 1, Box::new(|| compiled(node::Desired::default())));
    let mut leading = node.leading();
    let leads = leading.wait_for(|leads| leads.is_some());
    tokio::time::timeout(DEADLINE, leads).await.expect("nobody leads").unwrap();
    node
}

/// The first of the ports by which changes are recognised.
const MARKERS: u16 = 20_000;

const ALWAYS: [&str; 4] =
    ["egress udp 5001 to any", "ingress udp 5001 from any", "egress tcp 5002 to any", "ingress tcp 5002 from any"];

/// `marker`: a port by which this change is recognised.
fn some_rules(dice: &mut Dice, marker: u16) -> Event {
    let mut lines = ALWAYS.map(String::from).to_vec();
    lines.push(format!("egress udp {marker} to any"));
    let lines = some_lines(dice, lines);
    rules(&lines.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Whether the rules on the disk name this port.
fn on_disk(path: &std::path::Path, port: u16) -> bool {
    let state = State::read(path).ok().flatten();
    let document = state.as_ref().and_then(|state| state.documents.get(&Topic::Rules(trial::group_id(0))));
    match document.and_then(|document| document.content()) {
        Some(Content::Rules(rules)) => rules.rules.values().any(|rule| rule.to_string().contains(&port.to_string())),
        _ => false,
    }
}

/// 500 changes, and every 25th of them finds the agent killed: at a random moment after the change was published, and started again.
#[test]
fn killed_among_500_changes_nothing_passes_and_nothing_is_lost() {
    isolated(|| {
        if std::env::var_os("GROUPCAST_NATS_SERVER").is_none() {
            eprintln!("not run: GROUPCAST_NATS_SERVER names no server");
            return;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(Server::start(Config::plain())).unwrap();
        let node = runtime.block_on(lead(&server));
        let mut stage = Stage::default();
        let mut number = 0;
        let mut marker = MARKERS;
        let mut dice = Dice::new(17);
        let mut write = |events: &[Event]| {
            number += 1;
            let edits = stage.change(events).into_iter().filter_map(|(topic, edit)| Some((topic, edit?))).collect();
            let proposal = Proposal { number, change: number, catalog: number, edits, ..Default::default() };
            runtime.block_on(node.propose(proposal)).unwrap();
        };
        let mut machine = Machine::new();
        let mut agent = Agent::new(&server.url());
        write(&[rules(&ALWAYS), place(0), place(1)]);
        agent.start();
        for (workload, interface) in [("w0", "gcw0"), ("w1", "gcw1")] {
            eventually("a workload is attached", || {
                agent.ask(&["workload", "add", workload, "--interface", interface]).status.success()
            });
        }
        // Who is attached is on the disk before anybody was told so.
        let path = agent.folder.join("state");
        let orders = Orders::read(&Orders::path(&path)).unwrap();
        assert_eq!(orders.map(|orders| orders.attachments.len()), Some(2));
        let (udp, tcp) = (packet(0, 1, UDP, 5001), packet(0, 1, TCP, 5002));
        eventually("what is allowed passes", || machine.passes(0, 1, &udp));
        assert!(machine.passes(0, 1, &tcp) && machine.passes(1, 0, &tcp.answer()));
        let never = [
            (0, 1, packet(0, 1, UDP, 5003)),
            (0, OUTSIDE, packet(0, OUTSIDE, TCP, 5004)),
            (OUTSIDE, 1, packet(OUTSIDE, 1, UDP, 5005)),
        ];
        // Markers below this were revoked by what is in force since: none of them may ever pass again, nor after a restart.
        let revoked = Arc::new(AtomicU16::new(MARKERS));
        let below = revoked.clone();
        let mut old = Dice::new(18);
        let stream = Stream::start(machine, move |machine| {
            for (from, to, packet) in [(0, 1, udp), (1, 0, udp.answer()), (0, 1, tcp.later()), (1, 0, tcp.answer().later())] {
                machine.wire(from).send(&packet);
                assert!(machine.wire(to).received(&packet), "lost: {packet:?}");
            }
            for (from, to, packet) in never {
                machine.wire(from).send(&packet);
                assert!(!machine.wire(to).received(&packet), "passed: {packet:?}");
            }
            let markers = below.load(Ordering::SeqCst) - MARKERS;
            if markers > 0 {
                // Mostly of late: those are what an older state would allow.
                let back = 1 + old.below(usize::from(markers.min(40))) as u16;
                let packet = packet(0, OUTSIDE, UDP, MARKERS + markers - back);
                machine.wire(0).send(&packet);
                assert!(!machine.wire(OUTSIDE).received(&packet), "passed, though revoked long ago: {packet:?}");
            }
            // Each round is some packets; what runs beside them must get its turn.
            std::thread::yield_now();
        });
        let mut kills = 0;
        for change in 1..=500 {
            marker += 1;
            let mut events = vec![some_rules(&mut dice, marker)];
            if dice.percent(15) {
                events.push(place(2));
            }
            write(&events);
            if change % 25 == 0 {
                std::thread::sleep(Duration::from_micros(dice.below(20_000) as u64));
                agent.kill();
                kills += 1;
                // What changes while nobody is there is caught up with.
                marker += 1;
                write(&[some_rules(&mut dice, marker)]);
                agent.start();
            } else if change % 25 == 20 {
                eventually("the agent catches up", || agent.holds(marker));
                revoked.store(marker, Ordering::SeqCst);
            } else if change % 100 == 5 {
                // So that what is on the disk is older than what is in force when the agent dies, by some changes and not by all.
                eventually("the disk catches up", || on_disk(&path, marker));
            }
            assert!(!stream.thread.is_finished(), "a stream ended at change {change}");
        }
        marker += 1;
        write(&[some_rules(&mut dice, marker)]);
        eventually("the last change is in force", || agent.holds(marker));
        assert!(agent.ask(&["ruleset"]).status.success(), "the kernel holds something else than it should");
        stream.wait_for_rounds(2);
        println!("{kills} kills, {} rounds of packets", stream.rounds.load(Ordering::SeqCst));
        stream.end();
    });
}
