use groupcast_enforce::delta::{Inconsistent, Transaction};
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::kernel::ModelKernel;
use groupcast_enforce::settings::{Mode, Stamp};
use groupcast_enforce::stamp;
use groupcast_enforce::trial::{self, Dice, Stage};

use super::*;

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

/// A model that refuses when told to, and remembers which marks were zeroed, and between which stamps.
#[derive(Default)]
struct Moody {
    model: ModelKernel,
    refuses: bool,
    zeroed: Vec<(Option<Stamp>, Vec<u32>)>,
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

impl Holder for Moody {
    fn zero_marks(&mut self, mask: u32, keep: &[u32]) -> Result<u64, Inconsistent> {
        assert_eq!(mask, settings().mark.mask());
        self.zeroed.push((stamp::stamp_of(&settings(), &self.model.table), keep.to_vec()));
        Ok(1)
    }

    fn is_disturbed(&mut self) -> bool {
        false
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
    let model = Moody { model: ModelKernel::new(table.clone()), ..Moody::default() };
    let mut second = Keeper::start_from(known(documents, Some(stamp)), model).unwrap();
    assert!(second.agrees());
    second.settle().unwrap();
    assert_eq!(second.counts, Counts::default());
    assert_eq!(second.engine().stamp(), stamp);
    assert_eq!(second.enforcer.model.table.differences(&table), [""; 0]);
}

fn known(documents: Replica, stamp: Option<Stamp>) -> Known {
    let (host, attachments, random) = (trial::host(), trial::attachments(), Stamp::new(77).unwrap());
    Known { host, settings: settings(), attachments, documents, stamp, bits_moved: false, random }
}

#[test]
fn what_the_kernel_took_away_after_the_disk_was_written_stays_away_until_the_bus_is_heard() {
    let (mut dice, mut stage) = (Dice::new(8), Stage::default());
    let mut first = keeper(Moody::default());
    for number in 1..15 {
        first.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
    }
    let (documents, stamp) = (first.documents().clone(), first.engine().stamp());
    let mut number = 15;
    while first.engine().stamp() == stamp {
        first.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
        number += 1;
    }
    let table = first.enforcer.model.table.clone();
    for on_disk in [Some(stamp), None] {
        let model = Moody { model: ModelKernel::new(table.clone()), ..Moody::default() };
        let mut second = Keeper::start_from(known(documents.clone(), on_disk), model).unwrap();
        second.settle().unwrap();
        assert_eq!(second.enforcer.model.table.differences(&table), [""; 0]);
        // What is ordered is in force, on top of the table's own policy.
        second.detach(&trial::workload_id(0)).unwrap();
        assert!(second.is_stale());
        let held = &second.enforcer.model.table;
        assert!(!format!("{held:?}").contains("Interface(\"gcw0\")"), "{held:?}");
        let about_policy = |name: &String| {
            [
                "chain a_",
                "chain d_",
                "chain sa_",
                "chain sd_",
                "chain p_",
                "chain x_",
                "set m",
                "set n",
                "set addr",
                "set ports_",
                "set profiles",
            ]
            .iter()
            .any(|beginning| name.starts_with(beginning))
        };
        assert!(!held.differences(&table).iter().any(about_policy), "{:?}", held.differences(&table));
        for mode in [Mode::Lockdown, Mode::Audit, Mode::Bypass, Mode::Enforce] {
            second.set_settings(Settings { mode, ..settings() }).unwrap();
            let held = &second.enforcer.model.table;
            assert_ne!(held.differences(&table), [""; 0], "{mode:?}");
            assert!(!held.differences(&table).iter().any(about_policy), "{mode:?}: {:?}", held.differences(&table));
        }
        // And what the bus says counts.
        second.want_settings(settings());
        second.want(trial::workload_id(0), trial::attachments().get(&trial::workload_id(0)).cloned());
        let replaced =
            |(topic, document): (&Topic, &Document)| (topic.clone(), MovedDocument::Replaced(Box::new(document.clone())));
        let edits = first.documents().iter().map(replaced).collect();
        second.moved(&[Moved { number: 1, change: 1, whole: true, edits, dropped: Vec::new() }]).unwrap();
        assert!(!second.is_stale());
        let differences = second.enforcer.model.table.differences(&table);
        assert!(differences.iter().all(|name| STAMPED.contains(&name.as_str())), "{differences:?}");
    }
}

/// What differs between tables that say the same under another stamp.
const STAMPED: [&str; 5] = ["chain b_forward_in", "chain b_forward_out", "chain st_fast", "chain st_in", "chain st_out"];

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
    assert_eq!(keeper.shown, None);
    keeper.set_settings(Settings { mode: Mode::Lockdown, ..settings() }).unwrap();
    assert_eq!(keeper.enforcer.model.table.differences(keeper.engine().actual()), [""; 0]);
}

#[test]
fn stamps_that_connections_may_carry_from_another_policy_are_zeroed_first() {
    // Nobody knows: before anything is in the kernel, everything goes.
    let mut unknown = keeper(Moody::default());
    unknown.settle().unwrap();
    assert_eq!(unknown.enforcer.zeroed, [(None, vec![])]);
    assert_eq!(unknown.counts.unmarked, 1);
    // The disk knows, but may be behind: at once in force under a stamp beyond, and what is left of others goes afterwards.
    let from_disk = |stamp: u32, bits_moved: bool, model: Moody| {
        let (stamp, random) = (Stamp::new(stamp), Stamp::new(77).unwrap());
        let (host, attachments) = (trial::host(), trial::attachments());
        let known = Known { host, settings: settings(), attachments, documents: Replica::new(), stamp, bits_moved, random };
        Keeper::start_from(known, model)
    };
    let mut behind = from_disk(5, false, Moody::default()).unwrap();
    behind.settle().unwrap();
    let (bits, stamp) = (settings().mark, behind.engine().stamp());
    assert_eq!(stamp.number(), 5 + STAMPS_BEHIND_MAX + 1);
    assert_eq!(behind.enforcer.zeroed, [(Some(stamp), vec![bits.judged(stamp), bits.half_judged(stamp)])]);
    // So far behind that there is none beyond: as if nobody knew.
    let mut last = from_disk(Stamp::MAX.number(), false, Moody::default()).unwrap();
    last.settle().unwrap();
    assert_eq!((last.engine().stamp().number(), &last.enforcer.zeroed[..]), (78, &[(None, vec![])][..]));
    // Other bits than in the last life: what they carry now means nothing, and goes.
    let mut moved = from_disk(5, true, Moody::default()).unwrap();
    moved.settle().unwrap();
    let stamp = moved.engine().stamp();
    assert_eq!(
        (stamp.number(), &moved.enforcer.zeroed[..]),
        (78, &[(Some(stamp), vec![bits.judged(stamp), bits.half_judged(stamp)])][..])
    );
    // The kernel knows: nothing.
    let model = Moody { model: ModelKernel::new(behind.enforcer.model.table.clone()), ..Moody::default() };
    let mut known = keeper(model);
    known.set_settings(Settings { mode: Mode::Lockdown, ..settings() }).unwrap();
    assert_eq!(known.enforcer.zeroed, []);
}

#[test]
fn when_stamps_begin_again_the_old_ones_are_zeroed_before_and_after() {
    let (last, bits) = (Stamp::MAX, settings().mark);
    let start = |stamp| Keeper::start(trial::host(), settings(), trial::attachments(), stamp, Replica::new(), Moody::default());
    let mut keeper = start(Stamp::new(last.number() - 1).unwrap()).unwrap();
    keeper.settle().unwrap();
    assert_eq!(keeper.engine().stamp(), last);
    keeper.enforcer.zeroed.clear();
    keeper.set_settings(Settings { mode: Mode::Lockdown, ..settings() }).unwrap();
    assert_eq!(keeper.engine().stamp(), Stamp::FIRST);
    let marks = |stamp| vec![bits.judged(stamp), bits.half_judged(stamp)];
    assert_eq!(keeper.enforcer.zeroed, [(Some(last), marks(last)), (Some(Stamp::FIRST), marks(Stamp::FIRST))]);
}

#[test]
fn the_safe_part_is_in_force_until_the_next_commit() {
    let (mut dice, mut stage) = (Dice::new(6), Stage::default());
    let mut keeper = keeper(Moody::default());
    for number in 1..15 {
        keeper.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
    }
    let whole = keeper.enforcer.model.table.clone();
    let committed = keeper.documents().clone();
    keeper.overdue(Replica::new()).unwrap();
    assert_ne!(keeper.enforcer.model.table.differences(&whole), [""; 0]);
    assert_eq!((keeper.documents(), keeper.in_force()), (&committed, &Replica::new()));
    keeper.moved(&[step(&mut stage, &mut dice, 15)]).unwrap();
    assert_eq!(keeper.in_force(), keeper.documents());
    let mut twin = keeper_of(keeper.documents().clone(), keeper.engine().stamp());
    twin.settle().unwrap();
    assert_eq!(twin.enforcer.model.table.differences(&keeper.enforcer.model.table), [""; 0]);
}

/// One whose first table carries this stamp.
fn keeper_of(documents: Replica, stamp: Stamp) -> Keeper<Moody> {
    let before = Stamp::new(stamp.number() - 1).unwrap();
    Keeper::start(trial::host(), settings(), trial::attachments(), before, documents, Moody::default()).unwrap()
}

#[test]
fn what_somebody_changed_is_put_right_also_while_frozen() {
    let (mut dice, mut stage) = (Dice::new(7), Stage::default());
    let mut keeper = keeper(Moody::default());
    for number in 1..10 {
        keeper.moved(&[step(&mut stage, &mut dice, number)]).unwrap();
    }
    assert!(!keeper.repair().unwrap());
    keeper.set_frozen(true).unwrap();
    let before = keeper.enforcer.model.table.clone();
    keeper.moved(&[step(&mut stage, &mut dice, 10)]).unwrap();
    keeper.enforcer.model.table.sets.remove("claims");
    assert!(keeper.repair().unwrap());
    assert_eq!(keeper.counts.repairs, 1);
    // Put right, it is judged anew: but for the stamp it is what it was.
    let differences = keeper.enforcer.model.table.differences(&before);
    assert!(differences.iter().all(|name| STAMPED.contains(&name.as_str())), "{differences:?}");
}
