//! The incremental compiler: events on groups, templates and workloads in; edits per topic and span changes out.
//!
//! Everything is interned to `u32` slots, and every index is a counted set, so an event costs what it touches:
//!
//! - scope → groups bound there, workloads and hosts in it (per phase);
//! - label set → workloads that carry it, selectors that match it; equal label sets and equal selectors exist once;
//! - group → groups its rules name, workloads that have it directly, hosts that follow it, members with the number of reasons;
//! - workload → its slots and the groups it has directly (by id, by its own entry, by selector).
//!
//! A batch of events is one change. While it runs, only first states and toggles are noted; at its end they are compared with
//! what came out, so that what moved forth and back is not published, and nothing is published that did not change.
//!
//! Which documents exist: `scope` when something is bound there; `host` when it has a workload; `rules` when the group exists;
//! `members` when the group exists and a rule names it, with the addresses of a family only if such a rule can match that family.
//! [`scratch`](crate::scratch) computes the same without increments, and tests hold the two together.

mod emit;
mod groups;
mod labels;
mod pending;
mod table;
mod workloads;

use std::sync::Arc;

use crate::doc::{Content, Document, Edit, Phase, Phases, Placement, Rules};
use crate::ids::{GroupId, HostId, WorkloadId};
use crate::model::{Event, Group, Labels, Selector, Template, Workload};
use crate::net::Prefix;
use crate::normal::Families;
use crate::topic::{Scope, Topic};
use pending::Pending;
use table::{Counts, Idle, Table};

/// What a batch of events leads to. In both lists topics are distinct and in a fixed order: scopes, hosts, rules, members, each by
/// when the compiler first heard of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    pub edits: Vec<(Topic, Edit)>,
    pub spans: Vec<SpanChange>,
}

impl Change {
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty() && self.spans.is_empty()
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
    /// The groups its rules name, each once, and for which families.
    remotes: Vec<(u32, Families)>,
    /// How many groups name it, at all and per family.
    named: u32,
    named_families: [u32; 2],
    /// Hosts that follow its rules, with the number of reasons.
    hosts: Counts<u32>,
    /// Hosts that follow its members, with the number of groups there that name it.
    member_hosts: Counts<u32>,
    /// Workloads that have it directly.
    direct: Counts<u32>,
    /// Workloads whose entry names it, whether it exists or not.
    claims: Counts<u32>,
    /// Present while the members topic is.
    members: Option<Box<Counts<Prefix>>>,
}

impl Idle for GroupRow {
    fn is_idle(&self) -> bool {
        self.group.is_none()
            && self.named == 0
            && self.claims.is_empty()
            && self.direct.is_empty()
            && self.hosts.is_empty()
            && self.member_hosts.is_empty()
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
    /// Sorted by group.
    bound: Vec<(u32, Phases)>,
    /// Not kept for the global scope: every workload is in it, and a map of all would be touched by every change.
    workloads: [Counts<u32>; 2],
    hosts: [Counts<u32>; 2],
    /// Selectors that select inside this scope; those of the global scope are kept with the label sets.
    selectors: Vec<u32>,
}

impl Idle for ScopeRow {
    fn is_idle(&self) -> bool {
        self.bound.is_empty() && self.selectors.is_empty() && self.hosts.iter().all(Counts::is_empty)
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
    direct: Vec<u32>,
    /// Groups bound to its id, whether it exists or not.
    bound: Vec<(u32, Phases)>,
}

impl Default for WorkloadRow {
    fn default() -> Self {
        let (direct, bound) = (Vec::new(), Vec::new());
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
    workloads: Counts<u32>,
    /// Selectors of the global scope that match.
    matches: Vec<u32>,
}

impl Idle for LabelRow {
    fn is_idle(&self) -> bool {
        self.workloads.is_empty()
    }
}

#[derive(Default)]
struct SelectorRow {
    groups: Vec<(u32, Phases)>,
}

impl Idle for SelectorRow {
    fn is_idle(&self) -> bool {
        self.groups.is_empty()
    }
}

#[derive(Default)]
struct TemplateRow {
    template: Option<Arc<Template>>,
    workloads: Counts<u32>,
}

impl Idle for TemplateRow {
    fn is_idle(&self) -> bool {
        self.template.is_none() && self.workloads.is_empty()
    }
}

/// See the module's words.
#[derive(Default)]
pub struct Compiler {
    groups: Table<GroupId, GroupRow>,
    scopes: Table<Scope, ScopeRow>,
    hosts: Table<HostId, HostRow>,
    workloads: Table<WorkloadId, WorkloadRow>,
    labels: Table<Labels, LabelRow>,
    selectors: Table<Selector, SelectorRow>,
    templates: Table<crate::ids::TemplateId, TemplateRow>,
    anchors: labels::Anchors,
    pending: Pending,
}

fn phase_index(phase: Phase) -> usize {
    match phase {
        Phase::Running => 0,
        Phase::Staging => 1,
    }
}

const PHASES: [Phase; 2] = [Phase::Running, Phase::Staging];

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

    /// The hosts that need a topic, sorted.
    pub fn span(&self, topic: &Topic) -> Vec<HostId> {
        let mut hosts: Vec<HostId> = match topic {
            Topic::Scope(scope) => {
                let rows = self.scopes.get(scope).map(|s| &self.scopes[s].hosts);
                rows.into_iter().flatten().flat_map(Counts::keys).map(|h| self.hosts.key(h).clone()).collect()
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

    fn hosts_in(&self, counts: Option<&Counts<u32>>) -> Vec<HostId> {
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
