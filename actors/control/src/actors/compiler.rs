//! Runs the [`Stage`]: takes what the followers read, compiles it, and has the fanout publish it while this controller leads. It has
//! a thread of its own: a large catalogue takes a second to compile.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use actix::prelude::*;
use groupcast_policy::model::World;
use groupcast_topics::node::Desired;
use tokio::sync::oneshot;
use tracing::Span;

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::actors::convergence::{Published, TouchedNothing};
use crate::actors::fanout::Publish;
use crate::actors::leadership::{AskDigests, AskDocuments};
use crate::mirror::Origin;
use crate::names;
use crate::outbox::{Mark, WAITING_CHANGES_MAX};
use crate::stage::{Arrival, Effect, Event, Incident, Stage, View};

/// Answered when more may come.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Arrived {
    pub origin: Origin,
    pub arrival: Arrival,
    pub trace: Span,
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
    pub touched_nothing: Recipient<TouchedNothing>,
}

pub struct CompilerActor {
    stage: Stage,
    neighbours: Option<Neighbours>,
    /// Followers that wait for what they brought to be taken.
    waiting: HashMap<Origin, oneshot::Sender<()>>,
    wants: HashMap<u64, oneshot::Sender<Desired>>,
    next_want: u64,
    clock: Instant,
    /// Of changes that wait to be published or are in flight, by their numbers. Empty while this controller does not lead.
    traces: BTreeMap<u64, Span>,
    leading: bool,
}

/// The neighbours are known only after this actor is.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Meet(pub Neighbours);

impl CompilerActor {
    pub fn new(clock: Instant) -> Self {
        Self {
            stage: Stage::default(),
            neighbours: None,
            waiting: HashMap::new(),
            wants: HashMap::new(),
            next_want: 0,
            clock,
            traces: BTreeMap::new(),
            leading: false,
        }
    }

    fn step(&mut self, event: Event, context: &mut Context<Self>) {
        let effects = self.stage.handle(event);
        let view = self.stage.view_counts();
        metrics::gauge!(names::COMPILE_WAITING_CHANGES).set(view.0 as f64);
        metrics::gauge!(names::COMPILE_TOPICS).set(view.1 as f64);
        metrics::gauge!(names::COMPILE_REFUSED).set(view.2 as f64);
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
                metrics::histogram!(names::PUBLISH_CHANGES).record(parcel.marks.len() as f64);
                let trace = self.trace_of(&parcel.marks);
                let publish = Publish { proposal: parcel.proposal(change), changes: parcel.marks.len(), trace };
                let answer = neighbours.publish.send(publish).into_actor(self);
                context.spawn(answer.map(move |answer, this, context| match answer {
                    Ok(result) => this.step(Event::Decided { term, result }, context),
                    Err(_) => this.step(Event::NoAnswer { term }, context),
                }));
            }
            Effect::Published { marks, committed, torn } => {
                let (topics, hosts) = (committed.topics.len(), committed.span.len());
                let (first, last) = self.finished(&marks);
                tracing::info!(change = last, first, changes = marks.len(), topics, hosts, "published");
                let trace = self.trace_of(&marks);
                self.forget_traces(last);
                if let Some(change) = last {
                    self.tell(&neighbours.published, Published { change, torn, trace }, context);
                }
            }
            Effect::TouchedNothing { marks, reflects } => {
                let (_, last) = self.finished(&marks);
                let changes: Vec<u64> = marks.iter().filter_map(|mark| mark.change).collect();
                if !changes.is_empty() {
                    tracing::debug!(change = last, changes = changes.len(), "touches no topic");
                }
                self.forget_traces(last);
                self.tell(&neighbours.touched_nothing, TouchedNothing { changes, reflects }, context);
            }
            Effect::Desired { id, desired } => {
                if let Some(answer) = self.wants.remove(&id) {
                    let _ = answer.send(desired); // whoever asked may have given up
                }
            }
            Effect::RetryLater => {
                context.run_later(RETRY_PAUSE, |this, context| this.step(Event::Retry, context));
            }
            Effect::Report(incident) => report(&incident),
        }
    }

    /// The numbers of the first and the last of these changes, which are done here.
    fn finished(&self, marks: &[Mark]) -> (Option<u64>, Option<u64>) {
        let now_ms = self.clock.elapsed().as_millis() as u64;
        for mark in marks {
            metrics::histogram!(names::CHANGE_SECONDS).record(now_ms.saturating_sub(mark.read_ms) as f64 / 1e3);
        }
        let changes = || marks.iter().filter_map(|mark| mark.change);
        (changes().min(), changes().max())
    }

    /// The trace of the first of these changes; the others are told that they go on in it.
    fn trace_of(&self, marks: &[Mark]) -> Span {
        let mut traces = marks.iter().filter_map(|mark| self.traces.get(&mark.change?));
        let first = traces.next().cloned().unwrap_or_else(Span::none);
        traces.for_each(|trace| {
            trace.follows_from(&first);
        });
        first
    }

    fn forget_traces(&mut self, last: Option<u64>) {
        if let Some(last) = last {
            self.traces = self.traces.split_off(&(last + 1));
        }
    }

    /// Waits, in the background, until the mailbox takes it: convergence must not miss a change.
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
            metrics::counter!(names::REFUSED_TOTAL).increment(1);
            tracing::error!(document = %refused.name, why = %refused.why, "a document is refused, its last good version stays in force");
        }
        Incident::Torn { change, topics } => {
            metrics::counter!(names::PUBLISH_TORN).increment(1);
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

    fn handle(&mut self, Arrived { origin, arrival, trace }: Arrived, context: &mut Self::Context) -> Self::Result {
        let (taken, wait) = oneshot::channel();
        self.waiting.insert(origin, taken);
        let (stream, change) = (origin.as_str(), arrival.ends.last().copied());
        let span = tracing::debug_span!(parent: &trace, "compile", stream, change = names::traced(change));
        let _entered = span.enter();
        if let Some(change) = change.filter(|_| origin == Origin::Catalog && self.leading) {
            self.traces.insert(change, trace);
        }
        let begun = Instant::now();
        self.step(Event::Arrived(origin, arrival), context);
        metrics::histogram!(names::COMPILE_SECONDS).record(begun.elapsed().as_secs_f64());
        Box::pin(async move {
            let _ = wait.await;
        })
    }
}

impl Handler<Leading> for CompilerActor {
    type Result = ();

    fn handle(&mut self, Leading(term): Leading, context: &mut Self::Context) {
        metrics::gauge!(names::LEADING).set(if term.is_some() { 1.0 } else { 0.0 });
        self.leading = term.is_some();
        self.traces.clear();
        if let Some(term) = term {
            metrics::gauge!(names::TERM).set(term as f64);
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
