//! Hosts that are removed, and what outlived them: keys nobody knew of, enrolments that were allowed once, credentials for ever.

use std::process::Stdio;
use std::time::{Duration, SystemTime};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity, Options};
use groupcast_bus_config::credentials::{Authority, OwnKey};
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::registration::grant::Grant;
use groupcast_messages::RegisterAnswer;
use groupcast_policy::net::Prefix;
use groupcast_tests::agent::{Agent, isolated, own};
use groupcast_tests::control::{Hold, Plane};
use groupcast_tests::enrolled::{
    Guest, SHORT, allowed, asked, audited, entries, gone, host_entry, incarnation, plane, plane_with, put_template, refusal,
    registered, template, workload_entry,
};
use groupcast_tests::gateway::{Gateway, User, groupcast, token};
use groupcast_tests::installation::{Guarded, Installation, denied, grant_of, id};
use groupcast_tests::world::eventually;
use serde_json::Value;

/// Its grant was deleted first: the second attempt found nothing, answered 404 and revoked nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_was_interrupted_goes_on_and_ends_with_nothing_left() {
    let mut world = Installation::start(&[]).await;
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    let (_, file) = world.joined("h1", "h1.creds").await;
    let (client, mut events) = world.connect("h1", &file).await;
    let guest = Guest::with(client, "h1", 1).await;
    guest.settle("vm", "w1", 5).await;
    // Nobody leads: the gateway answers 503 after it has taken the grant away.
    world.controller.kill();
    let failed = world.host(&["remove", "h1"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(workload_entry(&world.client, "w1").await.is_some() && world.lets_in("h1", &file).await, "it was interrupted");
    // Meanwhile it is neither granted anything nor forgotten.
    let again = world.host(&["add", "h1", "--networks", "10.0.0.0/8"]);
    assert!(again.code != 0 && again.stderr.contains("is being removed"), "{again:?}");
    assert_ne!(world.host(&["token", "h1"]).code, 0);
    assert_eq!(world.renew(&file).await.status, 403);
    assert_eq!(world.listed("h1").len(), 1, "it is known until it is revoked");

    world.start_controller().await;
    // Once the controller judges again, which takes a moment.
    eventually("the removal is finished", || async { world.host(&["remove", "h1"]).code == 0 }).await;
    denied(&mut events, "revoked").await;
    assert!(!world.lets_in("h1", &file).await, "its key is void");
    gone(&world.client, "h1").await;
    assert_eq!(grant_of(&world.client, "h1").await, None);
    assert_eq!(world.listed("h1"), Vec::<String>::new());
    assert_eq!(world.host(&["remove", "h1"]).code, 4, "and now there is nothing left");
    // Added again it is another host: what it had does not come back.
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    assert!(!world.lets_in("h1", &file).await);
    let renewed = world.renew(&file).await;
    if renewed.status == 200 {
        let (key, _) = OwnKey::of_file(&std::fs::read_to_string(&file).expect("a file")).expect("a key");
        key.save(&id("h1"), renewed.body["credential"].as_str().expect("a credential"), &file).expect("saved");
    }
    assert!(!world.lets_in("h1", &file).await, "a revoked key is void for ever, whatever is signed for it");
}

/// The servers were not told, and the second attempt found nothing to tell them.
#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_that_no_server_heard_is_told_by_the_next_attempt() {
    let world = Installation::start(&[]).await;
    let file = world.folder.join("h2.creds");
    world.does(&["add", "h2", "--out", &world.path("h2.creds")]);
    assert!(world.lets_in("h2", &file).await);
    let unreachable = ["remove", "h2", "--server", "nats://127.0.0.1:1"];
    assert_eq!(world.host(&unreachable).code, 1);
    assert!(world.lets_in("h2", &file).await, "nobody told the servers");
    world.does(&["remove", "h2"]);
    eventually("it is void", || async { !world.lets_in("h2", &file).await }).await;
    assert_eq!(world.host(&["remove", "h2"]).code, 4);
}

/// A second join forgot the first key, which then worked for ever, and `retire` knew no key that had joined.
#[tokio::test(flavor = "multi_thread")]
async fn every_key_ever_signed_is_listed_can_be_retired_and_dies_with_its_host() {
    let world = Installation::start(&[]).await;
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    world.does(&["add", "h1", "--out", &world.path("minted.creds")]);
    let minted = world.folder.join("minted.creds");
    let (first, one) = world.joined("h1", "one.creds").await;
    let (second, two) = world.joined("h1", "two.creds").await;
    let (of_minted, _) = OwnKey::of_file(&std::fs::read_to_string(&minted).expect("a file")).expect("a key");
    let mut all = vec![of_minted.public_key(), first.public_key(), second.public_key()];
    all.sort();
    assert_eq!(world.listed("h1"), all);
    let (_client, mut events) = world.connect("h1", &one).await;

    // Rotating: all but the one that is named, also where several were made in one second.
    world.does(&["retire", "h1", "--keep", &second.public_key()]);
    denied(&mut events, "revoked").await;
    assert_eq!(world.listed("h1"), [second.public_key()]);
    for (file, lets_in) in [(&minted, false), (&one, false), (&two, true)] {
        assert_eq!(world.lets_in("h1", file).await, lets_in, "{}", file.display());
        assert_eq!(world.renew(file).await.status, if lets_in { 200 } else { 403 }, "{}", file.display());
    }

    // And with the host all of them go, also one that joined after that.
    let (_, three) = world.joined("h1", "three.creds").await;
    let removed = world.does(&["remove", "h1"]);
    assert!(removed.stderr.contains("2 credentials"), "{removed:?}");
    for file in [&two, &three] {
        eventually("it is void", || async { !world.lets_in("h1", file).await }).await;
    }
    assert_eq!(world.listed("h1"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_joined_may_not_join_again_after_its_token_expired() {
    let world = Installation::start(&[]).await;
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    let token = world.does(&["token", "h1", "--life", "3s"]).stdout.trim().to_owned();
    let key = OwnKey::new();
    assert_eq!(world.join(&token, &key).await.status, 200);
    let expired_at = SystemTime::now() + Duration::from_secs(4);
    eventually("it has expired", || async { SystemTime::now() > expired_at }).await;
    let late = world.join(&token, &key).await;
    assert!(late.status == 403 && late.text.contains("expired"), "{}", late.text);
}

/// They lived for ever.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_credential_is_cut_off_by_the_server_and_not_let_in_again() {
    let world = Installation::start(&["--credential-life", "10s"]).await;
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    let (_, joined) = world.joined("h1", "joined.creds").await;
    let (_one, of_joined) = world.connect("h1", &joined).await;
    world.does(&["add", "h2", "--out", &world.path("minted.creds"), "--life", "10s"]);
    let minted = world.folder.join("minted.creds");
    let (_two, of_minted) = world.connect("h2", &minted).await;
    for (host, file, mut events) in [("h1", joined, of_joined), ("h2", minted, of_minted)] {
        denied(&mut events, "expired").await;
        // Servers count in whole seconds: within the last one it is let in, and cut off again.
        eventually("it is not let in", || async { !world.lets_in(host, &file).await }).await;
        assert_eq!(world.renew(&file).await.status, 403, "too late");
    }
    assert_eq!(world.listed("h1"), Vec::<String>::new());
}

/// The default of what is made without saying how long.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_holds_a_viewers_or_another_installations_credential_renews_nothing() {
    let world = Installation::start(&[]).await;
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    let mut stranger = Authority::new();
    let path = world.folder.join("stranger.creds");
    stranger.mint(Role::Host, &id("h1"), None, SystemTime::now()).expect("minted").save(&path).expect("saved");
    let refused = world.renew(&path).await;
    assert!(refused.status == 403 && refused.text.contains("signed by another"), "{}", refused.text);
    let mut own = Authority::load(&world.folder.join("authority.json")).expect("an authority");
    own.mint(Role::Viewer, &id("h1"), Some(Duration::from_secs(60)), SystemTime::now())
        .expect("minted")
        .save(&path)
        .expect("saved");
    assert_eq!(world.renew(&path).await.status, 403);
    let expires = |host: &str| {
        let listed: Value = serde_json::from_str(&world.does(&["list", "-o", "json"]).stdout).expect("JSON");
        let items = listed["items"].as_array().expect("a list").clone();
        items.into_iter().filter(|item| item["name"] == host).map(|item| item["expires"].clone()).collect::<Vec<_>>()
    };
    world.does(&["add", "h1", "--out", &world.path("h1.creds")]);
    world.joined("h1", "joined.creds").await;
    let all = expires("h1");
    assert!(all.len() == 2 && all.iter().all(|at| at != "never"), "{all:?}");
}

async fn narrow(plane: &Plane, host: &str, len: u8) {
    let granted = Grant::new(id(host), vec![Prefix::v4(0x0a00_0000, len).expect("a prefix")]);
    let writes = vec![Write::put(granted.document().expect("a document"), Expected::Any)];
    let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
    plane.catalog.write(&change, None).await.expect("written");
}

/// It evicted nothing: what was enrolled stayed.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_grant_or_a_template_no_longer_allows_is_evicted_and_nothing_else() {
    let mut plane = plane(2).await;
    allowed(&plane, "vm", &["h1", "h2"]).await;
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    for guest in [&one, &two] {
        let n = if guest.id.as_str() == "h1" { 1 } else { 2 };
        let mut far = asked(&format!("far-{}", guest.id), 0x01_0000 + n);
        far.space = None;
        let near = asked(&format!("near-{}", guest.id), n);
        assert!(matches!(guest.enrol("vm", vec![near, far]).await, RegisterAnswer::Registered { .. }));
        guest.beats(true);
    }
    let observer = plane.bus.observer("observer").await;
    // A grant: one host's workload outside of it goes.
    narrow(&plane, "h1", 16).await;
    eventually("far-h1 is evicted", || async { workload_entry(&observer, "far-h1").await.is_none() }).await;
    audited(&observer, "gc.reg.w.far-h1", "no longer allowed").await;
    for stays in ["near-h1", "near-h2", "far-h2"] {
        assert!(workload_entry(&observer, stays).await.is_some(), "{stays}");
    }
    // A template: everybody's workload in a space that it does not have any more.
    let mut spaceless = template("vm", &["h1", "h2"]);
    spaceless.spaces.clear();
    put_template(&plane, spaceless.clone()).await;
    for goes in ["near-h1", "near-h2"] {
        eventually(&format!("{goes} is evicted"), || async { workload_entry(&observer, goes).await.is_none() }).await;
    }
    assert!(workload_entry(&observer, "far-h2").await.is_some());
    // While no controller runs: whoever comes next looks at everything.
    plane.controllers.iter_mut().for_each(|controller| controller.kill());
    plane.controllers.clear();
    spaceless.identities.remove(&id("h2"));
    put_template(&plane, spaceless).await;
    assert!(workload_entry(&observer, "far-h2").await.is_some());
    plane.add_controller_with(&SHORT);
    plane.ready().await;
    eventually("far-h2 is evicted", || async { workload_entry(&observer, "far-h2").await.is_none() }).await;
    let claims = entries(&observer).await.into_keys().filter(|subject| subject.starts_with("gc.reg.a.")).count();
    assert_eq!(claims, 0, "their addresses are free");
}

/// The agent is told at once, and says why; when the template allows it again it comes back.
#[test]
fn an_agent_whose_workload_is_evicted_says_so_and_comes_back_when_it_may() {
    isolated(|| async {
        let plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        let mut narrowed = template("vm", &["h1"]);
        narrowed.spaces.clear();
        put_template(&plane, narrowed).await;
        eventually("m1 is evicted", || async { workload_entry(&observer, "m1").await.is_none() }).await;
        eventually("the agent says why", || async {
            agent.registered("m1").is_some_and(|one| {
                one["state"] == "refused" && one["why"].as_str().is_some_and(|why| why.contains("space shop is not allowed"))
            })
        })
        .await;
        put_template(&plane, template("vm", &["h1"])).await;
        registered(&observer, "m1", 2).await;
    });
}

/// An enrolment that had read the grant, or the template, before it was taken away was written after it, and stayed.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_judged_before_a_removal_or_an_edit_does_not_outlive_it() {
    let plane = plane_with(1, &SHORT).await;
    let text = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let admin = User::new(&gateway, &text).await;
    // A second controller, which does not lead, behind a place where what it writes is held back.
    let hold = Hold::to(&plane.url()).await;
    let mut second = groupcast_tests::control::Controller::start(&hold.url(), "behind", groupcast_tests::enrolled::LEAD, &SHORT);
    second.ready().await;
    let names: Vec<String> = (0..40).map(|n| format!("r{n}")).collect();
    let mut numbers = (0..40).zip(&names);
    for removes in [true, false] {
        // The bus gives each request to one of the two: until the second has one.
        hold.hold("gc.reg.");
        let (name, enrolling) = loop {
            let (number, name) = numbers.next().expect("the second controller is asked at some time");
            allowed(&plane, &format!("t-{name}"), &[name]).await;
            let guest = Guest::new(&plane, name, 1).await.asking(Duration::from_secs(60), Duration::from_secs(60));
            guest.beats(true);
            let (template, workload) = (format!("t-{name}"), asked(&format!("w-{name}"), 0x200 + number));
            let mut enrolling = tokio::spawn(async move {
                let answer = guest.enrol(&template, vec![workload]).await;
                (guest, answer)
            });
            tokio::select! {
                answered = &mut enrolling => drop(answered),
                () = hold.holds() => break (name, enrolling),
            }
        };
        let observer = plane.bus.observer(&format!("observer-{name}")).await;
        assert!(host_entry(&observer, name).await.is_none(), "it is held");
        if removes {
            let removed = admin.delete(&format!("/v1/hosts/{name}"), &[]).await;
            assert_eq!(removed.status, 200, "{}", removed.text);
        } else {
            put_template(&plane, template(&format!("t-{name}"), &[])).await;
        }
        hold.release();
        let (guest, answer) = enrolling.await.expect("answered");
        if removes {
            let (_, reason) = refusal(&answer);
            assert!(reason.contains("is not known"), "{reason}");
            assert!(host_entry(&observer, name).await.is_none(), "it was never written");
        }
        eventually("nothing is left", || async { workload_entry(&observer, &format!("w-{name}")).await.is_none() }).await;
        drop(guest);
    }
}

/// A host's agent with real credentials, in a folder of its own.
fn agent(world: &Installation, host: &str) -> Agent {
    let folder = world.folder.join(host);
    std::fs::create_dir_all(&folder).expect("a folder");
    let more = format!("credentials = '{}/agent.creds'\ngateway = '{}'\n", folder.display(), world.gateway.url());
    Agent::new(&world.server.url(), host, &(more + &own("m1", "10.0.0.5")))
}

/// The same with these gateways.
fn agent_at(world: &Installation, host: &str, gateways: &[&str]) -> Agent {
    let folder = world.folder.join(host);
    std::fs::create_dir_all(&folder).expect("a folder");
    let more = format!("credentials = '{}/agent.creds'\ngateway = {gateways:?}\n", folder.display());
    Agent::new(&world.server.url(), host, &(more + &own("m1", "10.0.0.5")))
}

fn status(agent: &Agent) -> Value {
    serde_json::from_slice(&agent.ask(&["status"]).stdout).unwrap_or_default()
}

/// On the command line everybody on the machine could read it.
#[test]
fn a_join_token_comes_from_a_file_standard_input_or_the_environment_and_no_command_line() {
    use std::io::Write as _;
    isolated(|| async {
        let world = Installation::start(&[]).await;
        world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
        let agent = agent(&world, "h1");
        let made = || world.folder.join("h1/agent.creds").exists();
        let token = world.join_token("h1");
        let refused = agent.ask(&["join", "--token", &token]);
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{words}");
        assert!(words.contains("--token-file") && !words.contains(&token) && !made(), "{words}");
        assert_eq!(agent.ask(&["join"]).status.code(), Some(1), "no token at all");

        let file = world.folder.join("token");
        std::fs::write(&file, format!("{token}\n")).expect("written");
        agent.does(&["join", "--token-file", &file.display().to_string()]);
        assert!(made());
        let token = world.join_token("h1");
        let binary = groupcast_tests::agent::binary();
        let config = agent.folder.join("agent.toml");
        let mut child = std::process::Command::new(binary)
            .arg("--config")
            .arg(&config)
            .args(["join", "--token-file", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("it runs");
        child.stdin.take().expect("its input").write_all(token.as_bytes()).expect("written");
        assert!(child.wait().expect("it ends").success());
        let token = world.join_token("h1");
        let mut join = std::process::Command::new(binary);
        join.arg("--config").arg(&config).arg("join").env("GROUPCAST_JOIN_TOKEN", token);
        assert!(join.status().expect("it runs").success());
        assert_eq!(world.listed("h1").len(), 3, "each of them is known");
    });
}

/// How long a credential lives in the test below: short for a test, long enough for a machine that does much else.
const LIFE: Duration = Duration::from_secs(15);

#[test]
fn an_agent_renews_its_credential_without_an_operator_and_enforces_all_the_time() {
    isolated(|| async {
        let world = Installation::start(&["--credential-life", "15s"]).await;
        world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
        let mut agent = agent(&world, "h1");
        let token = world.folder.join("token");
        std::fs::write(&token, world.join_token("h1")).expect("written");
        agent.does(&["join", "--token-file", &token.display().to_string()]);
        let keys = world.listed("h1");
        let first_ends = SystemTime::now() + LIFE;
        agent.start().await;
        registered(&world.client, "m1", 1).await;
        let in_force = || {
            let output = agent.ask(&["ruleset"]);
            (output.status.success(), output.stdout)
        };
        eventually("its policy is in force", || async { in_force().0 }).await;
        let before = in_force();
        // Twice, so that the second one comes from a credential that was itself renewed; and past the end of the first.
        eventually("it has renewed twice", || async {
            assert_eq!(in_force(), before, "it enforces the same all the time");
            status(&agent)["credential"]["renewals"].as_u64() >= Some(2) && SystemTime::now() > first_ends
        })
        .await;
        assert_eq!(status(&agent)["credential"]["problem"], Value::Null);
        assert_eq!(world.listed("h1"), keys, "the same key, and no other");
        eventually("it is connected", || async { status(&agent)["heard"]["connected"] == true }).await;
        let entry = workload_entry(&world.client, "m1").await.expect("registered");
        assert_eq!(entry["incarnation"], 1, "nobody noticed");
        let log = agent.log();
        assert!(!log.contains("Authentication Expired"), "it was never cut off:\n{log}");

        // With the host it ends: cut off, not renewed, and still enforcing.
        world.does(&["remove", "h1"]);
        eventually("it says that it is not renewed", || async {
            status(&agent)["credential"]["problem"].as_str().is_some_and(|problem| problem.contains("refuses"))
        })
        .await;
        assert_eq!(status(&agent)["heard"]["connected"], false);
        assert!(in_force().0);
        assert!(!world.lets_in("h1", &world.folder.join("h1/agent.creds")).await);
    });
}

/// An agent knew one gateway: with that node gone, its credential was not renewed, and expired.
#[test]
fn an_agent_joins_and_renews_through_any_of_its_gateways() {
    isolated(|| async {
        let world = Installation::start(&["--credential-life", "15s"]).await;
        world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
        // Nobody listens at the first two, so whichever it begins with, it has to turn to another.
        let alive = world.gateway.url();
        let mut agent = agent_at(&world, "h1", &["http://127.0.0.1:9", "http://127.0.0.1:10", &alive]);
        let token = world.folder.join("token");
        std::fs::write(&token, world.join_token("h1")).expect("written");
        agent.does(&["join", "--token-file", &token.display().to_string()]);
        agent.start().await;
        eventually("it has renewed", || async { status(&agent)["credential"]["renewals"].as_u64() >= Some(1) }).await;
        assert_eq!(status(&agent)["credential"]["problem"], Value::Null);
    });
}

/// A gateway that signs with a wrong key must not cut off a host whose credential still works.
#[test]
fn a_new_credential_that_the_bus_does_not_take_replaces_nothing() {
    isolated(|| async {
        let world = Installation::start(&["--credential-life", "15s"]).await;
        world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
        let mut agent = agent(&world, "h1");
        let token = world.folder.join("token");
        std::fs::write(&token, world.join_token("h1")).expect("written");
        agent.does(&["join", "--token-file", &token.display().to_string()]);
        let file = world.folder.join("h1/agent.creds");
        let before = std::fs::read_to_string(&file).expect("a file");
        // Revoked on the bus behind the gateway's back: the gateway signs, the bus refuses.
        let path = world.folder.join("authority.json");
        agent.start().await;
        registered(&world.client, "m1", 1).await;
        let mut authority = Authority::load(&path).expect("an authority");
        let (key, _) = OwnKey::of_file(&before).expect("a key");
        authority.revoke_joined(&key.public_key(), SystemTime::now()).expect("revoked");
        let system = authority.system_credential(Duration::from_secs(60), SystemTime::now()).expect("made");
        let options = groupcast_bus_config::connect::Options::new(&[world.server.url()], system.role, &system.name)
            .identity(groupcast_bus_config::connect::Identity::Text(system.file_text()));
        let (client, _events) = groupcast_bus_config::connect::connect(options).await.expect("connected");
        authority.publish(&client).await.expect("published");
        eventually("it says that the bus does not take it", || async {
            status(&agent)["credential"]["problem"].as_str().is_some_and(|problem| problem.contains("the one at hand stays"))
        })
        .await;
        assert_eq!(std::fs::read_to_string(&file).expect("a file"), before);
        assert_eq!(incarnation_of(&agent), Some(1));
    });
}

fn incarnation_of(agent: &Agent) -> Option<u64> {
    agent.registered("m1")?["incarnation"].as_u64()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_address_is_still_granted_enrols_as_before() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    assert_eq!(incarnation(&guest.enrol("vm", vec![asked("w1", 5)]).await), 1);
    narrow(&plane, "h1", 16).await;
    assert_eq!(incarnation(&guest.enrol("vm", vec![asked("w1", 5)]).await), 1, "the same life: nothing was evicted");
}

/// Servers that lost their accounts go by those they were configured with, and let in who was revoked since.
#[tokio::test(flavor = "multi_thread")]
async fn an_import_with_the_authority_tells_the_servers_again_who_was_revoked() {
    let mut world = Guarded::start(&["h1", "h2"], &SHORT).await;
    let files = ["h1", "h2"].map(|host| world.mint(host, &format!("{host}.creds")));
    let let_in = async |world: &Guarded| (world.lets_in("h1", &files[0]).await, world.lets_in("h2", &files[1]).await);
    assert_eq!(let_in(&world).await, (true, true));
    assert_eq!(world.authority.revoke(Role::Host, &id("h1"), SystemTime::now()).expect("revoked"), 1);
    let system = world.authority.system_credential(Duration::from_secs(60), SystemTime::now()).expect("a credential");
    let options = Options::new(&[world.server.url()], system.role, &system.name).identity(Identity::Text(system.file_text()));
    world.authority.publish(&connect::connect(options).await.expect("connected").0).await.expect("published");
    assert_eq!(let_in(&world).await, (false, true));
    let (authority, export, credentials) = (world.path("authority.json"), world.path("export.jsonl"), world.path("c2.creds"));
    world.authority.save(authority.as_ref()).expect("saved");
    let url = world.server.url();
    let bus = ["--server", url.as_str(), "--credentials", credentials.as_str()];
    let ran = groupcast(&[&["export"], &bus[..], &["--output", &export]].concat(), &[]);
    assert_eq!(ran.code, 0, "{ran:?}");

    // Everything is lost but the configuration: streams, and accounts as they were published.
    world.controller.kill();
    world.server.kill();
    for folder in ["jetstream", "accounts"] {
        std::fs::remove_dir_all(world.server.dir().join(folder)).expect("lost");
    }
    world.server.restart().await.expect("started");
    let import = |more: &[&str]| groupcast(&[&["import"], &bus[..], more, &[export.as_str()]].concat(), &[]);
    let ran = import(&[]);
    assert!(ran.code == 0 && ran.stderr.contains("import again with --replace and --authority"), "{ran:?}");
    assert_eq!(let_in(&world).await, (true, true), "the servers do not know it any more, and it was said");
    let ran = import(&["--replace", "--authority", &authority]);
    assert!(ran.code == 0 && ran.stderr.contains("the servers know again who was revoked"), "{ran:?}");
    assert_eq!(let_in(&world).await, (false, true));
    // Also after a restart.
    world.server.kill();
    world.server.restart().await.expect("started");
    assert_eq!(let_in(&world).await, (false, true));
}
