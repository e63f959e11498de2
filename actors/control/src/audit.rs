//! AUDIT read: who wrote which version of a document, when, and what it changed; and whether anything is missing from it.
//!
//! The bus copies every message of CATALOG and REGISTRY into AUDIT and says on each copy which sequence it had. Their sequences have no
//! holes, so a hole among the copies is a version that AUDIT never got: it was replaced before it was copied. CATALOG keeps many versions
//! for that, REGISTRY one.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use async_nats::{Client, HeaderMap};
use groupcast_bus_config::streams::{AUDIT_PER_SUBJECT, CATALOG, Stream};
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_policy::ids::InvalidId;
use serde_json::Value;

use crate::catalog::{AUTHOR, REASON};
use crate::difference::differences;
use crate::document::Name;
use crate::log::{Entry, Log, NoAnswer};
use crate::names;

/// What the bus says about a copy: the stream it comes from, and its sequence there.
const SOURCE: &str = "Nats-Stream-Source";
/// On what was imported: when AUDIT of the exported bus took it, and its revision there.
pub(crate) const IMPORTED_AT: &str = "Gc-At";
pub(crate) const IMPORTED_REVISION: &str = "Gc-Revision";

/// Entries that one request looks at, whether they are wanted or not.
pub const SCANNED_MAX: usize = 5_000;
/// The latest copies that are held against CATALOG's sequences. Not more than AUDIT keeps of one subject: further back it may lack what it
/// once had.
pub const COMPARED_MAX: u64 = AUDIT_PER_SUBJECT as u64;
/// Gaps that are named.
pub const GAPS_NAMED_MAX: usize = 10;
/// How often a controller looks for gaps.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The sequence that a copy had in this stream.
fn copied_from(headers: &HeaderMap, stream: &Stream) -> Option<u64> {
    let mut words = headers.get(SOURCE)?.as_str().split_ascii_whitespace();
    // A stream of another account or domain has more behind a colon; ours are of this one.
    let is_it = words.next()?.split(':').next() == Some(stream.name);
    if is_it { words.next()?.parse().ok() } else { None }
}

/// Messages of a stream that AUDIT never got: the first and the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    pub first: u64,
    pub last: u64,
}

impl Gap {
    pub fn messages(&self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }
}

impl std::fmt::Display for Gap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{} to {}", self.first, self.last),
        }
    }
}

/// Holds the copies against each other. Pure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Continuity {
    last: Option<u64>,
}

impl Continuity {
    /// Takes the next copy; what is missing before it.
    pub fn push(&mut self, sequence: u64) -> Option<Gap> {
        let before = self.last.replace(sequence)?;
        // A sequence that goes back is that of another stream, made after the first was lost: it begins with 1.
        let next = if sequence > before { before + 1 } else { 1 };
        (sequence > next).then(|| Gap { first: next, last: sequence - 1 })
    }

    pub fn last(&self) -> Option<u64> {
        self.last
    }
}

/// How much of a stream is in AUDIT.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Looked {
    pub gaps: Vec<Gap>,
    /// The last sequence that was copied; nothing when that of the stream there is now, rather than of one that was lost, has not begun.
    pub copied: Option<u64>,
    /// The last sequence that the stream has.
    pub written: u64,
}

/// How AUDIT is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Complete {
    pub catalog: Looked,
    /// What is missing here are former states of registrations.
    pub registry: Looked,
}

impl Looked {
    pub fn missing(&self) -> u64 {
        self.gaps.iter().map(Gap::messages).sum()
    }

    /// Messages that are not copied yet.
    pub fn behind(&self) -> u64 {
        self.written.saturating_sub(self.copied.unwrap_or(0))
    }

    pub fn named(&self) -> String {
        let named: Vec<String> = self.gaps.iter().rev().take(GAPS_NAMED_MAX).map(Gap::to_string).collect();
        let more = self.gaps.len().saturating_sub(GAPS_NAMED_MAX);
        if more == 0 { named.join(", ") } else { format!("{} and {more} more gaps", named.join(", ")) }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Id(#[from] InvalidId),
}

/// Which entries.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    pub kind: Option<CatalogKind>,
    pub id: Option<String>,
    /// What the author begins with.
    pub author: Option<String>,
    pub since: Option<SystemTime>,
    pub until: Option<SystemTime>,
    /// Those after this number.
    pub after: u64,
    pub limit: usize,
}

/// One version of a document, as AUDIT keeps it.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// Its place in AUDIT.
    pub number: u64,
    pub name: Name,
    /// What it was in CATALOG: of this bus, or of the one that was exported.
    pub revision: u64,
    pub imported: bool,
    /// When AUDIT took it.
    pub at: SystemTime,
    pub author: String,
    pub reason: String,
    /// Nothing when this version deleted it, or cannot be read.
    pub document: Option<Value>,
    pub deleted: bool,
    /// What it changed, line by line.
    pub difference: Vec<String>,
}

/// What AUDIT keeps of documents; nothing for a message about something else.
pub(crate) struct Kept {
    pub subject: String,
    pub name: Name,
    pub revision: u64,
    pub imported: bool,
    pub at: SystemTime,
}

pub(crate) fn kept(entry: &Entry) -> Option<Kept> {
    let (subject, imported) = match subjects::parse_audited(&entry.subject) {
        Some(subject) => (subject, true),
        None => (entry.subject.clone(), false),
    };
    let name = Name::parse(&subject).filter(|name| !matches!(name.kind, CatalogKind::Change | CatalogKind::Term))?;
    let (revision, at) = match imported {
        false => (copied_from(&entry.headers, &CATALOG)?, entry.at),
        true => {
            let at = entry.header(IMPORTED_AT).and_then(|text| humantime::parse_rfc3339(text).ok()).unwrap_or(entry.at);
            (entry.header(IMPORTED_REVISION)?.parse().ok()?, at)
        }
    };
    Some(Kept { subject, name, revision, imported, at })
}

/// The sequence that a copy of a document had in CATALOG.
pub(crate) fn number(entry: &Entry) -> Option<u64> {
    copied_from(&entry.headers, &CATALOG)
}

fn document(payload: &[u8]) -> Option<Value> {
    let mut envelope: Value = serde_json::from_slice(payload).ok()?;
    Some(envelope.get_mut("document").map(Value::take).unwrap_or(envelope))
}

#[derive(Clone)]
pub struct Audit {
    log: Log,
    catalog: Log,
    registry: Log,
}

impl Audit {
    pub fn new(client: Client) -> Self {
        Self { log: Log::audit(client.clone()), catalog: Log::catalog(client.clone()), registry: Log::registry(client) }
    }

    /// Entries in the order in which they were written, and the number after which the next ones come, if there may be more.
    pub async fn read(&self, wanted: &Wanted) -> Result<(Vec<Recorded>, Option<u64>), Error> {
        let filters = subjects::catalog_filters(wanted.kind, wanted.id.as_deref())?;
        let mut first = wanted.after.saturating_add(1);
        if let Some(since) = wanted.since {
            first = first.max(self.first_at(since).await?);
        }
        let mut entries = Vec::new();
        let mut seen_through = u64::MAX;
        for filter in &filters {
            let page = self.log.page(filter, first, SCANNED_MAX, false).await?;
            // Where one of them was cut off, the other has been seen no further.
            if page.len() >= SCANNED_MAX {
                seen_through = seen_through.min(page.last().map_or(u64::MAX, |entry| entry.sequence));
            }
            entries.extend(page);
        }
        entries.retain(|entry| entry.sequence <= seen_through);
        entries.sort_by_key(|entry| entry.sequence);
        let mut before: HashMap<String, Option<Value>> = HashMap::new();
        let mut found = Vec::new();
        for entry in entries {
            let Some(kept) = kept(&entry) else { continue };
            if wanted.until.is_some_and(|until| kept.at > until) {
                return Ok((found, None));
            }
            let now = document(&entry.payload);
            let author = entry.header(AUTHOR).unwrap_or_default().to_owned();
            if wanted.since.is_some_and(|since| kept.at < since)
                || wanted.author.as_ref().is_some_and(|wanted| !author.starts_with(wanted.as_str()))
            {
                before.insert(kept.subject, now);
                continue;
            }
            if found.len() >= wanted.limit {
                let next = found.last().map(|last: &Recorded| last.number);
                return Ok((found, next));
            }
            let former = match before.get(&kept.subject) {
                Some(former) => former.clone(),
                None => self.former(&kept.subject, entry.sequence).await?,
            };
            let nothing = Value::Object(Default::default());
            let difference = differences(former.as_ref().unwrap_or(&nothing), now.as_ref().unwrap_or(&nothing));
            before.insert(kept.subject, now.clone());
            found.push(Recorded {
                number: entry.sequence,
                name: kept.name,
                revision: kept.revision,
                imported: kept.imported,
                at: kept.at,
                author,
                reason: entry.header(REASON).unwrap_or_default().to_owned(),
                deleted: entry.payload.is_empty(),
                document: now,
                difference,
            });
        }
        Ok((found, (seen_through < u64::MAX).then_some(seen_through)))
    }

    /// The number of the first entry at this time or later.
    async fn first_at(&self, since: SystemTime) -> Result<u64, NoAnswer> {
        let end = self.log.last(">").await?.map_or(0, |entry| entry.sequence);
        let (mut low, mut high) = (1, end + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.log.next(">", middle).await? {
                // Its place in the stream is what is searched for, so the time counts at which this AUDIT took it.
                Some(entry) if entry.at < since => low = entry.sequence.max(middle) + 1,
                Some(_) | None => high = middle,
            }
        }
        // What was imported came later than it was written.
        Ok(match self.log.last(subjects::AUDITED_ALL).await? {
            Some(_) => 1,
            None => low,
        })
    }

    /// The version before this entry.
    async fn former(&self, subject: &str, number: u64) -> Result<Option<Value>, NoAnswer> {
        let own = self.log.last_before(subject, number).await?;
        let entry = match (own, subjects::audited(subject)) {
            (None, Some(imported)) => self.log.last_before(&imported, number).await?,
            (own, _) => own,
        };
        Ok(entry.and_then(|entry| document(&entry.payload)))
    }

    /// How complete the latest of it is.
    pub async fn look(&self) -> Result<Complete, NoAnswer> {
        self.go_on(&mut self.begin().await?).await
    }

    async fn begin(&self) -> Result<[Watched; 2], NoAnswer> {
        let end = self.log.last(">").await?.map_or(0, |entry| entry.sequence);
        // Where AUDIT still has all that it ever took, the first copy is that of the first message there was.
        let is_whole = end == 0 || end <= COMPARED_MAX && self.log.at(1).await?.is_some();
        let continuity = Continuity { last: is_whole.then_some(0) };
        let watched = Watched { next: end.saturating_sub(COMPARED_MAX).max(1), continuity };
        Ok([watched.clone(), watched])
    }

    /// The same of what came since.
    async fn go_on(&self, [catalog, registry]: &mut [Watched; 2]) -> Result<Complete, NoAnswer> {
        Ok(Complete {
            catalog: self.compare(&self.catalog, subjects::CATALOG_ALL, catalog).await?,
            registry: self.compare(&self.registry, subjects::REGISTRY_ALL, registry).await?,
        })
    }

    async fn compare(&self, stream: &Log, filter: &str, watched: &mut Watched) -> Result<Looked, NoAnswer> {
        let end = async || Ok::<_, NoAnswer>(stream.last(filter).await?.map_or(0, |entry| entry.sequence));
        let mut written = end().await?;
        let (mut gaps, first) = (Vec::new(), watched.next);
        let compared = |entry: Entry| {
            watched.next = entry.sequence + 1;
            let sequence = copied_from(&entry.headers, stream.described());
            gaps.extend(sequence.and_then(|sequence| watched.continuity.push(sequence)));
        };
        self.log.walk(filter, first, compared).await?;
        let mut copied = watched.continuity.last();
        if copied > Some(written) {
            // Of a message that was written meanwhile; or of a stream that was lost, and of the one there is now nothing is copied yet.
            written = end().await?;
            copied = copied.filter(|copied| *copied <= written);
        }
        Ok(Looked { gaps, copied, written })
    }

    /// Says when something is missing, as long as the process lives.
    pub async fn watch(self) {
        let mut watched: Option<[Watched; 2]> = None;
        loop {
            let looked = match &mut watched {
                Some(watched) => self.go_on(watched).await,
                None => match self.begin().await {
                    Ok(begun) => self.go_on(watched.insert(begun)).await,
                    Err(error) => Err(error),
                },
            };
            match looked {
                Ok(Complete { catalog, registry }) => {
                    metrics::gauge!(names::AUDIT_BEHIND).set(catalog.behind() as f64);
                    if !catalog.gaps.is_empty() {
                        metrics::counter!(names::AUDIT_MISSING).increment(catalog.missing());
                        tracing::error!(
                            catalog = catalog.named(),
                            messages = catalog.missing(),
                            "AUDIT lacks messages of CATALOG: they were replaced before they were copied"
                        );
                    }
                    if !registry.gaps.is_empty() {
                        metrics::counter!(names::AUDIT_MISSING_REGISTRY).increment(registry.missing());
                        tracing::warn!(
                            registry = registry.named(),
                            messages = registry.missing(),
                            "AUDIT lacks messages of REGISTRY: they were replaced before they were copied"
                        );
                    }
                }
                // The bus is away, which others say louder.
                Err(error) => tracing::debug!(%error, "AUDIT cannot be looked at"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// How far AUDIT was looked at.
#[derive(Debug, Clone, Default)]
struct Watched {
    next: u64,
    continuity: Continuity,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_among_the_copies_is_named() {
        let mut continuity = Continuity::default();
        let gaps: Vec<Gap> = [5, 6, 7, 10, 11, 13, 1, 2].into_iter().filter_map(|sequence| continuity.push(sequence)).collect();
        assert_eq!(gaps, [Gap { first: 8, last: 9 }, Gap { first: 12, last: 12 }], "and none where another CATALOG begins");
        // Broke: what was missing of the beginning of another was not noticed.
        assert_eq!(continuity.push(2), Some(Gap { first: 1, last: 1 }));
        continuity.push(3);
        let looked = Looked { gaps, copied: continuity.last(), written: 5 };
        assert_eq!((looked.missing(), looked.behind(), looked.named().as_str()), (3, 2, "12, 8 to 9"));
        let many = Looked { gaps: vec![Gap { first: 1, last: 1 }; GAPS_NAMED_MAX + 1], ..Looked::default() };
        assert!(many.named().ends_with("and 1 more gaps"));
        assert_eq!(Gap { first: 0, last: u64::MAX }.messages(), u64::MAX);
    }

    #[test]
    fn copies_say_where_they_come_from() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(SOURCE, text);
            copied_from(&headers, &CATALOG)
        };
        assert_eq!(of("CATALOG 12 > > gc.cat.group.web"), Some(12));
        assert_eq!(of("CATALOG:x 12 > >"), Some(12));
        for text in ["REGISTRY 12 > >", "CATALOG", "CATALOG x", ""] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
