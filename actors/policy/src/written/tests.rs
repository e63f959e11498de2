use proptest::prelude::*;

use super::registry::LIST_MAX;
use super::*;
use crate::model::{LABELS_MAX, REQUIREMENTS_MAX};
use crate::testing::*;

fn both_formats(written: &Written) {
    for format in [Format::Json, Format::Yaml] {
        let text = written.write(format);
        assert_eq!(read(format, &text).as_deref(), Ok(std::slice::from_ref(written)), "{text}");
    }
}

proptest! {
    #[test]
    fn documents_read_back(mut group in any_group(), template in any_template(), workload in any_workload(), words in "[ -~]{0,40}") {
        group.internet_member = true;
        group.name = words.clone();
        group.rules.iter_mut().for_each(|rule| rule.description = words.clone());
        both_formats(&Written::Group(group));
        both_formats(&Written::Template(template));
        both_formats(&Written::Workload(workload));
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,80}") {
        let _ = read(Format::Yaml, &text);
        let _ = read(Format::Json, &text);
    }

    /// Trees of the right shape with wrong leaves reach further than random text.
    #[test]
    fn no_tree_panics(picks in prop::collection::vec((0..13usize, 0..10usize), 0..8)) {
        let keys = ["kind", "id", "name", "stateful", "rules", "bindings", "members", "owner", "guid", "direction", "protocol", "ports", "remote"];
        let leaves = [
            Node::Null, Node::Bool(true), Node::Int(-1), Node::Int(i64::MAX), Node::Float(f64::NAN), Node::from(""), Node::from("group"),
            Node::List(vec![]), Node::List(vec![Node::Null, Node::from("any"), Node::Map(vec![])]), Node::Map(vec![("x".into(), Node::Null)]),
        ];
        let map = |picks: &[(usize, usize)]| Node::Map(picks.iter().map(|(k, l)| (keys[*k].to_string(), leaves[*l].clone())).collect());
        let inner = map(&picks);
        let mut outer = picks.clone();
        outer.retain(|(key, _)| *key != 4);
        let mut tree = map(&outer);
        if let Node::Map(entries) = &mut tree {
            entries.push(("rules".into(), Node::List(vec![inner.clone(), Node::from("x")])));
            entries.push(("security_group_rules".into(), Node::List(vec![inner.clone()])));
            entries.push(("fixed_ips".into(), Node::List(vec![inner])));
            entries.push(("binding:host_id".into(), Node::from("h.1")));
        }
        let source = crate::ids::SourceId::new("s").unwrap();
        let _ = (group(&tree, 0), template(&tree, 0), workload(&tree, 0), document(&tree, 0));
        let _ = (cloud_foundry::group(&source, &tree, 0), neutron::group(&source, &tree, 0), neutron::port(&source, &tree, 0));
        let _ = neutron::address_group(&source, &tree, 0);
    }
}

fn group_with(field: &str, node: Node) -> Node {
    Node::Map(vec![("id".into(), Node::from("g")), (field.into(), node)])
}

fn texts(count: usize, text: impl Fn(usize) -> String) -> Node {
    Node::List((0..count).map(|i| Node::Text(text(i))).collect())
}

/// Each limit holds exactly at its bound.
#[test]
fn limits() {
    let rules = |n: usize| group(&group_with("rules", texts(n, |_| "egress any to any".into())), 0).is_ok();
    assert!(rules(GROUP_RULES_MAX) && !rules(GROUP_RULES_MAX + 1));
    let bindings = |n: usize| group(&group_with("bindings", texts(n, |i| format!("space:s{i}"))), 0).is_ok();
    assert!(bindings(BINDINGS_MAX) && !bindings(BINDINGS_MAX + 1));
    let members = |n: usize| group(&group_with("members", texts(n, |_| "10.0.0.1".into())), 0).is_ok();
    assert!(members(STATIC_MEMBERS_MAX) && !members(STATIC_MEMBERS_MAX + 1));
    let name = |n: usize| group(&group_with("name", Node::Text("ä".repeat(n))), 0).is_ok();
    assert!(name(NAME_LEN_MAX) && !name(NAME_LEN_MAX + 1));
    let description = |n: usize| {
        let rule = vec![("rule".into(), Node::from("egress any to any")), ("description".into(), Node::Text("x".repeat(n)))];
        group(&group_with("rules", Node::List(vec![Node::Map(rule)])), 0).is_ok()
    };
    assert!(description(DESCRIPTION_LEN_MAX) && !description(DESCRIPTION_LEN_MAX + 1));
    let workload_with = |field: &str, node: Node| {
        let id = |key: &str| (key.to_string(), Node::from("x"));
        workload(&Node::Map(vec![id("id"), id("host"), id("network"), (field.into(), node)]), 0).is_ok()
    };
    let labels = |n: usize| Node::Map((0..n).map(|i| (format!("k{i}"), Node::from("v"))).collect());
    assert!(workload_with("labels", labels(LABELS_MAX)) && !workload_with("labels", labels(LABELS_MAX + 1)));
    let groups = |n: usize| texts(n, |i| format!("g{i}"));
    assert!(workload_with("groups", groups(LIST_MAX)) && !workload_with("groups", groups(LIST_MAX + 1)));
    let selector = |n: usize| crate::model::parse_selector(&vec!["a"; n].join(",")).is_ok();
    assert!(selector(REQUIREMENTS_MAX) && !selector(REQUIREMENTS_MAX + 1));
    let key = |n: usize| crate::model::Labels::key(&"k".repeat(n)).is_ok();
    assert!(key(crate::model::LABEL_LEN_MAX) && !key(crate::model::LABEL_LEN_MAX + 1));
    let input = |n: usize| nodes(Format::Json, &format!("[]{}", " ".repeat(n - 2))).is_ok();
    assert!(input(INPUT_LEN_MAX) && !input(INPUT_LEN_MAX + 1));
}

#[test]
fn a_flood_of_problems_is_cut() {
    let problems = group(&group_with("rules", texts(GROUP_RULES_MAX, |_| "nonsense".into())), 0).unwrap_err();
    assert_eq!(problems.len(), PROBLEMS_MAX);
}

#[test]
fn one_bad_document_does_not_hide_the_others() {
    let text =
        "kind: group\nid: a\nrules: [ingress tcp 0 from any]\n---\nkind: group\nid: b\nmembers: [x]\n---\nkind: group\nid: c\n";
    let shown: Vec<String> = read(Format::Yaml, text).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "group \"a\": rules[0].ports: port 0 does not exist: ports are 1 to 65535",
            "group \"b\": members[0]: \"x\" is not an address: write one like 10.0.0.1 or 2001:db8::1",
        ]
    );
}

#[test]
fn words_that_old_yaml_takes_for_booleans_are_words() {
    let text = "kind: workload\nid: no\nhost: y\nnetwork: n\nspace: off\n";
    let Ok([Written::Workload(workload)]) =
        read(Format::Yaml, text).as_deref().map(|w| <[Written; 1]>::try_from(w.to_vec()).unwrap())
    else {
        panic!("not read");
    };
    assert_eq!((workload.id.as_str(), workload.network.as_str()), ("no", "n"));
}

/// CASES B 9: port security off and trusted ports are not filtered; B 6: address pairs are kept.
#[test]
fn neutron_ports() {
    let source = crate::ids::SourceId::new("n").unwrap();
    let port = |extra: &str| {
        let text = format!(
            r#"{{"id":"p1","network_id":"net","binding:host_id":"c1.example.org","project_id":"t1","fixed_ips":[{{"ip_address":"10.0.0.1"}}],
            "allowed_address_pairs":[{{"ip_address":"10.9.0.0/16","mac_address":"x"}}],"security_groups":["g1"]{extra}}}"#
        );
        neutron::port(&source, &nodes(Format::Json, &text).unwrap()[0], 0).unwrap().unwrap()
    };
    let plain = port("");
    assert_eq!((plain.id.as_str(), plain.host.as_str(), plain.enforced), ("n-p1", "c1_example_org", None));
    assert_eq!(plain.all_addresses().map(|p| p.to_string()).collect::<Vec<_>>(), ["10.0.0.1/32", "10.9.0.0/16"]);
    assert_eq!(plain.groups.iter().map(ToString::to_string).collect::<Vec<_>>(), ["n-g1"]);
    let open = Some(crate::doc::Enforced { ingress: false, egress: false });
    assert_eq!(port(r#","port_security_enabled":false"#).enforced, open);
    assert_eq!(port(r#","device_owner":"network:dhcp""#).enforced, open);
    let unbound = nodes(Format::Json, r#"{"id":"p1","binding:host_id":""}"#).unwrap();
    assert_eq!(neutron::port(&source, &unbound[0], 0), Ok(None));
}

/// CASES B 1: what means the same is one rule.
#[test]
fn neutron_rules_that_mean_the_same_collapse() {
    let source = crate::ids::SourceId::new("n").unwrap();
    let text = r#"{"id":"g","security_group_rules":[
        {"direction":"ingress","protocol":"tcp","port_range_min":22,"port_range_max":22,"remote_ip_prefix":"0.0.0.0/0"},
        {"direction":"ingress","protocol":"6","port_range_min":22,"port_range_max":22},
        {"direction":"ingress","ethertype":"IPv6","protocol":6,"port_range_min":22,"port_range_max":22}]}"#;
    let group = neutron::group(&source, &nodes(Format::Json, text).unwrap()[0], 0).unwrap();
    assert_eq!(group.rules.len(), 2);
    let mut twice = group.clone();
    twice.rules.push(group.rules[0].clone());
    let problems = crate::check::duplicate_rules(&twice);
    assert_eq!(problems.iter().map(|p| (p.fault, p.rule)).collect::<Vec<_>>(), [(Fault::Conflict, Some(2))]);
}

/// A group read from a source is stored as our document: whatever the dialect accepts must be one.
#[test]
fn what_a_dialect_accepts_reads_back_as_ours() {
    let source = crate::ids::SourceId::new("cf").unwrap();
    // The longest lines there are: as many scattered IPv6 ranges as a rule may have.
    let ranges: Vec<String> = (0..crate::text::REMOTES_MAX)
        .map(|i| format!("2001:db8:ffff:ffff:{:x}:ffff:ffff:fff1-2001:db8:ffff:ffff:{:x}:ffff:ffff:fff9", i, i))
        .collect();
    let spaces: Vec<String> = (0..BINDINGS_MAX / 2 - 1).map(|i| format!(r#"{{"guid":"s{i}"}}"#)).collect();
    let spaces = spaces.join(",");
    let text = format!(
        r#"{{"guid":"g","name":"n","rules":[{{"protocol":"tcp","ports":"1","destination":"{}","description":"two\nlines {}"}}],
        "globally_enabled":{{"running":true,"staging":true}},
        "relationships":{{"running_spaces":{{"data":[{spaces}]}},"staging_spaces":{{"data":[{spaces}]}}}}}}"#,
        ranges.join(","),
        "x".repeat(2 * DESCRIPTION_LEN_MAX)
    );
    let group = cloud_foundry::group(&source, &nodes(Format::Json, &text).unwrap()[0], 0).unwrap();
    assert_eq!(group.bindings.len(), BINDINGS_MAX);
    assert!(group.rules[0].description.starts_with("two lines x"));
    let written = Written::Group(group);
    assert_eq!(read(Format::Json, &written.write(Format::Json)), Ok(vec![written]));
}
