//! One rule: `h` how (bits: deny, egress, log, family), `t` traffic, `r` remote, and what those two need: `p` protocol, `o` ports,
//! `k` ICMP type, `c` ICMP code, `a` `A` address ranges, `g` group.
//!
//! `h`, `t` and `r` are always written: were "any" a default, a lost field would widen the rule.

use groupcast_policy::ids::{GroupId, ID_LEN_MAX};
use groupcast_policy::net::{AddressSet, Family};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};

use super::{RULE_ADDRESS_SPANS_MAX, RULE_PORT_SPANS_MAX};
use crate::DecodeError;
use crate::pack::{Number, put_spans, take_spans};
use crate::wire::{self, Reader, required};

/// Map header, and `h`, `t` and `r` at their shortest.
pub(crate) const RULE_BYTES_MIN: usize = 1 + 3 + 3 + 3;

const DENY: u64 = 1;
const EGRESS: u64 = 2;
const LOG: u64 = 4;
const V4: u64 = 8;
const V6: u64 = 16;

const TRAFFIC_ANY: u64 = 0;
const TRAFFIC_PROTOCOL: u64 = 1;
const TRAFFIC_PORTS: u64 = 2;
const TRAFFIC_ICMP: u64 = 3;

const REMOTE_ANY: u64 = 0;
const REMOTE_ADDRESSES: u64 = 1;
const REMOTE_GROUP: u64 = 2;

pub(crate) fn write_rule(out: &mut Vec<u8>, rule: &Rule) {
    let deny = if rule.action == Action::Deny { DENY } else { 0 };
    let egress = if rule.direction == Direction::Egress { EGRESS } else { 0 };
    let log = if rule.log { LOG } else { 0 };
    let family = match rule.family {
        None => 0,
        Some(Family::V4) => V4,
        Some(Family::V6) => V6,
    };
    wire::map(out, |fields| {
        fields.uint(b'h', deny | egress | log | family);
        match &rule.traffic {
            Traffic::Any => fields.uint(b't', TRAFFIC_ANY),
            Traffic::Protocol(number) => {
                fields.uint(b't', TRAFFIC_PROTOCOL);
                fields.uint(b'p', u64::from(*number));
            }
            Traffic::Ports { protocol, ports } => {
                fields.uint(b't', TRAFFIC_PORTS);
                fields.uint(b'p', u64::from(*protocol));
                fields.packed(b'o', &packed_spans(ports.spans()));
            }
            Traffic::Icmp { kind, code } => {
                fields.uint(b't', TRAFFIC_ICMP);
                kind.iter().for_each(|kind| fields.uint(b'k', u64::from(*kind)));
                code.iter().for_each(|code| fields.uint(b'c', u64::from(*code)));
            }
        }
        match &rule.remote {
            Remote::Any => fields.uint(b'r', REMOTE_ANY),
            Remote::Addresses(AddressSet { v4, v6 }) => {
                fields.uint(b'r', REMOTE_ADDRESSES);
                fields.packed(b'a', &packed_spans(v4.spans()));
                fields.packed(b'A', &packed_spans(v6.spans()));
            }
            Remote::Group(group) => {
                fields.uint(b'r', REMOTE_GROUP);
                fields.text(b'g', group.as_str());
            }
        }
    });
}

fn packed_spans<T: Number>(spans: &[groupcast_policy::net::Span<T>]) -> Vec<u8> {
    let mut packed = Vec::new();
    put_spans(&mut packed, spans);
    packed
}

pub(crate) fn read_rule(reader: &mut Reader) -> Result<Rule, DecodeError> {
    let (mut how, mut traffic, mut remote) = (None, None, None);
    let (mut protocol, mut ports, mut icmp_kind, mut icmp_code) = (None, None, None, None);
    let (mut v4, mut v6, mut group) = (None, None, None);
    reader.map("rule", |key, reader| {
        match key {
            b'h' => how = Some(reader.uint("rule")?),
            b't' => traffic = Some(reader.uint("traffic")?),
            b'p' => protocol = Some(reader.u8("protocol")?),
            b'o' => ports = Some(take_spans(reader.packed("ports")?, RULE_PORT_SPANS_MAX, "port ranges")?),
            b'k' => icmp_kind = Some(reader.u8("icmp type")?),
            b'c' => icmp_code = Some(reader.u8("icmp code")?),
            b'r' => remote = Some(reader.uint("remote")?),
            b'a' => v4 = Some(take_spans(reader.packed("addresses")?, RULE_ADDRESS_SPANS_MAX, "address ranges")?),
            b'A' => v6 = Some(take_spans(reader.packed("addresses")?, RULE_ADDRESS_SPANS_MAX, "address ranges")?),
            b'g' => group = Some(GroupId::new(reader.text("group", ID_LEN_MAX)?)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let traffic = match (required(traffic, "traffic")?, protocol, ports, icmp_kind, icmp_code) {
        (TRAFFIC_ANY, None, None, None, None) => Traffic::Any,
        (TRAFFIC_PROTOCOL, Some(number), None, None, None) => Traffic::Protocol(number),
        (TRAFFIC_PORTS, Some(protocol), ports, None, None) => Traffic::Ports { protocol, ports: ports.unwrap_or_default() },
        (TRAFFIC_ICMP, None, None, kind, code) => Traffic::Icmp { kind, code },
        (TRAFFIC_ANY..=TRAFFIC_ICMP, ..) => return Err(DecodeError::Contradiction { item: "traffic" }),
        (found, ..) => return Err(DecodeError::Unknown { item: "traffic", found }),
    };
    let remote = match (required(remote, "remote")?, v4, v6, group) {
        (REMOTE_ANY, None, None, None) => Remote::Any,
        (REMOTE_ADDRESSES, v4, v6, None) => {
            Remote::Addresses(AddressSet { v4: v4.unwrap_or_default(), v6: v6.unwrap_or_default() })
        }
        (REMOTE_GROUP, None, None, Some(group)) => Remote::Group(group),
        (REMOTE_ANY..=REMOTE_GROUP, ..) => return Err(DecodeError::Contradiction { item: "remote" }),
        (found, ..) => return Err(DecodeError::Unknown { item: "remote", found }),
    };
    let how = required(how, "rule")?;
    let family = match how & !(DENY | EGRESS | LOG) {
        0 => None,
        V4 => Some(Family::V4),
        V6 => Some(Family::V6),
        _ => return Err(DecodeError::Unknown { item: "rule", found: how }),
    };
    Ok(Rule {
        action: if how & DENY != 0 { Action::Deny } else { Action::Allow },
        direction: if how & EGRESS != 0 { Direction::Egress } else { Direction::Ingress },
        family,
        traffic,
        remote,
        log: how & LOG != 0,
    })
}

/// Applies the limits of this form to a rule.
pub(crate) fn check_rule<E>(rule: &Rule, bound: impl Fn(&'static str, usize, usize) -> Result<(), E>) -> Result<(), E> {
    if let Traffic::Ports { ports, .. } = &rule.traffic {
        bound("port ranges", ports.spans().len(), RULE_PORT_SPANS_MAX)?;
    }
    if let Remote::Addresses(AddressSet { v4, v6 }) = &rule.remote {
        bound("address ranges", v4.spans().len(), RULE_ADDRESS_SPANS_MAX)?;
        bound("address ranges", v6.spans().len(), RULE_ADDRESS_SPANS_MAX)?;
    }
    Ok(())
}
