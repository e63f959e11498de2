//! Random schedules of edits, deletions and faults while a source polls. After every poll that read everything: what existed throughout
//! the poll is in CATALOG, and what was deleted before it began is not. Once the server is quiet, both are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use groupcast_control::source::cloud_controller::capacity;
use groupcast_control::source::machine::{Answer, Event};
use groupcast_control::source::session::{Credential, Keystone, Uaa};
use groupcast_control::source::status::Outcome;
use groupcast_control::source::{Failed, Polled, cloud_controller, neutron};
use groupcast_policy::ids::GroupId;
use groupcast_simulator::fake::local::Local;
use groupcast_simulator::fake::serve::{Server, Shared};
use groupcast_simulator::fake::{Call, CloudController, Fake, Fault, Neutron, Reply, What};
use serde_json::json;

use crate::rig::{Folder, Polls, Rig, poller};

/// Schedules in an ordinary run, and with `GROUPCAST_FULL`.
const SEEDS: u64 = 3_000;
const SEEDS_FULL: u64 = 30_000;
const POLLS: usize = 12;

fn seeds() -> std::ops::Range<u64> {
    0..if std::env::var_os("GROUPCAST_FULL").is_some() { SEEDS_FULL } else { SEEDS }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

/// What edits a model, and what it holds by id.
trait Edited: Fake {
    fn ids(&self) -> BTreeSet<String>;
    fn edit(&mut self, random: &mut Random, max: usize, silently: bool);
    fn fault(&mut self, fault: Fault);
    fn quiet(&mut self);
}

impl Edited for CloudController {
    fn ids(&self) -> BTreeSet<String> {
        self.groups.iter().map(|group| format!("cf-{}", group.guid)).collect()
    }

    fn edit(&mut self, random: &mut Random, max: usize, silently: bool) {
        use groupcast_simulator::fake::cloud_controller::Edit;
        if random.chance(60) {
            // Most of it at once.
            let names: Vec<String> = self.groups.iter().map(|group| group.name.clone()).collect();
            return names.iter().skip(random.below(3)).for_each(|name| self.apply(&Edit::Delete(name.clone())));
        }
        let some = self.groups.get(random.below(self.groups.len().max(1))).map(|group| group.name.clone());
        let new = format!("g{}", random.below(1_000_000));
        let edit = match (random.below(10), some) {
            (0..4, _) | (_, None) if self.groups.len() < max => match silently && random.chance(4) {
                true => Edit::CreateSilently(new),
                false => Edit::Create(new),
            },
            (0..7, Some(name)) => match silently && random.chance(3) {
                true => Edit::DeleteSilently(name),
                false => Edit::Delete(name),
            },
            (9, _) if !silently => Edit::ClockBack(random.below(3_600) as u64),
            (_, Some(name)) => Edit::Touch(name),
            (_, None) => return,
        };
        self.apply(&edit);
    }

    fn fault(&mut self, fault: Fault) {
        self.upsets.add("/", 0, 1, What::Fault(fault));
    }

    fn quiet(&mut self) {
        self.upsets.clear();
    }
}

impl Edited for Neutron {
    fn ids(&self) -> BTreeSet<String> {
        let id = |object: &serde_json::Value| format!("os-{}", object["id"].as_str().unwrap_or_default());
        self.all("security-groups").map(id).chain(self.all("ports").map(id)).collect()
    }

    fn edit(&mut self, random: &mut Random, max: usize, _: bool) {
        use groupcast_simulator::fake::neutron::Edit;
        let new = format!("n{}", random.below(1_000_000));
        let list = if random.chance(2) { "ports" } else { "security-groups" };
        let count = self.all(list).count();
        let some = self.all(list).nth(random.below(count.max(1))).and_then(|object| object["name"].as_str()).map(str::to_owned);
        let edit = match (random.below(10), some, list == "ports") {
            (0..4, _, true) | (_, None, true) if count < max => Edit::CreatePort(new),
            (0..4, _, false) | (_, None, false) if count < max => Edit::CreateGroup(new),
            (0..7, Some(name), true) => Edit::DeletePort(name),
            (0..7, Some(name), false) => Edit::DeleteGroup(name),
            (_, Some(name), false) => Edit::TouchGroup(name),
            _ => return,
        };
        self.apply(&edit);
    }

    fn fault(&mut self, fault: Fault) {
        self.upsets.add("/", 0, 1, What::Fault(fault));
    }

    fn quiet(&mut self) {
        self.upsets.clear();
    }
}

/// A model that others edit while it answers, and that remembers when what was there.
struct Chaos<F> {
    fake: F,
    random: Random,
    busy: bool,
    silently: bool,
    max: usize,
    step: u64,
    /// When each id came and went.
    lives: BTreeMap<String, (u64, Option<u64>)>,
}

impl<F: Edited> Chaos<F> {
    fn new(fake: F, seed: u64, max: usize) -> Self {
        let silently = seed.is_multiple_of(2);
        Self { fake, random: Random(seed), busy: true, silently, max, step: 0, lives: BTreeMap::new() }
    }

    fn note(&mut self) {
        self.step += 1;
        let now = self.fake.ids();
        for id in &now {
            self.lives.entry(id.clone()).or_insert((self.step, None));
        }
        for (_, (_, gone)) in self.lives.iter_mut().filter(|(id, _)| !now.contains(*id)) {
            gone.get_or_insert(self.step);
        }
    }

    fn disturb(&mut self, one_in: usize) {
        while self.busy && self.random.chance(one_in) {
            self.fake.edit(&mut self.random, self.max, self.silently);
            self.note();
        }
    }
}

impl<F: Edited> Fake for Chaos<F> {
    fn handle(&mut self, call: &Call, since: Duration) -> Reply {
        self.disturb(6);
        if self.busy && self.random.chance(12) {
            let faults = [
                Fault::Status { status: 500, retry_after: None },
                Fault::Status { status: 503, retry_after: Some(1) },
                Fault::Status { status: 429, retry_after: Some(20) },
                Fault::Status { status: 401, retry_after: None },
                Fault::Truncate,
                Fault::Null,
                Fault::Revoke,
                Fault::Hang,
            ];
            let fault = faults[self.random.below(faults.len())].clone();
            self.fake.fault(fault);
        }
        self.fake.handle(call, since)
    }
}

/// A source over a model in the same process.
struct Near<F, S> {
    transport: Local<Chaos<F>>,
    source: S,
}

impl<F: Edited> Polls for Near<F, cloud_controller::CloudController> {
    async fn poll(&mut self, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        self.source.poll(&self.transport, full, marker).await
    }
}

impl<F: Edited> Polls for Near<F, neutron::Neutron> {
    async fn poll(&mut self, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        self.source.poll(&self.transport, full, marker).await
    }
}

#[derive(Default)]
struct Counted {
    listed: usize,
    failed: usize,
    held: usize,
    /// Groups that a deny kept.
    withheld: usize,
    edits: u64,
}

/// One schedule: polls among edits, then quiet.
async fn run<F: Edited, P: Polls>(seed: u64, chaos: impl Fn() -> MutexedChaos<F>, rig: &mut Rig<P>, polls: usize) -> Counted {
    let mut counted = Counted::default();
    let mut denied: Vec<GroupId> = Vec::new();
    let known = |rig: &Rig<P>| -> BTreeSet<String> {
        let groups = rig.streams.owned().map(|group| group.id.to_string());
        groups.chain(rig.streams.workloads.keys().map(ToString::to_string)).collect()
    };
    rig.lead().await;
    for poll in 0..polls {
        let begun = {
            let mut chaos = chaos();
            let mut chaos = chaos.lock();
            chaos.disturb(2);
            if chaos.random.chance(15) {
                rig.streams.refuse = 1;
            }
            if seed.is_multiple_of(3) && chaos.random.chance(3) {
                // Somebody at a gateway denies some of it.
                denied = rig.streams.owned().map(|group| group.id.clone()).filter(|_| chaos.random.chance(4)).collect();
                rig.streams.deny(&denied);
            }
            chaos.note();
            chaos.step
        };
        match seed as usize % 7 {
            // Another leads for a while.
            0 if poll % 5 == 4 => {
                rig.handle(Event::Leading(false)).await;
                rig.now_ms += 1_000;
                rig.lead().await;
            }
            1 if poll % 3 == 2 => drop(rig.poll_now(poll % 2 == 0).await),
            _ => rig.interval().await,
        }
        let mut chaos = chaos();
        let mut chaos = chaos.lock();
        chaos.note();
        match rig.machine.outcome() {
            Some(Outcome::Observed | Outcome::Changed) => counted.listed += 1,
            Some(Outcome::Failed) => {
                counted.failed += 1;
                continue;
            }
            Some(Outcome::Held) => {
                counted.held += 1;
                continue;
            }
            _ => continue,
        }
        let now = known(rig);
        for (id, (came, gone)) in &chaos.lives {
            let throughout = *came <= begun && gone.is_none();
            assert!(!throughout || now.contains(id), "seed {seed}, poll {poll}: {id} existed throughout and is missing");
            if gone.is_none_or(|gone| gone > begun) || !now.contains(id) {
                continue;
            }
            // Deleted before the poll, and still there: only because a deny names it, and it allows nothing.
            let kept = denied.iter().find(|denied| denied.as_str() == id).map(|id| &rig.streams.groups[id].1);
            assert!(
                kept.is_some_and(|group| group.rules.is_empty()),
                "seed {seed}, poll {poll}: {id} was deleted before and is kept"
            );
            counted.withheld += 1;
        }
    }
    {
        let mut chaos = chaos();
        let mut chaos = chaos.lock();
        chaos.busy = false;
        chaos.fake.quiet();
        counted.edits = chaos.step;
    }
    rig.streams.refuse = 0;
    rig.streams.deny(&[]);
    for _ in 0..3 {
        rig.now_ms += 60_000;
        let answer = rig.poll_now(true).await;
        assert!(!matches!(answer, Answer::Failed(_)), "seed {seed}: {answer:?}");
    }
    let mut chaos = chaos();
    let there = chaos.lock().fake.ids();
    // A port that names a taken address is kept out; the addresses are random enough that none does.
    assert_eq!(known(rig), there, "seed {seed}: not equal once it is quiet");
    counted
}

/// However the model is shared.
enum MutexedChaos<F: Edited> {
    Near(Arc<Mutex<Chaos<F>>>),
    Served(Shared<Chaos<F>>),
}

impl<F: Edited> MutexedChaos<F> {
    fn lock(&mut self) -> MutexGuard<'_, Chaos<F>> {
        match self {
            Self::Near(chaos) => chaos.lock().expect("nobody panicked"),
            Self::Served(shared) => shared.lock(),
        }
    }
}

fn secret() -> groupcast_control::source::session::Secret {
    Arc::new(|| Ok("secret".to_owned()))
}

fn report(what: &str, seeds: u64, all: &Counted) {
    println!(
        "{what}: {seeds} schedules, {} listings, {} failed, {} held back, {} kept by denies, {} edits",
        all.listed, all.failed, all.held, all.withheld, all.edits
    );
    assert!(all.listed > 0 && all.failed > 0, "faults and listings both happen");
}

fn add(all: &mut Counted, one: &Counted) {
    all.listed += one.listed;
    all.failed += one.failed;
    all.held += one.held;
    all.withheld += one.withheld;
    all.edits += one.edits;
}

#[tokio::test]
async fn a_cloud_controller_under_random_schedules() {
    let mut all = Counted::default();
    for seed in seeds() {
        let page_size = 4 + seed as usize % 9;
        let chaos = Arc::new(Mutex::new(Chaos::new(CloudController::default(), seed, capacity(page_size).min(30))));
        let uaa = Uaa { client_id: "groupcast".into(), secret: secret() };
        let source = cloud_controller::CloudController::new("cf".parse().expect("an id"), page_size, uaa);
        let mut rig = Rig::new("cf", "cloud-controller", Near { transport: Local::new(chaos.clone()), source });
        add(&mut all, &run(seed, || MutexedChaos::Near(chaos.clone()), &mut rig, POLLS).await);
        // Not only which groups there are, but what they say.
        let chaos = chaos.lock().expect("nobody panicked");
        for group in &chaos.fake.groups {
            let port = group.rules[0]["ports"].as_str().expect("a port").to_owned();
            let held = rig.named(&group.name).rules[0].rule.to_string();
            assert!(held.contains(&format!("tcp {port} ")), "seed {seed}: {held} is not {port}");
        }
    }
    report("cloud controller", seeds().end, &all);
    assert!(all.held > 0 && all.withheld > 0);
}

#[tokio::test]
async fn neutron_under_random_schedules() {
    let mut all = Counted::default();
    let seeds = 0..seeds().end / 2;
    for seed in seeds.clone() {
        let chaos = Arc::new(Mutex::new(Chaos::new(Neutron::default(), seed, 20)));
        let keystone = Keystone { credential: Credential::Application { id: "application".into(), secret: secret() } };
        let source = neutron::Neutron::new("os".parse().expect("an id"), 3 + seed as usize % 5, keystone);
        let mut rig = Rig::new("os", "neutron", Near { transport: Local::new(chaos.clone()), source });
        add(&mut all, &run(seed, || MutexedChaos::Near(chaos.clone()), &mut rig, POLLS).await);
        let chaos = chaos.lock().expect("nobody panicked");
        for group in chaos.fake.all("security-groups") {
            let rules = chaos.fake.all("security-group-rules").filter(|rule| rule["security_group_id"] == group["id"]);
            assert_eq!(rig.named(group["name"].as_str().expect("text")).rules.len(), rules.count(), "seed {seed}");
        }
    }
    report("neutron", seeds.end, &all);
}

/// A few of the same over real HTTP.
#[tokio::test]
async fn schedules_over_http() {
    let mut all = Counted::default();
    let seeds = if std::env::var_os("GROUPCAST_FULL").is_some() { 100 } else { 4 };
    for seed in 0..seeds {
        let folder = Folder::new();
        let shared = Shared::new(Chaos::new(CloudController::default(), seed, 20));
        let server = Server::start(0, None, true, shared.clone()).await.expect("it serves");
        let config = json!({
            "kind": "cloud-controller", "id": "cf", "url": server.url(), "internal_url": server.url(), "uaa_url": server.url(),
            "client_id": "groupcast", "client_secret_file": folder.write("secret", "secret"), "page_size": 9, "timeout": "200ms",
        });
        let mut rig = Rig::new("cf", "cloud-controller", poller(&config));
        add(&mut all, &run(seed, || MutexedChaos::Served(shared.clone()), &mut rig, 6).await);
    }
    report("over HTTP", seeds, &all);
}
