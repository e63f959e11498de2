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
use super::{App, FORMAT_VERSION, Listed, Page};
use crate::problem::{Problem, Reading, ReadingOne};

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
    pub workloads: Vec<HostWorkload>,
}

impl ShownHost {
    fn new(host: &HostId, entry: &groupcast_control::document::HostEntry) -> Self {
        let workload =
            |(network, workload): &(String, String)| HostWorkload { network: network.clone(), workload: workload.clone() };
        Self {
            format_version: FORMAT_VERSION.to_owned(),
            host: host.to_string(),
            workloads: entry.workloads.iter().map(workload).collect(),
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
    let local = app.followed.local();
    Ok(Json(Listed::new(page.cut(
        local.hosts().iter(),
        |(host, _)| host.as_str(),
        |(host, entry)| ShownHost::new(host, entry),
    )?)))
}

/// Reads one host.
#[utoipa::path(get, path = "/v1/hosts/{id}", tag = "reading", security(("token" = [])), params(("id" = String, Path)),
    responses((status = 200, body = ShownHost), ReadingOne))]
pub async fn get_host(State(app): State<App>, _: Caller, Named(id): Named) -> Result<Json<ShownHost>, Problem> {
    let id = HostId::new(&id).map_err(|error| Problem::bad_request(error.to_string()))?;
    let local = app.followed.local();
    let entry = local.hosts().get(&id).ok_or_else(|| Problem::not_found(format!("host {id} is not registered")))?;
    Ok(Json(ShownHost::new(&id, entry)))
}
