//! A simulated host: the real reader of topics over the lean client. Its kernel enforces at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use groupcast_bus_config::{streams, subjects};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::Topic;
use groupcast_topics::Map;
use groupcast_topics::reader::{Commit, Effect, Event, Incident, Reader, Settings, together};

use crate::lean::{Frame, Handler, MessageFrame, Stall, Wire};

/// Subscription numbers. Topics come after the fixed ones.
const ANSWERS_SID: u64 = 1;
const CTL_SID: u64 = 2;
const OVERHEARD_SID: u64 = 3;
const FIRST_TOPIC_SID: u64 = 4;

/// Answers are told apart by the token the request named; the payload says which request of that kind it was.
const SNAP_TOKEN: &str = "s";
const ENTROPY_TOKEN: &str = "e";

/// What the rest of the program learns from a host and decides for it.
pub trait Observer: Send + 'static {
    /// False: the message is only counted by the observer and never reaches the reader, as if a plain subscriber had received it.
    fn on_delivery(&mut self, message: &MessageFrame<'_>) -> bool {
        let _ = message;
        true
    }

    /// Before the reader handles anything: what it exposes has been in force since the last commit, and may not be afterwards.
    fn before_event(&mut self, reader: &Reader) {
        let _ = reader;
    }

    /// The reader exposes a new state; it counts as enforced when this returns.
    fn on_commit(&mut self, commit: &Commit, reader: &Reader);

    fn on_incident(&mut self, incident: Incident) {
        let _ = incident;
    }

    /// What keeps this host from its connection.
    fn stall(&self) -> Option<Stall> {
        None
    }

    /// Another previous revision and delta for the reader than those that arrived: a host with a part of the protocol left out.
    fn sabotaged(&self, delta: Delivered<'_>, reader: &Reader) -> Option<(u64, Vec<u8>)> {
        let _ = (delta, reader);
        None
    }
}

/// A delta that has arrived.
#[derive(Debug, Clone, Copy)]
pub struct Delivered<'a> {
    pub topic: &'a Topic,
    pub revision: u64,
    pub previous: u64,
    pub payload: &'a [u8],
}

pub enum Command {
    /// Begin to follow topics.
    Start,
    /// Listen to a subject that is no topic; what arrives there goes to the observer only.
    Overhear(String),
    /// Look at what the host holds.
    Look(Look),
}

pub type Look = Box<dyn FnOnce(&Reader) + Send>;

pub struct Host<O> {
    reader: Reader,
    observer: O,
    snap: String,
    entropy: String,
    ack: String,
    answers: String,
    ctl: String,
    /// Which topic a subscription number stands for, counted from the first; a connection never uses one again.
    topics: Vec<Option<Topic>>,
    sids: Map<Topic, u64>,
    /// Flushes whose PONG has not come, oldest first.
    flushes: VecDeque<u64>,
    /// The reader's clock counts from here.
    born: Instant,
}

impl<O: Observer> Host<O> {
    pub fn new(host: HostId, settings: impl Into<Arc<Settings>>, seed: u64, observer: O) -> Self {
        Self {
            snap: subjects::snap(&host),
            entropy: subjects::entropy(&host),
            ack: subjects::ack(&host),
            answers: subjects::answers(&host),
            ctl: subjects::ctl(&host),
            reader: Reader::new(host, settings, seed),
            observer,
            topics: Vec::new(),
            sids: Map::default(),
            flushes: VecDeque::new(),
            born: Instant::now(),
        }
    }

    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The connection is gone: what was asked on it is not answered any more. What is held stays in force.
    pub fn disconnected(&mut self) {
        self.topics.clear();
        self.sids.clear();
        self.flushes.clear();
        let now_ms = self.now_ms();
        // Without a connection there is nothing to do but to wait for one.
        self.reader.handle(Event::Disconnected, now_ms);
    }

    /// The process has ended and another begun: it knows nothing, and keeps what its observer knows.
    pub fn begin_anew(&mut self, host: HostId, settings: impl Into<Arc<Settings>>, seed: u64) {
        self.reader = Reader::new(host, settings, seed);
        self.topics.clear();
        self.sids.clear();
        self.flushes.clear();
    }

    pub fn observer(&mut self) -> &mut O {
        &mut self.observer
    }

    pub fn observed(&mut self) -> (&mut O, &Reader) {
        (&mut self.observer, &self.reader)
    }

    fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    fn handle(&mut self, event: Event<'_>, wire: &mut Wire<'_>) {
        let now_ms = self.now_ms();
        self.observer.before_event(&self.reader);
        let mut effects = VecDeque::from(together(self.reader.handle(event, now_ms)));
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Subscribe(topic) => self.subscribe(topic, wire),
                Effect::Unsubscribe(topic) => {
                    if let Some(sid) = self.sids.remove(&topic) {
                        self.topics[(sid - FIRST_TOPIC_SID) as usize] = None;
                        wire.outbound.unsubscribe(sid);
                    }
                }
                Effect::Flush(number) => {
                    self.flushes.push_back(number);
                    wire.outbound.ping();
                }
                Effect::Ask(payload) => request(wire, &self.snap, SNAP_TOKEN, &payload),
                Effect::Entropy(payload) => request(wire, &self.entropy, ENTROPY_TOKEN, &payload),
                Effect::Ack(payload) => wire.outbound.publish(&self.ack, None, &payload),
                Effect::Commit(commit) => {
                    self.observer.on_commit(&commit, &self.reader);
                    effects.extend(self.reader.handle(Event::Enforced(commit.number), now_ms));
                }
                Effect::Report(incident) => self.observer.on_incident(incident),
                // Nothing is enforced in part here: the simulated kernel has no rules to tell safe from unsafe.
                Effect::Overdue(_) => {}
            }
        }
    }

    fn subscribe(&mut self, topic: Topic, wire: &mut Wire<'_>) {
        if self.sids.contains_key(&topic) {
            return;
        }
        let sid = FIRST_TOPIC_SID + self.topics.len() as u64;
        wire.outbound.subscribe(&subjects::read(&topic), sid);
        self.sids.insert(topic.clone(), sid);
        self.topics.push(Some(topic));
    }

    fn on_message(&mut self, message: MessageFrame<'_>, wire: &mut Wire<'_>) {
        match message.sid {
            ANSWERS_SID => match subjects::answer_token(message.subject) {
                Some(SNAP_TOKEN) => self.handle(Event::Answer(message.payload), wire),
                Some(ENTROPY_TOKEN) => self.handle(Event::EntropyAnswer(message.payload), wire),
                _ => {}
            },
            CTL_SID => self.handle(Event::Nudge(message.payload), wire),
            OVERHEARD_SID => {
                self.observer.on_delivery(&message);
            }
            sid => {
                let number = sid.checked_sub(FIRST_TOPIC_SID).and_then(|number| usize::try_from(number).ok());
                if let Some(topic) = number.and_then(|number| self.topics.get(number)?.as_ref())
                    && self.observer.on_delivery(&message)
                    && let Some((revision, previous)) = republished(&message)
                {
                    let delta = Delivered { topic, revision, previous, payload: message.payload };
                    let instead = self.observer.sabotaged(delta, &self.reader);
                    let (previous, payload) =
                        instead.as_ref().map_or((previous, message.payload), |(previous, payload)| (*previous, payload));
                    let event = Event::Delta { topic: topic.clone(), revision, previous, payload };
                    self.handle(event, wire);
                }
            }
        }
    }
}

fn request(wire: &mut Wire<'_>, subject: &str, token: &str, payload: &[u8]) {
    wire.outbound.publish_with_headers(subject, None, &[(subjects::ANSWER_TOKEN, token)], payload);
}

/// Revision and previous revision of a message that TOPICS has stored under the very topic it arrives for; `None` for any other,
/// which somebody else must have published.
fn republished(message: &MessageFrame<'_>) -> Option<(u64, u64)> {
    let (mut stream, mut subject, mut revision, mut previous) = (None, None, None, None);
    // As bytes: this is looked at for every message to every host.
    for (name, value) in message.headers.fields() {
        let text = || std::str::from_utf8(value).ok();
        match name {
            b"Nats-Stream" => stream = text(),
            b"Nats-Subject" => subject = text(),
            b"Nats-Sequence" => revision = text().and_then(|value| value.parse().ok()),
            b"Nats-Last-Sequence" => previous = text().and_then(|value| value.parse().ok()),
            _ => {}
        }
    }
    if stream != Some(streams::TOPICS.name) || !subjects::is_republished(subject?, message.subject) {
        return None;
    }
    Some((revision?, previous?))
}

impl<O: Observer> Handler for Host<O> {
    type Command = Command;

    fn on_frame(&mut self, frame: Frame<'_>, wire: &mut Wire<'_>) {
        match frame {
            Frame::Message(message) => self.on_message(message, wire),
            Frame::Pong => {
                if let Some(number) = self.flushes.pop_front() {
                    self.handle(Event::Flushed(number), wire);
                }
            }
            Frame::Info(_) | Frame::Ping | Frame::Ok | Frame::Error(_) => {}
        }
    }

    fn on_command(&mut self, command: Command, wire: &mut Wire<'_>) {
        match command {
            Command::Start => {
                wire.outbound.subscribe(&self.answers, ANSWERS_SID);
                wire.outbound.subscribe(&self.ctl, CTL_SID);
                self.handle(Event::Connected, wire);
            }
            Command::Look(look) => look(&self.reader),
            Command::Overhear(subject) => wire.outbound.subscribe(&subject, OVERHEARD_SID),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.reader.deadline_ms().map(|deadline| self.born + Duration::from_millis(deadline))
    }

    fn on_deadline(&mut self, _now: Instant, wire: &mut Wire<'_>) {
        self.handle(Event::Tick, wire);
    }

    fn stall(&self) -> Option<Stall> {
        self.observer.stall()
    }
}
