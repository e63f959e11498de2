//! The addresses and prefixes of a group.

use std::collections::BTreeSet;
use std::net::IpAddr;

use roaring::RoaringBitmap;

use crate::net::Prefix;

/// IPv4 addresses by their bits. A group's come out of few pools: as bitmaps and short lists of their lower halves, ten thousand take 8 KB
/// out of one pool of 2^16 (a tree of them 80 KB), and to look one up touches two places in memory. The worst case, each address in a
/// pool of its own, takes some 60 bytes for each.
pub type V4Addresses = RoaringBitmap;

/// Addresses are kept apart from prefixes because there may be a million of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    pub v4: V4Addresses,
    pub v6: BTreeSet<u128>,
    /// Everything that is not a single address.
    pub prefixes: BTreeSet<Prefix>,
}

impl Members {
    pub fn len(&self) -> usize {
        self.v4.len() as usize + self.v6.len() + self.prefixes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn holds(&self, member: Prefix) -> bool {
        match host_address(member) {
            Some(IpAddr::V4(a)) => self.v4.contains(a.to_bits()),
            Some(IpAddr::V6(a)) => self.v6.contains(&a.to_bits()),
            None => self.prefixes.contains(&member),
        }
    }

    /// Whether the address is a member, by itself or inside a prefix.
    pub fn covers(&self, address: IpAddr) -> bool {
        self.holds(Prefix::host(address)) || self.prefixes.iter().any(|p| p.contains(address))
    }

    pub fn iter(&self) -> impl Iterator<Item = Prefix> + '_ {
        let v4 = self.v4.iter().map(|a| Prefix::host(IpAddr::V4(a.into())));
        let v6 = self.v6.iter().map(|&a| Prefix::host(IpAddr::V6(a.into())));
        v4.chain(v6).chain(self.prefixes.iter().copied())
    }

    pub(super) fn insert(&mut self, member: Prefix) -> bool {
        match host_address(member) {
            Some(IpAddr::V4(a)) => self.v4.insert(a.to_bits()),
            Some(IpAddr::V6(a)) => self.v6.insert(a.to_bits()),
            None => self.prefixes.insert(member),
        }
    }

    pub(super) fn remove(&mut self, member: Prefix) -> bool {
        match host_address(member) {
            Some(IpAddr::V4(a)) => self.v4.remove(a.to_bits()),
            Some(IpAddr::V6(a)) => self.v6.remove(&a.to_bits()),
            None => self.prefixes.remove(&member),
        }
    }
}

impl FromIterator<Prefix> for Members {
    fn from_iter<I: IntoIterator<Item = Prefix>>(members: I) -> Self {
        let mut set = Self::default();
        members.into_iter().for_each(|m| {
            set.insert(m);
        });
        set
    }
}

pub(super) fn host_address(member: Prefix) -> Option<IpAddr> {
    member.is_host().then(|| member.net().addr())
}
