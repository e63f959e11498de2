use std::process::Command;

use groupcast_policy::net::Span;

use super::*;
use crate::expression::{FAMILY_V4, FAMILY_V6, ORIGINAL, PLAIN_V4, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN};
use crate::table::Chain;

fn name(text: &str) -> Name {
    Name::from(text)
}

/// `nft -c` reads the kernel's features and needs root; without either there is nobody to ask.
pub(crate) fn nft_accepts(script: &str) -> Option<Result<(), String>> {
    let path = std::env::temp_dir().join(format!("groupcast-text-{}-{:?}", std::process::id(), std::thread::current().id()));
    std::fs::write(&path, script).unwrap();
    let output = Command::new("nft").args(["-c", "-f"]).arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    let output = output.ok()?;
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    if words.contains("Operation not permitted") {
        return None;
    }
    Some(if output.status.success() { Ok(()) } else { Err(words) })
}

/// A table in which every field, test, statement and kind of set occurs.
fn everything() -> Table {
    let interface = Interface::new("va").unwrap();
    let goto = Verdict::Goto(name("end"));
    let span4 = Span::new(0x0a00_0000, 0x0a00_00ff).unwrap();
    let span6 = Span::new(0xfd00_u128 << 112, (0xfd00_u128 << 112) + 9).unwrap();
    let sets = [
        ("s4", Set { kind: SetKind::V4, elements: Elements::V4([0x0a00_0001, 0x0a00_0002].into_iter().collect()) }),
        ("s6", Set { kind: SetKind::V6, elements: Elements::V6([1, 2].into()) }),
        ("n4", Set { kind: SetKind::Spans4, elements: Elements::Spans4([span4, Span::one(7)].into()) }),
        ("n6", Set { kind: SetKind::Spans6, elements: Elements::Spans6([span6].into()) }),
        (
            "ports",
            Set { kind: SetKind::Ports, elements: Elements::Ports([Span::one(80), Span::new(8000, 8999).unwrap()].into()) },
        ),
        ("claims", Set::keyed(SetKind::Claims, [(Key::Claim(Claim::new("va*").unwrap()), Data::Nothing)])),
        ("ifs", Set::keyed(SetKind::Interfaces, [(Key::Interface(interface), Data::Nothing)])),
        ("i4", Set::keyed(SetKind::InterfaceV4, [(Key::InterfaceV4(interface, 0x0a00_0001), Data::Nothing)])),
        ("i6", Set::keyed(SetKind::InterfaceV6, [(Key::InterfaceV6(interface, 1), Data::Nothing)])),
        ("is4", Set::keyed(SetKind::InterfaceSpan4, [(Key::InterfaceSpan4(interface, span4), Data::Nothing)])),
        ("is6", Set::keyed(SetKind::InterfaceSpan6, [(Key::InterfaceSpan6(interface, span6), Data::Nothing)])),
        ("w", Set::keyed(SetKind::InterfaceToNumber, [(Key::Interface(interface), Data::Number(1))])),
        ("w4", Set::keyed(SetKind::InterfaceV4ToNumber, [(Key::InterfaceV4(interface, 1), Data::Number(1))])),
        ("w6", Set::keyed(SetKind::InterfaceV6ToNumber, [(Key::InterfaceV6(interface, 1), Data::Number(2))])),
        ("numbers", Set::keyed(SetKind::NumberToVerdict, [(Key::Number(1), Data::Verdict(goto))])),
        ("cur", Set::keyed(SetKind::MarkToVerdict, [(Key::Number(7), Data::Verdict(Verdict::Accept))])),
        ("seen", Set::new(SetKind::Seen)),
    ];
    let is = |field, value: u128| vec![Statement::is(field, value)];
    let set = |fields: &[Field], set: &str| vec![Statement::in_set(fields, &name(set))];
    let dispatch = |fields: &[Field], numbers: &str| {
        vec![Statement::Dispatch { fields: fields.to_vec(), numbers: name(numbers), verdicts: name("numbers") }]
    };
    let flags = u32::from(TCP_FIN | TCP_SYN | TCP_RST | TCP_ACK);
    let tests = |field, test| vec![Statement::Match { fields: vec![field], test }];
    let mut rules = vec![
        is(Field::Family, FAMILY_V6.into()),
        is(Field::VersionAndLength, PLAIN_V4.into()),
        is(Field::CtDirection, ORIGINAL.into()),
        tests(Field::InInterface, Test::Is(Value::Interface(interface))),
        tests(Field::InInterface, Test::NotIn(name("claims"))),
        tests(Field::OutInterface, Test::IsNot(Value::Interface(interface))),
        tests(Field::CtState, Test::MaskedNot { mask: STATE_NEW | STATE_ESTABLISHED | STATE_RELATED, is_not: 0 }),
        tests(Field::CtMark, Test::Masked { mask: 0xff_ffff, is: 0x80_0007 }),
        tests(Field::CtIcmp, Test::Masked { mask: 0xff, is: 3 }),
        [is(Field::Protocol, 6), tests(Field::TcpFlags, Test::MaskedNot { mask: flags, is_not: u32::from(TCP_SYN) })].concat(),
        [is(Field::CtProtocol, 6), vec![Statement::within(Field::CtDestinationPort, 5000u16, 5999u16)]].concat(),
        [is(Field::CtProtocol, 132), set(&[Field::CtDestinationPort], "ports")].concat(),
        [is(Field::CtProtocol, 1), vec![Statement::within(Field::CtIcmp, 0x0800u16, 0x08ffu16)]].concat(),
        [is(Field::Protocol, 17), is(Field::SourcePort, 68), is(Field::DestinationPort, 67)].concat(),
        [is(Field::Protocol, 58), vec![Statement::within(Field::Icmp, 0x8000u16, 0x80ffu16)]].concat(),
        [is(Field::Protocol, 58), tests(Field::Icmp, Test::Masked { mask: 0xff, is: 3 })].concat(),
        vec![Statement::SetMark { keep: 0xff00_0000, set: 0x80_0007 }],
        vec![Statement::VerdictOf { fields: vec![Field::CtMark], mask: Some(0xff_ffff), map: name("cur") }],
        dispatch(&[Field::InInterface], "w"),
        dispatch(&[Field::InInterface, Field::CtSource4], "w4"),
        dispatch(&[Field::OutInterface, Field::CtDestination6], "w6"),
        vec![
            Statement::Limit { seen: name("seen"), interface: Field::InInterface, number: 3, per_second: 5, burst: 10 },
            Statement::Log { prefix: "gc d web/0 ".into(), group: 5, snap_bytes: 96 },
        ],
        vec![Statement::Counter, Statement::Verdict(Verdict::Drop)],
        vec![Statement::Verdict(Verdict::Return)],
        vec![Statement::jump(&name("end"))],
    ];
    for (field, value) in [(Field::Source4, 1u128), (Field::Destination4, 2)] {
        rules.push([is(Field::Family, FAMILY_V4.into()), is(field, value)].concat());
    }
    for (field, value) in [(Field::Source6, 1u128), (Field::Destination6, 2)] {
        rules.push([is(Field::Family, FAMILY_V6.into()), is(field, value)].concat());
    }
    let fields = [Field::CtSource4, Field::CtDestination4, Field::CtSource6, Field::CtDestination6];
    rules.extend(fields.map(|field| is(field, 5)));
    rules.extend([("s4", Field::CtSource4), ("n4", Field::CtDestination4), ("s6", Field::CtSource6)].map(|(s, f)| set(&[f], s)));
    rules.extend([("i4", Field::Source4), ("is4", Field::Source4), ("i6", Field::Source6), ("is6", Field::Source6)].map(
        |(s, f)| {
            let family = if f == Field::Source4 { FAMILY_V4 } else { FAMILY_V6 };
            [is(Field::Family, family.into()), set(&[Field::InInterface, f], s)].concat()
        },
    ));
    rules.push(set(&[Field::OutInterface], "ifs"));
    let hooks = [("b1", Hook::Prerouting), ("b2", Hook::Input), ("b3", Hook::Forward), ("b4", Hook::Output)];
    let base = hooks.map(|(chain, hook)| {
        (name(chain), Chain { base: Some(Base { hook, priority: -10 }), rules: vec![vec![Statement::jump(&name("every"))]] })
    });
    let mut chains: std::collections::BTreeMap<Name, Chain> = base.into();
    chains.insert(name("every"), Chain { base: None, rules });
    chains.insert(name("end"), Chain { base: None, rules: vec![vec![Statement::Verdict(Verdict::Accept)]] });
    Table { chains, sets: sets.map(|(set, value)| (name(set), value)).into() }
}

#[test]
fn nft_understands_everything_that_is_printed() {
    let table = everything();
    let script = Script { name: "gc", table: &table }.to_string();
    match nft_accepts(&script) {
        Some(accepted) => accepted.unwrap_or_else(|words| panic!("{words}\n{script}")),
        None => eprintln!("not checked: nft is missing or may not be used here"),
    }
    // The witness is awake: the same with one word spoilt is refused.
    if let Some(spoilt) = nft_accepts(&script.replace("ct reply proto-src", "ct reply proto-sauce")) {
        assert!(spoilt.is_err());
    }
}

#[test]
fn rules_read_like_nft() {
    let set = name("m_web_4");
    let rule = [
        Statement::is(Field::CtProtocol, 6u8),
        Statement::within(Field::CtDestinationPort, 443u16, 443u16),
        Statement::in_set([Field::CtSource4], &set),
        Statement::Counter,
        Statement::goto(&name("pass_in")),
    ];
    let expected = "ct original protocol 6 meta l4proto { 1, 6, 17, 33, 58, 132, 136 } ct reply proto-src 443 \
                    ct original ip saddr @m_web_4 counter goto pass_in";
    assert_eq!(rule_text(&rule), expected);
}

#[test]
fn a_dispatch_in_two_steps_prints_as_one_map() {
    let script = Script { name: "gc", table: &everything() }.to_string();
    assert!(script.contains("map w { type ifname : verdict; elements = { \"va\" : goto end };"), "{script}");
    // Number 2 leads nowhere.
    assert!(script.contains("map w6 { type ifname . ipv6_addr : verdict;\n\t}"), "{script}");
}
