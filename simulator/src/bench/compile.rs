//! `bench compile`: a large catalogue from scratch, and single changes in it.
//!
//! The shape is that of a large published benchmark: spaces of a few workloads, three groups per space that select inside it
//! and name each other. The same is measured at a tenth of the size: a change must cost what it touches, not what exists.
//!
//! Changes are timed twice: one after the other, as under load (`member_change_us_p50`), and each after the processor's caches were
//! filled with something else, as when changes come now and then (`cold_…`). Only the second compares sizes: one after the other,
//! a tenth of the catalogue stays in the cache and the whole does not, which says something of the cache.
//!
//! Counted by callgrind, a change executes as many instructions at both sizes, within two in a hundred. What growth there is in time
//! is memory: with a last-level cache of 32 MiB simulated, the large catalogue missed it two to three times as often as the tenth.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::Context;
use groupcast_policy::compiler::{Change, Compiler};
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
/// What rules let through before they are changed.
const PORT: usize = 8_080;
const WORKLOADS_PER_SPACE: usize = 4;
const GROUPS_PER_SPACE: usize = 3;
/// About a hundred workloads on each.
const WORKLOADS_PER_HOST: usize = 100;
/// The median of so many builds from scratch is reported.
const FULL_RUNS: usize = 3;
/// Both sizes take turns, so that a disturbance of the machine meets both; the median of the rounds is reported.
const ROUNDS: usize = 21;
/// Rounds before, not counted: together they pick as many spaces as the large catalogue has.
const WARM_UP_ROUNDS: usize = 10;
/// Changes of each kind in a round, members twice as many: each in another space, and the spaces drawn from the whole catalogue.
const PICKS: usize = SPACES / 10;
/// What "the same at both sizes" means on a machine that is not alone.
const GROWTH_MAX: f64 = 1.15;
/// Changes of members timed with cold caches, in each size; half of them come, half go.
const COLD_PICKS: usize = 400;
/// Read before each of those: more than the caches of today's processors hold.
const COLD_BYTES: usize = 128 << 20;

pub fn run() -> anyhow::Result<Report> {
    say(format_args!("{SPACES} spaces from scratch"));
    let mut large = Catalogue::build(SPACES, full_size)?;
    let rss_mb = peak_rss_mb()?;
    say(format_args!("the same with {} spaces", SPACES / 10));
    let mut small = Catalogue::build(SPACES / 10, tenth_of_size)?;
    say(format_args!("{ROUNDS} rounds of {PICKS} changes of each kind, after {WARM_UP_ROUNDS} to warm up"));
    for round in 0..WARM_UP_ROUNDS + ROUNDS {
        if round == WARM_UP_ROUNDS {
            large.forget_times();
            small.forget_times();
        }
        // Neither always runs in the other's wake.
        if round % 2 == 0 {
            large.round()?;
            small.round()?;
        } else {
            small.round()?;
            large.round()?;
        }
    }
    say(format_args!("{COLD_PICKS} members with cold caches"));
    let mut cold = Cold::new();
    for _ in 0..COLD_PICKS / COLD_ROUND {
        large.cold_round(&mut cold)?;
        small.cold_round(&mut cold)?;
    }
    Ok(Report::new("compile")
        .with("spaces", SPACES)
        .with("workloads", SPACES * WORKLOADS_PER_SPACE)
        .with("groups", SPACES * GROUPS_PER_SPACE)
        .with_goal("full_ms", large.full_ms, 1_500.0)
        .with_goal("rss_mb", rss_mb, 500.0)
        .with_goal("member_change_us_p50", large.member.p50(), 20.0)
        .with("member_change_us_p99", large.member.p99())
        .with("rule_change_us_p50", large.rule.p50())
        .with("label_change_us_p50", large.label.p50())
        .with("tenth_full_ms", small.full_ms)
        .with("tenth_member_change_us_p50", small.member.p50())
        .with("tenth_member_change_us_p99", small.member.p99())
        .with("tenth_rule_change_us_p50", small.rule.p50())
        .with("tenth_label_change_us_p50", small.label.p50())
        .with("cold_member_change_us_p50", large.cold_member.p50())
        .with("tenth_cold_member_change_us_p50", small.cold_member.p50())
        .with("growth_full", large.full_ms / small.full_ms)
        .with_goal("growth_cold_member_change_p50", large.cold_member.growth(&small.cold_member), GROWTH_MAX)
        .with_goal("growth_member_change_p50", large.member.growth(&small.member), GROWTH_MAX)
        .with("growth_rule_change_p50", large.rule.growth(&small.rule))
        .with("growth_label_change_p50", large.label.growth(&small.label)))
}

/// The times of one kind of change.
struct Times {
    all: Histogram<u64>,
    round: Histogram<u64>,
    /// Of each round, in µs.
    medians: Vec<f64>,
}

impl Times {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { all: Histogram::new(3)?, round: Histogram::new(3)?, medians: Vec::new() })
    }

    fn record(&mut self, time: Duration) -> anyhow::Result<()> {
        let nanos = time.as_nanos() as u64;
        self.round.record(nanos)?;
        Ok(self.all.record(nanos)?)
    }

    fn end_round(&mut self) {
        self.medians.push(micros(&self.round, 0.5));
        self.round.reset();
    }

    fn p50(&self) -> f64 {
        median(self.medians.clone())
    }

    fn p99(&self) -> f64 {
        micros(&self.all, 0.99)
    }

    /// Round against round, because both sizes had the same machine in each.
    fn growth(&self, smaller: &Self) -> f64 {
        median(self.medians.iter().zip(&smaller.medians).map(|(large, small)| large / small).collect())
    }
}

fn micros(nanos: &Histogram<u64>, quantile: f64) -> f64 {
    nanos.value_at_quantile(quantile) as f64 / 1_000.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What is timed. One function per size, never inlined, so that a profiler tells them apart: the instructions of a change, counted
/// by `valgrind --tool=callgrind --toggle-collect='*full_size*'`, have no noise and must be as many as those of `tenth_of_size`.
type Timed = fn(&mut Compiler, &Event) -> Change;

#[inline(never)]
fn full_size(compiler: &mut Compiler, event: &Event) -> Change {
    // Different bodies, or the linker would make one function of both.
    black_box(SPACES);
    compiler.apply([event])
}

#[inline(never)]
fn tenth_of_size(compiler: &mut Compiler, event: &Event) -> Change {
    black_box(SPACES / 10);
    compiler.apply([event])
}

/// One catalogue, compiled, and what changes in it cost.
struct Catalogue {
    /// Equal to the one compiled, but none of its memory: a change that arrives has been decoded just now, and finding what it
    /// names is part of its cost.
    shape: Shape,
    compiler: Compiler,
    timed: Timed,
    full_ms: f64,
    random: Random,
    /// Spaces in a random order; each round shuffles as many to the front as it picks.
    spaces: Vec<usize>,
    /// How often the first workload of each space has changed its role.
    roles: Vec<usize>,
    rounds: usize,
    member: Times,
    rule: Times,
    label: Times,
    cold_member: Times,
}

/// Members that come and go in one round with cold caches.
const COLD_ROUND: usize = 20;

/// Fills the processor's caches with something else.
struct Cold(Vec<u64>);

impl Cold {
    fn new() -> Self {
        Self((0..(COLD_BYTES / size_of::<u64>()) as u64).collect())
    }

    fn sweep(&mut self) {
        // Written, not only read: lines that are shared with nobody are what a change leaves in the cache too.
        self.0.iter_mut().for_each(|word| *word = word.wrapping_add(1));
        black_box(&self.0);
    }
}

impl Catalogue {
    fn cold_round(&mut self, cold: &mut Cold) -> anyhow::Result<()> {
        self.shuffle(COLD_ROUND / 2);
        for joins in [true, false] {
            for pick in 0..COLD_ROUND / 2 {
                let workload = self.shape.workload(self.spaces[pick], WORKLOADS_PER_SPACE, 0)?;
                let event = match joins {
                    true => Event::workload(workload),
                    false => Event::WorkloadRemoved { id: workload.id, network: workload.network },
                };
                cold.sweep();
                self.cold_member.record(change(self.timed, &mut self.compiler, event)?)?;
            }
        }
        self.cold_member.end_round();
        Ok(())
    }

    fn build(spaces: usize, timed: Timed) -> anyhow::Result<Self> {
        let events = Shape::new(spaces)?.events()?;
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
        Ok(Self {
            shape: Shape::new(spaces)?,
            compiler,
            timed,
            full_ms: median(full),
            random: Random::new(spaces as u64),
            spaces: (0..spaces).collect(),
            roles: vec![0; spaces],
            rounds: 0,
            member: Times::new()?,
            rule: Times::new()?,
            label: Times::new()?,
            cold_member: Times::new()?,
        })
    }

    fn forget_times(&mut self) {
        for times in [&mut self.member, &mut self.rule, &mut self.label] {
            times.all.reset();
            times.medians.clear();
        }
    }

    fn round(&mut self) -> anyhow::Result<()> {
        self.rounds += 1;
        self.shuffle(PICKS);
        for pick in 0..PICKS {
            let joins = Event::workload(self.shape.workload(self.spaces[pick], WORKLOADS_PER_SPACE, 0)?);
            self.member.record(change(self.timed, &mut self.compiler, joins)?)?;
        }
        // In another order: a member that has just come would be warm in every cache.
        self.shuffle_first(PICKS);
        for pick in 0..PICKS {
            let Workload { id, network, .. } = self.shape.workload(self.spaces[pick], WORKLOADS_PER_SPACE, 0)?;
            self.member.record(change(self.timed, &mut self.compiler, Event::WorkloadRemoved { id, network })?)?;
        }
        self.member.end_round();

        self.shuffle(PICKS);
        for pick in 0..PICKS {
            let role = self.random.next() as usize % GROUPS_PER_SPACE;
            // Always one rule goes and one comes, whether or not the group was picked before.
            let event = Event::group(self.shape.group(self.spaces[pick], role, PORT + self.rounds)?);
            self.rule.record(change(self.timed, &mut self.compiler, event)?)?;
        }
        self.rule.end_round();

        self.shuffle(PICKS);
        for pick in 0..PICKS {
            // The space's first workload takes the next role, so that it leaves a group and joins another.
            let space = self.spaces[pick];
            self.roles[space] += 1;
            let event = Event::workload(self.shape.workload(space, 0, self.roles[space])?);
            self.label.record(change(self.timed, &mut self.compiler, event)?)?;
        }
        self.label.end_round();
        Ok(())
    }

    /// Draws so many spaces from all.
    fn shuffle(&mut self, picks: usize) {
        for at in 0..picks {
            let other = at + self.random.next() as usize % (self.spaces.len() - at);
            self.spaces.swap(at, other);
        }
    }

    /// Puts those drawn in another order.
    fn shuffle_first(&mut self, picks: usize) {
        for at in 0..picks {
            let other = at + self.random.next() as usize % (picks - at);
            self.spaces.swap(at, other);
        }
    }
}

/// Times the application of one event; the change must touch something.
fn change(timed: Timed, compiler: &mut Compiler, event: Event) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let change = timed(compiler, &event);
    let time = start.elapsed();
    anyhow::ensure!(!change.edits.is_empty(), "a change that changes nothing was measured");
    Ok(time)
}

/// The most memory this process ever had, input and output included.
pub(super) fn peak_rss_mb() -> anyhow::Result<f64> {
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
                events.push(Event::group(self.group(space, group, PORT)?));
            }
            for workload in 0..WORKLOADS_PER_SPACE {
                events.push(Event::workload(self.workload(space, workload, 0)?));
            }
        }
        Ok(events)
    }

    /// The group of one role in a space: it lets the next role in by one port, and itself out to it.
    fn group(&self, space: usize, role: usize, port: usize) -> anyhow::Result<Group> {
        let next = &self.groups[space * GROUPS_PER_SPACE + (role + 1) % GROUPS_PER_SPACE];
        let mut group = Group::new(self.groups[space * GROUPS_PER_SPACE + role].clone());
        let requirements = parse_selector(&format!("role=r{role}")).map_err(|e| anyhow::anyhow!("{e:?}"))?;
        let within = Scope::Space(self.spaces[space].clone());
        group.bindings = vec![Binding { target: Target::Selector(Selector::new(within, requirements)), phases: Phases::BOTH }];
        for line in [format!("ingress tcp {port} from group:{next}"), format!("egress tcp {PORT} to group:{next}")] {
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
        let again = Event::group(shape.group(0, 0, PORT).unwrap());
        assert!(compiler.apply([&again]).is_empty());
    }
}
