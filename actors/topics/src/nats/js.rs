//! The few JetStream requests a controller needs, with the server's answers in the machine's words.

use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::stream::{LastRawMessageErrorKind, Stream};
use async_nats::jetstream::{Context, message::PublishMessage};
use async_nats::{Client, HeaderMap};
use futures::StreamExt;
use groupcast_bus_config::{streams, subjects};

use crate::node::{Fate, Head, Publish, Records};
use crate::term::{BadTerm, Reserved};

/// What a leader's batch is refused with when another lead message came first.
const WRONG_LAST_SEQUENCE: u64 = 10_071;
/// What it is refused with while another batch that touches the same subject is undecided.
const WRONG_LAST_SEQUENCE_UNDECIDED: u64 = 10_164;

/// A batch is sent in pieces of this many messages, so that the connection task gets to write.
const PUBLISH_BURST: usize = 512;

#[derive(Clone)]
pub(super) struct Js {
    pub client: Client,
    context: Context,
    timeout: Duration,
    replicas: usize,
}

impl Js {
    pub fn new(client: Client, timeout: Duration, replicas: usize) -> Self {
        let mut context = async_nats::jetstream::new(client.clone());
        context.set_timeout(timeout);
        Self { client, context, timeout, replicas }
    }

    /// Publishes a batch. `attempt` makes the header's batch id new: the server would take a repetition for more of the first one.
    pub async fn publish(&self, publish: Publish, attempt: u64) -> Fate {
        match tokio::time::timeout(self.timeout, self.try_publish(publish, attempt)).await {
            Ok(Ok(fate)) => fate,
            Ok(Err(error)) => {
                tracing::debug!(%error, "publishing a batch failed");
                Fate::Unknown
            }
            Err(_) => Fate::Unknown,
        }
    }

    async fn try_publish(&self, publish: Publish, attempt: u64) -> Result<Fate, async_nats::Error> {
        let count = publish.messages.len() + 1;
        let id = short(publish.batch ^ attempt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let batched = |index: usize| {
            let mut headers = HeaderMap::new();
            if count > 1 {
                headers.insert("Nats-Batch-Id", id.as_str());
                headers.insert("Nats-Batch-Sequence", (index + 1).to_string().as_str());
            }
            if count > 1 && index + 1 == count {
                headers.insert("Nats-Batch-Commit", "1");
            }
            headers
        };
        let mut lead_headers = batched(0);
        lead_headers.insert("Nats-Expected-Last-Subject-Sequence", publish.expected.to_string().as_str());
        let mut last = (subjects::LEAD_WRITE.to_owned(), lead_headers, publish.lead);
        for (index, (topic, payload)) in publish.messages.into_iter().enumerate() {
            let (subject, headers, body) = std::mem::replace(&mut last, (subjects::write(&topic), batched(index + 1), payload));
            self.client.publish_with_headers(subject, headers, body.into()).await?;
            if index % PUBLISH_BURST == PUBLISH_BURST - 1 {
                tokio::task::yield_now().await;
            }
        }
        let (subject, headers, body) = last;
        let request = async_nats::Request::new().headers(headers).payload(body.into()).timeout(Some(self.timeout));
        let response = self.client.send_request(subject, request).await?;
        Ok(fate_of(&response.payload, count as u64))
    }

    async fn topics(&self) -> Result<Stream<()>, async_nats::Error> {
        Ok(self.context.get_stream_no_info(streams::TOPICS.name).await?)
    }

    /// From the stream leader: never stale. A stream that is gone is created again, empty.
    pub async fn read_head(&self) -> Option<Head> {
        let stream = self.topics().await.ok()?;
        match stream.get_last_raw_message_by_subject(subjects::LEAD_WRITE).await {
            Ok(message) => Some(Some((message.sequence, message.payload.to_vec()))),
            Err(error) => match error.kind() {
                LastRawMessageErrorKind::NoMessageFound => Some(None),
                LastRawMessageErrorKind::JetStream(error) if error.error_code().0 == 10_059 => {
                    tracing::warn!("stream TOPICS does not exist: creating it");
                    if let Err(error) = streams::ensure_one(&self.client, &streams::TOPICS, self.replicas).await {
                        tracing::error!(%error, "cannot create stream TOPICS");
                    }
                    None
                }
                _ => None,
            },
        }
    }

    /// Clears the stream up to this sequence, and has it go on there.
    pub async fn begin_life(&self, first: u64) -> bool {
        match streams::begin_topics(&self.client, first).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "cannot begin a new life of stream TOPICS");
                false
            }
        }
    }

    /// Has the servers elect another leader for the stream.
    pub async fn step_down(&self) {
        tracing::warn!("stream TOPICS takes no batch: asking the servers for another leader of it");
        if let Err(error) = streams::move_topics_leader(&self.client).await {
            tracing::warn!(%error, "stream TOPICS keeps its leader");
        }
    }

    /// What anybody reserved, and the sequence it stands at; zeros when nobody did. `None` when the bus does not answer.
    async fn stored_term(&self) -> Option<(Result<Reserved, BadTerm>, u64)> {
        let stream = self.context.get_stream_no_info(streams::CATALOG.name).await.ok()?;
        match stream.get_last_raw_message_by_subject(subjects::CATALOG_TERM).await {
            Ok(message) => Some((Reserved::decode(&message.payload), message.sequence)),
            Err(error) if matches!(error.kind(), LastRawMessageErrorKind::NoMessageFound) => Some((Ok(Reserved::default()), 0)),
            Err(_) => None,
        }
    }

    pub async fn read_term(&self) -> Option<u64> {
        Some(self.stored_term().await?.0.ok()?.term())
    }

    /// Stores a term higher than any before; `None` when another controller was faster or the bus does not answer.
    pub async fn reserve_term(&self, at_least: u64, new_life: bool) -> Result<Option<Reserved>, BadTerm> {
        let Some((stored, sequence)) = self.stored_term().await else { return Ok(None) };
        let reserved = stored?.next(at_least, new_life)?;
        let publish = PublishMessage::build().payload(reserved.encode().into()).expected_last_subject_sequence(sequence);
        let stored = match self.context.send_publish(subjects::CATALOG_TERM, publish).await {
            Ok(sent) => sent.await.is_ok(),
            Err(_) => false,
        };
        Ok(stored.then_some(reserved))
    }

    /// The last message of every subject.
    pub async fn read_records(&self) -> Option<Records> {
        let stream = self.topics().await.ok()?;
        let config = pull::OrderedConfig {
            deliver_policy: DeliverPolicy::LastPerSubject,
            filter_subject: subjects::WRITE_ALL.to_owned(),
            ..Default::default()
        };
        let consumer = stream.create_consumer(config).await.ok()?;
        let mut messages = consumer.messages().await.ok()?;
        let mut records = Records::default();
        // The lead message is always there, so there is at least one.
        loop {
            let message = tokio::time::timeout(self.timeout, messages.next()).await.ok()??.ok()?;
            let info = message.info().ok()?;
            let (sequence, pending) = (info.stream_sequence, info.pending);
            if message.subject.as_str() == subjects::LEAD_WRITE {
                records.head = Some((sequence, message.payload.to_vec()));
            } else if let Some(topic) = subjects::parse_write(&message.subject) {
                records.topics.push((topic, sequence, message.payload.to_vec()));
            }
            if pending == 0 {
                return Some(records);
            }
        }
    }
}

fn fate_of(payload: &[u8], count: u64) -> Fate {
    let Ok(answer) = serde_json::from_slice::<serde_json::Value>(payload) else { return Fate::Unknown };
    if let Some(error) = answer.get("error") {
        return match error.get("err_code").and_then(serde_json::Value::as_u64) {
            Some(WRONG_LAST_SEQUENCE) => Fate::Refused,
            Some(WRONG_LAST_SEQUENCE_UNDECIDED) => Fate::Undecided,
            _ => {
                tracing::debug!(%error, "the server did not take a batch");
                Fate::Unknown
            }
        };
    }
    let number = |key: &str| answer.get(key).and_then(serde_json::Value::as_u64);
    match number("seq") {
        Some(last) => Fate::Committed { last, count: if count == 1 { 1 } else { number("count").unwrap_or(0) } },
        None => Fate::Unknown,
    }
}

/// Few characters, because the batch headers travel on every delta to every host.
fn short(number: u64) -> String {
    const DIGITS: &[u8; 32] = b"0123456789abcdefghijklmnopqrstuv";
    (0..7).map(|i| char::from(DIGITS[(number >> (5 * i)) as usize & 31])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_answers_are_understood() {
        for (answer, fate) in [
            (r#"{"stream":"TOPICS","seq":12,"batch":"x","count":3}"#, Fate::Committed { last: 12, count: 3 }),
            (r#"{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"}}"#, Fate::Refused),
            (r#"{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}"#, Fate::Undecided),
            (r#"{"error":{"code":503,"err_code":10008,"description":"unavailable"}}"#, Fate::Unknown),
            ("{}", Fate::Unknown),
            ("nonsense", Fate::Unknown),
        ] {
            assert_eq!(fate_of(answer.as_bytes(), 3), fate, "{answer}");
        }
    }

    #[test]
    fn batch_ids_are_short() {
        assert_eq!(short(u64::MAX).len(), 7);
        assert_ne!(short(1), short(2));
    }
}
