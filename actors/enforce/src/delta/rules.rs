//! From one list of rules to another with few edits: what stays keeps its counters.

use std::collections::HashMap;

use super::Op;
use crate::Name;
use crate::table::Rule;

pub fn edits(chain: &Name, have: &[Rule], want: &[Rule], ops: &mut Vec<Op>) {
    let kept = kept(have, want);
    // From the end, so that places before stay what they are.
    let mut stays = vec![false; have.len()];
    kept.iter().for_each(|(old, _)| stays[*old] = true);
    for at in (0..have.len()).rev().filter(|at| !stays[*at]) {
        ops.push(Op::DeleteRule { chain: chain.clone(), at });
    }
    let mut is_new = vec![true; want.len()];
    kept.iter().for_each(|(_, new)| is_new[*new] = false);
    // From the beginning: everything before a place is as it should be when its turn comes.
    for (at, rule) in want.iter().enumerate().filter(|(at, _)| is_new[*at]) {
        ops.push(Op::AddRule { chain: chain.clone(), at, rule: rule.clone() });
    }
}

/// Pairs of places that hold the same rule in both, ascending in both: the longest such list where no rule stands twice.
fn kept(have: &[Rule], want: &[Rule]) -> Vec<(usize, usize)> {
    let mut places: HashMap<&Rule, Vec<usize>> = HashMap::new();
    for (at, rule) in want.iter().enumerate().rev() {
        places.entry(rule).or_default().push(at);
    }
    // Each rule takes the first free place of its equals.
    let pairs: Vec<(usize, usize)> =
        have.iter().enumerate().filter_map(|(old, rule)| Some((old, places.get_mut(rule)?.pop()?))).collect();
    longest_ascending(&pairs)
}

/// By the second of each pair; the first ascends already.
fn longest_ascending(pairs: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let mut tails: Vec<usize> = Vec::new();
    let mut before: Vec<Option<usize>> = vec![None; pairs.len()];
    for (index, (_, new)) in pairs.iter().enumerate() {
        let length = tails.partition_point(|tail| pairs[*tail].1 < *new);
        before[index] = length.checked_sub(1).map(|last| tails[last]);
        if length == tails.len() {
            tails.push(index);
        } else {
            tails[length] = index;
        }
    }
    let mut chain = Vec::new();
    let mut next = tails.last().copied();
    while let Some(index) = next {
        chain.push(pairs[index]);
        next = before[index];
    }
    chain.reverse();
    chain
}
