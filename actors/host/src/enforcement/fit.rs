//! Whether workloads are attached where they can be judged, now and later; and whether what is claimed is where it can be.

use std::collections::{BTreeSet, HashSet};

use groupcast_enforce::interface::Interface;
use groupcast_enforce::ruleset::objection;
use groupcast_enforce::settings::{Attached, Attachment, Attachments};
use groupcast_policy::doc::Content;
use groupcast_policy::ids::WorkloadId;
use groupcast_policy::topic::Topic;

use super::{Enforcement, Order, What};
use crate::holder::Holder;

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    /// Looks at the interfaces if any changed; whether any did. A workload whose interface was given to a bridge, a switch or a VRF is not
    /// enforced there: it is refused by name and its profile taken away, with the next turn, until the interface is free again.
    pub(super) fn look_at_links(&mut self) -> bool {
        let Some(links) = &mut self.links else { return false };
        let first = !std::mem::replace(&mut self.links_are_known, true);
        match links.changed().and_then(|changed| if changed || first { links.present().map(Some) } else { Ok(None) }) {
            Ok(Some(present)) => self.present = present,
            Ok(None) => return false,
            Err(error) => {
                tracing::warn!(%error, "interfaces cannot be looked at");
                self.links_are_known = false;
                return false;
            }
        }
        let order = |what| Order { what, waiter: None };
        let held = self.held();
        if self.configured.held != held {
            self.configured.held = held.clone();
            self.orders.push(order(What::Hold(held)));
        }
        // As they will be after what waits: what was removed is not kept for later, and what was moved is judged where it goes.
        let attachments = self.attachments_to_be();
        let is_unfit =
            |id: &WorkloadId, attached: &Attached| self.misfit(id, attached).is_some() && !self.suspended.contains_key(id);
        let unfit = attachments.into_iter().filter(|(id, attached)| is_unfit(id, attached));
        let unfit: Vec<(WorkloadId, Attached)> = unfit.collect();
        let suspended = std::mem::take(&mut self.suspended);
        let (kept, fit): (Vec<_>, Vec<_>) = suspended.into_iter().partition(|(id, attached)| self.misfit(id, attached).is_some());
        self.suspended.extend(kept);
        for (id, attached) in &unfit {
            tracing::warn!(refused = self.misfit(id, attached).unwrap_or_default(), "a workload is not enforced");
        }
        self.orders.extend(unfit.iter().map(|(id, _)| order(What::Detach(id.clone()))));
        self.orders.extend(fit.into_iter().map(|(id, attached)| order(What::Attach(id, attached))));
        self.suspended.extend(unfit);
        self.tell_absent();
        true
    }

    /// Why a workload cannot be attached like this now. Nothing of what is attached changes by asking.
    pub(super) fn unattachable(&self, workload: &WorkloadId, attached: &Attached, enrols: bool) -> Option<String> {
        if self.keeper.engine().attachments().get(workload).is_some_and(|held| held.attachment == Attachment::Host) {
            return Some(format!("workload {workload} is the machine itself: only host_workload in agent.toml attaches it"));
        }
        let placements = match self.keeper.in_force().get(&Topic::Host(self.host.clone())).and_then(|held| held.content()) {
            Some(Content::Host(placements)) => Some(placements),
            _ => None,
        };
        let refusal = objection(workload, attached, enrols, &self.attachments_to_be(), placements, &self.configured);
        refusal
            .map(|refusal| refusal.to_string())
            .or_else(|| self.missing(workload, attached))
            .or_else(|| self.misfit(workload, attached))
    }

    /// What is attached once everything that waits has had its turn.
    pub(super) fn attachments_to_be(&self) -> Attachments {
        let mut all = self.keeper.engine().attachments().clone();
        for order in &self.orders {
            match &order.what {
                What::Attach(id, attached) => _ = all.insert(id.clone(), attached.clone()),
                What::Detach(id) => _ = all.remove(id),
                What::Mode(..) | What::Hold(_) => {}
            }
        }
        all.extend(self.suspended.iter().map(|(id, attached)| (id.clone(), attached.clone())));
        all
    }

    /// That the interface of a workload is not there, if it is not.
    pub(super) fn missing(&self, workload: &WorkloadId, attached: &Attached) -> Option<String> {
        missing_among(&self.names(), workload, attached)
    }

    /// All that are wanted where there is no interface. Asked with every order, so each interface is looked at once and not once for
    /// each workload.
    pub(super) fn absent(&self) -> impl Iterator<Item = (&WorkloadId, String)> {
        let names = self.names();
        let all = self.keeper.engine().attachments().iter().chain(&self.suspended);
        all.filter_map(move |(id, attached)| Some((id, missing_among(&names, id, attached)?)))
    }

    fn names(&self) -> HashSet<&str> {
        self.present.names.values().map(String::as_str).collect()
    }

    /// Whoever registers workloads is told which have no interface any more.
    pub(super) fn tell_absent(&self) {
        let now: BTreeSet<WorkloadId> = self.absent().map(|(id, _)| id.clone()).collect();
        self.absent.send_if_modified(|told| {
            let changed = *told != now;
            *told = now;
            changed
        });
    }

    fn is_claimed(&self, name: &str) -> bool {
        let interface = Interface::new(name);
        interface.is_ok_and(|interface| self.configured.claims.iter().any(|claim| claim.covers(&interface)))
    }

    /// The interfaces that have a claimed name or had one since they exist, by number.
    fn held(&self) -> BTreeSet<u32> {
        let present = self.present.names.iter();
        let held = present.filter(|(index, name)| self.configured.held.contains(index) || self.is_claimed(name));
        held.map(|(index, _)| *index).collect()
    }

    /// Why a workload cannot be enforced where it is attached.
    pub(super) fn misfit(&self, workload: &WorkloadId, attached: &Attached) -> Option<String> {
        if attached.attachment == Attachment::Host {
            return None;
        }
        let interface = attached.attachment.interface();
        let master = self.present.masters.get(interface.as_str())?;
        Some(format!(
            "workload {workload}: interface {interface} belongs to {master}, where its packets cannot be judged; \
             take it out of there (`ip link set {interface} nomaster`)"
        ))
    }

    /// Interfaces that are claimed and not where they can be judged, each with what to do. Those of workloads are told as theirs.
    pub(super) fn misplaced(&self) -> Vec<String> {
        let of_workloads: BTreeSet<Interface> = self.suspended.values().map(|attached| attached.attachment.interface()).collect();
        let is_told = |name: &str| Interface::new(name).is_ok_and(|interface| of_workloads.contains(&interface));
        let given = self.present.masters.iter().filter(|(name, _)| self.is_claimed(name) && !is_told(name));
        let given = given.map(|(name, master)| {
            format!(
                "interface {name} is claimed and belongs to {master}, where its packets cannot be judged; \
                 take it out of there (`ip link set {name} nomaster`), or claim other names"
            )
        });
        let present = self.present.names.iter();
        let renamed = present.filter(|(index, name)| self.configured.held.contains(index) && !self.is_claimed(name));
        let renamed = renamed.map(|(index, name)| {
            format!(
                "interface {index} had a claimed name and is called {name} now: it stays closed; \
                 give it its name again, or delete it"
            )
        });
        given.chain(renamed).collect()
    }

    /// Why this host does not enforce all that it claims, if an interface is where its packets cannot be judged.
    pub(super) fn unjudged(&self) -> Option<String> {
        let suspended = self.suspended.iter().find_map(|(id, attached)| self.misfit(id, attached));
        suspended.or_else(|| self.misplaced().into_iter().next())
    }
}

/// `names` of all interfaces; none at all: nobody has looked.
fn missing_among(names: &HashSet<&str>, workload: &WorkloadId, attached: &Attached) -> Option<String> {
    let interface = attached.attachment.interface();
    let is_there = names.is_empty() || names.contains(interface.as_str());
    (attached.attachment != Attachment::Host && !is_there)
        .then(|| format!("workload {workload}: interface {interface} does not exist: create it first, or remove the workload"))
}
