//! What is logged, read from nflog as a collector would.

use std::time::{Duration, Instant};

use groupcast_enforce::settings::{Attached, Attachment, LogSettings, Mode, Settings};
use groupcast_enforce::trial::{self, WORKLOADS};
use groupcast_policy::net::Family;
use groupcast_policy::packet::{TCP, UDP};
use groupcast_policy::text::parse_rule;
use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};

use crate::rows::{Story, place, rules};
use crate::settings;
use crate::stage::{FAMILIES, isolated};

const OUTSIDE: u8 = WORKLOADS;

/// A subscriber of the group that logs go to.
struct Collector {
    socket: Socket,
}

const LOG: u16 = 4 << 8;
const CONFIGURE: u16 = LOG | 1;
const PACKET: u16 = LOG;

fn attribute(kind: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = (4 + data.len() as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

impl Collector {
    fn new() -> Self {
        let mut socket = Socket::new(NETLINK_NETFILTER).unwrap();
        socket.bind_auto().unwrap();
        let collector = Collector { socket };
        const BIND: u8 = 1;
        collector.configure(&attribute(1, &[BIND]));
        // The first bytes of each packet; and each at once, not in hundreds.
        const COPY: u8 = 2;
        collector.configure(&attribute(2, &[0, 0, 0, 128, COPY, 0]));
        collector.configure(&attribute(5, &1u32.to_be_bytes()));
        collector.socket.set_non_blocking(true).unwrap();
        collector
    }

    fn configure(&self, attributes: &[u8]) {
        const REQUEST_ACK: u16 = 1 | 4;
        let group = LogSettings::default().nflog_group;
        let mut bytes = (20 + attributes.len() as u32).to_ne_bytes().to_vec();
        bytes.extend(CONFIGURE.to_ne_bytes());
        bytes.extend(REQUEST_ACK.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend([0, 0]);
        bytes.extend(group.to_be_bytes());
        bytes.extend(attributes);
        self.socket.send(&bytes, 0).unwrap();
        let (answer, _) = self.socket.recv_from_full().unwrap();
        assert_eq!(answer[16..20], [0; 4], "nflog refused {attributes:02x?}");
    }

    /// The prefixes of everything logged since the last look. A log is written before the packet's fate is known to its sender.
    fn prefixes(&self) -> Vec<String> {
        let mut found = Vec::new();
        while let Ok((bytes, _)) = self.socket.recv_from_full() {
            let mut rest = &bytes[..];
            while rest.len() >= 20 {
                let length = u32::from_ne_bytes(*rest.first_chunk().unwrap()) as usize;
                if u16::from_ne_bytes([rest[4], rest[5]]) == PACKET {
                    found.extend(prefix(&rest[20..length]));
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
        found
    }
}

fn prefix(mut attributes: &[u8]) -> Option<String> {
    const PREFIX: u16 = 10;
    while attributes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
        let kind = u16::from_ne_bytes([attributes[2], attributes[3]]);
        let data = attributes.get(4..length)?;
        if kind == PREFIX {
            return Some(String::from_utf8_lossy(data).trim_end_matches('\0').to_owned());
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}

fn says(action: char, line: &str) -> String {
    format!("gc {action} g0/{:016x} ", parse_rule(line).unwrap().key().0)
}

/// A refusal says by which group and rule, or that none allowed it; an allow that asks says so once for a new flow.
#[test]
fn logs_name_group_and_rule() {
    isolated(|| {
        let (deny, deny_in) = ("deny egress udp 5001 to any", "deny ingress udp 5001 from any");
        let (logged, quiet) = ("egress udp 5002 to any log", "egress udp 5003 to any");
        let logged_in = "ingress tcp 5004 from any log";
        let lines = [deny, deny_in, logged, quiet, logged_in];
        let mut story = Story::begin(trial::attachments(), &[rules(&lines), place(0)]);
        let collector = Collector::new();
        for family in FAMILIES {
            let rows = [
                (0, OUTSIDE, UDP, 5001, false, vec![says('d', deny)]),
                (OUTSIDE, 0, UDP, 5001, false, vec![says('d', deny_in)]),
                (0, OUTSIDE, UDP, 5002, true, vec![says('a', logged)]),
                (0, OUTSIDE, UDP, 5003, true, vec![]),
                (OUTSIDE, 0, TCP, 5004, true, vec![says('a', logged_in)]),
                (0, OUTSIDE, UDP, 5005, false, vec!["gc d - ".into()]),
                (OUTSIDE, 0, TCP, 5005, false, vec!["gc d - ".into()]),
            ];
            for (from, to, protocol, port, passes, prefixes) in rows {
                let words = format!("{family:?} {from} to {to}, port {port}");
                let flow = story.flow(from, to, family, protocol, port);
                collector.prefixes();
                assert_eq!(story.passes(from, to, &flow), passes, "{words}");
                assert_eq!(collector.prefixes(), prefixes, "{words}");
                if passes {
                    // Answered, it is established, and nothing of it is logged again; nor after a new stamp, when it is judged again.
                    assert!(story.passes(to, from, &flow.answer()) && story.passes(from, to, &flow.later()), "{words}");
                    story.write(&[rules(&[&lines[..], &["deny egress udp 6000 to any"]].concat())]);
                    assert!(story.passes(from, to, &flow.later()), "{words}");
                    assert_eq!(collector.prefixes(), [""; 0], "{words}, later");
                    story.write(&[rules(&lines)]);
                }
            }
        }
    });
}

/// Audit: the verdict is logged and the packet passes, whether nothing allowed it or something denied it (E 23); enforced again, it stops.
#[test]
fn e23_audit_logs_and_lets_pass() {
    isolated(|| {
        let deny = "deny egress udp 5001 to any";
        let mut story = Story::begin(trial::attachments(), &[rules(&[deny]), place(0), place(1)]);
        let collector = Collector::new();
        let attached = |audit| Attached { attachment: Attachment::Interface(trial::interface(0)), audit };
        let explicit = story.udp(0, OUTSIDE, 5001);
        let unmentioned = story.udp(0, OUTSIDE, 5002);
        let other = story.udp(1, OUTSIDE, 5001);
        for (by_host, audit) in [(false, true), (false, false), (true, true), (false, false)] {
            if by_host {
                story.set(Settings { mode: Mode::Audit, ..settings() });
            } else {
                story.set(settings());
                let plan = story.engine.attach(&trial::workload_id(0), Some(attached(audit)), &story.stage);
                groupcast_enforce::enforcer::Enforcer::commit(&mut story.kernel, &plan.transaction).unwrap();
                story.engine.committed(plan);
            }
            collector.prefixes();
            let words = format!("audit {audit}, of the host {by_host}");
            assert_eq!(story.passes(0, OUTSIDE, &explicit), audit, "{words}: an explicit deny");
            assert_eq!(collector.prefixes(), [says('d', deny)], "{words}");
            assert_eq!(story.passes(0, OUTSIDE, &unmentioned), audit, "{words}: what nothing allows");
            assert_eq!(collector.prefixes(), ["gc d - "], "{words}");
            assert_eq!(story.passes(1, OUTSIDE, &other), by_host, "{words}: the other workload");
        }
    });
}

/// At most so many a second for each workload and reason: one that floods does not take the others' share, and nothing passes for it.
#[test]
fn logs_are_limited_for_each_workload() {
    isolated(|| {
        let mut story = Story::begin(trial::attachments(), &[rules(&["deny egress udp 5001 to any"]), place(0), place(1)]);
        let LogSettings { per_second, burst, .. } = LogSettings::default();
        let collector = Collector::new();
        let start = Instant::now();
        const FLOOD: usize = 400;
        for _ in 0..FLOOD {
            let packet = story.udp(0, OUTSIDE, 5001);
            assert!(!story.passes(0, OUTSIDE, &packet));
        }
        let logged = collector.prefixes().len();
        let at_most = burst as f64 + 1.0 + f64::from(per_second) * (start.elapsed() + Duration::from_millis(50)).as_secs_f64();
        assert!(logged >= burst as usize && logged as f64 <= at_most, "{logged} logs of {FLOOD}, at most {at_most}");
        // The other workload, and another reason, have a budget of their own.
        for (from, port) in [(1, 5001), (0, 5002)] {
            let packet = story.flow(from, OUTSIDE, Family::V6, UDP, port);
            assert!(!story.passes(from, OUTSIDE, &packet));
            assert_eq!(collector.prefixes().len(), 1, "{from} to port {port}");
        }
    });
}
