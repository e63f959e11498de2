//! The client that writes REGISTRY, for the registrar and for sources that know placements.
//!
//! A host, its workloads and the claims on their addresses are written in one batch, each by compare-and-swap: an id has one holder
//! whatever the network, no two workloads on one network ever hold one address, and no address is held by a workload that is not there.
//! Every message says why it was written, and AUDIT keeps it.

mod claims;
mod evict;
mod plan;
mod scribe;
pub mod upgrade;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use async_nats::Client;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_messages::HealthReport;
use groupcast_policy::ids::{HostId, NetworkId, TemplateId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;

pub use self::claims::{HOST_ENTRIES_MAX, Limits, RANGES_MAX, RANGES_OF_A_HOST_MAX};

use self::claims::Whose;
pub use self::evict::{Before, OwnWorkloads};
use self::plan::{Order, Pending, Plan, Wanted, listed};
use self::scribe::Scribe;
use crate::document::{DOCUMENT_BYTES_MAX, GuardRecord, RefusalRecord, Refused, encode_record};
use crate::log::{Log, NoAnswer, Outcome, WRITE_MESSAGES_MAX};

/// How long the trace of something removed stays. Whoever follows and was cut off for longer reads everything again.
pub const TRACE_KEPT: Duration = Duration::from_secs(24 * 3600);
/// Attempts to write while others write too.
pub const ATTEMPTS_MAX: u32 = 20;
/// Entries looked up at once.
const READS_AT_ONCE: usize = 64;
/// On the trace of a workload: the life that ended.
const INCARNATION: &str = "Gc-Incarnation";
/// On a workload that a host enrolled: the boot of the machine in which it lives. Another boot is another life.
const BOOT: &str = "Gc-Boot";
/// On every message: why it was written.
pub const CAUSE: &str = "Gc-Cause";
/// Longest cause in bytes; a longer one is cut.
pub const CAUSE_BYTES_MAX: usize = 256;

/// A boot as it is stored.
pub fn boot_text(boot: u64) -> String {
    format!("{boot:016x}")
}

/// Text that a header can carry.
fn plain(text: &str) -> String {
    let mut plain: String = text.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect();
    plain.truncate(CAUSE_BYTES_MAX);
    plain
}

/// How a host enrols itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enrolment {
    pub boot: u64,
    /// Nothing for a host that enrols without workloads.
    pub template: Option<String>,
    pub limits: Limits,
}

/// What became of something that was to be done only if nobody else had written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Done,
    /// The entry is another by now, or gone.
    Spared,
}

/// What to do about a workload or an address that is alive elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Elsewhere {
    /// A host speaks for itself only.
    Refuse,
    /// A source knows where everything is that sources placed; what enrolled itself is not moved.
    Move,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// The REGISTRY sequence after which it holds.
    pub sequence: u64,
    pub incarnations: Vec<(WorkloadId, u64)>,
    /// What it took: one for each message, and one for each 1,024 bytes of them.
    pub cost: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("address {address} on network {network} is held by workload {workload} on host {host}: release it there first")]
    AddressHeld { address: IpAddr, network: NetworkId, workload: String, host: String },
    #[error(
        "{prefix} on network {network} overlaps {held}, which workload {workload} on host {host} holds: release it there first"
    )]
    Overlaps { prefix: Prefix, held: String, network: NetworkId, workload: String, host: String },
    #[error("workload {workload} is alive on host {host}, on network {network}: remove it there first")]
    AliveElsewhere { workload: WorkloadId, network: NetworkId, host: HostId },
    #[error("workload {workload} was placed on host {host}, on network {network}, by a source: enrol under another id")]
    Placed { workload: WorkloadId, network: NetworkId, host: HostId },
    #[error("workload {workload}: {prefix} is, or holds, IPv4 addresses written as IPv6: write them as IPv4")]
    Mapped { workload: WorkloadId, prefix: Prefix },
    #[error("host {host} would have {found} {what}, at most {most} are allowed: remove some, or see what its template allows")]
    Quota { host: HostId, what: &'static str, found: u64, most: u64 },
    #[error("the prefixes of host {host} on network {network} would be the internet, all together: name what is meant")]
    Internet { host: HostId, network: NetworkId },
    #[error(
        "network {network} would have {found} prefixes, at most {RANGES_MAX} are kept: enrol single addresses, or fewer and wider ones"
    )]
    TooManyRanges { network: NetworkId, found: usize },
    #[error("workload {workload} is to be on host {named}, but host {host} registers it: register it there")]
    OtherHost { workload: WorkloadId, named: HostId, host: HostId },
    #[error("this boot of host {host} was overtaken by a later one: nothing is removed")]
    Overtaken { host: HostId },
    #[error("workload {workload} is named twice: name it once")]
    Twice { workload: WorkloadId },
    #[error("{prefix} on network {network} is given to two workloads, {one} and {other}, at least in part: give it to one")]
    SharedAddress { prefix: Prefix, network: NetworkId, one: WorkloadId, other: WorkloadId },
    #[error("the registration needs {messages} messages, at most {WRITE_MESSAGES_MAX} fit into one batch: register in parts")]
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
    /// Who writes for several at once.
    scribe: Option<Scribe>,
}

impl Registry {
    pub fn new(client: Client) -> Self {
        Self::over(Log::registry(client))
    }

    /// One that writes as this log does.
    pub fn over(log: Log) -> Self {
        Self { log, scribe: None }
    }

    /// One whose clones write together what they want to write at the same time.
    pub fn shared(client: Client, runtime: &tokio::runtime::Handle) -> Self {
        let log = Log::registry(client);
        let scribe = Scribe::start(log.clone(), runtime);
        Self { log, scribe: Some(scribe) }
    }

    /// Registers these workloads of the host beside those it has. Repeating it changes nothing and writes nothing.
    pub async fn register(&self, host: &HostId, workloads: &[Workload], elsewhere: Elsewhere) -> Result<Registered, Error> {
        self.write(&Order::Register(Wanted::new(host, workloads)?, elsewhere), "registered by a source").await
    }

    /// The host ends some of its workloads, or says farewell. One that was overtaken by a later boot ends nothing.
    pub async fn end(
        &self,
        host: &HostId,
        boot: u64,
        workloads: Option<&[(NetworkId, WorkloadId)]>,
    ) -> Result<Registered, Error> {
        match workloads {
            Some(workloads) => self.write(&Order::End(host, boot, workloads), "removed by its host").await,
            None => self.write(&Order::Farewell(host, boot), "its host left").await,
        }
    }

    /// What the host found its workloads to be; the life that was looked at must be the one that is there. How many were changed.
    pub async fn health(&self, host: &HostId, reports: &[HealthReport]) -> Result<usize, Error> {
        for _ in 0..ATTEMPTS_MAX {
            let mut plan = self.plan();
            let changed = plan.health(host, reports).await?;
            match self.carry_out(plan, "health reported by its host").await? {
                Some(_) => return Ok(changed),
                None => continue,
            }
        }
        Err(Error::Busy)
    }

    /// Marks a host that enrolled itself, if its entry is still the one at this sequence.
    pub async fn mark(&self, host: &HostId, sequence: u64, suspect: bool, cause: &str) -> Result<Fate, Error> {
        let mut plan = self.plan();
        let Some(mut entry) = plan.pinned(host, sequence).await? else { return Ok(Fate::Spared) };
        let Some(enrolled) = &mut entry.enrolled else { return Ok(Fate::Spared) };
        enrolled.suspect = suspect;
        plan.put_host(host, entry);
        Ok(self.carry_out(plan, cause).await?.map_or(Fate::Spared, |_| Fate::Done))
    }

    /// Removes what a host has enrolled, if its entry is still the one at this sequence.
    pub async fn reap(&self, host: &HostId, sequence: u64, cause: &str) -> Result<Fate, Error> {
        let mut plan = self.plan();
        if plan.pinned(host, sequence).await?.is_none() {
            return Ok(Fate::Spared);
        }
        plan.forget(host).await?;
        Ok(self.carry_out(plan, cause).await?.map_or(Fate::Spared, |_| Fate::Done))
    }

    /// Removes what a host has enrolled, because an operator says so. Its entry is written also if there was none: what was judged
    /// before that is not written any more.
    pub async fn expel(&self, host: &HostId, cause: &str) -> Result<Registered, Error> {
        self.write(&Order::Forget(host), cause).await
    }

    /// Writes down why a host was refused; the same words twice are written once.
    pub async fn refused(&self, host: &HostId, reason: &str) -> Result<(), Error> {
        let record = RefusalRecord { host: host.to_string(), reason: plain(reason) };
        self.note(RegistryKey::Refusal(host.clone()), encode_record(&record), "refused").await
    }

    /// Writes down that nothing of a template is deleted, or that it is again.
    pub async fn guarded(&self, template: &TemplateId, record: Option<&GuardRecord>, cause: &str) -> Result<(), Error> {
        let payload = record.map(encode_record).unwrap_or_default();
        self.note(RegistryKey::Guard(template.clone()), payload, cause).await
    }

    async fn note(&self, key: RegistryKey, payload: Vec<u8>, cause: &str) -> Result<(), Error> {
        for _ in 0..ATTEMPTS_MAX {
            let mut plan = self.plan();
            plan.look_up([key.clone()]).await?;
            plan.writes.insert(key.clone(), Pending { payload: payload.clone(), ..Pending::default() });
            if self.carry_out(plan, cause).await?.is_some() {
                return Ok(());
            }
        }
        Err(Error::Busy)
    }

    fn plan(&self) -> Plan {
        Plan {
            log: self.log.clone(),
            found: BTreeMap::new(),
            writes: BTreeMap::new(),
            presumes: false,
            held: BTreeMap::new(),
            fenced_by: None,
            nothing_since: None,
            rewrite: None,
        }
    }

    /// The sequence after which it holds, and what it took; `None` if somebody else was faster.
    async fn carry_out(&self, plan: Plan, cause: &str) -> Result<Option<(u64, usize)>, Error> {
        // What must be alone must not be written in one batch with others.
        let is_alone = plan.nothing_since.is_some();
        let (messages, unchanged_at) = plan.messages(cause)?;
        if messages.is_empty() {
            return Ok(Some((unchanged_at, 0)));
        }
        let cost = messages.iter().map(|message| 1 + message.payload.len() / 1_024).sum();
        let outcome = match &self.scribe {
            Some(scribe) if !is_alone => scribe.write(messages).await,
            _ => self.log.write(&messages).await,
        };
        match outcome {
            Outcome::Committed(sequence) => Ok(Some((sequence, cost))),
            Outcome::Conflict => Ok(None),
            Outcome::Refused(reason) => Err(Error::Refused(reason)),
            Outcome::Unknown(reason) => Err(Error::Unknown(reason)),
        }
    }

    /// Removes workloads of a host; those that are not there or live elsewhere are left alone.
    pub async fn remove(&self, host: &HostId, workloads: &[(NetworkId, WorkloadId)]) -> Result<Registered, Error> {
        self.write(&Order::Remove(host, workloads), "removed by a source").await
    }

    /// Removes a host with everything it has registered.
    pub async fn deregister(&self, host: &HostId) -> Result<Registered, Error> {
        self.write(&Order::Leave(host), "its host was removed").await
    }

    /// Plans against what is there, writes, and plans again if somebody else was faster.
    async fn write(&self, order: &Order<'_>, cause: &str) -> Result<Registered, Error> {
        for attempt in 0..ATTEMPTS_MAX {
            // A host that is not there most often has left nothing either: looking would take longer than to be wrong.
            let mut plan = Plan { presumes: attempt == 0, ..self.plan() };
            let incarnations = match order {
                Order::Register(wanted, elsewhere) => plan.register(wanted, *elsewhere).await?,
                Order::Remove(host, workloads) => plan.remove(host, workloads, Whose::Sources, false).await?,
                Order::Leave(host) => {
                    let workloads = listed(&plan.host(host).await?);
                    plan.remove(host, &workloads, Whose::Anybodys, true).await?
                }
                Order::Forget(host) => {
                    let ended = plan.forget(host).await?;
                    plan.bump(host);
                    ended
                }
                Order::Farewell(host, boot) => {
                    plan.of_boot(host, *boot).await?;
                    plan.forget(host).await?
                }
                Order::End(host, boot, workloads) => {
                    plan.of_boot(host, *boot).await?;
                    plan.remove(host, workloads, Whose::Hosts, false).await?
                }
            };
            if let Some((sequence, cost)) = self.carry_out(plan, cause).await? {
                return Ok(Registered { sequence, incarnations, cost });
            }
        }
        Err(Error::Busy)
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
        let over =
            |id: &str, bits: u32, len: u8| Workload { addresses: [Prefix::v4(bits, len).unwrap()].into(), ..workload(id, 0) };
        let v6 = |bits: u128, len: u8| Workload { addresses: [Prefix::v6(bits, len).unwrap()].into(), ..workload("a", 0) };
        let rows: [(Vec<Workload>, &str); 7] = [
            (vec![over("a", 0x0a000000, 24), workload("b", 1)], "10.0.0.0/24 on network n is given to two workloads"),
            (vec![workload("a", 1), over("b", 0x0a000000, 31)], "10.0.0.0/31 on network n is given to two workloads"),
            (vec![v6(0xffff_0a00_0001, 128)], "write them as IPv4"),
            (vec![v6(0, 64)], "write them as IPv4"),
            (vec![workload("a", 1), workload("a", 2)], "workload a is named twice"),
            (vec![workload("a", 1), workload("b", 1)], "10.0.0.1"),
            (vec![Workload { host: "other".parse().unwrap(), ..workload("a", 1) }], "host other"),
        ];
        for (workloads, words) in rows {
            let error = Wanted::new(&host, &workloads).err().expect("refused");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(Wanted::new(&host, &[workload("a", 1), workload("b", 2)]).unwrap().claims.len(), 2);
        assert!(Wanted::new(&host, &[over("a", 0x0a000000, 31), workload("b", 2), v6(1 << 100, 64)]).is_err(), "a twice");
        assert!(Wanted::new(&host, &[over("a", 0x0a000000, 31), workload("b", 2)]).is_ok(), "beside each other");
    }
}
