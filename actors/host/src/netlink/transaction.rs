//! A transaction as netlink messages. Tables and chains are written by rustables, everything else here.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_enforce::Name;
use groupcast_enforce::delta::{Op, Transaction};
use groupcast_enforce::names::is_of_bridge;
use groupcast_enforce::table::{Base, Elements, Hook};
use rustables::{ChainPolicy, ChainType, HookClass, MsgType, ProtocolFamily};

use super::expressions::write_rule;
use super::sets::{to_wire, write_definition};
use super::socket::{APPEND, BRIDGE, Batch, CREATE, ECHO, INET};
use super::wire::ATTRIBUTE_BYTES_MAX;

const NEW_RULE: u8 = 6;
const DELETE_RULE: u8 = 8;
const NEW_SET: u8 = 9;
const DELETE_SET: u8 = 11;
const NEW_ELEMENT: u8 = 12;
const DELETE_ELEMENT: u8 = 14;

/// Elements of one message stay below what a nested attribute can carry.
const ELEMENTS_BYTES_MAX: usize = ATTRIBUTE_BYTES_MAX - 1024;

/// How a rule is named: by the kernel's handle, or within the transaction that adds it, by ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handle {
    Kernel(u64),
    New(u32),
}

/// The handles of the rules of chains, in order. A chain is known here from when it was first asked for: of rules that are added then,
/// the kernel echoes the handles.
pub type Handles = BTreeMap<Name, Vec<Handle>>;

/// Puts the kernel's handles of echoed rules in their places, and forgets chains with rules whose handles it did not tell.
pub fn settle(handles: &mut Handles, touched: &BTreeSet<Name>, echoed: &[(Name, u32)], told: &[u64]) {
    if echoed.len() == told.len() {
        for ((chain, id), handle) in echoed.iter().zip(told) {
            let rules = handles.get_mut(chain).into_iter().flatten();
            rules.filter(|rule| **rule == Handle::New(*id)).for_each(|rule| *rule = Handle::Kernel(*handle));
        }
    }
    for chain in touched.iter().chain(echoed.iter().map(|(chain, _)| chain)) {
        let is_known = |rules: &Vec<Handle>| rules.iter().all(|rule| matches!(rule, Handle::Kernel(_)));
        if !handles.get(chain).is_some_and(is_known) {
            handles.remove(chain);
        }
    }
}

/// Chains whose rules' handles a transaction needs: those it did not add itself and in which it deletes a rule or adds one anywhere. Of a
/// chain that it adds or empties, that comes before its rules, and nothing is left in it whose handle could matter.
pub fn needs_handles(transaction: &Transaction) -> Vec<&Name> {
    let (mut fresh, mut needed) = (BTreeSet::new(), BTreeSet::new());
    for op in transaction.ops.iter().filter(|_| !transaction.anew) {
        match op {
            Op::AddChain { chain, .. } | Op::FlushChain { chain } => _ = fresh.insert(chain),
            Op::AddRule { chain, .. } | Op::DeleteRule { chain, .. } if !fresh.contains(chain) => _ = needed.insert(chain),
            _ => {}
        }
    }
    needed.into_iter().collect()
}

pub struct Encoded {
    pub batch: Batch,
    /// Which operation each message belongs to; `None`: the table itself.
    pub origin: Vec<Option<usize>>,
    /// Chains whose rules it changes, and the rules whose handles the kernel is asked for.
    pub touched: BTreeSet<Name>,
    pub echoed: Vec<(Name, u32)>,
}

pub struct Encoder<'t> {
    pub table: &'t str,
    pub flags: u32,
    /// Whether the table must be there already, ours.
    pub known: bool,
    /// The same of the table of the bridge family, which is there only if something is in it.
    pub bridged: bool,
    /// That one is there without the other: what is in it is nobody's, and goes first.
    pub leftover: bool,
}

fn name_of(op: &Op) -> &Name {
    match op {
        Op::AddSet { set, .. } | Op::DeleteSet { set } | Op::AddElements { set, .. } | Op::DeleteElements { set, .. } => set,
        Op::AddChain { chain, .. }
        | Op::DeleteChain { chain }
        | Op::FlushChain { chain }
        | Op::AddRule { chain, .. }
        | Op::DeleteRule { chain, .. } => chain,
    }
}

/// Whether a transaction speaks of the bridge family.
pub fn is_about_bridge(transaction: &Transaction) -> bool {
    transaction.ops.iter().any(|op| is_of_bridge(name_of(op)))
}

fn family_of(name: &str) -> (u8, ProtocolFamily) {
    if is_of_bridge(name) { (BRIDGE, ProtocolFamily::Bridge) } else { (INET, ProtocolFamily::Inet) }
}

impl Encoder<'_> {
    /// `handles` are changed as the transaction changes them; after a failure they are of no use.
    pub fn encode(&self, transaction: &Transaction, handles: &mut Handles) -> Encoded {
        let origin = Vec::with_capacity(transaction.ops.len() + 3);
        let mut encoded = Encoded { batch: Batch::default(), origin, touched: BTreeSet::new(), echoed: Vec::new() };
        self.table_messages(transaction, &mut encoded.batch);
        encoded.origin.resize(encoded.batch.messages(), None);
        let mut ids = 0;
        for (index, op) in transaction.ops.iter().enumerate() {
            self.op(op, &mut encoded, handles, &mut ids);
            encoded.origin.resize(encoded.batch.messages(), Some(index));
        }
        encoded
    }

    fn table_messages(&self, transaction: &Transaction, batch: &mut Batch) {
        let wants_bridge = is_about_bridge(transaction);
        let tables = [
            (ProtocolFamily::Inet, !self.known || transaction.anew),
            (ProtocolFamily::Bridge, wants_bridge && !self.bridged || self.bridged && (!self.known || transaction.anew)),
        ];
        for (family, _) in tables.into_iter().filter(|(_, is_due)| *is_due) {
            let table = rustables::Table::new(family).with_name(self.table).with_flags(self.flags);
            let mut part = rustables::Batch::new();
            part.add(&table, MsgType::Add);
            if transaction.anew || self.leftover && matches!(family, ProtocolFamily::Bridge) {
                part.add(&table, MsgType::Del);
                part.add(&table, MsgType::Add);
            }
            batch.splice(part);
        }
    }

    fn chain(&self, name: &str, base: Option<Base>, action: MsgType, batch: &mut Batch) {
        let table = rustables::Table::new(family_of(name).1).with_name(self.table);
        let mut chain = rustables::Chain::new(&table).with_name(name);
        if let Some(Base { hook, priority }) = base {
            let class = match hook {
                Hook::Prerouting => HookClass::PreRouting,
                Hook::Input => HookClass::In,
                Hook::Forward => HookClass::Forward,
                Hook::Output => HookClass::Out,
                Hook::PortIn => HookClass::PreRouting,
                Hook::PortOut => HookClass::PostRouting,
            };
            chain.set_hook(rustables::Hook::new(class, priority));
            chain.set_policy(ChainPolicy::Accept);
            chain.set_type(ChainType::Filter);
        }
        let mut part = rustables::Batch::new();
        part.add(&chain, action);
        batch.splice(part);
    }

    fn op(&self, op: &Op, encoded: &mut Encoded, handles: &mut Handles, ids: &mut u32) {
        let table = self.table;
        let (family, _) = family_of(name_of(op));
        let Encoded { batch, touched, echoed, .. } = encoded;
        match op {
            Op::AddSet { set, kind } => {
                *ids += 1;
                batch.message(family, NEW_SET, CREATE, |writer| write_definition(writer, table, set, *kind, *ids));
            }
            Op::DeleteSet { set } => batch.message(family, DELETE_SET, 0, |writer| _ = writer.text(1, table).text(2, set)),
            Op::AddElements { set, elements, .. } => self.elements(NEW_ELEMENT, CREATE, set, elements, batch),
            Op::DeleteElements { set, elements, .. } => self.elements(DELETE_ELEMENT, 0, set, elements, batch),
            Op::AddChain { chain, base } => {
                touched.insert(chain.clone());
                handles.remove(chain);
                self.chain(chain, *base, MsgType::Add, batch);
            }
            Op::DeleteChain { chain } => {
                handles.remove(chain);
                self.chain(chain, None, MsgType::Del, batch);
            }
            Op::FlushChain { chain } => {
                touched.insert(chain.clone());
                handles.remove(chain);
                batch.message(family, DELETE_RULE, 0, |writer| _ = writer.text(1, table).text(2, chain));
            }
            Op::DeleteRule { chain, at } => {
                let rules = handles.entry(chain.clone()).or_default();
                let handle = if *at < rules.len() { rules.remove(*at) } else { Handle::Kernel(0) };
                batch.message(family, DELETE_RULE, 0, |writer| {
                    writer.text(1, table).text(2, chain);
                    match handle {
                        Handle::Kernel(handle) => writer.u64(3, handle),
                        Handle::New(id) => writer.u32(9, id),
                    };
                });
            }
            Op::AddRule { chain, at, rule } => {
                *ids += 1;
                // Of a chain that is new or was emptied, rules come in order and nobody asks for their handles.
                let is_known = !touched.contains(chain);
                let rules = handles.entry(chain.clone()).or_default();
                let at = (*at).min(rules.len());
                let after = at.checked_sub(1).map(|before| rules[before]);
                rules.insert(at, Handle::New(*ids));
                // At the end: appended. At the beginning: inserted. Between: appended to the rule before.
                let last = at + 1 == rules.len();
                let mut flags = if last || after.is_some() { CREATE | APPEND } else { CREATE };
                if is_known {
                    flags |= ECHO;
                    echoed.push((chain.clone(), *ids));
                }
                batch.message(family, NEW_RULE, flags, |writer| {
                    writer.text(1, table).text(2, chain).nest(4, |list| write_rule(list, rule));
                    writer.u32(9, *ids);
                    match after {
                        Some(Handle::Kernel(handle)) if !last => _ = writer.u64(6, handle),
                        Some(Handle::New(id)) if !last => _ = writer.u32(10, id),
                        _ => {}
                    }
                });
            }
        }
    }

    fn elements(&self, kind: u8, flags: u16, set: &str, elements: &Elements, batch: &mut Batch) {
        let wire = to_wire(elements);
        let mut rest = &wire[..];
        while !rest.is_empty() {
            let mut room = ELEMENTS_BYTES_MAX;
            let count = rest
                .iter()
                .take_while(|element| {
                    let fits = element.room() <= room;
                    room = room.saturating_sub(element.room());
                    fits
                })
                .count()
                .max(1);
            let (now, later) = rest.split_at(count);
            batch.message(family_of(set).0, kind, flags, |writer| {
                writer.text(1, self.table).text(2, set).nest(3, |list| now.iter().for_each(|element| element.write(list)));
            });
            rest = later;
        }
    }
}
