//! Numbers in few bytes: fixed-width items back to back, LEB128, and sorted sets as gaps.
//!
//! Every set and every number has exactly one encoding; all others are refused.

use std::net::IpAddr;

use groupcast_policy::net::{Prefix, Span, SpanSet, Successor};
use groupcast_policy::topic::TopicHash;
use ipnet::IpNet;

use crate::DecodeError;

// ---- numbers

/// What addresses, ports and revisions are: unsigned integers of some width.
pub(crate) trait Number: Successor {
    const BITS: u32;
    const ZERO: Self;
    fn widen(self) -> u128;
    fn narrow(value: u128) -> Option<Self>;
}

macro_rules! number {
    ($($t:ty),*) => { $(impl Number for $t {
        const BITS: u32 = <$t>::BITS;
        const ZERO: Self = 0;
        fn widen(self) -> u128 { u128::from(self) }
        fn narrow(value: u128) -> Option<Self> { Self::try_from(value).ok() }
    })* };
}
number!(u16, u32, u128);

/// LEB128: seven bits a byte, low bits first, the high bit says that more follow.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u128) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Reads a number of at most `bits` bits. A last byte of zero, or bits beyond the width, would be a second encoding of some number.
pub(crate) fn take_varint(rest: &mut &[u8], bits: u32, item: &'static str) -> Result<u128, DecodeError> {
    let mut value = 0u128;
    let mut shift = 0;
    loop {
        let (&byte, tail) = rest.split_first().ok_or(DecodeError::Truncated { item })?;
        *rest = tail;
        let part = u128::from(byte & 0x7f);
        if shift >= bits || (bits - shift < 7 && part >> (bits - shift) != 0) || (byte == 0 && shift > 0) {
            return Err(DecodeError::Malformed { item });
        }
        value |= part << shift;
        if byte < 0x80 {
            return Ok(value);
        }
        shift += 7;
    }
}

/// How many numbers a run of varints holds, without decoding it: each ends with a byte below 0x80.
pub(crate) fn count_varints(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte < 0x80).count()
}

// ---- sorted sets of single numbers

/// Appends the number's distance from the one before; `previous` is `None` at the start.
pub(crate) fn put_gap<T: Number>(out: &mut Vec<u8>, previous: Option<T>, value: T) {
    let base = previous.map_or(0, |p| p.widen() + 1);
    put_varint(out, value.widen() - base);
}

pub(crate) fn take_gap<T: Number>(rest: &mut &[u8], previous: Option<T>, item: &'static str) -> Result<T, DecodeError> {
    let gap = take_varint(rest, T::BITS, item)?;
    let base = match previous {
        None => T::ZERO,
        Some(previous) => previous.successor().ok_or(DecodeError::Malformed { item })?,
    };
    base.widen().checked_add(gap).and_then(T::narrow).ok_or(DecodeError::Malformed { item })
}

// ---- range sets

/// For each range the distance from the earliest place it could begin (ranges are merged, so at least one value lies between) and
/// its length less one.
pub(crate) fn put_spans<T: Number>(out: &mut Vec<u8>, spans: &[Span<T>]) {
    let mut base = 0;
    for span in spans {
        put_varint(out, span.first().widen() - base);
        put_varint(out, span.last().widen() - span.first().widen());
        // Behind a range that ends with the last value there is no other, so the base is not used again.
        base = span.last().widen().saturating_add(2);
    }
}

pub(crate) fn take_spans<T: Number>(bytes: &[u8], max: usize, item: &'static str) -> Result<SpanSet<T>, DecodeError> {
    let found = count_varints(bytes) / 2;
    if found > max {
        return Err(DecodeError::TooMany { item, found, max });
    }
    let malformed = DecodeError::Malformed { item };
    let mut rest = bytes;
    let mut spans: Vec<Span<T>> = Vec::with_capacity(found);
    while !rest.is_empty() {
        let base = match spans.last() {
            None => T::ZERO,
            Some(span) => span.last().successor().and_then(T::successor).ok_or_else(|| malformed.clone())?,
        };
        let mut advance = |from: T| -> Result<T, DecodeError> {
            let gap = take_varint(&mut rest, T::BITS, item)?;
            from.widen().checked_add(gap).and_then(T::narrow).ok_or_else(|| malformed.clone())
        };
        let first = advance(base)?;
        let last = advance(first)?;
        spans.extend(Span::new(first, last));
    }
    Ok(spans.into_iter().collect())
}

// ---- addresses and prefixes

/// Prefixes by family and by whether they are single addresses: the four forms that are packed apart.
#[derive(Default)]
pub(crate) struct Packed {
    pub v4: Vec<u8>,
    pub v6: Vec<u8>,
    pub prefixes_v4: Vec<u8>,
    pub prefixes_v6: Vec<u8>,
}

impl Packed {
    /// Fixed width: 4 and 16 bytes an address, one more with a length.
    pub fn fixed<'a>(members: impl IntoIterator<Item = &'a Prefix>) -> Self {
        let mut packed = Self::default();
        for member in members {
            match (member.net(), member.is_host()) {
                (IpNet::V4(net), true) => packed.v4.extend(net.addr().octets()),
                (IpNet::V6(net), true) => packed.v6.extend(net.addr().octets()),
                (IpNet::V4(net), false) => {
                    packed.prefixes_v4.extend(net.addr().octets());
                    packed.prefixes_v4.push(net.prefix_len());
                }
                (IpNet::V6(net), false) => {
                    packed.prefixes_v6.extend(net.addr().octets());
                    packed.prefixes_v6.push(net.prefix_len());
                }
            }
        }
        packed
    }
}

/// Which of the four packed forms a field holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    V4,
    V6,
    PrefixesV4,
    PrefixesV6,
}

impl Form {
    pub fn item_bytes(self) -> usize {
        match self {
            Form::V4 => 4,
            Form::V6 => 16,
            Form::PrefixesV4 => 5,
            Form::PrefixesV6 => 17,
        }
    }
}

/// Reads packed addresses or prefixes of one form, appending to `members`.
pub(crate) fn take_fixed(bytes: &[u8], form: Form, members: &mut Vec<Prefix>, item: &'static str) -> Result<(), DecodeError> {
    let malformed = DecodeError::Malformed { item };
    let chunks = bytes.chunks_exact(form.item_bytes());
    if !chunks.remainder().is_empty() {
        return Err(malformed);
    }
    members.reserve_exact(chunks.len());
    for chunk in chunks {
        let member = match form {
            Form::V4 => <[u8; 4]>::try_from(chunk).ok().map(|octets| Prefix::host(IpAddr::from(octets))),
            Form::V6 => <[u8; 16]>::try_from(chunk).ok().map(|octets| Prefix::host(IpAddr::from(octets))),
            Form::PrefixesV4 | Form::PrefixesV6 => match chunk.split_last() {
                Some((&len, address)) => prefix(big_endian(address), len, form),
                None => None,
            },
        };
        members.push(member.ok_or_else(|| malformed.clone())?);
    }
    Ok(())
}

/// A prefix as the wire has it: shorter than an address (those are packed apart) and without host bits. `Prefix` would clear them,
/// and two encodings would mean one item.
pub(crate) fn prefix(bits: u128, len: u8, form: Form) -> Option<Prefix> {
    let made = match form {
        Form::V4 | Form::PrefixesV4 => Prefix::v4(u32::try_from(bits).ok()?, len)?,
        Form::V6 | Form::PrefixesV6 => Prefix::v6(bits, len)?,
    };
    (!made.is_host() && address_bits(&made) == bits).then_some(made)
}

pub(crate) fn address_bits(prefix: &Prefix) -> u128 {
    match prefix.net() {
        IpNet::V4(net) => u128::from(net.addr().to_bits()),
        IpNet::V6(net) => net.addr().to_bits(),
    }
}

fn big_endian(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0, |value, byte| value << 8 | u128::from(*byte))
}

// ---- words of eight bytes, and topics with revisions

pub(crate) fn put_words(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_be_bytes).collect()
}

pub(crate) fn take_words(bytes: &[u8], max: usize, item: &'static str) -> Result<Vec<u64>, DecodeError> {
    let (words, remainder) = bytes.as_chunks::<8>();
    if !remainder.is_empty() {
        return Err(DecodeError::Malformed { item });
    }
    if words.len() > max {
        return Err(DecodeError::TooMany { item, found: words.len(), max });
    }
    Ok(words.iter().map(|word| u64::from_be_bytes(*word)).collect())
}

/// Topic hashes, each once: of two entries for one topic nobody could say which counts.
pub(crate) fn take_topics(bytes: &[u8], max: usize, item: &'static str) -> Result<Vec<TopicHash>, DecodeError> {
    let words = take_words(bytes, max, item)?;
    let mut sorted = words.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(DecodeError::Duplicate { item });
    }
    Ok(words.into_iter().map(TopicHash).collect())
}

/// The two fields of a list of (topic, revision): hashes of eight bytes, and revisions as varints.
pub(crate) fn put_revisions(revisions: &[(TopicHash, u64)]) -> (Vec<u8>, Vec<u8>) {
    let mut numbers = Vec::with_capacity(revisions.len() * 4);
    revisions.iter().for_each(|(_, revision)| put_varint(&mut numbers, u128::from(*revision)));
    (put_words(revisions.iter().map(|(topic, _)| topic.0)), numbers)
}

pub(crate) fn take_revisions(
    topics: &[u8],
    revisions: &[u8],
    max: usize,
    item: &'static str,
) -> Result<Vec<(TopicHash, u64)>, DecodeError> {
    let topics = take_topics(topics, max, item)?;
    let revisions = take_numbers(revisions, topics.len(), item)?;
    Ok(topics.into_iter().zip(revisions).collect())
}

/// Exactly `count` varints of at most 64 bits.
pub(crate) fn take_numbers(bytes: &[u8], count: usize, item: &'static str) -> Result<Vec<u64>, DecodeError> {
    if count_varints(bytes) != count {
        return Err(DecodeError::Contradiction { item });
    }
    let mut rest = bytes;
    let mut numbers = Vec::with_capacity(count);
    while !rest.is_empty() {
        numbers.push(take_varint(&mut rest, u64::BITS, item)? as u64);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests;
