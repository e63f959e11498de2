//! A controller seen from outside: what it is told by its file, whether it lives and is ready, what it counts, and the trace of a
//! change from the stream to the last host.

use std::time::Duration;

use groupcast_bus_config::server::{Config, Server};
use groupcast_tests::control::{Collector, Controller, Plane, group, run, workload};
use groupcast_topics::reader;

const LEASE: Duration = Duration::from_millis(600);

/// A small plane with one host that follows, and its leader.
async fn plane_with(arguments: &[&str]) -> (Plane, groupcast_tests::control::Host) {
    let mut plane = Plane::start(0, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    plane.register(vec![workload("h1", "w1", 1, &["web"])]).await;
    plane.add_controller_with(arguments);
    plane.ready().await;
    plane.leader().await;
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    plane.settled(&host).await;
    (plane, host)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_stage_counts_what_it_does() {
    let (mut plane, _host) = plane_with(&[]).await;
    let changed = plane.put_groups(vec![group("web", &["web"], &[1, 2])]).await;
    let done = plane.controllers[0].json(&format!("/v1/changes/{}?wait=enforced", changed.number)).expect("known");
    assert_eq!(done["done"], true, "{done}");
    // Each stage: how much waits, how large batches are, how long it takes, how many topics, bytes and hosts.
    let names = [
        "groupcast_leading 1",
        "groupcast_term ",
        "groupcast_follow_changes_total{stream=\"catalog\"}",
        "groupcast_follow_sequence{stream=\"registry\"}",
        "groupcast_follow_held_seconds_count{stream=\"catalog\"}",
        "groupcast_compile_waiting_changes 0",
        "groupcast_compile_seconds_count",
        "groupcast_compile_topics ",
        "groupcast_compile_refused_documents 0",
        "groupcast_publish_seconds_count",
        "groupcast_publish_changes_count",
        "groupcast_publish_topics_count",
        "groupcast_publish_bytes_count",
        "groupcast_publish_refused_total 0",
        "groupcast_publish_torn_total 0",
        "groupcast_published_batches_total ",
        "groupcast_published_topics_total ",
        "groupcast_published_topics ",
        "groupcast_change_seconds_count",
        "groupcast_span_hosts_count",
        "groupcast_enforced_seconds_count",
        "groupcast_hosts_behind 0",
        "groupcast_changes_unfinished 0",
        "groupcast_bus_sent_bytes_total{connection=\"topics\"}",
        "groupcast_bus_received_bytes_total{connection=\"follow\"}",
        "# HELP groupcast_enforced_seconds ",
    ];
    plane.controllers[0]
        .wait_for("counting all of it", |c| {
            let (_, text) = c.get("/metrics").unwrap_or_default();
            let missing: Vec<&&str> = names.iter().filter(|name| !text.contains(**name)).collect();
            if !missing.is_empty() {
                eprintln!("not yet: {missing:?}");
            }
            missing.is_empty()
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_lives_before_it_is_ready() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut controller = Controller::start(&format!("nats://127.0.0.1:{port}"), "c1", LEASE, &[]);
    controller.wait_for("alive", |c| c.get("/livez").is_some_and(|(status, _)| status == 200)).await;
    let (status, body) = controller.get("/readyz").expect("an answer");
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("cannot be reached yet"), "{body}");
    let _server = Server::start(Config::plain().client_port(port)).await.expect("a nats-server starts");
    controller.ready().await;
    assert_eq!(controller.get("/livez").expect("an answer").0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_says_what_the_command_line_does_not() {
    let path = std::env::temp_dir().join(format!("groupcast-test-{}.toml", std::process::id()));
    let shown = path.to_str().unwrap();
    std::fs::write(&path, "[bus]\nname = \"from-the-file\"\n[controller]\nlease = \"700ms\"\nnever_lead = true\n").unwrap();
    let mut plane = Plane::start(0, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    plane.add_controller_with(&["--config", shown]);
    // It follows everything, and says that nobody leads.
    let alone = |(status, body): (u16, String)| status == 503 && body.contains("nobody leads");
    plane.controllers[0].wait_for("saying that nobody leads", |c| c.get("/readyz").is_some_and(alone)).await;
    // The test's own flags name it and its lease; only what they leave open comes from the file: it never leads.
    plane.add_controller_with(&["--config", shown, "--never-lead=false"]);
    plane.ready().await;
    assert_eq!(plane.leader().await, 1, "the flag counts before the file");
    for (text, words) in [
        ("[controller]\nlees = \"3s\"\n", "did you mean controller.lease?"),
        ("[controller]\nlease = \"a while\"\n", "a while"),
        ("[buss]\n", "did you mean [bus]?"),
    ] {
        std::fs::write(&path, text).unwrap();
        let (fine, _, said) = run(&["controller", "--config", shown]);
        assert!(!fine && said.contains(words) && said.contains(shown), "{said}");
    }
    std::fs::remove_file(&path).unwrap();
    let (fine, _, said) = run(&["controller", "--config", shown]);
    assert!(!fine && said.contains("cannot read the configuration"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trace_of_a_change_goes_from_the_stream_to_the_last_host() {
    let collector = Collector::start().await;
    let (mut plane, host) = plane_with(&["--otlp-endpoint", &collector.url()]).await;
    let changed = plane.put_groups(vec![group("web", &["web"], &[1, 2])]).await;
    plane.settled(&host).await;
    let done = plane.controllers[0].json(&format!("/v1/changes/{}?wait=enforced", changed.number)).expect("known");
    assert_eq!(done["done"], true, "{done}");
    let log = plane.controllers[0].log();
    for stage in ["published", "enforced everywhere"] {
        let said = |line: &&str| line.contains(stage) && line.contains(&format!("change={}", changed.number));
        plane.controllers[0].wait_for(stage, |c| c.log().lines().any(|line| said(&line))).await;
    }
    // What is left is sent when it ends.
    plane.controllers[0].terminate();
    assert!(plane.controllers[0].ended().await, "{log}");
    let of_change = || collector.spans().into_iter().filter(|span| span.change() == Some(changed.number)).collect::<Vec<_>>();
    let stages = ["change", "read", "compile", "publish", "enforce"];
    let missing = || stages.iter().filter(|stage| !of_change().iter().any(|span| span.name == **stage)).count();
    // It was all sent before the process ended.
    assert_eq!(missing(), 0, "of change {}: {:#?}", changed.number, collector.spans());
    let spans = of_change();
    let root = spans.iter().find(|span| span.name == "change").expect("the whole");
    assert!(root.parent.is_empty());
    for stage in &stages[1..] {
        let span = spans.iter().find(|span| span.name == *stage).expect("a stage");
        assert_eq!((&span.trace, &span.parent), (&root.trace, &root.id), "{stage} belongs to the change: {span:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_watches_is_told_as_changes_move() {
    let (mut plane, _host) = plane_with(&[]).await;
    let mut lines = plane.controllers[0].lines("/v1/watch");
    // The head of the answer says that the watch has begun.
    assert!(lines.by_ref().take_while(|line| !line.is_empty()).any(|line| line.contains("text/event-stream")));
    let changed = plane.put_groups(vec![group("web", &["web"], &[1, 2])]).await.number;
    let told = tokio::task::spawn_blocking(move || {
        let events = lines.filter_map(|line| serde_json::from_str::<serde_json::Value>(line.strip_prefix("data: ")?).ok());
        events.into_iter().find(|event| event["change"] == changed && event["done"] == true)
    });
    let told = told.await.expect("the watcher lives").expect("it is told that the change is in force");
    assert_eq!((&told["span"], &told["enforced"]), (&1.into(), &1.into()), "{told}");
}
