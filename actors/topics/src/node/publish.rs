//! What a leader publishes: one batch at a time, each led by a lead message that expects the one before.

use groupcast_messages::{Cut, Lead};

use super::flight::{Flight, FlightState, Verdict};
use super::follow::reset_proposal;
use super::lead::Role;
use super::{Effect, Fate, Incident, Node, Publish};
use crate::batch::{Outgoing, build};

/// Topics reset with one batch when the stream is rebuilt. A fleet comes back at the same time: a batch must be through before its fate counts
/// as unknown, or it is sent again to a server that is late already.
const RESET_TOPICS_MAX: usize = 1_000;

impl Node {
    pub(super) fn blank_lead(&self) -> Lead {
        let (catalog, registry) = self.progress;
        let leader = self.settings.name.clone();
        Lead { catalog, registry, leader, incomplete: self.lacks_topics(), ..Lead::default() }
    }

    /// The stream was lost, and not everything that belongs in it is in it yet.
    pub(super) fn lacks_topics(&self) -> bool {
        let rebuilding = matches!(&self.role, Role::Leading(reign) if reign.is_rebuilding());
        self.follow.incomplete && (rebuilding || !self.serve.pending_resets.is_empty())
    }

    /// A lead message of its own: keeps the lease, or ends it.
    pub(super) fn next_lead(&mut self) -> Outgoing {
        let batch = self.random.draw();
        let mut lead = Lead { batch, ..self.blank_lead() };
        let mut expected = 0;
        if let Role::Leading(reign) = &self.role {
            (lead.term, lead.since, lead.resigning, expected) = (reign.term, reign.since, reign.resigning, reign.head);
        }
        Outgoing { proposal: None, change: 0, lead, expected, messages: Vec::new() }
    }

    pub(super) fn send(&mut self, batch: Outgoing, now_ms: u64) {
        if let Role::Leading(reign) = &mut self.role {
            reign.flight = Some(Flight::new(batch, reign.head_batch, now_ms));
            self.resend();
        }
    }

    /// Sends the batch in flight, for the first time or again, unchanged.
    pub(super) fn resend(&mut self) {
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
    pub(super) fn send_next(&mut self, now_ms: u64) {
        loop {
            let batch = self.random.draw();
            let blank = self.blank_lead();
            match &self.role {
                Role::Leading(reign) if reign.flight.is_none() && reign.verify_at_ms.is_none() => {}
                _ => return,
            }
            self.followers();
            let Role::Leading(reign) = &mut self.role else { return };
            let resets = &mut self.serve.pending_resets;
            let proposal = if reign.is_rebuilding() {
                None
            } else if !resets.is_empty() {
                let rest = resets.split_off(resets.len().min(RESET_TOPICS_MAX));
                Some((reset_proposal(std::mem::replace(resets, rest)), true))
            } else {
                reign.queue.pop_front().map(|proposal| (proposal, false))
            };
            let Some((proposal, own)) = proposal else {
                if reign.resigning || self.follow.incomplete != blank.incomplete {
                    let lead = self.next_lead();
                    self.send(lead, now_ms);
                }
                return;
            };
            let (catalog, registry) = (blank.catalog.max(proposal.catalog), blank.registry.max(proposal.registry));
            // Every topic is there once the last of those that are published by reference is.
            let incomplete = self.follow.incomplete && !self.serve.pending_resets.is_empty();
            let lead = Lead { term: reign.term, since: reign.since, batch, catalog, registry, incomplete, ..blank };
            let (number, head) = (proposal.number, reign.head);
            let Some(followers) = &self.followers else { return };
            match build(proposal, lead, head, &self.replica, followers) {
                Ok(mut batch) => {
                    if own {
                        batch.proposal = None;
                    }
                    // Not before: what is refused is not reflected, and the next lead message must not say so.
                    self.progress = (catalog, registry);
                    return self.send(batch, now_ms);
                }
                Err(why) => self.out.push(Effect::Refused { proposal: number, why }),
            }
        }
    }

    pub(super) fn published(&mut self, batch: u64, fate: Fate, now_ms: u64) {
        let (retry_ms, stuck_ms) = (self.settings.retry_ms, self.settings.request_timeout_ms);
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
                self.decide(Some(Verdict::Committed { lead: last - (expected - 1) }), now_ms);
            }
            Fate::Undecided => {
                if flight.undecided(now_ms, retry_ms, stuck_ms) {
                    self.out.push(Effect::Report(Incident::StreamStuck));
                    self.out.push(Effect::StepDown);
                }
            }
            Fate::Refused | Fate::Unknown => {
                flight.state = FlightState::Unknown { read_at_ms: Some(now_ms) };
                flight.undecided_since_ms = None;
            }
        }
    }

    pub(super) fn decide(&mut self, verdict: Option<Verdict>, now_ms: u64) {
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

    pub(super) fn committed(&mut self, lead: u64, now_ms: u64) {
        match std::mem::replace(&mut self.role, Role::Candidate) {
            Role::Claiming { term, since, life, flight } => {
                self.leader_heard(&flight.batch.lead);
                self.role =
                    Role::Confirming { term, since, life, head: lead, head_batch: flight.batch.lead.batch, sent_ms: now_ms };
                self.out.push(Effect::ReadTerm);
                return;
            }
            Role::Leading(mut reign) => {
                let Some(flight) = reign.flight.take() else { return };
                self.leader_heard(&flight.batch.lead);
                reign.head = lead;
                reign.head_batch = flight.batch.lead.batch;
                reign.verify_at_ms = None;
                reign.renewed_ms = now_ms;
                let (term, since) = (reign.term, reign.since);
                let resigned = flight.batch.lead.resigning;
                let rebuilt = self.follow.incomplete && !flight.batch.lead.incomplete;
                self.follow.incomplete = flight.batch.lead.incomplete;
                self.role = Role::Leading(reign);
                if rebuilt {
                    self.reflected = Some((lead, 0)); // with it everything is in the stream again, whichever change it came with
                }
                self.batch_committed(flight.batch, Cut { term, lead }, since, now_ms);
                if resigned {
                    return self.follow_again(now_ms, false);
                }
            }
            other => self.role = other,
        }
        self.go_on(now_ms);
    }

    /// Answers hosts again once everything they would be told is published, and publishes what waits.
    pub(super) fn go_on(&mut self, now_ms: u64) {
        if self.serve.pending_resets.is_empty() && self.is_leading() && !self.follow.incomplete {
            self.serve.hold_until_published = false;
        }
        self.serve_advanced();
        self.send_next(now_ms);
    }

    pub(super) fn batch_committed(&mut self, batch: Outgoing, cut: Cut, since: u64, now_ms: u64) {
        let (proposal, change, catalog) = (batch.proposal, batch.change, batch.lead.catalog);
        self.forget_buffered(cut.lead + u64::from(batch.lead.count));
        let published = batch.published(cut.lead);
        let mut committed = self.judged(cut, since, &published, (change, catalog));
        committed.proposal = proposal;
        if let Err(unfit) = self.apply(cut, since, &published, &mut committed) {
            // The batch was built against this very replica.
            self.out.push(Effect::Report(Incident::Unfit(unfit)));
            return self.follow_again(now_ms, false);
        }
        if proposal.is_some() || !committed.topics.is_empty() {
            self.out.push(Effect::Committed(committed));
        }
    }
}
