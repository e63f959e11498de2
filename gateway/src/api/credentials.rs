//! The credentials that gateways have signed for hosts: all of them are known, are renewed by their holders before they expire, and are
//! void when whoever holds the authority has revoked them on the bus.

use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;
use std::time::SystemTime;

use axum::Json;
use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode};
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_control::catalog::Version;
use groupcast_control::log::Log;
use groupcast_control::registration::admission::Verdict;
use groupcast_control::registration::grant::{self, Grant, Issued, REMEMBERED_MAX};
use groupcast_policy::ids::HostId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::{self, Administrator};
use super::body::{self, Named, Queried};
use super::host::{Joined, author, edit, host_id, now_seconds, over};
use super::{App, FORMAT_VERSION, Listed, Page};
use crate::problem::{Problem, Reading, Writing};

/// A token and a signature, with room to spare.
const RENEW_BYTES_MAX: usize = 16 * 1024;

/// A credential of a host that works, or is still to be revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShownCredential {
    pub host: String,
    /// The public key it is for.
    pub key: String,
    /// When the first credential of this key was issued, in seconds since 1970.
    pub made_at: u64,
    /// When the last one expires, in seconds since 1970.
    pub expires_at: u64,
    /// Its host is removed: it is still to be revoked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removing: bool,
}

impl ShownCredential {
    pub fn new(host: &HostId, issued: &Issued) -> Self {
        let Issued { key, made_at, expires_at, .. } = issued.clone();
        Self { host: host.to_string(), key, made_at, expires_at, removing: false }
    }
}

/// Keys that are void on the bus.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevokedCredentials {
    pub credentials: Vec<RevokedCredential>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevokedCredential {
    pub key: String,
    pub made_at: u64,
    /// In seconds since 1970: until then it is remembered, so that no gateway renews it.
    pub expires_at: u64,
}

/// What is left of a host after some of its keys were revoked.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct LeftOfHost {
    pub format_version: String,
    pub host: String,
    /// Whether nothing is left of a host that was removed.
    pub gone: bool,
    /// Credentials that still work.
    pub credentials: Vec<ShownCredential>,
}

/// A host that renews its credential before it expires.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// The token of the credential it has.
    pub credential: String,
    /// That token, signed with the host's own key.
    pub proof: String,
}

/// Lists the credentials that gateways have signed for hosts and that have not expired, by host.
#[utoipa::path(get, path = "/v1/credentials", tag = "administration", security(("token" = [])), params(Page),
    responses((status = 200, body = Listed<ShownCredential>), Reading))]
pub async fn list_credentials(
    State(app): State<App>,
    Administrator(_): Administrator,
    Queried(page): Queried<Page>,
) -> Result<Json<Listed<ShownCredential>>, Problem> {
    let limit = page.limit()?;
    let entries = Log::catalog(app.client.clone()).all(&subjects::catalog_kind_all(CatalogKind::Host)).await;
    let entries = entries.map_err(|error| Problem::unavailable(error.to_string()))?;
    let grant = |version: Version| Grant::read(&version.document.ok()??).ok();
    let mut grants: Vec<Grant> = entries.iter().filter_map(Version::of).filter_map(grant).collect();
    grants.sort_by(|one, other| one.host.cmp(&other.host));
    let (after, prefix, now) = (page.after.unwrap_or_default(), page.prefix.unwrap_or_default(), now_seconds());
    grants.retain(|grant| grant.host.as_str() > after.as_str() && grant.host.as_str().starts_with(&prefix));
    let (mut items, mut next) = (Vec::new(), None);
    // All of one host on one page: the next one begins after a host.
    for grant in &grants {
        if items.len() >= limit {
            next = items.last().map(|last: &ShownCredential| last.host.clone());
            break;
        }
        let shown = |issued| ShownCredential { removing: grant.removing, ..ShownCredential::new(&grant.host, issued) };
        items.extend(grant.live(now).map(shown));
    }
    Ok(Json(Listed::new((items, next))))
}

/// These keys of the host are void on the bus: they are not renewed any more. A host that was removed is gone when none is left.
#[utoipa::path(post, path = "/v1/hosts/{id}/revoked", tag = "administration", security(("token" = [])),
    params(("id" = String, Path)), request_body = RevokedCredentials, responses((status = 200, body = LeftOfHost), Writing))]
pub async fn revoked_credentials(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Named(id): Named,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<LeftOfHost>, Problem> {
    let host = host_id(&id)?;
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let RevokedCredentials { credentials } = body::json(&bytes)?;
    if credentials.len() > REMEMBERED_MAX {
        return Err(Problem::bad_request(format!("credentials: at most {REMEMBERED_MAX}")));
    }
    let mut keys = Vec::new();
    for RevokedCredential { key, made_at, expires_at } in credentials {
        groupcast_bus_config::credentials::user_key(&key).map_err(|error| Problem::bad_request(error.to_string()))?;
        keys.push(Issued { key, made_at, expires_at, revoked: true });
    }
    let missing = || Problem::not_found(format!("host {host} is granted nothing"));
    let told = edit(&app, &host, author(&caller), format!("{} credentials of host {host} revoked", keys.len()), |before| {
        let refused = |refused: grant::Refused| Problem::conflict(refused.to_string());
        let after = before.ok_or_else(missing)?.revoked(&keys, now_seconds()).map_err(refused)?;
        Ok((Some(after.clone()), after))
    });
    let (_, left) = told.await?;
    let gone = left.is_over(now_seconds());
    if gone {
        over(&app, &host, author(&caller)).await?;
    }
    let credentials = left.live(now_seconds()).map(|issued| ShownCredential::new(&host, issued)).collect();
    Ok(Json(LeftOfHost { format_version: FORMAT_VERSION.to_owned(), host: host.to_string(), gone, credentials }))
}

/// The host's own measure: whoever holds its key can ask without end, and each time the bus is asked.
fn in_measure(app: &App, host: &HostId) -> Result<(), Problem> {
    let now_ms = app.clock.elapsed().as_millis() as u64;
    let mut renewals = app.renewals.lock().unwrap_or_else(PoisonError::into_inner);
    match renewals.judge(host, now_ms) {
        Verdict::Heard => Ok(()),
        Verdict::Unheard { .. } => {
            metrics::counter!("groupcast_access_refused_total", "why" => "rate").increment(1);
            let detail = format!("host {host} has its credential renewed too often: wait");
            Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate", detail).retry_after(1))
        }
    }
}

/// A host has its credential signed anew before it expires, with the same key and without an operator. Before half of its life has
/// passed nothing changes.
#[utoipa::path(post, path = "/v1/renew", tag = "administration", request_body = Renew,
    responses((status = 200, body = Joined), Writing))]
pub async fn renew(
    State(app): State<App>,
    from: Option<axum::Extension<ConnectInfo<SocketAddr>>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Joined>, Problem> {
    let peer = from.map_or(IpAddr::from([0, 0, 0, 0]), |from| from.0.0.ip());
    let from = app.proxies.client(peer, &headers);
    app.loaded()?;
    let Some(signer) = &app.host_signer else {
        return Err(Problem::conflict("this gateway signs no credentials: start it with --host-signer"));
    };
    let bytes = body::of_stranger(body, &headers, RENEW_BYTES_MAX).await?;
    let Renew { credential, proof } = body::json(&bytes)?;
    let refused = |why: String| {
        metrics::counter!("groupcast_access_refused_total", "why" => "renew").increment(1);
        Problem::forbidden(why)
    };
    // Checked before anything is remembered of whoever asks: without a credential of ours nothing happens here.
    let now = SystemTime::now();
    let presented = match signer.presented(&credential, &proof, now) {
        Ok(presented) => presented,
        Err(error) => {
            access::refused(&app, from, "renew")?;
            return Err(refused(error.to_string()));
        }
    };
    in_measure(&app, &presented.host)?;
    let (host, key, held) = (&presented.host, &presented.public_key, (presented.issued_at, presented.expires_at));
    let renewed = edit(&app, host, format!("host {host} from {from}"), format!("credential of host {host} renewed"), |before| {
        let before = before.ok_or_else(|| refused(grant::Refused::Removed(host.clone()).to_string()))?;
        let renewed = before.renewed(key, held, now_seconds(), signer.life().as_secs());
        renewed.map(|(after, expires_at)| (Some(after), expires_at)).map_err(|why| refused(why.to_string()))
    });
    let (_, expires_at) = renewed.await?;
    let signed = signer.sign(host, key, now, expires_at).map_err(|error| Problem::bad_request(error.to_string()))?;
    Ok(Json(Joined::new(host, signed)))
}
