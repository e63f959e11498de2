//! CASES.md A, one test a case.

use std::time::Duration;

use groupcast_control::source::guard::DELETIONS_FREE;
use groupcast_control::source::machine::Answer;
use groupcast_policy::doc::Phases;
use groupcast_policy::model::{Owner, Target};
use groupcast_simulator::fake::cloud_controller::Edit;
use groupcast_simulator::fake::{Fault, What};
use serde_json::json;

use crate::rig::{Cloud, poller};

const LIST: &str = "/v3/security_groups";
const TIME: &str = "/internal/v4/asg_latest_update";

pub async fn with(names: &[&str], page_size: usize) -> Cloud {
    let mut cloud = Cloud::start(page_size).await;
    names.iter().for_each(|name| drop(cloud.shared.lock().create(name)));
    cloud.rig.lead().await;
    cloud.expect_equal();
    cloud.shared.lock().calls.take();
    cloud
}

fn status(status: u16) -> What<Edit> {
    What::Fault(Fault::Status { status, retry_after: None })
}

#[tokio::test]
async fn a1_an_unchanged_timestamp_means_one_request_and_nothing_written() {
    let mut cloud = with(&["a", "b"], 50).await;
    let changes = cloud.rig.streams.changes.len();
    cloud.rig.interval().await;
    let calls = cloud.shared.lock().calls.take();
    assert_eq!(calls, [format!("GET {TIME}?")]);
    assert_eq!(cloud.rig.streams.changes.len(), changes);
}

#[tokio::test]
async fn a2_any_other_timestamp_is_a_full_sync() {
    let mut cloud = with(&["a"], 50).await;
    cloud.shared.lock().create("newer");
    cloud.rig.interval().await;
    cloud.expect_equal();
    // The clock goes back by an hour, and the next change is older than the last.
    cloud.shared.lock().clock_back(Duration::from_secs(3_600));
    let before = cloud.shared.lock().last_update;
    cloud.shared.lock().create("older");
    assert!(cloud.shared.lock().last_update < before);
    cloud.rig.interval().await;
    cloud.expect_equal();
}

#[tokio::test]
async fn a2_a_server_without_timestamp_is_listed_every_time_and_rubbish_is_an_error() {
    let mut cloud = with(&["a"], 50).await;
    cloud.shared.lock().tells_time = false;
    for _ in 0..2 {
        cloud.rig.interval().await;
        assert_eq!(cloud.lists(), 1);
    }
    cloud.shared.lock().tells_time = true;
    for rubbish in [r#"{"last_update":"yesterday"}"#, r#"{"last_update":null}"#, "{}", "<html>"] {
        cloud.shared.lock().upsets.add(TIME, 0, 10, What::Fault(Fault::Body(rubbish.into())));
        cloud.rig.interval().await;
        assert!(cloud.rig.error().contains("time of the last update"), "{}", cloud.rig.error());
        assert_eq!((cloud.lists(), cloud.rig.names().len()), (0, 1));
        cloud.shared.lock().upsets.clear();
    }
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.error(), "");
}

#[tokio::test]
async fn a3_a_deletion_between_pages_begins_the_listing_again() {
    // The seed's scenario: six groups, pages of four; behind the timestamp's back, so that only the overlap can tell.
    let mut cloud = Cloud::start(4).await;
    ["a", "b", "c", "d", "e", "f"].iter().for_each(|name| drop(cloud.shared.lock().create(name)));
    cloud.shared.lock().upsets.add(LIST, 0, 1, What::Then(Edit::DeleteSilently("a".into())));
    cloud.rig.lead().await;
    cloud.expect_equal();
    assert!(cloud.rig.names().contains("d"), "the one that the seed's poller misses");
    let calls = cloud.shared.lock().calls.take();
    let lists: Vec<&String> = calls.iter().filter(|call| call.contains(LIST)).collect();
    assert_eq!(lists.len(), 4, "two pages, twice: {lists:?}");
    assert!(lists[0].contains("page=1&per_page=4&order_by=created_at") && lists[1].contains("page=2&per_page=3"));
}

#[tokio::test]
async fn a3_twenty_thousand_groups_in_pages_of_five_thousand() {
    let mut cloud = Cloud::start(5_000).await;
    // A page that a busy machine makes in more than the usual two seconds would be asked for twice.
    cloud.config["timeout"] = json!("60s");
    cloud.rig.poller = poller(&cloud.config);
    cloud.shared.lock().fill(20_000, 1);
    cloud.shared.lock().upsets.add(LIST, 1, 1, What::Then(Edit::DeleteSilently("group-17".into())));
    cloud.rig.lead().await;
    cloud.expect_equal();
    assert_eq!(cloud.rig.names().len(), 19_999);
    let calls = cloud.shared.lock().calls.take();
    let pages: Vec<&str> = calls.iter().filter(|call| call.contains(LIST)).filter_map(|call| call.split('?').nth(1)).collect();
    let wanted: Vec<String> = [1, 2, 3, 1, 2, 3, 4, 5]
        .iter()
        .map(|page| format!("page={page}&per_page={}&order_by=created_at", 5_001 - page))
        .collect();
    assert_eq!(pages, wanted, "the third page shows the deletion");
}

#[tokio::test]
async fn a3_a_page_size_that_cannot_cover_the_total_says_which_would_do() {
    let mut cloud = Cloud::start(4).await;
    (0..7).for_each(|i| drop(cloud.shared.lock().create(&format!("g{i}"))));
    cloud.rig.lead().await;
    let error = cloud.rig.error();
    assert!(error.contains("7 groups do not fit into overlapping pages of at most 4 (they hold 6)"), "{error}");
    assert!(error.contains("set page_size to 5 or more"), "{error}");
    assert!(cloud.rig.names().is_empty());
    cloud.config["page_size"] = json!(5);
    cloud.rig.poller = poller(&cloud.config);
    cloud.rig.interval().await;
    cloud.expect_equal();
}

#[tokio::test]
async fn a3_the_internal_address_wants_a_certificate() {
    let mut cloud = Cloud::start(50).await;
    cloud.shared.lock().create("a");
    let config = cloud.config.as_object_mut().expect("an object");
    config.remove("client_cert_file");
    config.remove("client_key_file");
    cloud.rig.poller = poller(&cloud.config);
    cloud.rig.lead().await;
    assert!(!cloud.rig.error().is_empty());
    assert_eq!((cloud.lists(), cloud.rig.names().len()), (0, 0));
    // And an authority that signed neither is not trusted.
    let stranger = crate::rig::Folder::new();
    let other = groupcast_simulator::fake::tls::Authority::make(&stranger.0).expect("certificates");
    cloud.config["ca_file"] = json!(other.ca_file);
    cloud.rig.poller = poller(&cloud.config);
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("ertificate"), "{}", cloud.rig.error());
}

#[tokio::test]
async fn a4_a_timestamp_that_moves_begins_the_listing_again_a_bounded_number_of_times() {
    let mut cloud = with(&["a", "b", "c", "d", "e", "f"], 4).await;
    cloud.shared.lock().create("g0");
    cloud.shared.lock().delete("g0");
    cloud.shared.lock().upsets.add(LIST, 1, 1, What::Then(Edit::Create("g".into())));
    // Seven groups do not fit into pages of four any more, which is an error of its own: so one goes.
    cloud.shared.lock().upsets.add(LIST, 1, 1, What::Then(Edit::Delete("a".into())));
    cloud.rig.interval().await;
    cloud.expect_equal();
    assert!(cloud.rig.names().contains("g"));
    // Somebody writes all the time.
    cloud.shared.lock().create("x");
    cloud.shared.lock().delete("x");
    cloud.shared.lock().upsets.add(LIST, 0, 1_000, What::Then(Edit::Touch("b".into())));
    let before = cloud.rig.streams.changes.len();
    cloud.lists();
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.error(), "", "pages that agree are believed");
    assert_eq!(cloud.rig.streams.changes.len(), before + 1);
    assert_eq!(cloud.lists(), 1 + 1 + 2, "two listings that end with their first page, and one that is used");
    cloud.shared.lock().upsets.clear();
    cloud.rig.interval().await;
    cloud.expect_equal();
    // No two pages agree.
    let before = cloud.rig.streams.changes.len();
    cloud.shared.lock().upsets.add(LIST, 0, 1_000, What::Fault(Fault::Repeat));
    cloud.shared.lock().create("y");
    cloud.shared.lock().delete("y");
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("listings were overtaken by changes"), "{}", cloud.rig.error());
    assert_eq!(cloud.rig.streams.changes.len(), before, "what was known stays");
    cloud.shared.lock().upsets.clear();
    cloud.rig.interval().await;
    cloud.expect_equal();
    assert_eq!(cloud.rig.error(), "");
}

#[tokio::test]
async fn a5_a_page_that_fails_is_asked_for_again_and_null_is_no_end() {
    let mut cloud = with(&["a", "b", "c", "d", "e"], 4).await;
    for fault in [
        Fault::Status { status: 500, retry_after: None },
        Fault::Status { status: 503, retry_after: Some(0) },
        Fault::Status { status: 429, retry_after: Some(0) },
        Fault::Truncate,
        Fault::Null,
        Fault::Hang,
        Fault::Repeat,
        Fault::Body("{}".into()),
    ] {
        cloud.shared.lock().create("more");
        cloud.shared.lock().delete("more");
        cloud.shared.lock().upsets.add(LIST, 1, 1, What::Fault(fault.clone()));
        cloud.rig.interval().await;
        assert_eq!(cloud.rig.error(), "", "{fault:?}");
        cloud.expect_equal();
    }
    // For good: what was known stays.
    for fault in [Fault::Status { status: 500, retry_after: None }, Fault::Truncate, Fault::Null, Fault::Repeat] {
        cloud.shared.lock().create("more");
        cloud.shared.lock().delete("more");
        cloud.shared.lock().upsets.add(LIST, 1, 1_000, What::Fault(fault.clone()));
        let before = cloud.rig.streams.changes.len();
        cloud.rig.interval().await;
        assert!(!cloud.rig.error().is_empty(), "{fault:?}");
        assert_eq!((cloud.rig.names().len(), cloud.rig.streams.changes.len()), (5, before), "{fault:?}");
        cloud.shared.lock().upsets.clear();
    }
}

#[tokio::test]
async fn a5_a_server_that_asks_for_a_long_pause_gets_it() {
    let mut cloud = with(&["a"], 50).await;
    cloud.shared.lock().create("b");
    cloud.shared.lock().upsets.add(LIST, 0, 1, What::Fault(Fault::Status { status: 429, retry_after: Some(200) }));
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("429"), "{}", cloud.rig.error());
    let waits = cloud.rig.wake_ms - cloud.rig.now_ms;
    assert!((180_000..=220_000).contains(&waits), "{waits}");
}

#[tokio::test]
async fn a6_no_groups_is_a_legal_answer_but_a_mass_of_deletions_waits() {
    let mut empty = Cloud::start(50).await;
    empty.rig.lead().await;
    assert_eq!((empty.rig.error(), empty.rig.names().len()), (String::new(), 0));

    let names: Vec<String> = (0..DELETIONS_FREE + 1).map(|i| format!("g{i:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut cloud = with(&names, 50).await;
    names.iter().for_each(|name| cloud.shared.lock().delete(name));
    cloud.rig.interval().await;
    let held = cloud.rig.status().held.expect("held back");
    assert_eq!((held.deletions, cloud.rig.names().len()), (names.len(), names.len()));
    // At once is not agreement: both may see one mishap.
    assert_eq!(cloud.rig.poll_now(false).await, Answer::Held { deletions: names.len() });
    assert_eq!(cloud.rig.names().len(), names.len());
    cloud.rig.interval().await;
    assert_eq!((cloud.rig.names().len(), cloud.rig.status().held), (0, None), "a second poll agrees");
    assert_eq!(*cloud.rig.streams.changes.last().expect("written"), names.len(), "as one change");

    // An operator need not wait.
    let mut cloud = with(&names, 50).await;
    names[1..].iter().for_each(|name| cloud.shared.lock().delete(name));
    assert_eq!(cloud.rig.confirm().await, Answer::NothingHeld);
    cloud.rig.interval().await;
    assert!(cloud.rig.status().held.is_none(), "ten are few");
    let mut cloud = with(&names, 50).await;
    names.iter().for_each(|name| cloud.shared.lock().delete(name));
    cloud.rig.interval().await;
    assert!(matches!(cloud.rig.confirm().await, Answer::Done { .. }));
    cloud.expect_equal();

    // A mishap that passes leaves no trace.
    let mut cloud = with(&names, 50).await;
    let groups = std::mem::take(&mut cloud.shared.lock().groups);
    cloud.shared.lock().create("stranger");
    cloud.rig.interval().await;
    assert!(!cloud.rig.names().contains("stranger"), "held back whole");
    cloud.shared.lock().groups = groups;
    cloud.rig.interval().await;
    assert!(cloud.rig.status().held.is_none());
    cloud.expect_equal();
}

#[tokio::test]
async fn a7_a_malformed_group_keeps_its_last_good_version_and_the_others_go_on() {
    let mut cloud = with(&["good", "bad"], 50).await;
    let before = cloud.rig.named("bad").clone();
    let guid = cloud.shared.lock().group("bad").expect("there").guid.clone();
    for instead in [
        json!({"relationships": {"running_spaces": {"data": [{"name": "no guid"}]}}}),
        json!({"rules": [{"protocol": "tcp", "destination": "10.0.0.0/33", "ports": "443"}]}),
        json!({"rules": null}),
        json!({"name": 7}),
    ] {
        cloud.shared.lock().edit("bad", |group| group.instead = Some(instead.clone()));
        cloud.shared.lock().apply(&Edit::Touch("good".into()));
        let good = cloud.rig.named("good").clone();
        cloud.rig.interval().await;
        assert_eq!(cloud.rig.named("bad"), &before, "{instead}");
        assert_ne!(cloud.rig.named("good"), &good, "the others go on");
        let status = cloud.rig.status();
        assert_eq!((status.malformed, cloud.rig.error()), (1, String::new()));
        assert!(status.malformed_named[0].contains(&guid), "{:?}", status.malformed_named);
    }
    cloud.shared.lock().edit("bad", |group| group.instead = None);
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.status().malformed, 0);
}

#[tokio::test]
async fn a7_a_group_without_a_guid_may_be_any_so_nothing_is_deleted() {
    let mut cloud = with(&["a", "b"], 50).await;
    cloud.shared.lock().edit("a", |group| group.instead = Some(json!({"guid": null})));
    cloud.shared.lock().delete("b");
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.names().len(), 2);
    cloud.shared.lock().edit("a", |group| group.instead = None);
    cloud.rig.interval().await;
    cloud.expect_equal();
}

#[tokio::test]
async fn a8_without_a_token_nothing_is_listed_and_one_that_ends_is_replaced() {
    let mut cloud = with(&["a"], 50).await;
    cloud.shared.lock().create("b");
    cloud.shared.lock().tokens.revoke();
    cloud.shared.lock().upsets.add(LIST, 0, 1, What::Fault(Fault::Revoke));
    let tokens = cloud.shared.lock().tokens.count();
    cloud.rig.interval().await;
    cloud.expect_equal();
    assert_eq!(cloud.shared.lock().tokens.count(), tokens + 1, "one new token");
    // Tokens that end at once are made anew before each use.
    cloud.shared.lock().tokens.lasts = Duration::from_secs(5);
    cloud.shared.lock().tokens.revoke();
    cloud.shared.lock().create("c");
    cloud.rig.interval().await;
    cloud.expect_equal();
    // No token, no listing.
    cloud.shared.lock().upsets.add("/oauth/token", 0, 1_000, status(401));
    cloud.shared.lock().create("d");
    cloud.lists();
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("no token: 401"), "{}", cloud.rig.error());
    assert_eq!((cloud.lists(), cloud.rig.names().len()), (0, 3));
    cloud.shared.lock().upsets.clear();
    // 401 for ever is not answered with tokens for ever.
    cloud.shared.lock().upsets.add(LIST, 0, 1_000, What::Fault(Fault::Revoke));
    let tokens = cloud.shared.lock().tokens.count();
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("401"), "{}", cloud.rig.error());
    assert_eq!(cloud.shared.lock().tokens.count(), tokens + 2);
}

#[tokio::test]
async fn a8_every_call_has_a_deadline() {
    let mut cloud = with(&["a"], 50).await;
    cloud.config["timeout"] = json!("100ms");
    for path in [TIME, "/oauth/token", LIST] {
        cloud.rig.poller = poller(&cloud.config);
        cloud.shared.lock().create("b");
        cloud.shared.lock().delete("b");
        cloud.shared.lock().upsets.add(path, 0, 1_000, What::Fault(Fault::Hang));
        cloud.rig.interval().await;
        assert!(cloud.rig.error().contains("did not answer within 100ms"), "{path}: {}", cloud.rig.error());
        cloud.shared.lock().upsets.clear();
    }
}

#[tokio::test]
async fn a9_what_changed_behind_the_timestamp_is_found_by_the_full_sync() {
    let mut cloud = with(&["a", "b"], 50).await;
    cloud.shared.lock().apply(&Edit::CreateSilently("silent".into()));
    cloud.shared.lock().apply(&Edit::DeleteSilently("a".into()));
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.names().len(), 2, "not seen yet");
    for _ in 0..12 {
        cloud.rig.interval().await;
    }
    cloud.expect_equal();
    // An operator's poll is a full one.
    cloud.shared.lock().apply(&Edit::CreateSilently("silent-too".into()));
    assert!(matches!(cloud.rig.poll_now(true).await, Answer::Done { .. }));
    cloud.expect_equal();
}

#[tokio::test]
async fn a9_a_sync_that_failed_does_not_advance_what_is_remembered() {
    let mut cloud = with(&["a"], 50).await;
    cloud.shared.lock().create("b");
    cloud.rig.streams.refuse = 1;
    cloud.rig.interval().await;
    assert!(cloud.rig.error().contains("the bus is away"));
    cloud.rig.interval().await;
    cloud.expect_equal();
    cloud.shared.lock().create("c");
    cloud.shared.lock().upsets.add(LIST, 0, 4, status(500));
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.names().len(), 2);
    cloud.rig.interval().await;
    cloud.expect_equal();
}

#[tokio::test]
async fn a10_whoever_wants_it_fresh_need_not_wait_for_the_interval() {
    let mut cloud = with(&["a"], 50).await;
    let at = cloud.rig.now_ms;
    cloud.shared.lock().create("just-now");
    assert!(matches!(cloud.rig.poll_now(false).await, Answer::Done { .. }));
    cloud.expect_equal();
    assert!(cloud.rig.now_ms - at < 1_000, "no interval went by");
    // Nothing new: one request, and still an answer.
    cloud.lists();
    assert!(matches!(cloud.rig.poll_now(false).await, Answer::Done { .. }));
    assert_eq!(cloud.lists(), 0);
}

#[tokio::test]
async fn a11_all_forms_of_rules_arrive() {
    let mut cloud = Cloud::start(50).await;
    cloud.shared.lock().create("forms");
    cloud.shared.lock().edit("forms", |group| {
        group.rules = json!([
            {"protocol": "tcp", "destination": "10.0.11.5", "ports": "443"},
            {"protocol": "tcp", "destination": "10.0.11.0/24,192.0.2.1-192.0.2.9", "ports": "80, 443 ,8080-8090", "log": true},
            {"protocol": "udp", "destination": "10.1.0.0/16", "ports": "53", "description": "names"},
            {"protocol": "icmp", "destination": "0.0.0.0/0", "type": 8, "code": -1},
            {"protocol": "icmpv6", "destination": "2001:db8::/32", "type": -1, "code": -1},
            {"protocol": "all", "destination": "198.51.100.0/24"},
        ]);
    });
    cloud.rig.lead().await;
    let forms = cloud.rig.named("forms");
    let lines: Vec<String> = forms.rules.iter().map(|rule| rule.rule.to_string()).collect();
    assert_eq!(lines.len(), 6, "{lines:?}");
    for words in ["tcp 443 to 10.0.11.5", "80,443,8080-8090", "udp 53", "icmp 8/any", "any to 198.51.100.0/24"] {
        assert!(lines.iter().any(|line| line.contains(words)), "{words}: {lines:?}");
    }
    assert!(lines[1].ends_with(" log") && forms.rules[2].description == "names");
    // One bad item, and the rule is an error; the group keeps what it had.
    cloud.shared.lock().edit("forms", |group| {
        group.rules = json!([{"protocol": "tcp", "destination": "10.0.0.1,,10.0.0.2", "ports": "443"}]);
    });
    cloud.rig.interval().await;
    assert_eq!((cloud.rig.named("forms").rules.len(), cloud.rig.status().malformed), (6, 1));
    assert!(cloud.rig.status().malformed_named[0].contains("rules[0]"), "{:?}", cloud.rig.status().malformed_named);
}

#[tokio::test]
async fn a12_running_and_staging_global_and_per_space() {
    let mut cloud = Cloud::start(50).await;
    cloud.shared.lock().create("both");
    cloud.shared.lock().edit("both", |group| {
        (group.running, group.staging) = (true, false);
        group.running_spaces = vec!["s1".into()];
        group.staging_spaces = vec!["s2".into()];
    });
    cloud.rig.lead().await;
    let both = cloud.rig.named("both");
    let bound = both.bound();
    assert_eq!(bound[&Target::Global], Phases::RUNNING);
    assert_eq!(bound[&Target::Space("s1".parse().expect("an id"))], Phases::RUNNING);
    assert_eq!(bound[&Target::Space("s2".parse().expect("an id"))], Phases::STAGING);
    assert_eq!((bound.len(), &both.owner), (3, &Owner::Source("cf".parse().expect("an id"))));
}

#[tokio::test]
async fn a13_a_group_without_rules_is_still_there() {
    let mut cloud = with(&["a"], 50).await;
    cloud.shared.lock().edit("a", |group| group.rules = json!([]));
    cloud.rig.interval().await;
    assert!(cloud.rig.named("a").rules.is_empty());
}
