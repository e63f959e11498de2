use proptest::prelude::*;

use super::*;
use crate::testing::*;

fn world(events: &[crate::model::Event]) -> World {
    let mut world = World::default();
    events.iter().for_each(|event| world.apply(event));
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn applied_to_the_old_policy_the_statements_give_the_new(
        before in any_events(25),
        change in any_events(8),
        questions in prop::collection::vec((any_address(), any_payload()), 40),
    ) {
        let old = world(&before);
        let mut new = old.clone();
        change.iter().for_each(|event| new.apply(event));
        let meaning = meaning(&old, &new, &mut Budget::new(&|| true)).expect("within the budget");
        for id in (0..WORKLOADS).map(workload_id) {
            for (remote, payload) in &questions {
                for direction in [Direction::Ingress, Direction::Egress] {
                    let was = old.judge(&id, direction, *remote, payload).allowed;
                    let is = new.judge(&id, direction, *remote, payload).allowed;
                    let said = meaning.after(was, &id, direction, *remote, payload);
                    prop_assert_eq!(said, is, "{} {} {} {} was {}: {:#?}", id, direction, remote, payload, was, &meaning);
                    if was != is {
                        prop_assert!(meaning.workloads.contains(&id));
                    }
                }
            }
        }
        for (statements, is_gain) in [(&meaning.gained, true), (&meaning.lost, false)] {
            for statement in statements {
                let Witness { workload, remote, payload } = &statement.witness;
                prop_assert!(statement.covers(workload, statement.direction, *remote, payload), "{}", statement);
                prop_assert_eq!(old.judge(workload, statement.direction, *remote, payload).allowed, !is_gain, "{}", statement);
                prop_assert_eq!(new.judge(workload, statement.direction, *remote, payload).allowed, is_gain, "{}", statement);
            }
        }
    }

    #[test]
    fn what_changes_nothing_means_nothing(before in any_events(25)) {
        let old = world(&before);
        prop_assert!(meaning(&old, &old, &mut Budget::new(&|| true)).expect("within the budget").is_empty());
    }

    #[test]
    fn traffic_subtraction_is_exact(a in prop::collection::vec(any_traffic(), 0..4), b in prop::collection::vec(any_traffic(), 0..4), payload in any_payload()) {
        let set = |list: &[crate::rule::Traffic]| {
            TrafficSet::union(&list.iter().map(|t| TrafficSet::of(t, Family::V4)).collect::<Vec<_>>())
        };
        let (a, b) = (set(&a), set(&b));
        let expected = a.covers(Family::V4, &payload) && !b.covers(Family::V4, &payload);
        prop_assert_eq!(a.minus(&b).covers(Family::V4, &payload), expected);
    }
}

/// A group of `count` rules that all workloads of the space have.
fn rules_of(count: u32, rule: impl Fn(u32) -> String) -> crate::model::Event {
    let mut group = crate::model::Group::new("many".parse().unwrap());
    group.rules = (0..count).map(|i| crate::text::parse_rule(&rule(i)).unwrap().into()).collect();
    let phases = crate::doc::Phases::BOTH;
    group.bindings.push(crate::model::Binding { target: crate::model::Target::Global, phases });
    crate::model::Event::group(group)
}

fn one_workload() -> World {
    let ids = ("w".parse().unwrap(), "h".parse().unwrap(), "n".parse().unwrap());
    world(&[crate::model::Event::workload(crate::model::Workload::new(ids.0, ids.1, ids.2))])
}

/// Steps that a meaning takes: what is left of a budget that is large enough.
fn steps(old: &World, new: &World) -> u64 {
    let (mut low, mut high) = (0u64, 1 << 32);
    while low < high {
        let middle = (low + high) / 2;
        match meaning(old, new, &mut Budget::limited(middle, HELD_MAX, &|| true)) {
            Err(Exceeded::Work) => low = middle + 1,
            _ => high = middle,
        }
    }
    low
}

#[test]
fn rules_with_a_prefix_each_cost_as_much_as_there_are() {
    let old = one_workload();
    let with = |count: u32| {
        let mut new = old.clone();
        let rule = |i: u32| format!("ingress tcp {} from 10.{}.{}.0/25", 1 + i % 60_000, i / 256, i % 256);
        new.apply(&rules_of(count, rule));
        new
    };
    let (few, many) = (steps(&old, &with(500)), steps(&old, &with(5_000)));
    assert!(many < 12 * few, "ten times the rules take {many} instead of {few} steps");
}

#[test]
fn what_is_too_much_to_say_is_refused_and_what_is_stopped_stops() {
    let old = one_workload();
    let mut new = old.clone();
    // Each lies within the one before: every piece has other traffic, of as many ranges as there are rules around it.
    let rule = |i: u32| {
        format!("ingress tcp {} from 10.{}.{}.0-10.{}.{}.255", 1 + 2 * i, i / 256, i % 256, 255 - i / 256, 255 - i % 256)
    };
    new.apply(&rules_of(10_000, rule));
    assert_eq!(meaning(&old, &new, &mut Budget::new(&|| true)), Err(Exceeded::Held));
    assert_eq!(meaning(&old, &new, &mut Budget::limited(1_000, HELD_MAX, &|| true)), Err(Exceeded::Work));
    assert_eq!(meaning(&old, &new, &mut Budget::new(&|| false)), Err(Exceeded::Stopped));
}
