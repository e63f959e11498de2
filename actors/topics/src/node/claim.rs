//! Becoming the leader: the head shows that nobody leads, a term is reserved, a lead message claims it, and the claim is confirmed. A
//! stream that was lost is rebuilt before anything else.
//!
//! Terms are reserved in CATALOG by compare-and-swap before they are used, so no two nodes ever publish under one term, also when
//! TOPICS is lost in between. What hosts say about terms raises nothing.

use std::collections::VecDeque;

use groupcast_messages::{Cut, Lead};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;

use super::flight::Flight;
use super::lead::{Contest, Reign, Role};
use super::{Desired, Effect, Incident, Node};
use crate::Map;
use crate::batch::Outgoing;
use crate::replica::Replica;
use crate::term::{BadTerm, Reserved, life_of};

/// Pause after a compile that failed.
const REBUILD_RETRY_MS: u64 = 500;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// The head has to be read once more, when no other read of it is under way.
    LookAgain,
    Looking,
    Clearing,
}

/// What a candidate finds the stream to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// Every topic is in it, since this term.
    Whole {
        since: u64,
    },
    /// It was lost, and whoever began to rebuild it did not finish, or never led: the next leader's term is the one it lives since.
    Unfinished,
    New,
}

/// This node's own copy may be behind what the lost stream held, and it may be behind what hosts have enforced: only a compile of
/// everything that was ever accepted cannot take a host back.
#[derive(Debug)]
pub(super) struct Rebuilding {
    /// What was published, as far as it is known here; with revision and digest if it was in this life of the stream.
    pub before: Map<Topic, Option<(u64, Digest)>>,
    /// When to ask for what is desired once more; `None` while the answer is awaited.
    pub again_ms: Option<u64>,
}

impl Node {
    pub(super) fn head_for_candidate(&mut self, head: Option<&Option<(u64, Lead)>>, now_ms: u64) {
        let cut = self.replica.cut();
        match head {
            None => self.candidate_again(now_ms),
            Some(None) => self.reserve(0, 0, Life::New, now_ms),
            Some(Some((sequence, lead))) => {
                if *sequence == cut.lead && lead.term == cut.term {
                    let life = match lead.incomplete {
                        false => Life::Whole { since: lead.since },
                        // A claim of the past that found the stream empty: the sequences are not this life's own.
                        true if life_of(*sequence) == 0 => Life::New,
                        true => Life::Unfinished,
                    };
                    self.reserve(*sequence, lead.batch, life, now_ms);
                } else if lead.term < cut.term {
                    // Terms never go back within one life of the stream: this is a new one, and what stands at its head is a
                    // message of the past that arrived late and found the sequence it expected by chance.
                    self.reserve(*sequence, lead.batch, Life::New, now_ms);
                } else {
                    // Somebody leads and was not heard; `follow` catches up meanwhile.
                    self.follow_again(now_ms, false);
                }
            }
        }
    }

    pub(super) fn reserve(&mut self, head: u64, after: u64, life: Life, now_ms: u64) {
        self.role = Role::Reserving { head, after, life, sent_ms: now_ms };
        let at_least = self.term_seen.max(self.replica.cut().term).saturating_add(1);
        self.out.push(Effect::ReserveTerm { at_least, new_life: life == Life::New });
    }

    pub(super) fn term_reserved(&mut self, reserved: Option<Reserved>, now_ms: u64) {
        let Role::Reserving { head, after, life, .. } = self.role else { return };
        let Some(reserved) = reserved else { return self.follow_again(now_ms, false) };
        self.bad_term = None;
        self.term_seen = self.term_seen.max(reserved.term());
        match life {
            Life::New => {
                self.role = Role::Beginning { reserved, head, after, step: Begin::LookAgain, sent_ms: now_ms };
                self.look_again(now_ms);
            }
            _ => self.claim(reserved.term(), life, head, after, now_ms),
        }
    }

    /// Nobody can lead until somebody repairs what is stored.
    pub(super) fn no_term(&mut self, why: BadTerm, now_ms: u64) {
        if self.bad_term.as_ref() != Some(&why) {
            self.out.push(Effect::Report(Incident::BadTerm(why.clone())));
        }
        self.bad_term = Some(why);
        if matches!(self.role, Role::Reserving { .. }) {
            self.follow_again(now_ms, false);
        }
    }

    /// Whoever clears the stream must have seen it unclaimed after its own term was reserved: then anybody who claims it in between
    /// finds, when it looks at the terms, that its own is not the highest, and does not lead.
    pub(super) fn look_again(&mut self, now_ms: u64) {
        if self.read_head(now_ms)
            && let Role::Beginning { step, .. } = &mut self.role
        {
            *step = Begin::Looking;
        }
    }

    pub(super) fn head_for_beginning(&mut self, found: Option<&Option<(u64, Lead)>>, now_ms: u64) {
        let Role::Beginning { reserved, head, after, step, .. } = &mut self.role else { return };
        let unclaimed = match found {
            None => false,
            Some(None) => true,
            Some(Some((sequence, lead))) => (*sequence, lead.batch) == (*head, *after),
        };
        if !unclaimed {
            return self.follow_again(now_ms, false);
        }
        *step = Begin::Clearing;
        let first = reserved.first_sequence();
        self.out.push(Effect::BeginLife { first });
    }

    pub(super) fn life_begun(&mut self, begun: bool, now_ms: u64) {
        let Role::Beginning { reserved, step: Begin::Clearing, .. } = self.role else { return };
        if begun { self.claim(reserved.term(), Life::New, 0, 0, now_ms) } else { self.follow_again(now_ms, false) }
    }

    fn claim(&mut self, term: u64, life: Life, head: u64, after: u64, now_ms: u64) {
        let since = if let Life::Whole { since } = life { since } else { term };
        let incomplete = !matches!(life, Life::Whole { .. });
        let lead = Lead { term, since, batch: self.random.draw(), incomplete, ..self.blank_lead() };
        let batch = Outgoing { proposal: None, change: 0, lead, expected: head, messages: Vec::new() };
        self.role = Role::Claiming { term, since, life, flight: Flight::new(batch, after, now_ms) };
        self.resend();
    }

    pub(super) fn term_read(&mut self, highest: Option<u64>, now_ms: u64) {
        let Role::Confirming { term, since, life, head, head_batch, .. } = self.role else { return };
        if highest != Some(term) {
            return self.follow_again(now_ms, highest.is_some());
        }
        let cut = Cut { term, lead: head };
        self.contest = Contest::default();
        let mut rebuilding = None;
        if !matches!(life, Life::Whole { .. }) {
            let present = life == Life::Unfinished;
            let known = |(topic, document): (&Topic, &Document)| {
                let revision = self.replica.revision(topic);
                (topic.clone(), (present && revision != 0).then(|| (revision, document.digest())))
            };
            rebuilding = Some(Rebuilding { before: self.replica.documents().map(known).collect(), again_ms: None });
            self.put_followers_aside();
            self.replica = Replica::restore(cut, since, []);
            self.follow.incomplete = true;
            self.serve.hold_until_published = true;
            self.serve.pending_resets = Vec::new();
            self.out.push(Effect::Report(Incident::Rebuilding { term }));
            self.want_desired();
        } else {
            self.replica.advance(cut, since);
            self.reflected = self.reflected.map(|_| (head, self.progress.0));
            self.out.push(Effect::Leading { term });
        }
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
            rebuilding,
        });
        self.forget_buffered(head);
        self.go_on(now_ms);
    }

    /// Everything was compiled: it is published by reference, so that hosts which hold the same already need not fetch it.
    pub(super) fn rebuild(&mut self, desired: Desired, now_ms: u64) {
        let Role::Leading(reign) = &mut self.role else { return };
        let Some(Rebuilding { before, .. }) = reign.rebuilding.take() else { return };
        let (term, cut) = (reign.term, Cut { term: reign.term, lead: reign.head });
        self.progress = (desired.catalog, desired.registry);
        let since = self.replica.since();
        self.put_followers_aside();
        self.replica = self.compared(desired.documents, before, cut, since);
        self.out.push(Effect::Leading { term });
        self.go_on(now_ms);
    }

    pub(super) fn rebuild_later(&mut self, now_ms: u64) {
        if let Role::Leading(Reign { rebuilding: Some(rebuilding), .. }) = &mut self.role {
            rebuilding.again_ms = Some(now_ms + REBUILD_RETRY_MS);
        }
    }
}
