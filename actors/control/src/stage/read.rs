//! What arrives from the streams is compiled at once. A stream that lost everything takes nothing from anybody.

use groupcast_policy::model::Event as PolicyEvent;
use groupcast_topics::node::Desired;

use super::lead::Role;
use super::{Arrival, Effect, Incident, Item, Mark, Origin, Part, Stage};

#[derive(Default)]
pub(super) struct Stream {
    pub loaded: bool,
    pub through: u64,
    /// Taken, but not to be followed by more yet.
    pub unaccepted: bool,
    /// Something is in it, or was: an empty one is no reason to take everything from every host.
    pub known: bool,
    /// It is empty, and was not before: what comes next is everything.
    pub emptied: bool,
}

impl Stage {
    pub(super) fn stream(&mut self, origin: Origin) -> &mut Stream {
        match origin {
            Origin::Catalog => &mut self.catalog,
            Origin::Registry => &mut self.registry,
        }
    }

    /// Everything was read, and there is something to read. Nobody leads a bus whose catalogue nobody has written yet: it may be
    /// one that lost its data, and hosts would be told that nothing is allowed any more.
    pub(super) fn is_loaded(&self) -> bool {
        self.catalog.loaded && self.registry.loaded && self.catalog.known
    }

    /// Whether a stream that is read from the beginning has lost its contents. They stay in force until it is restored.
    fn is_emptied(&mut self, origin: Origin, arrival: &Arrival) -> bool {
        let held = match origin {
            Origin::Catalog => self.mirror.has_documents(),
            Origin::Registry => self.mirror.has_workloads(),
        };
        // That the bus is new is believed by whoever knows nothing else: what is in force here is not lost by it.
        let nothing = arrival.items.iter().all(|item| matches!(item, Item::Nothing | Item::Begun));
        let stream = self.stream(origin);
        stream.known |= arrival.items.iter().any(|item| *item != Item::Nothing);
        stream.emptied = nothing && (stream.emptied || (arrival.everything && held));
        stream.emptied
    }

    pub(super) fn arrived(&mut self, origin: Origin, arrival: Arrival) {
        if matches!(self.role, Role::Comparing | Role::Fetching) {
            return self.deferred.push((origin, arrival));
        }
        self.compile(origin, arrival);
        self.send();
    }

    pub(super) fn compile(&mut self, origin: Origin, mut arrival: Arrival) {
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
        let Arrival { items, through, everything, ends, mut parts, read_ms } = arrival;
        for item in &items {
            if let Item::Refused(refused) = item {
                self.out.push(Effect::Report(Incident::Refused(refused.clone())));
            }
        }
        if everything || parts.is_empty() {
            parts = vec![Part { items: items.len(), ends: ends.len(), through }];
        }
        let (mut items, mut ends) = (items.into_iter(), ends.into_iter());
        for part in parts {
            let (items, ends) = (items.by_ref().take(part.items).collect(), ends.by_ref().take(part.ends));
            let mark = |end: u64| Mark { change: (origin == Origin::Catalog).then_some(end), read_ms };
            let marks: Vec<Mark> = ends.map(mark).collect();
            let events = if everything { self.mirror.load(origin, items) } else { self.mirror.apply(origin, items) };
            self.compile_whole(origin, &events, marks, part.through, everything);
        }
        self.stream(origin).unaccepted = true;
        self.accept();
        if self.role == Role::Waiting {
            self.begin();
        }
    }

    fn compile_whole(&mut self, origin: Origin, events: &[PolicyEvent], marks: Vec<Mark>, through: u64, everything: bool) {
        let edits = self.compiled.apply(events);
        if origin == Origin::Catalog {
            let last = marks.last().and_then(|mark| mark.change);
            self.change = last.unwrap_or(if everything { through } else { self.change });
        }
        let stream = self.stream(origin);
        (stream.loaded, stream.through) = (true, through);
        // Also what changes nothing, such as a leader's fence: whoever waits until everything up to it is published would wait for ever.
        if self.role == Role::Publishing {
            self.outbox.add(edits, marks, (self.catalog.through, self.registry.through), self.compiled.hosts());
        } else if edits.is_empty() && !marks.is_empty() {
            self.out.push(Effect::TouchedNothing { marks, reflects: None });
        }
    }

    /// Lets more arrive, unless too much waits.
    pub(super) fn accept(&mut self) {
        if self.outbox.is_full() {
            return;
        }
        for origin in [Origin::Catalog, Origin::Registry] {
            if std::mem::take(&mut self.stream(origin).unaccepted) {
                self.out.push(Effect::Accept(origin));
            }
        }
    }

    pub(super) fn settle_wants(&mut self) {
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
}
