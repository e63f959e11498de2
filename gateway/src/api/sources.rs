//! Sources: where groups come from besides gateways. The controller that leads polls them, and is asked.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use groupcast_control::begin::ADVICE;
use groupcast_control::source::ask::{Ask, Told};
use groupcast_control::source::service;
use groupcast_control::source::status::Status;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::access::Caller;
use super::body::{Named, Queried};
use super::{App, FORMAT_VERSION, Listed, Page};
use crate::problem::{Problem, Reading, ReadingOne, Writing};
use crate::token::Role;

/// How long the controller that leads has to say what it knows.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a poll may take.
const POLL_TIMEOUT: Duration = Duration::from_secs(120);

/// Deletions that wait for a later poll, or for `/confirm`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct HeldBack {
    pub deletions: usize,
    /// Up to 20 of them.
    pub named: Vec<String>,
    pub since: String,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LastError {
    pub at: String,
    pub message: String,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ShownSource {
    pub format_version: String,
    pub id: String,
    /// `cloud-controller`, `neutron` or `directory`.
    pub kind: String,
    /// `good`, `malformed` (all of it is read except for items that cannot be), `failing`, `held` or `waiting` (for its first poll).
    pub state: String,
    pub polling: bool,
    pub last_success: Option<String>,
    /// Since the last successful poll began: how old what is known may be.
    pub lag_seconds: Option<f64>,
    pub poll_interval_seconds: f64,
    pub last_error: Option<LastError>,
    /// Polls that failed since the last that did not.
    pub failures: u32,
    pub groups: usize,
    pub workloads: usize,
    pub held_back: Option<HeldBack>,
    /// Items that cannot be read; their last good versions are in force.
    pub malformed: usize,
    /// Up to 100 of them, and what is wrong.
    pub malformed_items: Vec<String>,
    /// One of them does not say which it is: nothing is deleted until it is mended.
    #[serde(default)]
    pub deletions_stopped: bool,
    /// What it says and is not done because of what others say: deletions of groups that denies name, workloads whose address
    /// somebody else holds.
    #[serde(default)]
    pub withheld: usize,
    /// Up to 100 of them, and why.
    #[serde(default)]
    pub withheld_items: Vec<String>,
    pub polls: u64,
    pub full_syncs: u64,
    pub last_change: Option<u64>,
}

fn ago(ms: u64) -> String {
    let at = SystemTime::now().checked_sub(Duration::from_millis(ms)).unwrap_or(SystemTime::UNIX_EPOCH);
    humantime::format_rfc3339_seconds(at).to_string()
}

impl From<Status> for ShownSource {
    fn from(status: Status) -> Self {
        let state = match &status {
            Status { held: Some(_), .. } => "held",
            Status { failures: 1.., .. } => "failing",
            Status { last_success_ms_ago: None, .. } => "waiting",
            Status { malformed: 1.., .. } => "malformed",
            _ => "good",
        };
        let held = |held: groupcast_control::source::status::HeldBack| HeldBack {
            deletions: held.deletions,
            named: held.named,
            since: ago(held.ms_ago),
        };
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            state: state.to_owned(),
            id: status.id,
            kind: status.kind,
            polling: status.polling,
            last_success: status.last_success_ms_ago.map(ago),
            lag_seconds: status.lag_ms.map(|ms| ms as f64 / 1e3),
            poll_interval_seconds: status.poll_interval_ms as f64 / 1e3,
            last_error: status.last_error.map(|error| LastError { at: ago(error.ms_ago), message: error.message }),
            failures: status.failures,
            groups: status.groups,
            workloads: status.workloads,
            held_back: status.held.map(held),
            malformed: status.malformed,
            malformed_items: status.malformed_named,
            deletions_stopped: status.deletions_stopped,
            withheld: status.withheld,
            withheld_items: status.withheld_named,
            polls: status.polls,
            full_syncs: status.full_syncs,
            last_change: status.last_change,
        }
    }
}

/// A source that was read, and what it says compiled and published.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct PolledSource {
    pub format_version: String,
    pub id: String,
    /// How far CATALOG and REGISTRY are written with it: the number of its last change, if it ever made one.
    pub catalog: u64,
    pub registry: u64,
}

async fn asked(app: &App, ask: Ask, within: Duration) -> Result<Told, Problem> {
    let answer = service::ask(&app.client, &ask, within).await;
    answer.map_err(|error| Problem::unavailable(if app.followed.local().is_begun() { error } else { ADVICE.to_owned() }))
}

pub async fn all(app: &App) -> Result<Vec<ShownSource>, Problem> {
    match asked(app, Ask::List, LOOK_TIMEOUT).await? {
        Told::List { sources, .. } => Ok(sources.into_iter().map(ShownSource::from).collect()),
        _ => Err(Problem::unavailable("the controller that leads does not know sources: is it of this version?")),
    }
}

/// Lists sources in the order of their ids, and how they are.
#[utoipa::path(get, path = "/v1/sources", tag = "reading", security(("token" = [])), params(Page), responses(
    (status = 200, body = Listed<ShownSource>), Reading,
))]
pub async fn list_sources(
    State(app): State<App>,
    _: Caller,
    Queried(page): Queried<Page>,
) -> Result<Json<Listed<ShownSource>>, Problem> {
    let mut sources = all(&app).await?;
    sources.sort_by(|a, b| a.id.cmp(&b.id));
    let whole = |source: &ShownSource| serde_json::from_value(serde_json::to_value(source).unwrap_or_default()).ok();
    let (items, next) = page.cut(sources.iter(), |source| source.id.as_str(), whole)?;
    Ok(Json(Listed::new((items.into_iter().flatten().collect(), next))))
}

/// Reads one source.
#[utoipa::path(get, path = "/v1/sources/{id}", tag = "reading", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = ShownSource), ReadingOne))]
pub async fn get_source(State(app): State<App>, _: Caller, Named(id): Named) -> Result<Json<ShownSource>, Problem> {
    all(&app).await?.into_iter().find(|source| source.id == id).map(Json).ok_or_else(|| unknown(&id))
}

fn unknown(id: &str) -> Problem {
    Problem::not_found(format!("source {id} is not configured: controllers read [[source]] in groupcast.toml"))
}

/// How a source is to be read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PollQuery {
    /// All of it, whatever it says about changes; `false` asks for what is new, and leaves a source alone that fails.
    #[serde(default = "yes")]
    #[param(default = true)]
    full: bool,
}

const fn yes() -> bool {
    true
}

/// Reads a source now; answered when what it says is compiled and published.
#[utoipa::path(post, path = "/v1/sources/{id}/poll", tag = "changes", security(("token" = [])),
    params(("id" = String, Path), PollQuery), responses((status = 200, body = PolledSource), Writing))]
pub async fn poll_source(
    State(app): State<App>,
    caller: Caller,
    Named(id): Named,
    Queried(PollQuery { full }): Queried<PollQuery>,
) -> Result<Json<PolledSource>, Problem> {
    polled(&app, &caller, &id, Ask::Poll { id: id.clone(), full }).await
}

/// Says that the deletions that were held back are meant: the source is read again, and what it says counts.
#[utoipa::path(post, path = "/v1/sources/{id}/confirm", tag = "changes", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = PolledSource), Writing))]
pub async fn confirm_source(State(app): State<App>, caller: Caller, Named(id): Named) -> Result<Json<PolledSource>, Problem> {
    polled(&app, &caller, &id, Ask::Confirm { id: id.clone() }).await
}

async fn polled(app: &App, caller: &Caller, id: &str, ask: Ask) -> Result<Json<PolledSource>, Problem> {
    if caller.principal.role < Role::Editor {
        return Err(Problem::forbidden("your token may only read: ask for one with role editor"));
    }
    // What a source says goes beyond any scope.
    if caller.principal.scope.is_some() && matches!(ask, Ask::Confirm { .. }) {
        return Err(Problem::forbidden(
            "your token has a scope, and what is held back may lie outside of it: ask for one without",
        ));
    }
    match asked(app, ask, POLL_TIMEOUT).await? {
        Told::Done { catalog, registry } => {
            Ok(Json(PolledSource { format_version: FORMAT_VERSION.to_owned(), id: id.to_owned(), catalog, registry }))
        }
        Told::Held { deletions } => Err(Problem::conflict(format!(
            "source {id} says that {deletions} of what it owns are gone: held back until you confirm it or, unless nothing is left at all, a later \
             poll agrees"
        ))),
        Told::NothingHeld => Err(Problem::conflict(format!("source {id} has nothing held back: there is nothing to confirm"))),
        Told::Failed { message } => Err(Problem::new(StatusCode::BAD_GATEWAY, "source", format!("source {id}: {message}"))),
        Told::Unknown => Err(unknown(id)),
        Told::List { .. } => Err(Problem::unavailable("an unexpected answer: are controllers and gateways of one version?")),
    }
}
