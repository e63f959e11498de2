//! What gateways, viewers and controllers must not do is refused, told to them, and has no effect.

use groupcast_bus_config::accounts::{Account, Role};
use groupcast_bus_config::connect::{Event, Events};

use crate::world::{DEADLINE, Mode, Witness, World, store};

enum Attempt {
    Publish(&'static str),
    Subscribe(&'static str),
}

use Attempt::{Publish, Subscribe};

const VIEWER: &[Attempt] = &[
    Publish("gc.w.leader"),
    Publish("gc.t.rules.web"),
    Publish("gc.cat.group.web"),
    Publish("gc.reg.h.h1"),
    Publish("gc.snap.h1"),
    Publish("gc.ctl.h1"),
    Publish("gc.answer.h1.t"),
    Publish("gc.replica"),
    Publish("gc.progress"),
    Publish("gc.progressed"),
    Publish("gc.registrations"),
    Publish("_INBOX.c1.x"),
    Publish("_INBOX.v1.x"),
    Publish("$JS.API.INFO"),
    Publish("$JS.API.STREAM.INFO.TOPICS"),
    Publish("$JS.API.DIRECT.GET.CATALOG"),
    Publish("$JS.API.CONSUMER.CREATE.CATALOG"),
    Publish("$JS.API.STREAM.DELETE.TOPICS"),
    Subscribe(">"),
    Subscribe("gc.w.>"),
    Subscribe("gc.snap.*"),
    Subscribe("gc.register.*"),
    Subscribe("gc.replica"),
    Subscribe("gc.progress"),
    Subscribe("gc.registrations"),
    Subscribe("gc.cat.>"),
    Subscribe("_INBOX.>"),
    Subscribe("_INBOX.c1.>"),
    Subscribe("_R_.>"),
    Subscribe("$JS.API.>"),
];

const GATEWAY: &[Attempt] = &[
    Publish("gc.w.leader"),
    Publish("gc.w.rules.web"),
    Publish("gc.t.rules.web"),
    Publish("gc.audit.cat.group.web"),
    Publish("gc.cat.term.leader"),
    Publish("gc.cat.term.fence"),
    Publish("gc.reg.l.fence"),
    Publish("gc.reg.h.h1"),
    Publish("gc.reg.w.w"),
    Publish("gc.reg.p.n"),
    Publish("gc.reg.f.n.h1"),
    Publish("gc.snap.h1"),
    Publish("gc.beat.h1"),
    Publish("gc.ctl.h1"),
    Publish("gc.answer.h1.t"),
    Publish("gc.replica"),
    Publish("gc.progressed"),
    Publish("_INBOX.c1.x"),
    Publish("$JS.API.STREAM.CREATE.CATALOG"),
    Publish("$JS.API.STREAM.UPDATE.CATALOG"),
    Publish("$JS.API.STREAM.DELETE.CATALOG"),
    Publish("$JS.API.STREAM.PURGE.CATALOG"),
    Publish("$JS.API.STREAM.PURGE.TOPICS"),
    Publish("$JS.API.STREAM.LEADER.STEPDOWN.TOPICS"),
    Publish("$JS.API.STREAM.MSG.DELETE.CATALOG"),
    Publish("$JS.API.STREAM.MSG.GET.TOPICS"),
    Publish("$JS.API.CONSUMER.CREATE.TOPICS.x"),
    Subscribe(">"),
    Subscribe("gc.w.>"),
    Subscribe("gc.t.>"),
    Subscribe("gc.t.rules.web"),
    Subscribe("gc.t.host.h1"),
    Subscribe("gc.snap.*"),
    Subscribe("gc.replica"),
    Subscribe("gc.progress"),
    Subscribe("gc.registrations"),
    Subscribe("_INBOX.>"),
    Subscribe("_INBOX.c1.>"),
    Subscribe("$JS.API.>"),
];

const CONTROLLER: &[Attempt] = &[
    Publish("gc.t.rules.web"),
    Publish("gc.snap.h1"),
    Publish("gc.registrations"),
    Publish("_R_.x.y"),
    Publish("$JS.API.STREAM.DELETE.CATALOG"),
    Publish("$JS.API.STREAM.PURGE.CATALOG"),
    Publish("$JS.API.STREAM.PURGE.REGISTRY"),
    Publish("$JS.API.STREAM.LEADER.STEPDOWN.CATALOG"),
    Publish("$JS.API.STREAM.CREATE.OTHER"),
    Publish("$JS.API.STREAM.MSG.DELETE.CATALOG"),
    Publish("$JS.API.STREAM.RESTORE.CATALOG"),
    Publish("$SYS.REQ.CLAIMS.UPDATE"),
    Subscribe(">"),
    Subscribe("gc.w.>"),
    Subscribe("gc.w.leader"),
    Subscribe("gc.answer.*.*"),
    Subscribe("_INBOX.>"),
    Subscribe("_INBOX.c2.>"),
    Subscribe("_R_.>"),
    Subscribe("$JS.API.>"),
];

const EDGE: &[Attempt] = &[
    Publish("gc.w.leader"),
    Publish("gc.t.rules.web"),
    Publish("gc.cat.group.web"),
    Publish("gc.reg.h.h1"),
    Publish("gc.ctl.h1"),
    Publish("gc.answer.h1.t"),
    Publish("gc.replica"),
    Publish("gc.progress"),
    Publish("gc.registrations"),
    Publish("_INBOX_h1.x"),
    Publish("$JS.API.INFO"),
    Subscribe(">"),
    Subscribe("gc.w.>"),
    Subscribe("gc.t.>"),
    Subscribe("gc.t.leader"),
    Subscribe("gc.snap.*"),
    Subscribe("_INBOX_h1.>"),
];

async fn denial(events: &mut Events, subject: &str) {
    loop {
        match tokio::time::timeout(DEADLINE, events.next()).await {
            Ok(Some(Event::Denied(reason))) if reason.contains(&format!("\"{subject}\"")) => return,
            Ok(Some(_)) => {}
            other => panic!("{subject} was not denied: {other:?}"),
        }
    }
}

async fn refused(mode: Mode, role: Role, user: &str, attempts: &[Attempt]) {
    let world = World::start(mode).await;
    let admin = world.unconfined(Account::Control).await;
    let base = store(&admin, "gc.w.leader", "as it was").await;
    let mut witness = Witness::start(&world, Account::Control).await;
    let (client, mut events) = world.client(role, user).await;
    let mut silent = Vec::new();
    for attempt in attempts {
        match attempt {
            Publish(subject) => {
                client.publish(*subject, "evil".into()).await.unwrap();
                denial(&mut events, subject).await;
            }
            Subscribe(subject) => {
                silent.push(client.subscribe(*subject).await.unwrap());
                denial(&mut events, subject).await;
            }
        }
    }
    let seen: Vec<_> = witness.seen().await.into_iter().filter(|message| message.payload == "evil").collect();
    assert!(seen.is_empty(), "{seen:?}");
    assert_eq!(store(&admin, "gc.w.leader", "next").await, base + 1);
}

#[tokio::test]
async fn a_viewer_with_a_signed_token() {
    refused(Mode::Signed, Role::Viewer, "v1", VIEWER).await;
}

#[tokio::test]
async fn a_viewer_with_a_fixed_key() {
    refused(Mode::Fixed, Role::Viewer, "v1", VIEWER).await;
}

#[tokio::test]
async fn a_gateway_with_a_signed_token() {
    refused(Mode::Signed, Role::Gateway, "g1", GATEWAY).await;
}

#[tokio::test]
async fn a_gateway_with_a_fixed_key() {
    refused(Mode::Fixed, Role::Gateway, "g1", GATEWAY).await;
}

#[tokio::test]
async fn a_controller_with_a_signed_token() {
    refused(Mode::Signed, Role::Controller, "c1", CONTROLLER).await;
}

#[tokio::test]
async fn a_controller_with_a_fixed_key() {
    refused(Mode::Fixed, Role::Controller, "c1", CONTROLLER).await;
}

#[tokio::test]
async fn an_edge_with_a_signed_token() {
    refused(Mode::Signed, Role::Edge, "e1", EDGE).await;
}

#[tokio::test]
async fn an_edge_with_a_fixed_key() {
    refused(Mode::Fixed, Role::Edge, "e1", EDGE).await;
}

/// What the roles are for still works.
#[tokio::test]
async fn a_gateway_writes_and_follows_the_catalogue_and_a_viewer_watches_topics() {
    use async_nats::jetstream::{self, consumer::pull};
    use futures::StreamExt;

    for mode in [Mode::Signed, Mode::Fixed] {
        let world = World::start(mode).await;
        let (gateway, _gateway_events) = world.client(Role::Gateway, "g1").await;
        let (viewer, _viewer_events) = world.client(Role::Viewer, "v1").await;
        let (controller, _controller_events) = world.client(Role::Controller, "c1").await;
        store(&gateway, "gc.cat.group.web", "one").await;
        let context = jetstream::new(gateway);
        let catalog = context.get_stream("CATALOG").await.unwrap();
        let ordered = catalog.create_consumer(pull::OrderedConfig::default()).await.unwrap();
        let mut messages = ordered.messages().await.unwrap();
        assert_eq!(messages.next().await.unwrap().unwrap().payload, "one");
        context.publish("gc.cat.group.web", "two".into()).await.unwrap().await.unwrap();
        assert_eq!(messages.next().await.unwrap().unwrap().payload, "two");

        let mut watched = viewer.subscribe("gc.t.>").await.unwrap();
        viewer.flush().await.unwrap();
        // A viewer cannot ask whether its subscription is in force, so the topic is written until it is seen.
        let seen = async { watched.next().await.unwrap() };
        let written = async {
            loop {
                store(&controller, "gc.w.rules.web", "topic").await;
            }
        };
        let message = tokio::select! { message = seen => message, () = written => unreachable!() };
        assert_eq!(message.subject.as_str(), "gc.t.rules.web");
    }
}
