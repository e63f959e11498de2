//! Single cases, each a short story.

use std::net::{IpAddr, UdpSocket};

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::settings::{Attached, Attachment, Attachments, Mode, Settings, Stamp};
use groupcast_enforce::trial::{self, Stage, WORKLOADS};
use groupcast_host::netlink::Kernel;
use groupcast_policy::doc::Phases;
use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target, Workload};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::packet::{ICMP, ICMPV6, Payload, UDP};
use groupcast_policy::text::parse_rule;

use crate::packet::{Packet, SYN};
use crate::stage::{isolated, run};
use crate::{Machine, settings};

const OUTSIDE: u8 = WORKLOADS;

pub struct Story {
    machine: Option<Machine>,
    pub stage: Stage,
    pub engine: Engine,
    pub kernel: Kernel,
}

/// A group that everything here has.
pub fn rules(lines: &[&str]) -> Event {
    let rules = lines.iter().map(|line| GroupRule::from(parse_rule(line).unwrap_or_else(|error| panic!("{line}: {error:?}"))));
    let bindings = vec![Binding { target: Target::Global, phases: Phases::BOTH }];
    Event::group(Group { rules: rules.collect(), bindings, ..Group::new(trial::group_id(0)) })
}

pub fn place(place: u8) -> Event {
    let addresses = [Family::V4, Family::V6].map(|family| Prefix::host(trial::address(place, family))).into();
    Event::workload(Workload { addresses, ..Workload::new(trial::workload_id(place), trial::host(), "n0".parse().unwrap()) })
}

impl Story {
    pub fn begin(attachments: Attachments, events: &[Event]) -> Self {
        let engine = Engine::new(trial::host(), settings(), attachments, Stamp::new(7).unwrap());
        let mut kernel = Kernel::open("gc", true).unwrap();
        kernel.remove().unwrap();
        let mut story = Story { machine: Some(Machine::new()), stage: Stage::default(), engine, kernel };
        story.write(events);
        story
    }

    pub fn write(&mut self, events: &[Event]) {
        let edits = self.stage.change(events);
        let plan = self.engine.change(&edits, &self.stage);
        self.kernel.commit(&plan.transaction).unwrap();
        self.engine.committed(plan);
    }

    pub fn set(&mut self, settings: Settings) {
        self.engine.set_settings(settings);
        let plan = self.engine.compare(&self.stage);
        self.kernel.commit(&plan.transaction).unwrap();
        self.engine.committed(plan);
    }

    pub fn machine(&mut self) -> &mut Machine {
        self.machine.as_mut().unwrap()
    }

    /// A flow that was never seen, from place to place.
    pub fn flow(&mut self, from: u8, to: u8, family: Family, protocol: u8, port: u16) -> Packet {
        let packet = self.udp(from, to, port);
        let payload = match (packet.payload, protocol) {
            (_, ICMP | ICMPV6) => Payload::Icmp { kind: if family == Family::V4 { 8 } else { 128 }, code: 0 },
            (Payload::Ports { source, destination, .. }, protocol) => Payload::Ports { protocol, source, destination },
            (other, _) => other,
        };
        let [source, destination] = [from, to].map(|place| trial::address(place, family));
        let icmp_id = self.machine().ports;
        Packet { source, destination, payload, icmp_id, ..packet }
    }

    /// For a stream of its own.
    pub fn take_machine(&mut self) -> Machine {
        self.machine.take().unwrap()
    }

    pub fn udp(&mut self, from: u8, to: u8, port: u16) -> Packet {
        let machine = self.machine();
        machine.ports += 1;
        let payload = Payload::Ports { protocol: UDP, source: 40_000 + machine.ports, destination: port };
        let [source, destination] = [from, to].map(|place| trial::address(place, Family::V4));
        Packet { source, destination, payload, tcp_flags: SYN, icmp_id: 0 }
    }

    pub fn passes(&mut self, from: u8, to: u8, packet: &Packet) -> bool {
        self.machine().passes(from, to, packet)
    }
}

#[test]
fn what_is_claimed_and_nobodys_is_closed() {
    isolated(|| {
        let mut story = Story::begin(Attachments::new(), &[rules(&["ingress any from any", "egress any to any"]), place(0)]);
        for (from, to) in [(0, OUTSIDE), (OUTSIDE, 0), (0, 1)] {
            let packet = story.udp(from, to, 5001);
            assert!(!story.passes(from, to, &packet), "{from} to {to}");
        }
        // Nor is what was somebody's.
        drop(story);
        let mut story = Story::begin_again();
        let packet = story.udp(0, OUTSIDE, 5001);
        assert!(story.passes(0, OUTSIDE, &packet));
        story.write(&[Event::WorkloadRemoved { id: trial::workload_id(0), network: "n0".parse().unwrap() }]);
        assert!(!story.passes(0, OUTSIDE, &packet) && !story.passes(OUTSIDE, 0, &packet.answer()));
    });
}

impl Story {
    /// Everything is open; in the same namespace as one before it, on fresh wires.
    pub fn begin_again() -> Self {
        Self::begin(trial::attachments(), &[rules(&["ingress any from any", "egress any to any"]), place(0), place(1)])
    }
}

#[test]
fn nobody_sends_from_anothers_address() {
    isolated(|| {
        let mut story = Story::begin_again();
        let own = story.udp(0, OUTSIDE, 5001);
        assert!(story.passes(0, OUTSIDE, &own));
        for source in [trial::address(1, Family::V4), "8.8.8.8".parse().unwrap(), "127.0.0.1".parse().unwrap()] {
            let spoofed = Packet { source, ..own };
            assert!(!story.passes(0, OUTSIDE, &spoofed), "{source}");
        }
        let six = |source: IpAddr| Packet { source, destination: trial::address(OUTSIDE, Family::V6), ..own };
        assert!(story.passes(0, OUTSIDE, &six(trial::address(0, Family::V6))));
        assert!(!story.passes(0, OUTSIDE, &six(trial::address(1, Family::V6))));
        // Nor with its own address of IPv4 where a header of IPv4 has it.
        let IpAddr::V4(address) = own.source else { panic!("{}", own.source) };
        let disguised = std::net::Ipv6Addr::from_bits(0x2001_0db8 << 96 | u128::from(address.to_bits()) << 64 | 1);
        assert!(!story.passes(0, OUTSIDE, &six(disguised.into())));
        // It did not touch the other's connection: that one's answers still come.
        let flow = story.udp(1, OUTSIDE, 5002);
        assert!(story.passes(1, OUTSIDE, &flow));
        assert!(!story.passes(0, OUTSIDE, &flow));
        assert!(story.passes(OUTSIDE, 1, &flow.answer()));
        // A workload plays neither router nor DHCP server.
        let server = Packet { payload: Payload::Ports { protocol: UDP, source: 67, destination: 68 }, ..own };
        assert!(!story.passes(0, OUTSIDE, &server));
        let router = Packet { payload: Payload::Icmp { kind: 134, code: 0 }, ..six(trial::address(0, Family::V6)) };
        assert!(!story.passes(0, OUTSIDE, &router));
    });
}

#[test]
fn a_revoked_flow_stops_in_both_directions_and_comes_back_at_once() {
    isolated(|| {
        let mut story = Story::begin_again();
        let open = rules(&["ingress any from any", "egress any to any"]);
        let flow = story.udp(0, 1, 5001);
        assert!(story.passes(0, 1, &flow) && story.passes(1, 0, &flow.answer()) && story.passes(0, 1, &flow));
        for closed in [
            &["ingress any from any"][..],
            &["egress any to any"],
            &["ingress any from any", "egress any to any", "deny egress udp 5001 to any"],
        ] {
            story.write(&[rules(closed)]);
            assert!(!story.passes(1, 0, &flow.answer()), "a reply after {closed:?}");
            assert!(!story.passes(0, 1, &flow), "{closed:?}");
            assert!(!story.passes(1, 0, &flow.answer()), "a second reply after {closed:?}");
            story.write(std::slice::from_ref(&open));
            assert!(story.passes(1, 0, &flow.answer()) && story.passes(0, 1, &flow), "{closed:?}");
        }
    });
}

#[test]
fn modes() {
    isolated(|| {
        let mut story = Story::begin(trial::attachments(), &[rules(&["egress udp 5001 to any"]), place(0)]);
        let allowed = story.udp(0, OUTSIDE, 5001);
        let denied = story.udp(0, OUTSIDE, 5002);
        let rows = [
            (Mode::Enforce, true, false),
            (Mode::Audit, true, true),
            (Mode::Enforce, true, false),
            (Mode::Bypass, true, true),
            (Mode::Lockdown, false, false),
            (Mode::Enforce, true, false),
        ];
        for (mode, first, second) in rows {
            story.set(Settings { mode, ..settings() });
            assert_eq!((story.passes(0, OUTSIDE, &allowed), story.passes(0, OUTSIDE, &denied)), (first, second), "{mode:?}");
        }
        // One workload in audit, the others not.
        let mut attachments = trial::attachments();
        attachments
            .insert(trial::workload_id(0), Attached { attachment: Attachment::Interface(trial::interface(0)), audit: true });
        story.engine.set_attachments(attachments);
        story.set(settings());
        story.write(&[place(1)]);
        let other = story.udp(1, OUTSIDE, 5002);
        assert!(story.passes(0, OUTSIDE, &denied) && !story.passes(1, OUTSIDE, &other));
    });
}

#[test]
fn the_host_and_its_workloads_are_policed_both_ways() {
    isolated(|| {
        let mut story =
            Story::begin(trial::attachments(), &[rules(&["egress udp 5001 to any", "ingress udp 5003 from any"]), place(0)]);
        run("ip", &["address", "add", "10.1.0.1/32", "dev", trial::interface(0).as_str()]);
        let host: IpAddr = "10.1.0.1".parse().unwrap();
        let heard = |port: u16| {
            let socket = UdpSocket::bind((host, port)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let (open, closed) = (heard(5001), heard(5002));
        for (socket, port, passes) in [(&open, 5001, true), (&closed, 5002, false)] {
            let packet = Packet { destination: host, ..story.udp(0, OUTSIDE, port) };
            story.machine().wire(0).send(&packet);
            story.machine().sentinel();
            assert_eq!(socket.recv(&mut [0; 9]).is_ok(), passes, "to the host's port {port}");
        }
        for (port, passes) in [(5003, true), (5004, false)] {
            let sent = open.send_to(&[], (trial::address(0, Family::V4), port));
            assert_eq!(sent.is_ok(), passes, "{sent:?}");
            let payload = Payload::Ports { protocol: UDP, source: 5001, destination: port };
            let packet = Packet { source: host, destination: trial::address(0, Family::V4), payload, tcp_flags: 0, icmp_id: 0 };
            assert_eq!(story.machine().wire(0).received(&packet), passes, "from the host to port {port}");
        }
    });
}

#[test]
fn the_machine_itself_as_a_workload() {
    isolated(|| {
        let mut attachments = trial::attachments();
        attachments.insert(trial::workload_id(0), Attached { attachment: Attachment::Host, audit: false });
        let events = [rules(&["ingress udp 5001 from any", "egress udp 5003 to any"]), place(0)];
        let mut story = Story::begin(attachments, &events);
        story.set(Settings {
            failsafe: groupcast_enforce::settings::Failsafe { inbound: [(UDP, 5005)].into(), outbound: [(UDP, 5006)].into() },
            ..settings()
        });
        run("ip", &["address", "add", "10.1.9.1/32", "dev", trial::outside().as_str()]);
        let host: IpAddr = "10.1.9.1".parse().unwrap();
        for (port, passes) in [(5001, true), (5002, false), (5005, true)] {
            let socket = UdpSocket::bind((host, port)).unwrap();
            socket.set_nonblocking(true).unwrap();
            let packet = Packet { destination: host, ..story.udp(OUTSIDE, OUTSIDE, port) };
            story.machine().wire(OUTSIDE).send(&packet);
            story.machine().sentinel();
            assert_eq!(socket.recv(&mut [0; 9]).is_ok(), passes, "to port {port}");
        }
        let socket = UdpSocket::bind((host, 6000)).unwrap();
        for (port, passes) in [(5003, true), (5004, false), (5006, true)] {
            let sent = socket.send_to(&[], (trial::address(OUTSIDE, Family::V4), port));
            assert_eq!(sent.is_ok(), passes, "to port {port}: {sent:?}");
        }
        // Loopback is nobody's business.
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        here.send_to(&[1], here.local_addr().unwrap()).unwrap();
        assert_eq!(here.recv(&mut [0; 9]).unwrap(), 1);
    });
}

#[test]
fn marks_of_others_survive() {
    isolated(|| {
        let mut story = Story::begin_again();
        let script = "table inet other { \
            chain before { type filter hook forward priority -50; ct mark set ct mark or 0x55000000; }; \
            chain after { type filter hook forward priority 50; ct mark and 0xff000000 == 0x55000000 counter; \
                          ct mark and 0xff000000 != 0x55000000 drop; }; }";
        run("nft", &[script]);
        let flow = story.udp(0, 1, 5001);
        for _ in 0..3 {
            assert!(story.passes(0, 1, &flow) && story.passes(1, 0, &flow.answer()));
            story.write(&[rules(&["ingress any from any", "egress any to any", "deny egress tcp 1 to any"])]);
            assert!(story.passes(0, 1, &flow));
            story.write(&[rules(&["ingress any from any", "egress any to any"])]);
        }
    });
}

#[test]
fn a_neighbour_that_commits_all_the_time_disturbs_nothing() {
    isolated(|| {
        let mut story = Story::begin_again();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        // A thread stays in its parent's namespace.
        let neighbour = std::thread::spawn({
            let stop = stop.clone();
            move || {
                let mut commits = 0;
                let mut kernel = Kernel::open("neighbour", false).unwrap();
                let set = |n: usize| groupcast_enforce::Name::from(format!("s{n}"));
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let kind = groupcast_enforce::table::SetKind::V4;
                    let add = groupcast_enforce::delta::Op::AddSet { set: set(commits), kind };
                    let remove = groupcast_enforce::delta::Op::DeleteSet { set: set(commits) };
                    for op in [add, remove] {
                        let transaction = groupcast_enforce::delta::Transaction { anew: false, ops: vec![op] };
                        kernel.commit(&transaction).unwrap();
                    }
                    commits += 1;
                    std::thread::sleep(std::time::Duration::from_micros(500));
                }
                commits
            }
        });
        for round in 0..40 {
            story.write(&[rules(&["egress any to any"])]);
            let packet = story.udp(0, 1, 5001);
            assert!(!story.passes(0, 1, &packet), "round {round}");
            story.write(&[rules(&["ingress any from any", "egress any to any"])]);
            assert!(story.passes(0, 1, &packet), "round {round}");
            let there = story.kernel.read().unwrap().unwrap();
            assert_eq!(there.differences(story.engine.actual()), [""; 0], "round {round}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(neighbour.join().unwrap() > 10);
    });
}
