//! Credentials are minted, rotated and revoked while the server runs, and a revocation outlives its restart.

use std::time::{Duration, SystemTime};

use groupcast_bus_config::accounts::{HOST_PAYLOAD_BYTES_MAX, HOST_SUBSCRIPTIONS_MAX, Role};
use groupcast_bus_config::connect::{Error, Event, Events, Identity, Options, connect, settle};
use groupcast_bus_config::credentials::{Authority, Credential, FixedUser, fixed_config};
use groupcast_bus_config::server::{Cluster, Config, Server};
use groupcast_bus_config::subjects;

use crate::world::{DEADLINE, name};

async fn start(authority: &Authority) -> Server {
    let config = authority.server_config("accounts").unwrap();
    Server::start(Config::plain().with(config)).await.unwrap()
}

async fn try_connect(server: &Server, credential: &Credential) -> Result<(async_nats::Client, Events), Error> {
    let identity = Identity::Text(credential.file_text());
    let options = Options::new(&[server.url()], credential.role, &credential.name).identity(identity);
    connect(options.reconnect_delay_max(Duration::from_millis(50))).await
}

async fn publish(server: &Server, authority: &Authority) {
    let now = SystemTime::now();
    let credential = authority.system_credential(Duration::from_secs(60), now).unwrap();
    let (system, _events) = try_connect(server, &credential).await.unwrap();
    authority.publish(&system).await.unwrap();
}

async fn denied(events: &mut Events) -> String {
    loop {
        match tokio::time::timeout(DEADLINE, events.next()).await {
            Ok(Some(Event::Denied(reason))) => return reason,
            Ok(Some(_)) => {}
            other => panic!("never denied: {other:?}"),
        }
    }
}

/// A revoked credential is refused. While a server that has just started loads an account, it may let one in and cuts it off
/// some milliseconds later: that counts, staying in does not.
async fn shut_out(server: &Server, credential: &Credential, what: &str) {
    let deadline = std::time::Instant::now() + DEADLINE;
    while let Ok((_client, mut events)) = try_connect(server, credential).await {
        denied(&mut events).await;
        assert!(std::time::Instant::now() < deadline, "{what}");
    }
}

#[tokio::test]
async fn minted_after_the_start_rotated_and_revoked_without_a_restart() {
    let mut authority = Authority::new();
    let mut server = start(&authority).await;
    let now = SystemTime::now();
    let old = authority.mint(Role::Host, &name("h1"), None, now).unwrap();
    let other = authority.mint(Role::Host, &name("h2"), None, now).unwrap();
    let (_old_client, mut old_events) = try_connect(&server, &old).await.unwrap();
    let (other_client, _other_events) = try_connect(&server, &other).await.unwrap();

    // Rotation: both work until the old one is revoked.
    let new = authority.mint(Role::Host, &name("h1"), None, now).unwrap();
    let (new_client, _new_events) = try_connect(&server, &new).await.unwrap();
    try_connect(&server, &old).await.unwrap();
    assert_eq!(authority.revoke_others(&new, SystemTime::now()).unwrap(), 1);
    publish(&server, &authority).await;
    println!("{}", denied(&mut old_events).await);
    assert!(try_connect(&server, &old).await.is_err());
    new_client.flush().await.unwrap();
    other_client.flush().await.unwrap();
    try_connect(&server, &new).await.unwrap();

    // What was revoked stays revoked although the configuration file still holds the accounts as they were.
    server.restart().await.unwrap();
    shut_out(&server, &old, "a restart brought a revoked credential back").await;
    try_connect(&server, &new).await.unwrap();
    server.kill();
    server.restart().await.unwrap();
    shut_out(&server, &old, "a kill brought a revoked credential back").await;

    assert_eq!(authority.revoke(Role::Host, &name("h1"), SystemTime::now()).unwrap(), 1);
    publish(&server, &authority).await;
    assert!(try_connect(&server, &new).await.is_err());
    try_connect(&server, &other).await.unwrap();
}

#[tokio::test]
async fn an_expired_credential_and_one_of_a_replaced_signer_are_refused() {
    let mut authority = Authority::new();
    let server = start(&authority).await;
    let past = SystemTime::now() - Duration::from_secs(3_600);
    let expired = authority.mint(Role::Host, &name("h1"), Some(Duration::from_secs(60)), past).unwrap();
    assert!(try_connect(&server, &expired).await.is_err());

    let leaked = authority.mint(Role::Gateway, &name("g1"), None, SystemTime::now()).unwrap();
    let kept = authority.mint(Role::Controller, &name("c1"), None, SystemTime::now()).unwrap();
    try_connect(&server, &leaked).await.unwrap();
    authority.replace_signer(Role::Gateway, SystemTime::now()).unwrap();
    publish(&server, &authority).await;
    assert!(try_connect(&server, &leaked).await.is_err());
    try_connect(&server, &kept).await.unwrap();
    let fresh = authority.mint(Role::Gateway, &name("g1"), None, SystemTime::now()).unwrap();
    try_connect(&server, &fresh).await.unwrap();
}

#[tokio::test]
async fn a_stranger_s_credential_is_refused() {
    let server = start(&Authority::new()).await;
    let forged = Authority::new().mint(Role::Controller, &name("c1"), None, SystemTime::now()).unwrap();
    assert!(try_connect(&server, &forged).await.is_err());
    let nobody = Options::new(&[server.url()], Role::Host, &name("h1"));
    assert!(connect(nobody).await.is_err());
}

#[tokio::test]
async fn a_denied_subscription_is_told_and_a_lost_server_too() {
    let mut authority = Authority::new();
    let mut server = start(&authority).await;
    let credential = authority.mint(Role::Host, &name("h1"), None, SystemTime::now()).unwrap();
    let (client, mut events) = try_connect(&server, &credential).await.unwrap();
    let _silent = client.subscribe(subjects::ctl(&name("h2"))).await.unwrap();
    let reason = denied(&mut events).await;
    assert!(reason.contains("gc.ctl.h2"), "{reason}");

    server.kill();
    while tokio::time::timeout(DEADLINE, events.next()).await.unwrap() != Some(Event::Disconnected) {}
    server.restart().await.unwrap();
    while tokio::time::timeout(DEADLINE, events.next()).await.unwrap() != Some(Event::Connected) {}
    client.flush().await.unwrap();
}

#[tokio::test]
async fn a_client_in_the_background_waits_for_its_server() {
    let mut server = Server::start(Config::plain()).await.unwrap();
    server.kill();
    let options = Options::new(&[server.url()], Role::Host, &name("h1")).reconnect_delay_max(Duration::from_millis(50));
    assert!(connect(options.clone()).await.is_err());
    let (client, mut events) = connect(options.in_background()).await.unwrap();
    server.restart().await.unwrap();
    while tokio::time::timeout(DEADLINE, events.next()).await.unwrap() != Some(Event::Connected) {}
    client.flush().await.unwrap();
}

#[tokio::test]
async fn fixed_keys_come_and_go_by_reload() {
    let (kept, kept_seed) = FixedUser::new(Role::Host, &name("h1")).unwrap();
    let (added, added_seed) = FixedUser::new(Role::Host, &name("h2")).unwrap();
    let (gone, gone_seed) = FixedUser::new(Role::Host, &name("h3")).unwrap();
    let mut server = Server::start(Config::plain().with(fixed_config(&[kept.clone(), gone]))).await.unwrap();
    let url = server.url();
    let by_seed = |user: &'static str, seed: &str| {
        let options = Options::new(std::slice::from_ref(&url), Role::Host, &name(user)).identity(Identity::Seed(seed.to_owned()));
        connect(options.reconnect_delay_max(Duration::from_millis(50)))
    };
    let (kept_client, _kept_events) = by_seed("h1", &kept_seed).await.unwrap();
    let (_gone_client, mut gone_events) = by_seed("h3", &gone_seed).await.unwrap();
    assert!(by_seed("h2", &added_seed).await.is_err());
    server.reload(fixed_config(&[kept, added])).unwrap();
    println!("{}", denied(&mut gone_events).await);
    assert!(by_seed("h3", &gone_seed).await.is_err());
    by_seed("h2", &added_seed).await.unwrap();
    settle(&kept_client, DEADLINE).await.unwrap();
}

#[tokio::test]
async fn a_revocation_reaches_every_node_of_a_cluster_also_one_that_was_away() {
    let mut authority = Authority::new();
    let config = authority.server_config("accounts").unwrap();
    let mut cluster = Cluster::start(Config::plain().with(config)).await.unwrap();
    let credential = authority.mint(Role::Host, &name("h1"), None, SystemTime::now()).unwrap();
    let mut connected = Vec::new();
    for node in 0..2 {
        connected.push(try_connect(cluster.node(node), &credential).await.unwrap());
    }
    cluster.kill(2);
    authority.revoke(Role::Host, &name("h1"), SystemTime::now()).unwrap();
    publish(cluster.node(0), &authority).await;
    for (_client, events) in &mut connected {
        denied(events).await;
    }
    cluster.restart(2).await.unwrap();
    cluster.formed().await.unwrap();
    // A node that was away still holds the old account until it has asked the others.
    let deadline = std::time::Instant::now() + DEADLINE * 6;
    while try_connect(cluster.node(2), &credential).await.is_ok() {
        assert!(std::time::Instant::now() < deadline, "revoked, and still let in by the node that was away");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The server itself holds a host to what it needs.
#[tokio::test]
async fn a_hosts_subscriptions_are_limited_by_the_server_and_a_controllers_messages_are_not() {
    let mut authority = Authority::new();
    let server = start(&authority).await;
    let now = SystemTime::now();
    let host = authority.mint(Role::Host, &name("h1"), None, now).unwrap();
    let controller = authority.mint(Role::Controller, &name("c1"), None, now).unwrap();
    let trouble = |mut events: Events, words: &'static str| async move {
        loop {
            match tokio::time::timeout(DEADLINE, events.next()).await {
                Ok(Some(Event::Trouble(reason) | Event::Denied(reason))) if reason.to_lowercase().contains(words) => return,
                Ok(Some(_)) => {}
                other => panic!("{words}: never told: {other:?}"),
            }
        }
    };
    let follow = |client: async_nats::Client, count: u32| async move {
        let mut followed = Vec::new();
        for number in 0..count {
            let topic = groupcast_policy::topic::Topic::Rules(format!("g{number}").parse().unwrap());
            followed.push(client.subscribe(subjects::read(&topic)).await.unwrap());
        }
        followed
    };
    // All but the one with which it settles.
    let (client, events) = try_connect(&server, &host).await.unwrap();
    let followed = follow(client.clone(), HOST_SUBSCRIPTIONS_MAX - 1).await;
    settle(&client, DEADLINE).await.unwrap();
    let _more = follow(client, 5).await;
    trouble(events, "maximum subscriptions exceeded").await;
    drop(followed);
    let (client, _events) = try_connect(&server, &controller).await.unwrap();
    client.publish(subjects::ctl(&name("h1")), vec![0; HOST_PAYLOAD_BYTES_MAX as usize + 1].into()).await.unwrap();
    settle(&client, DEADLINE).await.unwrap();
}
