//! Leading controllers are killed at seeded moments of a change, paused beyond their lease, and told to hand over. Whatever happens:
//! an acknowledged change ends up published, whole, once in effect, and hosts hold what a compile from scratch says.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_policy::model::Event;
use groupcast_tests::chronicle::{Chronicle, one_leader_per_term};
use groupcast_tests::control::{GROUPS, Host, Moment, Plane, Step, Witness, marked, plane_with_hosts, write_groups};
use groupcast_tests::world::{eventually, full, seed};
use groupcast_topics::random::Random;

const LEASE: Duration = Duration::from_millis(400);

/// Every moment of a change as its leader lives it: its documents are read, led by the change record; then a batch is published, one
/// message a group, led by the lead message; then the bus says that it is committed. `None`: before all of it.
fn moments() -> Vec<Option<Moment>> {
    let steps = (0..=GROUPS).map(Step::Read).chain((0..=GROUPS).map(Step::Publish)).chain([Step::Committed]);
    let both = steps.flat_map(|step| [false, true].map(|after| Some(Moment { step, after })));
    [None].into_iter().chain(both).collect()
}

async fn settled(plane: &Plane, hosts: &[(Host, Witness)]) {
    for (host, _) in hosts {
        plane.settled(host).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_killed_at_any_moment_of_a_change_loses_nothing() {
    let kills = if full() { 200 } else { 10 };
    let mut random = Random::new(seed());
    let (mut plane, hosts) = plane_with_hosts(3, LEASE).await;
    let mut leads = Chronicle::of(&plane.bus).await;
    let (mut number, mut exposed, mut left) = (1, 0, Vec::new());
    let mut hit: BTreeMap<Option<Moment>, usize> = BTreeMap::new();
    for round in 0..kills {
        plane.ready().await;
        let leader = plane.leader().await;
        number += 1;
        // All moments, in a random order, then again.
        if left.is_empty() {
            left = moments();
        }
        let moment = left.swap_remove(random.below(left.len() as u64) as usize);
        let delay = Duration::from_micros(random.below(3_000));
        match moment {
            None => plane.controllers[leader].kill(),
            Some(moment) => plane.gate(leader).set(moment, plane.controllers[leader].process(), delay),
        }
        let accepted = write_groups(&plane.catalog, marked(number)).await.expect("CATALOG takes it, whoever leads");
        if let Some(moment) = moment {
            let gate = plane.gate(leader);
            eventually(&format!("round {round}: {moment:?} comes"), || async { gate.has_sprung() }).await;
        }
        assert!(!plane.controllers[leader].ended().await, "round {round}: it was killed");
        *hit.entry(moment).or_default() += 1;
        exposed += usize::from(hosts[0].1.last() == Some(number));
        for group in marked(number) {
            plane.model.apply(&Event::group(group));
        }
        plane.controllers.remove(leader);
        // Sometimes the one that takes over is killed as soon as it leads, too.
        if random.below(4) == 0 {
            plane.add_gated_controller().await;
            plane.ready().await;
            let second = plane.leader().await;
            plane.controllers[second].kill();
            plane.controllers.remove(second);
        }
        plane.add_gated_controller().await;
        settled(&plane, &hosts).await;
        let changed = plane.catalog.change(accepted.number).await.expect("an acknowledged change is never lost");
        assert_eq!(changed.len(), GROUPS, "round {round}");
    }
    for (_, witness) in &hosts {
        assert_eq!(witness.assert_whole(), kills + 1, "every change was exposed once");
    }
    one_leader_per_term(&leads.so_far());
    let every = moments().len();
    assert!(hit.len() == every.min(kills), "{} moments of {every}", hit.len());
    eprintln!("{kills} kills at {} of {every} moments; the change was exposed already at {exposed} of them", hit.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_paused_beyond_its_lease_publishes_nothing_any_more() {
    let rounds = if full() { 20 } else { 3 };
    let mut random = Random::new(seed());
    let (mut plane, hosts) = plane_with_hosts(2, LEASE).await;
    let mut leads = Chronicle::of(&plane.bus).await;
    let mut number = 1;
    for _ in 0..rounds {
        plane.ready().await;
        let old = plane.leader().await;
        let term = plane.controllers[old].status().expect("a status")["term"].as_u64().expect("a term");
        let name = plane.controllers[old].name.clone();
        number += 1;
        // Paused somewhere in a change, so that it wakes up with something to say.
        let catalog = plane.catalog.clone();
        let writing = tokio::spawn(async move { write_groups(&catalog, marked(number)).await });
        tokio::time::sleep(Duration::from_micros(random.below(6_000))).await;
        plane.controllers[old].pause();
        writing.await.expect("the writer lives").expect("written");
        for group in marked(number) {
            plane.model.apply(&Event::group(group));
        }
        let other = 1 - old;
        plane.controllers[other].publishing().await;
        settled(&plane, &hosts).await;
        leads.so_far();
        plane.controllers[old].resume();
        number += 1;
        plane.put_groups(marked(number)).await;
        settled(&plane, &hosts).await;
        // It has noticed, and follows again.
        plane.controllers[old].wait_for("following", |c| c.status().is_some_and(|status| status["leading"].is_null())).await;
        plane.controllers[old]
            .wait_for("at the new term", |c| c.status().is_some_and(|status| status["term"].as_u64() > Some(term)))
            .await;
        for led in leads.so_far() {
            assert!(led.lead.leader != name || led.lead.term > term, "{name} published after it was deposed: {led:?}");
        }
    }
    for (_, witness) in &hosts {
        witness.assert_whole();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn handing_over_publishes_no_topic_and_misses_no_change() {
    let (mut plane, hosts) = plane_with_hosts(2, LEASE).await;
    let client = plane.bus.observer("topics").await;
    let mut topics = client.subscribe(subjects::READ_ALL).await.expect("subscribed");
    client.flush().await.expect("the server answers");
    for number in 2..6 {
        plane.ready().await;
        let old = plane.leader().await;
        plane.controllers[old].terminate();
        assert!(plane.controllers[old].ended().await, "it ends well: {}", plane.controllers[old].log());
        plane.controllers.remove(old);
        let new = plane.leader().await;
        // A lead message may say anything; no topic was published, because nothing changed.
        let mut published = Vec::new();
        while let Some(Some(message)) = futures::FutureExt::now_or_never(topics.next()) {
            published.extend(subjects::parse_read(&message.subject));
        }
        assert!(number > 2 || published.is_empty(), "a take-over with nothing changed published {published:?}");
        let changed = plane.put_groups(marked(number)).await;
        let progress = plane.controllers[new].json(&format!("/v1/changes/{}?wait=enforced", changed.number)).expect("known");
        assert_eq!((&progress["done"], &progress["span"]), (&true.into(), &2.into()), "{progress}");
        plane.add_gated_controller().await;
    }
    for (host, witness) in &hosts {
        plane.settled(host).await;
        assert_eq!(witness.assert_whole(), 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_with_nothing_changed_publishes_no_topic() {
    let (mut plane, hosts) = plane_with_hosts(1, LEASE).await;
    let client = plane.bus.observer("topics").await;
    let mut topics = client.subscribe(subjects::READ_ALL).await.expect("subscribed");
    client.flush().await.expect("the server answers");
    let old = plane.leader().await;
    plane.controllers[old].kill();
    plane.controllers.remove(old);
    let new = plane.leader().await;
    eventually("the new leader renews its lease", || {
        let lead = plane.controllers[new].status().and_then(|status| status["lead"].as_u64());
        async move { lead > Some(0) }
    })
    .await;
    let mut published = Vec::new();
    while let Some(Some(message)) = futures::FutureExt::now_or_never(topics.next()) {
        published.extend(subjects::parse_read(&message.subject));
    }
    assert!(published.is_empty(), "a take-over with nothing changed published {published:?}");
    plane.settled(&hosts[0].0).await;
}
