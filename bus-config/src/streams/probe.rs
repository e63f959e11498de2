//! Measures the server's limit on the messages of one atomic batch.
//!
//! Neither account information nor stream information tells it, and the server's own monitoring belongs to the system account,
//! which no groupcast process has. So a batch of the needed size is sent to TOPICS and abandoned: the server stages it, never
//! stores it, and drops it at once when its sequence is continued with a gap.

use async_nats::{Client, HeaderMap};
use serde_json::Value;

use super::{Error, REQUEST_DEADLINE, code};
use crate::subjects::PROBE_WRITE;

/// Most messages of one change. The server's default is a twentieth of it.
pub const BATCH_MESSAGES_MAX: u64 = 20_000;

/// JetStream's codes for a batch that is too large, and for one whose sequence has a gap or that is unknown.
const BATCH_TOO_LARGE: u64 = 10199;

fn headers(id: &str, sequence: u64) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Batch-Id", id);
    headers.insert("Nats-Batch-Sequence", sequence.to_string());
    headers
}

async fn ask(client: &Client, id: &str, sequence: u64) -> Result<Value, Error> {
    let request = client.request_with_headers(PROBE_WRITE, headers(id, sequence), "".into());
    let no_answer = || Error::NoAnswer { subject: PROBE_WRITE.to_owned() };
    let message = tokio::time::timeout(REQUEST_DEADLINE, request).await.map_err(|_| no_answer())?.map_err(|_| no_answer())?;
    // A message in the middle of a batch is acknowledged with nothing.
    if message.payload.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&message.payload)
        .map_err(|error| Error::BadAnswer { subject: PROBE_WRITE.to_owned(), reason: error.to_string() })
}

/// Fails unless one batch may hold `needed` messages. TOPICS must exist; it is left unchanged.
pub async fn batch_limit_at_least(client: &Client, needed: u64) -> Result<(), Error> {
    let version = client.server_info().version;
    // Unique among the probes of controllers that start at the same time.
    let id = client.new_inbox();
    let id = &id[id.len().saturating_sub(22)..];
    for sequence in 1..needed {
        let publish = client.publish_with_headers(PROBE_WRITE, headers(id, sequence), "".into());
        publish.await.map_err(|error| Error::Send(error.to_string()))?;
    }
    let answer = ask(client, id, needed).await?;
    let failed = match code(&answer) {
        None => None,
        Some(BATCH_TOO_LARGE) => {
            let found = limit_named_in(&answer).unwrap_or(0);
            return Err(Error::BatchLimit { version, found, needed });
        }
        Some(code) => Some(code),
    };
    // The gap makes the server forget the batch now instead of at its timeout; an error is the expected answer.
    let gap = ask(client, id, needed + 2).await?;
    match failed.or(if code(&gap).is_none() { Some(0) } else { None }) {
        None => Ok(()),
        Some(code) => {
            let description = answer["error"]["description"].as_str().unwrap_or("unexpected answer").to_owned();
            Err(Error::BatchProbe { version, code, description })
        }
    }
}

/// The limit as the refusal names it.
fn limit_named_in(answer: &Value) -> Option<u64> {
    let description = answer["error"]["description"].as_str()?;
    description.split(|c: char| !c.is_ascii_digit()).find_map(|digits| digits.parse().ok())
}
