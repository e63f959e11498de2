//! From a document to a host through real processes: what is written arrives, whole, at those it concerns; one bad document spoils
//! only itself; what happens can be seen from outside.

use std::time::Duration;

use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_policy::topic::Topic;
use groupcast_tests::control::{Plane, group, run, workload};
use groupcast_tests::world::eventually;
use groupcast_topics::reader;

const LEASE: Duration = Duration::from_millis(600);

async fn plain(plane: &Plane, name: &str) -> groupcast_tests::control::Host {
    plane.host(name, reader::Settings::default(), Box::new(|_, _| true)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_arrives_and_its_progress_is_known() {
    let mut plane = Plane::start(2, LEASE).await;
    plane.put_groups(vec![group("web", &["db"], &[1]), group("db", &["web"], &[2]), group("other", &[], &[3])]).await;
    plane
        .register(vec![workload("h1", "w1", 1, &["web"]), workload("h2", "w2", 2, &["db"]), workload("h3", "w3", 3, &["other"])])
        .await;
    plane.ready().await;
    let leader = plane.leader().await;
    let hosts = [plain(&plane, "h1").await, plain(&plane, "h2").await, plain(&plane, "h3").await];
    for host in &hosts {
        plane.settled(host).await;
    }
    // One change of two groups: h1 and h2 are concerned, h3 is not.
    let changed = plane.put_groups(vec![group("web", &["db"], &[1, 7]), group("db", &["web"], &[2, 7])]).await;
    let path = format!("/v1/changes/{}?wait=enforced&timeout=30s&span=true", changed.number);
    let progress = plane.controllers[leader].json(&path).expect("the leader knows it");
    assert_eq!((&progress["done"], &progress["span"], &progress["enforced"]), (&true.into(), &2.into(), &2.into()), "{progress}");
    assert_eq!(progress["hosts"], serde_json::json!(["h1", "h2"]));
    assert!(progress["first_ms"].as_u64() <= progress["last_ms"].as_u64() && progress["p99_ms"].is_u64(), "{progress}");
    for host in &hosts {
        plane.settled(host).await;
    }
    // A change that concerns nobody is done at once.
    let nobody = plane.put_groups(vec![group("nobody", &[], &[9])]).await;
    let progress = plane.controllers[leader].json(&format!("/v1/changes/{}?wait=enforced", nobody.number)).expect("known");
    assert_eq!((&progress["done"], &progress["span"]), (&true.into(), &0.into()));
    // One that is not there is not known; a standby knows none.
    assert_eq!(plane.controllers[leader].get("/v1/changes/999999").expect("an answer").0, 404);
    let (_, metrics) = plane.controllers[leader].get("/metrics").expect("metrics");
    for name in [
        "groupcast_leading 1",
        "groupcast_published_batches_total",
        "groupcast_publish_seconds",
        "groupcast_compile_seconds",
        "groupcast_span_hosts",
        "groupcast_enforced_seconds",
        "groupcast_compile_waiting_changes",
        "groupcast_bus_sent_bytes_total",
    ] {
        assert!(metrics.contains(name), "{name} is missing in:\n{metrics}");
    }
    assert_eq!(plane.controllers[leader].get("/livez").expect("an answer").0, 200);
    let log = plane.controllers[leader].log();
    assert!(log.contains(&format!("change={}", changed.number)), "the log carries the change's number:\n{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_answer_is_named_until_it_leaves() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    plane.register(vec![workload("h1", "w1", 1, &["web"]), workload("gone", "w2", 2, &["web"])]).await;
    plane.ready().await;
    plane.leader().await;
    let host = plain(&plane, "h1").await;
    plane.settled(&host).await;
    let changed = plane.put_groups(vec![group("web", &["web"], &[1, 2])]).await;
    let path = format!("/v1/changes/{}", changed.number);
    plane.controllers[0]
        .wait_for("told by h1", |c| c.json(&path).is_some_and(|p| p["enforced"] == 1 && p["behind"][0]["why"] == "unreachable"))
        .await;
    let progress = plane.controllers[0].json(&path).expect("known");
    assert_eq!((&progress["done"], &progress["behind"][0]["host"]), (&false.into(), &"gone".into()));
    plane.registry.deregister(&"gone".parse().unwrap()).await.expect("it leaves");
    plane.controllers[0].wait_for("done without it", |c| c.json(&path).is_some_and(|p| p["done"] == true)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_malformed_document_stops_nothing_else_and_is_named() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.put_groups(vec![group("good", &["good"], &[1]), group("bad", &["good"], &[2])]).await;
    plane.register(vec![workload("h1", "w1", 1, &["good", "bad"])]).await;
    plane.ready().await;
    plane.leader().await;
    let host = plain(&plane, "h1").await;
    plane.settled(&host).await;
    // By hand, past every client.
    let client = plane.bus.observer("vandal").await;
    let context = async_nats::jetstream::new(client);
    let bad = subjects::catalog(CatalogKind::Group, "bad").unwrap();
    for payload in ["not a document", r#"{"format_version":"9","document":{}}"#] {
        context.publish(bad.clone(), payload.into()).await.unwrap().await.unwrap();
    }
    let fresh = subjects::catalog(CatalogKind::Group, "fresh").unwrap();
    context.publish(fresh, vec![0xff, 0x00].into()).await.unwrap().await.unwrap();
    plane.put_groups(vec![group("good", &["good"], &[1, 5])]).await;
    plane.settled(&host).await;
    let named = |c: &mut groupcast_tests::control::Controller| {
        let status = c.status()?;
        let names =
            status["refused"].as_array()?.iter().filter_map(|r| r["document"].as_str().map(str::to_owned)).collect::<Vec<_>>();
        Some(names)
    };
    assert_eq!(named(&mut plane.controllers[0]).expect("a status"), ["group bad", "group fresh"]);
    assert!(plane.controllers[0].log().contains("group bad"), "the log names it");
    // A controller that starts now keeps the last good version too.
    plane.controllers[0].kill();
    plane.controllers.clear();
    plane.add_controller();
    plane.ready().await;
    plane.leader().await;
    assert_eq!(named(&mut plane.controllers[0]).expect("a status"), ["group bad", "group fresh"]);
    let changed = plane.put_groups(vec![group("good", &["good"], &[1, 5, 6])]).await;
    plane.controllers[0].wait_for("publishing", |c| c.json(&format!("/v1/changes/{}", changed.number)).is_some()).await;
    plane.settled(&host).await;
    assert!(host.documents().await.contains_key(&Topic::Rules("bad".parse().unwrap())));
    // Written right again, it counts again.
    plane.put_groups(vec![group("bad", &["good"], &[8])]).await;
    plane.settled(&host).await;
    let mut controller = plane.controllers.remove(0);
    eventually("only the other is refused", || {
        let names = named(&mut controller).unwrap_or_default();
        async move { names == ["group fresh"] }
    })
    .await;
}

#[test]
fn the_command_line_says_what_it_can_do() {
    let (fine, words, _) = run(&["--help"]);
    assert!(fine && ["controller", "export", "import"].iter().all(|command| words.contains(command)), "{words}");
    let (fine, _, words) = run(&["controller", "--lease", "soon"]);
    assert!(!fine && words.contains("--lease"), "{words}");
}
