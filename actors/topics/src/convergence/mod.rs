//! Which hosts have which change in force, and who has to be told again.
//!
//! Acknowledgements are state: a host says which revisions it has, and a change is done on a host when every topic of it that the
//! host follows has reached the change's revision. Hosts that stay behind are nudged with what they should have: republish is at
//! most once, and a nudge is what makes up for it.
//!
//! Every controller keeps this, whether it leads or follows: acknowledgements and batches reach all of them alike, so whoever takes
//! over knows how far the changes before it are. A change belongs to the batch whose lead message says that the topics reflect it.
//!
//! Made for ten thousand hosts and a thousand batches that nobody has finished. Only what can differ is kept: of a host the numbers
//! of the batches it has not finished, of a batch its hosts and, as one number each, what they must reach of it.

mod batch;
mod early;
mod nudge;
mod progress;
mod span;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};

use groupcast_messages::{Ack, Cut, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::Topic;

use crate::Map;
use crate::batch::spread_ms;
use crate::node::Committed;
use batch::{Batch, Form, Forming, Reached, Row, revision};
use early::Early;
use progress::Times;
pub use progress::{Progress, Summary, Why};
use span::{Runs, Span};

/// Batches whose progress is remembered. Older ones are forgotten, done or not; hosts are still nudged for them.
pub const BATCHES_MAX: usize = 1_000;
/// Changes that touched no topic, or were torn, that are remembered as such.
pub const ODD_CHANGES_MAX: usize = 20_000;
/// A host that was not heard of for so long since a change is called unreachable.
pub const UNREACHABLE_AFTER_MS: u64 = 5_000;
/// Acknowledgements of batches not heard of yet that are kept of one host and of all: a quick host is faster than the word of the commit. One
/// that is lost costs a nudge.
pub const EARLY_PER_HOST_MAX: usize = 1_024;
pub const EARLY_MAX: usize = 65_536;
/// Hosts that one report names as behind.
pub const BEHIND_NAMED_MAX: usize = 1_000;
/// Hosts that say what they do and that no batch remembered here concerns; more are not remembered.
pub const STRANGERS_MAX: usize = 20_000;
/// One that was not heard of for so long is forgotten.
pub const STRANGER_FORGOTTEN_MS: u64 = 600_000;
/// Times of enforcement kept until somebody collects them.
pub const TOOK_MAX: usize = 100_000;

#[derive(Debug, Clone)]
pub struct Settings {
    /// A host that has not acknowledged after this time is nudged.
    pub nudge_after_ms: u64,
    /// Nudges to one host grow apart up to this.
    pub nudge_backoff_max_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { nudge_after_ms: 500, nudge_backoff_max_ms: 30_000 }
    }
}

/// What a host does with what is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// As it says itself.
    pub state: HostState,
    pub heard_ms_ago: u64,
    /// Something is published that it has not in force.
    pub is_behind: bool,
    /// For how long at least, in milliseconds.
    pub behind_ms: u64,
}

#[derive(Debug, Default)]
pub struct Convergence {
    settings: Settings,
    /// The newest heard of.
    cut: Cut,
    /// The term since which the stream lives that it belongs to.
    since: u64,
    slots: Map<HostId, u32>,
    rows: Vec<Option<Row>>,
    /// Slots of hosts that left, and the batch from which on they may be used again: older ones still name them.
    free: VecDeque<(u32, u64)>,
    batches: VecDeque<Batch>,
    /// The number of the first of them.
    first: u64,
    /// Changes that touched no topic.
    nothing: BTreeSet<u64>,
    torn: BTreeSet<u64>,
    /// The highest revision of any batch heard of.
    newest: u64,
    /// Acknowledged beyond that, oldest first.
    early: Early,
    /// No nudge is due before this. Acknowledgements do not move it, so it may be too early, never too late: looking at every
    /// host for every acknowledgement would cost the square of the fleet.
    quiet_until_ms: Option<u64>,
    took: Vec<u32>,
    /// What hosts do that no batch concerned since this controller began: what they say, and when.
    strangers: Map<HostId, (HostState, u64)>,
}

impl Convergence {
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// A batch was committed, by this controller or another; from now on its span is waited for.
    pub fn committed(&mut self, committed: &Committed, now_ms: u64) {
        if committed.since > self.since {
            self.begin_life(committed.since, committed.catalog);
        }
        if self.batches.back().is_some_and(|last| last.catalog > committed.catalog) {
            self.renumbered();
        }
        self.cut = self.cut.max(committed.cut);
        let (number, lead) = (self.first + self.batches.len() as u64, committed.cut.lead);
        // Hosts were told to take their time.
        let patience_ms = self.settings.nudge_after_ms + u64::from(spread_ms(committed.span.len()));
        let (mut span, mut forming) = (Vec::with_capacity(committed.span.len()), Forming::of(committed));
        for (host, reach) in &committed.span {
            let slot = self.slot(host);
            let Some(row) = &mut self.rows[slot as usize] else { continue };
            let Some(what) = forming.what(row.own, reach) else { continue };
            if !row.is_behind() {
                row.backoff_ms = patience_ms;
                row.nudge_ms = now_ms + patience_ms;
            }
            row.open.push(number);
            span.push((slot, what));
        }
        if !span.is_empty() {
            let due = now_ms + patience_ms;
            self.quiet_until_ms = Some(self.quiet_until_ms.map_or(due, |earlier| earlier.min(due)));
        }
        let (topics, form) = forming.end();
        let mut batch = Batch {
            cut: committed.cut,
            change: committed.change,
            after: committed.after,
            catalog: committed.catalog,
            committed_ms: now_ms,
            topics,
            form,
            span: Span::of(span),
            left: 0,
            times: Times::default(),
            summary: None,
            superseded: false,
            told: false,
        };
        batch.settle();
        self.batches.push_back(batch);
        while self.batches.len() > BATCHES_MAX {
            self.forget_oldest();
        }
        self.newest = committed.topics.iter().map(|(_, revision)| *revision).max().unwrap_or(lead).max(self.newest);
        for (host, topic) in &committed.unfollowed {
            self.reached(host, &[(*topic, self.newest)], now_ms);
        }
        committed.left.iter().for_each(|host| self.left(host));
        for (host, reached) in self.early.take_up_to(self.newest) {
            self.reached(&host, &reached, now_ms);
        }
    }

    /// The stream was lost, and everything is in it again: what was published before is not waited for any more.
    fn begin_life(&mut self, since: u64, catalog: u64) {
        self.since = since;
        if self.batches.back().is_some_and(|last| last.catalog > catalog) {
            self.renumbered();
        }
        for row in self.rows.iter_mut().flatten() {
            (row.open, row.partial, row.forgotten) = (Runs::default(), Vec::new(), None);
        }
        for batch in self.batches.iter_mut().filter(|batch| batch.summary.is_none()) {
            batch.superseded = true;
            batch.summary = Some(batch.times.summary());
            (batch.topics, batch.form, batch.times) = ([].into(), Form::Tallied, Times::default());
        }
    }

    /// CATALOG is another stream, and counts changes anew: what an old number says would be said of a new change.
    pub fn renumbered(&mut self) {
        self.first += self.batches.len() as u64;
        (self.batches, self.nothing, self.torn) = Default::default();
        for row in self.rows.iter_mut().flatten() {
            (row.open, row.partial, row.forgotten) = (Runs::default(), Vec::new(), None);
        }
    }

    fn forget_oldest(&mut self) {
        let Some(oldest) = self.batches.pop_front() else { return };
        self.first += 1;
        if oldest.summary.is_some() {
            return;
        }
        for slot in oldest.span.slots() {
            let Some(row) = self.rows.get_mut(slot as usize).and_then(Option::as_mut) else { continue };
            if row.open.contains(self.first - 1) {
                row.open.forget_before(self.first);
                row.forgotten = oldest.wanted(slot, row.own).next();
            }
        }
    }

    fn slot(&mut self, host: &HostId) -> u32 {
        if let Some(slot) = self.slots.get(host) {
            return *slot;
        }
        let said = self.strangers.remove(host);
        let row = Row {
            host: host.clone(),
            own: Topic::Host(host.clone()).hash64(),
            state: said.as_ref().map_or(HostState::Enforcing, |(state, _)| state.clone()),
            heard_ms: said.map(|(_, at)| at),
            open: Runs::default(),
            partial: Vec::new(),
            forgotten: None,
            nudge_ms: 0,
            backoff_ms: 0,
        };
        let slot = match self.free.front().copied() {
            Some((slot, from)) if from <= self.first => {
                self.free.pop_front();
                slot
            }
            _ => {
                self.rows.push(None);
                self.rows.len() as u32 - 1
            }
        };
        self.rows[slot as usize] = Some(row);
        self.slots.insert(host.clone(), slot);
        slot
    }

    fn row(&mut self, host: &HostId) -> Option<(u32, &mut Row)> {
        let slot = *self.slots.get(host)?;
        Some((slot, self.rows[slot as usize].as_mut()?))
    }

    /// Revisions of a stream that is gone say nothing about this one; those of any term of this one do.
    pub fn acknowledged(&mut self, host: &HostId, ack: &Ack, now_ms: u64) {
        let comparable = ack.term >= self.since;
        if comparable {
            self.early.keep(host, ack.reached.iter().filter(|(_, revision)| *revision > self.newest).copied());
        }
        let nudge_after_ms = self.settings.nudge_after_ms;
        let Some((_, row)) = self.row(host) else { return self.met(host, ack.state.clone(), now_ms) };
        row.heard_ms = Some(now_ms);
        if row.state != ack.state {
            row.state = ack.state.clone();
        }
        if !comparable {
            return;
        }
        row.backoff_ms = nudge_after_ms;
        row.nudge_ms = now_ms + nudge_after_ms;
        self.reached(host, &ack.reached, now_ms);
    }

    /// Takes off a host's list what it has finished.
    fn reached(&mut self, host: &HostId, reached: &Reached, now_ms: u64) {
        let (first, batches, took) = (self.first, &mut self.batches, &mut self.took);
        let Some(slot) = self.slots.get(host).copied() else { return };
        let Some(row) = self.rows[slot as usize].as_mut().filter(|row| row.is_behind() && !reached.is_empty()) else { return };
        let known = row.with(reached);
        row.forgotten = row.forgotten.filter(|(topic, wanted)| revision(&known, *topic) < *wanted);
        let (mut open, mut partial) = (Runs::default(), Vec::new());
        for number in row.open.iter() {
            let Some(batch) = number.checked_sub(first).and_then(|at| batches.get_mut(at as usize)) else { continue };
            if batch.wanted(slot, row.own).all(|(topic, wanted)| revision(&known, topic) >= wanted) {
                let ms = batch.finished(now_ms);
                if took.len() < TOOK_MAX {
                    took.push(ms);
                }
            } else {
                let some = batch.wanted(slot, row.own).filter(|(topic, wanted)| revision(&known, *topic) >= *wanted);
                partial.extend(some.map(|(topic, _)| (topic, revision(&known, topic))));
                open.push(number);
            }
        }
        partial.sort_unstable();
        partial.dedup();
        (row.open, row.partial) = (open, partial);
    }

    /// A sign of life that says nothing about revisions.
    pub fn heard(&mut self, host: &HostId, state: HostState, now_ms: u64) {
        match self.row(host) {
            Some((_, row)) => (row.heard_ms, row.state) = (Some(now_ms), state),
            None => self.met(host, state, now_ms),
        }
    }

    /// A host that no batch concerned yet says what it does.
    fn met(&mut self, host: &HostId, state: HostState, now_ms: u64) {
        if self.strangers.len() >= STRANGERS_MAX && !self.strangers.contains_key(host) {
            self.strangers.retain(|_, (_, at)| now_ms.saturating_sub(*at) < STRANGER_FORGOTTEN_MS);
            if self.strangers.len() >= STRANGERS_MAX {
                return;
            }
        }
        self.strangers.insert(host.clone(), (state, now_ms));
    }

    /// A host that leaves is no longer waited for.
    pub fn left(&mut self, host: &HostId) {
        let Some(slot) = self.slots.remove(host) else { return };
        let Some(row) = self.rows[slot as usize].take() else { return };
        for number in row.open.iter() {
            if let Some(batch) = number.checked_sub(self.first).and_then(|at| self.batches.get_mut(at as usize)) {
                batch.left += 1;
                batch.settle();
            }
        }
        self.free.push_back((slot, self.first + self.batches.len() as u64));
    }

    /// This change touched no topic: it is in force everywhere as soon as it is written.
    pub fn touched_nothing(&mut self, change: u64) {
        remember(&mut self.nothing, change);
    }

    /// No batch could hold this change.
    pub fn was_torn(&mut self, change: u64) {
        remember(&mut self.torn, change);
    }

    /// The batch that carries a change, and its number: the first that reflects it, unless what came before it is not known here.
    fn batch_of(&self, change: u64) -> Option<(u64, &Batch)> {
        let at = self.batches.partition_point(|batch| batch.catalog < change);
        let batch = self.batches.get(at).filter(|batch| batch.after < change)?;
        let at = match batch.superseded {
            false => at,
            true => at + self.batches.iter().skip(at).position(|batch| !batch.superseded)?,
        };
        Some((self.first + at as u64, &self.batches[at]))
    }

    /// How far a change is; `None` when it is not published yet, not known here, or forgotten.
    pub fn progress(&self, change: u64, now_ms: u64) -> Option<Progress> {
        if self.nothing.contains(&change) {
            let (cut, summary, behind) = Default::default();
            return Some(Progress { change, cut, span: 0, summary, lax: 0, behind, torn: false });
        }
        let (number, batch) = self.batch_of(change)?;
        let (mut behind, mut lax) = (Vec::new(), 0);
        for row in batch.span.slots().filter_map(|slot| self.rows.get(slot as usize)?.as_ref()) {
            let is_open = batch.summary.is_none() && row.open.contains(number);
            // Whoever has it and lets pass what it denies does not enforce it.
            let is_lax = !is_open && !row.state.enforces();
            lax += u32::from(is_lax);
            if (is_open || is_lax) && behind.len() < BEHIND_NAMED_MAX {
                behind.push((row.host.clone(), row.why(batch.committed_ms, now_ms)));
            }
        }
        Some(Progress {
            change,
            cut: batch.cut,
            span: batch.span.len() as u32 - batch.left,
            summary: batch.summary.unwrap_or_else(|| batch.times.summary()),
            lax,
            behind,
            torn: self.torn.contains(&change),
        })
    }

    /// The hosts that a change concerns, those that left excepted.
    pub fn span(&self, change: u64) -> Option<Vec<HostId>> {
        if self.nothing.contains(&change) {
            return Some(Vec::new());
        }
        let (_, batch) = self.batch_of(change)?;
        let host = |slot: u32| Some(self.rows.get(slot as usize)?.as_ref()?.host.clone());
        let mut hosts: Vec<HostId> = batch.span.slots().filter_map(host).collect();
        hosts.sort_unstable();
        Some(hosts)
    }

    /// The newest change of every batch that moved since the last call.
    pub fn moved(&mut self) -> Vec<u64> {
        // What happened in the registry is no change of its own.
        let moved = self.batches.iter_mut().filter(|batch| !batch.told && batch.change > batch.after);
        let tell = |batch: &mut Batch| {
            batch.told = true;
            batch.change
        };
        moved.map(tell).collect()
    }

    /// How long, in milliseconds, hosts took to have batches in force, since the last call.
    pub fn took(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.took)
    }

    /// Hosts that are behind with anything.
    pub fn behind(&self) -> usize {
        self.rows.iter().flatten().filter(|row| row.is_behind()).count()
    }

    pub fn hosts(&self) -> usize {
        self.slots.len()
    }

    /// What a host does, as it last said itself; nothing of one that was never heard of.
    pub fn standing(&self, host: &HostId, now_ms: u64) -> Option<Standing> {
        let Some(slot) = self.slots.get(host) else {
            let (state, at) = self.strangers.get(host)?;
            let heard_ms_ago = now_ms.saturating_sub(*at);
            return Some(Standing { state: state.clone(), heard_ms_ago, is_behind: false, behind_ms: 0 });
        };
        let row = self.rows.get(*slot as usize)?.as_ref()?;
        let heard_ms_ago = now_ms.saturating_sub(row.heard_ms?);
        let oldest = row.open.iter().next().and_then(|number| self.batches.get(number.checked_sub(self.first)? as usize));
        let behind_ms = oldest.map_or(0, |batch| now_ms.saturating_sub(batch.committed_ms));
        Some(Standing { state: row.state.clone(), heard_ms_ago, is_behind: row.is_behind(), behind_ms })
    }

    /// Batches that some host has not finished.
    pub fn unfinished(&self) -> usize {
        self.batches.iter().filter(|batch| batch.summary.is_none()).count()
    }
}

fn remember(changes: &mut BTreeSet<u64>, change: u64) {
    changes.insert(change);
    while changes.len() > ODD_CHANGES_MAX {
        changes.pop_first();
    }
}
