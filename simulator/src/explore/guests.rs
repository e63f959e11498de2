//! Hosts that register themselves, beside the topics of the explored world: they enrol, beat, crash, boot again, leave and fall silent; each
//! controller keeps the real machine of who is silent for how long, told what it would hear on the bus, and leads when the controller
//! does. Entries are written by compare-and-swap, and what is registered is what the world's policy is compiled from.
//!
//! Checked all the time: an address has one holder, and its entry; nobody is deleted who was heard of within lease and grace by whoever decides
//! it; a life never goes back, and the same life enrolled again changes nothing. Checked in the end: the dead are gone, the living enrolled.

mod entries;

use std::collections::BTreeMap;
use std::time::Duration;

use groupcast_control::document::Enrolled;
use groupcast_control::registration::lifecycle::{Effect, Event, Lifecycle};
use groupcast_control::registration::settings::Settings;
use groupcast_enforce::trial;
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model;
use groupcast_topics::random::Random;
use groupcast_topics::sim::Moment;

/// The first two want one address; the last three have one template, so that too many of them can be silent at once.
const GUESTS: usize = 6;
const OF_ONE_TEMPLATE: std::ops::Range<usize> = 3..GUESTS;
const BEAT_MS: u64 = 300;
const LEASE_MS: u64 = 1_200;
const GRACE_MS: u64 = 600;
const SWEEP_MS: u64 = 100;
/// A message's way, at most; a write's too.
const WAY_MS: u64 = 60;
/// A host that was refused, or heard nothing, tries again.
const RETRY_MS: u64 = 500;
/// After things stop to go wrong: long enough for the last lease and grace, from whenever somebody leads.
const SETTLED_MS: u64 = 60_000;

fn settings() -> Settings {
    Settings {
        lease: Duration::from_millis(LEASE_MS),
        grace: Duration::from_millis(GRACE_MS),
        sweep: Duration::from_millis(SWEEP_MS),
        guard_window: Duration::from_millis(LEASE_MS),
        guard_percent: 5,
        guard_hosts: 20,
        deletions_per_second: 1_000,
    }
}

/// How often things go wrong, in thousandths, and what is left out on purpose.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    pub lose: u64,
    pub crash: u64,
    /// Controllers are not told that they were cut off, so that silence they could not have heard counts.
    pub deaf: bool,
}

#[derive(Debug, Clone, Default)]
struct Guest {
    alive: bool,
    boot: u64,
    beat_at_ms: u64,
    /// It knows of no entry of this boot, and asks for one.
    enrol_at_ms: Option<u64>,
}

#[derive(Debug, Clone)]
struct Entry {
    sequence: u64,
    enrolled: Enrolled,
    incarnation: u64,
}

struct Control {
    process: u64,
    connected: bool,
    leads: bool,
    lifecycle: Lifecycle,
    swept_ms: u64,
    /// Beside the machine and from scratch: since when silence may count, and what was heard.
    floor_ms: u64,
    heard_ms: [u64; GUESTS],
    /// Entries arrive in their order.
    last_entry_ms: u64,
}

enum Step {
    Beat { guest: usize, boot: u64, control: usize, process: u64 },
    Enrol { guest: usize, boot: u64 },
    Told { guest: usize },
    Leave { guest: usize, boot: u64 },
    Write { control: usize, process: u64, effect: Effect },
    Entry { control: usize, process: u64, guest: usize, sequence: u64, enrolled: Option<Enrolled> },
}

pub struct Guests {
    rates: Rates,
    random: Random,
    now_ms: u64,
    guests: Vec<Guest>,
    registry: Vec<Option<Entry>>,
    /// The last life of each, also when it is over.
    lives: Vec<(u64, String)>,
    sequence: u64,
    controls: Vec<Control>,
    steps: BTreeMap<(u64, u64), Step>,
    next_step: u64,
    quiet_since_ms: Option<u64>,
    changed: Vec<model::Event>,
    failure: Option<String>,
    pub deletions: u64,
    pub enrolments: u64,
}

fn id(guest: usize) -> HostId {
    HostId::new(&format!("guest{guest}")).unwrap_or_else(|_| trial::host())
}

fn number(host: &HostId) -> Option<usize> {
    host.as_str().strip_prefix("guest")?.parse().ok()
}

/// Whose address it is: the first two want the same.
fn address(guest: usize) -> usize {
    guest.max(1)
}

fn template(guest: usize) -> String {
    if OF_ONE_TEMPLATE.contains(&guest) { "many".to_owned() } else { format!("one{guest}") }
}

fn workload_of(guest: usize) -> Option<(WorkloadId, NetworkId)> {
    Some((WorkloadId::new(&format!("guest{guest}")).ok()?, NetworkId::new("n0").ok()?))
}

impl Guests {
    pub fn new(seed: u64, controllers: usize, rates: Rates) -> Self {
        let mut random = Random::new(seed ^ 0x6_7e57);
        let control = |_| Control {
            process: 0,
            connected: false,
            leads: false,
            lifecycle: Lifecycle::new(settings()),
            swept_ms: 0,
            floor_ms: 0,
            heard_ms: [0; GUESTS],
            last_entry_ms: 0,
        };
        let guests = (0..GUESTS).map(|_| Guest { beat_at_ms: random.below(BEAT_MS), ..Guest::default() }).collect();
        Self {
            rates,
            random,
            now_ms: 0,
            guests,
            registry: vec![None; GUESTS],
            lives: vec![(0, String::new()); GUESTS],
            sequence: 0,
            controls: (0..controllers).map(control).collect(),
            steps: BTreeMap::new(),
            next_step: 0,
            quiet_since_ms: None,
            changed: Vec::new(),
            failure: None,
            deletions: 0,
            enrolments: 0,
        }
    }

    /// What has become of the registry since the last time, as events for the compiler.
    pub fn passed(&mut self, moment: &Moment<'_>) -> Result<Vec<model::Event>, String> {
        if !moment.active {
            let since = *self.quiet_since_ms.get_or_insert(moment.now_ms);
            if moment.now_ms > since + SETTLED_MS {
                return Ok(Vec::new());
            }
        }
        while let Some(entry) = self.steps.first_entry().filter(|entry| entry.key().0 <= moment.now_ms) {
            self.now_ms = self.now_ms.max(entry.key().0);
            let step = entry.remove();
            self.step(step);
        }
        self.now_ms = moment.now_ms;
        for index in 0..self.controls.len() {
            self.follow(index, moment);
        }
        if moment.active {
            self.befall();
        }
        for guest in 0..GUESTS {
            self.live(guest);
        }
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(std::mem::take(&mut self.changed)),
        }
    }

    fn schedule(&mut self, at_ms: u64, step: Step) {
        self.next_step += 1;
        self.steps.insert((at_ms, self.next_step), step);
    }

    fn way(&mut self) -> u64 {
        self.now_ms + 1 + self.random.below(WAY_MS)
    }

    fn chance(&mut self, thousandths: u64) -> bool {
        self.random.below(1_000) < thousandths
    }

    fn befall(&mut self) {
        let guest = self.random.below(GUESTS as u64) as usize;
        let rate = self.rates.crash;
        if !self.guests[guest].alive {
            if self.chance(rate * 4) {
                let Guest { alive, boot, enrol_at_ms, .. } = &mut self.guests[guest];
                (*alive, *boot, *enrol_at_ms) = (true, *boot + 1, Some(self.now_ms));
            }
        } else if self.chance(rate) {
            self.guests[guest].alive = false;
        } else if self.chance(rate / 2) {
            // It leaves in peace: its last word may still be lost.
            self.guests[guest].alive = false;
            let (at, boot) = (self.way(), self.guests[guest].boot);
            self.schedule(at, Step::Leave { guest, boot });
        }
    }

    /// What a host does by itself.
    fn live(&mut self, guest: usize) {
        let Guest { alive, boot, beat_at_ms, enrol_at_ms } = self.guests[guest];
        if !alive {
            return;
        }
        if enrol_at_ms.is_some_and(|at| at <= self.now_ms) {
            self.guests[guest].enrol_at_ms = Some(self.now_ms + RETRY_MS);
            if !self.chance(self.rates.lose) && self.controls.iter().any(|control| control.connected) {
                let at = self.way();
                self.schedule(at, Step::Enrol { guest, boot });
            }
        }
        if beat_at_ms <= self.now_ms {
            self.guests[guest].beat_at_ms = self.now_ms + BEAT_MS / 2 + self.random.below(BEAT_MS);
            for control in 0..self.controls.len() {
                if self.controls[control].connected && !self.chance(self.rates.lose) {
                    let (at, process) = (self.way(), self.controls[control].process);
                    self.schedule(at, Step::Beat { guest, boot, control, process });
                }
            }
        }
    }

    /// A controller as it is now: begun anew, cut off or back, leading or not; and its regular look.
    fn follow(&mut self, index: usize, moment: &Moment<'_>) {
        let Some(now) = moment.controllers.get(index) else { return };
        if self.controls[index].process != now.process {
            let control = &mut self.controls[index];
            control.lifecycle = Lifecycle::new(settings());
            (control.process, control.connected, control.leads) = (now.process, false, false);
            (control.floor_ms, control.heard_ms, control.last_entry_ms) = (self.now_ms, [0; GUESTS], 0);
        }
        if self.controls[index].connected != now.connected {
            let was_told = self.controls[index].lifecycle.hosts() > 0;
            (self.controls[index].connected, self.controls[index].floor_ms) = (now.connected, self.now_ms);
            if now.connected {
                self.reload(index);
            }
            // Left out: whoever knew hosts before does not hear that it was deaf.
            if !(self.rates.deaf && was_told) {
                self.tell(index, Event::Connected(now.connected));
            }
        }
        if self.controls[index].leads != now.leads {
            (self.controls[index].leads, self.controls[index].floor_ms) = (now.leads, self.now_ms);
            self.tell(index, Event::Leading(now.leads));
        }
        if self.now_ms >= self.controls[index].swept_ms + SWEEP_MS {
            self.controls[index].swept_ms = self.now_ms;
            self.tell(index, Event::Tick);
        }
    }

    /// Everything that the registry holds, read once.
    fn reload(&mut self, index: usize) {
        for guest in 0..GUESTS {
            let entry = self.registry[guest].clone();
            let (sequence, enrolled) = entry.map_or((self.sequence, None), |entry| (entry.sequence, Some(entry.enrolled)));
            self.hear_entry(index, guest, sequence, enrolled);
        }
        self.tell(index, Event::Loaded);
    }

    fn hear_entry(&mut self, control: usize, guest: usize, sequence: u64, enrolled: Option<Enrolled>) {
        if enrolled.as_ref().is_some_and(|enrolled| !enrolled.suspect) {
            self.controls[control].heard_ms[guest] = self.now_ms;
        }
        self.tell(control, Event::Entry { host: id(guest), sequence, enrolled });
    }

    fn tell(&mut self, index: usize, event: Event) {
        let now_ms = self.now_ms;
        for effect in self.controls[index].lifecycle.handle(event, now_ms) {
            match &effect {
                Effect::Delete { host, .. } => {
                    let control = &self.controls[index];
                    let Some(guest) = number(host) else { continue };
                    let silent_ms = now_ms - control.heard_ms[guest].max(control.floor_ms);
                    if !control.leads || !control.connected || silent_ms < LEASE_MS + GRACE_MS {
                        self.failure = Some(format!(
                            "controller {index} deletes {host} after {silent_ms} ms in which it could have heard it"
                        ));
                    }
                }
                Effect::Tell { host, .. } => {
                    let (Some(guest), at) = (number(host), self.way()) else { continue };
                    if !self.chance(self.rates.lose) {
                        self.schedule(at, Step::Told { guest });
                    }
                    continue;
                }
                Effect::Guard { .. } => continue,
                Effect::Suspect { .. } | Effect::Live { .. } => {}
            }
            let (at, process) = (self.way(), self.controls[index].process);
            self.schedule(at, Step::Write { control: index, process, effect });
        }
    }

    fn step(&mut self, step: Step) {
        let current = |guests: &Self, control: usize, process: u64| {
            guests.controls.get(control).is_some_and(|control| control.process == process && control.connected)
        };
        match step {
            Step::Beat { guest, boot, control, process } => {
                if current(self, control, process) {
                    self.controls[control].heard_ms[guest] = self.now_ms;
                    self.tell(control, Event::Beat { host: id(guest), boot: boot.to_string(), answer: Some("answer".into()) });
                }
            }
            Step::Told { guest } => self.guests[guest].enrol_at_ms = Some(self.now_ms),
            Step::Enrol { guest, boot } => self.enrol(guest, boot),
            Step::Leave { guest, boot } => {
                let own = |entry: &Entry| entry.enrolled.boot == boot.to_string();
                if self.registry[guest].as_ref().is_some_and(own) {
                    self.put(guest, None);
                }
            }
            Step::Write { control, process, effect } => self.write(control, process, &effect),
            Step::Entry { control, process, guest, sequence, enrolled } => {
                if current(self, control, process) {
                    self.hear_entry(control, guest, sequence, enrolled);
                }
            }
        }
    }

    /// The dead are gone, unless so many of one template fell silent that nobody believes it; the living are enrolled, one for each address.
    pub fn settled(&self) -> Result<(), String> {
        let leader =
            self.controls.iter().find(|control| control.leads && control.connected).ok_or("nobody leads the registry")?;
        for guest in 0..GUESTS {
            let (Guest { alive, boot, .. }, host) = (&self.guests[guest], id(guest));
            match (&self.registry[guest], *alive) {
                (Some(entry), true) if entry.enrolled.suspect => return Err(format!("{host} lives and is suspect")),
                (Some(entry), true) if entry.enrolled.boot != boot.to_string() => {
                    return Err(format!("{host} is enrolled with boot {}, and has booted {boot} times", entry.enrolled.boot));
                }
                (Some(_), false) => {
                    let frozen = leader.lifecycle.seen(&host, self.now_ms).is_some_and(|seen| seen.frozen);
                    if !frozen {
                        return Err(format!("{host} is dead and still enrolled"));
                    }
                }
                (None, true) => {
                    let refused = (0..GUESTS)
                        .any(|other| other != guest && address(other) == address(guest) && self.registry[other].is_some());
                    if !refused {
                        return Err(format!("{host} lives and is not enrolled"));
                    }
                }
                (Some(_), true) | (None, false) => {}
            }
        }
        Ok(())
    }
}
