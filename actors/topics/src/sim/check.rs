//! What must never happen, checked at every state a host exposes, and what must be so in the end.

use crate::Map;
use std::collections::BTreeMap;

use groupcast_messages::{Cut, Delta, Lead};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;

use crate::reader::Reader;

/// One committed batch.
#[derive(Debug)]
struct Batch {
    lead: u64,
    topics: Vec<(Topic, u64)>,
}

/// One life of the stream.
#[derive(Debug, Default)]
struct Life {
    since: u64,
    batches: Vec<Batch>,
    digests: Map<(Topic, u64), Digest>,
}

/// Everything that was ever committed.
#[derive(Debug, Default)]
pub(super) struct History {
    lives: Vec<Life>,
    leaders: BTreeMap<u64, String>,
}

impl History {
    pub fn stream_began(&mut self) {
        self.lives.push(Life { since: u64::MAX, ..Life::default() });
    }

    pub fn committed(&mut self, sequence: u64, lead: &[u8], messages: &[(Topic, Vec<u8>)]) -> Result<(), String> {
        let lead = Lead::decode(lead).map_err(|error| format!("a lead message was committed that does not decode: {error}"))?;
        if let Some(other) = self.leaders.get(&lead.term).filter(|leader| **leader != lead.leader) {
            return Err(format!("{other} and {} both published under term {}", lead.leader, lead.term));
        }
        if self.leaders.keys().next_back().is_some_and(|highest| *highest > lead.term) {
            // A message of the past that arrived late in a new stream and found the sequence it expected by chance. Nobody may
            // ever act on it: whoever does holds a revision that is not recorded here.
            return Ok(());
        }
        self.leaders.insert(lead.term, lead.leader);
        let Some(life) = self.lives.last_mut() else { return Err("nothing can be committed without a stream".to_owned()) };
        if life.since == u64::MAX {
            life.since = lead.term;
        }
        if lead.since != life.since {
            return Err(format!("the stream lives since term {}, the lead message says {}", life.since, lead.since));
        }
        let mut topics = Vec::new();
        for (index, (topic, payload)) in messages.iter().enumerate() {
            let revision = sequence + 1 + index as u64;
            let delta = Delta::decode(topic, payload).map_err(|error| format!("{topic}: a delta does not decode: {error}"))?;
            life.digests.insert((topic.clone(), revision), delta.digest);
            topics.push((topic.clone(), revision));
        }
        life.batches.push(Batch { lead: sequence, topics });
        Ok(())
    }

    fn life_of(&self, term: u64) -> Option<&Life> {
        self.lives.iter().rev().find(|life| life.since <= term)
    }

    /// A host's exposed state: every document is exactly a published one, and no change is there in part. Where nothing can be
    /// lost without a trace (`exact`), it is the state at its cut and nothing else.
    pub fn check(&self, reader: &Reader, exact: bool) -> Result<(), String> {
        let Some(cut) = reader.cut() else { return Ok(()) };
        let life = self.life_of(cut.term).ok_or_else(|| format!("{cut:?} is of no life of the stream"))?;
        let held: Map<&Topic, (u64, &Document)> =
            reader.documents().map(|(topic, document)| (topic, (reader.revision(topic).unwrap_or(0), document))).collect();
        for (topic, (revision, document)) in &held {
            let published = match revision {
                0 => Some(Digest::ABSENT),
                _ => life.digests.get(&((*topic).clone(), *revision)).copied(),
            };
            if published != Some(document.digest()) {
                return Err(format!("{topic} at revision {revision} is not what was published there ({published:?}, {cut:?})"));
            }
        }
        let mut latest: Map<&Topic, u64> = Map::default();
        for batch in &life.batches {
            let (mut with, mut without) = (Vec::new(), Vec::new());
            for (topic, revision) in &batch.topics {
                if let Some((held, _)) = held.get(topic) {
                    if held >= revision { with.push(topic) } else { without.push(topic) }
                }
                if batch.lead <= cut.lead {
                    latest.insert(topic, *revision);
                }
            }
            if !with.is_empty() && !without.is_empty() {
                return Err(format!(
                    "the batch led by {} is exposed in part: {with:?} but not {without:?}, at {cut:?}",
                    batch.lead
                ));
            }
        }
        if exact {
            for (topic, (revision, _)) in &held {
                let expected = latest.get(topic).copied().unwrap_or(0);
                if *revision != expected {
                    return Err(format!("{topic} stands at {revision}, the cut {cut:?} at {expected}"));
                }
            }
        }
        Ok(())
    }

    pub fn head(&self) -> Option<Cut> {
        let life = self.lives.last()?;
        let lead = life.batches.last()?.lead;
        Some(Cut { term: *self.leaders.keys().next_back()?, lead })
    }
}
