//! Orders on top of a table whose policy nobody here knows: it carries a later stamp than the disk, so something was taken away that the
//! disk's documents still give. What is ordered on the host, its mode and who is attached, needs no documents: the frame is written as
//! the settings say, and of workloads only what is not attached any more is taken away. Rules, groups and members stay as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use groupcast_policy::net::Family;
use groupcast_policy::rule::Direction;

use super::{Engine, Plan};
use crate::Name;
use crate::delta::{self, Uses, uses_of};
use crate::interface::{Claim, Interface};
use crate::names::{self, Keyed};
use crate::ruleset::{Contents, Desired, DesiredSet, Keys, write_frame};
use crate::settings::{Attachment, Attachments, Settings, Stamp};
use crate::stamp;
use crate::table::{Data, Elements, Key, Table};

impl Engine {
    /// The step that puts settings and attachments in force, and nothing of policy. A workload that was not attached before stays closed.
    pub fn reframe(&self) -> Plan {
        self.trusted.set(false);
        *self.index.borrow_mut() = None;
        let next = self.stamp.next().unwrap_or(Stamp::FIRST);
        let plan = |transaction, stamp: Stamp| Plan {
            transaction,
            stamp,
            wrapped: stamp < self.stamp,
            whole: true,
            refused: self.refused.clone(),
            leaves_policy: true,
        };
        let reframed = |stamp| reframed(&self.actual, &self.attachments, &self.settings, stamp);
        if !stamp::has_stamp(&self.settings, &self.actual) {
            return plan(delta::anew(&reframed(next)), next);
        }
        let desired = reframed(self.stamp);
        let transaction = delta::diff(&self.actual, &desired, |_| false);
        if transaction.anew {
            return plan(delta::anew(&reframed(next)), next);
        }
        let (old, new) = (uses_of(&self.actual.chains), uses_of(&desired.chains));
        let uses = |set: &Name| {
            let [old, new] = [&old, &new].map(|uses| uses.get(set).copied().unwrap_or_default());
            Uses { allows: old.allows || new.allows, denies: old.denies || new.denies }
        };
        let (transaction, stamp) = self.stamped(transaction, uses);
        plan(transaction, stamp)
    }
}

/// Who is attached where, to be asked by the keys of elements.
struct Wanted {
    /// Whole interfaces, with whether they are audited; the machine itself is behind none.
    interfaces: BTreeMap<Interface, bool>,
    addresses: BTreeMap<(Interface, IpAddr), bool>,
}

impl Wanted {
    fn of(attachments: &Attachments) -> Self {
        let (mut interfaces, mut by_address) = (BTreeMap::new(), BTreeMap::new());
        for attached in attachments.values() {
            let interface = attached.attachment.interface();
            match &attached.attachment {
                Attachment::Interface(_) | Attachment::Host => _ = interfaces.insert(interface, attached.audit),
                Attachment::Addresses { addresses, .. } => {
                    by_address.extend(addresses.iter().map(|address| ((interface, *address), attached.audit)));
                }
            }
        }
        Self { interfaces, addresses: by_address }
    }

    /// Of what leads to a profile: whether it is attached, and if so, whether it is audited.
    fn led(&self, key: &Key) -> Option<bool> {
        match key {
            Key::Interface(interface) => self.interfaces.get(interface).copied(),
            Key::InterfaceV4(..) | Key::InterfaceV6(..) => self.addresses.get(&address_of(key)?).copied(),
            _ => None,
        }
    }
}

fn address_of(key: &Key) -> Option<(Interface, IpAddr)> {
    match key {
        Key::InterfaceV4(interface, address) => Some((*interface, IpAddr::from(address.to_be_bytes()))),
        Key::InterfaceV6(interface, address) => Some((*interface, IpAddr::from(address.to_be_bytes()))),
        _ => None,
    }
}

const KEYED: [Keyed; 3] = [Keyed::Interface, Keyed::Address(Family::V4), Keyed::Address(Family::V6)];

fn elements<'e>(desired: &'e mut Desired<'_>, name: &Name) -> Option<&'e mut BTreeMap<Key, Data>> {
    match desired.sets.get_mut(name).map(|set| &mut set.contents) {
        Some(Contents::Owned(Elements::Keyed(map))) => Some(map),
        _ => None,
    }
}

fn reframed<'d>(actual: &Table, attachments: &Attachments, settings: &Settings, stamp: Stamp) -> Desired<'d> {
    let owned = |elements: &Elements| Contents::Owned(elements.clone());
    let sets =
        actual.sets.iter().map(|(name, set)| (name.clone(), DesiredSet { kind: set.kind, contents: owned(&set.elements) }));
    let mut desired = Desired { chains: actual.chains.clone(), sets: sets.collect(), refused: Vec::new() };
    let wanted = Wanted::of(attachments);
    let mut gone: BTreeSet<(Interface, IpAddr)> = BTreeSet::new();
    for keyed in KEYED {
        let mut led: BTreeSet<Key> = BTreeSet::new();
        for direction in [Direction::Egress, Direction::Ingress] {
            for reply in [false, true] {
                let Some(map) = elements(&mut desired, &names::dispatch(direction, reply, keyed)) else { continue };
                gone.extend(map.keys().filter(|key| wanted.led(key).is_none()).filter_map(address_of));
                map.retain(|key, _| wanted.led(key).is_some());
                led.extend(map.keys().cloned());
            }
        }
        let audited = match keyed {
            Keyed::Interface => names::audited(),
            Keyed::Address(Family::V4) => names::audited4(),
            Keyed::Address(Family::V6) => names::audited6(),
        };
        if let Some(map) = elements(&mut desired, &audited) {
            *map = led.into_iter().filter(|key| wanted.led(key) == Some(true)).map(|key| (key, Data::Nothing)).collect();
        }
    }
    // Where packets may come from: an address that is attached, or any of an interface that is, but for those attached before.
    let mut kept: BTreeSet<IpAddr> = BTreeSet::new();
    for name in [names::source4(), names::source6()] {
        let Some(map) = elements(&mut desired, &name) else { continue };
        map.retain(|key, _| {
            address_of(key).is_some_and(|(interface, address)| {
                wanted.addresses.contains_key(&(interface, address))
                    || wanted.interfaces.contains_key(&interface) && !gone.contains(&(interface, address))
            })
        });
        kept.extend(map.keys().filter_map(address_of).map(|(_, address)| address));
    }
    for name in [names::same4(), names::same6()] {
        let Some(map) = elements(&mut desired, &name) else { continue };
        map.retain(|key, _| match key {
            Key::SameV4(address) => kept.contains(&IpAddr::from(address.to_be_bytes())),
            Key::SameV6(address) => kept.contains(&IpAddr::from(address.to_be_bytes())),
            _ => false,
        });
    }
    for name in [names::source_span4(), names::source_span6()] {
        let Some(map) = elements(&mut desired, &name) else { continue };
        map.retain(|key, _| match key {
            Key::InterfaceSpan4(interface, _) => wanted.interfaces.contains_key(interface),
            Key::InterfaceSpan6(interface, _) => wanted.interfaces.contains_key(interface),
            _ => false,
        });
    }
    let claims_host =
        elements(&mut desired, &names::claims()).is_some_and(|claims| claims.contains_key(&Key::Claim(Claim::HOST)));
    let has = |name: Name| actual.sets.contains_key(&name);
    let by_address = |family| has(names::dispatch(Direction::Egress, false, Keyed::Address(family)));
    let keys = Keys {
        v4: by_address(Family::V4),
        v6: by_address(Family::V6),
        span4: has(names::source_span4()),
        span6: has(names::source_span6()),
        host: claims_host && wanted.interfaces.contains_key(&Interface::NONE),
    };
    write_frame(&mut desired, settings, stamp, keys);
    desired
}
