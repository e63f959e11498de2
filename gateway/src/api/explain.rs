//! Why a flow passes or does not.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;

use super::App;
use super::access::Caller;
use super::body::Queried;
use crate::explained::{self, Cannot, Explanation, Side};
use crate::problem::{Problem, ReadingOne};
use crate::progress::Known;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Question {
    /// A workload's id or an address.
    pub from: String,
    /// A workload's id or an address.
    pub to: String,
    /// `tcp/5432`, `udp/53`, `icmp/8/0`, `gre`.
    pub traffic: String,
}

/// The path a packet takes through scopes and groups, the rule that decides, and whether the host has that change in force.
#[utoipa::path(get, path = "/v1/explain", tag = "reading", security(("token" = [])), params(Question), responses(
    (status = 200, body = Explanation), ReadingOne,
))]
pub async fn explain(
    State(app): State<App>,
    _: Caller,
    Queried(question): Queried<Question>,
) -> Result<Json<Explanation>, Problem> {
    let explained = explained::explain(&app.followed.local(), &question.from, &question.to, &question.traffic);
    let mut explanation = explained.map_err(|cannot| match cannot {
        Cannot::Unknown(_) => Problem::not_found(cannot.to_string()),
        _ => Problem::bad_request(cannot.to_string()),
    })?;
    for side in [&mut explanation.egress, &mut explanation.ingress].into_iter().flatten() {
        side.enforced = enforced(&app, side).await;
    }
    Ok(Json(explanation))
}

/// Whether the host has the latest change in force that had a say. Nobody knows of changes from before the present leader.
async fn enforced(app: &App, side: &Side) -> Option<bool> {
    let (change, host) = (side.change?, side.host.as_deref()?);
    match app.progress.ask(change).await {
        Known::Progress(progress) if progress.done => Some(true),
        Known::Progress(progress) => Some(!progress.behind.iter().any(|behind| behind.host == host)),
        Known::Nothing | Known::NoController => None,
    }
}
