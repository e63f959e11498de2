//! Who uses which groups, drawn by the seed; and the same as documents.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use anyhow::Context;
use groupcast_bus_config::lab;
use groupcast_policy::doc::{Phases, RuleKey};
use groupcast_policy::ids::{GroupId, HostId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::model::{Binding, Group, GroupRule, Target, Workload};
use groupcast_policy::net::Prefix;
use groupcast_policy::rule::Rule;
use groupcast_policy::text::parse_rule;

use super::scenario::{Scenario, Topology};
use crate::random::Random;

/// Addresses of workloads, of other members, and of marks: which change of a group it is that a host has.
const WORKLOADS: u32 = 0x0a00_0000;
const MEMBERS: u32 = 0x6440_0000;
pub const MARKS: u32 = 0x0b00_0000;
/// As many marks as there are addresses for them.
pub const MARKS_MAX: u32 = 0x00ff_ffff;
/// What workloads of one group reach of each other.
pub const OPEN_PORT: u16 = 443;

#[derive(Debug)]
pub struct World {
    pub hosts: Vec<HostId>,
    pub groups: Vec<GroupId>,
    /// The first so many are everybody's.
    pub of_all: usize,
    /// The last so many hosts are real.
    pub agents: usize,
    /// By host: the groups it uses beside those, sorted.
    pub uses: Vec<Vec<u32>>,
    /// By host: the groups whose members it needs, sorted: those it uses and those that are named there.
    pub follows: Vec<Vec<u32>>,
    /// By group: the one that it names beside itself.
    names: Vec<Option<u32>>,
    /// By group: how many simulated hosts need its members.
    spans: Vec<u32>,
    network: NetworkId,
    topology: Topology,
}

/// Whether a version of a group has a rule that others lack is told by its mark.
pub fn has_rule(mark: u32) -> bool {
    mark % 2 == 1
}

fn rule_of(mark: u32) -> anyhow::Result<Rule> {
    let text = format!("egress udp {} to any", 1_024 + mark % 60_000);
    parse_rule(&text).map_err(|error| anyhow::anyhow!("{text}: {error:?}"))
}

/// Of the rule that this version has and no other.
pub fn rule_key_of(mark: u32) -> Option<RuleKey> {
    rule_of(mark).ok().map(|rule| rule.key())
}

impl World {
    pub fn draw(scenario: &Scenario, seed: u64) -> anyhow::Result<Self> {
        let topology = scenario.topology.clone();
        let hosts = scenario.hosts as usize;
        let of_all = topology.groups_of_all as usize;
        let some = (u64::from(scenario.hosts) * u64::from(topology.groups_per_host) / u64::from(topology.span_mean)) as usize;
        let of_spaces = (topology.spaces * topology.groups_per_space) as usize;
        let count = of_all + some + of_spaces;
        let mut random = Random::new(seed);
        let mut uses: Vec<Vec<u32>> = vec![Vec::new(); hosts];
        // A pool of places, as many as hosts have room for, dealt out to groups of drawn sizes.
        let mut places: Vec<u32> =
            (0..scenario.hosts).flat_map(|host| std::iter::repeat_n(host, topology.groups_per_host as usize)).collect();
        for at in (1..places.len()).rev() {
            places.swap(at, random.next() as usize % (at + 1));
        }
        let mut dealt = places.into_iter().peekable();
        for group in of_all..of_all + some {
            let size = span(&topology, &mut random);
            let mut own: Vec<u32> = dealt.by_ref().take(size).collect();
            own.sort_unstable();
            own.dedup();
            own.iter().for_each(|host| uses[*host as usize].push(group as u32));
        }
        // A host is in one space; its groups come after all others.
        for group in 0..of_spaces {
            let space = group as u32 / topology.groups_per_space.max(1);
            let own: Vec<u32> = (0..scenario.hosts).filter(|host| host % topology.spaces.max(1) == space).collect();
            own.iter().for_each(|host| uses[*host as usize].push((of_all + some + group) as u32));
        }
        let names: Vec<Option<u32>> = (0..count)
            .map(|group| {
                let names_one = group >= of_all && some > 1 && random.next() % 100 < u64::from(topology.references_percent);
                let other = (of_all + random.next() as usize % some.max(1)) as u32;
                (names_one && other as usize != group).then_some(other)
            })
            .collect();
        let follows: Vec<Vec<u32>> = uses
            .iter()
            .map(|own| {
                let named = own.iter().filter_map(|group| names[*group as usize]);
                own.iter().copied().chain(named).collect::<BTreeSet<u32>>().into_iter().collect()
            })
            .collect();
        let mut spans = vec![0; count];
        let simulated = scenario.hosts - scenario.agents;
        spans[..of_all].fill(simulated);
        follows.iter().take(simulated as usize).flatten().for_each(|group| spans[*group as usize] += 1);
        Ok(Self {
            hosts: (0..hosts).map(|n| HostId::new(&format!("host-{n:05}"))).collect::<Result<_, _>>()?,
            groups: (0..count)
                .map(|n| GroupId::new(&format!("{n:08x}-3f0c-4a53-9d0e-6f2c51b7a9d4")))
                .collect::<Result<_, _>>()?,
            of_all,
            agents: scenario.agents as usize,
            uses,
            follows,
            names,
            spans,
            network: NetworkId::new("overlay")?,
            topology,
        })
    }

    /// How many simulated hosts a change of the group's members reaches.
    pub fn span(&self, group: usize) -> usize {
        self.spans[group] as usize
    }

    pub fn index(&self, id: &str) -> Option<usize> {
        let index = usize::from_str_radix(id.get(..8)?, 16).ok()?;
        (self.groups.get(index)?.as_str() == id).then_some(index)
    }

    fn of_some(&self) -> usize {
        self.groups.len() - self.of_all - (self.topology.spaces * self.topology.groups_per_space) as usize
    }

    /// The group that a host's workload is given and deprived of while a scenario runs, if there is one it does not need otherwise.
    pub fn extra(&self, host: usize) -> Option<usize> {
        let some = self.of_some();
        (0..some.min(64)).map(|step| self.of_all + (host * 7 + step * 31 + 3) % some).find(|group| {
            let needed = |group: u32| self.follows[host].binary_search(&group).is_ok();
            !needed(*group as u32) && self.names[*group].is_none_or(|named| !needed(named))
        })
    }

    /// Which of all the groups whose members a host may need this is: everybody's, its own, the extra one, and what that names.
    pub fn place(&self, host: usize, group: usize) -> Option<usize> {
        if group < self.of_all {
            return Some(group);
        }
        let own = &self.follows[host];
        if let Ok(at) = own.binary_search(&(group as u32)) {
            return Some(self.of_all + at);
        }
        let extra = self.extra(host)?;
        let after = self.of_all + own.len();
        if group == extra {
            return Some(after);
        }
        (self.names[extra] == Some(group as u32)).then_some(after + 1)
    }

    pub fn places(&self, host: usize) -> usize {
        self.of_all + self.follows[host].len() + 2
    }

    /// Rules of a group without the one that only some versions have.
    pub fn rules(&self, group: usize) -> usize {
        let egress = usize::from(self.agents > 0 && group < self.of_all);
        1 + self.topology.rules as usize + usize::from(self.names[group].is_some()) + egress
    }

    /// A group as the version with this mark.
    pub fn group(&self, group: usize, mark: u32) -> anyhow::Result<Arc<Group>> {
        let id = &self.groups[group];
        let mut document = Group::new(id.clone());
        let line = |text: String| parse_rule(&text).map(GroupRule::from).map_err(|error| anyhow::anyhow!("{text}: {error:?}"));
        document.rules.push(line(format!("ingress tcp {OPEN_PORT} from group:{id}"))?);
        if self.agents > 0 && group < self.of_all {
            document.rules.push(line(format!("egress tcp {OPEN_PORT} to group:{id}"))?);
        }
        if let Some(named) = self.names[group] {
            document.rules.push(line(format!("ingress tcp 8443 from group:{}", self.groups[named as usize]))?);
        }
        for number in 0..self.topology.rules {
            let port = 1_024 + (group as u32 * 31 + number * 7) % 40_000;
            let net = Ipv4Addr::from_bits(0xac10_0000 + ((group as u32 * 13 + number) % 4_096) * 256);
            document.rules.push(line(format!("egress tcp {port} to {net}/24"))?);
        }
        if has_rule(mark) {
            document.rules.push(rule_of(mark)?.into());
        }
        for number in 0..self.topology.members {
            let address = MEMBERS + (group as u32).wrapping_mul(self.topology.members).wrapping_add(number) % 0x003f_ffff;
            document.members.insert(Prefix::v4(address, 32).context("an address")?);
        }
        document.members.insert(Prefix::v4(MARKS + mark, 32).context("an address")?);
        let of_space = group.checked_sub(self.of_all + self.of_some());
        if let Some(number) = of_space {
            let space = space_id(number as u32 / self.topology.groups_per_space)?;
            document.bindings.push(Binding { target: Target::Space(space), phases: Phases::BOTH });
        }
        Ok(Arc::new(document))
    }

    pub fn workload_id(&self, host: usize) -> anyhow::Result<WorkloadId> {
        Ok(WorkloadId::new(&format!("workload-{host:05}"))?)
    }

    /// Real ones have the address that the lab gives them.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        match host.checked_sub(self.hosts.len() - self.agents) {
            Some(real) => lab::address(real + 1, 0),
            None => Ipv4Addr::from_bits(WORKLOADS + 2 + host as u32),
        }
    }

    pub fn workload(&self, host: usize, with_extra: bool) -> anyhow::Result<Workload> {
        let mut workload = Workload::new(self.workload_id(host)?, self.hosts[host].clone(), self.network.clone());
        workload.addresses = [Prefix::host(IpAddr::V4(self.address(host)))].into();
        let by_space = self.of_all + self.of_some();
        let own = (0..self.of_all as u32).chain(self.uses[host].iter().copied().filter(|group| (*group as usize) < by_space));
        let extra = with_extra.then(|| self.extra(host)).flatten().map(|group| group as u32);
        workload.groups = own.chain(extra).map(|group| self.groups[group as usize].clone()).collect();
        if self.topology.spaces > 0 {
            workload.space = Some(space_id(host as u32 % self.topology.spaces)?);
        }
        Ok(workload)
    }

    pub fn topics_per_host(&self) -> f64 {
        let used: usize = self.uses.iter().map(Vec::len).sum();
        let followed: usize = self.follows.iter().map(Vec::len).sum();
        let scopes = 2.0 + f64::from(u8::from(self.topology.spaces > 0));
        scopes + 2.0 * self.of_all as f64 + (used + followed) as f64 / self.hosts.len().max(1) as f64
    }
}

fn space_id(number: u32) -> anyhow::Result<SpaceId> {
    Ok(SpaceId::new(&format!("space-{number:05}"))?)
}

/// Of a geometric distribution with the mean, cut off at the largest: many small groups and a few large ones.
fn span(topology: &Topology, random: &mut Random) -> usize {
    let uniform = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
    let stop = 1.0 / f64::from(topology.span_mean);
    let drawn = if stop >= 1.0 { 1.0 } else { 1.0 + ((1.0 - uniform).ln() / (1.0 - stop).ln()).floor() };
    (drawn as usize).clamp(1, topology.span_max as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(hosts: u32, more: &str) -> Scenario {
        let text = format!(
            "name = 'x'\nabout = 'x'\nhosts = 1\n[topology]\ngroups_per_host = 10\nspan_mean = 1\nspan_max = 1\nmembers = 3\n\
             {more}[[phase]]\nname = 'a'\nduration = '1s'\n"
        );
        let mut scenario = Scenario::parse(&text, &[]).unwrap();
        scenario.hosts = hosts;
        (scenario.topology.span_mean, scenario.topology.span_max) = (10.min(hosts), 100.min(hosts));
        scenario
    }

    #[test]
    fn the_shape_is_what_was_asked_for_and_the_same_for_the_same_seed() {
        let world = World::draw(&scenario(1_000, ""), 7).unwrap();
        assert_eq!(world.groups.len(), 1_000);
        let spans: Vec<usize> = (0..world.groups.len()).map(|group| world.span(group)).collect();
        let mean = spans.iter().sum::<usize>() as f64 / spans.len() as f64;
        assert!((8.0..12.0).contains(&mean), "{mean}");
        assert!(spans.iter().max() <= Some(&100) && spans.iter().max() > Some(&40), "{:?}", spans.iter().max());
        assert!((16.0..24.0).contains(&world.topics_per_host()), "{}", world.topics_per_host());
        let again = World::draw(&scenario(1_000, ""), 7).unwrap();
        assert_eq!((world.follows, world.uses), (again.follows, again.uses));
    }

    #[test]
    fn one_host_alone_has_its_groups() {
        let world = World::draw(&scenario(1, ""), 1).unwrap();
        assert_eq!(world.workload(0, false).unwrap().groups.len(), world.uses[0].len());
        assert_eq!(world.extra(0), None);
    }

    /// What the checkers take for needed is what the policy needs, with references, spaces and the extra group.
    #[test]
    fn places_are_exactly_the_members_that_a_host_needs() {
        use groupcast_policy::compiler::Compiler;
        use groupcast_policy::doc::Document;
        use groupcast_policy::model::Event;
        use groupcast_policy::needs::needed;
        use groupcast_policy::topic::Topic;
        let more = "references_percent = 50\nspaces = 3\ngroups_per_space = 2\ngroups_of_all = 1\n";
        let world = World::draw(&scenario(30, more), 5).unwrap();
        for with_extra in [false, true] {
            let mut events: Vec<Event> =
                (0..world.groups.len()).map(|group| Event::group((*world.group(group, 3).unwrap()).clone())).collect();
            events.extend((0..30).map(|host| Event::workload(world.workload(host, with_extra).unwrap())));
            let mut documents: std::collections::HashMap<Topic, Document> = Default::default();
            for (topic, edit) in Compiler::new().apply(&events).edits {
                documents.entry(topic).or_default().apply(&edit).unwrap();
            }
            for host in 0..30 {
                let topics = needed(&world.hosts[host], &documents);
                let groups: BTreeSet<usize> = topics
                    .iter()
                    .filter_map(|topic| match topic {
                        Topic::Members(id) => world.index(id.as_str()),
                        _ => None,
                    })
                    .collect();
                let mut places: BTreeSet<usize> =
                    groups.iter().map(|group| world.place(host, *group).expect("a place for what is needed")).collect();
                assert_eq!(places.len(), groups.len());
                places.retain(|place| *place < world.places(host) - 2);
                assert_eq!(places.len(), world.places(host) - 2, "{host}");
                for (topic, document) in &documents {
                    if let (Topic::Rules(id), Some(groupcast_policy::doc::Content::Rules(rules))) = (topic, document.content()) {
                        let group = world.index(id.as_str()).unwrap();
                        assert_eq!(rules.rules.len(), world.rules(group) + 1);
                        assert!(rules.rules.contains_key(&rule_key_of(3).unwrap()));
                    }
                }
            }
        }
    }
}
