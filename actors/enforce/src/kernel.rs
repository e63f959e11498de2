//! A model of the kernel: decides packets on the same table that the real one is given, with as much of connection tracking as the
//! rules look at. For the simulator, and for tests against the policy engine.

mod matching;

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use groupcast_policy::net::Family;
use groupcast_policy::packet::{Payload, TCP, family_of};

use crate::Name;
use crate::expression::{
    ORIGINAL, REPLY, STATE_ESTABLISHED, STATE_INVALID, STATE_NEW, STATE_RELATED, STATE_UNTRACKED, Statement, TCP_ACK, TCP_SYN,
    Verdict,
};
use crate::interface::Interface;
use crate::table::{Hook, Table};

/// A packet on its way through the machine: [`Interface::NONE`] where it begins or ends in the machine itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    pub came_in: Interface,
    pub goes_out: Interface,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub payload: Payload,
    pub tcp_flags: u8,
    /// The numbers of those interfaces; 0 where it does not matter.
    pub came_in_index: u32,
    pub goes_out_index: u32,
    /// Of an ICMP error: the packet it is about.
    pub about: Option<Box<Packet>>,
}

impl Packet {
    /// The first packet of a flow.
    pub fn first(came_in: Interface, goes_out: Interface, source: IpAddr, destination: IpAddr, payload: Payload) -> Self {
        Self {
            came_in,
            goes_out,
            source,
            destination,
            payload,
            tcp_flags: TCP_SYN,
            came_in_index: 0,
            goes_out_index: 0,
            about: None,
        }
    }

    /// A packet in the other direction of the same flow.
    pub fn answer(&self) -> Self {
        Self {
            came_in: self.goes_out,
            goes_out: self.came_in,
            source: self.destination,
            destination: self.source,
            payload: self.payload.reply(),
            tcp_flags: if self.tcp_flags == TCP_SYN { TCP_SYN | TCP_ACK } else { TCP_ACK },
            came_in_index: self.goes_out_index,
            goes_out_index: self.came_in_index,
            about: None,
        }
    }

    /// A later packet in the same direction.
    pub fn later(&self) -> Self {
        Self { tcp_flags: TCP_ACK, ..self.clone() }
    }

    fn tuple(&self) -> Tuple {
        Tuple { source: self.source, destination: self.destination, payload: self.payload }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Tuple {
    source: IpAddr,
    destination: IpAddr,
    payload: Payload,
}

impl Tuple {
    fn reversed(&self) -> Self {
        Tuple { source: self.destination, destination: self.source, payload: self.payload.reply() }
    }
}

/// A connection as conntrack knows it: the tuple of its first packet, after address translation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Connection {
    tuple: Tuple,
    mark: u32,
    answered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Passed,
    Dropped,
}

/// What a packet belongs to while it is judged.
struct Tracked {
    /// `None`: invalid or untracked.
    connection: Option<Connection>,
    index: Option<usize>,
    direction: u8,
    state: u32,
}

#[derive(Debug, Clone, Default)]
pub struct ModelKernel {
    pub table: Table,
    connections: Vec<Connection>,
    /// The prefixes of what was logged.
    pub logs: Vec<String>,
    /// How many rules were looked at so far: what packets cost.
    pub rules_tried: u64,
}

/// The kernel's own limit for jumps is 16; a table that needs more would be refused there.
const JUMP_DEPTH_MAX: usize = 16;

/// Connection tracking happens at this priority: what comes before sees no connection.
const PRIORITY_CONNTRACK: i32 = -200;

enum Outcome {
    Accept,
    Drop,
    /// The chain's end, or `return`.
    Return,
}

impl ModelKernel {
    pub fn new(table: Table) -> Self {
        Self { table, ..Self::default() }
    }

    /// Sends a packet through.
    pub fn send(&mut self, packet: &Packet) -> Fate {
        let hooks: &[Hook] = match (packet.came_in == Interface::NONE, packet.goes_out == Interface::NONE) {
            (true, _) => &[Hook::Output],
            (false, true) => &[Hook::Prerouting, Hook::Input],
            (false, false) => &[Hook::Prerouting, Hook::Forward],
        };
        let mut untouched = Tracked { connection: None, index: None, direction: ORIGINAL, state: STATE_UNTRACKED };
        if self.pass_hook(hooks[0], |priority| priority < PRIORITY_CONNTRACK, packet, &mut untouched) == Fate::Dropped {
            return Fate::Dropped;
        }
        let mut tracked = self.track(packet);
        for hook in hooks {
            if self.pass_hook(*hook, |priority| priority >= PRIORITY_CONNTRACK, packet, &mut tracked) == Fate::Dropped {
                return Fate::Dropped;
            }
        }
        if let Some(mut connection) = tracked.connection {
            connection.answered |= tracked.direction == REPLY && packet.about.is_none();
            match tracked.index {
                Some(index) => self.connections[index] = connection,
                None => self.connections.push(connection),
            }
        }
        Fate::Passed
    }

    /// Forgets all connections, as time would.
    pub fn forget(&mut self) {
        self.connections.clear();
    }

    fn track(&self, packet: &Packet) -> Tracked {
        let nothing = |state| Tracked { connection: None, index: None, direction: ORIGINAL, state };
        let about = packet.about.as_deref();
        let tuple = about.map_or_else(|| packet.tuple(), Packet::tuple);
        let found = self.connections.iter().enumerate().find_map(|(index, connection)| {
            let direction = if connection.tuple == tuple {
                ORIGINAL
            } else if connection.tuple.reversed() == tuple {
                REPLY
            } else {
                return None;
            };
            Some((index, connection.clone(), direction))
        });
        match (found, about) {
            // An error travels against the packet it is about.
            (Some((index, connection, direction)), Some(_)) => Tracked {
                connection: Some(connection),
                index: Some(index),
                direction: if direction == ORIGINAL { REPLY } else { ORIGINAL },
                state: STATE_RELATED,
            },
            (None, Some(_)) => nothing(STATE_INVALID),
            (Some((index, connection, direction)), None) => {
                let state = if direction == REPLY || connection.answered { STATE_ESTABLISHED } else { STATE_NEW };
                Tracked { connection: Some(connection), index: Some(index), direction, state }
            }
            (None, None) => match packet.payload {
                Payload::Icmp { kind: 130..=137 | 143, .. } if packet.source.is_ipv6() => nothing(STATE_UNTRACKED),
                payload if begins_a_connection(family_of(packet.source), &payload) => self.fresh(tuple),
                _ => nothing(STATE_INVALID),
            },
        }
    }

    fn fresh(&self, tuple: Tuple) -> Tracked {
        let connection = Connection { tuple, mark: 0, answered: false };
        Tracked { connection: Some(connection), index: None, direction: ORIGINAL, state: STATE_NEW }
    }

    fn pass_hook(&mut self, hook: Hook, priorities: impl Fn(i32) -> bool, packet: &Packet, tracked: &mut Tracked) -> Fate {
        let mut entered: Vec<(i32, Name)> = Vec::new();
        for (name, chain) in &self.table.chains {
            if let Some(base) = chain.base
                && base.hook == hook
                && priorities(base.priority)
            {
                entered.push((base.priority, name.clone()));
            }
        }
        entered.sort();
        for (_, chain) in entered {
            let mut notes = Notes::default();
            let outcome = run(&self.table, &chain, packet, tracked, &mut notes, 0);
            self.logs.extend(notes.logs);
            self.rules_tried += notes.rules_tried;
            if matches!(outcome, Outcome::Drop) {
                return Fate::Dropped;
            }
        }
        Fate::Passed
    }
}

/// What is written down while a packet is on its way.
#[derive(Default)]
struct Notes {
    logs: Vec<String>,
    rules_tried: u64,
}

fn run(table: &Table, chain: &Name, packet: &Packet, tracked: &mut Tracked, notes: &mut Notes, depth: usize) -> Outcome {
    let Some(chain) = table.chains.get(chain) else { return Outcome::Drop };
    if depth > JUMP_DEPTH_MAX {
        return Outcome::Drop;
    }
    'rules: for rule in &chain.rules {
        notes.rules_tried += 1;
        for statement in rule {
            let verdict = match statement {
                Statement::Match { fields, test } => {
                    if !matching::holds(table, fields, test, packet, tracked) {
                        continue 'rules;
                    }
                    continue;
                }
                Statement::VerdictOf { fields, mask, map } => {
                    match matching::verdict_of(table, fields, *mask, map, packet, tracked) {
                        Some(verdict) => verdict,
                        None => continue 'rules,
                    }
                }
                Statement::Dispatch { fields, numbers, verdicts } => {
                    match matching::dispatch(table, fields, numbers, verdicts, packet, tracked) {
                        Some(verdict) => verdict,
                        None => continue 'rules,
                    }
                }
                Statement::SetMark { keep, set } => {
                    match &mut tracked.connection {
                        Some(connection) => connection.mark = connection.mark & keep | set,
                        None => continue 'rules,
                    }
                    continue;
                }
                Statement::Limit { .. } | Statement::Counter => continue,
                Statement::Log { prefix, .. } => {
                    notes.logs.push(prefix.clone());
                    continue;
                }
                Statement::Verdict(verdict) => verdict.clone(),
            };
            match verdict {
                Verdict::Accept => return Outcome::Accept,
                Verdict::Drop => return Outcome::Drop,
                Verdict::Return => return Outcome::Return,
                Verdict::Jump(to) => match run(table, &to, packet, tracked, notes, depth + 1) {
                    Outcome::Return => continue 'rules,
                    decided => return decided,
                },
                // Whoever jumped here goes on after its jump.
                Verdict::Goto(to) => return run(table, &to, packet, tracked, notes, depth + 1),
            }
        }
    }
    Outcome::Return
}

/// Whether connection tracking takes such a packet as the first of a connection. Of ICMP only requests are: an answer that nobody asked
/// for, an error about nothing that is known, and what neighbours tell each other begin nothing. Such a packet is dropped where an end
/// is ours, also if a rule would allow it: nothing tells whose policy it is that allows it, and a forged error is how connections of
/// others are broken.
pub fn begins_a_connection(family: Family, payload: &Payload) -> bool {
    match (family, payload) {
        (Family::V4, Payload::Icmp { kind, .. }) => matches!(kind, 8 | 13 | 15 | 17),
        (Family::V6, Payload::Icmp { kind, .. }) => matches!(kind, 128 | 139),
        _ => true,
    }
}

/// The flags of a packet that shows none.
fn tcp_flags(packet: &Packet) -> Option<u8> {
    (packet.payload.protocol(family_of(packet.source)) == TCP).then_some(packet.tcp_flags)
}
