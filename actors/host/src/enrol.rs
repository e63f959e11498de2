//! What this host enrols, and how far it is: a plain machine. What the operator or the local API wants is registered, tried again when
//! it is refused, and registered anew when the controllers have forgotten it; what has ended is removed; how workloads are is reported
//! when it changes.

mod asking;
mod written;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use groupcast_messages::{HealthReport, HostRequest, REGISTER_WORKLOADS_MAX, Register, RegisterAnswer};
use groupcast_policy::ids::{NetworkId, WorkloadId};
use groupcast_policy::model::HealthCheck;
use serde::{Deserialize, Serialize};

use self::asking::Asked;
pub use self::written::{Enrolment, WrittenEnrolment};

/// Workloads one host enrols.
pub const ENROLMENTS_MAX: usize = 10_000;
/// The first wait after a refusal that may pass; it doubles.
pub const RETRY_FIRST_MS: u64 = 250;
/// The longest, and the wait after a refusal that will not pass by itself.
pub const RETRY_MAX_MS: u64 = 30_000;
/// Everything is registered again this often, which changes nothing but tells what the template says now.
pub const REFRESH_MS: u64 = 300_000;
/// A request that was not answered for so long is lost; a registration is repeated then, and waited for twice as long.
pub const ANSWER_WITHIN_MS: u64 = 5_000;
/// A workload without its interface is gone after this time: one that is made anew at once stays registered.
pub const ABSENT_MS: u64 = 2_000;
/// So many checks in a row must fail before a workload is called unwell.
pub const FAILURES_MAX: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected(bool),
    Want(Enrolment),
    /// It has ended here.
    Unwant(WorkloadId),
    /// The host says farewell: nothing more is registered until something is wanted anew.
    Leave,
    /// These are attached where there is no interface now, and no others.
    Absent(BTreeSet<WorkloadId>),
    /// The controllers have no entry of this host, or one of another boot.
    Forgotten,
    /// The answer to the registration of this number, however late it comes.
    Registered {
        number: u64,
        answer: RegisterAnswer,
    },
    /// How the health of this template's workloads is checked from now on.
    Health {
        template: String,
        health: Option<HealthCheck>,
    },
    /// Whether a removal was taken.
    Removed {
        workloads: Vec<(NetworkId, WorkloadId)>,
        taken: bool,
    },
    /// Whether reports were taken.
    Reported {
        reports: Vec<HealthReport>,
        taken: bool,
    },
    /// A check of this life of a workload came out so.
    Checked {
        workload: WorkloadId,
        incarnation: u64,
        healthy: bool,
        /// It could not be checked, and why.
        why: Option<String>,
    },
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// The same number is the same registration once more: whoever answers, its answer counts, and nobody has to answer twice.
    Register {
        number: u64,
        register: Register,
    },
    Request(HostRequest),
    Check {
        workload: WorkloadId,
        incarnation: u64,
        address: Option<IpAddr>,
        check: HealthCheck,
    },
}

/// How far one workload is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    enrolment: Enrolment,
    incarnation: Option<u64>,
    refused: Option<String>,
    /// Not sent before.
    due_ms: u64,
    attempts: u32,
    /// Sent by itself, because a registration of several was refused.
    alone: bool,
    asked: Option<Asked>,
    /// It is registered, and is to be registered once more.
    stale: bool,
    /// Until then a repetition of its registration may be with another controller.
    repeated_until_ms: u64,
    check: Option<HealthCheck>,
    check_due_ms: u64,
    failures: u32,
    healthy: bool,
    /// Why it cannot be checked.
    unchecked: Option<String>,
    /// What the controllers were last told.
    reported: bool,
    reporting: bool,
}

impl Wanted {
    fn new(enrolment: Enrolment, now_ms: u64) -> Self {
        Self {
            enrolment,
            incarnation: None,
            refused: None,
            due_ms: now_ms,
            attempts: 0,
            alone: false,
            asked: None,
            stale: false,
            repeated_until_ms: 0,
            check: None,
            check_due_ms: 0,
            failures: 0,
            healthy: true,
            unchecked: None,
            reported: true,
            reporting: false,
        }
    }

    /// What is checked in another way is well until that says otherwise.
    fn check_by(&mut self, health: &Option<HealthCheck>, now_ms: u64) {
        if self.check != *health {
            (self.check, self.check_due_ms, self.failures, self.healthy) = (health.clone(), now_ms, 0, true);
        }
    }
}

/// What has ended here and is to be removed there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Ended {
    /// The removal is on its way.
    sent: bool,
    /// Not sent before. A removal must not overtake a registration that is on its way: they may reach different controllers, and what
    /// is registered after it was removed stays there.
    due_ms: u64,
    /// Nobody knows what became of the registration that was on its way, or of its repetition: it is removed a second time, later.
    doubtful: bool,
    /// The registration that was on its way.
    asked: Option<Asked>,
    /// A first removal was taken.
    taken: bool,
}

/// What is said about one workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    pub workload: String,
    pub template: String,
    /// `registered`, `waiting`, `refused`, or `absent` for want of its interface.
    pub state: String,
    pub incarnation: Option<u64>,
    pub why: Option<String>,
    pub healthy: bool,
    /// Why its health cannot be checked.
    #[serde(default)]
    pub unchecked: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Absence {
    since_ms: u64,
    /// What there was of it has ended.
    withdrawn: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enroller {
    boot: u64,
    wanted: BTreeMap<WorkloadId, Wanted>,
    /// Those that have no interface.
    absent: BTreeMap<WorkloadId, Absence>,
    /// Ended here, and not yet removed there.
    ended: BTreeMap<(NetworkId, WorkloadId), Ended>,
    connected: bool,
    retry_ended_ms: u64,
    /// Reports that were refused are not sent again before.
    retry_reports_ms: u64,
    refresh_ms: u64,
    left: bool,
    /// Of the next registration.
    number: u64,
}

impl Enroller {
    pub fn new(boot: u64, ended: impl IntoIterator<Item = (NetworkId, WorkloadId)>) -> Self {
        let ended = ended.into_iter().map(|key| (key, Ended::default())).collect();
        Self {
            boot,
            wanted: BTreeMap::new(),
            absent: BTreeMap::new(),
            ended,
            connected: false,
            retry_ended_ms: 0,
            retry_reports_ms: 0,
            refresh_ms: REFRESH_MS,
            left: false,
            number: 0,
        }
    }

    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Whether there is anything for which the host should be known.
    pub fn is_needed(&self) -> bool {
        !self.left && !self.wanted.is_empty()
    }

    /// Whatever may be registered.
    pub fn wanted(&self) -> impl Iterator<Item = (&NetworkId, &WorkloadId)> {
        self.wanted.iter().map(|(id, wanted)| (&wanted.enrolment.asked.network, id))
    }

    pub fn ended(&self) -> impl Iterator<Item = &(NetworkId, WorkloadId)> {
        self.ended.keys()
    }

    pub fn standings(&self) -> Vec<Standing> {
        let standing = |(id, wanted): (&WorkloadId, &Wanted)| Standing {
            workload: id.to_string(),
            template: wanted.enrolment.template.clone(),
            state: match (&wanted.incarnation, &wanted.refused) {
                (Some(_), _) => "registered",
                (None, _) if self.absent.contains_key(id) => "absent",
                (None, Some(_)) => "refused",
                (None, None) => "waiting",
            }
            .to_owned(),
            incarnation: wanted.incarnation,
            why: match self.absent.contains_key(id) {
                true => Some("its interface does not exist: it is registered while there is one".to_owned()),
                false => wanted.refused.clone(),
            },
            healthy: wanted.healthy,
            unchecked: wanted.unchecked.clone(),
        };
        self.wanted.iter().map(standing).collect()
    }

    pub fn handle(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        match event {
            Event::Connected(connected) => {
                self.connected = connected;
                if connected {
                    // Whatever was on its way may be lost.
                    for wanted in self.wanted.values_mut() {
                        wanted.asked.iter_mut().for_each(|asked| asked.lost_at_ms = None);
                        wanted.reporting = false;
                    }
                    self.ended.values_mut().for_each(|ended| ended.sent = false);
                    self.forget_wanted();
                }
            }
            Event::Want(enrolment) => {
                self.left = false;
                let id = enrolment.asked.workload.clone();
                // A removal on its way is waited for: it must not take away what comes after it.
                let key = (enrolment.asked.network.clone(), id.clone());
                if self.ended.get(&key).is_some_and(|ended| !ended.sent) && !self.absent.contains_key(&id) {
                    self.ended.remove(&key);
                }
                let held = self.wanted.get(&id);
                if held.is_some_and(|held| held.enrolment.asked.network != enrolment.asked.network) {
                    // What it is on the other network ends: it is one workload, and is on one network.
                    self.end(&id, now_ms);
                }
                if self.wanted.get(&id).is_none_or(|wanted| wanted.enrolment != enrolment) {
                    self.wanted.insert(id, Wanted::new(enrolment, now_ms));
                } else if let Some(wanted) = self.wanted.get_mut(&id).filter(|wanted| wanted.incarnation.is_none()) {
                    (wanted.due_ms, wanted.attempts) = (now_ms, 0);
                }
            }
            Event::Unwant(id) => self.end(&id, now_ms),
            Event::Absent(ids) => {
                let back: Vec<WorkloadId> = self.absent.keys().filter(|id| !ids.contains(*id)).cloned().collect();
                self.absent.retain(|id, _| ids.contains(id));
                let since_now = Absence { since_ms: now_ms, withdrawn: false };
                ids.into_iter().for_each(|id| _ = self.absent.entry(id).or_insert(since_now));
                for id in back {
                    if let Some(wanted) = self.wanted.get_mut(&id).filter(|wanted| wanted.incarnation.is_none()) {
                        (wanted.due_ms, wanted.attempts) = (now_ms, 0);
                    }
                }
                self.forget_wanted();
            }
            Event::Leave => self.left = true,
            Event::Forgotten => {
                for wanted in self.wanted.values_mut().filter(|wanted| wanted.incarnation.is_some()) {
                    // What was asked before that may be answered from before that.
                    (wanted.incarnation, wanted.asked) = (None, None);
                    (wanted.due_ms, wanted.attempts) = (now_ms, 0);
                    // A new entry is well until it is told otherwise.
                    wanted.reported = true;
                }
            }
            Event::Registered { number, answer } => {
                let is_taken = matches!(answer, RegisterAnswer::Registered { .. });
                self.registered(number, &answer, now_ms);
                if self.left && is_taken {
                    // It was on its way while the host left, and may have been written after that.
                    return vec![Effect::Request(HostRequest::Leave { boot: self.boot })];
                }
            }
            Event::Health { template, health } => {
                for wanted in self.wanted.values_mut().filter(|wanted| wanted.enrolment.template == template) {
                    wanted.check_by(&health, now_ms);
                }
            }
            Event::Removed { workloads, taken } => {
                for key in workloads {
                    let Some(ended) = self.ended.get_mut(&key) else { continue };
                    ended.sent = false;
                    ended.taken |= taken;
                    if taken && std::mem::take(&mut ended.doubtful) {
                        ended.due_ms = now_ms + RETRY_MAX_MS;
                    } else if taken {
                        self.ended.remove(&key);
                    }
                }
                self.forget_wanted();
                if !taken {
                    self.retry_ended_ms = now_ms + RETRY_FIRST_MS * 4;
                }
            }
            Event::Reported { reports, taken } => {
                if !taken {
                    self.retry_reports_ms = now_ms + RETRY_FIRST_MS * 4;
                }
                for report in reports {
                    if let Some(wanted) = self.wanted.get_mut(&report.workload) {
                        wanted.reporting = false;
                        if taken {
                            wanted.reported = report.healthy;
                        }
                    }
                }
            }
            Event::Checked { workload, incarnation, healthy, why } => {
                let wanted = self.wanted.get_mut(&workload);
                if let Some(wanted) = wanted.filter(|wanted| wanted.incarnation == Some(incarnation)) {
                    wanted.unchecked = why;
                    wanted.failures = if healthy { 0 } else { wanted.failures.saturating_add(1) };
                    wanted.healthy = wanted.failures < FAILURES_MAX && (healthy || wanted.healthy);
                }
            }
            Event::Tick => {}
        }
        self.due(now_ms)
    }

    /// What there is of a workload there is to be removed.
    fn end(&mut self, id: &WorkloadId, now_ms: u64) {
        if let Some(wanted) = self.wanted.remove(id) {
            let due_ms = wanted.asked.and_then(|asked| asked.lost_at_ms).map_or(now_ms, |lost_at_ms| lost_at_ms.max(now_ms));
            let doubtful = wanted.asked.is_some() || now_ms < wanted.repeated_until_ms;
            let ended = Ended { sent: false, due_ms, doubtful, asked: wanted.asked, taken: false };
            self.ended.insert((wanted.enrolment.asked.network, id.clone()), ended);
            self.retry_ended_ms = now_ms;
        }
    }

    /// Whose interface has been gone for a while is not registered until it is back: its addresses may be anybody's now.
    fn withdraw_absent(&mut self, now_ms: u64) {
        let is_due = |absence: &Absence| !absence.withdrawn && now_ms >= absence.since_ms.saturating_add(ABSENT_MS);
        let gone = self.absent.iter_mut().filter(|(id, absence)| is_due(absence) && self.wanted.contains_key(*id));
        let gone: Vec<WorkloadId> = gone
            .map(|(id, absence)| {
                absence.withdrawn = true;
                id.clone()
            })
            .collect();
        for id in gone {
            let Some(enrolment) = self.wanted.get(&id).map(|wanted| wanted.enrolment.clone()) else { continue };
            // Also if this run of the agent has not registered it: an earlier one may have.
            self.end(&id, now_ms);
            self.wanted.insert(id, Wanted::new(enrolment, now_ms));
        }
    }

    /// What is wanted again has not ended, once no removal of it is on its way.
    fn forget_wanted(&mut self) {
        let (wanted, absent) = (&self.wanted, &self.absent);
        let is_wanted = |(network, id): &(NetworkId, WorkloadId)| {
            !absent.contains_key(id) && wanted.get(id).is_some_and(|wanted| wanted.enrolment.asked.network == *network)
        };
        self.ended.retain(|key, ended| ended.sent || !is_wanted(key));
    }

    /// Everything that has to be done now.
    fn due(&mut self, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        if !self.connected || self.left {
            return effects;
        }
        if now_ms >= self.refresh_ms {
            self.refresh_ms = now_ms + REFRESH_MS;
            for wanted in self.wanted.values_mut().filter(|wanted| wanted.incarnation.is_some()) {
                (wanted.stale, wanted.due_ms) = (true, now_ms);
            }
        }
        self.withdraw_absent(now_ms);
        effects.extend(self.registrations(now_ms));
        effects.extend(self.removals(now_ms));
        effects.extend(self.checks(now_ms));
        effects.extend(self.reports(now_ms));
        effects
    }

    fn removals(&mut self, now_ms: u64) -> Option<Effect> {
        if now_ms < self.retry_ended_ms {
            return None;
        }
        let open = self.ended.iter_mut().filter(|(_, ended)| !ended.sent && now_ms >= ended.due_ms);
        let workloads: Vec<(NetworkId, WorkloadId)> = open
            .take(REGISTER_WORKLOADS_MAX)
            .map(|(key, ended)| {
                ended.sent = true;
                key.clone()
            })
            .collect();
        (!workloads.is_empty()).then_some(Effect::Request(HostRequest::Remove { boot: self.boot, workloads }))
    }

    fn checks(&mut self, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        for (id, wanted) in &mut self.wanted {
            let (Some(check), Some(incarnation)) = (&wanted.check, wanted.incarnation) else { continue };
            if now_ms >= wanted.check_due_ms {
                wanted.check_due_ms = now_ms + 1_000 * u64::from(check.interval_seconds);
                let address = wanted.enrolment.asked.addresses.first().map(|prefix| prefix.net().addr());
                effects.push(Effect::Check { workload: id.clone(), incarnation, address, check: check.clone() });
            }
        }
        effects
    }

    fn reports(&mut self, now_ms: u64) -> Option<Effect> {
        if now_ms < self.retry_reports_ms {
            return None;
        }
        let mut reports = Vec::new();
        for (id, wanted) in &mut self.wanted {
            let Some(incarnation) = wanted.incarnation else { continue };
            if wanted.healthy != wanted.reported && !wanted.reporting && reports.len() < REGISTER_WORKLOADS_MAX {
                wanted.reporting = true;
                let network = wanted.enrolment.asked.network.clone();
                reports.push(HealthReport { network, workload: id.clone(), incarnation, healthy: wanted.healthy });
            }
        }
        (!reports.is_empty()).then_some(Effect::Request(HostRequest::Health { boot: self.boot, reports }))
    }
}

#[cfg(test)]
#[path = "enrol_tests.rs"]
mod tests;
