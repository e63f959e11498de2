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

/// Nothing is lost: every exposed state is exactly the one at its cut.
#[test]
fn quiet() {
    for seed in seeds(200, 2_000) {
        let outcome = run(seed, Faults::none(), 5_000);
        assert!(outcome.batches > 20 && outcome.commits > 20, "seed {seed}: {outcome:?}");
    }
}

/// Everything goes wrong, for long.
#[test]
fn storms() {
    campaign(seeds(300, 4_000), 15_000);
}

/// Everything goes wrong, briefly and in many ways.
#[test]
fn showers() {
    campaign(seeds(1_500, 20_000), 3_000);
}

/// An hour of simulated storms when run in full: several thousand contests for the lead, never two winners.
fn campaign(seeds: std::ops::Range<u64>, ms: u64) {
    let mut total = Outcome::default();
    let many = seeds.end - seeds.start > 1;
    for seed in seeds {
        let outcome = run(seed, Faults::all(), ms);
        total.leaders += outcome.leaders;
        total.lives += outcome.lives;
        total.stuck += outcome.stuck;
        total.tallied += outcome.tallied;
        total.divided += outcome.divided;
        total.batches += outcome.batches;
        total.commits += outcome.commits;
        total.crashes += outcome.crashes;
        total.asks += outcome.asks;
    }
    eprintln!("{total:?}");
    // A campaign in which nothing happened would prove nothing.
    assert!(
        !many || (total.tallied > 100 && total.divided > 100 && total.lives > 100 && total.crashes > 100 && total.leaders > 500),
        "{total:?}"
    );
    assert!(!many || total.stuck > 10, "{total:?}");
}
