//! Fields of a packet and its connection, and look-ups of them.

use std::net::IpAddr;

use groupcast_policy::packet::{Payload, family_of};

use super::{Packet, Tracked, tcp_flags};
use crate::Name;
use crate::expression::{FAMILY_V4, FAMILY_V6, Field, PLAIN_V4, Test, Value, Verdict};
use crate::interface::Interface;
use crate::table::{Data, Elements, Key, Table};

/// `None`: the packet has no such field, and the rule does not match.
fn load(field: Field, packet: &Packet, tracked: &Tracked) -> Option<Value> {
    let tuple = tracked.connection.as_ref().map(|connection| &connection.tuple);
    let v4 = |address: IpAddr| match address {
        IpAddr::V4(a) => Some(Value::from(a.to_bits())),
        IpAddr::V6(_) => None,
    };
    let v6 = |address: IpAddr| match address {
        IpAddr::V6(a) => Some(Value::from(a.to_bits())),
        IpAddr::V4(_) => None,
    };
    let port = |payload: Payload, of_source: bool| match payload {
        Payload::Ports { source, .. } if of_source => Some(Value::from(source)),
        Payload::Ports { destination, .. } => Some(Value::from(destination)),
        _ => None,
    };
    let icmp = |payload: Payload| match payload {
        Payload::Icmp { kind, code } => Some(Value::from(u16::from(kind) << 8 | u16::from(code))),
        _ => None,
    };
    match field {
        Field::Family => Some(Value::from(if packet.source.is_ipv4() { FAMILY_V4 } else { FAMILY_V6 })),
        // Packets of the model have no options.
        Field::VersionAndLength => Some(Value::from(if packet.source.is_ipv4() { PLAIN_V4 } else { 0x60 })),
        Field::Protocol => Some(Value::from(packet.payload.protocol(family_of(packet.source)))),
        Field::InInterface => Some(Value::Interface(packet.came_in)),
        Field::OutInterface => Some(Value::Interface(packet.goes_out)),
        Field::InIndex => Some(Value::from(packet.came_in_index)),
        Field::OutIndex => Some(Value::from(packet.goes_out_index)),
        Field::CtState => Some(Value::from(tracked.state)),
        Field::CtDirection => tuple.map(|_| Value::from(tracked.direction)),
        Field::CtMark => tracked.connection.as_ref().map(|connection| Value::from(connection.mark)),
        Field::CtProtocol => tuple.map(|tuple| Value::from(tuple.payload.protocol(family_of(tuple.source)))),
        Field::CtSource4 => tuple.and_then(|tuple| v4(tuple.source)),
        Field::CtSource6 => tuple.and_then(|tuple| v6(tuple.source)),
        Field::CtDestination4 => tuple.and_then(|tuple| v4(tuple.destination)),
        Field::CtDestination6 => tuple.and_then(|tuple| v6(tuple.destination)),
        Field::CtDestinationPort => tuple.and_then(|tuple| port(tuple.payload, false)),
        Field::CtIcmp => tuple.and_then(|tuple| icmp(tuple.payload)),
        Field::Source4 => v4(packet.source),
        Field::Source6 => v6(packet.source),
        Field::Destination4 => v4(packet.destination),
        Field::Destination6 => v6(packet.destination),
        Field::SourcePort => port(packet.payload, true),
        Field::DestinationPort => port(packet.payload, false),
        Field::Icmp => icmp(packet.payload),
        Field::TcpFlags => tcp_flags(packet).map(Value::from),
    }
}

fn number(value: &Value) -> u128 {
    match value {
        Value::Number(number) => *number,
        Value::Interface(interface) => u128::from_be_bytes(*interface.bytes()),
    }
}

pub fn holds(table: &Table, fields: &[Field], test: &Test, packet: &Packet, tracked: &Tracked) -> bool {
    let loaded: Option<Vec<Value>> = fields.iter().map(|field| load(*field, packet, tracked)).collect();
    let Some(loaded) = loaded else { return false };
    let Some(first) = loaded.first() else { return false };
    match test {
        Test::Is(value) => first == value,
        Test::IsNot(value) => first != value,
        Test::Within(low, high) => (*low..=*high).contains(&number(first)),
        Test::Masked { mask, is } => number(first) & u128::from(*mask) == u128::from(*is),
        Test::MaskedNot { mask, is_not } => number(first) & u128::from(*mask) != u128::from(*is_not),
        Test::In(set) => look_up(table, set, &loaded).is_some(),
        Test::NotIn(set) => look_up(table, set, &loaded).is_none(),
    }
}

pub fn verdict_of(
    table: &Table,
    fields: &[Field],
    mask: Option<u32>,
    map: &Name,
    packet: &Packet,
    tracked: &Tracked,
) -> Option<Verdict> {
    let mut loaded: Vec<Value> = fields.iter().map(|field| load(*field, packet, tracked)).collect::<Option<_>>()?;
    if let (Some(mask), [Value::Number(number)]) = (mask, &mut loaded[..]) {
        *number &= u128::from(mask);
    }
    match look_up(table, map, &loaded)? {
        Data::Verdict(verdict) => Some(verdict),
        _ => None,
    }
}

pub fn dispatch(
    table: &Table,
    fields: &[Field],
    numbers: &Name,
    verdicts: &Name,
    packet: &Packet,
    tracked: &Tracked,
) -> Option<Verdict> {
    let loaded: Vec<Value> = fields.iter().map(|field| load(*field, packet, tracked)).collect::<Option<_>>()?;
    let Data::Number(number) = look_up(table, numbers, &loaded)? else { return None };
    match look_up(table, verdicts, &[Value::from(number)])? {
        Data::Verdict(verdict) => Some(verdict),
        _ => None,
    }
}

fn look_up(table: &Table, set: &Name, key: &[Value]) -> Option<Data> {
    let found = |held: bool| held.then_some(Data::Nothing);
    let narrow = |number: u128| u32::try_from(number).ok();
    match (&table.sets.get(set)?.elements, key) {
        (Elements::V4(set), [Value::Number(a)]) => found(set.contains(narrow(*a)?)),
        (Elements::V6(set), [Value::Number(a)]) => found(set.contains(a)),
        (Elements::Spans4(set), [Value::Number(a)]) => {
            let address = narrow(*a)?;
            found(set.iter().any(|span| span.contains(address)))
        }
        (Elements::Spans6(set), [Value::Number(a)]) => found(set.iter().any(|span| span.contains(*a))),
        (Elements::Ports(set), [Value::Number(a)]) => {
            let port = u16::try_from(*a).ok()?;
            found(set.iter().any(|span| span.contains(port)))
        }
        (Elements::Keyed(map), key) => {
            let covers = |held: &Key, interface: &Interface, address: Option<u128>| match (held, address) {
                (Key::Claim(claim), None) => claim.covers(interface),
                (Key::Interface(name), None) => name == interface,
                (Key::InterfaceV4(name, own), Some(a)) => name == interface && u128::from(*own) == a,
                (Key::InterfaceV6(name, own), Some(a)) => name == interface && *own == a,
                (Key::InterfaceSpan4(name, span), Some(a)) => {
                    name == interface && u128::from(span.first()) <= a && a <= u128::from(span.last())
                }
                (Key::InterfaceSpan6(name, span), Some(a)) => name == interface && span.contains(a),
                _ => false,
            };
            match key {
                [Value::Number(number)] => map.get(&Key::Number(narrow(*number)?)).cloned(),
                [Value::Interface(interface)] => {
                    map.iter().find(|(held, _)| covers(held, interface, None)).map(|(_, data)| data.clone())
                }
                [Value::Number(one), Value::Number(other)] if one == other => {
                    let v4 = narrow(*one).and_then(|address| map.get(&Key::SameV4(address)));
                    v4.or_else(|| map.get(&Key::SameV6(*one))).cloned()
                }
                [Value::Interface(interface), Value::Number(address)] => {
                    map.iter().find(|(held, _)| covers(held, interface, Some(*address))).map(|(_, data)| data.clone())
                }
                _ => None,
            }
        }
        _ => None,
    }
}
