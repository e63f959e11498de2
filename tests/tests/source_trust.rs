//! Sources that must not be believed, or not be waited for, with controllers, gateways and pretended servers as processes; and the notifier of
//! `contrib/`, which tells groupcast that Neutron has changed. What needs no process is in `simulator/tests/source/trust.rs`.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use groupcast_control::source::ask::Ask;
use groupcast_control::source::service;
use groupcast_tests::control::{Plane, group};
use groupcast_tests::fake::Fake;
use groupcast_tests::gateway::{Folder, Gateway, User, groupcast, token};
use groupcast_tests::world::eventually;
use reqwest::Method;
use serde_json::json;

const LEASE: Duration = Duration::from_millis(600);

/// A controller that polls what this file says, and a gateway with somebody who may do everything.
struct Scene {
    plane: Plane,
    gateway: Gateway,
    user: User,
    admin: String,
    folder: Folder,
}

impl Scene {
    async fn start(sources: &str) -> Self {
        let folder = Folder::new("trust");
        let config = folder.0.join("groupcast.toml");
        std::fs::write(&config, sources).expect("written");
        let mut plane = Plane::start(0, LEASE).await;
        // Nobody leads a bus whose catalogue nobody has written.
        plane.put_groups(vec![group("first", &[], &[1])]).await;
        plane.add_controller_with(&["--config", &config.display().to_string()]);
        plane.ready().await;
        plane.leader().await;
        let gateway = Gateway::start(&plane.url(), &[]).await;
        let admin = token(&plane.url(), "root", "admin", &[]);
        let user = User::new(&gateway, &admin).await;
        Self { plane, gateway, user, admin, folder }
    }

    async fn until(&self, what: &str, source: &str, judge: impl Fn(&serde_json::Value) -> bool) {
        eventually(what, || async { judge(&self.user.get(&format!("/v1/sources/{source}")).await.body) }).await;
    }

    /// The most memory that the controller has used, in MB.
    fn memory_max_mb(&self) -> u64 {
        let path = format!("/proc/{}/status", self.plane.controllers[0].process());
        let text = std::fs::read_to_string(path).expect("it runs");
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
        line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number") / 1_000
    }
}

fn cloud_source(cloud: &Fake, more: &str) -> String {
    format!(
        "[[source]]\nid = 'cf'\nkind = 'cloud-controller'\nurl = '{url}'\ninternal_url = '{url}'\nuaa_url = '{url}'\nclient_id = 'groupcast'\n\
         client_secret_file = '{secret}'\n{more}\n",
        url = cloud.url,
        secret = cloud.secret(),
    )
}

async fn fault(fake: &Fake, path: &str, fault: serde_json::Value, times: u32) {
    fake.does(Method::POST, "/_fake/fault", &json!({"path": path, "fault": fault, "times": times})).await;
}

/// An answer of 200 MB took 1.5 GB of memory.
#[tokio::test(flavor = "multi_thread")]
async fn an_endless_answer_takes_little_memory_and_nothing_is_deleted() {
    const MEMORY_MAX_MB: u64 = 500;
    let cloud = Fake::cloud_controller().await;
    let kept = cloud.space_group("kept", "shop").await;
    let scene = Scene::start(&cloud_source(&cloud, "poll_interval = '200ms'\ntimeout = '20s'")).await;
    scene.until("the source is read", "cf", |source| source["groups"] == 1).await;
    let before = scene.memory_max_mb();
    // Too long as a whole, and then only one group of it.
    for (bytes, words) in [(200_000_000, "at most"), (50_000_000, "longer than")] {
        fault(&cloud, "/v3/security_groups", json!({"huge": {"bytes": bytes}}), 1_000).await;
        cloud.does(Method::POST, "/_fake/touch", &json!({"path": "kept"})).await;
        scene.until("it says why", "cf", |source| source.to_string().contains(words)).await;
        let after = scene.memory_max_mb();
        println!("{bytes} bytes: at most {after} MB, {before} before");
        assert!(after < MEMORY_MAX_MB, "{bytes} bytes took up to {after} MB, {before} before");
        let shown = scene.user.get("/v1/sources/cf").await.body;
        assert!(shown["state"] != "good" && shown["groups"] == 1, "{shown}");
        assert_eq!(scene.user.get(&format!("/v1/groups/{kept}")).await.status, 200);
        cloud.does(Method::POST, "/_fake/calm", &json!({})).await;
        // What cannot be read is asked for again when the source says that something changed, or with the next full listing.
        cloud.does(Method::POST, "/_fake/touch", &json!({"path": "kept"})).await;
        scene.until("it is read again", "cf", |source| source["state"] == "good").await;
    }
}

/// The log of three removed workloads said that nothing was deleted, malformed items left no line, and of a source that hangs it was said that no
/// controller leads.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_of_a_source_is_so() {
    let neutron = Fake::neutron().await;
    let mut ports = Vec::new();
    for number in 1..=4 {
        ports.push(neutron.port("h1", &format!("10.0.0.{number}"), &[], json!({})).await);
    }
    let scene = Scene::start(&neutron.neutron_source("poll_interval = '200ms'\ntimeout = '30s'\n")).await;
    scene.until("the ports are placed", "os", |source| source["workloads"] == 4).await;
    let log = || scene.plane.controllers[0].log();
    for port in &ports[..3] {
        neutron.delete("ports", port).await;
    }
    scene.until("three are gone", "os", |source| source["workloads"] == 1).await;
    let removed: u64 = log()
        .lines()
        .filter_map(|line| line.split("workloads_removed=").nth(1)?.split_whitespace().next()?.parse::<u64>().ok())
        .sum();
    assert_eq!(removed, 3, "{}", log());
    // One that cannot be read.
    neutron.update_port(&ports[3], json!({"fixed_ips": [{"ip_address": "10.0.0.999"}]})).await;
    scene.until("it is malformed", "os", |source| source["state"] == "malformed" && source["malformed"] == 1).await;
    let lines = || log().lines().filter(|line| line.contains("cannot be read") && line.contains(&ports[3])).count();
    eventually("it is in the log", || async { lines() == 1 }).await;
    let polls = scene.user.get("/v1/sources/os").await.body["polls"].as_u64().expect("a number");
    scene.until("polls go on", "os", |source| source["polls"].as_u64() > Some(polls + 3)).await;
    assert_eq!(lines(), 1, "once, not with every poll: {}", log());
    let environment = [("GROUPCAST_GATEWAY", scene.gateway.url()), ("GROUPCAST_TOKEN", scene.admin.clone())];
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let ran = groupcast(&["doctor"], &environment);
    assert!(ran.stdout.contains("1 of its items cannot be read"), "{ran:?}");
    neutron.update_port(&ports[3], json!({"fixed_ips": [{"ip_address": "10.0.0.9"}]})).await;
    scene.until("it is mended", "os", |source| source["state"] == "good").await;
    eventually("that is in the log too", || async { log().contains("every item of a source can be read again") }).await;
    // One that does not answer.
    fault(&neutron, "/v2.0/ports", json!("hang"), 1_000).await;
    let client = scene.plane.bus.observer("asks").await;
    let ask = Ask::Poll { id: "os".to_owned(), full: true };
    let error = service::ask(&client, &ask, Duration::from_secs(3)).await.expect_err("it hangs");
    assert!(error.contains("source os has not answered within 3s") && !error.contains("no controller"), "{error}");
}

/// A Python with `oslo.messaging`, installed once into the target folder; `None` where that cannot be done.
fn python() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    // <target>/<profile>/deps/<test>
    let folder = own.ancestors().nth(3)?.join("python-clients/oslo-messaging");
    let python = folder.join("bin/python");
    let imports =
        || Command::new(&python).args(["-c", "import oslo_messaging"]).output().is_ok_and(|output| output.status.success());
    if imports() {
        return Some(python);
    }
    let made = Command::new("python3").args(["-m", "venv"]).arg(&folder).status();
    let pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "install", "oslo.messaging"];
    let installed = made.and_then(|_| Command::new(&python).args(pip).status());
    if installed.is_ok_and(|status| status.success()) && imports() {
        return Some(python);
    }
    eprintln!("\nSKIPPED: oslo.messaging cannot be installed into {}", folder.display());
    eprintln!("SKIPPED: the notifier of contrib/neutron-notifier was NOT tested\n");
    None
}

/// The notifier, and whoever sends what Neutron sends, in one process: the transport is that package's own, in memory.
const NOTIFIER: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
import oslo_messaging
from oslo_config import cfg
import groupcast_notifier as notifier
oslo_messaging.set_transport_defaults("neutron")
conf = cfg.ConfigOpts()
conf([], project="neutron")
transport = oslo_messaging.get_notification_transport(conf, url="fake://")
poller = notifier.Poller(sys.argv[2].split(","), "os", sys.argv[3])
server = notifier.listener(transport, poller, ["notifications"], "neutron", "groupcast")
server.start()
poller.start()
neutron = oslo_messaging.Notifier(transport, driver="messagingv2", publisher_id="network.test", topics=["notifications"])
print("listening", flush=True)
for line in sys.stdin:
    if line.strip() == "polls":
        print(poller.polls, flush=True)
    else:
        neutron.info({}, line.strip(), {})
server.stop()
server.wait()
poller.stop()
"#;

struct Notifier {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Notifier {
    fn start(python: PathBuf, gateways: &str, token_file: &str) -> Self {
        let contrib = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/neutron-notifier");
        let mut command = Command::new(python);
        command.args(["-c", NOTIFIER, contrib, gateways, token_file]).env("PYTHONDONTWRITEBYTECODE", "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        let mut notifier = Self { child, lines };
        assert_eq!(notifier.line(), "listening");
        notifier
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    fn says(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("its input");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("it listens");
    }

    fn polls(&mut self) -> u64 {
        self.says("polls");
        self.line().parse().expect("a number")
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What changes in Neutron is known at once, however seldom it is polled.
#[tokio::test(flavor = "multi_thread")]
async fn a_notification_of_neutron_has_it_read_at_once() {
    let Some(python) = tokio::task::spawn_blocking(python).await.expect("asked") else { return };
    let neutron = Fake::neutron().await;
    // Nothing comes by itself in this test.
    let scene = Scene::start(&neutron.neutron_source("poll_interval = '1h'\nfull_sync_interval = '2h'\n")).await;
    scene.until("the source is read", "os", |source| source["state"] == "good").await;
    let file = scene.folder.0.join("token");
    std::fs::write(&file, token(&scene.plane.url(), "notifier", "editor", &[])).expect("written");
    // The first of the gateways is not there.
    let gateways = format!("http://127.0.0.1:1,{}", scene.gateway.url());
    let mut notifier = Notifier::start(python, &gateways, &file.display().to_string());
    eventually("it has the source read when it starts", || {
        let polls = notifier.polls();
        async move { polls == 1 }
    })
    .await;
    for round in 0..3 {
        let id = neutron.neutron_group(&format!("g{round}"), &[]).await;
        assert_eq!(scene.user.get(&format!("/v1/groups/os-{id}")).await.status, 404, "nobody has told");
        // A burst is few polls, and what does not concern us is none.
        let before = notifier.polls();
        notifier.says("network.create.end");
        notifier.says("security_group.create.start");
        assert_eq!(notifier.polls(), before);
        (0..20).for_each(|_| notifier.says("security_group.create.end"));
        eventually("it is known", || async { scene.user.get(&format!("/v1/groups/os-{id}")).await.status == 200 }).await;
        assert!(notifier.polls() - before <= 5, "a poll for each notification");
    }
    let shown = scene.user.get("/v1/sources/os").await.body;
    assert_eq!(shown["full_syncs"], 1, "only what is new is read: {shown}");
}
