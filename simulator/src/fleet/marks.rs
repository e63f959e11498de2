//! When each change was written and when hosts had it: written by thousands of hosts at once, read once a second.
//!
//! Each version of a group carries an address that no other has, its mark. A host that holds a mark has enforced that change and, of
//! the same group, every one before it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use groupcast_topics::reader::Incident;
use hdrhistogram::Histogram;

/// A minute is more than any change may take; longer ones count as a minute.
const LATENCY_MAX_US: u64 = 60_000_000;

/// One written change.
struct Change {
    /// Nanoseconds after the beginning; 0: not written yet.
    written_ns: AtomicU64,
    arrived: AtomicU32,
    last_ns: AtomicU64,
}

/// What one second showed.
#[derive(Debug, Clone, Default)]
pub struct Second {
    pub at_s: f64,
    pub changes: u64,
    pub arrivals: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    /// How old the oldest change is that some host it concerns does not have.
    pub lag_ms: f64,
}

/// Of deliveries since the last look, and of the phase that is running.
struct Latency {
    recent: Histogram<u64>,
    phase: Histogram<u64>,
}

pub struct Marks {
    begun: Instant,
    changes: Vec<Change>,
    latency: Mutex<Latency>,
    pub deliveries: AtomicU64,
    pub delivered_bytes: AtomicU64,
    /// What hosts had to repair, by kind.
    incidents: Mutex<BTreeMap<&'static str, u64>>,
}

fn histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, LATENCY_MAX_US, 3)?)
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Marks {
    /// For as many changes as will be written at most.
    pub fn new(changes: usize) -> anyhow::Result<Self> {
        Ok(Self {
            begun: Instant::now(),
            changes: (0..changes)
                .map(|_| Change { written_ns: AtomicU64::new(0), arrived: AtomicU32::new(0), last_ns: AtomicU64::new(0) })
                .collect(),
            latency: Mutex::new(Latency { recent: histogram()?, phase: histogram()? }),
            deliveries: AtomicU64::new(0),
            delivered_bytes: AtomicU64::new(0),
            incidents: Mutex::default(),
        })
    }

    pub fn begun(&self) -> Instant {
        self.begun
    }

    pub fn is_written(&self, mark: u32) -> bool {
        self.changes.get(mark as usize).is_some_and(|change| change.written_ns.load(Ordering::Acquire) > 0)
    }

    pub fn incident(&self, incident: &Incident) {
        let kind = match incident {
            Incident::Malformed { .. } => "malformed",
            Incident::Corrupt { .. } => "corrupt",
            Incident::LowerTerm { .. } => "lower_term",
            Incident::Gap { .. } => "gap",
            Incident::Incomplete { .. } => "incomplete",
            Incident::AskTimedOut => "ask_timed_out",
            Incident::AskRefused { .. } => "ask_refused",
            Incident::AnswerRejected { .. } => "answer_rejected",
            Incident::TooManyPending => "too_many_pending",
        };
        *locked(&self.incidents).entry(kind).or_default() += 1;
    }

    pub fn incidents(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.incidents).clone()
    }

    pub fn now_s(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// The change is about to be written.
    pub fn written(&self, mark: u32) {
        if let Some(change) = self.changes.get(mark as usize) {
            change.written_ns.store(self.begun.elapsed().as_nanos().max(1) as u64, Ordering::Release);
        }
    }

    /// A host has it in force.
    pub fn arrived(&self, mark: u32) {
        let now_ns = self.begun.elapsed().as_nanos() as u64;
        let Some(change) = self.changes.get(mark as usize) else { return };
        let written_ns = change.written_ns.load(Ordering::Acquire);
        if written_ns == 0 {
            return;
        }
        change.arrived.fetch_add(1, Ordering::Relaxed);
        change.last_ns.fetch_max(now_ns, Ordering::Relaxed);
        let us = (now_ns.saturating_sub(written_ns) / 1_000).clamp(1, LATENCY_MAX_US);
        let mut latency = locked(&self.latency);
        latency.recent.saturating_record(us);
        latency.phase.saturating_record(us);
    }

    /// How old the change is, if not so many hosts have it.
    pub fn open_ms(&self, mark: u32, hosts: usize) -> Option<f64> {
        let change = self.changes.get(mark as usize)?;
        let written_ns = change.written_ns.load(Ordering::Acquire);
        let open = written_ns > 0 && (change.arrived.load(Ordering::Relaxed) as usize) < hosts;
        open.then(|| (self.begun.elapsed().as_nanos() as u64).saturating_sub(written_ns) as f64 / 1e6)
    }

    /// How long the change took to the last host, if so many have it.
    pub fn last_ms(&self, mark: u32, hosts: usize) -> Option<f64> {
        let change = self.changes.get(mark as usize)?;
        let whole = change.arrived.load(Ordering::Relaxed) as usize >= hosts;
        let took = change.last_ns.load(Ordering::Relaxed).saturating_sub(change.written_ns.load(Ordering::Relaxed));
        whole.then_some(took as f64 / 1e6)
    }

    /// What the last second showed; begins the next.
    pub fn second(&self, changes: u64, lag_ms: f64) -> Second {
        let recent = &mut locked(&self.latency).recent;
        let ms = |us: u64| us as f64 / 1e3;
        let second = Second {
            at_s: self.now_s(),
            changes,
            arrivals: recent.len(),
            p50_ms: ms(recent.value_at_quantile(0.5)),
            p99_ms: ms(recent.value_at_quantile(0.99)),
            max_ms: ms(recent.max()),
            lag_ms,
        };
        recent.reset();
        second
    }

    /// What a phase showed; begins the next.
    pub fn end_phase(&self) -> Histogram<u64> {
        let phase = &mut locked(&self.latency).phase;
        let whole = phase.clone();
        phase.reset();
        whole
    }
}
