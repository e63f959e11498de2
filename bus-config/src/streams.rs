//! The four streams as data. [`ensure`] creates or updates them and then compares what the server says it stored with what was
//! asked: servers drop settings they do not know without a word, and a bus without atomic batches or republish must not be used.

use std::time::Duration;

use async_nats::Client;
use serde_json::{Value, json};

use crate::subjects;

mod check;
mod probe;

pub use check::{SERVER_VERSION_MIN, dropped_setting, parse_version, version_supported};
pub use probe::{BATCH_MESSAGES_MAX, batch_limit_at_least};

/// Versions kept of one CATALOG document. AUDIT copies them from here, and its copying stops for seconds when a server dies: a version
/// that was pushed out meanwhile would be lost, so this is more than anybody writes of one document in that time. Undo reaches as far.
pub const CATALOG_HISTORY: i64 = 1_000;
/// How long AUDIT keeps what happened.
pub const AUDIT_AGE: Duration = Duration::from_secs(90 * 24 * 3600);
/// Entries that AUDIT keeps of one document or registration: who flaps pushes out its own past and nobody else's.
pub const AUDIT_PER_SUBJECT: i64 = 10_000;
/// Bytes of AUDIT on disk, after which the oldest entries go. The server sets them aside when the stream is made.
pub const AUDIT_BYTES_MAX: i64 = 1 << 30;
/// How long one request of [`ensure`] may take; a cluster that is electing leaders answers late.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("nats-server {found} is too old: groupcast needs {}.{}.{} or newer", SERVER_VERSION_MIN.0, SERVER_VERSION_MIN.1, SERVER_VERSION_MIN.2)]
    ServerTooOld { found: String },
    #[error(
        "nats-server {version} did not store setting {setting} of stream {stream}: asked for {asked}, it holds {stored}; use a server \
         that supports it, or remove what overrides it"
    )]
    SettingDropped { version: String, stream: &'static str, setting: String, asked: String, stored: String },
    #[error("nats-server {version} refused stream {stream}: {description} (code {code})")]
    Refused { version: String, stream: &'static str, code: u64, description: String },
    #[error(
        "nats-server {version} allows batches of {found} messages, groupcast needs {needed}: set `jetstream {{ limits {{ batch {{ max_msgs: \
         {needed} }} }} }}` on every server"
    )]
    BatchLimit { version: String, found: u64, needed: u64 },
    #[error("measuring the batch limit of nats-server {version} failed: {description} (code {code}); try again")]
    BatchProbe { version: String, code: u64, description: String },
    #[error("no answer to {subject} within {} s: is JetStream enabled for this account and is a leader elected?", REQUEST_DEADLINE.as_secs())]
    NoAnswer { subject: String },
    #[error("the server's answer to {subject} cannot be read: {reason}")]
    BadAnswer { subject: String, reason: String },
    #[error("sending to the bus failed: {0}")]
    Send(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    File,
    Memory,
}

/// One stream. What is not a field here is the server's default and nothing depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    pub name: &'static str,
    pub subjects: &'static [&'static str],
    pub storage: Storage,
    /// Messages kept per subject; -1 for all of them.
    pub per_subject: i64,
    pub age_max: Option<Duration>,
    /// Bytes of all messages, after which the oldest go; -1 for no limit.
    pub bytes_max: i64,
    pub republish: Option<(&'static str, &'static str)>,
    pub atomic: bool,
    /// Lets a tombstone vanish by itself: only a message that carries a TTL header is concerned.
    pub message_ttl: bool,
    pub sources: &'static [&'static str],
    /// Nothing can be deleted or purged, not even by an administrator of the account.
    pub append_only: bool,
}

pub const CATALOG: Stream = Stream {
    name: "CATALOG",
    subjects: &[subjects::CATALOG_ALL],
    storage: Storage::File,
    per_subject: CATALOG_HISTORY,
    // Ageing out a subject's last message would reset its compare-and-swap base.
    age_max: None,
    bytes_max: -1,
    republish: None,
    atomic: true,
    message_ttl: true,
    sources: &[],
    append_only: false,
};

pub const REGISTRY: Stream = Stream { name: "REGISTRY", subjects: &[subjects::REGISTRY_ALL], per_subject: 1, ..CATALOG };

/// In memory, because everything in it is derived: lost, it is rebuilt under a higher term.
pub const TOPICS: Stream = Stream {
    name: "TOPICS",
    subjects: &[subjects::WRITE_ALL],
    storage: Storage::Memory,
    per_subject: 1,
    republish: Some((subjects::WRITE_ALL, subjects::READ_ALL)),
    message_ttl: false,
    ..CATALOG
};

/// Follows the two others a moment later, and some seconds later after a server died. So it can miss a version that was replaced
/// meanwhile: of a CATALOG document only when [`CATALOG_HISTORY`] newer ones came first, which controllers and `doctor` notice and name;
/// of REGISTRY, which keeps one version of each entry, also without that. Its own subjects are for what an import brings back.
pub const AUDIT: Stream = Stream {
    name: "AUDIT",
    subjects: &[subjects::AUDITED_ALL],
    storage: Storage::File,
    per_subject: AUDIT_PER_SUBJECT,
    age_max: Some(AUDIT_AGE),
    bytes_max: AUDIT_BYTES_MAX,
    republish: None,
    atomic: false,
    message_ttl: false,
    sources: &["CATALOG", "REGISTRY"],
    append_only: true,
};

/// In the order in which they are made: what is sourced comes first.
pub const ALL: [Stream; 4] = [CATALOG, REGISTRY, TOPICS, AUDIT];

impl Stream {
    /// The configuration as JetStream's API takes it.
    ///
    /// Raw JSON instead of the client library's type, because the comparison afterwards must see exactly what was sent and what
    /// came back, including fields that library does not know.
    pub fn config(&self, replicas: usize) -> Value {
        let mut config = json!({
            "name": self.name,
            "retention": "limits",
            "discard": "old",
            "storage": match self.storage { Storage::File => "file", Storage::Memory => "memory" },
            "num_replicas": replicas,
            "max_msgs_per_subject": self.per_subject,
            "max_age": self.age_max.map_or(0, |age| age.as_nanos() as u64),
            "max_msgs": -1,
            "max_bytes": self.bytes_max,
            "max_msg_size": -1,
            "max_consumers": -1,
            "no_ack": false,
            "allow_direct": true,
            "allow_atomic": self.atomic,
            "allow_msg_ttl": self.message_ttl,
            "deny_delete": self.append_only,
            "deny_purge": self.append_only,
            "allow_rollup_hdrs": false,
            "sealed": false,
        });
        if !self.subjects.is_empty() {
            config["subjects"] = json!(self.subjects);
        }
        if let Some((src, dest)) = self.republish {
            config["republish"] = json!({ "src": src, "dest": dest });
        }
        if !self.sources.is_empty() {
            config["sources"] = self.sources.iter().map(|name| json!({ "name": name })).collect();
        }
        config
    }
}

/// Makes all streams exist as described here and proves that the server understood it. Safe to run from several controllers at
/// once and again at any time.
pub async fn ensure(client: &Client, replicas: usize) -> Result<(), Error> {
    let version = connected_version(client).await?;
    if !version_supported(&version) {
        return Err(Error::ServerTooOld { found: version });
    }
    for stream in &ALL {
        ensure_one(client, stream, replicas).await?;
    }
    batch_limit_at_least(client, BATCH_MESSAGES_MAX).await
}

/// The version of the server the client is connected to. A client that connects in the background knows none at first.
async fn connected_version(client: &Client) -> Result<String, Error> {
    let flushed = tokio::time::timeout(REQUEST_DEADLINE, client.flush()).await;
    let no_answer = || Error::NoAnswer { subject: "PING".to_owned() };
    flushed.map_err(|_| no_answer())?.map_err(|error| Error::Send(error.to_string()))?;
    Ok(client.server_info().version)
}

/// JetStream's codes for "no such stream" and "a stream of that name exists with another configuration".
const STREAM_NOT_FOUND: u64 = 10059;
const STREAM_NAME_IN_USE: u64 = 10058;

/// Makes one stream exist as described and checks what the server stored.
pub async fn ensure_one(client: &Client, stream: &Stream, replicas: usize) -> Result<(), Error> {
    let version = client.server_info().version;
    let wanted = stream.config(replicas);
    let mut answer = api(client, "STREAM.UPDATE", stream.name, &wanted).await?;
    if code(&answer) == Some(STREAM_NOT_FOUND) {
        answer = api(client, "STREAM.CREATE", stream.name, &wanted).await?;
        if code(&answer) == Some(STREAM_NAME_IN_USE) {
            // Another controller, perhaps of another version, created it in between.
            answer = api(client, "STREAM.UPDATE", stream.name, &wanted).await?;
        }
    }
    if let Some(code) = code(&answer) {
        let description = answer["error"]["description"].as_str().unwrap_or("no description").to_owned();
        return Err(Error::Refused { version, stream: stream.name, code, description });
    }
    match dropped_setting(&wanted, &answer["config"]) {
        None => Ok(()),
        Some((setting, asked, stored)) => Err(Error::SettingDropped { version, stream: stream.name, setting, asked, stored }),
    }
}

/// Clears TOPICS up to `first` and has it go on there: every life of the stream has sequences of its own, so that no leader of an
/// earlier one can find the sequence it expects. Messages at `first` and above stay.
pub async fn begin_topics(client: &Client, first: u64) -> Result<(), Error> {
    of_topics(client, "STREAM.PURGE", &serde_json::json!({ "seq": first })).await
}

/// Has the servers elect another leader for TOPICS. A stream on one server has none to elect, and says so.
pub async fn move_topics_leader(client: &Client) -> Result<(), Error> {
    of_topics(client, "STREAM.LEADER.STEPDOWN", &serde_json::json!({})).await
}

async fn of_topics(client: &Client, verb: &str, body: &Value) -> Result<(), Error> {
    let answer = api(client, verb, TOPICS.name, body).await?;
    match answer["success"].as_bool() {
        Some(true) => Ok(()),
        _ => Err(Error::BadAnswer { subject: subjects::js_api(verb, TOPICS.name), reason: answer["error"].to_string() }),
    }
}

fn code(answer: &Value) -> Option<u64> {
    let error = answer.get("error")?;
    Some(error["err_code"].as_u64().or_else(|| error["code"].as_u64()).unwrap_or(0))
}

async fn api(client: &Client, verb: &str, stream: &str, body: &Value) -> Result<Value, Error> {
    let subject = subjects::js_api(verb, stream);
    let request = client.request(subject.clone(), body.to_string().into());
    match tokio::time::timeout(REQUEST_DEADLINE, request).await {
        Ok(Ok(message)) => {
            serde_json::from_slice(&message.payload).map_err(|error| Error::BadAnswer { subject, reason: error.to_string() })
        }
        Ok(Err(_)) | Err(_) => Err(Error::NoAnswer { subject }),
    }
}
