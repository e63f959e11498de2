//! What a packet pays: the same packets through an accept-all table with connection tracking, through ours, and through the same policy
//! as a list of iptables rules; established, and with every packet judged. Each way is a lane of its own, and the lanes take turns, so
//! that whatever else the machine does meets all of them. A ratio is that of two rounds side by side, and the median of those.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use groupcast_enforce::delta::{Op, Transaction};
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::expression::{Field, Statement, Test, Verdict};
use groupcast_enforce::interface::{Claim, Interface};
use groupcast_enforce::names;
use groupcast_enforce::settings::{Attached, Attachment, Attachments, Settings, Stamp};
use groupcast_policy::doc::{Content, Document, Enforced, Phase, Phases, Placement, Rules};
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::net::Prefix;
use groupcast_policy::rule::Direction;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::{Scope, Topic};
use serde::Serialize;

use super::Failure;
use super::lane::{Lane, RECEIVER, SENDER, command};
use crate::keeper::Keeper;
use crate::netlink::Kernel;
use crate::state::Replica;

#[derive(Debug, Serialize)]
pub struct Figures {
    none_pps: f64,
    ours_pps: f64,
    ratio: f64,
    judged_ratio: f64,
    iptables_ratio: f64,
    iptables_judged_ratio: f64,
    rules_in_kernel: usize,
    iptables_rules: usize,
}

const WORKLOADS: usize = 500;
const SPACES: usize = 20;
const APPS: usize = 200;
/// Groups bound globally; each space and each app has one. Rules of each group and direction: 20 for each workload in both, 10,000 in all.
const GLOBAL_GROUPS: usize = 2;
const RULES_PER_GROUP: usize = 5;
/// The sender and the receiver, in the middle of any list.
const FROM: usize = 250;
const TO: usize = 251;
const PORT: u16 = 9000;

const ROUNDS: usize = 25;
const ROUND: Duration = Duration::from_millis(150);

fn interface(workload: usize) -> String {
    format!("gcw{workload}")
}

fn address(workload: usize) -> std::net::Ipv4Addr {
    match workload {
        FROM => SENDER,
        TO => RECEIVER,
        other => std::net::Ipv4Addr::from_bits(0x0a41_0000 + other as u32),
    }
}

fn space(workload: usize) -> usize {
    workload % SPACES
}

fn app(workload: usize) -> usize {
    workload % APPS
}

/// The rules of a group, egress and ingress by turns. The last of an app's group is what the measured packets are allowed by, so that
/// everything else is tried before.
fn lines(group: usize, is_app: bool) -> Vec<String> {
    let line = |number: usize| {
        let port = if is_app && number >= RULES_PER_GROUP - 2 {
            PORT
        } else {
            1000 + ((group * RULES_PER_GROUP + number) % 6000) as u16
        };
        match number % 2 {
            0 => format!("egress udp {port} to 10.64.0.0/15"),
            _ => format!("ingress udp {port} from 10.64.0.0/15"),
        }
    };
    (0..RULES_PER_GROUP).map(line).collect()
}

/// Where a group is bound, and its rules.
fn groups() -> Vec<(Scope, Vec<String>)> {
    let mut groups = Vec::new();
    let mut add = |scope: Scope, is_app: bool| {
        let number = groups.len();
        groups.push((scope, lines(number, is_app)));
    };
    (0..GLOBAL_GROUPS).for_each(|_| add(Scope::Global, false));
    (0..SPACES).filter_map(|n| format!("s{n}").parse().ok()).for_each(|id| add(Scope::Space(id), false));
    (0..APPS).filter_map(|n| format!("a{n}").parse().ok()).for_each(|id| add(Scope::App(id), true));
    groups
}

fn documents() -> Result<Replica, Failure> {
    let mut documents = Replica::new();
    let mut bound: BTreeMap<Topic, BTreeMap<GroupId, Phases>> = BTreeMap::new();
    for (number, (scope, lines)) in groups().into_iter().enumerate() {
        let id = GroupId::new(&format!("g{number}"))?;
        let rules = lines.iter().map(|line| parse_rule(line).map_err(|error| format!("{line}: {error:?}")));
        let rules: Vec<_> = rules.collect::<Result<_, _>>()?;
        let rules = Rules { stateful: true, rules: rules.into_iter().map(|rule| (rule.key(), rule)).collect() };
        documents.insert(Topic::Rules(id.clone()), Document::new(Content::Rules(rules)));
        bound.entry(Topic::Scope(scope)).or_default().insert(id, Phases::BOTH);
    }
    documents.extend(bound.into_iter().map(|(topic, bound)| (topic, Document::new(Content::Scope(bound)))));
    let placed = (0..WORKLOADS).map(|number| -> Result<(WorkloadId, Placement), Failure> {
        let workload = WorkloadId::new(&format!("w{number}"))?;
        let placement = Placement {
            workload: workload.clone(),
            incarnation: 1,
            network: "n0".parse()?,
            addresses: Prefix::v4(address(number).to_bits(), 32).into_iter().collect(),
            space: Some(format!("s{}", space(number)).parse()?),
            app: Some(format!("a{}", app(number)).parse()?),
            phase: Phase::Running,
            enforced: Enforced::BOTH,
            groups: BTreeSet::new(),
        };
        Ok((workload, placement))
    });
    let placed: BTreeMap<_, _> = placed.collect::<Result<_, _>>()?;
    documents.insert(Topic::Host(HostId::new("h0")?), Document::new(Content::Host(placed)));
    Ok(documents)
}

/// Puts our table in force and says how many rules it has. `judged`: no flow takes the fast path.
fn enforce(judged: bool) -> Result<usize, Failure> {
    let mut attachments = Attachments::new();
    for number in 0..WORKLOADS {
        let attachment = Attachment::Interface(Interface::new(&interface(number))?);
        attachments.insert(WorkloadId::new(&format!("w{number}"))?, Attached { attachment, audit: false });
    }
    let settings = Settings { claims: vec![Claim::new("gcw*")?], ..Settings::default() };
    // Not owned: it stays when this thread goes on to something else.
    let kernel = Kernel::open("gc", false)?;
    let mut keeper = Keeper::start(HostId::new("h0")?, settings, attachments, Stamp::FIRST, documents()?, kernel)?;
    keeper.settle()?;
    let table = keeper.engine().actual();
    let rules = table.chains.values().map(|chain| chain.rules.len()).sum();
    if judged {
        // The fast path asks for a stamp that no flow carries.
        let mask = keeper.engine().settings().mark.mask();
        let never = Statement::Match { fields: vec![Field::CtMark], test: Test::Masked { mask, is: mask } };
        let mut ops = Vec::new();
        for side in [Direction::Egress, Direction::Ingress] {
            let chain = names::forward(side);
            let judge = match side {
                Direction::Egress => names::unstamped_out(),
                Direction::Ingress => names::sided("j", side),
            };
            let judge = Statement::goto(&judge);
            let rules = [vec![never.clone(), Statement::Verdict(Verdict::Accept)], vec![judge]];
            ops.push(Op::FlushChain { chain: chain.clone() });
            ops.extend(rules.into_iter().enumerate().map(|(at, rule)| Op::AddRule { chain: chain.clone(), at, rule }));
        }
        keeper.enforcer().commit(&Transaction { anew: false, ops })?;
    }
    Ok(rules)
}

fn accept_all() -> Result<(), Failure> {
    command("nft", "add table inet everything")?;
    command("nft", "add chain inet everything forward { type filter hook forward priority 0 ; policy accept ; }")?;
    command("nft", "add rule inet everything forward ct state established,related accept")
}

/// The same policy, a line for each workload and rule: egress of the sender, then ingress of the receiver.
fn iptables(judged: bool) -> Result<usize, Failure> {
    let mut script = String::from("*filter\n:FORWARD DROP [0:0]\n:INGRESS - [0:0]\n");
    let mut rules = 0;
    if !judged {
        script.push_str("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n");
        rules += 1;
    }
    let groups = groups();
    for workload in 0..WORKLOADS {
        let own = groups.iter().filter(|(scope, _)| match scope {
            Scope::Global => true,
            Scope::Space(id) => id.as_str() == format!("s{}", space(workload)),
            Scope::App(id) => id.as_str() == format!("a{}", app(workload)),
        });
        for line in own.flat_map(|(_, lines)| lines) {
            let words: Vec<&str> = line.split(' ').collect();
            let [direction, protocol, port, _, remote] = words[..] else { return Err(format!("not understood: {line}").into()) };
            let name = interface(workload);
            let written = match direction {
                "egress" => writeln!(script, "-A FORWARD -i {name} -p {protocol} --dport {port} -d {remote} -j INGRESS"),
                _ => writeln!(script, "-A INGRESS -o {name} -p {protocol} --dport {port} -s {remote} -j ACCEPT"),
            };
            written?;
            rules += 1;
        }
    }
    script.push_str("-A INGRESS -j DROP\nCOMMIT\n");
    // The older kind is the faster one, where the kernel still has it.
    let mut missing = String::new();
    for program in ["iptables-legacy-restore", "iptables-restore"] {
        let child = Command::new(program).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                missing = format!("{program}: {error}: install the Debian package iptables");
                continue;
            }
        };
        child.stdin.take().ok_or("no stdin")?.write_all(script.as_bytes())?;
        let output = child.wait_with_output()?;
        if output.status.success() {
            return Ok(rules + 1);
        }
        missing = format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Err(missing.into())
}

pub fn run() -> Result<Figures, Failure> {
    let lane = |name| Lane::new(name, &interface(FROM), &interface(TO), PORT);
    let (none, ours, judged) = (lane("none")?, lane("ours")?, lane("ours, judged")?);
    let (listed, listed_judged) = (lane("iptables")?, lane("iptables, judged")?);
    none.at_router(accept_all)?;
    let rules_in_kernel = ours.at_router(|| enforce(false))?;
    judged.at_router(|| enforce(true))?;
    let iptables_rules = listed.at_router(|| iptables(false))?;
    listed_judged.at_router(|| iptables(true))?;
    for lane in [&none, &ours, &listed] {
        lane.establish()?;
    }
    let mut lanes = [none, ours, judged, listed, listed_judged];
    lanes.iter().try_for_each(Lane::sink)?;
    // The first is for connections and caches.
    lanes.iter_mut().try_for_each(|lane| lane.round(ROUND / 10).map(|_| ()))?;
    let mut rounds: Vec<[f64; 5]> = Vec::new();
    for _ in 0..ROUNDS {
        let mut round = [0.0; 5];
        for (lane, rate) in lanes.iter_mut().zip(&mut round) {
            *rate = lane.round(ROUND)?;
        }
        rounds.push(round);
    }
    lanes.into_iter().for_each(Lane::end);
    let rate = |lane: usize| median(rounds.iter().map(|round| round[lane]));
    let ratio = |lane: usize| median(rounds.iter().map(|round| round[lane] / round[0]));
    Ok(Figures {
        none_pps: rate(0),
        ours_pps: rate(1),
        ratio: ratio(1),
        judged_ratio: ratio(2),
        iptables_ratio: ratio(3),
        iptables_judged_ratio: ratio(4),
        rules_in_kernel,
        iptables_rules,
    })
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}
