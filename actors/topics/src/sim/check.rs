//! What must never happen, checked at every state a host exposes, and what must be so in the end.

use crate::Map;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use groupcast_messages::{Companions, Cut, Delta, Lead};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::needs::{Documents, needed};
use groupcast_policy::topic::{Topic, TopicHash};

use super::bus::World;
use super::policy::host;
use crate::reader::Reader;

/// One committed batch.
#[derive(Debug)]
struct Batch {
    lead: u64,
    /// What becomes effective together, in order.
    wholes: Vec<Vec<(Topic, u64)>>,
}

/// One life of the stream.
#[derive(Debug, Default)]
struct Life {
    /// Of its first lead message and of its last.
    began: u64,
    since: u64,
    incomplete: bool,
    batches: Vec<Batch>,
    digests: Map<(Topic, u64), Digest>,
}

/// Everything that was ever committed.
#[derive(Debug, Default)]
pub(super) struct History {
    lives: Vec<Life>,
    leaders: BTreeMap<u64, String>,
    /// The versions of each topic that were ever desired, in order.
    versions: Map<Topic, Vec<Digest>>,
    /// How far in that order each host has come.
    reached: Map<(usize, Topic), usize>,
}

impl History {
    pub fn stream_began(&mut self) {
        self.lives.push(Life { began: u64::MAX, ..Life::default() });
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
        if life.began == u64::MAX {
            (life.began, life.since) = (lead.term, lead.term);
        }
        // A life counts from the term of whoever completed it.
        if lead.since != life.since && !(life.incomplete && lead.since == lead.term) {
            return Err(format!("the stream lives since term {}, the lead message says {}", life.since, lead.since));
        }
        (life.since, life.incomplete) = (lead.since, lead.incomplete);
        let mut wholes: Vec<Vec<(Topic, u64)>> = Vec::new();
        // What the messages say belongs together; `None` for everything.
        let mut together: Option<BTreeSet<TopicHash>> = Some(BTreeSet::new());
        for (index, (topic, payload)) in messages.iter().enumerate() {
            let revision = sequence + 1 + index as u64;
            let delta = Delta::decode(topic, payload).map_err(|error| format!("{topic}: a delta does not decode: {error}"))?;
            life.digests.insert((topic.clone(), revision), delta.digest);
            let hash = topic.hash64();
            let of = match &delta.companions {
                Companions::Tallied => None,
                Companions::Listed(companions) => Some(companions.iter().copied().chain([hash]).collect()),
            };
            let begun = wholes.last().is_some() && together.as_ref().is_none_or(|together| together.contains(&hash));
            if begun && of != together {
                return Err(format!("{topic} at {revision} has other companions than its companions have"));
            }
            if !begun {
                wholes.push(Vec::new());
            }
            together = of;
            if let Some(whole) = wholes.last_mut() {
                whole.push((topic.clone(), revision));
            }
        }
        life.batches.push(Batch { lead: sequence, wholes });
        Ok(())
    }

    pub fn desired(&mut self, documents: &Map<Topic, Document>) {
        for (topic, document) in documents {
            let versions = self.versions.entry(topic.clone()).or_insert_with(|| vec![Digest::ABSENT]);
            if versions.last() != Some(&document.digest()) {
                versions.push(document.digest());
            }
        }
    }

    pub fn host_began(&mut self, host: usize) {
        self.reached.retain(|(of, _), _| *of != host);
    }

    /// What a host has exposed of a topic it follows it never takes back, also when the stream is lost: whoever rebuilds it knows
    /// everything that was ever accepted.
    pub fn check_forward(&mut self, host: usize, reader: &Reader) -> Result<(), String> {
        self.reached.retain(|(of, topic), _| *of != host || reader.revision(topic).is_some());
        for (topic, document) in reader.documents() {
            let Some(versions) = self.versions.get(topic) else { continue };
            let reached = self.reached.entry((host, topic.clone())).or_default();
            match versions.iter().skip(*reached).position(|digest| *digest == document.digest()) {
                Some(ahead) => *reached += ahead,
                None => {
                    let at = versions.iter().rposition(|digest| *digest == document.digest());
                    return Err(format!("{topic} went back to version {at:?} after {reached}, at {:?}", reader.cut()));
                }
            }
        }
        Ok(())
    }

    fn life_of(&self, term: u64) -> Option<&Life> {
        self.lives.iter().rev().find(|life| life.began <= term)
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
            // Where the cut is this batch's own, its wholes are there up to one of them.
            let mut last = None;
            for (number, whole) in batch.wholes.iter().enumerate() {
                let (mut with, mut without) = (Vec::new(), Vec::new());
                for (topic, revision) in whole {
                    if let Some((held, _)) = held.get(topic) {
                        if held >= revision { with.push(topic) } else { without.push(topic) }
                    }
                }
                if !with.is_empty() && !without.is_empty() {
                    return Err(format!(
                        "a change in the batch led by {} is exposed in part: {with:?} but not {without:?}, at {cut:?}",
                        batch.lead
                    ));
                }
                if !with.is_empty() {
                    last = Some(number);
                }
            }
            let count = match batch.lead.cmp(&cut.lead) {
                Ordering::Less => batch.wholes.len(),
                Ordering::Equal => last.map_or(batch.wholes.len(), |last| last + 1),
                Ordering::Greater => 0,
            };
            latest.extend(batch.wholes.iter().take(count).flatten().map(|(topic, revision)| (topic, *revision)));
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

impl World {
    /// A leader knows who follows what: otherwise spans are wrong, and tallies make changes appear in part.
    pub(super) fn check_followers(&mut self, index: usize) {
        for number in 0..self.hosts.len() as u64 {
            let host = host(number);
            let node = &mut self.nodes[index].node;
            let known = node.followers().topics_of(&host);
            let present = node.replica().document(&Topic::Host(host.clone())).is_some_and(|own| own.content().is_some());
            let expected = if present { needed(&host, node.replica()) } else { BTreeSet::new() };
            if known != expected {
                self.failure = Some(format!("the leader believes that {host} follows {known:?}; it needs {expected:?}"));
            }
        }
    }

    /// What must be so in the end.
    pub(super) fn judge(&mut self) -> Result<(), String> {
        if !self.nodes.iter().any(|state| state.node.is_leading()) {
            return Err("nobody leads in the end".to_owned());
        }
        for state in &self.nodes {
            let published: BTreeMap<&Topic, &Document> =
                state.node.replica().documents().filter(|(_, d)| d.content().is_some()).collect();
            let desired: BTreeMap<&Topic, &Document> = self.desired.iter().filter(|(_, d)| d.content().is_some()).collect();
            if published != desired {
                let differing: Vec<_> =
                    published.keys().chain(desired.keys()).filter(|t| published.get(*t) != desired.get(*t)).collect();
                return Err(format!(
                    "a controller does not hold what is desired: {differing:?}, at {:?}",
                    state.node.replica().cut()
                ));
            }
        }
        for (index, state) in self.hosts.iter().enumerate() {
            let wanted = needed(&host(index as u64), &self.desired);
            let held: BTreeSet<Topic> = state.reader.documents().map(|(topic, _)| topic.clone()).collect();
            if held != wanted
                || state.reader.subscriptions() != wanted
                || state.subscribed.iter().cloned().collect::<BTreeSet<_>>() != wanted
            {
                return Err(format!("host {index} holds {held:?}, follows {:?}, needs {wanted:?}", state.reader.subscriptions()));
            }
            for (topic, document) in state.reader.documents() {
                if Some(document) != self.desired.get(topic) && document.content().is_some() {
                    return Err(format!(
                        "host {index} ends with another {topic} at {:?} of {:?}",
                        state.reader.cut(),
                        self.history.head()
                    ));
                }
            }
            if state.reader.pending() > 0 {
                return Err(format!("host {index} still holds {} deltas back", state.reader.pending()));
            }
            self.script.ended(index, &state.reader).map_err(|failure| format!("host {index}: {failure}"))?;
        }
        self.script.settled()
    }
}
