//! Servers and clusters can be started, hurt and ended, and what they stored survives.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use async_nats::Client;
use groupcast_bus_config::server::{Cluster, Config, NODES, Server};
use groupcast_bus_config::streams::{self, CATALOG, TOPICS};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

async fn connect(url: String) -> Client {
    async_nats::connect(url).await.unwrap()
}

/// Publishes until the stream says it stored it; a cluster between leaders does not answer.
async fn store(client: &Client, subject: &'static str, payload: &'static str) -> u64 {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Ok(message) = client.request(subject, payload.into()).await
            && let Ok(ack) = serde_json::from_slice::<Value>(&message.payload)
            && let Some(sequence) = ack["seq"].as_u64()
        {
            return sequence;
        }
        assert!(Instant::now() < deadline, "{subject} not stored");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let deadline = Instant::now() + DEADLINE;
    while !condition().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn stream_leader(client: &Client, stream: &str) -> Option<String> {
    let answer = client.request(format!("$JS.API.STREAM.INFO.{stream}"), "".into()).await.ok()?;
    let info: Value = serde_json::from_slice(&answer.payload).ok()?;
    info["cluster"]["leader"].as_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn a_killed_server_comes_back_on_its_ports_with_its_files() {
    let mut server = Server::start(Config::plain()).await.unwrap();
    let client = connect(server.url()).await;
    streams::ensure(&client, 1).await.unwrap();
    let subject = groupcast_bus_config::subjects::CATALOG_TERM;
    let first = store(&client, subject, "1").await;
    let (url, pid) = (server.url(), server.pid().unwrap());

    server.kill();
    assert!(!server.is_running() && !alive(pid));
    assert!(server.pause().is_err());
    server.restart().await.unwrap();
    assert_eq!(server.url(), url);
    assert_eq!(store(&client, subject, "2").await, first + 1);

    server.stop().await.unwrap();
    server.restart().await.unwrap();
    assert_eq!(store(&client, subject, "3").await, first + 2);
}

#[tokio::test]
async fn a_paused_server_answers_nobody_until_it_goes_on() {
    let server = Server::start(Config::plain()).await.unwrap();
    let client = connect(server.url()).await;
    client.flush().await.unwrap();
    server.pause().unwrap();
    let stat = format!("/proc/{}/stat", server.pid().unwrap());
    let stopped = || async { std::fs::read_to_string(&stat).unwrap().contains(") T ") };
    until("stopped", stopped).await;
    server.resume().unwrap();
    client.flush().await.unwrap();
}

#[tokio::test]
async fn dropping_a_server_ends_it_and_removes_its_folder() {
    let server = Server::start(Config::plain()).await.unwrap();
    let (pid, dir) = (server.pid().unwrap(), server.dir().to_owned());
    assert!(alive(pid) && dir.exists());
    drop(server);
    assert!(!alive(pid) && !dir.exists());
}

/// Set for the process that the next test starts and kills.
const ORPHAN: &str = "GROUPCAST_TEST_ORPHAN";

/// Not a test of its own: started by the next one in another process, it waits to be killed.
#[tokio::test]
async fn orphan() {
    if std::env::var_os(ORPHAN).is_some() {
        let server = Server::start(Config::plain()).await.unwrap();
        println!("\norphan {} {}", server.pid().unwrap(), server.dir().display());
        std::future::pending::<()>().await;
    }
}

#[tokio::test]
async fn a_server_ends_also_when_its_owner_is_killed() {
    let mut owner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "server::orphan", "--nocapture"])
        .env(ORPHAN, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(owner.stdout.take().unwrap()).lines();
    let line = lines.map_while(Result::ok).find(|line| line.starts_with("orphan "));
    owner.kill().unwrap();
    owner.wait().unwrap();
    let line = line.expect("the owner started a server");
    let [_, pid, dir] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
    let pid: u32 = pid.parse().unwrap();
    until("the server ends", || async move { !alive(pid) }).await;
    until("its folder goes", || async { !std::path::Path::new(dir).exists() }).await;
}

#[tokio::test]
async fn a_folder_given_by_the_user_stays() {
    let outer = Server::start(Config::plain()).await.unwrap();
    let dir = outer.dir().join("kept");
    let server = Server::start(Config::plain().store_dir(&dir)).await.unwrap();
    drop(server);
    assert!(dir.join("jetstream").exists());
}

#[tokio::test]
async fn bad_configuration_is_reported_with_the_servers_own_words() {
    let error = Server::start(Config::plain().with("nonsense {")).await.unwrap_err().to_string();
    assert!(error.contains("Parse error on line"), "{error}");
}

#[tokio::test]
async fn a_cluster_survives_a_kill_and_a_cut_of_its_stream_leader() {
    let mut cluster = Cluster::start(Config::plain()).await.unwrap();
    let client = connect(cluster.node(0).url()).await;
    streams::ensure(&client, NODES).await.unwrap();
    let subject = groupcast_bus_config::subjects::CATALOG_TERM;
    let first = store(&client, subject, "1").await;

    let leader = cluster.node_named(&stream_leader(&client, CATALOG.name).await.unwrap()).unwrap();
    cluster.kill(leader);
    let survivor = connect(cluster.node((leader + 1) % NODES).url()).await;
    let second = store(&survivor, subject, "2").await;
    assert!(second > first);
    cluster.restart(leader).await.unwrap();
    cluster.formed().await.unwrap();

    // A node that is cut off loses its routes although the third node could introduce it again, and comes back.
    let away = cluster.node_named(&stream_leader(&survivor, TOPICS.name).await.unwrap()).unwrap();
    let [near, third] = [(away + 1) % NODES, (away + 2) % NODES];
    cluster.cut(away, near);
    let cluster_ref = &cluster;
    until("routes gone", || async move { !cluster_ref.connected(away, near).await.unwrap() }).await;
    assert!(cluster.connected(away, third).await.unwrap());
    cluster.isolate(away);
    until("alone", || async move { !cluster_ref.connected(third, away).await.unwrap() }).await;
    let client = connect(cluster.node(near).url()).await;
    let third_store = store(&client, subject, "3").await;
    assert!(third_store > second);
    assert!(!cluster.connected(near, away).await.unwrap(), "gossip went around the cut");
    cluster.rejoin(away);
    for other in [near, third] {
        until("routes back", || async move { cluster_ref.connected(away, other).await.unwrap() }).await;
    }
    cluster.formed().await.unwrap();
    let back = connect(cluster.node(away).url()).await;
    assert!(store(&back, subject, "4").await > third_store);
}
