//! What is there, entry by entry, and what is to be written over it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use async_nats::HeaderMap;
use futures::StreamExt;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_messages::HealthReport;
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_topics::BATCH_MESSAGES_MAX;

use super::{BOOT, CAUSE, Elsewhere, Enrolment, Error, INCARNATION, READS_AT_ONCE, TRACE_KEPT, boot_text, plain};
use crate::document::{
    Claim, DOCUMENT_BYTES_MAX, Enrolled, HostEntry, decode_record, decode_workload, encode_record, encode_workload,
};
use crate::log::{Entry, Log, Outgoing, TIME_TO_LIVE};

pub(super) enum Order<'a> {
    Register(Wanted<'a>, Elsewhere),
    Remove(&'a HostId, &'a [(NetworkId, WorkloadId)]),
    Leave(&'a HostId),
    Forget(&'a HostId),
    Farewell(&'a HostId, u64),
    End(&'a HostId, u64, &'a [(NetworkId, WorkloadId)]),
}

/// The workloads on a host's list.
pub(super) fn listed(entry: &HostEntry) -> Vec<(NetworkId, WorkloadId)> {
    let parsed = |(network, id): &(String, String)| Some((network.parse().ok()?, id.parse().ok()?));
    entry.workloads.iter().filter_map(parsed).collect()
}

/// What is asked for, checked by itself.
pub(super) struct Wanted<'a> {
    pub host: &'a HostId,
    pub workloads: &'a [Workload],
    /// Nothing when a source asks.
    pub enrolment: Option<&'a Enrolment>,
    /// Who is to hold which address.
    pub claims: BTreeMap<(NetworkId, IpAddr), &'a WorkloadId>,
}

/// The single addresses of a workload. Wider prefixes are routes, not addresses, and are not claimed.
fn addresses(workload: &Workload) -> impl Iterator<Item = IpAddr> + '_ {
    workload.addresses.iter().filter(|prefix| prefix.is_host()).map(|prefix| prefix.net().addr())
}

impl<'a> Wanted<'a> {
    pub fn new(host: &'a HostId, workloads: &'a [Workload]) -> Result<Self, Error> {
        let (mut names, mut claims) = (BTreeSet::new(), BTreeMap::new());
        for workload in workloads {
            if workload.host != *host {
                let (workload, named) = (workload.id.clone(), workload.host.clone());
                return Err(Error::OtherHost { workload, named, host: host.clone() });
            }
            if !names.insert(&workload.id) {
                return Err(Error::Twice { workload: workload.id.clone() });
            }
            for address in addresses(workload) {
                let network = workload.network.clone();
                if let Some(other) = claims.insert((network.clone(), address), &workload.id) {
                    return Err(Error::SharedAddress { address, network, one: other.clone(), other: workload.id.clone() });
                }
            }
        }
        Ok(Self { host, workloads, enrolment: None, claims })
    }
}

/// What is there, and what is to be written, entry by entry.
pub(super) struct Plan {
    pub log: Log,
    pub found: BTreeMap<RegistryKey, Option<Entry>>,
    pub writes: BTreeMap<RegistryKey, Pending>,
    /// Takes what was not looked up for absent; if it is not, the write is refused as a conflict.
    pub presumes: bool,
}

/// An entry to be written.
#[derive(Debug, Clone, Default)]
pub(super) struct Pending {
    /// Empty to remove it.
    pub payload: Vec<u8>,
    /// The life that ends with it.
    pub ended: u64,
    /// The boot it lives in.
    pub boot: Option<String>,
}

impl Plan {
    pub async fn look_up(&mut self, keys: impl IntoIterator<Item = RegistryKey>) -> Result<(), Error> {
        let unknown: Vec<RegistryKey> = keys.into_iter().filter(|key| !self.found.contains_key(key)).collect();
        let log = &self.log;
        let read = |key: RegistryKey| async move {
            let entry = log.last(&key.subject()).await;
            (key, entry)
        };
        let mut answers = futures::stream::iter(unknown.into_iter().map(read)).buffered(READS_AT_ONCE);
        let mut found = Vec::new();
        while let Some((key, entry)) = answers.next().await {
            found.push((key, entry?));
        }
        drop(answers);
        self.found.extend(found);
        Ok(())
    }

    fn payload(&self, key: &RegistryKey) -> Option<&[u8]> {
        self.found.get(key)?.as_ref().map(|entry| entry.payload.as_ref()).filter(|payload| !payload.is_empty())
    }

    fn workload(&self, network: &NetworkId, id: &WorkloadId) -> Result<Option<Workload>, Error> {
        let key = RegistryKey::Workload(network.clone(), id.clone());
        Ok(decode_workload(network, id, self.payload(&key).unwrap_or_default())?)
    }

    /// The last life of a workload that is not there any more.
    fn last_incarnation(&self, network: &NetworkId, id: &WorkloadId) -> u64 {
        let key = RegistryKey::Workload(network.clone(), id.clone());
        let entry = self.found.get(&key).and_then(Option::as_ref);
        entry.and_then(|entry| entry.header(INCARNATION)).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Who holds the address. A claim that cannot be read holds it for somebody unknown: it is not given away.
    fn claim(&self, network: &NetworkId, address: IpAddr) -> Option<Claim> {
        let unknown = || Claim { workload: "unknown".to_owned(), host: "unknown".to_owned() };
        let payload = self.payload(&RegistryKey::Address(network.clone(), address))?;
        Some(decode_record(payload).unwrap_or_else(|_| unknown()))
    }

    /// The boot in which a workload that is there was enrolled.
    fn boot_of(&self, network: &NetworkId, id: &WorkloadId) -> Option<String> {
        let key = RegistryKey::Workload(network.clone(), id.clone());
        Some(self.found.get(&key)?.as_ref()?.header(BOOT)?.to_owned())
    }

    /// The host's entry, if it is the one at this sequence.
    pub async fn pinned(&mut self, host: &HostId, sequence: u64) -> Result<Option<HostEntry>, Error> {
        let entry = self.host(host).await?;
        let found = self.found.get(&RegistryKey::Host(host.clone())).and_then(Option::as_ref);
        Ok(found.is_some_and(|found| found.sequence == sequence && !found.payload.is_empty()).then_some(entry))
    }

    /// Refuses what an earlier boot of the host still has to say.
    pub async fn of_boot(&mut self, host: &HostId, boot: u64) -> Result<(), Error> {
        match self.host(host).await?.enrolled {
            Some(enrolled) if enrolled.boot != boot_text(boot) => Err(Error::Overtaken { host: host.clone() }),
            _ => Ok(()),
        }
    }

    /// Takes away what the host has enrolled; what sources say of it stays.
    pub async fn forget(&mut self, host: &HostId) -> Result<Vec<(WorkloadId, u64)>, Error> {
        let mut entry = self.host(host).await?;
        let (own, others) = self.own_workloads(&entry).await?;
        if others.is_empty() {
            return self.remove(host, &own, true).await;
        }
        let ended = self.remove(host, &own, false).await?;
        entry.workloads = others.iter().map(|(network, id)| (network.to_string(), id.to_string())).collect();
        entry.enrolled = None;
        self.put(RegistryKey::Host(host.clone()), encode_record(&entry));
        Ok(ended)
    }

    /// A host's workloads: those it enrolled, and those that sources placed there.
    async fn own_workloads(
        &mut self,
        entry: &HostEntry,
    ) -> Result<(Vec<(NetworkId, WorkloadId)>, Vec<(NetworkId, WorkloadId)>), Error> {
        let workloads = listed(entry);
        self.look_up(workloads.iter().map(|(network, id)| RegistryKey::Workload(network.clone(), id.clone()))).await?;
        Ok(workloads.into_iter().partition(|(network, id)| self.boot_of(network, id).is_some()))
    }

    pub async fn health(&mut self, host: &HostId, reports: &[HealthReport]) -> Result<usize, Error> {
        let key = |report: &HealthReport| RegistryKey::Workload(report.network.clone(), report.workload.clone());
        self.look_up(reports.iter().map(key)).await?;
        let mut changed = 0;
        for report in reports {
            let held = self.workload(&report.network, &report.workload)?;
            let same_life = |held: &Workload| held.host == *host && held.incarnation == report.incarnation;
            let Some(held) = held.filter(|held| same_life(held) && held.unhealthy == report.healthy) else { continue };
            let payload = encode_workload(&Workload { unhealthy: !report.healthy, ..held });
            let boot = self.boot_of(&report.network, &report.workload);
            self.writes.insert(key(report), Pending { payload, boot, ended: 0 });
            changed += 1;
        }
        Ok(changed)
    }

    pub async fn host(&mut self, host: &HostId) -> Result<HostEntry, Error> {
        let key = RegistryKey::Host(host.clone());
        self.look_up([key.clone()]).await?;
        let nothing = || HostEntry::new(host, []);
        Ok(self.payload(&key).and_then(|payload| decode_record(payload).ok()).unwrap_or_else(nothing))
    }

    pub async fn register(&mut self, wanted: &Wanted<'_>, elsewhere: Elsewhere) -> Result<Vec<(WorkloadId, u64)>, Error> {
        let mut entry = self.host(wanted.host).await?;
        let boot = wanted.enrolment.map(|enrolment| boot_text(enrolment.boot));
        // Of a host that left there is a trace, and of its workloads too.
        let is_new = self.found.get(&RegistryKey::Host(wanted.host.clone())).is_none_or(Option::is_none);
        if !(self.presumes && is_new && elsewhere == Elsewhere::Refuse) {
            let keys = wanted.workloads.iter().map(|w| RegistryKey::Workload(w.network.clone(), w.id.clone()));
            let claims = wanted.claims.keys().map(|(network, address)| RegistryKey::Address(network.clone(), *address));
            self.look_up(keys.chain(claims)).await?;
        }
        if let Some(enrolment) = wanted.enrolment {
            self.begin_boot(&mut entry, wanted, enrolment).await?;
        }
        let mut incarnations = Vec::with_capacity(wanted.workloads.len());
        for workload in wanted.workloads {
            let (network, id) = (&workload.network, &workload.id);
            let held = self.workload(network, id)?;
            let incarnation = match &held {
                Some(held) if held.host == *wanted.host && boot == self.boot_of(network, id) => held.incarnation,
                // The machine was started anew since: the same workload in another life.
                Some(held) if held.host == *wanted.host => held.incarnation + u64::from(boot.is_some()),
                Some(held) if elsewhere == Elsewhere::Refuse || self.boot_of(network, id).is_some() => {
                    let (workload, network, host) = (id.clone(), network.clone(), held.host.clone());
                    return Err(Error::AliveElsewhere { workload, network, host });
                }
                Some(held) => held.incarnation + 1,
                None => self.last_incarnation(network, id) + 1,
            };
            for address in addresses(workload) {
                self.take_address(network, address, workload, elsewhere).await?;
            }
            for old in held.iter().flat_map(addresses).filter(|old| !wanted.claims.contains_key(&(network.clone(), *old))) {
                self.release(network, old, id).await?;
            }
            if let Some(moved) = held.as_ref().filter(|held| held.host != *wanted.host) {
                self.strike_off(&moved.host.clone(), network, id).await?;
            }
            let unhealthy = held.as_ref().is_some_and(|held| held.incarnation == incarnation && held.unhealthy);
            let payload = encode_workload(&Workload { incarnation, unhealthy, ..workload.clone() });
            let key = RegistryKey::Workload(network.clone(), id.clone());
            self.writes.insert(key, Pending { payload, boot: boot.clone(), ended: 0 });
            entry.workloads.push((network.to_string(), id.to_string()));
            incarnations.push((id.clone(), incarnation));
        }
        entry.workloads.sort();
        entry.workloads.dedup();
        self.put(RegistryKey::Host(wanted.host.clone()), encode_record(&entry));
        Ok(incarnations)
    }

    /// The host's entry as it is after enrolling; what an earlier boot left behind and is not enrolled again is gone with that boot.
    async fn begin_boot(&mut self, entry: &mut HostEntry, wanted: &Wanted<'_>, enrolment: &Enrolment) -> Result<(), Error> {
        let boot = boot_text(enrolment.boot);
        let before = entry.enrolled.take().filter(|before| before.boot == boot);
        let mut templates: BTreeSet<String> = before.iter().flat_map(|before| before.templates.clone()).collect();
        templates.extend(enrolment.template.clone());
        entry.enrolled = Some(Enrolled { boot: boot.clone(), templates: templates.into_iter().collect(), suspect: false });
        if before.is_some() || entry.workloads.is_empty() {
            return Ok(());
        }
        let (own, _) = self.own_workloads(entry).await?;
        for (network, id) in own {
            let is_wanted = wanted.workloads.iter().any(|workload| workload.network == network && workload.id == id);
            if is_wanted || self.boot_of(&network, &id).as_ref() == Some(&boot) {
                continue;
            }
            entry.workloads.retain(|(on, name)| on != network.as_str() || name != id.as_str());
            let Some(held) = self.workload(&network, &id)?.filter(|held| held.host == *wanted.host) else { continue };
            self.end(&held).await?;
        }
        Ok(())
    }

    /// Removes a workload and gives its addresses back.
    async fn end(&mut self, held: &Workload) -> Result<(), Error> {
        for address in addresses(held) {
            self.release(&held.network, address, &held.id).await?;
        }
        let key = RegistryKey::Workload(held.network.clone(), held.id.clone());
        self.writes.insert(key, Pending { ended: held.incarnation, ..Pending::default() });
        Ok(())
    }

    /// A source takes an address from what sources placed, never from a workload that enrolled itself: whoever was first has it.
    async fn take_address(
        &mut self,
        network: &NetworkId,
        address: IpAddr,
        by: &Workload,
        elsewhere: Elsewhere,
    ) -> Result<(), Error> {
        let key = RegistryKey::Address(network.clone(), address);
        let is_released = self.writes.get(&key).is_some_and(|pending| pending.payload.is_empty());
        let held = self.claim(network, address).filter(|claim| claim.workload != by.id.as_str() && !is_released);
        if let Some(Claim { workload, host }) = held {
            let is_enrolled = match workload.parse::<WorkloadId>() {
                Ok(id) if elsewhere == Elsewhere::Move => {
                    self.look_up([RegistryKey::Workload(network.clone(), id.clone())]).await?;
                    self.boot_of(network, &id).is_some()
                }
                _ => false,
            };
            if elsewhere == Elsewhere::Refuse || is_enrolled {
                return Err(Error::AddressHeld { address, network: network.clone(), workload, host });
            }
        }
        let claim = Claim { workload: by.id.to_string(), host: by.host.to_string() };
        self.put(key, encode_record(&claim));
        Ok(())
    }

    /// Gives an address back, if it is still this workload's.
    async fn release(&mut self, network: &NetworkId, address: IpAddr, id: &WorkloadId) -> Result<(), Error> {
        let key = RegistryKey::Address(network.clone(), address);
        self.look_up([key.clone()]).await?;
        if self.claim(network, address).is_some_and(|claim| claim.workload == id.as_str()) {
            self.writes.entry(key).or_default();
        }
        Ok(())
    }

    /// Takes a workload off the list of the host it left.
    async fn strike_off(&mut self, host: &HostId, network: &NetworkId, id: &WorkloadId) -> Result<(), Error> {
        let mut entry = self.host(host).await?;
        entry.workloads.retain(|(on, name)| on != network.as_str() || name != id.as_str());
        self.put(RegistryKey::Host(host.clone()), encode_record(&entry));
        Ok(())
    }

    pub async fn remove(
        &mut self,
        host: &HostId,
        workloads: &[(NetworkId, WorkloadId)],
        leaves: bool,
    ) -> Result<Vec<(WorkloadId, u64)>, Error> {
        let mut entry = self.host(host).await?;
        self.look_up(workloads.iter().map(|(network, id)| RegistryKey::Workload(network.clone(), id.clone()))).await?;
        let mut ended = Vec::new();
        for (network, id) in workloads {
            entry.workloads.retain(|(on, name)| on != network.as_str() || name != id.as_str());
            let Some(held) = self.workload(network, id)?.filter(|held| held.host == *host) else { continue };
            self.end(&held).await?;
            ended.push((id.clone(), held.incarnation));
        }
        let key = RegistryKey::Host(host.clone());
        match leaves {
            true if self.payload(&key).is_some() => {
                self.writes.insert(key, Pending::default());
            }
            false if !ended.is_empty() => self.put(key, encode_record(&entry)),
            _ => {}
        }
        Ok(ended)
    }

    pub fn put(&mut self, key: RegistryKey, payload: Vec<u8>) {
        self.writes.insert(key, Pending { payload, ..Pending::default() });
    }

    /// What differs from what is there, and the highest sequence looked at.
    pub fn messages(self, cause: &str) -> Result<(Vec<Outgoing>, u64), Error> {
        let (mut messages, cause) = (Vec::new(), plain(cause));
        for (key, Pending { payload, ended, boot }) in self.writes {
            let found = self.found.get(&key).and_then(Option::as_ref);
            if found.map_or([].as_slice(), |entry| entry.payload.as_ref()) == payload.as_slice() {
                continue;
            }
            if payload.len() > DOCUMENT_BYTES_MAX {
                return Err(Error::TooLong { name: key.subject(), bytes: payload.len() });
            }
            let mut headers = HeaderMap::new();
            headers.insert(CAUSE, cause.as_str());
            if let Some(boot) = &boot {
                headers.insert(BOOT, boot.as_str());
            }
            if payload.is_empty() || matches!(key, RegistryKey::Refusal(_)) {
                headers.insert(TIME_TO_LIVE, TRACE_KEPT.as_secs().to_string().as_str());
                headers.insert(INCARNATION, ended.to_string().as_str());
            }
            let expected = found.map_or(0, |entry| entry.sequence);
            messages.push(Outgoing { subject: key.subject(), headers, expected, payload });
        }
        if messages.len() > BATCH_MESSAGES_MAX {
            return Err(Error::TooLarge { messages: messages.len() });
        }
        let seen = self.found.values().flatten().map(|entry| entry.sequence).max().unwrap_or(0);
        Ok((messages, seen))
    }
}
