//! Leadership: a chain of lead messages, each expecting its predecessor, is fence, progress mark and lease in one.
//!
//! One batch is in flight at a time. When its fate is unknown the head tells: my batch id, it is committed; the head I expected, it is
//! not and is sent again unchanged; anything else, somebody else leads. Terms are reserved in CATALOG by compare-and-swap before they
//! are used, so no two nodes ever publish under one term, also when TOPICS is lost in between.

use std::collections::VecDeque;

use groupcast_messages::{Cut, Lead};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::{Topic, TopicHash};

use super::follow::reset_proposal;
use super::{Committed, Effect, Fate, Incident, Node, Publish};
use crate::BATCH_MESSAGES_MAX;
use crate::batch::{Outgoing, PROPOSALS_MAX, Proposal, Refused, build};

/// Topics reset with one batch when the stream is rebuilt; each host of the span gets one message besides.
const RESET_TOPICS_MAX: usize = BATCH_MESSAGES_MAX / 2;

/// Pause after a read of the head that failed.
const HEAD_RETRY_MS: u64 = 50;

#[derive(Debug)]
pub(super) enum Role {
    Following {
        /// The last sign of a leader, or the start of waiting for one.
        since_ms: u64,
        /// The leader let go, or there never was one: no need to wait for the lease to end.
        vacant: bool,
    },
    /// Reads the head to see whether the leader is really gone.
    Candidate,
    Reserving {
        head: u64,
        after: u64,
        since: Option<u64>,
        sent_ms: u64,
    },
    /// The claim, a lead message without a batch, is on its way.
    Claiming {
        term: u64,
        since: u64,
        flight: Flight,
    },
    /// The claim is in the stream. It counts if its term is still the highest that anybody reserved: a claim that was under way
    /// for long may have found a stream that is new and empty.
    Confirming {
        term: u64,
        since: u64,
        head: u64,
        head_batch: u64,
        sent_ms: u64,
    },
    Leading(Reign),
}

#[derive(Debug)]
pub(super) struct Reign {
    term: u64,
    since: u64,
    /// The sequence of the last lead message, and the batch it names.
    head: u64,
    head_batch: u64,
    /// The connection was interrupted: before anything is sent the head must be seen to be this reign's, read when this time
    /// has come. A stream that lost its messages meanwhile counts from the beginning, and a bare sequence proves nothing.
    verify_at_ms: Option<u64>,
    flight: Option<Flight>,
    queue: VecDeque<Proposal>,
    renewed_ms: u64,
    resigning: bool,
    catalog: u64,
    registry: u64,
}

impl Reign {
    pub fn queued(&self) -> usize {
        self.queue.len() + usize::from(self.flight.is_some())
    }

    #[cfg(test)]
    pub fn flight_batch(&self) -> Option<u64> {
        self.flight.as_ref().map(|flight| flight.batch.lead.batch)
    }
}

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Flight {
    batch: Outgoing,
    /// The batch that the expected lead message names; 0 for none.
    after: u64,
    state: FlightState,
}

#[derive(Debug, PartialEq, Eq)]
enum FlightState {
    Sent {
        at_ms: u64,
    },
    Retry {
        at_ms: u64,
    },
    /// Its fate is unknown; the head tells. It is read when this time has come; `None` while that read is under way.
    Unknown {
        read_at_ms: Option<u64>,
    },
}

enum Verdict {
    Committed { lead: u64 },
    Again,
    Deposed,
}

impl Node {
    pub(super) fn is_following(&self) -> bool {
        matches!(self.role, Role::Following { .. })
    }

    pub(super) fn lead_seen(&mut self, sequence: u64, lead: &Lead, now_ms: u64) {
        if self.serve.hold_until_published && self.is_following() && self.follow.is_synced() {
            // Somebody leads after all: what was compiled here to be published is not what is published.
            self.fetch(now_ms);
        }
        if let Role::Following { since_ms, vacant } = &mut self.role
            && (sequence > self.replica.cut().lead || lead.since > self.replica.since())
        {
            *since_ms = now_ms;
            *vacant = lead.resigning;
        }
    }

    /// The head shows that nobody leads.
    pub(super) fn vacate(&mut self) {
        if let Role::Following { vacant, .. } = &mut self.role {
            *vacant = true;
        }
    }

    /// After a reconnect the lease is counted anew: silence may have been this node's own.
    pub(super) fn lead_reconnected(&mut self, now_ms: u64) {
        match &mut self.role {
            Role::Following { since_ms, .. } => *since_ms = now_ms,
            Role::Candidate | Role::Reserving { .. } | Role::Confirming { .. } => {
                self.role = Role::Following { since_ms: now_ms, vacant: false }
            }
            Role::Claiming { flight, .. } => flight.state = FlightState::Unknown { read_at_ms: Some(now_ms) },
            Role::Leading(reign) => {
                reign.verify_at_ms = Some(now_ms);
                if let Some(flight) = &mut reign.flight {
                    flight.state = FlightState::Unknown { read_at_ms: Some(now_ms) };
                }
            }
        }
    }

    pub(super) fn propose(&mut self, proposal: Proposal, now_ms: u64) {
        let number = proposal.number;
        let why = match &mut self.role {
            Role::Leading(reign) if reign.resigning => Refused::NotLeading,
            Role::Leading(reign) if reign.queue.len() >= PROPOSALS_MAX => Refused::Busy,
            Role::Leading(reign) => {
                reign.queue.push_back(proposal);
                return self.send_next(now_ms);
            }
            _ => Refused::NotLeading,
        };
        self.out.push(Effect::Refused { proposal: number, why });
    }

    pub(super) fn resign(&mut self, now_ms: u64) {
        self.settings.candidate = false;
        if let Role::Leading(reign) = &mut self.role {
            reign.resigning = true;
            self.send_next(now_ms);
        }
    }

    pub(super) fn tick_lead(&mut self, now_ms: u64) {
        let timeout = self.settings.request_timeout_ms;
        match &mut self.role {
            Role::Following { since_ms, vacant } => {
                let over = *vacant || since_ms.saturating_add(self.settings.lease_ms) <= now_ms;
                if over && self.settings.candidate && self.follow.is_synced() && self.read_head(now_ms) {
                    self.role = Role::Candidate;
                }
            }
            Role::Candidate => {}
            Role::Reserving { sent_ms, .. } | Role::Confirming { sent_ms, .. } => {
                if *sent_ms + timeout <= now_ms {
                    self.follow_again(now_ms, false);
                }
            }
            Role::Claiming { flight, .. } => {
                let wanted = flight.tick(now_ms, timeout);
                self.act_on_flight(wanted, now_ms);
            }
            Role::Leading(reign) => {
                if let Some(flight) = &mut reign.flight {
                    let again = flight.tick(now_ms, timeout);
                    self.act_on_flight(again, now_ms);
                } else if let Some(at_ms) = reign.verify_at_ms {
                    if at_ms <= now_ms {
                        self.read_head(now_ms);
                    }
                } else if reign.renewed_ms + self.settings.lease_ms / 3 <= now_ms {
                    let lead = self.next_lead();
                    self.send(lead, now_ms);
                }
            }
        }
    }

    pub(super) fn lead_deadline(&self) -> Option<u64> {
        let timeout = self.settings.request_timeout_ms;
        match &self.role {
            Role::Following { since_ms, vacant } if self.settings.candidate && self.follow.is_synced() => {
                // A head read under way delays it; its own deadline wakes this node then.
                (self.head_read_ms.is_none()).then(|| if *vacant { 0 } else { since_ms + self.settings.lease_ms })
            }
            Role::Following { .. } | Role::Candidate => None,
            Role::Reserving { sent_ms, .. } | Role::Confirming { sent_ms, .. } => Some(sent_ms + timeout),
            Role::Claiming { flight, .. } => flight.deadline(timeout, self.head_read_ms.is_some()),
            Role::Leading(reign) => match &reign.flight {
                Some(flight) => flight.deadline(timeout, self.head_read_ms.is_some()),
                None => match reign.verify_at_ms {
                    Some(at_ms) => Some(at_ms).filter(|_| self.head_read_ms.is_none()),
                    None => Some(reign.renewed_ms + self.settings.lease_ms / 3),
                },
            },
        }
    }

    fn act_on_flight(&mut self, wanted: Wanted, now_ms: u64) {
        match wanted {
            Wanted::Nothing => {}
            Wanted::Resend => self.resend(),
            Wanted::Head => {
                if self.read_head(now_ms)
                    && let Some(flight) = self.flight_mut()
                {
                    flight.state = FlightState::Unknown { read_at_ms: None };
                }
            }
        }
    }

    fn flight_mut(&mut self) -> Option<&mut Flight> {
        match &mut self.role {
            Role::Claiming { flight, .. } => Some(flight),
            Role::Leading(reign) => reign.flight.as_mut(),
            _ => None,
        }
    }

    pub(super) fn head_for_lead(&mut self, head: Option<&Option<(u64, Lead)>>, sent_ms: u64, now_ms: u64) {
        let retry_ms = now_ms + HEAD_RETRY_MS;
        if head.is_none()
            && let Some(flight) = self.flight_mut()
            && flight.state == (FlightState::Unknown { read_at_ms: None })
        {
            flight.state = FlightState::Unknown { read_at_ms: Some(retry_ms) };
        }
        if let Role::Leading(reign) = &mut self.role
            && let Some(at_ms) = &mut reign.verify_at_ms
            && reign.flight.is_none()
        {
            match head {
                None => *at_ms = retry_ms,
                Some(Some((sequence, lead)))
                    if sent_ms >= *at_ms && (*sequence, lead.batch) == (reign.head, reign.head_batch) =>
                {
                    reign.verify_at_ms = None;
                    return self.send_next(now_ms);
                }
                Some(_) if sent_ms >= *at_ms => return self.decide(Some(Verdict::Deposed), now_ms),
                Some(_) => {}
            }
            return;
        }
        match &self.role {
            Role::Candidate => self.head_for_candidate(head, now_ms),
            Role::Claiming { flight, .. } => {
                let verdict = flight.judge_by_head(head);
                self.decide(verdict, now_ms);
            }
            Role::Leading(reign) => {
                let verdict = match (&reign.flight, head) {
                    (Some(flight), head) => flight.judge_by_head(head),
                    // Read for somebody else's sake, but it tells: the stream is another one, or somebody else leads.
                    // A read sent before the last commit tells nothing.
                    _ if sent_ms <= reign.renewed_ms => None,
                    (None, Some(None)) => Some(Verdict::Deposed),
                    (None, Some(Some((sequence, lead)))) if *sequence != reign.head || lead.term != reign.term => {
                        Some(Verdict::Deposed)
                    }
                    _ => None,
                };
                self.decide(verdict, now_ms);
            }
            _ => {}
        }
    }

    fn head_for_candidate(&mut self, head: Option<&Option<(u64, Lead)>>, now_ms: u64) {
        let cut = self.replica.cut();
        match head {
            None => self.follow_again(now_ms, false),
            Some(None) => self.reserve(0, 0, None, now_ms),
            Some(Some((sequence, lead))) => {
                if *sequence == cut.lead && lead.term == cut.term {
                    self.reserve(*sequence, lead.batch, Some(lead.since), now_ms);
                } else if lead.term < cut.term {
                    // Terms never go back within one life of the stream: this is a new one, and what stands at its head is a
                    // message of the past that arrived late and found the sequence it expected by chance.
                    self.reserve(*sequence, lead.batch, None, now_ms);
                } else {
                    // Somebody leads and was not heard; `follow` catches up meanwhile.
                    self.follow_again(now_ms, false);
                }
            }
        }
    }

    fn reserve(&mut self, head: u64, after: u64, since: Option<u64>, now_ms: u64) {
        self.role = Role::Reserving { head, after, since, sent_ms: now_ms };
        self.out.push(Effect::ReserveTerm { at_least: self.term_seen.max(self.replica.cut().term) + 1 });
    }

    pub(super) fn term_reserved(&mut self, term: Option<u64>, now_ms: u64) {
        let Role::Reserving { head, after, since, .. } = self.role else { return };
        let Some(term) = term else { return self.follow_again(now_ms, false) };
        self.term_seen = self.term_seen.max(term);
        let since = since.unwrap_or(term);
        let lead = Lead { term, since, batch: self.random.draw(), ..self.blank_lead() };
        let batch = Outgoing { proposal: None, change: 0, lead, expected: head, messages: Vec::new() };
        self.role = Role::Claiming { term, since, flight: Flight::new(batch, after, now_ms) };
        self.resend();
    }

    fn blank_lead(&self) -> Lead {
        let (catalog, registry) = match &self.role {
            Role::Leading(reign) => (reign.catalog, reign.registry),
            _ => (0, 0),
        };
        let leader = self.settings.name.clone();
        Lead { term: 0, since: 0, batch: 0, count: 0, catalog, registry, resigning: false, leader }
    }

    /// A lead message of its own: keeps the lease, or ends it.
    fn next_lead(&mut self) -> Outgoing {
        let batch = self.random.draw();
        let mut lead = Lead { batch, ..self.blank_lead() };
        let mut expected = 0;
        if let Role::Leading(reign) = &self.role {
            (lead.term, lead.since, lead.resigning, expected) = (reign.term, reign.since, reign.resigning, reign.head);
        }
        Outgoing { proposal: None, change: 0, lead, expected, messages: Vec::new() }
    }

    fn send(&mut self, batch: Outgoing, now_ms: u64) {
        if let Role::Leading(reign) = &mut self.role {
            reign.flight = Some(Flight::new(batch, reign.head_batch, now_ms));
            self.resend();
        }
    }

    /// Sends the batch in flight, for the first time or again, unchanged.
    fn resend(&mut self) {
        let Some(flight) = self.flight_mut() else { return };
        let batch = &flight.batch;
        let publish = Publish {
            batch: batch.lead.batch,
            expected: batch.expected,
            lead: batch.lead.encode(),
            messages: batch.messages.iter().map(|m| (m.topic.clone(), m.payload.clone())).collect(),
        };
        self.out.push(Effect::Publish(publish));
    }

    /// Takes the next proposal if nothing is in flight.
    fn send_next(&mut self, now_ms: u64) {
        loop {
            self.followers();
            let batch = self.random.draw();
            let blank = self.blank_lead();
            let Role::Leading(reign) = &mut self.role else { return };
            if reign.flight.is_some() || reign.verify_at_ms.is_some() {
                return;
            }
            let resets = &mut self.serve.pending_resets;
            let proposal = if !resets.is_empty() {
                let rest = resets.split_off(resets.len().min(RESET_TOPICS_MAX));
                Some((reset_proposal(std::mem::replace(resets, rest)), true))
            } else {
                reign.queue.pop_front().map(|proposal| (proposal, false))
            };
            let Some((proposal, own)) = proposal else {
                if reign.resigning {
                    let lead = self.next_lead();
                    self.send(lead, now_ms);
                }
                return;
            };
            reign.catalog = reign.catalog.max(proposal.catalog);
            reign.registry = reign.registry.max(proposal.registry);
            let (catalog, registry) = (reign.catalog, reign.registry);
            let lead = Lead { term: reign.term, since: reign.since, batch, catalog, registry, ..blank };
            let (number, head) = (proposal.number, reign.head);
            let Some(followers) = &self.followers else { return };
            match build(proposal, lead, head, &self.replica, followers) {
                Ok(mut batch) => {
                    if own {
                        batch.proposal = None;
                    }
                    return self.send(batch, now_ms);
                }
                Err(why) => self.out.push(Effect::Refused { proposal: number, why }),
            }
        }
    }

    pub(super) fn published(&mut self, batch: u64, fate: Fate, now_ms: u64) {
        let retry_ms = self.settings.retry_ms;
        let Some(flight) = self.flight_mut().filter(|flight| flight.batch.lead.batch == batch) else { return };
        if !matches!(flight.state, FlightState::Sent { .. } | FlightState::Unknown { .. }) {
            return;
        }
        match fate {
            Fate::Committed { last, count } => {
                let expected = u64::from(flight.batch.lead.count) + 1;
                if count != expected || last < expected {
                    self.out.push(Effect::Report(Incident::NotContiguous));
                    return self.decide(Some(Verdict::Deposed), now_ms);
                }
                self.decide(Some(Verdict::Committed { lead: last + 1 - expected }), now_ms);
            }
            Fate::Undecided => flight.state = FlightState::Retry { at_ms: now_ms + retry_ms },
            Fate::Refused | Fate::Unknown => flight.state = FlightState::Unknown { read_at_ms: Some(now_ms) },
        }
    }

    fn decide(&mut self, verdict: Option<Verdict>, now_ms: u64) {
        match verdict {
            None => {}
            Some(Verdict::Deposed) => self.follow_again(now_ms, false),
            Some(Verdict::Again) if matches!(self.role, Role::Claiming { .. }) => {
                // Others may have led and gone since its term was reserved: a claim is never sent twice.
                self.follow_again(now_ms, true);
            }
            Some(Verdict::Again) => {
                if let Some(flight) = self.flight_mut() {
                    flight.state = FlightState::Sent { at_ms: now_ms };
                }
                self.resend();
            }
            Some(Verdict::Committed { lead }) => self.committed(lead, now_ms),
        }
    }

    fn committed(&mut self, lead: u64, now_ms: u64) {
        match std::mem::replace(&mut self.role, Role::Candidate) {
            Role::Claiming { term, since, flight } => {
                self.role = Role::Confirming { term, since, head: lead, head_batch: flight.batch.lead.batch, sent_ms: now_ms };
                self.out.push(Effect::ReadTerm);
                return;
            }
            Role::Leading(mut reign) => {
                let Some(flight) = reign.flight.take() else { return };
                reign.head = lead;
                reign.head_batch = flight.batch.lead.batch;
                reign.verify_at_ms = None;
                reign.renewed_ms = now_ms;
                let (term, since) = (reign.term, reign.since);
                let resigned = flight.batch.lead.resigning;
                self.role = Role::Leading(reign);
                self.batch_committed(flight.batch, Cut { term, lead }, since, now_ms);
                if resigned {
                    return self.follow_again(now_ms, false);
                }
            }
            other => self.role = other,
        }
        if self.serve.pending_resets.is_empty() {
            self.serve.hold_until_published = false;
        }
        self.serve_advanced();
        self.send_next(now_ms);
    }

    pub(super) fn term_read(&mut self, highest: Option<u64>, now_ms: u64) {
        let Role::Confirming { term, since, head, head_batch, .. } = self.role else { return };
        if highest != Some(term) {
            return self.follow_again(now_ms, highest.is_some());
        }
        let rebuild = since > self.replica.since() && !self.replica.is_empty();
        if rebuild {
            self.replica.forget_revisions();
            self.serve.hold_until_published = true;
            self.serve.pending_resets = self.replica.topics().cloned().collect();
            self.out.push(Effect::Report(Incident::Rebuilding { term }));
        }
        self.replica.advance(Cut { term, lead: head }, since);
        self.role = Role::Leading(Reign {
            term,
            since,
            head,
            head_batch,
            verify_at_ms: None,
            flight: None,
            queue: VecDeque::new(),
            renewed_ms: now_ms,
            resigning: false,
            catalog: 0,
            registry: 0,
        });
        self.forget_buffered(head);
        self.out.push(Effect::Leading { term });
        if self.serve.pending_resets.is_empty() {
            self.serve.hold_until_published = false;
        }
        self.serve_advanced();
        self.send_next(now_ms);
    }

    fn batch_committed(&mut self, batch: Outgoing, cut: Cut, since: u64, now_ms: u64) {
        let (proposal, change) = (batch.proposal, batch.change);
        self.forget_buffered(cut.lead + u64::from(batch.lead.count));
        let published = batch.published(cut.lead);
        let topics: Vec<(TopicHash, u64)> = published.iter().map(|m| (m.topic.hash64(), m.revision)).collect();
        let span = self.span(published.iter().map(|m| (&m.topic, m.revision)));
        if let Err(unfit) = self.apply(cut, since, &published) {
            // The batch was built against this very replica.
            self.out.push(Effect::Report(Incident::Unfit(unfit)));
            return self.follow_again(now_ms, false);
        }
        if proposal.is_some() || !topics.is_empty() {
            self.out.push(Effect::Committed(Committed { proposal, cut, change, topics, span }));
        }
    }

    /// The hosts that followed any of the topics when they were published, and what of it each must reach.
    fn span<'a>(&mut self, topics: impl Iterator<Item = (&'a Topic, u64)>) -> Vec<(HostId, Vec<(TopicHash, u64)>)> {
        let mut span: std::collections::BTreeMap<HostId, Vec<(TopicHash, u64)>> = Default::default();
        let followers = self.followers();
        let topics: Vec<(&Topic, u64)> = topics.collect();
        if let [(topic, revision)] = topics[..] {
            let reach = vec![(topic.hash64(), revision)];
            return followers.of(topic).map(|host| (host.clone(), reach.clone())).collect();
        }
        for (topic, revision) in topics {
            let hash = topic.hash64();
            for host in followers.of(topic) {
                span.entry(host.clone()).or_default().push((hash, revision));
            }
        }
        span.into_iter().collect()
    }

    fn follow_again(&mut self, now_ms: u64, vacant: bool) {
        let was = std::mem::replace(&mut self.role, Role::Following { since_ms: now_ms, vacant });
        self.drain(now_ms); // what others published while this node was occupied with itself
        if let Role::Leading(mut reign) = was {
            self.out.push(Effect::Deposed { term: reign.term });
            let flying = reign.flight.take().and_then(|flight| flight.batch.proposal);
            for number in flying.into_iter().chain(reign.queue.drain(..).map(|proposal| proposal.number)) {
                self.out.push(Effect::Refused { proposal: number, why: Refused::NotLeading });
            }
            self.followers = None;
            self.resync(now_ms);
        }
    }
}

enum Wanted {
    Nothing,
    Resend,
    Head,
}

impl Flight {
    fn new(batch: Outgoing, after: u64, now_ms: u64) -> Self {
        Self { batch, after, state: FlightState::Sent { at_ms: now_ms } }
    }

    fn tick(&mut self, now_ms: u64, timeout_ms: u64) -> Wanted {
        match self.state {
            FlightState::Sent { at_ms } if at_ms + timeout_ms <= now_ms => {
                self.state = FlightState::Unknown { read_at_ms: Some(now_ms) };
                Wanted::Head
            }
            FlightState::Retry { at_ms } if at_ms <= now_ms => {
                self.state = FlightState::Sent { at_ms: now_ms };
                Wanted::Resend
            }
            FlightState::Unknown { read_at_ms: Some(at_ms) } if at_ms <= now_ms => Wanted::Head,
            _ => Wanted::Nothing,
        }
    }

    fn deadline(&self, timeout_ms: u64, reading: bool) -> Option<u64> {
        match self.state {
            FlightState::Sent { at_ms } => Some(at_ms + timeout_ms),
            FlightState::Retry { at_ms } => Some(at_ms),
            FlightState::Unknown { read_at_ms } => read_at_ms.filter(|_| !reading),
        }
    }

    /// `None`: nothing can be concluded, either because the read failed or because it was sent before the fate became unknown.
    fn judge_by_head(&self, head: Option<&Option<(u64, Lead)>>) -> Option<Verdict> {
        if self.state != (FlightState::Unknown { read_at_ms: None }) {
            return None;
        }
        match head? {
            Some((sequence, lead)) if lead.batch == self.batch.lead.batch && lead.term == self.batch.lead.term => {
                Some(Verdict::Committed { lead: *sequence })
            }
            Some((sequence, lead)) if *sequence == self.batch.expected && lead.batch == self.after => Some(Verdict::Again),
            None if self.batch.expected == 0 => Some(Verdict::Again),
            _ => Some(Verdict::Deposed),
        }
    }
}
