//! Whose turn it is to have sources asked: every host has a number of requests that may wait and a rate, so that one host cannot take the places
//! of the others, nor have a source asked without end.

use std::collections::BTreeMap;

use groupcast_policy::ids::HostId;
use groupcast_topics::admission::{Admission, Rate, Verdict};

/// Requests that wait for sources at once, of all hosts and of one. They change nothing here, and wait for long.
pub const FRESH_MAX: usize = 1_000;
pub const FRESH_PER_HOST_MAX: usize = 64;
/// A host that starts many workloads at once asks for each of them.
pub const FRESH: Rate = Rate { at_once: 100, per_second: 10 };

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refused {
    #[error("{FRESH_MAX} requests wait for sources already: try again")]
    Full,
    #[error("host {host} waits for sources {FRESH_PER_HOST_MAX} times already: wait for their answers")]
    Waits { host: HostId },
    #[error("host {host} has sources asked too often, at most {} times a second: try again later", FRESH.per_second)]
    TooOften { host: HostId },
}

#[derive(Debug)]
pub struct Turns {
    waiting: BTreeMap<HostId, usize>,
    count: usize,
    admission: Admission,
}

impl Default for Turns {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), count: 0, admission: Admission::new(FRESH) }
    }
}

impl Turns {
    /// Whoever is let in says when it has [`left`](Self::left).
    pub fn take(&mut self, host: &HostId, now_ms: u64) -> Result<(), Refused> {
        if self.waiting.get(host).is_some_and(|count| *count >= FRESH_PER_HOST_MAX) {
            return Err(Refused::Waits { host: host.clone() });
        }
        if self.admission.judge(host, now_ms) != Verdict::Heard {
            return Err(Refused::TooOften { host: host.clone() });
        }
        if self.count >= FRESH_MAX {
            return Err(Refused::Full);
        }
        *self.waiting.entry(host.clone()).or_default() += 1;
        self.count += 1;
        Ok(())
    }

    pub fn left(&mut self, host: &HostId) {
        let Some(count) = self.waiting.get_mut(host) else { return };
        self.count -= 1;
        *count -= 1;
        if *count == 0 {
            self.waiting.remove(host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: usize) -> HostId {
        format!("h{number}").parse().unwrap()
    }

    #[test]
    fn one_host_takes_its_own_places_only_and_is_told_so() {
        let mut turns = Turns::default();
        assert!((0..FRESH_PER_HOST_MAX).all(|_| turns.take(&host(1), 0).is_ok()));
        assert_eq!(turns.take(&host(1), 0), Err(Refused::Waits { host: host(1) }));
        assert!(turns.take(&host(2), 0).is_ok());
        turns.left(&host(1));
        assert!(turns.take(&host(1), 0).is_ok());
        assert!(turns.take(&host(1), 0).unwrap_err().to_string().contains("host h1 waits"));
    }

    #[test]
    fn a_host_that_asks_without_end_is_refused_and_the_others_are_not() {
        let mut turns = Turns::default();
        let asks = |turns: &mut Turns, number: usize, now_ms: u64| {
            let taken = turns.take(&host(number), now_ms);
            taken.iter().for_each(|()| turns.left(&host(number)));
            taken
        };
        assert!((0..FRESH.at_once).all(|_| asks(&mut turns, 1, 0).is_ok()));
        assert_eq!(asks(&mut turns, 1, 0), Err(Refused::TooOften { host: host(1) }));
        assert!(asks(&mut turns, 2, 0).is_ok());
        assert!(asks(&mut turns, 1, 1_000 / u64::from(FRESH.per_second)).is_ok());
    }

    #[test]
    fn all_together_are_bounded() {
        let mut turns = Turns::default();
        assert!((0..FRESH_MAX).all(|number| turns.take(&host(number), 0).is_ok()));
        assert_eq!(turns.take(&host(FRESH_MAX), 0), Err(Refused::Full));
        turns.left(&host(0));
        assert!(turns.take(&host(FRESH_MAX), 0).is_ok());
    }
}
