//! Which topics a host needs: the closure of references from its own topic.
//!
//! host → scopes of its workloads (per phase) → rules of the groups bound there, plus rules of groups bound to the workloads
//! themselves → members of the groups those rules name. The references are layered and never form a cycle, so counting them is
//! exact, and an edit costs what it touches. [`needed`] is the from-scratch twin of [`Needs`].

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};

use crate::doc::{Content, Document, Edit, Phase, Placement};
use crate::ids::{GroupId, HostId};
use crate::rule::{Remote, Rule};
use crate::topic::{Scope, Topic};

/// A reason to follow a topic. A scope is needed per phase: a host without staging workloads needs no staging groups.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Need {
    Host(HostId),
    Scope(Scope, Phase),
    Rules(GroupId),
    Members(GroupId),
}

impl Need {
    pub fn topic(&self) -> Topic {
        match self {
            Need::Host(host) => Topic::Host(host.clone()),
            Need::Scope(scope, _) => Topic::Scope(scope.clone()),
            Need::Rules(group) => Topic::Rules(group.clone()),
            Need::Members(group) => Topic::Members(group.clone()),
        }
    }
}

/// Every need that following `topic` could serve.
fn needs_served_by(topic: &Topic) -> impl Iterator<Item = Need> + use<> {
    let (first, second) = match topic {
        Topic::Host(host) => (Need::Host(host.clone()), None),
        Topic::Scope(scope) => (Need::Scope(scope.clone(), Phase::Running), Some(Need::Scope(scope.clone(), Phase::Staging))),
        Topic::Rules(group) => (Need::Rules(group.clone()), None),
        Topic::Members(group) => (Need::Members(group.clone()), None),
    };
    std::iter::once(first).chain(second)
}

/// Where documents are looked up while references are followed.
pub trait Documents {
    fn document(&self, topic: &Topic) -> Option<&Document>;
}

impl<S: std::hash::BuildHasher> Documents for HashMap<Topic, Document, S> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.get(topic)
    }
}

fn placement_edges(placement: &Placement, edge: &mut impl FnMut(Need)) {
    edge(Need::Scope(Scope::Global, placement.phase));
    if let Some(space) = &placement.space {
        edge(Need::Scope(Scope::Space(space.clone()), placement.phase));
    }
    if let Some(app) = &placement.app {
        edge(Need::Scope(Scope::App(app.clone()), placement.phase));
    }
    placement.groups.iter().for_each(|group| edge(Need::Rules(group.clone())));
}

fn rule_edges(rule: &Rule, edge: &mut impl FnMut(Need)) {
    if let Remote::Group(group) = &rule.remote {
        edge(Need::Members(group.clone()));
    }
}

/// What `content` makes necessary for someone who follows it because of `need`.
fn edges(need: &Need, content: &Content, edge: &mut impl FnMut(Need)) {
    match (need, content) {
        (Need::Host(_), Content::Host(placements)) => placements.values().for_each(|p| placement_edges(p, edge)),
        (Need::Scope(_, phase), Content::Scope(bound)) => {
            bound.iter().filter(|(_, phases)| phases.contains(*phase)).for_each(|(group, _)| edge(Need::Rules(group.clone())));
        }
        (Need::Rules(_), Content::Rules(rules)) => rules.rules.values().for_each(|rule| rule_edges(rule, edge)),
        _ => {}
    }
}

/// The edges an edit adds (`true`) and takes away, seen from `need`. `held` is the document before the edit.
fn edit_edges(need: &Need, held: Option<&Content>, edit: &Edit, change: &mut impl FnMut(Need, bool)) {
    match (need, edit) {
        (_, Edit::Retire | Edit::Reset) => {
            if let Some(content) = held {
                edges(need, content, &mut |n| change(n, false));
            }
        }
        (Need::Host(_), Edit::Host { put, remove }) => {
            let empty = Default::default();
            let held = if let Some(Content::Host(held)) = held { held } else { &empty };
            for placement in put {
                placement_edges(placement, &mut |n| change(n, true));
            }
            for old in put.iter().map(|p| &p.workload).chain(remove).filter_map(|workload| held.get(workload)) {
                placement_edges(old, &mut |n| change(n, false));
            }
        }
        (Need::Scope(_, phase), Edit::Scope { put, remove }) => {
            let empty = Default::default();
            let held = if let Some(Content::Scope(held)) = held { held } else { &empty };
            let was = |group: &GroupId| held.get(group).is_some_and(|phases| phases.contains(*phase));
            for (group, phases) in put {
                match (was(group), phases.contains(*phase)) {
                    (false, true) => change(Need::Rules(group.clone()), true),
                    (true, false) => change(Need::Rules(group.clone()), false),
                    _ => {}
                }
            }
            remove.iter().filter(|group| was(group)).for_each(|group| change(Need::Rules(group.clone()), false));
        }
        (Need::Rules(_), Edit::Rules { put, remove, .. }) => {
            let empty = Default::default();
            let held = if let Some(Content::Rules(held)) = held { held } else { &empty };
            for rule in put.iter().filter(|rule| !held.rules.contains_key(&rule.key())) {
                rule_edges(rule, &mut |n| change(n, true));
            }
            for rule in remove.iter().filter_map(|key| held.rules.get(key)) {
                rule_edges(rule, &mut |n| change(n, false));
            }
        }
        _ => {}
    }
}

/// Topics in no order.
pub type Topics = HashSet<Topic, foldhash::fast::FixedState>;

/// What is in it comes from the one writer that everybody trusts: nobody crafts collisions who could not do worse.
type Map<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// From scratch: all topics the host needs, as far as the documents known here tell.
pub fn needed(host: &HostId, documents: &impl Documents) -> BTreeSet<Topic> {
    needed_unordered(host, documents).into_iter().collect()
}

/// The same without putting them in order, which costs more than finding them: a controller does this for every host that joins.
pub fn needed_unordered(host: &HostId, documents: &impl Documents) -> Topics {
    let mut seen: HashSet<Need, foldhash::fast::FixedState> = HashSet::default();
    let mut open = vec![Need::Host(host.clone())];
    while let Some(need) = open.pop() {
        if !seen.insert(need.clone()) {
            continue;
        }
        if let Some(content) = documents.document(&need.topic()).and_then(Document::content) {
            edges(&need, content, &mut |next| open.push(next));
        }
    }
    seen.iter().map(Need::topic).collect()
}

/// Topics that came into need and went out of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NeedsChange {
    pub gained: BTreeSet<Topic>,
    pub lost: BTreeSet<Topic>,
}

/// Incremental: reference counts over needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    counts: Map<Need, u32>,
}

impl Needs {
    /// A host needs its own topic, whatever it says.
    pub fn of_host(host: &HostId) -> Self {
        Self { counts: Map::from_iter([(Need::Host(host.clone()), 1)]) }
    }

    /// From scratch: the host and everything that the documents at hand make it need.
    pub fn from_scratch(host: &HostId, documents: &impl Documents) -> Self {
        let Self { mut counts } = Self::of_host(host);
        let mut open = vec![Need::Host(host.clone())];
        while let Some(need) = open.pop() {
            if let Some(content) = documents.document(&need.topic()).and_then(Document::content) {
                edges(&need, content, &mut |next| match counts.entry(next) {
                    Entry::Occupied(mut known) => *known.get_mut() += 1,
                    Entry::Vacant(new) => {
                        open.push(new.key().clone());
                        new.insert(1);
                    }
                });
            }
        }
        Self { counts }
    }

    pub fn wants(&self, topic: &Topic) -> bool {
        needs_served_by(topic).any(|need| self.counts.contains_key(&need))
    }

    pub fn topics(&self) -> BTreeSet<Topic> {
        self.counts.keys().map(Need::topic).collect()
    }

    /// The topics that would come into need by this edit and are not needed yet, as far as the documents at hand tell. Changes
    /// nothing. A topic already followed can gain a need too (a first staging workload), so known documents are looked into.
    pub fn would_gain(&self, topic: &Topic, edit: &Edit, documents: &impl Documents) -> BTreeSet<Topic> {
        let held = documents.document(topic).and_then(Document::content);
        let mut open = Vec::new();
        for need in needs_served_by(topic).filter(|need| self.counts.contains_key(need)) {
            edit_edges(&need, held, edit, &mut |next, added| open.extend(added.then_some(next)));
        }
        let (mut seen, mut gained) = (BTreeSet::new(), BTreeSet::new());
        while let Some(need) = open.pop() {
            if self.counts.contains_key(&need) || !seen.insert(need.clone()) {
                continue;
            }
            let topic = need.topic();
            if let Some(content) = documents.document(&topic).and_then(Document::content) {
                edges(&need, content, &mut |next| open.push(next));
            }
            if !self.wants(&topic) {
                gained.insert(topic);
            }
        }
        gained
    }

    /// Follows an edit of `topic`, whose document in `documents` is still the one before the edit.
    pub fn edit(&mut self, topic: &Topic, edit: &Edit, documents: &impl Documents) -> NeedsChange {
        if matches!(topic, Topic::Members(_)) {
            return NeedsChange::default(); // members refer to nothing
        }
        let held = documents.document(topic).and_then(Document::content);
        let mut changes = Vec::new();
        for need in needs_served_by(topic).filter(|need| self.counts.contains_key(need)) {
            edit_edges(&need, held, edit, &mut |next, added| changes.push((next, added)));
        }
        self.apply(changes, documents)
    }

    /// Follows the replacement of a whole document; `documents` may hold the old or the new one.
    pub fn replace(
        &mut self,
        topic: &Topic,
        old: Option<&Content>,
        new: Option<&Content>,
        documents: &impl Documents,
    ) -> NeedsChange {
        let mut changes = Vec::new();
        for need in needs_served_by(topic).filter(|need| self.counts.contains_key(need)) {
            if let Some(new) = new {
                edges(&need, new, &mut |next| changes.push((next, true)));
            }
            if let Some(old) = old {
                edges(&need, old, &mut |next| changes.push((next, false)));
            }
        }
        self.apply(changes, documents)
    }

    /// Additions first, so that what is only moved is never dropped in between.
    fn apply(&mut self, changes: Vec<(Need, bool)>, documents: &impl Documents) -> NeedsChange {
        let mut result = NeedsChange::default();
        let (mut add, mut drop): (Vec<_>, Vec<_>) = changes.into_iter().partition(|(_, added)| *added);
        while let Some((need, _)) = add.pop() {
            let topic = need.topic();
            let wanted = self.wants(&topic);
            let count = self.counts.entry(need.clone()).or_insert(0);
            *count += 1;
            if *count > 1 {
                continue;
            }
            if !wanted {
                result.gained.insert(topic.clone());
            }
            if let Some(content) = documents.document(&topic).and_then(Document::content) {
                edges(&need, content, &mut |next| add.push((next, true)));
            }
        }
        while let Some((need, _)) = drop.pop() {
            let Some(count) = self.counts.get_mut(&need) else { continue };
            *count -= 1;
            if *count > 0 {
                continue;
            }
            self.counts.remove(&need);
            let topic = need.topic();
            if let Some(content) = documents.document(&topic).and_then(Document::content) {
                edges(&need, content, &mut |next| drop.push((next, false)));
            }
            if !self.wants(&topic) && !result.gained.remove(&topic) {
                result.lost.insert(topic);
            }
        }
        result
    }
}

/// Which hosts need which topics, for a whole fleet: the span of a change is the union over its topics.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Followers {
    hosts: Map<HostId, Needs>,
    by_topic: Map<Topic, BTreeSet<HostId>>,
}

impl Followers {
    pub fn of(&self, topic: &Topic) -> impl Iterator<Item = &HostId> {
        self.by_topic.get(topic).into_iter().flatten()
    }

    /// How many hosts follow the topic.
    pub fn count(&self, topic: &Topic) -> usize {
        self.by_topic.get(topic).map_or(0, BTreeSet::len)
    }

    pub fn topics_of(&self, host: &HostId) -> BTreeSet<Topic> {
        self.hosts.get(host).map(Needs::topics).unwrap_or_default()
    }

    /// What [`needed_unordered`] finds, without looking for it; `None` for a host that is not known.
    pub fn needed_by(&self, host: &HostId) -> Option<Topics> {
        self.hosts.get(host).map(|needs| needs.counts.keys().map(Need::topic).collect())
    }

    /// From scratch: these hosts and what the documents at hand make each of them need.
    pub fn of_hosts(hosts: impl IntoIterator<Item = HostId>, documents: &impl Documents) -> Self {
        let hosts: BTreeSet<HostId> = hosts.into_iter().collect();
        let (mut all, mut by_topic) = (Map::default(), Map::<Topic, Vec<HostId>>::default());
        for host in hosts {
            let needs = Needs::from_scratch(&host, documents);
            for topic in needs.counts.keys().map(Need::topic) {
                let followers = by_topic.entry(topic).or_default();
                // Two needs may be served by one topic.
                if followers.last() != Some(&host) {
                    followers.push(host.clone());
                }
            }
            all.insert(host, needs);
        }
        // Hosts came in order, so that each set is built at once: a million times somebody follows something in a fleet of ten thousand.
        Self { hosts: all, by_topic: by_topic.into_iter().map(|(topic, hosts)| (topic, hosts.into_iter().collect())).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    pub fn follows(&self, host: &HostId, topic: &Topic) -> bool {
        self.by_topic.get(topic).is_some_and(|hosts| hosts.contains(host))
    }

    /// A host is known from the first edit of its topic until that topic is retired. Returns which hosts cease to need which topics.
    pub fn edit(&mut self, topic: &Topic, edit: &Edit, documents: &impl Documents) -> Vec<(HostId, Topic)> {
        let mut ceased = Vec::new();
        if let Topic::Host(host) = topic
            && !self.hosts.contains_key(host)
        {
            self.hosts.insert(host.clone(), Needs::of_host(host));
            self.by_topic.entry(topic.clone()).or_default().insert(host.clone());
        }
        if matches!(topic, Topic::Members(_)) {
            return ceased; // members refer to nothing
        }
        let hosts: Vec<HostId> = self.of(topic).cloned().collect();
        for host in hosts {
            let Some(needs) = self.hosts.get_mut(&host) else { continue };
            let change = needs.edit(topic, edit, documents);
            for gained in change.gained {
                self.by_topic.entry(gained).or_default().insert(host.clone());
            }
            for lost in change.lost {
                if let Some(hosts) = self.by_topic.get_mut(&lost) {
                    hosts.remove(&host);
                    if hosts.is_empty() {
                        self.by_topic.remove(&lost);
                    }
                }
                ceased.push((host.clone(), lost));
            }
        }
        if let (Topic::Host(host), Edit::Retire) = (topic, edit) {
            self.hosts.remove(host);
            self.by_topic.remove(topic);
            ceased.push((host.clone(), topic.clone()));
        }
        ceased
    }
}

#[cfg(test)]
mod tests;
