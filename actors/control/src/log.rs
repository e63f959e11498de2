//! One of the streams as a log that is read from its leader and written by compare-and-swap: what CATALOG and REGISTRY have in
//! common.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime};

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::{LastRawMessageErrorKind, Stream};
use async_nats::{Client, HeaderMap};
use bytes::Bytes;
use futures::stream::FuturesUnordered;
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::{streams, subjects};
use groupcast_topics::BATCH_MESSAGES_MAX;

use crate::feed;

/// How long a write may take, and the next message of many.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one message may take to be read: what waits for it is tried again, at another gateway too.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// A consumer that was not placed by then is asked for once more, while the first may still come ...
const PLACED_AFTER: Duration = Duration::from_millis(500);
/// ... so often in all.
const PLACED_MAX: u32 = 3;
/// How often it is read what nobody was there to deliver, and the pause before each time but the first.
const READS_MAX: u32 = 5;
const READ_PAUSE: Duration = Duration::from_millis(50);
/// What the client library says of a consumer that nobody answers for. There are no codes.
const NO_RESPONDERS: &str = "no responders";
/// Attempts to write what collides with a batch whose fate is open.
pub const UNDECIDED_ATTEMPTS_MAX: u32 = 50;
/// Pause between them.
const UNDECIDED_PAUSE: Duration = Duration::from_millis(5);
/// A batch is sent in pieces of this many messages, so that the connection gets to write.
const PUBLISH_BURST: usize = 512;

/// Messages that can be stored together. A leader's batch has one more, which carries its fence.
pub const WRITE_MESSAGES_MAX: usize = BATCH_MESSAGES_MAX - 1;

const WRONG_LAST_SEQUENCE: u64 = 10_071;
const WRONG_LAST_SEQUENCE_UNDECIDED: u64 = 10_164;
const NO_MESSAGE_FOUND: u64 = 10_037;

const BATCH_ID: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";
/// On the last message of a change that shares its batch with others.
pub const CHANGE_END: &str = "Gc-End";
pub(crate) const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
/// Has the expectation be about another subject than the message's own.
pub const EXPECTED_SUBJECT: &str = "Nats-Expected-Last-Subject-Sequence-Subject";
/// On the first message of a batch: the sequence after which nothing may have been stored.
pub const EXPECTED_STREAM_SEQUENCE: &str = "Nats-Expected-Last-Sequence";
/// Makes a message vanish by itself.
pub const TIME_TO_LIVE: &str = "Nats-TTL";

#[derive(Debug, Clone, thiserror::Error)]
#[error("stream {stream} did not answer ({reason}): is the bus up, and is a leader elected?")]
pub struct NoAnswer {
    pub stream: &'static str,
    pub reason: String,
}

/// A stored message.
#[derive(Debug, Clone)]
pub struct Entry {
    pub subject: String,
    pub sequence: u64,
    pub headers: HeaderMap,
    pub payload: Bytes,
    pub at: SystemTime,
}

impl Entry {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.as_str())
    }
}

/// A message to be stored.
#[derive(Debug, Clone)]
pub struct Outgoing {
    pub subject: String,
    pub headers: HeaderMap,
    /// The sequence of the subject's last message, 0 for none.
    pub expected: u64,
    pub payload: Vec<u8>,
}

/// What became of what was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All of it is stored; the sequence of the last message.
    Committed(u64),
    /// None of it: some subject's last message is another.
    Conflict,
    /// None of it, for a reason that has nothing to do with what others wrote.
    Refused(String),
    /// Nobody answered in time: it may be stored, or be stored yet.
    Unknown(String),
}

/// How a message of a batch belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InBatch {
    pub id: String,
    pub commit: bool,
    /// A change ends with it, and others follow in the same batch.
    pub ends: bool,
}

pub fn in_batch(headers: &HeaderMap) -> Option<InBatch> {
    let id = headers.get(BATCH_ID)?.as_str().to_owned();
    Some(InBatch { id, commit: headers.get(BATCH_COMMIT).is_some(), ends: headers.get(CHANGE_END).is_some() })
}

/// What a leader's writes expect beside what they replace: that nobody has taken over since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    /// Written by each leader when it takes over.
    pub subject: &'static str,
    /// At which sequence this leader wrote it.
    pub sequence: u64,
    /// Where the message that carries the expectation goes: each other one of a batch expects something of its own subject.
    pub carrier: &'static str,
    pub term: u64,
}

#[derive(Clone)]
pub struct Log {
    client: Client,
    context: Context,
    stream: &'static str,
    described: &'static streams::Stream,
    fence: Option<Fence>,
}

impl Log {
    pub fn catalog(client: Client) -> Self {
        Self::new(client, &streams::CATALOG)
    }

    pub fn registry(client: Client) -> Self {
        Self::new(client, &streams::REGISTRY)
    }

    /// What is published; only its head is read here.
    pub fn topics(client: Client) -> Self {
        Self::new(client, &streams::TOPICS)
    }

    pub fn audit(client: Client) -> Self {
        Self::new(client, &streams::AUDIT)
    }

    fn new(client: Client, described: &'static streams::Stream) -> Self {
        let mut context = async_nats::jetstream::new(client.clone());
        context.set_timeout(READ_TIMEOUT);
        Self { client, context, stream: described.name, described, fence: None }
    }

    /// The log as the leader of a term writes it: nothing is stored once another has taken over.
    pub fn fenced(&self, fence: Fence) -> Self {
        Self { fence: Some(fence), ..self.clone() }
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.fence.is_some()
    }

    pub fn stream(&self) -> &'static str {
        self.stream
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn described(&self) -> &'static streams::Stream {
        self.described
    }

    pub(crate) fn no_answer(&self, reason: impl ToString) -> NoAnswer {
        NoAnswer { stream: self.stream, reason: reason.to_string() }
    }

    async fn handle(&self) -> Result<Stream<()>, NoAnswer> {
        self.context.get_stream_no_info(self.stream).await.map_err(|error| self.no_answer(error))
    }

    /// When the stream was made, by its servers' clock. Another time is another stream, whatever its sequences say.
    pub async fn made_at(&self) -> Result<SystemTime, NoAnswer> {
        let stream = self.context.get_stream(self.stream).await.map_err(|error| self.no_answer(error))?;
        Ok(SystemTime::from(stream.cached_info().created))
    }

    /// The last message of a subject, which may be a wildcard. From the stream's leader: never stale.
    pub async fn last(&self, subject: &str) -> Result<Option<Entry>, NoAnswer> {
        let found = self.handle().await?.get_last_raw_message_by_subject(subject).await;
        self.entry(found)
    }

    pub async fn at(&self, sequence: u64) -> Result<Option<Entry>, NoAnswer> {
        let found = self.handle().await?.get_raw_message(sequence).await;
        self.entry(found)
    }

    /// The first message of a subject at this sequence or after it.
    pub async fn next(&self, subject: &str, sequence: u64) -> Result<Option<Entry>, NoAnswer> {
        let found = self.handle().await?.get_first_raw_message_by_subject(subject, sequence.max(1)).await;
        self.entry(found)
    }

    /// The last message of a subject before this sequence. Any copy of the stream may answer.
    pub async fn last_before(&self, subject: &str, sequence: u64) -> Result<Option<Entry>, NoAnswer> {
        if sequence <= 1 {
            return Ok(None);
        }
        let body = serde_json::json!({ "multi_last": [subject], "up_to_seq": sequence - 1, "batch": 1 });
        let request = async_nats::Request::new().payload(body.to_string().into()).timeout(Some(REQUEST_TIMEOUT));
        let answer = self.client.send_request(subjects::js_api("DIRECT.GET", self.stream), request).await;
        let answer = answer.map_err(|error| self.no_answer(error))?;
        let headers = answer.headers.unwrap_or_default();
        let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
        match answer.status.map(|status| status.as_u16()) {
            None => {}
            Some(404) => return Ok(None),
            Some(status) => return Err(self.no_answer(format!("status {status}"))),
        }
        let sequence = header("Nats-Sequence").and_then(|text| text.parse().ok());
        let sequence = sequence.ok_or_else(|| self.no_answer("a message without its sequence"))?;
        let at = header("Nats-Time-Stamp").and_then(|text| humantime::parse_rfc3339(&text).ok());
        let (subject, at) = (header("Nats-Subject").unwrap_or_default(), at.unwrap_or(SystemTime::UNIX_EPOCH));
        Ok(Some(Entry { subject, sequence, headers, payload: answer.payload, at }))
    }

    fn entry(
        &self,
        found: Result<StreamMessage, async_nats::error::Error<LastRawMessageErrorKind>>,
    ) -> Result<Option<Entry>, NoAnswer> {
        match found {
            Ok(message) => Ok(Some(Entry {
                subject: message.subject.to_string(),
                sequence: message.sequence,
                headers: message.headers,
                payload: message.payload,
                at: message.time.into(),
            })),
            Err(error) => match error.kind() {
                LastRawMessageErrorKind::NoMessageFound => Ok(None),
                LastRawMessageErrorKind::JetStream(inner) if inner.error_code().0 == NO_MESSAGE_FOUND => Ok(None),
                _ => Err(self.no_answer(error)),
            },
        }
    }

    /// Messages in the order of the stream, from a policy on. They end when the consumer is silent: whoever goes on makes another.
    pub async fn follow(&self, filter: &str, deliver_policy: DeliverPolicy) -> Result<feed::Messages, NoAnswer> {
        self.deliver(filter, deliver_policy, false).await
    }

    async fn deliver(&self, filter: &str, deliver_policy: DeliverPolicy, headers_only: bool) -> Result<feed::Messages, NoAnswer> {
        let config = pull::Config { headers_only, ..feed::consumer(filter, deliver_policy) };
        let stream = self.handle().await?;
        // The servers may place it on one that is stopped or gone, and nobody says so: another is placed elsewhere, most often. What is not
        // used goes by itself.
        let place = async |number: u32| {
            tokio::time::sleep(PLACED_AFTER * number).await;
            stream.create_consumer(config.clone()).await
        };
        let mut placed: FuturesUnordered<_> = (0..PLACED_MAX).map(place).collect();
        let consumer = match placed.next().await {
            Some(first) => first.map_err(|error| self.no_answer(error))?,
            None => return Err(self.no_answer("no consumer was asked for")),
        };
        feed::pulled(&consumer).await.map_err(|error| self.no_answer(error))
    }

    /// Every subject of a filter that has a message, and the stream's last sequence before they were looked up.
    pub async fn names(&self, filter: &str) -> Result<(u64, Vec<String>), NoAnswer> {
        let found = self.handle().await?.info_with_subjects(filter).await.map_err(|error| self.no_answer(error))?;
        let last = found.info.state.last_sequence;
        let names: Vec<(String, usize)> = found.try_collect().await.map_err(|error| self.no_answer(error))?;
        Ok((last, names.into_iter().map(|(name, _)| name).collect()))
    }

    /// How many messages there are of a filter.
    pub async fn count(&self, filter: &str) -> Result<usize, NoAnswer> {
        let found = self.handle().await?.info_with_subjects(filter).await.map_err(|error| self.no_answer(error))?;
        let names: Vec<(String, usize)> = found.try_collect().await.map_err(|error| self.no_answer(error))?;
        Ok(names.into_iter().map(|(_, count)| count).sum())
    }

    /// The last message of every subject, in the order of the stream.
    pub async fn all(&self, filter: &str) -> Result<Vec<Entry>, NoAnswer> {
        let Some(last) = self.last(filter).await? else { return Ok(Vec::new()) };
        self.read(filter, DeliverPolicy::LastPerSubject, last.sequence).await
    }

    /// What is left of the messages of these sequences.
    pub async fn range(&self, filter: &str, first: u64, last: u64) -> Result<Vec<Entry>, NoAnswer> {
        let mut entries = self.read(filter, DeliverPolicy::ByStartSequence { start_sequence: first.max(1) }, last).await?;
        entries.retain(|entry| entry.sequence <= last);
        Ok(entries)
    }

    /// At most so many messages from this sequence on; with or without what they hold.
    pub async fn page(&self, filter: &str, first: u64, limit: usize, headers_only: bool) -> Result<Vec<Entry>, NoAnswer> {
        let end = self.last(filter).await?.map_or(0, |entry| entry.sequence);
        if end < first || limit == 0 {
            return Ok(Vec::new());
        }
        let policy = DeliverPolicy::ByStartSequence { start_sequence: first.max(1) };
        self.delivered(filter, policy, headers_only, end, limit).await
    }

    /// Hands on every message from this sequence on, without what it holds, one by one: a stream may have more than memory has room for.
    pub async fn walk(&self, filter: &str, first: u64, mut take: impl FnMut(Entry) + Send) -> Result<(), NoAnswer> {
        let end = self.last(filter).await?.map_or(0, |entry| entry.sequence);
        if end < first {
            return Ok(());
        }
        let policy = DeliverPolicy::ByStartSequence { start_sequence: first.max(1) };
        let all = |entry| {
            take(entry);
            true
        };
        self.each(filter, policy, true, end, all).await
    }

    async fn read(&self, filter: &str, policy: DeliverPolicy, through: u64) -> Result<Vec<Entry>, NoAnswer> {
        self.delivered(filter, policy, false, through, usize::MAX).await
    }

    async fn delivered(
        &self,
        filter: &str,
        policy: DeliverPolicy,
        headers_only: bool,
        through: u64,
        limit: usize,
    ) -> Result<Vec<Entry>, NoAnswer> {
        let mut entries = Vec::new();
        let push = |entry| {
            entries.push(entry);
            entries.len() < limit
        };
        self.each(filter, policy, headers_only, through, push).await?;
        Ok(entries)
    }

    /// Through a consumer, while `more` are wanted. That one was placed can be heard before one's own server has heard of it, which then says
    /// that nobody is there: another is placed, and the first goes by itself.
    async fn each(
        &self,
        filter: &str,
        policy: DeliverPolicy,
        headers_only: bool,
        through: u64,
        mut more: impl FnMut(Entry) -> bool + Send,
    ) -> Result<(), NoAnswer> {
        let (mut read, mut seen) = (1, 0u64);
        loop {
            // The next consumer begins where the first did.
            let unseen = |entry: Entry| {
                if entry.sequence <= seen {
                    return true;
                }
                seen = entry.sequence;
                more(entry)
            };
            let ended = match self.deliver(filter, policy, headers_only).await {
                Ok(messages) => self.take(messages, through, unseen).await,
                Err(error) => Err(error),
            };
            match ended {
                Err(error) if read < READS_MAX && error.reason.contains(NO_RESPONDERS) => {
                    tokio::time::sleep(READ_PAUSE * read).await;
                    read += 1;
                }
                ended => return ended,
            }
        }
    }

    async fn take(
        &self,
        mut messages: feed::Messages,
        through: u64,
        mut more: impl FnMut(Entry) -> bool + Send,
    ) -> Result<(), NoAnswer> {
        loop {
            let next = tokio::time::timeout(REQUEST_TIMEOUT, messages.next()).await;
            let feed::Delivered { entry, pending } = match next {
                Ok(Some(Ok(delivered))) => delivered,
                Ok(Some(Err(error))) => return Err(self.no_answer(error)),
                Ok(None) => return Err(self.no_answer("the consumer ended")),
                Err(_) => return Err(self.no_answer("no message in time")),
            };
            let sequence = entry.sequence;
            if !more(entry) || pending == 0 || sequence >= through {
                return Ok(());
            }
        }
    }

    /// Stores all messages or none: one as it is, several as one atomic batch.
    pub async fn write(&self, messages: &[Outgoing]) -> Outcome {
        let outcome = self.write_unless_undecided(messages).await;
        let (Some(fence), Outcome::Conflict) = (&self.fence, &outcome) else { return outcome };
        // The server does not say which expectation failed.
        match self.last(fence.subject).await {
            Ok(Some(entry)) if entry.sequence != fence.sequence => {
                Outcome::Refused(format!("another controller leads since term {}: this one writes nothing any more", fence.term))
            }
            _ => outcome,
        }
    }

    async fn write_unless_undecided(&self, messages: &[Outgoing]) -> Outcome {
        for _ in 0..UNDECIDED_ATTEMPTS_MAX {
            match tokio::time::timeout(REQUEST_TIMEOUT, self.try_write(messages)).await {
                Ok(Ok(Some(outcome))) => return outcome,
                Ok(Ok(None)) => tokio::time::sleep(UNDECIDED_PAUSE).await,
                Ok(Err(error)) => return Outcome::Unknown(error.to_string()),
                Err(_) => return Outcome::Unknown("no answer in time".to_owned()),
            }
        }
        Outcome::Refused("it collides with other writes again and again".to_owned())
    }

    /// `None`: it collided with a batch whose fate is open, and is not stored.
    async fn try_write(&self, messages: &[Outgoing]) -> Result<Option<Outcome>, async_nats::Error> {
        let id = format!("{:012x}", RandomState::new().build_hasher().finish() & 0xffff_ffff_ffff);
        let carrier = self.fence.map(|fence| {
            let mut headers = HeaderMap::new();
            headers.insert(EXPECTED_SUBJECT, fence.subject);
            let payload = fence.term.to_string().into_bytes();
            Outgoing { subject: fence.carrier.to_owned(), headers, expected: fence.sequence, payload }
        });
        let count = messages.len() + usize::from(carrier.is_some());
        for (index, message) in carrier.iter().chain(messages).enumerate() {
            let mut headers = message.headers.clone();
            // The server takes this expectation from the first message only, and the carrier goes before the others.
            if let (true, Some(after)) =
                (carrier.is_some(), messages.first().and_then(|first| first.headers.get(EXPECTED_STREAM_SEQUENCE)))
            {
                match index {
                    0 => headers.insert(EXPECTED_STREAM_SEQUENCE, after.clone()),
                    _ => headers = without(headers, EXPECTED_STREAM_SEQUENCE),
                }
            }
            headers.insert(EXPECTED, message.expected.to_string().as_str());
            if count > 1 {
                headers.insert(BATCH_ID, id.as_str());
                headers.insert(BATCH_SEQUENCE, (index + 1).to_string().as_str());
            }
            let (subject, payload) = (message.subject.clone(), Bytes::from(message.payload.clone()));
            if index + 1 < count {
                self.client.publish_with_headers(subject, headers, payload).await?;
                if index % PUBLISH_BURST == PUBLISH_BURST - 1 {
                    tokio::task::yield_now().await;
                }
                continue;
            }
            if count > 1 {
                headers.insert(BATCH_COMMIT, "1");
            }
            let request = async_nats::Request::new().headers(headers).payload(payload).timeout(Some(REQUEST_TIMEOUT));
            let answer = self.client.send_request(subject, request).await?;
            return Ok(outcome_of(&answer.payload));
        }
        Ok(Some(Outcome::Refused("nothing to write".to_owned())))
    }
}

/// A header map cannot forget a name.
fn without(headers: HeaderMap, name: &str) -> HeaderMap {
    let mut kept = HeaderMap::new();
    for (header, values) in headers.iter().filter(|(header, _)| AsRef::<str>::as_ref(*header) != name) {
        values.iter().for_each(|value| kept.append(header.clone(), value.clone()));
    }
    kept
}

fn outcome_of(payload: &[u8]) -> Option<Outcome> {
    let Ok(answer) = serde_json::from_slice::<serde_json::Value>(payload) else {
        return Some(Outcome::Unknown("the answer cannot be read".to_owned()));
    };
    let Some(error) = answer.get("error") else {
        return Some(match answer.get("seq").and_then(serde_json::Value::as_u64) {
            Some(sequence) => Outcome::Committed(sequence),
            None => Outcome::Unknown("the answer names no sequence".to_owned()),
        });
    };
    match error.get("err_code").and_then(serde_json::Value::as_u64) {
        Some(WRONG_LAST_SEQUENCE) => Some(Outcome::Conflict),
        Some(WRONG_LAST_SEQUENCE_UNDECIDED) => None,
        _ => Some(Outcome::Refused(groupcast_bus_config::alive::refusal(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_answers_are_understood() {
        let rows = [
            (r#"{"stream":"CATALOG","seq":12,"batch":"x","count":3}"#, Some(Outcome::Committed(12))),
            (r#"{"error":{"err_code":10071,"description":"wrong last sequence: 7"}}"#, Some(Outcome::Conflict)),
            (r#"{"error":{"err_code":10164,"description":"wrong last sequence"}}"#, None),
            (r#"{"error":{"err_code":10054,"description":"too long"}}"#, Some(Outcome::Refused("too long".to_owned()))),
        ];
        for (answer, outcome) in rows {
            assert_eq!(outcome_of(answer.as_bytes()), outcome, "{answer}");
        }
        for strange in ["", "{}", "nonsense", r#"{"seq":"x"}"#] {
            assert!(matches!(outcome_of(strange.as_bytes()), Some(Outcome::Unknown(_))), "{strange}");
        }
    }
}
