//! Lines of the behaviour cases, one test each, named after its line: B (Neutron) and E (policy and deltas). The table in `main.rs` says
//! where the others are.

use std::collections::BTreeSet;

use groupcast_enforce::delta::Op;
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::settings::{Attachments, Stamp};
use groupcast_enforce::trial::{self, Stage, WORKLOADS};
use groupcast_host::netlink::Kernel;
use groupcast_policy::doc::{Enforced, Phases};
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target, Workload};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::packet::{ICMP, ICMPV6, Payload, TCP, UDP};
use groupcast_policy::text::parse_rule;

use crate::packet::Packet;
use crate::rows::{Story, place, rules};
use crate::stage::{FAMILIES, isolated, run};
use crate::{Machine, settings};

const OUTSIDE: u8 = WORKLOADS;

pub fn lines(lines: &[&str]) -> Vec<GroupRule> {
    let parse = |line: &&str| GroupRule::from(parse_rule(line).unwrap_or_else(|error| panic!("{line}: {error:?}")));
    lines.iter().map(parse).collect()
}

/// A group bound to these.
pub fn group(number: u8, rules: &[&str], targets: &[Target], members: &[&str]) -> Event {
    Event::group(plain_group(number, rules, targets, members))
}

/// An address, or one with the length of a prefix.
fn prefix(text: &str) -> Prefix {
    let (address, length) = text.split_once('/').unwrap_or((text, ""));
    let host = Prefix::host(address.parse().unwrap());
    match (host.net().addr(), length.parse()) {
        (std::net::IpAddr::V4(address), Ok(length)) => Prefix::v4(address.to_bits(), length).unwrap(),
        (std::net::IpAddr::V6(address), Ok(length)) => Prefix::v6(address.to_bits(), length).unwrap(),
        _ => host,
    }
}

fn plain_group(number: u8, rules: &[&str], targets: &[Target], members: &[&str]) -> Group {
    let bindings = targets.iter().map(|target| Binding { target: target.clone(), phases: Phases::BOTH }).collect();
    let members: BTreeSet<Prefix> = members.iter().map(|text| prefix(text)).collect();
    Group { rules: lines(rules), bindings, members, ..Group::new(trial::group_id(number)) }
}

pub fn stateless_if(stateless: bool, rules: &[&str]) -> Event {
    Event::group(Group { stateful: !stateless, ..plain_group(0, rules, &[Target::Global], &[]) })
}

fn workload(number: u8) -> Workload {
    let addresses = FAMILIES.map(|family| Prefix::host(trial::address(number, family))).into();
    Workload { addresses, ..Workload::new(trial::workload_id(number), trial::host(), "n0".parse().unwrap()) }
}

/// A group with no rules: infrastructure traffic only. Port security off: not filtered. Ports of the network itself: trusted.
#[test]
fn b09_no_rules_no_security_and_the_networks_own_ports() {
    isolated(|| {
        let events = [group(0, &[], &[Target::Workload(trial::workload_id(0))], &[]), place(0)];
        let mut story = Story::begin(trial::attachments(), &events);
        for family in FAMILIES {
            for protocol in [TCP, UDP, ICMP] {
                let out = story.flow(0, OUTSIDE, family, protocol, 5001);
                let into = story.flow(OUTSIDE, 0, family, protocol, 5001);
                assert!(!story.passes(0, OUTSIDE, &out) && !story.passes(OUTSIDE, 0, &into), "{family:?} {protocol}");
            }
        }
        // The host hears its DHCP request all the same.
        let host = std::net::UdpSocket::bind("0.0.0.0:67").unwrap();
        host.set_nonblocking(true).unwrap();
        let discover = Packet {
            source: "0.0.0.0".parse().unwrap(),
            destination: "255.255.255.255".parse().unwrap(),
            payload: Payload::Ports { protocol: UDP, source: 68, destination: 67 },
            ..story.udp(0, OUTSIDE, 67)
        };
        story.machine().wire(0).send(&discover);
        story.machine().sentinel();
        assert!(host.recv(&mut [0; 9]).is_ok(), "a DHCP request from a workload without rules");

        // Not filtered: enforced in no direction.
        let free = Workload { enforced: Some(Enforced { ingress: false, egress: false }), ..workload(0) };
        story.write(&[Event::workload(free)]);
        for family in FAMILIES {
            let (out, into) = (story.flow(0, OUTSIDE, family, TCP, 5001), story.flow(OUTSIDE, 0, family, UDP, 5001));
            assert!(story.passes(0, OUTSIDE, &out) && story.passes(OUTSIDE, 0, &into), "{family:?}");
        }
        // Trusted: an interface that nobody claims is not ours to judge (the sentinel goes through two of them).
        story.machine().sentinel();
    });
}

/// A workload that has an IPv4 address only does not send IPv6, not even from another's address. DHCP discover passes, also as above;
/// routers and DHCP servers it does not play. The rest of the line: `nobody_sends_from_anothers_address`.
#[test]
fn b10_spoofing_in_a_family_that_it_does_not_have() {
    isolated(|| {
        let open = rules(&["egress any to any", "ingress any from any"]);
        let v4_only = Workload { addresses: [Prefix::host(trial::address(0, Family::V4))].into(), ..workload(0) };
        let mut story = Story::begin(trial::attachments(), &[open, Event::workload(v4_only), place(1)]);
        let own = story.flow(0, OUTSIDE, Family::V4, UDP, 5001);
        assert!(story.passes(0, OUTSIDE, &own));
        for source in [trial::address(0, Family::V6), trial::address(1, Family::V6), "fe80::1".parse().unwrap()] {
            for protocol in [TCP, UDP, ICMPV6] {
                let spoofed = Packet { source, ..story.flow(0, OUTSIDE, Family::V6, protocol, 5001) };
                assert!(!story.passes(0, OUTSIDE, &spoofed), "from {source}, protocol {protocol}");
            }
        }
    });
}

/// Flows that a member kept open through the group are cut when it leaves; other flows live on.
#[test]
fn b12_a_member_leaves() {
    isolated(|| {
        let outsider = trial::address(OUTSIDE, Family::V4).to_string();
        let outsider6 = trial::address(OUTSIDE, Family::V6).to_string();
        let friends = |members: &[&str]| group(1, &[], &[], members);
        let rules = group(0, &["ingress any from group:g1", "egress udp 5009 to any"], &[Target::Global], &[]);
        let mut story = Story::begin(trial::attachments(), &[rules, friends(&[&outsider, &outsider6]), place(0)]);
        let through: Vec<Packet> = FAMILIES
            .into_iter()
            .flat_map(|family| [TCP, UDP, ICMP].map(|protocol| (family, protocol)))
            .map(|(family, protocol)| story.flow(OUTSIDE, 0, family, protocol, 5001))
            .collect();
        let other = story.flow(0, OUTSIDE, Family::V4, UDP, 5009);
        for flow in through.iter().chain([&other]) {
            let (from, to) = if flow.source == other.source { (0, OUTSIDE) } else { (OUTSIDE, 0) };
            assert!(story.passes(from, to, flow) && story.passes(to, from, &flow.answer()), "{flow:?}");
        }
        for members in [vec![outsider6.as_str()], vec![]] {
            story.write(&[friends(&members)]);
            for flow in &through {
                let stays = flow.source.is_ipv6() && !members.is_empty();
                assert_eq!(story.passes(0, OUTSIDE, &flow.answer().later()), stays, "an answer with {members:?}: {flow:?}");
                assert_eq!(story.passes(OUTSIDE, 0, &flow.later()), stays, "with {members:?}: {flow:?}");
            }
            assert!(story.passes(0, OUTSIDE, &other) && story.passes(OUTSIDE, 0, &other.answer()), "the other flow");
        }
    });
}

/// One element in one transaction, no rule rewritten, at 10 members and at 100,000, and beyond 65,536; many at once, with no moment
/// without members.
#[test]
fn b13_members_join() {
    isolated(|| {
        let rules = group(0, &["ingress udp 5001 from group:g1"], &[Target::Global], &[]);
        let with = |count: u32, more: &[std::net::IpAddr]| {
            let many = (0..count).map(|n| Prefix::host(std::net::Ipv4Addr::from_bits(0x0b00_0000 + n).into()));
            let members = many.chain(more.iter().map(|address| Prefix::host(*address))).collect();
            Event::group(Group { members, ..Group::new(trial::group_id(1)) })
        };
        let mut story = Story::begin(trial::attachments(), &[rules, with(10, &[]), place(0)]);
        let outsider = trial::address(OUTSIDE, Family::V4);
        for count in [10, 65_537, 100_000] {
            story.write(&[with(count, &[])]);
            let flow = story.udp(OUTSIDE, 0, 5001);
            assert!(!story.passes(OUTSIDE, 0, &flow), "{count} members");
            let edits = story.stage.change(&[with(count, &[outsider])]);
            let plan = story.engine.change(&edits, &story.stage);
            let [Op::AddElements { elements, .. }] = &plan.transaction.ops[..] else {
                panic!("a join at {count} members is {:?}", plan.transaction.ops)
            };
            assert!(elements.len() == 1 && !plan.whole && plan.stamp == story.engine.stamp());
            story.kernel.commit(&plan.transaction).unwrap();
            story.engine.committed(plan);
            assert!(story.passes(OUTSIDE, 0, &flow), "{count} members and one");
        }
        // Everybody else is exchanged while it sends: no packet of it is lost.
        let mut machine = story.take_machine();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flow = Packet { source: outsider, ..crate::streams::packet(OUTSIDE, 0, UDP, 5001) };
        let sender = std::thread::spawn({
            let stop = stop.clone();
            move || {
                let mut sent = 0u32;
                while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                    let Payload::Ports { protocol, destination, .. } = flow.payload else { return 0 };
                    let source = 10_000 + (sent % 50_000) as u16;
                    let fresh = Packet { payload: Payload::Ports { protocol, source, destination }, ..flow };
                    machine.wire(OUTSIDE).send(&fresh);
                    assert!(machine.wire(0).received(&fresh), "lost after {sent}");
                    sent += 1;
                }
                sent
            }
        });
        for round in 0..20 {
            story.write(&[with(if round % 2 == 0 { 10 } else { 20_000 }, &[outsider])]);
        }
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        assert!(sender.join().unwrap() > 100);
    });
}

/// Replies need their own rule.
#[test]
fn b14_stateless_groups() {
    for family in FAMILIES {
        isolated(move || {
            let mut story = Story::begin(trial::attachments(), &[stateless_if(true, &["ingress udp 5001 from any"]), place(0)]);
            let flow = story.flow(OUTSIDE, 0, family, UDP, 5001);
            assert!(story.passes(OUTSIDE, 0, &flow), "{family:?}");
            assert!(!story.passes(0, OUTSIDE, &flow.answer()), "{family:?}: an answer without a rule");
            // By its own headers: from any port to the one that asked.
            let Payload::Ports { source, .. } = flow.payload else { panic!("udp has ports") };
            let egress = format!("egress udp {source} to any");
            story.write(&[stateless_if(true, &["ingress udp 5001 from any", &egress])]);
            assert!(story.passes(0, OUTSIDE, &flow.answer()), "{family:?}: an answer with a rule");
            // TCP in the middle of a connection is as good as its beginning.
            story.write(&[stateless_if(true, &["ingress tcp 5001 from any"])]);
            let middle = story.flow(OUTSIDE, 0, family, TCP, 5001).later();
            assert!(story.passes(OUTSIDE, 0, &middle), "{family:?}: in the middle of a connection");
            // Revoked, it stops; there is no state that would keep it.
            story.write(&[stateless_if(true, &[])]);
            assert!(!story.passes(OUTSIDE, 0, &middle) && !story.passes(OUTSIDE, 0, &flow), "{family:?}: revoked");
        });
    }
}

/// Egress of one and ingress of the other are both checked, for every protocol and both families.
#[test]
fn b15_two_workloads_on_one_host() {
    for (sender, receiver) in [(true, true), (true, false), (false, true), (false, false)] {
        isolated(move || {
            let side = |open: bool, line: &'static str| if open { vec![line] } else { vec![] };
            let own = |place: u8| [Target::Workload(trial::workload_id(place))];
            let events = [
                group(0, &side(sender, "egress any to any"), &own(0), &[]),
                group(1, &side(receiver, "ingress any from any"), &own(1), &[]),
                place(0),
                place(1),
            ];
            let mut story = Story::begin(trial::attachments(), &events);
            for family in FAMILIES {
                for protocol in [TCP, UDP, ICMP] {
                    let flow = story.flow(0, 1, family, protocol, 5001);
                    let words = format!("{family:?} protocol {protocol}, egress {sender}, ingress {receiver}");
                    assert_eq!(story.passes(0, 1, &flow), sender && receiver, "{words}");
                    if sender && receiver {
                        assert!(story.passes(1, 0, &flow.answer()), "{words}");
                    }
                    let back = story.flow(1, 0, family, protocol, 5001);
                    assert!(!story.passes(1, 0, &back), "{words}, the other way");
                }
            }
        });
    }
}

/// A change of documents that this host does not use (E 24), and what was added and removed before it was applied (E 15), write nothing.
#[test]
fn e15_e24_nothing_to_do_is_nothing_written() {
    isolated(|| {
        let mut story = Story::begin_again();
        // Bound to a space that nobody here is in, with members and rules of its own.
        let elsewhere = [Target::Space("elsewhere".parse().unwrap())];
        let edits = story.stage.change(&[group(3, &["deny egress any to group:g3"], &elsewhere, &["10.0.0.0/8"])]);
        assert!(!edits.is_empty());
        let plan = story.engine.change(&edits, &story.stage);
        assert!(plan.transaction.is_empty() && !plan.whole && plan.stamp == story.engine.stamp(), "{plan:?}");
        story.engine.committed(plan);
        let named = rules(&["ingress any from group:g4", "egress any to any"]);
        story.write(&[named, group(4, &[], &[], &["10.1.9.2/32"])]);
        let mut edits = story.stage.change(&[group(4, &[], &[], &["10.1.9.2/32", "10.1.9.3/32"])]);
        edits.extend(story.stage.change(&[group(4, &[], &[], &["10.1.9.2/32"])]));
        assert_eq!(edits.len(), 2);
        let plan = story.engine.change(&edits, &story.stage);
        assert!(plan.transaction.is_empty() && plan.stamp == story.engine.stamp(), "{plan:?}");
        story.engine.committed(plan);
        let flow = story.udp(OUTSIDE, 0, 5001);
        assert!(story.passes(OUTSIDE, 0, &flow));
    });
}

/// A new member and a new policy together: the address set comes first, then the rule, in one transaction; and the first packet after it
/// passes.
#[test]
fn e16_members_before_the_rules_that_name_them() {
    isolated(|| {
        let mut story = Story::begin(trial::attachments(), &[rules(&["egress any to any"]), place(0), place(1)]);
        let flow = story.udp(OUTSIDE, 0, 5001);
        assert!(!story.passes(OUTSIDE, 0, &flow));
        let outsider = format!("{}/32", trial::address(OUTSIDE, Family::V4));
        let events = [rules(&["egress any to any", "ingress udp 5001 from group:g4"]), group(4, &[], &[], &[&outsider])];
        let edits = story.stage.change(&events);
        let plan = story.engine.change(&edits, &story.stage);
        let place = |wanted: fn(&Op) -> bool| plan.transaction.ops.iter().position(wanted).unwrap();
        let members = place(|op| matches!(op, Op::AddElements { set, .. } if set.starts_with("m4_")));
        let rule = place(|op| matches!(op, Op::AddRule { chain, .. } if chain.starts_with("a_")));
        assert!(members < rule, "{:?}", plan.transaction.ops);
        story.kernel.commit(&plan.transaction).unwrap();
        story.engine.committed(plan);
        assert!(story.passes(OUTSIDE, 0, &flow));
    });
}

/// Deny in any scope beats allow in every scope.
#[test]
fn e28_any_deny_beats_every_allow() {
    isolated(|| {
        let (space, app) = (Target::Space("s0".parse().unwrap()), Target::App("a0".parse().unwrap()));
        let own = Target::Workload(trial::workload_id(0));
        let scopes = [Target::Global, space.clone(), app.clone(), own.clone()];
        let placed =
            Event::workload(Workload { space: Some("s0".parse().unwrap()), app: Some("a0".parse().unwrap()), ..workload(0) });
        let everywhere = group(0, &["egress any to any", "ingress any from any"], &scopes, &[]);
        let mut story = Story::begin(trial::attachments(), &[everywhere, placed]);
        for scope in &scopes {
            for (line, from, to) in [("deny egress udp 5001 to any", 0, OUTSIDE), ("deny ingress udp 5001 from any", OUTSIDE, 0)]
            {
                let flow = story.udp(from, to, 5001);
                assert!(story.passes(from, to, &flow), "before {line} at {scope:?}");
                story.write(&[group(1, &[line], std::slice::from_ref(scope), &[])]);
                assert!(!story.passes(from, to, &flow), "{line} at {scope:?}");
                let beside = story.udp(from, to, 5002);
                assert!(story.passes(from, to, &beside), "beside {line} at {scope:?}");
                story.write(&[Event::GroupRemoved(trial::group_id(1))]);
                assert!(story.passes(from, to, &flow), "after {line} at {scope:?}");
            }
        }
    });
}

/// A claimed interface with no workload: nothing passes, also before the agent runs: the boot unit's command, with no state on disk.
#[test]
fn e31_claimed_interfaces_are_closed_before_the_agent_runs() {
    isolated(|| {
        let mut machine = Machine::new();
        let folder = std::env::temp_dir().join(format!("groupcast-boot-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = folder.join("agent.toml");
        let text = format!(
            "host = 'h0'\nservers = ['nats://127.0.0.1:1']\nclaims = ['gcw*']\nstate = '{0}/state'\nsocket = '{0}/agent.sock'\n",
            folder.display()
        );
        std::fs::write(&config, text).unwrap();
        let first = crate::streams::packet(0, OUTSIDE, UDP, 5001);
        assert!(machine.passes(0, OUTSIDE, &first), "without a table everything passes");
        run(env!("CARGO_BIN_EXE_groupcast-agent"), &["--config", config.to_str().unwrap(), "boot"]);
        for (from, to) in [(0, OUTSIDE), (OUTSIDE, 0), (0, 1)] {
            let packet = crate::streams::packet(from, to, UDP, 5002);
            assert!(!machine.passes(from, to, &packet), "{from} to {to}");
        }
        assert!(!machine.passes(0, OUTSIDE, &first) && !machine.passes(OUTSIDE, 0, &first.answer()), "also what was open");
        machine.sentinel();
        // What is not claimed is nobody's business; and it is our table that did it.
        run(env!("CARGO_BIN_EXE_groupcast-agent"), &["--config", config.to_str().unwrap(), "cleanup"]);
        assert!(machine.passes(0, OUTSIDE, &crate::streams::packet(0, OUTSIDE, UDP, 5003)));
        let _ = std::fs::remove_dir_all(&folder);
    });
}

/// A from-scratch engine on the documents of a stage, for tests that begin without a story.
pub fn engine_of(host: groupcast_policy::ids::HostId, attachments: Attachments, stage: &Stage, kernel: &mut Kernel) -> Engine {
    let mut engine = Engine::new(host, settings(), attachments, Stamp::new(7).unwrap());
    let plan = engine.compare(stage);
    kernel.commit(&plan.transaction).unwrap();
    engine.committed(plan);
    engine
}
