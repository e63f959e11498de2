//! Whatever dies, stalls or is cut off: everyone ends equal to the writer, and no acknowledged change is lost.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use groupcast_policy::doc::Edit;
use groupcast_policy::needs::Documents;
use groupcast_policy::topic::Topic;
use groupcast_tests::World;
use groupcast_tests::fleet::{self, group, place, rules};
use groupcast_tests::marks::{Marks, Witness, mark_of};
use groupcast_tests::world::{Bus, DEADLINE, Host, ask, change, eventually, full, leader, publish, seed, settled};
use groupcast_topics::nats::NodeHandle;
use groupcast_topics::random::Random;

const GROUPS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
/// Long enough for a busy machine, short enough for a test to wait for its end.
const LEASE_MS: u64 = 1_000;

/// Hosts that follow the groups: those with an even number all of them, the others half.
async fn follow(world: &World, node: &NodeHandle, hosts: usize) {
    world.publish(node, following(hosts)).await;
}

fn following(hosts: usize) -> Vec<(Topic, Edit)> {
    let mut edits = vec![rules("all", &GROUPS), rules("half", &GROUPS[..3])];
    for host in 0..hosts {
        let group = if host % 2 == 0 { "all" } else { "half" };
        edits.push(place(&format!("h{host}"), &format!("w{host}"), host as u32, &[group]));
    }
    edits
}

async fn join(world: &mut World, marks: &Marks, places: &[usize]) -> Vec<(Host, Witness)> {
    let mut hosts = Vec::new();
    for (number, server) in places.iter().enumerate() {
        let (witness, watch) = marks.watch();
        hosts.push((world.host_watched(*server, &format!("h{number}"), watch).await, witness));
    }
    hosts
}

/// Some of the groups, different ones each time.
fn some_groups(random: &mut Random) -> Vec<&'static str> {
    let first = random.below(GROUPS.len() as u64) as usize;
    let count = 1 + random.below((GROUPS.len() - first) as u64) as usize;
    GROUPS[first..first + count].to_vec()
}

/// Publishes until told to stop, and a few changes more.
async fn write_until(stop: &AtomicBool, marks: &Marks, nodes: &[&NodeHandle], random: &mut Random) -> (usize, usize) {
    let (mut changes, mut refused, mut after) = (0, 0, 0);
    while after < 5 {
        after += usize::from(stop.load(Ordering::Relaxed));
        refused += marks.publish_whatever_happens(nodes, &some_groups(random)).await;
        changes += 1;
    }
    (changes, refused)
}

/// Waits until this many more changes were made.
async fn go_on(marks: &Marks, changes: u32) {
    let enough = marks.last() + changes;
    eventually("the writer goes on", || async { marks.last() >= enough }).await;
}

async fn all_equal(marks: &Marks, nodes: &[&NodeHandle], hosts: &[(Host, Witness)]) {
    let leads = || nodes.iter().find(|node| node.leading().borrow().is_some());
    eventually("somebody leads", || async { leads().is_some() }).await;
    let leader = leads().expect("just seen");
    marks.all_published(leader).await;
    for (host, witness) in hosts {
        settled(leader, host).await;
        witness.assert_whole();
    }
}

async fn term_of(hosts: &[(Host, Witness)]) -> u64 {
    hosts[0].0.cut().await.expect("the host has joined").term
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_forgets_its_topics_and_they_are_published_again_under_a_higher_term() {
    let mut world = World::one().await;
    world.lease_ms = LEASE_MS;
    let nodes = [world.node(0, "c1").await, world.node(0, "c2").await];
    let first = leader(&nodes).await;
    follow(&world, &nodes[first], 4).await;
    let marks = Marks::written_in(&world);
    let hosts = join(&mut world, &marks, &[0; 4]).await;
    for (host, _) in &hosts {
        settled(&nodes[first], host).await;
    }
    let before = term_of(&hosts).await;
    let (stop, mut random) = (AtomicBool::new(false), Random::new(seed()));
    let both: Vec<&NodeHandle> = nodes.iter().collect();
    let faults = async {
        for _ in 0..if full() { 10 } else { 2 } {
            go_on(&marks, 20).await;
            world.server().kill();
            world.server().restart().await.expect("the server starts again");
        }
        go_on(&marks, 5).await;
        stop.store(true, Ordering::Relaxed);
    };
    let ((changes, refused), ()) = tokio::join!(write_until(&stop, &marks, &both, &mut random), faults);
    all_equal(&marks, &both, &hosts).await;
    assert!(term_of(&hosts).await > before, "a stream that lost its messages begins a new term");
    eprintln!("server killed: {changes} changes, {refused} refusals");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cluster_loses_its_stream_leader_and_nobody_loses_a_change() {
    let mut world = World::three().await;
    world.lease_ms = LEASE_MS;
    let observer = world.observer("observer").await;
    let lost = world.topics_leader(&observer).await;
    let others = [(lost + 1) % 3, (lost + 2) % 3];
    let nodes = [world.node(others[0], "c1").await, world.node(others[1], "c2").await];
    let first = leader(&nodes).await;
    follow(&world, &nodes[first], 3).await;
    let marks = Marks::written_in(&world);
    let hosts = join(&mut world, &marks, &[others[0], others[1], lost]).await;
    let (stop, mut random) = (AtomicBool::new(false), Random::new(seed()));
    let both: Vec<&NodeHandle> = nodes.iter().collect();
    let faults = async {
        go_on(&marks, 20).await;
        world.cluster().kill(lost);
        go_on(&marks, 20).await;
        world.cluster().restart(lost).await.expect("the node starts again");
        go_on(&marks, 20).await;
        stop.store(true, Ordering::Relaxed);
    };
    let ((changes, refused), ()) = tokio::join!(write_until(&stop, &marks, &both, &mut random), faults);
    all_equal(&marks, &both, &hosts).await;
    eprintln!("stream leader killed: {changes} changes, {refused} refusals");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_killed_in_the_middle_of_a_batch_leaves_all_of_it_or_nothing() {
    let mut world = World::one().await;
    world.lease_ms = LEASE_MS;
    let marks = Marks::written_in(&world);
    let groups: Vec<String> = (0..3_000).map(|i| format!("g{i}")).collect();
    let mut nodes = [world.node(0, "c0").await];
    leader(&nodes).await;
    let names: Vec<&str> = groups.iter().map(String::as_str).collect();
    let placed = [place("h0", "w0", 1, &["all"]), place("h1", "w1", 2, &["half"])];
    let edits = [rules("all", &names), rules("half", &names[..1_500])].into_iter().chain(placed).collect();
    world.publish(&nodes[0], edits).await;
    let hosts = join(&mut world, &marks, &[0, 0]).await;
    for (host, _) in &hosts {
        settled(&nodes[0], host).await;
    }
    let mut random = Random::new(seed());
    let (mut there, rounds) = (0, if full() { 40 } else { 4 });
    for round in 1..=rounds {
        // The one to be killed gets the lead, and a candidate watches.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let victim = world.node_in(&runtime, 0, &format!("victim{round}")).await;
        synced(&victim).await;
        nodes[0].resign().await;
        eventually("the victim leads", || async { victim.leading().borrow().is_some() }).await;
        nodes[0] = world.node(0, &format!("c{round}")).await;
        synced(&nodes[0]).await;

        let (number, edits) = marks.next(&groups);
        let patience = Duration::from_micros(random.below(60_000));
        let _ = tokio::time::timeout(patience, victim.propose(change(number.into(), edits))).await;
        runtime.shutdown_background();
        drop(victim);
        leader(&nodes).await;
        let topics = groups.clone();
        let found = nodes[0].inspect(move |node, _| {
            let document = |name: &String| node.replica().document(&Topic::Members(group(name)));
            topics.iter().filter(|name| mark_of(document(name)) == number).count()
        });
        let found = found.await.expect("the node lives");
        assert!(found == 0 || found == groups.len(), "{found} of {} topics of a batch were published", groups.len());
        there += usize::from(found != 0);
        if found == 0 {
            marks.forget(number);
        }
        marks.publish(&nodes[0], &groups[..100]).await;
    }
    let all: Vec<&NodeHandle> = nodes.iter().collect();
    all_equal(&marks, &all, &hosts).await;
    eprintln!("writer killed {rounds} times in a batch of {}: {there} times the batch was there", groups.len());
}

async fn synced(node: &NodeHandle) {
    eventually("the controller has a copy", || async { node.inspect(|node, _| node.is_synced()).await == Some(true) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_stream_leader_elections_under_load_lose_nothing() {
    let mut world = World::three().await;
    let observer = world.observer("observer").await;
    let nodes = [world.node(0, "c1").await, world.node(1, "c2").await];
    let first = leader(&nodes).await;
    follow(&world, &nodes[first], 3).await;
    let marks = Marks::written_in(&world);
    let hosts = join(&mut world, &marks, &[0, 1, 2]).await;
    let (stop, mut random) = (AtomicBool::new(false), Random::new(seed()));
    let both: Vec<&NodeHandle> = nodes.iter().collect();
    let faults = async {
        for _ in 0..10 {
            go_on(&marks, 10).await;
            let before = world.topics_leader(&observer).await;
            eventually("another node leads the stream", || async {
                ask(&observer, "STREAM.LEADER.STEPDOWN").await;
                world.topics_leader(&observer).await != before
            })
            .await;
        }
        go_on(&marks, 10).await;
        stop.store(true, Ordering::Relaxed);
    };
    let ((changes, refused), ()) = tokio::join!(write_until(&stop, &marks, &both, &mut random), faults);
    all_equal(&marks, &both, &hosts).await;
    eprintln!("ten elections: {changes} changes, {refused} refusals");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_route_is_made_up_for_when_it_heals() {
    let mut world = World::three().await;
    let observer = world.observer("observer").await;
    let source = world.topics_leader(&observer).await;
    let far = (source + 1) % 3;
    let nodes = [world.node(source, "c1").await];
    leader(&nodes).await;
    follow(&world, &nodes[0], 3).await;
    let marks = Marks::written_in(&world);
    let hosts = join(&mut world, &marks, &[far, far, source]).await;
    for (host, _) in &hosts {
        settled(&nodes[0], host).await;
    }
    let (stop, mut random) = (AtomicBool::new(false), Random::new(seed()));
    let faults = async {
        for _ in 0..if full() { 5 } else { 1 } {
            world.cluster().cut(source, far);
            go_on(&marks, 30).await;
            world.cluster().heal(source, far);
            eventually("the route is back", || async {
                let Bus::Three(cluster) = &world.bus else { return true };
                matches!(cluster.connected(source, far).await, Ok(true))
            })
            .await;
            go_on(&marks, 10).await;
        }
        stop.store(true, Ordering::Relaxed);
    };
    let all: Vec<&NodeHandle> = nodes.iter().collect();
    let ((changes, refused), ()) = tokio::join!(write_until(&stop, &marks, &all, &mut random), faults);
    all_equal(&marks, &all, &hosts).await;
    eprintln!("route cut and healed: {changes} changes, {refused} refusals");
}

/// Holds up whoever waits at it.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn wait(&self) {
        let open = self.0.lock().expect("lock");
        drop(self.1.wait_timeout_while(open, DEADLINE, |open| !*open).expect("lock"));
    }

    fn open(&self) {
        *self.0.lock().expect("lock") = true;
        self.1.notify_all();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stalled_reader_delays_nobody_and_catches_up() {
    let mut world = World::one().await;
    let nodes = [world.node(0, "c1").await];
    leader(&nodes).await;
    follow(&world, &nodes[0], 3).await;
    let marks = Marks::written_in(&world);
    let hosts = join(&mut world, &marks, &[0, 0]).await;
    // One host hangs in the middle of putting a state in force.
    let gate = Arc::new(Gate::default());
    let (hung_at, entered) = (gate.clone(), Arc::new(AtomicBool::new(false)));
    let inside = entered.clone();
    let watch = Box::new(move |_: &_, commit: &groupcast_topics::reader::Commit| {
        if commit.number == 2 {
            inside.store(true, Ordering::Relaxed);
            hung_at.wait();
        }
        true
    });
    // It hangs its thread, so it lives in a runtime of its own, as an agent lives in a process of its own.
    let apart = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let hung = world.host_in(&apart, 0, "h2", watch).await;
    eventually("it has joined", || async { hung.reader.cut().borrow().is_some() }).await;
    // And a connection takes everything there is and never reads.
    let mut deaf = TcpStream::connect(("127.0.0.1", world.server().client_port())).expect("the server listens");
    deaf.write_all(b"CONNECT {\"verbose\":false,\"name\":\"deaf\",\"headers\":true}\r\nSUB gc.t.> 1\r\nPING\r\n").expect("sent");
    for (host, _) in &hosts {
        settled(&nodes[0], host).await;
    }
    // More than the socket's buffers hold.
    let ballast = |number: u32| {
        let numbers: Vec<u32> = (0..20_000).map(|i| 100_000 + i * 7 + number % 7).collect();
        (fleet::join("ballast", &numbers), fleet::leave("ballast", &numbers))
    };
    let pending = async |world: &mut World| {
        let connections = world.server().monitor("/connz").await.expect("the server answers");
        let deaf = connections["connections"].as_array().into_iter().flatten().find(|c| c["name"] == "deaf").cloned();
        deaf.map(|deaf| deaf["pending_bytes"].as_u64().unwrap_or(0))
    };
    let mut number = 10;
    let stalled = loop {
        let (add, remove) = ballast(number);
        number += 2;
        publish(&nodes[0], number.into(), vec![add]).await.expect("the leader leads");
        publish(&nodes[0], (number + 1).into(), vec![remove]).await.expect("the leader leads");
        marks.publish(&nodes[0], &GROUPS).await;
        match pending(&mut world).await {
            Some(0) => assert!(number < 5_000, "the deaf connection takes everything"),
            stalled => break stalled,
        }
    };
    for _ in 0..50 {
        marks.publish(&nodes[0], &GROUPS).await;
    }
    for (host, witness) in &hosts {
        settled(&nodes[0], host).await;
        witness.assert_whole();
    }
    assert!(entered.load(Ordering::Relaxed), "the hung host hangs");
    assert!(hung.reader.cut().borrow().is_some_and(|cut| cut < hosts[0].0.reader.cut().borrow().expect("joined")));
    gate.open();
    settled(&nodes[0], &hung).await;
    eprintln!("stalled connection held {stalled:?} bytes at the server while the others settled");
    drop(deaf);
    apart.shutdown_background();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_was_away_for_long_catches_up() {
    let mut world = World::three().await;
    let observer = world.observer("observer").await;
    let home = (world.topics_leader(&observer).await + 1) % 3;
    let nodes = [world.node((home + 1) % 3, "c1").await];
    leader(&nodes).await;
    follow(&world, &nodes[0], 2).await;
    let marks = Marks::written_in(&world);
    let hosts = join(&mut world, &marks, &[home, (home + 1) % 3]).await;
    let mut random = Random::new(seed());
    let all: Vec<&NodeHandle> = nodes.iter().collect();
    for _ in 0..20 {
        marks.publish_whatever_happens(&all, &some_groups(&mut random)).await;
    }
    settled(&nodes[0], &hosts[0].0).await;
    world.cluster().kill(home);
    // More than a topic's remembered past, so that only a snapshot helps.
    let missed = if full() { 5_000 } else { 300 };
    for _ in 0..missed {
        marks.publish_whatever_happens(&all, &some_groups(&mut random)).await;
    }
    settled(&nodes[0], &hosts[1].0).await;
    world.cluster().restart(home).await.expect("the node starts again");
    all_equal(&marks, &all, &hosts).await;
    eprintln!("away for {missed} changes");
}
