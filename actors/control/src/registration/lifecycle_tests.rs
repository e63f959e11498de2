use std::time::Duration;

use proptest::prelude::*;

use super::*;

const LEASE: u64 = 1_000;
const GRACE: u64 = 500;

fn settings() -> Settings {
    Settings {
        lease: Duration::from_millis(LEASE),
        grace: Duration::from_millis(GRACE),
        sweep: Duration::from_millis(100),
        guard_window: Duration::from_millis(3_000),
        guard_percent: 5,
        guard_hosts: 2,
        deletions_per_second: 1_000,
    }
}

fn host(number: usize) -> HostId {
    format!("h{number}").parse().unwrap()
}

fn enrolled(suspect: bool) -> Option<Enrolled> {
    Some(Enrolled { boot: "b1".into(), templates: vec!["t".into()], suspect })
}

/// A leader with so many hosts, and a REGISTRY that does what it orders at once.
struct Stage {
    lifecycle: Lifecycle,
    now: u64,
    sequence: u64,
    effects: Vec<Effect>,
    silent: BTreeSet<HostId>,
    hosts: BTreeSet<HostId>,
}

impl Stage {
    fn new(hosts: usize) -> Self {
        let mut stage = Self {
            lifecycle: Lifecycle::new(settings()),
            now: 10_000,
            sequence: 0,
            effects: Vec::new(),
            silent: BTreeSet::new(),
            hosts: (0..hosts).map(host).collect(),
        };
        for number in 0..hosts {
            stage.entry(number, enrolled(false));
        }
        for event in [Event::Loaded, Event::Connected(true), Event::Leading(true), Event::Tick] {
            stage.handle(event);
        }
        stage
    }

    fn entry(&mut self, number: usize, enrolled: Option<Enrolled>) {
        self.sequence += 1;
        self.handle(Event::Entry { host: host(number), sequence: self.sequence, enrolled });
    }

    fn handle(&mut self, event: Event) {
        let effects = self.lifecycle.handle(event, self.now);
        for effect in effects {
            self.effects.push(effect.clone());
            let (host, enrolled) = match &effect {
                Effect::Suspect { host, .. } => (host.clone(), enrolled(true)),
                Effect::Live { host, .. } => (host.clone(), enrolled(false)),
                Effect::Delete { host, .. } => (host.clone(), None),
                Effect::Tell { .. } | Effect::Guard { .. } => continue,
            };
            self.sequence += 1;
            let deleted = enrolled.is_none();
            if deleted {
                self.hosts.remove(&host);
            }
            self.handle(Event::Entry { host: host.clone(), sequence: self.sequence, enrolled });
            self.handle(Event::Done { host, deleted });
        }
    }

    /// Lets time pass; hosts that are not silent beat every 200 ms.
    fn pass(&mut self, ms: u64) {
        for _ in 0..ms / 100 {
            self.now += 100;
            if self.now.is_multiple_of(200) {
                for host in self.hosts.clone() {
                    if !self.silent.contains(&host) {
                        self.handle(Event::Beat { host, boot: "b1".into(), answer: Some("t".into()) });
                    }
                }
            }
            self.handle(Event::Tick);
        }
    }

    fn silence(&mut self, numbers: std::ops::Range<usize>) {
        self.silent.extend(numbers.map(host));
    }

    fn took(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    fn deleted(&self) -> usize {
        self.effects.iter().filter(|effect| matches!(effect, Effect::Delete { .. })).count()
    }
}

#[test]
fn silent_for_a_lease_is_suspect_and_for_the_grace_deleted() {
    let mut stage = Stage::new(10);
    stage.pass(5_000);
    assert_eq!(stage.took(), [], "nothing happens to those who speak");
    stage.silence(0..1);
    stage.pass(900);
    assert_eq!(stage.took(), []);
    stage.pass(300);
    assert!(matches!(&stage.took()[..], [Effect::Suspect { host, .. }] if *host == super::tests::host(0)));
    stage.pass(GRACE + 100);
    let deleted = stage.took();
    assert!(
        matches!(&deleted[..], [Effect::Delete { confirmed: false, silent_ms, .. }] if *silent_ms >= LEASE + GRACE),
        "{deleted:?}"
    );
    stage.pass(5_000);
    assert_eq!(stage.took(), []);
}

#[test]
fn who_returns_within_the_grace_is_as_before() {
    let mut stage = Stage::new(10);
    stage.silence(0..1);
    stage.pass(LEASE + 200);
    assert!(matches!(&stage.took()[..], [Effect::Suspect { .. }]));
    stage.silent.clear();
    stage.pass(200);
    assert!(matches!(&stage.took()[..], [Effect::Live { .. }]));
    stage.pass(5_000);
    assert_eq!(stage.took(), []);
}

#[test]
fn silence_counts_anew_after_a_takeover_a_disconnect_an_election_and_a_stall() {
    let restarts: [&[Event]; 5] = [
        &[Event::Leading(false), Event::Leading(true)],
        &[Event::Connected(false), Event::Connected(true)],
        &[Event::Deaf(Deaf::Election)],
        &[Event::Deaf(Deaf::Lost)],
        &[],
    ];
    for restart in restarts {
        let mut stage = Stage::new(10);
        stage.silence(0..1);
        stage.pass(LEASE + GRACE - 200);
        assert!(matches!(&stage.took()[..], [Effect::Suspect { .. }]));
        restart.iter().for_each(|event| stage.handle(event.clone()));
        if restart.is_empty() {
            // The process stood still for a minute.
            stage.now += 60_000;
            stage.handle(Event::Tick);
        }
        stage.pass(LEASE + GRACE - 100);
        assert_eq!(stage.took(), [], "{restart:?}");
        stage.pass(200);
        assert_eq!(stage.deleted(), 1, "{restart:?}");
    }
}

#[test]
fn without_the_lead_the_bus_or_the_whole_registry_nothing_is_done() {
    for event in [Event::Leading(false), Event::Connected(false)] {
        let mut stage = Stage::new(10);
        stage.silence(0..1);
        stage.handle(event);
        stage.pass(60_000);
        assert_eq!(stage.took(), []);
    }
    let mut fresh = Lifecycle::new(settings());
    fresh.handle(Event::Connected(true), 0);
    fresh.handle(Event::Leading(true), 0);
    let beat = Event::Beat { host: host(1), boot: "b".into(), answer: Some("t".into()) };
    assert_eq!(fresh.handle(beat.clone(), 1), [], "who has not read everything tells nobody that he is unknown");
    fresh.handle(Event::Loaded, 2);
    assert_eq!(fresh.handle(beat, 3), [Effect::Tell { host: host(1), answer: "t".into() }]);
}

#[test]
fn a_beat_of_another_boot_is_told_to_enrol() {
    let mut stage = Stage::new(1);
    stage.handle(Event::Beat { host: host(0), boot: "b2".into(), answer: Some("x".into()) });
    assert_eq!(stage.took(), [Effect::Tell { host: host(0), answer: "x".into() }]);
}

#[test]
fn too_many_at_once_freeze_and_thaw_when_they_return() {
    let mut stage = Stage::new(10);
    stage.silence(0..5);
    stage.pass(20_000);
    let effects = stage.took();
    assert!(
        matches!(&effects[..], [Effect::Guard { record: Some(GuardRecord { missing: 5, hosts: 10, .. }), .. }]),
        "{effects:?}"
    );
    assert_eq!(stage.lifecycle.frozen().count(), 1);
    // Three return: the guard is content, and the two others have a grace of their own before they go.
    (0..3).for_each(|number| _ = stage.silent.remove(&host(number)));
    stage.pass(400);
    assert!(matches!(&stage.took()[..], [Effect::Guard { record: None, .. }, Effect::Suspect { .. }, Effect::Suspect { .. }]));
    stage.pass(GRACE - 300);
    assert_eq!(stage.took(), []);
    stage.pass(400);
    assert_eq!(stage.deleted(), 2);
}

#[test]
fn an_operator_confirms_those_who_are_silent_and_nobody_else() {
    let mut stage = Stage::new(10);
    stage.silence(0..5);
    stage.pass(5_000);
    stage.took();
    stage.handle(Event::Confirm { template: "t".parse().unwrap() });
    stage.silence(5..6);
    stage.pass(2_000);
    assert_eq!(stage.deleted(), 6, "one more is not too many: {:?}", stage.effects);
    assert!(stage.effects.iter().filter(|effect| matches!(effect, Effect::Delete { confirmed: true, .. })).count() == 5);
    let mut other = Stage::new(10);
    other.silence(0..5);
    other.pass(5_000);
    other.took();
    other.handle(Event::Confirm { template: "another".parse().unwrap() });
    other.pass(5_000);
    assert_eq!(other.took(), []);
}

fn guards(effects: &[Effect]) -> Vec<Option<GuardRecord>> {
    let of = |effect: &Effect| match effect {
        Effect::Guard { record, .. } => Some(record.clone()),
        _ => None,
    };
    effects.iter().filter_map(of).collect()
}

/// Another controller that has read what REGISTRY says, and leads from now on.
fn takes_over(stage: &Stage, record: Option<GuardRecord>) -> Stage {
    let mut next = Stage { lifecycle: Lifecycle::new(settings()), effects: Vec::new(), ..Stage::new(0) };
    (next.now, next.hosts, next.silent) = (stage.now, stage.hosts.clone(), stage.silent.clone());
    next.sequence = stage.sequence;
    // The record may come before the entries or after them.
    let template: TemplateId = "t".parse().unwrap();
    next.handle(Event::Guard { template, record });
    for (host, held) in &stage.lifecycle.hosts {
        next.handle(Event::Entry { host: host.clone(), sequence: held.sequence, enrolled: enrolled(held.suspect) });
    }
    for event in [Event::Loaded, Event::Connected(true), Event::Leading(true), Event::Tick] {
        next.handle(event);
    }
    next
}

#[test]
fn what_an_operator_confirmed_holds_for_whoever_leads_next() {
    let mut stage = Stage::new(10);
    stage.silence(0..6);
    stage.pass(5_000);
    stage.took();
    let effects = stage.lifecycle.handle(Event::Confirm { template: "t".parse().unwrap() }, stage.now);
    let [Some(record)] = &guards(&effects)[..] else { panic!("written at once: {effects:?}") };
    assert_eq!(record.confirmed, ["h0", "h1", "h2", "h3", "h4", "h5"]);
    let mut next = takes_over(&stage, Some(record.clone()));
    next.pass(LEASE + GRACE - 100);
    assert_eq!(next.deleted(), 0, "it counts anew all the same");
    next.pass(400);
    assert_eq!(next.deleted(), 6, "{:?}", next.effects);
    next.pass(200);
    assert_eq!(guards(&next.took()).last(), Some(&None), "nothing is left on record");
    // Without that word it freezes.
    let mut ignorant = takes_over(&stage, None);
    ignorant.pass(10_000);
    assert_eq!((ignorant.deleted(), ignorant.lifecycle.frozen().count()), (0, 1));
}

#[test]
fn who_returns_is_not_confirmed_any_more_and_the_record_says_so() {
    let mut stage = Stage::new(10);
    stage.lifecycle.settings.deletions_per_second = 1;
    stage.silence(0..6);
    stage.pass(1_200);
    stage.handle(Event::Confirm { template: "t".parse().unwrap() });
    stage.took();
    stage.silent.remove(&host(3));
    stage.pass(400);
    let guards = guards(&stage.took());
    let Some(Some(record)) = guards.last() else { panic!("{guards:?}") };
    assert!(record.confirmed.len() < 6 && !record.confirmed.contains(&"h3".to_owned()), "{record:?}");
    stage.silence(3..4);
    stage.pass(20_000);
    assert!(
        stage
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Delete { host: gone, confirmed: false, .. } if *gone == host(3)))
    );
}

#[test]
fn a_freeze_of_an_earlier_leader_is_not_thawed_by_who_has_just_begun_and_not_left_on_record() {
    let frozen = || Some(GuardRecord { template: "t".into(), missing: 5, hosts: 10, confirmed: Vec::new() });
    let stage = Stage::new(10);
    let mut next = takes_over(&stage, frozen());
    next.pass(LEASE - 100);
    assert_eq!(guards(&next.took()), [], "nobody can have been silent for a lease yet");
    next.pass(300);
    assert_eq!(guards(&next.took()), [None], "they are all there");
    // And one that still holds is not written again.
    let mut stage = Stage::new(10);
    stage.silence(0..5);
    let mut next = takes_over(&stage, frozen());
    next.pass(10_000);
    assert_eq!((guards(&next.took()), next.deleted()), (Vec::new(), 0));
}

#[test]
fn what_could_not_be_written_about_a_freeze_is_written_again() {
    let mut stage = Stage::new(10);
    stage.silence(0..5);
    stage.pass(1_200);
    assert_eq!(guards(&stage.took()).len(), 1);
    stage.handle(Event::NotGuarded { template: "t".parse().unwrap() });
    stage.pass(100);
    assert_eq!(guards(&stage.took()).len(), 1);
    stage.pass(1_000);
    assert_eq!(guards(&stage.took()), []);
}

#[test]
fn deletions_have_a_bounded_rate_and_writes_a_bounded_number() {
    let mut stage = Stage::new(1_000);
    stage.lifecycle.settings.deletions_per_second = 10;
    stage.silence(0..40);
    stage.pass(LEASE + GRACE + 200);
    let before = stage.deleted();
    stage.pass(1_000);
    let after = stage.deleted();
    assert!((8..=12).contains(&(after - before)), "{before} {after}");
    stage.pass(10_000);
    assert_eq!(stage.deleted(), 40);
    // Nothing is written while the answers to what was ordered are outstanding.
    let mut deaf = Lifecycle::new(Settings { guard_hosts: 1_000, guard_percent: 100, ..settings() });
    for number in 0..2 * WRITES_MAX + 1 {
        deaf.handle(Event::Entry { host: host(number), sequence: 1, enrolled: enrolled(number % 2 == 1) }, 0);
    }
    for event in [Event::Loaded, Event::Connected(true), Event::Leading(true)] {
        deaf.handle(event, 0);
    }
    deaf.frozen.clear();
    let mut ordered = Vec::new();
    for step in 1..40 {
        ordered.extend(deaf.tick(step * 100));
    }
    assert!(ordered.len() <= WRITES_MAX + 1, "{}", ordered.len());
}

proptest! {
    /// Whatever happened before, what it knows of hosts is what somebody would know who was told only the last entry of each and
    /// when each was last heard.
    #[test]
    fn what_is_known_follows_from_the_last_of_each(steps in prop::collection::vec((0..4usize, 0..5u8, 1..400u64), 1..80)) {
        let mut lifecycle = Lifecycle::new(settings());
        let mut last: BTreeMap<HostId, (Enrolled, u64)> = BTreeMap::new();
        let (mut now, mut sequence) = (0, 0);
        for (number, kind, ms) in steps {
            now += ms;
            sequence += 1;
            let id = host(number);
            match kind {
                0..=2 => {
                    let entry = [enrolled(false), enrolled(true), None][usize::from(kind)].clone();
                    match &entry {
                        Some(entry) => {
                            let heard = last.get(&id).filter(|_| entry.suspect).map_or(now, |(_, heard)| *heard);
                            last.insert(id.clone(), (entry.clone(), heard));
                        }
                        None => _ = last.remove(&id),
                    }
                    lifecycle.handle(Event::Entry { host: id, sequence, enrolled: entry }, now);
                }
                3 => {
                    if let Some((_, heard)) = last.get_mut(&id) {
                        *heard = now;
                    }
                    lifecycle.handle(Event::Beat { host: id, boot: "b1".into(), answer: None }, now);
                }
                _ => _ = lifecycle.handle(Event::Tick, now),
            }
            prop_assert_eq!(lifecycle.hosts(), last.len());
            for (id, (entry, heard)) in &last {
                let seen = lifecycle.seen(id, now).unwrap();
                prop_assert_eq!((seen.suspect, seen.silent_ms), (entry.suspect, now - heard));
            }
        }
    }
}
