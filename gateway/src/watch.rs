//! A controller seen from outside: health, metrics, status, and how far changes are.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{ConnectInfo, Path, Query, Request, State as Extract};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::Stream;
use groupcast_control::begin::ADVICE;
use groupcast_control::controller::Controller;
use groupcast_control::progress::Progress;
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tokio::sync::broadcast::error::RecvError;
use tokio_rustls::TlsAcceptor;

use crate::checks::{BUS_WITHIN, BusLook};
use crate::doors::{Doors, Proxies};
use crate::server::{self, Most};
use crate::shares::{Limits, Share, Shares};

/// Longest time one request may wait for a change to be enforced.
pub const WAIT_MAX: Duration = Duration::from_secs(300);
/// How often a change that is waited for is looked at, besides when it moves.
const LOOK_EVERY: Duration = Duration::from_millis(200);

const METRICS: &str = "/metrics";

#[derive(Clone)]
pub struct State {
    metrics: PrometheusHandle,
    controller: Arc<OnceLock<Arc<Controller>>>,
    waiters: Arc<Shares>,
    bus: Arc<BusLook>,
}

impl State {
    pub fn new(metrics: PrometheusHandle) -> Self {
        Self { metrics, controller: Arc::default(), waiters: Shares::new(WAITERS), bus: Arc::default() }
    }

    pub fn started(&self, controller: Arc<Controller>) {
        // Started once.
        let _ = self.controller.set(controller);
    }

    fn place(&self, peer: SocketAddr) -> Result<Share, Problem> {
        let full = |_| problem(StatusCode::SERVICE_UNAVAILABLE, "too many wait or watch here already: try again");
        self.waiters.take("", peer.ip()).map_err(full)
    }

    fn controller(&self) -> Result<&Arc<Controller>, Problem> {
        self.controller.get().ok_or_else(|| problem(StatusCode::SERVICE_UNAVAILABLE, "the bus cannot be reached yet"))
    }
}

/// Connections at once, and of one address: this is for a scraper, a probe and an operator.
const CONNECTIONS_MAX: usize = 128;
const ADDRESS_CONNECTIONS_MAX: usize = 64;
/// Requests that wait or watch at once, and from one address.
pub const WAITERS: Limits = Limits { total: 64, token: 64, address: 32 };

/// Who is shown more than whether the controller is well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Whoever can reach it: it is on this machine.
    Everything,
    /// Whoever can reach it is shown metrics, as by a gateway, and nothing else.
    Metrics,
    /// Who shows this token.
    Token(String),
}

/// Serves for as long as the process lives.
pub async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, state: State, access: Access) {
    let loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let doors = Arc::new(Doors { loopback, names: Vec::new() });
    let guarded = Router::new()
        .route(METRICS, get(metrics))
        .route("/v1/status", get(status))
        .route("/v1/changes/{number}", get(change))
        .route("/v1/watch", get(watch))
        .layer(axum::middleware::from_fn_with_state(Arc::new(access), may_see));
    let router = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .merge(guarded)
        .layer(axum::middleware::from_fn_with_state(doors, crate::doors::through))
        .with_state(state);
    let most = Most { connections: CONNECTIONS_MAX, of_address: ADDRESS_CONNECTIONS_MAX, proxies: Proxies::default() };
    let (_end, never) = tokio::sync::watch::channel(false);
    server::serve_at_most(most, listener, tls, router, never).await;
}

async fn may_see(Extract(access): Extract<Arc<Access>>, request: Request, next: Next) -> Response {
    let token = match &*access {
        Access::Everything => return next.run(request).await,
        Access::Metrics if request.uri().path() == METRICS => return next.run(request).await,
        Access::Metrics => {
            let words = "hosts and changes are shown to who shows a token: set the controller's token_file, or ask a gateway";
            return problem(StatusCode::FORBIDDEN, words).into_response();
        }
        Access::Token(token) => token,
    };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|text| text.strip_prefix("Bearer ")).unwrap_or_default();
    // Hashes are equally long, so the comparison says nothing about the token.
    let (given, known) = (Sha256::digest(given), Sha256::digest(token));
    if bool::from(given.as_slice().ct_eq(known.as_slice())) {
        return next.run(request).await;
    }
    problem(StatusCode::UNAUTHORIZED, "send what the controller's token_file holds: `Authorization: Bearer …`").into_response()
}

/// What is wrong, answered as RFC 9457 has it.
struct Problem {
    status: StatusCode,
    detail: String,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, detail } = self;
        let body = json!({ "title": status.canonical_reason(), "status": status.as_u16(), "detail": detail });
        (status, [("content-type", "application/problem+json")], body.to_string()).into_response()
    }
}

fn problem(status: StatusCode, detail: &str) -> Problem {
    Problem { status, detail: detail.to_owned() }
}

fn failed(error: impl std::fmt::Display) -> Problem {
    problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())
}

const DEAF: &str =
    "hosts are not heard: the connection for what they send does not come back. Does the server take more connections?";

/// The process works, whatever the bus does.
async fn livez(Extract(state): Extract<State>) -> Response {
    match state.controller.get() {
        None => "starting\n".into_response(),
        Some(controller) => match controller.alive().await {
            Ok(()) => "ok\n".into_response(),
            Err(error) => failed(error).into_response(),
        },
    }
}

/// It can serve hosts and lead, the bus takes writes, and somebody does lead.
async fn readyz(Extract(state): Extract<State>) -> Result<Response, Problem> {
    let controller = state.controller()?;
    let bus = state.bus.at(controller.bus_takes_writes(BUS_WITHIN)).await;
    bus.map_err(|error| problem(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()))?;
    let status = controller.status().await.map_err(failed)?;
    Ok(match status.is_ready() {
        true => match status.vacancy() {
            None => "ok\n".into_response(),
            Some(vacancy) => problem(StatusCode::SERVICE_UNAVAILABLE, &vacancy.to_string()).into_response(),
        },
        false if status.deaf => problem(StatusCode::SERVICE_UNAVAILABLE, DEAF).into_response(),
        false => {
            let words = match (&status.lost, status.compiler.loaded) {
                (_, false) => "still reading CATALOG and REGISTRY".to_owned(),
                (Some(lost), true) => lost.clone(),
                (None, true) => "still reading what is published".to_owned(),
            };
            problem(StatusCode::SERVICE_UNAVAILABLE, &words).into_response()
        }
    })
}

async fn metrics(Extract(state): Extract<State>) -> Response {
    // Gauges that are only known when asked for.
    if let Some(controller) = state.controller.get() {
        let _ = controller.status().await;
    }
    state.metrics.run_upkeep();
    ([("content-type", "text/plain; version=0.0.4")], state.metrics.render()).into_response()
}

async fn status(Extract(state): Extract<State>) -> Result<Json<Value>, Problem> {
    let status = state.controller()?.status().await.map_err(failed)?;
    let refused = status.compiler.refused.iter().map(|r| json!({ "document": r.name, "why": r.why })).collect::<Vec<_>>();
    Ok(Json(json!({
        "ready": status.is_ready(),
        "deaf": status.deaf.then_some(DEAF),
        "lost": status.lost,
        "leading": status.compiler.leading,
        "publishing": status.compiler.publishing,
        "blank": status.compiler.blank,
        "advice": (status.compiler.loaded && status.compiler.blank).then_some(ADVICE),
        "term": status.node.term,
        "lead": status.node.lead,
        "leader": status.node.leader.as_ref().map(|(name, led)| json!({ "name": name, "led_ms": led.as_millis() as u64 })),
        "nobody_leads": status.vacancy().map(ToString::to_string),
        "catalog": status.compiler.catalog,
        "registry": status.compiler.registry,
        "change": status.compiler.change,
        "waiting_changes": status.compiler.waiting_changes,
        "in_flight": status.compiler.in_flight,
        "topics_compiled": status.compiler.topics,
        "topics_published": status.node.topics,
        "hosts": status.compiler.hosts,
        "hosts_behind": status.convergence.behind,
        "changes_unfinished": status.convergence.unfinished,
        "registrations": {
            "acts": status.liveness.acts,
            "hosts": status.liveness.hosts,
            "suspects": status.liveness.suspects,
            "frozen": status.liveness.frozen,
        },
        "refused_count": status.compiler.refused_count,
        "refused": refused,
    })))
}

fn shown(progress: &Progress) -> Value {
    let behind =
        progress.behind.iter().map(|(host, why)| json!({ "host": host.as_str(), "why": why.name(), "reason": why.reason() }));
    let summary = &progress.summary;
    json!({
        "change": progress.change,
        "term": progress.cut.term,
        "span": progress.span,
        "enforced": progress.enforced(),
        "done": progress.is_done(),
        "torn": progress.torn,
        "first_ms": summary.first_ms,
        "p50_ms": summary.p50_ms,
        "p99_ms": summary.p99_ms,
        "last_ms": summary.last_ms,
        "behind": behind.collect::<Vec<_>>(),
    })
}

#[derive(Deserialize)]
struct Wait {
    /// `published` or `enforced`.
    wait: Option<String>,
    timeout: Option<String>,
    /// Also names the hosts it concerns.
    #[serde(default)]
    span: bool,
}

async fn change(
    Extract(state): Extract<State>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(number): Path<u64>,
    Query(wait): Query<Wait>,
) -> Result<Json<Value>, Problem> {
    let controller = state.controller()?;
    let _place = state.place(peer)?;
    let timeout = match &wait.timeout {
        None => Duration::from_secs(30),
        Some(text) => humantime::parse_duration(text).map_err(|error| problem(StatusCode::BAD_REQUEST, &error.to_string()))?,
    };
    let deadline = tokio::time::Instant::now() + timeout.min(WAIT_MAX);
    let until_done = match wait.wait.as_deref() {
        None => None,
        Some("published") => Some(false),
        Some("enforced") => Some(true),
        Some(_) => return Err(problem(StatusCode::BAD_REQUEST, "wait is published or enforced")),
    };
    let mut moves = controller.watch().await.map_err(failed)?;
    loop {
        let progress = controller.progress(number).await.map_err(failed)?;
        let enough = match (&progress, until_done) {
            (_, None) => true,
            (Some(progress), Some(done)) => !done || progress.is_done(),
            (None, Some(_)) => false,
        };
        let late = tokio::time::Instant::now() >= deadline;
        match progress {
            Some(progress) if enough || late => {
                let mut shown = shown(&progress);
                if wait.span {
                    let span = controller.span(number).await.map_err(failed)?.unwrap_or_default();
                    shown["hosts"] = span.iter().map(|host| host.as_str()).collect();
                }
                return Ok(Json(shown));
            }
            None if enough || late => {
                let detail = "it is not published yet, or this controller did not follow when it was, or has forgotten it";
                return Err(problem(StatusCode::NOT_FOUND, detail));
            }
            _ => {}
        }
        let look = tokio::time::sleep(LOOK_EVERY);
        tokio::select! {
            _ = look => {}
            _ = tokio::time::sleep_until(deadline) => {}
            moved = moves.recv() => {
                if matches!(moved, Err(RecvError::Closed)) {
                    return Err(problem(StatusCode::SERVICE_UNAVAILABLE, "the controller ends"));
                }
            }
        }
    }
}

/// The progress of every change that moves, as server-sent events. Who reads too slowly is told how many were left out.
async fn watch(
    Extract(state): Extract<State>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let place = state.place(peer)?;
    let moves = state.controller()?.watch().await.map_err(failed)?;
    let events = futures::stream::unfold((moves, place), |(mut moves, place)| async move {
        let event = match moves.recv().await {
            Ok(progress) => Event::default().event("progress").data(shown(&progress).to_string()),
            Err(RecvError::Lagged(missed)) => Event::default().event("missed").data(missed.to_string()),
            Err(RecvError::Closed) => return None,
        };
        Some((Ok(event), (moves, place)))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}
