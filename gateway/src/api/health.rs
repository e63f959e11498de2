//! For machines: health, metrics, the description of the API.

use std::time::{Instant, SystemTime};

use axum::Json;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::Caller;
use super::{App, FORMAT_VERSION};
use crate::checks::{Finding, Grade, LEADER, LOOKED_WITHIN, TOLD_WITHIN};
use crate::problem::{Problem, Reading};
use crate::progress::Known;

/// The method, if it is one that any route takes: whoever invents methods must not make us remember them.
fn method_label(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "PUT" => "PUT",
        "POST" => "POST",
        "DELETE" => "DELETE",
        _ => "other",
    }
}

/// Counts and times every request by its route.
pub async fn measured(request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("none", |path| path.as_str()).to_owned();
    let method = method_label(request.method());
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    metrics::counter!("groupcast_http_requests_total", "method" => method, "route" => route.clone(), "status" => status)
        .increment(1);
    metrics::histogram!("groupcast_http_seconds", "method" => method, "route" => route).record(begun.elapsed().as_secs_f64());
    response
}

/// The process works, whatever the bus does.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn livez() -> &'static str {
    "ok\n"
}

/// It has read everything, the bus takes writes, and it can serve. Whatever else needs attention is said in the answer, which is `ok` only
/// when everything that is looked at is good.
#[utoipa::path(get, path = "/readyz", tag = "health", responses(
    (status = 200, body = String, content_type = "text/plain"),
    (status = 503, body = Problem, content_type = "application/problem+json"),
))]
pub async fn readyz(State(app): State<App>) -> Result<String, Problem> {
    app.checks.bus(&app).await.map_err(|error| Problem::unavailable(error.to_string()))?;
    app.loaded()?;
    if let Some(lost) = app.followed.lost() {
        return Err(Problem::unavailable(format!("{lost}; what is read here may be old")));
    }
    let findings = app.checks.all(&app, LOOKED_WITHIN).await;
    Ok(attention(&findings))
}

/// Who is not known asks for this: what is wrong is said, and of whom is not.
fn attention(findings: &[Finding]) -> String {
    let mut words: Vec<&str> = Vec::new();
    for finding in findings.iter().filter(|finding| finding.grade == Grade::Bad) {
        let word = if finding.what == LEADER { "nobody leads" } else { finding.what.split(' ').next().unwrap_or_default() };
        words.extend(Some(word).filter(|word| !words.contains(word)));
    }
    match words.is_empty() {
        true => "ok\n".to_owned(),
        false => format!("ready, but this needs attention: {}; see `groupcast doctor`\n", words.join(", ")),
    }
}

/// Everything that was looked at.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Found {
    pub format_version: String,
    pub findings: Vec<Finding>,
    /// What time the gateway has.
    pub now: String,
}

/// Looks at what may be wrong: the bus, who leads, hosts, sources, clocks, what expires. Looked at anew at most every five seconds.
#[utoipa::path(get, path = "/v1/checks", tag = "health", security(("token" = [])), responses((status = 200, body = Found), Reading))]
pub async fn checks(State(app): State<App>, _: Caller) -> Json<Found> {
    let findings = app.checks.all(&app, TOLD_WITHIN).await.to_vec();
    let now = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
    Json(Found { format_version: FORMAT_VERSION.to_owned(), findings, now })
}

/// Metrics in the text format of Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn metrics(State(app): State<App>) -> Response {
    let text = app.metrics.as_ref().map(|handle| {
        handle.run_upkeep();
        handle.render()
    });
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text.unwrap_or_default()).into_response()
}

/// This description.
#[utoipa::path(get, path = "/openapi.json", tag = "health", responses((status = 200, body = Object, content_type = "application/json")))]
pub async fn openapi(State(app): State<App>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], app.openapi.clone()).into_response()
}

/// What this gateway has read.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    pub format_version: String,
    pub version: String,
    /// The last sequence read of each stream.
    pub catalog: u64,
    pub registry: u64,
    pub groups: usize,
    pub templates: usize,
    pub workloads: usize,
    pub hosts: usize,
    /// The version of the server it is connected to.
    pub server_version: String,
    /// Whether any controller listens: without one nothing is published.
    pub controller: bool,
    /// Whether something was written by which controllers lead; see `/v1/init`.
    pub begun: bool,
    /// Documents whose last version cannot be read; the one before it counts. Up to 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<String>,
}

/// What this gateway has read, and from where.
#[utoipa::path(get, path = "/v1/status", tag = "health", security(("token" = [])), responses((status = 200, body = Status), Reading))]
pub async fn status(State(app): State<App>, _: Caller) -> Json<Status> {
    let controller = app.progress.ask(0).await != Known::NoController;
    let local = app.followed.local();
    let (catalog, registry) = local.through();
    let world = local.world();
    Json(Status {
        format_version: FORMAT_VERSION.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        catalog,
        registry,
        groups: world.catalogue.groups.len(),
        templates: world.catalogue.templates.len(),
        workloads: world.registry.workloads.len(),
        hosts: local.hosts().len(),
        server_version: app.client.server_info().version,
        controller,
        begun: local.is_begun(),
        refused: local.refused().take(100).map(str::to_owned).collect(),
    })
}
