//! Watches over the topics node: tells the compiler when this controller leads, and what is published. The node itself follows all
//! topics, holds the lease and serves snapshots from memory, on tasks of its own.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::needs::Documents;
use groupcast_policy::topic::Topic;
use groupcast_topics::Map;
use groupcast_topics::nats::NodeHandle;
use groupcast_topics::node::Vacancy;

use super::{MAILBOX_MAX, Ping};
use crate::actors::compiler::Leading;

/// The digests of everything published; `None` when the node is gone.
#[derive(Message)]
#[rtype(result = "Option<Map<Topic, Digest>>")]
pub struct AskDigests;

/// What is published of these topics, absent ones included.
#[derive(Message)]
#[rtype(result = "Option<Map<Topic, Document>>")]
pub struct AskDocuments(pub Vec<Topic>);

/// What can be seen of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeView {
    pub synced: bool,
    pub leading: bool,
    pub topics: usize,
    pub term: u64,
    pub lead: u64,
    /// Who leads, or did last, and for how long it has.
    pub leader: Option<(String, Duration)>,
    /// Nobody leads: since when, and why.
    pub vacancy: Option<Vacancy>,
}

#[derive(Message)]
#[rtype(result = "Option<NodeView>")]
pub struct LookAtNode;

pub struct Leadership {
    node: Arc<NodeHandle>,
    compiler: Recipient<Leading>,
}

impl Leadership {
    pub fn new(node: Arc<NodeHandle>, compiler: Recipient<Leading>) -> Self {
        Self { node, compiler }
    }
}

impl Actor for Leadership {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let (mut leading, compiler) = (self.node.leading(), self.compiler.clone());
        let watch = async move {
            loop {
                let term = *leading.borrow_and_update();
                if compiler.send(Leading(term)).await.is_err() {
                    return "the compiler does not answer";
                }
                if leading.changed().await.is_err() {
                    return "the connection to the bus is closed";
                }
            }
        };
        context.spawn(watch.into_actor(self).map(|why, _, context| {
            tracing::error!(why, "leadership ends");
            context.stop();
        }));
    }
}

impl Handler<AskDigests> for Leadership {
    type Result = ResponseFuture<Option<Map<Topic, Digest>>>;

    fn handle(&mut self, _: AskDigests, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move {
            let digests = node.inspect(|node, _| {
                let all = node.replica().documents();
                all.map(|(topic, document)| (topic.clone(), document.digest())).collect()
            });
            digests.await
        })
    }
}

impl Handler<AskDocuments> for Leadership {
    type Result = ResponseFuture<Option<Map<Topic, Document>>>;

    fn handle(&mut self, AskDocuments(topics): AskDocuments, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move {
            let documents = node.inspect(move |node, _| {
                let replica = node.replica();
                let document = |topic: &Topic| replica.document(topic).cloned().unwrap_or_default();
                topics.iter().map(|topic| (topic.clone(), document(topic))).collect()
            });
            documents.await
        })
    }
}

impl Handler<LookAtNode> for Leadership {
    type Result = ResponseFuture<Option<NodeView>>;

    fn handle(&mut self, _: LookAtNode, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move {
            let view = node.inspect(|node, _| NodeView {
                synced: node.is_synced(),
                leading: node.is_leading(),
                topics: node.replica().len(),
                term: node.replica().cut().term,
                lead: node.replica().cut().lead,
                leader: node.leader().map(|leader| {
                    let led_ms = node.now_ms().saturating_sub(leader.since_ms);
                    (leader.name.clone(), Duration::from_millis(led_ms))
                }),
                vacancy: node.vacancy(),
            });
            view.await
        })
    }
}

impl Handler<Ping> for Leadership {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}
