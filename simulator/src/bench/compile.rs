//! `bench compile`: a large catalogue from scratch, and single changes in it.
//!
//! The shape is that of a large published benchmark: spaces of a few workloads, three groups per space that select inside it
//! and name each other. The same is measured at a tenth of the size: a change must cost what it touches, not what exists.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use anyhow::Context;
use groupcast_policy::compiler::Compiler;
use groupcast_policy::doc::Phases;
use groupcast_policy::ids::{GroupId, HostId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::model::{Binding, Event, Group, Labels, Selector, Target, Workload, parse_selector};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::Scope;
use hdrhistogram::Histogram;

use super::{Report, say};
use crate::random::Random;

const SPACES: usize = 25_000;
const WORKLOADS_PER_SPACE: usize = 4;
const GROUPS_PER_SPACE: usize = 3;
/// About a hundred workloads on each.
const WORKLOADS_PER_HOST: usize = 100;
/// The median of so many builds from scratch is reported.
const FULL_RUNS: usize = 3;
/// How often each kind of change is measured.
const CHANGES: usize = 20_000;

pub fn run() -> anyhow::Result<Report> {
    say(format_args!("{SPACES} spaces from scratch, then {CHANGES} changes of each kind"));
    let large = measure(SPACES)?;
    say(format_args!("the same with {} spaces", SPACES / 10));
    let small = measure(SPACES / 10)?;
    Ok(Report::new("compile")
        .with("spaces", SPACES)
        .with("workloads", SPACES * WORKLOADS_PER_SPACE)
        .with("groups", SPACES * GROUPS_PER_SPACE)
        .with_goal("full_ms", large.full_ms, 1_500.0)
        .with_goal("rss_mb", large.rss_mb, 500.0)
        .with_goal("member_change_us_p50", large.member.p50(), 20.0)
        .with("member_change_us_p99", large.member.p99())
        .with("rule_change_us_p50", large.rule.p50())
        .with("label_change_us_p50", large.label.p50())
        .with("tenth_full_ms", small.full_ms)
        .with("tenth_member_change_us_p50", small.member.p50())
        .with("tenth_member_change_us_p99", small.member.p99())
        .with("tenth_rule_change_us_p50", small.rule.p50())
        .with("tenth_label_change_us_p50", small.label.p50()))
}

struct Times(Histogram<u64>);

impl Times {
    /// Times the application of one event each; the change must touch something.
    fn of(compiler: &mut Compiler, events: impl Iterator<Item = Event>) -> anyhow::Result<Self> {
        let mut nanos = Histogram::new(3)?;
        for event in events {
            let start = Instant::now();
            let change = compiler.apply([&event]);
            nanos.record(start.elapsed().as_nanos() as u64)?;
            anyhow::ensure!(!change.edits.is_empty(), "a change that changes nothing was measured");
        }
        Ok(Self(nanos))
    }

    fn p50(&self) -> f64 {
        self.0.value_at_quantile(0.5) as f64 / 1_000.0
    }

    fn p99(&self) -> f64 {
        self.0.value_at_quantile(0.99) as f64 / 1_000.0
    }
}

struct Measured {
    full_ms: f64,
    rss_mb: f64,
    member: Times,
    rule: Times,
    label: Times,
}

fn measure(spaces: usize) -> anyhow::Result<Measured> {
    let shape = Shape::new(spaces)?;
    let events = shape.events()?;
    let mut compiler = Compiler::new();
    let mut full = Vec::new();
    for _ in 0..FULL_RUNS {
        compiler = Compiler::new();
        let start = Instant::now();
        let change = black_box(compiler.apply(&events));
        full.push(start.elapsed().as_secs_f64() * 1_000.0);
        let (edits, spans) = (change.edits.len(), change.spans.len());
        say(format_args!("{edits} edits and {spans} spans in {:.0} ms", full[full.len() - 1]));
    }
    full.sort_by(f64::total_cmp);
    let full_ms = full[full.len() / 2];
    let rss_mb = peak_rss_mb()?;
    drop(events);

    let mut random = Random::new(spaces as u64);
    // One joins, the next change takes it away again.
    let member: anyhow::Result<Vec<Event>> = (0..CHANGES)
        .map(|i| {
            let at = (i / 2).wrapping_mul(7919) % spaces;
            let workload = shape.workload(at, WORKLOADS_PER_SPACE, 0)?;
            Ok(match i % 2 {
                0 => Event::workload(workload),
                _ => Event::WorkloadRemoved { id: workload.id, network: workload.network },
            })
        })
        .collect();
    let member = Times::of(&mut compiler, member?.into_iter())?;
    let mut rule = Vec::new();
    for i in 0..CHANGES {
        let mut group = shape.group(i.wrapping_mul(7919) % spaces, random.next() as usize % GROUPS_PER_SPACE)?;
        let port = 10_000 + i;
        group.rules.push(parse_rule(&format!("ingress udp {port} from any")).map_err(|e| anyhow::anyhow!("{e:?}"))?.into());
        rule.push(Event::group(group));
    }
    let rule = Times::of(&mut compiler, rule.into_iter())?;
    let mut label = Vec::new();
    for i in 0..CHANGES {
        // The space's first workload changes its role each time round, so that it leaves a group and joins another.
        let round = i / spaces.min(CHANGES) + 1;
        label.push(Event::workload(shape.workload(i.wrapping_mul(7919) % spaces, 0, round)?));
    }
    let label = Times::of(&mut compiler, label.into_iter())?;
    Ok(Measured { full_ms, rss_mb, member, rule, label })
}

/// The most memory this process ever had, input and output included.
fn peak_rss_mb() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("/proc/self/status has no VmHWM")?;
    let kib: f64 = line.split_whitespace().nth(1).context("VmHWM has no number")?.parse()?;
    Ok(kib / 1024.0)
}

/// Makes the catalogue and the registry. Ids of things are shared, as they are where they come from one parser.
struct Shape {
    spaces: Vec<SpaceId>,
    hosts: Vec<HostId>,
    groups: Vec<GroupId>,
    roles: Vec<Labels>,
    network: NetworkId,
}

impl Shape {
    fn new(spaces: usize) -> anyhow::Result<Self> {
        let hosts = (spaces * WORKLOADS_PER_SPACE).div_ceil(WORKLOADS_PER_HOST);
        let role = |i: usize| Ok([(Labels::key("role")?, Labels::value(&format!("r{i}"))?)].into_iter().collect());
        Ok(Self {
            spaces: (0..spaces).map(|i| SpaceId::new(&format!("space-{i:08}"))).collect::<Result<_, _>>()?,
            hosts: (0..hosts).map(|i| HostId::new(&format!("host-{i:05}"))).collect::<Result<_, _>>()?,
            groups: (0..spaces * GROUPS_PER_SPACE).map(|i| GroupId::new(&format!("group-{i:08}"))).collect::<Result<_, _>>()?,
            roles: (0..GROUPS_PER_SPACE).map(role).collect::<anyhow::Result<_>>()?,
            network: NetworkId::new("overlay")?,
        })
    }

    fn events(&self) -> anyhow::Result<Vec<Event>> {
        let mut events = Vec::new();
        for space in 0..self.spaces.len() {
            for group in 0..GROUPS_PER_SPACE {
                events.push(Event::group(self.group(space, group)?));
            }
            for workload in 0..WORKLOADS_PER_SPACE {
                events.push(Event::workload(self.workload(space, workload, 0)?));
            }
        }
        Ok(events)
    }

    /// The group of one role in a space: it lets the next role in, and itself out to it.
    fn group(&self, space: usize, role: usize) -> anyhow::Result<Group> {
        let next = &self.groups[space * GROUPS_PER_SPACE + (role + 1) % GROUPS_PER_SPACE];
        let mut group = Group::new(self.groups[space * GROUPS_PER_SPACE + role].clone());
        let requirements = parse_selector(&format!("role=r{role}")).map_err(|e| anyhow::anyhow!("{e:?}"))?;
        let within = Scope::Space(self.spaces[space].clone());
        group.bindings = vec![Binding { target: Target::Selector(Selector::new(within, requirements)), phases: Phases::BOTH }];
        for line in [format!("ingress tcp 8080 from group:{next}"), format!("egress tcp 8080 to group:{next}")] {
            group.rules.push(parse_rule(&line).map_err(|e| anyhow::anyhow!("{e:?}"))?.into());
        }
        Ok(group)
    }

    /// The n-th workload of a space; its role moves on with `round`.
    fn workload(&self, space: usize, n: usize, round: usize) -> anyhow::Result<Workload> {
        let number = space * (WORKLOADS_PER_SPACE + 1) + n;
        let host = number.wrapping_mul(2_654_435_761) % self.hosts.len();
        let id = WorkloadId::new(&format!("workload-{number:08}"))?;
        let mut workload = Workload::new(id, self.hosts[host].clone(), self.network.clone());
        let address = IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + number as u32));
        workload.addresses = [Prefix::host(address)].into();
        workload.labels = self.roles[(n + round) % GROUPS_PER_SPACE].clone();
        workload.space = Some(self.spaces[space].clone());
        Ok(workload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_has_its_size_and_its_groups_have_members() {
        let shape = Shape::new(10).unwrap();
        let mut compiler = Compiler::new();
        let change = compiler.apply(&shape.events().unwrap());
        assert_eq!(change.edits.iter().filter(|(topic, _)| topic.to_string().starts_with("members.")).count(), 30);
        let topic = groupcast_policy::topic::Topic::Members(shape.groups[0].clone());
        let document = compiler.document(&topic);
        assert_eq!(document.members().map(|members| members.len()), Some(2), "workloads 0 and 3 of the space have the role");
        let again = Event::group(shape.group(0, 0).unwrap());
        assert!(compiler.apply([&again]).is_empty());
    }
}
