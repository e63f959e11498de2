//! Hosts that ask for what is another's, or for too much: one holder of an id, of an address and of every prefix over it, and a share
//! of what the registry writes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Claim, encode_record, encode_workload};
use groupcast_control::log::{Log, Outcome, Outgoing};
use groupcast_control::registration::grant::Grant;
use groupcast_control::registry::{Elsewhere, RANGES_OF_A_HOST_MAX, Registry};
use groupcast_messages::{HealthReport, HostRequest, RegisterAnswer, RegisterWorkload};
use groupcast_policy::ids::NetworkId;
use groupcast_policy::model::Template;
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;
use groupcast_tests::control::{Plane, address, group, workload};
use groupcast_tests::enrolled::{
    Guest, SHORT, allowed, asked, entries, gone, grant, incarnation, plane, put_template, refusal, sequence, template,
};
use groupcast_tests::world::eventually;
use groupcast_topics::reader;
use serde_json::Value;

fn network(id: &str) -> NetworkId {
    id.parse().expect("an id")
}

fn on(network_id: &str, asked: RegisterWorkload) -> RegisterWorkload {
    RegisterWorkload { network: network(network_id), ..asked }
}

/// A template of a network, and hosts that may use it.
async fn allowed_on(plane: &Plane, network_id: &str, hosts: &[&str]) {
    let mut other = template(network_id, hosts);
    other.network = network(network_id);
    put_template(plane, other).await;
    grant(plane, hosts).await;
}

/// Every entry of this workload: its network and its host.
async fn held(plane: &Plane, id: &str) -> Vec<(String, String)> {
    let observer = plane.bus.observer("observer-held").await;
    let text = |entry: &Value, field: &str| entry[field].as_str().unwrap_or_default().to_owned();
    let all = entries(&observer).await;
    let of_it = all.iter().filter(|(subject, entry)| subject.starts_with("gc.reg.w.") && entry["id"] == id);
    of_it.map(|(_, entry)| (text(entry, "network"), text(entry, "host"))).collect()
}

fn has(answer: &RegisterAnswer) -> bool {
    matches!(answer, RegisterAnswer::Registered { .. })
}

/// Regression: a host registered a living workload's id on another network, and got its groups; the victim was cut for ever.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_has_one_holder_whatever_the_network_and_the_loser_is_told_who() {
    let mut plane = plane(2).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    allowed(&plane, "vm", &["h1"]).await;
    allowed_on(&plane, "far", &["h2"]).await;
    let (victim, thief) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    victim.settle("vm", "w1", 5).await;
    let (retryable, reason) = refusal(&thief.enrol("far", vec![on("far", asked("w1", 9))]).await);
    assert!(retryable && ["workload w1", "host h1", "network net"].iter().all(|words| reason.contains(words)), "{reason}");
    assert_eq!(held(&plane, "w1").await, [("net".to_owned(), "h1".to_owned())]);
    // The victim's host is still told of it.
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    let own = Topic::Host("h1".parse().expect("an id"));
    eventually("the victim keeps its workload", || async {
        host.documents().await.get(&own).is_some_and(|document| format!("{document:?}").contains("w1"))
    })
    .await;
    // Once it is gone, the id is free for whoever asks, in another life.
    victim.leave().await;
    gone(&victim.client, "h1").await;
    assert_eq!(incarnation(&thief.enrol("far", vec![on("far", asked("w1", 9))]).await), 2);
    assert_eq!(held(&plane, "w1").await, [("far".to_owned(), "h2".to_owned())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_hosts_that_register_one_id_on_many_networks_at_once_one_wins() {
    let plane = plane(2).await;
    let mut guests = Vec::new();
    for number in 0..8 {
        let (name, on_network) = (format!("h{number}"), format!("net{number}"));
        allowed_on(&plane, &on_network, &[&name]).await;
        let guest = Guest::new(&plane, &name, 1).await;
        guest.beats(true);
        guests.push((guest, on_network));
    }
    for round in 0..10 {
        let id = format!("w{round}");
        let race = guests.iter().map(|(guest, net)| guest.enrol(net, vec![on(net, asked(&id, 100 + round))]));
        let answers = futures::future::join_all(race).await;
        assert_eq!(answers.iter().filter(|answer| has(answer)).count(), 1, "{answers:?}");
        for reason in answers.iter().filter(|answer| !has(answer)).map(|answer| refusal(answer).1) {
            assert!(reason.contains(&format!("workload {id}")) || reason.contains("try again"), "{reason}");
        }
        assert_eq!(held(&plane, &id).await.len(), 1);
    }
    // What the losers asked for left nothing behind.
    let all = entries(&plane.bus.observer("observer").await).await;
    let of = |kind: &str| all.keys().filter(|subject| subject.starts_with(kind)).count();
    assert_eq!((of("gc.reg.w."), of("gc.reg.a.")), (10, 10));
}

/// What a source placed has a holder too, and what a host enrolled is not a source's to take.
#[tokio::test(flavor = "multi_thread")]
async fn sources_and_hosts_do_not_take_ids_from_each_other() {
    let mut plane = plane(1).await;
    plane.put_groups(vec![group("web", &[], &[])]).await;
    allowed(&plane, "vm", &["h1"]).await;
    allowed_on(&plane, "far", &["h1", "h2"]).await;
    let (client, _events) = plane.bus.connect(0, Role::Controller, "source").await;
    let source = Registry::new(client);
    let placed = workload("h1", "os-p1", 5, &["web"]);
    let placed_on = placed.network.to_string();
    source.register(&placed.host, std::slice::from_ref(&placed), Elsewhere::Move).await.expect("placed");
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    // Neither another host nor the very host it was placed on may make another workload of it.
    for (guest, template, asked) in [(&two, "far", on("far", asked("os-p1", 9))), (&one, "far", on("far", asked("os-p1", 9)))] {
        let (_, reason) = refusal(&guest.enrol(template, vec![asked]).await);
        assert!(reason.contains("workload os-p1") && reason.contains("host h1"), "{reason}");
    }
    let (_, reason) = refusal(&one.enrol("vm", vec![asked("os-p1", 5)]).await);
    assert!(reason.contains("workload os-p1"), "{reason}");
    // Nor end it.
    let workloads = vec![(network(&placed_on), placed.id.clone())];
    one.request(HostRequest::Remove { boot: 1, workloads }).await;
    assert_eq!(held(&plane, "os-p1").await, [(placed_on, "h1".to_owned())]);
    // A source does not take what a host enrolled, wherever it wants to have it.
    assert!(has(&two.enrol("far", vec![on("far", asked("w2", 10))]).await));
    two.beats(true);
    for host in ["h1", "h2"] {
        let claim = workload(host, "w2", 11, &["web"]);
        let refused = source.register(&claim.host, std::slice::from_ref(&claim), Elsewhere::Move).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("host h2")), "on {host}");
    }
}

/// Regression: the entry on the old network stayed behind, with its address.
#[tokio::test(flavor = "multi_thread")]
async fn a_workload_that_its_own_host_moves_to_another_network_leaves_nothing_behind() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    allowed_on(&plane, "far", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let first = incarnation(&guest.enrol("vm", vec![asked("w1", 5)]).await);
    guest.beats(true);
    let moved = guest.enrol("far", vec![on("far", asked("w1", 6))]).await;
    assert!(incarnation(&moved) > first, "on another network it is another life: {moved:?}");
    assert_eq!(held(&plane, "w1").await, [("far".to_owned(), "h1".to_owned())]);
    let all = entries(&guest.client).await;
    let claims: Vec<&String> = all.keys().filter(|subject| subject.starts_with("gc.reg.a.")).collect();
    assert_eq!(claims, ["gc.reg.a.far.0a000006"], "the address is given back");
    assert_eq!(all["gc.reg.h.h1"]["workloads"], serde_json::json!([["far", "w1"]]));
    // A removal of what it was before comes late: it ends nothing.
    guest.request(HostRequest::Remove { boot: 1, workloads: vec![(network("net"), "w1".parse().expect("an id"))] }).await;
    assert_eq!(held(&plane, "w1").await.len(), 1);
    guest.leave().await;
    gone(&guest.client, "h1").await;
}

async fn grant_all(plane: &Plane, host: &str, networks: Vec<Prefix>) {
    let grant = Grant::new(host.parse().expect("an id"), networks);
    let writes = vec![Write::put(grant.document().expect("a document"), Expected::Any)];
    let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
    plane.catalog.write(&change, None).await.expect("written");
}

fn prefix(bits: u32, len: u8) -> Prefix {
    Prefix::v4(bits, len).expect("a prefix")
}

fn wide(id: &str, bits: u32, len: u8) -> RegisterWorkload {
    RegisterWorkload { addresses: [prefix(bits, len)].into(), ..asked(id, 0) }
}

/// Regression: a /31 or a /16 was registered over another host's living address.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_over_more_than_one_address_is_refused_unless_the_template_allows_it() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1", "h2"]).await;
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    one.settle("vm", "w1", 5).await;
    for len in [31, 24, 16] {
        let (retryable, reason) = refusal(&two.enrol("vm", vec![wide("w2", 0x0a00_0004, len)]).await);
        assert!(!retryable && reason.contains("workload w2") && reason.contains(&format!("/{len}")), "{reason}");
    }
    assert!(held(&plane, "w2").await.is_empty());
}

async fn allowed_wide(plane: &Plane, id: &str, hosts: &[&str]) {
    put_template(plane, Template { wide_prefixes: true, ..template(id, hosts) }).await;
    grant(plane, hosts).await;
}

/// Where a template allows prefixes, overlaps are judged as overlaps, both ways, and what is released is free again.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_over_anothers_address_is_refused_and_an_address_under_anothers_prefix_too() {
    let plane = plane(2).await;
    allowed_wide(&plane, "wide", &["h1", "h2"]).await;
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    one.settle("wide", "w1", 5).await;
    for len in [31, 24, 16] {
        let (retryable, reason) = refusal(&two.enrol("wide", vec![wide("w2", 0x0a00_0004, len)]).await);
        let words = ["10.0.0.5", "workload w1", "host h1", "network net"];
        assert!(retryable && words.iter().all(|words| reason.contains(words)), "{reason}");
    }
    // Beside it there is room, and under that none but the holder's own.
    assert!(has(&two.enrol("wide", vec![wide("w2", 0x0a00_0100, 24)]).await));
    two.beats(true);
    for (workload, held) in [
        (asked("w3", 0x0105), "10.0.1.0/24"),
        (wide("w3", 0x0a00_0180, 25), "10.0.1.0/24"),
        (wide("w3", 0x0a00_0000, 16), "10.0.1.0/24"),
    ] {
        let (_, reason) = refusal(&one.enrol("wide", vec![workload]).await);
        assert!(reason.contains(held) && reason.contains("workload w2") && reason.contains("host h2"), "{reason}");
    }
    // One host does not fill the network's document.
    let many = (0..RANGES_OF_A_HOST_MAX as u32).map(|number| prefix(0x0a10_0000 + 2 * number, 31));
    let full = RegisterWorkload { addresses: many.collect(), ..asked("w7", 0) };
    let (_, reason) = refusal(&two.enrol("wide", vec![full]).await);
    assert!(reason.contains(&format!("at most {RANGES_OF_A_HOST_MAX}")), "{reason}");
    // Two of one host share nothing either.
    let (_, reason) = refusal(&two.enrol("wide", vec![wide("w4", 0x0a00_0200, 24), asked("w5", 0x0207)]).await);
    assert!(reason.contains("w4") && reason.contains("w5"), "{reason}");
    // The same again changes nothing; what is given back is free for others.
    let before = sequence(&two.client).await;
    assert!(has(&two.enrol("wide", vec![wide("w2", 0x0a00_0100, 24)]).await));
    assert_eq!(sequence(&two.client).await, before, "nothing changed, nothing is written");
    assert!(has(&two.enrol("wide", vec![wide("w2", 0x0a00_0100, 25)]).await));
    assert!(has(&one.enrol("wide", vec![asked("w1", 5), asked("w3", 0x0185)]).await));
    two.leave().await;
    gone(&two.client, "h2").await;
    assert!(!entries(&one.client).await.contains_key("gc.reg.p.net"), "no range without its workload");
    assert!(has(&one.enrol("wide", vec![asked("w6", 0x0105)]).await));
}

/// One host claims a prefix while others claim addresses in it: never both.
#[tokio::test(flavor = "multi_thread")]
async fn of_hosts_that_claim_a_prefix_and_an_address_in_it_at_once_one_wins() {
    let plane = plane(2).await;
    let names: Vec<String> = (0..6).map(|number| format!("h{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    allowed_wide(&plane, "wide", &names).await;
    let mut guests = Vec::new();
    for name in &names {
        let guest = Guest::new(&plane, name, 1).await;
        guest.beats(true);
        guests.push(guest);
    }
    let (mut ranges, mut singles) = (0, 0);
    for round in 1..16_u32 {
        let race = guests.iter().zip(0_u32..).map(|(guest, number)| {
            let id = format!("w{round}-{number}");
            let claim = match number {
                0 => wide(&id, 0x0a00_0000 + (round << 8), 24),
                _ => asked(&id, (round << 8) + number),
            };
            guest.enrol("wide", vec![claim])
        });
        let answers = futures::future::join_all(race).await;
        let (range, addresses) = (has(&answers[0]), answers[1..].iter().filter(|answer| has(answer)).count());
        assert!(!(range && addresses > 0), "{answers:?}");
        ranges += usize::from(range);
        singles += addresses;
    }
    assert!(ranges + singles > 0, "somebody wins");
}

/// Regression: four quarters of IPv4 were no internet, and all of them a host's.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_does_not_become_the_internet_piece_by_piece() {
    let plane = plane(1).await;
    let everything = || vec![prefix(0, 0)];
    let all = Template { wide_prefixes: true, prefixes: everything().into_iter().collect(), ..template("all", &["h1"]) };
    put_template(&plane, all).await;
    grant_all(&plane, "h1", everything()).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    assert!(has(&guest.enrol("all", vec![wide("w1", 0, 2)]).await));
    guest.beats(true);
    for (id, bits, len) in [("w2", 0x4000_0000, 2), ("w2", 0x8000_0000, 1)] {
        let (retryable, reason) = refusal(&guest.enrol("all", vec![wide(id, bits, len)]).await);
        assert!(!retryable && reason.contains("internet") && reason.contains("host h1"), "{reason}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_enrols_as_many_workloads_and_addresses_as_its_template_allows() {
    let plane = plane(1).await;
    let few = Template { workloads_max: 3, addresses_max: 4, ..template("few", &["h1", "h2"]) };
    put_template(&plane, few).await;
    grant(&plane, &["h1", "h2"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    assert!(has(&guest.enrol("few", vec![asked("w1", 1), asked("w2", 2), asked("w3", 3)]).await));
    guest.beats(true);
    let (retryable, reason) = refusal(&guest.enrol("few", vec![asked("w4", 4)]).await);
    assert!(!retryable && reason.contains("4 workloads, at most 3"), "{reason}");
    let more = RegisterWorkload { addresses: [address(1), address(4), address(5)].into(), ..asked("w1", 1) };
    let (retryable, reason) = refusal(&guest.enrol("few", vec![more]).await);
    assert!(!retryable && reason.contains("5 addresses, at most 4"), "{reason}");
    // At the bound it fits, and another host has a share of its own.
    let two = RegisterWorkload { addresses: [address(1), address(4)].into(), ..asked("w1", 1) };
    assert!(has(&guest.enrol("few", vec![two]).await));
    let other = Guest::new(&plane, "h2", 1).await;
    assert!(has(&other.enrol("few", vec![asked("v1", 11), asked("v2", 12), asked("v3", 13)]).await));
    // What is removed counts no more.
    guest.request(HostRequest::Remove { boot: 1, workloads: vec![(network("net"), "w3".parse().expect("an id"))] }).await;
    assert!(has(&guest.enrol("few", vec![asked("w4", 6)]).await));
}

/// What a version before this one wrote is renamed when a controller starts: whoever came first keeps the id.
#[tokio::test(flavor = "multi_thread")]
async fn entries_of_an_earlier_version_are_renamed_and_the_first_holder_keeps_its_id() {
    let mut plane = plane(0).await;
    let client = plane.bus.connect(0, Role::Controller, "former").await.0;
    let log = Log::registry(client.clone());
    let mut far = workload("h2", "w1", 9, &[]);
    far.network = network("far");
    for (subject, entry) in [
        ("gc.reg.w.net.w1", workload("h1", "w1", 5, &[])),
        ("gc.reg.w.far.w1", far),
        ("gc.reg.w.net.w2", workload("h1", "w2", 6, &[])),
    ] {
        let message =
            Outgoing { subject: subject.to_owned(), headers: Default::default(), expected: 0, payload: encode_workload(&entry) };
        assert!(matches!(log.write(&[message]).await, Outcome::Committed(_)));
    }
    // The claim of the later holder would stay for ever: it carries the id that the first keeps.
    let claim = |host: &str| encode_record(&Claim { workload: "w1".to_owned(), host: host.to_owned() });
    for (subject, payload) in [("gc.reg.a.net.0a010005", claim("h1")), ("gc.reg.a.far.0a010009", claim("h2"))] {
        let message = Outgoing { subject: subject.to_owned(), headers: Default::default(), expected: 0, payload };
        assert!(matches!(log.write(&[message]).await, Outcome::Committed(_)));
    }
    plane.add_controller_with(&SHORT);
    plane.ready().await;
    let mut all = entries(&client).await;
    assert!(all.remove("gc.reg.a.net.0a010005").is_some(), "the first holder keeps its address");
    let held: Vec<(&str, &Value)> = all.iter().map(|(subject, entry)| (subject.as_str(), &entry["host"])).collect();
    assert_eq!(held, [("gc.reg.w.w1", &Value::from("h1")), ("gc.reg.w.w2", &Value::from("h1"))]);
}

/// Regression: twenty workloads added at the same moment were told that too many hosts register at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_adds_forty_workloads_at_once_is_answered_forty_times() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    guest.beats(true);
    let asking = (0..40_u32).map(|number| guest.enrol("vm", vec![asked(&format!("w{number}"), 100 + number)]));
    let answers = futures::future::join_all(asking).await;
    assert!(answers.iter().all(has), "{answers:?}");
}

/// Regression: each flap of a workload's health was a write to REGISTRY, and one to AUDIT.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_flaps_at_full_speed_fills_nothing_and_keeps_nobody_waiting() {
    const FLAPS: u64 = 600;
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1", "h2", "h3"]).await;
    let other = Guest::new(&plane, "h2", 1).await;
    let normal = Instant::now();
    other.settle("vm", "w2", 6).await;
    let normal = normal.elapsed();
    let flapping = Guest::new(&plane, "h1", 1).await;
    let life = flapping.settle("vm", "w1", 5).await;
    let observer = plane.bus.observer("observer").await;
    let before = sequence(&observer).await;
    let begun = Instant::now();
    let flap = async {
        let mut answers = BTreeMap::<bool, u64>::new();
        for number in 0..FLAPS {
            let report = HealthReport {
                network: network("net"),
                workload: "w1".parse().expect("an id"),
                incarnation: life,
                healthy: number % 2 == 1,
            };
            let answer = flapping.request(HostRequest::Health { boot: 1, reports: vec![report] }).await;
            *answers.entry(format!("{answer:?}").contains("Done")).or_default() += 1;
            if begun.elapsed() > Duration::from_secs(20) {
                break;
            }
        }
        answers
    };
    let third = Guest::new(&plane, "h3", 1).await;
    let join = async {
        let begun = Instant::now();
        third.settle("vm", "w3", 7).await;
        begun.elapsed()
    };
    let (answers, joined) = tokio::join!(flap, join);
    let flaps: u64 = answers.values().sum();
    let seconds = begun.elapsed().as_secs() + 1;
    let written = sequence(&observer).await - before;
    // The flapping host's share, what its refusals leave, and what the third host writes.
    let share = 32 + seconds + 16 + 8;
    assert!(flaps > 4 * share, "it flapped {flaps} times in {seconds} s, too seldom to show anything");
    assert!(written <= share, "{written} writes for {flaps} flaps in {seconds} s, at most {share}");
    assert!(joined < 10 * normal.max(Duration::from_millis(50)), "another joined in {joined:?}, before in {normal:?}");
}
