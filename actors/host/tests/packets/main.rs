//! Real packets through the real kernel, judged by the policy engine.
//!
//! Where each line of the behaviour cases (CASES, sections B, C and E) is shown with packets:
//!
//! | line | test |
//! |---|---|
//! | B 9 | `cases::b09_no_rules_no_security_and_the_networks_own_ports` |
//! | B 10, E 33 | `rows::nobody_sends_from_anothers_address`, `cases::b10_spoofing_in_a_family_that_it_does_not_have` |
//! | B 11 | no packet shows it: an older revision never gets as far as the host's table (the reader's tests in `topics`) |
//! | B 12 | `cases::b12_a_member_leaves` |
//! | B 13 | `cases::b13_members_join` |
//! | B 14 | `cases::b14_stateless_groups` |
//! | B 15 | `cases::b15_two_workloads_on_one_host` |
//! | C 1, C 2, C 3 | `hierarchy::c01_c02_c03_rules_are_written_once_and_tried_in_order` |
//! | C 4 | `hierarchy::c04_a_packet_costs_the_same_however_full_the_host_is` |
//! | E 15, E 24 | `cases::e15_e24_nothing_to_do_is_nothing_written` |
//! | E 16 | `cases::e16_members_before_the_rules_that_name_them` |
//! | E 18 | `failing::e18_a_refused_transaction_changes_nothing` |
//! | E 19 | `killed::killed_among_500_changes_nothing_passes_and_nothing_is_lost` |
//! | E 20 | `failing::e20_tampering_is_impossible_or_repaired` |
//! | E 21 | `failing::e21_a_set_too_large_fails_by_name`, `failing::e21_a_kernel_without_memory_fails_by_name` |
//! | E 22, E 29, E 30 | `rows::a_revoked_flow_stops_in_both_directions_and_comes_back_at_once`, `streams::nothing_passes_after_a_revocation` |
//! | E 23 | `logs::e23_audit_logs_and_lets_pass`, `rows::modes` |
//! | E 28 | `cases::e28_any_deny_beats_every_allow` |
//! | E 31 | `rows::what_is_claimed_and_nobodys_is_closed`, `cases::e31_claimed_interfaces_are_closed_before_the_agent_runs` |
//! | E 32 | `rows::the_host_and_its_workloads_are_policed_both_ways` |
//! | E 34 | `rows::a_neighbour_that_commits_all_the_time_disturbs_nothing` |
//! | E 35 | `rows::marks_of_others_survive` |
//!
//! Beside them: fragments and ICMP errors (`errors`), the machine itself (`itself`), two hosts (`hosts`), translated addresses (`translated`),
//! logs (`logs`), what a stamp does not vouch for (`bound`, `moved`), what opens beside policy (`openings`), and changes beside streams of packets (`streams`).

mod bound;
mod cases;
mod errors;
mod failing;
mod hierarchy;
mod hosts;
mod itself;
mod killed;
mod logs;
mod moved;
mod openings;
mod packet;
mod rows;
mod stage;
mod streams;
mod translated;

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
