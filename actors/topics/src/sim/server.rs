//! The simulated server: one stream, republished to whoever subscribed.

use groupcast_policy::topic::Topic;

use super::bus::{Peer, Stream, World};
use super::faults::Sabotage;
use super::message::Message;
use crate::node::{Fate, Publish};

impl World {
    pub(super) fn create_stream(&mut self) {
        self.stream = Some(Stream::default());
        self.history.stream_began();
        self.outcome.lives += 1;
    }

    /// Purges whatever lies below, as the server does.
    pub(super) fn begin_life(&mut self, first: u64) {
        let Some(stream) = &mut self.stream else { return };
        if stream.sequence >= first {
            return;
        }
        let cleared = stream.head.is_some();
        let was_stuck = stream.stuck;
        *stream = Stream { sequence: first - 1, stuck: was_stuck, ..Stream::default() };
        // What was on its way through the replicas when they purged, they may wait for for ever.
        if self.chance(self.faults.confuse) && !was_stuck {
            self.stream.iter_mut().for_each(|stream| stream.stuck = true);
            self.outcome.stuck += 1;
        }
        if cleared {
            self.history.stream_began();
            self.outcome.lives += 1;
        }
    }

    pub(super) fn publish(&mut self, from: usize, life: u64, publish: Publish) {
        let Publish { batch, expected, lead, messages } = publish;
        let same_life = self.connections.get(&Peer::Node(from)).is_some_and(|connection| connection.life == life);
        let confused = self.chance(self.faults.confuse);
        let stuck = self.stream.as_ref().is_some_and(|stream| stream.stuck);
        if stuck || confused && self.chance(300) {
            // Collided with something that will come to nothing.
            if same_life {
                self.send(Peer::Node(from), Message::Published { batch, fate: Fate::Undecided });
            }
            return;
        }
        let Some(stream) = &mut self.stream else { return };
        let head = stream.head.as_ref().map_or(0, |(sequence, _)| *sequence);
        let fenced = self.faults.sabotage != Some(Sabotage::Fence);
        let fate = if head == expected || !fenced {
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

    pub(super) fn republish(&mut self, sequence: u64, previous_lead: u64, lead: Vec<u8>, messages: Vec<(Topic, Vec<u8>)>) {
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
}
