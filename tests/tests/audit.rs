//! Whatever is acknowledged is in AUDIT with its content, also when servers die; a gap is noticed and named; operators read it, and it
//! survives export and import.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use groupcast_bus_config::streams::{self, AUDIT, CATALOG};
use groupcast_bus_config::subjects::{self, CatalogKind, js_api};
use groupcast_control::audit::{Audit, Complete, Gap, Wanted};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::log::{Log, Outcome, Outgoing};
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::model::Group;
use groupcast_policy::net::Prefix;
use groupcast_tests::World;
use groupcast_tests::control::{Plane, workload};
use groupcast_tests::gateway::{Folder, Gateway, Ran, User, groupcast, token};
use groupcast_tests::world::{DEADLINE, eventually, full};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

/// Changes that a gateway reads when it starts, as far as one can know from outside.
const CHANGES_MAX: u32 = 1_000;
const LEASE: Duration = Duration::from_secs(1);
/// Kills of the server that leads a stream, and those of `./test --full`.
const KILLS: usize = 2;
const KILLS_FULL: usize = 20;
/// One document is written this often while servers die; the trial did it every 200 ms.
const WRITE_EVERY: Duration = Duration::from_millis(25);
/// CATALOG kept eight.
const VERSIONS_WITHOUT_A_SERVER: usize = 24;

fn group(id: &str, mark: u32) -> Document {
    let mut group = Group::new(id.parse().expect("an id"));
    group.members.insert(Prefix::v4(0x0a00_0000 + mark, 32).expect("an address"));
    Document::Group(Arc::new(group))
}

fn change(document: Document) -> Change {
    let writes = vec![Write::put(document, Expected::Any)];
    Change { author: "ann".to_owned(), reason: "a test".to_owned(), key: None, writes }
}

/// The revisions of group web that AUDIT has.
async fn audited(client: &async_nats::Client) -> Option<BTreeSet<u64>> {
    let (audit, mut all) = (Audit::new(client.clone()), BTreeSet::new());
    let mut wanted =
        Wanted { kind: Some(CatalogKind::Group), id: Some("web".to_owned()), limit: usize::MAX, ..Wanted::default() };
    loop {
        let (entries, next) = audit.read(&wanted).await.ok()?;
        assert!(entries.iter().all(|entry| entry.document.is_some()), "each has its content");
        all.extend(entries.iter().map(|entry| entry.revision));
        match next {
            Some(next) => wanted.after = next,
            None => return Some(all),
        }
    }
}

async fn leader_of(client: &async_nats::Client, stream: &str) -> Option<String> {
    let answer = client.request(js_api("STREAM.INFO", stream), "".into()).await.ok()?;
    let answer: Value = serde_json::from_slice(&answer.payload).ok()?;
    answer["cluster"]["leader"].as_str().map(str::to_owned)
}

/// Writes one entry of REGISTRY again and again; the sequences that it was told are stored.
async fn keep_registering(client: async_nats::Client, over: Arc<AtomicBool>) -> BTreeSet<u64> {
    let log = Log::registry(client);
    let subject = subjects::registry_host(&"h1".parse().expect("an id"));
    let mut acknowledged = BTreeSet::new();
    while !over.load(Ordering::Relaxed) || acknowledged.is_empty() {
        if let Ok(last) = log.last(&subject).await {
            let expected = last.map_or(0, |entry| entry.sequence);
            let payload = format!("after {expected}").into_bytes();
            let message = Outgoing { subject: subject.clone(), headers: Default::default(), expected, payload };
            if let Outcome::Committed(sequence) = log.write(&[message]).await {
                acknowledged.insert(sequence);
            }
        }
        tokio::time::sleep(WRITE_EVERY).await;
    }
    acknowledged
}

/// What a look at AUDIT says, once its servers have a leader again.
async fn looked(client: &async_nats::Client) -> Complete {
    let start = Instant::now();
    loop {
        match Audit::new(client.clone()).look().await {
            Ok(looked) => return looked,
            Err(error) => assert!(start.elapsed() < DEADLINE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The sequences of what AUDIT has copied from REGISTRY.
async fn registered(client: &async_nats::Client) -> Option<BTreeSet<u64>> {
    let entries = Log::audit(client.clone()).page(subjects::REGISTRY_ALL, 1, usize::MAX, true).await.ok()?;
    let sequence = |text: &str| text.split_whitespace().nth(1)?.parse().ok();
    Some(entries.iter().filter_map(|entry| sequence(entry.header("Nats-Stream-Source")?)).collect())
}

/// 40 versions were lost around a kill at five changes a second: CATALOG kept eight, and AUDIT copies from there.
#[tokio::test(flavor = "multi_thread")]
async fn servers_that_die_cost_the_audit_nothing() {
    let mut world = World::three().await;
    let client = world.observer("writer").await;
    let catalog = Catalog::new(client.clone());
    let (over, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let writer = {
        let (catalog, over, taken) = (catalog.clone(), over.clone(), taken.clone());
        tokio::spawn(async move {
            let mut acknowledged = BTreeSet::new();
            for mark in 0.. {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                // Whoever is not told that it was written does not count on it.
                if let Ok(accepted) = catalog.write(&change(group("web", mark)), None).await {
                    acknowledged.insert(accepted.number);
                    taken.store(acknowledged.len(), Ordering::Relaxed);
                }
                tokio::time::sleep(WRITE_EVERY).await;
            }
            acknowledged
        })
    };
    let registering = tokio::spawn(keep_registering(world.observer("registrar").await, over.clone()));
    for kill in 0..if full() { KILLS_FULL } else { KILLS } {
        let stream = [AUDIT, CATALOG][kill % 2].name;
        let start = Instant::now();
        let node = loop {
            let leader = leader_of(&client, stream).await;
            if let Some(node) = leader.and_then(|name| world.cluster().node_named(&name)) {
                break node;
            }
            assert!(start.elapsed() < DEADLINE, "{stream} has no leader");
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let before = taken.load(Ordering::Relaxed);
        world.cluster().kill(node);
        // Many more versions than CATALOG kept are written without it.
        eventually("writes go on", || async { taken.load(Ordering::Relaxed) >= before + VERSIONS_WITHOUT_A_SERVER }).await;
        world.cluster().restart(node).await.expect("started");
        world.cluster().formed().await.expect("a cluster of three");
    }
    over.store(true, Ordering::Relaxed);
    let acknowledged = writer.await.expect("the writer ends");
    let start = Instant::now();
    loop {
        let there = audited(&client).await.unwrap_or_default();
        let lost: Vec<&u64> = acknowledged.difference(&there).collect();
        if lost.is_empty() {
            eprintln!("{} versions acknowledged, all of them in AUDIT", acknowledged.len());
            break;
        }
        // Whatever comes later than the last that is there may still be copied; what is missing before it never is.
        let last = there.last().copied().unwrap_or(0);
        let gone = lost.iter().filter(|revision| ***revision < last).count();
        assert!(gone == 0, "{gone} of {} acknowledged versions are not in AUDIT: {lost:?}", acknowledged.len());
        assert!(start.elapsed() < DEADLINE, "AUDIT does not follow: {} are missing", lost.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let looked = looked(&client).await;
    assert!(looked.catalog.gaps.is_empty(), "{looked:?}");
    // REGISTRY keeps one version of each entry, so some are replaced before they are copied. Whatever is missing is named.
    let acknowledged = registering.await.expect("the writer ends");
    let last = acknowledged.last().copied().expect("writes went on");
    let start = Instant::now();
    let there = loop {
        let there = registered(&client).await.unwrap_or_default();
        if there.last().is_some_and(|copied| *copied >= last) {
            break there;
        }
        assert!(start.elapsed() < DEADLINE, "AUDIT does not follow REGISTRY");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let looked = self::looked(&client).await.registry;
    let is_named = |sequence: &u64| looked.gaps.iter().any(|gap| (gap.first..=gap.last).contains(sequence));
    let lost: Vec<u64> = acknowledged.difference(&there).copied().collect();
    eprintln!("{} entries of REGISTRY acknowledged, {} not in AUDIT, named: {}", acknowledged.len(), lost.len(), looked.named());
    assert!(lost.iter().all(is_named), "unseen: {lost:?}, {looked:?}");
}

async fn update_audit(client: &async_nats::Client, config: &Value) {
    let answer = client.request(js_api("STREAM.UPDATE", AUDIT.name), config.to_string().into()).await.expect("an answer");
    let answer: Value = serde_json::from_slice(&answer.payload).expect("JSON");
    assert!(answer["error"].is_null(), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_is_noticed_and_named() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let (url, text) = (plane.url(), token(&plane.url(), "root", "admin", &[]));
    let gateway = Gateway::start(&url, &[]).await;
    let user = User::new(&gateway, &text).await;
    user.ready().await;
    let client = plane.bus.observer("operator").await;
    plane.catalog.write(&change(group("web", 0)), None).await.expect("written");
    plane.leader().await;
    let address = gateway.url();
    let environment = [("GROUPCAST_GATEWAY", address.as_str()), ("GROUPCAST_TOKEN", text.as_str())];
    eventually("nothing is missing", || async { groupcast(&["doctor"], &environment).stdout.contains("ok   audit") }).await;
    // AUDIT stops to copy, and one document is written more often than CATALOG keeps versions.
    without_sources(&client).await;
    let pushed_out = 5;
    for mark in 1..=streams::CATALOG_HISTORY as u32 + pushed_out {
        plane.catalog.write(&change(group("web", mark)), None).await.expect("written");
    }
    // The same of a registration, of which the last version alone is kept.
    let (registry, host) = (Registry::new(client.clone()), "h1".parse().expect("an id"));
    for number in 0..3 {
        let workload = workload("h1", "w1", number, &[]);
        registry.register(&host, &[workload], Elsewhere::Refuse).await.expect("registered");
    }
    streams::ensure(&client, 1).await.expect("the streams");
    let named = format!("lacks {pushed_out} messages of CATALOG");
    eventually("doctor names it", || async {
        let ran = groupcast(&["doctor"], &environment);
        ran.code == 1 && ran.stdout.contains(&format!("BAD  audit: {named}"))
    })
    .await;
    let registrations = groupcast(&["doctor"], &environment).stdout;
    let said = registrations.lines().find(|line| line.starts_with("ok   audit of registrations: lacks"));
    assert!(said.is_some_and(|line| line.contains("of REGISTRY")), "{registrations}");
    // Who reads the audit is told too, and so is whoever reads the controller's log.
    let ran = groupcast(&["audit", "group/web", "--limit", "1"], &environment);
    assert!(ran.code == 0 && ran.stderr.contains(&named), "{ran:?}");
    let controller = &plane.controllers[0];
    eventually("the controller says so", || async {
        ["CATALOG", "REGISTRY"].iter().all(|stream| controller.log().contains(&format!("AUDIT lacks messages of {stream}")))
    })
    .await;
}

async fn without_sources(client: &async_nats::Client) {
    let mut config = AUDIT.config(1);
    config.as_object_mut().expect("an object").remove("sources");
    update_audit(client, &config).await;
}

/// CATALOG alone is lost and made anew, as when its folder on the disk is damaged, while AUDIT copies nothing.
async fn lose_catalog(client: &async_nats::Client) {
    without_sources(client).await;
    let answer = client.request(js_api("STREAM.DELETE", CATALOG.name), "".into()).await.expect("an answer");
    assert!(String::from_utf8_lossy(&answer.payload).contains("\"success\":true"), "{answer:?}");
    streams::ensure_one(client, &CATALOG, 1).await.expect("made anew");
}

/// AUDIT was called complete while nothing of the new CATALOG was in it, and what it lacked of its beginning was not noticed.
#[tokio::test(flavor = "multi_thread")]
async fn another_catalog_is_copied_too_and_what_is_missing_of_it_is_named() {
    let mut world = World::one().await;
    let client = world.observer("operator").await;
    let (catalog, url) = (Catalog::new(client.clone()), world.server().url());
    for mark in 0..30 {
        catalog.write(&change(group("web", mark)), None).await.expect("written");
    }
    let doctor = || groupcast(&["doctor", "--on-bus", "--server", &url, "--name", "d"], &[]).stdout;
    eventually("all is copied", || async { doctor().contains("ok   audit") }).await;

    lose_catalog(&client).await;
    for mark in 0..3 {
        catalog.write(&change(group("web", mark)), None).await.expect("written");
    }
    let said = doctor();
    assert!(said.contains("BAD  audit: 3 messages of CATALOG are not copied yet"), "{said}");
    streams::ensure(&client, 1).await.expect("the streams");
    eventually("the other is copied too", || async { doctor().contains("ok   audit") }).await;
    // What the lost one held is still there, and `audit` shows both.
    let wanted = Wanted { kind: Some(CatalogKind::Group), limit: usize::MAX, ..Wanted::default() };
    let entries = Audit::new(client.clone()).read(&wanted).await.expect("it answers").0;
    let revisions: Vec<u64> = entries.iter().map(|entry| entry.revision).collect();
    assert_eq!(revisions, (1..=30).chain(1..=3).collect::<Vec<u64>>());

    // And one of which the beginning was replaced before it was copied.
    for mark in 0..30 {
        catalog.write(&change(group("web", mark)), None).await.expect("written");
    }
    eventually("all is copied", || async { doctor().contains("ok   audit") }).await;
    lose_catalog(&client).await;
    let pushed_out = 5;
    for mark in 0..streams::CATALOG_HISTORY as u32 + pushed_out {
        catalog.write(&change(group("web", mark)), None).await.expect("written");
    }
    streams::ensure(&client, 1).await.expect("the streams");
    eventually("it is copied", || async {
        let looked = Audit::new(client.clone()).look().await.expect("it answers").catalog;
        looked.behind() == 0 && looked.gaps == [Gap { first: 1, last: u64::from(pushed_out) }]
    })
    .await;
    assert!(doctor().contains("BAD  audit: lacks 5 messages of CATALOG"), "{}", doctor());
}

fn lines(ran: &Ran) -> Vec<Value> {
    ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_says_who_wrote_what_and_survives_export_and_import() {
    let folder = Folder::new("audit");
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let (url, root, ann) = (plane.url(), token(&plane.url(), "root", "admin", &[]), token(&plane.url(), "ann", "editor", &[]));
    let gateway = Gateway::start(&url, &[]).await;
    let user = User::new(&gateway, &ann).await;
    user.ready().await;
    let (address, path) = (gateway.url(), folder.0.join("web.yaml").display().to_string());
    let run = |token: &str, arguments: &[&str]| {
        groupcast(arguments, &[("GROUPCAST_GATEWAY", address.as_str()), ("GROUPCAST_TOKEN", token)])
    };
    let apply = |token: &str, rules: &[&str], reason: &str| {
        let document = json!({ "kind": "group", "id": "web", "rules": rules });
        std::fs::write(&path, document.to_string()).expect("written");
        let ran = run(token, &["apply", "-f", &path, "--reason", reason]);
        assert_eq!(ran.code, 0, "{ran:?}");
    };
    apply(&ann, &["ingress tcp 443 from any"], "TICKET-1");
    apply(&root, &["ingress tcp 443 from any", "ingress tcp 80 from any"], "TICKET-2");
    apply(&ann, &["ingress tcp 80 from any"], "TICKET-3");
    assert_eq!(run(&ann, &["delete", "group", "web"]).code, 0);
    let audit = |more: &[&str]| run(&root, &[&["audit"], more].concat());
    eventually("all four are there", || async { lines(&audit(&["group/web", "-o", "jsonl"])).len() == 4 }).await;
    let of = |item: &Value| {
        let text = |name: &str| item[name].as_str().unwrap_or_default().to_owned();
        let difference: Vec<String> =
            item["difference"].as_array().expect("a list").iter().map(|l| l.as_str().unwrap_or("").to_owned()).collect();
        (text("by").split(' ').next().unwrap_or("").to_owned(), text("reason"), item["deleted"] == true, difference)
    };
    let check = |all: &[Value]| {
        let (by, reason, deleted, difference) = of(&all[1]);
        assert_eq!((by.as_str(), reason.as_str(), deleted), ("root", "TICKET-2", false), "{:?}", all[1]);
        assert_eq!(difference, ["+ rules: ingress tcp 80 from any"]);
        assert_eq!(of(&all[2]).3, ["- rules: ingress tcp 443 from any"]);
        assert_eq!(all[1]["document"]["rules"].as_array().map(Vec::len), Some(2), "with its content: {}", all[1]);
        assert!(of(&all[3]).2 && all[3]["document"].is_null(), "{}", all[3]);
        assert!(all.iter().all(|item| item["at"].as_str().is_some_and(|at| at.ends_with('Z'))));
    };
    check(&lines(&audit(&["group/web", "-o", "jsonl"])));
    // Filters, and words for people.
    assert_eq!(lines(&audit(&["groups", "--by", "ann", "-o", "jsonl"])).len(), 3);
    assert_eq!(lines(&audit(&["--by", "nobody", "-o", "jsonl"])).len(), 0);
    assert_eq!(lines(&audit(&["group/web", "--since", "1h", "--limit", "2", "-o", "jsonl"])).len(), 2);
    assert_eq!(lines(&audit(&["group/web", "--until", "1h", "-o", "jsonl"])).len(), 0);
    assert_eq!(lines(&audit(&["token/ann", "-o", "jsonl"])).len(), 1);
    let shown = audit(&["group/web"]);
    assert!(shown.stdout.contains("TICKET-2") && shown.stdout.contains("    + rules: ingress tcp 80 from any"), "{shown:?}");
    assert_ne!(run(&root, &["audit", "nonsense"]).code, 0);
    assert_ne!(run(&ann, &["audit"]).code, 0, "an editor reads no tokens' hashes");

    // A bus that lost everything remembers it again. An export holds hashes of tokens, and is its owner's.
    let file = folder.0.join("export.jsonl");
    let export = file.display().to_string();
    let ran = groupcast(&["export", "--server", &url, "--name", "exporter", "--output", &export], &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
    plane.bus.server().kill();
    std::fs::remove_dir_all(plane.bus.server().dir().join("jetstream")).expect("lost");
    plane.bus.server().restart().await.expect("started");
    for _ in 0..2 {
        // The second brings nothing twice.
        let ran = groupcast(&["import", "--replace", "--server", &url, "--name", "importer", &export], &[]);
        assert_eq!(ran.code, 0, "{ran:?}");
    }
    eventually("the gateway follows the new bus", || async { audit(&["group/web", "-o", "jsonl"]).code == 0 }).await;
    let all = lines(&audit(&["group/web", "-o", "jsonl"]));
    assert_eq!(all.len(), 4, "{all:?}");
    assert!(all.iter().all(|item| item["imported"] == true), "{all:?}");
    check(&all);
}

/// The events of a watch that begins after this number, until one is this.
async fn watched(gateway: &Gateway, token: &str, last: u64, until: impl Fn(&str, &Value) -> bool) -> Vec<(String, Value)> {
    let stream = tokio::net::TcpStream::connect(gateway.address).await.expect("connected");
    let (read, mut write) = stream.into_split();
    let request = format!(
        "GET /v1/watch HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {token}\r\nLast-Event-ID: {last}\r\n\r\n",
        gateway.address
    );
    write.write_all(request.as_bytes()).await.expect("sent");
    let (mut lines, mut kind, mut events) = (BufReader::new(read).lines(), String::new(), Vec::new());
    let all = async {
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(name) = line.strip_prefix("event: ") {
                kind = name.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                let data: Value = serde_json::from_str(data).expect("JSON");
                let is_last = until(&kind, &data);
                events.push((kind.clone(), data));
                if is_last {
                    return;
                }
            }
        }
    };
    tokio::time::timeout(DEADLINE, all).await.expect("the event comes");
    events
}

/// After a restart a watcher was silently shown a part; `get changes` showed the last eight versions of a document.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_gateway_does_not_remember_is_said_to_be_missing() {
    let plane = Plane::start(0, LEASE).await;
    let (url, text) = (plane.url(), token(&plane.url(), "root", "admin", &[]));
    let mut number = 0;
    for mark in 0..30 {
        number = plane.catalog.write(&change(group("web", mark)), None).await.expect("written").number;
    }
    let gateway = Gateway::start(&url, &[]).await;
    let user = User::new(&gateway, &text).await;
    user.ready().await;
    let listed = user.get("/v1/changes?limit=1000").await;
    let count =
        listed.body["items"].as_array().map_or(0, |items| items.iter().filter(|item| item["changed_by"] == "ann").count());
    assert_eq!(count, 30, "all of them, not the last versions: {}", listed.text);
    // Everything that is asked for is there: no gap.
    let last = number;
    let events = watched(&gateway, &text, last - 20, |_, data| data["change"] == last).await;
    assert!(events.len() == 20 && events.iter().all(|(kind, _)| kind == "change"), "{events:?}");
    // More than it reads at start: a gap, then what it has.
    for mark in 0..CHANGES_MAX + 10 {
        number = plane.catalog.write(&change(group("db", mark)), None).await.expect("written").number;
    }
    drop(gateway);
    let gateway = Gateway::start(&url, &[]).await;
    user.at(&gateway).ready().await;
    let end = number;
    let events = watched(&gateway, &text, last, |_, data| data["change"] == end).await;
    assert_eq!((events[0].0.as_str(), &events[0].1["after"]), ("gap", &json!(last)), "{:?}", events.first());
    assert_eq!(events[0].1["before"], events[1].1["change"], "the next that is told");
    let events = watched(&gateway, &text, end - 5, |_, data| data["change"] == end).await;
    assert!(events.len() == 5 && events.iter().all(|(kind, _)| kind == "change"), "{events:?}");
    // A number that this bus has not reached is of one that was lost.
    let events = watched(&gateway, &text, end + 1_000, |_, data| data["change"] == end).await;
    assert!(
        events[0].0 == "gap" && events[0].1["detail"].as_str().is_some_and(|words| words.contains("restored")),
        "{:?}",
        events[0]
    );
}

/// AUDIT outlived CATALOG, which was restored from an export: what AUDIT has itself was brought back beside it by the second import.
#[tokio::test(flavor = "multi_thread")]
async fn an_audit_that_outlived_the_catalog_takes_nothing_twice() {
    let (folder, mut world) = (Folder::new("outlived"), World::one().await);
    let client = world.observer("operator").await;
    let (catalog, url, export) = (Catalog::new(client.clone()), world.server().url(), folder.0.join("export.jsonl"));
    let versions = 10;
    for mark in 0..versions {
        catalog.write(&change(group("web", mark)), None).await.expect("written");
    }
    let count = async |imported: bool| {
        let wanted = Wanted { kind: Some(CatalogKind::Group), limit: usize::MAX, ..Wanted::default() };
        let entries = Audit::new(client.clone()).read(&wanted).await.expect("it answers").0;
        entries.iter().filter(|entry| entry.imported == imported).count()
    };
    eventually("all is copied", || async { count(false).await == versions as usize }).await;
    let export = export.display().to_string();
    let ran = groupcast(&["export", "--server", &url, "--name", "exporter", "--output", &export], &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    lose_catalog(&client).await;
    for copies in 1..=2 {
        let ran = groupcast(&["import", "--replace", "--server", &url, "--name", "importer", &export], &[]);
        assert_eq!(ran.code, 0, "{ran:?}");
        eventually("what it wrote is copied", || async { count(false).await == versions as usize + copies }).await;
        assert_eq!(count(true).await, 0, "after import {copies}");
    }
}
