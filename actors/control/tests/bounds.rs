//! What hosts enrol, at its bounds: whatever is let into REGISTRY can be read again, judged, and taken away. On a real server.

use async_nats::HeaderMap;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{Options, connect};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_control::document::{Claim, DOCUMENT_BYTES_MAX, decode_workload, encode_record, encode_workload};
use groupcast_control::log::{Log, Outcome, Outgoing};
use groupcast_control::registry::upgrade::upgrade;
use groupcast_control::registry::{Enrolment, Error, Fate, Limits, Registered, Registry};
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;

/// The most that a template can allow.
const WIDEST: Limits = Limits { workloads_max: 1_000_000, addresses_max: 1_000_000 };

struct Bus {
    client: async_nats::Client,
    registry: Registry,
    log: Log,
    _server: Server,
}

impl Bus {
    async fn start() -> Self {
        let server = Server::start(Config::plain()).await.expect("a nats-server starts");
        let name = HostId::new("writer").unwrap();
        let (client, _events) = connect(Options::new(&[server.url()], Role::Controller, &name)).await.expect("connected");
        streams::ensure(&client, 1).await.expect("the streams can be made");
        let (registry, log) = (Registry::new(client.clone()), Log::registry(client.clone()));
        Self { client, registry, log, _server: server }
    }

    /// As the registrar does for a host.
    async fn enrol(&self, boot: u64, limits: Limits, workloads: &[Workload]) -> Result<Registered, Error> {
        let enrolment = Enrolment { boot, template: Some("vm".to_owned()), limits };
        for attempt in 0..10 {
            let before = self.registry.before(&h1(), attempt == 0).await?;
            if let Some(registered) = self.registry.enrol(&h1(), before, &enrolment, workloads).await? {
                return Ok(registered);
            }
        }
        Err(Error::Busy)
    }

    /// As an import, or an earlier version, did.
    async fn written(&self, subject: &str, payload: Vec<u8>) {
        let message = Outgoing { subject: subject.to_owned(), headers: HeaderMap::new(), expected: 0, payload };
        assert!(matches!(self.log.write(&[message]).await, Outcome::Committed(_)), "{subject} is written");
    }

    async fn payload(&self, key: RegistryKey) -> Vec<u8> {
        self.log.last(&key.subject()).await.expect("the bus answers").map(|entry| entry.payload.to_vec()).unwrap_or_default()
    }
}

fn h1() -> HostId {
    "h1".parse().unwrap()
}

/// With so many addresses from this one on.
fn workload(id: &str, first: u32, addresses: u32) -> Workload {
    let mut workload = Workload::new(id.parse().unwrap(), h1(), "net".parse().unwrap());
    workload.template = Some("vm".parse().unwrap());
    workload.addresses = (first..first + addresses).map(|bits| Prefix::v4(0x0a00_0000 + bits, 32).unwrap()).collect();
    workload
}

/// Broke: what the boot before had left was counted beside what the new one enrols, though it goes with it. A host that was more than half
/// full, and whose workloads have new names after a reboot, was refused for as long as it lived.
#[tokio::test]
async fn what_an_earlier_boot_left_does_not_count_against_the_next() {
    let bus = Bus::start().await;
    let few = Limits { workloads_max: 2, addresses_max: 2 };
    bus.enrol(1, few, &[workload("a", 1, 1), workload("b", 2, 1)]).await.expect("as many as it may");
    let refused = bus.enrol(1, few, &[workload("c", 3, 1)]).await;
    assert!(matches!(refused, Err(Error::Quota { .. })), "{refused:?}");
    bus.enrol(2, few, &[workload("c", 3, 1), workload("d", 4, 1)]).await.expect("the others went with their boot");
    assert!(bus.payload(RegistryKey::Workload("a".parse().unwrap())).await.is_empty());
    let refused = bus.enrol(2, few, &[workload("e", 5, 1)]).await;
    assert!(matches!(refused, Err(Error::Quota { found: 3, .. })), "what is there counts: {refused:?}");
}

/// Broke: a template may allow a host a million addresses, and one batch takes away at most 20,000. A host with more could neither be
/// removed nor deleted for silence.
#[tokio::test]
async fn whatever_a_host_was_let_enrol_can_be_taken_away() {
    const EACH: u32 = 2_600;
    let bus = Bus::start().await;
    let mut count = 0;
    for number in 0..8 {
        match bus.enrol(1, WIDEST, &[workload(&format!("w{number}"), number * EACH, EACH)]).await {
            Ok(_) => count += 1,
            Err(Error::Quota { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(count > 1, "more than what is usual fits");
    bus.registry.expel(&h1(), "removed by a test").await.expect("it can be removed");
    assert!(bus.payload(RegistryKey::Host(h1())).await.is_empty());
    // A host that is full comes back with others after a reboot, and the first go.
    for boot in 2..4 {
        let other = workload(&format!("other{boot}"), 100_000 * boot, 3 * EACH);
        bus.enrol(u64::from(boot), WIDEST, &[other]).await.expect("as much as it may");
    }
    bus.registry.expel(&h1(), "removed by a test").await.expect("it can be removed again");
    assert!(bus.payload(RegistryKey::Host(h1())).await.is_empty());
}

/// Broke: a request that is far beyond what its host may enrol was refused only after each of its addresses was looked up, and each of its
/// prefixes compared with everything: one message of a host cost the bus a quarter of a million.
#[tokio::test]
async fn what_is_beyond_a_hosts_share_by_itself_is_refused_before_anything_is_looked_up() {
    let bus = Bus::start().await;
    let usual = Limits::of(None);
    bus.enrol(1, usual, &[workload("a", 1, 1)]).await.expect("enrolled");
    let sent = || bus.client.statistics().out_messages.load(std::sync::atomic::Ordering::Relaxed);
    let many: Vec<Workload> = (0..40).map(|number| workload(&format!("w{number}"), 256 * (number + 1), 256)).collect();
    let mut widened = workload("wide", 0, 0);
    widened.addresses = (0..65).map(|number| Prefix::v4(0x0b00_0000 + 2 * number, 31).unwrap()).collect();
    for (workloads, words) in [(many, "addresses"), (vec![widened], "prefixes wider than one address")] {
        let before = sent();
        match bus.enrol(1, usual, &workloads).await {
            Err(Error::Quota { what, .. }) => assert_eq!(what, words),
            other => panic!("{other:?}"),
        }
        let cost = sent() - before;
        assert!(cost < 10, "{cost} messages for {words} that are refused");
    }
}

/// Broke: a host filled its entry to the last byte, so that it could not be marked as suspect, and whoever is not is never deleted.
#[tokio::test]
async fn a_host_that_fills_its_entry_can_still_be_marked() {
    let bus = Bus::start().await;
    // In the host's entry each takes the length of its network, twice that of its id, and so many more.
    const AROUND: usize = r#"["",""],"":0,"#.len();
    let long = |number: usize, network: usize, id: usize| {
        let mut workload = workload(&format!("{number:0id$}"), 0, 0);
        workload.network = "n".repeat(network).parse().unwrap();
        workload
    };
    let key = || RegistryKey::Host(h1());
    let mut number = 10_000;
    loop {
        let room = DOCUMENT_BYTES_MAX - bus.payload(key()).await.len();
        let (together, network, id) = match room {
            0..40 => break,
            // The last fills it to the byte.
            40..=205 => (1, 1 + (room - AROUND - 1) % 2, (room - AROUND - 1) / 2),
            206..410 => (1, 64, 40),
            _ => (room / 205 - 1, 64, 64),
        };
        let more: Vec<Workload> = (number..number + together).map(|number| long(number, network, id)).collect();
        number += together;
        match bus.enrol(1, WIDEST, &more).await {
            Ok(_) => {}
            Err(Error::TooLong { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    let entry = bus.log.last(&key().subject()).await.expect("the bus answers").expect("an entry");
    assert!(entry.payload.len() > DOCUMENT_BYTES_MAX - 1_000, "it is full: {}", entry.payload.len());
    let marked = bus.registry.mark(&h1(), entry.sequence, true, "silent").await;
    assert!(matches!(marked, Ok(Fate::Done)), "{marked:?} with {} bytes", entry.payload.len());
}

/// Documents hold numbers up to 2^63 - 1. A life beyond that is written as the last one that can be read: what could not be read could
/// not be removed either, nor could its host.
#[tokio::test]
async fn a_life_that_cannot_be_counted_further_can_still_be_read_and_ended() {
    let bus = Bus::start().await;
    let id = || "a".parse::<WorkloadId>().unwrap();
    bus.enrol(1, WIDEST, &[workload("a", 1, 1), workload("b", 2, 1)]).await.expect("enrolled");
    let last = Workload { incarnation: i64::MAX as u64, ..workload("a", 1, 1) };
    let key = || RegistryKey::Workload(id());
    let expected = bus.log.last(&key().subject()).await.unwrap().unwrap().sequence;
    let message = Outgoing { subject: key().subject(), headers: HeaderMap::new(), expected, payload: encode_workload(&last) };
    assert!(matches!(bus.log.write(&[message]).await, Outcome::Committed(_)), "as an import writes it");
    assert!(decode_workload(&id(), &bus.payload(key()).await).is_ok(), "such a life can be read");
    bus.enrol(2, WIDEST, &[workload("a", 1, 1)]).await.expect("in its next boot");
    let read = decode_workload(&id(), &bus.payload(key()).await);
    assert!(read.is_ok(), "{read:?}");
    bus.registry.expel(&h1(), "removed by a test").await.expect("it can be removed");
    // The trace remembers that life, and who comes back begins no unreadable one either.
    bus.enrol(3, WIDEST, &[workload("a", 1, 1)]).await.expect("it comes back");
    assert!(decode_workload(&id(), &bus.payload(key()).await).is_ok());
}

/// Broke: of two entries of one workload, on one network, the one with the old name took the claims on its addresses with it.
#[tokio::test]
async fn an_old_name_that_gives_way_leaves_the_holder_its_addresses() {
    let bus = Bus::start().await;
    bus.enrol(1, WIDEST, &[workload("a", 1, 2)]).await.expect("enrolled");
    // Written by a controller of the earlier version that was not stopped: one address is the holder's, one nobody's.
    bus.written("gc.reg.w.net.a", encode_workload(&workload("a", 2, 2))).await;
    let claim = Claim { workload: "a".to_owned(), host: "h1".to_owned() };
    bus.written("gc.reg.a.net.0a000003", encode_record(&claim)).await;
    assert_eq!(upgrade(&bus.client).await.expect("renamed"), 1);
    let held = |last: u8| RegistryKey::Address("net".parse().unwrap(), [10, 0, 0, last].into());
    assert!(!bus.payload(held(1)).await.is_empty() && !bus.payload(held(2)).await.is_empty(), "its holder lives");
    assert!(bus.payload(held(3)).await.is_empty(), "nobody would ever give it back");
}
