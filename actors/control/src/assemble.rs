//! Whole changes out of a stream's messages: what was written together is handed on together.
//!
//! Two things make a message unfit to be handed on alone. It may belong to a batch, which ends with its commit message. And before
//! it something may be missing: the stream keeps few versions of a subject, so a message that nobody has read yet can be gone
//! because a newer one replaced it. A state without what is missing never existed; the first one that did is where everything is
//! read that was in the stream when the hole was seen. The same holds for the beginning, where only last versions are read.

use crate::log::InBatch;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece<T> {
    pub sequence: u64,
    /// How many messages the stream holds behind this one.
    pub pending: u64,
    pub batch: Option<InBatch>,
    pub content: T,
}

/// One or more whole changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whole<T> {
    pub contents: Vec<T>,
    /// The sequence of the last message.
    pub through: u64,
    /// Everything there is, rather than what came since the last one.
    pub everything: bool,
    /// Where the changes in it end; not told of everything.
    pub ends: Vec<u64>,
}

#[derive(Debug)]
pub struct Assembler<T> {
    /// The last sequence seen.
    seen: u64,
    /// Everything is read when this sequence is; `None` afterwards.
    load_to: Option<u64>,
    /// Messages still to come before a hole is closed.
    hole: Option<u64>,
    held: Vec<T>,
    ends: Vec<u64>,
}

impl<T> Assembler<T> {
    /// Begins with the last version of everything, of a stream whose last message has this sequence, 0 for none.
    pub fn new(last: u64) -> Self {
        Self { seen: 0, load_to: Some(last), hole: None, held: Vec::new(), ends: Vec::new() }
    }

    /// An empty stream is read as soon as it is looked at.
    pub fn begin(&mut self) -> Option<Whole<T>> {
        (self.load_to == Some(0)).then(|| self.hand_on(0))
    }

    pub fn push(&mut self, piece: Piece<T>) -> Option<Whole<T>> {
        let Piece { sequence, pending, batch, content } = piece;
        if sequence <= self.seen {
            return None; // delivered again
        }
        let follows = sequence == self.seen + 1;
        self.seen = sequence;
        self.held.push(content);
        self.hole = match self.hole {
            _ if self.load_to.is_some() => None,
            _ if !follows => Some(pending),
            Some(open) => open.checked_sub(1),
            None => None,
        };
        // Nothing behind it: whatever replaced something is read.
        self.hole = self.hole.filter(|open| *open > 0 && pending > 0);
        let open = batch.as_ref().is_some_and(|batch| !batch.commit);
        if !open || batch.as_ref().is_some_and(|batch| batch.ends) {
            self.ends.push(sequence);
        }
        let loading = self.load_to.is_some_and(|last| sequence < last && pending > 0);
        (!open && !loading && self.hole.is_none()).then(|| self.hand_on(sequence))
    }

    fn hand_on(&mut self, through: u64) -> Whole<T> {
        let everything = self.load_to.take().is_some();
        let ends = std::mem::take(&mut self.ends);
        let ends = if everything { Vec::new() } else { ends };
        Whole { contents: std::mem::take(&mut self.held), through, everything, ends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(sequence: u64, pending: u64, batch: Option<(&str, bool)>) -> Piece<u64> {
        let batch = batch.map(|(id, commit)| InBatch { id: id.to_owned(), commit, ends: false });
        Piece { sequence, pending, batch, content: sequence }
    }

    /// What comes out after each message: the contents handed on, or nothing.
    fn run(last: u64, pieces: &[Piece<u64>]) -> Vec<Option<Vec<u64>>> {
        let mut assembler = Assembler::new(last);
        assembler.begin();
        pieces.iter().map(|p| assembler.push(p.clone()).map(|whole| whole.contents)).collect()
    }

    #[test]
    fn changes_that_share_a_batch_end_where_they_say() {
        let mut assembler = Assembler::new(0);
        assembler.begin();
        let shared = |sequence: u64, commit: bool, ends: bool| {
            let batch = Some(InBatch { id: "b".to_owned(), commit, ends });
            Piece { sequence, pending: 0, batch, content: sequence }
        };
        let wholes: Vec<_> = [shared(1, false, true), shared(2, false, false), shared(3, false, true), shared(4, true, true)]
            .into_iter()
            .filter_map(|piece| assembler.push(piece))
            .collect();
        assert_eq!(wholes.len(), 1, "they appear together");
        assert_eq!((wholes[0].ends.as_slice(), wholes[0].through), ([1, 3, 4].as_slice(), 4));
    }

    #[test]
    fn an_empty_stream_is_everything_there_is() {
        let whole = Assembler::<u64>::new(0).begin().unwrap();
        assert!(whole.everything && whole.contents.is_empty());
        assert_eq!(Assembler::<u64>::new(3).begin(), None);
    }

    #[test]
    fn everything_is_handed_on_once_and_then_change_by_change() {
        let pieces = [piece(3, 1, None), piece(9, 0, None), piece(10, 0, None)];
        assert_eq!(run(9, &pieces), [None, Some(vec![3, 9]), Some(vec![10])]);
        // Writers that never rest do not keep it waiting.
        let pieces = [piece(3, 5, None), piece(9, 5, None), piece(10, 5, None)];
        assert_eq!(run(9, &pieces), [None, Some(vec![3, 9]), Some(vec![10])]);
        // What was last has been replaced meanwhile.
        let pieces = [piece(3, 1, None), piece(12, 0, None)];
        assert_eq!(run(9, &pieces), [None, Some(vec![3, 12])]);
    }

    #[test]
    fn a_batch_is_handed_on_whole() {
        let pieces =
            [piece(1, 2, Some(("b", false))), piece(2, 1, Some(("b", false))), piece(3, 0, Some(("b", true))), piece(4, 0, None)];
        assert_eq!(run(0, &pieces), [None, None, Some(vec![1, 2, 3]), Some(vec![4])]);
        // Also when the server has not counted the rest of it yet.
        let pieces = [piece(1, 0, Some(("b", false))), piece(2, 0, Some(("b", true)))];
        assert_eq!(run(0, &pieces), [None, Some(vec![1, 2])]);
    }

    #[test]
    fn behind_a_hole_everything_waits_until_what_filled_it_is_read() {
        // 2 was replaced by one of those behind 3.
        let pieces = [piece(1, 3, None), piece(3, 2, None), piece(4, 1, None), piece(5, 0, None), piece(6, 0, None)];
        assert_eq!(run(0, &pieces), [Some(vec![1]), None, None, Some(vec![3, 4, 5]), Some(vec![6])]);
        // Writers that never rest: as many messages as there were when the hole was seen.
        let pieces = [piece(1, 9, None), piece(3, 2, None), piece(4, 9, None), piece(5, 9, None), piece(6, 9, None)];
        assert_eq!(run(0, &pieces), [Some(vec![1]), None, None, Some(vec![3, 4, 5]), Some(vec![6])]);
        // The end of a batch is gone.
        let pieces = [piece(1, 3, Some(("b", false))), piece(3, 1, None), piece(4, 0, None)];
        assert_eq!(run(0, &pieces), [None, None, Some(vec![1, 3, 4])]);
    }

    #[test]
    fn what_is_delivered_again_is_left_out() {
        let pieces = [piece(1, 1, None), piece(1, 1, None), piece(2, 0, None)];
        assert_eq!(run(0, &pieces), [Some(vec![1]), None, Some(vec![2])]);
    }

    /// A stream that keeps `KEEP` versions of a subject, read with any delay: every state handed on is one the stream had.
    const KEEP: usize = 2;

    proptest! {
        #[test]
        fn every_state_handed_on_is_one_that_was(
            changes in prop::collection::vec(prop::collection::btree_set(0..4usize, 1..4), 1..30),
            delays in prop::collection::vec(0..6usize, 30),
        ) {
            // Every message: its subject, its change, and whether it ends it.
            let mut log: Vec<(usize, usize, bool)> = Vec::new();
            let mut states = vec![[0usize; 4]];
            for (number, subjects) in changes.iter().enumerate() {
                let mut state = *states.last().unwrap();
                for (index, subject) in subjects.iter().enumerate() {
                    log.push((*subject, number, index + 1 == subjects.len()));
                    state[*subject] = log.len();
                }
                states.push(state);
            }
            let size = |change: usize| changes[change].len();
            let mut assembler = Assembler::new(0);
            assembler.begin();
            let (mut written, mut read, mut held) = (0, 0, [0usize; 4]);
            let mut delays = delays.into_iter().cycle();
            while read < log.len() {
                // Whole changes are written, then some messages are read.
                for _ in 0..=delays.next().unwrap() {
                    if written < log.len() {
                        written += size(log[written].1);
                    }
                }
                let kept = |at: usize| log[at..written].iter().filter(|m| m.0 == log[at].0).count() <= KEEP;
                for _ in 0..delays.next().unwrap().max(1) {
                    let Some(next) = (read..written).find(|at| kept(*at)) else { read = written; break };
                    read = next + 1;
                    let pending = (read..written).filter(|at| kept(*at)).count() as u64;
                    let (subject, change, last) = log[next];
                    let batch = (size(change) > 1).then(|| InBatch { id: change.to_string(), commit: last, ends: false });
                    let piece = Piece { sequence: next as u64 + 1, pending, batch, content: (subject, next + 1) };
                    if let Some(whole) = assembler.push(piece) {
                        whole.contents.iter().for_each(|(subject, at)| held[*subject] = *at);
                        prop_assert!(states.contains(&held), "{held:?} never was");
                    }
                }
            }
            prop_assert_eq!(&held, states.last().unwrap());
        }
    }
}
