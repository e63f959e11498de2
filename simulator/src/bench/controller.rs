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
use groupcast_topics::nats::{NodeHandle, compiled, spawn_node};
use groupcast_topics::node::{Committed, Settings};
use tokio::runtime::{Builder, Runtime};

/// How long a controller may take to lead a fresh bus.
const LEADING_DEADLINE: Duration = Duration::from_secs(30);

/// Topics published in one change while a benchmark prepares: below the batch limit, and each host's tally beside them.
const PREPARE_TOPICS_MAX: usize = 5_000;

/// Runs on a thread of its own, as it is a process of its own in life: it must not queue behind thousands of hosts.
pub struct Controller {
    node: Option<NodeHandle>,
    change: u64,
    runtime: Option<Runtime>,
}

impl Controller {
    /// Creates the streams, and returns when the controller leads.
    pub async fn start(server: &Server) -> anyhow::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("controller").enable_all().build()?;
        let mut controller = Self { node: None, change: 0, runtime: None };
        let options = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("bench")?);
        let connecting = runtime.spawn(async move {
            let (client, events) = connect::connect(options).await?;
            streams::ensure(&client, 1).await?;
            anyhow::Ok(spawn_node(client, events, Settings::default(), 1, 1, Box::new(|| compiled(Default::default()))))
        });
        controller.runtime = Some(runtime);
        let node = connecting.await??;
        let mut leading = node.leading();
        controller.node = Some(node);
        let led = tokio::time::timeout(LEADING_DEADLINE, leading.wait_for(Option::is_some)).await;
        led.context("the controller did not come to lead a fresh bus")??;
        Ok(controller)
    }

    /// One change; returns when it is in the stream.
    pub async fn publish(&mut self, edits: Vec<(Topic, Edit)>) -> anyhow::Result<Committed> {
        self.change += 1;
        let proposal = Proposal { change: self.change, catalog: self.change, edits, ..Proposal::default() };
        let node = self.node.as_ref().context("the controller has started")?;
        node.propose(proposal).await.map_err(|refused| anyhow!("the change was refused: {refused}"))
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

impl Drop for Controller {
    fn drop(&mut self) {
        self.node = None;
        if let Some(runtime) = self.runtime.take() {
            // Waiting for it would block the thread that the benchmark itself runs on.
            runtime.shutdown_background();
        }
    }
}
