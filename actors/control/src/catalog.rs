//! The client that writes CATALOG, for gateways and sources.
//!
//! Documents are written by compare-and-swap: what the author did not see is not overwritten. One document is one message, which a
//! promise precedes if it has an idempotency key; several are one atomic batch led by a change record. All carry author, reason and
//! key, so that a repetition finds what it wrote the first time, and a conflict can say who was faster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use async_nats::Client;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_policy::model::World;
use tracing::Instrument;

use crate::attempt::Attempt;
use crate::change::{Body, Change, Expected, Invalid, Record, Write, content_hash};
use crate::document::{Document, Name, Refused, decode_record};
use crate::estimate::Estimate;
use crate::log::{Entry, Log, NoAnswer};
use crate::pressure::{Behind, Pressure};
use crate::together::Together;

pub(crate) const AUTHOR: &str = "Gc-Author";
pub(crate) const REASON: &str = "Gc-Reason";
pub(crate) const KEY: &str = "Gc-Key";
pub(crate) const CONTENT: &str = "Gc-Content";
/// On a document of a batch: the change record that leads it.
pub(crate) const RECORD: &str = "Gc-Record";

/// How long a change record stays, and with it the memory of its idempotency key. AUDIT keeps it longer.
pub const RECORD_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
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
    #[error(
        "what became of the change with idempotency key {key:?} is not known any more: its document was replaced too often since. Read it and \
         decide anew, with a new key"
    )]
    Forgotten { key: String },
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
    /// What all that write here share.
    together: Together,
    /// Why the bus refused the last change, if it did.
    refused: Arc<Mutex<Option<String>>>,
    /// The highest number that was written here.
    written: Arc<AtomicU64>,
}

impl Catalog {
    pub fn new(client: Client) -> Self {
        Self::over(Log::catalog(client))
    }

    /// One that writes as this log does.
    pub fn over(log: Log) -> Self {
        Self {
            log,
            estimate: None,
            pressure: None,
            together: Together::default(),
            refused: Arc::default(),
            written: Arc::default(),
        }
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
        let weight = match &self.estimate {
            Some(estimate) => change.fits(estimate.as_ref())?,
            None => change.writes.len(),
        };
        if let Some(pressure) = &self.pressure {
            pressure.admit(self.written.load(Ordering::Relaxed)).await?;
        }
        let key = change.key.clone().unwrap_or_else(random_key);
        let content = content_hash(&change.writes, &payloads);
        let (above, together) = (AtomicU64::new(0), Some((&self.together, weight)));
        let attempt = Attempt { log: &self.log, change, content, payloads, key, above, together };
        let span = tracing::debug_span!("write", author = %change.author, documents = change.writes.len());
        let outcome = attempt.run().instrument(span).await;
        match &outcome {
            Ok(_) => *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = None,
            Err(Error::Refused(why)) => *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.clone()),
            Err(_) => {}
        }
        let accepted = outcome?;
        self.written.fetch_max(accepted.number, Ordering::Relaxed);
        tracing::debug!(change = accepted.number, author = %change.author, repeated = accepted.repeated, "written");
        Ok(accepted)
    }

    /// Why the bus refused the last change that was written here, if it did: a server without room still answers everything else.
    pub fn refused(&self) -> Option<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What became of this change, if it was written before under its own key.
    pub async fn written_before(&self, change: &Change) -> Result<Option<Accepted>, Error> {
        let payloads = change.encode()?;
        let Some(key) = change.key.clone() else { return Ok(None) };
        let content = content_hash(&change.writes, &payloads);
        let above = AtomicU64::new(0);
        Attempt { log: &self.log, change, content, payloads, key, above, together: None }.written_before().await
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
    let entries = log.page(&name.subject(), 1, usize::MAX, false).await?;
    Ok(entries.iter().filter_map(Version::of).collect())
}

fn random_key() -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", draw(), draw())
}
