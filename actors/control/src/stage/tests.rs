use std::collections::BTreeMap;
use std::sync::Arc;

use groupcast_policy::model::{Group, GroupRule, Workload};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;
use proptest::prelude::*;

use super::*;

/// A stage with what is published beside it: carries its effects out, as the bus would.
#[derive(Default)]
struct Bench {
    stage: Stage,
    published: BTreeMap<Topic, Document>,
    sequence: u64,
    open: Vec<Effect>,
    batches: usize,
    marks: Vec<u64>,
    accepted: Vec<Origin>,
}

impl Bench {
    fn handle(&mut self, event: Event) {
        let effects = self.stage.handle(event);
        self.open.extend(effects);
    }

    /// Carries out one effect; false when there is none.
    fn step(&mut self) -> bool {
        if self.open.is_empty() {
            return false;
        }
        match self.open.remove(0) {
            Effect::AskDigests { term } => {
                let digests = self.published.iter().map(|(topic, document)| (topic.clone(), document.digest())).collect();
                self.handle(Event::Digests { term, digests });
            }
            Effect::AskDocuments { term, topics } => {
                let document = |topic: &Topic| self.published.get(topic).cloned().unwrap_or_default();
                let documents = topics.iter().map(|topic| (topic.clone(), document(topic))).collect();
                self.handle(Event::Documents { term, documents });
            }
            Effect::Publish { term, parcel, .. } => {
                self.batches += 1;
                for (topic, edit) in parcel.edits() {
                    self.published.entry(topic.clone()).or_default().apply(edit).unwrap();
                }
                let committed = Committed::default();
                self.handle(Event::Decided { term, result: Ok(committed) });
            }
            Effect::Published { marks, .. } | Effect::TouchedNothing { marks, .. } => {
                self.marks.extend(marks.iter().filter_map(|mark| mark.change))
            }
            Effect::Accept(origin) => self.accepted.push(origin),
            _ => {}
        }
        true
    }

    fn run(&mut self) {
        while self.step() {}
    }

    fn arrive(&mut self, origin: Origin, items: Vec<Item>, everything: bool) {
        self.sequence += 1;
        let ends = if everything { vec![] } else { vec![self.sequence] };
        let arrival = Arrival { items, through: self.sequence, everything, ends, ..Arrival::default() };
        self.handle(Event::Arrived(origin, arrival));
    }

    /// Everything is read: one group and one workload.
    fn load(&mut self) {
        self.arrive(Origin::Catalog, vec![group(9, 9)], true);
        self.arrive(Origin::Registry, vec![workload(9, 9)], true);
    }

    /// What a fresh compile of everything says.
    fn scratch(&self) -> BTreeMap<Topic, Document> {
        groupcast_policy::scratch::documents(&self.stage.world())
    }

    fn shown(&self) -> BTreeMap<Topic, Document> {
        self.published.clone().into_iter().filter(|(_, document)| document.content().is_some()).collect()
    }
}

fn group(id: u8, remote: u8) -> Item {
    let mut group = Group::new(format!("g{id}").parse().unwrap());
    group.rules.push(GroupRule::from(parse_rule(&format!("ingress tcp 443 from group:g{remote}")).unwrap()));
    group.members.insert(Prefix::v4(0x0a000000 + u32::from(remote), 32).unwrap());
    Item::Group { id: group.id.clone(), revision: 1, group: Some(Arc::new(group)) }
}

fn no_group(id: u8) -> Item {
    Item::Group { id: format!("g{id}").parse().unwrap(), revision: 1, group: None }
}

fn workload(id: u8, group: u8) -> Item {
    let mut workload = Workload::new(format!("w{id}").parse().unwrap(), format!("h{id}").parse().unwrap(), "n".parse().unwrap());
    workload.groups.insert(format!("g{group}").parse().unwrap());
    Item::Workload { id: workload.id.clone(), workload: Some(Arc::new(workload)) }
}

#[test]
fn nothing_is_published_by_one_that_does_not_lead() {
    let mut bench = Bench::default();
    bench.load();
    bench.arrive(Origin::Catalog, vec![group(1, 2)], false);
    bench.run();
    assert_eq!((bench.batches, bench.shown().len()), (0, 0));
    assert_eq!(bench.accepted.len(), 3, "it follows all the same");
}

#[test]
fn a_leader_publishes_what_differs_and_then_every_change() {
    let mut bench = Bench::default();
    bench.load();
    bench.arrive(Origin::Catalog, vec![group(1, 1)], false);
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    assert_eq!((bench.batches, bench.shown()), (1, bench.scratch()));
    bench.arrive(Origin::Registry, vec![workload(1, 1)], false);
    bench.run();
    assert_eq!((bench.batches, bench.shown()), (2, bench.scratch()));
    // Another takes over, with the same in hand: it has nothing to publish.
    bench.handle(Event::Leading(None));
    bench.handle(Event::Leading(Some(2)));
    bench.run();
    assert_eq!(bench.batches, 2);
    assert!(bench.stage.view().publishing);
}

#[test]
fn a_change_that_touches_no_topic_is_done_without_a_batch() {
    let mut bench = Bench::default();
    bench.load();
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    bench.arrive(Origin::Catalog, vec![Item::Nothing], false);
    bench.run();
    assert_eq!((bench.batches, bench.marks.clone()), (1, vec![3]), "one batch for what was there at first");
}

#[test]
fn a_stream_that_lost_everything_takes_nothing_from_anybody() {
    let mut bench = Bench::default();
    bench.load();
    bench.arrive(Origin::Registry, vec![workload(1, 9)], false);
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    let (before, batches) = (bench.shown(), bench.batches);
    for origin in [Origin::Catalog, Origin::Registry] {
        bench.arrive(origin, vec![Item::Nothing], true);
        bench.arrive(origin, vec![Item::Nothing], false);
        bench.run();
        assert_eq!((bench.shown(), bench.batches), (before.clone(), batches), "{origin:?}");
        assert!(!bench.stage.view().publishing);
    }
    bench.handle(Event::Want { id: 1, catalog: 0, registry: 0 });
    assert!(!bench.open.iter().any(|effect| matches!(effect, Effect::Desired { .. })));
    // What is restored is everything: what is not in it is gone.
    bench.arrive(Origin::Catalog, vec![group(3, 3)], false);
    bench.arrive(Origin::Registry, vec![workload(2, 3)], false);
    bench.run();
    assert_eq!(bench.shown(), bench.scratch());
    assert_eq!(bench.stage.world().catalogue.groups.len(), 1);
}

#[test]
fn nobody_publishes_from_a_catalogue_that_nobody_has_written() {
    let mut bench = Bench::default();
    bench.published.insert(
        Topic::parse("rules.old").unwrap(),
        groupcast_policy::doc::Document::new(groupcast_policy::doc::Content::Rules(Default::default())),
    );
    bench.arrive(Origin::Catalog, vec![Item::Nothing], true);
    bench.arrive(Origin::Registry, vec![], true);
    bench.handle(Event::Leading(Some(1)));
    bench.handle(Event::Want { id: 1, catalog: 0, registry: 0 });
    bench.run();
    assert_eq!((bench.batches, bench.shown().len(), bench.stage.view().blank), (0, 1, true));
    bench.arrive(Origin::Catalog, vec![group(1, 1)], false);
    bench.run();
    assert_eq!(bench.shown(), bench.scratch());
}

#[test]
fn a_bus_that_is_said_to_be_new_is_led_although_nothing_is_written() {
    for at_once in [true, false] {
        let mut bench = Bench::default();
        bench.arrive(Origin::Catalog, if at_once { vec![Item::Nothing, Item::Begun] } else { vec![Item::Nothing] }, true);
        bench.arrive(Origin::Registry, vec![], true);
        bench.handle(Event::Leading(Some(1)));
        if !at_once {
            assert!(bench.stage.view().blank);
            bench.arrive(Origin::Catalog, vec![Item::Begun], false);
        }
        bench.run();
        let view = bench.stage.view();
        assert_eq!((view.blank, view.publishing, bench.shown().len()), (false, true, 0));
        bench.arrive(Origin::Catalog, vec![group(1, 1)], false);
        bench.run();
        assert_eq!(bench.shown(), bench.scratch());
    }
}

#[test]
fn a_bus_that_lost_its_data_is_not_new_because_somebody_says_so() {
    let mut bench = Bench::default();
    bench.arrive(Origin::Catalog, vec![group(1, 1)], true);
    bench.arrive(Origin::Registry, vec![workload(1, 1)], true);
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    let before = bench.shown();
    for (items, everything) in [(vec![Item::Begun], true), (vec![Item::Begun], false)] {
        bench.arrive(Origin::Catalog, items, everything);
        bench.run();
        assert_eq!(bench.shown(), before, "what is in force stays until it is restored");
    }
}

#[test]
fn whoever_leads_before_everything_is_read_waits() {
    let mut bench = Bench::default();
    bench.handle(Event::Leading(Some(1)));
    bench.arrive(Origin::Catalog, vec![group(1, 1)], true);
    bench.run();
    assert_eq!(bench.batches, 0);
    bench.arrive(Origin::Registry, vec![workload(1, 1)], true);
    bench.run();
    assert_eq!((bench.batches, bench.shown()), (1, bench.scratch()));
}

/// Broke: who waited for what the leader before had read and found to touch nothing, and not said so, waited until something else was written.
#[test]
fn a_leader_that_finds_everything_published_says_how_far() {
    let mut bench = Bench::default();
    bench.load();
    bench.published = bench.scratch();
    bench.handle(Event::Leading(Some(1)));
    while !bench.open.iter().any(|effect| matches!(effect, Effect::TouchedNothing { .. })) {
        assert!(bench.step(), "nobody says how far");
    }
    let told = bench.open.iter().find_map(|effect| match effect {
        Effect::TouchedNothing { marks, reflects } => Some((marks.len(), *reflects)),
        _ => None,
    });
    assert_eq!((told, bench.batches), (Some((0, Some((1, 2)))), 0));
}

/// Broke: a leader's fence in REGISTRY changes nothing, and who waited for everything up to it waited until something else was written.
#[test]
fn a_leader_says_how_far_it_is_also_where_nothing_changed() {
    let mut bench = Bench::default();
    bench.load();
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    let batches = bench.batches;
    // It ends no change.
    let fence = Arrival { items: vec![Item::Nothing], through: 3, ..Arrival::default() };
    bench.handle(Event::Arrived(Origin::Registry, fence));
    let told = bench.open.iter().find_map(|effect| match effect {
        Effect::TouchedNothing { marks, reflects } => Some((marks.len(), *reflects)),
        _ => None,
    });
    bench.run();
    assert_eq!((told, bench.batches), (Some((0, Some((1, 3)))), batches));
}

/// Read at the same time is not changed at the same time.
#[test]
fn changes_that_arrive_together_are_published_together_and_stay_apart() {
    let mut bench = Bench::default();
    bench.load();
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    let (first, second) = (bench.sequence + 1, bench.sequence + 2);
    let part = |through| Part { items: 1, ends: 1, through };
    let parts = vec![part(first), part(second)];
    let items = vec![group(1, 1), group(2, 2)];
    let arrival = Arrival { items, through: second, ends: vec![first, second], parts, ..Arrival::default() };
    bench.handle(Event::Arrived(Origin::Catalog, arrival));
    let parcel = bench.stage.in_flight.as_ref().unwrap();
    let of = |id: u8| move |topic: &Topic| topic.to_string().ends_with(&format!(".g{id}"));
    assert_eq!((parcel.wholes.len(), parcel.marks.len(), parcel.catalog), (2, 2, second));
    assert!(parcel.wholes[0].keys().all(of(1)) && parcel.wholes[1].keys().all(of(2)), "{:?}", parcel.wholes);
    bench.run();
    assert_eq!((bench.batches, bench.shown()), (2, bench.scratch()));
}

#[test]
fn while_a_batch_is_in_flight_changes_gather_and_a_full_outbox_holds_up_its_writer() {
    let mut bench = Bench::default();
    bench.load();
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    bench.accepted.clear();
    bench.arrive(Origin::Catalog, vec![group(1, 1)], false);
    // The batch stays in flight: nothing carries it out.
    for _ in 0..crate::outbox::WAITING_CHANGES_MAX {
        assert!(!bench.stage.outbox.is_full());
        bench.arrive(Origin::Catalog, vec![group(2, 10 + (bench.sequence % 200) as u8)], false);
    }
    assert!(bench.stage.outbox.is_full() && bench.stage.catalog.unaccepted, "the last one is not accepted");
    bench.run();
    assert_eq!((bench.batches, bench.shown()), (3, bench.scratch()), "all that gathered goes out as one");
    assert_eq!(bench.marks.len(), crate::outbox::WAITING_CHANGES_MAX + 1);
    assert_eq!(bench.accepted.len(), crate::outbox::WAITING_CHANGES_MAX + 1, "and every arrival was accepted in the end");
}

#[test]
fn a_refused_batch_is_made_up_for_by_comparing_again() {
    let mut bench = Bench::default();
    bench.load();
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    bench.arrive(Origin::Catalog, vec![group(1, 1)], false);
    let publish = bench.open.iter().position(|effect| matches!(effect, Effect::Publish { .. })).unwrap();
    bench.open.remove(publish);
    bench.handle(Event::Decided { term: 1, result: Err(Refused::NotLeading) });
    bench.run();
    assert_eq!(bench.batches, 1);
    bench.handle(Event::Retry);
    bench.run();
    assert_eq!((bench.batches, bench.shown()), (2, bench.scratch()));
    // A decision that comes too late is nobody's.
    bench.handle(Event::Decided { term: 1, result: Err(Refused::NotLeading) });
    assert!(bench.stage.view().publishing);
}

#[test]
fn a_change_too_large_for_one_batch_is_published_in_parts_and_reported() {
    let mut bench = Bench::default();
    bench.load();
    bench.handle(Event::Leading(Some(1)));
    bench.run();
    bench.arrive(Origin::Catalog, (0..8).map(|i| group(i, i)).collect(), false);
    let mut reported = 0;
    while let Some(at) = bench.open.iter().position(|effect| matches!(effect, Effect::Publish { .. })) {
        let Effect::Publish { term, parcel, .. } = bench.open.remove(at) else { unreachable!() };
        let result = if parcel.len() > 5 {
            Err(Refused::TooLarge { messages: parcel.len() })
        } else {
            for (topic, edit) in parcel.edits() {
                bench.published.entry(topic.clone()).or_default().apply(edit).unwrap();
            }
            Ok(Committed::default())
        };
        bench.handle(Event::Decided { term, result });
        reported += bench.open.iter().filter(|e| matches!(e, Effect::Report(Incident::Torn { .. }))).count();
    }
    assert!(reported > 0);
    assert_eq!(bench.shown(), bench.scratch());
}

#[test]
fn what_is_wanted_is_handed_over_when_everything_up_to_then_is_compiled() {
    let mut bench = Bench::default();
    bench.load();
    bench.open.clear();
    bench.handle(Event::Want { id: 1, catalog: 3, registry: 2 });
    assert!(bench.open.is_empty());
    bench.arrive(Origin::Catalog, vec![group(1, 1)], false);
    let desired = bench.open.iter().find_map(|effect| match effect {
        Effect::Desired { id: 1, desired } => Some(desired.clone()),
        _ => None,
    });
    let desired = desired.expect("handed over");
    assert_eq!((desired.catalog, desired.registry), (3, 2));
    assert_eq!(desired.documents.into_iter().collect::<BTreeMap<_, _>>(), bench.scratch());
}

proptest! {
    /// Whenever leaders come and go, and whatever arrives meanwhile, in the end what is published is what a compile from scratch
    /// says, and no batch publishes a change in part.
    #[test]
    fn published_equals_scratch(steps in prop::collection::vec((0..8u8, 0..4u8, 0..4u8, 0..5usize), 0..60)) {
        let mut bench = Bench::default();
        let mut term = 0;
        for (what, a, b, carried) in steps {
            match what {
                0 => bench.handle(Event::Leading(None)),
                1 => {
                    term += 1;
                    bench.handle(Event::Leading(Some(term)));
                }
                2 => bench.arrive(Origin::Catalog, vec![no_group(a)], false),
                3 => bench.arrive(Origin::Registry, vec![workload(a, b)], false),
                4 => bench.load(),
                5 => bench.handle(Event::NoAnswer { term }),
                6 => bench.handle(Event::Retry),
                _ => bench.arrive(Origin::Catalog, vec![group(a, b), group(b, a)], false),
            }
            for _ in 0..carried {
                bench.step();
            }
        }
        // Whatever was under way for an earlier term may or may not have been carried out.
        bench.open.clear();
        bench.load();
        bench.handle(Event::Leading(Some(term + 1)));
        bench.run();
        prop_assert_eq!(bench.shown(), bench.scratch());
    }
}
