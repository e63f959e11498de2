//! CASES.md B, what concerns the source.

use groupcast_policy::doc::Enforced;
use groupcast_simulator::fake::neutron::Edit;
use groupcast_simulator::fake::{Fault, What};
use serde_json::json;

use crate::rig::Stack;

const NOTHING: Enforced = Enforced { ingress: false, egress: false };

fn lines(stack: &Stack, name: &str) -> Vec<String> {
    let mut lines: Vec<String> = stack.rig.named(name).rules.iter().map(|rule| rule.rule.to_string()).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn b1_to_b4_equal_rules_are_one() {
    let mut stack = Stack::start(100).await;
    let id = stack.shared.lock().insert("security-groups", json!({"name": "g"}));
    for rule in [
        json!({"direction": "ingress", "ethertype": "IPv4", "protocol": "tcp", "port_range_min": 22, "port_range_max": 22}),
        json!({"direction": "ingress", "ethertype": "IPv4", "protocol": "6", "port_range_min": 22, "port_range_max": 22, "remote_ip_prefix": "0.0.0.0/0"}),
        json!({"direction": "ingress", "ethertype": "IPv6", "protocol": "icmp", "port_range_min": 128}),
        json!({"direction": "egress", "ethertype": "IPv4", "protocol": "0"}),
        json!({"direction": "egress", "ethertype": "IPv4"}),
        json!({"direction": "egress", "ethertype": "IPv4", "protocol": "47"}),
        json!({"direction": "ingress", "ethertype": "IPv4", "remote_ip_prefix": "10.0.0.5/24"}),
    ] {
        stack.shared.lock().add_rule(&id, rule);
    }
    stack.rig.lead().await;
    let lines = lines(&stack, "g");
    assert_eq!(lines.len(), 5, "{lines:?}");
    for words in ["ingress ipv4 tcp 22 from any", "icmp 128/any", "egress ipv4 any to any", "gre", "from 10.0.0.0/24"] {
        assert!(lines.iter().any(|line| line.contains(words)), "{words}: {lines:?}");
    }
}

#[tokio::test]
async fn b5_b6_remote_groups_address_groups_and_pairs() {
    let mut stack = Stack::start(100).await;
    let (web, addresses) = {
        let mut fake = stack.shared.lock();
        let web = fake.create_group("web");
        let addresses = fake.insert("address-groups", json!({"name": "ag", "addresses": ["192.0.2.0/24", "2001:db8::/64"]}));
        fake.add_rule(&web, json!({"direction": "ingress", "ethertype": "IPv4", "remote_group_id": web}));
        fake.add_rule(&web, json!({"direction": "ingress", "ethertype": "IPv4", "remote_group_id": "unknown"}));
        fake.add_rule(&web, json!({"direction": "egress", "ethertype": "IPv4", "remote_address_group_id": addresses}));
        (web, addresses)
    };
    let port = stack.shared.lock().create_port("p", "node1.example.org", "10.0.0.5", &[&web]);
    stack.shared.lock().update(
        "ports",
        &port,
        &json!({"allowed_address_pairs": [{"ip_address": "10.9.0.0/16"}, {"ip_address": "0.0.0.0/0"}]}),
    );
    stack.rig.lead().await;
    let lines = lines(&stack, "web");
    for words in [format!("from group:os-{web}"), "from group:os-unknown".into(), format!("to group:os-{addresses}")] {
        assert!(lines.iter().any(|line| line.contains(&words)), "{words}: {lines:?}");
    }
    let group = &stack.rig.streams.groups[&format!("os-{addresses}").parse().expect("an id")].1;
    assert_eq!(group.members.len(), 2);
    let workload = stack.workload(&port).expect("placed");
    assert_eq!((workload.host.as_str(), workload.pairs.len()), ("node1_example_org", 2));
    assert!(workload.groups.contains(&format!("os-{web}").parse().expect("an id")) && workload.template.is_none());
    // B 7: the pair as wide as the internet is no member.
    assert!(stack.rig.named("web").admitted(workload).all(|member| !groupcast_policy::model::is_internet(member)));
}

#[tokio::test]
async fn b9_port_security_off_and_trusted_ports_are_not_filtered_and_unbound_ones_are_nowhere() {
    let mut stack = Stack::start(100).await;
    let [plain, off, dhcp, unbound] = {
        let mut fake = stack.shared.lock();
        let ports = [1, 2, 3, 4].map(|i| fake.create_port(&format!("p{i}"), "h1", &format!("10.0.0.{i}"), &[]));
        fake.update("ports", &ports[1], &json!({"port_security_enabled": false}));
        fake.update("ports", &ports[2], &json!({"device_owner": "network:dhcp"}));
        fake.update("ports", &ports[3], &json!({"binding:host_id": ""}));
        ports
    };
    stack.rig.lead().await;
    let enforced = |id: &str| stack.workload(id).map(|workload| workload.enforced);
    assert_eq!((enforced(&plain), enforced(&off), enforced(&dhcp)), (Some(None), Some(Some(NOTHING)), Some(Some(NOTHING))));
    assert_eq!(enforced(&unbound), None);
    // It is bound, moves, and is unbound again.
    for (host, found) in [("h2", Some("h2")), ("h3", Some("h3")), ("", None)] {
        stack.shared.lock().update("ports", &unbound, &json!({"binding:host_id": host}));
        stack.rig.interval().await;
        assert_eq!(stack.workload(&unbound).map(|workload| workload.host.as_str()), found);
    }
}

#[tokio::test]
async fn b11_only_what_moved_is_fetched_and_old_answers_are_ignored() {
    let mut stack = Stack::start(100).await;
    let ids: Vec<String> = (0..5).map(|i| stack.shared.lock().create_group(&format!("g{i}"))).collect();
    stack.rig.lead().await;
    stack.shared.lock().calls.take();
    stack.rig.interval().await;
    let calls = stack.shared.lock().calls.take();
    assert_eq!(calls.len(), 3, "{calls:?}");
    assert!(calls[0].contains("fields=id&fields=revision_number"), "{calls:?}");
    stack.shared.lock().add_rule(
        &ids[1],
        json!({"direction": "egress", "ethertype": "IPv4", "protocol": "udp", "port_range_min": 53, "port_range_max": 53}),
    );
    stack.rig.interval().await;
    let calls = stack.shared.lock().calls.take();
    assert!(calls.iter().any(|call| call.contains(&format!("id={}", ids[1])) && !call.contains(&ids[0])), "{calls:?}");
    assert_eq!(lines(&stack, "g1").len(), 2);
    // An answer that is older than what is known.
    let old = stack.shared.lock().objects[&"security-groups"][&ids[1]].clone();
    let revision = old["revision_number"].as_i64().expect("a number");
    stack.shared.lock().objects.get_mut("security-groups").expect("a list").insert(ids[1].clone(), {
        let mut older = old.clone();
        older["revision_number"] = json!(revision - 1);
        older["name"] = json!("old");
        older
    });
    stack.rig.interval().await;
    assert!(stack.rig.names().contains("g1") && !stack.rig.names().contains("old"));
    // Deleted, then shown once more by an old answer.
    let groups = stack.shared.lock().objects[&"security-groups"].clone();
    stack.shared.lock().delete("security-groups", &ids[2]);
    stack.rig.interval().await;
    assert!(!stack.rig.names().contains("g2"));
    let mut ghost = groups[&ids[2]].clone();
    ghost["revision_number"] = json!(1);
    stack.shared.lock().objects.get_mut("security-groups").expect("a list").insert(ids[2].clone(), ghost);
    stack.rig.interval().await;
    assert!(!stack.rig.names().contains("g2"), "update after delete");
}

#[tokio::test]
async fn a_full_last_page_is_the_end_and_a_marker_that_is_gone_begins_the_scan_again() {
    let mut stack = Stack::start(4).await;
    (0..8).for_each(|i| drop(stack.shared.lock().create_group(&format!("g{i}"))));
    stack.rig.lead().await;
    assert_eq!(stack.rig.names().len(), 8);
    // The marker of the second page is deleted before it is asked for.
    let marker = stack.shared.lock().objects[&"security-groups"].values().nth(3).expect("there")["name"]
        .as_str()
        .expect("text")
        .to_owned();
    stack.shared.lock().upsets.add("/v2.0/security-groups", 0, 1, What::Then(Edit::DeleteGroup(marker.clone())));
    stack.rig.interval().await;
    assert_eq!((stack.rig.error(), stack.rig.names().len()), (String::new(), 7));
    assert!(!stack.rig.names().contains(&marker));
    // A server that heeds no marker, once and for good.
    for (times, error) in [(1, ""), (1_000, "scans of /v2.0/security-groups were overtaken by deletions")] {
        stack.shared.lock().upsets.add("/v2.0/security-groups", 1, times, What::Fault(Fault::Repeat));
        stack.rig.interval().await;
        assert_eq!(
            (stack.rig.error().contains(error), stack.rig.error().is_empty()),
            (true, error.is_empty()),
            "{}",
            stack.rig.error()
        );
        assert_eq!(stack.rig.names().len(), 7);
        stack.shared.lock().upsets.clear();
    }
}

#[tokio::test]
async fn faults_leave_what_is_known() {
    let mut stack = Stack::start(4).await;
    (0..6).for_each(|i| drop(stack.shared.lock().create_group(&format!("g{i}"))));
    stack.shared.lock().create_port("p", "h1", "10.0.0.1", &[]);
    stack.rig.lead().await;
    for path in ["/v2.0/security-groups", "/v2.0/address-groups", "/v2.0/ports"] {
        for fault in [Fault::Status { status: 503, retry_after: None }, Fault::Truncate, Fault::Null, Fault::Body("{}".into())] {
            stack.shared.lock().upsets.add(path, 0, 1, What::Fault(fault.clone()));
            stack.rig.interval().await;
            assert_eq!(stack.rig.error(), "", "{path} {fault:?}: once is repeated");
            stack.shared.lock().upsets.add(path, 0, 1_000, What::Fault(fault.clone()));
            stack.rig.interval().await;
            assert!(!stack.rig.error().is_empty(), "{path} {fault:?}");
            assert_eq!((stack.rig.names().len(), stack.rig.streams.workloads.len()), (6, 1), "{path} {fault:?}");
            stack.shared.lock().upsets.clear();
        }
    }
    stack.shared.lock().tokens.revoke();
    stack.rig.interval().await;
    assert_eq!(stack.rig.error(), "");
    stack.shared.lock().tokens.revoke();
    stack.shared.lock().upsets.add("/v3/auth/tokens", 0, 10, What::Fault(Fault::Status { status: 401, retry_after: None }));
    stack.rig.interval().await;
    assert!(stack.rig.error().contains("no token: 401"), "{}", stack.rig.error());
}

#[tokio::test]
async fn one_malformed_item_spoils_only_itself() {
    let mut stack = Stack::start(100).await;
    let good = stack.shared.lock().create_group("good");
    let bad = stack.shared.lock().create_group("bad");
    let port = stack.shared.lock().create_port("p", "h1", "10.0.0.1", &[&good]);
    stack.rig.lead().await;
    stack.shared.lock().add_rule(&bad, json!({"direction": "ingress", "ethertype": "IPv4", "remote_ip_prefix": "2001:db8::/32"}));
    stack.shared.lock().update("ports", &port, &json!({"fixed_ips": [{"ip_address": "10.0.0.999"}]}));
    stack.shared.lock().add_rule(&good, json!({"direction": "egress", "ethertype": "IPv6"}));
    // Two ports with one address: the second cannot have it.
    let twin = stack.shared.lock().create_port("twin", "h1", "10.0.0.7", &[]);
    let other = stack.shared.lock().create_port("other", "h2", "10.0.0.7", &[]);
    stack.rig.interval().await;
    assert_eq!((lines(&stack, "good").len(), lines(&stack, "bad").len()), (2, 1));
    assert!(
        stack
            .workload(&port)
            .expect("kept")
            .addresses
            .contains(&groupcast_policy::net::Prefix::v4(0x0a00_0001, 32).expect("a prefix"))
    );
    let status = stack.rig.status();
    assert_eq!((status.malformed, stack.rig.error()), (3, String::new()), "{:?}", status.malformed_named);
    assert_eq!([&twin, &other].iter().filter(|id| stack.workload(id).is_some()).count(), 1);
    for id in [&bad, &port] {
        assert!(status.malformed_named.iter().any(|words| words.contains(id.as_str())), "{:?}", status.malformed_named);
    }
}
