//! Who wrote which version of a document, when, and what it changed.

use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::audit::{Audit, Error, Recorded, Wanted};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::access::Administrator;
use super::body::Queried;
use super::{App, FORMAT_VERSION, Listed, Page};
use crate::problem::{Problem, Reading};

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Only documents of this kind, such as `group`, `template`, `token` or `host`.
    pub kind: Option<String>,
    /// Only documents with this id.
    pub id: Option<String>,
    /// Only what was written by authors that begin so, such as a token's id.
    pub by: Option<String>,
    /// Only what AUDIT took at this time or later, such as `2026-11-18T07:00:00Z`.
    pub since: Option<String>,
    /// Only what AUDIT took until then.
    pub until: Option<String>,
    /// Those after this number: what `next` of the page before says.
    pub after: Option<u64>,
    /// How many, at most 1000; 100 if not said.
    #[param(maximum = 1000, minimum = 1)]
    pub limit: Option<usize>,
}

/// One version of a document.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    pub format_version: String,
    /// Its place in AUDIT.
    pub number: u64,
    pub kind: String,
    pub id: String,
    /// The document's revision, which is also the number of a change of one document.
    pub revision: u64,
    /// Written on a bus of which this one was restored: revision and time are of that one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub imported: bool,
    /// When AUDIT took it: milliseconds after it was written, or as long as a server was away.
    pub at: String,
    pub by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deleted: bool,
    /// What it changed in the version before: `+` new, `-` gone, `~` another value.
    pub difference: Vec<String>,
    /// The document as it was written; nothing when it was deleted.
    #[schema(value_type = Option<Object>)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<Value>,
}

impl From<Recorded> for AuditEntry {
    fn from(recorded: Recorded) -> Self {
        let Recorded { number, name, revision, imported, at, author, reason, document, deleted, difference } = recorded;
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            number,
            kind: name.kind.as_str().to_owned(),
            id: name.id().to_owned(),
            revision,
            imported,
            at: humantime::format_rfc3339_millis(at).to_string(),
            by: author,
            reason,
            deleted,
            difference,
            document,
        }
    }
}

fn time(name: &str, text: Option<&String>) -> Result<Option<SystemTime>, Problem> {
    let parse = |text: &String| {
        humantime::parse_rfc3339_weak(text)
            .map_err(|error| Problem::bad_request(format!("{name}: {error}: write 2026-11-18T07:00:00Z")))
    };
    text.map(parse).transpose()
}

/// Every version of every document that was written, oldest first, as long as AUDIT keeps it: 90 days, 10,000 versions of one document, 1 GB.
#[utoipa::path(get, path = "/v1/audit", tag = "administration", security(("token" = [])), params(Which), responses(
    (status = 200, body = Listed<AuditEntry>),
    (status = 403, body = Problem, content_type = "application/problem+json"), Reading,
))]
pub async fn list_audit(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Queried(which): Queried<Which>,
) -> Result<Json<Listed<AuditEntry>>, Problem> {
    let kind = which.kind.as_deref().map(|text| {
        let known = CatalogKind::ALL.into_iter().find(|kind| kind.as_str() == text);
        known.ok_or_else(|| {
            Problem::bad_request(format!("{text:?} is no kind of document: write group, template, host, source or token"))
        })
    });
    let wanted = Wanted {
        kind: kind.transpose()?,
        id: which.id.clone(),
        author: which.by.clone(),
        since: time("since", which.since.as_ref())?,
        until: time("until", which.until.as_ref())?,
        after: which.after.unwrap_or(0),
        limit: Page { limit: which.limit, ..Page::default() }.limit()?,
    };
    let _place = app.heavy.place(&caller).await?;
    let (entries, next) = Audit::new(app.client.clone()).read(&wanted).await.map_err(|error| match error {
        Error::NoAnswer(error) => error.into(),
        Error::Id(error) => Problem::bad_request(error.to_string()),
    })?;
    Ok(Json(Listed::new((entries.into_iter().map(AuditEntry::from).collect(), next.map(|next| next.to_string())))))
}
