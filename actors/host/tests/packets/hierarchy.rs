//! Lines C of the behaviour cases: the hierarchy on a host with many workloads, groups and members.

use groupcast_enforce::delta::Op;
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::expression::{Field, Statement, Test, Value};
use groupcast_enforce::kernel::{Fate, ModelKernel, Packet as Modelled};
use groupcast_enforce::names::{self, Role};
use groupcast_enforce::settings::{Attached, Attachment, Attachments};
use groupcast_enforce::table::Table;
use groupcast_enforce::trial;
use groupcast_policy::doc::Phases;
use groupcast_policy::model::{Binding, Event, Group, Target, Workload};
use groupcast_policy::net::{Family, Prefix};

use crate::cases::lines;
use crate::rows::Story;
use crate::stage::isolated;

/// So many workloads in so many spaces and apps, each of which has a group; all attached here.
fn many(workloads: usize, spaces: usize, apps: usize, elsewhere: u32) -> (Attachments, Vec<Event>) {
    let (space, app) = (|n: usize| format!("s{n}").parse().unwrap(), |n: usize| format!("a{n}").parse().unwrap());
    let mut attachments = Attachments::new();
    let mut events =
        vec![named("global", &["deny egress udp 1 to any", "ingress udp 5001 from group:global"], Target::Global, elsewhere)];
    events.extend((0..spaces).map(|n| named(&format!("space{n}"), &["egress udp 5002 to any"], Target::Space(space(n)), 0)));
    events.extend((0..apps).map(|n| named(&format!("app{n}"), &["egress udp 5001 to any"], Target::App(app(n)), 0)));
    for number in 0..workloads {
        let id = trial::workload_id(number as u8);
        let id = if number < 256 { id } else { format!("w{number}").parse().unwrap() };
        let (interface, address) = match number {
            0 | 1 => (trial::interface(number as u8), trial::address(number as u8, Family::V4)),
            _ => {
                let name = format!("gcw{}", 100 + number);
                let address = std::net::Ipv4Addr::from_bits(0x0a63_0000 + number as u32);
                (groupcast_enforce::interface::Interface::new(&name).unwrap(), address.into())
            }
        };
        attachments.insert(id.clone(), Attached { attachment: Attachment::Interface(interface), audit: false });
        events.push(Event::workload(Workload {
            addresses: [Prefix::host(address)].into(),
            space: Some(space(number % spaces)),
            app: Some(app(number % apps)),
            ..Workload::new(id, trial::host(), "n0".parse().unwrap())
        }));
    }
    (attachments, events)
}

fn named(id: &str, rules: &[&str], target: Target, elsewhere: u32) -> Event {
    let members = (0..elsewhere).map(|n| Prefix::host(std::net::Ipv4Addr::from_bits(0x0b00_0000 + n).into())).collect();
    let bindings = vec![Binding { target, phases: Phases::BOTH }];
    Event::group(Group { rules: lines(rules), bindings, members, ..Group::new(id.parse().unwrap()) })
}

/// How many rules look at this port: each once for packets that go onward, and once for whatever else belongs to the connection.
fn rules_on(table: &Table, port: u16) -> usize {
    let test = Test::Is(Value::from(port));
    let count = |field: Field| {
        let looks = |statement: &Statement| matches!(statement, Statement::Match { fields, test: found } if fields[..] == [field] && *found == test);
        table.chains.values().flat_map(|chain| &chain.rules).filter(|rule| rule.iter().any(looks)).count()
    };
    let (onward, connection) = (count(Field::DestinationPort), count(Field::CtDestinationPort));
    assert_eq!(onward, connection, "port {port}");
    connection
}

/// Without those of the stamps to come, which grow fewer with each new one.
fn rules_in(engine: &Engine) -> usize {
    let chains = engine.actual().chains.iter().filter(|(name, _)| names::chain_role(name) != Role::Stamp);
    chains.map(|(_, chain)| chain.rules.len()).sum()
}

/// Global rules are written once per host, a space's once per space, an app's once per app (C 1). What 500 workloads in 20 spaces and 200
/// apps need depends on the distinct groups, not on workloads × groups; the 501st of a known app adds no rule (C 3). Global, space, app:
/// the earliest that allows decides (C 2).
#[test]
fn c01_c02_c03_rules_are_written_once_and_tried_in_order() {
    isolated(|| {
        let (attachments, events) = many(500, 20, 200, 0);
        let mut story = Story::begin(attachments, &events);
        let there = story.kernel.read().unwrap().unwrap();
        assert_eq!(there.differences(story.engine.actual()), [""; 0]);
        // Port 1 and the global ingress once; one for each space; one for each app.
        assert_eq!((rules_on(&there, 1), rules_on(&there, 5002)), (1, 20));
        assert_eq!(rules_on(&there, 5001), 200 + 2, "each app's, and the global ingress for each family");
        let before = rules_in(&story.engine);
        let one_more = many(501, 20, 200, 0);
        let (id, attached) = one_more.0.into_iter().find(|(id, _)| id.as_str() == "w500").unwrap();
        let plan = story.engine.attach(&id, Some(attached), &story.stage);
        story.kernel.commit(&plan.transaction).unwrap();
        story.engine.committed(plan);
        let edits = story.stage.change(&one_more.1[one_more.1.len() - 1..]);
        let plan = story.engine.change(&edits, &story.stage);
        let stamp_chains = |chain: &str| names::chain_role(chain) == Role::Stamp;
        for op in &plan.transaction.ops {
            match op {
                Op::AddElements { .. } | Op::DeleteElements { .. } => {}
                Op::AddRule { chain, .. } | Op::DeleteRule { chain, .. } | Op::FlushChain { chain } if stamp_chains(chain) => {}
                other => panic!("the 501st workload needs {other:?}"),
            }
        }
        story.kernel.commit(&plan.transaction).unwrap();
        story.engine.committed(plan);
        assert_eq!(rules_in(&story.engine), before);
        // It is in force: w0 and w1 speak, by the app's egress and the global ingress.
        let flow = story.udp(0, 1, 5001);
        assert!(story.passes(0, 1, &flow) && story.passes(1, 0, &flow.answer()));
        let refused = story.udp(0, 1, 5003);
        assert!(!story.passes(0, 1, &refused));
    });
}

/// The cost of a packet does not grow with workloads, groups or members: as many rules are tried for it among two workloads as among
/// 500 with 220 more groups and 50,000 more members, whether judged or on the fast path; and the real kernel decides the same.
#[test]
fn c04_a_packet_costs_the_same_however_full_the_host_is() {
    isolated(|| {
        let mut tried = Vec::new();
        for (workloads, spaces, apps, elsewhere) in [(2, 2, 2, 1), (500, 20, 200, 50_000)] {
            let (attachments, events) = many(workloads, spaces, apps, elsewhere);
            let mut story = Story::begin(attachments, &events);
            let flow = story.udp(0, 1, 5001);
            assert!(story.passes(0, 1, &flow) && story.passes(1, 0, &flow.answer()) && story.passes(0, 1, &flow));
            let mut model = ModelKernel::new(story.engine.actual().clone());
            let (from, to) = (trial::interface(0), trial::interface(1));
            let packet = Modelled::first(from, to, flow.source, flow.destination, flow.payload);
            for packet in [packet.clone(), packet.answer(), packet.later()] {
                let before = model.rules_tried;
                assert_eq!(model.send(&packet), Fate::Passed);
                tried.push(model.rules_tried - before);
            }
            drop(story);
        }
        let (few, full) = tried.split_at(3);
        assert_eq!(few, full, "rules tried for a first packet, its answer and the next");
        // Three before connection tracking, against spoofing, and one for each judge.
        assert!(few[2] <= 5, "the fast path looks at {} rules", few[2]);
    });
}
