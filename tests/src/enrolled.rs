//! Hosts that enrol themselves, as protocol only (guests) or as the real agent, on a bus with real controllers; and what REGISTRY and
//! AUDIT say of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::{Client, HeaderMap};
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::subjects::{self, RegistryKey};
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_control::log::{Entry, Log};
use groupcast_control::registration::grant::Grant;
use groupcast_control::registry::CAUSE;
use groupcast_messages::{
    Beat, BeatAnswer, HostRequest, HostRequestAnswer, HostState, Register, RegisterAnswer, RegisterWorkload,
};
use groupcast_policy::doc::Phase;
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model::Template;
use groupcast_policy::net::Prefix;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

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

/// What REGISTRY holds, by subject; what was removed is left out.
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
    all.into_iter().filter_map(document).collect()
}

/// The last sequence of REGISTRY.
pub async fn sequence(client: &Client) -> u64 {
    let last = Log::registry(client.clone()).last(subjects::REGISTRY_ALL).await.expect("the bus answers");
    last.map_or(0, |entry| entry.sequence)
}

pub async fn host_entry(client: &Client, host: &str) -> Option<Value> {
    let key = RegistryKey::Host(host.parse().expect("an id"));
    entries(client).await.remove(&key.subject())
}

pub async fn workload_entry(client: &Client, id: &str) -> Option<Value> {
    entries(client).await.remove(&format!("gc.reg.w.net.{id}"))
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

type Waiting = Arc<Mutex<HashMap<String, oneshot::Sender<Vec<u8>>>>>;

/// A host as the protocol has it: enrols, beats, and enrols again when it is told that it is not known.
pub struct Guest {
    pub id: HostId,
    pub client: Client,
    pub boot: u64,
    waiting: Waiting,
    next: AtomicU64,
    /// How often it was told that it is not known.
    pub told: Arc<AtomicU64>,
    /// Beats sent.
    sent: Arc<AtomicU64>,
    enrolment: Arc<Mutex<Option<Register>>>,
    beats: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Guest {
    pub async fn new(plane: &Plane, name: &str, boot: u64) -> Self {
        let (client, _events) = plane.bus.connect(0, Role::Host, name).await;
        Self::with(client, name, boot).await
    }

    pub async fn with(client: Client, name: &str, boot: u64) -> Self {
        let id: HostId = name.parse().expect("an id");
        let mut answers = client.subscribe(subjects::answers(&id)).await.expect("subscribed");
        client.flush().await.expect("the server answers");
        let (waiting, told, beats) = (Waiting::default(), Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let enrolment: Arc<Mutex<Option<Register>>> = Arc::default();
        let listen = {
            let (waiting, told, enrolment) = (waiting.clone(), told.clone(), enrolment.clone());
            let (client, id) = (client.clone(), id.clone());
            tokio::spawn(async move {
                while let Some(message) = answers.next().await {
                    let token = subjects::answer_token(&message.subject).unwrap_or_default().to_owned();
                    if token.starts_with("beat") {
                        if BeatAnswer::decode(&message.payload) == Ok(BeatAnswer::Unknown) {
                            told.fetch_add(1, Ordering::SeqCst);
                            let again = enrolment.lock().expect("lock").clone();
                            if let Some(register) = again {
                                send(&client, subjects::register(&id), "again", register.encode()).await;
                            }
                        }
                        continue;
                    }
                    let waiter = waiting.lock().expect("lock").remove(&token);
                    if let Some(waiter) = waiter {
                        let _ = waiter.send(message.payload.to_vec());
                    }
                }
            })
        };
        let sent = Arc::new(AtomicU64::new(0));
        let beating = {
            let (client, id, beats, sent) = (client.clone(), id.clone(), beats.clone(), sent.clone());
            tokio::spawn(async move {
                let mut count = 0;
                loop {
                    if beats.load(Ordering::SeqCst) {
                        count += 1;
                        let (version, state) = ("test".to_owned(), HostState::Enforcing);
                        let beat = Beat { boot, count, term: 0, version, state };
                        send(&client, subjects::beat(&id), &format!("beat-{count}"), beat.encode()).await;
                        sent.store(count, Ordering::SeqCst);
                    }
                    tokio::time::sleep(BEAT).await;
                }
            })
        };
        let tasks = vec![listen, beating];
        Self { id, client, boot, waiting, next: AtomicU64::new(0), told, sent, enrolment, beats, tasks }
    }

    async fn ask(&self, payload: Vec<u8>) -> Vec<u8> {
        // In a world of three leaders change, and a request may be lost: whoever asks asks again.
        for _ in 0..20 {
            // Two lives of one host hear each other's answers.
            let token = format!("t{}-{}", self.boot, self.next.fetch_add(1, Ordering::SeqCst));
            let (answer, answered) = oneshot::channel();
            self.waiting.lock().expect("lock").insert(token.clone(), answer);
            send(&self.client, subjects::register(&self.id), &token, payload.clone()).await;
            if let Ok(Ok(answer)) = tokio::time::timeout(Duration::from_secs(3), answered).await {
                return answer;
            }
        }
        panic!("host {} is never answered", self.id)
    }

    pub async fn enrol(&self, template: &str, workloads: Vec<RegisterWorkload>) -> RegisterAnswer {
        let register = Register { boot: self.boot, template: Some(template.to_owned()), workloads };
        let answer = RegisterAnswer::decode(&self.ask(register.encode()).await).expect("an answer");
        if matches!(answer, RegisterAnswer::Registered { .. }) {
            *self.enrolment.lock().expect("lock") = Some(register);
        }
        answer
    }

    /// Enrols one workload and begins to beat; its incarnation.
    pub async fn settle(&self, template: &str, workload: &str, number: u32) -> u64 {
        let incarnation = incarnation(&self.enrol(template, vec![asked(workload, number)]).await);
        self.beats(true);
        incarnation
    }

    pub async fn request(&self, request: HostRequest) -> HostRequestAnswer {
        HostRequestAnswer::decode(&self.ask(request.encode()).await).expect("an answer")
    }

    pub fn beats(&self, beats: bool) {
        self.beats.store(beats, Ordering::SeqCst);
    }

    /// Says farewell as an agent does: it is silent from then on, and does not come back because it is told that it is gone.
    pub async fn leave(&self) -> HostRequestAnswer {
        self.beats(false);
        self.forget();
        self.request(HostRequest::Leave { boot: self.boot }).await
    }

    /// The workloads of its last registration.
    pub fn workloads(&self) -> Vec<(NetworkId, WorkloadId)> {
        let enrolment = self.enrolment.lock().expect("lock");
        let workloads = enrolment.iter().flat_map(|register| &register.workloads);
        workloads.map(|workload| (workload.network.clone(), workload.workload.clone())).collect()
    }

    /// Silent for good.
    pub fn vanish(&self) {
        self.beats(false);
        self.forget();
    }

    /// Waits until it has beaten for so long: time that has passed, whoever was there to hear it.
    pub async fn beats_for(&self, time: Duration) {
        let until = self.sent.load(Ordering::SeqCst) + 1 + time.as_millis().div_ceil(BEAT.as_millis()) as u64;
        eventually(&format!("{} has sent {until} beats", self.id), || async { self.sent.load(Ordering::SeqCst) >= until }).await;
    }

    /// It does not enrol again by itself any more.
    pub fn forget(&self) {
        *self.enrolment.lock().expect("lock") = None;
    }

    pub fn told(&self) -> u64 {
        self.told.load(Ordering::SeqCst)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn send(client: &Client, subject: String, token: &str, payload: Vec<u8>) {
    let mut headers = HeaderMap::new();
    headers.insert(subjects::ANSWER_TOKEN, token);
    // Without a bus it is lost, as a host's words are.
    let _ = client.publish_with_headers(subject, headers, payload.into()).await;
}

/// Of the one workload that was registered.
pub fn incarnation(answer: &RegisterAnswer) -> u64 {
    match answer {
        RegisterAnswer::Registered { incarnations, .. } => incarnations[0].1,
        refused => panic!("{refused:?}"),
    }
}

/// Whether it may pass, and the words.
pub fn refusal(answer: &RegisterAnswer) -> (bool, String) {
    match answer {
        RegisterAnswer::Refused { retryable, reason } => (*retryable, reason.clone()),
        registered => panic!("{registered:?}"),
    }
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
