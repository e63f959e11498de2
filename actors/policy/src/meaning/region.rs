//! One direction of a policy over the addresses of one family: the line cut where anything changes, each piece with its traffic.

use std::collections::HashMap;

use super::traffic::TrafficSet;
use super::{Snapshot, State};
use crate::net::{AddressSet, Family};
use crate::rule::{Action, Direction, Remote};

pub(super) struct Region {
    /// Sorted starts of the pieces, the first at 0, with what is allowed there.
    pieces: Vec<(u128, usize)>,
    traffic: Vec<TrafficSet>,
    last: u128,
}

fn spans(set: &AddressSet, family: Family) -> Vec<(u128, u128)> {
    match family {
        Family::V4 => set.v4.spans().iter().map(|s| (u128::from(s.first()), u128::from(s.last()))).collect(),
        Family::V6 => set.v6.spans().iter().map(|s| (s.first(), s.last())).collect(),
    }
}

impl Region {
    pub fn new(world: &Snapshot<'_>, state: &State, direction: Direction, family: Family) -> Self {
        let last = match family {
            Family::V4 => u128::from(u32::MAX),
            Family::V6 => u128::MAX,
        };
        let groups = match state {
            State::Absent => return Self { pieces: vec![(0, 0)], traffic: vec![TrafficSet::default()], last },
            State::Open => return Self { pieces: vec![(0, 0)], traffic: vec![TrafficSet::everything()], last },
            State::Groups(groups) => groups,
        };
        let mut rules: Vec<(Action, TrafficSet)> = Vec::new();
        // (address, rule, begins): the rule is active from here, or no longer.
        let mut cuts: Vec<(u128, usize, bool)> = Vec::new();
        for group in groups {
            for rule in world.rules(group).iter().filter(|rule| rule.direction == direction) {
                if rule.family.is_some_and(|of| of != family) {
                    continue;
                }
                let everywhere = vec![(0, last)];
                let where_active = match &rule.remote {
                    Remote::Any => everywhere,
                    Remote::Addresses(set) => spans(set, family),
                    Remote::Group(remote) => match (world.members(remote), rule.action) {
                        (Some(members), _) => spans(members, family),
                        (None, Action::Allow) => continue,
                        (None, Action::Deny) => everywhere,
                    },
                };
                for (first, end) in where_active {
                    cuts.push((first, rules.len(), true));
                    if end < last {
                        cuts.push((end + 1, rules.len(), false));
                    }
                }
                rules.push((rule.action, TrafficSet::of(&rule.traffic, family)));
            }
        }
        cuts.sort_unstable();
        Self::sweep(&cuts, &rules, last)
    }

    fn sweep(cuts: &[(u128, usize, bool)], rules: &[(Action, TrafficSet)], last: u128) -> Self {
        let mut region = Self { pieces: Vec::new(), traffic: Vec::new(), last };
        let mut active = vec![false; rules.len()];
        let mut known: HashMap<Vec<bool>, usize> = HashMap::new();
        let mut at = 0;
        let mut position = 0u128;
        loop {
            while at < cuts.len() && cuts[at].0 == position {
                // Spans of one rule are merged, so ends and beginnings at one place are of different rules.
                active[cuts[at].1] = cuts[at].2;
                at += 1;
            }
            let class = *known.entry(active.clone()).or_insert_with(|| {
                let of = |action: Action| {
                    let on = rules.iter().zip(&active).filter(|((a, _), on)| **on && *a == action);
                    TrafficSet::union(on.map(|((_, traffic), _)| traffic))
                };
                region.traffic.push(of(Action::Allow).minus(&of(Action::Deny)));
                region.traffic.len() - 1
            });
            region.pieces.push((position, class));
            match cuts.get(at) {
                Some(cut) => position = cut.0,
                None => return region,
            }
        }
    }

    /// Where and what this allows and the other does not, in order of addresses.
    pub fn minus(&self, other: &Self, mut put: impl FnMut(u128, u128, &TrafficSet)) {
        let mut differences: HashMap<(usize, usize), TrafficSet> = HashMap::new();
        let (mut mine, mut theirs) = (0, 0);
        let mut first = 0u128;
        loop {
            let end_of = |pieces: &[(u128, usize)], index: usize, last: u128| pieces.get(index + 1).map_or(last, |p| p.0 - 1);
            let end = end_of(&self.pieces, mine, self.last).min(end_of(&other.pieces, theirs, other.last));
            let key = (self.pieces[mine].1, other.pieces[theirs].1);
            let difference = differences.entry(key).or_insert_with(|| self.traffic[key.0].minus(&other.traffic[key.1]));
            if !difference.is_empty() {
                put(first, end, difference);
            }
            if end == self.last {
                return;
            }
            first = end + 1;
            mine += usize::from(self.pieces.get(mine + 1).is_some_and(|p| p.0 == first));
            theirs += usize::from(other.pieces.get(theirs + 1).is_some_and(|p| p.0 == first));
        }
    }
}
