//! Digests and the hashes of items. They are on the wire, so their input is spelled out byte by byte and never changes.

use ipnet::IpNet;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Content, Phase, Phases, Placement, RuleKey};
use crate::ids::{AppId, GroupId, SpaceId};
use crate::net::{AddressSet, Family, Prefix, Span};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};

/// Order-independent hash of a whole document. Zero means absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Digest(pub u64);

impl Digest {
    pub const ABSENT: Digest = Digest(0);

    pub(super) fn plus(self, item: u64) -> Self {
        Digest(self.0.wrapping_add(item))
    }

    pub(super) fn minus(self, item: u64) -> Self {
        Digest(self.0.wrapping_sub(item))
    }
}

/// What a document adds by being there.
pub(super) const PRESENT: u64 = 0x9e37_79b9_7f4a_7c15;
const SEED_SCOPE: u64 = 1;
const SEED_HOST: u64 = 2;
const SEED_RULE: u64 = 3;
const SEED_MEMBER: u64 = 4;
const SEED_STATEFUL: u64 = 5;

pub(super) fn digest_of(content: &Content) -> Digest {
    let items = match content {
        Content::Scope(held) => held.iter().fold(Digest(0), |d, (group, phases)| d.plus(hash_scope(group, *phases))),
        Content::Host(held) => held.values().fold(Digest(0), |d, placement| d.plus(hash_placement(placement))),
        Content::Rules(held) => held.rules.keys().fold(Digest(hash_stateful(held.stateful)), |d, key| d.plus(key.0)),
        Content::Members(held) => held.iter().fold(Digest(0), |d, member| d.plus(hash_member(member))),
    };
    items.plus(PRESENT)
}

pub(super) fn hash_scope(group: &GroupId, phases: Phases) -> u64 {
    let mut bytes = Bytes::default();
    bytes.text(group.as_str()).byte(phases.bits());
    bytes.hash(SEED_SCOPE)
}

/// Zero for stateful, the default, so that an empty rules document needs no special case.
pub(super) fn hash_stateful(stateful: bool) -> u64 {
    if stateful { 0 } else { xxh3_64_with_seed(b"stateless", SEED_STATEFUL) }
}

pub(super) fn hash_member(member: Prefix) -> u64 {
    let mut bytes = [0u8; 17];
    bytes[16] = member.len();
    match member.net() {
        IpNet::V4(net) => {
            bytes[..4].copy_from_slice(&net.addr().octets());
            // Sixteen address bytes for IPv6 and four for IPv4: the lengths keep the families apart.
            bytes[4] = member.len();
            xxh3_64_with_seed(&bytes[..5], SEED_MEMBER)
        }
        IpNet::V6(net) => {
            bytes[..16].copy_from_slice(&net.addr().octets());
            xxh3_64_with_seed(&bytes, SEED_MEMBER)
        }
    }
}

pub(super) fn hash_placement(placement: &Placement) -> u64 {
    let mut bytes = Bytes::default();
    bytes.text(placement.workload.as_str()).number(placement.incarnation).text(placement.network.as_str());
    bytes.number(placement.addresses.len() as u64);
    placement.addresses.iter().for_each(|address| {
        bytes.number(hash_member(*address));
    });
    bytes.text(placement.space.as_ref().map_or("", SpaceId::as_str));
    bytes.text(placement.app.as_ref().map_or("", AppId::as_str));
    bytes.byte(u8::from(placement.phase == Phase::Staging));
    bytes.byte(u8::from(placement.enforced.ingress)).byte(u8::from(placement.enforced.egress));
    bytes.number(placement.groups.len() as u64);
    placement.groups.iter().for_each(|group| {
        bytes.text(group.as_str());
    });
    bytes.hash(SEED_HOST)
}

impl Rule {
    pub fn key(&self) -> RuleKey {
        let mut bytes = Bytes(Vec::with_capacity(RULE_BYTES_USUAL));
        bytes.byte(u8::from(self.action == Action::Deny)).byte(u8::from(self.direction == Direction::Egress));
        bytes.byte(match self.family {
            None => 0,
            Some(Family::V4) => 4,
            Some(Family::V6) => 6,
        });
        match &self.traffic {
            Traffic::Any => bytes.byte(0),
            Traffic::Protocol(number) => bytes.byte(1).byte(*number),
            Traffic::Ports { protocol, ports } => {
                bytes.byte(2).byte(*protocol).spans(ports.spans(), |b, port| b.number(u64::from(port)))
            }
            Traffic::Icmp { kind, code } => bytes.byte(3).optional(*kind).optional(*code),
        };
        match &self.remote {
            Remote::Any => bytes.byte(0),
            Remote::Addresses(AddressSet { v4, v6 }) => bytes
                .byte(1)
                .spans(v4.spans(), |b, address| b.number(u64::from(address)))
                .spans(v6.spans(), |b, address| b.number((address >> 64) as u64).number(address as u64)),
            Remote::Group(group) => bytes.byte(2).text(group.as_str()),
        };
        bytes.byte(u8::from(self.log));
        RuleKey(bytes.hash(SEED_RULE))
    }
}

/// What most rules take as input of their hash: one allocation for them.
const RULE_BYTES_USUAL: usize = 256;

/// Canonical input of an item hash: every part is of fixed length or led by its length.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn byte(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    fn number(&mut self, number: u64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.0.push(text.len() as u8);
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    fn optional(&mut self, byte: Option<u8>) -> &mut Self {
        match byte {
            None => self.byte(0).byte(0),
            Some(byte) => self.byte(1).byte(byte),
        }
    }

    fn spans<T: Copy + Ord>(&mut self, spans: &[Span<T>], put: impl Fn(&mut Self, T) -> &mut Self) -> &mut Self {
        self.number(spans.len() as u64);
        for span in spans {
            put(self, span.first());
            put(self, span.last());
        }
        self
    }

    fn hash(&self, seed: u64) -> u64 {
        xxh3_64_with_seed(&self.0, seed)
    }
}
