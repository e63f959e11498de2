//! Streams on a real server: made as described, checked, and refused where the server cannot keep its side.

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
