//! What is well-formed MessagePack and still no message: each row is a message with one thing wrong.

use groupcast_messages::{Answer, DecodeError, Delta, EntropyAnswer, RegisterAnswer};
use groupcast_policy::topic::Topic;

use crate::support::value::Value::{self, Bin, Flag, List, Uint};

fn map(fields: &[(&str, Value)]) -> Value {
    Value::Map(fields.iter().map(|(key, value)| (Value::text(key), value.clone())).collect())
}

fn message(fields: &[(&str, Value)]) -> Vec<u8> {
    map(&[&[("v", Uint(1))], fields].concat()).encode()
}

/// A delta with these fields beside those that every delta has.
fn delta(topic: &str, fields: &[(&str, Value)]) -> Result<Delta, DecodeError> {
    let head = [("t", Uint(1)), ("c", Uint(2)), ("d", Uint(3))];
    Delta::decode(&Topic::parse(topic).unwrap(), &message(&[&head, fields].concat()))
}

fn texts(texts: &[&str]) -> Value {
    List(texts.iter().map(|text| Value::text(text)).collect())
}

#[track_caller]
fn contradicts<T: std::fmt::Debug>(result: Result<T, DecodeError>) {
    assert!(matches!(result, Err(DecodeError::Contradiction { .. })), "{result:?}");
}

#[track_caller]
fn duplicate<T: std::fmt::Debug>(result: Result<T, DecodeError>) {
    assert!(matches!(result, Err(DecodeError::Duplicate { .. })), "{result:?}");
}

#[track_caller]
fn malformed<T: std::fmt::Debug>(result: Result<T, DecodeError>) {
    assert!(matches!(result, Err(DecodeError::Malformed { .. })), "{result:?}");
}

#[test]
fn an_edit_of_another_kind_than_the_topic_is_no_empty_edit() {
    let address = || ("a", Bin(vec![10, 0, 0, 1]));
    assert!(delta("members.web", &[address()]).is_ok());
    contradicts(delta("rules.web", &[address()]));
    contradicts(delta("members.web", &[("g", texts(&["web"]))]));
    contradicts(delta("members.web", &[("f", Flag(true))]));
    contradicts(delta("members.web", &[address(), ("W", texts(&["w1"]))]));
    contradicts(delta("members.web", &[address(), ("x", Uint(1))]));
    contradicts(delta("host.h1", &[("x", Uint(2)), ("w", List(vec![]))]));
    // Both packings of one form: which comes first would be up to the order of the fields.
    duplicate(delta("members.web", &[address(), ("i", Bin(vec![1]))]));
}

#[test]
fn a_batch_is_told_in_one_way() {
    assert!(delta("host.h1", &[("m", Flag(true)), ("y", Uint(1)), ("z", Uint(1))]).is_ok());
    contradicts(delta("host.h1", &[("m", Flag(true)), ("o", Bin(vec![0; 8]))]));
    duplicate(delta("host.h1", &[("o", Bin(vec![0; 16]))]));
    malformed(delta("host.h1", &[("o", Bin(vec![0; 9]))]));
    malformed(delta("host.h1", &[("n", Uint(0))]));
    malformed(delta("host.h1", &[("n", Uint(1 << 32))]));
    assert_eq!(delta("host.h1", &[("z", Uint(1))]), Err(DecodeError::Missing { item: "tally" }));
}

#[test]
fn ids_are_checked_wherever_they_stand() {
    for bad in ["", "a.b", ">", "a b", &"a".repeat(65)] {
        let id = || Value::text(bad);
        let refused = |result: Result<Delta, DecodeError>| {
            assert!(
                matches!(result, Err(DecodeError::Id(_) | DecodeError::TooMany { .. } | DecodeError::Truncated { .. })),
                "{result:?}"
            );
        };
        refused(delta("scope.global", &[("g", texts(&[bad, "web"]))]));
        refused(delta("scope.global", &[("G", texts(&[bad, "web"]))]));
        refused(delta("host.h1", &[("W", texts(&[bad, "web"]))]));
        let good = [("w", Value::text("w")), ("i", Uint(1)), ("n", Value::text("n"))];
        for key in ["w", "n", "s", "y"] {
            let others = good.iter().filter(|(other, _)| *other != key).cloned();
            let fields: Vec<_> = others.chain([(key, id())]).collect();
            refused(delta("host.h1", &[("w", List(vec![map(&fields)]))]));
        }
    }
}

#[test]
fn phases_are_one_byte_a_group() {
    let scope = |bits: &[u8]| delta("scope.global", &[("g", texts(&["a", "b"])), ("h", Bin(bits.to_vec()))]);
    assert!(scope(&[1, 2]).is_ok());
    contradicts(scope(&[1]));
    contradicts(scope(&[1, 2, 3]));
    assert_eq!(scope(&[1, 4]), Err(DecodeError::Unknown { item: "phases", found: 4 }));
    assert_eq!(scope(&[0, 1]), Err(DecodeError::Unknown { item: "phases", found: 0 }));
}

#[test]
fn a_placement_names_nothing_twice() {
    let host = |fields: &[(&str, Value)]| {
        let good = [("w", Value::text("w")), ("i", Uint(1)), ("n", Value::text("n"))];
        delta("host.h1", &[("w", List(vec![map(&[&good, fields].concat())]))])
    };
    assert!(host(&[]).is_ok());
    duplicate(host(&[("a", Bin(vec![10, 0, 0, 1, 10, 0, 0, 1]))]));
    duplicate(host(&[("g", texts(&["web", "web"]))]));
    assert_eq!(host(&[("e", Uint(4))]), Err(DecodeError::Unknown { item: "enforced directions", found: 4 }));
    assert_eq!(host(&[("f", Uint(2))]), Err(DecodeError::Unknown { item: "phase", found: 2 }));
}

#[test]
fn a_rule_has_what_its_kinds_need_and_no_more() {
    let rule = |traffic, remote, fields: &[(&str, Value)]| {
        let kinds = [("h", Uint(0)), ("t", Uint(traffic)), ("r", Uint(remote))];
        delta("rules.web", &[("u", List(vec![map(&[&kinds, fields].concat())]))])
    };
    let (protocol, ports) = (|| ("p", Uint(6)), || ("o", Bin(vec![80, 0])));
    assert!(rule(2, 0, &[protocol(), ports()]).is_ok());
    assert!(rule(2, 0, &[protocol()]).is_ok(), "no port at all: matches nothing");
    contradicts(rule(2, 0, &[ports()]));
    contradicts(rule(0, 0, &[protocol()]));
    contradicts(rule(1, 0, &[protocol(), ports()]));
    contradicts(rule(1, 0, &[]));
    contradicts(rule(3, 0, &[protocol()]));
    contradicts(rule(0, 0, &[("k", Uint(8))]));
    malformed(rule(3, 0, &[("k", Uint(256))]));
    assert!(rule(0, 1, &[]).is_ok(), "no address at all: matches nothing");
    assert!(rule(0, 1, &[("a", Bin(vec![1, 0]))]).is_ok());
    contradicts(rule(0, 0, &[("a", Bin(vec![1, 0]))]));
    contradicts(rule(0, 2, &[]));
    contradicts(rule(0, 0, &[("g", Value::text("web"))]));
    contradicts(rule(0, 2, &[("g", Value::text("web")), ("A", Bin(vec![1, 0]))]));
}

#[test]
fn an_entry_has_what_its_body_needs_and_no_more() {
    let entry = |fields: &[(&str, Value)]| {
        let entry = map(&[&[("r", Uint(1))], fields].concat());
        Answer::decode(&message(&[("q", Uint(1)), ("t", Uint(1)), ("h", Uint(1)), ("e", List(vec![entry]))]))
    };
    let asked = || ("i", Uint(0));
    let named = || ("t", Value::text("members.web"));
    let members = || ("e", map(&[("k", Uint(4)), ("i", Bin(vec![1]))]));
    let digest = || ("d", Uint(9));
    assert!(entry(&[asked(), ("b", Uint(0))]).is_ok());
    assert!(entry(&[asked(), ("b", Uint(2)), digest(), members()]).is_ok());
    assert!(entry(&[named(), ("b", Uint(2)), digest(), members()]).is_ok());
    contradicts(entry(&[asked(), named(), ("b", Uint(0))]));
    assert_eq!(entry(&[("b", Uint(0)), ("padding", Uint(0))]), Err(DecodeError::Missing { item: "topic" }));
    contradicts(entry(&[asked(), ("b", Uint(0)), digest()]));
    contradicts(entry(&[asked(), ("b", Uint(1)), digest(), members()]));
    contradicts(entry(&[asked(), ("b", Uint(2)), digest()]));
    contradicts(entry(&[asked(), ("b", Uint(2)), members()]));
    assert_eq!(entry(&[asked(), ("b", Uint(3))]), Err(DecodeError::Unknown { item: "entry", found: 3 }));
    let part = |edit: &[(&str, Value)]| entry(&[named(), ("b", Uint(2)), digest(), ("e", map(edit))]);
    assert!(part(&[("x", Uint(1))]).is_ok());
    contradicts(part(&[("x", Uint(2))]));
    contradicts(part(&[("k", Uint(4)), ("x", Uint(1))]));
    contradicts(part(&[("k", Uint(4)), ("r", Bin(vec![10, 0, 0, 1]))]));
    contradicts(part(&[("k", Uint(3)), ("f", Flag(true))]));
    assert_eq!(part(&[("i", Bin(vec![1]))]), Err(DecodeError::Missing { item: "edit" }));
    assert_eq!(part(&[("k", Uint(5))]), Err(DecodeError::Unknown { item: "edit", found: 5 }));
}

#[test]
fn sorted_members_are_sorted_and_within_their_family() {
    let part = |key: &str, bytes: &[u8]| {
        let edit = map(&[("k", Uint(4)), (key, Bin(bytes.to_vec()))]);
        let entry = map(&[("i", Uint(0)), ("r", Uint(1)), ("b", Uint(2)), ("d", Uint(9)), ("e", edit)]);
        Answer::decode(&message(&[("q", Uint(1)), ("t", Uint(1)), ("h", Uint(1)), ("e", List(vec![entry]))]))
    };
    assert!(part("i", &[0xff, 0xff, 0xff, 0xff, 0x0f]).is_ok());
    malformed(part("i", &[0xff, 0xff, 0xff, 0xff, 0x0f, 0x00]));
    malformed(part("i", &[0x80, 0x00]));
    assert!(part("j", &[0, 8, 0, 9]).is_ok(), "one address, two lengths");
    malformed(part("j", &[0, 9, 0, 8]));
    malformed(part("j", &[0, 8, 0, 8]));
    malformed(part("j", &[1, 8]));
    malformed(part("j", &[0, 32]));
    malformed(part("J", &[0, 128]));
    assert!(part("J", &[0, 127]).is_ok());
    assert_eq!(part("j", &[0]), Err(DecodeError::Truncated { item: "members" }));
}

#[test]
fn answers_are_of_one_kind() {
    contradicts(Answer::decode(&message(&[("q", Uint(1)), ("x", Value::text("no")), ("t", Uint(1))])));
    let cut = [("t", Uint(1)), ("l", Uint(1))];
    contradicts(EntropyAnswer::decode(&message(&[&cut[..], &[("k", Uint(0)), ("z", Flag(true))]].concat())));
    let unknown = EntropyAnswer::decode(&message(&[&cut[..], &[("k", Uint(2))]].concat()));
    assert_eq!(unknown, Err(DecodeError::Unknown { item: "entropy answer", found: 2 }));
    contradicts(RegisterAnswer::decode(&message(&[("k", Uint(0)), ("x", Value::text("no"))])));
    contradicts(RegisterAnswer::decode(&message(&[("k", Uint(1)), ("x", Value::text("no")), ("w", texts(&["w"]))])));
    contradicts(RegisterAnswer::decode(&message(&[("k", Uint(0)), ("w", texts(&["w"]))])));
    duplicate(RegisterAnswer::decode(&message(&[("k", Uint(0)), ("w", texts(&["w", "w"])), ("i", Bin(vec![1, 2]))])));
}

/// Whatever bit of a delta is damaged, it does not decode to another term, position, digest or companions.
#[test]
fn a_damaged_delta_is_refused_or_differs_in_its_edit_only() {
    use groupcast_messages::{Companions, Tally};
    use groupcast_policy::doc::{Digest, Edit};
    use groupcast_policy::net::Prefix;
    use groupcast_policy::topic::TopicHash;
    let topic = Topic::parse("members.web").unwrap();
    let edit = Edit::Members { add: vec![Prefix::v4(0x0a01_0203, 32).unwrap()], remove: vec![] };
    let listed = Companions::Listed(vec![TopicHash(7), TopicHash(1 << 60)]);
    for (companions, tally) in [(Companions::NONE, None), (listed, None), (Companions::Tallied, Some(Tally { count: 3, xor: 9 }))]
    {
        let sent = Delta {
            term: 6,
            change: 1_000,
            position: 3,
            edit: edit.clone(),
            digest: Digest(0xfeed),
            companions,
            tally,
            spread_ms: 7,
        };
        let bytes = sent.encode();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            if let Ok(received) = Delta::decode(&topic, &damaged) {
                assert_eq!(Delta { edit: edit.clone(), ..received }, sent, "bit {bit}");
            }
        }
    }
}
