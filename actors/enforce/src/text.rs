//! A table as `nft` text: for the dry run, and for `nft -c` as a witness in tests.
//!
//! Three things cannot be said in nft text. The host itself, found by the empty interface name, is named in a comment only. The others
//! are written as what means the same. A dispatch in two steps becomes one verdict map with
//! the composed verdicts. A test of the connection's tuple needs a transport protocol named before it: the set of all that have one
//! is written there, which the kernel is never given.

use std::fmt::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::Name;
use crate::expression::{Field, STATE_ESTABLISHED, STATE_INVALID, STATE_NEW, STATE_RELATED, STATE_UNTRACKED};
use crate::expression::{Statement, Test, Value, Verdict};
use crate::interface::{Claim, Interface};
use crate::names::is_of_bridge;
use crate::table::{Base, Data, Elements, Hook, Key, SEEN_MAX, SEEN_SECONDS, Set, SetKind, Table};

/// Every protocol whose connections have ports or ICMP types.
const TUPLE_PROTOCOLS: &str = "meta l4proto { 1, 6, 17, 33, 58, 132, 136 } ";

/// Prints a table that replaces one of the same name.
pub struct Script<'t> {
    pub name: &'t str,
    pub table: &'t Table,
}

impl fmt::Display for Script<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.family(f, "inet", |name| !is_of_bridge(name))?;
        let mut names = self.table.chains.keys().chain(self.table.sets.keys());
        if names.any(|name| is_of_bridge(name)) {
            self.family(f, "bridge", is_of_bridge)?;
        }
        Ok(())
    }
}

impl Script<'_> {
    /// One of the tables: those of both families have one name.
    fn family(&self, f: &mut fmt::Formatter<'_>, family: &str, has: impl Fn(&str) -> bool + Copy) -> fmt::Result {
        let Self { name, table } = self;
        writeln!(f, "table {family} {name}\ndelete table {family} {name}\ntable {family} {name} {{")?;
        // A map names chains in its elements, so chains come first, and their rules name sets: declarations before contents.
        let chains = || table.chains.iter().filter(move |(name, _)| has(name));
        for chain in chains().filter(|(_, chain)| chain.base.is_none()).map(|(name, _)| name) {
            writeln!(f, "\tchain {chain} {{ }}")?;
        }
        for (name, set) in table.sets.iter().filter(|(name, _)| has(name)) {
            write_set(f, table, name, set)?;
        }
        for (name, chain) in chains() {
            writeln!(f, "\tchain {name} {{")?;
            if let Some(Base { hook, priority }) = chain.base {
                writeln!(f, "\t\ttype filter hook {} priority {priority}; policy accept;", hook_name(hook))?;
            }
            for rule in &chain.rules {
                writeln!(f, "\t\t{}", rule_text(rule))?;
            }
            writeln!(f, "\t}}")?;
        }
        writeln!(f, "}}")
    }
}

fn hook_name(hook: Hook) -> &'static str {
    match hook {
        Hook::Prerouting => "prerouting",
        Hook::Input => "input",
        Hook::Forward => "forward",
        Hook::Output => "output",
        Hook::PortIn => "prerouting",
        Hook::PortOut => "postrouting",
    }
}

fn set_type(kind: SetKind) -> &'static str {
    match kind {
        SetKind::V4 => "type ipv4_addr;",
        SetKind::V6 => "type ipv6_addr;",
        SetKind::Spans4 => "type ipv4_addr; flags interval;",
        SetKind::Spans6 => "type ipv6_addr; flags interval;",
        SetKind::Ports => "type inet_service; flags interval;",
        SetKind::Claims => "type ifname; flags interval;",
        SetKind::Interfaces => "type ifname;",
        SetKind::Indexes => "type iface_index;",
        SetKind::InterfaceV4 => "type ifname . ipv4_addr;",
        SetKind::InterfaceV6 => "type ifname . ipv6_addr;",
        SetKind::SameV4 => "type ipv4_addr . ipv4_addr;",
        SetKind::SameV6 => "type ipv6_addr . ipv6_addr;",
        SetKind::InterfaceSpan4 => "type ifname . ipv4_addr; flags interval;",
        SetKind::InterfaceSpan6 => "type ifname . ipv6_addr; flags interval;",
        SetKind::InterfaceToNumber => "type ifname : verdict;",
        SetKind::InterfaceV4ToNumber => "type ifname . ipv4_addr : verdict;",
        SetKind::InterfaceV6ToNumber => "type ifname . ipv6_addr : verdict;",
        SetKind::NumberToVerdict | SetKind::MarkToVerdict => "type mark : verdict;",
        SetKind::Seen => "type ifname . mark; flags dynamic,timeout;",
    }
}

fn write_set(f: &mut fmt::Formatter<'_>, table: &Table, name: &Name, set: &Set) -> fmt::Result {
    let word = match set.kind {
        SetKind::InterfaceToNumber | SetKind::InterfaceV4ToNumber | SetKind::InterfaceV6ToNumber => "map",
        kind if kind.has_verdicts() => "map",
        _ => "set",
    };
    write!(f, "\t{word} {name} {{ {}", set_type(set.kind))?;
    if set.kind == SetKind::Seen {
        write!(f, " size {SEEN_MAX}; timeout {SEEN_SECONDS}s;")?;
    } else {
        let numbers = verdicts_of_numbers(table, name);
        let mut separator = " elements = { ";
        for element in element_texts(set.kind, &set.elements, &numbers) {
            write!(f, "{separator}{element}")?;
            separator = ", ";
        }
        if separator == ", " {
            f.write_str(" };")?;
        }
    }
    if matches!(&set.elements, Elements::Keyed(map) if map.keys().any(is_host)) {
        write!(f, " # and what is behind no interface: the host itself")?;
    }
    writeln!(f, "\n\t}}")
}

/// The verdict map into which the numbers of this map lead.
fn verdicts_of_numbers<'t>(table: &'t Table, name: &Name) -> Option<&'t Elements> {
    let statements = table.chains.values().flat_map(|chain| chain.rules.iter().flatten());
    let verdicts = statements.filter_map(|statement| match statement {
        Statement::Dispatch { numbers, verdicts, .. } if numbers == name => Some(verdicts),
        _ => None,
    });
    verdicts.filter_map(|verdicts| table.sets.get(verdicts)).map(|set| &set.elements).next()
}

fn element_texts<'e>(
    kind: SetKind,
    elements: &'e Elements,
    numbers: &'e Option<&'e Elements>,
) -> Box<dyn Iterator<Item = String> + 'e> {
    let span = |first: String, last: String| if first == last { first } else { format!("{first}-{last}") };
    match elements {
        Elements::V4(set) => Box::new(set.iter().map(|a| Ipv4Addr::from_bits(a).to_string())),
        Elements::V6(set) => Box::new(set.iter().map(|a| Ipv6Addr::from_bits(*a).to_string())),
        Elements::Spans4(set) => Box::new(set.iter().map(move |s| span(v4(u128::from(s.first())), v4(u128::from(s.last()))))),
        Elements::Spans6(set) => Box::new(set.iter().map(move |s| span(v6(s.first()), v6(s.last())))),
        Elements::Ports(set) => Box::new(set.iter().map(move |s| span(s.first().to_string(), s.last().to_string()))),
        Elements::Keyed(map) => Box::new(map.iter().filter(|(key, _)| !is_host(key)).filter_map(move |(key, data)| {
            let key = match key {
                Key::Number(index) if kind == SetKind::Indexes => index.to_string(),
                key => key_text(key),
            };
            match data {
                Data::Nothing => Some(key),
                Data::Verdict(verdict) => Some(format!("{key} : {}", verdict_text(verdict))),
                // A number that leads nowhere decides nothing, and neither does a missing element.
                Data::Number(number) => match numbers {
                    Some(Elements::Keyed(verdicts)) => match verdicts.get(&Key::Number(*number)) {
                        Some(Data::Verdict(verdict)) => Some(format!("{key} : {}", verdict_text(verdict))),
                        _ => None,
                    },
                    _ => None,
                },
            }
        })),
    }
}

/// The empty interface name, which is how the machine itself is found, cannot be said in text.
fn is_host(key: &Key) -> bool {
    match key {
        Key::Interface(interface) | Key::InterfaceSpan4(interface, _) | Key::InterfaceSpan6(interface, _) => {
            *interface == Interface::NONE
        }
        _ => *key == Key::Claim(Claim::HOST),
    }
}

fn v4(number: u128) -> String {
    Ipv4Addr::from_bits(u32::try_from(number).unwrap_or_default()).to_string()
}

fn v6(number: u128) -> String {
    Ipv6Addr::from_bits(number).to_string()
}

fn key_text(key: &Key) -> String {
    match key {
        Key::Claim(claim) => format!("\"{claim}\""),
        Key::Interface(name) => format!("\"{name}\""),
        Key::InterfaceV4(name, address) => format!("\"{name}\" . {}", v4(u128::from(*address))),
        Key::InterfaceV6(name, address) => format!("\"{name}\" . {}", v6(*address)),
        Key::SameV4(address) => format!("{0} . {0}", v4(u128::from(*address))),
        Key::SameV6(address) => format!("{0} . {0}", v6(*address)),
        Key::InterfaceSpan4(name, span) => format!("\"{name}\" . {}-{}", v4(span.first().into()), v4(span.last().into())),
        Key::InterfaceSpan6(name, span) => format!("\"{name}\" . {}-{}", v6(span.first()), v6(span.last())),
        Key::Number(number) => format!("{number:#x}"),
    }
}

fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".into(),
        Verdict::Drop => "drop".into(),
        Verdict::Return => "return".into(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

/// One rule as a line.
pub fn rule_text(rule: &[Statement]) -> String {
    let mut line = String::new();
    let mut has_protocols = false;
    for statement in rule {
        if !line.is_empty() {
            line.push(' ');
        }
        if !has_protocols && needs_protocols(statement) {
            line.push_str(TUPLE_PROTOCOLS);
            has_protocols = true;
        }
        // Writing to a String does not fail.
        let _ = write_statement(&mut line, statement);
    }
    line
}

fn needs_protocols(statement: &Statement) -> bool {
    let tuple = |field: &Field| matches!(field, Field::CtDestinationPort | Field::CtIcmp);
    matches!(statement, Statement::Match { fields, .. } if fields.iter().any(tuple))
}

fn field_text(field: Field) -> &'static str {
    match field {
        Field::Family => "meta nfproto",
        Field::VersionAndLength => "@nh,0,8",
        Field::Protocol => "meta l4proto",
        Field::InInterface => "iifname",
        Field::OutInterface => "oifname",
        Field::InIndex => "iif",
        Field::OutIndex => "oif",
        Field::CtState => "ct state",
        Field::CtDirection => "ct direction",
        Field::CtMark => "ct mark",
        Field::CtProtocol => "ct original protocol",
        Field::CtSource4 => "ct original ip saddr",
        Field::CtSource6 => "ct original ip6 saddr",
        Field::CtDestination4 => "ct reply ip saddr",
        Field::CtDestination6 => "ct reply ip6 saddr",
        Field::CtDestinationPort => "ct reply proto-src",
        Field::CtIcmp => "ct original proto-dst",
        Field::Source4 => "ip saddr",
        Field::Source6 => "ip6 saddr",
        Field::Destination4 => "ip daddr",
        Field::Destination6 => "ip6 daddr",
        Field::SourcePort => "th sport",
        Field::DestinationPort => "th dport",
        Field::Icmp => "@th,0,16",
        Field::TcpFlags => "tcp flags",
    }
}

fn number_text(field: Field, number: u128) -> String {
    match field {
        Field::Source4 | Field::Destination4 | Field::CtSource4 | Field::CtDestination4 => v4(number),
        Field::Source6 | Field::Destination6 | Field::CtSource6 | Field::CtDestination6 => v6(number),
        Field::CtDirection => if number == 0 { "original" } else { "reply" }.into(),
        Field::Family if number == 2 => "ipv4".into(),
        Field::Family if number == 10 => "ipv6".into(),
        Field::CtMark | Field::CtIcmp | Field::Icmp | Field::VersionAndLength => format!("{number:#x}"),
        _ => number.to_string(),
    }
}

fn value_text(field: Field, value: &Value) -> String {
    match value {
        Value::Number(number) => number_text(field, *number),
        Value::Interface(name) => format!("\"{name}\""),
    }
}

fn states_text(bits: u32) -> String {
    let names = [
        (STATE_NEW, "new"),
        (STATE_ESTABLISHED, "established"),
        (STATE_RELATED, "related"),
        (STATE_INVALID, "invalid"),
        (STATE_UNTRACKED, "untracked"),
    ];
    let named: Vec<&str> = names.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect();
    named.join(",")
}

fn fields_text(fields: &[Field]) -> String {
    fields.iter().map(|field| field_text(*field)).collect::<Vec<_>>().join(" . ")
}

fn write_statement(line: &mut String, statement: &Statement) -> fmt::Result {
    match statement {
        Statement::Match { fields, test } => {
            let left = fields_text(fields);
            let field = fields.first().copied().unwrap_or(Field::Family);
            match test {
                Test::Is(value) => write!(line, "{left} {}", value_text(field, value)),
                Test::IsNot(Value::Number(bits)) if field == Field::CtState => {
                    write!(line, "{left} != {}", states_text(u32::try_from(*bits).unwrap_or_default()))
                }
                Test::IsNot(value) => write!(line, "{left} != {}", value_text(field, value)),
                Test::Within(first, last) => write!(line, "{left} {}-{}", number_text(field, *first), number_text(field, *last)),
                Test::MaskedNot { mask, is_not: 0 } if field == Field::CtState => write!(line, "{left} {}", states_text(*mask)),
                Test::Masked { mask, is } if field.is_v4() => {
                    write!(line, "{left} {}/{}", number_text(field, (*is).into()), mask.leading_ones())
                }
                Test::Masked { mask, is } => write!(line, "{left} & {mask:#x} == {is:#x}"),
                Test::MaskedNot { mask, is_not } => write!(line, "{left} & {mask:#x} != {is_not:#x}"),
                Test::In(set) => write!(line, "{left} @{set}"),
                Test::NotIn(set) => write!(line, "{left} != @{set}"),
            }
        }
        Statement::VerdictOf { fields, mask: None, map } => write!(line, "{} vmap @{map}", fields_text(fields)),
        Statement::VerdictOf { fields, mask: Some(mask), map } => write!(line, "{} & {mask:#x} vmap @{map}", fields_text(fields)),
        Statement::Dispatch { fields, numbers, .. } => write!(line, "{} vmap @{numbers}", fields_text(fields)),
        Statement::SetMark { keep, set } => write!(line, "ct mark set ct mark & {keep:#x} | {set:#x}"),
        Statement::Limit { seen, interface, number, per_second, burst } => write!(
            line,
            "update @{seen} {{ {} . {number:#x} limit rate {per_second}/second burst {burst} packets }}",
            field_text(*interface)
        ),
        Statement::Log { prefix, group, snap_bytes } => {
            write!(line, "log prefix \"{prefix}\" group {group} snaplen {snap_bytes}")
        }
        Statement::Counter => line.write_str("counter"),
        Statement::Verdict(verdict) => line.write_str(&verdict_text(verdict)),
    }
}

#[cfg(test)]
pub(crate) mod tests;
