//! Runs the [`Stage`]: takes what the followers read, compiles it, and has the fanout publish it while this controller leads. It has
//! a thread of its own: a large catalogue takes a second to compile.

use std::collections::HashMap;
use std::time::Instant;

use actix::prelude::*;
use groupcast_policy::model::World;
use groupcast_topics::node::Desired;
use tokio::sync::oneshot;

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::actors::convergence::{Began, Left, Published, Unfollowed};
use crate::actors::fanout::Publish;
use crate::actors::leadership::{AskDigests, AskDocuments};
use crate::mirror::Origin;
use crate::outbox::WAITING_CHANGES_MAX;
use crate::stage::{Arrival, Effect, Event, Incident, Stage, View};

/// Answered when more may come.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Arrived {
    pub origin: Origin,
    pub arrival: Arrival,
}

/// The term while this controller leads.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Leading(pub Option<u64>);

/// Everything compiled that is in the streams up to these sequences.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Want {
    pub catalog: u64,
    pub registry: u64,
    pub answer: oneshot::Sender<Desired>,
}

#[derive(Message)]
#[rtype(result = "View")]
pub struct Look;

/// The desired state as it was read.
#[derive(Message)]
#[rtype(result = "Box<World>")]
pub struct GetWorld;

/// Whom the compiler talks to.
#[derive(Clone)]
pub struct Neighbours {
    pub digests: Recipient<AskDigests>,
    pub documents: Recipient<AskDocuments>,
    pub publish: Recipient<Publish>,
    pub published: Recipient<Published>,
    pub began: Recipient<Began>,
    pub left: Recipient<Left>,
    pub unfollowed: Recipient<Unfollowed>,
}

pub struct CompilerActor {
    stage: Stage,
    neighbours: Option<Neighbours>,
    /// Followers that wait for what they brought to be taken.
    waiting: HashMap<Origin, oneshot::Sender<()>>,
    wants: HashMap<u64, oneshot::Sender<Desired>>,
    next_want: u64,
    clock: Instant,
}

/// The neighbours are known only after this actor is.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Meet(pub Neighbours);

impl CompilerActor {
    pub fn new(clock: Instant) -> Self {
        Self { stage: Stage::default(), neighbours: None, waiting: HashMap::new(), wants: HashMap::new(), next_want: 0, clock }
    }

    fn step(&mut self, event: Event, context: &mut Context<Self>) {
        let effects = self.stage.handle(event);
        let view = self.stage.view_counts();
        metrics::gauge!("groupcast_compile_waiting_changes").set(view.0 as f64);
        metrics::gauge!("groupcast_compile_topics").set(view.1 as f64);
        metrics::gauge!("groupcast_compile_refused_documents").set(view.2 as f64);
        for effect in effects {
            self.perform(effect, context);
        }
    }

    fn perform(&mut self, effect: Effect, context: &mut Context<Self>) {
        let Some(neighbours) = self.neighbours.clone() else { return };
        match effect {
            Effect::Accept(origin) => {
                if let Some(waiting) = self.waiting.remove(&origin) {
                    let _ = waiting.send(()); // a follower that restarted waits no more
                }
            }
            Effect::AskDigests { term } => {
                let answer = neighbours.digests.send(AskDigests).into_actor(self);
                context.spawn(answer.map(move |answer, this, context| match answer {
                    Ok(Some(digests)) => this.step(Event::Digests { term, digests }, context),
                    _ => this.step(Event::NoAnswer { term }, context),
                }));
            }
            Effect::AskDocuments { term, topics } => {
                let answer = neighbours.documents.send(AskDocuments(topics)).into_actor(self);
                context.spawn(answer.map(move |answer, this, context| match answer {
                    Ok(Some(documents)) => this.step(Event::Documents { term, documents }, context),
                    _ => this.step(Event::NoAnswer { term }, context),
                }));
            }
            Effect::Publish { term, change, parcel } => {
                metrics::histogram!("groupcast_publish_changes").record(parcel.marks.len() as f64);
                let publish = Publish { proposal: parcel.proposal(change), changes: parcel.marks.len() };
                let answer = neighbours.publish.send(publish).into_actor(self);
                context.spawn(answer.map(move |answer, this, context| match answer {
                    Ok(result) => this.step(Event::Decided { term, result }, context),
                    Err(_) => this.step(Event::NoAnswer { term }, context),
                }));
            }
            Effect::Published { marks, committed, topics } => {
                let now_ms = self.clock.elapsed().as_millis() as u64;
                for mark in &marks {
                    metrics::histogram!("groupcast_change_seconds").record(now_ms.saturating_sub(mark.read_ms) as f64 / 1e3);
                }
                let changes: Vec<u64> = marks.iter().filter_map(|mark| mark.change).collect();
                if topics > 0 || !changes.is_empty() {
                    let hosts = committed.as_ref().map_or(0, |committed| committed.span.len());
                    let (first, last) = (changes.first().copied(), changes.last().copied());
                    tracing::info!(change = last, first, changes = marks.len(), topics, hosts, "published");
                }
                self.tell(&neighbours.published, Published { changes, committed }, context);
            }
            Effect::Desired { id, desired } => {
                if let Some(answer) = self.wants.remove(&id) {
                    let _ = answer.send(desired); // whoever asked may have given up
                }
            }
            Effect::Began { term } => self.tell(&neighbours.began, Began { term }, context),
            Effect::Unfollowed(topics) => self.tell(&neighbours.unfollowed, Unfollowed(topics), context),
            Effect::Left(hosts) => self.tell(&neighbours.left, Left(hosts), context),
            Effect::RetryLater => {
                context.run_later(RETRY_PAUSE, |this, context| this.step(Event::Retry, context));
            }
            Effect::Report(incident) => report(&incident),
        }
    }

    /// Waits, in the background, until the mailbox takes it: convergence must not miss a batch.
    fn tell<M>(&self, to: &Recipient<M>, message: M, context: &mut Context<Self>)
    where
        M: Message<Result = ()> + Send + 'static,
    {
        let sent = to.send(message).into_actor(self);
        context.spawn(sent.map(|sent, _, _| {
            if let Err(error) = sent {
                tracing::error!(%error, "convergence does not answer");
            }
        }));
    }
}

fn report(incident: &Incident) {
    match incident {
        Incident::Refused(refused) => {
            metrics::counter!("groupcast_refused_documents_total").increment(1);
            tracing::error!(document = %refused.name, why = %refused.why, "a document is refused, its last good version stays in force");
        }
        Incident::Torn { change, topics } => {
            tracing::error!(change, topics, "a change is larger than one batch and is published in parts: split such changes");
        }
        Incident::Unpublishable { topic } => tracing::error!(%topic, "a topic is too large to be published: split its group"),
        Incident::Unfit { why } => tracing::error!(%why, "what was compiled does not fit what is published: comparing again"),
        Incident::Emptied { origin } => {
            let stream = origin.as_str();
            tracing::error!(stream, "a stream lost everything; what it said stays in force: restore it with `groupcast import`");
        }
        Incident::Compared { term, differing } => tracing::info!(term, differing, "compared with what is published"),
    }
}

impl Actor for CompilerActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
    }
}

impl Supervised for CompilerActor {}

impl Handler<Meet> for CompilerActor {
    type Result = ();

    fn handle(&mut self, Meet(neighbours): Meet, _: &mut Self::Context) {
        self.neighbours = Some(neighbours);
    }
}

impl Handler<Arrived> for CompilerActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Arrived { origin, arrival }: Arrived, context: &mut Self::Context) -> Self::Result {
        let (taken, wait) = oneshot::channel();
        self.waiting.insert(origin, taken);
        let span =
            tracing::debug_span!("compile", stream = origin.as_str(), through = arrival.through, change = arrival.ends.last());
        let _entered = span.enter();
        let begun = Instant::now();
        self.step(Event::Arrived(origin, arrival), context);
        metrics::histogram!("groupcast_compile_seconds").record(begun.elapsed().as_secs_f64());
        Box::pin(async move {
            let _ = wait.await;
        })
    }
}

impl Handler<Leading> for CompilerActor {
    type Result = ();

    fn handle(&mut self, Leading(term): Leading, context: &mut Self::Context) {
        metrics::gauge!("groupcast_leading").set(if term.is_some() { 1.0 } else { 0.0 });
        if let Some(term) = term {
            metrics::gauge!("groupcast_term").set(term as f64);
        }
        self.step(Event::Leading(term), context);
    }
}

impl Handler<Want> for CompilerActor {
    type Result = ();

    fn handle(&mut self, want: Want, context: &mut Self::Context) {
        self.wants.retain(|_, answer| !answer.is_closed());
        self.next_want += 1;
        self.wants.insert(self.next_want, want.answer);
        let event = Event::Want { id: self.next_want, catalog: want.catalog, registry: want.registry };
        self.step(event, context);
    }
}

impl Handler<Look> for CompilerActor {
    type Result = MessageResult<Look>;

    fn handle(&mut self, _: Look, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.stage.view())
    }
}

impl Handler<GetWorld> for CompilerActor {
    type Result = MessageResult<GetWorld>;

    fn handle(&mut self, _: GetWorld, _: &mut Self::Context) -> Self::Result {
        MessageResult(Box::new(self.stage.world()))
    }
}

impl Handler<Ping> for CompilerActor {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

const _: () = assert!(MAILBOX_MAX < WAITING_CHANGES_MAX);
