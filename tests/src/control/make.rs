//! Small made-up groups and workloads, and the marks that tell in any state which change it shows.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc;
use groupcast_policy::model::{Group, GroupRule, Workload};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::Topic;

/// A group whose rules name these groups, with these static members.
pub fn group(id: &str, remotes: &[&str], members: &[u32]) -> Group {
    let mut group = Group::new(id.parse().expect("a group's id"));
    for remote in remotes {
        let rule = parse_rule(&format!("ingress tcp 443 from group:{remote}")).expect("a rule");
        group.rules.push(GroupRule::from(rule));
    }
    group.members = members.iter().map(|number| address(*number)).collect();
    group
}

pub fn address(number: u32) -> Prefix {
    Prefix::v4(0x0a00_0000 + number, 32).expect("an address")
}

/// A workload with these groups by its own entry.
pub fn workload(host: &str, id: &str, number: u32, groups: &[&str]) -> Workload {
    let (id, host) = (id.parse().expect("a workload's id"), host.parse().expect("a host's id"));
    let mut workload = Workload::new(id, host, "net".parse().expect("a network's id"));
    workload.addresses.insert(address(0x0001_0000 + number));
    workload.groups = groups.iter().map(|group| group.parse().expect("a group's id")).collect();
    workload
}

/// The number that every group of the last whole change was marked with, as a state shows it: `Err` when two groups differ.
pub fn shown_mark<'a>(
    documents: impl Iterator<Item = (&'a Topic, &'a doc::Document)>,
    groups: &[String],
) -> Result<Option<u32>, String> {
    let names: BTreeSet<&str> = groups.iter().map(String::as_str).collect();
    let mut marks: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (topic, document) in documents {
        if let (Topic::Members(group), Some(members)) = (topic, document.members())
            && names.contains(group.as_str())
        {
            for bits in &members.v4 {
                marks.entry(bits - 0x0a00_0000).or_default().push(group.to_string());
            }
        }
    }
    match marks.len() {
        0 => Ok(None),
        1 => Ok(marks.keys().next().copied()),
        _ => Err(format!("a state shows parts of several changes: {marks:?}")),
    }
}
