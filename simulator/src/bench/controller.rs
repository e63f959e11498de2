//! The real controller side of topics, on the benchmark's server.

use std::time::Duration;

use anyhow::{Context, anyhow};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::server::Server;
use groupcast_bus_config::{connect, streams};
use groupcast_policy::doc::Edit;
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::Proposal;
use groupcast_topics::nats::{NodeHandle, spawn_node};
use groupcast_topics::node::{Committed, Settings};

/// How long a controller may take to lead a fresh bus.
const LEADING_DEADLINE: Duration = Duration::from_secs(30);

/// Topics published in one change while a benchmark prepares: below the batch limit, and each host's tally beside them.
const PREPARE_TOPICS_MAX: usize = 5_000;

pub struct Controller {
    node: NodeHandle,
    change: u64,
}

impl Controller {
    /// Creates the streams, and returns when the controller leads.
    pub async fn start(server: &Server) -> anyhow::Result<Self> {
        let (client, events) =
            connect::connect(connect::Options::new(&[server.url()], Role::Controller, &HostId::new("bench")?)).await?;
        streams::ensure(&client, 1).await?;
        let node = spawn_node(client, events, Settings::default(), 1, 1, Box::new(Default::default));
        let mut leading = node.leading();
        let led = tokio::time::timeout(LEADING_DEADLINE, leading.wait_for(Option::is_some)).await;
        led.context("the controller did not come to lead a fresh bus")??;
        drop(leading);
        Ok(Self { node, change: 0 })
    }

    /// One change; returns when it is in the stream.
    pub async fn publish(&mut self, edits: Vec<(Topic, Edit)>) -> anyhow::Result<Committed> {
        self.change += 1;
        let proposal = Proposal { change: self.change, catalog: self.change, edits, ..Proposal::default() };
        self.node.propose(proposal).await.map_err(|refused| anyhow!("the change was refused: {refused}"))
    }

    /// Publishes everything a benchmark needs before it begins to measure.
    pub async fn prepare(&mut self, mut edits: Vec<(Topic, Edit)>) -> anyhow::Result<()> {
        while !edits.is_empty() {
            let rest = edits.split_off(edits.len().min(PREPARE_TOPICS_MAX));
            self.publish(std::mem::replace(&mut edits, rest)).await?;
        }
        Ok(())
    }
}
