//! What a change means: the flows gained and lost between two worlds, exactly and over the whole packet space.
//!
//! A statement says what one end's policy newly permits or no longer permits: these workloads, in this direction, with these
//! remotes, for this traffic. (Whether a flow between two of our workloads then passes is up to both ends' statements.) The
//! statements of one list never overlap for one workload, so that applied to the old policy they give the new one; each brings
//! one packet that shows it.
//!
//! How: workloads with the same groups before and the same groups after form a class. For each class, direction and family the
//! line of remote addresses is cut where any rule begins or ends; between two cuts the policy is a set of traffic (protocol ×
//! port, or ICMP type and code). The differences of these sets are collected over cuts and classes.

mod budget;
mod name;
mod region;
mod snapshot;
mod traffic;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

pub use budget::{Budget, Exceeded, HELD_MAX, WORK_MAX};
pub use traffic::TrafficSet;

use crate::ids::{HostId, WorkloadId};
use crate::model::World;
use crate::net::{AddressSet, Family, Span};
use crate::packet::{Payload, family_of};
use crate::rule::Direction;
use region::Region;
use snapshot::Snapshot;

/// A packet that shows a statement to be true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Witness {
    pub workload: WorkloadId,
    pub remote: IpAddr,
    pub payload: Payload,
}

/// Flows that all change alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    pub direction: Direction,
    /// The workloads whose policy it is, and what they are called together.
    pub workloads: Arc<BTreeSet<WorkloadId>>,
    pub local: String,
    /// The other ends, and what they are called together.
    pub addresses: AddressSet,
    pub remote: String,
    pub traffic: TrafficSet,
    pub witness: Witness,
}

impl Statement {
    pub fn covers(&self, workload: &WorkloadId, direction: Direction, remote: IpAddr, payload: &Payload) -> bool {
        self.direction == direction
            && self.workloads.contains(workload)
            && self.addresses.contains(remote)
            && self.traffic.covers(family_of(remote), payload)
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local, remote, traffic, witness, .. } = self;
        match self.direction {
            Direction::Ingress => write!(f, "{remote} -> {local}: {traffic}")?,
            Direction::Egress => write!(f, "{local} -> {remote}: {traffic}")?,
        }
        let Witness { workload, remote, payload } = witness;
        match self.direction {
            Direction::Ingress => write!(f, " (for example {remote} -> {workload} {payload})"),
            Direction::Egress => write!(f, " (for example {workload} -> {remote} {payload})"),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meaning {
    pub gained: Vec<Statement>,
    pub lost: Vec<Statement>,
    /// Workloads that now keep state for replies, or no longer do.
    pub state_changed: BTreeSet<WorkloadId>,
    /// Everything a statement is about.
    pub workloads: BTreeSet<WorkloadId>,
    /// Where these run, before and after.
    pub hosts: BTreeSet<HostId>,
}

impl Meaning {
    pub fn is_empty(&self) -> bool {
        self.gained.is_empty() && self.lost.is_empty() && self.state_changed.is_empty()
    }

    /// The new verdict, from the old one and the statements alone.
    pub fn after(&self, before: bool, workload: &WorkloadId, direction: Direction, remote: IpAddr, payload: &Payload) -> bool {
        let covers = |list: &[Statement]| list.iter().any(|statement| statement.covers(workload, direction, remote, payload));
        (before && !covers(&self.lost)) || covers(&self.gained)
    }
}

/// What a workload is subject to in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum State {
    /// Not registered: nothing passes.
    Absent,
    /// Not enforced: everything passes.
    Open,
    /// One of its snapshot's lists of groups.
    Groups(usize),
}

/// Workloads whose policy changes alike, and in which direction.
type Class<'w> = (Direction, Vec<&'w WorkloadId>);

/// What was found, each with the classes it is about.
type Found = BTreeMap<(Direction, AddressSet, TrafficSet), Vec<usize>>;

/// The flows gained and lost from one world to another.
pub fn meaning(old: &World, new: &World, budget: &mut Budget<'_>) -> Result<Meaning, Exceeded> {
    let (old, new) = (Snapshot::new(old, budget)?, Snapshot::new(new, budget)?);
    let mut meaning = Meaning::default();
    let (mut gained, mut lost) = (Found::new(), Found::new());
    let mut classes: Vec<Class<'_>> = Vec::new();
    for ((direction, before, after), workloads) in classes_of(&old, &new, budget)? {
        let (mut more, mut less) = (Pieces::new(), Pieces::new());
        for family in [Family::V4, Family::V6] {
            let before = Region::new(&old, &before, direction, family, budget)?;
            let after = Region::new(&new, &after, direction, family, budget)?;
            collect(&mut more, family, after.minus(&before, budget)?);
            collect(&mut less, family, before.minus(&after, budget)?);
            before.release(budget);
            after.release(budget);
        }
        for (pieces, list) in [(more, &mut gained), (less, &mut lost)] {
            for (traffic, (v4, v6)) in pieces {
                let addresses = AddressSet { v4: v4.into_iter().collect(), v6: v6.into_iter().collect() };
                list.entry((direction, addresses, traffic)).or_default().push(classes.len());
            }
        }
        classes.push((direction, workloads));
    }
    let mut sets = Sets { classes: &classes, known: HashMap::new() };
    meaning.gained = statements(&new, gained, &mut sets, budget)?;
    meaning.lost = statements(&old, lost, &mut sets, budget)?;
    for id in old.workloads() {
        if let (Some(before), Some(after)) = (old.list_of(id), new.list_of(id))
            && old.is_stateful(before) != new.is_stateful(after)
        {
            meaning.state_changed.insert(id.clone());
        }
    }
    let spoken_of = sets.known.values().flat_map(|set| set.iter());
    meaning.workloads = spoken_of.chain(&meaning.state_changed).cloned().collect();
    let entries = meaning.workloads.iter().flat_map(|id| [old.entry(id), new.entry(id)]);
    meaning.hosts = entries.flatten().map(|workload| workload.host.clone()).collect();
    Ok(meaning)
}

type Classes<'w> = BTreeMap<(Direction, State, State), Vec<&'w WorkloadId>>;

/// The workloads whose policy may differ, those with the same groups before and the same after together.
fn classes_of<'w>(old: &Snapshot<'w>, new: &Snapshot<'w>, budget: &mut Budget<'_>) -> Result<Classes<'w>, Exceeded> {
    let changed = snapshot::changed_groups(old, new);
    let touched = |world: &Snapshot<'w>| -> Vec<bool> {
        world.lists().iter().map(|list| list.iter().any(|group| changed.contains(*group))).collect()
    };
    let (touched_before, touched_after) = (touched(old), touched(new));
    let mut differs: HashMap<(usize, usize), bool> = HashMap::new();
    let mut classes = Classes::new();
    let added = new.workloads().filter(|id| !old.has(id));
    for workload in old.workloads().chain(added) {
        for direction in [Direction::Ingress, Direction::Egress] {
            budget.spend(1)?;
            let states = (old.state(workload, direction), new.state(workload, direction));
            let is_concerned = match states {
                (State::Groups(before), State::Groups(after)) => {
                    let differs = differs.entry((before, after)).or_insert_with(|| old.list(before) != new.list(after));
                    *differs || touched_before[before] || touched_after[after]
                }
                (before, after) => before != after,
            };
            if is_concerned {
                classes.entry((direction, states.0, states.1)).or_default().push(workload);
            }
        }
    }
    Ok(classes)
}

type Pieces = BTreeMap<TrafficSet, (Vec<Span<u32>>, Vec<Span<u128>>)>;

fn collect(pieces: &mut Pieces, family: Family, found: Vec<region::Difference>) {
    for (traffic, places) in found {
        let (v4, v6) = pieces.entry(traffic).or_default();
        for (first, last) in places {
            match family {
                Family::V4 => v4.extend(Span::new(first as u32, last as u32)),
                Family::V6 => v6.extend(Span::new(first, last)),
            }
        }
    }
}

/// The workloads of some classes: one set for all statements about the same.
struct Sets<'c, 'w> {
    classes: &'c [Class<'w>],
    known: HashMap<Vec<usize>, Arc<BTreeSet<WorkloadId>>>,
}

impl Sets<'_, '_> {
    fn of(&mut self, classes: Vec<usize>, budget: &mut Budget<'_>) -> Result<Arc<BTreeSet<WorkloadId>>, Exceeded> {
        if let Some(set) = self.known.get(&classes) {
            return Ok(set.clone());
        }
        let ids = classes.iter().flat_map(|class| self.classes[*class].1.iter().copied().cloned());
        let set: Arc<BTreeSet<WorkloadId>> = Arc::new(ids.collect());
        budget.hold(set.len() + classes.len())?;
        self.known.insert(classes, set.clone());
        Ok(set)
    }
}

fn statements(
    world: &Snapshot<'_>,
    found: Found,
    sets: &mut Sets<'_, '_>,
    budget: &mut Budget<'_>,
) -> Result<Vec<Statement>, Exceeded> {
    let mut list = Vec::with_capacity(found.len());
    let mut names = name::Names::new(world);
    for ((direction, addresses, traffic), classes) in found {
        let (remote, family) = match (addresses.v4.spans().first(), addresses.v6.spans().first()) {
            (Some(span), _) => (IpAddr::V4(span.first().into()), Family::V4),
            (None, Some(span)) => (IpAddr::V6(span.first().into()), Family::V6),
            (None, None) => continue,
        };
        let Some(payload) = traffic.example(family) else { continue };
        let workloads = sets.of(classes, budget)?;
        let Some(workload) = workloads.first().cloned() else { continue };
        let witness = Witness { workload, remote, payload };
        let (local, remote) = (names.local(&workloads, budget)?, names.remote(&workloads, &addresses, budget)?);
        list.push(Statement { direction, workloads, local, addresses, remote, traffic, witness });
    }
    Ok(list)
}

#[cfg(test)]
mod tests;
