//! The first word on a new bus.

use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use groupcast_control::begin::{self, Begun};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::Administrator;
use super::{App, FORMAT_VERSION};
use crate::problem::{Problem, Writing};
use crate::submit::{self, READ_BACK_DEADLINE};

/// That the bus is new.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Initialised {
    pub format_version: String,
    /// The change that says so; nothing if something was written before.
    pub change: Option<u64>,
}

/// Says that this bus is new and did not lose its data, so that a controller leads although nothing is written yet. Needed where groups
/// come from sources only.
#[utoipa::path(post, path = "/v1/init", tag = "administration", security(("token" = [])), responses(
    (status = 200, body = Initialised), Writing,
))]
pub async fn init(State(app): State<App>, Administrator(caller): Administrator) -> Result<Json<Initialised>, Problem> {
    let author = submit::author(&caller.principal, caller.from);
    let begun = begin::begin(&app.client, &author, SystemTime::now()).await.map_err(|error| match error {
        begin::Error::NotNew { .. } => Problem::conflict(error.to_string()),
        begin::Error::NoAnswer(error) => error.into(),
        begin::Error::Catalog(error) => error.into(),
    })?;
    let change = match begun {
        Begun::Now { change } => Some(change),
        Begun::Before => None,
    };
    if let Some(change) = change {
        app.followed.reached(change, READ_BACK_DEADLINE).await;
    }
    Ok(Json(Initialised { format_version: FORMAT_VERSION.to_owned(), change }))
}
