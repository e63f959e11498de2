//! Everything out, and documents in again.

use std::io;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::change::{CHANGE_DOCUMENTS_MAX, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::export as file;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::access::Administrator;
use super::body::{self, Queried};
use super::{App, FORMAT_VERSION};
use crate::problem::{Item, Problem, Reading, Writing};
use crate::submit::{Asked, submit};

/// Largest export that a gateway makes; a larger one is made on the bus with `groupcast export --server`.
pub const EXPORT_BYTES_MAX: usize = 256 * 1024 * 1024;

/// Collects up to a limit.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > EXPORT_BYTES_MAX {
            return Err(io::Error::other("larger than a gateway makes it"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct What {
    /// `false` leaves out what AUDIT remembers: who wrote which version of a document.
    pub audit: Option<bool>,
}

/// Everything that is not derived, one JSON object a line. Tokens are in it as hashes.
#[utoipa::path(get, path = "/v1/export", tag = "administration", security(("token" = [])), params(What), responses(
    (status = 200, description = "The export", body = String, content_type = "application/jsonl"),
    (status = 403, body = Problem, content_type = "application/problem+json"),
    (status = 413, body = Problem, content_type = "application/problem+json"), Reading,
))]
pub async fn export(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Queried(what): Queried<What>,
) -> Result<Response, Problem> {
    let _place = app.heavy.place(&caller).await?;
    let mut out = Bounded(Vec::new());
    match file::export(app.client.clone(), &mut out, what.audit.unwrap_or(true)).await {
        Ok(_) => Ok(([(header::CONTENT_TYPE, "application/jsonl")], out.0).into_response()),
        Err(file::Error::Io(_)) => {
            let detail = format!(
                "the export is larger than {EXPORT_BYTES_MAX} bytes: leave out the audit (`--no-audit`), or make it on the bus \
                 (`groupcast export --server …`)"
            );
            Err(Problem::too_large(detail))
        }
        Err(error) => Err(Problem::unavailable(error.to_string())),
    }
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct How {
    /// Write over what is there; without it, what is there makes the import fail.
    #[serde(default)]
    pub replace: bool,
}

/// What was imported.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Imported {
    pub format_version: String,
    /// The changes it was written with.
    pub changes: Vec<u64>,
    pub documents: usize,
    /// Tokens, and documents of sources: an import through a gateway leaves them out.
    pub left_out: usize,
    /// Entries of the registry and former versions of documents: only `groupcast import --server` restores them.
    pub entries_left_out: usize,
    /// What could not be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<Item>,
}

/// Writes the groups and templates of an export, each chunk of them as one change. The registry, terms and tokens are restored on the
/// bus itself, with `groupcast import --server`.
#[utoipa::path(post, path = "/v1/import", tag = "administration", security(("token" = [])), params(How),
    request_body(content = String, content_type = "application/jsonl"),
    responses((status = 201, body = Imported), Writing))]
pub async fn import(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Queried(how): Queried<How>,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Imported>), Problem> {
    let (bytes, _body) = body::large(&app, &caller, body, &headers, body::LARGE_BYTES_MAX).await?;
    let _place = app.heavy.place(&caller).await?;
    let parsed =
        body::aside(bytes.len(), || file::read(bytes.as_ref())).map_err(|error| Problem::bad_request(error.to_string()))?;
    let (ours, others): (Vec<Document>, Vec<Document>) = parsed.documents.into_iter().partition(is_written_here);
    let expected = if how.replace { Expected::Any } else { Expected::Absent };
    let mut changes = Vec::new();
    for documents in ours.chunks(CHANGE_DOCUMENTS_MAX) {
        let writes = documents.iter().map(|document| Write::put(document.clone(), expected)).collect();
        let asked = Asked { reason: "restored from an export".to_owned(), key: None, writes, plan: None, undo: false };
        changes.push(submit(&app, &caller, asked).await?.change);
    }
    Ok((
        StatusCode::CREATED,
        Json(Imported {
            format_version: FORMAT_VERSION.to_owned(),
            changes,
            documents: ours.len(),
            left_out: others.len(),
            entries_left_out: parsed.entries.len() + parsed.audited.len(),
            refused: parsed.refused.into_iter().map(|detail| Item { detail, ..Item::default() }).collect(),
        }),
    ))
}

fn is_written_here(document: &Document) -> bool {
    match document {
        Document::Group(group) => group.owner == groupcast_policy::model::Owner::Gateway,
        Document::Template(_) => true,
        Document::Other { name, .. } => matches!(name.kind, CatalogKind::Group | CatalogKind::Template),
    }
}
