//! Seeded random policies, changes and packets, small enough that they meet each other often. Tests of every level use the same ones:
//! against the model kernel here, against real packets elsewhere.
//!
//! The stage is fixed: a host `h0` with [`WORKLOADS`] places for workloads, each behind its own interface and with one address of each
//! family; one place is attached by address; a stranger outside.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use groupcast_policy::compiler::Compiler;
use groupcast_policy::doc::{Document, Edit, Enforced, Phase, Phases};
use groupcast_policy::ids::{AppId, GroupId, HostId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target, Workload, World};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{AddressSet, Family, Prefix, Span};
use groupcast_policy::packet::{Payload, TCP, UDP};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::Topic;

use crate::interface::{Claim, Interface};
use crate::kernel::begins_a_connection;
use crate::settings::{Attached, Attachment, Attachments};

pub const WORKLOADS: u8 = 5;
pub const GROUPS: u8 = 6;
/// The ports that rules and packets use.
pub const PORTS: std::ops::RangeInclusive<u16> = 5001..=5008;

/// The same numbers from the same seed, everywhere.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        // A seed of few bits must not begin with few bits.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// A number below `sides`.
    pub fn below(&mut self, sides: usize) -> usize {
        (self.roll() % sides.max(1) as u64) as usize
    }

    /// True in `percent` of all cases.
    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

fn id<T: std::str::FromStr>(text: String) -> T
where
    T::Err: std::fmt::Debug,
{
    text.parse().unwrap_or_else(|error| panic!("{text:?} is an id: {error:?}"))
}

pub fn host() -> HostId {
    id("h0".into())
}

pub fn workload_id(place: u8) -> WorkloadId {
    id(format!("w{place}"))
}

pub fn group_id(number: u8) -> GroupId {
    id(format!("g{number}"))
}

pub fn interface(place: u8) -> Interface {
    // The last two are attached by address, behind one interface.
    let port = place.min(WORKLOADS - 2);
    Interface::new(&format!("gcw{port}")).unwrap_or(Interface::NONE)
}

pub fn outside() -> Interface {
    Interface::new("gcout").unwrap_or(Interface::NONE)
}

/// The address of a place; the stranger outside is the place after the last.
pub fn address(place: u8, family: Family) -> IpAddr {
    let subnet = if place == WORKLOADS { 9 } else { place.min(WORKLOADS - 2) };
    let own = 2 + u16::from(place.saturating_sub(WORKLOADS - 2)) * u16::from(place != WORKLOADS);
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::new(10, 1, subnet, own as u8)),
        Family::V6 => IpAddr::V6(Ipv6Addr::new(0xfd00, 1, u16::from(subnet), 0, 0, 0, 0, own)),
    }
}

pub fn claims() -> Vec<Claim> {
    Claim::new("gcw*").into_iter().collect()
}

pub fn attachments() -> Attachments {
    let attach = |place: u8| {
        let attachment = if place < WORKLOADS - 2 {
            Attachment::Interface(interface(place))
        } else {
            let addresses = [Family::V4, Family::V6].map(|family| address(place, family)).into();
            Attachment::Addresses { interface: interface(place), addresses }
        };
        (workload_id(place), Attached { attachment, audit: false })
    };
    (0..WORKLOADS).map(attach).collect()
}

fn space(number: usize) -> SpaceId {
    id(format!("s{number}"))
}

fn app(number: usize) -> AppId {
    id(format!("a{number}"))
}

pub fn family(dice: &mut Dice) -> Family {
    if dice.percent(60) { Family::V4 } else { Family::V6 }
}

fn prefix(dice: &mut Dice) -> Prefix {
    let of = family(dice);
    let place = dice.below(usize::from(WORKLOADS) + 1) as u8;
    let host = Prefix::host(address(place, of));
    let lengths: &[u8] = if of == Family::V4 { &[32, 31, 30, 24, 16, 0] } else { &[128, 127, 64, 48, 0] };
    let len = *dice.pick(lengths);
    match host.net().addr() {
        IpAddr::V4(a) => Prefix::v4(a.to_bits(), len),
        IpAddr::V6(a) => Prefix::v6(a.to_bits(), len),
    }
    .unwrap_or(host)
}

fn port_span(dice: &mut Dice) -> Span<u16> {
    let first = *PORTS.start() + dice.below(8) as u16;
    Span::new(first, first + dice.below(3) as u16).unwrap_or(Span::one(first))
}

fn traffic(dice: &mut Dice) -> Traffic {
    match dice.below(10) {
        0 | 1 => Traffic::Any,
        2 => Traffic::Protocol(*dice.pick(&[TCP, UDP])),
        3 | 4 => Traffic::Icmp {
            kind: dice.percent(60).then(|| *dice.pick(&[8, 128, 0, 3])),
            code: dice.percent(30).then(|| dice.below(2) as u8),
        },
        _ => {
            let spans = 1 + dice.below(2);
            let ports = (0..spans).map(|_| port_span(dice)).collect();
            Traffic::Ports { protocol: *dice.pick(&[TCP, TCP, UDP]), ports }
        }
    }
}

/// A normal rule.
pub fn rule(dice: &mut Dice) -> Rule {
    loop {
        let remote = match dice.below(6) {
            0 | 1 => Remote::Any,
            2 => Remote::Addresses(AddressSet::from_prefixes((0..1 + dice.below(7)).map(|_| prefix(dice)).collect::<Vec<_>>())),
            _ => Remote::Group(group_id(dice.below(usize::from(GROUPS)) as u8)),
        };
        let rule = Rule {
            action: if dice.percent(20) { Action::Deny } else { Action::Allow },
            direction: if dice.percent(50) { Direction::Egress } else { Direction::Ingress },
            family: dice.percent(20).then(|| family(dice)),
            traffic: traffic(dice),
            remote,
            log: dice.percent(10),
        };
        if let Ok(rule) = rule.normalised() {
            return rule;
        }
    }
}

pub fn group(dice: &mut Dice) -> Group {
    let stateful = dice.percent(80);
    let rules = (0..dice.below(6)).map(|_| GroupRule::from(rule(dice))).collect();
    let bindings = (0..dice.below(4))
        .map(|_| Binding {
            target: match dice.below(6) {
                0 | 1 => Target::Global,
                2 => Target::Space(space(dice.below(2))),
                3 => Target::App(app(dice.below(2))),
                _ => Target::Workload(workload_id(dice.below(usize::from(WORKLOADS)) as u8)),
            },
            phases: *dice.pick(&[Phases::BOTH, Phases::RUNNING, Phases::STAGING]),
        })
        .collect();
    let members: BTreeSet<Prefix> = (0..dice.below(3)).map(|_| prefix(dice)).collect();
    let number = dice.below(usize::from(GROUPS)) as u8;
    Group { stateful, rules, bindings, members, internet_member: dice.percent(30), ..Group::new(group_id(number)) }
}

pub fn workload(dice: &mut Dice) -> Workload {
    let place = dice.below(usize::from(WORKLOADS)) as u8;
    let network: NetworkId = id("n0".into());
    // Some of the groups' members live on another host.
    let own: HostId = if dice.percent(85) { host() } else { id("h1".into()) };
    Workload {
        addresses: [Family::V4, Family::V6].map(|family| Prefix::host(address(place, family))).into(),
        space: dice.percent(60).then(|| space(dice.below(2))),
        app: dice.percent(60).then(|| app(dice.below(2))),
        phase: if dice.percent(80) { Phase::Running } else { Phase::Staging },
        enforced: dice.percent(20).then(|| Enforced { ingress: dice.percent(50), egress: dice.percent(50) }),
        groups: (0..dice.below(2)).map(|_| group_id(dice.below(usize::from(GROUPS)) as u8)).collect(),
        ..Workload::new(workload_id(place), own, network)
    }
}

pub fn event(dice: &mut Dice) -> Event {
    match dice.below(20) {
        0 => Event::GroupRemoved(group_id(dice.below(usize::from(GROUPS)) as u8)),
        1 => {
            let place = dice.below(usize::from(WORKLOADS)) as u8;
            Event::WorkloadRemoved { id: workload_id(place), network: id("n0".into()) }
        }
        2..=12 => Event::group(group(dice)),
        _ => Event::workload(workload(dice)),
    }
}

/// A flow's first packet: from and to a place, where the one after the last is outside.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    pub from: u8,
    pub to: u8,
    pub family: Family,
    pub payload: Payload,
}

impl Probe {
    pub fn roll(dice: &mut Dice) -> Self {
        let from = dice.below(usize::from(WORKLOADS) + 1) as u8;
        let to = loop {
            let to = dice.below(usize::from(WORKLOADS) + 1) as u8;
            // What is behind one interface talks without us.
            if interface(to.min(WORKLOADS)) != interface(from.min(WORKLOADS)) || (from == WORKLOADS) != (to == WORKLOADS) {
                break to;
            }
        };
        let of = family(dice);
        let destination = *PORTS.start() + dice.below(8) as u16;
        // Never a port that rules name: nothing but the flow's own direction may tell an answer.
        let source = 40_000 + dice.below(1000) as u16;
        let payload = match dice.below(5) {
            // Requests mostly; also answers, errors and neighbour discovery that belong to nothing.
            0 if of == Family::V4 => Payload::Icmp { kind: *dice.pick(&[8, 8, 8, 0, 3, 11]), code: 0 },
            0 => Payload::Icmp { kind: *dice.pick(&[128, 128, 128, 129, 1, 135]), code: 0 },
            1 | 2 => Payload::Ports { protocol: UDP, source, destination },
            _ => Payload::Ports { protocol: TCP, source, destination },
        };
        Self { from, to, family: of, payload }
    }

    pub fn source(&self) -> IpAddr {
        address(self.from, self.family)
    }

    pub fn destination(&self) -> IpAddr {
        address(self.to, self.family)
    }
}

/// A world with the documents that a host which follows everything would hold.
#[derive(Default)]
pub struct Stage {
    pub world: World,
    compiler: Compiler,
    documents: HashMap<Topic, Document>,
}

static ABSENT: std::sync::LazyLock<Document> = std::sync::LazyLock::new(Document::absent);

impl Documents for Stage {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        Some(self.documents.get(topic).unwrap_or(&ABSENT))
    }
}

impl Stage {
    /// Applies events as one change and returns its edits.
    pub fn change(&mut self, events: &[Event]) -> Vec<(Topic, Option<Edit>)> {
        events.iter().for_each(|event| self.world.apply(event));
        let mut edits = Vec::new();
        for (topic, edit) in self.compiler.apply(events.iter()).edits {
            if let Err(error) = self.documents.entry(topic.clone()).or_default().apply(&edit) {
                panic!("the compiler's edit of {topic:?} does not apply: {error}");
            }
            edits.push((topic, Some(edit)));
        }
        edits
    }

    /// An event that changes little: a member of a group, or a workload that becomes like another.
    pub fn nudge(&self, dice: &mut Dice) -> Event {
        let groups: Vec<&Group> = self.world.catalogue.groups.values().map(|stored| &*stored.value).collect();
        let workloads: Vec<&Workload> = self.world.registry.workloads.values().map(|workload| &**workload).collect();
        if dice.percent(60) && !groups.is_empty() {
            let mut group = (*dice.pick(&groups)).clone();
            let member = if dice.percent(70) {
                Prefix::host(address(dice.below(usize::from(WORKLOADS) + 1) as u8, family(dice)))
            } else {
                prefix(dice)
            };
            if !group.members.remove(&member) {
                group.members.insert(member);
            }
            return Event::group(group);
        }
        let mut moved = workload(dice);
        if !workloads.is_empty() {
            let like = *dice.pick(&workloads);
            moved = Workload { id: moved.id, addresses: moved.addresses, host: host(), ..like.clone() };
        }
        Event::workload(moved)
    }

    /// Whether the host is to let this flow's first packet pass: both ends that it judges allow it, and connection tracking takes it for
    /// a first packet.
    pub fn allows(&self, probe: &Probe) -> bool {
        begins_a_connection(probe.family, &probe.payload) && self.policy_allows(probe)
    }

    fn policy_allows(&self, probe: &Probe) -> bool {
        let judge = |place: u8, direction, remote| {
            place == WORKLOADS || {
                let workload = workload_id(place);
                // Attached here, but registered elsewhere or not at all: nothing passes.
                let here = self.world.registry.workloads.get(&workload).is_some_and(|entry| entry.host == host());
                here && self.world.judge(&workload, direction, remote, &probe.payload).allowed
            }
        };
        judge(probe.from, Direction::Egress, probe.destination()) && judge(probe.to, Direction::Ingress, probe.source())
    }

    /// Whether the answer to a first packet that passed is to pass.
    pub fn allows_answer(&self, probe: &Probe) -> bool {
        let reply = probe.payload.reply();
        let judge = |place: u8, direction, reply_direction, remote| {
            place == WORKLOADS || {
                let id = workload_id(place);
                let Some(entry) = self.world.registry.workloads.get(&id).filter(|entry| entry.host == host()) else {
                    return false;
                };
                match self.world.is_stateful(entry) {
                    true => self.world.judge(&id, direction, remote, &probe.payload).allowed,
                    false => self.world.judge(&id, reply_direction, remote, &reply).allowed,
                }
            }
        };
        judge(probe.from, Direction::Egress, Direction::Ingress, probe.destination())
            && judge(probe.to, Direction::Ingress, Direction::Egress, probe.source())
    }

    /// What the world is, for whoever has to understand a failure.
    pub fn describe(&self) -> BTreeMap<String, String> {
        let groups = self.world.catalogue.groups.iter().map(|(id, group)| (id.to_string(), format!("{:?}", group.value)));
        let workloads = self.world.registry.workloads.iter().map(|(id, workload)| (id.to_string(), format!("{workload:?}")));
        groups.chain(workloads).collect()
    }
}
