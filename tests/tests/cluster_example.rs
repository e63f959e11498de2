//! `examples/cluster` as an administrator runs it: machines of namespaces, three nodes, two hosts, real units' commands and real packets. Then what a new
//! administrator gets wrong, each with what they are told.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use groupcast_bus_config::server;
use groupcast_tests::control::{agent_binary, binary};
use groupcast_tests::field::possible;
use groupcast_tests::gateway::Folder;

/// Waits of any kind end here: elections, and clients that leave a node that is gone, take their time on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);
/// What the issue asks for.
const COMMANDS_MAX: usize = 15;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/cluster").join(name).canonicalize().expect("it is there")
}

struct Machines {
    process: Child,
    /// What they keep, and beside it nothing.
    folder: Folder,
}

impl Machines {
    fn up() -> Self {
        assert_eq!(binary().parent(), agent_binary().parent(), "both are built in one place");
        let folder = Folder::new("cluster");
        let process = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "--"])
            .arg(example("machines"))
            .arg("up")
            .env("MACHINES", folder.0.join("m"))
            .env("GROUPCAST_BIN_DIR", binary().parent().expect("a folder"))
            .env("GROUPCAST_NATS_SERVER", server::find().expect("a server"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("they start");
        let mut machines = Self { process, folder };
        let out = machines.process.stdout.take().expect("a pipe");
        let ready = BufReader::new(out).lines().map_while(Result::ok).any(|line| line == "ready");
        assert!(ready, "the machines cannot be made");
        machines
    }

    /// Runs a shell command on one, to its end.
    fn on(&self, name: &str, text: &str) -> Output {
        let mut command = Command::new(example("machines"));
        command.args(["on", name, text]).env("MACHINES", self.folder.0.join("m")).stdin(Stdio::null());
        command.output().expect("it runs")
    }

    /// The same, which must succeed; what it prints.
    fn done(&self, name: &str, text: &str) -> String {
        let output = self.on(name, text);
        assert!(output.status.success(), "{name}: {text}: {}{}", said(&output), self.logs());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The same, which must fail with these words.
    fn refused(&self, name: &str, text: &str, words: &[&str]) {
        let output = self.on(name, text);
        let said = said(&output);
        assert!(!output.status.success(), "{name}: {text} succeeds: {said}");
        for word in words {
            assert!(said.contains(word), "{name}: {text} does not say {word:?}: {said}");
        }
    }

    fn logs(&self) -> String {
        let files = std::fs::read_dir(self.folder.0.join("m/logs")).expect("logs").flatten();
        let last =
            |text: String| text.lines().rev().take(15).map(|line| format!("{line}\n")).collect::<Vec<_>>().into_iter().rev();
        files
            .map(|file| {
                let text = std::fs::read_to_string(file.path()).unwrap_or_default();
                format!("--- {}\n{}", file.file_name().to_string_lossy(), last(text).collect::<String>())
            })
            .collect()
    }

    /// The example, as it stands; what it says.
    fn set_up(&self) -> String {
        self.run(&example("set-up"))
    }

    /// A script that is written like the example.
    fn run(&self, script: &Path) -> String {
        let on = example("machines");
        let variables = format!("MACHINES={}", self.folder.0.join("m").display());
        self.done("admin", &format!("{variables} ON='{} on' LOGIN= {} 2>&1", on.display(), script.display()))
    }

    fn connects(&self, from: &str, to: &str) -> bool {
        let (host, port) = to.split_once(':').expect("a port");
        self.on(from, &format!("timeout 2 bash -c '</dev/tcp/{host}/{port}'")).status.success()
    }

    fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < DEADLINE, "{what}: not in time\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_example_is_as_short_as_it_says() {
    let text = std::fs::read_to_string(example("set-up")).expect("readable");
    let (_, commands) = text.split_once("set -x\n").expect("where they begin");
    let count = commands.lines().filter(|line| !line.trim().is_empty()).count();
    assert!((1..=COMMANDS_MAX).contains(&count), "{count} commands");
    assert!(!commands.contains("for "), "one command a line");
    assert!(!commands.contains("until ") && !commands.contains("sleep"), "commands wait by themselves");
}

#[test]
fn from_nothing_to_a_group_in_force_on_three_nodes() {
    if !possible() {
        return;
    }
    let machines = Machines::up();
    machines.set_up();
    // Both ports are listened on; what is allowed is what the group says.
    for port in [5432, 5433] {
        machines.done("db-1", &format!("groupcast echo 10.77.2.2:{port} db-1 >/dev/null 2>&1 & sleep 0.1"));
    }
    machines.done("web-1", "groupcast echo 10.77.1.2:80 web-1 >/dev/null 2>&1 & sleep 0.1");
    machines.eventually("the database is reached", || machines.connects("web-1", "10.77.2.2:5432"));
    assert!(!machines.connects("web-1", "10.77.2.2:5433"), "a port that no rule allows");
    assert!(!machines.connects("db-1", "10.77.1.2:80"), "a direction that no rule allows");
    // Every stream is on three nodes, and every node flushes what it acknowledges.
    let operator = "cluster/operator/groupcast.toml";
    let shown = machines.done("admin", &format!("groupcast doctor --on-bus --config {operator}"));
    assert!(shown.contains("a write is answered"), "{shown}");
    for node in ["n1", "n2", "n3"] {
        let conf = machines.done(node, "cat /etc/groupcast/nats.conf; stat -c '%a %n' /etc/groupcast /etc/groupcast/*.creds");
        assert!(conf.contains("sync_interval: always") && conf.contains("700 /etc/groupcast\n"), "{conf}");
        assert!(conf.contains("600 /etc/groupcast/controller.creds"), "{conf}");
        let log = std::fs::read_to_string(machines.folder.0.join(format!("m/logs/{node}.groupcast-nats.log"))).expect("a log");
        assert!(!log.contains("TLS route handshake error"), "nodes tell each other addresses that no certificate is for: {log}");
        let good = machines.done(node, "groupcast config check");
        assert!(good.contains("groupcast.toml is good") && !good.contains("not asked"), "{good}");
    }
    for host in ["h1", "h2"] {
        assert!(machines.done(host, "groupcast-agent config check").contains("agent.toml is good"));
    }
    metrics(&machines);
}

/// Before any host has joined nothing is bad, so that `doctor` can be waited with. Then a node dies, without a word and for good: commands turn to the
/// other gateways by themselves, those that cannot be sent twice too.
#[test]
fn commands_go_on_without_hosts_and_without_the_first_node() {
    if !possible() {
        return;
    }
    let machines = Machines::up();
    // The example up to where hosts are granted.
    let text = std::fs::read_to_string(example("set-up")).expect("readable");
    let (begin, _) = text.split_once("groupcast host add").expect("where hosts begin");
    let script = machines.folder.0.join("begin");
    std::fs::write(&script, begin).expect("written");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("made");
    machines.run(&script);
    let said = std::cell::RefCell::new(String::new());
    machines.eventually("doctor finds nothing bad where there is no host", || {
        let output = machines.on("admin", "groupcast doctor");
        *said.borrow_mut() = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success()
    });
    assert!(said.borrow().contains("ok   hosts: none are registered"), "{}", said.borrow());
    // Cut off, so that nobody even refuses a connection.
    machines.done("n1", "ip link set eth0 down");
    for command in [
        "groupcast get groups",
        "groupcast host add h1 --networks 10.77.1.0/24",
        "groupcast host token h1",
        &format!("groupcast apply -f {}", example("shop.yaml").display()),
        "groupcast delete group web",
    ] {
        // What leads may have to change first: until then a gateway says that it is not known, and that is not repeated for a token.
        machines.eventually(command, || machines.on("admin", command).status.success());
    }
    let output = machines.on("admin", "groupcast host token h1");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && words.contains("https://n1:4270 cannot be reached"), "{words}");
    assert!(words.contains("at the next gateway"), "{words}");
}

/// Controllers show metrics where gateways do: over TLS, without a token, and nothing else.
fn metrics(machines: &Machines) {
    let asked = |path: &str| {
        let ask = format!("curl -sS --cacert cluster/authority.pem -w '%{{http_code}}' https://n2:{path}");
        machines.done("admin", &ask)
    };
    if machines.on("admin", "command -v curl").status.success() {
        // A controller may still wait for streams that the others have made.
        machines.eventually("the controller shows metrics", || asked("4280/metrics").contains("groupcast_leading"));
        // Counted once the first request was answered.
        machines.eventually("the gateway is ready", || asked("4270/readyz").ends_with("200"));
        let shown = asked("4270/metrics");
        assert!(shown.contains("groupcast_http_requests_total"), "{shown}");
        let closed = asked("4280/v1/status");
        assert!(closed.ends_with("403") && closed.contains("token_file"), "{closed}");
        machines.eventually("the controller is ready", || asked("4280/readyz").ends_with("200"));
        machines.refused("admin", "curl -sSf https://n2:4280/metrics", &["certificate"]);
    }
}

/// What a new administrator gets wrong is named at once, with what to do, and breaks nothing that runs.
#[test]
fn usual_mistakes_are_named() {
    if !possible() {
        return;
    }
    let machines = Machines::up();
    machines.set_up();
    // The folder is neither overwritten nor half made.
    let refused = |text: &str, words: &[&str]| machines.refused("admin", text, words);
    refused("groupcast bus init --nodes n1 --out cluster", &["cluster is there already", "groupcast bus add"]);
    refused("groupcast bus init --nodes n1,n2 --out two", &["2 nodes", "1 server, or 3 or 5"]);
    refused("groupcast bus init --nodes 10.0.0.1 --out two", &["write NAME=10.0.0.1"]);
    refused("groupcast bus init --nodes n1:4222 --out two", &["--client-port"]);
    refused("groupcast bus init --nodes n1,n2,n1 --out two", &["n1 is named twice"]);
    refused("groupcast bus init --nodes n1 --certificates nowhere --out two", &["nowhere/authority.pem cannot be read"]);
    refused("ls two .two*", &["No such file"]);
    // Another node's folder.
    refused(
        &format!("tar -C cluster -c n1 | {} 'tar -x --no-same-owner && sh n1/install'", on(&machines, "n2")),
        &["does not have the address n1", "the files of another machine"],
    );
    machines.done("n2", "groupcast config check");
    // Files of the node, one after the other made wrong and right again.
    let wrong = |make: &str, words: &[&str]| {
        let copied = "rm -rf x && cp -rp /etc/groupcast x && sed 's|/etc/groupcast|x|' x/groupcast.toml > x/g.toml";
        machines.refused("n2", &format!("{copied} && {make} && groupcast config check x/g.toml"), words);
    };
    let right = "rm -rf x && cp -rp /etc/groupcast x && sed 's|/etc/groupcast|x|' x/groupcast.toml > x/g.toml && groupcast config check x/g.toml";
    machines.done("n2", right);
    wrong("cp x/gateway.creds x/controller.creds", &["bus.credentials", "are those of a gateway, and this is a controller"]);
    wrong("sed -i \"s|\\[bus\\]|[bus]\\nname = 'n9'|\" x/g.toml", &["are those of n2, not of n9: leave the name out"]);
    wrong("chown 1234 x/controller.creds", &["belongs to user 1234: chown"]);
    wrong("chmod 644 x/server-key.pem", &["others can read: chmod 600"]);
    wrong("rm x/host-signer.json", &["gateway.host_signer names", "cannot be read"]);
    wrong("sed -i s/n2:4222/n7:4222/ x/g.toml", &["n7 is not known here", "/etc/hosts"]);
    wrong("sed -i s/n2:4222/n2:4223/ x/g.toml", &["n2:4223 does not answer", "firewall"]);
    wrong(
        "sed -i s/n2:4222/n2:4270/ x/g.toml",
        &["n2:4270 takes the connection and says nothing", "another program has the port"],
    );
    wrong("sed -i s/n2:4222/10.80.0.12:4222/ x/g.toml", &["not for this name (it is for n2, localhost, 127.0.0.1"]);
    wrong("groupcast bus init --nodes n2 --out other && cp other/authority.pem x/", &["signed by another authority"]);
    wrong("rm -rf other; groupcast bus init --nodes n2 --out other && cp other/n2/server-key.pem x/", &["do not serve"]);
    wrong(
        "rm -rf other; groupcast bus init --nodes n2 --out other && cp other/n2/*.creds x/",
        &["refuses them", "the authority of this"],
    );
    let short =
        "groupcast credential add --role gateway --name n2 --life 1s --authority other/authority.json --out x/e.creds && sleep 2";
    wrong(&format!("{short} && mv x/e.creds x/gateway.creds"), &["gateway.credentials", "expired on", "clock"]);
    // Processes say the same when they start, and end.
    let start = "timeout 20 groupcast controller --config x/g.toml --listen 127.0.0.1:0";
    machines.refused(
        "n2",
        &format!("{right} && cp x/gateway.creds x/controller.creds && {start}"),
        &["and this is a controller"],
    );
    machines.refused("n2", &format!("{right} && {start} --name n9"), &["are those of n2, not of n9"]);
    machines.refused(
        "n2",
        "timeout 20 groupcast gateway --config /etc/groupcast/groupcast.toml",
        &["another program has the port", "ss -ltnp"],
    );
    let elsewhere = "timeout 20 groupcast gateway --config /etc/groupcast/groupcast.toml --api-listen 10.80.0.99:4270";
    machines.refused("n2", elsewhere, &["this machine does not have the address"]);
    // Agents too.
    let agent = |make: &str, words: &[&str]| {
        let copied = "rm -rf x && cp -rp /etc/groupcast x && cp /var/lib/groupcast/host.creds x/";
        let named = "sed -e 's|/etc/groupcast|x|' -e 's|/var/lib/groupcast|x|' x/agent.toml > x/a.toml";
        machines.refused(
            "h1",
            &format!("{copied} && {named} && {make} && groupcast-agent --config x/a.toml config check"),
            words,
        );
    };
    agent("sed -i 's/host = \"h1\"/host = \"h2\"/' x/a.toml", &["are those of host h1, and host is h2: set host"]);
    agent("sed -i s/n1:4270/n1:4271/ x/a.toml", &["gateway: n1:4271 does not answer"]);
    agent("sed -i s/n3:4222/n3:4225/ x/a.toml", &["servers: n3:4225 does not answer"]);
    machines_are_added(&machines);
}

fn on(machines: &Machines, name: &str) -> String {
    format!("MACHINES={} {} on {name}", machines.folder.0.join("m").display(), example("machines").display())
}

/// What is added fits what is there, can be repeated, and leaves what was edited.
fn machines_are_added(machines: &Machines) {
    let said = |text: &str| said(&machines.on("admin", &format!("{text} 2>&1")));
    machines.refused("admin", "groupcast bus add --nodes n4 --out cluster", &["4 nodes"]);
    machines.refused(
        "admin",
        "groupcast bus init --nodes n8 --out alone && groupcast bus add --nodes n6,n7 --out alone",
        &["does not become one of three"],
    );
    machines.refused("admin", "groupcast bus add --nodes n1=10.9.9.9 --out cluster", &["node n1 is there with address n1"]);
    let made = said("groupcast bus add --hosts h3 --out cluster");
    assert!(made.contains("made h3") && !made.contains("changed"), "{made}");
    assert!(said("groupcast bus add --hosts h3 --out cluster").contains("there already"));
    let made = said("echo '# mine' >> cluster/h2/agent.toml; groupcast bus add --nodes n4,n5 --out cluster");
    assert!(
        made.contains("made n4, n5") && made.contains("n1/nats.conf") && made.contains("left as it is: h2/agent.toml"),
        "{made}"
    );
    let routes = machines.done("admin", "grep routes cluster/n1/nats.conf cluster/n4/nats.conf; cat cluster/h1/agent.toml");
    assert!(routes.matches("nats-route://n5:6222").count() == 2 && routes.contains("n5:4222"), "{routes}");
    // A credential that is added works, one that is revoked ends.
    let add = "groupcast credential add --role controller --name c9 --authority cluster/authority.json --out c9.creds";
    machines.done("admin", add);
    machines.refused("admin", add, &["c9.creds is there already"]);
    let listed = machines.done("admin", "groupcast credential list --authority cluster/authority.json");
    assert!(listed.contains("c9") && listed.contains("never"), "{listed}");
    let export = "groupcast export --config cluster/operator/groupcast.toml --credentials c9.creds";
    machines.done("admin", export);
    let revoke = "groupcast credential revoke --role controller --name c9 --authority cluster/authority.json --config \
                  cluster/operator/groupcast.toml";
    machines.done("admin", revoke);
    machines.eventually("the revoked credential is refused", || {
        !machines.on("admin", &format!("timeout 5 {export}")).status.success()
    });
    machines.refused(
        "admin",
        "groupcast credential revoke --role controller --name c8 --authority cluster/authority.json",
        &["no such credential"],
    );
    // Certificates are made anew, and are believed by what is there.
    machines.done("admin", "groupcast bus renew n2 --out cluster");
    let again =
        format!("tar -C cluster -c n2 | {} 'tar -x --no-same-owner && cp n2/server*.pem /etc/groupcast/'", on(machines, "n2"));
    machines.done("admin", &again);
    machines.done("n2", "systemctl reload groupcast-nats && groupcast config check");
}
