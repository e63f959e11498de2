//! What others do to the kernel, and what it cannot do for us.

use std::collections::BTreeSet;

use crate::guest::Guest;
use crate::world::{World, eventually, group, interface, ip, nft, place, run, with_world, words};

const OUT: [&str; 2] = ["egress udp 5301 to any", "egress udp 5399 to any"];

fn started(world: &mut World) {
    interface("gcw0");
    world.write(&[group(0, &OUT, &[]), place("w0", "h0", "10.7.0.2")]);
    world.agent.start();
    world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
}

/// CASES E 20, on a kernel that cannot keep others away: deleted, flushed or edited, also in ways that we would never write, our table
/// is put right and it is counted; nobody else's table is touched by any of it.
#[test]
fn e20_tampering_is_repaired_and_counted_and_other_tables_are_left_alone() {
    with_world(|mut world| {
        world.agent.configure("owned_table = false");
        nft("add table inet neighbour; add chain inet neighbour c { type filter hook input priority 7; }; \
             add rule inet neighbour c tcp dport 22 accept; add set inet neighbour s { type ipv4_addr; elements = { 10.0.0.1 }; }");
        let neighbour = || run("nft", &["-a", "list", "table", "inet", "neighbour"]);
        let before = neighbour();
        started(&mut world);
        assert!(world.agent.holds("\"gcw0\" : goto p_"));
        let rows = [
            "delete table inet gc",
            "flush table inet gc",
            "add rule inet gc open counter drop",
            "insert rule inet gc pass_out meta mark set 1",
            "add element inet gc claims { \"eth9\" }",
            "flush set inet gc claims",
            "add set inet gc stray { type ipv4_addr; flags timeout; }",
            "add chain inet gc thief { type filter hook forward priority -400; policy accept; }",
        ];
        let mut repairs = 0;
        for tampering in rows {
            nft(tampering);
            repairs += 1;
            eventually(&format!("{tampering} is repaired"), || {
                world.agent.number("repairs") >= repairs && world.agent.ruleset().is_some()
            });
            repairs = world.agent.number("repairs");
            assert!(world.agent.holds("\"gcw0\" : goto p_"), "after {tampering}");
            assert_eq!(neighbour(), before, "after {tampering}");
        }
        // A neighbour's own doings are nobody's business.
        for _ in 0..50 {
            nft("add element inet neighbour s { 10.0.0.2 }; delete element inet neighbour s { 10.0.0.2 }");
        }
        world.enforce(&[group(0, &OUT[..1], &[])]);
        assert_eq!(world.agent.number("repairs"), repairs);
        world.agent.stop();
        world.agent.does(&["cleanup"]);
        assert_eq!(neighbour(), before, "after cleanup");
        assert!(!run("nft", &["list", "tables"]).contains("inet gc\n"));
    });
}

/// Where the kernel can, nobody else even gets to touch it.
#[test]
fn e20_an_owned_table_cannot_be_tampered_with() {
    with_world(|mut world| {
        started(&mut world);
        let untouchable = |world: &World| {
            for tampering in ["delete table inet gc", "flush chain inet gc open"] {
                let output = std::process::Command::new("nft").arg(tampering).output().unwrap();
                assert!(words(&output).contains("not permitted"), "{tampering}: {}", words(&output));
            }
            nft("flush ruleset");
            assert!(world.agent.holds("\"gcw0\" : goto p_"));
            assert_eq!(world.agent.number("repairs"), 0);
        };
        untouchable(&world);
        // Adopted after a restart it is ours again, although nothing had to be changed.
        let saved = || world.agent.state();
        eventually("the policy is on disk", || saved().is_some_and(|state| !state.documents.is_empty()));
        world.agent.kill();
        world.end_bus();
        world.agent.start();
        assert_eq!(world.agent.number("transactions"), 0);
        untouchable(&world);
        // The agent ends: cleaning up takes our table, and only that, byte for byte.
        nft("add table ip gc; add chain ip gc c; add table inet gcx; add set inet gcx s { type ipv4_addr; }");
        let others = || [run("nft", &["-a", "list", "table", "ip", "gc"]), run("nft", &["-a", "list", "table", "inet", "gcx"])];
        let before = others();
        world.agent.kill();
        world.agent.does(&["cleanup"]);
        world.agent.does(&["cleanup"]);
        assert_eq!(others(), before);
        assert!(!run("nft", &["list", "tables"]).contains("inet gc\n"));
    });
}

/// Put into a bridge, a workload's packets pass no hook of ours as its own: refused by name, before and after it was attached, and
/// enforced again when it is free.
#[test]
fn what_belongs_to_a_bridge_is_refused_by_name() {
    with_world(|mut world| {
        world.write(&[
            group(0, &OUT, &[]),
            place("w0", "h0", "10.7.0.2"),
            place("w1", "h0", "10.7.1.2"),
            place("w2", "h0", "10.7.0.2"),
        ]);
        ip("link add br0 type bridge");
        ip("link add gcw0 type veth peer name p0");
        ip("link add gcw1 type veth peer name p1");
        ip("link set gcw1 master br0");
        world.agent.start();
        let refused = world.agent.ask(&["workload", "add", "w1", "--interface", "gcw1"]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(words(&refused).contains("interface gcw1 belongs to bridge br0"), "{}", words(&refused));
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        assert!(world.agent.holds("\"gcw0\" : goto p_"));
        ip("link set gcw0 master br0");
        let refusals = |world: &World| world.agent.status()["refused"].to_string();
        eventually("it is refused", || refusals(&world).contains("workload w0: interface gcw0 belongs to bridge br0"));
        eventually("nothing leads to it", || {
            world.agent.ruleset().is_some_and(|ruleset| !ruleset.contains("\"gcw0\" : goto p_"))
        });
        assert_eq!(world.agent.status()["workloads"].as_array().map(Vec::len), Some(1), "it is still wanted");
        ip("link set gcw0 nomaster");
        eventually("it is enforced again", || world.agent.holds("\"gcw0\" : goto p_"));
        // The other one is claimed and still there.
        assert!(
            !refusals(&world).contains("gcw0") && refusals(&world).contains("interface gcw1 is claimed"),
            "{}",
            refusals(&world)
        );
        ip("link set gcw1 nomaster");
        eventually("nothing is refused", || refusals(&world) == "[]");
        // Two workloads with one address: the second is refused, the first stays.
        let refused = world.agent.ask(&["workload", "add", "w2", "--interface", "gcw2"]);
        assert!(
            words(&refused).contains("w2 has the address 10.7.0.2/32, which is already workload w0's"),
            "{}",
            words(&refused)
        );
        assert!(world.agent.holds("\"gcw0\" : goto p_") && !world.agent.holds("\"gcw2\" : goto p_"));
        let unclaimed = world.agent.ask(&["workload", "add", "w1", "--interface", "eth0"]);
        assert!(words(&unclaimed).contains("which no claim covers"), "{}", words(&unclaimed));
    });
}

/// Who interferes is listed; what interferes is not touched.
#[test]
fn foreign_rules_that_interfere_are_listed_in_status() {
    with_world(|mut world| {
        started(&mut world);
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        assert_eq!(
            world.agent.status()["foreign"].to_string(),
            r#"{"drops":[],"flowtables":[],"forwarding":[],"marks":[],"unread":[]}"#
        );
        nft("add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; \
             add table inet m; add chain inet m c { type filter hook prerouting priority -150; }; add rule inet m c ct mark set 1");
        let foreign = world.agent.status()["foreign"].clone();
        assert!(foreign["drops"][0].as_str().unwrap().starts_with("table ip filter, chain FORWARD at forward"), "{foreign}");
        assert!(foreign["marks"][0].as_str().unwrap().starts_with("table inet m, chain c writes our bits 0xffffff"), "{foreign}");
    });
}

/// Neither kernel nor disk knows the last stamp: our bits are zeroed in real connections before the first table is loaded, and only
/// ours. So a connection that carries, by chance or by age, the stamp that comes next is judged all the same.
#[test]
fn stamps_of_a_forgotten_life_do_not_count() {
    with_world(|mut world| {
        let guest = Guest::new("gcw0", 0);
        let socket = guest.socket();
        nft(
            "add table inet m; add chain inet m c { type filter hook input priority 0; }; add rule inet m c ct mark set 0x55000123",
        );
        assert_eq!(guest.reaches(&socket, &[5302, 5301]), [5302, 5301]);
        nft("delete table inet m");
        let marks = || -> BTreeSet<String> {
            let table = std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap();
            let of_guest = table.lines().filter(|line| line.contains("src=10.7.0.2"));
            of_guest.filter_map(|line| line.split(' ').find(|word| word.starts_with("mark="))).map(str::to_owned).collect()
        };
        assert_eq!(marks(), BTreeSet::from([format!("mark={}", 0x5500_0123)]));
        world.agent.start();
        assert!(world.agent.number("unmarked") >= 2);
        assert_eq!(marks(), BTreeSet::from([format!("mark={}", 0x5500_0000)]), "foreign bits are gone, or ours are not");
        // Nobody is forgotten twice: the kernel knows now, and after its table is lost the disk does.
        world.write(&[group(0, &OUT, &[]), place("w0", "h0", "10.7.0.2")]);
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        assert_eq!(guest.reaches(&socket, &[5302, 5301]), [5301]);
        let stamp = world.agent.number("stamp");
        let saved = || world.agent.state().is_some_and(|state| u64::from(state.facts.stamp) == stamp);
        eventually("the stamp is on disk", saved);
        world.agent.kill();
        nft("flush ruleset");
        world.agent.start();
        assert!(world.agent.number("stamp") > stamp + 900, "the disk may have been behind");
        assert!(world.agent.number("unmarked") >= 1, "what the last life stamped");
        assert_eq!(guest.reaches(&socket, &[5302, 5301]), [5301]);
    });
}

/// What happens more often than flows may be judged again is done together.
#[test]
fn bumps_are_bounded_and_what_waits_is_done_together() {
    with_world(|mut world| {
        const MANY: usize = 60;
        let places: Vec<_> = (0..MANY).map(|n| place(&format!("w{n}"), "h0", &format!("10.7.{n}.2"))).collect();
        world.write(&[&[group(0, &OUT, &[])], &places[..]].concat());
        (0..MANY).for_each(|n| interface(&format!("gcw{n}")));
        world.agent.start();
        // So many flows that they may be judged again ten times a second, no more often.
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        (10_000..17_000).for_each(|port| _ = socket.send_to(b"x", ("127.0.0.1", port)));
        assert!(groupcast_host::host::flows() > Some(6_000), "{:?}", groupcast_host::host::flows());
        let before = (world.agent.number("bumps"), std::time::Instant::now());
        let added: Vec<_> = (0..MANY)
            .map(|n| {
                let mut command = world.agent.command(&["workload", "add", &format!("w{n}"), "--interface", &format!("gcw{n}")]);
                command.spawn().unwrap()
            })
            .collect();
        for mut adding in added {
            assert!(adding.wait().unwrap().success());
        }
        let bumps = world.agent.number("bumps") - before.0;
        let seconds = before.1.elapsed().as_secs() + 1;
        assert!(bumps <= 10 * (seconds + 1), "{bumps} bumps in {seconds} s");
        assert_eq!(world.agent.status()["workloads"].as_array().map(Vec::len), Some(MANY));
        assert!(world.agent.holds("\"gcw59\" : goto p_"));
    });
}

/// Nobody but the agent knows what was ordered here: what it has said is done is on the disk, also when it dies in the next instant, and
/// whether or not the bus is there in its next life.
#[test]
fn what_was_ordered_survives_a_death_at_once() {
    with_world(|mut world| {
        let guest = Guest::new("gcw1", 1);
        interface("gcw0");
        world.write(&[group(0, &OUT, &[]), place("w0", "h0", "10.7.0.2"), place("w1", "h0", "10.7.1.2")]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        world.agent.kill();
        world.agent.start();
        assert!(world.agent.holds("\"gcw0\" : goto p_"), "attached before the agent died");
        world.agent.does(&["workload", "add", "w1", "--interface", "gcw1"]);
        world.agent.kill();
        world.end_bus();
        world.agent.start();
        assert!(world.agent.holds("\"gcw1\" : goto p_"), "attached before the agent died, and the bus is gone");
        drop(guest);
        world.agent.does(&["workload", "remove", "w1"]);
        world.agent.kill();
        world.agent.start();
        assert!(!world.agent.does(&["workload", "list"]).contains("w1"), "removed before the agent died");
    });
}
