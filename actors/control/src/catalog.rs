//! The client that writes CATALOG, for gateways and sources.
//!
//! Documents are written by compare-and-swap: what the author did not see is not overwritten. One document is one message; several
//! are one atomic batch led by a change record. Both carry author, reason and idempotency key, so that a repetition finds what it
//! wrote the first time, and a conflict can say who was faster.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use async_nats::{Client, HeaderMap};
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_policy::model::World;
use tracing::Instrument;

use crate::change::{Body, Change, Expected, Invalid, Record, Write, content_hash, record_id};
use crate::document::{Document, Name, Refused, decode_record, encode_record};
use crate::estimate::Estimate;
use crate::log::{Entry, Log, NoAnswer, Outcome, Outgoing, TIME_TO_LIVE};
use crate::pressure::{Behind, Pressure};

const AUTHOR: &str = "Gc-Author";
const REASON: &str = "Gc-Reason";
const KEY: &str = "Gc-Key";
const CONTENT: &str = "Gc-Content";
/// On a document of a batch: the change record that leads it.
const RECORD: &str = "Gc-Record";

/// How long a change record stays, and with it the memory of its idempotency key. AUDIT keeps it longer.
pub const RECORD_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// Documents looked up at once.
const READS_AT_ONCE: usize = 64;
/// Attempts to write over whatever is there while others write too.
pub const ATTEMPTS_MAX: u32 = 20;

/// A change that is in the stream for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The CATALOG sequence of its last message.
    pub number: u64,
    /// What its documents' versions are now, in the order of the change.
    pub revisions: Vec<u64>,
    /// It had been written before, under the same key.
    pub repeated: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(
        "{name} was changed meanwhile, by {author} at {} (revision {found}): read it again and decide anew",
        humantime::format_rfc3339_millis(*at)
    )]
    Conflict { name: Name, found: u64, author: String, at: SystemTime },
    #[error("{name} does not exist (expected revision {expected}): read it again and decide anew")]
    Gone { name: Name, expected: u64 },
    #[error("idempotency key {key:?} was used for another change, number {number}: use a new one")]
    KeyReused { key: String, number: u64 },
    #[error("the bus refused the change: {0}")]
    Refused(String),
    #[error("it is not known whether the change was written ({reason}): repeat it with the idempotency key {key:?}")]
    Unknown { reason: String, key: String },
    #[error("others write the same documents all the time: try again")]
    Busy,
    #[error("change {0} is not known: its messages are not in CATALOG any more, or there never was one")]
    UnknownChange(u64),
    #[error("{name}: the version before change {number} is not kept any more: write it again instead")]
    TooOld { name: Name, number: u64 },
    #[error(transparent)]
    Unreadable(#[from] Refused),
    #[error(transparent)]
    Behind(#[from] Behind),
}

/// One version of a document.
#[derive(Debug, Clone)]
pub struct Version {
    pub name: Name,
    pub revision: u64,
    pub at: SystemTime,
    pub author: String,
    pub reason: String,
    /// `None` when this version deletes it; an error when it cannot be read.
    pub document: Result<Option<Document>, Refused>,
    record: Option<String>,
}

impl Version {
    /// Reads what lies in CATALOG; `None` for a subject that names no document.
    pub fn of(entry: &Entry) -> Option<Self> {
        let name = Name::parse(&entry.subject)?;
        let text = |header: &str| entry.header(header).unwrap_or_default().to_owned();
        Some(Self {
            document: Document::decode(&name, &entry.payload),
            name,
            revision: entry.sequence,
            at: entry.at,
            author: text(AUTHOR),
            reason: text(REASON),
            record: entry.header(RECORD).map(str::to_owned),
        })
    }

    /// The id of the change record that leads the batch it was written with, if it was.
    pub fn record(&self) -> Option<&str> {
        self.record.as_deref()
    }
}

#[derive(Clone)]
pub struct Catalog {
    log: Log,
    estimate: Option<Arc<dyn Estimate>>,
    pressure: Option<Pressure>,
    /// The highest number that was written here.
    written: Arc<AtomicU64>,
}

impl Catalog {
    pub fn new(client: Client) -> Self {
        Self { log: Log::catalog(client), estimate: None, pressure: None, written: Arc::default() }
    }

    /// Changes that no batch can hold are refused before they are written.
    pub fn with_estimate(self, estimate: Arc<dyn Estimate>) -> Self {
        Self { estimate: Some(estimate), ..self }
    }

    /// Whoever writes more than is published waits.
    pub fn with_pressure(self, pressure: Pressure) -> Self {
        Self { pressure: Some(pressure), ..self }
    }

    /// Writes the change whole or not at all. With a world at hand it is checked against that first.
    pub async fn write(&self, change: &Change, world: Option<&World>) -> Result<Accepted, Error> {
        let payloads = change.encode()?;
        if let Some(world) = world {
            change.check(world)?;
        }
        if let Some(estimate) = &self.estimate {
            change.fits(estimate.as_ref())?;
        }
        if let Some(pressure) = &self.pressure {
            pressure.admit(self.written.load(Ordering::Relaxed)).await?;
        }
        let key = change.key.clone().unwrap_or_else(random_key);
        let attempt = Attempt { log: &self.log, change, content: content_hash(&change.writes, &payloads), payloads, key };
        let span = tracing::debug_span!("write", author = %change.author, documents = change.writes.len());
        let accepted = attempt.run().instrument(span).await?;
        self.written.fetch_max(accepted.number, Ordering::Relaxed);
        tracing::debug!(change = accepted.number, author = %change.author, repeated = accepted.repeated, "written");
        Ok(accepted)
    }

    /// What became of this change, if it was written before under its own key.
    pub async fn written_before(&self, change: &Change) -> Result<Option<Accepted>, Error> {
        let payloads = change.encode()?;
        let Some(key) = change.key.clone() else { return Ok(None) };
        let content = content_hash(&change.writes, &payloads);
        Attempt { log: &self.log, change, content, payloads, key }.written_before().await
    }

    /// The document as it is now; `None` if there never was one.
    pub async fn read(&self, name: &Name) -> Result<Option<Version>, NoAnswer> {
        Ok(self.log.last(&name.subject()).await?.as_ref().and_then(Version::of))
    }

    /// The sequence of the last message, from the stream's leader.
    pub async fn end(&self) -> Result<u64, NoAnswer> {
        Ok(self.log.last(subjects::CATALOG_ALL).await?.map_or(0, |entry| entry.sequence))
    }

    /// The versions that are kept, newest first.
    pub async fn history(&self, name: &Name) -> Result<Vec<Version>, NoAnswer> {
        let mut versions = versions(&self.log, name).await?;
        versions.reverse();
        Ok(versions)
    }

    /// Every document that can be read, and what cannot. Deleted ones are left out.
    pub async fn documents(&self) -> Result<(Vec<Version>, Vec<Refused>), NoAnswer> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for version in self.log.all(subjects::CATALOG_ALL).await?.iter().filter_map(Version::of) {
            match &version.document {
                _ if matches!(version.name.kind, CatalogKind::Change | CatalogKind::Term) => {}
                Ok(Some(_)) => good.push(version),
                Ok(None) => {}
                Err(refused) => bad.push(refused.clone()),
            }
        }
        Ok((good, bad))
    }

    /// What change `number` wrote, as far as it is kept.
    pub async fn change(&self, number: u64) -> Result<Vec<Version>, Error> {
        let unknown = || Error::UnknownChange(number);
        let last = self.log.at(number).await?.as_ref().and_then(Version::of).ok_or_else(unknown)?;
        let Some(record) = &last.record else {
            let document = !matches!(last.name.kind, CatalogKind::Change | CatalogKind::Term);
            return if document { Ok(vec![last]) } else { Err(unknown()) };
        };
        let subject = subjects::catalog(CatalogKind::Change, record).map_err(|_| unknown())?;
        let first = self.log.last(&subject).await?.ok_or_else(unknown)?;
        let header: Record = decode_record(&first.payload).map_err(|_| unknown())?;
        if first.sequence + header.documents != number {
            return Err(unknown()); // in the middle of a change
        }
        let entries = self.log.range(subjects::CATALOG_ALL, first.sequence + 1, number).await?;
        let versions: Vec<Version> = entries.iter().filter_map(Version::of).collect();
        if versions.len() as u64 == header.documents { Ok(versions) } else { Err(unknown()) }
    }

    /// The change that takes change `number` back: every document as it was before, unless somebody has changed it since.
    pub async fn undo(&self, number: u64, author: &str, reason: &str) -> Result<Change, Error> {
        let mut writes = Vec::new();
        for written in self.change(number).await? {
            let versions = versions(&self.log, &written.name).await?;
            let at = versions.iter().position(|version| version.revision == written.revision);
            let before = match at {
                None => return Err(Error::TooOld { name: written.name, number }),
                // The oldest that is kept: either nothing came before, or it was forgotten.
                Some(0) if versions.len() as i64 >= groupcast_bus_config::streams::CATALOG_HISTORY => {
                    return Err(Error::TooOld { name: written.name, number });
                }
                Some(0) => None,
                Some(at) => versions[at - 1].document.clone()?,
            };
            let body = before.map_or(Body::Delete, Body::Put);
            writes.push(Write { name: written.name, expected: Expected::Revision(written.revision), body });
        }
        let reason = if reason.is_empty() { format!("undo of change {number}") } else { reason.to_owned() };
        Ok(Change { author: author.to_owned(), reason, key: None, writes })
    }
}

/// Oldest first.
async fn versions(log: &Log, name: &Name) -> Result<Vec<Version>, NoAnswer> {
    let (subject, mut from, mut versions) = (name.subject(), 1, Vec::new());
    while let Some(entry) = log.next(&subject, from).await? {
        from = entry.sequence + 1;
        versions.extend(Version::of(&entry));
    }
    Ok(versions)
}

fn random_key() -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", draw(), draw())
}

/// One change on its way into the stream.
struct Attempt<'a> {
    log: &'a Log,
    change: &'a Change,
    payloads: Vec<Vec<u8>>,
    content: String,
    key: String,
}

impl Attempt<'_> {
    async fn run(&self) -> Result<Accepted, Error> {
        // A key that the caller chose may be a repetition; one that was just drawn is not.
        if self.change.key.is_some()
            && let Some(accepted) = self.written_before().await?
        {
            return Ok(accepted);
        }
        for attempt in 0..ATTEMPTS_MAX {
            // What the author expects is most often so: looking first would double the time.
            let expected = if attempt == 0 { self.presumed().await? } else { self.expectations().await? };
            let messages = self.messages(&expected);
            match self.log.write(&messages).await {
                Outcome::Committed(number) => return Ok(self.accepted(number, false)),
                Outcome::Refused(reason) => return Err(Error::Refused(reason)),
                Outcome::Unknown(reason) => {
                    // It may be there already. If not, only a repetition can tell for sure.
                    return match self.written_before().await {
                        Ok(Some(accepted)) => Ok(accepted),
                        _ => Err(Error::Unknown { reason, key: self.key.clone() }),
                    };
                }
                Outcome::Conflict => {
                    if let Some(accepted) = self.written_before().await? {
                        return Ok(accepted);
                    }
                }
            }
        }
        Err(Error::Busy)
    }

    fn accepted(&self, number: u64, repeated: bool) -> Accepted {
        let first = number + 1 - self.change.writes.len() as u64;
        Accepted { number, revisions: (first..=number).collect(), repeated }
    }

    /// A key that the caller chose is remembered by a record of its own: a document's own versions are soon forgotten.
    fn record(&self) -> Option<String> {
        (self.change.writes.len() > 1 || self.change.key.is_some()).then(|| record_id(&self.key))
    }

    /// Finds the change under its key.
    async fn written_before(&self) -> Result<Option<Accepted>, Error> {
        let reused = |number: u64| Error::KeyReused { key: self.key.clone(), number };
        if let Some(id) = self.record() {
            let subject = subjects::catalog(CatalogKind::Change, &id).unwrap_or_default();
            let Some(entry) = self.log.last(&subject).await? else { return Ok(None) };
            let record: Option<Record> = decode_record(&entry.payload).ok();
            return match record {
                Some(record) if record.key == self.key && record.content == self.content => {
                    Ok(Some(self.accepted(entry.sequence + record.documents, true)))
                }
                Some(record) => Err(reused(entry.sequence + record.documents)),
                None => Err(reused(entry.sequence)),
            };
        }
        let subject = self.change.writes[0].name.subject();
        let mut from = 1;
        while let Some(entry) = self.log.next(&subject, from).await? {
            if entry.header(KEY) == Some(self.key.as_str()) {
                let same = entry.header(CONTENT) == Some(self.content.as_str());
                return if same { Ok(Some(self.accepted(entry.sequence, true))) } else { Err(reused(entry.sequence)) };
            }
            from = entry.sequence + 1;
        }
        Ok(None)
    }

    /// The sequences to expect if nobody else wrote.
    async fn presumed(&self) -> Result<Vec<u64>, Error> {
        let one = |write: &Write| {
            let (expected, subject) = (write.expected, write.name.subject());
            async move {
                Ok(match expected {
                    Expected::Revision(revision) => revision,
                    Expected::Absent => 0,
                    Expected::Any => self.log.last(&subject).await?.map_or(0, |entry| entry.sequence),
                })
            }
        };
        futures::stream::iter(self.change.writes.iter().map(one)).buffered(READS_AT_ONCE).try_collect().await
    }

    /// The sequences to expect. What does not agree with what the author expects is a conflict.
    async fn expectations(&self) -> Result<Vec<u64>, Error> {
        let mut sequences = Vec::with_capacity(self.change.writes.len());
        let read = |write: &Write| {
            let subject = write.name.subject();
            async move { self.log.last(&subject).await }
        };
        let mut found = futures::stream::iter(self.change.writes.iter().map(read)).buffered(READS_AT_ONCE);
        for write in &self.change.writes {
            let now = found.next().await.transpose()?.flatten();
            let sequence = now.as_ref().map_or(0, |entry| entry.sequence);
            let agrees = match write.expected {
                Expected::Any => true,
                Expected::Absent => now.as_ref().is_none_or(|entry| entry.payload.is_empty()),
                Expected::Revision(revision) => revision == sequence,
            };
            match (agrees, now, write.expected) {
                (true, ..) => sequences.push(sequence),
                (false, Some(entry), _) => {
                    let author = entry.header(AUTHOR).unwrap_or("somebody unknown").to_owned();
                    return Err(Error::Conflict { name: write.name.clone(), found: entry.sequence, author, at: entry.at });
                }
                (false, None, Expected::Revision(expected)) => {
                    return Err(Error::Gone { name: write.name.clone(), expected });
                }
                (false, None, _) => return Err(Error::Busy),
            }
        }
        Ok(sequences)
    }

    fn messages(&self, expected: &[u64]) -> Vec<Outgoing> {
        let record = self.record();
        let mut messages = Vec::with_capacity(self.payloads.len() + 1);
        if let Some(id) = &record {
            let body = Record {
                author: self.change.author.clone(),
                reason: self.change.reason.clone(),
                key: self.key.clone(),
                documents: self.payloads.len() as u64,
                content: self.content.clone(),
            };
            let mut headers = self.headers();
            headers.insert(TIME_TO_LIVE, RECORD_KEPT.as_secs().to_string().as_str());
            let subject = subjects::catalog(CatalogKind::Change, id).unwrap_or_default();
            messages.push(Outgoing { subject, headers, expected: 0, payload: encode_record(&body) });
        }
        for ((write, payload), expected) in self.change.writes.iter().zip(&self.payloads).zip(expected) {
            let mut headers = self.headers();
            match &record {
                Some(id) => headers.insert(RECORD, id.as_str()),
                None => {
                    headers.insert(KEY, self.key.as_str());
                    headers.insert(CONTENT, self.content.as_str());
                }
            }
            messages.push(Outgoing { subject: write.name.subject(), headers, expected: *expected, payload: payload.clone() });
        }
        messages
    }

    /// Author and reason were checked to be plain text.
    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHOR, self.change.author.as_str());
        headers.insert(REASON, self.change.reason.as_str());
        headers
    }
}
