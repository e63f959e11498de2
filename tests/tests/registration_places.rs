//! Where a workload is decides whether it is registered: removed and added again, on another network, without its interface. And where its
//! health is looked for. With real agents, controllers and interfaces.

use std::time::Duration;

use groupcast_policy::model::{HealthCheck, Probe, Template};
use groupcast_policy::net::Prefix;
use groupcast_tests::agent::{Agent, ip, isolated};
use groupcast_tests::enrolled::{allowed, entries, grant, plane, put_template, registered, template, workload_entry};
use groupcast_tests::world::eventually;

/// `agent.toml` of a host that enrols a workload behind an interface.
fn enrolling(workload: &str, network: &str, address: &str) -> String {
    format!(
        "claims = ['gcw*']\n[[enrol]]\nworkload = '{workload}'\ntemplate = 'vm'\nnetwork = '{network}'\nspace = 'shop'\naddresses = ['{address}']\n"
    )
}

fn wire(name: &str) {
    ip(&format!("link add {name} type veth peer name v{name}"));
}

/// The subjects of REGISTRY that name workloads or addresses.
async fn named(observer: &async_nats::Client) -> Vec<String> {
    let all = entries(observer).await.into_keys();
    all.filter(|subject| subject.starts_with("gc.reg.w.") || subject.starts_with("gc.reg.a.")).collect()
}

/// It was registered once in the life of an agent: what `workload remove` had ended came back with a restart only.
#[test]
fn a_workload_of_agent_toml_that_was_removed_is_registered_again_when_it_is_added() {
    isolated(|| async {
        let plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        wire("gcw0");
        let mut agent = Agent::new(&plane.url(), "h1", &enrolling("w1", "net", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "w1", 1).await;
        let add = ["workload", "add", "w1", "--interface", "gcw0", "--within", "30s"];
        agent.does(&add);
        for life in 2..4 {
            agent.does(&["workload", "remove", "w1"]);
            eventually("w1 is gone", || async { workload_entry(&observer, "w1").await.is_none() }).await;
            agent.does(&add);
            registered(&observer, "w1", life).await;
        }
        // And at once, without waiting for anything.
        agent.does(&["workload", "remove", "w1"]);
        agent.does(&add);
        registered(&observer, "w1", 4).await;
    });
}

/// Its address stayed a member of groups while the interface, and so the workload, was gone.
#[test]
fn a_workload_without_its_interface_is_registered_no_longer_and_again_when_it_is_back() {
    isolated(|| async {
        let plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        wire("gcw0");
        wire("gcw1");
        let mut agent = Agent::new(&plane.url(), "h1", "claims = ['gcw*']");
        agent.start().await;
        for (workload, interface, address) in [("w1", "gcw0", "10.0.0.5"), ("w2", "gcw1", "10.0.0.6")] {
            let add = ["workload", "add", workload, "--interface", interface, "--address", address, "--template", "vm"];
            agent.does(&[&add[..], &["--network", "net", "--space", "shop", "--within", "30s"]].concat());
            registered(&observer, workload, 1).await;
        }
        ip("link delete gcw0");
        eventually("w1 is gone", || async { workload_entry(&observer, "w1").await.is_none() }).await;
        assert!(!named(&observer).await.iter().any(|subject| subject.contains("10-0-0-5") || subject.contains("10.0.0.5")));
        assert!(workload_entry(&observer, "w2").await.is_some(), "the other one is there");
        assert_eq!(agent.registered("w1").expect("still wanted")["state"], "absent");
        // Also by an agent that begins without it.
        agent.kill();
        agent.start().await;
        eventually("it is known to be absent", || async { agent.registered("w1").is_some_and(|one| one["state"] == "absent") })
            .await;
        assert!(workload_entry(&observer, "w1").await.is_none());
        wire("gcw0");
        registered(&observer, "w1", 2).await;
    });
}

/// A template of another network.
fn of_network(network: &str) -> Template {
    let mut other = Template::new("other".parse().expect("an id"), network.parse().expect("an id"));
    other.identities = ["h1".parse().expect("an id")].into();
    other.prefixes.insert(Prefix::v4(0x0a00_0000, 8).expect("a prefix"));
    other.spaces.insert("shop".parse().expect("an id"));
    other
}

/// The entry on the old network stayed there, with its address, for as long as the host lived.
#[test]
fn a_workload_that_moves_to_another_network_leaves_nothing_behind() {
    isolated(|| async {
        let plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        put_template(&plane, of_network("far")).await;
        let observer = plane.bus.observer("observer").await;
        wire("gcw0");
        let mut agent = Agent::new(&plane.url(), "h1", &enrolling("m1", "net", "10.0.0.9"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        let add = |template: &'static str, network: &'static str| {
            let add = ["workload", "add", "w1", "--interface", "gcw0", "--address", "10.0.0.5", "--template", template];
            [&add[..], &["--network", network, "--space", "shop", "--within", "30s"]].concat()
        };
        agent.does(&add("vm", "net"));
        registered(&observer, "w1", 1).await;
        agent.does(&add("other", "far"));
        // Where it is, by its entry and by the addresses that are claimed for it.
        let of = |id: &'static str, claim: &'static str| {
            let observer = &observer;
            async move {
                let entry = workload_entry(observer, id).await.and_then(|entry| Some(entry["network"].as_str()?.to_owned()));
                let claims = named(observer).await.into_iter().filter(|subject| subject.ends_with(claim));
                (entry, claims.filter(|subject| subject.starts_with("gc.reg.a.")).collect::<Vec<_>>())
            }
        };
        let far = |claim: &str| (Some("far".to_owned()), vec![format!("gc.reg.a.far.{claim}")]);
        let (w1, m1) = ("0a000005", "0a000009");
        eventually("it is on the other network alone", || async { of("w1", w1).await == far(w1) }).await;
        // By agent.toml, while the agent was not there.
        agent.stop();
        let path = agent.folder.join("agent.toml");
        let text = std::fs::read_to_string(&path).expect("read");
        let moved = text.replace("template = 'vm'\nnetwork = 'net'", "template = 'other'\nnetwork = 'far'");
        assert_ne!(text, moved);
        std::fs::write(&path, moved).expect("written");
        agent.start().await;
        eventually("this one too", || async { of("m1", m1).await == far(m1) }).await;
        // And taken out of agent.toml it is gone.
        agent.stop();
        std::fs::write(&path, text.split("[[enrol]]").next().expect("a beginning")).expect("written");
        agent.start().await;
        eventually("it has ended", || async { of("m1", m1).await == (None, vec![]) }).await;
        assert_eq!(of("w1", w1).await, far(w1));
    });
}

/// A template names a port, a host an address: together they had the agent talk to what listens on its machine's loopback and own addresses,
/// and to the bus.
#[test]
fn health_is_not_looked_for_at_the_machines_own_services() {
    isolated(|| async {
        let plane = plane(1).await;
        wire("wire0");
        ip("addr add 10.0.7.1/24 dev wire0");
        let own = tokio::net::TcpListener::bind("0.0.0.0:0").await.expect("a port");
        let port = own.local_addr().expect("an address").port();
        let mut checked = template("vm", &["h1"]);
        checked.health = Some(HealthCheck { probe: Probe::Tcp { port }, interval_seconds: 1 });
        checked.prefixes.insert(Prefix::v4(0x7f00_0000, 8).expect("a prefix"));
        put_template(&plane, checked).await;
        grant(&plane, &["h1"]).await;
        grant_everything(&plane).await;
        let one = |id: &str, address: &str| {
            format!("[[enrol]]\nworkload = '{id}'\ntemplate = 'vm'\nnetwork = 'net'\nspace = 'shop'\naddresses = ['{address}']\n")
        };
        let mut agent = Agent::new(&plane.url(), "h1", &[one("w1", "127.0.0.1"), one("w2", "10.0.7.1")].concat());
        agent.start().await;
        let observer = plane.bus.observer("observer").await;
        for id in ["w1", "w2"] {
            registered(&observer, id, 1).await;
            eventually("it is told why it is not checked", || async {
                agent.registered(id).is_some_and(|one| one["unchecked"].as_str().is_some_and(|why| why.contains("not checked")))
            })
            .await;
            eventually("it is not called well", || async {
                workload_entry(&observer, id).await.is_some_and(|entry| entry["unhealthy"] == true)
            })
            .await;
        }
        let reached = tokio::time::timeout(Duration::from_millis(10), own.accept()).await;
        assert!(reached.is_err(), "the machine's own service was reached");
    });
}

async fn grant_everything(plane: &groupcast_tests::control::Plane) {
    use groupcast_control::change::{Change, Expected, Write};
    use groupcast_control::registration::grant::Grant;
    let everywhere = Prefix::v4(0, 0).expect("a prefix");
    let granted = Grant::new("h1".parse().expect("an id"), vec![everywhere]);
    let writes = vec![Write::put(granted.document().expect("a document"), Expected::Any)];
    let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
    plane.catalog.write(&change, None).await.expect("written");
}
