//! What a host asks of the registrar on its registration subject beside enrolling: that sources are read anew before a workload
//! starts, that workloads are gone or not well, and, when it goes for good, to be forgotten. A registrar that does not know a request
//! refuses it as an enrolment it cannot read, and that refusal reads as one here.

use groupcast_policy::ids::{ID_LEN_MAX, NetworkId, WorkloadId};

use crate::edit::ID_BYTES_MIN;
use crate::pack::{put_varint, take_numbers};
use crate::registration::REGISTER_WORKLOADS_MAX;
use crate::wire::{self, Fields, Reader, read_message, required};
use crate::{Cut, DecodeError, REASON_BYTES_MAX};

/// Longest time that sources are given to be read anew.
pub const FRESH_WITHIN_MS_MAX: u64 = 600_000;

const FRESH: u64 = 0;
const LEAVE: u64 = 1;
const REMOVE: u64 = 2;
const HEALTH: u64 = 3;

const UNWELL: u8 = 0;
const WELL: u8 = 1;

const DONE: u64 = 0;
const REFUSED: u64 = 1;

/// How a workload is, as its host found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    pub network: NetworkId,
    pub workload: WorkloadId,
    /// The life that was looked at: a report of an earlier one says nothing about this.
    pub incarnation: u64,
    pub healthy: bool,
}

/// `q` which request; fresh: `d` milliseconds until nobody waits any more; leave, remove and health: `o` boot; remove and health: `n`
/// networks and `w` workloads; health: `i` incarnations, `h` a byte for each, 1 if it is well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostRequest {
    /// Read every source now, and answer once what they say is published.
    Fresh { within_ms: u64 },
    /// The host goes for good: remove what it has enrolled. Stopping or upgrading its agent is not that.
    Leave {
        /// Which start of the agent this is: one that was overtaken by a later start removes nothing.
        boot: u64,
    },
    /// These workloads have ended: remove them.
    Remove { boot: u64, workloads: Vec<(NetworkId, WorkloadId)> },
    /// How these workloads are now.
    Health { boot: u64, reports: Vec<HealthReport> },
}

fn put_names<'a>(fields: &mut Fields, names: impl Iterator<Item = (&'a NetworkId, &'a WorkloadId)> + Clone) {
    let networks: Vec<&NetworkId> = names.clone().map(|(network, _)| network).collect();
    let workloads: Vec<&WorkloadId> = names.map(|(_, workload)| workload).collect();
    fields.list(b'n', &networks, |out, network| wire::text(out, network.as_str()));
    fields.list(b'w', &workloads, |out, workload| wire::text(out, workload.as_str()));
}

fn read_networks(reader: &mut Reader) -> Result<Vec<NetworkId>, DecodeError> {
    reader
        .list("networks", REGISTER_WORKLOADS_MAX, ID_BYTES_MIN, |reader| Ok(NetworkId::new(reader.text("network", ID_LEN_MAX)?)?))
}

fn read_workloads(reader: &mut Reader) -> Result<Vec<WorkloadId>, DecodeError> {
    reader.list("workloads", REGISTER_WORKLOADS_MAX, ID_BYTES_MIN, |reader| {
        Ok(WorkloadId::new(reader.text("workload", ID_LEN_MAX)?)?)
    })
}

fn reports(names: Vec<(NetworkId, WorkloadId)>, incarnations: &[u8], states: &[u8]) -> Result<Vec<HealthReport>, DecodeError> {
    let incarnations = take_numbers(incarnations, names.len(), "incarnations")?;
    if states.len() != names.len() || states.iter().any(|state| ![UNWELL, WELL].contains(state)) {
        return Err(DecodeError::Malformed { item: "health" });
    }
    let report = |(((network, workload), incarnation), state): (((NetworkId, WorkloadId), u64), &u8)| HealthReport {
        network,
        workload,
        incarnation,
        healthy: *state == WELL,
    };
    Ok(names.into_iter().zip(incarnations).zip(states).map(report).collect())
}

impl HostRequest {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| match self {
            HostRequest::Fresh { within_ms } => {
                fields.uint(b'q', FRESH);
                fields.uint(b'd', *within_ms);
            }
            HostRequest::Leave { boot } => {
                fields.uint(b'q', LEAVE);
                fields.uint(b'o', *boot);
            }
            HostRequest::Remove { boot, workloads } => {
                fields.uint(b'q', REMOVE);
                fields.uint(b'o', *boot);
                put_names(fields, workloads.iter().map(|(network, workload)| (network, workload)));
            }
            HostRequest::Health { boot, reports } => {
                let (mut incarnations, mut states) = (Vec::new(), Vec::new());
                for report in reports {
                    put_varint(&mut incarnations, u128::from(report.incarnation));
                    states.push(if report.healthy { WELL } else { UNWELL });
                }
                fields.uint(b'q', HEALTH);
                fields.uint(b'o', *boot);
                put_names(fields, reports.iter().map(|report| (&report.network, &report.workload)));
                fields.packed(b'i', &incarnations);
                fields.packed(b'h', &states);
            }
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<HostRequest, DecodeError> {
        let (mut kind, mut within_ms, mut boot) = (None, None, None);
        let (mut networks, mut workloads) = (Vec::new(), Vec::new());
        let (mut incarnations, mut states) = ([].as_slice(), [].as_slice());
        read_message(bytes, |key, reader| {
            match key {
                b'q' => kind = Some(reader.uint("host request")?),
                b'd' => within_ms = Some(reader.uint("within")?),
                b'o' => boot = Some(reader.uint("boot")?),
                b'n' => networks = read_networks(reader)?,
                b'w' => workloads = read_workloads(reader)?,
                b'i' => incarnations = reader.packed("incarnations")?,
                b'h' => states = reader.packed("health")?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        if networks.len() != workloads.len() {
            return Err(DecodeError::Contradiction { item: "host request" });
        }
        let names: Vec<_> = networks.into_iter().zip(workloads).collect();
        let (unnamed, unreported) = (names.is_empty(), incarnations.is_empty() && states.is_empty());
        match required(kind, "host request")? {
            FRESH if boot.is_none() && unnamed && unreported => {
                Ok(HostRequest::Fresh { within_ms: required(within_ms, "within")?.min(FRESH_WITHIN_MS_MAX) })
            }
            LEAVE if within_ms.is_none() && unnamed && unreported => Ok(HostRequest::Leave { boot: required(boot, "boot")? }),
            REMOVE if within_ms.is_none() && unreported => {
                Ok(HostRequest::Remove { boot: required(boot, "boot")?, workloads: names })
            }
            HEALTH if within_ms.is_none() => {
                Ok(HostRequest::Health { boot: required(boot, "boot")?, reports: reports(names, incarnations, states)? })
            }
            FRESH | LEAVE | REMOVE | HEALTH => Err(DecodeError::Contradiction { item: "host request" }),
            found => Err(DecodeError::Unknown { item: "host request", found }),
        }
    }
}

/// `k` which answer; done: `t` `l` cut (term, lead); refused: `x` reason, `y` retryable, as in an answer to an enrolment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostRequestAnswer {
    /// What came of it is published at this cut or before: a host that stands there has it.
    Done { cut: Cut },
    Refused {
        /// The same request may succeed later.
        retryable: bool,
        reason: String,
    },
}

impl HostRequestAnswer {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| match self {
            HostRequestAnswer::Done { cut } => {
                fields.uint(b'k', DONE);
                fields.uint(b't', cut.term);
                fields.uint(b'l', cut.lead);
            }
            HostRequestAnswer::Refused { retryable, reason } => {
                fields.uint(b'k', REFUSED);
                fields.text_cut(b'x', reason, REASON_BYTES_MAX);
                fields.flag_unless(false, b'y', *retryable);
            }
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<HostRequestAnswer, DecodeError> {
        let (mut kind, mut term, mut lead, mut reason, mut retryable) = (None, None, None, None, None);
        read_message(bytes, |key, reader| {
            match key {
                b'k' => kind = Some(reader.uint("host request answer")?),
                b't' => term = Some(reader.uint("cut")?),
                b'l' => lead = Some(reader.uint("cut")?),
                b'x' => reason = Some(reader.text("reason", REASON_BYTES_MAX)?),
                b'y' => retryable = Some(reader.flag("retryable")?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        match required(kind, "host request answer")? {
            DONE if reason.is_none() && retryable.is_none() => {
                Ok(HostRequestAnswer::Done { cut: Cut { term: required(term, "cut")?, lead: required(lead, "cut")? } })
            }
            REFUSED if term.is_none() && lead.is_none() => Ok(HostRequestAnswer::Refused {
                retryable: retryable.unwrap_or(false),
                reason: required(reason, "reason")?.to_owned(),
            }),
            DONE | REFUSED => Err(DecodeError::Contradiction { item: "host request answer" }),
            found => Err(DecodeError::Unknown { item: "host request answer", found }),
        }
    }
}
