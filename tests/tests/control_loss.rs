//! What is derived can be lost and is made again; what is not comes back from an export. Meanwhile hosts keep what they have.

use std::time::Duration;

use groupcast_bus_config::streams::TOPICS;
use groupcast_tests::control::{Host, Plane, group, run, workload};
use groupcast_tests::world::{ask, eventually};
use groupcast_topics::reader;

const LEASE: Duration = Duration::from_millis(500);

async fn populated(controllers: usize) -> (Plane, Vec<Host>) {
    let mut plane = Plane::start(controllers, LEASE).await;
    plane.put_groups((0..20).map(|i| group(&format!("g{i}"), &[&format!("g{}", (i + 1) % 20)], &[i])).collect()).await;
    let entry = |i: u32| workload(&format!("h{i}"), &format!("w{i}"), i, &[&format!("g{i}"), &format!("g{}", i + 5)]);
    plane.register((0..3).map(entry).collect()).await;
    plane.ready().await;
    plane.leader().await;
    let mut hosts = Vec::new();
    for i in 0..3 {
        hosts.push(plane.host(&format!("h{i}"), reader::Settings::default(), Box::new(|_, _| true)).await);
    }
    for host in &hosts {
        plane.settled(host).await;
    }
    (plane, hosts)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_topics_stream_is_made_again_under_a_higher_term() {
    let (mut plane, hosts) = populated(2).await;
    let term = hosts[0].term().await;
    let client = plane.bus.observer("vandal").await;
    let deleted = ask(&client, "STREAM.DELETE").await.expect("the server answers");
    assert_eq!(deleted["success"], true, "{} is gone: {deleted}", TOPICS.name);
    // Something changes while there is nothing to publish to.
    plane.put_groups(vec![group("g0", &["g1"], &[100]), group("g1", &["g2"], &[100])]).await;
    for host in &hosts {
        plane.settled(host).await;
    }
    eventually("hosts follow a higher term", || async { hosts[0].term().await > term }).await;
    // And everything goes on.
    plane.leader().await;
    plane.put_groups(vec![group("g5", &["g6"], &[101])]).await;
    for host in &hosts {
        plane.settled(host).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bus_that_lost_everything_is_restored_from_an_export() {
    let (mut plane, hosts) = populated(2).await;
    let file = std::env::temp_dir().join(format!("groupcast-export-{}-{}", std::process::id(), plane.url().len()));
    let path = file.to_str().expect("a path");
    let (fine, _, words) = run(&["export", "--server", &plane.url(), "--name", "exporter", "--output", path]);
    assert!(fine && words.contains("20 documents"), "{words}");
    let (term, before) = (hosts[0].term().await, hosts[0].documents().await);

    // Controllers and hosts go on while the server comes back with nothing.
    plane.bus.server().kill();
    let store = plane.bus.server().dir().join("jetstream");
    assert!(store.exists(), "{} is where the server keeps its streams", store.display());
    std::fs::remove_dir_all(&store).expect("the streams can be lost");
    plane.bus.server().restart().await.expect("the server starts again");

    // Somebody makes the streams: empty ones are no reason to take everything from every host.
    let client = plane.bus.observer("operator").await;
    groupcast_bus_config::streams::ensure(&client, 1).await.expect("the streams can be made");
    for controller in &mut plane.controllers {
        controller.wait_for("aware of the loss", |c| c.status().is_some_and(|status| status["publishing"] == false)).await;
    }
    assert_eq!(hosts[0].documents().await, before, "hosts keep what they have");

    let (fine, _, words) = run(&["import", "--server", &plane.url(), "--name", "importer", path]);
    assert!(fine && words.contains("20 documents"), "{words}");
    let (again, _, words) = run(&["import", "--server", &plane.url(), "--name", "importer", path]);
    assert!(!again && words.contains("there already"), "{words}");
    plane.leader().await;
    for host in &hosts {
        plane.settled(host).await;
    }
    eventually("hosts follow a higher term", || async { hosts[0].term().await > term }).await;
    plane.put_groups(vec![group("g0", &["g1"], &[77])]).await;
    for host in &hosts {
        plane.settled(host).await;
    }
    let _ = std::fs::remove_file(&file);
}
