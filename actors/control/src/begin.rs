//! The first word on a bus that is new.
//!
//! Nobody leads a bus whose catalogue nobody has written: it may be one that lost its data, and hosts would be told that nothing is
//! allowed any more. Where groups come only from sources nobody would ever write the first document, since sources are polled by whoever
//! leads. So an operator says once that the bus is new. A bus that loses its data loses this word with it and is protected as before.

use std::time::SystemTime;

use async_nats::Client;
use groupcast_bus_config::subjects::{self, CatalogKind, RegistryKey};

use crate::catalog::{self, Catalog};
use crate::change::{Change, Expected, Write};
use crate::document::{Document, Name};
use crate::log::{Log, NoAnswer};

/// What to do about a bus on which nothing was ever written.
pub const ADVICE: &str = "nothing was ever written to this bus, so no controller leads and no source is read: if the bus is new, run \
                          `groupcast init` (or apply a first group or template); if it lost its data, `groupcast import`";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    Now {
        change: u64,
    },
    /// Somebody has written before: there is nothing to say.
    Before,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "this bus is not new: {found} is registered, but CATALOG is empty; it lost its data: restore it with `groupcast import`"
    )]
    NotNew { found: String },
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Catalog(#[from] catalog::Error),
}

fn name() -> Result<Name, catalog::Error> {
    Name::new(CatalogKind::Installation, "begun").map_err(|error| catalog::Error::Refused(error.to_string()))
}

/// Says that the bus is new, unless something speaks against it.
pub async fn begin(client: &Client, author: &str, now: SystemTime) -> Result<Begun, Error> {
    let (catalog, registry) = (Log::catalog(client.clone()), Log::registry(client.clone()));
    for kind in [CatalogKind::Group, CatalogKind::Template, CatalogKind::Installation] {
        if catalog.last(&subjects::catalog_kind_all(kind)).await?.is_some() {
            return Ok(Begun::Before);
        }
    }
    let registered = |entry: &crate::log::Entry| match subjects::parse_registry(&entry.subject)? {
        RegistryKey::Workload(id) | RegistryKey::FormerWorkload(_, id) => Some(format!("workload {id}")),
        RegistryKey::Host(id) => Some(format!("host {id}")),
        // Refusals and freezes are written about those who are not there.
        _ => None,
    };
    let entries = registry.all(subjects::REGISTRY_ALL).await?;
    if let Some(found) = entries.iter().filter(|entry| !entry.payload.is_empty()).find_map(registered) {
        return Err(Error::NotNew { found });
    }
    let body = serde_json::json!({ "begun": humantime::format_rfc3339_seconds(now).to_string() });
    let change = Change {
        author: author.to_owned(),
        reason: "the bus is new".to_owned(),
        key: None,
        writes: vec![Write::put(Document::Other { name: name()?, body }, Expected::Absent)],
    };
    match Catalog::new(client.clone()).write(&change, None).await {
        Ok(accepted) => Ok(Begun::Now { change: accepted.number }),
        Err(catalog::Error::Conflict { .. }) => Ok(Begun::Before),
        Err(error) => Err(error.into()),
    }
}
