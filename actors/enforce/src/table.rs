//! An nftables table as plain data: what is desired, what was read back and what the model kernel runs on.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::V4Addresses;
use groupcast_policy::net::{Span, SpanSet};

use crate::Name;
use crate::expression::{Statement, Verdict};
use crate::interface::{Claim, Interface};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    pub chains: BTreeMap<Name, Chain>,
    pub sets: BTreeMap<Name, Set>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chain {
    /// Where packets enter it by themselves. Such a chain accepts what no rule decides: only claimed traffic is ours to refuse.
    pub base: Option<Base>,
    pub rules: Vec<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Base {
    pub hook: Hook,
    pub priority: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    /// Of the bridge family: what comes in by a port of a bridge, and what goes out by one.
    PortIn,
    PortOut,
}

pub type Rule = Vec<Statement>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    pub kind: SetKind,
    pub elements: Elements,
}

/// The kinds of set that a ruleset uses. A kind says what its elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetKind {
    /// Single addresses, found by hash.
    V4,
    V6,
    /// Disjoint ranges.
    Spans4,
    Spans6,
    Ports,
    Claims,
    Interfaces,
    /// Numbers of interfaces.
    Indexes,
    InterfaceV4,
    InterfaceV6,
    /// Each address beside itself: how a rule asks whether two addresses are the same one of these.
    SameV4,
    SameV6,
    /// Ranges of addresses per interface.
    InterfaceSpan4,
    InterfaceSpan6,
    /// Maps to the number of a profile.
    InterfaceToNumber,
    InterfaceV4ToNumber,
    InterfaceV6ToNumber,
    NumberToVerdict,
    MarkToVerdict,
    /// What was logged lately, filled by the kernel itself: (interface, number), forgotten after [`SEEN_SECONDS`].
    Seen,
}

/// How long a logged (interface, number) is remembered without being seen again.
pub const SEEN_SECONDS: u32 = 60;
/// How many of them at most; beyond it nothing is logged, everything is still decided.
pub const SEEN_MAX: u32 = 65_536;

/// Addresses have forms of their own because there may be a million of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Elements {
    V4(V4Addresses),
    V6(BTreeSet<u128>),
    Spans4(BTreeSet<Span<u32>>),
    Spans6(BTreeSet<Span<u128>>),
    Ports(BTreeSet<Span<u16>>),
    Keyed(BTreeMap<Key, Data>),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    Claim(Claim),
    Interface(Interface),
    InterfaceV4(Interface, u32),
    InterfaceV6(Interface, u128),
    SameV4(u32),
    SameV6(u128),
    InterfaceSpan4(Interface, Span<u32>),
    InterfaceSpan6(Interface, Span<u128>),
    Number(u32),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Data {
    Nothing,
    Number(u32),
    Verdict(Verdict),
}

impl Table {
    /// The names of chains and sets that are not the same in both.
    pub fn differences(&self, other: &Table) -> Vec<String> {
        let chains: BTreeSet<&Name> = self.chains.keys().chain(other.chains.keys()).collect();
        let sets: BTreeSet<&Name> = self.sets.keys().chain(other.sets.keys()).collect();
        let chains = chains.into_iter().filter(|name| self.chains.get(*name) != other.chains.get(*name));
        let sets = sets.into_iter().filter(|name| self.sets.get(*name) != other.sets.get(*name));
        chains.map(|name| format!("chain {name}")).chain(sets.map(|name| format!("set {name}"))).collect()
    }
}

impl Set {
    pub fn new(kind: SetKind) -> Self {
        Self { kind, elements: Elements::of(kind) }
    }

    pub fn keyed(kind: SetKind, elements: impl IntoIterator<Item = (Key, Data)>) -> Self {
        Self { kind, elements: Elements::Keyed(elements.into_iter().collect()) }
    }
}

impl SetKind {
    pub fn has_verdicts(self) -> bool {
        matches!(self, SetKind::NumberToVerdict | SetKind::MarkToVerdict)
    }
}

impl Elements {
    /// Empty, of the form that a set of this kind has.
    pub fn of(kind: SetKind) -> Self {
        match kind {
            SetKind::V4 => Elements::V4(V4Addresses::new()),
            SetKind::V6 => Elements::V6(BTreeSet::new()),
            SetKind::Spans4 => Elements::Spans4(BTreeSet::new()),
            SetKind::Spans6 => Elements::Spans6(BTreeSet::new()),
            SetKind::Ports => Elements::Ports(BTreeSet::new()),
            _ => Elements::Keyed(BTreeMap::new()),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Elements::V4(set) => set.len() as usize,
            Elements::V6(set) => set.len(),
            Elements::Spans4(set) => set.len(),
            Elements::Spans6(set) => set.len(),
            Elements::Ports(set) => set.len(),
            Elements::Keyed(map) => map.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of the other that are not in this one; of a map also those whose data differ. `None`: of another form.
    pub fn missing_from(&self, other: &Elements) -> Option<Elements> {
        Some(match (self, other) {
            (Elements::V4(have), Elements::V4(want)) => Elements::V4(want - have),
            (Elements::V6(have), Elements::V6(want)) => Elements::V6(want.difference(have).copied().collect()),
            (Elements::Spans4(have), Elements::Spans4(want)) => Elements::Spans4(want.difference(have).copied().collect()),
            (Elements::Spans6(have), Elements::Spans6(want)) => Elements::Spans6(want.difference(have).copied().collect()),
            (Elements::Ports(have), Elements::Ports(want)) => Elements::Ports(want.difference(have).copied().collect()),
            (Elements::Keyed(have), Elements::Keyed(want)) => {
                let missing = want.iter().filter(|(key, data)| have.get(key) != Some(data));
                Elements::Keyed(missing.map(|(key, data)| (key.clone(), data.clone())).collect())
            }
            _ => return None,
        })
    }

    /// `false` if they are of another form, and then nothing changed.
    pub fn extend(&mut self, more: Elements) -> bool {
        match (self, more) {
            (Elements::V4(have), Elements::V4(more)) => *have |= more,
            (Elements::V6(have), Elements::V6(more)) => have.extend(more),
            (Elements::Spans4(have), Elements::Spans4(more)) => have.extend(more),
            (Elements::Spans6(have), Elements::Spans6(more)) => have.extend(more),
            (Elements::Ports(have), Elements::Ports(more)) => have.extend(more),
            (Elements::Keyed(have), Elements::Keyed(more)) => have.extend(more),
            _ => return false,
        }
        true
    }

    /// `false` if they are of another form, and then nothing changed.
    pub fn remove(&mut self, less: &Elements) -> bool {
        match (self, less) {
            (Elements::V4(have), Elements::V4(less)) => *have -= less,
            (Elements::V6(have), Elements::V6(less)) => less.iter().for_each(|a| _ = have.remove(a)),
            (Elements::Spans4(have), Elements::Spans4(less)) => less.iter().for_each(|a| _ = have.remove(a)),
            (Elements::Spans6(have), Elements::Spans6(less)) => less.iter().for_each(|a| _ = have.remove(a)),
            (Elements::Ports(have), Elements::Ports(less)) => less.iter().for_each(|a| _ = have.remove(a)),
            (Elements::Keyed(have), Elements::Keyed(less)) => less.keys().for_each(|key| _ = have.remove(key)),
            _ => return false,
        }
        true
    }
}

impl From<&SpanSet<u16>> for Elements {
    fn from(spans: &SpanSet<u16>) -> Self {
        Elements::Ports(spans.spans().iter().copied().collect())
    }
}

impl From<&SpanSet<u32>> for Elements {
    fn from(spans: &SpanSet<u32>) -> Self {
        Elements::Spans4(spans.spans().iter().copied().collect())
    }
}

impl From<&SpanSet<u128>> for Elements {
    fn from(spans: &SpanSet<u128>) -> Self {
        Elements::Spans6(spans.spans().iter().copied().collect())
    }
}
