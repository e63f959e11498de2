//! What a reader does with what arrives, one situation a test. Sequences of many are left to the simulated bus.

mod colliding;
mod returning;

use groupcast_messages::{Ask, Cut, Delta, Nudge};
use groupcast_policy::doc::{Content, Edit, Enforced, Phase, Placement};
use groupcast_policy::ids::{GroupId, NetworkId, WorkloadId};
use groupcast_policy::needs::Followers;
use groupcast_policy::net::Prefix;
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};

use super::*;
use crate::batch::{Proposal, build};
use crate::replica::{PublishedDelta, Replica};

/// A message as the bus would deliver it.
#[derive(Clone)]
struct Sent {
    topic: Topic,
    revision: u64,
    previous: u64,
    payload: Vec<u8>,
}

/// The writer's side, without a bus.
struct Writer {
    replica: Replica,
    followers: Followers,
    sequence: u64,
    term: u64,
}

impl Writer {
    fn publish(&mut self, edits: Vec<(Topic, Edit)>) -> Vec<Sent> {
        self.publish_in(&[], edits)
    }

    /// In one batch, but so many together at a time.
    fn publish_in(&mut self, wholes: &[usize], edits: Vec<(Topic, Edit)>) -> Vec<Sent> {
        let lead = groupcast_messages::Lead {
            term: self.term,
            since: 1,
            batch: 0,
            count: 0,
            catalog: 0,
            registry: 0,
            resigning: false,
            incomplete: false,
            leader: String::new(),
        };
        let proposal = Proposal { change: self.sequence, edits, wholes: wholes.into(), ..Default::default() };
        let batch = build(proposal, lead, 0, &self.replica, &self.followers).unwrap();
        let lead = self.sequence + 1;
        let published: Vec<PublishedDelta> = batch.published(lead);
        self.sequence = lead + published.len() as u64;
        let sent = |m: &PublishedDelta| Sent {
            topic: m.topic.clone(),
            revision: m.revision,
            previous: self.replica.revision(&m.topic),
            payload: m.payload.clone(),
        };
        let messages = published.iter().map(sent).collect();
        for message in &published {
            self.followers.edit(&message.topic, &message.delta.edit, &self.replica);
        }
        self.replica.apply(Cut { term: self.term, lead }, 1, &published).unwrap();
        messages
    }
}

struct Desk {
    writer: Writer,
    reader: Reader,
    now_ms: u64,
}

fn group(name: &str) -> GroupId {
    GroupId::new(name).unwrap()
}

fn members(of: &str, numbers: &[u32]) -> (Topic, Edit) {
    let add = numbers.iter().map(|n| Prefix::v4(0x0a00_0000 + n, 32).unwrap()).collect();
    (Topic::Members(group(of)), Edit::Members { add, remove: vec![] })
}

fn rules(of: &str, remotes: &[&str]) -> (Topic, Edit) {
    let rule = |remote: &&str| Rule {
        action: Action::Allow,
        direction: Direction::Ingress,
        family: None,
        traffic: Traffic::Any,
        remote: Remote::Group(group(remote)),
        log: false,
    };
    (Topic::Rules(group(of)), Edit::Rules { stateful: None, put: remotes.iter().map(rule).collect(), remove: vec![] })
}

impl Desk {
    /// A host with a workload in group `web`, whose rules name `db` and `cache`; joined.
    fn joined() -> Self {
        let writer = Writer { replica: Replica::default(), followers: Followers::default(), sequence: 10, term: 1 };
        let reader = Reader::new(HostId::new("h").unwrap(), Settings::default(), 1);
        let mut desk = Self { writer, reader, now_ms: 1_000 };
        let placement = Placement {
            workload: WorkloadId::new("w").unwrap(),
            incarnation: 1,
            network: NetworkId::new("n").unwrap(),
            addresses: Default::default(),
            space: None,
            app: None,
            phase: Phase::Running,
            enforced: Enforced::BOTH,
            groups: [group("web")].into(),
        };
        let host = Topic::Host(HostId::new("h").unwrap());
        desk.writer.publish(vec![rules("web", &["db", "cache"]), members("db", &[1]), members("cache", &[1])]);
        desk.writer.publish(vec![(host, Edit::Host { put: vec![placement], remove: vec![] })]);
        let effects = desk.reader.handle(Event::Connected, desk.now_ms);
        desk.settle(effects);
        assert!(desk.reader.cut().is_some());
        desk
    }

    /// Somebody is there and compares revisions.
    fn answer_the_door(&mut self) -> Vec<Effect> {
        let answer = groupcast_messages::EntropyAnswer::Equal { cut: self.writer.replica.cut() };
        self.reader.handle(Event::EntropyAnswer(&answer.encode()), self.now_ms)
    }

    /// Plays server and snapshot service until nothing is asked any more; returns the other effects.
    fn settle(&mut self, effects: Vec<Effect>) -> Vec<Effect> {
        let mut open: std::collections::VecDeque<Effect> = effects.into();
        let mut others = Vec::new();
        while let Some(effect) = open.pop_front() {
            match effect {
                Effect::Flush(number) => open.extend(self.reader.handle(Event::Flushed(number), self.now_ms)),
                Effect::Ask(payload) => {
                    for chunk in self.answer(&payload) {
                        open.extend(self.reader.handle(Event::Answer(&chunk), self.now_ms));
                    }
                }
                other => others.push(other),
            }
        }
        others
    }

    fn arrive(&mut self, sent: &Sent) -> Vec<Effect> {
        let Sent { topic, revision, previous, payload } = sent.clone();
        self.reader.handle(Event::Delta { topic, revision, previous, payload: &payload }, self.now_ms)
    }

    fn answer(&self, ask: &[u8]) -> Vec<Vec<u8>> {
        let replica = &self.writer.replica;
        replica.answer(&self.reader.host, replica.needed_by(&self.reader.host), &Ask::decode(ask).unwrap(), 60_000)
    }

    /// To the request among these.
    fn answer_to(&self, effects: &[Effect]) -> Vec<Vec<u8>> {
        let asked = effects.iter().find_map(|effect| if let Effect::Ask(payload) = effect { Some(payload) } else { None });
        self.answer(asked.unwrap_or_else(|| panic!("{effects:?}")))
    }

    fn pass(&mut self, ms: u64) -> Vec<Effect> {
        self.now_ms += ms;
        self.reader.handle(Event::Tick, self.now_ms)
    }

    fn count(&self, of: &str) -> usize {
        self.reader.document(&Topic::Members(group(of))).and_then(Document::members).map_or(0, |members| members.len())
    }

    fn agrees(&self) -> bool {
        self.reader.documents().all(|(topic, document)| {
            let published = self.writer.replica.document(topic).and_then(Document::content);
            published == document.content()
        })
    }
}

fn commits(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Commit(_))).count()
}

fn asks(effects: &[Effect]) -> bool {
    effects.iter().any(|effect| matches!(effect, Effect::Ask(_)))
}

/// CASES E 7 and 10.
#[test]
fn what_is_held_already_is_discarded() {
    let mut desk = Desk::joined();
    let sent = desk.writer.publish(vec![members("db", &[2])]);
    assert_eq!(commits(&desk.arrive(&sent[0])), 1);
    assert_eq!(desk.count("db"), 2);
    let again = desk.arrive(&sent[0]);
    assert!(commits(&again) == 0 && !asks(&again));
}

/// CASES E 9: what arrives while a snapshot is fetched is applied exactly once, whether the snapshot has it or not.
#[test]
fn deltas_during_a_fetch_are_applied_once() {
    let mut desk = Desk::joined();
    let before = desk.writer.publish(vec![members("db", &[2])]);
    desk.reader.handle(Event::Lost, desk.now_ms);
    let effects = desk.pass(1_000);
    assert!(asks(&effects));
    desk.arrive(&before[0]);
    let after = desk.writer.publish(vec![members("db", &[3])]);
    desk.settle(effects);
    desk.arrive(&after[0]);
    assert_eq!(desk.count("db"), 3);
    assert!(desk.agrees());
}

/// Changes that were merely published at the same time: none waits for another, each is there whole, and none overtakes.
#[test]
fn changes_of_one_batch_become_effective_one_by_one_and_in_order() {
    let mut desk = Desk::joined();
    let edits = vec![rules("web", &["db"]), members("cache", &[2]), members("db", &[2])];
    let sent = desk.writer.publish_in(&[1, 2], edits);
    assert_eq!(sent.iter().map(|sent| sent.topic.to_string()).collect::<Vec<_>>(), ["members.cache", "members.db"], "in order");
    let sent = desk.writer.publish_in(&[1, 1], vec![members("db", &[3]), members("cache", &[3])]);
    assert_eq!(sent[0].topic, members("db", &[]).0, "the order of the changes, not of the topics");
    let mut desk = Desk::joined();
    let edits = vec![members("db", &[2]), members("cache", &[2]), rules("web", &["web"])];
    let sent = desk.writer.publish_in(&[1, 2], edits);
    assert_eq!((commits(&desk.arrive(&sent[0])), desk.count("db")), (1, 2), "alone");
    assert_eq!((commits(&desk.arrive(&sent[1])), desk.count("cache")), (0, 1), "its companion is missing");
    let later = desk.writer.publish(vec![members("db", &[4])]);
    assert_eq!((commits(&desk.arrive(&later[0])), desk.count("db")), (0, 2), "never before what came earlier");
    let effects = desk.arrive(&sent[2]);
    desk.settle(effects);
    assert!(desk.agrees() && desk.count("cache") == 2 && desk.count("db") == 3);
}

/// What was lost of a batch is found although another part of it is in force.
#[test]
fn a_lost_change_is_repaired_though_a_later_one_of_its_batch_is_there() {
    let mut desk = Desk::joined();
    let sent = desk.writer.publish_in(&[1, 1], vec![members("db", &[2]), members("cache", &[2])]);
    assert_eq!(commits(&desk.arrive(&sent[1])), 1);
    let should = vec![(sent[0].topic.hash64(), sent[0].revision)];
    let nudge = groupcast_messages::Nudge { cut: desk.writer.replica.cut(), should }.encode();
    desk.reader.handle(Event::Nudge(&nudge), desk.now_ms);
    let effects = desk.pass(100);
    assert!(asks(&effects));
    desk.settle(effects);
    assert!(desk.agrees() && desk.count("db") == 2);
}

/// CASES E 11.
#[test]
fn a_gap_is_repaired_and_the_old_state_stays_meanwhile() {
    let mut desk = Desk::joined();
    desk.writer.publish(vec![members("db", &[2])]);
    let later = desk.writer.publish(vec![members("db", &[3])]);
    assert_eq!(commits(&desk.arrive(&later[0])), 0);
    assert_eq!(desk.count("db"), 1);
    let effects = desk.pass(100);
    assert!(asks(&effects));
    desk.settle(effects);
    assert_eq!(desk.count("db"), 3);
}

/// CASES E 12: an answer of a term that is over is not taken.
#[test]
fn an_old_snapshot_is_rejected() {
    let mut desk = Desk::joined();
    desk.reader.handle(Event::Lost, desk.now_ms);
    let effects = desk.pass(1_000);
    let old = desk.answer_to(&effects);
    desk.writer.term = 2;
    let newer = desk.writer.publish(vec![members("db", &[2])]);
    desk.arrive(&newer[0]);
    assert_eq!(desk.count("db"), 2);
    let effects = desk.reader.handle(Event::Answer(&old[0]), desk.now_ms);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Report(Incident::AnswerRejected { .. }))), "{effects:?}");
    assert_eq!(desk.count("db"), 2);
}

/// CASES E 13, and digests that do not agree.
#[test]
fn a_corrupt_edit_is_not_applied_and_the_topic_fetched_anew() {
    let both = Prefix::v4(0x0a00_0009, 32).unwrap();
    for edit in [Edit::Members { add: vec![both], remove: vec![both] }, members("db", &[200]).1] {
        let mut desk = Desk::joined();
        let sent = desk.writer.publish(vec![members("db", &[2])]);
        let delta = Delta { edit, ..Delta::decode(&sent[0].topic, &sent[0].payload).unwrap() };
        let effects = desk.arrive(&Sent { payload: delta.encode(), ..sent[0].clone() });
        assert_eq!((commits(&effects), desk.count("db")), (0, 1));
        let effects = desk.pass(100);
        assert!(asks(&effects));
        desk.settle(effects);
        assert_eq!(desk.count("db"), 2);
        assert!(desk.agrees());
    }
}

/// CASES E 17.
#[test]
fn an_unknown_version_is_refused_and_reported() {
    let mut desk = Desk::joined();
    let mut sent = desk.writer.publish(vec![members("db", &[2])]).remove(0);
    let version = sent.payload.iter().position(|byte| *byte == b'v').unwrap() + 1;
    sent.payload[version] = 2;
    let effects = desk.arrive(&sent);
    assert!(
        matches!(&effects[..], [Effect::Report(Incident::Malformed { error: DecodeError::Version { found: 2 }, .. }), ..]),
        "{effects:?}"
    );
    assert_eq!(desk.count("db"), 1);
}

#[test]
fn a_lower_term_is_refused() {
    let mut desk = Desk::joined();
    desk.writer.term = 5;
    let sent = desk.writer.publish(vec![members("db", &[2])]);
    desk.arrive(&sent[0]);
    desk.writer.term = 4;
    let stale = desk.writer.publish(vec![members("db", &[3])]);
    let effects = desk.arrive(&stale[0]);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Report(Incident::LowerTerm { term: 4, .. }))));
    assert_eq!(desk.count("db"), 2);
}

#[test]
fn a_change_waits_for_its_companion_and_asks_when_it_does_not_come() {
    let mut desk = Desk::joined();
    let sent = desk.writer.publish(vec![members("db", &[2]), members("cache", &[2])]);
    assert_eq!(commits(&desk.arrive(&sent[0])), 0);
    let later = desk.writer.publish(vec![members("cache", &[3])]);
    assert_eq!(commits(&desk.arrive(&later[0])), 0, "later ones never overtake");
    assert_eq!((desk.count("db"), desk.count("cache")), (1, 1));
    assert!(!asks(&desk.pass(desk.reader.settings.companion_wait_ms / 2)));
    let effects = desk.pass(desk.reader.settings.companion_wait_ms);
    assert!(asks(&effects));
    desk.settle(effects);
    assert_eq!((desk.count("db"), desk.count("cache")), (2, 3));
    assert_eq!(desk.reader.pending(), 0);
}

#[test]
fn a_large_change_waits_until_its_tally_is_met() {
    let mut desk = Desk::joined();
    let mut edits = vec![members("db", &[2]), members("cache", &[2])];
    edits.extend((0..40).map(|i| members(&format!("other{i}"), &[1])));
    let sent = desk.writer.publish(edits);
    let mine: Vec<&Sent> = sent.iter().filter(|sent| desk.reader.subscriptions().contains(&sent.topic)).collect();
    assert_eq!(mine.len(), 3, "two members and the tally");
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut fresh = Desk::joined();
        assert_eq!(commits(&fresh.arrive(mine[order[0]])), 0);
        assert_eq!(commits(&fresh.arrive(mine[order[1]])), 0);
        assert_eq!(commits(&fresh.arrive(mine[order[2]])), 1);
        assert_eq!((fresh.count("db"), fresh.count("cache")), (2, 2));
    }
}

#[test]
fn a_change_that_needs_a_new_topic_is_held_until_it_is_synced_and_offered_when_that_takes_long() {
    let mut desk = Desk::joined();
    desk.writer.publish(vec![members("new", &[7])]);
    let sent = desk.writer.publish(vec![rules("web", &["new"])]);
    let effects = desk.arrive(&sent[0]);
    assert_eq!(commits(&effects), 0);
    assert!(effects.iter().any(|effect| *effect == Effect::Subscribe(Topic::Members(group("new")))));
    // The server does not answer: after a while the safe part is offered, once.
    let overdue = desk.pass(desk.reader.settings.hold_ms);
    assert!(overdue.iter().any(|effect| matches!(effect, Effect::Overdue(_))));
    assert_eq!(desk.reader.held_back().count(), 1);
    assert!(!desk.pass(1).iter().any(|effect| matches!(effect, Effect::Overdue(_))));
    let mut others = desk.settle(effects);
    others.extend(desk.pass(1));
    assert_eq!(commits(&others), 1);
    assert_eq!(desk.count("new"), 1);
    assert_eq!(desk.reader.held_back().count(), 0);
}

#[test]
fn waiting_deltas_are_bounded() {
    let mut desk = Desk::joined();
    desk.writer.publish(vec![members("db", &[2])]);
    // Every one of these lacks the first: none can be committed.
    let mut sent = desk.writer.publish(vec![members("db", &[3])]);
    let delta = Delta::decode(&sent[0].topic, &sent[0].payload).unwrap();
    for i in 0..PENDING_DELTAS_MAX as u64 {
        sent[0].revision += 1 + i % 2;
        sent[0].payload = delta.encode();
        desk.arrive(&sent[0]);
    }
    assert_eq!(desk.reader.pending(), PENDING_DELTAS_MAX);
    sent[0].revision += 1;
    let effects = desk.arrive(&sent[0]);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Report(Incident::TooManyPending))));
    assert_eq!(desk.reader.pending(), 0);
    let effects = desk.pass(10_000);
    desk.settle(effects);
    assert_eq!(desk.count("db"), 3);
}

#[test]
fn a_nudge_makes_a_host_ask_only_for_what_it_lacks() {
    let mut desk = Desk::joined();
    let db = Topic::Members(group("db"));
    let held = desk.reader.revision(&db).unwrap();
    let cut = desk.reader.cut().unwrap();
    desk.reader.handle(Event::Nudge(&Nudge { cut, should: vec![(db.hash64(), held)] }.encode()), desk.now_ms);
    assert!(!asks(&desk.pass(100)));
    desk.writer.publish(vec![members("db", &[2])]);
    let should = vec![(db.hash64(), desk.writer.replica.revision(&db))];
    let effects = desk.reader.handle(Event::Nudge(&Nudge { cut, should }.encode()), desk.now_ms);
    desk.settle(effects);
    let effects = desk.pass(100);
    desk.settle(effects);
    assert_eq!(desk.count("db"), 2);
}

#[test]
fn acknowledgements_come_after_enforcement_and_not_too_often() {
    let mut desk = Desk::joined();
    let ack = |effects: &[Effect]| effects.iter().any(|effect| matches!(effect, Effect::Ack(_)));
    assert!(!ack(&desk.pass(1_000)), "nothing is in force yet");
    let commits = desk.reader.commits;
    assert!(ack(&desk.reader.handle(Event::Enforced(commits), desk.now_ms)));
    let sent = desk.writer.publish(vec![members("db", &[2])]);
    desk.arrive(&sent[0]);
    let effects = desk.reader.handle(Event::Enforced(commits + 1), desk.now_ms);
    assert!(!ack(&effects), "at most one per interval");
    assert!(ack(&desk.pass(desk.reader.settings.ack_interval_ms)));
}

#[test]
fn a_state_that_is_not_the_usual_one_is_told_at_once_and_again_after_a_reconnect() {
    let mut desk = Desk::joined();
    let states = |effects: &[Effect]| -> Vec<HostState> {
        let acks = effects.iter().filter_map(|effect| match effect {
            Effect::Ack(payload) => Some(groupcast_messages::Ack::decode(payload).unwrap().state),
            _ => None,
        });
        acks.collect()
    };
    let frozen = HostState::Frozen { reason: "a test".into() };
    assert_eq!(states(&desk.reader.handle(Event::State(HostState::Enforcing), desk.now_ms)), []);
    assert_eq!(states(&desk.reader.handle(Event::State(frozen.clone()), desk.now_ms)), std::slice::from_ref(&frozen));
    assert_eq!(states(&desk.pass(10_000)), []);
    desk.reader.handle(Event::Disconnected, desk.now_ms);
    assert_eq!(states(&desk.reader.handle(Event::Connected, desk.now_ms)), [frozen]);
    desk.now_ms += 1_000;
    assert_eq!(states(&desk.reader.handle(Event::State(HostState::Enforcing), desk.now_ms)), [HostState::Enforcing]);
}

#[test]
fn what_waits_behind_an_overdue_change_becomes_overdue_itself() {
    let mut desk = Desk::joined();
    desk.writer.publish(vec![members("new", &[7])]);
    let first = desk.writer.publish(vec![rules("web", &["new"])]);
    desk.arrive(&first[0]);
    let hold_ms = desk.reader.settings.hold_ms;
    let overdue = |effects: &[Effect]| effects.iter().filter(|effect| matches!(effect, Effect::Overdue(_))).count();
    assert_eq!(overdue(&desk.pass(hold_ms)), 1);
    let second = desk.writer.publish(vec![members("db", &[2])]);
    assert_eq!(overdue(&desk.arrive(&second[0])), 0);
    assert_eq!(desk.reader.held_back().count(), 1);
    assert_eq!(overdue(&desk.pass(hold_ms - 1)), 0);
    assert_eq!(overdue(&desk.pass(1)), 1);
    assert_eq!(desk.reader.held_back().count(), 2);
}

#[test]
fn a_document_that_is_published_by_reference_is_fetched_unless_it_is_held() {
    let desk = Desk::joined();
    let db = Topic::Members(group("db"));
    let digest = desk.writer.replica.digest(&db);
    for (digest, fetched) in [(digest, false), (groupcast_policy::doc::Digest(5), true)] {
        let mut desk = Desk::joined();
        let mut sent = desk.writer.publish(vec![members("db", &[2])]).remove(0);
        let delta = Delta { edit: Edit::Reset, digest, ..Delta::decode(&sent.topic, &sent.payload).unwrap() };
        sent.payload = delta.encode();
        desk.arrive(&sent);
        assert_eq!(asks(&desk.pass(100)), fetched);
        let Some(Content::Members(_)) = desk.reader.document(&db).and_then(Document::content) else { panic!() };
    }
}

/// An answer and the deltas behind it are exposed by one event, and the documents are those after all of them.
#[test]
fn commits_of_one_event_are_taken_together() {
    let commit = |number: u64, change: u64, topic: &str| {
        let edits = vec![(Topic::parse(topic).unwrap(), None)];
        Effect::Commit(Commit { number, cut: Cut { term: 1, lead: number }, change, edits, dropped: Vec::new() })
    };
    let one = vec![Effect::Flush(1), commit(1, 7, "rules.a")];
    assert_eq!(together(vec![Effect::Flush(1), commit(1, 7, "rules.a")]), one);
    let merged = together(vec![commit(1, 7, "rules.a"), Effect::Flush(1), commit(2, 0, "rules.b"), Effect::Flush(2)]);
    let [Effect::Flush(1), Effect::Commit(whole), Effect::Flush(2)] = &merged[..] else { panic!("{merged:?}") };
    assert_eq!((whole.number, whole.cut.lead, whole.change, whole.edits.len()), (2, 2, 7, 2));
}

/// The document of a topic that was replaced is the one after all commits: whoever took them one by one applied the later edits to it
/// again, and showed a part of the later change with the earlier one.
#[test]
fn what_was_replaced_is_not_edited_again_and_what_came_back_is_not_dropped() {
    let topic = |name: &str| Topic::parse(name).unwrap();
    let edit = || Some(Edit::Members { add: Vec::new(), remove: Vec::new() });
    let commit = |number: u64, edits: Vec<(Topic, Option<Edit>)>, dropped: Vec<Topic>| {
        Effect::Commit(Commit { number, cut: Cut { term: 1, lead: number }, change: number, edits, dropped })
    };
    let (a, b, c, d) = (topic("members.a"), topic("members.b"), topic("members.c"), topic("members.d"));
    let merged = together(vec![
        commit(1, vec![(a.clone(), None), (b.clone(), edit()), (c.clone(), edit())], vec![d.clone()]),
        commit(2, vec![(a.clone(), edit()), (b.clone(), None), (c.clone(), edit()), (d.clone(), None)], Vec::new()),
    ]);
    let [Effect::Commit(whole)] = &merged[..] else { panic!("{merged:?}") };
    let edits = vec![(a, None), (c.clone(), edit()), (b, None), (c, edit()), (d, None)];
    assert_eq!((&whole.edits, &whole.dropped), (&edits, &Vec::new()));
}
