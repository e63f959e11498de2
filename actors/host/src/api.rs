//! The local API: one request and one answer, each a line of JSON, on a unix socket that only its owner may open.

mod add;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix::{MailboxError, Recipient};
use groupcast_bus_config::accepting::Accepting;
use groupcast_policy::ids::WorkloadId;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::config::WrittenAttachment;
use crate::enforcement::{
    AskCounters, AskEnforced, AskExplanation, AskForeign, AskRuleset, AskStanding, Attach, Detach, Progress, SetAudit, SetMode,
};
use crate::enrol::WrittenEnrolment;
use crate::inbox::Inbox;
use crate::mode::WantedMode;
use crate::netlink::Counted;
use crate::registration;
use crate::renew::Credential;
use crate::report::{Explanation, Ruleset, Status};

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    WorkloadAdd {
        attachment: WrittenAttachment,
        /// The host enrols it; otherwise somebody else says what it is.
        #[serde(default)]
        enrol: Option<WrittenEnrolment>,
        /// Sources are read anew first.
        #[serde(default)]
        fresh: bool,
        #[serde(default = "default_within_ms")]
        within_ms: u64,
    },
    WorkloadRemove {
        workload: String,
    },
    WorkloadAudit {
        workload: String,
        audit: bool,
    },
    Mode {
        mode: WantedMode,
        reason: String,
    },
    /// Tells the controllers to forget this host and what it has registered.
    Leave,
    Status,
    Ruleset,
    Counters,
    Explain {
        from: String,
        to: String,
        traffic: String,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    Done {
        /// What is not as it was asked for.
        #[serde(default)]
        notes: Vec<String>,
    },
    Failed {
        why: String,
    },
    /// It is ordered, but not in force by the deadline.
    TimedOut {
        why: String,
    },
    Status(Box<Status>),
    Ruleset(Ruleset),
    Counters {
        counters: Vec<Counted>,
    },
    Explanation(Explanation),
}

/// How long an order may take, unless it says so.
pub const WITHIN: Duration = Duration::from_secs(10);
/// Nobody waits longer, whatever they say.
pub const WITHIN_MAX: Duration = Duration::from_secs(600);
/// A request is a line of at most this.
pub const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Whoever connects says something within this time.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);

fn default_within_ms() -> u64 {
    WITHIN.as_millis() as u64
}

#[derive(Clone)]
pub struct Doors {
    pub attach: Recipient<Attach>,
    pub detach: Recipient<Detach>,
    pub audit: Recipient<SetAudit>,
    pub mode: Recipient<SetMode>,
    pub enforced: Recipient<AskEnforced>,
    pub standing: Recipient<AskStanding>,
    pub foreign: Recipient<AskForeign>,
    pub ruleset: Recipient<AskRuleset>,
    pub counters: Recipient<AskCounters>,
    pub explanation: Recipient<AskExplanation>,
    pub progress: watch::Receiver<Progress>,
    pub inbox: Arc<Inbox>,
    pub registration: registration::Handle,
    pub credential: watch::Receiver<Credential>,
}

/// Whatever was asked, in one result: a full mailbox or an ending actor is a failure like any other.
fn flat<T>(result: Result<Result<T, String>, MailboxError>) -> Result<T, String> {
    result.map_err(|error| format!("the agent is ending or overloaded ({error}): try again"))?
}

fn done(result: Result<(), String>) -> Answer {
    result.map_or_else(|why| Answer::Failed { why }, |()| Answer::Done { notes: Vec::new() })
}

fn workload(text: &str) -> Result<WorkloadId, String> {
    WorkloadId::new(text).map_err(|error| error.to_string())
}

impl Doors {
    async fn answer(&self, request: Request) -> Answer {
        match request {
            Request::WorkloadAdd { attachment, enrol, fresh, within_ms } => {
                self.add(attachment, enrol, fresh, Duration::from_millis(within_ms).min(WITHIN_MAX)).await
            }
            Request::WorkloadRemove { workload: text } => match workload(&text) {
                Ok(workload) => done(self.remove(workload).await),
                Err(why) => Answer::Failed { why },
            },
            Request::WorkloadAudit { workload: text, audit } => match workload(&text) {
                Ok(workload) => done(flat(self.audit.send(SetAudit { workload, audit }).await)),
                Err(why) => Answer::Failed { why },
            },
            Request::Mode { mode, reason } => done(flat(self.mode.send(SetMode { mode, reason }).await)),
            Request::Leave => done(self.registration.leave().await),
            Request::Status => match self.status().await {
                Ok(status) => Answer::Status(Box::new(status)),
                Err(why) => Answer::Failed { why },
            },
            Request::Ruleset => match flat(self.ruleset.send(AskRuleset).await) {
                Ok(ruleset) => Answer::Ruleset(ruleset),
                Err(why) => Answer::Failed { why },
            },
            Request::Counters => match flat(self.counters.send(AskCounters).await) {
                Ok(counters) => Answer::Counters { counters },
                Err(why) => Answer::Failed { why },
            },
            Request::Explain { from, to, traffic } => match self.explain(AskExplanation { from, to, traffic }).await {
                Ok(explanation) => Answer::Explanation(explanation),
                Err(why) => Answer::Failed { why },
            },
        }
    }

    async fn status(&self) -> Result<Status, String> {
        let enforced = flat(self.enforced.send(AskEnforced).await.map(Ok))?;
        let foreign = flat(self.foreign.send(AskForeign).await.map(Ok))?;
        let (registration, credential) = (self.registration.now(), self.credential.borrow().clone());
        Ok(Status { enforced, heard: self.inbox.heard().await, foreign, registration, credential })
    }

    async fn explain(&self, asked: AskExplanation) -> Result<Explanation, String> {
        let mut explanation = flat(self.explanation.send(asked).await)?;
        let revisions = self.inbox.heard().await.revisions;
        for (topic, revision) in explanation.judgements.iter_mut().flat_map(|judged| &mut judged.topics) {
            *revision = revisions.get(topic).copied();
        }
        Ok(explanation)
    }

    /// Nothing of it passes from here on, and its registration goes.
    async fn remove(&self, workload: WorkloadId) -> Result<(), String> {
        let detached = flat(self.detach.send(Detach(workload.clone())).await);
        self.registration.end(&workload).await?;
        detached
    }
}

/// Replaces a socket that a dead agent left.
pub fn listen(path: &Path) -> std::io::Result<UnixListener> {
    // Whoever can write its folder can put another in its place, and is told what is meant for the agent.
    crate::files::guard_folder(path).map_err(std::io::Error::other)?;
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
    let mut accepting = Accepting::new("the local socket");
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                accepting.failed(&error).await;
                continue;
            }
        };
        // The file's mode lets nobody else in; what was opened before it was set is caught here.
        if !stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0) {
            continue;
        }
        let doors = doors.clone();
        tokio::spawn(async move {
            if let Err(error) = converse(stream, &doors).await {
                tracing::debug!(%error, "a request on the local socket was given up");
            }
        });
    }
}

async fn converse(stream: UnixStream, doors: &Doors) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(read.take(REQUEST_BYTES_MAX));
    let length = tokio::time::timeout(REQUEST_WITHIN, reader.read_line(&mut line)).await??;
    let answer = match serde_json::from_str(&line) {
        _ if length as u64 >= REQUEST_BYTES_MAX => {
            Answer::Failed { why: format!("a request has at most {REQUEST_BYTES_MAX} bytes") }
        }
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
