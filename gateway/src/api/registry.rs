//! Workloads and hosts: read here, registered by agents and sources.

use axum::Json;
use axum::extract::State;
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::model::Workload;
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
    /// The groups it has, in the order in which they are asked; only when one workload is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<HasGroup>>,
}

impl ShownWorkload {
    fn new(workload: &Workload, groups: Option<Vec<HasGroup>>) -> Self {
        let document = serde_json::to_value(workload.node()).unwrap_or_default();
        Self { format_version: FORMAT_VERSION.to_owned(), document, groups }
    }
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct OnHost {
    /// Only those on this host.
    pub host: Option<String>,
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
    Ok(Json(Listed::new(page.cut(workloads, |w| w.id.as_str(), |w| ShownWorkload::new(w, None))?)))
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
    let has = world.groups_of(workload);
    let groups = has.iter().map(|(stored, reach)| HasGroup { group: stored.value.id.to_string(), scope: reach.to_string() });
    Ok(Json(ShownWorkload::new(workload, Some(groups.collect()))))
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
    let (mut seen, mut known) = tokio::join!(registrations::seen(app, enrolled), app.progress.hosts(named));
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
