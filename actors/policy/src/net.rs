//! Addresses, prefixes and ports in forms that cannot be malformed: a prefix has no host bits, a range is not inverted, a set is
//! sorted, disjoint and merged, so that equal meaning is equal data.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

/// A network prefix without host bits; a single address is a prefix of full length.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix(IpNet);

impl Prefix {
    /// Host bits are cleared: `10.0.0.5/24` means `10.0.0.0/24`.
    pub fn new(net: IpNet) -> Self {
        Self(net.trunc())
    }

    pub fn host(address: IpAddr) -> Self {
        Self(IpNet::from(address))
    }

    /// `None` when the length is not one of IPv4.
    pub fn v4(bits: u32, len: u8) -> Option<Self> {
        Some(Self::new(IpNet::V4(Ipv4Net::new(Ipv4Addr::from_bits(bits), len).ok()?)))
    }

    /// `None` when the length is not one of IPv6.
    pub fn v6(bits: u128, len: u8) -> Option<Self> {
        Some(Self::new(IpNet::V6(Ipv6Net::new(Ipv6Addr::from_bits(bits), len).ok()?)))
    }

    pub fn net(&self) -> IpNet {
        self.0
    }

    pub fn family(&self) -> Family {
        match self.0 {
            IpNet::V4(_) => Family::V4,
            IpNet::V6(_) => Family::V6,
        }
    }

    // The length of a prefix, as everybody calls it: nothing to do with being empty.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u8 {
        self.0.prefix_len()
    }

    /// Whether this is the prefix of length 0, which holds every address of its family.
    pub fn is_everything(&self) -> bool {
        self.len() == 0
    }

    pub fn is_host(&self) -> bool {
        self.0.prefix_len() == self.0.max_prefix_len()
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An inclusive range that cannot be inverted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span<T> {
    first: T,
    last: T,
}

impl<T: Copy + Ord> Span<T> {
    pub fn new(first: T, last: T) -> Option<Self> {
        (first <= last).then_some(Self { first, last })
    }

    pub fn one(value: T) -> Self {
        Self { first: value, last: value }
    }

    pub fn first(&self) -> T {
        self.first
    }

    pub fn last(&self) -> T {
        self.last
    }

    pub fn contains(&self, value: T) -> bool {
        self.first <= value && value <= self.last
    }
}

/// A number type whose successor can be asked for; what merging of adjacent ranges needs.
pub trait Successor: Copy + Ord {
    fn successor(self) -> Option<Self>;
}

macro_rules! successor {
    ($($t:ty),*) => { $(impl Successor for $t {
        fn successor(self) -> Option<Self> { self.checked_add(1) }
    })* };
}
successor!(u16, u32, u128);

/// Sorted, disjoint, merged ranges: two sets with the same values are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpanSet<T>(Vec<Span<T>>);

impl<T> Default for SpanSet<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Successor> SpanSet<T> {
    pub fn spans(&self) -> &[Span<T>] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, value: T) -> bool {
        self.holds(value, value)
    }

    /// Whether it has every value from the first to the last.
    pub fn holds(&self, first: T, last: T) -> bool {
        let after = self.0.partition_point(|span| span.first <= first);
        after > 0 && self.0[after - 1].contains(first) && self.0[after - 1].contains(last)
    }
}

impl<T: Successor> FromIterator<Span<T>> for SpanSet<T> {
    fn from_iter<I: IntoIterator<Item = Span<T>>>(spans: I) -> Self {
        let mut spans: Vec<Span<T>> = spans.into_iter().collect();
        spans.sort();
        let mut merged: Vec<Span<T>> = Vec::with_capacity(spans.len());
        for span in spans {
            match merged.last_mut() {
                Some(open) if open.last.successor().is_none_or(|next| span.first <= next) => open.last = open.last.max(span.last),
                _ => merged.push(span),
            }
        }
        Self(merged)
    }
}

/// Ports of one transport protocol. An empty set matches nothing; "any port" is the full range.
pub type PortSet = SpanSet<u16>;

/// Addresses of both families.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressSet {
    pub v4: SpanSet<u32>,
    pub v6: SpanSet<u128>,
}

impl AddressSet {
    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(a) => self.v4.contains(a.to_bits()),
            IpAddr::V6(a) => self.v6.contains(a.to_bits()),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    pub fn from_prefixes(prefixes: impl IntoIterator<Item = Prefix>) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for prefix in prefixes {
            match prefix.net() {
                IpNet::V4(net) => v4.extend(Span::new(net.network().to_bits(), net.broadcast().to_bits())),
                IpNet::V6(net) => v6.extend(Span::new(net.network().to_bits(), net.broadcast().to_bits())),
            }
        }
        Self { v4: v4.into_iter().collect(), v6: v6.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(text: &[(u16, u16)]) -> PortSet {
        text.iter().filter_map(|&(a, b)| Span::new(a, b)).collect()
    }

    #[test]
    fn host_bits_are_cleared() {
        assert_eq!(Prefix::v4(0x0a00_0005, 24), Prefix::v4(0x0a00_0000, 24));
        assert_eq!(Prefix::v4(0, 33), None);
        assert_eq!(Prefix::v6(0, 129), None);
    }

    #[test]
    fn equal_meaning_is_equal_data() {
        assert_eq!(ports(&[(80, 80), (81, 90), (70, 82)]), ports(&[(70, 90)]));
        assert_eq!(ports(&[(0, 65535), (65535, 65535)]), ports(&[(0, 65535)]));
        assert_ne!(ports(&[(80, 80), (82, 82)]), ports(&[(80, 82)]));
        assert_eq!(Span::new(2u16, 1u16), None);
    }

    #[test]
    fn a_set_holds_exactly_its_ranges() {
        let set = ports(&[(1000, 2000), (443, 443)]);
        for (port, held) in [(442, false), (443, true), (444, false), (999, false), (1000, true), (2000, true), (2001, false)] {
            assert_eq!(set.contains(port), held, "{port}");
        }
    }
}
