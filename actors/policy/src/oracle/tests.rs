use super::*;
use crate::ids::HostId;
use crate::model::Event;
use crate::net::Prefix;
use crate::text::parse_rule;

fn world() -> World {
    let mut world = World::default();
    for (id, network, address, group) in
        [("red-1", "red", 1, "open"), ("blue-1", "blue", 1, "shut"), ("red-2", "red", 2, "open"), ("blue-2", "blue", 2, "open")]
    {
        let mut workload = Workload::new(id.parse().unwrap(), HostId::new("h").unwrap(), network.parse().unwrap());
        workload.addresses = [Prefix::v4(0x0a00_0000 + address, 32).unwrap()].into();
        workload.groups = [group.parse().unwrap()].into();
        world.apply(&Event::workload(workload));
    }
    let mut open = Group::new("open".parse().unwrap());
    for line in ["ingress any from any", "egress any to any"] {
        open.rules.push(parse_rule(line).unwrap().into());
    }
    world.apply(&Event::Group { revision: 42, group: std::sync::Arc::new(open) });
    world.apply(&Event::group(Group::new("shut".parse().unwrap())));
    world
}

/// The same address on two networks belongs to two workloads.
#[test]
fn a_packet_belongs_to_the_workloads_of_its_network() {
    let world = world();
    let (one, two) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
    for (network, from, allowed) in [("red", "red-1", true), ("blue", "blue-1", false)] {
        let flow = world.packet(&network.parse().unwrap(), one, two, Payload::tcp(80));
        assert_eq!(flow.from, End::Workload(from.parse().unwrap()));
        assert_eq!(world.verdict(&flow).allowed, allowed, "{network}");
    }
    let outside = world.packet(&"green".parse().unwrap(), one, two, Payload::tcp(80));
    assert_eq!((&outside.from, &outside.to), (&End::Address(one), &End::Address(two)));
    assert!(world.verdict(&outside).allowed, "traffic of nobody we know is not ours to judge");
}

#[test]
fn a_verdict_carries_its_evidence() {
    let world = world();
    let judgement = world.judge(&"red-1".parse().unwrap(), Direction::Egress, IpAddr::from([8, 8, 8, 8]), &Payload::udp(53));
    let Reason::Rule(deciding) = &judgement.reason else { panic!("{judgement}") };
    assert_eq!((deciding.group.as_str(), deciding.revision, &deciding.scope), ("open", 42, &Reach::Entry));
    let unknown = world.judge(&"nobody".parse().unwrap(), Direction::Egress, IpAddr::from([8, 8, 8, 8]), &Payload::udp(53));
    assert_eq!((unknown.allowed, unknown.reason), (false, Reason::UnknownWorkload));
}

#[test]
fn ends_without_a_common_family_have_no_flow() {
    let world = world();
    let six = End::Address("2001:db8::1".parse().unwrap());
    assert_eq!(world.flow(End::Workload("red-1".parse().unwrap()), six, Payload::tcp(1)), None);
}
