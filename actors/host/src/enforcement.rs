//! The actor that owns the kernel's table. It runs on a thread of its own, because a netlink call waits for the kernel.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use actix::prelude::*;
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::ruleset::is_adopting;
use groupcast_enforce::settings::{Mode, Settings};
use groupcast_policy::ids::WorkloadId;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::config::WrittenAttachment;
use crate::disk::Save;
use crate::inbox::Queue;
use crate::keeper::Keeper;
use crate::netlink::{Counted, Kernel};
use crate::state::{Facts, State};

// ---- messages

/// Commits are waiting.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Wake;

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct Attach(pub WrittenAttachment);

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct Detach(pub WorkloadId);

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct SetMode {
    pub mode: WantedMode,
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WantedMode {
    Freeze,
    Bypass,
    Lockdown,
    Audit,
    Resume,
}

#[derive(Message)]
#[rtype(result = "Status")]
pub struct AskStatus;

#[derive(Message)]
#[rtype(result = "Result<Ruleset, String>")]
pub struct AskRuleset;

/// What rules have met; of a kernel only.
#[derive(Message)]
#[rtype(result = "Result<Vec<Counted>, String>")]
pub struct AskCounters;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    pub host: String,
    pub stamp: u32,
    pub topics: usize,
    /// Of the inbox's commits, the last in force.
    pub commit: u64,
    pub change: u64,
    /// The last change that was heard of; behind it is what is frozen or failed.
    pub heard_change: u64,
    pub mode: String,
    pub reason: String,
    pub workloads: Vec<WrittenAttachment>,
    /// Named, with what to do about it.
    pub refused: Vec<String>,
    pub last_error: Option<String>,
    pub transactions: u64,
    pub operations: u64,
    pub bumps: u64,
    pub failures: u64,
    pub repairs: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ruleset {
    pub wanted: String,
    pub differences: Vec<String>,
}

// ---- the actor

/// Waits between attempts after a refused transaction.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// A bump makes every flow on the host be judged again: at most this many within [`BUMPS_WITHIN`]. What comes then waits, together.
const BUMPS_MAX: usize = 10;
const BUMPS_WITHIN: Duration = Duration::from_secs(1);
/// How long connections that are met in the middle are judged like new ones, after a first load.
const ADOPTION: Duration = Duration::from_secs(60);
/// How far the disk may be behind.
const SAVE_EVERY: Duration = Duration::from_secs(2);

pub struct Enforcement<E: Enforcer + Unpin + 'static> {
    keeper: Keeper<E>,
    table: String,
    configured: Settings,
    mode: Option<(String, String)>,
    queue: Queue,
    enforced: mpsc::UnboundedSender<u64>,
    disk: Recipient<Save>,
    host: String,
    unsaved: bool,
    /// The inbox's commit that is in the keeper's documents, and the one that is in force.
    taken: (u64, u64),
    in_force: (u64, u64),
    retry: Option<Duration>,
    last_error: Option<String>,
    bumps: Pace,
}

/// When the last bumps were.
#[derive(Debug, Default)]
struct Pace {
    times: VecDeque<Instant>,
}

impl Pace {
    fn bumped(&mut self, now: Instant) {
        self.times.push_back(now);
        while self.times.len() > BUMPS_MAX {
            self.times.pop_front();
        }
    }

    /// How long the next one must wait.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let oldest = self.times.front().filter(|_| self.times.len() >= BUMPS_MAX)?;
        (*oldest + BUMPS_WITHIN).checked_duration_since(now).filter(|wait| !wait.is_zero())
    }
}

pub struct Parts<E> {
    pub keeper: Keeper<E>,
    pub table: String,
    pub configured: Settings,
    pub mode: Option<(String, String)>,
    pub queue: Queue,
    pub enforced: mpsc::UnboundedSender<u64>,
    pub disk: Recipient<Save>,
    pub host: String,
}

impl<E: Enforcer + Unpin + 'static> Enforcement<E> {
    pub fn new(parts: Parts<E>) -> Self {
        let Parts { keeper, table, configured, mode, queue, enforced, disk, host } = parts;
        Self {
            keeper,
            table,
            configured,
            mode,
            queue,
            enforced,
            disk,
            host,
            unsaved: false,
            taken: (0, 0),
            in_force: (0, 0),
            retry: None,
            last_error: None,
            bumps: Pace::default(),
        }
    }

    /// Looks at a step's outcome: acknowledged, saved, or tried again later.
    fn after(&mut self, outcome: Result<(), E::Error>, context: &mut Context<Self>) -> Result<(), String> {
        match outcome {
            Ok(()) => {
                self.retry = None;
                self.last_error = None;
                self.unsaved = true;
                if self.taken.0 > self.in_force.0 && !self.keeper.is_frozen() {
                    self.in_force = self.taken;
                    // The receiver ends with the process only.
                    let _ = self.enforced.send(self.in_force.0);
                }
                Ok(())
            }
            Err(error) => {
                let words = error.to_string();
                tracing::error!(error = %words, "the last good ruleset stays in force");
                self.last_error = Some(words.clone());
                let wait = self.retry.map_or(RETRY_FIRST, |last| (last * 2).min(RETRY_MAX));
                if self.retry.replace(wait).is_none() {
                    context.run_later(wait, Self::try_again);
                }
                Err(words)
            }
        }
    }

    fn try_again(&mut self, context: &mut Context<Self>) {
        let Some(wait) = self.retry else { return };
        let outcome = self.keeper.settle();
        if self.after(outcome, context).is_err() {
            context.run_later((wait * 2).min(RETRY_MAX), Self::try_again);
        }
    }

    fn end_adoption(&mut self, context: &mut Context<Self>) {
        self.configured.adopting = false;
        let (settings, frozen) = settings_of(&self.configured, self.mode.as_ref().map(|(mode, _)| mode.as_str()));
        if !frozen {
            let outcome = self.keeper.set_settings(settings);
            let _ = self.after(outcome, context);
        }
    }

    fn save(&mut self) {
        if !self.unsaved {
            return;
        }
        let engine = self.keeper.engine();
        let attachments = engine.attachments().iter().filter_map(|(id, attached)| WrittenAttachment::of(id, attached)).collect();
        let facts = Facts { host: self.host.clone(), stamp: engine.stamp().number(), mode: self.mode.clone(), attachments };
        let state = State { facts, documents: self.keeper.documents().clone() };
        // A disk that is busy gets the next one.
        self.unsaved = self.disk.try_send(Save(Box::new(state))).is_err();
    }
}

/// The settings of a mode, and whether it freezes.
pub fn settings_of(configured: &Settings, mode: Option<&str>) -> (Settings, bool) {
    let of = |mode: Mode| Settings { mode, ..configured.clone() };
    match mode {
        Some("bypass") => (of(Mode::Bypass), false),
        Some("lockdown") => (of(Mode::Lockdown), false),
        Some("audit") => (of(Mode::Audit), false),
        Some("freeze") => (configured.clone(), true),
        _ => (configured.clone(), false),
    }
}

impl<E: Enforcer + Unpin + 'static> Actor for Enforcement<E> {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // What is known is in force before anything else is heard. What is open already was opened before: met in the middle, it is
        // judged like anything new, for a while.
        if !self.keeper.is_adopted() || is_adopting(self.keeper.engine().actual()) {
            self.configured.adopting = true;
            context.run_later(ADOPTION, Self::end_adoption);
        }
        let (settings, frozen) = settings_of(&self.configured, self.mode.as_ref().map(|(mode, _)| mode.as_str()));
        let outcome = match (frozen, self.keeper.is_adopted()) {
            (true, true) => self.keeper.set_frozen(true),
            (frozen, _) => {
                self.keeper.begin_with(settings).and_then(|()| if frozen { self.keeper.set_frozen(true) } else { Ok(()) })
            }
        };
        let _ = self.after(outcome, context);
        context.run_interval(SAVE_EVERY, |actor, _| actor.save());
    }
}

impl<E: Enforcer + Unpin + 'static> Handler<Wake> for Enforcement<E> {
    type Result = ();

    fn handle(&mut self, _: Wake, context: &mut Self::Context) {
        if let Some(wait) = self.bumps.wait(Instant::now()) {
            context.notify_later(Wake, wait);
            return;
        }
        let commits = self.queue.take();
        let Some(last) = commits.last() else { return };
        self.taken = (last.number, last.change.max(self.taken.1));
        let bumps = self.keeper.counts.bumps;
        let outcome = self.keeper.moved(&commits);
        if self.keeper.counts.bumps > bumps {
            self.bumps.bumped(Instant::now());
        }
        let _ = self.after(outcome, context);
    }
}

impl<E: Enforcer + Unpin + 'static> Handler<Attach> for Enforcement<E> {
    type Result = Result<(), String>;

    fn handle(&mut self, Attach(written): Attach, context: &mut Self::Context) -> Self::Result {
        let (workload, attached) = written.check()?;
        let interface = attached.attachment.interface();
        if let Some(master) = crate::host::master_of(interface.as_str()) {
            return Err(format!(
                "workload {workload}: interface {interface} belongs to {master}, where its packets cannot be judged; \
                 take it out of there (`ip link set {interface} nomaster`)"
            ));
        }
        let outcome = self.keeper.attach(workload.clone(), attached);
        self.after(outcome, context)?;
        let refused = self.keeper.refused().iter().find(|refusal| *refusal.workload() == workload);
        refused.map_or(Ok(()), |refusal| Err(refusal.to_string()))
    }
}

impl<E: Enforcer + Unpin + 'static> Handler<Detach> for Enforcement<E> {
    type Result = Result<(), String>;

    fn handle(&mut self, Detach(workload): Detach, context: &mut Self::Context) -> Self::Result {
        let outcome = self.keeper.detach(&workload);
        let was = outcome.as_ref().is_ok_and(|was| *was);
        self.after(outcome.map(|_| ()), context)?;
        if was { Ok(()) } else { Err(format!("workload {workload} is not attached here")) }
    }
}

impl<E: Enforcer + Unpin + 'static> Handler<SetMode> for Enforcement<E> {
    type Result = Result<(), String>;

    fn handle(&mut self, wanted: SetMode, context: &mut Self::Context) -> Self::Result {
        let name = match wanted.mode {
            WantedMode::Freeze => Some("freeze"),
            WantedMode::Bypass => Some("bypass"),
            WantedMode::Lockdown => Some("lockdown"),
            WantedMode::Audit => Some("audit"),
            WantedMode::Resume => None,
        };
        tracing::warn!(mode = ?wanted.mode, reason = %wanted.reason, "set by the operator");
        let (settings, frozen) = settings_of(&self.configured, name);
        self.mode = name.map(|name| (name.to_owned(), wanted.reason));
        let outcome =
            self.keeper.set_frozen(frozen).and_then(|()| if frozen { Ok(()) } else { self.keeper.set_settings(settings) });
        self.after(outcome, context)
    }
}

impl<E: Enforcer + Unpin + 'static> Handler<AskStatus> for Enforcement<E> {
    type Result = MessageResult<AskStatus>;

    fn handle(&mut self, _: AskStatus, _: &mut Self::Context) -> Self::Result {
        let engine = self.keeper.engine();
        let (mode, reason) = self.mode.clone().unwrap_or(("enforce".into(), String::new()));
        let counts = self.keeper.counts;
        MessageResult(Status {
            host: self.host.clone(),
            stamp: engine.stamp().number(),
            topics: self.keeper.documents().len(),
            commit: self.in_force.0,
            change: self.in_force.1,
            heard_change: self.taken.1,
            mode,
            reason,
            workloads: engine.attachments().iter().filter_map(|(id, attached)| WrittenAttachment::of(id, attached)).collect(),
            refused: self.keeper.refused().iter().map(ToString::to_string).collect(),
            last_error: self.last_error.clone(),
            transactions: counts.transactions,
            operations: counts.operations,
            bumps: counts.bumps,
            failures: counts.failures,
            repairs: counts.repairs,
        })
    }
}

impl<E: Enforcer + Unpin + 'static> Handler<AskRuleset> for Enforcement<E> {
    type Result = Result<Ruleset, String>;

    fn handle(&mut self, _: AskRuleset, _: &mut Self::Context) -> Self::Result {
        let there = self.keeper.read().map_err(|error| error.to_string())?.unwrap_or_default();
        let wanted = self.keeper.engine().actual();
        let text = groupcast_enforce::text::Script { name: &self.table, table: wanted }.to_string();
        Ok(Ruleset { wanted: text, differences: wanted.differences(&there) })
    }
}

impl Handler<AskCounters> for Enforcement<Kernel> {
    type Result = Result<Vec<Counted>, String>;

    fn handle(&mut self, _: AskCounters, _: &mut Self::Context) -> Self::Result {
        self.keeper.enforcer().counters().map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bumps_are_paced() {
        let start = Instant::now();
        let mut pace = Pace::default();
        for _ in 0..BUMPS_MAX {
            assert_eq!(pace.wait(start), None);
            pace.bumped(start);
        }
        assert_eq!(pace.wait(start), Some(BUMPS_WITHIN));
        assert_eq!(pace.wait(start + BUMPS_WITHIN / 4), Some(BUMPS_WITHIN * 3 / 4));
        assert_eq!(pace.wait(start + BUMPS_WITHIN), None);
        pace.bumped(start + BUMPS_WITHIN);
        assert_eq!(pace.times.len(), BUMPS_MAX);
    }
}
