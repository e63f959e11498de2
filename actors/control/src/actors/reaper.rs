//! Writes what [`crate::registration::lifecycle`] has decided about silent hosts, each by compare-and-swap on the entry that was
//! looked at: whoever spoke meanwhile is spared.

use actix::prelude::*;
use async_nats::Client;
use groupcast_policy::ids::HostId;

use super::{MAILBOX_MAX, Ping};
use crate::names;
use crate::registration::lifecycle::Effect;
use crate::registry::{Fate, Registry};

/// Answered when it is done, or cannot be: whether the host was deleted, or the guard's record written.
#[derive(Message)]
#[rtype(result = "bool")]
pub struct Order(pub Effect);

/// An operator takes a host away. Answered with how many of its workloads went.
#[derive(Message)]
#[rtype(result = "Result<usize, String>")]
pub struct Expel {
    pub host: HostId,
    pub by: String,
}

pub struct Reaper {
    registry: Registry,
}

impl Reaper {
    pub fn new(client: Client) -> Self {
        Self { registry: Registry::new(client) }
    }
}

impl Actor for Reaper {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
    }
}

impl Supervised for Reaper {}

impl Handler<Order> for Reaper {
    type Result = ResponseFuture<bool>;

    fn handle(&mut self, Order(effect): Order, _: &mut Self::Context) -> Self::Result {
        let registry = self.registry.clone();
        Box::pin(async move {
            let written = match &effect {
                Effect::Suspect { host, sequence, silent_ms } => {
                    let cause = format!("silent for {silent_ms} ms: suspect");
                    registry.mark(host, *sequence, true, &cause).await
                }
                Effect::Live { host, sequence } => registry.mark(host, *sequence, false, "heard again").await,
                Effect::Delete { host, sequence, silent_ms, confirmed } => {
                    let word = if *confirmed { ", confirmed by an operator" } else { "" };
                    registry.reap(host, *sequence, &format!("silent for {silent_ms} ms: deleted{word}")).await
                }
                Effect::Guard { template, record } => {
                    let cause = match record {
                        None => "thawed".to_owned(),
                        Some(record) if record.confirmed.is_empty() => "too many silent at once: frozen".to_owned(),
                        Some(record) => format!("{} silent hosts confirmed by an operator", record.confirmed.len()),
                    };
                    registry.guarded(template, record.as_ref(), &cause).await.map(|()| Fate::Done)
                }
                Effect::Tell { .. } => return false,
            };
            match &written {
                Ok(fate) => told(&effect, *fate),
                // It is looked at again with the next sweep.
                Err(error) => tracing::warn!(%error, ?effect, "silence had no consequence"),
            }
            matches!((effect, written), (Effect::Delete { .. } | Effect::Guard { .. }, Ok(Fate::Done)))
        })
    }
}

fn told(effect: &Effect, fate: Fate) {
    match (effect, fate) {
        (_, Fate::Spared) => tracing::info!(?effect, "the entry is another by now: spared"),
        (Effect::Suspect { host, silent_ms, .. }, _) => tracing::info!(%host, silent_ms, "suspect"),
        (Effect::Live { host, .. }, _) => tracing::info!(%host, "heard again"),
        (Effect::Delete { host, silent_ms, confirmed, .. }, _) => {
            metrics::counter!(names::REGISTRATIONS_ENDED, "cause" => "silent").increment(1);
            tracing::warn!(%host, silent_ms, confirmed, "deleted for silence");
        }
        (Effect::Guard { template, record: Some(record) }, _) if !record.confirmed.is_empty() => {
            tracing::warn!(%template, hosts = record.confirmed.len(), "confirmed by an operator to be gone");
        }
        (Effect::Guard { template, record: Some(record) }, _) => {
            metrics::counter!(names::FROZEN_TOTAL).increment(1);
            let (missing, hosts) = (record.missing, record.hosts);
            tracing::error!(
                %template, missing, hosts,
                "too many hosts are silent at once: nothing is deleted; if they are gone for good, say `groupcast registrations confirm`"
            );
        }
        (Effect::Guard { template, .. }, _) => tracing::warn!(%template, "deletions go on"),
        (Effect::Tell { .. }, _) => {}
    }
}

impl Handler<Expel> for Reaper {
    type Result = ResponseFuture<Result<usize, String>>;

    fn handle(&mut self, Expel { host, by }: Expel, _: &mut Self::Context) -> Self::Result {
        let registry = self.registry.clone();
        Box::pin(async move {
            let ended = registry.expel(&host, &format!("host removed by {by}")).await.map_err(|error| error.to_string())?;
            tracing::info!(%host, by, workloads = ended.incarnations.len(), "host removed");
            Ok(ended.incarnations.len())
        })
    }
}

impl Handler<Ping> for Reaper {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}
