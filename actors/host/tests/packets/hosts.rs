//! Two hosts, each with its own table, and a wire between them: egress is judged at one, ingress at the other.

use std::sync::mpsc::channel;
use std::thread;

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::settings::{Attached, Attachment, Attachments};
use groupcast_enforce::trial::{self, Stage};
use groupcast_host::netlink::Kernel;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Event, Target, Workload};
use groupcast_policy::net::{Family, Prefix};
use groupcast_policy::packet::{ICMP, Payload, TCP, UDP};

use crate::cases::{engine_of, group};
use crate::packet::{Packet, SYN};
use crate::stage::{FAMILIES, Wire, isolated, run, settle_namespace};

struct Host {
    wire: Wire,
    kernel: Kernel,
    engine: Engine,
}

fn address(place: u8, family: Family) -> std::net::IpAddr {
    trial::address(place, family)
}

/// In the namespace of the calling thread, whose link to the other host is there.
fn host(place: u8, stage: &Stage) -> Host {
    let (own, other) = (place, 1 - place);
    let peers: Vec<String> = FAMILIES.map(|family| address(own, family).to_string()).into();
    let wire = Wire::new(trial::interface(own).as_str(), &[], &peers);
    run("ip", &["link", "set", "between", "up"]);
    run("ip", &["address", "add", &format!("192.168.7.{}/24", own + 1), "dev", "between"]);
    run("ip", &["address", "add", &format!("fd77::{}/64", own + 1), "dev", "between", "nodad"]);
    let (via4, via6) = (format!("192.168.7.{}", other + 1), format!("fd77::{}", other + 1));
    run("ip", &["route", "add", &address(other, Family::V4).to_string(), "via", &via4]);
    run("ip", &["route", "add", &address(other, Family::V6).to_string(), "via", &via6]);
    let attachment = Attachment::Interface(trial::interface(own));
    let attachments: Attachments = [(trial::workload_id(own), Attached { attachment, audit: false })].into();
    let mut kernel = Kernel::open("gc", true).unwrap();
    let engine = engine_of(host_id(own), attachments, stage, &mut kernel);
    Host { wire, kernel, engine }
}

fn host_id(place: u8) -> HostId {
    format!("h{place}").parse().unwrap()
}

fn placed(place: u8) -> Event {
    let addresses = FAMILIES.map(|family| Prefix::host(address(place, family))).into();
    Event::workload(Workload { addresses, ..Workload::new(trial::workload_id(place), host_id(place), "n0".parse().unwrap()) })
}

struct Pair {
    stage: Stage,
    hosts: [Host; 2],
    ports: u16,
}

impl Pair {
    fn begin(events: &[Event]) -> Self {
        let mut stage = Stage::default();
        stage.change(events);
        // The other host lives in a namespace of its own, which its sockets keep.
        let (born, birth) = channel();
        let (linked, link) = channel();
        let second = thread::spawn({
            let mut stage = Stage::default();
            stage.change(events);
            move || {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                settle_namespace();
                born.send(nix::unistd::gettid()).unwrap();
                link.recv().unwrap();
                host(1, &stage)
            }
        });
        let thread = birth.recv().unwrap().to_string();
        run("ip", &["link", "add", "between", "type", "veth", "peer", "name", "between", "netns", &thread]);
        linked.send(()).unwrap();
        let first = host(0, &stage);
        let second = second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Pair { stage, hosts: [first, second], ports: 0 }
    }

    /// A change reaches one host or both.
    fn write(&mut self, events: &[Event], hosts: &[usize]) {
        let edits = self.stage.change(events);
        for index in hosts {
            let Host { kernel, engine, .. } = &mut self.hosts[*index];
            let plan = engine.change(&edits, &self.stage);
            kernel.commit(&plan.transaction).unwrap();
            engine.committed(plan);
        }
    }

    fn flow(&mut self, from: u8, family: Family, protocol: u8, port: u16) -> Packet {
        self.ports += 1;
        let payload = match protocol {
            ICMP => Payload::Icmp { kind: if family == Family::V4 { 8 } else { 128 }, code: 0 },
            _ => Payload::Ports { protocol, source: 40_000 + self.ports, destination: port },
        };
        let [source, destination] = [from, 1 - from].map(|place| address(place, family));
        Packet { source, destination, payload, tcp_flags: SYN, icmp_id: self.ports }
    }

    /// The wire between the hosts may hand a packet on to the other processor: it is there when one that is known to pass, sent after
    /// it, is there.
    fn passes(&mut self, from: usize, packet: &Packet) -> bool {
        let to = 1 - from;
        self.hosts[from].wire.send(packet);
        let family = if packet.source.is_ipv4() { Family::V4 } else { Family::V6 };
        let sentinel = self.flow(from as u8, family, UDP, 4999);
        self.hosts[from].wire.send(&sentinel);
        let start = std::time::Instant::now();
        let mut came = Vec::new();
        while !came.iter().any(|bytes: &Vec<u8>| sentinel.is(bytes)) {
            assert!(start.elapsed().as_secs() < 10, "the sentinel did not pass");
            came.extend(self.hosts[to].wire.drain());
        }
        came.iter().any(|bytes| packet.is(bytes))
    }
}

const SENTINEL: [&str; 2] = ["egress udp 4999 to any", "ingress udp 4999 from any"];

fn policy(lines: &[&str]) -> Event {
    group(0, &[&SENTINEL[..], lines].concat(), &[Target::Global], &[])
}

#[test]
fn across_two_hosts_both_judge_and_revocation_holds_at_either() {
    isolated(|| {
        let open = ["egress any to group:g0", "ingress any from group:g0"];
        let mut pair = Pair::begin(&[policy(&open), placed(0), placed(1)]);
        for family in FAMILIES {
            for protocol in [TCP, UDP, ICMP] {
                for from in [0u8, 1] {
                    let words = format!("{family:?} protocol {protocol} from host {from}");
                    let (here, there) = (usize::from(from), usize::from(1 - from));
                    let flow = pair.flow(from, family, protocol, 5001);
                    assert!(pair.passes(here, &flow) && pair.passes(there, &flow.answer()), "{words}");
                    assert!(pair.passes(here, &flow.later()), "{words}");
                    // Revoked at the sender's host only, at the receiver's only, and allowed again.
                    for (closed, at) in [(&open[1..], here), (&open[..1], there)] {
                        pair.write(&[policy(closed)], &[at]);
                        assert!(!pair.passes(there, &flow.answer().later()), "{words}: an answer, closed at {at}");
                        assert!(!pair.passes(here, &flow.later()), "{words}: closed at {at}");
                        let fresh = pair.flow(from, family, protocol, 5001);
                        assert!(!pair.passes(here, &fresh), "{words}: a new one, closed at {at}");
                        pair.write(&[policy(&open)], &[at]);
                        assert!(pair.passes(here, &flow.later()) && pair.passes(there, &flow.answer().later()), "{words}: again");
                    }
                }
            }
        }
        for host in &mut pair.hosts {
            let there = host.kernel.read().unwrap().unwrap();
            assert_eq!(there.differences(host.engine.actual()), [""; 0]);
        }
    });
}
