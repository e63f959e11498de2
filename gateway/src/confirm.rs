//! Changes that take themselves back unless somebody confirms them in time: for whoever may cut themselves off.
//!
//! What holds a change to its confirmation is a document that is written with it, in one batch. Every gateway sees it, so it does not
//! matter which one took the change or whether that one still lives: whoever is first takes it back, once. Confirming deletes it.

use std::time::{Duration, SystemTime};

use data_encoding::HEXLOWER;
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::api::App;
use crate::api::access::Caller;
use crate::problem::Problem;
use crate::submit::{self, Asked, READ_BACK_DEADLINE};
use crate::token::{Principal, Role};

/// Longest time a change may wait for its confirmation.
pub const CONFIRM_MAX: Duration = Duration::from_secs(3_600);
/// How often it is looked at what ran out.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The document that goes with a change. A repetition of the change makes the same one.
pub fn write(within: &str, key: Option<&str>) -> Result<Write, Problem> {
    let within =
        humantime::parse_duration(within).map_err(|error| Problem::bad_request(format!("confirm: {error}: write 60s")))?;
    if within.is_zero() || within > CONFIRM_MAX {
        return Err(Problem::bad_request("confirm: more than nothing and at most an hour"));
    }
    let mut bytes = [0; 16];
    match key {
        Some(key) => bytes.copy_from_slice(&Sha256::digest(key)[..16]),
        None => getrandom::fill(&mut bytes).map_err(|error| Problem::unavailable(format!("no random numbers: {error}")))?,
    }
    let name = Name::new(CatalogKind::Confirm, &HEXLOWER.encode(&bytes));
    let name = name.map_err(|error| Problem::bad_request(error.to_string()))?;
    let body = json!({ "within_ms": within.as_millis() as u64 });
    Ok(Write::put(Document::Other { name, body }, Expected::Any))
}

/// How long it waits. What cannot be read waits for nothing: it was meant to be taken back.
pub fn within(body: &Value) -> Duration {
    Duration::from_millis(body["within_ms"].as_u64().unwrap_or(0)).min(CONFIRM_MAX)
}

/// Keeps the change.
pub async fn confirm(app: &App, caller: &Caller, change: u64) -> Result<(), Problem> {
    let held = app
        .followed
        .local()
        .confirms()
        .find(|(_, _, kept)| kept.change == change)
        .map(|(name, _, kept)| (name.clone(), kept.revision));
    let Some((name, revision)) = held else {
        return Err(Problem::not_found(format!(
            "change {change} waits for no confirmation: it has it, or was taken back, or never needed it"
        )));
    };
    let confirmation = Change {
        author: submit::author(&caller.principal, caller.from),
        reason: format!("change {change} confirmed"),
        key: None,
        writes: vec![Write::delete(name, Expected::Revision(revision))],
    };
    let accepted = app.catalog.write(&confirmation, None).await?;
    app.followed.reached(accepted.number, READ_BACK_DEADLINE).await;
    Ok(())
}

/// Takes back what nobody confirmed, for as long as the gateway lives.
pub async fn watch(app: App) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = SystemTime::now();
        let is_over = |within: Duration, at: SystemTime| at.checked_add(within).is_some_and(|end| end <= now);
        let over: Vec<(Name, u64, u64)> = app
            .followed
            .local()
            .confirms()
            .filter(|(_, within, kept)| is_over(*within, kept.at))
            .map(|(name, _, kept)| (name.clone(), kept.change, kept.revision))
            .collect();
        for (name, change, revision) in over {
            take_back(&app, name, change, revision).await;
        }
    }
}

async fn take_back(app: &App, name: Name, change: u64, revision: u64) {
    let reason = format!("change {change} was not confirmed in time");
    let undone = async {
        let Change { writes, .. } = app.catalog.undo(change, "", "").await?;
        let principal = Principal { id: "groupcast".to_owned(), role: Role::Admin, scope: None };
        // Of several gateways one is first; the others find that it is done.
        let key = Some(format!("confirm-{}-{revision}", name.id()));
        let asked = Asked { reason: reason.clone(), key, writes, plan: None, undo: true };
        submit::submit(&app.catalog, &app.followed, &principal, [0, 0, 0, 0].into(), asked).await
    };
    match undone.await {
        Ok(done) => tracing::warn!(change, undone_by = done.change, "not confirmed in time: taken back"),
        Err(problem) if problem.status >= 500 => {
            tracing::warn!(change, problem = problem.detail, "not taken back yet: trying again")
        }
        Err(problem) => {
            // Something newer stands on it. Trying again would not help, and would surprise somebody later.
            tracing::error!(change, problem = problem.detail, "not confirmed in time, and cannot be taken back");
            let reason = format!("change {change} was not confirmed, but could not be taken back");
            let writes = vec![Write::delete(name, Expected::Revision(revision))];
            let ended = Change { author: "groupcast".to_owned(), reason, key: None, writes };
            if let Err(error) = app.catalog.write(&ended, None).await {
                tracing::debug!(%error, "somebody else ended it");
            }
        }
    }
}
