use super::*;
use std::sync::Arc;

use groupcast_policy::model::{Group, Owner};

const POLL_MS: u64 = 60_000;

fn machine() -> Machine {
    let (full_sync, hold) = (Duration::from_secs(600), Duration::from_millis(POLL_MS));
    let intervals = Intervals { poll: Duration::from_millis(POLL_MS), full_sync, hold };
    Machine::new("cf".parse().unwrap(), "cloud-controller", intervals, 3)
}

fn every(poll_ms: u64) -> Machine {
    let intervals =
        Intervals { poll: Duration::from_millis(poll_ms), full_sync: Duration::from_secs(600), hold: Duration::from_secs(60) };
    Machine::new("cf".parse().unwrap(), "cloud-controller", intervals, 3)
}

fn seen(ids: &[&str], marker: &str) -> Result<Polled, Failed> {
    let group = |id: &&str| {
        let mut group = Group::new(format!("cf-{id}").parse().unwrap());
        group.owner = Owner::Source("cf".parse().unwrap());
        (group.id.clone(), Arc::new(group))
    };
    let groups = ids.iter().map(group).collect();
    Ok(Polled::Observed(Box::new(Observation { groups, marker: Some(marker.to_owned()), ..Observation::default() })))
}

/// The run of what was begun.
fn run_of(effects: &[Effect]) -> u64 {
    let run = effects.iter().find_map(|effect| match effect {
        Effect::Load { run } | Effect::Poll { run, .. } | Effect::Write { run, .. } => Some(*run),
        _ => None,
    });
    run.unwrap_or_else(|| panic!("nothing was begun: {effects:?}"))
}

fn wake(effects: &[Effect]) -> u64 {
    effects.iter().find_map(|effect| if let Effect::WakeAt(at) = effect { Some(*at) } else { None }).expect("a deadline")
}

fn answers(effects: &[Effect]) -> Vec<(u64, Answer)> {
    let answer = |effect: &Effect| if let Effect::Answer { ask, answer } = effect { Some((*ask, answer.clone())) } else { None };
    effects.iter().filter_map(answer).collect()
}

/// Leads and has polled once, with these groups.
fn led(machine: &mut Machine, ids: &[&str]) -> Vec<Effect> {
    let load = machine.handle(Event::Leading(true), 0);
    let poll = machine.handle(Event::Loaded { run: run_of(&load), result: Ok(Box::default()) }, 0);
    assert!(matches!(poll[..], [Effect::Poll { full: true, marker: None, .. }]), "{poll:?}");
    let write = machine.handle(Event::Polled { run: run_of(&poll), result: seen(ids, "t1") }, 10);
    let Effect::Write { plan, .. } = &write[0] else { panic!("{write:?}") };
    let revisions = (1..).zip(&plan.difference.puts).map(|(at, (group, _))| (group.id.clone(), at)).collect();
    let written = Written { revisions, catalog: Some(ids.len() as u64), ..Written::default() };
    machine.handle(Event::Written { run: run_of(&write), result: Ok(written) }, 20)
}

#[test]
fn who_does_not_lead_does_nothing() {
    let mut machine = machine();
    assert_eq!(machine.handle(Event::Tick, 1_000_000), []);
    let asked = machine.handle(Event::PollNow { ask: 1, full: false }, 5);
    assert_eq!(answers(&asked), [(1, Answer::NotLeading)]);
}

#[test]
fn polls_follow_each_other_jittered_and_remember() {
    let mut machine = machine();
    let done = led(&mut machine, &["a", "b"]);
    let at = wake(&done);
    assert!((20 + POLL_MS * 9 / 10..=20 + POLL_MS * 11 / 10).contains(&at), "{at}");
    assert!(machine.handle(Event::Tick, at - 1).iter().all(|e| matches!(e, Effect::WakeAt(_))), "not yet");
    let poll = machine.handle(Event::Tick, at);
    assert!(matches!(&poll[..], [Effect::Poll { full: false, marker: Some(marker), .. }] if marker == "t1"), "{poll:?}");
    let done = machine.handle(Event::Polled { run: run_of(&poll), result: Ok(Polled::Unchanged) }, at + 5);
    assert!(wake(&done) > at);
    // The same again is nothing to write.
    let poll = machine.handle(Event::Tick, wake(&done));
    let same = machine.handle(Event::Polled { run: run_of(&poll), result: seen(&["a", "b"], "t2") }, at + 100);
    assert!(same.iter().all(|effect| matches!(effect, Effect::WakeAt(_))), "{same:?}");
    let status = machine.status(at + 100);
    assert_eq!((status.groups, status.polls, status.last_change), (2, 3, Some(2)));
}

#[test]
fn who_asks_during_a_poll_gets_the_next_one() {
    let mut machine = machine();
    let done = led(&mut machine, &["a"]);
    let poll = machine.handle(Event::Tick, wake(&done));
    assert_eq!(machine.handle(Event::PollNow { ask: 7, full: false }, wake(&done) + 1), [], "it began before the question");
    let next = machine.handle(Event::Polled { run: run_of(&poll), result: Ok(Polled::Unchanged) }, wake(&done) + 2);
    assert_eq!(answers(&next), []);
    let done = machine.handle(Event::Polled { run: run_of(&next), result: Ok(Polled::Unchanged) }, wake(&done) + 3);
    assert_eq!(answers(&done), [(7, Answer::Done { catalog: 1, registry: 0 })]);
}

#[test]
fn those_who_wait_are_bounded() {
    let mut machine = machine();
    let done = led(&mut machine, &["a"]);
    machine.handle(Event::Tick, wake(&done));
    for ask in 0..ASKS_MAX as u64 {
        assert_eq!(answers(&machine.handle(Event::PollNow { ask, full: false }, wake(&done))), []);
    }
    let refused = machine.handle(Event::PollNow { ask: 9_999, full: false }, wake(&done));
    assert!(matches!(&answers(&refused)[..], [(9_999, Answer::Failed(_))]));
}

#[test]
fn a_lost_lead_answers_everybody_and_forgets_what_comes_late() {
    let mut machine = machine();
    let done = led(&mut machine, &["a"]);
    let poll = machine.handle(Event::PollNow { ask: 1, full: true }, wake(&done));
    assert_eq!(answers(&machine.handle(Event::Leading(false), wake(&done))), [(1, Answer::NotLeading)]);
    assert_eq!(machine.handle(Event::Polled { run: run_of(&poll), result: seen(&[], "late") }, wake(&done)), []);
    let again = machine.handle(Event::Leading(true), wake(&done));
    assert!(matches!(again[..], [Effect::Load { .. }]), "what is owned is read anew: {again:?}");
}

#[test]
fn failures_back_off_and_keep_what_is_known() {
    for (poll_ms, wanted) in [(1_000, [1, 2, 4, 8, 16, 30, 30].map(|s| s * 1_000)), (POLL_MS, [POLL_MS; 7])] {
        let mut machine = every(poll_ms);
        let mut at = wake(&led(&mut machine, &["a"]));
        for wanted_ms in wanted {
            let poll = machine.handle(Event::Tick, at);
            let failed = machine.handle(Event::Polled { run: run_of(&poll), result: Err(Failed::new("no")) }, at);
            let waits = wake(&failed) - at;
            assert!((wanted_ms * 9 / 10..=wanted_ms * 11 / 10).contains(&waits), "{wanted_ms}: {waits}");
            at = wake(&failed);
        }
        assert_eq!((machine.status(at).failures, machine.status(at).groups), (7, 1));
        // Once it is well it is asked as often as ever.
        let poll = machine.handle(Event::Tick, at);
        let well = machine.handle(Event::Polled { run: run_of(&poll), result: Ok(Polled::Unchanged) }, at);
        assert!(wake(&well) - at <= poll_ms * 11 / 10);
    }
    let mut machine = machine();
    let at = wake(&led(&mut machine, &["a"]));
    let poll = machine.handle(Event::Tick, at);
    let asked = Failed { message: "busy".into(), retry_after: Some(Duration::from_secs(100_000)) };
    let failed = machine.handle(Event::Polled { run: run_of(&poll), result: Err(asked) }, at);
    assert!(wake(&failed) - at <= RETRY_AFTER_MAX.as_millis() as u64 * 11 / 10);
}

/// A host that asked for what is new had a failing source asked at once, however often, and whatever the source had asked for.
#[test]
fn what_hosts_ask_for_does_not_shorten_the_wait_of_a_source_that_fails() {
    let mut machine = machine();
    let at = wake(&led(&mut machine, &["a"]));
    let poll = machine.handle(Event::Tick, at);
    // One asks while the poll runs that will fail.
    assert_eq!(machine.handle(Event::PollNow { ask: 1, full: false }, at), []);
    let busy = Failed { message: "busy".into(), retry_after: Some(Duration::from_secs(100)) };
    let failed = machine.handle(Event::Polled { run: run_of(&poll), result: Err(busy) }, at);
    assert_eq!(answers(&failed), [(1, Answer::Failed("busy".into()))]);
    let until = wake(&failed);
    for now_ms in [at, at + 10, until - 1] {
        let told = machine.handle(Event::PollNow { ask: 2, full: false }, now_ms);
        assert!(!told.iter().any(|effect| matches!(effect, Effect::Poll { .. })), "{told:?}");
        let told = answers(&told);
        let [(2, Answer::Failed(words))] = &told[..] else { panic!("{told:?}") };
        assert!(words.contains("source cf fails and is asked again in") && words.contains("busy"), "{words}");
    }
    let polls = machine.status(until).polls;
    let poll = machine.handle(Event::PollNow { ask: 3, full: true }, until - 1);
    assert_eq!(machine.status(until).polls, polls + 1, "an operator's order is obeyed");
    let done = machine.handle(Event::Polled { run: run_of(&poll), result: Ok(Polled::Unchanged) }, until);
    assert_eq!(answers(&done).len(), 1);
    let poll = machine.handle(Event::PollNow { ask: 4, full: false }, until + 1);
    assert!(matches!(poll[..], [Effect::Poll { .. }]), "one that is well is asked at once: {poll:?}");
}

#[test]
fn a_conflict_reads_again_and_writes_the_same_a_bounded_number_of_times() {
    let mut machine = machine();
    let done = led(&mut machine, &["a"]);
    let poll = machine.handle(Event::PollNow { ask: 1, full: true }, wake(&done));
    let mut write = machine.handle(Event::Polled { run: run_of(&poll), result: seen(&["a", "b"], "t2") }, wake(&done));
    let conflict = || Err(NotWritten { message: "faster".into(), conflict: true });
    for _ in 0..CONFLICTS_MAX {
        let load = machine.handle(Event::Written { run: run_of(&write), result: conflict() }, wake(&done));
        assert!(matches!(load[..], [Effect::Load { .. }]));
        write = machine.handle(Event::Loaded { run: run_of(&load), result: Ok(Box::default()) }, wake(&done));
        assert!(matches!(&write[..], [Effect::Write { plan, .. }] if plan.difference.puts.len() == 2), "{write:?}");
    }
    let given_up = machine.handle(Event::Written { run: run_of(&write), result: conflict() }, wake(&done));
    assert!(matches!(&answers(&given_up)[..], [(1, Answer::Failed(_))]));
}

#[test]
fn a_full_sync_comes_when_it_is_due() {
    let mut machine = machine();
    let mut at = wake(&led(&mut machine, &["a"]));
    let mut full_at = Vec::new();
    while at < 1_300_000 {
        let poll = machine.handle(Event::Tick, at);
        let Effect::Poll { run, full, .. } = poll[0] else { panic!("{poll:?}") };
        if full {
            full_at.push(at);
        }
        let result = if full { seen(&["a"], "t1") } else { Ok(Polled::Unchanged) };
        at = wake(&machine.handle(Event::Polled { run, result }, at));
    }
    assert!(full_at.len() >= 2 && full_at[0] <= 600_000, "{full_at:?}");
    assert!(full_at.windows(2).all(|pair| (500_000..=600_000).contains(&(pair[1] - pair[0]))), "{full_at:?}");
}

/// Every observation put the next full sync off, also one of only what had moved.
#[test]
fn what_was_read_in_part_is_no_full_sync() {
    let mut machine = machine();
    let mut at = wake(&led(&mut machine, &["a"]));
    let mut full = 0;
    while at < 1_300_000 {
        let poll = machine.handle(Event::Tick, at);
        let Effect::Poll { run, full: whole, .. } = poll[0] else { panic!("{poll:?}") };
        full += u32::from(whole);
        let Ok(Polled::Observed(mut seen)) = seen(&["a"], "t1") else { panic!("seen") };
        seen.partial = !whole;
        at = wake(&machine.handle(Event::Polled { run, result: Ok(Polled::Observed(seen)) }, at));
    }
    assert!((2..=3).contains(&full), "{full} full syncs in 20 minutes, one is due every ten");
}

/// At a second's interval, a server whose every answer takes long, or that cannot say what is new, would be asked all the time.
#[test]
fn a_source_that_is_slow_or_costly_is_left_alone_for_longer() {
    let mut machine = every(1_000);
    let mut at = wake(&led(&mut machine, &["a"]));
    for (took_ms, costly, least_ms) in
        [(10, false, 1_000), (8_000, false, 8_000), (600_000, false, 60_000), (10, true, 60_000), (10, false, 1_000)]
    {
        let poll = machine.handle(Event::Tick, at);
        let Ok(Polled::Observed(mut seen)) = seen(&["a"], "t1") else { panic!("seen") };
        seen.costly = costly;
        let done = machine.handle(Event::Polled { run: run_of(&poll), result: Ok(Polled::Observed(seen)) }, at + took_ms);
        let waits = wake(&done) - (at + took_ms);
        assert!((least_ms * 9 / 10..=least_ms * 11 / 10).contains(&waits), "{took_ms} {costly}: {waits}");
        at = wake(&done);
    }
}

#[test]
fn before_something_is_deleted_it_is_read_again_whether_a_deny_names_it() {
    let mut machine = machine();
    let done = led(&mut machine, &["a", "b"]);
    let deny = |naming: &[&str]| {
        let mut owned = machine_owned(&["a", "b"]);
        let by = |id: &&str| {
            let naming = super::super::owned::Naming { group: "closed".parse().unwrap(), rule: 0 };
            (format!("cf-{id}").parse().unwrap(), naming)
        };
        owned.denied = naming.iter().map(by).collect();
        Ok(Box::new(owned))
    };
    let mut at = wake(&done);
    for (naming, deleted) in [(&["a"][..], None), (&[][..], Some("cf-a"))] {
        let poll = machine.handle(Event::PollNow { ask: 1, full: true }, at);
        let load = machine.handle(Event::Polled { run: run_of(&poll), result: seen(&["b"], "t2") }, at);
        assert!(matches!(load[..], [Effect::Load { .. }]), "a deny may have been written since: {load:?}");
        let next = machine.handle(Event::Loaded { run: run_of(&load), result: deny(naming) }, at);
        let status = machine.status(at);
        match deleted {
            None => {
                assert_eq!(
                    answers(&next),
                    [(1, Answer::Done { catalog: 0, registry: 0 })],
                    "it is withheld, and all else is done"
                );
                assert_eq!((status.groups, status.withheld), (2, 1));
                assert!(status.withheld_named[0].contains("cf-a is not deleted: deny rules[0] of group closed"), "{status:?}");
            }
            Some(id) => {
                let Effect::Write { plan, .. } = &next[0] else { panic!("{next:?}") };
                assert_eq!(plan.difference.deletes[0].0.as_str(), id);
                machine.handle(Event::Written { run: run_of(&next), result: Ok(Written::default()) }, at);
                assert_eq!((machine.status(at).groups, machine.status(at).withheld), (1, 0));
            }
        }
        at += POLL_MS;
    }
}

fn machine_owned(ids: &[&str]) -> Owned {
    let Ok(Polled::Observed(seen)) = seen(ids, "") else { panic!("seen") };
    let mut owned = Owned::default();
    (1..).zip(seen.groups).for_each(|(at, (id, group))| owned.take_group(&"cf".parse().unwrap(), &id, at, Some(group)));
    owned
}

#[test]
fn a_workload_that_somebody_else_keeps_from_its_place_is_named_and_tried_again() {
    use groupcast_policy::model::Workload;
    let mut machine = machine();
    let mut at = wake(&led(&mut machine, &["a"]));
    let with_port = || {
        let Ok(Polled::Observed(mut seen)) = seen(&["a"], "t1") else { panic!("seen") };
        let port = Workload::new("cf-p".parse().unwrap(), "h".parse().unwrap(), "n".parse().unwrap());
        seen.workloads.insert(port.id.clone(), Arc::new(port));
        Ok(Polled::Observed(seen))
    };
    for (withheld, workloads) in [(true, 0), (true, 0), (false, 1)] {
        let poll = machine.handle(Event::PollNow { ask: 1, full: true }, at);
        let write = machine.handle(Event::Polled { run: run_of(&poll), result: with_port() }, at);
        let mut written = Written::default();
        if withheld {
            written.withheld.insert("cf-p".parse().unwrap(), "workload cf-p is not placed: held".to_owned());
        }
        machine.handle(Event::Written { run: run_of(&write), result: Ok(written) }, at);
        let status = machine.status(at);
        assert_eq!((status.workloads, status.withheld), (workloads, usize::from(withheld)));
        at += POLL_MS;
    }
}

/// An item that could not be read was asked for again with the next change or full sync only, however soon it was mended.
#[test]
fn what_cannot_be_read_is_asked_for_again_less_and_less_often() {
    let mut machine = every(1_000);
    let mut at = wake(&led(&mut machine, &["a"]));
    let broken = |words: &str| {
        let Ok(Polled::Observed(mut seen)) = seen(&["a"], "t1") else { panic!("seen") };
        seen.problems.add(words);
        Ok(Polled::Observed(seen))
    };
    let all_is_well = |machine: &mut Machine, at: &mut u64, end: u64| {
        while *at < end {
            let poll = machine.handle(Event::Tick, *at);
            assert!(!poll.iter().any(|effect| matches!(effect, Effect::Poll { full: true, .. })), "nothing is wrong at {at}");
            *at = wake(&machine.handle(Event::Polled { run: run_of(&poll), result: Ok(Polled::Unchanged) }, *at));
        }
    };
    all_is_well(&mut machine, &mut at, 60_000);
    // From here on an item is broken, and the source says nothing of any change.
    let begun = at;
    let poll = machine.handle(Event::PollNow { ask: 1, full: true }, at);
    let seen_at = machine.handle(Event::Polled { run: run_of(&poll), result: broken("b is broken") }, at);
    at = wake(&seen_at);
    let mut asked = Vec::new();
    while at < begun + 3_000_000 {
        let poll = machine.handle(Event::Tick, at);
        let full = poll.iter().any(|effect| matches!(effect, Effect::Poll { full: true, .. }));
        let result = if full { broken("b is broken") } else { Ok(Polled::Unchanged) };
        asked.extend(full.then_some(at - begun));
        at = wake(&machine.handle(Event::Polled { run: run_of(&poll), result }, at));
    }
    let waits: Vec<u64> = std::iter::once(&0).chain(&asked).zip(&asked).map(|(from, to)| to - from).collect();
    assert!((5_000..8_000).contains(&waits[0]), "soon: {waits:?}");
    assert!(waits.windows(2).all(|pair| pair[1] + 5_000 > pair[0]), "less and less often: {waits:?}");
    assert!(waits.iter().all(|wait| *wait <= 602_000) && waits.iter().any(|wait| *wait > 500_000), "{waits:?}");
    assert!(asked.len() <= 15, "in 3,000 s: {asked:?}");
    // Another one that breaks is looked after from the beginning; one that is mended is not asked for any more.
    let now = at;
    let poll = machine.handle(Event::PollNow { ask: 2, full: true }, at);
    at = wake(&machine.handle(Event::Polled { run: run_of(&poll), result: broken("c is broken") }, at));
    let mut next = None;
    while next.is_none() {
        let poll = machine.handle(Event::Tick, at);
        let full = poll.iter().any(|effect| matches!(effect, Effect::Poll { full: true, .. }));
        let result = if full { seen(&["a"], "t1") } else { Ok(Polled::Unchanged) };
        next = full.then_some(at - now);
        at = wake(&machine.handle(Event::Polled { run: run_of(&poll), result }, at));
    }
    assert!(next < Some(8_000), "{next:?}");
    assert_eq!(machine.status(at).malformed, 0);
    let end = at + 500_000;
    all_is_well(&mut machine, &mut at, end);
}
