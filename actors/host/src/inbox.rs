//! From the topic reader to the enforcement: commits as they come, in order, and acknowledgements back; and what the host asks of the
//! registrar.
//!
//! The reader calls from its own task and must not wait, so commits go into a queue that the enforcement empties as a whole. A queue
//! that grows beyond its bound is given up for the reader's whole state, which is what all of it leads to.

mod hold;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Guard, Identity, Options};
use groupcast_bus_config::subjects;
use groupcast_messages::{Cut, HostRequest, HostRequestAnswer};
use groupcast_policy::doc::Document;
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::safe::safe;
use groupcast_policy::topic::Topic;
use groupcast_topics::nats::{Client, Hooks, ReaderHandle, is_connected, request, spawn_reader};
use groupcast_topics::reader::{self, Commit, Reader};
use tokio::sync::{mpsc, oneshot};

use crate::config::Config;
use crate::keeper::{Moved, MovedDocument};
use crate::registration::{Told, beat_token, register_token, told};
use crate::report::Heard;
use crate::state::Replica;
pub use hold::HOLD_MAX_MS;
use hold::{Hold, named, workloads};

/// Commits that wait for the enforcement.
pub const WAITING_COMMITS_MAX: usize = 1_000;
/// Requests to the registrar that wait for their answers.
pub const WAITING_REQUESTS_MAX: usize = 1_000;
/// Pause between two looks at what is waited for here.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
pub struct Waiting {
    pub commits: Vec<Moved>,
    /// The safe part of a change that is overdue after the last of the commits.
    pub overdue: Option<Replica>,
}

impl Waiting {
    pub fn is_empty(&self) -> bool {
        self.commits.is_empty() && self.overdue.is_none()
    }

    fn push(&mut self, reader: &Reader, commit: &Commit) {
        self.overdue = None;
        let replaced = |topic: &Topic| Some(MovedDocument::Replaced(Box::new(reader.document(topic)?.clone())));
        if self.commits.len() >= WAITING_COMMITS_MAX {
            let edits = reader.documents().filter_map(|(topic, _)| Some((topic.clone(), replaced(topic)?))).collect();
            self.commits = vec![Moved { number: commit.number, change: commit.change, whole: true, edits, dropped: Vec::new() }];
            return;
        }
        let moved = |(topic, edit): &(_, Option<_>)| match edit {
            Some(edit) => Some((Clone::clone(topic), MovedDocument::Edited(Clone::clone(edit)))),
            None => Some((Clone::clone(topic), replaced(topic)?)),
        };
        self.commits.push(Moved {
            number: commit.number,
            change: commit.change,
            whole: false,
            edits: commit.edits.iter().filter_map(moved).collect(),
            dropped: commit.dropped.clone(),
        });
    }
}

/// The queue, shared by the reader's task and the enforcement.
#[derive(Debug, Clone)]
pub struct Queue {
    waiting: Arc<Mutex<(Waiting, Hold)>>,
    clock: Instant,
}

impl Default for Queue {
    fn default() -> Self {
        Self { waiting: Arc::default(), clock: Instant::now() }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these is held, and a half-done change is not possible.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queue {
    /// One that begins where the disk left off.
    pub fn from(host: &HostId, documents: &Replica) -> Self {
        let queue = Self::default();
        locked(&queue.waiting).1.starts_from(workloads(documents.get(&Topic::Host(host.clone()))));
        queue
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether it takes away what this host enrols by itself, and waits for that to be enrolled again.
    fn push(&self, host: &HostId, reader: &Reader, commit: &Commit) -> bool {
        let (waiting, hold) = &mut *locked(&self.waiting);
        waiting.push(reader, commit);
        let own = Topic::Host(host.clone());
        let is_own = commit.edits.iter().any(|(topic, _)| *topic == own) || commit.dropped.contains(&own);
        if !is_own || hold.wanted().is_empty() {
            return false;
        }
        let newest = named(reader.document(&own), hold.wanted());
        hold.moved(newest, self.now_ms())
    }

    /// The safe part of what the reader holds back.
    fn overdue(&self, host: &HostId, reader: &Reader) {
        locked(&self.waiting).0.overdue = safe(host, &Committed(reader), &Overlay::of(reader));
    }

    fn wants(&self, wanted: BTreeSet<WorkloadId>) {
        locked(&self.waiting).1.wants(wanted);
    }

    /// All that waits for the enforcement; nothing while that waits for an enrolment.
    pub fn take(&self) -> Waiting {
        let (waiting, hold) = &mut *locked(&self.waiting);
        if !hold.is_over(self.now_ms()) {
            return Waiting::default();
        }
        hold.handed_on();
        std::mem::take(waiting)
    }
}

struct Committed<'r>(&'r Reader);

impl Documents for Committed<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.document(topic)
    }
}

/// What is committed, with what is held back on top, as far as it can be applied.
struct Overlay<'r> {
    reader: &'r Reader,
    changed: HashMap<Topic, Document>,
}

impl<'r> Overlay<'r> {
    fn of(reader: &'r Reader) -> Self {
        let mut overlay = Self { reader, changed: HashMap::new() };
        for (topic, edit) in reader.held_back() {
            // A document that is not held begins somewhere else: it is not synced.
            let Some(mut document) = overlay.document(topic).cloned() else { continue };
            if document.apply(edit).is_ok() {
                overlay.changed.insert(topic.clone(), document);
            }
        }
        overlay
    }
}

impl Documents for Overlay<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.changed.get(topic).or_else(|| self.reader.document(topic))
    }
}

#[derive(Debug, Default)]
struct Notes {
    incidents: u64,
    last_incident: Option<String>,
    requests: HashMap<String, oneshot::Sender<Vec<u8>>>,
}

pub struct Inbox {
    reader: ReaderHandle,
    client: Client,
    host: HostId,
    notes: Arc<Mutex<Notes>>,
    requests: AtomicU64,
    /// Which start of the agent this is: an answer to an earlier one is none to this.
    life: u64,
    queue: Queue,
    wake: Box<dyn Fn() + Send + Sync>,
    _guard: Guard,
}

/// How this host reaches the bus.
pub fn options(config: &Config, identity: Identity) -> Options {
    Options::new(&config.servers, Role::Host, &config.host).identity(identity).tls(config.tls.clone())
}

impl Inbox {
    /// Connects in the background: the agent starts, and enforces what it knows, also without the bus. `wake` is called whenever
    /// something is in the queue.
    pub async fn open(
        config: &Config,
        queue: Queue,
        seed: u64,
        wake: impl Fn() + Send + Sync + Clone + 'static,
        tells: mpsc::Sender<Told>,
    ) -> Result<Self, connect::Error> {
        let identity = config.credentials.clone().map_or(Identity::Nobody, Identity::File);
        let (client, events) = connect::connect(options(config, identity).in_background()).await?;
        let guard = events.guard(&client);
        let notes = Arc::new(Mutex::new(Notes::default()));
        let hooks = Hooks {
            commit: Box::new({
                let (queue, wake, tells, host) = (queue.clone(), wake.clone(), tells.clone(), config.host.clone());
                move |reader: &Reader, commit: &Commit| {
                    if queue.push(&host, reader, commit) {
                        tracing::info!("the controllers have forgotten what this host enrols: it enrols again");
                        // Without room, the next beat is told the same.
                        let _ = tells.try_send(Told::Forgotten);
                        let wake = wake.clone();
                        tokio::spawn(async move {
                            tokio::time::sleep(Duration::from_millis(HOLD_MAX_MS)).await;
                            wake();
                        });
                    }
                    wake();
                    false
                }
            }),
            overdue: Box::new({
                let (queue, wake, host) = (queue.clone(), wake.clone(), config.host.clone());
                move |reader: &Reader| {
                    queue.overdue(&host, reader);
                    wake();
                }
            }),
            incident: Box::new({
                let notes = notes.clone();
                move |incident| {
                    let mut notes = locked(&notes);
                    notes.incidents += 1;
                    notes.last_incident = Some(format!("{incident:?}"));
                }
            }),
            answer: Box::new({
                let notes = notes.clone();
                move |token, payload| {
                    if let Some(told) = told(seed, token, payload) {
                        // What finds no room is said again: to the next beat, or to the registration's next repetition.
                        let _ = tells.try_send(told);
                        return;
                    }
                    if let Some(waiter) = locked(&notes).requests.remove(token) {
                        // Whoever gave up waiting is told nothing.
                        let _ = waiter.send(payload.to_vec());
                    }
                }
            }),
        };
        let reader = spawn_reader(client.clone(), events, config.host.clone(), reader::Settings::default(), seed, hooks);
        let (host, requests) = (config.host.clone(), AtomicU64::new(0));
        Ok(Self { reader, client, host, notes, requests, life: seed, queue, wake: Box::new(wake), _guard: guard })
    }

    /// What this host enrols by itself and was not refused.
    pub fn wants(&self, wanted: BTreeSet<WorkloadId>) {
        self.queue.wants(wanted);
        (self.wake)();
    }

    pub fn reader(&self) -> &ReaderHandle {
        &self.reader
    }

    /// Makes the connection anew, with the credentials file as it is now.
    pub async fn reconnect(&self) {
        if let Err(error) = self.client.force_reconnect().await {
            tracing::warn!(%error, "the connection is not made anew: the new credential is used when the server ends the old one");
        }
    }

    pub fn is_connected(&self) -> bool {
        is_connected(&self.client)
    }

    /// The highest term this host has seen.
    pub async fn term(&self) -> u64 {
        self.reader.inspect(|reader| reader.cut().map_or(0, |cut| cut.term)).await.unwrap_or(0)
    }

    /// Says that the host lives. The answer, if there is one, says that it is not known.
    pub async fn beat(&self, payload: Vec<u8>, count: u64) -> Result<(), String> {
        let (subject, token) = (subjects::beat(&self.host), beat_token(count));
        request(&self.client, subject, &token, payload).await.map_err(|error| error.to_string())
    }

    /// Sends a registration; what is said to it comes with everything else that controllers say.
    pub async fn register(&self, payload: Vec<u8>, number: u64) -> Result<(), String> {
        let (subject, token) = (subjects::register(&self.host), register_token(self.life, number));
        request(&self.client, subject, &token, payload).await.map_err(|error| error.to_string())
    }

    /// Waits for the connection, at most so long: an agent that has just started, or whose server has just ended, is about to have one.
    pub async fn connected(&self, within: Duration) -> bool {
        let connects = async {
            while !self.is_connected() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::time::timeout(within, connects).await.is_ok()
    }

    /// Asks the registrar; an error says why there is no answer.
    pub async fn ask(&self, asked: &HostRequest, within: Duration) -> Result<HostRequestAnswer, String> {
        if !is_connected(&self.client) {
            return Err("the bus is not connected".into());
        }
        let token = format!("host-{:x}-{}", self.life, self.requests.fetch_add(1, Ordering::Relaxed));
        let (answer, answered) = oneshot::channel();
        {
            let mut notes = locked(&self.notes);
            if notes.requests.len() >= WAITING_REQUESTS_MAX {
                return Err(format!("{WAITING_REQUESTS_MAX} requests wait for answers already"));
            }
            notes.requests.insert(token.clone(), answer);
        }
        let sent = request(&self.client, subjects::register(&self.host), &token, asked.encode());
        let outcome = tokio::time::timeout(within, async {
            sent.await.map_err(|error| error.to_string())?;
            answered.await.map_err(|_| "the agent is ending".to_owned())
        });
        let outcome = outcome.await.unwrap_or_else(|_| Err(format!("no answer within {within:?}")));
        locked(&self.notes).requests.remove(&token);
        HostRequestAnswer::decode(&outcome?).map_err(|error| format!("the answer cannot be read: {error}"))
    }

    /// Waits until the host stands at this cut or beyond; the last commit up to there. `None`: the reader has ended.
    pub async fn reach(&self, cut: Cut) -> Option<u64> {
        self.reader.refresh().await;
        loop {
            let (stands, commits) = self.reader.inspect(|reader| (reader.cut(), reader.commits())).await?;
            if stands >= Some(cut) {
                return Some(commits);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub async fn heard(&self) -> Heard {
        let (cut, held_deltas, revisions) = self
            .reader
            .inspect(|reader| {
                let revision = |topic: &Topic| Some((topic.to_string(), reader.revision(topic)?));
                let revisions: BTreeMap<String, u64> = reader.documents().filter_map(|(topic, _)| revision(topic)).collect();
                (reader.cut().map(|cut| (cut.term, cut.lead)), reader.pending(), revisions)
            })
            .await
            .unwrap_or_default();
        let notes = locked(&self.notes);
        let (incidents, last_incident) = (notes.incidents, notes.last_incident.clone());
        Heard { connected: is_connected(&self.client), cut, held_deltas, incidents, last_incident, revisions }
    }
}
