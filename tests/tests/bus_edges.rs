//! The edges between our processes and the bus: somebody in between, a route that goes and comes back.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity, Options, Tls};
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::server::{self, Config, Server};
use groupcast_bus_config::{streams, subjects};
use groupcast_messages::{Ack, Ask, Beat, EntropyCheck, HostRequest, HostState, Register};
use groupcast_policy::doc::Phases;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Binding, GroupRule, Target};
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::{Topic, TopicHash};
use groupcast_tests::agent::{Agent, Island, ip, isolated, own};
use groupcast_tests::control::{Controller, group};
use groupcast_tests::enrolled::{Guest, allowed, asked, gone, incarnation, plane, registered};
use groupcast_tests::gateway::{Folder, groupcast};
use groupcast_tests::installation::Guarded;
use groupcast_tests::middle::{Deed, Middle, certificates};
use groupcast_tests::world::{DEADLINE, eventually, full};
use groupcast_topics::admission;
use groupcast_topics::nats::{OnCommit, spawn_reader};
use groupcast_topics::reader;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// An address that is not this machine's loopback, though nobody else can reach it.
const HERE: &str = "10.201.0.1";

/// A bus with TLS, and its authority.
async fn guarded(folder: &Path, mutual: bool) -> (Server, SocketAddr, PathBuf) {
    ip(&format!("addr add {HERE}/32 dev lo"));
    certificates(folder, &["127.0.0.1", "localhost", HERE]);
    let authority = folder.join("authority.pem");
    let tls = server::Tls {
        certificate: folder.join("server.pem"),
        key: folder.join("server-key.pem"),
        client_authority: mutual.then(|| authority.clone()),
    };
    let server = Server::start(Config::plain().tls(tls)).await.expect("a server");
    let address = server.url().rsplit('/').next().expect("an address").parse().expect("an address");
    (server, address, authority)
}

fn is_connected(agent: &Agent) -> bool {
    let said = agent.ask(&["status"]);
    serde_json::from_slice::<Value>(&said.stdout).is_ok_and(|status| status["heard"]["connected"] == true)
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that goes on, as an operator would start it.
fn start(arguments: &[&str]) -> Process {
    let mut command = Command::new(groupcast_tests::control::binary());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Process(command.spawn().expect("it starts"))
}

/// What a process says of the bus beyond the server's address.
fn tls_flags(authority: &str) -> [&str; 2] {
    ["--tls-authority", authority]
}

#[test]
fn nobody_in_between_talks_a_process_out_of_encryption() {
    isolated(|| async {
        let folder = Folder::new("downgrade");
        let (_server, far, authority) = guarded(&folder.0, false).await;
        let at = format!("{HERE}:0");
        let trusted = authority.display().to_string();
        let agent_tls = format!("tls_authority = '{trusted}'");

        for deed in [Deed::Denies, Deed::Strips] {
            let between = || Middle::new(&at, far, &authority, deed.clone());
            for process in ["controller", "gateway", "serve"] {
                let middle = between().await;
                let url = middle.url();
                let listen = if process == "gateway" { "--api-listen" } else { "--listen" };
                let mut arguments = vec![process, "--server", &url, "--name", "p", listen, "127.0.0.1:0"];
                arguments.extend(tls_flags(&trusted));
                if process == "serve" {
                    arguments.extend(["--api-listen", "127.0.0.1:0"]);
                }
                let _running = start(&arguments);
                eventually("it has tried", || async { middle.left() + middle.fooled() > 0 }).await;
                assert_eq!(middle.fooled(), 0, "{process} {deed:?}");
            }
            let authority_file = folder.0.join("bus.authority");
            let mut made = Authority::new();
            made.mint(Role::Host, &"h1".parse().expect("an id"), None, SystemTime::now()).expect("minted");
            made.save(&authority_file).expect("saved");
            let keys = authority_file.display().to_string();
            let commands: [&[&str]; 5] = [
                &["bus", "tap", "--within", "2s"],
                &["token", "add", "t", "--role", "admin", "--on-bus"],
                &["init", "--on-bus"],
                &["export"],
                &["host", "remove", "h1", "--without-gateway", "--authority", &keys],
            ];
            for command in commands {
                let middle = between().await;
                let url = middle.url();
                let ran = groupcast(&[command, &["--server", &url], &tls_flags(&trusted)].concat(), &[]);
                assert!(ran.code != 0 && ran.stderr.contains("TLS is required"), "{command:?} {ran:?}");
                assert!(middle.met() > 0 && middle.fooled() == 0, "{command:?} {deed:?}");
            }

            // It works: who does without is read and written, and notices nothing.
            let fools = between().await;
            let mut agent = Agent::new(&fools.url(), "h1", "tls_required = false");
            agent.start().await;
            eventually("the agent is fooled", || async { is_connected(&agent) && fools.fooled() > 0 }).await;
            drop(agent);

            // By default nobody does.
            let middle = between().await;
            let mut agent = Agent::new(&middle.url(), "h1", &agent_tls);
            agent.start().await;
            eventually("the agent has tried and was refused", || async { middle.left() > 1 }).await;
            assert!(!is_connected(&agent) && middle.fooled() == 0, "{deed:?}");
            assert!(agent.log().contains("trouble with the bus"), "{}", agent.log());
            drop(agent);
        }

        // Whoever is in between and touches nothing is no hindrance.
        let honest = Middle::new(&at, far, &authority, Deed::Nothing).await;
        let mut agent = Agent::new(&honest.url(), "h1", &agent_tls);
        agent.start().await;
        eventually("the agent is connected", || async { is_connected(&agent) }).await;
        let mut controller = Controller::start(&honest.url(), "c1", Duration::from_secs(1), &tls_flags(&trusted));
        controller.ready().await;
        assert_eq!(honest.fooled(), 0);
        drop((agent, controller));
    });
}

#[test]
fn nobody_in_between_sends_a_client_elsewhere() {
    isolated(|| async {
        let folder = Folder::new("elsewhere");
        let (mut server, far, authority) = guarded(&folder.0, false).await;
        let elsewhere = tokio::net::TcpListener::bind(format!("{HERE}:0")).await.expect("a port");
        // The client library takes such an address from the first line and connects to it in the clear, whatever is required.
        let name = format!("ws://{}", elsewhere.local_addr().expect("an address"));
        let middle = Middle::new(&format!("{HERE}:0"), far, &authority, Deed::Names(name)).await;
        let tls = Tls { authority: Some(authority), ..Tls::default() };
        let options = Options::new(&[middle.url()], Role::Host, &"h1".parse().expect("an id")).tls(tls);
        let (_client, mut events) =
            connect::connect(options.reconnect_delay_max(Duration::from_millis(50))).await.expect("connected");
        server.kill();
        let (before, mut trouble) = (middle.met(), 0);
        // Between its attempts it would have gone there.
        while trouble < 6 {
            let event = tokio::select! {
                event = tokio::time::timeout(DEADLINE, events.next()) => event.expect("it tries again"),
                went = elsewhere.accept() => panic!("it went where it was sent: {went:?}"),
            };
            trouble += usize::from(matches!(event, Some(connect::Event::Trouble(_))));
        }
        assert!(middle.met() > before, "it tried where it was told to");
    });
}

#[test]
fn a_server_may_demand_a_certificate_of_every_process() {
    isolated(|| async {
        let folder = Folder::new("mutual");
        let (_server, far, authority) = guarded(&folder.0, true).await;
        let honest = Middle::new(&format!("{HERE}:0"), far, &authority, Deed::Nothing).await;
        let file = |name: &str| folder.0.join(name).display().to_string();
        let (trusted, certificate, key) = (file("authority.pem"), file("server.pem"), file("server-key.pem"));
        let flags = ["--tls-authority", &trusted, "--tls-certificate", &certificate, "--tls-key", &key];
        let mut controller = Controller::start(&honest.url(), "c1", Duration::from_secs(1), &flags);
        controller.ready().await;
        let ran = groupcast(
            &[&["token", "add", "t", "--role", "admin", "--on-bus", "--server", &honest.url()], &flags[..]].concat(),
            &[],
        );
        assert_eq!(ran.code, 0, "{ran:?}");
        let written = format!("tls_authority = '{trusted}'\ntls_certificate = '{certificate}'\ntls_key = '{key}'");
        let mut agent = Agent::new(&honest.url(), "h1", &written);
        agent.start().await;
        eventually("the agent is connected", || async { is_connected(&agent) }).await;
        let without = Agent::new(&honest.url(), "h2", &format!("tls_authority = '{trusted}'"));
        let mut without = without;
        without.start().await;
        eventually("it is told no", || async { without.log().contains("trouble with the bus") }).await;
        assert!(!is_connected(&without));
    });
}

#[tokio::test]
async fn a_tap_with_a_credential_that_may_not_listen_ends_and_says_why() {
    let folder = Folder::new("tap");
    let mut authority = Authority::new();
    let mut credential = |role: Role, name: &str| {
        let path = folder.0.join(format!("{name}.creds"));
        let minted = authority.mint(role, &name.parse().expect("an id"), None, SystemTime::now()).expect("minted");
        minted.save(&path).expect("saved");
        path.display().to_string()
    };
    let files = [(Role::Viewer, "v"), (Role::Host, "h1"), (Role::Gateway, "g"), (Role::Controller, "c")]
        .map(|(role, name)| (name, credential(role, name)));
    let config = Config::plain().with(authority.server_config("accounts").expect("a configuration"));
    let server = Server::start(config).await.expect("a server");
    let tap = |file: &str| {
        let arguments =
            ["60", groupcast_tests::control::binary().to_str().expect("text"), "bus", "tap", "--server", &server.url()];
        let mut command = Command::new("timeout");
        command.args(arguments).args(["--credentials", file, "--within", "120s"]);
        command
    };
    for (name, file) in &files[1..3] {
        let output = tap(file).output().expect("it runs");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && words.contains("may not"), "{name}: {output:?}");
    }
    // Who may listen goes on listening: it ends only with what it was told to wait for.
    let url = server.url();
    let arguments = ["bus", "tap", "--server", &url, "--credentials", &files[0].1, "--name", "v", "--count", "1"];
    let mut listening = start(&arguments);
    let writer = Options::new(std::slice::from_ref(&url), Role::Controller, &"c".parse().expect("an id"));
    let (client, _events) =
        connect::connect(writer.identity(Identity::File(files[3].1.clone().into()))).await.expect("connected");
    streams::ensure(&client, 1).await.expect("the streams");
    let mut ended = None;
    let begun = Instant::now();
    while ended.is_none() {
        assert!(begun.elapsed() < DEADLINE, "it does not show what is published");
        client.publish(subjects::LEAD_WRITE, "x".into()).await.expect("published");
        tokio::time::sleep(Duration::from_millis(20)).await;
        ended = listening.0.try_wait().expect("its state");
    }
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}

/// Numbered datagrams from within a namespace to an address outside of it, one each millisecond.
struct Stream {
    sent: Arc<AtomicU64>,
    /// Which of them arrived.
    received: Arc<Mutex<BTreeSet<u64>>>,
    ends: Arc<AtomicBool>,
}

impl Stream {
    fn start(namespace: &str, to: SocketAddr) -> Self {
        let (sent, ends): (Arc<AtomicU64>, Arc<AtomicBool>) = Default::default();
        let received: Arc<Mutex<BTreeSet<u64>>> = Arc::default();
        let outside = std::net::UdpSocket::bind(to).expect("a port");
        outside.set_read_timeout(Some(Duration::from_millis(100))).expect("set");
        let file = std::fs::File::open(format!("/run/netns/{namespace}")).expect("a namespace");
        let (count, flag) = (sent.clone(), ends.clone());
        std::thread::spawn(move || {
            nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).expect("entered");
            let inside = std::net::UdpSocket::bind("0.0.0.0:0").expect("a port");
            while !flag.load(Ordering::Relaxed) {
                // What the policy denies is an error here, and counts like what is lost on the way.
                let _ = inside.send_to(&count.load(Ordering::Relaxed).to_be_bytes(), to);
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let (numbers, flag) = (received.clone(), ends.clone());
        std::thread::spawn(move || {
            let mut number = [0; 8];
            while !flag.load(Ordering::Relaxed) {
                if outside.recv(&mut number).is_ok() {
                    numbers.lock().expect("the numbers").insert(u64::from_be_bytes(number));
                }
            }
        });
        Self { sent, received, ends }
    }

    fn received(&self) -> usize {
        self.received.lock().expect("the numbers").len()
    }

    /// How many of those that were sent until now did not arrive, each with time enough to.
    async fn lost(&self) -> u64 {
        let sent = self.sent.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(200)).await;
        let arrived = self.received.lock().expect("the numbers").range(..sent).count();
        sent - u64::try_from(arrived).expect("a count")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

/// The retransmission time-outs of what is connected to the bus there, as the kernel has them, in milliseconds.
fn timeouts_ms(namespace: &str) -> Vec<f64> {
    let shown =
        Command::new("ip").args(["netns", "exec", namespace, "ss", "-tinH", "state", "established"]).output().expect("ss runs");
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    text.split_whitespace().filter_map(|word| word.strip_prefix("rto:")?.parse().ok()).collect()
}

#[test]
fn a_host_that_was_cut_off_and_forgotten_is_back_within_seconds_and_closes_nothing() {
    isolated(|| async {
        let mut plane = plane(2).await;
        allowed(&plane, "vm", &["h1"]).await;
        let mut open = group("open", &[], &[]);
        open.rules.push(GroupRule::from(parse_rule("egress any to any").expect("a rule")));
        let target = Target::Space("shop".parse().expect("an id"));
        open.bindings.push(Binding { target, phases: Phases::BOTH });
        plane.put_groups(vec![open]).await;
        let observer = plane.bus.observer("observer").await;
        let island = Island::new(&plane.url()).await;
        // A link of its own, which is never cut.
        ip(&format!("link add gcu0 type veth peer name gcu1 netns {}", island.name));
        ip("addr add 10.202.0.1/24 dev gcu0");
        ip("link set gcu0 up");
        ip(&format!("-n {} addr add 10.202.0.2/24 dev gcu1", island.name));
        ip(&format!("-n {} link set gcu1 up", island.name));
        let mut agent = Agent::new(&island.url, "h1", &own("m1", "10.202.0.2")).within(&island.name);
        agent.start().await;
        registered(&observer, "m1", 1).await;
        let stream = Stream::start(&island.name, "10.202.0.1:7777".parse().expect("an address"));
        eventually("its flow is allowed", || async { stream.received() > 0 }).await;
        eventually("nothing changes any more", || async {
            let before = stream.lost().await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            before == stream.lost().await
        })
        .await;
        let lost = stream.lost().await;

        island.cut();
        let cut = Instant::now();
        gone(&observer, "h1").await;
        eventually("the agent says that it is cut off", || async { !is_connected(&agent) }).await;
        let noticed = cut.elapsed();
        if full() {
            tokio::time::sleep(Duration::from_secs(140).saturating_sub(cut.elapsed())).await;
        }
        let (silent, received) = (cut.elapsed(), stream.received());
        island.mend();
        let mended = Instant::now();
        registered(&observer, "m1", 2).await;
        let back = mended.elapsed();
        assert!(is_connected(&agent), "whoever is registered is connected");
        let timeouts = timeouts_ms(&island.name);
        eprintln!("cut for {silent:?}: noticed after {noticed:?}, back after {back:?}, retransmission time-outs {timeouts:?} ms");
        assert!(!timeouts.is_empty() && timeouts.iter().all(|timeout| *timeout < 10_000.0), "{timeouts:?}");
        // Until what was enrolled anew is in force, and then some.
        eventually("its flow goes on", || async { stream.received() > received + 1_000 }).await;
        eventually("the agent follows the topics", || async {
            let status: Value = serde_json::from_slice(&agent.ask(&["status"]).stdout).unwrap_or_default();
            status["heard"]["revisions"]["rules.open"].is_u64()
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(stream.lost().await, lost, "a permitted flow was closed on the way back");
        drop(stream);
    });
}

/// A door before a server. Shut, it lets nobody in, and cuts whoever listens to hosts.
struct Door {
    url: String,
    shut: tokio::sync::watch::Sender<bool>,
}

impl Door {
    async fn before(server: &Server) -> Self {
        let far: SocketAddr = server.url().rsplit('/').next().expect("an address").parse().expect("an address");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("nats://{}", listener.local_addr().expect("an address"));
        let shut = tokio::sync::watch::Sender::new(false);
        let states = shut.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                if !*states.borrow() {
                    tokio::spawn(pass(near, far, states.subscribe()));
                }
            }
        });
        Self { url, shut }
    }
}

async fn shuts(shut: &mut tokio::sync::watch::Receiver<bool>) {
    let _ = shut.wait_for(|shut| *shut).await;
}

async fn pass(near: tokio::net::TcpStream, far: SocketAddr, mut shut: tokio::sync::watch::Receiver<bool>) -> Option<()> {
    let (mut from_near, mut to_near) = near.into_split();
    let (mut from_far, mut to_far) = tokio::net::TcpStream::connect(far).await.ok()?.into_split();
    let mut back = tokio::spawn(async move { tokio::io::copy(&mut from_far, &mut to_near).await });
    let (mut said, mut buffer, mut listens) = (Vec::new(), [0; 4_096], false);
    loop {
        let read = tokio::select! {
            read = from_near.read(&mut buffer) => read.ok().filter(|read| *read > 0),
            () = shuts(&mut shut), if listens => None,
            _ = &mut back => None,
        };
        let Some(read) = read else {
            back.abort();
            return None;
        };
        // Who listens says so at the beginning.
        if !listens && said.len() < 64 << 10 {
            said.extend_from_slice(&buffer[..read]);
            listens = said.windows(subjects::SNAP_ALL.len()).any(|words| words == subjects::SNAP_ALL.as_bytes());
        }
        to_far.write_all(&buffer[..read]).await.ok()?;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_does_not_hear_hosts_says_so() {
    let server = Server::start(Config::plain()).await.expect("a server");
    let door = Door::before(&server).await;
    let mut controller = Controller::start(&door.url, "c1", Duration::from_secs(1), &[]);
    controller.ready().await;
    door.shut.send_replace(true);
    controller
        .wait_for("saying that it hears no hosts", |controller| {
            controller.get("/readyz").is_some_and(|(status, words)| status == 503 && words.contains("hosts are not heard"))
        })
        .await;
    door.shut.send_replace(false);
    controller.ready().await;
}

/// Connects, enrols a workload and follows its topics; how long until each.
async fn join(world: &mut Guarded, host: &str, number: u32) -> [Duration; 3] {
    let file = world.mint(host, &format!("{host}.creds"));
    let begun = Instant::now();
    let (client, events) = world.connect(host, &file).await;
    let connected = begun.elapsed();
    let id: HostId = host.parse().expect("an id");
    let guest = Guest::with(client.clone(), host, 1).await;
    let watch: OnCommit = Box::new(|_: &reader::Reader, _: &reader::Commit| true);
    let reader = spawn_reader(client, events, id.clone(), reader::Settings::default(), number.into(), watch);
    incarnation(&guest.enrol("vm", vec![asked(&format!("{host}-w"), number)]).await);
    let (own, enrolled) = (Topic::Host(id), begun.elapsed());
    eventually("the host has its own topic", || async {
        let own = own.clone();
        let look = reader.inspect(move |reader| reader.document(&own).is_some_and(|document| document.content().is_some()));
        look.await == Some(true)
    })
    .await;
    [connected, enrolled, begun.elapsed()]
}

/// Of each stage.
fn median(times: Vec<[Duration; 3]>) -> [Duration; 3] {
    [0, 1, 2].map(|stage| {
        let mut of_stage: Vec<Duration> = times.iter().map(|times| times[stage]).collect();
        of_stage.sort_unstable();
        of_stage[of_stage.len() / 2]
    })
}

/// Who hears it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Controllers,
    /// Its own inbox: it costs the server, and nobody else.
    Nobody,
}

/// Everything that a host may send, as fast as it can, on a connection of its own.
async fn shout(options: Options, to: To, ends: Arc<AtomicBool>, sent: Arc<Sent>) {
    let evil = options.name.clone();
    let (client, _events) = connect::connect(options).await.expect("connected");
    let unknown: Vec<(TopicHash, u64)> = (0..2_000).map(|number| (TopicHash(u64::MAX - number), 7)).collect();
    let ask = Ask { ask: 1, term: 0, held: unknown.clone(), digests: Vec::new() }.encode();
    let check = EntropyCheck { term: 0, hash: 1, topics: 1 }.encode();
    let state = HostState::Enforcing;
    let ack = Ack { term: 0, state: state.clone(), reached: unknown }.encode();
    let beat = Beat { boot: 1, count: 1, term: 0, version: "x".into(), state }.encode();
    let register = Register { boot: 1, template: Some("vm".into()), workloads: vec![asked("evil-w", 9_999)] }.encode();
    let fresh = HostRequest::Fresh { within_ms: 60_000 }.encode();
    let kinds = [
        (subjects::snap(&evil), ask),
        (subjects::entropy(&evil), check),
        (subjects::ack(&evil), ack),
        (subjects::beat(&evil), beat),
        (subjects::register(&evil), register),
        (subjects::register(&evil), fresh),
        (subjects::register(&evil), vec![0]),
    ];
    let inbox = client.new_inbox();
    let mut number = 0u64;
    while !ends.load(Ordering::Relaxed) {
        for (subject, payload) in &kinds {
            number += 1;
            let mut headers = async_nats::HeaderMap::new();
            headers.insert(subjects::ANSWER_TOKEN, format!("t{number}"));
            let subject = if to == To::Nobody { &inbox } else { subject };
            if client.publish_with_headers(subject.clone(), headers, payload.clone().into()).await.is_err() {
                return;
            }
            sent.messages.fetch_add(1, Ordering::Relaxed);
            sent.bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct Sent {
    messages: AtomicU64,
    bytes: AtomicU64,
}

/// On a thread of its own that takes what others leave of the processors: what the attacker computes is no cost of ours.
fn shouting(options: Options, to: To, ends: Arc<AtomicBool>, sent: Arc<Sent>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let own = nix::unistd::gettid().to_string();
        let reniced = Command::new("renice").args(["-n", "19", "-p", &own]).stdout(Stdio::null()).status();
        assert!(reniced.is_ok_and(|status| status.success()), "the thread can be made patient");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(shout(options, to, ends, sent));
    })
}

/// What the controller counts under this name, with these labels.
fn counted(controller: &mut Controller, name: &str, labels: &str) -> u64 {
    controller.status(); // which counts
    let (_, metrics) = controller.get("/metrics").expect("metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name}{{{labels}}} ")).map(str::to_owned));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// A folder in memory. A registration is an atomic batch, for which the server makes, flushes and removes files in some thirty steps: on a disk, with all
/// processors taken, that is nearly all of the time that a join takes, whoever takes them, and says nothing about our processes.
struct InMemory(PathBuf);

impl InMemory {
    fn new() -> Self {
        let path = Path::new("/dev/shm").join(format!("groupcast-flood-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder in memory");
        Self(path)
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_host_joins_while_one_sends_all_it_can() {
    const JOINS: usize = 25;
    // On two processors that did much else, a join beside the flood took up to 138 ms. A request that waits behind a flood which is not read as fast as
    // it comes took up to 1.7 s, and one that is lost takes three.
    const TIMES_MAX: u32 = 10;
    const MORE_MAX: Duration = Duration::from_millis(500);
    let memory = InMemory::new();
    let names: Vec<String> = (0..=3 * JOINS).map(|number| format!("h{number}")).chain(["evil".to_owned()]).collect();
    let hosts: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut world = Guarded::start_on(Config::plain().store_dir(&memory.0), &hosts, &[]).await;
    join(&mut world, "h0", 100).await; // the first reads what others find read
    let mut joining = (101..).zip(&names[1..]);
    let received = |controller: &mut Controller| {
        ["topics", "follow"]
            .map(|name| counted(controller, "groupcast_bus_received_bytes_total", &format!("connection=\"{name}\"")))
    };
    let (evil, began) = (world.mint("evil", "evil.creds"), Instant::now());
    let (mut times, mut before, mut shouted) = (Vec::new(), [0; 2], (0, 0));
    for to in [None, Some(To::Nobody), Some(To::Controllers)] {
        before = received(&mut world.controller);
        let (ends, sent): (Arc<AtomicBool>, Arc<Sent>) = Default::default();
        let shout = |to| (0..2).map(|_| shouting(world.options("evil", &evil), to, ends.clone(), sent.clone())).collect();
        let shouting: Vec<_> = to.map(shout).unwrap_or_default();
        if to.is_some() {
            eventually("it shouts", || async { sent.messages.load(Ordering::Relaxed) > 20_000 }).await;
        }
        let mut of_joins = Vec::new();
        for (number, name) in joining.by_ref().take(JOINS) {
            of_joins.push(join(&mut world, name, number).await);
        }
        ends.store(true, Ordering::Relaxed);
        shouting.into_iter().for_each(|one| one.join().expect("it ends"));
        shouted = (sent.messages.load(Ordering::Relaxed), sent.bytes.load(Ordering::Relaxed));
        times.push(median(of_joins));
        eprintln!("connected, enrolled, following after {:?}, beside {shouted:?} messages and bytes", times.last());
    }
    let [alone, unheard, beside] = [0, 1, 2].map(|round: usize| times[round][2]);
    let ratio = |of: Duration| beside.as_secs_f64() / of.as_secs_f64();
    eprintln!(
        "{:.1} times as long as alone, {:.1} times as long as beside a flood that nobody hears",
        ratio(alone),
        ratio(unheard)
    );
    let shouted_bytes = shouted.1;

    // Where the leader writes and reads streams and topics, nothing that a host sends comes.
    let after = received(&mut world.controller);
    let grown: Vec<u64> = before.iter().zip(&after).map(|(before, after)| after - before).collect();
    eprintln!("received on the leader's connections: {grown:?} bytes");
    assert!(grown.iter().all(|grown| *grown > 0 && *grown < shouted_bytes / 10), "{grown:?} of {shouted_bytes} bytes");
    // What is looked at of it is what one host may send, however much that is; the others' few messages are in it.
    let others = 1_000;
    for (kind, rate) in [
        ("snapshots", admission::SNAPSHOTS),
        ("checks", admission::CHECKS),
        ("acknowledgements", admission::ACKS),
        ("registrations", admission::REGISTRATIONS),
    ] {
        let labels = format!("kind=\"{kind}\"");
        let [heard, unheard] =
            ["heard", "unheard"].map(|what| counted(&mut world.controller, &format!("groupcast_{what}_total"), &labels));
        let most = u64::from(rate.at_once) + u64::from(rate.per_second) * (began.elapsed().as_secs() + 1) + others;
        eprintln!("{kind}: {heard} heard, {unheard} not");
        assert!(heard > 0 && heard <= most && unheard > heard, "{kind}: {heard} of at most {most} heard, {unheard} not");
    }
    assert!(world.controller.log().contains("a host sends too much"), "nobody is told: {}", world.controller.log());
    let lines = world.controller.log().lines().filter(|line| line.contains("host=evil")).count();
    eprintln!("{lines} lines about it in the log");
    assert!(lines < 100, "{lines} lines about it in the log");
    assert!(!world.controller.log().contains("no longer leading"), "{}", world.controller.log());
    // Twice as long is the aim, with processors to spare; a machine that runs all of it on two does not have them.
    for (than, time) in [("alone", alone), ("beside a flood that nobody hears", unheard)] {
        assert!(beside < time * TIMES_MAX + MORE_MAX, "{:.1} times as long as {than}: {beside:?}, {time:?}", ratio(time));
    }
}
