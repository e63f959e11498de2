//! The safe part of a change that cannot be put in force whole yet, because topics it names are not synced: what it removes and what
//! it denies. What it adds waits.
//!
//! From the documents in force and the same with the change applied as far as it is known, [`safe`] makes documents under which
//! nothing passes that did not pass before, nothing passes that a known rule of the new policy denies, and nothing passes by a
//! binding, rule or member that the change takes away:
//!
//! - of each workload, the groups it has before *and* after stay; of groups that come or go only the denies count;
//! - of each group, the allows it has before and after stay, and the denies it has before or after;
//! - an allow that names a group sees the members it has before and after, a deny those it has before or after; a deny over a group
//!   that is not synced denies any remote.
//!
//! Where a workload's groups come from (global, space, app) does not matter to any of this, so all of them stand at the workload.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::doc::{Content, Document, Enforced, Members, Placement, RuleKey, Rules};
use crate::ids::{GroupId, HostId, ID_LEN_MAX};
use crate::needs::Documents;
use crate::net::AddressSet;
use crate::resolve::{HostPolicy, resolve};
use crate::rule::{Action, Remote, Rule};
use crate::topic::{Scope, Topic};

/// Members that a deny over a changing group lists by itself; beyond it the deny denies any remote, which is safe too.
pub const DENIED_MEMBERS_MAX: usize = 10_000;

/// `None`: the change removes and denies nothing, what is in force stays.
pub fn safe(host: &HostId, old: &impl Documents, new: &impl Documents) -> Option<HashMap<Topic, Document>> {
    let mut part = Part { old, new, documents: HashMap::new(), held: BTreeMap::new(), moved: false };
    let (before, after) = (resolve(host, old), resolve(host, new));
    let mut placements = BTreeMap::new();
    for (id, workload) in &before.workloads {
        let Some(then) = after.workloads.get(id) else {
            part.moved = true;
            continue;
        };
        let mut placement = part.placement(workload.placement, then.placement);
        if !before.profiles[workload.profile].incomplete {
            let (stay, denies) = part.groups(&before, &after, id);
            let stateful = workload.stateful;
            placement.groups = stay.into_iter().inspect(|group| part.rules(group)).collect();
            placement.groups.extend(denies.into_iter().filter_map(|group| part.denies_of(&group, stateful)));
        }
        placements.insert(id.clone(), placement);
    }
    if !part.moved {
        return None;
    }
    part.documents.insert(Topic::Scope(Scope::Global), Document::new(Content::Scope(BTreeMap::new())));
    part.documents.insert(Topic::Host(host.clone()), Document::new(Content::Host(placements)));
    Some(part.documents)
}

struct Part<'d, O, N> {
    old: &'d O,
    new: &'d N,
    documents: HashMap<Topic, Document>,
    /// The groups that stand for the denies of one that comes or goes.
    held: BTreeMap<(GroupId, bool), Option<GroupId>>,
    /// Something is removed or denied.
    moved: bool,
}

impl<O: Documents, N: Documents> Part<'_, O, N> {
    fn placement(&mut self, old: &Placement, new: &Placement) -> Placement {
        let enforced = Enforced {
            ingress: old.enforced.ingress || new.enforced.ingress,
            egress: old.enforced.egress || new.enforced.egress,
        };
        let addresses: BTreeSet<_> = old.addresses.intersection(&new.addresses).copied().collect();
        self.moved |= enforced != old.enforced || addresses != old.addresses;
        Placement { enforced, addresses, space: None, app: None, groups: BTreeSet::new(), ..old.clone() }
    }

    /// The groups of a workload that stay, and those of which only the denies count.
    fn groups(
        &mut self,
        before: &HostPolicy<'_>,
        after: &HostPolicy<'_>,
        workload: &crate::ids::WorkloadId,
    ) -> (BTreeSet<GroupId>, BTreeSet<GroupId>) {
        let of = |policy: &HostPolicy<'_>| -> BTreeSet<GroupId> {
            policy.profile_of(workload).into_iter().flat_map(|profile| profile.groups().cloned()).collect()
        };
        let (had, has) = (of(before), of(after));
        let stay: BTreeSet<GroupId> = had.intersection(&has).cloned().collect();
        let denies = had.symmetric_difference(&has).cloned().collect();
        self.moved |= stay != had;
        (stay, denies)
    }

    /// The rules of a group that stays.
    fn rules(&mut self, group: &GroupId) {
        let topic = Topic::Rules(group.clone());
        if self.documents.contains_key(&topic) {
            return;
        }
        let (old, new) = (rules_of(self.old, &topic), rules_of(self.new, &topic));
        let Some(old) = old else { return };
        let none = Rules::default();
        let new = new.unwrap_or(&none);
        let allows = old.rules.iter().filter(|(key, rule)| rule.action == Action::Allow && new.rules.contains_key(key));
        let mut rules: BTreeMap<RuleKey, Rule> = allows.map(|(key, rule)| (*key, rule.clone())).collect();
        let denies = denies(old).chain(denies(new));
        rules.extend(denies.map(|(key, rule)| (*key, rule.clone())));
        self.moved |= rules != old.rules;
        self.put_rules(topic.clone(), old.stateful, rules, &topic);
    }

    /// A group of nothing but the denies of one that comes or goes; `None`: it denies nothing, or is not synced.
    fn denies_of(&mut self, group: &GroupId, stateful: bool) -> Option<GroupId> {
        if let Some(known) = self.held.get(&(group.clone(), stateful)) {
            return known.clone();
        }
        let topic = Topic::Rules(group.clone());
        let sides = [rules_of(self.old, &topic), rules_of(self.new, &topic)];
        let rules: BTreeMap<RuleKey, Rule> =
            sides.into_iter().flatten().flat_map(denies).map(|(key, rule)| (*key, rule.clone())).collect();
        let name = (!rules.is_empty()).then(|| self.free_name(group)).flatten();
        if let Some(name) = &name {
            self.moved = true;
            self.put_rules(Topic::Rules(name.clone()), stateful, rules, &topic);
        }
        self.held.insert((group.clone(), stateful), name.clone());
        name
    }

    /// A name for a group that nobody else has, and that tells which one it stands for.
    fn free_name(&self, group: &GroupId) -> Option<GroupId> {
        const SUFFIX_LEN_MAX: usize = 12;
        let beginning = &group.as_str()[..group.as_str().len().min(ID_LEN_MAX - SUFFIX_LEN_MAX)];
        (0..u16::MAX).find_map(|number| {
            let name = GroupId::new(&format!("{beginning}-held{number}")).ok()?;
            let topic = Topic::Rules(name.clone());
            let taken = self.documents.contains_key(&topic)
                || rules_of(self.old, &topic).is_some()
                || rules_of(self.new, &topic).is_some();
            (!taken).then_some(name)
        })
    }

    /// `of`: the group whose rules these are, before and after.
    fn put_rules(&mut self, topic: Topic, stateful: bool, rules: BTreeMap<RuleKey, Rule>, of: &Topic) {
        let known = |documents: Option<&Rules>, key: &RuleKey| documents.is_some_and(|rules| rules.rules.contains_key(key));
        let sided: Vec<(Rule, bool, bool)> = rules
            .into_iter()
            .map(|(key, rule)| (rule, known(rules_of(self.old, of), &key), known(rules_of(self.new, of), &key)))
            .collect();
        let rules = sided.into_iter().map(|(rule, was, is)| self.remote(rule, was, is));
        // Over nobody it denies nothing.
        let rules = rules.filter(|rule| !matches!(&rule.remote, Remote::Addresses(set) if set.is_empty()));
        let rules = rules.map(|rule| (rule.key(), rule)).collect();
        self.documents.insert(topic, Document::new(Content::Rules(Rules { stateful, rules })));
    }

    /// The rule as it looks at members that change. `was`, `is`: whether it is one before and after.
    fn remote(&mut self, rule: Rule, was: bool, is: bool) -> Rule {
        let Remote::Group(group) = &rule.remote else { return rule };
        let topic = Topic::Members(group.clone());
        let members = |document: Option<&Document>| document.and_then(Document::members).cloned();
        let (old, new) = (members(self.old.document(&topic)), members(self.new.document(&topic)));
        if !self.documents.contains_key(&topic)
            && let (Some(old), Some(new)) = (&old, &new)
        {
            let both = Members {
                v4: &old.v4 & &new.v4,
                v6: old.v6.intersection(&new.v6).copied().collect(),
                prefixes: old.prefixes.intersection(&new.prefixes).copied().collect(),
            };
            self.documents.insert(topic, Document::new(Content::Members(both)));
        }
        let within =
            |some: &Members, other: &Option<Members>| other.as_ref().is_some_and(|other| some.iter().all(|m| other.holds(m)));
        if rule.action == Action::Allow {
            self.moved |= old.as_ref().is_some_and(|old| !within(old, &new));
            return rule;
        }
        // Unknown before, it denied everybody, and still does.
        self.moved |= was && is && old.is_some() && !new.as_ref().is_some_and(|new| within(new, &old));
        if old == new {
            return rule;
        }
        let sides = [(was, &old), (is, &new)].into_iter().filter(|(counts, _)| *counts).map(|(_, members)| members.as_ref());
        let remote = match sides.collect::<Option<Vec<&Members>>>() {
            Some(sides) if sides.iter().map(|members| members.len()).sum::<usize>() <= DENIED_MEMBERS_MAX => {
                Remote::Addresses(AddressSet::from_prefixes(sides.iter().flat_map(|members| members.iter())))
            }
            _ => Remote::Any,
        };
        Rule { remote, ..rule }
    }
}

fn rules_of<'d>(documents: &'d impl Documents, topic: &Topic) -> Option<&'d Rules> {
    match documents.document(topic).and_then(Document::content) {
        Some(Content::Rules(rules)) => Some(rules),
        _ => None,
    }
}

fn denies(rules: &Rules) -> impl Iterator<Item = (&RuleKey, &Rule)> {
    rules.rules.iter().filter(|(_, rule)| rule.action == Action::Deny)
}

#[cfg(test)]
mod tests;
