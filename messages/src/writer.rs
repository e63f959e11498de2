//! Cuts an answer into chunks: entries go into the current chunk while they fit, documents are cut into parts.

use groupcast_policy::doc::{Content, Digest, Document, Edit, Members, Phases, Rules};
use groupcast_policy::ids::GroupId;
use groupcast_policy::net::{Family, Prefix};

use crate::chunk::{
    CHUNK_ENTRIES_MAX, ENTRY_DELTAS_MAX, Past, TopicRef, encode_chunk, write_deltas, write_kind, write_part, write_same,
};
use crate::edit::{Kind, put_sorted_prefix, write_edit, write_placement, write_rule, write_scope, write_stateful};
use crate::pack::{Packed, put_gap};
use crate::wire::{self, Fields};
use crate::{Cut, EDIT_ITEMS_MAX};

/// Size of a chunk unless told otherwise: small enough for a server to interleave with deltas, large enough to be few.
pub const CHUNK_BYTES_MAX: usize = 60_000;
/// Size of a part: a quarter of a chunk, so that chunks fill well and an encoded document fits chunks of any usual size.
pub const PART_BYTES_MAX: usize = CHUNK_BYTES_MAX / 4;

/// A chunk's fields without its entries: header, `v`, `q`, `i`, `l`, `t`, `h`, and the head of `e`, at their longest.
const CHUNK_HEAD_BYTES_MAX: usize = 1 + 3 + 7 + 7 + 3 + 11 + 11 + 7;
/// An entry's fields without its content, at their longest: header, `t`, `r`, `n`, `b`, `d`, `l`, and the head of `a` or `e`.
const ENTRY_HEAD_BYTES_MAX: usize = 1 + 84 + 11 + 3 + 3 + 11 + 3 + 7;
/// A past delta without its payload: header, `r`, and the head of `p`.
const PAST_HEAD_BYTES_MAX: usize = 1 + 11 + 7;
/// A part's fields without their items: header, `k`, `f`, and the heads of four packed fields.
const PART_HEAD_BYTES_MAX: usize = 1 + 3 + 3 + 4 * 7;
/// A member at its longest: a varint of 128 bits and a length.
const MEMBER_BYTES_MAX: usize = 19 + 1;

/// Writes one answer.
///
/// Every chunk is at most `bytes_max` long, except where one item alone (a rule, a placement, a past delta) is longer: that one
/// goes alone. The limits on items keep rules and placements below [`CHUNK_BYTES_MAX`].
#[derive(Debug)]
pub struct ChunkWriter {
    ask: u32,
    cut: Cut,
    bytes_max: usize,
    done: Vec<Vec<u8>>,
    entries: Vec<u8>,
    count: usize,
}

impl ChunkWriter {
    pub fn new(ask: u32, cut: Cut, bytes_max: usize) -> Self {
        Self { ask, cut, bytes_max, done: Vec::new(), entries: Vec::with_capacity(bytes_max.min(CHUNK_BYTES_MAX)), count: 0 }
    }

    pub fn push_same(&mut self, topic: TopicRef, needed: bool, revision: u64) {
        self.push(|out| write_same(out, &topic, needed, revision));
    }

    /// A list that does not fit one entry continues in the next.
    pub fn push_deltas(&mut self, topic: TopicRef, needed: bool, revision: u64, deltas: &[Past]) {
        let room = self.bytes_max.saturating_sub(CHUNK_HEAD_BYTES_MAX + ENTRY_HEAD_BYTES_MAX);
        let mut rest = deltas;
        loop {
            let mut bytes = 0;
            let fits = rest.iter().take(ENTRY_DELTAS_MAX).take_while(|past| {
                bytes += PAST_HEAD_BYTES_MAX + past.payload.len();
                bytes <= room
            });
            let count = fits.count().max(1).min(rest.len());
            let (now, later) = rest.split_at(count);
            self.push(|out| write_deltas(out, &topic, needed, revision, now));
            rest = later;
            if rest.is_empty() {
                return;
            }
        }
    }

    pub fn push_document(&mut self, topic: TopicRef, needed: bool, revision: u64, document: &Document) {
        let room = self.bytes_max.saturating_sub(CHUNK_HEAD_BYTES_MAX + ENTRY_HEAD_BYTES_MAX);
        self.push_encoded(topic, needed, revision, &EncodedDocument::with_parts_of(document, room.min(PART_BYTES_MAX)));
    }

    /// Like [`push_document`](Self::push_document), for a document that many hosts ask for and that is encoded once.
    pub fn push_encoded(&mut self, topic: TopicRef, needed: bool, revision: u64, document: &EncodedDocument) {
        for (place, part) in document.parts.iter().enumerate() {
            let last = place + 1 == document.parts.len();
            self.push(|out| write_part(out, &topic, needed, revision, document.digest, last, part));
        }
    }

    /// The payloads in order: at least one, the last flagged as such.
    pub fn finish(mut self) -> Vec<Vec<u8>> {
        self.close(true);
        self.done
    }

    fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.entries.len();
        write(&mut self.entries);
        let full = CHUNK_HEAD_BYTES_MAX + self.entries.len() > self.bytes_max || self.count == CHUNK_ENTRIES_MAX;
        if full && self.count > 0 {
            let entry = self.entries.split_off(before);
            self.close(false);
            self.entries = entry;
        }
        self.count += 1;
    }

    fn close(&mut self, last: bool) {
        let index = self.done.len() as u32;
        self.done.push(encode_chunk(self.ask, index, last, self.cut, self.count, &self.entries));
        self.entries.clear();
        self.count = 0;
    }
}

/// A document in its wire form, to be sent to many hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedDocument {
    digest: Digest,
    /// Each an encoded edit that says its kind. Never empty: an absent document is one that retires, an empty one has no items.
    parts: Vec<Vec<u8>>,
}

impl EncodedDocument {
    pub fn new(document: &Document) -> Self {
        Self::with_parts_of(document, PART_BYTES_MAX)
    }

    /// Bytes of content: what a service weighs against those of the deltas that lead to the same document.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    fn with_parts_of(document: &Document, bytes_max: usize) -> Self {
        let items_bytes_max = bytes_max.saturating_sub(PART_HEAD_BYTES_MAX);
        let mut parts = Vec::new();
        match document.content() {
            None => {
                let mut part = Vec::new();
                wire::map(&mut part, |fields| write_edit(fields, &Edit::Retire));
                parts.push(part);
            }
            Some(Content::Scope(bound)) => {
                let bound: Vec<(GroupId, Phases)> = bound.iter().map(|(group, phases)| (group.clone(), *phases)).collect();
                // An id with its head and its byte of phases.
                let groups_max = (items_bytes_max / (2 + groupcast_policy::ids::ID_LEN_MAX + 1)).max(1);
                let mut pieces = bound.chunks(groups_max);
                // An empty document has one part all the same.
                let first = pieces.next().unwrap_or_default();
                std::iter::once(first)
                    .chain(pieces)
                    .for_each(|piece| put_part(&mut parts, Kind::Scope, |f| write_scope(f, piece)));
            }
            Some(Content::Host(placed)) => {
                put_items(&mut parts, items_bytes_max, Kind::Host, b'w', placed.values(), write_placement)
            }
            Some(Content::Rules(rules)) => put_rules(&mut parts, items_bytes_max, rules),
            Some(Content::Members(members)) => put_members(&mut parts, items_bytes_max, members),
        }
        Self { digest: document.digest(), parts }
    }
}

fn put_part(parts: &mut Vec<Vec<u8>>, kind: Kind, items: impl FnOnce(&mut Fields)) {
    let mut part = Vec::new();
    wire::map(&mut part, |fields| {
        write_kind(fields, Some(kind));
        items(fields);
    });
    parts.push(part);
}

/// Items that are encoded one by one under one key.
fn put_items<'a, T: 'a>(
    parts: &mut Vec<Vec<u8>>,
    bytes_max: usize,
    kind: Kind,
    key: u8,
    items: impl Iterator<Item = &'a T>,
    write: impl Fn(&mut Vec<u8>, &T),
) {
    let close = |parts: &mut Vec<Vec<u8>>, count: usize, bytes: &[u8]| {
        put_part(parts, kind, |fields| {
            if count > 0 {
                let out = fields.key(key);
                wire::array(out, count);
                out.extend_from_slice(bytes);
            }
        });
    };
    let (mut bytes, mut count) = (Vec::new(), 0);
    for item in items {
        let before = bytes.len();
        write(&mut bytes, item);
        if bytes.len() > bytes_max && count > 0 {
            let after = bytes.split_off(before);
            close(parts, count, &bytes);
            (bytes, count) = (after, 0);
        }
        count += 1;
    }
    close(parts, count, &bytes);
}

fn put_rules(parts: &mut Vec<Vec<u8>>, bytes_max: usize, rules: &Rules) {
    // Stateful is what an edit of an absent document begins with, so only the other is said, in a part of its own.
    if !rules.stateful {
        put_part(parts, Kind::Rules, |fields| write_stateful(fields, false));
        if rules.rules.is_empty() {
            return;
        }
    }
    put_items(parts, bytes_max, Kind::Rules, b'u', rules.rules.values(), write_rule);
}

fn put_members(parts: &mut Vec<Vec<u8>>, bytes_max: usize, members: &Members) {
    let mut writer = MembersWriter { parts, bytes_max, packed: Packed::default(), count: 0 };
    let mut previous = None;
    for address in &members.v4 {
        if writer.make_room() {
            previous = None;
        }
        put_gap(&mut writer.packed.v4, previous.replace(address), address);
    }
    let mut previous = None;
    for address in &members.v6 {
        if writer.make_room() {
            previous = None;
        }
        put_gap(&mut writer.packed.v6, previous.replace(*address), *address);
    }
    for family in [Family::V4, Family::V6] {
        let mut previous: Option<&Prefix> = None;
        for member in members.prefixes.iter().filter(|member| member.family() == family) {
            if writer.make_room() {
                previous = None;
            }
            let out = if family == Family::V4 { &mut writer.packed.prefixes_v4 } else { &mut writer.packed.prefixes_v6 };
            put_sorted_prefix(out, previous.replace(member), member);
        }
    }
    writer.close();
}

struct MembersWriter<'a> {
    parts: &'a mut Vec<Vec<u8>>,
    bytes_max: usize,
    packed: Packed,
    count: usize,
}

impl MembersWriter<'_> {
    /// Counts one more member. True when it begins a new part, where gaps start over.
    fn make_room(&mut self) -> bool {
        let Packed { v4, v6, prefixes_v4, prefixes_v6 } = &self.packed;
        let bytes = v4.len() + v6.len() + prefixes_v4.len() + prefixes_v6.len();
        let full = self.count > 0 && (bytes + MEMBER_BYTES_MAX > self.bytes_max || self.count == EDIT_ITEMS_MAX);
        if full {
            self.close();
        }
        self.count += 1;
        full
    }

    fn close(&mut self) {
        let packed = std::mem::take(&mut self.packed);
        put_part(self.parts, Kind::Members, |fields| {
            fields.packed(b'i', &packed.v4);
            fields.packed(b'I', &packed.v6);
            fields.packed(b'j', &packed.prefixes_v4);
            fields.packed(b'J', &packed.prefixes_v6);
        });
        self.count = 0;
    }
}
