//! The local API: one request and one answer, each a line of JSON, on a unix socket that only its owner may open.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use actix::Recipient;
use groupcast_policy::ids::WorkloadId;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use crate::config::WrittenAttachment;
use crate::enforcement::{AskCounters, AskRuleset, AskStatus, Attach, Detach, Ruleset, SetMode, Status, WantedMode};
use crate::netlink::Counted;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    WorkloadAdd(WrittenAttachment),
    WorkloadRemove { workload: String },
    Mode { mode: WantedMode, reason: String },
    Status,
    Ruleset,
    Counters,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    Done,
    Failed { why: String },
    Status(Status),
    Ruleset(Ruleset),
    Counters { counters: Vec<Counted> },
}

/// A request is a line of at most this.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Whoever connects says something within this time.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct Doors {
    pub attach: Recipient<Attach>,
    pub detach: Recipient<Detach>,
    pub mode: Recipient<SetMode>,
    pub status: Recipient<AskStatus>,
    pub ruleset: Recipient<AskRuleset>,
    pub counters: Recipient<AskCounters>,
}

impl Doors {
    async fn answer(&self, request: Request) -> Answer {
        let done = |result: Result<Result<(), String>, actix::MailboxError>| match result {
            Ok(Ok(())) => Answer::Done,
            Ok(Err(why)) => Answer::Failed { why },
            Err(error) => Answer::Failed { why: format!("the agent is ending or overloaded ({error}): try again") },
        };
        match request {
            Request::WorkloadAdd(written) => done(self.attach.send(Attach(written)).await),
            Request::WorkloadRemove { workload } => match WorkloadId::new(&workload) {
                Ok(workload) => done(self.detach.send(Detach(workload)).await),
                Err(error) => Answer::Failed { why: error.to_string() },
            },
            Request::Mode { mode, reason } => done(self.mode.send(SetMode { mode, reason }).await),
            Request::Status => match self.status.send(AskStatus).await {
                Ok(status) => Answer::Status(status),
                Err(error) => Answer::Failed { why: error.to_string() },
            },
            Request::Ruleset => match self.ruleset.send(AskRuleset).await {
                Ok(Ok(ruleset)) => Answer::Ruleset(ruleset),
                Ok(Err(why)) => Answer::Failed { why },
                Err(error) => Answer::Failed { why: error.to_string() },
            },
            Request::Counters => match self.counters.send(AskCounters).await {
                Ok(Ok(counters)) => Answer::Counters { counters },
                Ok(Err(why)) => Answer::Failed { why },
                Err(error) => Answer::Failed { why: error.to_string() },
            },
        }
    }
}

/// Replaces a socket that a dead agent left.
pub fn listen(path: &Path) -> std::io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(std::io::Error::other(format!("{} is served by another agent", path.display())));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

pub async fn serve(listener: UnixListener, doors: Doors) {
    let own = nix::unistd::geteuid().as_raw();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        // The file's mode lets nobody else in; what was opened before it was set is caught here.
        if !stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0) {
            continue;
        }
        let doors = doors.clone();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(REQUEST_WITHIN, converse(stream, &doors)).await;
        });
    }
}

async fn converse(stream: UnixStream, doors: &Doors) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read.take(REQUEST_BYTES_MAX)).read_line(&mut line).await?;
    let answer = match serde_json::from_str(&line) {
        Ok(request) => doors.answer(request).await,
        Err(error) => Answer::Failed { why: format!("not a request: {error}") },
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    write.write_all(&text).await
}

/// What the command line does.
pub async fn ask(path: &Path, request: &Request) -> std::io::Result<Answer> {
    let mut stream = UnixStream::connect(path).await?;
    let mut text = serde_json::to_vec(request)?;
    text.push(b'\n');
    stream.write_all(&text).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(serde_json::from_slice(&answer)?)
}
