//! CASES.md D, what must not happen: two holders of one address, leaks, deletions of the living, words of the dead.

use std::time::{Duration, SystemTime};

use groupcast_messages::{HealthReport, HostRequest, HostRequestAnswer, RegisterAnswer};
use groupcast_tests::control::{Controller, group};
use groupcast_tests::enrolled::{
    BEAT, GRACE, Guest, LEAD, LEASE, SHORT, Sentinel, allowed, asked, audited, causes, delete_template, deleted_at, entries,
    gone, grant, host_entry, incarnation, is_suspect, judging, plane, put_template, refusal, sequence, template, workload_entry,
};
use groupcast_tests::world::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn d10_one_address_has_one_holder_also_under_a_race() {
    let plane = plane(2).await;
    let names: Vec<String> = (0..8).map(|i| format!("h{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    allowed(&plane, "vm", &names).await;
    let mut guests = Vec::new();
    for name in &names {
        let guest = Guest::new(&plane, name, 1).await;
        // On a slow machine the races take longer than lease and grace: who is silent would be deleted meanwhile.
        guest.beats(true);
        guests.push(guest);
    }
    for number in 0..10 {
        let race = guests.iter().map(|guest| {
            let workload = asked(&format!("w{number}-{}", guest.id), 100 + number);
            guest.enrol("vm", vec![workload])
        });
        let answers = futures::future::join_all(race).await;
        let won = answers.iter().filter(|answer| matches!(answer, RegisterAnswer::Registered { .. })).count();
        assert_eq!(won, 1, "{answers:?}");
        for answer in answers.iter().filter(|answer| !matches!(answer, RegisterAnswer::Registered { .. })) {
            let (retryable, reason) = refusal(answer);
            assert!(retryable && (reason.contains("is held by workload") || reason.contains("try again")), "{reason}");
        }
    }
    let all = entries(&guests[0].client).await;
    let of = |kind: &str| all.keys().filter(|subject| subject.starts_with(kind)).count();
    assert_eq!((of("gc.reg.a.net."), of("gc.reg.w.")), (10, 10), "no claim without its workload, and the other way round");
}

#[tokio::test(flavor = "multi_thread")]
async fn d11_a_crash_and_reboot_with_the_same_address_is_another_life_and_no_duplicate() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let first = Guest::new(&plane, "h1", 1).await;
    first.enrol("vm", vec![asked("w1", 5), asked("w2", 6)]).await;
    drop(first);
    // After the reboot only one of them is there, with the address of the other.
    let second = Guest::new(&plane, "h1", 2).await;
    assert_eq!(incarnation(&second.enrol("vm", vec![asked("w1", 6)]).await), 2);
    let all = entries(&second.client).await;
    let subjects: Vec<&str> = all.keys().filter(|subject| !subject.starts_with("gc.reg.h.")).map(String::as_str).collect();
    assert_eq!(subjects, ["gc.reg.a.net.0a000006", "gc.reg.w.w1"], "what the earlier boot left is gone");
    assert_eq!(incarnation(&second.enrol("vm", vec![asked("w1", 6)]).await), 2, "and again the same life");
}

#[tokio::test(flavor = "multi_thread")]
async fn d12_who_never_reconnects_is_suspect_then_deleted_and_one_removal_is_sent() {
    let mut plane = plane(2).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    allowed(&plane, "vm", &["h1", "h2", "h3"]).await;
    let guests = [Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await, Guest::new(&plane, "h3", 1).await];
    for (number, guest) in (5..).zip(&guests) {
        guest.settle("vm", &format!("w-{}", guest.id), number).await;
    }
    let observer = plane.bus.observer("observer").await;
    guests[0].forget();
    guests[0].beats(false);
    eventually("it is suspect", || is_suspect(&observer, "h1")).await;
    assert!(workload_entry(&observer, "w-h1").await.is_some(), "nothing is taken away yet");
    gone(&observer, "h1").await;
    audited(&observer, "gc.reg.h.h1", "suspect").await;
    audited(&observer, "gc.reg.h.h1", "deleted").await;
    // Nothing more comes: whoever judges has looked at everybody again since.
    Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
    let removals = causes(&observer, "gc.reg.w.w-h1").await;
    assert_eq!(removals.iter().filter(|cause| cause.contains("deleted")).count(), 1, "{removals:?}");
    assert!(host_entry(&observer, "h2").await.is_some() && host_entry(&observer, "h3").await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn d13_the_host_gone_and_then_its_controller_killed_the_next_one_deletes_it() {
    let mut plane = plane(2).await;
    allowed(&plane, "vm", &["h1"]).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    guest.settle("vm", "w1", 5).await;
    let observer = plane.bus.observer("observer").await;
    drop(guest);
    eventually("it is suspect", || is_suspect(&observer, "h1")).await;
    let leader = plane.leader().await;
    let killed_at = SystemTime::now();
    plane.controllers[leader].kill();
    plane.controllers.remove(leader);
    let waited = deleted_at(&observer, "h1").await.duration_since(killed_at).expect("after it was killed");
    assert!(waited >= LEASE + GRACE, "whoever takes over waits for lease and grace first, not {waited:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn d14_all_controllers_and_the_host_gone_it_is_deleted_after_they_come_back() {
    let mut plane = plane(2).await;
    allowed(&plane, "vm", &["h1"]).await;
    allowed(&plane, "other", &["h2"]).await;
    let (guest, other) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    guest.settle("vm", "w1", 5).await;
    other.settle("other", "w2", 6).await;
    let observer = plane.bus.observer("observer").await;
    plane.controllers.iter_mut().for_each(|controller| controller.kill());
    plane.controllers.clear();
    drop(guest);
    other.beats_for(LEASE + GRACE).await;
    assert!(host_entry(&observer, "h1").await.is_some(), "nobody deletes without controllers");
    let back_at = SystemTime::now();
    for _ in 0..2 {
        plane.add_controller_with(&SHORT);
    }
    plane.ready().await;
    let waited = deleted_at(&observer, "h1").await.duration_since(back_at).expect("after they came back");
    assert!(waited >= LEASE + GRACE, "whoever comes back waits for lease and grace first, not {waited:?}");
    assert!(host_entry(&observer, "h2").await.is_some() && other.told() == 0, "who lived on meanwhile stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn d15_a_late_farewell_of_an_earlier_life_is_ignored() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let (old, new) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h1", 2).await);
    old.settle("vm", "w1", 5).await;
    old.vanish();
    assert_eq!(new.settle("vm", "w1", 5).await, 2);
    let before = sequence(&new.client).await;
    let answer = old.request(HostRequest::Leave { boot: 1 }).await;
    assert!(
        matches!(&answer, HostRequestAnswer::Refused { retryable: false, reason } if reason.contains("overtaken")),
        "{answer:?}"
    );
    let workloads = vec![("net".parse().expect("an id"), "w1".parse().expect("an id"))];
    old.request(HostRequest::Remove { boot: 1, workloads }).await;
    let entry = workload_entry(&new.client, "w1").await.expect("still there");
    assert_eq!(entry["incarnation"], 2);
    // A trace of the refusal is all that was written.
    let left = entries(&new.client).await;
    assert!(sequence(&new.client).await <= before + 1 && left.contains_key("gc.reg.r.h1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn d16_a_disconnect_before_the_entry_is_written_leaks_nothing() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let observer = plane.bus.observer("observer").await;
    // The host asks and is gone before anybody can answer, many times over.
    for number in 0..20 {
        let guest = Guest::new(&plane, "h1", 1).await;
        let enrolled = tokio::time::timeout(Duration::from_millis(number / 2), guest.enrol("vm", vec![asked("w1", 5)])).await;
        drop((enrolled, guest));
    }
    // Whatever was written is whole, and goes when nobody beats for it.
    let all = entries(&observer).await;
    let whole = ["gc.reg.h.h1", "gc.reg.w.w1", "gc.reg.a.net.0a000005"].map(|subject| all.contains_key(subject));
    assert!(whole == [true; 3] || whole == [false; 3], "{all:?}");
    gone(&observer, "h1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d17_a_deletion_that_races_a_beat_spares_the_host_or_it_enrols_again_at_once() {
    let plane = plane(2).await;
    let names: Vec<String> = (0..4).map(|i| format!("h{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for name in &names {
        allowed(&plane, &format!("vm-{name}"), &[name]).await;
    }
    let mut guests = Vec::new();
    for (number, name) in (10..).zip(&names) {
        let guest = Guest::new(&plane, name, 1).await;
        guest.settle(&format!("vm-{name}"), &format!("w-{name}"), number).await;
        guests.push(guest);
    }
    // Each is silent for about as long as it takes to be deleted, a little less or a little more.
    let races = guests.iter().zip(0..).map(|(guest, step)| async move {
        for round in 0..3_u32 {
            guest.beats(false);
            tokio::time::sleep(LEASE + GRACE - Duration::from_millis(60) + Duration::from_millis(40) * (step + round)).await;
            guest.beats(true);
            guest.beats_for(2 * BEAT).await;
        }
    });
    futures::future::join_all(races).await;
    for guest in &guests {
        eventually(&format!("{} is registered and live", guest.id), || async {
            let entry = host_entry(&guest.client, guest.id.as_str()).await;
            entry.is_some_and(|entry| entry["enrolled"]["suspect"].is_null())
        })
        .await;
        let id = format!("w-{}", guest.id);
        let entry = workload_entry(&guest.client, &id).await.expect("registered");
        assert!(entry["incarnation"].as_u64().expect("a number") <= 1 + guest.told(), "{} deletions were told", guest.told());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d18_an_identity_that_is_missing_wrong_or_anothers_is_refused_and_nothing_written() {
    let plane = plane(1).await;
    put_template(&plane, template("vm", &["h1"])).await;
    put_template(&plane, template("theirs", &["h2"])).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let (retryable, reason) = refusal(&guest.enrol("vm", vec![asked("w1", 5)]).await);
    assert!(retryable && reason.contains("host h1 is not known"), "{reason}");
    grant(&plane, &["h1"]).await;
    let (retryable, reason) = refusal(&guest.enrol("theirs", vec![asked("w1", 5)]).await);
    assert!(!retryable && reason.contains("may not be used by host h1"), "{reason}");
    let all = entries(&guest.client).await;
    assert!(all.keys().all(|subject| subject.starts_with("gc.reg.r.")), "{all:?}");
    // Who the host is the subject says: the bus itself is tried in registration_attacks.
    audited(&guest.client, "gc.reg.r.h1", "refused").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d19_an_address_outside_of_the_hosts_networks_is_refused() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let mut wide = template("vm", &["h1"]);
    wide.prefixes.insert(groupcast_policy::net::Prefix::v4(0, 0).expect("a prefix"));
    put_template(&plane, wide).await;
    let guest = Guest::new(&plane, "h1", 1).await;
    let mut outside = asked("w1", 5);
    outside.addresses = [groupcast_policy::net::Prefix::v4(0xc0a8_0001, 32).expect("a prefix")].into();
    let (retryable, reason) = refusal(&guest.enrol("vm", vec![outside]).await);
    assert!(!retryable && reason.contains("192.168.0.1/32 is in no network granted to host h1"), "{reason}");
    assert!(host_entry(&guest.client, "h1").await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn d20_after_a_template_is_deleted_nothing_more_registers_with_it() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1", "h2"]).await;
    let (one, two) = (Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await);
    one.settle("vm", "w1", 5).await;
    delete_template(&plane, "vm").await;
    let (retryable, reason) = refusal(&two.enrol("vm", vec![asked("w2", 6)]).await);
    assert!(retryable && reason.contains("does not exist"), "{reason}");
    assert!(workload_entry(&one.client, "w1").await.is_some(), "what is there stays");
}

/// A library that moves the wall clock of whoever loads it by `SKEW_SECONDS`; the monotonic one stays.
fn skew() -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("groupcast-skew-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (source, library) = (folder.join("skew.c"), folder.join("skew.so"));
    let code = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdlib.h>\n#include <time.h>\n\
        int clock_gettime(clockid_t id, struct timespec *t) {\n\
          static int (*real)(clockid_t, struct timespec *);\n\
          if (!real) real = dlsym(RTLD_NEXT, \"clock_gettime\");\n\
          int r = real(id, t);\n\
          if (id == CLOCK_REALTIME) { const char *s = getenv(\"SKEW_SECONDS\"); if (s) t->tv_sec += atol(s); }\n\
          return r;\n}\n";
    std::fs::write(&source, code).expect("written");
    let made = std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg("-ldl").status();
    assert!(made.expect("a C compiler, which linking needs too").success());
    library
}

#[tokio::test(flavor = "multi_thread")]
async fn d21_clocks_five_minutes_ahead_and_behind_make_no_difference() {
    let mut plane = plane(0).await;
    let library = skew().display().to_string();
    for (name, seconds) in [("ahead", "300"), ("behind", "-300")] {
        let environment = [("LD_PRELOAD", library.as_str()), ("SKEW_SECONDS", seconds)];
        plane.controllers.push(Controller::start_in(&plane.url(), name, LEAD, &SHORT, &environment));
    }
    plane.ready().await;
    allowed(&plane, "vm", &["h1", "h2", "h3"]).await;
    let guests = [Guest::new(&plane, "h1", 1).await, Guest::new(&plane, "h2", 1).await, Guest::new(&plane, "h3", 1).await];
    for (number, guest) in (5..).zip(&guests) {
        guest.settle("vm", &format!("w-{}", guest.id), number).await;
    }
    // Whoever judges first, the other takes over: both clocks get their turn.
    for silent in ["h1", "h2"] {
        let leader = judging(&mut plane).await;
        let skewed = plane.controllers[leader].log();
        assert!(!skewed.is_empty());
        let guest = guests.iter().find(|guest| guest.id.as_str() == silent).expect("a guest");
        guest.forget();
        guest.beats(false);
        gone(&guests[2].client, silent).await;
        assert!(host_entry(&guests[2].client, "h3").await.is_some());
        if plane.controllers.len() > 1 {
            plane.controllers[leader].kill();
            plane.controllers.remove(leader);
        }
    }
    assert_eq!(guests[2].told(), 0);
    std::fs::remove_dir_all(std::path::Path::new(&library).parent().expect("a folder")).expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn d22_a_health_report_of_an_earlier_incarnation_is_ignored() {
    let plane = plane(1).await;
    allowed(&plane, "vm", &["h1"]).await;
    let old = Guest::new(&plane, "h1", 1).await;
    old.settle("vm", "w1", 5).await;
    old.forget();
    old.beats(false);
    let new = Guest::new(&plane, "h1", 2).await;
    assert_eq!(new.settle("vm", "w1", 5).await, 2);
    let before = sequence(&new.client).await;
    let report = |incarnation| {
        let (network, workload) = ("net".parse().expect("an id"), "w1".parse().expect("an id"));
        HostRequest::Health { boot: 1, reports: vec![HealthReport { network, workload, incarnation, healthy: false }] }
    };
    old.request(report(1)).await;
    assert_eq!(sequence(&new.client).await, before, "nothing was written");
    new.request(report(2)).await;
    assert_eq!(workload_entry(&new.client, "w1").await.expect("an entry")["unhealthy"], true);
}
