//! How far one change is, as it is told.

use groupcast_messages::{Cut, HostState};
use groupcast_policy::ids::HostId;

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
            Self::Other(name) => name,
        }
    }

    pub fn reason(&self) -> &str {
        match self {
            Self::Error(reason)
            | Self::Frozen(reason)
            | Self::Bypassed(reason)
            | Self::Lockdown(reason)
            | Self::Auditing(reason) => reason,
            Self::Waiting | Self::Unreachable | Self::Other(_) => "",
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

/// How far one change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    pub change: u64,
    /// Where it was published; the beginning of time for a change that touches no topic.
    pub cut: Cut,
    /// How many hosts it concerns, without those that left.
    pub span: u32,
    pub summary: Summary,
    /// Hosts that have not got it, as many as are named.
    pub behind: Vec<(HostId, Why)>,
    /// No batch could hold it: it was published in parts.
    pub torn: bool,
}

impl Progress {
    pub fn is_done(&self) -> bool {
        self.summary.enforced >= self.span
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
        ] {
            assert_eq!(Why::of(&state).map(|why| why.to_string()), Some(words.to_owned()));
        }
        assert_eq!(Why::of(&HostState::Enforcing), None);
    }
}
