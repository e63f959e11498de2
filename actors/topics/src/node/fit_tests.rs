//! Who must not lead: a node that does not read what it would publish, is cut off, or cannot renew.

use super::tests::leading;
use super::*;
use crate::node::lead::UNFIT_LEADS_MAX_MS;

fn published(effects: &[Effect]) -> Option<(u64, Lead)> {
    effects.iter().find_map(|effect| match effect {
        Effect::Publish(publish) => Some((publish.batch, Lead::decode(&publish.lead).unwrap())),
        _ => None,
    })
}

fn is_deposed(effects: &[Effect]) -> bool {
    effects.iter().any(|effect| matches!(effect, Effect::Deposed { .. }))
}

/// A leader that followed CATALOG on a connection that was dead held the lease on another, and published nothing.
#[test]
fn a_leader_that_reads_nothing_lets_go_and_takes_it_only_when_it_reads_again() {
    let mut node = leading();
    node.handle(Event::Fit(false), 100);
    let early = node.handle(Event::Tick, 100 + UNFIT_LEADS_MAX_MS - 1);
    assert!(!published(&early).is_some_and(|(_, lead)| lead.resigning) && node.is_leading(), "{early:?}");
    // A renewal may be under way: it ends first.
    let mut effects = match published(&early) {
        Some((batch, _)) => node.handle(Event::Published { batch, fate: Fate::Committed { last: 2, count: 1 } }, 101),
        None => Vec::new(),
    };
    effects.extend(node.handle(Event::Tick, 100 + UNFIT_LEADS_MAX_MS));
    let (batch, lead) = published(&effects).unwrap();
    assert!(lead.resigning, "{effects:?}");
    let let_go = node.handle(Event::Published { batch, fate: Fate::Committed { last: 3, count: 1 } }, 2_200);
    assert!(is_deposed(&let_go) && !node.is_leading(), "{let_go:?}");
    let head = |node: &mut Node, now| node.handle(Event::Head(None), now);
    head(&mut node, 2_300);
    // However long nobody leads.
    for second in 3..30 {
        let effects = node.handle(Event::Tick, second * 1_000);
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::ReserveTerm { .. } | Effect::Publish(_))), "{effects:?}");
        head(&mut node, second * 1_000 + 1);
    }
    node.handle(Event::Fit(true), 40_000);
    let effects = node.handle(Event::Tick, 40_100);
    assert!(node.head_read_ms.is_some(), "it looks whether anybody leads: {effects:?}");
}

#[test]
fn a_leader_that_is_cut_off_longer_than_its_lease_leads_no_more() {
    let lease = Settings::default().lease_ms;
    let mut node = leading();
    node.handle(Event::Disconnected, 100);
    assert_eq!(node.deadline_ms(), Some(100 + lease), "it does not turn in circles meanwhile");
    assert!(!is_deposed(&node.handle(Event::Tick, 100 + lease - 1)) && node.is_leading());
    assert!(is_deposed(&node.handle(Event::Tick, 100 + lease)) && !node.is_leading());
    assert_eq!(node.deadline_ms(), None);
    // One that is back in time goes on.
    let mut node = leading();
    node.handle(Event::Disconnected, 100);
    node.handle(Event::Connected, 100 + lease - 1);
    assert!(!is_deposed(&node.handle(Event::Tick, 100 + lease)) && node.is_leading());
}

#[test]
fn a_leader_whose_renewals_go_unanswered_leads_no_more() {
    let longest = 2 * Settings::default().lease_ms;
    let mut node = leading();
    let (mut now, mut deposed) = (1, false);
    while !deposed {
        now += 50;
        assert!(now <= 1 + longest + 50, "still leading at {now}");
        deposed = is_deposed(&node.handle(Event::Tick, now));
    }
    assert!(now > longest, "given up already at {now}");
}

/// While the servers elect a leader of TOPICS nobody can read its head. Each attempt that failed cost a lease, and who had led waited for its
/// own to end: up to three seconds more in which nobody led.
#[test]
fn who_cannot_read_the_head_tries_again_without_waiting_for_another_lease() {
    let lease = Settings::default().lease_ms;
    let mut node = leading();
    let mut now = 1;
    while node.is_leading() {
        now += 50;
        node.handle(Event::Tick, now);
    }
    let is_read = |effects: &[Effect]| effects.iter().any(|effect| matches!(effect, Effect::ReadHead));
    // What it held is the head that it knows, and nobody else has taken over; it cannot read that for long.
    let cut = node.replica.cut();
    let (since, leader) = (node.replica.since(), String::new());
    let (catalog, registry) = node.progress;
    let (resigning, incomplete) = (false, false);
    let lead = Lead { term: cut.term, since, batch: 7, count: 0, catalog, registry, resigning, incomplete, leader }.encode();
    let (mut asked, mut reads) = (false, 0);
    let (elected, mut late) = (now + 3 * lease, 0);
    while !asked && late < lease {
        now += 10;
        late = now.saturating_sub(elected);
        let mut effects = node.handle(Event::Tick, now);
        while is_read(&effects) {
            reads += 1;
            let head = (late > 0).then(|| Some((cut.lead, lead.clone())));
            asked |= effects.iter().any(|effect| matches!(effect, Effect::ReserveTerm { .. }));
            effects = node.handle(Event::Head(head), now);
        }
        asked |= effects.iter().any(|effect| matches!(effect, Effect::ReserveTerm { .. }));
    }
    assert!(reads >= 20, "{reads} reads in three leases");
    assert!(late <= 500, "it takes the lead {late} ms after the stream has a leader again");
    assert!(asked, "it takes the lead again at once");
}
