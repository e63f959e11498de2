//! Streams on a real server: made as described, checked, and refused where the server cannot keep its side.

use std::time::{Duration, Instant};

use async_nats::Client;
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams::{self, ALL, BATCH_MESSAGES_MAX, Error};
use serde_json::{Value, json};

async fn connect(server: &Server) -> Client {
    async_nats::connect(server.url()).await.unwrap()
}

async fn api(client: &Client, subject: &str, body: Value) -> Value {
    let message = client.request(subject.to_owned(), body.to_string().into()).await.unwrap();
    serde_json::from_slice(&message.payload).unwrap()
}

#[tokio::test]
async fn a_good_server_holds_all_four_and_is_left_alone_afterwards() {
    let server = Server::start(Config::plain()).await.unwrap();
    let client = connect(&server).await;
    streams::ensure(&client, 1).await.unwrap();
    streams::ensure(&client, 1).await.unwrap();
    for stream in ALL {
        let info = api(&client, &format!("$JS.API.STREAM.INFO.{}", stream.name), json!({})).await;
        assert_eq!(streams::dropped_setting(&stream.config(1), &info["config"]), None, "{info}");
        assert_eq!(info["state"]["last_seq"], 0, "the probe stored something in {}", stream.name);
    }
}

#[tokio::test]
async fn a_batch_limit_below_the_need_is_refused_at_the_bound() {
    for (limit, good) in [(BATCH_MESSAGES_MAX, true), (BATCH_MESSAGES_MAX - 1, false), (0, false)] {
        let server = Server::start(Config::plain().batch_messages_max(limit)).await.unwrap();
        let client = connect(&server).await;
        match streams::ensure(&client, 1).await {
            Ok(()) => assert!(good, "{limit}"),
            Err(error @ Error::BatchLimit { .. }) => {
                assert!(!good, "{limit}: {error}");
                let message = error.to_string();
                assert!(message.contains(&client.server_info().version) && message.contains("max_msgs"), "{message}");
                println!("{message}");
            }
            Err(error) => panic!("{limit}: {error}"),
        }
    }
}

#[tokio::test]
async fn three_controllers_may_start_at_once() {
    let server = Server::start(Config::plain()).await.unwrap();
    let clients = [connect(&server).await, connect(&server).await, connect(&server).await];
    let all = clients.iter().map(|client| streams::ensure(client, 1));
    for result in futures::future::join_all(all).await {
        result.unwrap();
    }
}

#[tokio::test]
async fn a_stream_that_somebody_made_otherwise_is_mended_or_refused_by_name() {
    let server = Server::start(Config::plain()).await.unwrap();
    let client = connect(&server).await;

    // What can be changed is changed back.
    let mut loose = streams::CATALOG.config(1);
    loose["max_age"] = json!(3_600_000_000_000u64);
    loose["max_msgs_per_subject"] = json!(1);
    loose["allow_atomic"] = json!(false);
    api(&client, "$JS.API.STREAM.CREATE.CATALOG", loose).await;
    streams::ensure_one(&client, &streams::CATALOG, 1).await.unwrap();
    let info = api(&client, "$JS.API.STREAM.INFO.CATALOG", json!({})).await;
    assert_eq!(streams::dropped_setting(&streams::CATALOG.config(1), &info["config"]), None);

    // What cannot is an error that names stream and server.
    let mut other = streams::TOPICS.config(1);
    other["storage"] = json!("file");
    api(&client, "$JS.API.STREAM.CREATE.TOPICS", other).await;
    let error = streams::ensure(&client, 1).await.unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, Error::Refused { stream: "TOPICS", .. }), "{message}");
    assert!(message.contains(&client.server_info().version), "{message}");
}

#[tokio::test]
async fn a_server_without_jetstream_is_named_as_such() {
    let server =
        Server::start(Config::plain().with("accounts { A: { users: [ { user: a, password: a } ] } }\nno_auth_user: a")).await;
    let client = connect(&server.unwrap()).await;
    let error = streams::ensure(&client, 1).await.unwrap_err().to_string();
    assert!(error.contains("JetStream"), "{error}");
}

#[tokio::test]
async fn topics_keep_one_message_per_subject_and_a_batch_is_republished_whole() {
    let server = Server::start(Config::plain()).await.unwrap();
    let client = connect(&server).await;
    streams::ensure(&client, 1).await.unwrap();
    let mut read = client.subscribe("gc.t.>").await.unwrap();
    for round in 1..=3u64 {
        let id = format!("b{round}");
        for (index, subject) in ["gc.w.leader", "gc.w.rules.a", "gc.w.members.a"].into_iter().enumerate() {
            let mut headers = async_nats::HeaderMap::new();
            headers.insert("Nats-Batch-Id", id.as_str());
            headers.insert("Nats-Batch-Sequence", (index + 1).to_string());
            if index < 2 {
                client.publish_with_headers(subject, headers, "x".into()).await.unwrap();
                continue;
            }
            headers.insert("Nats-Batch-Commit", "1");
            let ack = client.request_with_headers(subject, headers, "x".into()).await.unwrap();
            let ack: Value = serde_json::from_slice(&ack.payload).unwrap();
            assert_eq!((&ack["seq"], &ack["count"]), (&json!(3 * round), &json!(3)), "{ack}");
        }
        for sequence in 3 * round - 2..=3 * round {
            let message = futures::StreamExt::next(&mut read).await.unwrap();
            assert_eq!(message.headers.unwrap().get("Nats-Sequence").unwrap().as_str(), sequence.to_string());
        }
    }
    let info = api(&client, "$JS.API.STREAM.INFO.TOPICS", json!({})).await;
    assert_eq!(info["state"]["messages"], 3);
}

#[tokio::test]
async fn audit_holds_what_catalogue_and_registry_went_through_and_cannot_be_emptied() {
    let server = Server::start(Config::plain()).await.unwrap();
    let client = connect(&server).await;
    streams::ensure(&client, 1).await.unwrap();
    let count = |stream: &'static str| {
        let client = client.clone();
        async move { api(&client, &format!("$JS.API.STREAM.INFO.{stream}"), json!({})).await["state"]["messages"].as_u64().unwrap() }
    };
    let reaches = |stream: &'static str, wanted: u64| async move {
        let deadline = Instant::now() + Duration::from_secs(30);
        while count(stream).await != wanted {
            assert!(Instant::now() < deadline, "{stream} holds {}, not {wanted}", count(stream).await);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    // Each is awaited, because the audit follows a moment later and REGISTRY keeps only the last.
    let writes = streams::CATALOG_HISTORY as u64 + 3;
    for round in 0..writes {
        for subject in ["gc.cat.group.web", "gc.reg.h.h1"] {
            client.request(subject, "x".into()).await.unwrap();
        }
        reaches("AUDIT", 2 * (round + 1)).await;
    }
    assert_eq!(count("CATALOG").await, streams::CATALOG_HISTORY as u64);
    assert_eq!(count("REGISTRY").await, 1);
    // A tombstone that vanishes from its stream by itself stays in the audit.
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Nats-TTL", "1s");
    client.request_with_headers("gc.reg.h.h1", headers, "".into()).await.unwrap();
    reaches("REGISTRY", 0).await;
    reaches("AUDIT", 2 * writes + 1).await;
    let purged = api(&client, "$JS.API.STREAM.PURGE.AUDIT", json!({})).await;
    assert!(purged["error"].is_object(), "{purged}");
    assert_eq!(count("AUDIT").await, 2 * writes + 1);
}
