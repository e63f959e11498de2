//! The simulated world: who is in it, their connections, and the schedule of everything.

use crate::Map;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use groupcast_policy::doc::Document;
use groupcast_policy::topic::Topic;

use super::check::History;
use super::faults::Faults;
use super::message::Message;
use super::policy::{Controller, Moment, Script, host};
use crate::batch::Proposal;
use crate::convergence::{self, Convergence};
use crate::node::{self, Node, Publish};
use crate::random::Random;
use crate::reader::{self, Reader};
use crate::term::Reserved;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Peer {
    Host(usize),
    Node(usize),
}

pub(super) enum Step {
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
    /// Reaches the servers: another leader of the stream.
    ElectLeader,
    /// Reaches the server.
    BeginLife {
        from: usize,
        life: u64,
        server_life: u64,
        first: u64,
    },
    /// A compile from scratch has ended.
    Compiled {
        node: usize,
        process: u64,
        ask: u64,
        desired: Option<node::Desired>,
    },
    Tick,
}

pub(super) struct HostState {
    pub(super) reader: Reader,
    pub(super) subscribed: HashSet<Topic>,
}

pub(super) struct NodeState {
    pub(super) node: Node,
    /// Another one after every crash.
    pub(super) process: u64,
    pub(super) convergence: Convergence,
    pub(super) replies: Map<u64, Reply>,
    /// The desired state and the cut that were last seen to agree.
    pub(super) compiled: (u64, groupcast_messages::Cut),
}

#[derive(Clone, Copy)]
pub(super) enum Reply {
    Snapshot(usize),
    Entropy(usize),
    Replica(usize),
}

#[derive(Default)]
pub(super) struct Connection {
    pub(super) up: bool,
    /// Counts connects and crashes: what was sent on an earlier one never arrives.
    pub(super) life: u64,
    pub(super) last_delivery_ms: u64,
}

#[derive(Default)]
pub(super) struct Stream {
    pub(super) sequence: u64,
    pub(super) head: node::Head,
    pub(super) last: Map<Topic, (u64, Vec<u8>)>,
    /// Every batch is undecided, until it gets another leader.
    pub(super) stuck: bool,
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
    /// Batches of several changes that have nothing to do with each other.
    pub divided: u64,
    /// How often the stream called everything undecided until it got another leader.
    pub stuck: u64,
}

pub struct World {
    pub outcome: Outcome,
    pub(super) random: Random,
    pub(super) faults: Faults,
    /// Nothing is ever lost: every exposed state must be exactly the one at its cut.
    pub(super) exact: bool,
    pub(super) script: Box<dyn Script>,
    pub(super) now_ms: u64,
    pub(super) steps: BTreeMap<(u64, u64), Step>,
    pub(super) next_step: u64,
    pub(super) hosts: Vec<HostState>,
    pub(super) nodes: Vec<NodeState>,
    pub(super) connections: Map<Peer, Connection>,
    pub(super) stream: Option<Stream>,
    pub(super) reserved: Reserved,
    pub(super) history: History,
    pub(super) desired: Map<Topic, Document>,
    pub(super) desired_version: u64,
    pub(super) server_life: u64,
    pub(super) trace: bool,
    pub(super) next_request: u64,
    pub(super) failure: Option<String>,
}

impl World {
    pub fn new(seed: u64, script: impl Script + 'static, nodes: usize, faults: Faults) -> Self {
        let hosts = script.hosts() as usize;
        let mut world = Self {
            outcome: Outcome::default(),
            random: Random::new(seed),
            faults,
            exact: faults.is_exact(),
            script: Box::new(script),
            now_ms: 1,
            steps: BTreeMap::new(),
            next_step: 0,
            hosts: Vec::new(),
            nodes: Vec::new(),
            connections: Map::default(),
            stream: None,
            reserved: Reserved::default(),
            history: History::default(),
            desired: Map::default(),
            desired_version: 0,
            server_life: 0,
            trace: std::env::var_os("GROUPCAST_TRACE").is_some(),
            next_request: 0,
            failure: None,
        };
        world.create_stream();
        for index in 0..nodes {
            let state = world.new_node(index);
            world.nodes.push(state);
            world.reconnect(Peer::Node(index));
        }
        for index in 0..hosts {
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

    pub(super) fn run_until(&mut self, end_ms: u64, active: bool) -> Result<(), String> {
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
                Step::ElectLeader => {
                    if let Some(stream) = &mut self.stream {
                        stream.stuck = false;
                    }
                }
                Step::BeginLife { from, life, server_life, first } => {
                    if server_life == self.server_life {
                        self.begin_life(first);
                        let same_life = self.connections.get(&Peer::Node(from)).is_some_and(|c| c.life == life);
                        if same_life && !self.chance(self.faults.confuse) {
                            self.send(Peer::Node(from), Message::LifeBegun(true));
                        }
                    }
                }
                Step::Compiled { node, process, ask, desired } => {
                    if self.nodes[node].process == process {
                        let effects = self.nodes[node].node.handle(node::Event::Desired { ask, desired }, self.now_ms);
                        self.node_effects(node, effects);
                    }
                }
                Step::Tick => {
                    if active {
                        self.stir();
                    }
                    self.tell_the_script(active);
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

    fn tell_the_script(&mut self, active: bool) {
        let controllers: Vec<Controller> = (0..self.nodes.len())
            .map(|index| Controller {
                process: self.nodes[index].process,
                connected: self.is_up(Peer::Node(index)),
                leads: self.nodes[index].node.is_leading(),
            })
            .collect();
        let moment = Moment { now_ms: self.now_ms, active, controllers: &controllers };
        match self.script.passed(&moment, &mut self.desired) {
            Ok(false) => {}
            Ok(true) => {
                self.desired_version += 1;
                self.history.desired(&self.desired);
            }
            Err(failure) => self.failure = Some(failure),
        }
    }

    /// Until something is due.
    pub(super) fn pause(&self) -> u64 {
        let hosts = self.hosts.iter().filter_map(|state| state.reader.deadline_ms());
        let nodes = self.nodes.iter().filter_map(|state| state.node.deadline_ms());
        let nudges =
            self.nodes.iter().filter(|state| state.node.is_leading()).filter_map(|state| state.convergence.deadline_ms());
        hosts.chain(nodes).chain(nudges).min().map_or(20, |due| due.saturating_sub(self.now_ms).clamp(1, 20))
    }

    pub(super) fn chance(&mut self, thousandths: u64) -> bool {
        self.random.below(1_000) < thousandths
    }

    pub(super) fn schedule(&mut self, after_ms: u64, step: Step) {
        self.next_step += 1;
        self.steps.insert((self.now_ms + after_ms, self.next_step), step);
    }

    pub(super) fn delay(&mut self) -> u64 {
        let max = self.faults.delay_max_ms;
        // Mostly quick, sometimes slow.
        if self.random.below(10) == 0 { self.random.below(max + 1) } else { self.random.below(3) }
    }

    /// To a client, in order unless a fault says otherwise.
    pub(super) fn send(&mut self, to: Peer, message: Message) {
        let delay = self.delay();
        let at = self.now_ms + delay;
        let overtake = self.chance(self.faults.reorder);
        let Some(connection) = self.connections.get_mut(&to).filter(|connection| connection.up) else { return };
        let at = if overtake { at } else { at.max(connection.last_delivery_ms) };
        connection.last_delivery_ms = connection.last_delivery_ms.max(at);
        let life = connection.life;
        self.schedule(at - self.now_ms, Step::Deliver { to, life, message });
    }

    pub(super) fn is_up(&self, peer: Peer) -> bool {
        self.connections.get(&peer).is_some_and(|connection| connection.up)
    }

    pub(super) fn new_node(&mut self, index: usize) -> NodeState {
        let settings = node::Settings { name: format!("c{index}"), ..Default::default() };
        self.next_request += 1;
        NodeState {
            process: self.next_request,
            node: Node::new(settings, self.random.draw()),
            convergence: Convergence::new(convergence::Settings::default()),
            replies: Map::default(),
            compiled: Default::default(),
        }
    }

    pub(super) fn new_host(&mut self, index: usize) -> HostState {
        let reader = Reader::new(host(index as u64), reader::Settings::default(), self.random.draw());
        HostState { reader, subscribed: HashSet::new() }
    }

    pub(super) fn reconnect(&mut self, peer: Peer) {
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

    pub(super) fn tick(&mut self) {
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
    pub(super) fn compile(&mut self, index: usize) {
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
        let wholes = self.script.divide(edits.len(), &mut self.random);
        self.outcome.divided += u64::from(wholes.len() > 1 && edits.len() <= crate::LISTED_TOPICS_MAX);
        let proposal = Proposal { number: self.next_request, change: self.next_request, edits, wholes, ..Default::default() };
        let effects = self.nodes[index].node.handle(node::Event::Propose(proposal), self.now_ms);
        self.node_effects(index, effects);
    }

    pub(super) fn send_lossy(&mut self, to: Peer, message: Message) {
        if !self.chance(self.faults.lose) {
            self.send(to, message);
        }
    }
}
