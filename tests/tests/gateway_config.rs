//! `groupcast.toml` and `agent.toml`: judged by the command line, and read by a process that is gateway and controller in one.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use groupcast_tests::World;
use groupcast_tests::control::{agent_binary, binary};
use groupcast_tests::gateway::{Folder, User, group, groupcast, token};
use groupcast_tests::world::{DEADLINE, eventually};

fn file(folder: &Folder, name: &str, text: &str) -> String {
    let path = folder.0.join(name);
    std::fs::write(&path, text).expect("written");
    path.display().to_string()
}

#[test]
fn files_are_judged_before_they_are_used() {
    let folder = Folder::new("config");
    assert_eq!(agent_binary().parent(), binary().parent(), "the agent is asked where it lies beside the other");
    let good = file(&folder, "groupcast.toml", "[bus]\nservers = ['nats://127.0.0.1:4222']\n[controller]\nlease = '3s'\n");
    let ran = groupcast(&["config", "check", "--offline", &good], &[]);
    assert!(ran.code == 0 && ran.stdout.contains("groupcast.toml is good"), "{ran:?}");
    let bad = file(&folder, "bad.toml", "[controller]\nlese = '3s'\n");
    let ran = groupcast(&["config", "check", "--offline", &good, &bad], &[]);
    assert!(ran.code == 1 && ran.stderr.contains("did you mean controller.lease?"), "{ran:?}");
    let agent = file(&folder, "agent.toml", "host = 'h1'\nservers = ['nats://127.0.0.1:4222']\n");
    let ran = groupcast(&["config", "check", "--offline", &agent], &[]);
    assert!(ran.code == 0 && ran.stdout.contains("agent.toml is good"), "{ran:?}");
    let wrong = file(&folder, "other.toml", "host = 'h1'\nservers = []\nclaim = []\n");
    let ran = groupcast(&["config", "check", &wrong], &[]);
    assert!(ran.code == 1 && ran.stderr.contains("did you mean claims?"), "by what it says it is an agent's: {ran:?}");
    let ran = groupcast(&["config", "check"], &[("GROUPCAST_CONFIG", &bad)]);
    assert!(ran.code == 1 && ran.stderr.contains("bad.toml"), "{ran:?}");
    // What is wrong is also told by who would use it.
    let ran = groupcast(&["gateway", "--config", &bad], &[]);
    assert!(ran.code == 1 && ran.stderr.contains("did you mean controller.lease?"), "{ran:?}");
}

struct Serve(Child);

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_process_is_gateway_and_controller_as_its_file_says() {
    let (bus, folder) = (World::one().await, Folder::new("config"));
    let admin = token(&bus.url(0), "root", "admin", &[]);
    let file = file(
        &folder,
        "groupcast.toml",
        &format!(
            "[bus]\nservers = ['{}']\nname = 'both'\n[controller]\nlisten = '127.0.0.1:0'\nlease = '600ms'\n\
             [gateway]\nlisten = '127.0.0.1:9'\n",
            bus.url(0)
        ),
    );
    let log = folder.0.join("serve.log");
    // A flag counts before the file.
    let child = Command::new(binary())
        .args(["serve", "--config", &file, "--api-listen", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).expect("a log"))
        .spawn();
    let mut serve = Serve(child.expect("it starts"));
    let start = Instant::now();
    let found = |words: &str| {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let line = log.lines().find(|line| line.contains(words))?;
        Some(line.split("address=").nth(1)?.split_whitespace().next()?.to_owned())
    };
    let (api, health) = loop {
        match (found("serving the API"), found("serving metrics")) {
            (Some(api), Some(health)) => break (api, health),
            _ => assert!(start.elapsed() < DEADLINE, "{}", std::fs::read_to_string(&log).unwrap_or_default()),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let user = User::of(format!("http://{api}"), &admin).await;
    // Its controller leads once something is written, and publishes what its gateway takes.
    let change = user.change(&[group("web", &["ingress tcp 443 from any"])]).await;
    eventually("it is published", || async {
        user.get(&format!("/v1/changes/{change}?wait=enforced&timeout=5s")).await.body["progress"]["done"] == true
    })
    .await;
    // One set of metrics, at both addresses.
    for address in [&api, &health] {
        let text =
            user.http.get(format!("http://{address}/metrics")).send().await.expect("an answer").text().await.expect("text");
        for name in ["groupcast_http_requests_total", "groupcast_leading 1", "groupcast_follow_sequence"] {
            assert!(text.contains(name), "{name} at {address}:\n{text}");
        }
    }
    // Told to end, both end.
    let told = Command::new("kill").args(["-TERM", &serve.0.id().to_string()]).status().expect("kill runs");
    assert!(told.success() && serve.0.wait().expect("it ends").success());
}

/// Two commands that read the authority, add to it and write it each kept only their own: what is not kept cannot be revoked.
#[test]
fn credentials_that_are_made_at_once_are_all_kept() {
    const ADDED: usize = 24;
    let folder = Folder::new("authority");
    let path = |name: &str| folder.0.join(name).display().to_string();
    let ran = groupcast(&["bus", "init", "--nodes", "n1", "--hosts", "h1", "--out", &path("cluster")], &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let authority = path("cluster/authority.json");
    let (path, named) = (&path, &authority);
    let ran: Vec<_> = std::thread::scope(|scope| {
        let add = |index: usize| {
            scope.spawn(move || {
                let (name, out) = (format!("c{index:02}"), path(&format!("c{index:02}.creds")));
                // Every command that writes the authority, not one alone.
                match index % 3 {
                    0 => groupcast(&["host", "add", &name, "--authority", named, "--out", &out], &[]),
                    1 => groupcast(&["bus", "add", "--hosts", &name, "--out", &path("cluster")], &[]),
                    _ => groupcast(
                        &["credential", "add", "--role", "controller", "--name", &name, "--authority", named, "--out", &out],
                        &[],
                    ),
                }
            })
        };
        let started: Vec<_> = (0..ADDED).map(add).collect();
        started.into_iter().map(|thread| thread.join().expect("it runs")).collect()
    });
    assert!(ran.iter().all(|ran| ran.code == 0), "{ran:?}");
    let listed = groupcast(&["credential", "list", "--authority", &authority, "-o", "name"], &[]).stdout;
    let lost: Vec<String> = (0..ADDED).map(|index| format!("/c{index:02}")).filter(|name| !listed.contains(name)).collect();
    assert!(lost.is_empty(), "{lost:?} are not in the authority: {listed}");
    let hosts = std::fs::read_to_string(path("cluster/cluster.json")).expect("a plan");
    assert!((0..ADDED).filter(|index| index % 3 == 1).all(|index| hosts.contains(&format!("c{index:02}"))), "{hosts}");
}
