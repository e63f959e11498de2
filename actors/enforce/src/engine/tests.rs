use super::*;
use crate::kernel::{Fate, ModelKernel, Packet};
use crate::settings::Attachment;
use crate::trial::{self, Dice, Probe, Stage, WORKLOADS};

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

fn engine() -> Engine {
    Engine::new(trial::host(), settings(), trial::attachments(), Stamp::new(7).unwrap())
}

/// What increments made of the index.
fn index(engine: &Engine) -> Option<Box<Index>> {
    engine.index.borrow().clone()
}

fn counts() -> u64 {
    if std::env::var_os("GROUPCAST_FULL").is_some() { 3_000 } else { 150 }
}

fn packet(probe: &Probe) -> Packet {
    let end = |place: u8| if place == WORKLOADS { trial::outside() } else { trial::interface(place) };
    Packet::first(end(probe.from), end(probe.to), probe.source(), probe.destination(), probe.payload)
}

/// Through random changes: what the increments made is what one makes from nothing; and every flow that is open when a change comes is
/// afterwards as the new policy says.
#[test]
fn increments_equal_the_whole_and_open_flows_follow_the_policy() {
    let (mut fast, mut bumps, mut steps) = (0, 0, 0);
    for seed in 0..counts() {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::default();
        let mut engine = engine();
        let plan = engine.compare(&stage);
        engine.committed(plan);
        let mut kernel = ModelKernel::new(engine.actual().clone());
        let mut open: Vec<Probe> = Vec::new();
        for step in 0..30 {
            let event = |dice: &mut Dice| if dice.percent(50) { stage.nudge(dice) } else { trial::event(dice) };
            let events: Vec<_> = (0..1 + dice.below(2)).map(|_| event(&mut dice)).collect();
            let edits = stage.change(&events);
            let plan = engine.change(&edits, &stage);
            fast += usize::from(!plan.whole);
            bumps += usize::from(plan.stamp != engine.stamp());
            steps += 1;
            kernel.table.apply(&plan.transaction).unwrap();
            engine.committed(plan);
            assert_eq!(kernel.table.differences(engine.actual()), [""; 0]);
            let scratch = build(&trial::host(), &stage, &trial::attachments(), &settings(), engine.stamp());
            let differences = engine.actual().differences(&scratch.to_table());
            assert_eq!(differences, [""; 0], "seed {seed}, step {step}: {edits:#?}");
            assert!(index(&engine) == engine.fresh_index(&stage), "seed {seed}, step {step}: {edits:#?}");

            let words = |probe: &Probe| format!("seed {seed}, step {step}: {probe:?} after {events:#?}\n{:#?}", stage.describe());
            open.retain(|probe| {
                let fate = kernel.send(&packet(probe).later());
                let expected = if stage.allows(probe) { Fate::Passed } else { Fate::Dropped };
                assert_eq!(fate, expected, "an open flow, {}", words(probe));
                let fate = kernel.send(&packet(probe).answer());
                let expected = if stage.allows_answer(probe) { Fate::Passed } else { Fate::Dropped };
                assert_eq!(fate, expected, "its answer, {}", words(probe));
                true
            });
            for _ in 0..5 {
                let probe = Probe::roll(&mut dice);
                let first = packet(&probe);
                if kernel.send(&first) == Fate::Passed && kernel.send(&first.answer()) == Fate::Passed {
                    open.push(probe);
                }
            }
        }
    }
    // No change of documents reaches further than what it touches, and some need no new stamp.
    assert!(fast == steps && bumps > 0 && bumps < steps, "{fast} fast, {bumps} bumps of {steps}");
}

/// Topics that are not synced, beside a stage that knows everything.
struct Partly {
    stage: Stage,
    hidden: BTreeSet<Topic>,
}

impl Documents for Partly {
    fn document(&self, topic: &Topic) -> Option<&groupcast_policy::doc::Document> {
        if self.hidden.contains(topic) { None } else { self.stage.document(topic) }
    }
}

fn topic(dice: &mut Dice) -> Topic {
    let group = trial::group_id(dice.below(usize::from(trial::GROUPS)) as u8);
    match dice.below(8) {
        0 => Topic::Host(trial::host()),
        1 => Topic::Scope(groupcast_policy::topic::Scope::Global),
        2 => Topic::Scope(groupcast_policy::topic::Scope::Space("s0".parse().unwrap())),
        3 | 4 => Topic::Rules(group),
        _ => Topic::Members(group),
    }
}

/// Addresses that others have too, and ranges.
fn unsettled(dice: &mut Dice) -> groupcast_policy::model::Event {
    let mut workload = trial::workload(dice);
    for _ in 0..dice.below(3) {
        let other = trial::address(dice.below(usize::from(WORKLOADS)) as u8, trial::family(dice));
        let prefix = groupcast_policy::net::Prefix::host(other);
        let wider = match prefix.net().addr() {
            std::net::IpAddr::V4(a) => groupcast_policy::net::Prefix::v4(a.to_bits(), 28),
            std::net::IpAddr::V6(a) => groupcast_policy::net::Prefix::v6(a.to_bits(), 120),
        };
        workload.addresses.insert(if dice.percent(50) { prefix } else { wider.unwrap_or(prefix) });
    }
    groupcast_policy::model::Event::workload(workload)
}

fn attachment(dice: &mut Dice, place: u8) -> Option<Attached> {
    let mut attached = trial::attachments().remove(&trial::workload_id(place))?;
    attached.audit = dice.percent(20);
    match dice.below(8) {
        0 | 1 => return None,
        2 => attached.attachment = Attachment::Interface(trial::interface(dice.below(usize::from(WORKLOADS)) as u8)),
        3 => attached.attachment = Attachment::Interface(trial::outside()),
        4 if dice.percent(30) => attached.attachment = Attachment::Host,
        _ => {}
    }
    Some(attached)
}

/// As above, with documents that are not synced, come, go and are replaced; workloads attached, detached, refused; several edits of one
/// topic in one step; and steps that were never taken.
#[test]
fn whatever_changes_the_step_equals_the_whole() {
    let (mut fast, mut steps, mut refused) = (0, 0, 0);
    for seed in 0..counts() * 2 {
        let mut dice = Dice::new(seed ^ 0x5a5a_0000);
        let mut partly = Partly { stage: Stage::default(), hidden: BTreeSet::new() };
        let mut engine = engine();
        let plan = engine.compare(&partly);
        engine.committed(plan);
        for step in 0..40 {
            let mut edits = Vec::new();
            let mut attached = None;
            match dice.below(10) {
                0 | 1 => {
                    let topic = topic(&mut dice);
                    if !partly.hidden.remove(&topic) {
                        partly.hidden.insert(topic.clone());
                    }
                    edits.push((topic, None));
                }
                2 | 3 => {
                    let place = dice.below(usize::from(WORKLOADS)) as u8;
                    attached = Some((trial::workload_id(place), attachment(&mut dice, place)));
                }
                4 => edits = partly.stage.change(&[unsettled(&mut dice)]),
                _ => {
                    for _ in 0..1 + dice.below(3) {
                        let event = if dice.percent(50) { partly.stage.nudge(&mut dice) } else { trial::event(&mut dice) };
                        edits.extend(partly.stage.change(&[event]));
                    }
                    if dice.percent(10) {
                        edits.iter_mut().for_each(|(_, edit)| *edit = None);
                    }
                }
            }
            let plan = match attached {
                Some((workload, attached)) => engine.attach(&workload, attached, &partly),
                None => engine.change(&edits, &partly),
            };
            steps += 1;
            fast += usize::from(!plan.whole);
            if dice.percent(5) {
                // Forgotten: neither taken nor refused.
                continue;
            }
            engine.committed(plan);
            let scratch = build(&trial::host(), &partly, engine.attachments(), &settings(), engine.stamp());
            let differences = engine.actual().differences(&scratch.to_table());
            let words = || format!("seed {seed}, step {step}: {edits:#?}");
            assert_eq!(differences, [""; 0], "{}", words());
            assert_eq!(engine.refused(), scratch.refused, "{}", words());
            assert!(index(&engine) == engine.fresh_index(&partly), "the index, {}", words());
            refused += scratch.refused.len();
        }
    }
    assert!(fast * 10 > steps * 7 && refused > 100, "{fast} fast of {steps}, {refused} refused");
}

#[test]
fn after_a_refused_transaction_everything_is_compared() {
    for seed in 0..counts() / 3 {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::default();
        let mut engine = engine();
        for _ in 0..20 {
            let edits = stage.change(&[trial::event(&mut dice)]);
            let before = engine.actual().clone();
            let plan = engine.change(&edits, &stage);
            if dice.percent(40) {
                engine.failed();
                assert_eq!(engine.actual().differences(&before), [""; 0]);
            } else {
                engine.committed(plan);
                let scratch = build(&trial::host(), &stage, &trial::attachments(), &settings(), engine.stamp());
                assert_eq!(engine.actual().differences(&scratch.to_table()), [""; 0], "seed {seed}");
            }
        }
    }
}

#[test]
fn nothing_changed_is_nothing_to_do() {
    let mut dice = Dice::new(1);
    let mut stage = Stage::default();
    let mut engine = engine();
    for _ in 0..20 {
        stage.change(&[trial::event(&mut dice)]);
    }
    let plan = engine.compare(&stage);
    engine.committed(plan);
    let plan = engine.compare(&stage);
    assert!(plan.transaction.is_empty(), "{:?}", plan.transaction);
    assert_eq!(plan.stamp, engine.stamp());
}

/// Sets of addresses were named by 64 bits of a hash that anybody can compute contents for: a group's rule looked into another group's
/// addresses.
#[test]
fn contents_that_shared_a_name_have_sets_of_their_own() {
    use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target};
    // Where the first half of a block is what the old hash mixes it with, the second half changed nothing.
    let [one, other] = [0x1, 0x2].map(|host: u128| 0xbefe_6c39_23a4_4bbe << 64 | host);
    let end = 0xbefe_6c39_23a4_4bbe_ffff << 48;
    let more = [0xc001, 0xc003, 0xc005, 0xc007].map(|top: u128| top << 112);
    let old_hash = |first: u128| {
        let ends = [first, end].into_iter().chain(more.into_iter().flat_map(|address| [address, address]));
        xxhash_rust::xxh3::xxh3_64_with_seed(&ends.flat_map(u128::to_be_bytes).collect::<Vec<u8>>(), 6)
    };
    assert_eq!(old_hash(one), old_hash(other));

    let text = |address: u128| std::net::Ipv6Addr::from_bits(address).to_string();
    let group = |number: u8, first: u128| {
        let remotes = std::iter::once(format!("{}-{}", text(first), text(end))).chain(more.map(text));
        let line = format!("egress udp 5001 to {}", remotes.collect::<Vec<_>>().join(","));
        let rules = vec![GroupRule::from(groupcast_policy::text::parse_rule(&line).unwrap())];
        let bindings = vec![Binding { target: Target::Global, phases: groupcast_policy::doc::Phases::BOTH }];
        Event::group(Group { rules, bindings, ..Group::new(trial::group_id(number)) })
    };
    let workload = groupcast_policy::model::Workload::new(trial::workload_id(0), trial::host(), "n0".parse().unwrap());
    let mut stage = Stage::default();
    let mut engine = engine();
    for event in [Event::workload(workload), group(0, one), group(1, other)] {
        let edits = stage.change(&[event]);
        let plan = engine.change(&edits, &stage);
        engine.committed(plan);
    }
    let begins = engine.actual().sets.values().filter_map(|set| match &set.elements {
        Elements::Spans6(spans) => spans.iter().map(|span| span.first()).find(|first| [one, other].contains(first)),
        _ => None,
    });
    assert_eq!(begins.collect::<BTreeSet<u128>>(), [one, other].into());
}
