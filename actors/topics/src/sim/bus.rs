//! The simulated server, its connections and the schedule of everything.

use crate::Map;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use groupcast_policy::doc::Document;
use groupcast_policy::needs::needed;
use groupcast_policy::topic::Topic;

use super::check::History;
use super::policy::{Universe, host};
use crate::batch::Proposal;
use crate::convergence::{self, Convergence};
use crate::node::{self, Fate, Node, Publish, Request};
use crate::random::Random;
use crate::reader::{self, Reader};

/// Probabilities in thousandths.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub lose: u64,
    pub duplicate: u64,
    /// A message overtakes others on its connection.
    pub reorder: u64,
    /// A publish is answered with a wrong, late or no answer.
    pub confuse: u64,
    pub crash_host: u64,
    pub crash_node: u64,
    pub partition: u64,
    pub lose_stream: u64,
    /// A published payload is damaged on its way.
    pub corrupt: u64,
    pub delay_max_ms: u64,
}

impl Faults {
    pub fn none() -> Self {
        Self { delay_max_ms: 20, ..Self::default() }
    }

    pub fn all() -> Self {
        Self {
            lose: 20,
            duplicate: 20,
            reorder: 20,
            confuse: 100,
            crash_host: 3,
            crash_node: 4,
            partition: 6,
            lose_stream: 1,
            corrupt: 2,
            delay_max_ms: 60,
        }
    }

    fn is_exact(&self) -> bool {
        self.lose + self.duplicate + self.reorder + self.corrupt + self.partition + self.lose_stream == 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Peer {
    Host(usize),
    Node(usize),
}

enum Message {
    Lead {
        sequence: u64,
        previous: u64,
        payload: Vec<u8>,
    },
    Delta {
        topic: Topic,
        sequence: u64,
        previous: u64,
        payload: Vec<u8>,
    },
    Flushed(u64),
    Answer(Vec<u8>),
    EntropyAnswer(Vec<u8>),
    Nudge(Vec<u8>),
    Request {
        id: u64,
        request: Request,
    },
    Ack {
        host: usize,
        payload: Vec<u8>,
    },
    Head(node::Head),
    Term(Option<u64>),
    TermRead(u64),
    Published {
        batch: u64,
        fate: Fate,
    },
    Records(node::Records),
    /// A peer asks for everything; the answer goes back to it.
    PeerAnswer(Vec<u8>),
    Connected,
    Disconnected,
}

impl Message {
    fn describe(&self) -> String {
        match self {
            Message::Lead { sequence, previous, .. } => format!("lead {sequence} after {previous}"),
            Message::Delta { topic, sequence, previous, .. } => format!("delta {topic} {sequence} after {previous}"),
            Message::Flushed(number) => format!("flushed {number}"),
            Message::Answer(_) => "answer".to_owned(),
            Message::EntropyAnswer(payload) => format!("{:?}", groupcast_messages::EntropyAnswer::decode(payload)),
            Message::Nudge(_) => "nudge".to_owned(),
            Message::Request { id, .. } => format!("request {id}"),
            Message::Ack { host, .. } => format!("ack of {host}"),
            Message::Head(head) => format!("head {:?}", head.as_ref().map(|(sequence, _)| sequence)),
            Message::TermRead(term) => format!("highest term {term}"),
            Message::Term(term) => format!("term {term:?}"),
            Message::Published { batch, fate } => format!("published {batch} {fate:?}"),
            Message::Records(records) => format!("{} records", records.topics.len()),
            Message::PeerAnswer(_) => "answer of a peer".to_owned(),
            Message::Connected => "connected".to_owned(),
            Message::Disconnected => "disconnected".to_owned(),
        }
    }
}

enum Step {
    Deliver {
        to: Peer,
        life: u64,
        message: Message,
    },
    /// Reaches the server.
    Publish {
        from: usize,
        life: u64,
        server_life: u64,
        publish: Publish,
    },
    Tick,
}

struct HostState {
    reader: Reader,
    subscribed: HashSet<Topic>,
}

struct NodeState {
    node: Node,
    convergence: Convergence,
    replies: Map<u64, Reply>,
    /// The desired state and the cut that were last seen to agree.
    compiled: (u64, groupcast_messages::Cut),
}

#[derive(Clone, Copy)]
enum Reply {
    Snapshot(usize),
    Entropy(usize),
    Replica(usize),
}

#[derive(Default)]
struct Connection {
    up: bool,
    /// Counts connects and crashes: what was sent on an earlier one never arrives.
    life: u64,
    last_delivery_ms: u64,
}

#[derive(Default)]
struct Stream {
    sequence: u64,
    head: node::Head,
    last: Map<Topic, (u64, Vec<u8>)>,
}

/// What a run showed, for those who want to see that it was not idle.
#[derive(Debug, Default, Clone)]
pub struct Outcome {
    pub batches: u64,
    pub commits: u64,
    pub leaders: u64,
    pub asks: u64,
    pub crashes: u64,
    pub lives: u64,
    pub tallied: u64,
}

pub struct World {
    pub outcome: Outcome,
    random: Random,
    faults: Faults,
    /// Nothing is ever lost: every exposed state must be exactly the one at its cut.
    exact: bool,
    universe: Universe,
    now_ms: u64,
    steps: BTreeMap<(u64, u64), Step>,
    next_step: u64,
    hosts: Vec<HostState>,
    nodes: Vec<NodeState>,
    connections: Map<Peer, Connection>,
    stream: Option<Stream>,
    catalog_term: u64,
    history: History,
    desired: Map<Topic, Document>,
    desired_version: u64,
    server_life: u64,
    trace: bool,
    next_request: u64,
    failure: Option<String>,
}

impl World {
    pub fn new(seed: u64, universe: Universe, nodes: usize, faults: Faults) -> Self {
        let mut world = Self {
            outcome: Outcome::default(),
            random: Random::new(seed),
            faults,
            exact: faults.is_exact(),
            universe,
            now_ms: 1,
            steps: BTreeMap::new(),
            next_step: 0,
            hosts: Vec::new(),
            nodes: Vec::new(),
            connections: Map::default(),
            stream: None,
            catalog_term: 0,
            history: History::default(),
            desired: Map::default(),
            desired_version: 0,
            server_life: 0,
            trace: std::env::var_os("GROUPCAST_TRACE").is_some(),
            next_request: 0,
            failure: None,
        };
        world.create_stream(0);
        for index in 0..nodes {
            let state = world.new_node(index);
            world.nodes.push(state);
            world.reconnect(Peer::Node(index));
        }
        for index in 0..universe.hosts as usize {
            let state = world.new_host(index);
            world.hosts.push(state);
            world.reconnect(Peer::Host(index));
        }
        world.schedule(0, Step::Tick);
        world
    }

    /// Runs with faults for `faulty_ms`, then quietly until everything must have settled, and judges.
    pub fn run(mut self, faulty_ms: u64) -> Result<Outcome, String> {
        self.run_until(faulty_ms, true)?;
        let exact = self.exact;
        self.faults = Faults { delay_max_ms: self.faults.delay_max_ms, ..Faults::none() };
        let peers: Vec<Peer> = self.connections.iter().filter(|(_, connection)| !connection.up).map(|(peer, _)| *peer).collect();
        peers.into_iter().collect::<BTreeSet<_>>().into_iter().for_each(|peer| self.reconnect(peer));
        // A lease, a hand-over, and the slowest periodic check.
        self.run_until(faulty_ms + if exact { 20_000 } else { 150_000 }, false)?;
        self.judge()?;
        Ok(self.outcome)
    }

    fn run_until(&mut self, end_ms: u64, active: bool) -> Result<(), String> {
        while self.now_ms < end_ms {
            let Some(((at, _), step)) = self.steps.pop_first() else { break };
            self.now_ms = at;
            match step {
                Step::Deliver { to, life, message } => {
                    if self.connections.get(&to).is_some_and(|connection| connection.life == life) {
                        self.deliver(to, message);
                    }
                }
                Step::Publish { from, life, server_life, publish } => {
                    // What was on its way to a server that is gone is gone too; a client may be gone, and its last word still arrive.
                    if server_life == self.server_life {
                        self.publish(from, life, publish);
                    }
                }
                Step::Tick => {
                    if active {
                        self.stir();
                    }
                    self.tick();
                    let pause = if active { 1 + self.now_ms % 4 } else { self.pause() };
                    self.schedule(pause, Step::Tick);
                }
            }
            if let Some(failure) = self.failure.take() {
                return Err(format!("at {} ms: {failure}", self.now_ms));
            }
        }
        Ok(())
    }

    /// Until something is due.
    fn pause(&self) -> u64 {
        let hosts = self.hosts.iter().filter_map(|state| state.reader.deadline_ms());
        let nodes = self.nodes.iter().filter_map(|state| state.node.deadline_ms());
        let nudges =
            self.nodes.iter().filter(|state| state.node.is_leading()).filter_map(|state| state.convergence.deadline_ms());
        hosts.chain(nodes).chain(nudges).min().map_or(20, |due| due.saturating_sub(self.now_ms).clamp(1, 20))
    }

    fn judge(&mut self) -> Result<(), String> {
        if !self.nodes.iter().any(|state| state.node.is_leading()) {
            return Err("nobody leads in the end".to_owned());
        }
        for state in &self.nodes {
            let published: BTreeMap<&Topic, &Document> =
                state.node.replica().documents().filter(|(_, d)| d.content().is_some()).collect();
            let desired: BTreeMap<&Topic, &Document> = self.desired.iter().filter(|(_, d)| d.content().is_some()).collect();
            if published != desired {
                let differing: Vec<_> =
                    published.keys().chain(desired.keys()).filter(|t| published.get(*t) != desired.get(*t)).collect();
                return Err(format!(
                    "a controller does not hold what is desired: {differing:?}, at {:?}",
                    state.node.replica().cut()
                ));
            }
        }
        for (index, state) in self.hosts.iter().enumerate() {
            let wanted = needed(&host(index as u64), &self.desired);
            let held: BTreeSet<Topic> = state.reader.documents().map(|(topic, _)| topic.clone()).collect();
            if held != wanted
                || state.reader.subscriptions() != wanted
                || state.subscribed.iter().cloned().collect::<BTreeSet<_>>() != wanted
            {
                return Err(format!("host {index} holds {held:?}, follows {:?}, needs {wanted:?}", state.reader.subscriptions()));
            }
            for (topic, document) in state.reader.documents() {
                if Some(document) != self.desired.get(topic) && document.content().is_some() {
                    return Err(format!(
                        "host {index} ends with another {topic} at {:?} of {:?}",
                        state.reader.cut(),
                        self.history.head()
                    ));
                }
            }
            if state.reader.pending() > 0 {
                return Err(format!("host {index} still holds {} deltas back", state.reader.pending()));
            }
        }
        Ok(())
    }

    fn chance(&mut self, thousandths: u64) -> bool {
        self.random.below(1_000) < thousandths
    }

    fn schedule(&mut self, after_ms: u64, step: Step) {
        self.next_step += 1;
        self.steps.insert((self.now_ms + after_ms, self.next_step), step);
    }

    fn delay(&mut self) -> u64 {
        let max = self.faults.delay_max_ms;
        // Mostly quick, sometimes slow.
        if self.random.below(10) == 0 { self.random.below(max + 1) } else { self.random.below(3) }
    }

    /// To a client, in order unless a fault says otherwise.
    fn send(&mut self, to: Peer, message: Message) {
        let delay = self.delay();
        let at = self.now_ms + delay;
        let overtake = self.chance(self.faults.reorder);
        let Some(connection) = self.connections.get_mut(&to).filter(|connection| connection.up) else { return };
        let at = if overtake { at } else { at.max(connection.last_delivery_ms) };
        connection.last_delivery_ms = connection.last_delivery_ms.max(at);
        let life = connection.life;
        self.schedule(at - self.now_ms, Step::Deliver { to, life, message });
    }

    fn is_up(&self, peer: Peer) -> bool {
        self.connections.get(&peer).is_some_and(|connection| connection.up)
    }

    fn new_node(&mut self, index: usize) -> NodeState {
        let settings = node::Settings { name: format!("c{index}"), ..Default::default() };
        NodeState {
            node: Node::new(settings, self.random.draw()),
            convergence: Convergence::new(convergence::Settings::default()),
            replies: Map::default(),
            compiled: Default::default(),
        }
    }

    fn new_host(&mut self, index: usize) -> HostState {
        let reader = Reader::new(host(index as u64), reader::Settings::default(), self.random.draw());
        HostState { reader, subscribed: HashSet::new() }
    }

    /// `base`: the sequence it begins after.
    fn create_stream(&mut self, base: u64) {
        self.stream = Some(Stream { sequence: base, ..Stream::default() });
        self.history.stream_began();
        self.outcome.lives += 1;
    }

    fn reconnect(&mut self, peer: Peer) {
        let connection = self.connections.entry(peer).or_default();
        connection.up = true;
        connection.life += 1;
        connection.last_delivery_ms = 0;
        if let Peer::Host(index) = peer
            && let Some(state) = self.hosts.get_mut(index)
        {
            state.subscribed.clear();
        }
        self.send(peer, Message::Connected);
    }

    /// Random events of the world: changes and faults.
    fn stir(&mut self) {
        if self.chance(150) {
            self.universe.change(&mut self.desired, &mut self.random);
            self.desired_version += 1;
        }
        if self.chance(self.faults.crash_host) {
            let index = self.random.below(self.hosts.len() as u64) as usize;
            self.hosts[index] = self.new_host(index);
            self.outcome.crashes += 1;
            self.reconnect(Peer::Host(index));
        }
        if self.chance(self.faults.crash_node) {
            let index = self.random.below(self.nodes.len() as u64) as usize;
            self.nodes[index] = self.new_node(index);
            self.outcome.crashes += 1;
            self.reconnect(Peer::Node(index));
        }
        if self.chance(self.faults.partition) {
            let (hosts, nodes) = (self.hosts.len() as u64, self.nodes.len() as u64);
            let pick = self.random.below(hosts + nodes);
            let peer = if pick < hosts { Peer::Host(pick as usize) } else { Peer::Node((pick - hosts) as usize) };
            if self.is_up(peer) {
                if self.chance(500) {
                    self.send(peer, Message::Disconnected);
                }
                if let Some(connection) = self.connections.get_mut(&peer) {
                    connection.up = false;
                }
            } else {
                self.reconnect(peer);
            }
        }
        if self.chance(self.faults.lose_stream) {
            if self.chance(500) {
                // Deleted and created again: the creator begins at a random sequence, so that no fence of the past fits.
                let base = self.random.draw() >> 24;
                self.create_stream(base);
            } else {
                // The server was restarted: the same sequences again, but every connection was cut.
                self.create_stream(0);
                self.server_life += 1;
                let peers: BTreeSet<Peer> = self.connections.keys().copied().collect();
                peers.into_iter().for_each(|peer| self.reconnect(peer));
            }
        }
    }

    fn tick(&mut self) {
        for index in 0..self.hosts.len() {
            if self.hosts[index].reader.deadline_ms().is_some_and(|due| due <= self.now_ms) {
                let effects = self.hosts[index].reader.handle(reader::Event::Tick, self.now_ms);
                self.host_effects(index, effects);
            }
        }
        for index in 0..self.nodes.len() {
            if self.nodes[index].node.deadline_ms().is_some_and(|due| due <= self.now_ms) {
                let effects = self.nodes[index].node.handle(node::Event::Tick, self.now_ms);
                self.node_effects(index, effects);
            }
            self.compile(index);
            if self.nodes[index].node.is_leading() {
                for (id, nudge) in self.nodes[index].convergence.tick(self.now_ms) {
                    let position = (0..self.hosts.len()).find(|h| host(*h as u64) == id);
                    if let Some(position) = position.filter(|_| self.is_up(Peer::Node(index))) {
                        self.send_lossy(Peer::Host(position), Message::Nudge(nudge));
                    }
                }
            }
        }
    }

    /// Stands in for the compiler: an idle leader publishes whatever differs from what is desired.
    fn compile(&mut self, index: usize) {
        let state = &self.nodes[index];
        let version = (self.desired_version, state.node.replica().cut());
        if !state.node.is_leading() || state.node.queued() > 0 || state.compiled == version {
            return;
        }
        let absent = Document::absent();
        let replica = state.node.replica();
        let mut edits = Vec::new();
        let topics: BTreeSet<&Topic> = self.desired.keys().chain(replica.topics()).collect();
        for topic in topics {
            let have = groupcast_policy::needs::Documents::document(replica, topic).unwrap_or(&absent);
            let want = self.desired.get(topic).unwrap_or(&absent);
            edits.extend(have.edit_to(want).map(|edit| (topic.clone(), edit)));
        }
        if edits.is_empty() {
            self.nodes[index].compiled = version;
            return;
        }
        self.outcome.tallied += u64::from(edits.len() > crate::LISTED_TOPICS_MAX);
        self.next_request += 1;
        let proposal = Proposal { number: self.next_request, change: self.next_request, edits, ..Default::default() };
        let effects = self.nodes[index].node.handle(node::Event::Propose(proposal), self.now_ms);
        self.node_effects(index, effects);
    }

    fn send_lossy(&mut self, to: Peer, message: Message) {
        if !self.chance(self.faults.lose) {
            self.send(to, message);
        }
    }

    fn publish(&mut self, from: usize, life: u64, publish: Publish) {
        let Publish { batch, expected, lead, messages } = publish;
        let same_life = self.connections.get(&Peer::Node(from)).is_some_and(|connection| connection.life == life);
        let confused = self.chance(self.faults.confuse);
        if confused && self.chance(300) {
            // Collided with something that will come to nothing.
            if same_life {
                self.send(Peer::Node(from), Message::Published { batch, fate: Fate::Undecided });
            }
            return;
        }
        let Some(stream) = &mut self.stream else { return };
        let head = stream.head.as_ref().map_or(0, |(sequence, _)| *sequence);
        let fate = if head == expected {
            let sequence = stream.sequence + 1;
            stream.sequence = sequence + messages.len() as u64;
            let previous_lead = head;
            stream.head = Some((sequence, lead.clone()));
            if let Err(failure) = self.history.committed(sequence, &lead, &messages) {
                self.failure = Some(failure);
            }
            self.outcome.batches += 1;
            let last = sequence + messages.len() as u64;
            let count = messages.len() as u64 + 1;
            self.republish(sequence, previous_lead, lead, messages);
            Fate::Committed { last, count }
        } else {
            Fate::Refused
        };
        if confused || !same_life {
            return; // the answer is lost
        }
        self.send(Peer::Node(from), Message::Published { batch, fate });
    }

    fn republish(&mut self, sequence: u64, previous_lead: u64, lead: Vec<u8>, messages: Vec<(Topic, Vec<u8>)>) {
        for node in 0..self.nodes.len() {
            self.send_lossy(Peer::Node(node), Message::Lead { sequence, previous: previous_lead, payload: lead.clone() });
        }
        for (index, (topic, payload)) in messages.into_iter().enumerate() {
            let sequence = sequence + 1 + index as u64;
            let Some(stream) = &mut self.stream else { return };
            let previous = stream.last.insert(topic.clone(), (sequence, payload.clone())).map_or(0, |(sequence, _)| sequence);
            let mut to: Vec<Peer> = (0..self.nodes.len()).map(Peer::Node).collect();
            to.extend((0..self.hosts.len()).filter(|h| self.hosts[*h].subscribed.contains(&topic)).map(Peer::Host));
            for peer in to {
                let copies = 1 + usize::from(self.chance(self.faults.duplicate));
                for _ in 0..copies {
                    let mut payload = payload.clone();
                    if self.chance(self.faults.corrupt) && !payload.is_empty() {
                        let at = self.random.below(payload.len() as u64) as usize;
                        payload[at] ^= 1 << self.random.below(8);
                    }
                    self.send_lossy(peer, Message::Delta { topic: topic.clone(), sequence, previous, payload });
                }
            }
        }
    }

    fn deliver(&mut self, to: Peer, message: Message) {
        let now_ms = self.now_ms;
        if self.trace {
            eprintln!("{now_ms} {to:?} <- {}", message.describe());
        }
        match to {
            Peer::Host(index) => {
                let reader = &mut self.hosts[index].reader;
                use reader::Event;
                let effects = match message {
                    Message::Connected => reader.handle(Event::Connected, now_ms),
                    Message::Disconnected => reader.handle(Event::Disconnected, now_ms),
                    Message::Flushed(number) => reader.handle(Event::Flushed(number), now_ms),
                    Message::Delta { topic, sequence, previous, payload } => {
                        reader.handle(Event::Delta { topic, revision: sequence, previous, payload: &payload }, now_ms)
                    }
                    Message::Answer(payload) => reader.handle(Event::Answer(&payload), now_ms),
                    Message::EntropyAnswer(payload) => reader.handle(Event::EntropyAnswer(&payload), now_ms),
                    Message::Nudge(payload) => reader.handle(Event::Nudge(&payload), now_ms),
                    _ => Vec::new(),
                };
                self.host_effects(index, effects);
            }
            Peer::Node(index) => {
                let node = &mut self.nodes[index].node;
                use node::Event;
                let effects = match message {
                    Message::Connected => node.handle(Event::Connected, now_ms),
                    Message::Disconnected => node.handle(Event::Disconnected, now_ms),
                    Message::Lead { sequence, previous, payload } => {
                        node.handle(Event::Lead { sequence, previous, payload: &payload }, now_ms)
                    }
                    Message::Delta { topic, sequence, payload, .. } => {
                        node.handle(Event::Delta { topic, sequence, payload: &payload }, now_ms)
                    }
                    Message::Head(head) => node.handle(Event::Head(Some(head)), now_ms),
                    Message::Term(term) => node.handle(Event::TermReserved(term), now_ms),
                    Message::TermRead(term) => node.handle(Event::TermRead(Some(term)), now_ms),
                    Message::Published { batch, fate } => node.handle(Event::Published { batch, fate }, now_ms),
                    Message::Records(records) => node.handle(Event::Records(Some(records)), now_ms),
                    Message::PeerAnswer(payload) => node.handle(Event::Answer(&payload), now_ms),
                    Message::Request { id, request } => node.handle(Event::Request { id, request }, now_ms),
                    Message::Ack { host: from, payload } => {
                        if let Ok(ack) = groupcast_messages::Ack::decode(&payload) {
                            self.nodes[index].convergence.acknowledged(&host(from as u64), &ack, now_ms);
                        }
                        Vec::new()
                    }
                    _ => Vec::new(),
                };
                self.node_effects(index, effects);
            }
        }
    }

    fn host_effects(&mut self, index: usize, effects: Vec<reader::Effect>) {
        use reader::Effect;
        let mut open: std::collections::VecDeque<Effect> = effects.into();
        let up = self.is_up(Peer::Host(index));
        while let Some(effect) = open.pop_front() {
            if self.trace {
                let mut text = format!("{effect:?}");
                text.truncate(300);
                eprintln!("{} Host({index}) -> {text}", self.now_ms);
            }
            match effect {
                Effect::Subscribe(topic) if up => {
                    self.hosts[index].subscribed.insert(topic);
                }
                Effect::Unsubscribe(topic) => {
                    self.hosts[index].subscribed.remove(&topic);
                }
                Effect::Flush(number) => self.send(Peer::Host(index), Message::Flushed(number)),
                Effect::Ask(payload) => {
                    self.outcome.asks += 1;
                    self.ask_a_node(index, Request::Snapshot { host: host(index as u64), payload }, Reply::Snapshot(index));
                }
                Effect::Entropy(payload) => {
                    self.ask_a_node(index, Request::Entropy { host: host(index as u64), payload }, Reply::Entropy(index));
                }
                Effect::Ack(payload) if up => {
                    for node in 0..self.nodes.len() {
                        self.send_lossy(Peer::Node(node), Message::Ack { host: index, payload: payload.clone() });
                    }
                }
                Effect::Commit(commit) => {
                    self.outcome.commits += 1;
                    if let Err(failure) = self.history.check(&self.hosts[index].reader, self.exact) {
                        self.failure = Some(format!("host {index}: {failure}"));
                    }
                    open.extend(self.hosts[index].reader.handle(reader::Event::Enforced(commit.number), self.now_ms));
                }
                _ => {}
            }
        }
    }

    fn ask_a_node(&mut self, from: usize, request: Request, reply: Reply) {
        let up: Vec<usize> = (0..self.nodes.len()).filter(|n| self.is_up(Peer::Node(*n))).collect();
        if up.is_empty() || !self.is_up(Peer::Host(from)) || self.chance(self.faults.lose) {
            return;
        }
        let node = up[self.random.below(up.len() as u64) as usize];
        self.request(node, request, reply);
    }

    fn request(&mut self, node: usize, request: Request, reply: Reply) {
        self.next_request += 1;
        self.nodes[node].replies.insert(self.next_request, reply);
        self.send(Peer::Node(node), Message::Request { id: self.next_request, request });
    }

    fn node_effects(&mut self, index: usize, effects: Vec<node::Effect>) {
        use node::Effect;
        let me = Peer::Node(index);
        let mut open: std::collections::VecDeque<Effect> = effects.into();
        while let Some(effect) = open.pop_front() {
            let up = self.is_up(me);
            if self.trace {
                let mut text = format!("{effect:?}");
                text.truncate(160);
                eprintln!("{} Node({index}) -> {text}", self.now_ms);
            }
            match effect {
                Effect::ReadHead if up && !self.chance(self.faults.lose) => {
                    let head = self.stream.as_ref().and_then(|stream| stream.head.clone());
                    self.send(me, Message::Head(head));
                }
                Effect::ReserveTerm { at_least } if up => {
                    let term = at_least.max(self.catalog_term + 1);
                    self.catalog_term = term;
                    let answer = (!self.chance(self.faults.confuse)).then_some(term);
                    self.send(me, Message::Term(answer));
                }
                Effect::ReadTerm if up && !self.chance(self.faults.lose) => {
                    let term = self.catalog_term;
                    self.send(me, Message::TermRead(term));
                }
                Effect::Publish(publish) if up => {
                    let after = if self.chance(self.faults.confuse / 4) { self.random.below(6_000) } else { self.delay() };
                    let life = self.connections.get(&me).map_or(0, |connection| connection.life);
                    let server_life = self.server_life;
                    self.schedule(after, Step::Publish { from: index, life, server_life, publish });
                }
                Effect::AskReplica(payload) if up => {
                    let others = (0..self.nodes.len()).filter(|n| *n != index && self.is_up(Peer::Node(*n)));
                    let synced: Vec<usize> = others.filter(|n| self.nodes[*n].node.is_synced()).collect();
                    if !synced.is_empty() {
                        let node = synced[self.random.below(synced.len() as u64) as usize];
                        self.request(node, Request::Replica { payload }, Reply::Replica(index));
                    }
                }
                Effect::ReadRecords if up => {
                    let topics =
                        self.stream.iter().flat_map(|s| s.last.iter().map(|(t, (q, p))| (t.clone(), *q, p.clone()))).collect();
                    let head = self.stream.as_ref().and_then(|stream| stream.head.clone());
                    let records = node::Records { head, topics };
                    self.send(me, Message::Records(records));
                }
                Effect::WantDesired => {
                    let desired = self.desired.clone();
                    open.extend(self.nodes[index].node.handle(node::Event::Desired(desired), self.now_ms));
                }
                Effect::Reply { id, payloads } if up => {
                    let Some(reply) = self.nodes[index].replies.remove(&id) else { continue };
                    for payload in payloads {
                        match reply {
                            Reply::Snapshot(to) => self.send_lossy(Peer::Host(to), Message::Answer(payload)),
                            Reply::Entropy(to) => self.send_lossy(Peer::Host(to), Message::EntropyAnswer(payload)),
                            Reply::Replica(to) => self.send_lossy(Peer::Node(to), Message::PeerAnswer(payload)),
                        }
                    }
                }
                Effect::Leading { .. } => self.outcome.leaders += 1,
                Effect::Committed(committed) => self.nodes[index].convergence.committed(&committed, self.now_ms),
                _ => {}
            }
        }
    }
}
