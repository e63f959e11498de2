//! Acknowledgements are state: what is in force now, not a log of what happened, so a lost one is made good by the next.

use crate::Map;
use std::collections::BTreeMap;

use groupcast_messages::{ACK_TOPICS_MAX, Ack, HostState};
use groupcast_policy::topic::TopicHash;

use super::{Effect, Reader};

#[derive(Debug)]
pub(super) struct Acks {
    /// What the host does with what it has; told with every acknowledgement, and at once when it changes.
    state: HostState,
    state_told: bool,
    /// Committed, not known to be in force: revision and the commit that brought it. A tree, like the next: empty most of the time, and
    /// then it holds no memory that has gone cold until the next commit.
    committed: BTreeMap<TopicHash, (u64, u64)>,
    /// In force, not acknowledged.
    in_force: BTreeMap<TopicHash, u64>,
    /// What was acknowledged, kept to repeat it when asked.
    sent: Map<TopicHash, u64>,
    next_ms: u64,
}

impl Default for Acks {
    fn default() -> Self {
        let (committed, in_force, sent) = Default::default();
        Self { state: HostState::Enforcing, state_told: true, committed, in_force, sent, next_ms: 0 }
    }
}

impl Acks {
    pub fn set_state(&mut self, state: HostState) {
        if self.state != state {
            self.state = state;
            self.state_told = false;
        }
    }

    /// Whoever counts may be another by now: a state that is not the usual one is told again.
    pub fn tell_state_again(&mut self) {
        self.state_told &= self.state == HostState::Enforcing;
    }

    /// From time to time the usual one too: a word that was lost must not count for ever, and whoever counts since may know nothing.
    pub fn repeat_state(&mut self) {
        self.state_told = false;
    }

    fn has_news(&self) -> bool {
        !self.in_force.is_empty() || !self.state_told
    }

    pub fn committed(&mut self, topic: TopicHash, revision: u64, commit: u64) {
        let known = self.committed.entry(topic).or_insert((revision, commit));
        // Two topics with one hash: a commit brings both, and the higher revision is what is waited for.
        *known = if known.1 == commit { (known.0.max(revision), commit) } else { (revision, commit) };
    }

    pub fn enforced(&mut self, up_to: u64) {
        let in_force = &mut self.in_force;
        self.committed.retain(|topic, (revision, commit)| {
            let done = *commit <= up_to;
            if done {
                in_force.insert(*topic, *revision);
            }
            !done
        });
    }

    pub fn not_before(&mut self, ms: u64) {
        self.next_ms = self.next_ms.max(ms);
    }

    pub fn forget(&mut self, topic: TopicHash) {
        self.committed.remove(&topic);
        self.in_force.remove(&topic);
        self.sent.remove(&topic);
    }

    pub fn repeat(&mut self) {
        for (topic, revision) in self.sent.drain() {
            self.in_force.entry(topic).or_insert(revision);
        }
    }

    pub fn deadline(&self) -> Option<u64> {
        self.has_news().then_some(self.next_ms)
    }
}

impl Reader {
    pub(super) fn tick_acks(&mut self, now_ms: u64) {
        if !self.acks.has_news() || now_ms < self.acks.next_ms {
            return;
        }
        self.acks.next_ms = now_ms + self.settings.ack_interval_ms;
        let later = self.acks.in_force.keys().nth(ACK_TOPICS_MAX).copied();
        let later = later.map(|first| self.acks.in_force.split_off(&first)).unwrap_or_default();
        let reached: Vec<(TopicHash, u64)> = std::mem::replace(&mut self.acks.in_force, later).into_iter().collect();
        self.acks.sent.extend(reached.iter().copied());
        self.acks.state_told = true;
        self.out.push(Effect::Ack(Ack { term: self.term(), state: self.acks.state.clone(), reached }.encode()));
    }
}
