use proptest::prelude::*;

use super::*;
use crate::compiler::Compiler;
use crate::ids::WorkloadId;
use crate::model::{Binding, Event, Group, GroupRule, Target, Workload};
use crate::net::Prefix;
use crate::packet::Payload;
use crate::rule::Direction;
use crate::testing::*;
use crate::text::parse_rule;

type Replica = HashMap<Topic, Document>;

static ABSENT: std::sync::LazyLock<Document> = std::sync::LazyLock::new(Document::absent);

/// Everything but these is synced.
struct Held<'r>(&'r Replica, Vec<Topic>);

impl Documents for Held<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        (!self.1.contains(topic)).then(|| self.0.get(topic).unwrap_or(&ABSENT))
    }
}

fn follow(compiler: &mut Compiler, documents: &mut Replica, events: &[Event]) {
    for (topic, edit) in compiler.apply(events).edits {
        documents.entry(topic).or_default().apply(&edit).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// Nothing passes that did not before, nor anything that the new policy, known whole, does not let pass.
    #[test]
    fn the_safe_part_allows_nothing_that_either_policy_denies(
        first in any_events(25),
        second in any_events(6),
        questions in prop::collection::vec((any_address(), any_payload(), any::<bool>()), 40),
        unsynced in any::<u8>(),
    ) {
        let (mut compiler, mut documents) = (Compiler::new(), Replica::new());
        follow(&mut compiler, &mut documents, &first);
        let before = documents.clone();
        follow(&mut compiler, &mut documents, &second);
        // Topics that did not exist before may not be synced yet.
        let missing = documents.keys().filter(|topic| !before.contains_key(*topic) && topic.hash64().0 % 4 == u64::from(unsynced % 8));
        let (old, new, partly) = (Held(&before, vec![]), Held(&documents, vec![]), Held(&documents, missing.cloned().collect()));
        for host in (0..2).map(host_id) {
            let policies = (resolve(&host, &old), resolve(&host, &new));
            for (known, is_whole) in [(&new, true), (&partly, partly.1.is_empty())] {
                let safe_documents = safe(&host, &old, known);
                let shown = safe_documents.as_ref().map_or(&before, |documents| documents);
                let shown = Held(shown, vec![]);
                let safely = resolve(&host, &shown);
                for id in policies.0.workloads.keys().chain(policies.1.workloads.keys()) {
                    for (remote, payload, ingress) in &questions {
                        let direction = if *ingress { Direction::Ingress } else { Direction::Egress };
                        if !safely.workloads.contains_key(id) || !safely.verdict(id, direction, *remote, payload) {
                            continue;
                        }
                        prop_assert!(policies.0.verdict(id, direction, *remote, payload), "{id} {remote} {payload} is new");
                        let enforced = policies.1.workloads.get(id).map(|workload| workload.placement.enforced);
                        if is_whole && safe_documents.is_some() {
                            prop_assert!(enforced.is_some(), "{id} is gone");
                            prop_assert!(policies.1.verdict(id, direction, *remote, payload), "{id} {remote} {payload} was taken away");
                        }
                    }
                }
            }
        }
    }

    /// A change of nothing has no safe part.
    #[test]
    fn nothing_changed_is_nothing_to_do(events in any_events(25)) {
        let (mut compiler, mut documents) = (Compiler::new(), Replica::new());
        follow(&mut compiler, &mut documents, &events);
        let held = Held(&documents, vec![]);
        for host in (0..2).map(host_id) {
            prop_assert!(safe(&host, &held, &held).is_none());
        }
    }
}

/// A workload on a host, its group's rules before, and what happens to them.
struct Case {
    compiler: Compiler,
    documents: Replica,
}

fn group(id: &str, rules: &[&str], members: &[&str]) -> Event {
    let rules = rules.iter().map(|text| GroupRule::from(parse_rule(text).unwrap())).collect();
    let members = members.iter().map(|text| Prefix::host(text.parse().unwrap())).collect();
    Event::group(Group { rules, members, ..Group::new(GroupId::new(id).unwrap()) })
}

fn bound(event: Event) -> Event {
    let Event::Group { group, .. } = event else { panic!("a group") };
    let bindings = vec![Binding { target: Target::Global, phases: crate::doc::Phases::BOTH }];
    Event::group(Group { bindings, ..Group::clone(&group) })
}

fn web() -> WorkloadId {
    WorkloadId::new("web").unwrap()
}

impl Case {
    fn new(events: &[Event]) -> Self {
        let mut case = Self { compiler: Compiler::new(), documents: Replica::new() };
        let addresses = [Prefix::host("10.0.0.1".parse().unwrap())].into();
        let workload = Workload { addresses, ..Workload::new(web(), host_id(0), network(0)) };
        follow(&mut case.compiler, &mut case.documents, &[Event::workload(workload)]);
        follow(&mut case.compiler, &mut case.documents, events);
        case
    }

    /// Whether tcp/443 from each of these passes under the safe part of the change; `None` where there is none.
    fn after(mut self, events: &[Event], unsynced: &[&str], remotes: &[&str]) -> Option<Vec<bool>> {
        let before = self.documents.clone();
        follow(&mut self.compiler, &mut self.documents, events);
        let unsynced = unsynced.iter().map(|token| Topic::parse(token).unwrap()).collect();
        let documents = safe(&host_id(0), &Held(&before, vec![]), &Held(&self.documents, unsynced))?;
        let held = Held(&documents, vec![]);
        let policy = resolve(&host_id(0), &held);
        let passes = |remote: &&str| policy.verdict(&web(), Direction::Ingress, remote.parse().unwrap(), &Payload::tcp(443));
        Some(remotes.iter().map(passes).collect())
    }
}

#[test]
fn removals_and_denies_count_and_additions_wait() {
    let start =
        || Case::new(&[bound(group("g", &["ingress tcp 443 from any"], &[])), group("m", &[], &["10.1.0.1", "10.1.0.2"])]);
    let any = "ingress tcp 443 from any";
    let named = |rules: &[&str]| bound(group("g", rules, &[]));
    // A deny that comes, over an address; over a group; over one whose members are not here yet; and with it an allow elsewhere.
    let remotes = ["10.1.0.1", "10.1.0.9"];
    type Row<'r> = (&'r [Event], &'r [&'r str], Option<[bool; 2]>);
    let rows: [Row; 6] = [
        (&[named(&[any, "deny ingress any from 10.1.0.1/32"])], &[], Some([false, true])),
        (&[named(&[any, "deny ingress any from group:m"])], &[], Some([false, true])),
        (&[named(&[any, "deny ingress any from group:m"])], &["members.m"], Some([false, false])),
        (&[named(&[])], &[], Some([false, false])),
        (&[named(&[any, "ingress udp 53 from any"])], &[], None),
        (&[bound(group("n", &["deny ingress any from 10.1.0.1/32", "ingress udp 1 from any"], &[]))], &[], Some([false, true])),
    ];
    for (index, (events, unsynced, expected)) in rows.into_iter().enumerate() {
        assert_eq!(start().after(events, unsynced, &remotes), expected.map(Vec::from), "row {index}");
    }
    // Bound, but its rules are not here yet: perhaps it denies, perhaps it allows. It waits.
    assert_eq!(start().after(&[bound(group("n", &["deny ingress any from any"], &[]))], &["rules.n"], &remotes), None);
}

#[test]
fn members_that_leave_lose_what_allows_gave_and_those_that_come_meet_denies_only() {
    let allow = bound(group("g", &["ingress tcp 443 from group:m", "deny ingress any from group:m2"], &[]));
    let start = || Case::new(&[allow.clone(), group("m", &[], &["10.1.0.1", "10.1.0.2"]), group("m2", &[], &["10.1.0.1"])]);
    let remotes = ["10.1.0.1", "10.1.0.2", "10.1.0.3"];
    assert_eq!(start().after(&[group("m", &[], &["10.1.0.1", "10.1.0.3"])], &[], &remotes), Some(vec![false; 3]));
    assert_eq!(start().after(&[group("m2", &[], &["10.1.0.1", "10.1.0.2"])], &[], &remotes), Some(vec![false; 3]));
    assert_eq!(start().after(&[group("m2", &[], &[])], &[], &remotes), None, "a deny that shrinks waits");
    assert_eq!(start().after(&[group("m", &[], &["10.1.0.1", "10.1.0.2", "10.1.0.3"])], &[], &remotes), None);
}

#[test]
fn a_deny_over_a_huge_changing_group_denies_any() {
    let many =
        |count: usize| -> Vec<String> { (0..count).map(|n| format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255)).collect() };
    for (count, passes) in [(DENIED_MEMBERS_MAX / 2, true), (DENIED_MEMBERS_MAX / 2 + 1, false)] {
        let rules = ["ingress tcp 443 from any", "deny ingress any from group:m"];
        let texts = many(count);
        let members: Vec<&str> = texts.iter().map(String::as_str).collect();
        let case = Case::new(&[bound(group("g", &rules, &[])), group("m", &[], &members[1..])]);
        let after = case.after(&[group("m", &[], &members)], &[], &["192.0.2.1"]);
        // One side has one fewer.
        assert_eq!(after, Some(vec![passes || count * 2 - 1 <= DENIED_MEMBERS_MAX]), "{count}");
    }
}
