//! Old reads new, new reads old, and nobody reads another major.

use groupcast_messages::{
    Ack, Answer, Beat, Companions, DecodeError, Delta, EntropyAnswer, HostState, Lead, Register, RegisterAnswer, SCHEMA_MAJOR,
};
use groupcast_policy::doc::Edit;
use groupcast_policy::topic::Topic;

use crate::support::message::DECODERS;
use crate::support::value::Value;
use crate::support::{Random, generate, mutate};

#[test]
fn a_newer_minor_version_with_more_fields_anywhere_is_read() {
    for seed in 0..500 {
        for decoder in DECODERS {
            let mut random = Random::new(seed);
            let (message, valid) = generate::encoded(&mut random, decoder);
            let newer = mutate::extend(&mut random, &valid);
            assert_eq!(decoder.decode(&newer).as_ref(), Ok(&message), "seed {seed}");
        }
    }
}

#[test]
fn an_unknown_major_is_refused_whatever_follows() {
    for decoder in DECODERS {
        let valid = generate::message(&mut Random::new(3), decoder).encode();
        for found in [0, u64::from(SCHEMA_MAJOR) + 1, 200, u64::MAX] {
            let Value::Map(mut fields) = Value::parse(&valid) else { panic!("a map") };
            fields[0].1 = Value::Uint(found);
            // What another major means by its fields is not ours to guess.
            fields.push((Value::Uint(1), Value::Nil));
            assert_eq!(decoder.decode(&Value::Map(fields).encode()), Err(DecodeError::Version { found }), "{decoder:?}");
        }
    }
}

#[test]
fn a_message_without_version_in_front_is_refused() {
    for decoder in DECODERS {
        let valid = generate::message(&mut Random::new(3), decoder).encode();
        let Value::Map(mut fields) = Value::parse(&valid) else { panic!("a map") };
        let version = fields.remove(0);
        assert_eq!(decoder.decode(&Value::Map(fields.clone()).encode()), Err(DecodeError::NoVersion), "{decoder:?}");
        fields.push(version);
        assert_eq!(decoder.decode(&Value::Map(fields).encode()), Err(DecodeError::NoVersion), "{decoder:?}");
    }
}

#[test]
fn the_order_of_the_other_fields_means_nothing() {
    for seed in 0..100 {
        for decoder in DECODERS {
            let message = generate::message(&mut Random::new(seed), decoder);
            let mut tree = Value::parse(&message.encode());
            let mut top = true;
            tree.for_each(&mut |value| {
                if let Value::Map(fields) = value {
                    let first = usize::from(std::mem::take(&mut top));
                    fields[first..].reverse();
                }
            });
            assert_eq!(decoder.decode(&tree.encode()).as_ref(), Ok(&message), "seed {seed}");
        }
    }
}

#[test]
fn a_field_that_stands_twice_is_refused() {
    for decoder in DECODERS {
        let valid = generate::message(&mut Random::new(3), decoder).encode();
        let Value::Map(fields) = Value::parse(&valid) else { panic!("a map") };
        for field in &fields {
            let mut twice = fields.clone();
            twice.push(field.clone());
            let error = decoder.decode(&Value::Map(twice).encode()).unwrap_err();
            assert!(matches!(error, DecodeError::Duplicate { .. }), "{decoder:?}: {error}");
        }
    }
}

// ---- new reads old: what an older peer, or one that leaves out defaults, does not write

fn message(fields: &[(&str, Value)]) -> Vec<u8> {
    let mut all = vec![(Value::text("v"), Value::Uint(1))];
    all.extend(fields.iter().map(|(key, value)| (Value::text(key), value.clone())));
    Value::Map(all).encode()
}

#[test]
fn missing_optional_fields_have_defaults() {
    let number = |n| Value::Uint(n);
    let delta = message(&[("t", number(1)), ("c", number(2)), ("d", number(3))]);
    for topic in ["scope.global", "host.h1", "rules.web", "members.web"].map(|token| Topic::parse(token).unwrap()) {
        let delta = Delta::decode(&topic, &delta).unwrap();
        assert_eq!((delta.position, delta.companions, delta.tally), (1, Companions::NONE, None));
        assert_eq!(delta.edit, Edit::empty(&topic));
    }
    let lead = Lead::decode(&message(&["t", "s", "b", "c", "r"].map(|key| (key, number(1))))).unwrap();
    assert_eq!((lead.count, lead.resigning, lead.incomplete, lead.leader.as_str()), (0, false, false, ""));
    let Ok(Answer::Chunk(chunk)) = Answer::decode(&message(&[("q", number(1)), ("t", number(2)), ("h", number(3))])) else {
        panic!("a chunk");
    };
    assert_eq!((chunk.index, chunk.last, chunk.entries.len()), (0, false, 0));
    let ack = Ack::decode(&message(&[("t", number(1)), ("s", Value::text("failing"))])).unwrap();
    assert_eq!((ack.state, ack.reached), (HostState::Failing { reason: String::new() }, vec![]));
    let answer = EntropyAnswer::decode(&message(&[("k", number(1)), ("t", number(1)), ("l", number(2))])).unwrap();
    assert!(matches!(answer, EntropyAnswer::Differs { truncated: false, .. }));
    let beat =
        Beat::decode(&message(&[("b", number(1)), ("n", number(1)), ("t", number(1)), ("s", Value::text("enforcing"))])).unwrap();
    assert_eq!(beat.version, "");
    let register = Register::decode(&message(&[("b", number(1))])).unwrap();
    assert_eq!((register.template, register.workloads), (None, vec![]));
    let answer = RegisterAnswer::decode(&message(&[("k", number(1)), ("x", Value::text("no"))])).unwrap();
    assert_eq!(answer, RegisterAnswer::Refused { retryable: false, reason: "no".into() });
}

#[test]
fn missing_required_fields_are_named() {
    let members = Topic::parse("members.web").unwrap();
    let missing = |item| Err(DecodeError::Missing { item });
    let number = |n| Value::Uint(n);
    assert_eq!(Delta::decode(&members, &message(&[("c", number(2)), ("d", number(3))])), missing("term"));
    assert_eq!(Delta::decode(&members, &message(&[("t", number(2)), ("d", number(3))])), missing("change"));
    assert_eq!(Delta::decode(&members, &message(&[("t", number(2)), ("c", number(3))])), missing("digest"));
    assert_eq!(Ack::decode(&message(&[("t", number(1))])), Err(DecodeError::Missing { item: "state" }));
    assert_eq!(Answer::decode(&message(&[("q", number(1)), ("t", number(1))])), Err(DecodeError::Missing { item: "cut" }));
}

#[test]
fn a_state_that_a_newer_host_has_is_kept_by_name() {
    let ack = Ack::decode(&message(&[("t", Value::Uint(1)), ("s", Value::text("quarantined"))])).unwrap();
    assert_eq!(ack.state, HostState::Other("quarantined".into()));
    assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
}

#[test]
fn kinds_that_narrow_or_replace_a_meaning_are_never_skipped() {
    let unknown = |item, found| Err(DecodeError::Unknown { item, found });
    let rules = Topic::parse("rules.web").unwrap();
    let number = |n| Value::Uint(n);
    let rule = |how, traffic, remote| {
        let fields = [("h", number(how)), ("t", number(traffic)), ("r", number(remote))];
        let rule = Value::Map(fields.map(|(key, value)| (Value::text(key), value)).to_vec());
        message(&[("t", number(1)), ("c", number(1)), ("d", number(1)), ("u", Value::List(vec![rule]))])
    };
    assert!(Delta::decode(&rules, &rule(0, 0, 0)).is_ok());
    assert_eq!(Delta::decode(&rules, &rule(32, 0, 0)), unknown("rule", 32));
    assert_eq!(Delta::decode(&rules, &rule(24, 0, 0)), unknown("rule", 24));
    assert_eq!(Delta::decode(&rules, &rule(0, 4, 0)), unknown("traffic", 4));
    assert_eq!(Delta::decode(&rules, &rule(0, 0, 3)), unknown("remote", 3));
    let edit = message(&[("t", number(1)), ("c", number(1)), ("d", number(1)), ("x", number(3))]);
    assert_eq!(Delta::decode(&rules, &edit), unknown("edit", 3));
}
