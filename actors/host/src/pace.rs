//! How often all flows of the host may be judged again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A bump makes every flow on the host be judged again: at least this many are made within [`BUMPS_WITHIN`], however many flows there are. What
/// comes then waits, together.
pub const BUMPS_MAX: usize = 10;
pub const BUMPS_WITHIN: Duration = Duration::from_secs(1);
/// Where there are few flows, as many as make this many of them be judged again within that time.
pub const JUDGED_AGAIN_MAX: u64 = 50_000;
/// And never more than this, however few flows there are: the disk must keep up with the stamps
/// ([`STAMPS_BEHIND_MAX`](crate::keeper::STAMPS_BEHIND_MAX)).
pub const BUMPS_OF_FEW_MAX: usize = 100;

/// How many bumps may be within [`BUMPS_WITHIN`], by the number of flows; `None`: nobody knows it.
fn bumps_max(flows: Option<u64>) -> usize {
    let of_few = flows.map_or(BUMPS_MAX as u64, |flows| JUDGED_AGAIN_MAX / flows.max(1));
    usize::try_from(of_few).unwrap_or(BUMPS_OF_FEW_MAX).clamp(BUMPS_MAX, BUMPS_OF_FEW_MAX)
}

/// When the last bumps were.
#[derive(Debug, Default)]
pub struct Pace {
    times: VecDeque<Instant>,
}

impl Pace {
    pub fn bumped(&mut self, now: Instant) {
        self.times.push_back(now);
        while self.times.len() > BUMPS_OF_FEW_MAX {
            self.times.pop_front();
        }
    }

    /// How long the next one must wait. `flows` says how many there are, and is asked only where that matters.
    pub fn wait(&self, now: Instant, flows: impl FnOnce() -> Option<u64>) -> Option<Duration> {
        let wait = |max: usize| {
            let oldest = self.times.len().checked_sub(max).and_then(|at| self.times.get(at))?;
            (*oldest + BUMPS_WITHIN).checked_duration_since(now).filter(|wait| !wait.is_zero())
        };
        wait(BUMPS_MAX)?;
        wait(bumps_max(flows()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bumps_are_paced() {
        let start = Instant::now();
        let mut pace = Pace::default();
        let many = || Some(u64::MAX);
        for _ in 0..BUMPS_MAX {
            assert_eq!(pace.wait(start, many), None);
            pace.bumped(start);
        }
        assert_eq!(pace.wait(start, many), Some(BUMPS_WITHIN));
        assert_eq!(pace.wait(start, || None), Some(BUMPS_WITHIN), "nobody knows how many flows there are");
        assert_eq!(pace.wait(start + BUMPS_WITHIN / 4, many), Some(BUMPS_WITHIN * 3 / 4));
        assert_eq!(pace.wait(start + BUMPS_WITHIN, many), None);
        // Few flows are judged again soon; and their number is asked for only now.
        assert_eq!(pace.wait(start, || Some(0)), None);
        assert_eq!(pace.wait(start + BUMPS_WITHIN, || panic!("not asked")), None);
        for _ in BUMPS_MAX..BUMPS_OF_FEW_MAX {
            assert_eq!(pace.wait(start, || Some(1)), None);
            pace.bumped(start);
        }
        assert_eq!(pace.wait(start, || Some(1)), Some(BUMPS_WITHIN));
        pace.bumped(start + BUMPS_WITHIN);
        assert_eq!(pace.times.len(), BUMPS_OF_FEW_MAX);
    }

    #[test]
    fn the_more_flows_the_fewer_bumps() {
        let rows = [
            (None, BUMPS_MAX),
            (Some(0), BUMPS_OF_FEW_MAX),
            (Some(500), 100),
            (Some(501), 99),
            (Some(2_500), 20),
            (Some(5_000), 10),
            (Some(5_001), 10),
            (Some(1_000_000), 10),
            (Some(u64::MAX), 10),
        ];
        for (flows, max) in rows {
            assert_eq!(bumps_max(flows), max, "{flows:?}");
        }
    }
}
