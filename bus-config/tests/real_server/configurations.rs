//! The configuration files that operators get: the server accepts them as they are, and they work.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{Events, Identity, Options, Tls, connect, settle};
use groupcast_bus_config::credentials::{Authority, FixedUser, edge_config, fixed_config};
use groupcast_bus_config::{server, streams, subjects};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};

use crate::world::{DEADLINE, name, next, store};

/// A folder as an operator has it: the files of `nats/` and what they need beside them.
struct Folder {
    path: PathBuf,
    children: Vec<Child>,
}

impl Drop for Folder {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl Folder {
    fn new(label: &str) -> Self {
        let path = std::env::temp_dir().join(format!("groupcast-{label}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let folder = Self { path, children: Vec::new() };
        for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("nats")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path.join(entry.file_name())).unwrap();
        }
        folder.certificates();
        folder
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.path.join(file), text).unwrap();
    }

    fn certificates(&self) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        self.write("authority.pem", &authority.pem());
        self.write("server.pem", &certificate.pem());
        self.write("server-key.pem", &key.serialize_pem());
    }

    /// Whether the server takes the file, in its own words.
    fn check(&self, file: &str) -> Result<(), String> {
        let output = Command::new(server::find().unwrap())
            .args(["-t", "-c", file])
            .env("GROUPCAST_NODE", "bus-1")
            .current_dir(&self.path)
            .output()
            .unwrap();
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
    }

    /// The file with what a test machine has otherwise: ports, folders and names. Each must stand in the file.
    fn adapt(&self, file: &str, to: &str, changes: &[(&str, &str)]) {
        let mut text = std::fs::read_to_string(self.path.join(file)).unwrap();
        for (from, with) in changes {
            assert!(text.contains(from), "{file} says nothing of {from}");
            text = text.replace(from, with);
        }
        self.write(to, &text);
    }

    fn run(&mut self, file: &str, node: &str) {
        let log = std::fs::File::create(self.path.join(format!("{node}.log"))).unwrap();
        let child = Command::new(server::find().unwrap())
            .args(["-c", file])
            .env("GROUPCAST_NODE", node)
            .current_dir(&self.path)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.children.push(child);
    }

    async fn client(&self, port: u16, role: Role, user: &str, identity: &Identity) -> (async_nats::Client, Events) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let tls = Tls { required: Some(true), authority: Some(self.path.join("authority.pem")), certificate: None };
            let options =
                Options::new(&[format!("tls://127.0.0.1:{port}")], role, &name(user)).identity(identity.clone()).tls(tls);
            match connect(options).await {
                Ok(connected) => return connected,
                Err(error) if Instant::now() > deadline => panic!("{error}\n{}", self.logs()),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    fn logs(&self) -> String {
        let files = std::fs::read_dir(&self.path).unwrap().map(|entry| entry.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|end| end == "log"))
            .map(|path| std::fs::read_to_string(path).unwrap())
            .collect()
    }
}

/// Ports that were free a moment ago, below the range of outgoing connections.
fn ports<const N: usize>() -> [u16; N] {
    let seed = u64::from(std::process::id()).wrapping_mul(0x9E37_79B9) ^ Instant::now().elapsed().as_nanos() as u64;
    let mut held = Vec::new();
    let mut next = seed ^ SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    while held.len() < N {
        next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let port = 12_000 + (next >> 33) as u16 % 20_000;
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            held.push((port, listener));
        }
    }
    std::array::from_fn(|index| held[index].0)
}

fn identities() -> (Authority, Identity, Identity, Identity) {
    let now = SystemTime::now();
    let mut authority = Authority::new();
    let mut mint = |role, user| Identity::Text(authority.mint(role, &name(user), None, now).unwrap().file_text());
    let (controller, host, edge) = (mint(Role::Controller, "c1"), mint(Role::Host, "h1"), mint(Role::Edge, "e1"));
    (authority, controller, host, edge)
}

#[test]
fn the_server_accepts_every_file_as_it_is() {
    let folder = Folder::new("accept");
    let (authority, _, _, edge) = identities();
    let Identity::Text(edge) = edge else { unreachable!() };
    folder.write("edge.creds", &edge);
    let users = [Role::Controller, Role::Host].map(|role| FixedUser::new(role, &name("x1")).unwrap().0);
    folder.write("hosts.conf", &edge_config(&users));
    for accounts in [authority.server_config("resolver").unwrap(), fixed_config(&users)] {
        folder.write("accounts.conf", &accounts);
        for file in ["one-server.conf", "cluster-node.conf", "leafnode.conf"] {
            assert_eq!(folder.check(file), Ok(()), "{file}");
            folder.adapt(file, "with-leafnodes.conf", &[]);
        }
        let hub = [("# include \"leafnodes.conf\"", "include \"leafnodes.conf\"")];
        for file in ["one-server.conf", "cluster-node.conf"] {
            folder.adapt(file, "hub.conf", &hub);
            assert_eq!(folder.check("hub.conf"), Ok(()), "{file} with leafnodes");
        }
    }
    folder.write("accounts.conf", "accounts {");
    assert!(folder.check("one-server.conf").is_err(), "the check accepts anything");
}

/// A host asks and is answered, follows a topic, and gets orders.
async fn lives(folder: &Folder, controller: &async_nats::Client, port: u16, identity: &Identity) {
    let (host, _events) = folder.client(port, Role::Host, "h1", identity).await;
    let h1 = name("h1");
    let mut requests = controller.subscribe(subjects::SNAP_ALL).await.unwrap();
    settle(controller, DEADLINE).await.unwrap();
    let mut answers = host.subscribe(subjects::answers(&h1)).await.unwrap();
    let mut topic = host.subscribe("gc.t.rules.web").await.unwrap();
    settle(&host, DEADLINE).await.unwrap();
    // Interest takes a while to reach other servers: ask again until heard, as a host does.
    let request = loop {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(subjects::ANSWER_TOKEN, "t1");
        host.publish_with_headers(subjects::snap(&h1), headers, "please".into()).await.unwrap();
        match tokio::time::timeout(Duration::from_millis(200), next(&mut requests, "request")).await {
            Ok(request) => break request,
            Err(_) => continue,
        }
    };
    let to = subjects::answer_to(&request.subject, "t1").unwrap();
    let answer = loop {
        controller.publish(to.clone(), "answer".into()).await.unwrap();
        if let Ok(answer) = tokio::time::timeout(Duration::from_millis(200), next(&mut answers, "answer")).await {
            break answer;
        }
    };
    assert_eq!(answer.payload, "answer");
    let message = loop {
        store(controller, "gc.w.rules.web", "rules").await;
        if let Ok(message) = tokio::time::timeout(Duration::from_millis(200), next(&mut topic, "topic")).await {
            break message;
        }
    };
    assert_eq!(message.headers.unwrap().get("Nats-Subject").unwrap().as_str(), "gc.w.rules.web");
}

#[tokio::test]
async fn one_server_with_a_leafnode_works() {
    let mut folder = Folder::new("one");
    let (authority, controller, host, edge) = identities();
    let [client, monitor, leaf, edge_client, edge_monitor] = ports();
    folder.write("accounts.conf", &authority.server_config("resolver").unwrap());
    folder.adapt("leafnodes.conf", "leafnodes.conf", &[("0.0.0.0:7422", &format!("127.0.0.1:{leaf}"))]);
    folder.adapt(
        "one-server.conf",
        "hub.conf",
        &[
            ("0.0.0.0:4222", &format!("127.0.0.1:{client}")),
            ("127.0.0.1:8222", &format!("127.0.0.1:{monitor}")),
            ("/var/lib/groupcast/nats", "hub-store"),
            ("# include \"leafnodes.conf\"", "include \"leafnodes.conf\""),
        ],
    );
    folder.run("hub.conf", "bus-1");
    let (controller, _events) = folder.client(client, Role::Controller, "c1", &controller).await;
    streams::ensure(&controller, 1).await.unwrap();
    lives(&folder, &controller, client, &host).await;

    let Identity::Text(edge) = edge else { unreachable!() };
    folder.write("edge.creds", &edge);
    let (user, seed) = FixedUser::new(Role::Host, &name("h1")).unwrap();
    let (other, other_seed) = FixedUser::new(Role::Host, &name("h2")).unwrap();
    folder.write("hosts.conf", &edge_config(&[user, other]));
    folder.adapt(
        "leafnode.conf",
        "edge.conf",
        &[
            ("0.0.0.0:4222", &format!("127.0.0.1:{edge_client}")),
            ("127.0.0.1:8222", &format!("127.0.0.1:{edge_monitor}")),
            ("\"tls://bus-1:7422\", \"tls://bus-2:7422\", \"tls://bus-3:7422\"", &format!("\"tls://127.0.0.1:{leaf}\"")),
        ],
    );
    folder.run("edge.conf", "edge-1");
    lives(&folder, &controller, edge_client, &Identity::Seed(seed)).await;

    // The edge confines its hosts as the bus does: h2 is not heard as h1, only as itself.
    let (h2, _h2_events) = folder.client(edge_client, Role::Host, "h2", &Identity::Seed(other_seed)).await;
    let mut beats = controller.subscribe(subjects::BEAT_ALL).await.unwrap();
    settle(&controller, DEADLINE).await.unwrap();
    for subject in ["gc.beat.h1", "gc.w.leader", "gc.beat.h2"] {
        h2.publish(subject, "evil".into()).await.unwrap();
    }
    assert_eq!(next(&mut beats, "beat").await.subject.as_str(), "gc.beat.h2");
}

#[tokio::test]
async fn three_nodes_with_tls_work() {
    let mut folder = Folder::new("cluster");
    let (authority, controller, host, _) = identities();
    let clients: [u16; 3] = ports();
    let monitors: [u16; 3] = ports();
    let routes: [u16; 3] = ports();
    folder.write("accounts.conf", &authority.server_config("resolver").unwrap());
    let all = "\"nats-route://bus-1:6222\", \"nats-route://bus-2:6222\", \"nats-route://bus-3:6222\"";
    let ours = routes.map(|port| format!("\"nats-route://127.0.0.1:{port}\"")).join(", ");
    for node in 0..3 {
        let accounts = format!("accounts-{node}.conf");
        folder.write(&accounts, &authority.server_config(&format!("resolver-{node}")).unwrap());
        folder.adapt(
            "cluster-node.conf",
            &format!("node-{node}.conf"),
            &[
                ("0.0.0.0:4222", &format!("127.0.0.1:{}", clients[node])),
                ("127.0.0.1:8222", &format!("127.0.0.1:{}", monitors[node])),
                ("0.0.0.0:6222", &format!("127.0.0.1:{}", routes[node])),
                ("/var/lib/groupcast/nats", &format!("store-{node}")),
                ("include \"accounts.conf\"", &format!("include \"{accounts}\"")),
                (all, &ours),
            ],
        );
        folder.run(&format!("node-{node}.conf"), &format!("bus-{}", node + 1));
    }
    let (controller, _events) = folder.client(clients[0], Role::Controller, "c1", &controller).await;
    let deadline = Instant::now() + DEADLINE;
    while let Err(error) = streams::ensure(&controller, 3).await {
        assert!(Instant::now() < deadline, "{error}\n{}", folder.logs());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    lives(&folder, &controller, clients[1], &host).await;
    lives(&folder, &controller, clients[2], &host).await;
}

#[tokio::test]
async fn a_started_server_can_demand_certificates_of_its_clients() {
    let folder = Folder::new("mutual");
    let file = |name: &str| folder.path.join(name);
    let tls = server::Tls {
        certificate: file("server.pem"),
        key: file("server-key.pem"),
        client_authority: Some(file("authority.pem")),
    };
    let server = server::Server::start(server::Config::plain().tls(tls)).await.unwrap();
    let options = |authority: Option<PathBuf>, certificate: Option<(PathBuf, PathBuf)>| {
        Options::new(&[server.url()], Role::Host, &name("h1")).tls(Tls { required: Some(true), authority, certificate })
    };
    let pair = || Some((file("server.pem"), file("server-key.pem")));
    assert!(connect(options(None, pair())).await.is_err(), "an unknown authority was trusted");
    assert!(connect(options(Some(file("authority.pem")), None)).await.is_err(), "a client without certificate was let in");
    let (client, _events) = connect(options(Some(file("authority.pem")), pair())).await.unwrap();
    settle(&client, DEADLINE).await.unwrap();
}
