//! Ten thousand changes as fast as the bus takes them: queues stay within their bounds, what waits is merged, the end is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use groupcast_control::outbox::WAITING_CHANGES_MAX;
use groupcast_policy::model::Event;
use groupcast_tests::control::{Plane, group, workload, write_groups};
use groupcast_topics::reader;

const CHANGES: usize = 10_000;
const WRITERS: usize = 50;
/// One change that arrives may bring as many more as are taken from a stream at once.
const ARRIVAL_CHANGES_MAX: u64 = groupcast_control::feed::DRAIN_MAX as u64;

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_changes_are_merged_within_bounds() {
    let mut plane = Plane::start(1, Duration::from_secs(3)).await;
    let names: Vec<String> = (0..WRITERS).map(|i| format!("g{i}")).collect();
    plane.put_groups(names.iter().map(|name| group(name, &[name], &[0])).collect()).await;
    let entry = |i: usize| workload(&format!("h{i}"), &format!("w{i}"), i as u32, &[&names[i], &names[i + 10]]);
    plane.register((0..4).map(entry).collect()).await;
    plane.ready().await;
    plane.leader().await;
    let mut hosts = Vec::new();
    for i in 0..4 {
        let host = plane.host(&format!("h{i}"), reader::Settings::default(), Box::new(|_, _| true)).await;
        plane.settled(&host).await;
        hosts.push(host);
    }
    let begun = Instant::now();
    let last = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (catalog, last) = (plane.catalog.clone(), last.clone());
            tokio::spawn(async move {
                let name = format!("g{writer}");
                for number in 1..=(CHANGES / WRITERS) as u32 {
                    let accepted = write_groups(&catalog, vec![group(&name, &[&name], &[number])]).await.expect("written");
                    last.fetch_max(accepted.number, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let mut longest = 0;
    while writers.iter().any(|writer| !writer.is_finished()) {
        let status = plane.controllers[0].status().expect("the controller answers under load");
        longest = longest.max(status["waiting_changes"].as_u64().expect("a number"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for writer in writers {
        writer.await.expect("the writer lives");
    }
    let written = begun.elapsed();
    for name in &names {
        plane.model.apply(&Event::group(group(name, &[name], &[(CHANGES / WRITERS) as u32])));
    }
    let number = last.load(Ordering::SeqCst);
    plane.controllers[0].wait_for("done with the last", |c| c.json(&format!("/v1/changes/{number}")).is_some()).await;
    let published = begun.elapsed();
    for host in &hosts {
        plane.settled(host).await;
    }
    assert!(longest < WAITING_CHANGES_MAX as u64 + 2 * ARRIVAL_CHANGES_MAX, "{longest} changes waited");
    let (_, metrics) = plane.controllers[0].get("/metrics").expect("metrics");
    let batches = metrics.lines().find_map(|line| line.strip_prefix("groupcast_published_batches_total ")?.parse::<u64>().ok());
    let batches = batches.expect("a counter");
    assert!(batches < CHANGES as u64, "{batches} batches for {CHANGES} changes: nothing was merged");
    let (written, published) = (written.as_millis(), published.as_millis());
    eprintln!(
        "{CHANGES} changes: written in {written} ms, the last published after {published} ms in {batches} batches; at most {longest} waited"
    );
}
