//! Many hosts on one server, and the moment the last of them is there.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt};
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
