//! How much one host may have done. Everything a host sends is heard by processes that serve all hosts; beyond its own measure it is not heard or
//! is refused, so a host at full speed takes its own share and nobody else's. Each controller counts what it does itself.

use groupcast_policy::ids::HostId;

use crate::Map;

/// So much at once, and then so much in a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub at_once: u32,
    pub per_second: u32,
}

/// Requests for topics: a host asks when it joins, misses something, or is nudged.
pub const SNAPSHOTS: Rate = Rate { at_once: 100, per_second: 20 };
/// Comparisons: a few after each new subscription, then one in half a minute.
pub const CHECKS: Rate = Rate { at_once: 100, per_second: 20 };
/// Acknowledgements: agents send at most ten a second.
pub const ACKS: Rate = Rate { at_once: 200, per_second: 100 };
/// Beats: one in fifteen seconds by default. Whoever beats faster than this is alive anyhow.
pub const BEATS: Rate = Rate { at_once: 64, per_second: 20 };
/// Requests to enrol, end and report.
pub const REGISTRATIONS: Rate = Rate { at_once: 512, per_second: 50 };
/// What registrations, removals and reports write to REGISTRY, and so to AUDIT: one for each message, and one for each 1,024 bytes.
pub const WRITES: Rate = Rate { at_once: 20_000, per_second: 10 };
/// Reports of health that change something, however many workloads each is about.
pub const HEALTH: Rate = Rate { at_once: 32, per_second: 1 };

/// So often at most it is said that a host sends too much.
const SAY_EVERY_MS: u64 = 10_000;
/// Hosts that have their whole measure again are forgotten this often.
const FORGET_EVERY_MS: u64 = 60_000;
/// Hosts that are remembered. With more of them those that owe nothing are forgotten, and if that is not enough, all.
pub const HOSTS_MAX: usize = 100_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Heard,
    /// Beyond its measure; with how many were not heard since it was last said, when it is time to say so.
    Unheard {
        say: Option<u64>,
    },
}

#[derive(Debug, Clone, Copy)]
struct Measure {
    /// In thousandths. Negative: what something costs may be known only afterwards, and is owed.
    left: i64,
    at_ms: u64,
    unheard: u64,
    said_ms: Option<u64>,
}

impl Measure {
    fn refill(&mut self, rate: Rate, now_ms: u64) {
        let earned = now_ms.saturating_sub(self.at_ms).saturating_mul(u64::from(rate.per_second));
        self.left = self.left.saturating_add(i64::try_from(earned).unwrap_or(i64::MAX)).min(rate.full());
        self.at_ms = self.at_ms.max(now_ms);
    }
}

impl Rate {
    fn full(self) -> i64 {
        i64::from(self.at_once) * 1_000
    }
}

/// Of one kind of message or work.
#[derive(Debug)]
pub struct Admission {
    rate: Rate,
    hosts: Map<HostId, Measure>,
    forget_ms: u64,
}

impl Admission {
    pub fn new(rate: Rate) -> Self {
        Self { rate, hosts: Map::default(), forget_ms: 0 }
    }

    /// Takes one, if there is one.
    pub fn judge(&mut self, host: &HostId, now_ms: u64) -> Verdict {
        let measure = self.measure(host, now_ms);
        if measure.left >= 1_000 {
            measure.left -= 1_000;
            return Verdict::Heard;
        }
        measure.unheard = measure.unheard.saturating_add(1);
        let due = measure.said_ms.is_none_or(|said| now_ms >= said.saturating_add(SAY_EVERY_MS));
        let say = due.then(|| std::mem::take(&mut measure.unheard));
        if due {
            measure.said_ms = Some(now_ms);
        }
        Verdict::Unheard { say }
    }

    /// Whether the host has anything left. Asked before something is done whose cost is known afterwards.
    pub fn may(&mut self, host: &HostId, now_ms: u64) -> bool {
        let rate = self.rate;
        self.hosts.get_mut(host).is_none_or(|measure| {
            measure.refill(rate, now_ms);
            measure.left >= 1_000
        })
    }

    /// It was done, and cost so much: what was not there is owed.
    pub fn spend(&mut self, host: &HostId, cost: u64, now_ms: u64) {
        if cost > 0 {
            let measure = self.measure(host, now_ms);
            measure.left = measure.left.saturating_sub(i64::try_from(cost).unwrap_or(i64::MAX).saturating_mul(1_000));
        }
    }

    fn measure(&mut self, host: &HostId, now_ms: u64) -> &mut Measure {
        let rate = self.rate;
        if now_ms >= self.forget_ms || (self.hosts.len() >= HOSTS_MAX && !self.hosts.contains_key(host)) {
            self.forget_ms = now_ms.saturating_add(FORGET_EVERY_MS);
            self.hosts.retain(|_, measure| {
                measure.refill(rate, now_ms);
                measure.left < rate.full()
            });
            if self.hosts.len() >= HOSTS_MAX && !self.hosts.contains_key(host) {
                self.hosts.clear();
            }
        }
        let whole = || Measure { left: rate.full(), at_ms: now_ms, unheard: 0, said_ms: None };
        let measure = self.hosts.entry(host.clone()).or_insert_with(whole);
        measure.refill(rate, now_ms);
        measure
    }

    /// Hosts that are remembered.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { at_once: 3, per_second: 10 };

    fn host(name: &str) -> HostId {
        name.parse().unwrap()
    }

    fn heard(admission: &mut Admission, name: &str, now_ms: u64, times: usize) -> usize {
        (0..times).filter(|_| admission.judge(&host(name), now_ms) == Verdict::Heard).count()
    }

    #[test]
    fn a_host_has_its_burst_then_its_rate_and_others_have_theirs() {
        let mut admission = Admission::new(RATE);
        assert_eq!(heard(&mut admission, "loud", 0, 1_000), 3);
        assert_eq!(heard(&mut admission, "quiet", 0, 3), 3, "who sends little is heard, whoever else shouts");
        assert_eq!(heard(&mut admission, "loud", 99, 1_000), 0);
        assert_eq!(heard(&mut admission, "loud", 100, 1_000), 1);
        assert_eq!(heard(&mut admission, "loud", 1_100, 1_000), 3, "no more than the burst is saved up");
        assert_eq!(heard(&mut admission, "loud", 1_000, 10), 0, "time that goes back gives nothing");
        assert_eq!(heard(&mut admission, "loud", u64::MAX, 10), 3);
    }

    #[test]
    fn it_is_said_now_and_then_and_by_how_much() {
        let mut admission = Admission::new(RATE);
        assert_eq!(heard(&mut admission, "loud", 0, 3), 3);
        assert_eq!(admission.judge(&host("loud"), 0), Verdict::Unheard { say: Some(1) });
        (0..5).for_each(|_| assert_eq!(admission.judge(&host("loud"), 50), Verdict::Unheard { say: None }));
        heard(&mut admission, "loud", SAY_EVERY_MS, 3);
        assert_eq!(admission.judge(&host("loud"), SAY_EVERY_MS), Verdict::Unheard { say: Some(6) });
    }

    #[test]
    fn hosts_that_are_quiet_again_are_forgotten() {
        let mut admission = Admission::new(RATE);
        (0..1_000).for_each(|number| _ = admission.judge(&host(&format!("h{number}")), 1));
        assert_eq!(admission.len(), 1_000);
        admission.judge(&host("h1"), 2 * FORGET_EVERY_MS);
        assert_eq!(admission.len(), 1);
    }

    #[test]
    fn what_costs_more_than_there_is_is_owed() {
        let mut admission = Admission::new(Rate { at_once: 10, per_second: 1_000 });
        let a = host("a");
        assert!(admission.may(&a, 0));
        admission.spend(&a, 0, 0);
        assert_eq!(admission.len(), 0, "nothing is remembered of who spends nothing");
        admission.spend(&a, 25, 0);
        assert!(!admission.may(&a, 15) && admission.may(&a, 16));
        admission.spend(&a, u64::MAX, 16);
        assert!(!admission.may(&a, u64::from(u32::MAX)), "and no sum is too large");
        assert!(admission.may(&host("b"), 16), "another host owes nothing");
    }

    #[test]
    fn hosts_that_are_remembered_are_bounded() {
        let mut admission = Admission::new(Rate { at_once: 1, per_second: 1 });
        for number in 0..HOSTS_MAX + 2 {
            admission.spend(&host(&format!("h{number}")), 1, 0);
            assert!(admission.len() <= HOSTS_MAX);
        }
    }
}
