//! Interning tables.

use std::hash::{BuildHasher, Hash};
use std::ops::{Index, IndexMut};

use hashbrown::HashTable;

/// A row that nothing refers to any more.
pub(super) trait Idle {
    fn is_idle(&self) -> bool;
}

/// Rows by slot, found by key. Slots are given back only between batches, so that within one a slot means one key.
///
/// Large catalogues do not fit into the processor's caches, and then a change costs what memory it touches. So the index holds no
/// keys, which makes it small; a key stands beside its row; and a row begins with a cache line.
pub(super) struct Table<K, V> {
    index: HashTable<Entry>,
    hasher: foldhash::fast::RandomState,
    rows: Vec<Row<K, V>>,
    free: Vec<u32>,
    candidates: Vec<u32>,
}

/// The hash stands here so that neither growing nor a foreign key of the same bucket reaches for rows.
#[derive(Clone, Copy)]
struct Entry {
    hash: u32,
    slot: u32,
}

impl Entry {
    /// Spreads the hash over the bits that the index looks at, the lowest and the highest.
    fn spread(hash: u32) -> u64 {
        u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

#[repr(align(64))]
struct Row<K, V> {
    key: Option<K>,
    value: V,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        let (index, hasher) = (HashTable::new(), foldhash::fast::RandomState::default());
        Self { index, hasher, rows: Vec::new(), free: Vec::new(), candidates: Vec::new() }
    }
}

impl<K: Clone + Eq + Hash, V: Default + Idle> Table<K, V> {
    fn hash(&self, key: &K) -> u32 {
        self.hasher.hash_one(key) as u32
    }

    fn find(&self, hash: u32, key: &K) -> Option<u32> {
        let is_key = |entry: &Entry| entry.hash == hash && self.rows[entry.slot as usize].key.as_ref() == Some(key);
        self.index.find(Entry::spread(hash), is_key).map(|entry| entry.slot)
    }

    pub fn get(&self, key: &K) -> Option<u32> {
        self.find(self.hash(key), key)
    }

    /// The key's slot, made if need be; the flag says whether it was.
    pub fn ensure(&mut self, key: &K) -> (u32, bool) {
        let hash = self.hash(key);
        if let Some(slot) = self.find(hash, key) {
            return (slot, false);
        }
        let row = Row { key: Some(key.clone()), value: V::default() };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.rows[slot as usize] = row;
                slot
            }
            None => {
                self.rows.push(row);
                (self.rows.len() - 1) as u32
            }
        };
        self.index.insert_unique(Entry::spread(hash), Entry { hash, slot }, |entry| Entry::spread(entry.hash));
        // A row that is made and then not filled must go as well.
        self.candidates.push(slot);
        (slot, true)
    }

    /// The key of a slot in use.
    pub fn key(&self, slot: u32) -> &K {
        match &self.rows[slot as usize].key {
            Some(key) => key,
            None => unreachable!("a slot is given back only when no row refers to it"),
        }
    }

    /// Notes that the row may have become idle.
    pub fn touch(&mut self, slot: u32) {
        self.candidates.push(slot);
    }

    /// Gives idle rows back, telling each key and row.
    pub fn sweep(&mut self, mut gone: impl FnMut(u32, &K)) {
        while let Some(slot) = self.candidates.pop() {
            let row = &mut self.rows[slot as usize];
            if !row.value.is_idle() {
                continue;
            }
            if let Some(key) = row.key.take() {
                row.value = V::default();
                gone(slot, &key);
                if let Ok(entry) = self.index.find_entry(Entry::spread(self.hash(&key)), |entry| entry.slot == slot) {
                    entry.remove();
                }
                self.free.push(slot);
            }
        }
    }

    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows.iter().enumerate().filter(|(_, row)| row.key.is_some()).map(|(slot, _)| slot as u32)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.rows.iter().filter_map(|row| row.key.as_ref().map(|key| (key, &row.value)))
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.index.len()
    }
}

impl<K, V> Index<u32> for Table<K, V> {
    type Output = V;
    fn index(&self, slot: u32) -> &V {
        &self.rows[slot as usize].value
    }
}

impl<K, V> IndexMut<u32> for Table<K, V> {
    fn index_mut(&mut self, slot: u32) -> &mut V {
        &mut self.rows[slot as usize].value
    }
}
