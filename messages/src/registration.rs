//! Beats and enrolment.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::Phase;
use groupcast_policy::ids::{AppId, ID_LEN_MAX, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::model::{HealthCheck, PROBE_BYTES_MAX, Probe};
use groupcast_policy::net::Prefix;

use crate::edit::{ID_BYTES_MIN, put_addresses, put_phase, read_addresses, read_phase};
use crate::pack::{put_varint, take_numbers};
use crate::status::{HostState, StateReader};
use crate::wire::{self, Fields, Reader, read_message, required};
use crate::{DecodeError, REASON_BYTES_MAX};

/// Longest version of an agent in bytes. The encoder cuts longer ones.
pub const VERSION_BYTES_MAX: usize = 32;
/// Most workloads one registration names; a host with more registers in several messages.
pub const REGISTER_WORKLOADS_MAX: usize = 1024;
/// Most labels of one workload.
pub const LABELS_MAX: usize = 64;
/// Longest key of a label in bytes: a domain, a slash and a name.
pub const LABEL_KEY_BYTES_MAX: usize = 320;
/// Longest value of a label in bytes.
pub const LABEL_VALUE_BYTES_MAX: usize = 256;

const KNOWN: u64 = 0;
const UNKNOWN: u64 = 1;
const CHECK: u64 = 2;
const REGISTERED: u64 = 0;
const REFUSED: u64 = 1;

// ---- beats

/// A host is alive: `b` boot, `n` count, `t` term, `a` the agent's version, and the host's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beat {
    /// Which start of the agent this is.
    pub boot: u64,
    /// Beats since then.
    pub count: u64,
    /// The highest seen.
    pub term: u64,
    pub version: String,
    pub state: HostState,
}

impl Beat {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| {
            fields.uint(b'b', self.boot);
            fields.uint(b'n', self.count);
            fields.uint(b't', self.term);
            fields.text_cut(b'a', &self.version, VERSION_BYTES_MAX);
            self.state.write(fields);
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Beat, DecodeError> {
        let (mut boot, mut count, mut term, mut version) = (None, None, None, "");
        let mut state = StateReader::default();
        read_message(bytes, |key, reader| {
            match key {
                b'b' => boot = Some(reader.uint("boot")?),
                b'n' => count = Some(reader.uint("count")?),
                b't' => term = Some(reader.uint("term")?),
                b'a' => version = reader.text("agent version", VERSION_BYTES_MAX)?,
                key => state.field(key, reader)?,
            }
            Ok(())
        })?;
        Ok(Beat {
            boot: required(boot, "boot")?,
            count: required(count, "count")?,
            term: required(term, "term")?,
            version: version.to_owned(),
            state: state.finish()?,
        })
    }
}

/// What a host that beats is told: `k` which answer; check: `t` template, and how the health of its workloads is checked, as in
/// [`RegisterAnswer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BeatAnswer {
    Known,
    /// The host's entry is gone: enrol again.
    Unknown,
    /// A template says anew how health is checked. Said unasked, when it does.
    Check {
        template: String,
        health: Option<HealthCheck>,
    },
}

impl BeatAnswer {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| match self {
            BeatAnswer::Known => fields.uint(b'k', KNOWN),
            BeatAnswer::Unknown => fields.uint(b'k', UNKNOWN),
            BeatAnswer::Check { template, health } => {
                fields.uint(b'k', CHECK);
                fields.text(b't', template);
                write_health(fields, health.as_ref());
            }
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<BeatAnswer, DecodeError> {
        let (mut kind, mut template, mut health) = (None, None, HealthReader::default());
        read_message(bytes, |key, reader| {
            match key {
                b'k' => kind = Some(reader.uint("beat answer")?),
                b't' => template = Some(read_template(reader)?),
                key => health.field(key, reader)?,
            }
            Ok(())
        })?;
        let health = health.finish()?;
        match required(kind, "beat answer")? {
            KNOWN if template.is_none() && health.is_none() => Ok(BeatAnswer::Known),
            UNKNOWN if template.is_none() && health.is_none() => Ok(BeatAnswer::Unknown),
            CHECK => Ok(BeatAnswer::Check { template: required(template, "template")?, health }),
            KNOWN | UNKNOWN => Err(DecodeError::Contradiction { item: "beat answer" }),
            found => Err(DecodeError::Unknown { item: "beat answer", found }),
        }
    }
}

// ---- enrolment

/// A host enrols itself and its workloads: `b` boot, `t` template, `w` workloads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// Which start of the agent this is.
    pub boot: u64,
    /// An id; what the host's workloads may be.
    pub template: Option<String>,
    pub workloads: Vec<RegisterWorkload>,
}

/// `w` workload, `n` network, `a` `A` addresses and `p` `P` prefixes, `l` labels (keys and values in turn), `s` space, `y` app, `f` phase,
/// `i` incarnation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterWorkload {
    pub workload: WorkloadId,
    pub network: NetworkId,
    pub addresses: BTreeSet<Prefix>,
    pub labels: BTreeMap<String, String>,
    pub space: Option<SpaceId>,
    pub app: Option<AppId>,
    pub phase: Phase,
    /// The one the host remembers, if any; the registrar decides.
    pub incarnation: Option<u64>,
}

/// Map header, and `w` and `n` at their shortest.
const WORKLOAD_BYTES_MIN: usize = 1 + 4 + 4;

impl Register {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| {
            fields.uint(b'b', self.boot);
            fields.optional_text(b't', self.template.as_deref());
            fields.list(b'w', &self.workloads, write_workload);
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Register, DecodeError> {
        let (mut boot, mut template, mut workloads) = (None, None, Vec::new());
        read_message(bytes, |key, reader| {
            match key {
                b'b' => boot = Some(reader.uint("boot")?),
                b't' => template = Some(read_template(reader)?),
                b'w' => workloads = reader.list("workloads", REGISTER_WORKLOADS_MAX, WORKLOAD_BYTES_MIN, read_workload)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(Register { boot: required(boot, "boot")?, template, workloads })
    }
}

fn read_template(reader: &mut Reader) -> Result<String, DecodeError> {
    let text = reader.text("template", ID_LEN_MAX)?;
    let valid = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if valid { Ok(text.to_owned()) } else { Err(DecodeError::Malformed { item: "template" }) }
}

fn write_workload(out: &mut Vec<u8>, workload: &RegisterWorkload) {
    wire::map(out, |fields| {
        fields.text(b'w', workload.workload.as_str());
        fields.text(b'n', workload.network.as_str());
        put_addresses(fields, &workload.addresses);
        let labels: Vec<&String> = workload.labels.iter().flat_map(|(key, value)| [key, value]).collect();
        fields.list(b'l', &labels, |out, text| wire::text(out, text));
        fields.optional_text(b's', workload.space.as_ref().map(SpaceId::as_str));
        fields.optional_text(b'y', workload.app.as_ref().map(AppId::as_str));
        put_phase(fields, workload.phase);
        workload.incarnation.iter().for_each(|incarnation| fields.uint(b'i', *incarnation));
    });
}

fn read_workload(reader: &mut Reader) -> Result<RegisterWorkload, DecodeError> {
    let (mut workload, mut network, mut space, mut app, mut incarnation) = (None, None, None, None, None);
    let (mut addresses, mut labels, mut phase) = (BTreeSet::new(), BTreeMap::new(), Phase::Running);
    reader.map("workload", |key, reader| {
        match key {
            b'w' => workload = Some(WorkloadId::new(reader.text("workload", ID_LEN_MAX)?)?),
            b'n' => network = Some(NetworkId::new(reader.text("network", ID_LEN_MAX)?)?),
            b'a' | b'A' | b'p' | b'P' => read_addresses(key, reader, &mut addresses)?,
            b'l' => labels = read_labels(reader)?,
            b's' => space = Some(SpaceId::new(reader.text("space", ID_LEN_MAX)?)?),
            b'y' => app = Some(AppId::new(reader.text("app", ID_LEN_MAX)?)?),
            b'f' => phase = read_phase(reader)?,
            b'i' => incarnation = Some(reader.uint("incarnation")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let (workload, network) = (required(workload, "workload")?, required(network, "network")?);
    Ok(RegisterWorkload { workload, network, addresses, labels, space, app, phase, incarnation })
}

fn read_labels(reader: &mut Reader) -> Result<BTreeMap<String, String>, DecodeError> {
    let mut is_key = false;
    let texts = reader.list("labels", 2 * LABELS_MAX, 1, |reader| {
        is_key = !is_key;
        let text = reader.text("label", if is_key { LABEL_KEY_BYTES_MAX } else { LABEL_VALUE_BYTES_MAX })?;
        if is_key && text.is_empty() { Err(DecodeError::Malformed { item: "label" }) } else { Ok(text) }
    })?;
    let (pairs, unpaired) = texts.as_chunks::<2>();
    if !unpaired.is_empty() {
        return Err(DecodeError::Malformed { item: "labels" });
    }
    let mut labels = BTreeMap::new();
    for [key, value] in pairs {
        if labels.insert((*key).to_owned(), (*value).to_owned()).is_some() {
            return Err(DecodeError::Duplicate { item: "label" });
        }
    }
    Ok(labels)
}

/// `k` which answer; registered: `w` workloads, `i` their incarnations, and how to check their health: `e` seconds between two checks,
/// and `o` port, `p` path, `c` process; refused: `x` reason, `y` retryable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegisterAnswer {
    Registered {
        /// Each workload once.
        incarnations: Vec<(WorkloadId, u64)>,
        /// As the template says.
        health: Option<HealthCheck>,
    },
    Refused {
        /// The same registration may succeed later: the template may appear, the address may be released.
        retryable: bool,
        reason: String,
    },
}

impl RegisterAnswer {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| match self {
            RegisterAnswer::Registered { incarnations, health } => {
                let mut numbers = Vec::new();
                incarnations.iter().for_each(|(_, incarnation)| put_varint(&mut numbers, u128::from(*incarnation)));
                fields.uint(b'k', REGISTERED);
                fields.list(b'w', incarnations, |out, (workload, _)| wire::text(out, workload.as_str()));
                fields.packed(b'i', &numbers);
                write_health(fields, health.as_ref());
            }
            RegisterAnswer::Refused { retryable, reason } => {
                fields.uint(b'k', REFUSED);
                fields.text_cut(b'x', reason, REASON_BYTES_MAX);
                fields.flag_unless(false, b'y', *retryable);
            }
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<RegisterAnswer, DecodeError> {
        let (mut kind, mut workloads, mut numbers) = (None, Vec::new(), [].as_slice());
        let (mut reason, mut retryable) = (None, None);
        let mut health = HealthReader::default();
        read_message(bytes, |key, reader| {
            match key {
                b'k' => kind = Some(reader.uint("register answer")?),
                b'w' => {
                    workloads = reader.list("workloads", REGISTER_WORKLOADS_MAX, ID_BYTES_MIN, |reader| {
                        Ok(WorkloadId::new(reader.text("workload", ID_LEN_MAX)?)?)
                    })?;
                }
                b'i' => numbers = reader.packed("incarnations")?,
                b'x' => reason = Some(reader.text("reason", REASON_BYTES_MAX)?),
                b'y' => retryable = Some(reader.flag("retryable")?),
                key => health.field(key, reader)?,
            }
            Ok(())
        })?;
        let health = health.finish()?;
        match required(kind, "register answer")? {
            REGISTERED if reason.is_none() && retryable.is_none() => {
                let distinct: BTreeSet<&WorkloadId> = workloads.iter().collect();
                if distinct.len() < workloads.len() {
                    return Err(DecodeError::Duplicate { item: "workload" });
                }
                let numbers = take_numbers(numbers, workloads.len(), "incarnations")?;
                Ok(RegisterAnswer::Registered { incarnations: workloads.into_iter().zip(numbers).collect(), health })
            }
            REFUSED if workloads.is_empty() && numbers.is_empty() && health.is_none() => Ok(RegisterAnswer::Refused {
                retryable: retryable.unwrap_or(false),
                reason: required(reason, "reason")?.to_owned(),
            }),
            REGISTERED | REFUSED => Err(DecodeError::Contradiction { item: "register answer" }),
            found => Err(DecodeError::Unknown { item: "register answer", found }),
        }
    }
}

// ---- how health is checked: `e` seconds between two checks, and `o` port, `p` path, `c` process

fn write_health(fields: &mut Fields, health: Option<&HealthCheck>) {
    let Some(HealthCheck { probe, interval_seconds }) = health else { return };
    fields.uint(b'e', u64::from(*interval_seconds));
    match probe {
        Probe::Tcp { port } => fields.uint(b'o', u64::from(*port)),
        Probe::Http { port, path } => {
            fields.uint(b'o', u64::from(*port));
            fields.text(b'p', path);
        }
        Probe::Process { name } => fields.text(b'c', name),
    }
}

#[derive(Default)]
struct HealthReader {
    interval: Option<u32>,
    port: Option<u64>,
    path: Option<String>,
    process: Option<String>,
}

impl HealthReader {
    /// Takes its own fields and skips all others.
    fn field(&mut self, key: u8, reader: &mut Reader) -> Result<(), DecodeError> {
        match key {
            b'e' => self.interval = Some(reader.u32("health interval")?),
            b'o' => self.port = Some(reader.uint("health port")?),
            b'p' => self.path = Some(read_probed(reader)?),
            b'c' => self.process = Some(read_probed(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn finish(self) -> Result<Option<HealthCheck>, DecodeError> {
        let malformed = || DecodeError::Malformed { item: "health check" };
        let port = self.port.map(|port| u16::try_from(port).ok().filter(|port| *port > 0).ok_or_else(malformed)).transpose()?;
        let probe = match (port, self.path, self.process) {
            (None, None, None) if self.interval.is_none() => return Ok(None),
            (Some(port), None, None) => Probe::Tcp { port },
            (Some(port), Some(path), None) if path.starts_with('/') => Probe::Http { port, path },
            (None, None, Some(name)) => Probe::Process { name },
            _ => return Err(malformed()),
        };
        let interval_seconds = self.interval.filter(|seconds| *seconds > 0).ok_or_else(malformed)?;
        Ok(Some(HealthCheck { probe, interval_seconds }))
    }
}

fn read_probed(reader: &mut Reader) -> Result<String, DecodeError> {
    let text = reader.text("health check", PROBE_BYTES_MAX)?;
    if Probe::is_plain(text) { Ok(text.to_owned()) } else { Err(DecodeError::Malformed { item: "health check" }) }
}
