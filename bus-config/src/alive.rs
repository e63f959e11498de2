//! Whether the bus does its work, by having it do some: a connection that stands says nothing about a server that does not answer.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, Request};
use serde_json::Value;

use crate::connect::Event;
use crate::streams::{CATALOG, Stream};
use crate::subjects::{self, CatalogKind};

/// The document that is never written.
const NOBODY: &str = "readiness-probe";
/// A sequence that no message has: what expects it is refused by whoever could have stored it.
const NEVER: u64 = i64::MAX as u64;
const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
const BATCH_ID: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";
const WRONG_LAST_SEQUENCE: u64 = 10_071;
/// A batch whose fate is open is in the way.
const WRONG_LAST_SEQUENCE_UNDECIDED: u64 = 10_164;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the bus did not answer within {} ms: is it up, has {} a leader, and is the own name the credential's?", within.as_millis(), CATALOG.name)]
    Silent { within: Duration },
    #[error(
        "the bus does not take the credential ({reason}): it is revoked or expired. Put another in its place: the file is read again with \
             each attempt"
    )]
    NotTaken { reason: String },
    #[error("the bus refuses writes to {}: {reason}", CATALOG.name)]
    Refused { reason: String },
    #[error("stream {stream} does not exist")]
    Missing { stream: &'static str },
    #[error("the bus answers what cannot be read: {reason}")]
    Strange { reason: String },
}

/// Whether the bus lets a client in, by what its connection has said last. A client that is not let in hears nothing else: without this, a bus
/// that refuses a credential looks like one that is down.
#[derive(Debug, Clone, Default)]
pub struct Login(Arc<Mutex<Option<String>>>);

impl Login {
    pub fn heard(&self, event: &Event) {
        let refused = match event {
            Event::Denied(reason) => Some(reason.clone()),
            // It got in, or fails for another reason.
            Event::Connected | Event::Trouble(_) => None,
            Event::Disconnected | Event::SlowConsumer | Event::LeavingServer | Event::Closed | Event::Missed => return,
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = refused;
    }

    /// Why the bus does not let the client in. What is denied to one that is in is another matter.
    pub fn refused(&self, client: &Client) -> Option<Error> {
        let reason = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        reason.filter(|_| client.connection_state() != State::Connected).map(|reason| Error::NotTaken { reason })
    }

    /// The same as [`takes_writes`], and at once, with the reason, for a client that is not let in.
    pub async fn takes_writes(&self, client: &Client, within: Duration) -> Result<Duration, Error> {
        match self.refused(client) {
            Some(refused) => Err(refused),
            None => takes_writes(client, within).await,
        }
    }
}

async fn ask(client: &Client, subject: String, request: Request, within: Duration) -> Result<Value, Error> {
    let silent = || Error::Silent { within };
    // The client's own time-out begins when the request is handed over, which a full connection can delay.
    let answer = tokio::time::timeout(within, client.send_request(subject, request.timeout(Some(within))));
    let answer = answer.await.map_err(|_| silent())?.map_err(|_| silent())?;
    serde_json::from_slice(&answer.payload).map_err(|error| Error::Strange { reason: error.to_string() })
}

/// What the server answers when it cannot keep the messages of a batch until all are there. It does not say why.
const BATCH_INCOMPLETE: u64 = 10_176;

/// Why the server has stored nothing, for people.
pub fn refusal(error: &Value) -> String {
    let words = error["description"].as_str().unwrap_or("no reason given");
    match error["err_code"].as_u64() {
        Some(BATCH_INCOMPLETE) => format!("{words}: is the disk of the server full, or can it not be written?"),
        _ => words.to_owned(),
    }
}

/// Has CATALOG's leader judge a write that it must refuse, so that nothing is stored; how long it took. It is a batch, of which the server
/// writes the messages to its disk before it judges them: a single message it would judge, and even take, with a disk that is full.
pub async fn takes_writes(client: &Client, within: Duration) -> Result<Duration, Error> {
    let begun = Instant::now();
    let subject = subjects::catalog(CatalogKind::Change, NOBODY).map_err(|error| Error::Strange { reason: error.to_string() })?;
    let mut headers = HeaderMap::new();
    headers.insert(EXPECTED, NEVER.to_string());
    headers.insert(BATCH_ID, format!("{NOBODY}-{:016x}", RandomState::new().build_hasher().finish()));
    headers.insert(BATCH_SEQUENCE, "1");
    headers.insert(BATCH_COMMIT, "1");
    let answer = ask(client, subject, Request::new().headers(headers).payload("".into()), within).await?;
    match answer["error"]["err_code"].as_u64() {
        Some(WRONG_LAST_SEQUENCE | WRONG_LAST_SEQUENCE_UNDECIDED) => Ok(begun.elapsed()),
        Some(_) => Err(Error::Refused { reason: refusal(&answer["error"]) }),
        None => Err(Error::Strange { reason: format!("a write that expects sequence {NEVER} was taken") }),
    }
}

/// What the bus says about one of its streams, and what time it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looked {
    pub replicas: u64,
    /// On the other servers, as the stream's leader sees them; none on a single server.
    pub copies: Vec<Copy>,
    /// The clock of the server that answered; servers before 2.10 do not say.
    pub at: Option<SystemTime>,
}

/// One copy of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    pub server: String,
    /// It has what the leader has.
    pub current: bool,
    /// Nothing is heard of it.
    pub offline: bool,
    /// Messages that it lacks.
    pub lag: u64,
}

impl Copy {
    fn of(replica: &Value) -> Self {
        let is = |name: &str| replica[name].as_bool().unwrap_or(false);
        let server = replica["name"].as_str().unwrap_or("unknown").to_owned();
        Self { server, current: is("current"), offline: is("offline"), lag: replica["lag"].as_u64().unwrap_or(0) }
    }

    pub fn is_good(&self) -> bool {
        self.current && !self.offline
    }
}

/// JetStream's code for "no such stream".
const STREAM_NOT_FOUND: u64 = 10_059;

pub async fn look(client: &Client, stream: &Stream, within: Duration) -> Result<Looked, Error> {
    let answer = ask(client, subjects::js_api("STREAM.INFO", stream.name), Request::new().payload("".into()), within).await?;
    if answer["error"]["err_code"].as_u64() == Some(STREAM_NOT_FOUND) {
        return Err(Error::Missing { stream: stream.name });
    }
    if answer["error"].is_object() {
        return Err(Error::Refused { reason: refusal(&answer["error"]) });
    }
    let at = answer["ts"].as_str().and_then(|text| humantime::parse_rfc3339(text).ok());
    let copies = answer["cluster"]["replicas"].as_array().map(Vec::as_slice).unwrap_or_default().iter().map(Copy::of).collect();
    Ok(Looked { replicas: answer["config"]["num_replicas"].as_u64().unwrap_or(1), copies, at })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gateway whose credential was revoked asked whether the bus is up.
    #[test]
    fn the_last_word_about_a_login_counts() {
        let denied = || Event::Denied("authorization violation".into());
        for (events, refused) in [
            (vec![], false),
            (vec![denied()], true),
            (vec![denied(), Event::Disconnected, Event::Missed], true),
            (vec![denied(), Event::Connected], false),
            (vec![denied(), Event::Trouble("connection refused".into())], false),
            (vec![Event::Connected, Event::Disconnected, denied()], true),
        ] {
            let login = Login::default();
            events.iter().for_each(|event| login.heard(event));
            assert_eq!(login.0.lock().unwrap().is_some(), refused, "{events:?}");
        }
    }

    #[test]
    fn a_refusal_says_where_to_look() {
        let full = serde_json::json!({ "err_code": BATCH_INCOMPLETE, "description": "atomic publish batch is incomplete" });
        assert!(refusal(&full).contains("disk"));
        let other = serde_json::json!({ "err_code": 10_047, "description": "insufficient resources" });
        assert_eq!((refusal(&other).as_str(), refusal(&Value::Null).as_str()), ("insufficient resources", "no reason given"));
    }
}
