//! What the compiler actor decides: what is read from the streams is compiled at once; published only by a leader, which first
//! compares what it compiled with what is published. Events in, effects out; no clock, no IO.

use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::{Topic, TopicHash};
use groupcast_topics::Map;
use groupcast_topics::batch::Refused;
use groupcast_topics::node::{Committed, Desired};

use crate::compiled::Compiled;
use crate::mirror::{Item, Mirror, Origin};
use crate::outbox::{Mark, Outbox, Parcel};

/// One or more whole changes as they were read.
#[derive(Debug, Clone, Default)]
pub struct Arrival {
    pub items: Vec<Item>,
    pub through: u64,
    pub everything: bool,
    /// Where changes end.
    pub ends: Vec<u64>,
    pub read_ms: u64,
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
    /// These changes are published with this batch; without one they touched no topic.
    Published {
        marks: Vec<Mark>,
        committed: Option<Committed>,
        topics: usize,
    },
    Desired {
        id: u64,
        desired: Desired,
    },
    /// Topics that some hosts do not need any more, and the hosts that still do: nobody else is waited for.
    Unfollowed(Vec<(TopicHash, Vec<groupcast_policy::ids::HostId>)>),
    /// A leader began: what it knows of hosts begins anew.
    Began {
        term: u64,
    },
    /// Hosts that have no workload any more.
    Left(Vec<groupcast_policy::ids::HostId>),
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Following,
    /// Leads, but has not read everything yet.
    Waiting,
    Comparing,
    Fetching,
    Publishing,
    /// Something failed: compares again later, or another leads.
    Lost,
}

#[derive(Default)]
struct Stream {
    loaded: bool,
    through: u64,
    /// Taken, but not to be followed by more yet.
    unaccepted: bool,
    /// Something is in it, or was: an empty one is no reason to take everything from every host.
    known: bool,
    /// It is empty, and was not before: what comes next is everything.
    emptied: bool,
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

    fn stream(&mut self, origin: Origin) -> &mut Stream {
        match origin {
            Origin::Catalog => &mut self.catalog,
            Origin::Registry => &mut self.registry,
        }
    }

    /// Everything was read, and there is something to read. Nobody leads a bus whose catalogue nobody has written yet: it may be
    /// one that lost its data, and hosts would be told that nothing is allowed any more.
    fn is_loaded(&self) -> bool {
        self.catalog.loaded && self.registry.loaded && self.catalog.known
    }

    /// Whether a stream that is read from the beginning has lost its contents. They stay in force until it is restored.
    fn is_emptied(&mut self, origin: Origin, arrival: &Arrival) -> bool {
        let held = match origin {
            Origin::Catalog => self.mirror.has_documents(),
            Origin::Registry => self.mirror.has_workloads(),
        };
        let nothing = arrival.items.iter().all(|item| *item == Item::Nothing);
        let stream = self.stream(origin);
        stream.known |= !nothing;
        stream.emptied = nothing && (stream.emptied || (arrival.everything && held));
        stream.emptied
    }

    fn arrived(&mut self, origin: Origin, arrival: Arrival) {
        if matches!(self.role, Role::Comparing | Role::Fetching) {
            return self.deferred.push((origin, arrival));
        }
        self.compile(origin, arrival);
        self.send();
    }

    fn compile(&mut self, origin: Origin, mut arrival: Arrival) {
        let was_emptied = self.stream(origin).emptied;
        if self.is_emptied(origin, &arrival) {
            if !was_emptied {
                self.out.push(Effect::Report(Incident::Emptied { origin }));
            }
            let stream = self.stream(origin);
            (stream.loaded, stream.unaccepted) = (false, true);
            if self.role != Role::Following {
                self.role = Role::Waiting;
                self.outbox.clear();
                self.in_flight = None;
            }
            return self.accept();
        }
        arrival.everything |= was_emptied;
        let Arrival { items, through, everything, ends, read_ms } = arrival;
        for item in &items {
            if let Item::Refused(refused) = item {
                self.out.push(Effect::Report(Incident::Refused(refused.clone())));
            }
        }
        let events = if everything { self.mirror.load(origin, items) } else { self.mirror.apply(origin, items) };
        let (edits, lost) = self.compiled.apply_all(&events);
        let left = edits.iter().filter_map(|(topic, edit)| match (topic, edit) {
            (Topic::Host(host), groupcast_policy::doc::Edit::Retire) => Some(host.clone()),
            _ => None,
        });
        let left: Vec<_> = left.collect();
        if origin == Origin::Catalog {
            self.change = ends.last().copied().unwrap_or(if everything { through } else { self.change });
        }
        let stream = self.stream(origin);
        (stream.loaded, stream.through) = (true, through);
        if self.role == Role::Publishing {
            let mark = |end: &u64| Mark { change: (origin == Origin::Catalog).then_some(*end), read_ms };
            let marks: Vec<Mark> = ends.iter().map(mark).collect();
            if !edits.is_empty() || !marks.is_empty() {
                self.outbox.add(edits, marks, (self.catalog.through, self.registry.through), self.compiled.hosts());
                self.outbox.add_lost(lost);
            }
        }
        if !left.is_empty() {
            self.out.push(Effect::Left(left));
        }
        self.stream(origin).unaccepted = true;
        self.accept();
        if self.role == Role::Waiting {
            self.begin();
        }
    }

    /// Lets more arrive, unless too much waits.
    fn accept(&mut self) {
        if self.outbox.is_full() {
            return;
        }
        for origin in [Origin::Catalog, Origin::Registry] {
            if std::mem::take(&mut self.stream(origin).unaccepted) {
                self.out.push(Effect::Accept(origin));
            }
        }
    }

    fn led(&mut self, term: Option<u64>) {
        match term {
            Some(term) if term == self.term && self.role != Role::Following => {}
            Some(term) => {
                self.term = term;
                self.out.push(Effect::Began { term });
                self.begin();
            }
            None => {
                self.role = Role::Following;
                self.forget();
            }
        }
    }

    /// Compares what was compiled with what is published, as soon as everything was read.
    fn begin(&mut self) {
        self.forget();
        if self.is_loaded() {
            self.role = Role::Comparing;
            self.out.push(Effect::AskDigests { term: self.term });
        } else {
            self.role = Role::Waiting;
        }
    }

    fn lose(&mut self) {
        self.role = Role::Lost;
        self.out.push(Effect::RetryLater);
        self.forget();
    }

    /// What waited to be published is found again by comparing.
    fn forget(&mut self) {
        self.outbox.clear();
        self.in_flight = None;
        for (origin, arrival) in std::mem::take(&mut self.deferred) {
            self.compile(origin, arrival);
        }
        self.accept();
    }

    fn compare(&mut self, digests: &Map<Topic, Digest>) {
        let topics = self.compiled.differing(digests);
        self.out.push(Effect::Report(Incident::Compared { term: self.term, differing: topics.len() }));
        if topics.is_empty() {
            return self.publish_from_now_on();
        }
        self.role = Role::Fetching;
        self.out.push(Effect::AskDocuments { term: self.term, topics });
    }

    fn fetched(&mut self, published: &Map<Topic, Document>) {
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
    fn send(&mut self) {
        while self.role == Role::Publishing && self.in_flight.is_none() {
            let Some(parcel) = self.outbox.take() else { break };
            if parcel.edits.is_empty() {
                self.out.push(Effect::Published { marks: parcel.marks, committed: None, topics: 0 });
                continue;
            }
            let change = parcel.marks.iter().filter_map(|mark| mark.change).max().unwrap_or(self.change);
            self.in_flight = Some(parcel.clone());
            self.out.push(Effect::Publish { term: self.term, change, parcel });
        }
        self.accept();
    }

    fn decided(&mut self, result: Result<Committed, Refused>) {
        let Some(parcel) = self.in_flight.take() else { return };
        match result {
            Ok(committed) => {
                let topics = committed.topics.len();
                self.out.push(Effect::Published { marks: parcel.marks, committed: Some(committed), topics });
                let needed = |topic: &Topic| (topic.hash64(), self.compiled.span(topic));
                let unfollowed: Vec<_> = parcel.lost.iter().map(needed).collect();
                if !unfollowed.is_empty() {
                    self.out.push(Effect::Unfollowed(unfollowed));
                }
            }
            Err(Refused::TooLarge { .. }) => {
                self.out.push(Effect::Report(Incident::Torn { change: self.change, topics: parcel.edits.len() }));
                let only = parcel.edits.keys().next().cloned();
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

    fn settle_wants(&mut self) {
        if !self.is_loaded() || !self.deferred.is_empty() || self.wants.is_empty() {
            return;
        }
        let (catalog, registry) = (self.catalog.through, self.registry.through);
        let (ready, rest) = self.wants.drain(..).partition(|want| want.1 <= catalog && want.2 <= registry);
        self.wants = rest;
        let ready: Vec<(u64, u64, u64)> = ready;
        for (id, ..) in ready {
            let desired = Desired { documents: self.compiled.documents().clone(), catalog, registry };
            self.out.push(Effect::Desired { id, desired });
        }
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

#[cfg(test)]
#[path = "stage_tests.rs"]
mod tests;
