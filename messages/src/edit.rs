//! An edit's fields, shared by deltas (where the topic says the kind) and by the parts of snapshots (where the edit says it itself).
//!
//! | kind | fields |
//! |---|---|
//! | scope | `g` groups put, `h` their phases, a byte each, unless all are both; `G` groups removed |
//! | host | `w` placements put; `W` workloads removed |
//! | rules | `f` stateful; `u` rules put; `U` keys removed |
//! | members | added: `a` `A` addresses, `p` `P` prefixes; removed: `r` `R` addresses, `q` `Q` prefixes (IPv4, IPv6 each) |
//! | members, sorted | added: `i` `I` addresses, `j` `J` prefixes, as gaps |
//! | any | `x` the document is gone (1) or must be fetched (2) |
//!
//! No letter is used by two kinds, so an edit of the wrong kind is recognised and does not pass for an empty one.

mod members;
mod placement;
mod rule;

use groupcast_policy::doc::{Edit, Phases, RuleKey};
use groupcast_policy::ids::{GroupId, ID_LEN_MAX, WorkloadId};
use groupcast_policy::topic::Topic;

pub(crate) use members::put_sorted_prefix;
pub(crate) use placement::{put_addresses, put_phase, read_addresses, read_phase, write_placement};
pub(crate) use rule::write_rule;

use self::members::{MemberReader, Packing};
use crate::DecodeError;
use crate::pack::{Form, Packed, put_words, take_words};
use crate::wire::{self, Fields, Reader};

/// Most items one edit touches: a larger change of a document is sent as [`Edit::Reset`], a larger document in several parts.
pub const EDIT_ITEMS_MAX: usize = 200_000;
/// Most groups bound to one workload directly.
pub const PLACEMENT_GROUPS_MAX: usize = 256;
/// Most addresses and prefixes of one workload.
pub const PLACEMENT_ADDRESSES_MAX: usize = 256;
/// Most port ranges of one rule.
pub const RULE_PORT_SPANS_MAX: usize = 1024;
/// Most address ranges of one rule, per family.
pub const RULE_ADDRESS_SPANS_MAX: usize = 1024;

/// A text of one character: its header and it.
pub(crate) const ID_BYTES_MIN: usize = 2;

const RETIRE: u64 = 1;
const RESET: u64 = 2;

/// Which of the four documents an edit is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Scope = 1,
    Host = 2,
    Rules = 3,
    Members = 4,
}

impl Kind {
    pub fn of(topic: &Topic) -> Self {
        match topic {
            Topic::Scope(_) => Kind::Scope,
            Topic::Host(_) => Kind::Host,
            Topic::Rules(_) => Kind::Rules,
            Topic::Members(_) => Kind::Members,
        }
    }

    pub fn read(number: u64) -> Result<Self, DecodeError> {
        [Kind::Scope, Kind::Host, Kind::Rules, Kind::Members]
            .into_iter()
            .find(|kind| *kind as u64 == number)
            .ok_or(DecodeError::Unknown { item: "edit", found: number })
    }

    /// `None` for edits that fit every topic.
    pub fn of_edit(edit: &Edit) -> Option<Self> {
        match edit {
            Edit::Scope { .. } => Some(Kind::Scope),
            Edit::Host { .. } => Some(Kind::Host),
            Edit::Rules { .. } => Some(Kind::Rules),
            Edit::Members { .. } => Some(Kind::Members),
            Edit::Retire | Edit::Reset => None,
        }
    }
}

// ---- writing

pub(crate) fn write_edit(fields: &mut Fields, edit: &Edit) {
    match edit {
        Edit::Scope { put, remove } => {
            write_scope(fields, put);
            fields.list(b'G', remove, |out, group| wire::text(out, group.as_str()));
        }
        Edit::Host { put, remove } => {
            fields.list(b'w', put, write_placement);
            fields.list(b'W', remove, |out, workload| wire::text(out, workload.as_str()));
        }
        Edit::Rules { stateful, put, remove } => {
            if let Some(stateful) = *stateful {
                write_stateful(fields, stateful);
            }
            fields.list(b'u', put, write_rule);
            fields.packed(b'U', &put_words(remove.iter().map(|key| key.0)));
        }
        Edit::Members { add, remove } => {
            write_members(fields, *b"aApP", &Packed::fixed(add));
            write_members(fields, *b"rRqQ", &Packed::fixed(remove));
        }
        Edit::Retire => fields.uint(b'x', RETIRE),
        Edit::Reset => fields.uint(b'x', RESET),
    }
}

pub(crate) fn write_stateful(fields: &mut Fields, stateful: bool) {
    // Written whenever it is given: neither value is a default.
    fields.flag_unless(!stateful, b'f', stateful);
}

pub(crate) fn write_scope(fields: &mut Fields, put: &[(GroupId, Phases)]) {
    fields.list(b'g', put, |out, (group, _)| wire::text(out, group.as_str()));
    if put.iter().any(|(_, phases)| *phases != Phases::BOTH) {
        let bits: Vec<u8> = put.iter().map(|(_, phases)| phases.bits()).collect();
        fields.packed(b'h', &bits);
    }
}

fn write_members(fields: &mut Fields, keys: [u8; 4], packed: &Packed) {
    let [v4, v6, prefixes_v4, prefixes_v6] = keys;
    fields.packed(v4, &packed.v4);
    fields.packed(v6, &packed.v6);
    fields.packed(prefixes_v4, &packed.prefixes_v4);
    fields.packed(prefixes_v6, &packed.prefixes_v6);
}

// ---- reading

/// Collects an edit's fields while the map they stand in is read. That no item is named twice is checked where the edit is applied: the
/// document sorts the keys anyway.
#[derive(Default)]
pub(crate) struct EditReader<'a> {
    special: Option<u64>,
    /// The kind whose fields were seen first.
    kind: Option<Kind>,
    groups: Vec<GroupId>,
    phases: Option<Vec<u8>>,
    groups_removed: Vec<GroupId>,
    placements: Vec<groupcast_policy::doc::Placement>,
    workloads_removed: Vec<WorkloadId>,
    stateful: Option<bool>,
    rules: Vec<groupcast_policy::rule::Rule>,
    rules_removed: Vec<RuleKey>,
    members: MemberReader<'a>,
    members_removed: MemberReader<'a>,
    items: usize,
}

impl<'a> EditReader<'a> {
    /// Takes the field if it is one of an edit, skips it otherwise.
    pub fn field(&mut self, key: u8, reader: &mut Reader<'a>) -> Result<(), DecodeError> {
        let kind = match key {
            b'x' => {
                self.special = Some(reader.uint("edit")?);
                return Ok(());
            }
            b'g' | b'h' | b'G' => Kind::Scope,
            b'w' | b'W' => Kind::Host,
            b'f' | b'u' | b'U' => Kind::Rules,
            b'a' | b'A' | b'p' | b'P' | b'r' | b'R' | b'q' | b'Q' | b'i' | b'I' | b'j' | b'J' => Kind::Members,
            _ => return reader.skip(),
        };
        if self.kind.is_some_and(|seen| seen != kind) {
            return Err(DecodeError::Contradiction { item: "edit" });
        }
        self.kind = Some(kind);
        let max = EDIT_ITEMS_MAX - self.items;
        self.items += match key {
            b'g' => {
                self.groups = read_groups(reader, max)?;
                self.groups.len()
            }
            b'h' => {
                self.phases = Some(reader.packed("phases")?.to_vec());
                0
            }
            b'G' => {
                self.groups_removed = read_groups(reader, max)?;
                self.groups_removed.len()
            }
            b'w' => {
                self.placements = reader.list("placements", max, placement::PLACEMENT_BYTES_MIN, placement::read_placement)?;
                self.placements.len()
            }
            b'W' => {
                self.workloads_removed = reader
                    .list("workloads", max, ID_BYTES_MIN, |reader| Ok(WorkloadId::new(reader.text("workload", ID_LEN_MAX)?)?))?;
                self.workloads_removed.len()
            }
            b'f' => {
                self.stateful = Some(reader.flag("stateful")?);
                0
            }
            b'u' => {
                self.rules = reader.list("rules", max, rule::RULE_BYTES_MIN, rule::read_rule)?;
                self.rules.len()
            }
            b'U' => {
                self.rules_removed =
                    take_words(reader.packed("rule keys")?, max, "rule keys")?.into_iter().map(RuleKey).collect();
                self.rules_removed.len()
            }
            key => {
                let (form, packing, members) = match key {
                    b'a' => (Form::V4, Packing::Fixed, &mut self.members),
                    b'A' => (Form::V6, Packing::Fixed, &mut self.members),
                    b'p' => (Form::PrefixesV4, Packing::Fixed, &mut self.members),
                    b'P' => (Form::PrefixesV6, Packing::Fixed, &mut self.members),
                    b'r' => (Form::V4, Packing::Fixed, &mut self.members_removed),
                    b'R' => (Form::V6, Packing::Fixed, &mut self.members_removed),
                    b'q' => (Form::PrefixesV4, Packing::Fixed, &mut self.members_removed),
                    b'Q' => (Form::PrefixesV6, Packing::Fixed, &mut self.members_removed),
                    b'i' => (Form::V4, Packing::Gaps, &mut self.members),
                    b'I' => (Form::V6, Packing::Gaps, &mut self.members),
                    b'j' => (Form::PrefixesV4, Packing::Gaps, &mut self.members),
                    _ => (Form::PrefixesV6, Packing::Gaps, &mut self.members),
                };
                members.field(reader, form, packing, max)?
            }
        };
        Ok(())
    }

    /// The edit of the given kind; `None` stands for one that fits every topic.
    pub fn finish(self, kind: Option<Kind>) -> Result<Edit, DecodeError> {
        if let Some(special) = self.special {
            if self.kind.is_some() {
                return Err(DecodeError::Contradiction { item: "edit" });
            }
            return match special {
                RETIRE => Ok(Edit::Retire),
                RESET => Ok(Edit::Reset),
                found => Err(DecodeError::Unknown { item: "edit", found }),
            };
        }
        let kind = wire::required(kind, "edit")?;
        if self.kind.is_some_and(|seen| seen != kind) {
            return Err(DecodeError::Contradiction { item: "edit" });
        }
        Ok(match kind {
            Kind::Scope => Edit::Scope { put: with_phases(self.groups, self.phases)?, remove: self.groups_removed },
            Kind::Host => Edit::Host { put: self.placements, remove: self.workloads_removed },
            Kind::Rules => Edit::Rules { stateful: self.stateful, put: self.rules, remove: self.rules_removed },
            Kind::Members => Edit::Members { add: self.members.finish()?, remove: self.members_removed.finish()? },
        })
    }
}

fn read_groups(reader: &mut Reader, max: usize) -> Result<Vec<GroupId>, DecodeError> {
    reader.list("groups", max, ID_BYTES_MIN, |reader| Ok(GroupId::new(reader.text("group", ID_LEN_MAX)?)?))
}

fn with_phases(groups: Vec<GroupId>, phases: Option<Vec<u8>>) -> Result<Vec<(GroupId, Phases)>, DecodeError> {
    let Some(phases) = phases else { return Ok(groups.into_iter().map(|group| (group, Phases::BOTH)).collect()) };
    if phases.len() != groups.len() {
        return Err(DecodeError::Contradiction { item: "phases" });
    }
    let phase = |bits: u8| Phases::from_bits(bits).ok_or(DecodeError::Unknown { item: "phases", found: u64::from(bits) });
    groups.into_iter().zip(phases).map(|(group, bits)| Ok((group, phase(bits)?))).collect()
}

// ---- limits

/// Whether readers would accept the edit's sizes: what a writer asks before it publishes, to refuse a change by name instead of
/// having every reader refuse it.
pub fn check_edit(edit: &Edit) -> Result<(), DecodeError> {
    let bound = |item, found, max| if found > max { Err(DecodeError::TooMany { item, found, max }) } else { Ok(()) };
    bound("items", edit.len(), EDIT_ITEMS_MAX)?;
    match edit {
        Edit::Host { put, .. } => put.iter().try_for_each(|placement| {
            bound("groups", placement.groups.len(), PLACEMENT_GROUPS_MAX)?;
            bound("addresses", placement.addresses.len(), PLACEMENT_ADDRESSES_MAX)
        }),
        Edit::Rules { put, .. } => put.iter().try_for_each(|rule| rule::check_rule(rule, bound)),
        Edit::Scope { .. } | Edit::Members { .. } | Edit::Retire | Edit::Reset => Ok(()),
    }
}
