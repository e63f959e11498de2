//! What packets of a flow meet at one of its ends: the policy's word, and what the host does with policies at present. Pure.

use crate::explained::Side;
use crate::progress::HostStanding;

/// A host tells at least once a minute what it does; one that did not for so long may do something else by now.
pub const HEARD_WITHIN_MS: u64 = 180_000;

/// What becomes of the flow at one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Met {
    /// Nothing when it is not known.
    pub passes: Option<bool>,
    pub words: String,
}

/// What controllers say of the host.
#[derive(Debug, Clone, Copy)]
pub enum Told<'t> {
    Standing(&'t HostStanding),
    /// They answer, and know nothing of it.
    Nothing,
    NoAnswer,
}

pub fn met(side: &Side, told: Told<'_>) -> Met {
    let Some(host) = &side.host else { return unknown("not known: it is on no host".to_owned()) };
    let standing = match told {
        Told::Standing(standing) => standing,
        Told::Nothing => return unknown(format!("not known: host {host} has not said what it does")),
        Told::NoAnswer => return unknown(format!("not known: no controller says what host {host} does")),
    };
    if standing.heard_ms_ago > HEARD_WITHIN_MS {
        let seconds = standing.heard_ms_ago / 1_000;
        return unknown(format!("not known: host {host} was last heard of {seconds} s ago"));
    }
    let verdict = if side.allowed { "allowed" } else { "would be denied" };
    let why = if standing.reason.is_empty() { String::new() } else { format!(" ({})", standing.reason) };
    let passes = |what: &str| Met { passes: Some(true), words: format!("{verdict}; {what}{why}: passes") };
    match standing.state.as_str() {
        "bypassed" => passes(&format!("host {host} is in bypass")),
        "auditing" => passes(&format!("host {host} is audited, what is denied there is only logged")),
        "dry-run" => passes(&format!("the agent of host {host} is a dry run and touches no kernel")),
        "lockdown" => Met {
            passes: Some(false),
            words: format!("host {host} is in lockdown{why}: nothing claimed passes, whatever the policy says"),
        },
        "auditing-some" if standing.audited.contains(&side.workload) => {
            passes(&format!("workload {} is audited, what is denied to it is only logged", side.workload))
        }
        "auditing-some" if standing.audited_total as usize > standing.audited.len() && !side.allowed => unknown(format!(
            "not known: {} workloads of host {host} are audited, more than it names, perhaps this one",
            standing.audited_total
        )),
        "enforcing" | "frozen" | "auditing-some" => by_policy(side, host, standing),
        "failing" => unknown(format!("not known: the kernel of host {host} refuses its policy{why}; an earlier one is in force")),
        other => unknown(format!("not known: host {host} is {other}, which this gateway does not know")),
    }
}

/// The host does what its policy says; the question is which one it has.
fn by_policy(side: &Side, host: &str, standing: &HostStanding) -> Met {
    let change = side.change.map_or(String::new(), |change| format!(" (change {change})"));
    match (side.enforced, standing.behind) {
        (Some(true), _) | (None, false) => Met { passes: Some(side.allowed), words: format!("in force on the host{change}") },
        (Some(false), _) if standing.state == "frozen" => unknown(format!(
            "NOT in force{change}: host {host} is frozen ({}) and keeps an earlier policy until `groupcast-agent resume` there",
            standing.reason
        )),
        (Some(false), _) => {
            let wait = side.change.map_or(String::new(), |change| format!(": see `groupcast wait {change}`"));
            unknown(format!("NOT YET in force on the host{wait}"))
        }
        (None, true) => unknown(format!("not known: host {host} is behind, perhaps with this")),
    }
}

fn unknown(words: String) -> Met {
    Met { passes: None, words }
}

/// Of both ends together: nobody may stop it, and nobody's word may be missing.
pub fn together(ends: impl IntoIterator<Item = Option<bool>>) -> Option<bool> {
    let mut all = Some(true);
    for one in ends {
        match one {
            Some(false) => return Some(false),
            Some(true) => {}
            None => all = None,
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(allowed: bool, enforced: Option<bool>) -> Side {
        Side {
            workload: "w1".into(),
            host: Some("h1".into()),
            direction: "ingress".into(),
            allowed,
            why: String::new(),
            rule: None,
            path: Vec::new(),
            change: Some(7),
            enforced,
            passes: None,
            happens: String::new(),
        }
    }

    fn standing(state: &str, behind: bool) -> HostStanding {
        let (state, reason) = (state.to_owned(), "why".to_owned());
        HostStanding { state, reason, audited: vec!["w1".into()], audited_total: 1, heard_ms_ago: 0, behind, behind_ms: 0 }
    }

    /// With a host in bypass or audit it said "denied" and "in force", and packets passed.
    #[test]
    fn what_a_host_does_counts_beside_what_the_policy_says() {
        let some = Some(true);
        for (state, allowed, enforced, behind, passes) in [
            ("enforcing", false, some, false, Some(false)),
            ("enforcing", true, some, false, Some(true)),
            ("enforcing", true, None, false, Some(true)),
            ("enforcing", true, None, true, None),
            ("enforcing", false, Some(false), true, None),
            ("frozen", false, some, true, Some(false)),
            ("frozen", false, Some(false), true, None),
            ("bypassed", false, some, false, Some(true)),
            ("auditing", false, some, false, Some(true)),
            ("auditing-some", false, some, false, Some(true)),
            ("dry-run", false, some, false, Some(true)),
            ("lockdown", true, some, false, Some(false)),
            ("failing", true, some, false, None),
            ("dreaming", true, some, false, None),
        ] {
            let told = met(&side(allowed, enforced), Told::Standing(&standing(state, behind)));
            assert_eq!(told.passes, passes, "{state} {allowed} {enforced:?} {behind}: {}", told.words);
        }
        let bypassed = met(&side(false, some), Told::Standing(&standing("bypassed", false)));
        assert_eq!(bypassed.words, "would be denied; host h1 is in bypass (why): passes");
        let other = HostStanding { audited: vec!["w2".into()], ..standing("auditing-some", false) };
        assert_eq!(met(&side(false, some), Told::Standing(&other)).passes, Some(false));
        let more = HostStanding { audited_total: 99, ..other };
        assert_eq!(met(&side(false, some), Told::Standing(&more)).passes, None);
    }

    #[test]
    fn not_knowing_is_said() {
        for told in [Told::Nothing, Told::NoAnswer] {
            let met = met(&side(false, Some(true)), told);
            assert!(met.passes.is_none() && met.words.starts_with("not known"), "{met:?}");
        }
        let at = |heard_ms_ago| HostStanding { heard_ms_ago, ..standing("enforcing", false) };
        assert_eq!(met(&side(false, Some(true)), Told::Standing(&at(HEARD_WITHIN_MS))).passes, Some(false));
        assert_eq!(met(&side(false, Some(true)), Told::Standing(&at(HEARD_WITHIN_MS + 1))).passes, None);
        assert_eq!(together([Some(true), None]), None);
        assert_eq!(together([None, Some(false)]), Some(false));
        assert_eq!(together([Some(true), Some(true)]), Some(true));
    }
}
