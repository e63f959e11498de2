//! Clients that others wrote for the real servers work against the pretended ones: what they pretend is right.

use std::path::PathBuf;
use std::process::Command;

use groupcast_simulator::fake::serve::{Server, Shared};
use groupcast_simulator::fake::{CloudController, Fake, Neutron};

/// A Python with the clients, installed once into the target folder; `None` where that cannot be done.
fn python() -> Option<PathBuf> {
    static PYTHON: std::sync::OnceLock<Option<PathBuf>> = std::sync::OnceLock::new();
    PYTHON
        .get_or_init(|| {
            let own = std::env::current_exe().ok()?;
            // <target>/<profile>/deps/<test>
            let folder = own.ancestors().nth(3)?.join("python-clients/venv");
            let python = folder.join("bin/python");
            let imports = |python: &PathBuf| {
                let test = Command::new(python).args(["-c", "import cloudfoundry_client, openstack"]).output();
                test.is_ok_and(|output| output.status.success())
            };
            if imports(&python) {
                return Some(python);
            }
            let made = Command::new("python3").args(["-m", "venv"]).arg(&folder).status();
            let pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "install", "cloudfoundry-client", "openstacksdk"];
            let installed = made.and_then(|_| Command::new(&python).args(pip).status());
            if installed.is_ok_and(|status| status.success()) && imports(&python) {
                return Some(python);
            }
            eprintln!("\nSKIPPED: cloudfoundry-client and openstacksdk cannot be installed into {}", folder.display());
            eprintln!("SKIPPED: whether the fakes are faithful to clients of others was NOT tested\n");
            None
        })
        .clone()
}

/// Runs a script against a server, with its URL as argument; both tests of one kind wait for one installation.
async fn run<F: Fake>(fake: F, script: &'static str) -> Option<Shared<F>> {
    let python = tokio::task::spawn_blocking(python).await.expect("asked")?;
    let shared = Shared::new(fake);
    let server = Server::start(0, None, true, shared.clone()).await.expect("it serves");
    let url = server.url();
    let output = tokio::task::spawn_blocking(move || Command::new(python).args(["-c", script, &url]).output());
    let output = output.await.expect("it ran").expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    Some(shared)
}

#[tokio::test(flavor = "multi_thread")]
async fn cloudfoundry_client_works() {
    let Some(shared) = run(CloudController::default(), CLOUD_FOUNDRY).await else { return };
    let fake = shared.lock();
    let names: Vec<&str> = fake.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names.len(), 60, "{names:?}");
    let renamed = fake.group("renamed").expect("there");
    assert_eq!((renamed.running, &renamed.running_spaces), (true, &vec!["space-2".to_owned()]));
}

const CLOUD_FOUNDRY: &str = r#"
import sys
from cloudfoundry_client.client import CloudFoundryClient
from cloudfoundry_client.v3.entities import ToManyRelationship, ToOneRelationship
from cloudfoundry_client.v3.security_groups import Rule, RuleProtocol, GloballyEnabled
client = CloudFoundryClient(sys.argv[1], client_id="groupcast", client_secret="secret")
client.init_with_client_credentials()
groups = client.v3.security_groups
for number in range(61):
    groups.create(f"g{number}", [Rule(RuleProtocol.TCP, "10.0.0.0/24", ports="443")], GloballyEnabled(running=False))
listed = list(groups.list(order_by="created_at", per_page=7))
assert [g["name"] for g in listed] == [f"g{n}" for n in range(61)], [g["name"] for g in listed]
assert len({g["guid"] for g in listed}) == 61
one = groups.get(listed[3]["guid"])
assert one["rules"][0]["ports"] == "443", one
groups.update(one["guid"], name="renamed", globally_enabled=GloballyEnabled(running=True))
groups.bind_running_security_group_to_spaces(one["guid"], ToManyRelationship("space-1", "space-2"))
groups.unbind_running_security_group_from_space(one["guid"], ToOneRelationship("space-1"))
groups.remove(listed[4]["guid"])
assert len(list(groups.list())) == 60
"#;

#[tokio::test(flavor = "multi_thread")]
async fn openstacksdk_works() {
    let Some(shared) = run(Neutron::default(), OPENSTACK).await else { return };
    let fake = shared.lock();
    assert_eq!((fake.all("security-groups").count(), fake.all("ports").count(), fake.all("address-groups").count()), (11, 1, 1));
}

const OPENSTACK: &str = r#"
import sys, openstack
cloud = openstack.connect(auth_url=sys.argv[1] + "/v3", username="groupcast", password="secret", project_name="project",
    user_domain_name="Default", project_domain_name="Default", region_name="RegionOne")
network = cloud.network
groups = [network.create_security_group(name=f"g{n}", description="d") for n in range(12)]
rule = network.create_security_group_rule(security_group_id=groups[0].id, direction="ingress", ether_type="IPv4", protocol="tcp",
    port_range_min=22, port_range_max=22, remote_ip_prefix="10.0.0.0/8")
assert any(r["id"] == rule.id for r in network.get_security_group(groups[0].id).security_group_rules)
before = network.get_security_group(groups[0].id).revision_number
network.delete_security_group_rule(rule.id)
assert network.get_security_group(groups[0].id).revision_number > before
assert {g.id for g in network.security_groups(limit=5)} == {g.id for g in groups}
assert network.find_security_group("g3").id == groups[3].id
addresses = network.create_address_group(name="ag", addresses=["192.0.2.0/24"])
port = network.create_port(network_id="net1", name="p", security_groups=[groups[1].id], fixed_ips=[{"ip_address": "10.0.0.9"}])
network.update_port(port, allowed_address_pairs=[{"ip_address": "10.9.0.0/16"}])
assert [p.id for p in network.ports()] == [port.id]
try:
    network.delete_security_group(groups[1].id, ignore_missing=False)
    raise SystemExit("deleted although in use")
except openstack.exceptions.ConflictException:
    pass
network.delete_security_group(groups[2].id, ignore_missing=False)
"#;
