//! Entries that earlier versions wrote, under the names of this one.
//!
//! They named a workload by its network and its id, so that one id could have two holders. Of those the one that was written first is
//! kept and the others are removed: whoever came later took an id that was somebody's.

use std::collections::{BTreeMap, BTreeSet};

use async_nats::Client;
use groupcast_bus_config::subjects::{self, RegistryKey, parse_registry};
use groupcast_policy::ids::WorkloadId;

use super::claims::addresses;
use super::{CAUSE, Error, TRACE_KEPT};
use crate::document::decode_workload;
use crate::log::{Entry, Log, Outcome, Outgoing, TIME_TO_LIVE};

/// Entries rewritten with one batch.
const AT_ONCE: usize = 1_000;
const CAUSE_TEXT: &str = "renamed: an id has one holder, whatever the network";

/// What an entry is called now; itself, unless an earlier version named it.
pub fn renamed(subject: &str) -> String {
    match parse_registry(subject) {
        Some(RegistryKey::FormerWorkload(_, id)) => RegistryKey::Workload(id).subject(),
        _ => subject.to_owned(),
    }
}

/// Which former entries are kept, and which give way: to one that has the new name already, or to an earlier one of the same id.
fn sorted(former: Vec<(WorkloadId, Entry)>, taken: &dyn Fn(&WorkloadId) -> bool) -> (BTreeMap<WorkloadId, Entry>, Vec<Entry>) {
    let (mut kept, mut dropped) = (BTreeMap::<WorkloadId, Entry>::new(), Vec::new());
    for (id, entry) in former {
        match kept.get_mut(&id) {
            _ if taken(&id) => dropped.push(entry),
            Some(first) if first.sequence < entry.sequence => dropped.push(entry),
            Some(first) => dropped.push(std::mem::replace(first, entry)),
            None => _ = kept.insert(id, entry),
        }
    }
    (kept, dropped)
}

/// The addresses that an entry claims on its own network.
fn claimed(entry: &Entry) -> Vec<RegistryKey> {
    let (network, id) = match parse_registry(&entry.subject) {
        Some(RegistryKey::FormerWorkload(network, id)) => (Some(network), id),
        Some(RegistryKey::Workload(id)) => (None, id),
        _ => return Vec::new(),
    };
    let Ok(Some(workload)) = decode_workload(&id, &entry.payload) else { return Vec::new() };
    let network = network.unwrap_or_else(|| workload.network.clone());
    addresses(&workload).map(|address| RegistryKey::Address(network.clone(), address)).collect()
}

/// Renames everything that an earlier version wrote; how much. Safe to run from several controllers at once: whoever is later finds
/// nothing to do.
pub async fn upgrade(client: &Client) -> Result<usize, Error> {
    let log = Log::registry(client.clone());
    let (mut former, mut taken) = (Vec::new(), BTreeMap::<WorkloadId, Entry>::new());
    for entry in log.all(subjects::REGISTRY_FORMER_WORKLOADS).await?.into_iter().filter(|entry| !entry.payload.is_empty()) {
        if let Some(RegistryKey::FormerWorkload(_, id)) = parse_registry(&entry.subject) {
            if let Some(there) = log.last(&RegistryKey::Workload(id.clone()).subject()).await? {
                taken.insert(id.clone(), there);
            }
            former.push((id, entry));
        }
    }
    let count = former.len();
    let (kept, dropped) = sorted(former, &|id| taken.get(id).is_some_and(|there| !there.payload.is_empty()));
    let held: BTreeSet<RegistryKey> = kept.values().chain(taken.values()).flat_map(claimed).collect();
    let gone = |entry: &Entry| {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(CAUSE, CAUSE_TEXT);
        headers.insert(TIME_TO_LIVE, TRACE_KEPT.as_secs().to_string().as_str());
        Outgoing { subject: entry.subject.clone(), headers, expected: entry.sequence, payload: Vec::new() }
    };
    let moves = kept.into_iter().map(|(id, entry)| {
        let mut headers = entry.headers.clone();
        headers.insert(CAUSE, CAUSE_TEXT);
        let expected = taken.get(&id).map_or(0, |there| there.sequence);
        let (removal, subject) = (gone(&entry), RegistryKey::Workload(id).subject());
        vec![Outgoing { subject, headers, expected, payload: entry.payload.to_vec() }, removal]
    });
    let mut all: Vec<Vec<Outgoing>> = moves.collect();
    for entry in &dropped {
        tracing::warn!(subject = entry.subject, "its id has another holder, which came first: it is removed");
        let mut removals = vec![gone(entry)];
        for address in claimed(entry).into_iter().filter(|address| !held.contains(address)) {
            // Its claims carry the id too, so nobody would ever give them back. What the holder has on the same network stays its own.
            let there = log.last(&address.subject()).await?.filter(|there| !there.payload.is_empty());
            removals.extend(there.as_ref().map(gone));
        }
        all.push(removals);
    }
    for together in all.chunks(AT_ONCE) {
        match log.write(&together.concat()).await {
            // Somebody else is at it.
            Outcome::Committed(_) | Outcome::Conflict => {}
            Outcome::Refused(reason) => return Err(Error::Refused(reason)),
            Outcome::Unknown(reason) => return Err(Error::Unknown(reason)),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(subject: &str, sequence: u64) -> (WorkloadId, Entry) {
        let Some(RegistryKey::FormerWorkload(_, id)) = parse_registry(subject) else { panic!("{subject}") };
        let at = std::time::SystemTime::UNIX_EPOCH;
        (id, Entry { subject: subject.to_owned(), sequence, headers: Default::default(), payload: "x".into(), at })
    }

    #[test]
    fn the_first_holder_keeps_its_id_and_whoever_has_the_new_name_before_all() {
        let former = vec![
            entry("gc.reg.w.far.w1", 9),
            entry("gc.reg.w.net.w1", 5),
            entry("gc.reg.w.late.w1", 7),
            entry("gc.reg.w.net.w2", 1),
            entry("gc.reg.w.net.w3", 2),
        ];
        let (kept, dropped) = sorted(former, &|id| id.as_str() == "w3");
        let kept: Vec<&str> = kept.values().map(|entry| entry.subject.as_str()).collect();
        assert_eq!(kept, ["gc.reg.w.net.w1", "gc.reg.w.net.w2"]);
        let dropped: Vec<&str> = dropped.iter().map(|entry| entry.subject.as_str()).collect();
        assert_eq!(dropped, ["gc.reg.w.far.w1", "gc.reg.w.late.w1", "gc.reg.w.net.w3"]);
    }

    #[test]
    fn only_former_names_are_others_now() {
        for (before, after) in [
            ("gc.reg.w.net.w1", "gc.reg.w.w1"),
            ("gc.reg.w.w1", "gc.reg.w.w1"),
            ("gc.reg.h.h1", "gc.reg.h.h1"),
            ("nonsense", "nonsense"),
        ] {
            assert_eq!(renamed(before), after);
        }
    }
}
