//! Controllers as processes: the `groupcast` binary, killed, paused and told to end by its own process id, on a bus of the test's
//! own, with readers standing in for hosts and a model that says what every host should hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_control::catalog::{Accepted, Catalog};
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::doc;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Event, Group, GroupRule, Workload, World as Model};
use groupcast_policy::needs::needed;
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::Topic;
use groupcast_topics::nats::{OnCommit, ReaderHandle, spawn_reader};
use groupcast_topics::reader;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::World;
use crate::world::{DEADLINE, eventually};

/// The binary of this very tree, built if it is not up to date. `GROUPCAST_BIN` names another.
pub fn binary() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("GROUPCAST_BIN") {
            return path.into();
        }
        // This test lies in <target>/<profile>/deps.
        let own = std::env::current_exe().expect("a path");
        let profile = own.parent().and_then(|deps| deps.parent()).expect("below the target folder");
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--package", "groupcast-gateway", "--bin", "groupcast"]);
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", profile.parent().expect("the target folder"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "the groupcast binary cannot be built");
        profile.join("groupcast")
    })
}

/// A controller that is a process of its own. Ends with its value.
pub struct Controller {
    pub name: String,
    child: Child,
    log: PathBuf,
    address: Option<SocketAddr>,
}

impl Controller {
    pub fn start(url: &str, name: &str, lease: Duration) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let log = std::env::temp_dir().join(format!("groupcast-test-{}-{number}-{name}.log", std::process::id()));
        let stderr = File::create(&log).expect("a log file");
        let child = Command::new(binary())
            .args(["controller", "--server", url, "--name", name, "--listen", "127.0.0.1:0"])
            .args(["--lease", &format!("{}ms", lease.as_millis()), "--reconnect-delay-max", "200ms"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("the controller starts");
        Self { name: name.to_owned(), child, log, address: None }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn address(&mut self) -> Option<SocketAddr> {
        if self.address.is_none() {
            let log = self.log();
            let line = log.lines().find(|line| line.contains("serving metrics and health"))?;
            self.address = line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok();
        }
        self.address
    }

    /// Status and body; `None` when nobody answers.
    pub fn get(&mut self, path: &str) -> Option<(u16, String)> {
        get(self.address()?, path)
    }

    pub fn json(&mut self, path: &str) -> Option<Value> {
        let (status, body) = self.get(path)?;
        (status == 200).then(|| serde_json::from_str(&body).ok()).flatten()
    }

    pub fn status(&mut self) -> Option<Value> {
        self.json("/v1/status")
    }

    /// Waits until it can serve and lead.
    pub async fn ready(&mut self) {
        self.wait_for("ready", |c| c.get("/readyz").is_some_and(|(status, _)| status == 200)).await;
    }

    /// Waits until it leads and has compared.
    pub async fn publishing(&mut self) {
        self.wait_for("publishing", |c| c.status().is_some_and(|status| status["publishing"] == true)).await;
    }

    pub async fn wait_for(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            assert!(start.elapsed() < DEADLINE, "{} is not {what} in time; its log:\n{}", self.name, self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("the controller lives");
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Tells it to hand over and end.
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    pub async fn ended(&mut self) -> bool {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.success();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        false
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(60).collect();
            eprintln!("--- end of the log of {}:", self.name);
            tail.into_iter().rev().for_each(|line| eprintln!("{line}"));
        }
        let _ = std::fs::remove_file(&self.log);
    }
}

/// Runs another command of the binary to its end; standard output and error, and whether it succeeded.
pub fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(binary()).args(arguments).stdin(Stdio::null()).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.split_whitespace().nth(1)?.parse().ok()?, body.to_owned()))
}

/// A bus, what was written to it, and whoever follows.
pub struct Plane {
    pub bus: World,
    pub lease: Duration,
    pub controllers: Vec<Controller>,
    pub catalog: Catalog,
    pub registry: Registry,
    /// What the streams say.
    pub model: Model,
    started: usize,
}

impl Plane {
    pub async fn start(controllers: usize, lease: Duration) -> Self {
        let bus = World::one().await;
        let client = bus.observer("writer").await;
        let (catalog, registry) = (Catalog::new(client.clone()), Registry::new(client));
        let mut plane = Self { bus, lease, controllers: Vec::new(), catalog, registry, model: Model::default(), started: 0 };
        for _ in 0..controllers {
            plane.add_controller();
        }
        plane
    }

    pub fn url(&self) -> String {
        self.bus.url(0)
    }

    pub fn add_controller(&mut self) {
        self.started += 1;
        let name = format!("c{}", self.started);
        self.controllers.push(Controller::start(&self.url(), &name, self.lease));
    }

    pub async fn ready(&mut self) {
        for controller in &mut self.controllers {
            controller.ready().await;
        }
    }

    /// Waits until one of them leads and publishes; which.
    pub async fn leader(&mut self) -> usize {
        let start = Instant::now();
        loop {
            for (index, controller) in self.controllers.iter_mut().enumerate() {
                if controller.status().is_some_and(|status| status["publishing"] == true) {
                    return index;
                }
            }
            assert!(start.elapsed() < DEADLINE, "nobody leads");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Writes groups as one change, over whatever is there.
    pub async fn put_groups(&mut self, groups: Vec<Group>) -> Accepted {
        let events: Vec<Event> = groups.iter().cloned().map(Event::group).collect();
        let accepted = write_groups(&self.catalog, groups).await.expect("the change is written");
        events.iter().for_each(|event| self.model.apply(event));
        accepted
    }

    pub async fn delete_group(&mut self, id: &str) -> Accepted {
        let id = id.parse().expect("a group's id");
        let writes = vec![Write::delete(Name::group(&id), Expected::Any)];
        let change = Change { author: "test".to_owned(), reason: String::new(), key: None, writes };
        let accepted = self.catalog.write(&change, None).await.expect("the change is written");
        self.model.apply(&Event::GroupRemoved(id));
        accepted
    }

    pub async fn register(&mut self, workloads: Vec<Workload>) {
        let mut by_host: BTreeMap<HostId, Vec<Workload>> = BTreeMap::new();
        for workload in workloads {
            by_host.entry(workload.host.clone()).or_default().push(workload);
        }
        for (host, workloads) in by_host {
            let registered = self.registry.register(&host, &workloads, Elsewhere::Move).await.expect("registered");
            for (workload, (_, incarnation)) in workloads.into_iter().zip(registered.incarnations) {
                self.model.apply(&Event::workload(Workload { incarnation, ..workload }));
            }
        }
    }

    /// What a compile from scratch says this host should hold.
    pub fn expected(&self, host: &HostId) -> BTreeMap<Topic, doc::Document> {
        expected(&self.model, host)
    }

    /// Waits until the host holds exactly that.
    pub async fn settled(&self, host: &Host) {
        let wanted = self.expected(&host.id);
        let start = Instant::now();
        loop {
            let found = host.documents().await;
            if found == wanted {
                return;
            }
            if start.elapsed() > DEADLINE {
                let differing: BTreeSet<&Topic> =
                    wanted.keys().chain(found.keys()).filter(|t| wanted.get(*t) != found.get(*t)).collect();
                panic!("host {} does not settle: differs in {differing:?}", host.id);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// A host that follows topics like an agent; every state it exposes is handed to `watch`.
    pub async fn host(&self, name: &str, settings: reader::Settings, watch: OnCommit) -> Host {
        Host::start(&self.url(), name, settings, watch).await
    }
}

pub fn expected(model: &Model, host: &HostId) -> BTreeMap<Topic, doc::Document> {
    let all: groupcast_topics::Map<Topic, doc::Document> = groupcast_policy::scratch::documents(model).into_iter().collect();
    needed(host, &all).into_iter().map(|topic| (topic.clone(), all.get(&topic).cloned().unwrap_or_default())).collect()
}

pub async fn write_groups(catalog: &Catalog, groups: Vec<Group>) -> Result<Accepted, groupcast_control::catalog::Error> {
    let put = |group: Group| Write::put(Document::Group(std::sync::Arc::new(group)), Expected::Any);
    let writes = groups.into_iter().map(put).collect();
    let change = Change { author: "test".to_owned(), reason: "a test".to_owned(), key: None, writes };
    catalog.write(&change, None).await
}

/// A reader that stands in for a host.
pub struct Host {
    pub id: HostId,
    pub reader: ReaderHandle,
}

impl Host {
    pub async fn start(url: &str, name: &str, settings: reader::Settings, watch: OnCommit) -> Self {
        let id = HostId::new(name).expect("a host's name");
        let options = Options::new(&[url.to_owned()], Role::Host, &id).reconnect_delay_max(Duration::from_millis(200));
        let (client, events) = connect::connect(options).await.expect("the bus can be reached");
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        Self { reader: spawn_reader(client, events, id.clone(), settings, seed, watch), id }
    }

    pub async fn documents(&self) -> BTreeMap<Topic, doc::Document> {
        let look =
            self.reader.inspect(|reader| reader.documents().map(|(topic, document)| (topic.clone(), document.clone())).collect());
        look.await.expect("the reader lives")
    }

    pub async fn term(&self) -> u64 {
        self.reader.inspect(|reader| reader.cut().map_or(0, |cut| cut.term)).await.expect("the reader lives")
    }

    /// Waits until it exposes something.
    pub async fn synced(&self) {
        eventually("the host has joined", || async { self.term().await > 0 }).await;
    }
}

/// Counts the bytes that a server sends to one client, at the client's socket, but for the server's own PING.
pub struct Counter {
    port: u16,
    received: std::sync::Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Counter {
    pub async fn to(url: &str) -> Self {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        use tokio::net::{TcpListener, TcpStream};
        let target: SocketAddr = url.trim_start_matches("nats://").parse().expect("a server's address");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let received = std::sync::Arc::new(AtomicU64::new(0));
        let counted = received.clone();
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(target).await else { continue };
                let _ = (near.set_nodelay(true), far.set_nodelay(true));
                let ((mut near_in, mut near_out), (mut far_in, mut far_out)) = (near.into_split(), far.into_split());
                let counted = counted.clone();
                tokio::spawn(async move { tokio::io::copy(&mut near_in, &mut far_out).await });
                tokio::spawn(async move {
                    let mut buffer = vec![0; 16 * 1024];
                    while let Ok(read @ 1..) = far_in.read(&mut buffer).await {
                        // The server asks every client now and then whether it lives; that is no data.
                        if buffer[..read] != *b"PING\r\n" {
                            counted.fetch_add(read as u64, Ordering::SeqCst);
                        }
                        if near_out.write_all(&buffer[..read]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, received, task }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn bytes(&self) -> u64 {
        self.received.load(Ordering::SeqCst)
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A group whose rules name these groups, with these static members.
pub fn group(id: &str, remotes: &[&str], members: &[u32]) -> Group {
    let mut group = Group::new(id.parse().expect("a group's id"));
    for remote in remotes {
        let rule = parse_rule(&format!("ingress tcp 443 from group:{remote}")).expect("a rule");
        group.rules.push(GroupRule::from(rule));
    }
    group.members = members.iter().map(|number| address(*number)).collect();
    group
}

pub fn address(number: u32) -> Prefix {
    Prefix::v4(0x0a00_0000 + number, 32).expect("an address")
}

/// A workload with these groups by its own entry.
pub fn workload(host: &str, id: &str, number: u32, groups: &[&str]) -> Workload {
    let (id, host) = (id.parse().expect("a workload's id"), host.parse().expect("a host's id"));
    let mut workload = Workload::new(id, host, "net".parse().expect("a network's id"));
    workload.addresses.insert(address(0x0001_0000 + number));
    workload.groups = groups.iter().map(|group| group.parse().expect("a group's id")).collect();
    workload
}

/// The number that every group of the last whole change was marked with, as a state shows it: `Err` when two groups differ.
pub fn shown_mark<'a>(
    documents: impl Iterator<Item = (&'a Topic, &'a doc::Document)>,
    groups: &[String],
) -> Result<Option<u32>, String> {
    let names: BTreeSet<&str> = groups.iter().map(String::as_str).collect();
    let mut marks: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (topic, document) in documents {
        if let (Topic::Members(group), Some(members)) = (topic, document.members())
            && names.contains(group.as_str())
        {
            for bits in &members.v4 {
                marks.entry(bits - 0x0a00_0000).or_default().push(group.to_string());
            }
        }
    }
    match marks.len() {
        0 => Ok(None),
        1 => Ok(marks.keys().next().copied()),
        _ => Err(format!("a state shows parts of several changes: {marks:?}")),
    }
}
