//! What the agent answers: on its socket, to a scraper, to the service manager.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt;
use groupcast_bus_config::{connect, subjects};
use groupcast_messages::{Cut, HostRequest, HostRequestAnswer};
use groupcast_policy::ids::HostId;
use tokio::time::timeout;

use crate::world::{Agent, DEADLINE, World, addresses, eventually, group, interface, isolated, place, run, with_world, words};

fn started(world: &mut World) {
    ["gcw0", "gcw1"].into_iter().for_each(interface);
    world.write(&[group(0, &["ingress tcp 443 from group:far", "deny egress tcp 25 to any", "egress tcp 1-1000 to any"], &[])]);
    world.write(&[addresses("far", &["192.0.2.1"]), place("w0", "h0", "10.7.0.2")]);
    world.agent.start();
    world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
}

#[test]
fn explain_names_what_decides_and_whether_it_is_in_force() {
    with_world(|mut world| {
        started(&mut world);
        let told = world.agent.does(&["explain", "192.0.2.1", "w0", "tcp/443"]);
        for part in [
            "allowed\n",
            "allowed at ingress of w0: group g0 (global) says ingress tcp 443 from group:far",
            "rules.g0: revision ",
            "members.far: revision ",
            "the kernel does as it says",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        let denied = world.agent.does(&["explain", "w0", "192.0.2.1", "tcp/25"]);
        assert!(denied.starts_with("denied\n") && denied.contains("says deny egress tcp 25 to any"), "{denied}");
        assert!(world.agent.does(&["explain", "192.0.2.9", "w0", "tcp/443"]).contains("no rule allows it"));
        let json = world.agent.does(&["explain", "10.7.0.2", "192.0.2.1", "tcp/443", "--json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&json["allowed"], &json["enforced"], &json["judgements"][0]["group"]),
            (&true.into(), &true.into(), &"g0".into())
        );
        world.agent.does(&["bypass", "a fire"]);
        let bypassed = world.agent.does(&["explain", "192.0.2.1", "w0", "tcp/443"]);
        assert!(bypassed.contains("note: the operator ordered bypass: a fire") && bypassed.contains("does not do as it says"));
        assert_eq!(world.agent.ask(&["explain", "w9", "w0", "tcp/443"]).status.code(), Some(1));
        assert!(words(&world.agent.ask(&["explain", "w0", "192.0.2.1", "nonsense"])).contains("write tcp/443"));
    });
}

/// Nobody answers: the workload is attached and enforced by what is known, in time, and whoever asked is told that it is not fresh.
#[test]
fn fresh_without_an_answer_completes_by_its_deadline_and_says_so() {
    with_world(|mut world| {
        started(&mut world);
        world.enforce(&[place("w1", "h0", "10.7.1.2")]);
        let begun = Instant::now();
        let told = world.agent.does(&["workload", "add", "w1", "--interface", "gcw1", "--fresh", "--within", "2s"]);
        assert!(begun.elapsed() < Duration::from_secs(20), "bounded by the deadline, not by patience");
        assert!(told.contains("enforced by what was known before, not fresh from its source: no answer within"), "{told}");
        assert!(world.agent.holds("\"gcw1\" : goto p_"));
        // Without the bus there is nothing to wait for.
        world.end_bus();
        eventually("the bus is gone", || world.agent.status()["heard"]["connected"] == false);
        let told = world.agent.does(&["workload", "add", "w1", "--interface", "gcw1", "--fresh"]);
        assert!(told.contains("the bus is not connected"), "{told}");
        assert!(words(&world.agent.ask(&["leave"])).contains("the controllers were not told"));
    });
}

/// Somebody answers: what the sources brought meanwhile is in force before the add returns; and a refusal is passed on.
#[test]
fn fresh_returns_when_what_the_sources_said_is_in_force() {
    with_world(|mut world| {
        started(&mut world);
        let host = HostId::new("h0").unwrap();
        let client = world.client.clone();
        let mut requests = world.runtime.block_on(async {
            let requests = client.subscribe(subjects::register(&host)).await.unwrap();
            // A request that arrives before the server knows of the subscription is lost, and is not asked again.
            connect::settle(&client, DEADLINE).await.unwrap();
            requests
        });
        let next = |world: &World, requests: &mut groupcast_topics::nats::Subscriber| {
            // The agent enrols its host on the same subject, and tries again because nobody answers that here.
            let asked = async {
                loop {
                    let message = requests.next().await.unwrap();
                    if let Ok(request) = HostRequest::decode(&message.payload) {
                        return (request, message);
                    }
                }
            };
            let (request, message) =
                world.runtime.block_on(async { timeout(DEADLINE, asked).await }).expect("a request of the agent");
            let token = message.headers.as_ref().unwrap().get(subjects::ANSWER_TOKEN).unwrap().as_str().to_owned();
            (request, subjects::answer(&host, &token).unwrap())
        };
        let answer = |world: &World, to: String, answer: HostRequestAnswer| {
            let client = world.client.clone();
            world.runtime.block_on(async {
                client.publish(to, answer.encode().into()).await.unwrap();
                client.flush().await.unwrap();
            });
        };
        let adding = world.agent.command(&["workload", "add", "w1", "--interface", "gcw1", "--fresh", "--within", "50s"]).spawn();
        let mut adding = adding.unwrap();
        let (request, to) = next(&world, &mut requests);
        assert!(matches!(request, HostRequest::Fresh { within_ms: 30_000..=50_000 }), "{request:?}");
        // The source's news: the workload, and a member.
        world.write(&[addresses("far", &["192.0.2.1", "192.0.2.7"]), place("w1", "h0", "10.7.1.2")]);
        let number = world.number;
        eventually("the news are here", || world.agent.number("change") == number);
        let cut = world.cut();
        assert!(adding.try_wait().unwrap().is_none(), "it does not wait");
        answer(&world, to, HostRequestAnswer::Done { cut });
        assert!(adding.wait().unwrap().success());
        assert!(world.agent.holds("192.0.2.7") && world.agent.holds("\"gcw1\" : goto p_"));
        // Refused, it is enforced all the same.
        let child = world.agent.command(&["workload", "add", "w1", "--interface", "gcw1", "--fresh"]);
        let adding = std::thread::spawn(move || { child }.output().unwrap());
        let (_, to) = next(&world, &mut requests);
        answer(&world, to, HostRequestAnswer::Refused { retryable: true, reason: "the source is down".into() });
        let output = adding.join().unwrap();
        assert!(output.status.success() && words(&output).contains("the controllers refuse: the source is down"), "{output:?}");
        // And a farewell.
        let child = world.agent.command(&["leave"]);
        let leaving = std::thread::spawn(move || { child }.output().unwrap());
        let (request, to) = next(&world, &mut requests);
        assert!(matches!(request, HostRequest::Leave { .. }));
        answer(&world, to, HostRequestAnswer::Done { cut: Cut::default() });
        assert!(leaving.join().unwrap().status.success());
    });
}

fn page(port: u16, request: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn metrics_and_livez_are_served_on_loopback() {
    with_world(|mut world| {
        const PORT: u16 = 9464;
        world.agent.configure(&format!("http = '127.0.0.1:{PORT}'"));
        started(&mut world);
        world.enforce(&[addresses("far", &["192.0.2.2"])]);
        let get = |path: &str| page(PORT, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert!(get("/livez").starts_with("HTTP/1.1 200 OK\r\n") && get("/livez").ends_with("\r\n\r\nok\n"));
        let metrics = get("/metrics");
        for line in [
            "# TYPE groupcast_agent_transactions_total counter",
            "groupcast_agent_workloads 1",
            "groupcast_agent_refused_workloads 0",
            "groupcast_agent_repairs_total 0",
            "groupcast_agent_connected 1",
            "groupcast_agent_change 3",
            "groupcast_agent_lag_ms 0",
            "groupcast_agent_state{state=\"enforcing\"} 1",
            "groupcast_agent_state{state=\"frozen\"} 0",
        ] {
            assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
        }
        // Every line is a comment or a name and a number.
        for line in metrics.split("\r\n\r\n").nth(1).unwrap().lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            assert!(value.parse::<u64>().is_ok(), "{line}");
        }
        assert!(get("/").starts_with("HTTP/1.1 404"));
        assert!(page(PORT, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        world.agent.does(&["freeze", "a test"]);
        assert!(get("/metrics").contains("groupcast_agent_state{state=\"frozen\"} 1\n"));
    });
}

#[test]
fn the_service_manager_hears_that_it_is_ready_lives_and_ends() {
    isolated(|| {
        let mut agent = Agent::new("nats://127.0.0.1:1");
        let path = agent.folder.join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let heard = || {
            let mut bytes = [0; 512];
            let length = manager.recv(&mut bytes).expect("a message in time");
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        };
        agent.environment("NOTIFY_SOCKET", path.to_str().unwrap());
        agent.environment("WATCHDOG_USEC", "400000");
        agent.spawn();
        let mut before_ready = Vec::new();
        loop {
            match heard() {
                words if words.starts_with("READY=1\n") => break,
                words => before_ready.push(words),
            }
        }
        assert!(before_ready.iter().all(|words| words == "WATCHDOG=1"), "{before_ready:?}");
        // Ready means enforced: what is claimed is closed by now.
        assert!(run("nft", &["list", "sets", "inet"]).contains("gcw*"));
        assert_eq!([heard(), heard()], ["WATCHDOG=1", "WATCHDOG=1"]);
        agent.stop();
        loop {
            match heard() {
                words if words.starts_with("STOPPING=1\n") => break,
                words => assert_eq!(words, "WATCHDOG=1"),
            }
        }
        assert!(!agent.folder.join("agent.sock").exists());
    });
}

#[test]
fn the_socket_is_its_owners_alone_and_takes_anything_without_falling() {
    with_world(|mut world| {
        started(&mut world);
        let path = world.agent.folder.join("agent.sock");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let say = |bytes: &[u8]| {
            let mut stream = UnixStream::connect(&path).unwrap();
            // It may have answered and hung up before it heard everything.
            let _ = stream.write_all(bytes);
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            answer
        };
        let rows: [(&[u8], &str); 6] = [
            (b"\n", "not a request"),
            (b"{}\n", "not a request"),
            (b"{\"request\":\"fly\"}\n", "not a request"),
            (b"\xff\xfe\n", ""),
            (b"{\"request\":\"workload-remove\",\"workload\":\"a.b\"}\n", "workload id"),
            (b"{\"request\":\"mode\",\"mode\":\"freeze\",\"reason\":\"\"}\n", "say why"),
        ];
        for (bytes, said) in rows {
            assert!(say(bytes).contains(said), "{}: {}", String::from_utf8_lossy(bytes), say(bytes));
        }
        let limit = groupcast_host::api::REQUEST_BYTES_MAX as usize;
        let padded = |length: usize| format!("{{\"request\":\"status\"{}}}\n", " ".repeat(length - 21)).into_bytes();
        assert_eq!(padded(limit).len(), limit);
        assert!(say(&padded(limit - 1)).contains("\"answer\":\"status\""));
        assert!(say(&padded(limit)).contains("at most"), "{}", say(&padded(limit)));
        // A second agent does not take the first one's place.
        let second = world.agent.ask(&["run"]);
        assert!(words(&second).contains("is served by another agent"), "{}", words(&second));
        assert_eq!(world.agent.status()["mode"], "enforce");
    });
}

/// What the units grant is enough: with no other capability it enforces, repairs, zeroes marks and answers.
#[test]
fn the_capability_that_the_units_grant_is_enough() {
    with_world(|mut world| {
        let only = "-all,+net_admin";
        let runner = ["setpriv", "--inh-caps", only, "--bounding-set", only, "--no-new-privs"];
        world.agent.runner = runner.map(str::to_owned).to_vec();
        world.agent.configure("owned_table = false");
        started(&mut world);
        let id = std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
            let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
            let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
            let ours = line.contains(world.agent.folder.to_str()?) && line.contains("groupcast-agent");
            ours.then(|| status.lines().find(|line| line.starts_with("CapEff:")).map(str::to_owned)).flatten()
        });
        assert_eq!(
            id.as_deref().map(|line| line.trim_start_matches("CapEff:").trim()),
            Some("0000000000001000"),
            "CAP_NET_ADMIN alone"
        );
        run("nft", &["delete table inet gc"]);
        eventually("it is repaired", || world.agent.number("repairs") > 0 && world.agent.holds("\"gcw0\" : goto p_"));
    });
}

/// The units as the service manager reads them, with the agent itself replaced by something that is there.
#[test]
fn the_units_are_what_the_service_manager_understands() {
    let Ok(probe) = std::process::Command::new("systemd-analyze").arg("--version").output() else {
        return eprintln!("not run: no systemd-analyze");
    };
    assert!(probe.status.success());
    let folder = std::env::temp_dir().join(format!("groupcast-units-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd");
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(units).unwrap() {
        let entry = entry.unwrap();
        let text = std::fs::read_to_string(entry.path()).unwrap();
        assert!(text.contains("/usr/bin/groupcast-agent"));
        let path = folder.join(entry.file_name());
        std::fs::write(&path, text.replace("/usr/bin/groupcast-agent", "/bin/true")).unwrap();
        paths.push(path);
    }
    assert_eq!(paths.len(), 3);
    let output = std::process::Command::new("systemd-analyze").arg("verify").args(&paths).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(output.status.success() && words(&output).is_empty(), "{}", words(&output));
}
