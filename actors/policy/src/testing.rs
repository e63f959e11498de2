//! Generators and shorthands for tests.

use proptest::prelude::*;

use crate::ids::GroupId;
use crate::net::{AddressSet, Family, Prefix, Span};
use crate::packet::Payload;
use crate::rule::{Action, Direction, Remote, Rule, Traffic};

/// Few ids, addresses and ports, so that random rules and packets meet each other often.
pub const GROUPS: u8 = 5;

pub fn group_id(index: u8) -> GroupId {
    GroupId::new(&format!("g{index}")).unwrap()
}

pub fn any_group_id() -> impl Strategy<Value = GroupId> {
    (0..GROUPS).prop_map(group_id)
}

pub fn any_family() -> impl Strategy<Value = Family> {
    prop_oneof![3 => Just(Family::V4), 1 => Just(Family::V6)]
}

pub fn any_prefix() -> impl Strategy<Value = Prefix> {
    prop_oneof![
        4 => (0..8u32, 29..=32u8).prop_map(|(a, len)| Prefix::v4(0x0a00_0000 + a, len).unwrap()),
        2 => (0..8u128, 125..=128u8).prop_map(|(a, len)| Prefix::v6((0x2001_0db8_u128 << 96) + a, len).unwrap()),
        1 => prop::sample::select(vec![Prefix::v4(0, 0).unwrap(), Prefix::v4(0x0a00_0000, 8).unwrap(), Prefix::v6(0, 0).unwrap()]),
    ]
}

pub fn any_address() -> impl Strategy<Value = std::net::IpAddr> {
    prop_oneof![
        4 => (0..9u32).prop_map(|a| std::net::IpAddr::V4((0x0a00_0000 + a).into())),
        2 => (0..9u128).prop_map(|a| std::net::IpAddr::V6(((0x2001_0db8_u128 << 96) + a).into())),
        1 => Just(std::net::IpAddr::V4(0x0808_0808.into())),
    ]
}

pub fn any_traffic() -> impl Strategy<Value = Traffic> {
    let small = prop::option::of(prop::sample::select(vec![0u8, 3, 8, 128]));
    let ports = prop::collection::vec((1..6u16, 0..3u16), 1..3)
        .prop_map(|spans| spans.into_iter().filter_map(|(a, more)| Span::new(a, a + more)).collect());
    prop_oneof![
        2 => Just(Traffic::Any),
        1 => prop::sample::select(vec![6u8, 17, 47, 200]).prop_map(Traffic::Protocol),
        4 => (prop::sample::select(vec![6u8, 17]), ports).prop_map(|(protocol, ports)| Traffic::Ports { protocol, ports }),
        1 => (small.clone(), small).prop_map(|(kind, code)| Traffic::Icmp { kind, code }),
    ]
}

pub fn any_payload() -> impl Strategy<Value = Payload> {
    prop_oneof![
        4 => (prop::sample::select(vec![6u8, 17]), 0..9u16).prop_map(|(protocol, destination)|
            Payload::Ports { protocol, source: 40000, destination }),
        1 => (prop::sample::select(vec![0u8, 3, 8, 128]), 0..4u8).prop_map(|(kind, code)| Payload::Icmp { kind, code }),
        1 => prop::sample::select(vec![47u8, 200, 50]).prop_map(Payload::Other),
    ]
}

pub fn any_remote() -> impl Strategy<Value = Remote> {
    prop_oneof![
        1 => Just(Remote::Any),
        2 => prop::collection::vec(any_prefix(), 1..3).prop_map(|p| Remote::Addresses(AddressSet::from_prefixes(p))),
        3 => any_group_id().prop_map(Remote::Group),
    ]
}

/// Only normal ones.
pub fn any_rule() -> impl Strategy<Value = Rule> {
    let action = prop_oneof![4 => Just(Action::Allow), 1 => Just(Action::Deny)];
    let direction = prop::sample::select(vec![Direction::Ingress, Direction::Egress]);
    (action, direction, prop::option::weighted(0.3, any_family()), any_traffic(), any_remote(), prop::bool::weighted(0.2))
        .prop_filter_map("matches nothing", |(action, direction, family, traffic, remote, log)| {
            Rule { action, direction, family, traffic, remote, log }.normalised().ok()
        })
}
