//! Where a controller hears hosts: a connection of its own, on which nothing else comes. What hosts send too much of piles up here, and if the
//! server gives up on a reader that is so far behind, it closes this connection and not the one on which the leader writes and reads.
//!
//! Each kind is heard by a task of its own that lets through what each host may send: a flood ends there, and not in the queue that is
//! everybody's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::{Client, Message, Subscriber};
use futures::StreamExt;
use groupcast_bus_config::{connect, subjects};
use groupcast_policy::ids::HostId;
use tokio::sync::{mpsc, watch};

use crate::admission::{self, Admission, Rate, Verdict};

/// Messages that were let through and wait.
pub const HEARD_MAX: usize = 4_096;

/// What hosts send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Snapshots,
    Checks,
    Acks,
    Beats,
    Registrations,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Snapshots, Self::Checks, Self::Acks, Self::Beats, Self::Registrations];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Snapshots => "snapshots",
            Self::Checks => "checks",
            Self::Acks => "acknowledgements",
            Self::Beats => "beats",
            Self::Registrations => "registrations",
        }
    }

    const fn rate(self) -> Rate {
        match self {
            Self::Snapshots => admission::SNAPSHOTS,
            Self::Checks => admission::CHECKS,
            Self::Acks => admission::ACKS,
            Self::Beats => admission::BEATS,
            Self::Registrations => admission::REGISTRATIONS,
        }
    }

    /// The subject, and the group of controllers that share what comes there; without one every controller hears all of it.
    const fn subject(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Snapshots => (subjects::SNAP_ALL, Some("snap")),
            Self::Checks => (subjects::ENTROPY_ALL, Some("snap")),
            Self::Acks => (subjects::ACK_ALL, None),
            Self::Beats => (subjects::BEAT_ALL, None),
            Self::Registrations => (subjects::REGISTER_ALL, Some("registrar")),
        }
    }
}

/// A connection that is away for so long is worth a word: one that the server closed is back much sooner.
pub const DEAF_AFTER: Duration = Duration::from_secs(5);

/// How the connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hearing {
    /// Since when it is away.
    pub away: Option<Instant>,
    /// How often something that hosts sent was lost on the way here.
    pub lost: u64,
}

impl Hearing {
    pub fn is_deaf(&self, now: Instant) -> bool {
        self.away.is_some_and(|since| now.saturating_duration_since(since) >= DEAF_AFTER)
    }
}

const HEARS: Hearing = Hearing { away: None, lost: 0 };

/// Messages since the start.
#[derive(Debug, Default)]
struct Tally {
    heard: [AtomicU64; Kind::ALL.len()],
    unheard: [AtomicU64; Kind::ALL.len()],
}

/// How many messages of a kind were heard, and how many were beyond what their hosts may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tallied {
    pub kind: &'static str,
    pub heard: u64,
    pub unheard: u64,
}

#[derive(Debug, Clone)]
pub struct Ears {
    client: Client,
    hearing: watch::Receiver<Hearing>,
    tally: Arc<Tally>,
}

impl Ears {
    /// On a connection that is used for nothing else. Must be called within a runtime.
    pub fn new(client: Client, mut events: connect::Events) -> Self {
        let (sender, hearing) = watch::channel(HEARS);
        tokio::spawn(async move {
            while let Some(event) = events.next().await {
                sender.send_if_modified(|hearing| {
                    let before = *hearing;
                    match event {
                        connect::Event::Connected => hearing.away = None,
                        connect::Event::Disconnected => hearing.away = hearing.away.or_else(|| Some(Instant::now())),
                        connect::Event::SlowConsumer | connect::Event::Missed => hearing.lost += 1,
                        _ => {}
                    }
                    *hearing != before
                });
            }
        });
        Self { client, hearing, tally: Arc::default() }
    }

    /// On a connection whose events somebody else looks at, for worlds in which nobody sends too much.
    pub fn sharing(client: Client) -> Self {
        let (_, hearing) = watch::channel(HEARS);
        Self { client, hearing, tally: Arc::default() }
    }

    pub fn hearing(&self) -> watch::Receiver<Hearing> {
        self.hearing.clone()
    }

    pub fn tallied(&self) -> [Tallied; Kind::ALL.len()] {
        Kind::ALL.map(|kind| {
            let of = |counts: &[AtomicU64; Kind::ALL.len()]| counts[kind as usize].load(Ordering::Relaxed);
            Tallied { kind: kind.name(), heard: of(&self.tally.heard), unheard: of(&self.tally.unheard) }
        })
    }

    /// What hosts send of this kind, within the measure of each. The host is who the subject says: the bus lets it publish under its
    /// own name only. Ends with its reader.
    pub async fn listen(&self, kind: Kind) -> Result<mpsc::Receiver<(HostId, Message)>, async_nats::SubscribeError> {
        let from = match kind.subject() {
            (subject, Some(group)) => self.client.queue_subscribe(subject, group.to_owned()).await?,
            (subject, None) => self.client.subscribe(subject).await?,
        };
        let (sender, receiver) = mpsc::channel(HEARD_MAX);
        tokio::spawn(hear(from, kind, self.tally.clone(), sender));
        Ok(receiver)
    }
}

async fn hear(mut from: Subscriber, kind: Kind, tally: Arc<Tally>, sender: mpsc::Sender<(HostId, Message)>) {
    let (clock, mut admission) = (Instant::now(), Admission::new(kind.rate()));
    loop {
        let message = tokio::select! {
            message = from.next() => message,
            () = sender.closed() => return,
        };
        let Some(message) = message else { return };
        let Some(host) = subjects::host_of(&message.subject) else { continue };
        let now_ms = u64::try_from(clock.elapsed().as_millis()).unwrap_or(u64::MAX);
        let verdict = admission.judge(&host, now_ms);
        let counts = if verdict == Verdict::Heard { &tally.heard } else { &tally.unheard };
        counts[kind as usize].fetch_add(1, Ordering::Relaxed);
        match verdict {
            Verdict::Heard => {
                if sender.send((host, message)).await.is_err() {
                    return;
                }
            }
            Verdict::Unheard { say: None } => {}
            Verdict::Unheard { say: Some(count) } => {
                let (what, at_most_per_second) = (kind.name(), kind.rate().per_second);
                tracing::warn!(%host, what, count, at_most_per_second, "a host sends too much: the rest is not heard");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_is_away_for_long_is_deaf() {
        let now = Instant::now();
        assert!(!HEARS.is_deaf(now));
        let away = Hearing { away: Some(now), lost: 0 };
        assert!(!away.is_deaf(now) && !away.is_deaf(now + DEAF_AFTER - Duration::from_millis(1)));
        assert!(away.is_deaf(now + DEAF_AFTER));
    }

    #[test]
    fn every_kind_is_counted_in_its_own_place() {
        for (place, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place, "{kind:?}");
        }
    }
}
