use std::collections::{BTreeMap, BTreeSet};

use groupcast_messages::Nudge;
use proptest::prelude::*;

use super::*;
use groupcast_policy::topic::TopicHash;

fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

/// A batch that carries the change of its own number; a revision above the lead's for every topic.
fn committed(lead: u64, change: u64, span: &[(&str, &[(u64, u64)])]) -> Committed {
    let list = |list: &[(u64, u64)]| list.iter().map(|(t, r)| (TopicHash(*t), *r)).collect::<Vec<_>>();
    let topics: BTreeSet<(TopicHash, u64)> = span.iter().flat_map(|(_, reach)| list(reach)).collect();
    Committed {
        cut: Cut { term: 1, lead },
        since: 1,
        change,
        after: change - 1,
        catalog: change,
        topics: topics.into_iter().collect(),
        span: span.iter().map(|(name, reach)| (host(name), list(reach).into())).collect(),
        ..Committed::default()
    }
}

fn ack(reached: &[(u64, u64)]) -> Ack {
    let reached = reached.iter().map(|(t, r)| (TopicHash(*t), *r)).collect();
    Ack { term: 1, state: HostState::Enforcing, reached }
}

fn behind(c: &Convergence, change: u64, now_ms: u64) -> Vec<String> {
    c.progress(change, now_ms).unwrap().behind.iter().map(|(host, why)| format!("{host} {why}")).collect()
}

fn is_done(c: &Convergence, change: u64) -> bool {
    c.progress(change, 0).unwrap().is_done()
}

#[test]
fn a_change_is_done_on_a_host_when_every_topic_of_it_is_reached() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 8, &[("a", &[(1, 11), (2, 12)]), ("b", &[(1, 11)])]), 100);
    assert_eq!(c.span(8).unwrap(), [host("a"), host("b")]);
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 105);
    assert_eq!(behind(&c, 8, 105), ["a waiting", "b waiting"]);
    c.acknowledged(&host("a"), &ack(&[(2, 40)]), 106); // a later revision includes it
    c.acknowledged(&host("b"), &ack(&[(1, 11)]), 109);
    let progress = c.progress(8, 200).unwrap();
    assert!(progress.is_done() && progress.behind.is_empty() && c.behind() == 0 && c.unfinished() == 0);
    let Summary { enforced, first_ms, p50_ms, p99_ms, last_ms } = progress.summary;
    assert_eq!((enforced, first_ms, p50_ms, p99_ms, last_ms), (2, Some(6), Some(6), Some(9), Some(9)));
    assert_eq!((c.took(), c.took()), (vec![6, 9], vec![]));
}

#[test]
fn a_batch_in_between_is_not_done_by_an_acknowledgement_of_the_one_before() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 1, &[("a", &[(1, 11)])]), 0);
    c.committed(&committed(20, 2, &[("a", &[(1, 21)])]), 0);
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 5);
    assert!(is_done(&c, 1) && !is_done(&c, 2));
    c.acknowledged(&host("a"), &ack(&[(1, 21)]), 6);
    assert!(is_done(&c, 2));
}

#[test]
fn a_later_batch_says_nothing_of_one_that_was_lost_on_the_way() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 1, &[("a", &[(1, 11)])]), 0);
    c.committed(&committed(20, 2, &[("a", &[(2, 21)])]), 0);
    c.acknowledged(&host("a"), &ack(&[(2, 21)]), 5);
    assert!(!is_done(&c, 1) && is_done(&c, 2));
    let nudges = c.tick(10_000);
    assert_eq!(Nudge::decode(&nudges[0].1).unwrap().should, vec![(TopicHash(1), 11)]);
}

#[test]
fn who_is_behind_and_why() {
    let mut c = Convergence::default();
    let all: &[(u64, u64)] = &[(1, 11)];
    c.committed(&committed(10, 7, &[("broken", all), ("frozen", all), ("silent", all), ("slow", all)]), 0);
    let state = HostState::Frozen { reason: "maintenance".into() };
    c.acknowledged(&host("frozen"), &Ack { state, ..ack(&[]) }, 3);
    c.heard(&host("slow"), HostState::Enforcing, 4);
    c.heard(&host("broken"), HostState::Failing { reason: "no memory".into() }, 4);
    let why = behind(&c, 7, UNREACHABLE_AFTER_MS);
    assert_eq!(why, ["broken error: no memory", "frozen frozen: maintenance", "silent unreachable", "slow waiting"]);
    assert_eq!(behind(&c, 7, UNREACHABLE_AFTER_MS - 1)[2], "silent waiting");
    c.left(&host("silent"));
    c.left(&host("frozen"));
    c.acknowledged(&host("slow"), &ack(all), 9);
    assert_eq!(behind(&c, 7, 9), ["broken error: no memory"]);
    c.acknowledged(&host("broken"), &ack(all), 9);
    let progress = c.progress(7, 9).unwrap();
    assert_eq!((progress.is_done(), progress.span), (true, 2), "who left is not waited for");
}

/// It said "enforced on all hosts" with a host in bypass, and packets passed.
#[test]
fn a_host_that_has_a_change_and_does_not_enforce_it_is_named() {
    let reason = || "a test".to_owned();
    let some = HostState::AuditingSome { workloads: vec!["w1".parse().unwrap()], total: 1, reason: String::new() };
    let states = [
        (HostState::Enforcing, None),
        // It keeps what it has, and it has this.
        (HostState::Frozen { reason: reason() }, None),
        (HostState::Bypassed { reason: reason() }, Some("a bypassed: a test")),
        (HostState::Auditing { reason: reason() }, Some("a auditing: a test")),
        (HostState::Lockdown { reason: reason() }, Some("a lockdown: a test")),
        (HostState::Failing { reason: reason() }, Some("a error: a test")),
        (some, Some("a auditing-some: w1")),
        (HostState::DryRun, Some("a dry-run")),
        (HostState::Other("dreaming".into()), Some("a dreaming")),
    ];
    for (state, expected) in states {
        let mut c = Convergence::default();
        c.committed(&committed(10, 7, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), 0);
        c.acknowledged(&host("a"), &Ack { state: state.clone(), ..ack(&[(1, 11)]) }, 5);
        c.acknowledged(&host("b"), &ack(&[(1, 11)]), 5);
        let progress = c.progress(7, 6).unwrap();
        assert_eq!(behind(&c, 7, 6), Vec::from_iter(expected), "{state:?}");
        assert_eq!((progress.is_done(), progress.enforced()), (expected.is_none(), 2 - u32::from(expected.is_some())));
        // Once it enforces again, so it says, and the change is in force.
        c.heard(&host("a"), HostState::Enforcing, 9);
        assert!(is_done(&c, 7) && c.progress(7, 9).unwrap().enforced() == 2);
    }
}

#[test]
fn who_stays_behind_is_nudged_with_backoff_until_it_acknowledges_or_leaves() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 7, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), 0);
    assert!(c.tick(499).is_empty());
    assert_eq!(c.tick(500).len(), 2);
    assert!(c.tick(501).is_empty());
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 600);
    let nudges = c.tick(1_500);
    assert_eq!(nudges.len(), 1);
    assert_eq!(Nudge::decode(&nudges[0].1).unwrap().should, vec![(TopicHash(1), 11)]);
    c.stream_leader_changed(1_600);
    assert_eq!(c.tick(1_600).len(), 1);
    c.left(&host("b"));
    assert!(c.tick(100_000).is_empty());
    assert!(is_done(&c, 7));
}

#[test]
fn an_acknowledgement_that_is_faster_than_the_word_of_its_batch_counts() {
    let mut c = Convergence::default();
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 4);
    c.acknowledged(&host("b"), &ack(&[(1, 21)]), 4);
    c.committed(&committed(10, 7, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), 5);
    assert_eq!(behind(&c, 7, 5), ["b waiting"]);
    c.committed(&committed(20, 8, &[("a", &[(1, 21)]), ("b", &[(1, 21)])]), 6);
    assert_eq!(behind(&c, 8, 6), ["a waiting"]);
    assert!(is_done(&c, 7), "a later revision includes it");
    assert!(c.tick(10_000).iter().all(|(to, _)| *to == host("a")), "nobody is told what it has said already");
    for i in 0..=EARLY_MAX as u64 {
        c.acknowledged(&host("a"), &ack(&[(1, 100 + i)]), 7);
    }
    assert_eq!(c.early.len(), EARLY_PER_HOST_MAX, "one host does not take the places of all");
}

#[test]
fn a_topic_that_a_host_does_not_need_any_more_is_not_waited_for() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 7, &[("a", &[(1, 11), (2, 12)]), ("b", &[(2, 12)])]), 0);
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 5);
    let dropped = |lead, change, name: &str| {
        let unfollowed = vec![(host(name), TopicHash(2))];
        Committed { unfollowed, ..committed(lead, change, &[("c", &[(3, lead + 1)])]) }
    };
    c.committed(&dropped(20, 8, "a"), 6);
    assert_eq!(behind(&c, 7, 6), ["b waiting"]);
    c.committed(&dropped(30, 9, "b"), 7);
    assert!(is_done(&c, 7));
    // Should it follow the topic again, it is waited for again.
    c.committed(&committed(40, 10, &[("a", &[(2, 41)])]), 8);
    assert!(!is_done(&c, 10));
}

#[test]
fn a_host_whose_topic_is_retired_is_not_waited_for() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 7, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), 0);
    c.acknowledged(&host("b"), &ack(&[(1, 11)]), 5);
    c.committed(&Committed { left: vec![host("a")], ..committed(20, 8, &[]) }, 6);
    assert!(is_done(&c, 7) && c.hosts() == 1);
}

#[test]
fn changes_belong_to_the_batch_that_reflects_them() {
    let mut c = Convergence::default();
    // Three changes as one batch, then something in the registry, then a hole, then another change.
    c.committed(&Committed { after: 4, ..committed(10, 7, &[("a", &[(1, 11)])]) }, 0);
    c.committed(&Committed { after: 7, catalog: 7, ..committed(20, 7, &[("b", &[(1, 21)])]) }, 0);
    c.committed(&Committed { after: 9, ..committed(30, 10, &[("c", &[(1, 31)])]) }, 0);
    let span = |change: u64| c.span(change).map(|hosts| hosts.iter().map(|h| h.to_string()).collect::<String>());
    let spans: Vec<Option<String>> = (4..12).map(span).collect();
    let expected = [None, Some("a"), Some("a"), Some("a"), None, None, Some("c"), None];
    assert_eq!(spans, expected.map(|names| names.map(str::to_owned)));
    assert_eq!((c.moved(), c.moved()), (vec![7, 10], vec![]), "what happened in the registry is no change");
}

#[test]
fn a_change_that_concerns_nobody_is_done_at_once() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 7, &[]), 0);
    c.touched_nothing(9);
    assert!(is_done(&c, 7) && is_done(&c, 9) && c.span(9) == Some(vec![]));
    assert_eq!(c.progress(8, 0), None);
    c.was_torn(7);
    assert!(c.progress(7, 0).unwrap().torn && !c.progress(9, 0).unwrap().torn);
    (100..=100 + ODD_CHANGES_MAX as u64).for_each(|change| c.touched_nothing(change));
    assert_eq!((c.nothing.len(), c.progress(9, 0)), (ODD_CHANGES_MAX, None));
}

#[test]
fn terms_change_and_progress_stays() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 7, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), 0);
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 5);
    // Another leads; hosts learn of its term with its first batch.
    let next = Committed { cut: Cut { term: 2, lead: 20 }, ..committed(20, 8, &[("a", &[(1, 21)])]) };
    c.committed(&next, 6);
    c.acknowledged(&host("b"), &ack(&[(1, 11)]), 7);
    c.acknowledged(&host("a"), &Ack { term: 2, ..ack(&[(1, 21)]) }, 8);
    assert!(is_done(&c, 7) && is_done(&c, 8));
}

#[test]
fn a_stream_that_is_new_supersedes_what_was_published_before() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 7, &[("a", &[(1, 11)])]), 0);
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 1);
    c.committed(&committed(20, 8, &[("a", &[(1, 21)]), ("gone", &[(1, 21)])]), 2);
    // Everything is published anew, and with it what had not arrived.
    let rebuilt = Committed { cut: Cut { term: 5, lead: 100 }, since: 5, after: 0, ..committed(100, 8, &[("a", &[(1, 101)])]) };
    c.committed(&rebuilt, 3);
    assert_eq!((is_done(&c, 7), is_done(&c, 8), c.behind()), (true, false, 1));
    c.acknowledged(&host("a"), &ack(&[(1, 500)]), 4); // of the stream that is gone
    assert!(!is_done(&c, 8));
    c.acknowledged(&host("a"), &Ack { term: 5, ..ack(&[(1, 101)]) }, 5);
    assert!(is_done(&c, 8));
    // CATALOG was lost with it, and its restored one counts anew.
    let restored = Committed { cut: Cut { term: 6, lead: 900 }, since: 6, after: 0, ..committed(900, 3, &[("a", &[(1, 901)])]) };
    c.committed(&restored, 6);
    assert_eq!((c.progress(8, 6), is_done(&c, 2)), (None, false));
}

#[test]
fn a_batch_too_large_to_list_is_done_with_the_hosts_own_message() {
    let mut c = Convergence::default();
    let own = |name: &str| Topic::Host(host(name)).hash64().0;
    let topics: Vec<(u64, u64)> = (0..40).map(|i| (i, 101 + i)).collect();
    let (mut a, mut b) = (topics.clone(), topics[..20].to_vec());
    a.push((own("a"), 141));
    b.push((own("b"), 142));
    c.committed(&Committed { tallied: true, ..committed(100, 7, &[("a", &a), ("b", &b)]) }, 0);
    c.acknowledged(&host("a"), &ack(&topics), 1);
    assert_eq!(behind(&c, 7, 1), ["a waiting", "b waiting"]);
    c.acknowledged(&host("a"), &ack(&[(own("a"), 141)]), 2);
    assert_eq!(behind(&c, 7, 1), ["b waiting"]);
    let nudges = c.tick(10_000);
    assert_eq!(Nudge::decode(&nudges[0].1).unwrap().should, vec![(TopicHash(own("b")), 142)]);
    c.acknowledged(&host("b"), &ack(&[(own("b"), 142)]), 3);
    assert!(is_done(&c, 7));
}

#[test]
fn batches_are_bounded_and_who_missed_a_forgotten_one_is_still_told() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 1, &[("old", &[(2, 11)])]), 0);
    for i in 1..=BATCHES_MAX as u64 {
        c.committed(&committed(10 + i, 1 + i, &[("a", &[(1, 11 + i)])]), i);
    }
    assert_eq!((c.batches.len(), c.progress(1, 0), c.progress(2, 0).is_some()), (BATCHES_MAX, None, true));
    assert_eq!(c.rows[1].as_ref().unwrap().open.iter().count(), BATCHES_MAX);
    assert_eq!(c.behind(), 2);
    let nudge = c.tick(100_000).into_iter().find(|(to, _)| *to == host("old")).unwrap();
    assert_eq!(Nudge::decode(&nudge.1).unwrap().should, vec![(TopicHash(2), 11)]);
    c.acknowledged(&host("a"), &ack(&[(1, 11 + BATCHES_MAX as u64)]), 5);
    c.acknowledged(&host("old"), &ack(&[(2, 11)]), 5);
    assert_eq!((c.unfinished(), c.behind()), (0, 0));
}

#[test]
fn a_slot_is_used_again_only_when_no_batch_names_its_last_host() {
    let mut c = Convergence::default();
    c.committed(&committed(10, 1, &[("a", &[(1, 11)])]), 0);
    c.left(&host("a"));
    c.committed(&committed(20, 2, &[("b", &[(1, 21)])]), 0);
    assert_eq!((c.span(1), c.span(2), c.rows.len()), (Some(vec![]), Some(vec![host("b")]), 2));
    for i in 0..BATCHES_MAX as u64 {
        c.committed(&committed(100 + i, 100 + i, &[]), 0);
    }
    c.committed(&committed(9_000, 9_000, &[("c", &[(1, 9_001)])]), 0);
    assert_eq!((c.rows.len(), c.span(9_000)), (2, Some(vec![host("c")])));
}

/// Which host must reach which revision of which topic.
type Reaches = BTreeMap<u8, BTreeMap<u64, u64>>;

/// The same, from scratch: every host's revisions, and for every batch who must reach what.
#[derive(Default)]
struct Scratch {
    revisions: BTreeMap<(u8, u64), u64>,
    batches: Vec<(u64, Reaches)>,
}

impl Scratch {
    fn behind(&self, change: u64) -> BTreeSet<u8> {
        let (_, span) = self.batches.iter().find(|(number, _)| *number == change).unwrap();
        let has = |host: u8, topic: u64, wanted: u64| self.revisions.get(&(host, topic)).is_some_and(|r| *r >= wanted);
        span.iter().filter(|(host, reach)| !reach.iter().all(|(t, r)| has(**host, *t, *r))).map(|(host, _)| *host).collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Topics, and which hosts follow which of them.
    Commit(BTreeMap<u8, BTreeSet<u64>>),
    /// A host acknowledges these topics, as of now.
    Ack(u8, BTreeSet<u64>),
    Leave(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    let topics = || prop::collection::btree_set(0..5u64, 0..4);
    prop_oneof![
        3 => prop::collection::btree_map(0..4u8, topics(), 0..4).prop_map(Step::Commit),
        4 => (0..4u8, topics()).prop_map(|(host, topics)| Step::Ack(host, topics)),
        1 => (0..4u8).prop_map(Step::Leave),
    ]
}

proptest! {
    #[test]
    fn progress_equals_a_count_from_scratch(steps in prop::collection::vec(any_step(), 0..60), others in prop::sample::select(&[0, 26, 27, 40][..])) {
        let (mut c, mut scratch, mut lead, mut change) = (Convergence::default(), Scratch::default(), 10, 0);
        let mut current: BTreeMap<u64, u64> = BTreeMap::new();
        for (now_ms, step) in steps.into_iter().enumerate() {
            match step {
                Step::Commit(span) => {
                    let topics: BTreeSet<u64> = span.values().flatten().copied().collect();
                    current.extend(topics.iter().zip(lead + 1..).map(|(topic, revision)| (*topic, revision)));
                    let reach = |topics: &BTreeSet<u64>| topics.iter().map(|t| (*t, current[t])).collect::<Vec<_>>();
                    let span: Vec<(u8, Vec<(u64, u64)>)> =
                        span.iter().filter(|(_, t)| !t.is_empty()).map(|(host, topics)| (*host, reach(topics))).collect();
                    let names: Vec<String> = span.iter().map(|(host, _)| format!("h{host}")).collect();
                    let listed: Vec<(&str, &[(u64, u64)])> =
                        names.iter().zip(&span).map(|(name, (_, reach))| (name.as_str(), reach.as_slice())).collect();
                    change += 1;
                    let mut committed = committed(lead, change, &listed);
                    // Changes that concern nobody here, published with it: from 33 topics on, they are numbered otherwise.
                    committed.topics.splice(0..0, (0..others).map(|other| (TopicHash(1_000 + other), lead + 9)));
                    c.committed(&committed, now_ms as u64);
                    scratch.batches.push((change, span.into_iter().map(|(h, r)| (h, r.into_iter().collect())).collect()));
                    lead += 10;
                }
                Step::Ack(host, topics) => {
                    let reached: Vec<(u64, u64)> = topics.iter().filter_map(|t| Some((*t, *current.get(t)?))).collect();
                    scratch.revisions.extend(reached.iter().map(|(t, r)| ((host, *t), *r)));
                    c.acknowledged(&HostId::new(&format!("h{host}")).unwrap(), &ack(&reached), now_ms as u64);
                }
                Step::Leave(host) => {
                    scratch.batches.iter_mut().for_each(|(_, span)| { span.remove(&host); });
                    c.left(&HostId::new(&format!("h{host}")).unwrap());
                }
            }
            for number in 1..=change {
                let progress = c.progress(number, 0).unwrap();
                let found: BTreeSet<u8> = progress.behind.iter().map(|(host, _)| host.as_str()[1..].parse().unwrap()).collect();
                prop_assert_eq!(&found, &scratch.behind(number), "change {}", number);
                prop_assert_eq!(progress.is_done(), found.is_empty());
            }
            let anyone: BTreeSet<u8> = (1..=change).flat_map(|number| scratch.behind(number)).collect();
            prop_assert_eq!(c.behind(), anyone.len());
        }
    }
}

#[test]
fn what_a_host_does_is_what_it_said_last() {
    let mut c = Convergence::default();
    assert_eq!(c.standing(&host("a"), 0), None);
    c.committed(&committed(10, 8, &[("a", &[(1, 11)])]), 100);
    assert_eq!(c.standing(&host("a"), 100), None, "never heard of");
    let frozen = HostState::Frozen { reason: "an incident".into() };
    c.heard(&host("a"), frozen.clone(), 105);
    let standing = Standing { state: frozen, heard_ms_ago: 10, is_behind: true, behind_ms: 15 };
    assert_eq!(c.standing(&host("a"), 115), Some(standing));
    c.acknowledged(&host("a"), &ack(&[(1, 11)]), 120);
    let standing = Standing { state: HostState::Enforcing, heard_ms_ago: 0, is_behind: false, behind_ms: 0 };
    assert_eq!(c.standing(&host("a"), 120), Some(standing));
}

/// After a restart of the controllers nobody knew what hosts do, until a change concerned them.
#[test]
fn what_a_host_says_before_a_batch_concerns_it_is_remembered_and_bounded() {
    let mut c = Convergence::default();
    let bypassed = HostState::Bypassed { reason: "a test".into() };
    c.heard(&host("a"), bypassed.clone(), 100);
    c.acknowledged(&host("b"), &ack(&[]), 100);
    let of = |c: &Convergence, name: &str| c.standing(&host(name), 130).map(|standing| (standing.state, standing.heard_ms_ago));
    assert_eq!(of(&c, "a"), Some((bypassed.clone(), 30)));
    assert_eq!(of(&c, "b"), Some((HostState::Enforcing, 30)));
    assert_eq!(c.hosts(), 0, "nobody waits for it");
    c.committed(&committed(10, 8, &[("a", &[(1, 11)])]), 120);
    assert_eq!(behind(&c, 8, 120), ["a bypassed: a test"]);
    assert_eq!(of(&c, "a"), Some((bypassed, 30)));
    for i in 0..=STRANGERS_MAX {
        c.heard(&host(&format!("s{i}")), HostState::Enforcing, 200);
    }
    assert_eq!(c.strangers.len(), STRANGERS_MAX);
    c.heard(&host("late"), HostState::Enforcing, 200 + STRANGER_FORGOTTEN_MS);
    assert_eq!(c.strangers.len(), 1, "who is gone makes room");
}

/// CATALOG was restored under a stream TOPICS that lived on: a new change with an old number was called enforced at once.
#[test]
fn a_catalogue_that_counts_anew_ends_what_was_known_by_number() {
    let mut c = Convergence::new(Settings::default());
    c.committed(&committed(20, 100, &[("a", &[(1, 21)])]), 0);
    c.acknowledged(&host("a"), &ack(&[(1, 21)]), 0);
    assert!(is_done(&c, 100));
    c.committed(&committed(30, 12, &[("a", &[(1, 31)])]), 0);
    assert!(!is_done(&c, 12), "nobody has it yet");
    assert!(c.progress(100, 0).is_none(), "it is not known of this catalogue");
}
