//! Members as fixed-width bytes (deltas: few, in any order) and as gaps between sorted values (snapshots: many).

use std::net::IpAddr;

use groupcast_policy::net::Prefix;

use crate::DecodeError;
use crate::pack::{Form, address_bits, count_varints, prefix, put_varint, take_fixed, take_gap, take_varint};
use crate::wire::Reader;

const ITEM: &str = "members";

/// Members read so far.
#[derive(Default)]
pub(crate) struct MemberReader(Vec<Prefix>);

impl MemberReader {
    /// Reads one packed field and says how many members it held.
    pub fn fixed(&mut self, reader: &mut Reader, form: Form, max: usize) -> Result<usize, DecodeError> {
        let bytes = reader.packed(ITEM)?;
        let found = bytes.len() / form.item_bytes();
        self.bounded(found, max)?;
        take_fixed(bytes, form, &mut self.0, ITEM)?;
        Ok(found)
    }

    pub fn gaps(&mut self, reader: &mut Reader, form: Form, max: usize) -> Result<usize, DecodeError> {
        let bytes = reader.packed(ITEM)?;
        let found = match form {
            Form::V4 | Form::V6 => count_varints(bytes),
            // A distance and a length, and no length reaches 0x80 (that would be a single IPv6 address).
            Form::PrefixesV4 | Form::PrefixesV6 => count_varints(bytes) / 2,
        };
        self.bounded(found, max)?;
        let mut rest = bytes;
        match form {
            Form::V4 => {
                let mut previous = None;
                while !rest.is_empty() {
                    let bits: u32 = take_gap(&mut rest, previous, ITEM)?;
                    self.0.push(Prefix::host(IpAddr::V4(bits.into())));
                    previous = Some(bits);
                }
            }
            Form::V6 => {
                let mut previous = None;
                while !rest.is_empty() {
                    let bits: u128 = take_gap(&mut rest, previous, ITEM)?;
                    self.0.push(Prefix::host(IpAddr::V6(bits.into())));
                    previous = Some(bits);
                }
            }
            Form::PrefixesV4 | Form::PrefixesV6 => {
                let mut previous = None;
                while !rest.is_empty() {
                    let member = take_sorted_prefix(&mut rest, previous, form)?;
                    self.0.push(member);
                    previous = Some(member);
                }
            }
        }
        Ok(found)
    }

    pub fn into_members(self) -> Vec<Prefix> {
        self.0
    }

    fn bounded(&mut self, found: usize, max: usize) -> Result<(), DecodeError> {
        if found > max {
            return Err(DecodeError::TooMany { item: ITEM, found, max });
        }
        // Exact: a member takes up to eighteen times its bytes on the wire, so doubling would be felt.
        self.0.reserve_exact(found);
        Ok(())
    }
}

/// Appends a prefix of one family; they come by address, then by length.
pub(crate) fn put_sorted_prefix(out: &mut Vec<u8>, previous: Option<&Prefix>, member: &Prefix) {
    put_varint(out, address_bits(member) - previous.map_or(0, address_bits));
    out.push(member.len());
}

fn take_sorted_prefix(rest: &mut &[u8], previous: Option<Prefix>, form: Form) -> Result<Prefix, DecodeError> {
    let malformed = DecodeError::Malformed { item: ITEM };
    let width = if form == Form::PrefixesV4 { u32::BITS } else { u128::BITS };
    let gap = take_varint(rest, width, ITEM)?;
    let (&len, tail) = rest.split_first().ok_or(DecodeError::Truncated { item: ITEM })?;
    *rest = tail;
    let base = previous.map_or(0, |p| address_bits(&p));
    let member = base.checked_add(gap).and_then(|bits| prefix(bits, len, form)).ok_or_else(|| malformed.clone())?;
    match previous {
        Some(previous) if gap == 0 && member.len() <= previous.len() => Err(malformed),
        _ => Ok(member),
    }
}
