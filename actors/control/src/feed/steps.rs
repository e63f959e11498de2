//! Following without a consumer: messages are read one by one from the stream's leader, while another consumer is being made.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::DeliverPolicy;
use groupcast_bus_config::head::Head;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::messages::{Delivered, Messages};
use crate::log::{Entry, Log, NoAnswer};

/// How often the leader is asked for more. Longer than making a consumer takes while the servers have a leader.
const STEP_EVERY: Duration = Duration::from_millis(200);
/// Messages read before they are handed on.
pub(super) const STEPS_MAX: usize = 256;
/// Pause between attempts to make a consumer.
const MAKE_PAUSE: Duration = Duration::from_millis(100);

/// Why everything has to be read anew.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Anew {
    #[error("the stream is another one, made at {made_at}")]
    Another { made_at: String },
    #[error("the stream went back: it ends at {end}, and {seen} was read")]
    WentBack { end: u64, seen: u64 },
    #[error("what was read last, at {sequence}, is not there any more")]
    Gone { sequence: u64 },
    #[error("cut off for {} s", .0.as_secs())]
    CutOff(Duration),
}

/// `None` while this is the stream that was followed, and it goes on where it was left.
pub(super) fn anew(made_at: &str, seen: u64, head: &Head) -> Option<Anew> {
    if head.made_at != made_at {
        return Some(Anew::Another { made_at: head.made_at.clone() });
    }
    (head.last_sequence < seen).then_some(Anew::WentBack { end: head.last_sequence, seen })
}

/// Why nothing was read.
pub(super) enum Stop {
    Anew(Anew),
    Silent(NoAnswer),
}

impl From<Anew> for Stop {
    fn from(why: Anew) -> Self {
        Self::Anew(why)
    }
}

impl From<NoAnswer> for Stop {
    fn from(error: NoAnswer) -> Self {
        Self::Silent(error)
    }
}

/// What is known between two steps.
pub(super) struct Steps {
    /// The last time that the leader had nothing more, or that a consumer delivered.
    pub since: Instant,
    /// The connection on which the stream was seen to be the one that was followed.
    pub verified: Option<u64>,
    /// The connection on which the consumer is asked for.
    pub connects: u64,
    /// The one attempt to make a consumer; it ends with this.
    making: JoinSet<Result<Messages, NoAnswer>>,
    tick: tokio::time::Interval,
}

impl Steps {
    pub fn new(log: &Log, filter: &'static str, seen: u64) -> Self {
        let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + STEP_EVERY, STEP_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (since, making) = (Instant::now(), JoinSet::new());
        let mut steps = Self { since, verified: None, connects: 0, making, tick };
        steps.ask(log, filter, seen, Duration::ZERO);
        steps
    }

    /// Has another consumer made, after a pause.
    pub fn make(&mut self, log: &Log, filter: &'static str, seen: u64) {
        self.ask(log, filter, seen, MAKE_PAUSE);
    }

    fn ask(&mut self, log: &Log, filter: &'static str, seen: u64, after: Duration) {
        let log = log.clone();
        self.connects = log.client().statistics().connects.load(Ordering::Relaxed);
        self.making.spawn(async move {
            tokio::time::sleep(after).await;
            log.follow(filter, DeliverPolicy::ByStartSequence { start_sequence: seen + 1 }).await
        });
    }

    /// What became of the consumer, or `None` when the next step is due.
    pub async fn next(&mut self) -> Option<Result<Messages, NoAnswer>> {
        tokio::select! {
            Some(made) = self.making.join_next() => Some(made.unwrap_or_else(|error| {
                Err(NoAnswer { stream: "consumer", reason: error.to_string() })
            })),
            _ = self.tick.tick() => None,
        }
    }

    /// The leader answered; where something was read there may be more.
    pub fn read(&mut self, something: bool) {
        self.since = Instant::now();
        if something {
            self.tick.reset_immediately();
        }
    }
}

/// How many messages are behind each: those that were read after it, if nothing was left, or at most as many as there are sequences to the end.
/// An estimate that is too high keeps what waits for a hole to close waiting for the end; one that is too low would show what never was.
pub(super) fn counted(entries: Vec<Entry>, end: Option<u64>) -> Vec<Delivered> {
    let count = entries.len() as u64;
    let behind = |index: u64, sequence: u64| match end {
        None => count - 1 - index,
        Some(end) => end.saturating_sub(sequence),
    };
    (0..).zip(entries).map(|(index, entry)| Delivered { pending: behind(index, entry.sequence), entry }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_stream_or_one_that_went_back_is_read_anew() {
        let head = |made_at: &str, last_sequence| Head { made_at: made_at.to_owned(), last_sequence };
        assert_eq!(anew("a", 7, &head("a", 7)), None);
        assert_eq!(anew("a", 7, &head("a", 900)), None);
        assert_eq!(anew("a", 7, &head("a", 6)), Some(Anew::WentBack { end: 6, seen: 7 }));
        // One that was restored may be as long as the one before, or longer.
        for last in [0, 6, 7, 8, 900] {
            let another = Some(Anew::Another { made_at: "b".to_owned() });
            assert_eq!(anew("a", 7, &head("b", last)), another, "{last}");
        }
    }

    #[test]
    fn what_is_behind_a_message_is_counted_or_estimated_from_above() {
        let entries = |sequences: &[u64]| -> Vec<Entry> {
            let entry = |sequence: &u64| Entry {
                subject: String::new(),
                sequence: *sequence,
                headers: async_nats::HeaderMap::new(),
                payload: bytes::Bytes::new(),
                at: std::time::SystemTime::UNIX_EPOCH,
            };
            sequences.iter().map(entry).collect()
        };
        let pending = |sequences: &[u64], end| -> Vec<u64> {
            counted(entries(sequences), end).into_iter().map(|delivered| delivered.pending).collect()
        };
        assert!(pending(&[], None).is_empty());
        assert_eq!(pending(&[3, 7, 8], None), [2, 1, 0], "nothing was left");
        assert_eq!(pending(&[3, 7, 8], Some(20)), [17, 13, 12], "there is more");
        assert_eq!(pending(&[3], Some(2)), [0]);
    }
}
