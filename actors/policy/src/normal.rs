//! The normal form of rules: what means the same becomes the same data.
//!
//! - a family stands only where it narrows: `ipv4 … from 10.0.0.0/8` is `… from 10.0.0.0/8`;
//! - every address of a family is no restriction: `from 0.0.0.0/0` is `ipv4 … from any`;
//! - every port is no restriction: `tcp 1-65535` is `tcp`;
//! - protocol 0 is any protocol; 1 is icmp, 58 is icmp of IPv6.

use crate::net::{AddressSet, Family, PortSet, Span, SpanSet, Successor};
use crate::packet::{DCCP, ICMP, ICMPV6, has_ports};
use crate::rule::{Remote, Rule, Traffic};

/// The lowest port a rule can name. Port 0 never appears in traffic that rules are written for, so `1-65535` means every port.
pub const PORT_MIN: u16 = 1;

/// Why ports of DCCP are refused. To a kernel that does not track them, all ports between two hosts are one connection without any: an
/// allow by port would never match, and a deny would deny nothing.
pub(crate) const UNTRACKED: &str =
    "ports of dccp cannot be judged, because kernels no longer track its connections (since 6.16); leave the ports out";

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    #[error("no address is named; name one, or write any")]
    NoAddress,
    #[error("an address is not of the rule's family {0}; leave it out, or leave the family out")]
    OtherFamily(Family),
    #[error("no port is named; name one, or leave the ports out for every port")]
    NoPort,
    #[error("protocol {0} has no ports; leave them out")]
    Portless(u8),
    #[error("{UNTRACKED}")]
    Untracked,
    #[error("icmpv6 exists only in IPv6; write icmp, or leave ipv4 out")]
    Icmpv6InV4,
}

fn is_full<T: Successor>(set: &SpanSet<T>, first: T, last: T) -> bool {
    Span::new(first, last).is_some_and(|all| set.spans() == [all])
}

/// Whether the set holds every port a rule can name.
pub fn is_every_port(ports: &PortSet) -> bool {
    ports.spans().len() == 1 && ports.spans()[0].first() <= PORT_MIN && ports.spans()[0].last() == u16::MAX
}

impl Rule {
    /// The normal form. An error says that the rule could match nothing.
    pub fn normalised(mut self) -> Result<Rule, Impossible> {
        self.traffic = match self.traffic {
            Traffic::Protocol(0) => Traffic::Any,
            Traffic::Protocol(ICMP) => Traffic::Icmp { kind: None, code: None },
            Traffic::Protocol(ICMPV6) => {
                match self.family {
                    Some(Family::V4) => return Err(Impossible::Icmpv6InV4),
                    _ => self.family = Some(Family::V6),
                }
                Traffic::Icmp { kind: None, code: None }
            }
            Traffic::Ports { protocol, .. } if !has_ports(protocol) => return Err(Impossible::Portless(protocol)),
            Traffic::Ports { ports, .. } if ports.is_empty() => return Err(Impossible::NoPort),
            Traffic::Ports { protocol, ports } if is_every_port(&ports) => Traffic::Protocol(protocol),
            Traffic::Ports { protocol: DCCP, .. } => return Err(Impossible::Untracked),
            traffic => traffic,
        };
        if let Remote::Addresses(set) = self.remote {
            match self.family {
                Some(Family::V4) if !set.v6.is_empty() => return Err(Impossible::OtherFamily(Family::V4)),
                Some(Family::V6) if !set.v4.is_empty() => return Err(Impossible::OtherFamily(Family::V6)),
                _ => {}
            }
            if set.is_empty() {
                return Err(Impossible::NoAddress);
            }
            let every_v4 = is_full(&set.v4, 0, u32::MAX);
            let every_v6 = is_full(&set.v6, 0, u128::MAX);
            (self.family, self.remote) = match (every_v4, every_v6) {
                (true, true) => (None, Remote::Any),
                (true, false) if set.v6.is_empty() => (Some(Family::V4), Remote::Any),
                (false, true) if set.v4.is_empty() => (Some(Family::V6), Remote::Any),
                // Addresses of one family imply it; of both, the family was not given.
                _ => (None, Remote::Addresses(set)),
            };
        }
        Ok(self)
    }

    /// The families whose packets can match.
    pub fn families(&self) -> Families {
        match (self.family, &self.remote) {
            (Some(Family::V4), _) => Families::V4,
            (Some(Family::V6), _) => Families::V6,
            (None, Remote::Addresses(AddressSet { v4, v6 })) => {
                Families(u8::from(!v4.is_empty()) | u8::from(!v6.is_empty()) << 1)
            }
            (None, _) => Families::BOTH,
        }
    }
}

/// A set of address families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Families(u8);

impl Families {
    pub const NONE: Families = Families(0);
    pub const V4: Families = Families(1);
    pub const V6: Families = Families(2);
    pub const BOTH: Families = Families(3);

    pub fn contains(self, family: Family) -> bool {
        let bit = match family {
            Family::V4 => 1,
            Family::V6 => 2,
        };
        self.0 & bit != 0
    }

    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn iter(self) -> impl Iterator<Item = Family> {
        [Family::V4, Family::V6].into_iter().filter(move |family| self.contains(*family))
    }
}
