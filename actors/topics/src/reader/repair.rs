//! Asking the snapshot service: one request at a time, after every subscription is in effect, with backoff.

use groupcast_messages::Ask;
use groupcast_policy::doc::Digest;
use groupcast_policy::topic::{Topic, TopicHash};

use super::answer::Assembly;
use super::{Effect, Incident, Reader, Settings};

/// Never ask again sooner than this after a request that did not help.
const ASK_BACKOFF_MIN_MS: u64 = 20;

/// A request is given eight times the usual time at most.
const ASK_TIMEOUT_DOUBLINGS_MAX: u32 = 3;

#[derive(Debug)]
pub(super) struct InFlight {
    pub number: u32,
    pub sent_ms: u64,
    /// In the order of the request; answers refer to it by index.
    pub asked: Vec<Topic>,
    /// What was held of them then, if anything.
    pub digests: Vec<Digest>,
    pub assembly: Assembly,
}

#[derive(Debug, Default)]
pub(super) struct Repair {
    pub in_flight: Option<InFlight>,
    due_ms: Option<u64>,
    last_number: u32,
    /// Requests in a row that did not help.
    failures: u32,
    /// The host was let in, by somebody at this term, and this is about its first request since.
    pub let_in: Option<u64>,
    /// What answers have brought so far and is not installed, because the closure was not followed whole yet.
    pub staged: crate::Map<Topic, super::Held>,
    /// Which revisions answers have given to what is held as it is, by its digest.
    pub renumbered: crate::Map<Topic, (u64, Digest)>,
    /// The highest change among the deltas that answers have brought.
    pub change: u64,
}

impl Repair {
    pub fn cancel(&mut self) {
        self.in_flight = None;
        self.let_in = None;
        self.forget();
    }

    /// Of what is held, or staged, by the last answer that said something about it.
    pub fn revision(&self, topic: &Topic, held: &super::Held) -> u64 {
        let renumbered = self.renumbered.get(topic).filter(|(_, digest)| *digest == held.document.digest());
        renumbered.map_or(held.revision, |(revision, _)| *revision)
    }

    pub fn forget(&mut self) {
        self.staged.clear();
        self.renumbered.clear();
        self.change = 0;
    }

    pub fn succeeded(&mut self) {
        (self.failures, self.let_in) = (0, None);
        self.forget();
    }

    /// Somebody leads under this term. If that is new since the host was let in, whoever took its request may be the one that ended: then
    /// there is no turn to wait for.
    pub fn heard_of(&mut self, term: u64) {
        self.let_in = self.let_in.filter(|let_in| term <= *let_in);
    }

    /// Grows with every failure: a service that a whole fleet asks at once is slow, and asking sooner makes it slower.
    fn timeout_ms(&self, settings: &Settings) -> u64 {
        let first_ms = if self.let_in.is_some() { settings.ask_timeout_back_ms } else { settings.ask_timeout_ms };
        first_ms.max(settings.ask_timeout_ms << self.failures.min(ASK_TIMEOUT_DOUBLINGS_MAX))
    }

    pub fn deadline(&self, flushed: bool, settings: &Settings) -> Option<u64> {
        match &self.in_flight {
            Some(ask) => Some(ask.sent_ms + self.timeout_ms(settings)),
            None if flushed => self.due_ms,
            None => None,
        }
    }
}

impl Reader {
    /// Ask within `jitter_ms`, or as soon as the request under way is answered.
    pub(super) fn want_ask(&mut self, now_ms: u64, jitter_ms: u64) {
        let due = now_ms + self.random.below(jitter_ms + 1);
        self.repair.due_ms = Some(self.repair.due_ms.map_or(due, |earlier| earlier.min(due)));
    }

    /// The same for what waits: an answer that is on its way may bring it, and what then still waits is judged anew.
    pub(super) fn want_ask_if_none(&mut self, now_ms: u64, jitter_ms: u64) {
        if self.repair.in_flight.is_none() {
            self.want_ask(now_ms, jitter_ms);
        }
    }

    /// The last request did not help, or the reason to ask may well persist.
    pub(super) fn want_ask_again(&mut self, now_ms: u64) {
        self.repair.failures = self.repair.failures.saturating_add(1);
        let ceiling = (ASK_BACKOFF_MIN_MS << self.repair.failures.min(20)).min(self.settings.ask_backoff_max_ms);
        let due = now_ms + ASK_BACKOFF_MIN_MS + self.random.below(ceiling);
        self.repair.due_ms = Some(self.repair.due_ms.map_or(due, |earlier| earlier.min(due)));
    }

    pub(super) fn tick_repair(&mut self, now_ms: u64) {
        if let Some(ask) = &self.repair.in_flight {
            if now_ms < ask.sent_ms + self.repair.timeout_ms(&self.settings) {
                return;
            }
            (self.repair.in_flight, self.repair.let_in) = (None, None);
            self.report(Incident::AskTimedOut);
            self.want_ask_again(now_ms);
        }
        let flushed = self.flush_done == self.flush_sent;
        if flushed && self.repair.due_ms.is_some_and(|due| due <= now_ms) {
            self.ask(now_ms);
        }
    }

    fn ask(&mut self, now_ms: u64) {
        self.repair.due_ms = None;
        self.repair.last_number = self.repair.last_number.wrapping_add(1);
        let number = self.repair.last_number;
        let mut topics: Vec<(TopicHash, &Topic)> = self.subscribed.iter().map(|(topic, hash)| (*hash, topic)).collect();
        topics.sort_unstable();
        // A hash that several have means none of them: they are sent by name.
        let several = |hash: TopicHash| self.by_hash.of(hash).nth(1).is_some();
        let (mut topics, unnamed): (Vec<_>, Vec<_>) = topics.into_iter().partition(|(hash, _)| !several(*hash));
        let (held, digests): (Vec<_>, Vec<Digest>) = topics
            .iter()
            .map(|(hash, topic)| {
                let (revision, digest) = self.to_ask_from(topic);
                ((*hash, revision), digest)
            })
            .unzip();
        // Whoever holds nothing has nothing to say about it.
        let digests = if held.iter().all(|(_, revision)| *revision == 0) { Vec::new() } else { digests };
        topics.extend(unnamed);
        let asked = topics.into_iter().map(|(_, topic)| topic.clone()).collect();
        let ask = Ask { ask: number, term: self.term(), held, digests };
        self.out.push(Effect::Ask(ask.encode()));
        self.repair.in_flight =
            Some(InFlight { number, sent_ms: now_ms, asked, digests: ask.digests, assembly: Assembly::default() });
    }

    /// 0 where the content is unknown or not trusted: the whole document is wanted then.
    fn to_ask_from(&self, topic: &Topic) -> (u64, Digest) {
        let held = self.repair.staged.get(topic).or_else(|| self.held.0.get(topic));
        let Some(held) = held.filter(|_| !self.distrusted.contains(topic)) else { return (0, Digest::ABSENT) };
        (self.repair.revision(topic, held), held.document.digest())
    }
}
