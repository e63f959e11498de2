//! Keeping the replica at the stream's head: batches are applied whole, in order, without a hole.
//!
//! Lead messages form a chain (each names its predecessor) and say how many messages follow, so a reader of everything knows exactly
//! whether it has everything. What is missing comes from another controller; if there is none, the stream's last messages give
//! revisions and digests, and the contents are compiled from scratch.

use crate::Map;
use std::collections::BTreeMap;

use groupcast_messages::{Cut, Delta, Lead};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;

use super::fetch::Parts;
use super::{Desired, Effect, Incident, Node, decode_lead};
use crate::batch::Proposal;
use crate::replica::{PublishedDelta, Replica};

/// Messages kept while a hole before them is open.
pub const BUFFERED_MESSAGES_MAX: usize = 200_000;

#[derive(Debug)]
enum Arrived {
    Lead { previous: u64, lead: Lead },
    Delta { topic: Topic, delta: Box<Delta>, payload: Vec<u8> },
}

impl Arrived {
    fn term(&self) -> u64 {
        match self {
            Arrived::Lead { lead, .. } => lead.term,
            Arrived::Delta { delta, .. } => delta.term,
        }
    }
}

#[derive(Debug)]
pub(super) enum State {
    /// Waiting for the head, to know whether there is anything to fetch.
    Starting,
    /// Another controller is asked for everything.
    Fetching {
        ask: u32,
        sent_ms: u64,
        parts: Parts,
    },
    ReadingRecords {
        sent_ms: u64,
    },
    /// Revisions and digests are known, the contents have to be compiled.
    WaitingForDesired {
        ask: u64,
        cut: Cut,
        since: u64,
        records: Map<Topic, (u64, Digest)>,
    },
    Synced,
}

#[derive(Debug)]
pub(super) struct Follow {
    pub state: State,
    buffer: BTreeMap<u64, Arrived>,
    /// A message is missing, since then: later ones are here, and they come in order.
    gap_since_ms: Option<u64>,
    /// Something is on its way, or lost, and nothing has come since then.
    lag_since_ms: Option<u64>,
    /// The copy held here contradicts what was published.
    pub unfit: bool,
    pub last_ask: u32,
    /// The term under which the stream's present life began, by the newest lead message heard of.
    pub since: u64,
    retry_ms: Option<u64>,
    /// By the newest lead message in the replica, the stream lacks topics.
    pub incomplete: bool,
}

impl Default for Follow {
    fn default() -> Self {
        Self {
            state: State::Starting,
            buffer: BTreeMap::new(),
            gap_since_ms: None,
            lag_since_ms: None,
            unfit: false,
            last_ask: 0,
            since: 0,
            retry_ms: None,
            incomplete: false,
        }
    }
}

impl Follow {
    pub fn is_synced(&self) -> bool {
        matches!(self.state, State::Synced)
    }

    pub fn nothing_is_missing(&mut self) {
        (self.gap_since_ms, self.lag_since_ms) = (None, None);
    }
}

impl Node {
    /// What is held may be behind: find out from the head.
    pub(super) fn resync(&mut self, now_ms: u64) {
        if !self.follow.is_synced() {
            self.follow.state = State::Starting;
        }
        self.read_head(now_ms);
    }

    pub(super) fn lead_arrived(&mut self, sequence: u64, previous: u64, payload: &[u8], now_ms: u64) {
        let Some(lead) = decode_lead(payload) else {
            self.out.push(Effect::Report(Incident::Malformed { at: sequence }));
            return;
        };
        self.heard_of(&lead);
        self.follow.since = self.follow.since.max(lead.since);
        self.lead_seen(sequence, &lead, now_ms);
        if sequence <= self.replica.cut().lead && lead.since <= self.replica.since() {
            return;
        }
        self.buffer(sequence, Arrived::Lead { previous, lead }, now_ms);
    }

    pub(super) fn delta_arrived(&mut self, topic: Topic, sequence: u64, payload: &[u8], now_ms: u64) {
        let Ok(delta) = Delta::decode(&topic, payload) else {
            self.out.push(Effect::Report(Incident::Malformed { at: sequence }));
            return;
        };
        let lead = sequence.saturating_sub(u64::from(delta.position));
        if delta.term < self.replica.cut().term || (delta.term == self.replica.cut().term && lead <= self.replica.cut().lead) {
            return; // its own batches come back to a leader this way
        }
        let payload = payload.to_vec();
        self.buffer(sequence, Arrived::Delta { topic, delta: Box::new(delta), payload }, now_ms);
    }

    fn buffer(&mut self, sequence: u64, arrived: Arrived, now_ms: u64) {
        self.follow.buffer.insert(sequence, arrived);
        if self.follow.buffer.len() > BUFFERED_MESSAGES_MAX {
            self.follow.buffer.clear();
            self.out.push(Effect::Report(Incident::TooManyBuffered));
            self.fetch(now_ms);
            return;
        }
        self.drain(now_ms);
    }

    /// Applies the batches that are complete. A leader applies its own when they are acknowledged.
    pub(super) fn drain(&mut self, now_ms: u64) {
        while self.follow.is_synced() && self.is_following() {
            let cut = self.replica.cut();
            let Some((&sequence, first)) = self.follow.buffer.first_key_value() else {
                return self.follow.nothing_is_missing();
            };
            if first.term() < cut.term {
                // Of a stream that is gone, or of a leader that was deposed: never to be applied.
                self.follow.buffer.pop_first();
                continue;
            }
            let next = match first {
                Arrived::Lead { previous, lead } if *previous == cut.lead && lead.term >= cut.term => lead.clone(),
                _ => {
                    self.follow.gap_since_ms.get_or_insert(now_ms);
                    return;
                }
            };
            let end = sequence + u64::from(next.count);
            let complete =
                self.follow.buffer.range(sequence + 1..).take_while(|(at, _)| **at <= end).count() == next.count as usize;
            if !complete {
                // The rest of it is on its way; lost, if something behind it is here.
                if self.follow.buffer.last_key_value().is_some_and(|(last, _)| *last > end) {
                    self.follow.gap_since_ms.get_or_insert(now_ms);
                } else {
                    self.follow.lag_since_ms = Some(now_ms);
                }
                return;
            }
            self.follow.nothing_is_missing();
            self.follow.buffer.remove(&sequence);
            let mut batch = Vec::with_capacity(next.count as usize);
            for revision in sequence + 1..=end {
                if let Some(Arrived::Delta { topic, delta, payload }) = self.follow.buffer.remove(&revision) {
                    batch.push(PublishedDelta { topic, revision, delta: *delta, payload, meaning: None });
                }
            }
            if batch.len() != next.count as usize {
                self.out.push(Effect::Report(Incident::Malformed { at: sequence }));
                return self.fetch(now_ms);
            }
            let cut = Cut { term: next.term, lead: sequence };
            let change = batch.iter().map(|message| message.delta.change).max().unwrap_or(0);
            let mut committed = self.judged(cut, next.since, &batch, (change, next.catalog));
            let applied = self.apply(cut, next.since, &batch, &mut committed);
            let by_reference = matches!(applied, Err(crate::replica::Unfit::Content { .. }));
            if (applied.is_ok() || by_reference) && !batch.is_empty() {
                self.out.push(Effect::Committed(committed));
            }
            if let Err(unfit) = applied {
                // By reference only: normal. Anything else should not happen, and is cured alike.
                if !by_reference {
                    self.follow.unfit = true;
                    self.out.push(Effect::Report(Incident::Unfit(unfit)));
                }
                return self.fetch(now_ms);
            }
            self.follow.incomplete = next.incomplete;
            self.serve_advanced();
        }
    }

    /// What was compiled answers a follower without a copy, or a leader that rebuilds.
    pub(super) fn desired(&mut self, ask: u64, desired: Option<Desired>, now_ms: u64) {
        if ask != self.desired_ask {
            return;
        }
        match desired {
            Some(desired) if self.holds_lead() => self.rebuild(desired, now_ms),
            Some(desired) => self.adopt(ask, desired.documents, now_ms),
            None if self.holds_lead() => self.rebuild_later(now_ms),
            None => {
                if matches!(self.follow.state, State::WaitingForDesired { .. }) {
                    self.follow_anew(now_ms);
                }
            }
        }
    }

    /// What is held is worth nothing: begins as after a start, a moment later.
    pub(super) fn follow_anew(&mut self, now_ms: u64) {
        self.follow.retry_ms = Some(now_ms + self.settings.gap_wait_ms);
        self.follow.state = State::Starting;
    }

    /// What was published is adopted where the digests agree; the rest will be published by reference once this node leads.
    fn adopt(&mut self, asked: u64, desired: Map<Topic, Document>, now_ms: u64) {
        let State::WaitingForDesired { ask, cut, since, records } = &mut self.follow.state else { return };
        if *ask != asked {
            return;
        }
        let (cut, since) = (*cut, *since);
        let records = std::mem::take(records).into_iter().map(|(topic, record)| (topic, Some(record))).collect();
        let replica = self.compared(desired, records, cut, since);
        self.put_followers_aside();
        self.synced(replica, now_ms);
        self.follow.nothing_is_missing();
    }

    /// A replica of what is desired, with the revisions of what is published already. Whatever is not, or is unknown (`None`), will
    /// be published by reference when this node leads.
    pub(super) fn compared(
        &mut self,
        desired: Map<Topic, Document>,
        mut published: Map<Topic, Option<(u64, Digest)>>,
        cut: Cut,
        since: u64,
    ) -> Replica {
        let mut documents = Vec::with_capacity(desired.len());
        let mut resets = Vec::new();
        for (topic, document) in desired {
            let (revision, same) = match published.remove(&topic) {
                Some(None) => (0, false),
                Some(Some((revision, digest))) => (revision, digest == document.digest()),
                None => (0, document.digest() == Digest::ABSENT),
            };
            if !same {
                resets.push(topic.clone());
            }
            documents.push((topic, revision, document));
        }
        for (topic, record) in published {
            if record.is_none_or(|(_, digest)| digest != Digest::ABSENT) {
                resets.push(topic.clone());
            }
            documents.push((topic, record.unwrap_or_default().0, Document::absent()));
        }
        self.publish_by_reference(resets);
        Replica::restore(cut, since, documents)
    }

    /// What the replica holds of these topics is not what is published: nobody is answered before it is.
    pub(super) fn publish_by_reference(&mut self, resets: Vec<Topic>) {
        self.serve.hold_until_published = !resets.is_empty();
        self.serve.pending_resets = resets;
    }

    pub(super) fn synced(&mut self, replica: Replica, now_ms: u64) {
        let cut = replica.cut();
        self.replica = replica;
        self.follow.unfit = false;
        self.reflected = self.reflected.filter(|(lead, _)| *lead == cut.lead);
        self.follow.state = State::Synced;
        let stale = |arrived: &Arrived, sequence: u64| match arrived {
            Arrived::Lead { .. } => sequence <= cut.lead,
            Arrived::Delta { delta, .. } => sequence.saturating_sub(u64::from(delta.position)) <= cut.lead,
        };
        self.follow.buffer.retain(|sequence, arrived| !stale(arrived, *sequence));
        self.drain(now_ms);
        self.serve_advanced();
        // Whatever was published between the answer and now, with its message lost, shows at the head.
        self.read_head(now_ms);
    }

    pub(super) fn head_for_follow(&mut self, head: Option<&Option<(u64, Lead)>>, now_ms: u64) {
        let Some(head) = head else {
            self.follow.retry_ms = Some(now_ms + self.settings.request_timeout_ms.min(500));
            return;
        };
        if let Some((_, lead)) = head {
            self.follow.since = self.follow.since.max(lead.since);
        }
        if self.holds_lead() {
            return;
        }
        let cut = self.replica.cut();
        match (&self.follow.state, head) {
            (State::Starting, None) => {
                // An empty stream, and nothing held: no leader to wait for.
                self.follow.state = State::Synced;
                self.vacate();
            }
            (State::Starting, Some(_)) => self.fetch(now_ms),
            (State::Synced, None) => self.vacate(), // the stream is new: whoever leads first rebuilds it
            (State::Synced, Some((sequence, lead))) => {
                let elsewhere = lead.since > self.replica.since() && cut != Cut::default();
                if elsewhere {
                    self.fetch(now_ms);
                } else if lead.term < cut.term {
                    self.vacate(); // a new stream with a message of the past at its head
                } else if *sequence > cut.lead {
                    self.follow.lag_since_ms.get_or_insert(now_ms);
                }
            }
            _ => {}
        }
    }

    pub(super) fn tick_follow(&mut self, now_ms: u64) {
        if self.follow.retry_ms.is_some_and(|due| due <= now_ms) {
            self.follow.retry_ms = None;
            if !self.follow.is_synced() || self.follow.gap_since_ms.or(self.follow.lag_since_ms).is_some() {
                self.read_head(now_ms);
            }
        }
        let timeout = self.settings.request_timeout_ms;
        match &self.follow.state {
            State::Fetching { sent_ms, .. } if sent_ms + timeout <= now_ms => self.no_peer(now_ms),
            State::ReadingRecords { sent_ms } if sent_ms + timeout * 5 <= now_ms => self.fetch(now_ms),
            _ => {}
        }
        if self.missing_deadline().is_none_or(|due| due > now_ms) {
            return;
        }
        let at = self.replica.cut().lead;
        self.out.push(Effect::Report(Incident::Gap { at }));
        self.fetch(now_ms);
    }

    pub(super) fn follow_deadline(&self) -> Option<u64> {
        let timeout = self.settings.request_timeout_ms;
        let state = match &self.follow.state {
            State::Fetching { sent_ms, .. } => Some(sent_ms + timeout),
            State::ReadingRecords { sent_ms } => Some(sent_ms + timeout * 5),
            _ => None,
        };
        [state, self.missing_deadline(), self.follow.retry_ms].into_iter().flatten().min()
    }

    /// When what is missing is asked for.
    fn missing_deadline(&self) -> Option<u64> {
        if !self.follow.is_synced() || self.holds_lead() {
            return None;
        }
        let gap = self.follow.gap_since_ms.map(|since| since + self.settings.gap_wait_ms);
        let lag = self.follow.lag_since_ms.map(|since| since + self.settings.lag_wait_ms);
        gap.into_iter().chain(lag).min()
    }

    /// A leader's own batches come back to it; what lies beyond them is of the next leader and is kept.
    pub(super) fn forget_buffered(&mut self, up_to: u64) {
        self.follow.buffer = self.follow.buffer.split_off(&(up_to + 1));
        self.follow.nothing_is_missing();
    }
}

/// A proposal that only tells readers to fetch these topics.
pub(super) fn reset_proposal(topics: Vec<Topic>) -> Proposal {
    Proposal { resets: topics, ..Proposal::default() }
}
