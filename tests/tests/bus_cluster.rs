//! A bus of three nodes, broken as machines break: a node vanishes, loses its peers, stops, restarts; a stream is restored under a gateway.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Event, SILENCE_MAX};
use groupcast_bus_config::{streams, subjects};
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::ids::HostId;
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;
use groupcast_tests::agent::isolated;
use groupcast_tests::gateway::{Desk, Folder, groupcast};
use groupcast_tests::nodes::{CONTROLLERS, GATEWAYS, NODES, Nodes, Outside};
use groupcast_tests::world::{DEADLINE, eventually};
use nix::sys::signal::Signal;

/// What takes about five seconds now took half a minute or more: this tells them apart, on a loaded machine too.
const SOON: Duration = Duration::from_secs(20);
/// The servers elect leaders within four to nine seconds, three streams and themselves at the same time.
const LEADERLESS_SOON: Duration = Duration::from_secs(20);
/// Instead of a minute; doubled because the server had to be left, and up to as long again by chance.
const HOME_SOON: Duration = Duration::from_secs(2);
const PASSES_WITHIN: Duration = Duration::from_secs(10);
const DENIED_AFTER: Duration = Duration::from_millis(500);

/// Applies a policy in which exactly these ports pass, at whichever gateway takes it, and waits until it is in force; how long that took.
fn enforced(nodes: &Nodes, ports: &[u16], within: Duration) -> Duration {
    let (path, timeout) = (nodes.policy(ports).display().to_string(), format!("{}s", within.as_secs()));
    let begun = Instant::now();
    let ran = nodes.operator(&GATEWAYS, &["apply", "-f", &path, "--wait", "--timeout", &timeout]);
    assert_eq!(ran.code, 0, "{ports:?} after {:?}: {ran:?}", begun.elapsed());
    begun.elapsed()
}

/// Exactly these ports pass, of those that any policy here allows.
fn expect(nodes: &Nodes, ports: &[u16]) {
    for port in [5432, 7000, 8080] {
        let expected = ports.contains(&port);
        let within = if expected { PASSES_WITHIN } else { DENIED_AFTER };
        assert_eq!(nodes.passes(port, within), expected, "port {port}");
    }
}

/// What everybody says of itself while something is wrong: whoever says ready has read what was written.
fn who_says_ready(nodes: &Nodes) -> Vec<(&'static str, u64)> {
    let mut ready = Vec::new();
    for name in CONTROLLERS {
        if nodes.controller(name, "/readyz").is_some_and(|(status, _)| status == 200)
            && let Some(status) = nodes.controller_status(name)
        {
            ready.push((name, status["catalog"].as_u64().unwrap_or(0)));
        }
    }
    for name in GATEWAYS {
        if nodes.gateway(name, "/readyz").is_some_and(|(status, _)| status == 200)
            && let Some((_, body)) = nodes.gateway(name, "/v1/status")
        {
            let status: serde_json::Value = serde_json::from_str(&body).unwrap_or_default();
            ready.push((name, status["catalog"].as_u64().unwrap_or(0)));
        }
    }
    ready
}

/// The node that most of this process's connections are with.
fn node_of(nodes: &Nodes, name: &str) -> &'static str {
    let count = |node: &&str| nodes.clients(node).iter().filter(|client| client.ends_with(&format!(" {name}"))).count();
    NODES.into_iter().max_by_key(count).expect("a node")
}

/// A node that vanished without a reset stopped enforcement for three minutes, and everybody said ready.
#[test]
fn a_node_that_vanishes_is_noticed_and_enforcement_goes_on() {
    isolated(|| async {
        let nodes = Nodes::start().await;
        enforced(&nodes, &[5432, 7000], DEADLINE);
        expect(&nodes, &[5432, 7000]);
        let leader = nodes.led().await;
        let gone = node_of(&nodes, leader);
        // Connections of each kind, some of them with the node that goes.
        let mut told = Vec::new();
        for number in 0..9 {
            let role = [Role::Controller, Role::Gateway, Role::Host][number % 3];
            let (client, mut events) = nodes.connect_as(role, &format!("t{number}")).await;
            if client.server_info().server_name == gone {
                while tokio::time::timeout(Duration::from_millis(50), events.next()).await.is_ok() {}
                told.push(tokio::spawn(async move {
                    let begun = Instant::now();
                    while events.next().await != Some(Event::Disconnected) {}
                    let noticed = begun.elapsed();
                    while events.next().await != Some(Event::Connected) {}
                    drop(client);
                    (noticed, begun.elapsed())
                }));
            }
        }
        nodes.vanish(gone);
        let begun = Instant::now();
        let took = enforced(&nodes, &[7000], SOON);
        expect(&nodes, &[7000]);
        eprintln!("{gone} vanished with most connections of {leader}: a revocation was in force everywhere after {took:?}");
        for connection in told {
            let (noticed, back) = tokio::time::timeout(SOON, connection).await.expect("in time").expect("it ends");
            eprintln!("a connection noticed after {noticed:?} and was back after {back:?}");
            assert!(noticed < 2 * SILENCE_MAX, "{noticed:?}");
        }
        // Whoever says ready has read it.
        let user = nodes.user("g1").await;
        let change = user.get("/v1/changes?limit=1").await.body["items"][0]["change"].as_u64().expect("a number");
        for _ in 0..5 {
            for (name, catalog) in who_says_ready(&nodes) {
                assert!(catalog >= change, "{name} says ready and has read {catalog}, not {change}");
            }
        }
        eventually("all are ready", || async { who_says_ready(&nodes).len() == 4 }).await;
        eprintln!("all say ready again {:?} after it vanished", begun.elapsed());
        nodes.appear(gone);
        enforced(&nodes, &[5432, 7000], DEADLINE);
        expect(&nodes, &[5432, 7000]);
    });
}

/// The consumer by which a gateway follows lives in the memory of one server: with that it was gone, and the gateway stood still for half a
/// minute while it said ready.
#[test]
fn servers_are_restarted_one_after_the_other_and_nothing_is_lost_or_held_up() {
    isolated(|| async {
        let mut nodes = Nodes::start().await;
        enforced(&nodes, &[7000], DEADLINE);
        let (mut number, mut longest, mut behind) = (0, Duration::ZERO, Duration::ZERO);
        for node in NODES {
            nodes.stop(node).await;
            for is_back in [false, true] {
                if is_back {
                    nodes.start_node(node);
                }
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_secs(4) {
                    number += 1;
                    let ports: &[u16] = if number % 2 == 0 { &[7000] } else { &[5432, 7000] };
                    longest = longest.max(enforced(&nodes, ports, SOON));
                    // Both gateways have read it, whichever took it.
                    let user = nodes.user("g1").await;
                    let change = user.get("/v1/changes?limit=1").await.body["items"][0]["change"].as_u64().expect("a number");
                    let begun = Instant::now();
                    for gateway in GATEWAYS {
                        eventually("both gateways have read it", || async {
                            who_says_ready(&nodes).iter().any(|(name, catalog)| *name == gateway && *catalog >= change)
                        })
                        .await;
                    }
                    behind = behind.max(begun.elapsed());
                }
            }
            nodes.formed().await;
        }
        expect(&nodes, if number % 2 == 0 { &[7000] } else { &[5432, 7000] });
        eprintln!(
            "{number} changes during a rolling restart: the longest took {longest:?}, a gateway was at most {behind:?} behind"
        );
        assert!(behind < Duration::from_secs(15), "a gateway stood still for {behind:?}");
    });
}

/// A server without its peers keeps its clients, and not one of their writes succeeds.
#[test]
fn a_server_without_its_peers_is_left_and_a_stopped_one_too() {
    isolated(|| async {
        let nodes = Nodes::start().await;
        enforced(&nodes, &[5432, 7000], DEADLINE);
        let lonely = node_of(&nodes, "g1");
        nodes.isolate(lonely);
        let begun = Instant::now();
        // At the gateway that is there, and at no other.
        let path = nodes.policy(&[7000]).display().to_string();
        eventually("the gateway takes a change", || async {
            nodes.operator(&["g1"], &["apply", "-f", &path, "--wait", "--timeout", "10s"]).code == 0
        })
        .await;
        eprintln!("{lonely} lost its peers: a change at a gateway that was there was in force after {:?}", begun.elapsed());
        assert!(begun.elapsed() < DEADLINE);
        expect(&nodes, &[7000]);
        eventually("controllers and gateways have left", || async {
            let clients = nodes.clients(lonely);
            !clients.iter().any(|name| name.starts_with("controller c") || name.starts_with("gateway"))
        })
        .await;
        nodes.heal();
        nodes.formed().await;
        enforced(&nodes, &[5432, 7000], DEADLINE);

        // Stopped, not gone: its kernel still takes connections. One that leads the servers themselves is stopped below, with all else.
        let leader = nodes.led().await;
        let meta = nodes.monitor(lonely, "/jsz").and_then(|jsz| jsz["meta_cluster"]["leader"].as_str().map(str::to_owned));
        let stopped = NODES.into_iter().find(|node| Some(*node) != meta.as_deref()).expect("a node");
        nodes.signal(stopped, Signal::SIGSTOP);
        let took = enforced(&nodes, &[7000], SOON);
        eprintln!("{stopped} stopped while {leader} led: a revocation was in force everywhere after {took:?}");
        expect(&nodes, &[7000]);
        nodes.signal(stopped, Signal::SIGCONT);
        nodes.formed().await;
        enforced(&nodes, &[5432, 7000], DEADLINE);
        expect(&nodes, &[5432, 7000]);
    });
}

/// How a node is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    Stopped,
    Killed,
    Vanished,
}

impl Loss {
    fn happens(self, nodes: &mut Nodes, node: &str) {
        match self {
            Self::Stopped => nodes.signal(node, Signal::SIGSTOP),
            Self::Killed => nodes.kill(node),
            Self::Vanished => nodes.vanish(node),
        }
    }

    fn is_over(self, nodes: &mut Nodes, node: &str) {
        match self {
            Self::Stopped => nodes.signal(node, Signal::SIGCONT),
            Self::Killed => nodes.start_again(node),
            Self::Vanished => nodes.appear(node),
        }
    }
}

/// Brings everything that the bus can lose with one node onto one: it leads the servers and all streams, and has every consumer by which
/// CATALOG and REGISTRY are followed.
async fn gathered(nodes: &Nodes, client: &async_nats::Client) -> &'static str {
    let start = Instant::now();
    let meta = nodes.monitor(NODES[0], "/jsz").and_then(|jsz| jsz["meta_cluster"]["leader"].as_str().map(str::to_owned));
    let node = NODES.into_iter().find(|node| Some(*node) == meta.as_deref()).expect("somebody leads the servers");
    for stream in [&streams::CATALOG, &streams::REGISTRY, &streams::TOPICS] {
        while nodes.leader_of(client, stream.name).await.as_deref() != Some(node) {
            assert!(start.elapsed() < DEADLINE, "{node} does not lead {}", stream.name);
            let wish = serde_json::json!({ "placement": { "preferred": node } }).to_string();
            let asked = client.request(subjects::js_api("STREAM.LEADER.STEPDOWN", stream.name), wish.into()).await;
            drop(asked); // looked at above
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    // The servers place a consumer by chance: one that is deleted is made again by who needs it.
    let context = async_nats::jetstream::new(client.clone());
    let mut elsewhere = usize::MAX;
    while elsewhere > 0 {
        assert!(start.elapsed() < DEADLINE, "{elsewhere} consumers are not on {node}");
        elsewhere = 0;
        for (stream, filter) in [(&streams::CATALOG, subjects::CATALOG_ALL), (&streams::REGISTRY, subjects::REGISTRY_ALL)] {
            let Ok(stream) = context.get_stream(stream.name).await else { continue };
            let consumers: Vec<_> = stream.consumers().try_collect().await.unwrap_or_default();
            let following = consumers.iter().filter(|consumer| consumer.config.filter_subject == filter);
            let there = |consumer: &&async_nats::jetstream::consumer::Info| {
                consumer.cluster.as_ref().and_then(|cluster| cluster.leader.as_deref()) == Some(node)
            };
            let (here, away): (Vec<_>, Vec<_>) = following.partition(there);
            // Two controllers and two gateways follow each.
            elsewhere += away.len() + 4usize.saturating_sub(here.len());
            for consumer in away {
                let _ = stream.delete_consumer(&consumer.name).await; // it may be gone by itself
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    node
}

/// What is said of the installation, by all that an operator looks at, until it is over.
fn listen(outside: Outside, is_over: Arc<AtomicBool>) -> std::thread::JoinHandle<BTreeSet<String>> {
    std::thread::spawn(move || {
        let mut said = BTreeSet::new();
        while !is_over.load(Ordering::Relaxed) {
            for name in CONTROLLERS.into_iter().chain(GATEWAYS) {
                let is_controller = CONTROLLERS.contains(&name);
                let answer = if is_controller { outside.controller(name, "/readyz") } else { outside.gateway(name, "/readyz") };
                let status = answer.map_or(0, |(status, _)| status);
                if status != 200 {
                    said.insert(format!("readyz {status}"));
                }
            }
            for what in [&["doctor"][..], &["get", "hosts"]] {
                let ran = outside.operator(&GATEWAYS, what);
                if ran.code != 0 {
                    said.insert(format!("{} exits with {}", what.join(" "), ran.code));
                }
            }
        }
        said
    })
}

/// While the servers elect who leads them, nobody can make a consumer: whoever had lost its own read nothing. And who came back while nobody
/// led waited out its pause: enforcement stopped for fourteen seconds, at times for more than twenty.
fn what_leads_everything_is_lost(loss: Loss) {
    isolated(move || async move {
        let mut nodes = Nodes::start().await;
        enforced(&nodes, &[5432, 7000], DEADLINE);
        expect(&nodes, &[5432, 7000]);
        let (client, events) = nodes.connect("gatherer").await;
        let node = gathered(&nodes, &client).await;
        drop((client, events));
        let leader = nodes.led().await;
        let is_over = Arc::new(AtomicBool::new(false));
        let begun = Instant::now();
        loss.happens(&mut nodes, node);
        let listening = listen(nodes.outside(), is_over.clone());
        let took = enforced(&nodes, &[7000], LEADERLESS_SOON);
        is_over.store(true, Ordering::Relaxed);
        let said = listening.join().expect("it ends");
        eprintln!("{node}, which led all, was lost ({loss:?}) while {leader} led: a revocation was in force after {took:?}");
        eprintln!("said meanwhile: {said:?}");
        expect(&nodes, &[7000]);
        for what in ["readyz", "doctor"] {
            assert!(said.iter().any(|words| words.starts_with(what)), "{what} said nothing: {said:?}");
        }
        // Whoever says ready has read it, and all are ready while the node is still lost.
        let (_, body) = nodes.gateway(GATEWAYS[0], "/v1/changes?limit=1").expect("an answer");
        let changes: serde_json::Value = serde_json::from_str(&body).expect("json");
        let change = changes["items"][0]["change"].as_u64().expect("a number");
        eventually("all are ready", || async {
            let ready = who_says_ready(&nodes);
            ready.iter().for_each(|(name, read)| assert!(*read >= change, "{name} says ready and has read {read}, not {change}"));
            ready.len() == 4
        })
        .await;
        eprintln!("all say ready again {:?} after it was lost", begun.elapsed());
        enforced(&nodes, &[5432, 7000], DEADLINE);
        expect(&nodes, &[5432, 7000]);
        loss.is_over(&mut nodes, node);
        nodes.formed().await;
        // Nothing that was acknowledged is lost with its return.
        expect(&nodes, &[5432, 7000]);
        enforced(&nodes, &[7000], DEADLINE);
        expect(&nodes, &[7000]);
    });
}

#[test]
fn the_servers_leader_stops_with_all_that_it_has_and_enforcement_goes_on() {
    what_leads_everything_is_lost(Loss::Stopped);
}

#[test]
fn the_servers_leader_is_killed_with_all_that_it_has_and_enforcement_goes_on() {
    what_leads_everything_is_lost(Loss::Killed);
}

#[test]
fn the_servers_leader_vanishes_with_all_that_it_has_and_enforcement_goes_on() {
    what_leads_everything_is_lost(Loss::Vanished);
}

/// Without it all clients would be on two servers for good once the third was away.
#[test]
fn who_left_a_server_without_its_peers_returns_to_it_when_it_is_well() {
    isolated(|| async {
        let nodes = Nodes::bus().await;
        let (client, events) =
            connect::connect(nodes.options(Role::Controller, "t1").home_after(HOME_SOON)).await.expect("connected");
        let _guard = events.guard(&client);
        let server = |client: &async_nats::Client| client.server_info().server_name;
        let home = NODES.into_iter().find(|node| **node == server(&client)).expect("a node");
        // The guard knows where it is by then: a move before that would be its first home.
        eventually("its leaders are asked for", || async {
            let streams = nodes.monitor(home, "/connz").unwrap_or_default();
            let own = streams["connections"].as_array().into_iter().flatten().find(|one| one["name"] == "controller t1").cloned();
            own.is_some_and(|own| own["in_msgs"].as_u64() >= Some(6))
        })
        .await;
        nodes.isolate(home);
        eventually("it leaves", || async { server(&client) != home }).await;
        nodes.heal();
        nodes.formed().await;
        let begun = Instant::now();
        eventually("it returns", || async { server(&client) == home }).await;
        eprintln!("a client was back on {home} {:?} after that was well", begun.elapsed());
        let asked = client.request(subjects::js_api("STREAM.INFO", streams::CATALOG.name), "".into()).await;
        assert!(asked.is_ok(), "{asked:?}");
    });
}

fn host(number: usize) -> HostId {
    format!("h{number}").parse().expect("an id")
}

fn workload(number: usize) -> Workload {
    let id = format!("w{number}").parse().expect("an id");
    let mut workload = Workload::new(id, host(number), "net".parse().expect("an id"));
    workload.addresses = [Prefix::host(std::net::Ipv4Addr::new(10, 0, 0, number as u8).into())].into();
    workload
}

/// A gateway took a REGISTRY that was restored for the one it had read, and served what was not there any more, for good.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_another_or_went_back_is_read_anew() {
    let desk = Desk::start().await;
    let folder = Folder::new("restored");
    let (client, _events) = desk.bus.connect(0, Role::Controller, "writer").await;
    let registry = Registry::new(client.clone());
    let enrol = async |number: usize| {
        registry.register(&host(number), &[workload(number)], Elsewhere::Move).await.expect("registered");
    };
    let listed = async || -> Vec<String> {
        let answer = desk.admin.get("/v1/workloads").await;
        let items = answer.body["items"].as_array().cloned().unwrap_or_default();
        items.iter().filter_map(|item| item["document"]["id"].as_str().map(str::to_owned)).collect()
    };
    for number in 1..=3 {
        enrol(number).await;
    }
    let (url, file) = (desk.bus.url(0), folder.0.join("export.jsonl").display().to_string());
    let exported = groupcast(&["export", "--server", &url, "--output", &file], &[]);
    assert_eq!(exported.code, 0, "{exported:?}");
    for number in 4..=6 {
        enrol(number).await;
    }
    eventually("all are there", || async { listed().await.len() == 6 }).await;
    // Also one that is as long as the one before, or longer: its sequences tell nothing.
    for filler in [0, 40] {
        let context = async_nats::jetstream::new(client.clone());
        context.delete_stream(streams::REGISTRY.name).await.expect("deleted");
        let imported = groupcast(&["import", "--server", &url, "--replace", &file], &[]);
        assert_eq!(imported.code, 0, "{imported:?}");
        for _ in 0..filler {
            enrol(1).await;
        }
        eventually("what was restored is all there is", || async { listed().await == ["w1", "w2", "w3"] }).await;
        for number in 4..=6 {
            enrol(number).await;
        }
        eventually("what came after it is there too", || async { listed().await.len() == 6 }).await;
    }
    eventually("it is ready", || async { desk.admin.get("/readyz").await.status == 200 }).await;
}
