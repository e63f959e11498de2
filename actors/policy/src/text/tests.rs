use proptest::prelude::*;

use super::*;
use crate::net::{AddressSet, Family};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};
use crate::testing::any_rule;

/// What is written → what is printed. Lines of one block mean the same.
#[test]
fn lines_have_one_normal_form() {
    for (written, printed) in [
        ("ingress tcp 443,8000-8999 from group:web log", "ingress tcp 443,8000-8999 from group:web log"),
        ("deny egress any to 169.254.169.254/32", "deny egress any to 169.254.169.254/32"),
        ("egress ipv6 icmp 128/any to any", "egress ipv6 icmp 128/any to any"),
        ("allow ingress tcp 22 from any", "ingress tcp 22 from any"),
        ("ingress 6 22 from any", "ingress tcp 22 from any"),
        ("ingress ipv4 tcp 22 from 0.0.0.0/0", "ingress ipv4 tcp 22 from any"),
        ("ingress tcp 22 from 0.0.0.0/0", "ingress ipv4 tcp 22 from any"),
        ("ingress tcp 22 from 0.0.0.0/0,::/0", "ingress tcp 22 from any"),
        ("ingress tcp 22 from 0.0.0.0/1,128.0.0.0/1", "ingress ipv4 tcp 22 from any"),
        ("ingress ipv4 tcp 22 from 10.0.0.5/24", "ingress tcp 22 from 10.0.0.0/24"),
        ("ingress tcp 1-65535 from any", "ingress tcp from any"),
        ("ingress tcp any from any", "ingress tcp from any"),
        ("ingress tcp 80 , 443,81 from any", "ingress tcp 80-81,443 from any"),
        ("ingress 0 from any", "ingress any from any"),
        ("ingress 1 from any", "ingress icmp from any"),
        ("ingress 58 from any", "ingress ipv6 icmp from any"),
        ("ingress icmpv6 135 from fe80::/10", "ingress icmp 135/any from fe80::/10"),
        ("ingress icmp 8 from any", "ingress icmp 8/any from any"),
        ("ingress icmp any/any from any", "ingress icmp from any"),
        ("ingress icmp any/3 from any", "ingress icmp any/3 from any"),
        ("ingress gre from any", "ingress gre from any"),
        ("ingress 200 from any", "ingress 200 from any"),
        ("egress udp 53 to 10.0.0.1-10.0.0.3", "egress udp 53 to 10.0.0.1-10.0.0.3"),
        ("egress udp 53 to 10.0.0.0-10.0.0.255,10.0.1.0/24", "egress udp 53 to 10.0.0.0/23"),
        ("egress sctp 5000 to 2001:db8::1,10.1.2.3", "egress sctp 5000 to 10.1.2.3/32,2001:db8::1/128"),
        ("  egress   any\tto  any  ", "egress any to any"),
    ] {
        let rule = parse_rule(written).unwrap_or_else(|e| panic!("{written}: {e:?}"));
        assert_eq!(rule.to_string(), printed, "{written}");
        assert_eq!(parse_rule(printed), Ok(rule), "{printed}");
    }
}

/// A bad line → the field that is named, and a word of the advice.
#[test]
fn a_bad_line_names_field_and_remedy() {
    for (line, field, advice) in [
        ("", "direction", "write ingress or egress"),
        ("in tcp 80 from any", "direction", "write ingress or egress"),
        ("tcp 80 from any", "direction", "write ingress or egress"),
        ("ingress", "protocol", "missing"),
        ("ingress tpc 80 from any", "protocol", "is not known"),
        ("ingress 256 from any", "protocol", "0 to 255"),
        ("ingress tcp 0 from any", "ports", "1 to 65535"),
        ("ingress tcp 65536 from any", "ports", "1 to 65535"),
        ("ingress tcp abc from any", "ports", "not a port"),
        ("ingress tcp 90-80 from any", "ports", "write 80-90"),
        ("ingress tcp 80, from any", "ports", "not a port"),
        ("ingress tcp 80,,81 from any", "ports", "extra comma"),
        ("ingress gre 80 from any", "ports", "has no ports"),
        ("ingress any 80 from any", "ports", "has no ports"),
        ("ingress dccp 5 from any", "ports", "kernels no longer track"),
        ("deny egress 33 5-7 to any", "ports", "kernels no longer track"),
        ("ingress icmp 256 from any", "icmp", "0 to 255"),
        ("ingress icmp 8/x from any", "icmp", "icmp code"),
        ("ingress ipv4 icmpv6 from any", "protocol", "only in IPv6"),
        ("ingress tcp 80", "remote", "missing"),
        ("ingress tcp 80 from", "remote", "missing"),
        ("ingress tcp 80 to any", "remote", "write from"),
        ("egress tcp 80 from any", "remote", "write to"),
        ("ingress tcp 80 from 10.0.0.300", "remote", "not an address"),
        ("ingress tcp 80 from 10.0.0.01", "remote", "leading zero"),
        ("ingress tcp 80 from 10.0.0.0/33", "remote", "0 to 32"),
        ("ingress tcp 80 from 10.0.0.2-10.0.0.1", "remote", "inverted"),
        ("ingress tcp 80 from 10.0.0.2-::1", "remote", "mixes"),
        ("ingress tcp 80 from group:a.b", "remote", "group id"),
        ("ingress ipv6 tcp 80 from 10.0.0.0/8", "remote", "family"),
        ("ingress icmpv6 from 10.0.0.0/8", "remote", "family"),
        ("ingress tcp 80 from any logg", "rule", "not expected"),
        ("ingress tcp 80 from any log log", "rule", "not expected"),
    ] {
        let errors = parse_rule(line).expect_err(line);
        assert!(errors.iter().any(|e| e.field == field && e.message.contains(advice)), "{line}: {errors:?}");
    }
}

#[test]
fn all_errors_of_a_line_come_at_once() {
    let errors = parse_rule("in tcp 0,70000 to 10.0.0.300,x").unwrap_err();
    let fields: Vec<&str> = errors.iter().map(|e| e.field).collect();
    assert_eq!(fields, ["direction", "ports", "ports", "remote", "remote"]);
}

#[test]
fn lists_are_bounded() {
    let ports = |n: usize| (0..n).map(|i| (i * 2 + 1).to_string()).collect::<Vec<_>>().join(",");
    assert!(port_list(&ports(PORTS_MAX)).is_ok());
    assert!(port_list(&ports(PORTS_MAX + 1)).is_err());
    let remotes = |n: usize| vec!["10.0.0.1"; n].join(",");
    assert!(parse_rule(&format!("egress any to {}", remotes(REMOTES_MAX))).is_ok());
    assert!(parse_rule(&format!("egress any to {}", remotes(REMOTES_MAX + 1))).is_err());
    let spaces = |n: usize| format!("egress any to any{}", " ".repeat(n));
    let rest = RULE_TEXT_LEN_MAX - "egress any to any".len();
    assert!(parse_rule(&spaces(rest)).is_ok());
    assert!(parse_rule(&spaces(rest + 1)).is_err());
}

#[test]
fn prefix_lists_hold_exactly_the_set() {
    let everything = AddressSet::from_prefixes([crate::net::Prefix::v4(0, 0).unwrap(), crate::net::Prefix::v6(0, 0).unwrap()]);
    assert_eq!(prefix_list(&everything).len(), 2);
    let set = address_list(["10.0.0.1-10.0.0.6", "::1-::2", "255.255.255.255"]).unwrap();
    let texts: Vec<String> = prefix_list(&set).iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["10.0.0.1/32", "10.0.0.2/31", "10.0.0.4/31", "10.0.0.6/32", "255.255.255.255/32", "::1/128", "::2/128"]);
}

#[test]
fn a_rule_reads_as_what_it_says() {
    let rule = parse_rule("deny egress ipv6 udp 53 to group:dns log").unwrap();
    assert_eq!(
        rule,
        Rule {
            action: Action::Deny,
            direction: Direction::Egress,
            family: Some(Family::V6),
            traffic: Traffic::Ports { protocol: 17, ports: [crate::net::Span::one(53)].into_iter().collect() },
            remote: Remote::Group(crate::ids::GroupId::new("dns").unwrap()),
            log: true,
        }
    );
}

proptest! {
    #[test]
    fn what_is_printed_parses_back(rule in any_rule()) {
        prop_assert_eq!(parse_rule(&rule.to_string()), Ok(rule.clone()));
        // The normal form is a fixed point.
        prop_assert_eq!(rule.clone().normalised(), Ok(rule));
    }

    #[test]
    fn prefix_lists_make_the_same_set(a: u32, b: u32, c: u128, d: u128) {
        let set = AddressSet {
            v4: crate::net::Span::new(a.min(b), a.max(b)).into_iter().collect(),
            v6: crate::net::Span::new(c.min(d), c.max(d)).into_iter().collect(),
        };
        prop_assert_eq!(AddressSet::from_prefixes(prefix_list(&set)), set.clone());
        prop_assert_eq!(address_list(address_text(&set).split(',')), Ok(set));
    }

    #[test]
    fn no_line_panics(line in "\\PC{0,60}") {
        let _ = parse_rule(&line);
    }

    #[test]
    fn no_line_of_likely_words_panics(words in prop::collection::vec(prop::sample::select(vec![
        "allow", "deny", "ingress", "egress", "ipv4", "ipv6", "tcp", "udp", "icmp", "icmpv6", "any", "from", "to", "log", "80", ",",
        "80-", "-", "1/2", "group:a", "group:", "10.0.0.0/8", "::/0", "::1-::2", "/", "0", "256", "65536",
    ]), 0..9)) {
        if let Ok(rule) = parse_rule(&words.join(" ")) {
            prop_assert_eq!(parse_rule(&rule.to_string()), Ok(rule));
        }
    }
}

#[test]
fn what_others_wrote_reaches_no_terminal_as_an_escape() {
    let name = "a\x1b[2Jb\u{202e}c\u{9b}d\u{2066}e\u{200f}f\u{7f}g\rh\u{2028}\ti\n";
    let safe = "a\\u{1b}[2Jb\\u{202e}c\\u{9b}d\\u{2066}e\\u{200f}f\\u{7f}g\\u{d}h\\u{2028}\ti\n";
    assert_eq!(shown(name), safe);
    assert_eq!(shown_json("{\n  \"a\u{202e}\u{9b}\": 1\n}"), "{\n  \"a\\u202e\\u009b\": 1\n}");
    // What needs more than one escape of JSON is not among them.
    assert!((0x1_0000..=0x10_ffff).filter_map(char::from_u32).all(|c| !is_deceptive(c)));
}
