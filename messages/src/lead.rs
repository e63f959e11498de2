//! The message that leads every batch: fence, progress mark and lease in one. `t` term, `s` since, `b` batch, `n` count, `c` catalogue, `r`
//! registry, `x` resigning, `i` incomplete, `l` leader.

use crate::DecodeError;
use crate::wire::{self, read_message, required};

/// Longest name of a leader in bytes. The encoder cuts longer ones.
pub const LEADER_BYTES_MAX: usize = 64;

/// A state of all topics: the one after the batch whose lead message has this TOPICS sequence. Later cuts are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Cut {
    pub term: u64,
    pub lead: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lead {
    pub term: u64,
    /// The term under which this life of the TOPICS stream began: revisions of earlier terms belong to a stream that is gone.
    pub since: u64,
    /// Random: tells a leader whether a batch whose acknowledgement it missed is its own.
    pub batch: u64,
    /// Messages that follow in this batch.
    pub count: u32,
    /// The CATALOG sequence that the topics reflect with this batch.
    pub catalog: u64,
    /// The REGISTRY sequence that the topics reflect with this batch.
    pub registry: u64,
    /// The leader lets go: a candidate need not wait for the lease to end.
    pub resigning: bool,
    /// The stream was lost and is being rebuilt: topics are missing from it after this batch. Nobody may conclude from their
    /// absence that there is nothing to enforce.
    pub incomplete: bool,
    /// Who leads, for people.
    pub leader: String,
}

impl Lead {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| {
            fields.uint(b't', self.term);
            fields.uint(b's', self.since);
            fields.uint(b'b', self.batch);
            fields.uint_unless(0, b'n', u64::from(self.count));
            fields.uint(b'c', self.catalog);
            fields.uint(b'r', self.registry);
            fields.flag_unless(false, b'x', self.resigning);
            fields.flag_unless(false, b'i', self.incomplete);
            fields.text_cut(b'l', &self.leader, LEADER_BYTES_MAX);
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Lead, DecodeError> {
        let (mut term, mut since, mut batch, mut count, mut catalog, mut registry) = (None, None, None, 0, None, None);
        let (mut resigning, mut incomplete, mut leader) = (false, false, "");
        read_message(bytes, |key, reader| {
            match key {
                b't' => term = Some(reader.uint("term")?),
                b's' => since = Some(reader.uint("since")?),
                b'b' => batch = Some(reader.uint("batch")?),
                b'n' => count = reader.u32("count")?,
                b'c' => catalog = Some(reader.uint("catalog")?),
                b'r' => registry = Some(reader.uint("registry")?),
                b'x' => resigning = reader.flag("resigning")?,
                b'i' => incomplete = reader.flag("incomplete")?,
                b'l' => leader = reader.text("leader", LEADER_BYTES_MAX)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(Lead {
            term: required(term, "term")?,
            since: required(since, "since")?,
            batch: required(batch, "batch")?,
            count,
            catalog: required(catalog, "catalog")?,
            registry: required(registry, "registry")?,
            resigning,
            incomplete,
            leader: leader.to_owned(),
        })
    }
}
