//! Acknowledgements that are faster than the word of the commit.

use std::collections::VecDeque;

use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;

use super::{EARLY_MAX, EARLY_PER_HOST_MAX};
use crate::Map;

/// By host, oldest first. A host that makes up revisions pushes out its own; when all together are too many, whoever has most gives way.
#[derive(Debug, Default)]
pub(super) struct Early {
    hosts: Map<HostId, VecDeque<(TopicHash, u64)>>,
    len: usize,
}

impl Early {
    pub fn keep(&mut self, host: &HostId, reached: impl Iterator<Item = (TopicHash, u64)>) {
        let mut reached = reached.peekable();
        if reached.peek().is_none() {
            return;
        }
        let kept = self.hosts.entry(host.clone()).or_default();
        let before = kept.len();
        for one in reached {
            if kept.len() >= EARLY_PER_HOST_MAX {
                kept.pop_front();
            }
            kept.push_back(one);
        }
        self.len = self.len - before + kept.len();
        while self.len > EARLY_MAX {
            let most = self.hosts.iter().max_by_key(|(_, kept)| kept.len()).map(|(host, _)| host.clone());
            let Some(gone) = most.and_then(|host| self.hosts.remove(&host)) else { return };
            self.len -= gone.len();
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// What is no longer early.
    pub fn take_up_to(&mut self, newest: u64) -> Vec<(HostId, Vec<(TopicHash, u64)>)> {
        let mut due = Vec::new();
        self.hosts.retain(|host, kept| {
            if kept.iter().any(|(_, revision)| *revision <= newest) {
                let (reached, left): (Vec<_>, Vec<_>) = kept.drain(..).partition(|(_, revision)| *revision <= newest);
                self.len -= reached.len();
                *kept = left.into();
                due.push((host.clone(), reached));
            }
            !kept.is_empty()
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: usize) -> HostId {
        format!("h{number}").parse().unwrap()
    }

    fn some(count: usize, from: u64) -> impl Iterator<Item = (TopicHash, u64)> {
        let topic = groupcast_policy::topic::Topic::Rules("g".parse().unwrap()).hash64();
        (0..count as u64).map(move |number| (topic, from + number))
    }

    #[test]
    fn a_host_that_makes_up_revisions_pushes_out_only_its_own() {
        let mut early = Early::default();
        early.keep(&host(1), some(1, 10));
        for round in 0..100 {
            early.keep(&host(2), some(4_096, u64::MAX - 5_000 + round));
        }
        assert_eq!(early.len, 1 + EARLY_PER_HOST_MAX);
        assert_eq!(early.take_up_to(10), [(host(1), some(1, 10).collect::<Vec<_>>())]);
        assert_eq!(early.len, EARLY_PER_HOST_MAX);
        assert!(early.take_up_to(10).is_empty());
    }

    #[test]
    fn all_together_are_bounded_and_who_has_most_gives_way() {
        let mut early = Early::default();
        early.keep(&host(0), some(1, 10));
        let most = EARLY_MAX / EARLY_PER_HOST_MAX;
        for number in 1..=most + 5 {
            early.keep(&host(number), some(EARLY_PER_HOST_MAX, 1_000));
            assert!(early.len <= EARLY_MAX);
        }
        assert_eq!(early.len, early.hosts.values().map(VecDeque::len).sum::<usize>());
        assert_eq!(early.take_up_to(10).len(), 1, "who had little kept it");
    }
}
