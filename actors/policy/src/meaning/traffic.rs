//! Sets of traffic as ranges on one line: the protocol number above, and below it the destination port, or the ICMP type and
//! code, or nothing that matters.

use std::fmt;

use crate::net::{Family, Span, SpanSet};
use crate::packet::{ICMP, ICMPV6, Payload, has_ports};
use crate::rule::Traffic;
use crate::text::protocol_name;

const DETAIL_BITS: u32 = 16;
const DETAIL_MAX: u32 = (1 << DETAIL_BITS) - 1;
/// Ports, or types of ICMP, that are named before the rest is counted.
const PORTS_SHOWN_MAX: usize = 32;
const LAST: u32 = (255 << DETAIL_BITS) | DETAIL_MAX;

/// Of one family, because ICMP has a number in each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TrafficSet(SpanSet<u32>);

fn whole(protocol: u8) -> Span<u32> {
    range(protocol, 0, DETAIL_MAX)
}

fn range(protocol: u8, first: u32, last: u32) -> Span<u32> {
    let base = u32::from(protocol) << DETAIL_BITS;
    // Callers give ordered details; a single point is what is left of any other.
    Span::new(base | first, base | last).unwrap_or(Span::one(base | first))
}

impl TrafficSet {
    pub fn everything() -> Self {
        Self(Span::new(0, LAST).into_iter().collect())
    }

    pub fn of(traffic: &Traffic, family: Family) -> Self {
        let icmp = match family {
            Family::V4 => ICMP,
            Family::V6 => ICMPV6,
        };
        let spans: Vec<Span<u32>> = match traffic {
            Traffic::Any => return Self::everything(),
            Traffic::Protocol(number) => vec![whole(*number)],
            Traffic::Ports { protocol, ports } => {
                ports.spans().iter().map(|span| range(*protocol, u32::from(span.first()), u32::from(span.last()))).collect()
            }
            Traffic::Icmp { kind: None, code: None } => vec![whole(icmp)],
            Traffic::Icmp { kind: Some(kind), code } => {
                let base = u32::from(*kind) << 8;
                let (first, last) = code.map_or((0, 255), |code| (u32::from(code), u32::from(code)));
                vec![range(icmp, base | first, base | last)]
            }
            Traffic::Icmp { kind: None, code: Some(code) } => {
                (0..=255u32).map(|kind| range(icmp, kind << 8 | u32::from(*code), kind << 8 | u32::from(*code))).collect()
            }
        };
        Self(spans.into_iter().collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many ranges it has.
    pub fn len(&self) -> usize {
        self.0.spans().len()
    }

    pub fn union<'a>(sets: impl IntoIterator<Item = &'a TrafficSet>) -> Self {
        Self(sets.into_iter().flat_map(|set| set.0.spans().iter().copied()).collect())
    }

    pub fn minus(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        let mut holes = other.0.spans().iter().peekable();
        for span in self.0.spans() {
            let mut first = span.first();
            while holes.peek().is_some_and(|hole| hole.last() < first) {
                holes.next();
            }
            let mut open = true;
            let mut ahead = holes.clone();
            while let Some(hole) = ahead.next_if(|hole| hole.first() <= span.last()) {
                if hole.first() > first {
                    left.extend(Span::new(first, hole.first() - 1));
                }
                if hole.last() >= span.last() {
                    open = false;
                    break;
                }
                first = hole.last() + 1;
            }
            if open {
                left.extend(Span::new(first, span.last()));
            }
        }
        Self(left.into_iter().collect())
    }

    pub fn covers(&self, family: Family, payload: &Payload) -> bool {
        let detail = match payload {
            Payload::Ports { destination, .. } => u32::from(*destination),
            Payload::Icmp { kind, code } => u32::from(*kind) << 8 | u32::from(*code),
            Payload::Other(_) => 0,
        };
        self.0.contains(u32::from(payload.protocol(family)) << DETAIL_BITS | detail)
    }

    /// Some traffic of the set that exists in the family.
    pub fn example(&self, family: Family) -> Option<Payload> {
        let foreign_icmp = match family {
            Family::V4 => ICMPV6,
            Family::V6 => ICMP,
        };
        let mut found = None;
        for span in self.0.spans() {
            for protocol in (span.first() >> DETAIL_BITS)..=(span.last() >> DETAIL_BITS) {
                let protocol = protocol as u8;
                if protocol == foreign_icmp {
                    continue;
                }
                let first = span.first().max(range(protocol, 0, 0).first()) & DETAIL_MAX;
                let last = span.last().min(whole(protocol).last()) & DETAIL_MAX;
                // Port 0 is a poor example if there is another one.
                let port = first.max(1).min(last) as u16;
                let payload = match protocol {
                    ICMP | ICMPV6 => Payload::Icmp { kind: (first >> 8) as u8, code: (first & 255) as u8 },
                    protocol if has_ports(protocol) => Payload::Ports { protocol, source: 40000, destination: port },
                    protocol => Payload::Other(protocol),
                };
                // Traffic that people know makes the better example.
                if has_ports(protocol) {
                    return Some(payload);
                }
                found = found.or(Some(payload));
            }
        }
        found
    }
}

impl fmt::Display for TrafficSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rest = Self::everything().minus(self);
        if rest.is_empty() {
            return f.write_str("any");
        }
        if rest.0.spans().len() < self.0.spans().len() {
            return write!(f, "any except {}", rest.list());
        }
        f.write_str(&self.list())
    }
}

impl TrafficSet {
    fn list(&self) -> String {
        let mut items: Vec<String> = Vec::new();
        let mut ports: Option<(u8, Vec<String>)> = None;
        let flush = |ports: &mut Option<(u8, Vec<String>)>, items: &mut Vec<String>| {
            if let Some((protocol, list)) = ports.take() {
                let more = list.len().saturating_sub(PORTS_SHOWN_MAX);
                let shown = list[..list.len() - more].join(",");
                let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
                items.push(format!("{} {shown}{rest}", protocol_text(protocol)));
            }
        };
        for span in self.0.spans() {
            let (first, last) = ((span.first() >> DETAIL_BITS) as u8, (span.last() >> DETAIL_BITS) as u8);
            for protocol in first..=last {
                let from = span.first().max(whole(protocol).first()) & DETAIL_MAX;
                let to = span.last().min(whole(protocol).last()) & DETAIL_MAX;
                if (from, to) == (0, DETAIL_MAX) {
                    flush(&mut ports, &mut items);
                    items.push(protocol_text(protocol));
                    continue;
                }
                let text = match protocol {
                    ICMP | ICMPV6 if from & 255 == 0 && to & 255 == 255 => match (from >> 8, to >> 8) {
                        (a, b) if a == b => format!("{a}/any"),
                        (a, b) => format!("{a}-{b}/any"),
                    },
                    ICMP | ICMPV6 if from == to => format!("{}/{}", from >> 8, from & 255),
                    ICMP | ICMPV6 => format!("{}/{}-{}/{}", from >> 8, from & 255, to >> 8, to & 255),
                    _ if from == to => from.to_string(),
                    _ => format!("{from}-{to}"),
                };
                match &mut ports {
                    Some((of, list)) if *of == protocol => list.push(text),
                    _ => {
                        flush(&mut ports, &mut items);
                        ports = Some((protocol, vec![text]));
                    }
                }
            }
        }
        flush(&mut ports, &mut items);
        shorten(items)
    }
}

/// Neighbouring protocol numbers without names become one item.
fn shorten(items: Vec<String>) -> String {
    const SHOWN_MAX: usize = 12;
    if items.len() <= SHOWN_MAX {
        return items.join("; ");
    }
    format!("{}; and {} more protocols", items[..SHOWN_MAX].join("; "), items.len() - SHOWN_MAX)
}

fn protocol_text(protocol: u8) -> String {
    match protocol {
        ICMP | ICMPV6 => "icmp".into(),
        number => protocol_name(number).map_or_else(|| number.to_string(), str::to_string),
    }
}
