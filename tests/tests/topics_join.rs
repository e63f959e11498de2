//! Joining while a writer publishes as fast as it can, with readers, snapshot service and stream leader on different nodes of a
//! cluster, where a new subscription takes a moment to be known everywhere.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use groupcast_tests::World;
use groupcast_tests::fleet::{place, rules};
use groupcast_tests::marks::Marks;
use groupcast_tests::world::{eventually, full, leader, seed, settled};
use groupcast_topics::random::Random;

/// Hosts that join at the same time.
const WAVE: usize = 20;
/// Groups whose members a host follows; with its own topic, the global scope and its rules it follows fifty topics.
const REMOTES: usize = 47;
const GROUPS: usize = 200;

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joins_while_the_writer_never_rests_end_equal_with_nothing_applied_twice() {
    let mut world = World::three().await;
    let observer = world.observer("observer").await;
    let stream = world.topics_leader(&observer).await;
    let (service, readers) = ((stream + 1) % 3, (stream + 2) % 3);
    let nodes = [world.node(service, "writer").await];
    leader(&nodes).await;
    let node = &nodes[0];
    let _service = world.service(service, "service").await;
    let groups: Vec<String> = (0..GROUPS).map(|i| format!("g{i}")).collect();
    let mut edits = Vec::new();
    for host in 0..WAVE {
        let remotes: Vec<&str> = (0..REMOTES).map(|i| groups[(host * 9 + i) % GROUPS].as_str()).collect();
        edits.push(rules(&format!("r{host}"), &remotes));
        edits.push(place(&format!("h{host}"), &format!("w{host}"), host as u32, &[&format!("r{host}")]));
    }
    world.publish(node, edits).await;
    let marks = Marks::written_in(&world);
    for group in &groups {
        marks.publish(node, &[group]).await;
    }

    let joins = if full() { 1_000 } else { 60 };
    let (stop, pause) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut random = Random::new(seed());
    let write = async {
        while !stop.load(Ordering::Relaxed) {
            if pause.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            let first = random.below(GROUPS as u64) as usize;
            let touched: Vec<&String> = (0..=random.below(4)).map(|i| &groups[(first + i as usize * 9) % GROUPS]).collect();
            marks.publish(node, &touched).await;
        }
    };
    let join = async {
        let (mut holes, mut behind, mut states) = (Vec::new(), Vec::new(), 0);
        let (start, before) = (Instant::now(), marks.last());
        for _ in 0..joins / WAVE {
            let mut wave = Vec::new();
            for number in 0..WAVE {
                let (witness, watch) = marks.watch();
                wave.push((world.host_watched(readers, &format!("h{number}"), watch).await, witness));
            }
            for (host, witness) in &wave {
                eventually("it has joined", || async { host.reader.cut().borrow().is_some() }).await;
                let joined = witness.commits();
                eventually("it follows", || async { witness.commits() > joined + 5 }).await;
            }
            // The writer holds its breath, so that there is a cut for everyone to be equal at.
            pause.store(true, Ordering::Relaxed);
            for (host, witness) in &wave {
                settled(node, host).await;
                assert_eq!(host.state().await.1.len(), REMOTES + 3);
                states += witness.assert_whole();
                behind.push(witness.longest_behind());
                holes.extend(witness.holes());
            }
            pause.store(false, Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
        holes.sort();
        behind.sort();
        (holes, behind, states, marks.last() - before, start.elapsed())
    };
    let ((), (holes, behind, states, changes, took)) = tokio::join!(write, join);
    eprintln!(
        "{joins} joins of {} topics during {changes} changes in {took:?}, {states} exposed states; {} holes, open for at most {:?}; \
         a joined host was behind for at most: median {:?}, 99th percentile {:?}, longest {:?}",
        REMOTES + 3,
        holes.len(),
        holes.last(),
        percentile(&behind, 50),
        percentile(&behind, 99),
        percentile(&behind, 100),
    );
}
