use super::*;
use crate::ruleset::build;
use crate::settings::{Settings, Stamp};
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
