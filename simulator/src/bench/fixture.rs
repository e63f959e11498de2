//! Documents for benchmarks: groups whose rules name themselves, and hosts whose one workload has them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::anyhow;
use groupcast_policy::doc::{Edit, Enforced, Phase, Placement};
use groupcast_policy::ids::{GroupId, HostId, NetworkId, WorkloadId};
use groupcast_policy::net::Prefix;
use groupcast_policy::rule::Rule;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::{Scope, Topic};

pub fn host_id(number: usize) -> anyhow::Result<HostId> {
    Ok(HostId::new(&format!("host-{number:05}"))?)
}

/// As long as the UUIDs that platforms give to their groups.
pub fn group_id(number: usize) -> anyhow::Result<GroupId> {
    Ok(GroupId::new(&format!("{number:08x}-3f0c-4a53-9d0e-6f2c51b7a9d4"))?)
}

pub fn rule(line: &str) -> anyhow::Result<Rule> {
    parse_rule(line).map_err(|errors| anyhow!("rule {line:?}: {errors:?}"))
}

/// No group is bound to everything, but every host follows that scope.
pub fn global_scope() -> (Topic, Edit) {
    let edit = Edit::Scope { put: Vec::new(), remove: Vec::new() };
    (Topic::Scope(Scope::Global), edit)
}

/// A host with one workload that has these groups.
pub fn host(number: usize, groups: impl IntoIterator<Item = GroupId>) -> anyhow::Result<(Topic, Edit)> {
    let placement = Placement {
        workload: WorkloadId::new(&format!("workload-{number:05}"))?,
        incarnation: 1,
        network: NetworkId::new("default")?,
        addresses: BTreeSet::from([Prefix::host(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + number as u32)))]),
        space: None,
        app: None,
        phase: Phase::Running,
        enforced: Enforced::BOTH,
        groups: groups.into_iter().collect(),
    };
    Ok((Topic::Host(host_id(number)?), Edit::Host { put: vec![placement], remove: Vec::new() }))
}

pub fn rules(group: &GroupId, rules: Vec<Rule>) -> (Topic, Edit) {
    (Topic::Rules(group.clone()), Edit::Rules { stateful: None, put: rules, remove: Vec::new() })
}

pub fn members(group: &GroupId, members: impl IntoIterator<Item = IpAddr>) -> (Topic, Edit) {
    let add = members.into_iter().map(Prefix::host).collect();
    (Topic::Members(group.clone()), Edit::Members { add, remove: Vec::new() })
}
