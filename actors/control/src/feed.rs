//! A stream followed to its head, and known to be: a consumer that died is noticed by its missing heartbeats and replaced, and a stream that
//! is another one, or went back, is never taken for the one that was read.
//!
//! A consumer lives in the memory of one server. When that server goes, or is cut off, the consumer's client hears nothing, and nothing is
//! what a quiet stream sounds like. So consumers send a heartbeat, and each second the stream's leader says which stream it is and where it
//! ends. And while the servers elect who leads them, nobody can make a consumer: until there is one, messages are read one by one from the
//! stream's leader, whom that election does not concern.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use async_nats::connection::State;
use async_nats::jetstream::consumer::DeliverPolicy;
use futures::{FutureExt, StreamExt};
use groupcast_bus_config::head::{self, Head};
use tokio::sync::watch;

use crate::log::{Log, NoAnswer};
use crate::registry::TRACE_KEPT;

mod messages;
mod steps;

pub use messages::{Broken, Delivered, HEARTBEAT_EVERY, Messages};
pub(crate) use messages::{consumer, pulled};
pub use steps::Anew;
use steps::{STEPS_MAX, Steps, Stop, anew, counted};

/// How often the stream's leader is asked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long it has to answer.
const LOOKED_WITHIN: Duration = Duration::from_millis(1_500);
/// A consumer that has not delivered what the leader had so long ago reads a copy that is cut off.
pub const BEHIND_MAX: Duration = Duration::from_secs(2);
/// Messages taken at once while more are there.
pub const DRAIN_MAX: usize = 1_024;

/// Whether a stream is followed to its head, and if not since when and why not.
#[derive(Debug, Clone)]
pub struct Health {
    lost: watch::Sender<Option<Lost>>,
    /// When the stream that is followed was made.
    made_at: watch::Sender<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    pub since: Instant,
    pub why: String,
}

impl Lost {
    /// In words, for people.
    pub fn said_of(&self, stream: &str) -> String {
        format!("stream {} is not followed since {} s: {}", stream.to_uppercase(), self.since.elapsed().as_secs(), self.why)
    }
}

impl Default for Health {
    fn default() -> Self {
        let lost = Lost { since: Instant::now(), why: "it was not read yet".to_owned() };
        Self { lost: watch::Sender::new(Some(lost)), made_at: watch::Sender::default() }
    }
}

impl Health {
    /// `None` while all that its leader has is read.
    pub fn lost(&self) -> Option<Lost> {
        self.lost.borrow().clone()
    }

    pub fn watch(&self) -> watch::Receiver<Option<Lost>> {
        self.lost.subscribe()
    }

    /// When the stream was made that is followed, whenever it is another one.
    pub fn streams(&self) -> watch::Receiver<String> {
        self.made_at.subscribe()
    }

    pub fn good(&self) {
        self.lost.send_if_modified(|lost| lost.take().is_some());
    }

    /// Since the first time that was not followed by anything good.
    pub fn is_lost(&self, why: &str) {
        self.lost.send_if_modified(|lost| match lost {
            Some(lost) if lost.why == why => false,
            Some(lost) => {
                lost.why = why.to_owned();
                true
            }
            None => {
                *lost = Some(Lost { since: Instant::now(), why: why.to_owned() });
                true
            }
        });
    }
}

/// What was read last, by which a stream that went back is told from one that did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Seen {
    sequence: u64,
    at: Option<SystemTime>,
}

/// The leader had more than was delivered.
#[derive(Debug, Clone, Copy)]
struct Behind {
    /// Where it ended.
    head: u64,
    /// What was read by then.
    seen: u64,
    since: Instant,
}

/// Where messages come from.
enum Way {
    Consumer(Box<Messages>),
    Steps(Steps),
}

/// A stream, followed.
pub struct Feed {
    log: Log,
    filter: &'static str,
    health: Health,
    made_at: String,
    way: Way,
    connects: u64,
    seen: Seen,
    behind: Option<Behind>,
    look: tokio::time::Interval,
}

impl Feed {
    /// Begins with the last version of everything; also the sequence of the last message there was.
    pub async fn begin(log: Log, filter: &'static str, health: Health) -> Result<(Self, u64), NoAnswer> {
        let head = log.head(LOOKED_WITHIN).await?;
        // After the first answer: a client that was still connecting would take its first connection for another one.
        let connects = log.connects();
        let last = log.last(filter).await?.map_or(0, |entry| entry.sequence);
        let messages = log.follow(filter, DeliverPolicy::LastPerSubject).await?;
        // The consumer is one of the stream that was looked at, unless that was replaced meanwhile.
        let again = log.head(LOOKED_WITHIN).await?;
        if let Some(why) = anew(&head.made_at, last, &again) {
            return Err(log.no_answer(why));
        }
        health.made_at.send_if_modified(|made_at| {
            *made_at != head.made_at && {
                made_at.clone_from(&head.made_at);
                true
            }
        });
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (made_at, way, seen) = (head.made_at, Way::Consumer(Box::new(messages)), Seen::default());
        let feed = Self { log, filter, health, made_at, way, connects, seen, behind: None, look };
        if last == 0 {
            feed.health.good();
        }
        Ok((feed, last))
    }

    /// The next messages, in order; an error says why everything has to be read anew.
    pub async fn next(&mut self) -> Result<Vec<Delivered>, Anew> {
        loop {
            let taken = match &mut self.way {
                Way::Consumer(messages) => {
                    let first = tokio::select! {
                        message = messages.next() => message,
                        _ = self.look.tick() => {
                            self.look().await?;
                            continue;
                        }
                    };
                    self.drain(first)
                }
                Way::Steps(steps) => match steps.next().await {
                    Some(made) => {
                        self.take_up(made).await?;
                        continue;
                    }
                    None => self.step().await?,
                },
            };
            if !taken.is_empty() {
                return Ok(taken);
            }
        }
    }

    /// What a consumer has delivered by now, beginning with this.
    fn drain(&mut self, first: Option<Result<Delivered, Broken>>) -> Vec<Delivered> {
        let Way::Consumer(messages) = &mut self.way else { return Vec::new() };
        let (mut taken, mut next, mut broken) = (Vec::new(), Some(first), None);
        while let Some(message) = next.take() {
            match message {
                // One that was made while messages were read one by one repeats those.
                Some(Ok(message)) if message.entry.sequence <= self.seen.sequence => {}
                Some(Ok(message)) => taken.push(message),
                Some(Err(why)) => broken = Some(why),
                None => broken = Some(Broken::Ended),
            }
            if broken.is_none() && taken.len() < DRAIN_MAX {
                next = messages.next().now_or_never();
            }
        }
        self.saw(&taken);
        if let Some(why) = broken {
            self.interrupted(&why.to_string());
        }
        taken
    }

    fn saw(&mut self, taken: &[Delivered]) {
        if let Some(Delivered { entry, .. }) = taken.last() {
            self.seen = Seen { sequence: entry.sequence, at: Some(entry.at) };
        }
    }

    /// Asks the leader which stream it is and where it ends.
    async fn look(&mut self) -> Result<(), Anew> {
        if self.log.connects() != self.connects {
            self.interrupted("the connection is another one");
            return Ok(());
        }
        let head = match self.log.head(LOOKED_WITHIN).await {
            Ok(head) => head,
            Err(error) => {
                self.health.is_lost(&error.to_string());
                return Ok(());
            }
        };
        if let Some(why) = anew(&self.made_at, self.seen.sequence, &head) {
            return Err(why);
        }
        let seen = self.seen.sequence;
        let last = match head.last_sequence > seen {
            // The last message may be gone by itself.
            true => match self.log.last(self.filter).await {
                Ok(entry) => entry.map_or(0, |entry| entry.sequence),
                Err(error) => {
                    self.health.is_lost(&error.to_string());
                    return Ok(());
                }
            },
            false => 0,
        };
        if last <= seen {
            self.is_at_the_head();
            return Ok(());
        }
        let now = Behind { head: last, seen, since: Instant::now() };
        match self.behind {
            None => self.behind = Some(now),
            // Writers that never rest: what was there at the look before is read.
            Some(behind) if behind.head <= seen => {
                self.behind = Some(now);
                self.health.good();
            }
            // Much takes long; it arrives.
            Some(behind) if behind.seen < seen => self.behind = Some(Behind { head: behind.head, ..now }),
            Some(behind) if behind.since.elapsed() >= BEHIND_MAX => self.interrupted("what its leader has does not arrive"),
            Some(_) => {}
        }
        Ok(())
    }

    fn is_at_the_head(&mut self) {
        self.behind = None;
        self.health.good();
    }

    /// Goes on without a consumer until another is made.
    fn interrupted(&mut self, why: &str) {
        tracing::warn!(stream = self.log.stream(), why, "following is interrupted: making another consumer");
        self.health.is_lost(why);
        self.behind = None;
        self.way = Way::Steps(Steps::new(&self.log, self.filter, self.seen.sequence));
    }

    /// Reads what the leader has; nothing while it does not answer.
    async fn step(&mut self) -> Result<Vec<Delivered>, Anew> {
        let stepped = self.try_step().await;
        let Way::Steps(steps) = &mut self.way else { return Ok(Vec::new()) };
        match stepped {
            Ok(taken) => {
                steps.read(!taken.is_empty());
                self.saw(&taken);
                Ok(taken)
            }
            Err(Stop::Anew(why)) => Err(why),
            Err(Stop::Silent(error)) => {
                self.health.is_lost(&error.to_string());
                // What was removed meanwhile may have left no trace.
                let cut_off = steps.since.elapsed();
                if cut_off > TRACE_KEPT / 2 { Err(Anew::CutOff(cut_off)) } else { Ok(Vec::new()) }
            }
        }
    }

    async fn try_step(&mut self) -> Result<Vec<Delivered>, Stop> {
        let head = self.verified().await?;
        let (mut entries, mut from) = (Vec::new(), self.seen.sequence + 1);
        let mut end = None;
        while head.last_sequence >= from {
            if entries.len() == STEPS_MAX {
                end = self.log.last(self.filter).await?.map(|entry| entry.sequence);
                break;
            }
            let Some(entry) = self.log.next(self.filter, from).await? else { break };
            from = entry.sequence + 1;
            entries.push(entry);
        }
        // What was read is handed on first: whoever counts as being at the head has taken it.
        if entries.is_empty() {
            self.is_at_the_head();
        }
        Ok(counted(entries, end))
    }

    /// Takes up a consumer that was made, or has the next one made.
    async fn take_up(&mut self, made: Result<Messages, NoAnswer>) -> Result<(), Anew> {
        // Afterwards: the consumer is one of the stream that is looked at, or ends with the one that was.
        let judged = match made {
            Ok(messages) => self.verified().await.map(|_| messages),
            Err(error) => Err(Stop::Silent(error)),
        };
        let Way::Steps(steps) = &mut self.way else { return Ok(()) };
        match judged {
            Ok(messages) => {
                tracing::info!(stream = self.log.stream(), "a consumer delivers again");
                self.connects = steps.connects;
                self.way = Way::Consumer(Box::new(messages));
                self.look.reset_immediately();
            }
            Err(Stop::Anew(why)) => return Err(why),
            Err(Stop::Silent(_)) => steps.make(&self.log, self.filter, self.seen.sequence),
        }
        Ok(())
    }

    /// What the leader says of the stream, if that is the one that was followed and goes on where it was left.
    async fn verified(&mut self) -> Result<Head, Stop> {
        if self.log.state() != State::Connected {
            return Err(self.log.no_answer("the connection is lost").into());
        }
        let (connects, seen) = (self.log.connects(), self.seen);
        let head = self.log.head(LOOKED_WITHIN).await?;
        if let Some(why) = anew(&self.made_at, seen.sequence, &head) {
            return Err(why.into());
        }
        let Way::Steps(steps) = &mut self.way else { return Ok(head) };
        if steps.verified != Some(connects) {
            // A stream that went back and on again has other messages at the same places.
            if seen.sequence > 0 && self.log.at(seen.sequence).await?.is_none_or(|entry| Some(entry.at) != seen.at) {
                return Err(Anew::Gone { sequence: seen.sequence }.into());
            }
            steps.verified = Some(connects);
        }
        Ok(head)
    }
}

impl Log {
    /// How often the bus was reached, the first time included.
    fn connects(&self) -> u64 {
        self.client().statistics().connects.load(Ordering::Relaxed)
    }

    fn state(&self) -> State {
        self.client().connection_state()
    }

    /// What the stream's leader says of it.
    async fn head(&self, within: Duration) -> Result<Head, NoAnswer> {
        head::look(self.client(), self.described(), within).await.map_err(|error| self.no_answer(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_lost_since_the_first_time_until_it_is_good() {
        let health = Health::default();
        assert!(health.lost().is_some(), "nothing was read yet");
        health.good();
        assert_eq!(health.lost(), None);
        health.is_lost("a");
        let first = health.lost().unwrap();
        health.is_lost("b");
        let second = health.lost().unwrap();
        assert_eq!((second.since, second.why.as_str()), (first.since, "b"));
    }
}
