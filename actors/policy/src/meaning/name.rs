//! What sets of workloads and addresses are called: a group where one is exactly that, else what is shortest.

use std::collections::BTreeSet;

use super::Snapshot;
use crate::ids::{GroupId, WorkloadId};
use crate::net::AddressSet;
use crate::rule::Remote;
use crate::text::address_text;

/// Most items that are listed before the rest is counted.
const LISTED_MAX: usize = 6;

fn list(items: &[String], what: &str) -> String {
    match items.len() {
        0..=LISTED_MAX => items.join(","),
        more => format!("{} and {} more {what}", items[..LISTED_MAX].join(","), more - LISTED_MAX),
    }
}

pub(super) fn local(world: &Snapshot<'_>, workloads: &BTreeSet<WorkloadId>) -> String {
    let Some(first) = workloads.first() else { return "nothing".into() };
    let is_exactly = |group: &&GroupId| world.workloads_with(group).eq(workloads.iter());
    let mut candidates = world.groups(first).iter().copied();
    if let Some(group) = candidates.find(|group| is_exactly(group)) {
        return format!("group:{group}");
    }
    if workloads.len() > 1 && world.workloads().eq(workloads.iter()) {
        return "every workload".into();
    }
    let names: Vec<String> = workloads.iter().map(|id| format!("workload:{id}")).collect();
    list(&names, "workloads")
}

pub(super) fn remote(world: &Snapshot<'_>, workloads: &BTreeSet<WorkloadId>, addresses: &AddressSet) -> String {
    let everything = |first: Option<(u128, u128)>, last: u128| first == Some((0, last));
    let v4 = addresses.v4.spans().first().map(|s| (u128::from(s.first()), u128::from(s.last())));
    let v6 = addresses.v6.spans().first().map(|s| (s.first(), s.last()));
    match (everything(v4, u128::from(u32::MAX)), everything(v6, u128::MAX)) {
        (true, true) => return "any".into(),
        (true, false) if addresses.v6.is_empty() => return "any IPv4".into(),
        (false, true) if addresses.v4.is_empty() => return "any IPv6".into(),
        _ => {}
    }
    // The groups that these workloads' rules name; a rule may concern one family of a group only.
    let groups = workloads.first().map_or(&[][..], |first| world.groups(first));
    let rules = groups.iter().flat_map(|group| world.rules(group));
    let mut named = rules.filter_map(|rule| match &rule.remote {
        Remote::Group(group) => Some(group),
        _ => None,
    });
    let is_exactly = |group: &&GroupId| {
        world.members(group).is_some_and(|members| {
            let v4 = addresses.v4.is_empty() || addresses.v4 == members.v4;
            let v6 = addresses.v6.is_empty() || addresses.v6 == members.v6;
            v4 && v6
        })
    };
    if let Some(group) = named.find(is_exactly) {
        return format!("group:{group}");
    }
    let texts: Vec<String> = address_text(addresses).split(',').map(str::to_string).collect();
    list(&texts, "ranges")
}
