//! What the agent has on disk is its own: nobody else reads it, plants it or leads it elsewhere.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::world::{World, eventually, group, interface, place, with_world, words};

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn started(world: &mut World) {
    interface("gcw0");
    world.write(&[group(0, &["egress udp 5301 to any"], &[]), place("w0", "h0", "10.7.0.2")]);
    world.agent.start();
    world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
}

/// They were readable by everybody, and what is in them is who may talk to whom.
#[test]
fn state_and_orders_are_readable_by_their_owner_alone() {
    with_world(|mut world| {
        started(&mut world);
        for name in ["state", "state.orders"] {
            let path = world.agent.folder.join(name);
            eventually(&format!("{name} is written"), || path.exists());
            assert_eq!(mode(&path), 0o600, "{name}");
        }
    });
}

/// A symbolic link beside the state led the agent, which is root, to overwrite any file.
#[test]
fn a_planted_link_is_replaced_and_not_followed() {
    with_world(|mut world| {
        let victim = world.agent.folder.join("victim");
        std::fs::write(&victim, "precious").unwrap();
        for name in ["state.new", "state.orders.new", "state.enrolments.new"] {
            symlink(&victim, world.agent.folder.join(name)).unwrap();
        }
        started(&mut world);
        let state = world.agent.folder.join("state");
        eventually("the state is written", || state.exists());
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert!(!state.is_symlink() && !world.agent.folder.join("state.orders").is_symlink());
    });
}

/// Whoever can write the folder can give the agent another state, other orders, or another socket.
#[test]
fn a_folder_that_others_can_write_is_refused_by_name() {
    with_world(|world: World| {
        let folder = world.agent.folder.join("open");
        std::fs::create_dir(&folder).unwrap();
        let text = std::fs::read_to_string(world.agent.folder.join("agent.toml")).unwrap();
        let own = world.agent.folder.display().to_string();
        let (state, socket) = (format!("state = '{own}/state'"), format!("socket = '{own}/agent.sock'"));
        let elsewhere = |which: &str| {
            let name = which.split(" = ").next().unwrap();
            let file = which.rsplit('/').next().unwrap();
            text.replace(which, &format!("{name} = '{}/{file}", folder.display()))
        };
        for (what, written) in [("state", elsewhere(&state)), ("socket", elsewhere(&socket))] {
            std::fs::write(world.agent.folder.join("agent.toml"), written).unwrap();
            for bits in [0o777, 0o1777, 0o757] {
                std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(bits)).unwrap();
                let refused = world.agent.ask(&["run"]);
                let said = words(&refused);
                assert!(!refused.status.success() && said.contains("others can write"), "{what} {bits:o}: {said}");
                assert!(said.contains(&folder.display().to_string()) && said.contains("chmod go-w"), "{what} {bits:o}: {said}");
            }
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        std::fs::write(world.agent.folder.join("agent.toml"), text).unwrap();
        world.agent.does(&["boot"]);
    });
}
