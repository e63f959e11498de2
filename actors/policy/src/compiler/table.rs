//! Interning tables and counted sets.

use std::hash::Hash;
use std::ops::{Index, IndexMut};

pub(super) type Map<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;

/// A row that nothing refers to any more.
pub(super) trait Idle {
    fn is_idle(&self) -> bool;
}

/// Rows by slot, found by key. Slots are given back only between batches, so that within one a slot means one key.
pub(super) struct Table<K, V> {
    index: Map<K, u32>,
    rows: Vec<(Option<K>, V)>,
    free: Vec<u32>,
    candidates: Vec<u32>,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self { index: Map::default(), rows: Vec::new(), free: Vec::new(), candidates: Vec::new() }
    }
}

impl<K: Clone + Eq + Hash, V: Default + Idle> Table<K, V> {
    pub fn get(&self, key: &K) -> Option<u32> {
        self.index.get(key).copied()
    }

    /// The key's slot, made if need be; the flag says whether it was.
    pub fn ensure(&mut self, key: &K) -> (u32, bool) {
        if let Some(slot) = self.index.get(key) {
            return (*slot, false);
        }
        let slot = match self.free.pop() {
            Some(slot) => {
                self.rows[slot as usize] = (Some(key.clone()), V::default());
                slot
            }
            None => {
                self.rows.push((Some(key.clone()), V::default()));
                (self.rows.len() - 1) as u32
            }
        };
        self.index.insert(key.clone(), slot);
        // A row that is made and then not filled must go as well.
        self.candidates.push(slot);
        (slot, true)
    }

    /// The key of a slot in use.
    pub fn key(&self, slot: u32) -> &K {
        match &self.rows[slot as usize].0 {
            Some(key) => key,
            None => unreachable!("a slot is given back only when no row refers to it"),
        }
    }

    /// Notes that the row may have become idle.
    pub fn touch(&mut self, slot: u32) {
        self.candidates.push(slot);
    }

    /// Gives idle rows back, telling each key and row.
    pub fn sweep(&mut self, mut gone: impl FnMut(u32, &K, &V)) {
        while let Some(slot) = self.candidates.pop() {
            let (key, row) = &mut self.rows[slot as usize];
            if !row.is_idle() {
                continue;
            }
            if let Some(key) = key.take() {
                gone(slot, &key, row);
                self.index.remove(&key);
                *row = V::default();
                self.free.push(slot);
            }
        }
    }

    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows.iter().enumerate().filter(|(_, (key, _))| key.is_some()).map(|(slot, _)| slot as u32)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.rows.iter().filter_map(|(key, row)| key.as_ref().map(|key| (key, row)))
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.index.len()
    }
}

impl<K, V> Index<u32> for Table<K, V> {
    type Output = V;
    fn index(&self, slot: u32) -> &V {
        &self.rows[slot as usize].1
    }
}

impl<K, V> IndexMut<u32> for Table<K, V> {
    fn index_mut(&mut self, slot: u32) -> &mut V {
        &mut self.rows[slot as usize].1
    }
}

/// Up to this many keys a list is searched, beyond it a map is kept: most sets are tiny, some are huge.
const FEW_MAX: usize = 16;

/// A set whose keys have a number of reasons to be in it.
#[derive(Debug, Clone)]
pub(super) enum Counts<K> {
    Few(Vec<(K, u32)>),
    Many(Box<Map<K, u32>>),
}

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Counts::Few(Vec::new())
    }
}

impl<K: Copy + Eq + Hash> Counts<K> {
    /// Whether the key is new in the set.
    pub fn add(&mut self, key: K) -> bool {
        match self {
            Counts::Few(list) => {
                if let Some((_, count)) = list.iter_mut().find(|(k, _)| *k == key) {
                    *count += 1;
                    return false;
                }
                if list.len() < FEW_MAX {
                    list.push((key, 1));
                } else {
                    let mut map: Map<K, u32> = list.drain(..).collect();
                    map.insert(key, 1);
                    *self = Counts::Many(Box::new(map));
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
            Counts::Few(list) => {
                let Some(at) = list.iter().position(|(k, _)| *k == key) else { return false };
                list[at].1 -= 1;
                if list[at].1 > 0 {
                    return false;
                }
                list.swap_remove(at);
                true
            }
            Counts::Many(map) => {
                let Some(count) = map.get_mut(&key) else { return false };
                *count -= 1;
                if *count > 0 {
                    return false;
                }
                map.remove(&key);
                // Half of the bound, so that a set at the bound does not change its form all the time.
                if map.len() < FEW_MAX / 2 {
                    *self = Counts::Few(map.drain().collect());
                }
                true
            }
        }
    }

    pub fn contains(&self, key: K) -> bool {
        match self {
            Counts::Few(list) => list.iter().any(|(k, _)| *k == key),
            Counts::Many(map) => map.contains_key(&key),
        }
    }

    pub fn is_empty(&self) -> bool {
        match self {
            Counts::Few(list) => list.is_empty(),
            Counts::Many(map) => map.is_empty(),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = K> + '_ {
        let (list, map) = match self {
            Counts::Few(list) => (list.as_slice(), None),
            Counts::Many(map) => (&[][..], Some(map)),
        };
        list.iter().map(|(k, _)| *k).chain(map.into_iter().flat_map(|map| map.keys().copied()))
    }
}
