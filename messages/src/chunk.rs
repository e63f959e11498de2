//! The answer to an [`Ask`](crate::Ask): chunks that bring every topic the host needs to one cut, or a refusal.
//!
//! Chunk: `q` ask, `i` index, `l` last, `t` `h` cut (term, lead), `e` entries; refusal: `q` ask, `x` reason.
//! Entry: `i` place in the request or `t` topic, `r` revision, `n` needed unless so, `b` which body, and of the body `a` deltas, or `d`
//! digest, `l` last unless so and `e` the edit with its kind `k`. Delta: `r` revision, `p` payload.

use groupcast_policy::doc::{Digest, Edit};
use groupcast_policy::ids::ID_LEN_MAX;
use groupcast_policy::topic::Topic;

use crate::edit::{EditReader, Kind, write_edit};
use crate::wire::{self, Fields, Reader, read_message, required};
use crate::{Cut, DecodeError, REASON_BYTES_MAX};

/// Most entries of one chunk; the writer begins another chunk.
pub const CHUNK_ENTRIES_MAX: usize = 16_384;
/// Most deltas of one entry; the writer begins another entry.
pub const ENTRY_DELTAS_MAX: usize = 1024;

/// Longest token of a topic: `scope.space.` and an id.
const TOKEN_BYTES_MAX: usize = ID_LEN_MAX + 16;
/// Map header, and `i`, `r` and `b` at their shortest.
const ENTRY_BYTES_MIN: usize = 1 + 3 + 3 + 3;
/// Map header, and `r` and `p` at their shortest.
const PAST_BYTES_MIN: usize = 1 + 3 + 4;

const SAME: u64 = 0;
const DELTAS: u64 = 1;
const PART: u64 = 2;

/// One message of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Chunk(Chunk),
    /// The service cannot answer now (it follows no leader, or it is not up to date): ask another.
    Refused {
        ask: u32,
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    pub ask: u32,
    /// From 0, without a gap.
    pub index: u32,
    pub last: bool,
    /// The same in all chunks of an answer.
    pub cut: Cut,
    pub entries: Vec<Entry>,
}

/// One topic at the cut. A topic whose content does not fit comes in several entries, in order, in this chunk and the next ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub topic: TopicRef,
    /// Whether the host needs the topic at the cut.
    pub needed: bool,
    /// At the cut; 0 for a topic that was never written.
    pub revision: u64,
    pub body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicRef {
    /// Place in the request's list.
    Asked(u32),
    Named(Topic),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// What the host holds is what the cut has.
    Same,
    /// What leads from the revision held to the one at the cut, oldest first; complete with the delta of the entry's revision.
    Deltas(Vec<Past>),
    /// A piece of the document: starting from absent, all pieces applied make it. An absent document is one piece that retires.
    Part {
        /// Of the whole document.
        digest: Digest,
        last: bool,
        edit: Edit,
    },
}

/// A delta as it was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Past {
    pub revision: u64,
    pub payload: Vec<u8>,
}

// ---- writing

impl Answer {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Answer::Chunk(chunk) => chunk.encode(),
            Answer::Refused { ask, reason } => wire::message(|fields| {
                fields.uint(b'q', u64::from(*ask));
                fields.text_cut(b'x', reason, REASON_BYTES_MAX);
            }),
        }
    }
}

impl Chunk {
    /// For services, [`ChunkWriter`](crate::ChunkWriter) is better: it knows how much fits.
    pub fn encode(&self) -> Vec<u8> {
        let mut entries = Vec::new();
        self.entries.iter().for_each(|entry| write_entry(&mut entries, entry));
        encode_chunk(self.ask, self.index, self.last, self.cut, self.entries.len(), &entries)
    }
}

/// A chunk around entries that are encoded already.
pub(crate) fn encode_chunk(ask: u32, index: u32, last: bool, cut: Cut, count: usize, entries: &[u8]) -> Vec<u8> {
    wire::message(|fields| {
        fields.uint(b'q', u64::from(ask));
        fields.uint_unless(0, b'i', u64::from(index));
        fields.flag_unless(false, b'l', last);
        fields.uint(b't', cut.term);
        fields.uint(b'h', cut.lead);
        if count > 0 {
            let out = fields.key(b'e');
            wire::array(out, count);
            out.extend_from_slice(entries);
        }
    })
}

fn write_entry(out: &mut Vec<u8>, entry: &Entry) {
    match &entry.body {
        Body::Same => write_same(out, &entry.topic, entry.needed, entry.revision),
        Body::Deltas(deltas) => write_deltas(out, &entry.topic, entry.needed, entry.revision, deltas),
        Body::Part { digest, last, edit } => {
            let mut content = Vec::new();
            wire::map(&mut content, |fields| {
                write_kind(fields, Kind::of_edit(edit));
                write_edit(fields, edit);
            });
            write_part(out, &entry.topic, entry.needed, entry.revision, *digest, *last, &content);
        }
    }
}

pub(crate) fn write_same(out: &mut Vec<u8>, topic: &TopicRef, needed: bool, revision: u64) {
    wire::map(out, |fields| write_head(fields, topic, needed, revision, SAME));
}

pub(crate) fn write_deltas(out: &mut Vec<u8>, topic: &TopicRef, needed: bool, revision: u64, deltas: &[Past]) {
    wire::map(out, |fields| {
        write_head(fields, topic, needed, revision, DELTAS);
        fields.list(b'a', deltas, |out, past| {
            wire::map(out, |fields| {
                fields.uint(b'r', past.revision);
                wire::bin(fields.key(b'p'), &past.payload);
            });
        });
    });
}

/// `content` is an encoded edit: a map with its kind.
pub(crate) fn write_part(
    out: &mut Vec<u8>,
    topic: &TopicRef,
    needed: bool,
    revision: u64,
    digest: Digest,
    last: bool,
    content: &[u8],
) {
    wire::map(out, |fields| {
        write_head(fields, topic, needed, revision, PART);
        fields.uint(b'd', digest.0);
        fields.flag_unless(true, b'l', last);
        fields.key(b'e').extend_from_slice(content);
    });
}

pub(crate) fn write_kind(fields: &mut Fields, kind: Option<Kind>) {
    if let Some(kind) = kind {
        fields.uint(b'k', kind as u64);
    }
}

fn write_head(fields: &mut Fields, topic: &TopicRef, needed: bool, revision: u64, body: u64) {
    match topic {
        TopicRef::Asked(place) => fields.uint(b'i', u64::from(*place)),
        TopicRef::Named(topic) => fields.text(b't', &topic.to_string()),
    }
    fields.uint(b'r', revision);
    fields.flag_unless(true, b'n', needed);
    fields.uint(b'b', body);
}

// ---- reading

impl Answer {
    pub fn decode(bytes: &[u8]) -> Result<Answer, DecodeError> {
        let (mut ask, mut reason, mut index, mut last) = (None, None, 0, false);
        let (mut term, mut lead, mut entries) = (None, None, None);
        read_message(bytes, |key, reader| {
            match key {
                b'q' => ask = Some(reader.u32("ask")?),
                b'x' => reason = Some(reader.text("reason", REASON_BYTES_MAX)?),
                b'i' => index = reader.u32("index")?,
                b'l' => last = reader.flag("last")?,
                b't' => term = Some(reader.uint("cut")?),
                b'h' => lead = Some(reader.uint("cut")?),
                b'e' => entries = Some(reader.list("entries", CHUNK_ENTRIES_MAX, ENTRY_BYTES_MIN, read_entry)?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let ask = required(ask, "ask")?;
        if let Some(reason) = reason {
            if term.is_some() || lead.is_some() || entries.is_some() {
                return Err(DecodeError::Contradiction { item: "reason" });
            }
            return Ok(Answer::Refused { ask, reason: reason.to_owned() });
        }
        let cut = Cut { term: required(term, "cut")?, lead: required(lead, "cut")? };
        Ok(Answer::Chunk(Chunk { ask, index, last, cut, entries: entries.unwrap_or_default() }))
    }
}

impl Chunk {
    /// For readers that take no refusal; others use [`Answer::decode`].
    pub fn decode(bytes: &[u8]) -> Result<Chunk, DecodeError> {
        match Answer::decode(bytes)? {
            Answer::Chunk(chunk) => Ok(chunk),
            Answer::Refused { .. } => Err(DecodeError::Missing { item: "chunk" }),
        }
    }
}

fn read_entry(reader: &mut Reader) -> Result<Entry, DecodeError> {
    let (mut asked, mut named, mut revision, mut needed, mut body) = (None, None, None, true, None);
    let (mut deltas, mut digest, mut last, mut edit) = (None, None, true, None);
    reader.map("entry", |key, reader| {
        match key {
            b'i' => asked = Some(reader.u32("topic")?),
            b't' => named = Some(Topic::parse(reader.text("topic", TOKEN_BYTES_MAX)?)?),
            b'r' => revision = Some(reader.uint("revision")?),
            b'n' => needed = reader.flag("needed")?,
            b'b' => body = Some(reader.uint("entry")?),
            b'a' => deltas = Some(reader.list("deltas", ENTRY_DELTAS_MAX, PAST_BYTES_MIN, read_past)?),
            b'd' => digest = Some(Digest(reader.uint("digest")?)),
            b'l' => last = reader.flag("last")?,
            b'e' => edit = Some(read_part(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let body = match (required(body, "entry")?, deltas, digest, edit) {
        (SAME, None, None, None) => Body::Same,
        (DELTAS, deltas, None, None) => Body::Deltas(deltas.unwrap_or_default()),
        (PART, None, Some(digest), Some(edit)) => Body::Part { digest, last, edit },
        (SAME..=PART, ..) => return Err(DecodeError::Contradiction { item: "entry" }),
        (found, ..) => return Err(DecodeError::Unknown { item: "entry", found }),
    };
    let topic = match (asked, named) {
        (Some(place), None) => TopicRef::Asked(place),
        (None, Some(topic)) => TopicRef::Named(topic),
        (None, None) => return Err(DecodeError::Missing { item: "topic" }),
        (Some(_), Some(_)) => return Err(DecodeError::Contradiction { item: "topic" }),
    };
    if let (TopicRef::Named(topic), Body::Part { edit, .. }) = (&topic, &body)
        && !edit.fits(topic)
    {
        return Err(DecodeError::Contradiction { item: "edit" });
    }
    Ok(Entry { topic, needed, revision: required(revision, "revision")?, body })
}

fn read_past(reader: &mut Reader) -> Result<Past, DecodeError> {
    let (mut revision, mut payload) = (None, None);
    reader.map("delta", |key, reader| {
        match key {
            b'r' => revision = Some(reader.uint("revision")?),
            b'p' => payload = Some(reader.packed("delta")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(Past { revision: required(revision, "revision")?, payload: required(payload, "delta")?.to_vec() })
}

/// A piece of a document brings items; it has nothing to remove, and "fetch it" is no content.
fn read_part(reader: &mut Reader) -> Result<Edit, DecodeError> {
    let (mut kind, mut fields) = (None, EditReader::default());
    reader.map("part", |key, reader| {
        match key {
            b'k' => kind = Some(Kind::read(reader.uint("edit")?)?),
            key => fields.field(key, reader)?,
        }
        Ok(())
    })?;
    let edit = fields.finish(kind)?;
    let adds_only = match &edit {
        Edit::Scope { remove, .. } => remove.is_empty(),
        Edit::Host { remove, .. } => remove.is_empty(),
        Edit::Rules { remove, .. } => remove.is_empty(),
        Edit::Members { remove, .. } => remove.is_empty(),
        Edit::Retire => kind.is_none(),
        Edit::Reset => false,
    };
    if adds_only { Ok(edit) } else { Err(DecodeError::Contradiction { item: "part" }) }
}
