//! One reader and one writer without a bus between them: the test hands over every message itself, or something else instead.

use std::collections::BTreeMap;

use groupcast_messages::{Ask, Cut, Lead};
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::{Followers, needed};
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::{Proposal, build};
use groupcast_topics::reader::{Effect, Event, Incident, Reader, Settings};
use groupcast_topics::replica::Replica;

/// A message as the stream republishes it.
#[derive(Debug, Clone)]
pub struct Message {
    pub topic: Topic,
    pub revision: u64,
    pub previous: u64,
    pub payload: Vec<u8>,
}

pub struct Desk {
    pub reader: Reader,
    pub replica: Replica,
    host: HostId,
    pub now_ms: u64,
    sequence: u64,
    pub term: u64,
    pub incidents: Vec<Incident>,
    pub commits: usize,
    /// A request of the reader that has not been answered.
    pub asked: Option<Ask>,
}

impl Desk {
    pub fn new(host: HostId) -> Self {
        let reader = Reader::new(host.clone(), Settings::default(), 1);
        let replica = Replica::default();
        let mut desk =
            Self { reader, replica, host, now_ms: 0, sequence: 0, term: 5, incidents: vec![], commits: 0, asked: None };
        desk.handle(Event::Connected);
        desk
    }

    /// Writes a change, and hands it to nobody.
    pub fn write(&mut self, edits: Vec<(Topic, Edit)>) -> Vec<Message> {
        let lead = Lead {
            term: self.term,
            since: 1,
            batch: self.sequence,
            count: 0,
            catalog: 0,
            registry: 0,
            resigning: false,
            incomplete: false,
            leader: String::new(),
        };
        let proposal = Proposal { change: self.sequence, edits, ..Default::default() };
        let batch = build(proposal, lead, self.sequence, &self.replica, &Followers::default()).expect("a good change");
        let cut = Cut { term: self.term, lead: self.sequence + 1 };
        let published = batch.published(cut.lead);
        self.sequence = cut.lead + published.len() as u64;
        let message = |p: &groupcast_topics::replica::PublishedDelta| Message {
            topic: p.topic.clone(),
            revision: p.revision,
            previous: self.replica.revision(&p.topic),
            payload: p.payload.clone(),
        };
        let messages = published.iter().map(message).collect();
        self.replica.apply(cut, 1, &published).expect("built against this replica");
        messages
    }

    pub fn deliver(&mut self, message: &Message) {
        let Message { topic, revision, previous, payload } = message.clone();
        self.handle(Event::Delta { topic, revision, previous, payload: &payload });
    }

    pub fn handle(&mut self, event: Event<'_>) {
        let effects = self.reader.handle(event, self.now_ms);
        for effect in effects {
            match effect {
                Effect::Flush(number) => self.handle(Event::Flushed(number)),
                Effect::Ask(payload) => self.asked = Some(Ask::decode(&payload).expect("a request")),
                Effect::Commit(commit) => {
                    self.commits += 1;
                    self.handle(Event::Enforced(commit.number));
                }
                Effect::Report(incident) => self.incidents.push(incident),
                _ => {}
            }
        }
    }

    /// The service's answer to the request that waits, as things are now.
    pub fn answer(&mut self) -> Vec<Vec<u8>> {
        let ask = self.asked.take().expect("the reader asked");
        self.replica.answer(&self.host, self.replica.needed_by(&self.host), &ask, groupcast_messages::CHUNK_BYTES_MAX)
    }

    pub fn take(&mut self, answer: &[Vec<u8>]) {
        answer.iter().for_each(|payload| self.handle(Event::Answer(payload)));
    }

    /// Answers requests and lets time pass until the reader wants nothing more for half a second.
    pub fn repair(&mut self) {
        let end = self.now_ms + 500;
        while self.now_ms < end {
            if self.asked.is_some() {
                let answer = self.answer();
                self.take(&answer);
            }
            self.now_ms += 1;
            self.handle(Event::Tick);
        }
    }

    pub fn exposed(&self) -> BTreeMap<Topic, Document> {
        self.reader.documents().map(|(topic, document)| (topic.clone(), document.clone())).collect()
    }

    /// What the reader should expose in the end.
    pub fn published(&self) -> BTreeMap<Topic, Document> {
        use groupcast_policy::needs::Documents;
        let document = |topic: &Topic| self.replica.document(topic).cloned().unwrap_or_default();
        needed(&self.host, &self.replica).into_iter().map(|topic| (topic.clone(), document(&topic))).collect()
    }
}
