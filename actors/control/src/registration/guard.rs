//! The mass guard: when so many hosts of a template are silent at once that the network, and not the hosts, is the likelier reason.
//! A pure function of counts; who keeps them is [`super::lifecycle`].

use super::settings::Settings;

/// How the hosts of a template are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Counts {
    /// Enrolled, or deleted for silence within the window.
    pub hosts: u64,
    /// Silent for a lease, or deleted for silence within the window. Those whose end an operator has confirmed are in neither.
    pub missing: u64,
}

impl Counts {
    /// More than the larger of a share and a number; or half of them, if that is at least two.
    pub fn is_too_many(self, settings: &Settings) -> bool {
        let share = self.hosts * u64::from(settings.guard_percent) / 100;
        let allowed = share.max(u64::from(settings.guard_hosts));
        self.missing > allowed || (self.missing >= 2 && 2 * self.missing >= self.hosts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_the_number_and_the_half() {
        let settings = Settings::default();
        for (hosts, missing, frozen) in [
            (1, 1, false),    // one host may go
            (2, 1, false),    // half, but only one
            (2, 2, true),     // half, and two
            (4, 2, true),     // half
            (5, 2, false),    // less than half
            (100, 20, false), // as many as are allowed
            (100, 21, true),
            (40, 19, false),
            (40, 20, true), // half
            (1_000, 50, false),
            (1_000, 51, true), // more than five percent
            (10_000, 500, false),
            (10_000, 501, true),
            (0, 0, false),
        ] {
            assert_eq!(Counts { hosts, missing }.is_too_many(&settings), frozen, "{missing} of {hosts}");
        }
    }
}
