//! When every flow must be judged again.
//!
//! A flow that carries the current stamp passes without being judged. So whatever could refuse a flow that was accepted before needs a
//! new stamp in the same transaction; what only accepts more does not.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::Name;
use crate::delta::{Op, Uses};
use crate::expression::{Statement, Verdict};
use crate::names::{self, Role, chain_role, set_role};
use crate::ruleset::{stamp_chains, stamp_rule_counts};
use crate::settings::{Settings, Stamp};
use crate::table::{Elements, Key, Rule, Table};

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
    for (chain, rules) in stamp_chains(settings, stamp) {
        let Some(held) = actual.chains.get(&chain) else { continue };
        match held.rules.strip_suffix(&rules[..]) {
            Some(before) => delete_first(&mut ops, &chain, before.len()),
            None => replace(&mut ops, chain, rules),
        }
    }
    ops
}

/// The operations that replace one stamp by another, in a table that is known to carry the first.
pub fn exchange(settings: &Settings, old: Stamp, new: Stamp) -> Vec<Op> {
    let provided = old.provision().position(|stamp| stamp == new);
    let mut ops = Vec::new();
    match provided {
        Some(steps) => {
            for (chain, count) in stamp_rule_counts(settings) {
                delete_first(&mut ops, &chain, steps * count);
            }
        }
        None => stamp_chains(settings, new).into_iter().for_each(|(chain, rules)| replace(&mut ops, chain, rules)),
    }
    ops
}

/// What comes after them is for the stamps that follow.
fn delete_first(ops: &mut Vec<Op>, chain: &Name, count: usize) {
    ops.extend((0..count).map(|_| Op::DeleteRule { chain: chain.clone(), at: 0 }));
}

/// Whole: nobody has to know which rules they were.
fn replace(ops: &mut Vec<Op>, chain: Name, rules: Vec<Rule>) {
    ops.push(Op::FlushChain { chain: chain.clone() });
    ops.extend(rules.into_iter().enumerate().map(|(at, rule)| Op::AddRule { chain: chain.clone(), at, rule }));
}

/// Whether the table has places for a stamp.
pub fn has_stamp(settings: &Settings, table: &Table) -> bool {
    stamp_rule_counts(settings).iter().all(|(chain, _)| table.chains.contains_key(chain))
}

/// The stamp that a table carries, if it is one of ours: what its first rule writes. Before there were rules for stamps to come, a map
/// held the current one.
pub fn stamp_of(settings: &Settings, table: &Table) -> Option<Stamp> {
    let written = table.chains.get(&names::stamp_out()).into_iter().flat_map(|chain| chain.rules.first()).flatten();
    let written = written.filter_map(|statement| match statement {
        Statement::SetMark { set, .. } => settings.mark.stamp_in(*set),
        _ => None,
    });
    let held = match table.sets.get(&names::current()).map(|set| &set.elements) {
        Some(Elements::Keyed(current)) => Some(current.keys()),
        _ => None,
    };
    let held = held.into_iter().flatten().filter_map(|key| match key {
        Key::Number(mark) => settings.mark.stamp_in(*mark),
        _ => None,
    });
    written.chain(held).max()
}
