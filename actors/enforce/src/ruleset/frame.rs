//! What does not depend on any workload: where packets come in, the judges, the stamp, refusal, anti-spoofing, infrastructure.

mod bound;

use groupcast_policy::net::Family;
use groupcast_policy::packet::{ICMPV6, TCP, UDP};
use groupcast_policy::rule::Direction;

use bound::{bound, past_the_fast_path, related};

use super::Desired;
use super::groups::log;
use super::workloads::Keys;
use crate::Name;
use crate::expression::{
    FAMILY_V4, FAMILY_V6, Field, ORIGINAL, PLAIN_V4, REPLY, STATE_NEW, STATE_RELATED, STATE_UNTRACKED, Statement, TCP_ACK,
    TCP_FIN, TCP_RST, TCP_SYN, Test, Value, Verdict,
};
use crate::interface::{Claim, Interface, disjoint};
use crate::names::{self, Keyed, View};
use crate::settings::{Mode, Settings, Stamp};
use crate::table::{Base, Chain, Data, Elements, Hook, Key, Rule, SetKind};

/// Judges out before in; both after address translation and before nothing of ours.
const PRIORITY_OUT: i32 = -10;
const PRIORITY_IN: i32 = 0;
/// Before connection tracking (-200): a spoofed packet must not touch another workload's connection.
const PRIORITY_SPOOF: i32 = -310;
/// Before anybody translates addresses there (-300).
const PRIORITY_PORTS: i32 = -310;

const NEIGHBOUR_SOLICIT: u8 = 135;
const NEIGHBOUR_ADVERT: u8 = 136;
const ROUTER_SOLICIT: u8 = 133;
const ROUTER_ADVERT: u8 = 134;
const LISTENER_QUERY: u8 = 130;
const LISTENER_REPORT: u8 = 131;
const LISTENER_REPORT_2: u8 = 143;

const DHCP_SERVER: u16 = 67;
const DHCP_CLIENT: u16 = 68;
const DHCP6_CLIENT: u16 = 546;
const DHCP6_SERVER: u16 = 547;

const LINK_LOCAL_FIRST: u128 = 0xfe80 << 112;
const LINK_LOCAL_LAST: u128 = 0xfec0 << 112;

const SIDES: [Direction; 2] = [Direction::Egress, Direction::Ingress];

fn accept() -> Statement {
    Statement::Verdict(Verdict::Accept)
}

fn drop() -> [Statement; 2] {
    [Statement::Counter, Statement::Verdict(Verdict::Drop)]
}

fn test(field: Field, test: Test) -> Statement {
    Statement::Match { fields: vec![field], test }
}

fn state(bits: u32) -> Statement {
    test(Field::CtState, Test::MaskedNot { mask: bits, is_not: 0 })
}

fn direction(number: u8) -> Statement {
    Statement::is(Field::CtDirection, number)
}

/// An error about a packet of the connection, or the first packet of one that it brought about.
fn is_related() -> Statement {
    state(STATE_RELATED)
}

/// The state of a packet is one bit, so the whole is compared: cheaper than one bit of it.
fn is_not_related() -> Statement {
    test(Field::CtState, Test::IsNot(STATE_RELATED.into()))
}

fn claimed(field: Field) -> Statement {
    Statement::in_set([field], &names::claims())
}

fn unclaimed(field: Field) -> Statement {
    test(field, Test::NotIn(names::claims()))
}

fn index_of(interface: Field) -> Field {
    if interface == Field::InInterface { Field::InIndex } else { Field::OutIndex }
}

/// Claimed by the name that it has or had.
fn held(interface: Field) -> Statement {
    Statement::in_set([index_of(interface)], &names::held())
}

fn not_held(interface: Field) -> Statement {
    not_in([index_of(interface)], names::held())
}

/// What comes in or goes out by a port of a bridge is not seen as that interface's by any hook of the inet family, and between two ports
/// not at all: a claimed one is closed there.
fn ports(desired: &mut Desired<'_>, settings: &Settings) {
    if !settings.closes_ports {
        return;
    }
    let claims = disjoint(settings.claims.iter().copied()).into_iter().map(|claim| (Key::Claim(claim), Data::Nothing));
    desired.put_set(names::port_claims(), SetKind::Claims, Elements::Keyed(claims.collect()));
    let hooks = [(names::port_in(), Hook::PortIn, Field::InInterface), (names::port_out(), Hook::PortOut, Field::OutInterface)];
    for (name, hook, end) in hooks {
        let closed = line([vec![Statement::in_set([end], &names::port_claims())], drop().into()]);
        let rules = if settings.mode == Mode::Bypass { Vec::new() } else { vec![closed] };
        desired.chains.insert(name, Chain { base: Some(Base { hook, priority: PRIORITY_PORTS }), rules });
    }
}

/// ICMPv6 of the types from `first` to `last`.
fn icmpv6(first: u8, last: u8) -> Vec<Statement> {
    let types = Statement::within(Field::Icmp, u16::from(first) << 8, u16::from(last) << 8 | 0xff);
    vec![Statement::is(Field::Family, FAMILY_V6), Statement::is(Field::Protocol, ICMPV6), types]
}

/// The source port first: every packet of a workload is asked, and hardly any has it.
fn udp(source: u16, destination: u16) -> Vec<Statement> {
    vec![
        Statement::is(Field::SourcePort, source),
        Statement::is(Field::DestinationPort, destination),
        Statement::is(Field::Protocol, UDP),
    ]
}

fn line(parts: impl IntoIterator<Item = Vec<Statement>>) -> Rule {
    parts.into_iter().flatten().collect()
}

/// The interface that the packet of a flow in original direction has on the side of the judge's workload, and that of a reply.
fn interfaces(side: Direction) -> (Field, Field) {
    match side {
        Direction::Egress => (Field::InInterface, Field::OutInterface),
        Direction::Ingress => (Field::OutInterface, Field::InInterface),
    }
}

pub fn write(desired: &mut Desired<'_>, settings: &Settings, stamp: Stamp, keys: Keys) {
    let mut claims = disjoint(settings.claims.iter().copied());
    if keys.host {
        // The machine itself is what is behind no interface.
        claims.push(Claim::HOST);
    }
    let claims = claims.into_iter().map(|claim| (Key::Claim(claim), Data::Nothing)).collect();
    desired.put_set(names::claims(), SetKind::Claims, Elements::Keyed(claims));
    let held = settings.held.iter().map(|index| (Key::Number(*index), Data::Nothing)).collect();
    desired.put_set(names::held(), SetKind::Indexes, Elements::Keyed(held));
    ports(desired, settings);
    desired.put_set(names::seen(), SetKind::Seen, Elements::of(SetKind::Seen));
    for (name, rules) in stamp_chains(settings, stamp) {
        let side = SIDES.into_iter().find(|side| names::forward(*side) == name);
        let base = side.map(|side| Base { hook: Hook::Forward, priority: priority(side) });
        desired.chains.insert(name, Chain { base, rules });
    }
    for side in SIDES {
        passing(desired, settings, side);
        refusing(desired, settings, keys, side);
        judge(desired, settings, keys, side);
    }
    desired.put_chain("open".into(), vec![vec![accept()]]);
    desired.put_chain(names::audit(), vec![vec![Statement::Counter, accept()]]);
    no_connection(desired, settings, keys);
    infrastructure(desired, settings, keys);
    related(desired, keys);
    bound(desired, keys);
    for side in SIDES {
        bases(desired, settings, keys, side);
    }
    spoof(desired, settings, keys);
}

/// The rules of one stamp in each of the chains that know it. It is compared with and written from immediates, never from a map: rules
/// flip with the transaction, a map's elements may be newer than the rules a packet has started with, and would stamp by the new
/// policy what the old one judged; and a comparison is less than half of a look-up, which every packet would pay twice.
///
/// Nothing goes on behind them: what follows is for stamps to come. A packet that has started with the rules of this stamp may meet a
/// flow that already carries the next one, half judged, and must not complete it.
fn stamp_rules(settings: &Settings, stamp: Stamp) -> [(Name, Vec<Rule>); 5] {
    let (mark, keep) = (settings.mark, settings.mark.foreign());
    let (half, full) = (mark.half_judged(stamp), mark.judged(stamp));
    let is = |number: u32| test(Field::CtMark, Test::Masked { mask: mark.mask(), is: number });
    // What is forwarded asks at once, and not through a jump: that costs as much as what it leads to. A stamp speaks for the flow, not
    // for whoever sends an error about it, nor for the interface by which a packet leaves after its route was changed. That it came in
    // where its source belongs, anti-spoofing has asked. What senders' judge takes up here loses its stamp, and receivers' judge
    // looks at it too: which of the two is concerned depends on the packet's direction.
    let plain_v4 = Statement::is(Field::VersionAndLength, PLAIN_V4);
    let is_bound = Statement::in_set([Field::OutInterface, Field::Destination4], &names::source4());
    let (out, into) = match settings.mode {
        Mode::Bypass => (Vec::new(), Vec::new()),
        _ => (
            vec![
                vec![is(full), is_not_related(), plain_v4, is_bound, accept()],
                vec![is(full), is_not_related(), Statement::goto(&names::bound())],
                vec![Statement::goto(&names::unstamped_out())],
            ],
            vec![vec![is(full), accept()], vec![Statement::goto(&names::sided("j", Direction::Ingress))]],
        ),
    };
    [
        (names::forward_out(), out),
        (names::forward_in(), into),
        (names::fast(), vec![vec![is(full), accept()], vec![Statement::Verdict(Verdict::Return)]]),
        (names::stamp_out(), vec![vec![Statement::SetMark { keep, set: half }, accept()]]),
        (names::stamp_in(), vec![vec![is(half), Statement::SetMark { keep, set: full }], vec![accept()]]),
    ]
}

/// The only rules that know the stamp: those of this one, then those of the stamps to come, up to the last that has its number's upper
/// bits in common with it. So the next stamp deletes rules, and mostly adds none: the kernel takes a rule away in a fraction of the time
/// that it needs to take one in, and looks at the whole table again where one comes that decides.
pub fn stamp_chains(settings: &Settings, stamp: Stamp) -> Vec<(Name, Vec<Rule>)> {
    let mut chains: Vec<(Name, Vec<Rule>)> = Vec::new();
    for stamp in stamp.provision() {
        for (at, (name, rules)) in stamp_rules(settings, stamp).into_iter().enumerate() {
            match chains.get_mut(at) {
                Some((_, all)) => all.extend(rules),
                None => chains.push((name, rules)),
            }
        }
    }
    chains
}

/// The chains that know the stamp, and how many rules each has for one.
pub fn stamp_rule_counts(settings: &Settings) -> [(Name, usize); 5] {
    let (out, into) = if settings.mode == Mode::Bypass { (0, 0) } else { (3, 2) };
    [
        (names::forward_out(), out),
        (names::forward_in(), into),
        (names::fast(), 2),
        (names::stamp_out(), 1),
        (names::stamp_in(), 2),
    ]
}

/// Where an end that is not judged, not ours or open in this direction, goes straight to its stamp.
fn passing(desired: &mut Desired<'_>, settings: &Settings, side: Direction) {
    let mut rules = Vec::new();
    if !settings.adopting {
        // Conntrack takes a connection up in its middle, from either end: it could come back reversed after it was refused.
        let flags = u32::from(TCP_FIN | TCP_SYN | TCP_RST | TCP_ACK);
        rules.push(vec![
            Statement::is(Field::Protocol, TCP),
            state(STATE_NEW),
            test(Field::TcpFlags, Test::MaskedNot { mask: flags, is_not: u32::from(TCP_SYN) }),
            Statement::goto(&names::end(View::Connection, side)),
        ]);
    }
    rules.push(vec![Statement::goto(&names::stamp(side))]);
    desired.put_chain(names::sided("pass", side), rules);
}

/// A refused packet changes no mark: refusal is a verdict of the current policy, not a memory.
fn refusing(desired: &mut Desired<'_>, settings: &Settings, keys: Keys, side: Direction) {
    for view in [View::Connection, View::Headers] {
        let end = names::end(view, side);
        let mut rules = log(settings, side, &end, "gc d - ".into());
        rules.push(vec![Statement::goto(&names::deny(view, side))]);
        desired.put_chain(end, rules);

        let mut rules = Vec::new();
        let audit = Statement::goto(&names::audit());
        if settings.mode == Mode::Audit {
            rules.push(vec![audit]);
        } else if settings.mode == Mode::Lockdown {
            rules.push(drop().into());
        } else {
            let (original, reply) = interfaces(side);
            let sides = match view {
                View::Connection | View::Onward => vec![(Some(ORIGINAL), original), (Some(REPLY), reply)],
                View::Headers => vec![(None, original)],
            };
            for (of_flow, interface) in sides {
                let flow: Vec<Statement> = of_flow.map(direction).into_iter().collect();
                for keyed in keyed(keys) {
                    let set = match keyed {
                        Keyed::Interface => names::audited(),
                        Keyed::Address(Family::V4) => names::audited4(),
                        Keyed::Address(Family::V6) => names::audited6(),
                    };
                    let (family, fields) = key_fields(view, side, interface, keyed);
                    rules.push(line([flow.clone(), family, vec![Statement::in_set(fields, &set), audit.clone()]]));
                }
            }
            rules.push(drop().into());
        }
        desired.put_chain(names::deny(view, side), rules);
    }
}

/// The keys that occur, the more specific ones first.
fn keyed(keys: Keys) -> impl Iterator<Item = Keyed> {
    let v4 = keys.v4.then_some(Keyed::Address(Family::V4));
    let v6 = keys.v6.then_some(Keyed::Address(Family::V6));
    [v4, v6, Some(Keyed::Interface)].into_iter().flatten()
}

/// The fields that make up a workload's key, after what must be tested before they can be read.
fn key_fields(view: View, side: Direction, interface: Field, keyed: Keyed) -> (Vec<Statement>, Vec<Field>) {
    let Keyed::Address(family) = keyed else { return (Vec::new(), vec![interface]) };
    let is_family = Statement::is(Field::Family, if family == Family::V4 { FAMILY_V4 } else { FAMILY_V6 });
    let address = match (view, side, family) {
        (View::Connection, Direction::Egress, Family::V4) => Field::CtSource4,
        (View::Connection, Direction::Egress, Family::V6) => Field::CtSource6,
        (View::Connection, Direction::Ingress, Family::V4) => Field::CtDestination4,
        (View::Connection, Direction::Ingress, Family::V6) => Field::CtDestination6,
        (_, Direction::Egress, Family::V4) => Field::Source4,
        (_, Direction::Egress, Family::V6) => Field::Source6,
        (_, Direction::Ingress, Family::V4) => Field::Destination4,
        (_, Direction::Ingress, Family::V6) => Field::Destination6,
    };
    (vec![is_family], vec![interface, address])
}

fn judge(desired: &mut Desired<'_>, settings: &Settings, keys: Keys, side: Direction) {
    let (original, reply) = interfaces(side);
    let flows = [(ORIGINAL, original, false), (REPLY, reply, true)];
    let mut rules = Vec::new();
    if settings.mode != Mode::Lockdown {
        for keyed in keyed(keys) {
            for (of_flow, interface, is_reply) in flows {
                let (family, fields) = key_fields(View::Connection, side, interface, keyed);
                let numbers = names::dispatch(side, is_reply, keyed);
                let dispatch = Statement::Dispatch { fields, numbers, verdicts: names::profiles() };
                rules.push(line([vec![direction(of_flow)], family, vec![dispatch]]));
            }
        }
    }
    // Ours, but without a profile: not announced yet, just removed, refused. Never "unknown, so accept".
    let end = Statement::goto(&names::end(View::Connection, side));
    rules.extend(flows.map(|(of_flow, interface, _)| vec![direction(of_flow), claimed(interface), end.clone()]));
    rules.extend(flows.map(|(of_flow, interface, _)| vec![direction(of_flow), held(interface), end.clone()]));
    // The judged end is not ours, the other one is: half is done.
    let half = Statement::goto(&names::stamp(side));
    rules.push(vec![direction(ORIGINAL), claimed(reply), half.clone()]);
    rules.push(vec![direction(REPLY), claimed(original), half]);
    // Every rule before asks for the direction of a connection, which what is invalid or untracked does not have: only that gets here,
    // and what is not ours at either end. So nobody has to ask for the state of a connection first.
    rules.push(vec![Statement::goto(&names::no_connection())]);
    desired.put_chain(names::sided("j", side), rules);
}

/// Invalid and untracked packets never fall through to accept where an end is ours. Nobody's policy judges them, so they pass only if
/// every end that is ours is audited.
fn no_connection(desired: &mut Desired<'_>, settings: &Settings, keys: Keys) {
    let ends =
        [(Field::InInterface, Field::Source4, Field::Source6), (Field::OutInterface, Field::Destination4, Field::Destination6)];
    let mut rules = Vec::new();
    for (end, v4, v6) in ends {
        let families = [(FAMILY_V4, keys.v4, [end, v4], names::audited4()), (FAMILY_V6, keys.v6, [end, v6], names::audited6())];
        match settings.mode {
            Mode::Audit => {}
            Mode::Lockdown => rules.push(line([vec![claimed(end)], drop().into()])),
            Mode::Enforce | Mode::Bypass => rules.extend(families.map(|(family, by_address, fields, set)| {
                let mut tests = vec![Statement::is(Field::Family, family), claimed(end), not_in([end], names::audited())];
                tests.extend(by_address.then(|| not_in(fields, set)));
                line([tests, drop().into()])
            })),
        }
    }
    if settings.mode != Mode::Audit {
        // Without its name it is nobody's, and so not audited: but by its name it is decided above.
        rules.extend(ends.map(|(end, ..)| line([vec![unclaimed(end), held(end)], drop().into()])));
    }
    rules.extend(ends.map(|(end, ..)| vec![claimed(end), Statement::goto(&names::audit())]));
    desired.put_chain(names::no_connection(), rules);
}

fn not_in(fields: impl Into<Vec<Field>>, set: Name) -> Statement {
    Statement::Match { fields: fields.into(), test: Test::NotIn(set) }
}

fn priority(side: Direction) -> i32 {
    match side {
        Direction::Egress => PRIORITY_OUT,
        Direction::Ingress => PRIORITY_IN,
    }
}

/// Where packets of the machine itself come in; those that are forwarded are met by the stamp's own chains.
fn bases(desired: &mut Desired<'_>, settings: &Settings, keys: Keys, side: Direction) {
    let judge = Statement::goto(&names::sided("j", side));
    let hooks = [("b_input", Hook::Input, names::infrastructure_in()), ("b_output", Hook::Output, names::infrastructure_out())];
    for (stem, hook, infrastructure) in hooks {
        let mut rules = Vec::new();
        if settings.mode != Mode::Bypass {
            rules.extend(past_the_fast_path(hook, side, settings.mark, keys));
            rules.push(vec![Statement::jump(&names::fast())]);
            rules.push(vec![Statement::jump(&infrastructure)]);
            rules.push(vec![judge.clone()]);
        }
        desired.chains.insert(names::sided(stem, side), Chain { base: Some(Base { hook, priority: priority(side) }), rules });
    }
    if side == Direction::Egress {
        let rules = vec![vec![Statement::jump(&names::infrastructure_out())], vec![judge]];
        desired.put_chain(names::local_out(), rules);
    }
}

/// What a workload needs of its host to come up at all, between the two and nobody else; and what no policy can cut off the host itself,
/// which is a client outside and never a server.
fn infrastructure(desired: &mut Desired<'_>, settings: &Settings, keys: Keys) {
    let (came_in, goes_out) = (Field::InInterface, Field::OutInterface);
    let pass = |parts: Vec<Statement>| line([parts, vec![accept()]]);
    let inside = |end: Field, parts: Vec<Statement>| line([parts, vec![claimed(end), accept()]]);
    let mut coming: Vec<Rule> = [
        icmpv6(NEIGHBOUR_SOLICIT, NEIGHBOUR_ADVERT),
        icmpv6(ROUTER_SOLICIT, ROUTER_SOLICIT),
        udp(DHCP_CLIENT, DHCP_SERVER),
        udp(DHCP6_CLIENT, DHCP6_SERVER),
    ]
    .map(|parts| inside(came_in, parts))
    .into();
    let mut going: Vec<Rule> =
        [icmpv6(ROUTER_ADVERT, NEIGHBOUR_ADVERT), udp(DHCP_SERVER, DHCP_CLIENT), udp(DHCP6_SERVER, DHCP6_CLIENT)]
            .map(|parts| inside(goes_out, parts))
            .into();
    if keys.host {
        for (rules, end) in [(&mut coming, came_in), (&mut going, goes_out)] {
            rules.push(pass(vec![test(end, Test::Is(Value::Interface(Interface::LOOPBACK)))]));
            // Neighbour discovery but for redirects, which nothing needs, and what listeners are asked and report.
            for (first, last) in [(LISTENER_QUERY, NEIGHBOUR_ADVERT), (LISTENER_REPORT_2, LISTENER_REPORT_2)] {
                rules.push(line([vec![unclaimed(end), state(STATE_UNTRACKED)], icmpv6(first, last), vec![accept()]]));
            }
        }
        let outside = |end: Field, parts: Vec<Statement>| line([vec![unclaimed(end)], parts, vec![accept()]]);
        coming.push(outside(came_in, udp(DHCP_SERVER, DHCP_CLIENT)));
        coming.push(outside(came_in, udp(DHCP6_SERVER, DHCP6_CLIENT)));
        going.push(outside(goes_out, udp(DHCP_CLIENT, DHCP_SERVER)));
        going.push(outside(goes_out, udp(DHCP6_CLIENT, DHCP6_SERVER)));
        // By the direction of the flow: a port that answers must not open all others to whoever sends from it.
        let port = |of_flow: u8, protocol: u8, field: Field, port: u16| {
            vec![direction(of_flow), Statement::is(Field::Protocol, protocol), Statement::is(field, port)]
        };
        for (protocol, number) in &settings.failsafe.inbound {
            coming.push(outside(came_in, port(ORIGINAL, *protocol, Field::DestinationPort, *number)));
            going.push(outside(goes_out, port(REPLY, *protocol, Field::SourcePort, *number)));
        }
        for (protocol, number) in &settings.failsafe.outbound {
            going.push(outside(goes_out, port(ORIGINAL, *protocol, Field::DestinationPort, *number)));
            coming.push(outside(came_in, port(REPLY, *protocol, Field::SourcePort, *number)));
        }
    }
    desired.put_chain(names::infrastructure_in(), coming);
    desired.put_chain(names::infrastructure_out(), going);
}

/// A claimed interface sends from its workloads' addresses only, whatever the family; DHCP and neighbour discovery are enumerated;
/// nobody plays router or DHCP server. Whose address it is is asked first: hardly any packet needs more.
fn spoof(desired: &mut Desired<'_>, settings: &Settings, keys: Keys) {
    let mut rules = Vec::new();
    let (v4, v6) = (Statement::is(Field::Family, FAMILY_V4), Statement::is(Field::Family, FAMILY_V6));
    if settings.mode != Mode::Bypass {
        let pass = |parts: Vec<Vec<Statement>>| line(parts.into_iter().chain([vec![accept()]]));
        let own = |family: &Statement, field: Field, set: Name, then: Name| {
            vec![family.clone(), Statement::in_set([Field::InInterface, field], &set), Statement::goto(&then)]
        };
        // Nothing a DHCP server sends comes from another port, so nearly every packet of IPv4 is through with one rule. That it is
        // one is told by the first byte of its header, if it has no options: it is there to be compared, the family has to be asked for.
        let not_dhcp = test(Field::SourcePort, Test::IsNot(DHCP_SERVER.into()));
        let plain_v4 = Statement::is(Field::VersionAndLength, PLAIN_V4);
        rules.push(line([
            vec![plain_v4, Statement::in_set([Field::InInterface, Field::Source4], &names::source4())],
            vec![not_dhcp, accept()],
        ]));
        rules.push(own(&v4, Field::Source4, names::source4(), names::own4()));
        rules.push(own(&v6, Field::Source6, names::source6(), names::own6()));
        rules.push(vec![unclaimed(Field::InInterface), not_held(Field::InInterface), accept()]);
        if keys.span4 {
            rules.push(own(&v4, Field::Source4, names::source_span4(), names::own4()));
        }
        if keys.span6 {
            rules.push(own(&v6, Field::Source6, names::source_span6(), names::own6()));
        }
        let nobody = vec![v4, Statement::is(Field::Source4, 0u32), Statement::is(Field::Destination4, u32::MAX)];
        rules.push(pass(vec![nobody, udp(DHCP_CLIENT, DHCP_SERVER)]));
        let link_local = || vec![v6.clone(), Statement::within(Field::Source6, LINK_LOCAL_FIRST, LINK_LOCAL_LAST - 1)];
        let types = [
            (NEIGHBOUR_SOLICIT, NEIGHBOUR_ADVERT),
            (ROUTER_SOLICIT, ROUTER_SOLICIT),
            (LISTENER_REPORT, LISTENER_REPORT),
            (LISTENER_REPORT_2, LISTENER_REPORT_2),
        ];
        for (first, last) in types {
            rules.push(pass(vec![link_local(), icmpv6(first, last)]));
        }
        rules.push(pass(vec![link_local(), udp(DHCP6_CLIENT, DHCP6_SERVER)]));
        for kind in [NEIGHBOUR_SOLICIT, LISTENER_REPORT_2] {
            rules.push(pass(vec![vec![v6.clone(), Statement::is(Field::Source6, 0u128)], icmpv6(kind, kind)]));
        }
        rules.push(drop().into());
    }
    let base = Some(Base { hook: Hook::Prerouting, priority: PRIORITY_SPOOF });
    desired.chains.insert(names::spoof(), Chain { base, rules });
    // What comes from its own address is still not whatever it likes.
    let refused = |rogue: Vec<Statement>| line([rogue, drop().into()]);
    desired.put_chain(names::own4(), vec![refused(udp(DHCP_SERVER, DHCP_CLIENT)), vec![accept()]]);
    let rogue6 = [icmpv6(ROUTER_ADVERT, ROUTER_ADVERT), udp(DHCP6_SERVER, DHCP6_CLIENT)];
    desired.put_chain(names::own6(), rogue6.map(refused).into_iter().chain([vec![accept()]]).collect());
}
