//! Changes: many documents at once, plans, how far they are, and back again.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::change::{Body as DocumentBody, Change, Expected, Write};
use groupcast_control::document::Name;
use groupcast_policy::model::Event;
use groupcast_policy::written::{Fault, Node, PROBLEMS_MAX, Problem as Wrong};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};

use super::access::{self, Caller};
use super::body::{self, Named, Queried};
use super::{App, FORMAT_VERSION, Listed, Page, documents};
use crate::basis::Basis;
use crate::confirm;
use crate::host_bits;
use crate::local::Changed;
use crate::plan::{self, Plan};
use crate::problem::{Item, Problem, Reading, ReadingOne, Writing};
use crate::progress::{Known, Progress, Until};
use crate::submit::{Asked, Done, submit};

/// Longest time one request may wait for a change.
pub const WAIT_MAX: Duration = Duration::from_secs(300);
const WAIT_DEFAULT: Duration = Duration::from_secs(30);
/// Warnings about prefixes that one answer holds.
const WARNINGS_MAX: usize = 100;

/// A document to write.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Put {
    /// With its `kind`.
    #[schema(value_type = Object)]
    pub document: Node,
    /// Only over this revision; 0: only where there is none; without it over whatever there is.
    pub revision: Option<u64>,
}

/// A document to delete.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Delete {
    /// `group` or `template`.
    pub kind: String,
    pub id: String,
    /// Only this revision.
    pub revision: Option<u64>,
}

/// Documents that become effective together or not at all.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeRequest {
    /// Why; it is kept with the change.
    #[serde(default)]
    pub reason: String,
    /// Only say what it would mean.
    #[serde(default)]
    pub dry_run: bool,
    /// The plan this was decided on; refused if it would mean something else now.
    pub plan: Option<String>,
    /// Takes itself back unless `/v1/changes/{number}/confirm` is called within this time, such as `60s`; at most an hour.
    pub confirm: Option<String>,
    #[serde(default)]
    pub put: Vec<Put>,
    #[serde(default)]
    pub delete: Vec<Delete>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WrittenDocument {
    pub kind: String,
    pub id: String,
    /// Of the version that was written.
    pub revision: u64,
    pub deleted: bool,
}

/// A change that the bus has accepted for good.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AcceptedChange {
    pub format_version: String,
    pub change: u64,
    pub documents: Vec<WrittenDocument>,
    /// It had been written before, under the same Idempotency-Key.
    pub repeated: bool,
    /// It was so already: nothing was written.
    pub unchanged: bool,
    /// Allowed, but most probably not meant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Item>,
}

/// A change and how far it is.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ShownChange {
    pub format_version: String,
    pub change: u64,
    pub changed_by: String,
    pub changed_at: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Up to 100 of them.
    pub documents: Vec<WrittenDocument>,
    pub documents_total: usize,
    /// Nothing when no controller knows: it is not published yet, or was published too long ago, or before another began to lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

impl ShownChange {
    pub fn new(changed: &Changed, progress: Option<Progress>) -> Self {
        let document = |d: &crate::local::ChangeDocument| written(&d.name, d.revision, d.deleted);
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            change: changed.number,
            changed_by: changed.author.clone(),
            changed_at: humantime::format_rfc3339_millis(changed.at).to_string(),
            reason: changed.reason.clone(),
            documents: changed.documents.iter().map(document).collect(),
            documents_total: changed.documents_total,
            progress,
        }
    }
}

fn written(name: &Name, revision: u64, deleted: bool) -> WrittenDocument {
    WrittenDocument { kind: name.kind.as_str().to_owned(), id: name.id().to_owned(), revision, deleted }
}

/// The writes that a request asks for; all that is wrong with it at once.
fn writes(request: &ChangeRequest) -> Result<Vec<Write>, Problem> {
    let (mut all, mut wrong) = (Vec::new(), Vec::new());
    for (index, put) in request.put.iter().enumerate() {
        let expected = match put.revision {
            None => Expected::Any,
            Some(0) => Expected::Absent,
            Some(revision) => Expected::Revision(revision),
        };
        match documents::parse(&put.document, index) {
            Ok(document) => all.push(Write::put(document, expected)),
            Err(problems) => wrong.extend(problems),
        }
        if wrong.len() >= PROBLEMS_MAX {
            break;
        }
    }
    for (index, delete) in request.delete.iter().enumerate() {
        let mut problem = |field: &str, message: String| {
            let document = format!("delete at index {index}");
            wrong.push(Wrong { fault: Fault::Invalid, document, rule: None, field: field.into(), message });
        };
        let kind = match delete.kind.as_str() {
            "group" => CatalogKind::Group,
            "template" => CatalogKind::Template,
            _ => {
                problem("kind", "write group or template".into());
                continue;
            }
        };
        match Name::new(kind, &delete.id) {
            Ok(name) => all.push(Write::delete(name, delete.revision.map_or(Expected::Any, Expected::Revision))),
            Err(error) => problem("id", error.to_string()),
        }
    }
    if wrong.is_empty() { Ok(all) } else { Err(Problem::of_documents(wrong)) }
}

/// Writes many documents as one change, or says what that would mean (`dry_run`).
#[utoipa::path(post, path = "/v1/changes", tag = "changes", security(("token" = [])),
    params(("Idempotency-Key" = Option<String>, Header)), request_body = ChangeRequest, responses(
    (status = 200, description = "The plan, if it is a dry run; else the change, which had been written before or changed nothing",
        content((Plan = "application/json"), (AcceptedChange = "application/json"))),
    (status = 201, body = AcceptedChange), Writing,
))]
pub async fn post_change(State(app): State<App>, caller: Caller, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let key = body::key(&headers)?;
    // Who may only read sends nothing but a dry run.
    let max = if caller.principal.may_write().is_ok() { body::LARGE_BYTES_MAX } else { body::PLANNED_BYTES_MAX };
    let (bytes, _place) = body::large(&app, &caller, body, &headers, max).await?;
    let (request, mut writes) = body::aside(bytes.len(), || {
        let request: ChangeRequest = body::json(&bytes)?;
        if !request.dry_run {
            caller.principal.may_write()?;
        }
        let writes = writes(&request)?;
        Ok::<_, Problem>((request, writes))
    })?;
    drop(bytes);
    let dropped = request.put.iter().flat_map(|put| host_bits::warnings(&put.document)).take(WARNINGS_MAX).collect::<Vec<_>>();
    if request.dry_run {
        let mut plan = planned(&app, &caller, writes).await?;
        plan.warnings.extend(dropped);
        return Ok(Json(plan).into_response());
    }
    if let Some(within) = &request.confirm {
        writes.push(confirm::write(within, &caller.principal, key.as_deref(), &writes)?);
    }
    let asked = Asked { reason: request.reason, key, writes, plan: request.plan, undo: false };
    let (status, Json(mut accepted)) = accepted(&app, &caller, asked).await?;
    accepted.warnings.extend(dropped);
    Ok((status, Json(accepted)).into_response())
}

/// On a thread of its own, over one moment of the state: nobody waits for it but who asked.
async fn planned(app: &App, caller: &Caller, writes: Vec<Write>) -> Result<Plan, Problem> {
    let followed = app.followed.clone();
    let compute = move |goes_on: &dyn Fn() -> bool| {
        Change { writes: writes.clone(), ..Change::default() }.encode()?;
        let basis = Basis::of(&followed.local(), &writes);
        let events: Vec<Event> = writes.iter().filter_map(Write::event).collect();
        let wrong = groupcast_policy::check::change(&basis.world, &events);
        if wrong.is_empty() { Ok(plan::plan(&basis, &writes, goes_on)?) } else { Err(Problem::of_documents(wrong)) }
    };
    app.heavy.run(caller, compute).await
}

async fn accepted(app: &App, caller: &Caller, asked: Asked) -> Result<(StatusCode, Json<AcceptedChange>), Problem> {
    let names: Vec<(Name, bool)> =
        asked.writes.iter().map(|write| (write.name.clone(), write.body == DocumentBody::Delete)).collect();
    let done = submit(app, caller, asked).await?;
    let Done { change, revisions, repeated, unchanged, warnings } = done;
    let documents = names
        .iter()
        .zip(revisions)
        .filter(|((name, _), _)| name.kind != CatalogKind::Confirm)
        .map(|((name, deleted), revision)| written(name, revision, *deleted));
    let documents = documents.collect();
    let status = if repeated || unchanged { StatusCode::OK } else { StatusCode::CREATED };
    let format_version = FORMAT_VERSION.to_owned();
    Ok((status, Json(AcceptedChange { format_version, change, documents, repeated, unchanged, warnings })))
}

/// The latest changes.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Before {
    /// How many, at most 1000; 100 if not said.
    #[param(maximum = 1000, minimum = 1)]
    pub limit: Option<usize>,
    /// Those before this number: what `next` of the page before says.
    pub before: Option<u64>,
}

/// Lists the latest changes, newest first.
#[utoipa::path(get, path = "/v1/changes", tag = "changes", security(("token" = [])), params(Before), responses(
    (status = 200, body = Listed<ShownChange>), Reading,
))]
pub async fn list_changes(
    State(app): State<App>,
    _: Caller,
    Queried(query): Queried<Before>,
) -> Result<Json<Listed<ShownChange>>, Problem> {
    let limit = Page { limit: query.limit, ..Page::default() }.limit()?;
    let local = app.followed.local();
    let before = query.before.unwrap_or(u64::MAX);
    let mut rest = local.changes().rev().filter(|changed| changed.number < before);
    let items: Vec<ShownChange> = rest.by_ref().take(limit).map(|changed| ShownChange::new(changed, None)).collect();
    let next = rest.next().and(items.last()).map(|last| last.change.to_string());
    Ok(Json(Listed::new((items, next))))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Wait {
    /// `published` or `enforced`: answers once it is, or when the time is up.
    pub wait: Option<String>,
    /// Such as `30s`; at most 5 minutes.
    pub timeout: Option<String>,
}

impl Wait {
    fn parse(&self) -> Result<Option<(Until, Instant)>, Problem> {
        let timeout = match &self.timeout {
            None => WAIT_DEFAULT,
            Some(text) => humantime::parse_duration(text)
                .map_err(|error| Problem::bad_request(format!("timeout: {error}: write 30s or 500ms")))?,
        };
        let until = match self.wait.as_deref() {
            None => return Ok(None),
            Some("published") => Until::Published,
            Some("enforced") => Until::Enforced,
            Some(_) => return Err(Problem::bad_request("wait is published or enforced")),
        };
        Ok(Some((until, Instant::now() + timeout.min(WAIT_MAX))))
    }
}

/// A change and how far it is; `wait` holds the answer back until it is published or enforced on every host it concerns.
#[utoipa::path(get, path = "/v1/changes/{number}", tag = "changes", security(("token" = [])),
    params(("number" = u64, Path), Wait), responses((status = 200, body = ShownChange), ReadingOne))]
pub async fn get_change(
    State(app): State<App>,
    caller: Caller,
    Named(number): Named,
    Queried(wait): Queried<Wait>,
) -> Result<Json<ShownChange>, Problem> {
    let number = parse_number(&number)?;
    let wait = wait.parse()?;
    let changed = find(&app, number).await?;
    let known = match wait {
        None => app.progress.ask(number).await,
        Some((until, deadline)) => {
            let _place = app.waiters.take(&caller.principal.id, caller.from).map_err(|full| full.problem("waits"))?;
            tokio::select! {
                known = app.progress.wait(number, until, deadline) => known,
                () = caller.no_longer_good(app.clone()) => return Err(access::not_good()),
            }
        }
    };
    let progress = match known {
        Known::Progress(progress) => Some(progress),
        Known::NoController if wait.is_some() => {
            return Err(Problem::unavailable("no controller runs, so nothing is published: start `groupcast controller`"));
        }
        Known::NoController | Known::Nothing => None,
    };
    Ok(Json(ShownChange { progress, ..changed }))
}

fn parse_number(text: &str) -> Result<u64, Problem> {
    match text.parse().map_err(|_| Problem::bad_request("a change is called by its number"))? {
        0 => Err(Problem::not_found("there is no change 0: they count from 1")),
        number => Ok(number),
    }
}

/// From memory, or from the stream if it is older than that.
async fn find(app: &App, number: u64) -> Result<ShownChange, Problem> {
    if let Some(changed) = app.followed.local().change(number) {
        return Ok(ShownChange::new(changed, None));
    }
    let versions = app.catalog.change(number).await?;
    let unknown = || Problem::not_found(format!("change {number} is not known"));
    let first = versions.first().ok_or_else(unknown)?;
    let changed = Changed {
        number,
        at: first.at,
        author: first.author.clone(),
        reason: first.reason.clone(),
        documents_total: versions.len(),
        documents: versions
            .iter()
            .take(crate::local::CHANGE_NAMES_MAX)
            .map(|version| crate::local::ChangeDocument {
                name: version.name.clone(),
                revision: version.revision,
                deleted: matches!(version.document, Ok(None)),
            })
            .collect(),
    };
    Ok(ShownChange::new(&changed, None))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UndoRequest {
    /// Why; without it, that it is an undo.
    #[serde(default)]
    pub reason: String,
}

/// Writes a new change that restores what this one replaced. Refused if something newer would be undone with it.
#[utoipa::path(post, path = "/v1/changes/{number}/undo", tag = "changes", security(("token" = [])),
    params(("number" = u64, Path), ("Idempotency-Key" = Option<String>, Header)),
    request_body = Option<UndoRequest>, responses(
    (status = 200, body = AcceptedChange), (status = 201, body = AcceptedChange), Writing,
))]
pub async fn undo_change(
    State(app): State<App>,
    caller: Caller,
    Named(number): Named,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let number = parse_number(&number)?;
    caller.principal.may_write()?;
    let key = body::key(&headers)?;
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let request: UndoRequest = if bytes.is_empty() { UndoRequest::default() } else { body::json(&bytes)? };
    let Change { reason, mut writes, .. } = app.catalog.undo(number, "", &request.reason).await?;
    confirm::never_restored(&app.followed.local(), &mut writes);
    let known = [CatalogKind::Group, CatalogKind::Template, CatalogKind::Confirm];
    if let Some(write) = writes.iter().find(|write| !known.contains(&write.name.kind)) {
        return Err(Problem::conflict(format!("change {number} wrote {}, which cannot be undone here", write.name)));
    }
    let writes = restored(&app, writes).await?;
    let asked = Asked { reason, key, writes, plan: None, undo: true };
    Ok(accepted(&app, &caller, asked).await?.into_response())
}

/// What the change deleted is expected to be deleted still, by that very deletion.
async fn restored(app: &App, mut writes: Vec<Write>) -> Result<Vec<Write>, Problem> {
    for write in &mut writes {
        let Expected::Revision(revision) = write.expected else { continue };
        if app.followed.local().kept(&write.name).is_some() {
            continue;
        }
        let now = app.catalog.read(&write.name).await?;
        if now.is_some_and(|now| now.revision == revision && matches!(now.document, Ok(None))) {
            write.expected = Expected::Absent;
        }
    }
    Ok(writes)
}

/// A change that was confirmed.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Confirmed {
    pub format_version: String,
    pub change: u64,
}

/// Keeps a change that was written with `confirm`.
#[utoipa::path(post, path = "/v1/changes/{number}/confirm", tag = "changes", security(("token" = [])), params(("number" = u64, Path)),
    responses((status = 200, body = Confirmed), Writing))]
pub async fn confirm_change(State(app): State<App>, caller: Caller, Named(number): Named) -> Result<Json<Confirmed>, Problem> {
    let change = parse_number(&number)?;
    caller.principal.may_write()?;
    confirm::confirm(&app, &caller, change).await?;
    Ok(Json(Confirmed { format_version: FORMAT_VERSION.to_owned(), change }))
}
