//! What was compiled and waits to be published. When nothing is in flight a change goes out at once; while something is, changes
//! that follow are merged, whole changes only, so that what waits is bounded by the topics it touches.

use std::collections::{BTreeMap, VecDeque};

use groupcast_policy::doc::{Edit, Placement, RuleKey};
use groupcast_policy::rule::Rule;
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::Proposal;
use groupcast_topics::{BATCH_MESSAGES_MAX, LISTED_TOPICS_MAX, Map};

/// Changes that may wait; whoever brings more waits himself.
pub const WAITING_CHANGES_MAX: usize = 4_096;
/// Topics of a batch whose changes are listed: what is remembered of a batch until it is in force everywhere follows from it.
pub const PARCEL_TOPICS_MAX: usize = 1_024;
/// Items of edits that may wait, counted before merging.
pub const WAITING_ITEMS_MAX: usize = 1_000_000;

/// A change that is part of a parcel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Its number; `None` for what happened in the registry.
    pub change: Option<u64>,
    /// When it was read from its stream.
    pub read_ms: u64,
}

/// What is published as one batch: wholes, in the order in which their changes were made. Each becomes effective by itself, so that
/// nobody waits for changes that have nothing to do with theirs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parcel {
    /// No topic is in two of them.
    pub wholes: Vec<BTreeMap<Topic, Edit>>,
    pub marks: Vec<Mark>,
    pub catalog: u64,
    pub registry: u64,
    /// A part of a change that no batch can hold.
    pub torn: bool,
    items: usize,
    /// Which of the wholes a topic is in.
    whole_of: Map<Topic, usize>,
}

impl Parcel {
    fn new(edits: Vec<(Topic, Edit)>, torn: bool) -> Self {
        let mut parcel = Self { torn, ..Self::default() };
        parcel.put(edits);
        parcel
    }

    /// `change` is the highest number that the topics reflect with it.
    pub fn proposal(&self, change: u64) -> Proposal {
        let edits = self.edits().map(|(topic, edit)| (topic.clone(), edit.clone())).collect();
        let wholes = self.wholes.iter().map(BTreeMap::len).collect();
        Proposal { change, catalog: self.catalog, registry: self.registry, edits, wholes, ..Proposal::default() }
    }

    pub fn edits(&self) -> impl Iterator<Item = (&Topic, &Edit)> {
        self.wholes.iter().flatten()
    }

    /// How many topics it edits.
    pub fn len(&self) -> usize {
        self.whole_of.len()
    }

    pub fn is_empty(&self) -> bool {
        self.whole_of.is_empty()
    }

    /// Two halves of what is too large for one batch. Everything that belongs to the change is behind the second.
    pub fn halves(self) -> Option<(Parcel, Parcel)> {
        let mut first: Vec<(Topic, Edit)> = self.wholes.into_iter().flatten().collect();
        let second = first.split_off(first.len() / 2);
        if first.is_empty() {
            return None;
        }
        let rest = Parcel::new(second, true);
        let second = Parcel { marks: self.marks, catalog: self.catalog, registry: self.registry, items: self.items, ..rest };
        Some((Parcel::new(first, true), second))
    }

    /// Whether a change that comes after everything in here can be published with it.
    fn takes(&self, edits: &[(Topic, Edit)], hosts: usize) -> bool {
        let more = edits.iter().filter(|(topic, _)| !self.whole_of.contains_key(topic)).count();
        let composed = |(topic, edit): &(Topic, Edit)| self.edit(topic).is_none_or(|before| composable(before, edit));
        if self.torn || !edits.iter().all(composed) {
            return false;
        }
        if self.is_tallied() {
            return fits(self.len() + more, hosts);
        }
        let joined: usize = self.wholes.iter().skip(self.first_whole(edits)).map(BTreeMap::len).sum();
        joined + more <= LISTED_TOPICS_MAX && self.len() + more <= PARCEL_TOPICS_MAX
    }

    fn edit(&self, topic: &Topic) -> Option<&Edit> {
        self.wholes.get(*self.whole_of.get(topic)?)?.get(topic)
    }

    /// Too large for its topics to be listed: then it is one whole.
    fn is_tallied(&self) -> bool {
        self.wholes.first().is_some_and(|first| first.len() > LISTED_TOPICS_MAX)
    }

    /// The first whole that has anything to do with these edits; behind the last, if none has.
    fn first_whole(&self, edits: &[(Topic, Edit)]) -> usize {
        if self.is_tallied() {
            return 0;
        }
        edits.iter().filter_map(|(topic, _)| self.whole_of.get(topic).copied()).min().unwrap_or(self.wholes.len())
    }

    /// Adds a change. It is one with whatever it has a topic in common with, and so is everything between the two: a state that has
    /// the later change without one that was made before it never existed.
    fn put(&mut self, edits: Vec<(Topic, Edit)>) {
        if edits.is_empty() {
            return;
        }
        let first = self.first_whole(&edits);
        let mut joined = self.wholes.drain(first..);
        let mut whole = joined.next().unwrap_or_default();
        for (topic, edit) in joined.flatten() {
            self.whole_of.insert(topic.clone(), first);
            whole.insert(topic, edit);
        }
        for (topic, edit) in edits {
            let merged = match whole.remove(&topic) {
                // `takes` has seen that it can be done.
                Some(before) => compose(before, edit.clone()).unwrap_or(edit),
                None => edit,
            };
            self.whole_of.insert(topic.clone(), first);
            whole.insert(topic, merged);
        }
        self.wholes.push(whole);
    }
}

/// Whether a batch of so many topics fits, whoever follows them: beyond the number that can be listed every host may get a message.
pub fn fits(topics: usize, hosts: usize) -> bool {
    topics <= LISTED_TOPICS_MAX || topics + hosts < BATCH_MESSAGES_MAX
}

#[derive(Debug, Default)]
pub struct Outbox {
    queue: VecDeque<Parcel>,
    changes: usize,
    items: usize,
}

impl Outbox {
    /// Adds one or more whole changes; `hosts` is how many there are.
    pub fn add(&mut self, edits: Vec<(Topic, Edit)>, marks: Vec<Mark>, (catalog, registry): (u64, u64), hosts: usize) {
        let items: usize = edits.iter().map(|(_, edit)| edit.len()).sum();
        self.changes += marks.len();
        self.items += items;
        if !self.queue.back().is_some_and(|last| last.takes(&edits, hosts)) {
            self.queue.push_back(Parcel::default());
        }
        let Some(last) = self.queue.back_mut() else { return };
        last.put(edits);
        last.marks.extend(marks);
        (last.catalog, last.registry) = (last.catalog.max(catalog), last.registry.max(registry));
        last.items += items;
    }

    /// The next to be published.
    pub fn take(&mut self) -> Option<Parcel> {
        let parcel = self.queue.pop_front()?;
        self.changes -= parcel.marks.len();
        self.items -= parcel.items;
        Some(parcel)
    }

    /// Puts the parts of what turned out too large back to where it was.
    pub fn put_back(&mut self, parcel: Parcel) {
        self.changes += parcel.marks.len();
        self.items += parcel.items;
        self.queue.push_front(parcel);
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Changes that wait.
    pub fn changes(&self) -> usize {
        self.changes
    }

    /// No more may be added until something is taken out.
    pub fn is_full(&self) -> bool {
        self.changes >= WAITING_CHANGES_MAX || self.items >= WAITING_ITEMS_MAX
    }
}

fn composable(before: &Edit, after: &Edit) -> bool {
    match (before, after) {
        (_, Edit::Retire) => true,
        // What comes after a retirement begins from nothing, and no edit says both.
        (Edit::Retire | Edit::Reset, _) | (_, Edit::Reset) => false,
        _ => std::mem::discriminant(before) == std::mem::discriminant(after),
    }
}

/// Both edits as one: of an item that both touch, the later counts.
fn compose(before: Edit, after: Edit) -> Option<Edit> {
    if !composable(&before, &after) {
        return None;
    }
    Some(match (before, after) {
        (Edit::Scope { put, remove }, Edit::Scope { put: later_put, remove: later_remove }) => {
            let (put, remove) =
                overlay(keyed(put, |(g, _)| g.clone()), remove, keyed(later_put, |(g, _)| g.clone()), later_remove);
            Edit::Scope { put, remove }
        }
        (Edit::Host { put, remove }, Edit::Host { put: later_put, remove: later_remove }) => {
            let key = |placement: &Placement| placement.workload.clone();
            let (put, remove) = overlay(keyed(put, key), remove, keyed(later_put, key), later_remove);
            Edit::Host { put, remove }
        }
        (
            Edit::Rules { stateful, put, remove },
            Edit::Rules { stateful: later_stateful, put: later_put, remove: later_remove },
        ) => {
            let key = |rule: &Rule| -> RuleKey { rule.key() };
            let (put, remove) = overlay(keyed(put, key), remove, keyed(later_put, key), later_remove);
            Edit::Rules { stateful: later_stateful.or(stateful), put, remove }
        }
        (Edit::Members { add, remove }, Edit::Members { add: later_add, remove: later_remove }) => {
            let (add, remove) = overlay(keyed(add, |m| *m), remove, keyed(later_add, |m| *m), later_remove);
            Edit::Members { add, remove }
        }
        (_, after) => after,
    })
}

fn keyed<K: Ord, V>(values: Vec<V>, key: impl Fn(&V) -> K) -> BTreeMap<K, V> {
    values.into_iter().map(|value| (key(&value), value)).collect()
}

fn overlay<K: Ord + Clone, V>(
    mut put: BTreeMap<K, V>,
    remove: Vec<K>,
    later_put: BTreeMap<K, V>,
    later_remove: Vec<K>,
) -> (Vec<V>, Vec<K>) {
    let mut removed: std::collections::BTreeSet<K> = remove.into_iter().collect();
    for key in later_remove {
        put.remove(&key);
        removed.insert(key);
    }
    for (key, value) in later_put {
        removed.remove(&key);
        put.insert(key, value);
    }
    (put.into_values().collect(), removed.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::doc::Document;
    use groupcast_policy::net::Prefix;
    use groupcast_policy::text::parse_rule;
    use proptest::prelude::*;

    fn topic(index: usize) -> Topic {
        Topic::Members(format!("g{index}").parse().unwrap())
    }

    fn member(index: u8) -> Prefix {
        Prefix::v4(0x0a00_0000 + u32::from(index), 32).unwrap()
    }

    fn join(index: usize, address: u8) -> (Topic, Edit) {
        (topic(index), Edit::Members { add: vec![member(address)], remove: vec![] })
    }

    fn mark(change: u64) -> Vec<Mark> {
        vec![Mark { change: Some(change), read_ms: change }]
    }

    #[test]
    fn what_waits_is_merged() {
        let mut outbox = Outbox::default();
        for change in 0..100u64 {
            outbox.add(vec![join((change % 3) as usize, change as u8)], mark(change), (change, 7), 10);
        }
        assert_eq!(outbox.changes(), 100);
        let parcel = outbox.take().unwrap();
        assert_eq!((parcel.len(), parcel.marks.len(), parcel.catalog, parcel.registry), (3, 100, 99, 7));
        assert!(outbox.is_empty() && outbox.changes() == 0);
    }

    #[test]
    fn a_batch_never_grows_beyond_what_fits() {
        for (topics, hosts, fitting) in [
            (LISTED_TOPICS_MAX, 1_000_000, true),
            (LISTED_TOPICS_MAX + 1, BATCH_MESSAGES_MAX, false),
            (LISTED_TOPICS_MAX + 1, BATCH_MESSAGES_MAX - LISTED_TOPICS_MAX - 2, true),
            (LISTED_TOPICS_MAX + 1, BATCH_MESSAGES_MAX - LISTED_TOPICS_MAX - 1, false),
        ] {
            assert_eq!(fits(topics, hosts), fitting, "{topics} topics, {hosts} hosts");
        }
        let mut outbox = Outbox::default();
        for change in 0..PARCEL_TOPICS_MAX as u64 + 1 {
            outbox.add(vec![join(change as usize, 1)], mark(change), (change, 0), BATCH_MESSAGES_MAX);
        }
        assert_eq!(outbox.take().unwrap().len(), PARCEL_TOPICS_MAX);
        assert_eq!(outbox.take().unwrap().len(), 1);
        // Too large to be listed: as long as a message to every host still fits.
        let large = || (0..=LISTED_TOPICS_MAX).map(|i| join(i, 1)).collect::<Vec<_>>();
        outbox.add(large(), mark(1), (1, 0), BATCH_MESSAGES_MAX - LISTED_TOPICS_MAX - 2);
        outbox.add(large(), mark(2), (2, 0), BATCH_MESSAGES_MAX - LISTED_TOPICS_MAX - 2);
        outbox.add(vec![join(900, 1)], mark(3), (3, 0), BATCH_MESSAGES_MAX - LISTED_TOPICS_MAX - 2);
        assert_eq!([outbox.take(), outbox.take()].map(|parcel| parcel.unwrap().marks.len()), [2, 1]);
    }

    fn wholes(parcel: &Parcel) -> Vec<Vec<usize>> {
        let index = |topic: &Topic| topic.to_string().trim_start_matches("members.g").parse().unwrap();
        parcel.wholes.iter().map(|whole| whole.keys().map(index).collect()).collect()
    }

    #[test]
    fn changes_that_have_nothing_in_common_stay_apart_and_in_order() {
        let mut outbox = Outbox::default();
        for (change, topics) in [vec![7], vec![3, 9], vec![1], vec![5]].into_iter().enumerate() {
            let edits = topics.into_iter().map(|topic| join(topic, 1)).collect();
            outbox.add(edits, mark(change as u64), (change as u64, 0), 10);
        }
        let parcel = outbox.take().unwrap();
        assert_eq!(wholes(&parcel), [vec![7], vec![3, 9], vec![1], vec![5]]);
        let proposal = parcel.proposal(3);
        assert_eq!(proposal.wholes, [1, 2, 1, 1]);
        assert_eq!(proposal.edits.iter().map(|(topic, _)| topic.clone()).collect::<Vec<_>>(), [7, 3, 9, 1, 5].map(topic));
    }

    #[test]
    fn a_change_is_one_with_everything_since_the_one_it_continues() {
        let mut outbox = Outbox::default();
        for (change, topic) in [1, 2, 3, 2, 4].into_iter().enumerate() {
            outbox.add(vec![join(topic, change as u8)], mark(change as u64), (change as u64, 0), 10);
        }
        assert_eq!(wholes(&outbox.take().unwrap()), [vec![1], vec![2, 3], vec![4]]);
    }

    #[test]
    fn what_can_be_listed_does_not_grow_beyond_that() {
        let mut outbox = Outbox::default();
        // Each has a topic in common with the one before.
        for change in 0..LISTED_TOPICS_MAX as u64 * 3 {
            outbox.add(vec![join(change as usize, 1), join(change as usize + 1, 2)], mark(change), (change, 0), 10);
        }
        let mut parcels = Vec::new();
        while let Some(parcel) = outbox.take() {
            assert!(parcel.wholes.iter().all(|whole| whole.len() <= LISTED_TOPICS_MAX));
            parcels.push((parcel.marks.len(), parcel.catalog));
        }
        assert_eq!(parcels, [(31, 30), (31, 61), (31, 92), (3, 95)]);
    }

    #[test]
    fn fullness_is_told_at_the_bound() {
        let mut outbox = Outbox::default();
        for change in 0..WAITING_CHANGES_MAX as u64 {
            assert!(!outbox.is_full());
            outbox.add(vec![join(0, 1)], mark(change), (change, 0), 1);
        }
        assert!(outbox.is_full());
        outbox.take();
        assert!(!outbox.is_full());
        let many = Edit::Members { add: vec![member(1); WAITING_ITEMS_MAX], remove: vec![] };
        outbox.add(vec![(topic(0), many)], mark(1), (1, 0), 1);
        assert!(outbox.is_full());
    }

    #[test]
    fn what_comes_back_after_its_end_waits_for_the_next_batch() {
        let mut outbox = Outbox::default();
        outbox.add(vec![join(0, 1)], mark(1), (1, 0), 1);
        outbox.add(vec![(topic(0), Edit::Retire)], mark(2), (2, 0), 1);
        outbox.add(vec![join(0, 2)], mark(3), (3, 0), 1);
        assert_eq!(outbox.take().unwrap().edit(&topic(0)), Some(&Edit::Retire));
        assert_eq!(outbox.take().unwrap().marks, mark(3));
    }

    #[test]
    fn what_is_too_large_is_halved_until_it_cannot_be() {
        let edits: Vec<_> = (0..5).map(|i| join(i, 1)).collect();
        let mut outbox = Outbox::default();
        outbox.add(edits, mark(1), (1, 2), 1);
        let (first, second) = outbox.take().unwrap().halves().unwrap();
        assert_eq!((first.len(), second.len()), (2, 3));
        assert!(first.marks.is_empty() && first.torn && second.torn);
        assert_eq!((second.marks.len(), second.catalog, second.registry), (1, 1, 2));
        assert_eq!(Parcel::new(vec![join(0, 1)], false).halves(), None);
    }

    fn any_edit() -> impl Strategy<Value = Edit> {
        let indexes = || prop::collection::btree_set(0..6u8, 0..4);
        prop_oneof![
            6 => (indexes(), indexes()).prop_map(|(add, remove)| Edit::Members {
                add: add.iter().map(|i| member(*i)).collect(),
                remove: remove.difference(&add).map(|i| member(*i)).collect(),
            }),
            1 => Just(Edit::Retire),
        ]
    }

    fn any_rules() -> impl Strategy<Value = Edit> {
        let rule = |i: &u8| parse_rule(&format!("ingress tcp {} from any", 100 + u16::from(*i))).unwrap();
        let indexes = || prop::collection::btree_set(0..6u8, 0..4);
        (prop::option::of(any::<bool>()), indexes(), indexes()).prop_map(move |(stateful, put, remove)| Edit::Rules {
            stateful,
            put: put.iter().map(rule).collect(),
            remove: remove.difference(&put).map(|i| rule(i).key()).collect(),
        })
    }

    proptest! {
        /// Merged or not, whoever applies what comes out ends with the same documents.
        #[test]
        fn merging_changes_nothing(edits in prop::collection::vec((0..2usize, any_edit(), any_rules()), 1..30)) {
            let (mut outbox, mut expected, mut found) = (Outbox::default(), BTreeMap::new(), BTreeMap::new());
            for (change, (index, members, rules)) in edits.into_iter().enumerate() {
                let edits = vec![(topic(index), members), (Topic::Rules("r".parse().unwrap()), rules)];
                for (topic, edit) in &edits {
                    expected.entry(topic.clone()).or_insert_with(Document::absent).apply(edit).unwrap();
                }
                outbox.add(edits, mark(change as u64), (change as u64, 0), 1);
            }
            while let Some(parcel) = outbox.take() {
                for (topic, edit) in parcel.edits() {
                    found.entry(topic.clone()).or_insert_with(Document::absent).apply(edit).unwrap();
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
