//! What enforcing costs, on the real kernel, in a network namespace of its own. Each figure has its baseline in the same run.
//!
//! "Ours" is from the bytes of a delta to the committed transaction: decoded, applied to the documents, planned, encoded, sent. What the
//! topic reader does before (order, companions, digests) is measured with the topics.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::{Duration, Instant};

use groupcast_enforce::delta::{Op, Transaction};
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::interface::{Claim, Interface};
use groupcast_enforce::settings::{Attached, Attachment, Attachments, Settings, Stamp};
use groupcast_enforce::table::{Elements, SetKind};
use groupcast_messages::{Companions, Delta};
use groupcast_policy::doc::{Content, Digest, Document, Edit, Enforced, Members, Phase, Phases, Placement, Rules};
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::{Scope, Topic};
use serde::Serialize;

use crate::keeper::{Keeper, Moved, MovedDocument};
use crate::netlink::Kernel;
use crate::state::Replica;

use super::Failure;

#[derive(Debug, Serialize)]
pub struct Figures {
    pub raw_us_p50: f64,
    pub ours_us_p50: f64,
    pub ratio: f64,
    pub ours_100k_us_p50: f64,
    pub leave_us_p50: f64,
    pub workload_add_us_p50: f64,
    pub nft_cli_us_p50: f64,
    pub full_load_ms: f64,
    pub rss_mb: f64,
}

const ROUNDS: usize = 2_000;
const CLI_ROUNDS: usize = 50;
const TABLE: &str = "gc";

fn group(number: usize) -> Result<GroupId, Failure> {
    Ok(GroupId::new(&format!("g{number}"))?)
}

fn placement(number: usize) -> Result<Placement, Failure> {
    Ok(Placement {
        workload: WorkloadId::new(&format!("w{number}"))?,
        incarnation: 1,
        network: "n0".parse()?,
        addresses: Prefix::v4(0x0a40_0000 + number as u32, 32).into_iter().collect(),
        space: None,
        app: None,
        phase: Phase::Running,
        enforced: Enforced::BOTH,
        groups: BTreeSet::new(),
    })
}

/// So many groups, bound globally, each with a rule that names itself and so many members; and so many workloads.
pub fn documents(groups: usize, members: usize, workloads: usize) -> Result<Replica, Failure> {
    let mut documents = Replica::new();
    let mut bound = BTreeMap::new();
    for number in 0..groups {
        let id = group(number)?;
        let rule = parse_rule(&format!("ingress tcp {} from group:{id}", 1000 + number % 5000)).map_err(|e| format!("{e:?}"))?;
        let rules = Rules { stateful: true, rules: [(rule.key(), rule)].into() };
        let v4 = (0..members).map(|member| 0x0a80_0000 + (number * members + member) as u32).collect();
        documents.insert(Topic::Rules(id.clone()), Document::new(Content::Rules(rules)));
        documents.insert(Topic::Members(id.clone()), Document::new(Content::Members(Members { v4, ..Members::default() })));
        bound.insert(id, Phases::BOTH);
    }
    documents.insert(Topic::Scope(Scope::Global), Document::new(Content::Scope(bound)));
    let placed = (0..workloads).map(|number| placement(number).map(|placement| (placement.workload.clone(), placement)));
    let placed: BTreeMap<_, _> = placed.collect::<Result<_, _>>()?;
    documents.insert(Topic::Host(HostId::new("h0")?), Document::new(Content::Host(placed)));
    Ok(documents)
}

fn keeper(documents: Replica, attached: usize) -> Result<Keeper<Kernel>, Failure> {
    let mut attachments = Attachments::new();
    for number in 0..attached {
        let interface = Interface::new(&format!("gcw{number}"))?;
        let attachment = Attached { attachment: Attachment::Interface(interface), audit: false };
        attachments.insert(WorkloadId::new(&format!("w{number}"))?, attachment);
    }
    let settings = Settings { claims: vec![Claim::new("gcw*")?], ..Settings::default() };
    let mut kernel = Kernel::open(TABLE, true)?;
    kernel.remove()?;
    Ok(Keeper::start(HostId::new("h0")?, settings, attachments, Stamp::FIRST, documents, kernel)?)
}

/// The time of one step in the middle of all, in microseconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

/// From the bytes of a delta to the commit.
fn moved(keeper: &mut Keeper<Kernel>, topic: &Topic, edit: Edit) -> Result<Duration, Failure> {
    let companions = Companions::Listed(Vec::new());
    let delta = Delta { term: 1, change: 1, position: 1, edit, digest: Digest(1), companions, tally: None, spread_ms: 0 };
    let bytes = delta.encode();
    let start = Instant::now();
    let delta = Delta::decode(topic, &bytes)?;
    let edits = vec![(topic.clone(), MovedDocument::Edited(delta.edit))];
    keeper.moved(&[Moved { number: 1, change: 1, whole: false, edits, dropped: Vec::new() }])?;
    Ok(start.elapsed())
}

struct MemberTimes {
    raw: f64,
    join: f64,
    leave: f64,
    /// Every so often a leave has to write the rules of the stamps to come.
    leave_mean: f64,
}

fn members(count: usize) -> Result<MemberTimes, Failure> {
    let documents = documents(1, count, 1)?;
    let mut keeper = keeper(documents.clone(), 1)?;
    // The first commit takes the documents' place on the bus.
    let edits = documents.into_iter().map(|(topic, document)| (topic, MovedDocument::Replaced(Box::new(document)))).collect();
    keeper.moved(&[Moved { number: 1, change: 1, whole: true, edits, dropped: Vec::new() }])?;
    let topic = Topic::Members(group(0)?);
    let set = groupcast_enforce::names::members(&group(0)?, groupcast_policy::net::Family::V4);
    let (mut raw, mut joins, mut leaves) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let address = 0x0b00_0000 + round as u32;
        let elements = Elements::V4([address].into_iter().collect());
        let add = Op::AddElements { set: set.clone(), kind: SetKind::V4, elements: elements.clone() };
        let remove = Op::DeleteElements { set: set.clone(), kind: SetKind::V4, elements };
        let bare = keeper.enforcer().prepared(&Transaction { anew: false, ops: vec![add] });
        let start = Instant::now();
        let complaints = keeper.enforcer().send(bare)?;
        raw.push(start.elapsed());
        if complaints > 0 {
            return Err("the bare element was refused".into());
        }
        keeper.enforcer().commit(&Transaction { anew: false, ops: vec![remove] })?;
        let member: Vec<Prefix> = Prefix::v4(address, 32).into_iter().collect();
        joins.push(moved(&mut keeper, &topic, Edit::Members { add: member.clone(), remove: Vec::new() })?);
        leaves.push(moved(&mut keeper, &topic, Edit::Members { add: Vec::new(), remove: member })?);
    }
    let leave_mean = leaves.iter().sum::<Duration>().as_secs_f64() * 1e6 / leaves.len() as f64;
    Ok(MemberTimes { raw: median(raw), join: median(joins), leave: median(leaves), leave_mean })
}

fn workloads() -> Result<f64, Failure> {
    const WORKLOADS: usize = 1_000;
    let documents = documents(20, 100, WORKLOADS)?;
    let mut keeper = keeper(documents.clone(), WORKLOADS + 1)?;
    let edits = documents.into_iter().map(|(topic, document)| (topic, MovedDocument::Replaced(Box::new(document)))).collect();
    keeper.moved(&[Moved { number: 1, change: 1, whole: true, edits, dropped: Vec::new() }])?;
    let topic = Topic::Host(HostId::new("h0")?);
    let one = placement(WORKLOADS)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS / 4 {
        times.push(moved(&mut keeper, &topic, Edit::Host { put: vec![one.clone()], remove: Vec::new() })?);
        moved(&mut keeper, &topic, Edit::Host { put: Vec::new(), remove: vec![one.workload.clone()] })?;
    }
    Ok(median(times))
}

/// The time it takes, and the memory of a process that has done it. In the agent the topic reader holds the documents, too.
fn full_load() -> Result<(f64, f64), Failure> {
    let read = documents(1_000, 100, 1_000)?;
    let mut keeper = keeper(read.clone(), 1_000)?;
    let start = Instant::now();
    keeper.settle()?;
    let took = start.elapsed().as_secs_f64() * 1e3;
    let resident = resident_mb();
    drop((read, keeper));
    Ok((took, resident))
}

fn nft_cli() -> Result<f64, Failure> {
    let nft = |words: &str| -> Result<(), Failure> {
        let output = Command::new("nft").arg(words).output()?;
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into()) }
    };
    nft("add table inet cli")?;
    nft("add set inet cli s { type ipv4_addr; }")?;
    let mut times = Vec::new();
    for round in 0..CLI_ROUNDS {
        let start = Instant::now();
        nft(&format!("add element inet cli s {{ 10.0.0.{round} }}"))?;
        times.push(start.elapsed());
    }
    Ok(median(times))
}

fn resident_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse::<f64>().ok());
    kilobytes.unwrap_or_default() / 1024.0
}

/// In the network namespace of the calling thread.
pub fn run() -> Result<Figures, Failure> {
    let small = members(10_000)?;
    let large = members(100_000)?;
    let large_mb = resident_mb();
    let workload_add_us_p50 = workloads()?;
    let nft_cli_us_p50 = nft_cli()?;
    let (full_load_ms, full_mb) = full_load()?;
    eprintln!(
        "a leave is {:.1} × a bare element added, {:.1} µs on average; at 100,000 members {:.1} µs against {:.1} bare, a leave {:.1}",
        small.leave / small.raw,
        small.leave_mean,
        large.join,
        large.raw,
        large.leave
    );
    Ok(Figures {
        raw_us_p50: small.raw,
        ours_us_p50: small.join,
        ratio: small.join / small.raw,
        ours_100k_us_p50: large.join,
        leave_us_p50: small.leave,
        workload_add_us_p50,
        nft_cli_us_p50,
        full_load_ms,
        rss_mb: large_mb.max(full_mb),
    })
}
