//! From the bus into the kernel, and through every death.

use groupcast_enforce::trial;
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;

use crate::world::{Agent, World, eventually, group, interface, nft, place, run, with_world, words};

const WEB: &str = "ingress tcp 443 from group:g0";

fn web(members: &[&str]) -> groupcast_policy::model::Event {
    group(0, &[WEB], members)
}

fn saved(agent: &Agent) -> bool {
    let held = agent.state().and_then(|state| {
        let members = state.documents.get(&Topic::Members(trial::group_id(0)))?.members()?;
        let holds = |text: &str| members.holds(Prefix::host(text.parse().unwrap()));
        Some(holds("10.9.9.2") && !holds("10.9.9.1"))
    });
    held.unwrap_or_default()
}

/// What holds the policy, and the other way round: change by change into the kernel; killed, the kernel keeps it; without the bus, the
/// disk knows it; cleaned up, nobody else's table is touched.
#[test]
fn from_the_bus_into_the_kernel_and_through_every_death() {
    with_world(|mut world: World| {
        interface("gcw0");
        nft("add table inet neighbour");
        world.write(&[web(&["10.9.9.1"]), place("w0", "h0", "10.1.0.2")]);
        world.agent.start();
        // Registered, but attached nowhere: nothing leads to it.
        eventually("the topics arrive", || world.agent.status()["topics"].as_array().is_some_and(|topics| topics.len() > 2));
        assert!(!world.agent.holds("\"gcw0\""));
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        assert!(world.agent.holds("\"gcw0\" : goto p_") && world.agent.holds("10.9.9.1"));
        assert!(world.agent.does(&["counters"]).contains("a_c_g0_in\t0\t0\t0"));
        assert_eq!(world.agent.does(&["workload", "list"]).trim(), "w0\tgcw0\t\tenforce");
        world.agent.does(&["lockdown", "a test"]);
        assert!(world.agent.status()["mode"] == "lockdown" && world.agent.status()["reason"] == "a test");
        world.agent.does(&["resume", "it is over"]);
        assert!(world.agent.status()["mode"] == "enforce");
        assert!(words(&world.agent.ask(&["freeze", " "])).contains("say why"));
        // Frozen, nothing changes; thawed, everything that was missed is made good.
        world.agent.does(&["freeze", "a test"]);
        world.write(&[web(&["10.9.9.1", "10.9.9.3"])]);
        let number = world.number;
        eventually("the frozen agent hears", || world.agent.number("heard_change") == number);
        assert!(!world.agent.holds("10.9.9.3") && world.agent.number("change") < number);
        world.agent.does(&["resume", "it is over"]);
        eventually("a thawed agent makes good", || world.agent.holds("10.9.9.3"));

        world.write(&[web(&["10.9.9.1", "10.9.9.2"])]);
        eventually("a member joins", || world.agent.holds("10.9.9.2"));
        world.enforce(&[web(&["10.9.9.2"])]);
        assert!(!world.agent.holds("10.9.9.1"));

        // Killed: the kernel keeps everything; with nobody on the bus, the disk knows everything.
        eventually("the state is on disk", || saved(&world.agent));
        let before = world.agent.number("stamp");
        world.agent.kill();
        // Not the whole table: nft 1.0.6 aborts on a look-up in two steps.
        assert!(nft("list set inet gc m4_g0").contains("10.9.9.2"), "the table is gone with the agent");
        world.end_bus();
        world.agent.start();
        assert!(world.agent.holds("\"gcw0\" : goto p_") && world.agent.holds("10.9.9.2"));
        assert_eq!((world.agent.number("stamp"), world.agent.number("transactions")), (before, 0), "a restart changed something");

        // Somebody flushes everything while nobody owns it: the boot brings it back.
        world.agent.kill();
        nft("flush ruleset");
        world.agent.does(&["boot"]);
        assert!(nft("list set inet gc m4_g0").contains("10.9.9.2"));
        assert!(world.agent.does(&["dry-run"]).contains("10.9.9.2"));

        // A damaged file is not believed, and claims stay closed.
        std::fs::write(world.agent.folder.join("state"), b"nonsense").unwrap();
        world.agent.does(&["cleanup"]);
        nft("add table inet neighbour");
        assert!(world.agent.does(&["boot"]).contains("damaged or not a state file"));
        let sets = run("nft", &["list", "sets", "inet"]);
        assert!(sets.contains("gcw*") && !sets.contains("m4_g0"), "{sets}");
        world.agent.does(&["cleanup"]);
        let tables = run("nft", &["list", "tables"]);
        assert!(tables.contains("neighbour") && !tables.contains("inet gc"), "{tables}");
    });
}

/// What a process leaves of a file when the machine dies, and what other versions wrote: all of it is noticed, named, and ignored.
#[test]
fn state_files_that_are_not_whole_and_ours_are_ignored_by_name() {
    with_world(|mut world: World| {
        interface("gcw0");
        world.write(&[web(&["10.9.9.2"]), place("w0", "h0", "10.1.0.2")]);
        world.agent.start();
        world.agent.does(&["workload", "add", "w0", "--interface", "gcw0"]);
        eventually("the state is on disk", || saved(&world.agent));
        world.agent.stop();
        let path = world.agent.folder.join("state");
        let good = std::fs::read(&path).unwrap();
        let patched = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        let rows: [(&str, Vec<u8>, &str); 7] = [
            ("empty", Vec::new(), "damaged"),
            ("cut off", good[..good.len() / 2].to_vec(), "damaged"),
            ("one byte longer", [good.clone(), vec![0]].concat(), "damaged"),
            ("a flipped bit", patched(good.len() - 1, good[good.len() - 1] ^ 1), "damaged"),
            ("zeros, as after a power cut", vec![0; good.len()], "damaged"),
            ("an older version", patched(7, b'0'), "version '0'"),
            ("a newer version", patched(7, b'9'), "version '9'"),
        ];
        for (what, bytes, said) in rows {
            world.agent.does(&["cleanup"]);
            std::fs::write(&path, bytes).unwrap();
            let told = world.agent.does(&["boot"]);
            assert!(told.contains(said), "{what}: {told}");
            let sets = run("nft", &["list", "sets", "inet"]);
            assert!(sets.contains("gcw*") && !sets.contains("m4_g0"), "{what}: {sets}");
        }
        // What was being written when the machine died is beside it, and changes nothing.
        world.agent.does(&["cleanup"]);
        std::fs::write(&path, &good).unwrap();
        std::fs::write(path.with_extension("new"), &good[..10]).unwrap();
        world.agent.does(&["boot"]);
        assert!(nft("list set inet gc m4_g0").contains("10.9.9.2"));
        // And another host's is not ours.
        world.agent.does(&["cleanup"]);
        let text = std::fs::read_to_string(world.agent.folder.join("agent.toml")).unwrap().replace("'h0'", "'h9'");
        std::fs::write(world.agent.folder.join("agent.toml"), text).unwrap();
        assert!(world.agent.does(&["boot"]).contains("another host's"));
        assert!(!run("nft", &["list", "sets", "inet"]).contains("m4_g0"));
    });
}

/// The service manager understands every line of our units. Without it, that cannot be said.
#[test]
fn the_units_are_valid() {
    let folder = std::env::temp_dir().join(format!("groupcast-units-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/systemd");
    let mut units = Vec::new();
    for entry in std::fs::read_dir(source).unwrap() {
        let path = entry.unwrap().path();
        // The binary is not installed here, and what is not there cannot be executed.
        let text = std::fs::read_to_string(&path).unwrap();
        let text = text.replace("/usr/bin/groupcast-agent", env!("CARGO_BIN_EXE_groupcast-agent"));
        let unit = folder.join(path.file_name().unwrap());
        std::fs::write(&unit, text).unwrap();
        units.push(unit);
    }
    assert_eq!(units.len(), 3);
    match std::process::Command::new("systemd-analyze").args(["verify", "--man=no"]).args(&units).output() {
        Err(error) => eprintln!("NOT RUN: the units are not verified, there is no systemd-analyze here ({error})"),
        Ok(output) => {
            let about_ours = |line: &&str| line.contains("groupcast");
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            let complaints: Vec<&str> = words.lines().filter(about_ours).collect();
            assert_eq!(complaints, [""; 0]);
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
