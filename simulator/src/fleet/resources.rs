//! What the server and the controllers use while a run goes on, and its progress on the terminal.

use std::io::{IsTerminal, Write as _};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;

use super::faults::Processes;
use super::load::Desk;
use super::marks::Second;
use super::scenario::FaultKind;
use crate::bench::say;

/// What the terminal shows beside figures: the phase, and the faults in force.
#[derive(Debug, Clone, Default)]
pub struct InForce(Arc<std::sync::Mutex<(String, Vec<FaultKind>)>>);

/// A fault is in force as long as this is there.
pub struct Shown(InForce, FaultKind);

impl InForce {
    fn with<R>(&self, look: impl FnOnce(&mut (String, Vec<FaultKind>)) -> R) -> R {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn say(&self, phase: &str) {
        self.with(|(held, _)| *held = phase.to_owned());
    }

    pub fn begin(&self, kind: FaultKind) -> Shown {
        say(format_args!("fault: {}", kind.name()));
        self.with(|(_, faults)| faults.push(kind));
        Shown(self.clone(), kind)
    }

    fn words(&self) -> String {
        self.with(|(phase, faults)| {
            let names: Vec<&str> = faults.iter().map(|kind| kind.name()).collect();
            if names.is_empty() { phase.clone() } else { format!("{phase}: {}", names.join(", ")) }
        })
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.0.with(|(_, faults)| {
            if let Some(at) = faults.iter().position(|kind| *kind == self.1) {
                faults.remove(at);
            }
        });
    }
}

#[derive(Debug, Clone, Default)]
pub struct Sample {
    pub second: Second,
    pub connected: u32,
    pub server_mb: f64,
    pub server_cpu: f64,
    pub controller_mb: f64,
    pub controller_cpu: f64,
    pub own_mb: f64,
    pub own_cpu: f64,
}

pub struct Sampler {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    pub async fn end(self) -> anyhow::Result<Vec<Sample>> {
        let _ = self.stop.send(());
        Ok(self.task.await?)
    }
}

/// Resident memory in MB and processor time in seconds.
fn usage(pid: u32) -> (f64, f64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse::<f64>().ok());
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let ticks = stat.rsplit_once(')').map(|(_, rest)| {
        let words = rest.split_ascii_whitespace().skip(11).take(2);
        words.filter_map(|word| word.parse::<f64>().ok()).sum::<f64>()
    });
    (kib.unwrap_or(0.0) / 1024.0, ticks.unwrap_or(0.0) / 100.0)
}

pub fn sample(processes: Arc<Mutex<Processes>>, desk: Arc<Desk>, in_force: InForce, every: Duration) -> Sampler {
    let (stop, mut stopped) = oneshot::channel();
    let task = tokio::spawn(async move {
        let mut samples: Vec<Sample> = Vec::new();
        let (mut server_before, mut controllers_before, mut own_before, mut accepted_before) = (0.0, 0.0, 0.0, 0);
        let mut ticks = tokio::time::interval(every);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                _ = &mut stopped => return samples,
            }
            let (server, controllers) = {
                let processes = processes.lock().await;
                let pids: Vec<u32> = processes.controllers.iter().map(|process| process.pid()).collect();
                (processes.server.pid(), pids)
            };
            let (server_mb, server_s) = server.map_or((0.0, 0.0), usage);
            let all: Vec<(f64, f64)> = controllers.into_iter().map(usage).collect();
            let controller_mb = all.iter().map(|(mb, _)| *mb).fold(0.0, f64::max);
            let controllers_s: f64 = all.iter().map(|(_, s)| *s).sum();
            let accepted = desk.accepted.load(Ordering::Relaxed);
            let (own_mb, own_s) = usage(std::process::id());
            let second = desk.shared.marks.second(accepted - accepted_before, desk.lag_ms());
            // A process that was replaced begins at nothing.
            let cpu = |now: f64, before: f64| ((now - before) / every.as_secs_f64() * 100.0).max(0.0);
            let sample = Sample {
                connected: desk.shared.connected.load(Ordering::Relaxed),
                server_mb,
                server_cpu: cpu(server_s, server_before),
                controller_mb,
                controller_cpu: cpu(controllers_s, controllers_before),
                own_mb,
                own_cpu: cpu(own_s, own_before),
                second,
            };
            (server_before, controllers_before, own_before, accepted_before) = (server_s, controllers_s, own_s, accepted);
            if samples.is_empty() {
                // The first has nothing before it to be compared with.
                samples.push(Sample { server_cpu: 0.0, controller_cpu: 0.0, own_cpu: 0.0, ..sample });
                continue;
            }
            show(&sample, &in_force.words());
            samples.push(sample);
        }
    });
    Sampler { stop, task }
}

/// One line that is written over again and again, on a terminal only.
fn show(sample: &Sample, words: &str) {
    let mut terminal = std::io::stderr();
    if !terminal.is_terminal() {
        return;
    }
    let Second { at_s, changes, p50_ms, p99_ms, lag_ms, .. } = &sample.second;
    let line = format!(
        "{at_s:5.0} s  {changes:5} changes/s  enforced p50 {p50_ms:6.1} p99 {p99_ms:6.1} ms  lag {lag_ms:6.0} ms  {:5} connected  \
         server {:.0} MB {:.0} %  controller {:.0} MB {:.0} %  {words}",
        sample.connected, sample.server_mb, sample.server_cpu, sample.controller_mb, sample.controller_cpu
    );
    // Back to the beginning of the line, and whatever was longer before is wiped.
    let _ = write!(terminal, "\r{line}\x1b[K"); // nobody looks, nobody minds
}
