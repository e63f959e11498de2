use super::{PROTOCOLS, address_list};
use crate::ids::GroupId;
use crate::net::{Family, PortSet, Span};
use crate::normal::{Impossible, PORT_MIN};
use crate::packet::{ICMP, ICMPV6, has_ports};
use crate::rule::{Action, Direction, Remote, Rule, Traffic};

/// Longest text of one rule in bytes: `REMOTES_MAX` IPv6 ranges, the longest a dialect can make, are half of it.
pub const RULE_TEXT_LEN_MAX: usize = 1024 * 1024;
/// Most items in one list of remotes.
pub const REMOTES_MAX: usize = 6_000;
/// Most items in one list of ports.
pub const PORTS_MAX: usize = 1_000;

/// What is wrong with one field of a rule, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct FieldError {
    pub field: &'static str,
    pub message: String,
}

impl FieldError {
    pub fn new(field: &'static str, message: impl Into<String>) -> Self {
        Self { field, message: message.into() }
    }
}

impl From<Impossible> for FieldError {
    fn from(error: Impossible) -> Self {
        let field = match error {
            Impossible::NoAddress | Impossible::OtherFamily(_) => "remote",
            Impossible::NoPort | Impossible::Portless(_) | Impossible::Untracked => "ports",
            Impossible::Icmpv6InV4 => "protocol",
        };
        Self::new(field, error.to_string())
    }
}

/// What is printed of outside text in an error: enough to find it, never a whole megabyte.
pub(crate) fn shorten(text: &str) -> String {
    const SHOWN_MAX: usize = 64;
    match text.char_indices().nth(SHOWN_MAX) {
        None => text.to_string(),
        Some((cut, _)) => format!("{}…", &text[..cut]),
    }
}

/// A decimal number and nothing else: no sign, no spaces, no leading zero.
fn number(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
    let leading_zero = text.len() > 1 && text.starts_with('0');
    if plain && !leading_zero { text.parse().ok() } else { None }
}

/// A protocol by name or number. Icmp in any spelling is 1 or 58, any is 0.
pub fn protocol_number(text: &str) -> Result<u8, String> {
    if let Some(number) = number(text) {
        return u8::try_from(number).map_err(|_| format!("protocol {number} does not exist: numbers are 0 to 255"));
    }
    match text {
        "any" | "all" => Ok(0),
        "icmp" => Ok(ICMP),
        "icmpv6" | "ipv6-icmp" => Ok(ICMPV6),
        _ => PROTOCOLS.iter().find(|(name, _)| *name == text).map(|(_, n)| *n).ok_or_else(|| {
            format!("protocol {:?} is not known: write any, tcp, udp, icmp or a number from 0 to 255", shorten(text))
        }),
    }
}

/// `443`, `80,443`, `8080-8090`; spaces are allowed around items.
pub fn port_list(text: &str) -> Result<PortSet, Vec<String>> {
    let mut errors = Vec::new();
    let mut spans: Vec<Span<u16>> = Vec::new();
    if text.split(',').nth(PORTS_MAX).is_some() {
        return Err(vec![format!("more than {PORTS_MAX} items: use ranges, or several rules")]);
    }
    for item in text.split(',').map(str::trim) {
        match port_item(item) {
            Ok(span) => spans.push(span),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(spans.into_iter().collect()) } else { Err(errors) }
}

fn port_item(item: &str) -> Result<Span<u16>, String> {
    if item.is_empty() {
        return Err("an item of the list is empty: remove the extra comma".into());
    }
    let port = |text: &str| match number(text.trim()) {
        Some(n) if (u32::from(PORT_MIN)..=u32::from(u16::MAX)).contains(&n) => Ok(n as u16),
        Some(n) => Err(format!("port {n} does not exist: ports are 1 to 65535")),
        None => Err(format!("{:?} is not a port: write a number from 1 to 65535, or a range like 8080-8090", shorten(item))),
    };
    match item.split_once('-') {
        None => Ok(Span::one(port(item)?)),
        Some((first, last)) => {
            let (first, last) = (port(first)?, port(last)?);
            Span::new(first, last).ok_or_else(|| format!("range {first}-{last} is inverted: write {last}-{first}"))
        }
    }
}

/// An ICMP type or code, or `any`.
pub(crate) fn icmp_number(text: &str, what: &str) -> Result<Option<u8>, String> {
    if text == "any" {
        return Ok(None);
    }
    match number(text).map(u8::try_from) {
        Some(Ok(number)) => Ok(Some(number)),
        _ => Err(format!("{:?} is not an icmp {what}: write a number from 0 to 255, or any", shorten(text))),
    }
}

/// Commas glue words together, so that `80, 443` is one list.
fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        match words.last_mut() {
            Some(last) if last.ends_with(',') || word.starts_with(',') => last.push_str(word),
            _ => words.push(word.to_string()),
        }
    }
    words
}

/// Parses one line; all its errors come at once.
pub fn parse_rule(line: &str) -> Result<Rule, Vec<FieldError>> {
    if line.len() > RULE_TEXT_LEN_MAX {
        let message = format!("longer than {RULE_TEXT_LEN_MAX} bytes: split it into several rules");
        return Err(vec![FieldError::new("rule", message)]);
    }
    let words = words(line);
    let mut words = words.iter().map(String::as_str).peekable();
    let mut errors = Vec::new();

    let action = match words.next_if(|w| ["allow", "deny"].contains(w)) {
        Some("deny") => Action::Deny,
        _ => Action::Allow,
    };
    let direction = match words.next_if(|w| ["ingress", "egress"].contains(w)) {
        Some("egress") => Some(Direction::Egress),
        Some(_) => Some(Direction::Ingress),
        None => {
            let found = words.peek().map_or("nothing".to_string(), |w| format!("{:?}", shorten(w)));
            errors.push(FieldError::new("direction", format!("found {found}: write ingress or egress")));
            // A misspelt direction stands before a protocol; a missing one leaves the protocol where it is.
            if words.peek().is_some_and(|w| protocol_number(w).is_err() && !["ipv4", "ipv6", "from", "to"].contains(w)) {
                words.next();
            }
            None
        }
    };
    let mut family = match words.next_if(|w| ["ipv4", "ipv6"].contains(w)) {
        Some("ipv6") => Some(Family::V6),
        Some(_) => Some(Family::V4),
        None => None,
    };
    let protocol = words.next_if(|w| !["from", "to", "log"].contains(w));
    let detail = words.next_if(|w| !["from", "to", "log"].contains(w));
    let traffic = traffic(protocol, detail, &mut family, &mut errors);

    let expected = match direction {
        Some(Direction::Egress) => "to",
        _ => "from",
    };
    let remote = match words.next_if(|w| ["from", "to"].contains(w)) {
        None => {
            errors.push(FieldError::new(
                "remote",
                format!("missing: write {expected} any, {expected} group:ID or {expected} 10.0.0.0/8"),
            ));
            None
        }
        Some(word) => {
            if direction.is_some() && word != expected {
                errors
                    .push(FieldError::new("remote", format!("found {word:?}: ingress is from, egress is to; write {expected}")));
            }
            remote(words.next(), &mut errors)
        }
    };
    let log = words.next_if_eq(&"log").is_some();
    if let Some(extra) = words.next() {
        let message = format!("{:?} is not expected here: a rule ends after its remote, or after log", shorten(extra));
        errors.push(FieldError::new("rule", message));
    }

    match (direction, traffic, remote) {
        (Some(direction), Some(traffic), Some(remote)) if errors.is_empty() => {
            Rule { action, direction, family, traffic, remote, log }.normalised().map_err(|error| vec![error.into()])
        }
        _ => Err(errors),
    }
}

fn traffic(
    protocol: Option<&str>,
    detail: Option<&str>,
    family: &mut Option<Family>,
    errors: &mut Vec<FieldError>,
) -> Option<Traffic> {
    let Some(protocol) = protocol else {
        errors.push(FieldError::new("protocol", "missing: write any, tcp, udp, icmp or a number"));
        return None;
    };
    let number = match protocol_number(protocol) {
        Ok(number) => number,
        Err(error) => {
            errors.push(FieldError::new("protocol", error));
            return None;
        }
    };
    if number == ICMPV6 {
        if *family == Some(Family::V4) {
            errors.push(Impossible::Icmpv6InV4.into());
        }
        *family = Some(Family::V6);
    }
    match detail {
        None | Some("any") => Some(match number {
            ICMP | ICMPV6 => Traffic::Icmp { kind: None, code: None },
            number => Traffic::Protocol(number),
        }),
        Some(detail) if number == ICMP || number == ICMPV6 => {
            let (kind, code) = detail.split_once('/').unwrap_or((detail, "any"));
            match (icmp_number(kind, "type"), icmp_number(code, "code")) {
                (Ok(kind), Ok(code)) => Some(Traffic::Icmp { kind, code }),
                (kind, code) => {
                    errors.extend([kind.err(), code.err()].into_iter().flatten().map(|e| FieldError::new("icmp", e)));
                    None
                }
            }
        }
        Some(detail) if has_ports(number) => match port_list(detail) {
            Ok(ports) => Some(Traffic::Ports { protocol: number, ports }),
            Err(list) => {
                errors.extend(list.into_iter().map(|e| FieldError::new("ports", e)));
                None
            }
        },
        Some(_) => {
            errors.push(FieldError::new("ports", format!("protocol {protocol} has no ports: leave them out")));
            None
        }
    }
}

fn remote(word: Option<&str>, errors: &mut Vec<FieldError>) -> Option<Remote> {
    let Some(word) = word else {
        errors.push(FieldError::new("remote", "missing: write any, group:ID, or addresses"));
        return None;
    };
    if word == "any" {
        return Some(Remote::Any);
    }
    if let Some(id) = word.strip_prefix("group:") {
        return match GroupId::new(id) {
            Ok(id) => Some(Remote::Group(id)),
            Err(error) => {
                errors.push(FieldError::new("remote", error.to_string()));
                None
            }
        };
    }
    if word.split(',').nth(REMOTES_MAX).is_some() {
        let message = format!("more than {REMOTES_MAX} items: use prefixes, a group with static members, or several rules");
        errors.push(FieldError::new("remote", message));
        return None;
    }
    match address_list(word.split(',')) {
        Ok(set) => Some(Remote::Addresses(set)),
        Err(list) => {
            errors.extend(list.into_iter().map(|e| FieldError::new("remote", e)));
            None
        }
    }
}
