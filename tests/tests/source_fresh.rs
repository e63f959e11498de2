//! The seed's race with real packets: a group is created, a workload is started at once and asks to be fresh, and the source is polled once
//! a minute. When `workload add` returns, what the group allows passes.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use groupcast_bus_config::lab::{Agent, AgentSettings, Lab};
use groupcast_policy::net::Prefix;
use groupcast_tests::control::{Plane, agent_binary, group, workload};
use groupcast_tests::fake::Fake;
use groupcast_tests::field::{answer, possible, talks};
use groupcast_tests::gateway::Folder;
use reqwest::Method;
use serde_json::json;

const LEASE: Duration = Duration::from_millis(600);
const WITHIN: Duration = Duration::from_secs(10);
const REFUSED_AFTER: Duration = Duration::from_millis(300);

#[tokio::test(flavor = "multi_thread")]
async fn a_workload_that_starts_fresh_may_at_once_what_was_just_allowed() {
    if !possible() {
        return;
    }
    let (cloud, folder) = (Fake::cloud_controller().await, Folder::new("fresh"));
    let config = folder.0.join("groupcast.toml");
    let text = format!(
        "[[source]]\nid = 'cf'\nkind = 'cloud-controller'\nurl = '{url}'\ninternal_url = '{url}'\nuaa_url = '{url}'\n\
         client_id = 'groupcast'\nclient_secret_file = '{}'\npoll_interval = '60s'\n",
        cloud.secret(),
        url = cloud.url,
    );
    std::fs::write(&config, text).expect("written");
    let mut plane = Plane::start(0, LEASE).await;
    plane.put_groups(vec![group("first", &[], &[1])]).await;
    plane.add_controller_with(&["--config", &config.display().to_string()]);
    plane.ready().await;
    plane.leader().await;

    let bus: SocketAddr = plane.url().trim_start_matches("nats://").parse().expect("an address");
    let mut lab = Lab::new(bus).expect("a lab");
    lab.host("h1").expect("a host");
    lab.host("world").expect("a host");
    lab.workload("web", "h1").expect("a workload");
    // Nobody judges there: it stands for the world.
    lab.workload("service", "world").expect("a workload");
    let (own, far) = (lab.workloads["web"].address, lab.workloads["service"].address);
    let mut web = workload("h1", "web", 1, &[]);
    web.space = Some("shop".parse().expect("an id"));
    web.addresses = [Prefix::host(own.into())].into();
    plane.register(vec![web]).await;
    let settings = AgentSettings {
        binary: agent_binary().clone(),
        host: "h1".to_owned(),
        bus: lab.hosts["h1"].bus.clone(),
        credentials: None,
        folder: folder.0.join("h1"),
        dry_run: false,
    };
    std::fs::create_dir_all(&settings.folder).expect("made");
    let agent = Agent::start(settings, Some(&lab.hosts["h1"].namespace)).expect("an agent");
    let interface = lab.workloads["web"].interface.clone();
    let add = ["workload", "add", "web", "--interface", &interface, "--within", "30s", "--fresh"];
    for port in [5001_u16, 5002, 5003] {
        answer(lab.workloads["service"].namespace.listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).expect("it listens"));
        let tried = |within| lab.connect("web", "service", port, within).expect("tried");
        assert!(tried(REFUSED_AFTER).is_err(), "nothing allows {port} yet");
        let body = json!({
            "name": format!("port {port}"),
            "rules": [{"protocol": "tcp", "destination": far.to_string(), "ports": port.to_string()}],
            "relationships": {"running_spaces": {"data": [{"guid": "shop"}]}},
        });
        cloud.does(Method::POST, "/v3/security_groups", &body).await;
        let said = agent.ask(&add).expect("it answers");
        assert_eq!(said.code, 0, "{said:?}");
        assert!(!said.stderr.contains("not fresh"), "{said:?}");
        // By what is in force, because a connection is tried again for seconds; and then by packets.
        let explained = agent.ask(&["explain", &own.to_string(), &far.to_string(), &format!("tcp/{port}")]).expect("it answers");
        assert!(explained.code == 0 && explained.stdout.starts_with("allowed"), "{port}: {explained:?}");
        let stream = tried(WITHIN).unwrap_or_else(|error| panic!("{port}: {error}"));
        assert!(talks(&stream, WITHIN));
        let removed = agent.ask(&["workload", "remove", "web"]).expect("it answers");
        assert_eq!(removed.code, 0, "{removed:?}");
    }
}
