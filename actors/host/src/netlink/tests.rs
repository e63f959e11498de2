//! On the real kernel, each test in a network namespace of its own, which ends with the test's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use groupcast_enforce::Name;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::expression::{Field, Statement, Verdict};
use groupcast_enforce::settings::{Mode, Settings, Stamp};
use groupcast_enforce::table::{Elements, SetKind};
use groupcast_enforce::trial::{self, Dice, Stage};
use nix::sched::{CloneFlags, unshare};

use super::*;

/// Runs in a fresh network namespace; `None` where that is not allowed.
pub(super) fn isolated<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let run = thread::spawn(move || {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            eprintln!("not run: no network namespace ({error})");
            return None;
        }
        Some(test())
    });
    run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

pub(super) fn nft(text: &str) {
    run("nft", &[text]);
}

pub(super) fn ip(arguments: &str) {
    run("ip", &arguments.split(' ').collect::<Vec<_>>());
}

fn run(program: &str, arguments: &[&str]) {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

fn engine() -> Engine {
    Engine::new(trial::host(), settings(), trial::attachments(), Stamp::new(7).unwrap())
}

fn counts() -> u64 {
    if std::env::var_os("GROUPCAST_FULL").is_some() { 400 } else { 25 }
}

/// Commits to a table of its own every millisecond, as docker, firewalld and kube-proxy do, until it is dropped.
struct Neighbour {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<usize>>,
}

impl Neighbour {
    /// In the namespace of the calling thread.
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut kernel = Kernel::open("neighbour", false).unwrap();
            let mut commits = 0;
            while !stopped.load(Ordering::Relaxed) {
                let set = Name::from(format!("s{commits}"));
                for op in [Op::AddSet { set: set.clone(), kind: SetKind::V4 }, Op::DeleteSet { set }] {
                    kernel.commit(&Transaction { anew: false, ops: vec![op] }).unwrap();
                }
                commits += 1;
                // Its pace, not a wait for anything.
                thread::sleep(Duration::from_millis(1));
            }
            commits
        });
        Self { stop, thread: Some(thread) }
    }

    fn end(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0, |thread| thread.join().unwrap())
    }
}

#[test]
fn what_was_written_reads_back_after_any_sequence() {
    isolated(|| sequences(0..counts()));
}

#[test]
fn what_was_written_reads_back_beside_a_neighbour_that_commits_all_the_time() {
    isolated(|| {
        let neighbour = Neighbour::start();
        sequences(1_000_000..1_000_000 + counts());
        assert!(neighbour.end() > 20);
    });
}

fn sequences(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::default();
        let mut engine = engine();
        let mut kernel = Kernel::open("gc", true).unwrap();
        for step in 0..20 {
            if dice.percent(10) {
                let mode = *dice.pick(&[Mode::Enforce, Mode::Audit, Mode::Bypass, Mode::Lockdown]);
                engine.set_settings(Settings { mode, adopting: dice.percent(30), ..settings() });
            }
            let event = if dice.percent(50) { stage.nudge(&mut dice) } else { trial::event(&mut dice) };
            let edits = stage.change(&[event]);
            let plan = engine.change(&edits, &stage);
            kernel.commit(&plan.transaction).unwrap_or_else(|error| panic!("seed {seed}, step {step}: {error}"));
            engine.committed(plan);
            let read = kernel.read().unwrap().unwrap();
            assert_eq!(read.differences(engine.actual()), [""; 0], "seed {seed}, step {step}");
        }
        kernel.remove().unwrap();
        assert!(kernel.read().unwrap().is_none());
    }
}

/// Groups, members and workloads of a full host, in one transaction; and a member that joins afterwards is one element.
#[test]
fn a_full_host_loads_in_one_transaction_and_reads_back() {
    isolated(|| {
        let full = std::env::var_os("GROUPCAST_FULL").is_some();
        let (groups, each) = if full { (1_000, 1_000) } else { (100, 200) };
        let mut documents = crate::bench::documents(groups, each, 100).unwrap();
        let mut engine = engine();
        let mut kernel = Kernel::open("gc", true).unwrap();
        let plan = engine.compare(&documents);
        let start = std::time::Instant::now();
        kernel.commit(&plan.transaction).unwrap();
        println!("{groups} groups of {each} members in {:?}", start.elapsed());
        engine.committed(plan);
        let read = kernel.read().unwrap().unwrap();
        assert_eq!(read.differences(engine.actual()), [""; 0]);
        let topic = groupcast_policy::topic::Topic::Members("g7".parse().unwrap());
        let add = groupcast_policy::net::Prefix::v4(0x0101_0101, 32).into_iter().collect();
        let edit = groupcast_policy::doc::Edit::Members { add, remove: Vec::new() };
        documents.get_mut(&topic).unwrap().apply(&edit).unwrap();
        let plan = engine.change(&[(topic, Some(edit))], &documents);
        assert!(!plan.whole && plan.transaction.ops.len() == 1, "{:?}", plan.transaction);
        kernel.commit(&plan.transaction).unwrap();
    });
}

#[test]
fn a_refused_transaction_leaves_everything_as_it_was_and_names_what_was_wrong() {
    isolated(|| {
        let mut dice = Dice::new(3);
        let mut stage = Stage::default();
        let mut engine = engine();
        let mut kernel = Kernel::open("gc", true).unwrap();
        for _ in 0..15 {
            stage.change(&[trial::event(&mut dice)]);
        }
        let plan = engine.compare(&stage);
        kernel.commit(&plan.transaction).unwrap();
        engine.committed(plan);
        let good = Op::AddSet { set: "fresh".into(), kind: SetKind::V4 };
        let rows = [
            (Op::DeleteSet { set: "claims".into() }, "delete set claims"),
            (Op::DeleteChain { chain: "j_out".into() }, "delete chain j_out"),
            (Op::DeleteSet { set: "nowhere".into() }, "delete set nowhere"),
            (
                Op::AddElements { set: "nowhere".into(), kind: SetKind::V4, elements: Elements::V4([1].into_iter().collect()) },
                "add 1 elements to set nowhere",
            ),
            (
                Op::AddRule { chain: "open".into(), at: 1, rule: vec![Statement::jump(&Name::from("open"))] },
                "add rule 1 to chain open",
            ),
        ];
        for (bad, named) in rows {
            let transaction = Transaction { anew: false, ops: vec![good.clone(), bad] };
            let error = kernel.commit(&transaction).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
            assert_eq!(kernel.read().unwrap().unwrap().differences(engine.actual()), [""; 0], "{named}");
        }
        // And it goes on.
        let edits = stage.change(&[trial::event(&mut dice)]);
        let plan = engine.change(&edits, &stage);
        kernel.commit(&plan.transaction).unwrap();
        engine.committed(plan);
        assert_eq!(kernel.read().unwrap().unwrap().differences(engine.actual()), [""; 0]);
    });
}

#[test]
fn an_owned_table_is_nobody_elses_and_is_adopted_after_death() {
    isolated(|| {
        let stage = Stage::default();
        let mut engine = engine();
        let mut kernel = Kernel::open("gc", true).unwrap();
        let plan = engine.compare(&stage);
        kernel.commit(&plan.transaction).unwrap();
        engine.committed(plan);
        let mut other = Kernel::open("gc", false).unwrap();
        let theft = Transaction { anew: false, ops: vec![Op::FlushChain { chain: "j_out".into() }] };
        let error = other.commit(&theft).unwrap_err();
        assert!(matches!(&error, KernelError::Refused(list) if list[0].errno == nix::libc::EPERM), "{error}");
        assert!(other.remove().is_err() && kernel.is_owned());
        let counted = kernel.counters().unwrap();
        assert!(counted.iter().any(|counted| counted.chain == "audit" && counted.at == 0 && counted.packets == 0));
        drop(kernel);
        let mut heir = Kernel::open("gc", true).unwrap();
        assert_eq!(heir.read().unwrap().unwrap().differences(engine.actual()), [""; 0]);
        let more = Transaction { anew: false, ops: vec![Op::AddSet { set: "more".into(), kind: SetKind::V6 }] };
        heir.commit(&more).unwrap();
        assert_eq!(heir.read().unwrap().unwrap().differences(engine.actual()), ["set more"]);
    });
}

#[test]
fn more_members_than_a_message_holds() {
    isolated(|| {
        let mut kernel = Kernel::open("gc", true).unwrap();
        let many = if std::env::var_os("GROUPCAST_FULL").is_some() { 1_000_000 } else { 65_537 };
        let members = Elements::V4((0..many).map(|n| 0x0a00_0000 + n * 3).collect());
        let set = Name::from("m4_many");
        let add = |elements: Elements| Op::AddElements { set: set.clone(), kind: SetKind::V4, elements };
        let ops = vec![Op::AddSet { set: set.clone(), kind: SetKind::V4 }, add(members.clone())];
        kernel.commit(&Transaction { anew: false, ops }).unwrap();
        if many < 100_000 {
            assert_eq!(kernel.read().unwrap().unwrap().sets[&set].elements, members);
        }
        let one = Elements::V4([1].into_iter().collect());
        kernel.commit(&Transaction { anew: false, ops: vec![add(one)] }).unwrap();
    });
}

#[test]
fn rules_are_inserted_where_they_belong() {
    isolated(|| {
        let mut kernel = Kernel::open("gc", true).unwrap();
        let chain = Name::from("c");
        let rule = |port: u8| vec![Statement::is(Field::Protocol, port), Statement::Verdict(Verdict::Accept)];
        let add = |at, port| Op::AddRule { chain: chain.clone(), at, rule: rule(port) };
        let delete = |at| Op::DeleteRule { chain: chain.clone(), at };
        let mut expected = Table::default();
        let steps = [
            vec![Op::AddChain { chain: chain.clone(), base: None }, add(0, 10), add(1, 30), add(1, 20), add(0, 5)],
            vec![add(0, 1), add(5, 40), add(2, 7), add(3, 8), delete(0)],
            vec![delete(5), delete(0), add(0, 2), add(1, 3), add(5, 50)],
        ];
        for ops in steps {
            let transaction = Transaction { anew: false, ops };
            kernel.commit(&transaction).unwrap();
            expected.apply(&transaction).unwrap();
            let read = kernel.read().unwrap().unwrap();
            assert_eq!(read.chains[&chain].rules, expected.chains[&chain].rules);
        }
    });
}

#[test]
fn only_what_others_do_to_our_table_is_a_disturbance() {
    isolated(|| {
        let mut kernel = Kernel::open("gc", false).unwrap();
        let set = |name: &str| Transaction { anew: false, ops: vec![Op::AddSet { set: name.into(), kind: SetKind::V4 }] };
        kernel.commit(&set("a")).unwrap();
        assert!(!kernel.is_owned() && !kernel.is_disturbed());
        kernel.commit(&set("b")).unwrap();
        nft("add table inet neighbour; add set inet neighbour gc { type ipv4_addr; }; add table ip gc");
        assert!(!kernel.is_disturbed());
        nft("add element inet gc a { 10.0.0.1 }");
        assert!(kernel.is_disturbed() && !kernel.is_disturbed());
        nft("delete table inet gc");
        assert!(kernel.is_disturbed());
    });
}
