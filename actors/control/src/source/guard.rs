//! Keeps a source that suddenly says very little from emptying the policy: an observation that would delete more than half of what the
//! source owns is held back until a later poll agrees, or an operator confirms it.

use std::collections::BTreeSet;
use std::time::Duration;

/// Fewer deletions than these are never held back.
pub const DELETIONS_FREE: usize = 10;

/// Whether so many deletions are too many at once.
pub const fn is_mass(deleted: usize, owned: usize) -> bool {
    deleted > DELETIONS_FREE && deleted * 2 > owned
}

/// What an observation would have deleted, and since when that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub deletions: BTreeSet<String>,
    pub since_ms: u64,
    /// An operator has said that it is meant.
    pub confirmed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    Hold(Held),
}

/// Judges deletions out of `owned`, given what was held back before. A poll agrees only if it comes some time after the first:
/// two that follow on each other's heels see the same mishap.
pub fn judge(held: Option<&Held>, deletions: BTreeSet<String>, owned: usize, now_ms: u64, agrees_after: Duration) -> Verdict {
    if !is_mass(deletions.len(), owned) {
        return Verdict::Pass;
    }
    let Some(held) = held else { return Verdict::Hold(Held { deletions, since_ms: now_ms, confirmed: false }) };
    // What nobody has seen before counts by itself.
    let new = deletions.difference(&held.deletions).count();
    let late_enough = now_ms.saturating_sub(held.since_ms) >= agrees_after.as_millis() as u64;
    match () {
        () if is_mass(new, owned) => Verdict::Hold(Held { deletions, since_ms: now_ms, confirmed: false }),
        () if held.confirmed || late_enough => Verdict::Pass,
        () => Verdict::Hold(Held { deletions, since_ms: held.since_ms, confirmed: false }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_millis(100);

    fn names(range: std::ops::Range<usize>) -> BTreeSet<String> {
        range.map(|i| format!("g{i}")).collect()
    }

    #[test]
    fn more_than_half_and_more_than_ten_is_a_mass() {
        for (deleted, owned, mass) in [
            (0, 0, false),
            (10, 10, false),
            (11, 11, true),
            (11, 21, true),
            (11, 22, false),
            (500, 1_000, false),
            (501, 1_000, true),
        ] {
            assert_eq!(is_mass(deleted, owned), mass, "{deleted} of {owned}");
        }
    }

    #[test]
    fn a_mass_waits_for_a_later_poll_or_an_operator() {
        let Verdict::Hold(held) = judge(None, names(0..20), 20, 1_000, AFTER) else { panic!("held") };
        assert!(matches!(judge(Some(&held), names(0..20), 20, 1_099, AFTER), Verdict::Hold(again) if again.since_ms == 1_000));
        assert_eq!(judge(Some(&held), names(0..20), 20, 1_100, AFTER), Verdict::Pass, "a second poll agrees");
        assert_eq!(judge(Some(&held), names(0..15), 20, 1_100, AFTER), Verdict::Pass, "also about fewer");
        let confirmed = Held { confirmed: true, ..held.clone() };
        assert_eq!(judge(Some(&confirmed), names(0..20), 20, 1_001, AFTER), Verdict::Pass);
        // What was not seen before is not confirmed with it.
        let other = Held { deletions: names(0..11), ..confirmed };
        assert!(
            matches!(judge(Some(&other), names(11..40), 40, 9_999, AFTER), Verdict::Hold(new) if new.since_ms == 9_999 && !new.confirmed)
        );
        assert_eq!(judge(Some(&held), names(0..3), 20, 1_001, AFTER), Verdict::Pass, "no mass any more");
    }
}
