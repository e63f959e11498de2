//! The actor that owns the kernel's table. It runs on a thread of its own, because a netlink call waits for the kernel.
//!
//! Whatever is wanted (commits of the inbox, orders from the local socket) is done in turns: everything that waits, together, as one
//! transaction, and no more often than flows may be judged again.

mod asked;
mod fit;
mod orders;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use actix::prelude::*;
use groupcast_enforce::ruleset::{audited, is_adopting, mode_of};
use groupcast_enforce::settings::{Attached, Settings};
use groupcast_messages::HostState;
use groupcast_policy::ids::{HostId, WorkloadId};
use tokio::sync::watch;

use crate::config::WrittenAttachment;
use crate::disk::{Save, SaveOrders};
use crate::holder::Holder;
use crate::host;
use crate::inbox::Queue;
use crate::keeper::{Keeper, STAMPS_BEHIND_MAX};
use crate::mode::{Conduct, Ordered, settings_of};
use crate::netlink::{Links, Present};
use crate::orders::Orders;
use crate::pace::Pace;
use crate::state::{Facts, State};

pub use asked::{AskCounters, AskEnforced, AskExplanation, AskForeign, AskRuleset, AskStanding};
pub use orders::{Attach, Detach, SetAudit, SetMode};
use orders::{Order, Waiter, What, step};

// ---- messages

/// Something is in the queue.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Wake;

/// What is in force is to be on disk; answered when it is.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Keep;

/// How far it is: only the newest matters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    pub turns: u64,
    /// Of the inbox's commits, the last in force.
    pub enforced: u64,
    pub state: HostState,
}

// ---- the actor

/// Waits between attempts after a refused transaction.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// How long connections that are met in the middle are judged like new ones, after a first load.
const ADOPTION: Duration = Duration::from_secs(60);
/// How long a table that is not what the disk says waits for the bus.
const SYNC_WAIT: Duration = Duration::from_secs(5);
/// How far the disk may be behind.
const SAVE_EVERY: Duration = Duration::from_secs(2);
/// How often it looks whether somebody touched our table or moved an interface.
const LOOK_EVERY: Duration = Duration::from_millis(100);
pub struct Enforcement<E: Holder + Unpin + 'static> {
    keeper: Keeper<E>,
    table: String,
    configured: Settings,
    mode: Ordered,
    queue: Queue,
    progress: watch::Sender<Progress>,
    disk: Recipient<Save>,
    disk_of_orders: Recipient<SaveOrders>,
    host: HostId,
    missing_features: Vec<String>,
    dry_run: bool,
    links: Option<Links>,
    links_are_known: bool,
    /// The interfaces as of the last look. There are none before the first: every namespace has its loopback.
    present: Present,
    /// Workloads that are attached where there is no interface.
    absent: watch::Sender<BTreeSet<WorkloadId>>,
    /// Attached, but to an interface that cannot be judged now.
    suspended: BTreeMap<WorkloadId, Attached>,
    orders: Vec<Order>,
    turn_is_due: bool,
    unsaved: bool,
    /// The disk is writing.
    saving: bool,
    disk_error: Option<String>,
    /// How many bumps the disk knows of.
    bumps_saved: u64,
    /// The inbox's commit (and change) that is in the keeper's documents, and the one that is in force.
    taken: (u64, u64),
    in_force: (u64, u64),
    behind_since: Option<Instant>,
    last_change: Option<SystemTime>,
    overdue: bool,
    retry: Option<Duration>,
    retry_is_due: bool,
    last_error: Option<String>,
    bumps: Pace,
}

pub struct Parts<E> {
    pub keeper: Keeper<E>,
    pub table: String,
    pub configured: Settings,
    pub mode: Ordered,
    pub queue: Queue,
    pub progress: watch::Sender<Progress>,
    pub disk: Recipient<Save>,
    pub disk_of_orders: Recipient<SaveOrders>,
    pub host: HostId,
    pub missing_features: Vec<String>,
    /// What is committed reaches no kernel.
    pub dry_run: bool,
    /// Of the kernel's network namespace; `None` where interfaces are not looked at.
    pub links: Option<Links>,
    /// Is told which workloads are attached where there is no interface.
    pub absent: watch::Sender<BTreeSet<WorkloadId>>,
}

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    pub fn new(parts: Parts<E>) -> Self {
        let Parts { keeper, table, mut configured, mode, queue, progress, disk, disk_of_orders, host, .. } = parts;
        let Parts { missing_features, dry_run, links, absent, .. } = parts;
        // What was found out about the kernel and its table.
        let known = keeper.engine().settings();
        (configured.closes_ports, configured.held) = (known.closes_ports, known.held.clone());
        Self {
            keeper,
            table,
            configured,
            mode,
            queue,
            progress,
            disk,
            disk_of_orders,
            host,
            missing_features,
            dry_run,
            links,
            links_are_known: false,
            present: Present::default(),
            absent,
            suspended: BTreeMap::new(),
            orders: Vec::new(),
            turn_is_due: false,
            unsaved: false,
            saving: false,
            disk_error: None,
            bumps_saved: 0,
            taken: (0, 0),
            in_force: (0, 0),
            behind_since: None,
            last_change: None,
            overdue: false,
            retry: None,
            retry_is_due: false,
            last_error: None,
            bumps: Pace::default(),
        }
    }

    /// Everything that waits, together; later, if every flow was judged again too often lately.
    fn turn(&mut self, context: &mut Context<Self>) {
        if let Some(wait) = self.bumps.wait(Instant::now(), || self.few_flows()) {
            if !std::mem::replace(&mut self.turn_is_due, true) {
                context.run_later(wait, |actor, context| {
                    actor.turn_is_due = false;
                    actor.turn(context);
                });
            }
            return;
        }
        let (waiting, orders) = (self.queue.take(), std::mem::take(&mut self.orders));
        if waiting.is_empty() && orders.is_empty() {
            return;
        }
        if let Some(last) = waiting.commits.last() {
            self.taken = (last.number, last.change.max(self.taken.1));
            self.behind_since.get_or_insert_with(Instant::now);
            self.overdue = false;
        }
        self.overdue |= waiting.overdue.is_some();
        let outcome = self.counted(|keeper| step(keeper, waiting, &orders));
        let outcome = self.after(outcome, context);
        if !orders.is_empty() {
            self.tell_absent();
        }
        let waiters: Vec<Waiter> = orders.into_iter().filter_map(|order| order.waiter).collect();
        if waiters.is_empty() {
            return;
        }
        let kept = outcome.is_ok().then(|| self.keep_orders());
        let answer = async move {
            let outcome = match kept {
                Some(kept) => kept.await,
                None => outcome,
            };
            for waiter in waiters {
                // Whoever gave up waiting finds out by asking.
                let _ = waiter.send(outcome.clone());
            }
        };
        context.spawn(answer.into_actor(self));
    }

    /// How many flows there are, as long as the disk keeps up with the stamps: what is begun after it is [`STAMPS_BEHIND_MAX`] ahead of it.
    fn few_flows(&self) -> Option<u64> {
        let behind = self.keeper.counts.bumps.saturating_sub(self.bumps_saved);
        host::flows().filter(|_| behind < u64::from(STAMPS_BEHIND_MAX / 2))
    }

    /// What was ordered is on disk before anybody is told that it is done.
    fn keep_orders(&self) -> impl Future<Output = Result<(), String>> + use<E> {
        let orders = Orders { host: self.host.to_string(), mode: self.mode.clone(), attachments: self.attachments() };
        let kept = self.disk_of_orders.send(SaveOrders(orders));
        async move { kept.await.unwrap_or_else(|error| Err(format!("the agent is ending or overloaded ({error}): try again"))) }
    }

    /// Does something with the keeper, and remembers if it made all flows be judged again.
    fn counted<T>(&mut self, act: impl FnOnce(&mut Keeper<E>) -> T) -> T {
        let before = self.keeper.counts;
        let outcome = act(&mut self.keeper);
        let now = Instant::now();
        (before.bumps..self.keeper.counts.bumps).for_each(|_| self.bumps.bumped(now));
        if self.keeper.counts.transactions > before.transactions {
            self.last_change = Some(SystemTime::now());
        }
        outcome
    }

    /// Looks at a step's outcome: acknowledged, saved, or tried again later.
    fn after(&mut self, outcome: Result<(), E::Error>, context: &mut Context<Self>) -> Result<(), String> {
        let outcome = outcome.map_err(|error| error.to_string());
        match &outcome {
            Ok(()) => {
                self.retry = None;
                self.last_error = None;
                self.unsaved = true;
                if !self.keeper.is_frozen() {
                    self.in_force = self.taken;
                    self.behind_since = None;
                }
            }
            Err(words) => {
                tracing::error!(error = %words, "the last good ruleset stays in force");
                self.last_error = Some(words.clone());
                let wait = self.retry.map_or(RETRY_FIRST, |last| (last * 2).min(RETRY_MAX));
                self.retry = Some(wait);
                if !std::mem::replace(&mut self.retry_is_due, true) {
                    context.run_later(wait, Self::try_again);
                }
            }
        }
        self.tell();
        outcome
    }

    /// What this host does with its policy, by the table that is in the kernel.
    fn host_state(&self) -> HostState {
        let engine = self.keeper.engine();
        let interfaces = audited(engine.actual());
        // As a rule there are none, and then nobody has to be looked at.
        let looked_at = engine.attachments().iter().take(if interfaces.is_empty() { 0 } else { usize::MAX });
        let attached = looked_at.filter(|(_, attached)| interfaces.contains(&attached.attachment.interface()));
        let conduct = Conduct {
            configured: &self.configured,
            ordered: &self.mode,
            dry_run: self.dry_run,
            failing: self.last_error.as_deref(),
            in_force: mode_of(engine.actual()),
            audited: attached.map(|(id, _)| id.clone()).collect(),
        };
        match (conduct.state(), self.unjudged()) {
            (HostState::Enforcing, Some(reason)) => HostState::Failing { reason },
            (state, _) => state,
        }
    }

    fn tell(&self) {
        let state = self.host_state();
        self.progress
            .send_modify(|progress| *progress = Progress { turns: progress.turns + 1, enforced: self.in_force.0, state });
    }

    fn try_again(&mut self, context: &mut Context<Self>) {
        self.retry_is_due = false;
        if self.retry.is_some() {
            let outcome = self.counted(Keeper::settle);
            let _ = self.after(outcome, context);
        }
    }

    /// Whether somebody touched what is ours, and whether interfaces can still be judged.
    fn look(&mut self, context: &mut Context<Self>) {
        if self.keeper.enforcer().is_disturbed() {
            let outcome = self.counted(Keeper::repair);
            if matches!(outcome, Ok(true)) {
                tracing::warn!(table = %self.table, "somebody changed our table: it is put right");
            }
            let _ = self.after(outcome.map(|_| ()), context);
        }
        let changed = self.look_at_links();
        if !self.orders.is_empty() {
            self.turn(context);
        }
        if changed {
            self.tell();
        }
    }

    /// The bus was not heard in time: what the disk knows counts.
    fn settle_by_disk(&mut self, context: &mut Context<Self>) {
        if self.keeper.is_cached() && !self.keeper.is_frozen() {
            let outcome = self.counted(Keeper::settle);
            let _ = self.after(outcome, context);
        }
    }

    fn end_adoption(&mut self, context: &mut Context<Self>) {
        self.configured.adopting = false;
        self.order_mode();
        self.turn(context);
    }

    fn order_mode(&mut self) {
        let (settings, frozen) = settings_of(&self.configured, self.mode.as_ref().map(|(mode, _)| mode.as_str()));
        self.orders.push(Order { what: What::Mode(settings, frozen), waiter: None });
    }

    fn attachments(&self) -> Vec<WrittenAttachment> {
        let all = self.keeper.engine().attachments().iter().chain(&self.suspended);
        all.filter_map(|(id, attached)| WrittenAttachment::of(id, attached)).collect()
    }

    fn save(&mut self, context: &mut Context<Self>) {
        // While the kernel knows more than we do, the disk must not say that it knows as much. A disk that is busy gets the next one.
        if !self.unsaved || self.saving || self.keeper.is_stale() {
            return;
        }
        (self.unsaved, self.saving) = (false, true);
        let bumps = self.keeper.counts.bumps;
        let saved = self.disk.send(Save(Box::new(self.state())));
        context.spawn(saved.into_actor(self).map(move |outcome, actor, _| {
            actor.saving = false;
            if matches!(outcome, Ok(Ok(()))) {
                actor.bumps_saved = bumps;
            }
            actor.saved(outcome);
        }));
    }

    /// What is not on disk is tried again, and told until it is.
    fn saved(&mut self, outcome: Result<Result<(), String>, MailboxError>) {
        let error = outcome.unwrap_or_else(|error| Err(error.to_string())).err();
        self.unsaved |= error.is_some();
        if error.is_some() && error != self.disk_error {
            tracing::error!(error = error.as_deref(), "not saved");
        }
        self.disk_error = error;
    }

    fn state(&self) -> State {
        let stamp = self.keeper.engine().stamp().number();
        let facts = Facts { host: self.host.to_string(), stamp, mark_mask: Some(self.configured.mark.mask()) };
        State { facts, documents: self.keeper.in_force().clone() }
    }
}

impl<E: Holder + Unpin + 'static> Actor for Enforcement<E> {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // What is known is in force before anything else is heard. What is open already was opened before: met in the middle, it is
        // judged like anything new, for a while.
        if !self.keeper.is_adopted() || is_adopting(self.keeper.engine().actual()) {
            self.configured.adopting = true;
            context.run_later(ADOPTION, Self::end_adoption);
        }
        self.look_at_links();
        let (settings, frozen) = settings_of(&self.configured, self.mode.as_ref().map(|(mode, _)| mode.as_str()));
        self.keeper.want_settings(settings);
        // The disk may be behind what is in the kernel: the bus is given a while to say what is missing before anything of it is
        // taken away. A table that was frozen is as it was frozen.
        let outcome = if self.keeper.is_adopted() && (frozen || !self.keeper.agrees()) {
            context.run_later(SYNC_WAIT, Self::settle_by_disk);
            self.keeper.take_over()
        } else {
            self.counted(Keeper::settle)
        };
        self.keeper.want_frozen(frozen);
        let _ = self.after(outcome, context);
        self.turn(context);
        context.run_interval(SAVE_EVERY, Self::save);
        context.run_interval(LOOK_EVERY, Self::look);
    }
}

impl<E: Holder + Unpin + 'static> Handler<Wake> for Enforcement<E> {
    type Result = ();

    fn handle(&mut self, _: Wake, context: &mut Self::Context) {
        self.turn(context);
    }
}

impl<E: Holder + Unpin + 'static> Handler<Keep> for Enforcement<E> {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Keep, _: &mut Self::Context) -> Self::Result {
        let wanted = self.unsaved && !self.keeper.is_stale();
        let saved = wanted.then(|| self.disk.send(Save(Box::new(self.state()))));
        Box::pin(async move {
            let Some(saved) = saved else { return };
            if let Err(error) = saved.await.unwrap_or_else(|error| Err(error.to_string())) {
                tracing::warn!(%error, "the last good state is not saved");
            }
        })
    }
}
