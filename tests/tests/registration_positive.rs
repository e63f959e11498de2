//! CASES.md D, what should happen: enrolling, reconnecting, clean ends. Controllers are processes, killed and told to end.

use groupcast_bus_config::subjects;
use groupcast_control::log::Log;
use groupcast_messages::{HealthReport, HostRequest, HostRequestAnswer};
use groupcast_policy::doc::Phases;
use groupcast_policy::model::{Binding, Group, GroupRule, Requirement, Selector, Target};
use groupcast_policy::text::parse_rule;
use groupcast_policy::topic::{Scope, Topic};
use groupcast_tests::control::{Host, Plane, address, group};
use groupcast_tests::enrolled::{
    GRACE, Guest, LEASE, Sentinel, allowed, asked, audited, delete_template, entries, gone, host_entry, incarnation, is_suspect,
    judging, plane, put_template, refusal, sequence, template, workload_entry,
};
use groupcast_tests::world::eventually;
use groupcast_topics::reader;

fn equals(key: &str, value: &str) -> Requirement {
    Requirement::In { key: key.into(), values: [value.into()].into() }
}

/// A host that follows topics and counts what it is sent.
async fn watcher(plane: &Plane) -> Host {
    plane.host("watcher", reader::Settings::default(), Box::new(|_, _| true)).await
}

/// The last sequence of TOPICS that is no lead message: it moves with every delta to anybody.
async fn last_delta(plane: &Plane) -> u64 {
    let client = plane.bus.observer("deltas").await;
    let context = async_nats::jetstream::new(client);
    let stream = context.get_stream_no_info("TOPICS").await.expect("the bus answers");
    let mut last = 0;
    for subject in ["gc.w.host.>", "gc.w.scope.>", "gc.w.rules.>", "gc.w.members.>"] {
        if let Ok(message) = stream.get_last_raw_message_by_subject(subject).await {
            last = last.max(message.sequence);
        }
    }
    last
}

#[tokio::test(flavor = "multi_thread")]
async fn d01_first_connect_makes_an_entry_from_the_template_with_incarnation_1() {
    let mut plane = plane(1).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    allowed(&plane, "vm", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    assert_eq!(guest.settle("vm", "w1", 5).await, 1);
    let entry = workload_entry(&guest.client, "w1").await.expect("an entry");
    assert_eq!((entry["template"].as_str(), entry["incarnation"].as_u64()), (Some("vm"), Some(1)));
    assert_eq!(entry["addresses"][0], "10.0.0.5/32");
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    eventually("the host's own topic names it", || async { host.documents().await.contains_key(&Topic::Host(guest.id.clone())) })
        .await;
    audited(&guest.client, "gc.reg.w.w1", "enrolled by its host").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d02_of_conflicting_labels_the_workloads_own_wins_within_the_allow_list() {
    let mut plane = plane(1).await;
    let mut kind = template("vm", &["h1"]);
    kind.labels = [("tier".into(), "any".into()), ("role".into(), "vm".into())].into_iter().collect();
    kind.own_labels.insert("tier".into());
    allowed(&plane, "vm", &["h1"]).await;
    put_template(&plane, kind).await;
    // Groups by label: the address of the workload shows which labels count.
    let by = |id: &str, key: &str, value: &str| {
        let selector = Selector::new(Scope::Global, [equals(key, value)]);
        let mut group = Group::new(id.parse().expect("an id"));
        group.bindings = vec![Binding { target: Target::Selector(selector), phases: Phases::BOTH }];
        group
    };
    let mut asks = Group::new("asks".parse().expect("an id"));
    for remote in ["own", "given", "other"] {
        asks.rules.push(GroupRule::from(parse_rule(&format!("ingress tcp 1 from group:{remote}")).expect("a rule")));
    }
    asks.bindings = vec![Binding { target: Target::Global, phases: Phases::BOTH }];
    plane.put_groups(vec![asks, by("own", "tier", "web"), by("given", "role", "vm"), by("other", "tier", "any")]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let mut mine = asked("w1", 5);
    mine.labels.insert("tier".into(), "web".into());
    assert_eq!(incarnation(&guest.enrol("vm", vec![mine.clone()]).await), 1);
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    eventually("own label where it may, the template's elsewhere", || async {
        let documents = host.documents().await;
        let counts = |group: &str| {
            let document = documents.get(&Topic::Members(group.parse().expect("an id")));
            document.and_then(|document| document.members()).map(|members| members.v4.len() as usize)
        };
        (counts("own"), counts("given"), counts("other")) == (Some(1), Some(1), Some(0))
    })
    .await;
    mine.labels.insert("role".into(), "admin".into());
    let (retryable, reason) = refusal(&guest.enrol("vm", vec![mine]).await);
    assert!(!retryable && reason.contains("label role"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn d03_the_same_address_on_two_networks_makes_two_entries() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1", "h2"]).await;
    let mut other = template("other", &["h2"]);
    other.network = "far".parse().expect("an id");
    put_template(&plane, other).await;
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    assert_eq!(one.settle("vm", "w1", 5).await, 1);
    let mut far = asked("w2", 5);
    far.network = "far".parse().expect("an id");
    assert_eq!(incarnation(&two.enrol("other", vec![far]).await), 1);
    let all = entries(&one.client).await;
    for subject in ["gc.reg.a.net.0a000005", "gc.reg.a.far.0a000005", "gc.reg.w.w1", "gc.reg.w.w2"] {
        assert!(all.contains_key(subject), "{subject}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d04_reconnecting_to_the_same_or_another_controller_within_grace_sends_no_delta() {
    let mut plane = plane(2).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    allowed(&plane, "vm", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    guest.settle("vm", "w1", 5).await;
    let watcher = watcher(&plane).await;
    watcher.synced().await;
    eventually("its topic is published", || async { last_delta(&plane).await > 0 }).await;
    let observer = plane.bus.observer("observer").await;
    let (before, delta) = (sequence(&observer).await, last_delta(&plane).await);
    drop(guest);
    // Requests go to whichever controller the bus picks: with one of two gone it is the other.
    let leader = plane.leader().await;
    for _ in 0..3 {
        let again = Guest::new(&plane, "h1", 1).await;
        assert_eq!(again.settle("vm", "w1", 5).await, 1, "the same life");
    }
    plane.controllers[1 - leader].kill();
    let again = Guest::new(&plane, "h1", 1).await;
    assert_eq!(again.settle("vm", "w1", 5).await, 1);
    assert_eq!(sequence(&observer).await, before, "nothing was written");
    assert_eq!(last_delta(&plane).await, delta, "nobody was sent anything");
}

#[tokio::test(flavor = "multi_thread")]
async fn d05_controllers_that_stop_are_killed_or_all_restart_change_no_entry() {
    let mut plane = plane(2).await;
    allowed(&plane, "vm", &["h1", "h2"]).await;
    let guests = [Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await];
    guests[0].settle("vm", "w1", 5).await;
    guests[1].settle("vm", "w2", 6).await;
    let observer = plane.bus.observer("observer").await;
    let before = entries(&observer).await;
    // Told to end, then killed, then all of them away for longer than lease and grace.
    let leader = plane.leader().await;
    plane.controllers[leader].terminate();
    assert!(plane.controllers[leader].ended().await);
    plane.controllers.remove(leader);
    plane.leader().await;
    plane.add_controller_with(&groupcast_tests::enrolled::SHORT);
    plane.ready().await;
    let leader = plane.leader().await;
    plane.controllers[leader].kill();
    plane.controllers.remove(leader);
    plane.leader().await;
    plane.controllers.iter_mut().for_each(|controller| controller.kill());
    plane.controllers.clear();
    guests[0].beats_for(LEASE + GRACE).await;
    for _ in 0..2 {
        plane.add_controller_with(&groupcast_tests::enrolled::SHORT);
    }
    plane.ready().await;
    judging(&mut plane).await;
    Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
    assert_eq!(entries(&observer).await, before);
    assert_eq!((guests[0].told(), guests[1].told()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn d06_a_clean_exit_is_removed_promptly_and_a_restart_is_none() {
    let mut plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let both = vec![asked("w1", 5), asked("w2", 6)];
    guest.enrol("vm", both).await;
    guest.beats(true);
    let workloads = vec![("net".parse().expect("an id"), "w1".parse().expect("an id"))];
    let answer = guest.request(HostRequest::Remove { boot: 1, workloads }).await;
    assert!(matches!(answer, HostRequestAnswer::Done { .. }), "{answer:?}");
    let left = entries(&guest.client).await;
    assert!(!left.contains_key("gc.reg.w.w1") && !left.contains_key("gc.reg.a.net.0a000005"), "at once, with its address");
    assert!(left.contains_key("gc.reg.w.w2"));
    // Who leaves is silent from then on; one that went on beating would be told that it is gone, and enrol again.
    let answer = guest.leave().await;
    assert!(matches!(answer, HostRequestAnswer::Done { .. }), "{answer:?}");
    gone(&guest.client, "h1").await;
    audited(&guest.client, "gc.reg.w.w1", "removed by its host").await;
    audited(&guest.client, "gc.reg.h.h1", "its host left").await;
    judging(&mut plane).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d07_many_controllers_and_one_entry_for_each_host() {
    let mut plane = plane(3).await;
    let names: Vec<String> = (0..12).map(|i| format!("h{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    allowed(&plane, "vm", &names).await;
    let mut guests = Vec::new();
    for (number, name) in (0..).zip(&names) {
        let guest = Guest::new(&plane, name, 1).await;
        guest.settle("vm", &format!("w-{name}"), 10 + number).await;
        guests.push(guest);
    }
    let all = entries(&guests[0].client).await;
    for kind in ["gc.reg.h.", "gc.reg.w.", "gc.reg.a.net."] {
        assert_eq!(all.keys().filter(|subject| subject.starts_with(kind)).count(), names.len(), "{kind}");
    }
    // Requests are shared out: with all three alive nobody has answered all of them.
    let mut answered = Vec::new();
    for controller in &mut plane.controllers {
        let (_, text) = controller.get("/metrics").expect("metrics");
        let line = text.lines().find(|line| line.starts_with("groupcast_registrations_total"));
        answered.push(line.and_then(|line| line.split(' ').nth(1)?.parse::<f64>().ok()).unwrap_or(0.0));
    }
    assert_eq!(answered.iter().sum::<f64>(), names.len() as f64, "{answered:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn d08_entries_follow_an_edited_template_and_health_leaves_the_members() {
    let mut plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let selector = Selector::new(Scope::Global, [equals("tier", "web")]);
    let mut web = group("web", &["web"], &[]);
    web.bindings = vec![Binding { target: Target::Selector(selector), phases: Phases::BOTH }];
    web.healthy_members = true;
    plane.put_groups(vec![web]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let incarnation = guest.settle("vm", "w1", 5).await;
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    host.synced().await;
    let members = || async {
        let documents = host.documents().await;
        let document = documents.get(&Topic::Members("web".parse().expect("an id")));
        document.and_then(|document| document.members()).map_or(0, |members| members.v4.len() as usize)
    };
    assert_eq!(members().await, 0);
    let before = sequence(&guest.client).await;
    let mut edited = template("vm", &["h1"]);
    edited.labels = [("tier".into(), "web".into())].into_iter().collect();
    put_template(&plane, edited).await;
    eventually("the entry has the template's label", || async { members().await == 1 }).await;
    assert_eq!(sequence(&guest.client).await, before, "the entry itself is what it was");
    // Health: not well, it is no member of a group that asks; well again, it is.
    let report = |healthy| {
        let (network, workload) = ("net".parse().expect("an id"), "w1".parse().expect("an id"));
        HostRequest::Health { boot: 1, reports: vec![HealthReport { network, workload, incarnation, healthy }] }
    };
    guest.request(report(false)).await;
    eventually("it is no member while it is not well", || async { members().await == 0 }).await;
    assert!(host.documents().await.contains_key(&Topic::Rules("web".parse().expect("an id"))), "the rules apply all the same");
    guest.request(report(true)).await;
    eventually("it is a member again", || async { members().await == 1 }).await;
    assert!(!is_suspect(&guest.client, "h1").await && address(5).is_host());
}

#[tokio::test(flavor = "multi_thread")]
async fn d09_an_unknown_template_is_retryable_and_completes_when_it_appears() {
    let plane = plane(1).await;
    groupcast_tests::enrolled::grant(&plane, &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let (retryable, reason) = refusal(&guest.enrol("vm", vec![asked("w1", 5)]).await);
    assert!(retryable && reason.contains("template vm does not exist"), "{reason}");
    assert!(host_entry(&guest.client, "h1").await.is_none());
    put_template(&plane, template("vm", &["h1"])).await;
    assert_eq!(incarnation(&guest.enrol("vm", vec![asked("w1", 5)]).await), 1);
    delete_template(&plane, "vm").await;
    let last = Log::registry(guest.client.clone()).last(subjects::REGISTRY_ALL).await.expect("the bus answers");
    assert!(last.is_some());
}
