//! A change reaches exactly the hosts in its span; a host outside receives not one byte, counted at its socket. Random fleets and
//! changes, against the policy engine's own word on who is concerned.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use groupcast_policy::compiler::Compiler;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Binding, Event, Group, Target};
use groupcast_tests::control::{Host, Plane, Tap, group, workload};
use groupcast_tests::world::{DEADLINE, full, seed};
use groupcast_topics::random::Random;
use groupcast_topics::reader;

const HOSTS: u64 = 12;
const GROUPS: u64 = 10;
const SPACES: u64 = 3;
/// Longer than a host that has not acknowledged is waited for before it is told again: an acknowledgement can be faster than the
/// word of the commit it is for, and such a host is told once more although it has everything.
const QUIET: Duration = Duration::from_millis(800);

/// No host asks for anything by itself: whatever it receives is because of a change.
fn quiet() -> reader::Settings {
    let never = 3_600_000;
    reader::Settings { rechecks_ms: [never; 3], entropy_min_ms: never, entropy_max_ms: never, ..Default::default() }
}

fn random_group(random: &mut Random, id: u64) -> Group {
    let remotes: BTreeSet<String> = (0..random.below(3)).map(|_| format!("g{}", random.below(GROUPS))).collect();
    let remotes: Vec<&str> = remotes.iter().map(String::as_str).collect();
    let members: Vec<u32> = (0..random.below(4)).map(|_| random.below(200) as u32).collect();
    let mut group = group(&format!("g{id}"), &remotes, &members);
    if random.below(3) == 0 {
        let target = Target::Space(format!("s{}", random.below(SPACES)).parse().unwrap());
        group.bindings.push(Binding { target, phases: groupcast_policy::doc::Phases::BOTH });
    }
    group
}

/// Who is concerned: those who followed an edited topic before, and those who do afterwards.
fn span(compiler: &mut Compiler, events: &[Event]) -> BTreeSet<HostId> {
    // Before, every topic that could be edited.
    let all: Vec<_> = compiler.topics();
    let before: Vec<_> = all.iter().map(|topic| (topic.clone(), compiler.span(topic))).collect();
    let change = compiler.apply(events);
    let mut hosts = BTreeSet::new();
    for (topic, _) in &change.edits {
        hosts.extend(compiler.span(topic));
        hosts.extend(before.iter().filter(|(other, _)| other == topic).flat_map(|(_, hosts)| hosts.iter().cloned()));
    }
    hosts
}

/// Waits until no host has received anything for a while: a new subscription is confirmed a moment after the state is right.
async fn quiet_down(hosts: &[(Host, Tap)]) {
    let total = || hosts.iter().map(|(_, tap)| tap.bytes()).sum::<u64>();
    let (mut last, mut since, begun) = (total(), Instant::now(), Instant::now());
    while since.elapsed() < QUIET {
        assert!(begun.elapsed() < DEADLINE, "hosts receive something all the time");
        tokio::time::sleep(Duration::from_millis(5)).await;
        let now = total();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_outside_the_span_receives_nothing() {
    let (fleets, changes) = if full() { (20, 20) } else { (1, 10) };
    let mut random = Random::new(seed());
    let (mut inside, mut outside) = (0, 0);
    for fleet in 0..fleets {
        let mut plane = Plane::start(1, Duration::from_secs(3)).await;
        let groups: Vec<Group> = (0..GROUPS).map(|id| random_group(&mut random, id)).collect();
        plane.put_groups(groups).await;
        let mut workloads = Vec::new();
        for host in 0..HOSTS {
            for number in 0..=random.below(2) {
                let names: BTreeSet<String> = (0..random.below(3)).map(|_| format!("g{}", random.below(GROUPS))).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let id = format!("w{host}-{number}");
                let mut entry = workload(&format!("h{host}"), &id, (host * 8 + number) as u32, &names);
                entry.space = (random.below(2) == 0).then(|| format!("s{}", random.below(SPACES)).parse().unwrap());
                workloads.push(entry);
            }
        }
        plane.register(workloads).await;
        plane.ready().await;
        plane.leader().await;
        let mut hosts: Vec<(Host, Tap)> = Vec::new();
        for host in 0..HOSTS {
            let tap = Tap::to(&plane.url()).await;
            let host = Host::start(&tap.url(), &format!("h{host}"), quiet(), Box::new(|_, _| true)).await;
            hosts.push((host, tap));
        }
        for (host, _) in &hosts {
            plane.settled(host).await;
        }
        quiet_down(&hosts).await;
        let mut compiler = Compiler::new();
        compiler.apply(&plane.model.events());
        for number in 0..changes {
            let changed = random_group(&mut random, number % GROUPS);
            let concerned = span(&mut compiler, &[Event::group(changed.clone())]);
            let before: Vec<u64> = hosts.iter().map(|(_, tap)| tap.bytes()).collect();
            hosts.iter().for_each(|(_, tap)| drop(tap.drain()));
            let accepted = plane.put_groups(vec![changed]).await;
            let path = format!("/v1/changes/{}?wait=enforced&timeout=30s&span=true", accepted.number);
            let progress = plane.controllers[0].json(&path).expect("the leader knows it");
            assert_eq!(progress["done"], true, "fleet {fleet}, change {number}: {progress}");
            for (host, _) in &hosts {
                plane.settled(host).await;
            }
            quiet_down(&hosts).await;
            for ((host, tap), before) in hosts.iter().zip(before) {
                let received = tap.bytes() - before;
                let belongs = concerned.contains(&host.id);
                let named = tap.drain();
                assert_eq!(
                    received > 0,
                    belongs,
                    "fleet {fleet}, change {number}: {} received {received} bytes: {named:?}",
                    host.id
                );
                if belongs { inside += 1 } else { outside += 1 }
            }
            // Whom the leader waited for: those who followed the topics when the change was published.
            for name in progress["hosts"].as_array().expect("a list").iter().filter_map(|name| name.as_str()) {
                assert!(concerned.iter().any(|host| host.as_str() == name), "{name} was waited for and is not concerned");
            }
        }
    }
    assert!(inside > 20 && outside > 20, "{inside} deliveries inside and {outside} outside are too few to say anything");
}
