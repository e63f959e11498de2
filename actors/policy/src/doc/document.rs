//! One topic's replica: edits are verified, applied and found.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::digest::{PRESENT, digest_of, hash_member, hash_placement, hash_scope, hash_stateful};
use super::members::{V4Addresses, host_address};
use super::{Content, Digest, Edit, EditError, Members, Outcome, RuleKey, Rules};
use crate::ids::{GroupId, WorkloadId};
use crate::net::Prefix;
use crate::rule::Rule;

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
                // Parts are written in order.
                let in_order = V4Addresses::from_sorted_iter(v4.iter().copied());
                let v4 = in_order.unwrap_or_else(|_| v4.into_iter().collect());
                let members = Members { v4, v6: v6.into_iter().collect(), prefixes };
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
