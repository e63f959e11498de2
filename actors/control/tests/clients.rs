//! The clients of CATALOG and REGISTRY on a real server.

use std::sync::Arc;

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{Options, connect};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_control::catalog::{Accepted, Catalog, Error};
use groupcast_control::change::{CHANGE_DOCUMENTS_MAX, Change, Expected, Promised, Record, Write, content_hash, record_id};
use groupcast_control::document::{Document, Name, encode_record};
use groupcast_control::log::{Log, Outcome, Outgoing, in_batch};
use groupcast_control::registry::{self, Elsewhere, Registry};
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Group, Workload};
use groupcast_policy::net::Prefix;

struct Bus {
    client: async_nats::Client,
    _server: Server,
}

impl Bus {
    async fn start() -> Self {
        let server = Server::start(Config::plain()).await.expect("a nats-server starts");
        let name = HostId::new("writer").unwrap();
        let (client, _events) = connect(Options::new(&[server.url()], Role::Controller, &name)).await.expect("connected");
        streams::ensure(&client, 1).await.expect("the streams can be made");
        Self { client, _server: server }
    }

    fn catalog(&self) -> Catalog {
        Catalog::new(self.client.clone())
    }

    fn registry(&self) -> Registry {
        Registry::new(self.client.clone())
    }
}

fn named(id: &str, name: &str) -> Document {
    Document::Group(Arc::new(Group { name: name.to_owned(), ..Group::new(id.parse().unwrap()) }))
}

fn name(id: &str) -> Name {
    Name::new(CatalogKind::Group, id).unwrap()
}

fn change(author: &str, key: Option<&str>, writes: Vec<Write>) -> Change {
    Change { author: author.to_owned(), reason: "a test".to_owned(), key: key.map(str::to_owned), writes }
}

async fn put(catalog: &Catalog, author: &str, id: &str, text: &str, expected: Expected) -> Result<Accepted, Error> {
    catalog.write(&change(author, None, vec![Write::put(named(id, text), expected)]), None).await
}

async fn shown(catalog: &Catalog, id: &str) -> Option<String> {
    match catalog.read(&name(id)).await.expect("the bus answers")?.document.expect("it can be read")? {
        Document::Group(group) => Some(group.name.clone()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_document_is_written_by_whoever_saw_the_last_version() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    let first = put(&catalog, "ann", "web", "one", Expected::Absent).await.unwrap();
    assert_eq!(first.revisions, [first.number]);
    let second = put(&catalog, "bob", "web", "two", Expected::Revision(first.number)).await.unwrap();
    for stale in [Expected::Revision(first.number), Expected::Absent] {
        match put(&catalog, "cid", "web", "three", stale).await {
            Err(Error::Conflict { name: conflicting, found, author, at }) => {
                assert_eq!((conflicting, found, author.as_str()), (name("web"), second.number, "bob"));
                assert!(at.elapsed().expect("in the past").as_secs() < 600);
            }
            other => panic!("{stale:?}: {other:?}"),
        }
    }
    assert!(matches!(put(&catalog, "cid", "no", "x", Expected::Revision(7)).await, Err(Error::Gone { .. })));
    put(&catalog, "dan", "web", "four", Expected::Any).await.unwrap();
    assert_eq!(shown(&catalog, "web").await.as_deref(), Some("four"));
    // What was deleted is absent, and can be written anew.
    catalog.write(&change("ann", None, vec![Write::delete(name("web"), Expected::Any)]), None).await.unwrap();
    assert_eq!(shown(&catalog, "web").await, None);
    put(&catalog, "ann", "web", "five", Expected::Absent).await.unwrap();
    assert_eq!(shown(&catalog, "web").await.as_deref(), Some("five"));
}

#[tokio::test]
async fn a_change_of_many_documents_is_written_whole_or_not_at_all() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    let many = |text: &str, expected: Expected| {
        vec![Write::put(named("a", text), Expected::Any), Write::put(named("b", text), expected)]
    };
    let first = catalog.write(&change("ann", None, many("one", Expected::Absent)), None).await.unwrap();
    assert_eq!(first.revisions, [first.number - 1, first.number]);
    let error = catalog.write(&change("bob", None, many("two", Expected::Absent)), None).await.unwrap_err();
    assert!(matches!(&error, Error::Conflict { name: n, author, .. } if *n == name("b") && author == "ann"), "{error}");
    assert_eq!(shown(&catalog, "a").await.as_deref(), Some("one"), "nothing of a refused change is there");
    let second = catalog.write(&change("bob", None, many("two", Expected::Revision(first.number))), None).await.unwrap();
    assert_eq!(catalog.change(second.number).await.unwrap().len(), 2);
    assert!(matches!(catalog.change(second.number - 1).await, Err(Error::UnknownChange(_))), "in the middle of a change");
    let (documents, refused) = catalog.documents().await.unwrap();
    assert_eq!((documents.len(), refused.len()), (2, 0));
}

#[tokio::test]
async fn a_repetition_with_the_same_key_finds_the_first() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    for documents in [1, 3] {
        let writes =
            |text: &str| (0..documents).map(|i| Write::put(named(&format!("d{documents}-{i}"), text), Expected::Any)).collect();
        let key = format!("key of {documents}");
        let first = catalog.write(&change("ann", Some(&key), writes("one")), None).await.unwrap();
        assert!(!first.repeated);
        put(&catalog, "bob", &format!("d{documents}-0"), "later", Expected::Any).await.unwrap();
        let again = catalog.write(&change("ann", Some(&key), writes("one")), None).await.unwrap();
        assert_eq!((again.number, again.revisions, again.repeated), (first.number, first.revisions, true));
        assert_eq!(shown(&catalog, &format!("d{documents}-0")).await.as_deref(), Some("later"), "it was not written twice");
        let other = catalog.write(&change("ann", Some(&key), writes("two")), None).await;
        assert!(matches!(other, Err(Error::KeyReused { number, .. }) if number == first.number), "{other:?}");
    }
}

fn keyed(key: &str, text: &str, expected: Expected) -> Change {
    change("ann", Some(key), vec![Write::put(named("web", text), expected)])
}

/// What a gateway leaves behind that dies after it has promised a change and before it writes it.
async fn promise(bus: &Bus, change: &Change, after: u64) {
    let key = change.key.clone().unwrap();
    let payloads = change.encode().unwrap();
    let record = Record {
        author: change.author.clone(),
        reason: change.reason.clone(),
        key: key.clone(),
        documents: 1,
        content: content_hash(&change.writes, &payloads),
        promised: Some(Promised { subject: change.writes[0].name.subject(), after }),
    };
    let subject = subjects::catalog(CatalogKind::Change, &record_id(&key)).unwrap();
    let message = Outgoing { subject, headers: Default::default(), expected: 0, payload: encode_record(&record) };
    assert!(matches!(Log::catalog(bus.client.clone()).write(&[message]).await, Outcome::Committed(_)));
}

/// It was a batch of two, which takes ten times as long as a message.
#[tokio::test]
async fn a_document_with_a_key_is_written_without_a_batch() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    let first = catalog.write(&keyed("k", "one", Expected::Absent), None).await.unwrap();
    let entry = Log::catalog(bus.client.clone()).at(first.number).await.unwrap().unwrap();
    assert_eq!(in_batch(&entry.headers), None);
    // It is a change like any other: shown, and taken back.
    assert_eq!(catalog.change(first.number).await.unwrap().len(), 1);
    let second = catalog.write(&keyed("l", "two", Expected::Revision(first.number)), None).await.unwrap();
    let undo = catalog.undo(second.number, "bob", "").await.unwrap();
    catalog.write(&undo, None).await.unwrap();
    assert_eq!(shown(&catalog, "web").await.as_deref(), Some("one"));
    // Another client, as after a restart of a gateway, remembers as much; and a stale one leaves no promise behind.
    assert_eq!(bus.catalog().write(&keyed("k", "one", Expected::Absent), None).await.unwrap().number, first.number);
    let stale = bus.catalog().write(&keyed("m", "three", Expected::Revision(first.number)), None).await;
    assert!(matches!(stale, Err(Error::Conflict { .. })), "{stale:?}");
    let record = subjects::catalog(CatalogKind::Change, &record_id("m")).unwrap();
    assert!(Log::catalog(bus.client.clone()).last(&record).await.unwrap().is_none());
}

#[tokio::test]
async fn a_promise_is_kept_once_by_whoever_asks_again() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    let first = put(&catalog, "bob", "web", "zero", Expected::Absent).await.unwrap();
    promise(&bus, &keyed("k", "one", Expected::Any), first.number).await;
    // Nobody knows whether it is about to be written, so nothing else has its key.
    let other = catalog.write(&keyed("k", "other", Expected::Any), None).await;
    assert!(matches!(other, Err(Error::KeyReused { .. })), "{other:?}");
    let kept = catalog.write(&keyed("k", "one", Expected::Any), None).await.unwrap();
    assert!(!kept.repeated && shown(&catalog, "web").await.as_deref() == Some("one"));
    put(&catalog, "bob", "web", "later", Expected::Any).await.unwrap();
    let again = catalog.write(&keyed("k", "one", Expected::Any), None).await.unwrap();
    assert_eq!((again.number, again.repeated), (kept.number, true));
    assert_eq!(shown(&catalog, "web").await.as_deref(), Some("later"), "it was not written twice");

    // One whose place went to another was never written, and is promised anew.
    let last = catalog.read(&name("web")).await.unwrap().unwrap().revision;
    promise(&bus, &keyed("l", "two", Expected::Any), last).await;
    put(&catalog, "bob", "web", "between", Expected::Any).await.unwrap();
    let kept = catalog.write(&keyed("l", "two", Expected::Any), None).await.unwrap();
    assert!(!kept.repeated && shown(&catalog, "web").await.as_deref() == Some("two"));
    assert!(catalog.write(&keyed("l", "two", Expected::Any), None).await.unwrap().repeated);
}

/// The version is not in CATALOG any more, and AUDIT says that it was; where nobody can say, it is not written again.
#[tokio::test]
async fn a_repetition_after_more_versions_than_are_kept_is_not_written_again() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    let first = catalog.write(&keyed("k", "one", Expected::Absent), None).await.unwrap();
    let (audit, begun) = (Log::audit(bus.client.clone()), std::time::Instant::now());
    while audit.last(&name("web").subject()).await.unwrap().is_none() {
        assert!(begun.elapsed().as_secs() < 60, "AUDIT does not follow");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for number in 0..=streams::CATALOG_HISTORY {
        put(&catalog, "bob", "web", &number.to_string(), Expected::Any).await.unwrap();
    }
    assert!(Log::catalog(bus.client.clone()).at(first.number).await.unwrap().is_none(), "it is gone");
    let again = catalog.write(&keyed("k", "one", Expected::Any), None).await.unwrap();
    assert_eq!((again.number, again.repeated), (first.number, true));
    // A promise of long ago, of which AUDIT knows nothing either.
    promise(&bus, &keyed("l", "two", Expected::Any), first.number).await;
    let forgotten = catalog.write(&keyed("l", "two", Expected::Any), None).await;
    assert!(matches!(forgotten, Err(Error::Forgotten { .. })), "{forgotten:?}");
    assert_eq!(shown(&catalog, "web").await, Some(streams::CATALOG_HISTORY.to_string()));
}

/// Several gateways are asked for the same at once, while others write the same document.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_key_is_good_for_one_version_however_many_ask_at_once() {
    const ROUNDS: usize = 40;
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    put(&catalog, "bob", "web", "zero", Expected::Absent).await.unwrap();
    for round in 0..ROUNDS {
        let text = format!("round {round}");
        let ask = |expected: Expected| {
            let (catalog, change) = (bus.catalog(), keyed(&text, &text, expected));
            async move {
                // As the command line does, until it is known.
                loop {
                    match catalog.write(&change, None).await {
                        Ok(accepted) => return accepted.number,
                        Err(Error::Busy | Error::Unknown { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        };
        let churn = async {
            for number in 0..4 {
                put(&bus.catalog(), "bob", "web", &format!("churn {number}"), Expected::Any).await.unwrap();
            }
        };
        let (one, two, three, ()) = tokio::join!(ask(Expected::Any), ask(Expected::Any), ask(Expected::Any), churn);
        assert!(one == two && two == three, "round {round}: {one} {two} {three}");
    }
    let mut written = std::collections::BTreeMap::new();
    for version in catalog.history(&name("web")).await.unwrap() {
        if let Ok(Some(Document::Group(group))) = version.document {
            *written.entry(group.name.clone()).or_insert(0) += 1;
        }
    }
    let twice: Vec<_> = written.iter().filter(|(text, count)| text.starts_with("round") && **count != 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    assert_eq!(written.keys().filter(|text| text.starts_with("round")).count(), ROUNDS);
}

#[tokio::test]
async fn many_writers_at_once_lose_nothing() {
    let bus = Bus::start().await;
    // Each takes the last text and adds its own letter, again and again until nobody was faster.
    let writers = (0..8).map(|writer| {
        let catalog = bus.catalog();
        tokio::spawn(async move {
            for _ in 0..5 {
                loop {
                    let version = catalog.read(&name("shared")).await.unwrap();
                    let (expected, text) = match version.map(|v| (v.revision, v.document)) {
                        Some((revision, Ok(Some(Document::Group(group))))) => (Expected::Revision(revision), group.name.clone()),
                        None => (Expected::Absent, String::new()),
                        other => panic!("{other:?}"),
                    };
                    match put(&catalog, "w", "shared", &format!("{text}{writer}"), expected).await {
                        Ok(_) => break,
                        Err(Error::Conflict { .. } | Error::Busy) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    assert_eq!(shown(&bus.catalog(), "shared").await.unwrap().len(), 40);
}

#[tokio::test]
async fn what_was_changed_can_be_taken_back_until_somebody_changes_it_again() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    put(&catalog, "ann", "a", "one", Expected::Absent).await.unwrap();
    let writes = vec![Write::put(named("a", "two"), Expected::Any), Write::put(named("new", "two"), Expected::Absent)];
    let changed = catalog.write(&change("ann", None, writes), None).await.unwrap();
    let undo = catalog.undo(changed.number, "bob", "").await.unwrap();
    assert!(undo.reason.contains(&changed.number.to_string()));
    catalog.write(&undo, None).await.unwrap();
    assert_eq!((shown(&catalog, "a").await.as_deref(), shown(&catalog, "new").await), (Some("one"), None));
    let again = catalog.undo(changed.number, "bob", "").await.unwrap();
    assert!(matches!(catalog.write(&again, None).await, Err(Error::Conflict { author, .. }) if author == "bob"));
    let history = catalog.history(&name("a")).await.unwrap();
    assert_eq!(history.iter().map(|v| v.author.as_str()).collect::<Vec<_>>(), ["bob", "ann", "ann"]);
    // Only so many versions are kept.
    let mut numbers = Vec::new();
    for i in 0..streams::CATALOG_HISTORY + 1 {
        numbers.push(put(&catalog, "ann", "b", &format!("{i}"), Expected::Any).await.unwrap().number);
    }
    assert_eq!(catalog.history(&name("b")).await.unwrap().len() as i64, streams::CATALOG_HISTORY);
    assert!(matches!(catalog.undo(numbers[0], "bob", "").await, Err(Error::UnknownChange(_))));
    assert!(matches!(catalog.undo(numbers[1], "bob", "").await, Err(Error::TooOld { .. })));
    assert!(catalog.undo(numbers[2], "bob", "").await.is_ok());
}

#[tokio::test]
async fn the_largest_change_fits_and_the_audit_sees_it() {
    let bus = Bus::start().await;
    let catalog = bus.catalog();
    let writes = (0..CHANGE_DOCUMENTS_MAX).map(|i| Write::put(named(&format!("g{i}"), "x"), Expected::Absent)).collect();
    let accepted = catalog.write(&change("ann", Some("large"), writes), None).await.unwrap();
    assert_eq!(accepted.revisions.len(), CHANGE_DOCUMENTS_MAX);
    assert_eq!(catalog.change(accepted.number).await.unwrap().len(), CHANGE_DOCUMENTS_MAX);
    let context = async_nats::jetstream::new(bus.client.clone());
    let start = std::time::Instant::now();
    loop {
        let info = context.get_stream(streams::AUDIT.name).await.unwrap().get_info().await.unwrap();
        if info.state.messages > CHANGE_DOCUMENTS_MAX as u64 {
            break;
        }
        assert!(start.elapsed().as_secs() < 60, "AUDIT holds {} messages", info.state.messages);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

fn workload(host: &str, id: &str, last: u8) -> Workload {
    let mut workload = Workload::new(id.parse().unwrap(), host.parse().unwrap(), "net".parse().unwrap());
    workload.addresses.insert(Prefix::v4(0x0a00_0000 + u32::from(last), 32).unwrap());
    workload
}

#[tokio::test]
async fn an_address_belongs_to_one_workload() {
    let bus = Bus::start().await;
    let registry = bus.registry();
    let (h1, h2): (HostId, HostId) = ("h1".parse().unwrap(), "h2".parse().unwrap());
    let first = registry.register(&h1, &[workload("h1", "a", 1), workload("h1", "b", 2)], Elsewhere::Refuse).await.unwrap();
    assert_eq!(first.incarnations.iter().map(|(_, i)| *i).collect::<Vec<_>>(), [1, 1]);
    let again = registry.register(&h1, &[workload("h1", "a", 1)], Elsewhere::Refuse).await.unwrap();
    assert!(again.sequence <= first.sequence, "nothing changed, nothing is written");
    let error = registry.register(&h2, &[workload("h2", "c", 1)], Elsewhere::Refuse).await.unwrap_err();
    assert!(matches!(&error, registry::Error::AddressHeld { workload, host, .. } if workload == "a" && host == "h1"), "{error}");
    let error = registry.register(&h2, &[workload("h2", "a", 9)], Elsewhere::Refuse).await.unwrap_err();
    assert!(matches!(&error, registry::Error::AliveElsewhere { host, .. } if *host == h1), "{error}");
    // A workload that changes its address gives the old one back.
    registry.register(&h1, &[workload("h1", "a", 3)], Elsewhere::Refuse).await.unwrap();
    registry.register(&h2, &[workload("h2", "c", 1)], Elsewhere::Refuse).await.unwrap();
    // A source may move one.
    let moved = registry.register(&h2, &[workload("h2", "a", 3)], Elsewhere::Move).await.unwrap();
    assert_eq!(moved.incarnations[0].1, 2);
    // Whoever leaves leaves nothing behind, and comes back to a new life.
    let left = registry.deregister(&h1).await.unwrap();
    assert_eq!(left.incarnations.len(), 1, "{left:?}");
    let back = registry.register(&h1, &[workload("h1", "b", 2)], Elsewhere::Refuse).await.unwrap();
    assert_eq!(back.incarnations[0].1, 2);
}

#[tokio::test]
async fn of_many_who_claim_one_address_at_once_one_gets_it() {
    let bus = Bus::start().await;
    let claims = (0..16).map(|i| {
        let registry = bus.registry();
        tokio::spawn(async move {
            let name = format!("h{i}");
            let result =
                registry.register(&name.parse().unwrap(), &[workload(&name, &format!("w{i}"), 7)], Elsewhere::Refuse).await;
            match result {
                Ok(_) => 1,
                Err(registry::Error::AddressHeld { .. }) => 0,
                Err(other) => panic!("{other}"),
            }
        })
    });
    let mut winners = 0;
    for claim in claims.collect::<Vec<_>>() {
        winners += claim.await.unwrap();
    }
    assert_eq!(winners, 1);
}
