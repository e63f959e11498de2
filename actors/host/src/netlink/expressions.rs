//! Rules as the kernel's expressions, and back. Each statement is a fixed sequence: load fields into registers, mask, test.

use groupcast_enforce::Name;
use groupcast_enforce::expression::{Field, ORIGINAL, REPLY, Statement, Test, Value, Verdict};
use groupcast_enforce::interface::Interface;
use groupcast_enforce::table::Rule;

use super::wire::{Attributes, Writer};

const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;

const REGISTER_VERDICT: u32 = 0;
/// Registers of 16 bytes; the second of two fields begins where the first ends: an interface name or an address of IPv6 fills one, an
/// address of IPv4 a quarter of it.
const REGISTER_1: u32 = 1;
const REGISTER_2: u32 = 2;
const REGISTER_1_SECOND_QUARTER: u32 = 9;

const OP_EQUAL: u32 = 0;
const OP_UNEQUAL: u32 = 1;
const LOOKUP_INVERTED: u32 = 1;
const DYNSET_UPDATE: u32 = 1;

const META_IIF: u32 = 4;
const META_OIF: u32 = 5;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;

const CT_STATE: u32 = 0;
const CT_DIRECTION: u32 = 1;
const CT_MARK: u32 = 3;
const CT_PROTOCOL: u32 = 10;
const CT_PROTO_SRC: u32 = 11;
const CT_PROTO_DST: u32 = 12;
const CT_SRC_IP: u32 = 19;
const CT_SRC_IP6: u32 = 21;

const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;

/// Where a field is found.
enum Load {
    Meta(u32),
    Ct(u32, Option<u8>),
    Payload { base: u32, offset: u32 },
}

const FIELDS: [Field; 25] = [
    Field::Family,
    Field::VersionAndLength,
    Field::Protocol,
    Field::InInterface,
    Field::OutInterface,
    Field::InIndex,
    Field::OutIndex,
    Field::CtState,
    Field::CtDirection,
    Field::CtMark,
    Field::CtProtocol,
    Field::CtSource4,
    Field::CtSource6,
    Field::CtDestination4,
    Field::CtDestination6,
    Field::CtDestinationPort,
    Field::CtIcmp,
    Field::Source4,
    Field::Source6,
    Field::Destination4,
    Field::Destination6,
    Field::SourcePort,
    Field::DestinationPort,
    Field::Icmp,
    Field::TcpFlags,
];

fn load_of(field: Field) -> Load {
    match field {
        Field::Family => Load::Meta(META_NFPROTO),
        Field::VersionAndLength => Load::Payload { base: NETWORK, offset: 0 },
        Field::Protocol => Load::Meta(META_L4PROTO),
        Field::InInterface => Load::Meta(META_IIFNAME),
        Field::OutInterface => Load::Meta(META_OIFNAME),
        Field::InIndex => Load::Meta(META_IIF),
        Field::OutIndex => Load::Meta(META_OIF),
        Field::CtState => Load::Ct(CT_STATE, None),
        Field::CtDirection => Load::Ct(CT_DIRECTION, None),
        Field::CtMark => Load::Ct(CT_MARK, None),
        Field::CtProtocol => Load::Ct(CT_PROTOCOL, Some(ORIGINAL)),
        Field::CtSource4 => Load::Ct(CT_SRC_IP, Some(ORIGINAL)),
        Field::CtSource6 => Load::Ct(CT_SRC_IP6, Some(ORIGINAL)),
        Field::CtDestination4 => Load::Ct(CT_SRC_IP, Some(REPLY)),
        Field::CtDestination6 => Load::Ct(CT_SRC_IP6, Some(REPLY)),
        Field::CtDestinationPort => Load::Ct(CT_PROTO_SRC, Some(REPLY)),
        Field::CtIcmp => Load::Ct(CT_PROTO_DST, Some(ORIGINAL)),
        Field::Source4 => Load::Payload { base: NETWORK, offset: 12 },
        Field::Destination4 => Load::Payload { base: NETWORK, offset: 16 },
        Field::Source6 => Load::Payload { base: NETWORK, offset: 8 },
        Field::Destination6 => Load::Payload { base: NETWORK, offset: 24 },
        Field::SourcePort | Field::Icmp => Load::Payload { base: TRANSPORT, offset: 0 },
        Field::DestinationPort => Load::Payload { base: TRANSPORT, offset: 2 },
        Field::TcpFlags => Load::Payload { base: TRANSPORT, offset: 13 },
    }
}

/// A field's bytes, as the kernel keeps them: many are made for each rule, so none is on the heap.
struct Bytes {
    bytes: [u8; 16],
    length: usize,
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

fn bytes_of(field: Field, number: u128) -> Bytes {
    let length = field.width();
    let mut bytes = (number << (8 * (16 - length))).to_be_bytes();
    if field.is_native() && cfg!(target_endian = "little") {
        bytes[..length].reverse();
    }
    Bytes { bytes, length }
}

fn number_of(field: Field, bytes: &[u8]) -> Option<u128> {
    let mut bytes = bytes.get(..field.width())?.to_vec();
    if field.is_native() && cfg!(target_endian = "little") {
        bytes.reverse();
    }
    Some(bytes.iter().fold(0, |number, byte| number << 8 | u128::from(*byte)))
}

fn value_bytes(field: Field, value: &Value) -> Bytes {
    match value {
        Value::Number(number) => bytes_of(field, *number),
        Value::Interface(interface) => Bytes { bytes: *interface.bytes(), length: interface.bytes().len() },
    }
}

fn value_of(field: Field, bytes: &[u8]) -> Option<Value> {
    match field {
        Field::InInterface | Field::OutInterface => Interface::from_bytes(bytes).map(Value::Interface),
        _ => number_of(field, bytes).map(Value::Number),
    }
}

fn expression(writer: &mut Writer, name: &str, fill: impl FnOnce(&mut Writer)) {
    writer.nest(LIST_ELEMENT, |element| {
        element.text(EXPRESSION_NAME, name).nest(EXPRESSION_DATA, fill);
    });
}

fn data(writer: &mut Writer, kind: u16, bytes: &[u8]) {
    writer.nest(kind, |data| _ = data.put(DATA_VALUE, bytes));
}

pub fn write_verdict(writer: &mut Writer, kind: u16, verdict: &Verdict) {
    let (code, chain): (i32, _) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
    };
    writer.nest(kind, |data| {
        data.nest(DATA_VERDICT, |verdict| {
            verdict.u32(1, code as u32);
            if let Some(chain) = chain {
                verdict.text(2, chain);
            }
        });
    });
}

pub fn read_verdict(data: Attributes<'_>) -> Option<Verdict> {
    let verdict = data.nested(DATA_VERDICT);
    let chain = || verdict.text(2).map(Name::from);
    Some(match verdict.u32(1)? as i32 {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -3 => Verdict::Jump(chain()?),
        -4 => Verdict::Goto(chain()?),
        -5 => Verdict::Return,
        _ => return None,
    })
}

fn write_load(writer: &mut Writer, field: Field, register: u32) {
    match load_of(field) {
        Load::Meta(key) => expression(writer, "meta", |e| _ = e.u32(1, register).u32(2, key)),
        Load::Ct(key, direction) => expression(writer, "ct", |e| {
            e.u32(1, register).u32(2, key);
            if let Some(direction) = direction {
                e.u8(3, direction);
            }
        }),
        Load::Payload { base, offset } => expression(writer, "payload", |e| {
            e.u32(1, register).u32(2, base).u32(3, offset).u32(4, field.width() as u32);
        }),
    }
}

fn write_loads(writer: &mut Writer, fields: &[Field]) {
    let second = if fields.first().is_some_and(|first| first.width() == 4) { REGISTER_1_SECOND_QUARTER } else { REGISTER_2 };
    for (field, register) in fields.iter().zip([REGISTER_1, second]) {
        write_load(writer, *field, register);
    }
}

fn write_bitwise(writer: &mut Writer, mask: &[u8], xor: &[u8]) {
    expression(writer, "bitwise", |e| {
        e.u32(1, REGISTER_1).u32(2, REGISTER_1).u32(3, mask.len() as u32);
        data(e, 4, mask);
        data(e, 5, xor);
    });
}

fn write_compare(writer: &mut Writer, op: u32, bytes: &[u8]) {
    expression(writer, "cmp", |e| {
        e.u32(1, REGISTER_1).u32(2, op);
        data(e, 3, bytes);
    });
}

fn write_lookup(writer: &mut Writer, set: &str, register: Option<u32>, flags: u32) {
    expression(writer, "lookup", |e| {
        e.text(1, set).u32(2, REGISTER_1);
        if let Some(register) = register {
            e.u32(3, register);
        }
        if flags != 0 {
            e.u32(5, flags);
        }
    });
}

pub fn write_rule(writer: &mut Writer, rule: &[Statement]) {
    let mut mark_loaded = false;
    for statement in rule {
        match statement {
            // Each expression costs the kernel a microsecond to take in, and this rule is replaced with every new stamp.
            Statement::SetMark { keep, set } if mark_loaded => write_mark(writer, *keep, *set),
            statement => write_statement(writer, statement),
        }
        mark_loaded = leaves_mark_loaded(statement);
    }
}

/// Whether the connection's mark is in the first register after this, as it is.
fn leaves_mark_loaded(statement: &Statement) -> bool {
    let Statement::Match { fields, test: Test::Masked { mask, .. } | Test::MaskedNot { mask, .. } } = statement else {
        return false;
    };
    fields[..] == [Field::CtMark] && leading_bytes(Field::CtMark, *mask).is_some()
}

/// How many whole bytes at the beginning of a field a mask covers, if that is all it covers: they are compared without masking.
fn leading_bytes(field: Field, mask: u32) -> Option<usize> {
    let bytes = bytes_of(field, mask.into());
    let covered = bytes.iter().take_while(|byte| **byte == 0xff).count();
    (covered > 0 && bytes[covered..].iter().all(|byte| *byte == 0)).then_some(covered)
}

fn write_mark(writer: &mut Writer, keep: u32, set: u32) {
    let mark = Field::CtMark;
    write_bitwise(writer, &bytes_of(mark, keep.into()), &bytes_of(mark, set.into()));
    expression(writer, "ct", |e| _ = e.u32(2, CT_MARK).u32(4, REGISTER_1));
}

fn write_statement(writer: &mut Writer, statement: &Statement) {
    match statement {
        Statement::Match { fields, test } => {
            write_loads(writer, fields);
            let Some(field) = fields.first().copied() else { return };
            match test {
                Test::Is(value) => write_compare(writer, OP_EQUAL, &value_bytes(field, value)),
                Test::IsNot(value) => write_compare(writer, OP_UNEQUAL, &value_bytes(field, value)),
                Test::Within(first, last) => expression(writer, "range", |e| {
                    e.u32(1, REGISTER_1).u32(2, OP_EQUAL);
                    data(e, 3, &bytes_of(field, *first));
                    data(e, 4, &bytes_of(field, *last));
                }),
                Test::Masked { mask, is: number } | Test::MaskedNot { mask, is_not: number } => {
                    let op = if matches!(test, Test::Masked { .. }) { OP_EQUAL } else { OP_UNEQUAL };
                    let number = bytes_of(field, (*number).into());
                    match leading_bytes(field, *mask) {
                        Some(covered) => write_compare(writer, op, &number[..covered]),
                        None => {
                            write_bitwise(writer, &bytes_of(field, (*mask).into()), &bytes_of(field, 0));
                            write_compare(writer, op, &number);
                        }
                    }
                }
                Test::In(set) => write_lookup(writer, set, None, 0),
                Test::NotIn(set) => write_lookup(writer, set, None, LOOKUP_INVERTED),
            }
        }
        Statement::VerdictOf { fields, mask, map } => {
            write_loads(writer, fields);
            if let (Some(mask), Some(field)) = (mask, fields.first()) {
                write_bitwise(writer, &bytes_of(*field, (*mask).into()), &bytes_of(*field, 0));
            }
            write_lookup(writer, map, Some(REGISTER_VERDICT), 0);
        }
        Statement::Dispatch { fields, numbers, verdicts } => {
            write_loads(writer, fields);
            write_lookup(writer, numbers, Some(REGISTER_1), 0);
            write_lookup(writer, verdicts, Some(REGISTER_VERDICT), 0);
        }
        Statement::SetMark { keep, set } => {
            write_load(writer, Field::CtMark, REGISTER_1);
            write_mark(writer, *keep, *set);
        }
        Statement::Limit { seen, interface, number, per_second, burst } => {
            write_load(writer, *interface, REGISTER_1);
            expression(writer, "immediate", |e| {
                e.u32(1, REGISTER_2);
                data(e, 2, &bytes_of(Field::CtMark, (*number).into()));
            });
            expression(writer, "dynset", |e| {
                e.text(1, seen).u32(3, DYNSET_UPDATE).u32(4, REGISTER_1);
                e.nest(7, |e| {
                    e.text(EXPRESSION_NAME, "limit").nest(EXPRESSION_DATA, |e| {
                        e.u64(1, (*per_second).into()).u64(2, 1).u32(3, *burst).u32(4, 0).u32(5, 0);
                    });
                });
            });
        }
        Statement::Log { prefix, group, snap_bytes } => {
            expression(writer, "log", |e| _ = e.u16(1, *group).text(2, prefix).u32(3, *snap_bytes).u16(4, 0));
        }
        Statement::Counter => expression(writer, "counter", |e| _ = e.u64(1, 0).u64(2, 0)),
        Statement::Verdict(verdict) => expression(writer, "immediate", |e| {
            e.u32(1, REGISTER_VERDICT);
            write_verdict(e, 2, verdict);
        }),
    }
}

/// Packets and bytes that the first counter among some expressions has met.
pub fn counter_of(expressions: Attributes<'_>) -> Option<(u64, u64)> {
    let mut named = expressions.map(|(_, element)| Attributes(element));
    let counter = named.find(|element| element.text(EXPRESSION_NAME) == Some("counter"))?.nested(EXPRESSION_DATA);
    Some((counter.u64(2)?, counter.u64(1)?))
}

/// What has been loaded and not been used yet.
#[derive(Default)]
struct Pending<'b> {
    loads: Vec<(Load, usize)>,
    bitwise: Option<(&'b [u8], &'b [u8])>,
    number: Option<&'b [u8]>,
    numbers: Option<&'b str>,
}

/// The rule in some expressions; `None`: it is none of ours.
pub fn read_rule(expressions: Attributes<'_>) -> Option<Rule> {
    let mut rule = Rule::new();
    let mut pending = Pending::default();
    for (_, element) in expressions {
        let element = Attributes(element);
        let name = element.text(EXPRESSION_NAME)?;
        let e = element.nested(EXPRESSION_DATA);
        if let Some(statement) = read_expression(name, e, &mut pending)? {
            pending = Pending::default();
            rule.push(statement);
        }
    }
    pending.loads.is_empty().then_some(rule)
}

fn masked(op: u32, mask: u32, number: u32) -> Option<Test> {
    match op {
        OP_EQUAL => Some(Test::Masked { mask, is: number }),
        OP_UNEQUAL => Some(Test::MaskedNot { mask, is_not: number }),
        _ => None,
    }
}

/// The outer `None`: not understood; the inner: the statement goes on.
fn read_expression<'b>(name: &str, e: Attributes<'b>, pending: &mut Pending<'b>) -> Option<Option<Statement>> {
    let value = |kind: u16| e.nested(kind).find(DATA_VALUE);
    match name {
        "meta" => pending.loads.push((Load::Meta(e.u32(2)?), 0)),
        "ct" if e.find(4).is_some() => {
            let (mask, xor) = pending.bitwise?;
            let mark = Field::CtMark;
            let number = |bytes: &[u8]| number_of(mark, bytes).and_then(|n| u32::try_from(n).ok());
            return Some(Some(Statement::SetMark { keep: number(mask)?, set: number(xor)? }));
        }
        "ct" => pending.loads.push((Load::Ct(e.u32(2)?, e.find(3).and_then(|d| d.first().copied())), 0)),
        "payload" => {
            let load = Load::Payload { base: e.u32(2)?, offset: e.u32(3)? };
            pending.loads.push((load, usize::try_from(e.u32(4)?).ok()?));
        }
        "bitwise" => pending.bitwise = Some((value(4)?, value(5)?)),
        "immediate" if e.u32(1)? == REGISTER_VERDICT => return Some(Some(Statement::Verdict(read_verdict(e.nested(2))?))),
        "immediate" => pending.number = Some(value(2)?),
        "counter" => return Some(Some(Statement::Counter)),
        "log" => {
            let group = e.find(1).and_then(|data| Some(u16::from_be_bytes(*data.first_chunk()?)))?;
            return Some(Some(Statement::Log { group, prefix: e.text(2)?.into(), snap_bytes: e.u32(3)? }));
        }
        "cmp" => {
            let fields = fields_of(pending)?;
            let field = *fields.first()?;
            let (op, bytes) = (e.u32(2)?, value(3)?);
            let narrow = |bytes: &[u8]| number_of(field, bytes).and_then(|n| u32::try_from(n).ok());
            let leading = |fill: u8| [vec![fill; bytes.len()], vec![0; field.width().saturating_sub(bytes.len())]].concat();
            let test = match (pending.bitwise, op) {
                // Fewer bytes than the field has: its beginning.
                (None, op) if bytes.len() < field.width() => {
                    let mut number = leading(0);
                    number[..bytes.len()].copy_from_slice(bytes);
                    masked(op, narrow(&leading(0xff))?, narrow(&number)?)?
                }
                (None, OP_EQUAL) => Test::Is(value_of(field, bytes)?),
                (None, OP_UNEQUAL) => Test::IsNot(value_of(field, bytes)?),
                (Some((mask, _)), op) => masked(op, narrow(mask)?, narrow(bytes)?)?,
                _ => return None,
            };
            return Some(Some(Statement::Match { fields, test }));
        }
        "range" => {
            let fields = fields_of(pending)?;
            let field = *fields.first()?;
            let test = Test::Within(number_of(field, value(3)?)?, number_of(field, value(4)?)?);
            return Some(Some(Statement::Match { fields, test }));
        }
        "lookup" => {
            let set = e.text(1)?;
            match (e.u32(3), pending.numbers) {
                (None, _) => {
                    let inverted = e.u32(5).unwrap_or_default() & LOOKUP_INVERTED != 0;
                    let test = if inverted { Test::NotIn(set.into()) } else { Test::In(set.into()) };
                    return Some(Some(Statement::Match { fields: fields_of(pending)?, test }));
                }
                (Some(REGISTER_VERDICT), None) => {
                    let fields = fields_of(pending)?;
                    let mask = match pending.bitwise {
                        Some((mask, _)) => Some(u32::try_from(number_of(*fields.first()?, mask)?).ok()?),
                        None => None,
                    };
                    return Some(Some(Statement::VerdictOf { fields, mask, map: set.into() }));
                }
                (Some(REGISTER_VERDICT), Some(numbers)) => {
                    let fields = fields_of(pending)?;
                    return Some(Some(Statement::Dispatch { fields, numbers: numbers.into(), verdicts: set.into() }));
                }
                (Some(_), _) => pending.numbers = Some(set),
            }
        }
        "dynset" => {
            let [interface] = fields_of(pending)?[..] else { return None };
            let number = u32::try_from(number_of(Field::CtMark, pending.number?)?).ok()?;
            let limit = e.nested(7).nested(EXPRESSION_DATA);
            let per_second = u32::try_from(limit.u64(1)?).ok()?;
            return Some(Some(Statement::Limit { seen: e.text(1)?.into(), interface, number, per_second, burst: limit.u32(3)? }));
        }
        _ => return None,
    }
    Some(None)
}

/// The fields that were loaded. A load of two bytes at the beginning of the transport header is a source port or, in rules about
/// ICMP, type and code; both are the same bytes, and which of them was meant follows from the protocol tested before: see
/// [`settle_icmp`].
fn fields_of(pending: &Pending<'_>) -> Option<Vec<Field>> {
    let same = |field: &Field, load: &Load, width: usize| match (load_of(*field), load) {
        (Load::Meta(a), Load::Meta(b)) => a == *b,
        // The kernel does not repeat the direction of what is the same in both.
        (Load::Ct(a, x), Load::Ct(b, y)) => a == *b && (x == *y || a == CT_PROTOCOL),
        (Load::Payload { base: a, offset: x }, Load::Payload { base: b, offset: y }) => (a, x, field.width()) == (*b, *y, width),
        _ => false,
    };
    let find = |(load, width): &(Load, usize)| FIELDS.iter().find(|field| same(field, load, *width)).copied();
    pending.loads.iter().map(find).collect()
}

/// Says `Icmp` where a rule reads the first two bytes of ICMP.
pub fn settle_icmp(rule: &mut Rule) {
    const ICMP: u128 = 1;
    const ICMPV6: u128 = 58;
    let mut is_icmp = false;
    for statement in rule {
        if let Statement::Match { fields, test } = statement {
            if fields[..] == [Field::Protocol] {
                is_icmp = matches!(test, Test::Is(Value::Number(ICMP | ICMPV6)));
            }
            if is_icmp {
                fields.iter_mut().filter(|field| **field == Field::SourcePort).for_each(|field| *field = Field::Icmp);
            }
        }
    }
}
