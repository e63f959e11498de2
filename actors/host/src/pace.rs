//! How often all flows of the host may be judged again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A bump makes every flow on the host be judged again: at most this many within [`BUMPS_WITHIN`]. What comes then waits, together.
pub const BUMPS_MAX: usize = 10;
pub const BUMPS_WITHIN: Duration = Duration::from_secs(1);

/// When the last bumps were.
#[derive(Debug, Default)]
pub struct Pace {
    times: VecDeque<Instant>,
}

impl Pace {
    pub fn bumped(&mut self, now: Instant) {
        self.times.push_back(now);
        while self.times.len() > BUMPS_MAX {
            self.times.pop_front();
        }
    }

    /// How long the next one must wait.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let oldest = self.times.front().filter(|_| self.times.len() >= BUMPS_MAX)?;
        (*oldest + BUMPS_WITHIN).checked_duration_since(now).filter(|wait| !wait.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bumps_are_paced() {
        let start = Instant::now();
        let mut pace = Pace::default();
        for _ in 0..BUMPS_MAX {
            assert_eq!(pace.wait(start), None);
            pace.bumped(start);
        }
        assert_eq!(pace.wait(start), Some(BUMPS_WITHIN));
        assert_eq!(pace.wait(start + BUMPS_WITHIN / 4), Some(BUMPS_WITHIN * 3 / 4));
        assert_eq!(pace.wait(start + BUMPS_WITHIN), None);
        pace.bumped(start + BUMPS_WITHIN);
        assert_eq!(pace.times.len(), BUMPS_MAX);
    }
}
