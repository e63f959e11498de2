//! What the operator of a host can order at run time, each with a reason: kept on disk, carried in acknowledgements, so that it is
//! seen where changes are waited for.

use groupcast_enforce::settings::{Mode, Settings};
use groupcast_messages::HostState;
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

/// What is told centrally: that the kernel refuses comes before what the operator wants.
pub fn host_state(configured: &Settings, ordered: &Ordered, failing: Option<&str>) -> HostState {
    if let Some(reason) = failing {
        return HostState::Failing { reason: reason.to_owned() };
    }
    match ordered.as_ref().map(|(mode, reason)| (mode.as_str(), reason.clone())) {
        Some(("freeze", reason)) => HostState::Frozen { reason },
        Some(("bypass", reason)) => HostState::Bypassed { reason },
        Some(("lockdown", reason)) => HostState::Lockdown { reason },
        Some(("audit", reason)) => HostState::Auditing { reason },
        _ if configured.mode == Mode::Audit => HostState::Auditing { reason: "its configuration says so".into() },
        _ => HostState::Enforcing,
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
            let state = host_state(&configured, &ordered, None);
            assert_eq!((state.name(), state.reason()), (told, if ordered.is_some() { "why" } else { "" }));
            assert_eq!(host_state(&configured, &ordered, Some("no memory")), HostState::Failing { reason: "no memory".into() });
        }
        let audited = Settings { mode: Mode::Audit, ..configured };
        assert_eq!(host_state(&audited, &None, None).name(), "auditing");
        assert_eq!(settings_of(&audited, Some("lockdown")).0.mode, Mode::Lockdown);
    }
}
