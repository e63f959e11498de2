//! Answers of the snapshot service: put together from chunks, staged until the closure is followed whole, installed in one commit.

use crate::Map;
use std::collections::{BTreeMap, BTreeSet};

use groupcast_messages::{Answer, Body, Chunk, Cut, Delta, Past, TopicRef};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::needs::Needs;
use groupcast_policy::topic::Topic;

use super::repair::InFlight;
use super::{Effect, Held, Incident, Reader};

/// Chunks one answer may have: far beyond any host's needs, and a bound on what a runaway answer can cost.
pub const CHUNKS_MAX: u32 = 65_536;

#[derive(Debug, Default)]
pub(super) struct Assembly {
    chunks: BTreeMap<u32, Chunk>,
    last: Option<u32>,
}

impl Assembly {
    /// Takes a chunk in any order, twice if need be; true when the answer is whole. `Err`: the chunks contradict each other.
    fn add(&mut self, chunk: Chunk) -> Result<bool, &'static str> {
        if chunk.index >= CHUNKS_MAX || self.last.is_some_and(|last| chunk.index > last) {
            return Err("a chunk lies beyond the last one");
        }
        if self.chunks.first_key_value().is_some_and(|(_, first)| first.cut != chunk.cut) {
            return Err("chunks are of different cuts");
        }
        if chunk.last {
            self.last = Some(chunk.index);
        }
        self.chunks.insert(chunk.index, chunk);
        Ok(self.last.is_some_and(|last| self.chunks.len() as u64 == u64::from(last) + 1))
    }
}

/// One topic of a whole answer.
struct Item {
    needed: bool,
    revision: u64,
    news: News,
}

enum News {
    /// What was held when the request was made.
    Same(Option<Digest>),
    Deltas(Vec<Past>),
    Document(Document),
}

/// Joins the parts of documents that were split over chunks.
fn items(asked: &[Topic], digests: &[Digest], assembly: Assembly) -> Result<(Cut, Map<Topic, Item>), &'static str> {
    let mut items: Map<Topic, Item> = Map::default();
    let mut open: Map<Topic, (Document, Digest)> = Map::default();
    let mut cut = Cut { term: 0, lead: 0 };
    for chunk in assembly.chunks.into_values() {
        cut = chunk.cut;
        for entry in chunk.entries {
            let (topic, digest) = match entry.topic {
                TopicRef::Named(topic) => (topic, None),
                TopicRef::Asked(index) => {
                    let topic = asked.get(index as usize).cloned().ok_or("an entry refers to nothing that was asked")?;
                    (topic, digests.get(index as usize).copied())
                }
            };
            let news = match entry.body {
                Body::Same => News::Same(digest),
                Body::Deltas(past) => News::Deltas(past),
                Body::Part { digest, last, edit } => {
                    if !edit.fits(&topic) {
                        return Err("a part is of another kind than its topic");
                    }
                    let (document, of) = open.entry(topic.clone()).or_insert((Document::absent(), digest));
                    if *of != digest || document.apply_owned(edit).is_err() {
                        return Err("the parts of a document do not fit together");
                    }
                    if !last {
                        continue;
                    }
                    let (document, _) = open.remove(&topic).unwrap_or_default();
                    if document.digest() != digest {
                        return Err("a document is not what its digest says");
                    }
                    News::Document(document)
                }
            };
            let item = Item { needed: entry.needed, revision: entry.revision, news };
            match (items.get_mut(&topic), item) {
                (None, item) => {
                    items.insert(topic, item);
                }
                // A list of deltas too long for one chunk goes on in the next.
                (
                    Some(Item { revision, news: News::Deltas(before), .. }),
                    Item { revision: same, news: News::Deltas(after), .. },
                ) if *revision == same => {
                    before.extend(after);
                }
                _ => return Err("a topic appears twice"),
            }
        }
    }
    if !open.is_empty() {
        return Err("a document lacks its last part");
    }
    Ok((cut, items))
}

impl Reader {
    pub(super) fn answered(&mut self, payload: &[u8], now_ms: u64) {
        let answer = match Answer::decode(payload) {
            Ok(answer) => answer,
            Err(_) => {
                self.repair.in_flight = None;
                self.report(Incident::AnswerRejected { why: "it does not decode" });
                return self.want_ask_again(now_ms);
            }
        };
        let number = match &answer {
            Answer::Chunk(chunk) => chunk.ask,
            Answer::Refused { ask, .. } => *ask,
        };
        let Some(ask) = self.repair.in_flight.as_mut().filter(|ask| ask.number == number) else {
            return; // of a request given up
        };
        let whole = match answer {
            Answer::Chunk(chunk) => {
                // A long answer is alive as long as its chunks come.
                ask.sent_ms = now_ms;
                ask.assembly.add(chunk)
            }
            Answer::Refused { reason, .. } => {
                self.repair.in_flight = None;
                self.report(Incident::AskRefused { reason });
                return self.want_ask_again(now_ms);
            }
        };
        let outcome = match whole {
            Ok(false) => return,
            Ok(true) => match self.repair.in_flight.take() {
                Some(ask) => self.take_in(ask, now_ms),
                None => return,
            },
            Err(why) => Err(why),
        };
        if let Err(why) = outcome {
            self.repair.in_flight = None;
            self.repair.forget();
            self.report(Incident::AnswerRejected { why });
            self.want_ask_again(now_ms);
        }
    }

    fn take_in(&mut self, ask: InFlight, now_ms: u64) -> Result<(), &'static str> {
        let (cut, items) = items(&ask.asked, &ask.digests, ask.assembly)?;
        if cut.term < self.term() {
            return Err("it is of a term that is over");
        }
        // Within one term revisions compare, and this host may have moved on since it asked. Under a higher term it cannot
        // have: then the answer alone counts.
        let comparable = cut.term == self.term();
        let mut listed = Map::with_capacity_and_hasher(items.len(), Default::default());
        for (topic, item) in items {
            if item.needed {
                listed.insert(topic.clone(), item.revision);
            }
            self.stage(topic, item.revision, item.news, comparable)?;
        }
        if self.cut.is_some_and(|own| own > cut) {
            // This host has moved on: what it needed at the answer's cut it may have dropped meanwhile.
            listed.retain(|topic, _| self.needs.wants(topic));
        }
        let followed: BTreeSet<&Topic> = ask.asked.iter().filter(|topic| self.subscribed.contains_key(topic)).collect();
        let fresh: Vec<Topic> = listed.keys().filter(|topic| !followed.contains(topic)).cloned().collect();
        if !fresh.is_empty() {
            // Only what is subscribed before the request is safe from holes: once more, with these.
            self.subscribe(fresh, now_ms);
            self.want_ask(now_ms, 0);
            return Ok(());
        }
        for (topic, revision) in &listed {
            let own =
                self.repair.staged.get(topic).or_else(|| self.held.0.get(topic)).map(|held| self.repair.revision(topic, held));
            let fits = own.is_some_and(|own| own == *revision || (comparable && own > *revision));
            if !fits {
                return Err("it does not lead from what is held to its cut");
            }
        }
        self.install(cut, listed, now_ms);
        Ok(())
    }

    fn stage(&mut self, topic: Topic, revision: u64, news: News, comparable: bool) -> Result<(), &'static str> {
        let moved_on =
            comparable && !self.distrusted.contains(&topic) && self.held.revision(&topic).is_some_and(|held| held > revision);
        if moved_on {
            self.repair.staged.remove(&topic);
            return Ok(());
        }
        match news {
            News::Same(digest) => {
                let held = match self.repair.staged.get_mut(&topic) {
                    Some(staged) if digest == Some(staged.document.digest()) => {
                        staged.revision = revision;
                        return Ok(());
                    }
                    Some(staged) => Some(&*staged),
                    None => self.held.0.get(&topic),
                };
                let Some(held) = held.filter(|held| held.revision != revision) else { return Ok(()) };
                // Another revision of the same content: of a stream that had to be filled again, most likely.
                if digest != Some(held.document.digest()) {
                    return Err("it calls something the same that is not held");
                }
                self.repair.renumbered.insert(topic, (revision, held.document.digest()));
            }
            News::Document(document) => {
                let hash = topic.hash64();
                self.repair.staged.insert(topic, Held { document, revision, hash });
            }
            News::Deltas(past) => {
                let base = self.repair.staged.remove(&topic).or_else(|| self.held.0.get(&topic).cloned());
                let mut staged = base.ok_or("it continues a document that is not held")?;
                for Past { revision, payload } in past {
                    if revision <= staged.revision {
                        continue;
                    }
                    let delta = Delta::decode(&topic, &payload).map_err(|_| "a delta in it does not decode")?;
                    let outcome = staged.document.apply(&delta.edit).map_err(|_| "a delta in it does not apply")?;
                    if outcome.digest != delta.digest {
                        self.distrusted.insert(topic);
                        return Err("a delta in it leads to another digest");
                    }
                    staged.revision = revision;
                    self.repair.change = self.repair.change.max(delta.change);
                }
                self.repair.staged.insert(topic, staged);
            }
        }
        Ok(())
    }

    /// All topics at once to the answer's cut.
    fn install(&mut self, cut: Cut, listed: Map<Topic, u64>, now_ms: u64) {
        let first = self.cut.is_none();
        let mut staged = std::mem::take(&mut self.repair.staged);
        let mut renumbered = std::mem::take(&mut self.repair.renumbered);
        let change = std::mem::take(&mut self.repair.change);
        let mut commit = self.new_commit(cut);
        for topic in listed.keys() {
            let Some(new) = staged.remove(topic) else {
                if let Some((revision, digest)) = renumbered.remove(topic)
                    && let Some(held) = self.held.0.get_mut(topic).filter(|held| held.document.digest() == digest)
                {
                    held.revision = revision;
                    self.acks.committed(held.hash, revision, commit.number);
                }
                continue;
            };
            let old = self.held.0.get(topic);
            if old.is_some_and(|old| cut.term == self.term() && old.revision > new.revision && !self.distrusted.contains(topic)) {
                continue;
            }
            let changed = old.is_none_or(|old| old.document.digest() != new.document.digest());
            self.acks.committed(new.hash, new.revision, commit.number);
            if changed {
                commit.edits.push((topic.clone(), None));
            }
            self.held.0.insert(topic.clone(), new);
        }
        commit.edits.sort_by(|a, b| a.0.cmp(&b.0));
        self.needs = Needs::from_scratch(&self.host, &self.held);
        let needs = &self.needs;
        self.held.0.retain(|topic, _| needs.wants(topic) || self.subscribed.contains_key(topic));
        self.cut = self.cut.max(Some(cut));
        self.distrusted.clear();
        self.repair.succeeded();
        // A snapshot says of no change; what it contains may have been heard of before, or come as deltas with it.
        commit.change = change.max(self.drop_batches_up_to(cut));
        commit.dropped = self.unsubscribe_unneeded();
        if first || !commit.edits.is_empty() || !commit.dropped.is_empty() {
            self.out.push(Effect::Commit(commit));
        } else {
            self.commits -= 1;
            self.acks.enforced(self.commits + 1); // nothing to enforce: the new revisions are in force already
        }
        let unsynced: Vec<Topic> = self.needs.topics().into_iter().filter(|topic| !self.held.0.contains_key(topic)).collect();
        if !unsynced.is_empty() {
            // The host had moved on beyond the answer's closure.
            self.subscribe(unsynced, now_ms);
            self.want_ask(now_ms, 0);
        }
        self.advance(now_ms);
    }
}
