//! The incremental compiler: events on groups, templates and workloads in; edits per topic and span changes out.
//!
//! Everything is interned to `u32` slots, and every index is a counted set, so an event costs what it touches:
//!
//! - scope → groups bound there, workloads and hosts in it (per phase);
//! - scope → selectors inside it, by the slot of their conditions: equal label sets exist once, and so do equal conditions;
//! - label set → workloads that carry it, selectors of the global scope that match it;
//! - group → groups its rules name, hosts that follow it, members with the number of reasons;
//! - workload → its slots and the groups it has directly (by id, by its own entry, by selector).
//!
//! What a change costs in a large catalogue is the memory it touches, so a row holds its small sets in place, and what a workload's
//! coming or going needs is in its rows: no group's document is looked at, and conditions are few and stay in the cache.
//!
//! A batch of events is one change. While it runs, only first states and toggles are noted; at its end they are compared with
//! what came out, so that what moved forth and back is not published, and nothing is published that did not change.
//!
//! Which documents exist: `scope` when something is bound there; `host` when it has a workload; `rules` when the group exists;
//! `members` when the group exists and a rule names it, with the addresses of a family only if such a rule can match that family.
//! [`scratch`](crate::scratch) computes the same without increments, and tests hold the two together.

mod emit;
mod few;
mod groups;
mod labels;
mod mixed;
mod pending;
mod table;
mod workloads;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::doc::{Content, Document, Edit, Phase, Phases, Placement, Rules};
use crate::ids::{GroupId, HostId, WorkloadId};
use crate::model::{Event, Group, Labels, Requirement, Template, Workload};
use crate::normal::Families;
use crate::topic::{Scope, Topic};
use few::{Counts, List, MemberCounts, Set};
use pending::Pending;
use table::{Idle, Table};

/// What a batch of events leads to. In both lists topics are distinct and in a fixed order: scopes, hosts, rules, members, each by
/// when the compiler first heard of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    pub edits: Vec<(Topic, Edit)>,
    pub spans: Vec<SpanChange>,
    pub mixed: MixedChange,
}

impl Change {
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty() && self.spans.is_empty() && self.mixed.is_empty()
    }
}

/// Workloads that begin or cease to have stateful and stateless groups at once; both sorted. Stateful wins, and it is reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MixedChange {
    pub gained: Vec<WorkloadId>,
    pub lost: Vec<WorkloadId>,
}

impl MixedChange {
    pub fn is_empty(&self) -> bool {
        self.gained.is_empty() && self.lost.is_empty()
    }
}

/// Hosts that begin or cease to need a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanChange {
    pub topic: Topic,
    pub gained: Vec<HostId>,
    pub lost: Vec<HostId>,
}

/// A slot that is not used.
const NONE: u32 = u32::MAX;

#[derive(Default)]
struct GroupRow {
    group: Option<Arc<Group>>,
    /// As the group says; here because every member that comes or goes asks.
    admits_internet: bool,
    /// Likewise: only the healthy are members.
    wants_health: bool,
    /// As the group says, or said while its bindings are being taken away.
    is_stateless: bool,
    /// The groups its rules name, each once, and for which families.
    remotes: List<(u32, Families), 3>,
    /// How many groups name it, at all and per family.
    named: u32,
    named_families: [u32; 2],
    /// Hosts that follow its rules, with the number of reasons.
    hosts: Counts<u32, 3>,
    /// Hosts that follow its members, with the number of groups there that name it.
    member_hosts: Counts<u32, 3>,
    /// Workloads whose entry names it, whether it exists or not.
    claims: Option<Box<Set<u32, 1>>>,
    /// Present while the members topic is.
    members: Option<MemberCounts>,
}

impl Idle for GroupRow {
    fn is_idle(&self) -> bool {
        self.group.is_none() && self.named == 0 && self.claims.is_none() && self.hosts.is_empty() && self.member_hosts.is_empty()
    }
}

impl GroupRow {
    fn families(&self) -> Families {
        let one = |index: usize, family: Families| if self.named_families[index] > 0 { family } else { Families::NONE };
        one(0, Families::V4).union(one(1, Families::V6))
    }
}

#[derive(Default)]
struct ScopeRow {
    /// It always exists, at [`GLOBAL`].
    is_global: bool,
    /// Sorted by group.
    bound: Vec<(u32, Phases)>,
    /// By [`in_phase`]. Not kept for the global scope: every workload is in it, and a set of all would be touched by every change.
    workloads: Set<u32, 7>,
    /// By [`in_phase`].
    hosts: Counts<u32, 5>,
    /// How many stateful and stateless groups are bound for each phase.
    kinds: mixed::Kinds,
    /// Selectors that select inside this scope, sorted; those of the global scope are kept with their conditions.
    selectors: List<ScopedSelector, 3>,
}

/// Every requirement of `conditions` fulfilled inside a scope leads to the group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct ScopedSelector {
    conditions: u32,
    group: u32,
    /// As bits.
    phases: u8,
}

impl ScopedSelector {
    fn covers(&self, phase: Phase) -> bool {
        Phases::from_bits(self.phases).is_some_and(|phases| phases.contains(phase))
    }
}

impl Idle for ScopeRow {
    fn is_idle(&self) -> bool {
        !self.is_global && self.bound.is_empty() && self.selectors.is_empty() && self.hosts.is_empty()
    }
}

#[derive(Default)]
struct HostRow {
    workloads: u32,
}

impl Idle for HostRow {
    fn is_idle(&self) -> bool {
        self.workloads == 0
    }
}

struct WorkloadRow {
    entry: Option<Arc<Workload>>,
    host: u32,
    space: u32,
    app: u32,
    labels: u32,
    template: u32,
    /// Groups it has by id, by its entry or by a selector; sorted, distinct.
    direct: List<u32, 4>,
    /// Groups bound to its id, whether it exists or not.
    bound: Vec<(u32, Phases)>,
}

impl Default for WorkloadRow {
    fn default() -> Self {
        let (direct, bound) = (List::default(), Vec::new());
        Self { entry: None, host: NONE, space: NONE, app: NONE, labels: NONE, template: NONE, direct, bound }
    }
}

impl Idle for WorkloadRow {
    fn is_idle(&self) -> bool {
        self.entry.is_none() && self.bound.is_empty()
    }
}

#[derive(Default)]
struct LabelRow {
    workloads: Set<u32, 7>,
    /// Conditions of selectors of the global scope that match.
    matches: Vec<u32>,
}

impl Idle for LabelRow {
    fn is_idle(&self) -> bool {
        self.workloads.is_empty()
    }
}

/// The requirements of selectors, whatever their scope.
#[derive(Default)]
struct ConditionsRow {
    /// What selectors of the global scope lead to; sorted by group.
    groups: Vec<(u32, Phases)>,
    /// How many selectors of other scopes have them.
    scoped: u32,
}

impl Idle for ConditionsRow {
    fn is_idle(&self) -> bool {
        self.groups.is_empty() && self.scoped == 0
    }
}

#[derive(Default)]
struct TemplateRow {
    template: Option<Arc<Template>>,
    workloads: Set<u32, 7>,
}

impl Idle for TemplateRow {
    fn is_idle(&self) -> bool {
        self.template.is_none() && self.workloads.is_empty()
    }
}

/// See the module's words.
pub struct Compiler {
    groups: Table<GroupId, GroupRow>,
    scopes: Table<Scope, ScopeRow>,
    hosts: Table<HostId, HostRow>,
    workloads: Table<WorkloadId, WorkloadRow>,
    labels: Table<Labels, LabelRow>,
    conditions: Table<Vec<Requirement>, ConditionsRow>,
    templates: Table<crate::ids::TemplateId, TemplateRow>,
    anchors: labels::Anchors,
    /// How many groups are stateless. Without any nothing is mixed, and nothing needs to be looked at.
    stateless: usize,
    mixed: BTreeSet<u32>,
    pending: Pending,
}

fn phase_index(phase: Phase) -> u32 {
    match phase {
        Phase::Running => 0,
        Phase::Staging => 1,
    }
}

const PHASES: [Phase; 2] = [Phase::Running, Phase::Staging];

/// The slot of the global scope.
const GLOBAL: u32 = 0;

/// A slot and a phase as one key; [`slots_in`] takes them apart.
fn in_phase(slot: u32, phase: Phase) -> u32 {
    slot * 2 + phase_index(phase)
}

fn slots_in(phase: Phase, keys: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    keys.filter(move |key| key % 2 == phase_index(phase)).map(|key| key / 2)
}

impl Default for Compiler {
    fn default() -> Self {
        let mut scopes: Table<Scope, ScopeRow> = Table::default();
        let (global, _) = scopes.ensure(&Scope::Global);
        debug_assert_eq!(global, GLOBAL);
        scopes[global].is_global = true;
        Self {
            groups: Table::default(),
            scopes,
            hosts: Table::default(),
            workloads: Table::default(),
            labels: Table::default(),
            conditions: Table::default(),
            templates: Table::default(),
            anchors: labels::Anchors::default(),
            stateless: 0,
            mixed: BTreeSet::new(),
            pending: Pending::default(),
        }
    }
}

impl Compiler {
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies a batch of events as one change.
    pub fn apply<'e>(&mut self, events: impl IntoIterator<Item = &'e Event>) -> Change {
        for event in events {
            match event {
                Event::Group { group, .. } => self.set_group(&group.id, Some(group)),
                Event::GroupRemoved(id) => self.set_group(id, None),
                Event::Template { template, .. } => self.set_template(&template.id, Some(template)),
                Event::TemplateRemoved(id) => self.set_template(id, None),
                Event::Workload(workload) => self.set_workload(&workload.id, Some(workload)),
                Event::WorkloadRemoved { id, network } => {
                    let held = self.workloads.get(id).and_then(|w| self.workloads[w].entry.as_ref());
                    if held.is_some_and(|held| held.network == *network) {
                        self.set_workload(id, None);
                    }
                }
            }
        }
        self.finish()
    }

    /// Every topic whose document exists, sorted.
    pub fn topics(&self) -> Vec<Topic> {
        let mut topics = Vec::new();
        for (id, row) in self.groups.iter() {
            if row.group.is_some() {
                topics.push(Topic::Rules(id.clone()));
            }
            if row.members.is_some() {
                topics.push(Topic::Members(id.clone()));
            }
        }
        topics.extend(self.scopes.iter().filter(|(_, row)| !row.bound.is_empty()).map(|(scope, _)| Topic::Scope(scope.clone())));
        topics.extend(self.hosts.iter().filter(|(_, row)| row.workloads > 0).map(|(host, _)| Topic::Host(host.clone())));
        topics.sort_unstable();
        topics
    }

    /// A topic's whole document as it now is. Costs the document's size; a host's costs the fleet's.
    pub fn document(&self, topic: &Topic) -> Document {
        let content = match topic {
            Topic::Scope(scope) => {
                let bound = self.scopes.get(scope).map(|s| &self.scopes[s].bound).filter(|bound| !bound.is_empty());
                bound
                    .map(|bound| Content::Scope(bound.iter().map(|(g, phases)| (self.groups.key(*g).clone(), *phases)).collect()))
            }
            Topic::Host(host) => self.hosts.get(host).filter(|h| self.hosts[*h].workloads > 0).map(|h| {
                let here = self.workloads.slots().filter(|w| self.workloads[*w].entry.is_some() && self.workloads[*w].host == h);
                Content::Host(here.filter_map(|w| self.placement(w)).map(|p| (p.workload.clone(), p)).collect())
            }),
            Topic::Rules(id) => self.groups.get(id).and_then(|g| self.groups[g].group.as_ref()).map(|group| {
                let rules = group.distinct_rules().into_iter().map(|rule| (rule.key(), rule.clone())).collect();
                Content::Rules(Rules { stateful: group.stateful, rules })
            }),
            Topic::Members(id) => self.groups.get(id).and_then(|g| {
                let row = &self.groups[g];
                let families = row.families();
                let members = row.members.as_ref()?;
                Some(Content::Members(members.keys().filter(|m| families.contains(m.family())).collect()))
            }),
        };
        content.map_or_else(Document::absent, Document::new)
    }

    /// The workloads that have stateful and stateless groups at once, sorted.
    pub fn mixed_workloads(&self) -> Vec<WorkloadId> {
        self.names(self.mixed.iter().copied())
    }

    /// The hosts that need a topic, sorted.
    pub fn span(&self, topic: &Topic) -> Vec<HostId> {
        let mut hosts: Vec<HostId> = match topic {
            Topic::Scope(scope) => {
                let hosts = self.scopes.get(scope).map(|s| &self.scopes[s].hosts);
                hosts.into_iter().flat_map(Counts::keys).map(|key| self.hosts.key(key / 2).clone()).collect()
            }
            Topic::Host(host) => {
                self.hosts.get(host).filter(|h| self.hosts[*h].workloads > 0).map(|_| host.clone()).into_iter().collect()
            }
            Topic::Rules(id) => self.hosts_in(self.groups.get(id).map(|g| &self.groups[g].hosts)),
            Topic::Members(id) => self.hosts_in(self.groups.get(id).map(|g| &self.groups[g].member_hosts)),
        };
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn hosts_in(&self, counts: Option<&Counts<u32, 3>>) -> Vec<HostId> {
        counts.into_iter().flat_map(Counts::keys).map(|h| self.hosts.key(h).clone()).collect()
    }

    /// A workload as its host must know it; `None` when it is not registered.
    fn placement(&self, w: u32) -> Option<Placement> {
        let row = &self.workloads[w];
        let entry = row.entry.as_ref()?;
        let template = if row.template == NONE { None } else { self.templates[row.template].template.as_deref() };
        Some(Placement {
            workload: entry.id.clone(),
            incarnation: entry.incarnation,
            network: entry.network.clone(),
            addresses: entry.all_addresses().collect(),
            space: entry.space.clone(),
            app: entry.app.clone(),
            phase: entry.phase,
            enforced: entry.effective_enforced(template),
            groups: row.direct.iter().map(|g| self.groups.key(*g).clone()).collect(),
        })
    }
}

#[cfg(test)]
mod tests;
