//! Registrations that are asked for, repeated and answered. A repetition is the same registration under the same number, so an answer to
//! any of them counts, from whichever controller and however late.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_messages::{REGISTER_WORKLOADS_MAX, Register, RegisterAnswer};
use groupcast_policy::ids::WorkloadId;

use super::{ANSWER_WITHIN_MS, Effect, Enroller, RETRY_FIRST_MS, RETRY_MAX_MS};

/// A registration that was sent and is not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    pub number: u64,
    /// Workloads it names.
    pub together: usize,
    /// How often it was repeated.
    pub repeats: u32,
    /// It counts as lost then; nothing when it does already.
    pub lost_at_ms: Option<u64>,
}

impl Enroller {
    /// Of those that were asked for under this number and are wanted as they were then; the others have moved on.
    pub(super) fn registered(&mut self, number: u64, answer: &RegisterAnswer, now_ms: u64) {
        let is_it = |asked: &Asked| asked.number == number;
        // Whatever was on its way has arrived: what has ended meanwhile can be removed now.
        for ended in self.ended.values_mut().filter(|ended| !ended.sent) {
            if let Some(asked) = ended.asked.take_if(|asked| is_it(asked)) {
                (ended.due_ms, ended.doubtful) = (now_ms, asked.repeats > 0);
            }
        }
        for (id, wanted) in &mut self.wanted {
            let Some(asked) = wanted.asked.take_if(|asked| is_it(asked)) else { continue };
            if asked.repeats > 0 {
                wanted.repeated_until_ms = now_ms + RETRY_MAX_MS;
            }
            match answer {
                RegisterAnswer::Registered { incarnations, health } => {
                    let Some((_, incarnation)) = incarnations.iter().find(|(named, _)| named == id) else { continue };
                    if wanted.incarnation.is_some_and(|before| before != *incarnation) {
                        wanted.reported = true;
                    }
                    (wanted.incarnation, wanted.refused, wanted.attempts) = (Some(*incarnation), None, 0);
                    wanted.stale = false;
                    wanted.check_by(health, now_ms);
                }
                RegisterAnswer::Refused { retryable, reason } => {
                    // One that is bad must not hold up the others: each is tried by itself.
                    let again_alone = asked.together > 1 && !wanted.alone;
                    wanted.alone |= asked.together > 1;
                    wanted.refused = Some(reason.clone());
                    wanted.due_ms = now_ms + if again_alone { 0 } else { wait_ms(&mut wanted.attempts, *retryable) };
                }
            }
        }
    }

    /// What is not registered and not on its way: as it was asked for before, if nobody has answered that, and otherwise anew.
    pub(super) fn registrations(&mut self, now_ms: u64) -> Vec<Effect> {
        let (mut again, mut batches) = (BTreeMap::<u64, Vec<WorkloadId>>::new(), BTreeMap::<String, Vec<WorkloadId>>::new());
        let mut groups = Vec::new();
        // What it was on another network is removed first: nobody is on two.
        let moving: BTreeSet<&WorkloadId> = self.ended.iter().filter(|(_, ended)| !ended.taken).map(|((_, id), _)| id).collect();
        for (id, wanted) in &self.wanted {
            let is_ended = moving.contains(id)
                || self.absent.contains_key(id)
                || self.ended.contains_key(&(wanted.enrolment.asked.network.clone(), id.clone()));
            let is_on_its_way = wanted.asked.is_some_and(|asked| asked.lost_at_ms.is_some_and(|at_ms| now_ms < at_ms));
            let is_done = wanted.incarnation.is_some() && !wanted.stale;
            if is_ended || is_on_its_way || is_done || now_ms < wanted.due_ms {
                continue;
            }
            match wanted.asked {
                Some(asked) => again.entry(asked.number).or_default().push(id.clone()),
                None if wanted.alone => groups.push((None, vec![id.clone()])),
                None => batches.entry(wanted.enrolment.template.clone()).or_default().push(id.clone()),
            }
        }
        for ids in again.into_values() {
            let asked = self.wanted.get(&ids[0]).and_then(|wanted| wanted.asked);
            // Without one of those it named it is another.
            match asked.filter(|asked| asked.together == ids.len()) {
                Some(asked) => groups.push((Some(asked), ids)),
                None => groups.push((None, ids)),
            }
        }
        groups.extend(batches.values().flat_map(|ids| ids.chunks(REGISTER_WORKLOADS_MAX)).map(|ids| (None, ids.to_vec())));
        groups.into_iter().map(|(before, ids)| self.ask(before, &ids, now_ms)).collect()
    }

    fn ask(&mut self, before: Option<Asked>, ids: &[WorkloadId], now_ms: u64) -> Effect {
        let (number, repeats) = match before {
            Some(asked) => (asked.number, asked.repeats.saturating_add(1)),
            None => (self.number, 0),
        };
        self.number += u64::from(before.is_none());
        let lost_at_ms = Some(now_ms + (ANSWER_WITHIN_MS << repeats.min(10)).min(RETRY_MAX_MS));
        let (mut template, mut workloads) = (None, Vec::with_capacity(ids.len()));
        for id in ids {
            let Some(wanted) = self.wanted.get_mut(id) else { continue };
            wanted.asked = Some(Asked { number, together: ids.len(), repeats, lost_at_ms });
            template = Some(wanted.enrolment.template.clone());
            workloads.push(wanted.enrolment.asked.clone());
        }
        Effect::Register { number, register: Register { boot: self.boot, template, workloads } }
    }
}

/// Grows with every attempt; a refusal that will not pass by itself is asked about seldom, in case somebody mends it.
fn wait_ms(attempts: &mut u32, retryable: bool) -> u64 {
    *attempts = attempts.saturating_add(1);
    if retryable { (RETRY_FIRST_MS << (*attempts - 1).min(10)).min(RETRY_MAX_MS) } else { RETRY_MAX_MS }
}
