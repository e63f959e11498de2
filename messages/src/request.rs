//! What a host asks of the registrar on its registration subject beside enrolling: that sources are read anew before a workload
//! starts, and, when it goes for good, to be forgotten. A registrar that knows neither refuses it as an enrolment it cannot read, and
//! that refusal reads as one here.

use crate::wire::{self, read_message, required};
use crate::{Cut, DecodeError, REASON_BYTES_MAX};

/// Longest time that sources are given to be read anew.
pub const FRESH_WITHIN_MS_MAX: u64 = 600_000;

const FRESH: u64 = 0;
const LEAVE: u64 = 1;

const DONE: u64 = 0;
const REFUSED: u64 = 1;

/// `q` which request; fresh: `d` milliseconds until nobody waits any more; leave: `o` boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostRequest {
    /// Read every source now, and answer once what they say is published.
    Fresh { within_ms: u64 },
    /// The host goes for good: remove what it has enrolled. Stopping or upgrading its agent is not that.
    Leave {
        /// Which start of the agent this is: one that was overtaken by a later start removes nothing.
        boot: u64,
    },
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
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<HostRequest, DecodeError> {
        let (mut kind, mut within_ms, mut boot) = (None, None, None);
        read_message(bytes, |key, reader| {
            match key {
                b'q' => kind = Some(reader.uint("host request")?),
                b'd' => within_ms = Some(reader.uint("within")?),
                b'o' => boot = Some(reader.uint("boot")?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        match required(kind, "host request")? {
            FRESH if boot.is_none() => {
                Ok(HostRequest::Fresh { within_ms: required(within_ms, "within")?.min(FRESH_WITHIN_MS_MAX) })
            }
            LEAVE if within_ms.is_none() => Ok(HostRequest::Leave { boot: required(boot, "boot")? }),
            FRESH | LEAVE => Err(DecodeError::Contradiction { item: "host request" }),
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
