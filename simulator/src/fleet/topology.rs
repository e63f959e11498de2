//! Who uses which groups, drawn by the seed; and the same as documents.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use anyhow::Context;
use groupcast_policy::ids::{GroupId, HostId, NetworkId, WorkloadId};
use groupcast_policy::model::{Group, GroupRule, Workload};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;

use super::scenario::{Scenario, Topology};
use crate::random::Random;

/// Addresses of workloads, of other members, and of marks: which change of a group it is that a host has.
const WORKLOADS: u32 = 0x0a00_0000;
const MEMBERS: u32 = 0x6440_0000;
pub const MARKS: u32 = 0x0b00_0000;
/// As many marks as there are addresses for them.
pub const MARKS_MAX: u32 = 0x00ff_ffff;

#[derive(Debug)]
pub struct World {
    pub hosts: Vec<HostId>,
    pub groups: Vec<GroupId>,
    /// The first so many are everybody's.
    pub of_all: usize,
    /// By group: the hosts that use it, but for those that are everybody's.
    pub users: Vec<Vec<u32>>,
    /// By host: the groups it uses beside those.
    pub uses: Vec<Vec<u32>>,
    network: NetworkId,
    topology: Topology,
}

impl World {
    pub fn draw(scenario: &Scenario, seed: u64) -> anyhow::Result<Self> {
        let topology = scenario.topology.clone();
        let hosts = scenario.hosts as usize;
        let of_all = topology.groups_of_all as usize;
        let some = (u64::from(scenario.hosts) * u64::from(topology.groups_per_host) / u64::from(topology.span_mean)) as usize;
        let mut random = Random::new(seed);
        let mut users: Vec<Vec<u32>> = vec![Vec::new(); of_all];
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
            users.push(own);
        }
        Ok(Self {
            hosts: (0..hosts).map(|n| HostId::new(&format!("host-{n:05}"))).collect::<Result<_, _>>()?,
            groups: (0..of_all + some)
                .map(|n| GroupId::new(&format!("{n:08x}-3f0c-4a53-9d0e-6f2c51b7a9d4")))
                .collect::<Result<_, _>>()?,
            of_all,
            users,
            uses,
            network: NetworkId::new("overlay")?,
            topology,
        })
    }

    /// How many hosts a change of the group reaches.
    pub fn span(&self, group: usize) -> usize {
        if group < self.of_all { self.hosts.len() } else { self.users[group].len() }
    }

    /// A group as the `change`-th version of it that is written; each has a mark of its own.
    pub fn group(&self, group: usize, mark: u32) -> anyhow::Result<Arc<Group>> {
        let id = &self.groups[group];
        let mut document = Group::new(id.clone());
        let line = |text: String| parse_rule(&text).map(GroupRule::from).map_err(|error| anyhow::anyhow!("{text}: {error:?}"));
        document.rules.push(line(format!("ingress tcp 443 from group:{id}"))?);
        for number in 0..self.topology.rules {
            let port = 1_024 + (group as u32 * 31 + number * 7) % 40_000;
            let net = Ipv4Addr::from_bits(0xac10_0000 + ((group as u32 * 13 + number) % 4_096) * 256);
            document.rules.push(line(format!("egress tcp {port} to {net}/24"))?);
        }
        for number in 0..self.topology.members {
            let address = MEMBERS + (group as u32).wrapping_mul(self.topology.members).wrapping_add(number) % 0x003f_ffff;
            document.members.insert(Prefix::v4(address, 32).context("an address")?);
        }
        document.members.insert(Prefix::v4(MARKS + mark, 32).context("an address")?);
        Ok(Arc::new(document))
    }

    pub fn workload(&self, host: usize) -> anyhow::Result<Workload> {
        let mut workload =
            Workload::new(WorkloadId::new(&format!("workload-{host:05}"))?, self.hosts[host].clone(), self.network.clone());
        workload.addresses = [Prefix::host(IpAddr::V4(Ipv4Addr::from_bits(WORKLOADS + 2 + host as u32)))].into();
        let own = (0..self.of_all as u32).chain(self.uses[host].iter().copied());
        workload.groups = own.map(|group| self.groups[group as usize].clone()).collect();
        Ok(workload)
    }

    pub fn topics_per_host(&self) -> f64 {
        let used: usize = self.uses.iter().map(Vec::len).sum();
        2.0 + 2.0 * (self.of_all as f64 + used as f64 / self.hosts.len().max(1) as f64)
    }
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

    fn scenario(hosts: u32) -> Scenario {
        let text = "name = 'x'\nabout = 'x'\nhosts = 1\n[topology]\ngroups_per_host = 10\nspan_mean = 1\nspan_max = 1\nmembers = 3\n\
                    [[phase]]\nname = 'a'\nduration = '1s'\n";
        let mut scenario = Scenario::parse(text, &[]).unwrap();
        scenario.hosts = hosts;
        (scenario.topology.span_mean, scenario.topology.span_max) = (10.min(hosts), 100.min(hosts));
        scenario
    }

    #[test]
    fn the_shape_is_what_was_asked_for_and_the_same_for_the_same_seed() {
        let world = World::draw(&scenario(1_000), 7).unwrap();
        assert_eq!(world.groups.len(), 1_000);
        let spans: Vec<usize> = (0..world.groups.len()).map(|group| world.span(group)).collect();
        let mean = spans.iter().sum::<usize>() as f64 / spans.len() as f64;
        assert!((8.0..12.0).contains(&mean), "{mean}");
        assert!(spans.iter().max() <= Some(&100) && spans.iter().max() > Some(&40), "{:?}", spans.iter().max());
        assert!((16.0..24.0).contains(&world.topics_per_host()), "{}", world.topics_per_host());
        let again = World::draw(&scenario(1_000), 7).unwrap();
        assert_eq!((world.users, world.uses), (again.users, again.uses));
    }

    #[test]
    fn one_host_alone_has_its_groups() {
        let world = World::draw(&scenario(1), 1).unwrap();
        assert_eq!(world.workload(0).unwrap().groups.len(), world.uses[0].len());
    }
}
