//! A batch that is waited for, and a host that is.

use groupcast_messages::{Cut, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;

use super::progress::{Summary, Times};
use super::span::{Runs, Span};
use super::{UNREACHABLE_AFTER_MS, Why};
use crate::node::Committed;
use crate::{LISTED_TOPICS_MAX, Map};

/// What is reached of which topic, sorted by topic.
pub(super) type Reached = [(TopicHash, u64)];

pub(super) fn revision(reached: &Reached, topic: TopicHash) -> u64 {
    reached.binary_search_by_key(&topic, |(topic, _)| *topic).map_or(0, |at| reached[at].1)
}

#[derive(Debug)]
pub(super) struct Batch {
    pub cut: Cut,
    pub change: u64,
    /// It carries the changes after this CATALOG sequence ...
    pub after: u64,
    /// ... and up to this one.
    pub catalog: u64,
    pub committed_ms: u64,
    /// Its topics, unless they are tallied.
    pub topics: Box<Reached>,
    pub form: Form,
    pub span: Span,
    /// Of the span, those that left without finishing.
    pub left: u32,
    pub times: Times,
    /// When it is done there is nothing else to know.
    pub summary: Option<Summary>,
    /// The stream was lost before all had it: whoever has what came in its place has it too.
    pub superseded: bool,
    /// Told to those who watch since it last moved.
    pub told: bool,
}

/// How a number of a [`Span`] says what a host must reach of a batch.
#[derive(Debug)]
pub(super) enum Form {
    /// A bit for each topic.
    Bits,
    /// The position of the message to the host itself. It holds the tally of everything the host must have of the batch, and the host
    /// takes it only with all of it.
    Tallied,
    /// The place of a topic among the batch's, or, with [`SEVERAL`], of a list of such places: changes that have nothing to do with each
    /// other were published together, and most hosts are concerned by one of them.
    Places(Vec<Box<[u32]>>),
}

const SEVERAL: u32 = 1 << 31;

/// Finds the numbers.
pub(super) struct Forming<'a> {
    topics: &'a Reached,
    lead: u64,
    form: Form,
    places: Map<TopicHash, u32>,
    lists: Map<Box<[u32]>, u32>,
}

impl<'a> Forming<'a> {
    pub fn of(committed: &'a Committed) -> Self {
        let topics = &committed.topics[..];
        let (form, mut places) = (Form::Bits, Map::default());
        let form = match (committed.tallied, topics.len() > LISTED_TOPICS_MAX) {
            (true, _) => Form::Tallied,
            (false, false) => form,
            (false, true) => {
                places.extend(topics.iter().enumerate().map(|(place, (topic, _))| (*topic, place as u32)));
                Form::Places(Vec::new())
            }
        };
        Self { topics, lead: committed.cut.lead, form, places, lists: Map::default() }
    }

    pub fn what(&mut self, own: TopicHash, reach: &Reached) -> Option<u32> {
        match &mut self.form {
            Form::Tallied => {
                let (_, revision) = reach.iter().find(|(topic, _)| *topic == own)?;
                u32::try_from(revision.checked_sub(self.lead)?).ok()
            }
            Form::Bits => {
                let bit = |topic: &TopicHash| self.topics.iter().position(|(other, _)| other == topic).map(|at| 1u32 << at);
                Some(reach.iter().filter_map(|(topic, _)| bit(topic)).fold(0, |bits, bit| bits | bit))
            }
            Form::Places(lists) => {
                let places: Box<[u32]> = reach.iter().filter_map(|(topic, _)| self.places.get(topic).copied()).collect();
                if let [place] = places[..] {
                    return Some(place);
                }
                let number = *self.lists.entry(places).or_insert_with_key(|places| {
                    lists.push(places.clone());
                    lists.len() as u32 - 1
                });
                Some(SEVERAL | number)
            }
        }
    }

    /// What is kept of the topics, and how the numbers are read.
    pub fn end(self) -> (Box<Reached>, Form) {
        let topics = if matches!(self.form, Form::Tallied) { [].into() } else { self.topics.into() };
        (topics, self.form)
    }
}

impl Batch {
    /// Topic and revision of everything this host must reach.
    pub fn wanted(&self, slot: u32, own: TopicHash) -> impl Iterator<Item = (TopicHash, u64)> + '_ {
        let what = self.span.what(slot);
        let (mut bits, mut place, mut several, mut tallied) = (0, None, [].as_slice(), None);
        match (&self.form, what) {
            (_, None) => {}
            (Form::Bits, Some(what)) => bits = what,
            (Form::Tallied, Some(what)) => tallied = Some((own, self.cut.lead + u64::from(what))),
            (Form::Places(lists), Some(what)) if what & SEVERAL != 0 => {
                several = lists.get((what & !SEVERAL) as usize).map_or(&[][..], |list| list);
            }
            (Form::Places(_), Some(what)) => place = Some(what),
        }
        let few = (0..u32::BITS).take(if bits == 0 { 0 } else { 32 }).filter(move |bit| bits & (1 << bit) != 0);
        let places = few.chain(place).chain(several.iter().copied());
        places.filter_map(|at| self.topics.get(at as usize).copied()).chain(tallied)
    }

    /// What is done needs no more than its summary.
    pub fn settle(&mut self) {
        self.told = false;
        if self.summary.is_none() && self.times.hosts() as usize + self.left as usize >= self.span.len() {
            self.summary = Some(self.times.summary());
            self.times = Times::default();
            (self.topics, self.form) = ([].into(), Form::Tallied);
        }
    }

    pub fn finished(&mut self, now_ms: u64) -> u32 {
        let ms = u32::try_from(now_ms.saturating_sub(self.committed_ms)).unwrap_or(u32::MAX);
        self.times.push(ms);
        self.settle();
        ms
    }
}

#[derive(Debug)]
pub(super) struct Row {
    pub host: HostId,
    /// The host's own topic.
    pub own: TopicHash,
    pub state: HostState,
    pub heard_ms: Option<u64>,
    /// Batches it has not finished.
    pub open: Runs,
    /// What it has reached of them without finishing them: next to nothing, as a host takes batches whole.
    pub partial: Vec<(TopicHash, u64)>,
    /// One topic of a batch that is not remembered any more and that it had not finished: reason enough to be told again.
    pub forgotten: Option<(TopicHash, u64)>,
    pub nudge_ms: u64,
    pub backoff_ms: u64,
}

impl Row {
    pub fn is_behind(&self) -> bool {
        !self.open.is_empty() || self.forgotten.is_some()
    }

    /// Why it has not got what was committed then.
    pub fn why(&self, committed_ms: u64, now_ms: u64) -> Why {
        let heard = self.heard_ms.is_some_and(|heard| heard >= committed_ms);
        let early = now_ms < committed_ms + UNREACHABLE_AFTER_MS;
        match Why::of(&self.state) {
            Some(why) => why,
            None if heard || early => Why::Waiting,
            None => Why::Unreachable,
        }
    }

    /// What it has reached, old and new; sorted.
    pub fn with(&mut self, reached: &Reached) -> Vec<(TopicHash, u64)> {
        let mut all = std::mem::take(&mut self.partial);
        all.extend_from_slice(reached);
        all.sort_unstable();
        // Of one topic the last is the highest.
        all.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same {
                kept.1 = later.1;
            }
            same
        });
        all
    }
}
