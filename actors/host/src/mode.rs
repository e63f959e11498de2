//! What the operator of a host can order at run time, each with a reason: kept on disk, carried in acknowledgements, so that it is
//! seen where changes are waited for.

use groupcast_enforce::settings::{Mode, Settings};
use groupcast_messages::{AUDITED_NAMED_MAX, HostState};
use groupcast_policy::ids::WorkloadId;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WantedMode {
    Freeze,
    Bypass,
    Lockdown,
    Audit,
    Resume,
}

impl WantedMode {
    /// As it is kept on disk and shown; `None`: as the configuration says.
    pub fn name(self) -> Option<&'static str> {
        match self {
            WantedMode::Freeze => Some("freeze"),
            WantedMode::Bypass => Some("bypass"),
            WantedMode::Lockdown => Some("lockdown"),
            WantedMode::Audit => Some("audit"),
            WantedMode::Resume => None,
        }
    }
}

/// A mode by name and the reason given for it.
pub type Ordered = Option<(String, String)>;

/// The settings of a mode, and whether it freezes.
pub fn settings_of(configured: &Settings, mode: Option<&str>) -> (Settings, bool) {
    let of = |mode: Mode| Settings { mode, ..configured.clone() };
    match mode {
        Some("bypass") => (of(Mode::Bypass), false),
        Some("lockdown") => (of(Mode::Lockdown), false),
        Some("audit") => (of(Mode::Audit), false),
        Some("freeze") => (configured.clone(), true),
        _ => (configured.clone(), false),
    }
}

/// What a host does with its policy: what was ordered, and what its kernel holds.
#[derive(Debug, Clone)]
pub struct Conduct<'c> {
    pub configured: &'c Settings,
    pub ordered: &'c Ordered,
    /// The kernel is not touched at all.
    pub dry_run: bool,
    /// What the kernel refused last.
    pub failing: Option<&'c str>,
    /// How the table that is there treats packets; `None`: there is none of ours.
    pub in_force: Option<Mode>,
    /// Workloads of which it lets pass what it denies.
    pub audited: Vec<WorkloadId>,
}

const SAYS_THE_CONFIGURATION: &str = "its configuration says so";

impl Conduct<'_> {
    /// What is told centrally. What packets meet counts, not what was ordered; and that the kernel refuses comes before both, because
    /// then nobody knows what it holds.
    pub fn state(&self) -> HostState {
        let ordered = self.ordered.as_ref().map(|(mode, reason)| (mode.as_str(), reason.as_str()));
        if self.dry_run {
            return HostState::DryRun;
        }
        if let Some(error) = self.failing {
            let ordered = ordered.map_or(String::new(), |(mode, reason)| format!(" (ordered: {mode}: {reason})"));
            return HostState::Failing { reason: format!("{error}{ordered}") };
        }
        let reason = |mode: &str, own: bool| match ordered {
            Some((said, reason)) if said == mode => reason.to_owned(),
            Some(("freeze", reason)) => format!("frozen like that: {reason}"),
            None if own => SAYS_THE_CONFIGURATION.to_owned(),
            _ => "not ordered any more, but the kernel still holds it".to_owned(),
        };
        match self.in_force {
            None => HostState::Failing { reason: "the kernel holds no table of ours".into() },
            Some(Mode::Bypass) => HostState::Bypassed { reason: reason("bypass", false) },
            Some(Mode::Lockdown) => HostState::Lockdown { reason: reason("lockdown", false) },
            Some(Mode::Audit) => HostState::Auditing { reason: reason("audit", self.configured.mode == Mode::Audit) },
            Some(Mode::Enforce) => match (ordered, &self.audited[..]) {
                (Some(("freeze", reason)), []) => HostState::Frozen { reason: reason.to_owned() },
                (_, []) => HostState::Enforcing,
                (ordered, audited) => {
                    let frozen = ordered.filter(|(mode, _)| *mode == "freeze");
                    HostState::AuditingSome {
                        workloads: audited.iter().take(AUDITED_NAMED_MAX).cloned().collect(),
                        total: u32::try_from(audited.len()).unwrap_or(u32::MAX),
                        reason: frozen.map_or(String::new(), |(_, reason)| format!("frozen: {reason}")),
                    }
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_enforced_kept_and_told_by_the_same_name() {
        let configured = Settings::default();
        let rows = [
            (WantedMode::Freeze, Mode::Enforce, true, "frozen"),
            (WantedMode::Bypass, Mode::Bypass, false, "bypassed"),
            (WantedMode::Lockdown, Mode::Lockdown, false, "lockdown"),
            (WantedMode::Audit, Mode::Audit, false, "auditing"),
            (WantedMode::Resume, Mode::Enforce, false, "enforcing"),
        ];
        for (wanted, mode, frozen, told) in rows {
            let (settings, is_frozen) = settings_of(&configured, wanted.name());
            assert_eq!((settings.mode, is_frozen), (mode, frozen), "{wanted:?}");
            let ordered = wanted.name().map(|name| (name.to_owned(), "why".to_owned()));
            let conduct = conduct(&configured, &ordered, mode);
            let state = conduct.state();
            assert_eq!((state.name(), state.reason()), (told, if ordered.is_some() { "why" } else { "" }));
            let failing = Conduct { failing: Some("no memory"), ..conduct.clone() }.state();
            assert!(matches!(failing, HostState::Failing { reason } if reason.starts_with("no memory")));
            assert_eq!(Conduct { dry_run: true, failing: Some("x"), ..conduct }.state(), HostState::DryRun);
        }
        let audited = Settings { mode: Mode::Audit, ..configured };
        let state = conduct(&audited, &None, Mode::Audit).state();
        assert_eq!((state.name(), state.reason()), ("auditing", SAYS_THE_CONFIGURATION));
        assert_eq!(settings_of(&audited, Some("lockdown")).0.mode, Mode::Lockdown);
    }

    fn conduct<'c>(configured: &'c Settings, ordered: &'c Ordered, in_force: Mode) -> Conduct<'c> {
        Conduct { configured, ordered, dry_run: false, failing: None, in_force: Some(in_force), audited: Vec::new() }
    }

    /// Frozen after bypass, or resumed without the kernel following, it said "frozen" and "enforcing", and everything passed.
    #[test]
    fn what_the_kernel_holds_counts_and_not_what_was_ordered() {
        let (configured, why) = (Settings::default(), || "why".to_owned());
        let frozen: Ordered = Some(("freeze".into(), why()));
        for (ordered, in_force, told) in [
            (&frozen, Mode::Bypass, "bypassed"),
            (&frozen, Mode::Audit, "auditing"),
            (&None, Mode::Audit, "auditing"),
            (&Some(("bypass".into(), why())), Mode::Enforce, "enforcing"),
        ] {
            let state = conduct(&configured, ordered, in_force).state();
            assert_eq!(state.name(), told, "{ordered:?} {in_force:?}");
            assert_eq!(state.enforces(), told == "enforcing");
        }
        let none = Conduct { in_force: None, ..conduct(&configured, &None, Mode::Enforce) };
        assert_eq!(none.state().name(), "failing", "no table is no enforcement");
        let workloads: Vec<WorkloadId> = (0..=AUDITED_NAMED_MAX).map(|i| WorkloadId::new(&format!("w{i}")).unwrap()).collect();
        let some = Conduct { audited: workloads, ..conduct(&configured, &frozen, Mode::Enforce) }.state();
        let HostState::AuditingSome { workloads, total, reason } = some else { panic!("{some:?}") };
        assert_eq!((workloads.len(), total as usize, &*reason), (AUDITED_NAMED_MAX, AUDITED_NAMED_MAX + 1, "frozen: why"));
    }
}
