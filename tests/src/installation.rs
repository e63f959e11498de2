//! An installation with real credentials: an authority, a bus with its accounts, a controller, and gateways that sign for hosts.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Event, Events, Identity, Options};
use groupcast_bus_config::credentials::{Authority, OwnKey};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::registration::grant::Grant;
use groupcast_policy::ids::HostId;
use groupcast_policy::net::Prefix;
use serde_json::{Value, json};

use crate::control::Controller;
use crate::enrolled::{LEAD, SHORT, template};
use crate::gateway::{Answer, Gateway, Ran, User, groupcast, scratch};
use crate::world::DEADLINE;

/// A bus with an authority, its accounts, and a controller.
pub struct Guarded {
    pub authority: Authority,
    pub folder: PathBuf,
    pub server: Server,
    /// As a controller sees the bus.
    pub client: async_nats::Client,
    pub controller: Controller,
}

pub fn id(text: &str) -> HostId {
    text.parse().expect("an id")
}

impl Guarded {
    /// With a controller that is told this, and hosts that may use template `vm` with any address in 10.0.0.0/8.
    pub async fn start(hosts: &[&str], more: &[&str]) -> Self {
        Self::start_on(Config::plain(), hosts, more).await
    }

    /// The same on a server that is told this.
    pub async fn start_on(config: Config, hosts: &[&str], more: &[&str]) -> Self {
        let folder = scratch("installation");
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut authority = Authority::new();
        for (role, name) in [(Role::Controller, "c1"), (Role::Controller, "c2"), (Role::Gateway, "g")] {
            let credential = authority.mint(role, &id(name), None, SystemTime::now()).expect("minted");
            credential.save(&folder.join(format!("{name}.creds"))).expect("saved");
        }
        let config = config.with(authority.server_config("accounts").expect("a configuration"));
        let server = Server::start(config).await.expect("a server");
        let options =
            Options::new(&[server.url()], Role::Controller, &id("c2")).identity(Identity::File(folder.join("c2.creds")));
        let (client, _events) = connect::connect(options).await.expect("connected");
        streams::ensure(&client, 1).await.expect("the streams");
        // Nobody leads a bus on which nothing was ever written.
        allow(&client, "vm", hosts, Prefix::v4(0x0a00_0000, 8).expect("a prefix")).await;
        let controller = controller(&server.url(), &folder.join("c1.creds"), more).await;
        Self { authority, folder, server, client, controller }
    }

    /// Lets these hosts use this template, with addresses in this network.
    pub async fn allow(&self, template: &str, hosts: &[&str], network: Prefix) {
        allow(&self.client, template, hosts, network).await;
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// A credential of this host, in a file of this name.
    pub fn mint(&mut self, host: &str, file: &str) -> PathBuf {
        let path = self.folder.join(file);
        let credential = self.authority.mint(Role::Host, &id(host), None, SystemTime::now()).expect("minted");
        credential.save(&path).expect("saved");
        path
    }

    pub fn options(&self, host: &str, file: &Path) -> Options {
        Options::new(&[self.server.url()], Role::Host, &id(host))
            .identity(Identity::File(file.to_owned()))
            .reconnect_delay_max(Duration::from_millis(100))
    }

    pub async fn connect(&self, host: &str, file: &Path) -> (async_nats::Client, Events) {
        connect::connect(self.options(host, file)).await.expect("connected")
    }

    /// Whether the bus lets this credential in.
    pub async fn lets_in(&self, host: &str, file: &Path) -> bool {
        let tried = tokio::time::timeout(Duration::from_secs(5), connect::connect(self.options(host, file))).await;
        matches!(tried, Ok(Ok(_)))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// With a gateway that signs for hosts.
pub struct Installation {
    pub bus: Guarded,
    pub gateway: Gateway,
    pub admin: User,
    token: String,
}

impl Deref for Installation {
    type Target = Guarded;

    fn deref(&self) -> &Guarded {
        &self.bus
    }
}

impl DerefMut for Installation {
    fn deref_mut(&mut self) -> &mut Guarded {
        &mut self.bus
    }
}

impl Installation {
    /// With a gateway that is told this.
    pub async fn start(more: &[&str]) -> Self {
        let bus = Guarded::start(&[], &SHORT).await;
        write(&bus.client, vec![Write::put(Document::Template(Arc::new(template("vm", &["h1", "h2"]))), Expected::Any)]).await;
        bus.authority.save(&bus.folder.join("authority.json")).expect("saved");
        bus.authority.host_signer().expect("a signer").save(&bus.folder.join("signer.json")).expect("saved");
        let (url, credentials, signer) = (bus.server.url(), bus.path("g.creds"), bus.path("signer.json"));
        let on_bus = ["--on-bus", "--server", &url, "--credentials", &credentials, "--name", "g"];
        let made = groupcast(&[&["token", "add", "root", "--role", "admin"][..], &on_bus].concat(), &[]);
        assert_eq!(made.code, 0, "{made:?}");
        let token = made.stdout.trim().to_owned();
        let more = [&["--credentials", credentials.as_str(), "--host-signer", signer.as_str()][..], more].concat();
        let gateway = Gateway::start(&url, &more).await;
        let admin = User::new(&gateway, &token).await;
        Self { bus, gateway, admin, token }
    }

    /// After it was killed.
    pub async fn start_controller(&mut self) {
        self.bus.controller = controller(&self.server.url(), &self.folder.join("c1.creds"), &SHORT).await;
    }

    /// A command of an administrator who holds the authority.
    pub fn host(&self, arguments: &[&str]) -> Ran {
        let (gateway, authority) = (self.gateway.url(), self.path("authority.json"));
        let servers = self.server.url();
        let mut environment = vec![
            ("GROUPCAST_GATEWAY", gateway.as_str()),
            ("GROUPCAST_TOKEN", self.token.as_str()),
            ("GROUPCAST_SERVERS", servers.as_str()),
        ];
        // Adding without a credential needs none.
        if arguments[0] != "add" || arguments.contains(&"--out") {
            environment.push(("GROUPCAST_AUTHORITY", authority.as_str()));
        }
        groupcast(&[&["host"], arguments].concat(), &environment)
    }

    /// One that must succeed.
    pub fn does(&self, arguments: &[&str]) -> Ran {
        let ran = self.host(arguments);
        assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
        ran
    }

    /// A new token with which this host joins.
    pub fn join_token(&self, host: &str) -> String {
        self.does(&["token", host]).stdout.trim().to_owned()
    }

    pub async fn join(&self, token: &str, key: &OwnKey) -> Answer {
        let proof = key.prove(token).expect("signed");
        let body = json!({ "token": token, "public_key": key.public_key(), "proof": proof });
        self.admin.with_token("").post("/v1/join", body, &[]).await
    }

    /// Joins with a new token and a new key; the credentials file.
    pub async fn joined(&self, host: &str, file: &str) -> (OwnKey, PathBuf) {
        let (token, key, path) = (self.join_token(host), OwnKey::new(), self.folder.join(file));
        let joined = self.join(&token, &key).await;
        assert_eq!(joined.status, 200, "{}", joined.text);
        key.save(&id(host), joined.body["credential"].as_str().expect("a credential"), &path).expect("saved");
        (key, path)
    }

    /// Asks to have the credential in this file signed anew.
    pub async fn renew(&self, file: &PathBuf) -> Answer {
        let (key, token) = OwnKey::of_file(&std::fs::read_to_string(file).expect("a file")).expect("a credential");
        let body = json!({ "credential": token, "proof": key.prove(&token).expect("signed") });
        self.admin.with_token("").post("/v1/renew", body, &[]).await
    }

    /// What `host list` says of this host's keys.
    pub fn listed(&self, host: &str) -> Vec<String> {
        let listed: Value = serde_json::from_str(&self.does(&["list", "-o", "json"]).stdout).expect("JSON");
        let items = listed["items"].as_array().expect("a list").iter();
        let of_host = items.filter(|item| item["role"] == "host" && item["name"] == host);
        let mut keys: Vec<String> = of_host.map(|item| item["key"].as_str().expect("a key").to_owned()).collect();
        keys.sort();
        keys
    }
}

async fn controller(url: &str, credentials: &Path, more: &[&str]) -> Controller {
    let credentials = credentials.display().to_string();
    let more: Vec<&str> = more.iter().copied().chain(["--credentials", &credentials]).collect();
    let mut controller = Controller::start(url, "c1", LEAD, &more);
    controller.ready().await;
    controller.publishing().await;
    controller
}

async fn allow(client: &async_nats::Client, template_id: &str, hosts: &[&str], network: Prefix) {
    let mut writes = vec![Write::put(Document::Template(Arc::new(template(template_id, hosts))), Expected::Any)];
    for host in hosts {
        let grant = Grant::new(id(host), vec![network]);
        writes.push(Write::put(grant.document().expect("a document"), Expected::Any));
    }
    write(client, writes).await;
}

async fn write(client: &async_nats::Client, writes: Vec<Write>) {
    let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
    Catalog::new(client.clone()).write(&change, None).await.expect("written");
}

/// What CATALOG has of a host's grant.
pub async fn grant_of(client: &async_nats::Client, host: &str) -> Option<Grant> {
    let name = Grant::name(&id(host)).expect("a name");
    let version = Catalog::new(client.clone()).read(&name).await.expect("the bus answers")?;
    version.document.expect("a document").map(|document| Grant::read(&document).expect("a grant"))
}

/// Waits until the bus denies something to this client.
pub async fn denied(events: &mut Events, what: &str) {
    let wait = async {
        while let Some(event) = events.next().await {
            if matches!(&event, Event::Denied(reason) if reason.to_lowercase().contains(what)) {
                return;
            }
        }
        panic!("the connection ended");
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("the bus did not deny {what}"));
}
