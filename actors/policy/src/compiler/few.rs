//! Collections that hold a few items in place, because most are tiny and each pointer followed is memory touched, and that are
//! lists or maps beyond.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::net::IpAddr;
use std::ops::Deref;

use crate::net::Prefix;

type Keys<K> = HashSet<K, foldhash::fast::RandomState>;
pub(super) type Map<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// A list, the first `N` items in place.
#[derive(Debug, Clone)]
pub(super) enum List<T, const N: usize> {
    Few { len: u8, items: [T; N] },
    Many(Vec<T>),
}

impl<T: Copy + Default, const N: usize> Default for List<T, N> {
    fn default() -> Self {
        List::Few { len: 0, items: [T::default(); N] }
    }
}

impl<T: Copy + Default, const N: usize> List<T, N> {
    pub fn insert(&mut self, at: usize, item: T) {
        match self {
            List::Few { len, items } if usize::from(*len) < N => {
                items.copy_within(at..usize::from(*len), at + 1);
                items[at] = item;
                *len += 1;
            }
            List::Few { items, .. } => {
                let mut list = items.to_vec();
                list.insert(at, item);
                *self = List::Many(list);
            }
            List::Many(list) => list.insert(at, item),
        }
    }

    pub fn remove(&mut self, at: usize) {
        match self {
            List::Few { len, items } => {
                items.copy_within(at + 1..usize::from(*len), at);
                *len -= 1;
            }
            List::Many(list) => {
                list.remove(at);
                // Half of the bound, so that a list at the bound does not change its form all the time.
                if list.len() <= N / 2 {
                    *self = list.iter().copied().collect();
                }
            }
        }
    }

    /// For an item that is there.
    pub fn get_mut(&mut self, at: usize) -> &mut T {
        match self {
            List::Few { items, .. } => &mut items[at],
            List::Many(list) => &mut list[at],
        }
    }
}

impl<T, const N: usize> Deref for List<T, N> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            List::Few { len, items } => &items[..usize::from(*len)],
            List::Many(list) => list,
        }
    }
}

impl<T: Copy + Default, const N: usize> FromIterator<T> for List<T, N> {
    fn from_iter<I: IntoIterator<Item = T>>(source: I) -> Self {
        let mut list = List::default();
        source.into_iter().for_each(|item| list.insert(list.len(), item));
        list
    }
}

/// A set, the first `N` keys in place.
#[derive(Debug, Clone)]
pub(super) enum Set<K, const N: usize> {
    Few { len: u8, keys: [K; N] },
    Many(Box<Keys<K>>),
}

impl<K: Copy + Default, const N: usize> Default for Set<K, N> {
    fn default() -> Self {
        Set::Few { len: 0, keys: [K::default(); N] }
    }
}

impl<K: Copy + Default + Eq + Hash, const N: usize> Set<K, N> {
    pub fn add(&mut self, key: K) {
        match self {
            Set::Few { len, keys } => {
                let held = usize::from(*len);
                if keys[..held].contains(&key) {
                    return;
                }
                if held < N {
                    keys[held] = key;
                    *len += 1;
                } else {
                    *self = Set::Many(Box::new(keys.iter().copied().chain([key]).collect()));
                }
            }
            Set::Many(set) => {
                set.insert(key);
            }
        }
    }

    pub fn sub(&mut self, key: K) {
        match self {
            Set::Few { len, keys } => {
                let held = usize::from(*len);
                if let Some(at) = keys[..held].iter().position(|k| *k == key) {
                    keys[at] = keys[held - 1];
                    *len -= 1;
                }
            }
            Set::Many(set) => {
                set.remove(&key);
                if set.len() <= N / 2 {
                    let mut few = Self::default();
                    set.iter().for_each(|key| few.add(*key));
                    *self = few;
                }
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        match self {
            Set::Few { len, .. } => *len == 0,
            Set::Many(set) => set.is_empty(),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = K> + '_ {
        let (list, set) = match self {
            Set::Few { len, keys } => (&keys[..usize::from(*len)], None),
            Set::Many(set) => (&[][..], Some(set)),
        };
        list.iter().copied().chain(set.into_iter().flat_map(|set| set.iter().copied()))
    }
}

/// A set whose keys have a number of reasons to be in it, the first `N` in place.
#[derive(Debug, Clone)]
pub(super) enum Counts<K, const N: usize> {
    Few { len: u8, keys: [K; N], counts: [u32; N] },
    Many(Box<Map<K, u32>>),
}

impl<K: Copy + Default, const N: usize> Default for Counts<K, N> {
    fn default() -> Self {
        Counts::Few { len: 0, keys: [K::default(); N], counts: [0; N] }
    }
}

impl<K: Copy + Default + Eq + Hash, const N: usize> Counts<K, N> {
    /// Whether the key is new in the set.
    pub fn add(&mut self, key: K) -> bool {
        match self {
            Counts::Few { len, keys, counts } => {
                let held = usize::from(*len);
                if let Some(at) = keys[..held].iter().position(|k| *k == key) {
                    counts[at] += 1;
                    return false;
                }
                if held < N {
                    (keys[held], counts[held]) = (key, 1);
                    *len += 1;
                } else {
                    let held = keys.iter().copied().zip(counts.iter().copied());
                    *self = Counts::Many(Box::new(held.chain([(key, 1)]).collect()));
                }
                true
            }
            Counts::Many(map) => {
                let count = map.entry(key).or_insert(0);
                *count += 1;
                *count == 1
            }
        }
    }

    /// Whether the key has left the set.
    pub fn sub(&mut self, key: K) -> bool {
        match self {
            Counts::Few { len, keys, counts } => {
                let held = usize::from(*len);
                let Some(at) = keys[..held].iter().position(|k| *k == key) else { return false };
                counts[at] -= 1;
                if counts[at] > 0 {
                    return false;
                }
                (keys[at], counts[at]) = (keys[held - 1], counts[held - 1]);
                *len -= 1;
                true
            }
            Counts::Many(map) => {
                let Some(count) = map.get_mut(&key) else { return false };
                *count -= 1;
                if *count > 0 {
                    return false;
                }
                map.remove(&key);
                if map.len() <= N / 2 {
                    let (mut few_keys, mut few_counts) = ([K::default(); N], [0; N]);
                    for (at, (key, count)) in map.iter().enumerate() {
                        (few_keys[at], few_counts[at]) = (*key, *count);
                    }
                    *self = Counts::Few { len: map.len() as u8, keys: few_keys, counts: few_counts };
                }
                true
            }
        }
    }

    pub fn contains(&self, key: K) -> bool {
        match self {
            Counts::Few { len, keys, .. } => keys[..usize::from(*len)].contains(&key),
            Counts::Many(map) => map.contains_key(&key),
        }
    }

    pub fn is_empty(&self) -> bool {
        match self {
            Counts::Few { len, .. } => *len == 0,
            Counts::Many(map) => map.is_empty(),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = K> + '_ {
        let (list, map) = match self {
            Counts::Few { len, keys, .. } => (&keys[..usize::from(*len)], None),
            Counts::Many(map) => (&[][..], Some(map)),
        };
        list.iter().copied().chain(map.into_iter().flat_map(|map| map.keys().copied()))
    }
}

/// A group's members with the number of reasons for each. Nearly all are single IPv4 addresses: four bytes instead of twenty.
#[derive(Debug, Clone, Default)]
pub(super) struct MemberCounts {
    v4: Counts<u32, 3>,
    others: Option<Box<Map<Prefix, u32>>>,
}

impl MemberCounts {
    /// Whether the member is new.
    pub fn add(&mut self, member: Prefix) -> bool {
        if let Some(address) = v4_address(member) {
            return self.v4.add(address);
        }
        let count = self.others.get_or_insert_default().entry(member).or_insert(0);
        *count += 1;
        *count == 1
    }

    /// Whether the member has left.
    pub fn sub(&mut self, member: Prefix) -> bool {
        if let Some(address) = v4_address(member) {
            return self.v4.sub(address);
        }
        let Some(map) = &mut self.others else { return false };
        let Some(count) = map.get_mut(&member) else { return false };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        map.remove(&member);
        if map.is_empty() {
            self.others = None;
        }
        true
    }

    pub fn contains(&self, member: Prefix) -> bool {
        match v4_address(member) {
            Some(address) => self.v4.contains(address),
            None => self.others.as_ref().is_some_and(|others| others.contains_key(&member)),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = Prefix> + '_ {
        let v4 = self.v4.keys().map(|address| Prefix::host(IpAddr::V4(address.into())));
        v4.chain(self.others.iter().flat_map(|others| others.keys().copied()))
    }
}

fn v4_address(member: Prefix) -> Option<u32> {
    match member.net().addr() {
        IpAddr::V4(address) if member.is_host() => Some(address.to_bits()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
