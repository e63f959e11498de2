use groupcast_policy::doc::Content;
use groupcast_policy::net::Family;
use groupcast_policy::topic::Topic;

use super::*;
use crate::settings::{Attached, Attachment};
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
        assert_eq!(mode_of(&table), Some(mode), "seed {seed}");
        let script = Script { name: "gc", table: &table }.to_string();
        if let Some(accepted) = nft_accepts(&script) {
            accepted.unwrap_or_else(|words| panic!("seed {seed}: {words}\n{script}"));
        }
    }
}

/// What packets meet is read from the table itself: an order may not be in force, and a frozen table may have been an audited one.
#[test]
fn who_is_audited_is_read_from_the_table() {
    assert_eq!(mode_of(&Table::default()), None);
    let mut stage = Stage::default();
    let mut dice = Dice::new(1);
    (0..40).for_each(|_| _ = stage.change(&[trial::event(&mut dice)]));
    let mut attachments = trial::attachments();
    let of = |attachments: &Attachments| {
        let table = build(&trial::host(), &stage, attachments, &settings(), Stamp::new(7).unwrap()).to_table();
        audited(&table)
    };
    attachments.values_mut().for_each(|attached| attached.audit = false);
    assert_eq!(of(&attachments), BTreeSet::new());
    attachments.values_mut().for_each(|attached| attached.audit = true);
    let all: BTreeSet<Interface> = attachments.values().map(|attached| attached.attachment.interface()).collect();
    let found = of(&attachments);
    assert!(!found.is_empty() && found.is_subset(&all), "{found:?}");
}

/// What is not objected to refuses nobody: neither the workload itself nor one that was attached before, whichever id comes first.
#[test]
fn who_is_attached_without_objection_displaces_nobody() {
    let (mut taken, mut objected) = (0, 0);
    for seed in 0..100 {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::default();
        (0..30).for_each(|_| _ = stage.change(&[trial::event(&mut dice)]));
        let placements = match stage.document(&Topic::Host(trial::host())).and_then(|held| held.content()) {
            Some(Content::Host(placements)) => Some(placements),
            _ => None,
        };
        let refused =
            |attachments: &Attachments| build(&trial::host(), &stage, attachments, &settings(), Stamp::new(7).unwrap()).refused;
        let mut attachments = Attachments::new();
        for _ in 0..20 {
            let workload = trial::workload_id(dice.below(4) as u8);
            let interface = if dice.percent(5) { trial::outside() } else { trial::interface(dice.below(4) as u8) };
            let attachment = match dice.percent(60) {
                true => Attachment::Interface(interface),
                false => Attachment::Addresses { interface, addresses: [trial::address(dice.below(4) as u8, Family::V4)].into() },
            };
            let attached = Attached { attachment, audit: false };
            let mut after = attachments.clone();
            after.insert(workload.clone(), attached.clone());
            match objection(&workload, &attached, false, &attachments, placements, &settings()) {
                None => {
                    assert_eq!(refused(&after), [], "seed {seed}: {workload} as {attached:?} beside {attachments:?}");
                    attachments = after;
                    taken += 1;
                }
                Some(refusal) => {
                    assert_eq!(refusal.workload(), &workload, "the one that comes is refused, not one that is there");
                    objected += 1;
                }
            }
        }
    }
    assert!(taken > 200 && objected > 200, "{taken} taken, {objected} objected to");
}
