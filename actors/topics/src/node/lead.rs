//! Leadership: a chain of lead messages, each expecting its predecessor, is fence, progress mark and lease in one.
//!
//! This file holds the roles and their time; `claim` is the way to the lead, `publish` what a leader sends, `flight` what becomes of it.

use std::collections::VecDeque;

use groupcast_messages::Lead;

use super::claim::{Begin, Life, Rebuilding};
use super::flight::{Flight, FlightState, Verdict, Wanted};
use super::{Effect, Node, Settings};
use crate::batch::{PROPOSALS_MAX, Proposal, Refused};
use crate::random::Random;
use crate::replica::Replica;
use crate::term::Reserved;

/// A leader that does not read what it would publish lets go after this time: shorter, and every restart of a server would change the leader.
pub const UNFIT_LEADS_MAX_MS: u64 = 2_000;
/// A leader that could not renew for so many leases, or requests that went unanswered, leads no more: others have long taken its place.
const UNRENEWED_MAX: u64 = 2;
/// Pause after a read of the head that failed.
const HEAD_RETRY_MS: u64 = 50;

impl Settings {
    /// How long a leader goes on that cannot renew.
    fn unrenewed_max_ms(&self) -> u64 {
        UNRENEWED_MAX * self.lease_ms.max(self.request_timeout_ms)
    }
}

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
        life: Life,
        sent_ms: u64,
    },
    /// The stream is new and is made to begin at sequences that no life before had, unless somebody has claimed it meanwhile.
    Beginning {
        reserved: Reserved,
        head: u64,
        after: u64,
        step: Begin,
        sent_ms: u64,
    },
    /// The claim, a lead message without a batch, is on its way.
    Claiming {
        term: u64,
        since: u64,
        life: Life,
        flight: Flight,
    },
    /// The claim is in the stream. It counts if its term is still the highest that anybody reserved: a claim that was under way
    /// for long may have found a stream that is new and empty.
    Confirming {
        term: u64,
        since: u64,
        life: Life,
        head: u64,
        head_batch: u64,
        sent_ms: u64,
    },
    Leading(Reign),
}

/// Candidates that reserve terms at the same time undo each other's claims: whoever loses waits, longer each time, for a random time.
#[derive(Debug, Default)]
pub(super) struct Contest {
    not_before_ms: u64,
    losses: u32,
}

/// The longest pause after the first loss.
const CONTEST_PAUSE_MS: u64 = 50;

impl Contest {
    fn lost(&mut self, now_ms: u64, lease_ms: u64, random: &mut Random) {
        let longest = (CONTEST_PAUSE_MS << self.losses.min(10)).min(lease_ms);
        self.losses += 1;
        self.not_before_ms = now_ms + random.below(longest + 1);
    }
}

#[derive(Debug)]
pub(super) struct Reign {
    pub term: u64,
    pub since: u64,
    /// The sequence of the last lead message, and the batch it names.
    pub head: u64,
    pub head_batch: u64,
    /// The connection was interrupted: before anything is sent the head must be seen to be this reign's, read when this time
    /// has come. A stream that lost its messages meanwhile counts from the beginning, and a bare sequence proves nothing.
    pub verify_at_ms: Option<u64>,
    pub flight: Option<Flight>,
    pub queue: VecDeque<Proposal>,
    pub renewed_ms: u64,
    pub resigning: bool,
    /// The stream is new: what was published before is compiled from scratch, and published by reference.
    pub rebuilding: Option<Rebuilding>,
}

impl Reign {
    pub fn is_rebuilding(&self) -> bool {
        self.rebuilding.is_some()
    }

    pub fn queued(&self) -> usize {
        self.queue.len() + usize::from(self.flight.is_some())
    }

    #[cfg(test)]
    pub fn flight_batch(&self) -> Option<u64> {
        self.flight.as_ref().map(|flight| flight.batch.lead.batch)
    }
}

impl Node {
    /// The lead messages are this node's; it may still be rebuilding.
    pub(super) fn holds_lead(&self) -> bool {
        matches!(self.role, Role::Leading(_))
    }

    pub(super) fn is_following(&self) -> bool {
        matches!(self.role, Role::Following { .. })
    }

    pub(super) fn lead_seen(&mut self, sequence: u64, lead: &Lead, now_ms: u64) {
        if self.serve.hold_until_published && self.is_following() && self.follow.is_synced() && !lead.incomplete {
            // Somebody leads after all: what was compiled here to be published is not what is published.
            self.fetch(now_ms);
        }
        if let Role::Following { since_ms, vacant } = &mut self.role
            && (sequence > self.replica.cut().lead || lead.since > self.replica.since())
        {
            *since_ms = now_ms;
            *vacant = lead.resigning;
            if !lead.incomplete {
                self.contest = Contest::default();
            }
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
            Role::Candidate | Role::Reserving { .. } | Role::Beginning { .. } | Role::Confirming { .. } => {
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
            Role::Leading(reign) if reign.resigning || reign.is_rebuilding() => Refused::NotLeading,
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
                if over
                    && self.contest.not_before_ms <= now_ms
                    && self.settings.candidate
                    && self.unfit_ms.is_none()
                    && self.follow.is_synced()
                    && self.read_head(now_ms)
                {
                    self.role = Role::Candidate;
                }
            }
            Role::Candidate => {}
            Role::Beginning { step: Begin::LookAgain, .. } => self.look_again(now_ms),
            Role::Reserving { sent_ms, .. } | Role::Beginning { sent_ms, .. } | Role::Confirming { sent_ms, .. } => {
                if *sent_ms + timeout <= now_ms {
                    self.follow_again(now_ms, false);
                }
            }
            Role::Claiming { flight, .. } => {
                let wanted = flight.tick(now_ms, timeout);
                self.act_on_flight(wanted, now_ms);
            }
            Role::Leading(reign) if reign.renewed_ms + self.settings.unrenewed_max_ms() <= now_ms => {
                // Most often the stream itself has no leader, and nobody took over: the head tells, and there is no lease to wait for.
                self.follow_again(now_ms, true)
            }
            Role::Leading(reign)
                if !reign.resigning && self.unfit_ms.is_some_and(|since| since + UNFIT_LEADS_MAX_MS <= now_ms) =>
            {
                reign.resigning = true;
                self.send_next(now_ms);
            }
            Role::Leading(reign) => {
                if let Some(rebuilding) = &mut reign.rebuilding
                    && rebuilding.again_ms.is_some_and(|again| again <= now_ms)
                {
                    rebuilding.again_ms = None;
                    self.want_desired();
                    return self.tick_lead(now_ms);
                }
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
            Role::Following { since_ms, vacant }
                if self.settings.candidate && self.unfit_ms.is_none() && self.follow.is_synced() =>
            {
                // A head read under way delays it; its own deadline wakes this node then.
                let over_ms = if *vacant { 0 } else { since_ms + self.settings.lease_ms };
                self.head_read_ms.is_none().then(|| over_ms.max(self.contest.not_before_ms))
            }
            Role::Following { .. } | Role::Candidate => None,
            Role::Reserving { sent_ms, .. } | Role::Beginning { sent_ms, .. } | Role::Confirming { sent_ms, .. } => {
                Some(sent_ms + timeout)
            }
            Role::Claiming { flight, .. } => flight.deadline(timeout, self.head_read_ms.is_some()),
            Role::Leading(reign) => {
                let next = match &reign.flight {
                    Some(flight) => flight.deadline(timeout, self.head_read_ms.is_some()),
                    None => match reign.verify_at_ms {
                        Some(at_ms) => Some(at_ms).filter(|_| self.head_read_ms.is_none()),
                        None => Some(reign.renewed_ms + self.settings.lease_ms / 3),
                    },
                };
                let again = reign.rebuilding.as_ref().and_then(|rebuilding| rebuilding.again_ms);
                let unfit = self.unfit_ms.filter(|_| !reign.resigning).map(|since| since + UNFIT_LEADS_MAX_MS);
                let unrenewed = Some(reign.renewed_ms + self.settings.unrenewed_max_ms());
                next.into_iter().chain(again).chain(unfit).chain(unrenewed).min()
            }
        }
    }

    /// A leader whose connection is lost longer than its lease has been replaced, or will be: it must not say that it leads.
    pub(super) fn tick_cut_off(&mut self, now_ms: u64) {
        if self.cut_off_deadline().is_some_and(|deadline| deadline <= now_ms) {
            self.follow_again(now_ms, false);
        }
    }

    pub(super) fn cut_off_deadline(&self) -> Option<u64> {
        let since = self.cut_off_ms.filter(|_| self.holds_lead())?;
        Some(since + self.settings.lease_ms)
    }

    pub(super) fn act_on_flight(&mut self, wanted: Wanted, now_ms: u64) {
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

    pub(super) fn flight_mut(&mut self) -> Option<&mut Flight> {
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
            Role::Beginning { step: Begin::Looking, .. } => self.head_for_beginning(head, now_ms),
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

    /// The head could not be read, which says nothing about who leads: it is read again, and the lease, which is over, is not waited for once
    /// more. Elections of the stream's leader take longer than it.
    pub(super) fn candidate_again(&mut self, now_ms: u64) {
        self.role = Role::Following { since_ms: now_ms, vacant: true };
        self.contest.not_before_ms = now_ms + HEAD_RETRY_MS;
        self.drain(now_ms);
    }

    pub(super) fn follow_again(&mut self, now_ms: u64, vacant: bool) {
        let was = std::mem::replace(&mut self.role, Role::Following { since_ms: now_ms, vacant });
        if !matches!(was, Role::Leading(_) | Role::Following { .. }) {
            self.contest.lost(now_ms, self.settings.lease_ms, &mut self.random);
        }
        self.drain(now_ms); // what others published while this node was occupied with itself
        if let Role::Leading(mut reign) = was {
            self.put_followers_aside();
            if reign.is_rebuilding() {
                // Nobody was told that it led, and what it holds was never compiled.
                self.replica = Replica::default();
                self.follow_anew(now_ms);
            } else {
                self.out.push(Effect::Deposed { term: reign.term });
            }
            let flying = reign.flight.take().and_then(|flight| flight.batch.proposal);
            for number in flying.into_iter().chain(reign.queue.drain(..).map(|proposal| proposal.number)) {
                self.out.push(Effect::Refused { proposal: number, why: Refused::NotLeading });
            }
            self.resync(now_ms);
        }
    }
}
