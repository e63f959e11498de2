//! The contents of topics, the edits that change them, and the digest that proves two replicas equal.
//!
//! A document is a set of keyed items. Its digest is the wrapping sum of the items' hashes plus a constant for its presence, so
//! that it does not depend on order, an edit updates it in O(edit), and "absent" differs from "empty".

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::{AppId, GroupId, NetworkId, SpaceId, WorkloadId};
use crate::net::{AddressSet, Family, Prefix, Span};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};
use crate::topic::Topic;

/// Order-independent hash of a whole document. Zero means absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Digest(pub u64);

impl Digest {
    pub const ABSENT: Digest = Digest(0);

    fn plus(self, item: u64) -> Self {
        Digest(self.0.wrapping_add(item))
    }

    fn minus(self, item: u64) -> Self {
        Digest(self.0.wrapping_sub(item))
    }
}

/// The life stage of a workload, and which of them a binding covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    Running,
    Staging,
}

/// A non-empty set of phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Phases(u8);

impl Phases {
    pub const RUNNING: Phases = Phases(1);
    pub const STAGING: Phases = Phases(2);
    pub const BOTH: Phases = Phases(3);

    pub fn from_bits(bits: u8) -> Option<Self> {
        (1..=3).contains(&bits).then_some(Self(bits))
    }

    pub fn bits(self) -> u8 {
        self.0
    }

    pub fn contains(self, phase: Phase) -> bool {
        let bit = match phase {
            Phase::Running => 1,
            Phase::Staging => 2,
        };
        self.0 & bit != 0
    }
}

/// In which directions a workload's policy is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Enforced {
    pub ingress: bool,
    pub egress: bool,
}

impl Enforced {
    pub const BOTH: Enforced = Enforced { ingress: true, egress: true };
}

/// One workload as its host must know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub workload: WorkloadId,
    /// Which life of the workload this is.
    pub incarnation: u64,
    pub network: NetworkId,
    pub addresses: BTreeSet<Prefix>,
    pub space: Option<SpaceId>,
    pub app: Option<AppId>,
    pub phase: Phase,
    pub enforced: Enforced,
    /// Groups bound to the workload itself, by id or by selector.
    pub groups: BTreeSet<GroupId>,
}

/// Names a rule within its group: the hash of its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleKey(pub u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    pub stateful: bool,
    pub rules: BTreeMap<RuleKey, Rule>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { stateful: true, rules: BTreeMap::new() }
    }
}

/// Addresses are kept apart from prefixes because there may be a million of them: four bytes each instead of twenty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    pub v4: BTreeSet<u32>,
    pub v6: BTreeSet<u128>,
    /// Everything that is not a single address.
    pub prefixes: BTreeSet<Prefix>,
}

impl Members {
    pub fn len(&self) -> usize {
        self.v4.len() + self.v6.len() + self.prefixes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn holds(&self, member: Prefix) -> bool {
        match host_address(member) {
            Some(IpAddr::V4(a)) => self.v4.contains(&a.to_bits()),
            Some(IpAddr::V6(a)) => self.v6.contains(&a.to_bits()),
            None => self.prefixes.contains(&member),
        }
    }

    /// Whether the address is a member, by itself or inside a prefix.
    pub fn covers(&self, address: IpAddr) -> bool {
        self.holds(Prefix::host(address)) || self.prefixes.iter().any(|p| p.contains(address))
    }

    pub fn iter(&self) -> impl Iterator<Item = Prefix> + '_ {
        let v4 = self.v4.iter().map(|&a| Prefix::host(IpAddr::V4(a.into())));
        let v6 = self.v6.iter().map(|&a| Prefix::host(IpAddr::V6(a.into())));
        v4.chain(v6).chain(self.prefixes.iter().copied())
    }

    fn insert(&mut self, member: Prefix) -> bool {
        match host_address(member) {
            Some(IpAddr::V4(a)) => self.v4.insert(a.to_bits()),
            Some(IpAddr::V6(a)) => self.v6.insert(a.to_bits()),
            None => self.prefixes.insert(member),
        }
    }

    fn remove(&mut self, member: Prefix) -> bool {
        match host_address(member) {
            Some(IpAddr::V4(a)) => self.v4.remove(&a.to_bits()),
            Some(IpAddr::V6(a)) => self.v6.remove(&a.to_bits()),
            None => self.prefixes.remove(&member),
        }
    }
}

impl FromIterator<Prefix> for Members {
    fn from_iter<I: IntoIterator<Item = Prefix>>(members: I) -> Self {
        let mut set = Self::default();
        members.into_iter().for_each(|m| {
            set.insert(m);
        });
        set
    }
}

fn host_address(member: Prefix) -> Option<IpAddr> {
    member.is_host().then(|| member.net().addr())
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Scope(BTreeMap<GroupId, Phases>),
    Host(BTreeMap<WorkloadId, Placement>),
    Rules(Rules),
    Members(Members),
}

/// One topic's change within a change. The writer never sends an item both as put and as removed: that is corruption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    Scope {
        put: Vec<(GroupId, Phases)>,
        remove: Vec<GroupId>,
    },
    Host {
        put: Vec<Placement>,
        remove: Vec<WorkloadId>,
    },
    /// `stateful` stands only where it changes.
    Rules {
        stateful: Option<bool>,
        put: Vec<Rule>,
        remove: Vec<RuleKey>,
    },
    Members {
        add: Vec<Prefix>,
        remove: Vec<Prefix>,
    },
    /// The topic's object is gone: the document becomes absent.
    Retire,
    /// The writer knows the document's digest but not how readers get there (it has no record of what was published before):
    /// readers fetch the content.
    Reset,
}

impl Edit {
    /// How many items it touches.
    pub fn len(&self) -> usize {
        match self {
            Edit::Scope { put, remove } => put.len() + remove.len(),
            Edit::Host { put, remove } => put.len() + remove.len(),
            Edit::Rules { stateful, put, remove } => usize::from(stateful.is_some()) + put.len() + remove.len(),
            Edit::Members { add, remove } => add.len() + remove.len(),
            Edit::Retire | Edit::Reset => 1,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The edit of the topic's kind that touches nothing: on an absent document it creates the empty one.
    pub fn empty(topic: &Topic) -> Self {
        match topic {
            Topic::Scope(_) => Edit::Scope { put: vec![], remove: vec![] },
            Topic::Host(_) => Edit::Host { put: vec![], remove: vec![] },
            Topic::Rules(_) => Edit::Rules { stateful: None, put: vec![], remove: vec![] },
            Topic::Members(_) => Edit::Members { add: vec![], remove: vec![] },
        }
    }

    pub fn fits(&self, topic: &Topic) -> bool {
        matches!(
            (self, topic),
            (Edit::Scope { .. }, Topic::Scope(_))
                | (Edit::Host { .. }, Topic::Host(_))
                | (Edit::Rules { .. }, Topic::Rules(_))
                | (Edit::Members { .. }, Topic::Members(_))
                | (Edit::Retire | Edit::Reset, _)
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    #[error("the edit is of another kind than the topic")]
    Kind,
    #[error("the edit names one item twice")]
    Contradiction,
    #[error("the edit carries no content: fetch the topic")]
    Reset,
}

/// What an edit would do, computed without doing it: a batch is verified whole before any of it is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub digest: Digest,
    /// Removals of absent items and additions of present ones: harmless, but worth counting.
    pub no_ops: usize,
}

/// One topic's replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    content: Option<Content>,
    digest: Digest,
}

impl Document {
    pub fn absent() -> Self {
        Self::default()
    }

    pub fn new(content: Content) -> Self {
        let digest = digest_of(&content);
        Self { content: Some(content), digest }
    }

    pub fn content(&self) -> Option<&Content> {
        self.content.as_ref()
    }

    pub fn digest(&self) -> Digest {
        self.digest
    }

    pub fn members(&self) -> Option<&Members> {
        match &self.content {
            Some(Content::Members(members)) => Some(members),
            _ => None,
        }
    }

    /// Verifies the edit and says what it leads to.
    pub fn outcome(&self, edit: &Edit) -> Result<Outcome, EditError> {
        let mut digest = self.digest;
        let mut no_ops = 0;
        // Swaps one item's old hash for its new one.
        let mut swap = |old: Option<u64>, new: Option<u64>| {
            no_ops += usize::from(old == new);
            digest = digest.minus(old.unwrap_or(0)).plus(new.unwrap_or(0));
        };
        match edit {
            Edit::Reset => return Err(EditError::Reset),
            Edit::Retire => return Ok(Outcome { digest: Digest::ABSENT, no_ops: usize::from(self.content.is_none()) }),
            Edit::Scope { put, remove } => {
                distinct(put.iter().map(|(group, _)| group).chain(remove))?;
                let empty = BTreeMap::new();
                let held = match &self.content {
                    None => &empty,
                    Some(Content::Scope(held)) => held,
                    _ => return Err(EditError::Kind),
                };
                let old = |group: &GroupId| held.get(group).map(|phases| hash_scope(group, *phases));
                put.iter().for_each(|(group, phases)| swap(old(group), Some(hash_scope(group, *phases))));
                remove.iter().for_each(|group| swap(old(group), None));
            }
            Edit::Host { put, remove } => {
                distinct(put.iter().map(|placement| &placement.workload).chain(remove))?;
                let empty = BTreeMap::new();
                let held = match &self.content {
                    None => &empty,
                    Some(Content::Host(held)) => held,
                    _ => return Err(EditError::Kind),
                };
                let old = |workload: &WorkloadId| held.get(workload).map(hash_placement);
                put.iter().for_each(|placement| swap(old(&placement.workload), Some(hash_placement(placement))));
                remove.iter().for_each(|workload| swap(old(workload), None));
            }
            Edit::Rules { stateful, put, remove } => {
                let keys: Vec<RuleKey> = put.iter().map(Rule::key).collect();
                distinct(keys.iter().chain(remove))?;
                let empty = Rules::default();
                let held = match &self.content {
                    None => &empty,
                    Some(Content::Rules(held)) => held,
                    _ => return Err(EditError::Kind),
                };
                let old = |key: &RuleKey| held.rules.contains_key(key).then_some(key.0);
                keys.iter().for_each(|key| swap(old(key), Some(key.0)));
                remove.iter().for_each(|key| swap(old(key), None));
                if let Some(stateful) = stateful {
                    swap(Some(hash_stateful(held.stateful)), Some(hash_stateful(*stateful)));
                }
            }
            Edit::Members { add, remove } => {
                distinct(add.iter().chain(remove))?;
                let empty = Members::default();
                let held = match &self.content {
                    None => &empty,
                    Some(Content::Members(held)) => held,
                    _ => return Err(EditError::Kind),
                };
                let old = |member: &Prefix| held.holds(*member).then(|| hash_member(*member));
                add.iter().for_each(|member| swap(old(member), Some(hash_member(*member))));
                remove.iter().for_each(|member| swap(old(member), None));
            }
        }
        if self.content.is_none() {
            digest = digest.plus(PRESENT);
        }
        Ok(Outcome { digest, no_ops })
    }

    /// Verifies and applies; on error nothing has changed.
    pub fn apply(&mut self, edit: &Edit) -> Result<Outcome, EditError> {
        let outcome = self.outcome(edit)?;
        match (edit, &mut self.content) {
            (Edit::Retire, content) => *content = None,
            (Edit::Scope { put, remove }, content) => {
                if let Content::Scope(held) = content.get_or_insert_with(|| Content::Scope(BTreeMap::new())) {
                    held.extend(put.iter().cloned());
                    remove.iter().for_each(|group| {
                        held.remove(group);
                    });
                }
            }
            (Edit::Host { put, remove }, content) => {
                if let Content::Host(held) = content.get_or_insert_with(|| Content::Host(BTreeMap::new())) {
                    held.extend(put.iter().map(|placement| (placement.workload.clone(), placement.clone())));
                    remove.iter().for_each(|workload| {
                        held.remove(workload);
                    });
                }
            }
            (Edit::Rules { stateful, put, remove }, content) => {
                if let Content::Rules(held) = content.get_or_insert_with(|| Content::Rules(Rules::default())) {
                    held.stateful = stateful.unwrap_or(held.stateful);
                    held.rules.extend(put.iter().map(|rule| (rule.key(), rule.clone())));
                    remove.iter().for_each(|key| {
                        held.rules.remove(key);
                    });
                }
            }
            (Edit::Members { add, remove }, content) => {
                if let Content::Members(held) = content.get_or_insert_with(|| Content::Members(Members::default())) {
                    add.iter().for_each(|member| {
                        held.insert(*member);
                    });
                    remove.iter().for_each(|member| {
                        held.remove(*member);
                    });
                }
            }
            (Edit::Reset, _) => return Err(EditError::Reset),
        }
        self.digest = outcome.digest;
        Ok(outcome)
    }

    /// Like [`Document::apply`], for an edit that is not needed any more. Where the document is absent, as with the first part of a
    /// snapshot, everything is hashed once and built in order, several times faster than item by item.
    pub fn apply_owned(&mut self, edit: Edit) -> Result<Outcome, EditError> {
        if self.content.is_some() {
            return self.apply(&edit);
        }
        let (content, items) = match edit {
            Edit::Rules { stateful, put, remove } if remove.is_empty() => {
                let items = put.len();
                let rules = put.into_iter().map(|rule| (rule.key(), rule)).collect();
                (Content::Rules(Rules { stateful: stateful.unwrap_or(Rules::default().stateful), rules }), items)
            }
            Edit::Members { add, remove } if remove.is_empty() => {
                let items = add.len();
                let mut v4 = Vec::with_capacity(items);
                let mut v6 = Vec::new();
                let mut prefixes = BTreeSet::new();
                for member in add {
                    match host_address(member) {
                        Some(IpAddr::V4(address)) => v4.push(address.to_bits()),
                        Some(IpAddr::V6(address)) => v6.push(address.to_bits()),
                        None => drop(prefixes.insert(member)),
                    }
                }
                let members = Members { v4: v4.into_iter().collect(), v6: v6.into_iter().collect(), prefixes };
                (Content::Members(members), items)
            }
            edit => return self.apply(&edit),
        };
        let built = match &content {
            Content::Rules(rules) => rules.rules.len(),
            Content::Members(members) => members.len(),
            Content::Scope(_) | Content::Host(_) => items,
        };
        if built != items {
            return Err(EditError::Contradiction);
        }
        *self = Self::new(content);
        Ok(Outcome { digest: self.digest, no_ops: 0 })
    }

    /// The edit that leads from this document to `target`; `None` when they are equal. Both must be of one topic.
    pub fn edit_to(&self, target: &Document) -> Option<Edit> {
        if self == target {
            return None;
        }
        let Some(new) = &target.content else { return Some(Edit::Retire) };
        let old = self.content.as_ref();
        Some(match (new, old) {
            (Content::Scope(new), old) => {
                let empty = BTreeMap::new();
                let old = if let Some(Content::Scope(old)) = old { old } else { &empty };
                Edit::Scope {
                    put: new.iter().filter(|(k, v)| old.get(*k) != Some(*v)).map(|(k, v)| (k.clone(), *v)).collect(),
                    remove: old.keys().filter(|k| !new.contains_key(*k)).cloned().collect(),
                }
            }
            (Content::Host(new), old) => {
                let empty = BTreeMap::new();
                let old = if let Some(Content::Host(old)) = old { old } else { &empty };
                Edit::Host {
                    put: new.values().filter(|p| old.get(&p.workload) != Some(*p)).cloned().collect(),
                    remove: old.keys().filter(|k| !new.contains_key(*k)).cloned().collect(),
                }
            }
            (Content::Rules(new), old) => {
                let empty = Rules::default();
                let old = if let Some(Content::Rules(old)) = old { old } else { &empty };
                Edit::Rules {
                    stateful: (new.stateful != old.stateful).then_some(new.stateful),
                    put: new.rules.iter().filter(|(k, _)| !old.rules.contains_key(k)).map(|(_, r)| r.clone()).collect(),
                    remove: old.rules.keys().filter(|k| !new.rules.contains_key(k)).copied().collect(),
                }
            }
            (Content::Members(new), old) => {
                let empty = Members::default();
                let old = if let Some(Content::Members(old)) = old { old } else { &empty };
                Edit::Members {
                    add: new.iter().filter(|m| !old.holds(*m)).collect(),
                    remove: old.iter().filter(|m| !new.holds(*m)).collect(),
                }
            }
        })
    }
}

fn distinct<K: Ord>(keys: impl Iterator<Item = K>) -> Result<(), EditError> {
    let mut keys: Vec<K> = keys.collect();
    // What comes from a snapshot is in order already.
    if keys.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    keys.sort_unstable();
    if keys.windows(2).any(|pair| pair[0] == pair[1]) { Err(EditError::Contradiction) } else { Ok(()) }
}

// ---- item hashes. They are on the wire (inside digests), so their input is spelled out byte by byte and never changes.

const PRESENT: u64 = 0x9e37_79b9_7f4a_7c15;
const SEED_SCOPE: u64 = 1;
const SEED_HOST: u64 = 2;
const SEED_RULE: u64 = 3;
const SEED_MEMBER: u64 = 4;
const SEED_STATEFUL: u64 = 5;

fn digest_of(content: &Content) -> Digest {
    let items = match content {
        Content::Scope(held) => held.iter().fold(Digest(0), |d, (group, phases)| d.plus(hash_scope(group, *phases))),
        Content::Host(held) => held.values().fold(Digest(0), |d, placement| d.plus(hash_placement(placement))),
        Content::Rules(held) => held.rules.keys().fold(Digest(hash_stateful(held.stateful)), |d, key| d.plus(key.0)),
        Content::Members(held) => held.iter().fold(Digest(0), |d, member| d.plus(hash_member(member))),
    };
    items.plus(PRESENT)
}

fn hash_scope(group: &GroupId, phases: Phases) -> u64 {
    let mut bytes = Bytes::default();
    bytes.text(group.as_str()).byte(phases.bits());
    bytes.hash(SEED_SCOPE)
}

/// Zero for stateful, the default, so that an empty rules document needs no special case.
fn hash_stateful(stateful: bool) -> u64 {
    if stateful { 0 } else { xxh3_64_with_seed(b"stateless", SEED_STATEFUL) }
}

fn hash_member(member: Prefix) -> u64 {
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

fn hash_placement(placement: &Placement) -> u64 {
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

#[cfg(test)]
mod tests;
