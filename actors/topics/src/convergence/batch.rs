//! A batch that is waited for, and a host that is.

use groupcast_messages::{Cut, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;

use super::progress::{Summary, Times};
use super::span::{Runs, Span};
use super::{UNREACHABLE_AFTER_MS, Why};
use crate::LISTED_TOPICS_MAX;

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
    /// Its topics, when they are few enough for a bit each.
    pub topics: Box<Reached>,
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

impl Batch {
    /// What hosts must reach as numbers of a [`Span`]: a bit for each topic, or the position of the message to the host itself. That
    /// one holds the tally of everything the host must have of the batch, and the host takes it only with all of it.
    pub fn what(topics: &Reached, lead: u64, own: TopicHash, reach: &Reached) -> Option<u32> {
        if topics.len() > LISTED_TOPICS_MAX {
            let (_, revision) = reach.iter().find(|(topic, _)| *topic == own)?;
            return u32::try_from(revision.checked_sub(lead)?).ok();
        }
        let bit = |topic: &TopicHash| topics.iter().position(|(other, _)| other == topic).map(|at| 1u32 << at);
        Some(reach.iter().filter_map(|(topic, _)| bit(topic)).fold(0, |bits, bit| bits | bit))
    }

    /// Topic and revision of everything this host must reach.
    pub fn wanted(&self, slot: u32, own: TopicHash) -> impl Iterator<Item = (TopicHash, u64)> + '_ {
        let what = self.span.what(slot);
        let tallied = self.topics.is_empty();
        let listed = self.topics.iter().enumerate().filter(move |(at, _)| what.is_some_and(|bits| bits & (1 << at) != 0));
        let single = what.filter(|_| tallied).map(|offset| (own, self.cut.lead + u64::from(offset)));
        listed.map(|(_, wanted)| *wanted).chain(single)
    }

    /// What is done needs no more than its summary.
    pub fn settle(&mut self) {
        self.told = false;
        if self.summary.is_none() && self.times.hosts() as usize + self.left as usize >= self.span.len() {
            self.summary = Some(self.times.summary());
            self.times = Times::default();
            self.topics = [].into();
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
