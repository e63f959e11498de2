//! Who holds which address and which prefix. Overlaps are judged as overlaps: a prefix over an address that another workload holds is
//! refused, and so is an address under another's prefix.
//!
//! A single address is claimed under a subject of its own. A prefix has too many addresses for that, so a network's prefixes are one
//! document, its ranges. Two writers who race, one for the prefix and one for an address in it, touch no common subject; so a batch that
//! claims an address also expects the ranges to be those it was judged by, and a batch that claims a prefix expects that nothing at all
//! was written since the claims were listed. Prefixes are rare and opt-in, so it is they who pay.

use std::collections::BTreeMap;
use std::net::IpAddr;

use groupcast_bus_config::subjects::{self, RegistryKey, parse_registry};
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model::{HOST_ADDRESSES_MAX, HOST_WORKLOADS_MAX, Template, Workload, are_internet};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::text::prefix_text;

use super::plan::{Plan, Wanted};
use super::{Elsewhere, Error, READS_AT_ONCE};
use crate::document::{Claim, Range, Ranges, Refused, decode_record, encode_record};
use crate::log::WRITE_MESSAGES_MAX;

/// Prefixes of one network that are wider than one address: they are one document.
pub const RANGES_MAX: usize = 4_000;
/// Of those, one host's.
pub const RANGES_OF_A_HOST_MAX: usize = 64;

/// Workloads and addresses of one host together, whatever its templates allow: all of it is taken away with one batch, beside what the
/// host's next boot enrols, the host's entry, and what says by which ranges that was judged.
pub const HOST_ENTRIES_MAX: usize = (WRITE_MESSAGES_MAX - 3) / 2;
const _: () = assert!((HOST_WORKLOADS_MAX + HOST_ADDRESSES_MAX) as usize <= HOST_ENTRIES_MAX);

/// How much a host may enrol, with all its templates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub workloads_max: u32,
    pub addresses_max: u32,
}

impl Limits {
    /// As the template says; a host that enrols without one has no workloads either.
    pub fn of(template: Option<&Template>) -> Self {
        let (workloads_max, addresses_max) = (HOST_WORKLOADS_MAX, HOST_ADDRESSES_MAX);
        template.map_or(Self { workloads_max, addresses_max }, |template| Self {
            workloads_max: template.workloads_max,
            addresses_max: template.addresses_max,
        })
    }

    /// What is too much by itself, whatever the host has beside it: refused before anything is looked up for it.
    pub(super) fn judge_request(self, host: &HostId, workloads: &[Workload]) -> Result<(), Error> {
        self.judge(host, &workloads.iter().map(|workload| (workload.id.to_string(), workload.addresses.len() as u64)).collect())?;
        few_ranges(host, workloads.iter().flat_map(ranges).count())
    }

    /// `held` says how many addresses each of the host's workloads has.
    pub(super) fn judge(self, host: &HostId, held: &BTreeMap<String, u64>) -> Result<(), Error> {
        let (workloads, addresses) = (held.len() as u64, held.values().fold(0, |sum: u64, count| sum.saturating_add(*count)));
        let together = (workloads.saturating_add(addresses), HOST_ENTRIES_MAX as u64);
        for (what, (found, most)) in [
            ("workloads", (workloads, u64::from(self.workloads_max))),
            ("addresses", (addresses, u64::from(self.addresses_max))),
            ("workloads and addresses together", together),
        ] {
            if found > most {
                return Err(Error::Quota { host: host.clone(), what, found, most });
            }
        }
        Ok(())
    }
}

/// All of a network's ranges are one document: no host may fill it for the others.
fn few_ranges(host: &HostId, found: usize) -> Result<(), Error> {
    let (what, host, most) = ("prefixes wider than one address", host.clone(), RANGES_OF_A_HOST_MAX as u64);
    if found > RANGES_OF_A_HOST_MAX { Err(Error::Quota { host, what, found: found as u64, most }) } else { Ok(()) }
}

/// Whose workloads an order is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// What hosts enrolled.
    Hosts,
    /// What sources placed.
    Sources,
    Anybodys,
}

impl Whose {
    pub fn includes(self, is_enrolled: bool) -> bool {
        match self {
            Self::Hosts => is_enrolled,
            Self::Sources => !is_enrolled,
            Self::Anybodys => true,
        }
    }
}

/// The single addresses of a workload.
pub(super) fn addresses(workload: &Workload) -> impl Iterator<Item = IpAddr> + '_ {
    workload.addresses.iter().filter(|prefix| prefix.is_host()).map(|prefix| prefix.net().addr())
}

/// Its prefixes of more than one address.
pub(super) fn ranges(workload: &Workload) -> impl Iterator<Item = Prefix> + '_ {
    workload.addresses.iter().copied().filter(|prefix| !prefix.is_host())
}

/// Whether they have an address in common. Of two prefixes that do, one holds the other.
pub fn overlap(one: Prefix, other: Prefix) -> bool {
    one.contains(other.net().addr()) || other.contains(one.net().addr())
}

/// Whether it is, or holds, an IPv4 address written as IPv6 (`::ffff:a.b.c.d`): it would be the same address under another name.
pub(super) fn mapped(prefix: Prefix) -> bool {
    let all = Prefix::v6(0xffff << 32, 96);
    prefix.family() == Family::V6 && all.is_some_and(|all| overlap(all, prefix))
}

impl Plan {
    /// Who holds the address. A claim that cannot be read holds it for somebody unknown: it is not given away.
    fn claim(&self, network: &NetworkId, address: IpAddr) -> Option<Claim> {
        let unknown = || Claim { workload: "unknown".to_owned(), host: "unknown".to_owned() };
        let payload = self.payload(&RegistryKey::Address(network.clone(), address))?;
        Some(decode_record(payload).unwrap_or_else(|_| unknown()))
    }

    /// Whether this holder keeps who asks from having the same: whoever was first has it, but sources move what sources placed.
    async fn keeps(&mut self, workload: &str, elsewhere: Elsewhere) -> Result<bool, Error> {
        let Ok(id) = workload.parse::<WorkloadId>() else { return Ok(true) };
        if elsewhere == Elsewhere::Refuse {
            return Ok(true);
        }
        self.look_up([RegistryKey::Workload(id.clone())]).await?;
        Ok(self.is_enrolled(&id))
    }

    pub(super) async fn take_address(&mut self, address: IpAddr, by: &Workload, elsewhere: Elsewhere) -> Result<(), Error> {
        let network = &by.network;
        let others = self.ranges(network).await?.iter().filter(|(prefix, range)| {
            // One that cannot be read may be anywhere.
            range.workload != by.id.as_str() && prefix.is_none_or(|prefix| prefix.contains(address))
        });
        for (_, range) in others.cloned().collect::<Vec<_>>() {
            if self.keeps(&range.workload, elsewhere).await? {
                let Range { prefix: held, workload, host } = range;
                return Err(Error::Overlaps { prefix: Prefix::host(address), held, network: network.clone(), workload, host });
            }
        }
        self.nobody_else_holds(address, by, elsewhere).await?;
        let claim = Claim { workload: by.id.to_string(), host: by.host.to_string() };
        self.put(RegistryKey::Address(network.clone(), address), encode_record(&claim));
        Ok(())
    }

    async fn nobody_else_holds(&mut self, address: IpAddr, by: &Workload, elsewhere: Elsewhere) -> Result<(), Error> {
        let network = &by.network;
        let key = RegistryKey::Address(network.clone(), address);
        let is_released = self.writes.get(&key).is_some_and(|pending| pending.payload.is_empty());
        let held = self.claim(network, address).filter(|claim| claim.workload != by.id.as_str() && !is_released);
        if let Some(Claim { workload, host }) = held
            && self.keeps(&workload, elsewhere).await?
        {
            return Err(Error::AddressHeld { address, network: network.clone(), workload, host });
        }
        Ok(())
    }

    /// Gives an address back, if it is still this workload's.
    pub(super) async fn release(&mut self, network: &NetworkId, address: IpAddr, id: &WorkloadId) -> Result<(), Error> {
        let key = RegistryKey::Address(network.clone(), address);
        self.look_up([key.clone()]).await?;
        if self.claim(network, address).is_some_and(|claim| claim.workload == id.as_str()) {
            self.writes.entry(key).or_default();
        }
        Ok(())
    }

    /// Gives back what the workload held and does not want any more.
    pub(super) async fn give_back(&mut self, held: &Workload, wanted: &Workload, all: &Wanted<'_>) -> Result<(), Error> {
        for address in addresses(held).filter(|old| !all.claims.contains_key(&(held.network.clone(), *old))) {
            self.release(&held.network, address, &held.id).await?;
        }
        let is_moved = held.network != wanted.network || ranges(wanted).next().is_none();
        if is_moved && ranges(held).next().is_some() {
            self.put_ranges(&held.network, &held.id, Vec::new()).await?;
        }
        Ok(())
    }

    /// The ranges of a network as they will be after what is to be written. Read once: there may be thousands.
    async fn ranges(&mut self, network: &NetworkId) -> Result<&Vec<Held>, Error> {
        if !self.held.contains_key(network) {
            let key = RegistryKey::Ranges(network.clone());
            self.look_up([key.clone()]).await?;
            let ranges = read(network, self.payload(&key).unwrap_or_default())?;
            self.held.insert(network.clone(), ranges.ranges.into_iter().map(held).collect());
        }
        Ok(self.held.entry(network.clone()).or_default())
    }

    /// Writes which ranges a workload holds on a network; nothing if it holds them already.
    pub(super) async fn put_ranges(&mut self, network: &NetworkId, id: &WorkloadId, own: Vec<Range>) -> Result<(), Error> {
        let before = self.ranges(network).await?;
        let mut after: Vec<Range> =
            before.iter().map(|(_, range)| range).filter(|range| range.workload != id.as_str()).cloned().collect();
        after.extend(own);
        after.sort();
        if after.len() > RANGES_MAX {
            return Err(Error::TooManyRanges { network: network.clone(), found: after.len() });
        }
        if !before.iter().map(|(_, range)| range).eq(&after) {
            self.held.insert(network.clone(), after.iter().cloned().map(held).collect());
            let payload = if after.is_empty() { Vec::new() } else { encode_record(&Ranges { ranges: after }) };
            self.put(RegistryKey::Ranges(network.clone()), payload);
        }
        Ok(())
    }

    /// Claims a workload's prefixes, if nobody else holds one that overlaps, or an address in one.
    pub(super) async fn take_ranges(&mut self, by: &Workload, elsewhere: Elsewhere) -> Result<(), Error> {
        let network = &by.network;
        let wanted: Vec<Prefix> = ranges(by).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut own: Vec<Range> = wanted
            .iter()
            .map(|prefix| Range { prefix: prefix.to_string(), workload: by.id.to_string(), host: by.host.to_string() })
            .collect();
        own.sort();
        let there = self.ranges(network).await?.clone();
        if there.iter().map(|(_, range)| range).filter(|range| range.workload == by.id.as_str()).eq(&own) {
            return Ok(());
        }
        let mut together = wanted.clone();
        for (prefix, range) in there.iter().filter(|(_, range)| range.workload != by.id.as_str()) {
            together.extend(prefix.filter(|_| range.host == by.host.as_str()));
            let meets = wanted.iter().copied().find(|wanted| prefix.is_none_or(|prefix| overlap(prefix, *wanted)));
            if let Some(prefix) = meets
                && self.keeps(&range.workload, elsewhere).await?
            {
                let (held, workload, host) = (range.prefix.clone(), range.workload.clone(), range.host.clone());
                return Err(Error::Overlaps { prefix, held, network: network.clone(), workload, host });
            }
        }
        if elsewhere == Elsewhere::Refuse {
            few_ranges(&by.host, together.len())?;
            if are_internet(together) {
                return Err(Error::Internet { host: by.host.clone(), network: network.clone() });
            }
        }
        let under = self.claims_under(network, &wanted).await?;
        for keys in under.chunks(READS_AT_ONCE) {
            self.look_up(keys.iter().map(|address| RegistryKey::Address(network.clone(), *address))).await?;
            for address in keys {
                self.nobody_else_holds(*address, by, elsewhere).await?;
            }
        }
        self.put_ranges(network, &by.id, own).await
    }

    /// Every address in these prefixes that somebody has ever claimed. Whatever is written from now on makes the plan void.
    async fn claims_under(&mut self, network: &NetworkId, prefixes: &[Prefix]) -> Result<Vec<IpAddr>, Error> {
        let (last, names) = self.log.names(&subjects::registry_addresses(network)).await?;
        self.nothing_since = Some(self.nothing_since.map_or(last, |before| before.min(last)));
        let address = |name: String| match parse_registry(&name) {
            Some(RegistryKey::Address(_, address)) => Some(address),
            _ => None,
        };
        let is_under = |address: &IpAddr| prefixes.iter().any(|prefix| prefix.contains(*address));
        Ok(names.into_iter().filter_map(address).filter(is_under).collect())
    }
}

/// A range, and its prefix if that can be read.
pub(super) type Held = (Option<Prefix>, Range);

fn held(range: Range) -> Held {
    (prefix_text(&range.prefix).ok(), range)
}

fn read(network: &NetworkId, payload: &[u8]) -> Result<Ranges, Error> {
    if payload.is_empty() {
        return Ok(Ranges::default());
    }
    let refused = |why| Refused { name: format!("the ranges of network {network}"), why };
    decode_record(payload).map_err(|why| refused(why).into())
}
