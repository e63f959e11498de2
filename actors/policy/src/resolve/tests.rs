use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::model::World;
use crate::scratch;
use crate::testing::*;

/// What a host holds when it follows all it needs at one cut: every document, absent where there is none.
struct Synced(HashMap<Topic, Document>);

static ABSENT: std::sync::LazyLock<Document> = std::sync::LazyLock::new(Document::absent);

impl Documents for Synced {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        Some(self.0.get(topic).unwrap_or(&ABSENT))
    }
}

/// The same with some topics not synced yet.
struct Partly<'a>(&'a Synced, BTreeSet<u64>);

impl Documents for Partly<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        let unsynced = self.1.contains(&(topic.hash64().0 % 8)) && !matches!(topic, Topic::Host(_));
        if unsynced { None } else { self.0.document(topic) }
    }
}

fn build(events: &[crate::model::Event]) -> (World, Synced) {
    let mut world = World::default();
    let mut compiler = crate::compiler::Compiler::new();
    let mut documents: HashMap<Topic, Document> = HashMap::new();
    for event in events {
        world.apply(event);
        for (topic, edit) in compiler.apply([event]).edits {
            documents.entry(topic).or_default().apply(&edit).unwrap();
        }
    }
    (world, Synced(documents))
}

fn any_question() -> impl Strategy<Value = (Direction, IpAddr, Payload)> {
    (prop::sample::select(vec![Direction::Ingress, Direction::Egress]), any_address(), any_payload())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn compiled_and_resolved_is_the_oracle(events in any_events(30), questions in prop::collection::vec(any_question(), 40)) {
        let (world, documents) = build(&events);
        for (id, workload) in &world.registry.workloads {
            let policy = resolve(&workload.host, &documents);
            prop_assert!(policy.missing.is_empty());
            prop_assert_eq!(policy.workloads[id].stateful, world.is_stateful(workload));
            for (direction, remote, payload) in &questions {
                let judgement = world.judge(id, *direction, *remote, payload);
                let resolved = policy.verdict(id, *direction, *remote, payload);
                prop_assert_eq!(resolved, judgement.allowed, "{} {} {} {}: {}", id, direction, remote, payload, judgement);
            }
        }
    }

    /// What is not synced closes, never opens.
    #[test]
    fn unsynced_topics_never_open(
        events in any_events(30),
        unsynced in prop::collection::btree_set(0..8u64, 0..4),
        questions in prop::collection::vec(any_question(), 40),
    ) {
        let (world, documents) = build(&events);
        let partly = Partly(&documents, unsynced);
        for (id, workload) in &world.registry.workloads {
            let policy = resolve(&workload.host, &partly);
            for (direction, remote, payload) in &questions {
                let verdict = policy.verdict(id, *direction, *remote, payload);
                let told = policy.explain(id, *direction, *remote, payload);
                prop_assert_eq!(told.allowed, verdict, "{}", told);
                let Why::Rule(deciding) = &told.why else {
                    prop_assert!(!verdict || told.why == Why::NotEnforced);
                    continue;
                };
                prop_assert_eq!(deciding.rule.action == Action::Allow, verdict);
                prop_assert!(policy.profile_of(id).unwrap().groups().any(|group| *group == deciding.group));
                if verdict {
                    prop_assert!(world.judge(id, *direction, *remote, payload).allowed);
                }
            }
        }
    }

    #[test]
    fn workloads_share_profiles(events in any_events(30)) {
        let (world, documents) = build(&events);
        prop_assert_eq!(scratch::documents(&world).len(), documents.0.values().filter(|d| d.content().is_some()).count());
        for host in (0..HOSTS).map(host_id) {
            let policy = resolve(&host, &documents);
            let distinct: BTreeSet<&Profile> = policy.profiles.iter().collect();
            prop_assert_eq!(distinct.len(), policy.profiles.len());
        }
    }
}
