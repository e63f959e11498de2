//! Workloads and hosts: read here, registered by agents and sources.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use groupcast_policy::ids::{GroupId, HostId, WorkloadId};
use groupcast_policy::model::{Group, Stored, Target, Workload, World};
use groupcast_policy::oracle::Reach;
use groupcast_policy::written::Write;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::access::Caller;
use super::body::{Named, Queried};
use super::{App, FORMAT_VERSION, Listed, Page, registrations};
use crate::problem::{Problem, Reading, ReadingOne};
use crate::progress::HostStanding;

/// A group and why a workload has it.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct HasGroup {
    pub group: String,
    pub scope: String,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ShownWorkload {
    pub format_version: String,
    #[schema(value_type = Object)]
    pub document: Value,
    /// The groups it has, in the order in which they are asked; in a list only with `groups=true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<HasGroup>>,
}

impl ShownWorkload {
    fn new(workload: &Workload, groups: Option<Vec<HasGroup>>) -> Self {
        let document = serde_json::to_value(workload.node()).unwrap_or_default();
        Self { format_version: FORMAT_VERSION.to_owned(), document, groups }
    }
}

/// Groups by where they are bound, so that a page of workloads does not ask every group for each of them.
struct Bound<'w> {
    world: &'w World,
    everywhere: Vec<&'w Stored<Group>>,
    by_place: BTreeMap<Target, Vec<&'w Stored<Group>>>,
}

impl<'w> Bound<'w> {
    fn of(world: &'w World) -> Self {
        let mut bound = Self { world, everywhere: Vec::new(), by_place: BTreeMap::new() };
        for stored in world.catalogue.groups.values() {
            for binding in &stored.value.bindings {
                match &binding.target {
                    Target::Global | Target::Selector(_) => bound.everywhere.push(stored),
                    place => bound.by_place.entry(place.clone()).or_default().push(stored),
                }
            }
        }
        bound
    }

    fn groups(&self, workload: &Workload) -> Vec<HasGroup> {
        let space = workload.space.clone().map(Target::Space);
        let app = workload.app.clone().map(Target::App);
        let places = [space, app, Some(Target::Workload(workload.id.clone()))].into_iter().flatten();
        let own = workload.groups.iter().filter_map(|id| self.world.catalogue.groups.get(id));
        let bound: Vec<_> = places.filter_map(|place| self.by_place.get(&place)).flatten().copied().collect();
        let candidates: BTreeMap<_, _> =
            self.everywhere.iter().copied().chain(bound).chain(own).map(|stored| (&stored.value.id, stored)).collect();
        let mut found: Vec<(Reach, &GroupId)> = Vec::new();
        for (id, stored) in candidates {
            found.extend(self.world.reaches(&stored.value, workload).into_iter().map(|reach| (reach, id)));
        }
        found.sort_by(|(a, x), (b, y)| (a.tier(), x, a).cmp(&(b.tier(), y, b)));
        found.into_iter().map(|(reach, id)| HasGroup { group: id.to_string(), scope: reach.to_string() }).collect()
    }
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct OnHost {
    /// Only those on this host.
    pub host: Option<String>,
    /// `true`: with the groups each has, and why.
    pub groups: Option<bool>,
}

/// Lists workloads in the order of their ids.
#[utoipa::path(get, path = "/v1/workloads", tag = "reading", security(("token" = [])), params(Page, OnHost), responses(
    (status = 200, body = Listed<ShownWorkload>), Reading,
))]
pub async fn list_workloads(
    State(app): State<App>,
    _: Caller,
    Queried(page): Queried<Page>,
    Queried(on): Queried<OnHost>,
) -> Result<Json<Listed<ShownWorkload>>, Problem> {
    let local = app.followed.local();
    let wanted = |workload: &&std::sync::Arc<Workload>| on.host.as_deref().is_none_or(|host| workload.host.as_str() == host);
    let workloads = local.world().registry.workloads.values().filter(wanted);
    let bound = on.groups.unwrap_or(false).then(|| Bound::of(local.world()));
    let groups = |workload: &Workload| bound.as_ref().map(|bound| bound.groups(workload));
    Ok(Json(Listed::new(page.cut(workloads, |w| w.id.as_str(), |w| ShownWorkload::new(w, groups(w)))?)))
}

/// Reads one workload with the groups it has, and why.
#[utoipa::path(get, path = "/v1/workloads/{id}", tag = "reading", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = ShownWorkload), ReadingOne))]
pub async fn get_workload(State(app): State<App>, _: Caller, Named(id): Named) -> Result<Json<ShownWorkload>, Problem> {
    let id = WorkloadId::new(&id).map_err(|error| Problem::bad_request(error.to_string()))?;
    let local = app.followed.local();
    let world = local.world();
    let workload =
        world.registry.workloads.get(&id).ok_or_else(|| Problem::not_found(format!("workload {id} is not registered")))?;
    Ok(Json(ShownWorkload::new(workload, Some(Bound::of(world).groups(workload)))))
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct HostWorkload {
    pub network: String,
    pub workload: String,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ShownHost {
    pub format_version: String,
    pub host: String,
    /// Of one that enrolled itself: `live`, `suspect`, `frozen`, or `unknown` while no controller leads. `placed` if a source says where
    /// its workloads are and nobody expects to hear from it.
    pub state: String,
    /// Since when its entry is as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Milliseconds since it was last heard of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms: Option<u64>,
    pub workloads: Vec<HostWorkload>,
    /// What the host does, as its agent says; nothing where no controller has heard of it, or none answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing: Option<HostStanding>,
}

impl ShownHost {
    fn new(host: &HostId, entry: &groupcast_control::document::HostEntry) -> Self {
        let workload =
            |(network, workload): &(String, String)| HostWorkload { network: network.clone(), workload: workload.clone() };
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            host: host.to_string(),
            state: if entry.enrolled.is_some() { "unknown" } else { "placed" }.to_owned(),
            since: None,
            heard_ms: None,
            workloads: entry.workloads.iter().map(workload).collect(),
            standing: None,
        }
    }
}

/// Fills in what only controllers know.
async fn with_states(app: &App, hosts: &mut [ShownHost]) {
    let enrolled = hosts.iter().filter(|host| host.state != "placed").map(|host| host.host.clone()).collect();
    let named = hosts.iter().map(|host| host.host.clone()).collect();
    let (mut seen, known) = tokio::join!(registrations::seen(app, enrolled), app.progress.hosts(named));
    let mut known = known.unwrap_or_default();
    for host in hosts {
        host.standing = known.remove(&host.host);
        if let Some(seen) = seen.remove(&host.host) {
            (host.state, host.since, host.heard_ms) = (seen.state, Some(seen.since), Some(seen.heard_ms));
        }
    }
}

/// Lists hosts in the order of their ids.
#[utoipa::path(get, path = "/v1/hosts", tag = "reading", security(("token" = [])), params(Page), responses(
    (status = 200, body = Listed<ShownHost>), Reading,
))]
pub async fn list_hosts(
    State(app): State<App>,
    _: Caller,
    Queried(page): Queried<Page>,
) -> Result<Json<Listed<ShownHost>>, Problem> {
    let (mut hosts, next) = {
        let local = app.followed.local();
        page.cut(local.hosts().iter(), |(host, _)| host.as_str(), |(host, entry)| ShownHost::new(host, entry))?
    };
    with_states(&app, &mut hosts).await;
    Ok(Json(Listed::new((hosts, next))))
}

/// Reads one host.
#[utoipa::path(get, path = "/v1/hosts/{id}", tag = "reading", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = ShownHost), ReadingOne))]
pub async fn get_host(State(app): State<App>, _: Caller, Named(id): Named) -> Result<Json<ShownHost>, Problem> {
    let id = HostId::new(&id).map_err(|error| Problem::bad_request(error.to_string()))?;
    let host = app.followed.local().hosts().get(&id).map(|entry| ShownHost::new(&id, entry));
    let mut host = host.ok_or_else(|| Problem::not_found(format!("host {id} is not registered")))?;
    with_states(&app, std::slice::from_mut(&mut host)).await;
    Ok(Json(host))
}
