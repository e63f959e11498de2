//! Which refusals are written down: the first of a kind each, and not more than a host's share of them, because whoever is refused may
//! ask without end, each time for something else.

use std::collections::HashMap;

use groupcast_policy::ids::HostId;

/// The same words about the same host are written this often at most.
pub const SAME_EVERY_MS: u64 = 10_000;
/// Refusals of one host that are written at once; one more is earned every [`SAME_EVERY_MS`].
pub const AT_ONCE_MAX: u64 = 16;
/// Hosts that are remembered; with more of them, the memory begins anew.
pub const HOSTS_MAX: usize = 10_000;

#[derive(Debug)]
struct Told {
    /// When each was last written; as many as may be written at once.
    reasons: HashMap<String, u64>,
    left: u64,
    earned_ms: u64,
}

#[derive(Debug, Default)]
pub struct Refusals {
    hosts: HashMap<HostId, Told>,
}

impl Refusals {
    /// Whether this one is to be written down.
    pub fn is_news(&mut self, host: &HostId, reason: &str, now_ms: u64) -> bool {
        if self.hosts.len() >= HOSTS_MAX && !self.hosts.contains_key(host) {
            self.hosts.clear();
        }
        let new = || Told { reasons: HashMap::new(), left: AT_ONCE_MAX, earned_ms: now_ms };
        let told = self.hosts.entry(host.clone()).or_insert_with(new);
        let earned = now_ms.saturating_sub(told.earned_ms) / SAME_EVERY_MS;
        told.earned_ms += earned * SAME_EVERY_MS;
        told.left = (told.left + earned).min(AT_ONCE_MAX);
        told.reasons.retain(|_, at_ms| now_ms.saturating_sub(*at_ms) < SAME_EVERY_MS);
        if told.left == 0 || told.reasons.contains_key(reason) {
            return false;
        }
        told.left -= 1;
        told.reasons.insert(reason.to_owned(), now_ms);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> HostId {
        name.parse().unwrap()
    }

    #[test]
    fn the_same_words_are_written_once_and_others_at_once() {
        let mut refusals = Refusals::default();
        let rows = [
            ("a", "x", 0, true),
            ("a", "x", 0, false),
            ("a", "y", 0, true),
            ("b", "x", 0, true),
            ("a", "x", SAME_EVERY_MS - 1, false),
            ("a", "x", SAME_EVERY_MS, true),
        ];
        for (name, reason, now_ms, news) in rows {
            assert_eq!(refusals.is_news(&host(name), reason, now_ms), news, "{name} {reason} {now_ms}");
        }
    }

    #[test]
    fn who_asks_for_something_else_each_time_has_a_share_and_no_more() {
        let mut refusals = Refusals::default();
        let mut written = 0;
        for number in 0..1_000 {
            written += u64::from(refusals.is_news(&host("a"), &number.to_string(), 5));
        }
        assert_eq!(written, AT_ONCE_MAX);
        assert!(!refusals.is_news(&host("a"), "more", 4 + SAME_EVERY_MS));
        assert!(refusals.is_news(&host("a"), "more", 5 + SAME_EVERY_MS));
        assert!(!refusals.is_news(&host("a"), "still more", 5 + SAME_EVERY_MS));
        for number in 0..2 * HOSTS_MAX {
            refusals.is_news(&host(&format!("h{number}")), "x", 0);
            assert!(refusals.hosts.len() <= HOSTS_MAX);
        }
    }
}
