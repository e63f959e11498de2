//! What the compiler actor decides: what is read from the streams is compiled at once; published only by a leader, which first
//! compares what it compiled with what is published. Events in, effects out; no clock, no IO.
//!
//! This file says what goes in and comes out; `read` is what becomes of what arrives, `lead` what a leader does.

mod lead;
mod read;
#[cfg(test)]
mod tests;

use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;
use groupcast_topics::Map;
use groupcast_topics::batch::Refused;
use groupcast_topics::node::{Committed, Desired};

use crate::compiled::Compiled;
use crate::mirror::{Item, Mirror, Origin};
use crate::outbox::{Mark, Outbox, Parcel};
use lead::Role;
use read::Stream;

/// One or more whole changes as they were read.
#[derive(Debug, Clone, Default)]
pub struct Arrival {
    pub items: Vec<Item>,
    pub through: u64,
    pub everything: bool,
    /// Where changes end.
    pub ends: Vec<u64>,
    /// What of it belongs together; empty: all of it does.
    pub parts: Vec<Part>,
    pub read_ms: u64,
}

/// A run of an arrival's items: one whole change, or several that cannot be told apart.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub items: usize,
    /// How many of the arrival's ends are in it.
    pub ends: usize,
    pub through: u64,
}

#[derive(Debug)]
pub enum Event {
    Arrived(Origin, Arrival),
    /// The term while this controller leads.
    Leading(Option<u64>),
    /// What is published, asked for by [`Effect::AskDigests`].
    Digests {
        term: u64,
        digests: Map<Topic, Digest>,
    },
    /// Of topics asked for by [`Effect::AskDocuments`].
    Documents {
        term: u64,
        documents: Map<Topic, Document>,
    },
    /// An effect that asked for something got no answer.
    NoAnswer {
        term: u64,
    },
    /// What became of the parcel in flight.
    Decided {
        term: u64,
        result: Result<Committed, Refused>,
    },
    /// Somebody wants everything compiled that is in the streams up to these sequences.
    Want {
        id: u64,
        catalog: u64,
        registry: u64,
    },
    /// Time to try again what failed.
    Retry,
}

#[derive(Debug)]
pub enum Effect {
    /// The arrival of this origin is taken: the next may come.
    Accept(Origin),
    AskDigests {
        term: u64,
    },
    AskDocuments {
        term: u64,
        topics: Vec<Topic>,
    },
    /// Publish this; `change` is the highest number it reflects.
    Publish {
        term: u64,
        change: u64,
        parcel: Parcel,
    },
    /// These changes are published with this batch. `torn`: it is the last part of them, as no batch could hold them.
    Published {
        marks: Vec<Mark>,
        committed: Committed,
        torn: bool,
    },
    /// These changes touch no topic, and so are in force as soon as they are read. A leader says how far the topics reflect the
    /// streams with them: those who wait for it read it in its next lead message.
    TouchedNothing {
        marks: Vec<Mark>,
        reflects: Option<(u64, u64)>,
    },
    Desired {
        id: u64,
        desired: Desired,
    },
    /// Send [`Event::Retry`] in a moment.
    RetryLater,
    Report(Incident),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incident {
    /// A stream lost everything: what it said stays in force.
    Emptied {
        origin: Origin,
    },
    Refused(crate::document::Refused),
    /// A change is larger than one batch: it is published in parts.
    Torn {
        change: u64,
        topics: usize,
    },
    /// A topic that cannot be published at all.
    Unpublishable {
        topic: Topic,
    },
    /// What was compiled does not fit to what is published; it is compared again.
    Unfit {
        why: String,
    },
    Compared {
        term: u64,
        differing: usize,
    },
}

pub struct Stage {
    mirror: Mirror,
    compiled: Compiled,
    outbox: Outbox,
    in_flight: Option<Parcel>,
    role: Role,
    term: u64,
    catalog: Stream,
    registry: Stream,
    /// The highest change compiled.
    change: u64,
    /// Arrived while something was being compared: compiling it would move the ground under the comparison. One of each stream.
    deferred: Vec<(Origin, Arrival)>,
    wants: Vec<(u64, u64, u64)>,
    out: Vec<Effect>,
}

impl Default for Stage {
    fn default() -> Self {
        Self {
            mirror: Mirror::default(),
            compiled: Compiled::default(),
            outbox: Outbox::default(),
            in_flight: None,
            role: Role::Following,
            term: 0,
            catalog: Stream::default(),
            registry: Stream::default(),
            change: 0,
            deferred: Vec::new(),
            wants: Vec::new(),
            out: Vec::new(),
        }
    }
}

/// What can be seen of it from outside.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Everything was read.
    pub loaded: bool,
    /// Nothing was ever written to CATALOG: nobody leads yet.
    pub blank: bool,
    pub leading: Option<u64>,
    /// Compared, and publishing what comes.
    pub publishing: bool,
    pub catalog: u64,
    pub registry: u64,
    pub change: u64,
    pub waiting_changes: usize,
    pub in_flight: bool,
    pub topics: usize,
    pub hosts: usize,
    pub refused: Vec<crate::document::Refused>,
    pub refused_count: usize,
}

impl Stage {
    pub fn handle(&mut self, event: Event) -> Vec<Effect> {
        match event {
            Event::Arrived(origin, arrival) => self.arrived(origin, arrival),
            Event::Leading(term) => self.led(term),
            Event::Digests { term, digests } if self.awaits(Role::Comparing, term) => self.compare(&digests),
            Event::Documents { term, documents } if self.awaits(Role::Fetching, term) => self.fetched(&documents),
            Event::NoAnswer { term } if term == self.term && self.role != Role::Following => self.lose(),
            Event::Decided { term, result } if term == self.term && self.role == Role::Publishing => self.decided(result),
            Event::Want { id, catalog, registry } => self.wants.push((id, catalog, registry)),
            Event::Retry if self.role == Role::Lost => self.begin(),
            _ => {}
        }
        self.settle_wants();
        std::mem::take(&mut self.out)
    }

    fn awaits(&self, role: Role, term: u64) -> bool {
        self.role == role && self.term == term
    }

    pub fn view(&self) -> View {
        let (refused, _) = self.mirror.refused();
        View {
            loaded: self.catalog.loaded && self.registry.loaded,
            blank: !self.catalog.known,
            leading: (self.role != Role::Following).then_some(self.term),
            publishing: self.role == Role::Publishing,
            catalog: self.catalog.through,
            registry: self.registry.through,
            change: self.change,
            waiting_changes: self.outbox.changes(),
            in_flight: self.in_flight.is_some(),
            topics: self.compiled.documents().len(),
            hosts: self.compiled.hosts(),
            refused: refused.cloned().collect(),
            refused_count: self.mirror.refused_count(),
        }
    }

    /// Changes that wait, topics compiled, documents refused.
    pub fn view_counts(&self) -> (usize, usize, usize) {
        (self.outbox.changes(), self.compiled.documents().len(), self.mirror.refused_count())
    }

    /// The whole desired state.
    pub fn world(&self) -> groupcast_policy::model::World {
        self.mirror.world()
    }
}
