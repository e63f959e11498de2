//! What sets of workloads and addresses are called: a group where one is exactly that, else what is shortest.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::Snapshot;
use super::budget::{Budget, Exceeded};
use crate::ids::{GroupId, WorkloadId};
use crate::net::AddressSet;
use crate::rule::Remote;
use crate::text::address_text;

/// Most items that are listed before the rest is counted.
const LISTED_MAX: usize = 6;

fn list(items: &[String], what: &str, total: usize) -> String {
    match total {
        0..=LISTED_MAX => items.join(","),
        more => format!("{} and {} more {what}", items[..LISTED_MAX].join(","), more - LISTED_MAX),
    }
}

/// Many statements are about the same workloads: what was found out about them is remembered.
pub(super) struct Names<'s, 'w> {
    world: &'s Snapshot<'w>,
    /// By the place of the set, which is shared and outlives this.
    locals: HashMap<*const BTreeSet<WorkloadId>, String>,
    /// The groups that the rules of a workload name.
    named: BTreeMap<WorkloadId, Vec<&'w GroupId>>,
}

impl<'s, 'w> Names<'s, 'w> {
    pub fn new(world: &'s Snapshot<'w>) -> Self {
        Self { world, locals: HashMap::new(), named: BTreeMap::new() }
    }

    pub fn local(&mut self, workloads: &Arc<BTreeSet<WorkloadId>>, budget: &mut Budget<'_>) -> Result<String, Exceeded> {
        let place = Arc::as_ptr(workloads);
        if let Some(name) = self.locals.get(&place) {
            return Ok(name.clone());
        }
        let name = self.name_of(workloads, budget)?;
        self.locals.insert(place, name.clone());
        Ok(name)
    }

    fn name_of(&self, workloads: &BTreeSet<WorkloadId>, budget: &mut Budget<'_>) -> Result<String, Exceeded> {
        let Some(first) = workloads.first() else { return Ok("nothing".into()) };
        for group in self.world.groups(first) {
            budget.spend(1)?;
            // As many have it as there are here; if all of these do, it is exactly these.
            if self.world.count(group) == workloads.len() {
                budget.spend(workloads.len())?;
                if workloads.iter().all(|id| self.world.groups(id).binary_search(group).is_ok()) {
                    return Ok(format!("group:{group}"));
                }
            }
        }
        budget.spend(workloads.len())?;
        if workloads.len() > 1 && self.world.workloads().eq(workloads.iter()) {
            return Ok("every workload".into());
        }
        let names: Vec<String> = workloads.iter().take(LISTED_MAX).map(|id| format!("workload:{id}")).collect();
        Ok(list(&names, "workloads", workloads.len()))
    }

    pub fn remote(
        &mut self,
        workloads: &BTreeSet<WorkloadId>,
        addresses: &AddressSet,
        budget: &mut Budget<'_>,
    ) -> Result<String, Exceeded> {
        let everything = |first: Option<(u128, u128)>, last: u128| first == Some((0, last));
        let v4 = addresses.v4.spans().first().map(|s| (u128::from(s.first()), u128::from(s.last())));
        let v6 = addresses.v6.spans().first().map(|s| (s.first(), s.last()));
        match (everything(v4, u128::from(u32::MAX)), everything(v6, u128::MAX)) {
            (true, true) => return Ok("any".into()),
            (true, false) if addresses.v6.is_empty() => return Ok("any IPv4".into()),
            (false, true) if addresses.v4.is_empty() => return Ok("any IPv6".into()),
            _ => {}
        }
        for group in self.named(workloads, budget)? {
            budget.spend(1)?;
            let is_exactly = self.world.members(group).is_some_and(|members| {
                // A rule may concern one family of a group only.
                let v4 = addresses.v4.is_empty() || addresses.v4 == members.v4;
                let v6 = addresses.v6.is_empty() || addresses.v6 == members.v6;
                v4 && v6
            });
            if is_exactly {
                return Ok(format!("group:{group}"));
            }
        }
        budget.spend(addresses.v4.spans().len() + addresses.v6.spans().len())?;
        let texts: Vec<String> = address_text(addresses).split(',').map(str::to_string).collect();
        Ok(list(&texts, "ranges", texts.len()))
    }

    /// The groups that these workloads' rules name, each once, in the order of the rules.
    fn named(&mut self, workloads: &BTreeSet<WorkloadId>, budget: &mut Budget<'_>) -> Result<Vec<&'w GroupId>, Exceeded> {
        let Some(first) = workloads.first() else { return Ok(Vec::new()) };
        if let Some(named) = self.named.get(first) {
            budget.spend(named.len())?;
            return Ok(named.clone());
        }
        let (mut seen, mut named) = (BTreeSet::new(), Vec::new());
        for group in self.world.groups(first) {
            let rules = self.world.rules(group);
            budget.spend(rules.len())?;
            for rule in rules {
                if let Remote::Group(remote) = &rule.remote
                    && seen.insert(remote)
                {
                    named.push(remote);
                }
            }
        }
        budget.hold(named.len())?;
        self.named.insert(first.clone(), named.clone());
        Ok(named)
    }
}
