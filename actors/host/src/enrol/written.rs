//! What a host is to enrol, as people write it, and the same checked.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use groupcast_messages::RegisterWorkload;
use groupcast_policy::doc::Phase;
use groupcast_policy::ids::{InvalidId, NetworkId, WorkloadId};
use groupcast_policy::net::Prefix;
use serde::{Deserialize, Serialize};

/// As `agent.toml`, the local API and the disk say it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenEnrolment {
    pub workload: String,
    /// What a workload of the kind may be.
    pub template: String,
    pub network: String,
    /// Of the machine itself: those of its interfaces, if none are named.
    #[serde(default)]
    pub addresses: BTreeSet<IpAddr>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub space: Option<String>,
    #[serde(default)]
    pub app: Option<String>,
    /// Of a workload that is being staged, not run.
    #[serde(default)]
    pub staging: bool,
}

/// The same, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enrolment {
    pub template: String,
    pub asked: RegisterWorkload,
}

impl WrittenEnrolment {
    pub fn check(&self) -> Result<Enrolment, String> {
        let id = |error: InvalidId| error.to_string();
        groupcast_policy::ids::TemplateId::new(&self.template).map_err(id)?;
        let asked = RegisterWorkload {
            workload: WorkloadId::new(&self.workload).map_err(id)?,
            network: NetworkId::new(&self.network).map_err(id)?,
            addresses: self.addresses.iter().map(|address| Prefix::host(*address)).collect(),
            labels: self.labels.clone(),
            space: self.space.as_deref().map(str::parse).transpose().map_err(id)?,
            app: self.app.as_deref().map(str::parse).transpose().map_err(id)?,
            phase: if self.staging { Phase::Staging } else { Phase::Running },
            incarnation: None,
        };
        Ok(Enrolment { template: self.template.clone(), asked })
    }
}
