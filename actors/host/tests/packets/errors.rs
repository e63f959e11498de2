//! What is not simply a packet of a flow: fragments, ICMP errors, and ICMP that belongs to nothing.

use std::net::IpAddr;

use groupcast_enforce::kernel::begins_a_connection;
use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::net::Family;
use groupcast_policy::packet::{ICMP, ICMPV6, Payload, TCP, UDP};

use crate::packet::{Packet, SYN, checksum, sum, with_head};
use crate::rows::{Story, place, rules};
use crate::stage::{FAMILIES, isolated};

const OUTSIDE: u8 = WORKLOADS;
const FRAGMENT_HEADER: u8 = 44;

/// A UDP packet too large for one frame, in pieces; offsets count eights of bytes.
fn fragments(packet: &Packet) -> Vec<Vec<u8>> {
    const PIECE: usize = 1200;
    let Payload::Ports { source, destination, .. } = packet.payload else { panic!("udp has ports") };
    let mut above = [source.to_be_bytes(), destination.to_be_bytes()].concat();
    let length = (8 + 2 * PIECE) as u16;
    above.extend(length.to_be_bytes());
    above.extend([0, 0]);
    above.extend((0..2 * PIECE).map(|n| n as u8));
    let sum = checksum(packet.source, packet.destination, UDP, &above);
    above[6..8].copy_from_slice(&sum);
    let number = source.to_be_bytes();
    let pieces = above.chunks(PIECE);
    let last = pieces.len() - 1;
    pieces
        .enumerate()
        .map(|(index, piece)| {
            let eights = (index * PIECE / 8) as u16;
            let more = index < last;
            match packet.source {
                IpAddr::V4(_) => {
                    let place = (eights | if more { 0x2000 } else { 0 }).to_be_bytes();
                    with_head(packet.source, packet.destination, UDP, piece, &[number, place].concat())
                }
                IpAddr::V6(_) => {
                    let place = (eights << 3 | u16::from(more)).to_be_bytes();
                    let mut above = vec![UDP, 0];
                    above.extend(place);
                    above.extend([0, 0]);
                    above.extend(number);
                    above.extend(piece);
                    with_head(packet.source, packet.destination, FRAGMENT_HEADER, &above, &[])
                }
            }
        })
        .collect()
}

/// How many bytes came out that are from and to these addresses, beyond what their headers take at least.
fn came_out(story: &mut Story, to: u8, packet: &Packet) -> usize {
    let (at, head) = if packet.source.is_ipv4() { (12, 20) } else { (8, 40) };
    let addresses = [crate::packet::octets(packet.source), crate::packet::octets(packet.destination)].concat();
    let own = |bytes: &Vec<u8>| bytes.get(at..at + addresses.len()) == Some(&addresses[..]);
    story.machine().wire(to).drain().iter().filter(|bytes| own(bytes)).map(|bytes| bytes.len() - head).sum()
}

#[test]
fn fragments_of_an_allowed_flow_pass_and_no_other() {
    isolated(|| {
        let events = [rules(&["egress udp 5001 to any", "ingress udp 5001 from any"]), place(0), place(1)];
        let mut story = Story::begin(trial::attachments(), &events);
        for family in FAMILIES {
            for (to, port, passes) in [(1, 5001, true), (OUTSIDE, 5001, true), (1, 5002, false), (OUTSIDE, 5002, false)] {
                let packet = story.flow(0, to, family, UDP, port);
                let pieces = fragments(&packet);
                assert!(pieces.len() > 2, "in pieces");
                story.machine().wire(to).drain();
                // The order is the network's.
                for piece in pieces.iter().rev() {
                    story.machine().wire(0).send_bytes(piece);
                }
                story.machine().sentinel();
                let bytes = came_out(&mut story, to, &packet);
                assert_eq!(bytes >= 2400, passes, "{family:?} to {to}, port {port}: {bytes} bytes came out");
                assert!(passes || bytes == 0, "{family:?} to {to}, port {port}: {bytes} bytes came out");
            }
            // A piece that is not the first shows no port: alone it never passes.
            let packet = story.flow(0, 1, family, UDP, 5001);
            let pieces = fragments(&packet);
            story.machine().wire(0).send_bytes(&pieces[1]);
            story.machine().sentinel();
            assert_eq!(came_out(&mut story, 1, &packet), 0, "{family:?}: a piece alone");
            // From an address that is another's, it does not pass either.
            let spoofed = Packet { source: trial::address(1, family), ..story.flow(0, OUTSIDE, family, UDP, 5001) };
            fragments(&spoofed).iter().for_each(|piece| story.machine().wire(0).send_bytes(piece));
            story.machine().sentinel();
            assert_eq!(came_out(&mut story, OUTSIDE, &spoofed), 0, "{family:?}: spoofed");
        }
    });
}

/// The packet with options in its header that say nothing.
fn with_options(packet: &Packet) -> Vec<u8> {
    const NOTHING: [u8; 4] = [1, 1, 1, 0];
    let mut bytes = packet.bytes();
    bytes.splice(20..20, NOTHING);
    bytes[0] += 1;
    let length = bytes.len() as u16;
    bytes[2..4].copy_from_slice(&length.to_be_bytes());
    bytes[10..12].fill(0);
    let checksum = !(sum(&bytes[..24], 0) as u16);
    bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
    bytes
}

/// Anti-spoofing knows most packets of IPv4 by a header without options: the others are asked the same.
#[test]
fn a_header_with_options_is_judged_like_one_without() {
    isolated(|| {
        let mut story = Story::begin_again();
        let own = story.udp(0, OUTSIDE, 5001);
        let server = Payload::Ports { protocol: UDP, source: 67, destination: 68 };
        let rows = [
            (own, true),
            (Packet { source: trial::address(1, Family::V4), ..own }, false),
            (Packet { source: "8.8.8.8".parse().unwrap(), ..own }, false),
            (Packet { payload: server, ..own }, false),
        ];
        for (packet, passes) in rows {
            story.machine().wire(OUTSIDE).drain();
            story.machine().wire(0).send_bytes(&with_options(&packet));
            story.machine().sentinel();
            assert_eq!(came_out(&mut story, OUTSIDE, &packet) > 0, passes, "{packet:?}");
        }
    });
}

/// An ICMP error about a packet, from whoever could not deliver it.
pub fn error(from: IpAddr, kind: u8, code: u8, about: &Packet) -> Vec<u8> {
    let protocol = if from.is_ipv4() { ICMP } else { ICMPV6 };
    let mut above = vec![kind, code, 0, 0, 0, 0, 5, 0];
    above.extend(about.bytes());
    let sum = checksum(from, about.source, protocol, &above);
    above[2..4].copy_from_slice(&sum);
    with_head(from, about.source, protocol, &above, &[])
}

pub fn arrives(story: &mut Story, from: u8, to: u8, bytes: &[u8]) -> bool {
    story.machine().wire(to).drain();
    story.machine().wire(from).send_bytes(bytes);
    story.machine().sentinel();
    let above = if bytes[0] >> 4 == 4 { 20 } else { 40 };
    story.machine().wire(to).drain().iter().any(|came| came.get(above..) == Some(&bytes[above..]))
}

/// Port unreachable and fragmentation needed (packet too big), about a flow that passes, about one that never did, and about one that
/// was revoked.
#[test]
fn errors_pass_with_the_flow_they_are_about() {
    isolated(|| {
        let open = ["egress udp 5001 to any", "egress tcp 5001 to any", "ingress udp 5001 from any", "ingress tcp 5001 from any"];
        let mut story = Story::begin(trial::attachments(), &[rules(&open), place(0), place(1)]);
        let middle = |family| match family {
            Family::V4 => IpAddr::from([192, 0, 2, 7]),
            Family::V6 => "2001:db8::7".parse().unwrap(),
        };
        for family in FAMILIES {
            let kinds = if family == Family::V4 { [(3, 3), (3, 4), (11, 0)] } else { [(1, 4), (2, 0), (3, 0)] };
            for protocol in [UDP, TCP] {
                for (kind, code) in kinds {
                    let words = format!("{family:?} protocol {protocol} error {kind}/{code}");
                    // To outside: the error comes from the end, or from a router in the middle.
                    let flow = story.flow(0, OUTSIDE, family, protocol, 5001);
                    let denied = story.flow(0, OUTSIDE, family, protocol, 5002);
                    assert!(story.passes(0, OUTSIDE, &flow) && !story.passes(0, OUTSIDE, &denied), "{words}");
                    for source in [flow.destination, middle(family)] {
                        assert!(arrives(&mut story, OUTSIDE, 0, &error(source, kind, code, &flow)), "{words} from {source}");
                        assert!(!arrives(&mut story, OUTSIDE, 0, &error(source, kind, code, &denied)), "{words} from {source}");
                    }
                    // From outside: a workload says that nobody listens. Nothing but the flow allows it to send.
                    let flow = story.flow(OUTSIDE, 1, family, protocol, 5001);
                    assert!(story.passes(OUTSIDE, 1, &flow), "{words}");
                    assert!(
                        arrives(&mut story, 1, OUTSIDE, &error(flow.destination, kind, code, &flow)),
                        "{words} by a workload"
                    );
                    // It cannot speak for another.
                    assert!(!arrives(&mut story, 1, OUTSIDE, &error(middle(family), kind, code, &flow)), "{words} spoofed");
                    // Revoked, nothing of the flow passes, in no direction; allowed again, it does.
                    let between = story.flow(0, 1, family, protocol, 5001);
                    assert!(story.passes(0, 1, &between), "{words}");
                    let answer = error(between.destination, kind, code, &between);
                    assert!(arrives(&mut story, 1, 0, &answer), "{words} between workloads");
                    story.write(&[rules(&open[..2])]);
                    assert!(!arrives(&mut story, 1, 0, &answer), "{words} after revocation");
                    story.write(&[rules(&open)]);
                    assert!(arrives(&mut story, 1, 0, &answer), "{words} allowed again");
                }
            }
        }
    });
}

/// An error about an answer goes the way of the flow's first packet, but its headers say nothing about the flow: it is judged by the
/// flow, and a rule that its own headers match neither lets it pass nor stamps the flow.
#[test]
fn errors_about_answers_are_judged_by_the_flow_and_stamp_nothing_else() {
    isolated(|| {
        let open = ["egress udp 5001 to any", "ingress udp 5001 from any"];
        let icmp_only = ["egress icmp to any", "ingress icmp from any"];
        let denied = ["egress any to any", "ingress any from any", "deny egress udp 5001 to any"];
        let mut story = Story::begin(trial::attachments(), &[rules(&open), place(0), place(1)]);
        for family in FAMILIES {
            let (kind, code) = if family == Family::V4 { (3, 3) } else { (1, 4) };
            for to in [OUTSIDE, 1] {
                let flow = story.flow(0, to, family, UDP, 5001);
                assert!(story.passes(0, to, &flow) && story.passes(to, 0, &flow.answer()), "{family:?} to {to}");
                let about_answer = error(flow.source, kind, code, &flow.answer());
                assert!(arrives(&mut story, 0, to, &about_answer), "{family:?} to {to}: while the flow is allowed");
                for (words, lines) in [("only icmp is allowed", &icmp_only[..]), ("the flow is denied", &denied[..])] {
                    story.write(&[rules(lines)]);
                    assert!(!arrives(&mut story, 0, to, &about_answer), "{family:?} to {to}: {words}");
                    assert!(!story.passes(0, to, &flow.later()), "{family:?} to {to}: {words}, and it was stamped");
                    assert!(!story.passes(to, 0, &flow.answer()), "{family:?} to {to}: {words}, and it was stamped");
                    story.write(&[rules(&open)]);
                    assert!(arrives(&mut story, 0, to, &about_answer), "{family:?} to {to}: allowed again after {words}");
                    assert!(story.passes(0, to, &flow.later()), "{family:?} to {to}: allowed again after {words}");
                }
            }
        }
    });
}

/// What connection tracking takes for no first packet is dropped, though a rule allows everything, and whether groups keep state or not;
/// as the answer it is, it passes.
#[test]
fn icmp_that_belongs_to_nothing_is_dropped_whatever_the_policy() {
    for stateful in [true, false] {
        isolated(move || {
            let events =
                [crate::cases::stateless_if(!stateful, &["egress any to any", "ingress any from any"]), place(0), place(1)];
            let mut story = Story::begin(trial::attachments(), &events);
            for family in FAMILIES {
                for kind in 0..=255u8 {
                    let payload = Payload::Icmp { kind, code: 0 };
                    let packet = Packet { payload, tcp_flags: SYN, ..story.flow(0, 1, family, UDP, 9) };
                    let packet = Packet { icmp_id: 7000 + u16::from(kind), ..packet };
                    let expected = begins_a_connection(family, &payload);
                    assert_eq!(story.passes(0, 1, &packet), expected, "stateful {stateful}, {family:?} type {kind}");
                }
                let request = story.flow(0, 1, family, if family == Family::V4 { ICMP } else { ICMPV6 }, 0);
                assert!(!story.passes(1, 0, &request.answer()), "an answer that nobody asked for");
                assert!(story.passes(0, 1, &request) && story.passes(1, 0, &request.answer()), "an answer");
            }
        });
    }
}
