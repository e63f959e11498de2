//! One change on its way into CATALOG: written once under its key, however often it is asked for and by however many gateways.
//!
//! A key that the caller chose has a record, whose subject is made from the key. Several documents lie behind it in the same batch. One
//! document is written without a batch, which costs many times as much as a message: the record then comes first and is a *promise*. It
//! says which version the document will replace, and the document is written on condition that this is the last one. So at any time one
//! place in the stream decides: the version that follows the one named by the promise is this change, or is another's, and then it never will
//! be this one, or is not there yet, and then whoever asks again writes it there. A promise is replaced only when its place went to another.

use std::sync::atomic::{AtomicU64, Ordering};

use async_nats::HeaderMap;
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::subjects::{self, CatalogKind};

use crate::audit;
use crate::catalog::{ATTEMPTS_MAX, AUTHOR, Accepted, CONTENT, Error, KEY, REASON, RECORD, RECORD_KEPT};
use crate::change::{Change, Expected, Promised, Record, Write, record_id};
use crate::document::{decode_record, encode_record};
use crate::log::{EXPECTED, Log, Outcome, Outgoing, TIME_TO_LIVE};
use crate::together::Together;

/// On a document that was promised: the record that says so.
const PROMISE: &str = "Gc-Promise";
/// Documents looked up at once.
const READS_AT_ONCE: usize = 64;

/// What is known of a change under its key.
enum Before {
    Written(Accepted),
    Not(Place),
}

/// Where a change that is not written may be.
#[derive(Default)]
struct Place {
    /// The sequence of its record, 0 for none.
    record: u64,
    /// It is promised in place of this version, and may be written there at any moment, by whoever was asked before.
    open: Option<u64>,
}

/// What became of a promise.
enum Fate {
    Kept {
        number: u64,
        content: String,
    },
    /// Its place is free.
    Open,
    /// Its place went to another.
    Broken,
}

/// One change on its way into the stream.
pub(crate) struct Attempt<'a> {
    pub log: &'a Log,
    pub change: &'a Change,
    pub payloads: Vec<Vec<u8>>,
    pub content: String,
    pub key: String,
    /// What the first attempt expected of a single document: its own version can only be a later one.
    pub above: AtomicU64,
    /// With whom it may share a batch, and how much it weighs there.
    pub together: Option<(&'a Together, usize)>,
}

impl Attempt<'_> {
    pub async fn run(&self) -> Result<Accepted, Error> {
        let mut place = Place::default();
        // A key that the caller chose may be a repetition; one that was just drawn is not.
        let mut is_known = self.change.key.is_none();
        for attempt in 0..ATTEMPTS_MAX {
            if !std::mem::replace(&mut is_known, false) {
                place = match self.before().await? {
                    Before::Written(accepted) => return Ok(accepted),
                    Before::Not(place) => place,
                };
            }
            let promises = self.promises();
            // What the author expects is most often so: looking first would double the time. But a promise names what is there.
            let expected = if attempt == 0 && !promises { self.presumed().await? } else { self.expectations().await? };
            if let (0, [one]) = (attempt, expected.as_slice()) {
                self.above.store(*one, Ordering::Relaxed);
            }
            // Its place was taken a moment ago. Whether by this very change has to be seen before it is promised anew.
            if place.open.is_some_and(|after| expected != [after]) {
                continue;
            }
            let outcome = match expected.as_slice() {
                [one] if promises => self.write_promised(&place, *one).await,
                _ => self.write(self.messages(&expected, place.record)).await,
            };
            match outcome {
                Outcome::Committed(number) => return Ok(self.accepted(number, false)),
                Outcome::Refused(reason) => return Err(Error::Refused(reason)),
                Outcome::Unknown(reason) => {
                    // It may be there already. If not, only a repetition can tell for sure.
                    return match self.before().await {
                        Ok(Before::Written(accepted)) => Ok(accepted),
                        _ => Err(Error::Unknown { reason, key: self.key.clone() }),
                    };
                }
                Outcome::Conflict => {}
            }
        }
        Err(Error::Busy)
    }

    async fn write(&self, messages: Vec<Outgoing>) -> Outcome {
        match self.together {
            Some((together, weight)) => together.write(self.log, messages, weight).await,
            None => self.log.write(&messages).await,
        }
    }

    /// Whether two messages, one after the other, are better than a batch of two: not where many wait, who share one, nor for a leader,
    /// whose every write is a batch.
    fn promises(&self) -> bool {
        let is_busy = self.together.is_some_and(|(together, _)| together.is_busy());
        self.change.key.is_some() && self.change.writes.len() == 1 && !self.log.is_fenced() && !is_busy
    }

    /// Promises the document in place of this version, unless that is promised already, and writes it there.
    async fn write_promised(&self, place: &Place, after: u64) -> Outcome {
        let (subject, id) = (self.change.writes[0].name.subject(), record_id(&self.key));
        if place.open != Some(after) {
            let promised = Promised { subject: subject.clone(), after };
            match self.write(vec![self.record_message(&id, place.record, Some(promised))]).await {
                Outcome::Committed(_) => {}
                other => return other,
            }
        }
        let mut headers = self.headers();
        headers.insert(PROMISE, id.as_str());
        headers.insert(CONTENT, self.content.as_str());
        self.write(vec![Outgoing { subject, headers, expected: after, payload: self.payloads[0].clone() }]).await
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
    pub async fn written_before(&self) -> Result<Option<Accepted>, Error> {
        Ok(match self.before().await? {
            Before::Written(accepted) => Some(accepted),
            Before::Not(_) => None,
        })
    }

    async fn before(&self) -> Result<Before, Error> {
        let reused = |number: u64| Error::KeyReused { key: self.key.clone(), number };
        if let Some(id) = self.record() {
            let subject = subjects::catalog(CatalogKind::Change, &id).unwrap_or_default();
            let Some(entry) = self.log.last(&subject).await? else { return Ok(Before::Not(Place::default())) };
            let Ok(record) = decode_record::<Record>(&entry.payload) else { return Err(reused(entry.sequence)) };
            let is_same = record.key == self.key && record.content == self.content;
            let Some(promised) = &record.promised else {
                let number = entry.sequence + record.documents;
                return if is_same { Ok(Before::Written(self.accepted(number, true))) } else { Err(reused(number)) };
            };
            return match self.fate(promised, &id).await? {
                Fate::Kept { number, content } if record.key == self.key && content == self.content => {
                    Ok(Before::Written(self.accepted(number, true)))
                }
                Fate::Kept { number, .. } => Err(reused(number)),
                Fate::Open if is_same => Ok(Before::Not(Place { record: entry.sequence, open: Some(promised.after) })),
                // Somebody may be about to write it.
                Fate::Open => Err(reused(entry.sequence)),
                Fate::Broken => Ok(Before::Not(Place { record: entry.sequence, open: None })),
            };
        }
        let subject = self.change.writes[0].name.subject();
        let mut from = self.above.load(Ordering::Relaxed) + 1;
        while let Some(entry) = self.log.next(&subject, from).await? {
            if entry.header(KEY) == Some(self.key.as_str()) {
                let same = entry.header(CONTENT) == Some(self.content.as_str());
                let accepted = || Before::Written(self.accepted(entry.sequence, true));
                return if same { Ok(accepted()) } else { Err(reused(entry.sequence)) };
            }
            from = entry.sequence + 1;
        }
        Ok(Before::Not(Place::default()))
    }

    /// Looks at the one place where what was promised can be.
    async fn fate(&self, Promised { subject, after }: &Promised, id: &str) -> Result<Fate, Error> {
        let Some(next) = self.log.next(subject, after + 1).await? else { return Ok(Fate::Open) };
        let content = |text: Option<&str>| text.unwrap_or_default().to_owned();
        if next.header(PROMISE) == Some(id) {
            return Ok(Fate::Kept { number: next.sequence, content: content(next.header(CONTENT)) });
        }
        if next.header(EXPECTED) == Some(after.to_string().as_str()) {
            return Ok(Fate::Broken);
        }
        // The version that followed is not in CATALOG any more. AUDIT keeps more of them.
        let audit = Log::audit(self.log.client().clone());
        for entry in audit.page(subject, 1, usize::MAX, true).await? {
            if entry.header(PROMISE) == Some(id)
                && let Some(number) = audit::number(&entry)
            {
                return Ok(Fate::Kept { number, content: content(entry.header(CONTENT)) });
            }
        }
        Err(Error::Forgotten { key: self.key.clone() })
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

    fn record_message(&self, id: &str, expected: u64, promised: Option<Promised>) -> Outgoing {
        let body = Record {
            author: self.change.author.clone(),
            reason: self.change.reason.clone(),
            key: self.key.clone(),
            documents: self.payloads.len() as u64,
            content: self.content.clone(),
            promised,
        };
        let mut headers = self.headers();
        headers.insert(TIME_TO_LIVE, RECORD_KEPT.as_secs().to_string().as_str());
        let subject = subjects::catalog(CatalogKind::Change, id).unwrap_or_default();
        Outgoing { subject, headers, expected, payload: encode_record(&body) }
    }

    /// The record, in place of the one with this sequence, and the documents.
    fn messages(&self, expected: &[u64], former: u64) -> Vec<Outgoing> {
        let record = self.record();
        let mut messages = Vec::with_capacity(self.payloads.len() + 1);
        messages.extend(record.as_ref().map(|id| self.record_message(id, former, None)));
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
