//! What a host is told by its operator and by whoever starts workloads on it: claims, marks, logs, attachments.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use groupcast_policy::ids::WorkloadId;

use crate::interface::{Claim, Interface};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub claims: Vec<Claim>,
    pub mark: MarkBits,
    pub mode: Mode,
    pub log: LogSettings,
    pub failsafe: Failsafe,
    /// TCP connections that are met in the middle are judged like new ones, as long as this is set: after the first load, when
    /// everything that is open was opened before. Later such a packet is refused.
    pub adopting: bool,
    /// Claimed interfaces that belong to a bridge are closed there, by a table of the bridge family. Not where the kernel has none.
    pub closes_ports: bool,
    /// The numbers of interfaces that have had a claimed name since they exist: what was claimed stays claimed, whatever it is called.
    /// Not by the operator: found out by looking.
    pub held: BTreeSet<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            claims: Vec::new(),
            mark: MarkBits::default(),
            mode: Mode::Enforce,
            log: LogSettings::default(),
            failsafe: Failsafe::default(),
            adopting: false,
            closes_ports: true,
            held: BTreeSet::new(),
        }
    }
}

/// How the host as a whole treats what it judges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Mode {
    #[default]
    Enforce,
    /// What would be denied is logged and passes.
    Audit,
    /// Nothing is judged.
    Bypass,
    /// Nothing that is claimed passes.
    Lockdown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSettings {
    pub nflog_group: u16,
    /// Per workload and reason.
    pub per_second: u32,
    pub burst: u32,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { nflog_group: 5, per_second: 5, burst: 10 }
    }
}

/// How many bytes of a logged packet are handed on: its headers.
pub const LOG_SNAP_BYTES: u32 = 96;

/// Ports of the host itself that no policy can cut. They hold for the host only, never for a workload's traffic with it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Failsafe {
    /// Services of this host.
    pub inbound: BTreeSet<(u8, u16)>,
    /// Services elsewhere that this host connects to, the bus among them.
    pub outbound: BTreeSet<(u8, u16)>,
}

/// More would be a policy of its own.
pub const FAILSAFE_PORTS_MAX: usize = 64;

/// Which 24 bits of the connection's mark are ours: 23 of the stamp and above them one that says "half judged".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MarkBits {
    shift: u8,
}

const MARK_WIDTH: u8 = 24;
const STAMP_WIDTH: u8 = MARK_WIDTH - 1;

impl MarkBits {
    /// `None` if 24 bits do not fit above the shift.
    pub fn new(shift: u8) -> Option<Self> {
        (shift <= 32 - MARK_WIDTH).then_some(Self { shift })
    }

    pub fn mask(self) -> u32 {
        ((1 << MARK_WIDTH) - 1) << self.shift
    }

    /// The bits of everybody else.
    pub fn foreign(self) -> u32 {
        !self.mask()
    }

    pub fn judged(self, stamp: Stamp) -> u32 {
        stamp.0 << self.shift
    }

    pub fn half_judged(self, stamp: Stamp) -> u32 {
        (stamp.0 | 1 << STAMP_WIDTH) << self.shift
    }

    /// The stamp in a mark, whether fully judged or half; `None` where there is none.
    pub fn stamp_in(self, mark: u32) -> Option<Stamp> {
        Stamp::new((mark & self.mask()) >> self.shift & Stamp::MAX.0)
    }
}

/// The generation of a host's policy, as it is written on the flows it has judged. Never zero: that is an unjudged flow's mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u32);

impl Stamp {
    pub const FIRST: Stamp = Stamp(1);
    pub const MAX: Stamp = Stamp((1 << STAMP_WIDTH) - 1);

    pub fn new(number: u32) -> Option<Self> {
        (1..=Self::MAX.0).contains(&number).then_some(Self(number))
    }

    pub fn number(self) -> u32 {
        self.0
    }

    /// `None` when all are used up: our bits must be zeroed in every connection before the first is used again.
    pub fn next(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }

    /// This one and those after it, up to the last of its [`STAMPS_PROVIDED`]: a table has rules for all of them.
    pub fn provision(self) -> impl Iterator<Item = Self> {
        (self.0..=(self.0 | (STAMPS_PROVIDED - 1))).map_while(Self::new)
    }
}

/// For so many stamps in a row rules are written at once; a power of two. More of them cost room and time when they run out, fewer run
/// out more often.
pub const STAMPS_PROVIDED: u32 = 16;

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a workload's packets are told from others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attachment {
    /// Everything through this interface is the workload's.
    Interface(Interface),
    /// Several workloads behind one interface: by address, but never by address alone.
    Addresses { interface: Interface, addresses: BTreeSet<IpAddr> },
    /// The machine itself.
    Host,
}

impl Attachment {
    /// The machine itself is behind no interface.
    pub fn interface(&self) -> Interface {
        match self {
            Attachment::Interface(interface) | Attachment::Addresses { interface, .. } => *interface,
            Attachment::Host => Interface::NONE,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    pub attachment: Attachment,
    /// What would be denied is logged and passes.
    pub audit: bool,
}

pub type Attachments = BTreeMap<WorkloadId, Attached>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_marks_of_a_stamp_are_told_apart_and_leave_foreign_bits_alone() {
        for shift in 0..=8 {
            let bits = MarkBits::new(shift).unwrap();
            let stamp = Stamp::new(7).unwrap();
            assert_ne!(bits.judged(stamp), bits.half_judged(stamp));
            for mark in [bits.judged(stamp), bits.half_judged(stamp), bits.judged(Stamp::MAX), bits.half_judged(Stamp::MAX)] {
                assert_eq!(mark & bits.foreign(), 0, "{shift}");
            }
            assert_eq!(bits.stamp_in(bits.half_judged(stamp) | bits.foreign()), Some(stamp));
            assert_eq!(bits.stamp_in(bits.foreign()), None);
        }
        assert_eq!(MarkBits::new(9), None);
    }

    #[test]
    fn stamps_end() {
        assert_eq!(Stamp::new(0), None);
        assert_eq!(Stamp::MAX.next(), None);
        assert_eq!(Stamp::new(Stamp::MAX.number() + 1), None);
        assert_eq!(Stamp::new(1).and_then(Stamp::next), Stamp::new(2));
    }
}
