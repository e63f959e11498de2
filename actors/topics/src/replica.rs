//! Everything that is published: all documents at one cut, with enough of the recent past to bring a host up to date by deltas.

use crate::Map;
use std::cell::OnceCell;
use std::collections::{BTreeSet, VecDeque};

use groupcast_messages::{
    Answer, Ask, ChunkWriter, Cut, Delta, ENTROPY_TOPICS_MAX, EncodedDocument, EntropyAnswer, EntropyCheck, Past, TopicRef,
    entropy_item,
};
use groupcast_policy::doc::{Digest, Document, Edit};
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::{Documents, Topics, needed_unordered};
use groupcast_policy::topic::{Topic, TopicHash};

use crate::hashes::TopicsByHash;

/// Deltas kept per topic: a host that missed more gets the document.
pub const HISTORY_DELTAS_MAX: usize = 16;
/// Bytes of deltas kept per topic.
pub const HISTORY_BYTES_MAX: usize = 4_096;

/// In a controller's request to another one: the leader's chain. Whoever names the last lead message it has gets what was published
/// since, and is told so by the same name.
pub const CHAIN: TopicHash = TopicHash(0);

#[derive(Debug, Clone, Default)]
struct Kept {
    document: Document,
    /// The document as hosts get it, from the first time one asks until it changes: a thousand hosts may ask at once.
    encoded: OnceCell<EncodedDocument>,
    revision: u64,
    /// The deltas after `base`, oldest first.
    history: VecDeque<Past>,
    history_bytes: usize,
    base: u64,
}

impl Kept {
    fn remember(&mut self, past: Past) {
        self.history_bytes += past.payload.len();
        self.history.push_back(past);
        while self.history.len() > HISTORY_DELTAS_MAX || self.history_bytes > HISTORY_BYTES_MAX {
            let Some(oldest) = self.history.pop_front() else { break };
            self.history_bytes -= oldest.payload.len();
            self.base = oldest.revision;
        }
    }

    fn restart_history(&mut self, revision: u64) {
        self.history.clear();
        self.history_bytes = 0;
        self.base = revision;
    }

    fn encoded(&self) -> &EncodedDocument {
        self.encoded.get_or_init(|| EncodedDocument::new(&self.document))
    }

    /// The deltas that lead from `revision` to now, if they are all still here.
    fn after(&self, revision: u64) -> Option<Vec<Past>> {
        if revision == self.base {
            return Some(self.history.iter().cloned().collect());
        }
        let position = self.history.iter().position(|past| past.revision == revision)?;
        Some(self.history.iter().skip(position + 1).cloned().collect())
    }
}

/// One message of a batch as it was published.
#[derive(Debug, Clone)]
pub struct PublishedDelta {
    pub topic: Topic,
    pub revision: u64,
    pub delta: Delta,
    pub payload: Vec<u8>,
    /// What the delta means, where the published one is [`Edit::Reset`] and only its writer knows.
    pub meaning: Option<Edit>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("topic {topic}: the published edit does not apply to the copy held here")]
    Edit { topic: Topic },
    #[error("topic {topic}: the published edit leads to another digest than the copy held here")]
    Digest { topic: Topic },
    #[error("topic {topic}: its content was published by reference only")]
    Content { topic: Topic },
}

#[derive(Debug, Clone, Default)]
pub struct Replica {
    topics: Map<Topic, Kept>,
    by_hash: TopicsByHash,
    cut: Cut,
    /// The term under which this life of the stream began.
    since: u64,
}

impl Documents for Replica {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.topics.get(topic).map(|kept| &kept.document)
    }
}

impl Replica {
    pub fn cut(&self) -> Cut {
        self.cut
    }

    pub fn since(&self) -> u64 {
        self.since
    }

    pub fn revision(&self, topic: &Topic) -> u64 {
        self.topics.get(topic).map_or(0, |kept| kept.revision)
    }

    pub fn len(&self) -> usize {
        self.topics.len()
    }

    pub fn is_empty(&self) -> bool {
        self.topics.is_empty()
    }

    pub fn topics(&self) -> impl Iterator<Item = &Topic> {
        self.topics.keys()
    }

    pub fn documents(&self) -> impl Iterator<Item = (&Topic, &Document)> {
        self.topics.iter().map(|(topic, kept)| (topic, &kept.document))
    }

    /// An empty lead message moved the cut.
    pub fn advance(&mut self, cut: Cut, since: u64) {
        self.cut = cut;
        self.since = since;
    }

    /// Applies a whole batch or nothing of it.
    pub fn apply(&mut self, cut: Cut, since: u64, batch: &[PublishedDelta]) -> Result<(), Unfit> {
        let absent = Document::absent();
        for message in batch {
            let held = self.topics.get(&message.topic).map_or(&absent, |kept| &kept.document);
            let edit = message.meaning.as_ref().unwrap_or(&message.delta.edit);
            if *edit == Edit::Reset {
                if held.digest() == message.delta.digest {
                    continue;
                }
                return Err(Unfit::Content { topic: message.topic.clone() });
            }
            let topic = || message.topic.clone();
            let outcome = held.outcome(edit).map_err(|_| Unfit::Edit { topic: topic() })?;
            if outcome.digest != message.delta.digest {
                return Err(Unfit::Digest { topic: topic() });
            }
        }
        for message in batch {
            let kept = self.entry(&message.topic);
            let edit = message.meaning.as_ref().unwrap_or(&message.delta.edit);
            if *edit != Edit::Reset {
                // Judged above.
                let _ = kept.document.apply(edit);
                kept.encoded = OnceCell::new();
            }
            kept.revision = message.revision;
            if message.delta.edit == Edit::Reset {
                kept.restart_history(message.revision);
            } else {
                kept.remember(Past { revision: message.revision, payload: message.payload.clone() });
            }
        }
        self.advance(cut, since);
        Ok(())
    }

    fn entry(&mut self, topic: &Topic) -> &mut Kept {
        if !self.topics.contains_key(topic) {
            self.by_hash.insert(topic.hash64(), topic.clone());
        }
        self.topics.entry(topic.clone()).or_default()
    }

    /// A copy from another controller, or from scratch.
    pub fn restore(cut: Cut, since: u64, documents: impl IntoIterator<Item = (Topic, u64, Document)>) -> Self {
        let mut replica = Self { cut, since, ..Self::default() };
        for (topic, revision, document) in documents {
            replica.replace(topic, revision, document);
        }
        replica
    }

    /// How it came to be so is not known.
    pub fn replace(&mut self, topic: Topic, revision: u64, document: Document) {
        let kept = self.entry(&topic);
        kept.document = document;
        kept.encoded = OnceCell::new();
        kept.revision = revision;
        kept.restart_history(revision);
    }

    /// Of everything that makes hosts need topics: two replicas of the same structure have the same followers.
    pub fn structure(&self) -> u64 {
        let structural =
            self.documents().filter(|(topic, document)| !matches!(topic, Topic::Members(_)) && document.content().is_some());
        structural.fold(0, |sum, (topic, document)| sum.wrapping_add(entropy_item(topic.hash64(), document.digest().0)))
    }

    /// The topics that the host needs, from scratch.
    pub fn needed_by(&self, host: &HostId) -> Topics {
        needed_unordered(host, self)
    }

    /// Brings a host to this replica's cut: every topic it needs, or asks for and may read, as little as possible of each.
    ///
    /// A request names topics by hash. One that means nothing, or a topic that the host may not read, is answered as one that was never
    /// published. One that could mean several is not answered as such: what the host needs of them it is sent by name.
    pub fn answer(&self, host: &HostId, mut needed: Topics, ask: &Ask, chunk_bytes_max: usize) -> Vec<Vec<u8>> {
        let mut writer = ChunkWriter::new(ask.ask, self.cut, chunk_bytes_max);
        // Revisions of an earlier life of the stream mean nothing in this one.
        let comparable = ask.term >= self.since;
        let absent = Kept::default();
        // What was never published is found only among what is needed, which is hashed once: a host may ask for thousands.
        let mut unpublished = TopicsByHash::default();
        needed
            .iter()
            .filter(|topic| !self.topics.contains_key(*topic))
            .for_each(|topic| unpublished.insert(topic.hash64(), topic.clone()));
        for (index, (hash, held)) in ask.held.iter().enumerate() {
            let mut meant = self.by_hash.of(*hash).chain(unpublished.of(*hash)).filter(|topic| topic.is_readable_by(host));
            let topic = meant.next();
            if meant.next().is_some() {
                continue;
            }
            let is_needed = topic.is_some_and(|topic| needed.remove(topic));
            let kept = topic.and_then(|topic| self.topics.get(topic)).unwrap_or(&absent);
            let reference = TopicRef::Asked(index as u32);
            let same = *held != 0 && ask.digests.get(index).is_some_and(|digest| *digest == kept.document.digest());
            let held = if comparable { *held } else { 0 };
            if same || (held != 0 && held == kept.revision) {
                writer.push_same(reference, is_needed, kept.revision);
            } else if let Some(past) = (held != 0).then(|| kept.after(held)).flatten() {
                writer.push_deltas(reference, is_needed, kept.revision, &past);
            } else {
                writer.push_encoded(reference, is_needed, kept.revision, kept.encoded());
            }
        }
        for topic in needed.into_iter().collect::<BTreeSet<Topic>>() {
            let kept = self.topics.get(&topic).unwrap_or(&absent);
            writer.push_encoded(TopicRef::Named(topic), true, kept.revision, kept.encoded());
        }
        writer.finish()
    }

    /// Everything, or everything since the lead message it names, for another controller. Revisions are the stream's sequences, so what
    /// was published since is what has a higher one.
    pub fn dump(&self, ask: &Ask, chunk_bytes_max: usize) -> Vec<Vec<u8>> {
        let mut writer = ChunkWriter::new(ask.ask, self.cut, chunk_bytes_max);
        let named = ask.held.first().filter(|(chain, _)| *chain == CHAIN).map(|(_, lead)| *lead);
        // The revisions of an earlier life mean nothing in this one.
        let after = named.filter(|lead| ask.term >= self.since && *lead <= self.cut.lead);
        if let Some(after) = after {
            writer.push_same(TopicRef::Asked(0), true, after);
        }
        for (topic, kept) in self.topics.iter().filter(|(_, kept)| after.is_none_or(|after| kept.revision > after)) {
            writer.push_document(TopicRef::Named(topic.clone()), true, kept.revision, &kept.document);
        }
        writer.finish()
    }

    /// Whether a host holds what it needs, which is only found out if it may.
    pub fn compare(&self, needed: impl FnOnce() -> Topics, check: &EntropyCheck) -> EntropyAnswer {
        if check.term < self.since {
            // Revisions of an earlier life of the stream. A whole fleet comes back with such.
            return EntropyAnswer::Differs { cut: self.cut, revisions: Vec::new(), truncated: true };
        }
        let mut revisions: Vec<(TopicHash, u64)> = needed().iter().map(|topic| (topic.hash64(), self.revision(topic))).collect();
        let hash = revisions.iter().fold(0u64, |sum, (topic, revision)| sum.wrapping_add(entropy_item(*topic, *revision)));
        if check.topics as usize == revisions.len() && check.hash == hash {
            return EntropyAnswer::Equal { cut: self.cut };
        }
        revisions.sort_unstable();
        // Of topics with one hash it cannot be said which is behind: the host asks for everything.
        let shared = revisions.windows(2).any(|pair| pair[0].0 == pair[1].0);
        let truncated = shared || revisions.len() > ENTROPY_TOPICS_MAX;
        let revisions = if truncated { Vec::new() } else { revisions };
        EntropyAnswer::Differs { cut: self.cut, revisions, truncated }
    }

    pub fn digest(&self, topic: &Topic) -> Digest {
        self.document(topic).map_or(Digest::ABSENT, Document::digest)
    }
}

/// A refusal in the form of an answer.
pub fn refuse(ask: u32, reason: &str) -> Vec<u8> {
    Answer::Refused { ask, reason: reason.to_owned() }.encode()
}
