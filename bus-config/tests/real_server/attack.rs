//! A host that has been taken over tries everything it must not be able to write, read or cause. One line per attempt; whatever it
//! tries, streams stay byte for byte as they were and nobody else receives anything.

use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Message};
use groupcast_bus_config::accounts::{Account, HOST_PAYLOAD_BYTES_MAX, Role};
use groupcast_bus_config::connect::settle;
use groupcast_bus_config::streams::ALL;
use groupcast_bus_config::subjects;
use serde_json::{Value, json};

mod attempts;
mod raw;

use attempts::{FORBIDDEN, HEADERS, RAW, REPLIES, UNREADABLE};

use crate::world::{DEADLINE, Mode, Witness, World, api, name, next, store};

/// Everything a stream holds and is: configuration, and every message with subject, headers, payload and time.
async fn contents(admin: &Client) -> Vec<Value> {
    let mut all = Vec::new();
    for stream in ALL {
        let info = api(admin, &format!("$JS.API.STREAM.INFO.{}", stream.name), json!({})).await;
        let (first, last) = (info["state"]["first_seq"].as_u64().unwrap(), info["state"]["last_seq"].as_u64().unwrap());
        all.push(json!([stream.name, info["config"], first, last, info["state"]["consumer_count"]]));
        for sequence in first..=last {
            all.push(
                api(admin, &format!("$JS.API.STREAM.MSG.GET.{}", stream.name), json!({ "seq": sequence })).await["message"]
                    .clone(),
            );
        }
    }
    let streams = api(admin, "$JS.API.STREAM.NAMES", json!({})).await;
    all.push(streams["streams"].clone());
    all
}

/// A world with something in it, an attacker `h1`, a victim `h2` and witnesses in both accounts.
struct Scene {
    world: World,
    admin: Client,
    attacker: Client,
    control: Witness,
    hosts: Witness,
}

impl Scene {
    async fn start(mode: Mode) -> Self {
        let world = World::start(mode).await;
        let admin = world.unconfined(Account::Control).await;
        for subject in ["gc.cat.group.web", "gc.cat.term.leader", "gc.reg.h.h2", "gc.w.leader", "gc.w.rules.web"] {
            store(&admin, subject, "as it was").await;
        }
        // The audit follows a moment later, by messages that witnesses see.
        let deadline = Instant::now() + DEADLINE;
        while api(&admin, "$JS.API.STREAM.INFO.AUDIT", json!({})).await["state"]["messages"] != 3 {
            assert!(Instant::now() < deadline, "the audit does not follow");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (attacker, mut events) = world.client(Role::Host, "h1").await;
        // Read, so that nothing waits: denials are expected here by the hundred.
        tokio::spawn(async move { while events.next().await.is_some() {} });
        let control = Witness::start(&world, Account::Control).await;
        let hosts = Witness::start(&world, Account::Hosts).await;
        Self { world, admin, attacker, control, hosts }
    }

    /// What both accounts have seen of the attacker's doing up to now: all but its own rightful requests and the tests' traffic.
    async fn effects(&mut self) -> Vec<String> {
        settle(&self.attacker, DEADLINE).await.unwrap();
        let mut effects = Vec::new();
        for message in self.control.seen().await {
            effects.push((Account::Control, message));
        }
        for message in self.hosts.seen().await {
            effects.push((Account::Hosts, message));
        }
        let rightful = |message: &Message| {
            let subject = message.subject.as_str();
            subject.starts_with("_INBOX_h1.")
                || subject.starts_with("_INBOX.witness")
                || subject.starts_with("_INBOX.c1.")
                || subject.starts_with("_INBOX_h2.") && message.payload.is_empty()
                || subject.starts_with("$JS.EVENT.ADVISORY.API")
                || subjects::host_of(subject).is_some_and(|host| host.as_str() == "h1") && !subject.starts_with("gc.ctl")
        };
        // How the server feeds AUDIT: heartbeats, and everything again should a pause make it start over.
        let feeding = |message: &Message| {
            let reply = message.reply.as_deref().unwrap_or_default();
            let ours = ["$JS.S.", "$JSC.", "$JS.FC.", "$JS.EVENT.ADVISORY.CONSUMER."]
                .iter()
                .any(|root| message.subject.starts_with(root));
            ours || reply.starts_with("$JSC.") || reply.starts_with("$JS.FC.") || reply.contains(".JS_SRC_")
        };
        effects.retain(|(_, message)| !rightful(message) && !feeding(message));
        let line = |(account, message): (Account, Message)| {
            let reply = message.reply.map_or(String::new(), |reply| format!(" reply {reply}"));
            format!("{} {}{reply}: {}", account.name(), message.subject, String::from_utf8_lossy(&message.payload))
        };
        effects.into_iter().map(line).collect()
    }
}

async fn publishing(mode: Mode) {
    let mut scene = Scene::start(mode).await;
    let before = contents(&scene.admin).await;
    scene.effects().await;
    for (subject, cause) in FORBIDDEN {
        let inbox = scene.attacker.new_inbox();
        let mut answer = scene.attacker.subscribe(inbox.clone()).await.unwrap();
        scene.attacker.publish(*subject, "evil".into()).await.unwrap();
        scene.attacker.publish_with_reply(*subject, inbox, "{}".into()).await.unwrap();
        for (header, value) in [("Nats-Expected-Last-Subject-Sequence", "0"), ("Nats-Batch-Commit", "1")] {
            let mut headers = HeaderMap::new();
            headers.insert(header, value);
            scene.attacker.publish_with_headers(*subject, headers, "evil".into()).await.unwrap();
        }
        let effects = scene.effects().await;
        assert!(effects.is_empty(), "{subject}: a host could {cause}: {effects:#?}");
        let got = tokio::time::timeout(Duration::ZERO, futures::StreamExt::next(&mut answer)).await;
        assert!(got.is_err(), "{subject}: a host could {cause}: {got:?}");
    }
    assert_eq!(contents(&scene.admin).await, before);
    nothing_waits_to_be_stored(&scene.admin, &before).await;
}

/// The next message of every stream gets the very next sequence: nothing was stored behind the comparison's back.
async fn nothing_waits_to_be_stored(admin: &Client, before: &[Value]) {
    for (stream, subject) in [("CATALOG", "gc.cat.group.web"), ("REGISTRY", "gc.reg.h.h2"), ("TOPICS", "gc.w.leader")] {
        let last = before.iter().find(|entry| entry[0] == stream).unwrap()[3].as_u64().unwrap();
        assert_eq!(store(admin, subject, "next").await, last + 1, "{stream}");
    }
}

async fn replying(mode: Mode) {
    let mut scene = Scene::start(mode).await;
    let (controller, mut controller_events) = scene.world.client(Role::Controller, "c1").await;
    tokio::spawn(async move { while controller_events.next().await.is_some() {} });
    let (victim, _victim_events) = scene.world.client(Role::Host, "h2").await;
    let mut victim_receives = Vec::new();
    for subject in
        ["gc.t.rules.>", "gc.t.scope.>", "gc.t.members.>", "gc.t.host.h2", "gc.ctl.h2", "gc.answer.h2.*", "_INBOX_h2.>"]
    {
        victim_receives.push(victim.subscribe(subject).await.unwrap());
    }
    settle(&victim, DEADLINE).await.unwrap();
    let mut services = Vec::new();
    for subject in subjects::SERVICES_ALL {
        services.push(controller.subscribe(subject).await.unwrap());
    }
    settle(&controller, DEADLINE).await.unwrap();
    let before = contents(&scene.admin).await;
    scene.effects().await;
    for (service, own) in services.iter_mut().zip(subjects::services(&name("h1"))) {
        for reply in REPLIES {
            scene.attacker.publish_with_reply(own.clone(), *reply, "evil".into()).await.unwrap();
            scene.attacker.publish(own.clone(), "good".into()).await.unwrap();
            // A controller that answers through the reply field is a bug; the bus stops that too. Where the reply is one of the
            // server's own (`_R_`, `$JS.ACK`), the request is refused on the attacker's side and never arrives.
            loop {
                let request = next(service, &format!("{own} with reply {reply}")).await;
                assert_eq!(request.subject.as_str(), own);
                let Some(to) = request.reply else { break };
                assert_ne!(to.as_str(), *reply, "the reply crossed unchanged");
                for _ in 0..2 {
                    controller.publish(to.clone(), "answer".into()).await.unwrap();
                }
                settle(&controller, DEADLINE).await.unwrap();
            }
            let effects = scene.effects().await;
            assert!(effects.is_empty(), "{own} with reply {reply}: {effects:#?}");
        }
    }
    assert_eq!(contents(&scene.admin).await, before);
    // The victim's first message is the one sent now.
    scene.admin.publish("gc.ctl.h2", "end".into()).await.unwrap();
    let mut first = futures::stream::select_all(victim_receives);
    let got = loop {
        let message = tokio::time::timeout(DEADLINE, futures::StreamExt::next(&mut first)).await.unwrap().unwrap();
        // Its own round trip.
        if message.subject.starts_with("_INBOX_h2.") && message.payload.is_empty() {
            continue;
        }
        break message;
    };
    assert_eq!((got.subject.as_str(), &got.payload[..]), ("gc.ctl.h2", &b"end"[..]));
}

async fn headers(mode: Mode) {
    let mut scene = Scene::start(mode).await;
    let before = contents(&scene.admin).await;
    scene.effects().await;
    for own in subjects::services(&name("h1")) {
        for (header, value) in HEADERS {
            let mut headers = HeaderMap::new();
            headers.insert(*header, *value);
            scene.attacker.publish_with_headers(own.clone(), headers.clone(), "evil".into()).await.unwrap();
            scene.attacker.publish_with_reply_and_headers(own.clone(), "gc.w.leader", headers, "evil".into()).await.unwrap();
            let effects = scene.effects().await;
            assert!(effects.is_empty(), "{own} with {header}: {value}: {effects:#?}");
        }
        // Traces are sent behind the scenes, in order: once one that the attacker may have has come, no other is on its way.
        let inbox = scene.attacker.new_inbox();
        let mut traces = scene.attacker.subscribe(inbox.clone()).await.unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Trace-Dest", inbox);
        scene.attacker.publish_with_headers(own.clone(), headers, "good".into()).await.unwrap();
        next(&mut traces, "trace").await;
        let mut all = HeaderMap::new();
        HEADERS.iter().for_each(|(header, value)| all.append(*header, *value));
        scene.attacker.publish_with_headers(own.clone(), all, "evil".into()).await.unwrap();
        let effects = scene.effects().await;
        assert!(effects.is_empty(), "{own} with all headers: {effects:#?}");
    }
    assert_eq!(contents(&scene.admin).await, before);
    nothing_waits_to_be_stored(&scene.admin, &before).await;
}

async fn subscribing(mode: Mode) {
    let scene = Scene::start(mode).await;
    let (victim, _victim_events) = scene.world.client(Role::Host, "h2").await;
    let (controller, _controller_events) = scene.world.client(Role::Controller, "c1").await;
    let mut stolen = Vec::new();
    for subject in UNREADABLE {
        stolen.push(scene.attacker.subscribe(*subject).await.unwrap());
        for group in ["snapshots", "controllers", "a"] {
            stolen.push(scene.attacker.queue_subscribe(*subject, group.into()).await.unwrap());
        }
    }
    let mut own = scene.attacker.subscribe("gc.ctl.h1").await.unwrap();
    settle(&scene.attacker, DEADLINE).await.unwrap();
    let mut services = Vec::new();
    for subject in subjects::SERVICES_ALL {
        services.push(controller.queue_subscribe(subject, "snapshots".into()).await.unwrap());
    }
    settle(&controller, DEADLINE).await.unwrap();

    // One of everything that goes by while hosts and controllers live; ten of what a queue group would split.
    for subject in ["gc.w.leader", "gc.w.host.h2", "gc.w.rules.web", "gc.cat.group.web", "gc.audit.cat.group.web", "gc.reg.h.h2"]
    {
        store(&controller, subject, "secret").await;
    }
    for (service, own) in services.iter_mut().zip(subjects::services(&name("h2"))) {
        for _ in 0..10 {
            victim.publish(own.clone(), "secret".into()).await.unwrap();
            next(service, &own).await;
        }
    }
    for subject in ["gc.ctl.h2", "gc.answer.h2.t1", "gc.replica", "_INBOX.c1.x"] {
        controller.publish(subject, "secret".into()).await.unwrap();
    }
    victim.publish("_INBOX_h2.x", "secret".into()).await.unwrap();
    settle(&victim, DEADLINE).await.unwrap();
    controller.publish("gc.ctl.h1", "end".into()).await.unwrap();
    assert_eq!(next(&mut own, "own orders").await.payload, "end");
    for subscription in &mut stolen {
        let got = tokio::time::timeout(Duration::ZERO, futures::StreamExt::next(subscription)).await;
        // A refused subscription stays open on the client's side and silent.
        assert!(!matches!(got, Ok(Some(_))), "{got:?}");
    }
}

/// The largest payload is a rightful request of this host and nothing else. [`too_large`] sends one byte more.
async fn huge(mode: Mode) {
    let mut scene = Scene::start(mode).await;
    let (victim, _victim_events) = scene.world.client(Role::Host, "h2").await;
    let (controller, _controller_events) = scene.world.client(Role::Controller, "c1").await;
    let mut beats = controller.subscribe(subjects::BEAT_ALL).await.unwrap();
    settle(&controller, DEADLINE).await.unwrap();
    let before = contents(&scene.admin).await;
    scene.effects().await;
    let (max, of_any) = (HOST_PAYLOAD_BYTES_MAX as usize, scene.attacker.server_info().max_payload);
    for _ in 0..20 {
        scene.attacker.publish("gc.beat.h1", vec![b'x'; max].into()).await.unwrap();
        assert_eq!(next(&mut beats, "largest").await.payload.len(), max);
    }
    assert!(scene.attacker.publish("gc.beat.h1", vec![b'x'; of_any + 1].into()).await.is_err(), "checked by the client library");
    let effects = scene.effects().await;
    assert!(effects.is_empty(), "{effects:#?}");
    victim.publish("gc.beat.h2", "alive".into()).await.unwrap();
    assert_eq!(next(&mut beats, "beat").await.subject.as_str(), "gc.beat.h2");
    assert_eq!(contents(&scene.admin).await, before);
}

/// Bytes that no client library sends. Whether the server minds or not, they end at most the attacker's own connection.
async fn bytes(mode: Mode) {
    let mut scene = Scene::start(mode).await;
    let (victim, _victim_events) = scene.world.client(Role::Host, "h2").await;
    let before = contents(&scene.admin).await;
    scene.effects().await;
    for (text, filler) in RAW {
        let mut connection = raw::Connection::open(&scene.world, "h1").await;
        connection.send(text, *filler).await;
        let said = connection.end().await;
        let effects = scene.effects().await;
        assert!(effects.is_empty(), "{text:?}: {effects:#?}");
        assert!(!said.contains("MSG "), "{text:?} was told {said:?}");
        settle(&victim, DEADLINE).await.unwrap();
        scene.hosts.seen().await;
    }
    assert_eq!(contents(&scene.admin).await, before);
    nothing_waits_to_be_stored(&scene.admin, &before).await;
}

/// Every request that names a reply makes the server remember it for an answer that never comes; it must forget soon.
async fn remembering(mode: Mode) {
    let scene = Scene::start(mode).await;
    for index in 0..1_000 {
        scene.attacker.publish_with_reply("gc.beat.h1", format!("reply.{index}"), "evil".into()).await.unwrap();
    }
    settle(&scene.attacker, DEADLINE).await.unwrap();
    let deadline = Instant::now() + DEADLINE;
    loop {
        let accounts = scene.world.server.monitor("/accountz").await.unwrap();
        let mut held = 0;
        for account in accounts["accounts"].as_array().unwrap() {
            let path = format!("/accountz?acc={}", account.as_str().unwrap());
            let detail = scene.world.server.monitor(&path).await.unwrap();
            held += detail["account_detail"]["responses"].as_object().map_or(0, |responses| responses.len());
        }
        if held == 0 {
            break;
        }
        assert!(Instant::now() < deadline, "{held} replies still remembered");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What a host sends at once is bounded by the server, at the bound.
async fn too_large(mode: Mode) {
    let world = World::start(mode).await;
    for (more, refused) in [(0, false), (1, true)] {
        let bytes = HOST_PAYLOAD_BYTES_MAX as usize + more;
        let mut connection = raw::Connection::open(&world, "h1").await;
        connection.send(&format!("PUB gc.ack.h1 {bytes}\r\n"), bytes).await;
        let said = connection.end().await;
        assert_eq!(said.contains("Maximum Payload"), refused, "{bytes}: {said}");
    }
}

/// Shows that the witnesses see a breach where there is one, and why controllers may not use the reply field: a service that
/// is allowed to answers wherever the asking host says, in the hosts' account.
async fn control_of_the_experiment(mode: Mode) {
    let mut scene = Scene::start(mode).await;
    let (victim, _victim_events) = scene.world.client(Role::Host, "h2").await;
    let mut victim_inbox = victim.subscribe("gc.answer.h2.*").await.unwrap();
    settle(&victim, DEADLINE).await.unwrap();
    let mut service = scene.admin.subscribe(subjects::BEAT_ALL).await.unwrap();
    settle(&scene.admin, DEADLINE).await.unwrap();
    scene.effects().await;
    scene.attacker.publish_with_reply("gc.beat.h1", "gc.answer.h2.t1", "evil".into()).await.unwrap();
    let request = next(&mut service, "beat").await;
    scene.admin.publish(request.reply.unwrap(), "steered".into()).await.unwrap();
    assert_eq!(next(&mut victim_inbox, "steered answer").await.payload, "steered");
    let effects = scene.effects().await;
    assert!(effects.contains(&"HOSTS gc.answer.h2.t1: steered".to_owned()), "{effects:#?}");
}

macro_rules! in_both_modes {
    ($($name:ident: $attack:ident;)*) => {
        mod signed_tokens {
            use super::Mode;
            $(#[tokio::test] async fn $name() { super::$attack(Mode::Signed).await; })*
        }
        mod fixed_keys {
            use super::Mode;
            $(#[tokio::test] async fn $name() { super::$attack(Mode::Fixed).await; })*
        }
    };
}

in_both_modes! {
    a_host_publishes_nothing_but_its_own_requests: publishing;
    a_host_steers_no_answer_through_the_reply_field: replying;
    a_host_causes_nothing_with_headers: headers;
    a_host_reads_and_steals_nothing: subscribing;
    a_host_hurts_nobody_with_size: huge;
    a_host_causes_nothing_with_raw_bytes: bytes;
    a_host_fills_no_memory_with_replies: remembering;
    a_host_sends_no_message_beyond_its_limit: too_large;
    the_witnesses_would_see_it: control_of_the_experiment;
}
