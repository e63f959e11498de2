//! What a host suffers: set by faults, felt by its connection. Also a part of the protocol left out on purpose, to see that it is missed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use groupcast_messages::{Companions, Delta};
use groupcast_topics::reader::Reader;

use crate::host::Delivered;
use crate::lean::Stall;

/// Of one host. Times are in milliseconds after the run began, and over when they are past.
#[derive(Debug, Default)]
pub struct Trouble {
    silent_until_ms: AtomicU64,
    unread_until_ms: AtomicU64,
    late_until_ms: AtomicU64,
    late_ms: AtomicU32,
    lossy_until_ms: AtomicU64,
    loss_percent: AtomicU32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Silent,
    Unread,
    Late(Duration),
    Lossy(u32),
}

impl Trouble {
    /// Begins it, until then.
    pub fn begin(&self, kind: Kind, until_ms: u64) {
        let until = match kind {
            Kind::Silent => &self.silent_until_ms,
            Kind::Unread => &self.unread_until_ms,
            Kind::Late(by) => {
                self.late_ms.store(by.as_millis() as u32, Ordering::Relaxed);
                &self.late_until_ms
            }
            Kind::Lossy(percent) => {
                self.loss_percent.store(percent, Ordering::Relaxed);
                &self.lossy_until_ms
            }
        };
        until.fetch_max(until_ms, Ordering::Release);
    }

    /// The clock is only looked at where something was begun.
    pub fn stall(&self, begun: Instant) -> Option<Stall> {
        let [silent, unread, late] =
            [&self.silent_until_ms, &self.unread_until_ms, &self.late_until_ms].map(|until| until.load(Ordering::Acquire));
        if silent | unread | late == 0 {
            return None;
        }
        let now_ms = begun.elapsed().as_millis() as u64;
        let at = |ms: u64| begun + Duration::from_millis(ms);
        if silent > now_ms {
            return Some(Stall::Silent(at(silent)));
        }
        if unread > now_ms {
            return Some(Stall::Unread(at(unread)));
        }
        let by = Duration::from_millis(u64::from(self.late_ms.load(Ordering::Relaxed)));
        (late > now_ms).then_some(Stall::Late(by))
    }

    /// Of a hundred deltas how many are lost, now.
    pub fn loss_percent(&self, begun: Instant) -> u32 {
        let until = self.lossy_until_ms.load(Ordering::Acquire);
        if until == 0 || until <= begun.elapsed().as_millis() as u64 { 0 } else { self.loss_percent.load(Ordering::Relaxed) }
    }
}

/// A part of the protocol that all simulated hosts lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// Takes what comes next for what comes next, whatever was lost before it.
    Gap,
    /// Does not wait for the other topics of a change.
    Companions,
    /// Takes a delta of a deposed leader for one of the leader.
    Term,
}

impl std::str::FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "gap" => Ok(Self::Gap),
            "companions" => Ok(Self::Companions),
            "term" => Ok(Self::Term),
            other => Err(format!("{other:?} is nothing that can be left out: gap, companions or term")),
        }
    }
}

impl Sabotage {
    /// Another previous revision and delta than those that arrived, where that makes a difference.
    pub fn alter(self, delivered: Delivered<'_>, reader: &Reader) -> Option<(u64, Vec<u8>)> {
        let mut delta = Delta::decode(delivered.topic, delivered.payload).ok()?;
        let (held, revision) = reader.document(delivered.topic).zip(reader.revision(delivered.topic))?;
        match self {
            Self::Companions => {
                (delta.companions, delta.tally) = (Companions::NONE, None);
                return Some((delivered.previous, delta.encode()));
            }
            Self::Gap if revision >= delivered.previous => return None,
            Self::Term if delta.term >= reader.cut()?.term => return None,
            Self::Gap | Self::Term => {}
        }
        delta.term = delta.term.max(reader.cut()?.term);
        let mut document = held.clone();
        document.apply(&delta.edit).ok()?;
        delta.digest = document.digest();
        Some((revision, delta.encode()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_comes_and_goes() {
        let (trouble, begun) = (Trouble::default(), Instant::now() - Duration::from_secs(10));
        assert_eq!((trouble.stall(begun), trouble.loss_percent(begun)), (None, 0));
        trouble.begin(Kind::Silent, 9_000);
        trouble.begin(Kind::Lossy(5), 9_000);
        assert_eq!((trouble.stall(begun), trouble.loss_percent(begun)), (None, 0));
        trouble.begin(Kind::Late(Duration::from_millis(20)), 1_000_000);
        assert_eq!(trouble.stall(begun), Some(Stall::Late(Duration::from_millis(20))));
        trouble.begin(Kind::Unread, 900_000);
        assert_eq!(trouble.stall(begun), Some(Stall::Unread(begun + Duration::from_secs(900))));
        trouble.begin(Kind::Silent, 800_000);
        assert_eq!(trouble.stall(begun), Some(Stall::Silent(begun + Duration::from_secs(800))));
        trouble.begin(Kind::Lossy(7), 800_000);
        assert_eq!(trouble.loss_percent(begun), 7);
    }
}
