//! The client that writes REGISTRY, for the registrar and for sources that know placements.
//!
//! A host, its workloads and the claims on their addresses are written in one batch, each by compare-and-swap: no two workloads on one
//! network ever hold one address, and no address is held by a workload that is not there. Every message says why it was written, and
//! AUDIT keeps it.

mod plan;
mod scribe;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use async_nats::Client;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_messages::HealthReport;
use groupcast_policy::ids::{HostId, NetworkId, TemplateId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_topics::BATCH_MESSAGES_MAX;

use self::plan::{Order, Pending, Plan, Wanted, listed};
use self::scribe::Scribe;
use crate::document::{DOCUMENT_BYTES_MAX, GuardRecord, RefusalRecord, Refused, encode_record};
use crate::log::{Log, NoAnswer, Outcome};

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
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("address {address} on network {network} is held by workload {workload} on host {host}: release it there first")]
    AddressHeld { address: IpAddr, network: NetworkId, workload: String, host: String },
    #[error("workload {workload} on network {network} is alive on host {host}: remove it there first")]
    AliveElsewhere { workload: WorkloadId, network: NetworkId, host: HostId },
    #[error("workload {workload} is to be on host {named}, but host {host} registers it: register it there")]
    OtherHost { workload: WorkloadId, named: HostId, host: HostId },
    #[error("this boot of host {host} was overtaken by a later one: nothing is removed")]
    Overtaken { host: HostId },
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
    /// Who writes for several at once.
    scribe: Option<Scribe>,
}

impl Registry {
    pub fn new(client: Client) -> Self {
        Self { log: Log::registry(client), scribe: None }
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

    /// The host enrols itself with these workloads, beside those it has from the same boot. What is left of an earlier one goes.
    pub async fn enrol(&self, host: &HostId, enrolment: &Enrolment, workloads: &[Workload]) -> Result<Registered, Error> {
        let wanted = Wanted { enrolment: Some(enrolment), ..Wanted::new(host, workloads)? };
        self.write(&Order::Register(wanted, Elsewhere::Refuse), "enrolled by its host").await
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
        plan.put(RegistryKey::Host(host.clone()), encode_record(&entry));
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

    /// Removes what a host has enrolled, because an operator says so.
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
        Plan { log: self.log.clone(), found: BTreeMap::new(), writes: BTreeMap::new(), presumes: false }
    }

    /// The sequence after which it holds; `None` if somebody else was faster.
    async fn carry_out(&self, plan: Plan, cause: &str) -> Result<Option<u64>, Error> {
        let (messages, unchanged_at) = plan.messages(cause)?;
        if messages.is_empty() {
            return Ok(Some(unchanged_at));
        }
        let outcome = match &self.scribe {
            Some(scribe) => scribe.write(messages).await,
            None => self.log.write(&messages).await,
        };
        match outcome {
            Outcome::Committed(sequence) => Ok(Some(sequence)),
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
                Order::Remove(host, workloads) => plan.remove(host, workloads, false).await?,
                Order::Leave(host) => {
                    let workloads = listed(&plan.host(host).await?);
                    plan.remove(host, &workloads, true).await?
                }
                Order::Forget(host) => plan.forget(host).await?,
                Order::Farewell(host, boot) => {
                    plan.of_boot(host, *boot).await?;
                    plan.forget(host).await?
                }
                Order::End(host, boot, workloads) => {
                    plan.of_boot(host, *boot).await?;
                    plan.remove(host, workloads, false).await?
                }
            };
            if let Some(sequence) = self.carry_out(plan, cause).await? {
                return Ok(Registered { sequence, incarnations });
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
