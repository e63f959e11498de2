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
use futures::StreamExt;
use groupcast_bus_config::streams;

/// How long one request may take.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Attempts to write what collides with a batch whose fate is open.
pub const UNDECIDED_ATTEMPTS_MAX: u32 = 50;
/// Pause between them.
const UNDECIDED_PAUSE: Duration = Duration::from_millis(5);
/// A batch is sent in pieces of this many messages, so that the connection gets to write.
const PUBLISH_BURST: usize = 512;

const WRONG_LAST_SEQUENCE: u64 = 10_071;
const WRONG_LAST_SEQUENCE_UNDECIDED: u64 = 10_164;
const NO_MESSAGE_FOUND: u64 = 10_037;

const BATCH_ID: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";
const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
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
}

pub fn in_batch(headers: &HeaderMap) -> Option<InBatch> {
    let id = headers.get(BATCH_ID)?.as_str().to_owned();
    Some(InBatch { id, commit: headers.get(BATCH_COMMIT).is_some() })
}

#[derive(Clone)]
pub struct Log {
    client: Client,
    context: Context,
    stream: &'static str,
}

impl Log {
    pub fn catalog(client: Client) -> Self {
        Self::new(client, streams::CATALOG.name)
    }

    pub fn registry(client: Client) -> Self {
        Self::new(client, streams::REGISTRY.name)
    }

    fn new(client: Client, stream: &'static str) -> Self {
        let mut context = async_nats::jetstream::new(client.clone());
        context.set_timeout(REQUEST_TIMEOUT);
        Self { client, context, stream }
    }

    pub fn stream(&self) -> &'static str {
        self.stream
    }

    fn no_answer(&self, reason: impl ToString) -> NoAnswer {
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

    /// Messages in the order of the stream, from a policy on, for as long as the stream lasts.
    pub async fn follow(&self, filter: &str, deliver_policy: DeliverPolicy) -> Result<pull::Ordered, NoAnswer> {
        let config = pull::OrderedConfig { deliver_policy, filter_subject: filter.to_owned(), ..Default::default() };
        let consumer = self.handle().await?.create_consumer(config).await.map_err(|error| self.no_answer(error))?;
        consumer.messages().await.map_err(|error| self.no_answer(error))
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

    async fn read(&self, filter: &str, policy: DeliverPolicy, through: u64) -> Result<Vec<Entry>, NoAnswer> {
        let mut messages = self.follow(filter, policy).await?;
        let mut entries = Vec::new();
        loop {
            let next = tokio::time::timeout(REQUEST_TIMEOUT, messages.next()).await;
            let message = match next {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(error))) => return Err(self.no_answer(error)),
                Ok(None) => return Err(self.no_answer("the consumer ended")),
                Err(_) => return Err(self.no_answer("no message in time")),
            };
            let info = message.info().map_err(|error| self.no_answer(error))?;
            let (sequence, pending, at) = (info.stream_sequence, info.pending, info.published.into());
            let message = message.message;
            entries.push(Entry {
                subject: message.subject.to_string(),
                sequence,
                headers: message.headers.unwrap_or_default(),
                payload: message.payload,
                at,
            });
            if pending == 0 || sequence >= through {
                return Ok(entries);
            }
        }
    }

    /// Stores all messages or none: one as it is, several as one atomic batch.
    pub async fn write(&self, messages: &[Outgoing]) -> Outcome {
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
        let count = messages.len();
        for (index, message) in messages.iter().enumerate() {
            let mut headers = message.headers.clone();
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
        _ => Some(Outcome::Refused(error.get("description").and_then(|d| d.as_str()).unwrap_or("no reason given").to_owned())),
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
