//! What is ordered on the local socket: refused, it changes nothing; many at once, they do not wait for each other.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use groupcast_policy::model::Event;

use crate::guest::Guest;
use crate::world::{World, eventually, group, interface, ip, place, with_world, words};

const OUT: [&str; 2] = ["egress udp 5301 to any", "egress udp 5399 to any"];
const PORTS: [u16; 3] = [5302, 5301, 5399];
const PASS: [u16; 2] = [5301, 5399];

fn attached(world: &World) -> String {
    world.agent.does(&["workload", "list"])
}

/// An `add` that was refused because no claim covers the interface, or because it is another's, took the running workload's profile
/// away, whichever of the two ids came first, and a restart did not bring it back.
#[test]
fn a_refused_add_leaves_every_running_workload_as_it_is() {
    with_world(|mut world| {
        let (first, second) = (Guest::new("gcw0", 0), Guest::new("gcw1", 1));
        interface("unclaimed0");
        interface("gcw2");
        world.write(&[
            group(0, &OUT, &[]),
            place("w0", "h0", "10.7.0.2"),
            place("w1", "h0", "10.7.1.2"),
            place("w2", "h0", "10.7.1.2"),
        ]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        world.agent.does(&["workload", "add", "w1", "--interface", "gcw1"]);
        let (one, two) = (first.socket(), second.socket());
        let both_pass = |when: &str| {
            assert_eq!(first.reaches(&one, &PORTS), PASS, "w0 {when}");
            assert_eq!(second.reaches(&two, &PORTS), PASS, "w1 {when}");
        };
        both_pass("before");
        let before = attached(&world);
        let stamp = world.agent.number("stamp");
        let rows: [(&[&str], &str); 6] = [
            (&["w0", "--interface", "unclaimed0"], "which no claim covers"),
            (&["w0", "--interface", "gcw1"], "already workload w1's"),
            (&["w1", "--interface", "gcw0"], "already workload w0's"),
            (&["w0", "--interface", "gcw0", "--address", "10.7.9.9"], "none of the addresses given for it is registered"),
            (&["w2", "--interface", "gcw2"], "which is already workload w1's"),
            (&["w0", "--interface", "no/name"], "interface"),
        ];
        for (arguments, why) in rows {
            let refused = world.agent.ask(&[&["workload", "add"][..], arguments].concat());
            assert_eq!(refused.status.code(), Some(1), "{arguments:?}: {}", words(&refused));
            assert!(words(&refused).contains(why), "{arguments:?}: {}", words(&refused));
            both_pass(&format!("after {arguments:?}"));
            assert_eq!(attached(&world), before, "{arguments:?}");
        }
        assert_eq!(world.agent.status()["refused"].to_string(), "[]");
        assert_eq!(world.agent.number("stamp"), stamp, "what is refused has no flow judged again");
        world.agent.kill();
        world.agent.start();
        both_pass("after a restart");
        assert_eq!(attached(&world), before);
    });
}

/// It was told that its policy is in force, where nothing could be.
#[test]
fn an_interface_that_does_not_exist_is_refused_and_one_that_vanishes_is_told() {
    with_world(|mut world| {
        world.write(&[group(0, &OUT, &[]), place("w0", "h0", "10.7.0.2")]);
        world.agent.start();
        let refused = world.agent.ask(&["workload", "add", "w0", "--interface", "gcw0"]);
        assert_eq!(refused.status.code(), Some(1), "{}", words(&refused));
        assert!(words(&refused).contains("interface gcw0 does not exist"), "{}", words(&refused));
        assert_eq!(attached(&world), "");
        let guest = Guest::new("gcw0", 0);
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        let missing = |world: &World| world.agent.status()["missing_interfaces"].to_string();
        assert_eq!(missing(&world), "[]");
        // In this order: the kernel takes the interface away too, some time after its namespace has ended.
        ip("link delete gcw0");
        drop(guest);
        eventually("it is missed", || missing(&world).contains("workload w0: interface gcw0 does not exist"));
        assert!(attached(&world).contains("w0"), "it is still wanted");
        let guest = Guest::new("gcw0", 0);
        eventually("it is back", || missing(&world) == "[]");
        assert_eq!(guest.reaches(&guest.socket(), &PORTS), PASS);
    });
}

/// Who runs on the machine itself is the configuration's to say: attached elsewhere or removed, the machine was judged no longer.
#[test]
fn the_machine_itself_is_not_attached_or_removed_by_an_order() {
    with_world(|mut world| {
        interface("gcw0");
        world.agent.configure("host_workload = 'm0'");
        world.write(&[group(0, &OUT, &[]), place("m0", "h0", "10.7.0.1")]);
        world.agent.start();
        for order in [&["workload", "add", "m0", "--interface", "gcw0"][..], &["workload", "remove", "m0"]] {
            let refused = world.agent.ask(order);
            assert_eq!(refused.status.code(), Some(1), "{order:?}: {}", words(&refused));
            assert!(words(&refused).contains("host_workload"), "{order:?}: {}", words(&refused));
        }
        eventually("the machine is judged", || world.agent.holds("\"\" : goto p_") || world.agent.holds("p_"));
    });
}

const TOGETHER: usize = 20;

/// Says to the agent what its command line would, without a process for each. Answered when that is read.
fn say(path: &std::path::Path, request: &str) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    writeln!(stream, "{request}").unwrap();
    stream
}

fn is_done(mut stream: UnixStream) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\"done\""), "{answer}");
}

fn adding(path: &std::path::Path, workload: &str, interface: &str) -> UnixStream {
    let attachment = format!("{{\"workload\":\"{workload}\",\"interface\":\"{interface}\"}}");
    say(path, &format!("{{\"request\":\"workload-add\",\"attachment\":{attachment}}}"))
}

fn add(path: &std::path::Path, n: usize) {
    is_done(adding(path, &format!("w{n}"), &format!("gcw{n}")));
}

/// Where there are many flows, orders wait until these may be judged again.
fn many_flows() {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    (10_000..20_000).for_each(|port| _ = socket.send_to(b"x", ("127.0.0.1", port)));
}

/// A workload whose removal waited, and whose interface was given to a bridge meanwhile, was kept for when the interface is free again: it was
/// removed, and came back.
#[test]
fn a_removal_that_waits_while_the_interface_moves_is_a_removal() {
    with_world(|mut world| {
        interface("gcw0");
        interface("gcw1");
        ip("link add br0 type bridge");
        world.write(&[group(0, &OUT, &[]), place("w0", "h0", "10.7.0.2"), place("w1", "h0", "10.7.1.2")]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        let path = world.agent.folder.join("agent.sock");
        many_flows();
        for round in 0..5 {
            // Ten in a row go at once after a second's rest, and what comes next waits for nearly another.
            std::thread::sleep(std::time::Duration::from_millis(1_100));
            (0..10).for_each(|n| is_done(adding(&path, "w0", &format!("gcw{}", n % 2))));
            let removed = say(&path, "{\"request\":\"workload-remove\",\"workload\":\"w0\"}");
            ip("link set gcw1 master br0");
            is_done(removed);
            ip("link set gcw1 nomaster");
            // When the next one is attached, the interfaces were looked at.
            is_done(adding(&path, "w1", "gcw0"));
            assert!(!attached(&world).lines().any(|line| line.starts_with("w0\t")), "round {round}: {}", attached(&world));
            is_done(say(&path, "{\"request\":\"workload-remove\",\"workload\":\"w1\"}"));
        }
    });
}

/// An order to audit a workload was about how it was attached when it was given, not about what was ordered before it and waited: it brought
/// back the interface that the workload had just left, and both were answered as done.
#[test]
fn what_is_ordered_while_another_order_waits_takes_nothing_of_it_back() {
    const ROUNDS: usize = 60;
    with_world(|mut world| {
        interface("gcw0");
        interface("gcw1");
        world.write(&[group(0, &OUT, &[]), place("w0", "h0", "10.7.0.2")]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        let path = world.agent.folder.join("agent.sock");
        many_flows();
        for round in 0..ROUNDS {
            let interface = format!("gcw{}", round % 2);
            let added = adding(&path, "w0", &interface);
            let audited =
                say(&path, &format!("{{\"request\":\"workload-audit\",\"workload\":\"w0\",\"audit\":{}}}", round % 4 < 2));
            is_done(added);
            is_done(audited);
            assert!(attached(&world).contains(&interface), "round {round}, {interface}: {}", attached(&world));
        }
    });
}

/// Each waited for the next time that all flows may be judged again, a tenth of a second, however few flows there were.
#[test]
fn workloads_added_in_a_row_do_not_wait_where_there_are_few_flows() {
    with_world(|mut world| {
        let in_a_row: usize = if std::env::var_os("GROUPCAST_FULL").is_some() { 500 } else { 200 };
        let many = in_a_row + TOGETHER;
        let places: Vec<Event> =
            (0..many).map(|n| place(&format!("w{n}"), "h0", &format!("10.{}.{}.2", n / 250, n % 250))).collect();
        world.write(&[&[group(0, &OUT, &[])], &places[..]].concat());
        (0..many).for_each(|n| interface(&format!("gcw{n}")));
        world.agent.start();
        eventually("the topics are here", || world.agent.status()["topics"].as_array().is_some_and(|topics| topics.len() > 2));
        let path = world.agent.folder.join("agent.sock");
        let start = Instant::now();
        let hundreds = (0..in_a_row).step_by(100).map(|first| {
            let start = Instant::now();
            (first..in_a_row.min(first + 100)).for_each(|n| add(&path, n));
            start.elapsed()
        });
        let hundreds: Vec<_> = hundreds.collect();
        let row = start.elapsed();
        let start = Instant::now();
        std::thread::scope(|scope| {
            (in_a_row..many).for_each(|n| {
                _ = scope.spawn({
                    let path = &path;
                    move || add(path, n)
                })
            })
        });
        let together = start.elapsed();
        eprintln!("{in_a_row} in a row: {row:?}, by the hundred {hundreds:?}; {TOGETHER} together: {together:?}");
        // At ten a second it is this at least.
        let before = std::time::Duration::from_millis(in_a_row as u64 * 100 - 1_000);
        assert!(row < before * 3 / 4, "{row:?}, as if flows were judged again ten times a second ({before:?})");
        let last = many - 1;
        assert!(world.agent.holds(&format!("\"gcw{last}\" : goto p_")));
    });
}
