//! Keeps a source that suddenly says very little from emptying the policy: an observation that would delete more than half of the groups or of
//! the workloads that the source owns is held back until a later poll agrees, or an operator confirms it. One that says nothing at all, where
//! that is doubtful, waits for the operator.

use std::collections::BTreeSet;
use std::time::Duration;

/// Fewer deletions than these are never held back.
pub const DELETIONS_FREE: usize = 10;

/// Whether so many deletions are too many at once.
pub const fn is_mass(deleted: usize, owned: usize) -> bool {
    deleted > DELETIONS_FREE && deleted * 2 > owned
}

/// What would be gone of one kind of thing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gone {
    pub deletions: BTreeSet<String>,
    pub owned: usize,
}

/// What an observation would have deleted of all kinds, and since when that is known.
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

/// Judges what would be gone of each kind, given what was held back before: all kinds are held, and let go, together. A poll agrees only if
/// it comes some time after the first: two that follow on each other's heels see the same mishap.
pub fn judge(held: Option<&Held>, gone: &[Gone], doubtful: bool, now_ms: u64, agrees_after: Duration) -> Verdict {
    let nothing_is_left = doubtful && gone.iter().any(|kind| !kind.deletions.is_empty());
    if !nothing_is_left && !gone.iter().any(|kind| is_mass(kind.deletions.len(), kind.owned)) {
        return Verdict::Pass;
    }
    let deletions: BTreeSet<String> = gone.iter().flat_map(|kind| kind.deletions.iter().cloned()).collect();
    let Some(held) = held else { return Verdict::Hold(Held { deletions, since_ms: now_ms, confirmed: false }) };
    // What was not seen before counts by itself.
    let new = |kind: &Gone| is_mass(kind.deletions.difference(&held.deletions).count(), kind.owned);
    let late_enough = now_ms.saturating_sub(held.since_ms) >= agrees_after.as_millis() as u64;
    match () {
        () if gone.iter().any(new) => Verdict::Hold(Held { deletions, since_ms: now_ms, confirmed: false }),
        () if held.confirmed || (late_enough && !nothing_is_left) => Verdict::Pass,
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

    fn groups(range: std::ops::Range<usize>, owned: usize) -> [Gone; 1] {
        [Gone { deletions: names(range), owned }]
    }

    #[test]
    fn a_mass_waits_for_a_later_poll_or_an_operator() {
        let judged = |held: Option<&Held>, gone: &[Gone], now_ms| judge(held, gone, false, now_ms, AFTER);
        let Verdict::Hold(held) = judged(None, &groups(0..20, 20), 1_000) else { panic!("held") };
        assert!(matches!(judged(Some(&held), &groups(0..20, 20), 1_099), Verdict::Hold(again) if again.since_ms == 1_000));
        assert_eq!(judged(Some(&held), &groups(0..20, 20), 1_100), Verdict::Pass, "a second poll agrees");
        assert_eq!(judged(Some(&held), &groups(0..15, 20), 1_100), Verdict::Pass, "also about fewer");
        let confirmed = Held { confirmed: true, ..held.clone() };
        assert_eq!(judged(Some(&confirmed), &groups(0..20, 20), 1_001), Verdict::Pass);
        // What was not seen before is not confirmed with it.
        let other = Held { deletions: names(0..11), ..confirmed };
        let new = judged(Some(&other), &groups(11..40, 40), 9_999);
        assert!(matches!(new, Verdict::Hold(new) if new.since_ms == 9_999 && !new.confirmed));
        assert_eq!(judged(Some(&held), &groups(0..3, 20), 1_001), Verdict::Pass, "no mass any more");
    }

    #[test]
    fn kinds_are_held_and_let_go_together() {
        let both = [Gone { deletions: names(0..20), owned: 20 }, Gone { deletions: names(20..40), owned: 20 }];
        let Verdict::Hold(held) = judge(None, &both, false, 0, AFTER) else { panic!("held") };
        assert_eq!(held.deletions.len(), 40);
        assert_eq!(judge(Some(&Held { confirmed: true, ..held.clone() }), &both, false, 1, AFTER), Verdict::Pass);
        assert_eq!(judge(Some(&held), &both, false, 100, AFTER), Verdict::Pass);
        // One kind was held, and now the other goes too: that is news.
        let one = Held { deletions: names(0..20), ..held };
        assert!(matches!(judge(Some(&one), &both, false, 100, AFTER), Verdict::Hold(_)));
    }

    #[test]
    fn nothing_at_all_waits_for_an_operator_however_few_there_were() {
        let Verdict::Hold(held) = judge(None, &groups(0..1, 1), true, 0, AFTER) else { panic!("held") };
        assert!(matches!(judge(Some(&held), &groups(0..1, 1), true, u64::MAX, AFTER), Verdict::Hold(_)));
        assert_eq!(judge(Some(&Held { confirmed: true, ..held }), &groups(0..1, 1), true, 1, AFTER), Verdict::Pass);
        assert_eq!(judge(None, &groups(0..0, 0), true, 0, AFTER), Verdict::Pass, "nothing was owned");
    }
}
