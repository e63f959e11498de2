//! Noticing what was lost without a trace: revisions are compared with the snapshot service's, soon after anything that may have
//! left a hole and every now and then.

use std::collections::BTreeMap;

use groupcast_messages::{EntropyAnswer, EntropyCheck, Nudge, entropy_item};
use groupcast_policy::topic::TopicHash;

use super::{Effect, Reader, Settings};
use crate::random::Random;

#[derive(Debug, Default)]
pub(super) struct Checks {
    /// After a subscription or reconnect, earliest first.
    rechecks_ms: Vec<u64>,
    periodic_ms: Option<u64>,
    /// A difference was seen; what is still behind when this time comes is asked for.
    behind: Option<Behind>,
    /// Whether the check under way is a recheck, which settles faster.
    quick: bool,
}

#[derive(Debug)]
struct Behind {
    due_ms: u64,
    term: u64,
    revisions: BTreeMap<TopicHash, u64>,
    /// The service knows topics this host does not follow, or more than fit into its answer.
    more: bool,
}

impl Checks {
    pub fn restart(&mut self, now_ms: u64, settings: &Settings, random: &mut Random) {
        self.rechecks_ms = settings.rechecks_ms.iter().map(|after| now_ms + after).collect();
        self.schedule_periodic(now_ms, settings, random);
    }

    /// Once, within `jitter_ms`.
    pub fn soon(&mut self, now_ms: u64, jitter_ms: u64, random: &mut Random) {
        let due = now_ms + jitter_ms + random.below(jitter_ms + 1);
        if self.rechecks_ms.first().is_none_or(|first| *first > due) {
            self.rechecks_ms.insert(0, due);
        }
    }

    fn schedule_periodic(&mut self, now_ms: u64, settings: &Settings, random: &mut Random) {
        let spread = settings.entropy_max_ms.saturating_sub(settings.entropy_min_ms);
        self.periodic_ms = Some(now_ms + settings.entropy_min_ms + random.below(spread + 1));
    }

    pub fn deadline(&self) -> Option<u64> {
        let behind = self.behind.as_ref().map(|behind| behind.due_ms);
        [self.rechecks_ms.first().copied(), self.periodic_ms, behind].into_iter().flatten().min()
    }
}

impl Reader {
    pub(super) fn tick_checks(&mut self, now_ms: u64) {
        if self.repair.in_flight.is_some() {
            return; // what is due is made when the answer is here: it says more than a check, and whoever answers both has enough to do
        }
        if self.checks.behind.as_ref().is_some_and(|behind| behind.due_ms <= now_ms)
            && let Some(behind) = self.checks.behind.take()
            && self.is_still_behind(&behind)
        {
            self.want_ask(now_ms, 0);
            self.tick_repair(now_ms);
        }
        let recheck = self.checks.rechecks_ms.first().is_some_and(|due| *due <= now_ms);
        let periodic = self.checks.periodic_ms.is_some_and(|due| due <= now_ms);
        if !recheck && !periodic {
            return;
        }
        self.checks.rechecks_ms.retain(|due| *due > now_ms);
        self.checks.schedule_periodic(now_ms, &self.settings, &mut self.random);
        if self.cut.is_none() {
            return; // the first answer is still to come: nothing to compare
        }
        if periodic {
            self.acks.repeat_state();
        }
        self.checks.quick = recheck;
        self.check();
    }

    pub(super) fn check(&mut self) {
        let check = EntropyCheck { term: self.term(), hash: self.entropy(), topics: self.held.0.len() as u32 };
        self.out.push(Effect::Entropy(check.encode()));
    }

    pub(super) fn entropy(&self) -> u64 {
        let items = self.held.0.values().map(|held| entropy_item(held.hash, held.revision));
        items.fold(0, u64::wrapping_add)
    }

    pub(super) fn entropy_answered(&mut self, payload: &[u8], now_ms: u64) {
        let answer = EntropyAnswer::decode(payload);
        if let Ok(EntropyAnswer::Equal { cut } | EntropyAnswer::Differs { cut, .. }) = &answer
            && self.knock.take().is_some()
        {
            self.repair.let_in = Some(cut.term);
            return self.enter(now_ms);
        }
        match answer {
            Ok(EntropyAnswer::Equal { .. }) => {} // convergence has heard it too
            Ok(EntropyAnswer::Differs { cut, revisions, truncated }) => {
                let settle = if self.checks.quick { self.settings.recheck_settle_ms } else { self.settings.entropy_settle_ms };
                let due_ms = now_ms + settle;
                let behind = Behind { due_ms, term: cut.term, revisions: revisions.into_iter().collect(), more: truncated };
                if self.is_still_behind(&behind) {
                    self.checks.behind = Some(behind);
                }
            }
            // The service is of another mind about the format; the periodic check comes back to it.
            Err(_) => {}
        }
    }

    fn is_still_behind(&self, behind: &Behind) -> bool {
        behind.more
            || behind.term > self.term()
            || (behind.term == self.term() && self.lacks(behind.revisions.iter().map(|(t, r)| (*t, *r))))
    }

    /// Whether a revision of this term is missing here.
    fn lacks(&self, mut revisions: impl Iterator<Item = (TopicHash, u64)>) -> bool {
        revisions.any(|(hash, revision)| {
            let held = self.by_hash.of(hash).filter_map(|topic| self.held.revision(topic)).max();
            held.is_none_or(|held| held < revision)
        })
    }

    /// Convergence says what this host should have by now.
    pub(super) fn nudged(&mut self, payload: &[u8], now_ms: u64) {
        let Ok(nudge) = Nudge::decode(payload) else { return };
        if let Some(knock) = &mut self.knock {
            // Whoever misses this host is there to answer.
            return knock.at_once(now_ms);
        }
        let term = self.term();
        if nudge.cut.term > term || (nudge.cut.term == term && self.lacks(nudge.should.into_iter())) {
            self.want_ask(now_ms, self.settings.ask_jitter_ms);
        } else if nudge.cut.term == term {
            // It is here; what was lost is the acknowledgement.
            self.acks.repeat();
        }
    }
}
