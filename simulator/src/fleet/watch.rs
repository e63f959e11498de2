//! The checkers at every simulated host: what it receives, and every state it puts in force.
//!
//! Each version of a group is a function of the group and its mark, and carries the mark in its members and, if it is odd, in its rules.
//! So whoever holds a version can be asked, at any moment and without knowing anybody else: is it one that was written, whole, and
//! not older than what was there before?

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use groupcast_policy::doc::{Content, Document};
use groupcast_policy::topic::Topic;
use groupcast_topics::reader::{self, Commit, Incident, Reader};

use super::machine::Machine;
use super::marks::Marks;
use super::outside::is_sourced;
use super::topology::{MARKS, MARKS_MAX, World, has_rule, rule_key_of};
use super::trouble::{Sabotage, Trouble};
use crate::bench::fleet::Finish;
use crate::host::{Delivered, Observer};
use crate::lean::{MessageFrame, Stall};
use crate::random::Random;

/// What everybody listens to beside topics: as long as the subject of a group's members.
pub const RAW_SUBJECT: &str = "plain.members.00000000-3f0c-4a53-9d0e-6f2c51b7a9d";
/// Violations that are told one by one.
pub const VIOLATIONS_MAX: usize = 40;

/// Headers and payload of a delta.
pub type Sample = (Vec<(String, String)>, Vec<u8>);

/// What the fleet tells all its hosts, and they it.
pub struct Shared {
    pub world: Arc<World>,
    pub marks: Marks,
    /// How hosts read topics.
    pub reading: Arc<reader::Settings>,
    pub address: std::net::SocketAddr,
    pub reconnect_jitter: Duration,
    pub sabotage: Option<Sabotage>,
    /// The run is over: who is cut off stays away.
    pub ended: AtomicBool,
    pub synced: AtomicU32,
    pub connected: AtomicU32,
    /// Plain messages to everybody, for comparison; and one of ours to make them alike: headers and payload.
    pub raw: Finish,
    pub sample: Mutex<Option<Sample>>,
    /// Everything that must never happen and did; the first few in words.
    pub violations: Mutex<Vec<String>>,
    pub violated: AtomicU64,
    pub unneeded_bytes: AtomicU64,
    /// Deltas that were lost on purpose.
    pub lost: AtomicU64,
    /// The most that a host ever held back.
    pub pending_max: AtomicUsize,
}

impl Shared {
    pub fn new(world: Arc<World>, marks: Marks, address: std::net::SocketAddr, reconnect_jitter: Duration) -> Self {
        Self {
            world,
            marks,
            reading: Arc::default(),
            address,
            reconnect_jitter,
            sabotage: None,
            ended: AtomicBool::new(false),
            synced: AtomicU32::new(0),
            connected: AtomicU32::new(0),
            raw: Finish::default(),
            sample: Mutex::new(None),
            violations: Mutex::new(Vec::new()),
            violated: AtomicU64::new(0),
            unneeded_bytes: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            pending_max: AtomicUsize::new(0),
        }
    }

    pub fn violated(&self, words: String) {
        self.violated.fetch_add(1, Ordering::Relaxed);
        let mut all = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < VIOLATIONS_MAX {
            all.push(format!("at {:.3} s: {words}", self.marks.now_s()));
        }
    }
}

/// The versions that a document of members carries: the lowest and the highest mark.
fn marks_of(document: &Document) -> Option<(u32, u32)> {
    let members = document.members()?;
    let mut marks = members.v4.range(MARKS..=MARKS + MARKS_MAX);
    let first = marks.next()?;
    Some((first - MARKS, marks.next_back().unwrap_or(first) - MARKS))
}

/// The version of a group that a reader holds.
pub fn mark_held(world: &World, group: usize, reader: &Reader) -> Option<u32> {
    let document = reader.document(&Topic::Members(world.groups[group].clone()))?;
    marks_of(document).map(|(_, newest)| newest)
}

/// Watches one host.
pub struct Watch {
    shared: Arc<Shared>,
    number: usize,
    machine: Option<Box<Machine>>,
    trouble: Arc<Trouble>,
    random: Random,
    synced: bool,
    /// The newest version seen, by the group's place.
    newest: Box<[u32]>,
}

impl Watch {
    pub fn new(shared: Arc<Shared>, number: usize, machine: Option<Box<Machine>>, trouble: Arc<Trouble>) -> Self {
        let newest = vec![0; shared.world.places(number)].into_boxed_slice();
        Self { shared, number, machine, trouble, random: Random::new(number as u64 ^ 0x10_5e), synced: false, newest }
    }

    /// The connection is gone, or back: what is in force does not depend on it.
    pub fn looked_at(&mut self, reader: &Reader) {
        self.try_out(reader);
        if let Some(Err(words)) = self.machine.as_mut().map(|machine| machine.still_enforces()) {
            self.shared.violated(words);
        }
    }

    pub fn begun_anew(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.adopt();
        }
    }

    /// Whether the host has the group at this place all the time: not the last two, the extra group and what it names.
    fn always_has(&self, place: usize) -> bool {
        place + 2 < self.newest.len()
    }

    fn try_out(&mut self, reader: &Reader) {
        if let Some(Err(words)) = self.machine.as_mut().map(|machine| machine.try_out(reader)) {
            self.shared.violated(words);
        }
    }

    fn violated(&self, topic: &Topic, words: std::fmt::Arguments<'_>) {
        self.shared.violated(format!("host {}, {topic}: {words}", self.shared.world.hosts[self.number]));
    }

    /// Whether the host could ever need what arrived.
    fn needs(&self, subject: &str) -> bool {
        let world = &self.shared.world;
        let mut tokens = subject.split('.').skip(2);
        match (tokens.next(), tokens.next()) {
            (Some("rules" | "members"), Some(id)) => {
                is_sourced(id) || world.index(id).is_some_and(|group| world.place(self.number, group).is_some())
            }
            (Some("host"), Some(id)) => id == world.hosts[self.number].as_str(),
            (Some("scope"), Some(_)) => true,
            _ => false,
        }
    }

    fn check(&mut self, commit: &Commit, reader: &Reader) {
        // The group, and whether its rules are among what was touched.
        let mut touched: Vec<(usize, bool)> = Vec::new();
        for (topic, edit) in &commit.edits {
            if let Topic::Rules(id) | Topic::Members(id) = topic
                && let Some(group) = self.shared.world.index(id.as_str())
            {
                let ruled = matches!(topic, Topic::Rules(_)) || edit.is_none();
                match touched.iter_mut().find(|(known, _)| *known == group) {
                    Some(known) => known.1 |= ruled,
                    None => touched.push((group, ruled)),
                }
            }
        }
        for topic in &commit.dropped {
            if let Topic::Rules(id) | Topic::Members(id) = topic
                && let Some(group) = self.shared.world.index(id.as_str())
                && self.shared.world.place(self.number, group).is_some_and(|place| self.always_has(place))
            {
                self.violated(topic, format_args!("was given up, and is needed"));
            }
        }
        touched.into_iter().for_each(|(group, ruled)| self.check_group(group, ruled, reader));
    }

    fn check_group(&mut self, group: usize, ruled: bool, reader: &Reader) {
        let shared = Arc::clone(&self.shared);
        let topic = Topic::Members(shared.world.groups[group].clone());
        // The extra group comes and goes.
        let Some(members) = reader.document(&topic).filter(|document| document.content().is_some()) else { return };
        let Some(place) = shared.world.place(self.number, group) else {
            return self.violated(&topic, format_args!("is held, and not needed"));
        };
        let revision = reader.revision(&topic);
        let Some((lowest, mark)) = marks_of(members) else {
            return self.violated(&topic, format_args!("is no version that was ever written (revision {revision:?})"));
        };
        if lowest != mark {
            return self.violated(&topic, format_args!("is versions {lowest} and {mark} at once (revision {revision:?})"));
        }
        if mark != 0 && !shared.marks.is_written(mark) {
            return self.violated(&topic, format_args!("is version {mark}, which nobody wrote (revision {revision:?})"));
        }
        let newest = self.newest[place];
        if mark < newest {
            return self.violated(&topic, format_args!("went back from version {newest} to {mark} (revision {revision:?})"));
        }
        let rules = Topic::Rules(shared.world.groups[group].clone());
        // Between two versions without a rule of their own, the rules were right before and have not been touched.
        let may_differ = ruled || has_rule(mark) || has_rule(newest);
        if may_differ && let Some(Content::Rules(held)) = reader.document(&rules).and_then(Document::content) {
            let expected = shared.world.rules(group) + usize::from(has_rule(mark));
            // A version without a rule of its own is told by their number alone: most are, and this is looked at for every arrival.
            let lacks = || !rule_key_of(mark).is_some_and(|key| held.rules.contains_key(&key));
            if held.rules.len() != expected || has_rule(mark) && lacks() {
                let count = held.rules.len();
                self.violated(
                    &rules,
                    format_args!(
                        "is another version than its members, {mark}: the change is there in part ({count} rules, {expected} in that version)"
                    ),
                );
            }
        }
        if mark > newest {
            self.newest[place] = mark;
            // Of the group that comes and goes, the version that is found there may be of long ago: it was not on its way since.
            if self.always_has(place) {
                shared.marks.arrived(mark);
            }
        }
    }
}

impl Observer for Watch {
    fn on_delivery(&mut self, message: &MessageFrame<'_>) -> bool {
        if message.subject == RAW_SUBJECT {
            self.shared.raw.arrive();
            return false;
        }
        let marks = &self.shared.marks;
        // As on the wire: control line, headers and payload.
        let line = message.subject.len() + 24;
        let bytes = (message.payload.len() + message.headers.raw().len() + line) as u64;
        marks.deliveries.fetch_add(1, Ordering::Relaxed);
        marks.delivered_bytes.fetch_add(bytes, Ordering::Relaxed);
        if !self.needs(message.subject) {
            self.shared.unneeded_bytes.fetch_add(bytes, Ordering::Relaxed);
            let host = &self.shared.world.hosts[self.number];
            self.shared.violated(format!("host {host} was sent {bytes} bytes of {}, which it does not need", message.subject));
        }
        let loss = self.trouble.loss_percent(marks.begun());
        if loss > 0 && self.random.next() % 100 < u64::from(loss) {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        if self.number == 0 && message.subject.contains(".members.") {
            let mut sample = self.shared.sample.lock().unwrap_or_else(PoisonError::into_inner);
            let headers = || message.headers.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            sample.get_or_insert_with(|| (headers(), message.payload.to_vec()));
        }
        true
    }

    fn on_commit(&mut self, commit: &Commit, reader: &Reader) {
        if !std::mem::replace(&mut self.synced, true) {
            self.shared.synced.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.pending_max.fetch_max(reader.pending(), Ordering::Relaxed);
        if let Some(machine) = &mut self.machine
            && let Err(words) = machine.commit(commit, reader)
        {
            self.shared.violated(words);
        }
        self.check(commit, reader);
    }

    fn before_event(&mut self, reader: &Reader) {
        self.try_out(reader);
    }

    fn on_incident(&mut self, incident: Incident) {
        self.shared.marks.incident(&incident);
    }

    fn stall(&self) -> Option<Stall> {
        self.trouble.stall(self.shared.marks.begun())
    }

    fn sabotaged(&self, delta: Delivered<'_>, reader: &Reader) -> Option<(u64, Vec<u8>)> {
        self.shared.sabotage?.alter(delta, reader)
    }
}
