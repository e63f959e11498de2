//! Leading controllers are killed at seeded moments of a change, paused beyond their lease, and told to hand over. Whatever happens:
//! an acknowledged change ends up published, whole, once in effect, and hosts hold what a compile from scratch says.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_messages::Lead;
use groupcast_policy::model::Group;
use groupcast_tests::control::{Host, Plane, group, shown_mark, workload, write_groups};
use groupcast_tests::world::{eventually, full, seed};
use groupcast_topics::nats::{OnCommit, Republished};
use groupcast_topics::random::Random;
use groupcast_topics::reader;
use tokio::sync::mpsc;

const LEASE: Duration = Duration::from_millis(400);
const GROUPS: usize = 8;

fn names() -> Vec<String> {
    (0..GROUPS).map(|i| format!("g{i}")).collect()
}

/// Every group marked with the change's number; each names the next, so that all are followed by whoever has one of them.
fn marked(number: u32) -> Vec<Group> {
    let names = names();
    (0..GROUPS).map(|i| group(&names[i], &[&names[(i + 1) % GROUPS]], &[number])).collect()
}

/// Marks in the order in which a host exposed them, and whatever was wrong.
#[derive(Clone, Default)]
struct Witness(Arc<Mutex<(Vec<u32>, Vec<String>)>>);

impl Witness {
    fn watch(&self) -> OnCommit {
        let seen = self.0.clone();
        Box::new(move |reader, commit| {
            let mut seen = seen.lock().expect("lock");
            match shown_mark(reader.documents(), &names()) {
                Ok(Some(mark)) if seen.0.last() != Some(&mark) => seen.0.push(mark),
                Ok(_) => {}
                Err(wrong) => seen.1.push(format!("commit {}: {wrong}", commit.number)),
            }
            true
        })
    }

    /// Every state was whole, and no change came back after a later one.
    fn assert_whole(&self) -> usize {
        let seen = self.0.lock().expect("lock");
        assert!(seen.1.is_empty(), "{:#?}", seen.1);
        assert!(seen.0.is_sorted(), "a change came back: {:?}", seen.0);
        seen.0.len()
    }
}

/// Every lead message as it is republished.
async fn chronicle(plane: &Plane) -> mpsc::UnboundedReceiver<(u64, Lead)> {
    let client = plane.bus.observer("chronicle").await;
    let mut messages = client.subscribe(subjects::LEAD_READ).await.expect("subscribed");
    client.flush().await.expect("the server answers");
    let (sender, leads) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let _client = client;
        while let Some(message) = messages.next().await {
            let of = Republished::of(&message).expect("from the stream");
            let lead = Lead::decode(&message.payload).expect("a lead message");
            if sender.send((of.sequence, lead)).is_err() {
                return;
            }
        }
    });
    leads
}

fn one_leader_per_term(leads: &[(u64, Lead)]) {
    for pair in leads.windows(2) {
        let ((sequence, before), (next, lead)) = (&pair[0], &pair[1]);
        assert!(next > sequence && lead.term >= before.term, "{lead:?} after {before:?}");
        assert!(lead.term > before.term || lead.leader == before.leader, "two leaders in one term: {before:?} and {lead:?}");
    }
}

async fn plane_with_hosts(hosts: usize) -> (Plane, Vec<(Host, Witness)>) {
    let mut plane = Plane::start(2, LEASE).await;
    plane.put_groups(marked(1)).await;
    let names = names();
    let entries = (0..hosts)
        .map(|i| workload(&format!("h{i}"), &format!("w{i}"), i as u32, &[names[i % 2 * 3].as_str(), names[5].as_str()]));
    plane.register(entries.collect()).await;
    plane.ready().await;
    plane.leader().await;
    let mut followers = Vec::new();
    for i in 0..hosts {
        let witness = Witness::default();
        let host = plane.host(&format!("h{i}"), reader::Settings::default(), witness.watch()).await;
        plane.settled(&host).await;
        followers.push((host, witness));
    }
    (plane, followers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_killed_at_any_moment_of_a_change_loses_nothing() {
    let kills = if full() { 200 } else { 10 };
    let mut random = Random::new(seed());
    let (mut plane, hosts) = plane_with_hosts(3).await;
    let mut leads = chronicle(&plane).await;
    let (mut published_before_kill, mut number) = (0, 1);
    for round in 0..kills {
        plane.ready().await;
        let leader = plane.leader().await;
        number += 1;
        // From before the change is written to after it is published: a change takes a few milliseconds.
        let moment = Duration::from_micros(random.below(12_000));
        let catalog = plane.catalog.clone();
        let writing = tokio::spawn(async move { write_groups(&catalog, marked(number)).await });
        tokio::time::sleep(moment).await;
        plane.controllers[leader].kill();
        published_before_kill += usize::from(hosts[0].1.0.lock().expect("lock").0.last() == Some(&number));
        let accepted = writing.await.expect("the writer lives").expect("CATALOG takes it, whoever leads");
        for group in marked(number) {
            plane.model.apply(&groupcast_policy::model::Event::group(group));
        }
        // Sometimes the one that takes over is killed as soon as it leads, too.
        if random.below(4) == 0 {
            plane.controllers.remove(leader);
            plane.add_controller();
            plane.ready().await;
            let second = plane.leader().await;
            plane.controllers[second].kill();
            plane.controllers.remove(second);
        } else {
            plane.controllers.remove(leader);
        }
        plane.add_controller();
        for (host, _) in &hosts {
            plane.settled(host).await;
        }
        let changed = plane.catalog.change(accepted.number).await.expect("an acknowledged change is never lost");
        assert_eq!(changed.len(), GROUPS, "round {round}");
    }
    for (_, witness) in &hosts {
        assert_eq!(witness.assert_whole(), kills + 1, "every change was exposed once");
    }
    let mut all = Vec::new();
    while let Ok(lead) = leads.try_recv() {
        all.push(lead);
    }
    one_leader_per_term(&all);
    eprintln!("{kills} kills, {published_before_kill} of them after the change was exposed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_paused_beyond_its_lease_publishes_nothing_any_more() {
    let rounds = if full() { 20 } else { 3 };
    let mut random = Random::new(seed());
    let (mut plane, hosts) = plane_with_hosts(2).await;
    let mut leads = chronicle(&plane).await;
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
            plane.model.apply(&groupcast_policy::model::Event::group(group));
        }
        let other = 1 - old;
        plane.controllers[other].publishing().await;
        for (host, _) in &hosts {
            plane.settled(host).await;
        }
        while leads.try_recv().is_ok() {}
        plane.controllers[old].resume();
        number += 1;
        plane.put_groups(marked(number)).await;
        for (host, _) in &hosts {
            plane.settled(host).await;
        }
        // It has noticed, and follows again.
        plane.controllers[old].wait_for("following", |c| c.status().is_some_and(|status| status["leading"].is_null())).await;
        plane.controllers[old]
            .wait_for("at the new term", |c| c.status().is_some_and(|status| status["term"].as_u64() > Some(term)))
            .await;
        while let Ok((sequence, lead)) = leads.try_recv() {
            assert!(lead.leader != name || lead.term > term, "{name} published at {sequence} after it was deposed: {lead:?}");
        }
    }
    for (_, witness) in &hosts {
        witness.assert_whole();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn handing_over_publishes_no_topic_and_misses_no_change() {
    let (mut plane, hosts) = plane_with_hosts(2).await;
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
        plane.add_controller();
    }
    for (host, witness) in &hosts {
        plane.settled(host).await;
        assert_eq!(witness.assert_whole(), 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_with_nothing_changed_publishes_no_topic() {
    let (mut plane, hosts) = plane_with_hosts(1).await;
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
