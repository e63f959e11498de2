//! What the workloads of a source add up to in one group. A workload alone that is the internet makes it no member
//! ([`Workload::members`](groupcast_policy::model::Workload::members)); two that are half of it each would, since each is judged by itself. So they are judged
//! together here, where a source has said everything, before anything is written.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::ids::{GroupId, WorkloadId};
use groupcast_policy::model::are_internet;
use groupcast_policy::net::Prefix;

use super::Observation;

/// Workloads of one group that are singled out; from the one after these on, none with a prefix is taken. It bounds the work: to find one means to
/// look at all a few times.
pub const SINGLED_OUT_MAX: usize = 16;

/// Takes out of what was observed, in the order of their ids, the workloads whose prefixes would make a group's members the internet together
/// with those before them. Their last good versions stay, and each is named.
pub fn judge(seen: &mut Observation) {
    let mut wide: BTreeMap<&GroupId, Vec<(&WorkloadId, Prefix)>> = BTreeMap::new();
    for (id, workload) in &seen.workloads {
        for prefix in workload.members(false).filter(|prefix| !prefix.is_host()) {
            workload.groups.iter().for_each(|group| wide.entry(group).or_default().push((id, prefix)));
        }
    }
    let says_so = |group: &GroupId| seen.groups.get(group).is_some_and(|group| group.internet_member);
    let mut refused: BTreeMap<WorkloadId, GroupId> = BTreeMap::new();
    for (group, members) in wide.into_iter().filter(|(group, _)| !says_so(group)) {
        for id in too_many(members, |id| refused.contains_key(id)) {
            refused.insert(id, group.clone());
        }
    }
    for (id, group) in refused {
        seen.problems.add(format!(
            "workload {id}: its prefixes and those of others would make the internet a member of group {group}: name what is meant"
        ));
        seen.workloads.remove(&id);
        seen.kept_workloads.insert(id);
    }
}

/// Those without whom the rest are not the internet, the later ones first to go.
fn too_many(mut members: Vec<(&WorkloadId, Prefix)>, is_refused: impl Fn(&WorkloadId) -> bool) -> BTreeSet<WorkloadId> {
    members.retain(|(id, _)| !is_refused(id));
    let mut refused = BTreeSet::new();
    let are = |members: &[(&WorkloadId, Prefix)]| are_internet(members.iter().map(|(_, prefix)| *prefix));
    while are(&members) {
        // More prefixes are never less of the internet, so the first that is too many can be searched for.
        let (mut enough, mut too_many) = (0, members.len());
        while too_many - enough > 1 {
            let middle = enough.midpoint(too_many);
            if are(&members[..middle]) { too_many = middle } else { enough = middle }
        }
        let (last, _) = members[too_many - 1];
        let every = refused.len() >= SINGLED_OUT_MAX;
        refused.extend(members.iter().map(|(id, _)| *id).filter(|id| *id == last || (every && *id > last)).cloned());
        members.retain(|(id, _)| !refused.contains(*id));
    }
    refused
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use groupcast_policy::model::{Group, Workload};

    use super::*;

    /// `w1 in g: 0.0.0.0/2 64.0.0.0/2`, one workload after the other; an address group `any` may have the internet as a member.
    fn seen(lines: &[String]) -> Observation {
        let mut seen = Observation::default();
        let mut any = Group::new("any".parse().unwrap());
        any.internet_member = true;
        seen.groups.insert(any.id.clone(), Arc::new(any));
        for line in lines {
            let (head, prefixes) = line.split_once(':').unwrap();
            let (id, groups) = head.split_once(" in ").unwrap();
            let mut workload = Workload::new(id.parse().unwrap(), "h".parse().unwrap(), "n".parse().unwrap());
            workload.groups = groups.split_whitespace().map(|group| group.parse().unwrap()).collect();
            workload.pairs =
                prefixes.split_whitespace().map(|prefix| groupcast_policy::text::prefix_text(prefix).unwrap()).collect();
            seen.workloads.insert(workload.id.clone(), Arc::new(workload));
        }
        seen
    }

    fn judged(lines: &[String]) -> (Vec<String>, Observation) {
        let mut seen = seen(lines);
        judge(&mut seen);
        (seen.kept_workloads.iter().map(ToString::to_string).collect(), seen)
    }

    /// Each alone passed the guard, and together they made the whole internet a member.
    #[test]
    fn workloads_of_a_source_are_judged_together() {
        let rows: [(&[&str], &[&str]); 15] = [
            (&[], &[]),
            (&["w1 in g: 0.0.0.0/2"], &[]),
            (&["w1 in g: 0.0.0.0/2", "w2 in g: 64.0.0.0/3"], &[]),
            (&["w1 in g: 0.0.0.0/2", "w2 in g: 64.0.0.0/2"], &["w2"]),
            (&["w1 in g: 0.0.0.0/2", "w2 in g: 0.0.0.0/2"], &[]),
            (&["w1 in g: 0.0.0.0/2", "w2 in h: 64.0.0.0/2"], &[]),
            (&["w1 in g h: 0.0.0.0/2", "w2 in h: 64.0.0.0/2"], &["w2"]),
            (&["w1 in any: 0.0.0.0/2", "w2 in any: 64.0.0.0/2"], &[]),
            (&["w1 in g: 0.0.0.0/2", "w2 in g: 64.0.0.0/2", "w3 in g: 10.1.2.3", "w4 in g: 10.0.0.0/8"], &["w2"]),
            (&["w1 in g: 0.0.0.0/2", "w2 in g: 64.0.0.0/2", "w3 in g: 128.0.0.0/2", "w4 in g: 192.0.0.0/2"], &["w2", "w3", "w4"]),
            (&["w1 in g: 0.0.0.0/3 32.0.0.0/3", "w2 in g: 64.0.0.0/3", "w3 in g: 96.0.0.0/3"], &["w3"]),
            // What is the internet by itself is no member anyway, and takes nothing from others.
            (&["w1 in g: 0.0.0.0/1", "w2 in g: 64.0.0.0/2"], &[]),
            (&["w1 in g: 0.0.0.0/2 64.0.0.0/2", "w2 in g: 64.0.0.0/2"], &[]),
            (&["w1 in g: 2000::/4", "w2 in g: 3000::/4"], &["w2"]),
            (&["w1 in g: 2000::/4", "w2 in g: 64.0.0.0/2"], &[]),
        ];
        for (lines, expected) in rows {
            let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
            let (kept, seen) = judged(&lines);
            assert_eq!(kept, expected, "{lines:?}");
            assert_eq!(seen.problems.count, expected.len(), "each is named: {lines:?}");
            assert_eq!(seen.workloads.len() + kept.len(), lines.len(), "and the others stay: {lines:?}");
            for words in &seen.problems.named {
                assert!(words.contains("internet") && words.contains("of group"), "{words}");
            }
        }
    }

    #[test]
    fn many_that_are_too_many_are_found_without_looking_at_each() {
        // 64 of them are the internet's measure; of those behind it the first few are singled out, and the others go with them.
        let line = |number: usize| format!("w{number:04} in g: {}.{}.0.0/{}", number * 2 % 256, number * 2 / 256, 7);
        let lines: Vec<String> =
            (0..128).map(line).chain((0..900).map(|n| format!("x{n:04} in g: {}.0.0.0/8", n % 256))).collect();
        let (kept, seen) = judged(&lines);
        let left = seen.workloads.values().flat_map(|workload| workload.members(false));
        assert!(!are_internet(left), "what is left is not the internet");
        assert_eq!(seen.workloads.len() + kept.len(), lines.len());
        assert!((0..63).all(|number| !kept.contains(&format!("w{number:04}"))), "those before it stay: {kept:?}");
        assert!(kept.len() > SINGLED_OUT_MAX && seen.problems.count == kept.len());
    }
}
