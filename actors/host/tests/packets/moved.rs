//! An address of a workload that becomes the machine's own, and back: a stamp speaks for whoever had the address when it was written.

use std::collections::BTreeSet;
use std::net::{IpAddr, UdpSocket};

use groupcast_enforce::settings::{Attached, Attachment};
use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::model::{Event, Workload};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::packet::{Payload, UDP};

use crate::bound::{OPEN, give_address, rules_of};
use crate::packet::Packet;
use crate::rows::{Story, place};
use crate::stage::{FAMILIES, isolated, run};

const OUTSIDE: u8 = WORKLOADS;
/// Whose address moves.
const MOVED: u8 = 1;
/// The workload that the machine itself is, if it is one.
const MACHINE: u8 = 4;
const PORT: u16 = 5001;

/// Whether the workload whose address moves has that address, or a prefix with the address in it.
const FORMS: [bool; 2] = [false, true];

fn around(family: Family) -> Prefix {
    let prefix = match trial::address(MOVED, family) {
        IpAddr::V4(address) => Prefix::v4(address.to_bits() & !0xff, 24),
        IpAddr::V6(address) => Prefix::v6(address.to_bits() >> 64 << 64, 64),
    };
    prefix.unwrap()
}

fn placed(wide: bool) -> Event {
    let prefixes: BTreeSet<Prefix> = match wide {
        true => FAMILIES.map(around).into(),
        false => FAMILIES.map(|family| Prefix::host(trial::address(MOVED, family))).into(),
    };
    let workload = Workload::new(trial::workload_id(MOVED), trial::host(), "n0".parse().unwrap());
    Event::workload(Workload { addresses: prefixes, ..workload })
}

/// These may do everything, the others nothing. `itself`: the machine is a workload.
fn begin(wide: bool, itself: bool, open: &[u8]) -> Story {
    let mut attachments = trial::attachments();
    attachments.remove(&trial::workload_id(MACHINE));
    if itself {
        attachments.insert(trial::workload_id(MACHINE), Attached { attachment: Attachment::Host, audit: false });
    }
    let mut events = vec![rules_of(open, &OPEN)];
    events.extend((0..WORKLOADS).filter(|number| *number != MOVED).map(place));
    events.push(placed(wide));
    Story::begin(attachments, &events)
}

fn take_address(family: Family, address: IpAddr) {
    let length = if family == Family::V4 { 32 } else { 128 };
    run("ip", &["address", "del", &format!("{address}/{length}"), "dev", "lo"]);
}

/// The machine's socket with the moving address.
fn listen(family: Family, port: u16) -> UdpSocket {
    let address = trial::address(MOVED, family);
    give_address(family, address, "lo");
    let socket = UdpSocket::bind((address, port)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

fn machine_gets(story: &mut Story, socket: &UdpSocket, from: u8, packet: &Packet) -> bool {
    story.machine().wire(from).send(packet);
    story.machine().sentinel();
    socket.recv(&mut [0; 9]).is_ok()
}

/// Whether what the machine sends comes out as the packet would.
fn machine_sends(story: &mut Story, socket: &UdpSocket, to: u8, packet: &Packet) -> bool {
    let Payload::Ports { destination, .. } = packet.payload else { panic!("{packet:?}") };
    story.machine().wire(to).drain();
    let _ = socket.send_to(&[], (packet.destination, destination)); // refused is what is asked for
    story.machine().wire(to).received(packet)
}

/// A flow to a workload kept passing by its stamp when the address became the machine's own, whose policy allows nothing: first where
/// the address was inside a prefix of the workload.
#[test]
fn a_flow_whose_address_moves_to_the_machine_is_judged_by_the_machines_policy() {
    for wide in FORMS {
        isolated(move || {
            let mut story = begin(wide, true, &[0, MOVED]);
            for family in FAMILIES {
                for from in [OUTSIDE, 0] {
                    let words = format!("{family:?}, wide: {wide}, from {from}");
                    let flow = story.flow(from, MOVED, family, UDP, PORT);
                    assert!(story.passes(from, MOVED, &flow) && story.passes(MOVED, from, &flow.answer()), "{words}");
                    let socket = listen(family, PORT);
                    for _ in 0..20 {
                        assert!(!machine_gets(&mut story, &socket, from, &flow), "{words}: the machine got it");
                    }
                    take_address(family, trial::address(MOVED, family));
                    assert!(story.passes(from, MOVED, &flow), "{words}: moved back");
                }
            }
        });
    }
}

/// The same of a flow that the workload began, and that the machine goes on with.
#[test]
fn the_machine_goes_on_with_no_flow_of_a_workload_whose_address_it_took() {
    for wide in FORMS {
        isolated(move || {
            let mut story = begin(wide, true, &[0, MOVED]);
            for family in FAMILIES {
                for to in [OUTSIDE, 0] {
                    let words = format!("{family:?}, wide: {wide}, to {to}");
                    let flow = story.flow(MOVED, to, family, UDP, PORT);
                    assert!(story.passes(MOVED, to, &flow) && story.passes(to, MOVED, &flow.answer()), "{words}");
                    let Payload::Ports { source, .. } = flow.payload else { panic!("{words}") };
                    let socket = listen(family, source);
                    for _ in 0..20 {
                        assert!(!machine_sends(&mut story, &socket, to, &flow), "{words}: the machine sent it");
                        assert!(!machine_gets(&mut story, &socket, to, &flow.answer()), "{words}: the machine got the answer");
                    }
                    take_address(family, trial::address(MOVED, family));
                    assert!(story.passes(MOVED, to, &flow), "{words}: moved back");
                }
            }
        });
    }
}

/// The reverse: a flow that the machine was allowed kept passing by its stamp when its address went to the workload, whose policy
/// allows nothing. That the machine is no workload makes no difference where the other end is one.
#[test]
fn a_flow_whose_address_moves_from_the_machine_is_judged_by_the_workloads_policy() {
    for (wide, itself) in FORMS.into_iter().flat_map(|wide| [(wide, true), (wide, false)]) {
        isolated(move || {
            let mut story = begin(wide, itself, &[0, MACHINE]);
            for family in FAMILIES {
                for other in [OUTSIDE, 0].into_iter().filter(|other| itself || *other != OUTSIDE) {
                    let words = format!("{family:?}, wide: {wide}, itself: {itself}, with {other}");
                    // Begun by the other end.
                    let socket = listen(family, PORT);
                    let flow = story.flow(other, MOVED, family, UDP, PORT);
                    assert!(machine_gets(&mut story, &socket, other, &flow), "{words}: the machine's");
                    assert!(machine_sends(&mut story, &socket, other, &flow.answer()), "{words}: its answer");
                    assert!(machine_gets(&mut story, &socket, other, &flow), "{words}: established");
                    take_address(family, trial::address(MOVED, family));
                    for _ in 0..20 {
                        assert!(!story.passes(other, MOVED, &flow), "{words}: passed to the workload");
                    }
                    // The answer too, and it stays so: it would complete what the machine's judges began.
                    for _ in 0..20 {
                        assert!(!story.passes(MOVED, other, &flow.answer()), "{words}: the workload answered");
                    }
                    // Begun by the machine.
                    let begun = story.flow(MOVED, other, family, UDP, PORT);
                    let Payload::Ports { source, .. } = begun.payload else { panic!("{words}") };
                    drop(socket);
                    let socket = listen(family, source);
                    assert!(machine_sends(&mut story, &socket, other, &begun), "{words}: begun by the machine");
                    assert!(machine_gets(&mut story, &socket, other, &begun.answer()), "{words}: its answer");
                    take_address(family, trial::address(MOVED, family));
                    for _ in 0..20 {
                        assert!(!story.passes(other, MOVED, &begun.answer()), "{words}: answered to the workload");
                        assert!(!story.passes(MOVED, other, &begun), "{words}: the workload went on");
                    }
                }
            }
        });
    }
}
