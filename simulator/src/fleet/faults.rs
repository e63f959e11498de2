//! What goes wrong while a scenario runs: real processes are killed and stopped, real connections cut.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use groupcast_bus_config::server::Server;
use groupcast_bus_config::subjects;
use groupcast_messages::Lead;
use tokio::sync::{Mutex, watch};

use super::member::{Member, Shared};
use super::scenario::{Fault, FaultKind};
use crate::bench::process::Process;
use crate::random::Random;

/// The processes that can be hurt.
pub struct Processes {
    pub server: Server,
    pub controllers: Vec<Process>,
    started: usize,
    binary: Option<PathBuf>,
    lease_ms: u32,
}

impl Processes {
    pub fn new(server: Server, binary: Option<PathBuf>, lease: Duration) -> Self {
        Self { server, controllers: Vec::new(), started: 0, binary, lease_ms: lease.as_millis().min(60_000) as u32 }
    }

    pub fn add_controller(&mut self) -> anyhow::Result<()> {
        self.started += 1;
        let name = format!("c{}", self.started);
        self.controllers.push(Process::start(self.binary.as_deref(), &self.server.url(), name, self.lease_ms)?);
        Ok(())
    }

    fn position(&self, leader: &str, leads: bool) -> Option<usize> {
        self.controllers.iter().position(|process| (process.name == leader) == leads)
    }
}

/// Who leads, as the lead messages say.
pub async fn follow_leader(client: async_nats::Client) -> anyhow::Result<watch::Receiver<String>> {
    let mut leads = client.subscribe(subjects::LEAD_READ).await?;
    let (told, leader) = watch::channel(String::new());
    tokio::spawn(async move {
        while let Some(message) = leads.next().await {
            if let Ok(lead) = Lead::decode(&message.payload)
                && *told.borrow() != lead.leader
                && told.send(lead.leader).is_err()
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
}

pub struct Hurting {
    pub processes: Arc<Mutex<Processes>>,
    pub members: Arc<Vec<Member>>,
    pub shared: Arc<Shared>,
    pub leader: watch::Receiver<String>,
    pub seed: u64,
}

impl Hurting {
    /// Carries out one fault, until it is over.
    pub async fn hurt(&self, fault: &Fault) -> anyhow::Result<Happened> {
        let from_s = self.shared.marks.now_s();
        match fault.kind {
            FaultKind::KillLeader | FaultKind::KillFollower => {
                let leader = self.leader.borrow().clone();
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
                let leader = self.leader.borrow().clone();
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
            FaultKind::KillServer => {
                self.processes.lock().await.server.kill();
                tokio::time::sleep(fault.lasts).await;
                self.processes.lock().await.server.restart().await.context("the server does not start again")?;
            }
            FaultKind::PauseServer => {
                self.processes.lock().await.server.pause()?;
                tokio::time::sleep(fault.lasts).await;
                self.processes.lock().await.server.resume()?;
            }
            FaultKind::CutHosts => {
                let mut random = Random::new(self.seed ^ fault.at.as_millis() as u64);
                let chosen = self.members.iter().filter(|_| random.next() % 100 < u64::from(fault.percent));
                chosen.for_each(Member::cut);
                tokio::time::sleep(fault.lasts).await;
            }
        }
        Ok(Happened { kind: fault.kind, from_s, to_s: self.shared.marks.now_s() })
    }
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) -> anyhow::Result<()> {
    Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(pid)?), signal)?)
}
