//! Words that were not true: "enforced", "denied", "ok" and "ready" while packets passed, nobody led or the bus was gone. Each test asks
//! real processes, and looks at packets where there are some.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::{connect, streams};
use groupcast_control::log::Log;
use groupcast_messages::{Ack, HostState};
use groupcast_policy::text::prefix_text;
use groupcast_tests::control::{Plane, binary, workload};
use groupcast_tests::field::{Field, possible};
use groupcast_tests::gateway::{Folder, Gateway, User, group, groupcast, token};
use groupcast_tests::world::{DEADLINE, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

fn bound(id: &str, rules: &[&str], app: &str) -> Value {
    let mut document = group(id, rules);
    document["bindings"] = json!([format!("app:{app}")]);
    document
}

/// Port 5432 from web to db and nothing else; a comment that makes it another change.
async fn shop(field: &Field, round: u16) -> u64 {
    let other = format!("egress tcp {} to 192.0.2.1/32", 10_000 + round);
    let (egress, ingress) = ("egress any to any", "ingress tcp 5432 from group:web");
    let own = format!("ingress tcp {} from 192.0.2.1/32", 10_000 + round);
    field.admin.change(&[bound("web", &[egress, &other], "web"), bound("db", &[ingress, &own], "db")]).await
}

/// How long a host that is not waited for may be waited for: much less than this, or the word that it is hopeless was not heard.
const WAITED: &str = "40s";

#[tokio::test(flavor = "multi_thread")]
async fn what_a_host_does_with_a_policy_is_part_of_enforced() {
    if !possible() {
        return;
    }
    let mut field = Field::start().await;
    let first = shop(&field, 0).await;
    field.enforced(first).await;
    field.expect("web-1", "db-1", 8080, false).await;
    /// Order, its end, what the host is called, whether what is denied passes, whether what is allowed passes, or it is not known.
    type Case = (&'static [&'static str], &'static [&'static str], &'static str, Option<bool>, Option<bool>);
    let cases: [Case; 5] = [
        (&["bypass", "a test"], &["resume", "over"], "bypassed", Some(true), Some(true)),
        (&["audit", "a test"], &["resume", "over"], "auditing", Some(true), Some(true)),
        (&["lockdown", "a test"], &["resume", "over"], "lockdown", Some(false), Some(false)),
        (&["workload", "audit", "db-1", "on"], &["workload", "audit", "db-1", "off"], "auditing-some", Some(true), Some(true)),
        (&["freeze", "a test"], &["resume", "over"], "frozen", None, None),
    ];
    for (round, (order, end, state, denied, allowed)) in (1..).zip(cases) {
        assert_eq!(field.agents["h2"].ask(order).expect("it answers").code, 0, "{order:?}");
        let change = shop(&field, round).await;
        let begun = Instant::now();
        let said = field.up.groupcast(&["wait", &change.to_string(), "--timeout", WAITED]).expect("it runs");
        assert_eq!(said.code, 6, "{state}: {said:?}");
        assert!(said.stderr.contains(&format!("h2: {state}")) && said.stderr.contains("groupcast-agent"), "{state}: {said:?}");
        assert!(!said.stderr.contains("goes on by itself") && !said.stderr.contains("h1:"), "{state}: {said:?}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{state} was waited for");
        // Through the other door: `apply --wait` is the same words.
        let progress = field.admin.get(&format!("/v1/changes/{change}")).await.body["progress"].clone();
        assert_eq!((&progress["done"], &progress["enforced"]), (&json!(false), &json!(1)), "{state}: {progress}");
        // What is explained is what packets do.
        for (port, passes) in [(8080, denied), (5432, allowed)] {
            let told = field.admin.get(&format!("/v1/explain?from=web-1&to=db-1&traffic=tcp/{port}")).await;
            assert_eq!(told.body["allowed"], json!(port == 5432), "{}", told.text);
            assert_eq!(told.body["passes"], json!(passes), "{state} {port}: {}", told.text);
            assert_ne!(told.body["ingress"]["enforced"], true, "{state}: {}", told.text);
            if let Some(passes) = passes {
                assert_eq!(field.passes("web-1", "db-1", port, passes), passes, "packets {state} {port}");
            }
        }
        let told = field.up.groupcast(&["explain", "web-1", "db-1", "tcp/8080"]).expect("it runs");
        assert!(told.stdout.contains("h2") || told.stdout.contains("db-1 is audited"), "{told:?}");
        let arriving = told.stdout.split("arriving at").nth(1).unwrap_or_default();
        assert!(!arriving.is_empty() && !arriving.contains("in force on the host (change"), "{state}: {told:?}");
        assert_eq!(field.agents["h2"].ask(end).expect("it answers").code, 0);
        let said = field.up.groupcast(&["wait", &change.to_string(), "--timeout", "60s"]).expect("it runs");
        assert_eq!(said.code, 0, "{state} is over: {said:?}");
        field.expect("web-1", "db-1", 8080, false).await;
    }
    // Frozen in bypass it is still bypassed, whatever it is called last.
    for order in [["bypass", "a test"], ["freeze", "a test"]] {
        assert_eq!(field.agents["h2"].ask(&order).expect("it answers").code, 0);
    }
    eventually("it is explained that it passes", || async {
        let told = field.admin.get("/v1/explain?from=web-1&to=db-1&traffic=tcp/8080").await;
        told.body["passes"] == true
    })
    .await;
    assert!(field.passes("web-1", "db-1", 8080, true));
    assert_eq!(field.agents["h2"].ask(&["resume", "over"]).expect("it answers").code, 0);

    // An agent that only prints what it would do.
    field.agents.get_mut("h2").expect("an agent").kill();
    field.start_dry_agent("h2");
    let change = shop(&field, 9).await;
    let said = field.up.groupcast(&["wait", &change.to_string(), "--timeout", WAITED]).expect("it runs");
    assert!(said.code == 6 && said.stderr.contains("h2: dry-run"), "{said:?}");
    let status = field.agents["h2"].ask(&["status"]).expect("it answers");
    assert!(status.stdout.contains("\"state\": \"dry-run\""), "{status:?}");
}

/// A change names topics that the host had to fetch, and so came with them: the agent showed an older one.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_shows_the_change_that_it_enforces() {
    if !possible() {
        return;
    }
    let field = Field::start().await;
    for round in 0..3 {
        let change = shop(&field, round).await;
        field.enforced(change).await;
        let status = field.agents["h2"].ask(&["status"]).expect("it answers");
        let status: Value = serde_json::from_str(&status.stdout).expect("JSON");
        assert_eq!(status["change"], change, "{status}");
    }
}

const LEASE: Duration = Duration::from_millis(600);

/// Of an address the workload was taken, and then the first of its addresses: an IPv6 question was answered for IPv4.
#[tokio::test(flavor = "multi_thread")]
async fn an_address_is_explained_and_not_another_of_its_workload() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let text = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let user = User::new(&gateway, &text).await;
    user.change(&[
        group("web", &["egress tcp 80 to any", "egress ipv6 tcp 443 to any", "egress icmp any/any to any"]),
        group("db", &["ingress ipv4 tcp 80 from any", "ingress ipv6 tcp 443 from any", "ingress ipv6 icmp 128/any from any"]),
    ])
    .await;
    let (mut w1, mut w2) = (workload("h1", "w1", 1, &["web"]), workload("h2", "w2", 2, &["db"]));
    w1.addresses.insert(prefix_text("2001:db8::1/128").expect("a prefix"));
    w2.addresses.insert(prefix_text("2001:db8::2/128").expect("a prefix"));
    w2.addresses.insert(prefix_text("10.9.0.0/28").expect("a prefix"));
    // The same addresses on another network.
    let mut w3 = workload("h3", "w3", 2, &["db"]);
    w3.network = "other".parse().expect("a network");
    plane.register(vec![w1, w2, w3]).await;
    eventually("the gateway has read the registry", || async { user.get("/v1/workloads/w3").await.status == 200 }).await;
    for (from, to, traffic, source, allowed) in [
        ("2001:db8::1", "2001:db8::2", "tcp/443", "2001:db8::1", true),
        ("2001:db8::1", "2001:db8::2", "tcp/80", "2001:db8::1", false),
        ("w1", "2001:db8::2", "tcp/443", "2001:db8::1", true),
        ("2001:db8::1", "w2", "tcp/80", "2001:db8::1", false),
        ("10.1.0.1", "w2", "tcp/80", "10.1.0.1", true),
        ("w1", "w2", "tcp/443", "10.1.0.1", false),
        // Echo is the family's own.
        ("2001:db8::1", "2001:db8::2", "icmp", "2001:db8::1", true),
        ("10.1.0.1", "w2", "icmp", "10.1.0.1", false),
        ("w1", "w2", "icmpv6", "2001:db8::1", true),
        // Of two that have the address, the one on the network of the other end.
        ("w1", "10.1.0.2", "tcp/80", "10.1.0.1", true),
    ] {
        let told = user.get(&format!("/v1/explain?from={from}&to={to}&traffic={traffic}")).await;
        assert_eq!((told.status, &told.body["allowed"]), (200, &json!(allowed)), "{from} {to} {traffic}: {}", told.text);
        assert_eq!(told.body["source"], source, "{from} {to} {traffic}: {}", told.text);
        // Nobody has heard of a host here: it is not known, and that is said.
        assert_eq!(told.body["passes"], Value::Null, "{}", told.text);
        assert!(told.body["ingress"]["happens"].as_str().is_some_and(|words| words.starts_with("not known")), "{}", told.text);
    }
    let told = user.get("/v1/explain?from=w1&to=10.9.0.7&traffic=tcp/80").await;
    assert_eq!(
        (&told.body["destination"], &told.body["ingress"]["workload"]),
        (&json!("10.9.0.7"), &json!("w2")),
        "{}",
        told.text
    );
    for (query, status) in [("from=192.0.2.9&to=10.1.0.2&traffic=tcp/80", 400), ("from=10.1.0.1&to=w2&traffic=icmpv6", 400)] {
        assert_eq!(user.get(&format!("/v1/explain?{query}")).await.status, status, "{query}");
    }
}

/// The token's file and the URL as a user's environment.
fn environment<'e>(url: &'e str, token: &'e str) -> [(&'e str, &'e str); 2] {
    [("GROUPCAST_GATEWAY", url), ("GROUPCAST_TOKEN", token)]
}

/// "ok" with the bus stopped for 40 s; and a change whose `--timeout 5s` took 22.
#[tokio::test(flavor = "multi_thread")]
async fn readiness_and_doctor_look_at_the_bus_the_leader_and_hosts() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let text = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let user = User::new(&gateway, &text).await;
    user.change(&[group("web", &["egress tcp 5432 to any"])]).await;
    plane.leader().await;
    let url = gateway.url();
    let doctor = || groupcast(&["doctor"], &environment(&url, &text));
    eventually("all is well", || async { user.get("/readyz").await.text == "ok\n" }).await;
    let ran = doctor();
    assert!(ran.code == 0 && ran.stdout.contains("ok   leader: c1 leads"), "{ran:?}");
    assert!(ran.stdout.contains("ok   bus: CATALOG answers a write") && ran.stdout.contains("ok   clock of the bus"), "{ran:?}");
    assert!(ran.stdout.contains("??   flushing: not known"), "what cannot be seen is said: {ran:?}");

    // A host in bypass, one that nobody has heard of.
    plane.register(vec![workload("h1", "w1", 1, &["web"]), workload("h2", "w2", 2, &["web"])]).await;
    let observer = plane.bus.observer("observer").await;
    let bypassed = HostState::Bypassed { reason: "a test".into() };
    let ack = Ack { term: 1, state: bypassed, reached: vec![] }.encode();
    eventually("doctor says that it is bypassed", || async {
        let subject = groupcast_bus_config::subjects::ack(&"h1".parse().expect("an id"));
        observer.publish(subject, ack.clone().into()).await.expect("sent");
        let ran = doctor();
        ran.code == 1
            && ran.stdout.contains("h1 is bypassed: a test")
            && ran.stdout.contains("??   hosts: not known: 1 have not said")
    })
    .await;
    eventually("readiness does not say ok", || async { user.get("/readyz").await.text.contains("needs attention: hosts") }).await;

    // Nobody leads.
    plane.controllers[0].kill();
    eventually("it is said that nobody leads", || async { user.get("/readyz").await.text.contains("nobody leads") }).await;
    let ran = doctor();
    assert!(ran.code == 1 && ran.stdout.contains("BAD  leader: nobody leads"), "{ran:?}");
    assert!(ran.stdout.contains("??   hosts: not known") && ran.stdout.contains("??   sources: not known"), "{ran:?}");

    // The bus answers nothing, though connections stand.
    plane.bus.server().pause().expect("paused");
    let begun = Instant::now();
    eventually("it is not ready", || async { user.get("/readyz").await.status == 503 }).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
    let ran = doctor();
    assert!(ran.code == 1 && ran.stdout.contains("did not answer within") && ran.stdout.contains("not known"), "{ran:?}");
    // What may take five seconds takes no more than a few.
    let file = Folder::new("late");
    let path = file.0.join("web.yaml");
    std::fs::write(&path, "kind: group\nid: late\n").expect("written");
    let begun = Instant::now();
    let ran = groupcast(&["apply", "-f", &path.display().to_string(), "--timeout", "5s"], &environment(&url, &text));
    assert!(ran.code == 5 && ran.stderr.contains("whether it was written is not known"), "{ran:?}");
    assert!(begun.elapsed() < Duration::from_secs(15), "--timeout 5s took {:?}", begun.elapsed());
    plane.bus.server().resume().expect("resumed");
    eventually("it is ready again", || async { user.get("/readyz").await.status == 200 }).await;
    plane.bus.server().kill();
    eventually("it is not ready without a server", || async { user.get("/readyz").await.status == 503 }).await;
}

fn up(data: &Path, more: &[&str]) -> (Child, PathBuf) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let log = data.with_extension(format!("{}.log", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let stderr = std::fs::File::create(&log).expect("a log");
    let mut command = Command::new(binary());
    command.args(["up", "--data", &data.display().to_string(), "--api-listen", "127.0.0.1:0"]).args(more);
    (command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().expect("it starts"), log)
}

/// Waits until it says this; fails with what it said.
async fn says(log: &Path, words: &str) {
    eventually(&format!("{words:?} in {}", std::fs::read_to_string(log).unwrap_or_default()), || async {
        std::fs::read_to_string(log).unwrap_or_default().contains(words)
    })
    .await;
}

fn ends(child: &mut Child) -> std::process::ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("its state") {
            return status;
        }
        if begun.elapsed() > DEADLINE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The process that listens on the bus of this folder.
fn bus_process(data: &Path) -> Option<i32> {
    let configuration = data.join("bus/nats-server.conf").display().to_string();
    std::fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok()).find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<String> = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        words.first().is_some_and(|program| program.ends_with("nats-server")) && words.contains(&configuration)
    })
}

/// Two on one folder were two servers on one store, and both lost what they had acknowledged. One whose server died went on without; one
/// whose source failed panicked when it was told to end.
#[tokio::test(flavor = "multi_thread")]
async fn up_has_its_folder_for_itself_keeps_its_bus_and_ends_in_order() {
    let folder = Folder::new("up");
    let data = folder.0.join("data");
    let config = folder.0.join("groupcast.toml");
    let secret = folder.0.join("secret");
    std::fs::write(&secret, "x").expect("written");
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("closed");
    let source = format!(
        "[[source]]\nid = 'cf'\nkind = 'cloud-controller'\nurl = 'http://127.0.0.1:9'\ninternal_url = 'http://127.0.0.1:9'\n\
         uaa_url = 'http://127.0.0.1:9'\nclient_id = 'x'\nclient_secret_file = '{}'\npoll_interval = '1s'\n",
        secret.display()
    );
    std::fs::write(&config, source).expect("written");
    let (mut first, log) = up(&data, &["--config", &config.display().to_string()]);
    says(&log, "controller started").await;
    // Another one is refused, and touches nothing.
    let before = std::fs::read(data.join("authority.json")).expect("an authority");
    let (mut second, second_log) = up(&data, &[]);
    let ended = ends(&mut second);
    let said = std::fs::read_to_string(&second_log).unwrap_or_default();
    assert!(!ended.success() && said.contains("another `groupcast up`") && said.contains(&first.id().to_string()), "{said}");
    assert_eq!(std::fs::read(data.join("authority.json")).expect("an authority"), before);
    // Its server dies: it is started again, on the same files.
    let killed = bus_process(&data).expect("a server");
    kill(Pid::from_raw(killed), Signal::SIGKILL).expect("killed");
    eventually("its server runs again", || async { bus_process(&data).is_some_and(|pid| pid != killed) }).await;
    says(&log, "nats-server has ended; starting it again").await;
    // Told to end while its source fails: it ends, in order.
    says(&log, "a source could not be read").await;
    kill(Pid::from_raw(first.id() as i32), Signal::SIGTERM).expect("told");
    let ended = ends(&mut first);
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    assert!(ended.success() && !said.contains("panicked"), "{ended:?}\n{said}");
    // And the folder is free again.
    let (mut third, third_log) = up(&data, &[]);
    says(&third_log, "controller started").await;
    // A server that dies again and again is given up, and everything with it.
    let begun = Instant::now();
    while third.try_wait().expect("its state").is_none() {
        assert!(begun.elapsed() < DEADLINE, "it goes on without a bus");
        if let Some(pid) = bus_process(&data) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let said = std::fs::read_to_string(&third_log).unwrap_or_default();
    assert!(!third.wait().expect("ended").success() && said.contains("cannot be kept running"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_says_its_name_and_tokens_are_not_lost() {
    // As docs/getting-started.md has it: a server with accounts, a credential, and nobody's name on the command line.
    let folder = Folder::new("held");
    let mut authority = Authority::new();
    let server = Server::start(Config::plain().with(authority.server_config("accounts").expect("a configuration")))
        .await
        .expect("a server");
    let path = |name: &str| folder.0.join(name).display().to_string();
    let now = std::time::SystemTime::now();
    for (role, name) in [(Role::Controller, "c1"), (Role::Gateway, "g1")] {
        let held = authority.mint(role, &name.parse().expect("an id"), None, now).expect("minted");
        held.save(Path::new(&path(name))).expect("saved");
    }
    let (url, held) = (server.url(), path("g1"));
    let options = connect::Options::new(std::slice::from_ref(&url), Role::Controller, &"c1".parse().expect("an id"));
    let (client, _events) =
        connect::connect(options.identity(connect::Identity::File(path("c1").into()))).await.expect("connected");
    streams::ensure(&client, 1).await.expect("streams");
    let add = |id: &str, more: &[&str]| {
        groupcast(
            &[&["token", "add", id, "--role", "admin", "--on-bus", "--server", &url, "--credentials", &held], more].concat(),
            &[],
        )
    };
    // A name that is not the credential's is refused before anything is written, and so is a place where the token cannot be kept.
    let wrong = add("root", &["--name", "g2"]);
    assert!(wrong.code == 2 && wrong.stderr.contains("are those of g1, not of g2"), "{wrong:?}");
    let nowhere = add("root", &["--out", "/nonexistent/token"]);
    assert!(nowhere.code == 1 && nowhere.stderr.contains("no token was made"), "{nowhere:?}");
    let last = || async { Log::catalog(client.clone()).last(">").await.expect("the bus answers").map(|entry| entry.subject) };
    assert_eq!(last().await, None, "nothing was written");
    let made = add("root", &[]);
    assert_eq!(made.code, 0, "{made:?}");
    let root = made.stdout.trim().to_owned();
    // A process under a wrong name says so, and does not wait for ever.
    let ran =
        groupcast(&["gateway", "--server", &url, "--credentials", &held, "--name", "g2", "--api-listen", "127.0.0.1:0"], &[]);
    assert!(ran.code == 1 && ran.stderr.contains("are those of g1, not of g2"), "{ran:?}");
    let ran = groupcast(&["doctor", "--on-bus", "--server", &url, "--credentials", &held, "--name", "g2"], &[]);
    assert!(ran.code == 1 && ran.stdout.contains("are those of g1, not of g2"), "{ran:?}");
    let ran = groupcast(
        &["controller", "--server", &url, "--credentials", &path("c1"), "--name", "c2", "--listen", "127.0.0.1:0"],
        &[],
    );
    assert!(ran.code == 1 && ran.stderr.contains("are those of c1, not of c2"), "{ran:?}");

    // The last administrator's token is not removed by a slip; nor is the one in use.
    let gateway = Gateway::start_as(&url, &["--credentials", &held]).await;
    let user = User::new(&gateway, &root).await;
    let address = gateway.url();
    let token = |arguments: &[&str]| groupcast(&[&["token"], arguments].concat(), &environment(&address, &root));
    let asked = token(&["remove", "root"]);
    assert!(asked.code == 3 && asked.stderr.contains("last administrator's") && asked.stderr.contains("--yes"), "{asked:?}");
    assert_eq!(token(&["add", "other", "--role", "admin"]).code, 0);
    let asked = token(&["remove", "root"]);
    assert!(asked.code == 3 && asked.stderr.contains("the one you use"), "{asked:?}");
    assert_eq!(token(&["remove", "other"]).code, 0, "nobody is locked out by this");
    assert_eq!(user.get("/v1/whoami").await.status, 200);
    assert_eq!(token(&["remove", "root", "--yes"]).code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_whole_and_what_is_dropped_is_said() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let text = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let user = User::new(&gateway, &text).await;
    let url = gateway.url();
    let run = |arguments: &[&str]| groupcast(arguments, &environment(&url, &text));
    // More groups than were ever shown.
    const MANY: usize = 10_050;
    for part in (0..MANY).collect::<Vec<_>>().chunks(2_500) {
        let groups: Vec<Value> = part.iter().map(|number| group(&format!("g{number:05}"), &[])).collect();
        user.change(&groups).await;
    }
    let ran = run(&["get", "groups", "-o", "name"]);
    assert_eq!((ran.code, ran.stdout.lines().count()), (0, MANY), "{}", ran.stderr);
    let ran = run(&["get", "groups", "-o", "name", "--limit", "3"]);
    assert!(ran.stdout.lines().count() == 3 && ran.stderr.contains("there are more"), "{ran:?}");
    assert!(!run(&["get", "groups", "-o", "name", "--limit", &MANY.to_string()]).stderr.contains("there are more"));
    // The groups a workload has, also those that it has by where it is.
    let mut everywhere = group("everywhere", &[]);
    everywhere["bindings"] = json!(["global"]);
    let mut shop = group("shop", &[]);
    shop["bindings"] = json!(["space:shop"]);
    user.change(&[everywhere, shop]).await;
    let mut w1 = workload("h1", "w1", 1, &["g00001"]);
    w1.space = Some("shop".parse().expect("an id"));
    plane.register(vec![w1, workload("h1", "w2", 2, &[])]).await;
    eventually("the gateway has read the registry", || async { user.get("/v1/workloads/w2").await.status == 200 }).await;
    let wide = run(&["get", "workloads", "-o", "wide"]);
    let line = |name: &str| wide.stdout.lines().find(|line| line.contains(name)).unwrap_or_default().to_owned();
    assert!(line("w1").contains("everywhere,shop,g00001"), "{wide:?}");
    assert!(line("w2").contains("everywhere") && !line("w2").contains("shop"), "{wide:?}");
    let listed = user.get("/v1/workloads?groups=true").await;
    for item in listed.body["items"].as_array().expect("items") {
        let id = item["document"]["id"].as_str().expect("an id");
        assert_eq!(item["groups"], user.get(&format!("/v1/workloads/{id}")).await.body["groups"], "{id}");
    }
    // Bits after a prefix's length are taken away with a word, or not at all.
    let folder = Folder::new("bits");
    let path = folder.0.join("bits.yaml");
    std::fs::write(&path, "kind: group\nid: bits\nmembers: [10.0.0.5/24]\nrules: [ingress tcp 22 from 192.0.2.9/30]\n")
        .expect("written");
    let ran = run(&["apply", "-f", &path.display().to_string()]);
    assert!(ran.code == 0 && ran.stderr.contains("10.0.0.5/24 is taken for 10.0.0.0/24"), "{ran:?}");
    assert!(ran.stderr.contains("192.0.2.9/30 is taken for 192.0.2.8/30"), "{ran:?}");
    let ran = run(&["host", "add", "h9", "--networks", "10.0.0.5/24"]);
    assert!(ran.code == 1 && ran.stderr.contains("has bits after its length: write 10.0.0.0/24"), "{ran:?}");
    let ran = run(&["token", "add", "scoped", "--role", "editor", "--members", "10.0.0.5/24"]);
    assert!(ran.code == 1 && ran.stderr.contains("has bits after its length"), "{ran:?}");
}

/// It said "good" of files that are not there and of keys that are not the certificate's.
#[test]
fn config_check_judges_every_file_that_is_named() {
    let folder = Folder::new("config");
    let path = |name: &str| folder.0.join(name).display().to_string();
    let secret = |name: &str, text: &str| {
        std::fs::write(path(name), text).expect("written");
        std::fs::set_permissions(path(name), std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("closed");
    };
    let made = || {
        let key = rcgen::KeyPair::generate().expect("a key");
        let certificate =
            rcgen::CertificateParams::new(["localhost".to_owned()]).expect("a name").self_signed(&key).expect("signed");
        (certificate.pem(), key.serialize_pem())
    };
    let ((one, own), (_, other)) = (made(), made());
    [("one.pem", &one), ("own.key", &own), ("other.key", &other)].iter().for_each(|(name, text)| secret(name, text));
    secret("secret", "x");
    secret("no.creds", "nothing");
    let source = |certificate: &str, key: &str, secret: &str| {
        format!(
            "[[source]]\nid = 'cf'\nkind = 'cloud-controller'\nurl = 'https://x'\ninternal_url = 'https://x'\nuaa_url = 'https://x'\n\
             client_id = 'x'\nclient_secret_file = '{}'\nclient_cert_file = '{}'\nclient_key_file = '{}'\n",
            path(secret),
            path(certificate),
            path(key)
        )
    };
    let check = |text: &str| {
        std::fs::write(path("groupcast.toml"), text).expect("written");
        groupcast(&["config", "check", "--offline", &path("groupcast.toml")], &[])
    };
    let tls = |key: &str| format!("[bus]\ntls_certificate = '{}'\ntls_key = '{}'\n", path("one.pem"), path(key));
    let api = |key: &str| format!("[gateway]\ncertificate = '{}'\nkey = '{}'\n", path("one.pem"), path(key));
    for (text, words) in [
        (tls("own.key"), ""),
        (tls("other.key"), "bus.tls_certificate: certificate"),
        (api("own.key"), ""),
        (api("other.key"), "gateway.certificate: certificate"),
        (source("one.pem", "own.key", "secret"), ""),
        (source("one.pem", "other.key", "secret"), "source cf: client_cert_file: certificate"),
        (source("one.pem", "own.key", "missing"), "source cf: client_secret_file names"),
        (source("missing", "own.key", "secret"), "source cf: client_cert_file names"),
        ("[[source]]\nid = 'files'\nkind = 'directory'\npath = '/nonexistent/groups.d'\n".to_owned(), "source files: path names"),
        (format!("[gateway]\ncertificate = '/nonexistent/x.pem'\nkey = '{}'\n", path("own.key")), "gateway.certificate names"),
        (format!("[gateway]\nhost_signer = '{}'\n", path("missing")), "gateway.host_signer"),
        (format!("[bus]\ncredentials = '{}'\n", path("no.creds")), "bus.credentials: credentials"),
        (format!("[bus]\ntls_authority = '{}'\n", path("secret")), "bus.tls_authority"),
    ] {
        let ran = check(&text);
        assert_eq!(ran.code, i32::from(!words.is_empty()), "{text}: {ran:?}");
        assert!(ran.stderr.contains(words), "{words}: {ran:?}");
    }
}
