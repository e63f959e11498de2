//! Sets and maps as the kernel defines them, their elements, and both back.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_enforce::interface::{Claim, Interface};
use groupcast_enforce::table::{Data, Elements, Key, SEEN_MAX, SEEN_SECONDS, SetKind};
use groupcast_policy::doc::V4Addresses;
use groupcast_policy::net::Span;

use super::expressions::{read_verdict, write_verdict};
use super::wire::{Attributes, Writer};

const FLAG_INTERVAL: u32 = 4;
const FLAG_MAP: u32 = 8;
const FLAG_TIMEOUT: u32 = 0x10;
const FLAG_DYNAMIC: u32 = 0x20;
const FLAG_CONCAT: u32 = 0x80;

// What `nft list` shows a key as; the kernel itself looks at lengths only.
const TYPE_V4: u32 = 7;
const TYPE_V6: u32 = 8;
const TYPE_PORT: u32 = 13;
const TYPE_MARK: u32 = 19;
const TYPE_INDEX: u32 = 20;
const TYPE_NUMBER: u32 = 22;
const TYPE_INTERFACE: u32 = 41;
const TYPE_VERDICT: u32 = 0xffff_ff00;

const fn concatenated(first: u32, second: u32) -> u32 {
    first << 6 | second
}

struct Definition {
    flags: u32,
    key_type: u32,
    /// The lengths of the key's parts.
    parts: &'static [u32],
    data: Option<(u32, u32)>,
}

pub const KINDS: [SetKind; 20] = [
    SetKind::V4,
    SetKind::V6,
    SetKind::Spans4,
    SetKind::Spans6,
    SetKind::Ports,
    SetKind::Claims,
    SetKind::Interfaces,
    SetKind::Indexes,
    SetKind::InterfaceV4,
    SetKind::InterfaceV6,
    SetKind::SameV4,
    SetKind::SameV6,
    SetKind::InterfaceSpan4,
    SetKind::InterfaceSpan6,
    SetKind::InterfaceToNumber,
    SetKind::InterfaceV4ToNumber,
    SetKind::InterfaceV6ToNumber,
    SetKind::NumberToVerdict,
    SetKind::MarkToVerdict,
    SetKind::Seen,
];

fn definition(kind: SetKind) -> Definition {
    let plain = |key_type, parts| Definition { flags: 0, key_type, parts, data: None };
    let with_v4 = concatenated(TYPE_INTERFACE, TYPE_V4);
    let with_v6 = concatenated(TYPE_INTERFACE, TYPE_V6);
    let number = Some((TYPE_NUMBER, 4));
    let verdict = Some((TYPE_VERDICT, 0));
    match kind {
        SetKind::V4 => plain(TYPE_V4, &[4]),
        SetKind::V6 => plain(TYPE_V6, &[16]),
        SetKind::Spans4 => Definition { flags: FLAG_INTERVAL, ..plain(TYPE_V4, &[4]) },
        SetKind::Spans6 => Definition { flags: FLAG_INTERVAL, ..plain(TYPE_V6, &[16]) },
        SetKind::Ports => Definition { flags: FLAG_INTERVAL, ..plain(TYPE_PORT, &[2]) },
        SetKind::Claims => Definition { flags: FLAG_INTERVAL, ..plain(TYPE_INTERFACE, &[16]) },
        SetKind::Interfaces => plain(TYPE_INTERFACE, &[16]),
        SetKind::Indexes => plain(TYPE_INDEX, &[4]),
        SetKind::InterfaceV4 => plain(with_v4, &[16, 4]),
        SetKind::InterfaceV6 => plain(with_v6, &[16, 16]),
        SetKind::SameV4 => plain(concatenated(TYPE_V4, TYPE_V4), &[4, 4]),
        SetKind::SameV6 => plain(concatenated(TYPE_V6, TYPE_V6), &[16, 16]),
        SetKind::InterfaceSpan4 => Definition { flags: FLAG_INTERVAL | FLAG_CONCAT, ..plain(with_v4, &[16, 4]) },
        SetKind::InterfaceSpan6 => Definition { flags: FLAG_INTERVAL | FLAG_CONCAT, ..plain(with_v6, &[16, 16]) },
        SetKind::InterfaceToNumber => Definition { flags: FLAG_MAP, data: number, ..plain(TYPE_INTERFACE, &[16]) },
        SetKind::InterfaceV4ToNumber => Definition { flags: FLAG_MAP, data: number, ..plain(with_v4, &[16, 4]) },
        SetKind::InterfaceV6ToNumber => Definition { flags: FLAG_MAP, data: number, ..plain(with_v6, &[16, 16]) },
        SetKind::NumberToVerdict => Definition { flags: FLAG_MAP, data: verdict, ..plain(TYPE_NUMBER, &[4]) },
        SetKind::MarkToVerdict => Definition { flags: FLAG_MAP, data: verdict, ..plain(TYPE_MARK, &[4]) },
        SetKind::Seen => {
            Definition { flags: FLAG_TIMEOUT | FLAG_DYNAMIC, ..plain(concatenated(TYPE_INTERFACE, TYPE_MARK), &[16, 4]) }
        }
    }
}

pub fn write_definition(writer: &mut Writer, table: &str, name: &str, kind: SetKind, id: u32) {
    let definition = definition(kind);
    writer.text(1, table).text(2, name).u32(3, definition.flags).u32(4, definition.key_type);
    writer.u32(5, definition.parts.iter().sum());
    if let Some((data_type, length)) = definition.data {
        writer.u32(6, data_type).u32(7, length);
    }
    if definition.flags & FLAG_CONCAT != 0 {
        writer.nest(9, |description| {
            description.nest(2, |parts| {
                for length in definition.parts {
                    parts.nest(1, |part| _ = part.u32(1, *length));
                }
            });
        });
    }
    if kind == SetKind::MarkToVerdict {
        // Told how few there will be, the kernel takes a plain table: every packet looks into it.
        const STAMPS: u32 = 4;
        writer.nest(9, |description| _ = description.u32(1, STAMPS));
    }
    if kind == SetKind::Seen {
        writer.nest(9, |description| _ = description.u32(1, SEEN_MAX));
        writer.u64(11, u64::from(SEEN_SECONDS) * 1000);
    }
    writer.u32(10, id);
}

/// `None`: none of ours.
pub fn read_kind(set: Attributes<'_>) -> Option<SetKind> {
    let (flags, key_type) = (set.u32(3).unwrap_or_default(), set.u32(4)?);
    let data_type = set.u32(6);
    KINDS.into_iter().find(|kind| {
        let definition = definition(*kind);
        (definition.flags, definition.key_type) == (flags, key_type) && definition.data.map(|(of, _)| of) == data_type
    })
}

/// Whether the kernel keeps such a set in a hash table that grows; the set that it fills by itself is nobody's to compare.
pub fn is_hashed(kind: SetKind) -> bool {
    definition(kind).flags & (FLAG_INTERVAL | FLAG_DYNAMIC) == 0
}

/// One element as the kernel holds it. A range in a set of ranges is two of them: where it begins and, as `end`, what comes after it.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WireElement {
    key: Vec<u8>,
    key_end: Option<Vec<u8>>,
    end: bool,
    data: Option<Data>,
}

const ELEMENT_END: u32 = 1;

impl WireElement {
    pub fn write(&self, writer: &mut Writer) {
        writer.nest(1, |element| {
            if self.end {
                element.u32(3, ELEMENT_END);
            }
            element.nest(1, |key| _ = key.put(1, &self.key));
            if let Some(end) = &self.key_end {
                element.nest(10, |key| _ = key.put(1, end));
            }
            match &self.data {
                None | Some(Data::Nothing) => {}
                Some(Data::Number(number)) => _ = element.nest(2, |data| _ = data.put(1, &number.to_ne_bytes())),
                Some(Data::Verdict(verdict)) => write_verdict(element, 2, verdict),
            }
        });
    }

    pub fn read(element: Attributes<'_>) -> Option<Self> {
        let data = element.nested(2);
        let data = match (data.find(1), data.find(2)) {
            (Some(number), _) => Some(Data::Number(u32::from_ne_bytes(*number.first_chunk()?))),
            (None, Some(_)) => Some(Data::Verdict(read_verdict(data)?)),
            (None, None) => None,
        };
        Some(Self {
            key: element.nested(1).find(1)?.to_vec(),
            key_end: element.nested(10).find(1).map(<[u8]>::to_vec),
            end: element.u32(3).unwrap_or_default() & ELEMENT_END != 0,
            data,
        })
    }

    /// At most this many bytes.
    pub fn room(&self) -> usize {
        const HEADERS: usize = 64;
        const CHAIN_NAME_BYTES_MAX: usize = 256;
        let verdict = if matches!(self.data, Some(Data::Verdict(_))) { CHAIN_NAME_BYTES_MAX } else { 0 };
        HEADERS + self.key.len() + self.key_end.as_ref().map_or(0, Vec::len) + verdict
    }
}

/// `None` after the last number there is.
fn successor(key: &[u8]) -> Option<Vec<u8>> {
    let mut next = key.to_vec();
    for byte in next.iter_mut().rev() {
        let (sum, carry) = byte.overflowing_add(1);
        *byte = sum;
        if !carry {
            return Some(next);
        }
    }
    None
}

fn predecessor(key: &[u8]) -> Vec<u8> {
    let mut before = key.to_vec();
    for byte in before.iter_mut().rev() {
        let (difference, borrow) = byte.overflowing_sub(1);
        *byte = difference;
        if !borrow {
            break;
        }
    }
    before
}

fn range(first: &[u8], last: &[u8], out: &mut Vec<WireElement>) {
    out.push(WireElement { key: first.to_vec(), ..WireElement::default() });
    if let Some(after) = successor(last) {
        out.push(WireElement { key: after, end: true, ..WireElement::default() });
    }
}

pub fn to_wire(elements: &Elements) -> Vec<WireElement> {
    let single = |key: Vec<u8>| WireElement { key, ..WireElement::default() };
    let mut out = Vec::with_capacity(elements.len());
    match elements {
        Elements::V4(set) => out.extend(set.iter().map(|a| single(a.to_be_bytes().to_vec()))),
        Elements::V6(set) => out.extend(set.iter().map(|a| single(a.to_be_bytes().to_vec()))),
        Elements::Spans4(set) => set.iter().for_each(|s| range(&s.first().to_be_bytes(), &s.last().to_be_bytes(), &mut out)),
        Elements::Spans6(set) => set.iter().for_each(|s| range(&s.first().to_be_bytes(), &s.last().to_be_bytes(), &mut out)),
        Elements::Ports(set) => set.iter().for_each(|s| range(&s.first().to_be_bytes(), &s.last().to_be_bytes(), &mut out)),
        Elements::Keyed(map) => {
            for (key, data) in map {
                let with = |interface: &Interface, address: &[u8]| [&interface.bytes()[..], address].concat();
                let mut element = WireElement { data: Some(data.clone()), ..WireElement::default() };
                match key {
                    Key::Claim(claim) => {
                        let (first, last) = claim.span();
                        range(&first, &last, &mut out);
                        continue;
                    }
                    Key::Interface(interface) => element.key = interface.bytes().to_vec(),
                    Key::InterfaceV4(interface, address) => element.key = with(interface, &address.to_be_bytes()),
                    Key::InterfaceV6(interface, address) => element.key = with(interface, &address.to_be_bytes()),
                    Key::SameV4(address) => element.key = address.to_be_bytes().repeat(2),
                    Key::SameV6(address) => element.key = address.to_be_bytes().repeat(2),
                    Key::InterfaceSpan4(interface, span) => {
                        element.key = with(interface, &span.first().to_be_bytes());
                        element.key_end = Some(with(interface, &span.last().to_be_bytes()));
                    }
                    Key::InterfaceSpan6(interface, span) => {
                        element.key = with(interface, &span.first().to_be_bytes());
                        element.key_end = Some(with(interface, &span.last().to_be_bytes()));
                    }
                    Key::Number(number) => element.key = number.to_ne_bytes().to_vec(),
                }
                out.push(element);
            }
        }
    }
    out
}

/// Ranges out of their ends, first and last.
fn ranges(elements: &[WireElement]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut marks: Vec<(&[u8], bool)> = elements.iter().map(|element| (&element.key[..], !element.end)).collect();
    // Where one ends and the next begins at once, the end comes first.
    marks.sort();
    let mut ranges = Vec::new();
    let mut open: Option<&[u8]> = None;
    for (key, begins) in marks {
        if let Some(first) = open.take() {
            ranges.push((first.to_vec(), predecessor(key)));
        }
        if begins {
            open = Some(key);
        }
    }
    if let Some(first) = open {
        ranges.push((first.to_vec(), vec![0xff; first.len()]));
    }
    ranges
}

fn interface(bytes: &[u8]) -> Option<Interface> {
    if bytes.iter().all(|byte| *byte == 0) { Some(Interface::NONE) } else { Interface::from_bytes(bytes) }
}

fn number<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    bytes.first_chunk().copied()
}

/// An address beside itself; `None`: two that differ.
fn same(key: &[u8]) -> Option<Key> {
    let (first, second) = key.split_at_checked(key.len() / 2)?;
    match (first == second, first.len()) {
        (true, 4) => Some(Key::SameV4(u32::from_be_bytes(number(first)?))),
        (true, 16) => Some(Key::SameV6(u128::from_be_bytes(number(first)?))),
        _ => None,
    }
}

/// `None`: elements that are none of ours.
pub fn from_wire(kind: SetKind, elements: &[WireElement]) -> Option<Elements> {
    let split = |key: &[u8]| -> Option<(Interface, Vec<u8>)> {
        let (name, address) = key.split_at_checked(16)?;
        Some((interface(name)?, address.to_vec()))
    };
    let span4 =
        |(first, last): (Vec<u8>, Vec<u8>)| Span::new(u32::from_be_bytes(number(&first)?), u32::from_be_bytes(number(&last)?));
    let span6 =
        |(first, last): (Vec<u8>, Vec<u8>)| Span::new(u128::from_be_bytes(number(&first)?), u128::from_be_bytes(number(&last)?));
    Some(match kind {
        SetKind::V4 => {
            Elements::V4(elements.iter().map(|e| Some(u32::from_be_bytes(number(&e.key)?))).collect::<Option<V4Addresses>>()?)
        }
        SetKind::V6 => {
            Elements::V6(elements.iter().map(|e| Some(u128::from_be_bytes(number(&e.key)?))).collect::<Option<BTreeSet<_>>>()?)
        }
        SetKind::Spans4 => Elements::Spans4(ranges(elements).into_iter().map(span4).collect::<Option<_>>()?),
        SetKind::Spans6 => Elements::Spans6(ranges(elements).into_iter().map(span6).collect::<Option<_>>()?),
        SetKind::Ports => {
            let span = |(first, last): (Vec<u8>, Vec<u8>)| {
                Span::new(u16::from_be_bytes(number(&first)?), u16::from_be_bytes(number(&last)?))
            };
            Elements::Ports(ranges(elements).into_iter().map(span).collect::<Option<_>>()?)
        }
        SetKind::Claims => {
            let claim = |(first, last): (Vec<u8>, Vec<u8>)| Some((Key::Claim(Claim::from_span(&first, &last)?), Data::Nothing));
            Elements::Keyed(ranges(elements).into_iter().map(claim).collect::<Option<_>>()?)
        }
        // What the kernel fills by itself is not compared.
        SetKind::Seen => Elements::Keyed(BTreeMap::new()),
        _ => {
            let read = |element: &WireElement| -> Option<(Key, Data)> {
                let key = match kind {
                    SetKind::Interfaces | SetKind::InterfaceToNumber => Key::Interface(interface(&element.key)?),
                    SetKind::InterfaceV4 | SetKind::InterfaceV4ToNumber => {
                        let (name, address) = split(&element.key)?;
                        Key::InterfaceV4(name, u32::from_be_bytes(number(&address)?))
                    }
                    SetKind::InterfaceV6 | SetKind::InterfaceV6ToNumber => {
                        let (name, address) = split(&element.key)?;
                        Key::InterfaceV6(name, u128::from_be_bytes(number(&address)?))
                    }
                    SetKind::SameV4 | SetKind::SameV6 => same(&element.key)?,
                    SetKind::InterfaceSpan4 => {
                        let ((name, first), (_, last)) = (split(&element.key)?, split(element.key_end.as_ref()?)?);
                        Key::InterfaceSpan4(name, span4((first, last))?)
                    }
                    SetKind::InterfaceSpan6 => {
                        let ((name, first), (_, last)) = (split(&element.key)?, split(element.key_end.as_ref()?)?);
                        Key::InterfaceSpan6(name, span6((first, last))?)
                    }
                    _ => Key::Number(u32::from_ne_bytes(number(&element.key)?)),
                };
                Some((key, element.data.clone().unwrap_or(Data::Nothing)))
            };
            Elements::Keyed(elements.iter().map(read).collect::<Option<_>>()?)
        }
    })
}
