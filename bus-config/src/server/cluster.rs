//! Three servers as one cluster, whose nodes can be killed, paused and separated.
//!
//! Nodes reach each other only through relays of ours: every node's routes name its relays to the others, and the address it
//! advertises to be gossiped is one where nobody listens, so that a cut link stays cut also after a third node introduces the two.

use std::net::Ipv4Addr;
use std::time::Instant;

use tokio::runtime::Runtime;

use super::proxy::{Link, Proxy};
use super::{Config, Error, PORT_ATTEMPTS_MAX, Ports, READY_DEADLINE, Server, port_taken};

/// Nodes of a cluster: the smallest number that survives the loss of one.
pub const NODES: usize = 3;

#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
    /// `links[from][to]`; nothing where both are the same.
    links: Vec<Vec<Option<Proxy>>>,
    runtime: Option<Runtime>,
}

impl Cluster {
    /// Starts three nodes and waits until they have formed a cluster with JetStream.
    pub async fn start(config: Config) -> Result<Self, Error> {
        for _ in 0..PORT_ATTEMPTS_MAX {
            match Self::attempt(&config).await {
                Err(Error::Ended { log }) if port_taken(&log) => continue,
                other => return other,
            }
        }
        Err(Error::NoPort)
    }

    async fn attempt(config: &Config) -> Result<Self, Error> {
        let runtime_failed = |error: std::io::Error| Error::CannotRun { path: "relay".into(), reason: error.to_string() };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let mut cluster = Self { nodes: Vec::new(), links: Vec::new(), runtime: Some(runtime.map_err(runtime_failed)?) };
        let runtime = cluster.runtime.as_ref().ok_or(Error::NotRunning)?;
        for from in 0..NODES {
            let row = (0..NODES).map(|to| if from == to { Ok(None) } else { Proxy::start(runtime).map(Some) });
            cluster.links.push(row.collect::<Result<_, _>>().map_err(runtime_failed)?);
        }
        for node in 0..NODES {
            let mut config = config.clone();
            // Each node has files of its own; ports are chosen, a fixed one could serve one node only.
            config.store_dir = config.store_dir.map(|dir| dir.join(format!("node-{node}")));
            config.client_port = None;
            let ports = Ports::choose(None)?;
            let routes: Vec<String> = cluster.links[node]
                .iter()
                .flatten()
                .map(|proxy| format!("\"nats-route://{}:{}\"", Ipv4Addr::LOCALHOST, proxy.port()))
                .collect();
            let text = format!(
                "cluster {{ name: \"groupcast\", listen: \"127.0.0.1:{}\", advertise: \"127.0.0.1:1\", no_advertise: true, routes: [{}] }}",
                ports.cluster,
                routes.join(", ")
            );
            for from in 0..NODES {
                if let Some(proxy) = &cluster.links[from][node] {
                    proxy.set_target(ports.cluster);
                }
            }
            cluster.nodes.push(Server::prepare(&config, ports, Some(text))?);
        }
        for node in 0..NODES {
            cluster.launch(node).await?;
        }
        cluster.formed().await?;
        Ok(cluster)
    }

    async fn launch(&mut self, node: usize) -> Result<(), Error> {
        self.nodes[node].restart_once().await
    }

    /// Waits until every running node knows a meta leader and is current with it.
    pub async fn formed(&self) -> Result<(), Error> {
        let deadline = Instant::now() + READY_DEADLINE;
        let mut reason = String::new();
        while Instant::now() < deadline {
            reason.clear();
            for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.is_running()) {
                let health = node.monitor("/healthz").await;
                let meta = node.monitor("/jsz").await;
                match (health, meta) {
                    (Ok(health), Ok(jsz)) => {
                        let leader = jsz["meta_cluster"]["leader"].as_str().unwrap_or_default();
                        let size = jsz["meta_cluster"]["cluster_size"].as_u64().unwrap_or(0);
                        if health["status"] != "ok" || leader.is_empty() || size != NODES as u64 {
                            reason = format!("node {index}: {health}, meta leader {leader:?} of {size}");
                        }
                    }
                    (health, _) => reason = format!("node {index}: {health:?}"),
                }
            }
            if reason.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(super::POLL * 5).await;
        }
        Err(Error::NotReady { reason, log: self.nodes[0].log_tail() })
    }

    pub fn node(&self, node: usize) -> &Server {
        &self.nodes[node]
    }

    /// Where clients connect, one per node.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// The node a server name belongs to, as stream and cluster information name leaders.
    pub fn node_named(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.name() == name)
    }

    /// Kills one node as a crash does.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
    }

    /// Starts a node again and waits until it accepts connections; [`Cluster::formed`] waits for the rest.
    pub async fn restart(&mut self, node: usize) -> Result<(), Error> {
        self.nodes[node].restart().await
    }

    pub fn pause(&self, node: usize) -> Result<(), Error> {
        self.nodes[node].pause()
    }

    pub fn resume(&self, node: usize) -> Result<(), Error> {
        self.nodes[node].resume()
    }

    /// Separates two nodes: their connections close and no new one is let through.
    pub fn cut(&self, a: usize, b: usize) {
        self.set_link(a, b, Link::Cut);
    }

    /// Joins two separated nodes again; the servers dial each other about once a second.
    pub fn heal(&self, a: usize, b: usize) {
        self.set_link(a, b, Link::Open);
    }

    /// Separates one node from the two others.
    pub fn isolate(&self, node: usize) {
        (0..NODES).filter(|other| *other != node).for_each(|other| self.cut(node, other));
    }

    /// Joins one node to the two others again.
    pub fn rejoin(&self, node: usize) {
        (0..NODES).filter(|other| *other != node).for_each(|other| self.heal(node, other));
    }

    pub fn set_link(&self, a: usize, b: usize, link: Link) {
        for proxy in [&self.links[a][b], &self.links[b][a]].into_iter().flatten() {
            proxy.set(link);
        }
    }

    /// Whether two nodes have a route to each other right now, as the first one sees it.
    pub async fn connected(&self, a: usize, b: usize) -> Result<bool, Error> {
        let routes = self.nodes[a].monitor("/routez").await?;
        let name = self.nodes[b].name();
        Ok(routes["routes"].as_array().is_some_and(|routes| routes.iter().any(|route| route["remote_name"] == name)))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Nodes first, so that none logs or stores anything about lost routes; a runtime cannot be dropped inside another one.
        self.nodes.clear();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
