use proptest::prelude::*;

use super::*;
use crate::doc::{Enforced, Phases};
use crate::ids::{NetworkId, SpaceId, WorkloadId};
use crate::rule::{Action, Direction, Traffic};

fn group(i: u8) -> GroupId {
    GroupId::new(&format!("g{i}")).unwrap()
}

fn rule(remote: u8) -> Rule {
    Rule {
        action: Action::Allow,
        direction: Direction::Ingress,
        family: None,
        traffic: Traffic::Any,
        remote: Remote::Group(group(remote)),
        log: false,
    }
}

fn placement(id: u8, space: Option<u8>, phase: Phase, groups: BTreeSet<u8>) -> Placement {
    Placement {
        workload: WorkloadId::new(&format!("w{id}")).unwrap(),
        incarnation: 1,
        network: NetworkId::new("n").unwrap(),
        addresses: BTreeSet::new(),
        space: space.map(|s| SpaceId::new(&format!("s{s}")).unwrap()),
        app: None,
        phase,
        enforced: Enforced::BOTH,
        groups: groups.into_iter().map(group).collect(),
    }
}

/// A whole-document target for one of a few topics; `None` retires it.
fn any_target() -> impl Strategy<Value = (Topic, Option<Content>)> {
    let phase = prop::bool::ANY.prop_map(|s| if s { Phase::Staging } else { Phase::Running });
    let placements =
        prop::collection::btree_map(0..3u8, (prop::option::of(0..2u8), phase, prop::collection::btree_set(0..4u8, 0..2)), 0..3);
    let host = placements.prop_map(|map| {
        let list = map.into_iter().map(|(id, (space, phase, groups))| placement(id, space, phase, groups));
        Content::Host(list.map(|p| (p.workload.clone(), p)).collect())
    });
    let host =
        (0..2u8, prop::option::weighted(0.9, host)).prop_map(|(h, c)| (Topic::Host(HostId::new(&format!("h{h}")).unwrap()), c));
    let bound =
        prop::collection::btree_map((0..4u8).prop_map(group), (1..=3u8).prop_map(|b| Phases::from_bits(b).unwrap()), 0..3);
    let scope = (0..3u8, prop::option::weighted(0.9, bound.prop_map(Content::Scope))).prop_map(|(s, c)| {
        let scope = if s == 2 { Scope::Global } else { Scope::Space(SpaceId::new(&format!("s{s}")).unwrap()) };
        (Topic::Scope(scope), c)
    });
    let rules = prop::collection::btree_set(0..5u8, 0..3).prop_map(|remotes| {
        let rules = remotes.into_iter().map(rule).map(|r| (r.key(), r)).collect();
        Content::Rules(crate::doc::Rules { stateful: true, rules })
    });
    let rules = (0..4u8, prop::option::weighted(0.9, rules)).prop_map(|(g, c)| (Topic::Rules(group(g)), c));
    prop_oneof![host, scope, rules]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// After any sequence of edits the counted needs, the announced gains and losses and the followers equal the closure from scratch.
    #[test]
    fn counting_equals_the_closure(targets in prop::collection::vec(any_target(), 1..20)) {
        let me = HostId::new("h0").unwrap();
        let mut documents: HashMap<Topic, Document> = HashMap::new();
        let mut needs = Needs::of_host(&me);
        let mut followers = Followers::default();
        let mut followed: BTreeSet<Topic> = needs.topics();
        for (topic, content) in targets {
            let target = content.map_or_else(Document::absent, Document::new);
            let held = documents.get(&topic).cloned().unwrap_or_default();
            let Some(edit) = held.edit_to(&target) else { continue };
            let foreseen = needs.would_gain(&topic, &edit, &documents);
            let change = needs.edit(&topic, &edit, &documents);
            prop_assert!(change.gained.iter().all(|t| foreseen.contains(t)), "{:?} {:?}", foreseen, change);
            followers.edit(&topic, &edit, &documents);
            followed.extend(change.gained);
            change.lost.iter().for_each(|lost| { followed.remove(lost); });
            documents.entry(topic).or_default().apply(&edit).unwrap();

            let expected = needed(&me, &documents);
            prop_assert_eq!(&needs.topics(), &expected);
            prop_assert_eq!(&followed, &expected);
            let hosts = ["h0", "h1"].map(|h| HostId::new(h).unwrap());
            let present = hosts.iter().filter(|h| documents.get(&Topic::Host((*h).clone())).is_some_and(|d| d.content().is_some()));
            let scratch = Followers::of_hosts(present.cloned(), &documents);
            for host in hosts {
                prop_assert_eq!(followers.topics_of(&host), scratch.topics_of(&host));
                prop_assert!(scratch.topics_of(&host).iter().all(|t| scratch.count(t) == followers.count(t)));
                let known = documents.get(&Topic::Host(host.clone())).is_some_and(|d| d.content().is_some());
                let expected = if known { needed(&host, &documents) } else { BTreeSet::new() };
                prop_assert_eq!(followers.topics_of(&host), expected.clone());
                prop_assert!(expected.iter().all(|t| followers.of(t).any(|h| *h == host)));
            }
        }
    }

    /// Replacing a document whole counts like the edit that leads there.
    #[test]
    fn replacing_equals_editing(targets in prop::collection::vec(any_target(), 1..12)) {
        let me = HostId::new("h0").unwrap();
        let mut documents: HashMap<Topic, Document> = HashMap::new();
        let mut needs = Needs::of_host(&me);
        for (topic, content) in targets {
            let target = content.map_or_else(Document::absent, Document::new);
            let held = documents.get(&topic).cloned().unwrap_or_default();
            needs.replace(&topic, held.content(), target.content(), &documents);
            documents.insert(topic, target);
            prop_assert_eq!(needs.topics(), needed(&me, &documents));
        }
    }
}

#[test]
fn staging_groups_are_not_needed_by_a_running_workload() {
    let me = HostId::new("h").unwrap();
    let host = Topic::Host(me.clone());
    let global = Topic::Scope(Scope::Global);
    let documents: HashMap<Topic, Document> = HashMap::from([
        (
            host,
            Document::new(Content::Host(
                [placement(1, None, Phase::Running, BTreeSet::new())].map(|p| (p.workload.clone(), p)).into(),
            )),
        ),
        (global, Document::new(Content::Scope([(group(1), Phases::RUNNING), (group(2), Phases::STAGING)].into()))),
    ]);
    let needed = needed(&me, &documents);
    assert!(needed.contains(&Topic::Rules(group(1))));
    assert!(!needed.contains(&Topic::Rules(group(2))));
}
