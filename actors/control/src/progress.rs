//! Which hosts have which change in force.
//!
//! Acknowledgements are state: a host says which revisions it has, and a change is done on a host when every topic of it that the
//! host follows has reached the change's revision. Made for ten thousand hosts and a thousand batches that nobody has finished: a
//! host costs eight bytes for a batch it has not finished, and a batch four for each host of its span.

use std::collections::{BTreeMap, HashMap, VecDeque};

use groupcast_messages::{Ack, Cut, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;
use groupcast_topics::node::Committed;

/// Batches whose progress is remembered, done or not.
pub const BATCHES_MAX: usize = 1_000;
/// Changes whose batch is remembered: merged ones share a batch.
pub const CHANGES_MAX: usize = 20_000;
/// A host that was not heard of for so long since a change is called unreachable.
pub const UNREACHABLE_AFTER_MS: u64 = 5_000;
/// Acknowledgements of batches not heard of yet that are kept: a quick host is faster than the word of the commit.
pub const EARLY_MAX: usize = 65_536;
/// Hosts that one report names as behind.
pub const BEHIND_NAMED_MAX: usize = 1_000;

type Reach = Box<[(TopicHash, u64)]>;

#[derive(Debug)]
struct Row {
    host: HostId,
    state: HostState,
    heard_ms: Option<u64>,
    /// Topics it has not reached: (what it must reach in the end, what it has). Bounded by the topics it follows.
    missing: BTreeMap<TopicHash, (u64, u64)>,
    /// Batches it has not finished, oldest first, and which of the batch's lists is its.
    open: VecDeque<(u32, u32)>,
}

impl Row {
    fn has(&self, reach: &[(TopicHash, u64)]) -> bool {
        reach.iter().all(|(topic, revision)| self.missing.get(topic).is_none_or(|(_, reached)| reached >= revision))
    }
}

#[derive(Debug)]
struct Batch {
    cut: Cut,
    committed_ms: u64,
    changes: Vec<u64>,
    /// Distinct lists of what hosts must reach.
    lists: Vec<Reach>,
    span: Box<[u32]>,
    /// Of the span, those that left without finishing.
    left: u32,
    /// Milliseconds after the commit at which hosts had it in force, in order; summed up when it is done.
    reached_ms: Vec<u32>,
    summary: Option<Summary>,
    /// Told to those who watch since it last moved.
    told: bool,
}

/// Milliseconds from commit until so many hosts had it in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    pub enforced: u32,
    pub first_ms: Option<u32>,
    pub p50_ms: Option<u32>,
    pub p99_ms: Option<u32>,
    pub last_ms: Option<u32>,
}

impl Summary {
    fn of(reached_ms: &[u32]) -> Self {
        // Acknowledgements arrive in the order of time.
        let at = |percent: usize| reached_ms.get((reached_ms.len() * percent).div_ceil(100).saturating_sub(1)).copied();
        Self {
            enforced: reached_ms.len() as u32,
            first_ms: reached_ms.first().copied(),
            p50_ms: at(50),
            p99_ms: at(99),
            last_ms: reached_ms.last().copied(),
        }
    }
}

/// Why a host is behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// It was only just told.
    Waiting,
    Unreachable,
    /// It says so itself: failing, frozen, bypassed, locked down.
    State(HostState),
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Waiting => f.write_str("waiting"),
            Self::Unreachable => f.write_str("unreachable"),
            Self::State(state) if state.reason().is_empty() => f.write_str(state.name()),
            Self::State(state) => write!(f, "{}: {}", state.name(), state.reason()),
        }
    }
}

/// How far one change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    pub change: u64,
    pub cut: Cut,
    /// How many hosts it concerns, without those that left.
    pub span: u32,
    pub summary: Summary,
    /// Up to [`BEHIND_NAMED_MAX`] of the hosts that have not got it.
    pub behind: Vec<(HostId, Why)>,
}

impl Progress {
    pub fn is_done(&self) -> bool {
        self.summary.enforced >= self.span
    }
}

#[derive(Debug, Default)]
pub struct Convergence {
    term: u64,
    slots: HashMap<HostId, u32>,
    rows: Vec<Option<Row>>,
    /// Slots of hosts that left, and the batch after which they may be used again: older ones still name them.
    free: VecDeque<(u32, u32)>,
    batches: VecDeque<Batch>,
    /// The number of the first of them.
    first: u32,
    changes: BTreeMap<u64, u32>,
    /// The highest revision of any batch heard of.
    newest: u64,
    /// Acknowledged beyond that, oldest first.
    early: VecDeque<(HostId, TopicHash, u64)>,
}

impl Convergence {
    /// A leader begins: what was published before it is not its to know.
    pub fn begin(&mut self, term: u64) {
        *self = Self { term, ..Self::default() };
    }

    /// A batch with these changes was committed; from now on its span is waited for.
    pub fn committed(&mut self, committed: &Committed, changes: &[u64], now_ms: u64) {
        let number = self.first + self.batches.len() as u32;
        let mut lists: Vec<Reach> = Vec::new();
        let mut known: HashMap<&[(TopicHash, u64)], u32> = HashMap::new();
        let mut span = Vec::with_capacity(committed.span.len());
        for (host, reach) in &committed.span {
            let list = *known.entry(reach).or_insert_with(|| {
                lists.push(reach.clone().into_boxed_slice());
                lists.len() as u32 - 1
            });
            let slot = self.slot(host);
            span.push(slot);
            if let Some(row) = &mut self.rows[slot as usize] {
                for (topic, revision) in reach {
                    let (wanted, _) = row.missing.entry(*topic).or_insert((0, 0));
                    *wanted = (*wanted).max(*revision);
                }
                row.open.push_back((number, list));
            }
        }
        let mut batch = Batch {
            cut: committed.cut,
            committed_ms: now_ms,
            changes: changes.to_vec(),
            lists,
            span: span.into_boxed_slice(),
            left: 0,
            reached_ms: Vec::new(),
            summary: None,
            told: false,
        };
        batch.settle();
        self.batches.push_back(batch);
        changes.iter().for_each(|change| {
            self.changes.insert(*change, number);
        });
        while self.batches.len() > BATCHES_MAX {
            self.forget_oldest();
        }
        while self.changes.len() > CHANGES_MAX {
            self.changes.pop_first();
        }
        let reached = committed.span.iter().flat_map(|(_, reach)| reach).chain(&committed.topics);
        self.newest = reached.map(|(_, revision)| *revision).max().unwrap_or(0).max(self.newest);
        for (host, topic, revision) in std::mem::take(&mut self.early) {
            if revision > self.newest {
                self.early.push_back((host, topic, revision));
            } else if let Some(slot) = self.slots.get(&host).copied() {
                self.reach(slot, topic, revision);
                self.finish(slot, now_ms);
            }
        }
    }

    fn reach(&mut self, slot: u32, topic: TopicHash, revision: u64) {
        let Some(row) = self.rows[slot as usize].as_mut() else { return };
        if let Some((wanted, reached)) = row.missing.get_mut(&topic) {
            *reached = (*reached).max(revision);
            if *reached >= *wanted {
                row.missing.remove(&topic);
            }
        }
    }

    fn forget_oldest(&mut self) {
        let Some(oldest) = self.batches.pop_front() else { return };
        for slot in &oldest.span {
            if let Some(row) = self.rows.get_mut(*slot as usize).and_then(Option::as_mut)
                && row.open.front().is_some_and(|(number, _)| *number <= self.first)
            {
                row.open.pop_front();
            }
        }
        for change in &oldest.changes {
            if self.changes.get(change) == Some(&self.first) {
                self.changes.remove(change);
            }
        }
        self.first += 1;
    }

    fn slot(&mut self, host: &HostId) -> u32 {
        if let Some(slot) = self.slots.get(host) {
            return *slot;
        }
        let row = Row {
            host: host.clone(),
            state: HostState::Enforcing,
            heard_ms: None,
            missing: BTreeMap::new(),
            open: VecDeque::new(),
        };
        let slot = match self.free.front() {
            Some((slot, after)) if *after < self.first => {
                let slot = *slot;
                self.free.pop_front();
                self.rows[slot as usize] = Some(row);
                slot
            }
            _ => {
                self.rows.push(Some(row));
                self.rows.len() as u32 - 1
            }
        };
        self.slots.insert(host.clone(), slot);
        slot
    }

    /// Returns the milliseconds that this host took for each batch it finished with it.
    pub fn acknowledged(&mut self, host: &HostId, ack: &Ack, now_ms: u64) -> Vec<u32> {
        if ack.term == self.term {
            for (topic, revision) in ack.reached.iter().filter(|(_, revision)| *revision > self.newest) {
                self.early.push_back((host.clone(), *topic, *revision));
            }
            while self.early.len() > EARLY_MAX {
                self.early.pop_front();
            }
        }
        let Some(slot) = self.slots.get(host).copied() else { return Vec::new() };
        let Some(row) = self.rows[slot as usize].as_mut() else { return Vec::new() };
        row.heard_ms = Some(now_ms);
        row.state = ack.state.clone();
        if ack.term != self.term {
            return Vec::new(); // revisions of another term do not compare
        }
        for (topic, revision) in &ack.reached {
            self.reach(slot, *topic, *revision);
        }
        self.finish(slot, now_ms)
    }

    /// These hosts still need the topic; whoever else was waited for because of it is not any more.
    pub fn unfollowed(&mut self, topic: TopicHash, still: &[HostId], now_ms: u64) {
        for slot in 0..self.rows.len() as u32 {
            let Some(row) = self.rows[slot as usize].as_mut() else { continue };
            if row.missing.contains_key(&topic) && still.binary_search(&row.host).is_err() {
                row.missing.remove(&topic);
                self.finish(slot, now_ms);
            }
        }
    }

    /// Takes off a host's list what it has finished, and says how long that took.
    fn finish(&mut self, slot: u32, now_ms: u64) -> Vec<u32> {
        let mut took = Vec::new();
        let Some(row) = self.rows[slot as usize].as_mut() else { return took };
        let mut open = std::mem::take(&mut row.open);
        let (first, batches) = (self.first, &mut self.batches);
        open.retain(|(number, list)| {
            let Some(batch) = number.checked_sub(first).and_then(|at| batches.get_mut(at as usize)) else { return false };
            let done = batch.lists.get(*list as usize).is_none_or(|reach| row.has(reach));
            if done {
                let ms = u32::try_from(now_ms.saturating_sub(batch.committed_ms)).unwrap_or(u32::MAX);
                batch.reached_ms.push(ms);
                batch.settle();
                took.push(ms);
            }
            !done
        });
        row.open = open;
        took
    }

    /// A sign of life that says nothing about revisions.
    pub fn heard(&mut self, host: &HostId, state: HostState, now_ms: u64) {
        if let Some(row) = self.slots.get(host).and_then(|slot| self.rows[*slot as usize].as_mut()) {
            row.heard_ms = Some(now_ms);
            row.state = state;
        }
    }

    /// A host that leaves is no longer waited for.
    pub fn left(&mut self, host: &HostId) {
        let Some(slot) = self.slots.remove(host) else { return };
        let Some(row) = self.rows[slot as usize].take() else { return };
        for (number, _) in row.open {
            if let Some(batch) = number.checked_sub(self.first).and_then(|at| self.batches.get_mut(at as usize)) {
                batch.left += 1;
                batch.settle();
            }
        }
        self.free.push_back((slot, self.first + self.batches.len() as u32));
    }

    pub fn progress(&self, change: u64, now_ms: u64) -> Option<Progress> {
        let number = *self.changes.get(&change)?;
        let batch = self.batches.get(number.checked_sub(self.first)? as usize)?;
        let open = |row: &&Row| row.open.binary_search_by_key(&number, |(number, _)| *number).is_ok();
        let rows = batch.span.iter().filter_map(|slot| self.rows.get(*slot as usize)?.as_ref());
        let behind = if batch.summary.is_some() { Vec::new() } else { rows.filter(open).take(BEHIND_NAMED_MAX).collect() };
        let why = |row: &Row| match &row.state {
            HostState::Enforcing if row.heard_ms.is_some_and(|heard| heard >= batch.committed_ms) => Why::Waiting,
            HostState::Enforcing if now_ms < batch.committed_ms + UNREACHABLE_AFTER_MS => Why::Waiting,
            HostState::Enforcing => Why::Unreachable,
            state => Why::State(state.clone()),
        };
        Some(Progress {
            change,
            cut: batch.cut,
            span: batch.span.len() as u32 - batch.left,
            summary: batch.summary.unwrap_or_else(|| Summary::of(&batch.reached_ms)),
            behind: behind.into_iter().map(|row| (row.host.clone(), why(row))).collect(),
        })
    }

    /// The hosts that a change concerns, those that left excepted.
    pub fn span(&self, change: u64) -> Option<Vec<HostId>> {
        let number = *self.changes.get(&change)?;
        let batch = self.batches.get(number.checked_sub(self.first)? as usize)?;
        Some(batch.span.iter().filter_map(|slot| Some(self.rows.get(*slot as usize)?.as_ref()?.host.clone())).collect())
    }

    /// The newest change of every batch that moved since the last call.
    pub fn moved(&mut self) -> Vec<u64> {
        let moved = self.batches.iter_mut().filter(|batch| !batch.told);
        moved
            .filter_map(|batch| {
                batch.told = true;
                batch.changes.last().copied()
            })
            .collect()
    }

    /// Hosts that are behind with anything.
    pub fn behind(&self) -> usize {
        self.rows.iter().flatten().filter(|row| !row.missing.is_empty()).count()
    }

    pub fn hosts(&self) -> usize {
        self.slots.len()
    }

    /// Batches that some host has not finished.
    pub fn unfinished(&self) -> usize {
        self.batches.iter().filter(|batch| batch.summary.is_none()).count()
    }
}

impl Batch {
    /// What is done needs no more than its summary.
    fn settle(&mut self) {
        self.told = false;
        if self.summary.is_none() && self.reached_ms.len() + self.left as usize >= self.span.len() {
            self.summary = Some(Summary::of(&self.reached_ms));
            self.reached_ms = Vec::new();
            self.lists = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> HostId {
        HostId::new(name).unwrap()
    }

    fn committed(lead: u64, span: &[(&str, &[(u64, u64)])]) -> Committed {
        let topics = |list: &[(u64, u64)]| list.iter().map(|(t, r)| (TopicHash(*t), *r)).collect::<Vec<_>>();
        let span = span.iter().map(|(name, list)| (host(name), topics(list))).collect();
        Committed { proposal: None, cut: Cut { term: 1, lead }, change: 0, topics: Vec::new(), span }
    }

    fn ack(reached: &[(u64, u64)]) -> Ack {
        let reached = reached.iter().map(|(t, r)| (TopicHash(*t), *r)).collect();
        Ack { term: 1, state: HostState::Enforcing, reached }
    }

    fn leading() -> Convergence {
        let mut convergence = Convergence::default();
        convergence.begin(1);
        convergence
    }

    #[test]
    fn a_change_is_done_on_a_host_when_every_topic_of_it_is_reached() {
        let mut c = leading();
        c.committed(&committed(10, &[("a", &[(1, 11), (2, 12)]), ("b", &[(1, 11)])]), &[7, 8], 100);
        assert_eq!(c.span(8).unwrap(), [host("a"), host("b")]);
        assert!(c.acknowledged(&host("a"), &ack(&[(1, 11)]), 105).is_empty());
        assert_eq!(c.progress(7, 105).unwrap().behind, [(host("a"), Why::Waiting), (host("b"), Why::Waiting)]);
        assert_eq!(c.acknowledged(&host("a"), &ack(&[(2, 40)]), 106), [6], "a later revision includes it");
        c.acknowledged(&host("b"), &ack(&[(1, 11)]), 109);
        let progress = c.progress(8, 200).unwrap();
        assert!(progress.is_done() && progress.behind.is_empty() && c.behind() == 0 && c.unfinished() == 0);
        let Summary { enforced, first_ms, p50_ms, p99_ms, last_ms } = progress.summary;
        assert_eq!((enforced, first_ms, p50_ms, p99_ms, last_ms), (2, Some(6), Some(6), Some(9), Some(9)));
    }

    #[test]
    fn a_batch_in_between_is_not_done_by_an_acknowledgement_of_the_one_before() {
        let mut c = leading();
        c.committed(&committed(10, &[("a", &[(1, 11)])]), &[1], 0);
        c.committed(&committed(20, &[("a", &[(1, 21)])]), &[2], 0);
        c.acknowledged(&host("a"), &ack(&[(1, 11)]), 5);
        assert!(c.progress(1, 5).unwrap().is_done());
        assert!(!c.progress(2, 5).unwrap().is_done());
        c.acknowledged(&host("a"), &ack(&[(1, 21)]), 6);
        assert!(c.progress(2, 6).unwrap().is_done());
    }

    #[test]
    fn who_is_behind_and_why() {
        let mut c = leading();
        let all: &[(u64, u64)] = &[(1, 11)];
        c.committed(&committed(10, &[("frozen", all), ("silent", all), ("slow", all)]), &[7], 0);
        let state = HostState::Frozen { reason: "maintenance".into() };
        c.acknowledged(&host("frozen"), &Ack { state, ..ack(&[]) }, 3);
        c.heard(&host("slow"), HostState::Enforcing, 4);
        let why =
            |c: &Convergence, now| c.progress(7, now).unwrap().behind.iter().map(|(h, w)| format!("{h} {w}")).collect::<Vec<_>>();
        assert_eq!(why(&c, UNREACHABLE_AFTER_MS), ["frozen frozen: maintenance", "silent unreachable", "slow waiting"]);
        assert_eq!(why(&c, UNREACHABLE_AFTER_MS - 1)[1], "silent waiting");
        c.left(&host("silent"));
        c.left(&host("frozen"));
        c.acknowledged(&host("slow"), &ack(all), 9);
        let progress = c.progress(7, 9).unwrap();
        assert!(progress.is_done());
        assert_eq!(progress.span, 1);
    }

    #[test]
    fn an_acknowledgement_that_is_faster_than_the_word_of_its_batch_counts() {
        let mut c = leading();
        c.acknowledged(&host("a"), &ack(&[(1, 11)]), 4);
        c.acknowledged(&host("b"), &ack(&[(1, 21)]), 4);
        c.committed(&committed(10, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), &[7], 5);
        assert_eq!(c.progress(7, 5).unwrap().behind, [(host("b"), Why::Waiting)]);
        c.committed(&committed(20, &[("a", &[(1, 21)]), ("b", &[(1, 21)])]), &[8], 6);
        assert_eq!(c.progress(8, 6).unwrap().behind, [(host("a"), Why::Waiting)]);
        assert!(c.progress(7, 6).unwrap().is_done(), "a later revision includes it");
        for i in 0..=EARLY_MAX as u64 {
            c.acknowledged(&host("a"), &ack(&[(1, 100 + i)]), 7);
        }
        assert_eq!(c.early.len(), EARLY_MAX);
    }

    #[test]
    fn a_topic_that_a_host_does_not_need_any_more_is_not_waited_for() {
        let mut c = leading();
        c.committed(&committed(10, &[("a", &[(1, 11), (2, 12)]), ("b", &[(2, 12)])]), &[7], 0);
        c.acknowledged(&host("a"), &ack(&[(1, 11)]), 5);
        c.unfollowed(TopicHash(2), &[host("b")], 6);
        let progress = c.progress(7, 6).unwrap();
        assert_eq!((progress.summary.enforced, progress.behind.len(), c.behind()), (1, 1, 1));
        c.unfollowed(TopicHash(2), &[], 7);
        assert!(c.progress(7, 7).unwrap().is_done());
    }

    #[test]
    fn a_change_that_concerns_nobody_is_done_at_once() {
        let mut c = leading();
        c.committed(&committed(10, &[]), &[7], 0);
        assert!(c.progress(7, 0).unwrap().is_done());
        assert_eq!((c.moved(), c.moved()), (vec![7], vec![]));
        assert_eq!(c.progress(8, 0), None);
    }

    #[test]
    fn an_acknowledgement_of_another_term_proves_nothing() {
        let mut c = leading();
        c.committed(&committed(10, &[("a", &[(1, 11)])]), &[7], 0);
        c.acknowledged(&host("a"), &Ack { term: 0, ..ack(&[(1, 500)]) }, 5);
        assert_eq!(c.behind(), 1);
        c.begin(2);
        assert_eq!((c.progress(7, 0), c.behind()), (None, 0));
    }

    #[test]
    fn batches_and_changes_are_bounded() {
        let mut c = leading();
        for i in 0..=BATCHES_MAX as u64 {
            c.committed(&committed(10 + i, &[("a", &[(1, 11 + i)])]), &[i], i);
        }
        assert_eq!((c.batches.len(), c.progress(0, 0), c.progress(1, 0).is_some()), (BATCHES_MAX, None, true));
        assert_eq!(c.rows[0].as_ref().unwrap().open.len(), BATCHES_MAX);
        c.acknowledged(&host("a"), &ack(&[(1, 11 + BATCHES_MAX as u64)]), 5);
        assert_eq!((c.unfinished(), c.behind()), (0, 0));
        let changes: Vec<u64> = (5_000..5_000 + CHANGES_MAX as u64 + 1).collect();
        c.committed(&committed(5_000, &[]), &changes, 0);
        assert_eq!(c.changes.len(), CHANGES_MAX);
    }

    #[test]
    fn a_slot_is_used_again_only_when_no_batch_names_its_last_host() {
        let mut c = leading();
        c.committed(&committed(10, &[("a", &[(1, 11)])]), &[1], 0);
        c.left(&host("a"));
        c.committed(&committed(20, &[("b", &[(1, 21)])]), &[2], 0);
        assert_eq!((c.span(1), c.span(2), c.rows.len()), (Some(vec![]), Some(vec![host("b")]), 2));
        for i in 0..BATCHES_MAX as u64 {
            c.committed(&committed(100 + i, &[]), &[100 + i], 0);
        }
        c.committed(&committed(9_000, &[("c", &[(1, 9_001)])]), &[9_000], 0);
        assert_eq!((c.rows.len(), c.span(9_000)), (2, Some(vec![host("c")])));
    }
}
