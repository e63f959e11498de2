//! The one way a change goes: everything is judged against the very versions it replaces, all that is wrong is told at once, and it is
//! written whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::http::StatusCode;
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::catalog::{self, Accepted};
use groupcast_control::change::{Body, Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_policy::check;
use groupcast_policy::ids::GroupId;
use groupcast_policy::model::{Event, Owner, World};
use groupcast_policy::rule::Remote;
use groupcast_policy::written::{Fault, PROBLEMS_MAX, Problem as Wrong};
use tokio::time::Instant;

use crate::api::access::Caller;
use crate::api::{App, Shared};
use crate::basis::{Basis, Now};
use crate::follow::Followed;
use crate::heavy::Heavy;
use crate::local::Kept;
use crate::plan;
use crate::problem::{Item, Problem, quoted};
use crate::scope::Scope;
use crate::token::Principal;

/// Rules, bindings and members that are judged beside other requests; more are judged on a thread of their own.
const ITEMS_AT_ONCE_MAX: usize = 2_000;

/// How long a change that nobody conditioned is tried again while others write the same documents.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a gateway waits to have read what it or another wrote. One that has not by then cannot judge: another gateway may.
pub const READ_BACK_DEADLINE: Duration = Duration::from_secs(2);

/// What is to be written, for whom.
#[derive(Debug, Clone)]
pub struct Asked {
    pub reason: String,
    /// As the client chose it.
    pub key: Option<String>,
    pub writes: Vec<Write>,
    /// The plan this was decided on; refused if it would now mean something else.
    pub plan: Option<String>,
    /// It takes back another change, and must not take back more than that.
    pub undo: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    pub change: u64,
    /// In the order of what was asked.
    pub revisions: Vec<u64>,
    pub repeated: bool,
    /// Everything was so already: nothing was written.
    pub unchanged: bool,
    pub warnings: Vec<Item>,
}

/// Who asks, and from where: what AUDIT remembers.
pub fn author(principal: &Principal, from: std::net::IpAddr) -> String {
    format!("{} from {}", principal.id, from.to_canonical())
}

/// What is looked at under the lock: the change with the versions it replaces.
struct Judged {
    writes: Vec<Write>,
    unchanged: Option<Vec<u64>>,
    warnings: Vec<Item>,
}

pub async fn submit(app: &App, caller: &Caller, asked: Asked) -> Result<Done, Problem> {
    let Shared { catalog, followed, heavy, .. } = &**app;
    let principal = &caller.principal;
    // Two users may choose the same key.
    let key = asked.key.as_ref().map(|key| format!("{}/{key}", principal.id));
    let mut change =
        Change { author: author(principal, caller.from), reason: asked.reason.clone(), key, writes: asked.writes.clone() };
    change.encode()?;
    if let Some(accepted) = catalog.written_before(&change).await? {
        return Ok(done(accepted, Vec::new()));
    }
    let (deadline, mut is_fresh) = (Instant::now() + WRITE_DEADLINE, false);
    loop {
        let basis = Basis::of(&followed.local(), &asked.writes);
        let judged = judged(&basis, principal, &asked);
        let judged = match judged {
            // What another gateway took a moment ago may not be here yet: nobody is refused for that.
            Err(_) if !std::mem::replace(&mut is_fresh, true) => {
                let end = catalog.end().await?;
                read_up_to(followed, end).await?;
                continue;
            }
            judged => judged?,
        };
        if let Some(expected) = &asked.plan {
            is_planned(heavy, caller, basis, asked.writes.clone(), expected.clone()).await?;
        }
        if let Some(revisions) = judged.unchanged {
            let change = revisions.iter().copied().max().unwrap_or(0);
            return Ok(Done { change, revisions, repeated: false, unchanged: true, warnings: judged.warnings });
        }
        change.writes = judged.writes;
        match catalog.write(&change, None).await {
            Ok(accepted) => {
                // What was acknowledged is also shown by this gateway from now on.
                followed.reached(accepted.number, READ_BACK_DEADLINE).await;
                return Ok(done(accepted, judged.warnings));
            }
            Err(catalog::Error::Conflict { found, .. }) if Instant::now() < deadline => {
                // Judge again, on what the other wrote.
                read_up_to(followed, found).await?;
            }
            Err(catalog::Error::Gone { .. } | catalog::Error::Busy) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // Whoever conditioned nothing has not been overtaken: the documents are busy.
            Err(catalog::Error::Conflict { .. } | catalog::Error::Gone { .. }) if is_unconditional(&asked.writes) => {
                return Err(catalog::Error::Busy.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_unconditional(writes: &[Write]) -> bool {
    writes.iter().all(|write| write.expected == Expected::Any)
}

/// Waits until this gateway has read that far. One that does not follow would call its own blindness a change by somebody else.
async fn read_up_to(followed: &Followed, catalog: u64) -> Result<(), Problem> {
    if followed.reached(catalog, READ_BACK_DEADLINE).await {
        return Ok(());
    }
    let why = followed.lost().unwrap_or_else(|| "it is busy".to_owned());
    Err(Problem::unavailable(format!(
        "this gateway has not read what was written before ({why}): try again, or ask another gateway"
    )))
}

fn done(accepted: Accepted, warnings: Vec<Item>) -> Done {
    let Accepted { number, revisions, repeated } = accepted;
    Done { change: number, revisions, repeated, unchanged: false, warnings }
}

/// A change of many documents does not hold up the thread's other requests.
fn judged(basis: &Basis, principal: &Principal, asked: &Asked) -> Result<Judged, Problem> {
    if plan::items(&asked.writes) <= ITEMS_AT_ONCE_MAX {
        return judge(basis, principal, asked);
    }
    tokio::task::block_in_place(|| judge(basis, principal, asked))
}

/// Refuses a change that would mean something else than the plan it was decided on.
async fn is_planned(heavy: &Heavy, caller: &Caller, basis: Basis, writes: Vec<Write>, expected: String) -> Result<(), Problem> {
    let now = heavy.run(caller, move |goes_on| plan::plan(&basis, &writes, goes_on).map_err(Problem::from)).await?;
    if now.plan == expected {
        return Ok(());
    }
    let detail = "the plan is stale: what it was made on has changed, and it would mean something else now; plan again";
    Err(Problem::new(StatusCode::PRECONDITION_FAILED, "stale-plan", detail))
}

fn judge(basis: &Basis, principal: &Principal, asked: &Asked) -> Result<Judged, Problem> {
    permitted(basis, principal, &asked.writes)?;
    stale(basis, &asked.writes)?;
    let is_missing = |(write, now): &(&Write, &Now)| write.body == Body::Delete && now.kept.is_none();
    let missing: Vec<&Name> = basis.of_each(&asked.writes).filter(is_missing).map(|(write, _)| &write.name).collect();
    if let Some(first) = missing.first() {
        let item = |name: &&Name| Item { document: quoted(name), detail: "does not exist".to_owned(), ..Item::default() };
        return Err(Problem::not_found(format!("{first} does not exist")).with(missing.iter().map(item)));
    }
    let events: Vec<Event> = asked.writes.iter().filter_map(Write::event).collect();
    let contradictions = check::change(&basis.world, &events);
    if !contradictions.is_empty() {
        return Err(Problem::of_documents(contradictions));
    }
    if asked.undo {
        depended_on(&basis.world, &asked.writes)?;
    }
    Ok(Judged {
        writes: pinned(basis, &asked.writes),
        unchanged: unchanged(basis, &asked.writes),
        warnings: warnings(&basis.world, &events),
    })
}

/// Whether the token may write these; source-owned documents are nobody's here.
fn permitted(basis: &Basis, principal: &Principal, writes: &[Write]) -> Result<(), Problem> {
    principal.may_write()?;
    let allowed = principal.scope.as_ref().map(Scope::read);
    let (mut owned, mut beyond): (Vec<Wrong>, Vec<Wrong>) = Default::default();
    // What holds a change to a confirmation belongs to the change.
    for (write, now) in basis.of_each(writes).filter(|(write, _)| write.name.kind != CatalogKind::Confirm) {
        let now = &now.document;
        let next = match &write.body {
            Body::Put(document) => Some(document),
            Body::Delete => None,
        };
        for document in now.iter().chain(next) {
            owned.extend(owned_elsewhere(&write.name, document));
        }
        if let Some(scope) = &allowed {
            beyond.extend(scope.beyond(&write.name, next, false));
            if let Some(now) = now.as_ref().filter(|_| beyond.is_empty()) {
                beyond.extend(scope.beyond(&write.name, Some(now), true));
            }
        }
        if beyond.len() >= PROBLEMS_MAX || owned.len() >= PROBLEMS_MAX {
            break;
        }
    }
    if !beyond.is_empty() {
        return Err(Problem::forbidden(beyond[0].to_string()).with(beyond));
    }
    owned.dedup();
    if owned.is_empty() { Ok(()) } else { Err(Problem::of_documents(owned)) }
}

fn owned_elsewhere(name: &Name, document: &Document) -> Option<Wrong> {
    let Document::Group(group) = document else { return None };
    let Owner::Source(source) = &group.owner else { return None };
    let message = format!("belongs to source {source}: edit it there");
    Some(Wrong { fault: Fault::Conflict, document: quoted(name), rule: None, field: "owner".into(), message })
}

/// What the author did not see: every document that is another version than expected, with who wrote it.
fn stale(basis: &Basis, writes: &[Write]) -> Result<(), Problem> {
    let mut items = Vec::new();
    for (write, now) in basis.of_each(writes) {
        let detail = match (write.expected, &now.kept) {
            (Expected::Any, _) | (Expected::Absent, None) => continue,
            (Expected::Revision(expected), Some(kept)) if expected == kept.revision => continue,
            (Expected::Revision(expected), None) => {
                format!("{} does not exist (you expected revision {expected}): read it again and decide anew", write.name)
            }
            (_, Some(kept)) => changed_by(&write.name, kept),
        };
        items.push(Item { document: quoted(&write.name), detail, ..Item::default() });
    }
    match items.first() {
        None => Ok(()),
        Some(first) => Err(Problem::stale(first.detail.clone()).with(items)),
    }
}

fn changed_by(name: &Name, kept: &Kept) -> String {
    let at = humantime::format_rfc3339_millis(kept.at);
    let author = if kept.author.is_empty() { "somebody unknown" } else { &kept.author };
    let revision = kept.revision;
    format!("{name} was changed meanwhile, by {author} at {at} (revision {revision}): read it again and decide anew")
}

/// The writes, each on condition that nobody has changed what was judged.
fn pinned(basis: &Basis, writes: &[Write]) -> Vec<Write> {
    let pin = |(write, now): (&Write, &Now)| {
        let expected = now.kept.as_ref().map_or(Expected::Absent, |kept| Expected::Revision(kept.revision));
        Write { expected, ..write.clone() }
    };
    basis.of_each(writes).map(pin).collect()
}

/// The revisions there are, if nothing would change.
fn unchanged(basis: &Basis, writes: &[Write]) -> Option<Vec<u64>> {
    let same = |(write, now): (&Write, &Now)| match &write.body {
        Body::Put(document) if now.document.as_ref() == Some(document) => now.kept.as_ref().map(|kept| kept.revision),
        _ => None,
    };
    basis.of_each(writes).map(same).collect()
}

/// What is allowed but most probably not meant; not more than can be read.
pub fn warnings(world: &World, events: &[Event]) -> Vec<Item> {
    let mut written: BTreeMap<&GroupId, bool> = BTreeMap::new();
    for event in events {
        match event {
            Event::Group { group, .. } => _ = written.insert(&group.id, true),
            Event::GroupRemoved(id) => _ = written.insert(id, false),
            _ => {}
        }
    }
    let exists = |id: &GroupId| written.get(id).copied().unwrap_or_else(|| world.catalogue.groups.contains_key(id));
    let groups = events.iter().filter_map(|event| match event {
        Event::Group { group, .. } => Some(group),
        _ => None,
    });
    groups.flat_map(|group| check::unknown_remotes(exists, group)).take(PROBLEMS_MAX).map(Item::from).collect()
}

/// What the change created may be named by rules that came later: taking it away would change what they mean.
fn depended_on(world: &World, writes: &[Write]) -> Result<(), Problem> {
    let names = |w: &&Write| w.name.kind == CatalogKind::Group;
    let written: BTreeSet<&str> = writes.iter().filter(names).map(|w| w.name.id()).collect();
    let deleted: BTreeMap<&str, &Name> =
        writes.iter().filter(names).filter(|w| w.body == Body::Delete).map(|w| (w.name.id(), &w.name)).collect();
    let mut wrong = Vec::new();
    for stored in world.catalogue.groups.values() {
        let group = &stored.value;
        if written.contains(group.id.as_str()) {
            continue;
        }
        for (index, rule) in group.rules.iter().enumerate() {
            let Remote::Group(remote) = &rule.rule.remote else { continue };
            if let Some(name) = deleted.get(remote.as_str()) {
                let message =
                    format!("cannot be taken back: rules[{index}] of group {} names it; remove that rule first", group.id);
                wrong.push(Wrong { fault: Fault::Conflict, document: quoted(name), rule: None, field: String::new(), message });
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(Problem::of_documents(wrong)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was told that somebody had changed it meanwhile, though nobody had asked for a condition: the gateway had not read what was written.
    #[tokio::test(start_paused = true)]
    async fn a_gateway_that_does_not_follow_says_try_again_and_not_that_something_changed() {
        let problem = read_up_to(&Followed::default(), 7).await.unwrap_err();
        assert_eq!((problem.status, problem.retry_after), (503, Some(1)));
        assert!(problem.detail.contains("try again") && !problem.detail.contains("changed"), "{}", problem.detail);
        assert!(read_up_to(&Followed::default(), 0).await.is_ok());
        let write = |expected| Write { name: Name::new(CatalogKind::Group, "g").unwrap(), expected, body: Body::Delete };
        assert!(is_unconditional(&[write(Expected::Any)]));
        assert!(!is_unconditional(&[write(Expected::Any), write(Expected::Revision(1))]));
    }
}
