use proptest::prelude::*;

use super::digest::{digest_of, hash_member};
use super::*;
use crate::rule::{Action, Direction, Remote, Traffic};

fn member(last: u8) -> Prefix {
    Prefix::v4(0x0a00_0000 | u32::from(last), 32).unwrap()
}

fn members(list: &[u8]) -> Document {
    Document::new(Content::Members(list.iter().map(|&m| member(m)).collect()))
}

#[test]
fn absent_empty_and_retired_are_told_apart() {
    let topic = Topic::parse("members.web").unwrap();
    let mut document = Document::absent();
    assert_eq!(document.digest(), Digest::ABSENT);
    document.apply(&Edit::empty(&topic)).unwrap();
    assert_ne!(document.digest(), Digest::ABSENT);
    assert_eq!(document, members(&[]));
    document.apply(&Edit::Retire).unwrap();
    assert_eq!(document, Document::absent());
}

/// CASES E 8, 13.
#[test]
fn a_removal_of_nothing_is_counted_and_a_contradiction_refused() {
    let mut document = members(&[1, 2]);
    let before = document.clone();
    let outcome = document.apply(&Edit::Members { add: vec![member(1)], remove: vec![member(9)] }).unwrap();
    assert_eq!((outcome.no_ops, outcome.digest), (2, before.digest()));
    for edit in [
        Edit::Members { add: vec![member(3)], remove: vec![member(3)] },
        Edit::Members { add: vec![member(3), member(3)], remove: vec![] },
    ] {
        assert_eq!(document.apply(&edit), Err(EditError::Contradiction));
    }
    assert_eq!(document.apply(&Edit::Scope { put: vec![], remove: vec![] }), Err(EditError::Kind));
    assert_eq!(document.apply(&Edit::Reset), Err(EditError::Reset));
    assert_eq!(document, before);
}

#[test]
fn families_and_lengths_do_not_collide() {
    let all = [Prefix::v4(0, 0), Prefix::v4(0, 32), Prefix::v6(0, 0), Prefix::v6(0, 32), Prefix::v6(0, 128)];
    let hashes: BTreeSet<u64> = all.iter().flatten().map(|p| hash_member(*p)).collect();
    assert_eq!(hashes.len(), all.len());
}

fn any_content(kind: u8) -> BoxedStrategy<Option<Content>> {
    let group = (0..6u8).prop_map(|i| GroupId::new(&format!("g{i}")).unwrap());
    let content = match kind {
        0 => prop::collection::btree_map(group, (1..=3u8).prop_map(|b| Phases::from_bits(b).unwrap()), 0..5)
            .prop_map(Content::Scope)
            .boxed(),
        1 => prop::collection::btree_map(0..5u8, (0..3u64, prop::collection::btree_set(group, 0..3)), 0..4)
            .prop_map(|map| {
                let placement = |(id, (incarnation, groups)): (u8, (u64, BTreeSet<GroupId>))| {
                    let workload = WorkloadId::new(&format!("w{id}")).unwrap();
                    let placement = Placement {
                        workload: workload.clone(),
                        incarnation,
                        network: NetworkId::new("n").unwrap(),
                        addresses: [member(id)].into(),
                        space: None,
                        app: None,
                        phase: Phase::Running,
                        enforced: Enforced::BOTH,
                        groups,
                    };
                    (workload, placement)
                };
                Content::Host(map.into_iter().map(placement).collect())
            })
            .boxed(),
        2 => (any::<bool>(), prop::collection::vec((any::<bool>(), prop::option::of(group)), 0..5))
            .prop_map(|(stateful, rules)| {
                let rule = |(log, remote): (bool, Option<GroupId>)| Rule {
                    action: Action::Allow,
                    direction: Direction::Ingress,
                    family: None,
                    traffic: Traffic::Any,
                    remote: remote.map_or(Remote::Any, Remote::Group),
                    log,
                };
                let rules = rules.into_iter().map(rule).map(|r| (r.key(), r)).collect();
                Content::Rules(Rules { stateful, rules })
            })
            .boxed(),
        _ => prop::collection::vec((0..8u32, 29..=32u8, any::<bool>()), 0..6)
            .prop_map(|list| {
                let prefix = |(bits, len, six): (u32, u8, bool)| {
                    if six { Prefix::v6(u128::from(bits) << 96, len + 96) } else { Prefix::v4(bits, len) }
                };
                Content::Members(list.into_iter().filter_map(prefix).collect())
            })
            .boxed(),
    };
    prop::option::of(content).boxed()
}

proptest! {
    /// The incremental digest equals the one computed from scratch, and the edit between two documents leads there.
    #[test]
    fn edits_lead_there_and_digests_agree((a, b) in (0..4u8).prop_flat_map(|kind| (any_content(kind), any_content(kind)))) {
        let document = |content: Option<Content>| content.map_or_else(Document::absent, Document::new);
        let (mut from, to) = (document(a), document(b));
        prop_assert_eq!(from == to, from.digest() == to.digest());
        if let Some(edit) = from.edit_to(&to) {
            from.apply(&edit).unwrap();
        }
        prop_assert_eq!(&from, &to);
        prop_assert_eq!(from.content().map_or(Digest::ABSENT, digest_of), from.digest());
    }
}
