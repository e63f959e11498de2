//! Runs one source's [`Machine`]: tells it whether this controller leads and what time it is, polls and writes for it in the
//! background, and answers those who asked.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use async_nats::Client;
use tokio::sync::{Mutex, oneshot, watch};

use super::{MAILBOX_MAX, Ping};
use crate::fence::{Fences, Unfenced};
use crate::names;
use crate::source::config::Source;
use crate::source::machine::{Answer, Effect, Event, Machine};
use crate::source::poller::Poller;
use crate::source::status::{Outcome, Status};
use crate::source::store::Store;
use crate::source::{Failed, machine};

/// Items that cannot be read and are logged by name, each time that these change.
const MALFORMED_LOGGED: usize = 10;

/// Reads the source now; answered when what it says is written.
#[derive(Message)]
#[rtype(result = "Answer")]
pub struct PollSource {
    pub full: bool,
}

/// What was held back is meant.
#[derive(Message)]
#[rtype(result = "Answer")]
pub struct ConfirmSource;

#[derive(Message)]
#[rtype(result = "Status")]
pub struct LookAtSource;

/// What came of something that was begun.
#[derive(Message)]
#[rtype(result = "()")]
struct Came(Event);

/// There is news about who leads. Without saying what: by the time it arrives that may be old.
#[derive(Message)]
#[rtype(result = "()")]
struct LookWhoLeads;

pub struct SourceActor {
    machine: Machine,
    poller: Arc<Mutex<Poller>>,
    store: Store,
    fences: Arc<Fences>,
    leading: watch::Receiver<Option<u64>>,
    /// Told before the runtime goes.
    ending: watch::Receiver<bool>,
    /// What the machine was told of that.
    led: Option<u64>,
    runtime: tokio::runtime::Handle,
    clock: Instant,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    next_ask: u64,
    wake: Option<SpawnHandle>,
    begun: Option<Instant>,
    /// What was last said of items that cannot be read.
    told_malformed: Vec<String>,
}

impl SourceActor {
    pub fn new(
        config: &Source,
        client: &Client,
        fences: Arc<Fences>,
        leading: watch::Receiver<Option<u64>>,
        ending: watch::Receiver<bool>,
        runtime: tokio::runtime::Handle,
        seed: u64,
    ) -> Self {
        Self {
            machine: Machine::new(config.id().clone(), config.kind(), config.intervals(), seed),
            poller: Arc::new(Mutex::new(Poller::new(config.clone()))),
            store: Store::new(config.id().clone(), client),
            fences,
            leading,
            ending,
            led: None,
            runtime,
            clock: Instant::now(),
            waiting: HashMap::new(),
            next_ask: 0,
            wake: None,
            begun: None,
            told_malformed: Vec::new(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    fn step(&mut self, event: Event, context: &mut Context<Self>) {
        let effects = self.machine.handle(event, self.now_ms());
        for effect in effects {
            self.perform(effect, context);
        }
        self.report();
    }

    fn perform(&mut self, effect: Effect, context: &mut Context<Self>) {
        match effect {
            Effect::Load { run } => {
                let fenced = self.fenced();
                let load = async move {
                    // What was written before the fence is read, and nothing that a leader before this one writes comes after it.
                    let store = fenced.await.map_err(|error| error.to_string())?;
                    store.load().await.map(Box::new)
                };
                self.begin(context, load, move |result| Event::Loaded { run, result: result.unwrap_or_else(Err) });
            }
            Effect::Poll { run, full, marker } => {
                self.begun = Some(Instant::now());
                let (poller, runtime, mut ending) = (self.poller.clone(), self.runtime.clone(), self.ending.clone());
                // On a thread that may wait: a large answer is parsed there as it comes.
                let thread = self.runtime.spawn_blocking(move || {
                    runtime.block_on(async {
                        let poll = async { poller.lock().await.poll(full, marker.as_deref()).await };
                        tokio::select! {
                            // First: a runtime that ends takes its clock away, and whoever looks at it then panics.
                            biased;
                            _ = ending.wait_for(|ending| *ending) => Err(Failed::new("the controller ends")),
                            polled = poll => polled,
                        }
                    })
                });
                let poll = async move { thread.await.unwrap_or_else(|error| Err(Failed::new(error.to_string()))) };
                let came = |result: Result<_, String>| result.unwrap_or_else(|why| Err(Failed::new(why)));
                self.begin(context, poll, move |result| Event::Polled { run, result: came(result) });
            }
            Effect::Write { run, plan } => {
                let (fenced, source) = (self.fenced(), self.machine.id().clone());
                let difference = &plan.difference;
                let (groups, groups_deleted) = (difference.puts.len(), difference.deletes.len());
                let workloads = difference.register.values().map(Vec::len).sum::<usize>();
                let workloads_removed = difference.remove.values().map(Vec::len).sum::<usize>();
                let changes = plan.changes.len();
                tracing::info!(
                    %source, groups, groups_deleted, workloads, workloads_removed, changes, "a source says something new"
                );
                let unfenced = |error: Unfenced| machine::NotWritten { message: error.to_string(), conflict: false };
                let write = async move { fenced.await.map_err(unfenced)?.write(&plan).await };
                let unknown = |message| Err(machine::NotWritten { message, conflict: false });
                self.begin(context, write, move |result| Event::Written { run, result: result.unwrap_or_else(unknown) });
            }
            Effect::Answer { ask, answer } => {
                if let Some(waiting) = self.waiting.remove(&ask) {
                    let _ = waiting.send(answer); // whoever asked may have given up
                }
            }
            Effect::WakeAt(at_ms) => {
                if let Some(before) = self.wake.take() {
                    context.cancel_future(before);
                }
                let after = Duration::from_millis(at_ms.saturating_sub(self.now_ms()).max(1));
                self.wake = Some(context.run_later(after, |this, context| {
                    this.wake = None;
                    this.step(Event::Tick, context);
                }));
            }
        }
    }

    /// The store as the leader of the present term writes it.
    fn fenced(&self) -> impl Future<Output = Result<Store, Unfenced>> + Send + 'static {
        let (fences, store, led) = (self.fences.clone(), self.store.clone(), self.led);
        async move { Ok(store.fenced(fences.of(led.ok_or(Unfenced::NotLeading)?).await?)) }
    }

    /// Runs something elsewhere; also its panic comes back as an outcome, or the source would wait for it for ever.
    fn begin<T: Send + 'static>(
        &self,
        context: &mut Context<Self>,
        work: impl Future<Output = T> + Send + 'static,
        came: impl FnOnce(Result<T, String>) -> Event + Send + 'static,
    ) {
        let (own, source) = (context.address(), self.machine.id().clone());
        let work = self.runtime.spawn(work);
        self.runtime.spawn(async move {
            let result = work.await.map_err(|error| format!("it failed inside: {error}"));
            if let Err(error) = own.send(Came(came(result))).await {
                tracing::error!(%source, %error, "a source does not answer");
            }
        });
    }

    fn report(&mut self) {
        let status = self.machine.status(self.now_ms());
        let source = status.id.clone();
        if let Some(outcome) = self.machine.outcome() {
            metrics::counter!(names::SOURCE_POLLS, "source" => source.clone(), "outcome" => outcome.as_str()).increment(1);
            if let Some(begun) = self.begun.take() {
                metrics::histogram!(names::SOURCE_POLL_SECONDS, "source" => source.clone()).record(begun.elapsed().as_secs_f64());
            }
            match (outcome, &status.last_error, &status.held) {
                (Outcome::Failed, Some(error), _) => {
                    tracing::warn!(%source, failures = status.failures, error = %error.message, "a source could not be read; what it said stays");
                }
                (Outcome::Held, _, Some(held)) => {
                    let hint =
                        "confirm with `groupcast sources confirm`; unless nothing is left at all, a later poll may agree too";
                    tracing::error!(%source, deletions = held.deletions, hint, "a source wants most of what it owns deleted; held back");
                }
                _ => {}
            }
            self.tell_malformed(&status);
        }
        let gauge = |name: &'static str, value: f64| metrics::gauge!(name, "source" => source.clone()).set(value);
        gauge(names::SOURCE_LAG_SECONDS, status.lag_ms.map_or(-1.0, |lag| lag as f64 / 1e3));
        gauge(names::SOURCE_GROUPS, status.groups as f64);
        gauge(names::SOURCE_WORKLOADS, status.workloads as f64);
        gauge(names::SOURCE_MALFORMED, status.malformed as f64);
        gauge(names::SOURCE_WITHHELD, status.withheld as f64);
        gauge(names::SOURCE_HELD_BACK, status.held.as_ref().map_or(0.0, |held| held.deletions as f64));
    }

    /// Once for each state of it, not with every poll.
    fn tell_malformed(&mut self, status: &Status) {
        let source = &status.id;
        if self.told_malformed == status.malformed_named {
            return;
        }
        self.told_malformed.clone_from(&status.malformed_named);
        if status.malformed == 0 {
            return tracing::info!(%source, "every item of a source can be read again");
        }
        let hint = format!("their last good versions stay in force; all of them: groupcast get source {source} -o yaml");
        for item in status.malformed_named.iter().take(MALFORMED_LOGGED) {
            let (malformed, deletions_stopped) = (status.malformed, status.deletions_stopped);
            tracing::warn!(%source, malformed, deletions_stopped, item, hint, "an item of a source cannot be read");
        }
    }

    /// Another term is another leader, also where it is this controller again: what is known may be out of date.
    fn look_who_leads(&mut self, context: &mut Context<Self>) {
        let leading = *self.leading.borrow();
        let before = std::mem::replace(&mut self.led, leading);
        if before == leading {
            return;
        }
        if before.is_some() {
            self.step(Event::Leading(false), context);
        }
        if leading.is_some() {
            self.step(Event::Leading(true), context);
        }
    }

    /// Whoever was asked because it leads must not say that it does not, only because it was not told yet: nobody else would answer.
    fn ask(&mut self, event: impl FnOnce(u64) -> Event, context: &mut Context<Self>) -> ResponseFuture<Answer> {
        self.look_who_leads(context);
        self.next_ask += 1;
        let (answer, answered) = oneshot::channel();
        self.waiting.insert(self.next_ask, answer);
        self.step(event(self.next_ask), context);
        Box::pin(async move { answered.await.unwrap_or(Answer::NotLeading) })
    }
}

impl Actor for SourceActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        self.report();
        let (mut leading, own, source) = (self.leading.clone(), context.address(), self.machine.id().clone());
        self.runtime.spawn(async move {
            loop {
                leading.mark_unchanged();
                if own.send(LookWhoLeads).await.is_err() || leading.changed().await.is_err() {
                    return tracing::debug!(%source, "nobody tells any more who leads");
                }
            }
        });
    }
}

impl Supervised for SourceActor {}

impl Handler<Came> for SourceActor {
    type Result = ();

    fn handle(&mut self, Came(event): Came, context: &mut Self::Context) {
        self.step(event, context);
    }
}

impl Handler<LookWhoLeads> for SourceActor {
    type Result = ();

    fn handle(&mut self, _: LookWhoLeads, context: &mut Self::Context) {
        self.look_who_leads(context);
    }
}

impl Handler<PollSource> for SourceActor {
    type Result = ResponseFuture<Answer>;

    fn handle(&mut self, PollSource { full }: PollSource, context: &mut Self::Context) -> Self::Result {
        self.ask(|ask| Event::PollNow { ask, full }, context)
    }
}

impl Handler<ConfirmSource> for SourceActor {
    type Result = ResponseFuture<Answer>;

    fn handle(&mut self, _: ConfirmSource, context: &mut Self::Context) -> Self::Result {
        self.ask(|ask| Event::Confirm { ask }, context)
    }
}

impl Handler<LookAtSource> for SourceActor {
    type Result = MessageResult<LookAtSource>;

    fn handle(&mut self, _: LookAtSource, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.machine.status(self.now_ms()))
    }
}

impl Handler<Ping> for SourceActor {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Broke: asked by one who had just learned that this controller leads, a source that had not said nothing, and the poll of an operator
    /// waited for two minutes.
    #[actix::test]
    async fn a_source_knows_that_it_is_led_as_soon_as_anybody_does() {
        let nowhere = async_nats::ConnectOptions::new().retry_on_initial_connect().connect("127.0.0.1:1");
        let client = nowhere.await.expect("it connects when it can");
        let config = serde_json::from_value(serde_json::json!({ "kind": "directory", "id": "files", "path": "/nowhere" }));
        let config = config.expect("a source");
        let (lead, leading) = watch::channel(None);
        // Nothing runs there: nobody comes to tell it.
        let idle = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (_ending, ending) = watch::channel(false);
        let source = SourceActor::new(&config, &client, Fences::new(&client), leading, ending, idle.handle().clone(), 1).start();
        let confirm = async || source.send(ConfirmSource).await.expect("an answer");
        assert_eq!(confirm().await, Answer::NotLeading);
        for term in 1..=20 {
            lead.send_replace(Some(term));
            assert_eq!(confirm().await, Answer::NothingHeld, "term {term}");
            lead.send_replace(None);
            assert_eq!(confirm().await, Answer::NotLeading, "after term {term}");
        }
        idle.shutdown_background();
    }
}
