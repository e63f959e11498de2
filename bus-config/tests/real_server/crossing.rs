//! What is meant to cross between the accounts does, unchanged.

use futures::StreamExt;
use groupcast_bus_config::accounts::{Account, Role};
use groupcast_bus_config::connect::settle;
use groupcast_bus_config::subjects;
use groupcast_policy::topic::Topic;

use crate::world::{DEADLINE, Mode, Witness, World, name, next, store};

async fn requests_and_answers(mode: Mode) {
    let world = World::start(mode).await;
    let (controller, _c) = world.client(Role::Controller, "c1").await;
    let (host, _h) = world.client(Role::Host, "h1").await;
    let h1 = name("h1");
    let mut requests = controller.queue_subscribe(subjects::SNAP_ALL, "snapshots".into()).await.unwrap();
    settle(&controller, DEADLINE).await.unwrap();
    let mut answers = host.subscribe(subjects::answers(&h1)).await.unwrap();
    settle(&host, DEADLINE).await.unwrap();

    let mut headers = async_nats::HeaderMap::new();
    headers.insert(subjects::ANSWER_TOKEN, "t-1");
    host.publish_with_headers(subjects::snap(&h1), headers, "please".into()).await.unwrap();
    let request = next(&mut requests, "request").await;
    assert_eq!(request.subject.as_str(), "gc.snap.h1");
    let token = request.headers.as_ref().unwrap().get(subjects::ANSWER_TOKEN).unwrap();
    let to = subjects::answer_to(&request.subject, token.as_str()).unwrap();
    for chunk in 0..50 {
        controller.publish(to.clone(), chunk.to_string().into()).await.unwrap();
    }
    for chunk in 0..50 {
        let answer = next(&mut answers, "answer").await;
        assert_eq!(answer.payload, chunk.to_string().as_bytes());
        assert_eq!(subjects::answer_token(&answer.subject), Some("t-1"));
    }
}

async fn topics_and_orders(mode: Mode) {
    let world = World::start(mode).await;
    let (controller, _c) = world.client(Role::Controller, "c1").await;
    let (h1, _h1) = world.client(Role::Host, "h1").await;
    let (h2, _h2) = world.client(Role::Host, "h2").await;
    let mut hosts_witness = Witness::start(&world, Account::Hosts).await;
    let rules = Topic::parse("rules.web").unwrap();
    let own = Topic::Host(name("h1"));
    let mut read = futures::stream::select_all([
        h1.subscribe(subjects::read(&rules)).await.unwrap(),
        h1.subscribe(subjects::read(&own)).await.unwrap(),
        h1.subscribe(subjects::ctl(&name("h1"))).await.unwrap(),
    ]);
    let mut other = h2.subscribe(subjects::ctl(&name("h2"))).await.unwrap();
    settle(&h1, DEADLINE).await.unwrap();
    settle(&h2, DEADLINE).await.unwrap();

    store(&controller, subjects::LEAD_WRITE, "lead").await;
    let first = store(&controller, &subjects::write(&rules), "1").await;
    let message = read.next().await.unwrap();
    assert_eq!(message.subject.as_str(), "gc.t.rules.web");
    let second = store(&controller, &subjects::write(&rules), "2").await;
    read.next().await.unwrap();
    store(&controller, &subjects::write(&own), "own").await;
    let message = read.next().await.unwrap();
    assert_eq!((message.subject.as_str(), &message.payload[..]), ("gc.t.host.h1", &b"own"[..]));

    let third = store(&controller, &subjects::write(&rules), "3").await;
    let message = read.next().await.unwrap();
    let headers = message.headers.unwrap();
    let header = |name: &str| headers.get(name).unwrap().as_str().to_owned();
    assert_eq!(header("Nats-Stream"), "TOPICS");
    assert_eq!(header("Nats-Subject"), "gc.w.rules.web");
    assert_eq!(header("Nats-Sequence"), third.to_string());
    assert_eq!(header("Nats-Last-Sequence"), second.to_string());
    assert!(first < second && second < third);

    controller.publish(subjects::ctl(&name("h1")), "nudge".into()).await.unwrap();
    controller.publish(subjects::ctl(&name("h2")), "other".into()).await.unwrap();
    assert_eq!(read.next().await.unwrap().payload, "nudge");
    assert_eq!(next(&mut other, "ctl").await.payload, "other");

    let seen = hosts_witness.seen().await;
    assert!(!seen.is_empty());
    let leaked =
        seen.iter().find(|message| message.subject.as_str() == subjects::LEAD_READ || message.subject.starts_with("gc.w"));
    assert!(leaked.is_none(), "the leader's chain is not for hosts: {leaked:?}");
}

#[tokio::test]
async fn requests_and_fifty_answers_with_signed_tokens() {
    requests_and_answers(Mode::Signed).await;
}

#[tokio::test]
async fn requests_and_fifty_answers_with_fixed_keys() {
    requests_and_answers(Mode::Fixed).await;
}

#[tokio::test]
async fn topics_and_orders_with_signed_tokens() {
    topics_and_orders(Mode::Signed).await;
}

#[tokio::test]
async fn topics_and_orders_with_fixed_keys() {
    topics_and_orders(Mode::Fixed).await;
}

/// Controllers ask each other through ordinary inboxes.
#[tokio::test]
async fn a_controller_answers_another() {
    let world = World::start(Mode::Signed).await;
    let (c1, _e1) = world.client(Role::Controller, "c1").await;
    let (c2, _e2) = world.client(Role::Controller, "c2").await;
    let mut asked = c1.subscribe(subjects::REPLICA).await.unwrap();
    settle(&c1, DEADLINE).await.unwrap();
    let inbox = c2.new_inbox();
    let mut answers = c2.subscribe(inbox.clone()).await.unwrap();
    c2.publish_with_reply(subjects::REPLICA, inbox, "all".into()).await.unwrap();
    let request = next(&mut asked, "request").await;
    for chunk in 0..50 {
        c1.publish(request.reply.clone().unwrap(), chunk.to_string().into()).await.unwrap();
    }
    for chunk in 0..50 {
        assert_eq!(next(&mut answers, "answer").await.payload, chunk.to_string().as_bytes());
    }
}
