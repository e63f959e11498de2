//! One direction of a policy over the addresses of one family: the line cut where anything changes, each piece with its traffic.
//!
//! Rules with the same remote are one *bundle*: it begins and ends as a whole, however many rules it has. At each cut only the bundles that
//! hold there are looked at. A list of all rules at every cut would make ten thousand rules with a prefix each cost a hundred million steps.

use std::collections::{BTreeMap, HashMap};

use super::budget::{Budget, Exceeded};
use super::traffic::TrafficSet;
use super::{Snapshot, State};
use crate::net::{AddressSet, Family};
use crate::rule::{Action, Direction, Remote, Rule};

pub(super) struct Region {
    /// Sorted starts of the pieces, the first at 0, with what is allowed there.
    pieces: Vec<(u128, usize)>,
    traffic: Vec<TrafficSet>,
    last: u128,
    /// What it holds of the budget.
    held: usize,
}

/// Some traffic, and where on the line of addresses it is.
pub(super) type Difference = (TrafficSet, Vec<(u128, u128)>);

/// What the rules with one remote say together: allowed and denied.
type Bundle = (TrafficSet, TrafficSet);

/// The bundle begins or ends here.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Cut {
    at: u128,
    bundle: u32,
    begins: bool,
}

fn spans(set: &AddressSet, family: Family) -> Vec<(u128, u128)> {
    match family {
        Family::V4 => set.v4.spans().iter().map(|s| (u128::from(s.first()), u128::from(s.last()))).collect(),
        Family::V6 => set.v6.spans().iter().map(|s| (s.first(), s.last())).collect(),
    }
}

impl Region {
    pub fn new(
        world: &Snapshot<'_>,
        state: &State,
        direction: Direction,
        family: Family,
        budget: &mut Budget<'_>,
    ) -> Result<Self, Exceeded> {
        let last = match family {
            Family::V4 => u128::from(u32::MAX),
            Family::V6 => u128::MAX,
        };
        let uniform = |traffic: TrafficSet| Self { pieces: vec![(0, 0)], traffic: vec![traffic], last, held: 0 };
        let groups = match state {
            State::Absent => return Ok(uniform(TrafficSet::default())),
            State::Open => return Ok(uniform(TrafficSet::everything())),
            State::Groups(list) => world.list(*list),
        };
        let mut by_remote: BTreeMap<&Remote, Vec<&Rule>> = BTreeMap::new();
        for group in groups {
            let rules = world.rules(group);
            budget.spend(rules.len() + 1)?;
            for rule in rules.iter().filter(|rule| rule.direction == direction && rule.family.is_none_or(|of| of == family)) {
                let remote = match &rule.remote {
                    Remote::Group(remote) if world.members(remote).is_none() => match rule.action {
                        Action::Allow => continue,
                        Action::Deny => &Remote::Any,
                    },
                    remote => remote,
                };
                by_remote.entry(remote).or_default().push(rule);
            }
        }
        // Bundles that say the same are one kind: what counts is how many of a kind hold.
        let mut kinds: BTreeMap<Bundle, u32> = BTreeMap::new();
        let (mut cuts, mut held): (Vec<Cut>, usize) = Default::default();
        for (remote, rules) in by_remote {
            let of = |action: Action| -> Vec<TrafficSet> {
                rules.iter().filter(|rule| rule.action == action).map(|rule| TrafficSet::of(&rule.traffic, family)).collect()
            };
            let (allow, deny) = (of(Action::Allow), of(Action::Deny));
            budget.spend(allow.iter().chain(&deny).map(TrafficSet::len).sum())?;
            let bundle = (TrafficSet::union(&allow), TrafficSet::union(&deny));
            let active = match remote {
                Remote::Any => vec![(0, last)],
                Remote::Addresses(set) => spans(set, family),
                Remote::Group(group) => world.members(group).map(|members| spans(members, family)).unwrap_or_default(),
            };
            budget.hold(2 * active.len())?;
            held += 2 * active.len();
            let next = kinds.len() as u32;
            let kind = *kinds.entry(bundle).or_insert(next);
            for (first, end) in active {
                cuts.push(Cut { at: first, bundle: kind, begins: true });
                if end < last {
                    cuts.push(Cut { at: end + 1, bundle: kind, begins: false });
                }
            }
        }
        cuts.sort_unstable();
        let mut bundles = vec![Bundle::default(); kinds.len()];
        kinds.into_iter().for_each(|(bundle, kind)| bundles[kind as usize] = bundle);
        let region = Self::sweep(&cuts, &bundles, last, budget)?;
        budget.release(held);
        Ok(region)
    }

    fn sweep(cuts: &[Cut], bundles: &[Bundle], last: u128, budget: &mut Budget<'_>) -> Result<Self, Exceeded> {
        let mut region = Self { pieces: Vec::new(), traffic: Vec::new(), last, held: 0 };
        // How many of a kind hold here; one that does not is not in it.
        let mut active: BTreeMap<u32, u32> = BTreeMap::new();
        let mut known: HashMap<Vec<u32>, usize> = HashMap::new();
        let mut known_held = 0;
        let mut at = 0;
        let mut position = 0u128;
        loop {
            while at < cuts.len() && cuts[at].at == position {
                let count = active.entry(cuts[at].bundle).or_default();
                *count = if cuts[at].begins { *count + 1 } else { count.saturating_sub(1) };
                if *count == 0 {
                    active.remove(&cuts[at].bundle);
                }
                at += 1;
            }
            let key: Vec<u32> = active.keys().copied().collect();
            budget.spend(key.len() + 1)?;
            let class = match known.get(&key) {
                Some(class) => *class,
                None => {
                    let ranges = |of: fn(&Bundle) -> &TrafficSet| key.iter().map(move |kind| of(&bundles[*kind as usize]));
                    budget.spend(ranges(|b| &b.0).chain(ranges(|b| &b.1)).map(TrafficSet::len).sum())?;
                    let traffic = TrafficSet::union(ranges(|b| &b.0)).minus(&TrafficSet::union(ranges(|b| &b.1)));
                    budget.hold(traffic.len() + key.len())?;
                    region.held += traffic.len();
                    known_held += key.len();
                    region.traffic.push(traffic);
                    known.insert(key, region.traffic.len() - 1);
                    region.traffic.len() - 1
                }
            };
            if region.pieces.last().is_none_or(|piece| piece.1 != class) {
                budget.hold(1)?;
                region.held += 1;
                region.pieces.push((position, class));
            }
            match cuts.get(at) {
                Some(cut) => position = cut.at,
                None => {
                    budget.release(known_held);
                    return Ok(region);
                }
            }
        }
    }

    /// What this allows and the other does not, and where, in order of addresses.
    pub fn minus(&self, other: &Self, budget: &mut Budget<'_>) -> Result<Vec<Difference>, Exceeded> {
        let mut found: Vec<Difference> = Vec::new();
        let mut known: HashMap<(usize, usize), Option<usize>> = HashMap::new();
        let (mut mine, mut theirs) = (0, 0);
        let mut first = 0u128;
        loop {
            let end_of = |pieces: &[(u128, usize)], index: usize, last: u128| pieces.get(index + 1).map_or(last, |p| p.0 - 1);
            let end = end_of(&self.pieces, mine, self.last).min(end_of(&other.pieces, theirs, other.last));
            let key = (self.pieces[mine].1, other.pieces[theirs].1);
            budget.spend(1)?;
            let difference = match known.get(&key) {
                Some(index) => *index,
                None => {
                    let (one, another) = (&self.traffic[key.0], &other.traffic[key.1]);
                    budget.spend(one.len() + another.len())?;
                    let traffic = one.minus(another);
                    let index = (!traffic.is_empty()).then_some(found.len());
                    if index.is_some() {
                        budget.hold(traffic.len())?;
                        found.push((traffic, Vec::new()));
                    }
                    known.insert(key, index);
                    index
                }
            };
            if let Some(index) = difference {
                budget.hold(1)?;
                found[index].1.push((first, end));
            }
            if end == self.last {
                return Ok(found);
            }
            first = end + 1;
            mine += usize::from(self.pieces.get(mine + 1).is_some_and(|p| p.0 == first));
            theirs += usize::from(other.pieces.get(theirs + 1).is_some_and(|p| p.0 == first));
        }
    }

    /// Gives back what it holds.
    pub fn release(self, budget: &mut Budget<'_>) {
        budget.release(self.held);
    }
}
