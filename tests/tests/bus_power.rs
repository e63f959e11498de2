//! What was acknowledged survives a power cut. The servers' stores are on disks that lose what was not flushed; the power goes at random
//! moments while changes are written, for all servers at once, and afterwards every acknowledged change must be there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_bus_config::server::{Cluster, Config, Flushes, NODES, Server};
use groupcast_bus_config::{alive, streams};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::model::{Group, Workload};
use groupcast_policy::net::Prefix;
use groupcast_tests::disk::Disk;
use groupcast_tests::gateway::{Gateway, User, groupcast, scratch, token};
use groupcast_tests::world::{DEADLINE, eventually, full, seed};

/// Writers at once, each with documents of its own.
const WRITERS: usize = 8;
/// Cuts, and those of `./test --full`.
const CUTS: u64 = 4;
const CUTS_THREE: u64 = 1;
const CUTS_FULL: u64 = 100;
/// Buses of three servers among which they are divided.
const BUSES_FULL: u64 = 5;
/// Cuts after which a server that flushes late must have lost something.
const CUTS_LATE_MAX: u64 = 10;
/// A power cut comes this long after the writers began, at most.
const CUT_WITHIN_MS: u64 = 400;

enum Bus {
    One(Box<Server>),
    Three(Box<Cluster>),
}

struct Powered {
    bus: Bus,
    disks: Vec<Disk>,
    folder: std::path::PathBuf,
}

impl Drop for Powered {
    fn drop(&mut self) {
        // Servers first: their files are on the disks.
        self.kill();
        self.disks.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Powered {
    /// `None`, and a word, where this machine has no disks to cut.
    async fn start(servers: usize, flushes: Flushes) -> Option<Self> {
        let folder = scratch("power");
        let stores: Vec<_> = match servers {
            1 => vec![folder.clone()],
            _ => (0..servers).map(|node| folder.join(format!("node-{node}"))).collect(),
        };
        let mut disks = Vec::new();
        for (number, store) in stores.iter().enumerate() {
            // Where the server keeps its streams; its configuration and log stay off the disk.
            std::fs::create_dir_all(store).expect("a folder");
            match Disk::mount(&folder.join(format!("disk-{number}")), &store.join("jetstream")) {
                Ok(disk) => disks.push(disk),
                Err(why) => {
                    eprintln!("SKIPPED: no power can be cut here, so this test shows nothing: {why}");
                    assert!(!full(), "with GROUPCAST_FULL this test must run: {why}");
                    return None;
                }
            }
        }
        let config = Config::plain().store_dir(&folder).flushes(flushes);
        let bus = match servers {
            1 => Bus::One(Box::new(Server::start(config).await.expect("a server"))),
            _ => Bus::Three(Box::new(Cluster::start(config).await.expect("a cluster"))),
        };
        Some(Self { bus, disks, folder })
    }

    fn urls(&self) -> Vec<String> {
        match &self.bus {
            Bus::One(server) => vec![server.url()],
            Bus::Three(cluster) => cluster.urls(),
        }
    }

    fn kill(&mut self) {
        match &mut self.bus {
            Bus::One(server) => server.kill(),
            Bus::Three(cluster) => (0..NODES).for_each(|node| cluster.kill(node)),
        }
    }

    async fn client(&self, name: &str) -> async_nats::Client {
        let options = Options::new(&self.urls(), Role::Controller, &HostId::new(name).expect("a name"));
        connect::connect(options).await.expect("connected").0
    }

    /// The power goes for all of them at once, and comes back.
    async fn cut(&mut self) {
        // Stopped first, so that none goes on while another is cut: no acknowledgement is sent from here on.
        match &self.bus {
            Bus::One(server) => server.pause().expect("stopped"),
            Bus::Three(cluster) => (0..NODES).for_each(|node| cluster.pause(node).expect("stopped")),
        }
        self.disks.iter().for_each(|disk| disk.cut().expect("the power goes"));
        self.kill();
        self.disks.iter_mut().for_each(|disk| disk.restore().expect("the power comes back"));
        match &mut self.bus {
            Bus::One(server) => server.restart().await.expect("it starts again"),
            Bus::Three(cluster) => {
                for node in 0..NODES {
                    cluster.restart(node).await.expect("it starts again");
                }
                cluster.formed().await.expect("a cluster again");
            }
        }
    }
}

/// The last version of each document, and incarnation of each workload, that somebody was told is stored.
type Acknowledged = Arc<Mutex<BTreeMap<String, u64>>>;

fn group(name: &str, mark: u32) -> Document {
    let mut group = Group::new(name.parse().expect("an id"));
    group.members.insert(Prefix::v4(mark, 32).expect("an address"));
    Document::Group(Arc::new(group))
}

fn change(writes: Vec<Write>) -> Change {
    Change { author: "power".to_owned(), reason: "before the cut".to_owned(), key: None, writes }
}

/// Writes until the bus fails: even writers one document at a time, odd ones two in one batch.
async fn write(catalog: Catalog, writer: usize, life: u64, acknowledged: Acknowledged) {
    for number in 0u32.. {
        let mark = 0x0a00_0000 + (life as u32) * 100_000 + number;
        let names: Vec<String> = (0..1 + writer % 2).map(|part| format!("g{writer}-{part}")).collect();
        let writes = names.iter().map(|name| Write::put(group(name, mark), Expected::Any)).collect();
        let Ok(accepted) = catalog.write(&change(writes), None).await else { return };
        let mut acknowledged = acknowledged.lock().expect("lock");
        for (name, revision) in names.into_iter().zip(accepted.revisions) {
            acknowledged.insert(name, revision);
        }
    }
}

/// Registers workloads, one after the other.
async fn register(registry: Registry, life: u64, acknowledged: Acknowledged) {
    let host = HostId::new("h1").expect("an id");
    for number in 0u64.. {
        let name = format!("w{life}-{number}");
        let mut workload = Workload::new(name.parse().expect("an id"), host.clone(), "net".parse().expect("an id"));
        let address = 0x0b00_0000 + (life as u32) * 10_000 + number as u32;
        workload.addresses.insert(Prefix::v4(address, 32).expect("an address"));
        let Ok(registered) = registry.register(&host, &[workload], Elsewhere::Refuse).await else { return };
        // Written once: what counts is that it is there.
        acknowledged.lock().expect("lock").insert(name, registered.sequence.min(1));
    }
}

/// What was acknowledged and is not there.
async fn lost(client: &async_nats::Client, acknowledged: &BTreeMap<String, u64>) -> Vec<String> {
    let (catalog, registry) = (Catalog::new(client.clone()), groupcast_control::log::Log::registry(client.clone()));
    let (mut lost, start) = (Vec::new(), Instant::now());
    // What was never flushed may be a whole stream.
    for stream in [&streams::CATALOG, &streams::REGISTRY] {
        if let Err(gone @ alive::Error::Missing { .. }) = alive::look(client, stream, DEADLINE).await {
            lost.push(gone.to_string());
        }
    }
    if !lost.is_empty() {
        return lost;
    }
    for (name, revision) in acknowledged {
        let found = loop {
            let found = match name.starts_with('g') {
                true => {
                    let name = Name::new(groupcast_bus_config::subjects::CatalogKind::Group, name).expect("a name");
                    catalog.read(&name).await.map(|version| version.map_or(0, |version| version.revision))
                }
                false => {
                    let workload = WorkloadId::new(name).expect("an id");
                    let subject = groupcast_bus_config::subjects::registry_workload(&workload);
                    registry.last(&subject).await.map(|entry| entry.map_or(0, |entry| entry.sequence))
                }
            };
            match found {
                Ok(found) => break found,
                // The servers elect a leader.
                Err(error) => assert!(start.elapsed() < DEADLINE, "the streams do not come back: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        if found < *revision {
            lost.push(format!("{name}: {revision} was acknowledged, {found} is there"));
        }
    }
    lost
}

/// Cuts the power so often, or until something is lost. `None` where it cannot be cut.
async fn cuts(servers: usize, flushes: Flushes, count: u64) -> Option<Vec<String>> {
    cuts_with(seed(), servers, flushes, count).await
}

async fn cuts_with(mut random: u64, servers: usize, flushes: Flushes, count: u64) -> Option<Vec<String>> {
    let mut powered = Powered::start(servers, flushes).await?;
    let acknowledged = Acknowledged::default();
    streams::ensure(&powered.client("setup").await, servers).await.expect("the streams");
    for life in 0..count {
        let mut tasks = Vec::new();
        let before: u64 = acknowledged.lock().expect("lock").values().sum();
        for writer in 0..WRITERS {
            let client = powered.client(&format!("w{writer}")).await;
            tasks.push(tokio::spawn(write(Catalog::new(client), writer, life, acknowledged.clone())));
        }
        let registry = Registry::new(powered.client("registry").await);
        tasks.push(tokio::spawn(register(registry, life, acknowledged.clone())));
        // Something was acknowledged in this life, or nothing could be lost.
        let start = Instant::now();
        while acknowledged.lock().expect("lock").values().sum::<u64>() == before {
            assert!(start.elapsed() < DEADLINE, "nothing is acknowledged");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        tokio::time::sleep(Duration::from_millis((random >> 33) % CUT_WITHIN_MS)).await;
        powered.cut().await;
        // Whoever writes still would write into the next life: none of the last one's acknowledgements is under way any more.
        tasks.iter().for_each(|task| task.abort());
        for task in tasks {
            let _ = task.await;
        }
        let acknowledged = acknowledged.lock().expect("lock").clone();
        let lost = lost(&powered.client("reader").await, &acknowledged).await;
        eprintln!("cut {} of {count}: {} acknowledged, {} lost", life + 1, acknowledged.len(), lost.len());
        if !lost.is_empty() {
            return Some(lost);
        }
    }
    Some(Vec::new())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_server_loses_nothing_that_was_acknowledged() {
    let count = if full() { CUTS_FULL } else { CUTS };
    if let Some(lost) = cuts(1, Flushes::default(), count).await {
        assert!(lost.is_empty(), "{lost:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_servers_that_lose_power_at_once_lose_nothing_that_was_acknowledged() {
    // Three servers spend most of the time waiting before they elect a leader, so several buses are cut beside each other.
    let (buses, count) = if full() { (BUSES_FULL, CUTS_FULL / BUSES_FULL) } else { (1, CUTS_THREE) };
    let seed = seed();
    let cut = (0..buses).map(|bus| tokio::spawn(cuts_with(seed + bus, NODES, Flushes::default(), count)));
    for ended in futures::future::join_all(cut).await {
        let lost = ended.expect("it ends").unwrap_or_default();
        assert!(lost.is_empty(), "{lost:#?}");
    }
}

/// What shows that the tests above can fail: what the servers did until now.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_flushes_late_loses_what_was_acknowledged() {
    if let Some(lost) = cuts(1, Flushes::Within(Duration::from_secs(120)), CUTS_LATE_MAX).await {
        assert!(!lost.is_empty(), "nothing was lost in {CUTS_LATE_MAX} cuts");
    }
}

/// What `doctor` says about the bus, past any gateway.
fn doctor(powered: &Powered) -> String {
    let servers = powered.urls().join(",");
    groupcast(&["doctor", "--on-bus", "--server", &servers, "--name", "doctor"], &[]).stdout
}

async fn doctor_says(powered: &Powered, words: &[&str]) {
    let start = Instant::now();
    loop {
        let said = doctor(powered);
        if words.iter().all(|word| said.contains(word)) {
            return;
        }
        assert!(start.elapsed() < DEADLINE, "doctor does not say {words:?}:\n{said}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// With one disk full, one server gone, or a stream missing, doctor said that all was well, or to start a controller.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_the_server_and_the_step_that_mends_it() {
    let Some(mut powered) = Powered::start(NODES, Flushes::default()).await else { return };
    let client = powered.client("setup").await;
    streams::ensure(&client, NODES).await.expect("the streams");
    let catalog = Catalog::new(client.clone());
    let write = async || catalog.write(&change(vec![Write::put(group("web", 0x0a00_0001), Expected::Any)]), None).await;
    write().await.expect("written");
    doctor_says(&powered, &["ok   stores: all streams exist in 3 copies", "ok   audit"]).await;

    // A disk without room: that server switches JetStream off, and the others go on.
    let Bus::Three(cluster) = &powered.bus else { unreachable!("three were started") };
    let full = (0..NODES).find(|node| client.server_info().server_name != cluster.node(*node).name()).expect("another");
    let name = cluster.node(full).name().to_owned();
    powered.disks[full].fill().expect("filled");
    let start = Instant::now();
    loop {
        let _ = write().await; // one that a leader on the full disk would have taken is lost, and not acknowledged
        let said = doctor(&powered);
        if said.contains(&format!("BAD  stores: server {name}")) {
            assert!(
                said.contains("is its disk full?") && said.contains("free room in its store_dir") && said.contains("restart it"),
                "{said}"
            );
            break;
        }
        assert!(start.elapsed() < DEADLINE, "doctor does not name {name}:\n{said}");
    }
    // What doctor advises mends it.
    std::fs::remove_file(powered.folder.join(format!("node-{full}/jetstream/ballast"))).expect("room");
    let Bus::Three(cluster) = &mut powered.bus else { unreachable!("three were started") };
    cluster.kill(full);
    cluster.restart(full).await.expect("started");
    doctor_says(&powered, &["ok   stores: all streams exist in 3 copies"]).await;

    // A server that is gone.
    let Bus::Three(cluster) = &mut powered.bus else { unreachable!("three were started") };
    cluster.kill(full);
    doctor_says(&powered, &[&format!("BAD  stores: server {name}"), "does nats-server run on"]).await;
    let Bus::Three(cluster) = &mut powered.bus else { unreachable!("three were started") };
    cluster.restart(full).await.expect("started");
    doctor_says(&powered, &["ok   stores: all streams exist in 3 copies"]).await;

    // A stream that is lost is not to be made anew, but restored.
    let deleted = client.request(groupcast_bus_config::subjects::js_api("STREAM.DELETE", "CATALOG"), "".into()).await;
    assert!(String::from_utf8_lossy(&deleted.expect("an answer").payload).contains("success"));
    doctor_says(&powered, &["BAD  stores: CATALOG does not exist", "groupcast import"]).await;
}

/// Servers that flush late are named at start and by doctor, if their monitoring is.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_flushes_late_is_named() {
    for (flushes, grade) in [(Flushes::Within(Duration::from_secs(10)), "BAD  flushing"), (Flushes::Always, "ok   flushing")] {
        let server = Server::start(Config::plain().flushes(flushes)).await.expect("a server");
        let (url, monitor) = (server.url(), format!("http://127.0.0.1:{}", server.monitor_port()));
        let options = Options::new(std::slice::from_ref(&url), Role::Controller, &HostId::new("setup").expect("a name"));
        let (client, _events) = connect::connect(options).await.expect("connected");
        streams::ensure(&client, 1).await.expect("the streams");
        let said = groupcast(&["doctor", "--on-bus", "--server", &url, "--name", "doctor", "--monitor", &monitor], &[]).stdout;
        assert!(said.contains(grade), "{said}");
        let gateway = Gateway::start(&url, &["--monitor", &monitor]).await;
        let is_late = flushes != Flushes::Always;
        if is_late {
            eventually("the gateway says so", || async { gateway.log().contains("before it is on disk") }).await;
        }
        let token = token(&url, "root", "admin", &[]);
        let address = gateway.url();
        let environment = [("GROUPCAST_GATEWAY", address.as_str()), ("GROUPCAST_TOKEN", token.as_str())];
        eventually("doctor says so through the gateway", || async {
            groupcast(&["doctor"], &environment).stdout.contains(grade)
        })
        .await;
        assert_eq!(gateway.log().contains("before it is on disk"), is_late);
    }
}

/// A server without room answered everything but changes, and doctor called the bus good.
#[tokio::test(flavor = "multi_thread")]
async fn a_single_server_without_room_is_named() {
    let Some(powered) = Powered::start(1, Flushes::default()).await else { return };
    let url = powered.urls().remove(0);
    streams::ensure(&powered.client("setup").await, 1).await.expect("the streams");
    let token = token(&url, "root", "admin", &[]);
    let gateway = Gateway::start(&url, &[]).await;
    let user = User::new(&gateway, &token).await;
    user.ready().await;
    let address = gateway.url();
    let environment = [("GROUPCAST_GATEWAY", address.as_str()), ("GROUPCAST_TOKEN", token.as_str())];
    powered.disks[0].fill().expect("filled");
    let file = powered.folder.join("web.json");
    let start = Instant::now();
    for number in 0.. {
        let document = serde_json::json!({ "kind": "group", "id": format!("g{number}"), "name": "x".repeat(200) });
        std::fs::write(&file, document.to_string()).expect("written");
        let ran = groupcast(&["apply", "-f", &file.display().to_string(), "--timeout", "5s"], &environment);
        if ran.code != 0 {
            // What was looked at a moment ago may be told again.
            eventually("doctor says so", || async {
                let said = groupcast(&["doctor"], &environment).stdout;
                said.contains("BAD") && said.contains("store_dir")
            })
            .await;
            return;
        }
        assert!(start.elapsed() < DEADLINE, "the disk is full, and changes are taken");
    }
}
