//! Changes that mark every group they touch with their number, so that a state which shows a part of one is seen.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use groupcast_policy::model::Group;
use groupcast_topics::nats::OnCommit;
use groupcast_topics::reader;

use super::{Host, Plane, group, shown_mark, workload};

pub const GROUPS: usize = 8;

fn names() -> Vec<String> {
    (0..GROUPS).map(|i| format!("g{i}")).collect()
}

/// Every group marked with the change's number; each names the next, so that all are followed by whoever has one of them.
pub fn marked(number: u32) -> Vec<Group> {
    let names = names();
    (0..GROUPS).map(|i| group(&names[i], &[&names[(i + 1) % GROUPS]], &[number])).collect()
}

/// Marks in the order in which a host exposed them, and whatever was wrong.
#[derive(Clone, Default)]
pub struct Witness(Arc<Mutex<(Vec<u32>, Vec<String>)>>);

impl Witness {
    pub fn watch(&self) -> OnCommit {
        let seen = self.0.clone();
        Box::new(move |reader, commit| {
            let mut seen = seen.lock().expect("lock");
            match shown_mark(reader.documents(), &names()) {
                Ok(Some(mark)) if seen.0.last() != Some(&mark) => seen.0.push(mark),
                Ok(_) => {}
                Err(wrong) => seen.1.push(format!("commit {}: {wrong}", commit.number)),
            }
            true
        })
    }

    /// The mark of the state exposed last.
    pub fn last(&self) -> Option<u32> {
        self.0.lock().expect("lock").0.last().copied()
    }

    /// Every state was whole, and no change came back after a later one; how many were exposed.
    pub fn assert_whole(&self) -> usize {
        let seen = self.0.lock().expect("lock");
        assert!(seen.1.is_empty(), "{:#?}", seen.1);
        assert!(seen.0.is_sorted(), "a change came back: {:?}", seen.0);
        seen.0.len()
    }
}

/// Two controllers, each behind a gate, and so many hosts that follow every group.
pub async fn plane_with_hosts(hosts: usize, lease: Duration) -> (Plane, Vec<(Host, Witness)>) {
    let mut plane = Plane::start(0, lease).await;
    plane.add_gated_controller().await;
    plane.add_gated_controller().await;
    plane.put_groups(marked(1)).await;
    let names = names();
    let entries = (0..hosts)
        .map(|i| workload(&format!("h{i}"), &format!("w{i}"), i as u32, &[names[i % 2 * 3].as_str(), names[5].as_str()]));
    plane.register(entries.collect()).await;
    plane.ready().await;
    plane.leader().await;
    let mut followers = Vec::new();
    for i in 0..hosts {
        let witness = Witness::default();
        let host = plane.host(&format!("h{i}"), reader::Settings::default(), witness.watch()).await;
        plane.settled(&host).await;
        followers.push((host, witness));
    }
    (plane, followers)
}
