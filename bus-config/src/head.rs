//! What the leader of a stream says of it: which stream it is, where it ends, and whether a majority of its copies still follows.
//!
//! A server that lost its peers goes on answering as the leader it was, for up to ten seconds, and refuses or accepts nothing. Only the ages
//! of its followers' last words tell.

use std::time::Duration;

use async_nats::{Client, Request};
use serde_json::Value;

use crate::streams::Stream;
use crate::subjects;

/// A copy that its leader has not heard for longer counts as lost. Leaders and copies exchange a word each second.
pub const COPY_SILENT_MAX: Duration = Duration::from_secs(3);
/// "JetStream system temporarily unavailable": the servers know the stream, and it has no leader.
const UNAVAILABLE: u64 = 10_008;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("stream {stream} has no leader that this server reaches")]
    NoLeader { stream: &'static str },
    #[error("the leader of stream {stream} has not heard most of its copies for {} s", silent.as_secs())]
    NoMajority { stream: &'static str, silent: Duration },
    #[error("stream {stream}: {reason}")]
    Refused { stream: &'static str, reason: String },
}

impl Error {
    /// The stream has a leader, or nobody needs one: another server would say the same.
    pub fn is_led(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// Where a stream stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// When the stream was made, as its servers write it. Another time is another stream, whatever its sequences say.
    pub made_at: String,
    /// The sequence of the last message that was ever stored, also if it is gone.
    pub last_sequence: u64,
}

/// Asks the stream's leader.
pub async fn look(client: &Client, stream: &'static Stream, within: Duration) -> Result<Head, Error> {
    let request = Request::new().payload("".into()).timeout(Some(within));
    // The client's own time-out begins when the request is handed over, which a full connection can delay.
    let asked = tokio::time::timeout(within, client.send_request(subjects::js_api("STREAM.INFO", stream.name), request)).await;
    let answer = asked.ok().and_then(Result::ok).and_then(|answer| serde_json::from_slice(&answer.payload).ok());
    judge(stream.name, answer.as_ref())
}

fn judge(stream: &'static str, answer: Option<&Value>) -> Result<Head, Error> {
    let Some(answer) = answer else { return Err(Error::NoLeader { stream }) };
    if answer["error"].is_object() {
        return Err(match answer["error"]["err_code"].as_u64() {
            Some(UNAVAILABLE) => Error::NoLeader { stream },
            _ => {
                Error::Refused { stream, reason: answer["error"]["description"].as_str().unwrap_or("no reason given").to_owned() }
            }
        });
    }
    let copies = answer["config"]["num_replicas"].as_u64().unwrap_or(1);
    if copies > 1 {
        if answer["cluster"]["leader"].as_str().unwrap_or_default().is_empty() {
            return Err(Error::NoLeader { stream });
        }
        let followers = answer["cluster"]["replicas"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut silences: Vec<u64> = followers.iter().map(|copy| copy["active"].as_u64().unwrap_or(u64::MAX)).collect();
        silences.sort_unstable();
        // Half of the copies, rounded down, make a majority together with the leader.
        let needed = usize::try_from(copies / 2).unwrap_or(usize::MAX);
        let silent = needed.checked_sub(1).and_then(|last| silences.get(last)).copied().unwrap_or(u64::MAX);
        let silent = Duration::from_nanos(silent);
        if silent > COPY_SILENT_MAX {
            return Err(Error::NoMajority { stream, silent });
        }
    }
    let (made_at, last) = (answer["created"].as_str(), answer["state"]["last_seq"].as_u64());
    match (made_at, last) {
        (Some(made_at), Some(last_sequence)) => Ok(Head { made_at: made_at.to_owned(), last_sequence }),
        _ => Err(Error::Refused { stream, reason: "the answer does not say when it was made and where it ends".to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answer(copies: u64, leader: &str, silent_ms: &[u64]) -> Value {
        let replicas: Vec<Value> = silent_ms.iter().map(|ms| json!({ "name": "n", "active": ms * 1_000_000 })).collect();
        json!({
            "config": { "num_replicas": copies },
            "created": "2026-11-18T07:00:00Z",
            "state": { "last_seq": 7 },
            "cluster": { "leader": leader, "replicas": replicas },
        })
    }

    #[test]
    fn a_stream_is_led_while_a_majority_of_its_copies_was_heard() {
        let most = COPY_SILENT_MAX.as_millis() as u64;
        let rows: [(Value, bool); 8] = [
            (answer(1, "", &[]), true),
            (answer(3, "n1", &[100, 200]), true),
            (answer(3, "n1", &[most, 90_000]), true),
            (answer(3, "n1", &[most + 1, 90_000]), false),
            (answer(3, "n1", &[]), false),
            (answer(3, "", &[100, 200]), false),
            (answer(5, "n1", &[100, most, 90_000, 90_000]), true),
            (answer(5, "n1", &[100, most + 1, 90_000, 90_000]), false),
        ];
        for (answer, led) in rows {
            assert_eq!(judge("S", Some(&answer)).is_ok(), led, "{answer}");
        }
        assert_eq!(judge("S", None), Err(Error::NoLeader { stream: "S" }));
        let error = |code: u64| json!({ "error": { "err_code": code, "description": "x" } });
        assert!(!judge("S", Some(&error(UNAVAILABLE))).unwrap_err().is_led());
        assert!(judge("S", Some(&error(10_059))).unwrap_err().is_led(), "a stream that is not there has somebody who says so");
        assert!(judge("S", Some(&json!({}))).unwrap_err().is_led());
    }
}
