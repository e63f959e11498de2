//! Hears the hosts' acknowledgements and knows, for every change, who has it in force. The topics node nudges those who stay behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use async_nats::Client;
use futures::{FutureExt, StreamExt};
use groupcast_bus_config::subjects;
use groupcast_messages::{Ack, Beat};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;
use groupcast_topics::node::Committed;
use tokio::sync::broadcast;

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::progress::{Convergence, Progress};

/// Acknowledgements handed over at once.
pub const ACKS_AT_ONCE_MAX: usize = 4_096;
/// Events that wait for one who watches; who is slower misses the oldest, and is told so.
pub const WATCH_QUEUE_MAX: usize = 1_024;
/// How often those who watch are told what moved.
const TELL_EVERY: Duration = Duration::from_millis(50);

/// A leader began.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Began {
    pub term: u64,
}

/// These changes are published; without a batch they touched no topic.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Published {
    pub changes: Vec<u64>,
    pub committed: Option<Committed>,
}

/// Hosts that have no workload any more.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Left(pub Vec<HostId>);

/// Topics that some hosts do not need any more, and the hosts that still do.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Unfollowed(pub Vec<(TopicHash, Vec<HostId>)>);

/// What hosts said.
#[derive(Message)]
#[rtype(result = "()")]
struct Heard(Vec<(HostId, Said)>);

enum Said {
    Ack(Ack),
    Beat(Beat),
}

/// How far a change is; `None` when this leader does not know it (any more).
#[derive(Message)]
#[rtype(result = "Option<Progress>")]
pub struct AskProgress(pub u64);

/// The hosts a change concerns.
#[derive(Message)]
#[rtype(result = "Option<Vec<HostId>>")]
pub struct AskSpan(pub u64);

/// What can be seen of it from outside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConvergenceView {
    pub hosts: usize,
    pub behind: usize,
    pub unfinished: usize,
}

#[derive(Message)]
#[rtype(result = "ConvergenceView")]
pub struct LookAtConvergence;

/// From now on, the progress of every change that moves.
#[derive(Message)]
#[rtype(result = "broadcast::Receiver<Arc<Progress>>")]
pub struct Watch;

/// The subscription ended.
#[derive(Message)]
#[rtype(result = "()")]
struct Deaf;

pub struct ConvergenceActor {
    client: Client,
    runtime: tokio::runtime::Handle,
    clock: Instant,
    convergence: Convergence,
    watchers: broadcast::Sender<Arc<Progress>>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl ConvergenceActor {
    pub fn new(client: Client, clock: Instant, runtime: tokio::runtime::Handle) -> Self {
        let (watchers, _) = broadcast::channel(WATCH_QUEUE_MAX);
        Self { client, runtime, clock, convergence: Convergence::default(), watchers, task: None }
    }

    fn now_ms(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    fn tell(&mut self) {
        let (moved, now_ms) = (self.convergence.moved(), self.now_ms());
        if moved.is_empty() {
            return;
        }
        metrics::gauge!("groupcast_hosts_behind").set(self.convergence.behind() as f64);
        metrics::gauge!("groupcast_changes_unfinished").set(self.convergence.unfinished() as f64);
        for progress in moved.into_iter().filter_map(|change| self.convergence.progress(change, now_ms)) {
            if progress.is_done() {
                let (change, hosts, last_ms) = (progress.change, progress.span, progress.summary.last_ms);
                tracing::info!(change, hosts, last_ms, "enforced everywhere");
            }
            let _ = self.watchers.send(Arc::new(progress)); // nobody watches
        }
    }
}

impl Actor for ConvergenceActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let (client, own) = (self.client.clone(), context.address());
        self.task = Some(self.runtime.spawn(async move {
            if let Err(error) = listen(client, own.clone().recipient()).await {
                tracing::error!(%error, "cannot hear acknowledgements");
            }
            let _ = own.send(Deaf).await;
        }));
        context.run_interval(TELL_EVERY, |this, _| this.tell());
    }

    fn stopping(&mut self, _: &mut Self::Context) -> Running {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        Running::Stop
    }
}

impl Drop for ConvergenceActor {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// What is known of hosts stays; only the ear is new.
impl Supervised for ConvergenceActor {}

async fn listen(client: Client, to: Recipient<Heard>) -> Result<(), async_nats::Error> {
    let acks = client.subscribe(subjects::ACK_ALL).await?;
    let beats = client.subscribe(subjects::BEAT_ALL).await?;
    let mut all = futures::stream::select(acks, beats);
    while let Some(first) = all.next().await {
        let (mut heard, mut next) = (Vec::new(), Some(Some(first)));
        while let Some(Some(message)) = next.take() {
            if let Some(host) = subjects::host_of(&message.subject) {
                let ack = message.subject.as_str() == subjects::ack(&host);
                let said = if ack {
                    Ack::decode(&message.payload).ok().map(Said::Ack)
                } else {
                    Beat::decode(&message.payload).ok().map(Said::Beat)
                };
                match said {
                    Some(said) => heard.push((host, said)),
                    None => tracing::warn!(%host, "a message of this host cannot be read"),
                }
            }
            if heard.len() < ACKS_AT_ONCE_MAX {
                next = all.next().now_or_never();
            }
        }
        // What waits meanwhile waits in the subscription; should that overflow, nudges bring it again.
        if to.send(Heard(heard)).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

impl Handler<Heard> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, Heard(heard): Heard, _: &mut Self::Context) {
        let now_ms = self.now_ms();
        for (host, said) in heard {
            match said {
                Said::Ack(ack) => {
                    for took_ms in self.convergence.acknowledged(&host, &ack, now_ms) {
                        metrics::histogram!("groupcast_enforced_seconds").record(f64::from(took_ms) / 1e3);
                    }
                }
                Said::Beat(beat) => self.convergence.heard(&host, beat.state, now_ms),
            }
        }
    }
}

impl Handler<Deaf> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, _: Deaf, context: &mut Self::Context) {
        context.run_later(RETRY_PAUSE, |_, context| context.stop());
    }
}

impl Handler<Began> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, Began { term }: Began, _: &mut Self::Context) {
        self.convergence.begin(term);
    }
}

impl Handler<Published> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, Published { changes, committed }: Published, _: &mut Self::Context) {
        let now_ms = self.now_ms();
        let nothing = || Committed { proposal: None, cut: Default::default(), change: 0, topics: Vec::new(), span: Vec::new() };
        self.convergence.committed(&committed.unwrap_or_else(nothing), &changes, now_ms);
    }
}

impl Handler<Left> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, Left(hosts): Left, _: &mut Self::Context) {
        hosts.iter().for_each(|host| self.convergence.left(host));
    }
}

impl Handler<Unfollowed> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, Unfollowed(topics): Unfollowed, _: &mut Self::Context) {
        let now_ms = self.now_ms();
        topics.iter().for_each(|(topic, still)| self.convergence.unfollowed(*topic, still, now_ms));
    }
}

impl Handler<AskProgress> for ConvergenceActor {
    type Result = Option<Progress>;

    fn handle(&mut self, AskProgress(change): AskProgress, _: &mut Self::Context) -> Self::Result {
        self.convergence.progress(change, self.now_ms())
    }
}

impl Handler<AskSpan> for ConvergenceActor {
    type Result = Option<Vec<HostId>>;

    fn handle(&mut self, AskSpan(change): AskSpan, _: &mut Self::Context) -> Self::Result {
        self.convergence.span(change)
    }
}

impl Handler<LookAtConvergence> for ConvergenceActor {
    type Result = MessageResult<LookAtConvergence>;

    fn handle(&mut self, _: LookAtConvergence, _: &mut Self::Context) -> Self::Result {
        let c = &self.convergence;
        MessageResult(ConvergenceView { hosts: c.hosts(), behind: c.behind(), unfinished: c.unfinished() })
    }
}

impl Handler<Watch> for ConvergenceActor {
    type Result = MessageResult<Watch>;

    fn handle(&mut self, _: Watch, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.watchers.subscribe())
    }
}

impl Handler<Ping> for ConvergenceActor {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}
