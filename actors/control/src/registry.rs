//! The client that writes REGISTRY, for the registrar and for sources that know placements.
//!
//! A host, its workloads and the claims on their addresses are written in one batch, each by compare-and-swap: no two workloads on one
//! network ever hold one address, and no address is held by a workload that is not there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use async_nats::{Client, HeaderMap};
use futures::StreamExt;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_topics::BATCH_MESSAGES_MAX;

use crate::document::{
    Claim, DOCUMENT_BYTES_MAX, HostEntry, Refused, decode_record, decode_workload, encode_record, encode_workload,
};
use crate::log::{Entry, Log, NoAnswer, Outcome, Outgoing, TIME_TO_LIVE};

/// How long the trace of something removed stays. Whoever follows and was cut off for longer reads everything again.
pub const TRACE_KEPT: Duration = Duration::from_secs(24 * 3600);
/// Attempts to write while others write too.
pub const ATTEMPTS_MAX: u32 = 20;
/// Entries looked up at once.
const READS_AT_ONCE: usize = 64;
/// On the trace of a workload: the life that ended.
const INCARNATION: &str = "Gc-Incarnation";

/// What to do about a workload or an address that is alive elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Elsewhere {
    /// A host speaks for itself only.
    Refuse,
    /// A source knows where everything is.
    Move,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// The REGISTRY sequence after which it holds.
    pub sequence: u64,
    pub incarnations: Vec<(WorkloadId, u64)>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("address {address} on network {network} is held by workload {workload} on host {host}: release it there first")]
    AddressHeld { address: IpAddr, network: NetworkId, workload: String, host: String },
    #[error("workload {workload} on network {network} is alive on host {host}: remove it there first")]
    AliveElsewhere { workload: WorkloadId, network: NetworkId, host: HostId },
    #[error("workload {workload} is to be on host {named}, but host {host} registers it: register it there")]
    OtherHost { workload: WorkloadId, named: HostId, host: HostId },
    #[error("workload {workload} is named twice: name it once")]
    Twice { workload: WorkloadId },
    #[error("address {address} on network {network} is given to two workloads, {one} and {other}: give it to one")]
    SharedAddress { address: IpAddr, network: NetworkId, one: WorkloadId, other: WorkloadId },
    #[error("the registration needs {messages} messages, at most {BATCH_MESSAGES_MAX} fit into one batch: register in parts")]
    TooLarge { messages: usize },
    #[error("{name} is {bytes} bytes, at most {DOCUMENT_BYTES_MAX} fit into one message: register fewer")]
    TooLong { name: String, bytes: usize },
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Unreadable(#[from] Refused),
    #[error("the bus refused the registration: {0}")]
    Refused(String),
    #[error("it is not known whether the registration was written ({0}): repeat it, that does no harm")]
    Unknown(String),
    #[error("others write the same entries all the time: try again")]
    Busy,
}

#[derive(Clone)]
pub struct Registry {
    log: Log,
}

impl Registry {
    pub fn new(client: Client) -> Self {
        Self { log: Log::registry(client) }
    }

    /// Registers these workloads of the host beside those it has. Repeating it changes nothing and writes nothing.
    pub async fn register(&self, host: &HostId, workloads: &[Workload], elsewhere: Elsewhere) -> Result<Registered, Error> {
        self.write(&Order::Register(Wanted::new(host, workloads)?, elsewhere)).await
    }

    /// Removes workloads of a host; those that are not there or live elsewhere are left alone.
    pub async fn remove(&self, host: &HostId, workloads: &[(NetworkId, WorkloadId)]) -> Result<Registered, Error> {
        self.write(&Order::Remove(host, workloads)).await
    }

    /// Removes a host with everything it has registered.
    pub async fn deregister(&self, host: &HostId) -> Result<Registered, Error> {
        self.write(&Order::Leave(host)).await
    }

    /// Plans against what is there, writes, and plans again if somebody else was faster.
    async fn write(&self, order: &Order<'_>) -> Result<Registered, Error> {
        for _ in 0..ATTEMPTS_MAX {
            let mut plan = Plan { log: self.log.clone(), found: BTreeMap::new(), writes: BTreeMap::new() };
            let incarnations = match order {
                Order::Register(wanted, elsewhere) => plan.register(wanted, *elsewhere).await?,
                Order::Remove(host, workloads) => plan.remove(host, workloads, false).await?,
                Order::Leave(host) => {
                    let entry = plan.host(host).await?;
                    let parsed = |(network, id): &(String, String)| Some((network.parse().ok()?, id.parse().ok()?));
                    let workloads: Vec<_> = entry.workloads.iter().filter_map(parsed).collect();
                    plan.remove(host, &workloads, true).await?
                }
            };
            let (messages, unchanged_at) = plan.messages()?;
            if messages.is_empty() {
                return Ok(Registered { sequence: unchanged_at, incarnations });
            }
            match self.log.write(&messages).await {
                Outcome::Committed(sequence) => return Ok(Registered { sequence, incarnations }),
                Outcome::Conflict => {}
                Outcome::Refused(reason) => return Err(Error::Refused(reason)),
                Outcome::Unknown(reason) => return Err(Error::Unknown(reason)),
            }
        }
        Err(Error::Busy)
    }
}

enum Order<'a> {
    Register(Wanted<'a>, Elsewhere),
    Remove(&'a HostId, &'a [(NetworkId, WorkloadId)]),
    Leave(&'a HostId),
}

/// What is asked for, checked by itself.
struct Wanted<'a> {
    host: &'a HostId,
    workloads: &'a [Workload],
    /// Who is to hold which address.
    claims: BTreeMap<(NetworkId, IpAddr), &'a WorkloadId>,
}

/// The single addresses of a workload. Wider prefixes are routes, not addresses, and are not claimed.
fn addresses(workload: &Workload) -> impl Iterator<Item = IpAddr> + '_ {
    workload.addresses.iter().filter(|prefix| prefix.is_host()).map(|prefix| prefix.net().addr())
}

impl<'a> Wanted<'a> {
    fn new(host: &'a HostId, workloads: &'a [Workload]) -> Result<Self, Error> {
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
        Ok(Self { host, workloads, claims })
    }
}

/// What is there, and what is to be written, entry by entry.
struct Plan {
    log: Log,
    found: BTreeMap<RegistryKey, Option<Entry>>,
    /// `None` removes; the number is the life that ends.
    writes: BTreeMap<RegistryKey, (Option<Vec<u8>>, u64)>,
}

impl Plan {
    async fn look_up(&mut self, keys: impl IntoIterator<Item = RegistryKey>) -> Result<(), Error> {
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

    async fn host(&mut self, host: &HostId) -> Result<HostEntry, Error> {
        let key = RegistryKey::Host(host.clone());
        self.look_up([key.clone()]).await?;
        let nothing = || HostEntry::new(host, []);
        Ok(self.payload(&key).and_then(|payload| decode_record(payload).ok()).unwrap_or_else(nothing))
    }

    async fn register(&mut self, wanted: &Wanted<'_>, elsewhere: Elsewhere) -> Result<Vec<(WorkloadId, u64)>, Error> {
        let mut entry = self.host(wanted.host).await?;
        let keys = wanted.workloads.iter().map(|w| RegistryKey::Workload(w.network.clone(), w.id.clone()));
        let claims = wanted.claims.keys().map(|(network, address)| RegistryKey::Address(network.clone(), *address));
        self.look_up(keys.chain(claims)).await?;
        let mut incarnations = Vec::with_capacity(wanted.workloads.len());
        for workload in wanted.workloads {
            let (network, id) = (&workload.network, &workload.id);
            let held = self.workload(network, id)?;
            let incarnation = match &held {
                Some(held) if held.host == *wanted.host => held.incarnation,
                Some(held) if elsewhere == Elsewhere::Refuse => {
                    let (workload, network, host) = (id.clone(), network.clone(), held.host.clone());
                    return Err(Error::AliveElsewhere { workload, network, host });
                }
                Some(held) => held.incarnation + 1,
                None => self.last_incarnation(network, id) + 1,
            };
            for address in addresses(workload) {
                self.take_address(network, address, workload, elsewhere)?;
            }
            for old in held.iter().flat_map(addresses).filter(|old| !wanted.claims.contains_key(&(network.clone(), *old))) {
                self.release(network, old, id).await?;
            }
            if let Some(moved) = held.as_ref().filter(|held| held.host != *wanted.host) {
                self.strike_off(&moved.host.clone(), network, id).await?;
            }
            let stored = Workload { incarnation, ..workload.clone() };
            self.put(RegistryKey::Workload(network.clone(), id.clone()), encode_workload(&stored));
            entry.workloads.push((network.to_string(), id.to_string()));
            incarnations.push((id.clone(), incarnation));
        }
        entry.workloads.sort();
        entry.workloads.dedup();
        self.put(RegistryKey::Host(wanted.host.clone()), encode_record(&entry));
        Ok(incarnations)
    }

    fn take_address(&mut self, network: &NetworkId, address: IpAddr, by: &Workload, elsewhere: Elsewhere) -> Result<(), Error> {
        let held = self.claim(network, address).filter(|claim| claim.workload != by.id.as_str());
        if let Some(Claim { workload, host }) = held
            && elsewhere == Elsewhere::Refuse
        {
            return Err(Error::AddressHeld { address, network: network.clone(), workload, host });
        }
        let claim = Claim { workload: by.id.to_string(), host: by.host.to_string() };
        self.put(RegistryKey::Address(network.clone(), address), encode_record(&claim));
        Ok(())
    }

    /// Gives an address back, if it is still this workload's.
    async fn release(&mut self, network: &NetworkId, address: IpAddr, id: &WorkloadId) -> Result<(), Error> {
        let key = RegistryKey::Address(network.clone(), address);
        self.look_up([key.clone()]).await?;
        if self.claim(network, address).is_some_and(|claim| claim.workload == id.as_str()) {
            self.writes.insert(key, (None, 0));
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

    async fn remove(
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
            for address in addresses(&held) {
                self.release(network, address, id).await?;
            }
            self.writes.insert(RegistryKey::Workload(network.clone(), id.clone()), (None, held.incarnation));
            ended.push((id.clone(), held.incarnation));
        }
        let key = RegistryKey::Host(host.clone());
        match leaves {
            true if self.payload(&key).is_some() => {
                self.writes.insert(key, (None, 0));
            }
            false if !ended.is_empty() => self.put(key, encode_record(&entry)),
            _ => {}
        }
        Ok(ended)
    }

    fn put(&mut self, key: RegistryKey, payload: Vec<u8>) {
        self.writes.insert(key, (Some(payload), 0));
    }

    /// What differs from what is there, and the highest sequence looked at.
    fn messages(self) -> Result<(Vec<Outgoing>, u64), Error> {
        let mut messages = Vec::new();
        for (key, (payload, ended)) in self.writes {
            let found = self.found.get(&key).and_then(Option::as_ref);
            let payload = payload.unwrap_or_default();
            if found.map_or([].as_slice(), |entry| entry.payload.as_ref()) == payload.as_slice() {
                continue;
            }
            if payload.len() > DOCUMENT_BYTES_MAX {
                return Err(Error::TooLong { name: key.subject(), bytes: payload.len() });
            }
            let mut headers = HeaderMap::new();
            if payload.is_empty() {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(id: &str, last: u8) -> Workload {
        let mut workload = Workload::new(id.parse().unwrap(), "h".parse().unwrap(), "n".parse().unwrap());
        workload.addresses.insert(groupcast_policy::net::Prefix::v4(0x0a000000 + u32::from(last), 32).unwrap());
        workload
    }

    #[test]
    fn a_registration_that_contradicts_itself_is_refused_by_name() {
        let host: HostId = "h".parse().unwrap();
        let rows: [(Vec<Workload>, &str); 3] = [
            (vec![workload("a", 1), workload("a", 2)], "workload a is named twice"),
            (vec![workload("a", 1), workload("b", 1)], "10.0.0.1"),
            (vec![Workload { host: "other".parse().unwrap(), ..workload("a", 1) }], "host other"),
        ];
        for (workloads, words) in rows {
            let error = Wanted::new(&host, &workloads).err().expect("refused");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(Wanted::new(&host, &[workload("a", 1), workload("b", 2)]).unwrap().claims.len(), 2);
    }
}
