//! TLS with certificates that change, and everything on one machine.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use groupcast_tests::World;
use groupcast_tests::control::binary;
use groupcast_tests::gateway::{Folder, Gateway, groupcast};
use groupcast_tests::world::{DEADLINE, eventually};
use reqwest::{Certificate, Client};

fn certificate(folder: &Path) -> Certificate {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).expect("a certificate");
    std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).expect("written");
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).expect("written");
    Certificate::from_pem(made.cert.pem().as_bytes()).expect("it reads back")
}

fn trusting(certificate: Certificate) -> Client {
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    Client::builder().no_proxy().tls_certs_only([certificate]).timeout(Duration::from_secs(10)).build().expect("a client")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_read_again_when_it_changes() {
    let (bus, folder) = (World::one().await, Folder::new("alone"));
    let first = trusting(certificate(&folder.0));
    let path = |name: &str| folder.0.join(name).display().to_string();
    let gateway = Gateway::start(&bus.url(0), &["--api-certificate", &path("cert.pem"), "--api-key", &path("key.pem")]).await;
    let url = format!("https://{}/livez", gateway.address);
    let works = async |client: &Client| client.get(&url).send().await.is_ok_and(|answer| answer.status() == 200);
    assert!(works(&first).await);
    assert!(reqwest::get(format!("http://{}/livez", gateway.address)).await.is_err(), "no plain HTTP beside it");
    // A broken one leaves the old one in place.
    std::fs::write(folder.0.join("cert.pem"), "nonsense").expect("written");
    eventually("the broken one was seen", || async { gateway.log().contains("the old one stays") }).await;
    assert!(works(&first).await);
    let second = trusting(certificate(&folder.0));
    eventually("the new one is shown", || works(&second)).await;
}

#[test]
fn a_gateway_that_others_can_reach_needs_a_certificate() {
    let ran = groupcast(&["gateway", "--api-listen", "0.0.0.0:0", "--server", "nats://127.0.0.1:9"], &[]);
    assert!(ran.code == 1 && ran.stderr.contains("tokens would be readable on the way"), "{ran:?}");
}

struct Up(Child);

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn up(data: &Path, port: u16) -> Up {
    let log = std::fs::File::create(data.with_extension("log")).expect("a log");
    let child = Command::new(binary())
        .args(["up", "--data", &data.display().to_string(), "--api-listen", &format!("127.0.0.1:{port}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn();
    Up(child.expect("it starts"))
}

fn eventually_runs(arguments: &[&str], environment: &[(&str, &str)], log: &Path) {
    let start = Instant::now();
    loop {
        let ran = groupcast(arguments, environment);
        if ran.code == 0 {
            return;
        }
        let log = || std::fs::read_to_string(log).unwrap_or_default();
        assert!(start.elapsed() < DEADLINE, "{arguments:?}: {ran:?}\n{}", log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn one_command_runs_everything_and_again_after_a_crash() {
    let folder = Folder::new("alone");
    let data = folder.0.join("data");
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    let (url, token) = (format!("http://127.0.0.1:{port}"), data.join("token").display().to_string());
    let environment = [("GROUPCAST_GATEWAY", url.as_str()), ("GROUPCAST_TOKEN_FILE", token.as_str())];
    let file = folder.0.join("web.yaml");
    std::fs::write(&file, "kind: group\nid: web\nrules: [ingress tcp 443 from any]\n").expect("written");
    let log = data.with_extension("log");
    let mut first = up(&data, port);
    eventually_runs(&["get", "groups"], &environment, &log);
    // Nothing in it is open to others.
    for entry in std::fs::read_dir(&data).expect("the folder").map(|entry| entry.expect("an entry")) {
        let mode = std::os::unix::fs::PermissionsExt::mode(&entry.metadata().expect("its mode").permissions());
        let secret = entry.file_type().expect("its type").is_file();
        assert!(!secret || mode & 0o077 == 0, "{}: {mode:o}", entry.path().display());
    }
    // How far a change is the controller knows once it leads, which it does soon after the first.
    let start = Instant::now();
    for port in 444.. {
        let ran = groupcast(&["apply", "-f", &file.display().to_string(), "--wait", "--timeout", "2s"], &environment);
        if ran.code == 0 {
            assert!(ran.stderr.contains("concerns no host"), "{ran:?}");
            break;
        }
        assert!(ran.code == 5 && start.elapsed() < DEADLINE, "{ran:?}");
        std::fs::write(&file, format!("kind: group\nid: web\nrules: [ingress tcp {port} from any]\n")).expect("written");
    }
    let ran = groupcast(&["doctor"], &environment);
    assert_eq!(ran.code, 0, "{ran:?}");
    // A host's credential is made without telling anybody, and listed.
    let authority = data.join("authority.json").display().to_string();
    let credential = folder.0.join("h1.creds").display().to_string();
    assert_eq!(groupcast(&["host", "add", "h1", "--authority", &authority, "--out", &credential], &[]).code, 0);
    assert!(groupcast(&["host", "list", "--authority", &authority, "--without-gateway"], &[]).stdout.contains("h1"));
    // SIGKILL, and once more: nothing is lost.
    first.0.kill().expect("it lives");
    first.0.wait().expect("it ends");
    let _second = up(&data, port);
    eventually_runs(&["get", "group", "web"], &environment, &log);
    // A host that is removed is told to the servers.
    let server = std::fs::read_to_string(data.join("bus/nats-server.conf")).expect("the configuration");
    let listen = server.lines().find_map(|line| line.strip_prefix("listen: ")).expect("a port").trim_matches('"').to_owned();
    let bus = format!("nats://{listen}");
    eventually_runs(&["host", "remove", "h1", "--authority", &authority, "--server", &bus, "--without-gateway"], &[], &log);
    assert_eq!(
        groupcast(&["host", "remove", "h1", "--authority", &authority, "--server", &bus, "--without-gateway"], &[]).code,
        4
    );
}
