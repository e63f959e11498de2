//! Groups: a chain of denies and one of allows per direction, and the sets their rules look into.

use std::collections::BTreeMap;

use groupcast_policy::doc::{Members, Rules};
use groupcast_policy::ids::GroupId;
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{AddressSet, Family, PortSet, Prefix, Span, SpanSet, Successor};
use groupcast_policy::normal::Families;
use groupcast_policy::packet::{DCCP, ICMP, ICMPV6, TCP, UDP};
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::Topic;
use xxhash_rust::xxh3::xxh3_64;

use super::profiles::{Used, rules_of};
use super::{Contents, Desired, DesiredSet};
use crate::Name;
use crate::expression::{FAMILY_V4, FAMILY_V6, Field, STATE_NEW, Statement, Test, Verdict};
use crate::names::{self, View};
use crate::settings::{LOG_SNAP_BYTES, Settings};
use crate::table::{self, Elements, SetKind};

/// Up to this many ranges of addresses a rule is written out; a set has a price of its own.
const INLINE_SPANS_MAX: usize = 4;

/// Protocols whose ports every kernel tracks.
const TRACKED: [u8; 2] = [TCP, UDP];

/// What a group's rules make: chains, the sets named by their content, and whose members they look up, in which families.
#[derive(Debug, Default)]
pub struct Written {
    pub chains: BTreeMap<Name, Vec<table::Rule>>,
    pub sets: BTreeMap<Name, (SetKind, Elements)>,
    /// Also those whose members are not known.
    pub remotes: BTreeMap<GroupId, Families>,
}

pub fn write<'d>(desired: &mut Desired<'d>, documents: &'d impl Documents, settings: &Settings, used: &Used) {
    let mut remotes: BTreeMap<GroupId, Families> = BTreeMap::new();
    for (view, group) in used {
        let Some(rules) = rules_of(documents, group) else { continue };
        let written = group_chains(*view, group, rules, documents, settings);
        written.chains.into_iter().for_each(|(name, rules)| desired.put_chain(name, rules));
        written.sets.into_iter().for_each(|(name, (kind, elements))| desired.put_set(name, kind, elements));
        for (remote, families) in written.remotes {
            let named = remotes.entry(remote).or_default();
            *named = named.union(families);
        }
    }
    for (group, families) in remotes {
        let Some(members) = members_of(documents, &group) else { continue };
        for family in families.iter() {
            desired.sets.extend(member_sets(&group, members, family));
        }
    }
}

/// A group's members; `None`: not synced, or none are known.
pub fn members_of<'d>(documents: &'d impl Documents, group: &GroupId) -> Option<&'d Members> {
    documents.document(&Topic::Members(group.clone()))?.members()
}

pub fn group_chains(view: View, group: &GroupId, rules: &Rules, documents: &impl Documents, settings: &Settings) -> Written {
    let mut writer = Writer { written: Written::default(), documents, settings };
    for rule in rules.rules.values() {
        for view in view.written() {
            let lines = writer.rule(*view, group, rule);
            writer.written.chains.entry(names::group(*view, rule.action, rule.direction, group)).or_default().extend(lines);
        }
    }
    writer.written
}

struct Writer<'w, D> {
    written: Written,
    documents: &'w D,
    settings: &'w Settings,
}

impl<'w, D: Documents> Writer<'w, D> {
    /// The lines that together say what the rule says.
    fn rule(&mut self, view: View, group: &GroupId, rule: &Rule) -> Vec<table::Rule> {
        let matches = self.matches(view, rule);
        let direction = rule.direction;
        let key = rule.key();
        if rule.action == Action::Deny {
            let chain = names::refusal(view, direction, group, key);
            let mut log = log(self.settings, direction, &chain, format!("gc d {group}/{:016x} ", key.0));
            log.push(vec![Statement::Counter, Statement::goto(&names::deny(view, direction))]);
            self.written.chains.insert(chain.clone(), log);
            return matches.into_iter().map(|line| with(line, [Statement::goto(&chain)])).collect();
        }
        let accept = match view {
            View::Connection | View::Onward => Statement::goto(&names::sided("pass", direction)),
            View::Headers => Statement::Verdict(Verdict::Accept),
        };
        let mut lines = Vec::new();
        for line in matches {
            if rule.log {
                let is_new =
                    Statement::Match { fields: vec![Field::CtState], test: Test::MaskedNot { mask: STATE_NEW, is_not: 0 } };
                let name = names::refusal(view, direction, group, key);
                let log = log(self.settings, direction, &name, format!("gc a {group}/{:016x} ", key.0));
                lines.extend(log.into_iter().map(|log| with(with(line.clone(), [is_new.clone()]), log)));
            }
            lines.push(with(line, [Statement::Counter, accept.clone()]));
        }
        lines
    }

    /// Protocol and port come before the remote: they are the cheaper question.
    fn matches(&mut self, view: View, rule: &Rule) -> Vec<Vec<Statement>> {
        let all_of_it = Traffic::Protocol(DCCP);
        let traffic = match (&rule.traffic, rule.action) {
            // Kernels since 6.16 do not track these ports: to them a rule says nothing about any. It allows nothing, and denies all of
            // the protocol.
            (Traffic::Ports { protocol: DCCP, .. }, Action::Allow) => return Vec::new(),
            (Traffic::Ports { protocol: DCCP, .. }, Action::Deny) => &all_of_it,
            (traffic, _) => traffic,
        };
        let is_icmp = matches!(rule.traffic, Traffic::Icmp { .. });
        let remote = match &rule.remote {
            Remote::Group(group) => {
                let families = self.written.remotes.entry(group.clone()).or_default();
                *families = families.union(rule.families());
                match members_of(self.documents, group) {
                    Some(members) => Tests::Members(group, members),
                    // Who is not known cannot be allowed, and may be whom a deny means.
                    None if rule.action == Action::Allow => return Vec::new(),
                    None => Tests::Any,
                }
            }
            Remote::Any => Tests::Any,
            Remote::Addresses(set) => Tests::Addresses(set),
        };
        if matches!(remote, Tests::Any) && rule.family.is_none() && !is_icmp {
            return vec![self.traffic(view, traffic, Family::V4)];
        }
        let mut lines = Vec::new();
        for family in rule.families().iter() {
            let mut line = self.traffic(view, traffic, family);
            let tests = self.remote_tests(view, rule.direction, family, &remote);
            // The connection's addresses tell its family; nothing else does.
            if view != View::Connection || matches!(remote, Tests::Any) {
                line.push(Statement::is(Field::Family, if family == Family::V4 { FAMILY_V4 } else { FAMILY_V6 }));
            }
            match tests {
                None => lines.push(line),
                Some(tests) => lines.extend(tests.into_iter().map(|test| with(line.clone(), [test]))),
            }
        }
        lines
    }

    fn traffic(&mut self, view: View, traffic: &Traffic, family: Family) -> Vec<Statement> {
        let by_tuple = (Field::CtProtocol, Field::CtDestinationPort, Field::CtIcmp);
        let by_headers = (Field::Protocol, Field::DestinationPort, Field::Icmp);
        let (protocol, port, icmp) = match (view, traffic) {
            (View::Connection, _) => by_tuple,
            (View::Headers, _) => by_headers,
            // Kernels differ in whose ports they track. What they do not track is one connection for all ports, and must not be
            // stamped as judged for having gone to one of them.
            (View::Onward, Traffic::Ports { protocol, .. }) if !TRACKED.contains(protocol) => by_tuple,
            // Of a connection of ICMP, type and code are those of its first packet.
            (View::Onward, Traffic::Icmp { .. }) => by_tuple,
            (View::Onward, _) => by_headers,
        };
        match traffic {
            Traffic::Any => Vec::new(),
            Traffic::Protocol(number) => vec![Statement::is(protocol, *number)],
            // The port is the sharper question. Of a connection it can be asked first; a packet that goes onward has the same one, or
            // none.
            Traffic::Ports { protocol: number, ports } => match (view, Statement::is(protocol, *number), self.ports(port, ports))
            {
                (View::Connection | View::Onward, protocol, ports) => vec![ports, protocol],
                (View::Headers, protocol, ports) => vec![protocol, ports],
            },
            Traffic::Icmp { kind, code } => {
                let number = if family == Family::V4 { ICMP } else { ICMPV6 };
                let mut tests = vec![Statement::is(protocol, number)];
                match (kind, code) {
                    (None, None) => {}
                    (Some(kind), None) => {
                        let first = u16::from(*kind) << 8;
                        tests.push(Statement::within(icmp, first, first | 0xff));
                    }
                    (Some(kind), Some(code)) => tests.push(Statement::is(icmp, u16::from(*kind) << 8 | u16::from(*code))),
                    (None, Some(code)) => {
                        let test = Test::Masked { mask: 0xff, is: u32::from(*code) };
                        tests.push(Statement::Match { fields: vec![icmp], test });
                    }
                }
                tests
            }
        }
    }

    fn ports(&mut self, field: Field, ports: &PortSet) -> Statement {
        match ports.spans() {
            [span] => Statement::within(field, span.first(), span.last()),
            spans => {
                let bytes: Vec<u8> = spans.iter().flat_map(|s| [s.first(), s.last()]).flat_map(u16::to_be_bytes).collect();
                let name = names::ports(&bytes);
                self.written.sets.insert(name.clone(), (SetKind::Ports, Elements::from(ports)));
                Statement::in_set([field], &name)
            }
        }
    }

    /// `None`: no test is needed.
    fn remote_tests(&mut self, view: View, direction: Direction, family: Family, remote: &Tests<'_>) -> Option<Vec<Statement>> {
        let field = match (view, direction, family) {
            (View::Connection, Direction::Ingress, Family::V4) => Field::CtSource4,
            (View::Connection, Direction::Ingress, Family::V6) => Field::CtSource6,
            (View::Connection, Direction::Egress, Family::V4) => Field::CtDestination4,
            (View::Connection, Direction::Egress, Family::V6) => Field::CtDestination6,
            (View::Headers | View::Onward, Direction::Ingress, Family::V4) => Field::Source4,
            (View::Headers | View::Onward, Direction::Ingress, Family::V6) => Field::Source6,
            (View::Headers | View::Onward, Direction::Egress, Family::V4) => Field::Destination4,
            (View::Headers | View::Onward, Direction::Egress, Family::V6) => Field::Destination6,
        };
        match remote {
            Tests::Any => None,
            Tests::Addresses(set) => Some(match family {
                Family::V4 => self.spans(field, family, &set.v4, Elements::from(&set.v4)),
                Family::V6 => self.spans(field, family, &set.v6, Elements::from(&set.v6)),
            }),
            Tests::Members(group, members) => {
                let mut tests = vec![Statement::in_set([field], &names::members(group, family))];
                if has_spans(members, family) {
                    tests.push(Statement::in_set([field], &names::member_spans(group, family)));
                }
                Some(tests)
            }
        }
    }

    fn spans<T: Successor + Into<u128>>(
        &mut self,
        field: Field,
        family: Family,
        set: &SpanSet<T>,
        elements: Elements,
    ) -> Vec<Statement> {
        if set.spans().len() <= INLINE_SPANS_MAX {
            return set.spans().iter().map(|span: &Span<T>| within(field, span.first().into(), span.last().into())).collect();
        }
        let ends = set.spans().iter().flat_map(|span| [span.first().into(), span.last().into()]);
        let bytes: Vec<u8> = ends.flat_map(u128::to_be_bytes).collect();
        let kind = if family == Family::V4 { SetKind::Spans4 } else { SetKind::Spans6 };
        let name = names::addresses(family, &bytes);
        self.written.sets.insert(name.clone(), (kind, elements));
        vec![Statement::in_set([field], &name)]
    }
}

/// A range of addresses. Where it is a prefix of IPv4, its bits are compared, which the kernel does several times faster.
fn within(field: Field, first: u128, last: u128) -> Statement {
    if field.is_v4()
        && first < last
        && let (Ok(low), Ok(high)) = (u32::try_from(first), u32::try_from(last))
        && let mask = !(low ^ high)
        && (!mask).wrapping_add(1) & !mask == 0
        && low & !mask == 0
    {
        return Statement::Match { fields: vec![field], test: Test::Masked { mask, is: low } };
    }
    Statement::within(field, first, last)
}

enum Tests<'t> {
    Any,
    Addresses(&'t AddressSet),
    Members(&'t GroupId, &'t Members),
}

fn with(mut line: Vec<Statement>, more: impl IntoIterator<Item = Statement>) -> Vec<Statement> {
    line.extend(more);
    line
}

/// The rules that log, at most as often per workload as the settings say.
pub fn log(settings: &Settings, direction: Direction, what: &str, prefix: String) -> Vec<table::Rule> {
    let limit = Statement::Limit {
        seen: names::seen(),
        interface: if direction == Direction::Egress { Field::InInterface } else { Field::OutInterface },
        number: xxh3_64(what.as_bytes()) as u32,
        per_second: settings.log.per_second,
        burst: settings.log.burst,
    };
    vec![vec![limit, Statement::Log { prefix, group: settings.log.nflog_group, snap_bytes: LOG_SNAP_BYTES }]]
}

fn prefixes_of(members: &Members, family: Family) -> impl Iterator<Item = Prefix> + '_ {
    members.prefixes.iter().copied().filter(move |prefix| prefix.family() == family)
}

pub fn has_spans(members: &Members, family: Family) -> bool {
    prefixes_of(members, family).next().is_some()
}

/// The kernel refuses ranges that overlap, so a group's prefixes are merged.
pub fn member_spans(members: &Members, family: Family) -> Elements {
    let merged = AddressSet::from_prefixes(prefixes_of(members, family));
    match family {
        Family::V4 => Elements::from(&merged.v4),
        Family::V6 => Elements::from(&merged.v6),
    }
}

/// The sets of a group's members of one family.
pub fn member_sets<'d>(
    group: &GroupId,
    members: &'d Members,
    family: Family,
) -> impl Iterator<Item = (Name, DesiredSet<'d>)> + use<'d> {
    let (kind, contents, spans) = match family {
        Family::V4 => (SetKind::V4, Contents::V4(&members.v4), SetKind::Spans4),
        Family::V6 => (SetKind::V6, Contents::V6(&members.v6), SetKind::Spans6),
    };
    let hosts = (names::members(group, family), DesiredSet { kind, contents });
    let ranges = has_spans(members, family).then(|| {
        let contents = Contents::Owned(member_spans(members, family));
        (names::member_spans(group, family), DesiredSet { kind: spans, contents })
    });
    [Some(hosts), ranges].into_iter().flatten()
}
