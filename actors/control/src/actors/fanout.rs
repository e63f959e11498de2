//! Has the topics node publish batches, one at a time: the compiler sends the next when this one is decided.

use std::sync::Arc;
use std::time::Instant;

use actix::prelude::*;
use groupcast_topics::batch::{Proposal, Refused};
use groupcast_topics::nats::NodeHandle;
use groupcast_topics::node::Committed;
use tracing::Instrument;

use super::{MAILBOX_MAX, Ping};

/// Answered when the batch is in the stream for good, or refused.
#[derive(Message)]
#[rtype(result = "Result<Committed, Refused>")]
pub struct Publish {
    pub proposal: Proposal,
    /// How many changes it merges.
    pub changes: usize,
}

pub struct Fanout {
    node: Arc<NodeHandle>,
}

impl Fanout {
    pub fn new(node: Arc<NodeHandle>) -> Self {
        Self { node }
    }
}

impl Actor for Fanout {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
    }
}

impl Supervised for Fanout {}

impl Handler<Publish> for Fanout {
    type Result = ResponseFuture<Result<Committed, Refused>>;

    fn handle(&mut self, publish: Publish, _: &mut Self::Context) -> Self::Result {
        let (node, topics) = (self.node.clone(), publish.proposal.edits.len());
        let span = tracing::debug_span!("publish", change = publish.proposal.change, changes = publish.changes, topics);
        let propose = async move {
            let begun = Instant::now();
            let result = node.propose(publish.proposal).await;
            metrics::histogram!("groupcast_publish_seconds").record(begun.elapsed().as_secs_f64());
            match &result {
                Ok(committed) => {
                    metrics::counter!("groupcast_published_batches_total").increment(1);
                    metrics::counter!("groupcast_published_topics_total").increment(committed.topics.len() as u64);
                    metrics::histogram!("groupcast_span_hosts").record(committed.span.len() as f64);
                }
                Err(why) => {
                    metrics::counter!("groupcast_publish_refused_total").increment(1);
                    tracing::debug!(%why, "a batch was not published");
                }
            }
            result
        };
        Box::pin(propose.instrument(span))
    }
}

impl Handler<Ping> for Fanout {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}
