//! What hosts report and are told about what they hold: acknowledgements, entropy checks, nudges.

use groupcast_policy::ids::{ID_LEN_MAX, WorkloadId};
use groupcast_policy::topic::TopicHash;
use xxhash_rust::xxh3::xxh3_64;

use crate::edit::ID_BYTES_MIN;
use crate::pack::{put_revisions, take_revisions};
use crate::wire::{self, Fields, Reader, read_message, required};
use crate::{Cut, DecodeError, REASON_BYTES_MAX};

/// Most topics one acknowledgement names; the rest goes into the next.
pub const ACK_TOPICS_MAX: usize = 4096;
/// Most topics an answer to an entropy check names.
pub const ENTROPY_TOPICS_MAX: usize = 4096;
/// Most topics one nudge names.
pub const NUDGE_TOPICS_MAX: usize = 1024;
/// Longest name of a host's state in bytes.
pub const STATE_NAME_BYTES_MAX: usize = 32;
/// Most workloads that a host names as audited; how many there are it says too.
pub const AUDITED_NAMED_MAX: usize = 32;

// ---- the state of a host

/// What a host does with the policy it has. On the wire `s` is its name, `m` the reason, `w` the workloads it names and `x` how many there
/// are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostState {
    Enforcing,
    /// The kernel refused the policy; the last good one is enforced.
    Failing {
        reason: String,
    },
    /// An operator stopped changes; the last good policy is enforced.
    Frozen {
        reason: String,
    },
    /// An operator turned enforcement off.
    Bypassed {
        reason: String,
    },
    /// An operator cut everything but the failsafe ports.
    Lockdown {
        reason: String,
    },
    /// An operator lets pass, logged, what the policy denies. What an older reader does not know reads as [`HostState::Other`].
    Auditing {
        reason: String,
    },
    /// The same, for some of its workloads only.
    AuditingSome {
        /// As many as are named.
        workloads: Vec<WorkloadId>,
        /// How many there are.
        total: u32,
        reason: String,
    },
    /// The agent prints what it would do, and does nothing to the kernel.
    DryRun,
    /// A state that a newer host has and this side does not know, by name.
    Other(String),
}

impl HostState {
    pub fn name(&self) -> &str {
        match self {
            HostState::Enforcing => "enforcing",
            HostState::Failing { .. } => "failing",
            HostState::Frozen { .. } => "frozen",
            HostState::Bypassed { .. } => "bypassed",
            HostState::Lockdown { .. } => "lockdown",
            HostState::Auditing { .. } => "auditing",
            HostState::AuditingSome { .. } => "auditing-some",
            HostState::DryRun => "dry-run",
            HostState::Other(name) => name,
        }
    }

    /// Whether a policy that it has acknowledged is what its kernel does to packets. What is not known does not count.
    pub fn enforces(&self) -> bool {
        matches!(self, HostState::Enforcing | HostState::Frozen { .. })
    }

    pub fn reason(&self) -> &str {
        match self {
            HostState::Failing { reason }
            | HostState::Frozen { reason }
            | HostState::Bypassed { reason }
            | HostState::Lockdown { reason }
            | HostState::Auditing { reason }
            | HostState::AuditingSome { reason, .. } => reason,
            HostState::Enforcing | HostState::DryRun | HostState::Other(_) => "",
        }
    }

    pub(crate) fn write(&self, fields: &mut Fields) {
        fields.text_cut(b's', self.name(), STATE_NAME_BYTES_MAX);
        if !self.reason().is_empty() {
            fields.text_cut(b'm', self.reason(), REASON_BYTES_MAX);
        }
        if let HostState::AuditingSome { workloads, total, .. } = self {
            let named = &workloads[..workloads.len().min(AUDITED_NAMED_MAX)];
            fields.list(b'w', named, |out, workload| wire::text(out, workload.as_str()));
            fields.uint(b'x', u64::from(*total));
        }
    }
}

/// The fields of a state while the map they stand in is read.
#[derive(Default)]
pub(crate) struct StateReader<'a> {
    name: Option<&'a str>,
    reason: &'a str,
    workloads: Vec<WorkloadId>,
    total: u32,
}

impl<'a> StateReader<'a> {
    /// Takes the field if it is one of a state, skips it otherwise.
    pub fn field(&mut self, key: u8, reader: &mut Reader<'a>) -> Result<(), DecodeError> {
        match key {
            b's' => self.name = Some(reader.text("state", STATE_NAME_BYTES_MAX)?),
            b'm' => self.reason = reader.text("reason", REASON_BYTES_MAX)?,
            b'w' => {
                self.workloads = reader.list("audited workloads", AUDITED_NAMED_MAX, ID_BYTES_MIN, |reader| {
                    Ok(WorkloadId::new(reader.text("workload", ID_LEN_MAX)?)?)
                })?;
            }
            b'x' => self.total = reader.u32("audited workloads")?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    pub fn finish(self) -> Result<HostState, DecodeError> {
        let reason = self.reason.to_owned();
        Ok(match required(self.name, "state")? {
            "enforcing" => HostState::Enforcing,
            "failing" => HostState::Failing { reason },
            "frozen" => HostState::Frozen { reason },
            "bypassed" => HostState::Bypassed { reason },
            "lockdown" => HostState::Lockdown { reason },
            "auditing" => HostState::Auditing { reason },
            "auditing-some" => {
                // It cannot have named more than there are.
                let total = self.total.max(self.workloads.len() as u32);
                HostState::AuditingSome { workloads: self.workloads, total, reason }
            }
            "dry-run" => HostState::DryRun,
            "" => return Err(DecodeError::Malformed { item: "state" }),
            name => HostState::Other(name.to_owned()),
        })
    }
}

// ---- acknowledgements

/// State, not an event: `t` term, `h` topics, `r` revisions, and the host's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    pub term: u64,
    pub state: HostState,
    /// Committed since the last acknowledgement, each topic once.
    pub reached: Vec<(TopicHash, u64)>,
}

impl Ack {
    pub fn encode(&self) -> Vec<u8> {
        let (topics, revisions) = put_revisions(&self.reached);
        wire::message(|fields| {
            fields.uint(b't', self.term);
            self.state.write(fields);
            fields.packed(b'h', &topics);
            fields.packed(b'r', &revisions);
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Ack, DecodeError> {
        let (mut term, mut state, mut topics, mut revisions) = (None, StateReader::default(), [].as_slice(), [].as_slice());
        read_message(bytes, |key, reader| {
            match key {
                b't' => term = Some(reader.uint("term")?),
                b'h' => topics = reader.packed("topics reached")?,
                b'r' => revisions = reader.packed("revisions reached")?,
                key => state.field(key, reader)?,
            }
            Ok(())
        })?;
        Ok(Ack {
            term: required(term, "term")?,
            state: state.finish()?,
            reached: take_revisions(topics, revisions, ACK_TOPICS_MAX, "topics reached")?,
        })
    }
}

// ---- entropy checks

/// All a host holds, in one number: `t` term, `h` hash, `n` topics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntropyCheck {
    pub term: u64,
    /// Wrapping sum of [`entropy_item`] over the topics followed.
    pub hash: u64,
    pub topics: u32,
}

/// What one topic adds to an entropy check's hash. Both sides compute it, so it never changes.
pub fn entropy_item(topic: TopicHash, revision: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&topic.0.to_be_bytes());
    bytes[8..].copy_from_slice(&revision.to_be_bytes());
    xxh3_64(&bytes)
}

impl EntropyCheck {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| {
            fields.uint(b't', self.term);
            fields.uint(b'h', self.hash);
            fields.uint(b'n', u64::from(self.topics));
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<EntropyCheck, DecodeError> {
        let (mut term, mut hash, mut topics) = (None, None, None);
        read_message(bytes, |key, reader| {
            match key {
                b't' => term = Some(reader.uint("term")?),
                b'h' => hash = Some(reader.uint("hash")?),
                b'n' => topics = Some(reader.u32("topics")?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(EntropyCheck { term: required(term, "term")?, hash: required(hash, "hash")?, topics: required(topics, "topics")? })
    }
}

const EQUAL: u64 = 0;
const DIFFERS: u64 = 1;

/// `k` which answer, `t` `l` cut (term, lead), `h` topics, `r` revisions, `z` truncated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntropyAnswer {
    Equal {
        cut: Cut,
    },
    Differs {
        cut: Cut,
        /// What the host should have, each topic once.
        revisions: Vec<(TopicHash, u64)>,
        /// There are more than [`ENTROPY_TOPICS_MAX`]: ask with everything held.
        truncated: bool,
    },
}

impl EntropyAnswer {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| match self {
            EntropyAnswer::Equal { cut } => {
                fields.uint(b'k', EQUAL);
                write_cut(fields, *cut);
            }
            EntropyAnswer::Differs { cut, revisions, truncated } => {
                let (topics, revisions) = put_revisions(revisions);
                fields.uint(b'k', DIFFERS);
                write_cut(fields, *cut);
                fields.packed(b'h', &topics);
                fields.packed(b'r', &revisions);
                fields.flag_unless(false, b'z', *truncated);
            }
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<EntropyAnswer, DecodeError> {
        let (mut kind, mut cut, mut truncated) = (None, CutReader::default(), false);
        let (mut topics, mut revisions) = ([].as_slice(), [].as_slice());
        read_message(bytes, |key, reader| {
            match key {
                b'k' => kind = Some(reader.uint("entropy answer")?),
                b'h' => topics = reader.packed("topics")?,
                b'r' => revisions = reader.packed("revisions")?,
                b'z' => truncated = reader.flag("truncated")?,
                key => cut.field(key, reader)?,
            }
            Ok(())
        })?;
        let cut = cut.finish()?;
        match required(kind, "entropy answer")? {
            EQUAL if topics.is_empty() && revisions.is_empty() && !truncated => Ok(EntropyAnswer::Equal { cut }),
            EQUAL => Err(DecodeError::Contradiction { item: "entropy answer" }),
            DIFFERS => {
                let revisions = take_revisions(topics, revisions, ENTROPY_TOPICS_MAX, "topics")?;
                Ok(EntropyAnswer::Differs { cut, revisions, truncated })
            }
            found => Err(DecodeError::Unknown { item: "entropy answer", found }),
        }
    }
}

// ---- nudges

/// Tells a host that has not acknowledged what it should have: `t` `l` cut (term, lead), `h` topics, `r` revisions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nudge {
    pub cut: Cut,
    /// Each topic once.
    pub should: Vec<(TopicHash, u64)>,
}

impl Nudge {
    pub fn encode(&self) -> Vec<u8> {
        let (topics, revisions) = put_revisions(&self.should);
        wire::message(|fields| {
            write_cut(fields, self.cut);
            fields.packed(b'h', &topics);
            fields.packed(b'r', &revisions);
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Nudge, DecodeError> {
        let (mut cut, mut topics, mut revisions) = (CutReader::default(), [].as_slice(), [].as_slice());
        read_message(bytes, |key, reader| {
            match key {
                b'h' => topics = reader.packed("topics")?,
                b'r' => revisions = reader.packed("revisions")?,
                key => cut.field(key, reader)?,
            }
            Ok(())
        })?;
        Ok(Nudge { cut: cut.finish()?, should: take_revisions(topics, revisions, NUDGE_TOPICS_MAX, "topics")? })
    }
}

fn write_cut(fields: &mut Fields, cut: Cut) {
    fields.uint(b't', cut.term);
    fields.uint(b'l', cut.lead);
}

#[derive(Default)]
struct CutReader {
    term: Option<u64>,
    lead: Option<u64>,
}

impl CutReader {
    /// Takes the field if it is one of a cut, skips it otherwise.
    fn field(&mut self, key: u8, reader: &mut Reader) -> Result<(), DecodeError> {
        match key {
            b't' => self.term = Some(reader.uint("cut")?),
            b'l' => self.lead = Some(reader.uint("cut")?),
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn finish(self) -> Result<Cut, DecodeError> {
        Ok(Cut { term: required(self.term, "cut")?, lead: required(self.lead, "cut")? })
    }
}
