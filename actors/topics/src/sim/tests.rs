use super::*;

fn run(seed: u64, faults: Faults, ms: u64) -> Outcome {
    let universe = Universe { hosts: 4, groups: 50, spaces: 2 };
    match World::new(seed, universe, 3, faults).run(ms) {
        Ok(outcome) => outcome,
        Err(failure) => panic!("seed {seed}: {failure}"),
    }
}

fn seeds(few: u64, many: u64) -> std::ops::Range<u64> {
    let first = std::env::var("GROUPCAST_SEED").ok().and_then(|text| text.parse().ok());
    match first {
        Some(seed) => seed..seed + 1,
        None => 0..if std::env::var_os("GROUPCAST_FULL").is_some() { many } else { few },
    }
}

#[test]
fn quiet() {
    for seed in seeds(300, 3_000) {
        let outcome = run(seed, Faults::none(), 5_000);
        assert!(outcome.batches > 20 && outcome.commits > 20, "seed {seed}: {outcome:?}");
    }
}

#[test]
fn stormy() {
    let mut total = Outcome::default();
    for seed in seeds(300, 10_000) {
        let outcome = run(seed, Faults::all(), 15_000);
        total.leaders += outcome.leaders;
        total.lives += outcome.lives;
        total.tallied += outcome.tallied;
        total.batches += outcome.batches;
    }
    eprintln!("{total:?}");
}
