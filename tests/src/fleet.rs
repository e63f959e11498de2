//! Small made-up policies: hosts with workloads, groups with rules and members.

use std::net::{IpAddr, Ipv4Addr};

use groupcast_policy::doc::{Edit, Enforced, Phase, Phases, Placement};
use groupcast_policy::ids::{GroupId, HostId, NetworkId, WorkloadId};
use groupcast_policy::net::Prefix;
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::{Scope, Topic};

pub fn group(name: &str) -> GroupId {
    GroupId::new(name).expect("a group's name")
}

pub fn host_id(name: &str) -> HostId {
    HostId::new(name).expect("a host's name")
}

pub fn address(number: u32) -> Prefix {
    Prefix::host(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + number)))
}

/// One workload on `host` with these groups bound to it.
pub fn place(host: &str, workload: &str, number: u32, groups: &[&str]) -> (Topic, Edit) {
    let placement = Placement {
        workload: WorkloadId::new(workload).expect("a workload's name"),
        incarnation: 1,
        network: NetworkId::new("net").expect("a network's name"),
        addresses: [address(number)].into(),
        space: None,
        app: None,
        phase: Phase::Running,
        enforced: Enforced::BOTH,
        groups: groups.iter().map(|g| group(g)).collect(),
    };
    (Topic::Host(host_id(host)), Edit::Host { put: vec![placement], remove: vec![] })
}

/// Ingress of everything from `remote`.
pub fn from_group(remote: &str) -> Rule {
    Rule {
        action: Action::Allow,
        direction: Direction::Ingress,
        family: None,
        traffic: Traffic::Any,
        remote: Remote::Group(group(remote)),
        log: false,
    }
}

pub fn rules(of: &str, remotes: &[&str]) -> (Topic, Edit) {
    (
        Topic::Rules(group(of)),
        Edit::Rules { stateful: None, put: remotes.iter().map(|r| from_group(r)).collect(), remove: vec![] },
    )
}

pub fn join(of: &str, numbers: &[u32]) -> (Topic, Edit) {
    (Topic::Members(group(of)), Edit::Members { add: numbers.iter().map(|n| address(*n)).collect(), remove: vec![] })
}

pub fn leave(of: &str, numbers: &[u32]) -> (Topic, Edit) {
    (Topic::Members(group(of)), Edit::Members { add: vec![], remove: numbers.iter().map(|n| address(*n)).collect() })
}

pub fn bind_global(groups: &[&str]) -> (Topic, Edit) {
    let put = groups.iter().map(|g| (group(g), Phases::BOTH)).collect();
    (Topic::Scope(Scope::Global), Edit::Scope { put, remove: vec![] })
}
