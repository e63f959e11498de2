//! Real agents among the simulated hosts: processes in network namespaces, real kernels, real packets.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use groupcast_bus_config::lab::{self, Agent, AgentSettings, Lab};
use nix::sys::signal::Signal;

use super::faults::signal;
use super::scenario::{Fault, FaultKind};
use super::topology::{MARKS, OPEN_PORT, World};
use super::watch::Shared;
use crate::bench::say;

/// A connection that is allowed is there by then, also on a machine that is busy; one that is not gets no answer.
const CONNECTS_WITHIN: Duration = Duration::from_secs(3);
const REFUSED_AFTER: Duration = Duration::from_millis(400);
/// Where packets between an agent and the bus are dropped on purpose.
const LOSSY: &str = "groupcast_sim_lossy";

/// None of them, if the scenario has none.
#[derive(Default)]
pub struct Agents {
    lab: Option<Lab>,
    all: Vec<Real>,
    folder: Option<PathBuf>,
}

struct Real {
    number: usize,
    host: String,
    workload: String,
    agent: Agent,
    settings: AgentSettings,
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.all.clear();
        self.lab.take();
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder); // below the folder for temporary files
        }
    }
}

impl Agents {
    pub fn start(world: &World, bus: SocketAddr, binary: Option<PathBuf>) -> anyhow::Result<Self> {
        if world.agents == 0 {
            return Ok(Self::default());
        }
        ensure!(lab::is_allowed(), "real agents need network namespaces: run as root, or with --set agents=0");
        let binary = binary.map_or_else(|| std::env::current_exe().map(|own| own.with_file_name("groupcast-agent")), Ok)?;
        ensure!(binary.exists(), "{} is not there: cargo build --release -p groupcast-host", binary.display());
        let folder = std::env::temp_dir().join(format!("groupcast-fleet-{}", std::process::id()));
        let mut lab = Lab::new(bus)?;
        let mut agents = Self { lab: None, all: Vec::new(), folder: Some(folder.clone()) };
        for number in world.hosts.len() - world.agents..world.hosts.len() {
            let (host, workload) = (world.hosts[number].to_string(), world.workload_id(number)?.to_string());
            let (bus, own) = (lab.host(&host)?.bus.clone(), folder.join(&host));
            let made = lab.workload(&workload, &host)?;
            ensure!(made.address == world.address(number), "the lab gives {workload} another address");
            listen(made.namespace.listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, OPEN_PORT)))?);
            listen(made.namespace.listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, OPEN_PORT + 1)))?);
            let interface = made.interface.clone();
            let settings =
                AgentSettings { binary: binary.clone(), host: host.clone(), bus, credentials: None, folder: own, dry_run: false };
            let namespace = &lab.hosts.get(&host).context("the host that was made")?.namespace;
            let agent = Agent::start(settings.clone(), Some(namespace))?;
            agent.attach(&workload, &interface)?;
            agents.all.push(Real { number, host, workload, agent, settings });
        }
        agents.lab = Some(lab);
        Ok(agents)
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// SIGKILL; others begin in their place.
    pub fn crash_all(&mut self) -> anyhow::Result<()> {
        let Some(lab) = &self.lab else { return Ok(()) };
        for real in &mut self.all {
            real.agent.kill();
            let namespace = &lab.hosts.get(&real.host).context("a host of the lab")?.namespace;
            real.agent = Agent::start(real.settings.clone(), Some(namespace))?;
        }
        Ok(())
    }

    fn inside(&self, program: &str, arguments: &str) -> anyhow::Result<()> {
        let Some(lab) = &self.lab else { return Ok(()) };
        for real in &self.all {
            let namespace = &lab.hosts.get(&real.host).context("a host of the lab")?.namespace;
            namespace.call(program, &arguments.split(' ').collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// What simulated hosts suffer by schedule, these suffer by signals and in their network.
    pub fn trouble(&self, kind: FaultKind, fault: &Fault) -> anyhow::Result<()> {
        match kind {
            FaultKind::PauseHosts | FaultKind::SlowHosts => {
                self.all.iter().try_for_each(|real| signal(real.agent.pid(), Signal::SIGSTOP))
            }
            FaultKind::PartitionHosts => self.lose(100),
            FaultKind::LoseDeliveries => self.lose(fault.loss),
            FaultKind::DelayHosts => {
                let by = format!("qdisc add dev lo root netem delay {}ms", fault.delay.as_millis());
                // Not every kernel can.
                if let Err(error) = self.inside("tc", &by) {
                    say(format_args!("real agents are not delayed: {error}"));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub fn end_trouble(&self, kind: FaultKind) -> anyhow::Result<()> {
        match kind {
            FaultKind::PauseHosts | FaultKind::SlowHosts => {
                self.all.iter().try_for_each(|real| signal(real.agent.pid(), Signal::SIGCONT))
            }
            FaultKind::PartitionHosts | FaultKind::LoseDeliveries => self.inside("nft", &format!("delete table ip {LOSSY}")),
            FaultKind::DelayHosts => {
                let _ = self.inside("tc", "qdisc del dev lo root"); // there is none where the kernel cannot
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Of a hundred packets between an agent and the bus, on the host's own loopback.
    fn lose(&self, percent: u32) -> anyhow::Result<()> {
        self.inside("nft", &format!("add table ip {LOSSY}"))?;
        self.inside("nft", &format!("add chain ip {LOSSY} in {{ type filter hook input priority 0 ; }}"))?;
        // All of them is no share to nft.
        let share = if percent >= 100 { String::new() } else { format!(" numgen random mod 100 < {percent}") };
        self.inside("nft", &format!("add rule ip {LOSSY} in iifname lo meta l4proto tcp{share} drop"))
    }

    /// What passes and must not, or does not and must: between each and the next of them.
    pub fn packets(&self) -> anyhow::Result<Vec<String>> {
        let Some(lab) = &self.lab else { return Ok(Vec::new()) };
        let mut wrong = Vec::new();
        for (at, from) in self.all.iter().enumerate() {
            let to = &self.all[(at + 1) % self.all.len()];
            if from.number == to.number {
                continue;
            }
            for (port, allowed, within) in [(OPEN_PORT, true, CONNECTS_WITHIN), (OPEN_PORT + 1, false, REFUSED_AFTER)] {
                let connected = lab.connect(&from.workload, &to.workload, port, within)?.is_ok();
                if connected != allowed {
                    let (from, to) = (&from.workload, &to.workload);
                    wrong
                        .push(format!("a real connection {from} -> {to} tcp/{port}: {connected}, and its policy says {allowed}"));
                }
            }
        }
        Ok(wrong)
    }

    /// Until the kernel of each holds the last version of every group it needs and nothing else than it should.
    pub fn settled(&self, world: &World, versions: &[u32], within: Duration) -> anyhow::Result<Vec<String>> {
        let begun = Instant::now();
        loop {
            let mut wrong = Vec::new();
            for real in &self.all {
                wrong.extend(real.lacks(world, versions)?);
            }
            if wrong.is_empty() || begun.elapsed() > within {
                return Ok(wrong);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Real {
    fn lacks(&self, world: &World, versions: &[u32]) -> anyhow::Result<Option<String>> {
        let said = self.agent.ask(&["ruleset"])?;
        if said.code != 0 {
            return Ok(Some(format!("real host {} does not hold what it should: {}", self.host, said.stderr.trim())));
        }
        let text = said.stdout;
        let own = (0..world.of_all).chain(world.follows[self.number].iter().map(|group| *group as usize));
        for group in own {
            let address = Ipv4Addr::from_bits(MARKS + versions[group]).to_string();
            if !text.split(|c: char| !(c.is_ascii_digit() || c == '.')).any(|word| word == address) {
                return Ok(Some(format!(
                    "real host {} lacks version {} of group {}",
                    self.host, versions[group], world.groups[group]
                )));
            }
        }
        Ok(None)
    }
}

/// Takes connections and lets them go, until the process ends.
fn listen(listener: std::net::TcpListener) {
    std::thread::spawn(move || listener.incoming().flatten().for_each(drop));
}

/// Tries packets again and again until it is told to stop; whatever is wrong twice in a row is a violation.
pub fn probe(agents: Arc<tokio::sync::Mutex<Agents>>, shared: Arc<Shared>) -> tokio::task::JoinHandle<u64> {
    tokio::spawn(async move {
        let mut rounds = 0;
        let mut before: Vec<String> = Vec::new();
        while !shared.ended.load(std::sync::atomic::Ordering::Relaxed) {
            let held = Arc::clone(&agents).lock_owned().await;
            if held.is_empty() {
                return rounds;
            }
            let found = tokio::task::spawn_blocking(move || held.packets()).await;
            rounds += 1;
            match found {
                Ok(Ok(wrong)) => {
                    // A single one may be the machine's: a packet lost, a thread that waited.
                    let twice = wrong.iter().filter(|words| before.contains(words));
                    twice.for_each(|words| shared.violated(words.clone()));
                    before = wrong;
                }
                Ok(Err(error)) => shared.violated(format!("real packets cannot be tried: {error:#}")),
                Err(error) => shared.violated(format!("real packets cannot be tried: {error}")),
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        rounds
    })
}
