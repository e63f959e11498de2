//! What is there, entry by entry, and what is to be written over it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use async_nats::HeaderMap;
use futures::StreamExt;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_messages::HealthReport;
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;

use super::claims::{Held, Whose, addresses, mapped, overlap, ranges};
use super::{BOOT, CAUSE, Elsewhere, Enrolment, Error, INCARNATION, READS_AT_ONCE, TRACE_KEPT, boot_text, plain};
use crate::document::{DOCUMENT_BYTES_MAX, Enrolled, HostEntry, decode_record, decode_workload, encode_record, encode_workload};
use crate::log::{EXPECTED_STREAM_SEQUENCE, EXPECTED_SUBJECT, Entry, Log, Outgoing, TIME_TO_LIVE, WRITE_MESSAGES_MAX};

/// Kept free in a host's entry: one that cannot be marked as suspect would never be deleted.
const SUSPECT_BYTES: usize = r#","suspect":true"#.len();

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
            if let Some(prefix) = workload.addresses.iter().copied().find(|prefix| mapped(*prefix)) {
                return Err(Error::Mapped { workload: workload.id.clone(), prefix });
            }
            for address in addresses(workload) {
                let network = workload.network.clone();
                if let Some(other) = claims.insert((network.clone(), address), &workload.id) {
                    let prefix = Prefix::host(address);
                    return Err(Error::SharedAddress { prefix, network, one: other.clone(), other: workload.id.clone() });
                }
            }
        }
        let wanted = Self { host, workloads, enrolment: None, claims };
        // Wider prefixes are few, so each is compared with everything.
        for one in workloads {
            for prefix in ranges(one) {
                let shares = |other: &&Workload| {
                    let same = other.id == one.id || other.network != one.network;
                    !same && other.addresses.iter().any(|theirs| overlap(prefix, *theirs))
                };
                if let Some(other) = workloads.iter().find(shares) {
                    let (network, other) = (one.network.clone(), other.id.clone());
                    return Err(Error::SharedAddress { prefix, network, one: one.id.clone(), other });
                }
            }
        }
        Ok(wanted)
    }

    /// The networks it is about.
    pub fn networks(&self) -> BTreeSet<&'a NetworkId> {
        self.workloads.iter().map(|workload| &workload.network).collect()
    }
}

/// What is there, and what is to be written, entry by entry.
pub(super) struct Plan {
    pub log: Log,
    pub found: BTreeMap<RegistryKey, Option<Entry>>,
    pub writes: BTreeMap<RegistryKey, Pending>,
    /// Takes what was not looked up for absent; if it is not, the write is refused as a conflict.
    pub presumes: bool,
    /// Networks' ranges as they will be.
    pub held: BTreeMap<NetworkId, Vec<Held>>,
    /// Whose new addresses are held to the ranges that were looked at.
    pub fenced_by: Option<HostId>,
    /// The stream's last sequence before everything in it was looked at: nothing else may have been written since.
    pub nothing_since: Option<u64>,
    /// An entry that is written although it stays the same, so that whoever has read it before is refused.
    pub rewrite: Option<Rewrite>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rewrite {
    Always(RegistryKey),
    /// If anything else is written.
    Along(RegistryKey),
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

    pub(super) fn payload(&self, key: &RegistryKey) -> Option<&[u8]> {
        self.found.get(key)?.as_ref().map(|entry| entry.payload.as_ref()).filter(|payload| !payload.is_empty())
    }

    pub(super) fn workload(&self, id: &WorkloadId) -> Result<Option<Workload>, Error> {
        let key = RegistryKey::Workload(id.clone());
        Ok(decode_workload(id, self.payload(&key).unwrap_or_default())?)
    }

    /// The last life of a workload that is not there any more.
    fn last_incarnation(&self, id: &WorkloadId) -> u64 {
        let key = RegistryKey::Workload(id.clone());
        let entry = self.found.get(&key).and_then(Option::as_ref);
        entry.and_then(|entry| entry.header(INCARNATION)).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// The boot in which a workload that is there was enrolled.
    pub(super) fn boot_of(&self, id: &WorkloadId) -> Option<String> {
        let key = RegistryKey::Workload(id.clone());
        Some(self.found.get(&key)?.as_ref()?.header(BOOT)?.to_owned())
    }

    /// Whether a host enrolled it. What sources place has no template; the boot is a header, which an import does not bring back.
    pub(super) fn is_enrolled(&self, id: &WorkloadId) -> bool {
        let template = |workload: Option<Workload>| workload.is_some_and(|workload| workload.template.is_some());
        self.boot_of(id).is_some() || self.workload(id).map_or(true, template)
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
            return self.remove(host, &own, Whose::Hosts, true).await;
        }
        let ended = self.remove(host, &own, Whose::Hosts, false).await?;
        entry.workloads = others.iter().map(|(network, id)| (network.to_string(), id.to_string())).collect();
        entry.enrolled = None;
        self.put_host(host, entry);
        Ok(ended)
    }

    /// A host's workloads: those it enrolled, and those that sources placed there.
    pub async fn own_workloads(
        &mut self,
        entry: &HostEntry,
    ) -> Result<(Vec<(NetworkId, WorkloadId)>, Vec<(NetworkId, WorkloadId)>), Error> {
        let workloads = listed(entry);
        self.look_up(workloads.iter().map(|(_, id)| RegistryKey::Workload(id.clone()))).await?;
        Ok(workloads.into_iter().partition(|(_, id)| self.is_enrolled(id)))
    }

    pub async fn health(&mut self, host: &HostId, reports: &[HealthReport]) -> Result<usize, Error> {
        let key = |report: &HealthReport| RegistryKey::Workload(report.workload.clone());
        self.look_up(reports.iter().map(key)).await?;
        let mut changed = 0;
        for report in reports {
            let held = self.workload(&report.workload)?;
            let same_life =
                |held: &Workload| held.host == *host && held.network == report.network && held.incarnation == report.incarnation;
            let Some(held) = held.filter(|held| same_life(held) && held.unhealthy == report.healthy) else { continue };
            let payload = encode_workload(&Workload { unhealthy: !report.healthy, ..held });
            let boot = self.boot_of(&report.workload);
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
        let (own, held) =
            (RegistryKey::Host(wanted.host.clone()), wanted.networks().into_iter().cloned().map(RegistryKey::Ranges));
        self.look_up(held.chain([own.clone()])).await?;
        let mut entry = self.host(wanted.host).await?;
        let boot = wanted.enrolment.map(|enrolment| boot_text(enrolment.boot));
        // Of a host that left there is a trace, and of its workloads too.
        let is_new = self.found.get(&own).is_none_or(Option::is_none);
        if !(self.presumes && is_new && elsewhere == Elsewhere::Refuse) {
            let keys = wanted.workloads.iter().map(|w| RegistryKey::Workload(w.id.clone()));
            let claims = wanted.claims.keys().map(|(network, address)| RegistryKey::Address(network.clone(), *address));
            self.look_up(keys.chain(claims)).await?;
        }
        if let Some(enrolment) = wanted.enrolment {
            self.begin_boot(&mut entry, wanted, enrolment).await?;
        }
        let mut incarnations = Vec::with_capacity(wanted.workloads.len());
        for workload in wanted.workloads {
            let id = &workload.id;
            let held = self.workload(id)?;
            let incarnation = match &held {
                Some(held) => self.next_life(held, workload, boot.as_ref(), elsewhere)?,
                None => self.last_incarnation(id).saturating_add(1),
            };
            if let Some(held) = &held {
                self.give_back(held, workload, wanted).await?;
            }
            self.take_ranges(workload, elsewhere).await?;
            for address in addresses(workload) {
                self.take_address(address, workload, elsewhere).await?;
            }
            if let Some(moved) = held.as_ref().filter(|held| held.host != *wanted.host) {
                self.strike_off(&moved.host.clone(), id).await?;
            }
            let unhealthy = held.as_ref().is_some_and(|held| held.incarnation == incarnation && held.unhealthy);
            let payload = encode_workload(&Workload { incarnation, unhealthy, ..workload.clone() });
            self.writes.insert(RegistryKey::Workload(id.clone()), Pending { payload, boot: boot.clone(), ended: 0 });
            entry.workloads.retain(|(_, name)| name != id.as_str());
            entry.workloads.push((workload.network.to_string(), id.to_string()));
            if boot.is_some() {
                entry.addresses.insert(id.to_string(), workload.addresses.len() as u64);
            }
            incarnations.push((id.clone(), incarnation));
        }
        if let Some(enrolment) = wanted.enrolment {
            enrolment.limits.judge(wanted.host, &entry.addresses)?;
        }
        self.fenced_by = Some(wanted.host.clone());
        self.put_host(wanted.host, entry);
        let bytes = self.writes.get(&own).map_or(0, |pending| pending.payload.len() + SUSPECT_BYTES);
        if bytes > DOCUMENT_BYTES_MAX {
            return Err(Error::TooLong { name: own.subject(), bytes });
        }
        Ok(incarnations)
    }

    /// An id has one holder, whatever the network: the host that enrolled it, or the sources. In which life the holder has it now.
    fn next_life(&self, held: &Workload, wanted: &Workload, boot: Option<&String>, elsewhere: Elsewhere) -> Result<u64, Error> {
        let (enrolled_in, is_enrolled) = (self.boot_of(&held.id), self.is_enrolled(&held.id));
        let (workload, network, host) = (held.id.clone(), held.network.clone(), held.host.clone());
        let is_here = held.host == wanted.host;
        match (is_enrolled, boot) {
            (false, Some(_)) => return Err(Error::Placed { workload, network, host }),
            (true, None) => return Err(Error::AliveElsewhere { workload, network, host }),
            _ if !is_here && elsewhere == Elsewhere::Refuse => {
                return Err(Error::AliveElsewhere { workload, network, host });
            }
            _ => {}
        }
        // On another host or network, or after the machine was started anew, it is the same workload in another life.
        let is_same = is_here && held.network == wanted.network && enrolled_in.as_ref() == boot;
        Ok(if is_same { held.incarnation } else { held.incarnation.saturating_add(1) })
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
            let is_wanted = wanted.workloads.iter().any(|workload| workload.id == id);
            if is_wanted || self.boot_of(&id).as_ref() == Some(&boot) {
                continue;
            }
            entry.workloads.retain(|(on, name)| on != network.as_str() || name != id.as_str());
            // Nor does it count against what this boot may enrol.
            entry.addresses.remove(id.as_str());
            let Some(held) = self.workload(&id)?.filter(|held| held.host == *wanted.host) else { continue };
            self.end(&held).await?;
        }
        Ok(())
    }

    /// Removes a workload and gives its addresses back.
    async fn end(&mut self, held: &Workload) -> Result<(), Error> {
        for address in addresses(held) {
            self.release(&held.network, address, &held.id).await?;
        }
        if ranges(held).next().is_some() {
            self.put_ranges(&held.network, &held.id, Vec::new()).await?;
        }
        let key = RegistryKey::Workload(held.id.clone());
        self.writes.insert(key, Pending { ended: held.incarnation, ..Pending::default() });
        Ok(())
    }

    /// Takes a workload off the list of the host it left.
    async fn strike_off(&mut self, host: &HostId, id: &WorkloadId) -> Result<(), Error> {
        let mut entry = self.host(host).await?;
        entry.workloads.retain(|(_, name)| name != id.as_str());
        self.put_host(host, entry);
        Ok(())
    }

    pub async fn remove(
        &mut self,
        host: &HostId,
        workloads: &[(NetworkId, WorkloadId)],
        whose: Whose,
        leaves: bool,
    ) -> Result<Vec<(WorkloadId, u64)>, Error> {
        let mut entry = self.host(host).await?;
        self.look_up(workloads.iter().map(|(_, id)| RegistryKey::Workload(id.clone()))).await?;
        let mut ended = Vec::new();
        for (network, id) in workloads {
            // It may be on another network by now: then what is to be removed has gone already.
            let is_it = |held: &Workload| held.host == *host && held.network == *network;
            let Some(held) = self.workload(id)?.filter(is_it) else { continue };
            if !whose.includes(self.is_enrolled(id)) {
                continue;
            }
            entry.workloads.retain(|(on, name)| on != network.as_str() || name != id.as_str());
            self.end(&held).await?;
            ended.push((id.clone(), held.incarnation));
        }
        let key = RegistryKey::Host(host.clone());
        match leaves {
            true if self.payload(&key).is_some() => {
                self.writes.insert(key, Pending::default());
            }
            false if !ended.is_empty() => self.put_host(host, entry),
            _ => {}
        }
        Ok(ended)
    }

    /// Writes a host's entry, in order and without what it counts of workloads that are not there.
    pub fn put_host(&mut self, host: &HostId, mut entry: HostEntry) {
        entry.workloads.sort();
        entry.workloads.dedup();
        entry.addresses.retain(|id, _| entry.workloads.iter().any(|(_, name)| name == id));
        self.put(RegistryKey::Host(host.clone()), encode_record(&entry));
    }

    /// Writes the host's entry whatever becomes of it. It must have been looked up.
    pub fn bump(&mut self, host: &HostId) {
        let key = RegistryKey::Host(host.clone());
        let payload = self.payload(&key).map(<[u8]>::to_vec).unwrap_or_default();
        self.writes.entry(key.clone()).or_insert(Pending { payload, ..Pending::default() });
        self.rewrite = Some(Rewrite::Always(key));
    }

    pub fn put(&mut self, key: RegistryKey, payload: Vec<u8>) {
        self.writes.insert(key, Pending { payload, ..Pending::default() });
    }

    /// What differs from what is there, and the highest sequence looked at.
    pub fn messages(self, cause: &str) -> Result<(Vec<Outgoing>, u64), Error> {
        let (mut messages, mut claimed, cause) = (Vec::new(), BTreeSet::new(), plain(cause));
        let found = |key: &RegistryKey| self.found.get(key).and_then(Option::as_ref);
        let stays =
            |key: &RegistryKey, payload: &[u8]| found(key).map_or([].as_slice(), |entry| entry.payload.as_ref()) == payload;
        let rewritten = match self.rewrite {
            Some(Rewrite::Along(_)) if self.writes.iter().all(|(key, pending)| stays(key, &pending.payload)) => None,
            Some(Rewrite::Always(key) | Rewrite::Along(key)) => Some(key),
            None => None,
        };
        for (key, Pending { payload, ended, boot }) in self.writes {
            let found = found(&key);
            if stays(&key, &payload) && rewritten.as_ref() != Some(&key) {
                continue;
            }
            match &key {
                RegistryKey::Address(network, _) if !payload.is_empty() => _ = claimed.insert(network.clone()),
                _ => {}
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
        // An address was judged by the ranges as they were looked at: if they are others by now, it has to be judged again.
        for (network, host) in claimed.into_iter().zip(std::iter::repeat(self.fenced_by)) {
            let Some(host) = host else { break };
            let ranges = RegistryKey::Ranges(network.clone());
            if messages.iter().any(|message| message.subject == ranges.subject()) {
                continue; // compare-and-swap on the ranges themselves says the same
            }
            let mut headers = HeaderMap::new();
            headers.insert(EXPECTED_SUBJECT, ranges.subject().as_str());
            headers.insert(TIME_TO_LIVE, TRACE_KEPT.as_secs().to_string().as_str());
            let expected = self.found.get(&ranges).and_then(Option::as_ref).map_or(0, |entry| entry.sequence);
            messages.push(Outgoing {
                subject: RegistryKey::RangesSeen(network, host).subject(),
                headers,
                expected,
                payload: Vec::new(),
            });
        }
        if let (Some(sequence), Some(first)) = (self.nothing_since, messages.first_mut()) {
            first.headers.insert(EXPECTED_STREAM_SEQUENCE, sequence.to_string().as_str());
        }
        if messages.len() > WRITE_MESSAGES_MAX {
            return Err(Error::TooLarge { messages: messages.len() });
        }
        let seen = self.found.values().flatten().map(|entry| entry.sequence).max().unwrap_or(0);
        Ok((messages, seen))
    }
}
