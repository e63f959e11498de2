//! Writes what several want to write in one batch, where that is possible: a batch costs the bus the same for one host as for forty,
//! and ten thousand hosts may enrol at once. Nobody waits for company: what comes while a batch is on its way goes with the next.
//!
//! A batch is all or nothing, so one whose entry is another by now spoils it for all: it is written again in halves, until whoever
//! it was stands alone.

use std::collections::{HashSet, VecDeque};

use tokio::sync::{mpsc, oneshot};

use crate::log::{Log, Outcome, Outgoing};

/// Messages written together, unless one writer alone has more. What is written together is also published together, so it is kept
/// far below what one batch may hold.
pub const TOGETHER_MAX: usize = 512;
/// Writers that may wait; further ones wait before that.
const WAITING_MAX: usize = 256;

struct Job<T> {
    messages: Vec<Outgoing>,
    done: T,
}

type Waiting = Job<oneshot::Sender<Outcome>>;

/// Those of the waiting that can go together, in order: nobody overtakes whoever wants the same subject.
fn gather<T>(waiting: &mut VecDeque<Job<T>>, messages_max: usize) -> Vec<Job<T>> {
    let (mut together, mut rest, mut count) = (Vec::new(), VecDeque::new(), 0);
    let mut subjects: HashSet<String> = HashSet::new();
    for job in waiting.drain(..) {
        let fits = together.is_empty() || count + job.messages.len() <= messages_max;
        let is_free = !job.messages.iter().any(|message| subjects.contains(&message.subject));
        subjects.extend(job.messages.iter().map(|message| message.subject.clone()));
        if fits && is_free {
            count += job.messages.len();
            together.push(job);
        } else {
            rest.push_back(job);
        }
    }
    *waiting = rest;
    together
}

#[derive(Clone)]
pub struct Scribe {
    jobs: mpsc::Sender<Waiting>,
}

impl Scribe {
    /// Works on this runtime for as long as anybody holds it.
    pub fn start(log: Log, runtime: &tokio::runtime::Handle) -> Self {
        let (jobs, waiting) = mpsc::channel(WAITING_MAX);
        runtime.spawn(work(log, waiting));
        Self { jobs }
    }

    pub async fn write(&self, messages: Vec<Outgoing>) -> Outcome {
        let (done, outcome) = oneshot::channel();
        let gone = || Outcome::Unknown("the process ends".to_owned());
        if self.jobs.send(Job { messages, done }).await.is_err() {
            return gone();
        }
        outcome.await.unwrap_or_else(|_| gone())
    }
}

async fn work(log: Log, mut jobs: mpsc::Receiver<Waiting>) {
    let mut waiting = VecDeque::new();
    loop {
        if waiting.is_empty() {
            match jobs.recv().await {
                Some(job) => waiting.push_back(job),
                None => return,
            }
        }
        while waiting.len() < WAITING_MAX
            && let Ok(job) = jobs.try_recv()
        {
            waiting.push_back(job);
        }
        write(&log, gather(&mut waiting, TOGETHER_MAX)).await;
    }
}

/// In one batch; if that fails for one of them, in halves.
async fn write(log: &Log, together: Vec<Waiting>) {
    let mut parts = vec![together];
    while let Some(mut part) = parts.pop() {
        let mut messages = Vec::with_capacity(part.iter().map(|job| job.messages.len()).sum());
        match part.len() {
            0 => continue,
            1 => messages.append(&mut part[0].messages),
            _ => messages.extend(part.iter().flat_map(|job| job.messages.iter().cloned())),
        }
        let outcome = log.write(&messages).await;
        if part.len() > 1 && matches!(outcome, Outcome::Conflict | Outcome::Refused(_)) {
            let second = part.split_off(part.len() / 2);
            parts.extend([second, part]);
            continue;
        }
        for job in part {
            // Whoever asked may have given up.
            let _ = job.done.send(outcome.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &'static str, subjects: &[&str]) -> Job<&'static str> {
        let message = |subject: &&str| Outgoing {
            subject: (*subject).to_owned(),
            headers: Default::default(),
            expected: 0,
            payload: vec![],
        };
        Job { messages: subjects.iter().map(message).collect(), done: name }
    }

    fn rounds(jobs: Vec<Job<&'static str>>, messages_max: usize) -> Vec<Vec<&'static str>> {
        let mut waiting = VecDeque::from(jobs);
        let mut rounds = Vec::new();
        while !waiting.is_empty() {
            rounds.push(gather(&mut waiting, messages_max).into_iter().map(|job| job.done).collect());
        }
        rounds
    }

    #[test]
    fn those_go_together_who_want_different_subjects_and_nobody_is_overtaken() {
        let jobs = vec![job("a", &["1", "2"]), job("b", &["2", "3"]), job("c", &["4"]), job("d", &["3"]), job("e", &["5"])];
        assert_eq!(rounds(jobs, 100), [vec!["a", "c", "e"], vec!["b"], vec!["d"]], "d waits for b, which waits for a");
    }

    #[test]
    fn a_batch_is_bounded_and_one_alone_may_be_larger() {
        let jobs = || vec![job("a", &["1", "2"]), job("b", &["3"]), job("c", &["4", "5"]), job("d", &["6"])];
        assert_eq!(rounds(jobs(), 3), [vec!["a", "b"], vec!["c", "d"]]);
        assert_eq!(rounds(jobs(), 1), [vec!["a"], vec!["b"], vec!["c"], vec!["d"]]);
    }
}
