//! Groups and templates: one document at a time. Both kinds go the same way.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::change::Write;
use groupcast_control::document::{Document, Name};
use groupcast_policy::written::{self, Node, Write as _, Written};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::access::Caller;
use super::body::{self, Named, Queried};
use super::{App, FORMAT_VERSION, Listed, Page};
use crate::host_bits;
use crate::local::{Kept, Local};
use crate::problem::{Item, Problem, Reading, ReadingOne, Writing};
use crate::submit::{Asked, Done, submit};

/// A document and the version it is.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Shown {
    pub format_version: String,
    /// The same number as in its ETag.
    pub revision: u64,
    /// The change it was written with.
    pub change: u64,
    pub changed_by: String,
    pub changed_at: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[schema(value_type = Object)]
    pub document: Value,
}

impl Shown {
    pub fn new(kept: &Kept, document: &Document) -> Self {
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            revision: kept.revision,
            change: kept.change,
            changed_by: kept.author.clone(),
            changed_at: humantime::format_rfc3339_millis(kept.at).to_string(),
            reason: kept.reason.clone(),
            document: value(document),
        }
    }
}

/// As people write it.
pub fn value(document: &Document) -> Value {
    let node = match document {
        Document::Group(group) => group.node(),
        Document::Template(template) => template.node(),
        Document::Other { body, .. } => return body.clone(),
    };
    serde_json::to_value(node).unwrap_or_default()
}

/// What became of a write.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WriteResult {
    pub format_version: String,
    /// Ask `/v1/changes/{change}` how far it is.
    pub change: u64,
    /// Of the document now; nothing after it was deleted.
    pub revision: Option<u64>,
    /// It had been written before, under the same Idempotency-Key.
    pub repeated: bool,
    /// It was so already: nothing was written.
    pub unchanged: bool,
    /// Allowed, but most probably not meant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Item>,
}

pub fn name(kind: CatalogKind, id: &str) -> Result<Name, Problem> {
    Name::new(kind, id).map_err(|error| Problem::bad_request(error.to_string()))
}

fn list(app: &App, kind: CatalogKind, page: &Page) -> Result<Json<Listed<Shown>>, Problem> {
    let local = app.followed.local();
    let there = local.kept_of(kind).filter_map(|(name, kept)| Some((name, kept, local.document(name)?)));
    let cut = page.cut(there, |(name, ..)| name.id(), |(_, kept, document)| Shown::new(kept, &document))?;
    Ok(Json(Listed::new(cut)))
}

fn find(local: &Local, name: &Name) -> Option<(u64, Shown)> {
    let (kept, document) = (local.kept(name)?, local.document(name)?);
    Some((kept.revision, Shown::new(kept, &document)))
}

fn get(app: &App, name: &Name, headers: &HeaderMap) -> Result<Response, Problem> {
    let (revision, shown) =
        find(&app.followed.local(), name).ok_or_else(|| Problem::not_found(format!("{name} does not exist")))?;
    let tag = [(header::ETAG, body::etag(revision))];
    if body::holds(headers, revision) {
        return Ok((StatusCode::NOT_MODIFIED, tag).into_response());
    }
    Ok((tag, Json(shown)).into_response())
}

/// Reads a document for writing.
pub fn parse(node: &Node, index: usize) -> Result<Document, Vec<written::Problem>> {
    match written::document(node, index)? {
        Written::Group(group) => Ok(Document::Group(group.into())),
        Written::Template(template) => Ok(Document::Template(template.into())),
        Written::Workload(workload) => {
            let message = "workloads are registered by their hosts or by sources, not written here".to_owned();
            let document = format!("workload \"{}\"", workload.id);
            Err(vec![written::Problem { fault: written::Fault::Invalid, document, rule: None, field: "kind".into(), message }])
        }
    }
}

async fn put(app: &App, caller: &Caller, name: Name, headers: &HeaderMap, body: Body) -> Result<Response, Problem> {
    caller.principal.may_write()?;
    let (expected, key) = (body::expected(headers)?, body::key(headers)?);
    let bytes = body::read(app, body, headers, body::SMALL_BYTES_MAX).await?;
    let mut node = body::aside(body::length(headers, &bytes), || body::document(headers, &bytes))?;
    if let Node::Map(entries) = &mut node {
        // The path says kind and id; a document that says so too must agree.
        for (field, said) in [("kind", name.kind.as_str()), ("id", name.id())] {
            if !entries.iter().any(|(key, _)| key == field) {
                entries.push((field.to_owned(), Node::from(said)));
            }
        }
    }
    let document = parse(&node, 0).map_err(Problem::of_documents)?;
    let dropped = host_bits::warnings(&node);
    if document.name() != name {
        let detail = format!("the document is {}, the path says {name}: make both alike", document.name());
        return Err(Problem::bad_request(detail));
    }
    let was_there = app.followed.local().kept(&name).is_some();
    let mut done = write(app, caller, headers, key, Write::put(document, expected)).await?;
    done.warnings.extend(dropped);
    let revision = done.revisions.first().copied().unwrap_or(done.change);
    let status = if was_there || done.repeated { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, [(header::ETAG, body::etag(revision))], Json(answer(done, Some(revision)))).into_response())
}

async fn delete(app: &App, caller: &Caller, name: Name, headers: &HeaderMap) -> Result<Json<WriteResult>, Problem> {
    let (expected, key) = (body::expected(headers)?, body::key(headers)?);
    let done = write(app, caller, headers, key, Write::delete(name, expected)).await?;
    Ok(Json(answer(done, None)))
}

/// Header in which a request for one document says why.
pub const REASON: &str = "groupcast-reason";

async fn write(app: &App, caller: &Caller, headers: &HeaderMap, key: Option<String>, write: Write) -> Result<Done, Problem> {
    let reason = headers.get(REASON).map(|value| value.to_str().map(str::to_owned)).transpose();
    let reason = reason.map_err(|_| Problem::bad_request(format!("{REASON} holds more than plain characters")))?;
    let asked = Asked { reason: reason.unwrap_or_default(), key, writes: vec![write], plan: None, undo: false };
    submit(app, caller, asked).await
}

fn answer(done: Done, revision: Option<u64>) -> WriteResult {
    let Done { change, repeated, unchanged, warnings, .. } = done;
    WriteResult { format_version: FORMAT_VERSION.to_owned(), change, revision, repeated, unchanged, warnings }
}

macro_rules! kind {
    ($kind:expr, $tag:literal, $all:literal, $one:literal, $list:ident, $get:ident, $put:ident, $delete:ident) => {
        /// Lists them in the order of their ids.
        #[utoipa::path(get, path = $all, tag = $tag, security(("token" = [])), params(Page), responses(
            (status = 200, body = Listed<Shown>), Reading,
        ))]
        pub async fn $list(State(app): State<App>, _: Caller, Queried(page): Queried<Page>) -> Result<Json<Listed<Shown>>, Problem> {
            list(&app, $kind, &page)
        }

        /// Reads one. Its ETag is what `If-Match` takes; with `If-None-Match` a version that is held already is not sent again.
        #[utoipa::path(get, path = $one, tag = $tag, security(("token" = [])),
            params(("id" = String, Path), ("If-None-Match" = Option<String>, Header)), responses(
            (status = 200, body = Shown, headers(("ETag" = String))), (status = 304, description = "You hold it already"), ReadingOne,
        ))]
        pub async fn $get(
            State(app): State<App>,
            _: Caller,
            Named(id): Named,
            headers: HeaderMap,
        ) -> Result<Response, Problem> {
            get(&app, &name($kind, &id)?, &headers)
        }

        /// Writes one, as JSON, or as YAML with content type `application/yaml`. With `If-Match` only over the version named, with
        /// `If-None-Match: *` only where there is none. Answered when the bus has accepted it for good.
        #[utoipa::path(put, path = $one, tag = $tag, security(("token" = [])), params(
            ("id" = String, Path), ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
            ("Idempotency-Key" = Option<String>, Header), ("Groupcast-Reason" = Option<String>, Header),
        ), request_body(content((Object = "application/json"), (String = "application/yaml"))), responses(
            (status = 200, body = WriteResult, headers(("ETag" = String))), (status = 201, body = WriteResult, headers(("ETag" = String))), Writing,
        ))]
        pub async fn $put(
            State(app): State<App>,
            caller: Caller,
            Named(id): Named,
            headers: HeaderMap,
            body: Body,
        ) -> Result<Response, Problem> {
            put(&app, &caller, name($kind, &id)?, &headers, body).await
        }

        /// Deletes one.
        #[utoipa::path(delete, path = $one, tag = $tag, security(("token" = [])), params(
            ("id" = String, Path), ("If-Match" = Option<String>, Header), ("Idempotency-Key" = Option<String>, Header),
            ("Groupcast-Reason" = Option<String>, Header),
        ), responses((status = 200, body = WriteResult), Writing))]
        pub async fn $delete(
            State(app): State<App>,
            caller: Caller,
            Named(id): Named,
            headers: HeaderMap,
        ) -> Result<Json<WriteResult>, Problem> {
            delete(&app, &caller, name($kind, &id)?, &headers).await
        }
    };
}

kind!(CatalogKind::Group, "groups", "/v1/groups", "/v1/groups/{id}", list_groups, get_group, put_group, delete_group);
kind!(
    CatalogKind::Template,
    "templates",
    "/v1/templates",
    "/v1/templates/{id}",
    list_templates,
    get_template,
    put_template,
    delete_template
);
