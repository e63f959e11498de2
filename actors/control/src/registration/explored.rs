//! Every interleaving, up to a bound, of two hosts that want one address, two controllers, and what can befall them: beats heard and
//! lost, crashes and reboots, takeovers, writes that are decided now and happen later. Checked in every state: one holder of the
//! address at most and no claim without its entry; nobody is deleted who was heard of within lease and grace by whoever decided it; and
//! from every state on, if nothing more befalls anybody, the dead are gone and the living enrolled.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Duration;

use groupcast_policy::ids::HostId;

use super::lifecycle::{Effect, Event, Lifecycle};
use super::settings::Settings;
use crate::document::Enrolled;

const HOSTS: usize = 2;
const CONTROLLERS: usize = 2;
/// One step of the clock; lease and grace are two and one of them.
const STEP_MS: u64 = 100;
const LEASE_STEPS: u64 = 2;
const GRACE_STEPS: u64 = 1;

fn settings() -> Settings {
    Settings {
        lease: Duration::from_millis(LEASE_STEPS * STEP_MS),
        grace: Duration::from_millis(GRACE_STEPS * STEP_MS),
        sweep: Duration::from_millis(STEP_MS),
        guard_window: Duration::from_millis(STEP_MS),
        guard_percent: 5,
        guard_hosts: 20,
        deletions_per_second: 1_000,
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Entry {
    sequence: u64,
    enrolled: Enrolled,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Machine {
    alive: bool,
    boot: u8,
}

/// A controller, what it has ordered and not yet written, and, beside it and from scratch, since when silence may count for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Control {
    lifecycle: Option<Lifecycle>,
    orders: Vec<Effect>,
    floor: u64,
    heard: [u64; HOSTS],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    now: u64,
    sequence: u64,
    registry: [Option<Entry>; HOSTS],
    /// Who holds the address.
    claim: Option<usize>,
    machines: [Machine; HOSTS],
    controls: [Control; CONTROLLERS],
    leader: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Boot(usize),
    Crash(usize),
    /// Enrols, or tries to, with whatever registrar.
    Enrol(usize),
    Leave(usize),
    /// Heard by all controllers, or by one only.
    Beat(usize, Option<usize>),
    Step,
    Lead(usize),
    Kill(usize),
    Start(usize),
    /// The first or last of what a controller has ordered happens.
    Write(usize, bool),
}

fn id(host: usize) -> HostId {
    format!("h{host}").parse().unwrap()
}

fn number(host: &HostId) -> usize {
    if *host == id(0) { 0 } else { 1 }
}

impl World {
    fn new() -> Self {
        let control = Control { lifecycle: None, orders: Vec::new(), floor: 0, heard: [0; HOSTS] };
        let mut world = Self {
            now: 0,
            sequence: 0,
            registry: Default::default(),
            claim: None,
            machines: Default::default(),
            controls: [control.clone(), control],
            leader: None,
        };
        (0..CONTROLLERS).for_each(|c| world.act(Action::Start(c)));
        world.act(Action::Lead(0));
        world.act(Action::Boot(0));
        world.act(Action::Enrol(0));
        world
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions = vec![Action::Step];
        for (h, machine) in self.machines.iter().enumerate() {
            if machine.alive {
                actions.extend([Action::Crash(h), Action::Enrol(h), Action::Leave(h), Action::Beat(h, None)]);
                actions.extend((0..CONTROLLERS).map(|c| Action::Beat(h, Some(c))));
            } else if machine.boot < 3 {
                actions.push(Action::Boot(h));
            }
        }
        for (c, control) in self.controls.iter().enumerate() {
            match control.lifecycle {
                Some(_) if self.leader != Some(c) => actions.extend([Action::Lead(c), Action::Kill(c)]),
                Some(_) => actions.push(Action::Kill(c)),
                None => actions.push(Action::Start(c)),
            }
            if !control.orders.is_empty() {
                actions.push(Action::Write(c, true));
            }
            if control.orders.len() > 1 {
                actions.push(Action::Write(c, false));
            }
        }
        actions
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Boot(h) => {
                self.machines[h].alive = true;
                self.machines[h].boot += 1;
            }
            Action::Crash(h) => self.machines[h].alive = false,
            Action::Enrol(h) => self.enrol(h),
            Action::Leave(h) => {
                self.put(h, None);
            }
            Action::Beat(h, heard_by) => self.beat(h, heard_by),
            Action::Step => {
                self.now += STEP_MS;
                (0..CONTROLLERS).for_each(|c| self.tell(c, Event::Tick));
            }
            Action::Lead(c) => {
                let others: Vec<usize> = self.leader.into_iter().collect();
                self.leader = Some(c);
                self.controls[c].floor = self.now;
                self.tell(c, Event::Leading(true));
                // Whoever led learns of it in the same moment here; what it has ordered may still happen.
                for other in others {
                    self.tell(other, Event::Leading(false));
                }
            }
            Action::Kill(c) => {
                self.controls[c].lifecycle = None;
                // What was handed to the bus may still happen, or not: Write and a later Start cover both.
                if self.leader == Some(c) {
                    self.leader = None;
                }
            }
            Action::Start(c) => {
                self.controls[c] = Control {
                    lifecycle: Some(Lifecycle::new(settings())),
                    orders: Vec::new(),
                    floor: self.now,
                    heard: [0; HOSTS],
                };
                for h in 0..HOSTS {
                    if let Some(Entry { sequence, enrolled }) = self.registry[h].clone() {
                        self.tell(c, Event::Entry { host: id(h), sequence, enrolled: Some(enrolled) });
                    }
                }
                for event in [Event::Loaded, Event::Connected(true), Event::Tick] {
                    self.tell(c, event);
                }
            }
            Action::Write(c, first) => {
                let at = if first { 0 } else { self.controls[c].orders.len() - 1 };
                let order = self.controls[c].orders.remove(at);
                self.write(c, order);
            }
        }
    }

    fn tell(&mut self, c: usize, event: Event) {
        let now = self.now;
        let Some(lifecycle) = &mut self.controls[c].lifecycle else { return };
        for effect in lifecycle.handle(event, now) {
            match effect {
                Effect::Delete { ref host, .. } => {
                    let control = &self.controls[c];
                    let h = number(host);
                    let silent = now - control.heard[h].max(control.floor);
                    let due = (LEASE_STEPS + GRACE_STEPS) * STEP_MS;
                    assert!(self.leader == Some(c) && silent >= due, "deleted after {silent} ms by {c} of {self:#?}");
                    self.controls[c].orders.push(effect);
                }
                Effect::Suspect { .. } | Effect::Live { .. } => self.controls[c].orders.push(effect),
                // Told at once: it enrols at once.
                Effect::Tell { host, .. } => self.enrol(number(&host)),
                Effect::Guard { .. } => {}
            }
        }
    }

    fn beat(&mut self, h: usize, heard_by: Option<usize>) {
        for c in (0..CONTROLLERS).filter(|c| heard_by.is_none_or(|only| only == *c)) {
            self.controls[c].heard[h] = self.now;
            let boot = self.machines[h].boot.to_string();
            self.tell(c, Event::Beat { host: id(h), boot, answer: Some("t".into()) });
        }
    }

    /// One batch: entry and claim, or nothing.
    fn enrol(&mut self, h: usize) {
        if !self.machines[h].alive || self.claim.is_some_and(|holder| holder != h) {
            return;
        }
        let enrolled = Enrolled { boot: self.machines[h].boot.to_string(), templates: vec![format!("t{h}")], suspect: false };
        if self.registry[h].as_ref().is_none_or(|entry| entry.enrolled != enrolled) {
            self.put(h, Some(enrolled));
        }
    }

    fn put(&mut self, h: usize, enrolled: Option<Enrolled>) {
        if enrolled.is_none() && self.registry[h].is_none() {
            return;
        }
        self.sequence += 1;
        let sequence = self.sequence;
        match &enrolled {
            Some(_) => {
                assert!(self.claim.is_none_or(|holder| holder == h), "two hold the address");
                self.claim = Some(h);
            }
            None if self.claim == Some(h) => self.claim = None,
            None => {}
        }
        self.registry[h] = enrolled.clone().map(|enrolled| Entry { sequence, enrolled });
        for c in 0..CONTROLLERS {
            // Enrolling is a sign of life to everybody who reads it.
            if enrolled.as_ref().is_some_and(|entry| !entry.suspect) {
                self.controls[c].heard[h] = self.now;
            }
            self.tell(c, Event::Entry { host: id(h), sequence, enrolled: enrolled.clone() });
        }
    }

    fn write(&mut self, c: usize, order: Effect) {
        let (host, expected, suspect) = match &order {
            Effect::Suspect { host, sequence, .. } => (host.clone(), *sequence, Some(true)),
            Effect::Live { host, sequence } => (host.clone(), *sequence, Some(false)),
            Effect::Delete { host, sequence, .. } => (host.clone(), *sequence, None),
            Effect::Tell { .. } | Effect::Guard { .. } => return,
        };
        let h = number(&host);
        let found = self.registry[h].clone().filter(|entry| entry.sequence == expected);
        let deleted = found.is_some() && suspect.is_none();
        if let Some(Entry { enrolled, .. }) = found {
            self.put(h, suspect.map(|suspect| Enrolled { suspect, ..enrolled }));
        }
        self.tell(c, Event::Done { host, deleted });
    }

    fn check(&self) {
        let holders: Vec<usize> = (0..HOSTS).filter(|h| self.registry[*h].is_some()).collect();
        assert!(holders.len() <= 1, "two hold one address: {self:#?}");
        assert_eq!(self.claim, holders.first().copied(), "a claim without its entry, or the other way round: {self:#?}");
    }

    /// Nothing more befalls anybody: machines that live beat, one controller leads, what is ordered happens.
    fn settle(mut self) {
        let before = self.clone();
        for c in 0..CONTROLLERS {
            if self.controls[c].lifecycle.is_none() {
                self.act(Action::Start(c));
            }
        }
        let leader = self.leader.unwrap_or(0);
        if self.leader.is_none() {
            self.act(Action::Lead(leader));
        }
        for _ in 0..3 * (LEASE_STEPS + GRACE_STEPS) + 2 {
            for h in (0..HOSTS).filter(|h| self.machines[*h].alive).collect::<Vec<_>>() {
                // Whoever was refused tries again.
                self.act(Action::Enrol(h));
                self.act(Action::Beat(h, None));
            }
            self.act(Action::Step);
            for c in 0..CONTROLLERS {
                while !self.controls[c].orders.is_empty() {
                    self.act(Action::Write(c, true));
                    self.check();
                }
            }
        }
        let alive = self.machines.iter().filter(|machine| machine.alive).count();
        for h in 0..HOSTS {
            match (self.machines[h].alive, &self.registry[h]) {
                (false, Some(_)) => panic!("a dead host stays: {before:#?} ends as {self:#?}"),
                (true, None) if alive == 1 => panic!("a living host is not enrolled: {before:#?} ends as {self:#?}"),
                (true, Some(entry)) => {
                    assert!(!entry.enrolled.suspect, "a living host stays suspect: {before:#?} ends as {self:#?}");
                    assert_eq!(entry.enrolled.boot, self.machines[h].boot.to_string());
                }
                _ => {}
            }
        }
        assert_eq!(self.claim.is_some(), alive > 0, "{before:#?}");
    }
}

#[test]
fn every_interleaving_up_to_a_bound() {
    let full = std::env::var_os("GROUPCAST_FULL").is_some();
    let (depth_max, states_max) = if full { (14, 4_000_000) } else { (7, 60_000) };
    let start = World::new();
    let mut seen: HashSet<World> = HashSet::from([start.clone()]);
    let mut open = VecDeque::from([(start, 0)]);
    let mut by_depth: BTreeMap<usize, usize> = BTreeMap::new();
    while let Some((world, depth)) = open.pop_front() {
        *by_depth.entry(depth).or_default() += 1;
        world.check();
        world.clone().settle();
        if depth == depth_max || seen.len() >= states_max {
            continue;
        }
        for action in world.actions() {
            let mut next = world.clone();
            next.act(action);
            if seen.insert(next.clone()) {
                open.push_back((next, depth + 1));
            }
        }
    }
    eprintln!("{} states, by depth {by_depth:?}", seen.len());
    assert!(seen.len() > 10_000, "the world is too small to show anything");
}
