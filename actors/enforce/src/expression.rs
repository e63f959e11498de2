//! What rules are made of: fields of packet and connection, tests on them, and statements.

use crate::Name;
use crate::interface::Interface;

/// What a rule can look at. The fields of the connection's tuple are the same for packets of both directions: the source is that of
/// its first packet, destination and port are those after address translation (the source of the expected reply).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// The family of the packet: [`FAMILY_V4`] or [`FAMILY_V6`].
    Family,
    /// The first byte of the packet's header: the version of IP, and of IPv4 the header's length in words. [`PLAIN_V4`] is the
    /// only value that anything is compared with.
    VersionAndLength,
    /// The transport protocol of the packet.
    Protocol,
    InInterface,
    OutInterface,
    /// The number of the interface, which stays when it is renamed; 0: none.
    InIndex,
    OutIndex,
    CtState,
    /// [`ORIGINAL`] or [`REPLY`].
    CtDirection,
    CtMark,
    CtProtocol,
    CtSource4,
    CtSource6,
    CtDestination4,
    CtDestination6,
    CtDestinationPort,
    /// Type and code of the first packet, where the connection is one of ICMP.
    CtIcmp,
    Source4,
    Source6,
    Destination4,
    Destination6,
    SourcePort,
    DestinationPort,
    /// Type and code of the packet.
    Icmp,
    TcpFlags,
}

pub const FAMILY_V4: u8 = 2;
pub const FAMILY_V6: u8 = 10;
/// IPv4 without options.
pub const PLAIN_V4: u8 = 0x45;
pub const ORIGINAL: u8 = 0;
pub const REPLY: u8 = 1;

/// Bits of [`Field::CtState`].
pub const STATE_INVALID: u32 = 1;
pub const STATE_ESTABLISHED: u32 = 2;
pub const STATE_RELATED: u32 = 4;
pub const STATE_NEW: u32 = 8;
pub const STATE_UNTRACKED: u32 = 64;

/// Bits of [`Field::TcpFlags`].
pub const TCP_FIN: u8 = 1;
pub const TCP_SYN: u8 = 2;
pub const TCP_RST: u8 = 4;
pub const TCP_ACK: u8 = 16;

impl Field {
    /// Its width in bytes.
    pub fn width(self) -> usize {
        match self {
            Field::Family
            | Field::VersionAndLength
            | Field::Protocol
            | Field::CtDirection
            | Field::CtProtocol
            | Field::TcpFlags => 1,
            Field::CtDestinationPort | Field::CtIcmp | Field::SourcePort | Field::DestinationPort | Field::Icmp => 2,
            Field::CtState | Field::CtMark | Field::InIndex | Field::OutIndex => 4,
            Field::CtSource4 | Field::CtDestination4 | Field::Source4 | Field::Destination4 => 4,
            Field::CtSource6 | Field::CtDestination6 | Field::Source6 | Field::Destination6 => 16,
            Field::InInterface | Field::OutInterface => 16,
        }
    }

    /// Whether it is an address of IPv4.
    pub fn is_v4(self) -> bool {
        matches!(self, Field::CtSource4 | Field::CtDestination4 | Field::Source4 | Field::Destination4)
    }

    /// Whether the kernel keeps it in the machine's byte order; everything else is as on the wire.
    pub fn is_native(self) -> bool {
        matches!(self, Field::CtState | Field::CtMark | Field::InIndex | Field::OutIndex)
    }
}

/// What a field is compared with: a number of the field's width, or a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    Number(u128),
    Interface(Interface),
}

macro_rules! numbers {
    ($($t:ty),*) => { $(impl From<$t> for Value {
        fn from(number: $t) -> Self { Value::Number(number.into()) }
    })* };
}
numbers!(u8, u16, u32, u128);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Test {
    Is(Value),
    IsNot(Value),
    /// Both ends included.
    Within(u128, u128),
    /// The field's bits under the mask.
    Masked {
        mask: u32,
        is: u32,
    },
    MaskedNot {
        mask: u32,
        is_not: u32,
    },
    In(Name),
    NotIn(Name),
}

/// A whole-packet decision, or where it is made.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Jump(Name),
    Goto(Name),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Statement {
    /// The rule goes on only if this holds. Several fields are looked up together.
    Match {
        fields: Vec<Field>,
        test: Test,
    },
    /// The verdict found in a verdict map, if the key is there. With a mask, which only a single number can have.
    VerdictOf {
        fields: Vec<Field>,
        mask: Option<u32>,
        map: Name,
    },
    /// In two steps: a number found in a plain map, then the verdict of that number. Adding a key to the first map re-validates no
    /// chain.
    Dispatch {
        fields: Vec<Field>,
        numbers: Name,
        verdicts: Name,
    },
    /// Writes `mark & keep | set` to the connection's mark.
    SetMark {
        keep: u32,
        set: u32,
    },
    /// Goes on only as often per (interface, number) as the rate allows. The set holds what was seen.
    Limit {
        seen: Name,
        interface: Field,
        number: u32,
        per_second: u32,
        burst: u32,
    },
    Log {
        prefix: String,
        group: u16,
        snap_bytes: u32,
    },
    Counter,
    Verdict(Verdict),
}

impl Statement {
    pub fn is(field: Field, value: impl Into<Value>) -> Self {
        Statement::Match { fields: vec![field], test: Test::Is(value.into()) }
    }

    pub fn within(field: Field, first: impl Into<u128>, last: impl Into<u128>) -> Self {
        let (first, last) = (first.into(), last.into());
        let test = if first == last { Test::Is(Value::Number(first)) } else { Test::Within(first, last) };
        Statement::Match { fields: vec![field], test }
    }

    pub fn in_set(fields: impl Into<Vec<Field>>, set: &Name) -> Self {
        Statement::Match { fields: fields.into(), test: Test::In(set.clone()) }
    }

    pub fn jump(chain: &Name) -> Self {
        Statement::Verdict(Verdict::Jump(chain.clone()))
    }

    pub fn goto(chain: &Name) -> Self {
        Statement::Verdict(Verdict::Goto(chain.clone()))
    }

    /// The sets and maps it looks into.
    pub fn sets(&self) -> impl Iterator<Item = &Name> {
        let pair = match self {
            Statement::Match { test: Test::In(set) | Test::NotIn(set), .. } => [Some(set), None],
            Statement::VerdictOf { map, .. } => [Some(map), None],
            Statement::Dispatch { numbers, verdicts, .. } => [Some(numbers), Some(verdicts)],
            Statement::Limit { seen, .. } => [Some(seen), None],
            _ => [None, None],
        };
        pair.into_iter().flatten()
    }
}
