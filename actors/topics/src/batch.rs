//! One change as the messages of one atomic batch.

use std::collections::{BTreeMap, HashSet};

use groupcast_messages::{Companions, Delta, EDIT_ITEMS_MAX, Lead, Tally};
use groupcast_policy::doc::{Digest, Document, Edit};
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::{Documents, Followers};
use groupcast_policy::topic::{Topic, TopicHash};

use crate::replica::{PublishedDelta, Replica};
use crate::{BATCH_MESSAGES_MAX, LISTED_TOPICS_MAX};

/// A delta larger than this is published by reference ([`Edit::Reset`]): hosts fetch the document in chunks instead.
pub const DELTA_BYTES_MAX: usize = 256 * 1024;

/// What the compiler wants published: one or more whole changes.
#[derive(Debug, Clone, Default)]
pub struct Proposal {
    /// The caller's name for it, told back when it is decided.
    pub number: u64,
    /// The highest change it reflects.
    pub change: u64,
    pub catalog: u64,
    pub registry: u64,
    pub edits: Vec<(Topic, Edit)>,
    /// How many of the edits become effective together, run after run: a change is never divided, and one that has nothing to do with
    /// it need not wait for it. What comes first must not be missed by what comes later, so whoever merges changes keeps their order.
    /// Empty: all of them together.
    pub wholes: Vec<usize>,
    /// Topics whose content readers have to fetch, because nobody knows what was published before.
    pub resets: Vec<Topic>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the change needs {messages} messages, more than the {BATCH_MESSAGES_MAX} of one atomic batch: split it")]
    TooLarge { messages: usize },
    #[error("topic {topic}: the edit is malformed or of another kind than the topic")]
    Malformed { topic: Topic },
    #[error("topic {topic} is edited twice in one change")]
    Twice { topic: Topic },
    #[error("not leading: send the change to the leader")]
    NotLeading,
    #[error("{PROPOSALS_MAX} changes are waiting already: try again when some are decided")]
    Busy,
}

/// From so many hosts on acknowledgements are spread.
pub const SPREAD_HOSTS_MIN: usize = 100;
/// Nobody is kept waiting longer than this for an acknowledgement.
pub const SPREAD_MS_MAX: u32 = 2_000;

/// Changes that may wait for the one batch in flight.
pub const PROPOSALS_MAX: usize = 1_024;

/// A batch ready to be sent; sent again unchanged if its fate is unknown and it turns out not to be committed.
#[derive(Debug, Clone)]
pub struct Outgoing {
    pub proposal: Option<u64>,
    pub change: u64,
    pub lead: Lead,
    /// The lead message must directly follow this one.
    pub expected: u64,
    pub messages: Vec<OutgoingMessage>,
}

#[derive(Debug, Clone)]
pub struct OutgoingMessage {
    pub topic: Topic,
    pub delta: Delta,
    pub payload: Vec<u8>,
    pub meaning: Option<Edit>,
}

impl Outgoing {
    /// The batch as published, given its lead's sequence. A batch's sequences are contiguous.
    pub fn published(self, lead: u64) -> Vec<PublishedDelta> {
        let message = |m: OutgoingMessage| PublishedDelta {
            revision: lead + u64::from(m.delta.position),
            topic: m.topic,
            delta: m.delta,
            payload: m.payload,
            meaning: m.meaning,
        };
        self.messages.into_iter().map(message).collect()
    }
}

/// Encodes the proposal against the replica. Edits that change nothing are left out.
pub fn build(
    proposal: Proposal,
    lead: Lead,
    expected: u64,
    replica: &Replica,
    followers: &Followers,
) -> Result<Outgoing, Refused> {
    let wholes = wholes(proposal.edits, &proposal.wholes, proposal.resets, replica)?;
    let tallied = wholes.iter().any(|whole| whole.len() > LISTED_TOPICS_MAX);
    let mut tallies = if tallied { tally(wholes.iter().flat_map(BTreeMap::keys), followers) } else { BTreeMap::new() };
    let (term, change) = (lead.term, proposal.change);
    let mut messages = Vec::with_capacity(wholes.iter().map(BTreeMap::len).sum::<usize>() + tallies.len());
    let mut spread_max_ms = 0;
    for whole in wholes {
        let hashes: Vec<TopicHash> = if tallied { Vec::new() } else { whole.keys().map(Topic::hash64).collect() };
        let spread_ms = spread_ms(whole.keys().map(|topic| followers.count(topic)).max().unwrap_or(0));
        spread_max_ms = spread_max_ms.max(spread_ms);
        for (index, (topic, (edit, digest))) in whole.into_iter().enumerate() {
            let companions = match tallied {
                true => Companions::Tallied,
                false => Companions::Listed(others(&hashes, index)),
            };
            let tally = if let Topic::Host(host) = &topic { tallies.remove(host) } else { None };
            let position = messages.len() as u32 + 1;
            messages.push(encode(topic, Delta { term, change, position, edit, digest, companions, tally, spread_ms }));
        }
    }
    for (host, tally) in tallies {
        let topic = Topic::Host(host);
        let delta = Delta {
            term,
            change,
            position: messages.len() as u32 + 1,
            edit: Edit::empty(&topic),
            digest: replica.digest(&topic),
            companions: Companions::Tallied,
            tally: Some(tally),
            spread_ms: spread_max_ms,
        };
        messages.push(encode(topic, delta));
    }
    if messages.len() >= BATCH_MESSAGES_MAX {
        return Err(Refused::TooLarge { messages: messages.len() + 1 });
    }
    let lead = Lead { count: messages.len() as u32, ..lead };
    Ok(Outgoing { proposal: Some(proposal.number), change, lead, expected, messages })
}

/// All but the one at this position, each hash once.
fn others(hashes: &[TopicHash], position: usize) -> Vec<TopicHash> {
    let mut others = Vec::with_capacity(hashes.len());
    for (at, hash) in hashes.iter().enumerate() {
        if at != position && !others.contains(hash) {
            others.push(*hash);
        }
    }
    others
}

type Whole = BTreeMap<Topic, (Edit, Digest)>;

/// What becomes effective together, in order, without what changes nothing. If something is too large to be listed it is all one: a tally
/// counts everything that a host must hold of the batch.
fn wholes(edits: Vec<(Topic, Edit)>, lengths: &[usize], resets: Vec<Topic>, replica: &Replica) -> Result<Vec<Whole>, Refused> {
    let mut ends = lengths.iter().scan(0usize, |end, length| {
        *end = end.saturating_add(*length);
        Some(*end)
    });
    let mut end = ends.next().unwrap_or(usize::MAX);
    let (mut wholes, mut seen) = (vec![Whole::new()], HashSet::with_capacity(edits.len()));
    let absent = Document::absent();
    for (index, (topic, edit)) in edits.into_iter().enumerate() {
        while index >= end {
            wholes.push(Whole::new());
            end = ends.next().unwrap_or(usize::MAX);
        }
        let malformed = || Refused::Malformed { topic: topic.clone() };
        if !edit.fits(&topic) || edit == Edit::Reset {
            return Err(malformed());
        }
        let held = replica.document(&topic).unwrap_or(&absent);
        let digest = held.outcome(&edit).map_err(|_| malformed())?.digest;
        if !seen.insert(topic.clone()) {
            return Err(Refused::Twice { topic });
        }
        if digest != held.digest()
            && let Some(whole) = wholes.last_mut()
        {
            whole.insert(topic, (edit, digest));
        }
    }
    if wholes.iter().any(|whole| whole.len() > LISTED_TOPICS_MAX) {
        wholes = vec![wholes.into_iter().flatten().collect()];
    }
    // They change nothing, so there is nothing that they could be a part of.
    for topic in resets.into_iter().filter(|topic| !seen.contains(topic)) {
        let digest = replica.digest(&topic);
        wholes.push([(topic, (Edit::Reset, digest))].into());
    }
    wholes.retain(|whole| !whole.is_empty());
    Ok(wholes)
}

fn encode(topic: Topic, mut delta: Delta) -> OutgoingMessage {
    if delta.edit.len() <= EDIT_ITEMS_MAX {
        let payload = delta.encode();
        if payload.len() <= DELTA_BYTES_MAX {
            return OutgoingMessage { topic, delta, payload, meaning: None };
        }
    }
    let meaning = std::mem::replace(&mut delta.edit, Edit::Reset);
    let payload = delta.encode();
    OutgoingMessage { topic, delta, payload, meaning: Some(meaning) }
}

/// How far the acknowledgements of so many hosts are spread: ten a millisecond leave the bus and the
/// controller free for the change itself. A few hosts answer at once.
pub fn spread_ms(hosts: usize) -> u32 {
    if hosts < SPREAD_HOSTS_MIN { 0 } else { u32::try_from(hosts / 10).unwrap_or(SPREAD_MS_MAX).min(SPREAD_MS_MAX) }
}

/// What each host that follows any of the topics must hold of the batch. Its own topic's message is where it finds the tally, so
/// that one is not counted.
fn tally<'a>(topics: impl Iterator<Item = &'a Topic>, followers: &Followers) -> BTreeMap<HostId, Tally> {
    let mut tallies: BTreeMap<HostId, Tally> = BTreeMap::new();
    let none = Tally { count: 0, xor: 0 };
    for (index, topic) in topics.enumerate() {
        if let Topic::Host(host) = topic {
            // A host that appears with this change follows nothing but its own topic yet.
            tallies.entry(host.clone()).or_insert(none);
            continue;
        }
        for host in followers.of(topic) {
            let tally = tallies.entry(host.clone()).or_insert(none);
            tally.count += 1;
            tally.xor ^= index as u32 + 1;
        }
    }
    tallies
}
