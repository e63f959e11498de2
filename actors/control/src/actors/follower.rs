//! Follows one of the streams and hands on whole changes, in order, as fast as they are taken.

use std::sync::Arc;
use std::time::Instant;

use actix::prelude::*;
use async_nats::Client;
use groupcast_bus_config::subjects::{self, CatalogKind};
use tracing::Instrument;

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::actors::compiler::Arrived;
use crate::assemble::{Assembler, Piece, Whole};
use crate::catalog::Catalog;
use crate::document::{Document, Name};
use crate::feed::{Anew, Delivered, Feed, Health};
use crate::log::{Entry, Log, NoAnswer, in_batch};
use crate::mirror::{Item, Origin};
use crate::names;
use crate::stage::{Arrival, Part};

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
    health: Health,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Follower {
    pub fn new(
        origin: Origin,
        client: Client,
        next: Recipient<Arrived>,
        clock: Instant,
        runtime: tokio::runtime::Handle,
        health: Health,
    ) -> Self {
        Self { origin, client, next, clock, runtime, health, task: None }
    }
}

impl Actor for Follower {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let (origin, clock, health) = (self.origin, self.clock, self.health.clone());
        let reader = Reader { origin, client: self.client.clone(), next: self.next.clone(), clock, health };
        let own = context.address();
        // Documents are parsed where they are read, never on a thread that actors share.
        self.task = Some(self.runtime.spawn(async move {
            let end = match reader.run().await {
                Ok(why) => why.to_string(),
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
    health: Health,
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

    /// Ends with why everything has to be read again.
    async fn run(&self) -> Result<Anew, NoAnswer> {
        let begun = Feed::begin(self.log(), self.filter(), self.health.clone()).await;
        let (mut feed, last) = begun.inspect_err(|error| self.health.is_lost(&error.to_string()))?;
        let mut assembler = Assembler::new(last);
        if let Some(whole) = assembler.begin() {
            self.hand_on(vec![whole]).await?;
        }
        loop {
            let messages = match feed.next().await {
                Ok(messages) => messages,
                Err(why) => {
                    self.health.is_lost(&why.to_string());
                    return Ok(why);
                }
            };
            let wholes: Vec<_> = messages.iter().filter_map(|message| assembler.push(self.read(message))).collect();
            if !wholes.is_empty() {
                self.hand_on(wholes).await?;
            }
        }
    }

    fn read(&self, Delivered { entry, pending }: &Delivered) -> Piece<Read> {
        let Entry { subject, sequence, payload, .. } = entry;
        let item = match self.origin {
            Origin::Catalog => Item::catalog(subject, *sequence, payload),
            Origin::Registry => Item::registry(subject, payload),
        };
        let content = Read { item, subject: Arc::from(subject.as_str()) };
        Piece { sequence: *sequence, pending: *pending, batch: in_batch(&entry.headers), content }
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
            // What controllers write about leading is no change, nor is the promise of one.
            let is_none = whole
                .contents
                .iter()
                .all(|read| subjects::is_about_leading(&read.subject) || subjects::is_change_record(&read.subject));
            let before = (arrival.items.len(), arrival.ends.len());
            arrival.through = whole.through;
            arrival.everything |= whole.everything;
            if !is_none {
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
