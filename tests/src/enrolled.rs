//! Hosts that enrol themselves, as protocol only (guests) or as the real agent, on a bus with real controllers; and what REGISTRY and
//! AUDIT say of them.

mod guest;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::Client;
use groupcast_bus_config::subjects::{self, RegistryKey};
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_control::log::{Entry, Log};
use groupcast_control::registration::grant::Grant;
use groupcast_control::registry::CAUSE;
use groupcast_messages::RegisterWorkload;
use groupcast_policy::doc::Phase;
use groupcast_policy::model::Template;
use groupcast_policy::net::Prefix;
use serde_json::Value;

pub use guest::{Guest, incarnation, refusal};

use crate::control::{Controller, Plane, address, group};
use crate::world::{DEADLINE, eventually};

/// Short, so that tests are; long enough for a machine that does much else.
pub const LEASE: Duration = Duration::from_millis(2_000);
pub const GRACE: Duration = Duration::from_millis(1_000);
pub const BEAT: Duration = Duration::from_millis(200);
/// Of leadership.
pub const LEAD: Duration = Duration::from_millis(900);

/// What a controller is told about registration.
pub const SHORT: [&str; 10] = [
    "--registration-lease",
    "2000ms",
    "--registration-grace",
    "1000ms",
    "--registration-sweep",
    "50ms",
    "--registration-guard-window",
    "4s",
    "--registration-guard-hosts",
    "3",
];

/// A bus with so many controllers, one of which leads.
pub async fn plane(controllers: usize) -> Plane {
    plane_with(controllers, &SHORT).await
}

/// The same with controllers that are told this.
pub async fn plane_with(controllers: usize, more: &[&str]) -> Plane {
    let mut plane = Plane::start(0, LEAD).await;
    // Nobody leads a bus on which nothing was ever written.
    plane.put_groups(vec![group("first", &[], &[])]).await;
    for _ in 0..controllers {
        plane.add_controller_with(more);
    }
    plane.ready().await;
    if controllers > 0 {
        plane.leader().await;
    }
    plane
}

/// Waits until one of the controllers judges silence.
pub async fn judging(plane: &mut Plane) -> usize {
    let start = std::time::Instant::now();
    loop {
        for (index, controller) in plane.controllers.iter_mut().enumerate() {
            if controller.status().is_some_and(|status| status["registrations"]["acts"] == true) {
                return index;
            }
        }
        assert!(start.elapsed() < DEADLINE, "nobody judges silence");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn write(plane: &Plane, writes: Vec<Write>) {
    let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
    plane.catalog.write(&change, None).await.expect("written");
}

/// A template of the network `net` that these hosts may use.
pub fn template(id: &str, hosts: &[&str]) -> Template {
    let mut template = Template::new(id.parse().expect("an id"), "net".parse().expect("an id"));
    template.identities = hosts.iter().map(|host| host.parse().expect("an id")).collect();
    template.prefixes.insert(Prefix::v4(0x0a00_0000, 8).expect("a prefix"));
    template.spaces.insert("shop".parse().expect("an id"));
    template
}

pub async fn put_template(plane: &Plane, template: Template) {
    write(plane, vec![Write::put(Document::Template(Arc::new(template)), Expected::Any)]).await;
}

pub async fn delete_template(plane: &Plane, id: &str) {
    let name = Name::template(&id.parse().expect("an id"));
    write(plane, vec![Write::delete(name, Expected::Any)]).await;
}

/// Grants hosts everything in 10.0.0.0/8.
pub async fn grant(plane: &Plane, hosts: &[&str]) {
    for hosts in hosts.chunks(500) {
        let put = |host: &&str| {
            let grant = Grant::new(host.parse().expect("an id"), vec![Prefix::v4(0x0a00_0000, 8).expect("a prefix")]);
            Write::put(grant.document().expect("a document"), Expected::Any)
        };
        write(plane, hosts.iter().map(put).collect()).await;
    }
}

/// The usual: a template, and hosts that may use it.
pub async fn allowed(plane: &Plane, id: &str, hosts: &[&str]) {
    put_template(plane, template(id, hosts)).await;
    grant(plane, hosts).await;
}

/// A workload with one address, in space `shop`.
pub fn asked(id: &str, number: u32) -> RegisterWorkload {
    RegisterWorkload {
        workload: id.parse().expect("an id"),
        network: "net".parse().expect("an id"),
        addresses: BTreeSet::from([address(number)]),
        labels: BTreeMap::new(),
        space: Some("shop".parse().expect("an id")),
        app: None,
        phase: Phase::Running,
        incarnation: None,
    }
}

/// Between two looks at everything in REGISTRY.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(40);

/// What REGISTRY holds, by subject; what was removed, and who leads, is left out.
pub async fn entries(client: &Client) -> BTreeMap<String, Value> {
    // Each look is a consumer, which stays for a while, and the stream has room for so many: nobody looks all the time.
    tokio::time::sleep(LOOK_EVERY).await;
    let begun = std::time::Instant::now();
    let all = loop {
        match Log::registry(client.clone()).all(subjects::REGISTRY_ALL).await {
            Ok(all) => break all,
            Err(error) => assert!(begun.elapsed() < crate::world::DEADLINE, "the bus answers: {error}"),
        }
        tokio::time::sleep(LOOK_EVERY * 5).await;
    };
    let document = |entry: Entry| {
        let value: Value = serde_json::from_slice(&entry.payload).ok()?;
        Some((entry.subject, value["document"].clone()))
    };
    all.into_iter().filter(|entry| !subjects::is_about_leading(&entry.subject)).filter_map(document).collect()
}

/// The last sequence of REGISTRY that is not about who leads.
pub async fn sequence(client: &Client) -> u64 {
    let all = Log::registry(client.clone()).all(subjects::REGISTRY_ALL).await.expect("the bus answers");
    all.iter().filter(|entry| !subjects::is_about_leading(&entry.subject)).map(|entry| entry.sequence).max().unwrap_or(0)
}

pub async fn host_entry(client: &Client, host: &str) -> Option<Value> {
    let key = RegistryKey::Host(host.parse().expect("an id"));
    entries(client).await.remove(&key.subject())
}

pub async fn workload_entry(client: &Client, id: &str) -> Option<Value> {
    entries(client).await.remove(&format!("gc.reg.w.{id}"))
}

/// Waits until a workload is there in this life.
pub async fn registered(client: &Client, workload: &str, incarnation: u64) {
    eventually(&format!("{workload} is registered as its life {incarnation}"), || async {
        workload_entry(client, workload).await.is_some_and(|entry| entry["incarnation"] == incarnation)
    })
    .await;
}

/// Waits until a host's entry is gone; when, by the clock of the bus.
pub async fn deleted_at(client: &Client, host: &str) -> SystemTime {
    gone(client, host).await;
    let subject = RegistryKey::Host(host.parse().expect("an id")).subject();
    let trace = Log::registry(client.clone()).last(&subject).await.expect("the bus answers");
    trace.expect("a trace of what was deleted").at
}

pub async fn is_suspect(client: &Client, host: &str) -> bool {
    host_entry(client, host).await.is_some_and(|entry| entry["enrolled"]["suspect"] == true)
}

/// Why everything under this subject was written, oldest first, as AUDIT tells it.
pub async fn causes(client: &Client, subject: &str) -> Vec<String> {
    let context = async_nats::jetstream::new(client.clone());
    let stream = context.get_stream_no_info("AUDIT").await.expect("the bus answers");
    let (mut from, mut causes) = (1, Vec::new());
    while let Ok(message) = stream.get_first_raw_message_by_subject(subject, from).await {
        from = message.sequence + 1;
        causes.push(message.headers.get(CAUSE).map(|cause| cause.to_string()).unwrap_or_default());
    }
    causes
}

/// Waits until AUDIT tells a cause with these words.
pub async fn audited(client: &Client, subject: &str, words: &str) {
    eventually(&format!("AUDIT tells {words:?} of {subject}"), || async {
        causes(client, subject).await.iter().any(|cause| cause.contains(words))
    })
    .await;
}

/// A host of a template of its own, by which it is seen that time has passed: silent from when it is told to be, it is gone when
/// whoever judges has waited for lease and grace, for it and for everybody who was silent before.
pub struct Sentinel(Guest);

impl Sentinel {
    pub async fn new(plane: &Plane, name: &str) -> Self {
        allowed(plane, &format!("sentinel-{name}"), &[name]).await;
        Self::on(Guest::new(plane, name, 1).await).await
    }

    /// One that is allowed already.
    pub async fn on(guest: Guest) -> Self {
        let number = 0xff_0000 + guest.id.as_str().bytes().fold(0_u32, |sum, byte| (sum * 31 + u32::from(byte)) & 0xffff);
        let name = guest.id.clone();
        guest.settle(&format!("sentinel-{name}"), &format!("w-{name}"), number).await;
        Self(guest)
    }

    /// Lease and grace pass, counted from now.
    pub async fn passes(self, observer: &Client) {
        self.0.vanish();
        gone(observer, self.0.id.as_str()).await;
    }
}

/// The words of everything that was refused to this host, oldest first, as AUDIT tells it.
pub async fn refusals(client: &Client, host: &str) -> Vec<String> {
    let context = async_nats::jetstream::new(client.clone());
    let stream = context.get_stream_no_info("AUDIT").await.expect("the bus answers");
    let subject = RegistryKey::Refusal(host.parse().expect("an id")).subject();
    let (mut from, mut words) = (1, Vec::new());
    while let Ok(message) = stream.get_first_raw_message_by_subject(&subject, from).await {
        from = message.sequence + 1;
        let record: Value = serde_json::from_slice(&message.payload).unwrap_or_default();
        words.push(record["document"]["reason"].as_str().unwrap_or_default().to_owned());
    }
    words
}

/// What a controller counts under this name, summed over its labels.
pub fn counted(controller: &mut Controller, name: &str) -> f64 {
    let (_, page) = controller.get("/metrics").expect("metrics");
    let value = |line: &str| {
        let (labelled, value) = line.rsplit_once(' ')?;
        let is_named = labelled.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        if is_named { value.parse::<f64>().ok() } else { None }
    };
    page.lines().filter_map(value).sum()
}

/// What a process holds in memory, in KiB.
pub fn resident_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the kernel says what it holds");
    line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Waits until the host's entry is gone, with its workloads and claims.
pub async fn gone(client: &Client, host: &str) {
    eventually(&format!("nothing is left of host {host}"), || async {
        let left = entries(client).await;
        !left.iter().any(|(subject, entry)| {
            !subject.starts_with("gc.reg.r.") && (entry["host"] == host || *subject == format!("gc.reg.h.{host}"))
        })
    })
    .await;
}
