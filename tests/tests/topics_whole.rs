//! Changes of any size arrive whole, at readers of all of it, of some of it and of one topic of it, and not at all elsewhere.

use std::sync::atomic::Ordering;

use groupcast_policy::doc::Edit;
use groupcast_policy::topic::Topic;
use groupcast_tests::World;
use groupcast_tests::fleet::{join, place, rules};
use groupcast_tests::marks::Marks;
use groupcast_tests::world::{Host, leader, settled};
use groupcast_topics::nats::NodeHandle;
use groupcast_topics::reader::Settings;

/// Rules of one group: below the size at which a delta is published by reference.
const REMOTES_PER_GROUP: usize = 500;
/// Workload-level groups of one workload.
const GROUPS_PER_WORKLOAD: usize = 100;

/// What makes `host` follow the members of all these groups.
fn follow(host: &str, number: u32, remotes: &[String]) -> Vec<(Topic, Edit)> {
    let names: Vec<String> = (0..remotes.len().div_ceil(REMOTES_PER_GROUP)).map(|i| format!("{host}-{i}")).collect();
    let mut edits = Vec::new();
    for (name, remotes) in names.iter().zip(remotes.chunks(REMOTES_PER_GROUP)) {
        edits.push(rules(name, &remotes.iter().map(String::as_str).collect::<Vec<_>>()));
    }
    assert!(names.len() <= GROUPS_PER_WORKLOAD);
    edits.push(place(host, &format!("w-{host}"), number, &names.iter().map(String::as_str).collect::<Vec<_>>()));
    edits
}

/// A host whose connection is silent once it has joined: nothing it does by itself brings answers.
fn silent() -> Settings {
    let never = 3_600_000;
    Settings { rechecks_ms: [never; 3], entropy_min_ms: never, entropy_max_ms: never, ..Default::default() }
}

struct Readers {
    all: Host,
    some: Host,
    one: Host,
}

impl Readers {
    async fn settled(&self, node: &NodeHandle) {
        for host in [&self.all, &self.some, &self.one] {
            settled(node, host).await;
        }
    }
}

async fn changes_of(size: usize, changes: usize) {
    let mut world = World::one().await;
    let nodes = [world.node(0, "c1").await];
    leader(&nodes).await;
    let node = &nodes[0];
    let marks = Marks::written_in(&world);
    let groups: Vec<String> = (0..size).map(|i| format!("g{i}")).collect();
    let some: Vec<String> = groups.iter().step_by(3).cloned().collect();
    let one = vec![groups[size / 2].clone()];
    let mut edits = follow("all", 1, &groups);
    edits.extend(follow("some", 2, &some));
    edits.extend(follow("one", 3, &one));
    edits.extend(follow("none", 4, &["elsewhere".to_owned()]));
    edits.push(join("elsewhere", &[1]));
    world.publish(node, edits).await;
    // One change before anyone joins: part of the snapshots.
    marks.publish(node, &groups).await;

    let (all, watch_all) = marks.watch();
    let (some, watch_some) = marks.watch();
    let (one, watch_one) = marks.watch();
    let readers = Readers {
        all: world.host_watched(0, "all", watch_all).await,
        some: world.host_watched(0, "some", watch_some).await,
        one: world.host_watched(0, "one", watch_one).await,
    };
    let none = world.host_with(0, "none", silent(), Box::new(|_, _| true)).await;
    settled(node, &none).await;
    readers.settled(node).await;
    none.client.flush().await.unwrap();
    let statistics = none.client.statistics();
    let received = || (statistics.in_messages.load(Ordering::Relaxed), statistics.in_bytes.load(Ordering::Relaxed));
    let before = received();

    // In a row, without waiting for anyone: whole changes, and between them changes of a part, which must not mix with them.
    for _ in 0..changes {
        marks.publish(node, &groups).await;
        marks.publish(node, &groups[..size.div_ceil(2)]).await;
        marks.publish(node, &groups[size / 3..]).await;
    }
    readers.settled(node).await;
    marks.all_published(node).await;
    let states = all.assert_whole() + some.assert_whole() + one.assert_whole();
    assert!([&all, &some, &one].iter().all(|witness| witness.holes().is_empty()), "every change in its turn");
    none.client.flush().await.unwrap();
    let after = received();
    assert_eq!(after.0, before.0, "messages to a host that follows none of it");
    // The flush above is answered, and the server may ask whether the client lives: six bytes each.
    let bytes = after.1 - before.1;
    assert!(bytes <= 60 && bytes % 6 == 0, "{bytes} bytes to a host that follows none of it");
    eprintln!("{size} topics: {} changes, {states} exposed states looked at", 3 * changes + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_one_and_two_topics_arrive_whole() {
    changes_of(1, 100).await;
    changes_of(2, 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_at_the_bound_of_listed_companions_arrive_whole() {
    changes_of(32, 50).await;
    changes_of(33, 50).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_1_500_topics_arrive_whole() {
    changes_of(1_500, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_15_000_topics_arrive_whole() {
    changes_of(15_000, 1).await;
}
