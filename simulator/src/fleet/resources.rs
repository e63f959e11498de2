//! What the server and the controllers use while a run goes on, and its progress on the terminal.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;

use super::faults::Processes;
use super::load::Desk;
use super::marks::Second;
use crate::bench::say;

#[derive(Debug, Clone, Default)]
pub struct Sample {
    pub second: Second,
    pub connected: u32,
    pub server_mb: f64,
    pub server_cpu: f64,
    pub controller_mb: f64,
    pub controller_cpu: f64,
    pub own_mb: f64,
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

pub fn sample(processes: Arc<Mutex<Processes>>, desk: Arc<Desk>, every: Duration) -> Sampler {
    let (stop, mut stopped) = oneshot::channel();
    let task = tokio::spawn(async move {
        let mut samples: Vec<Sample> = Vec::new();
        let (mut server_before, mut controllers_before, mut accepted_before) = (0.0, 0.0, 0);
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
            let second = desk.marks.marks.second(accepted - accepted_before);
            // A process that was replaced begins at nothing.
            let cpu = |now: f64, before: f64| ((now - before) / every.as_secs_f64() * 100.0).max(0.0);
            let sample = Sample {
                connected: desk.marks.connected.load(Ordering::Relaxed),
                server_mb,
                server_cpu: cpu(server_s, server_before),
                controller_mb,
                controller_cpu: cpu(controllers_s, controllers_before),
                own_mb: usage(std::process::id()).0,
                second,
            };
            (server_before, controllers_before, accepted_before) = (server_s, controllers_s, accepted);
            if samples.is_empty() {
                // The first has nothing before it to be compared with.
                samples.push(Sample { server_cpu: 0.0, controller_cpu: 0.0, ..sample });
                continue;
            }
            if std::io::stderr().is_terminal() {
                say(format_args!(
                    "{:6.1} s  {:6} changes/s  enforced p50 {:7.1} ms  p99 {:7.1} ms  {:6} connected  server {:.0} MB  controller {:.0} MB",
                    sample.second.at_s,
                    sample.second.changes,
                    sample.second.p50_ms,
                    sample.second.p99_ms,
                    sample.connected,
                    sample.server_mb,
                    sample.controller_mb
                ));
            }
            samples.push(sample);
        }
    });
    Sampler { stop, task }
}
