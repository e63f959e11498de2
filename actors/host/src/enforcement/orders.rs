//! What is ordered on the local socket. An order waits for its turn, and whoever gave it for what comes of it.

use actix::prelude::*;
use groupcast_enforce::settings::{Attached, Settings};
use groupcast_policy::ids::WorkloadId;
use tokio::sync::oneshot;

use super::Enforcement;
use crate::config::WrittenAttachment;
use crate::holder::Holder;
use crate::inbox::Waiting;
use crate::keeper::Keeper;
use crate::mode::{WantedMode, settings_of};

// ---- messages

#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct Attach(pub WrittenAttachment);

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
}

fn answered<T: 'static>(outcome: Result<T, String>) -> ResponseFuture<Result<T, String>> {
    Box::pin(std::future::ready(outcome))
}

/// One transaction for all of it. What happens all the time goes the short way.
pub(super) fn step<E: Holder>(keeper: &mut Keeper<E>, waiting: Waiting, orders: &[Order]) -> Result<(), E::Error> {
    match (&waiting.commits[..], waiting.overdue, orders) {
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
                    keeper.want_settings(settings.clone());
                }
            }
        }
    }
    keeper.settle()
}

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    /// Adds an order; what comes of it, once it has had its turn.
    fn order(&mut self, what: What, context: &mut Context<Self>) -> ResponseFuture<Result<(), String>> {
        if self.orders.len() >= ORDERS_MAX {
            return answered(Err(format!("{ORDERS_MAX} orders wait already: try again")));
        }
        let (waiter, answer) = oneshot::channel();
        self.orders.push(Order { what, waiter: Some(waiter) });
        self.turn(context);
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err("the agent is ending".into())) })
    }
}

impl<E: Holder + Unpin + 'static> Handler<Attach> for Enforcement<E> {
    type Result = ResponseFuture<Result<(), String>>;

    fn handle(&mut self, Attach(written): Attach, context: &mut Self::Context) -> Self::Result {
        let (workload, attached) = match written.check() {
            Ok(checked) => checked,
            Err(why) => return answered(Err(why)),
        };
        self.look_at_links();
        if let Some(why) = self.misfit(&workload, &attached) {
            return answered(Err(why));
        }
        self.suspended.remove(&workload);
        self.order(What::Attach(workload, attached), context)
    }
}

impl<E: Holder + Unpin + 'static> Handler<Detach> for Enforcement<E> {
    type Result = ResponseFuture<Result<(), String>>;

    fn handle(&mut self, Detach(workload): Detach, context: &mut Self::Context) -> Self::Result {
        if self.suspended.remove(&workload).is_some() {
            return Box::pin(self.keep_orders());
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
        let Some(attached) = self.keeper.engine().attachments().get(&workload) else {
            return answered(Err(format!("workload {workload} is not attached here")));
        };
        let attached = Attached { audit, ..attached.clone() };
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
        tracing::warn!(?mode, %reason, "set by the operator");
        let (settings, frozen) = settings_of(&self.configured, mode.name());
        self.mode = mode.name().map(|name| (name.to_owned(), reason));
        self.order(What::Mode(settings, frozen), context)
    }
}
