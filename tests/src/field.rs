//! Everything as it runs, on one machine: `groupcast up` and agents as processes, hosts and workloads in network namespaces, and packets
//! between them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use groupcast_bus_config::lab::{self, Agent, AgentSettings, Lab, Up};
use groupcast_control::place::{self, NETWORK, Place};

use crate::control::{agent_binary, binary};
use crate::gateway::{User, scratch};
use crate::world::DEADLINE;

/// How long a connection that is allowed may take: a lost first packet is repeated after one second and after three.
const CONNECTS_WITHIN: Duration = Duration::from_secs(10);
/// How long one that is denied is tried.
const REFUSED_AFTER: Duration = Duration::from_millis(400);

/// Who is where.
pub const PLACES: [Place; 3] = [
    Place { workload: "web-1", host: "h1", app: "web" },
    Place { workload: "db-1", host: "h2", app: "db" },
    Place { workload: "job-1", host: "h3", app: "jobs" },
];
/// Ports on which every workload answers.
pub const PORTS: [u16; 2] = [5432, 8080];

pub struct Field {
    // Ended before what they run in.
    pub agents: BTreeMap<String, Agent>,
    pub lab: Lab,
    pub admin: User,
    pub up: Up,
    folder: PathBuf,
}

/// Whether this can be run here; says so if not.
pub fn possible() -> bool {
    let possible = lab::is_allowed();
    if !possible {
        eprintln!("not run: no network namespaces (not root)");
    }
    possible
}

impl Field {
    pub async fn start() -> Self {
        let folder = scratch("field");
        let up = Up::start(binary(), &folder, SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("groupcast up");
        let admin = User::of(up.addresses.gateway.clone(), &up.token().expect("a token")).await;
        // Nobody leads a bus on which nothing was ever written.
        let template = serde_json::json!({ "kind": "template", "id": NETWORK, "network": NETWORK }).to_string();
        let written = admin.ask("PUT", &format!("/v1/templates/{NETWORK}"), &[], Some(template.into_bytes())).await;
        assert_eq!(written.status, 201, "{}", written.text);
        let mut lab = Lab::new(up.bus_address().expect("an address")).expect("a lab");
        place::build(&mut lab, &PLACES).expect("hosts and workloads");
        for workload in lab.workloads.values() {
            for port in PORTS {
                answer(workload.namespace.listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).expect("it listens"));
            }
        }
        let mut field = Self { agents: BTreeMap::new(), lab, admin, up, folder };
        place::enter(&field.up, Some(&field.lab), &PLACES).await.expect("registered");
        for Place { workload, host, .. } in PLACES {
            let folder = field.folder.join(host);
            std::fs::create_dir_all(&folder).expect("a folder");
            field.up.credential(host, &folder.join("agent.creds")).expect("a credential");
            field.start_agent(host);
            field.agents[host].attach(workload, &field.lab.workloads[workload].interface).expect("attached");
        }
        field
    }

    /// Starts the agent of a host, also again after it was killed.
    pub fn start_agent(&mut self, host: &str) {
        self.start_agent_as(host, false);
    }

    /// One that only prints what it would do.
    pub fn start_dry_agent(&mut self, host: &str) {
        self.start_agent_as(host, true);
    }

    fn start_agent_as(&mut self, host: &str, dry_run: bool) {
        let (folder, place) = (self.folder.join(host), &self.lab.hosts[host]);
        let settings = AgentSettings {
            binary: agent_binary().clone(),
            host: host.to_owned(),
            bus: place.bus.clone(),
            credentials: Some(folder.join("agent.creds")),
            folder,
            dry_run,
        };
        let agent = Agent::start(settings, Some(&place.namespace)).expect("an agent");
        self.agents.insert(host.to_owned(), agent);
    }

    /// Whether a connection is made and a line comes back over it.
    pub fn passes(&self, from: &str, to: &str, port: u16, expected: bool) -> bool {
        let within = if expected { CONNECTS_WITHIN } else { REFUSED_AFTER };
        let stream = self.lab.connect(from, to, port, within).expect("it is tried");
        stream.is_ok_and(|stream| talks(&stream, within))
    }

    /// What packets do, and what an explanation says about it, are both what is expected.
    pub async fn expect(&self, from: &str, to: &str, port: u16, expected: bool) {
        let words = format!("{from} -> {to} tcp/{port}");
        assert_eq!(self.passes(from, to, port, expected), expected, "packets {words}");
        let path = format!("/v1/explain?from={from}&to={to}&traffic=tcp/{port}");
        let told = self.admin.get(&path).await;
        assert_eq!((told.status, &told.body["allowed"]), (200, &expected.into()), "explanation of {words}: {}", told.text);
    }

    /// Waits until every host that a change concerns has it in force; its progress.
    pub async fn enforced(&self, change: u64) -> serde_json::Value {
        let start = Instant::now();
        loop {
            let answer = self.admin.get(&format!("/v1/changes/{change}?wait=enforced&timeout=10s")).await;
            let progress = answer.body["progress"].clone();
            if progress["done"] == true {
                return progress;
            }
            assert!(start.elapsed() < DEADLINE, "change {change} is not enforced: {}", answer.text);
        }
    }
}

impl Drop for Field {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- groupcast up:\n{}", self.up.log());
            self.agents.iter().for_each(|(host, agent)| eprintln!("--- agent of {host}:\n{}", agent.log()));
        }
        self.agents.clear();
        self.up.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Says back whatever comes, on every connection, until the process ends.
pub fn answer(listener: std::net::TcpListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let Ok(mut back) = stream.try_clone() else { return };
                let mut stream = stream;
                let _ = std::io::copy(&mut stream, &mut back);
            });
        }
    });
}

/// Whether what is said comes back.
pub fn talks(mut stream: &TcpStream, within: Duration) -> bool {
    let mut back = [0; 5];
    stream.set_read_timeout(Some(within)).is_ok() && stream.write_all(b"hello").is_ok() && stream.read_exact(&mut back).is_ok()
}
