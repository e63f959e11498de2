use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;
use crate::check;
use crate::model::World;
use crate::needs::needed;
use crate::scratch;
use crate::testing::*;

/// A compiler, the documents its edits make, the spans its changes make, and the world from scratch.
#[derive(Default)]
struct Twin {
    compiler: Compiler,
    documents: HashMap<Topic, Document>,
    spans: BTreeMap<Topic, BTreeSet<HostId>>,
    mixed: BTreeSet<WorkloadId>,
    world: World,
}

impl Twin {
    /// Applies a batch and holds everything against the world from scratch.
    fn apply(&mut self, events: &[Event]) -> Change {
        events.iter().for_each(|event| self.world.apply(event));
        let change = self.compiler.apply(events);
        for (topic, edit) in &change.edits {
            assert!(edit.fits(topic), "{topic}: {edit:?}");
            let document = self.documents.entry(topic.clone()).or_default();
            let before = document.clone();
            let outcome = document.apply(edit).unwrap_or_else(|error| panic!("{topic}: {error}: {edit:?}"));
            assert_eq!(outcome.no_ops, 0, "{topic}: an edit that does nothing: {edit:?}");
            assert_ne!(before, *document, "{topic}: published without change");
        }
        for span in &change.spans {
            let hosts = self.spans.entry(span.topic.clone()).or_default();
            span.gained.iter().for_each(|host| assert!(hosts.insert(host.clone()), "{}: {host} twice", span.topic));
            span.lost.iter().for_each(|host| assert!(hosts.remove(host), "{}: {host} was not there", span.topic));
        }
        change.mixed.gained.iter().for_each(|id| assert!(self.mixed.insert(id.clone()), "{id} was mixed before"));
        change.mixed.lost.iter().for_each(|id| assert!(self.mixed.remove(id), "{id} was not mixed"));
        self.documents.retain(|_, document| document.content().is_some());
        self.spans.retain(|_, hosts| !hosts.is_empty());
        self.check();
        change
    }

    fn check(&self) {
        let expected = scratch::documents(&self.world);
        let held: BTreeMap<Topic, Document> = self.documents.iter().map(|(t, d)| (t.clone(), d.clone())).collect();
        assert_eq!(held, expected, "edits do not lead to the documents");
        assert_eq!(self.mixed, check::mixed_workloads(&self.world), "mixed workloads are not what they are from scratch");
        assert_eq!(self.compiler.mixed_workloads(), self.mixed.iter().cloned().collect::<Vec<_>>());
        let topics: Vec<Topic> = expected.keys().cloned().collect();
        assert_eq!(self.compiler.topics(), topics);
        for (topic, document) in &expected {
            assert_eq!(self.compiler.document(topic), *document, "{topic}");
        }
        let mut spans: BTreeMap<Topic, BTreeSet<HostId>> = BTreeMap::new();
        let hosts: BTreeSet<HostId> = self.world.registry.workloads.values().map(|w| w.host.clone()).collect();
        for host in hosts {
            for topic in needed(&host, &self.documents) {
                spans.entry(topic).or_default().insert(host.clone());
            }
        }
        assert_eq!(self.spans, spans, "spans are not what hosts need");
        for (topic, hosts) in &spans {
            assert_eq!(self.compiler.span(topic).into_iter().collect::<BTreeSet<_>>(), *hosts, "{topic}");
        }
    }
}

/// Splits events into batches by the given cuts.
fn batches(events: &[Event], cuts: &[bool]) -> Vec<Vec<Event>> {
    let mut batches = vec![Vec::new()];
    for (event, cut) in events.iter().zip(cuts.iter().chain(std::iter::repeat(&false))) {
        if *cut {
            batches.push(Vec::new());
        }
        if let Some(last) = batches.last_mut() {
            last.push(event.clone());
        }
    }
    batches
}

fn removals(world: &World) -> Vec<Event> {
    let mut events: Vec<Event> = world.catalogue.groups.keys().cloned().map(Event::GroupRemoved).collect();
    events.extend(world.catalogue.templates.keys().cloned().map(Event::TemplateRemoved));
    let workloads = world.registry.workloads.values();
    events.extend(workloads.map(|w| Event::WorkloadRemoved { id: w.id.clone(), network: w.network.clone() }));
    events
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn increments_equal_scratch_event_by_event(events in any_events(25)) {
        let mut twin = Twin::default();
        for event in &events {
            twin.apply(std::slice::from_ref(event));
        }
    }

    #[test]
    fn increments_equal_scratch_however_batched(events in any_events(30), cuts in prop::collection::vec(any::<bool>(), 30)) {
        let mut twin = Twin::default();
        for batch in batches(&events, &cuts) {
            twin.apply(&batch);
            // An empty batch, and the same batch once more, change nothing if the batch names nothing twice.
            prop_assert!(twin.apply(&[]).is_empty());
        }
        let mut squashed = Twin::default();
        squashed.apply(&events);
        prop_assert_eq!(&squashed.documents, &twin.documents);
        prop_assert_eq!(&squashed.spans, &twin.spans);
    }

    #[test]
    fn a_duplicated_event_changes_nothing(events in any_events(20)) {
        let mut twin = Twin::default();
        for event in &events {
            twin.apply(std::slice::from_ref(event));
            prop_assert!(twin.apply(std::slice::from_ref(event)).is_empty());
        }
    }

    #[test]
    fn the_order_in_which_a_world_is_built_does_not_matter(events in any_events(20), seed: u64) {
        let mut world = World::default();
        events.iter().for_each(|event| world.apply(event));
        let mut forward = Twin::default();
        let mut built = world.events();
        built.iter().for_each(|event| { forward.apply(std::slice::from_ref(event)); });
        let mut reversed = Twin::default();
        built.reverse();
        built.iter().for_each(|event| { reversed.apply(std::slice::from_ref(event)); });
        prop_assert_eq!(&forward.documents, &reversed.documents);
        prop_assert_eq!(&forward.spans, &reversed.spans);
        let mut shuffled = Twin::default();
        let mut state = seed | 1;
        built.sort_by_cached_key(|_| { state = state.wrapping_mul(6364136223846793005).wrapping_add(1); state >> 33 });
        built.iter().for_each(|event| { shuffled.apply(std::slice::from_ref(event)); });
        prop_assert_eq!(&forward.documents, &shuffled.documents);
    }

    #[test]
    fn there_and_back_in_one_batch_publishes_nothing(before in any_events(15), detour in any_events(8)) {
        let mut twin = Twin::default();
        twin.apply(&before);
        let world = twin.world.clone();
        let mut batch = detour;
        batch.extend(removals(&world));
        batch.extend((0..GROUPS).map(|g| Event::GroupRemoved(group_id(g))));
        batch.extend((0..WORKLOADS).flat_map(|w| (0..2).map(move |n| Event::WorkloadRemoved { id: workload_id(w), network: network(n) })));
        batch.extend((0..2u8).map(|t| Event::TemplateRemoved(crate::ids::TemplateId::new(&format!("t{t}")).unwrap())));
        batch.extend(world.events());
        prop_assert!(twin.apply(&batch).is_empty());
    }

    #[test]
    fn nothing_stays_behind_when_all_is_removed(events in any_events(25)) {
        let mut twin = Twin::default();
        twin.apply(&events);
        let all = removals(&twin.world);
        all.iter().for_each(|event| { twin.apply(std::slice::from_ref(event)); });
        prop_assert!(twin.documents.is_empty());
        let c = &twin.compiler;
        let rows = [c.groups.len(), c.hosts.len(), c.workloads.len(), c.labels.len(), c.conditions.len(), c.templates.len()];
        prop_assert_eq!(rows, [0; 6]);
        prop_assert!(c.scopes.len() <= 1, "only the global scope may stay");
    }
}
