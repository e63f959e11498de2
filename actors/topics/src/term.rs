//! Terms and lives, as CATALOG stores them: one small document, replaced by compare-and-swap before either number is used.
//!
//! Only controllers write it. What hosts say about terms is compared and never counted: a term that a host could raise would let one
//! host take the lead away from everybody.

use std::fmt;
use std::str::FromStr;

/// The highest term anybody leads with. One is used for each election, so nobody gets there; a higher one in CATALOG is no term.
pub const TERM_MAX: u64 = 1 << 48;
/// The highest life of the stream. One is used each time the stream was lost.
pub const LIFE_MAX: u64 = 1 << 22;
/// Sequences of one life: seventeen years at two thousand messages a second.
pub const SEQUENCES_PER_LIFE: u64 = 1 << 40;
/// Terms left out when a life begins. Servers that lost the stream, which is in memory, may have lost the end of CATALOG too, which they
/// flush every two minutes: terms that were reserved there must not be used twice, and hosts that saw them must be overtaken.
pub const TERMS_LEFT_OUT: u64 = 200;

/// The highest term that was reserved, and the last life of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reserved {
    term: u64,
    life: u64,
}

/// Why nobody can lead with what CATALOG says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTerm {
    #[error("the term in CATALOG cannot be read ({found:?}): stop the controllers and run `groupcast bus repair-term`")]
    Unreadable { found: String },
    #[error("the term in CATALOG, {term}, leaves no room for another: stop the controllers and run `groupcast bus repair-term`")]
    TooHigh { term: u64 },
    #[error("stream TOPICS has begun {life} times, as often as it can: stop the controllers and run `groupcast bus repair-term`")]
    TooManyLives { life: u64 },
}

/// Bytes of an unreadable document that are shown.
const SHOWN_BYTES_MAX: usize = 64;

impl Reserved {
    pub fn new(term: u64, life: u64) -> Result<Self, BadTerm> {
        match (term, life) {
            (TERM_MAX.., _) => Err(BadTerm::TooHigh { term }),
            (_, LIFE_MAX..) => Err(BadTerm::TooManyLives { life }),
            _ => Ok(Self { term, life }),
        }
    }

    pub fn term(self) -> u64 {
        self.term
    }

    pub fn life(self) -> u64 {
        self.life
    }

    /// The document's content; nothing of one that was never written.
    pub fn decode(payload: &[u8]) -> Result<Self, BadTerm> {
        if payload.is_empty() {
            return Ok(Self::default());
        }
        let unreadable = || {
            let shown = &payload[..payload.len().min(SHOWN_BYTES_MAX)];
            BadTerm::Unreadable { found: String::from_utf8_lossy(shown).into_owned() }
        };
        std::str::from_utf8(payload).ok().and_then(numbers).ok_or_else(unreadable).and_then(|(term, life)| Self::new(term, life))
    }

    pub fn encode(self) -> Vec<u8> {
        self.to_string().into_bytes()
    }

    /// What the next leader reserves: a term above all that controllers have heard of, and a life of its own for a stream that is new.
    pub fn next(self, at_least: u64, new_life: bool) -> Result<Self, BadTerm> {
        let left_out = if new_life && self != Self::default() { TERMS_LEFT_OUT } else { 0 };
        let term = self.term.saturating_add(1 + left_out).max(at_least);
        Self::new(term, self.life.saturating_add(u64::from(new_life)))
    }

    /// Where this life has its first sequence. Leaders are fenced by sequences: a batch of a leader of the life before, held up on its
    /// way, must not find in this one the very sequence it expects. Lives are reserved and rise, so a late request to begin an earlier
    /// life removes nothing of a later one.
    pub fn first_sequence(self) -> u64 {
        // Cannot overflow: a life is at most LIFE_MAX.
        self.life.saturating_mul(SEQUENCES_PER_LIFE)
    }
}

/// The term, and the life after a space where one was begun.
fn numbers(text: &str) -> Option<(u64, u64)> {
    let number = |text: &str| if text.bytes().all(|byte| byte.is_ascii_digit()) { u64::from_str(text).ok() } else { None };
    match text.split_once(' ') {
        Some((term, life)) => Some((number(term)?, number(life)?)),
        None => Some((number(text)?, 0)),
    }
}

impl fmt::Display for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.term, self.life)
    }
}

/// Which life a sequence belongs to. Life 0 is a stream that nobody has begun: the server lost it, or made it just now.
pub fn life_of(sequence: u64) -> u64 {
    sequence / SEQUENCES_PER_LIFE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_read_as_it_was_written_or_refused_by_name() {
        for (text, term, life) in
            [("", 0, 0), ("7", 7, 0), ("7 3", 7, 3), ("281474976710655 4194303", TERM_MAX - 1, LIFE_MAX - 1)]
        {
            let reserved = Reserved::decode(text.as_bytes()).unwrap();
            assert_eq!((reserved.term(), reserved.life()), (term, life), "{text}");
            assert_eq!(Reserved::decode(&reserved.encode()), Ok(reserved), "{text}");
        }
        for text in ["x", "7 ", " 7", "7 x", "7 3 1", "-1", "+7", "18446744073709551616", "\u{fffd}"] {
            assert!(matches!(Reserved::decode(text.as_bytes()), Err(BadTerm::Unreadable { .. })), "{text}");
        }
        assert_eq!(Reserved::decode(b"18446744073709551614"), Err(BadTerm::TooHigh { term: u64::MAX - 1 }));
        assert_eq!(Reserved::decode(b"281474976710656 1"), Err(BadTerm::TooHigh { term: TERM_MAX }));
        assert_eq!(Reserved::decode(b"7 4194304"), Err(BadTerm::TooManyLives { life: LIFE_MAX }));
        let Err(BadTerm::Unreadable { found }) = Reserved::decode(&[b'x'; 1_000]) else { panic!("read") };
        assert_eq!(found.len(), SHOWN_BYTES_MAX);
    }

    #[test]
    fn terms_and_lives_rise_up_to_their_bounds() {
        let first = Reserved::default().next(1, true).unwrap();
        assert_eq!((first.term(), first.life()), (1, 1), "of a bus that is new nothing was lost");
        let second = first.next(0, false).unwrap();
        assert_eq!((second.term(), second.life()), (2, 1));
        assert_eq!(second.next(9, false).unwrap().term(), 9);
        let lost = second.next(0, true).unwrap();
        assert_eq!((lost.term(), lost.life()), (3 + TERMS_LEFT_OUT, 2));
        let last = Reserved::new(TERM_MAX - 1, 1).unwrap();
        assert_eq!(last.next(0, false), Err(BadTerm::TooHigh { term: TERM_MAX }));
        assert_eq!(lost.next(u64::MAX, false), Err(BadTerm::TooHigh { term: u64::MAX }));
        let last = Reserved::new(1, LIFE_MAX - 1).unwrap();
        assert_eq!(last.next(0, true), Err(BadTerm::TooManyLives { life: LIFE_MAX }));
        // Broke: the first sequence of a life was its term times a constant, and a term of 24 bits made it the last sequence there is.
        let plausible = Reserved::decode(b"16777215").unwrap().next(0, true).unwrap();
        assert_eq!((plausible.first_sequence(), life_of(plausible.first_sequence())), (SEQUENCES_PER_LIFE, 1));
        assert!(last.first_sequence() < u64::MAX / 2);
    }
}
