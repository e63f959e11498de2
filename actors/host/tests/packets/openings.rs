//! What opens beside policy: audit, and what a network needs to come up. Each is bound to the end and the direction it is for.

use std::net::{IpAddr, UdpSocket};

use groupcast_enforce::settings::{Attached, Mode, Settings};
use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::doc::Phases;
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target};
use groupcast_policy::net::{Family, Span};
use groupcast_policy::packet::{DCCP, ICMP, ICMPV6, Payload, UDP};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::text::parse_rule;

use crate::packet::Packet;
use crate::rows::{Story, place, rules};
use crate::stage::{FAMILIES, isolated, run};
use crate::{itself, settings};

const OUTSIDE: u8 = WORKLOADS;

fn audited(places: &[u8]) -> Story {
    let mut attachments = trial::attachments();
    for number in places {
        let held = attachments[&trial::workload_id(*number)].attachment.clone();
        attachments.insert(trial::workload_id(*number), Attached { attachment: held, audit: true });
    }
    let mut events = vec![rules(&[])];
    events.extend((0..WORKLOADS).map(place));
    Story::begin(attachments, &events)
}

/// A lockdown let pass whatever audited workloads sent.
#[test]
fn a_lockdown_closes_audited_workloads_too() {
    isolated(|| {
        let mut story = audited(&[0, 3]);
        for family in FAMILIES {
            for place in [0, 3] {
                let (out, back) = (story.flow(place, OUTSIDE, family, UDP, 5002), story.flow(OUTSIDE, place, family, UDP, 5002));
                let mut unasked =
                    story.flow(place, OUTSIDE, family, if family == Family::V4 { ICMP } else { ICMPV6 }, 0).answer();
                (unasked.source, unasked.destination) = (unasked.destination, unasked.source);
                for (mode, passes) in [(Mode::Enforce, true), (Mode::Lockdown, false), (Mode::Enforce, true)] {
                    story.set(Settings { mode, ..settings() });
                    let words = format!("{mode:?} {family:?} {place}");
                    assert_eq!(story.passes(place, OUTSIDE, &out), passes, "{words}: out");
                    assert_eq!(story.passes(OUTSIDE, place, &back), passes, "{words}: in");
                    assert_eq!(story.passes(place, OUTSIDE, &unasked), passes, "{words}: of no connection");
                }
            }
        }
    });
}

/// What belongs to no connection passed between two workloads if either of them was audited. The other one is enforced.
#[test]
fn what_belongs_to_no_connection_passes_only_where_every_end_is_audited() {
    isolated(|| {
        let mut story = audited(&[0, 1, 3]);
        let rows = [
            (0, 1, true),
            (0, 3, true),
            (0, OUTSIDE, true),
            (OUTSIDE, 0, true),
            (3, OUTSIDE, true),
            (OUTSIDE, 3, true),
            (0, 2, false),
            (2, 0, false),
            (3, 2, false),
            (4, 0, false),
            (0, 4, false),
            (4, OUTSIDE, false),
            (OUTSIDE, 4, false),
        ];
        for family in FAMILIES {
            for (from, to, passes) in rows {
                // An answer that nobody asked for.
                let kind = if family == Family::V4 { 0 } else { 129 };
                let packet = Packet { payload: Payload::Icmp { kind, code: 0 }, ..story.flow(from, to, family, UDP, 9) };
                assert_eq!(story.passes(from, to, &packet), passes, "{family:?}: {from} to {to}");
            }
        }
    });
}

fn hears(port: u16, family: Family) -> UdpSocket {
    let any: IpAddr = if family == Family::V4 { "0.0.0.0".parse().unwrap() } else { "::".parse().unwrap() };
    let socket = UdpSocket::bind((any, port)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

/// With a policy of the machine itself that allows nothing, a stranger reached its port 67 by sending from port 68. Only
/// a workload of this machine does, and the machine's own client hears servers.
#[test]
fn dhcp_is_open_between_workloads_and_their_machine_and_for_its_own_client_alone() {
    isolated(|| {
        let mut story = itself::begin(&[]);
        run("ip", &["address", "add", "10.1.1.1/32", "dev", trial::interface(1).as_str()]);
        for (family, client, server) in [(Family::V4, 68, 67), (Family::V6, 546, 547)] {
            let near: IpAddr = if family == Family::V4 { "10.1.1.1".parse().unwrap() } else { itself::own(Family::V6) };
            let listeners = [(server, hears(server, family)), (client, hears(client, family))];
            let rows = [
                (OUTSIDE, itself::own(family), client, server, false),
                (OUTSIDE, itself::own(family), server, client, true),
                (OUTSIDE, itself::own(family), client + 1, server, false),
                (1, near, client, server, true),
                (1, near, server, client, false),
            ];
            for (from, to, source, destination, passes) in rows {
                let payload = Payload::Ports { protocol: UDP, source, destination };
                let packet = Packet { source: trial::address(from, family), destination: to, payload, tcp_flags: 0, icmp_id: 0 };
                story.machine().wire(from).send(&packet);
                story.machine().sentinel();
                let (_, listener) = listeners.iter().find(|(port, _)| *port == destination).unwrap();
                assert_eq!(listener.recv(&mut [0; 9]).is_ok(), passes, "{family:?}: {from} from port {source} to {destination}");
            }
            // The other way: it asks servers outside, and answers its workloads alone.
            let rows = [
                (OUTSIDE, client, server, true),
                (OUTSIDE, server, client, false),
                (1, server, client, true),
                (1, client, server, false),
            ];
            for (to, source, destination, passes) in rows {
                let (_, socket) = listeners.iter().find(|(port, _)| *port == source).unwrap();
                let sent = socket.send_to(&[], (trial::address(to, family), destination));
                assert_eq!(sent.is_ok(), passes, "{family:?}: to {to} from port {source} to {destination}: {sent:?}");
            }
        }
    });
}

/// Where the kernel does not track DCCP, an allow by port never matched and a deny by port denied nothing. The deny
/// denies the whole protocol.
#[test]
fn a_deny_of_dccp_by_port_is_not_passed_by() {
    isolated(|| {
        let by_port = |direction: Direction, action: Action| {
            let ports = [Span::one(5001)].into_iter().collect();
            let traffic = Traffic::Ports { protocol: DCCP, ports };
            GroupRule::from(Rule { action, direction, family: None, traffic, remote: Remote::Any, log: false })
        };
        let open = |line: &str| GroupRule::from(parse_rule(line).unwrap());
        let open = ["egress any to any", "ingress any from any"].map(open);
        let group = |rules: Vec<GroupRule>| {
            let bindings = vec![Binding { target: Target::Global, phases: Phases::BOTH }];
            Event::group(Group { rules, bindings, ..Group::new(trial::group_id(0)) })
        };
        let mut story = Story::begin(trial::attachments(), &[group(open.to_vec()), place(0), place(1)]);
        for family in FAMILIES {
            let denied = |direction| group(open.iter().cloned().chain([by_port(direction, Action::Deny)]).collect());
            let allowed = [Direction::Egress, Direction::Ingress].map(|direction| by_port(direction, Action::Allow)).to_vec();
            let rows = [
                (group(open.to_vec()), true),
                (denied(Direction::Egress), false),
                (denied(Direction::Ingress), false),
                (group(allowed), false),
            ];
            for (number, (event, passes)) in rows.into_iter().enumerate() {
                story.write(&[event]);
                let packet = story.flow(0, 1, family, DCCP, 5001);
                assert_eq!(story.passes(0, 1, &packet), passes, "{family:?}: row {number}");
            }
        }
    });
}
