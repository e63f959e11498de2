//! The bytes of each message, spelled out: what these tests pin is what a peer of another build reads.

use std::fmt::Debug;

use groupcast_messages::{
    Ack, Answer, Ask, Beat, BeatAnswer, Body, Chunk, ChunkWriter, Companions, Cut, DecodeError, Delta, EntropyAnswer,
    EntropyCheck, Entry, FRESH_WITHIN_MS_MAX, HealthReport, HostRequest, HostRequestAnswer, HostState, Lead, Nudge, Past,
    Register, RegisterAnswer, RegisterWorkload, Tally, TopicRef, entropy_item,
};
use groupcast_policy::doc::{Content, Digest, Document, Edit, Enforced, Phase, Phases, Placement, RuleKey};
use groupcast_policy::ids::{AppId, GroupId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::model::{HealthCheck, Probe};
use groupcast_policy::net::{AddressSet, Family, Prefix, Span};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::{Topic, TopicHash};

/// Hex as written, what follows `#` is for the reader.
fn bytes(golden: &str) -> Vec<u8> {
    let digits: Vec<u8> = golden
        .lines()
        .flat_map(|line| line.split('#').next().unwrap_or_default().chars())
        .filter_map(|digit| digit.to_digit(16).map(|value| value as u8))
        .collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x} ")).collect()
}

fn same<T: Debug + PartialEq>(
    value: T,
    encode: impl Fn(&T) -> Vec<u8>,
    decode: impl Fn(&[u8]) -> Result<T, DecodeError>,
    golden: &str,
) {
    let golden = bytes(golden);
    assert_eq!(hex(&encode(&value)), hex(&golden), "{value:?}");
    assert_eq!(decode(&golden), Ok(value));
}

fn topic(token: &str) -> Topic {
    Topic::parse(token).unwrap()
}

fn group(id: &str) -> GroupId {
    GroupId::new(id).unwrap()
}

fn delta(token: &str, edit: Edit, golden: &str) {
    let digest = Digest(0x0102_0304_0506_0708);
    let delta =
        Delta { term: 3, change: 10_000_000, position: 1, edit, digest, companions: Companions::NONE, tally: None, spread_ms: 0 };
    // What all these have in common.
    let head = "a17601  a17403  a163ce00989680  a164cf0102030405060708";
    let golden = golden.replace("[head]", head) + "\na16b ce35c26d4c # k: the seal, over all but the edit";
    same(delta, Delta::encode, |bytes| Delta::decode(&topic(token), bytes), &golden);
}

#[test]
fn members_delta() {
    let edit = Edit::Members { add: vec![Prefix::v4(0x0a01_0203, 32).unwrap()], remove: vec![] };
    delta(
        "members.web",
        edit,
        "86                          # map of 6
         a176 01                     # v: schema 1
         a174 03                     # t: term 3
         a163 ce 00989680            # c: change 10,000,000
         a164 cf 0102030405060708    # d: digest
         a161 c404 0a010203          # a: add 10.1.2.3",
    );
    let v6 = |last: u128, len| Prefix::v6((0xfd00 << 112) | last, len).unwrap();
    let edit = Edit::Members {
        add: vec![Prefix::v4(0x0a01_0203, 32).unwrap(), v6(1, 128), Prefix::v4(0x0a00_0000, 8).unwrap(), v6(0, 16)],
        remove: vec![Prefix::v4(0x0a01_0204, 32).unwrap(), v6(2, 128), Prefix::v4(0x0b00_0000, 9).unwrap(), v6(0, 17)],
    };
    delta(
        "members.web",
        edit,
        "8d [head]
         a161 c404 0a010203                              # a: add an IPv4 address
         a141 c410 fd000000000000000000000000000001      # A: add an IPv6 address
         a170 c405 0a000000 08                           # p: add an IPv4 prefix
         a150 c411 fd000000000000000000000000000000 10   # P: add an IPv6 prefix
         a172 c404 0a010204                              # r, R, q, Q: remove likewise
         a152 c410 fd000000000000000000000000000002
         a171 c405 0b000000 09
         a151 c411 fd000000000000000000000000000000 11",
    );
}

#[test]
fn scope_delta() {
    let edit =
        Edit::Scope { put: vec![(group("web"), Phases::BOTH), (group("db"), Phases::STAGING)], remove: vec![group("old")] };
    delta(
        "scope.global",
        edit,
        "88 [head]
         a167 92 a3 776562 a2 6462    # g: groups web, db
         a168 c402 03 02              # h: both phases, staging
         a147 91 a3 6f6c64            # G: remove old",
    );
    let edit = Edit::Scope { put: vec![(group("web"), Phases::BOTH)], remove: vec![] };
    delta("scope.space.s1", edit, "86 [head] a167 91 a3 776562 # phases are both unless told");
}

#[test]
fn host_delta() {
    let smallest = Placement {
        workload: WorkloadId::new("w1").unwrap(),
        incarnation: 1,
        network: NetworkId::new("n").unwrap(),
        addresses: [Prefix::v4(0x0a01_0203, 32).unwrap()].into(),
        space: None,
        app: None,
        phase: Phase::Running,
        enforced: Enforced::BOTH,
        groups: Default::default(),
    };
    let full = Placement {
        workload: WorkloadId::new("w2").unwrap(),
        incarnation: 300,
        space: Some(SpaceId::new("s").unwrap()),
        app: Some(AppId::new("a").unwrap()),
        phase: Phase::Staging,
        enforced: Enforced { ingress: false, egress: true },
        groups: [group("db"), group("web")].into(),
        addresses: [Prefix::v4(0x0a00_0000, 8).unwrap()].into(),
        ..smallest.clone()
    };
    delta(
        "host.h1",
        Edit::Host { put: vec![smallest, full], remove: vec![WorkloadId::new("w3").unwrap()] },
        "87 [head]
         a177 92                        # w: two placements
           84
             a177 a2 7731               # w: w1
             a169 01                    # i: incarnation 1
             a16e a1 6e                 # n: network n
             a161 c404 0a010203         # a: 10.1.2.3
           89
             a177 a2 7732  a169 cd012c  a16e a1 6e
             a170 c405 0a000000 08      # p: 10.0.0.0/8
             a173 a1 73                 # s: space s
             a179 a1 61                 # y: app a
             a166 01                    # f: staging
             a165 02                    # e: egress only
             a167 92 a2 6462 a3 776562  # g: groups db, web
         a157 91 a2 7733                # W: remove w3",
    );
}

#[test]
fn rules_delta() {
    let allow = Rule {
        action: Action::Allow,
        direction: Direction::Ingress,
        family: None,
        traffic: Traffic::Ports { protocol: 6, ports: [Span::one(443), Span::new(8000, 8999).unwrap()].into_iter().collect() },
        remote: Remote::Group(group("web")),
        log: true,
    };
    let deny = Rule {
        action: Action::Deny,
        direction: Direction::Egress,
        family: Some(Family::V6),
        traffic: Traffic::Any,
        remote: Remote::Addresses(AddressSet {
            v4: [Span::new(0x0a00_0000, 0x0aff_ffff).unwrap()].into_iter().collect(),
            v6: [Span::one(1)].into_iter().collect(),
        }),
        log: false,
    };
    let icmp = Rule {
        traffic: Traffic::Icmp { kind: Some(128), code: None },
        remote: Remote::Any,
        family: Some(Family::V4),
        action: Action::Allow,
        ..deny.clone()
    };
    let protocol = Rule { traffic: Traffic::Protocol(47), family: None, ..icmp.clone() };
    delta(
        "rules.web",
        Edit::Rules { stateful: Some(false), put: vec![allow, deny, icmp, protocol], remove: vec![RuleKey(9)] },
        "88 [head]
         a166 c2                            # f: not stateful
         a175 94                            # u: four rules
           86
             a168 04                        # h: allow, ingress, log
             a174 02  a170 06               # t: ports of p: protocol 6
             a16f c407 bb03 00 833b e707    # o: 443 (and 0 more); 7,555 after the next but one: 8000 (and 999 more)
             a172 02  a167 a3 776562        # r: group g: web
           85
             a168 13                        # h: deny, egress, IPv6
             a174 00                        # t: any
             a172 01                        # r: addresses
             a161 c408 80808050 ffffff07    # a: 10.0.0.0 and 16,777,215 more
             a141 c402 01 00                # A: ::1
           84
             a168 0a                        # h: allow, egress, IPv4
             a174 03  a16b cc80             # t: icmp, k: type 128, any code
             a172 00                        # r: any
           84
             a168 02  a174 01 a170 2f  a172 00
         a155 c408 0000000000000009         # U: remove a rule by its key",
    );
}

#[test]
fn retire_and_reset() {
    delta("members.web", Edit::Retire, "86 [head] a178 01 # x: gone");
    delta("host.h1", Edit::Reset, "86 [head] a178 02 # x: fetch it");
}

#[test]
fn delta_of_a_batch() {
    let listed = Delta {
        term: 10_000,
        change: 1,
        position: 2,
        edit: Edit::Retire,
        digest: Digest::ABSENT,
        companions: Companions::Listed(vec![TopicHash(0x1122_3344_5566_7788), TopicHash(1)]),
        tally: None,
        spread_ms: 0,
    };
    let decode = |bytes: &[u8]| Delta::decode(&topic("host.h1"), bytes);
    same(
        listed.clone(),
        Delta::encode,
        decode,
        "88 a176 01
         a174 cd2710                                     # t: term 10,000
         a163 01
         a16e 02                                         # n: the second behind the lead
         a164 00                                         # d: absent
         a16f c410 1122334455667788 0000000000000001     # o: two companions
         a178 01
         a16b cea3a048ec                                 # k: the seal",
    );
    let tallied = Delta { companions: Companions::Tallied, tally: Some(Tally { count: 40, xor: 513 }), ..listed };
    same(
        tallied,
        Delta::encode,
        decode,
        "8a a176 01 a174 cd2710 a163 01 a16e 02 a164 00
         a16d c3                                         # m: more companions than are listed
         a179 28                                         # y: 40 positions
         a17a cd0201                                     # z: their XOR is 513
         a178 01
         a16b ce9f60df22                                 # k: the seal",
    );
}

#[test]
fn lead() {
    let lead = Lead {
        term: 3,
        since: 2,
        batch: 0x0102_0304_0506_0708,
        count: 2,
        catalog: 1000,
        registry: 70_000,
        resigning: true,
        incomplete: true,
        leader: "c1".into(),
    };
    same(
        lead.clone(),
        Lead::encode,
        Lead::decode,
        "8a a176 01
         a174 03                     # t: term 3
         a173 02                     # s: the stream began under term 2
         a162 cf 0102030405060708    # b: batch
         a16e 02                     # n: two messages follow
         a163 cd03e8                 # c: CATALOG 1,000
         a172 ce00011170             # r: REGISTRY 70,000
         a178 c3                     # x: resigning
         a169 c3                     # i: incomplete
         a16c a2 6331                # l: c1",
    );
    let idle = Lead { count: 0, resigning: false, incomplete: false, batch: 1, catalog: 0, registry: 0, ..lead };
    same(idle, Lead::encode, Lead::decode, "87 a176 01 a174 03 a173 02 a162 01 a163 00 a172 00 a16c a2 6331");
}

#[test]
fn ask() {
    let held = vec![(TopicHash(2), 0), (TopicHash(1), 300)];
    let digests = vec![Digest::ABSENT, Digest(9)];
    same(
        Ask { ask: 5, term: 3, held: held.clone(), digests },
        Ask::encode,
        Ask::decode,
        "86 a176 01 a171 05 a174 03
         a168 c410 0000000000000002 0000000000000001 a172 c403 00 ac02
         a164 c410 0000000000000000 0000000000000009    # d: what is held, where a revision may mean nothing",
    );
    same(
        Ask { ask: 5, term: 3, held, digests: vec![] },
        Ask::encode,
        Ask::decode,
        "85 a176 01
         a171 05                                        # q: ask 5
         a174 03                                        # t: term 3
         a168 c410 0000000000000002 0000000000000001    # h: topics
         a172 c403 00 ac02                              # r: nothing held of the first, revision 300 of the second",
    );
}

const CUT: Cut = Cut { term: 3, lead: 1000 };

#[test]
fn chunk() {
    let past = Past { revision: 9, payload: vec![0xab] };
    let entries = vec![
        Entry { topic: TopicRef::Asked(1), needed: true, revision: 7, body: Body::Same },
        Entry { topic: TopicRef::Named(topic("host.h")), needed: false, revision: 9, body: Body::Deltas(vec![past]) },
        Entry {
            topic: TopicRef::Asked(2),
            needed: true,
            revision: 8,
            body: Body::Part {
                digest: Digest(4),
                last: false,
                edit: Edit::Scope { put: vec![(group("g"), Phases::BOTH)], remove: vec![] },
            },
        },
        Entry {
            topic: TopicRef::Asked(3),
            needed: true,
            revision: 8,
            body: Body::Part { digest: Digest::ABSENT, last: true, edit: Edit::Retire },
        },
    ];
    same(
        Answer::Chunk(Chunk { ask: 5, index: 1, last: true, cut: CUT, entries }),
        Answer::encode,
        Answer::decode,
        "87 a176 01
         a171 05                       # q: ask 5
         a169 01                       # i: the second chunk
         a16c c3                       # l: the last one
         a174 03  a168 cd03e8          # t, h: cut at term 3, lead 1,000
         a165 94                       # e: four entries
           83
             a169 01                   # i: the second topic asked for
             a172 07                   # r: revision 7
             a162 00                   # b: same
           85
             a174 a6 686f73742e68      # t: host.h
             a172 09
             a16e c2                   # n: not needed
             a162 01                   # b: deltas
             a161 91
               82  a172 09  a170 c401 ab
           86
             a169 02  a172 08
             a162 02                   # b: part
             a164 04                   # d: digest of the whole
             a16c c2                   # l: not the last part
             a165 82
               a16b 01                 # k: of a scope
               a167 91 a1 67           # g: group g
           85
             a169 03  a172 08  a162 02  a164 00
             a165 81  a178 01          # x: gone",
    );
    let refused = Answer::Refused { ask: 5, reason: "busy".into() };
    same(refused, Answer::encode, Answer::decode, "83 a176 01 a171 05 a178 a4 62757379 # x: busy");
}

#[test]
fn sorted_members() {
    let members = [
        Prefix::v4(0x0a00_0001, 32).unwrap(),
        Prefix::v4(0x0a00_0002, 32).unwrap(),
        Prefix::v4(0x0a00_0100, 32).unwrap(),
        Prefix::v6(5, 128).unwrap(),
        Prefix::v6(7, 128).unwrap(),
        Prefix::v4(0x0a00_0000, 8).unwrap(),
        Prefix::v4(0x0a00_0000, 24).unwrap(),
        Prefix::v4(0x0a00_0100, 24).unwrap(),
        Prefix::v6(0, 0).unwrap(),
    ];
    let document = Document::new(Content::Members(members.into_iter().collect()));
    let mut writer = ChunkWriter::new(5, CUT, 60_000);
    writer.push_document(TopicRef::Asked(0), true, 8, &document);
    let golden = bytes(&format!(
        "86 a176 01 a171 05 a16c c3 a174 03 a168 cd03e8
         a165 91 85 a169 00 a172 08 a162 02 a164 cf {:016x}
         a165 85
           a16b 04                              # k: members
           a169 c407 81808050 00 fd01           # i: 10.0.0.1, the next, and after 253 others 10.0.1.0
           a149 c402 05 01                      # I: ::5, and after one other ::7
           a16a c40a 80808050 08 00 18 8002 18  # j: 10.0.0.0/8, at the same address /24, 256 further /24
           a14a c402 00 00                      # J: ::/0",
        document.digest().0
    ));
    assert_eq!(writer.finish().iter().map(|payload| hex(payload)).collect::<Vec<_>>(), [hex(&golden)]);
    let chunk = Chunk::decode(&golden).unwrap();
    let Body::Part { edit: Edit::Members { add, .. }, .. } = &chunk.entries[0].body else { panic!("members") };
    assert_eq!(add.as_slice(), members);
}

#[test]
fn ack() {
    let ack = Ack { term: 3, state: HostState::Enforcing, reached: vec![(TopicHash(1), 7)] };
    same(
        ack,
        Ack::encode,
        Ack::decode,
        "85 a176 01 a174 03
         a173 a9 656e666f7263696e67       # s: enforcing
         a168 c408 0000000000000001       # h: topics
         a172 c401 07                     # r: revisions",
    );
    let reason = || "no".to_owned();
    for (state, name) in [
        (HostState::Failing { reason: reason() }, "a7 6661696c696e67"),
        (HostState::Frozen { reason: reason() }, "a6 66726f7a656e"),
        (HostState::Bypassed { reason: reason() }, "a8 6279706173736564"),
        (HostState::Lockdown { reason: reason() }, "a8 6c6f636b646f776e"),
        (HostState::Auditing { reason: reason() }, "a8 6175646974696e67"),
    ] {
        let ack = Ack { term: 3, state, reached: vec![] };
        same(ack, Ack::encode, Ack::decode, &format!("84 a176 01 a174 03 a173 {name} a16d a2 6e6f # m: no"));
    }
    let dry = Ack { term: 3, state: HostState::DryRun, reached: vec![] };
    same(dry, Ack::encode, Ack::decode, "83 a176 01 a174 03 a173 a7 6472792d72756e # s: dry-run");
    let some = HostState::AuditingSome { workloads: vec!["w1".parse().unwrap()], total: 2, reason: reason() };
    same(
        Ack { term: 3, state: some, reached: vec![] },
        Ack::encode,
        Ack::decode,
        "86 a176 01 a174 03
         a173 ad 6175646974696e672d736f6d65  # s: auditing-some
         a16d a2 6e6f                        # m: no
         a177 91 a2 7731                     # w: workloads
         a178 02                             # x: how many",
    );
}

#[test]
fn entropy() {
    let check = EntropyCheck { term: 3, hash: 0x0102_0304_0506_0708, topics: 200 };
    same(check, EntropyCheck::encode, EntropyCheck::decode, "84 a176 01 a174 03 a168 cf 0102030405060708 a16e ccc8");
    let equal = EntropyAnswer::Equal { cut: CUT };
    same(equal, EntropyAnswer::encode, EntropyAnswer::decode, "84 a176 01 a16b 00 a174 03 a16c cd03e8");
    let differs = EntropyAnswer::Differs { cut: CUT, revisions: vec![(TopicHash(1), 128)], truncated: true };
    same(
        differs,
        EntropyAnswer::encode,
        EntropyAnswer::decode,
        "87 a176 01
         a16b 01                       # k: differs
         a174 03  a16c cd03e8          # t, l: cut
         a168 c408 0000000000000001    # h: topics
         a172 c402 8001                # r: revisions
         a17a c3                       # z: truncated",
    );
}

#[test]
fn the_entropy_of_a_topic_never_changes() {
    assert_eq!(entropy_item(TopicHash(1), 2), 0xc484_6c74_c4b3_20ad);
}

#[test]
fn nudge() {
    let nudge = Nudge { cut: CUT, should: vec![(TopicHash(1), 7)] };
    same(nudge, Nudge::encode, Nudge::decode, "85 a176 01 a174 03 a16c cd03e8 a168 c408 0000000000000001 a172 c401 07");
}

#[test]
fn beat() {
    let beat = Beat { boot: 255, count: 4, term: 3, version: "0.1.0".into(), state: HostState::Enforcing };
    same(
        beat,
        Beat::encode,
        Beat::decode,
        "86 a176 01
         a162 ccff                     # b: boot
         a16e 04                       # n: the fourth
         a174 03                       # t: term
         a161 a5 302e312e30            # a: version 0.1.0
         a173 a9 656e666f7263696e67    # s: enforcing",
    );
    same(BeatAnswer::Known, BeatAnswer::encode, BeatAnswer::decode, "82 a176 01 a16b 00");
    same(BeatAnswer::Unknown, BeatAnswer::encode, BeatAnswer::decode, "82 a176 01 a16b 01");
    let check = HealthCheck { probe: Probe::Http { port: 80, path: "/h".into() }, interval_seconds: 5 };
    same(
        BeatAnswer::Check { template: "vm".into(), health: Some(check) },
        BeatAnswer::encode,
        BeatAnswer::decode,
        "86 a176 01
         a16b 02                       # k: another check
         a174 a2 766d                  # t: template vm
         a165 05  a16f 50  a170 a2 2f68 # e: every 5 s, o: port 80, p: /h",
    );
    let none = BeatAnswer::Check { template: "vm".into(), health: None };
    same(none, BeatAnswer::encode, BeatAnswer::decode, "83 a176 01 a16b 02 a174 a2 766d");
}

#[test]
fn register() {
    let workload = RegisterWorkload {
        workload: WorkloadId::new("w1").unwrap(),
        network: NetworkId::new("n").unwrap(),
        addresses: [Prefix::v4(0x0a01_0203, 32).unwrap()].into(),
        labels: [("role".into(), "db".into()), ("tier".into(), String::new())].into(),
        space: Some(SpaceId::new("s").unwrap()),
        app: Some(AppId::new("a").unwrap()),
        phase: Phase::Staging,
        incarnation: Some(2),
    };
    same(
        Register { boot: 1, template: Some("vm".into()), workloads: vec![workload] },
        Register::encode,
        Register::decode,
        "84 a176 01
         a162 01                                      # b: boot
         a174 a2 766d                                 # t: template vm
         a177 91 88                                   # w: one workload
           a177 a2 7731  a16e a1 6e  a161 c404 0a010203
           a16c 94 a4726f6c65 a26462 a474696572 a0    # l: role=db, tier=
           a173 a1 73  a179 a1 61  a166 01  a169 02",
    );
    same(Register { boot: 1, template: None, workloads: vec![] }, Register::encode, Register::decode, "82 a176 01 a162 01");
    let incarnations = vec![(WorkloadId::new("w1").unwrap(), 2), (WorkloadId::new("w2").unwrap(), 300)];
    same(
        RegisterAnswer::Registered { incarnations, health: None },
        RegisterAnswer::encode,
        RegisterAnswer::decode,
        "84 a176 01 a16b 00
         a177 92 a2 7731 a2 7732    # w: workloads
         a169 c403 02 ac02          # i: incarnations 2 and 300",
    );
    for (probe, golden) in [
        (Probe::Tcp { port: 80 }, "84 a176 01 a16b 00 a165 05 a16f 50 # e: every 5 s, o: port"),
        (Probe::Http { port: 80, path: "/x".into() }, "85 a176 01 a16b 00 a165 05 a16f 50 a170 a2 2f78 # p: path"),
        (Probe::Process { name: "sh".into() }, "84 a176 01 a16b 00 a165 05 a163 a2 7368 # c: process"),
    ] {
        let health = Some(HealthCheck { probe, interval_seconds: 5 });
        let answer = RegisterAnswer::Registered { incarnations: vec![], health };
        same(answer, RegisterAnswer::encode, RegisterAnswer::decode, golden);
    }
    same(
        RegisterAnswer::Refused { retryable: true, reason: "no".into() },
        RegisterAnswer::encode,
        RegisterAnswer::decode,
        "84 a176 01 a16b 01 a178 a2 6e6f a179 c3 # x: no, y: retryable",
    );
}

#[test]
fn host_request() {
    let (encode, decode) = (HostRequest::encode, HostRequest::decode);
    same(HostRequest::Fresh { within_ms: 5000 }, encode, decode, "83 a176 01 a171 00 a164 cd1388 # q: fresh, d: 5000");
    same(HostRequest::Leave { boot: 7 }, encode, decode, "83 a176 01 a171 01 a16f 07 # q: leave, o: boot");
    let (network, workload) = (NetworkId::new("n").unwrap(), WorkloadId::new("w").unwrap());
    same(
        HostRequest::Remove { boot: 7, workloads: vec![(network.clone(), workload.clone())] },
        encode,
        decode,
        "85 a176 01 a171 02 a16f 07
         a16e 91 a1 6e  a177 91 a1 77    # n: networks, w: workloads",
    );
    same(
        HostRequest::Health { boot: 7, reports: vec![HealthReport { network, workload, incarnation: 300, healthy: true }] },
        encode,
        decode,
        "87 a176 01 a171 03 a16f 07
         a16e 91 a1 6e  a177 91 a1 77
         a169 c402 ac02                  # i: incarnations
         a168 c401 01                    # h: well",
    );
    let (encode, decode) = (HostRequestAnswer::encode, HostRequestAnswer::decode);
    same(HostRequestAnswer::Done { cut: Cut { term: 3, lead: 9 } }, encode, decode, "84 a176 01 a16b 00 a174 03 a16c 09");
    let refused = HostRequestAnswer::Refused { retryable: true, reason: "no".into() };
    same(refused, encode, decode, "84 a176 01 a16b 01 a178 a2 6e6f a179 c3 # x: no, y: retryable");
    // A registrar of before says no in the words it has.
    let refusal = RegisterAnswer::Refused { retryable: false, reason: "no".into() }.encode();
    assert_eq!(decode(&refusal).unwrap(), HostRequestAnswer::Refused { retryable: false, reason: "no".into() });
    assert!(Register::decode(&HostRequest::Fresh { within_ms: 1 }.encode()).is_err());
    let longest = |within_ms| HostRequest::decode(&HostRequest::Fresh { within_ms }.encode()).unwrap();
    for within_ms in [FRESH_WITHIN_MS_MAX, FRESH_WITHIN_MS_MAX + 1] {
        assert_eq!(longest(within_ms), HostRequest::Fresh { within_ms: FRESH_WITHIN_MS_MAX });
    }
}
