//! Neutron's ports as workloads, from the pretended server over mutual TLS to REGISTRY on a real bus, to the topics of hosts, and to the
//! kernel of one. Nobody has written anything but the source: the bus begins with `groupcast init`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use groupcast_bus_config::lab::{Agent, AgentSettings, Lab};
use groupcast_messages::RegisterAnswer;
use groupcast_policy::doc::{Content, Enforced, Placement};
use groupcast_policy::topic::Topic;
use groupcast_tests::control::{Host, Plane, agent_binary};
use groupcast_tests::enrolled::{Guest, LEAD, SHORT, allowed, asked, entries, gone, judging, refusal, sequence};
use groupcast_tests::fake::Fake;
use groupcast_tests::field::{answer, possible, talks};
use groupcast_tests::gateway::{Folder, Gateway, User, groupcast, token};
use groupcast_tests::world::eventually;
use groupcast_topics::reader;
use serde_json::{Value, json};

/// Polls are asked for; none comes by itself.
const NEVER: &str = "poll_interval = '1h'\nfull_sync_interval = '2h'";
const UNFILTERED: Enforced = Enforced { ingress: false, egress: false };

struct Stack {
    neutron: Fake,
    plane: Plane,
    admin: User,
    observer: async_nats::Client,
    _gateway: Gateway,
    _folder: Folder,
}

impl Stack {
    async fn start(controllers: usize) -> Self {
        let (neutron, folder) = (Fake::neutron().await, Folder::new("neutron"));
        let config = folder.0.join("groupcast.toml");
        std::fs::write(&config, neutron.neutron_source(NEVER)).expect("written");
        let mut plane = Plane::start(0, LEAD).await;
        let ran = groupcast(&["init", "--on-bus", "--server", &plane.url()], &[]);
        assert_eq!(ran.code, 0, "{ran:?}");
        for _ in 0..controllers {
            plane.add_controller_with(&[&SHORT[..], &["--config", &config.display().to_string()]].concat());
        }
        plane.ready().await;
        plane.leader().await;
        let gateway = Gateway::start(&plane.url(), &[]).await;
        let admin = User::new(&gateway, &token(&plane.url(), "root", "admin", &[])).await;
        let observer = plane.bus.observer("looks").await;
        Self { neutron, plane, admin, observer, _gateway: gateway, _folder: folder }
    }

    /// Has Neutron read; what it says is published when this returns.
    async fn poll(&self) {
        let polled = self.admin.ask("POST", "/v1/sources/os/poll", &[], None).await;
        assert_eq!(polled.status, 200, "{}", polled.text);
    }

    async fn source(&self) -> Value {
        self.admin.get("/v1/sources/os").await.body
    }

    async fn host(&self, name: &str) -> Host {
        let host = self.plane.host(name, reader::Settings::default(), Box::new(|_, _| true)).await;
        host.synced().await;
        host
    }

    /// Addresses that are claimed, and by whom.
    async fn claims(&self) -> BTreeMap<String, String> {
        let all = entries(&self.observer).await;
        let claim = |(subject, entry): (String, Value)| {
            let hex = subject.strip_prefix("gc.reg.a.net.")?;
            let bits = u32::from_str_radix(hex, 16).expect("an IPv4 address in hexadecimal");
            Some((Ipv4Addr::from_bits(bits).to_string(), entry["workload"].as_str().expect("a workload").to_owned()))
        };
        all.into_iter().filter_map(claim).collect()
    }

    async fn expect_claims(&self, expected: &[(&str, &str)]) {
        let expected = expected.iter().map(|(address, port)| ((*address).to_owned(), format!("os-{port}"))).collect();
        assert_eq!(self.claims().await, expected);
    }
}

/// What a host's own topic says is there.
async fn placed(host: &Host) -> BTreeMap<String, Placement> {
    let documents = host.documents().await;
    match documents.get(&Topic::Host(host.id.clone())).and_then(|document| document.content()) {
        Some(Content::Host(placed)) => placed.iter().map(|(id, placement)| (id.to_string(), placement.clone())).collect(),
        _ => BTreeMap::new(),
    }
}

/// Waits until the host is told of exactly these ports.
async fn expect_ports(host: &Host, ports: &[&str]) -> BTreeMap<String, Placement> {
    let wanted: BTreeSet<String> = ports.iter().map(|port| format!("os-{port}")).collect();
    eventually(&format!("host {} has {ports:?}", host.id), || async {
        placed(host).await.into_keys().collect::<BTreeSet<_>>() == wanted
    })
    .await;
    placed(host).await
}

fn addresses(placement: &Placement) -> Vec<String> {
    placement.addresses.iter().map(ToString::to_string).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_become_workloads_move_change_and_go() {
    let mut stack = Stack::start(2).await;
    let neutron = &stack.neutron;
    let web = neutron.neutron_group("web", &[]).await;
    neutron.neutron_rule(&web, json!({"direction": "ingress", "ethertype": "IPv4", "remote_group_id": web})).await;
    let one = neutron.port("h1", "10.0.0.1", &[&web], json!({})).await;
    let two = neutron.port("node2.example.org", "10.0.0.2", &[&web], json!({})).await;
    let off = neutron.port("h1", "10.0.0.3", &[], json!({"port_security_enabled": false})).await;
    let dhcp = neutron.port("h1", "10.0.0.4", &[], json!({"device_owner": "network:dhcp"})).await;
    let unbound = neutron.port("", "10.0.0.5", &[&web], json!({})).await;
    stack.poll().await;
    let (h1, h2) = (stack.host("h1").await, stack.host("node2_example_org").await);

    let there = expect_ports(&h1, &[&one, &off, &dhcp]).await;
    let of = |id: &str| &there[&format!("os-{id}")];
    assert_eq!((of(&one).enforced, of(&off).enforced, of(&dhcp).enforced), (Enforced::BOTH, UNFILTERED, UNFILTERED));
    assert_eq!(
        (of(&one).incarnation, of(&one).network.as_str(), addresses(of(&one))),
        (1, "net", vec!["10.0.0.1/32".to_owned()])
    );
    assert!(of(&one).groups.iter().map(ToString::to_string).eq([format!("os-{web}")]));
    expect_ports(&h2, &[&two]).await;
    stack.expect_claims(&[("10.0.0.1", &one), ("10.0.0.2", &two), ("10.0.0.3", &off), ("10.0.0.4", &dhcp)]).await;
    let members = Topic::Members(format!("os-{web}").parse().expect("an id"));
    let count = async |host: &Host| {
        let documents = host.documents().await;
        documents.get(&members).and_then(|document| document.members()).map_or(0, |members| members.v4.len() as usize)
    };
    eventually("the group has both as members", || async { count(&h1).await == 2 && count(&h2).await == 2 }).await;
    let source = stack.source().await;
    assert_eq!((&source["workloads"], &source["groups"], &source["state"]), (&json!(4), &json!(1), &json!("good")), "{source}");

    // Nothing new: not one entry is written.
    let before = sequence(&stack.observer).await;
    stack.poll().await;
    assert_eq!(sequence(&stack.observer).await, before);

    // It moves to the other host, as a migration does: another life, the same address.
    neutron.update_port(&one, json!({"binding:host_id": "node2.example.org"})).await;
    stack.poll().await;
    expect_ports(&h1, &[&off, &dhcp]).await;
    let there = expect_ports(&h2, &[&one, &two]).await;
    assert_eq!(there[&format!("os-{one}")].incarnation, 2);
    let left = entries(&stack.observer).await;
    let listed = left["gc.reg.h.h1"]["workloads"].as_array().expect("a list").len();
    assert_eq!((listed, left.keys().filter(|subject| subject.ends_with(one.as_str())).count()), (2, 1));
    assert!(left["gc.reg.h.h1"]["enrolled"].is_null(), "nobody expects to hear from it");

    // Two ports on two hosts exchange their addresses; one gets a second one, and pairs.
    neutron.update_port(&off, json!({"fixed_ips": [{"ip_address": "10.0.0.2"}, {"ip_address": "10.0.0.6"}]})).await;
    neutron.update_port(&two, json!({"fixed_ips": [{"ip_address": "10.0.0.3"}]})).await;
    neutron
        .update_port(&one, json!({"allowed_address_pairs": [{"ip_address": "10.9.0.0/24"}, {"ip_address": "0.0.0.0/0"}]}))
        .await;
    stack.poll().await;
    stack
        .expect_claims(&[("10.0.0.1", &one), ("10.0.0.3", &two), ("10.0.0.2", &off), ("10.0.0.6", &off), ("10.0.0.4", &dhcp)])
        .await;
    eventually("what it may send from follows", || async {
        let there = placed(&h2).await;
        addresses(&there[&format!("os-{one}")]) == ["0.0.0.0/0", "10.0.0.1/32", "10.9.0.0/24"]
            && addresses(&there[&format!("os-{two}")]) == ["10.0.0.3/32"]
    })
    .await;
    eventually("a pair is a member, the internet is none", || async {
        let documents = h2.documents().await;
        let found = documents.get(&members).and_then(|document| document.members());
        found.is_some_and(|found| found.prefixes.iter().map(ToString::to_string).eq(["10.9.0.0/24"]))
    })
    .await;
    neutron.update_port(&one, json!({"allowed_address_pairs": []})).await;

    // Secured again, bound at last, deleted.
    neutron.update_port(&off, json!({"port_security_enabled": true, "security_groups": [web]})).await;
    neutron.update_port(&unbound, json!({"binding:host_id": "h1"})).await;
    neutron.delete("ports", &two).await;
    stack.poll().await;
    let there = expect_ports(&h1, &[&off, &dhcp, &unbound]).await;
    assert_eq!(there[&format!("os-{off}")].enforced, Enforced::BOTH);
    expect_ports(&h2, &[&one]).await;
    stack
        .expect_claims(&[("10.0.0.1", &one), ("10.0.0.2", &off), ("10.0.0.6", &off), ("10.0.0.4", &dhcp), ("10.0.0.5", &unbound)])
        .await;

    // Whoever leads next finds everything as it is, and goes on.
    let before = entries(&stack.observer).await;
    let leader = stack.plane.leader().await;
    stack.plane.controllers[leader].kill();
    eventually("another leads", || async {
        stack.admin.send("POST", "/v1/sources/os/poll", &[], None).await.is_some_and(|polled| polled.status == 200)
    })
    .await;
    assert_eq!(entries(&stack.observer).await, before);
    stack.neutron.delete("ports", &unbound).await;
    stack.poll().await;
    expect_ports(&h1, &[&off, &dhcp]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_source_placed_is_never_reaped_and_nobody_takes_an_address_that_another_has() {
    let mut stack = Stack::start(1).await;
    allowed(&stack.plane, "vm", &["g1", "h1"]).await;
    let web = stack.neutron.neutron_group("web", &[]).await;
    let port = stack.neutron.port("h1", "10.0.0.1", &[&web], json!({})).await;
    stack.poll().await;
    stack.expect_claims(&[("10.0.0.1", &port)]).await;
    judging(&mut stack.plane).await;

    // A host that enrols itself: what a port has it does not get.
    let guest = Guest::new(&stack.plane, "g1", 1).await;
    let refused = guest.enrol("vm", vec![asked("own", 1)]).await;
    assert!(refusal(&refused).1.contains(&format!("held by workload os-{port}")), "{refused:?}");
    assert!(matches!(guest.enrol("vm", vec![asked("own", 2)]).await, RegisterAnswer::Registered { .. }));
    guest.beats(true);

    // And the other way round: the port is not placed, and named; all others are.
    let taken = stack.neutron.port("h1", "10.0.0.2", &[&web], json!({})).await;
    let free = stack.neutron.port("h1", "10.0.0.3", &[&web], json!({})).await;
    stack.poll().await;
    let claims = stack.claims().await;
    assert_eq!((claims["10.0.0.2"].as_str(), claims["10.0.0.3"].as_str()), ("own", format!("os-{free}").as_str()));
    let source = stack.source().await;
    assert_eq!((&source["withheld"], &source["workloads"], &source["malformed"]), (&json!(1), &json!(2), &json!(0)), "{source}");
    let words = source["withheld_items"][0].as_str().expect("words").to_owned();
    assert!(words.contains(&format!("os-{taken} is not placed")) && words.contains("10.0.0.2"), "{words}");
    assert!(words.contains("workload own on host g1"), "{words}");

    // The guest dies and is reaped; the port's host, which never said a word, is not. The port gets its address.
    guest.beats(false);
    guest.forget();
    gone(&stack.observer, "g1").await;
    let h1 = stack.host("h1").await;
    expect_ports(&h1, &[&port, &free]).await;
    stack.poll().await;
    expect_ports(&h1, &[&port, &free, &taken]).await;
    stack.expect_claims(&[("10.0.0.1", &port), ("10.0.0.2", &taken), ("10.0.0.3", &free)]).await;
    assert_eq!(stack.source().await["withheld"], 0);

    // A host that also enrols what is its own and goes silent loses only that.
    let own = Guest::new(&stack.plane, "h1", 1).await;
    assert!(matches!(own.enrol("vm", vec![asked("h1-own", 9)]).await, RegisterAnswer::Registered { .. }));
    assert_eq!(stack.claims().await["10.0.0.9"], "h1-own");
    own.beats(false);
    own.forget();
    eventually("its own workload is reaped", || async { !stack.claims().await.contains_key("10.0.0.9") }).await;
    expect_ports(&h1, &[&port, &free, &taken]).await;
}

/// Two hosts with real agents, a port on each: what Neutron says is what packets meet.
#[tokio::test(flavor = "multi_thread")]
async fn what_neutron_says_is_enforced_by_an_agent() {
    if !possible() {
        return;
    }
    const WITHIN: Duration = Duration::from_secs(10);
    const REFUSED_AFTER: Duration = Duration::from_millis(400);
    let stack = Stack::start(1).await;
    let bus: SocketAddr = stack.plane.url().trim_start_matches("nats://").parse().expect("an address");
    let mut lab = Lab::new(bus).expect("a lab");
    for (host, workload) in [("h1", "web"), ("h2", "db")] {
        lab.host(host).expect("a host");
        lab.workload(workload, host).expect("a workload");
    }
    for port in [5432, 8080] {
        answer(lab.workloads["db"].namespace.listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).expect("it listens"));
    }
    let neutron = &stack.neutron;
    let tcp = |direction: &str, port: u16, more: Value| {
        let mut rule = json!({"direction": direction, "ethertype": "IPv4", "protocol": "tcp", "port_range_min": port, "port_range_max": port});
        more.as_object().expect("fields").iter().for_each(|(field, value)| rule[field] = value.clone());
        rule
    };
    let web = neutron.neutron_group("web", &[tcp("egress", 5432, json!({})), tcp("egress", 8080, json!({}))]).await;
    let db = neutron.neutron_group("db", &[]).await;
    let allow = neutron.neutron_rule(&db, tcp("ingress", 5432, json!({"remote_group_id": web}))).await;
    let mut ports = BTreeMap::new();
    for (name, group) in [("web", &web), ("db", &db)] {
        let place = &lab.workloads[name];
        ports.insert(name, neutron.port(&place.host, &place.address.to_string(), &[group], json!({})).await);
    }
    stack.poll().await;
    let folder = Folder::new("agents");
    let mut agents = Vec::new();
    for (name, port) in &ports {
        let (place, own) = (&lab.workloads[*name], folder.0.join(name));
        std::fs::create_dir_all(&own).expect("made");
        let settings = AgentSettings {
            binary: agent_binary().clone(),
            host: place.host.clone(),
            bus: lab.hosts[&place.host].bus.clone(),
            credentials: None,
            folder: own,
            dry_run: false,
        };
        let agent = Agent::start(settings, Some(&lab.hosts[&place.host].namespace)).expect("an agent");
        agent.attach(&format!("os-{port}"), &place.interface).expect("attached");
        agents.push(agent);
    }
    let passes = |port: u16, within: Duration| {
        let stream = lab.connect("web", "db", port, within).expect("tried");
        stream.is_ok_and(|stream| talks(&stream, within))
    };
    let becomes = async |port: u16, wanted: bool| {
        let within = if wanted { Duration::from_secs(2) } else { REFUSED_AFTER };
        eventually(&format!("tcp/{port} passes: {wanted}"), || async { passes(port, within) == wanted }).await;
    };
    becomes(5432, true).await;
    assert!(!passes(8080, REFUSED_AFTER), "no rule allows it");
    // A rule is deleted: also what it let through ends.
    let stream = lab.connect("web", "db", 5432, WITHIN).expect("tried").expect("allowed");
    assert!(talks(&stream, WITHIN));
    neutron.delete("security-group-rules", &allow).await;
    stack.poll().await;
    becomes(5432, false).await;
    assert!(!talks(&stream, REFUSED_AFTER), "a revoked flow goes on");
    // Without port security nothing is filtered, and with it again everything is.
    neutron.update_port(&ports["db"], json!({"port_security_enabled": false})).await;
    stack.poll().await;
    becomes(8080, true).await;
    neutron.update_port(&ports["db"], json!({"port_security_enabled": true})).await;
    stack.poll().await;
    becomes(8080, false).await;
}
