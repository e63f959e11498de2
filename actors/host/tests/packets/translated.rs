//! Through address translation: a packet is judged by who sent it and whom it reaches, not by the address it was sent to or arrives
//! from. In every family and protocol, into the host, out of it, and between two of its workloads with both ends translated.

use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::net::Family;
use groupcast_policy::packet::{ICMP, ICMPV6, Payload, TCP, UDP};

use crate::packet::Packet;
use crate::rows::{Story, place, rules};
use crate::stage::{FAMILIES, isolated, run};

const OUTSIDE: u8 = WORKLOADS;

/// Ports that the public address is asked on, and what they lead to at the first workload.
const LED: (u16, u16) = (80, 5001);
const LED_ASTRAY: (u16, u16) = (81, 5009);

struct World {
    family: Family,
    /// What outsiders and neighbours call the first workload by.
    public: &'static str,
    /// What everything that leaves comes from.
    gateway: &'static str,
}

const V4: World = World { family: Family::V4, public: "10.1.9.100", gateway: "10.1.9.1" };
const V6: World = World { family: Family::V6, public: "fd00:9::100", gateway: "fd00:9::1" };

impl World {
    fn of(family: Family) -> &'static World {
        if family == Family::V4 { &V4 } else { &V6 }
    }

    fn translate(&self) {
        let (table, icmp) = if self.family == Family::V4 { ("ip", "icmp") } else { ("ip6", "icmpv6") };
        let (public, gateway, first) = (self.public, self.gateway, trial::address(0, self.family));
        let to = |port: u16| if self.family == Family::V4 { format!("{first}:{port}") } else { format!("[{first}]:{port}") };
        let mut before = format!("{table} daddr {public} {icmp} type echo-request dnat to {first}; ");
        for protocol in ["tcp", "udp"] {
            for (port, real) in [LED, LED_ASTRAY] {
                before += &format!("{table} daddr {public} {protocol} dport {port} dnat to {}; ", to(real));
            }
        }
        let [outside, inside] = [trial::outside(), trial::interface(0)].map(|interface| format!("\"{}\"", interface.as_str()));
        let neighbour = trial::address(1, self.family);
        let script = format!(
            "table {table} translate {{ \
             chain before {{ type nat hook prerouting priority -100; {before} }}; \
             chain after {{ type nat hook postrouting priority 100; oifname {outside} snat to {gateway}; \
             {table} saddr {neighbour} oifname {inside} snat to {gateway}; }}; }}"
        );
        run("nft", &[&script]);
    }

    /// A flow to the public address, and how it looks where it arrives: a neighbour's comes from the gateway, an outsider's as it is.
    fn inwards(&self, story: &mut Story, from: u8, protocol: u8, (port, real): (u16, u16)) -> (Packet, Packet) {
        let flow = story.flow(from, 0, self.family, protocol, port);
        let payload = match flow.payload {
            Payload::Ports { protocol, source, .. } => Payload::Ports { protocol, source, destination: real },
            other => other,
        };
        let sent = Packet { destination: self.public.parse().unwrap(), ..flow };
        let source = if from == OUTSIDE { flow.source } else { self.gateway.parse().unwrap() };
        (sent, Packet { source, payload, ..flow })
    }

    fn outwards(&self, story: &mut Story, protocol: u8, port: u16) -> (Packet, Packet) {
        let sent = story.flow(0, OUTSIDE, self.family, protocol, port);
        (sent, Packet { source: self.gateway.parse().unwrap(), ..sent })
    }
}

/// Sends at one end and says whether it arrived, translated, at the other.
fn arrives(story: &mut Story, from: u8, to: u8, sent: &Packet, seen: &Packet) -> bool {
    let machine = story.machine();
    machine.wire(to).drain();
    machine.wire(from).send(sent);
    machine.sentinel();
    machine.wire(to).received(seen)
}

/// Both ways, again and again: a flow of three packets.
fn exchanges(story: &mut Story, from: u8, to: u8, (sent, seen): &(Packet, Packet), words: &str) {
    assert!(arrives(story, from, to, sent, seen), "the first packet, {words}");
    assert!(arrives(story, to, from, &seen.answer(), &sent.answer()), "the answer, translated back, {words}");
    assert!(arrives(story, from, to, &sent.later(), &seen.later()), "a later packet, {words}");
}

fn has_stopped(story: &mut Story, from: u8, to: u8, (sent, seen): &(Packet, Packet), words: &str) {
    assert!(!arrives(story, to, from, &seen.answer().later(), &sent.answer().later()), "an answer after the end, {words}");
    assert!(!arrives(story, from, to, &sent.later(), &seen.later()), "a packet after the end, {words}");
}

/// The text of rules for one protocol.
struct Lines {
    traffic: Box<dyn Fn(u16) -> String>,
}

impl Lines {
    fn of(family: Family, protocol: u8) -> Self {
        let traffic: Box<dyn Fn(u16) -> String> = match (protocol, family) {
            (TCP, _) => Box::new(|port| format!("tcp {port}")),
            (UDP, _) => Box::new(|port| format!("udp {port}")),
            (_, Family::V4) => Box::new(|_| "ipv4 icmp 8/any".into()),
            (_, Family::V6) => Box::new(|_| "ipv6 icmp 128/any".into()),
        };
        Self { traffic }
    }

    fn ingress(&self, port: u16, from: &str) -> String {
        format!("ingress {} from {from}", (self.traffic)(port))
    }

    fn egress(&self, port: u16, to: &str) -> String {
        format!("egress {} to {to}", (self.traffic)(port))
    }
}

fn write(story: &mut Story, lines: &[String]) {
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    story.write(&[rules(&lines)]);
}

fn protocols(family: Family) -> [u8; 3] {
    [TCP, UDP, if family == Family::V4 { ICMP } else { ICMPV6 }]
}

/// Runs a story for each family and protocol.
fn in_all(tell: fn(&mut Story, &World, u8, &Lines, &str)) {
    for family in FAMILIES {
        for protocol in protocols(family) {
            isolated(move || {
                let world = World::of(family);
                let lines = Lines::of(family, protocol);
                let mut story = Story::begin(trial::attachments(), &[rules(&[]), place(0), place(1)]);
                world.translate();
                tell(&mut story, world, protocol, &lines, &format!("{family:?}, protocol {protocol}"));
            });
        }
    }
}

#[test]
fn a_flow_to_a_public_address_is_judged_by_the_workload_behind_it() {
    in_all(|story, world, protocol, lines, words| {
        let allowed = [lines.ingress(LED.1, "any")];
        write(story, &allowed);
        let flow = world.inwards(story, OUTSIDE, protocol, LED);
        exchanges(story, OUTSIDE, 0, &flow, words);
        if [TCP, UDP].contains(&protocol) {
            let (sent, seen) = world.inwards(story, OUTSIDE, protocol, LED_ASTRAY);
            assert!(!arrives(story, OUTSIDE, 0, &sent, &seen), "to a port that nobody allows, {words}");
            // The public port is nothing a rule can mean.
            write(story, &[lines.ingress(LED.1, "any"), lines.ingress(LED_ASTRAY.0, "any")]);
            assert!(!arrives(story, OUTSIDE, 0, &sent, &seen), "by a rule for the public port, {words}");
        }
        write(story, &[]);
        has_stopped(story, OUTSIDE, 0, &flow, words);
        write(story, &allowed);
        assert!(arrives(story, OUTSIDE, 0, &flow.0.later(), &flow.1.later()), "allowed again, {words}");
    });
}

#[test]
fn a_flow_that_leaves_under_the_gateways_address_is_judged_by_its_sender() {
    in_all(|story, world, protocol, lines, words| {
        let allowed = [lines.egress(5002, "any")];
        write(story, &allowed);
        let flow = world.outwards(story, protocol, 5002);
        exchanges(story, 0, OUTSIDE, &flow, words);
        if [TCP, UDP].contains(&protocol) {
            let (sent, seen) = world.outwards(story, protocol, 5003);
            assert!(!arrives(story, 0, OUTSIDE, &sent, &seen), "to a port that nobody allows, {words}");
        }
        write(story, &[]);
        has_stopped(story, 0, OUTSIDE, &flow, words);
        write(story, &allowed);
        assert!(arrives(story, 0, OUTSIDE, &flow.0.later(), &flow.1.later()), "allowed again, {words}");
    });
}

#[test]
fn neighbours_with_both_ends_translated_are_judged_by_who_they_are() {
    in_all(|story, world, protocol, lines, words| {
        let [receiver, sender] = [0, 1].map(|place| trial::address(place, world.family).to_string());
        let out = lines.egress(LED.1, &receiver);
        write(story, &[out.clone(), lines.ingress(LED.1, &sender)]);
        let flow = world.inwards(story, 1, protocol, LED);
        exchanges(story, 1, 0, &flow, words);
        // What arrives comes from the gateway; who lets only that in lets nobody in.
        write(story, &[out.clone(), lines.ingress(LED.1, world.gateway)]);
        has_stopped(story, 1, 0, &flow, words);
        // What is sent goes to the public address; who may only go there may not go to the workload behind it.
        write(story, &[lines.egress(LED.1, world.public), lines.ingress(LED.1, &sender)]);
        has_stopped(story, 1, 0, &flow, words);
        write(story, &[out, lines.ingress(LED.1, &sender)]);
        assert!(arrives(story, 1, 0, &flow.0.later(), &flow.1.later()), "allowed again, {words}");
    });
}
