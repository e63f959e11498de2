//! Members as fixed-width bytes (deltas: few, in any order) and as gaps between sorted values (snapshots: many).

use std::net::IpAddr;

use groupcast_policy::net::Prefix;

use crate::DecodeError;
use crate::pack::{Form, address_bits, count_varints, prefix, put_varint, take_fixed, take_gap, take_varint};
use crate::wire::Reader;

const ITEM: &str = "members";

/// How a field packs members.
#[derive(Clone, Copy)]
pub(crate) enum Packing {
    Fixed,
    Gaps,
}

/// The packed fields seen so far; they are decoded when all are known, so that the order of fields means nothing.
#[derive(Default)]
pub(crate) struct MemberReader<'a> {
    fields: [Option<(Packing, &'a [u8])>; FORMS.len()],
    count: usize,
}

const FORMS: [Form; 4] = [Form::V4, Form::V6, Form::PrefixesV4, Form::PrefixesV6];

impl<'a> MemberReader<'a> {
    /// Takes one packed field and says how many members it holds.
    pub fn field(&mut self, reader: &mut Reader<'a>, form: Form, packing: Packing, max: usize) -> Result<usize, DecodeError> {
        let bytes = reader.packed(ITEM)?;
        let found = match (packing, form) {
            (Packing::Fixed, form) => bytes.len() / form.item_bytes(),
            (Packing::Gaps, Form::V4 | Form::V6) => count_varints(bytes),
            // A distance and a length, and no length reaches 0x80 (that would be a single IPv6 address).
            (Packing::Gaps, Form::PrefixesV4 | Form::PrefixesV6) => count_varints(bytes) / 2,
        };
        if found > max {
            return Err(DecodeError::TooMany { item: ITEM, found, max });
        }
        if self.fields[form as usize].replace((packing, bytes)).is_some() {
            return Err(DecodeError::Duplicate { item: ITEM });
        }
        self.count += found;
        Ok(found)
    }

    /// IPv4 before IPv6, addresses before prefixes.
    pub fn finish(self) -> Result<Vec<Prefix>, DecodeError> {
        // Exact: a member takes up to eighteen times its bytes on the wire, so doubling would be felt.
        let mut members = Vec::with_capacity(self.count);
        for form in FORMS {
            match self.fields[form as usize] {
                None => {}
                Some((Packing::Fixed, bytes)) => take_fixed(bytes, form, &mut members, ITEM)?,
                Some((Packing::Gaps, bytes)) => take_gaps(bytes, form, &mut members)?,
            }
        }
        Ok(members)
    }
}

fn take_gaps(bytes: &[u8], form: Form, members: &mut Vec<Prefix>) -> Result<(), DecodeError> {
    let mut rest = bytes;
    match form {
        Form::V4 => {
            let mut previous: Option<u32> = None;
            while !rest.is_empty() {
                let bits = take_gap(&mut rest, previous, ITEM)?;
                members.push(Prefix::host(IpAddr::V4(bits.into())));
                previous = Some(bits);
            }
        }
        Form::V6 => {
            let mut previous: Option<u128> = None;
            while !rest.is_empty() {
                let bits = take_gap(&mut rest, previous, ITEM)?;
                members.push(Prefix::host(IpAddr::V6(bits.into())));
                previous = Some(bits);
            }
        }
        Form::PrefixesV4 | Form::PrefixesV6 => {
            let mut previous = None;
            while !rest.is_empty() {
                let member = take_sorted_prefix(&mut rest, previous, form)?;
                members.push(member);
                previous = Some(member);
            }
        }
    }
    Ok(())
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
