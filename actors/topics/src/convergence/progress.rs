//! How far one change is, as it is told.

use groupcast_messages::{Cut, HostState};
use groupcast_policy::ids::{HostId, WorkloadId};

/// Milliseconds from commit until so many hosts had it in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    pub enforced: u32,
    pub first_ms: Option<u32>,
    pub p50_ms: Option<u32>,
    pub p99_ms: Option<u32>,
    pub last_ms: Option<u32>,
}

/// When hosts had a batch in force: milliseconds after its commit, in order, and how many hosts.
#[derive(Debug, Clone, Default)]
pub(super) struct Times {
    counted: Vec<(u32, u32)>,
    hosts: u32,
}

impl Times {
    pub fn push(&mut self, ms: u32) {
        self.hosts += 1;
        // Acknowledgements are heard in the order of time.
        match self.counted.last_mut() {
            Some((last, count)) if *last >= ms => *count += 1,
            _ => self.counted.push((ms, 1)),
        }
    }

    pub fn hosts(&self) -> u32 {
        self.hosts
    }

    pub fn summary(&self) -> Summary {
        let at = |percent: u64| {
            let rank = (u64::from(self.hosts) * percent).div_ceil(100).max(1);
            let mut seen = 0;
            let found = self.counted.iter().find(|(_, count)| {
                seen += u64::from(*count);
                seen >= rank
            });
            found.map(|(ms, _)| *ms)
        };
        Summary {
            enforced: self.hosts,
            first_ms: self.counted.first().map(|(ms, _)| *ms),
            p50_ms: at(50),
            p99_ms: at(99),
            last_ms: self.counted.last().map(|(ms, _)| *ms),
        }
    }
}

/// Why a host is behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// It was only just told, or says that it is at work.
    Waiting,
    /// Nothing was heard of it since.
    Unreachable,
    /// Its kernel refused the policy; the last good one is in force.
    Error(String),
    /// An operator stopped changes there.
    Frozen(String),
    /// An operator turned enforcement off there.
    Bypassed(String),
    /// An operator cut everything there but the failsafe ports.
    Lockdown(String),
    /// An operator lets pass there, logged, what the policy denies.
    Auditing(String),
    /// The same for some workloads, which are named.
    AuditingSome(String),
    /// Its agent does nothing to the kernel.
    DryRun,
    /// A state that only a newer version knows, by name.
    Other(String),
}

impl Why {
    /// What the host itself says; `None` when it says that all is well.
    pub fn of(state: &HostState) -> Option<Self> {
        match state {
            HostState::Enforcing => None,
            HostState::Failing { reason } => Some(Self::Error(reason.clone())),
            HostState::Frozen { reason } => Some(Self::Frozen(reason.clone())),
            HostState::Bypassed { reason } => Some(Self::Bypassed(reason.clone())),
            HostState::Lockdown { reason } => Some(Self::Lockdown(reason.clone())),
            HostState::Auditing { reason } => Some(Self::Auditing(reason.clone())),
            HostState::AuditingSome { workloads, total, reason } => Some(Self::AuditingSome(named(workloads, *total, reason))),
            HostState::DryRun => Some(Self::DryRun),
            HostState::Other(name) => Some(Self::Other(name.clone())),
        }
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Waiting => "waiting",
            Self::Unreachable => "unreachable",
            Self::Error(_) => "error",
            Self::Frozen(_) => "frozen",
            Self::Bypassed(_) => "bypassed",
            Self::Lockdown(_) => "lockdown",
            Self::Auditing(_) => "auditing",
            Self::AuditingSome(_) => "auditing-some",
            Self::DryRun => "dry-run",
            Self::Other(name) => name,
        }
    }

    pub fn reason(&self) -> &str {
        match self {
            Self::Error(reason)
            | Self::Frozen(reason)
            | Self::Bypassed(reason)
            | Self::Lockdown(reason)
            | Self::Auditing(reason)
            | Self::AuditingSome(reason) => reason,
            Self::Waiting | Self::Unreachable | Self::DryRun | Self::Other(_) => "",
        }
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.reason() {
            "" => f.write_str(self.name()),
            reason => write!(f, "{}: {reason}", self.name()),
        }
    }
}

/// Workloads that a report names as audited.
const AUDITED_SHOWN_MAX: usize = 5;

/// `w1, w2 and 3 more`, and why.
fn named(workloads: &[WorkloadId], total: u32, reason: &str) -> String {
    let shown: Vec<&str> = workloads.iter().take(AUDITED_SHOWN_MAX).map(WorkloadId::as_str).collect();
    let more = (total as usize).saturating_sub(shown.len());
    let mut text = shown.join(", ");
    match (text.is_empty(), more) {
        (_, 0) => {}
        (true, more) => text = format!("{more} workloads"),
        (false, more) => text += &format!(" and {more} more"),
    }
    if reason.is_empty() { text } else { format!("{text} ({reason})") }
}

/// How far one change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    pub change: u64,
    /// Where it was published; the beginning of time for a change that touches no topic.
    pub cut: Cut,
    /// How many hosts it concerns, without those that left.
    pub span: u32,
    /// Of the hosts that have acknowledged it.
    pub summary: Summary,
    /// How many of those do something else with it than enforce it.
    pub lax: u32,
    /// Hosts that have not got it or do not enforce it, as many as are named.
    pub behind: Vec<(HostId, Why)>,
    /// No batch could hold it: it was published in parts.
    pub torn: bool,
}

impl Progress {
    pub fn is_done(&self) -> bool {
        self.summary.enforced >= self.span && self.lax == 0
    }

    /// Hosts that enforce it.
    pub fn enforced(&self) -> u32 {
        self.summary.enforced.saturating_sub(self.lax)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_summary_is_that_of_the_sorted_times(mut ms in prop::collection::vec(0..30u32, 0..300)) {
            ms.sort_unstable();
            let mut times = Times::default();
            ms.iter().for_each(|ms| times.push(*ms));
            let at = |percent: usize| ms.get((ms.len() * percent).div_ceil(100).saturating_sub(1)).copied();
            let expected = Summary {
                enforced: ms.len() as u32,
                first_ms: ms.first().copied(),
                p50_ms: at(50),
                p99_ms: at(99),
                last_ms: ms.last().copied(),
            };
            prop_assert_eq!(times.summary(), expected);
            prop_assert!(times.counted.len() <= 30, "as many as there are different times");
        }
    }

    #[test]
    fn why_is_what_the_host_says() {
        let reason = || "disk full".to_owned();
        for (state, words) in [
            (HostState::Failing { reason: reason() }, "error: disk full"),
            (HostState::Frozen { reason: reason() }, "frozen: disk full"),
            (HostState::Bypassed { reason: String::new() }, "bypassed"),
            (HostState::Lockdown { reason: reason() }, "lockdown: disk full"),
            (HostState::Other("dreaming".into()), "dreaming"),
            (HostState::DryRun, "dry-run"),
            (
                HostState::AuditingSome { workloads: vec!["w1".parse().unwrap()], total: 3, reason: reason() },
                "auditing-some: w1 and 2 more (disk full)",
            ),
        ] {
            assert_eq!(Why::of(&state).map(|why| why.to_string()), Some(words.to_owned()));
        }
        assert_eq!(Why::of(&HostState::Enforcing), None);
    }
}
