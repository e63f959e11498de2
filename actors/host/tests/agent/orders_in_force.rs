//! What is ordered on the host is in force when the order is answered, also while the kernel knows more than the disk.

use crate::cases::begin_behind;
use crate::guest::Guest;
use crate::world::{World, with_world};

const ALL: &[u16] = &[5301, 5302, 5399];

/// Killed before the disk knew what was taken away, started again without the bus. What was revoked (5301) is in the disk's state.
fn stale(world: &mut World, last: impl FnOnce(&mut World)) -> Guest {
    begin_behind(world, |world| {
        last(world);
        world.agent.kill();
    })
}

/// `resume` was answered, status said enforcing, and what audit had let pass went on passing until the bus returned.
#[test]
fn resumed_without_the_bus_nothing_is_audited_and_nothing_revoked_comes_back() {
    with_world(|mut world| {
        let guest = stale(&mut world, |world| _ = world.agent.does(&["audit", "a test"]));
        let socket = guest.socket();
        assert_eq!(guest.reaches(&socket, ALL), ALL, "audited");
        world.agent.does(&["resume", "it is over"]);
        assert_eq!(guest.reaches(&socket, ALL), [5399], "resumed");
        assert_eq!(world.agent.status()["state"], "enforcing");
        world.agent.does(&["audit", "a test"]);
        assert_eq!(guest.reaches(&socket, ALL), ALL, "audited again");
        // What a mode closes and opens again is what was there, not what the disk still gives.
        let free = Guest::new("free0", 9);
        world.agent.does(&["lockdown", "a test"]);
        assert!(!guest.passes(5399, &free), "locked down");
        world.agent.does(&["resume", "it is over"]);
        assert_eq!(guest.reaches(&socket, ALL), [5399], "resumed after a lockdown");
        world.agent.does(&["bypass", "a test"]);
        assert_eq!(guest.reaches(&socket, ALL), ALL, "bypassed");
        world.agent.does(&["resume", "it is over"]);
        assert_eq!(guest.reaches(&socket, ALL), [5399], "resumed after a bypass");
        assert!(world.agent.ruleset().is_some(), "the kernel holds something else than it should");
    });
}

/// The same of who is attached and audited.
#[test]
fn removed_without_the_bus_a_workload_is_closed() {
    with_world(|mut world| {
        let guest = stale(&mut world, |world| _ = world.agent.does(&["workload", "audit", "w0", "on"]));
        let (socket, free) = (guest.socket(), Guest::new("free0", 9));
        assert_eq!(guest.reaches(&socket, ALL), ALL, "audited");
        world.agent.does(&["workload", "audit", "w0", "off"]);
        assert_eq!(guest.reaches(&socket, ALL), [5399], "not audited any more");
        world.agent.does(&["workload", "audit", "w0", "on"]);
        assert_eq!(guest.reaches(&socket, ALL), ALL, "audited again");
        world.agent.does(&["workload", "remove", "w0"]);
        assert!(!guest.passes(5399, &free) && !guest.passes(5301, &free), "removed");
        // What could be added from the disk alone could bring back what was revoked: whoever adds it is told to wait.
        let added = world.agent.ask(&["workload", "add", "w0", "--interface", "gcw0", "--within", "100ms"]);
        assert_eq!(added.status.code(), Some(5));
        assert!(!guest.passes(5301, &free), "added");
        assert!(world.agent.ruleset().is_some(), "the kernel holds something else than it should");
    });
}
