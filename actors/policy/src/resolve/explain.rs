//! Why a host's policy says what it says: the verdict with its evidence, from the same resolved documents that the kernel enforces.

use std::fmt;
use std::net::IpAddr;

use super::HostPolicy;
use crate::doc::Placement;
use crate::ids::{GroupId, WorkloadId};
use crate::model::Tier;
use crate::packet::{Payload, family_of};
use crate::rule::{Action, Direction, Remote, Rule};
use crate::topic::Scope;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    Rule(Box<Deciding>),
    /// No rule of the workload's groups allows it.
    NothingAllows,
    /// The direction is not enforced for this workload.
    NotEnforced,
    /// A scope or the rules of a group are not here: they could deny.
    Incomplete,
    /// The host's topic does not name the workload.
    UnknownWorkload,
}

/// The rule that decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deciding {
    pub group: GroupId,
    /// Where the group is bound: `global`, `space:ID`, `app:ID`, `workload:ID`.
    pub scope: String,
    /// The scope that binds it; `None`: the workload's own entry.
    pub bound_by: Option<Scope>,
    pub rule: Rule,
    /// It names a group whose members are not known here, and so denies every remote.
    pub unknown_remote: bool,
}

/// What one end of a flow says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    pub workload: WorkloadId,
    pub direction: Direction,
    pub allowed: bool,
    pub why: Why,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workload, direction, .. } = self;
        write!(f, "{} at {direction} of {workload}: ", if self.allowed { "allowed" } else { "denied" })?;
        match &self.why {
            Why::Rule(deciding) => {
                let Deciding { group, scope, rule, unknown_remote, .. } = &**deciding;
                write!(f, "group {group} ({scope}) says {rule} (in logs: {group}/{})", rule.key())?;
                let unknown =
                    if *unknown_remote { "; the group it names is not known here, so it denies every remote" } else { "" };
                f.write_str(unknown)
            }
            Why::NothingAllows => f.write_str("no rule allows it"),
            Why::NotEnforced => write!(f, "{direction} is not enforced there"),
            Why::Incomplete => f.write_str("something of its policy is not here yet, and could deny"),
            Why::UnknownWorkload => f.write_str("this host does not know the workload"),
        }
    }
}

impl HostPolicy<'_> {
    /// [`HostPolicy::verdict`] with its reason.
    pub fn explain(&self, workload: &WorkloadId, direction: Direction, remote: IpAddr, payload: &Payload) -> Told {
        let told = |allowed, why| Told { workload: workload.clone(), direction, allowed, why };
        let Some(resolved) = self.workloads.get(workload) else { return told(false, Why::UnknownWorkload) };
        let enforced = resolved.placement.enforced;
        let is_enforced = match direction {
            Direction::Ingress => enforced.ingress,
            Direction::Egress => enforced.egress,
        };
        if !is_enforced {
            return told(true, Why::NotEnforced);
        }
        let profile = &self.profiles[resolved.profile];
        let deciding = |action: Action| {
            Tier::ALL.into_iter().find_map(|tier| {
                profile.tier(tier).iter().find_map(|group| {
                    let rules = self.groups.get(group)?.rules(action, direction);
                    let rule = rules.iter().find(|rule| {
                        rule.matches_payload(direction, family_of(remote), payload) && self.remote_matches(rule, remote)
                    })?;
                    let unknown_remote =
                        matches!(&rule.remote, Remote::Group(named) if self.remotes.get(named).copied().flatten().is_none());
                    let (scope, bound_by) = Self::bound(resolved.placement, tier)?;
                    Some(Box::new(Deciding { group: group.clone(), scope, bound_by, rule: rule.clone(), unknown_remote }))
                })
            })
        };
        if let Some(denies) = deciding(Action::Deny) {
            return told(false, Why::Rule(denies));
        }
        if profile.incomplete {
            return told(false, Why::Incomplete);
        }
        match deciding(Action::Allow) {
            Some(allows) => told(true, Why::Rule(allows)),
            None => told(false, Why::NothingAllows),
        }
    }

    fn bound(placement: &Placement, tier: Tier) -> Option<(String, Option<Scope>)> {
        let scope = match tier {
            Tier::Global => Scope::Global,
            Tier::Space => Scope::Space(placement.space.clone()?),
            Tier::App => Scope::App(placement.app.clone()?),
            Tier::Workload => return Some((format!("workload:{}", placement.workload), None)),
        };
        let text = match &scope {
            Scope::Global => "global".to_owned(),
            Scope::Space(id) => format!("space:{id}"),
            Scope::App(id) => format!("app:{id}"),
        };
        Some((text, Some(scope)))
    }
}
