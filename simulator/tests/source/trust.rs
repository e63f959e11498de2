//! When a source must not be believed. Every test names what broke.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use groupcast_control::source::machine::Answer;
use groupcast_control::source::poller::Poller;
use groupcast_control::source::session::{Session, TOKEN_LASTS_MAX, TOKEN_LEFT_MIN, Uaa};
use groupcast_control::source::{self, Failed, Polled};
use groupcast_simulator::fake::local::Local;
use groupcast_simulator::fake::neutron::{Edit, Vanished};
use groupcast_simulator::fake::{CloudController, Fault, What, cloud_controller};
use serde_json::json;

use crate::cloud_controller::with;
use crate::rig::{Folder, Polls, Rig, Stack};

const LIST: &str = "/v3/security_groups";
const PORTS: &str = "/v2.0/ports";

/// A Cloud Controller in this process, whose pauses pass at once.
struct Near {
    transport: Local<CloudController>,
    source: source::cloud_controller::CloudController,
}

impl Polls for Near {
    async fn poll(&mut self, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        self.source.poll(&self.transport, full, marker).await
    }
}

/// So many groups and as many ports on a host.
async fn stack(count: usize, page_size: usize) -> Stack {
    let mut stack = Stack::start(page_size).await;
    {
        let mut fake = stack.shared.lock();
        for number in 0..count {
            fake.create_group(&format!("g{number}"));
            fake.create_port(&format!("p{number}"), "h1", &format!("10.0.{}.{}", number / 200, number % 200 + 1), &[]);
        }
    }
    stack.rig.lead().await;
    assert_eq!(stack.counts(), (count, count));
    stack
}

/// Every poll of a Neutron put the next full sync off, so none ever came.
#[tokio::test]
async fn a_full_sync_of_neutron_comes_when_it_is_due() {
    let mut stack = stack(2, 100).await;
    // Behind the revision's back.
    let id = stack.shared.lock().objects[&"security-groups"].keys().next().expect("there").clone();
    {
        let mut fake = stack.shared.lock();
        fake.objects.get_mut("security-groups").expect("a list").get_mut(&id).expect("there")["name"] = json!("renamed");
    }
    stack.rig.interval().await;
    assert!(!stack.rig.names().contains("renamed"), "its revision did not move");
    let until = stack.rig.now_ms + 660_000;
    while stack.rig.now_ms < until {
        stack.rig.interval().await;
    }
    assert!(stack.rig.names().contains("renamed"), "{:?}", stack.rig.status());
    assert!(stack.rig.status().full_syncs >= 2);
}

/// A credential that lost its role is not shown where ports are: all workloads were removed, one poll later for good.
#[tokio::test]
async fn a_port_without_a_place_is_not_an_unbound_one() {
    for full in [false, true] {
        let mut stack = stack(30, 100).await;
        stack.shared.lock().admin = false;
        for _ in 0..3 {
            let answer = stack.rig.poll_now(full).await;
            assert!(matches!(&answer, Answer::Failed(words) if words.contains("binding:host_id")), "{answer:?}");
            assert!(stack.rig.error().contains("role"), "{}", stack.rig.error());
            stack.rig.now_ms += 120_000;
        }
        assert_eq!(stack.counts(), (30, 30));
        stack.shared.lock().admin = true;
        stack.rig.interval().await;
        assert_eq!((stack.counts(), stack.rig.error()), ((30, 30), String::new()));
    }
    // Never admin: that is said, and not taken for a cloud without workloads.
    let mut stack = Stack::start(100).await;
    stack.shared.lock().admin = false;
    stack.shared.lock().create_port("p", "h1", "10.0.0.1", &[]);
    stack.rig.lead().await;
    assert!(stack.rig.error().contains("binding:host_id"), "{:?}", stack.rig.status());
}

/// What was held of the groups was forgotten over the workloads and the other way round: no confirmation ever sufficed.
#[tokio::test]
async fn groups_and_workloads_that_go_together_are_held_and_confirmed_together() {
    for confirmed in [true, false] {
        let mut stack = stack(30, 100).await;
        for list in ["ports", "security-groups"] {
            stack.shared.lock().objects.get_mut(list).expect("a list").clear();
        }
        stack.rig.interval().await;
        let held = stack.rig.status().held.expect("held back");
        assert_eq!((held.deletions, stack.counts()), (60, (30, 30)));
        assert!(
            ["group os-", "workload os-"].iter().all(|kind| held.named.iter().any(|name| name.starts_with(kind))),
            "{held:?}"
        );
        if confirmed {
            let answer = stack.rig.confirm().await;
            assert!(matches!(answer, Answer::Done { .. }), "{answer:?}");
        } else {
            // A poll at once is no agreement, a later one is.
            assert_eq!(stack.rig.poll_now(true).await, Answer::Held { deletions: 60 });
            stack.rig.interval().await;
            stack.rig.interval().await;
        }
        assert_eq!((stack.counts(), stack.rig.status().held), ((0, 0), None));
    }
}

fn files(folder: &Folder) -> Rig<Poller> {
    let config = json!({"kind": "directory", "id": "files", "path": folder.0});
    Rig::with("files", &config)
}

fn group(id: &str) -> String {
    format!("kind: group\nid: files-{id}\nname: {id}\nrules: [egress tcp 443 to any]\n")
}

/// An unmounted volume emptied the policy: half an interval of a folder is a quarter of a second, and few groups were not guarded at all.
#[tokio::test]
async fn an_empty_folder_is_never_believed_by_itself() {
    for count in [1, 3, 40] {
        let folder = Folder::new();
        for number in 0..count {
            folder.write(&format!("g{number}.yaml"), &group(&format!("g{number}")));
        }
        let mut rig = files(&folder);
        rig.lead().await;
        assert_eq!(rig.names().len(), count);
        for number in 0..count {
            std::fs::remove_file(folder.0.join(format!("g{number}.yaml"))).expect("removed");
        }
        let until = rig.now_ms + 300_000;
        while rig.now_ms < until {
            rig.interval().await;
            rig.now_ms += 20_000;
        }
        assert_eq!(rig.names().len(), count, "an empty folder was believed");
        assert_eq!(rig.status().held.expect("held back").deletions, count);
        // It is mounted again.
        for number in 0..count {
            folder.write(&format!("g{number}.yaml"), &group(&format!("g{number}")));
        }
        rig.interval().await;
        assert_eq!((rig.names().len(), rig.status().held), (count, None));
        // Or it is meant.
        (0..count).for_each(|number| std::fs::remove_file(folder.0.join(format!("g{number}.yaml"))).expect("removed"));
        rig.interval().await;
        assert!(matches!(rig.confirm().await, Answer::Done { .. }));
        assert_eq!(rig.names().len(), 0);
    }
}

/// Most of a folder gone was believed after a quarter of a second.
#[tokio::test]
async fn most_of_a_folder_gone_is_held_for_a_minute() {
    let folder = Folder::new();
    (0..40).for_each(|number| drop(folder.write(&format!("g{number}.yaml"), &group(&format!("g{number}")))));
    let mut rig = files(&folder);
    rig.lead().await;
    (1..40).for_each(|number| std::fs::remove_file(folder.0.join(format!("g{number}.yaml"))).expect("removed"));
    rig.interval().await;
    let begun = rig.now_ms;
    while rig.now_ms < begun + 59_000 {
        assert_eq!(rig.names().len(), 40, "after {} ms", rig.now_ms - begun);
        rig.now_ms += 5_000;
        rig.interval().await;
    }
    rig.now_ms = rig.now_ms.max(begun + 60_000);
    rig.interval().await;
    assert_eq!(rig.names().len(), 1);
}

/// A file of no bytes, as a full disk or a writer that was killed leaves it, deleted its groups.
#[tokio::test]
async fn a_file_without_content_keeps_what_it_said() {
    for empty in ["", "\n  \n", "# nothing yet\n", "---\n"] {
        let folder = Folder::new();
        folder.write("a.yaml", &group("a"));
        folder.write("b.yaml", &group("b"));
        let mut rig = files(&folder);
        rig.lead().await;
        folder.write("b.yaml", empty);
        rig.interval().await;
        rig.now_ms += 300_000;
        rig.interval().await;
        assert_eq!(rig.names().len(), 2, "{empty:?}");
        let status = rig.status();
        assert!(status.malformed == 1 && status.malformed_named[0].contains("b.yaml"), "{empty:?}: {status:?}");
        // Who wants it gone deletes the file, or writes a list without groups.
        folder.write("b.yaml", "[]\n");
        rig.interval().await;
        assert_eq!((rig.names().len(), rig.status().malformed), (1, 0), "{empty:?}");
    }
}

/// A link to a file elsewhere printed that file's lines in the status; the folder's own links, as volumes of containers make them, are read.
#[tokio::test]
async fn a_link_out_of_the_folder_is_not_followed() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let secret = elsewhere.write("secret", "kind: hunter2\nhunter3: hunter4\n");
    folder.write("..data", "");
    std::fs::remove_file(folder.0.join("..data")).expect("removed");
    std::fs::create_dir(folder.0.join("..version")).expect("made");
    std::fs::write(folder.0.join("..version/a.yaml"), group("a")).expect("written");
    std::os::unix::fs::symlink("..version", folder.0.join("..data")).expect("linked");
    std::os::unix::fs::symlink("..data/a.yaml", folder.0.join("a.yaml")).expect("linked");
    let mut rig = files(&folder);
    rig.lead().await;
    assert_eq!((rig.names().len(), rig.status().malformed), (1, 0), "{:?}", rig.status());
    std::os::unix::fs::symlink(&secret, folder.0.join("x.yaml")).expect("linked");
    rig.interval().await;
    let shown = format!("{:?}", rig.status());
    assert!(!shown.contains("hunter"), "{shown}");
    assert!(shown.contains("x.yaml") && shown.contains("outside"), "{shown}");
}

/// Somebody who writes one file all the time kept the whole folder from being read.
#[tokio::test]
async fn a_file_that_never_holds_still_spoils_only_itself() {
    let folder = Folder::new();
    folder.write("a.yaml", &group("a"));
    folder.write("busy.yaml", &group("busy"));
    let mut rig = files(&folder);
    rig.lead().await;
    let path = folder.0.join("busy.yaml");
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let writer = std::thread::spawn(move || {
        let mut number = 0;
        while ended.try_recv().is_err() {
            number += 1;
            std::fs::write(&path, format!("{}# {number}\n", group("busy"))).expect("written");
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    folder.write("b.yaml", &group("b"));
    rig.interval().await;
    end.send(()).expect("it listens");
    writer.join().expect("it ends");
    assert_eq!((rig.error(), rig.names().len()), (String::new(), 3), "{:?}", rig.status());
    assert!(rig.status().malformed_named.iter().any(|words| words.contains("busy.yaml")), "{:?}", rig.status());
    rig.interval().await;
    assert_eq!(rig.status().malformed, 0);
}

/// Fifty groups were deleted by an answer without groups that said that there are fifty.
#[tokio::test]
async fn a_listing_that_contradicts_its_own_count_deletes_nothing() {
    let names: Vec<String> = (0..9).map(|number| format!("g{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (page_size, skip) in [(50, 0), (5, 1), (5, 2)] {
        // In this process, where pauses pass at once: six listings with pauses that double take eight seconds, nine times over.
        let fake = Arc::new(Mutex::new(CloudController::default()));
        let server = || fake.lock().expect("nobody panicked");
        names.iter().for_each(|name| drop(server().create(name)));
        let uaa = Uaa { client_id: "groupcast".into(), secret: Arc::new(|| Ok("secret".to_owned())) };
        let source = source::cloud_controller::CloudController::new("cf".parse().expect("an id"), page_size, uaa);
        let mut rig = Rig::new("cf", "cloud-controller", Near { transport: Local::new(fake.clone()), source });
        rig.lead().await;
        assert_eq!(rig.names().len(), 9);
        server().upsets.add(LIST, skip, 1_000, What::Fault(Fault::Empty));
        for _ in 0..3 {
            let answer = rig.poll_now(true).await;
            assert!(matches!(answer, Answer::Failed(_)), "{page_size}: {answer:?}");
            rig.now_ms += 120_000;
        }
        assert_eq!(rig.names().len(), 9);
        assert!(rig.error().contains("says that there are 9"), "{}", rig.error());
        server().upsets.clear();
        // Once is read again.
        server().upsets.add(LIST, skip, 1, What::Fault(Fault::Empty));
        assert!(matches!(rig.poll_now(true).await, Answer::Done { .. }));
        assert_eq!(rig.names(), names.iter().map(ToString::to_string).collect());
    }
}

/// A group without a guid stopped all deletions, and of two with one guid the later won; nobody was told.
#[tokio::test]
async fn items_without_a_usable_id_and_twins_are_seen() {
    let mut cloud = with(&["a", "b", "c"], 50).await;
    cloud.shared.lock().edit("a", |group| group.instead = Some(json!({"guid": null})));
    cloud.shared.lock().delete("b");
    cloud.rig.interval().await;
    let status = cloud.rig.status();
    assert_eq!((cloud.rig.names().len(), status.malformed), (3, 1));
    assert!(status.malformed_named.iter().any(|words| words.contains("nothing is deleted")), "{status:?}");
    // A guid that no group of ours can have is none of ours: deletions go on.
    for guid in ["no.good".to_owned(), "x".repeat(80)] {
        let mut cloud = with(&["a", "b", "c"], 50).await;
        cloud.shared.lock().edit("a", |group| group.instead = Some(json!({ "guid": guid })));
        cloud.shared.lock().delete("b");
        cloud.rig.interval().await;
        assert_eq!(
            (cloud.rig.names().into_iter().collect::<Vec<_>>(), cloud.rig.status().malformed),
            (vec!["c".to_owned()], 1),
            "{guid}"
        );
    }
    let mut cloud = with(&["a", "b", "c"], 50).await;
    let (before, guid) = (cloud.rig.named("a").clone(), cloud.shared.lock().group("a").expect("there").guid.clone());
    cloud.shared.lock().edit("c", |group| group.instead = Some(json!({ "guid": guid })));
    cloud.rig.interval().await;
    let status = cloud.rig.status();
    assert_eq!(cloud.rig.named("a"), &before, "the last good version stays");
    assert!(
        status.malformed == 1 && status.malformed_named[0].contains(&guid) && status.malformed_named[0].contains("twice"),
        "{status:?}"
    );
}

/// One of Neutron's without an id failed every poll.
#[tokio::test]
async fn a_port_without_an_id_stops_deletions_and_nothing_else() {
    let mut stack = stack(3, 2).await;
    let (id, other) = {
        let mut fake = stack.shared.lock();
        let ids: Vec<String> = fake.objects[&"ports"].keys().cloned().collect();
        fake.delete("ports", &ids[2]);
        (ids[0].clone(), fake.create_port("new", "h1", "10.9.0.9", &[]))
    };
    stack.shared.lock().objects.get_mut("ports").expect("a list").get_mut(&id).expect("there")["id"] = json!(null);
    stack.rig.interval().await;
    assert_eq!(stack.rig.error(), "");
    assert!(stack.workload(&other).is_some(), "{:?}", stack.rig.status());
    assert_eq!(stack.rig.streams.workloads.len(), 4);
    assert!(
        stack.rig.status().malformed_named.iter().any(|words| words.contains("nothing is deleted")),
        "{:?}",
        stack.rig.status()
    );
}

/// What is fetched by id comes in pages too where the server's limit is low: what was on the second was lost.
#[tokio::test]
async fn a_server_with_small_pages_loses_nothing() {
    let mut stack = stack(60, 1_000).await;
    stack.shared.lock().limit_max = 7;
    let ids: Vec<String> = stack.shared.lock().objects[&"ports"].keys().cloned().collect();
    for id in &ids {
        stack.shared.lock().update("ports", id, &json!({"device_owner": "compute:moved"}));
    }
    let groups: Vec<String> = stack.shared.lock().objects[&"security-groups"].keys().cloned().collect();
    for id in &groups {
        stack.shared.lock().update("security-groups", id, &json!({"stateful": false}));
    }
    for full in [false, true] {
        assert!(matches!(stack.rig.poll_now(full).await, Answer::Done { .. }), "{}", stack.rig.error());
        stack.rig.now_ms += 120_000;
        assert_eq!(stack.counts(), (60, 60));
        assert!(stack.rig.streams.owned().all(|group| !group.stateful));
    }
    // Gone between the list and the fetch: the next list decides, not the fetch.
    let gone = ids[3].clone();
    stack.shared.lock().update("ports", &gone, &json!({"device_owner": "compute:again"}));
    let name = stack.shared.lock().objects[&"ports"][&gone]["name"].as_str().expect("text").to_owned();
    stack.shared.lock().upsets.add(PORTS, 8, 1, What::Then(Edit::DeletePort(name)));
    stack.rig.interval().await;
    stack.rig.interval().await;
    assert_eq!((stack.counts(), stack.rig.error()), ((60, 59), String::new()));
}

/// A marker that is gone and is answered with 404 or an empty page ended the list: everything after it was deleted.
#[tokio::test]
async fn a_marker_that_is_gone_begins_the_scan_again_whatever_is_answered() {
    for vanished in [Vanished::Begins, Vanished::NotFound, Vanished::Ends] {
        for full in [false, true] {
            let mut stack = stack(9, 3).await;
            stack.shared.lock().vanished = vanished;
            let marker =
                stack.shared.lock().objects[&"ports"].values().nth(2).expect("there")["name"].as_str().expect("text").to_owned();
            stack.shared.lock().upsets.add(PORTS, 0, 1, What::Then(Edit::DeletePort(marker)));
            let answer = stack.rig.poll_now(full).await;
            assert!(matches!(answer, Answer::Done { .. }), "{vanished:?}: {answer:?}");
            assert_eq!(stack.counts(), (9, 8), "{vanished:?}, full: {full}");
        }
    }
}

/// One 404 on address groups deleted all of them, and with them what rules allow.
#[tokio::test]
async fn a_missing_list_of_address_groups_is_only_believed_where_the_extension_is_missing() {
    let mut stack = Stack::start(100).await;
    stack.shared.lock().insert("address-groups", json!({"name": "ag", "addresses": ["192.0.2.0/24"]}));
    stack.rig.lead().await;
    assert_eq!(stack.counts().0, 1);
    for full in [false, true] {
        stack.shared.lock().upsets.add(
            "/v2.0/address-groups",
            0,
            1_000,
            What::Fault(Fault::Status { status: 404, retry_after: None }),
        );
        stack.rig.poll_now(full).await;
        assert!(stack.rig.error().contains("/v2.0/address-groups"), "{}", stack.rig.error());
        assert_eq!(stack.counts().0, 1);
        stack.shared.lock().upsets.clear();
        stack.rig.now_ms += 120_000;
        assert!(matches!(stack.rig.poll_now(full).await, Answer::Done { .. }));
    }
    // A server that never had them.
    let mut stack = Stack::start(100).await;
    stack.shared.lock().address_groups = false;
    stack.shared.lock().create_group("g");
    stack.rig.lead().await;
    stack.rig.interval().await;
    assert_eq!((stack.counts().0, stack.rig.error()), (1, String::new()));
}

/// `relationships: null` took a group from all its spaces.
#[tokio::test]
async fn bindings_that_are_not_told_are_kept() {
    let mut cloud = with(&["a"], 50).await;
    let before = cloud.rig.named("a").bindings.clone();
    let none = json!({"data": []});
    for instead in [
        json!({"relationships": null}),
        json!({"relationships": {}}),
        json!({"relationships": {"running_spaces": null, "staging_spaces": none}}),
        json!({"relationships": {"running_spaces": {"data": null}, "staging_spaces": none}}),
        json!({"relationships": {"running_spaces": none}}),
        json!({"globally_enabled": null}),
        json!({"globally_enabled": {"running": null, "staging": false}}),
    ] {
        cloud.shared.lock().edit("a", |group| group.instead = Some(instead.clone()));
        cloud.rig.interval().await;
        assert_eq!((&cloud.rig.named("a").bindings, cloud.rig.status().malformed), (&before, 1), "{instead}");
    }
    cloud
        .shared
        .lock()
        .edit("a", |group| group.instead = Some(json!({"relationships": {"running_spaces": none, "staging_spaces": none}})));
    cloud.rig.interval().await;
    assert_eq!((cloud.rig.named("a").bindings.len(), cloud.rig.status().malformed), (0, 0));
}

/// Names and rules that the platforms take were called malformed.
#[tokio::test]
async fn what_the_platforms_take_is_taken() {
    let long = "n".repeat(255);
    let mut cloud = with(&[&long], 50).await;
    assert_eq!((cloud.rig.status().malformed, cloud.rig.names().len()), (0, 1));
    cloud.shared.lock().edit(&long, |group| {
        group.rules = json!([{"protocol": "tcp", "destination": "10.0.0.0/24", "ports": "80", "type": 8, "code": 0}]);
    });
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.status().malformed, 0, "{:?}", cloud.rig.status().malformed_named);
    assert!(cloud.rig.named(&long).rules[0].rule.to_string().contains("tcp 80"));
    let mut stack = Stack::start(100).await;
    let hosts = [format!("{}.example.org", "a".repeat(60)), format!("{}.example.com", "a".repeat(60)), "b".repeat(255)];
    let ports: Vec<String> = (0..)
        .zip(&hosts)
        .map(|(number, host)| stack.shared.lock().create_port("p", host, &format!("10.0.0.{number}"), &[]))
        .collect();
    stack.shared.lock().create_group(&long);
    stack.rig.lead().await;
    assert_eq!((stack.rig.status().malformed, stack.rig.names().len()), (0, 1), "{:?}", stack.rig.status().malformed_named);
    let placed: std::collections::BTreeSet<_> = ports.iter().map(|id| stack.workload(id).expect("placed").host.clone()).collect();
    assert_eq!(placed.len(), hosts.len(), "two hosts got one name");
}

/// A token that lasts for ever ended the poll in a panic, as soon as the controller had run for a second.
#[tokio::test]
async fn a_token_may_last_for_ever() {
    let mut fake = CloudController::default();
    fake.tokens.lasts = Duration::from_secs(u64::MAX);
    let transport = Local::new(Arc::new(Mutex::new(fake)));
    transport.pass(Duration::from_secs(60));
    let uaa = Uaa { client_id: "groupcast".into(), secret: Arc::new(|| Ok("secret".to_owned())) };
    let mut session = Session::new(uaa);
    let token = session.log_in(&transport).await.expect("a token");
    transport.pass(TOKEN_LASTS_MAX - TOKEN_LEFT_MIN - Duration::from_secs(1));
    assert_eq!(session.log_in(&transport).await.expect("a token"), token, "it is used");
    transport.pass(Duration::from_secs(2));
    assert_ne!(session.log_in(&transport).await.expect("a token"), token, "but not for ever");
}

/// One 503 of whoever gives out tokens failed the poll.
#[tokio::test]
async fn a_token_is_asked_for_again() {
    let mut cloud = with(&["a"], 50).await;
    for fault in
        [Fault::Status { status: 503, retry_after: None }, Fault::Truncate, Fault::Status { status: 429, retry_after: Some(0) }]
    {
        cloud.shared.lock().tokens.revoke();
        cloud.shared.lock().create("b");
        cloud.shared.lock().delete("b");
        cloud.shared.lock().upsets.add("/oauth/token", 0, 1, What::Fault(fault.clone()));
        cloud.rig.interval().await;
        assert_eq!(cloud.rig.error(), "", "{fault:?}");
    }
    // A refusal is meant.
    cloud.shared.lock().tokens.revoke();
    cloud.shared.lock().create("c");
    cloud.shared.lock().calls.take();
    cloud.shared.lock().upsets.add("/oauth/token", 0, 1_000, What::Fault(Fault::Status { status: 401, retry_after: None }));
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("no token: 401"), "{}", cloud.rig.error());
    assert_eq!(cloud.shared.lock().calls.of("/oauth/token"), 1);
}

/// `Retry-After` as a date, which the standard allows, was not heeded.
#[tokio::test]
async fn a_date_to_come_back_at_is_heeded() {
    for path in [LIST, "/oauth/token"] {
        let mut cloud = with(&["a"], 50).await;
        cloud.shared.lock().tokens.revoke();
        cloud.shared.lock().create("b");
        cloud.shared.lock().upsets.add(path, 0, 1, What::Fault(Fault::Until { status: 503, seconds: 200 }));
        cloud.rig.interval().await;
        assert!(cloud.rig.error().contains("503"), "{path}: {}", cloud.rig.error());
        let waits = cloud.rig.wake_ms - cloud.rig.now_ms;
        assert!((170_000..=220_000).contains(&waits), "{path}: {waits}");
    }
}

/// Somebody who changes groups all the time kept every listing from being used.
#[tokio::test]
async fn steady_churn_starves_no_sync() {
    for page_size in [50, 5] {
        let names: Vec<String> = (0..8).map(|number| format!("g{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut cloud = with(&names, page_size).await;
        let touched = cloud_controller::Edit::Touch("g1".into());
        cloud.shared.lock().upsets.add(LIST, 0, 100_000, What::Then(touched));
        cloud.shared.lock().delete("g7");
        cloud.shared.lock().create("new");
        cloud.rig.interval().await;
        assert_eq!(cloud.rig.error(), "", "pages of {page_size}");
        cloud.expect_equal();
        // What came while it was read is found by the next poll.
        cloud.lists();
        cloud.shared.lock().upsets.clear();
        cloud.rig.interval().await;
        assert!(cloud.lists() > 0, "the time of before is not remembered as that of now");
        let port = cloud.shared.lock().group("g1").expect("there").rules[0]["ports"].as_str().expect("text").to_owned();
        assert!(cloud.rig.named("g1").rules[0].rule.to_string().contains(&format!("tcp {port} ")));
    }
}
