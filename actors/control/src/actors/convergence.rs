//! Tells how far changes are. The topics node, which hears batches and acknowledgements, keeps the record and nudges those who stay
//! behind; this actor asks it, streams what moved to whoever watches, and measures how long hosts took.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use groupcast_policy::ids::HostId;
use groupcast_topics::nats::NodeHandle;
use tokio::sync::broadcast;
use tracing::Span;

use super::{MAILBOX_MAX, Ping};
use crate::names;
use crate::progress::{BATCHES_MAX, Progress};

/// Events that wait for one who watches; who is slower misses the oldest, and is told so.
pub const WATCH_QUEUE_MAX: usize = 1_024;
/// How often those who watch are told what moved.
const TELL_EVERY: Duration = Duration::from_millis(50);

/// This change is published, as one of several perhaps; its trace goes on until it is in force everywhere.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Published {
    pub change: u64,
    /// No batch could hold it.
    pub torn: bool,
    pub trace: Span,
}

/// These changes touch no topic. A leader also says how far the topics reflect CATALOG and REGISTRY with them.
#[derive(Message)]
#[rtype(result = "()")]
pub struct TouchedNothing {
    pub changes: Vec<u64>,
    pub reflects: Option<(u64, u64)>,
}

/// How far a change is; `None` when it is not published yet, or this controller does not know it (any more).
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
#[rtype(result = "Option<ConvergenceView>")]
pub struct LookAtConvergence;

/// From now on, the progress of every change that moves.
#[derive(Message)]
#[rtype(result = "broadcast::Receiver<Arc<Progress>>")]
pub struct Watch;

/// What moved since the last look.
struct Moved {
    progress: Vec<Progress>,
    took_ms: Vec<u32>,
    view: ConvergenceView,
}

pub struct ConvergenceActor {
    node: Arc<NodeHandle>,
    watchers: broadcast::Sender<Arc<Progress>>,
    /// Of changes that are not in force everywhere, the trace as a whole and the part of it that lasts until they are.
    traces: BTreeMap<u64, (Span, Span)>,
    looking: bool,
}

impl ConvergenceActor {
    pub fn new(node: Arc<NodeHandle>) -> Self {
        let (watchers, _) = broadcast::channel(WATCH_QUEUE_MAX);
        Self { node, watchers, traces: BTreeMap::new(), looking: false }
    }

    /// One look at a time: a node that is busy is not asked again before it has answered.
    fn look(&mut self, context: &mut Context<Self>) {
        if std::mem::replace(&mut self.looking, true) {
            return;
        }
        let node = self.node.clone();
        let look = async move {
            let moved = node.inspect(|node, convergence| {
                let now_ms = node.now_ms();
                let moved = convergence.moved();
                Moved {
                    progress: moved.into_iter().filter_map(|change| convergence.progress(change, now_ms)).collect(),
                    took_ms: convergence.took(),
                    view: view(convergence),
                }
            });
            moved.await
        };
        context.spawn(look.into_actor(self).map(|moved, this, _| {
            this.looking = false;
            moved.into_iter().for_each(|moved| this.tell(moved));
        }));
    }

    fn tell(&mut self, moved: Moved) {
        metrics::gauge!(names::HOSTS_BEHIND).set(moved.view.behind as f64);
        metrics::gauge!(names::CHANGES_UNFINISHED).set(moved.view.unfinished as f64);
        for took_ms in moved.took_ms {
            metrics::histogram!(names::ENFORCED_SECONDS).record(f64::from(took_ms) / 1e3);
        }
        for progress in moved.progress {
            if progress.is_done() {
                self.enforced(&progress);
            }
            let _ = self.watchers.send(Arc::new(progress)); // nobody watches
        }
    }

    fn enforced(&mut self, progress: &Progress) {
        let (change, hosts, last_ms) = (progress.change, progress.span, progress.summary.last_ms);
        // Whatever was merged into the same batch is in force with it.
        let later = self.traces.split_off(&(change + 1));
        for (_, enforce) in std::mem::replace(&mut self.traces, later).into_values() {
            enforce.in_scope(|| tracing::debug!(change, hosts, last_ms, "in force"));
        }
        match self.node.leading().borrow().is_some() {
            true => tracing::info!(change, hosts, last_ms, "enforced everywhere"),
            false => tracing::debug!(change, hosts, last_ms, "enforced everywhere"),
        }
    }
}

fn view(convergence: &groupcast_topics::convergence::Convergence) -> ConvergenceView {
    ConvergenceView { hosts: convergence.hosts(), behind: convergence.behind(), unfinished: convergence.unfinished() }
}

impl Actor for ConvergenceActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        context.run_interval(TELL_EVERY, Self::look);
    }
}

impl Supervised for ConvergenceActor {
    fn restarting(&mut self, _: &mut Self::Context) {
        self.looking = false;
    }
}

impl Handler<Published> for ConvergenceActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Published { change, torn, trace }: Published, _: &mut Self::Context) -> Self::Result {
        let enforce = tracing::debug_span!(parent: &trace, "enforce", change = names::traced(change));
        self.traces.insert(change, (trace, enforce));
        while self.traces.len() > BATCHES_MAX {
            self.traces.pop_first();
        }
        let node = self.node.clone();
        Box::pin(async move {
            if torn {
                node.inspect(move |_, convergence| convergence.was_torn(change)).await;
            }
        })
    }
}

impl Handler<TouchedNothing> for ConvergenceActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, TouchedNothing { changes, reflects }: TouchedNothing, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move {
            let told = node.inspect(move |node, convergence| {
                changes.into_iter().for_each(|change| convergence.touched_nothing(change));
                if let Some((catalog, registry)) = reflects {
                    node.reflects(catalog, registry);
                }
            });
            told.await;
        })
    }
}

impl Handler<AskProgress> for ConvergenceActor {
    type Result = ResponseFuture<Option<Progress>>;

    fn handle(&mut self, AskProgress(change): AskProgress, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move {
            let progress = node.inspect(move |node, convergence| convergence.progress(change, node.now_ms()));
            progress.await.flatten()
        })
    }
}

impl Handler<AskSpan> for ConvergenceActor {
    type Result = ResponseFuture<Option<Vec<HostId>>>;

    fn handle(&mut self, AskSpan(change): AskSpan, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move { node.inspect(move |_, convergence| convergence.span(change)).await.flatten() })
    }
}

impl Handler<LookAtConvergence> for ConvergenceActor {
    type Result = ResponseFuture<Option<ConvergenceView>>;

    fn handle(&mut self, _: LookAtConvergence, _: &mut Self::Context) -> Self::Result {
        let node = self.node.clone();
        Box::pin(async move { node.inspect(|_, convergence| view(convergence)).await })
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
