//! What is known of changes survives whoever published them; what no batch can hold is refused, or reported; a writer that is far ahead
//! waits.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_control::catalog::Error;
use groupcast_control::change::{Change, Expected, Invalid, Write};
use groupcast_control::document::Document;
use groupcast_control::estimate::Trial;
use groupcast_control::pressure::Pressure;
use groupcast_messages::Nudge;
use groupcast_policy::model::{Event, Group};
use groupcast_policy::topic::Topic;
use groupcast_tests::control::{Plane, group, workload, write_groups};
use groupcast_tests::world::DEADLINE;
use groupcast_topics::{BATCH_MESSAGES_MAX, reader};

const LEASE: Duration = Duration::from_millis(500);

#[tokio::test(flavor = "multi_thread")]
async fn whoever_takes_over_knows_how_far_earlier_changes_are() {
    let mut plane = Plane::start(2, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[1]), group("db", &["db"], &[1])]).await;
    let entries = [("h1", "web"), ("h2", "web"), ("silent", "db")];
    let entries = entries.iter().enumerate().map(|(i, (host, of))| workload(host, &format!("w{i}"), i as u32, &[of]));
    plane.register(entries.collect()).await;
    plane.ready().await;
    let old = plane.leader().await;
    let mut hosts = Vec::new();
    for name in ["h1", "h2"] {
        hosts.push(plane.host(name, reader::Settings::default(), Box::new(|_, _| true)).await);
    }
    for host in &hosts {
        plane.settled(host).await;
    }
    let done = plane.put_groups(vec![group("web", &["web"], &[1, 7])]).await.number;
    let enforced = plane.controllers[old].json(&format!("/v1/changes/{done}?wait=enforced")).expect("known");
    assert_eq!((&enforced["done"], &enforced["enforced"]), (&true.into(), &2.into()), "{enforced}");
    // Each after the one before is published: changes that wait are published as one.
    let mut published = Vec::new();
    for _ in ["a change that one host does not take", "one that changes nothing"] {
        let number = plane.put_groups(vec![group("db", &["db"], &[1, 7])]).await.number;
        plane.controllers[old].json(&format!("/v1/changes/{number}?wait=published")).expect("published");
        published.push(number);
    }
    let [open, nothing] = published[..] else { unreachable!() };

    plane.controllers[old].kill();
    plane.controllers.remove(old);
    plane.leader().await;
    let known = |c: &mut groupcast_tests::control::Controller, change: u64| c.json(&format!("/v1/changes/{change}?span=true"));
    let new = &mut plane.controllers[0];
    let earlier = known(new, done).expect("the one that took over knows it");
    assert_eq!((&earlier["done"], &earlier["span"], &earlier["enforced"]), (&true.into(), &2.into(), &2.into()), "{earlier}");
    assert_eq!(earlier["hosts"], serde_json::json!(["h1", "h2"]));
    assert!(earlier["last_ms"].is_u64(), "{earlier}");
    let behind = known(new, open).expect("known");
    assert_eq!((&behind["done"], &behind["behind"][0]["host"]), (&false.into(), &"silent".into()), "{behind}");
    let touched = known(new, nothing).expect("known");
    assert_eq!((&touched["done"], &touched["span"]), (&true.into(), &0.into()), "{touched}");
    // It comes late, and is heard by the new leader.
    let late = plane.host("silent", reader::Settings::default(), Box::new(|_, _| true)).await;
    plane.settled(&late).await;
    plane.controllers[0].wait_for("told by the late one", |c| known(c, open).is_some_and(|p| p["done"] == true)).await;
}

/// More topics than one batch has messages: every group's rules and members.
fn too_wide() -> Vec<Group> {
    (0..BATCH_MESSAGES_MAX / 2 + 1).map(|i| format!("g{i}")).map(|id| group(&id, &[&id], &[1])).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_no_batch_can_hold_is_refused_or_else_reported() {
    let mut plane = Plane::start(1, Duration::from_secs(3)).await;
    plane.put_groups(vec![group("first", &["first"], &[1])]).await;
    plane.ready().await;
    plane.leader().await;
    let trial = Trial::default();
    trial.follow(&plane.model.events());
    let writes =
        |groups: Vec<Group>| groups.into_iter().map(|g| Write::put(Document::Group(Arc::new(g)), Expected::Any)).collect();
    let change = |groups: Vec<Group>| Change { author: "test".into(), reason: String::new(), key: None, writes: writes(groups) };
    let careful = plane.catalog.clone().with_estimate(Arc::new(trial));
    let refused = careful.write(&change(too_wide()), None).await;
    assert!(
        matches!(refused, Err(Error::Invalid(Invalid::TooWide { messages })) if messages > BATCH_MESSAGES_MAX),
        "{refused:?}"
    );
    assert_eq!(plane.catalog.documents().await.expect("readable").0.len(), 1, "nothing was written");
    let fits = (0..100).map(|i| format!("small{i}")).map(|id| group(&id, &[&id], &[1])).collect();
    careful.write(&change(fits), None).await.expect("a smaller one is taken");
    // Whoever does not ask writes it all the same: it is published in parts, and everybody is told.
    let torn = write_groups(&plane.catalog, too_wide()).await.expect("written").number;
    let path = format!("/v1/changes/{torn}");
    plane.controllers[0].wait_for("published in parts", |c| c.json(&path).is_some_and(|p| p["torn"] == true)).await;
    let (_, metrics) = plane.controllers[0].get("/metrics").expect("metrics");
    assert!(metrics.lines().any(|line| line.starts_with("groupcast_publish_torn_total ") && !line.ends_with(" 0")), "{metrics}");
    assert!(plane.controllers[0].log().contains("published in parts"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_is_far_ahead_of_what_is_published_waits() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[0])]).await;
    plane.ready().await;
    let leader = plane.leader().await;
    let pressure = Pressure::new(20, Duration::from_millis(300));
    let client = plane.bus.observer("watcher").await;
    tokio::spawn(pressure.clone().follow(client));
    let writer = plane.catalog.clone().with_pressure(pressure.clone());
    let write = async |number: u32| write_groups(&writer, vec![group("web", &["web"], &[number])]).await;
    for number in 1..100 {
        write(number).await.expect("a controller that publishes holds nobody up");
    }
    // Nobody publishes any more: so many are taken, and then the writer is told.
    plane.controllers[leader].pause();
    let mut taken = 0;
    let refused = loop {
        match write(1_000 + taken).await {
            Ok(_) => taken += 1,
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused, Error::Behind(_)) && refused.to_string().contains("none leads"), "{refused}");
    assert!(taken <= 21, "{taken} were taken");
    plane.controllers[leader].resume();
    let start = std::time::Instant::now();
    while write(5_000).await.is_err() {
        assert!(start.elapsed() < DEADLINE, "it goes on when somebody publishes");
    }
    plane.model.apply(&Event::group(group("web", &["web"], &[5_000])));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_acknowledge_is_told_what_it_should_have() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    plane.register(vec![workload("deaf", "w1", 1, &["web"])]).await;
    plane.ready().await;
    plane.leader().await;
    let client = plane.bus.observer("eavesdropper").await;
    let mut orders = client.subscribe(subjects::ctl(&"deaf".parse().unwrap())).await.expect("subscribed");
    client.flush().await.expect("the server answers");
    plane.put_groups(vec![group("web", &["web"], &[1, 2])]).await;
    let members = Topic::Members("web".parse().unwrap()).hash64();
    // More than once; it may be behind with something earlier too, and be told of that first.
    let mut told = 0;
    while told < 2 {
        let order = tokio::time::timeout(DEADLINE, orders.next()).await.expect("in time").expect("subscribed");
        let nudge = Nudge::decode(&order.payload).expect("a nudge");
        told += usize::from(nudge.should.iter().any(|(topic, revision)| *topic == members && *revision > nudge.cut.lead));
    }
}
