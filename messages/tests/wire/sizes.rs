//! The sizes that the design promises. Sizes, not times: they are the same on every machine.

use groupcast_messages::{
    CHUNK_BYTES_MAX, ChunkWriter, Companions, Cut, Delta, EncodedDocument, PLACEMENT_ADDRESSES_MAX, PLACEMENT_GROUPS_MAX,
    RULE_ADDRESS_SPANS_MAX, RULE_PORT_SPANS_MAX, TopicRef,
};
use groupcast_policy::doc::{Content, Digest, Document, Edit, Enforced, Members, Phase, Placement, Rules};
use groupcast_policy::ids::{AppId, GroupId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::net::{AddressSet, Prefix, Span};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::Topic;

use crate::support::Random;

const CUT: Cut = Cut { term: 10_000, lead: 1_000_000 };

fn join(member: Prefix) -> usize {
    let edit = Edit::Members { add: vec![member], remove: vec![] };
    let digest = Digest(0xfedc_ba98_7654_3210);
    let delta = Delta {
        term: 10_000,
        change: 10_000_000,
        position: 1,
        edit,
        digest,
        companions: Companions::NONE,
        tally: None,
        spread_ms: 0,
    };
    delta.encode().len()
}

#[test]
fn one_member_joins_in_few_bytes() {
    assert_eq!(join(Prefix::v4(0x0a01_0203, 32).unwrap()), 42);
    assert_eq!(join(Prefix::v6(0xfd00 << 112, 128).unwrap()), 54);
}

/// All payload bytes of an answer that brings one document of members.
fn snapshot(members: Members) -> usize {
    let topic = Topic::parse("members.f47ac10b-58cc-4372-a567-0e02b2c3d479").unwrap();
    let mut writer = ChunkWriter::new(1, CUT, CHUNK_BYTES_MAX);
    writer.push_document(TopicRef::Named(topic), true, 1_000_000, &Document::new(Content::Members(members)));
    let payloads = writer.finish();
    assert!(payloads.iter().all(|payload| payload.len() <= CHUNK_BYTES_MAX));
    payloads.iter().map(Vec::len).sum()
}

#[test]
fn ten_thousand_members_of_a_dense_pool() {
    let v4 = (0..10_000).map(|n| 0x0a00_0000 + n);
    let all = snapshot(Members { v4: v4.clone().collect(), ..Default::default() });
    assert!(all <= 10_200, "{all}");
    // Three of four addresses of the pool in use, in no pattern.
    let mut random = Random::new(1);
    let some = snapshot(Members {
        v4: (0..13_333).map(|n| 0x0a00_0000 + n).filter(|_| !random.chance(4)).collect(),
        ..Default::default()
    });
    assert!(some <= 20_000, "{some}");
    let v6 = snapshot(Members { v6: (0..10_000).map(|n| (0xfd00 << 112) + n).collect(), ..Default::default() });
    assert!(v6 <= 10_200, "{v6}");
}

#[test]
fn ten_thousand_members_anywhere() {
    for seed in 0..10 {
        let mut random = Random::new(seed);
        let v4: Members = Members { v4: (0..10_000).map(|_| random.word() as u32).collect(), ..Default::default() };
        let bytes = snapshot(v4);
        assert!(bytes <= 32_000, "{bytes}");
        // One subnet of 2^64 addresses, hosts numbered at random: nothing to compress but the prefix.
        let v6 = Members { v6: (0..10_000).map(|_| (0xfd00 << 112) | u128::from(random.word())).collect(), ..Default::default() };
        let bytes = snapshot(v6);
        assert!(bytes <= 90_000, "{bytes}");
    }
}

/// The worst case of any ten thousand IPv4 addresses: all gaps as long as they can be on average.
#[test]
fn no_ipv4_member_takes_more_than_five_bytes() {
    let even = (0..10_000u32).map(|n| n * (u32::MAX / 10_000)).collect();
    assert!(snapshot(Members { v4: even, ..Default::default() }) <= 50_000);
    let far = Members { v4: [0, u32::MAX].into_iter().collect(), ..Default::default() };
    let near = Members { v4: [0, 1].into_iter().collect(), ..Default::default() };
    assert_eq!(snapshot(far) - snapshot(near), 4);
}

#[test]
fn prefixes_are_small_too() {
    let prefixes = (0..1_000).map(|n| Prefix::v4(0x0a00_0000 + (n << 8), 24).unwrap());
    let bytes = snapshot(prefixes.collect());
    assert!(bytes <= 3_200, "{bytes}");
}

#[test]
fn a_large_document_is_cut_and_every_chunk_is_within_its_size() {
    let mut random = Random::new(5);
    let members = Members { v4: (0..300_000).map(|_| random.word() as u32).collect(), ..Default::default() };
    for bytes_max in [1_000, 4_096, CHUNK_BYTES_MAX, 900_000] {
        let mut writer = ChunkWriter::new(u32::MAX, Cut { term: u64::MAX, lead: u64::MAX }, bytes_max);
        let topic = TopicRef::Named(Topic::parse(&format!("scope.space.{}", "s".repeat(64))).unwrap());
        writer.push_same(topic, false, u64::MAX);
        writer.push_document(TopicRef::Asked(0), true, u64::MAX, &Document::new(Content::Members(members.clone())));
        let payloads = writer.finish();
        let longest = payloads.iter().map(Vec::len).max().unwrap();
        assert!(longest <= bytes_max, "{longest} of {bytes_max}");
        assert!(payloads.len() <= 2 + 2 * 900_000 / bytes_max, "{} chunks of {bytes_max}", payloads.len());
    }
}

// ---- items at their limits

fn id(n: usize) -> String {
    format!("{n:064}")
}

fn largest_rule() -> Rule {
    let far = |n: u128| (n << 118) + 7;
    let v6 = (0..RULE_ADDRESS_SPANS_MAX as u128).map(|n| Span::new(far(n), far(n) + (1 << 117)).unwrap()).collect();
    let v4 = (0..RULE_ADDRESS_SPANS_MAX as u32).map(|n| Span::new(n << 22, (n << 22) + (1 << 21)).unwrap()).collect();
    let ports = (0..RULE_PORT_SPANS_MAX as u16).map(|n| Span::new(n * 64, n * 64 + 32).unwrap()).collect();
    Rule {
        action: Action::Deny,
        direction: Direction::Egress,
        family: None,
        traffic: Traffic::Ports { protocol: 132, ports },
        remote: Remote::Addresses(AddressSet { v4, v6 }),
        log: true,
    }
}

fn largest_placement() -> Placement {
    Placement {
        workload: WorkloadId::new(&id(0)).unwrap(),
        incarnation: u64::MAX,
        network: NetworkId::new(&id(0)).unwrap(),
        addresses: (0..PLACEMENT_ADDRESSES_MAX as u128).map(|n| Prefix::v6(n << 8, 120).unwrap()).collect(),
        space: Some(SpaceId::new(&id(0)).unwrap()),
        app: Some(AppId::new(&id(0)).unwrap()),
        phase: Phase::Staging,
        enforced: Enforced { ingress: false, egress: true },
        groups: (0..PLACEMENT_GROUPS_MAX).map(|n| GroupId::new(&id(n)).unwrap()).collect(),
    }
}

#[test]
fn the_largest_items_fit_a_chunk() {
    let rule = largest_rule();
    let placement = largest_placement();
    let rules = Content::Rules(Rules { stateful: false, rules: [(rule.key(), rule)].into() });
    let host = Content::Host([(placement.workload.clone(), placement)].into());
    for content in [rules, host] {
        let document = Document::new(content);
        assert!(EncodedDocument::new(&document).bytes() > 20_000, "these are large");
        let mut writer = ChunkWriter::new(1, CUT, CHUNK_BYTES_MAX);
        writer.push_document(TopicRef::Asked(0), true, 1, &document);
        writer.push_document(TopicRef::Asked(1), true, 1, &document);
        let payloads = writer.finish();
        assert!(payloads.iter().all(|payload| payload.len() <= CHUNK_BYTES_MAX));
    }
}
