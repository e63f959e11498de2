//! Hosts and controllers on the simulated bus: what reaches them, and what they do then.

use groupcast_messages::{Companions, Delta};
use groupcast_policy::topic::Topic;

use super::bus::{Peer, Reply, Step, World};
use super::faults::Sabotage;
use super::message::Message;
use super::policy::host;
use crate::node::{self, Request};
use crate::reader::{self, Reader};

/// A delta as a host gets it that lacks a part of the protocol.
fn sabotaged(sabotage: Option<Sabotage>, reader: &Reader, topic: &Topic, previous: u64, payload: Vec<u8>) -> (u64, Vec<u8>) {
    let Some((sabotage, mut delta)) = sabotage.zip(Delta::decode(topic, &payload).ok()) else { return (previous, payload) };
    match (sabotage, reader.document(topic).zip(reader.revision(topic))) {
        (Sabotage::Companions, _) => {
            (delta.companions, delta.tally) = (Companions::NONE, None);
            (previous, delta.encode())
        }
        (Sabotage::Gap, Some((document, revision))) if revision < previous => {
            let mut document = document.clone();
            if document.apply(&delta.edit).is_ok() {
                delta.digest = document.digest();
            }
            (revision, delta.encode())
        }
        _ => (previous, payload),
    }
}

impl World {
    pub(super) fn deliver(&mut self, to: Peer, message: Message) {
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
                        let (previous, payload) = sabotaged(self.faults.sabotage, reader, &topic, previous, payload);
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
                    Message::LifeBegun(begun) => node.handle(Event::LifeBegun(begun), now_ms),
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

    pub(super) fn host_effects(&mut self, index: usize, effects: Vec<reader::Effect>) {
        use reader::Effect;
        let mut open: std::collections::VecDeque<Effect> = reader::together(effects).into();
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
                    let reader = &self.hosts[index].reader;
                    let checked = self.history.check(reader, self.exact).and_then(|()| self.history.check_forward(index, reader));
                    let checked = checked.and_then(|()| self.script.committed(index, &commit, reader));
                    if let Err(failure) = checked {
                        self.failure = Some(format!("host {index}: {failure}"));
                    }
                    open.extend(self.hosts[index].reader.handle(reader::Event::Enforced(commit.number), self.now_ms));
                }
                _ => {}
            }
        }
    }

    pub(super) fn ask_a_node(&mut self, from: usize, request: Request, reply: Reply) {
        let up: Vec<usize> = (0..self.nodes.len()).filter(|n| self.is_up(Peer::Node(*n))).collect();
        if up.is_empty() || !self.is_up(Peer::Host(from)) || self.chance(self.faults.lose) {
            return;
        }
        let node = up[self.random.below(up.len() as u64) as usize];
        self.request(node, request, reply);
    }

    pub(super) fn request(&mut self, node: usize, request: Request, reply: Reply) {
        self.next_request += 1;
        self.nodes[node].replies.insert(self.next_request, reply);
        self.send(Peer::Node(node), Message::Request { id: self.next_request, request });
    }

    pub(super) fn node_effects(&mut self, index: usize, effects: Vec<node::Effect>) {
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
                Effect::ReserveTerm { at_least, new_life } if up => match self.reserved.next(at_least, new_life) {
                    Ok(reserved) => {
                        self.reserved = reserved;
                        let answer = (!self.chance(self.faults.confuse)).then_some(reserved);
                        self.send(me, Message::Term(answer));
                    }
                    Err(why) => self.failure = Some(why.to_string()),
                },
                Effect::BeginLife { first } if up => {
                    // Sometimes on its way for long, sometimes without an answer.
                    let after = if self.chance(self.faults.confuse / 4) { self.random.below(3_000) } else { self.delay() };
                    let (life, server_life) = (self.connections.get(&me).map_or(0, |c| c.life), self.server_life);
                    self.schedule(after, Step::BeginLife { from: index, life, server_life, first });
                }
                Effect::StepDown if up && !self.chance(self.faults.lose) => {
                    let after = self.delay();
                    self.schedule(after, Step::ElectLeader);
                }
                Effect::ReadTerm if up && !self.chance(self.faults.lose) => {
                    let term = self.reserved.term();
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
                Effect::WantDesired { ask } => {
                    let documents = self.desired.clone();
                    let compiled = node::Desired { documents, catalog: self.desired_version, registry: 0 };
                    let desired = (!self.chance(self.faults.confuse)).then_some(compiled);
                    let (process, takes_ms) = (self.nodes[index].process, self.random.below(300));
                    self.schedule(takes_ms, Step::Compiled { node: index, process, ask, desired });
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
                Effect::Committed(committed) => {
                    self.nodes[index].convergence.committed(&committed, self.now_ms);
                    self.check_followers(index);
                }
                _ => {}
            }
        }
    }
}
