use std::fmt;

use super::{address_text, protocol_name};
use crate::net::{Family, PortSet};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Ingress => "ingress",
            Direction::Egress => "egress",
        })
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "ipv4",
            Family::V6 => "ipv6",
        })
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, span) in self.spans().iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match (span.first(), span.last()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Traffic::Any => f.write_str("any"),
            Traffic::Protocol(number) => protocol(f, *number),
            Traffic::Ports { protocol: number, ports } => {
                protocol(f, *number)?;
                write!(f, " {ports}")
            }
            Traffic::Icmp { kind: None, code: None } => f.write_str("icmp"),
            Traffic::Icmp { kind, code } => {
                f.write_str("icmp ")?;
                number_or_any(f, *kind)?;
                f.write_str("/")?;
                number_or_any(f, *code)
            }
        }
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remote::Any => f.write_str("any"),
            Remote::Addresses(set) => f.write_str(&address_text(set)),
            Remote::Group(group) => write!(f, "group:{group}"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.action == Action::Deny {
            f.write_str("deny ")?;
        }
        write!(f, "{} ", self.direction)?;
        if let Some(family) = self.family {
            write!(f, "{family} ")?;
        }
        let preposition = match self.direction {
            Direction::Ingress => "from",
            Direction::Egress => "to",
        };
        write!(f, "{} {preposition} {}", self.traffic, self.remote)?;
        if self.log { f.write_str(" log") } else { Ok(()) }
    }
}

fn protocol(f: &mut fmt::Formatter<'_>, number: u8) -> fmt::Result {
    match protocol_name(number) {
        Some(name) => f.write_str(name),
        None => write!(f, "{number}"),
    }
}

fn number_or_any(f: &mut fmt::Formatter<'_>, number: Option<u8>) -> fmt::Result {
    match number {
        Some(number) => write!(f, "{number}"),
        None => f.write_str("any"),
    }
}
