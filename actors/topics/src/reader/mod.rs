//! A host's side of topics: follows exactly the topics its host needs and exposes them only at cuts.
//!
//! A plain state machine: [`Reader::handle`] takes an event and the time, and says what to do. Deltas are gathered into batches by
//! the sequence of their lead message. The lowest batch commits when everything of it that this host follows has arrived, continues
//! what is held, and leads to the digests it names; until then it and all later ones wait while the old state stays exposed. Whatever
//! does not fit is repaired in one way only: ask the snapshot service with the revisions held, and install the answer, which brings
//! all topics to one cut.

mod acks;
mod answer;
mod arriving;
mod checks;
mod knock;
mod repair;
#[cfg(test)]
mod tests;

use crate::Map;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use groupcast_messages::{Cut, DecodeError, HostState};
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::{Documents, Needs};
use groupcast_policy::topic::{Topic, TopicHash};

use crate::hashes::TopicsByHash;
use crate::random::Random;
use acks::Acks;
use arriving::Batch;
use checks::Checks;
use knock::Knock;
use repair::Repair;

/// Deltas kept while they cannot be committed. Beyond it they are dropped and everything is asked for again.
pub const PENDING_DELTAS_MAX: usize = 65_536;

#[derive(Debug, Clone)]
pub struct Settings {
    /// How long after a reconnect that nobody answered the host makes itself known again; doubled each time up to the second.
    pub knock_min_ms: u64,
    pub knock_max_ms: u64,
    /// How long a batch may lack a companion before the host asks.
    pub companion_wait_ms: u64,
    /// How long a change that names topics not followed yet is held before its safe part is offered.
    pub hold_ms: u64,
    /// When revisions are checked again after a new subscription or a reconnect: interest spreads slowly in a cluster.
    pub rechecks_ms: [u64; 3],
    /// How long a difference found by such a check may still be in flight before the host asks.
    pub recheck_settle_ms: u64,
    /// The periodic check falls somewhere between these.
    pub entropy_min_ms: u64,
    pub entropy_max_ms: u64,
    pub entropy_settle_ms: u64,
    /// Longer than a busy controller lets a request wait before it refuses: what is given up too early is answered in vain.
    pub ask_timeout_ms: u64,
    /// The same for the first request of a host that comes back and was let in: somebody answered a moment ago, and a fleet that comes back
    /// waits for its turn.
    pub ask_timeout_back_ms: u64,
    /// Spread of the requests that many hosts make for one reason at one moment.
    pub ask_jitter_ms: u64,
    /// Backoff of requests that fail again and again.
    pub ask_backoff_max_ms: u64,
    pub ack_interval_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            knock_min_ms: 500,
            knock_max_ms: 8_000,
            companion_wait_ms: 200,
            hold_ms: 2_000,
            rechecks_ms: [250, 1_000, 5_000],
            recheck_settle_ms: 100,
            entropy_min_ms: 30_000,
            entropy_max_ms: 60_000,
            entropy_settle_ms: 1_000,
            ask_timeout_ms: 4_000,
            ask_timeout_back_ms: 12_000,
            ask_jitter_ms: 50,
            ask_backoff_max_ms: 10_000,
            ack_interval_ms: 100,
        }
    }
}

#[derive(Debug)]
pub enum Event<'a> {
    /// Connected or reconnected; messages may have been lost before. Whoever holds something has let go of its subscriptions by then, or may
    /// have: it is told when to make them again.
    Connected,
    Disconnected,
    /// Everything subscribed before the flush of this number is in effect at the server this host talks to.
    Flushed(u64),
    /// A republished message. The adapter has checked that its headers name the stream and subject.
    Delta {
        topic: Topic,
        revision: u64,
        previous: u64,
        payload: &'a [u8],
    },
    /// A message of the snapshot service, answering an [`Effect::Ask`].
    Answer(&'a [u8]),
    EntropyAnswer(&'a [u8]),
    Nudge(&'a [u8]),
    /// The client dropped messages, it does not say which.
    Lost,
    /// All commits up to this number are in force.
    Enforced(u64),
    /// What the host does with the policy it has, from now on; travels with acknowledgements.
    State(HostState),
    /// Somebody wants to be sure that nothing is missing.
    Refresh,
    Tick,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// May name a topic already subscribed: after a reconnect all are named again.
    Subscribe(Topic),
    Unsubscribe(Topic),
    Flush(u64),
    Ask(Vec<u8>),
    Entropy(Vec<u8>),
    Ack(Vec<u8>),
    Commit(Commit),
    /// A change has been held for `hold_ms`, because topics it names are not synced or one before it is held: see
    /// [`Reader::held_back`].
    Overdue(Cut),
    Report(Incident),
}

/// One step of the exposed state: all of it or nothing becomes effective. Several may come out of one event, and the reader's
/// documents are those after the last of them: whoever enforces takes all commits of an event together.
#[derive(Debug, PartialEq, Eq)]
pub struct Commit {
    pub number: u64,
    pub cut: Cut,
    /// The highest change it reflects, as far as it was heard of; 0 when all of it came from a snapshot unannounced.
    pub change: u64,
    /// `None`: the document was replaced, look at [`Reader::document`].
    pub edits: Vec<(Topic, Option<Edit>)>,
    pub dropped: Vec<Topic>,
}

impl Commit {
    /// This one and the one after it as one. What was replaced in either is replaced: the reader's document is the one after both, and
    /// edits of it must not be applied once more.
    fn and(mut self, later: Commit) -> Commit {
        let edited: HashSet<&Topic> = later.edits.iter().map(|(topic, _)| topic).collect();
        self.dropped.retain(|topic| !edited.contains(topic));
        let is_replaced = |edits: &[(Topic, Option<Edit>)]| -> HashSet<Topic> {
            edits.iter().filter(|(_, edit)| edit.is_none()).map(|(topic, _)| topic.clone()).collect()
        };
        let (before, now) = (is_replaced(&self.edits), is_replaced(&later.edits));
        self.edits.retain(|(topic, _)| !now.contains(topic));
        self.edits.extend(later.edits.into_iter().filter(|(topic, _)| now.contains(topic) || !before.contains(topic)));
        self.dropped.extend(later.dropped);
        Commit { number: later.number, cut: later.cut, change: self.change.max(later.change), ..self }
    }
}

/// The same effects with all commits as one, in the place of the last: the reader's documents are those after it, so none of the earlier
/// ones can be put in force by itself.
pub fn together(effects: Vec<Effect>) -> Vec<Effect> {
    let count = effects.iter().filter(|effect| matches!(effect, Effect::Commit(_))).count();
    if count < 2 {
        return effects;
    }
    let (mut seen, mut whole): (usize, Option<Commit>) = (0, None);
    let mut merged = Vec::with_capacity(effects.len());
    for effect in effects {
        let Effect::Commit(commit) = effect else {
            merged.push(effect);
            continue;
        };
        seen += 1;
        whole = Some(match whole.take() {
            None => commit,
            Some(earlier) => earlier.and(commit),
        });
        if seen == count {
            merged.extend(whole.take().map(Effect::Commit));
        }
    }
    merged
}

/// What went wrong and was or will be repaired; for logs, metrics and the host's report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incident {
    /// A message of `topic` that is not acceptable. The old state stays.
    Malformed {
        topic: Topic,
        error: DecodeError,
    },
    /// The edit contradicts itself or leads to another digest than the writer's.
    Corrupt {
        topic: Topic,
    },
    /// A message of a term that is over.
    LowerTerm {
        topic: Topic,
        term: u64,
    },
    /// A revision is missing before this one.
    Gap {
        topic: Topic,
    },
    /// A batch lacked a companion for too long.
    Incomplete {
        cut: Cut,
    },
    AskTimedOut,
    AskRefused {
        reason: String,
    },
    /// An answer that is older than what is held or that does not fit.
    AnswerRejected {
        why: &'static str,
    },
    TooManyPending,
}

#[derive(Debug, Clone)]
struct Held {
    document: Document,
    revision: u64,
    /// The topic's: every check and every request needs that of every topic, and to compute it the topic's name has to be read.
    hash: TopicHash,
}

#[derive(Debug, Default)]
struct Store(Map<Topic, Held>);

impl Documents for Store {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.get(topic).map(|held| &held.document)
    }
}

impl Store {
    fn revision(&self, topic: &Topic) -> Option<u64> {
        self.0.get(topic).map(|held| held.revision)
    }
}

#[derive(Debug)]
pub struct Reader {
    host: HostId,
    /// Shared by all hosts of a process that has many.
    settings: Arc<Settings>,
    random: Random,
    connected: bool,
    /// With its hash, for the same reason.
    subscribed: Map<Topic, TopicHash>,
    by_hash: TopicsByHash,
    flush_sent: u64,
    flush_done: u64,
    held: Store,
    needs: Needs,
    cut: Option<Cut>,
    batches: BTreeMap<Cut, Batch>,
    pending: usize,
    /// Topics whose content turned out wrong: asked for as if nothing were held.
    distrusted: HashSet<Topic>,
    /// Connected, and not known yet whether anybody would answer.
    knock: Option<Knock>,
    repair: Repair,
    checks: Checks,
    acks: Acks,
    commits: u64,
    out: Vec<Effect>,
}

impl Reader {
    pub fn new(host: HostId, settings: impl Into<Arc<Settings>>, seed: u64) -> Self {
        let needs = Needs::of_host(&host);
        Self {
            host,
            settings: settings.into(),
            random: Random::new(seed),
            connected: false,
            subscribed: Map::default(),
            by_hash: TopicsByHash::default(),
            flush_sent: 0,
            flush_done: 0,
            held: Store::default(),
            needs,
            cut: None,
            batches: BTreeMap::new(),
            pending: 0,
            distrusted: HashSet::new(),
            knock: None,
            repair: Repair::default(),
            checks: Checks::default(),
            acks: Acks::default(),
            commits: 0,
            out: Vec::new(),
        }
    }

    /// What to do, in this order.
    pub fn handle(&mut self, event: Event<'_>, now_ms: u64) -> Vec<Effect> {
        match event {
            Event::Connected => self.connected(now_ms),
            Event::Disconnected => self.disconnected(),
            Event::Flushed(number) => self.flush_done = self.flush_done.max(number),
            Event::Delta { topic, revision, previous, payload } => self.arrived(topic, revision, previous, payload, now_ms),
            Event::Answer(payload) => self.answered(payload, now_ms),
            Event::EntropyAnswer(payload) => self.entropy_answered(payload, now_ms),
            Event::Nudge(payload) => self.nudged(payload, now_ms),
            Event::Lost => self.want_ask(now_ms, self.settings.ask_jitter_ms),
            Event::Enforced(number) => self.acks.enforced(number),
            Event::State(state) => self.acks.set_state(state),
            Event::Refresh => self.want_ask(now_ms, 0),
            Event::Tick => {}
        }
        self.tick(now_ms);
        std::mem::take(&mut self.out)
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn deadline_ms(&self) -> Option<u64> {
        if !self.connected {
            return self.held_deadline();
        }
        let times = match &self.knock {
            Some(knock) => [Some(knock.again_ms()), None, self.acks.deadline()],
            None => [
                self.repair.deadline(self.flush_done == self.flush_sent, &self.settings),
                self.checks.deadline().filter(|_| self.repair.in_flight.is_none()),
                self.acks.deadline(),
            ],
        };
        times.into_iter().flatten().chain(self.held_deadline()).min()
    }

    /// The committed document; `None` for a topic that is not needed or not synced.
    pub fn document(&self, topic: &Topic) -> Option<&Document> {
        self.held.document(topic)
    }

    pub fn revision(&self, topic: &Topic) -> Option<u64> {
        self.held.revision(topic)
    }

    /// The committed documents.
    pub fn documents(&self) -> impl Iterator<Item = (&Topic, &Document)> {
        self.held.0.iter().map(|(topic, held)| (topic, &held.document))
    }

    pub fn subscriptions(&self) -> BTreeSet<Topic> {
        self.subscribed.keys().cloned().collect()
    }

    /// Where the exposed state stands; `None` before the first complete sync.
    pub fn cut(&self) -> Option<Cut> {
        self.cut
    }

    /// The number of the last commit.
    pub fn commits(&self) -> u64 {
        self.commits
    }

    /// How many deltas wait.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// The edits of the changes that are overdue, oldest first. The host may put their safe part in force (see
    /// [`groupcast_policy::safe`]), judged against the committed documents.
    pub fn held_back(&self) -> impl Iterator<Item = (&Topic, &Edit)> {
        self.batches.values().filter(|batch| batch.is_overdue()).flat_map(Batch::edits)
    }

    fn connected(&mut self, now_ms: u64) {
        self.connected = true;
        self.acks.tell_state_again();
        self.repair.cancel();
        match self.cut {
            Some(_) => self.knock = Some(Knock::at(now_ms)),
            None => self.enter(now_ms),
        }
    }

    /// Subscribes everything, and asks what was missed.
    fn enter(&mut self, now_ms: u64) {
        let own = Topic::Host(self.host.clone());
        self.flush_sent += 1;
        if !self.subscribed.contains_key(&own) {
            let hash = own.hash64();
            self.by_hash.insert(hash, own.clone());
            self.subscribed.insert(own, hash);
        }
        for topic in self.subscribed.keys() {
            self.out.push(Effect::Subscribe(topic.clone()));
        }
        self.out.push(Effect::Flush(self.flush_sent));
        let jitter = if self.cut.is_none() { 0 } else { self.settings.ask_jitter_ms };
        self.want_ask(now_ms, jitter);
        self.checks.restart(now_ms, &self.settings, &mut self.random);
    }

    fn disconnected(&mut self) {
        self.connected = false;
        self.knock = None;
        self.repair.cancel();
    }

    /// Subscribes what is missing; the next request waits until that is in effect.
    fn subscribe(&mut self, topics: impl IntoIterator<Item = Topic>, now_ms: u64) -> bool {
        let mut any = false;
        for topic in topics {
            if self.subscribed.contains_key(&topic) {
                continue;
            }
            if !any {
                self.flush_sent += 1;
                any = true;
            }
            let hash = topic.hash64();
            self.by_hash.insert(hash, topic.clone());
            self.subscribed.insert(topic.clone(), hash);
            self.out.push(Effect::Subscribe(topic));
        }
        if any {
            self.out.push(Effect::Flush(self.flush_sent));
            self.checks.restart(now_ms, &self.settings, &mut self.random);
        }
        any
    }

    /// Forgets topics that are not needed any more.
    fn unsubscribe_unneeded(&mut self) -> Vec<Topic> {
        let unneeded: Vec<Topic> = self.subscribed.keys().filter(|topic| !self.needs.wants(topic)).cloned().collect();
        let mut dropped = Vec::new();
        for topic in unneeded {
            if let Some(hash) = self.subscribed.remove(&topic) {
                self.by_hash.remove(hash, &topic);
                if self.by_hash.of(hash).next().is_none() {
                    self.acks.forget(hash);
                }
            }
            self.distrusted.remove(&topic);
            if self.held.0.remove(&topic).is_some() {
                dropped.push(topic.clone());
            }
            self.out.push(Effect::Unsubscribe(topic));
        }
        dropped
    }

    fn tick(&mut self, now_ms: u64) {
        self.check_held(now_ms);
        if self.connected {
            if self.knock.is_some() {
                self.tick_knock(now_ms);
            } else {
                self.tick_repair(now_ms);
                self.tick_checks(now_ms);
            }
            self.tick_acks(now_ms);
        }
    }

    fn report(&mut self, incident: Incident) {
        self.out.push(Effect::Report(incident));
    }

    fn term(&self) -> u64 {
        self.cut.map_or(0, |cut| cut.term)
    }
}
