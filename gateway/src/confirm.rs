//! Changes that take themselves back unless somebody confirms them in time: for whoever may cut themselves off.
//!
//! What holds a change to its confirmation is a document that is written with it, in one batch. Every gateway sees it, so it does not
//! matter which one took the change or whether that one still lives: whoever is first takes it back, once. Confirming deletes it.

use std::time::{Duration, SystemTime};

use async_nats::Client;
use data_encoding::HEXLOWER;
use groupcast_bus_config::streams;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_control::change::{Body, Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::api::App;
use crate::api::access::Caller;
use crate::local::Local;
use crate::problem::Problem;
use crate::scope::Scope;
use crate::submit::{self, Asked, READ_BACK_DEADLINE};
use crate::token::{Principal, Role};

/// Longest time a change may wait for its confirmation.
pub const CONFIRM_MAX: Duration = Duration::from_secs(3_600);
/// How often it is looked at what ran out.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long the bus may take to say what time it is.
const TIME_DEADLINE: Duration = Duration::from_secs(5);

/// What holds a change to its confirmation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub within: Duration,
    /// Who made the change.
    pub by: String,
}

/// The document that goes with a change. A repetition of the change makes the same one; another user, or another change, never does.
pub fn write(within: &str, by: &Principal, key: Option<&str>, writes: &[Write]) -> Result<Write, Problem> {
    let within =
        humantime::parse_duration(within).map_err(|error| Problem::bad_request(format!("confirm: {error}: write 60s")))?;
    if within.is_zero() || within > CONFIRM_MAX {
        return Err(Problem::bad_request("confirm: more than nothing and at most an hour"));
    }
    let mut bytes = [0; 16];
    match key {
        Some(key) => bytes.copy_from_slice(&name_of(by, key, writes)[..16]),
        None => getrandom::fill(&mut bytes).map_err(|error| Problem::unavailable(format!("no random numbers: {error}")))?,
    }
    let name = Name::new(CatalogKind::Confirm, &HEXLOWER.encode(&bytes));
    let name = name.map_err(|error| Problem::bad_request(error.to_string()))?;
    let body = json!({ "within_ms": within.as_millis() as u64, "by": by.id });
    Ok(Write::put(Document::Other { name, body }, Expected::Absent))
}

fn name_of(by: &Principal, key: &str, writes: &[Write]) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut put = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    };
    put(by.id.as_bytes());
    put(key.as_bytes());
    for write in writes {
        put(write.name.subject().as_bytes());
        put(&write.payload());
    }
    hash.finalize().into()
}

/// What a document says. What cannot be read waits for nothing: it was meant to be taken back.
pub fn read(body: &Value) -> Held {
    let within = Duration::from_millis(body["within_ms"].as_u64().unwrap_or(0)).min(CONFIRM_MAX);
    Held { within, by: body["by"].as_str().unwrap_or_default().to_owned() }
}

/// Taking a change back ends what holds it to a confirmation, and never brings back what held another: the two would undo each other
/// for ever.
pub fn never_restored(local: &Local, writes: &mut Vec<Write>) {
    writes.retain(|write| write.name.kind != CatalogKind::Confirm || local.kept(&write.name).is_some());
    for write in writes.iter_mut().filter(|write| write.name.kind == CatalogKind::Confirm) {
        write.body = Body::Delete;
    }
}

/// Whether this user may confirm that change: who made it, as far as their token still goes, and administrators.
fn permitted(local: &Local, principal: &Principal, held: &Held, change: u64) -> Result<(), Problem> {
    if principal.role == Role::Admin && principal.scope.is_none() {
        return Ok(());
    }
    if principal.id != held.by {
        return Err(Problem::forbidden(format!("change {change} is {}'s to confirm, or an administrator's", held.by)));
    }
    let Some(scope) = principal.scope.as_ref().map(Scope::read) else { return Ok(()) };
    for kind in [CatalogKind::Group, CatalogKind::Template] {
        for (name, _) in local.kept_of(kind).filter(|(_, kept)| kept.change == change) {
            let beyond = scope.beyond(name, local.document(name).as_ref(), true);
            if let Some(first) = beyond.first() {
                return Err(Problem::forbidden(first.to_string()).with(beyond));
            }
        }
    }
    Ok(())
}

/// Keeps the change.
pub async fn confirm(app: &App, caller: &Caller, change: u64) -> Result<(), Problem> {
    let (name, revision) = {
        let local = app.followed.local();
        let Some((name, held, kept)) = local.confirms().find(|(_, _, kept)| kept.change == change) else {
            return Err(Problem::not_found(format!(
                "change {change} waits for no confirmation: it has it, or was taken back, or never needed it"
            )));
        };
        permitted(&local, &caller.principal, held, change)?;
        (name.clone(), kept.revision)
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

/// The time by the clock that also says when a change was written: the bus's own. A gateway whose clock is wrong takes nothing back too
/// early or too late.
async fn bus_time(client: &Client) -> Option<SystemTime> {
    let asked = client.request(subjects::js_api("STREAM.INFO", streams::CATALOG.name), "".into());
    let answer = tokio::time::timeout(TIME_DEADLINE, asked).await.ok()?.ok()?;
    let answer: Value = serde_json::from_slice(&answer.payload).ok()?;
    humantime::parse_rfc3339(answer["ts"].as_str()?).ok()
}

/// Whether the time of a change that was written then is up.
fn is_over(written_at: SystemTime, within: Duration, now: SystemTime) -> bool {
    written_at.checked_add(within).is_some_and(|end| end <= now)
}

/// Takes back what nobody confirmed, for as long as the gateway lives.
pub async fn watch(app: App) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if app.followed.local().confirms().next().is_none() {
            continue;
        }
        // Without an answer nothing can be written either.
        let Some(now) = bus_time(&app.client).await else { continue };
        let over: Vec<(Name, u64, u64)> = app
            .followed
            .local()
            .confirms()
            .filter(|(_, held, kept)| is_over(kept.at, held.within, now))
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
        let Change { mut writes, .. } = app.catalog.undo(change, "", "").await?;
        never_restored(&app.followed.local(), &mut writes);
        let principal = Principal { id: "groupcast".to_owned(), role: Role::Admin, scope: None };
        let caller = Caller { principal, from: [0, 0, 0, 0].into(), token: None };
        // Of several gateways one is first; the others find that it is done.
        let key = Some(format!("confirm-{}-{revision}", name.id()));
        let asked = Asked { reason: reason.clone(), key, writes, plan: None, undo: true };
        submit::submit(app, &caller, asked).await
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

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::model::Group;

    fn user(id: &str) -> Principal {
        Principal { id: id.to_owned(), role: Role::Editor, scope: None }
    }

    fn put(id: &str) -> Write {
        Write::put(Document::Group(Group::new(id.parse().unwrap()).into()), Expected::Any)
    }

    #[test]
    fn a_confirmation_belongs_to_one_user_and_one_change() {
        let name = |by: &str, key: &str, id: &str| write("60s", &user(by), Some(key), &[put(id)]).unwrap().name;
        assert_eq!(name("ann", "k", "web"), name("ann", "k", "web"), "a repetition is the same");
        assert_ne!(name("ann", "k", "web"), name("bob", "k", "web"));
        assert_ne!(name("ann", "k", "web"), name("ann", "k", "db"));
        assert_ne!(name("ann", "k", "web"), name("ann", "l", "web"));
        let held = match write("60s", &user("ann"), None, &[]).unwrap().body {
            Body::Put(Document::Other { body, .. }) => read(&body),
            other => panic!("{other:?}"),
        };
        assert_eq!(held, Held { within: Duration::from_secs(60), by: "ann".to_owned() });
        for wrong in ["0s", "61m", "soon"] {
            assert!(write(wrong, &user("ann"), None, &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_the_clock_that_dated_the_change_counts() {
        let (at, second) = (SystemTime::UNIX_EPOCH + Duration::from_secs(1_000), Duration::from_secs(1));
        assert!(!is_over(at, 10 * second, at + 9 * second) && is_over(at, 10 * second, at + 10 * second));
        assert!(!is_over(at, 10 * second, at - second), "a bus whose clock was set back waits longer, and not for ever");
    }
}
