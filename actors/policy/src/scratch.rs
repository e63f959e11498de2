//! The compiler without increments: every document of a world, straight from the semantics. What the increments produced must
//! equal it.

use std::collections::{BTreeMap, BTreeSet};

use crate::doc::{Content, Document, Members, Phases, Placement, Rules};
use crate::ids::{GroupId, HostId};
use crate::model::{Group, Tier, World};
use crate::net::Prefix;
use crate::normal::Families;
use crate::oracle::Reach;
use crate::rule::Remote;
use crate::topic::{Scope, Topic};

/// Every document that exists.
pub fn documents(world: &World) -> BTreeMap<Topic, Document> {
    let mut scopes: BTreeMap<Scope, BTreeMap<GroupId, Phases>> = BTreeMap::new();
    let mut hosts: BTreeMap<HostId, BTreeMap<crate::ids::WorkloadId, Placement>> = BTreeMap::new();
    let mut named: BTreeMap<&GroupId, Families> = BTreeMap::new();
    let mut documents = BTreeMap::new();
    let groups: Vec<&Group> = world.catalogue.groups.values().map(|stored| &*stored.value).collect();

    for group in &groups {
        for (target, phases) in group.bound() {
            if let Some(scope) = target.scope() {
                scopes.entry(scope).or_default().insert(group.id.clone(), phases);
            }
        }
        let rules = group.distinct_rules();
        for rule in &rules {
            if let Remote::Group(remote) = &rule.remote {
                let families = named.entry(remote).or_default();
                *families = families.union(rule.families());
            }
        }
        let rules = rules.into_iter().map(|rule| (rule.key(), rule.clone())).collect();
        let content = Content::Rules(Rules { stateful: group.stateful, rules });
        documents.insert(Topic::Rules(group.id.clone()), Document::new(content));
    }
    for workload in world.registry.workloads.values() {
        let direct: BTreeSet<GroupId> = world
            .groups_of(workload)
            .into_iter()
            .filter(|(_, reach)| match reach {
                Reach::Binding(target) => target.tier() == Tier::Workload,
                Reach::Entry => true,
            })
            .map(|(group, _)| group.value.id.clone())
            .collect();
        let placement = Placement {
            workload: workload.id.clone(),
            incarnation: workload.incarnation,
            network: workload.network.clone(),
            addresses: workload.all_addresses().collect(),
            space: workload.space.clone(),
            app: workload.app.clone(),
            phase: workload.phase,
            enforced: world.enforced_of(workload),
            groups: direct,
        };
        hosts.entry(workload.host.clone()).or_default().insert(workload.id.clone(), placement);
    }
    for group in &groups {
        let Some(families) = named.get(&group.id) else { continue };
        let members: Members = members(world, group).into_iter().filter(|m| families.contains(m.family())).collect();
        documents.insert(Topic::Members(group.id.clone()), Document::new(Content::Members(members)));
    }
    documents.extend(scopes.into_iter().map(|(scope, bound)| (Topic::Scope(scope), Document::new(Content::Scope(bound)))));
    documents.extend(hosts.into_iter().map(|(host, list)| (Topic::Host(host), Document::new(Content::Host(list)))));
    documents
}

/// All members of a group, of both families.
pub fn members(world: &World, group: &Group) -> BTreeSet<Prefix> {
    let mut members = group.members.clone();
    for workload in world.registry.workloads.values().filter(|w| group.counts(w) && !world.reaches(group, w).is_empty()) {
        members.extend(group.admitted(workload));
    }
    members
}
