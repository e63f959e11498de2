//! When every flow must be judged again.
//!
//! A flow that carries the current stamp passes without being judged. So whatever could refuse a flow that was accepted before needs a
//! new stamp in the same transaction; what only accepts more does not.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::rule::Direction;

use crate::Name;
use crate::delta::{Op, Uses, element_ops};
use crate::expression::{Statement, Verdict};
use crate::names::{self, Role, chain_role, set_role};
use crate::ruleset::stamp_rules;
use crate::settings::{Settings, Stamp};
use crate::table::{Data, Elements, Key, Rule, SetKind, Table};

/// Whether these operations do anything but accept more. `uses` says how rules name sets, before and after.
pub fn needs_bump(actual: &Table, ops: &[Op], uses: impl Fn(&Name) -> Uses) -> bool {
    let (mut new_chains, mut new_sets, mut gone) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for op in ops {
        match op {
            Op::AddChain { chain, .. } => _ = new_chains.insert(chain),
            Op::AddSet { set, .. } => _ = new_sets.insert(set),
            Op::DeleteChain { chain } => _ = gone.insert(chain),
            Op::DeleteSet { set } => _ = gone.insert(set),
            _ => {}
        }
    }
    // Rules that were deleted, by the chain as it was; places move as rules go.
    let mut before: BTreeMap<&Name, Vec<Rule>> = BTreeMap::new();
    ops.iter().any(|op| match op {
        Op::AddSet { .. } | Op::AddChain { .. } | Op::DeleteSet { .. } | Op::DeleteChain { .. } => false,
        // Nobody leads there any more, which was judged where it was led from.
        Op::FlushChain { chain } => !gone.contains(chain),
        Op::AddRule { chain, rule, .. } => match chain_role(chain) {
            Role::Allows | Role::Neutral | Role::Stamp => false,
            Role::Profile => !new_chains.contains(chain) && leads_to(rule) != Some(Role::Allows),
            Role::Denies | Role::Frame | Role::Named => true,
        },
        Op::DeleteRule { chain, at } => {
            let rules = before
                .entry(chain)
                .or_insert_with(|| actual.chains.get(chain).map(|held| held.rules.clone()).unwrap_or_default());
            let rule = if *at < rules.len() { rules.remove(*at) } else { Rule::default() };
            match chain_role(chain) {
                Role::Denies | Role::Neutral | Role::Stamp => false,
                Role::Profile => leads_to(&rule) != Some(Role::Denies),
                Role::Allows | Role::Frame | Role::Named => true,
            }
        }
        Op::AddElements { set, .. } => match set_role(set) {
            Role::Named => !new_sets.contains(set) && uses(set).denies,
            Role::Allows | Role::Neutral | Role::Stamp => false,
            Role::Denies | Role::Profile | Role::Frame => true,
        },
        Op::DeleteElements { set, .. } => match set_role(set) {
            Role::Named => !gone.contains(set) && uses(set).allows,
            Role::Neutral | Role::Stamp => false,
            Role::Allows | Role::Denies | Role::Profile | Role::Frame => true,
        },
    })
}

/// The role of the chain that a rule of nothing but a jump leads to.
fn leads_to(rule: &Rule) -> Option<Role> {
    match &rule[..] {
        [Statement::Verdict(Verdict::Jump(chain))] => Some(chain_role(chain)),
        _ => None,
    }
}

/// The operations after which the table carries this stamp and no other. Of a table that has no place for one: none.
pub fn ops(actual: &Table, settings: &Settings, stamp: Stamp) -> Vec<Op> {
    let mut ops = Vec::new();
    let (set, kind) = (names::current(), SetKind::MarkToVerdict);
    if let Some(held) = actual.sets.get(&set) {
        let key = Key::Number(settings.mark.judged(stamp));
        let want = Elements::Keyed([(key, Data::Verdict(Verdict::Accept))].into());
        let (missing, surplus) = (held.elements.missing_from(&want), want.missing_from(&held.elements));
        let empty = || Elements::of(kind);
        element_ops(&mut ops, &set, kind, missing.unwrap_or_else(empty), surplus.unwrap_or_else(empty));
    }
    for side in [Direction::Egress, Direction::Ingress] {
        let (chain, rules) = stamp_rules(settings, stamp, side);
        let Some(held) = actual.chains.get(&chain) else { continue };
        if held.rules != rules {
            // Whole: nobody has to know which rule it was.
            ops.push(Op::FlushChain { chain: chain.clone() });
            ops.extend(rules.into_iter().enumerate().map(|(at, rule)| Op::AddRule { chain: chain.clone(), at, rule }));
        }
    }
    ops
}

/// The operations that replace one stamp by another, in a table that is known to carry the first.
pub fn exchange(settings: &Settings, old: Stamp, new: Stamp) -> Vec<Op> {
    let (set, kind) = (names::current(), SetKind::MarkToVerdict);
    let one = |stamp: Stamp| Elements::Keyed([(Key::Number(settings.mark.judged(stamp)), Data::Verdict(Verdict::Accept))].into());
    let mut ops = Vec::with_capacity(6);
    element_ops(&mut ops, &set, kind, one(new), one(old));
    for side in [Direction::Egress, Direction::Ingress] {
        let (chain, rules) = stamp_rules(settings, new, side);
        ops.push(Op::FlushChain { chain: chain.clone() });
        ops.extend(rules.into_iter().enumerate().map(|(at, rule)| Op::AddRule { chain: chain.clone(), at, rule }));
    }
    ops
}

/// Whether the table has places for a stamp.
pub fn has_stamp(table: &Table) -> bool {
    let chains = [Direction::Egress, Direction::Ingress].map(names::stamp);
    table.sets.contains_key(&names::current()) && chains.iter().all(|chain| table.chains.contains_key(chain))
}

/// The stamp that a table carries, if it is one of ours.
pub fn stamp_of(settings: &Settings, table: &Table) -> Option<Stamp> {
    let Elements::Keyed(current) = &table.sets.get(&names::current())?.elements else { return None };
    current
        .keys()
        .filter_map(|key| match key {
            Key::Number(mark) => settings.mark.stamp_in(*mark),
            _ => None,
        })
        .max()
}
