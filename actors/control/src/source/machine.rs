//! One source as a state machine: whether this controller leads, the time, and what came of polls and writes go in; what to load, poll
//! and write, whom to answer and when to look again come out.

use std::time::Duration;

use groupcast_policy::ids::SourceId;

use super::config::Intervals;
use super::diff::{changes, diff};
use super::guard::{self, Gone, Held, Verdict};
use super::owned::Owned;
use super::status::{LastError, Outcome, Status};
pub use super::step::{Answer, Effect, Event, NotWritten, Plan, Written};
use super::{Failed, Observation, Polled, Problems, united};

/// Those who may wait for one poll.
pub const ASKS_MAX: usize = 1_024;
/// Times that one observation is written again after somebody else has written what the source owns.
pub const CONFLICTS_MAX: u32 = 5;
/// A source that fails is asked half as often after each failure; unless its interval is longer, not less often than this.
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A source that has to be read whole to know whether anything is new is read at most this often.
pub const COSTLY_INTERVAL: Duration = Duration::from_secs(60);
/// A source that takes long rests as long as its poll took, at most this long: it is not asked all the time because it changes all the time.
pub const REST_MAX: Duration = Duration::from_secs(60);
/// The longest that a source may ask to be left alone.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);
/// What cannot be read is asked for again after this, with all else, and then each time after twice as long, down to the full sync's interval: it may be
/// mended without anybody saying so.
pub const MALFORMED_PAUSE: Duration = Duration::from_secs(5);
/// A source that wants most of what it owns deleted is read this often before that is believed.
const HOLD_LOOKS: u32 = 4;
/// What could not be read or written on the bus is tried again after this.
pub const BUS_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq)]
enum Doing {
    Nothing,
    Loading,
    Polling {
        full: bool,
    },
    Writing {
        observation: Box<Observation>,
        plan: Box<Plan>,
        conflicts: u32,
    },
    /// Reading again what is owned, to write the same observation over it.
    Reloading {
        observation: Box<Observation>,
        conflicts: u32,
    },
}

pub struct Machine {
    id: SourceId,
    kind: &'static str,
    intervals: Intervals,
    random: u64,
    leading: bool,
    doing: Doing,
    /// Tells what comes back from what was begun under an earlier lead.
    run: u64,
    owned: Option<Owned>,
    marker: Option<String>,
    full_at_ms: Option<u64>,
    /// When everything is read again because something could not be, and how long that waits.
    again: Option<(u64, Duration)>,
    next_ms: u64,
    held: Option<Held>,
    costly: bool,
    /// Those who wait for the poll that runs, and those who came after it began.
    asks: Vec<u64>,
    next_asks: Vec<u64>,
    next_full: bool,
    failures: u32,
    success_ms: Option<u64>,
    success_began_ms: Option<u64>,
    began_ms: u64,
    error: Option<(String, u64)>,
    problems: Problems,
    withheld: Problems,
    polls: u64,
    full_syncs: u64,
    last_change: Option<u64>,
    outcome: Option<Outcome>,
}

impl Machine {
    pub fn new(id: SourceId, kind: &'static str, intervals: Intervals, seed: u64) -> Self {
        Self {
            id,
            kind,
            intervals,
            random: seed | 1,
            leading: false,
            doing: Doing::Nothing,
            run: 0,
            owned: None,
            marker: None,
            full_at_ms: None,
            again: None,
            next_ms: 0,
            held: None,
            costly: false,
            asks: Vec::new(),
            next_asks: Vec::new(),
            next_full: false,
            failures: 0,
            success_ms: None,
            success_began_ms: None,
            began_ms: 0,
            error: None,
            problems: Problems::default(),
            withheld: Problems::default(),
            polls: 0,
            full_syncs: 0,
            last_change: None,
            outcome: None,
        }
    }

    pub fn id(&self) -> &SourceId {
        &self.id
    }

    /// What came of the last poll, once.
    pub fn outcome(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    pub fn handle(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        let mut out = Vec::new();
        match event {
            Event::Leading(true) if !self.leading => {
                self.leading = true;
                self.next_ms = now_ms;
            }
            Event::Leading(true) | Event::Tick => {}
            Event::Leading(false) => self.end(&mut out),
            Event::PollNow { ask, full } => self.ask(ask, full, now_ms, &mut out),
            Event::Confirm { ask } => match &mut self.held {
                Some(held) => {
                    held.confirmed = true;
                    self.ask(ask, true, now_ms, &mut out);
                }
                None if self.leading => out.push(Effect::Answer { ask, answer: Answer::NothingHeld }),
                None => out.push(Effect::Answer { ask, answer: Answer::NotLeading }),
            },
            Event::Loaded { run, result } if run == self.run => self.loaded(result, now_ms, &mut out),
            Event::Polled { run, result } if run == self.run => self.polled(result, now_ms, &mut out),
            Event::Written { run, result } if run == self.run => self.written(result, now_ms, &mut out),
            Event::Loaded { .. } | Event::Polled { .. } | Event::Written { .. } => {}
        }
        self.begin(now_ms, &mut out);
        if self.leading && self.doing == Doing::Nothing {
            out.push(Effect::WakeAt(self.next_ms));
        }
        out
    }

    /// Another leads now: what is under way here is nobody's any more, and what is known will be out of date.
    fn end(&mut self, out: &mut Vec<Effect>) {
        self.leading = false;
        self.run += 1;
        self.doing = Doing::Nothing;
        (self.owned, self.marker, self.full_at_ms, self.held) = (None, None, None, None);
        self.again = None;
        self.failures = 0;
        let asks = self.asks.drain(..).chain(self.next_asks.drain(..));
        out.extend(asks.map(|ask| Effect::Answer { ask, answer: Answer::NotLeading }));
        self.next_full = false;
    }

    /// An operator's order is a full poll and is obeyed; what hosts ask for is not, and does not make a source that fails, or wants to be left
    /// alone, be asked before its time.
    fn ask(&mut self, ask: u64, full: bool, now_ms: u64, out: &mut Vec<Effect>) {
        if !self.leading {
            return out.push(Effect::Answer { ask, answer: Answer::NotLeading });
        }
        if let (false, Doing::Nothing, Some((error, _))) = (full, &self.doing, &self.error)
            && now_ms < self.next_ms
        {
            let wait = Duration::from_millis(self.next_ms - now_ms).as_secs_f32();
            let words = format!("source {} fails and is asked again in {wait:.1} s: {error}", self.id);
            return out.push(Effect::Answer { ask, answer: Answer::Failed(words) });
        }
        if self.next_asks.len() >= ASKS_MAX {
            let words = format!("{ASKS_MAX} others wait for source {} already: try again", self.id);
            return out.push(Effect::Answer { ask, answer: Answer::Failed(words) });
        }
        self.next_asks.push(ask);
        self.next_full |= full;
    }

    fn begin(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        if !self.leading || self.doing != Doing::Nothing || (now_ms < self.next_ms && self.next_asks.is_empty()) {
            return;
        }
        self.run += 1;
        self.asks = std::mem::take(&mut self.next_asks);
        self.began_ms = now_ms;
        if self.owned.is_none() {
            self.doing = Doing::Loading;
            return out.push(Effect::Load { run: self.run });
        }
        self.poll(now_ms, out);
    }

    fn poll(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        // The poll after this one would be too late.
        let next = self.intervals.poll + self.intervals.poll / 10;
        let overdue = |at: u64| Duration::from_millis(now_ms.saturating_sub(at)) + next > self.intervals.full_sync;
        let again = self.again.is_some_and(|(at, _)| now_ms >= at);
        let full = std::mem::take(&mut self.next_full) || again || self.full_at_ms.is_none_or(overdue);
        self.polls += 1;
        self.began_ms = now_ms;
        self.doing = Doing::Polling { full };
        out.push(Effect::Poll { run: self.run, full, marker: self.marker.clone() });
    }

    fn loaded(&mut self, result: Result<Box<Owned>, String>, now_ms: u64, out: &mut Vec<Effect>) {
        match (std::mem::replace(&mut self.doing, Doing::Nothing), result) {
            (Doing::Loading, Ok(owned)) => {
                self.owned = Some(*owned);
                self.poll(now_ms, out);
            }
            (Doing::Reloading { observation, conflicts }, Ok(owned)) => {
                self.owned = Some(*owned);
                self.compare(observation, conflicts, true, now_ms, out);
            }
            (_, Err(message)) => self.failed(Failed { message, retry_after: Some(BUS_PAUSE) }, now_ms, out),
            (_, Ok(_)) => {}
        }
    }

    fn polled(&mut self, result: Result<Polled, Failed>, now_ms: u64, out: &mut Vec<Effect>) {
        let Doing::Polling { full } = std::mem::replace(&mut self.doing, Doing::Nothing) else { return };
        match result {
            Ok(Polled::Unchanged) => self.succeeded(None, now_ms, out),
            Ok(Polled::Observed(mut observation)) => {
                united::judge(&mut observation);
                self.full_syncs += u64::from(full);
                self.compare(observation, 0, false, now_ms, out);
            }
            Err(failed) => self.failed(failed, now_ms, out),
        }
    }

    /// `fresh`: what is owned was read after the poll.
    fn compare(&mut self, observation: Box<Observation>, conflicts: u32, fresh: bool, now_ms: u64, out: &mut Vec<Effect>) {
        let Some(owned) = &self.owned else { return };
        let difference = diff(owned, &observation);
        let mut problems = observation.problems.clone();
        problems.extend(&difference.problems);
        if problems != self.problems {
            // Something else is wrong, or nothing any more: it is looked after anew.
            self.again = None;
        }
        self.problems = problems;
        self.withheld = difference.withheld.clone();
        let gone = [
            Gone { deletions: difference.deletions(), owned: owned.groups.len() },
            Gone { deletions: difference.removals(&observation), owned: owned.workloads.len() },
        ];
        let doubtful = observation.doubtful;
        if let Verdict::Hold(held) = guard::judge(self.held.as_ref(), &gone, doubtful, now_ms, self.intervals.hold) {
            return self.hold(held, now_ms, out);
        }
        let takes_away = !difference.deletions().is_empty() || difference.withheld.count > 0;
        if takes_away && !fresh {
            // Others may have written a deny that names what is to go, or removed the one that kept it.
            self.run += 1;
            self.doing = Doing::Reloading { observation, conflicts };
            return out.push(Effect::Load { run: self.run });
        }
        if difference.is_empty() {
            return self.succeeded(Some((observation, None)), now_ms, out);
        }
        let plan = Box::new(Plan { changes: changes(&difference, owned), difference });
        out.push(Effect::Write { run: self.run, plan: plan.clone() });
        self.doing = Doing::Writing { observation, plan, conflicts };
    }

    /// Nothing is written and nothing is remembered, so that the next poll looks at everything again.
    fn hold(&mut self, held: Held, now_ms: u64, out: &mut Vec<Effect>) {
        let answer = Answer::Held { deletions: held.deletions.len() };
        self.held = Some(held);
        self.outcome = Some(Outcome::Held);
        (self.marker, self.full_at_ms) = (None, None);
        (self.failures, self.error) = (0, None);
        // Until it may be believed, everything is read each time: not more often than needed.
        self.next_ms = now_ms + self.jittered(self.intervals.poll.max(self.intervals.hold / HOLD_LOOKS));
        self.answer(&answer, out);
    }

    fn written(&mut self, result: Result<Written, NotWritten>, now_ms: u64, out: &mut Vec<Effect>) {
        let Doing::Writing { observation, plan, conflicts } = std::mem::replace(&mut self.doing, Doing::Nothing) else { return };
        match result {
            Ok(written) => self.succeeded(Some((observation, Some((plan, written)))), now_ms, out),
            Err(NotWritten { conflict: true, .. }) if conflicts < CONFLICTS_MAX => {
                self.run += 1;
                self.doing = Doing::Reloading { observation, conflicts: conflicts + 1 };
                out.push(Effect::Load { run: self.run });
            }
            Err(NotWritten { message, .. }) => {
                // Some of it may be written: what is owned has to be read again.
                self.owned = None;
                self.failed(Failed { message, retry_after: Some(BUS_PAUSE) }, now_ms, out);
            }
        }
    }

    #[allow(clippy::type_complexity)]
    fn succeeded(
        &mut self,
        observed: Option<(Box<Observation>, Option<(Box<Plan>, Written)>)>,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) {
        self.outcome = Some(Outcome::Unchanged);
        if let Some((observation, wrote)) = observed {
            self.marker = observation.marker;
            if !observation.partial {
                self.full_at_ms = Some(self.began_ms);
            }
            self.again = self.next_again(observation.partial, now_ms);
            self.costly = observation.costly;
            self.held = None;
            self.outcome = Some(Outcome::Observed);
            if let (Some((plan, written)), Some(owned)) = (wrote, &mut self.owned) {
                self.outcome = Some(Outcome::Changed);
                self.last_change = written.catalog.or(self.last_change);
                written.withheld.values().for_each(|words| self.withheld.add(words));
                owned.remember(*plan, &written);
            }
        }
        (self.failures, self.error) = (0, None);
        self.success_ms = Some(now_ms);
        self.success_began_ms = Some(self.began_ms);
        self.next_ms = now_ms + self.next_wait(now_ms);
        let (catalog, registry) = self.owned.as_ref().map_or((0, 0), |owned| (owned.catalog, owned.registry));
        self.answer(&Answer::Done { catalog, registry }, out);
    }

    /// When what could not be read is asked for again.
    fn next_again(&self, partial: bool, now_ms: u64) -> Option<(u64, Duration)> {
        let wait = match self.again {
            _ if self.problems.count == 0 => return None,
            // What did not move was not asked for.
            Some(again) if partial => return Some(again),
            Some((_, wait)) => wait.saturating_mul(2).min(self.intervals.full_sync),
            None => MALFORMED_PAUSE.max(self.intervals.poll).min(self.intervals.full_sync),
        };
        Some((now_ms.saturating_add(wait.as_millis() as u64), wait))
    }

    fn failed(&mut self, failed: Failed, now_ms: u64, out: &mut Vec<Effect>) {
        self.failures = self.failures.saturating_add(1);
        self.outcome = Some(Outcome::Failed);
        let factor = 1u32.checked_shl(self.failures - 1).unwrap_or(u32::MAX);
        let usual = self.intervals.poll.saturating_mul(factor).min(BACKOFF_MAX.max(self.intervals.poll));
        let wait = failed.retry_after.map_or(usual, |asked| asked.min(RETRY_AFTER_MAX));
        self.next_ms = now_ms + self.jittered(wait);
        if !self.next_full {
            // Who came since this poll began would have the source asked again at once.
            self.asks.append(&mut self.next_asks);
        }
        self.answer(&Answer::Failed(failed.message.clone()), out);
        self.error = Some((failed.message, now_ms));
    }

    fn answer(&mut self, answer: &Answer, out: &mut Vec<Effect>) {
        out.extend(self.asks.drain(..).map(|ask| Effect::Answer { ask, answer: answer.clone() }));
    }

    /// How long a source that is well is left alone.
    fn next_wait(&mut self, now_ms: u64) -> u64 {
        let took = Duration::from_millis(now_ms.saturating_sub(self.began_ms)).min(REST_MAX);
        let least = if self.costly { COSTLY_INTERVAL } else { Duration::ZERO };
        self.jittered(self.intervals.poll.max(took).max(least))
    }

    /// Up to a tenth more or less, so that many sources do not ask at once.
    fn jittered(&mut self, interval: Duration) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let interval_ms = interval.as_millis() as u64;
        interval_ms - interval_ms / 10 + self.random % (interval_ms / 5 + 1)
    }

    pub fn status(&self, now_ms: u64) -> Status {
        let ago = |at: u64| now_ms.saturating_sub(at);
        let error = self.error.as_ref().map(|(message, at)| LastError { message: message.clone(), ms_ago: ago(*at) });
        let owned = self.owned.as_ref();
        Status {
            id: self.id.to_string(),
            kind: self.kind.to_owned(),
            polling: self.doing != Doing::Nothing,
            last_success_ms_ago: self.success_ms.map(ago),
            lag_ms: self.success_began_ms.map(ago),
            last_error: error,
            failures: self.failures,
            groups: owned.map_or(0, |owned| owned.groups.len()),
            workloads: owned.map_or(0, |owned| owned.workloads.len()),
            held: self.held.as_ref().map(|held| super::status::HeldBack::new(held, now_ms)),
            malformed: self.problems.count,
            malformed_named: self.problems.named.clone(),
            deletions_stopped: self.problems.nameless,
            withheld: self.withheld.count,
            withheld_named: self.withheld.named.clone(),
            polls: self.polls,
            full_syncs: self.full_syncs,
            last_change: self.last_change,
            poll_interval_ms: self.intervals.poll.as_millis() as u64,
        }
    }

    /// What it believes to own.
    pub fn owned(&self) -> Option<&Owned> {
        self.owned.as_ref()
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
