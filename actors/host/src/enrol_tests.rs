use std::collections::BTreeMap;

use groupcast_policy::model::Probe;

use super::*;

fn enrolment(id: &str, template: &str) -> Enrolment {
    let written = WrittenEnrolment {
        workload: id.into(),
        template: template.into(),
        network: "n".into(),
        addresses: ["10.0.0.1".parse().unwrap()].into(),
        labels: BTreeMap::new(),
        space: None,
        app: None,
        staging: false,
    };
    written.check().unwrap()
}

fn id(text: &str) -> WorkloadId {
    text.parse().unwrap()
}

/// The registration of this number is answered: these are registered.
fn registered(number: u64, ids: &[(&str, u64)]) -> Event {
    let incarnations = ids.iter().map(|(text, incarnation)| (id(text), *incarnation)).collect();
    Event::Registered { number, answer: RegisterAnswer::Registered { incarnations, health: None } }
}

fn refused(number: u64, retryable: bool) -> Event {
    Event::Registered { number, answer: RegisterAnswer::Refused { retryable, reason: "no".into() } }
}

fn names(effects: &[Effect]) -> Vec<Vec<String>> {
    let of = |effect: &Effect| match effect {
        Effect::Register { register, .. } => Some(register.workloads.iter().map(|one| one.workload.to_string()).collect()),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

fn numbers(effects: &[Effect]) -> Vec<u64> {
    let of = |effect: &Effect| match effect {
        Effect::Register { number, .. } => Some(*number),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

#[test]
fn what_is_wanted_is_registered_by_template_and_once() {
    let mut enroller = Enroller::new(7, []);
    for (workload, template) in [("a", "t"), ("b", "t"), ("c", "u")] {
        assert_eq!(enroller.handle(Event::Want(enrolment(workload, template)), 0), [], "nothing goes before there is a bus");
    }
    let sent = enroller.handle(Event::Connected(true), 1);
    assert_eq!(names(&sent), [vec!["a", "b"], vec!["c"]]);
    assert_eq!(enroller.handle(Event::Tick, 2), [], "what is on its way is not sent again");
    assert_eq!(enroller.handle(registered(0, &[("a", 1), ("b", 4)]), 3), []);
    assert_eq!(enroller.standings()[1].incarnation, Some(4));
    assert_eq!(names(&enroller.handle(Event::Tick, 1 + ANSWER_WITHIN_MS)), [vec!["c"]], "an answer that was lost is asked for");
}

#[test]
fn a_refusal_is_tried_again_and_spoils_only_its_own() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Want(enrolment("b", "t")), 0);
    assert_eq!(names(&enroller.handle(Event::Connected(true), 0)), [vec!["a", "b"]]);
    let sent = enroller.handle(refused(0, false), 1);
    assert_eq!(names(&sent), [vec!["a"], vec!["b"]], "each by itself, at once");
    enroller.handle(registered(1, &[("a", 1)]), 2);
    enroller.handle(refused(2, true), 2);
    assert_eq!(names(&enroller.handle(Event::Tick, 1 + RETRY_FIRST_MS)), Vec::<Vec<String>>::new());
    assert_eq!(names(&enroller.handle(Event::Tick, 2 + RETRY_FIRST_MS)), [vec!["b"]]);
    enroller.handle(refused(3, false), 500);
    assert_eq!(enroller.standings()[1].state, "refused");
    assert_eq!(names(&enroller.handle(Event::Tick, 499 + RETRY_MAX_MS)), Vec::<Vec<String>>::new());
    assert_eq!(names(&enroller.handle(Event::Tick, 500 + RETRY_MAX_MS)), [vec!["b"]], "somebody may have mended it");
}

#[test]
fn who_is_forgotten_enrols_at_once_and_who_left_does_not() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    enroller.handle(registered(0, &[("a", 1)]), 1);
    assert_eq!(names(&enroller.handle(Event::Forgotten, 2)), [vec!["a"]]);
    enroller.handle(registered(1, &[("a", 2)]), 3);
    enroller.handle(Event::Leave, 4);
    assert_eq!(enroller.handle(Event::Forgotten, 5), []);
    assert!(!enroller.is_needed());
    assert_eq!(names(&enroller.handle(Event::Want(enrolment("a", "t")), 6)), [vec!["a"]], "unless it is wanted anew");
}

#[test]
fn what_has_ended_is_removed_until_that_is_taken() {
    let mut enroller = Enroller::new(7, [("n".parse().unwrap(), id("old"))]);
    let remove = |effects: &[Effect]| matches!(effects, [Effect::Request(HostRequest::Remove { boot: 7, .. })]);
    assert!(remove(&enroller.handle(Event::Connected(true), 0)), "what an earlier run could not say");
    let workloads = vec![("n".parse().unwrap(), id("old"))];
    assert_eq!(enroller.handle(Event::Removed { workloads: workloads.clone(), taken: false }, 1), []);
    assert!(remove(&enroller.handle(Event::Tick, 1 + 4 * RETRY_FIRST_MS)));
    enroller.handle(Event::Removed { workloads, taken: true }, 2_000);
    assert_eq!(enroller.ended().count(), 0);
    assert_eq!(enroller.handle(Event::Tick, 9_000), []);
}

#[test]
fn what_comes_back_waits_for_its_removal_and_is_not_taken_away_by_it() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    enroller.handle(registered(0, &[("a", 1)]), 1);
    let removal = enroller.handle(Event::Unwant(id("a")), 2);
    let [Effect::Request(HostRequest::Remove { workloads, .. })] = &removal[..] else { panic!("{removal:?}") };
    assert_eq!(enroller.handle(Event::Want(enrolment("a", "t")), 3), [], "the removal is on its way");
    // Whether it was taken or not, it is not repeated, and what is wanted goes out.
    for taken in [true, false] {
        let mut after = enroller.clone();
        let sent = after.handle(Event::Removed { workloads: workloads.clone(), taken }, 4);
        assert_eq!(names(&sent), [vec!["a"]]);
        assert_eq!((after.ended().count(), after.handle(Event::Tick, 4_000)), (0, vec![]));
    }
}

#[test]
fn health_is_reported_when_it_changes_and_of_the_right_life() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    let health = Some(HealthCheck { probe: Probe::Tcp { port: 80 }, interval_seconds: 1 });
    let answer = RegisterAnswer::Registered { incarnations: vec![(id("a"), 3)], health };
    let first = enroller.handle(Event::Registered { number: 0, answer }, 1);
    assert!(matches!(&first[..], [Effect::Check { incarnation: 3, .. }]), "{first:?}");
    let checked = |incarnation, healthy| Event::Checked { workload: id("a"), incarnation, healthy, why: None };
    assert_eq!(enroller.handle(checked(2, false), 2), []);
    assert_eq!(enroller.handle(checked(2, false), 2), [], "an earlier life says nothing");
    assert_eq!(enroller.handle(checked(3, false), 2), [], "once may be chance");
    let told = enroller.handle(checked(3, false), 3);
    let [Effect::Request(HostRequest::Health { reports, .. })] = &told[..] else { panic!("{told:?}") };
    assert!(!reports[0].healthy && reports[0].incarnation == 3);
    assert_eq!(enroller.handle(Event::Tick, 4), [], "on its way");
    assert_eq!(enroller.handle(Event::Reported { reports: reports.clone(), taken: false }, 5), [], "refused: not at once");
    assert!(!enroller.handle(Event::Tick, 4 + 4 * RETRY_FIRST_MS).contains(&told[0]));
    let again = enroller.handle(Event::Tick, 5 + 4 * RETRY_FIRST_MS);
    assert!(again.contains(&told[0]), "but again: {again:?}");
    assert_eq!(enroller.handle(Event::Reported { reports: reports.clone(), taken: true }, 1_100), []);
    let well = enroller.handle(checked(3, true), 1_101);
    assert!(matches!(&well[..], [Effect::Request(HostRequest::Health { reports, .. })] if reports[0].healthy));
}

/// An edited health check reached agents with the next refresh only, up to five minutes later.
#[test]
fn another_check_counts_at_once_and_for_its_template_only() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Want(enrolment("b", "u")), 0);
    enroller.handle(Event::Connected(true), 0);
    let check = |port| Some(HealthCheck { probe: Probe::Tcp { port }, interval_seconds: 5 });
    for (number, workload) in [(0, "a"), (1, "b")] {
        let answer = RegisterAnswer::Registered { incarnations: vec![(id(workload), 1)], health: check(80) };
        enroller.handle(Event::Registered { number, answer }, 1);
    }
    let changed = Event::Health { template: "t".into(), health: check(81) };
    let sent = enroller.handle(changed.clone(), 2);
    let [Effect::Check { workload, check: now, .. }] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((workload.as_str(), Some(now.clone())), ("a", check(81)));
    assert_eq!(enroller.handle(changed, 3), [], "said twice it counts once");
    enroller.handle(Event::Checked { workload: id("a"), incarnation: 1, healthy: false, why: None }, 4);
    let unwell = enroller.handle(Event::Checked { workload: id("a"), incarnation: 1, healthy: false, why: None }, 5);
    let [Effect::Request(HostRequest::Health { reports, .. })] = &unwell[..] else { panic!("{unwell:?}") };
    enroller.handle(Event::Reported { reports: reports.clone(), taken: true }, 6);
    // Without a check it is well, and says so.
    let well = enroller.handle(Event::Health { template: "t".into(), health: None }, 7);
    assert!(matches!(&well[..], [Effect::Request(HostRequest::Health { reports, .. })] if reports[0].healthy), "{well:?}");
}

#[test]
fn everything_is_registered_again_now_and_then() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    enroller.handle(registered(0, &[("a", 1)]), 1);
    assert_eq!(enroller.handle(Event::Tick, REFRESH_MS - 1), []);
    assert_eq!(names(&enroller.handle(Event::Tick, REFRESH_MS)), [vec!["a"]]);
}

fn removed(effects: &[Effect]) -> Vec<Vec<String>> {
    let of = |effect: &Effect| match effect {
        Effect::Request(HostRequest::Remove { workloads, .. }) => Some(workloads.iter().map(|(_, id)| id.to_string()).collect()),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

/// A removal went to one controller while the registration before it was still with another, which wrote it afterwards: the workload
/// stayed in the registry for as long as its host lived.
#[test]
fn a_removal_does_not_overtake_the_registration_before_it() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    assert_eq!(names(&enroller.handle(Event::Connected(true), 0)), [vec!["a"]]);
    assert_eq!(enroller.handle(Event::Unwant(id("a")), 10), [], "its registration is on its way");
    assert_eq!(removed(&enroller.handle(registered(0, &[("a", 1)]), 20)), [vec!["a"]]);
    let gone = Event::Removed { workloads: vec![("n".parse().unwrap(), id("a"))], taken: true };
    assert_eq!(enroller.handle(gone.clone(), 30), []);
    assert_eq!(enroller.ended().count(), 0);

    // Its answer is lost: removed when it can be waited for no longer, and once more later.
    enroller.handle(Event::Want(enrolment("a", "t")), 1_000);
    enroller.handle(Event::Unwant(id("a")), 1_010);
    assert_eq!(enroller.handle(Event::Tick, 999 + ANSWER_WITHIN_MS), []);
    assert_eq!(removed(&enroller.handle(Event::Tick, 1_000 + ANSWER_WITHIN_MS)), [vec!["a"]]);
    assert_eq!(enroller.handle(gone.clone(), 7_000), []);
    assert_eq!(enroller.handle(Event::Tick, 6_999 + RETRY_MAX_MS), []);
    assert_eq!(removed(&enroller.handle(Event::Tick, 7_000 + RETRY_MAX_MS)), [vec!["a"]]);
    assert_eq!(enroller.handle(gone, 7_001 + RETRY_MAX_MS), []);
    assert_eq!(enroller.ended().count(), 0);
}

#[test]
fn a_registration_that_arrives_after_the_host_has_left_is_taken_back() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    assert_eq!(enroller.handle(Event::Leave, 1), []);
    assert_eq!(enroller.handle(registered(0, &[("a", 1)]), 2), [Effect::Request(HostRequest::Leave { boot: 7 })]);
    assert_eq!(enroller.handle(refused(0, true), 3), [], "nothing was written");
}

/// Each repetition was another request, and the answer to the one before was thrown away: with thousands of hosts at once controllers
/// were busy answering what nobody listened to any more.
#[test]
fn a_repetition_is_the_same_registration_and_any_answer_to_it_counts() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Want(enrolment("b", "t")), 0);
    let first = enroller.handle(Event::Connected(true), 0);
    assert_eq!(numbers(&first), [0]);
    let again = enroller.handle(Event::Tick, ANSWER_WITHIN_MS);
    assert_eq!(again, first, "word by word, under the same number");
    assert_eq!(enroller.handle(Event::Tick, 3 * ANSWER_WITHIN_MS - 1), [], "and waited for twice as long");
    assert_eq!(enroller.handle(Event::Tick, 3 * ANSWER_WITHIN_MS), first);
    assert_eq!(enroller.handle(registered(0, &[("a", 1), ("b", 1)]), 3 * ANSWER_WITHIN_MS + 1), [], "the first one's, perhaps");
    assert!(enroller.standings().iter().all(|standing| standing.incarnation == Some(1)));
    assert_eq!(enroller.handle(refused(0, true), 3 * ANSWER_WITHIN_MS + 2), [], "and a second one's says nothing");
    assert!(enroller.standings().iter().all(|standing| standing.state == "registered" && standing.why.is_none()));
    // A repetition may still be with another controller: what ends now is removed a second time.
    assert_eq!(removed(&enroller.handle(Event::Unwant(id("a")), 20_000)), [vec!["a"]]);
    let gone = Event::Removed { workloads: vec![("n".parse().unwrap(), id("a"))], taken: true };
    assert_eq!(enroller.handle(gone.clone(), 20_001), []);
    assert_eq!(removed(&enroller.handle(Event::Tick, 20_001 + RETRY_MAX_MS)), [vec!["a"]]);
    enroller.handle(gone, 60_000);
    assert_eq!(enroller.ended().count(), 0);
}

#[test]
fn what_is_wanted_otherwise_is_another_registration() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Want(enrolment("b", "t")), 0);
    assert_eq!(numbers(&enroller.handle(Event::Connected(true), 0)), [0]);
    let mut other = enrolment("a", "t");
    other.asked.addresses = [groupcast_policy::net::Prefix::v4(0x0a00_0009, 32).unwrap()].into();
    let sent = enroller.handle(Event::Want(other), 1);
    assert_eq!((numbers(&sent), names(&sent)), (vec![1], vec![vec!["a".to_owned()]]));
    enroller.handle(registered(0, &[("a", 1), ("b", 1)]), 2);
    assert_eq!(enroller.standings()[0].incarnation, None, "that was about the address it had before");
    assert_eq!(enroller.standings()[1].incarnation, Some(1));
    enroller.handle(registered(1, &[("a", 1)]), 3);
    assert_eq!(enroller.standings()[0].incarnation, Some(1));
    // Who is forgotten asks anew: an answer from before that says nothing.
    assert_eq!(numbers(&enroller.handle(Event::Forgotten, 4)), [2]);

    // One of two that were asked for together has ended: without it, it is another.
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Want(enrolment("b", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    enroller.handle(Event::Unwant(id("b")), 1);
    let sent = enroller.handle(Event::Tick, ANSWER_WITHIN_MS);
    assert_eq!((numbers(&sent), names(&sent), removed(&sent)), (vec![1], vec![vec!["a".to_owned()]], vec![vec!["b".to_owned()]]));
}

fn on_network(id: &str, network: &str) -> Enrolment {
    let mut enrolment = enrolment(id, "t");
    enrolment.asked.network = network.parse().unwrap();
    enrolment
}

/// The old network's entry stayed, with its addresses, for as long as the host lived.
#[test]
fn what_moves_to_another_network_is_removed_from_the_old_one_first() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(on_network("a", "n")), 0);
    enroller.handle(Event::Connected(true), 0);
    enroller.handle(registered(0, &[("a", 1)]), 1);
    let sent = enroller.handle(Event::Want(on_network("a", "m")), 2);
    let old: Vec<(NetworkId, WorkloadId)> = vec![("n".parse().unwrap(), id("a"))];
    assert_eq!(sent, [Effect::Request(HostRequest::Remove { boot: 7, workloads: old.clone() })], "and nothing else yet");
    assert_eq!(enroller.standings()[0].state, "waiting");
    let retried = enroller.handle(Event::Removed { workloads: old.clone(), taken: false }, 3);
    assert_eq!(retried, [], "not taken: neither of the two");
    assert_eq!(removed(&enroller.handle(Event::Tick, 3 + 4 * RETRY_FIRST_MS)), [vec!["a"]]);
    let sent = enroller.handle(Event::Removed { workloads: old, taken: true }, 2_000);
    let [Effect::Register { register, .. }] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(register.workloads[0].network.as_str(), "m");
    assert_eq!(enroller.ended().count(), 0);
}

/// Nobody knows whether the registration on the old network is still on its way: it is removed twice, and the second removal holds up nobody.
#[test]
fn what_moves_while_it_is_registered_is_removed_twice_and_waits_once() {
    let mut enroller = Enroller::new(7, []);
    enroller.handle(Event::Want(on_network("a", "n")), 0);
    enroller.handle(Event::Connected(true), 0);
    assert_eq!(enroller.handle(Event::Want(on_network("a", "m")), 1), [], "its registration is on its way");
    assert_eq!(removed(&enroller.handle(Event::Tick, ANSWER_WITHIN_MS)), [vec!["a"]]);
    let old = || vec![("n".parse().unwrap(), id("a"))];
    let sent = enroller.handle(Event::Removed { workloads: old(), taken: true }, 6_000);
    assert_eq!(names(&sent), [vec!["a"]]);
    enroller.handle(registered(1, &[("a", 1)]), 6_001);
    assert_eq!(removed(&enroller.handle(Event::Tick, 6_000 + RETRY_MAX_MS)), [vec!["a"]]);
    enroller.handle(Event::Removed { workloads: old(), taken: true }, 40_000);
    assert_eq!((enroller.ended().count(), enroller.standings()[0].incarnation), (0, Some(1)));
}

/// Its address stayed a member of groups while somebody else could have it.
#[test]
fn who_has_no_interface_any_more_is_removed_and_registered_when_it_is_back() {
    let mut enroller = Enroller::new(7, []);
    let absent = |ids: &[&str]| Event::Absent(ids.iter().map(|text| id(text)).collect());
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    enroller.handle(Event::Want(enrolment("b", "t")), 0);
    enroller.handle(Event::Connected(true), 0);
    enroller.handle(registered(0, &[("a", 1), ("b", 1)]), 1);
    // Made anew at once: nothing happens.
    assert_eq!(enroller.handle(absent(&["a"]), 10), []);
    assert_eq!(enroller.handle(Event::Tick, 9 + ABSENT_MS), []);
    assert_eq!(enroller.handle(absent(&[]), 9 + ABSENT_MS), []);
    assert_eq!(enroller.handle(Event::Tick, 20 + 2 * ABSENT_MS), []);
    // Gone.
    assert_eq!(enroller.handle(absent(&["a"]), 10_000), []);
    assert_eq!(removed(&enroller.handle(Event::Tick, 10_000 + ABSENT_MS)), [vec!["a"]]);
    let gone = Event::Removed { workloads: vec![("n".parse().unwrap(), id("a"))], taken: true };
    assert_eq!(enroller.handle(gone, 12_001), []);
    assert_eq!((enroller.standings()[0].state.as_str(), enroller.standings()[1].state.as_str()), ("absent", "registered"));
    assert_eq!(enroller.handle(Event::Tick, 20_000), [], "once is enough");
    assert_eq!(names(&enroller.handle(Event::Forgotten, 20_001)), [vec!["b"]], "the other one alone");
    enroller.handle(registered(1, &[("b", 2)]), 20_002);
    assert_eq!(names(&enroller.handle(absent(&[]), 30_000)), [vec!["a"]]);

    // An earlier run may have registered it; this one does not, and removes it.
    let mut enroller = Enroller::new(7, []);
    enroller.handle(absent(&["a"]), 0);
    enroller.handle(Event::Want(enrolment("a", "t")), 0);
    assert_eq!(enroller.handle(Event::Connected(true), 1), []);
    assert_eq!(removed(&enroller.handle(Event::Tick, ABSENT_MS)), [vec!["a"]]);
    // Back before that was taken: it waits for it.
    assert_eq!(enroller.handle(absent(&[]), ABSENT_MS + 1), []);
    let gone = Event::Removed { workloads: vec![("n".parse().unwrap(), id("a"))], taken: false };
    assert_eq!(names(&enroller.handle(gone, ABSENT_MS + 2)), [vec!["a"]]);
}
