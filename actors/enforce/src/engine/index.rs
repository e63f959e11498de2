//! What is known about the table beside its contents: who has which profile, which scopes, groups, members and sets are in use, and by
//! whom. A change looks up here what depends on it, and nothing else is looked at.
//!
//! [`Step`] carries one change through, in the order in which things depend on each other: workloads, profiles, scopes, groups, members.
//! From scratch is the same with everything changed.

mod groups;
mod placing;
mod profiles;

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::{Content, Edit, Enforced, Phase, Placement};
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::topic::{Scope, Topic};

use crate::Name;
use crate::delta::{Parts, Transaction, Uses};
use crate::names::View;
use crate::ruleset::{Denies, Element, Has, Keys, Owners, ProfileKey, Refusal, Shape, denies_of, keys_of};
use crate::settings::{Attached, Attachments, Settings};
use crate::table::Table;

/// A scope in a phase.
type Place = (Scope, Phase);

const VIEWS: [View; 2] = [View::Connection, View::Headers];
const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    settings: Settings,
    keys: Keys,
    workloads: BTreeMap<WorkloadId, Record>,
    owners: Owners,
    pub refused: Vec<Refusal>,
    /// Workloads with ranges of addresses.
    ranged: BTreeSet<WorkloadId>,
    /// By number.
    profiles: BTreeMap<u32, Profile>,
    scopes: BTreeMap<Place, Bound>,
    groups: BTreeMap<GroupId, Group>,
    remotes: BTreeMap<GroupId, Remote>,
    sets: BTreeMap<Name, UseCount>,
}

/// What is there for one workload.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    profile: u32,
    attached: Attached,
    enforced: Enforced,
    addresses: BTreeSet<Prefix>,
    elements: Vec<Element>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Profile {
    key: ProfileKey,
    workloads: BTreeSet<WorkloadId>,
    /// `None`: not written yet.
    shape: Option<Shape>,
}

/// The groups of a scope that some workload is in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Bound {
    profiles: BTreeSet<u32>,
    synced: bool,
    groups: BTreeSet<GroupId>,
    /// How many of them have no rules document.
    missing: usize,
    stateful: usize,
    /// How many have denies, by direction.
    denies: [usize; 2],
    /// How many complete profiles of each view jump here.
    views: [usize; 2],
}

/// What a scope means for the shape of the profiles that have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flags {
    incomplete: bool,
    stateful: bool,
    known: bool,
    denies: Denies,
}

/// A group that a scope or a profile names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Group {
    /// `None`: no rules document.
    rules: Option<Summary>,
    scopes: BTreeSet<Place>,
    profiles: BTreeSet<u32>,
    /// What is there of it, by view.
    written: [Option<WrittenGroup>; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Summary {
    stateful: bool,
    has: Has,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct WrittenGroup {
    chains: BTreeSet<Name>,
    /// Sets named by their content.
    contents: BTreeSet<Name>,
    /// These and the sets of members.
    sets: BTreeMap<Name, Uses>,
    remotes: BTreeMap<GroupId, [bool; 2]>,
}

/// A group that rules name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Remote {
    namers: BTreeSet<(View, GroupId)>,
    /// How many name it in each family.
    families: [usize; 2],
    known: bool,
    spans: [bool; 2],
}

/// How many groups name a set in allows, and how many in denies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct UseCount {
    allows: usize,
    denies: usize,
}

impl UseCount {
    fn uses(self) -> Uses {
        Uses { allows: self.allows > 0, denies: self.denies > 0 }
    }
}

impl Bound {
    fn flags(&self) -> Flags {
        Flags {
            incomplete: !self.synced || self.missing > 0,
            stateful: self.stateful > 0,
            known: self.groups.len() > self.missing,
            denies: self.denies.map(|count| count > 0),
        }
    }

    fn count(&mut self, rules: Option<Summary>, more: bool) {
        let step = |count: &mut usize| *count = if more { *count + 1 } else { count.saturating_sub(1) };
        let Some(summary) = rules else { return step(&mut self.missing) };
        if summary.stateful {
            step(&mut self.stateful);
        }
        let denies = denies_of(summary.has);
        self.denies.iter_mut().zip(denies).filter(|(_, denies)| *denies).for_each(|(count, _)| step(count));
    }
}

fn view_index(view: View) -> usize {
    match view {
        View::Connection | View::Onward => 0,
        View::Headers => 1,
    }
}

fn family_index(family: Family) -> usize {
    match family {
        Family::V4 => 0,
        Family::V6 => 1,
    }
}

/// Some of a kind, or all of it.
#[derive(Debug, Clone)]
enum Which<T> {
    Some(BTreeSet<T>),
    All,
}

impl<T: Ord> Which<T> {
    fn extend(&mut self, more: impl IntoIterator<Item = T>) {
        if let Which::Some(set) = self {
            set.extend(more);
        }
    }
}

impl<T> Default for Which<T> {
    fn default() -> Self {
        Which::Some(BTreeSet::new())
    }
}

/// What of the inputs changed.
#[derive(Debug, Default)]
pub struct Touched {
    workloads: Which<WorkloadId>,
    scopes: BTreeMap<Scope, Which<GroupId>>,
    rules: BTreeSet<GroupId>,
    members: BTreeMap<GroupId, Which<Prefix>>,
}

impl Touched {
    /// `None` as an edit: the document was replaced, or is gone.
    pub fn by(edits: &[(Topic, Option<Edit>)], host: &HostId) -> Self {
        let mut touched = Self::default();
        for (topic, edit) in edits {
            match (topic, edit) {
                (Topic::Host(of), Some(Edit::Host { put, remove })) if of == host => {
                    touched.workloads.extend(put.iter().map(|placement| placement.workload.clone()));
                    touched.workloads.extend(remove.iter().cloned());
                }
                (Topic::Host(of), _) if of == host => touched.workloads = Which::All,
                (Topic::Host(_), _) => {}
                (Topic::Scope(scope), edit) => {
                    let which = touched.scopes.entry(scope.clone()).or_default();
                    match edit {
                        Some(Edit::Scope { put, remove }) => {
                            which.extend(put.iter().map(|(group, _)| group.clone()));
                            which.extend(remove.iter().cloned());
                        }
                        _ => *which = Which::All,
                    }
                }
                (Topic::Rules(group), _) => _ = touched.rules.insert(group.clone()),
                (Topic::Members(group), edit) => {
                    let which = touched.members.entry(group.clone()).or_default();
                    match edit {
                        Some(Edit::Members { add, remove }) => which.extend(add.iter().chain(remove).copied()),
                        _ => *which = Which::All,
                    }
                }
            }
        }
        touched
    }

    pub fn workload(id: &WorkloadId) -> Self {
        Self { workloads: Which::Some([id.clone()].into()), ..Self::default() }
    }
}

/// What a step looks at.
pub struct Inputs<'i, D> {
    pub host: &'i HostId,
    pub documents: &'i D,
    pub attachments: &'i Attachments,
    pub settings: &'i Settings,
    /// What the kernel holds; `None`: nobody wants to know what is to be done.
    pub actual: Option<&'i Table>,
}

/// What is to be done, and how rules named sets before.
pub struct Outcome {
    pub transaction: Transaction,
    before: BTreeMap<Name, Uses>,
}

impl Outcome {
    /// How rules name a set, before or after.
    pub fn uses(&self, index: &Index, set: &Name) -> Uses {
        let after = index.sets.get(set).copied().unwrap_or_default().uses();
        let before = self.before.get(set).copied().unwrap_or(after);
        Uses { allows: before.allows || after.allows, denies: before.denies || after.denies }
    }
}

impl Index {
    /// `None`: two profiles collide in their numbers, which is settled where all are looked at.
    pub fn from_scratch<D: Documents>(inputs: &Inputs<'_, D>) -> Option<Self> {
        let keys = keys_of(inputs.attachments);
        let mut index = Index { settings: inputs.settings.clone(), keys, ..Index::default() };
        let everything = Touched { workloads: Which::All, ..Touched::default() };
        Step::new(&mut index, inputs).run(&everything)?;
        Some(index)
    }

    /// Interfaces came or went, which decides nothing.
    pub fn hold(&mut self, held: BTreeSet<u32>) {
        self.settings.held = held;
    }

    /// Follows a change. `None`: it reaches further than what it touches, and the index is of no use any more.
    pub fn step<D: Documents>(&mut self, inputs: &Inputs<'_, D>, touched: &Touched, attachments_moved: bool) -> Option<Outcome> {
        if self.settings != *inputs.settings {
            return None;
        }
        if attachments_moved {
            // The rules of the frame look up the forms of attachment that occur.
            let Keys { span4, span6, .. } = self.keys;
            if self.keys != (Keys { span4, span6, ..keys_of(inputs.attachments) }) {
                return None;
            }
        }
        Step::new(self, inputs).run(touched)
    }
}

/// One change on its way through the index.
struct Step<'s, 'i, D> {
    index: &'s mut Index,
    inputs: &'s Inputs<'i, D>,
    parts: Parts,
    /// Profiles whose chains may be others now.
    profiles: BTreeSet<u32>,
    /// Scopes that got or lost their last complete profile of a view, perhaps; with whether they had one.
    views: BTreeMap<(Place, View), bool>,
    /// Groups that came into use or out of it, perhaps; and those whose rules are others.
    groups: BTreeSet<GroupId>,
    rewritten: BTreeSet<GroupId>,
    /// Groups whose members are others, and those that rules began or ceased to name.
    remotes: BTreeSet<GroupId>,
    renamed: BTreeSet<GroupId>,
    /// By chain of a scope: jumps to be there or not.
    jumps: BTreeMap<Name, BTreeMap<Name, bool>>,
    /// Workloads whose elements are others, with the elements that were there.
    workloads: BTreeMap<WorkloadId, Vec<Element>>,
    ranges_moved: bool,
    before: BTreeMap<Name, Uses>,
}

impl<'s, 'i, D: Documents> Step<'s, 'i, D> {
    fn new(index: &'s mut Index, inputs: &'s Inputs<'i, D>) -> Self {
        Self {
            index,
            inputs,
            parts: Parts::default(),
            profiles: BTreeSet::new(),
            views: BTreeMap::new(),
            groups: BTreeSet::new(),
            rewritten: BTreeSet::new(),
            remotes: BTreeSet::new(),
            renamed: BTreeSet::new(),
            jumps: BTreeMap::new(),
            workloads: BTreeMap::new(),
            ranges_moved: false,
            before: BTreeMap::new(),
        }
    }

    fn run(mut self, touched: &Touched) -> Option<Outcome> {
        self.place(&touched.workloads)?;
        for (scope, which) in &touched.scopes {
            for phase in [Phase::Running, Phase::Staging] {
                self.rebind(&(scope.clone(), phase), which);
            }
        }
        touched.rules.iter().for_each(|group| self.reread_rules(group));
        self.write_profiles();
        self.write_scopes();
        touched.members.keys().for_each(|group| self.reread_members(group));
        self.write_groups();
        self.write_members(&touched.members);
        self.write_elements()?;
        Some(Outcome { transaction: self.parts.into_transaction(), before: self.before })
    }

    fn placements(&self) -> Option<&'i BTreeMap<WorkloadId, Placement>> {
        let topic = Topic::Host(self.inputs.host.clone());
        match self.inputs.documents.document(&topic)?.content() {
            Some(Content::Host(placements)) => Some(placements),
            _ => None,
        }
    }
}
