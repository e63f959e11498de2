//! Real packets through the real kernel, judged by the policy engine.

mod packet;
mod rows;
mod stage;
mod streams;

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::settings::{Settings, Stamp};
use groupcast_enforce::trial::{self, Dice, Probe, Stage, WORKLOADS};
use groupcast_host::netlink::Kernel;
use groupcast_policy::packet::{Payload, UDP};

use packet::{Packet, SYN};
use stage::{FAMILIES, Wire, isolated};

struct Machine {
    /// By place; the last two workloads share one wire.
    wires: Vec<Wire>,
    /// Two interfaces that nobody claims, for sentinels.
    plain: [Wire; 2],
    ports: u16,
}

impl Machine {
    fn new() -> Self {
        let peers = |places: &[u8]| -> Vec<String> {
            places.iter().flat_map(|place| FAMILIES.map(|family| trial::address(*place, family).to_string())).collect()
        };
        let mut wires = Vec::new();
        for place in 0..WORKLOADS - 2 {
            wires.push(Wire::new(trial::interface(place).as_str(), &[], &peers(&[place])));
        }
        wires.push(Wire::new(trial::interface(WORKLOADS - 1).as_str(), &[], &peers(&[WORKLOADS - 2, WORKLOADS - 1])));
        wires.push(Wire::new(trial::outside().as_str(), &[], &peers(&[WORKLOADS])));
        let plain =
            [("plain0", "192.168.1.2"), ("plain1", "192.168.2.2")].map(|(name, peer)| Wire::new(name, &[], &[peer.into()]));
        Self { wires, plain, ports: 0 }
    }

    fn wire(&mut self, place: u8) -> &mut Wire {
        let index = match place {
            WORKLOADS => self.wires.len() - 1,
            place => usize::from(place.min(WORKLOADS - 2)),
        };
        &mut self.wires[index]
    }

    /// A packet whose flow was never seen.
    fn fresh(&mut self, probe: &Probe) -> Packet {
        self.ports = self.ports % 20_000 + 1;
        let payload = match probe.payload {
            Payload::Ports { protocol, destination, .. } => Payload::Ports { protocol, source: 40_000 + self.ports, destination },
            other => other,
        };
        Packet { source: probe.source(), destination: probe.destination(), payload, tcp_flags: SYN, icmp_id: self.ports }
    }

    /// Sends and says whether it came out at the other end.
    fn passes(&mut self, from: u8, to: u8, packet: &Packet) -> bool {
        // What others sent meanwhile is nobody's.
        self.wire(from).received(packet);
        self.wire(from).send(packet);
        let passed = self.wire(to).received(packet);
        if !passed {
            self.sentinel();
            assert!(!self.wire(to).received(packet), "late: {packet:?}");
        }
        passed
    }

    fn sentinel(&mut self) {
        self.ports = self.ports % 20_000 + 1;
        let payload = Payload::Ports { protocol: UDP, source: 30_000 + self.ports, destination: 9 };
        let [source, destination] = [[192, 168, 1, 2], [192, 168, 2, 2]].map(std::net::IpAddr::from);
        let packet = Packet { source, destination, payload, tcp_flags: 0, icmp_id: 0 };
        self.plain[0].send(&packet);
        assert!(self.plain[1].received(&packet), "the sentinel did not pass: the machine forwards nothing");
    }
}

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

fn counts() -> u64 {
    if std::env::var_os("GROUPCAST_FULL").is_some() { 2_000 } else { 40 }
}

/// For random policies, and through random changes of them: the fate of first packets, of their answers and of what follows, and after
/// each change of everything that was open, is what the policy engine says.
#[test]
fn packets_fare_as_the_policy_says() {
    isolated(|| {
        let mut machine = Machine::new();
        machine.sentinel();
        let mut passed = 0;
        let mut refused = 0;
        for seed in 0..counts() {
            let mut dice = Dice::new(seed);
            let mut stage = Stage::default();
            let mut engine =
                Engine::new(trial::host(), settings(), trial::attachments(), Stamp::new(1 + seed as u32 * 100).unwrap());
            let mut kernel = Kernel::open("gc", true).unwrap();
            for _ in 0..10 {
                stage.change(&[trial::event(&mut dice)]);
            }
            let plan = engine.compare(&stage);
            kernel.commit(&plan.transaction).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            engine.committed(plan);
            let mut open: Vec<(Probe, Packet)> = Vec::new();
            for step in 0..8 {
                for _ in 0..6 {
                    let probe = Probe::roll(&mut dice);
                    let first = machine.fresh(&probe);
                    let words = || format!("seed {seed}, step {step}: {probe:?}\n{:#?}", stage.describe());
                    let fate = machine.passes(probe.from, probe.to, &first);
                    assert_eq!(fate, stage.allows(&probe), "a first packet, {}", words());
                    if !fate {
                        refused += 1;
                        continue;
                    }
                    passed += 1;
                    let fate = machine.passes(probe.to, probe.from, &first.answer());
                    assert_eq!(fate, stage.allows_answer(&probe), "an answer, {}", words());
                    if fate {
                        assert!(machine.passes(probe.from, probe.to, &first.later()), "a later packet, {}", words());
                        open.push((probe, first));
                    }
                }
                let event = if dice.percent(50) { stage.nudge(&mut dice) } else { trial::event(&mut dice) };
                let edits = stage.change(std::slice::from_ref(&event));
                let plan = engine.change(&edits, &stage);
                kernel.commit(&plan.transaction).unwrap_or_else(|error| panic!("seed {seed}, step {step}: {error}"));
                engine.committed(plan);
                for (probe, first) in &open {
                    let words = || format!("seed {seed}, step {step}: {probe:?} after {event:?}\n{:#?}", stage.describe());
                    // The answer first: a revoked flow that only sends in reply direction must stop too.
                    let fate = machine.passes(probe.to, probe.from, &first.answer().later());
                    assert_eq!(fate, stage.allows_answer(probe), "an open flow's answer, {}", words());
                    let fate = machine.passes(probe.from, probe.to, &first.later());
                    assert_eq!(fate, stage.allows(probe), "an open flow, {}", words());
                }
            }
            kernel.remove().unwrap();
        }
        println!("{passed} flows passed, {refused} were refused");
        assert!(passed > counts() && refused > counts());
    });
}
