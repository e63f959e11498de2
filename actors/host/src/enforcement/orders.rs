//! What is ordered on the local socket. An order waits for its turn, and whoever gave it for what comes of it.

use std::collections::BTreeSet;

use actix::prelude::*;
use groupcast_enforce::settings::{Attached, Attachment, Settings};
use groupcast_policy::ids::WorkloadId;
use tokio::sync::oneshot;

use super::Enforcement;
use crate::config::WrittenAttachment;
use crate::holder::Holder;
use crate::inbox::Waiting;
use crate::keeper::Keeper;
use crate::mode::{WantedMode, settings_of};

// ---- messages

/// Answered with how it was attached before, if it was.
#[derive(Message)]
#[rtype(result = "Result<Option<WrittenAttachment>, String>")]
pub struct Attach {
    pub attachment: WrittenAttachment,
    /// It is about to be registered with the addresses it is attached by.
    pub enrols: bool,
}

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct Detach(pub WorkloadId);

/// Whether what would be denied to a workload is logged and passes.
#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct SetAudit {
    pub workload: WorkloadId,
    pub audit: bool,
}

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct SetMode {
    pub mode: WantedMode,
    pub reason: String,
}

// ---- orders

/// Orders that wait for their turn.
const ORDERS_MAX: usize = 10_000;

pub(super) type Waiter = oneshot::Sender<Result<(), String>>;

/// What somebody on the local socket wants, and waits for.
pub(super) struct Order {
    pub what: What,
    pub waiter: Option<Waiter>,
}

pub(super) enum What {
    Attach(WorkloadId, Attached),
    Detach(WorkloadId),
    Mode(Settings, bool),
    /// Interfaces that stay closed whatever they are called, by number.
    Hold(BTreeSet<u32>),
}

fn answered<T: 'static>(outcome: Result<T, String>) -> ResponseFuture<Result<T, String>> {
    Box::pin(std::future::ready(outcome))
}

/// One transaction for all of it. What happens all the time goes the short way.
pub(super) fn step<E: Holder>(keeper: &mut Keeper<E>, waiting: Waiting, orders: &[Order]) -> Result<(), E::Error> {
    // Interfaces come and go with workloads: that must not make the way of these long.
    let held = orders.iter().filter_map(|order| if let What::Hold(held) = &order.what { Some(held) } else { None }).next_back();
    if let Some(held) = held {
        keeper.hold(held.clone())?;
    }
    let orders: Vec<&Order> = orders.iter().filter(|order| !matches!(order.what, What::Hold(_))).collect();
    if waiting.is_empty() && orders.is_empty() {
        return Ok(());
    }
    match (&waiting.commits[..], waiting.overdue, &orders[..]) {
        (commits, None, []) => return keeper.moved(commits),
        ([], Some(safe), []) => return keeper.overdue(safe),
        ([], None, [Order { what: What::Attach(id, attached), .. }]) => return keeper.attach(id.clone(), attached.clone()),
        ([], None, [Order { what: What::Detach(id), .. }]) => return keeper.detach(id).map(|_| ()),
        (commits, safe, _) => {
            keeper.hear(commits);
            safe.into_iter().for_each(|safe| keeper.show(safe));
        }
    }
    for order in orders {
        match &order.what {
            What::Attach(id, attached) => _ = keeper.want(id.clone(), Some(attached.clone())),
            What::Detach(id) => _ = keeper.want(id.clone(), None),
            What::Mode(settings, frozen) => {
                keeper.want_frozen(*frozen);
                if !frozen {
                    // Which interfaces are held was found out since.
                    let held = keeper.engine().settings().held.clone();
                    keeper.want_settings(Settings { held, ..settings.clone() });
                }
            }
            What::Hold(_) => {}
        }
    }
    keeper.settle()
}

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    /// Why no further order is taken, if none is. Asked before anything is noted: what is refused changes nothing.
    fn no_room(&self) -> Option<String> {
        (self.orders.len() >= ORDERS_MAX).then(|| format!("{ORDERS_MAX} orders wait already: try again"))
    }

    /// Adds an order; what comes of it, once it has had its turn.
    fn order(&mut self, what: What, context: &mut Context<Self>) -> ResponseFuture<Result<(), String>> {
        if let Some(why) = self.no_room() {
            return answered(Err(why));
        }
        let (waiter, answer) = oneshot::channel();
        self.orders.push(Order { what, waiter: Some(waiter) });
        self.turn(context);
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err("the agent is ending".into())) })
    }
}

impl<E: Holder + Unpin + 'static> Handler<Attach> for Enforcement<E> {
    type Result = ResponseFuture<Result<Option<WrittenAttachment>, String>>;

    fn handle(&mut self, Attach { attachment, enrols }: Attach, context: &mut Self::Context) -> Self::Result {
        let (workload, attached) = match attachment.check() {
            Ok(checked) => checked,
            Err(why) => return answered(Err(why)),
        };
        self.look_at_links();
        // Refused means unchanged: what it is attached to now, and what others are, stays.
        if let Some(why) = self.unattachable(&workload, &attached, enrols).or_else(|| self.no_room()) {
            return answered(Err(why));
        }
        let before = self.attachments_to_be().get(&workload).and_then(|held| WrittenAttachment::of(&workload, held));
        self.suspended.remove(&workload);
        let ordered = self.order(What::Attach(workload, attached), context);
        Box::pin(async move { ordered.await.map(|()| before) })
    }
}

impl<E: Holder + Unpin + 'static> Handler<Detach> for Enforcement<E> {
    type Result = ResponseFuture<Result<(), String>>;

    fn handle(&mut self, Detach(workload): Detach, context: &mut Self::Context) -> Self::Result {
        if self.keeper.engine().attachments().get(&workload).is_some_and(|held| held.attachment == Attachment::Host) {
            let words = "is the machine itself: take host_workload out of agent.toml instead";
            return answered(Err(format!("workload {workload} {words}")));
        }
        if self.suspended.remove(&workload).is_some() {
            // What leads to it may still wait for its turn to be taken away.
            return self.order(What::Detach(workload), context);
        }
        let is_ordered = |order: &Order| matches!(&order.what, What::Attach(id, _) if *id == workload);
        if !self.keeper.engine().attachments().contains_key(&workload) && !self.orders.iter().any(is_ordered) {
            return answered(Err(format!("workload {workload} is not attached here")));
        }
        self.order(What::Detach(workload), context)
    }
}

impl<E: Holder + Unpin + 'static> Handler<SetAudit> for Enforcement<E> {
    type Result = ResponseFuture<Result<(), String>>;

    fn handle(&mut self, SetAudit { workload, audit }: SetAudit, context: &mut Self::Context) -> Self::Result {
        if let Some(attached) = self.suspended.get_mut(&workload) {
            attached.audit = audit;
            return Box::pin(self.keep_orders());
        }
        // As it will be after what waits: this is about the workload, and takes back nothing that was ordered before.
        let Some(attached) = self.attachments_to_be().remove(&workload) else {
            return answered(Err(format!("workload {workload} is not attached here")));
        };
        let attached = Attached { audit, ..attached };
        tracing::warn!(%workload, audit, "set by the operator");
        self.order(What::Attach(workload, attached), context)
    }
}

impl<E: Holder + Unpin + 'static> Handler<SetMode> for Enforcement<E> {
    type Result = ResponseFuture<Result<(), String>>;

    fn handle(&mut self, SetMode { mode, reason }: SetMode, context: &mut Self::Context) -> Self::Result {
        if reason.trim().is_empty() {
            return answered(Err("say why: the reason is seen wherever changes are waited for".into()));
        }
        if let Some(why) = self.no_room() {
            return answered(Err(why));
        }
        tracing::warn!(?mode, %reason, "set by the operator");
        let (settings, frozen) = settings_of(&self.configured, mode.name());
        self.mode = mode.name().map(|name| (name.to_owned(), reason));
        self.order(What::Mode(settings, frozen), context)
    }
}
