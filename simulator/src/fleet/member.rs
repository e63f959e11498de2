//! A host of the fleet: the real reader over a connection of its own, on a model kernel if it has one. It comes back when it loses its
//! connection, and keeps what it holds meanwhile.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::interface::{Claim, Interface};
use groupcast_enforce::kernel::{Fate, ModelKernel, Packet};
use groupcast_enforce::settings::{Attached, Attachment, Attachments, Settings, Stamp};
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::needs::{Documents, needed};
use groupcast_policy::net::Prefix;
use groupcast_policy::packet::{Payload, TCP};
use groupcast_policy::resolve::resolve;
use groupcast_policy::rule::Direction;
use groupcast_policy::topic::Topic;
use groupcast_topics::reader::{self, Commit, Incident, Reader};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::marks::Marks;
use super::topology::MARKS;
use crate::bench::fleet::Finish;
use crate::host::{Command, Host, Observer};
use crate::lean::{self, ConnectOptions, Connection, MessageFrame};
use crate::random::Random;

/// What the fleet tells all its hosts, and they it.
pub struct Shared {
    pub marks: Marks,
    pub address: SocketAddr,
    /// The run is over: who is cut off stays away.
    pub ended: AtomicBool,
    pub synced: AtomicU32,
    pub connected: AtomicU32,
    pub reconnect_jitter: Duration,
    /// Plain messages to everybody, for comparison.
    pub raw: Finish,
    /// What must never happen and did; the first few.
    pub violations: std::sync::Mutex<Vec<String>>,
}

/// What everybody listens to beside topics: as long as the subject of a group's members.
pub const RAW_SUBJECT: &str = "plain.t.members.to-everybody-00000000-0000-0000";
const VIOLATIONS_MAX: usize = 20;
const RETRY: Duration = Duration::from_millis(200);
/// Packets tried on a kernel after every commit.
const PROBES: usize = 3;

impl Shared {
    pub fn violated(&self, words: String) {
        let mut all = self.violations.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if all.len() < VIOLATIONS_MAX {
            all.push(format!("at {:.3} s: {words}", self.marks.now_s()));
        }
    }
}

/// A kernel that is tried with packets.
struct Machine {
    engine: Engine,
    kernel: ModelKernel,
    workload: WorkloadId,
    address: IpAddr,
    random: Random,
    begun: bool,
}

const INSIDE: &str = "gcw0";
const OUTSIDE: &str = "eth0";

impl Machine {
    fn new(host: &HostId, number: usize) -> anyhow::Result<Self> {
        let workload = WorkloadId::new(&format!("workload-{number:05}"))?;
        let attachment = Attachment::Interface(Interface::new(INSIDE)?);
        let attachments: Attachments = [(workload.clone(), Attached { attachment, audit: false })].into_iter().collect();
        let settings = Settings { claims: vec![Claim::new("gcw*")?], ..Settings::default() };
        Ok(Self {
            engine: Engine::new(host.clone(), settings, attachments, Stamp::FIRST),
            kernel: ModelKernel::default(),
            workload,
            address: IpAddr::V4(std::net::Ipv4Addr::from_bits(0x0a00_0002 + number as u32)),
            random: Random::new(number as u64),
            begun: true,
        })
    }

    /// Puts a commit in force and tries it; what is wrong, if something is.
    fn commit(&mut self, host: &HostId, commit: &Commit, reader: &Reader) -> Result<(), String> {
        let documents = Exposed(reader);
        let plan = if std::mem::take(&mut self.begun) {
            self.engine.compare(&documents)
        } else {
            let mut edits = commit.edits.clone();
            edits.extend(commit.dropped.iter().map(|topic| (topic.clone(), None)));
            self.engine.change(&edits, &documents)
        };
        self.kernel.commit(&plan.transaction).map_err(|error| format!("the kernel of {host} refuses a transaction: {error}"))?;
        self.engine.committed(plan);
        let policy = resolve(host, &documents);
        for _ in 0..PROBES {
            let remote = self.remote(reader);
            let port = if self.random.next().is_multiple_of(4) { 444 } else { 443 };
            let payload =
                Payload::Ports { protocol: TCP, source: 40_000 + (self.random.next() % 20_000) as u16, destination: port };
            let [outside, inside] = [OUTSIDE, INSIDE].map(|name| Interface::new(name).unwrap_or(Interface::NONE));
            let found = self.kernel.send(&Packet::first(outside, inside, remote, self.address, payload));
            let allowed = policy.verdict(&self.workload, Direction::Ingress, remote, &payload);
            if (found == Fate::Passed) != allowed {
                return Err(format!(
                    "{host} at {:?}: a packet from {remote} to port {port} {found:?}, and its policy says {allowed}",
                    commit.cut
                ));
            }
        }
        self.kernel.forget();
        Ok(())
    }

    /// Somebody who is a member of something, or nobody's.
    fn remote(&mut self, reader: &Reader) -> IpAddr {
        let stranger = IpAddr::V4(std::net::Ipv4Addr::from_bits(0xc633_6400 + (self.random.next() % 256) as u32));
        let members: Vec<&Document> =
            reader.documents().filter_map(|(topic, document)| matches!(topic, Topic::Members(_)).then_some(document)).collect();
        if members.is_empty() || self.random.next().is_multiple_of(3) {
            return stranger;
        }
        let document = members[self.random.next() as usize % members.len()];
        let first =
            document.members().and_then(|members| members.v4.iter().nth(self.random.next() as usize % members.v4.len().max(1)));
        first.map_or(stranger, |bits| IpAddr::V4(std::net::Ipv4Addr::from_bits(*bits)))
    }
}

struct Exposed<'r>(&'r Reader);

impl Documents for Exposed<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.document(topic)
    }
}

/// What a host tells the fleet.
pub struct Watch {
    shared: Arc<Shared>,
    id: HostId,
    machine: Option<Box<Machine>>,
    synced: bool,
    /// The last mark of each group that was seen.
    marks: HashMap<Topic, u32>,
}

fn mark_of(prefix: &Prefix) -> Option<u32> {
    match prefix.net().addr() {
        IpAddr::V4(address) if address.to_bits() >> 24 == MARKS >> 24 => Some(address.to_bits() - MARKS),
        _ => None,
    }
}

impl Observer for Watch {
    fn on_delivery(&mut self, message: &MessageFrame<'_>) -> bool {
        if message.subject == RAW_SUBJECT {
            self.shared.raw.arrive();
            return false;
        }
        self.shared.marks.deliveries.fetch_add(1, Ordering::Relaxed);
        self.shared.marks.delivered_bytes.fetch_add(message.payload.len() as u64, Ordering::Relaxed);
        true
    }

    fn on_commit(&mut self, commit: &Commit, reader: &Reader) {
        if !std::mem::replace(&mut self.synced, true) {
            self.shared.synced.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(machine) = &mut self.machine
            && let Err(words) = machine.commit(&self.id, commit, reader)
        {
            self.shared.violated(words);
        }
        for (topic, edit) in &commit.edits {
            if !matches!(topic, Topic::Members(_)) {
                continue;
            }
            let newest = match edit {
                Some(Edit::Members { add, .. }) => add.iter().filter_map(mark_of).max(),
                _ => reader.document(topic).and_then(Document::members).and_then(|members| {
                    let above = members.v4.range(MARKS..).take_while(|bits| *bits >> 24 == MARKS >> 24);
                    above.map(|bits| bits - MARKS).max()
                }),
            };
            if let Some(mark) = newest.filter(|mark| self.marks.get(topic).is_none_or(|last| mark > last)) {
                self.marks.insert(topic.clone(), mark);
                self.shared.marks.arrived(mark);
            }
        }
    }

    fn on_incident(&mut self, _: Incident) {
        self.shared.marks.incidents.fetch_add(1, Ordering::Relaxed);
    }
}

/// Reaches one host from the fleet.
pub struct Member {
    pub id: HostId,
    cut: Arc<Notify>,
    task: JoinHandle<Option<Host<Watch>>>,
}

/// Begins a host that lives until the run ends.
pub fn spawn(
    shared: &Arc<Shared>,
    id: HostId,
    number: usize,
    kernel: bool,
    settings: reader::Settings,
) -> anyhow::Result<Member> {
    let machine = kernel.then(|| Machine::new(&id, number).map(Box::new)).transpose()?;
    let watch = Watch { shared: Arc::clone(shared), id: id.clone(), machine, synced: false, marks: HashMap::new() };
    let host = Host::new(id.clone(), settings, number as u64, watch);
    let cut = Arc::new(Notify::new());
    let task = tokio::spawn(live(Arc::clone(shared), host, id.clone(), number as u64, Arc::clone(&cut)));
    Ok(Member { id, cut, task })
}

async fn live(shared: Arc<Shared>, mut host: Host<Watch>, id: HostId, seed: u64, cut: Arc<Notify>) -> Option<Host<Watch>> {
    let mut random = Random::new(seed ^ 0x5eed);
    let mut first = true;
    loop {
        let options = ConnectOptions { name: id.to_string(), ..Default::default() };
        let connection = loop {
            if shared.ended.load(Ordering::Relaxed) {
                return Some(host);
            }
            if !first {
                let jitter_ms = shared.reconnect_jitter.as_millis().max(1) as u64;
                tokio::time::sleep(Duration::from_millis(random.next() % jitter_ms)).await;
            }
            match Connection::connect(shared.address, &options).await {
                Ok(connection) => break connection,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
            first = false;
        };
        first = false;
        let lean::Running { commands, mut task } = lean::spawn(connection, host);
        commands.send(Command::Overhear(RAW_SUBJECT.to_owned()));
        commands.send(Command::Start);
        shared.connected.fetch_add(1, Ordering::Relaxed);
        let ended = tokio::select! {
            ended = &mut task => ended,
            () = cut.notified() => {
                drop(commands);
                task.await
            }
        };
        shared.connected.fetch_sub(1, Ordering::Relaxed);
        host = match ended {
            Ok((host, _)) => host,
            Err(_) => {
                shared.violated(format!("host {id} panicked"));
                return None;
            }
        };
        host.disconnected();
    }
}

impl Member {
    /// Cuts its connection; it comes back by itself, unless the run is over.
    pub fn cut(&self) {
        self.cut.notify_one();
    }

    /// Ends it and gives what it holds.
    pub async fn end(self) -> Option<Host<Watch>> {
        self.cut.notify_one();
        self.task.await.ok().flatten()
    }
}

/// What a host holds that it does not need, or lacks, or holds otherwise than it should be; `None`: it is right.
pub fn judge(host: &Host<Watch>, id: &HostId, desired: &impl Documents) -> Option<String> {
    let wanted = needed(id, desired);
    let reader = host.reader();
    let held: std::collections::BTreeSet<Topic> = reader.documents().map(|(topic, _)| topic.clone()).collect();
    if let Some(topic) = held.difference(&wanted).next() {
        return Some(format!("host {id} holds {topic}, which it does not need"));
    }
    if let Some(topic) = wanted.difference(&held).next() {
        return Some(format!("host {id} lacks {topic}"));
    }
    let absent = Document::absent();
    for (topic, document) in reader.documents() {
        let right = desired.document(topic).unwrap_or(&absent);
        if document.digest() != right.digest() {
            return Some(format!(
                "host {id} holds another {topic} (revision {:?}) than a compile from scratch gives",
                reader.revision(topic)
            ));
        }
    }
    None
}
