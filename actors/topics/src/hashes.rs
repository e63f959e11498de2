//! Topics by the hash they have on the wire.
//!
//! Names of topics are chosen by those who write groups, and the hash has 64 bits and no key: whoever wants to finds two names with one
//! hash in minutes. So a hash only finds topics; which of them is meant, names decide.

use groupcast_policy::topic::{Topic, TopicHash};

use crate::Map;

#[derive(Debug, Clone, Default)]
pub struct TopicsByHash {
    first: Map<TopicHash, Topic>,
    /// Those whose hash another has too: none, most of the time.
    further: Map<TopicHash, Vec<Topic>>,
}

impl TopicsByHash {
    pub fn insert(&mut self, hash: TopicHash, topic: Topic) {
        if self.of(hash).any(|known| *known == topic) {
            return;
        }
        match self.first.entry(hash) {
            std::collections::hash_map::Entry::Vacant(entry) => _ = entry.insert(topic),
            std::collections::hash_map::Entry::Occupied(_) => self.further.entry(hash).or_default().push(topic),
        }
    }

    pub fn remove(&mut self, hash: TopicHash, topic: &Topic) {
        let next = self.further.get_mut(&hash).and_then(|further| {
            let is_first = self.first.get(&hash) == Some(topic);
            let at = if is_first { Some(0) } else { further.iter().position(|known| known == topic) };
            let removed = at.map(|at| further.remove(at));
            removed.filter(|_| is_first)
        });
        if self.further.get(&hash).is_some_and(Vec::is_empty) {
            self.further.remove(&hash);
        }
        if self.first.get(&hash) == Some(topic) {
            match next {
                Some(next) => _ = self.first.insert(hash, next),
                None => _ = self.first.remove(&hash),
            }
        }
    }

    /// All topics with this hash.
    pub fn of(&self, hash: TopicHash) -> impl Iterator<Item = &Topic> {
        self.first.get(&hash).into_iter().chain(self.further.get(&hash).into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_with_one_hash_are_kept_apart() {
        let names = ["a", "b", "c"].map(|id| Topic::Rules(id.parse().unwrap()));
        let (hash, other) = (TopicHash(7), TopicHash(8));
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut topics = TopicsByHash::default();
            topics.insert(other, names[0].clone());
            for name in names.iter().chain(&names) {
                topics.insert(hash, name.clone());
            }
            let mut left = names.to_vec();
            for at in order {
                assert_eq!(topics.of(hash).collect::<std::collections::BTreeSet<_>>(), left.iter().collect());
                topics.remove(hash, &names[at]);
                left.retain(|name| *name != names[at]);
            }
            assert_eq!((topics.of(hash).count(), topics.of(other).count()), (0, 1));
            assert!(topics.further.is_empty());
        }
    }
}
