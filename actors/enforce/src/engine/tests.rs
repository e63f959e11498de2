use super::*;
use crate::kernel::{Fate, ModelKernel, Packet};
use crate::trial::{self, Dice, Probe, Stage, WORKLOADS};

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

fn engine() -> Engine {
    Engine::new(trial::host(), settings(), trial::attachments(), Stamp::new(7).unwrap())
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
            fast += usize::from(matches!(plan.after, After::Part(_)));
            bumps += usize::from(plan.stamp != engine.stamp());
            steps += 1;
            kernel.table.apply(&plan.transaction).unwrap();
            engine.committed(plan);
            assert_eq!(kernel.table.differences(engine.actual()), [""; 0]);
            let policy = resolve(&trial::host(), &stage);
            let scratch = build(&policy, &trial::attachments(), &settings(), engine.stamp());
            let differences = engine.actual().differences(&scratch.to_table());
            assert_eq!(differences, [""; 0], "seed {seed}, step {step}: {edits:#?}");
            assert!(engine.index == Index::of(&settings(), scratch), "seed {seed}, step {step}: {edits:#?}");

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
    // All three kinds of step occur.
    assert!(fast * 20 > steps && bumps > 0 && bumps < steps, "{fast} fast, {bumps} bumps of {steps}");
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
                let policy = resolve(&trial::host(), &stage);
                let scratch = build(&policy, &trial::attachments(), &settings(), engine.stamp());
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
    engine.committed(engine.compare(&stage));
    let plan = engine.compare(&stage);
    assert!(plan.transaction.is_empty(), "{:?}", plan.transaction);
    assert_eq!(plan.stamp, engine.stamp());
}
