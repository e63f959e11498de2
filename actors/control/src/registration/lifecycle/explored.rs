//! Every interleaving, up to a bound, of two hosts that want one address, two controllers, and what can befall them: requests that are
//! looked into now and written later, also those of an earlier boot, beats heard by one controller and not by the other, crashes and
//! reboots, takeovers, controllers cut off from the bus or started anew, writes that are decided now and happen later or never.
//!
//! Checked in every state: one holder of the address at most, and no claim without its entry; nobody is deleted who was heard of
//! within lease and grace by whoever decided it, nor by anybody who does not lead. And from every state on, if nothing more befalls
//! anybody, the dead are gone, the living enrolled, and nobody suspect.
//!
//! States that behave alike are one state: see [`key`]. Visited ones are remembered by a hash of 128 bits.

mod key;

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasherDefault;
use std::sync::LazyLock;
use std::time::Duration;

use self::key::Own;
use super::*;

const HOSTS: usize = 2;
const CONTROLLERS: usize = 2;
/// One step of the clock; lease and grace are two and one of them.
const STEP_MS: u64 = 100;
const LEASE_STEPS: u64 = 2;
const GRACE_STEPS: u64 = 1;
/// As long as a lease, so that who enrols after a deletion and falls silent meets the guard.
const WINDOW_STEPS: u64 = 2;
/// What lies this far back is over for everybody.
const PAST_STEPS: u64 = 3;
/// Requests on their way at once.
const REQUESTS_MAX: usize = 2;
const BOOTS_MAX: u8 = 2;

fn settings() -> Settings {
    Settings {
        lease: Duration::from_millis(LEASE_STEPS * STEP_MS),
        grace: Duration::from_millis(GRACE_STEPS * STEP_MS),
        sweep: Duration::from_millis(STEP_MS),
        guard_window: Duration::from_millis(WINDOW_STEPS * STEP_MS),
        guard_percent: 5,
        guard_hosts: 20,
        deletions_per_second: 1_000,
    }
}

#[derive(Debug, Clone)]
struct Entry {
    sequence: u64,
    enrolled: Enrolled,
}

#[derive(Debug, Clone, Default)]
struct Machine {
    alive: bool,
    boot: u8,
    /// It was told that it is enrolled, and not that it is gone: it does not ask again.
    content: bool,
}

/// What a host has asked a registrar for, and what that found.
#[derive(Debug, Clone)]
struct Request {
    host: usize,
    boot: u8,
    leave: bool,
    /// The sequences of the host's entry and of the address when the registrar looked.
    looked: (u64, u64),
}

/// A controller, what it has ordered and not yet written, and, beside it and from scratch, since when silence may count for it.
#[derive(Debug, Clone)]
struct Control {
    lifecycle: Lifecycle,
    /// Nothing reaches it, and nothing it sends arrives.
    cut: bool,
    orders: Vec<Effect>,
    floor: u64,
    heard: [u64; HOSTS],
}

#[derive(Debug, Clone)]
struct World {
    now: u64,
    sequence: u64,
    /// The entry of each host; if there is none, the sequence of its trace.
    registry: [Result<Entry, u64>; HOSTS],
    /// Who holds the address, and the sequence at which that was written.
    claim: (Option<usize>, u64),
    machines: [Machine; HOSTS],
    requests: Vec<Request>,
    controls: [Control; CONTROLLERS],
    leader: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Boot(usize),
    Crash(usize),
    /// A registrar looks into a request of this boot of a host, to enrol or to leave. It may have been on its way for long.
    Look(usize, u8, bool),
    /// And writes, if nothing of it is another by then.
    Commit(usize),
    /// Heard by one controller. That another hears it too is another of these.
    Beat(usize, usize),
    Step,
    Lead(usize),
    /// Killed and started; what it had ordered may still be written before, or never.
    Restart(usize),
    Cut(usize),
    Mend(usize),
    /// One of what a controller has ordered happens.
    Write(usize, usize),
}

static IDS: LazyLock<[HostId; HOSTS]> = LazyLock::new(|| [0, 1].map(|host| format!("h{host}").parse().unwrap()));

fn id(host: usize) -> HostId {
    IDS[host].clone()
}

fn number(host: &HostId) -> usize {
    usize::from(*host != IDS[0])
}

fn boot_name(boot: u8) -> String {
    char::from(b'0' + boot).to_string()
}

fn boot_number(name: &str) -> u8 {
    name.as_bytes()[0] - b'0'
}

impl World {
    fn new() -> Self {
        let control =
            Control { lifecycle: Lifecycle::new(settings()), cut: false, orders: Vec::new(), floor: 0, heard: [0; HOSTS] };
        let mut world = Self {
            // Later than anything that is looked back at.
            now: 10 * PAST_STEPS * STEP_MS,
            sequence: 0,
            registry: [Err(0), Err(0)],
            claim: (None, 0),
            machines: Default::default(),
            requests: Vec::new(),
            controls: [control.clone(), control],
            leader: None,
        };
        (0..CONTROLLERS).for_each(|c| world.act(Action::Restart(c)));
        world.act(Action::Lead(0));
        world.act(Action::Boot(0));
        world.enrol_at_once(0);
        world
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions = vec![Action::Step];
        for (h, machine) in self.machines.iter().enumerate() {
            if machine.alive {
                actions.push(Action::Crash(h));
                let hearing = (0..CONTROLLERS).filter(|c| !self.controls[*c].cut);
                actions.extend(hearing.map(|c| Action::Beat(h, c)));
            } else if machine.boot < BOOTS_MAX {
                actions.push(Action::Boot(h));
            }
            if self.requests.len() < REQUESTS_MAX {
                let asked = (1..=machine.boot).flat_map(|boot| [Action::Look(h, boot, false), Action::Look(h, boot, true)]);
                actions.extend(
                    asked.filter(|action| matches!(*action, Action::Look(h, boot, leave) if !self.refuses(h, boot, leave))),
                );
            }
        }
        actions.extend((0..self.requests.len()).map(Action::Commit));
        for (c, control) in self.controls.iter().enumerate() {
            actions.push(Action::Restart(c));
            actions.push(if control.cut { Action::Mend(c) } else { Action::Cut(c) });
            if self.leader != Some(c) && !control.cut {
                actions.push(Action::Lead(c));
            }
            actions.extend((0..control.orders.len()).map(|at| Action::Write(c, at)));
        }
        actions
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Boot(h) => {
                self.machines[h] = Machine { alive: true, boot: self.machines[h].boot + 1, content: false };
            }
            Action::Crash(h) => self.machines[h].alive = false,
            Action::Look(host, boot, leave) => {
                let looked = (self.sequence_of(host), self.claim.1);
                self.requests.push(Request { host, boot, leave, looked });
            }
            Action::Commit(at) => self.commit(at),
            Action::Beat(h, c) => self.beat(h, c),
            Action::Step => {
                self.now += STEP_MS;
                (0..CONTROLLERS).for_each(|c| self.tell(c, Event::Tick));
            }
            Action::Lead(c) => {
                let other = self.leader.replace(c);
                self.controls[c].floor = self.now;
                self.tell(c, Event::Leading(true));
                // Whoever led learns of it in the same moment here; what it has ordered may still happen.
                if let Some(other) = other {
                    self.tell(other, Event::Leading(false));
                }
            }
            Action::Restart(c) => {
                if self.leader == Some(c) {
                    self.leader = None;
                }
                let lifecycle = Lifecycle::new(settings());
                self.controls[c] = Control { lifecycle, cut: false, orders: Vec::new(), floor: self.now, heard: [0; HOSTS] };
                self.tell_entries(c);
                for event in [Event::Loaded, Event::Connected(true), Event::Tick] {
                    self.tell(c, event);
                }
            }
            Action::Cut(c) => {
                self.tell(c, Event::Connected(false));
                self.controls[c].cut = true;
            }
            Action::Mend(c) => {
                self.controls[c].cut = false;
                self.controls[c].floor = self.now;
                self.tell(c, Event::Connected(true));
                // What it missed it reads now.
                self.tell_entries(c);
            }
            Action::Write(c, at) => {
                let order = self.controls[c].orders.remove(at);
                self.write(c, order);
            }
        }
    }

    fn tell_entries(&mut self, c: usize) {
        for h in 0..HOSTS {
            let (sequence, enrolled) = match self.registry[h].clone() {
                Ok(Entry { sequence, enrolled }) => (sequence, Some(enrolled)),
                Err(sequence) => (sequence, None),
            };
            if enrolled.as_ref().is_some_and(|entry| !entry.suspect) {
                self.controls[c].heard[h] = self.now;
            }
            self.tell(c, Event::Entry { host: id(h), sequence, enrolled });
        }
    }

    fn tell(&mut self, c: usize, event: Event) {
        let now = self.now;
        let control = &mut self.controls[c];
        for effect in control.lifecycle.handle(event, now) {
            match effect {
                Effect::Delete { ref host, .. } => {
                    let silent = now - control.heard[number(host)].max(control.floor);
                    let due = (LEASE_STEPS + GRACE_STEPS) * STEP_MS;
                    assert!(self.leader == Some(c) && !control.cut, "deleted by {c}, who does not lead or is cut off");
                    assert!(silent >= due, "deleted by {c} after {silent} ms");
                    control.orders.push(effect);
                }
                Effect::Suspect { .. } | Effect::Live { .. } => control.orders.push(effect),
                Effect::Tell { ref host, .. } => self.machines[number(host)].content = false,
                Effect::Guard { .. } => {}
            }
        }
    }

    fn beat(&mut self, h: usize, c: usize) {
        self.controls[c].heard[h] = self.now;
        let boot = boot_name(self.machines[h].boot);
        self.tell(c, Event::Beat { host: id(h), boot, answer: Some("t".into()) });
    }

    fn sequence_of(&self, h: usize) -> u64 {
        self.registry[h].as_ref().map_or_else(|trace| *trace, |entry| entry.sequence)
    }

    /// What a registrar that looks at it now will not write.
    fn refuses(&self, h: usize, boot: u8, leave: bool) -> bool {
        match (leave, &self.registry[h]) {
            (true, Ok(entry)) => entry.enrolled.boot != boot_name(boot),
            (true, Err(_)) => true,
            (false, _) => self.claim.0.is_some_and(|holder| holder != h),
        }
    }

    /// Entry and claim in one batch, if both are as they were when the registrar looked; whoever was refused asks again.
    fn commit(&mut self, at: usize) {
        let Request { host, boot, leave, looked } = self.requests.remove(at);
        if looked != (self.sequence_of(host), self.claim.1) {
            return;
        }
        let enrolled = (!leave).then(|| Enrolled { boot: boot_name(boot), templates: vec!["t".into()], suspect: false });
        let same = self.registry[host].as_ref().ok().map(|entry| &entry.enrolled) == enrolled.as_ref();
        if !same {
            self.put(host, enrolled);
        }
        let machine = &mut self.machines[host];
        if machine.boot == boot {
            machine.content = !leave;
        }
    }

    fn enrol_at_once(&mut self, h: usize) {
        let Machine { boot, content, .. } = self.machines[h];
        if !content && !self.refuses(h, boot, false) {
            self.act(Action::Look(h, boot, false));
            self.commit(self.requests.len() - 1);
        }
    }

    fn put(&mut self, h: usize, enrolled: Option<Enrolled>) {
        self.sequence += 1;
        let sequence = self.sequence;
        match (&enrolled, self.claim.0) {
            (Some(_), Some(holder)) => assert_eq!(holder, h, "two hold the address"),
            (Some(_), None) => self.claim = (Some(h), sequence),
            (None, Some(holder)) if holder == h => self.claim = (None, sequence),
            (None, _) => {}
        }
        self.registry[h] = match enrolled.clone() {
            Some(enrolled) => Ok(Entry { sequence, enrolled }),
            None => Err(sequence),
        };
        for c in (0..CONTROLLERS).filter(|c| !self.controls[*c].cut).collect::<Vec<_>>() {
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
        let found = self.registry[h].clone().ok().filter(|entry| entry.sequence == expected && !self.controls[c].cut);
        let deleted = found.is_some() && suspect.is_none();
        if let Some(Entry { enrolled, .. }) = found {
            self.put(h, suspect.map(|suspect| Enrolled { suspect, ..enrolled }));
        }
        self.tell(c, Event::Done { host, deleted });
    }

    fn check(&self) {
        let holders: Vec<usize> = (0..HOSTS).filter(|h| self.registry[*h].is_ok()).collect();
        assert!(holders.len() <= 1, "two hold one address: {self:#?}");
        assert_eq!(self.claim.0, holders.first().copied(), "a claim without its entry, or the other way round: {self:#?}");
    }

    /// One round in which nothing more befalls anybody: machines that live ask and beat, one controller leads, orders happen.
    fn live_on(&mut self) {
        for c in 0..CONTROLLERS {
            if self.controls[c].cut {
                self.act(Action::Mend(c));
            }
        }
        if self.leader.is_none() {
            self.act(Action::Lead(0));
        }
        while !self.requests.is_empty() {
            self.act(Action::Commit(0));
        }
        for h in (0..HOSTS).filter(|h| self.machines[*h].alive).collect::<Vec<_>>() {
            self.enrol_at_once(h);
            (0..CONTROLLERS).for_each(|c| self.act(Action::Beat(h, c)));
        }
        self.act(Action::Step);
        for c in 0..CONTROLLERS {
            while !self.controls[c].orders.is_empty() {
                self.act(Action::Write(c, 0));
                self.check();
            }
        }
    }

    /// What is wrong with it, for a state in which nothing has befallen anybody for long.
    fn wrong(&self) -> Option<&'static str> {
        let alive = self.machines.iter().filter(|machine| machine.alive).count();
        for h in 0..HOSTS {
            match (self.machines[h].alive, &self.registry[h]) {
                (false, Ok(_)) => return Some("a dead host stays"),
                (true, Err(_)) if alive == 1 => return Some("a living host is not enrolled"),
                (true, Ok(entry)) if entry.enrolled.suspect => return Some("a living host stays suspect"),
                (true, Ok(entry)) if entry.enrolled.boot != boot_name(self.machines[h].boot) => {
                    return Some("an earlier boot stays enrolled");
                }
                _ => {}
            }
        }
        (self.claim.0.is_some() != (alive > 0)).then_some("the address is held by nobody who lives, or by nobody at all")
    }
}

#[derive(Default)]
struct Exploration {
    depth_max: u8,
    /// The least number of steps in which each state was reached.
    seen: HashMap<u128, u8, BuildHasherDefault<Own>>,
    /// From these on all goes well if nothing more befalls anybody.
    proven: HashSet<u128, BuildHasherDefault<Own>>,
    steps: u64,
    path: Vec<Action>,
}

impl Exploration {
    fn visit(&mut self, world: &World, depth: u8) {
        let key = world.key();
        match self.seen.get(&key) {
            Some(before) if *before <= depth => return,
            Some(_) => {}
            None => {
                world.check();
                self.settles(world, key);
            }
        }
        self.seen.insert(key, depth);
        if depth == self.depth_max {
            return;
        }
        for action in world.actions() {
            let mut next = world.clone();
            self.path.push(action);
            next.act(action);
            self.steps += 1;
            self.visit(&next, depth + 1);
            self.path.pop();
        }
    }

    /// Whether all goes well from this state on.
    fn settles(&mut self, world: &World, key: u128) {
        if self.proven.contains(&key) {
            return;
        }
        let (mut on, mut passed) = (world.clone(), vec![key]);
        // Twice lease, grace and window: whoever takes over last waits for all of them, and a thaw gives a grace of its own.
        for _ in 0..2 * (LEASE_STEPS + GRACE_STEPS + WINDOW_STEPS) + 2 {
            on.live_on();
            let key = on.key();
            if self.proven.contains(&key) {
                return self.proven.extend(passed);
            }
            passed.push(key);
        }
        if let Some(wrong) = on.wrong() {
            panic!("{wrong} after {:?}: {world:#?} ends as {on:#?}", self.path);
        }
        self.proven.extend(passed);
    }
}

#[test]
fn every_interleaving_up_to_a_bound() {
    let full = std::env::var_os("GROUPCAST_FULL").is_some();
    let begun = std::time::Instant::now();
    let depth_max = match std::env::var("GROUPCAST_DEPTH").ok().and_then(|text| text.parse().ok()) {
        Some(depth) => depth,
        None if full => 14,
        None => 8,
    };
    let mut exploration = Exploration { depth_max, ..Exploration::default() };
    exploration.visit(&World::new(), 0);
    let states = exploration.seen.len();
    eprintln!("depth {depth_max}: {states} states, {} steps, {:?}", exploration.steps, begun.elapsed());
    assert!(states > 10_000 || depth_max < 8, "the world is too small to show anything");
}
