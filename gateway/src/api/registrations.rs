//! Who is registered and how they are, as the controller that leads knows it; and the word of an operator that silent hosts are gone.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::{Stream, StreamExt};
use groupcast_control::actors::liveness;
use groupcast_control::document::HostEntry;
use groupcast_policy::ids::{HostId, TemplateId};
use groupcast_policy::model::World;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::access::{Administrator, Caller};
use super::body::{self, Named, Queried};
use super::{App, FORMAT_VERSION, Listed, Page};
use crate::problem::{Problem, Reading, ReadingOne, Writing};
use crate::registrations::{HOSTS_MAX, Silent};

/// What happens within this time is told together: a fleet that comes or goes moves REGISTRY thousands of times.
const TOGETHER: Duration = Duration::from_millis(100);
/// While nobody leads nobody knows how hosts are, and nothing tells when somebody does: it is asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A workload as its host enrolled it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisteredWorkload {
    pub network: String,
    pub workload: String,
    pub addresses: Vec<String>,
    pub incarnation: u64,
    pub healthy: bool,
}

/// A host that enrolled itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    pub format_version: String,
    pub host: String,
    /// `live`, `suspect` (silent for a lease), `frozen` (suspect, and not deleted because too many are), or `unknown`: nobody leads.
    pub state: String,
    /// Since when its entry is as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Milliseconds since it was last heard of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms: Option<u64>,
    /// Which boot of the machine this is.
    pub boot: String,
    pub templates: Vec<String>,
    pub workloads: Vec<RegisteredWorkload>,
}

/// A template of which nothing is deleted: too many of its hosts are silent at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Frozen {
    pub template: String,
    pub missing: u64,
    pub hosts: u64,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FrozenTemplates {
    pub format_version: String,
    pub items: Vec<Frozen>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Confirmed {
    /// The silent hosts of this template are gone for good.
    pub template: String,
}

impl Registration {
    fn new(host: &HostId, entry: &HostEntry, world: &World) -> Option<Self> {
        let enrolled = entry.enrolled.clone()?;
        let workload = |(network, id): &(String, String)| {
            let held = world.registry.workloads.get(&id.parse().ok()?)?;
            let is_it = held.host == *host && held.network.as_str() == network;
            let held = is_it.then_some(held)?;
            Some(RegisteredWorkload {
                network: network.clone(),
                workload: id.clone(),
                addresses: held.addresses.iter().map(ToString::to_string).collect(),
                incarnation: held.incarnation,
                healthy: !held.unhealthy,
            })
        };
        Some(Self {
            format_version: FORMAT_VERSION.to_owned(),
            host: host.to_string(),
            state: "unknown".to_owned(),
            since: None,
            heard_ms: None,
            boot: enrolled.boot,
            templates: enrolled.templates,
            workloads: entry.workloads.iter().filter_map(workload).collect(),
        })
    }

    fn seen(&mut self, seen: Option<&liveness::ShownHost>) {
        let Some(seen) = seen else { return };
        self.state = seen.state.clone();
        self.since = Some(seen.since.clone());
        self.heard_ms = Some(seen.heard_ms);
    }
}

fn unavailable(silent: Silent) -> Problem {
    Problem::unavailable(silent.to_string())
}

/// How these hosts are, by name; nothing while nobody leads, which is no failure of who asks.
pub async fn seen(app: &App, hosts: Vec<String>) -> BTreeMap<String, liveness::ShownHost> {
    let mut all = BTreeMap::new();
    for hosts in hosts.chunks(HOSTS_MAX) {
        let Ok(seen) = app.registrations.hosts(hosts.to_vec()).await else { return BTreeMap::new() };
        all.extend(seen.into_iter().map(|host| (host.host.clone(), host)));
    }
    all
}

/// Lists the hosts that enrolled themselves, in the order of their ids.
#[utoipa::path(get, path = "/v1/registrations", tag = "reading", security(("token" = [])), params(Page), responses(
    (status = 200, body = Listed<Registration>), Reading,
))]
pub async fn list_registrations(
    State(app): State<App>,
    _: Caller,
    Queried(page): Queried<Page>,
) -> Result<Json<Listed<Registration>>, Problem> {
    let (mut items, next) = {
        let local = app.followed.local();
        let enrolled = local.hosts().iter().filter_map(|(host, entry)| Registration::new(host, entry, local.world()));
        page.cut(enrolled, |item| item.host.as_str(), |item| item)?
    };
    let seen = seen(&app, items.iter().map(|item| item.host.clone()).collect()).await;
    items.iter_mut().for_each(|item| item.seen(seen.get(&item.host)));
    Ok(Json(Listed::new((items, next))))
}

/// Reads one host that enrolled itself.
#[utoipa::path(get, path = "/v1/registrations/{id}", tag = "reading", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = Registration), ReadingOne))]
pub async fn get_registration(State(app): State<App>, _: Caller, Named(id): Named) -> Result<Json<Registration>, Problem> {
    let id = HostId::new(&id).map_err(|error| Problem::bad_request(error.to_string()))?;
    let item = {
        let local = app.followed.local();
        local.hosts().get(&id).and_then(|entry| Registration::new(&id, entry, local.world()))
    };
    let mut item = item.ok_or_else(|| Problem::not_found(format!("host {id} has not enrolled itself")))?;
    item.seen(seen(&app, vec![id.to_string()]).await.get(id.as_str()));
    Ok(Json(item))
}

/// Lists the templates of which nothing is deleted, because too many of their hosts are silent at once.
#[utoipa::path(get, path = "/v1/registrations-frozen", tag = "reading", security(("token" = [])), responses(
    (status = 200, body = FrozenTemplates), Reading,
))]
pub async fn list_frozen(State(app): State<App>, _: Caller) -> Result<Json<FrozenTemplates>, Problem> {
    let frozen = app.registrations.frozen().await.map_err(unavailable)?;
    let items =
        frozen.into_iter().map(|record| Frozen { template: record.template, missing: record.missing, hosts: record.hosts });
    Ok(Json(FrozenTemplates { format_version: FORMAT_VERSION.to_owned(), items: items.collect() }))
}

/// Confirms that the hosts of a template that are silent now are gone for good: they are deleted although they are many.
#[utoipa::path(post, path = "/v1/registrations-frozen", tag = "administration", security(("token" = [])), request_body = Confirmed,
    responses((status = 200, body = Confirmed), Writing))]
pub async fn confirm_frozen(
    State(app): State<App>,
    _: Administrator,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Confirmed>, Problem> {
    let bytes = body::read(&app, body, &headers, body::SMALL_BYTES_MAX).await?;
    let Confirmed { template } = body::json(&bytes)?;
    let id = TemplateId::new(&template).map_err(|error| Problem::bad_request(error.to_string()))?;
    app.registrations.confirm(&id).await.map_err(unavailable)?;
    Ok(Json(Confirmed { template }))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Beginning {
    /// `false`: only what changes from now on, not what there is.
    pub initial: Option<bool>,
}

/// Every host as it is, and again whenever its state or its workloads change: `registration` for one that enrolled itself, `placed` for
/// one of which a source speaks, `gone` when it is deleted.
#[utoipa::path(get, path = "/v1/registrations-watch", tag = "reading", security(("token" = [])), params(Beginning), responses(
    (status = 200, description = "Server-sent events: registration, placed, gone", body = Registration, content_type = "text/event-stream"),
    Reading,
))]
pub async fn watch_registrations(
    State(app): State<App>,
    caller: Caller,
    Queried(from): Queried<Beginning>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let permit = app.watchers.take(&caller.principal.id, caller.from).map_err(|full| full.problem("watches"))?;
    let end = caller.no_longer_good(app.clone());
    // Before the first look: what moves after it is seen.
    let moves = app.followed.moves();
    let mut told = Told::default();
    let begun = told.changed(&app).await;
    let waiting = if from.initial.unwrap_or(true) { begun } else { Vec::new() };
    // Who reads slowly is told the newest, and nothing is kept for them: what is another is found by comparing, when something moved.
    let events = futures::stream::unfold(
        (app, permit, moves, told, waiting),
        |(app, permit, mut moves, mut told, mut waiting)| async move {
            loop {
                if let Some(event) = waiting.pop() {
                    return Some((Ok(event), (app, permit, moves, told, waiting)));
                }
                tokio::select! {
                    moved = moves.changed() => moved.ok()?,
                    () = tokio::time::sleep(ASK_AGAIN), if told.is_in_doubt() => {}
                }
                tokio::time::sleep(TOGETHER).await;
                moves.mark_unchanged();
                waiting = told.changed(&app).await;
            }
        },
    );
    Ok(Sse::new(events.take_until(end)).keep_alive(KeepAlive::default()))
}

/// What somebody who watches was told.
#[derive(Default)]
struct Told {
    enrolled: BTreeMap<String, Registration>,
    /// Hosts of which a source speaks, and what is there.
    placed: BTreeMap<String, Vec<(String, String)>>,
}

impl Told {
    fn is_in_doubt(&self) -> bool {
        self.enrolled.values().any(|item| item.state == "unknown")
    }

    /// What is another than was told, last first.
    async fn changed(&mut self, app: &App) -> Vec<Event> {
        let mut now = Self::default();
        {
            let local = app.followed.local();
            for (host, entry) in local.hosts() {
                match Registration::new(host, entry, local.world()) {
                    Some(item) => _ = now.enrolled.insert(host.to_string(), item),
                    None => _ = now.placed.insert(host.to_string(), entry.workloads.clone()),
                }
            }
        }
        let seen = seen(app, now.enrolled.keys().cloned().collect()).await;
        let mut events = Vec::new();
        for (host, item) in &mut now.enrolled {
            item.seen(seen.get(host));
            // That it beats is no news.
            let heard_ms = item.heard_ms.take();
            if self.enrolled.get(host) != Some(item) {
                let shown = Registration { heard_ms, ..item.clone() };
                let data = serde_json::to_string(&shown).unwrap_or_default();
                events.push(Event::default().event("registration").data(data));
            }
        }
        let named =
            |kind: &str, host: &String| Event::default().event(kind).data(serde_json::json!({ "host": host }).to_string());
        let moved = now.placed.iter().filter(|(host, workloads)| self.placed.get(*host) != Some(*workloads));
        events.extend(moved.map(|(host, _)| named("placed", host)));
        let is_there = |host: &String| now.enrolled.contains_key(host) || now.placed.contains_key(host);
        let gone = self.enrolled.keys().chain(self.placed.keys()).filter(|host| !is_there(host));
        events.extend(gone.map(|host| named("gone", host)));
        *self = now;
        events.reverse();
        events
    }
}
