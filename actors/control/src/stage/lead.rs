//! What a leader does: compares what it compiled with what is published, then publishes every change, one batch at a time.

use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;
use groupcast_topics::Map;
use groupcast_topics::batch::Refused;
use groupcast_topics::node::Committed;

use super::{Effect, Incident, Stage};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Following,
    /// Leads, but has not read everything yet.
    Waiting,
    Comparing,
    Fetching,
    Publishing,
    /// Something failed: compares again later, or another leads.
    Lost,
}

impl Stage {
    pub(super) fn led(&mut self, term: Option<u64>) {
        match term {
            Some(term) if term == self.term && self.role != Role::Following => {}
            Some(term) => {
                self.term = term;
                self.begin();
            }
            None => {
                self.role = Role::Following;
                self.forget();
            }
        }
    }

    /// Compares what was compiled with what is published, as soon as everything was read.
    pub(super) fn begin(&mut self) {
        self.forget();
        if self.is_loaded() {
            self.role = Role::Comparing;
            self.out.push(Effect::AskDigests { term: self.term });
        } else {
            self.role = Role::Waiting;
        }
    }

    pub(super) fn lose(&mut self) {
        self.role = Role::Lost;
        self.out.push(Effect::RetryLater);
        self.forget();
    }

    /// What waited to be published is found again by comparing.
    pub(super) fn forget(&mut self) {
        self.outbox.clear();
        self.in_flight = None;
        for (origin, arrival) in std::mem::take(&mut self.deferred) {
            self.compile(origin, arrival);
        }
        self.accept();
    }

    pub(super) fn compare(&mut self, digests: &Map<Topic, Digest>) {
        let topics = self.compiled.differing(digests);
        self.out.push(Effect::Report(Incident::Compared { term: self.term, differing: topics.len() }));
        if topics.is_empty() {
            // That all of it is published nobody may have said: who led before may have ended before its next lead message.
            self.outbox.add(Vec::new(), Vec::new(), (self.catalog.through, self.registry.through), self.compiled.hosts());
            return self.publish_from_now_on();
        }
        self.role = Role::Fetching;
        self.out.push(Effect::AskDocuments { term: self.term, topics });
    }

    pub(super) fn fetched(&mut self, published: &Map<Topic, Document>) {
        let digests = published.iter().map(|(topic, document)| (topic.clone(), document.digest()));
        // Only the topics asked for are in it, absent ones included; nothing was compiled since.
        let digests: Map<Topic, Digest> = digests.collect();
        let topics: Vec<Topic> = digests.keys().cloned().collect();
        let edits = self.compiled.edits_from(published, &topics);
        self.outbox.add(edits, Vec::new(), (self.catalog.through, self.registry.through), self.compiled.hosts());
        self.publish_from_now_on();
    }

    fn publish_from_now_on(&mut self) {
        self.role = Role::Publishing;
        for (origin, arrival) in std::mem::take(&mut self.deferred) {
            self.compile(origin, arrival);
        }
        self.send();
    }

    /// Publishes what waits, if nothing is in flight.
    pub(super) fn send(&mut self) {
        while self.role == Role::Publishing && self.in_flight.is_none() {
            let Some(parcel) = self.outbox.take() else { break };
            if parcel.is_empty() {
                let reflects = Some((parcel.catalog, parcel.registry));
                self.out.push(Effect::TouchedNothing { marks: parcel.marks, reflects });
                continue;
            }
            let change = parcel.marks.iter().filter_map(|mark| mark.change).max().unwrap_or(self.change);
            self.in_flight = Some(parcel.clone());
            self.out.push(Effect::Publish { term: self.term, change, parcel });
        }
        self.accept();
    }

    pub(super) fn decided(&mut self, result: Result<Committed, Refused>) {
        let Some(parcel) = self.in_flight.take() else { return };
        match result {
            Ok(committed) => self.out.push(Effect::Published { marks: parcel.marks, committed, torn: parcel.torn }),
            Err(Refused::TooLarge { .. }) => {
                self.out.push(Effect::Report(Incident::Torn { change: self.change, topics: parcel.len() }));
                let only = parcel.edits().next().map(|(topic, _)| topic.clone());
                match (parcel.halves(), only) {
                    (Some((first, second)), _) => {
                        self.outbox.put_back(second);
                        self.outbox.put_back(first);
                    }
                    (None, Some(topic)) => self.out.push(Effect::Report(Incident::Unpublishable { topic })),
                    (None, None) => {}
                }
            }
            Err(Refused::NotLeading | Refused::Busy) => return self.lose(),
            Err(why) => {
                self.out.push(Effect::Report(Incident::Unfit { why: why.to_string() }));
                return self.lose();
            }
        }
        self.send();
    }
}
