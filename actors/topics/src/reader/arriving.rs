//! Deltas that have arrived and wait for the rest of their batch; committing a batch.

use crate::Map;
use std::collections::{BTreeMap, BTreeSet};

use groupcast_messages::{Companions, Cut, Delta};
use groupcast_policy::doc::{Document, Edit, EditError};
use groupcast_policy::needs::{Documents, Needs};
use groupcast_policy::topic::Topic;

use crate::batch::SPREAD_MS_MAX;
use crate::term::life_of;

use super::{Commit, Effect, Incident, PENDING_DELTAS_MAX, Reader, Store};

#[derive(Debug)]
pub(super) struct Arrived {
    revision: u64,
    previous: u64,
    delta: Delta,
}

/// What has arrived of one batch.
#[derive(Debug)]
pub(super) struct Batch {
    first_seen_ms: u64,
    /// Boxed: a map's node has room for eleven, and most batches bring one.
    deltas: BTreeMap<Topic, Box<Arrived>>,
    /// The host asked because of this batch; it does not ask for it again before the answer.
    asked: bool,
    /// Only an answer can move it on: what arrives later need not look at it again.
    blocked: bool,
    overdue: bool,
}

impl Batch {
    fn new(now_ms: u64) -> Self {
        Self { first_seen_ms: now_ms, deltas: BTreeMap::new(), asked: false, blocked: false, overdue: false }
    }

    pub(super) fn edits(&self) -> impl Iterator<Item = (&Topic, &Edit)> {
        self.deltas.iter().map(|(topic, arrived)| (topic, &arrived.delta.edit))
    }

    pub(super) fn is_overdue(&self) -> bool {
        self.overdue
    }
}

enum Judgement {
    Ready,
    /// Everything of it is in what is held already.
    Covered,
    /// A companion may still be on its way.
    Incomplete,
    /// Only the snapshot service can help.
    Stuck(Incident),
    /// Needs topics that are not followed yet.
    Gains(BTreeSet<Topic>),
    /// A topic of it is being joined; the answer will bring it.
    Unsynced,
}

impl Reader {
    pub(super) fn arrived(&mut self, topic: Topic, revision: u64, previous: u64, payload: &[u8], now_ms: u64) {
        let held = self.held.revision(&topic);
        if held.is_none() && !self.subscribed.contains_key(&topic) {
            return; // was on its way when the topic was unsubscribed
        }
        let delta = match Delta::decode(&topic, payload) {
            Ok(delta) => delta,
            Err(error) => {
                // Its revision is missing now, so the next delta shows a gap; asking covers the case that none comes.
                self.report(Incident::Malformed { topic, error });
                return self.want_ask_again(now_ms);
            }
        };
        let Some(lead) = revision.checked_sub(u64::from(delta.position)).filter(|lead| *lead > 0 && delta.position > 0) else {
            self.report(Incident::Corrupt { topic });
            return self.want_ask_again(now_ms);
        };
        let current = self.term();
        self.repair.heard_of(delta.term);
        if delta.term < current {
            // Within an intact stream a lower term is always an older sequence.
            if held.is_none_or(|held| held < revision) {
                let term = delta.term;
                self.report(Incident::LowerTerm { topic, term });
                self.want_ask_again(now_ms);
            }
            return;
        }
        if delta.term == current && held.is_some_and(|held| revision <= held) {
            return; // a duplicate, or covered by the snapshot that was the base
        }
        if delta.term > current && self.cut.is_some() {
            // A new leader. Its deltas continue what is held or they do not, the chain and the digest tell; but what it
            // published while this host could not listen is worth a check.
            self.checks.soon(now_ms, self.settings.ask_jitter_ms, &mut self.random);
        }
        let cut = Cut { term: delta.term, lead };
        let arrived = Box::new(Arrived { revision, previous, delta });
        if self.batches.is_empty() {
            // Most changes are of one topic, and nothing is waiting: then it is not put aside first.
            let mut batch = Batch::new(now_ms);
            batch.deltas.insert(topic, arrived);
            self.pending += 1;
            if self.cut.is_some() && matches!(self.judge(cut, &batch), Judgement::Ready) {
                return self.commit(cut, batch, now_ms);
            }
            self.batches.insert(cut, batch);
        } else {
            let batch = self.batches.entry(cut).or_insert_with(|| Batch::new(now_ms));
            if batch.deltas.insert(topic, arrived).is_none() {
                self.pending += 1;
            }
        }
        if self.pending > PENDING_DELTAS_MAX {
            self.batches.clear();
            self.pending = 0;
            self.report(Incident::TooManyPending);
            return self.want_ask_again(now_ms);
        }
        if self.batches.first_key_value().is_some_and(|(_, batch)| batch.blocked) {
            return;
        }
        self.advance(now_ms);
    }

    /// Commits what can be committed, lowest batch first: later ones never overtake.
    pub(super) fn advance(&mut self, now_ms: u64) {
        if self.cut.is_none() {
            return; // everything waits for the first answer
        }
        while let Some((&cut, batch)) = self.batches.first_key_value() {
            match self.judge(cut, batch) {
                Judgement::Ready => {
                    if let Some((cut, batch)) = self.batches.pop_first() {
                        self.commit(cut, batch, now_ms);
                    }
                }
                Judgement::Covered => {
                    if let Some((_, batch)) = self.batches.pop_first() {
                        self.pending -= batch.deltas.len();
                    }
                }
                Judgement::Incomplete => return, // `check_held` asks when it lasts
                Judgement::Unsynced => {
                    self.block(cut);
                    return self.want_ask(now_ms, 0);
                }
                Judgement::Stuck(incident) => {
                    self.block(cut);
                    if self.mark_asked(cut) {
                        if let Incident::Corrupt { topic } = &incident {
                            self.distrusted.insert(topic.clone());
                        }
                        self.report(incident);
                        self.want_ask_if_none(now_ms, self.settings.ask_jitter_ms);
                    }
                    return;
                }
                Judgement::Gains(topics) => {
                    self.block(cut);
                    self.subscribe(topics, now_ms);
                    return self.want_ask(now_ms, 0);
                }
            }
        }
    }

    fn block(&mut self, cut: Cut) {
        if let Some(batch) = self.batches.get_mut(&cut) {
            batch.blocked = true;
        }
    }

    fn mark_asked(&mut self, cut: Cut) -> bool {
        self.batches.get_mut(&cut).is_some_and(|batch| !std::mem::replace(&mut batch.asked, true))
    }

    fn judge(&self, cut: Cut, batch: &Batch) -> Judgement {
        if self.is_surely_incomplete(batch) {
            return Judgement::Incomplete;
        }
        // Of another life of the stream nothing may remain, also where this batch continues what was never published before.
        let (mut covered, mut restarted) = (0, self.cut.is_some_and(|own| life_of(own.lead) != life_of(cut.lead)));
        for (topic, arrived) in &batch.deltas {
            let Some(held) = self.held.0.get(topic) else { return Judgement::Unsynced };
            if cut.term == self.term() && arrived.revision <= held.revision {
                covered += 1;
                continue;
            }
            if arrived.delta.edit == Edit::Reset && arrived.delta.digest == held.document.digest() {
                // Says what is held already, whatever came before. If that was another life of the stream, nothing of the old
                // one may remain.
                restarted |= arrived.previous != held.revision;
                continue;
            }
            if arrived.previous != held.revision || self.distrusted.contains(topic) {
                return Judgement::Stuck(Incident::Gap { topic: topic.clone() });
            }
        }
        if covered == batch.deltas.len() {
            return Judgement::Covered;
        }
        if restarted && let Some(topic) = self.left_behind(batch) {
            return Judgement::Stuck(Incident::Gap { topic });
        }
        if !self.is_complete(cut, batch) {
            return Judgement::Incomplete;
        }
        for (topic, arrived) in &batch.deltas {
            let Some(held) = self.held.0.get(topic) else { return Judgement::Unsynced };
            match held.document.outcome(&arrived.delta.edit) {
                Ok(outcome) if outcome.digest == arrived.delta.digest => {}
                Err(EditError::Reset) if arrived.delta.digest == held.document.digest() => {}
                Err(EditError::Reset) => return Judgement::Stuck(Incident::Gap { topic: topic.clone() }),
                _ => return Judgement::Stuck(Incident::Corrupt { topic: topic.clone() }),
            }
        }
        let gains = self.would_gain(batch);
        if gains.is_empty() { Judgement::Ready } else { Judgement::Gains(gains) }
    }

    /// A topic held with a revision that the batch does not renew.
    fn left_behind(&self, batch: &Batch) -> Option<Topic> {
        let renewed = |topic: &Topic| batch.deltas.get(topic).is_some_and(|arrived| arrived.delta.edit == Edit::Reset);
        self.held.0.iter().find(|(topic, held)| held.revision != 0 && !renewed(topic)).map(|(topic, _)| topic.clone())
    }

    /// Told by a count alone: a batch too large to be listed would be looked through once for each of its messages otherwise.
    fn is_surely_incomplete(&self, batch: &Batch) -> bool {
        let tallied = batch.deltas.first_key_value().is_some_and(|(_, first)| first.delta.companions == Companions::Tallied);
        let own = || batch.deltas.get(&Topic::Host(self.host.clone())).and_then(|arrived| arrived.delta.tally);
        tallied && own().is_none_or(|tally| batch.deltas.len() <= tally.count as usize)
    }

    /// Whether everything of the batch that this host follows has arrived.
    fn is_complete(&self, cut: Cut, batch: &Batch) -> bool {
        let mut tallied = false;
        let is_here = |topic: &Topic| {
            let beyond = cut.term == self.term() && self.held.revision(topic).is_some_and(|held| held > cut.lead);
            batch.deltas.contains_key(topic) || beyond
        };
        for arrived in batch.deltas.values() {
            match &arrived.delta.companions {
                Companions::Tallied => tallied = true,
                Companions::Listed(hashes) => {
                    // Of topics with one hash all are waited for: which of them changed is not known.
                    if !hashes.iter().flat_map(|hash| self.by_hash.of(*hash)).all(is_here) {
                        return false;
                    }
                }
            }
        }
        if !tallied {
            return true;
        }
        let own = Topic::Host(self.host.clone());
        let Some(tally) = batch.deltas.get(&own).and_then(|arrived| arrived.delta.tally) else { return false };
        // Topics followed in advance of need are not in the writer's count.
        let counted = batch.deltas.iter().filter(|(topic, _)| **topic != own && self.needs.wants(topic));
        let (count, xor) = counted.fold((0, 0), |(count, xor), (_, arrived)| (count + 1, xor ^ arrived.delta.position));
        (count, xor) == (tally.count, tally.xor)
    }

    /// The topics the batch brings into need that are not synced.
    fn would_gain(&self, batch: &Batch) -> BTreeSet<Topic> {
        let structural = |topic: &Topic| !matches!(topic, Topic::Members(_));
        let mut edits = batch.edits().filter(|(topic, edit)| structural(topic) && **edit != Edit::Reset);
        let (Some(first), second) = (edits.next(), edits.next()) else { return BTreeSet::new() };
        let Some(second) = second else { return self.needs.would_gain(first.0, first.1, &self.held) };
        // Several documents that refer to each other change at once: play it through on the side.
        let mut overlay = Overlay { store: &self.held, changed: Map::default() };
        let mut needs: Needs = self.needs.clone();
        let mut gained = BTreeSet::new();
        for (topic, edit) in [first, second].into_iter().chain(edits) {
            gained.extend(needs.edit(topic, edit, &overlay).gained);
            let mut document = overlay.document(topic).cloned().unwrap_or_default();
            if document.apply(edit).is_ok() {
                overlay.changed.insert(topic.clone(), document);
            }
        }
        gained.retain(|topic| needs.wants(topic) && !self.held.0.contains_key(topic));
        gained
    }

    fn commit(&mut self, cut: Cut, batch: Batch, now_ms: u64) {
        let spread_ms = batch.deltas.values().map(|arrived| arrived.delta.spread_ms).max().unwrap_or(0).min(SPREAD_MS_MAX);
        if spread_ms > 0 {
            let half = u64::from(spread_ms / 2);
            self.acks.not_before(now_ms + half + self.random.below(half + 1));
        }
        self.pending -= batch.deltas.len();
        let mut commit = self.new_commit(cut);
        let mut dropping = false;
        for (topic, arrived) in batch.deltas {
            let same_content = arrived.delta.edit == Edit::Reset;
            if !same_content {
                dropping |= !self.needs.edit(&topic, &arrived.delta.edit, &self.held).lost.is_empty();
            }
            let Some(held) = self.held.0.get_mut(&topic) else { continue };
            if !same_content && held.document.apply(&arrived.delta.edit).is_err() {
                continue; // judged before: cannot happen
            }
            held.revision = arrived.revision;
            self.acks.committed(held.hash, arrived.revision, commit.number);
            commit.change = commit.change.max(arrived.delta.change);
            if !same_content {
                commit.edits.push((topic, Some(arrived.delta.edit)));
            }
        }
        self.cut = self.cut.max(Some(cut));
        if dropping {
            // Looks at every topic of the host, which a member's coming and going must not.
            commit.dropped = self.unsubscribe_unneeded();
        }
        self.out.push(Effect::Commit(commit));
    }

    pub(super) fn new_commit(&mut self, cut: Cut) -> Commit {
        self.commits += 1;
        Commit { number: self.commits, cut, change: 0, edits: Vec::new(), dropped: Vec::new() }
    }

    /// Drops batches that a snapshot at `cut` contains; the highest change that they brought.
    pub(super) fn drop_batches_up_to(&mut self, cut: Cut) -> u64 {
        let later = match cut.lead.checked_add(1) {
            Some(lead) => self.batches.split_off(&Cut { term: cut.term, lead }),
            None => BTreeMap::new(),
        };
        let contained = std::mem::replace(&mut self.batches, later);
        let changes = contained.values().flat_map(|batch| batch.deltas.values()).map(|arrived| arrived.delta.change);
        let change = changes.max().unwrap_or(0);
        // Whatever kept them waiting has to be judged anew.
        self.batches.values_mut().for_each(|batch| (batch.asked, batch.blocked) = (false, false));
        self.pending = self.batches.values().map(|batch| batch.deltas.len()).sum();
        change
    }

    /// The lowest batch waits for companions only so long, and the safe part of whatever waits is offered after a while.
    pub(super) fn check_held(&mut self, now_ms: u64) {
        let Some((&cut, batch)) = self.batches.first_key_value() else { return };
        if self.cut.is_none() {
            return;
        }
        if now_ms.saturating_sub(batch.first_seen_ms) >= self.settings.companion_wait_ms && !batch.asked && self.mark_asked(cut) {
            self.report(Incident::Incomplete { cut });
            self.want_ask_if_none(now_ms, 0);
        }
        // They arrive in order, so one that is not overdue has none behind it that is.
        let hold_ms = self.settings.hold_ms;
        let late = self.batches.iter_mut().take_while(|(_, batch)| now_ms.saturating_sub(batch.first_seen_ms) >= hold_ms);
        let newly = late.filter_map(|(cut, batch)| (!std::mem::replace(&mut batch.overdue, true)).then_some(*cut)).last();
        self.out.extend(newly.map(Effect::Overdue));
    }

    pub(super) fn held_deadline(&self) -> Option<u64> {
        let (_, batch) = self.batches.first_key_value().filter(|_| self.cut.is_some())?;
        if !batch.asked {
            return Some(batch.first_seen_ms + self.settings.companion_wait_ms);
        }
        let waits = self.batches.values().find(|batch| !batch.overdue)?;
        Some(waits.first_seen_ms + self.settings.hold_ms)
    }
}

struct Overlay<'a> {
    store: &'a Store,
    changed: Map<Topic, Document>,
}

impl Documents for Overlay<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.changed.get(topic).or_else(|| self.store.document(topic))
    }
}
