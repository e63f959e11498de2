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
        let meaning = meaning(&old, &new);
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
        prop_assert!(meaning(&old, &old).is_empty());
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
