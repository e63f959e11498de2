//! One workload on its host: `w` workload, `i` incarnation, `n` network, `a` `A` addresses and `p` `P` prefixes, `s` space, `y` app,
//! `f` phase, `e` enforced directions unless both, `g` groups.

use std::collections::BTreeSet;

use groupcast_policy::doc::{Enforced, Phase, Placement};
use groupcast_policy::ids::{AppId, GroupId, ID_LEN_MAX, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::net::Prefix;

use super::{ID_BYTES_MIN, PLACEMENT_ADDRESSES_MAX, PLACEMENT_GROUPS_MAX};
use crate::DecodeError;
use crate::pack::{Form, Packed, take_fixed};
use crate::wire::{self, Fields, Reader, required};

/// Map header, and `w`, `i` and `n` at their shortest.
pub(crate) const PLACEMENT_BYTES_MIN: usize = 1 + 4 + 3 + 4;

const INGRESS: u64 = 1;
const EGRESS: u64 = 2;
const RUNNING: u64 = 0;
const STAGING: u64 = 1;

pub(crate) fn write_placement(out: &mut Vec<u8>, placement: &Placement) {
    wire::map(out, |fields| {
        fields.text(b'w', placement.workload.as_str());
        fields.uint(b'i', placement.incarnation);
        fields.text(b'n', placement.network.as_str());
        put_addresses(fields, &placement.addresses);
        fields.optional_text(b's', placement.space.as_ref().map(SpaceId::as_str));
        fields.optional_text(b'y', placement.app.as_ref().map(AppId::as_str));
        put_phase(fields, placement.phase);
        let Enforced { ingress, egress } = placement.enforced;
        let enforced = if ingress { INGRESS } else { 0 } | if egress { EGRESS } else { 0 };
        fields.uint_unless(INGRESS | EGRESS, b'e', enforced);
        let groups: Vec<&GroupId> = placement.groups.iter().collect();
        fields.list(b'g', &groups, |out, group| wire::text(out, group.as_str()));
    });
}

pub(crate) fn put_phase(fields: &mut Fields, phase: Phase) {
    fields.uint_unless(
        RUNNING,
        b'f',
        match phase {
            Phase::Running => RUNNING,
            Phase::Staging => STAGING,
        },
    );
}

pub(crate) fn read_phase(reader: &mut Reader) -> Result<Phase, DecodeError> {
    match reader.uint("phase")? {
        RUNNING => Ok(Phase::Running),
        STAGING => Ok(Phase::Staging),
        found => Err(DecodeError::Unknown { item: "phase", found }),
    }
}

pub(crate) fn put_addresses(fields: &mut Fields, addresses: &BTreeSet<Prefix>) {
    super::write_members(fields, *b"aApP", &Packed::fixed(addresses));
}

/// Takes one of the four fields of a workload's addresses.
pub(crate) fn read_addresses(key: u8, reader: &mut Reader, addresses: &mut BTreeSet<Prefix>) -> Result<(), DecodeError> {
    const ITEM: &str = "addresses";
    let form = match key {
        b'a' => Form::V4,
        b'A' => Form::V6,
        b'p' => Form::PrefixesV4,
        _ => Form::PrefixesV6,
    };
    let bytes = reader.packed(ITEM)?;
    let found = addresses.len() + bytes.len() / form.item_bytes();
    if found > PLACEMENT_ADDRESSES_MAX {
        return Err(DecodeError::TooMany { item: ITEM, found, max: PLACEMENT_ADDRESSES_MAX });
    }
    let mut read = Vec::new();
    take_fixed(bytes, form, &mut read, ITEM)?;
    if read.into_iter().all(|address| addresses.insert(address)) { Ok(()) } else { Err(DecodeError::Duplicate { item: ITEM }) }
}

pub(crate) fn read_placement(reader: &mut Reader) -> Result<Placement, DecodeError> {
    let (mut workload, mut incarnation, mut network, mut space, mut app) = (None, None, None, None, None);
    let (mut addresses, mut groups) = (BTreeSet::new(), BTreeSet::new());
    let (mut phase, mut enforced) = (Phase::Running, Enforced::BOTH);
    reader.map("placement", |key, reader| {
        match key {
            b'w' => workload = Some(WorkloadId::new(reader.text("workload", ID_LEN_MAX)?)?),
            b'i' => incarnation = Some(reader.uint("incarnation")?),
            b'n' => network = Some(NetworkId::new(reader.text("network", ID_LEN_MAX)?)?),
            b'a' | b'A' | b'p' | b'P' => read_addresses(key, reader, &mut addresses)?,
            b's' => space = Some(SpaceId::new(reader.text("space", ID_LEN_MAX)?)?),
            b'y' => app = Some(AppId::new(reader.text("app", ID_LEN_MAX)?)?),
            b'f' => phase = read_phase(reader)?,
            b'e' => {
                let bits = reader.uint("enforced directions")?;
                if bits > (INGRESS | EGRESS) {
                    return Err(DecodeError::Unknown { item: "enforced directions", found: bits });
                }
                enforced = Enforced { ingress: bits & INGRESS != 0, egress: bits & EGRESS != 0 };
            }
            b'g' => {
                let read = reader.list("groups", PLACEMENT_GROUPS_MAX, ID_BYTES_MIN, |reader| {
                    Ok(GroupId::new(reader.text("group", ID_LEN_MAX)?)?)
                })?;
                if !read.into_iter().all(|group| groups.insert(group)) {
                    return Err(DecodeError::Duplicate { item: "group" });
                }
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(Placement {
        workload: required(workload, "workload")?,
        incarnation: required(incarnation, "incarnation")?,
        network: required(network, "network")?,
        addresses,
        space,
        app,
        phase,
        enforced,
        groups,
    })
}
