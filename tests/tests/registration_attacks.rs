//! Hosts that try to be somebody else, on a bus with real credentials; joining with a token; and a credential that is rotated.

use std::time::{Duration, SystemTime};

use groupcast_bus_config::credentials::OwnKey;
use groupcast_bus_config::subjects;
use groupcast_messages::{Ack, Beat, HostState, Register};
use groupcast_policy::net::Prefix;
use groupcast_tests::enrolled::{Guest, SHORT, asked, audited, entries, gone, incarnation, refusal, refusals};
use groupcast_tests::gateway::groupcast;
use groupcast_tests::installation::{Guarded, Installation, denied, id};
use groupcast_tests::world::eventually;
use serde_json::json;

fn ten(third: u32) -> Prefix {
    Prefix::v4(0x0a00_0000 + (third << 8), 24).expect("a prefix")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_speaks_as_another_is_refused_by_the_bus_or_the_registrar() {
    let mut world = Guarded::start(&[], &SHORT).await;
    world.allow("vm", &["h1"], ten(0)).await;
    world.allow("theirs", &["h2"], ten(1)).await;
    let (one, two) = (world.mint("h1", "h1.creds"), world.mint("h2", "h2.creds"));
    let (h1, _events) = world.connect("h1", &one).await;
    let (h2, mut events) = world.connect("h2", &two).await;
    let victim = Guest::with(h1, "h1", 1).await;
    assert_eq!(victim.settle("vm", "w1", 5).await, 1);
    let before = entries(&world.client).await;
    // AUDIT begins to follow up to a second after it is made: what comes before that it may never see.
    audited(&world.client, "gc.reg.h.h1", "").await;

    // On the bus: beat, register, acknowledge and read as h1.
    let beat = Beat { boot: 1, count: 1, term: 0, version: String::new(), state: HostState::Enforcing };
    let register = Register { boot: 9, template: Some("vm".into()), workloads: vec![asked("w9", 9)] };
    let ack = Ack { term: 1, state: HostState::Enforcing, reached: vec![] };
    let victim_id = id("h1");
    let attempts = [
        (subjects::beat(&victim_id), beat.encode()),
        (subjects::register(&victim_id), register.encode()),
        (subjects::ack(&victim_id), ack.encode()),
        (subjects::snap(&victim_id), vec![1]),
        (subjects::registry_host(&victim_id), b"{}".to_vec()),
        ("gc.registrations".to_owned(), b"\"frozen\"".to_vec()),
    ];
    for (subject, payload) in attempts {
        h2.publish(subject.clone(), payload.into()).await.expect("sent");
        denied(&mut events, &subject).await;
    }
    for subject in [subjects::read_host(&victim_id), subjects::answers(&victim_id), subjects::ctl(&victim_id)] {
        let _none = h2.subscribe(subject.clone()).await.expect("sent");
        denied(&mut events, &subject).await;
    }
    // With the registrar: another's template, another's address, an address that nobody granted.
    let thief = Guest::with(h2.clone(), "h2", 1).await;
    for (template, number, words) in [
        ("vm", 0x0105, "may not be used by host h2"),
        ("theirs", 5, "in no network granted to host h2"),
        ("theirs", 0x0205, "in no network granted to host h2"),
    ] {
        let (retryable, reason) = refusal(&thief.enrol(template, vec![asked("w2", number)]).await);
        assert!(!retryable && reason.contains(words), "{reason}");
    }
    world.allow("theirs", &["h2"], Prefix::v4(0x0a00_0000, 8).expect("a prefix")).await;
    let (_, reason) = refusal(&thief.enrol("theirs", vec![asked("w2", 5)]).await);
    assert!(reason.contains("is held by workload w1 on host h1"), "{reason}");
    let (_, reason) = refusal(&thief.enrol("theirs", vec![asked("w1", 0x0105)]).await);
    assert!(reason.contains("is alive on host h1"), "{reason}");
    let mut after = entries(&world.client).await;
    assert!(after.remove("gc.reg.r.h2").is_some(), "a trace of the refusals");
    assert_eq!(after, before, "and nothing else is written");
    audited(&world.client, "gc.reg.r.h2", "refused").await;
    // Each of the attempts, not only the first, although they came at once.
    for words in [
        "may not be used by host h2",
        "address 10.0.0.5/32 is in no network granted to host h2",
        "address 10.0.2.5/32 is in no network granted to host h2",
        "is held by workload w1 on host h1",
        "is alive on host h1",
    ] {
        eventually(&format!("AUDIT tells {words:?}"), || async {
            refusals(&world.client, "h2").await.iter().any(|reason| reason.contains(words))
        })
        .await;
    }

    // Beats that the bus refuses keep nobody alive.
    victim.forget();
    victim.beats(false);
    let h1 = id("h1");
    let feign = tokio::spawn(async move {
        loop {
            let beat = Beat { boot: 1, count: 1, term: 0, version: String::new(), state: HostState::Enforcing };
            let _ = h2.publish(subjects::beat(&h1), beat.encode().into()).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    gone(&world.client, "h1").await;
    feign.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_token_works_once_for_one_host_a_short_time_and_binds_to_the_first_key() {
    let world = Installation::start(&[]).await;
    let admin = &world.admin;
    assert_eq!(world.host(&["token", "h9"]).code, 4, "nobody");
    world.does(&["add", "h1", "--networks", "10.0.0.0/24"]);
    let token = world.join_token("h1");

    let anybody = admin.with_token("");
    let (key, other) = (OwnKey::new(), OwnKey::new());
    let join = |token: &str, key: &OwnKey| json!({ "token": token, "public_key": key.public_key(), "proof": key.prove(token).expect("signed") });
    let wrong = anybody.post("/v1/join", join("gcj_h1.AAAA", &key), &[]).await;
    assert_eq!(wrong.status, 403, "{}", wrong.text);
    let joined = anybody.post("/v1/join", join(&token, &key), &[]).await;
    assert_eq!((joined.status, joined.body["host"].as_str()), (200, Some("h1")), "{}", joined.text);
    let again = anybody.post("/v1/join", join(&token, &key), &[]).await;
    assert_eq!(again.status, 200, "whose answer was lost asks again: {}", again.text);
    let second = anybody.post("/v1/join", join(&token, &other), &[]).await;
    assert!(second.status == 403 && second.text.contains("used by another key"), "{}", second.text);

    // What it got is h1 on the bus, and only with the key that asked.
    let credential = joined.body["credential"].as_str().expect("a credential");
    let file = world.folder.join("h1.creds");
    key.save(&id("h1"), credential, &file).expect("saved");
    let (client, _events) = world.connect("h1", &file).await;
    let guest = Guest::with(client, "h1", 1).await;
    assert_eq!(guest.settle("vm", "w1", 5).await, 1);
    let stolen = world.folder.join("stolen.creds");
    other.save(&id("h1"), credential, &stolen).expect("saved");
    assert!(!world.lets_in("h1", &stolen).await, "a credential without its key is nothing");

    // A new token is another; one that is not used in time is void.
    let short = admin.post("/v1/hosts/h1/token", json!({ "life": "1s" }), &[]).await;
    let short = short.body["token"].as_str().expect("a token").to_owned();
    assert_eq!(anybody.post("/v1/join", join(&token, &key), &[]).await.status, 403, "the earlier one is void");
    let expires_at = SystemTime::now() + Duration::from_secs(2);
    eventually("it has expired", || async { SystemTime::now() > expires_at }).await;
    let late = anybody.post("/v1/join", join(&short, &other), &[]).await;
    assert!(late.status == 403 && late.text.contains("expired"), "{}", late.text);

    // Taken away: what it was granted, and what it enrolled.
    let removed = admin.delete("/v1/hosts/h1", &[]).await;
    assert_eq!((removed.status, removed.body["workloads"].as_u64()), (200, Some(1)), "{}", removed.text);
    gone(&world.client, "h1").await;
    let (_, reason) = refusal(&guest.enrol("vm", vec![asked("w1", 5)]).await);
    assert!(reason.contains("host h1 is not known"), "{reason}");
}

/// A host joined with the public key of another. When it was removed, that key was revoked, and the other was cut off for good.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_joins_with_the_key_of_another() {
    let world = Installation::start(&[]).await;
    for host in ["h1", "h2"] {
        world.does(&["add", host, "--networks", "10.0.0.0/24"]);
    }
    let (victim, file) = world.joined("h1", "h1.creds").await;
    let (token, own) = (world.join_token("h2"), OwnKey::new());
    let proofs =
        [own.prove(&token).expect("signed"), victim.prove("gcj_h1.AAAA").expect("signed"), String::new(), "%".repeat(86)];
    for proof in proofs {
        let body = json!({ "token": token, "public_key": victim.public_key(), "proof": proof });
        let refused = world.admin.with_token("").post("/v1/join", body, &[]).await;
        assert!(refused.status == 403 && refused.text.contains("the proof"), "{}", refused.text);
    }
    assert!(world.listed("h2").is_empty(), "nothing was bound");
    let joined = world.join(&token, &own).await;
    assert_eq!(joined.status, 200, "its own token is still good: {}", joined.text);
    assert!(world.lets_in("h1", &file).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_is_rotated_without_a_gap() {
    let mut world = Guarded::start(&[], &SHORT).await;
    world.allow("vm", &["h1"], ten(0)).await;
    let authority = world.folder.join("authority.json");
    let file = world.mint("h1", "h1.creds");
    world.authority.save(&authority).expect("saved");
    let (client, _events) = world.connect("h1", &file).await;
    let guest = Guest::with(client, "h1", 1).await;
    guest.settle("vm", "w1", 5).await;
    let before = entries(&world.client).await;
    // A second credential into the same file; then the first is void.
    let (path, out) = (authority.display().to_string(), file.display().to_string());
    let added = groupcast(&["host", "add", "h1", "--authority", &path, "--out", &out], &[]);
    assert_eq!(added.code, 0, "{added:?}");
    let retired =
        groupcast(&["host", "retire", "h1", "--without-gateway", "--authority", &path, "--server", &world.server.url()], &[]);
    assert!(retired.code == 0 && retired.stderr.contains("1 credentials"), "{retired:?}");
    eventually("it speaks with the new one", || async {
        let asked = guest.enrol("vm", vec![asked("w1", 5)]);
        tokio::time::timeout(Duration::from_secs(2), asked).await.is_ok_and(|answer| incarnation(&answer) == 1)
    })
    .await;
    assert_eq!(entries(&world.client).await, before, "nobody noticed");
    assert_eq!(guest.told(), 0);
    // And without a new one it is cut off.
    let removed =
        groupcast(&["host", "remove", "h1", "--without-gateway", "--authority", &path, "--server", &world.server.url()], &[]);
    assert_eq!(removed.code, 0, "{removed:?}");
    gone(&world.client, "h1").await;
}
