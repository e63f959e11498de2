//! A bus of three nodes, controllers, gateways and hosts with real agents, each on a machine of its own: a network namespace on a bridge. So a
//! link can go down, a machine can vanish without a word, and a server can lose its peers and keep its clients; not only a process can end.
//!
//! To be used inside [`crate::agent::isolated`]: the test's own namespace is where the bridge is.

use std::collections::BTreeMap;
use std::io::{Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Events, Identity, Options, Tls};
use groupcast_bus_config::lab::{Namespace, mortal};
use groupcast_bus_config::{server, streams};
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::agent::ip;
use crate::control::{agent_binary, binary};
use crate::disk::Disk;
use crate::field::answer;
use crate::gateway::{Folder, Ran, User, groupcast};
use crate::guard::Guard;
use crate::skew::Skew;
use crate::world::DEADLINE;

/// Nodes of the bus.
pub const NODES: [&str; 3] = ["n1", "n2", "n3"];
pub const CONTROLLERS: [&str; 2] = ["c1", "c2"];
pub const GATEWAYS: [&str; 2] = ["g1", "g2"];
/// Each has one workload, of the app of the same number.
pub const HOSTS: [&str; 2] = ["h1", "h2"];
/// Ports on which every workload answers.
pub const PORTS: [u16; 4] = [5432, 7000, 8080, 9999];
/// The node whose store is a disk of its own in an installation that is guarded, where one can be made.
pub const DISKED: &str = "n3";
/// Under this name the test connects as nobody may: to have streams change their leaders.
pub const BREAKER: &str = "breaker";
const NETWORK: &str = "lab";
const CONTROLLER_TOKEN: &str = "a token that is long enough";

/// The address of a machine on the bridge.
fn address(machine: &str) -> Ipv4Addr {
    let (kind, number) = machine.split_at(1);
    let number: u8 = number.parse().expect("a number");
    let tens = match kind {
        "n" => 10,
        "c" => 20,
        "g" => 30,
        _ => 40,
    };
    Ipv4Addr::new(10, 99, 0, tens + number)
}

fn workload_address(host: &str) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, address(host).octets()[3], 2)
}

/// A machine with what runs on it.
struct Machine {
    namespace: Namespace,
    /// The bridge's end of its wire.
    port: String,
    process: Option<Child>,
    log: PathBuf,
}

impl Machine {
    fn new(name: &str, folder: &Folder) -> Self {
        let namespace = Namespace::new(name).expect("a namespace");
        let port = format!("p-{name}");
        ip(&format!("link add {port} type veth peer name eth0 netns {}", namespace.thread_id()));
        ip(&format!("link set {port} master br0 up"));
        namespace.ip(&format!("address add {}/24 dev eth0", address(name))).expect("an address");
        namespace.ip("link set eth0 up").expect("up");
        Self { namespace, port, process: None, log: folder.0.join(format!("{name}.log")) }
    }

    fn start(&mut self, command: &Command) {
        let log = std::fs::File::options().create(true).append(true).open(&self.log).expect("a log");
        let mut command = mortal(command);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        self.process = Some(self.namespace.run(move || command.spawn()).expect("it runs").expect("it starts"));
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("it runs");
        kill(Pid::from_raw(process.id() as i32), signal).expect("it lives");
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

pub struct Nodes {
    machines: BTreeMap<&'static str, Machine>,
    workloads: BTreeMap<&'static str, Arc<Namespace>>,
    pub admin_token: String,
    /// Who may do what; without it servers are configured as those in `bus-config/nats`, but let everybody in without TLS.
    pub guard: Option<Guard>,
    /// The store of [`DISKED`].
    pub disk: Option<Disk>,
    /// Whose clocks are wrong, by so many seconds, from their next start on.
    skewed: BTreeMap<&'static str, i64>,
    skew: Option<Skew>,
    pub folder: Folder,
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (name, machine) in &self.machines {
                let log = std::fs::read_to_string(&machine.log).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(40).collect();
                eprintln!("--- end of the log of {name}:");
                tail.into_iter().rev().for_each(|line| eprintln!("{line}"));
            }
        }
        self.machines.values_mut().for_each(Machine::kill);
    }
}

impl Nodes {
    /// The three nodes with the streams, and nobody who uses them.
    pub async fn bus() -> Self {
        Self::servers(|_| None).await
    }

    /// Everything runs, both hosts are registered and enforce, and somebody leads.
    pub async fn start() -> Self {
        Self::bus().await.peopled().await
    }

    /// The same, as `groupcast bus init` sets it up: with TLS, accounts and credentials.
    pub async fn guarded() -> Self {
        let guard = |folder: &std::path::Path| {
            let nodes = NODES.map(|name| (name, address(name)));
            let controllers = CONTROLLERS.iter().map(|name| (Role::Controller, *name));
            let named: Vec<(Role, &str)> = controllers.chain(GATEWAYS.iter().map(|name| (Role::Gateway, *name))).collect();
            Some(Guard::new(folder, &nodes, &HOSTS, &named))
        };
        Self::servers(guard).await.peopled().await
    }

    async fn servers(guard: impl FnOnce(&std::path::Path) -> Option<Guard>) -> Self {
        ip("link add br0 type bridge");
        ip("address add 10.99.0.1/24 dev br0");
        ip("link set br0 up");
        let folder = Folder::new("nodes");
        let all = NODES.iter().chain(&CONTROLLERS).chain(&GATEWAYS).chain(&HOSTS);
        let machines = all.map(|name| (*name, Machine::new(name, &folder))).collect();
        let guard = guard(&folder.0);
        let disk = guard.as_ref().and_then(|_| {
            let disk = Disk::mount(&folder.0.join("disk.img"), &folder.0.join(format!("{DISKED}.store")));
            disk.inspect_err(|error| eprintln!("{DISKED} has no disk of its own: {error}")).ok()
        });
        let (skewed, skew, admin_token) = (BTreeMap::new(), None, String::new());
        let mut nodes = Self { machines, workloads: BTreeMap::new(), admin_token, guard, disk, skewed, skew, folder };
        NODES.iter().for_each(|name| nodes.start_node(name));
        nodes.formed().await;
        let (client, _events) = nodes.connect("setup").await;
        let start = Instant::now();
        while let Err(error) = streams::ensure(&client, 3).await {
            assert!(start.elapsed() < DEADLINE, "no streams: {error}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        nodes
    }

    async fn peopled(self) -> Self {
        let mut nodes = self;
        let (client, _events) = nodes.connect("setup").await;
        nodes.admin_token = nodes.token("root", "admin");
        std::fs::write(nodes.folder.0.join("controller.token"), CONTROLLER_TOKEN).expect("written");
        CONTROLLERS.iter().for_each(|name| nodes.start_controller(name));
        GATEWAYS.iter().for_each(|name| nodes.start_gateway(name));
        for host in HOSTS {
            nodes.make_workload(host);
        }
        nodes.register(&client).await;
        let user = nodes.user("g1").await;
        let template = json!({ "kind": "template", "id": NETWORK, "network": NETWORK }).to_string();
        let written = user.ask("PUT", &format!("/v1/templates/{NETWORK}"), &[], Some(template.into_bytes())).await;
        assert_eq!(written.status, 201, "{}", written.text);
        nodes.led().await;
        for host in HOSTS {
            nodes.start_agent(host);
            nodes.attach(host).await;
        }
        nodes
    }

    fn machine(&mut self, name: &str) -> &mut Machine {
        self.machines.get_mut(name).expect("a machine")
    }

    pub fn urls(&self) -> Vec<String> {
        NODES.iter().map(|name| format!("nats://{}:4222", address(name))).collect()
    }

    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(&self.machines[name].log).unwrap_or_default()
    }

    /// A connection of the test's own, as a controller has it.
    pub async fn connect(&self, name: &str) -> (async_nats::Client, Events) {
        self.connect_as(Role::Controller, name).await
    }

    pub async fn connect_as(&self, role: Role, name: &str) -> (async_nats::Client, Events) {
        connect::connect(self.options(role, name)).await.expect("connected")
    }

    /// How a connection of the test's own is made.
    pub fn options(&self, role: Role, name: &str) -> Options {
        let options = match &self.guard {
            None => {
                let tls = Tls { required: Some(false), ..Tls::default() };
                Options::new(&self.urls(), role, &name.parse().expect("an id")).tls(tls)
            }
            Some(guard) => {
                let tls = Tls { authority: Some(guard.trusted()), ..Tls::default() };
                let (identity, name) = match name {
                    BREAKER => (Identity::Text(guard.breaker()), BREAKER),
                    _ => (Identity::File(guard.operator_file(role)), "operator"),
                };
                Options::new(&self.urls(), role, &name.parse().expect("an id")).tls(tls).identity(identity)
            }
        };
        options.reconnect_delay_max(Duration::from_millis(200))
    }

    /// Starts a server on the files it has.
    pub fn start_node(&mut self, name: &str) {
        let (own, store) = (address(name), self.folder.0.join(format!("{name}.store")));
        let path = match &self.guard {
            Some(guard) => guard.server_file(name, own, &store),
            None => self.open_server_file(name, own, &store),
        };
        let mut command = Command::new(server::find().expect("a nats-server"));
        command.arg("-c").arg(path);
        self.machine(name).start(&command);
    }

    /// The configuration of a server that lets everybody in.
    fn open_server_file(&self, name: &str, own: Ipv4Addr, store: &std::path::Path) -> PathBuf {
        let routes: Vec<String> = NODES.iter().map(|node| format!("\"nats-route://{}:6222\"", address(node))).collect();
        let text = format!(
            "server_name: {name}\nlisten: \"{own}:4222\"\nhttp: \"{own}:8222\"\nmax_control_line: 65536\n\
             ping_interval: \"5s\"\nping_max: 2\n\
             jetstream {{ store_dir: \"{}\", limits {{ batch {{ max_msgs: 20000 }} }} }}\n\
             cluster {{ name: groupcast, listen: \"{own}:6222\", no_advertise: true, routes: [{}] }}\n",
            store.display(),
            routes.join(", ")
        );
        let path = self.folder.0.join(format!("{name}.conf"));
        std::fs::write(&path, text).expect("written");
        path
    }

    /// For commands on the bus itself.
    fn bus_flags(&self) -> Vec<String> {
        match &self.guard {
            None => self.process_flags(Role::Viewer, ""),
            Some(guard) => vec!["--config".to_owned(), guard.operator_config()],
        }
    }

    fn process_flags(&self, role: Role, name: &str) -> Vec<String> {
        let servers = self.urls().into_iter().flat_map(|url| ["--server".to_owned(), url]);
        let more = self.guard.as_ref().map(|guard| guard.flags(role, name));
        servers.chain(more.unwrap_or_else(|| vec!["--tls-required=false".to_owned()])).collect()
    }

    /// From its next start on, this process sees the time of day so many seconds from what it is. False where that cannot be done.
    pub fn skew(&mut self, name: &'static str, seconds: i64) -> bool {
        if self.skew.is_none() {
            let built = Skew::build(&self.folder.0);
            self.skew = built.inspect_err(|error| eprintln!("no clock can be set wrong: {error}")).ok();
        }
        self.skewed.insert(name, seconds);
        self.skew.is_some()
    }

    fn clocked(&self, name: &str, mut command: Command) -> Command {
        if let (Some(skew), Some(seconds)) = (&self.skew, self.skewed.get(name).filter(|seconds| **seconds != 0)) {
            skew.apply(&mut command, *seconds);
        }
        command
    }

    pub fn start_controller(&mut self, name: &str) {
        let mut command = Command::new(binary());
        command.arg("controller").args(self.process_flags(Role::Controller, name)).args(["--name", name, "--replicas", "3"]);
        command.args(["--controller-allow-plain", "--listen", &format!("{}:4280", address(name))]);
        command.arg("--controller-token-file").arg(self.folder.0.join("controller.token")).env("GROUPCAST_LOG", "info");
        let command = self.clocked(name, command);
        self.machine(name).start(&command);
    }

    pub fn start_gateway(&mut self, name: &str) {
        let mut command = Command::new(binary());
        command.arg("gateway").args(self.process_flags(Role::Gateway, name)).args(["--name", name, "--allow-plain"]);
        command.args(["--api-listen", &format!("{}:4270", address(name))]).env("GROUPCAST_LOG", "info");
        let command = self.clocked(name, command);
        self.machine(name).start(&command);
    }

    fn agent_command(&self, host: &str) -> Command {
        let mut command = Command::new(agent_binary());
        command.arg("--config").arg(self.folder.0.join(format!("{host}.toml")));
        command
    }

    pub fn start_agent(&mut self, host: &str) {
        let path = |what: &str| self.folder.0.join(format!("{host}.{what}")).display().to_string();
        let servers: Vec<String> = self.urls().iter().map(|url| format!("'{url}'")).collect();
        let text = format!(
            "host = '{host}'\nservers = [{}]\n{}claims = ['gcw*']\nstate = '{}'\nsocket = '{}'\nbeat = '1s'\n",
            servers.join(", "),
            self.guard.as_ref().map_or_else(|| "tls_required = false\n".to_owned(), |guard| guard.agent_lines(host)),
            path("state"),
            path("sock")
        );
        std::fs::write(path("toml"), text).expect("written");
        let mut command = self.agent_command(host);
        command.arg("run");
        let command = self.clocked(host, command);
        self.machine(host).start(&command);
    }

    /// What an agent says of itself.
    pub fn agent_status(&self, host: &str) -> Option<Value> {
        let output = self.agent_command(host).arg("status").stdin(Stdio::null()).output().ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }

    async fn attach(&self, host: &str) {
        let start = Instant::now();
        loop {
            let mut command = self.agent_command(host);
            command.args(["workload", "add", &format!("w-{host}"), "--interface", "gcw0", "--within", "30s"]);
            let output = command.stdin(Stdio::null()).output().expect("it runs");
            if output.status.success() {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "{}\n{}", String::from_utf8_lossy(&output.stderr), self.log(host));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn make_workload(&mut self, host: &'static str) {
        let (own, number) = (workload_address(host), address(host).octets()[3]);
        let (gateway, workload) = (Ipv4Addr::new(10, 77, number, 1), Namespace::new(&format!("w-{host}")).expect("a namespace"));
        let there = &self.machines[host].namespace;
        there.forward().expect("set");
        there.wire("gcw0", &workload, "eth0").expect("a wire");
        there.ip(&format!("address add {gateway}/30 dev gcw0")).expect("an address");
        workload.ip(&format!("address add {own}/30 dev eth0")).expect("an address");
        workload.ip(&format!("route add default via {gateway}")).expect("a route");
        for other in HOSTS.iter().filter(|other| **other != host) {
            let far = Ipv4Addr::new(10, 77, address(other).octets()[3], 0);
            there.ip(&format!("route add {far}/24 via {}", address(other))).expect("a route");
        }
        for port in PORTS {
            answer(workload.listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).expect("it listens"));
        }
        self.workloads.insert(host, Arc::new(workload));
    }

    async fn register(&self, client: &async_nats::Client) {
        let registry = Registry::new(client.clone());
        for host in HOSTS {
            let id = host.parse().expect("an id");
            let mut workload = Workload::new(format!("w-{host}").parse().expect("an id"), id, NETWORK.parse().expect("an id"));
            workload.app = Some(host.parse().expect("an id"));
            workload.addresses = [Prefix::host(workload_address(host).into())].into();
            registry.register(&host.parse().expect("an id"), &[workload], Elsewhere::Move).await.expect("registered");
        }
    }

    pub fn passes(&self, port: u16, within: Duration) -> bool {
        self.outside().passes(port, within)
    }

    /// All that goes on while something is broken.
    pub fn outside(&self) -> Outside {
        let sender = self.workloads[HOSTS[0]].clone();
        Outside { sender, admin_token: self.admin_token.clone(), folder: self.folder.0.clone() }
    }

    /// Loses everything a node has stored.
    pub fn wipe(&self, node: &str) {
        let _ = std::fs::remove_dir_all(self.folder.0.join(format!("{node}.store"))); // one that never stored anything has none
    }

    /// SIGKILL.
    pub fn kill(&mut self, name: &str) {
        self.machine(name).kill();
    }

    pub fn signal(&self, name: &str, signal: Signal) {
        self.machines[name].signal(signal);
    }

    /// SIGTERM, and waits for the end.
    pub async fn stop(&mut self, name: &str) {
        self.signal(name, Signal::SIGTERM);
        let start = Instant::now();
        while self.machine(name).process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None))) {
            assert!(start.elapsed() < DEADLINE, "{name} does not end");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.machine(name).process = None;
    }

    pub fn start_again(&mut self, name: &str) {
        match name.split_at(1).0 {
            "n" => self.start_node(name),
            "c" => self.start_controller(name),
            "g" => self.start_gateway(name),
            _ => self.start_agent(name),
        }
    }

    /// The machine is not there any more; nobody is told.
    pub fn vanish(&self, name: &str) {
        ip(&format!("link set {} nomaster", self.machines[name].port));
    }

    pub fn appear(&self, name: &str) {
        ip(&format!("link set {} master br0", self.machines[name].port));
    }

    pub fn link(&self, name: &str, state: &str) {
        ip(&format!("link set {} {state}", self.machines[name].port));
    }

    /// Nothing passes between these two machines; everybody else reaches both.
    pub fn cut(&self, a: &str, b: &str) {
        for (here, there) in [(a, b), (b, a)] {
            let nft = |rule: &str| self.machines[here].namespace.call("nft", &rule.split(' ').collect::<Vec<_>>()).expect("nft");
            nft("add table inet cut");
            nft("add chain inet cut in { type filter hook input priority 0 ; }");
            nft(&format!("add rule inet cut in ip saddr {} drop", address(there)));
        }
    }

    /// A node loses its peers and keeps its clients.
    pub fn isolate(&self, name: &str) {
        NODES.iter().filter(|other| **other != name).for_each(|other| self.cut(name, other));
    }

    pub fn heal(&self) {
        for name in NODES {
            let _ = self.machines[name].namespace.call("nft", &["delete", "table", "inet", "cut"]); // most have none
        }
    }

    /// What a node's monitoring says.
    pub fn monitor(&self, node: &str, path: &str) -> Option<Value> {
        let (_, body) = http(SocketAddr::from((address(node), 8222)), path, "", Duration::from_secs(2))?;
        serde_json::from_str(&body).ok()
    }

    /// Waits until every node knows a leader and is current.
    pub async fn formed(&self) {
        let start = Instant::now();
        loop {
            let ok = |node: &&str| {
                let leader = self.monitor(node, "/jsz").and_then(|jsz| jsz["meta_cluster"]["leader"].as_str().map(str::to_owned));
                leader.is_some_and(|leader| !leader.is_empty())
                    && self.monitor(node, "/healthz").is_some_and(|health| health["status"] == "ok")
            };
            if NODES.iter().all(ok) {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "the nodes form no cluster");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The names of this node's clients.
    pub fn clients(&self, node: &str) -> Vec<String> {
        let connections = self.monitor(node, "/connz").unwrap_or_default();
        let named = connections["connections"].as_array().into_iter().flatten();
        named.filter_map(|one| one["name"].as_str().map(str::to_owned)).collect()
    }

    /// The node that leads this stream.
    pub async fn leader_of(&self, client: &async_nats::Client, stream: &str) -> Option<String> {
        let context = async_nats::jetstream::new(client.clone());
        let stream = context.get_stream(stream).await.ok()?;
        stream.cached_info().cluster.as_ref()?.leader.clone()
    }

    /// Status and body of a controller's answer.
    pub fn controller(&self, name: &str, path: &str) -> Option<(u16, String)> {
        self.outside().controller(name, path)
    }

    pub fn controller_status(&self, name: &str) -> Option<Value> {
        let (_, body) = self.controller(name, "/v1/status")?;
        serde_json::from_str(&body).ok()
    }

    /// Status and body of a gateway's answer.
    pub fn gateway(&self, name: &str, path: &str) -> Option<(u16, String)> {
        self.outside().gateway(name, path)
    }

    pub fn gateway_url(&self, name: &str) -> String {
        gateway_url(name)
    }

    /// The controller that leads and publishes.
    pub fn leading(&self) -> Option<&'static str> {
        CONTROLLERS.into_iter().find(|name| self.controller_status(name).is_some_and(|status| status["publishing"] == true))
    }

    /// Waits until one leads and publishes.
    pub async fn led(&self) -> &'static str {
        let start = Instant::now();
        loop {
            if let Some(leader) = self.leading() {
                return leader;
            }
            assert!(start.elapsed() < DEADLINE, "nobody leads");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// An administrator at this gateway.
    pub async fn user(&self, gateway: &str) -> User {
        User::of(self.gateway_url(gateway), &self.admin_token).await
    }

    fn token(&self, id: &str, role: &str) -> String {
        let flags = self.bus_flags();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let ran = groupcast(&[&["token", "add", id, "--role", role, "--on-bus"][..], &flags].concat(), &[]);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.stdout.trim().to_owned()
    }

    /// A command of an operator who knows these gateways, in this order.
    pub fn operator(&self, gateways: &[&str], arguments: &[&str]) -> Ran {
        self.outside().operator(gateways, arguments)
    }

    /// A command on the bus itself.
    pub fn on_bus(&self, arguments: &[&str]) -> Ran {
        let flags = self.bus_flags();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        groupcast(&[arguments, &flags].concat(), &[])
    }

    /// The policy in which exactly these ports pass, written as a file an operator applies.
    pub fn policy(&self, ports: &[u16]) -> PathBuf {
        self.outside().policy(ports, "")
    }
}

fn gateway_url(name: &str) -> String {
    format!("http://{}:4270", address(name))
}

/// Operators, watchers and workloads: they go on whatever happens to the machines.
#[derive(Clone)]
pub struct Outside {
    sender: Arc<Namespace>,
    admin_token: String,
    folder: PathBuf,
}

impl Outside {
    /// Whether packets pass between the two workloads, from the first host's to the second's.
    pub fn passes(&self, port: u16, within: Duration) -> bool {
        let to = SocketAddr::from((workload_address(HOSTS[1]), port));
        let stream = self.sender.connect(to, within);
        stream.is_ok_and(|stream| crate::field::talks(&stream, within))
    }

    pub fn controller(&self, name: &str, path: &str) -> Option<(u16, String)> {
        http(SocketAddr::from((address(name), 4280)), path, CONTROLLER_TOKEN, Duration::from_secs(5))
    }

    pub fn gateway(&self, name: &str, path: &str) -> Option<(u16, String)> {
        http(SocketAddr::from((address(name), 4270)), path, &self.admin_token, Duration::from_secs(5))
    }

    /// A command of an operator who knows these gateways, in this order.
    pub fn operator(&self, gateways: &[&str], arguments: &[&str]) -> Ran {
        let urls: Vec<String> = gateways.iter().map(|name| gateway_url(name)).collect();
        groupcast(arguments, &[("GROUPCAST_GATEWAY", &urls.join(",")), ("GROUPCAST_TOKEN", &self.admin_token)])
    }

    /// The policy in which exactly these ports pass, and which has this name, as a file.
    pub fn policy(&self, ports: &[u16], name: &str) -> PathBuf {
        let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
        let list = ports.join(",");
        let text = format!(
            "kind: group\nid: one\nname: 'n{name}'\nrules: ['egress tcp {list} to group:two']\nbindings: ['app:{}']\n---\n\
             kind: group\nid: two\nrules: ['ingress tcp {list} from group:one']\nbindings: ['app:{}']\n",
            HOSTS[0], HOSTS[1]
        );
        let path = self.folder.join(format!("policy-{}-{name}.yaml", ports.join("-")));
        std::fs::write(&path, text).expect("written");
        path
    }
}

/// One request; status and body.
fn http(address: SocketAddr, path: &str, token: &str, within: Duration) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.set_read_timeout(Some(within)).ok()?;
    let bearer = if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}\r\n") };
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n{bearer}Connection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let body = match head.to_lowercase().contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    };
    Some((head.split_whitespace().nth(1)?.parse().ok()?, body))
}

fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let Ok(size) = usize::from_str_radix(size.trim(), 16) else { break };
        if size == 0 || rest.len() < size {
            break;
        }
        text.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    text
}
