//! What a flow's stamp does not vouch for: who sends an error about it, and which interface its packets leave by.

use std::net::{IpAddr, UdpSocket};

use groupcast_enforce::settings::{Attached, Attachment};
use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::doc::Phases;
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target};
use groupcast_policy::net::Family;
use groupcast_policy::packet::{Payload, TCP, UDP};
use groupcast_policy::text::parse_rule;

use crate::errors::{arrives, error};
use crate::packet::{Packet, sum};
use crate::rows::{Story, place};
use crate::stage::{FAMILIES, isolated, run};

const OUTSIDE: u8 = WORKLOADS;
pub const OPEN: [&str; 2] = ["egress any to any", "ingress any from any"];
/// Nothing is bound to this one.
pub const GROUPLESS: u8 = 2;

/// A group of these workloads alone.
pub fn rules_of(places: &[u8], lines: &[&str]) -> Event {
    let rules = lines.iter().map(|line| GroupRule::from(parse_rule(line).unwrap())).collect();
    let target = |place: &u8| Binding { target: Target::Workload(trial::workload_id(*place)), phases: Phases::BOTH };
    Event::group(Group { rules, bindings: places.iter().map(target).collect(), ..Group::new(trial::group_id(0)) })
}

fn begin() -> Story {
    let mut events = vec![rules_of(&[0, 1, 3], &OPEN)];
    events.extend((0..WORKLOADS).map(place));
    Story::begin(trial::attachments(), &events)
}

fn kinds(family: Family) -> [(u8, u8); 3] {
    if family == Family::V4 { [(3, 3), (3, 4), (11, 0)] } else { [(1, 4), (2, 0), (3, 0)] }
}

/// A workload without any group broke others' connections with errors that quoted them, and sent whatever it liked in
/// them. It is a workload like any other for the flows that it is an end of.
#[test]
fn nobody_sends_errors_about_flows_of_others() {
    isolated(|| {
        let mut story = begin();
        for family in FAMILIES {
            let own = |place: u8| trial::address(place, family);
            for protocol in [UDP, TCP] {
                for (kind, code) in kinds(family) {
                    for (from, to) in [(0, 1), (0, OUTSIDE), (OUTSIDE, 1), (0, 3)] {
                        let flow = story.flow(from, to, family, protocol, 5001);
                        assert!(story.passes(from, to, &flow) && story.passes(to, from, &flow.answer()));
                        let words = format!("{family:?} protocol {protocol} error {kind}/{code}, {from} to {to}");
                        // The last two share an interface, and no flow: neither speaks for the other.
                        for liar in [GROUPLESS, 4] {
                            let forged = error(own(liar), kind, code, &flow);
                            assert!(!arrives(&mut story, liar, from, &forged), "{words}: by {liar}");
                            let forged = error(own(liar), kind, code, &flow.answer());
                            assert!(
                                to == 3 && liar == 4 || !arrives(&mut story, liar, to, &forged),
                                "{words}: by {liar}, about an answer"
                            );
                        }
                        // A third workload that may do everything by its own policy may not do this either.
                        if from == OUTSIDE || to == OUTSIDE {
                            assert!(!arrives(&mut story, 3, from, &error(own(3), kind, code, &flow)), "{words}: by 3");
                        }
                        assert!(arrives(&mut story, to, from, &error(own(to), kind, code, &flow)), "{words}: by its end");
                        assert!(
                            arrives(&mut story, from, to, &error(own(from), kind, code, &flow.answer())),
                            "{words}: by its begin"
                        );
                        assert!(
                            story.passes(from, to, &flow.later()) && story.passes(to, from, &flow.answer().later()),
                            "{words}"
                        );
                    }
                }
            }
        }
    });
}

/// The machine's own address on a workload's wire.
fn own_address(family: Family, place: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([10, 1, place, 1]),
        Family::V6 => format!("fd00:1:{place}::1").parse().unwrap(),
    }
}

pub fn give_address(family: Family, address: IpAddr, interface: &str) {
    let length = if family == Family::V4 { 32 } else { 128 };
    run("ip", &["address", "replace", &format!("{address}/{length}"), "dev", interface, "nodad"]);
    let start = std::time::Instant::now();
    loop {
        let local = std::process::Command::new("ip").args(["-6", "route", "show", "table", "local"]).output().unwrap();
        if family == Family::V4 || String::from_utf8_lossy(&local.stdout).contains(&address.to_string()) {
            return;
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(10), "the address is not local");
    }
}

/// Whether the socket was told of an error.
fn was_told(socket: &UdpSocket) -> bool {
    socket.set_nonblocking(true).unwrap();
    matches!(socket.recv(&mut [0; 9]), Err(error) if error.kind() != std::io::ErrorKind::WouldBlock)
}

/// The same of flows of the machine itself.
#[test]
fn nobody_sends_the_machine_errors_about_flows_of_others() {
    isolated(|| {
        let mut story = begin();
        for family in FAMILIES {
            let machine = own_address(family, 0);
            give_address(family, machine, trial::interface(0).as_str());
            let (kind, code) = kinds(family)[0];
            for (liar, told) in [(GROUPLESS, false), (0, true)] {
                let socket = UdpSocket::bind((machine, 0)).unwrap();
                socket.connect((trial::address(0, family), 5003)).unwrap();
                socket.send(&[1; 8]).unwrap();
                let payload = Payload::Ports { protocol: UDP, source: socket.local_addr().unwrap().port(), destination: 5003 };
                let flow = Packet { source: machine, destination: trial::address(0, family), payload, tcp_flags: 0, icmp_id: 0 };
                story.machine().wire(liar).send_bytes(&error(trial::address(liar, family), kind, code, &flow));
                story.machine().sentinel();
                assert_eq!(was_told(&socket), told, "{family:?}: by {liar}");
            }
        }
    });
}

/// The machine is a router on the path of what it forwards: it says that a packet's time is up, also where it is a workload itself
/// whose policy allows nothing.
#[test]
fn the_machine_sends_errors_about_what_it_forwards() {
    isolated(|| {
        for itself in [false, true] {
            let mut attachments = trial::attachments();
            if itself {
                attachments.insert(trial::workload_id(4), Attached { attachment: Attachment::Host, audit: false });
            }
            let mut events = vec![rules_of(&[0, 1], &OPEN)];
            events.extend((0..WORKLOADS).map(place));
            let mut story = Story::begin(attachments, &events);
            give_address(Family::V4, own_address(Family::V4, 0), trial::interface(0).as_str());
            let flow = story.flow(0, 1, Family::V4, UDP, 5001);
            assert!(story.passes(0, 1, &flow));
            let mut bytes = flow.bytes();
            bytes[8] = 1;
            bytes[10..12].fill(0);
            let checksum = !(sum(&bytes[..20], 0) as u16);
            bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
            story.machine().wire(0).drain();
            story.machine().wire(0).send_bytes(&bytes);
            story.machine().sentinel();
            let told = story.machine().wire(0).drain();
            assert!(told.iter().any(|came| came[9] == 1 && came[20] == 11), "itself: {itself}: {told:?}");
        }
    });
}

fn route(family: Family, place: u8, interface: &str) {
    let length = if family == Family::V4 { 32 } else { 128 };
    run("ip", &["route", "replace", &format!("{}/{length}", trial::address(place, family)), "dev", interface]);
}

/// A live flow whose route was moved to another workload's interface kept passing there, by its stamp. What leaves by a
/// claimed interface is judged for whoever is there; led back, the flow goes on.
#[test]
fn a_flow_that_is_led_to_another_workload_is_judged_by_that_ones_policy() {
    isolated(|| {
        let mut story = begin();
        let astray = trial::interface(GROUPLESS);
        for family in FAMILIES {
            for (from, to) in [(0, 1), (OUTSIDE, 1), (0, OUTSIDE), (0, 3)] {
                let flow = story.flow(from, to, family, UDP, 5001);
                assert!(story.passes(from, to, &flow) && story.passes(to, from, &flow.answer()) && story.passes(from, to, &flow));
                for (lost, from, to, packet) in [(to, from, to, flow), (from, to, from, flow.answer())] {
                    let words = format!("{family:?} {from} to {to}");
                    route(family, lost, astray.as_str());
                    for _ in 0..20 {
                        assert!(!story.passes(from, GROUPLESS, &packet), "{words}: passed to another");
                    }
                    // Whose policy allows it gets it: it is that workload's interface.
                    story.write(&[rules_of(&[0, 1, 3, GROUPLESS], &OPEN)]);
                    assert!(story.passes(from, GROUPLESS, &packet), "{words}: allowed there");
                    story.write(&[rules_of(&[0, 1, 3], &OPEN)]);
                    assert!(!story.passes(from, GROUPLESS, &packet), "{words}: revoked there");
                    let home = if lost == OUTSIDE { trial::outside() } else { trial::interface(lost) };
                    route(family, lost, home.as_str());
                    assert!(story.passes(from, to, &packet), "{words}: led back");
                }
            }
            // What the machine itself sends goes no other way.
            let machine = own_address(family, 0);
            give_address(family, machine, trial::interface(0).as_str());
            let socket = UdpSocket::bind((machine, 0)).unwrap();
            let payload = Payload::Ports { protocol: UDP, source: socket.local_addr().unwrap().port(), destination: 5003 };
            let sent = Packet { source: machine, destination: trial::address(1, family), payload, tcp_flags: 0, icmp_id: 0 };
            for (place, passes) in [(1, true), (GROUPLESS, false), (1, true)] {
                route(family, 1, trial::interface(place).as_str());
                story.machine().wire(place).drain();
                let _ = socket.send_to(&[], (trial::address(1, family), 5003));
                assert_eq!(story.machine().wire(place).received(&sent), passes, "{family:?}: from the machine to {place}");
            }
        }
    });
}
