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

mod name;
mod region;
mod snapshot;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

pub use traffic::TrafficSet;

use crate::ids::{GroupId, HostId, WorkloadId};
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
    pub workloads: BTreeSet<WorkloadId>,
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
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// Not registered: nothing passes.
    Absent,
    /// Not enforced: everything passes.
    Open,
    Groups(Vec<GroupId>),
}

type Pieces = BTreeMap<TrafficSet, (Vec<Span<u32>>, Vec<Span<u128>>)>;

/// The flows gained and lost from one world to another.
pub fn meaning(old: &World, new: &World) -> Meaning {
    let (old, new) = (Snapshot::new(old), Snapshot::new(new));
    let changed = snapshot::changed_groups(&old, &new);
    let mut meaning = Meaning::default();
    // (direction, addresses, traffic) → workloads
    let mut gained: BTreeMap<(Direction, AddressSet, TrafficSet), BTreeSet<WorkloadId>> = BTreeMap::new();
    let mut lost = gained.clone();
    for direction in [Direction::Ingress, Direction::Egress] {
        let mut classes: BTreeMap<(State, State), BTreeSet<WorkloadId>> = BTreeMap::new();
        for workload in old.workloads().chain(new.workloads()) {
            let states = (old.state(workload, direction), new.state(workload, direction));
            let touched = |state: &State| matches!(state, State::Groups(groups) if groups.iter().any(|g| changed.contains(g)));
            if states.0 != states.1 || touched(&states.0) || touched(&states.1) {
                classes.entry(states).or_default().insert(workload.clone());
            }
        }
        for ((before, after), workloads) in classes {
            let (mut more, mut less) = (Pieces::new(), Pieces::new());
            for family in [Family::V4, Family::V6] {
                let before = Region::new(&old, &before, direction, family);
                let after = Region::new(&new, &after, direction, family);
                after.minus(&before, |first, last, traffic| collect(&mut more, family, first, last, traffic));
                before.minus(&after, |first, last, traffic| collect(&mut less, family, first, last, traffic));
            }
            for (pieces, list) in [(more, &mut gained), (less, &mut lost)] {
                for (traffic, (v4, v6)) in pieces {
                    let addresses = AddressSet { v4: v4.into_iter().collect(), v6: v6.into_iter().collect() };
                    list.entry((direction, addresses, traffic)).or_default().extend(workloads.iter().cloned());
                }
            }
        }
    }
    meaning.gained = statements(&new, gained);
    meaning.lost = statements(&old, lost);
    for id in old.workloads().chain(new.workloads()) {
        if let (Some(before), Some(after)) = (old.is_stateful(id), new.is_stateful(id))
            && before != after
        {
            meaning.state_changed.insert(id.clone());
        }
    }
    let spoken_of = meaning.gained.iter().chain(&meaning.lost).flat_map(|statement| &statement.workloads);
    meaning.workloads = spoken_of.chain(&meaning.state_changed).cloned().collect();
    let entries = meaning.workloads.iter().flat_map(|id| [old.entry(id), new.entry(id)]);
    meaning.hosts = entries.flatten().map(|workload| workload.host.clone()).collect();
    meaning
}

fn collect(pieces: &mut Pieces, family: Family, first: u128, last: u128, traffic: &TrafficSet) {
    let (v4, v6) = pieces.entry(traffic.clone()).or_default();
    match family {
        Family::V4 => v4.extend(Span::new(first as u32, last as u32)),
        Family::V6 => v6.extend(Span::new(first, last)),
    }
}

fn statements(
    world: &Snapshot<'_>,
    found: BTreeMap<(Direction, AddressSet, TrafficSet), BTreeSet<WorkloadId>>,
) -> Vec<Statement> {
    let mut list = Vec::new();
    for ((direction, addresses, traffic), workloads) in found {
        let (remote, family) = match (addresses.v4.spans().first(), addresses.v6.spans().first()) {
            (Some(span), _) => (IpAddr::V4(span.first().into()), Family::V4),
            (None, Some(span)) => (IpAddr::V6(span.first().into()), Family::V6),
            (None, None) => continue,
        };
        let (Some(workload), Some(payload)) = (workloads.first().cloned(), traffic.example(family)) else { continue };
        let witness = Witness { workload, remote, payload };
        let (local, remote) = (name::local(world, &workloads), name::remote(world, &workloads, &addresses));
        list.push(Statement { direction, workloads, local, addresses, remote, traffic, witness });
    }
    list
}

#[cfg(test)]
mod tests;
