//! Tokens: made, listed and revoked by administrators. The secret is shown once, when it is made.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::change::{Change, Expected, Write};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::Administrator;
use super::body::{self, Named, Queried};
use super::{App, FORMAT_VERSION, Listed, Page, documents};
use crate::problem::{Problem, Reading, Writing};
use crate::scope::Scope;
use crate::submit::{self, READ_BACK_DEADLINE};
use crate::token::{self, Role, Token};

/// A token without its secret.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ShownToken {
    pub format_version: String,
    pub id: String,
    pub role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    pub created_at: String,
    /// Nothing when it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    pub expired: bool,
}

impl ShownToken {
    pub fn new(token: &Token, now: SystemTime) -> Self {
        let time =
            |seconds: u64| humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
        let stored = &token.stored;
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            id: token.id().to_owned(),
            role: stored.role,
            scope: stored.scope.clone(),
            description: stored.description.clone(),
            created_at: time(stored.created_at),
            expires_at: stored.expires_at.map(time),
            expired: token.is_expired(now),
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    pub id: String,
    pub role: Role,
    /// Without it the role holds everywhere. Only for editors: it says what they may write; everybody reads everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    #[serde(default)]
    pub description: String,
    /// How long it lives, such as `90d`; without it, for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<String>,
}

/// A new token. `token` is what its holder sends; it is shown here and never again.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct MadeToken {
    pub format_version: String,
    pub id: String,
    pub token: String,
    pub change: u64,
}

/// Lists all tokens, without their secrets.
#[utoipa::path(get, path = "/v1/tokens", tag = "administration", security(("token" = [])), params(Page), responses(
    (status = 200, body = Listed<ShownToken>), (status = 403, body = Problem, content_type = "application/problem+json"), Reading,
))]
pub async fn list_tokens(
    State(app): State<App>,
    _: Administrator,
    Queried(page): Queried<Page>,
) -> Result<Json<Listed<ShownToken>>, Problem> {
    let (local, now) = (app.followed.local(), SystemTime::now());
    Ok(Json(Listed::new(page.cut(local.tokens(), |token| token.id(), |token| ShownToken::new(token, now))?)))
}

/// What a new token is asked to be.
pub fn make(new: &NewToken, now: SystemTime) -> Result<(Token, String), Problem> {
    let life = new.life.as_deref().map(humantime::parse_duration).transpose();
    let life = life.map_err(|error| Problem::bad_request(format!("life: {error}: write 90d or 12h")))?;
    if let Some(scope) = &new.scope {
        let wrong = scope.check();
        if !wrong.is_empty() {
            return Err(Problem::of_documents(wrong));
        }
        if let Some(why) = token::no_scope(new.role) {
            return Err(Problem::bad_request(why));
        }
    }
    Token::new(&new.id, new.role, new.scope.clone(), &new.description, life, now)
        .map_err(|error| Problem::bad_request(error.to_string()))
}

/// Makes a token. One that exists is not replaced: revoke it first.
#[utoipa::path(post, path = "/v1/tokens", tag = "administration", security(("token" = [])), request_body = NewToken, responses(
    (status = 201, body = MadeToken), Writing,
))]
pub async fn create_token(
    State(app): State<App>,
    Administrator(caller): Administrator,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<MadeToken>), Problem> {
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let (token, text) = make(&body::json(&bytes)?, SystemTime::now())?;
    let write = Write::put(token.document(), Expected::Absent);
    let change = Change {
        author: submit::author(&caller.principal, caller.from),
        reason: format!("token {} made", token.id()),
        key: None,
        writes: vec![write],
    };
    let accepted = app.catalog.write(&change, None).await?;
    app.followed.reached(accepted.number, READ_BACK_DEADLINE).await;
    let (format_version, id, change) = (FORMAT_VERSION.to_owned(), token.id().to_owned(), accepted.number);
    Ok((StatusCode::CREATED, Json(MadeToken { format_version, id, token: text, change })))
}

/// A token that is good no more.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Revoked {
    pub format_version: String,
    pub id: String,
    pub change: u64,
}

/// Revokes a token, at every gateway.
#[utoipa::path(delete, path = "/v1/tokens/{id}", tag = "administration", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = Revoked), Writing))]
pub async fn revoke_token(
    State(app): State<App>,
    Administrator(caller): Administrator,
    Named(id): Named,
) -> Result<Json<Revoked>, Problem> {
    let name = documents::name(CatalogKind::Token, &id)?;
    if app.followed.local().kept(&name).is_none() {
        return Err(Problem::not_found(format!("{name} does not exist")));
    }
    let change = Change {
        author: submit::author(&caller.principal, caller.from),
        reason: format!("token {id} revoked"),
        key: None,
        writes: vec![Write::delete(name, Expected::Any)],
    };
    let accepted = app.catalog.write(&change, None).await?;
    app.followed.reached(accepted.number, READ_BACK_DEADLINE).await;
    Ok(Json(Revoked { format_version: FORMAT_VERSION.to_owned(), id, change: accepted.number }))
}
