use super::*;
use crate::settings::Mode;
use crate::text::{Script, tests::nft_accepts};
use crate::trial::{self, Dice, Stage};

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

#[test]
fn nft_accepts_random_rulesets() {
    for seed in 0..40 {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::default();
        for _ in 0..20 {
            let event = trial::event(&mut dice);
            stage.change(&[event]);
        }
        let mode = *dice.pick(&[Mode::Enforce, Mode::Enforce, Mode::Audit, Mode::Bypass, Mode::Lockdown]);
        let settings = Settings { mode, adopting: dice.percent(20), ..settings() };
        let table = build(&trial::host(), &stage, &trial::attachments(), &settings, Stamp::new(7).unwrap()).to_table();
        assert_eq!(is_adopting(&table), settings.adopting);
        let script = Script { name: "gc", table: &table }.to_string();
        if let Some(accepted) = nft_accepts(&script) {
            accepted.unwrap_or_else(|words| panic!("seed {seed}: {words}\n{script}"));
        }
    }
}
