//! Waiting for one's own re-enrolment. A host that was cut off for long is forgotten: its workloads are gone from its own document, and they
//! would be closed until they are enrolled again, a moment later. So what takes away a workload that this host enrols by itself waits for the
//! enrolment's outcome, for a short time, while the last good policy stays in force. What is refused, or takes too long, is not waited for.

use std::collections::BTreeSet;

use groupcast_policy::doc::{Content, Document};
use groupcast_policy::ids::WorkloadId;

/// How long a commit waits for the enrolment of what it takes away. An enrolment takes some ten milliseconds.
pub const HOLD_MAX_MS: u64 = 3_000;

pub type Workloads = BTreeSet<WorkloadId>;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Hold {
    /// What this host enrols by itself, and was not refused.
    wanted: Workloads,
    /// What its own document said of these when it was last handed on, and says now.
    handed: Workloads,
    newest: Workloads,
    since_ms: Option<u64>,
}

/// The workloads of a host's own document.
pub fn workloads(document: Option<&Document>) -> Workloads {
    match document.and_then(Document::content) {
        Some(Content::Host(placements)) => placements.keys().cloned().collect(),
        _ => Workloads::new(),
    }
}

/// Those among these that a host's own document names.
pub fn named(document: Option<&Document>, among: &Workloads) -> Workloads {
    match document.and_then(Document::content) {
        Some(Content::Host(placements)) => among.iter().filter(|id| placements.contains_key(*id)).cloned().collect(),
        _ => Workloads::new(),
    }
}

impl Hold {
    pub fn wanted(&self) -> &Workloads {
        &self.wanted
    }

    /// What is in force when the agent starts.
    pub fn starts_from(&mut self, in_force: Workloads) {
        (self.handed, self.newest) = (in_force.clone(), in_force);
    }

    pub fn wants(&mut self, wanted: Workloads) {
        self.wanted = wanted;
    }

    /// The host's own document has changed and names these of what is wanted; whether a wait begins with it.
    pub fn moved(&mut self, newest: Workloads, now_ms: u64) -> bool {
        self.newest = newest;
        let begins = self.lacks() && self.since_ms.is_none();
        if begins {
            self.since_ms = Some(now_ms);
        }
        begins
    }

    /// Something is in force, is still wanted, and would be taken away.
    fn lacks(&self) -> bool {
        self.wanted.iter().any(|id| self.handed.contains(id) && !self.newest.contains(id))
    }

    pub fn is_over(&self, now_ms: u64) -> bool {
        !self.lacks() || self.since_ms.is_none_or(|since| now_ms >= since.saturating_add(HOLD_MAX_MS))
    }

    /// Everything up to the newest is handed on.
    pub fn handed_on(&mut self) {
        self.since_ms = None;
        if self.handed != self.newest {
            self.handed = self.newest.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(names: &str) -> Workloads {
        names.split_whitespace().map(|name| name.parse().unwrap()).collect()
    }

    fn holding() -> Hold {
        let mut hold = Hold::default();
        hold.starts_from(ids("own other"));
        hold.wants(ids("own new"));
        hold
    }

    #[test]
    fn what_takes_away_an_own_workload_waits_until_it_is_back() {
        let mut hold = holding();
        assert!(hold.moved(ids(""), 10) && !hold.is_over(10));
        assert!(!hold.moved(ids("other"), 20) && !hold.is_over(20), "one wait, from its beginning");
        assert!(!hold.moved(ids("own"), 30) && hold.is_over(30));
        hold.handed_on();
        assert!(hold.moved(ids(""), 40) && !hold.is_over(40), "the next time as well");
    }

    #[test]
    fn it_waits_for_a_bounded_time_and_once() {
        let mut hold = holding();
        assert!(hold.moved(ids("other"), 10));
        assert!(!hold.is_over(10 + HOLD_MAX_MS - 1) && hold.is_over(10 + HOLD_MAX_MS));
        hold.handed_on();
        assert!(!hold.moved(ids(""), 9_000) && hold.is_over(9_000), "what was given up is not waited for again");
    }

    #[test]
    fn nobody_waits_for_what_others_placed_for_what_is_refused_and_for_what_was_never_there() {
        let mut hold = holding();
        assert!(!hold.moved(ids("own"), 10), "placed by somebody else");
        hold.handed_on();
        assert!(hold.moved(ids(""), 20));
        hold.wants(ids("new"));
        assert!(hold.is_over(20), "refused, or ended here");
        hold.handed_on();
        assert!(!hold.moved(ids("other"), 30), "new was never in force");
    }
}
