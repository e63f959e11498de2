//! Who makes a request, and whether they may.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::FromRequestParts;
use axum::http::{StatusCode, header, request::Parts};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{App, FORMAT_VERSION};
use crate::doors;
use crate::problem::{Problem, Reading};
use crate::scope::Scope;
use crate::token::{self, Principal, Role, Token};

/// The token is not good, or not any more.
pub fn not_good() -> Problem {
    unauthorized(NOT_GOOD)
}

/// Somebody with a token that is good.
#[derive(Debug, Clone)]
pub struct Caller {
    pub principal: Principal,
    pub from: IpAddr,
    /// What it showed; nothing for what the gateway does by itself.
    pub token: Option<Arc<Token>>,
}

fn unauthorized(detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
}

/// Said in every case, so that nobody learns which tokens exist.
const NOT_GOOD: &str = "the token is not good, or not any more: ask an administrator for one (`groupcast token add`)";

impl FromRequestParts<App> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let from = app.proxies.client(doors::peer(&parts.extensions), &parts.headers);
        let Some(value) = parts.headers.get(header::AUTHORIZATION) else {
            return Err(unauthorized("send a token: `Authorization: Bearer gct.…`"));
        };
        let text = value.to_str().ok().and_then(|text| text.split_once(' '));
        let given = text.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, token)| token.trim());
        let (id, secret) = given.and_then(token::parse).unwrap_or(("", ""));
        // Before the streams were read no token is known, and that is nobody's failure.
        app.loaded()?;
        let known = app.followed.local().token(id).cloned();
        let good = match &known {
            Some(token) => token.verify(secret, SystemTime::now()),
            None => {
                token::verify_nothing(secret);
                Err(if id.is_empty() { token::Invalid::Malformed } else { token::Invalid::Unknown })
            }
        };
        match (good, known) {
            (Ok(()), Some(token)) => Ok(Self { principal: token.principal(), from, token: Some(token) }),
            (outcome, _) => {
                refused(app, from, id)?;
                metrics::counter!("groupcast_access_refused_total", "why" => "token").increment(1);
                let shown: String = id.chars().take(groupcast_policy::ids::ID_LEN_MAX).collect();
                tracing::warn!(%from, token = shown, ?outcome, "a token was refused");
                Err(not_good())
            }
        }
    }
}

/// Counts a failure. Who failed too often is not told again whether a token is good, and is not written to the log.
pub fn refused(app: &App, from: IpAddr, name: &str) -> Result<(), Problem> {
    let now_ms = app.clock.elapsed().as_millis() as u64;
    let mut attempts = app.attempts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    attempts.refused(from, name, now_ms).map_err(|wait_ms| {
        metrics::counter!("groupcast_access_refused_total", "why" => "rate").increment(1);
        let detail = "too many attempts with a token that is not good: wait, or use one that is";
        Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate", detail).retry_after(wait_ms.div_ceil(1_000))
    })
}

/// How often it is looked whether a token has expired.
const EXPIRY_LOOK_EVERY: Duration = Duration::from_secs(1);

impl Caller {
    /// Returns once the token is not good any more: revoked, made anew, or expired.
    pub async fn no_longer_good(self, app: App) {
        let Some(token) = self.token else { return std::future::pending().await };
        let mut moves = app.followed.moves();
        loop {
            let is_same = app.followed.local().token(token.id()).is_some_and(|now| now.stored == token.stored);
            if !is_same || token.is_expired(SystemTime::now()) {
                tracing::info!(token = token.id(), "a token is not good any more: what it still had open ends");
                return;
            }
            tokio::select! {
                moved = moves.changed() => if moved.is_err() { return },
                () = tokio::time::sleep(EXPIRY_LOOK_EVERY), if token.stored.expires_at.is_some() => {}
            }
        }
    }
}

/// Somebody who may administer.
pub struct Administrator(pub Caller);

impl FromRequestParts<App> for Administrator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let caller = Caller::from_request_parts(parts, app).await?;
        if caller.principal.role < Role::Admin || caller.principal.scope.is_some() {
            return Err(Problem::forbidden("this takes a token with role admin and without a scope"));
        }
        Ok(Self(caller))
    }
}

/// Who you are to this gateway.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    pub format_version: String,
    pub id: String,
    pub role: Role,
    pub scope: Option<Scope>,
    /// Where the request came from.
    pub from: String,
}

/// Who the token belongs to and what it is good for.
#[utoipa::path(get, path = "/v1/whoami", tag = "administration", security(("token" = [])), responses(
    (status = 200, body = WhoAmI), Reading,
))]
pub async fn whoami(caller: Caller) -> Json<WhoAmI> {
    let Caller { principal: Principal { id, role, scope }, from, .. } = caller;
    Json(WhoAmI { format_version: FORMAT_VERSION.to_owned(), id, role, scope, from: from.to_string() })
}
