//! The hosts of a batch and what each must reach of it, in as few bytes as there is information: a thousand batches to ten thousand
//! hosts each are remembered at once.

/// Numbers of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Slots {
    /// In order.
    Few(Box<[u32]>),
    /// One bit each.
    Many { bits: Box<[u64]>, count: u32 },
}

impl Slots {
    fn of(sorted: &[u32]) -> Self {
        let words = sorted.last().map_or(0, |last| *last as usize / 64 + 1);
        if words * 8 >= sorted.len() * 4 {
            return Self::Few(sorted.into());
        }
        let mut bits = vec![0u64; words].into_boxed_slice();
        sorted.iter().for_each(|slot| bits[*slot as usize / 64] |= 1 << (slot % 64));
        Self::Many { bits, count: sorted.len() as u32 }
    }

    fn len(&self) -> usize {
        match self {
            Self::Few(slots) => slots.len(),
            Self::Many { count, .. } => *count as usize,
        }
    }

    fn iter(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            Self::Few(slots) => Box::new(slots.iter().copied()),
            Self::Many { bits, .. } => Box::new(bits.iter().enumerate().flat_map(|(at, word)| {
                (0..64u32).filter(move |bit| word & (1 << bit) != 0).map(move |bit| at as u32 * 64 + bit)
            })),
        }
    }
}

/// What a host must reach of a batch is one number to it: which of the batch's topics, one bit each, or, where there are more topics
/// than bits, the position of the message to the host itself, which stands for all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    slots: Slots,
    /// One for all, or one for each.
    what: Box<[u32]>,
}

impl Span {
    pub fn of(mut entries: Vec<(u32, u32)>) -> Self {
        entries.sort_unstable();
        let slots: Vec<u32> = entries.iter().map(|(slot, _)| *slot).collect();
        let alike = entries.windows(2).all(|pair| pair[0].1 == pair[1].1);
        match entries.first() {
            Some((_, first)) if alike => Self { slots: Slots::of(&slots), what: [*first].into() },
            _ => Self { slots: Slots::Few(slots.into()), what: entries.iter().map(|(_, what)| *what).collect() },
        }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter()
    }

    /// What this host must reach, if it is concerned.
    pub fn what(&self, slot: u32) -> Option<u32> {
        match &self.slots {
            Slots::Few(slots) => {
                let at = slots.binary_search(&slot).ok()?;
                self.what.get(if self.what.len() == 1 { 0 } else { at }).copied()
            }
            Slots::Many { bits, .. } => {
                let word = bits.get(slot as usize / 64)?;
                (word & (1 << (slot % 64)) != 0).then(|| self.what.first().copied())?
            }
        }
    }
}

/// Numbers of batches, as ranges: a host that is behind is most often behind with all of the last ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Runs(Vec<(u64, u64)>);

impl Runs {
    /// Numbers come in order.
    pub fn push(&mut self, number: u64) {
        match self.0.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            Some((_, last)) if *last >= number => {}
            _ => self.0.push((number, number)),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().flat_map(|(first, last)| *first..=*last)
    }

    pub fn contains(&self, number: u64) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < number);
        self.0.get(at).is_some_and(|(first, _)| *first <= number)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets what is before `number`.
    pub fn forget_before(&mut self, number: u64) {
        let gone = self.0.partition_point(|(_, last)| *last < number);
        self.0.drain(..gone);
        if let Some((first, _)) = self.0.first_mut() {
            *first = (*first).max(number);
        }
        self.0.shrink_to(self.0.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        #[test]
        fn a_span_holds_what_was_put_into_it(
            entries in prop::collection::btree_map(0..400u32, 0..3u32, 0..200),
            one in prop::option::of(0..3u32),
        ) {
            let entries: BTreeMap<u32, u32> = entries.into_iter().map(|(slot, what)| (slot, one.unwrap_or(what))).collect();
            let span = Span::of(entries.clone().into_iter().rev().collect());
            prop_assert_eq!(span.len(), entries.len());
            prop_assert_eq!(span.slots().collect::<Vec<_>>(), entries.keys().copied().collect::<Vec<_>>());
            for slot in 0..500 {
                prop_assert_eq!(span.what(slot), entries.get(&slot).copied(), "{}", slot);
            }
        }

        #[test]
        fn runs_hold_what_was_put_into_them(numbers in prop::collection::btree_set(0..60u64, 0..40), from in 0..70u64) {
            let mut runs = Runs::default();
            numbers.iter().for_each(|number| runs.push(*number));
            prop_assert_eq!(runs.iter().collect::<BTreeSet<_>>(), numbers.clone());
            runs.forget_before(from);
            let left: BTreeSet<u64> = numbers.range(from..).copied().collect();
            prop_assert_eq!(runs.iter().collect::<BTreeSet<_>>(), left.clone());
            prop_assert_eq!(runs.is_empty(), left.is_empty());
            (0..70).for_each(|number| assert_eq!(runs.contains(number), left.contains(&number)));
        }
    }

    #[test]
    fn many_hosts_that_must_reach_the_same_cost_a_bit_each() {
        let dense = Span::of((0..10_000).map(|slot| (slot, 1)).collect());
        assert!(matches!(&dense.slots, Slots::Many { bits, .. } if bits.len() == 157));
        assert!(matches!(Span::of(vec![(9_999, 1)]).slots, Slots::Few(_)));
    }
}
