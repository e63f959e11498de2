//! A batch on its way, and what becomes of it. When its fate is unknown the head tells: my batch id, it is committed; the head I
//! expected, it is not and is sent again unchanged; anything else, somebody else leads.

use groupcast_messages::Lead;

use crate::batch::Outgoing;

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Flight {
    pub batch: Outgoing,
    /// The batch that the expected lead message names; 0 for none.
    pub after: u64,
    pub state: FlightState,
    /// Since when the server has called it undecided, time after time.
    pub undecided_since_ms: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FlightState {
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

pub(super) enum Verdict {
    Committed { lead: u64 },
    Again,
    Deposed,
}

pub(super) enum Wanted {
    Nothing,
    Resend,
    Head,
}

impl Flight {
    pub fn new(batch: Outgoing, after: u64, now_ms: u64) -> Self {
        Self { batch, after, state: FlightState::Sent { at_ms: now_ms }, undecided_since_ms: None }
    }

    pub fn tick(&mut self, now_ms: u64, timeout_ms: u64) -> Wanted {
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

    /// The server calls it undecided. True: it has done so for `stuck_ms`, and again and again.
    ///
    /// A replicated stream that is purged while a message expecting a subject's sequence is on its way through the replicas may
    /// wait for that message for ever, and call everything else for that subject undecided until it has another leader (2 of 400
    /// such races on a server 2.15.1).
    pub fn undecided(&mut self, now_ms: u64, retry_ms: u64, stuck_ms: u64) -> bool {
        self.state = FlightState::Retry { at_ms: now_ms + retry_ms };
        let since = *self.undecided_since_ms.get_or_insert(now_ms);
        let stuck = since + stuck_ms <= now_ms;
        if stuck {
            self.undecided_since_ms = Some(now_ms);
        }
        stuck
    }

    pub fn deadline(&self, timeout_ms: u64, reading: bool) -> Option<u64> {
        match self.state {
            FlightState::Sent { at_ms } => Some(at_ms + timeout_ms),
            FlightState::Retry { at_ms } => Some(at_ms),
            FlightState::Unknown { read_at_ms } => read_at_ms.filter(|_| !reading),
        }
    }

    /// `None`: nothing can be concluded, either because the read failed or because it was sent before the fate became unknown.
    pub fn judge_by_head(&self, head: Option<&Option<(u64, Lead)>>) -> Option<Verdict> {
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
