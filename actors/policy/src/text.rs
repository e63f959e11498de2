//! The one-line text form of a rule:
//!
//! ```text
//! [allow|deny] ingress|egress [ipv4|ipv6] PROTOCOL [PORTS|TYPE/CODE] from|to REMOTE [log]
//!
//! ingress tcp 443,8000-8999 from group:web log
//! deny egress any to 169.254.169.254/32
//! egress ipv6 icmp 128/any to any
//! ```
//!
//! `allow` is the default. A protocol is `any`, a name or a number. A remote is `any`, `group:ID`, or a list of addresses,
//! prefixes and ranges. What is printed parses back to the same rule.

mod addresses;
mod parse;
mod print;

pub use addresses::{address_list, address_text, prefix_list, prefix_text, strict_prefix_text};
pub use parse::{FieldError, PORTS_MAX, REMOTES_MAX, RULE_TEXT_LEN_MAX, parse_rule, port_list, protocol_number};
pub(crate) use parse::{icmp_number, shorten};

/// Names as Neutron and IANA have them. The first name of a number is the one printed.
const PROTOCOLS: &[(&str, u8)] = &[
    ("igmp", 2),
    ("ipip", 4),
    ("ipencap", 4),
    ("tcp", 6),
    ("egp", 8),
    ("udp", 17),
    ("dccp", 33),
    ("ipv6-encap", 41),
    ("ipv6-route", 43),
    ("ipv6-frag", 44),
    ("rsvp", 46),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
    ("ipv6-nonxt", 59),
    ("ipv6-opts", 60),
    ("ospf", 89),
    ("vrrp", 112),
    ("pgm", 113),
    ("sctp", 132),
    ("udplite", 136),
];

pub fn protocol_name(number: u8) -> Option<&'static str> {
    PROTOCOLS.iter().find(|(_, n)| *n == number).map(|(name, _)| *name)
}

/// Whether a character makes a terminal or a reader show something else than what is written: control characters, escapes among them,
/// marks that turn the direction of the text around them, and separators of lines that are none.
pub fn is_deceptive(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}')
}

/// As a terminal may have it: what would do or show something else than it says is spelled out. Names come from others.
pub fn shown(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => safe.push(c),
            c if is_deceptive(c) => safe.extend(c.escape_unicode()),
            c => safe.push(c),
        }
    }
    safe
}

/// JSON that means the same, with what a terminal must not get as escapes of JSON: it stands in strings only. Blanks between values are
/// no strings, and stay.
pub fn shown_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\n' => safe.push(c),
            // All of them are in the first plane, which one such escape can name.
            c if is_deceptive(c) => safe.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests;
