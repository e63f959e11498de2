//! What an operator grants to hosts: where their addresses may lie, and tokens with which they join.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode};
use groupcast_control::catalog::Version;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::registration::grant::{self, Grant, JOIN_SECONDS_MAX, NETWORKS_MAX};
use groupcast_policy::ids::HostId;
use groupcast_policy::text::prefix_text;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::{Administrator, Caller};
use super::body::{self, Named};
use super::{App, FORMAT_VERSION};
use crate::problem::{Item, Problem, Writing};
use crate::submit::{self, READ_BACK_DEADLINE};

/// How long a join token lives unless told otherwise.
const JOIN_LIFE: Duration = Duration::from_secs(600);
/// Attempts to write a grant while others do.
const ATTEMPTS_MAX: usize = 5;

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewGrant {
    /// Where its workloads' addresses must lie.
    pub networks: Vec<String>,
}

/// A host as an operator has granted it.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ShownGrant {
    pub format_version: String,
    pub host: String,
    pub networks: Vec<String>,
    pub change: u64,
}

#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewJoinToken {
    /// How long it lives, such as `10m`, which it is if not said; at most a day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<String>,
}

/// A token with which the host joins once. It is shown here and never again.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct MadeJoinToken {
    pub format_version: String,
    pub host: String,
    pub token: String,
    pub change: u64,
}

/// A host that joins, with the key it has made for itself.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Join {
    pub token: String,
    pub public_key: String,
}

/// The host's token for the bus, which its own key makes a credential.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Joined {
    pub format_version: String,
    pub host: String,
    pub credential: String,
}

/// A host that is granted nothing any more.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct RemovedHost {
    pub format_version: String,
    pub host: String,
    pub change: u64,
    /// Workloads that it had enrolled.
    pub workloads: usize,
    /// The key that joined with a token, to be revoked by whoever holds the authority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined_key: Option<String>,
}

fn host_id(text: &str) -> Result<HostId, Problem> {
    HostId::new(text).map_err(|error| Problem::bad_request(error.to_string()))
}

/// The grant that is there, and its version.
async fn found(app: &App, host: &HostId) -> Result<Option<(Grant, u64)>, Problem> {
    let name = Grant::name(host).map_err(|error| Problem::bad_request(error.to_string()))?;
    match app.catalog.read(&name).await? {
        Some(Version { document: Ok(Some(document)), revision, .. }) => match Grant::read(&document) {
            Ok(grant) => Ok(Some((grant, revision))),
            Err(error) => Err(Problem::conflict(format!("{name} cannot be read: {error}; write it again"))),
        },
        _ => Ok(None),
    }
}

/// Writes what `change` makes of the grant that is there; written again if somebody else was faster.
async fn edit<T>(
    app: &App,
    host: &HostId,
    author: String,
    reason: String,
    change: impl Fn(Option<Grant>) -> Result<(Option<Grant>, T), Problem>,
) -> Result<(u64, T), Problem> {
    let mut last = None;
    for _ in 0..ATTEMPTS_MAX {
        let there = found(app, host).await?;
        let expected = there.as_ref().map_or(Expected::Absent, |(_, revision)| Expected::Revision(*revision));
        let before = there.map(|(grant, _)| grant);
        let (after, outcome) = change(before.clone())?;
        if after == before
            && let Expected::Revision(revision) = expected
        {
            return Ok((revision, outcome));
        }
        let wrong = |error: groupcast_policy::ids::InvalidId| Problem::bad_request(error.to_string());
        let write = match &after {
            Some(grant) => Write::put(grant.document().map_err(wrong)?, expected),
            None => Write::delete(Grant::name(host).map_err(wrong)?, expected),
        };
        let change = Change { author: author.clone(), reason: reason.clone(), key: None, writes: vec![write] };
        match app.catalog.write(&change, None).await {
            Ok(accepted) => {
                app.followed.reached(accepted.number, READ_BACK_DEADLINE).await;
                return Ok((accepted.number, outcome));
            }
            Err(error) => last = Some(Problem::from(error)),
        }
    }
    Err(last.unwrap_or_else(|| Problem::unavailable("others write this host all the time: try again")))
}

fn author(caller: &Caller) -> String {
    submit::author(&caller.principal, caller.from)
}

/// Grants a host its networks, or other ones than before. Its join token stays what it is.
#[utoipa::path(put, path = "/v1/hosts/{id}", tag = "administration", security(("token" = [])), params(("id" = String, Path)),
    request_body = NewGrant, responses((status = 200, body = ShownGrant), Writing))]
pub async fn put_host(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Named(id): Named,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ShownGrant>, Problem> {
    let host = host_id(&id)?;
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let NewGrant { networks: written } = body::json(&bytes)?;
    if written.is_empty() || written.len() > NETWORKS_MAX {
        return Err(Problem::bad_request(format!("networks: name 1 to {NETWORKS_MAX}, such as 10.1.0.0/16")));
    }
    let (mut networks, mut wrong) = (Vec::new(), Vec::new());
    for (index, text) in written.iter().enumerate() {
        match prefix_text(text) {
            Ok(prefix) => networks.push(prefix),
            Err(detail) => wrong.push(Item { field: format!("networks[{index}]"), detail, ..Item::default() }),
        }
    }
    if !wrong.is_empty() {
        return Err(Problem::bad_request("some networks cannot be read").with(wrong));
    }
    let granted = Grant::new(host.clone(), networks);
    let (change, networks) = edit(&app, &host, author(&caller), format!("host {host} granted"), |before| {
        let after = Grant { join: before.and_then(|before| before.join), ..granted.clone() };
        let networks: Vec<String> = after.networks.iter().map(ToString::to_string).collect();
        Ok((Some(after), networks))
    })
    .await?;
    Ok(Json(ShownGrant { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), networks, change }))
}

/// Takes a host away: what it was granted, and what it has enrolled. Its credentials are revoked with `groupcast host remove`.
#[utoipa::path(delete, path = "/v1/hosts/{id}", tag = "administration", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = RemovedHost), Writing))]
pub async fn delete_host(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Named(id): Named,
) -> Result<Json<RemovedHost>, Problem> {
    let host = host_id(&id)?;
    let missing = || Problem::not_found(format!("host {host} is granted nothing"));
    // First what it may: whoever enrols now is refused, so that what is taken away next stays away.
    let removed = edit(&app, &host, author(&caller), format!("host {host} removed"), |before| {
        let before = before.ok_or_else(missing)?;
        Ok((None, before.join.and_then(|join| join.key)))
    });
    let (change, joined_key) = removed.await?;
    let workloads = app.registrations.remove(&host, &author(&caller)).await;
    let workloads = workloads.map_err(|silent| {
        Problem::unavailable(format!("host {host} is granted nothing any more, but what it enrolled is still there: {silent}"))
    })?;
    Ok(Json(RemovedHost { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), change, workloads, joined_key }))
}

/// Makes a token with which the host joins once, within a short time, with a key of its own. An earlier one is void.
#[utoipa::path(post, path = "/v1/hosts/{id}/token", tag = "administration", security(("token" = [])), params(("id" = String, Path)),
    request_body = NewJoinToken, responses((status = 201, body = MadeJoinToken), Writing))]
pub async fn make_join_token(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Named(id): Named,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<MadeJoinToken>), Problem> {
    let host = host_id(&id)?;
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let NewJoinToken { life } = if bytes.is_empty() { NewJoinToken::default() } else { body::json(&bytes)? };
    let life = life.as_deref().map_or(Ok(JOIN_LIFE), humantime::parse_duration);
    let life = life.map_err(|error| Problem::bad_request(format!("life: {error}: write 10m")))?.as_secs();
    if !(1..=JOIN_SECONDS_MAX).contains(&life) {
        return Err(Problem::bad_request(format!("life: a join token lives 1 to {JOIN_SECONDS_MAX} seconds")));
    }
    let mut random = [0; 24];
    getrandom::fill(&mut random).map_err(|error| Problem::unavailable(format!("no random numbers: {error}")))?;
    let (token, join) = grant::token(&host, random, now_seconds() + life);
    let missing = || Problem::not_found(format!("host {host} is granted nothing: add it with its networks first"));
    let made = edit(&app, &host, author(&caller), format!("join token for host {host} made"), |before| {
        Ok((Some(Grant { join: Some(join.clone()), ..before.ok_or_else(missing)? }), ()))
    });
    let (change, ()) = made.await?;
    let made = MadeJoinToken { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), token, change };
    Ok((StatusCode::CREATED, Json(made)))
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A host joins with its token: what it gets is good for its own key only. Asking again with the same key is harmless.
#[utoipa::path(post, path = "/v1/join", tag = "administration", request_body = Join, responses((status = 200, body = Joined), Writing))]
pub async fn join(
    State(app): State<App>,
    from: Option<axum::Extension<ConnectInfo<SocketAddr>>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Joined>, Problem> {
    let from = from.map_or(IpAddr::from([0, 0, 0, 0]), |from| from.0.0.ip()).to_canonical();
    let now_ms = app.clock.elapsed().as_millis() as u64;
    let attempts = || app.attempts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let wait_ms = attempts().wait_ms(from, "join", now_ms);
    if let Some(wait_ms) = wait_ms {
        let detail = "too many attempts with a token that is not good: wait";
        return Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate", detail).retry_after(wait_ms.div_ceil(1_000)));
    }
    app.loaded()?;
    let Some(signer) = &app.host_signer else {
        let detail = "this gateway signs no credentials: start it with --host-signer, or use `groupcast host add --authority`";
        return Err(Problem::conflict(detail));
    };
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let Join { token, public_key } = body::json(&bytes)?;
    let refused = |refused: grant::Refused| {
        metrics::counter!("groupcast_access_refused_total", "why" => "join").increment(1);
        Problem::forbidden(refused.to_string())
    };
    let joined = match grant::host_of(&token) {
        None => Err(refused(grant::Refused::Unknown)),
        Some(host) => {
            // Signed before it is bound: a key that cannot be signed binds nothing.
            let wrong = |error: groupcast_bus_config::credentials::Error| Problem::bad_request(error.to_string());
            let credential = signer.sign(&host, &public_key, SystemTime::now()).map_err(wrong)?;
            let joined = edit(&app, &host, format!("host {host} from {from}"), format!("host {host} joined"), |before| {
                let before = before.ok_or_else(|| refused(grant::Refused::Unknown))?;
                let after = before.joined(&token, &public_key, now_seconds()).map_err(refused)?;
                Ok((Some(after), ()))
            });
            joined.await.map(|_| (host, credential))
        }
    };
    match joined {
        Ok((host, credential)) => {
            Ok(Json(Joined { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), credential }))
        }
        Err(problem) => {
            if problem.status == StatusCode::FORBIDDEN.as_u16() {
                attempts().failed(from, "join", now_ms);
            }
            Err(problem)
        }
    }
}
