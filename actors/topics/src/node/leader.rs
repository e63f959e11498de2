//! Who leads, as a node hears of it; and that nobody does, for those who ask whether all is well.

use groupcast_messages::Lead;

use super::Node;
use crate::term::BadTerm;

/// A leader that was silent for so many leases leads no more, and nobody has taken its place.
const VACANT_AFTER_LEASES: u64 = 2;

/// Who leads, by the lead messages heard of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    pub name: String,
    pub term: u64,
    /// When a lead message of this term was first heard of, and when the last one that was new: on this node's clock.
    pub since_ms: u64,
    pub heard_ms: u64,
    /// It let go.
    pub resigned: bool,
    /// The batch of that message: reading the same once more is no sign of life.
    batch: u64,
}

/// Nobody leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vacancy {
    /// For how long nobody was heard.
    pub quiet_ms: u64,
    /// Who led before.
    pub last: Option<String>,
    pub why: Option<BadTerm>,
}

impl std::fmt::Display for Vacancy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.last {
            Some(last) => write!(f, "nobody leads: nothing was heard of {last} for {} ms", self.quiet_ms)?,
            None => write!(f, "nobody leads, and nobody was heard to for {} ms", self.quiet_ms)?,
        }
        match &self.why {
            Some(why) => write!(f, "; {why}"),
            None => write!(f, "; nothing is published until a controller leads"),
        }
    }
}

impl Node {
    /// Who leads, as far as is known here.
    pub fn leader(&self) -> Option<&Leader> {
        self.leader.as_ref()
    }

    /// Nobody leads, as far as this node knows: since when, and why, if that is known.
    pub fn vacancy(&self) -> Option<Vacancy> {
        let last = self.leader.as_ref();
        let quiet_ms = last.map_or(self.now_ms, |leader| self.now_ms.saturating_sub(leader.heard_ms));
        let leads = last.is_some_and(|leader| !leader.resigned) && quiet_ms <= self.settings.lease_ms * VACANT_AFTER_LEASES;
        if leads || self.holds_lead() {
            return None;
        }
        Some(Vacancy { quiet_ms, last: last.map(|leader| leader.name.clone()), why: self.bad_term.clone() })
    }

    pub(super) fn leader_heard(&mut self, lead: &Lead) {
        let known = self.leader.as_ref().filter(|leader| leader.term == lead.term);
        if known.is_some_and(|leader| leader.batch == lead.batch) || self.leader.as_ref().is_some_and(|l| l.term > lead.term) {
            return;
        }
        self.leader = Some(Leader {
            name: lead.leader.clone(),
            term: lead.term,
            since_ms: known.map_or(self.now_ms, |leader| leader.since_ms),
            heard_ms: self.now_ms,
            resigned: lead.resigning,
            batch: lead.batch,
        });
    }
}
