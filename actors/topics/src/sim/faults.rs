//! What goes wrong, and how often.

use std::collections::BTreeSet;

use super::bus::{Peer, World};
use super::message::Message;

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
    /// Something that never happens, to see that the checkers would notice.
    pub sabotage: Option<Sabotage>,
}

/// A part of the protocol left out on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// The server takes a batch that expects another head: a deposed leader's.
    Fence,
    /// Hosts are not told which other topics a change touches, and do not wait for them.
    Companions,
    /// Hosts take what comes next for what comes next, whatever was lost before it.
    Gap,
}

impl std::str::FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fence" => Ok(Self::Fence),
            "companions" => Ok(Self::Companions),
            "gap" => Ok(Self::Gap),
            other => Err(format!("{other:?} is nothing that can be left out: fence, companions or gap")),
        }
    }
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
            sabotage: None,
        }
    }

    pub(super) fn is_exact(&self) -> bool {
        self.lose + self.duplicate + self.reorder + self.corrupt + self.partition + self.lose_stream == 0
    }
}

impl World {
    /// Random events of the world: changes and faults.
    pub(super) fn stir(&mut self) {
        if self.chance(150) {
            self.script.change(&mut self.desired, &mut self.random);
            self.desired_version += 1;
            self.history.desired(&self.desired);
        }
        if self.chance(self.faults.crash_host) {
            let index = self.random.below(self.hosts.len() as u64) as usize;
            self.hosts[index] = self.new_host(index);
            self.history.host_began(index);
            self.script.crashed(index);
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
            // Lost by the server, or deleted and created again: the same sequences once more. A server that was restarted has cut
            // every connection too.
            self.create_stream();
            if self.chance(500) {
                self.server_life += 1;
                let peers: BTreeSet<Peer> = self.connections.keys().copied().collect();
                peers.into_iter().for_each(|peer| self.reconnect(peer));
            }
        }
    }
}
