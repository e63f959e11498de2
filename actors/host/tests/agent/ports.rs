//! Where a claimed interface is not where its packets can be judged: given to a bridge, or renamed. Closed, refused by name, and told.

use crate::cases::with_guest;
use crate::guest::Guest;
use crate::world::{World, eventually, ip, with_world};

const ALL: &[u16] = &[5301, 5302, 5399];

fn told(world: &World, word: &str) -> bool {
    let status = world.agent.status();
    status["state"] != "enforcing" && status["refused"].to_string().contains(word)
}

/// Whether a datagram gets from one workload to another by the bridge alone.
fn gets_across(from: &Guest, to: &Guest, address: &'static str, sentinel: (&Guest, &Guest, &'static str)) -> bool {
    let heard = to.at(|| std::net::UdpSocket::bind("0.0.0.0:5399").unwrap());
    let (other, third, third_address) = sentinel;
    let proof = third.at(|| std::net::UdpSocket::bind("0.0.0.0:5399").unwrap());
    proof.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    for _ in 0..3 {
        from.at(move || _ = std::net::UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"x", (address, 5399)));
        other.at(move || _ = std::net::UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"x", (third_address, 5399)));
        proof.recv(&mut [0; 8]).expect("the sentinel gets across");
    }
    heard.set_nonblocking(true).unwrap();
    heard.recv(&mut [0; 8]).is_ok()
}

/// On a bridge that nobody claims, a claimed interface was open while status said enforcing: towards the machine, which
/// sees the bridge, and towards other ports, where no hook of the inet family sees anything.
#[test]
fn a_claimed_interface_on_a_bridge_is_closed_refused_by_name_and_told() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let socket = guest.socket();
        assert_eq!(guest.reaches(&socket, ALL), [5301, 5399]);
        let [second, plain, other] = [("gcw5", 5), ("free0", 6), ("free1", 7)].map(|(name, subnet)| Guest::new(name, subnet));
        ip("link add br0 type bridge");
        ip("link set br0 up");
        // All in one subnet, on one bridge; nobody has said that gcw5 is anybody's.
        for (guest, subnet) in [(&second, 5), (&plain, 6), (&other, 7)] {
            guest.at(move || ip(&format!("addr add 10.7.0.{subnet}/24 dev p{subnet}")));
        }
        ip("addr del 10.7.0.1/24 dev gcw0");
        ip("addr add 10.7.0.1/24 dev br0");
        for name in ["gcw0", "gcw5", "free0", "free1"] {
            ip(&format!("link set {name} master br0"));
        }
        let across = |from: &Guest, to: &Guest, address| gets_across(from, to, address, (&plain, &other, "10.7.0.7"));
        assert!(!across(&guest, &second, "10.7.0.5") && !across(&second, &guest, "10.7.0.2"), "between claimed ports");
        assert!(!across(&guest, &plain, "10.7.0.6"), "from a claimed port to another");
        assert!(!across(&plain, &guest, "10.7.0.2"), "from another to a claimed port");
        eventually("it is told", || told(&world, "interface gcw0 belongs to bridge br0") && told(&world, "interface gcw5"));
        // Free again, it is enforced again.
        ip("link set gcw0 nomaster");
        ip("link set gcw5 nomaster");
        ip("addr del 10.7.0.1/24 dev br0");
        ip("addr add 10.7.0.1/24 dev gcw0");
        eventually("it is enforced again", || {
            world.agent.status()["state"] == "enforcing" && world.agent.holds("\"gcw0\" : goto p_")
        });
        assert_eq!(guest.reaches(&guest.socket(), ALL), [5301, 5399]);
        world.agent.stop();
        world.agent.does(&["cleanup"]);
        assert_eq!(crate::world::run("nft", &["list", "tables"]).trim(), "", "something is left behind");
    });
}

/// Towards the machine: a neighbour on the same bridge, whom nobody claims, proves that the machine hears.
#[test]
fn a_claimed_interface_on_a_bridge_does_not_reach_the_machine_behind_it() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let free = Guest::new("free0", 9);
        assert!(guest.passes(5399, &free));
        ip("link add br0 type bridge");
        ip("link set br0 up");
        ip("addr del 10.7.0.1/24 dev gcw0");
        ip("addr add 10.7.0.1/24 dev br0");
        ip("link set gcw0 master br0");
        assert!(!guest.passes(5399, &free) && !guest.passes(5302, &free), "through the bridge");
        world.agent.kill();
        assert!(!guest.passes(5302, &free), "with nobody there");
    });
}

/// Renamed to something that no claim covers, an attached interface was open. What was claimed stays closed, whatever it
/// is called, at once and also with nobody there; called by its name again, it is enforced.
#[test]
fn an_attached_interface_that_is_renamed_stays_closed() {
    with_world(|mut world| {
        let guest = with_guest(&mut world);
        let free = Guest::new("free0", 9);
        let socket = guest.socket();
        assert_eq!(guest.reaches(&socket, ALL), [5301, 5399]);
        let rename = |from: &str, to: &str| {
            ip(&format!("link set {from} down"));
            ip(&format!("link set {from} name {to}"));
            ip(&format!("link set {to} up"));
        };
        rename("gcw0", "wan0");
        assert!(!guest.passes(5302, &free) && !guest.passes(5399, &free), "renamed");
        eventually("it is told", || told(&world, "is called wan0 now"));
        assert!(!guest.passes(5302, &free), "and told");
        world.agent.kill();
        assert!(!guest.passes(5302, &free), "with nobody there");
        world.agent.start();
        assert!(!guest.passes(5302, &free), "after a restart");
        assert!(told(&world, "is called wan0 now"), "{}", world.agent.status());
        rename("wan0", "gcw0");
        eventually("it is enforced again", || world.agent.status()["state"] == "enforcing");
        assert_eq!(guest.reaches(&socket, ALL), [5301, 5399]);
        // A bypass opens it, like everything.
        rename("gcw0", "wan0");
        world.agent.does(&["bypass", "a test"]);
        assert!(guest.passes(5302, &free), "bypassed");
    });
}
