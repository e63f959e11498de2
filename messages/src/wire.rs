//! MessagePack maps with single-letter keys, written and read by hand: serde's derive can neither skip defaults and pack addresses
//! in so few bytes, nor be held to the size of its input, nor turn an unknown variant into a value.

use rmp::Marker;
use rmp::decode::{self, NumValueReadError, ValueReadError};
use rmp::encode;

use crate::{DecodeError, SCHEMA_MAJOR};

/// Longest message in bytes; longer ones are refused unread. Below the bus's default limit of 1 MiB, with room for headers.
pub const PAYLOAD_BYTES_MAX: usize = 1_000_000;

/// Key of the schema version. It is always the first key, so that a message of another major is recognised before anything in it
/// is taken for something else.
const VERSION: u8 = b'v';

const FIXMAP_FIELDS_MAX: u16 = 15;

// ---- writing

/// Encodes one message; `fields` adds everything but the version.
pub(crate) fn message(fields: impl FnOnce(&mut Fields)) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    map(&mut out, |all| {
        all.uint(VERSION, u64::from(SCHEMA_MAJOR));
        fields(all);
    });
    out
}

/// Writes a map whose number of fields is known only afterwards, because defaults are left out.
pub(crate) fn map(out: &mut Vec<u8>, fields: impl FnOnce(&mut Fields)) {
    let header = out.len();
    out.push(0);
    let mut written = Fields { out, count: 0 };
    fields(&mut written);
    let count = written.count;
    if count <= FIXMAP_FIELDS_MAX {
        out[header] = Marker::FixMap(count as u8).to_u8();
    } else {
        let [high, low] = count.to_be_bytes();
        out.splice(header..=header, [Marker::Map16.to_u8(), high, low]);
    }
}

/// The fields of one map under construction.
pub(crate) struct Fields<'a> {
    out: &'a mut Vec<u8>,
    count: u16,
}

impl Fields<'_> {
    /// Writes the key; the caller writes exactly one value after it.
    pub fn key(&mut self, key: u8) -> &mut Vec<u8> {
        self.count += 1;
        self.out.extend([Marker::FixStr(1).to_u8(), key]);
        self.out
    }

    pub fn uint(&mut self, key: u8, value: u64) {
        uint(self.key(key), value);
    }

    pub fn uint_unless(&mut self, default: u64, key: u8, value: u64) {
        if value != default {
            self.uint(key, value);
        }
    }

    pub fn flag_unless(&mut self, default: bool, key: u8, value: bool) {
        if value != default {
            let marker = if value { Marker::True } else { Marker::False };
            self.key(key).push(marker.to_u8());
        }
    }

    pub fn text(&mut self, key: u8, value: &str) {
        text(self.key(key), value);
    }

    /// Free text is for people: what exceeds `bytes_max` is cut, because no reader would take the message otherwise.
    pub fn text_cut(&mut self, key: u8, value: &str, bytes_max: usize) {
        let mut end = value.len().min(bytes_max);
        while !value.is_char_boundary(end) {
            end -= 1;
        }
        self.text(key, &value[..end]);
    }

    pub fn optional_text(&mut self, key: u8, value: Option<&str>) {
        if let Some(value) = value {
            self.text(key, value);
        }
    }

    /// Packed items; none are the default.
    pub fn packed(&mut self, key: u8, value: &[u8]) {
        if !value.is_empty() {
            bin(self.key(key), value);
        }
    }

    /// A list; the empty one is the default. `item` writes exactly one value.
    pub fn list<T>(&mut self, key: u8, items: &[T], mut item: impl FnMut(&mut Vec<u8>, &T)) {
        if !items.is_empty() {
            let out = self.key(key);
            array(out, items.len());
            items.iter().for_each(|i| item(out, i));
        }
    }
}

// Writing to a vector cannot fail; the `Result` is that of `std::io::Write`, and there is nothing to do about it.

pub(crate) fn uint(out: &mut Vec<u8>, value: u64) {
    let _ = encode::write_uint(out, value);
}

pub(crate) fn text(out: &mut Vec<u8>, value: &str) {
    let _ = encode::write_str(out, value);
}

pub(crate) fn bin(out: &mut Vec<u8>, value: &[u8]) {
    let _ = encode::write_bin(out, value);
}

pub(crate) fn array(out: &mut Vec<u8>, len: usize) {
    let _ = encode::write_array_len(out, len as u32);
}

// ---- reading

/// Decodes one message; `field` is called for every key but the version and reads or skips exactly one value.
pub(crate) fn read_message<'a>(
    bytes: &'a [u8],
    mut field: impl FnMut(u8, &mut Reader<'a>) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    if bytes.len() > PAYLOAD_BYTES_MAX {
        return Err(DecodeError::Oversized { found: bytes.len() });
    }
    let mut reader = Reader { rest: bytes };
    let mut versioned = false;
    reader.map("message", |key, reader| match key {
        VERSION => {
            let found = reader.uint("schema version")?;
            versioned = true;
            if found == u64::from(SCHEMA_MAJOR) { Ok(()) } else { Err(DecodeError::Version { found }) }
        }
        _ if !versioned => Err(DecodeError::NoVersion),
        key => field(key, reader),
    })?;
    if !versioned {
        return Err(DecodeError::NoVersion);
    }
    if !reader.rest.is_empty() {
        return Err(DecodeError::Trailing { bytes: reader.rest.len() });
    }
    Ok(())
}

/// What a key that is longer than one letter is read as: no field of ours, so it is skipped.
const FOREIGN_KEY: u8 = 0;

pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Calls `field` once per key. A key of ours that stands twice is refused: which one counts would depend on the reader.
    pub fn map(
        &mut self,
        item: &'static str,
        mut field: impl FnMut(u8, &mut Reader<'a>) -> Result<(), DecodeError>,
    ) -> Result<(), DecodeError> {
        let count = decode::read_map_len(&mut self.rest).map_err(|e| value_error(item, e))?;
        let mut seen = 0u128;
        for _ in 0..count {
            let key = match self.text(item, usize::MAX)?.as_bytes() {
                [key] if key.is_ascii_graphic() => *key,
                _ => FOREIGN_KEY,
            };
            if key != FOREIGN_KEY {
                let bit = 1u128 << key;
                if seen & bit != 0 {
                    return Err(DecodeError::Duplicate { item });
                }
                seen |= bit;
            }
            field(key, self)?;
        }
        Ok(())
    }

    pub fn uint(&mut self, item: &'static str) -> Result<u64, DecodeError> {
        decode::read_int(&mut self.rest).map_err(|e| match e {
            NumValueReadError::InvalidMarkerRead(_) | NumValueReadError::InvalidDataRead(_) => DecodeError::Truncated { item },
            NumValueReadError::TypeMismatch(_) | NumValueReadError::OutOfRange => DecodeError::Malformed { item },
        })
    }

    pub fn u32(&mut self, item: &'static str) -> Result<u32, DecodeError> {
        u32::try_from(self.uint(item)?).map_err(|_| DecodeError::Malformed { item })
    }

    pub fn u8(&mut self, item: &'static str) -> Result<u8, DecodeError> {
        u8::try_from(self.uint(item)?).map_err(|_| DecodeError::Malformed { item })
    }

    pub fn flag(&mut self, item: &'static str) -> Result<bool, DecodeError> {
        decode::read_bool(&mut self.rest).map_err(|e| value_error(item, e))
    }

    pub fn text(&mut self, item: &'static str, bytes_max: usize) -> Result<&'a str, DecodeError> {
        let len = decode::read_str_len(&mut self.rest).map_err(|e| value_error(item, e))? as usize;
        let bytes = self.take(item, len)?;
        if len > bytes_max {
            return Err(DecodeError::TooMany { item, found: len, max: bytes_max });
        }
        std::str::from_utf8(bytes).map_err(|_| DecodeError::Malformed { item })
    }

    pub fn packed(&mut self, item: &'static str) -> Result<&'a [u8], DecodeError> {
        let len = decode::read_bin_len(&mut self.rest).map_err(|e| value_error(item, e))? as usize;
        self.take(item, len)
    }

    /// Reads a list; memory is reserved for no more items than the rest of the input can hold.
    pub fn list<T>(
        &mut self,
        item: &'static str,
        max: usize,
        item_bytes_min: usize,
        mut read: impl FnMut(&mut Reader<'a>) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let found = decode::read_array_len(&mut self.rest).map_err(|e| value_error(item, e))? as usize;
        if found > max {
            return Err(DecodeError::TooMany { item, found, max });
        }
        if found.saturating_mul(item_bytes_min) > self.rest.len() {
            return Err(DecodeError::Truncated { item });
        }
        let mut items = Vec::with_capacity(found);
        for _ in 0..found {
            items.push(read(self)?);
        }
        Ok(items)
    }

    /// Skips one value of whatever type: what a newer peer added. A count of what is still open instead of recursion, so that
    /// nesting costs nothing.
    pub fn skip(&mut self) -> Result<(), DecodeError> {
        const ITEM: &str = "unknown field";
        let mut open = 1u64;
        while open > 0 {
            let marker = decode::read_marker(&mut self.rest).map_err(|_| DecodeError::Truncated { item: ITEM })?;
            let (bytes, values) = match marker {
                Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => (0, 0),
                Marker::U8 | Marker::I8 => (1, 0),
                Marker::U16 | Marker::I16 => (2, 0),
                Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
                Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
                Marker::FixStr(len) => (u64::from(len), 0),
                Marker::Str8 | Marker::Bin8 => (self.length(1)?, 0),
                Marker::Str16 | Marker::Bin16 => (self.length(2)?, 0),
                Marker::Str32 | Marker::Bin32 => (self.length(4)?, 0),
                Marker::FixArray(len) => (0, u64::from(len)),
                Marker::Array16 => (0, self.length(2)?),
                Marker::Array32 => (0, self.length(4)?),
                Marker::FixMap(len) => (0, 2 * u64::from(len)),
                Marker::Map16 => (0, 2 * self.length(2)?),
                Marker::Map32 => (0, 2 * self.length(4)?),
                // An extension's payload follows its type byte.
                Marker::FixExt1 => (2, 0),
                Marker::FixExt2 => (3, 0),
                Marker::FixExt4 => (5, 0),
                Marker::FixExt8 => (9, 0),
                Marker::FixExt16 => (17, 0),
                Marker::Ext8 => (1 + self.length(1)?, 0),
                Marker::Ext16 => (1 + self.length(2)?, 0),
                Marker::Ext32 => (1 + self.length(4)?, 0),
                Marker::Reserved => return Err(DecodeError::Malformed { item: ITEM }),
            };
            self.take(ITEM, usize::try_from(bytes).unwrap_or(usize::MAX))?;
            open = open - 1 + values;
            // Every value takes at least a byte.
            if open > self.rest.len() as u64 {
                return Err(DecodeError::Truncated { item: ITEM });
            }
        }
        Ok(())
    }

    fn length(&mut self, bytes: usize) -> Result<u64, DecodeError> {
        let big_endian = self.take("unknown field", bytes)?;
        Ok(big_endian.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn take(&mut self, item: &'static str, len: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(DecodeError::Truncated { item })?;
        self.rest = rest;
        Ok(taken)
    }
}

fn value_error(item: &'static str, error: ValueReadError) -> DecodeError {
    match error {
        ValueReadError::InvalidMarkerRead(_) | ValueReadError::InvalidDataRead(_) => DecodeError::Truncated { item },
        ValueReadError::TypeMismatch(_) => DecodeError::Malformed { item },
    }
}

/// Unwraps a required field.
pub(crate) fn required<T>(value: Option<T>, item: &'static str) -> Result<T, DecodeError> {
    value.ok_or(DecodeError::Missing { item })
}
