//! A source as it runs, with a map for CATALOG and REGISTRY.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use groupcast_control::change::{Body, Expected};
use groupcast_control::document::Document;
use groupcast_control::source::config::{Intervals, Source};
use groupcast_control::source::machine::{Answer, Effect, Event, Machine, NotWritten, Plan, Written};
use groupcast_control::source::owned::Owned;
use groupcast_control::source::poller::Poller;
use groupcast_control::source::status::Status;
use groupcast_control::source::{Failed, Polled};
use groupcast_policy::ids::{GroupId, WorkloadId};
use groupcast_policy::model::{Group, GroupRule, Owner, Workload};
use groupcast_policy::text::parse_rule;
use groupcast_simulator::fake::serve::{Server, Shared};
use groupcast_simulator::fake::tls::Authority;
use groupcast_simulator::fake::{CloudController, Fake, Neutron};
use serde_json::{Value, json};

pub trait Polls {
    fn poll(&mut self, full: bool, marker: Option<&str>) -> impl Future<Output = Result<Polled, Failed>>;
}

impl Polls for Poller {
    async fn poll(&mut self, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        Poller::poll(self, full, marker).await
    }
}

/// A folder that ends with its value.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("groupcast-source-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What CATALOG and REGISTRY hold.
#[derive(Default)]
pub struct Streams {
    pub groups: BTreeMap<GroupId, (u64, Arc<Group>)>,
    pub workloads: BTreeMap<WorkloadId, Arc<Workload>>,
    sequence: u64,
    /// Documents of each change.
    pub changes: Vec<usize>,
    /// So many writes fail first.
    pub refuse: u32,
}

impl Streams {
    /// A gateway's group that denies these groups.
    pub fn deny(&mut self, named: &[GroupId]) {
        let rule = |id: &GroupId| GroupRule {
            rule: parse_rule(&format!("deny ingress any from group:{id}")).expect("a rule"),
            description: String::new(),
        };
        let mut closed = Group::new("closed".parse().expect("an id"));
        closed.rules = named.iter().map(rule).collect();
        self.sequence += 1;
        self.groups.insert(closed.id.clone(), (self.sequence, Arc::new(closed)));
    }

    /// What belongs to sources.
    pub fn owned(&self) -> impl Iterator<Item = &Arc<Group>> {
        self.groups.values().map(|(_, group)| group).filter(|group| group.owner != Owner::Gateway)
    }

    fn load(&self, source: &groupcast_policy::ids::SourceId) -> Owned {
        let mut owned = Owned { catalog: self.sequence, registry: self.sequence, ..Owned::default() };
        for (id, (revision, group)) in &self.groups {
            owned.take_group(source, id, *revision, Some(group.clone()));
        }
        self.workloads.values().for_each(|workload| owned.take_workload(source, workload.clone()));
        owned
    }

    fn write(&mut self, plan: &Plan) -> Result<Written, NotWritten> {
        let mut written = Written::default();
        for writes in &plan.changes {
            if self.refuse > 0 {
                self.refuse -= 1;
                return Err(NotWritten { message: "the bus is away".into(), conflict: false });
            }
            let fits = writes.iter().all(|write| {
                let held = self.groups.get(&write.name.id().parse().expect("an id")).map(|(revision, _)| *revision);
                write.expected == held.map_or(Expected::Absent, Expected::Revision)
            });
            if !fits {
                return Err(NotWritten { message: "somebody was faster".into(), conflict: true });
            }
            for write in writes {
                self.sequence += 1;
                let id: GroupId = write.name.id().parse().expect("an id");
                match &write.body {
                    Body::Put(Document::Group(group)) => {
                        self.groups.insert(id.clone(), (self.sequence, group.clone()));
                        written.revisions.insert(id, self.sequence);
                    }
                    Body::Put(_) => panic!("a source writes groups"),
                    Body::Delete => drop(self.groups.remove(&id)),
                }
            }
            self.changes.push(writes.len());
            written.catalog = Some(self.sequence);
        }
        for workload in plan.difference.register.values().flatten() {
            self.sequence += 1;
            self.workloads.insert(workload.id.clone(), Arc::new(workload.clone()));
        }
        for (network, id) in plan.difference.remove.values().flatten() {
            self.sequence += 1;
            if self.workloads.get(id).is_some_and(|held| held.network == *network) {
                self.workloads.remove(id);
            }
        }
        written.registry = Some(self.sequence);
        Ok(written)
    }
}

pub struct Rig<P> {
    pub poller: P,
    pub machine: Machine,
    pub streams: Streams,
    pub now_ms: u64,
    pub answers: BTreeMap<u64, Answer>,
    pub wake_ms: u64,
    next_ask: u64,
}

impl Rig<Poller> {
    /// As it is configured, intervals and all.
    pub fn with(id: &str, config: &Value) -> Self {
        let source: Source = serde_json::from_value(config.clone()).expect("a configuration");
        let machine = Machine::new(id.parse().expect("an id"), source.kind(), source.intervals(), 7);
        Self { machine, ..Self::new(id, source.kind(), poller(config)) }
    }
}

impl<P: Polls> Rig<P> {
    pub fn new(id: &str, kind: &'static str, poller: P) -> Self {
        let (full_sync, hold) = (Duration::from_secs(600), Duration::from_secs(30));
        let intervals = Intervals { poll: Duration::from_secs(60), full_sync, hold };
        let machine = Machine::new(id.parse().expect("an id"), kind, intervals, 7);
        Self { poller, machine, streams: Streams::default(), now_ms: 1_000, answers: BTreeMap::new(), wake_ms: 0, next_ask: 0 }
    }

    /// Hands an event in and sees everything through that follows from it.
    pub async fn handle(&mut self, event: Event) {
        let mut effects = self.machine.handle(event, self.now_ms);
        while !effects.is_empty() {
            let mut next = Vec::new();
            for effect in effects {
                let event = match effect {
                    Effect::Load { run } => {
                        let owned = self.streams.load(self.machine.id());
                        Event::Loaded { run, result: Ok(Box::new(owned)) }
                    }
                    Effect::Poll { run, full, marker } => {
                        let result = self.poller.poll(full, marker.as_deref()).await;
                        Event::Polled { run, result }
                    }
                    Effect::Write { run, plan } => Event::Written { run, result: self.streams.write(&plan) },
                    Effect::Answer { ask, answer } => {
                        self.answers.insert(ask, answer);
                        continue;
                    }
                    Effect::WakeAt(at) => {
                        self.wake_ms = at;
                        continue;
                    }
                };
                next.extend(self.machine.handle(event, self.now_ms));
            }
            effects = next;
        }
    }

    pub async fn lead(&mut self) {
        self.handle(Event::Leading(true)).await;
    }

    /// The next poll that is due.
    pub async fn interval(&mut self) {
        self.now_ms = self.now_ms.max(self.wake_ms);
        self.handle(Event::Tick).await;
    }

    /// A poll that somebody asks for.
    pub async fn poll_now(&mut self, full: bool) -> Answer {
        self.next_ask += 1;
        self.now_ms += 1;
        self.handle(Event::PollNow { ask: self.next_ask, full }).await;
        self.answers.remove(&self.next_ask).expect("answered")
    }

    pub async fn confirm(&mut self) -> Answer {
        self.next_ask += 1;
        self.handle(Event::Confirm { ask: self.next_ask }).await;
        self.answers.remove(&self.next_ask).expect("answered")
    }

    pub fn status(&self) -> Status {
        self.machine.status(self.now_ms)
    }

    pub fn error(&self) -> String {
        self.status().last_error.map(|error| error.message).unwrap_or_default()
    }

    /// Names of the groups in CATALOG that sources own.
    pub fn names(&self) -> BTreeSet<String> {
        self.streams.owned().map(|group| group.name.clone()).collect()
    }

    pub fn named(&self, name: &str) -> &Group {
        let found = self.streams.groups.values().find(|(_, group)| group.name == name);
        found.map(|(_, group)| &**group).unwrap_or_else(|| panic!("no group {name}: {:?}", self.names()))
    }
}

/// A server over HTTPS, its internal address with mutual TLS, and a source that polls it.
pub struct Cloud {
    pub shared: Shared<CloudController>,
    pub rig: Rig<Poller>,
    pub config: Value,
    _servers: [Server; 2],
    _folder: Folder,
}

async fn serve<F: Fake>(shared: &Shared<F>, folder: &Folder) -> ([Server; 2], Authority) {
    let authority = Authority::make(&folder.0).expect("certificates");
    let public = Server::start(0, Some(authority.acceptor(false).expect("TLS")), false, shared.clone()).await.expect("it serves");
    let internal = Server::start(0, Some(authority.acceptor(true).expect("TLS")), true, shared.clone()).await.expect("it serves");
    ([public, internal], authority)
}

pub fn poller(config: &Value) -> Poller {
    let source: Source = serde_json::from_value(config.clone()).expect("a configuration");
    source.check().expect("valid");
    Poller::new(source)
}

impl Cloud {
    pub async fn start(page_size: usize) -> Self {
        let (shared, folder) = (Shared::new(CloudController::default()), Folder::new());
        let (servers, authority) = serve(&shared, &folder).await;
        let secret = folder.write("secret", "secret\n");
        let config = json!({
            "kind": "cloud-controller", "id": "cf", "url": servers[0].url(), "internal_url": servers[1].url(), "uaa_url": servers[0].url(),
            "client_id": "groupcast", "client_secret_file": secret, "ca_file": authority.ca_file,
            "client_cert_file": authority.client_cert_file, "client_key_file": authority.client_key_file,
            "page_size": page_size, "timeout": "2s",
        });
        let rig = Rig::new("cf", "cloud-controller", poller(&config));
        Self { shared, rig, config, _servers: servers, _folder: folder }
    }

    /// Lists that were asked for since the last time.
    pub fn lists(&self) -> usize {
        let calls = self.shared.lock().calls.take();
        calls.iter().filter(|call| call.contains("/v3/security_groups?")).count()
    }

    pub fn expect_equal(&self) {
        let there: BTreeSet<String> = self.shared.lock().groups.iter().map(|group| group.name.clone()).collect();
        assert_eq!(self.rig.names(), there);
    }
}

pub struct Stack {
    pub shared: Shared<Neutron>,
    pub rig: Rig<Poller>,
    _servers: [Server; 2],
    _folder: Folder,
}

impl Stack {
    pub async fn start(page_size: usize) -> Self {
        let (shared, folder) = (Shared::new(Neutron::default()), Folder::new());
        let (servers, authority) = serve(&shared, &folder).await;
        let secret = folder.write("secret", "secret");
        // All of it with a client's certificate.
        let config = json!({
            "kind": "neutron", "id": "os", "url": servers[1].url(), "auth_url": format!("{}/v3", servers[1].url()),
            "application_credential_id": "application", "application_credential_secret_file": secret, "ca_file": authority.ca_file,
            "client_cert_file": authority.client_cert_file, "client_key_file": authority.client_key_file,
            "page_size": page_size, "timeout": "2s",
        });
        Self { shared, rig: Rig::new("os", "neutron", poller(&config)), _servers: servers, _folder: folder }
    }

    pub fn workload(&self, id: &str) -> Option<&Workload> {
        self.rig.streams.workloads.get(&format!("os-{id}").parse::<WorkloadId>().expect("an id")).map(|workload| &**workload)
    }

    /// Groups and workloads that the source owns.
    pub fn counts(&self) -> (usize, usize) {
        (self.rig.streams.owned().count(), self.rig.streams.workloads.len())
    }
}
