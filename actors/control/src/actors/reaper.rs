//! Writes what [`crate::registration::lifecycle`] has decided about silent hosts, each by compare-and-swap on the entry that was
//! looked at: whoever spoke meanwhile is spared.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use actix::prelude::*;
use async_nats::Client;
use groupcast_policy::ids::{HostId, TemplateId};
use tokio::sync::watch;

use super::{MAILBOX_MAX, Ping};
use crate::catalog::Catalog;
use crate::document::{Document, Name};
use crate::fence::{Fences, Unfenced};
use crate::names;
use crate::registration::grant::Grant;
use crate::registration::lifecycle::Effect;
use crate::registration::review::{Verdict, judge};
use crate::registry::{Error, Fate, Registry};

/// Answered when it is done, or cannot be: whether the host was deleted, or the guard's record written.
#[derive(Message)]
#[rtype(result = "bool")]
pub struct Order {
    pub effect: Effect,
    /// The term in which it was decided: once another leads it is not carried out.
    pub term: u64,
}

/// An operator takes a host away. Answered with how many of its workloads went.
#[derive(Message)]
#[rtype(result = "Result<usize, String>")]
pub struct Expel {
    pub host: HostId,
    pub by: String,
}

/// Look whether what a host has enrolled is still allowed.
#[derive(Message)]
#[rtype(result = "Look")]
pub struct LookAt(pub HostId);

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Everything it has is allowed, or it has nothing.
    Fine,
    /// Something was taken away, and the host should know.
    Evicted,
    /// The entry was another by then, or the bus did not answer.
    Again,
}

pub struct Reaper {
    catalog: Catalog,
    fences: Arc<Fences>,
    leading: watch::Receiver<Option<u64>>,
}

impl Reaper {
    pub fn new(client: Client, fences: Arc<Fences>, leading: watch::Receiver<Option<u64>>) -> Self {
        Self { catalog: Catalog::new(client), fences, leading }
    }
}

/// The registry as the leader of this term writes it.
async fn registry(fences: &Fences, term: u64) -> Result<Registry, Unfenced> {
    Ok(Registry::over(fences.of(term).await?.registry))
}

impl Handler<LookAt> for Reaper {
    type Result = ResponseFuture<Look>;

    fn handle(&mut self, LookAt(host): LookAt, _: &mut Self::Context) -> Self::Result {
        let (catalog, fences, term) = (self.catalog.clone(), self.fences.clone(), *self.leading.borrow());
        Box::pin(async move {
            // Only the leader evicts: without a term there is nothing to look at, and the next leader looks at everything.
            let Some(term) = term else { return Look::Fine };
            let registry = match registry(&fences, term).await {
                Ok(registry) => registry,
                Err(error) => {
                    tracing::warn!(%host, %error, "it is not known whether what the host has enrolled is still allowed: looking again");
                    return Look::Again;
                }
            };
            look(&registry, &catalog, &host).await.unwrap_or_else(|error| {
                tracing::warn!(%host, %error, "it is not known whether what the host has enrolled is still allowed: looking again");
                Look::Again
            })
        })
    }
}

/// Reads the host's entry first, then what it is granted, and acts only if the entry is still the same.
async fn look(registry: &Registry, catalog: &Catalog, host: &HostId) -> Result<Look, Error> {
    let Some(own) = registry.own_workloads(host).await? else { return Ok(Look::Fine) };
    let Ok(name) = Grant::name(host) else { return Ok(Look::Fine) };
    let grant = match catalog.read(&name).await?.map(|version| version.document) {
        // A deletion leaves its trace. Without one CATALOG has lost what it held, and what was allowed stays.
        Some(Ok(None)) => Grant::new(host.clone(), Vec::new()).removed(0),
        Some(Ok(Some(document))) => match Grant::read(&document) {
            Ok(grant) => grant,
            Err(_) => return Ok(Look::Fine),
        },
        Some(Err(_)) | None => return Ok(Look::Fine),
    };
    let ids: BTreeSet<TemplateId> = own.workloads.iter().filter_map(|workload| workload.template.clone()).collect();
    let mut templates = BTreeMap::new();
    for id in ids {
        let found = catalog.read(&Name::template(&id)).await?;
        if let Some(Ok(Some(Document::Template(template)))) = found.map(|version| version.document) {
            templates.insert(id, (*template).clone());
        }
    }
    let (fate, gone) = match judge(&grant, &templates, &own.workloads) {
        Verdict::Stays => return Ok(Look::Fine),
        Verdict::Expelled => (registry.reap(host, own.sequence, "its host was removed").await?, own.workloads.len()),
        Verdict::Evicted { workloads, why } => {
            tracing::warn!(%host, workloads = workloads.len(), %why, "no longer allowed: evicted");
            let cause = format!("no longer allowed: {why}");
            (registry.evict(host, own.sequence, &workloads, &cause).await?, workloads.len())
        }
    };
    if fate == Fate::Spared {
        return Ok(Look::Again);
    }
    metrics::counter!(names::REGISTRATIONS_ENDED, "cause" => "evicted").increment(gone as u64);
    Ok(Look::Evicted)
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

    fn handle(&mut self, Order { effect, term }: Order, _: &mut Self::Context) -> Self::Result {
        let fences = self.fences.clone();
        Box::pin(async move {
            let registry = match registry(&fences, term).await {
                Ok(registry) => registry,
                Err(error) => {
                    tracing::warn!(%error, ?effect, "silence had no consequence");
                    return false;
                }
            };
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
        // An order that waited here while another took over may have been repeated there, and the host be back.
        let (fences, term) = (self.fences.clone(), *self.leading.borrow());
        Box::pin(async move {
            let term = term.ok_or_else(|| Unfenced::NotLeading.to_string())?;
            let registry = registry(&fences, term).await.map_err(|error| error.to_string())?;
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
