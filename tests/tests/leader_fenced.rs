//! Leading cannot be taken away by what a host says, nor by what a store says; and who was deposed writes nothing any more.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity, Options};
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::{streams, subjects};
use groupcast_control::catalog::Catalog;
use groupcast_control::document::{GuardRecord, Name};
use groupcast_control::fence::{Fences, Unfenced};
use groupcast_control::log::{Log, Outgoing};
use groupcast_control::registry::{Elsewhere, Enrolment, Fate, Registry};
use groupcast_messages::{Ack, Answer, Ask, Body, EntropyCheck, HostState, Lead, TopicRef};
use groupcast_policy::doc::Edit;
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::{Topic, TopicHash};
use groupcast_tests::control::{Controller, Hold, Plane, group, run, workload, write_groups};
use groupcast_tests::gateway::scratch;
use groupcast_tests::world::{DEADLINE, eventually};
use groupcast_topics::term::{Reserved, TERMS_LEFT_OUT};

const LEASE: Duration = Duration::from_millis(600);

fn id(text: &str) -> HostId {
    text.parse().expect("an id")
}

/// A bus with real credentials, two controllers, and a host's credential in hostile hands.
struct Installation {
    folder: PathBuf,
    server: Server,
    client: async_nats::Client,
    controllers: Vec<Controller>,
}

impl Installation {
    async fn start() -> Self {
        let folder = scratch("leader");
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut authority = Authority::new();
        let names = [(Role::Controller, "c1"), (Role::Controller, "c2"), (Role::Controller, "op"), (Role::Host, "h1")];
        for (role, name) in names {
            let credential = authority.mint(role, &id(name), None, SystemTime::now()).expect("minted");
            credential.save(&folder.join(format!("{name}.creds"))).expect("saved");
        }
        let config = Config::plain().with(authority.server_config("accounts").expect("a configuration"));
        let server = Server::start(config).await.expect("a server");
        let options = Options::new(&[server.url()], Role::Controller, &id("op"))
            .identity(Identity::File(folder.join("op.creds")))
            .reconnect_delay_max(Duration::from_millis(100));
        let (client, _events) = connect::connect(options).await.expect("connected");
        streams::ensure(&client, 1).await.expect("the streams");
        write_groups(&Catalog::new(client.clone()), vec![group("g0", &[], &[1])]).await.expect("written");
        let mut installation = Self { folder, server, client, controllers: Vec::new() };
        installation.start_controllers();
        installation.leads().await;
        installation
    }

    fn start_controllers(&mut self) {
        for name in ["c1", "c2"] {
            let credentials = self.folder.join(format!("{name}.creds")).display().to_string();
            self.controllers.push(Controller::start(&self.server.url(), name, LEASE, &["--credentials", &credentials]));
        }
    }

    /// Waits until one of them leads, and what is written is published.
    async fn leads(&mut self) {
        let accepted = eventually_some("the change is written", async || {
            write_groups(&Catalog::new(self.client.clone()), vec![group("g1", &[], &[1])]).await.ok()
        });
        let number = accepted.await.number;
        let begun = std::time::Instant::now();
        let published = |c: &mut Controller| {
            let status = c.status()?;
            (status["publishing"] == true && status["catalog"].as_u64()? >= number).then_some(())
        };
        while !self.controllers.iter_mut().any(|controller| published(controller).is_some()) {
            assert!(begun.elapsed() < DEADLINE, "nobody leads");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn host(&self) -> async_nats::Client {
        let options = Options::new(&[self.server.url()], Role::Host, &id("h1"))
            .identity(Identity::File(self.folder.join("h1.creds")))
            .reconnect_delay_max(Duration::from_millis(100));
        connect::connect(options).await.expect("connected").0
    }

    async fn reserved(&self) -> Reserved {
        let entry = Log::catalog(self.client.clone()).last(subjects::CATALOG_TERM).await.expect("the bus answers");
        Reserved::decode(&entry.expect("a term").payload).expect("one that can be led with")
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        self.controllers.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

async fn eventually_some<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(begun.elapsed() < DEADLINE, "{what}: not in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Asks as a host, and waits for the first answer.
async fn asked(host: &async_nats::Client, subject: String, payload: Vec<u8>) -> Vec<u8> {
    let mut answers = host.subscribe(subjects::answers(&id("h1"))).await.expect("subscribed");
    host.flush().await.expect("flushed");
    eventually_some("an answer", async || {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(subjects::ANSWER_TOKEN, "t");
        host.publish_with_headers(subject.clone(), headers, payload.clone().into()).await.expect("sent");
        let answer = tokio::time::timeout(Duration::from_secs(2), answers.next()).await.ok()??;
        (!answer.payload.is_empty()).then(|| answer.payload.to_vec())
    })
    .await
}

/// Broke: one acknowledgement of a host with a high term, and no controller ever led again; with one of 24 bits after the next restart
/// of the server.
#[tokio::test(flavor = "multi_thread")]
async fn no_number_of_a_host_keeps_anybody_from_leading() {
    let mut world = Installation::start().await;
    for term in [u64::MAX, u64::MAX - 1, (1 << 48) + 1, (1 << 24) - 1] {
        let host = world.host().await;
        let before = world.reserved().await.term();
        // Every controller hears acknowledgements; requests and checks go to one of them, so several are sent.
        let ack = Ack { term, state: HostState::Enforcing, reached: vec![(TopicHash(u64::MAX), u64::MAX)] };
        host.publish(subjects::ack(&id("h1")), ack.encode().into()).await.expect("sent");
        for _ in 0..6 {
            let ask = Ask { ask: 1, term, held: vec![(TopicHash(1), u64::MAX)], digests: vec![] };
            asked(&host, subjects::snap(&id("h1")), ask.encode()).await;
            let check = EntropyCheck { term, hash: u64::MAX, topics: u32::MAX };
            asked(&host, subjects::entropy(&id("h1")), check.encode()).await;
        }
        world.leads().await;

        // Controllers that heard it must elect a leader under a new term, and lead.
        for controller in &mut world.controllers {
            let leads = controller.status().is_some_and(|status| status["publishing"] == true);
            if leads {
                controller.kill();
            }
        }
        world.leads().await;
        // The others likewise, and on a server whose topics are gone.
        world.controllers.clear();
        world.start_controllers();
        world.leads().await;
        let host = world.host().await;
        host.publish(subjects::ack(&id("h1")), ack.encode().into()).await.expect("sent");
        host.flush().await.expect("flushed");
        world.server.kill();
        world.server.restart().await.expect("the server starts again");
        world.leads().await;
        let after = world.reserved().await.term();
        assert!(after > before && after < before + 10 * TERMS_LEFT_OUT, "{term}: {before} became {after}");
    }
}

/// Broke: a store with such a term could not be mended at all, and everything that was asked said ok.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_nobody_can_lead_with_is_named_and_repaired() {
    let mut world = Installation::start().await;
    let before = world.reserved().await;
    world.controllers.clear();
    let url = world.server.url();
    for poison in ["18446744073709551614", "18446744073709551615 3", "damaged"] {
        let catalog = Log::catalog(world.client.clone());
        let expected = catalog.last(subjects::CATALOG_TERM).await.expect("the bus answers").map_or(0, |entry| entry.sequence);
        let (subject, payload) = (subjects::CATALOG_TERM.to_owned(), poison.as_bytes().to_vec());
        let headers = async_nats::HeaderMap::new();
        let message = Outgoing { subject, headers, expected, payload };
        catalog.write(&[message]).await;
        world.start_controllers();
        for controller in &mut world.controllers {
            let named =
                |(status, body): (u16, String)| status == 503 && body.contains("nobody leads") && body.contains("repair-term");
            controller.wait_for("saying that nobody leads", |c| c.get("/readyz").is_some_and(named)).await;
        }
        let credentials = world.folder.join("op.creds").display().to_string();
        let bus = ["--server", url.as_str(), "--name", "op", "--credentials", credentials.as_str()];
        let file = world.folder.join("export").display().to_string();
        let (fine, _, words) = run(&[&["export", "--output", &file][..], &bus].concat());
        assert!(fine, "{words}");
        assert!(std::fs::read_to_string(&file).expect("an export").contains(r#""term":0"#), "the poison is not exported");

        world.controllers.clear();
        let (fine, _, words) = run(&[&["bus", "repair-term"][..], &bus].concat());
        assert!(fine && words.contains("terms go on after"), "{poison}: {words}");
        let (fine, _, words) = run(&[&["bus", "repair-term"][..], &bus].concat());
        assert!(fine && words.contains("nothing was changed"), "{poison}: {words}");
        let repaired = world.reserved().await;
        assert!(repaired.term() > before.term() && repaired.term() < 10_000, "{poison}: {before} became {repaired}");
        world.start_controllers();
        world.leads().await;
        for controller in &mut world.controllers {
            controller.ready().await;
        }
        world.controllers.clear();
    }
    let credentials = world.folder.join("op.creds").display().to_string();
    let bus = ["--server", url.as_str(), "--name", "op", "--credentials", credentials.as_str()];
    let (fine, _, words) = run(&[&["bus", "repair-term", "--at-least", "5000"][..], &bus].concat());
    assert!(fine && world.reserved().await.term() == 5_000, "{words}");
    let (fine, _, words) = run(&[&["bus", "repair-term", "--at-least", "281474976710656"][..], &bus].concat());
    assert!(!fine && words.contains("name a lower one") && world.reserved().await.term() == 5_000, "{words}");
}

/// Broke: a host that named the hash of another host's topic in a request was sent that host's workloads.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_not_answered_for_the_topic_of_another() {
    let world = Installation::start().await;
    let registry = Registry::new(world.client.clone());
    for (host, name, number) in [("h1", "own", 1), ("h2", "secret", 2)] {
        let workloads = [workload(host, name, number, &["g0"])];
        registry.register(&id(host), &workloads, Elsewhere::Move).await.expect("registered");
    }
    let host = world.host().await;
    let topics = [Topic::Host(id("h1")), Topic::Host(id("h2")), Topic::Rules("g1".parse().expect("an id"))];
    for held in [0, 1] {
        let held: Vec<(TopicHash, u64)> = topics.iter().map(|topic| (topic.hash64(), held)).collect();
        let ask = Ask { ask: 7, term: 1, held, digests: vec![] };
        // Until what was registered is published.
        let entries = eventually_some("the own topic", async || {
            let answer = asked(&host, subjects::snap(&id("h1")), ask.encode()).await;
            let Ok(Answer::Chunk(chunk)) = Answer::decode(&answer) else { panic!("no chunk: {answer:?}") };
            assert!(!String::from_utf8_lossy(&answer).contains("secret"), "the answer names a workload of the other host");
            let own = chunk.entries.iter().any(|entry| {
                matches!(&entry.body, Body::Part { edit: Edit::Host { put, .. }, .. } if put.iter().any(|p| p.workload.as_str() == "own"))
            });
            own.then_some(chunk.entries)
        })
        .await;
        for entry in &entries {
            if entry.topic == TopicRef::Asked(1) {
                let nothing =
                    matches!(&entry.body, Body::Part { digest, .. } if *digest == groupcast_policy::doc::Digest::ABSENT);
                assert!(nothing && entry.revision == 0 && !entry.needed, "{entry:?}");
            }
        }
        // What any host may read it is answered for, needed or not.
        let shared = entries.iter().find(|entry| entry.topic == TopicRef::Asked(2)).expect("an entry for the shared topic");
        assert!(shared.revision > 0, "{shared:?}");
    }
}

/// How often the controller's source was read.
fn polls(controller: &mut Controller) -> u64 {
    let (_, metrics) = controller.get("/metrics").unwrap_or_default();
    let counted = metrics.lines().filter(|line| line.starts_with("groupcast_source_polls_total{"));
    counted.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// Broke: a leader whose source was about to write when another took over wrote it all the same, over what the new leader had written.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_deposed_leader_saw_is_not_written() {
    let folder = scratch("stale");
    std::fs::create_dir_all(folder.join("groups.d")).expect("a folder");
    let say = |port: u16| {
        let text = format!("kind: group\nid: files-web\nrules: [egress tcp {port} to any]\n");
        std::fs::write(folder.join("groups.d/web.yaml"), text).expect("written");
    };
    let config = folder.join("groupcast.toml").display().to_string();
    let source = format!(
        "[[source]]\nid = \"files\"\nkind = \"directory\"\npath = \"{}\"\npoll_interval = \"50ms\"\nfull_sync_interval = \"1h\"\n",
        folder.join("groups.d").display()
    );
    std::fs::write(&config, source).expect("written");
    for round in 0..3u16 {
        say(1_000);
        let mut plane = Plane::start(0, LEASE).await;
        plane.put_groups(vec![group("first", &[], &[1])]).await;
        let hold = Hold::to(&plane.url()).await;
        let mut stale = Controller::start(&hold.url(), "stale", LEASE, &["--config", &config]);
        stale.publishing().await;
        let written = async |port: u16| {
            let name = Name::group(&"files-web".parse().expect("an id"));
            let version = plane.catalog.read(&name).await.ok().flatten();
            version.is_some_and(|version| format!("{:?}", version.document).contains(&port.to_string()))
        };
        eventually("the first observation", || written(1_000)).await;
        // The next one is on its way when the leader stops.
        hold.hold("gc.cat.");
        say(2_000);
        hold.holds().await;
        stale.pause();
        // Meanwhile it is as it was: the next leader finds nothing to write.
        say(1_000);
        let mut next = Controller::start(&plane.bus.url(0), "next", LEASE, &["--config", &config]);
        next.publishing().await;
        next.wait_for("polling", |c| polls(c) >= 3).await;
        hold.release();
        // Whatever the old one had to say has arrived when it has noticed that it does not lead any more.
        stale.resume();
        stale.wait_for("deposed", |c| c.status().is_some_and(|status| status["leading"].is_null())).await;
        let until = tokio::time::Instant::now() + 2 * LEASE;
        while tokio::time::Instant::now() < until {
            assert!(written(1_000).await, "round {round}: the deposed leader's observation was written");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // And the new one still writes.
        say(4_000);
        eventually("what the new leader sees next", || written(4_000)).await;
    }
    let _ = std::fs::remove_dir_all(&folder);
}

/// Whatever a leader writes, in either stream: freezes, marks, deletions, documents.
#[tokio::test(flavor = "multi_thread")]
async fn once_another_has_taken_over_nothing_of_the_old_term_is_stored() {
    let plane = Plane::start(0, LEASE).await;
    let client = plane.bus.observer("leader").await;
    streams::ensure(&client, 1).await.expect("the streams");
    let (old, new) = (Fences::new(&client), Fences::new(&client));
    let first = old.of(7).await.expect("fenced");
    let (catalog, registry) = (Catalog::over(first.catalog.clone()), Registry::over(first.registry.clone()));
    let enrolment = Enrolment { boot: 1, template: Some("vm".to_owned()), limits: groupcast_control::registry::Limits::of(None) };
    let before = registry.before(&id("h1"), false).await.expect("the bus answers");
    let entered = registry.enrol(&id("h1"), before, &enrolment, &[workload("h1", "w1", 1, &[])]).await.expect("enrolled");
    let entered = entered.expect("nobody else writes");
    write_groups(&catalog, vec![group("one", &[], &[1])]).await.expect("written");
    write_groups(&catalog, vec![group("one", &[], &[2]), group("two", &[], &[2])]).await.expect("written");
    // A prefix expects that nothing was written since the addresses were listed, which the server asks of a batch's first message only.
    let mut wide = workload("h2", "w2", 2, &[]);
    wide.addresses.insert(groupcast_policy::text::prefix_text("10.77.0.0/24").expect("a prefix"));
    registry.register(&id("h2"), &[wide], Elsewhere::Refuse).await.expect("a leader's batch with a prefix");
    // A conflict is still a conflict.
    assert_eq!(registry.mark(&id("h1"), entered.sequence + 99, true, "late").await.expect("decided"), Fate::Spared);

    let second = new.of(9).await.expect("fenced");
    let everything = async || {
        let registry = Log::registry(client.clone()).all(subjects::REGISTRY_ALL).await.expect("the bus answers");
        let catalog = Log::catalog(client.clone()).all(subjects::CATALOG_ALL).await.expect("the bus answers");
        registry.into_iter().chain(catalog).map(|entry| (entry.subject, entry.sequence)).collect::<Vec<_>>()
    };
    let before = everything().await;
    let host = Log::registry(client.clone()).last(&subjects::registry_host(&id("h1"))).await.expect("the bus answers");
    let sequence = host.expect("an entry").sequence;
    let template = "vm".parse().expect("an id");
    let frozen = GuardRecord { template: "vm".to_owned(), missing: 1, hosts: 1, confirmed: Vec::new() };
    let mut refusals = vec![
        registry.mark(&id("h1"), sequence, true, "silent").await.expect_err("a mark").to_string(),
        registry.reap(&id("h1"), sequence, "silent").await.expect_err("a deletion").to_string(),
        registry.expel(&id("h1"), "removed").await.expect_err("a removal").to_string(),
        registry.guarded(&template, Some(&frozen), "frozen").await.expect_err("a freeze").to_string(),
        registry
            .register(&id("h2"), &[workload("h2", "w2", 2, &[])], Elsewhere::Move)
            .await
            .expect_err("a placement")
            .to_string(),
    ];
    for groups in [vec![group("one", &[], &[3])], vec![group("one", &[], &[3]), group("three", &[], &[3])]] {
        refusals.push(write_groups(&catalog, groups).await.expect_err("a document").to_string());
    }
    for refusal in refusals {
        assert!(refusal.contains("another controller leads since term 7"), "{refusal}");
    }
    assert!(matches!(old.of(8).await, Err(Unfenced::Deposed { term: 8, other: 9 })));
    assert_eq!(everything().await, before, "nothing was stored");

    let registry = Registry::over(second.registry.clone());
    assert_eq!(registry.reap(&id("h1"), sequence, "silent").await.expect("decided"), Fate::Done);
    write_groups(&Catalog::over(second.catalog.clone()), vec![group("one", &[], &[4])]).await.expect("written");
}

/// A stream that was lost and made again has no fence any more. Who leads is then what the topics' head says.
#[tokio::test(flavor = "multi_thread")]
async fn who_was_deposed_does_not_write_first_into_a_stream_that_was_made_again() {
    let plane = Plane::start(0, LEASE).await;
    let client = plane.bus.observer("leader").await;
    streams::ensure(&client, 1).await.expect("the streams");
    let (old, new) = (Fences::new(&client), Fences::new(&client));
    old.of(7).await.expect("fenced");
    let context = async_nats::jetstream::new(client.clone());
    let lead = Lead { term: 9, since: 9, batch: 1, ..Lead::default() };
    let stored = context.publish(subjects::LEAD_WRITE, lead.encode().into()).await.expect("sent");
    stored.await.expect("stored");
    new.of(9).await.expect("fenced");
    for lost in [&[streams::REGISTRY.name][..], &[streams::CATALOG.name], &[streams::CATALOG.name, streams::REGISTRY.name]] {
        for name in lost {
            context.delete_stream(name).await.expect("deleted");
        }
        streams::ensure(&client, 1).await.expect("the streams");
        let refused = old.of(7).await.map(|fenced| fenced.term);
        assert!(matches!(refused, Err(Unfenced::Deposed { term: 7, other: 9 })), "{lost:?}: {refused:?}");
        new.of(9).await.expect("who leads writes on");
    }
}
