//! While things change: streams of packets beside commits, from a thread of their own. Every packet's fate is known when its write
//! returns, so what was sent after a commit is told from what was sent before.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use groupcast_enforce::trial::{self, Dice, WORKLOADS};
use groupcast_policy::net::Family;
use groupcast_policy::packet::{Payload, TCP, UDP};

use crate::Machine;
use crate::packet::{Packet, SYN};
use crate::rows::{Story, place, rules};
use crate::stage::isolated;

const OUTSIDE: u8 = WORKLOADS;

/// What the policy says of the flows that are revoked again and again.
const CHANGING: u64 = 0;
const REVOKED: u64 = 1;
const ALLOWED: u64 = 2;
/// Rules of each direction that a packet is compared with before any allows it.
const LONG: usize = 150;

fn full() -> bool {
    std::env::var_os("GROUPCAST_FULL").is_some()
}

pub fn packet(from: u8, to: u8, protocol: u8, port: u16) -> Packet {
    let payload = Payload::Ports { protocol, source: 45_000 + port % 1000, destination: port };
    let [source, destination] = [from, to].map(|place| trial::address(place, Family::V4));
    Packet { source, destination, payload, tcp_flags: SYN, icmp_id: 0 }
}

/// Sends its packets over and over until told to stop.
pub struct Stream {
    stop: Arc<AtomicBool>,
    /// Counts rounds: each of them has sent everything once.
    pub rounds: Arc<AtomicU64>,
    pub thread: JoinHandle<Machine>,
}

impl Stream {
    pub fn start(mut machine: Machine, mut round: impl FnMut(&mut Machine) + Send + 'static) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let thread = thread::spawn({
            let (stop, rounds) = (stop.clone(), rounds.clone());
            move || {
                while !stop.load(Ordering::SeqCst) {
                    round(&mut machine);
                    rounds.fetch_add(1, Ordering::SeqCst);
                }
                machine
            }
        });
        Self { stop, rounds, thread }
    }

    /// Until everything has been sent once more.
    pub fn wait_for_rounds(&self, more: u64) {
        let until = self.rounds.load(Ordering::SeqCst) + more;
        while self.rounds.load(Ordering::SeqCst) < until && !self.thread.is_finished() {
            thread::yield_now();
        }
    }

    pub fn end(self) -> Machine {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// These and some more, at random.
pub fn some_lines(dice: &mut Dice, mut lines: Vec<String>) -> Vec<String> {
    for _ in 0..dice.below(4) {
        let port = 6000 + dice.below(50);
        lines.push(match dice.below(3) {
            0 => format!("egress udp {port} to any"),
            1 => format!("ingress tcp {port} from 10.1.{}.0/24", dice.below(5)),
            _ => format!("deny egress tcp {port} to any"),
        });
    }
    lines.sort();
    lines.dedup();
    lines
}

/// Through hundreds of changes, what neither old nor new policy allows never passes, and what both allow never loses a packet.
#[test]
fn during_every_change_the_allowed_passes_and_the_denied_does_not() {
    isolated(|| {
        let always =
            ["egress udp 5001 to any", "ingress udp 5001 from any", "egress tcp 5002 to any", "ingress tcp 5002 from any"];
        let mut story = Story::begin(trial::attachments(), &[rules(&always), place(0), place(1)]);
        let (udp, tcp) = (packet(0, 1, UDP, 5001), packet(0, 1, TCP, 5002));
        let never = [packet(0, 1, UDP, 5003), packet(0, OUTSIDE, TCP, 5004), packet(OUTSIDE, 1, UDP, 5005)];
        let mut machine = story.take_machine();
        assert!(machine.passes(0, 1, &tcp) && machine.passes(1, 0, &tcp.answer()));
        let stream = Stream::start(machine, move |machine| {
            for (from, to, packet) in [(0, 1, udp), (1, 0, udp.answer()), (0, 1, tcp.later()), (1, 0, tcp.answer().later())] {
                machine.wire(from).send(&packet);
                assert!(machine.wire(to).received(&packet), "lost: {packet:?}");
            }
            for (from, to, packet) in [(0, 1, never[0]), (0, OUTSIDE, never[1]), (OUTSIDE, 1, never[2])] {
                machine.wire(from).send(&packet);
                assert!(!machine.wire(to).received(&packet), "passed: {packet:?}");
            }
        });
        let mut dice = Dice::new(11);
        let changes = if full() { 5_000 } else { 500 };
        for _ in 0..changes {
            let lines = some_lines(&mut dice, always.map(String::from).to_vec());
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            let mut events = vec![rules(&lines)];
            if dice.percent(20) {
                events.push(place(2));
            }
            if dice.percent(10) {
                events = vec![groupcast_policy::model::Event::WorkloadRemoved {
                    id: trial::workload_id(2),
                    network: "n0".parse().unwrap(),
                }];
            }
            story.write(&events);
            if dice.percent(5) {
                stream.wait_for_rounds(1);
            }
        }
        stream.wait_for_rounds(2);
        assert!(stream.rounds.load(Ordering::SeqCst) > 10);
        stream.end();
    });
}

/// Beside a flood in both directions through long chains, and 100,000 other connections in full: nothing that was sent after the commit passes, by no
/// packet; what is allowed loses nothing; allowed again, the same five-tuple works at once.
#[test]
fn nothing_passes_after_a_revocation() {
    isolated(|| {
        let open = ["egress any to any", "ingress any from any"];
        // Long chains, all of which every judged packet runs through: it is on its way while rules change.
        let denies: Vec<String> = (0..LONG)
            .flat_map(|n| [format!("deny egress udp {} to any", 6000 + n), format!("deny ingress tcp {} from any", 7000 + n)])
            .collect();
        let rules = |lines: &[&str]| rules(&denies.iter().map(String::as_str).chain(lines.iter().copied()).collect::<Vec<_>>());
        let mut story = Story::begin(trial::attachments(), &[rules(&open), place(0), place(1)]);
        let mut machine = story.take_machine();
        let others: u16 = if full() { 50_000 } else { 2_000 };
        for port in 0..others {
            for protocol in [UDP, TCP] {
                let payload = Payload::Ports { protocol, source: 10_000 + port, destination: 5008 };
                let other = Packet { payload, ..packet(0, OUTSIDE, protocol, 5008) };
                machine.wire(0).send(&other);
                assert!(machine.wire(OUTSIDE).received(&other), "{other:?}");
            }
        }
        let (udp, tcp, kept) = (packet(0, 1, UDP, 5001), packet(0, 1, TCP, 5002), packet(0, 1, UDP, 5007));
        assert!(machine.passes(0, 1, &tcp) && machine.passes(1, 0, &tcp.answer()));
        // What held before a packet was written and still after it arrived, it is judged by.
        let state = Arc::new(AtomicU64::new(CHANGING));
        let leaks: Arc<Mutex<Vec<String>>> = Arc::default();
        let stream = Stream::start(machine, {
            let (state, leaks) = (state.clone(), leaks.clone());
            move |machine| {
                let revocable = [(1, 0, udp.answer()), (0, 1, udp), (1, 0, tcp.answer().later()), (0, 1, tcp.later())];
                for (from, to, packet) in revocable {
                    let before = state.load(Ordering::SeqCst);
                    machine.wire(from).send(&packet);
                    let passed = machine.wire(to).received(&packet);
                    let after = state.load(Ordering::SeqCst);
                    let leaked = before == REVOKED && passed;
                    let lost = before == ALLOWED && after == ALLOWED && !passed;
                    if leaked || lost {
                        leaks
                            .lock()
                            .unwrap()
                            .push(format!("{} in state {before}: {packet:?}", if leaked { "leaked" } else { "lost" }));
                    }
                }
                for (from, to, packet) in [(0, 1, kept), (1, 0, kept.answer())] {
                    machine.wire(from).send(&packet);
                    if !machine.wire(to).received(&packet) {
                        leaks.lock().unwrap().push(format!("an allowed flow lost a packet: {packet:?}"));
                    }
                }
            }
        });
        let revocations =
            [["egress udp 5007 to any", "ingress any from any"], ["egress any to any", "ingress udp 5007 from any"]];
        let rounds = if full() { 200 } else { 60 };
        for round in 0..rounds {
            story.write(&[rules(&revocations[round % 2])]);
            state.store(REVOKED, Ordering::SeqCst);
            stream.wait_for_rounds(2);
            // While it is being allowed again, both are right.
            state.store(CHANGING, Ordering::SeqCst);
            stream.wait_for_rounds(1);
            story.write(&[rules(&open)]);
            state.store(ALLOWED, Ordering::SeqCst);
            stream.wait_for_rounds(2);
            state.store(CHANGING, Ordering::SeqCst);
            assert_eq!(*leaks.lock().unwrap(), [""; 0], "round {round}");
        }
        stream.end();
        assert_eq!(*leaks.lock().unwrap(), [""; 0]);
    });
}
