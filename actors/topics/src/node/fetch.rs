//! Getting a copy, or what is missing of one, from another controller; where there is none, from the stream's last messages, which tell
//! revisions and digests, and a compile from scratch.

use std::collections::BTreeMap;

use groupcast_messages::{Answer, Ask, Body, Cut, Delta, TopicRef};
use groupcast_policy::doc::Document;
use groupcast_policy::topic::Topic;

use super::follow::State;
use super::{Effect, Incident, Node, Records, decode_lead};
use crate::Map;
use crate::replica::{CHAIN, Replica};

/// Of an answer, as far as it is here.
#[derive(Debug, Default)]
pub(super) struct Parts {
    chunks: BTreeMap<u32, groupcast_messages::Chunk>,
    last: Option<u32>,
}

impl Node {
    /// Asks another controller for what is missing, or for everything.
    pub(super) fn fetch(&mut self, now_ms: u64) {
        if !self.is_following() {
            // Whoever claims the lead stands at the head; a copy from elsewhere could only be older. If the claim comes to nothing
            // the head is read again.
            return;
        }
        self.follow.nothing_is_missing();
        self.follow.last_ask = self.follow.last_ask.wrapping_add(1);
        let (ask, cut) = (self.follow.last_ask, self.replica.cut());
        // What was published since is enough for a copy that is sound: one of what was published, and nothing else.
        let sound = cut != Cut::default() && self.serve.pending_resets.is_empty() && !self.serve.hold_until_published;
        let held = if sound && !self.follow.unfit { vec![(CHAIN, cut.lead)] } else { Vec::new() };
        self.follow.state = State::Fetching { ask, sent_ms: now_ms, parts: Parts::default() };
        self.out.push(Effect::AskReplica(Ask { ask, term: cut.term, held, digests: Vec::new() }.encode()));
    }

    pub(super) fn peer_answered(&mut self, payload: &[u8], now_ms: u64) {
        let State::Fetching { ask, sent_ms, parts } = &mut self.follow.state else { return };
        let chunk = match Answer::decode(payload) {
            Ok(Answer::Chunk(chunk)) if chunk.ask == *ask => chunk,
            Ok(Answer::Refused { ask: refused, .. }) if refused == *ask => return self.no_peer(now_ms),
            _ => return,
        };
        *sent_ms = now_ms;
        if chunk.last {
            parts.last = Some(chunk.index);
        }
        parts.chunks.insert(chunk.index, chunk);
        if parts.last.is_none_or(|last| parts.chunks.len() as u64 != u64::from(last) + 1) {
            return;
        }
        let chunks = std::mem::take(&mut parts.chunks);
        let mut documents: Map<Topic, (u64, Document)> = Map::default();
        let mut cut = Cut::default();
        let (mut sound, mut continues) = (true, false);
        for entry in chunks.into_values().flat_map(|chunk| {
            cut = chunk.cut;
            chunk.entries
        }) {
            let (topic, edit, last, digest) = match (entry.topic, entry.body) {
                (TopicRef::Named(topic), Body::Part { edit, last, digest }) => (topic, edit, last, digest),
                (TopicRef::Asked(_), Body::Same) => {
                    continues = entry.revision == self.replica.cut().lead;
                    sound &= continues;
                    continue;
                }
                _ => {
                    sound = false;
                    break;
                }
            };
            let (_, document) = documents.entry(topic).or_insert((entry.revision, Document::absent()));
            sound &= document.apply(&edit).is_ok() && (!last || document.digest() == digest);
        }
        if !sound {
            self.follow.unfit = true;
            return self.fetch(now_ms);
        }
        let since = self.follow.since;
        if cut.term < since {
            // The other controller does not know yet that the stream is a new one.
            return self.follow_anew(now_ms);
        }
        self.publish_by_reference(Vec::new());
        self.follow.incomplete = false; // nobody answers from a copy that is not whole
        let documents = documents.into_iter().map(|(topic, (revision, document))| (topic, revision, document));
        if !continues {
            let replica = Replica::restore(cut, since, documents);
            self.put_followers_aside();
            return self.synced(replica, now_ms);
        }
        self.put_followers_aside(); // what is replaced may refer to others than before
        let mut replica = std::mem::take(&mut self.replica);
        for (topic, revision, document) in documents {
            replica.replace(topic, revision, document);
        }
        replica.advance(cut, since);
        self.synced(replica, now_ms);
    }

    /// No controller has a copy: the stream's last messages at least tell revisions and digests.
    pub(super) fn no_peer(&mut self, now_ms: u64) {
        if matches!(self.follow.state, State::Fetching { .. }) {
            self.follow.state = State::ReadingRecords { sent_ms: now_ms };
            self.out.push(Effect::ReadRecords);
        }
    }

    pub(super) fn records_read(&mut self, records: Option<Records>, now_ms: u64) {
        if !matches!(self.follow.state, State::ReadingRecords { .. }) {
            return;
        }
        let head = records.as_ref().and_then(|records| records.head.as_ref());
        let lead = head.and_then(|(sequence, payload)| Some((*sequence, decode_lead(payload)?)));
        let (Some((sequence, lead)), Some(records)) = (lead, records) else {
            return self.follow_anew(now_ms);
        };
        let mut known = Map::with_capacity_and_hasher(records.topics.len(), Default::default());
        let cut = Cut { term: lead.term, lead: sequence };
        for (topic, revision, payload) in records.topics {
            let Ok(delta) = Delta::decode(&topic, &payload) else {
                self.out.push(Effect::Report(Incident::Malformed { at: revision }));
                continue; // not adopted: it will be published anew
            };
            known.insert(topic, (revision, delta.digest));
        }
        let ask = self.want_desired();
        self.follow.incomplete = lead.incomplete;
        self.follow.state = State::WaitingForDesired { ask, cut, since: lead.since, records: known };
    }
}
