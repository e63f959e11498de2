//! For machines: health, metrics, the description of the API.

use std::time::Instant;

use axum::Json;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::Caller;
use super::{App, FORMAT_VERSION};
use crate::problem::{Problem, Reading};
use crate::progress::Known;

/// Counts and times every request by its route.
pub async fn measured(request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("none", |path| path.as_str()).to_owned();
    let method = request.method().to_string();
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    metrics::counter!("groupcast_http_requests_total", "method" => method.clone(), "route" => route.clone(), "status" => status)
        .increment(1);
    metrics::histogram!("groupcast_http_seconds", "method" => method, "route" => route).record(begun.elapsed().as_secs_f64());
    response
}

/// The process works, whatever the bus does.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn livez() -> &'static str {
    "ok\n"
}

/// It has read everything and can serve.
#[utoipa::path(get, path = "/readyz", tag = "health", responses(
    (status = 200, body = String, content_type = "text/plain"),
    (status = 503, body = Problem, content_type = "application/problem+json"),
))]
pub async fn readyz(State(app): State<App>) -> Result<&'static str, Problem> {
    app.loaded()?;
    match app.client.connection_state() {
        async_nats::connection::State::Connected => Ok("ok\n"),
        _ => Err(Problem::unavailable("the bus cannot be reached")),
    }
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
