//! Which hosts have which change in force, and who has to be told again.
//!
//! Acknowledgements are state: a host says which revisions it has, and a change is done on a host when every topic of it that the
//! host follows has reached the change's revision. Hosts that stay behind are nudged with what they should have: republish is at
//! most once, and a nudge is what makes up for it.

use crate::Map;
use std::collections::{BTreeMap, VecDeque};

use groupcast_messages::{Ack, Cut, HostState, NUDGE_TOPICS_MAX, Nudge};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;

use crate::batch::spread_ms;
use crate::node::Committed;

/// Batches whose progress is remembered. Older ones are forgotten, done or not; hosts are still nudged for them.
pub const BATCHES_MAX: usize = 1_000;

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

#[derive(Debug)]
struct Host {
    state: HostState,
    /// What it must reach, and has not: bounded by the topics it follows.
    missing: BTreeMap<TopicHash, u64>,
    /// Batches it has not finished, oldest first: (batch, what it must reach for it).
    open: VecDeque<(u64, Vec<(TopicHash, u64)>)>,
    nudge_ms: u64,
    backoff_ms: u64,
}

#[derive(Debug)]
struct Batch {
    change: u64,
    cut: Cut,
    committed_ms: u64,
    span: usize,
    /// Milliseconds after commit at which hosts had it in force, in order.
    reached_ms: Vec<u64>,
}

/// How far one change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    pub cut: Cut,
    pub change: u64,
    /// Hosts it concerns.
    pub span: usize,
    pub enforced: usize,
    pub first_ms: Option<u64>,
    pub last_ms: Option<u64>,
    pub behind: Vec<(HostId, HostState)>,
}

impl Progress {
    pub fn is_done(&self) -> bool {
        self.enforced == self.span
    }
}

#[derive(Debug)]
pub struct Convergence {
    settings: Settings,
    cut: Cut,
    hosts: Map<HostId, Host>,
    batches: BTreeMap<u64, Batch>,
    next: u64,
    /// No nudge is due before this. Acknowledgements do not move it, so it may be too early, never too late: looking at every
    /// host for every acknowledgement would cost the square of the fleet.
    quiet_until_ms: Option<u64>,
    /// The last revision committed, as far as it is known here.
    last: u64,
    /// Of batches that are not known here yet: a host can be faster than the server's word that they are committed.
    early: VecDeque<(HostId, Ack)>,
}

/// Early acknowledgements kept. One that is lost costs a nudge.
pub const EARLY_ACKS_MAX: usize = 4_096;

impl Convergence {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            cut: Cut::default(),
            hosts: Map::default(),
            batches: BTreeMap::new(),
            next: 0,
            quiet_until_ms: None,
            last: 0,
            early: VecDeque::new(),
        }
    }

    /// A batch was committed; from now on its span is waited for.
    pub fn committed(&mut self, committed: &Committed, now_ms: u64) {
        self.cut = self.cut.max(committed.cut);
        let number = self.next;
        self.next += 1;
        let batch = Batch {
            change: committed.change,
            cut: committed.cut,
            committed_ms: now_ms,
            span: committed.span.len(),
            reached_ms: Vec::new(),
        };
        self.batches.insert(number, batch);
        // Hosts were told to take their time.
        let patience_ms = self.settings.nudge_after_ms + u64::from(spread_ms(committed.span.len()));
        if !committed.span.is_empty() {
            let due = now_ms + patience_ms;
            self.quiet_until_ms = Some(self.quiet_until_ms.map_or(due, |earlier| earlier.min(due)));
        }
        for (host, topics) in &committed.span {
            let host = self.hosts.entry(host.clone()).or_insert_with(|| Host {
                state: HostState::Enforcing,
                missing: BTreeMap::new(),
                open: VecDeque::new(),
                nudge_ms: 0,
                backoff_ms: 0,
            });
            if host.missing.is_empty() {
                host.backoff_ms = patience_ms;
                host.nudge_ms = now_ms + host.backoff_ms;
            }
            host.missing.extend(topics.iter().copied());
            host.open.push_back((number, topics.clone()));
        }
        if self.batches.len() > BATCHES_MAX
            && let Some((oldest, _)) = self.batches.pop_first()
        {
            for host in self.hosts.values_mut() {
                host.open.retain(|(batch, _)| *batch > oldest);
            }
        }
        self.last = committed.topics.iter().map(|(_, revision)| *revision).max().unwrap_or(committed.cut.lead);
        for (host, ack) in std::mem::take(&mut self.early) {
            self.acknowledged(&host, &ack, now_ms);
        }
    }

    pub fn acknowledged(&mut self, host: &HostId, ack: &Ack, now_ms: u64) {
        let newest = ack.reached.iter().map(|(_, revision)| *revision).max().unwrap_or(0);
        if (ack.term, newest) > (self.cut.term, self.last) && newest != 0 {
            self.early.push_back((host.clone(), ack.clone()));
            if self.early.len() > EARLY_ACKS_MAX {
                self.early.pop_front();
            }
        }
        let Some(host) = self.hosts.get_mut(host) else { return };
        host.state = ack.state.clone();
        if ack.term != self.cut.term {
            return; // revisions of another term do not compare; the host will be nudged into this one
        }
        for (topic, revision) in &ack.reached {
            if host.missing.get(topic).is_some_and(|missing| missing <= revision) {
                host.missing.remove(topic);
            }
            for (_, topics) in &mut host.open {
                topics.retain(|(open, wanted)| open != topic || wanted > revision);
            }
        }
        let batches = &mut self.batches;
        host.open.retain(|(number, topics)| {
            if topics.is_empty()
                && let Some(batch) = batches.get_mut(number)
            {
                batch.reached_ms.push(now_ms.saturating_sub(batch.committed_ms));
            }
            !topics.is_empty()
        });
        host.backoff_ms = self.settings.nudge_after_ms;
        host.nudge_ms = now_ms + host.backoff_ms;
    }

    /// A host that leaves is no longer waited for.
    pub fn left(&mut self, host: &HostId) {
        if let Some(host) = self.hosts.remove(host) {
            for (number, _) in host.open {
                if let Some(batch) = self.batches.get_mut(&number) {
                    batch.span -= 1;
                }
            }
        }
    }

    /// The stream elected a new leader: what it was about to republish may be lost. Everyone behind is told at once.
    pub fn stream_leader_changed(&mut self, now_ms: u64) {
        self.hosts.values_mut().for_each(|host| host.nudge_ms = host.nudge_ms.min(now_ms));
        self.quiet_until_ms = Some(now_ms);
    }

    /// The nudges that are due.
    pub fn tick(&mut self, now_ms: u64) -> Vec<(HostId, Vec<u8>)> {
        let mut nudges = Vec::new();
        if self.quiet_until_ms.is_none_or(|due| due > now_ms) {
            return nudges;
        }
        for (id, host) in &mut self.hosts {
            if host.missing.is_empty() || host.nudge_ms > now_ms {
                continue;
            }
            host.backoff_ms = (host.backoff_ms * 2).min(self.settings.nudge_backoff_max_ms);
            host.nudge_ms = now_ms + host.backoff_ms;
            let should = host.missing.iter().take(NUDGE_TOPICS_MAX).map(|(topic, revision)| (*topic, *revision)).collect();
            nudges.push((id.clone(), Nudge { cut: self.cut, should }.encode()));
        }
        self.quiet_until_ms = self.hosts.values().filter(|host| !host.missing.is_empty()).map(|host| host.nudge_ms).min();
        nudges
    }

    pub fn deadline_ms(&self) -> Option<u64> {
        self.quiet_until_ms
    }

    /// The newest batch that carries `change`.
    pub fn progress(&self, change: u64) -> Option<Progress> {
        let (number, batch) = self.batches.iter().rev().find(|(_, batch)| batch.change == change)?;
        let behind = self.hosts.iter().filter(|(_, host)| host.open.iter().any(|(open, _)| open == number));
        Some(Progress {
            cut: batch.cut,
            change,
            span: batch.span,
            enforced: batch.reached_ms.len(),
            first_ms: batch.reached_ms.first().copied(),
            last_ms: batch.reached_ms.last().copied(),
            behind: behind.map(|(id, host)| (id.clone(), host.state.clone())).collect(),
        })
    }

    /// Hosts that are behind with anything.
    pub fn behind(&self) -> usize {
        self.hosts.values().filter(|host| !host.missing.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> HostId {
        HostId::new(name).unwrap()
    }

    fn committed(lead: u64, change: u64, span: &[(&str, &[(u64, u64)])]) -> Committed {
        let topics = |list: &[(u64, u64)]| list.iter().map(|(t, r)| (TopicHash(*t), *r)).collect::<Vec<_>>();
        let span = span.iter().map(|(name, list)| (host(name), topics(list))).collect();
        Committed { proposal: None, cut: Cut { term: 1, lead }, change, topics: Vec::new(), span }
    }

    fn ack(reached: &[(u64, u64)]) -> Ack {
        let reached = reached.iter().map(|(t, r)| (TopicHash(*t), *r)).collect();
        Ack { term: 1, state: HostState::Enforcing, reached }
    }

    #[test]
    fn a_change_is_done_on_a_host_when_every_topic_of_it_is_reached() {
        let mut convergence = Convergence::new(Settings::default());
        convergence.committed(&committed(10, 7, &[("a", &[(1, 11), (2, 12)]), ("b", &[(1, 11)])]), 0);
        convergence.acknowledged(&host("a"), &ack(&[(1, 11)]), 5);
        assert_eq!(convergence.progress(7).unwrap().enforced, 0);
        convergence.acknowledged(&host("a"), &ack(&[(2, 40)]), 6); // a later revision includes it
        convergence.acknowledged(&host("b"), &ack(&[(1, 11)]), 9);
        let progress = convergence.progress(7).unwrap();
        assert!(progress.is_done() && progress.behind.is_empty());
        assert_eq!((progress.first_ms, progress.last_ms), (Some(6), Some(9)));
    }

    #[test]
    fn who_stays_behind_is_nudged_with_backoff_until_it_acknowledges_or_leaves() {
        let mut convergence = Convergence::new(Settings::default());
        convergence.committed(&committed(10, 7, &[("a", &[(1, 11)]), ("b", &[(1, 11)])]), 0);
        assert!(convergence.tick(499).is_empty());
        assert_eq!(convergence.tick(500).len(), 2);
        assert!(convergence.tick(501).is_empty());
        convergence.acknowledged(&host("a"), &ack(&[(1, 11)]), 600);
        let nudges = convergence.tick(1_500);
        assert_eq!(nudges.len(), 1);
        assert_eq!(Nudge::decode(&nudges[0].1).unwrap().should, vec![(TopicHash(1), 11)]);
        convergence.stream_leader_changed(1_600);
        assert_eq!(convergence.tick(1_600).len(), 1);
        convergence.left(&host("b"));
        assert!(convergence.tick(100_000).is_empty());
        assert!(convergence.progress(7).unwrap().is_done());
    }

    #[test]
    fn an_acknowledgement_may_come_before_the_word_of_the_commit() {
        let mut convergence = Convergence::new(Settings::default());
        convergence.acknowledged(&host("a"), &ack(&[(1, 11)]), 1);
        convergence.committed(&committed(10, 7, &[("a", &[(1, 11)])]), 2);
        assert!(convergence.progress(7).unwrap().is_done());
        assert!(convergence.tick(10_000).is_empty(), "nobody is told what it has said already");
    }

    #[test]
    fn early_acknowledgements_are_bounded() {
        let mut convergence = Convergence::new(Settings::default());
        for number in 0..=EARLY_ACKS_MAX as u64 {
            convergence.acknowledged(&host(&format!("h{number}")), &ack(&[(1, 11)]), 1);
        }
        assert_eq!(convergence.early.len(), EARLY_ACKS_MAX);
        assert_eq!(convergence.early.front().map(|(host, _)| host.as_str()), Some("h1"));
    }

    #[test]
    fn an_acknowledgement_of_another_term_proves_nothing() {
        let mut convergence = Convergence::new(Settings::default());
        convergence.committed(&committed(10, 7, &[("a", &[(1, 11)])]), 0);
        convergence.acknowledged(&host("a"), &Ack { term: 0, ..ack(&[(1, 500)]) }, 5);
        assert_eq!(convergence.behind(), 1);
    }

    #[test]
    fn memory_is_bounded_at_the_limit() {
        let mut convergence = Convergence::new(Settings::default());
        for i in 0..=BATCHES_MAX as u64 {
            convergence.committed(&committed(10 + i, i + 1, &[("a", &[(1, 11 + i)])]), i);
        }
        assert_eq!(convergence.batches.len(), BATCHES_MAX);
        assert_eq!(convergence.hosts[&host("a")].open.len(), BATCHES_MAX);
        assert!(convergence.progress(1).is_none());
        assert_eq!(convergence.behind(), 1);
    }
}
