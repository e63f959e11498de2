//! What a packet shows to a rule, and whether a rule matches it apart from its remote.

use std::fmt;
use std::net::IpAddr;

use crate::net::Family;
use crate::rule::{Direction, Rule, Traffic};

pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const DCCP: u8 = 33;
pub const ICMPV6: u8 = 58;
pub const SCTP: u8 = 132;
pub const UDPLITE: u8 = 136;

/// The protocols whose packets carry ports.
pub const PORT_PROTOCOLS: [u8; 5] = [TCP, UDP, DCCP, SCTP, UDPLITE];

pub fn has_ports(protocol: u8) -> bool {
    PORT_PROTOCOLS.contains(&protocol)
}

pub fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// What stands above the addresses. ICMP is the one of the packet's own family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Payload {
    Ports { protocol: u8, source: u16, destination: u16 },
    Icmp { kind: u8, code: u8 },
    Other(u8),
}

impl Payload {
    pub fn tcp(destination: u16) -> Self {
        Payload::Ports { protocol: TCP, source: 40000, destination }
    }

    pub fn udp(destination: u16) -> Self {
        Payload::Ports { protocol: UDP, source: 40000, destination }
    }

    pub fn protocol(&self, family: Family) -> u8 {
        match (self, family) {
            (Payload::Ports { protocol, .. }, _) | (Payload::Other(protocol), _) => *protocol,
            (Payload::Icmp { .. }, Family::V4) => ICMP,
            (Payload::Icmp { .. }, Family::V6) => ICMPV6,
        }
    }

    /// The payload of an answer: ports swapped, everything else as it is.
    pub fn reply(&self) -> Self {
        match *self {
            Payload::Ports { protocol, source, destination } => {
                Payload::Ports { protocol, source: destination, destination: source }
            }
            // Echo request and reply are the one pair of ICMP types that everybody expects to be answered.
            Payload::Icmp { kind: 8, code } => Payload::Icmp { kind: 0, code },
            Payload::Icmp { kind: 128, code } => Payload::Icmp { kind: 129, code },
            other => other,
        }
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Payload::Ports { protocol, destination, .. } => match crate::text::protocol_name(*protocol) {
                Some(name) => write!(f, "{name}/{destination}"),
                None => write!(f, "{protocol}/{destination}"),
            },
            Payload::Icmp { kind, code } => write!(f, "icmp/{kind}/{code}"),
            Payload::Other(protocol) => match crate::text::protocol_name(*protocol) {
                Some(name) => f.write_str(name),
                None => write!(f, "{protocol}"),
            },
        }
    }
}

impl Traffic {
    pub fn matches(&self, family: Family, payload: &Payload) -> bool {
        match self {
            Traffic::Any => true,
            Traffic::Protocol(number) => payload.protocol(family) == *number,
            Traffic::Ports { protocol, ports } => match payload {
                Payload::Ports { protocol: of, destination, .. } => of == protocol && ports.contains(*destination),
                _ => false,
            },
            Traffic::Icmp { kind, code } => match payload {
                Payload::Icmp { kind: k, code: c } => kind.is_none_or(|kind| kind == *k) && code.is_none_or(|code| code == *c),
                _ => false,
            },
        }
    }
}

impl Rule {
    /// Everything but the remote.
    pub fn matches_payload(&self, direction: Direction, family: Family, payload: &Payload) -> bool {
        self.direction == direction && self.family.is_none_or(|of| of == family) && self.traffic.matches(family, payload)
    }
}
