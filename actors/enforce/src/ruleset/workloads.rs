//! Where workloads are attached: the elements that lead their packets to their profile, and what cannot be attached.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use groupcast_policy::doc::{Enforced, Placement};
use groupcast_policy::ids::WorkloadId;
use groupcast_policy::net::{Family, Prefix, Span, SpanSet};
use groupcast_policy::resolve::HostPolicy;
use groupcast_policy::rule::Direction;
use ipnet::IpNet;

use super::Desired;
use super::profiles::{Found, OPEN_IN, OPEN_OUT, PLAIN_ACCEPT, ProfileKey, Shape, number_of, numbers};
use crate::Name;
use crate::interface::Interface;
use crate::names::{self, Keyed};
use crate::settings::{Attached, Attachment, Attachments, Settings};
use crate::table::{Data, Elements, Key, SetKind};

/// A workload that is not enforced, and why. Nothing of it passes: its interface is claimed and has no profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "workload {workload} is attached to interface {interface}, which no claim covers: add a pattern for it to the claims"
    )]
    Unclaimed { workload: WorkloadId, interface: Interface },
    #[error("workload {workload} is attached to interface {interface}, which is already workload {other}'s: detach one of them")]
    SameInterface { workload: WorkloadId, interface: Interface, other: WorkloadId },
    #[error(
        "workload {workload} has the address {address}, which is already workload {other}'s on this host: change one of them"
    )]
    SameAddress { workload: WorkloadId, address: Prefix, other: WorkloadId },
    #[error("workload {workload} is attached as the host itself, which is already workload {other}: detach one of them")]
    SameHost { workload: WorkloadId, other: WorkloadId },
    #[error(
        "workload {workload} is attached by address, but none of the addresses given for it is registered as its own: \
         register them, or attach it by interface"
    )]
    NoAddress { workload: WorkloadId },
}

impl Refusal {
    pub fn workload(&self) -> &WorkloadId {
        match self {
            Refusal::Unclaimed { workload, .. }
            | Refusal::SameInterface { workload, .. }
            | Refusal::SameAddress { workload, .. }
            | Refusal::SameHost { workload, .. }
            | Refusal::NoAddress { workload } => workload,
        }
    }
}

/// A workload that is registered, attached and can be enforced.
#[derive(Debug, Clone)]
pub struct Placed<'p> {
    pub attached: &'p Attached,
    pub enforced: Enforced,
    /// Where its packets may come from; of one attached by address, only those it is attached by.
    pub addresses: BTreeSet<Prefix>,
    pub key: ProfileKey,
    pub shape: Shape,
}

/// One element: its set, the kind of that, key and data.
pub type Element = (Name, SetKind, Key, Data);

/// Which forms of key occur. A look-up that could find nothing is not written into the rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Keys {
    pub v4: bool,
    pub v6: bool,
    pub span4: bool,
    pub span6: bool,
    pub host: bool,
}

/// Whom an interface or address belongs to. Earlier ids win: some order must decide, and this one does not change with time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    interfaces: BTreeMap<Interface, WorkloadId>,
    addresses: BTreeMap<Prefix, WorkloadId>,
}

impl Owners {
    /// Why a workload cannot be attached like this, if it cannot.
    pub fn objection(
        &self,
        workload: &WorkloadId,
        attachment: &Attachment,
        addresses: &BTreeSet<Prefix>,
        settings: &Settings,
    ) -> Option<Refusal> {
        let workload = || workload.clone();
        let interface = attachment.interface();
        if *attachment != Attachment::Host && !settings.claims.iter().any(|claim| claim.covers(&interface)) {
            return Some(Refusal::Unclaimed { workload: workload(), interface });
        }
        if matches!(attachment, Attachment::Addresses { .. }) && addresses.is_empty() {
            return Some(Refusal::NoAddress { workload: workload() });
        }
        if let Attachment::Interface(_) | Attachment::Host = attachment
            && let Some(other) = self.interfaces.get(&interface).cloned()
        {
            return Some(match attachment {
                Attachment::Host => Refusal::SameHost { workload: workload(), other },
                _ => Refusal::SameInterface { workload: workload(), interface, other },
            });
        }
        let owned = addresses.iter().find_map(|address| Some((*address, self.addresses.get(address)?.clone())));
        owned.map(|(address, other)| Refusal::SameAddress { workload: workload(), address, other })
    }

    pub fn admit(&mut self, workload: &WorkloadId, attachment: &Attachment, addresses: &BTreeSet<Prefix>) {
        self.addresses.extend(addresses.iter().map(|address| (*address, workload.clone())));
        if let Attachment::Interface(_) | Attachment::Host = attachment {
            self.interfaces.insert(attachment.interface(), workload.clone());
        }
    }

    pub fn release(&mut self, attachment: &Attachment, addresses: &BTreeSet<Prefix>) {
        addresses.iter().for_each(|address| _ = self.addresses.remove(address));
        if let Attachment::Interface(_) | Attachment::Host = attachment {
            self.interfaces.remove(&attachment.interface());
        }
    }
}

pub fn place<'p>(
    policy: &HostPolicy<'_>,
    attachments: &'p Attachments,
    settings: &Settings,
) -> (BTreeMap<WorkloadId, Placed<'p>>, Vec<Refusal>) {
    let (mut placed, mut refused) = (BTreeMap::new(), Vec::new());
    let mut owners = Owners::default();
    for (workload, resolved) in &policy.workloads {
        let Some(attached) = attachments.get(workload) else { continue };
        let addresses = own_addresses(resolved.placement, &attached.attachment);
        if let Some(refusal) = owners.objection(workload, &attached.attachment, &addresses, settings) {
            refused.push(refusal);
            continue;
        }
        owners.admit(workload, &attached.attachment, &addresses);
        let key = ProfileKey::of(resolved.placement);
        let shape = Shape { stateful: resolved.stateful, incomplete: policy.profiles[resolved.profile].incomplete };
        let one = Placed { attached, enforced: resolved.placement.enforced, addresses, key, shape };
        placed.insert(workload.clone(), one);
    }
    (placed, refused)
}

/// Why a workload cannot be attached like this beside those that are, if it cannot. Unlike where all are placed at once, those that are
/// attached keep what they have, whatever their ids; also if they are not registered yet. `expected`: it is about to be registered with
/// the addresses it is attached by.
pub fn objection(
    workload: &WorkloadId,
    attached: &Attached,
    expected: bool,
    others: &Attachments,
    placements: Option<&BTreeMap<WorkloadId, Placement>>,
    settings: &Settings,
) -> Option<Refusal> {
    let placement = |id: &WorkloadId| placements.and_then(|placements| placements.get(id));
    let mut owners = Owners::default();
    for (other, held) in others.iter().filter(|(other, _)| *other != workload) {
        let addresses = placement(other).map(|placement| own_addresses(placement, &held.attachment)).unwrap_or_default();
        owners.admit(other, &held.attachment, &addresses);
    }
    let given = |addresses: &BTreeSet<IpAddr>| addresses.iter().map(|address| Prefix::host(*address)).collect();
    let addresses = match (&attached.attachment, placement(workload).filter(|_| !expected)) {
        (attachment, Some(placement)) => own_addresses(placement, attachment),
        (Attachment::Addresses { addresses, .. }, None) => given(addresses),
        (Attachment::Interface(_) | Attachment::Host, None) => BTreeSet::new(),
    };
    owners.objection(workload, &attached.attachment, &addresses, settings)
}

/// Of the machine itself: none. Its own addresses are not told from anybody's by the kernel's tables, only by its hooks.
pub fn own_addresses(placement: &Placement, attachment: &Attachment) -> BTreeSet<Prefix> {
    match attachment {
        Attachment::Interface(_) => placement.addresses.clone(),
        Attachment::Addresses { addresses, .. } => {
            let own = |address: &&IpAddr| placement.addresses.contains(&Prefix::host(**address));
            addresses.iter().filter(own).map(|address| Prefix::host(*address)).collect()
        }
        Attachment::Host => BTreeSet::new(),
    }
}

/// The elements of one workload. Ranges are not among them, because those of one interface are merged.
pub fn elements_of(attached: &Attached, enforced: Enforced, addresses: &BTreeSet<Prefix>, profile: &Found) -> Vec<Element> {
    let of = |enforced: bool, direction, open: u32, onward: bool| match (enforced, profile.stateful) {
        (true, stateful) => number_of(profile.number, direction, stateful && onward),
        (false, true) => open,
        (false, false) => PLAIN_ACCEPT,
    };
    let [(egress, egress_again), (ingress, ingress_again)] = [
        [true, false].map(|onward| of(enforced.egress, Direction::Egress, OPEN_OUT, onward)).into(),
        [true, false].map(|onward| of(enforced.ingress, Direction::Ingress, OPEN_IN, onward)).into(),
    ];
    // A stateful flow is judged as a whole by one policy; a stateless packet by that of its own direction.
    let (egress_reply, ingress_reply) = if profile.stateful { (egress_again, ingress_again) } else { (ingress, egress) };
    let numbers = [
        (Direction::Egress, false, egress),
        (Direction::Egress, true, egress_reply),
        (Direction::Ingress, false, ingress),
        (Direction::Ingress, true, ingress_reply),
    ];
    let interface = attached.attachment.interface();
    let mut elements = Vec::new();
    let mut lead = |keyed: Keyed, key: Key| {
        let kind = match keyed {
            Keyed::Interface => SetKind::InterfaceToNumber,
            Keyed::Address(Family::V4) => SetKind::InterfaceV4ToNumber,
            Keyed::Address(Family::V6) => SetKind::InterfaceV6ToNumber,
        };
        for (direction, reply, number) in numbers {
            elements.push((names::dispatch(direction, reply, keyed), kind, key.clone(), Data::Number(number)));
        }
        if attached.audit {
            let (set, kind) = match keyed {
                Keyed::Interface => (names::audited(), SetKind::Interfaces),
                Keyed::Address(Family::V4) => (names::audited4(), SetKind::InterfaceV4),
                Keyed::Address(Family::V6) => (names::audited6(), SetKind::InterfaceV6),
            };
            elements.push((set, kind, key, Data::Nothing));
        }
    };
    let hosts = || addresses.iter().filter(|prefix| prefix.is_host()).map(|prefix| prefix.net().addr());
    let key_of = |address: IpAddr| match address {
        IpAddr::V4(a) => (Family::V4, Key::InterfaceV4(interface, a.to_bits())),
        IpAddr::V6(a) => (Family::V6, Key::InterfaceV6(interface, a.to_bits())),
    };
    match attached.attachment {
        Attachment::Interface(_) | Attachment::Host => lead(Keyed::Interface, Key::Interface(interface)),
        Attachment::Addresses { .. } => hosts().for_each(|address| {
            let (family, key) = key_of(address);
            lead(Keyed::Address(family), key);
        }),
    }
    for address in hosts() {
        let (family, key) = key_of(address);
        let (set, kind) = match family {
            Family::V4 => (names::source4(), SetKind::InterfaceV4),
            Family::V6 => (names::source6(), SetKind::InterfaceV6),
        };
        elements.push((set, kind, key, Data::Nothing));
        let (set, kind, key) = match address {
            IpAddr::V4(a) => (names::same4(), SetKind::SameV4, Key::SameV4(a.to_bits())),
            IpAddr::V6(a) => (names::same6(), SetKind::SameV6, Key::SameV6(a.to_bits())),
        };
        elements.push((set, kind, key, Data::Nothing));
    }
    elements
}

/// The forms that attachments have, whether their workloads are registered or not: rules stay when those come and go.
pub fn keys_of(attachments: &Attachments) -> Keys {
    let mut keys = Keys::default();
    for attached in attachments.values() {
        match &attached.attachment {
            Attachment::Interface(_) => {}
            Attachment::Addresses { addresses, .. } => {
                keys.v4 |= addresses.iter().any(IpAddr::is_ipv4);
                keys.v6 |= addresses.iter().any(IpAddr::is_ipv6);
            }
            Attachment::Host => keys.host = true,
        }
    }
    keys
}

pub fn write(desired: &mut Desired<'_>, attachments: &Attachments, placed: &BTreeMap<WorkloadId, Placed<'_>>) -> Keys {
    let mut keys = keys_of(attachments);
    let mut sets: BTreeMap<Name, (SetKind, BTreeMap<Key, Data>)> = BTreeMap::new();
    for direction in [Direction::Egress, Direction::Ingress] {
        for reply in [false, true] {
            let map = names::dispatch(direction, reply, Keyed::Interface);
            sets.insert(map, (SetKind::InterfaceToNumber, BTreeMap::new()));
        }
    }
    sets.insert(names::audited(), (SetKind::Interfaces, BTreeMap::new()));
    sets.insert(names::source4(), (SetKind::InterfaceV4, BTreeMap::new()));
    sets.insert(names::source6(), (SetKind::InterfaceV6, BTreeMap::new()));
    sets.insert(names::same4(), (SetKind::SameV4, BTreeMap::new()));
    sets.insert(names::same6(), (SetKind::SameV6, BTreeMap::new()));

    let numbers = numbers(placed.values().map(|workload| &workload.key));
    for workload in placed.values() {
        let number = numbers.get(&workload.key).copied().unwrap_or_default();
        let profile = Found { number, stateful: workload.shape.stateful };
        for (set, kind, key, data) in elements_of(workload.attached, workload.enforced, &workload.addresses, &profile) {
            sets.entry(set).or_insert_with(|| (kind, BTreeMap::new())).1.insert(key, data);
        }
    }
    let ranges = placed.values().flat_map(|workload| {
        let interface = workload.attached.attachment.interface();
        workload.addresses.iter().map(move |prefix| (interface, *prefix))
    });
    let (spans4, spans6) = source_spans(ranges);
    (keys.span4, keys.span6) = (!spans4.is_empty(), !spans6.is_empty());
    // Every map that a rule looks into exists, also when only some of its kind are filled.
    for (present, family) in [(keys.v4, Family::V4), (keys.v6, Family::V6)] {
        let (kind, audited, audited_kind) = match family {
            Family::V4 => (SetKind::InterfaceV4ToNumber, names::audited4(), SetKind::InterfaceV4),
            Family::V6 => (SetKind::InterfaceV6ToNumber, names::audited6(), SetKind::InterfaceV6),
        };
        if present {
            sets.entry(audited).or_insert_with(|| (audited_kind, BTreeMap::new()));
            for direction in [Direction::Egress, Direction::Ingress] {
                for reply in [false, true] {
                    let map = names::dispatch(direction, reply, Keyed::Address(family));
                    sets.entry(map).or_insert_with(|| (kind, BTreeMap::new()));
                }
            }
        }
    }
    if keys.span4 {
        sets.insert(names::source_span4(), (SetKind::InterfaceSpan4, spans4));
    }
    if keys.span6 {
        sets.insert(names::source_span6(), (SetKind::InterfaceSpan6, spans6));
    }
    for (name, (kind, elements)) in sets {
        desired.put_set(name, kind, Elements::Keyed(elements));
    }
    keys
}

/// The ranges that interfaces may send from, of each family, and all of them as those behind no interface, where the machine itself is
/// met. Those of one interface are merged: the kernel refuses overlaps.
pub fn source_spans(sources: impl IntoIterator<Item = (Interface, Prefix)>) -> (BTreeMap<Key, Data>, BTreeMap<Key, Data>) {
    let (mut spans4, mut spans6) = (BTreeMap::<Interface, Vec<_>>::new(), BTreeMap::<Interface, Vec<_>>::new());
    let ranges = sources.into_iter().filter(|(_, prefix)| !prefix.is_host());
    for (interface, prefix) in ranges.flat_map(|(interface, prefix)| [(interface, prefix), (Interface::NONE, prefix)]) {
        match prefix.net() {
            IpNet::V4(net) => {
                spans4.entry(interface).or_default().extend(Span::new(net.network().to_bits(), net.broadcast().to_bits()));
            }
            IpNet::V6(net) => {
                spans6.entry(interface).or_default().extend(Span::new(net.network().to_bits(), net.broadcast().to_bits()));
            }
        }
    }
    let merged4 = spans4.into_iter().flat_map(|(interface, spans)| {
        let merged: SpanSet<u32> = spans.into_iter().collect();
        merged.spans().iter().map(|span| (Key::InterfaceSpan4(interface, *span), Data::Nothing)).collect::<Vec<_>>()
    });
    let merged6 = spans6.into_iter().flat_map(|(interface, spans)| {
        let merged: SpanSet<u128> = spans.into_iter().collect();
        merged.spans().iter().map(|span| (Key::InterfaceSpan6(interface, *span), Data::Nothing)).collect::<Vec<_>>()
    });
    (merged4.collect(), merged6.collect())
}
