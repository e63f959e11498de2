//! Where a source finds what it owns, and where what it says is written: CATALOG and REGISTRY.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_nats::Client;
use groupcast_bus_config::subjects::{self, CatalogKind, RegistryKey};
use groupcast_policy::ids::{GroupId, HostId, SourceId};
use groupcast_policy::model::Workload;

use super::owned::Owned;
use super::step::{NotWritten, Plan, Written};
use crate::catalog::{self, Catalog, Version};
use crate::change::{Body, Change};
use crate::document::{Document, decode_workload};
use crate::fence::Fenced;
use crate::log::Log;
use crate::registry::{self, Elsewhere, Registry};

#[derive(Clone)]
pub struct Store {
    source: SourceId,
    catalog: Catalog,
    registry: Registry,
    logs: [Log; 2],
}

impl Store {
    pub fn new(source: SourceId, client: &Client) -> Self {
        Self {
            source,
            catalog: Catalog::new(client.clone()),
            registry: Registry::new(client.clone()),
            logs: [Log::catalog(client.clone()), Log::registry(client.clone())],
        }
    }

    /// One that writes as the leader of a term does.
    pub fn fenced(&self, Fenced { catalog, registry, .. }: Fenced) -> Self {
        Self {
            source: self.source.clone(),
            catalog: Catalog::over(catalog.clone()),
            registry: Registry::over(registry.clone()),
            logs: [catalog, registry],
        }
    }

    /// Everything the source owns, from the streams' leaders.
    pub async fn load(&self) -> Result<Owned, String> {
        let mut owned = Owned::default();
        let [catalog, registry] = &self.logs;
        let groups = subjects::catalog_kind_all(CatalogKind::Group);
        for entry in catalog.all(&groups).await.map_err(|error| error.to_string())? {
            owned.catalog = owned.catalog.max(entry.sequence);
            let Some(version) = Version::of(&entry) else { continue };
            let Ok(id) = version.name.id().parse::<GroupId>() else { continue };
            let group = match version.document {
                Ok(None) => continue,
                Ok(Some(Document::Group(group))) => Some(group),
                Ok(Some(_)) | Err(_) => None,
            };
            owned.take_group(&self.source, &id, version.revision, group);
        }
        for entry in registry.all(subjects::REGISTRY_ALL).await.map_err(|error| error.to_string())? {
            owned.registry = owned.registry.max(entry.sequence);
            match subjects::parse_registry(&entry.subject) {
                Some(RegistryKey::Workload(id)) => {
                    if let Ok(Some(workload)) = decode_workload(&id, &entry.payload) {
                        owned.take_workload(&self.source, Arc::new(workload));
                    }
                }
                Some(RegistryKey::Host(_)) if !entry.payload.is_empty() => owned.hosts += 1,
                _ => {}
            }
        }
        Ok(owned)
    }

    /// Groups first, so that workloads find them; what is gone goes last.
    pub async fn write(&self, plan: &Plan) -> Result<Written, NotWritten> {
        let mut written = Written::default();
        let parts = plan.changes.len();
        for (part, writes) in plan.changes.iter().enumerate() {
            let of = if parts > 1 { format!(", part {} of {parts}", part + 1) } else { String::new() };
            let change = Change {
                author: format!("source:{}", self.source),
                reason: format!("as source {} says{of}", self.source),
                key: None,
                writes: writes.clone(),
            };
            let accepted = self.catalog.write(&change, None).await.map_err(|error| NotWritten {
                conflict: matches!(error, catalog::Error::Conflict { .. } | catalog::Error::Gone { .. } | catalog::Error::Busy),
                message: error.to_string(),
            })?;
            for (write, revision) in writes.iter().zip(&accepted.revisions) {
                if let Body::Put(Document::Group(group)) = &write.body {
                    written.revisions.insert(group.id.clone(), *revision);
                }
            }
            written.catalog = Some(accepted.number);
        }
        let failed = |error: registry::Error| NotWritten {
            conflict: matches!(error, registry::Error::Busy),
            message: format!("workloads cannot be placed: {error}"),
        };
        for (host, workloads) in &plan.difference.register {
            self.register(host, workloads, &mut written).await.map_err(failed)?;
        }
        for (host, workloads) in &plan.difference.remove {
            // What could not be placed anew stays where it was.
            let gone = workloads.iter().filter(|(_, id)| !written.withheld.contains_key(id)).cloned().collect::<Vec<_>>();
            let removed = self.registry.remove(host, &gone).await.map_err(failed)?;
            written.registry = written.registry.max(Some(removed.sequence));
        }
        Ok(written)
    }

    /// Places workloads on a host. One whose name or address belongs to a workload that enrolled itself is left out and named.
    async fn register(&self, host: &HostId, workloads: &[Workload], written: &mut Written) -> Result<(), registry::Error> {
        let mut placed = workloads.to_vec();
        while !placed.is_empty() {
            let error = match self.registry.register(host, &placed, Elsewhere::Move).await {
                Ok(registered) => {
                    written.incarnations.extend(registered.incarnations.into_iter().collect::<BTreeMap<_, _>>());
                    written.registry = written.registry.max(Some(registered.sequence));
                    return Ok(());
                }
                Err(error) => error,
            };
            let claims = |workload: &Workload| match &error {
                registry::Error::AliveElsewhere { workload: held, .. } => workload.id == *held,
                registry::Error::AddressHeld { address, network, .. } => {
                    let own = workload.addresses.iter().any(|prefix| prefix.contains(*address));
                    own && workload.network == *network
                }
                registry::Error::Overlaps { prefix, network, .. } => {
                    workload.addresses.contains(prefix) && workload.network == *network
                }
                registry::Error::Mapped { workload: named, .. } => workload.id == *named,
                _ => false,
            };
            let Some(at) = placed.iter().position(claims) else { return Err(error) };
            let workload = placed.remove(at);
            written.withheld.insert(workload.id.clone(), format!("workload {} is not placed: {error}", workload.id));
        }
        Ok(())
    }
}
