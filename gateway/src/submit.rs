//! The one way a change goes: everything is judged against the very versions it replaces, all that is wrong is told at once, and it is
//! written whole or not at all.

use std::time::Duration;

use axum::http::StatusCode;
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::catalog::{self, Accepted, Catalog};
use groupcast_control::change::{Body, Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_policy::check;
use groupcast_policy::model::{Event, Owner, World};
use groupcast_policy::rule::Remote;
use groupcast_policy::written::{Fault, Problem as Wrong};
use tokio::time::Instant;

use crate::follow::Followed;
use crate::local::{Kept, Local};
use crate::plan;
use crate::problem::{Item, Problem, quoted};
use crate::token::{Principal, Role};

/// How long a change that nobody conditioned is tried again while others write the same documents.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a gateway waits to have read what it wrote itself.
pub const READ_BACK_DEADLINE: Duration = Duration::from_secs(5);

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

pub async fn submit(
    catalog: &Catalog,
    followed: &Followed,
    principal: &Principal,
    from: std::net::IpAddr,
    asked: Asked,
) -> Result<Done, Problem> {
    // Two users may choose the same key.
    let key = asked.key.as_ref().map(|key| format!("{}/{key}", principal.id));
    let mut change = Change { author: author(principal, from), reason: asked.reason.clone(), key, writes: asked.writes.clone() };
    change.encode()?;
    if let Some(accepted) = catalog.written_before(&change).await? {
        return Ok(done(accepted, Vec::new()));
    }
    let (deadline, mut is_fresh) = (Instant::now() + WRITE_DEADLINE, false);
    loop {
        let judged = judge(&followed.local(), principal, &asked);
        let judged = match judged {
            // What another gateway took a moment ago may not be here yet: nobody is refused for that.
            Err(_) if !std::mem::replace(&mut is_fresh, true) => {
                let end = catalog.end().await?;
                followed.reached(end, READ_BACK_DEADLINE).await;
                continue;
            }
            judged => judged?,
        };
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
                followed.reached(found, READ_BACK_DEADLINE).await;
            }
            Err(catalog::Error::Gone { .. } | catalog::Error::Busy) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn done(accepted: Accepted, warnings: Vec<Item>) -> Done {
    let Accepted { number, revisions, repeated } = accepted;
    Done { change: number, revisions, repeated, unchanged: false, warnings }
}

fn judge(local: &Local, principal: &Principal, asked: &Asked) -> Result<Judged, Problem> {
    permitted(local, principal, &asked.writes)?;
    stale(local, &asked.writes)?;
    let missing: Vec<&Name> = asked.writes.iter().filter(|write| is_missing(local, write)).map(|write| &write.name).collect();
    if let Some(first) = missing.first() {
        let item = |name: &&Name| Item { document: quoted(name), detail: "does not exist".to_owned(), ..Item::default() };
        return Err(Problem::not_found(format!("{first} does not exist")).with(missing.iter().map(item)));
    }
    let events: Vec<Event> = asked.writes.iter().filter_map(Write::event).collect();
    let contradictions = check::change(local.world(), &events);
    if !contradictions.is_empty() {
        return Err(Problem::of_documents(contradictions));
    }
    if asked.undo {
        depended_on(local.world(), &asked.writes)?;
    }
    if let Some(expected) = &asked.plan {
        let now = plan::plan(local, &asked.writes).plan;
        if now != *expected {
            let detail = "the plan is stale: what it was made on has changed, and it would mean something else now; plan again";
            return Err(Problem::new(StatusCode::PRECONDITION_FAILED, "stale-plan", detail));
        }
    }
    Ok(Judged {
        writes: pinned(local, &asked.writes),
        unchanged: unchanged(local, &asked.writes),
        warnings: warnings(local, &events),
    })
}

/// Whether the token may write these; source-owned documents are nobody's here.
fn permitted(local: &Local, principal: &Principal, writes: &[Write]) -> Result<(), Problem> {
    if principal.role < Role::Editor {
        return Err(Problem::forbidden("your token may only read: ask for one with role editor"));
    }
    let (mut owned, mut beyond): (Vec<Wrong>, Vec<Wrong>) = Default::default();
    // What holds a change to a confirmation belongs to the change.
    for write in writes.iter().filter(|write| write.name.kind != CatalogKind::Confirm) {
        let now = local.document(&write.name);
        let next = match &write.body {
            Body::Put(document) => Some(document),
            Body::Delete => None,
        };
        for document in now.iter().chain(next) {
            owned.extend(owned_elsewhere(&write.name, document));
        }
        if let Some(scope) = &principal.scope {
            beyond.extend(scope.beyond(&write.name, next, false));
            if let Some(now) = now.as_ref().filter(|_| beyond.is_empty()) {
                beyond.extend(scope.beyond(&write.name, Some(now), true));
            }
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
fn stale(local: &Local, writes: &[Write]) -> Result<(), Problem> {
    let mut items = Vec::new();
    for write in writes {
        let now = local.kept(&write.name);
        let detail = match (write.expected, now) {
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

fn is_missing(local: &Local, write: &Write) -> bool {
    write.body == Body::Delete && local.kept(&write.name).is_none()
}

/// The writes, each on condition that nobody has changed what was judged.
fn pinned(local: &Local, writes: &[Write]) -> Vec<Write> {
    let pin = |write: &Write| {
        let expected = local.kept(&write.name).map_or(Expected::Absent, |kept| Expected::Revision(kept.revision));
        Write { expected, ..write.clone() }
    };
    writes.iter().map(pin).collect()
}

/// The revisions there are, if nothing would change.
fn unchanged(local: &Local, writes: &[Write]) -> Option<Vec<u64>> {
    let same = |write: &Write| match &write.body {
        Body::Put(document) if local.document(&write.name).as_ref() == Some(document) => local.kept(&write.name),
        _ => None,
    };
    writes.iter().map(|write| same(write).map(|kept| kept.revision)).collect()
}

/// What is allowed but most probably not meant.
pub fn warnings(local: &Local, events: &[Event]) -> Vec<Item> {
    let mut after = None;
    let mut items = Vec::new();
    for event in events {
        let Event::Group { group, .. } = event else { continue };
        let after = after.get_or_insert_with(|| {
            let mut world = local.world().clone();
            events.iter().for_each(|event| world.apply(event));
            world
        });
        items.extend(check::unknown_remotes(after, group).into_iter().map(Item::from));
    }
    items
}

/// What the change created may be named by rules that came later: taking it away would change what they mean.
fn depended_on(world: &World, writes: &[Write]) -> Result<(), Problem> {
    let deleted: Vec<&Name> = writes.iter().filter(|w| w.body == Body::Delete).map(|w| &w.name).collect();
    let mut wrong = Vec::new();
    for stored in world.catalogue.groups.values() {
        let group = &stored.value;
        if writes.iter().any(|write| write.name == Name::group(&group.id)) {
            continue;
        }
        for (index, rule) in group.rules.iter().enumerate() {
            let Remote::Group(remote) = &rule.rule.remote else { continue };
            if let Some(name) = deleted.iter().find(|name| **name == &Name::group(remote)) {
                let message =
                    format!("cannot be taken back: rules[{index}] of group {} names it; remove that rule first", group.id);
                wrong.push(Wrong { fault: Fault::Conflict, document: quoted(name), rule: None, field: String::new(), message });
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(Problem::of_documents(wrong)) }
}
