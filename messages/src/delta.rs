//! One topic's share of a change: `t` term, `c` change, `n` position unless it is the first, `d` digest, `o` companions or `m` "more
//! than are listed", `y` and `z` a tally, the edit's fields, `s` how far to spread acknowledgements, and `k` a seal over all but the edit, which the digest proves.

use groupcast_policy::doc::{Digest, Edit};
use groupcast_policy::topic::{Topic, TopicHash};
use xxhash_rust::xxh3::xxh3_64;

use crate::DecodeError;
use crate::edit::{EditReader, Kind, write_edit};
use crate::pack::{put_words, take_topics};
use crate::wire::{self, read_message, required};

/// Most companions a delta lists; a larger batch is told by tallies.
pub const COMPANIONS_MAX: usize = 32;

const FIRST: u64 = 1;

/// What changes in one topic, as published. Its revision is the sequence the server gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delta {
    pub term: u64,
    /// The CATALOG sequence of the change's last message.
    pub change: u64,
    /// Distance behind the lead message of the batch, from 1: the lead's sequence is this delta's own less the position.
    pub position: u32,
    pub edit: Edit,
    /// Of the document after the edit.
    pub digest: Digest,
    pub companions: Companions,
    /// Only on a host's own topic, in a batch too large to list companions.
    pub tally: Option<Tally>,
    /// Acknowledge at a random time within this, not at once: so many hosts are concerned that their answers would get in each
    /// other's way.
    pub spread_ms: u32,
}

/// Which other topics changed in the same batch: a host shows none of them before it holds all it follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Companions {
    /// Each other topic of the batch, at most [`COMPANIONS_MAX`].
    Listed(Vec<TopicHash>),
    /// The batch is larger: the tally on the host's own topic says what to hold.
    Tallied,
}

impl Companions {
    pub const NONE: Companions = Companions::Listed(Vec::new());
}

/// Proves to a host that it holds every message of a large batch that concerns it, its own topic's message not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    pub count: u32,
    /// Of the positions in the batch.
    pub xor: u32,
}

impl Delta {
    pub fn encode(&self) -> Vec<u8> {
        wire::message(|fields| {
            fields.uint(b't', self.term);
            fields.uint(b'c', self.change);
            fields.uint_unless(FIRST, b'n', u64::from(self.position));
            fields.uint(b'd', self.digest.0);
            match &self.companions {
                Companions::Listed(topics) => fields.packed(b'o', &put_words(topics.iter().map(|topic| topic.0))),
                Companions::Tallied => fields.flag_unless(false, b'm', true),
            }
            if let Some(Tally { count, xor }) = self.tally {
                fields.uint(b'y', u64::from(count));
                fields.uint_unless(0, b'z', u64::from(xor));
            }
            fields.uint_unless(0, b's', u64::from(self.spread_ms));
            write_edit(fields, &self.edit);
            fields.uint(b'k', u64::from(self.seal()));
        })
    }

    pub fn decode(topic: &Topic, bytes: &[u8]) -> Result<Delta, DecodeError> {
        let (mut term, mut change, mut position, mut digest) = (None, None, 1, None);
        let (mut listed, mut tallied, mut count, mut xor) = (Vec::new(), false, None, None);
        let mut edit = EditReader::default();
        let (mut seal, mut spread_ms) = (None, 0);
        read_message(bytes, |key, reader| {
            match key {
                b's' => spread_ms = reader.u32("spread")?,
                b'k' => seal = Some(reader.u32("seal")?),
                b't' => term = Some(reader.uint("term")?),
                b'c' => change = Some(reader.uint("change")?),
                b'n' => position = reader.u32("position")?,
                b'd' => digest = Some(reader.uint("digest")?),
                b'o' => listed = take_topics(reader.packed("companions")?, COMPANIONS_MAX, "companions")?,
                b'm' => tallied = reader.flag("companions")?,
                b'y' => count = Some(reader.u32("tally")?),
                b'z' => xor = Some(reader.u32("tally")?),
                key => edit.field(key, reader)?,
            }
            Ok(())
        })?;
        if position == 0 {
            return Err(DecodeError::Malformed { item: "position" });
        }
        let companions = match (tallied, listed.is_empty()) {
            (false, _) => Companions::Listed(listed),
            (true, true) => Companions::Tallied,
            (true, false) => return Err(DecodeError::Contradiction { item: "companions" }),
        };
        let tally = match (count, xor) {
            (None, None) => None,
            (None, Some(_)) => return Err(DecodeError::Missing { item: "tally" }),
            (Some(count), xor) => Some(Tally { count, xor: xor.unwrap_or(0) }),
        };
        let delta = Delta {
            term: required(term, "term")?,
            change: required(change, "change")?,
            position,
            edit: edit.finish(Some(Kind::of(topic)))?,
            digest: Digest(required(digest, "digest")?),
            companions,
            tally,
            spread_ms,
        };
        // Left out by nobody of this version; demanding it would only forbid a later one to do without.
        if seal.is_some_and(|seal| seal != delta.seal()) {
            return Err(DecodeError::Contradiction { item: "seal" });
        }
        Ok(delta)
    }

    /// Proves what the digest does not: a damaged term or position would otherwise move a reader to a cut that does not exist.
    fn seal(&self) -> u32 {
        let (tallied, listed): (u64, &[TopicHash]) = match &self.companions {
            Companions::Listed(listed) => (0, listed),
            Companions::Tallied => (1, &[]),
        };
        let tally = self.tally.map_or(0, |tally| 1 << 63 | u64::from(tally.count) << 32 | u64::from(tally.xor));
        let words = [self.term, self.change, u64::from(self.position), self.digest.0, tallied, tally];
        let spread = (self.spread_ms != 0).then_some(u64::from(self.spread_ms));
        let listed = listed.iter().map(|topic| topic.0);
        let bytes: Vec<u8> = words.into_iter().chain(listed).chain(spread).flat_map(u64::to_le_bytes).collect();
        xxh3_64(&bytes) as u32
    }
}
