//! What the enforcement says when it is asked.

use std::collections::{BTreeMap, BTreeSet};
use std::time::UNIX_EPOCH;

use actix::prelude::*;
use groupcast_enforce::settings::{Attachment, Mode};
use groupcast_policy::doc::Content;
use groupcast_policy::ids::WorkloadId;
use groupcast_policy::net::Family;
use groupcast_policy::resolve::resolve;
use groupcast_policy::topic::{Scope, Topic};

use super::Enforcement;
use crate::explain::{Situation, explain};
use crate::holder::Holder;
use crate::host;
use crate::netlink::{Counted, Foreign};
use crate::report::{Enforced, Explanation, Ruleset, Standing};

// ---- messages

#[derive(Message)]
#[rtype(result = "Enforced")]
pub struct AskEnforced;

#[derive(Message)]
#[rtype(result = "Result<Ruleset, String>")]
pub struct AskRuleset;

/// What rules have met.
#[derive(Message)]
#[rtype(result = "Result<Vec<Counted>, String>")]
pub struct AskCounters;

/// What others have that interferes.
#[derive(Message)]
#[rtype(result = "Foreign")]
pub struct AskForeign;

/// Whether the workload's policy is in force.
#[derive(Message)]
#[rtype(result = "Standing")]
pub struct AskStanding(pub WorkloadId);

#[derive(Message)]
#[rtype(result = "Result<Explanation, String>")]
pub struct AskExplanation {
    pub from: String,
    pub to: String,
    pub traffic: String,
}

// ---- answers

const STALE: &str = "the kernel holds a later policy than the disk, and keeps it until the bus is heard";

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    /// Workloads that are not enforced, and why.
    fn refused(&self) -> BTreeMap<WorkloadId, String> {
        let suspended = self.suspended.iter().filter_map(|(id, attached)| Some((id.clone(), self.misfit(id, attached)?)));
        let refused = self.keeper.refused().iter().map(|refusal| (refusal.workload().clone(), refusal.to_string()));
        refused.chain(suspended).collect()
    }

    /// What keeps the kernel from doing as the policy says.
    fn hindrances(&self) -> Vec<String> {
        let mut found = Vec::new();
        if let Some((mode, reason)) = &self.mode {
            found.push(format!("the operator ordered {mode}: {reason}"));
        } else if self.configured.mode == Mode::Audit {
            found.push("the host is audited by its configuration: what is denied is logged and passes".into());
        }
        if let Some(error) = &self.last_error {
            found.push(format!("the kernel refuses what is newest: {error}"));
        }
        if self.keeper.is_stale() {
            found.push(STALE.into());
        }
        found.extend(self.misplaced());
        if self.overdue {
            found.push("only the safe part of the newest change is in force: topics it names have not arrived".into());
        }
        found
    }

    fn standing(&self, workload: &WorkloadId) -> Standing {
        if let Some(why) = self.refused().remove(workload) {
            return Standing::Refused(why);
        }
        if let Some(error) = &self.last_error {
            return Standing::Waiting(format!("the kernel refuses it: {error}"));
        }
        if self.keeper.is_stale() {
            return Standing::Waiting(format!("{STALE}: workload {workload} is as it was before, closed if it was not attached"));
        }
        let documents = self.keeper.in_force();
        let Some(Content::Host(placements)) = documents.get(&Topic::Host(self.host.clone())).and_then(|d| d.content()) else {
            return Standing::Waiting(format!("topic host.{} has not arrived: nothing of workload {workload} passes", self.host));
        };
        let Some(placement) = placements.get(workload) else {
            return Standing::Waiting(format!("workload {workload} is not registered on this host: nothing of it passes"));
        };
        let spaces = placement.space.iter().map(|id| Scope::Space(id.clone()));
        let apps = placement.app.iter().map(|id| Scope::App(id.clone()));
        let mut groups: Vec<_> = placement.groups.iter().cloned().collect();
        let mut missing = Vec::new();
        for topic in [Scope::Global].into_iter().chain(spaces).chain(apps).map(Topic::Scope) {
            match documents.get(&topic).map(|document| document.content()) {
                Some(Some(Content::Scope(bound))) => {
                    let of_phase = bound.iter().filter(|(_, phases)| phases.contains(placement.phase));
                    groups.extend(of_phase.map(|(group, _)| group.clone()));
                }
                Some(_) => {}
                None => missing.push(topic),
            }
        }
        missing.extend(groups.into_iter().map(Topic::Rules).filter(|topic| !documents.contains_key(topic)));
        match missing.first() {
            Some(topic) => Standing::Waiting(format!("topic {topic} has not arrived: nothing of workload {workload} passes")),
            None => Standing::Enforced,
        }
    }
}

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    /// The families that workloads behind interfaces have addresses of.
    fn forwarded_families(&self) -> BTreeSet<Family> {
        let Some(Content::Host(placements)) =
            self.keeper.in_force().get(&Topic::Host(self.host.clone())).and_then(|held| held.content())
        else {
            return BTreeSet::new();
        };
        let behind = self.keeper.engine().attachments().iter().filter(|(_, held)| held.attachment != Attachment::Host);
        let addresses = behind.filter_map(|(id, _)| placements.get(id)).flat_map(|placement| &placement.addresses);
        addresses.map(|prefix| prefix.family()).collect()
    }
}

impl<E: Holder + Unpin + 'static> Handler<AskEnforced> for Enforcement<E> {
    type Result = MessageResult<AskEnforced>;

    fn handle(&mut self, _: AskEnforced, _: &mut Self::Context) -> Self::Result {
        let (mode, reason) = self.mode.clone().unwrap_or(("enforce".into(), String::new()));
        let since_1970 = |time: std::time::SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut topics: Vec<String> = self.keeper.in_force().keys().map(ToString::to_string).collect();
        topics.sort_unstable();
        MessageResult(Enforced {
            host: self.host.to_string(),
            stamp: self.keeper.engine().stamp().number(),
            commit: self.in_force.0,
            change: self.in_force.1,
            heard_change: self.taken.1,
            lag_ms: self.behind_since.map_or(0, |since| since.elapsed().as_millis() as u64),
            last_change_at: self.last_change.map(since_1970),
            overdue: self.overdue,
            mode,
            reason,
            state: self.host_state().name().to_owned(),
            topics,
            workloads: self.attachments(),
            refused: self.refused().into_values().chain(self.misplaced()).collect(),
            last_error: self.last_error.clone(),
            missing_interfaces: self.absent().map(|(_, why)| why).collect(),
            unsaved: self.disk_error.clone(),
            missing_features: self.missing_features.clone(),
            counts: self.keeper.counts,
        })
    }
}

impl<E: Holder + Unpin + 'static> Handler<AskRuleset> for Enforcement<E> {
    type Result = Result<Ruleset, String>;

    fn handle(&mut self, _: AskRuleset, _: &mut Self::Context) -> Self::Result {
        let there = self.keeper.read().map_err(|error| error.to_string())?.unwrap_or_default();
        let wanted = self.keeper.engine().actual();
        let text = groupcast_enforce::text::Script { name: &self.table, table: wanted }.to_string();
        Ok(Ruleset { wanted: text, differences: wanted.differences(&there) })
    }
}

impl<E: Holder + Unpin + 'static> Handler<AskStanding> for Enforcement<E> {
    type Result = MessageResult<AskStanding>;

    fn handle(&mut self, AskStanding(workload): AskStanding, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.standing(&workload))
    }
}

impl<E: Holder + Unpin + 'static> Handler<AskExplanation> for Enforcement<E> {
    type Result = Result<Explanation, String>;

    fn handle(&mut self, asked: AskExplanation, _: &mut Self::Context) -> Self::Result {
        let situation = Situation {
            host: &self.host,
            documents: self.keeper.in_force(),
            attachments: self.keeper.engine().attachments(),
            hindrances: self.hindrances(),
            refused: self.refused(),
        };
        let mut told = explain(&situation, &asked.from, &asked.to, &asked.traffic)?;
        let missing = resolve(&self.host, self.keeper.in_force()).missing;
        told.notes.extend(missing.iter().map(|topic| format!("topic {topic} has not arrived: what it could allow is denied")));
        Ok(told)
    }
}

impl<E: Holder + Unpin + 'static> Handler<AskCounters> for Enforcement<E> {
    type Result = Result<Vec<Counted>, String>;

    fn handle(&mut self, _: AskCounters, _: &mut Self::Context) -> Self::Result {
        self.keeper.enforcer().counters().map_err(|error| error.to_string())
    }
}

impl<E: Holder + Unpin + 'static> Handler<AskForeign> for Enforcement<E> {
    type Result = MessageResult<AskForeign>;

    fn handle(&mut self, _: AskForeign, _: &mut Self::Context) -> Self::Result {
        let mask = self.configured.mark.mask();
        let families = self.forwarded_families();
        let mut foreign = self.keeper.enforcer().foreign(mask);
        // A dry run has no machine around it.
        if !self.present.names.is_empty() {
            foreign.forwarding = families.into_iter().filter_map(host::not_forwarding).collect();
        }
        MessageResult(foreign)
    }
}
