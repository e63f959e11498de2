//! A stream is followed also while nobody can make a consumer. On a bus of three that is so whenever the servers elect who leads them; here the
//! stream takes one consumer, and somebody else has it.

use std::time::Duration;

use async_nats::jetstream::{self, consumer::pull};
use futures::TryStreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_bus_config::{streams, subjects};
use groupcast_control::feed::{Anew, Feed, Health};
use groupcast_control::log::Log;
use groupcast_tests::world::{DEADLINE, World, eventually};
use tokio::sync::mpsc;

/// More than is read before it is handed on.
const MANY: u64 = 600;

async fn make(client: &async_nats::Client) {
    let mut config = streams::REGISTRY.config(1);
    config["max_consumers"] = serde_json::json!(1);
    let subject = subjects::js_api("STREAM.CREATE", streams::REGISTRY.name);
    let answer = client.request(subject, config.to_string().into()).await.expect("an answer");
    let answer: serde_json::Value = serde_json::from_slice(&answer.payload).expect("json");
    assert!(answer["error"].is_null(), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_followed_while_no_consumer_can_be_made() {
    let world = World::one().await;
    let (client, _events) = world.connect(0, Role::Controller, "follower").await;
    let context = jetstream::new(client.clone());
    for stream in [streams::AUDIT, streams::REGISTRY] {
        context.delete_stream(stream.name).await.expect("deleted");
    }
    make(&client).await;
    let write = async |workload: &str| {
        let subject = subjects::registry_workload(&workload.parse().expect("an id"));
        context.publish(subject, "x".into()).await.expect("sent").await.expect("stored").sequence
    };
    write("a").await;
    let health = Health::default();
    let begun = Feed::begin(Log::registry(client.clone()), subjects::REGISTRY_ALL, health.clone()).await;
    let (mut feed, last) = begun.expect("it begins");
    let first = feed.next().await.expect("a message");
    assert_eq!((last, first.len(), first[0].entry.sequence), (1, 1, 1));

    // Its consumer goes, and another has its place before it looks again.
    let stream = context.get_stream(streams::REGISTRY.name).await.expect("the stream");
    let consumers = async || -> Vec<String> { stream.consumer_names().try_collect().await.expect("consumers") };
    stream.delete_consumer(&consumers().await[0]).await.expect("deleted");
    let other = pull::Config { durable_name: Some("other".to_owned()), ..Default::default() };
    stream.create_consumer(other).await.expect("made");
    // 2 is replaced by 4: what is behind 3 has to be known, or a state would be shown that never was.
    for workload in ["b", "c", "b"] {
        write(workload).await;
    }
    let (sender, mut read) = mpsc::unbounded_channel();
    let following = tokio::spawn(async move {
        loop {
            match feed.next().await {
                Ok(messages) => messages.iter().for_each(|message| {
                    let _ = sender.send((message.entry.sequence, message.pending)); // the test may have ended
                }),
                Err(why) => return why,
            }
        }
    });
    let mut next = async || tokio::time::timeout(DEADLINE, read.recv()).await.expect("in time").expect("it follows");
    assert_eq!((next().await, next().await), ((3, 1), (4, 0)));
    eventually("it is at the head", || async { health.lost().is_none() }).await;
    assert_eq!(consumers().await, ["other"], "nobody else got one");
    // Many at once: each of them, in order.
    for number in 0..MANY {
        write(&format!("w{number}")).await;
    }
    for sequence in 5..5 + MANY {
        assert_eq!(next().await.0, sequence);
    }
    eventually("it is at the head", || async { health.lost().is_none() }).await;

    // There is room again: a consumer delivers, from where it was.
    stream.delete_consumer("other").await.expect("deleted");
    eventually("it has a consumer", || async { consumers().await.iter().any(|name| name != "other") }).await;
    for _ in 0..20 {
        let sequence = write("a").await;
        assert_eq!(next().await.0, sequence);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // Another stream of that name is never taken for this one.
    let stream = context.get_stream(streams::REGISTRY.name).await.expect("the stream");
    let names: Vec<String> = stream.consumer_names().try_collect().await.expect("consumers");
    assert_eq!(names.len(), 1);
    context.delete_stream(streams::REGISTRY.name).await.expect("deleted");
    make(&client).await;
    let stream = context.get_stream(streams::REGISTRY.name).await.expect("the stream");
    let other = pull::Config { durable_name: Some("other".to_owned()), ..Default::default() };
    let _ = stream.create_consumer(other).await; // whoever follows may have been faster
    for number in 0..2 * MANY {
        write(&format!("w{number}")).await;
    }
    let why = tokio::time::timeout(DEADLINE, following).await.expect("in time").expect("it ends");
    assert!(matches!(why, Anew::Another { .. }), "{why}");
}

/// Every gateway said at its start that following is interrupted, was not ready once more, and made each consumer twice: it was asked how often
/// it had connected while its first connection was on its way.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_connection_is_not_taken_for_another_one() {
    let world = World::one().await;
    let (client, _events) = world.connect(0, Role::Controller, "writer").await;
    let subject = subjects::registry_workload(&"a".parse().expect("an id"));
    jetstream::new(client.clone()).publish(subject, "x".into()).await.expect("sent").await.expect("stored");
    for number in 0..10 {
        let name = format!("follower{number}").parse().expect("an id");
        let options = Options::new(&[world.url(0)], Role::Controller, &name).in_background();
        let (background, _events) = connect::connect(options).await.expect("it is started");
        let health = Health::default();
        let begun = Feed::begin(Log::registry(background), subjects::REGISTRY_ALL, health.clone()).await;
        let (mut feed, _) = begun.expect("it begins");
        feed.next().await.expect("a message");
        let mut changes = health.watch();
        let following = tokio::spawn(async move { feed.next().await.map(|messages| messages.len()) });
        let wait = changes.wait_for(Option::is_none);
        tokio::time::timeout(DEADLINE, wait).await.expect("in time").expect("it is followed");
        let stream = jetstream::new(client.clone()).get_stream(streams::REGISTRY.name).await.expect("the stream");
        let consumers: Vec<String> = stream.consumer_names().try_collect().await.expect("consumers");
        // AUDIT's is not among them; those of the rounds before are deleted below.
        assert_eq!(consumers.len(), 1, "round {number}: {consumers:?}");
        following.abort();
        stream.delete_consumer(&consumers[0]).await.expect("deleted");
    }
}
