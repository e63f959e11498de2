//! Runs a [`Reader`] on a connection.

use std::time::Duration;

use async_nats::{Client, HeaderMap};
use futures::StreamExt;
use groupcast_bus_config::{connect, subjects};
use groupcast_messages::{Cut, HostState};
use groupcast_policy::ids::HostId;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::order::Ordered;
use super::unheard::{Advice, Question, Unheard};
use super::{Clock, Link, MAILBOX_MAX, link};
use crate::reader::{Commit, Effect, Event, Incident, Reader, Settings, together};

/// Tokens under which a host's answers come back; the answer itself carries the request's number.
const SNAPSHOT_TOKEN: &str = "snap";
const ENTROPY_TOKEN: &str = "entropy";

/// One attempt to see everything sent before in effect at the server.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// Called with every commit, in order. True: it is in force now; false: [`ReaderHandle::enforced`] will say so.
pub type OnCommit = Box<dyn FnMut(&Reader, &Commit) -> bool + Send>;

/// Called with the token and the payload of an answer to a request that was not the reader's.
pub type OnAnswer = Box<dyn FnMut(&str, &[u8]) + Send>;

/// What whoever runs a reader wants to be told.
pub struct Hooks {
    pub commit: OnCommit,
    /// A change is overdue: [`Reader::held_back`] has it.
    pub overdue: Box<dyn FnMut(&Reader) + Send>,
    pub incident: Box<dyn FnMut(&Incident) + Send>,
    pub answer: OnAnswer,
}

impl From<OnCommit> for Hooks {
    fn from(commit: OnCommit) -> Self {
        Self { commit, overdue: Box::new(|_| {}), incident: Box::new(|_| {}), answer: Box::new(|_, _| {}) }
    }
}

type Inspect = Box<dyn FnOnce(&Reader) + Send>;

enum Command {
    Inspect(Inspect),
    Enforced(u64),
    State(HostState),
    Refresh,
}

/// Ends the task when dropped.
pub struct ReaderHandle {
    commands: mpsc::Sender<Command>,
    cut: watch::Receiver<Option<Cut>>,
    task: JoinHandle<()>,
}

impl ReaderHandle {
    /// Runs `look` where the reader lives; `None` when it has ended.
    pub async fn inspect<T: Send + 'static>(&self, look: impl FnOnce(&Reader) -> T + Send + 'static) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let look: Inspect = Box::new(move |reader| {
            let _ = answer.send(look(reader));
        });
        self.commands.send(Command::Inspect(look)).await.ok()?;
        answered.await.ok()
    }

    pub async fn enforced(&self, commit: u64) {
        let _ = self.commands.send(Command::Enforced(commit)).await;
    }

    /// What the host does with what it has, from now on.
    pub async fn state(&self, state: HostState) {
        let _ = self.commands.send(Command::State(state)).await;
    }

    /// Asks the snapshot service whether anything is missing.
    pub async fn refresh(&self) {
        let _ = self.commands.send(Command::Refresh).await;
    }

    /// The exposed cut, and its changes.
    pub fn cut(&self) -> watch::Receiver<Option<Cut>> {
        self.cut.clone()
    }
}

impl Drop for ReaderHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn spawn_reader(
    client: Client,
    events: connect::Events,
    host: HostId,
    settings: Settings,
    seed: u64,
    hooks: impl Into<Hooks>,
) -> ReaderHandle {
    let (commands, inbox) = mpsc::channel(MAILBOX_MAX);
    let (cut_sender, cut) = watch::channel(None);
    let reader = Reader::new(host.clone(), settings, seed);
    let (flushed_sender, flushed) = mpsc::unbounded_channel();
    let hooks = hooks.into();
    let (topics, unheard) = (Ordered::default(), Unheard::default());
    let shell = Shell { client, host, reader, hooks, topics, cut: cut_sender, flushed: flushed_sender, unheard };
    let task = tokio::spawn(async move {
        if let Err(error) = shell.run(events, inbox, flushed).await {
            tracing::error!(%error, "the topic reader ended: the connection is closed");
        }
    });
    ReaderHandle { commands, cut, task }
}

struct Shell {
    client: Client,
    host: HostId,
    reader: Reader,
    hooks: Hooks,
    topics: Ordered,
    cut: watch::Sender<Option<Cut>>,
    flushed: mpsc::UnboundedSender<u64>,
    unheard: Unheard,
}

impl Shell {
    async fn run(
        mut self,
        mut events: connect::Events,
        mut commands: mpsc::Receiver<Command>,
        mut flushed: mpsc::UnboundedReceiver<u64>,
    ) -> Result<(), async_nats::Error> {
        let clock = Clock::start();
        let mut answers = self.client.subscribe(subjects::answers(&self.host)).await?;
        let mut nudges = self.client.subscribe(subjects::ctl(&self.host)).await?;
        loop {
            let effects = tokio::select! {
                biased;
                state = link(&mut events) => match state {
                    Link::Closed => return Ok(()),
                    Link::Same => continue,
                    Link::Up => {
                        self.unheard.moved();
                        self.reader.handle(Event::Connected, clock.now_ms())
                    }
                    Link::Down => {
                        self.unheard.moved();
                        // The client would subscribe them all by itself: the reader says when.
                        self.topics = Ordered::default();
                        self.reader.handle(Event::Disconnected, clock.now_ms())
                    }
                    Link::Lost => self.reader.handle(Event::Lost, clock.now_ms()),
                },
                Some(number) = flushed.recv() => self.reader.handle(Event::Flushed(number), clock.now_ms()),
                arrived = self.topics.next() => {
                    let now_ms = clock.now_ms();
                    let mut effects = Vec::new();
                    for (revision, previous, topic, message) in arrived {
                        effects.extend(self.reader.handle(Event::Delta { topic, revision, previous, payload: &message.payload }, now_ms));
                    }
                    effects
                }
                Some(message) = answers.next() => match self.answered(&message.subject) {
                    Some(ENTROPY_TOKEN) => self.reader.handle(Event::EntropyAnswer(&message.payload), clock.now_ms()),
                    Some(SNAPSHOT_TOKEN) => self.reader.handle(Event::Answer(&message.payload), clock.now_ms()),
                    token => {
                        (self.hooks.answer)(token.unwrap_or_default(), &message.payload);
                        continue;
                    }
                },
                Some(message) = nudges.next() => self.reader.handle(Event::Nudge(&message.payload), clock.now_ms()),
                command = commands.recv() => match command {
                    None => return Ok(()),
                    Some(Command::Inspect(look)) => {
                        look(&self.reader);
                        continue;
                    }
                    Some(Command::Enforced(number)) => self.reader.handle(Event::Enforced(number), clock.now_ms()),
                    Some(Command::State(state)) => self.reader.handle(Event::State(state), clock.now_ms()),
                    Some(Command::Refresh) => self.reader.handle(Event::Refresh, clock.now_ms()),
                },
                () = clock.until(self.unheard.deadline_ms()) => match self.unheard.tick(clock.now_ms()) {
                    Some(Advice::AskAgain) => self.reader.handle(Event::Refresh, clock.now_ms()),
                    Some(Advice::Leave) => {
                        events.leave(&self.client, "no controller answers there").await;
                        continue;
                    }
                    None => continue,
                },
                () = clock.until(self.reader.deadline_ms()) => self.reader.handle(Event::Tick, clock.now_ms()),
            };
            self.perform(effects, &clock).await?;
        }
    }

    /// By whatever it is, somebody is there.
    fn answered<'a>(&mut self, subject: &'a str) -> Option<&'a str> {
        self.unheard.heard();
        subjects::answer_token(subject)
    }

    async fn perform(&mut self, effects: Vec<Effect>, clock: &Clock) -> Result<(), async_nats::Error> {
        // Messages that arrived at once were handled before any of their commits is performed.
        let mut open = std::collections::VecDeque::from(together(effects));
        while let Some(effect) = open.pop_front() {
            match effect {
                Effect::Subscribe(topic) => {
                    // After a reconnect that nobody noticed the client has subscribed again by itself.
                    if !self.topics.contains(&topic) {
                        let subscriber = self.client.subscribe(subjects::read(&topic)).await?;
                        self.topics.insert(topic, subscriber);
                    }
                }
                Effect::Unsubscribe(topic) => {
                    if let Some(mut subscriber) = self.topics.remove(&topic) {
                        let _ = subscriber.unsubscribe().await;
                    }
                }
                Effect::Flush(number) => {
                    // Answered by the server; must not hold up what arrives meanwhile.
                    let (client, flushed) = (self.client.clone(), self.flushed.clone());
                    tokio::spawn(async move {
                        // Tried again for as long as the connection lasts: without it the reader never asks.
                        while connect::settle(&client, SETTLE_TIMEOUT).await.is_err() {
                            if flushed.is_closed() {
                                return;
                            }
                        }
                        let _ = flushed.send(number);
                    });
                }
                Effect::Ask(payload) => {
                    self.unheard.asked(Question::Request, clock.now_ms());
                    request(&self.client, subjects::snap(&self.host), SNAPSHOT_TOKEN, payload).await?;
                }
                Effect::Entropy(payload) => {
                    self.unheard.asked(Question::Comparison, clock.now_ms());
                    request(&self.client, subjects::entropy(&self.host), ENTROPY_TOKEN, payload).await?;
                }
                Effect::Ack(payload) => self.client.publish(subjects::ack(&self.host), payload.into()).await?,
                Effect::Commit(commit) => {
                    let in_force = (self.hooks.commit)(&self.reader, &commit);
                    self.cut.send_replace(self.reader.cut());
                    if in_force {
                        open.extend(self.reader.handle(Event::Enforced(commit.number), clock.now_ms()));
                    }
                }
                Effect::Overdue(cut) => {
                    tracing::warn!(host = %self.host, term = cut.term, lead = cut.lead, "a change waits for topics that do not arrive");
                    (self.hooks.overdue)(&self.reader);
                }
                Effect::Report(incident) => {
                    self.log(&incident);
                    (self.hooks.incident)(&incident);
                }
            }
        }
        Ok(())
    }

    fn log(&self, incident: &Incident) {
        match incident {
            Incident::Malformed { .. } | Incident::Corrupt { .. } | Incident::LowerTerm { .. } => {
                tracing::warn!(host = %self.host, ?incident, "refused a message, the old state stays enforced");
            }
            _ => tracing::debug!(host = %self.host, ?incident, "repairing"),
        }
    }
}

/// A request whose answer comes back under this token.
pub async fn request(client: &Client, subject: String, token: &str, payload: Vec<u8>) -> Result<(), async_nats::Error> {
    let mut headers = HeaderMap::new();
    headers.insert(subjects::ANSWER_TOKEN, token);
    client.publish_with_headers(subject, headers, payload.into()).await?;
    Ok(())
}
