//! Changes that wait at the same time share one batch: with a store that flushes before it answers, a batch costs a few flushes and a
//! message alone costs one, so a hundred writers are served many times faster together. Few at a time are written each by itself, which
//! is the fastest for them. Nobody waits for company.
//!
//! A batch is all or nothing, so one change that collides would spoil it for the others: then each is written by itself.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

use crate::log::{CHANGE_END, Log, Outcome, Outgoing};

/// Changes under way each by itself; further ones wait for each other.
pub const ALONE_MAX: usize = 8;
/// Messages of one batch, unless one change alone has more.
pub const MESSAGES_MAX: usize = 512;
/// Topics that what is written together may touch. It is published together, and must fit far below one batch.
pub const WEIGHT_MAX: usize = groupcast_topics::BATCH_MESSAGES_MAX / 4;

/// What a batch costs, counted in messages that are written each by itself. Measured: 2.4 ms against 0.22 ms.
const BATCH_COST: usize = 11;

struct Job {
    messages: Vec<Outgoing>,
    /// How many messages its publication takes, at most.
    weight: usize,
    done: oneshot::Sender<Outcome>,
}

#[derive(Default)]
struct State {
    /// Writes under way, each by itself.
    alone: usize,
    waiting: VecDeque<Job>,
    /// Somebody writes what waits.
    served: bool,
}

#[derive(Clone, Default)]
pub struct Together {
    state: Arc<Mutex<State>>,
}

/// Leaves its place also when its writer is given up.
struct Place<'t>(&'t Together);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.with(|state| state.alone -= 1);
    }
}

/// Those of the waiting that can go together, in order: nobody overtakes whoever wants the same subject.
fn gather(waiting: &mut VecDeque<Job>) -> Vec<Job> {
    let (mut together, mut rest) = (Vec::new(), VecDeque::new());
    let (mut count, mut weight, mut subjects) = (0, 0, HashSet::new());
    for job in waiting.drain(..) {
        let (more, heavier) = (count + job.messages.len(), weight + job.weight);
        let fits = together.is_empty() || more <= MESSAGES_MAX && heavier <= WEIGHT_MAX;
        let is_free = !job.messages.iter().any(|message| subjects.contains(&message.subject));
        subjects.extend(job.messages.iter().map(|message| message.subject.clone()));
        if fits && is_free {
            (count, weight) = (more, heavier);
            together.push(job);
        } else {
            rest.push_back(job);
        }
    }
    *waiting = rest;
    together
}

/// Whether one batch of all costs less than each by itself, which is a batch of its own for a change of several messages.
fn is_worth(together: &[Job]) -> bool {
    let alone = together.iter().map(|job| if job.messages.len() == 1 { 1 } else { BATCH_COST });
    together.len() > 1 && alone.sum::<usize>() > BATCH_COST
}

impl Together {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        // Nothing panics while it holds the lock.
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether what is written now would wait for others.
    pub fn is_busy(&self) -> bool {
        self.with(|state| state.alone >= ALONE_MAX || !state.waiting.is_empty())
    }

    /// Writes the messages of one change, alone or with others; `Committed` tells the sequence of its own last message.
    pub async fn write(&self, log: &Log, messages: Vec<Outgoing>, weight: usize) -> Outcome {
        let is_alone = self.with(|state| {
            let is_alone = state.alone < ALONE_MAX && state.waiting.is_empty();
            state.alone += usize::from(is_alone);
            is_alone
        });
        if is_alone {
            let _place = Place(self);
            return log.write(&messages).await;
        }
        let (done, outcome) = oneshot::channel();
        let begin = self.with(|state| {
            state.waiting.push_back(Job { messages, weight, done });
            !std::mem::replace(&mut state.served, true)
        });
        if begin {
            // A task of its own: whoever waits may give up.
            tokio::spawn(self.clone().serve(log.clone()));
        }
        outcome.await.unwrap_or_else(|_| Outcome::Unknown("the process ends".to_owned()))
    }

    async fn serve(self, log: Log) {
        loop {
            let together = self.with(|state| {
                let together = gather(&mut state.waiting);
                state.served = !together.is_empty();
                together
            });
            if together.is_empty() {
                return;
            }
            write(&log, together).await;
        }
    }
}

async fn write(log: &Log, together: Vec<Job>) {
    if is_worth(&together) {
        let mut messages: Vec<Outgoing> = Vec::with_capacity(together.iter().map(|job| job.messages.len()).sum());
        for job in &together {
            messages.extend(job.messages.iter().cloned());
            if let Some(last) = messages.last_mut() {
                last.headers.insert(CHANGE_END, "1");
            }
        }
        match log.write(&messages).await {
            Outcome::Committed(last) => {
                // The sequences of a batch follow each other.
                let mut end = last - (messages.len() as u64).min(last);
                for job in together {
                    end += job.messages.len() as u64;
                    // Whoever asked may have given up.
                    let _ = job.done.send(Outcome::Committed(end));
                }
                return;
            }
            Outcome::Unknown(why) => {
                together.into_iter().for_each(|job| drop(job.done.send(Outcome::Unknown(why.clone()))));
                return;
            }
            Outcome::Conflict | Outcome::Refused(_) => {}
        }
    }
    let alone = together.into_iter().map(|job| async move {
        let outcome = log.write(&job.messages).await;
        let _ = job.done.send(outcome);
    });
    futures::future::join_all(alone).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(jobs: &[(&[&str], usize)]) -> VecDeque<Job> {
        let message = |subject: &&str| Outgoing {
            subject: (*subject).to_owned(),
            headers: Default::default(),
            expected: 0,
            payload: Vec::new(),
        };
        let job = |(subjects, weight): &(&[&str], usize)| Job {
            messages: subjects.iter().map(message).collect(),
            weight: *weight,
            done: oneshot::channel().0,
        };
        jobs.iter().map(job).collect()
    }

    fn rounds(all: &[(&[&str], usize)]) -> Vec<usize> {
        let mut waiting = jobs(all);
        std::iter::from_fn(|| Some(gather(&mut waiting).len()).filter(|count| *count > 0)).collect()
    }

    #[test]
    fn few_single_messages_are_faster_each_by_itself() {
        let one: (&[&str], usize) = (&["1"], 1);
        let two: (&[&str], usize) = (&["1", "2"], 1);
        let is_worth = |all: &[(&[&str], usize)]| is_worth(jobs(all).make_contiguous());
        assert!(!is_worth(&[one; BATCH_COST]) && is_worth(&[one; BATCH_COST + 1]));
        assert!(!is_worth(&[two]) && is_worth(&[two, one]) && is_worth(&[two, two]));
    }

    #[test]
    fn those_go_together_who_want_different_subjects_and_nobody_is_overtaken() {
        assert_eq!(rounds(&[(&["1", "2"], 1), (&["2", "3"], 1), (&["4"], 1), (&["3"], 1), (&["5"], 1)]), [3, 1, 1]);
    }

    #[test]
    fn what_goes_together_is_bounded_and_one_alone_may_be_more() {
        assert_eq!(rounds(&[(&["1"], WEIGHT_MAX - 1), (&["2"], 1), (&["3"], 1)]), [2, 1]);
        assert_eq!(rounds(&[(&["1"], WEIGHT_MAX + 1), (&["2"], 1)]), [1, 1]);
        let names: Vec<String> = (0..MESSAGES_MAX + 1).map(|number| number.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(rounds(&[(&names[..MESSAGES_MAX], 1), (&["a"], 1)]), [1, 1]);
        assert_eq!(rounds(&[(&names[1..MESSAGES_MAX], 1), (&["a"], 1)]), [2]);
        assert_eq!(rounds(&[(&names, 1), (&["a"], 1)]), [1, 1]);
    }
}
