//! Topics with one hash. Whoever writes groups chooses their names, and these two were found in seven minutes on two busy processors.

use super::*;

const ONE: &str = "gangljkhkomccbep";
const OTHER: &str = "inbmehfmldhepkhj";

/// A host whose rules name both.
fn joined() -> Desk {
    let mut desk = Desk::joined();
    let edits = vec![rules("web", &[ONE, OTHER]), members(ONE, &[1]), members(OTHER, &[1, 2])];
    for sent in desk.writer.publish(edits) {
        let effects = desk.arrive(&sent);
        desk.settle(effects);
    }
    let effects = desk.pass(2_000);
    desk.settle(effects);
    desk
}

fn topics() -> [Topic; 2] {
    [ONE, OTHER].map(|name| members(name, &[]).0)
}

#[test]
fn the_names_have_one_hash() {
    let [one, other] = topics();
    assert!(one != other && one.hash64() == other.hash64());
}

/// Broke: every answer gave both topics the content of one of them.
#[test]
fn an_answer_tells_topics_with_one_hash_apart() {
    let mut desk = joined();
    assert!(desk.agrees() && (desk.count(ONE), desk.count(OTHER)) == (1, 2), "joined");
    for round in 0..3 {
        // Nothing of it arrives.
        desk.writer.publish(vec![members(ONE, &[10 + round]), members(OTHER, &[20 + round, 30 + round])]);
        desk.reader.handle(Event::Lost, desk.now_ms);
        let effects = desk.pass(1_000);
        assert!(asks(&effects));
        desk.settle(effects);
        let n = round as usize + 1;
        assert!(desk.agrees() && (desk.count(ONE), desk.count(OTHER)) == (1 + n, 2 + 2 * n), "round {round}");
    }
}

/// Also of a host that follows one of them, and of one that is not published yet.
#[test]
fn a_topic_is_not_taken_for_the_one_that_has_its_hash() {
    for (followed, not_followed) in [(ONE, OTHER), (OTHER, ONE)] {
        let mut desk = Desk::joined();
        desk.writer.publish(vec![members(not_followed, &[1, 2, 3])]);
        desk.writer.publish(vec![rules("web", &[followed])]);
        for _ in 0..2 {
            desk.reader.handle(Event::Lost, desk.now_ms);
            let effects = desk.pass(1_000);
            assert!(asks(&effects));
            desk.settle(effects);
            assert!(desk.agrees() && desk.count(followed) == 0, "{followed} is not published");
        }
        let sent = desk.writer.publish(vec![members(followed, &[7])]);
        let effects = desk.arrive(&sent[0]);
        desk.settle(effects);
        assert!(desk.agrees() && desk.count(followed) == 1);
    }
}

/// Both change together: neither is there without the other, in whichever order they come.
#[test]
fn changes_of_topics_with_one_hash_stay_whole() {
    for order in [[0, 1], [1, 0]] {
        let mut desk = joined();
        let sent = desk.writer.publish(vec![members(ONE, &[5]), members(OTHER, &[5])]);
        assert_eq!(commits(&desk.arrive(&sent[order[0]])), 0, "half a change");
        assert_eq!(commits(&desk.arrive(&sent[order[1]])), 1);
        assert!(desk.agrees());
        // One alone waits for nobody, and is acknowledged with its own revision.
        let sent = desk.writer.publish(vec![members(ONE, &[6])]);
        let effects = desk.arrive(&sent[0]);
        assert_eq!(commits(&effects), 1);
        assert!(desk.agrees());
    }
}

/// What is lost of one shows, though the other is newer.
#[test]
fn what_is_lost_of_topics_with_one_hash_is_found() {
    let mut desk = joined();
    desk.writer.publish(vec![members(ONE, &[8])]);
    let later = desk.writer.publish(vec![members(OTHER, &[9])]);
    desk.arrive(&later[0]);
    let replica = &desk.writer.replica;
    let host = HostId::new("h").unwrap();
    let check =
        groupcast_messages::EntropyCheck { term: 1, hash: desk.reader.entropy(), topics: desk.reader.held.0.len() as u32 };
    let answer = replica.compare(|| replica.needed_by(&host), &check);
    assert!(matches!(answer, groupcast_messages::EntropyAnswer::Differs { .. }));
    desk.reader.handle(Event::EntropyAnswer(&answer.encode()), desk.now_ms);
    let effects = desk.pass(2_000);
    assert!(asks(&effects), "{effects:?}");
    desk.settle(effects);
    assert!(desk.agrees() && desk.count(ONE) == 2);
}
