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
        1 => prop::sample::select(vec![
            Prefix::v4(0, 0).unwrap(),
            Prefix::v4(0, 2).unwrap(),
            Prefix::v4(0x4000_0000, 2).unwrap(),
            Prefix::v4(0x0a00_0000, 8).unwrap(),
            Prefix::v6(0, 0).unwrap(),
        ]),
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

// ---- worlds

use std::sync::Arc;

use crate::doc::{Enforced, Phase, Phases};
use crate::ids::{AppId, HostId, NetworkId, SpaceId, TemplateId, WorkloadId};
use crate::model::{
    Binding, Event, Group, GroupRule, HealthCheck, Labels, Probe, Requirement, Selector, Target, Template, Workload,
};
use crate::topic::Scope;

pub const WORKLOADS: u8 = 5;
pub const HOSTS: u8 = 3;

pub fn workload_id(index: u8) -> WorkloadId {
    WorkloadId::new(&format!("w{index}")).unwrap()
}

pub fn host_id(index: u8) -> HostId {
    HostId::new(&format!("h{index}")).unwrap()
}

fn any_space() -> impl Strategy<Value = SpaceId> {
    (0..2u8).prop_map(|i| SpaceId::new(&format!("s{i}")).unwrap())
}

fn any_app() -> impl Strategy<Value = AppId> {
    (0..2u8).prop_map(|i| AppId::new(&format!("a{i}")).unwrap())
}

fn any_phases() -> impl Strategy<Value = Phases> {
    (1..=3u8).prop_map(|bits| Phases::from_bits(bits).unwrap())
}

fn any_phase() -> impl Strategy<Value = Phase> {
    prop_oneof![3 => Just(Phase::Running), 1 => Just(Phase::Staging)]
}

fn any_key() -> impl Strategy<Value = Arc<str>> {
    prop::sample::select(vec!["k0", "k1"]).prop_map(Arc::from)
}

fn any_value() -> impl Strategy<Value = Arc<str>> {
    prop::sample::select(vec!["v0", "v1"]).prop_map(Arc::from)
}

pub fn any_labels() -> impl Strategy<Value = Labels> {
    prop::collection::btree_map(any_key(), any_value(), 0..3).prop_map(|map| map.into_iter().collect())
}

fn any_requirement() -> impl Strategy<Value = Requirement> {
    let values = || prop::collection::btree_set(any_value(), 1..3);
    prop_oneof![
        2 => (any_key(), values()).prop_map(|(key, values)| Requirement::In { key, values }),
        1 => (any_key(), values()).prop_map(|(key, values)| Requirement::NotIn { key, values }),
        1 => any_key().prop_map(Requirement::Exists),
        1 => any_key().prop_map(Requirement::Missing),
    ]
}

pub fn any_selector() -> impl Strategy<Value = Selector> {
    let within = prop_oneof![
        2 => Just(Scope::Global),
        1 => any_space().prop_map(Scope::Space),
        1 => any_app().prop_map(Scope::App),
    ];
    (within, prop::collection::vec(any_requirement(), 1..3)).prop_map(|(within, list)| Selector::new(within, list))
}

pub fn any_binding() -> impl Strategy<Value = Binding> {
    let target = prop_oneof![
        1 => Just(Target::Global),
        2 => any_space().prop_map(Target::Space),
        1 => any_app().prop_map(Target::App),
        2 => (0..WORKLOADS).prop_map(|i| Target::Workload(workload_id(i))),
        3 => any_selector().prop_map(Target::Selector),
    ];
    (target, any_phases()).prop_map(|(target, phases)| Binding { target, phases })
}

pub fn any_group() -> impl Strategy<Value = Group> {
    (
        any_group_id(),
        prop::bool::weighted(0.8),
        prop::collection::vec(any_rule(), 0..4),
        prop::collection::vec(any_binding(), 0..3),
        prop::collection::btree_set(any_prefix(), 0..2),
        (prop::bool::weighted(0.3), prop::bool::weighted(0.3)),
    )
        .prop_map(|(id, stateful, rules, bindings, members, (internet_member, healthy_members))| Group {
            stateful,
            rules: rules.into_iter().map(GroupRule::from).collect(),
            bindings,
            members,
            internet_member,
            healthy_members,
            ..Group::new(id)
        })
}

fn any_template_id() -> impl Strategy<Value = TemplateId> {
    (0..2u8).prop_map(|i| TemplateId::new(&format!("t{i}")).unwrap())
}

fn any_enforced() -> impl Strategy<Value = Option<Enforced>> {
    prop_oneof![
        3 => Just(None),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(ingress, egress)| Some(Enforced { ingress, egress })),
    ]
}

pub fn network(index: u8) -> NetworkId {
    NetworkId::new(&format!("n{index}")).unwrap()
}

fn any_health() -> impl Strategy<Value = Option<HealthCheck>> {
    let probe = prop_oneof![
        (1..u16::MAX).prop_map(|port| Probe::Tcp { port }),
        (1..u16::MAX, "/[a-z]{0,8}").prop_map(|(port, path)| Probe::Http { port, path }),
        "[a-z]{1,8}".prop_map(|name| Probe::Process { name }),
    ];
    prop::option::weighted(0.3, (probe, 1..100u32).prop_map(|(probe, interval_seconds)| HealthCheck { probe, interval_seconds }))
}

pub fn any_template() -> impl Strategy<Value = Template> {
    let own_labels = prop::collection::btree_set(any_key(), 0..2);
    let quota = (any::<bool>(), 1..5_000u32, 1..5_000u32);
    (any_template_id(), any_labels(), own_labels, any_enforced(), any_health(), quota).prop_map(
        |(id, labels, own_labels, enforced, health, (wide_prefixes, workloads_max, addresses_max))| Template {
            labels,
            own_labels,
            enforced,
            health,
            wide_prefixes,
            workloads_max,
            addresses_max,
            ..Template::new(id, network(0))
        },
    )
}

pub fn any_workload() -> impl Strategy<Value = Workload> {
    (
        (0..WORKLOADS, 0..HOSTS, 0..2u8),
        prop::collection::btree_set(any_prefix(), 0..3),
        prop::collection::btree_set(any_prefix(), 0..2),
        any_labels(),
        (prop::option::of(any_space()), prop::option::of(any_app()), any_phase()),
        (prop::option::weighted(0.3, any_template_id()), 1..3u64, any_enforced()),
        (prop::collection::btree_set(any_group_id(), 0..2), prop::bool::weighted(0.3)),
    )
        .prop_map(
            |(
                (id, host, net),
                addresses,
                pairs,
                labels,
                (space, app, phase),
                (template, incarnation, enforced),
                (groups, unhealthy),
            )| {
                Workload {
                    addresses,
                    pairs,
                    labels,
                    space,
                    app,
                    phase,
                    template,
                    incarnation,
                    enforced,
                    groups,
                    unhealthy,
                    ..Workload::new(workload_id(id), host_id(host), network(net))
                }
            },
        )
}

pub fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => any_group().prop_map(Event::group),
        2 => any_group_id().prop_map(Event::GroupRemoved),
        1 => any_template().prop_map(Event::template),
        1 => any_template_id().prop_map(Event::TemplateRemoved),
        8 => any_workload().prop_map(Event::workload),
        2 => (0..WORKLOADS, 0..2u8).prop_map(|(w, n)| Event::WorkloadRemoved { id: workload_id(w), network: network(n) }),
    ]
}

pub fn any_events(max: usize) -> impl Strategy<Value = Vec<Event>> {
    prop::collection::vec(any_event(), 0..max)
}
