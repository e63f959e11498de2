//! The machine itself as a workload: its policy, and what no policy can cut.

use std::io::Write;
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use groupcast_enforce::settings::{Attached, Attachment, Failsafe, Settings};
use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::net::Family;
use groupcast_policy::packet::{ICMPV6, Payload, TCP, UDP};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};

use crate::packet::{Packet, SYN, SYN_ACK};
use crate::rows::{Story, place, rules};
use crate::settings;
use crate::stage::{isolated, run};

const OUTSIDE: u8 = WORKLOADS;
const BUS: u16 = 4222;

pub fn begin(lines: &[&str]) -> Story {
    let mut attachments = trial::attachments();
    attachments.insert(trial::workload_id(0), Attached { attachment: Attachment::Host, audit: false });
    let mut story = Story::begin(attachments, &[rules(lines), place(0), place(1)]);
    story.set(Settings { failsafe: Failsafe { inbound: [(TCP, 22)].into(), outbound: [(TCP, BUS)].into() }, ..settings() });
    run("ip", &["address", "add", "10.1.9.1/32", "dev", trial::outside().as_str()]);
    run("ip", &["address", "add", "fd00:1:9::1/128", "dev", trial::outside().as_str(), "nodad"]);
    // The kernel takes an IPv6 address for its own a moment after it was added.
    let start = std::time::Instant::now();
    loop {
        let local = std::process::Command::new("ip").args(["-6", "route", "show", "table", "local"]).output().unwrap();
        if String::from_utf8_lossy(&local.stdout).contains("fd00:1:9::1") {
            return story;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "the address is not local");
    }
}

pub fn own(family: Family) -> IpAddr {
    match family {
        Family::V4 => "10.1.9.1".parse().unwrap(),
        Family::V6 => "fd00:1:9::1".parse().unwrap(),
    }
}

/// With a policy that allows nothing: the bus connection, inbound failsafe ports, loopback, neighbour discovery and DHCP go on; everything
/// else stops, in both directions.
#[test]
fn no_policy_cuts_the_machine_off() {
    isolated(|| {
        let mut story = begin(&[]);
        // The bus: what this machine sends is on the wire, and the answer is heard.
        for (port, passes) in [(BUS, true), (BUS + 1, false)] {
            let to = (trial::address(OUTSIDE, Family::V4), port);
            story.machine().wire(OUTSIDE).drain();
            let dialled = std::thread::spawn(move || TcpStream::connect_timeout(&to.into(), Duration::from_millis(1500)));
            let start = std::time::Instant::now();
            let mut syn = None;
            while syn.is_none() && start.elapsed() < Duration::from_secs(if passes { 10 } else { 2 }) && !dialled.is_finished() {
                syn = story.machine().wire(OUTSIDE).drain().into_iter().find(|bytes| bytes[9] == TCP && bytes[33] & SYN != 0);
            }
            assert_eq!(syn.is_some(), passes, "to port {port}");
            let Some(syn) = syn else { continue };
            let answer = answer_to(&syn, port);
            story.machine().wire(OUTSIDE).send_bytes(&answer);
            assert!(dialled.join().unwrap().is_ok(), "the bus does not answer");
        }
        // Inbound failsafe: a SYN is answered; to any other port, by nobody.
        for (port, passes) in [(22, true), (23, false)] {
            let _listener = TcpListener::bind((own(Family::V4), port)).unwrap();
            let payload = Payload::Ports { protocol: TCP, source: 41_000 + port, destination: port };
            let source = trial::address(OUTSIDE, Family::V4);
            let packet = Packet { source, destination: own(Family::V4), payload, tcp_flags: SYN, icmp_id: 0 };
            story.machine().wire(OUTSIDE).drain();
            story.machine().wire(OUTSIDE).send(&packet);
            story.machine().sentinel();
            let answered = story.machine().wire(OUTSIDE).drain();
            let answered = answered.iter().any(|bytes| bytes[9] == TCP && bytes[33] == SYN_ACK);
            assert_eq!(answered, passes, "to port {port}");
        }
        // Sending from a failsafe port opens no other.
        let closed = UdpSocket::bind((own(Family::V4), 5001)).unwrap();
        closed.set_nonblocking(true).unwrap();
        let payload = Payload::Ports { protocol: UDP, source: BUS, destination: 5001 };
        let source = trial::address(OUTSIDE, Family::V4);
        let packet = Packet { source, destination: own(Family::V4), payload, tcp_flags: 0, icmp_id: 0 };
        story.machine().wire(OUTSIDE).send(&packet);
        story.machine().sentinel();
        assert!(closed.recv(&mut [0; 9]).is_err());
        // Loopback, also to the machine's other addresses.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        here.write_all(b"x").unwrap();
        let around = UdpSocket::bind((own(Family::V6), 0)).unwrap();
        around.send_to(&[1], around.local_addr().unwrap()).unwrap();
        around.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(around.recv(&mut [0; 9]).unwrap(), 1);
    });
}

/// What a peer answers to a SYN.
fn answer_to(syn: &[u8], port: u16) -> Vec<u8> {
    let sequence = u32::from_be_bytes([syn[24], syn[25], syn[26], syn[27]]);
    let mut tcp = port.to_be_bytes().to_vec();
    tcp.extend(&syn[20..22]);
    tcp.extend(7000u32.to_be_bytes());
    tcp.extend((sequence + 1).to_be_bytes());
    tcp.extend([5 << 4, SYN_ACK, 0xff, 0xff, 0, 0, 0, 0]);
    let source = trial::address(OUTSIDE, Family::V4);
    let sum = crate::packet::checksum(source, own(Family::V4), TCP, &tcp);
    tcp[16..18].copy_from_slice(&sum);
    crate::packet::with_head(source, own(Family::V4), TCP, &tcp, &[])
}

/// Neighbour discovery and DHCP of the machine itself, which begin nothing that a rule could allow.
#[test]
fn neighbour_discovery_and_dhcp_of_the_machine() {
    isolated(|| {
        let mut story = begin(&[]);
        // What the input hook lets pass, a raw socket hears.
        let raw = socket(AddressFamily::Inet6, SockType::Raw, SockFlag::SOCK_NONBLOCK, SockProtocol::IcmpV6).unwrap();
        let heard = |kind: u8| {
            use std::os::fd::AsRawFd;
            let mut buffer = [0; 256];
            let mut found = false;
            while let Ok(length) = recv(raw.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                found |= length > 0 && buffer[0] == kind;
            }
            found
        };
        for (kind, passes) in [(135, true), (136, true), (134, true), (137, false), (128, false)] {
            let payload = Payload::Icmp { kind, code: 0 };
            let (source, destination) = (trial::address(OUTSIDE, Family::V6), own(Family::V6));
            let packet = Packet { source, destination, payload, tcp_flags: 0, icmp_id: 9 };
            story.machine().wire(OUTSIDE).send(&packet);
            story.machine().sentinel();
            assert_eq!(heard(kind), passes, "ICMPv6 type {kind}");
        }
        // A DHCP server outside is heard, one that a workload plays is not.
        let client = UdpSocket::bind("0.0.0.0:68").unwrap();
        client.set_nonblocking(true).unwrap();
        run("ip", &["address", "add", "10.1.1.1/32", "dev", trial::interface(1).as_str()]);
        for (from, destination, passes) in [(OUTSIDE, own(Family::V4), true), (1, "10.1.1.1".parse().unwrap(), false)] {
            let payload = Payload::Ports { protocol: UDP, source: 67, destination: 68 };
            let offer = Packet { source: trial::address(from, Family::V4), destination, payload, tcp_flags: 0, icmp_id: 0 };
            story.machine().wire(from).send(&offer);
            story.machine().sentinel();
            assert_eq!(client.recv(&mut [0; 9]).is_ok(), passes, "an offer from {from}");
        }
        let discover = client.set_broadcast(true).and_then(|()| client.send_to(&[], (trial::address(OUTSIDE, Family::V4), 67)));
        assert!(discover.is_ok(), "{discover:?}");
    });
}

/// The machine's own policy, both directions and families; the traffic of its workloads with others is theirs, not the machine's.
#[test]
fn the_machines_policy_is_judged_like_a_workloads() {
    isolated(|| {
        let lines = ["ingress udp 5001 from any", "egress udp 5003 to any", "ingress icmp from any"];
        let mut story = begin(&lines);
        for family in [Family::V4, Family::V6] {
            for (port, passes) in [(5001, true), (5002, false)] {
                let socket = UdpSocket::bind((own(family), port)).unwrap();
                socket.set_nonblocking(true).unwrap();
                let packet = Packet { destination: own(family), ..story.flow(OUTSIDE, OUTSIDE, family, UDP, port) };
                story.machine().wire(OUTSIDE).send(&packet);
                story.machine().sentinel();
                assert_eq!(socket.recv(&mut [0; 9]).is_ok(), passes, "{family:?}: in to port {port}");
            }
            let socket = UdpSocket::bind((own(family), 6000)).unwrap();
            for (port, passes) in [(5003, true), (5004, false)] {
                story.machine().wire(OUTSIDE).drain();
                let sent = socket.send_to(&[], (trial::address(OUTSIDE, family), port));
                assert_eq!(sent.is_ok(), passes, "{family:?}: out to port {port}: {sent:?}");
                let payload = Payload::Ports { protocol: UDP, source: 6000, destination: port };
                let (source, destination) = (own(family), trial::address(OUTSIDE, family));
                let packet = Packet { source, destination, payload, tcp_flags: 0, icmp_id: 0 };
                assert_eq!(story.machine().wire(OUTSIDE).received(&packet), passes, "{family:?}: out to port {port}");
            }
            // It answers a ping that its policy lets in.
            let ping = Packet { destination: own(family), ..story.flow(OUTSIDE, OUTSIDE, family, ICMPV6, 0) };
            story.machine().wire(OUTSIDE).drain();
            story.machine().wire(OUTSIDE).send(&ping);
            story.machine().sentinel();
            assert!(story.machine().wire(OUTSIDE).received(&ping.answer()), "{family:?}: a ping");
            // A workload of this machine speaks with outside by its own policy: the machine's does not matter.
            let through = story.flow(OUTSIDE, 1, family, UDP, 5001);
            assert!(story.passes(OUTSIDE, 1, &through), "{family:?}");
        }
    });
}
