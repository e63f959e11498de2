//! A bus that belongs to one test: a server or a cluster of three, with controllers (nodes) and hosts (readers) on it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Events, Options};
use groupcast_bus_config::server::{Cluster, Config, Server};
use groupcast_bus_config::{streams, subjects};
use groupcast_messages::Cut;
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::{Documents, needed};
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::{Proposal, Refused};
use groupcast_topics::nats::{Compile, NodeHandle, OnCommit, ReaderHandle, compiled, spawn_node, spawn_reader};
use groupcast_topics::node::{self, Committed};
use groupcast_topics::{Map, reader};

/// Nothing a test waits for takes longer than this on a slow machine; whatever does is broken.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub enum Bus {
    One(Box<Server>),
    Three(Box<Cluster>),
}

pub struct World {
    pub bus: Bus,
    pub replicas: usize,
    /// What should be published, for controllers that have to begin from scratch.
    pub written: Written,
    pub lease_ms: u64,
    seed: u64,
}

/// Stands in for CATALOG and the compiler: what was written, compiled.
#[derive(Clone, Default)]
pub struct Written(Arc<Mutex<Map<Topic, Document>>>);

impl Written {
    pub fn write(&self, edits: &[(Topic, Edit)]) {
        let mut documents = self.0.lock().expect("lock");
        for (topic, edit) in edits {
            documents.entry(topic.clone()).or_default().apply(edit).expect("a good edit");
        }
    }

    fn compile(&self) -> Compile {
        let written = self.0.clone();
        Box::new(move || compiled(node::Desired { documents: written.lock().expect("lock").clone(), ..Default::default() }))
    }
}

/// Waits until `condition` holds, or fails with `what` after [`DEADLINE`].
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The seed of this run's randomness: `GROUPCAST_SEED`, or a fixed one so that a plain run is the same every time.
pub fn seed() -> u64 {
    let seed = std::env::var("GROUPCAST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    eprintln!("seed {seed} (set GROUPCAST_SEED to replay another)");
    seed
}

/// Whether the large counts were asked for (`./test --full`).
pub fn full() -> bool {
    std::env::var_os("GROUPCAST_FULL").is_some()
}

impl World {
    pub async fn one() -> Self {
        let server = Server::start(Config::plain()).await.expect("a nats-server starts");
        Self::new(Bus::One(Box::new(server)), 1).await
    }

    /// Three servers, streams on all of them.
    pub async fn three() -> Self {
        let cluster = Cluster::start(Config::plain()).await.expect("a cluster of three starts");
        Self::new(Bus::Three(Box::new(cluster)), 3).await
    }

    async fn new(bus: Bus, replicas: usize) -> Self {
        let world = Self { bus, replicas, written: Written::default(), lease_ms: 3_000, seed: seed() };
        let (client, _events) = world.connect(0, Role::Controller, "setup").await;
        streams::ensure(&client, replicas).await.expect("the streams can be created");
        world
    }

    pub fn url(&self, node: usize) -> String {
        match &self.bus {
            Bus::One(server) => server.url(),
            Bus::Three(cluster) => cluster.node(node).url(),
        }
    }

    pub fn server(&mut self) -> &mut Server {
        match &mut self.bus {
            Bus::One(server) => server,
            Bus::Three(_) => panic!("this world has a cluster"),
        }
    }

    pub fn cluster(&mut self) -> &mut Cluster {
        match &mut self.bus {
            Bus::Three(cluster) => cluster,
            Bus::One(_) => panic!("this world has one server"),
        }
    }

    /// A connection to one server only, which comes back quickly: tests do not want a fleet's patience.
    pub async fn connect(&self, node: usize, role: Role, name: &str) -> (async_nats::Client, Events) {
        connect_to(self.url(node), role, name).await
    }

    /// A connection that goes wherever a server answers, for looking on.
    pub async fn observer(&self, name: &str) -> async_nats::Client {
        let servers = match &self.bus {
            Bus::One(server) => vec![server.url()],
            Bus::Three(cluster) => cluster.urls(),
        };
        let name = HostId::new(name).expect("a name");
        let options = Options::new(&servers, Role::Controller, &name).reconnect_delay_max(Duration::from_millis(200));
        connect::connect(options).await.expect("the bus can be reached").0
    }

    /// The cluster's node that leads the TOPICS stream, when there is one.
    pub async fn topics_leader(&self, client: &async_nats::Client) -> usize {
        let Bus::Three(cluster) = &self.bus else { return 0 };
        let start = Instant::now();
        loop {
            let answer = ask(client, "STREAM.INFO").await;
            let leader = answer.as_ref().and_then(|answer| answer["cluster"]["leader"].as_str());
            if let Some(node) = leader.and_then(|leader| cluster.node_named(leader)) {
                return node;
            }
            assert!(start.elapsed() < DEADLINE, "TOPICS has no leader: {answer:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn node(&mut self, server: usize, name: &str) -> NodeHandle {
        self.node_with(server, name, true).await
    }

    /// A controller that lives in a runtime of its own, with its connection: shutting that down is what a kill is to a process.
    pub async fn node_in(&mut self, runtime: &tokio::runtime::Runtime, server: usize, name: &str) -> NodeHandle {
        self.seed += 1;
        let (url, seed, lease_ms, replicas) = (self.url(server), self.seed, self.lease_ms, self.replicas);
        let compile = self.written.compile();
        let name = name.to_owned();
        let started = runtime.spawn(async move {
            let (client, events) = connect_to(url, Role::Controller, &name).await;
            let settings = node::Settings { name, lease_ms, ..Default::default() };
            spawn_node(client, events, settings, replicas, seed, compile)
        });
        started.await.expect("the controller starts")
    }

    /// Publishes what a world begins with, written down as CATALOG would have it.
    pub async fn publish(&self, node: &NodeHandle, edits: Vec<(Topic, Edit)>) {
        self.written.write(&edits);
        publish(node, 1, edits).await.expect("the leader leads");
    }

    /// A controller that serves but never leads.
    pub async fn service(&mut self, server: usize, name: &str) -> NodeHandle {
        self.node_with(server, name, false).await
    }

    async fn node_with(&mut self, server: usize, name: &str, candidate: bool) -> NodeHandle {
        self.node_at(self.url(server), name, candidate).await
    }

    /// A controller that connects to this address.
    pub async fn node_at(&mut self, url: String, name: &str, candidate: bool) -> NodeHandle {
        let (client, events) = connect_to(url, Role::Controller, name).await;
        let settings = node::Settings { name: name.to_owned(), candidate, lease_ms: self.lease_ms, ..Default::default() };
        self.seed += 1;
        spawn_node(client, events, settings, self.replicas, self.seed, self.written.compile())
    }

    /// A host whose every exposed state is handed to `watch`.
    pub async fn host_watched(&mut self, server: usize, name: &str, watch: OnCommit) -> Host {
        self.host_with(server, name, reader::Settings::default(), watch).await
    }

    pub async fn host_with(&mut self, server: usize, name: &str, settings: reader::Settings, watch: OnCommit) -> Host {
        let (client, events) = self.connect(server, Role::Host, name).await;
        self.seed += 1;
        let id = HostId::new(name).expect("a name");
        let reader = spawn_reader(client.clone(), events, id.clone(), settings, self.seed, watch);
        Host { id, reader, client }
    }

    /// A host that lives in a runtime of its own, with its connection.
    pub async fn host_in(&mut self, runtime: &tokio::runtime::Runtime, server: usize, name: &str, watch: OnCommit) -> Host {
        self.seed += 1;
        let (url, seed, id) = (self.url(server), self.seed, HostId::new(name).expect("a name"));
        let started = runtime.spawn(async move {
            let (client, events) = connect_to(url, Role::Host, id.as_str()).await;
            let reader = spawn_reader(client.clone(), events, id.clone(), reader::Settings::default(), seed, watch);
            Host { id, reader, client }
        });
        started.await.expect("the host starts")
    }

    pub async fn host(&mut self, server: usize, name: &str) -> Host {
        self.host_watched(server, name, Box::new(|_, _| true)).await
    }
}

async fn connect_to(url: String, role: Role, name: &str) -> (async_nats::Client, Events) {
    let name = HostId::new(name).expect("a name");
    let options = Options::new(&[url], role, &name).reconnect_delay_max(Duration::from_millis(200));
    connect::connect(options).await.expect("the bus can be reached")
}

/// A JetStream request about TOPICS; `None` when nobody answers.
pub async fn ask(client: &async_nats::Client, verb: &str) -> Option<serde_json::Value> {
    let request = client.request(subjects::js_api(verb, streams::TOPICS.name), "".into());
    let answer = tokio::time::timeout(Duration::from_secs(2), request).await.ok()?.ok()?;
    serde_json::from_slice(&answer.payload).ok()
}

pub struct Host {
    pub id: HostId,
    pub reader: ReaderHandle,
    /// The reader's connection, to look at.
    pub client: async_nats::Client,
}

impl Host {
    /// What the host exposes, with its cut and the revisions.
    pub async fn state(&self) -> (Option<Cut>, BTreeMap<Topic, Document>) {
        self.reader
            .inspect(|reader| {
                let documents = reader.documents().map(|(topic, document)| (topic.clone(), document.clone())).collect();
                (reader.cut(), documents)
            })
            .await
            .expect("the reader lives")
    }

    pub async fn cut(&self) -> Option<Cut> {
        self.reader.inspect(|reader| reader.cut()).await.expect("the reader lives")
    }
}

/// Waits until one of the nodes leads, and says which.
pub async fn leader(nodes: &[NodeHandle]) -> usize {
    let start = Instant::now();
    loop {
        if let Some(index) = nodes.iter().position(|node| node.leading().borrow().is_some()) {
            return index;
        }
        if start.elapsed() > DEADLINE {
            let mut states = String::new();
            for node in nodes {
                let state = node.inspect(|node, _| format!("{node:?}")).await.unwrap_or_else(|| "has ended".into());
                states.push_str(&format!("\n{state:.3000}"));
            }
            panic!("nobody leads:{states}");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub fn change(number: u64, edits: Vec<(Topic, Edit)>) -> Proposal {
    Proposal { number, change: number, catalog: number, edits, ..Default::default() }
}

pub async fn publish(node: &NodeHandle, number: u64, edits: Vec<(Topic, Edit)>) -> Result<Committed, Refused> {
    node.propose(change(number, edits)).await
}

/// What the node has published of what `host` needs.
pub async fn expected(node: &NodeHandle, host: &HostId) -> BTreeMap<Topic, Document> {
    let host = host.clone();
    node.inspect(move |node, _| {
        let replica = node.replica();
        let topics = needed(&host, replica);
        topics.into_iter().map(|topic| (topic.clone(), replica.document(&topic).cloned().unwrap_or_default())).collect()
    })
    .await
    .expect("the node lives")
}

/// Waits until the host exposes exactly what the node has published for it.
pub async fn settled(node: &NodeHandle, host: &Host) {
    let start = Instant::now();
    loop {
        let wanted = expected(node, &host.id).await;
        let (cut, found) = host.state().await;
        if wanted == found {
            return;
        }
        if start.elapsed() > DEADLINE {
            let differing: Vec<&Topic> = wanted.keys().chain(found.keys()).filter(|t| wanted.get(*t) != found.get(*t)).collect();
            panic!("host {} does not settle: at {cut:?}, differs in {differing:?}", host.id);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
