//! What a leader writes into CATALOG and REGISTRY ends with its term: sources, marks and deletions of silent hosts, freezes.
//!
//! A leader that was held up, and knows nothing of it yet, must not write what it saw before another took over. So each leader first
//! writes its term into both streams, and each of its batches expects that this is still the last that was written there. Whoever takes
//! over writes its own before it reads what it will act on: what its predecessor has written by then it sees, and what comes later the
//! streams refuse.

use std::sync::Arc;

use async_nats::{Client, HeaderMap};
use groupcast_bus_config::subjects;
use groupcast_messages::Lead;
use groupcast_topics::term::TERM_MAX;
use tokio::sync::{Mutex, watch};

use crate::actors::RETRY_PAUSE;
use crate::log::{Entry, Fence, Log, NoAnswer, Outcome, Outgoing};

/// Attempts to write a fence while others write theirs.
const ATTEMPTS_MAX: u32 = 20;

#[derive(Debug, Clone, thiserror::Error)]
pub enum Unfenced {
    #[error(
        "another controller leads with term {other}, this one led with {term}: it writes nothing any more. If no other does, a stream was \
         restored from an old copy: stop the controllers and run `groupcast bus repair-term`"
    )]
    Deposed { term: u64, other: u64 },
    #[error("this controller does not lead")]
    NotLeading,
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error("the fence of stream {stream} cannot be written: {why}")]
    Write { stream: &'static str, why: String },
}

/// Both streams as the leader of one term writes them.
#[derive(Clone)]
pub struct Fenced {
    pub term: u64,
    pub catalog: Log,
    pub registry: Log,
}

/// One for all that a controller writes as the leader.
pub struct Fences {
    catalog: Log,
    registry: Log,
    topics: Log,
    /// Of which term, the last time. Whoever comes while it is written waits for it.
    written: Mutex<Option<u64>>,
}

impl Fences {
    pub fn new(client: &Client) -> Arc<Self> {
        let (catalog, registry) = (Log::catalog(client.clone()), Log::registry(client.clone()));
        Arc::new(Self { catalog, registry, topics: Log::topics(client.clone()), written: Mutex::default() })
    }

    /// The streams as the leader of this term writes them. What is read afterwards is all that earlier leaders have written.
    pub async fn of(&self, term: u64) -> Result<Fenced, Unfenced> {
        let mut written = self.written.lock().await;
        if let Some(other) = written.filter(|other| *other > term) {
            return Err(Unfenced::Deposed { term, other });
        }
        // Looked at each time: a stream that was lost and made again has no fence, and would refuse everything for as long as this one leads.
        let catalog = self.take(&self.catalog, subjects::CATALOG_FENCE, subjects::CATALOG_FENCED, term).await?;
        let registry = self.take(&self.registry, subjects::REGISTRY_FENCE, subjects::REGISTRY_FENCED, term).await?;
        let fenced = Fenced { term, catalog: self.catalog.fenced(catalog), registry: self.registry.fenced(registry) };
        *written = Some(term);
        Ok(fenced)
    }

    /// Writes the fence as soon as this controller leads, also where nobody has anything to write yet: its predecessor may.
    pub async fn keep(self: Arc<Self>, mut leading: watch::Receiver<Option<u64>>) {
        loop {
            let term = *leading.borrow_and_update();
            while let Some(term) = term
                && let Err(error) = self.of(term).await
                && !leading.has_changed().unwrap_or(true)
            {
                tracing::warn!(term, %error, "nothing can be written as the leader yet; trying again");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            if leading.changed().await.is_err() {
                return;
            }
        }
    }

    /// Terms rise: whoever finds a higher one than its own has been deposed.
    async fn take(&self, log: &Log, subject: &'static str, carrier: &'static str, term: u64) -> Result<Fence, Unfenced> {
        let failed = |why: String| Unfenced::Write { stream: log.stream(), why };
        for _ in 0..ATTEMPTS_MAX {
            let last = log.last(subject).await?;
            let (found, expected) = (term_of(last.as_ref()), last.map_or(0, |entry| entry.sequence));
            if found > term {
                return Err(Unfenced::Deposed { term, other: found });
            }
            // A stream that was lost and made again says nothing. Whoever leads has written the topics' head before it fences.
            if found == 0
                && let Some(other) = self.published().await?.filter(|other| *other > term)
            {
                return Err(Unfenced::Deposed { term, other });
            }
            if found == term {
                return Ok(Fence { subject, sequence: expected, carrier, term });
            }
            let payload = term.to_string().into_bytes();
            match log.write(&[Outgoing { subject: subject.to_owned(), headers: HeaderMap::new(), expected, payload }]).await {
                Outcome::Committed(sequence) => return Ok(Fence { subject, sequence, carrier, term }),
                // Written by another, or by this one without an answer: the next look tells.
                Outcome::Conflict | Outcome::Unknown(_) => {}
                Outcome::Refused(why) => return Err(failed(why)),
            }
        }
        Err(failed("others write it all the time".to_owned()))
    }

    /// The term of the topics' head; none of one that cannot be read, or that nobody leads with.
    async fn published(&self) -> Result<Option<u64>, NoAnswer> {
        let head = self.topics.last(subjects::LEAD_WRITE).await?;
        let lead = head.and_then(|entry| Lead::decode(&entry.payload).ok());
        Ok(lead.map(|lead| lead.term).filter(|term| *term < TERM_MAX))
    }
}

/// The term in a stream's fence; 0 where nobody has written any, or none that anybody leads with.
pub fn term_of(entry: Option<&Entry>) -> u64 {
    let number = |entry: &Entry| std::str::from_utf8(&entry.payload).ok()?.parse().ok().filter(|term| *term < TERM_MAX);
    entry.and_then(number).unwrap_or(0)
}
