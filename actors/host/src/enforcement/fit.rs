//! Whether workloads are attached where they can be judged, now and later.

use groupcast_enforce::settings::{Attached, Attachment};
use groupcast_policy::ids::WorkloadId;

use super::{Enforcement, Order, What};
use crate::holder::Holder;

impl<E: Holder + Unpin + 'static> Enforcement<E> {
    /// Looks at the interfaces if any changed. A workload whose interface was given to a bridge, a switch or a VRF is not enforced
    /// there: it is refused by name and its profile taken away, with the next turn, until the interface is free again.
    pub(super) fn look_at_links(&mut self) {
        let Some(links) = &mut self.links else { return };
        let first = !std::mem::replace(&mut self.links_are_known, true);
        match links.changed().and_then(|changed| if changed || first { links.masters().map(Some) } else { Ok(None) }) {
            Ok(Some(masters)) => self.masters = masters,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "interfaces cannot be looked at");
                self.links_are_known = false;
                return;
            }
        }
        let attachments = self.keeper.engine().attachments().clone();
        let unfit = attachments.into_iter().filter(|(id, attached)| self.misfit(id, attached).is_some());
        let unfit: Vec<(WorkloadId, Attached)> = unfit.collect();
        let suspended = std::mem::take(&mut self.suspended);
        let (kept, fit): (Vec<_>, Vec<_>) = suspended.into_iter().partition(|(id, attached)| self.misfit(id, attached).is_some());
        self.suspended.extend(kept);
        for (id, attached) in &unfit {
            tracing::warn!(refused = self.misfit(id, attached).unwrap_or_default(), "a workload is not enforced");
        }
        let order = |what| Order { what, waiter: None };
        self.orders.extend(unfit.iter().map(|(id, _)| order(What::Detach(id.clone()))));
        self.orders.extend(fit.into_iter().map(|(id, attached)| order(What::Attach(id, attached))));
        self.suspended.extend(unfit);
    }

    /// Why a workload cannot be enforced where it is attached.
    pub(super) fn misfit(&self, workload: &WorkloadId, attached: &Attached) -> Option<String> {
        if attached.attachment == Attachment::Host {
            return None;
        }
        let interface = attached.attachment.interface();
        let master = self.masters.get(interface.as_str())?;
        Some(format!(
            "workload {workload}: interface {interface} belongs to {master}, where its packets cannot be judged; \
             take it out of there (`ip link set {interface} nomaster`)"
        ))
    }
}
