use groupcast_enforce::delta::{Inconsistent, Transaction};
use groupcast_enforce::kernel::ModelKernel;
use groupcast_enforce::settings::Mode;
use groupcast_enforce::trial::{self, Dice, Stage};

use super::*;

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

/// A model that refuses when told to.
#[derive(Default)]
struct Moody {
    model: ModelKernel,
    refuses: bool,
}

impl Enforcer for Moody {
    type Error = Inconsistent;

    fn commit(&mut self, transaction: &Transaction) -> Result<(), Inconsistent> {
        if self.refuses {
            return Err(Inconsistent { what: "mood for", name: "this".into() });
        }
        self.model.commit(transaction)
    }

    fn read(&mut self) -> Result<Option<Table>, Inconsistent> {
        self.model.read()
    }
}

fn keeper(model: Moody) -> Keeper<Moody> {
    let stamp = Stamp::new(5).unwrap();
    Keeper::start(trial::host(), settings(), trial::attachments(), stamp, Replica::new(), model).unwrap()
}

fn step(stage: &mut Stage, dice: &mut Dice, number: u64) -> Moved {
    let edits = stage.change(&[trial::event(dice)]).into_iter();
    let edits = edits.filter_map(|(topic, edit)| Some((topic, MovedDocument::Edited(edit?)))).collect();
    Moved { number, change: number, whole: false, edits, dropped: Vec::new() }
}

#[test]
fn what_was_refused_is_made_good_with_the_next_step() {
    for seed in 0..50 {
        let (mut dice, mut stage) = (Dice::new(seed), Stage::default());
        let mut keeper = keeper(Moody::default());
        keeper.settle().unwrap();
        for number in 1..20 {
            keeper.enforcer.refuses = dice.percent(30);
            let before = keeper.enforcer.model.table.clone();
            let moved = step(&mut stage, &mut dice, number);
            match keeper.moved(&[moved]) {
                Ok(()) => assert_eq!(keeper.enforcer.model.table.differences(keeper.engine().actual()), [""; 0]),
                Err(_) => assert_eq!(keeper.enforcer.model.table.differences(&before), [""; 0]),
            }
        }
        keeper.enforcer.refuses = false;
        keeper.settle().unwrap();
        let mut twin = Keeper::start(
            trial::host(),
            settings(),
            trial::attachments(),
            Stamp::new(keeper.engine().stamp().number() - 1).unwrap(),
            keeper.documents().clone(),
            Moody::default(),
        )
        .unwrap();
        twin.settle().unwrap();
        assert_eq!(twin.enforcer.model.table.differences(&keeper.enforcer.model.table), [""; 0], "seed {seed}");
    }
}

#[test]
fn a_table_that_somebody_emptied_is_put_right_and_counted() {
    let (mut dice, mut stage) = (Dice::new(2), Stage::default());
    let mut keeper = keeper(Moody::default());
    keeper.settle().unwrap();
    keeper.enforcer.model.table = Table::default();
    let mut number = 0;
    while keeper.counts.repairs == 0 {
        number += 1;
        keeper.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
        assert!(number < 20, "no step touched the table");
    }
    assert_eq!(keeper.enforcer.model.table.differences(keeper.engine().actual()), [""; 0]);
}

#[test]
fn a_restart_adopts_the_table_and_changes_nothing() {
    let (mut dice, mut stage) = (Dice::new(3), Stage::default());
    let mut first = keeper(Moody::default());
    for number in 1..15 {
        first.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
    }
    let (documents, stamp) = (first.documents().clone(), first.engine().stamp());
    let table = first.enforcer.model.table.clone();
    let model = Moody { model: ModelKernel::new(table.clone()), refuses: false };
    let stale = Stamp::new(1).unwrap();
    let mut second = Keeper::start(trial::host(), settings(), trial::attachments(), stale, documents, model).unwrap();
    second.settle().unwrap();
    assert_eq!(second.counts, Counts::default());
    assert_eq!(second.engine().stamp(), stamp);
    assert_eq!(second.enforcer.model.table.differences(&table), [""; 0]);
}

#[test]
fn frozen_keeps_what_is_there_and_thawing_makes_good() {
    let (mut dice, mut stage) = (Dice::new(4), Stage::default());
    let mut keeper = keeper(Moody::default());
    keeper.settle().unwrap();
    keeper.set_frozen(true).unwrap();
    let before = keeper.enforcer.model.table.clone();
    for number in 1..10 {
        keeper.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
    }
    assert_eq!(keeper.enforcer.model.table.differences(&before), [""; 0]);
    keeper.set_frozen(false).unwrap();
    assert_ne!(keeper.enforcer.model.table.differences(&before), [""; 0]);
    keeper.set_settings(Settings { mode: Mode::Lockdown, ..settings() }).unwrap();
    assert_eq!(keeper.enforcer.model.table.differences(keeper.engine().actual()), [""; 0]);
}
