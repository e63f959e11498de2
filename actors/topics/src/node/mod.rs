//! A controller's side of topics: follows all of TOPICS, serves snapshots from memory, and leads when it is its turn.
//!
//! A plain state machine like [`crate::reader`]. Its parts, one file each: `follow` keeps the replica at the stream's head, `claim`,
//! `lead`, `publish` and `flight` are the leadership, `serve` answers hosts.

mod applied;
mod claim;
mod fetch;
#[cfg(test)]
mod fit_tests;
mod flight;
mod follow;
mod lead;
mod leader;
mod publish;
mod serve;
#[cfg(test)]
mod tests;

use crate::Map;
use std::sync::Arc;

use groupcast_messages::{Cut, Lead};
use groupcast_policy::doc::Document;
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::Followers;
use groupcast_policy::topic::{Topic, TopicHash};

use crate::batch::{Proposal, Refused};
use crate::random::Random;
use crate::replica::Replica;
use crate::term::{BadTerm, Reserved, TERM_MAX};
use follow::Follow;
use lead::{Contest, Role};
pub use leader::{Leader, Vacancy};
use serve::Serve;

/// Bytes of one message of an answer. Servers carry as many bytes in messages of this size with a third less processor time than in
/// messages of the largest size (`groupcast-sim bench join` prints both): what they read at a time holds several whole ones.
pub const ANSWER_CHUNK_BYTES: usize = 16_000;

#[derive(Debug, Clone)]
pub struct Settings {
    /// Who this is, for people.
    pub name: String,
    /// Whether it may lead; one that may not only serves.
    pub candidate: bool,
    /// A leader is presumed gone after this time without a lead message, on this node's own clock.
    pub lease_ms: u64,
    /// How long a publish or a read of the head may take before its fate counts as unknown.
    pub request_timeout_ms: u64,
    /// Pause before an undecided batch is sent again.
    pub retry_ms: u64,
    /// How long a message may be missing while later ones are here, before another controller is asked.
    pub gap_wait_ms: u64,
    /// How long nothing may come while something is known to be on its way: a bus that is busy is late, and asking makes it busier.
    pub lag_wait_ms: u64,
    /// How long a host's request waits for the replica to reach the head before it is refused.
    pub serve_wait_ms: u64,
    /// Of answers to hosts and other controllers.
    pub chunk_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "controller".to_owned(),
            candidate: true,
            lease_ms: 3_000,
            request_timeout_ms: 2_000,
            retry_ms: 5,
            gap_wait_ms: 100,
            lag_wait_ms: 500,
            serve_wait_ms: 1_500,
            chunk_bytes_max: ANSWER_CHUNK_BYTES,
        }
    }
}

/// How the server decided a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Committed; the sequence of its last message and how many there were, lead included.
    Committed { last: u64, count: u64 },
    /// Refused, or so it says: another lead message may have come first (10071).
    Refused,
    /// Collided with a batch whose fate is open (10164): send again.
    Undecided,
    /// No answer, or one that says nothing about the batch.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    Snapshot {
        host: HostId,
        payload: Vec<u8>,
    },
    Entropy {
        host: HostId,
        payload: Vec<u8>,
    },
    /// Another controller wants everything.
    Replica {
        payload: Vec<u8>,
    },
}

/// The last lead message in the stream: its sequence and content.
pub type Head = Option<(u64, Vec<u8>)>;

/// What a stream of last messages tells: the head, and of every topic the last revision and message.
#[derive(Debug, Default)]
pub struct Records {
    pub head: Head,
    pub topics: Vec<(Topic, u64, Vec<u8>)>,
}

/// What should be published, compiled from scratch.
#[derive(Debug, Clone, Default)]
pub struct Desired {
    pub documents: Map<Topic, Document>,
    /// The sequences of CATALOG and REGISTRY it reflects.
    pub catalog: u64,
    pub registry: u64,
}

#[derive(Debug)]
pub enum Event<'a> {
    /// Connected or reconnected, everything subscribed and flushed.
    Connected,
    Disconnected,
    /// The client dropped messages.
    Lost,
    /// A republished lead message.
    Lead {
        sequence: u64,
        previous: u64,
        payload: &'a [u8],
    },
    /// A republished delta.
    Delta {
        topic: Topic,
        sequence: u64,
        payload: &'a [u8],
    },
    /// Answer to [`Effect::ReadHead`]; `None` when it could not be read.
    Head(Option<Head>),
    /// Answer to [`Effect::ReserveTerm`]; `None` when somebody else was faster or the bus did not answer.
    TermReserved(Option<Reserved>),
    /// Answer to [`Effect::ReserveTerm`] too: what CATALOG says leaves none to reserve.
    NoTerm(BadTerm),
    /// Answer to [`Effect::BeginLife`].
    LifeBegun(bool),
    /// Answer to [`Effect::ReadTerm`]; `None` when it could not be read.
    TermRead(Option<u64>),
    Published {
        batch: u64,
        fate: Fate,
    },
    /// A message of another controller, answering [`Effect::AskReplica`].
    Answer(&'a [u8]),
    /// Nobody answers [`Effect::AskReplica`].
    NoPeer,
    /// Answer to [`Effect::ReadRecords`].
    Records(Option<Records>),
    /// Answer to [`Effect::WantDesired`]; `None` when it could not be compiled.
    Desired {
        ask: u64,
        desired: Option<Desired>,
    },
    Request {
        id: u64,
        request: Request,
    },
    Propose(Proposal),
    /// Whether this controller reads what it would publish. One that does not must not lead: it would hold the lease and publish nothing.
    Fit(bool),
    /// Let go of the leadership in an orderly way.
    Resign,
    Tick,
}

#[derive(Debug)]
pub enum Effect {
    /// From the stream leader, never by direct get.
    ReadHead,
    /// Store a term of at least this in CATALOG by compare-and-swap, higher than what is there; with another life for a stream that is
    /// new.
    ReserveTerm {
        at_least: u64,
        new_life: bool,
    },
    /// Clear the stream, and have it go on at this sequence or above.
    BeginLife {
        first: u64,
    },
    /// Have the servers elect another leader for the stream: this one decides nothing any more.
    StepDown,
    /// Read the highest reserved term from CATALOG, not by direct get.
    ReadTerm,
    Publish(Publish),
    AskReplica(Vec<u8>),
    /// Read the last message of every topic from the stream.
    ReadRecords,
    /// No copy of what was published exists any more, or none that can be trusted: compile from scratch everything that is in
    /// CATALOG and REGISTRY at this moment or later, and hand it in.
    WantDesired {
        ask: u64,
    },
    Reply {
        id: u64,
        payloads: Vec<Vec<u8>>,
    },
    Leading {
        term: u64,
    },
    Deposed {
        term: u64,
    },
    Committed(Committed),
    Refused {
        proposal: u64,
        why: Refused,
    },
    Report(Incident),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    pub batch: u64,
    pub expected: u64,
    pub lead: Vec<u8>,
    pub messages: Vec<(Topic, Vec<u8>)>,
}

/// The revisions that a host must reach of a batch; shared, as ten thousand hosts may have to reach the same.
pub type Reach = Arc<[(TopicHash, u64)]>;

/// A batch that is in the stream for good, published by this node or another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Committed {
    /// The proposal it came from; `None` for what the node publishes on its own account.
    pub proposal: Option<u64>,
    pub cut: Cut,
    /// The term since which the stream lives.
    pub since: u64,
    /// The highest change it reflects.
    pub change: u64,
    /// It carries the changes after this CATALOG sequence ...
    pub after: u64,
    /// ... and up to this one.
    pub catalog: u64,
    /// Its payload.
    pub bytes: usize,
    pub topics: Vec<(TopicHash, u64)>,
    /// It is one change too large for its topics to be listed: what a host must have of it is tallied in the message to the host itself.
    pub tallied: bool,
    /// Who has to reach which revisions.
    pub span: Vec<(HostId, Reach)>,
    /// What hosts cease to follow with it: they will never say that they reached it.
    pub unfollowed: Vec<(HostId, TopicHash)>,
    /// Hosts whose own topic is retired with it.
    pub left: Vec<HostId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incident {
    /// Messages of TOPICS are missing here.
    Gap {
        at: u64,
    },
    /// A message in TOPICS that this version does not understand.
    Malformed {
        at: u64,
    },
    /// The replica contradicts what was published; it is fetched anew.
    Unfit(crate::replica::Unfit),
    TooManyBuffered,
    /// The server gave a batch sequences that are not contiguous: nothing it says can be relied on.
    NotContiguous,
    /// The server calls every batch undecided, and has for long.
    StreamStuck,
    /// The stream is new: everything is published again.
    Rebuilding {
        term: u64,
    },
    /// No term can be reserved.
    BadTerm(BadTerm),
}

/// `None` also of one with a term that nobody can lead with.
fn decode_lead(payload: &[u8]) -> Option<Lead> {
    Lead::decode(payload).ok().filter(|lead| lead.term < TERM_MAX)
}

#[derive(Debug)]
pub struct Node {
    settings: Settings,
    random: Random,
    connected: bool,
    /// Since when the connection is lost, if it is.
    cut_off_ms: Option<u64>,
    /// Since when this controller does not read what it would publish, if it does not.
    unfit_ms: Option<u64>,
    replica: Replica,
    /// Who follows what; built when first needed.
    followers: Option<Followers>,
    /// Those of the replica that was replaced, and its structure: when a stream is filled again, hosts need what they needed before, and
    /// to find that out anew takes seconds in a large fleet.
    former_followers: Option<(u64, Followers)>,
    follow: Follow,
    role: Role,
    contest: Contest,
    serve: Serve,
    /// The highest term that lead messages name or this node reserved. Never one that a host names.
    term_seen: u64,
    /// Why no term could be reserved the last time.
    bad_term: Option<BadTerm>,
    leader: Option<Leader>,
    /// When the head read under way was sent.
    head_read_ms: Option<u64>,
    /// The number of the last [`Effect::WantDesired`]: an answer to an earlier one may lack what was written since.
    desired_ask: u64,
    /// The sequences of CATALOG and REGISTRY that the stream reflects, by the newest lead message heard of.
    progress: (u64, u64),
    /// The last lead message that was followed or published, and the CATALOG sequence that the stream reflects with it; `None` when
    /// messages before the replica's cut were never seen here.
    reflected: Option<(u64, u64)>,
    /// The last time it was told.
    now_ms: u64,
    out: Vec<Effect>,
}

impl Node {
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self {
            settings,
            random: Random::new(seed),
            connected: false,
            cut_off_ms: None,
            unfit_ms: None,
            replica: Replica::default(),
            followers: None,
            former_followers: None,
            follow: Follow::default(),
            role: Role::Following { since_ms: 0, vacant: false },
            contest: Contest::default(),
            serve: Serve::default(),
            term_seen: 0,
            bad_term: None,
            leader: None,
            head_read_ms: None,
            desired_ask: 0,
            progress: (0, 0),
            reflected: None,
            now_ms: 0,
            out: Vec::new(),
        }
    }

    pub fn handle(&mut self, event: Event<'_>, now_ms: u64) -> Vec<Effect> {
        self.now_ms = now_ms;
        match event {
            Event::Connected => {
                self.connected = true;
                self.cut_off_ms = None;
                self.head_read_ms = None;
                self.resync(now_ms);
                self.lead_reconnected(now_ms);
            }
            Event::Disconnected => {
                self.connected = false;
                self.cut_off_ms.get_or_insert(now_ms);
            }
            Event::Lost => self.resync(now_ms),
            Event::Lead { sequence, previous, payload } => self.lead_arrived(sequence, previous, payload, now_ms),
            Event::Delta { topic, sequence, payload } => self.delta_arrived(topic, sequence, payload, now_ms),
            Event::Head(head) => {
                if let Some(sent_ms) = self.head_read_ms.take() {
                    self.head_read(head, sent_ms, now_ms);
                }
            }
            Event::TermReserved(reserved) => self.term_reserved(reserved, now_ms),
            Event::NoTerm(why) => self.no_term(why, now_ms),
            Event::LifeBegun(begun) => self.life_begun(begun, now_ms),
            Event::TermRead(term) => self.term_read(term, now_ms),
            Event::Published { batch, fate } => self.published(batch, fate, now_ms),
            Event::Answer(payload) => self.peer_answered(payload, now_ms),
            Event::NoPeer => self.no_peer(now_ms),
            Event::Records(records) => self.records_read(records, now_ms),
            Event::Desired { ask, desired } => self.desired(ask, desired, now_ms),
            Event::Request { id, request } => self.request(id, request, now_ms),
            Event::Propose(proposal) => self.propose(proposal, now_ms),
            Event::Fit(fit) => self.unfit_ms = if fit { None } else { self.unfit_ms.or(Some(now_ms)) },
            Event::Resign => self.resign(now_ms),
            Event::Tick => {}
        }
        self.tick(now_ms);
        std::mem::take(&mut self.out)
    }

    pub fn deadline_ms(&self) -> Option<u64> {
        if !self.connected {
            // Nothing else can be done, however long it is due.
            return self.cut_off_deadline();
        }
        let head = self.head_read_ms.map(|sent| sent + self.settings.request_timeout_ms);
        let times = [head, self.follow_deadline(), self.lead_deadline(), self.serve_deadline()];
        times.into_iter().flatten().min()
    }

    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    pub fn followers(&mut self) -> &Followers {
        if self.followers.is_none() {
            let structure = self.replica.structure();
            let former = self.former_followers.take_if(|(former, _)| *former == structure);
            debug_assert!(former.iter().all(|(_, former)| *former == self.followers_from_scratch()));
            let followers = former.map_or_else(|| self.followers_from_scratch(), |(_, former)| former);
            if !followers.is_empty() {
                self.former_followers = None;
            }
            self.followers = Some(followers);
        }
        self.followers.get_or_insert_default()
    }

    fn followers_from_scratch(&self) -> Followers {
        let present = self.replica.documents().filter(|(_, document)| document.content().is_some());
        let hosts = present.filter_map(|(topic, _)| if let Topic::Host(host) = topic { Some(host.clone()) } else { None });
        Followers::of_hosts(hosts, &self.replica)
    }

    /// The replica is about to be replaced.
    fn put_followers_aside(&mut self) {
        if let Some(followers) = self.followers.take().filter(|followers| !followers.is_empty()) {
            self.former_followers = Some((self.replica.structure(), followers));
        }
    }

    /// Leads, and what it holds is what is published: changes can be proposed.
    pub fn is_leading(&self) -> bool {
        matches!(&self.role, Role::Leading(reign) if !reign.is_rebuilding())
    }

    /// Whether the replica is complete, so that requests can be answered.
    pub fn is_synced(&self) -> bool {
        self.follow.is_synced()
    }

    /// On the clock that its events come with.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    pub(crate) fn notice_time(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// What is published reflects CATALOG and REGISTRY up to these sequences, though nothing had to be published for it: the next
    /// lead message says so.
    pub fn reflects(&mut self, catalog: u64, registry: u64) {
        if self.is_leading() {
            self.progress = (self.progress.0.max(catalog), self.progress.1.max(registry));
        }
    }

    /// CATALOG is another stream: what was reflected of the one before says nothing about it.
    pub fn renumbered(&mut self) {
        (self.progress.0, self.reflected) = (0, None);
    }

    /// Proposals that wait or are in flight.
    pub fn queued(&self) -> usize {
        match &self.role {
            Role::Leading(reign) => reign.queued(),
            _ => 0,
        }
    }

    fn tick(&mut self, now_ms: u64) {
        if !self.connected {
            return self.tick_cut_off(now_ms);
        }
        if self.head_read_ms.is_some_and(|sent| sent + self.settings.request_timeout_ms <= now_ms) {
            self.head_read_ms = None;
            self.head_read(None, now_ms, now_ms);
        }
        self.tick_follow(now_ms);
        self.tick_lead(now_ms);
        self.tick_serve(now_ms);
    }

    /// A lead message was seen, in whatever way.
    fn heard_of(&mut self, lead: &Lead) {
        self.leader_heard(lead);
        if lead.term >= self.term_seen && !self.holds_lead() {
            self.progress = (lead.catalog, lead.registry);
        }
        self.term_seen = self.term_seen.max(lead.term);
    }

    fn want_desired(&mut self) -> u64 {
        self.desired_ask += 1;
        self.out.push(Effect::WantDesired { ask: self.desired_ask });
        self.desired_ask
    }

    /// One read of the head at a time; whoever waits shares the answer, if the read was sent after they came.
    fn read_head(&mut self, now_ms: u64) -> bool {
        if self.head_read_ms.is_some() {
            return false;
        }
        self.head_read_ms = Some(now_ms);
        self.out.push(Effect::ReadHead);
        true
    }

    fn head_read(&mut self, head: Option<Head>, sent_ms: u64, now_ms: u64) {
        let head: Option<Option<(u64, Lead)>> = match head {
            None => None,
            Some(None) => Some(None),
            Some(Some((sequence, payload))) => match decode_lead(&payload) {
                Some(lead) => Some(Some((sequence, lead))),
                None => {
                    self.out.push(Effect::Report(Incident::Malformed { at: sequence }));
                    None
                }
            },
        };
        if let Some(Some((_, lead))) = &head {
            self.heard_of(lead);
        }
        self.head_for_follow(head.as_ref(), now_ms);
        self.head_for_lead(head.as_ref(), sent_ms, now_ms);
        self.head_for_serve(head.as_ref(), now_ms);
    }
}
