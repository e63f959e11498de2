//! Values of every message from a seed, in the order in which decoders give them back (IPv4 before IPv6, addresses before prefixes).

use std::collections::{BTreeMap, BTreeSet};

use groupcast_messages::{
    Ack, Answer, Ask, Beat, BeatAnswer, Body, Chunk, ChunkWriter, Companions, Cut, Delta, EntropyAnswer, EntropyCheck, Entry,
    FRESH_WITHIN_MS_MAX, HealthReport, HostRequest, HostRequestAnswer, HostState, Lead, Nudge, Past, Register, RegisterAnswer,
    RegisterWorkload, Tally, TopicRef,
};
use groupcast_policy::doc::{Digest, Document, Edit, Enforced, Phase, Phases, Placement, RuleKey};
use groupcast_policy::ids::{AppId, GroupId, HostId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::model::{HealthCheck, Probe};
use groupcast_policy::net::{AddressSet, Family, Prefix, Span, SpanSet};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::{Scope, Topic, TopicHash};

use super::Random;
use super::message::{Decoder, Message};

/// A message and its bytes; those of an answer often as the chunk writer makes them, with members as gaps.
pub fn encoded(random: &mut Random, decoder: Decoder) -> (Message, Vec<u8>) {
    if decoder == Decoder::Answer && random.chance(2) {
        let mut writer = ChunkWriter::new(random.small(), cut(random), 4_000);
        for place in 0..random.below(3) as u32 {
            let topic = topic(random);
            let document = document(random, &topic, 6);
            writer.push_document(TopicRef::Asked(place), random.chance(2), random.number(), &document);
        }
        let payloads = writer.finish();
        let bytes = random.pick(&payloads);
        return (decoder.decode(&bytes).expect("a chunk"), bytes);
    }
    let message = message(random, decoder);
    let bytes = message.encode();
    (message, bytes)
}

pub fn message(random: &mut Random, decoder: Decoder) -> Message {
    match decoder {
        Decoder::DeltaScope | Decoder::DeltaHost | Decoder::DeltaRules | Decoder::DeltaMembers => {
            Message::Delta(delta(random, &decoder.topic()))
        }
        Decoder::Lead => Message::Lead(Lead {
            term: random.number(),
            since: random.number(),
            batch: random.word(),
            count: random.small(),
            catalog: random.number(),
            registry: random.number(),
            resigning: random.chance(2),
            incomplete: random.chance(2),
            leader: text(random, 64),
        }),
        Decoder::Ask => {
            let (ask, term, held) = (random.small(), random.number(), revisions(random));
            let known = if random.number().is_multiple_of(2) { held.len() } else { 0 };
            Message::Ask(Ask { ask, term, held, digests: (0..known).map(|_| Digest(random.number())).collect() })
        }
        Decoder::Answer => Message::Answer(answer(random)),
        Decoder::Ack => Message::Ack(Ack { term: random.number(), state: state(random), reached: revisions(random) }),
        Decoder::EntropyCheck => {
            Message::EntropyCheck(EntropyCheck { term: random.number(), hash: random.word(), topics: random.small() })
        }
        Decoder::EntropyAnswer => Message::EntropyAnswer(if random.chance(2) {
            EntropyAnswer::Equal { cut: cut(random) }
        } else {
            EntropyAnswer::Differs { cut: cut(random), revisions: revisions(random), truncated: random.chance(2) }
        }),
        Decoder::Nudge => Message::Nudge(Nudge { cut: cut(random), should: revisions(random) }),
        Decoder::Beat => Message::Beat(Beat {
            boot: random.word(),
            count: random.number(),
            term: random.number(),
            version: text(random, 32),
            state: state(random),
        }),
        Decoder::BeatAnswer => Message::BeatAnswer(match random.below(3) {
            0 => BeatAnswer::Known,
            1 => BeatAnswer::Unknown,
            _ => BeatAnswer::Check { template: id(random), health: health(random) },
        }),
        Decoder::Register => Message::Register(Register {
            boot: random.word(),
            template: random.chance(2).then(|| id(random)),
            workloads: list(random, 3, workload),
        }),
        Decoder::RegisterAnswer => Message::RegisterAnswer(if random.chance(2) {
            let incarnations: BTreeMap<WorkloadId, u64> =
                list(random, 4, |r| (WorkloadId::new(&id(r)).expect("an id"), r.number())).into_iter().collect();
            RegisterAnswer::Registered { incarnations: incarnations.into_iter().collect(), health: health(random) }
        } else {
            RegisterAnswer::Refused { retryable: random.chance(2), reason: text(random, 256) }
        }),
        Decoder::HostRequest => Message::HostRequest(match random.below(4) {
            0 => HostRequest::Fresh { within_ms: random.number().min(FRESH_WITHIN_MS_MAX) },
            1 => HostRequest::Leave { boot: random.number() },
            2 => HostRequest::Remove { boot: random.number(), workloads: list(random, 4, named) },
            _ => HostRequest::Health { boot: random.number(), reports: list(random, 4, report) },
        }),
        Decoder::HostRequestAnswer => Message::HostRequestAnswer(if random.chance(2) {
            HostRequestAnswer::Done { cut: cut(random) }
        } else {
            HostRequestAnswer::Refused { retryable: random.chance(2), reason: text(random, 256) }
        }),
    }
}

fn named(random: &mut Random) -> (NetworkId, WorkloadId) {
    (NetworkId::new(&id(random)).expect("an id"), WorkloadId::new(&id(random)).expect("an id"))
}

fn report(random: &mut Random) -> HealthReport {
    let (network, workload) = named(random);
    HealthReport { network, workload, incarnation: random.number(), healthy: random.chance(2) }
}

fn health(random: &mut Random) -> Option<HealthCheck> {
    let port = random.below(65_535) as u16 + 1;
    let probe = match random.below(4) {
        0 => Probe::Tcp { port },
        1 => Probe::Http { port, path: format!("/{}", id(random)) },
        2 => Probe::Process { name: id(random) },
        _ => return None,
    };
    Some(HealthCheck { probe, interval_seconds: random.small().max(1) })
}

fn list<T>(random: &mut Random, max: usize, mut item: impl FnMut(&mut Random) -> T) -> Vec<T> {
    let count = random.below(max + 1);
    (0..count).map(|_| item(random)).collect()
}

fn id(random: &mut Random) -> String {
    const LETTERS: &[u8] = b"abcxyzABCXYZ0189_-";
    let len = if random.chance(8) { 64 } else { 1 + random.below(12) };
    (0..len).map(|_| char::from(random.pick(LETTERS))).collect()
}

fn group(random: &mut Random) -> GroupId {
    GroupId::new(&id(random)).expect("an id")
}

fn text(random: &mut Random, bytes_max: usize) -> String {
    let count = random.below(bytes_max / 4 + 1);
    (0..count).map(|_| random.pick(&['a', ' ', '/', 'é', '网', '🦀', '"', '\0'])).collect()
}

fn cut(random: &mut Random) -> Cut {
    Cut { term: random.number(), lead: random.number() }
}

fn revisions(random: &mut Random) -> Vec<(TopicHash, u64)> {
    let entries: BTreeMap<TopicHash, u64> = list(random, 6, |r| (TopicHash(r.word()), r.number())).into_iter().collect();
    entries.into_iter().collect()
}

fn state(random: &mut Random) -> HostState {
    let reason = text(random, 256);
    match random.below(9) {
        0 => HostState::Enforcing,
        1 => HostState::Failing { reason },
        2 => HostState::Frozen { reason },
        3 => HostState::Bypassed { reason },
        4 => HostState::Lockdown { reason },
        5 => HostState::Auditing { reason },
        6 => {
            let workloads: Vec<WorkloadId> = list(random, 3, |r| WorkloadId::new(&format!("w{}", r.below(1_000))).unwrap());
            HostState::AuditingSome { total: workloads.len() as u32 + random.below(3) as u32, workloads, reason }
        }
        7 => HostState::DryRun,
        _ => HostState::Other(format!("later-{}", random.below(100))),
    }
}

// ---- deltas

pub fn delta(random: &mut Random, topic: &Topic) -> Delta {
    Delta {
        term: random.number(),
        change: random.number(),
        position: random.small().max(1),
        edit: edit(random, topic, true),
        digest: Digest(random.word()),
        companions: if random.chance(4) {
            Companions::Tallied
        } else {
            let topics: BTreeSet<TopicHash> = list(random, 32, |r| TopicHash(r.word())).into_iter().collect();
            Companions::Listed(topics.into_iter().collect())
        },
        tally: random.chance(3).then(|| Tally { count: random.small(), xor: random.small() }),
        spread_ms: if random.chance(3) { random.small() } else { 0 },
    }
}

/// An edit that names each item once, without removals where they have no place.
pub fn edit(random: &mut Random, topic: &Topic, removals: bool) -> Edit {
    if removals && random.chance(16) {
        return random.pick(&[Edit::Retire, Edit::Reset]);
    }
    let removed_max = if removals { 4 } else { 0 };
    match topic {
        Topic::Scope(_) => Edit::Scope {
            put: keyed(list(random, 4, |r| (group(r), r.pick(&[Phases::RUNNING, Phases::STAGING, Phases::BOTH])))),
            remove: list(random, removed_max, group),
        },
        Topic::Host(_) => Edit::Host {
            put: keyed(list(random, 3, placement).into_iter().map(|p| (p.workload.clone(), p)).collect())
                .into_iter()
                .map(|(_, placement)| placement)
                .collect(),
            remove: list(random, removed_max, |r| WorkloadId::new(&id(r)).expect("an id")),
        },
        Topic::Rules(_) => Edit::Rules {
            stateful: random.pick(&[None, Some(true), Some(false)]),
            put: keyed(list(random, 3, rule).into_iter().map(|r| (r.key(), r)).collect()).into_iter().map(|(_, r)| r).collect(),
            remove: list(random, removed_max, |r| RuleKey(r.word())),
        },
        Topic::Members(_) => {
            let add = members(random, 8);
            let remove = members(random, 2 * removed_max).into_iter().filter(|member| !add.contains(member)).collect();
            Edit::Members { add, remove }
        }
    }
}

fn keyed<K: Ord, V>(items: Vec<(K, V)>) -> Vec<(K, V)> {
    items.into_iter().collect::<BTreeMap<K, V>>().into_iter().collect()
}

/// Sorted within each form: addresses before prefixes, IPv4 before IPv6.
fn members(random: &mut Random, max: usize) -> Vec<Prefix> {
    let mut members: Vec<Prefix> = list(random, max, prefix).into_iter().collect::<BTreeSet<_>>().into_iter().collect();
    members.sort_by_key(|member| (!member.is_host(), *member));
    members
}

pub fn prefix(random: &mut Random) -> Prefix {
    let host = random.chance(2);
    if random.chance(2) {
        let len = if host { 32 } else { random.below(33) as u8 };
        Prefix::v4(if random.chance(2) { random.word() as u32 } else { 0x0a00_0000 | random.small() >> 8 }, len)
            .expect("a length of IPv4")
    } else {
        let len = if host { 128 } else { random.below(129) as u8 };
        let bits = (u128::from(random.word()) << 64) | u128::from(random.number());
        Prefix::v6(bits, len).expect("a length of IPv6")
    }
}

fn placement(random: &mut Random) -> Placement {
    Placement {
        workload: WorkloadId::new(&id(random)).expect("an id"),
        incarnation: random.number(),
        network: NetworkId::new(&id(random)).expect("an id"),
        addresses: list(random, 4, prefix).into_iter().collect(),
        space: random.chance(2).then(|| SpaceId::new(&id(random)).expect("an id")),
        app: random.chance(2).then(|| AppId::new(&id(random)).expect("an id")),
        phase: random.pick(&[Phase::Running, Phase::Staging]),
        enforced: Enforced { ingress: random.chance(2), egress: random.chance(2) },
        groups: list(random, 4, group).into_iter().collect(),
    }
}

pub fn rule(random: &mut Random) -> Rule {
    let byte = |random: &mut Random| random.word() as u8;
    Rule {
        action: random.pick(&[Action::Allow, Action::Deny]),
        direction: random.pick(&[Direction::Ingress, Direction::Egress]),
        family: random.pick(&[None, Some(Family::V4), Some(Family::V6)]),
        traffic: match random.below(4) {
            0 => Traffic::Any,
            1 => Traffic::Protocol(byte(random)),
            2 => Traffic::Ports { protocol: byte(random), ports: spans(random, |r| r.word() as u16) },
            _ => Traffic::Icmp { kind: random.chance(2).then(|| byte(random)), code: random.chance(2).then(|| byte(random)) },
        },
        remote: match random.below(3) {
            0 => Remote::Any,
            1 => Remote::Addresses(AddressSet {
                v4: spans(random, |r| r.word() as u32),
                v6: spans(random, |r| (u128::from(r.word()) << 64) | u128::from(r.word())),
            }),
            _ => Remote::Group(group(random)),
        },
        log: random.chance(2),
    }
}

fn spans<T: groupcast_policy::net::Successor>(random: &mut Random, mut value: impl FnMut(&mut Random) -> T) -> SpanSet<T> {
    list(random, 4, |r| {
        let (a, b) = (value(r), value(r));
        if r.chance(2) { Span::one(a) } else { Span::new(a.min(b), a.max(b)).expect("in order") }
    })
    .into_iter()
    .collect()
}

// ---- answers

pub fn topic(random: &mut Random) -> Topic {
    match random.below(6) {
        0 => Topic::Scope(Scope::Global),
        1 => Topic::Scope(Scope::Space(SpaceId::new(&id(random)).expect("an id"))),
        2 => Topic::Scope(Scope::App(AppId::new(&id(random)).expect("an id"))),
        3 => Topic::Host(HostId::new(&id(random)).expect("an id")),
        4 => Topic::Rules(group(random)),
        _ => Topic::Members(group(random)),
    }
}

/// A document of the topic's kind, sometimes absent, sometimes empty.
pub fn document(random: &mut Random, topic: &Topic, rounds: usize) -> Document {
    let mut document = Document::absent();
    let rounds = random.below(rounds + 1);
    (0..rounds).for_each(|_| {
        let edit = edit(random, topic, false);
        document.apply(&edit).expect("an edit of the topic's kind");
    });
    document
}

fn answer(random: &mut Random) -> Answer {
    if random.chance(8) {
        return Answer::Refused { ask: random.small(), reason: text(random, 256) };
    }
    Answer::Chunk(Chunk {
        ask: random.small(),
        index: random.small(),
        last: random.chance(2),
        cut: cut(random),
        entries: list(random, 4, entry),
    })
}

fn entry(random: &mut Random) -> Entry {
    let named = topic(random);
    let body = match random.below(3) {
        0 => Body::Same,
        1 => Body::Deltas(list(random, 3, |r| Past { revision: r.number(), payload: delta(r, &named).encode() })),
        _ if random.chance(8) => Body::Part { digest: Digest::ABSENT, last: true, edit: Edit::Retire },
        _ => Body::Part { digest: Digest(random.word()), last: random.chance(2), edit: edit(random, &named, false) },
    };
    let topic = if random.chance(2) { TopicRef::Asked(random.small()) } else { TopicRef::Named(named) };
    Entry { topic, needed: random.chance(2), revision: random.number(), body }
}

fn workload(random: &mut Random) -> RegisterWorkload {
    let Placement { workload, network, addresses, space, app, phase, .. } = placement(random);
    RegisterWorkload {
        workload,
        network,
        addresses,
        labels: list(random, 4, |r| (format!("k{}", text(r, 40)), text(r, 40))).into_iter().collect(),
        space,
        app,
        phase,
        incarnation: random.chance(2).then(|| random.number()),
    }
}
