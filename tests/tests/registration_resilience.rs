//! CASES.md D, what the network does: many silent at once, a bus that is away, streams that move.

use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::subjects;
use groupcast_control::log::Log;
use groupcast_tests::World;
use groupcast_tests::control::{Controller, Plane};
use groupcast_tests::enrolled::{
    GRACE, Guest, LEAD, LEASE, SHORT, Sentinel, allowed, audited, causes, entries, gone, host_entry, judging, plane, plane_with,
};
use groupcast_tests::gateway::{Gateway, User, groupcast, token};
use groupcast_tests::world::{DEADLINE, eventually};

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("h{i:03}")).collect()
}

/// So many hosts of one template, registered and beating.
async fn fleet(plane: &Plane, template: &str, names: &[String]) -> Vec<Guest> {
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    allowed(plane, template, &all).await;
    let mut guests = Vec::new();
    for (number, name) in (1_000..).zip(names) {
        let guest = Guest::new(plane, name, 1).await;
        guest.settle(template, &format!("w-{name}"), number).await;
        guests.push(guest);
    }
    guests
}

async fn frozen(plane: &mut Plane) -> usize {
    missing(plane).await.len()
}

/// How many hosts of each frozen template are missing.
async fn missing(plane: &mut Plane) -> Vec<u64> {
    let judge = judging(plane).await;
    let status = plane.controllers[judge].status().unwrap_or_default();
    let frozen = status["registrations"]["frozen"].as_array().cloned().unwrap_or_default();
    frozen.iter().filter_map(|record| record["missing"].as_u64()).collect()
}

async fn freezes(plane: &mut Plane) {
    let start = Instant::now();
    while frozen(plane).await == 0 {
        assert!(start.elapsed() < DEADLINE, "nothing freezes");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d23_too_many_silent_at_once_freeze_until_they_return_or_an_operator_confirms() {
    let mut plane = plane(2).await;
    let guests = fleet(&plane, "vm", &names(8)).await;
    let observer = plane.bus.observer("observer").await;
    let secret = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let admin = User::new(&gateway, &secret).await;
    let before = entries(&observer).await;
    // Silent, and not gone: they enrol again only if somebody tells them to.
    guests[..5].iter().for_each(|guest| guest.beats(false));
    freezes(&mut plane).await;
    audited(&observer, "gc.reg.g.vm", "frozen").await;
    // Whoever is of another template goes meanwhile.
    Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
    let hosts =
        |all: &std::collections::BTreeMap<String, serde_json::Value>| all.keys().filter(|s| s.starts_with("gc.reg.w.")).count();
    assert_eq!(hosts(&entries(&observer).await), hosts(&before), "nothing is deleted");
    let judge = judging(&mut plane).await;
    let (_, metrics) = plane.controllers[judge].get("/metrics").expect("metrics");
    assert!(metrics.contains("groupcast_registrations_frozen_templates 1"), "the alarm");
    let listed = admin.get("/v1/registrations-frozen").await;
    assert_eq!((listed.status, listed.body["items"][0]["template"].as_str()), (200, Some("vm")), "{}", listed.text);
    // They return: it thaws by itself, and nothing has happened.
    guests[..5].iter().for_each(|guest| guest.beats(true));
    let start = Instant::now();
    while frozen(&mut plane).await > 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "it never thaws");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    audited(&observer, "gc.reg.g.vm", "thawed").await;
    eventually("everything is as before", || async { entries(&observer).await == before }).await;
    assert!(guests.iter().all(|guest| guest.told() == 0));
    // They are gone for good, and an operator says so.
    guests[..5].iter().for_each(|guest| {
        guest.forget();
        guest.beats(false);
    });
    freezes(&mut plane).await;
    let url = gateway.url();
    let environment = [("GROUPCAST_GATEWAY", url.as_str()), ("GROUPCAST_TOKEN", secret.as_str())];
    let nothing = groupcast(&["registrations", "confirm", "other"], &environment);
    assert_eq!(nothing.code, 4, "{nothing:?}");
    let confirmed = groupcast(&["registrations", "confirm", "vm"], &environment);
    assert_eq!(confirmed.code, 0, "{confirmed:?}");
    for guest in &guests[..5] {
        gone(&observer, guest.id.as_str()).await;
    }
    audited(&observer, "gc.reg.h.h000", "confirmed by an operator").await;
    let shown = groupcast(&["get", "registrations", "-o", "wide"], &environment);
    assert!(shown.code == 0 && shown.stdout.matches("live").count() == 3, "{shown:?}");
    let shown = groupcast(&["get", "hosts", "-o", "wide"], &environment);
    assert!(shown.code == 0 && shown.stdout.contains("ago"), "{shown:?}");
}

/// The operator's word was kept by the leader alone, and was lost with it.
#[tokio::test(flavor = "multi_thread")]
async fn d23_what_an_operator_confirmed_holds_for_whoever_leads_next() {
    let slow: Vec<&str> = SHORT.iter().copied().chain(["--registration-deletions-per-second", "1"]).collect();
    let mut plane = plane_with(2, &slow).await;
    let guests = fleet(&plane, "vm", &names(9)).await;
    let observer = plane.bus.observer("observer").await;
    let secret = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    guests[..6].iter().for_each(Guest::vanish);
    // Half of them freeze it; the word holds for those who are silent when it is said.
    let start = Instant::now();
    while missing(&mut plane).await != [6] {
        assert!(start.elapsed() < DEADLINE, "they are not missed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let url = gateway.url();
    let environment = [("GROUPCAST_GATEWAY", url.as_str()), ("GROUPCAST_TOKEN", secret.as_str())];
    let confirmed = groupcast(&["registrations", "confirm", "vm"], &environment);
    assert_eq!(confirmed.code, 0, "{confirmed:?}");
    // Answered, so it is written: with the names of those it holds for.
    audited(&observer, "gc.reg.g.vm", "6 silent hosts confirmed by an operator").await;
    let judge = judging(&mut plane).await;
    plane.controllers[judge].kill();
    plane.controllers.remove(judge);
    for guest in &guests[..6] {
        gone(&observer, guest.id.as_str()).await;
    }
    eventually("nothing is left of the record", || async { !entries(&observer).await.contains_key("gc.reg.g.vm") }).await;
    for guest in &guests[6..] {
        assert!(host_entry(&observer, guest.id.as_str()).await.is_some(), "{}", guest.id);
    }
    let frozen = causes(&observer, "gc.reg.g.vm").await.iter().filter(|cause| cause.contains("frozen")).count();
    assert_eq!(frozen, 1, "nobody had to be asked a second time");
}

#[tokio::test(flavor = "multi_thread")]
async fn d24_fewer_are_deleted_at_a_bounded_rate() {
    let slow: Vec<&str> = SHORT.iter().copied().chain(["--registration-deletions-per-second", "1"]).collect();
    let plane = plane_with(1, &slow).await;
    let guests = fleet(&plane, "vm", &names(10)).await;
    let observer = plane.bus.observer("observer").await;
    guests[..3].iter().for_each(|guest| {
        guest.forget();
        guest.beats(false);
    });
    for guest in &guests[..3] {
        gone(&observer, guest.id.as_str()).await;
    }
    // By the clock of the bus, which writes down when it took each. All at once it would be if the rate were not bounded.
    let mut at = Vec::new();
    for guest in &guests[..3] {
        let subject = subjects::registry_host(&guest.id);
        let trace = Log::registry(observer.clone()).last(&subject).await.expect("the bus answers").expect("a trace");
        at.push(trace.at);
    }
    at.sort();
    let apart = at[2].duration_since(at[0]).expect("sorted");
    assert!(apart > Duration::from_secs(1), "three at one a second, within {apart:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn d25_a_bus_that_is_down_for_ten_leases_deletes_nothing() {
    let mut plane = plane(2).await;
    let guests = fleet(&plane, "vm", &names(3)).await;
    judging(&mut plane).await;
    let before = entries(&plane.bus.observer("observer").await).await;
    plane.bus.server().kill();
    tokio::time::sleep(10 * LEASE).await;
    plane.bus.server().restart().await.expect("the server comes back");
    let observer = plane.bus.observer("observer-2").await;
    judging(&mut plane).await;
    Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
    let after = entries(&observer).await;
    let is_same = |subject: &String| before.get(subject).map(|e| &e["workloads"]) == after.get(subject).map(|e| &e["workloads"]);
    assert!(before.len() == after.len() && before.keys().all(is_same), "{before:?} {after:?}");
    assert!(guests.iter().all(|guest| guest.told() == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn d26_after_a_stream_leader_change_lease_and_grace_begin_anew() {
    let world = World::three().await;
    let more: Vec<&str> = SHORT.iter().copied().chain(["--replicas", "3"]).collect();
    let observer = world.observer("observer").await;
    let mut plane_like = Guests { world };
    plane_like.allow(&observer, &["h1", "h2"]).await;
    let mut controller = Controller::start(&plane_like.world.url(0), "c1", LEAD, &more);
    controller.ready().await;
    controller.publishing().await;
    let (one, two) = (plane_like.guest("h1").await, plane_like.guest("h2").await);
    two.settle("vm", "w2", 6).await;
    for attempt in 1..=MOVING_ATTEMPTS_MAX {
        one.settle("vm", "w1", 5).await;
        one.vanish();
        let slowest = keep_moving(&observer, 2 * (LEASE + GRACE)).await;
        if still_there(&observer, "h1").await {
            break;
        }
        // On a machine that is too slow to move the stream often enough nothing is shown: once more.
        assert!(slowest >= LEASE, "it was deleted while the stream moved at least every {slowest:?}");
        assert!(attempt < MOVING_ATTEMPTS_MAX, "the stream never moved at least every {LEASE:?}");
    }
    gone(&observer, "h1").await;
    assert!(host_entry(&observer, "h2").await.is_some());
}

/// How often it is tried to move a stream often enough.
const MOVING_ATTEMPTS_MAX: u32 = 5;

/// Moves the leader of REGISTRY again and again; the longest time between two moves that were made.
async fn keep_moving(client: &async_nats::Client, during: Duration) -> Duration {
    let (start, mut moved, mut slowest) = (Instant::now(), Instant::now(), Duration::ZERO);
    while start.elapsed() < during {
        let answer = client.request(subjects::js_api("STREAM.LEADER.STEPDOWN", "REGISTRY"), "".into()).await;
        let answer = answer.ok().and_then(|message| serde_json::from_slice::<serde_json::Value>(&message.payload).ok());
        if answer.is_some_and(|answer| answer["success"] == true) {
            slowest = slowest.max(moved.elapsed());
            moved = Instant::now();
        }
        tokio::time::sleep(LEASE / 4).await;
    }
    slowest.max(moved.elapsed())
}

/// Reads may fail while the stream has no leader.
async fn still_there(client: &async_nats::Client, host: &str) -> bool {
    for _ in 0..50 {
        if host_entry(client, host).await.is_some() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    false
}

/// Guests on a bus without a plane.
struct Guests {
    world: World,
}

impl Guests {
    async fn allow(&mut self, client: &async_nats::Client, hosts: &[&str]) {
        use groupcast_control::catalog::Catalog;
        use groupcast_control::change::{Change, Expected, Write};
        use groupcast_control::document::Document;
        use groupcast_control::registration::grant::Grant;
        let template = groupcast_tests::enrolled::template("vm", hosts);
        let mut writes = vec![Write::put(Document::Template(std::sync::Arc::new(template)), Expected::Any)];
        for host in hosts {
            let wide = groupcast_policy::net::Prefix::v4(0x0a00_0000, 8).expect("a prefix");
            let grant = Grant::new(host.parse().expect("an id"), vec![wide]);
            writes.push(Write::put(grant.document().expect("a document"), Expected::Any));
        }
        let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
        Catalog::new(client.clone()).write(&change, None).await.expect("written");
    }

    async fn guest(&self, name: &str) -> Guest {
        let (client, _events) = self.world.connect(1, Role::Host, name).await;
        Guest::with(client, name, 1).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d26_a_controller_that_stood_still_deletes_nobody_who_lived_on_meanwhile() {
    let mut plane = plane(2).await;
    let guests = fleet(&plane, "vm", &names(3)).await;
    let observer = plane.bus.observer("observer").await;
    let before = entries(&observer).await;
    for _ in 0..2 {
        // SIGSTOP for longer than lease and grace: the other takes over, and this one wakes up with an old idea of who was heard when.
        let judge = judging(&mut plane).await;
        plane.controllers[judge].pause();
        guests[0].beats_for(LEASE + GRACE).await;
        plane.controllers[judge].resume();
        plane.leader().await;
        judging(&mut plane).await;
        Sentinel::new(&plane, &format!("sentinel{judge}")).await.passes(&observer).await;
        assert_eq!(entries(&observer).await, before);
    }
    assert!(guests.iter().all(|guest| guest.told() == 0));
}
