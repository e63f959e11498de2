//! Why a flow passes or does not.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;

use super::App;
use super::access::Caller;
use super::body::Queried;
use crate::explained::{self, Cannot, Explanation, Side};
use crate::happens::{Met, Told, met, together};
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

/// The path a packet takes through scopes and groups, the rule that decides, and what the hosts at both ends do with it at present.
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
    let sides = || [&explanation.egress, &explanation.ingress].into_iter().flatten();
    let known = app.progress.hosts(sides().filter_map(|side| side.host.clone()).collect()).await;
    for side in [&mut explanation.egress, &mut explanation.ingress].into_iter().flatten() {
        let told = match (&known, &side.host) {
            (Some(known), Some(host)) => known.get(host).map_or(Told::Nothing, Told::Standing),
            _ => Told::NoAnswer,
        };
        side.enforced = enforced(&app, side, told).await;
        let Met { passes, words } = met(side, told);
        (side.passes, side.happens) = (passes, words);
    }
    explanation.passes = together([&explanation.egress, &explanation.ingress].into_iter().flatten().map(|side| side.passes));
    Ok(Json(explanation))
}

/// Whether the host has the latest change that had a say, and enforces it. Nobody knows of changes from before the present leader.
async fn enforced(app: &App, side: &Side, told: Told<'_>) -> Option<bool> {
    let (change, host) = (side.change?, side.host.as_deref()?);
    let Known::Progress(progress) = app.progress.ask(change).await else { return None };
    let all_are_named = progress.behind.len() >= progress.span.saturating_sub(progress.enforced) as usize;
    match (progress.behind.iter().any(|behind| behind.host == host), told) {
        (true, _) => Some(false),
        (false, _) if all_are_named => Some(true),
        // More are behind than are named, perhaps this one.
        (false, Told::Standing(standing)) if !standing.behind => Some(true),
        (false, _) => None,
    }
}
