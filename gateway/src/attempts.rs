//! Failed attempts to use a gateway, bounded: who tries too often has to wait. Time is an argument.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::{IpAddr, Ipv6Addr};

/// Failures of one address with one token's name within [`WINDOW_MS`].
pub const NAMED_MAX: u32 = 10;
/// Failures of one address whatever it named.
pub const ADDRESS_MAX: u32 = 60;
pub const WINDOW_MS: u64 = 60_000;
/// Addresses and names that are remembered; beyond it the oldest is forgotten.
pub const REMEMBERED_MAX: usize = 10_000;

/// An IPv6 network hands out addresses by the /64: all of one count as one.
pub fn whose(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

#[derive(Debug)]
struct Window<K> {
    counts: HashMap<K, (u64, u32)>,
    order: VecDeque<(K, u64)>,
    max: u32,
}

impl<K: Clone + Eq + Hash> Window<K> {
    fn new(max: u32) -> Self {
        Self { counts: HashMap::new(), order: VecDeque::new(), max }
    }

    /// Milliseconds to wait, if it has to.
    fn wait_ms(&self, key: &K, now_ms: u64) -> Option<u64> {
        let (since, count) = self.counts.get(key)?;
        let end = since + WINDOW_MS;
        (*count >= self.max && now_ms < end).then(|| end - now_ms)
    }

    fn failed(&mut self, key: K, now_ms: u64) {
        let entry = self.counts.entry(key.clone()).or_insert((now_ms, 0));
        if now_ms >= entry.0 + WINDOW_MS {
            *entry = (now_ms, 0);
        }
        entry.1 += 1;
        if entry.1 == 1 {
            self.order.push_back((key, now_ms));
        }
        while self.order.len() > REMEMBERED_MAX {
            let Some((oldest, since)) = self.order.pop_front() else { break };
            if self.counts.get(&oldest).is_some_and(|(of, _)| *of == since) {
                self.counts.remove(&oldest);
            }
        }
    }
}

#[derive(Debug)]
pub struct Attempts {
    /// By a hash with a key of our own: what a client sends is not kept, and nobody can choose names that meet.
    named: Window<u64>,
    addresses: Window<IpAddr>,
    hash: RandomState,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { named: Window::new(NAMED_MAX), addresses: Window::new(ADDRESS_MAX), hash: RandomState::new() }
    }
}

impl Attempts {
    /// Milliseconds that this address has to wait before it is told again that this name is not good. Asked after the token was looked
    /// at: a good one never waits, whatever others tried from the same address.
    pub fn wait_ms(&self, address: IpAddr, name: &str, now_ms: u64) -> Option<u64> {
        let address = whose(address);
        let named = || self.named.wait_ms(&self.hash.hash_one((address, name)), now_ms);
        self.addresses.wait_ms(&address, now_ms).or_else(named)
    }

    pub fn failed(&mut self, address: IpAddr, name: &str, now_ms: u64) {
        let address = whose(address);
        self.addresses.failed(address, now_ms);
        self.named.failed(self.hash.hash_one((address, name)), now_ms);
    }

    /// One more failure, unless there were too many already: then the milliseconds to wait.
    pub fn refused(&mut self, address: IpAddr, name: &str, now_ms: u64) -> Result<(), u64> {
        match self.wait_ms(address, name, now_ms) {
            Some(wait_ms) => Err(wait_ms),
            None => {
                self.failed(address, name, now_ms);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn a_name_that_is_tried_too_often_waits_and_others_do_not() {
        let mut attempts = Attempts::default();
        for i in 0..NAMED_MAX {
            assert_eq!(attempts.wait_ms(address(1), "ann", 5), None, "{i}");
            attempts.failed(address(1), "ann", 5);
        }
        assert_eq!(attempts.wait_ms(address(1), "ann", 6), Some(WINDOW_MS - 1));
        assert_eq!(attempts.wait_ms(address(1), "bob", 6), None);
        assert_eq!(attempts.wait_ms(address(2), "ann", 6), None);
        assert_eq!(attempts.wait_ms(address(1), "ann", 5 + WINDOW_MS), None);
        attempts.failed(address(1), "ann", 5 + WINDOW_MS);
        assert_eq!(attempts.wait_ms(address(1), "ann", 6 + WINDOW_MS), None, "it counts anew");
    }

    #[test]
    fn an_address_that_names_many_waits_too() {
        let mut attempts = Attempts::default();
        for i in 0..ADDRESS_MAX {
            assert_eq!(attempts.wait_ms(address(1), "other", 0), None);
            attempts.failed(address(1), &i.to_string(), 0);
        }
        assert!(attempts.wait_ms(address(1), "other", 0).is_some());
        let v6 = |text: &str| text.parse::<IpAddr>().unwrap();
        for _ in 0..ADDRESS_MAX {
            attempts.failed(v6("2001:db8::1"), "x", 0);
        }
        assert!(attempts.wait_ms(v6("2001:db8::2"), "y", 0).is_some(), "of one /64");
        assert!(attempts.wait_ms(v6("2001:db8:0:1::2"), "y", 0).is_none());
    }

    #[test]
    fn memory_is_bounded() {
        let mut attempts = Attempts::default();
        for i in 0..REMEMBERED_MAX as u32 + 10 {
            attempts.failed(IpAddr::from(i.to_be_bytes()), "x", 0);
        }
        assert!(attempts.addresses.counts.len() <= REMEMBERED_MAX && attempts.named.counts.len() <= REMEMBERED_MAX);
        assert!(attempts.addresses.order.len() <= REMEMBERED_MAX);
    }
}
