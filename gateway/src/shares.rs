//! Places that are few: how many of them are taken, by which token and from which address, so that one client cannot take them all.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::attempts::whose;
use crate::problem::Problem;

/// Most places at once: in all, of one token, and from one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub total: usize,
    pub token: usize,
    pub address: usize,
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    tokens: HashMap<String, usize>,
    addresses: HashMap<IpAddr, usize>,
}

#[derive(Debug)]
pub struct Shares {
    limits: Limits,
    taken: Mutex<Taken>,
}

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    Total,
    Token,
    Address,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Share {
    of: Arc<Shares>,
    token: String,
    address: IpAddr,
}

impl Shares {
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // Counters only: nothing panics between two of them.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn take(self: &Arc<Self>, token: &str, address: IpAddr) -> Result<Share, Full> {
        let address = whose(address);
        let mut taken = self.taken();
        let of = |count: Option<&usize>| count.copied().unwrap_or(0);
        if of(taken.tokens.get(token)) >= self.limits.token {
            return Err(Full::Token);
        }
        if of(taken.addresses.get(&address)) >= self.limits.address {
            return Err(Full::Address);
        }
        if taken.total >= self.limits.total {
            return Err(Full::Total);
        }
        taken.total += 1;
        *taken.tokens.entry(token.to_owned()).or_default() += 1;
        *taken.addresses.entry(address).or_default() += 1;
        Ok(Share { of: self.clone(), token: token.to_owned(), address })
    }
}

fn give_back<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.of.taken();
        taken.total -= 1;
        give_back(&mut taken.tokens, &self.token);
        give_back(&mut taken.addresses, &self.address);
    }
}

impl Full {
    /// `what` is going on already, such as "watches".
    pub fn problem(self, what: &str) -> Problem {
        let detail = match self {
            Self::Total => format!("too many {what} at this gateway: try again"),
            Self::Token => format!("too many {what} with your token: end one of them, or try again"),
            Self::Address => format!("too many {what} from your address: end one of them, or try again"),
        };
        Problem::unavailable(detail).retry_after(10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn nobody_takes_more_than_their_share_and_what_is_given_back_is_free() {
        let shares = Shares::new(Limits { total: 5, token: 2, address: 3 });
        let mut held = vec![shares.take("ann", address(1)).unwrap(), shares.take("ann", address(1)).unwrap()];
        assert_eq!(shares.take("ann", address(2)).unwrap_err(), Full::Token);
        held.push(shares.take("bob", address(1)).unwrap());
        assert_eq!(shares.take("bob", address(1)).unwrap_err(), Full::Address);
        held.push(shares.take("bob", address(2)).unwrap());
        held.push(shares.take("eve", address(2)).unwrap());
        assert_eq!(shares.take("joe", address(3)).unwrap_err(), Full::Total);
        held.remove(0);
        assert!(shares.take("ann", address(3)).is_ok());
        held.clear();
        let taken = shares.taken();
        assert!(taken.total == 0 && taken.tokens.is_empty() && taken.addresses.is_empty(), "nothing is remembered");
    }
}
