//! Runs a [`Node`] on a connection, with the convergence of what is published.

use crate::Map;
use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, Subject};
use futures::StreamExt;
use groupcast_bus_config::{connect, subjects};
use groupcast_messages::{Ack, Beat};
use groupcast_policy::ids::HostId;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::js::Js;
use super::{Clock, Ears, Kind, Link, MAILBOX_MAX, Republished, link, topic_of};
use crate::batch::{Proposal, Refused};
use crate::convergence::{self, Convergence};
use crate::node::{Committed, Desired, Effect, Event, Fate, Head, Incident, Node, Records, Request, Settings};
use crate::term::{BadTerm, Reserved};

/// Names the controller that sends an answer to another: the one who asked follows the first that answers.
const FROM: &str = "Gc-From";

/// Compiles from scratch what should be published: everything that is in CATALOG and REGISTRY when it is called. Called when no copy
/// of what was published exists any more, or the stream was lost.
pub type Compile = Box<dyn FnMut() -> oneshot::Receiver<Desired> + Send>;

/// The answer of a [`Compile`] that need not be waited for.
pub fn compiled(desired: Desired) -> oneshot::Receiver<Desired> {
    let (sender, receiver) = oneshot::channel();
    let _ = sender.send(desired);
    receiver
}

type Inspect = Box<dyn FnOnce(&mut Node, &mut Convergence) + Send>;

enum Command {
    Propose(Proposal, oneshot::Sender<Result<Committed, Refused>>),
    Inspect(Inspect),
    Fit(bool),
    Resign,
}

/// Ends the task when dropped: for everyone else as if the process had been killed.
pub struct NodeHandle {
    commands: mpsc::Sender<Command>,
    leading: watch::Receiver<Option<u64>>,
    task: JoinHandle<()>,
}

impl NodeHandle {
    /// Publishes a change; returns when it is in the stream for good. [`Refused::NotLeading`] may also mean that its fate is
    /// unknown because this node was deposed meanwhile: the next leader publishes whatever is missing.
    pub async fn propose(&self, proposal: Proposal) -> Result<Committed, Refused> {
        let (answer, answered) = oneshot::channel();
        if self.commands.send(Command::Propose(proposal, answer)).await.is_err() {
            return Err(Refused::NotLeading);
        }
        answered.await.unwrap_or(Err(Refused::NotLeading))
    }

    pub async fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(&mut Node, &mut Convergence) -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let look: Inspect = Box::new(move |node, convergence| {
            let _ = answer.send(look(node, convergence));
        });
        self.commands.send(Command::Inspect(look)).await.ok()?;
        answered.await.ok()
    }

    /// CATALOG is another stream than before, and counts changes anew.
    pub async fn renumbered(&self) {
        let forget = |node: &mut Node, convergence: &mut Convergence| {
            node.renumbered();
            convergence.renumbered();
        };
        let _ = self.inspect(forget).await; // a node that ended says nothing of any change
    }

    /// Whether this controller reads what it would publish: one that does not lets go of the leadership, and does not take it.
    pub async fn fit(&self, fit: bool) {
        let _ = self.commands.send(Command::Fit(fit)).await; // a node that ended leads nobody
    }

    /// Lets go of the leadership in an orderly way, and does not take it again.
    pub async fn resign(&self) {
        let _ = self.commands.send(Command::Resign).await;
    }

    /// The term while this node leads.
    pub fn leading(&self) -> watch::Receiver<Option<u64>> {
        self.leading.clone()
    }
}

impl Drop for NodeHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// On one connection, for worlds in which no host sends too much.
pub fn spawn_node(
    client: Client,
    events: connect::Events,
    settings: Settings,
    replicas: usize,
    seed: u64,
    compile: Compile,
) -> NodeHandle {
    let ears = Ears::sharing(client.clone());
    spawn_node_hearing(ears, client, events, settings, replicas, seed, compile)
}

/// `client` carries what controllers and streams say, `ears` what hosts say.
pub fn spawn_node_hearing(
    ears: Ears,
    client: Client,
    events: connect::Events,
    settings: Settings,
    replicas: usize,
    seed: u64,
    compile: Compile,
) -> NodeHandle {
    let (commands, inbox) = mpsc::channel(MAILBOX_MAX);
    let (leading_sender, leading) = watch::channel(None);
    let (done, done_inbox) = mpsc::unbounded_channel();
    let js = Js::new(client.clone(), Duration::from_millis(settings.request_timeout_ms), replicas);
    let shell = Shell {
        name: settings.name.clone(),
        node: Node::new(settings, seed),
        ears,
        client,
        js,
        convergence: Convergence::new(convergence::Settings::default()),
        leading: leading_sender,
        compile,
        done,
        proposals: Map::default(),
        next_proposal: seed & 0xffff,
        replies: Map::default(),
        next_reply: 0,
        attempts: seed,
        peer: None,
        replica_inbox: String::new(),
    };
    let task = tokio::spawn(async move {
        if let Err(error) = shell.run(events, inbox, done_inbox).await {
            tracing::error!(%error, "the controller's topics ended: the connection is closed");
        }
    });
    NodeHandle { commands, leading, task }
}

/// Answers of requests made on the side.
enum Done {
    Head(Option<Head>),
    Term(Result<Option<Reserved>, BadTerm>),
    TermRead(Option<u64>),
    LifeBegun(bool),
    Published(u64, Fate),
    Records(Option<Records>),
    Desired(u64, Option<Desired>),
}

/// Where an answer goes.
enum ReplyTo {
    Host(String),
    Peer(Subject),
}

struct Shell {
    name: String,
    node: Node,
    ears: Ears,
    client: Client,
    js: Js,
    convergence: Convergence,
    leading: watch::Sender<Option<u64>>,
    compile: Compile,
    done: mpsc::UnboundedSender<Done>,
    /// The caller's number and where it waits, by the number used here.
    proposals: Map<u64, (u64, oneshot::Sender<Result<Committed, Refused>>)>,
    next_proposal: u64,
    replies: Map<u64, ReplyTo>,
    next_reply: u64,
    attempts: u64,
    /// The controller whose answer is being followed.
    peer: Option<String>,
    replica_inbox: String,
}

impl Shell {
    async fn run(
        mut self,
        mut events: connect::Events,
        mut commands: mpsc::Receiver<Command>,
        mut done: mpsc::UnboundedReceiver<Done>,
    ) -> Result<(), async_nats::Error> {
        let clock = Clock::start();
        self.replica_inbox = self.client.new_inbox();
        let mut topics = self.client.subscribe(subjects::READ_ALL).await?;
        let mut snapshots = self.ears.listen(Kind::Snapshots).await?;
        let mut checks = self.ears.listen(Kind::Checks).await?;
        let mut acks = self.ears.listen(Kind::Acks).await?;
        let mut beats = self.ears.listen(Kind::Beats).await?;
        let mut peers = self.client.subscribe(subjects::REPLICA).await?;
        let mut peer_answers = self.client.subscribe(self.replica_inbox.clone()).await?;
        let mut elections = self.client.subscribe(subjects::TOPICS_LEADER_ELECTED).await?;
        loop {
            let now = || clock.now_ms();
            let effects = tokio::select! {
                biased;
                state = link(&mut events) => match state {
                    Link::Closed => return Ok(()),
                    Link::Same => continue,
                    Link::Up => {
                        // What is asked from here on must not be answered before the subscriptions are in effect.
                        let _ = connect::settle(&self.client, Duration::from_secs(2)).await;
                        self.node.handle(Event::Connected, now())
                    }
                    Link::Down => self.node.handle(Event::Disconnected, now()),
                    Link::Lost => self.node.handle(Event::Lost, now()),
                },
                Some(done) = done.recv() => match done {
                    Done::Head(head) => self.node.handle(Event::Head(head), now()),
                    Done::Term(Ok(reserved)) => self.node.handle(Event::TermReserved(reserved), now()),
                    Done::Term(Err(why)) => self.node.handle(Event::NoTerm(why), now()),
                    Done::TermRead(term) => self.node.handle(Event::TermRead(term), now()),
                    Done::LifeBegun(begun) => self.node.handle(Event::LifeBegun(begun), now()),
                    Done::Published(batch, fate) => self.node.handle(Event::Published { batch, fate }, now()),
                    Done::Records(records) => self.node.handle(Event::Records(records), now()),
                    Done::Desired(ask, desired) => self.node.handle(Event::Desired { ask, desired }, now()),
                },
                Some(message) = topics.next() => self.republished(&message, now()),
                command = commands.recv() => match command {
                    None => return Ok(()),
                    Some(Command::Propose(mut proposal, answer)) => {
                        self.next_proposal += 1;
                        self.proposals.insert(self.next_proposal, (proposal.number, answer));
                        proposal.number = self.next_proposal;
                        self.node.handle(Event::Propose(proposal), now())
                    }
                    Some(Command::Inspect(look)) => {
                        self.node.notice_time(now());
                        look(&mut self.node, &mut self.convergence);
                        continue;
                    }
                    Some(Command::Fit(fit)) => self.node.handle(Event::Fit(fit), now()),
                    Some(Command::Resign) => self.node.handle(Event::Resign, now()),
                },
                Some((host, message)) = snapshots.recv() => self.host_request(host, &message, now()),
                Some((host, message)) = checks.recv() => self.host_request(host, &message, now()),
                Some((host, message)) = acks.recv() => {
                    if let Ok(ack) = Ack::decode(&message.payload) {
                        self.convergence.acknowledged(&host, &ack, now());
                    }
                    continue;
                }
                Some((host, message)) = beats.recv() => {
                    if let Ok(beat) = Beat::decode(&message.payload) {
                        self.convergence.heard(&host, beat.state, now());
                    }
                    continue;
                }
                Some(message) = peers.next() => self.peer_request(&message, now()),
                Some(message) = peer_answers.next() => self.peer_answer(&message, now()),
                Some(_) = elections.next() => {
                    self.convergence.stream_leader_changed(now());
                    continue;
                }
                () = clock.until(self.node.deadline_ms()) => self.node.handle(Event::Tick, now()),
                () = clock.until(self.convergence.deadline_ms().filter(|_| self.node.is_leading())) => {
                    for (host, nudge) in self.convergence.tick(now()) {
                        self.client.publish(subjects::ctl(&host), nudge.into()).await?;
                    }
                    continue;
                }
            };
            self.perform(effects, &clock).await?;
        }
    }

    fn republished(&mut self, message: &Message, now_ms: u64) -> Vec<Effect> {
        let Some(Republished { sequence, previous }) = Republished::of(message) else { return Vec::new() };
        if message.subject.as_str() == subjects::LEAD_READ {
            return self.node.handle(Event::Lead { sequence, previous, payload: &message.payload }, now_ms);
        }
        match topic_of(message) {
            Some(topic) => self.node.handle(Event::Delta { topic, sequence, payload: &message.payload }, now_ms),
            None => Vec::new(),
        }
    }

    fn host_request(&mut self, host: HostId, message: &Message, now_ms: u64) -> Vec<Effect> {
        let token = message.headers.as_ref().and_then(|headers| headers.get(subjects::ANSWER_TOKEN)).map(|token| token.as_str());
        let Some(answer) = token.and_then(|token| subjects::answer(&host, token)) else { return Vec::new() };
        let payload = message.payload.to_vec();
        let request = match message.subject == subjects::snap(&host).as_str().into() {
            true => Request::Snapshot { host, payload },
            false => Request::Entropy { host, payload },
        };
        self.request(ReplyTo::Host(answer), request, now_ms)
    }

    fn peer_request(&mut self, message: &Message, now_ms: u64) -> Vec<Effect> {
        let from = message.headers.as_ref().and_then(|headers| headers.get(FROM));
        let own = from.is_some_and(|from| from.as_str() == self.replica_inbox);
        match &message.reply {
            // Another controller, and this one has something to give.
            Some(reply) if !own && self.node.is_synced() => {
                self.request(ReplyTo::Peer(reply.clone()), Request::Replica { payload: message.payload.to_vec() }, now_ms)
            }
            _ => Vec::new(),
        }
    }

    fn request(&mut self, reply_to: ReplyTo, request: Request, now_ms: u64) -> Vec<Effect> {
        self.next_reply += 1;
        self.replies.insert(self.next_reply, reply_to);
        self.node.handle(Event::Request { id: self.next_reply, request }, now_ms)
    }

    /// Several controllers may answer; mixing their chunks would make no whole.
    fn peer_answer(&mut self, message: &Message, now_ms: u64) -> Vec<Effect> {
        let from = message.headers.as_ref().and_then(|headers| headers.get(FROM)).map(|from| from.as_str().to_owned());
        if from.is_none() || *self.peer.get_or_insert_with(|| from.clone().unwrap_or_default()) != from.unwrap_or_default() {
            return Vec::new();
        }
        self.node.handle(Event::Answer(&message.payload), now_ms)
    }

    async fn perform(&mut self, effects: Vec<Effect>, clock: &Clock) -> Result<(), async_nats::Error> {
        let mut open: std::collections::VecDeque<Effect> = effects.into();
        while let Some(effect) = open.pop_front() {
            match effect {
                Effect::ReadHead => {
                    let (js, done) = (self.js.clone(), self.done.clone());
                    tokio::spawn(async move { done.send(Done::Head(js.read_head().await)) });
                }
                Effect::ReserveTerm { at_least, new_life } => {
                    let (js, done) = (self.js.clone(), self.done.clone());
                    tokio::spawn(async move { done.send(Done::Term(js.reserve_term(at_least, new_life).await)) });
                }
                Effect::BeginLife { first } => {
                    let (js, done) = (self.js.clone(), self.done.clone());
                    tokio::spawn(async move { done.send(Done::LifeBegun(js.begin_life(first).await)) });
                }
                Effect::StepDown => {
                    let js = self.js.clone();
                    tokio::spawn(async move { js.step_down().await });
                }
                Effect::ReadTerm => {
                    let (js, done) = (self.js.clone(), self.done.clone());
                    tokio::spawn(async move { done.send(Done::TermRead(js.read_term().await)) });
                }
                Effect::Publish(publish) => {
                    self.attempts = self.attempts.wrapping_add(1);
                    let (js, done, attempt) = (self.js.clone(), self.done.clone(), self.attempts);
                    tokio::spawn(async move {
                        let batch = publish.batch;
                        done.send(Done::Published(batch, js.publish(publish, attempt).await))
                    });
                }
                Effect::AskReplica(payload) => {
                    self.peer = None;
                    let mut headers = HeaderMap::new();
                    headers.insert(FROM, self.replica_inbox.as_str());
                    let inbox = self.replica_inbox.clone();
                    self.client.publish_with_reply_and_headers(subjects::REPLICA, inbox, headers, payload.into()).await?;
                }
                Effect::ReadRecords => {
                    let (js, done) = (self.js.clone(), self.done.clone());
                    tokio::spawn(async move { done.send(Done::Records(js.read_records().await)) });
                }
                Effect::WantDesired { ask } => {
                    let (compiled, done) = ((self.compile)(), self.done.clone());
                    tokio::spawn(async move { done.send(Done::Desired(ask, compiled.await.ok())) });
                }
                Effect::Reply { id, payloads } => self.reply(id, payloads).await?,
                Effect::Leading { term } => {
                    tracing::info!(name = %self.name, term, "leading");
                    self.leading.send_replace(Some(term));
                }
                Effect::Deposed { term } => {
                    tracing::info!(name = %self.name, term, "no longer leading");
                    self.leading.send_replace(None);
                }
                Effect::Committed(mut committed) => {
                    self.convergence.committed(&committed, clock.now_ms());
                    let waiting = committed.proposal.and_then(|number| self.proposals.remove(&number));
                    if let Some((number, answer)) = waiting {
                        committed.proposal = Some(number);
                        let _ = answer.send(Ok(committed));
                    }
                }
                Effect::Refused { proposal, why } => {
                    if let Some((_, answer)) = self.proposals.remove(&proposal) {
                        let _ = answer.send(Err(why));
                    }
                }
                Effect::Report(Incident::BadTerm(why)) => tracing::error!(name = %self.name, "nobody can lead: {why}"),
                Effect::Report(incident) => tracing::debug!(name = %self.name, ?incident, "repairing"),
            }
        }
        Ok(())
    }

    async fn reply(&mut self, id: u64, payloads: Vec<Vec<u8>>) -> Result<(), async_nats::Error> {
        match self.replies.remove(&id) {
            Some(ReplyTo::Host(subject)) => {
                for payload in payloads {
                    self.client.publish(subject.clone(), payload.into()).await?;
                }
            }
            Some(ReplyTo::Peer(subject)) => {
                for payload in payloads {
                    let mut headers = HeaderMap::new();
                    headers.insert(FROM, self.replica_inbox.as_str());
                    self.client.publish_with_headers(subject.clone(), headers, payload.into()).await?;
                }
            }
            None => {}
        }
        Ok(())
    }
}
