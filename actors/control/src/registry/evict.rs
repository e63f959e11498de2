//! Hosts that enrol, and what is taken from them again when it is no longer allowed. Both go by what was granted at a time, so both
//! are written only if the host's entry is still the one that was read before that.

use groupcast_bus_config::subjects::RegistryKey;
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use groupcast_policy::model::Workload;

use super::claims::Whose;
use super::plan::{Plan, Rewrite, Wanted};
use super::{Elsewhere, Enrolment, Error, Fate, Registered, Registry};
use crate::log::Entry;

/// A host's entry as it was before what the host asks for was judged.
pub struct Before {
    entry: Option<Entry>,
    /// Takes what was not looked up for absent.
    presumes: bool,
}

/// What a host has enrolled by itself.
pub struct OwnWorkloads {
    /// Of the host's entry.
    pub sequence: u64,
    pub workloads: Vec<Workload>,
}

impl Registry {
    pub async fn before(&self, host: &HostId, presumes: bool) -> Result<Before, Error> {
        let entry = self.log.last(&RegistryKey::Host(host.clone()).subject()).await?;
        Ok(Before { entry, presumes })
    }

    /// The host enrols itself with these workloads, beside those it has from the same boot. What is left of an earlier one goes.
    /// Nothing is written, and `None` returned, if the host's entry is another by now: then judge again.
    pub async fn enrol(
        &self,
        host: &HostId,
        before: Before,
        enrolment: &Enrolment,
        workloads: &[Workload],
    ) -> Result<Option<Registered>, Error> {
        enrolment.limits.judge_request(host, workloads)?;
        let wanted = Wanted { enrolment: Some(enrolment), ..Wanted::new(host, workloads)? };
        let (key, mut plan) = (RegistryKey::Host(host.clone()), Plan { presumes: before.presumes, ..self.plan() });
        plan.found.insert(key.clone(), before.entry);
        let incarnations = plan.register(&wanted, Elsewhere::Refuse).await?;
        plan.rewrite = Some(Rewrite::Along(key));
        let written = self.carry_out(plan, "enrolled by its host").await?;
        Ok(written.map(|(sequence, cost)| Registered { sequence, incarnations, cost }))
    }

    /// What a host has enrolled; nothing for one that has no entry.
    pub async fn own_workloads(&self, host: &HostId) -> Result<Option<OwnWorkloads>, Error> {
        let mut plan = self.plan();
        let entry = plan.host(host).await?;
        let found = plan.found.get(&RegistryKey::Host(host.clone())).and_then(Option::as_ref);
        let Some(sequence) = found.filter(|found| !found.payload.is_empty()).map(|found| found.sequence) else {
            return Ok(None);
        };
        if entry.enrolled.is_none() {
            return Ok(None);
        }
        let (own, _) = plan.own_workloads(&entry).await?;
        let mut workloads = Vec::with_capacity(own.len());
        for (_, id) in own {
            workloads.extend(plan.workload(&id)?.filter(|workload| workload.host == *host));
        }
        Ok(Some(OwnWorkloads { sequence, workloads }))
    }

    /// Removes some of what a host has enrolled, if its entry is still the one at this sequence.
    pub async fn evict(
        &self,
        host: &HostId,
        sequence: u64,
        workloads: &[(NetworkId, WorkloadId)],
        cause: &str,
    ) -> Result<Fate, Error> {
        let mut plan = self.plan();
        if plan.pinned(host, sequence).await?.is_none() {
            return Ok(Fate::Spared);
        }
        plan.remove(host, workloads, Whose::Hosts, false).await?;
        Ok(self.carry_out(plan, cause).await?.map_or(Fate::Spared, |_| Fate::Done))
    }
}
