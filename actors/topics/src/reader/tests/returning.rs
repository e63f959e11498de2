//! Coming back, and what is asked and answered then.

use super::*;

#[test]
fn no_check_is_made_beside_a_request_and_none_is_forgotten() {
    let mut desk = Desk::joined();
    let effects = desk.reader.handle(Event::Refresh, desk.now_ms);
    let chunks = desk.answer_to(&effects);
    let is_check = |effect: &Effect| matches!(effect, Effect::Entropy(_));
    assert!(!desk.pass(1_500).iter().any(is_check), "two checks are due by now");
    let due = desk.reader.deadline_ms().unwrap();
    assert!(due > desk.now_ms, "nothing to do at {} before the answer, and it wants to be called at {due}", desk.now_ms);
    assert!(desk.reader.handle(Event::Answer(&chunks[0]), desk.now_ms).iter().any(is_check));
}

#[test]
fn who_comes_back_subscribes_when_somebody_answers() {
    let mut desk = Desk::joined();
    let wanted = desk.reader.subscriptions();
    desk.reader.handle(Event::Disconnected, desk.now_ms);
    let is_knock = |effects: &[Effect]| matches!(effects, [Effect::Entropy(_)]);
    assert!(is_knock(&desk.reader.handle(Event::Connected, desk.now_ms)));
    // Nobody answers: again, less and less often, and nothing else whatever happens.
    let (begun, mut times) = (desk.now_ms, 0);
    while desk.now_ms < begun + 60_000 {
        let due = desk.reader.deadline_ms().unwrap();
        assert!(due > desk.now_ms && due <= desk.now_ms + Settings::default().knock_max_ms, "{due} at {}", desk.now_ms);
        desk.now_ms = due;
        assert!(is_knock(&desk.reader.handle(Event::Tick, desk.now_ms)));
        assert!(desk.reader.handle(Event::Refresh, desk.now_ms).is_empty());
        times += 1;
    }
    assert!((8..=20).contains(&times), "{times} in a minute");
    assert!(desk.reader.handle(Event::EntropyAnswer(b"noise"), desk.now_ms).is_empty());
    let effects = desk.answer_the_door();
    let subscribed: BTreeSet<Topic> = effects
        .iter()
        .filter_map(|effect| if let Effect::Subscribe(topic) = effect { Some(topic.clone()) } else { None })
        .collect();
    assert_eq!(subscribed, wanted);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Ask(_))), "not before the subscriptions are in effect");
    desk.settle(effects);
    let sent = desk.writer.publish(vec![members("db", &[7])]);
    assert_eq!(commits(&desk.arrive(&sent[0])), 1);
    // Whoever holds nothing waits for nobody.
    let effects = Reader::new(HostId::new("h").unwrap(), Settings::default(), 1).handle(Event::Connected, 1);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Subscribe(_))));
}

/// A host that came back while nobody led waited out its pause of up to eight seconds, though the next leader had a change for it.
#[test]
fn who_is_nudged_while_nobody_answers_makes_itself_known_at_once() {
    let mut desk = Desk::joined();
    desk.reader.handle(Event::Disconnected, desk.now_ms);
    desk.reader.handle(Event::Connected, desk.now_ms);
    let settings = Settings::default();
    while desk.reader.deadline_ms().unwrap() < desk.now_ms + settings.knock_max_ms / 4 {
        desk.now_ms = desk.reader.deadline_ms().unwrap();
        desk.reader.handle(Event::Tick, desk.now_ms);
    }
    assert!(desk.reader.handle(Event::Nudge(b"noise"), desk.now_ms).is_empty());
    let cut = desk.writer.replica.cut();
    let nudged = desk.reader.handle(Event::Nudge(&Nudge { cut, should: Vec::new() }.encode()), desk.now_ms);
    assert!(matches!(nudged[..], [Effect::Entropy(_)]), "{nudged:?}");
    let due = desk.reader.deadline_ms().unwrap();
    assert!(due > desk.now_ms && due <= desk.now_ms + settings.knock_min_ms, "the pauses begin anew");
}

/// Comes back, is let in, and asks.
fn let_in() -> Desk {
    let mut desk = Desk::joined();
    desk.reader.handle(Event::Disconnected, desk.now_ms);
    desk.reader.handle(Event::Connected, desk.now_ms);
    let effects = desk.answer_the_door();
    let flushes = effects.iter().filter_map(|effect| if let Effect::Flush(number) = effect { Some(*number) } else { None });
    desk.reader.handle(Event::Flushed(flushes.max().unwrap()), desk.now_ms);
    let asked = desk.pass(100);
    assert!(asks(&asked), "{asked:?}");
    desk
}

fn has_given_up(effects: &[Effect]) -> bool {
    effects.contains(&Effect::Report(Incident::AskTimedOut))
}

/// Somebody is there, and a whole fleet may wait: once it waits longer than usual.
#[test]
fn who_was_let_in_waits_for_its_turn() {
    let (mut desk, settings) = (let_in(), Settings::default());
    let same_term = desk.writer.publish(vec![members("db", &[7])]);
    desk.arrive(&same_term[0]);
    assert!(!has_given_up(&desk.pass(settings.ask_timeout_back_ms - 200)));
    assert!(has_given_up(&desk.pass(400)));
    // From then on as after any request that was in vain: a pause, and twice the usual time.
    assert!(asks(&desk.pass(200)));
    assert!(has_given_up(&desk.pass(settings.ask_timeout_ms * 2)));
}

/// Whoever took the request may be the leader that ended.
#[test]
fn who_hears_of_another_leader_does_not_wait_for_its_turn() {
    let (mut desk, settings) = (let_in(), Settings::default());
    desk.writer.term += 1;
    let of_another = desk.writer.publish(vec![members("db", &[7])]);
    assert!(!has_given_up(&desk.arrive(&of_another[0])));
    assert!(has_given_up(&desk.pass(settings.ask_timeout_ms)));
}

/// A stream that had to be filled again has other revisions of the same contents: they are adopted, and nothing is fetched.
#[test]
fn what_is_the_same_in_another_life_of_the_stream_is_not_fetched() {
    let mut desk = Desk::joined();
    let before: Vec<(Topic, Document)> = desk.reader.documents().map(|(t, d)| (t.clone(), d.clone())).collect();
    let documents: Vec<_> = before.iter().enumerate().map(|(i, (t, d))| (t.clone(), 900 + i as u64, d.clone())).collect();
    desk.writer.replica = Replica::restore(Cut { term: 5, lead: 899 }, 5, documents);
    desk.writer.term = 5;
    desk.writer.sequence = 2_000;
    let sent = desk.writer.publish(vec![members("db", &[7])]);
    desk.reader.handle(Event::Disconnected, desk.now_ms);
    desk.reader.handle(Event::Connected, desk.now_ms);
    let mut effects = desk.answer_the_door();
    let flushes = effects.iter().filter_map(|effect| if let Effect::Flush(number) = effect { Some(*number) } else { None });
    let flush = flushes.max().unwrap();
    effects.extend(desk.reader.handle(Event::Flushed(flush), desk.now_ms));
    effects.extend(desk.pass(100));
    let chunks = desk.answer_to(&effects);
    let Ok(groupcast_messages::Answer::Chunk(chunk)) = groupcast_messages::Answer::decode(&chunks[0]) else { panic!() };
    let same = chunk.entries.iter().filter(|entry| matches!(entry.body, groupcast_messages::Body::Same)).count();
    assert_eq!(
        (same, chunk.entries.len()),
        (before.len() - 2, before.len()),
        "all but the one that changed and the one that never was"
    );
    let effects = desk.reader.handle(Event::Answer(&chunks[0]), desk.now_ms);
    assert_eq!(commits(&effects), 1);
    assert!(desk.agrees() && desk.count("db") == 2 && desk.reader.revision(&sent[0].topic) == Some(sent[0].revision));
    let later = desk.writer.publish(vec![members("cache", &[9])]);
    assert_eq!((commits(&desk.arrive(&later[0])), desk.count("cache")), (1, 2), "deltas go on from there");
}

/// The answer speaks of what was held when it was asked for; what is held by now may be something else.
#[test]
fn what_changed_since_it_was_asked_for_is_not_called_the_same() {
    let mut desk = Desk::joined();
    let documents: Vec<_> =
        desk.reader.documents().enumerate().map(|(i, (t, d))| (t.clone(), 900 + i as u64, d.clone())).collect();
    let late = desk.writer.publish(vec![members("db", &[7])]);
    desk.writer.replica = Replica::restore(Cut { term: 5, lead: 899 }, 5, documents);
    desk.reader.handle(Event::Lost, desk.now_ms);
    let effects = desk.pass(1_000);
    let chunks = desk.answer_to(&effects);
    assert_eq!((commits(&desk.arrive(&late[0])), desk.count("db")), (1, 2), "of the stream that is gone, and late");
    desk.reader.handle(Event::Answer(&chunks[0]), desk.now_ms);
    assert_eq!(desk.reader.cut().unwrap().term, 1, "the answer is not taken");
    let effects = desk.pass(10_000);
    desk.settle(effects);
    assert!(desk.agrees() && desk.count("db") == 1);
}
