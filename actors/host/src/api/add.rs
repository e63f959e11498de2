//! Adding a workload: attached at once, and answered when its policy is in force, or when the deadline comes.

use std::time::Duration;

use groupcast_messages::{HostRequest, HostRequestAnswer};
use groupcast_policy::ids::WorkloadId;
use tokio::time::{Instant, timeout_at};

use super::{Answer, Doors, flat, workload};
use crate::config::WrittenAttachment;
use crate::enforcement::{AskStanding, Attach};
use crate::enrol::WrittenEnrolment;
use crate::report::Standing;

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
        // First of all: until its policy is here nothing of it passes.
        match timeout_at(deadline, self.attach.send(Attach(attachment))).await.map(flat) {
            Ok(Ok(())) => {}
            Ok(Err(why)) => return Answer::Failed { why },
            Err(_) => return Answer::TimedOut { why: format!("workload {id} waits for its turn: nothing of it passes") },
        }
        let mut notes = Vec::new();
        if let Some(written) = enrol {
            if written.workload != id.as_str() {
                return Answer::Failed { why: format!("workload {id} cannot be enrolled as {}", written.workload) };
            }
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
            Standing::Refused(why) => Answer::Failed { why },
            Standing::Waiting(why) => Answer::TimedOut { why: notes.into_iter().fold(why, |why, note| format!("{why}; {note}")) },
        }
    }

    /// Has sources read anew, and waits until what they say is in force here.
    async fn freshen(&self, deadline: Instant) -> Result<(), String> {
        let left = deadline.saturating_duration_since(Instant::now());
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
