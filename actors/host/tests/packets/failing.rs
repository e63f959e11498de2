//! When something goes wrong: what was in force stays in force, packet by packet.

use std::collections::BTreeSet;

use groupcast_enforce::delta::{Op, Transaction};
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::settings::{Attachments, Stamp};
use groupcast_enforce::table::{Data, Elements, Key, SEEN_MAX, SetKind, Table};
use groupcast_enforce::trial::{self, Stage, WORKLOADS};
use groupcast_host::holder::Holder;
use groupcast_host::keeper::{Keeper, Moved, MovedDocument};
use groupcast_host::netlink::{Kernel, KernelError};
use groupcast_host::state::Replica;
use groupcast_policy::model::{Event, Group};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::packet::UDP;

use crate::rows::{place, rules};
use crate::stage::{isolated, run};
use crate::streams::packet;
use crate::{Machine, settings};

const OUTSIDE: u8 = WORKLOADS;

/// A kernel whose transactions can be spoilt: the real one refuses them.
struct Spoilt {
    kernel: Kernel,
    with: Option<Op>,
}

impl Enforcer for Spoilt {
    type Error = KernelError;

    fn commit(&mut self, transaction: &Transaction) -> Result<(), KernelError> {
        let mut transaction = transaction.clone();
        transaction.ops.extend(self.with.clone());
        self.kernel.commit(&transaction)
    }

    fn read(&mut self) -> Result<Option<Table>, KernelError> {
        self.kernel.read()
    }
}

impl Holder for Spoilt {
    fn zero_marks(&mut self, mask: u32, keep: &[u32]) -> Result<u64, KernelError> {
        self.kernel.zero_marks(mask, keep)
    }

    fn is_disturbed(&mut self) -> bool {
        self.kernel.is_disturbed()
    }
}

struct Scene {
    machine: Machine,
    stage: Stage,
    keeper: Keeper<Spoilt>,
    number: u64,
}

impl Scene {
    fn begin(attachments: Attachments, events: &[Event]) -> Self {
        let machine = Machine::new();
        let kernel = Spoilt { kernel: Kernel::open("gc", true).unwrap(), with: None };
        let stamp = Stamp::new(7).unwrap();
        let keeper = Keeper::start(trial::host(), settings(), attachments, stamp, Replica::new(), kernel).unwrap();
        let mut scene = Scene { machine, stage: Stage::default(), keeper, number: 0 };
        scene.write(events).unwrap();
        scene
    }

    fn write(&mut self, events: &[Event]) -> Result<(), KernelError> {
        self.number += 1;
        let edits = self.stage.change(events).into_iter();
        let edits = edits.filter_map(|(topic, edit)| Some((topic, MovedDocument::Edited(edit?)))).collect();
        // The first is told all the host would follow; that some documents do not exist is known, too.
        let whole = self.number == 1;
        self.keeper.moved(&[Moved { number: self.number, change: self.number, whole, edits, dropped: Vec::new() }])
    }

    fn expect(&mut self, words: &str, open: bool) {
        for (port, passes) in [(5001, true), (5002, open), (5003, false)] {
            let packet = packet(0, OUTSIDE, UDP, port);
            assert_eq!(self.machine.passes(0, OUTSIDE, &packet), passes, "{words}: port {port}");
        }
    }
}

fn opened() -> [Event; 1] {
    [rules(&["egress udp 5001 to any", "egress udp 5002 to any"])]
}

/// A transaction fails: the old ruleset whole, the error names what was wrong, nothing is believed to be in force; with the next step all
/// of it is made good.
#[test]
fn e18_a_refused_transaction_changes_nothing() {
    isolated(|| {
        let mut scene = Scene::begin(trial::attachments(), &[rules(&["egress udp 5001 to any"]), place(0)]);
        scene.expect("before", false);
        let stamp = scene.keeper.engine().stamp();
        scene.keeper.enforcer().with = Some(Op::DeleteSet { set: "nowhere".into() });
        for attempt in 1..=3 {
            let error = if attempt == 1 { scene.write(&opened()) } else { scene.keeper.settle() }.unwrap_err();
            assert!(error.to_string().contains("nowhere") && error.to_string().contains("stays in force"), "{error}");
            assert_eq!((scene.keeper.counts.failures, scene.keeper.engine().stamp()), (attempt, stamp));
            scene.expect("refused", false);
        }
        scene.keeper.enforcer().with = None;
        scene.keeper.settle().unwrap();
        scene.expect("made good", true);
    });
}

/// A set larger than the kernel takes: an explicit failure that names it, the last good ruleset kept.
#[test]
fn e21_a_set_too_large_fails_by_name() {
    isolated(|| {
        let mut scene = Scene::begin(trial::attachments(), &[rules(&["egress udp 5001 to any"]), place(0)]);
        // The one set of ours with a limit, which the kernel fills by itself.
        let number = |n: u32| (Key::InterfaceV4(trial::interface(0), n), Data::Nothing);
        let elements = Elements::Keyed((0..=SEEN_MAX).map(number).collect());
        scene.keeper.enforcer().with = Some(Op::AddElements { set: "seen".into(), kind: SetKind::Seen, elements });
        let error = scene.write(&opened()).unwrap_err();
        assert!(error.to_string().contains("elements to set seen"), "{error}");
        scene.expect("too large", false);
        scene.keeper.enforcer().with = None;
        scene.keeper.settle().unwrap();
        scene.expect("made good", true);
    });
}

/// A group of the kernel's that accounts what is allocated for its threads, and refuses more than its limit.
struct Bounded {
    folder: std::path::PathBuf,
    before: std::path::PathBuf,
}

impl Bounded {
    /// For the calling thread. `None` where threads cannot be bounded apart from their process: there its own memory, too, would be
    /// refused, and it would stand still.
    fn enter(limit_bytes: u64) -> Option<Self> {
        let groups = std::fs::read_to_string("/proc/thread-self/cgroup").unwrap();
        let own = groups.lines().find_map(|line| line.split_once(":memory:")).map(|(_, path)| path);
        let before = own.map(|own| std::path::Path::new("/sys/fs/cgroup/memory").join(own.trim_start_matches('/')));
        let Some(before) = before.filter(|before| before.join("tasks").exists()) else {
            eprintln!("not run: no control groups that bound the memory of a single thread (version 1)");
            return None;
        };
        let folder = before.join(format!("groupcast-e21-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let group = Bounded { folder, before };
        // Refused, not killed for it.
        group.set("memory.oom_control", "1");
        group.set("memory.limit_in_bytes", &limit_bytes.to_string());
        group.set("tasks", &nix::unistd::gettid().to_string());
        Some(group)
    }

    fn set(&self, file: &str, value: &str) {
        let path = self.folder.join(file);
        std::fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        let _ = std::fs::write(self.before.join("tasks"), nix::unistd::gettid().to_string());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// The kernel has no memory for what it should hold: it says so, which names what there was no memory for; the last good ruleset is kept,
/// packet by packet, however often it is tried; and with memory all of it is made good.
#[test]
fn e21_a_kernel_without_memory_fails_by_name() {
    isolated(|| {
        const LIMIT_BYTES: u64 = 4 << 20;
        const MEMBERS: u32 = 200_000;
        let many = (0..MEMBERS).map(|n| Prefix::host(std::net::Ipv4Addr::from_bits(0x0b00_0000 + n).into()));
        let own = trial::address(OUTSIDE, Family::V4);
        let with = |members: BTreeSet<Prefix>| Event::group(Group { members, ..Group::new(trial::group_id(1)) });
        let lines = ["egress udp 5001 to any", "egress udp 5002 to group:g1"];
        let mut scene = Scene::begin(trial::attachments(), &[rules(&lines), with(BTreeSet::new()), place(0)]);
        scene.expect("before", false);
        let before = scene.keeper.read().unwrap();
        let Some(bounded) = Bounded::enter(LIMIT_BYTES) else { return };
        let grown = [with(many.chain([Prefix::host(own)]).collect())];
        for attempt in 1..=3 {
            let error = if attempt == 1 { scene.write(&grown) } else { scene.keeper.settle() }.unwrap_err();
            let KernelError::Refused(refused) = &error else { panic!("{error}") };
            assert!(refused.iter().any(|one| one.errno == nix::libc::ENOMEM), "{error}");
            let words = error.to_string();
            assert!(words.contains("elements to set m4_g1: Cannot allocate memory"), "{words}");
            assert!(words.contains("the old ruleset stays in force"), "{words}");
            assert_eq!(scene.keeper.counts.failures, attempt);
            scene.expect("without memory", false);
        }
        assert!(scene.keeper.read().unwrap() == before, "the table is not what it was");
        drop(bounded);
        scene.keeper.settle().unwrap();
        scene.expect("with memory", true);
    });
}

/// Nobody else touches our table while it is owned; deleted while nobody owns it, it is put right with the next step, and counted. Other
/// tables are as they were.
#[test]
fn e20_tampering_is_impossible_or_repaired() {
    isolated(|| {
        let mut scene = Scene::begin(trial::attachments(), &[rules(&["egress udp 5001 to any"]), place(0)]);
        run("nft", &["add table inet neighbour { chain c { tcp dport 1 drop; }; }"]);
        for theft in ["flush ruleset", "delete table inet gc", "flush chain inet gc j_out", "add rule inet gc open accept"] {
            let output = std::process::Command::new("nft").arg(theft).output().unwrap();
            // A flush of everything skips what is owned; the rest is refused.
            assert_eq!(output.status.success(), theft == "flush ruleset", "{theft}: {output:?}");
            scene.expect(theft, false);
        }
        run("nft", &["add table inet neighbour { chain c { tcp dport 1 drop; }; }"]);
        // Somebody who owns it as we do, because we are not there for a moment.
        let (attachments, stamp) = (scene.keeper.engine().attachments().clone(), scene.keeper.engine().stamp());
        let documents = scene.keeper.documents().clone();
        let unowned = Spoilt { kernel: Kernel::open("other", false).unwrap(), with: None };
        drop(std::mem::replace(scene.keeper.enforcer(), unowned));
        run("nft", &["delete table inet gc"]);
        assert!(scene.machine.passes(0, OUTSIDE, &packet(0, OUTSIDE, UDP, 5003)), "without a table everything passes");
        let kernel = Spoilt { kernel: Kernel::open("gc", true).unwrap(), with: None };
        scene.keeper = Keeper::start(trial::host(), settings(), attachments, stamp, documents.clone(), kernel).unwrap();
        assert!(!scene.keeper.is_adopted());
        scene.keeper.settle().unwrap();
        scene.expect("put right at a start", false);
        // The bus takes the place of the disk.
        let edits = documents.into_iter().map(|(topic, document)| (topic, MovedDocument::Replaced(Box::new(document)))).collect();
        scene.keeper.moved(&[Moved { number: 1, change: 1, whole: true, edits, dropped: Vec::new() }]).unwrap();
        // The same while it runs: found with the next step.
        scene.keeper.enforcer().kernel.remove().unwrap();
        let repairs = scene.keeper.counts.repairs;
        scene.write(&opened()).unwrap();
        assert_eq!(scene.keeper.counts.repairs, repairs + 1);
        scene.expect("put right with a step", true);
        let tables = std::process::Command::new("nft").args(["list", "table", "inet", "neighbour"]).output().unwrap();
        assert!(String::from_utf8_lossy(&tables.stdout).contains("tcp dport 1 drop"), "the neighbour's table was touched");
    });
}
