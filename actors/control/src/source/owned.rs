//! What a source owns in CATALOG and REGISTRY, and what of others it must mind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use groupcast_policy::ids::{GroupId, SourceId, WorkloadId};
use groupcast_policy::model::{Group, GroupRule, Owner, Workload};
use groupcast_policy::rule::{Action, Remote};

use super::step::{Plan, Written};

/// What is known of what the source owns, and of what it must leave alone.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Owned {
    /// With the revision that is in CATALOG; `None` where that cannot be read.
    pub groups: BTreeMap<GroupId, (u64, Option<Arc<Group>>)>,
    pub workloads: BTreeMap<WorkloadId, Arc<Workload>>,
    /// Ids of the source's kind that belong to somebody else.
    pub foreign: BTreeSet<GroupId>,
    /// Groups that a deny in somebody else's group names, and which that is.
    pub denied: BTreeMap<GroupId, Naming>,
    /// Hosts there are: each may get a message of its own in a large batch.
    pub hosts: usize,
    /// How far the streams had been written when this was read, or what the source wrote since.
    pub catalog: u64,
    pub registry: u64,
}

/// A deny that names a group: whose, and which of its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Naming {
    pub group: GroupId,
    pub rule: usize,
}

/// The groups that denies of this one name.
pub fn denials(group: &Group) -> impl Iterator<Item = (GroupId, Naming)> + '_ {
    let naming = |(rule, held): (usize, &GroupRule)| match &held.rule.remote {
        Remote::Group(named) if held.rule.action == Action::Deny => {
            Some((named.clone(), Naming { group: group.id.clone(), rule }))
        }
        _ => None,
    };
    group.rules.iter().enumerate().filter_map(naming)
}

impl Owned {
    /// Sorts in what lies in CATALOG under a group's id; a document that cannot be read counts by its id alone.
    pub fn take_group(&mut self, source: &SourceId, id: &GroupId, revision: u64, group: Option<Arc<Group>>) {
        let ours = is_of(source, id.as_str());
        match group {
            Some(group) if group.owner == Owner::Source(source.clone()) => {
                self.groups.insert(id.clone(), (revision, Some(group)));
            }
            Some(group) => {
                self.denied.extend(denials(&group));
                self.foreign.extend(ours.then(|| id.clone()));
            }
            None if ours => {
                self.groups.insert(id.clone(), (revision, None));
            }
            _ => {}
        }
    }

    /// Sorts in a workload. What registered itself has a template, what a source placed has none.
    pub fn take_workload(&mut self, source: &SourceId, workload: Arc<Workload>) {
        if is_of(source, workload.id.as_str()) && workload.template.is_none() {
            self.workloads.insert(workload.id.clone(), workload);
        }
    }

    /// What is owned after a plan was written.
    pub fn remember(&mut self, plan: Plan, written: &Written) {
        for (group, _) in plan.difference.puts {
            let revision = written.revisions.get(&group.id).copied().unwrap_or(0);
            self.groups.insert(group.id.clone(), (revision, Some(group)));
        }
        for (id, _) in plan.difference.deletes {
            self.groups.remove(&id);
        }
        for (_, id) in plan.difference.remove.into_values().flatten().filter(|(_, id)| !written.withheld.contains_key(id)) {
            self.workloads.remove(&id);
        }
        let placed = plan.difference.register.into_values().flatten();
        for workload in placed.filter(|workload| !written.withheld.contains_key(&workload.id)) {
            let incarnation = written.incarnations.get(&workload.id).copied().unwrap_or(workload.incarnation);
            self.workloads.insert(workload.id.clone(), Arc::new(Workload { incarnation, ..workload }));
        }
        self.catalog = self.catalog.max(written.catalog.unwrap_or(0));
        self.registry = self.registry.max(written.registry.unwrap_or(0));
    }
}

/// What a source owns begins with its id.
pub fn is_of(source: &SourceId, id: &str) -> bool {
    id.strip_prefix(source.as_str()).is_some_and(|rest| rest.starts_with('-'))
}
