//! The desired table: from the policy of a host's workloads, their attachments and the host's settings.
//!
//! Two judges look at every packet of claimed traffic: *out* at the policy of the flow's original sender, *in* at that of its original
//! receiver. Both find the workload's profile by interface, or by interface and address, in two steps: a plain map to the profile's
//! number, a verdict map from there to its chain. A profile runs the denies of all tiers, then the allows of all tiers, then ends in
//! refusal. What both accept is stamped, and a flow with the current stamp passes at once.
//!
//! Everything here depends on the current inputs alone, never on history; each chain on few of them, so that the
//! [`engine`](crate::engine) can write one without the others: a scope's on what is bound there, a group's on its rules, a profile's on
//! what it is and on which of its scopes deny anything. A group bound in two scopes is therefore tried in both.

mod frame;
mod groups;
mod profiles;
mod workloads;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::V4Addresses;
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::Documents;
use groupcast_policy::resolve::resolve;
use groupcast_policy::rule::Direction;

use crate::Name;
use crate::expression::{Field, Statement};
use crate::interface::Interface;
use crate::names;
use crate::settings::{Attachments, Mode, Settings, Stamp};
use crate::table::{Chain, Elements, Key, Set, SetKind, Table};

pub(crate) use frame::{stamp_chains, stamp_rule_counts, write as write_frame};
pub(crate) use groups::{Written, group_chains, has_spans, member_sets, member_spans, members_of};
pub(crate) use profiles::{
    CHAINS, Denies, Found, Has, ProfileKey, Shape, bound, denies_of, has, jumps, lone_number, onward_rules, profile_chains,
    profile_rules, profile_verdicts, rules_of,
};
pub(crate) use workloads::{Element, Keys, Owners, elements_of, keys_of, own_addresses, source_spans};
pub use workloads::{Refusal, objection};

/// What a set should hold: its own elements, or a document's addresses, which are too many to copy for every look.
#[derive(Debug, Clone)]
pub enum Contents<'d> {
    Owned(Elements),
    V4(&'d V4Addresses),
    V6(&'d BTreeSet<u128>),
}

impl Contents<'_> {
    pub fn to_elements(&self) -> Elements {
        match self {
            Contents::Owned(elements) => elements.clone(),
            Contents::V4(set) => Elements::V4((*set).clone()),
            Contents::V6(set) => Elements::V6((*set).clone()),
        }
    }
}

#[derive(Debug, Clone)]
pub struct DesiredSet<'d> {
    pub kind: SetKind,
    pub contents: Contents<'d>,
}

/// The whole of what the kernel should hold.
#[derive(Debug, Clone, Default)]
pub struct Desired<'d> {
    pub chains: BTreeMap<Name, Chain>,
    pub sets: BTreeMap<Name, DesiredSet<'d>>,
    /// What cannot be enforced. Its interface stays claimed and closed.
    pub refused: Vec<Refusal>,
}

impl Desired<'_> {
    pub fn to_table(&self) -> Table {
        let sets =
            self.sets.iter().map(|(name, set)| (name.clone(), Set { kind: set.kind, elements: set.contents.to_elements() }));
        Table { chains: self.chains.clone(), sets: sets.collect() }
    }

    fn put_chain(&mut self, name: Name, rules: Vec<crate::table::Rule>) {
        self.chains.insert(name, Chain { base: None, rules });
    }

    fn put_set(&mut self, name: Name, kind: SetKind, elements: Elements) {
        self.sets.insert(name, DesiredSet { kind, contents: Contents::Owned(elements) });
    }
}

/// Whether a table of ours judges connections that are met in the middle like new ones.
pub fn is_adopting(table: &Table) -> bool {
    let looks_at_flags =
        |statement: &Statement| matches!(statement, Statement::Match { fields, .. } if fields[..] == [Field::TcpFlags]);
    let chain = table.chains.get(&names::sided("pass", Direction::Egress));
    chain.is_some_and(|chain| !chain.rules.iter().flatten().any(looks_at_flags))
}

/// How a table of ours treats what it judges: what packets meet, whatever was ordered since. `None`: it is no table of ours.
pub fn mode_of(table: &Table) -> Option<Mode> {
    let rules = |name: &Name| table.chains.get(name).map(|chain| &chain.rules[..]);
    let dispatches = |statement: &Statement| matches!(statement, Statement::Dispatch { .. });
    let audits = |rule: &crate::table::Rule| rule[..] == [Statement::goto(&names::audit())];
    Some(if rules(&names::forward_out())?.is_empty() {
        Mode::Bypass
    } else if !rules(&names::sided("j", Direction::Egress))?.iter().flatten().any(dispatches) {
        Mode::Lockdown
    } else if rules(&names::deny(names::View::Connection, Direction::Egress))?.iter().any(audits) {
        Mode::Audit
    } else {
        Mode::Enforce
    })
}

/// Interfaces of which a table of ours lets pass what it denies, logged.
pub fn audited(table: &Table) -> BTreeSet<Interface> {
    let sets = [names::audited(), names::audited4(), names::audited6()];
    let keys = sets.iter().filter_map(|name| match &table.sets.get(name)?.elements {
        Elements::Keyed(elements) => Some(elements.keys()),
        _ => None,
    });
    let interface = |key: &Key| match key {
        Key::Interface(interface)
        | Key::InterfaceV4(interface, _)
        | Key::InterfaceV6(interface, _)
        | Key::InterfaceSpan4(interface, _)
        | Key::InterfaceSpan6(interface, _) => Some(*interface),
        Key::Claim(_) | Key::Number(_) | Key::SameV4(_) | Key::SameV6(_) => None,
    };
    keys.flatten().filter_map(interface).collect()
}

/// Builds the desired table from scratch.
pub fn build<'d>(
    host: &HostId,
    documents: &'d impl Documents,
    attachments: &Attachments,
    settings: &Settings,
    stamp: Stamp,
) -> Desired<'d> {
    let mut desired = Desired::default();
    let policy = resolve(host, documents);
    let (placed, refused) = workloads::place(&policy, attachments, settings);
    desired.refused = refused;
    let used = profiles::write(&mut desired, documents, &placed);
    groups::write(&mut desired, documents, settings, &used);
    let keys = workloads::write(&mut desired, attachments, &placed);
    frame::write(&mut desired, settings, stamp, keys);
    desired
}
