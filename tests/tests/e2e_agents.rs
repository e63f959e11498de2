//! From an operator's request to the kernels of three hosts, with real agents, by real packets.

use std::time::Duration;

use groupcast_bus_config::lab::{Error, HOSTS_MAX, Lab, WORKLOADS_MAX};
use groupcast_tests::field::{Field, PLACES, PORTS, possible, talks};
use groupcast_tests::gateway::group;
use serde_json::{Value, json};

const CONNECTS_WITHIN: Duration = Duration::from_secs(10);
const SILENT_FOR: Duration = Duration::from_millis(500);

fn bound(id: &str, rules: &[&str], app: &str) -> Value {
    let mut document = group(id, rules);
    document["bindings"] = json!([format!("app:{app}")]);
    document
}

/// Every flow between workloads is as expected: by packets and by explanation.
async fn flows(field: &Field, allowed: &[(&str, &str, u16)]) {
    let workloads = PLACES.map(|place| place.workload);
    for from in workloads {
        for to in workloads.into_iter().filter(|to| *to != from) {
            for port in PORTS {
                field.expect(from, to, port, allowed.contains(&(from, to, port))).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_enforced_everywhere_explained_as_packets_go_and_undone() {
    if !possible() {
        return;
    }
    let field = Field::start().await;
    flows(&field, &[]).await;

    let shop = [bound("web", &["egress tcp 5432 to group:db"], "web"), bound("db", &["ingress tcp 5432 from group:web"], "db")];
    let change = field.admin.change(&shop).await;
    let progress = field.enforced(change).await;
    assert_eq!((&progress["span"], &progress["enforced"]), (&json!(2), &json!(2)), "only the hosts that use it: {progress}");
    flows(&field, &[("web-1", "db-1", 5432)]).await;
    let told = field.admin.get("/v1/explain?from=web-1&to=db-1&traffic=tcp/5432").await;
    for side in ["egress", "ingress"] {
        assert_eq!(told.body[side]["enforced"], true, "{}", told.text);
    }
    // Each host says the same about its own half.
    for (host, word) in [("h1", "allowed"), ("h2", "allowed")] {
        let (from, to) = (field.lab.workloads["web-1"].address.to_string(), field.lab.workloads["db-1"].address.to_string());
        let said = field.agents[host].ask(&["explain", &from, &to, "tcp/5432"]).expect("it answers");
        assert!(said.code == 0 && said.stdout.starts_with(word), "{said:?}");
    }

    // A wider change, on three hosts; one document of it is only a name to two of them.
    let open = [
        bound("web", &["egress tcp 5432,8080 to group:db", "ingress tcp 8080 from group:jobs"], "web"),
        bound("db", &["ingress tcp 5432,8080 from group:web"], "db"),
        bound("jobs", &["egress tcp 8080 to group:web"], "jobs"),
    ];
    let wider = field.admin.change(&open).await;
    assert_eq!(field.enforced(wider).await["span"], 3);
    flows(&field, &[("web-1", "db-1", 5432), ("web-1", "db-1", 8080), ("job-1", "web-1", 8080)]).await;

    // Undone, it is as before, and a connection that lives by it ends.
    let stream = field.lab.connect("job-1", "web-1", 8080, CONNECTS_WITHIN).expect("tried").expect("allowed");
    assert!(talks(&stream, CONNECTS_WITHIN));
    let undone = field.admin.post(&format!("/v1/changes/{wider}/undo"), json!({}), &[]).await;
    assert_eq!(undone.status, 201, "{}", undone.text);
    field.enforced(undone.body["change"].as_u64().expect("a number")).await;
    assert!(!talks(&stream, SILENT_FOR), "a revoked flow goes on");
    flows(&field, &[("web-1", "db-1", 5432)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_its_agent_keeps_the_last_policy_and_is_named() {
    if !possible() {
        return;
    }
    let mut field = Field::start().await;
    let shop = |port: u16| {
        let (egress, ingress) = (format!("egress tcp {port} to group:db"), format!("ingress tcp {port} from group:web"));
        [bound("web", &[&egress], "web"), bound("db", &[&ingress], "db")]
    };
    let first = field.admin.change(&shop(5432)).await;
    field.enforced(first).await;
    field.expect("web-1", "db-1", 5432, true).await;

    field.agents.get_mut("h2").expect("an agent").kill();
    let second = field.admin.change(&shop(8080)).await;
    let said = field.up.groupcast(&["wait", &second.to_string(), "--timeout", "2s"]).expect("it runs");
    assert_eq!(said.code, 5, "{said:?}");
    assert!(said.stderr.contains("h2") && !said.stderr.contains("h1:"), "the laggard is named, and nobody else: {said:?}");
    // The receiver still has the first policy, the sender the second: what both allow is nothing.
    assert!(!field.passes("web-1", "db-1", 5432, false) && !field.passes("web-1", "db-1", 8080, false));
    let told = field.admin.get("/v1/explain?from=web-1&to=db-1&traffic=tcp/8080").await;
    assert_eq!((&told.body["allowed"], &told.body["ingress"]["enforced"]), (&json!(true), &json!(false)), "{}", told.text);

    field.start_agent("h2");
    field.enforced(second).await;
    field.expect("web-1", "db-1", 8080, true).await;
    field.expect("web-1", "db-1", 5432, false).await;
}

#[test]
fn a_lab_holds_as_much_as_it_says_and_no_more() {
    if !possible() {
        return;
    }
    let mut lab = Lab::new(([127, 0, 0, 1], 4222).into()).expect("a lab");
    for number in 0..HOSTS_MAX {
        lab.host(&format!("h{number}")).expect("a host");
    }
    assert!(matches!(lab.host("one-more"), Err(Error::Full)));
    for number in 0..WORKLOADS_MAX {
        lab.workload(&format!("w{number}"), "h0").expect("a workload");
    }
    assert!(matches!(lab.workload("one-more", "h0"), Err(Error::Full)));
    assert!(matches!(lab.workload("lost", "h99"), Err(Error::Unknown(_))));
    // The farthest two see each other: nobody judges here.
    lab.workload("far", &format!("h{}", HOSTS_MAX - 1)).expect("a workload");
    let far = lab.workloads["far"].namespace.listen(([0, 0, 0, 0], 80).into()).expect("it listens");
    assert!(lab.connect(&format!("w{}", WORKLOADS_MAX - 1), "far", 80, CONNECTS_WITHIN).expect("tried").is_ok());
    drop(far);
}
