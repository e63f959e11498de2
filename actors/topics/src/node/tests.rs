//! Bounds and refusals of a node; its life among others is left to the simulated bus.

use std::collections::BTreeMap;

use groupcast_messages::{EntropyAnswer, EntropyCheck};
use groupcast_policy::doc::Edit;
use groupcast_policy::ids::GroupId;
use groupcast_policy::needs::Topics;
use groupcast_policy::net::Prefix;

use super::*;
use crate::BATCH_MESSAGES_MAX;
use crate::batch::PROPOSALS_MAX;

fn members(of: usize, number: u32) -> (Topic, Edit) {
    let topic = Topic::Members(GroupId::new(&format!("g{of}")).unwrap());
    (topic, Edit::Members { add: vec![Prefix::v4(0x0a00_0000 + number, 32).unwrap()], remove: vec![] })
}

fn proposal(number: u64, edits: Vec<(Topic, Edit)>) -> Proposal {
    Proposal { number, change: number, edits, ..Default::default() }
}

/// Plays an empty bus until the node leads.
pub(super) fn leading() -> Node {
    let mut node = Node::new(Settings::default(), 1);
    let mut open: std::collections::VecDeque<Effect> = node.handle(Event::Connected, 1).into();
    while let Some(effect) = open.pop_front() {
        open.extend(match effect {
            Effect::ReadHead => node.handle(Event::Head(Some(None)), 1),
            Effect::ReserveTerm { at_least, new_life } => {
                node.handle(Event::TermReserved(Reserved::default().next(at_least, new_life).ok()), 1)
            }
            Effect::BeginLife { .. } => node.handle(Event::LifeBegun(true), 1),
            Effect::ReadTerm => node.handle(Event::TermRead(Some(1)), 1),
            Effect::WantDesired { ask } => node.handle(Event::Desired { ask, desired: Some(Desired::default()) }, 1),
            Effect::Publish(publish) => {
                assert!(publish.messages.is_empty());
                node.handle(Event::Published { batch: publish.batch, fate: Fate::Committed { last: 1, count: 1 } }, 1)
            }
            _ => Vec::new(),
        });
    }
    assert!(node.is_leading());
    node
}

#[test]
fn a_change_larger_than_a_batch_is_refused_and_loses_nothing() {
    let mut node = leading();
    let edits = |count: usize| (0..count).map(|i| members(i, 1)).collect::<Vec<_>>();
    let effects = node.handle(Event::Propose(proposal(1, edits(BATCH_MESSAGES_MAX))), 100);
    let refused = |effect: &Effect| matches!(effect, Effect::Refused { proposal: 1, why: Refused::TooLarge { .. } });
    assert!(effects.iter().any(refused), "{effects:?}");
    let effects = node.handle(Event::Propose(proposal(2, edits(BATCH_MESSAGES_MAX - 1))), 100);
    let sent =
        effects.iter().find_map(|effect| if let Effect::Publish(publish) = effect { Some(publish.messages.len()) } else { None });
    assert_eq!(sent, Some(BATCH_MESSAGES_MAX - 1));
}

/// Found on a loaded machine: the lease was renewed between the refusal of a change and its first part, and said that the topics
/// reflected the change.
#[test]
fn what_is_refused_is_not_reflected() {
    let mut node = leading();
    let large = (0..BATCH_MESSAGES_MAX).map(|i| members(i, 1)).collect();
    node.handle(Event::Propose(Proposal { catalog: 77, registry: 7, ..proposal(1, large) }), 100);
    let renewed = node.handle(Event::Tick, 100 + Settings::default().lease_ms);
    let lead = renewed.iter().find_map(|effect| match effect {
        Effect::Publish(publish) => Lead::decode(&publish.lead).ok(),
        _ => None,
    });
    assert_eq!(lead.map(|lead| (lead.catalog, lead.registry)), Some((0, 0)), "{renewed:?}");
}

#[test]
fn waiting_changes_are_bounded() {
    let mut node = leading();
    // One in flight, the rest wait.
    for number in 0..=PROPOSALS_MAX as u64 {
        let effects = node.handle(Event::Propose(proposal(number, vec![members(0, number as u32)])), 100);
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::Refused { .. })));
    }
    let effects = node.handle(Event::Propose(proposal(9_999, vec![members(0, 99_999)])), 100);
    assert!(matches!(&effects[..], [Effect::Refused { proposal: 9_999, why: Refused::Busy }]), "{effects:?}");
    assert_eq!(node.queued(), PROPOSALS_MAX + 1);
}

#[test]
fn waiting_requests_are_bounded() {
    let mut node = leading();
    let ask = |ask| groupcast_messages::Ask { ask, ..Default::default() }.encode();
    let request = |host: u64, number| Request::Snapshot { host: HostId::new(&format!("h{host}")).unwrap(), payload: ask(number) };
    for id in 0..serve::REQUESTS_MAX as u64 {
        let effects = node.handle(Event::Request { id, request: request(id, 1) }, 100);
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::Reply { .. })));
    }
    let effects = node.handle(Event::Request { id: 70_000, request: request(70_000, 7) }, 100);
    let Some(Effect::Reply { id: 70_000, payloads }) = effects.first() else { panic!("{effects:?}") };
    assert!(matches!(groupcast_messages::Answer::decode(&payloads[0]), Ok(groupcast_messages::Answer::Refused { ask: 7, .. })));
}

/// 65,536 requests of one host, a megabyte each, were kept.
#[test]
fn a_host_that_asks_without_end_takes_one_place_of_each_kind_and_its_last_bytes() {
    let mut node = leading();
    let host = HostId::new("h").unwrap();
    // A read of the head is under way, so that what comes now waits.
    let first = Request::Snapshot { host: HostId::new("other").unwrap(), payload: Vec::new() };
    node.handle(Event::Request { id: 1, request: first }, 100);
    for id in 2..20_000 {
        let payload = vec![0; 1_000];
        let request = match id % 2 {
            0 => Request::Snapshot { host: host.clone(), payload },
            _ => Request::Entropy { host: host.clone(), payload },
        };
        let effects = node.handle(Event::Request { id, request }, 100);
        let told =
            effects.iter().filter(|effect| matches!(effect, Effect::Reply { payloads, .. } if payloads.is_empty())).count();
        assert_eq!(told, usize::from(id > 3), "the one before it is forgotten at once");
    }
    assert_eq!(node.serve_waiting(), (3, 2_000));
    let too_large = vec![0; serve::REQUEST_BYTES_MAX + 1];
    let effects =
        node.handle(Event::Request { id: 30_000, request: Request::Snapshot { host: host.clone(), payload: too_large } }, 100);
    let Some(Effect::Reply { id: 30_000, payloads }) = effects.first() else { panic!("{effects:?}") };
    let told = groupcast_messages::Answer::decode(&payloads[0]);
    assert!(matches!(&told, Ok(groupcast_messages::Answer::Refused { reason, .. }) if reason.contains("host h")), "{told:?}");
    let largest = vec![0; serve::REQUEST_BYTES_MAX];
    node.handle(Event::Request { id: 30_001, request: Request::Snapshot { host, payload: largest } }, 100);
    assert_eq!(node.serve_waiting(), (3, 1_000 + serve::REQUEST_BYTES_MAX));
}

#[test]
fn a_request_waits_for_the_head_it_may_not_be_older_than() {
    let mut node = leading();
    let host = HostId::new("h").unwrap();
    let payload = groupcast_messages::Ask { ask: 1, ..Default::default() }.encode();
    node.handle(Event::Propose(proposal(1, vec![members(0, 1)])), 100);
    let effects = node.handle(Event::Request { id: 5, request: Request::Snapshot { host, payload } }, 101);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::ReadHead)));
    // The batch is in the stream already, its acknowledgement is not here yet.
    let lead = Lead { term: 1, since: 1, batch: 42, count: 1, ..Default::default() };
    let effects = node.handle(Event::Head(Some(Some((2, lead.encode())))), 102);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Reply { .. })), "{effects:?}");
    let batch = match &node.role {
        Role::Leading(reign) => reign.flight_batch().unwrap(),
        _ => panic!("it leads"),
    };
    let effects = node.handle(Event::Published { batch, fate: Fate::Committed { last: 3, count: 2 } }, 103);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Reply { id: 5, .. })), "{effects:?}");
}

#[test]
fn sequences_that_are_not_contiguous_end_the_reign() {
    let mut node = leading();
    let effects = node.handle(Event::Propose(proposal(1, vec![members(0, 1), members(1, 1)])), 100);
    let Some(Effect::Publish(publish)) = effects.first() else { panic!("{effects:?}") };
    let effects = node.handle(Event::Published { batch: publish.batch, fate: Fate::Committed { last: 9, count: 2 } }, 101);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Report(Incident::NotContiguous))));
    assert!(!node.is_leading());
}

#[test]
fn history_is_bounded_and_a_host_behind_it_gets_the_document() {
    use crate::replica::HISTORY_DELTAS_MAX;
    let mut node = leading();
    let mut sequence = 1;
    let topic = members(0, 0).0;
    let mut revisions = Vec::new();
    for number in 0..=HISTORY_DELTAS_MAX as u32 {
        let effects = node.handle(Event::Propose(proposal(u64::from(number), vec![members(0, number)])), 100);
        let Some(Effect::Publish(publish)) = effects.first() else { panic!("{effects:?}") };
        sequence += 2;
        node.handle(Event::Published { batch: publish.batch, fate: Fate::Committed { last: sequence, count: 2 } }, 100);
        revisions.push(sequence);
    }
    let bytes = |held: u64| {
        let ask = groupcast_messages::Ask { ask: 1, term: 1, held: vec![(topic.hash64(), held)], digests: vec![] };
        let host = HostId::new("h").unwrap();
        let chunks = node.replica().answer(&host, node.replica().needed_by(&host), &ask, 60_000);
        let Ok(groupcast_messages::Answer::Chunk(chunk)) = groupcast_messages::Answer::decode(&chunks[0]) else { panic!() };
        chunk.entries.into_iter().find(|entry| !matches!(entry.topic, groupcast_messages::TopicRef::Named(_))).unwrap().body
    };
    use groupcast_messages::Body;
    assert!(matches!(bytes(*revisions.last().unwrap()), Body::Same));
    assert!(matches!(bytes(revisions[0]), Body::Deltas(past) if past.len() == HISTORY_DELTAS_MAX));
    assert!(matches!(bytes(1), Body::Part { .. }), "older than what is remembered");
}

#[test]
fn another_controller_gets_what_came_since_the_lead_message_it_names() {
    use crate::replica::CHAIN;
    use groupcast_messages::{Answer, Ask, Body, TopicRef};
    let mut node = leading();
    let mut leads = Vec::new();
    for number in 0..3 {
        let effects = node.handle(Event::Propose(proposal(number + 1, vec![members(number as usize, 1)])), 100);
        let Some(Effect::Publish(publish)) = effects.first() else { panic!("{effects:?}") };
        let last = 3 + number * 2;
        node.handle(Event::Published { batch: publish.batch, fate: Fate::Committed { last, count: 2 } }, 100);
        leads.push(last - 1);
    }
    let got = |term: u64, held: Vec<(groupcast_policy::topic::TopicHash, u64)>| {
        let chunks = node.replica().dump(&Ask { ask: 1, term, held, digests: vec![] }, 60_000);
        let Ok(Answer::Chunk(chunk)) = Answer::decode(&chunks[0]) else { panic!() };
        let continues =
            chunk.entries.iter().find(|entry| matches!((&entry.topic, &entry.body), (TopicRef::Asked(0), Body::Same)));
        let named = chunk.entries.iter().filter(|entry| matches!(entry.topic, TopicRef::Named(_))).count();
        (continues.map(|entry| entry.revision), named)
    };
    assert_eq!(got(1, vec![]), (None, 3));
    assert_eq!(got(1, vec![(CHAIN, leads[1])]), (Some(leads[1]), 2), "the batch that the message leads comes after it");
    assert_eq!(got(1, vec![(CHAIN, leads[2])]), (Some(leads[2]), 1));
    assert_eq!(got(0, vec![(CHAIN, leads[1])]), (None, 3), "of another life of the stream");
    assert_eq!(got(1, vec![(CHAIN, leads[2] + 9)]), (None, 3), "ahead of this one");
}

/// A node that follows and stands at the lead message with this sequence.
fn following(lead: u64) -> Node {
    let mut node = Node::new(Settings { candidate: false, ..Settings::default() }, 1);
    node.handle(Event::Connected, 1);
    node.handle(Event::Head(Some(None)), 1);
    let payload = Lead { term: 1, since: 1, batch: 1, ..Default::default() }.encode();
    node.handle(Event::Lead { sequence: lead, previous: 0, payload: &payload }, 1);
    assert!(node.is_synced() && node.replica().cut().lead == lead);
    node
}

/// What a node asks another controller for, if it does.
fn fetched(effects: Vec<Effect>) -> Option<Vec<(groupcast_policy::topic::TopicHash, u64)>> {
    let payload =
        effects.into_iter().find_map(|effect| if let Effect::AskReplica(payload) = effect { Some(payload) } else { None })?;
    Some(groupcast_messages::Ask::decode(&payload).unwrap().held)
}

/// On a busy bus everything is late; whoever took that for a loss and fetched everything made it busier.
#[test]
fn who_lags_waits_for_news_and_who_lost_something_asks_for_what_came_since() {
    use crate::replica::CHAIN;
    let Settings { gap_wait_ms, lag_wait_ms, .. } = Settings::default();
    let lead = |sequence: u64| (sequence, Lead { term: 1, since: 1, batch: sequence, ..Default::default() }.encode());
    // The head is ahead, and nothing has come.
    let mut node = following(10);
    let request = Request::Snapshot { host: HostId::new("h").unwrap(), payload: groupcast_messages::Ask::default().encode() };
    node.handle(Event::Request { id: 5, request }, 100);
    node.handle(Event::Head(Some(Some(lead(12)))), 100);
    assert_eq!(fetched(node.handle(Event::Tick, 100 + lag_wait_ms - 1)), None);
    let (sequence, payload) = lead(11);
    node.handle(Event::Lead { sequence, previous: 10, payload: &payload }, 300);
    assert_eq!(fetched(node.handle(Event::Tick, 100 + lag_wait_ms)), None, "something has come");
    // A message is missing: a later one is here.
    let mut node = following(10);
    let (sequence, payload) = lead(12);
    node.handle(Event::Lead { sequence, previous: 11, payload: &payload }, 100);
    assert_eq!(fetched(node.handle(Event::Tick, 100 + gap_wait_ms - 1)), None);
    assert_eq!(fetched(node.handle(Event::Tick, 100 + gap_wait_ms)), Some(vec![(CHAIN, 10)]));
    // Nothing comes at all.
    let mut node = following(10);
    let request = Request::Snapshot { host: HostId::new("h").unwrap(), payload: groupcast_messages::Ask::default().encode() };
    node.handle(Event::Request { id: 5, request }, 100);
    node.handle(Event::Head(Some(Some(lead(12)))), 100);
    assert_eq!(fetched(node.handle(Event::Tick, 100 + lag_wait_ms)), Some(vec![(CHAIN, 10)]));
}

/// A host that is not answered asks again, and makes itself known again: whoever answers late answers each once.
#[test]
fn of_requests_that_wait_only_a_hosts_last_of_each_kind_is_answered() {
    let mut node = following(10);
    let host = HostId::new("h").unwrap();
    let check = EntropyCheck { term: 1, hash: 0, topics: 0 }.encode();
    let mut effects = Vec::new();
    for id in 1..=6 {
        let request = match id % 2 {
            0 => Request::Entropy { host: host.clone(), payload: check.clone() },
            _ => Request::Snapshot { host: host.clone(), payload: groupcast_messages::Ask::default().encode() },
        };
        effects.extend(node.handle(Event::Request { id, request }, 100));
    }
    let mut answered = BTreeMap::new();
    let payload = Lead { term: 1, since: 1, batch: 1, ..Default::default() }.encode();
    effects.extend(node.handle(Event::Head(Some(Some((10, payload.clone())))), 100));
    for _ in 0..6 {
        let replies = effects.iter().filter_map(|effect| match effect {
            Effect::Reply { id, payloads } => Some((*id, !payloads.is_empty())),
            _ => None,
        });
        answered.extend(replies);
        effects = if effects.iter().any(|effect| matches!(effect, Effect::ReadHead)) {
            node.handle(Event::Head(Some(Some((10, payload.clone())))), 100)
        } else {
            node.handle(Event::Tick, 100)
        };
    }
    let last: Vec<u64> = answered.iter().filter(|(_, told)| **told).map(|(id, _)| *id).collect();
    assert_eq!((answered.len(), last), (6, vec![5, 6]), "{answered:?}");
}

/// A replicated stream was seen to call every batch undecided for ever, after a purge had met a publish.
#[test]
fn a_stream_that_decides_nothing_gets_another_leader() {
    let mut node = leading();
    let settings = Settings::default();
    let mut now_ms = 100;
    let mut effects = node.handle(Event::Propose(proposal(1, vec![members(0, 1)])), now_ms);
    let mut step_downs = Vec::new();
    while now_ms < 100 + 2 * settings.request_timeout_ms + settings.request_timeout_ms / 2 {
        let sent =
            effects.iter().find_map(|effect| if let Effect::Publish(publish) = effect { Some(publish.batch) } else { None });
        step_downs.extend(effects.iter().filter(|effect| matches!(effect, Effect::StepDown)).map(|_| now_ms));
        now_ms += settings.retry_ms;
        effects = match sent {
            Some(batch) => node.handle(Event::Published { batch, fate: Fate::Undecided }, now_ms),
            None => node.handle(Event::Tick, now_ms),
        };
    }
    assert_eq!(step_downs.len(), 2, "once for each time limit, not for each answer: {step_downs:?}");
    assert!(node.is_leading() && node.queued() == 1, "the batch is not given up");
}

/// A whole fleet comes back with such when the stream was lost.
#[test]
fn a_check_of_an_earlier_life_is_answered_without_a_look_at_what_the_host_needs() {
    let cut = Cut { term: 5, lead: 9 };
    let replica = Replica::restore(cut, 5, []);
    let told = replica.compare(|| unreachable!(), &EntropyCheck { term: 4, hash: 0, topics: 0 });
    assert_eq!(told, EntropyAnswer::Differs { cut, revisions: Vec::new(), truncated: true });
    let told = replica.compare(Topics::default, &EntropyCheck { term: 5, hash: 0, topics: 0 });
    assert_eq!(told, EntropyAnswer::Equal { cut });
}
