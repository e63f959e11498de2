//! What an operator grants to hosts: where their addresses may lie, and tokens with which they join.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode};
use groupcast_bus_config::credentials::{Signed, proven, user_key};
use groupcast_bus_config::subjects;
use groupcast_control::catalog::Version;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::log::Log;
use groupcast_control::registration::grant::{self, Grant, JOIN_SECONDS_MAX, NETWORKS_MAX};
use groupcast_policy::ids::HostId;
use groupcast_policy::text::strict_prefix_text;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::{self, Administrator, Caller};
use super::body::{self, Named};
use super::credentials::ShownCredential;
use super::{App, FORMAT_VERSION};
use crate::problem::{Item, Problem, Writing};
use crate::submit::{self, READ_BACK_DEADLINE};

/// How long a join token lives unless told otherwise.
const JOIN_LIFE: Duration = Duration::from_secs(600);
/// How long a join waits for its turn.
const JOIN_PLACE_DEADLINE: Duration = Duration::from_secs(5);
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
    /// The token, signed with that key: a key is bound only for whoever holds it.
    pub proof: String,
}

/// The host's token for the bus, which its own key makes a credential.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Joined {
    pub format_version: String,
    pub host: String,
    pub credential: String,
    /// In seconds since 1970.
    pub expires_at: u64,
}

impl Joined {
    pub(super) fn new(host: &HostId, Signed { token, expires_at }: Signed) -> Self {
        Self { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), credential: token, expires_at }
    }
}

/// A host that is granted nothing any more.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct RemovedHost {
    pub format_version: String,
    pub host: String,
    pub change: u64,
    /// Workloads that it had enrolled.
    pub workloads: usize,
    /// What is still to be revoked by whoever holds the authority; the host is gone for good when that is told to
    /// `/v1/hosts/{id}/revoked`.
    pub credentials: Vec<ShownCredential>,
}

pub(super) fn host_id(text: &str) -> Result<HostId, Problem> {
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
pub(super) async fn edit<T>(
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
        if after == before {
            let Expected::Revision(revision) = expected else { return Ok((0, outcome)) };
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

pub(super) fn author(caller: &Caller) -> String {
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
        match strict_prefix_text(text) {
            Ok(prefix) => networks.push(prefix),
            Err(detail) => wrong.push(Item { field: format!("networks[{index}]"), detail, ..Item::default() }),
        }
    }
    if !wrong.is_empty() {
        return Err(Problem::bad_request("some networks cannot be read").with(wrong));
    }
    let granted = Grant::new(host.clone(), networks);
    let (change, networks) = edit(&app, &host, author(&caller), format!("host {host} granted"), |before| {
        let now = now_seconds();
        let after = match before {
            Some(before) if before.removing && !before.is_over(now) => return Err(half_removed(&host)),
            Some(before) if before.removing => granted.clone(),
            Some(before) => Grant { networks: granted.networks.clone(), ..before },
            None => granted.clone(),
        };
        let networks: Vec<String> = after.networks.iter().map(ToString::to_string).collect();
        Ok((Some(after), networks))
    })
    .await?;
    Ok(Json(ShownGrant { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), networks, change }))
}

/// Takes a host away: what it was granted, and what it has enrolled. Its credentials are revoked with `groupcast host remove`, which
/// can be repeated until nothing is left.
#[utoipa::path(delete, path = "/v1/hosts/{id}", tag = "administration", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = RemovedHost), Writing))]
pub async fn delete_host(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Named(id): Named,
) -> Result<Json<RemovedHost>, Problem> {
    let host = host_id(&id)?;
    // First what it may: whoever enrols or renews now is refused, so that what is taken away next stays away. What is left of the
    // grant says what is still to be done, so that a removal that was interrupted is resumed.
    let removed = edit(&app, &host, author(&caller), format!("host {host} removed"), |before| {
        let after = before.map(|before| before.removed(now_seconds()));
        Ok((after.clone(), after))
    });
    let (mut change, left) = removed.await?;
    if left.is_none() && !is_registered(&app, &host).await? {
        return Err(Problem::not_found(format!("host {host} is granted nothing")));
    }
    let workloads = app.registrations.remove(&host, &author(&caller)).await;
    let workloads = workloads.map_err(|silent| {
        let detail = format!("host {host} is granted nothing any more, but what it enrolled may still be there");
        Problem::unavailable(format!("{detail}: {silent}; removing it again goes on from here"))
    })?;
    let credentials: Vec<ShownCredential> =
        left.iter().flat_map(|left| left.live(now_seconds()).map(|issued| ShownCredential::new(&host, issued))).collect();
    if left.is_some() && credentials.is_empty() {
        change = over(&app, &host, author(&caller)).await?;
    }
    Ok(Json(RemovedHost { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), change, workloads, credentials }))
}

/// Whether REGISTRY has an entry of this host.
async fn is_registered(app: &App, host: &HostId) -> Result<bool, Problem> {
    let entry = Log::registry(app.client.clone()).last(&subjects::registry_host(host)).await;
    let entry = entry.map_err(|error| Problem::unavailable(error.to_string()))?;
    Ok(entry.is_some_and(|entry| !entry.payload.is_empty()))
}

/// Deletes what is left of the grant of a removed host whose credentials are all void.
pub(super) async fn over(app: &App, host: &HostId, author: String) -> Result<u64, Problem> {
    let deleted = edit(app, host, author, format!("nothing is left of host {host}"), |before| {
        Ok((before.filter(|before| !before.is_over(now_seconds())), ()))
    });
    Ok(deleted.await?.0)
}

pub(super) fn half_removed(host: &HostId) -> Problem {
    Problem::conflict(format!(
        "host {host} is being removed, and its credentials still work: finish with `groupcast host remove {host} --authority ...`"
    ))
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
        let before = before.filter(|before| !before.is_over(now_seconds())).ok_or_else(missing)?;
        if before.removing {
            return Err(half_removed(&host));
        }
        Ok((Some(Grant { join: Some(join.clone()), ..before }), ()))
    });
    let (change, ()) = made.await?;
    let made = MadeJoinToken { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), token, change };
    Ok((StatusCode::CREATED, Json(made)))
}

pub(super) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A host joins with its token: what it gets is good for its own key only. Asking again with the same key is harmless.
#[utoipa::path(post, path = "/v1/join", tag = "administration", request_body = Join, responses((status = 200, body = Joined), Writing))]
pub async fn join(
    State(app): State<App>,
    peer: Option<axum::Extension<ConnectInfo<SocketAddr>>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Joined>, Problem> {
    let peer = peer.map_or(IpAddr::from([0, 0, 0, 0]), |peer| peer.0.0.ip());
    let from = app.proxies.client(peer, &headers);
    app.loaded()?;
    let Some(signer) = &app.host_signer else {
        let detail = "this gateway signs no credentials: start it with --host-signer, or use `groupcast host add --authority`";
        return Err(Problem::conflict(detail));
    };
    let bytes = body::of_stranger(body, &headers, body::STRANGER_BYTES_MAX).await?;
    // A token is looked up on the bus: few at once, and one that is good passes, whatever others tried.
    let _place = tokio::time::timeout(JOIN_PLACE_DEADLINE, app.joins.acquire()).await;
    let _place = _place.map_err(|_| Problem::unavailable("too many join at once: try again"))?;
    let Join { token, public_key, proof } = body::json(&bytes)?;
    let refused = |refused: grant::Refused| {
        metrics::counter!("groupcast_access_refused_total", "why" => "join").increment(1);
        Problem::forbidden(refused.to_string())
    };
    let joined = match grant::host_of(&token) {
        None => Err(refused(grant::Refused::Unknown)),
        Some(host) => {
            // A key that cannot be signed binds nothing; and what is signed was written down before.
            let wrong = |error: groupcast_bus_config::credentials::Error| Problem::bad_request(error.to_string());
            user_key(&public_key).map_err(wrong)?;
            let now = SystemTime::now();
            // Another host's key, bound here, would be revoked with this host, and a revoked key is void for ever.
            let is_own = proven(&public_key, &token, &proof).map_err(|error| Problem::forbidden(error.to_string()));
            let joined = edit(&app, &host, format!("host {host} from {from}"), format!("host {host} joined"), |before| {
                let before = before.ok_or_else(|| refused(grant::Refused::Unknown))?;
                is_own.clone()?;
                let joined = before.joined(&token, &public_key, now_seconds(), signer.life().as_secs());
                joined.map(|(after, expires_at)| (Some(after), expires_at)).map_err(refused)
            });
            match joined.await {
                Ok((_, expires_at)) => {
                    signer.sign(&host, &public_key, now, expires_at).map(|signed| (host, signed)).map_err(wrong)
                }
                Err(problem) => Err(problem),
            }
        }
    };
    match joined {
        Ok((host, signed)) => Ok(Json(Joined::new(&host, signed))),
        Err(problem) => {
            if problem.status == StatusCode::FORBIDDEN.as_u16() {
                access::refused(&app, from, "join")?;
            }
            Err(problem)
        }
    }
}
