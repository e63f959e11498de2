//! Has the topics node publish batches, one at a time: the compiler sends the next when this one is decided.

use std::sync::Arc;
use std::time::Instant;

use actix::prelude::*;
use groupcast_topics::batch::{Proposal, Refused};
use groupcast_topics::nats::NodeHandle;
use groupcast_topics::node::Committed;
use tracing::Instrument;

use super::{MAILBOX_MAX, Ping};
use crate::names;

/// Answered when the batch is in the stream for good, or refused.
#[derive(Message)]
#[rtype(result = "Result<Committed, Refused>")]
pub struct Publish {
    pub proposal: Proposal,
    /// How many changes it merges.
    pub changes: usize,
    /// Of the first of them.
    pub trace: tracing::Span,
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
        let change = publish.proposal.change;
        let span = tracing::debug_span!(parent: &publish.trace, "publish", change = names::traced(change), changes = publish.changes, topics);
        let propose = async move {
            let begun = Instant::now();
            let result = node.propose(publish.proposal).await;
            metrics::histogram!(names::PUBLISH_SECONDS).record(begun.elapsed().as_secs_f64());
            match &result {
                Ok(committed) => {
                    metrics::counter!(names::PUBLISHED_BATCHES).increment(1);
                    metrics::counter!(names::PUBLISHED_TOPICS_TOTAL).increment(committed.topics.len() as u64);
                    metrics::histogram!(names::PUBLISH_TOPICS).record(committed.topics.len() as f64);
                    metrics::histogram!(names::PUBLISH_BYTES).record(committed.bytes as f64);
                    metrics::histogram!(names::SPAN_HOSTS).record(committed.span.len() as f64);
                    tracing::debug!(change, hosts = committed.span.len(), bytes = committed.bytes, "committed");
                }
                Err(why) => {
                    metrics::counter!(names::PUBLISH_REFUSED).increment(1);
                    tracing::debug!(change, %why, "a batch was not published");
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
