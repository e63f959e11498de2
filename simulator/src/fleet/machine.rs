//! The kernel of a simulated host: the real ruleset code on a model, tried with packets after every commit.
//!
//! They are tried before the host handles the next event, not within the commit: all hosts share the processors of one machine, and what
//! one of them tries would otherwise be in the time that the change takes to reach the others.

use std::net::{IpAddr, Ipv4Addr};

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::interface::{Claim, Interface};
use groupcast_enforce::kernel::{Fate, ModelKernel, Packet};
use groupcast_enforce::settings::{Attached, Attachment, Attachments, Settings, Stamp};
use groupcast_messages::Cut;
use groupcast_policy::doc::Document;
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::packet::{Payload, TCP};
use groupcast_policy::resolve::resolve;
use groupcast_policy::rule::Direction;
use groupcast_policy::topic::Topic;
use groupcast_topics::reader::{Commit, Reader};

use super::topology::{OPEN_PORT, World};
use crate::random::Random;

/// Packets tried on a kernel after every commit.
const PROBES: usize = 3;
const INSIDE: &str = "gcw0";
const OUTSIDE: &str = "eth0";

pub struct Machine {
    host: HostId,
    engine: Engine,
    kernel: ModelKernel,
    attachments: Attachments,
    settings: Settings,
    workload: WorkloadId,
    address: Ipv4Addr,
    random: Random,
    /// The process has begun anew: it compares everything with its first commit.
    begun: bool,
    /// Where the commit stands that was not tried yet.
    untried: Option<Cut>,
    /// What passed after the last commit, and passes until the next, whatever befalls the host's connection.
    passing: Vec<Packet>,
}

struct Exposed<'r>(&'r Reader);

impl Documents for Exposed<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.document(topic)
    }
}

impl Machine {
    pub fn new(world: &World, number: usize) -> anyhow::Result<Self> {
        let (host, workload) = (world.hosts[number].clone(), world.workload_id(number)?);
        let attachment = Attachment::Interface(Interface::new(INSIDE)?);
        let attachments: Attachments = [(workload.clone(), Attached { attachment, audit: false })].into_iter().collect();
        let settings = Settings { claims: vec![Claim::new("gcw*")?], ..Settings::default() };
        Ok(Self {
            engine: Engine::new(host.clone(), settings.clone(), attachments.clone(), Stamp::FIRST),
            kernel: ModelKernel::default(),
            attachments,
            settings,
            host,
            workload,
            address: world.address(number),
            random: Random::new(number as u64),
            begun: true,
            untried: None,
            passing: Vec::new(),
        })
    }

    /// The agent has ended and begun anew, and adopts the table that the kernel has kept.
    pub fn adopt(&mut self) {
        let (stamp, table) = (self.engine.stamp(), self.kernel.table.clone());
        self.engine = Engine::adopt(self.host.clone(), self.settings.clone(), self.attachments.clone(), stamp, table);
        self.begun = true;
    }

    /// Puts a commit in force; what is wrong, if something is.
    pub fn commit(&mut self, commit: &Commit, reader: &Reader) -> Result<(), String> {
        let documents = Exposed(reader);
        let plan = if std::mem::take(&mut self.begun) {
            self.engine.compare(&documents)
        } else {
            let mut edits = commit.edits.clone();
            edits.extend(commit.dropped.iter().map(|topic| (topic.clone(), None)));
            self.engine.change(&edits, &documents)
        };
        let refused = |error| format!("the kernel of {} refuses a transaction: {error}", self.host);
        self.kernel.commit(&plan.transaction).map_err(refused)?;
        self.engine.committed(plan);
        self.untried = Some(commit.cut);
        Ok(())
    }

    /// Tries what the last commit put in force, if that was not tried yet; `reader` has not committed anything since.
    pub fn try_out(&mut self, reader: &Reader) -> Result<(), String> {
        let Some(cut) = self.untried.take() else { return Ok(()) };
        let (documents, host) = (Exposed(reader), self.host.clone());
        self.passing.clear();
        let policy = resolve(&host, &documents);
        for _ in 0..PROBES {
            let remote = self.remote(reader);
            let port = if self.random.next().is_multiple_of(4) { OPEN_PORT + 1 } else { OPEN_PORT };
            let payload =
                Payload::Ports { protocol: TCP, source: 40_000 + (self.random.next() % 20_000) as u16, destination: port };
            let [outside, inside] = [OUTSIDE, INSIDE].map(|name| Interface::new(name).unwrap_or(Interface::NONE));
            let packet = Packet::first(outside, inside, remote, IpAddr::V4(self.address), payload);
            let found = self.kernel.send(&packet);
            let allowed = policy.verdict(&self.workload, Direction::Ingress, remote, &payload);
            if (found == Fate::Passed) != allowed {
                return Err(format!(
                    "{host} at {cut:?}: a packet from {remote} to port {port} {found:?}, and its policy says {allowed}"
                ));
            }
            if found == Fate::Passed {
                self.passing.push(packet);
            }
        }
        self.kernel.forget();
        Ok(())
    }

    /// Whether what was allowed still is, and strangers still are not: without a bus, without an agent.
    pub fn still_enforces(&mut self) -> Result<(), String> {
        let host = &self.host;
        for packet in &self.passing {
            if self.kernel.send(packet) != Fate::Passed {
                return Err(format!("{host}: enforcement lapsed: {packet:?} does not pass any more"));
            }
        }
        let [outside, inside] = [OUTSIDE, INSIDE].map(|name| Interface::new(name).unwrap_or(Interface::NONE));
        let payload = Payload::Ports { protocol: TCP, source: 40_000, destination: OPEN_PORT };
        let stranger = Packet::first(outside, inside, stranger(7), IpAddr::V4(self.address), payload);
        if !self.begun && self.kernel.send(&stranger) == Fate::Passed {
            return Err(format!("{host}: enforcement lapsed: a stranger's packet passes"));
        }
        self.kernel.forget();
        Ok(())
    }

    /// Somebody who is a member of something, or nobody's.
    fn remote(&mut self, reader: &Reader) -> IpAddr {
        let stranger = stranger(self.random.next());
        let members: Vec<&Document> =
            reader.documents().filter_map(|(topic, document)| matches!(topic, Topic::Members(_)).then_some(document)).collect();
        if members.is_empty() || self.random.next().is_multiple_of(3) {
            return stranger;
        }
        let document = members[self.random.next() as usize % members.len()];
        // Somewhere between the first and the last, without walking there: a group can be large.
        let v4 = document.members().map(|members| &members.v4);
        let ends = v4.and_then(|v4| Some((v4.min()?, v4.max()?)));
        let somewhere = ends.map(|(first, last)| first + (self.random.next() % (u64::from(last - first) + 1)) as u32);
        let found = v4.zip(somewhere).and_then(|(v4, from)| v4.range(from..).next());
        found.map_or(stranger, |bits| IpAddr::V4(Ipv4Addr::from_bits(bits)))
    }
}

/// An address of no group.
fn stranger(number: u64) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0xc633_6400 + (number % 256) as u32))
}
