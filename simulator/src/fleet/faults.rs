//! What goes wrong while a scenario runs: real processes are killed and stopped, real connections cut, and hosts kept from theirs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::StreamExt;
use groupcast_bus_config::server::Server;
use groupcast_bus_config::{streams, subjects};
use groupcast_messages::{Companions, Delta, Lead};
use groupcast_policy::doc::{Digest, Edit};
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;
use groupcast_topics::reader::Reader;
use tokio::sync::{Mutex, watch};

use super::agents::Agents;
use super::judge;
use super::load::Desk;
use super::member::Member;
use super::outside::Source;
use super::scenario::{Fault, FaultKind};
use super::topology::MARKS;
use super::trouble::Kind;
use crate::bench::process::Process;
use crate::bench::say;
use crate::random::Random;

/// How long hosts may take to be back after a fault before that is a violation.
pub const BACK_WITHIN: Duration = Duration::from_secs(120);
/// A controller that was told to end has handed over long before.
const ENDED_WITHIN: Duration = Duration::from_secs(30);
/// Groups that a deposed leader publishes, each time.
const STALE_GROUPS: usize = 20;
/// A sequence that none of a stream's has, and below that of the next life.
const STALE_AHEAD: u64 = 1 << 30;

/// The processes that can be hurt.
pub struct Processes {
    pub server: Server,
    pub controllers: Vec<Process>,
    started: usize,
    binary: Option<PathBuf>,
    lease_ms: u32,
    arguments: Vec<String>,
}

impl Processes {
    /// `arguments`: more for the command line of each controller.
    pub fn new(server: Server, binary: Option<PathBuf>, lease: Duration, arguments: Vec<String>) -> Self {
        let lease_ms = lease.as_millis().min(60_000) as u32;
        Self { server, controllers: Vec::new(), started: 0, binary, lease_ms, arguments }
    }

    pub fn add_controller(&mut self) -> anyhow::Result<()> {
        self.started += 1;
        let (name, url) = (format!("c{}", self.started), self.server.url());
        let more: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        self.controllers.push(Process::start_with(self.binary.as_deref(), &url, name, self.lease_ms, &more)?);
        Ok(())
    }

    fn position(&self, leader: &str, leads: bool) -> Option<usize> {
        self.controllers.iter().position(|process| (process.name == leader) == leads)
    }
}

#[derive(Debug, Clone, Default)]
pub struct Leader {
    pub name: String,
    pub term: u64,
    /// The term since which the stream lives.
    pub since: u64,
    /// Where its term began in the stream.
    pub sequence: u64,
}

/// Who leads, and under which term, as the lead messages say.
pub async fn follow_leader(client: async_nats::Client) -> anyhow::Result<watch::Receiver<Leader>> {
    let mut leads = client.subscribe(subjects::LEAD_READ).await?;
    let (told, leader) = watch::channel(Leader::default());
    tokio::spawn(async move {
        while let Some(message) = leads.next().await {
            let sequence = message.headers.as_ref().and_then(|headers| headers.get("Nats-Sequence")?.as_str().parse().ok());
            if let (Ok(lead), Some(sequence)) = (Lead::decode(&message.payload), sequence)
                && told.borrow().term < lead.term
                && told.send(Leader { name: lead.leader, term: lead.term, since: lead.since, sequence }).is_err()
            {
                return;
            }
        }
    });
    Ok(leader)
}

/// One fault that is in force or over.
#[derive(Debug, Clone)]
pub struct Happened {
    pub kind: FaultKind,
    pub from_s: f64,
    pub to_s: f64,
    /// Where hosts were cut off: from its end until every host had what was written by the time that all of them were reached again. Not what
    /// was written by its end: a host has that already if nothing was written while it was away.
    pub back_ms: Option<f64>,
}

pub struct Hurting {
    pub processes: Arc<Mutex<Processes>>,
    pub members: Arc<Vec<Member>>,
    pub agents: Arc<Mutex<Agents>>,
    pub source: Option<Arc<Source>>,
    pub desk: Arc<Desk>,
    pub client: async_nats::Client,
    pub leader: watch::Receiver<Leader>,
    pub seed: u64,
}

impl Hurting {
    /// Carries out one fault, until it is over and everybody has recovered from it.
    pub async fn hurt(&self, fault: &Fault) -> anyhow::Result<Happened> {
        let from_s = self.desk.shared.marks.now_s();
        self.carry_out(fault).await?;
        let to_s = self.desk.shared.marks.now_s();
        let back_ms = if fault.kind.cuts_off() { self.everybody_back(fault).await } else { None };
        Ok(Happened { kind: fault.kind, from_s, to_s, back_ms })
    }

    async fn everybody_back(&self, fault: &Fault) -> Option<f64> {
        let begun = Instant::now();
        let reached = self.until_all_have_what_is_written().await;
        let caught_up = match reached {
            Ok(()) => self.until_all_have_what_is_written().await,
            Err(said) => Err(said),
        };
        match caught_up {
            Ok(()) => Some(begun.elapsed().as_secs_f64() * 1e3),
            Err(said) => {
                let (name, count) = (fault.kind.name(), said.len());
                let first = said.into_iter().next().unwrap_or_default();
                let words = format!("{count} hosts are not back {BACK_WITHIN:?} after {name}; {first}");
                self.desk.shared.violated(words);
                None
            }
        }
    }

    /// What is written when this is called, in the life of the stream that is the present one by then; or what each host that lacks some of
    /// it says. It may hold all that is written and yet follow nothing: where nothing was written meanwhile, only the life tells.
    async fn until_all_have_what_is_written(&self) -> Result<(), Vec<String>> {
        let (world, versions) = (Arc::clone(&self.desk.world), Arc::new(self.desk.versions()));
        let leader = self.leader.clone();
        let caught_up = move |number: usize, reader: &Reader| {
            let since = leader.borrow().since;
            judge::is_of_an_earlier_life(since, reader).or_else(|| judge::has_caught_up(&world, &versions, number, reader))
        };
        judge::until_nothing_is_said(&self.members, BACK_WITHIN, caught_up).await.map(drop)
    }

    async fn carry_out(&self, fault: &Fault) -> anyhow::Result<()> {
        let leader = self.leader.borrow().name.clone();
        match fault.kind {
            FaultKind::KillLeader | FaultKind::KillFollower => {
                let mut processes = self.processes.lock().await;
                if let Some(at) = processes.position(&leader, fault.kind == FaultKind::KillLeader) {
                    let mut killed = processes.controllers.remove(at);
                    killed.kill()?;
                }
                drop(processes);
                tokio::time::sleep(fault.lasts).await;
                self.processes.lock().await.add_controller()?;
            }
            FaultKind::PauseLeader => {
                let pid = {
                    let processes = self.processes.lock().await;
                    processes.position(&leader, true).map(|at| processes.controllers[at].pid())
                };
                if let Some(pid) = pid {
                    signal(pid, nix::sys::signal::Signal::SIGSTOP)?;
                    tokio::time::sleep(fault.lasts).await;
                    signal(pid, nix::sys::signal::Signal::SIGCONT)?;
                }
            }
            FaultKind::RollControllers => self.roll(fault.lasts).await?,
            FaultKind::KillServer => {
                self.processes.lock().await.server.kill();
                tokio::time::sleep(fault.lasts).await;
                self.processes.lock().await.server.restart().await.context("the server does not start again")?;
            }
            FaultKind::RestartServer => {
                self.processes.lock().await.server.stop().await?;
                tokio::time::sleep(fault.lasts).await;
                self.processes.lock().await.server.restart().await.context("the server does not start again")?;
            }
            FaultKind::PauseServer => {
                self.processes.lock().await.server.pause()?;
                tokio::time::sleep(fault.lasts).await;
                self.processes.lock().await.server.resume()?;
            }
            FaultKind::CutHosts => {
                self.chosen(fault).for_each(Member::cut);
                tokio::time::sleep(fault.lasts).await;
            }
            FaultKind::CrashHosts => {
                self.chosen(fault).for_each(Member::crash);
                self.agents.lock().await.crash_all()?;
                tokio::time::sleep(fault.lasts).await;
            }
            FaultKind::PauseHosts => self.trouble(fault, Kind::Silent).await?,
            FaultKind::PartitionHosts => self.trouble(fault, Kind::Silent).await?,
            FaultKind::SlowHosts => self.trouble(fault, Kind::Unread).await?,
            FaultKind::DelayHosts => self.trouble(fault, Kind::Late(fault.delay)).await?,
            FaultKind::LoseDeliveries => self.trouble(fault, Kind::Lossy(fault.loss)).await?,
            FaultKind::StaleLeader => self.publish_as_deposed(fault).await?,
            FaultKind::DeployWave => {
                let hosts: Vec<usize> = self.chosen(fault).map(|member| member.number).collect();
                self.desk.deploy_all(hosts).await?;
            }
            FaultKind::SourceOutage => {
                if let Some(source) = &self.source {
                    source.fail(true).await?;
                    tokio::time::sleep(fault.lasts).await;
                    source.fail(false).await?;
                }
            }
        }
        Ok(())
    }

    fn chosen(&self, fault: &Fault) -> impl Iterator<Item = &Member> {
        let mut random = Random::new(self.seed ^ fault.at.as_millis() as u64);
        let percent = u64::from(fault.percent);
        self.members.iter().filter(move |_| random.next() % 100 < percent)
    }

    /// Simulated hosts by schedule, real ones by signal and netem.
    async fn trouble(&self, fault: &Fault, kind: Kind) -> anyhow::Result<()> {
        let until_ms = (self.desk.shared.marks.now_s() * 1e3 + fault.lasts.as_secs_f64() * 1e3) as u64;
        self.chosen(fault).for_each(|member| member.trouble.begin(kind, until_ms));
        self.agents.lock().await.trouble(fault.kind, fault)?;
        tokio::time::sleep(fault.lasts).await;
        self.agents.lock().await.end_trouble(fault.kind)
    }

    /// One after the other, as in an upgrade.
    async fn roll(&self, pause: Duration) -> anyhow::Result<()> {
        let names: Vec<String> = self.processes.lock().await.controllers.iter().map(|process| process.name.clone()).collect();
        for name in names {
            let mut processes = self.processes.lock().await;
            let Some(at) = processes.position(&name, true) else { continue };
            let mut old = processes.controllers.remove(at);
            processes.add_controller()?;
            drop(processes);
            old.terminate()?;
            let begun = Instant::now();
            while !old.has_ended()? {
                if begun.elapsed() > ENDED_WITHIN {
                    self.desk.shared.violated(format!("controller {name} does not end within {ENDED_WITHIN:?} when told to"));
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Deltas of an earlier term with a version that nobody wrote, past the stream: as whoever does not know that he was deposed would
    /// have them, if nothing but the readers stood in the way.
    async fn publish_as_deposed(&self, fault: &Fault) -> anyhow::Result<()> {
        let mut random = Random::new(self.seed ^ fault.at.as_millis() as u64 ^ 0x57a1e);
        let Leader { term, sequence: begun, .. } = self.leader.borrow().clone();
        if term < 2 {
            say("stale-leader: nobody was deposed so far");
            return Ok(());
        }
        for number in 0..STALE_GROUPS {
            let group = random.next() as usize % self.desk.world.groups.len();
            let topic = Topic::Members(self.desk.world.groups[group].clone());
            let forged = Prefix::v4(MARKS + super::topology::MARKS_MAX - number as u32, 32).context("an address")?;
            let delta = Delta {
                term: term - 1,
                change: 1,
                position: 1,
                edit: Edit::Members { add: vec![forged], remove: Vec::new() },
                digest: Digest(7),
                companions: Companions::NONE,
                tally: None,
                spread_ms: 0,
            };
            // Not counted from the term since which the stream lives: a leader that goes on with what another began to fill
            // finds that one's sequences, and a forgery in another life than theirs is refused for that.
            let sequence = begun + STALE_AHEAD + number as u64;
            let mut headers = async_nats::HeaderMap::new();
            headers.insert("Nats-Stream", streams::TOPICS.name);
            headers.insert("Nats-Subject", subjects::write(&topic).as_str());
            headers.insert("Nats-Sequence", sequence.to_string().as_str());
            headers.insert("Nats-Last-Sequence", "1");
            let payload = delta.encode().into();
            self.client.publish_with_headers(subjects::read(&topic), headers, payload).await?;
        }
        Ok(self.client.flush().await?)
    }
}

pub fn signal(pid: u32, signal: nix::sys::signal::Signal) -> anyhow::Result<()> {
    Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(pid)?), signal)?)
}
