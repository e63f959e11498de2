//! CASES.md E 17 to 27 and 31, as far as they are about the agent as a process; one test each, named after the case.

use std::process::{Command, Stdio};

use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_enforce::trial;
use groupcast_messages::{Ack, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::Topic;

use crate::guest::Guest;
use crate::world::{DEADLINE, World, addresses, eventually, group, interface, nft, place, with_world, words};

/// What the revoked flow uses, and what nobody takes away.
const REVOKED: &str = "egress udp 5301 to any";
const KEPT: &str = "egress udp 5399 to any";

/// A workload with its wire, attached and enforced.
pub fn with_guest(world: &mut World) -> Guest {
    let guest = Guest::new("gcw0", 0);
    world.write(&[group(0, &[REVOKED, KEPT], &[]), place("w0", "h0", "10.7.0.2")]);
    world.agent.start();
    world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
    guest
}

/// Whether the documents of the last good state say this somewhere.
fn is_on_disk(world: &World, text: &str) -> bool {
    let Some(state) = world.agent.state() else { return false };
    state.documents.values().any(|document| format!("{document:?}").contains(text))
}

/// A workload from which something was taken away, the agent ended as it is told, and started again without the bus from a disk that knows
/// nothing of it.
pub fn begin_behind(world: &mut World, end: impl FnOnce(&mut World)) -> Guest {
    let guest = with_guest(world);
    eventually("the state is on disk", || is_on_disk(world, "5301"));
    let path = world.agent.folder.join("state");
    let old = std::fs::read(&path).unwrap();
    world.enforce(&[group(0, &[KEPT], &[])]);
    end(world);
    std::fs::write(&path, &old).unwrap();
    world.end_bus();
    world.agent.start();
    guest
}

#[test]
fn e17_an_unknown_major_is_refused_the_old_rules_stay_and_the_host_reports_it() {
    with_world(|mut world| {
        interface("gcw0");
        world.write(&[group(0, &["ingress tcp 443 from group:g0"], &["10.9.9.1"]), place("w0", "h0", "10.7.0.2")]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        let topic = Topic::Members(trial::group_id(0));
        // A message of another major, committed by the bus like any other.
        let (client, subject) = (world.client.clone(), subjects::write(&topic));
        world.runtime.block_on(async {
            client.publish(subject, vec![0x81, 0xa1, b'v', 2].into()).await.unwrap();
            client.flush().await.unwrap();
        });
        let heard = |world: &World| world.agent.status()["heard"]["last_incident"].to_string();
        eventually("it is reported", || heard(&world).contains("members.g0") && heard(&world).contains("Version"));
        assert!(world.agent.holds("10.9.9.1"));
        assert!(world.agent.status()["heard"]["incidents"].as_u64() >= Some(1));
    });
}

/// Somebody else owns a table of our name: every transaction is refused.
struct Thief(std::process::Child);

impl Thief {
    fn steal() -> Self {
        let mut thief = Command::new("nft").arg("-i").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        use std::io::Write;
        writeln!(thief.stdin.as_mut().unwrap(), "delete table inet gc; add table inet gc {{ flags owner; }}").unwrap();
        Self(thief)
    }
}

impl Drop for Thief {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// E 18, and of E 25 what the agent does: the failing host is named by what its acknowledgements say.
#[test]
fn e18_e25_a_refused_transaction_is_retried_not_acknowledged_and_told_with_its_reason() {
    with_world(|mut world| {
        interface("gcw0");
        world.agent.configure("owned_table = false");
        world.write(&[group(0, &["ingress tcp 443 from group:g0"], &["10.9.9.1"]), place("w0", "h0", "10.7.0.2")]);
        let mut acks = {
            let (client, subject) = (world.client.clone(), subjects::ack(&HostId::new("h0").unwrap()));
            world.runtime.block_on(async { client.subscribe(subject).await.unwrap() })
        };
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        let thief = Thief::steal();
        eventually("it is noticed", || world.agent.number("failures") > 0);
        world.write(&[group(0, &["ingress tcp 443 from group:g0"], &["10.9.9.1", "10.9.9.2"])]);
        eventually("it is heard", || world.agent.number("heard_change") == 2);
        let status = world.agent.status();
        assert!(status["last_error"].as_str().is_some_and(|error| error.contains("not permitted")), "{status}");
        assert!(status["change"].as_u64() < Some(2) && status["state"] == "failing", "{status}");
        assert!(status["lag_ms"].as_u64() > Some(0));
        let failures = world.agent.number("failures");
        eventually("it is tried again", || world.agent.number("failures") > failures);
        drop(thief);
        // A table without its owner is gone; what we want is there again.
        eventually("it is in force", || world.agent.number("change") == 2 && world.agent.holds("10.9.9.2"));
        assert_eq!(world.agent.status()["last_error"], serde_json::Value::Null);
        let members = Topic::Members(trial::group_id(0)).hash64();
        let mut told: Vec<(HostState, Option<u64>)> = Vec::new();
        let last = world.runtime.block_on(async {
            loop {
                let message = tokio::time::timeout(DEADLINE, acks.next()).await.expect("an acknowledgement").unwrap();
                let ack = Ack::decode(&message.payload).unwrap();
                let reached = ack.reached.iter().find(|(topic, _)| *topic == members).map(|(_, revision)| *revision);
                told.push((ack.state.clone(), reached));
                let failed = told.iter().any(|(state, _)| matches!(state, HostState::Failing { .. }));
                if failed && ack.state == HostState::Enforcing && reached.is_some() {
                    return reached;
                }
            }
        });
        let failing = told.iter().find(|(state, _)| matches!(state, HostState::Failing { .. })).unwrap();
        assert!(failing.0.reason().contains("not permitted"), "{failing:?}");
        let while_failing = told.iter().filter(|(state, _)| matches!(state, HostState::Failing { .. }));
        assert!(while_failing.clone().all(|(_, reached)| *reached < last), "acknowledged while it failed: {told:?}");
    });
}

/// Of E 25: who waits for a change sees that a host does not enforce it because its operator said so, and why.
#[test]
fn e25_what_the_operator_orders_is_told_with_its_reason() {
    with_world(|mut world| {
        world.write(&[group(0, &[KEPT], &[]), place("w0", "h0", "10.7.0.2")]);
        let mut acks = {
            let (client, subject) = (world.client.clone(), subjects::ack(&HostId::new("h0").unwrap()));
            world.runtime.block_on(async { client.subscribe(subject).await.unwrap() })
        };
        world.agent.start();
        let rows = [
            ("freeze", "frozen"),
            ("lockdown", "lockdown"),
            ("bypass", "bypassed"),
            ("audit", "auditing"),
            ("resume", "enforcing"),
        ];
        for (order, state) in rows {
            world.agent.does(&[order, &format!("because of {order}")]);
            let told = world.runtime.block_on(async {
                loop {
                    let message = tokio::time::timeout(DEADLINE, acks.next()).await.expect("an acknowledgement").unwrap();
                    let told = Ack::decode(&message.payload).unwrap().state;
                    if told.name() == state {
                        return told;
                    }
                }
            });
            assert_eq!(told.reason(), if order == "resume" { String::new() } else { format!("because of {order}") });
        }
        // Kept over a restart, and told again by the next life.
        world.agent.does(&["lockdown", "a fire"]);
        world.agent.kill();
        world.agent.start();
        assert_eq!(
            (world.agent.status()["mode"].as_str(), world.agent.status()["reason"].as_str()),
            (Some("lockdown"), Some("a fire"))
        );
    });
}

/// E 19: what passes does not stop, what is refused does not pass, through every way to end an agent.
#[test]
fn e19_restarts_let_nothing_wrong_through_and_lose_nothing() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let socket = guest.socket();
        assert_eq!(guest.reaches(&socket, &[5302, 5301, 5399]), [5301, 5399]);
        eventually("the state is on disk", || world.agent.folder.join("state").exists());
        for graceful in [true, false, true] {
            if graceful {
                world.agent.stop()
            } else {
                world.agent.kill()
            }
            assert_eq!(guest.reaches(&socket, &[5302, 5301, 5399]), [5301, 5399], "while it is away");
            world.agent.spawn();
            for _ in 0..5 {
                assert_eq!(guest.reaches(&socket, &[5302, 5301, 5399]), [5301, 5399], "while it starts");
            }
            eventually("the agent answers", || world.agent.ask(&["status"]).status.success());
            eventually("the bus is heard", || world.agent.status()["heard"]["cut"].is_array());
            assert_eq!(guest.reaches(&socket, &[5302, 5301, 5399]), [5301, 5399], "after it started");
        }
        // What it missed while it was away is made good.
        world.agent.kill();
        world.write(&[group(0, &[KEPT], &[])]);
        world.agent.start();
        eventually("leftovers are reconciled", || world.agent.ruleset().is_some_and(|ruleset| !ruleset.contains("5301")));
        assert_eq!(guest.reaches(&socket, &[5301, 5399]), [5399]);
    });
}

/// Killed before the disk knew that something was taken away, and started again without the bus: what was taken away does not come back.
/// Ended in peace, the disk knows everything.
#[test]
fn e19_what_was_revoked_just_before_the_end_stays_revoked() {
    with_world(|mut world| {
        let guest = begin_behind(&mut world, |world| {
            world.agent.stop();
            assert!(!is_on_disk(world, "5301"), "ended in peace, and the disk is behind");
        });
        let socket = guest.socket();
        for _ in 0..5 {
            assert_eq!(guest.reaches(&socket, &[5301, 5302, 5399]), [5399]);
        }
        let added = world.agent.ask(&["workload", "add", "w0", "--interface", "gcw0", "--within", "100ms"]);
        assert_eq!(added.status.code(), Some(5));
        assert!(words(&added).contains("keeps it until the bus is heard"), "{}", words(&added));
        assert_eq!(guest.reaches(&socket, &[5301, 5302, 5399]), [5399]);
        assert_eq!(world.agent.number("transactions"), 0);
    });
}

#[test]
fn e22_a_revoked_flow_stops_although_it_is_established() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let socket = guest.socket();
        assert_eq!(guest.reaches(&socket, &[5301, 5399]), [5301, 5399]);
        // Each rule is told of once, with what it has met.
        let counters = world.agent.does(&["counters"]);
        let met: Vec<&str> = counters.lines().filter(|line| line.contains("g0_out\t")).collect();
        let packets = |line: &&str| line.split('\t').nth(2).and_then(|packets| packets.parse::<u64>().ok());
        assert!(met.len() == 2 && met.iter().all(|line| packets(line) >= Some(1)), "{counters}");
        world.enforce(&[group(0, &[KEPT], &[])]);
        assert_eq!(guest.reaches(&socket, &[5301, 5399]), [5399]);
        world.enforce(&[group(0, &[REVOKED, KEPT], &[])]);
        assert_eq!(guest.reaches(&socket, &[5301, 5399]), [5301, 5399]);
        world.agent.does(&["workload", "remove", "w0"]);
        assert_eq!(world.agent.ask(&["workload", "remove", "w0"]).status.code(), Some(1));
    });
}

/// E 23: the whole host, one workload, and explicit denies too.
#[test]
fn e23_audited_what_would_be_denied_passes_and_is_counted() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let socket = guest.socket();
        world.enforce(&[group(0, &[KEPT, "deny egress udp 5301 to any"], &[])]);
        let all: &[u16] = &[5301, 5302, 5399];
        assert_eq!(guest.reaches(&socket, all), [5399]);
        let audited = |world: &World| -> u64 {
            let counters = world.agent.does(&["counters"]);
            let line = counters.lines().find(|line| line.starts_with("audit\t")).unwrap().to_owned();
            line.split('\t').nth(2).unwrap().parse().unwrap()
        };
        world.agent.does(&["audit", "a test"]);
        assert_eq!(world.agent.status()["state"], "auditing");
        assert_eq!(guest.reaches(&socket, all), all);
        assert!(audited(&world) >= 6);
        world.agent.does(&["resume", "it is over"]);
        assert_eq!(guest.reaches(&socket, all), [5399], "passing was not stamped");
        world.agent.does(&["workload", "audit", "w0", "on"]);
        assert!(world.agent.does(&["workload", "list"]).contains("\taudit"));
        assert_eq!(guest.reaches(&socket, all), all);
        world.agent.does(&["workload", "audit", "w0", "off"]);
        assert_eq!(guest.reaches(&socket, all), [5399]);
        assert_eq!(world.agent.ask(&["workload", "audit", "w7", "on"]).status.code(), Some(1));
        // Attached again, by whoever starts it, audited from the beginning.
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0", "--audit"]);
        assert_eq!(guest.reaches(&socket, all), all);
    });
}

#[test]
fn e24_a_change_elsewhere_is_not_received_and_nothing_is_computed() {
    with_world(|mut world| {
        interface("gcw0");
        world.write(&[
            group(0, &["ingress tcp 443 from group:far"], &[]),
            addresses("far", &["10.9.9.1"]),
            place("w0", "h0", "10.7.0.2"),
        ]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        let seen = |world: &World| {
            let status = world.agent.status();
            (status["commit"].as_u64().unwrap(), status["transactions"].as_u64().unwrap(), status["heard"]["revisions"].clone())
        };
        let before = seen(&world);
        for n in 0..20 {
            world.write(&[
                addresses("elsewhere", &[&format!("10.8.0.{n}")]),
                place(&format!("x{n}"), "h1", &format!("10.8.1.{n}")),
            ]);
        }
        // The next change of ours comes after all of these, and alone.
        world.enforce(&[addresses("far", &["10.9.9.1", "10.9.9.2"])]);
        let after = seen(&world);
        assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "{before:?} {after:?}");
        assert_eq!(after.2.as_object().unwrap().len(), before.2.as_object().unwrap().len());
    });
}

/// E 26 and 27: what the disk knows is enforced without the bus; a workload that the cached topics know gets what they say, one that they
/// do not know gets nothing, and whoever adds it is told so in time.
#[test]
fn e26_e27_without_the_bus_the_last_good_state_counts_and_new_workloads_get_what_it_says() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let second = Guest::new("gcw1", 1);
        let third = Guest::new("gcw2", 2);
        world.enforce(&[place("w1", "h0", "10.7.1.2")]);
        let known = |id: &str| {
            let host = world.agent.state()?.documents.get(&Topic::Host(HostId::new("h0").unwrap()))?.content()?.clone();
            let groupcast_policy::doc::Content::Host(placements) = host else { return None };
            Some(placements.contains_key(&groupcast_policy::ids::WorkloadId::new(id).unwrap()))
        };
        eventually("the state is on disk", || known("w1") == Some(true));
        world.end_bus();
        // Down while running.
        assert_eq!(guest.reaches(&guest.socket(), &[5302, 5301, 5399]), [5301, 5399]);
        world.agent.does(&["workload", "add", "w1", "--interface", "gcw1"]);
        assert_eq!(second.reaches(&second.socket(), &[5302, 5301, 5399]), [5301, 5399]);
        // Down from the start.
        world.agent.kill();
        nft("flush ruleset");
        world.agent.start();
        assert!(world.agent.status()["heard"]["connected"] == false);
        assert_eq!(guest.reaches(&guest.socket(), &[5302, 5301, 5399]), [5301, 5399]);
        world.agent.does(&["workload", "add", "w1", "--interface", "gcw1"]);
        assert_eq!(second.reaches(&second.socket(), &[5302, 5301, 5399]), [5301, 5399]);
        let unknown = world.agent.ask(&["workload", "add", "w2", "--interface", "gcw2", "--within", "300ms"]);
        assert_eq!(unknown.status.code(), Some(5));
        assert!(
            words(&unknown).contains("workload w2 is not registered on this host: nothing of it passes"),
            "{}",
            words(&unknown)
        );
        assert!(!third.passes(5399, &guest));
    });
}

/// E 31: closed without a workload, before the agent runs, while it runs and after.
#[test]
fn e31_a_claimed_interface_without_a_workload_lets_nothing_pass_also_before_the_agent_runs() {
    with_world(|mut world| {
        let claimed = Guest::new("gcw5", 5);
        let free = Guest::new("free0", 9);
        assert!(claimed.passes(5399, &free), "nobody has said anything yet");
        world.agent.does(&["boot"]);
        assert!(!claimed.passes(5399, &free), "after the boot");
        world.write(&[group(0, &[KEPT], &[]), place("w5", "h0", "10.7.5.2")]);
        world.agent.start();
        assert!(!claimed.passes(5399, &free), "not announced");
        world.agent.does(&["workload", "add", "w5", "--interface", "gcw5"]);
        assert!(claimed.passes(5399, &free));
        world.agent.does(&["workload", "remove", "w5"]);
        assert!(!claimed.passes(5399, &free), "just removed");
        world.agent.stop();
        assert!(!claimed.passes(5399, &free), "nobody there");
    });
}

/// Topics that a change names do not arrive. After a while its denies and removals are in force, and what it allows waits; told that
/// the rest will come, everything is as the change says.
#[test]
fn the_safe_part_of_an_overdue_change_is_in_force_and_the_rest_waits() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let socket = guest.socket();
        assert_eq!(guest.reaches(&socket, &[5301, 5302, 5399]), [5301, 5399]);
        // Followed topics arrive, but nobody answers requests for others.
        let rules = [REVOKED, KEPT, "egress udp 5302 to any", "deny egress udp 5301 to group:far"];
        world.write_unanswered(&[group(0, &rules, &[]), addresses("far", &["192.0.2.1"])], &Topic::Rules(trial::group_id(0)));
        eventually("it is overdue", || world.agent.status()["overdue"] == true);
        assert_eq!(
            guest.reaches(&socket, &[5301, 5302, 5399]),
            [5399],
            "a deny over an unsynced group denies any, additions wait"
        );
        let told = world.agent.does(&["explain", "w0", "10.7.0.1", "udp/5301"]);
        assert!(told.contains("only the safe part of the newest change is in force"), "{told}");
        // Also after a restart, from the disk: less than before it is never.
        let safe = || {
            let rules = world.agent.state()?.documents.get(&Topic::Rules(trial::group_id(0)))?.content()?.clone();
            let groupcast_policy::doc::Content::Rules(rules) = rules else { return None };
            Some(rules.rules.values().any(|rule| rule.action == groupcast_policy::rule::Action::Deny))
        };
        eventually("it is on disk", || safe() == Some(true));
        world.agent.kill();
        world.agent.start();
        assert_eq!(guest.reaches(&socket, &[5301, 5302, 5399]), [5399]);
    });
}
