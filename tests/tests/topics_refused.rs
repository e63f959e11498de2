//! Messages that must not be believed: refused or repaired, and the old state stays in force meanwhile.

use groupcast_messages::{Companions, Delta};
use groupcast_policy::doc::{Digest, Edit};
use groupcast_tests::World;
use groupcast_tests::desk::{Desk, Message};
use groupcast_tests::fleet::{address, host_id, join, place, rules};
use groupcast_tests::marks::Marks;
use groupcast_tests::world::{ask, eventually, leader, settled};
use groupcast_topics::nats::Republished;
use groupcast_topics::reader::{Event, Incident};

/// A reader that has joined and follows the members of two groups.
fn joined() -> Desk {
    let mut desk = Desk::new(host_id("h"));
    desk.write(vec![rules("web", &["db", "cache"]), join("db", &[1, 2]), join("cache", &[7])]);
    desk.write(vec![place("h", "w", 5, &["web"])]);
    desk.repair();
    assert_eq!(desk.exposed(), desk.published());
    assert_eq!(desk.exposed().len(), 5);
    desk.incidents.clear();
    desk
}

/// One change of one topic.
fn one(desk: &mut Desk, number: u32) -> Message {
    desk.write(vec![join("db", &[number])]).remove(0)
}

/// Hands over a message that must have no effect on what is exposed, and lets the reader repair what it thinks is broken.
fn refused(desk: &mut Desk, message: &Message) {
    let before = desk.exposed();
    desk.deliver(message);
    assert_eq!(desk.exposed(), before, "the old state stays");
    desk.repair();
    assert_eq!(desk.exposed(), desk.published(), "and is repaired");
}

#[test]
fn an_add_that_the_snapshot_already_has_is_discarded() {
    let mut desk = joined();
    let old = one(&mut desk, 10);
    desk.handle(Event::Lost);
    desk.repair();
    assert_eq!(desk.exposed(), desk.published());
    let commits = desk.commits;
    desk.deliver(&old);
    assert_eq!((desk.commits, desk.incidents.as_slice()), (commits, [].as_slice()));
}

#[test]
fn deleting_an_absent_member_changes_nothing_else() {
    let mut desk = joined();
    let (topic, _) = join("db", &[]);
    let edit = Edit::Members { add: vec![address(3)], remove: vec![address(99)] };
    let message = desk.write(vec![(topic.clone(), edit)]).remove(0);
    desk.deliver(&message);
    assert_eq!(desk.exposed(), desk.published());
    assert_eq!(desk.exposed()[&topic].members().unwrap().len(), 3);
    assert!(desk.incidents.is_empty());
}

#[test]
fn a_delta_during_a_snapshot_fetch_is_applied_exactly_once_wherever_it_falls() {
    for written_before_answer in [false, true] {
        for delivered_before_answer in [false, true] {
            let mut desk = joined();
            desk.handle(Event::Lost);
            while desk.asked.is_none() {
                desk.now_ms += 1;
                desk.handle(Event::Tick);
            }
            let early = written_before_answer.then(|| one(&mut desk, 10));
            let answer = desk.answer();
            let message = early.unwrap_or_else(|| one(&mut desk, 10));
            let commits = desk.commits;
            if delivered_before_answer {
                desk.deliver(&message);
                desk.take(&answer);
            } else {
                desk.take(&answer);
                desk.deliver(&message);
            }
            assert_eq!(desk.exposed(), desk.published(), "{written_before_answer} {delivered_before_answer}");
            assert_eq!(desk.commits, commits + 1, "{written_before_answer} {delivered_before_answer}");
            assert_eq!(desk.reader.pending(), 0);
        }
    }
}

#[test]
fn an_old_snapshot_after_a_newer_delta_takes_nothing_back() {
    let mut desk = joined();
    desk.handle(Event::Lost);
    while desk.asked.is_none() {
        desk.now_ms += 1;
        desk.handle(Event::Tick);
    }
    let old = desk.answer();
    for number in 10..14 {
        let message = one(&mut desk, number);
        desk.deliver(&message);
    }
    let newest = desk.exposed();
    assert_eq!(newest, desk.published());
    desk.take(&old);
    assert_eq!(desk.exposed(), newest);
    // The same once more, as the answer to a request that is over.
    desk.take(&old);
    desk.repair();
    assert_eq!(desk.exposed(), newest);
}

#[test]
fn a_duplicate_is_idempotent() {
    let mut desk = joined();
    let message = one(&mut desk, 10);
    desk.deliver(&message);
    let commits = desk.commits;
    for _ in 0..3 {
        refused(&mut desk, &message);
    }
    assert_eq!((desk.commits, desk.incidents.as_slice()), (commits, [].as_slice()));
}

#[test]
fn messages_in_the_wrong_order_end_in_the_right_state_without_showing_a_later_one_first() {
    let mut desk = joined();
    let before = desk.exposed();
    let (first, second) = (one(&mut desk, 10), one(&mut desk, 11));
    desk.deliver(&second);
    assert_eq!(desk.exposed(), before);
    desk.deliver(&first);
    assert_eq!(desk.exposed(), desk.published());
    // A change of two topics, the second of them before the first and another change between them.
    let both = desk.write(vec![join("db", &[20]), join("cache", &[20])]);
    let before = desk.exposed();
    desk.deliver(&both[1]);
    assert_eq!(desk.exposed(), before, "one topic of two is not exposed");
    let later = one(&mut desk, 21);
    desk.deliver(&later);
    assert_eq!(desk.exposed(), before, "nor what comes after it");
    desk.deliver(&both[0]);
    assert_eq!(desk.exposed(), desk.published());
}

#[test]
fn a_gap_keeps_the_old_state_until_it_is_repaired() {
    let mut desk = joined();
    one(&mut desk, 10);
    let after = one(&mut desk, 11);
    let before = desk.exposed();
    desk.deliver(&after);
    assert_eq!(desk.exposed(), before);
    assert!(matches!(desk.incidents.as_slice(), [Incident::Gap { .. }]), "{:?}", desk.incidents);
    desk.repair();
    assert_eq!(desk.exposed(), desk.published());
}

/// A message that continues what is held, of contents chosen by the test.
fn forged(desk: &Desk, edit: Edit, digest: Digest) -> Message {
    let (topic, _) = join("db", &[]);
    let previous = desk.replica.revision(&topic);
    let delta =
        Delta { term: desk.term, change: 1, position: 1, edit, digest, companions: Companions::NONE, tally: None, spread_ms: 0 };
    Message { topic, revision: previous + 100, previous, payload: delta.encode() }
}

#[test]
fn a_corrupted_delta_is_refused_and_the_whole_document_fetched() {
    let mut desk = joined();
    let message = forged(&desk, Edit::Members { add: vec![address(66)], remove: vec![] }, Digest(12_345));
    let before = desk.exposed();
    desk.deliver(&message);
    assert_eq!(desk.exposed(), before);
    assert!(matches!(desk.incidents.as_slice(), [Incident::Corrupt { .. }]), "{:?}", desk.incidents);
    while desk.asked.is_none() {
        desk.now_ms += 1;
        desk.handle(Event::Tick);
    }
    let hash = message.topic.hash64();
    let held = desk.asked.as_ref().unwrap().held.iter().find(|(topic, _)| *topic == hash).map(|(_, revision)| *revision);
    assert_eq!(held, Some(0), "what is held is not trusted");
    assert_eq!(desk.exposed(), before);
    // Every bit of a good message flipped: never a panic, never another state than the old or the written one.
    for bit in 0..one(&mut joined(), 10).payload.len() * 8 {
        let mut desk = joined();
        let before = desk.exposed();
        let mut message = one(&mut desk, 10);
        message.payload[bit / 8] ^= 1 << (bit % 8);
        desk.deliver(&message);
        assert!(desk.exposed() == before || desk.exposed() == desk.published(), "bit {bit}");
    }
}

#[test]
fn a_member_both_added_and_removed_is_corrupt() {
    let mut desk = joined();
    let edit = Edit::Members { add: vec![address(66)], remove: vec![address(66)] };
    let message = forged(&desk, edit, Digest(1));
    refused(&mut desk, &message);
    assert!(matches!(desk.incidents[0], Incident::Malformed { .. } | Incident::Corrupt { .. }), "{:?}", desk.incidents);
}

#[test]
fn a_message_of_a_lower_term_is_refused() {
    let mut desk = joined();
    let mut other = joined();
    other.term = desk.term - 1;
    let mut message = one(&mut other, 66);
    message.revision += 1_000;
    refused(&mut desk, &message);
    assert!(matches!(desk.incidents.as_slice(), [Incident::LowerTerm { term: 4, .. }]), "{:?}", desk.incidents);
}

#[test]
fn an_unknown_field_is_accepted_and_an_unknown_version_is_not() {
    let mut desk = joined();
    let mut message = one(&mut desk, 10);
    // One more field in the map: a text of one letter that is not in use, and nil.
    message.payload[0] += 1;
    message.payload.extend([0xa1, b'Z', 0xc0]);
    desk.deliver(&message);
    assert_eq!(desk.exposed(), desk.published());
    assert!(desk.incidents.is_empty(), "{:?}", desk.incidents);

    let mut message = one(&mut desk, 11);
    assert_eq!(message.payload[1..4], [0xa1, b'v', 1]);
    message.payload[3] = 2;
    refused(&mut desk, &message);
    let version = groupcast_messages::DecodeError::Version { found: 2 };
    assert!(matches!(&desk.incidents[..], [Incident::Malformed { error, .. }] if *error == version), "{:?}", desk.incidents);
}

// ---- on a real server

/// What somebody inside the control plane's account could publish beside the stream.
fn headers(subject: &str, sequence: u64, previous: u64) -> async_nats::HeaderMap {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Nats-Stream", "TOPICS");
    headers.insert("Nats-Subject", subject);
    headers.insert("Nats-Sequence", sequence.to_string().as_str());
    headers.insert("Nats-Last-Sequence", previous.to_string().as_str());
    headers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spoofed_replayed_and_damaged_messages_on_the_bus_change_nothing() {
    let mut world = World::one().await;
    let nodes = [world.node(0, "c1").await];
    leader(&nodes).await;
    let node = &nodes[0];
    let marks = Marks::written_in(&world);
    world.publish(node, vec![rules("all", &["a", "b"]), place("h", "w", 1, &["all"])]).await;
    marks.publish(node, &["a", "b"]).await;
    let (witness, watch) = marks.watch();
    let host = world.host_watched(0, "h", watch).await;
    settled(node, &host).await;
    let attacker = world.observer("attacker").await;
    let mut heard = attacker.subscribe("gc.t.members.a").await.unwrap();
    attacker.flush().await.unwrap();
    let mut replay = Vec::new();
    for _ in 0..20 {
        marks.publish(node, &["a", "b"]).await;
        replay.push(futures::StreamExt::next(&mut heard).await.unwrap());
    }
    settled(node, &host).await;
    let before = host.state().await;
    let revision = Republished::of(replay.last().unwrap()).unwrap().sequence;
    let term = before.0.unwrap().term;

    let evil = |term: u64, digest: u64| Delta {
        term,
        change: 1,
        position: 1,
        edit: Edit::Members { add: vec![address(66)], remove: vec![] },
        digest: Digest(digest),
        companions: Companions::NONE,
        tally: None,
        spread_ms: 0,
    };
    let subject = "gc.t.members.a";
    // Not from the stream: no headers, or headers of another stream or subject.
    attacker.publish(subject, evil(term, 1).encode().into()).await.unwrap();
    attacker
        .publish_with_headers(subject, headers("gc.w.members.b", revision + 9, revision), evil(term, 1).encode().into())
        .await
        .unwrap();
    let mut other = headers("gc.w.members.a", revision + 9, revision);
    other.insert("Nats-Stream", "CATALOG");
    attacker.publish_with_headers(subject, other, evil(term, 1).encode().into()).await.unwrap();
    // Old ones again, in any order.
    for message in replay.iter().rev().chain(&replay) {
        attacker.publish_with_headers(subject, message.headers.clone().unwrap(), message.payload.clone()).await.unwrap();
    }
    // With headers that only the inside can forge: of a term that is over, damaged, of another version, beyond a gap, no message at all.
    let mut version = evil(term, 1).encode();
    version[3] = 9;
    for (previous, payload) in [
        (revision, evil(term - 1, 1).encode()),
        (revision, evil(term, 1).encode()),
        (revision, version),
        (revision + 3, evil(term, 1).encode()),
        (revision, b"nonsense".to_vec()),
        (revision, Vec::new()),
    ] {
        let forged = headers("gc.w.members.a", revision + 9, previous);
        attacker.publish_with_headers(subject, forged, payload.into()).await.unwrap();
        attacker.flush().await.unwrap();
        let (_, state) = host.state().await;
        assert_eq!(state, before.1, "the old state stays");
    }
    for _ in 0..5 {
        marks.publish(node, &["a", "b"]).await;
        settled(node, &host).await;
    }
    let states = witness.assert_whole();
    eprintln!("{states} exposed states, none with anything of it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_deleted_and_made_again_are_followed_under_a_new_term() {
    for cluster in [false, true] {
        let mut world = if cluster { World::three().await } else { World::one().await };
        let last = if cluster { 2 } else { 0 };
        let nodes = [world.node(0, "c1").await, world.node(last, "c2").await];
        let both = [&nodes[0], &nodes[1]];
        let first = leader(&nodes).await;
        let edits = vec![rules("all", &["a", "b"]), place("h", "w", 1, &["all"])];
        world.publish(&nodes[first], edits).await;
        let marks = Marks::written_in(&world);
        let (witness, watch) = marks.watch();
        let host = world.host_watched(last, "h", watch).await;
        for _ in 0..10 {
            marks.publish_whatever_happens(&both, &["a", "b"]).await;
        }
        settled(&nodes[first], &host).await;
        let before = host.cut().await.unwrap();
        let observer = world.observer("observer").await;
        let answer = ask(&observer, "STREAM.DELETE").await.expect("the server answers");
        assert_eq!(answer["success"], true, "{answer}");
        for _ in 0..10 {
            marks.publish_whatever_happens(&both, &["a", "b"]).await;
        }
        eventually("the host follows under a new term", || async { host.cut().await.unwrap().term > before.term }).await;
        let now = leader(&nodes).await;
        settled(&nodes[now], &host).await;
        marks.all_published(&nodes[now]).await;
        witness.assert_whole();
    }
}
