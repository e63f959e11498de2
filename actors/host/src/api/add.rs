//! Adding a workload: attached at once, and answered when its policy is in force, or when the deadline comes.

use std::time::Duration;

use groupcast_messages::{HostRequest, HostRequestAnswer};
use groupcast_policy::ids::WorkloadId;
use tokio::time::{Instant, timeout_at};

use super::{Answer, Doors, flat, workload};
use crate::config::WrittenAttachment;
use crate::enforcement::{AskStanding, Attach, Detach};
use crate::enrol::WrittenEnrolment;
use crate::report::Standing;

/// How long freshness waits for the bus. A start or a server's end takes less; a bus that is gone longer must not hold up every workload.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);

impl Doors {
    pub(super) async fn add(
        &self,
        attachment: WrittenAttachment,
        enrol: Option<WrittenEnrolment>,
        fresh: bool,
        within: Duration,
    ) -> Answer {
        let deadline = Instant::now() + within;
        let id = match workload(&attachment.workload) {
            Ok(id) => id,
            Err(why) => return Answer::Failed { why },
        };
        // What agent.toml enrols is enrolled again with its workload: removing that has ended it.
        let enrol = enrol.or_else(|| self.registration.lapsed(&id));
        if let Some(written) = &enrol {
            if written.workload != id.as_str() {
                return Answer::Failed { why: format!("workload {id} cannot be enrolled as {}", written.workload) };
            }
            if let Err(why) = written.check() {
                return Answer::Failed { why };
            }
        }
        let enrols = enrol.as_ref().is_some_and(|written| attachment.addresses.is_subset(&written.addresses));
        // First of all: until its policy is here nothing of it passes.
        let before = match timeout_at(deadline, self.attach.send(Attach { attachment, enrols })).await.map(flat) {
            Ok(Ok(before)) => before,
            Ok(Err(why)) => return Answer::Failed { why },
            Err(_) => return Answer::TimedOut { why: format!("workload {id} waits for its turn: nothing of it passes") },
        };
        let mut notes = Vec::new();
        let is_enrolled = enrol.is_some();
        if let Some(written) = enrol {
            match timeout_at(deadline - within / 4, self.registration.enrol(written)).await {
                Ok(Ok(())) => {}
                // It goes on being tried: whoever is told may mend it.
                Ok(Err(why)) => notes.push(format!("workload {id} is not registered: {why}")),
                Err(_) => notes.push(format!("workload {id} is not registered yet: the controllers have not answered")),
            }
        }
        // What the topics say counts also where nobody could make them fresh, so there is always time left to look at them.
        if fresh && let Err(why) = self.freshen(deadline - within / 4).await {
            notes.push(format!("workload {id} is enforced by what was known before, not fresh from its source: {why}"));
        }
        match self.stand(&id, deadline).await {
            Standing::Enforced => Answer::Done { notes },
            Standing::Refused(why) => {
                self.undo(&id, before, is_enrolled).await;
                Answer::Failed { why }
            }
            Standing::Waiting(why) => Answer::TimedOut { why: notes.into_iter().fold(why, |why, note| format!("{why}; {note}")) },
        }
    }

    /// Refused means unchanged, also where that turns out late: it is attached as it was before, or not at all.
    async fn undo(&self, id: &WorkloadId, before: Option<WrittenAttachment>, is_enrolled: bool) {
        let undone = match before {
            Some(attachment) => flat(self.attach.send(Attach { attachment, enrols: true }).await).map(|_| ()),
            None if is_enrolled => self.remove(id.clone()).await,
            None => flat(self.detach.send(Detach(id.clone())).await),
        };
        if let Err(error) = undone {
            tracing::warn!(workload = %id, %error, "a refused workload stays attached, and closed");
        }
    }

    /// Has sources read anew, and waits until what they say is in force here.
    async fn freshen(&self, deadline: Instant) -> Result<(), String> {
        let left = || deadline.saturating_duration_since(Instant::now());
        if !self.inbox.connected(left().min(CONNECTED_WITHIN)).await {
            return Err("the bus is not connected".into());
        }
        let left = left();
        let request = HostRequest::Fresh { within_ms: left.as_millis() as u64 };
        let cut = match self.inbox.ask(&request, left).await? {
            HostRequestAnswer::Done { cut } => cut,
            HostRequestAnswer::Refused { reason, .. } => return Err(format!("the controllers refuse: {reason}")),
        };
        let late = |_| "what the sources say has not arrived in time".to_owned();
        let Some(commit) = timeout_at(deadline, self.inbox.reach(cut)).await.map_err(late)? else {
            return Err("the agent is ending".into());
        };
        let mut progress = self.progress.clone();
        let in_force = progress.wait_for(|progress| progress.enforced >= commit);
        timeout_at(deadline, in_force).await.map_err(late)?.map_err(|_| "the agent is ending".to_owned())?;
        Ok(())
    }

    /// How the workload stands, at the latest at the deadline.
    async fn stand(&self, id: &WorkloadId, deadline: Instant) -> Standing {
        let mut progress = self.progress.clone();
        loop {
            progress.mark_unchanged();
            let standing = match self.standing.send(AskStanding(id.clone())).await {
                Ok(standing) => standing,
                Err(error) => return Standing::Refused(format!("the agent is ending or overloaded ({error}): try again")),
            };
            let Standing::Waiting(_) = &standing else { return standing };
            match timeout_at(deadline, progress.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return standing,
            }
        }
    }
}
