//! What gateways and controllers do when something runs out: open files, a host's own measure, the disk of the bus.

use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use groupcast_bus_config::server::{Config, Server};
use groupcast_tests::control::{Controller, Hold};
use groupcast_tests::gateway::{Folder, Gateway, groupcast};
use groupcast_tests::installation::Installation;
use groupcast_tests::world::{DEADLINE, eventually};

/// Open files of a process.
fn files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process").count()
}

/// Lets the process have so many open files from now on.
fn limit(pid: u32, files: usize) {
    let limit = format!("--nofile={files}:");
    let told = Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().expect("prlimit runs");
    assert!(told.success());
}

/// Processor time that the process has taken so far.
fn busy(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks: u64 = [11, 12].map(|field: usize| fields[field].parse::<u64>().expect("ticks")).iter().sum();
    Duration::from_millis(ticks * 10) // a hundred a second, on every Linux
}

async fn answers(address: SocketAddr) -> bool {
    let asked = reqwest::Client::new().get(format!("http://{address}/livez")).timeout(Duration::from_secs(2)).send();
    asked.await.is_ok_and(|answer| answer.status().is_success())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_without_open_files_waits_and_serves_again() {
    const FOR: Duration = Duration::from_secs(3);
    let mut world = Installation::start(&[]).await;
    let controller = (world.controller.process(), world.controller.address().expect("an address"));
    let both = [("gateway", (world.gateway.process(), world.gateway.address)), ("controller", controller)];
    for (name, (pid, address)) in both {
        assert!(answers(address).await, "{name}");
        let before = files(pid);
        limit(pid, before + 4);
        // The kernel completes connections that the process has not accepted, so all of these succeed.
        let held: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(address).expect("connected")).collect();
        eventually("it has no file left", || async { files(pid) >= before + 4 }).await;
        let (begun, taken) = (Instant::now(), busy(pid));
        tokio::time::sleep(FOR).await; // a measurement, not a wait
        let share = (busy(pid) - taken).as_secs_f64() / begun.elapsed().as_secs_f64();
        eprintln!("{name}: {share:.2} of a processor without files to accept with");
        assert!(share < 0.5, "{name} takes {share:.2} of a processor");
        assert!(!answers(address).await, "{name} has no file left to answer with");
        drop(held);
        eventually("it serves again", || answers(address)).await;
    }
    let said = [world.gateway.log(), world.controller.log()];
    assert!(said.iter().all(|log| log.contains("raise the limit of open files")), "{said:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_renews_without_end_is_refused_and_another_is_not() {
    let world = Installation::start(&[]).await;
    let mut credentials = Vec::new();
    for host in ["h1", "h2"] {
        world.does(&["add", host, "--networks", "10.0.0.0/8"]);
        credentials.push(world.joined(host, &format!("{host}.creds")).await.1);
    }
    let begun = Instant::now();
    let refused = loop {
        assert!(begun.elapsed() < DEADLINE, "never refused");
        let answer = world.renew(&credentials[0]).await;
        if answer.status != 200 {
            break answer;
        }
    };
    assert!(refused.status == 429 && refused.text.contains("renewed too often"), "{} {}", refused.status, refused.text);
    assert_eq!(world.renew(&credentials[1]).await.status, 200, "another host has its own measure");
    tokio::time::timeout(DEADLINE, async { while world.renew(&credentials[0]).await.status != 200 {} })
        .await
        .expect("it may again, a moment later");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_guesses_at_renewals_is_told_to_wait_and_a_host_at_the_same_address_is_not() {
    let world = Installation::start(&[]).await;
    world.does(&["add", "h1", "--networks", "10.0.0.0/8"]);
    let (_, credential) = world.joined("h1", "h1.creds").await;
    let stranger = world.admin.with_token("");
    let guess = serde_json::json!({ "credential": "a.b.c", "proof": "AA" });
    let begun = Instant::now();
    let told = loop {
        assert!(begun.elapsed() < DEADLINE, "never told to wait");
        let answer = stranger.post("/v1/renew", guess.clone(), &[]).await;
        if answer.status != 403 {
            break answer;
        }
    };
    assert_eq!(told.status, 429, "{}", told.text);
    assert_eq!(world.renew(&credential).await.status, 200, "a good credential passes whatever others tried");
    // A body that is far too long for it is not even read to its end.
    let long = serde_json::json!({ "credential": "x".repeat(4 << 20), "proof": "" });
    let client = reqwest::Client::new();
    let sent = client.post(format!("{}/v1/renew", world.gateway.url())).body(long.to_string()).timeout(DEADLINE).send().await;
    assert!(sent.is_err() || sent.is_ok_and(|answer| answer.status() == 413));
}

/// A file system of its own, on which files can be used up without using up memory.
struct Disk(Folder);

impl Disk {
    const FILES_MAX: usize = 2_000;

    fn new() -> Option<Self> {
        let (folder, options) = (Folder::new("disk"), format!("size=4g,nr_inodes={}", Self::FILES_MAX));
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&folder.0).status();
        mounted.is_ok_and(|status| status.success()).then_some(Self(folder))
    }

    fn fill(&self) {
        let filler = self.0.0.join("filler");
        std::fs::create_dir_all(&filler).expect("a folder");
        let full = (0..Self::FILES_MAX).any(|number| std::fs::File::create(filler.join(number.to_string())).is_err());
        assert!(full, "no more files than the disk has");
    }

    fn free(&self) {
        std::fs::remove_dir_all(self.0.0.join("filler")).expect("removed");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0.0).status();
    }
}

/// Such a server answers, judges and refuses as ever, and takes no change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bus_whose_disk_is_full_is_called_so() {
    let Some(disk) = Disk::new() else {
        eprintln!("not run: nothing can be mounted");
        return;
    };
    // The HTTP client wants one before it is made; whoever was first is as good.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let server = Server::start(Config::plain().store_dir(disk.0.0.join("store"))).await.expect("a server");
    let url = server.url();
    let mut controller = Controller::start(&url, "c1", Duration::from_secs(1), &[]);
    controller.ready().await;
    let on_bus = ["--on-bus", "--server", &url, "--name", "g"];
    let made = groupcast(&[&["token", "add", "root", "--role", "admin"][..], &on_bus].concat(), &[]);
    assert_eq!(made.code, 0, "{made:?}");
    let gateway = Gateway::start(&url, &[]).await;
    let (address, token) = (gateway.url(), made.stdout.trim().to_owned());
    let environment = [("GROUPCAST_GATEWAY", address.as_str()), ("GROUPCAST_TOKEN", token.as_str())];
    let file = disk.0.0.join("group.yaml");
    let apply = |port: u16| {
        // Two, which are a batch. One alone is a message, which such a server takes and keeps as long as its last block has room.
        let group = |id: &str| format!("kind: group\nid: {id}\nrules: [\"ingress tcp {port} from any\"]\n");
        std::fs::write(&file, format!("{}---\n{}", group("a"), group("b"))).expect("written");
        groupcast(&["apply", "-f", &file.display().to_string()], &environment)
    };
    assert_eq!(apply(80).code, 0);
    let readyz = async || {
        let answer = reqwest::get(format!("{address}/readyz")).await.expect("an answer");
        (answer.status().as_u16(), answer.text().await.expect("words"))
    };
    // A gateway takes changes a moment before it has read both streams to their heads.
    eventually("all is well", || async { readyz().await.0 == 200 }).await;

    disk.fill();
    let refused = apply(81);
    assert!(refused.code == 1 && refused.stderr.contains("disk"), "{refused:?}");
    let begun = Instant::now();
    loop {
        let (status, words) = readyz().await;
        if status == 503 && words.contains("disk") {
            break;
        }
        assert!(begun.elapsed() < DEADLINE, "the gateway says {status} {words}");
        tokio::time::sleep(Duration::from_millis(50)).await; // it looks once a second
    }
    controller
        .wait_for("saying that the disk is full", |controller| {
            controller.get("/readyz").is_some_and(|(status, words)| status == 503 && words.contains("disk"))
        })
        .await;
    let doctor = groupcast(&["doctor"], &environment);
    assert!(doctor.code != 0 && doctor.stdout.contains("disk"), "{doctor:?}");

    disk.free();
    eventually("all is well again", || async { readyz().await.0 == 200 }).await;
    assert_eq!(apply(82).code, 0);
}

/// It said that the token was made: the server takes a single message with a full disk, as long as the last block has room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_called_made_on_the_bus_only_when_the_bus_still_takes_writes() {
    let Some(disk) = Disk::new() else {
        eprintln!("not run: nothing can be mounted");
        return;
    };
    let server = Server::start(Config::plain().store_dir(disk.0.0.join("store"))).await.expect("a server");
    let mut controller = Controller::start(&server.url(), "c1", Duration::from_secs(1), &[]);
    // It has made the streams by then; nobody leads an empty catalogue.
    let looked = || groupcast(&["doctor", "--on-bus", "--server", &server.url(), "--name", "g"], &[]);
    eventually("the streams are there", || async { looked().stdout.contains("all streams exist") }).await;
    let hold = Hold::to(&server.url()).await;
    let url = hold.url();
    let token = move |what: &str| {
        let what: Vec<String> = what.split(' ').map(str::to_owned).collect();
        let url = url.clone();
        tokio::task::spawn_blocking(move || {
            let what: Vec<&str> = what.iter().map(String::as_str).collect();
            groupcast(&[&["token"], &what[..], &["--on-bus", "--server", &url, "--name", "g"]].concat(), &[])
        })
    };
    // The bus is well when it is looked at first, and its disk is full when the token arrives.
    hold.hold("gc.cat.token.");
    let making = token("add root --role admin");
    hold.holds().await;
    disk.fill();
    hold.release();
    let ran = making.await.expect("it ends");
    assert!(ran.code == 1 && ran.stdout.is_empty() && ran.stderr.contains("disk"), "{ran:?}");
    assert!(ran.stderr.contains("revoke this token"), "{ran:?}");
    // The same of one that is revoked.
    disk.free();
    assert_eq!(token("add other --role admin").await.expect("it ends").code, 0);
    hold.hold("gc.cat.token.");
    let revoking = token("remove other");
    hold.holds().await;
    disk.fill();
    hold.release();
    let ran = revoking.await.expect("it ends");
    assert!(ran.code == 1 && !ran.stderr.contains("revoked with change"), "{ran:?}");

    disk.free();
    assert_eq!(token("remove root").await.expect("it ends").code, 0);
    let ran = token("add root --role admin").await.expect("it ends");
    assert!(ran.code == 0 && !ran.stdout.is_empty(), "{ran:?}");
    controller.kill();
}
