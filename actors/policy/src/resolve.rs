//! From a host's topic documents to the policy of its workloads.
//!
//! Workloads with the same list of bindings share a profile: the groups of each tier, in the order in which allows are tried.
//! Denies of all tiers come before any allow. What is not known is never open:
//!
//! - a scope or a group's rules not synced, or a group without rules document: it could hold a deny, so a workload that has it
//!   is *incomplete* and nothing is allowed in its enforced directions;
//! - members of a named group absent or not synced: allows that name it match nothing, denies that name it match every remote.

mod explain;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub use explain::{Deciding, Told, Why};

use crate::doc::{Content, Document, Members, Phase, Placement};
use crate::ids::{GroupId, HostId, WorkloadId};
use crate::model::Tier;
use crate::needs::Documents;
use crate::packet::{Payload, family_of};
use crate::rule::{Action, Direction, Remote, Rule};
use crate::topic::{Scope, Topic};

/// The groups of each tier, sorted within a tier. A group stands in the first tier that has it only: once tried, it need not be
/// tried again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Profile {
    pub tiers: [Vec<GroupId>; 4],
    /// Something is not synced: nothing is allowed.
    pub incomplete: bool,
}

impl Profile {
    pub fn groups(&self) -> impl Iterator<Item = &GroupId> {
        self.tiers.iter().flatten()
    }

    pub fn tier(&self, tier: Tier) -> &[GroupId] {
        &self.tiers[tier as usize]
    }
}

/// One group's rules as they are tried.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupPolicy {
    pub stateful: bool,
    pub deny_ingress: Vec<Rule>,
    pub deny_egress: Vec<Rule>,
    pub allow_ingress: Vec<Rule>,
    pub allow_egress: Vec<Rule>,
}

impl GroupPolicy {
    pub fn rules(&self, action: Action, direction: Direction) -> &[Rule] {
        match (action, direction) {
            (Action::Deny, Direction::Ingress) => &self.deny_ingress,
            (Action::Deny, Direction::Egress) => &self.deny_egress,
            (Action::Allow, Direction::Ingress) => &self.allow_ingress,
            (Action::Allow, Direction::Egress) => &self.allow_egress,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadPolicy<'d> {
    pub placement: &'d Placement,
    /// Index into [`HostPolicy::profiles`].
    pub profile: usize,
    /// Stateless only if all its groups are.
    pub stateful: bool,
}

/// Everything a host enforces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostPolicy<'d> {
    pub workloads: BTreeMap<WorkloadId, WorkloadPolicy<'d>>,
    pub profiles: Vec<Profile>,
    pub groups: BTreeMap<GroupId, GroupPolicy>,
    /// The groups that rules name; `None` is unknown.
    pub remotes: BTreeMap<GroupId, Option<&'d Members>>,
    /// Topics that are needed and not synced.
    pub missing: BTreeSet<Topic>,
}

/// Resolves what a host enforces. `documents` answers `None` for a topic that is not synced, and an absent document for one that
/// is known not to exist.
pub fn resolve<'d>(host: &HostId, documents: &'d impl Documents) -> HostPolicy<'d> {
    let mut policy = HostPolicy::default();
    let mut profiles: BTreeMap<Profile, usize> = BTreeMap::new();
    let mut scopes: BTreeMap<(Scope, Phase), Option<Vec<GroupId>>> = BTreeMap::new();
    let look = |topic: Topic, missing: &mut BTreeSet<Topic>| -> Option<&'d Document> {
        let document = documents.document(&topic);
        if document.is_none() {
            missing.insert(topic);
        }
        document
    };
    let Some(document) = look(Topic::Host(host.clone()), &mut policy.missing) else { return policy };
    let Some(Content::Host(placements)) = document.content() else { return policy };

    for placement in placements.values() {
        let mut profile = Profile::default();
        let places = [
            (Tier::Global, Some(Scope::Global)),
            (Tier::Space, placement.space.clone().map(Scope::Space)),
            (Tier::App, placement.app.clone().map(Scope::App)),
        ];
        for (tier, scope) in places {
            let Some(scope) = scope else { continue };
            let key = (scope, placement.phase);
            let groups = scopes.entry(key.clone()).or_insert_with(|| {
                let document = look(Topic::Scope(key.0.clone()), &mut policy.missing)?;
                let Some(Content::Scope(bound)) = document.content() else { return Some(Vec::new()) };
                let of_phase = bound.iter().filter(|(_, phases)| phases.contains(key.1));
                Some(of_phase.map(|(group, _)| group.clone()).collect())
            });
            match groups {
                Some(groups) => profile.tiers[tier as usize] = groups.clone(),
                None => profile.incomplete = true,
            }
        }
        profile.tiers[Tier::Workload as usize] = placement.groups.iter().cloned().collect();
        let mut tried = BTreeSet::new();
        profile.tiers.iter_mut().for_each(|tier| tier.retain(|group| tried.insert(group.clone())));

        let mut stateful = None;
        for group in tried {
            if !policy.groups.contains_key(&group) {
                let document = look(Topic::Rules(group.clone()), &mut policy.missing);
                if let Some(Content::Rules(rules)) = document.and_then(Document::content) {
                    let resolved = group_policy(rules, |remote| {
                        policy.remotes.entry(remote.clone()).or_insert_with(|| {
                            let document = look(Topic::Members(remote.clone()), &mut policy.missing)?;
                            document.members()
                        });
                    });
                    policy.groups.insert(group.clone(), resolved);
                }
            }
            match policy.groups.get(&group) {
                Some(resolved) => stateful = Some(stateful.unwrap_or(false) || resolved.stateful),
                None => profile.incomplete = true,
            }
        }
        let next = profiles.len();
        let index = *profiles.entry(profile).or_insert(next);
        let resolved = WorkloadPolicy { placement, profile: index, stateful: stateful.unwrap_or(true) };
        policy.workloads.insert(placement.workload.clone(), resolved);
    }
    let mut ordered: Vec<(usize, Profile)> = profiles.into_iter().map(|(profile, index)| (index, profile)).collect();
    ordered.sort_unstable_by_key(|(index, _)| *index);
    policy.profiles = ordered.into_iter().map(|(_, profile)| profile).collect();
    policy
}

fn group_policy(rules: &crate::doc::Rules, mut names: impl FnMut(&GroupId)) -> GroupPolicy {
    let mut resolved = GroupPolicy { stateful: rules.stateful, ..GroupPolicy::default() };
    for rule in rules.rules.values() {
        if let Remote::Group(remote) = &rule.remote {
            names(remote);
        }
        let list = match (rule.action, rule.direction) {
            (Action::Deny, Direction::Ingress) => &mut resolved.deny_ingress,
            (Action::Deny, Direction::Egress) => &mut resolved.deny_egress,
            (Action::Allow, Direction::Ingress) => &mut resolved.allow_ingress,
            (Action::Allow, Direction::Egress) => &mut resolved.allow_egress,
        };
        list.push(rule.clone());
    }
    resolved
}

impl HostPolicy<'_> {
    /// The groups a workload has, in order; empty if the host does not know it.
    pub fn profile_of(&self, workload: &WorkloadId) -> Option<&Profile> {
        self.workloads.get(workload).and_then(|workload| self.profiles.get(workload.profile))
    }

    fn remote_matches(&self, rule: &Rule, remote: IpAddr) -> bool {
        match &rule.remote {
            Remote::Any => true,
            Remote::Addresses(set) => set.contains(remote),
            Remote::Group(group) => match self.remotes.get(group).copied().flatten() {
                Some(members) => members.covers(remote),
                None => rule.action == Action::Deny,
            },
        }
    }

    /// Whether a workload's policy allows traffic with a remote. A workload the host does not know gets nothing.
    pub fn verdict(&self, workload: &WorkloadId, direction: Direction, remote: IpAddr, payload: &Payload) -> bool {
        let Some(workload) = self.workloads.get(workload) else { return false };
        let is_enforced = match direction {
            Direction::Ingress => workload.placement.enforced.ingress,
            Direction::Egress => workload.placement.enforced.egress,
        };
        if !is_enforced {
            return true;
        }
        let profile = &self.profiles[workload.profile];
        let matches = |action: Action| {
            profile.groups().filter_map(|group| self.groups.get(group)).any(|group| {
                group
                    .rules(action, direction)
                    .iter()
                    .any(|rule| rule.matches_payload(direction, family_of(remote), payload) && self.remote_matches(rule, remote))
            })
        };
        !profile.incomplete && !matches(Action::Deny) && matches(Action::Allow)
    }
}

#[cfg(test)]
mod tests;
