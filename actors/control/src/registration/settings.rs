//! How long silence is forgiven, how many may be silent at once, and how fast entries go.

use std::time::Duration;

/// Hosts beat this often, unless told otherwise.
pub const BEAT: Duration = Duration::from_secs(15);
/// A lease is at least so many beats: single ones may be lost, the bus promises none of them.
pub const LEASE_BEATS_MIN: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Silent for so long: suspect.
    pub lease: Duration,
    /// Suspect for so long: deleted.
    pub grace: Duration,
    /// How often silence is looked at.
    pub sweep: Duration,
    /// How long a deletion counts among what vanished at once.
    pub guard_window: Duration,
    /// More of a template's hosts silent than this, in percent, and ...
    pub guard_percent: u32,
    /// ... more than this many: nothing of the template is deleted.
    pub guard_hosts: u32,
    /// Hosts deleted in one second at most.
    pub deletions_per_second: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lease: 4 * BEAT,
            grace: 4 * BEAT,
            sweep: Duration::from_secs(1),
            guard_window: 20 * BEAT,
            guard_percent: 5,
            guard_hosts: 20,
            deletions_per_second: 10,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("registration.{name} is {value:?}: write at least {least:?}")]
    TooShort { name: &'static str, value: Duration, least: Duration },
    #[error("registration.{name} is {value}: write {least} to {most}")]
    OutOfRange { name: &'static str, value: u32, least: u32, most: u32 },
}

impl Settings {
    /// The shortest of all durations: what one round trip on a slow bus may take.
    pub const SHORTEST: Duration = Duration::from_millis(50);

    pub fn check(&self) -> Result<(), Invalid> {
        let durations =
            [("lease", self.lease), ("grace", self.grace), ("sweep", self.sweep), ("guard_window", self.guard_window)];
        for (name, value) in durations {
            if value < Self::SHORTEST {
                return Err(Invalid::TooShort { name, value, least: Self::SHORTEST });
            }
        }
        for (name, value, least, most) in [
            ("guard_percent", self.guard_percent, 0, 100),
            ("guard_hosts", self.guard_hosts, 0, u32::MAX),
            ("deletions_per_second", self.deletions_per_second, 1, 10_000),
        ] {
            if !(least..=most).contains(&value) {
                return Err(Invalid::OutOfRange { name, value, least, most });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        assert_eq!(Settings::default().check(), Ok(()));
        let short = Duration::from_millis(49);
        let rows = [
            (Settings { lease: short, ..Settings::default() }, "registration.lease is 49ms"),
            (Settings { grace: short, ..Settings::default() }, "registration.grace"),
            (Settings { guard_percent: 101, ..Settings::default() }, "guard_percent is 101: write 0 to 100"),
            (Settings { deletions_per_second: 0, ..Settings::default() }, "write 1 to 10000"),
        ];
        for (settings, words) in rows {
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let least =
            Settings { lease: Settings::SHORTEST, deletions_per_second: 10_000, guard_percent: 100, ..Settings::default() };
        assert_eq!(least.check(), Ok(()));
    }
}
