//! Many hosts on one server, and the moment the last of them is there.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::server::Server;
use groupcast_topics::reader::Incident;
use tokio::sync::Notify;

use crate::lean::{ConnectOptions, Connection};

/// Connections being set up at one time: more would only queue in the server's listener.
const CONNECTING_MAX: usize = 64;

/// Descriptors beside the hosts' own: the controller, the server's pipes, the runtime.
const OTHER_DESCRIPTORS: usize = 64;

/// After this time a host that is not there counts as lost, and the benchmark ends.
const LOST_AFTER: Duration = Duration::from_secs(60);

/// Connects `count` hosts.
pub async fn connect(address: SocketAddr, count: usize) -> anyhow::Result<Vec<Connection>> {
    let needed = (count + OTHER_DESCRIPTORS) as u64;
    let allowed = rlimit::increase_nofile_limit(needed).context("reading the limit of open files")?;
    ensure!(allowed >= needed, "{count} hosts need {needed} open files and only {allowed} are allowed: raise `ulimit -n`");
    super::say(format_args!("connecting {count} hosts"));
    futures::stream::iter(0..count)
        .map(|number| async move {
            let options = ConnectOptions { name: format!("host-{number:05}"), ..Default::default() };
            Connection::connect(address, &options).await
        })
        .buffered(CONNECTING_MAX)
        .try_collect()
        .await
        .context("connecting the hosts")
}

/// What hosts had to repair, by kind. Anything here makes the measurement one of something else, so it is said.
#[derive(Debug, Default)]
pub struct Incidents(Mutex<BTreeMap<String, usize>>);

impl Incidents {
    pub fn add(&self, incident: &Incident) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(format!("{incident:?}")).or_default() += 1;
    }

    pub fn say(&self) {
        for (incident, count) in std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)) {
            super::say(format_args!("{count} times: {incident}"));
        }
    }
}

/// Processor time of this process and the server's so far: on a shared machine it says more than the clock.
pub fn cpu(server: &Server) -> Duration {
    cpu_of(std::process::id()).unwrap_or_default() + server.pid().and_then(cpu_of).unwrap_or_default()
}

/// Processor time of one process so far.
pub fn cpu_of(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; the two times are the 12th and 13th word after it.
    let mut words = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let ticks = words.next()?.parse::<u64>().ok()? + words.next()?.parse::<u64>().ok()?;
    // Linux counts processor time for user space in hundredths of a second on every platform.
    Some(Duration::from_millis(ticks * 10))
}

/// Counts arrivals and keeps the time of the last.
#[derive(Debug, Default)]
pub struct Finish {
    expected: AtomicUsize,
    arrived: AtomicUsize,
    at: Mutex<Option<Instant>>,
    done: Notify,
}

impl Finish {
    /// Begins a new round. Arrivals of the round before must be over.
    pub fn expect(&self, count: usize) {
        self.arrived.store(0, Ordering::Relaxed);
        self.expected.store(count, Ordering::Release);
    }

    pub fn arrive(&self) {
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.expected.load(Ordering::Acquire) {
            *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            self.done.notify_one();
        }
    }

    /// When the last one arrived.
    pub async fn wait(&self) -> anyhow::Result<Instant> {
        let waited = tokio::time::timeout(LOST_AFTER, self.done.notified()).await;
        let (arrived, expected) = (self.arrived.load(Ordering::Acquire), self.expected.load(Ordering::Acquire));
        ensure!(waited.is_ok(), "only {arrived} of {expected} hosts arrived within {} s", LOST_AFTER.as_secs());
        self.at.lock().unwrap_or_else(PoisonError::into_inner).take().context("the last arrival has a time")
    }
}
