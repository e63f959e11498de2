//! What operators see of registrations as they change, and a registry that was lost.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use groupcast_bus_config::streams;
use groupcast_tests::control::binary;
use groupcast_tests::enrolled::{Guest, allowed, asked, gone, host_entry, judging, plane, workload_entry};
use groupcast_tests::gateway::{Gateway, User, groupcast, token};
use groupcast_tests::world::{DEADLINE, eventually};

/// The command line, watching; what it prints as it comes.
struct Watching {
    child: Child,
    lines: Receiver<String>,
}

impl Watching {
    fn start(arguments: &[&str], url: &str, secret: &str) -> Self {
        let mut child = Command::new(binary())
            .args(arguments)
            .envs([("GROUPCAST_GATEWAY", url), ("GROUPCAST_TOKEN", secret)])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let out = child.stdout.take().expect("a pipe");
        let (send, lines) = channel();
        std::thread::spawn(move || BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { child, lines }
    }

    /// Reads on until a line has all of these words.
    fn reads(&self, words: &[&str]) -> String {
        let mut before = Vec::new();
        loop {
            match self.lines.recv_timeout(DEADLINE) {
                Ok(line) if words.iter().all(|word| line.contains(word)) => return line,
                Ok(line) => before.push(line),
                Err(_) => panic!("no line with {words:?}, but {before:#?}"),
            }
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_workloads_and_registrations_are_watched() {
    let mut plane = plane(1).await;
    allowed(&plane, "vm", &["h1", "h2", "h3"]).await;
    judging(&mut plane).await;
    let secret = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let admin = User::new(&gateway, &secret).await;
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    one.settle("vm", "w1", 5).await;
    eventually("the gateway knows it", || async { admin.get("/v1/registrations/h1").await.status == 200 }).await;
    let watch = |kind: &str| Watching::start(&["get", kind, "-o", "wide", "--watch"], &gateway.url(), &secret);
    let (hosts, workloads, registrations) = (watch("hosts"), watch("workloads"), watch("registrations"));
    tokio::task::block_in_place(|| {
        hosts.reads(&["HOST", "STATE", "LAST HEARD"]);
        hosts.reads(&["h1", "live"]);
        workloads.reads(&["w1", "h1", "10.0.0.5"]);
        registrations.reads(&["h1", "live", "w1"]);
    });
    // One comes; it ends a workload and enrols another; it falls silent; it is gone.
    two.settle("vm", "w2", 6).await;
    tokio::task::block_in_place(|| {
        hosts.reads(&["h2", "live"]);
        workloads.reads(&["w2", "h2", "10.0.0.6"]);
        registrations.reads(&["h2", "live", "w2"]);
    });
    two.enrol("vm", vec![asked("w2", 6), asked("w3", 7)]).await;
    tokio::task::block_in_place(|| {
        registrations.reads(&["h2", "w2,w3"]);
        workloads.reads(&["w3", "h2"]);
    });
    two.vanish();
    tokio::task::block_in_place(|| {
        registrations.reads(&["h2", "suspect"]);
        hosts.reads(&["h2", "suspect"]);
        registrations.reads(&["h2", "gone"]);
        hosts.reads(&["h2", "gone"]);
        workloads.reads(&["h2", "gone"]);
    });
    let url = gateway.url();
    let environment = [("GROUPCAST_GATEWAY", url.as_str()), ("GROUPCAST_TOKEN", secret.as_str())];
    let groups = groupcast(&["get", "groups", "--watch"], &environment);
    assert!(groups.code == 2 && groups.stderr.contains("only hosts, workloads and registrations"), "{groups:?}");
}

/// Only a consumer that broke was noticed: who kept its connection believed in entries that were not there any more, and nobody was
/// told to enrol again.
#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_was_lost_is_filled_again_by_the_hosts_themselves() {
    let mut plane = plane(2).await;
    allowed(&plane, "vm", &["h1", "h2"]).await;
    judging(&mut plane).await;
    let guests = [Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await];
    guests[0].settle("vm", "w1", 5).await;
    guests[1].settle("vm", "w2", 6).await;
    let observer = plane.bus.observer("observer").await;
    let context = async_nats::jetstream::new(observer.clone());
    context.delete_stream("REGISTRY").await.expect("deleted");
    streams::ensure(&observer, 1).await.expect("made again");
    for (host, workload) in [("h1", "w1"), ("h2", "w2")] {
        eventually(&format!("{host} is enrolled again"), || async {
            host_entry(&observer, host).await.is_some() && workload_entry(&observer, workload).await.is_some()
        })
        .await;
    }
    assert!(guests.iter().all(|guest| guest.told() > 0));
    // And silence counts in the new one.
    guests[0].vanish();
    gone(&observer, "h1").await;
    assert!(host_entry(&observer, "h2").await.is_some());
}
