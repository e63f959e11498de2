//! A host's request for topics: `q` ask, `t` term, `h` topic hashes, `r` revisions, `d` digests.

use groupcast_policy::doc::Digest;
use groupcast_policy::topic::TopicHash;

use crate::DecodeError;
use crate::pack::{put_revisions, take_revisions};
use crate::wire::{self, read_message, required};

/// Most topics one request names.
pub const ASK_TOPICS_MAX: usize = 16_384;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ask {
    /// Chosen by the host; the answer repeats it, so that answers to an earlier request are told apart.
    pub ask: u32,
    /// The highest term the host has seen.
    pub term: u64,
    /// What the host holds, each topic once; revision 0: wanted, nothing held.
    pub held: Vec<(TopicHash, u64)>,
    /// What is held of each of them, or nothing: revisions of a stream that was lost mean nothing to anybody, contents do. Who does not
    /// know this field sends the documents.
    pub digests: Vec<Digest>,
}

impl Ask {
    pub fn encode(&self) -> Vec<u8> {
        let (topics, revisions) = put_revisions(&self.held);
        wire::message(|fields| {
            fields.uint(b'q', u64::from(self.ask));
            fields.uint(b't', self.term);
            fields.packed(b'h', &topics);
            fields.packed(b'r', &revisions);
            if !self.digests.is_empty() {
                let bytes: Vec<u8> = self.digests.iter().flat_map(|digest| digest.0.to_be_bytes()).collect();
                fields.packed(b'd', &bytes);
            }
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Ask, DecodeError> {
        let (mut ask, mut term, mut topics, mut revisions) = (None, None, [].as_slice(), [].as_slice());
        let mut digests = [].as_slice();
        read_message(bytes, |key, reader| {
            match key {
                b'q' => ask = Some(reader.u32("ask")?),
                b't' => term = Some(reader.uint("term")?),
                b'h' => topics = reader.packed("topics held")?,
                b'r' => revisions = reader.packed("revisions held")?,
                b'd' => digests = reader.packed("digests held")?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let held = take_revisions(topics, revisions, ASK_TOPICS_MAX, "topics held")?;
        let (whole, rest) = digests.as_chunks::<8>();
        if !rest.is_empty() || (!whole.is_empty() && whole.len() != held.len()) {
            return Err(DecodeError::Contradiction { item: "the number of digests" });
        }
        let digests = whole.iter().map(|bytes| Digest(u64::from_be_bytes(*bytes))).collect();
        Ok(Ask { ask: required(ask, "ask")?, term: required(term, "term")?, held, digests })
    }
}
