//! What a complete observation changes in what the source owns. Equal things produce nothing, so a poll that finds nothing new writes
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use groupcast_policy::ids::{GroupId, HostId, NetworkId, WorkloadId};
use groupcast_policy::model::{Group, Workload};
use groupcast_policy::rule::Remote;
use groupcast_policy::topic::Topic;
use groupcast_policy::written::{Format, Write as _};
use groupcast_topics::BATCH_MESSAGES_MAX;

use super::owned::{Naming, Owned, denials};
use super::{Observation, Problems};
use crate::change::{CHANGE_BYTES_MAX, CHANGE_DOCUMENTS_MAX, Expected, Write};
use crate::document::{DOCUMENT_BYTES_MAX, Document, Name};

/// Room for the frame of a document and the workload's own additions.
const FRAME_BYTES: usize = 256;

/// What has to be written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Difference {
    pub puts: Vec<(Arc<Group>, Expected)>,
    pub deletes: Vec<(GroupId, u64)>,
    /// Groups that are gone there and stay here without rules, because denies name them; these are among the puts.
    pub emptied: BTreeSet<GroupId>,
    pub register: BTreeMap<HostId, Vec<Workload>>,
    pub remove: BTreeMap<HostId, Vec<(NetworkId, WorkloadId)>>,
    pub problems: Problems,
    /// What the source says that is not done, and why.
    pub withheld: Problems,
}

impl Difference {
    pub fn is_empty(&self) -> bool {
        self.puts.is_empty() && self.deletes.is_empty() && self.register.is_empty() && self.remove.is_empty()
    }

    /// Names of everything that would be gone, or would allow nothing any more.
    pub fn deletions(&self) -> BTreeSet<String> {
        self.deletes.iter().map(|(id, _)| id).chain(&self.emptied).map(|id| format!("group {id}")).collect()
    }

    /// Workloads that would be gone, not those that move.
    pub fn removals(&self, observed: &Observation) -> BTreeSet<String> {
        let gone = self.remove.values().flatten().filter(|(_, id)| !observed.workloads.contains_key(id));
        gone.map(|(_, id)| format!("workload {id}")).collect()
    }
}

pub fn diff(owned: &Owned, observed: &Observation) -> Difference {
    let mut difference = Difference::default();
    for (id, group) in &observed.groups {
        let held = owned.groups.get(id);
        if held.is_some_and(|(_, held)| held.as_ref().is_some_and(|held| Arc::ptr_eq(held, group) || held == group)) {
            continue;
        }
        if owned.foreign.contains(id) {
            difference.problems.add(format!("group {id} belongs to somebody else: delete it there, or rename the source"));
            continue;
        }
        let bytes = group.write(Format::Json).len() + FRAME_BYTES;
        if bytes > DOCUMENT_BYTES_MAX {
            difference
                .problems
                .add(format!("group {id} is {bytes} bytes, at most {DOCUMENT_BYTES_MAX} fit into one message: split it"));
            continue;
        }
        let expected = held.map_or(Expected::Absent, |(revision, _)| Expected::Revision(*revision));
        difference.puts.push((group.clone(), expected));
    }
    for (id, workload) in &observed.workloads {
        let held = owned.workloads.get(id);
        if held.is_some_and(|held| Workload { incarnation: held.incarnation, ..(**workload).clone() } == **held) {
            continue;
        }
        difference.register.entry(workload.host.clone()).or_default().push((**workload).clone());
        if let Some(held) = held.filter(|held| held.network != workload.network) {
            difference.remove.entry(held.host.clone()).or_default().push((held.network.clone(), id.clone()));
        }
    }
    if observed.problems.nameless {
        // What cannot be read may be any of them.
        return difference;
    }
    delete(&mut difference, owned, observed);
    for (id, held) in &owned.workloads {
        if !observed.workloads.contains_key(id) && !observed.kept_workloads.contains(id) {
            difference.remove.entry(held.host.clone()).or_default().push((held.network.clone(), id.clone()));
        }
    }
    difference
}

/// What is gone is deleted, unless a deny names it: over a group that is not there a deny denies everybody. Such a group stays for its
/// members' sake and loses its rules, so that nothing it allowed is allowed any longer.
fn delete(difference: &mut Difference, owned: &Owned, observed: &Observation) {
    let is_gone = |id: &GroupId| !observed.groups.contains_key(id) && !observed.kept_groups.contains(id);
    let gone: Vec<_> = owned.groups.iter().filter(|(id, _)| is_gone(id)).collect();
    if gone.is_empty() {
        return;
    }
    // The denies there will be: of others, and our own that stay.
    let kept = observed.kept_groups.iter().filter_map(|id| owned.groups.get(id)?.1.as_ref());
    let own: BTreeMap<GroupId, Naming> = observed.groups.values().chain(kept).flat_map(|group| denials(group)).collect();
    for (id, (revision, group)) in gone {
        let Some(Naming { group: by, rule }) = owned.denied.get(id).or_else(|| own.get(id)) else {
            difference.deletes.push((id.clone(), *revision));
            continue;
        };
        let words = "its rules are gone, its members stay until that rule is removed";
        difference.withheld.add(format!("group {id} is not deleted: deny rules[{rule}] of group {by} names it; {words}"));
        if let Some(group) = group.as_ref().filter(|group| !group.rules.is_empty()) {
            let emptied = Group { rules: Vec::new(), ..(**group).clone() };
            difference.puts.push((Arc::new(emptied), Expected::Revision(*revision)));
            difference.emptied.insert(id.clone());
        }
    }
}

/// The writes to CATALOG: one change, as long as it can be written and published as one; else in parts, what is added before what is
/// deleted, so that at no moment something is missing that is there before and after.
pub fn changes(difference: &Difference, owned: &Owned) -> Vec<Vec<Write>> {
    let named: BTreeSet<&GroupId> = {
        let held = owned.groups.values().filter_map(|(_, group)| group.as_ref());
        let all = held.chain(difference.puts.iter().map(|(group, _)| group));
        all.flat_map(|group| &group.rules).filter_map(|rule| remote(&rule.rule.remote)).collect()
    };
    let mut parts = Parts { named, hosts: owned.hosts, done: Vec::new(), part: Vec::new(), bytes: 0, topics: BTreeSet::new() };
    for (group, expected) in &difference.puts {
        let before = owned.groups.get(&group.id).and_then(|(_, before)| before.as_ref());
        let write = Write::put(Document::Group(group.clone()), *expected);
        parts.add(write, &group.id, [Some(group), before].into_iter().flatten());
    }
    for (id, revision) in &difference.deletes {
        let before = owned.groups.get(id).and_then(|(_, before)| before.as_ref());
        parts.add(Write::delete(Name::group(id), Expected::Revision(*revision)), id, before.into_iter());
    }
    parts.finish()
}

fn remote(remote: &Remote) -> Option<&GroupId> {
    if let Remote::Group(id) = remote { Some(id) } else { None }
}

struct Parts<'a> {
    /// Groups that rules name: only these have a topic of members.
    named: BTreeSet<&'a GroupId>,
    hosts: usize,
    done: Vec<Vec<Write>>,
    part: Vec<Write>,
    bytes: usize,
    /// What the part touches at most.
    topics: BTreeSet<Topic>,
}

impl<'a> Parts<'a> {
    fn add(&mut self, write: Write, id: &GroupId, versions: impl Iterator<Item = &'a Arc<Group>>) {
        let bytes = write.payload().len();
        let mut touched = BTreeSet::from([Topic::Rules(id.clone())]);
        if self.named.contains(id) {
            touched.insert(Topic::Members(id.clone()));
        }
        for group in versions {
            touched.extend(group.bindings.iter().filter_map(|binding| binding.target.scope()).map(Topic::Scope));
            touched.extend(group.rules.iter().filter_map(|rule| remote(&rule.rule.remote)).cloned().map(Topic::Members));
        }
        let more = touched.iter().filter(|topic| !self.topics.contains(*topic)).count();
        // A lead message, and one for each host.
        let wide = self.topics.len() + more + self.hosts + 1 > BATCH_MESSAGES_MAX;
        if !self.part.is_empty() && (wide || self.part.len() == CHANGE_DOCUMENTS_MAX || self.bytes + bytes > CHANGE_BYTES_MAX) {
            self.done.push(std::mem::take(&mut self.part));
            self.topics.clear();
            self.bytes = 0;
        }
        self.part.push(write);
        self.topics.extend(touched);
        self.bytes += bytes;
    }

    fn finish(mut self) -> Vec<Vec<Write>> {
        if !self.part.is_empty() {
            self.done.push(self.part);
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::ids::SourceId;
    use groupcast_policy::model::{Binding, GroupRule, Owner, Target};

    fn source() -> SourceId {
        "cf".parse().unwrap()
    }

    fn group(id: &str, name: &str) -> Arc<Group> {
        let mut group = Group::new(id.parse().unwrap());
        group.name = name.to_owned();
        group.owner = Owner::Source(source());
        Arc::new(group)
    }

    fn observed(groups: &[Arc<Group>]) -> Observation {
        Observation { groups: groups.iter().map(|g| (g.id.clone(), g.clone())).collect(), ..Observation::default() }
    }

    fn owned(groups: &[Arc<Group>]) -> Owned {
        let mut owned = Owned::default();
        for (at, group) in groups.iter().enumerate() {
            owned.take_group(&source(), &group.id, at as u64 + 1, Some(group.clone()));
        }
        owned
    }

    fn shape(d: &Difference) -> (Vec<&str>, Vec<&str>) {
        (d.puts.iter().map(|(g, _)| g.id.as_str()).collect(), d.deletes.iter().map(|(id, _)| id.as_str()).collect())
    }

    #[test]
    fn only_what_differs_is_written() {
        let (a, b, c) = (group("cf-a", "a"), group("cf-b", "b"), group("cf-c", "c"));
        let known = owned(&[a.clone(), b.clone()]);
        assert!(diff(&known, &observed(&[a.clone(), b.clone()])).is_empty());
        let changed = diff(&known, &observed(&[group("cf-a", "new"), c.clone()]));
        assert_eq!(shape(&changed), (vec!["cf-a", "cf-c"], vec!["cf-b"]));
        assert_eq!(changed.puts.iter().map(|(_, e)| *e).collect::<Vec<_>>(), [Expected::Revision(1), Expected::Absent]);
        assert_eq!(changed.deletes, [("cf-b".parse().unwrap(), 2)]);
    }

    #[test]
    fn what_cannot_be_read_stays_and_what_belongs_to_others_is_left_alone() {
        let (a, b) = (group("cf-a", "a"), group("cf-b", "b"));
        let mut known = owned(&[a.clone(), b.clone()]);
        let mut seen = observed(std::slice::from_ref(&a));
        seen.kept_groups.insert("cf-b".parse().unwrap());
        assert!(diff(&known, &seen).is_empty());
        seen.kept_groups.clear();
        seen.problems.nameless = true;
        assert!(diff(&known, &seen).is_empty(), "it may be cf-b");
        let mut gateways = Group::new("cf-z".parse().unwrap());
        gateways.name = "theirs".into();
        known.take_group(&source(), &gateways.id.clone(), 9, Some(Arc::new(gateways)));
        let taken = diff(&known, &observed(&[a, b, group("cf-z", "ours")]));
        assert!(taken.is_empty() && taken.problems.named[0].contains("cf-z belongs to somebody else"));
        // A document of ours that nobody can read is written again.
        known.take_group(&source(), &"cf-a".parse().unwrap(), 12, None);
        let again = diff(&known, &observed(&[group("cf-a", "a"), group("cf-b", "b")]));
        assert_eq!(again.puts[0].1, Expected::Revision(12));
    }

    fn ruled(id: &str, owner: Owner, lines: &[&str]) -> Arc<Group> {
        let mut group = Group::new(id.parse().unwrap());
        let rule =
            |line: &&str| GroupRule { rule: groupcast_policy::text::parse_rule(line).unwrap(), description: String::new() };
        (group.owner, group.rules) = (owner, lines.iter().map(rule).collect());
        group.bindings.push(Binding { target: Target::Global, phases: groupcast_policy::doc::Phases::BOTH });
        Arc::new(group)
    }

    #[test]
    fn a_group_that_a_deny_names_stays_without_rules_and_the_others_go() {
        let ours = || Owner::Source(source());
        let (named, free) =
            (ruled("cf-named", ours(), &["egress tcp 443 to any"]), ruled("cf-free", ours(), &["egress tcp 80 to any"]));
        let mut known = owned(&[named.clone(), free]);
        let deny = ruled("closed", Owner::Gateway, &["ingress tcp 1 from any", "deny ingress any from group:cf-named"]);
        known.take_group(&source(), &deny.id.clone(), 9, Some(deny));
        let d = diff(&known, &Observation::default());
        assert_eq!(shape(&d), (vec!["cf-named"], vec!["cf-free"]));
        let (left, expected) = &d.puts[0];
        assert!(left.rules.is_empty() && left.bindings == named.bindings, "its members stay, what it allowed does not");
        assert_eq!((*expected, d.withheld.count, d.deletions().len()), (Expected::Revision(1), 1, 2));
        assert!(
            d.withheld.named[0].contains("cf-named is not deleted: deny rules[1] of group closed names it"),
            "{:?}",
            d.withheld
        );
        // Said and done: nothing is left to write, and it stays named.
        let mut known = owned(std::slice::from_ref(left));
        known.denied = BTreeMap::from([(left.id.clone(), Naming { group: "closed".parse().unwrap(), rule: 1 })]);
        let again = diff(&known, &Observation::default());
        assert!(again.is_empty() && again.withheld.count == 1 && again.deletions().is_empty());
        // It comes back, or the deny goes.
        assert_eq!(shape(&diff(&known, &observed(&[named]))), (vec!["cf-named"], vec![]));
        known.denied.clear();
        assert_eq!(shape(&diff(&known, &Observation::default())), (vec![], vec!["cf-named"]));
    }

    #[test]
    fn a_sources_own_denies_count_by_what_it_says_now() {
        let own = |id: &str, lines: &[&str]| ruled(id, Owner::Source(source()), lines);
        let (target, deny) = (own("cf-target", &[]), own("cf-deny", &["deny egress any to group:cf-target"]));
        let known = owned(&[target, deny.clone()]);
        // The deny stays, also when nobody can read its newest version.
        assert_eq!(shape(&diff(&known, &observed(std::slice::from_ref(&deny)))), (vec![], vec![]));
        let mut unreadable = Observation::default();
        unreadable.kept_groups.insert(deny.id.clone());
        assert_eq!(diff(&known, &unreadable).withheld.count, 1);
        // It goes with the group, or no longer names it.
        assert_eq!(shape(&diff(&known, &Observation::default())), (vec![], vec!["cf-deny", "cf-target"]));
        assert_eq!(shape(&diff(&known, &observed(&[own("cf-deny", &[])]))), (vec!["cf-deny"], vec!["cf-target"]));
    }

    #[test]
    fn a_group_that_no_message_can_hold_is_named_and_spoils_only_itself() {
        let mut large = Group::clone(&group("cf-large", "x"));
        large.owner = Owner::Source(source());
        let rule = groupcast_policy::text::parse_rule("egress tcp 443 to 10.0.0.1").unwrap();
        large.rules = (0..10_000).map(|_| GroupRule { rule: rule.clone(), description: "d".repeat(200) }).collect();
        let d = diff(&Owned::default(), &observed(&[Arc::new(large), group("cf-small", "s")]));
        assert_eq!((shape(&d).0, d.problems.count), (vec!["cf-small"], 1));
    }

    #[test]
    fn a_workload_counts_whatever_its_incarnation_and_moves_between_networks_whole() {
        let workload = |network: &str, incarnation| {
            let w = Workload::new("os-p".parse().unwrap(), "h".parse().unwrap(), network.parse().unwrap());
            Arc::new(Workload { incarnation, ..w })
        };
        let mut known = Owned::default();
        known.take_workload(&"os".parse().unwrap(), workload("n1", 7));
        let mut seen = Observation::default();
        seen.workloads.insert("os-p".parse().unwrap(), workload("n1", 1));
        assert!(diff(&known, &seen).is_empty());
        seen.workloads.insert("os-p".parse().unwrap(), workload("n2", 1));
        let moved = diff(&known, &seen);
        assert_eq!((moved.register.len(), moved.remove.len(), moved.removals(&seen).len()), (1, 1, 0));
        let gone = diff(&known, &Observation::default());
        assert_eq!(gone.removals(&Observation::default()).len(), 1);
        let mut registered = Workload::clone(&workload("n1", 1));
        registered.template = Some("t".parse().unwrap());
        let mut others = Owned::default();
        others.take_workload(&"os".parse().unwrap(), Arc::new(registered));
        assert!(others.workloads.is_empty(), "it registered itself");
    }

    #[test]
    fn a_large_observation_is_one_change_as_long_as_it_can_be() {
        let bound = |i: usize, space: usize| {
            let mut group = Group::clone(&group(&format!("cf-g{i}"), "x"));
            group.bindings.push(Binding {
                target: Target::Space(format!("s{space}").parse().unwrap()),
                phases: groupcast_policy::doc::Phases::RUNNING,
            });
            Arc::new(group)
        };
        let parts = |groups: Vec<Arc<Group>>, hosts: usize| {
            let owned = Owned { hosts, ..Owned::default() };
            changes(&diff(&owned, &observed(&groups)), &owned).iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(parts((0..13_500).map(|i| bound(i, i % 5_000)).collect(), 1_000), [13_500]);
        assert_eq!(parts((0..20_000).map(|i| bound(i, 0)).collect(), 0), [19_998, 2], "topics, and a message that leads them");
        let apart = parts((0..13_500).map(|i| bound(i, i)).collect(), 1_000);
        assert_eq!((apart.len(), apart.iter().sum::<usize>()), (2, 13_500));
        assert_eq!(parts(Vec::new(), 0), [] as [usize; 0]);
    }

    #[test]
    fn additions_come_before_deletions() {
        let old: Vec<_> = (0..15_000).map(|i| group(&format!("cf-a{i}"), "x")).collect();
        let new: Vec<_> = (0..15_000).map(|i| group(&format!("cf-b{i}"), "x")).collect();
        let known = owned(&old);
        let parts = changes(&diff(&known, &observed(&new)), &known);
        let all: Vec<bool> = parts.iter().flatten().map(|w| matches!(w.body, crate::change::Body::Put(_))).collect();
        assert!(parts.len() > 1 && all.is_sorted_by(|a, b| a >= b));
    }
}
