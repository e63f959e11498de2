//! The whole path once, on a real server: a controller takes the lead, a host joins, changes arrive.

use groupcast_tests::World;
use groupcast_tests::fleet::{host_id, join, leave, place, rules};
use groupcast_tests::world::{eventually, leader, publish, settled};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_follows_what_it_needs_and_nothing_else() {
    let mut world = World::one().await;
    let nodes = [world.node(0, "c1").await];
    leader(&nodes).await;
    let node = &nodes[0];
    publish(node, 1, vec![rules("web", &["db"]), join("db", &[1, 2]), join("other", &[9])]).await.unwrap();
    publish(node, 2, vec![place("h1", "w1", 5, &["web"])]).await.unwrap();

    let host = world.host(0, "h1").await;
    settled(node, &host).await;
    let (_, state) = host.state().await;
    assert_eq!(state.len(), 4, "host, scope.global, rules.web, members.db: {:?}", state.keys());

    let committed = publish(node, 3, vec![join("db", &[3]), leave("db", &[]), join("other", &[10])]).await;
    assert!(committed.is_err(), "one topic twice in a change");
    publish(node, 3, vec![join("db", &[3])]).await.unwrap();
    settled(node, &host).await;
    assert_eq!(host.state().await.1[&join("db", &[]).0].members().unwrap().len(), 3);

    // Another group comes into need, and goes out of it.
    publish(node, 4, vec![rules("web", &["other"])]).await.unwrap();
    settled(node, &host).await;
    assert!(host.state().await.1.contains_key(&join("other", &[]).0));

    // The controller knows that the host has it in force.
    eventually("everything is acknowledged", || async { node.inspect(|_, c| c.behind() == 0).await == Some(true) }).await;
    let progress = node.inspect(|_, c| c.progress(4, 0)).await.flatten().unwrap();
    assert_eq!((progress.span, progress.summary.enforced), (1, 1));
    assert!(node.inspect(|node, _| node.followers().topics_of(&host_id("h1")).len()).await == Some(5));
}
