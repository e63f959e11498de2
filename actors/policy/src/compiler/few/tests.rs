use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::testing::any_prefix;

const IN_PLACE: usize = 3;

/// Steps that lead beyond what is held in place and back.
fn steps<T: std::fmt::Debug>(key: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<(bool, T)>> {
    prop::collection::vec((prop::bool::weighted(0.55), key), 0..60)
}

proptest! {
    #[test]
    fn counts_are_those_of_a_map(steps in steps(0..6u32)) {
        let mut counts: Counts<u32, IN_PLACE> = Counts::default();
        let mut model: BTreeMap<u32, u32> = BTreeMap::new();
        for (add, key) in steps {
            if add {
                let count = model.entry(key).or_default();
                *count += 1;
                prop_assert_eq!(counts.add(key), *count == 1);
            } else {
                let left = model.get(&key) == Some(&1);
                model.entry(key).and_modify(|count| *count -= 1);
                model.retain(|_, count| *count > 0);
                prop_assert_eq!(counts.sub(key), left);
            }
            prop_assert_eq!(counts.keys().collect::<BTreeSet<_>>(), model.keys().copied().collect::<BTreeSet<_>>());
            prop_assert_eq!(counts.is_empty(), model.is_empty());
            prop_assert!((0..6).all(|key| counts.contains(key) == model.contains_key(&key)));
        }
    }

    #[test]
    fn a_set_is_a_set(steps in steps(0..6u32)) {
        let mut set: Set<u32, IN_PLACE> = Set::default();
        let mut model: BTreeSet<u32> = BTreeSet::new();
        for (add, key) in steps {
            if add {
                set.add(key);
                model.insert(key);
            } else {
                set.sub(key);
                model.remove(&key);
            }
            let held: Vec<u32> = set.iter().collect();
            prop_assert_eq!(held.len(), model.len());
            prop_assert_eq!(held.into_iter().collect::<BTreeSet<_>>(), model.clone());
            prop_assert_eq!(set.is_empty(), model.is_empty());
        }
    }

    #[test]
    fn a_list_is_a_list(steps in steps((any::<u32>(), any::<prop::sample::Index>()))) {
        let mut list: List<u32, IN_PLACE> = List::default();
        let mut model: Vec<u32> = Vec::new();
        for (add, (item, at)) in steps {
            if add {
                let at = at.index(model.len() + 1);
                list.insert(at, item);
                model.insert(at, item);
                *list.get_mut(at) ^= 1;
                model[at] ^= 1;
            } else if !model.is_empty() {
                let at = at.index(model.len());
                list.remove(at);
                model.remove(at);
            }
            prop_assert_eq!(&*list, &*model);
            prop_assert_eq!(&*model.iter().copied().collect::<List<u32, IN_PLACE>>(), &*model);
        }
    }

    #[test]
    fn members_of_every_kind_are_counted(steps in steps(any_prefix())) {
        let mut members = MemberCounts::default();
        let mut model: BTreeMap<Prefix, u32> = BTreeMap::new();
        for (add, member) in steps {
            if add {
                let count = model.entry(member).or_default();
                *count += 1;
                prop_assert_eq!(members.add(member), *count == 1);
            } else {
                let left = model.get(&member) == Some(&1);
                model.entry(member).and_modify(|count| *count -= 1);
                model.retain(|_, count| *count > 0);
                prop_assert_eq!(members.sub(member), left);
            }
            prop_assert_eq!(members.keys().collect::<BTreeSet<_>>(), model.keys().copied().collect::<BTreeSet<_>>());
            prop_assert!(members.contains(member) == model.contains_key(&member));
        }
    }
}

#[test]
fn at_the_bound_all_is_in_place_and_beyond_it_is_not() {
    let (mut set, mut counts, mut list) = (Set::<u32, 3>::default(), Counts::<u32, 3>::default(), List::<u32, 3>::default());
    for key in 0..3 {
        set.add(key);
        counts.add(key);
        list.insert(0, key);
    }
    assert!(matches!((&set, &counts, &list), (Set::Few { .. }, Counts::Few { .. }, List::Few { .. })));
    set.add(3);
    counts.add(3);
    list.insert(0, 3);
    assert!(matches!((&set, &counts, &list), (Set::Many(_), Counts::Many(_), List::Many(_))));
    for key in 1..4 {
        set.sub(key);
        counts.sub(key);
        list.remove(0);
    }
    assert!(matches!((&set, &counts, &list), (Set::Few { .. }, Counts::Few { .. }, List::Few { .. })));
}
