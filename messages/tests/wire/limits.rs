//! Every limit at its bound and one above.

use std::collections::BTreeMap;

use groupcast_messages::{
    ACK_TOPICS_MAX, ASK_TOPICS_MAX, AUDITED_NAMED_MAX, Ack, Answer, Ask, Beat, Body, CHUNK_ENTRIES_MAX, COMPANIONS_MAX, Chunk,
    ChunkWriter, Companions, Cut, DecodeError, Delta, EDIT_ITEMS_MAX, ENTROPY_TOPICS_MAX, ENTRY_DELTAS_MAX, EntropyAnswer, Entry,
    HostState, LABEL_KEY_BYTES_MAX, LABEL_VALUE_BYTES_MAX, LABELS_MAX, LEADER_BYTES_MAX, Lead, NUDGE_TOPICS_MAX, Nudge,
    PLACEMENT_ADDRESSES_MAX, PLACEMENT_GROUPS_MAX, Past, REASON_BYTES_MAX, REGISTER_WORKLOADS_MAX, RULE_ADDRESS_SPANS_MAX,
    RULE_PORT_SPANS_MAX, Register, RegisterAnswer, RegisterWorkload, STATE_NAME_BYTES_MAX, TopicRef, VERSION_BYTES_MAX,
    check_edit,
};
use groupcast_policy::doc::{Digest, Edit, Enforced, Phase, Placement};
use groupcast_policy::ids::{GroupId, NetworkId, WorkloadId};
use groupcast_policy::net::{AddressSet, PortSet, Prefix, Span};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::{Topic, TopicHash};

use crate::support::value::Value;

const CUT: Cut = Cut { term: 1, lead: 2 };

/// `decode(n)` encodes and decodes something with n of what is limited.
fn bounded<T: std::fmt::Debug>(max: usize, decode: impl Fn(usize) -> Result<T, DecodeError>) {
    decode(max).unwrap_or_else(|error| panic!("at the bound: {error}"));
    match decode(max + 1) {
        Err(DecodeError::TooMany { found, max: named, .. }) => assert_eq!((found, named), (max + 1, max)),
        other => panic!("one above {max}: {other:?}"),
    }
}

fn revisions(count: usize) -> Vec<(TopicHash, u64)> {
    (0..count as u64).map(|n| (TopicHash(n), n)).collect()
}

#[test]
fn topics_with_revisions() {
    bounded(ASK_TOPICS_MAX, |n| Ask::decode(&Ask { ask: 1, term: 1, held: revisions(n), digests: vec![Digest(7); n] }.encode()));
    bounded(AUDITED_NAMED_MAX, |n| {
        // Whoever writes cuts; whoever reads refuses.
        let names: Vec<Value> = (0..n).map(|i| Value::text(&format!("w{i}"))).collect();
        let fields =
            [("v", Value::Uint(1)), ("t", Value::Uint(1)), ("s", Value::text("auditing-some")), ("w", Value::List(names))];
        let fields = fields.into_iter().map(|(key, value)| (Value::text(key), value)).collect();
        Ack::decode(&Value::Map(fields).encode())
    });
    bounded(ACK_TOPICS_MAX, |n| Ack::decode(&Ack { term: 1, state: HostState::Enforcing, reached: revisions(n) }.encode()));
    bounded(NUDGE_TOPICS_MAX, |n| Nudge::decode(&Nudge { cut: CUT, should: revisions(n) }.encode()));
    bounded(ENTROPY_TOPICS_MAX, |n| {
        EntropyAnswer::decode(&EntropyAnswer::Differs { cut: CUT, revisions: revisions(n), truncated: true }.encode())
    });
}

// ---- edits

fn delta(edit: Edit) -> Delta {
    Delta { term: 1, change: 2, position: 1, edit, digest: Digest(3), companions: Companions::NONE, tally: None, spread_ms: 0 }
}

/// Sends an edit, and has the writer's own check agree with the reader.
fn send(topic: &str, edit: Edit) -> Result<Delta, DecodeError> {
    let checked = check_edit(&edit);
    let decoded = Delta::decode(&Topic::parse(topic).unwrap(), &delta(edit).encode());
    assert_eq!(checked.is_ok(), decoded.is_ok(), "{checked:?}");
    decoded
}

#[test]
fn companions() {
    bounded(COMPANIONS_MAX, |n| {
        let companions = Companions::Listed((0..n as u64).map(TopicHash).collect());
        Delta::decode(&Topic::parse("members.web").unwrap(), &Delta { companions, ..delta(Edit::Retire) }.encode())
    });
}

#[test]
fn items_of_an_edit() {
    let address = |n: usize| Prefix::v4(n as u32, 32).unwrap();
    bounded(EDIT_ITEMS_MAX, |n| send("members.web", Edit::Members { add: (0..n).map(address).collect(), remove: vec![] }));
    // The bound is on all items together, whichever field they stand in.
    for add in [1, EDIT_ITEMS_MAX - 1] {
        let both = |all: usize| Edit::Members { add: (0..add).map(address).collect(), remove: (add..all).map(address).collect() };
        assert!(send("members.web", both(EDIT_ITEMS_MAX)).is_ok());
        assert!(send("members.web", both(EDIT_ITEMS_MAX + 1)).is_err());
    }
}

fn placement() -> Placement {
    Placement {
        workload: WorkloadId::new("w").unwrap(),
        incarnation: 1,
        network: NetworkId::new("n").unwrap(),
        addresses: Default::default(),
        space: None,
        app: None,
        phase: Phase::Running,
        enforced: Enforced::BOTH,
        groups: Default::default(),
    }
}

#[test]
fn groups_and_addresses_of_a_placement() {
    let host = |placement| send("host.h1", Edit::Host { put: vec![placement], remove: vec![] });
    bounded(PLACEMENT_GROUPS_MAX, |n| {
        host(Placement { groups: (0..n).map(|n| GroupId::new(&format!("g{n}")).unwrap()).collect(), ..placement() })
    });
    bounded(PLACEMENT_ADDRESSES_MAX, |n| {
        let address = |n| if n % 2 == 0 { Prefix::v4(n as u32, 32) } else { Prefix::v6((n as u128) << 64, 64) };
        host(Placement { addresses: (0..n).filter_map(address).collect(), ..placement() })
    });
}

fn rule(traffic: Traffic, remote: Remote) -> Result<Delta, DecodeError> {
    let rule = Rule { action: Action::Allow, direction: Direction::Ingress, family: None, traffic, remote, log: false };
    send("rules.web", Edit::Rules { stateful: None, put: vec![rule], remove: vec![] })
}

#[test]
fn ranges_of_a_rule() {
    bounded(RULE_PORT_SPANS_MAX, |n| {
        let ports: PortSet = (0..n as u16).map(|n| Span::one(3 * n)).collect();
        rule(Traffic::Ports { protocol: 6, ports }, Remote::Any)
    });
    bounded(RULE_ADDRESS_SPANS_MAX, |n| {
        let v4 = (0..n as u32).map(|n| Span::one(1000 * n)).collect();
        rule(Traffic::Any, Remote::Addresses(AddressSet { v4, ..Default::default() }))
    });
    bounded(RULE_ADDRESS_SPANS_MAX, |n| {
        let v6 = (0..n as u128).map(|n| Span::one(n << 100)).collect();
        rule(Traffic::Any, Remote::Addresses(AddressSet { v6, ..Default::default() }))
    });
}

// ---- answers

fn entries(count: usize) -> Vec<Entry> {
    (0..count as u32).map(|n| Entry { topic: TopicRef::Asked(n), needed: true, revision: 0, body: Body::Same }).collect()
}

fn past(count: usize) -> Vec<Past> {
    (0..count as u64).map(|revision| Past { revision, payload: vec![] }).collect()
}

#[test]
fn entries_of_a_chunk_and_deltas_of_an_entry() {
    let chunk = |entries| Chunk::decode(&Chunk { ask: 1, index: 0, last: true, cut: CUT, entries }.encode());
    bounded(CHUNK_ENTRIES_MAX, |n| chunk(entries(n)));
    bounded(ENTRY_DELTAS_MAX, |n| {
        chunk(vec![Entry { topic: TopicRef::Asked(0), needed: true, revision: 0, body: Body::Deltas(past(n)) }])
    });
}

#[test]
fn the_writer_keeps_them() {
    for (count, chunks) in [(CHUNK_ENTRIES_MAX, 1), (CHUNK_ENTRIES_MAX + 1, 2)] {
        let mut writer = ChunkWriter::new(1, CUT, 1_000_000);
        (0..count as u32).for_each(|n| writer.push_same(TopicRef::Asked(n), true, 1));
        let payloads = writer.finish();
        assert_eq!(payloads.len(), chunks);
        assert!(payloads.iter().all(|payload| Chunk::decode(payload).is_ok()));
    }
    for (count, entries) in [(0, 1), (ENTRY_DELTAS_MAX, 1), (ENTRY_DELTAS_MAX + 1, 2)] {
        let mut writer = ChunkWriter::new(1, CUT, 1_000_000);
        writer.push_deltas(TopicRef::Asked(0), true, 1, &past(count));
        let payloads = writer.finish();
        assert_eq!(Chunk::decode(&payloads[0]).unwrap().entries.len(), entries);
    }
}

// ---- registration

fn workload(name: usize) -> RegisterWorkload {
    RegisterWorkload {
        workload: WorkloadId::new(&format!("w{name}")).unwrap(),
        network: NetworkId::new("n").unwrap(),
        addresses: Default::default(),
        labels: BTreeMap::new(),
        space: None,
        app: None,
        phase: Phase::Running,
        incarnation: None,
    }
}

#[test]
fn workloads_and_labels() {
    let register = |workloads| Register::decode(&Register { boot: 1, template: None, workloads }.encode());
    bounded(REGISTER_WORKLOADS_MAX, |n| register((0..n).map(workload).collect()));
    bounded(REGISTER_WORKLOADS_MAX, |n| {
        let incarnations = (0..n).map(|n| (WorkloadId::new(&format!("w{n}")).unwrap(), 1)).collect();
        RegisterAnswer::decode(&RegisterAnswer::Registered { incarnations, health: None }.encode())
    });
    let labelled = |labels| register(vec![RegisterWorkload { labels, ..workload(0) }]);
    let labels = |n| labelled((0..n).map(|n| (format!("k{n}"), String::new())).collect());
    assert!(labels(LABELS_MAX).is_ok());
    // Keys and values stand in one list.
    let (found, max) = (2 * (LABELS_MAX + 1), 2 * LABELS_MAX);
    assert_eq!(labels(LABELS_MAX + 1), Err(DecodeError::TooMany { item: "labels", found, max }));
    bounded(LABEL_KEY_BYTES_MAX, |n| labelled([("k".repeat(n), String::new())].into()));
    bounded(LABEL_VALUE_BYTES_MAX, |n| labelled([("k".into(), "v".repeat(n))].into()));
    assert_eq!(labelled([(String::new(), String::new())].into()), Err(DecodeError::Malformed { item: "label" }));
}

#[test]
fn a_template_is_an_id() {
    let register =
        |template: &str| Register::decode(&Register { boot: 1, template: Some(template.into()), workloads: vec![] }.encode());
    bounded(64, |n| register(&"t".repeat(n)));
    for bad in ["", "a.b", "a b", "ä", "*"] {
        assert_eq!(register(bad), Err(DecodeError::Malformed { item: "template" }), "{bad}");
    }
}

// ---- texts: the encoder cuts, the decoder refuses

#[test]
fn free_texts() {
    let message = |fields: &[(&str, Value)]| {
        let all = [("v", Value::Uint(1))].iter().chain(fields).map(|(key, value)| (Value::text(key), value.clone())).collect();
        Value::Map(all).encode()
    };
    let one = || Value::Uint(1);
    let text = |n| Value::text(&"x".repeat(n));
    bounded(LEADER_BYTES_MAX, |n| {
        Lead::decode(&message(&[("t", one()), ("s", one()), ("b", one()), ("c", one()), ("r", one()), ("l", text(n))]))
    });
    bounded(REASON_BYTES_MAX, |n| Ack::decode(&message(&[("t", one()), ("s", Value::text("frozen")), ("m", text(n))])));
    bounded(REASON_BYTES_MAX, |n| Answer::decode(&message(&[("q", one()), ("x", text(n))])));
    bounded(REASON_BYTES_MAX, |n| RegisterAnswer::decode(&message(&[("k", one()), ("x", text(n))])));
    bounded(STATE_NAME_BYTES_MAX, |n| Ack::decode(&message(&[("t", one()), ("s", text(n))])));
    let beat = [("b", one()), ("n", one()), ("t", one()), ("s", Value::text("enforcing"))];
    bounded(VERSION_BYTES_MAX, |n| Beat::decode(&message(&[beat.as_slice(), &[("a", text(n))]].concat())));
}

#[test]
fn the_encoder_cuts_free_texts_between_characters() {
    let reason = "é".repeat(REASON_BYTES_MAX);
    let refused = Answer::decode(&Answer::Refused { ask: 1, reason: reason.clone() }.encode()).unwrap();
    assert_eq!(refused, Answer::Refused { ask: 1, reason: "é".repeat(REASON_BYTES_MAX / 2) });
    let odd = format!("x{reason}");
    let ack = Ack { term: 1, state: HostState::Failing { reason: odd }, reached: vec![] };
    let cut = format!("x{}", "é".repeat(REASON_BYTES_MAX / 2 - 1));
    assert_eq!(Ack::decode(&ack.encode()).unwrap().state, HostState::Failing { reason: cut });
    let beat = Beat { boot: 1, count: 1, term: 1, version: "1".repeat(100), state: HostState::Other("s".repeat(100)) };
    let beat = Beat::decode(&beat.encode()).unwrap();
    assert_eq!(beat.version.len(), VERSION_BYTES_MAX);
    assert_eq!(beat.state, HostState::Other("s".repeat(STATE_NAME_BYTES_MAX)));
}
