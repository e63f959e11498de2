//! Desired against actual: the operations of one transaction.
//!
//! Order within a transaction: what is named comes before what names it, and what names goes before what was named. Sets and chains are
//! added, plain elements, then rules, then verdicts, which name chains; then everything unnamed is removed. The kernel shows all of it
//! at once or nothing, so the order serves its checks only.

mod rules;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::Name;
use crate::expression::Statement;
use crate::names::{Role, chain_role, set_role};
use crate::ruleset::{Contents, Desired, DesiredSet};
use crate::table::{Base, Chain, Elements, Rule, Set, SetKind, Table};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    AddSet {
        set: Name,
        kind: SetKind,
    },
    AddChain {
        chain: Name,
        base: Option<Base>,
    },
    AddElements {
        set: Name,
        kind: SetKind,
        elements: Elements,
    },
    DeleteElements {
        set: Name,
        kind: SetKind,
        elements: Elements,
    },
    /// Places count as they are when the operation's turn comes.
    AddRule {
        chain: Name,
        at: usize,
        rule: Rule,
    },
    DeleteRule {
        chain: Name,
        at: usize,
    },
    FlushChain {
        chain: Name,
    },
    DeleteChain {
        chain: Name,
    },
    DeleteSet {
        set: Name,
    },
}

/// What the kernel is given at once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Transaction {
    /// The table is made anew: what is there under its name is deleted first, in the same transaction.
    pub anew: bool,
    pub ops: Vec<Op>,
}

impl Transaction {
    pub fn is_empty(&self) -> bool {
        !self.anew && self.ops.is_empty()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the table has no {what} {name:?} that the transaction speaks of: read the table again and compare anew")]
pub struct Inconsistent {
    pub what: &'static str,
    pub name: Name,
}

impl Table {
    /// What the kernel does. After an error the table is of no use.
    pub fn apply(&mut self, transaction: &Transaction) -> Result<(), Inconsistent> {
        self.take(transaction.clone())
    }

    /// The same, all of it or nothing.
    pub fn commit(&mut self, transaction: &Transaction) -> Result<(), Inconsistent> {
        let is_of_set = |op: &Op| matches!(op, Op::AddSet { .. } | Op::DeleteSet { .. });
        if transaction.anew || transaction.ops.iter().any(is_of_set) {
            let mut table = self.clone();
            table.apply(transaction)?;
            *self = table;
            return Ok(());
        }
        // Sets can be large, and most transactions are about elements and a rule or two: everything that can be wrong is seen before.
        for op in &transaction.ops {
            if let Op::AddElements { set, elements, .. } | Op::DeleteElements { set, elements, .. } = op {
                let held = self.sets.get(set).ok_or_else(|| Inconsistent { what: "set", name: set.clone() })?;
                if std::mem::discriminant(&held.elements) != std::mem::discriminant(elements) {
                    return Err(Inconsistent { what: "set of this kind", name: set.clone() });
                }
            }
        }
        self.check_chains(&transaction.ops)?;
        transaction.ops.iter().try_for_each(|op| self.take_one(op.clone()))
    }

    /// Whether every chain and place that the operations name will be there when their turn comes: told by how long chains are then.
    fn check_chains(&self, ops: &[Op]) -> Result<(), Inconsistent> {
        let wrong = |what: &'static str, name: &Name| Inconsistent { what, name: name.clone() };
        let mut lengths: BTreeMap<&Name, Option<usize>> = BTreeMap::new();
        for op in ops {
            let (Op::AddChain { chain, .. }
            | Op::DeleteChain { chain }
            | Op::FlushChain { chain }
            | Op::AddRule { chain, .. }
            | Op::DeleteRule { chain, .. }) = op
            else {
                continue;
            };
            let length = lengths.entry(chain).or_insert_with(|| self.chains.get(chain).map(|held| held.rules.len()));
            *length = match (op, *length) {
                (Op::AddChain { .. }, None) => Some(0),
                (Op::AddChain { .. }, Some(_)) => return Err(wrong("room for chain", chain)),
                (_, None) => return Err(wrong("chain", chain)),
                (Op::DeleteChain { .. }, _) => None,
                (Op::FlushChain { .. }, _) => Some(0),
                (Op::AddRule { at, .. }, Some(rules)) if *at <= rules => Some(rules + 1),
                (Op::AddRule { .. }, _) => return Err(wrong("such place in chain", chain)),
                (Op::DeleteRule { at, .. }, Some(rules)) if *at < rules => Some(rules - 1),
                (Op::DeleteRule { .. }, _) => return Err(wrong("such rule in chain", chain)),
                (_, length) => length,
            };
        }
        Ok(())
    }

    /// The same, where nobody needs the transaction afterwards.
    pub fn take(&mut self, transaction: Transaction) -> Result<(), Inconsistent> {
        if transaction.anew {
            *self = Table::default();
        }
        transaction.ops.into_iter().try_for_each(|op| self.take_one(op))
    }

    fn take_one(&mut self, op: Op) -> Result<(), Inconsistent> {
        let wrong = |what: &'static str, name: &Name| Inconsistent { what, name: name.clone() };
        let sets = &mut self.sets;
        let chains = &mut self.chains;
        match op {
            Op::AddSet { set, kind } => {
                if sets.insert(set.clone(), Set::new(kind)).is_some() {
                    return Err(wrong("room for set", &set));
                }
            }
            Op::DeleteSet { set } => {
                sets.remove(&set).ok_or_else(|| wrong("set", &set))?;
            }
            Op::AddElements { set, elements, .. } => {
                let held = sets.get_mut(&set).ok_or_else(|| wrong("set", &set))?;
                held.elements.extend(elements).then_some(()).ok_or_else(|| wrong("set of this kind", &set))?;
            }
            Op::DeleteElements { set, elements, .. } => {
                let held = sets.get_mut(&set).ok_or_else(|| wrong("set", &set))?;
                held.elements.remove(&elements).then_some(()).ok_or_else(|| wrong("set of this kind", &set))?;
            }
            Op::AddChain { chain, base } => {
                if chains.insert(chain.clone(), Chain { base, rules: Vec::new() }).is_some() {
                    return Err(wrong("room for chain", &chain));
                }
            }
            Op::DeleteChain { chain } => {
                chains.remove(&chain).ok_or_else(|| wrong("chain", &chain))?;
            }
            Op::FlushChain { chain } => chains.get_mut(&chain).ok_or_else(|| wrong("chain", &chain))?.rules.clear(),
            Op::AddRule { chain, at, rule } => {
                let held = chains.get_mut(&chain).ok_or_else(|| wrong("chain", &chain))?;
                if at > held.rules.len() {
                    return Err(wrong("such place in chain", &chain));
                }
                held.rules.insert(at, rule);
            }
            Op::DeleteRule { chain, at } => {
                let held = chains.get_mut(&chain).ok_or_else(|| wrong("chain", &chain))?;
                if at >= held.rules.len() {
                    return Err(wrong("such rule in chain", &chain));
                }
                held.rules.remove(at);
            }
        }
        Ok(())
    }
}

/// The transaction that makes the desired table out of nothing, whatever is there.
pub fn anew(desired: &Desired<'_>) -> Transaction {
    Transaction { anew: true, ops: diff(&Table::default(), desired, |_| false).ops }
}

/// The transaction that makes the desired table out of the actual one. A set whose elements are `trusted` is known to hold what it
/// should: they are not compared. The stamp, where there is one, is not looked at: see [`stamp`](crate::stamp).
pub fn diff(actual: &Table, desired: &Desired<'_>, trusted: impl Fn(&Name) -> bool) -> Transaction {
    let mut parts = Parts::default();
    for (name, want) in &desired.sets {
        match actual.sets.get(name) {
            Some(have) if have.kind != want.kind => return anew(desired),
            Some(_) if trusted(name) || set_role(name) == Role::Stamp => {}
            have => parts.set(name, have, want),
        }
    }
    for (name, want) in &desired.chains {
        match actual.chains.get(name) {
            Some(have) if have.base != want.base => return anew(desired),
            Some(_) if chain_role(name) == Role::Stamp => {}
            have => parts.chain(name, have, want.base, &want.rules),
        }
    }
    actual.chains.keys().filter(|name| !desired.chains.contains_key(*name)).for_each(|name| parts.chain_gone(name));
    actual.sets.keys().filter(|name| !desired.sets.contains_key(*name)).for_each(|name| parts.set_gone(name));
    parts.into_transaction()
}

/// The operations by their place in the order.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    add_sets: Vec<Op>,
    add_chains: Vec<Op>,
    pub elements: Vec<Op>,
    pub rules: Vec<Op>,
    pub verdicts: Vec<Op>,
    flush_chains: Vec<Op>,
    delete_chains: Vec<Op>,
    delete_sets: Vec<Op>,
}

impl Parts {
    pub fn chain(&mut self, name: &Name, have: Option<&Chain>, base: Option<Base>, want: &[Rule]) {
        let held = have.map_or(&[][..], |have| &have.rules);
        if have.is_none() {
            self.add_chains.push(Op::AddChain { chain: name.clone(), base });
        }
        if held != want {
            rules::edits(name, held, want, &mut self.rules);
        }
    }

    /// All flushed before any is deleted: they name each other.
    pub fn chain_gone(&mut self, name: &Name) {
        self.flush_chains.push(Op::FlushChain { chain: name.clone() });
        self.delete_chains.push(Op::DeleteChain { chain: name.clone() });
    }

    pub fn set(&mut self, name: &Name, have: Option<&Set>, want: &DesiredSet<'_>) {
        match have {
            Some(have) => self.compared(name, want.kind, &have.elements, &want.contents),
            None => {
                self.add_sets.push(Op::AddSet { set: name.clone(), kind: want.kind });
                self.compared(name, want.kind, &Elements::of(want.kind), &want.contents);
            }
        }
    }

    pub fn set_gone(&mut self, name: &Name) {
        self.delete_sets.push(Op::DeleteSet { set: name.clone() });
    }

    fn compared(&mut self, name: &Name, kind: SetKind, have: &Elements, want: &Contents<'_>) {
        let (missing, surplus) = match (have, want) {
            // Compared without a copy of the document.
            (Elements::V4(have), Contents::V4(want)) => (Elements::V4(*want - have), Elements::V4(have - *want)),
            (Elements::V6(have), Contents::V6(want)) => {
                (Elements::V6(want.difference(have).copied().collect()), Elements::V6(have.difference(want).copied().collect()))
            }
            (have, want) => {
                let want = want.to_elements();
                let missing = have.missing_from(&want).unwrap_or(want.clone());
                (missing, want.missing_from(have).unwrap_or(have.clone()))
            }
        };
        let list = if kind.has_verdicts() { &mut self.verdicts } else { &mut self.elements };
        element_ops(list, name, kind, missing, surplus);
    }

    pub fn into_transaction(mut self) -> Transaction {
        // The kernel looks through sets in the order they were added: first those of the frame, which are few and named by everything.
        self.add_sets.sort_by_key(|op| matches!(op, Op::AddSet { set, .. } if set_role(set) == Role::Named));
        let parts = [
            self.add_sets,
            self.add_chains,
            self.elements,
            self.rules,
            self.verdicts,
            self.flush_chains,
            self.delete_chains,
            self.delete_sets,
        ];
        Transaction { anew: false, ops: parts.into_iter().flatten().collect() }
    }
}

/// Removals before additions: the kernel refuses a range that overlaps one that is still there, and a key that is still mapped.
pub(crate) fn element_ops(ops: &mut Vec<Op>, name: &Name, kind: SetKind, missing: Elements, surplus: Elements) {
    // What the kernel fills by itself is not ours to take away.
    if kind == SetKind::Seen {
        return;
    }
    if !surplus.is_empty() {
        ops.push(Op::DeleteElements { set: name.clone(), kind, elements: surplus });
    }
    if !missing.is_empty() {
        ops.push(Op::AddElements { set: name.clone(), kind, elements: missing });
    }
}

/// How allows and denies name a set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uses {
    pub allows: bool,
    pub denies: bool,
}

/// Which sets the chains of groups name, and how.
pub fn uses_of<'c>(chains: impl IntoIterator<Item = (&'c Name, &'c Chain)>) -> BTreeMap<Name, Uses> {
    uses_of_rules(chains.into_iter().map(|(name, chain)| (name, &chain.rules[..])))
}

pub(crate) fn uses_of_rules<'c>(chains: impl IntoIterator<Item = (&'c Name, &'c [Rule])>) -> BTreeMap<Name, Uses> {
    let mut uses: BTreeMap<Name, Uses> = BTreeMap::new();
    for (name, rules) in chains {
        let role = chain_role(name);
        for set in rules.iter().flatten().flat_map(Statement::sets) {
            let entry = uses.entry(set.clone()).or_default();
            entry.denies |= role != Role::Allows;
            entry.allows |= role != Role::Denies;
        }
    }
    uses
}
