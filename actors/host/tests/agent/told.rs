//! What the agent tells: what stands in the way of what it enforces, and the same names everywhere.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use groupcast_policy::text::parse_rule;

use crate::world::{World, eventually, group, interface, nft, place, run, with_world, words};

const DENY: &str = "deny egress udp 5302 to any";
const ALLOW: &str = "egress udp 5301 to any";

fn started(world: &mut World) {
    interface("gcw0");
    world.write(&[group(0, &[ALLOW, DENY], &[]), place("w0", "h0", "10.7.0.2")]);
    world.agent.start();
    world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
}

/// What drops in the older iptables is not in nf_tables, and so was not seen.
#[test]
fn status_tells_of_legacy_iptables_that_drop() {
    with_world(|mut world| {
        started(&mut world);
        let drops = |world: &World| world.agent.status()["foreign"]["drops"].to_string();
        assert_eq!(drops(&world), "[]");
        for program in ["iptables-legacy", "ip6tables-legacy"] {
            if std::process::Command::new(program).args(["-L", "-n"]).output().is_ok_and(|output| output.status.success()) {
                assert_eq!(drops(&world), "[]", "{program}: an empty table drops nothing");
            } else {
                return eprintln!("not run: {program} does not work here");
            }
        }
        run("iptables-legacy", &["-P", "FORWARD", "DROP"]);
        let told = drops(&world);
        assert!(
            told.contains("iptables") && told.contains("FORWARD") && told.contains("drops what it does not accept"),
            "{told}"
        );
        assert!(!told.contains("ip6tables") && !told.contains("INPUT"), "{told}");
        run("iptables-legacy", &["-P", "FORWARD", "ACCEPT"]);
        assert_eq!(drops(&world), "[]");
        run("ip6tables-legacy", &["-A", "INPUT", "-p", "tcp", "--dport", "1", "-j", "DROP"]);
        let told = drops(&world);
        assert!(told.contains("ip6tables") && told.contains("filter") && told.contains("has rules that drop"), "{told}");
        assert!(told.contains("INPUT") && !told.contains("FORWARD"), "{told}");
        run("ip6tables-legacy", &["-F"]);
        // Also where a chain of the user's own does it, and by refusing.
        run("iptables-legacy", &["-N", "mine"]);
        run("iptables-legacy", &["-A", "OUTPUT", "-j", "mine"]);
        run("iptables-legacy", &["-A", "mine", "-j", "REJECT"]);
        let told = drops(&world);
        assert!(told.contains("OUTPUT") && !told.contains("INPUT") && !told.contains("FORWARD"), "{told}");
    });
}

/// A host that forwards nothing enforces a policy that nobody can use, and said nothing about it.
#[test]
fn status_tells_that_the_machine_does_not_forward() {
    with_world(|mut world| {
        started(&mut world);
        // Of this thread's network namespace, and so of the agent's.
        let set = |value: &str| std::fs::write("/proc/sys/net/ipv4/ip_forward", value).unwrap();
        let told = |world: &World| world.agent.status()["foreign"]["forwarding"].to_string();
        set("0");
        assert!(told(&world).contains("net.ipv4.ip_forward is 0"), "{}", told(&world));
        set("1");
        assert!(!told(&world).contains("ipv4"), "{}", told(&world));
    });
}

/// The last good state could not be written, and only the log knew.
#[test]
fn status_tells_that_the_state_disk_is_full() {
    with_world(|mut world| {
        let disk = world.agent.folder.join("disk");
        std::fs::create_dir(&disk).unwrap();
        let text = std::fs::read_to_string(world.agent.folder.join("agent.toml")).unwrap();
        let own = format!("state = '{}/state'", world.agent.folder.display());
        std::fs::write(world.agent.folder.join("agent.toml"), text.replace(&own, &format!("state = '{}/state'", disk.display())))
            .unwrap();
        // A small disk of its own, which goes with the agent.
        let script = format!(
            "mount -t tmpfs -o size=64k,mode=700 none {0} && (head -c 1000000 /dev/zero > {0}/filler; true) 2>/dev/null; exec \"$@\"",
            disk.display()
        );
        world.agent.runner = ["unshare", "-m", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
        interface("gcw0");
        world.write(&[group(0, &[ALLOW, DENY], &[]), place("w0", "h0", "10.7.0.2")]);
        world.agent.start();
        let refused = world.agent.ask(&["workload", "add", "w0", "--interface", "gcw0"]);
        assert!(words(&refused).contains("a restart would forget it"), "{}", words(&refused));
        let told = |world: &World| world.agent.status()["unsaved"].to_string();
        eventually("the disk is told to be full", || told(&world).contains("No space left on device"));
        // The agent's own view of its disk.
        let filler = format!("/proc/{}/root{}/filler", world.agent.id(), disk.display());
        std::fs::remove_file(filler).unwrap();
        eventually("there is room again", || told(&world) == "null");
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
    });
}

/// It printed the kernel's refusal, twice.
#[test]
fn cleanup_beside_a_live_agent_says_so() {
    with_world(|mut world| {
        started(&mut world);
        let refused = world.agent.ask(&["cleanup"]);
        assert_eq!(refused.status.code(), Some(1));
        let said = words(&refused);
        assert!(said.contains("an agent is running") && said.contains("stop it first"), "{said}");
        assert!(!said.contains("not permitted"), "{said}");
        assert!(world.agent.holds("\"gcw0\" : goto p_"));
        // One that answers elsewhere owns the table all the same.
        let text = std::fs::read_to_string(world.agent.folder.join("agent.toml")).unwrap();
        std::fs::write(world.agent.folder.join("agent.toml"), text.replace("agent.sock", "other.sock")).unwrap();
        let said = words(&world.agent.ask(&["cleanup"]));
        assert!(said.contains("another process owns table gc") && said.lines().count() == 1, "{said}");
        std::fs::write(world.agent.folder.join("agent.toml"), text).unwrap();
        world.agent.stop();
        world.agent.does(&["cleanup"]);
        assert!(!nft("list tables").contains("inet gc"));
    });
}

/// A log line names a rule by its key, and nothing else did.
#[test]
fn explain_and_counters_name_rules_as_the_log_does() {
    with_world(|mut world| {
        started(&mut world);
        let key = |line: &str| format!("{:016x}", parse_rule(line).unwrap().key().0);
        for (port, line) in [("udp/5302", DENY), ("udp/5301", ALLOW)] {
            let told = world.agent.does(&["explain", "w0", "192.0.2.1", port]);
            assert!(told.contains(&format!("(in logs: g0/{})", key(line))), "{told}");
            let json = world.agent.does(&["explain", "w0", "192.0.2.1", port, "--json"]);
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            assert_eq!(json["judgements"][0]["rule_key"], format!("g0/{}", key(line)));
        }
        let counters = world.agent.does(&["counters"]);
        assert_eq!(counters.lines().next(), Some("CHAIN\tRULE\tPACKETS\tBYTES"), "{counters}");
        assert!(counters.lines().skip(1).all(|line| line.split('\t').count() == 4), "{counters}");
    });
}

/// Processor time that a process has used, from the kernel.
fn used(id: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    const TICKS_PER_SECOND: u64 = 100;
    let ticks = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 1_000 / TICKS_PER_SECOND)
}

/// Out of files, its loops tried to accept again at once, for ever: a whole processor.
#[test]
fn out_of_files_the_agent_waits_and_answers_again_later() {
    with_world(|mut world| {
        const FILES: usize = 64;
        const PORT: u16 = 9465;
        world.agent.configure(&format!("http = '127.0.0.1:{PORT}'"));
        let limited = format!("ulimit -n {FILES}; exec \"$@\"");
        world.agent.runner = ["sh", "-c", &limited, "sh"].map(str::to_owned).to_vec();
        started(&mut world);
        let path = world.agent.folder.join("agent.sock");
        // Those beyond the limit wait in the sockets' queues, where the loops find them again and again. Who says nothing is hung up on
        // after a while, so they are renewed.
        let mut held: Vec<UnixStream> = Vec::new();
        let mut fill = || {
            held.clear();
            held.extend((0..FILES * 2).filter_map(|_| UnixStream::connect(&path).ok()));
        };
        let files = || std::fs::read_dir(format!("/proc/{}/fd", world.agent.id())).map_or(0, |list| list.count());
        fill();
        eventually("it has no files left", || files() >= FILES - 1);
        let (window, start) = (Duration::from_secs(3), used(world.agent.id()));
        std::thread::sleep(window);
        let spent = used(world.agent.id()) - start;
        drop(held);
        assert!(spent < window / 6, "{spent:?} of processor time in {window:?}");
        eventually("it answers again", || world.agent.ask(&["status"]).status.success());
    });
}

/// Reasons and names of others reached the operator's terminal as they were, escapes and turned text included.
#[test]
fn what_others_wrote_reaches_no_terminal_as_an_escape() {
    with_world(|mut world| {
        started(&mut world);
        let reason = "a test\u{202e}\x1b[2J\u{9b}1m";
        let is_harmless = |said: &str| !said.contains(['\u{202e}', '\x1b', '\u{9b}']);
        world.agent.does(&["audit", reason]);
        assert_eq!(world.agent.status()["reason"], reason, "JSON says what was said");
        for arguments in
            [&["status"][..], &["explain", "w0", "10.7.0.1", "udp/5301", "--json"], &["explain", "w0", "10.7.0.1", "udp/5301"]]
        {
            let said = world.agent.does(arguments);
            assert!(is_harmless(&said), "{arguments:?}: {said:?}");
        }
        let refused = words(&world.agent.ask(&["explain", reason, "w0", "udp/5301"]));
        assert!(is_harmless(&refused) && refused.contains("\\u{202e}"), "{refused:?}");
        let log = std::fs::read_to_string(world.agent.folder.join("log")).unwrap();
        assert!(is_harmless(&log), "{log:?}");
    });
}
