//! One rule of a group, normalised: equal meaning is equal data, so that equal rules are recognised and installed once.

use crate::ids::GroupId;
use crate::net::{AddressSet, Family, PortSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    Allow,
    Deny,
}

/// As seen from the workload: ingress is traffic to it, egress is traffic from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Ingress,
    Egress,
}

/// What of the packet above the addresses a rule matches. `icmp` stands for the ICMP of the packet's own family.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Traffic {
    Any,
    /// A protocol by number, whatever its ports.
    Protocol(u8),
    /// A protocol with ports (tcp, udp, udplite, sctp, dccp) and the destination ports that match.
    Ports {
        protocol: u8,
        ports: PortSet,
    },
    Icmp {
        kind: Option<u8>,
        code: Option<u8>,
    },
}

/// The other end of the flow: the source of ingress, the destination of egress.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Remote {
    Any,
    Addresses(AddressSet),
    Group(GroupId),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    pub action: Action,
    pub direction: Direction,
    /// `None`: both families.
    pub family: Option<Family>,
    pub traffic: Traffic,
    pub remote: Remote,
    pub log: bool,
}
