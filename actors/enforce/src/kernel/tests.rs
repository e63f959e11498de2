use super::*;
use crate::names;
use crate::ruleset::{build, stamp_chains};
use crate::settings::{Settings, Stamp};
use crate::table::{Base, Chain};
use crate::trial::{self, Dice, Probe, Stage, WORKLOADS};

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

fn packet(probe: &Probe) -> Packet {
    let end = |place: u8| if place == WORKLOADS { trial::outside() } else { trial::interface(place) };
    Packet::first(end(probe.from), end(probe.to), probe.source(), probe.destination(), probe.payload)
}

fn counts() -> u64 {
    if std::env::var_os("GROUPCAST_FULL").is_some() { 20_000 } else { 1_000 }
}

#[test]
fn the_table_decides_as_the_policy_says() {
    for seed in 0..counts() {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::default();
        for _ in 0..8 + dice.below(12) {
            let event = trial::event(&mut dice);
            stage.change(&[event]);
        }
        let desired = build(&trial::host(), &stage, &trial::attachments(), &settings(), Stamp::new(7).unwrap());
        assert_eq!(desired.refused, []);
        let mut kernel = ModelKernel::new(desired.to_table());
        for _ in 0..40 {
            let probe = Probe::roll(&mut dice);
            let first = packet(&probe);
            kernel.forget();
            let fate = kernel.send(&first);
            let expected = if stage.allows(&probe) { Fate::Passed } else { Fate::Dropped };
            assert_eq!(fate, expected, "seed {seed}: {probe:?}\n{:#?}", stage.describe());
            if fate == Fate::Dropped {
                continue;
            }
            let expected = if stage.allows_answer(&probe) { Fate::Passed } else { Fate::Dropped };
            assert_eq!(kernel.send(&first.answer()), expected, "seed {seed}: answer to {probe:?}\n{:#?}", stage.describe());
            if expected == Fate::Passed {
                assert_eq!(kernel.send(&first.later()), Fate::Passed, "seed {seed}: later packet of {probe:?}");
            }
        }
    }
}

/// A table has rules for stamps to come. Whoever started with the rules of this stamp may meet a flow that already carries the next:
/// it neither passes by it nor completes it.
#[test]
fn rules_for_stamps_to_come_decide_nothing() {
    let (settings, foreign) = (settings(), 0xab00_0000);
    let [now, next] = [18, 19].map(|number| Stamp::new(number).unwrap());
    let (half, full) = (|stamp| foreign | settings.mark.half_judged(stamp), |stamp| foreign | settings.mark.judged(stamp));
    let jump_or_drop = vec![vec![Statement::jump(&names::fast())], vec![Statement::Verdict(Verdict::Drop)]];
    let (judged_out, judged_in) = (names::stamp_out(), names::stamp_in());
    let rows = [
        ("fast", &jump_or_drop, full(now), Fate::Passed, full(now)),
        ("fast", &jump_or_drop, half(now), Fate::Dropped, half(now)),
        ("fast", &jump_or_drop, full(next), Fate::Dropped, full(next)),
        ("fast", &jump_or_drop, foreign, Fate::Dropped, foreign),
        ("out", &vec![vec![Statement::goto(&judged_out)]], foreign, Fate::Passed, half(now)),
        ("out", &vec![vec![Statement::goto(&judged_out)]], full(next), Fate::Passed, half(now)),
        ("in", &vec![vec![Statement::goto(&judged_in)]], half(now), Fate::Passed, full(now)),
        ("in", &vec![vec![Statement::goto(&judged_in)]], half(next), Fate::Passed, half(next)),
        ("in", &vec![vec![Statement::goto(&judged_in)]], foreign, Fate::Passed, foreign),
    ];
    for (what, rules, mark, fate, then) in rows {
        let mut table = Table::default();
        for (name, rules) in stamp_chains(&settings, now) {
            table.chains.insert(name, Chain { base: None, rules });
        }
        let base = Some(Base { hook: Hook::Forward, priority: 0 });
        table.chains.insert(Name::from("b"), Chain { base, rules: rules.clone() });
        let mut kernel = ModelKernel::new(table);
        let flow = packet(&Probe::roll(&mut Dice::new(1)));
        kernel.connections.push(Connection { tuple: flow.tuple(), mark, answered: true });
        assert_eq!(kernel.send(&flow), fate, "{what} {mark:#x}");
        assert_eq!(kernel.connections[0].mark, then, "{what} {mark:#x}");
    }
}
