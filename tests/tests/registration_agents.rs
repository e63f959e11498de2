//! The cases of CASES.md D that are about processes, with real agents: stopped, killed, paused, rebooted, cut off by their namespace.

use std::time::Duration;

use groupcast_policy::model::{HealthCheck, Probe};
use groupcast_tests::agent::{Agent, Elsewhere, Island, ip, isolated, own};
use groupcast_tests::enrolled::{
    GRACE, Guest, LEASE, SHORT, Sentinel, allowed, audited, causes, entries, gone, grant, host_entry, is_suspect, plane,
    put_template, registered, template, workload_entry,
};
use groupcast_tests::world::eventually;

#[test]
fn d06_agent_restarts_are_no_exit_and_leave_and_remove_are() {
    isolated(|| async {
        let plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        ip("link add gcw0 type veth peer name far0");
        let mut agent = Agent::new(&plane.url(), "h1", &format!("claims = ['gcw*']\n{}", own("m1", "10.0.0.5")));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        // Given by the local API too.
        let add =
            ["workload", "add", "w2", "--interface", "gcw0", "--address", "10.0.0.6", "--template", "vm", "--network", "net"];
        let _ = agent.ask(&[&add[..], &["--space", "shop", "--within", "2s"]].concat());
        registered(&observer, "w2", 1).await;
        let before = entries(&observer).await;
        agent.stop();
        agent.start().await;
        agent.kill();
        agent.start().await;
        eventually("it is enrolled again, both of them", || async {
            agent.registered("m1").is_some_and(|one| one["incarnation"] == 1)
                && agent.registered("w2").is_some_and(|one| one["incarnation"] == 1)
        })
        .await;
        assert_eq!(entries(&observer).await, before, "a restart, also after SIGKILL, changes nothing");
        agent.does(&["workload", "remove", "w2"]);
        eventually("w2 is gone", || async { workload_entry(&observer, "w2").await.is_none() }).await;
        assert!(workload_entry(&observer, "m1").await.is_some());
        agent.does(&["leave"]);
        gone(&observer, "h1").await;
        // It would have beaten many times until then.
        Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
        assert!(host_entry(&observer, "h1").await.is_none(), "who has left does not come back by itself");
        audited(&observer, "gc.reg.h.h1", "its host left").await;
    });
}

#[test]
fn d11_an_agent_killed_and_its_machine_rebooted_is_another_life() {
    isolated(|| async {
        let plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        agent.kill();
        agent.reboot();
        agent.start().await;
        registered(&observer, "m1", 2).await;
        let claims = entries(&observer).await.into_keys().filter(|subject| subject.starts_with("gc.reg.a.")).count();
        assert_eq!(claims, 1);
    });
}

#[test]
fn d12_an_agent_that_is_killed_is_suspect_and_then_deleted() {
    isolated(|| async {
        let plane = plane(2).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        agent.kill();
        eventually("it is suspect", || is_suspect(&observer, "h1")).await;
        gone(&observer, "h1").await;
        audited(&observer, "gc.reg.w.m1", "deleted").await;
    });
}

#[test]
fn d14_the_agent_and_all_controllers_killed_it_is_deleted_after_they_come_back() {
    isolated(|| async {
        let mut plane = plane(2).await;
        allowed(&plane, "vm", &["h1"]).await;
        allowed(&plane, "other", &["h2"]).await;
        let observer = plane.bus.observer("observer").await;
        let other = Guest::new(&plane, "h2", 1).await;
        other.settle("other", "w2", 6).await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        plane.controllers.iter_mut().for_each(|controller| controller.kill());
        plane.controllers.clear();
        agent.kill();
        other.beats_for(LEASE + GRACE).await;
        assert!(host_entry(&observer, "h1").await.is_some(), "nobody deletes without controllers");
        for _ in 0..2 {
            plane.add_controller_with(&SHORT);
        }
        plane.ready().await;
        gone(&observer, "h1").await;
        assert!(host_entry(&observer, "h2").await.is_some());
    });
}

/// How often it is tried to cut a host off for less than a lease.
const CUT_ATTEMPTS_MAX: usize = 5;

/// For how long a host was silent whenever that had a consequence, as the words in AUDIT have it.
fn silences(causes: &[String]) -> Vec<Duration> {
    let silent = |cause: &String| cause.strip_prefix("silent for ")?.split_once(" ms")?.0.parse().ok().map(Duration::from_millis);
    causes.iter().filter_map(silent).collect()
}

#[test]
fn d17_an_agent_that_was_cut_off_or_paused_enrols_again_by_itself() {
    isolated(|| async {
        let plane = plane(2).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let island = Island::new(&plane.url()).await;
        let mut agent = Agent::new(&island.url, "h1", &own("m1", "10.0.0.5")).within(&island.name);
        agent.start().await;
        registered(&observer, "m1", 1).await;
        // Cut off for less than a lease: nothing happens. On a machine that is so slow that a lease has passed nothing is shown: the
        // registry says whether it has, and it is done once more.
        for attempt in 1..=CUT_ATTEMPTS_MAX {
            let (before, told) = (entries(&observer).await, causes(&observer, "gc.reg.h.h1").await.len());
            island.cut();
            tokio::time::sleep(LEASE / 4).await;
            island.mend();
            Sentinel::new(&plane, &format!("sentinel{attempt}")).await.passes(&observer).await;
            let told = causes(&observer, "gc.reg.h.h1").await.split_off(told);
            if told.is_empty() {
                assert_eq!(entries(&observer).await, before);
                break;
            }
            let silent = silences(&told);
            assert!(silent.iter().any(|silent| *silent >= LEASE), "marked while it was silent for {silent:?} only: {told:?}");
            assert!(attempt < CUT_ATTEMPTS_MAX, "it was never cut off for less than {LEASE:?}");
            eventually("it is enrolled and live", || async {
                host_entry(&observer, "h1").await.is_some() && !is_suspect(&observer, "h1").await
            })
            .await;
        }
        let life = workload_entry(&observer, "m1").await.expect("registered")["incarnation"].as_u64().expect("a number");
        // Cut off for good, and back.
        island.cut();
        gone(&observer, "h1").await;
        island.mend();
        registered(&observer, "m1", life + 1).await;
        // Paused: its connection stays, its beats do not.
        agent.pause();
        gone(&observer, "h1").await;
        agent.resume();
        registered(&observer, "m1", life + 2).await;
    });
}

#[test]
fn d25_agents_keep_enforcing_and_stay_registered_while_the_bus_is_down() {
    isolated(|| async {
        let mut plane = plane(1).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("before").await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        let in_force = || {
            let output = agent.ask(&["ruleset"]);
            (output.status.success(), output.stdout)
        };
        eventually("its policy is in force", || async { in_force().0 }).await;
        let before = in_force();
        plane.bus.server().kill();
        tokio::time::sleep(LEASE + GRACE).await;
        assert_eq!(in_force(), before, "the last good policy stays");
        plane.bus.server().restart().await.expect("the server comes back");
        let observer = plane.bus.observer("observer").await;
        Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
        assert_eq!(workload_entry(&observer, "m1").await.expect("still there")["incarnation"], 1);
    });
}

/// Answers HTTP on this port with what it is told to, for as long as it lives.
async fn answering(listener: tokio::net::TcpListener, status: &'static str) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    loop {
        let Ok((mut stream, _)) = listener.accept().await else { return };
        let mut bytes = [0; 512];
        let _ = stream.read(&mut bytes).await;
        let _ = stream.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes()).await;
    }
}

/// A process of a name that no other has.
fn process(name: &str) -> std::process::Child {
    let folder = std::env::temp_dir().join(format!("groupcast-process-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let program = folder.join(name);
    std::fs::copy("/bin/sleep", &program).expect("a program to copy");
    let child = std::process::Command::new(&program).arg("600").spawn().expect("it runs");
    std::fs::remove_dir_all(&folder).expect("removed");
    child
}

#[test]
fn health_is_probed_as_the_template_says() {
    isolated(|| async {
        let plane = plane(1).await;
        let elsewhere = Elsewhere::new("wire0");
        let (port, http_port) = (8_001, 8_002);
        let listener = elsewhere.listen("10.0.7.2", port);
        let http = elsewhere.listen("10.0.7.3", http_port);
        let name = format!("gcp{}", std::process::id());
        let mut running = process(&name);
        let probes = [
            ("tcp", Probe::Tcp { port }),
            ("http", Probe::Http { port: http_port, path: "/healthz".into() }),
            ("process", Probe::Process { name: name.clone() }),
        ];
        for (id, probe) in probes {
            let mut checked = template(id, &["h1"]);
            checked.health = Some(HealthCheck { probe, interval_seconds: 1 });
            put_template(&plane, checked).await;
        }
        grant(&plane, &["h1"]).await;
        let serving = tokio::spawn(answering(http, "200 OK"));
        let one = |id: &str, last: u8| {
            format!(
                "[[enrol]]\nworkload = 'm-{id}'\ntemplate = '{id}'\nnetwork = 'net'\nspace = 'shop'\naddresses = ['10.0.7.{last}']\n"
            )
        };
        let mut agent = Agent::new(&plane.url(), "h1", &[one("tcp", 2), one("http", 3), one("process", 4)].concat());
        agent.start().await;
        let observer = plane.bus.observer("observer").await;
        let unhealthy = |id: &'static str| {
            let observer = &observer;
            async move { workload_entry(observer, &format!("m-{id}")).await.is_some_and(|entry| entry["unhealthy"] == true) }
        };
        for id in ["m-tcp", "m-http", "m-process"] {
            registered(&observer, id, 1).await;
        }
        // One after the other: what fails is seen, and nothing else is.
        drop(listener);
        eventually("nobody listens", || unhealthy("tcp")).await;
        assert!(!unhealthy("http").await && !unhealthy("process").await);
        audited(&observer, "gc.reg.w.m-tcp", "health reported by its host").await;
        serving.abort();
        let _ = serving.await;
        let again = || elsewhere.listen("10.0.7.3", http_port);
        let serving = tokio::spawn(answering(again(), "503 Service Unavailable"));
        eventually("it answers that it is not well", || unhealthy("http")).await;
        assert!(!unhealthy("process").await);
        running.kill().expect("killed");
        running.wait().expect("ended");
        eventually("the process is gone", || unhealthy("process")).await;
        // And all of them back.
        let _listener = elsewhere.listen("10.0.7.2", port);
        serving.abort();
        let _ = serving.await;
        let serving = tokio::spawn(answering(again(), "204 No Content"));
        let mut running = process(&name);
        for id in ["tcp", "http", "process"] {
            eventually(&format!("{id} is well again"), || async { !unhealthy(id).await }).await;
            let entry = workload_entry(&observer, &format!("m-{id}")).await.expect("an entry");
            assert_eq!(entry["incarnation"], 1, "the same life");
        }
        serving.abort();
        running.kill().expect("killed");
        running.wait().expect("ended");
    });
}

/// It reached agents with their next refresh only, up to five minutes later, which is longer than this test waits for anything.
#[test]
fn health_is_checked_anew_as_soon_as_the_template_is_edited() {
    isolated(|| async {
        let plane = plane(2).await;
        // The machine itself: its own addresses are its workload's.
        ip("link add wire0 type veth peer name wire1");
        ip("addr add 10.0.7.1/24 dev wire0");
        let listener = tokio::net::TcpListener::bind("10.0.7.1:0").await.expect("a port");
        let (open, closed) = (listener.local_addr().expect("an address").port(), 1);
        let probing = |port| {
            let mut template = template("vm", &["h1"]);
            template.health = Some(HealthCheck { probe: Probe::Tcp { port }, interval_seconds: 1 });
            template
        };
        put_template(&plane, probing(open)).await;
        grant(&plane, &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.7.1"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        let unhealthy = || async { workload_entry(&observer, "m1").await.is_some_and(|entry| entry["unhealthy"] == true) };
        for _ in 0..2 {
            assert!(!unhealthy().await);
            put_template(&plane, probing(closed)).await;
            eventually("nobody listens where it is checked now", unhealthy).await;
            // Told by whoever leads: without a check it is well.
            let mut unchecked = probing(closed);
            unchecked.health = None;
            put_template(&plane, unchecked).await;
            eventually("nothing is checked, so nothing fails", || async { !unhealthy().await }).await;
        }
        assert_eq!(workload_entry(&observer, "m1").await.expect("an entry")["incarnation"], 1, "the same life");
    });
}
