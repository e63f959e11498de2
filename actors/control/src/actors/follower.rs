//! Follows one of the streams and hands on whole changes, in order, as fast as they are taken.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use actix::prelude::*;
use async_nats::Client;
use async_nats::connection::State;
use async_nats::jetstream::consumer::DeliverPolicy;
use futures::{FutureExt, StreamExt};
use groupcast_bus_config::subjects::{self, CatalogKind};
use tracing::Instrument;

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::actors::compiler::Arrived;
use crate::assemble::{Assembler, Piece, Whole};
use crate::catalog::Catalog;
use crate::document::{Document, Name};
use crate::log::{Log, NoAnswer, in_batch};
use crate::mirror::{Item, Origin};
use crate::names;
use crate::registry::TRACE_KEPT;
use crate::stage::{Arrival, Part};

/// Messages taken at once while more are there.
pub const DRAIN_MAX: usize = 1_024;
/// How often it is checked that the stream is still the one that is followed.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// How often it is checked whether the connection is another one. A consumer lives in the server's memory: with a server that was
/// restarted it is gone, and whoever waits for its heartbeats learns that a quarter of a minute later, in which nobody can lead.
const RECONNECTED_EVERY: Duration = Duration::from_millis(200);

/// The task that reads ended.
#[derive(Message)]
#[rtype(result = "()")]
struct Ended(String);

pub struct Follower {
    origin: Origin,
    client: Client,
    next: Recipient<Arrived>,
    clock: Instant,
    runtime: tokio::runtime::Handle,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Follower {
    pub fn new(
        origin: Origin,
        client: Client,
        next: Recipient<Arrived>,
        clock: Instant,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        Self { origin, client, next, clock, runtime, task: None }
    }
}

impl Actor for Follower {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let reader = Reader { origin: self.origin, client: self.client.clone(), next: self.next.clone(), clock: self.clock };
        let own = context.address();
        // Documents are parsed where they are read, never on a thread that actors share.
        self.task = Some(self.runtime.spawn(async move {
            let end = match reader.run().await {
                Ok(end) => end,
                Err(error) => error.to_string(),
            };
            // Nobody to tell: the actor is gone.
            let _ = own.send(Ended(end)).await;
        }));
    }

    fn stopping(&mut self, _: &mut Self::Context) -> Running {
        self.abort();
        Running::Stop
    }
}

impl Follower {
    fn abort(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Begins anew: reads everything, and what has not changed stays quiet.
impl Supervised for Follower {
    fn restarting(&mut self, _: &mut Self::Context) {
        self.abort();
        metrics::counter!(names::FOLLOW_RESTARTS, "stream" => self.origin.as_str()).increment(1);
    }
}

impl Handler<Ended> for Follower {
    type Result = ();

    fn handle(&mut self, Ended(why): Ended, context: &mut Self::Context) {
        tracing::warn!(stream = self.origin.as_str(), %why, "following begins anew");
        context.run_later(RETRY_PAUSE, |_, context| context.stop());
    }
}

impl Handler<Ping> for Follower {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

struct Reader {
    origin: Origin,
    client: Client,
    next: Recipient<Arrived>,
    clock: Instant,
}

/// A message, read, and whether it can be the end of a change.
struct Read {
    item: Item,
    subject: Arc<str>,
}

impl Reader {
    fn filter(&self) -> &'static str {
        match self.origin {
            Origin::Catalog => subjects::CATALOG_ALL,
            Origin::Registry => subjects::REGISTRY_ALL,
        }
    }

    fn log(&self) -> Log {
        match self.origin {
            Origin::Catalog => Log::catalog(self.client.clone()),
            Origin::Registry => Log::registry(self.client.clone()),
        }
    }

    /// How often the bus was reached, the first time included.
    fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Ends with why everything has to be read again.
    async fn run(&self) -> Result<String, NoAnswer> {
        let log = self.log();
        let last = log.last(self.filter()).await?.map_or(0, |entry| entry.sequence);
        let mut assembler = Assembler::new(last);
        let mut connects = self.connects();
        let mut messages = log.follow(self.filter(), DeliverPolicy::LastPerSubject).await?;
        if let Some(whole) = assembler.begin() {
            self.hand_on(vec![whole]).await?;
        }
        let mut check = tokio::time::interval(CHECK_EVERY);
        let mut reconnected = tokio::time::interval(RECONNECTED_EVERY);
        let (mut seen, mut down_since) = (0, None);
        loop {
            let first = tokio::select! {
                message = messages.next() => message,
                _ = check.tick() => {
                    if let Some(why) = self.changed(&log, seen, &mut down_since).await {
                        return Ok(why);
                    }
                    continue;
                }
                _ = reconnected.tick() => {
                    let now = self.connects();
                    if now != connects && self.client.connection_state() == State::Connected {
                        if let Some(why) = self.changed(&log, seen, &mut down_since).await {
                            return Ok(why);
                        }
                        // What is delivered again is known, and a hole is read like any other.
                        let policy = DeliverPolicy::ByStartSequence { start_sequence: seen + 1 };
                        messages = log.follow(self.filter(), policy).await?;
                        connects = now;
                    }
                    continue;
                }
            };
            let (mut wholes, mut next, mut taken) = (Vec::new(), Some(first), 0);
            while let Some(message) = next.take() {
                let message = match message {
                    Some(Ok(message)) => message,
                    Some(Err(error)) => return Ok(error.to_string()),
                    None => return Ok("the consumer ended".to_owned()),
                };
                let Some(piece) = self.read(&message) else { return Ok("a message without its sequence".to_owned()) };
                seen = piece.sequence;
                wholes.extend(assembler.push(piece));
                taken += 1;
                if taken < DRAIN_MAX {
                    next = messages.next().now_or_never();
                }
            }
            if !wholes.is_empty() {
                self.hand_on(wholes).await?;
            }
        }
    }

    /// Why everything has to be read again, if it has: what was removed may have left no trace, or the stream is another one.
    async fn changed(&self, log: &Log, seen: u64, down_since: &mut Option<Instant>) -> Option<String> {
        if self.client.connection_state() != State::Connected {
            down_since.get_or_insert_with(Instant::now);
            return None;
        }
        let down = down_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        if down > TRACE_KEPT / 2 {
            return Some(format!("cut off for {} s", down.as_secs()));
        }
        let last = log.last(self.filter()).await.ok()?.map_or(0, |entry| entry.sequence);
        // Messages may expire, so the last one may be older than one that was seen, but by far fewer than a new stream lacks.
        let shrunk = last < seen && log.at(seen).await.is_ok_and(|entry| entry.is_none()) && !self.expires(last, seen);
        shrunk.then(|| format!("the stream ends at {last}, {seen} was seen: it is another one"))
    }

    /// In REGISTRY the newest messages may be traces that have expired; CATALOG's newest are never gone.
    fn expires(&self, last: u64, seen: u64) -> bool {
        self.origin == Origin::Registry && last > 0 && seen - last < DRAIN_MAX as u64
    }

    fn read(&self, message: &async_nats::jetstream::Message) -> Option<Piece<Read>> {
        let info = message.info().ok()?;
        let (sequence, pending) = (info.stream_sequence, info.pending);
        let subject = message.subject.as_str();
        let item = match self.origin {
            Origin::Catalog => Item::catalog(subject, sequence, &message.payload),
            Origin::Registry => Item::registry(subject, sequence, &message.payload),
        };
        let batch = message.headers.as_ref().and_then(in_batch);
        Some(Piece { sequence, pending, batch, content: Read { item, subject: Arc::from(subject) } })
    }

    /// Waits until it is taken: what comes meanwhile stays in the stream.
    async fn hand_on(&self, wholes: Vec<Whole<Read>>) -> Result<(), NoAnswer> {
        // The trace of these changes begins here, and ends when they are in force everywhere.
        let change = names::traced(wholes.iter().flat_map(|whole| &whole.ends).max().copied());
        let stream = self.origin.as_str();
        let trace = tracing::debug_span!(parent: None, "change", change, stream);
        let arrival = self.arrival(wholes).instrument(tracing::debug_span!(parent: &trace, "read", change, stream)).await?;
        metrics::counter!(names::FOLLOW_CHANGES, "stream" => stream).increment(arrival.ends.len() as u64);
        metrics::gauge!(names::FOLLOW_SEQUENCE, "stream" => stream).set(arrival.through as f64);
        let (arrived, begun) = (Arrived { origin: self.origin, arrival, trace }, Instant::now());
        let taken = self.next.send(arrived).await;
        metrics::histogram!(names::FOLLOW_HELD_SECONDS, "stream" => stream).record(begun.elapsed().as_secs_f64());
        taken.map_err(|error| NoAnswer { stream: "compiler", reason: error.to_string() })
    }

    async fn arrival(&self, wholes: Vec<Whole<Read>>) -> Result<Arrival, NoAnswer> {
        let mut arrival = Arrival { read_ms: self.clock.elapsed().as_millis() as u64, ..Arrival::default() };
        for whole in wholes {
            // Terms are written by controllers and are no changes.
            let term = whole.contents.len() == 1 && whole.contents[0].subject.as_ref() == subjects::CATALOG_TERM;
            let before = (arrival.items.len(), arrival.ends.len());
            arrival.through = whole.through;
            arrival.everything |= whole.everything;
            if !term {
                arrival.ends.extend(&whole.ends);
            }
            let refused: Vec<Arc<str>> = whole
                .contents
                .iter()
                .filter(|read| whole.everything && matches!(read.item, Item::Refused(_)))
                .map(|read| read.subject.clone())
                .collect();
            for subject in refused {
                arrival.items.extend(self.last_good(&subject).await?);
            }
            arrival.items.extend(whole.contents.into_iter().map(|read| read.item));
            let (items, ends) = (arrival.items.len() - before.0, arrival.ends.len() - before.1);
            arrival.parts.push(Part { items, ends, through: whole.through });
        }
        tracing::debug!(change = arrival.ends.last(), items = arrival.items.len(), through = arrival.through, "read");
        Ok(arrival)
    }

    /// The newest version of a document that can be read, for one whose last version cannot.
    async fn last_good(&self, subject: &str) -> Result<Option<Item>, NoAnswer> {
        let Some(name) = Name::parse(subject).filter(|_| self.origin == Origin::Catalog) else { return Ok(None) };
        if !matches!(name.kind, CatalogKind::Group | CatalogKind::Template) {
            return Ok(None);
        }
        let versions = Catalog::new(self.client.clone()).history(&name).await?;
        Ok(versions.into_iter().find_map(|version| match version.document {
            Ok(Some(Document::Group(group))) => {
                Some(Item::Group { id: group.id.clone(), revision: version.revision, group: Some(group) })
            }
            Ok(Some(Document::Template(template))) => {
                Some(Item::Template { id: template.id.clone(), revision: version.revision, template: Some(template) })
            }
            Ok(_) => Some(Item::Nothing),
            Err(_) => None,
        }))
    }
}
