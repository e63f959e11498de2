//! The files themselves.

use groupcast_policy::ids::HostId;

use super::{Error, MONITOR_PORT, Machine, Plan};

/// A file of a machine's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    pub name: String,
    pub text: String,
}

/// Where a machine keeps what it is given, and what it writes itself.
const ETC: &str = "/etc/groupcast";
const STATE: &str = "/var/lib/groupcast";
const UNITS: &str = "/etc/systemd/system";

/// The units of a node, in the order in which they are started.
pub const NODE_UNITS: [&str; 3] = ["groupcast-nats.service", "groupcast-controller.service", "groupcast-gateway.service"];
/// The units of a host.
pub const AGENT_UNITS: [&str; 3] = ["groupcast-boot.service", "groupcast-agent.service", "groupcast-leave.service"];

/// What a node's folder holds besides, readable by root alone.
const NODE_SECRETS: [&str; 4] = ["server-key.pem", "controller.creds", "gateway.creds", "host-signer.json"];
const NODE_OPEN: [&str; 5] = ["nats.conf", "accounts.conf", "groupcast.toml", "server.pem", "authority.pem"];

const CLUSTER: &str = include_str!("../../nats/cluster-node.conf");
const ALONE: &str = include_str!("../../nats/one-server.conf");
const AGENT: [&str; 3] = [
    include_str!("../../../actors/host/systemd/groupcast-boot.service"),
    include_str!("../../../actors/host/systemd/groupcast-agent.service"),
    include_str!("../../../actors/host/systemd/groupcast-leave.service"),
];

/// What is the same for every service that needs no right of the kernel. It runs as root, who owns its secrets, and has none of root's powers:
/// so no user has to be made, and no file can belong to the wrong one.
const CONFINED: &str = "CapabilityBoundingSet=
NoNewPrivileges=yes
UMask=0077
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
";

fn unit(about: &str, after: &str, service: &str) -> String {
    format!(
        "[Unit]\nDescription={about}\nAfter=network-online.target{after}\nWants=network-online.target\nStartLimitIntervalSec=0\n\n\
         [Service]\nType=exec\n{service}Restart=always\nRestartSec=1\n{CONFINED}\n[Install]\nWantedBy=multi-user.target\n"
    )
}

fn node_unit(plan: &Plan, unit_name: &str) -> String {
    let programs = &plan.programs;
    let own = |verb: &str| format!("ExecStart={programs}/groupcast {verb} --config {ETC}/groupcast.toml\nLimitNOFILE=65536\n");
    let after = " groupcast-nats.service";
    match unit_name {
        "groupcast-nats.service" => unit(
            "nats-server of groupcast",
            "",
            &format!(
                "ExecStart={programs}/nats-server -c {ETC}/nats.conf\nExecReload=/bin/kill -HUP $MAINPID\nStateDirectory=groupcast/nats \
                 groupcast/accounts\nStateDirectoryMode=0700\nLimitNOFILE=200000\n"
            ),
        ),
        "groupcast-controller.service" => unit("groupcast controller", after, &own("controller")),
        _ => unit("groupcast gateway", after, &own("gateway")),
    }
}

/// A file that is handed to operators, with what differs here. Each of it must stand in the file.
fn adapted(template: &str, head: &str, changes: &[(&'static str, String)]) -> Result<String, Error> {
    // What the template says about itself is said otherwise here.
    let body = template.split_once("\n\n").map_or(template, |(_, body)| body);
    // Leafnode servers are not part of a plan.
    let body = body.split_once("\n# For leafnode servers").map_or(body, |(body, _)| body);
    let mut text = body.to_owned();
    for (from, to) in changes {
        if !text.contains(from) {
            return Err(Error::Template(from));
        }
        text = text.replace(from, to);
    }
    Ok(format!("{head}\n\n{text}"))
}

fn server(plan: &Plan, node: &Machine) -> Result<String, Error> {
    let head = format!("# The nats-server of node {}. Made by `groupcast bus init`; see docs/deployment.md.", node.name);
    let mut changes = vec![
        ("\"0.0.0.0:4222\"", format!("\"{}\"", node.everywhere(plan.ports.client))),
        ("\"server.pem\"", format!("\"{ETC}/server.pem\"")),
        ("\"server-key.pem\"", format!("\"{ETC}/server-key.pem\"")),
    ];
    if plan.nodes.len() == 1 {
        changes.push(("\"groupcast-bus\"", format!("\"{}\"", node.name)));
        return adapted(ALONE, &head, &changes);
    }
    let routes: Vec<String> = plan.nodes.iter().map(|node| format!("\"nats-route://{}\"", node.at(plan.ports.cluster))).collect();
    changes.extend([
        ("$GROUPCAST_NODE", format!("\"{}\"", node.name)),
        // Nodes tell each other where the others are. By name: a certificate is for the name, and may not be for the address behind it.
        (
            "\"0.0.0.0:6222\"",
            format!("\"{}\"\n  advertise: \"{}\"", node.everywhere(plan.ports.cluster), node.at(plan.ports.cluster)),
        ),
        ("\"authority.pem\"", format!("\"{ETC}/authority.pem\"")),
        ("\"nats-route://bus-1:6222\", \"nats-route://bus-2:6222\", \"nats-route://bus-3:6222\"", routes.join(", ")),
    ]);
    adapted(CLUSTER, &head, &changes)
}

fn list(items: &[String]) -> String {
    let quoted: Vec<String> = items.iter().map(|item| format!("\"{item}\"")).collect();
    format!("[{}]", quoted.join(", "))
}

fn settings(plan: &Plan, node: &Machine) -> String {
    let (servers, replicas) = (list(&plan.servers()), plan.replicas());
    let (api, watched) = (node.everywhere(plan.ports.gateway), node.everywhere(plan.ports.controller));
    let pair = format!("certificate = \"{ETC}/server.pem\"\nkey = \"{ETC}/server-key.pem\"");
    format!(
        "# Controller and gateway of node {}. `groupcast config check` judges it.\n\n\
         [bus]\nservers = {servers}\ncredentials = \"{ETC}/controller.creds\"\ntls_authority = \"{ETC}/authority.pem\"\n\
         # The node's own server, which says how soon it flushes and how much room it has.\nmonitor = [\"http://127.0.0.1:{MONITOR_PORT}\"]\n\n\
         [controller]\nreplicas = {replicas}\n# Health and metrics.\nlisten = \"{watched}\"\n{pair}\n\n\
         [gateway]\nlisten = \"{api}\"\n{pair}\ncredentials = \"{ETC}/gateway.creds\"\nhost_signer = \"{ETC}/host-signer.json\"\n",
        node.name
    )
}

/// Puts the files of a folder where they belong: `before` judges the machine, `judge` the files before anything is started.
fn install(whose: &str, programs: &[String], before: &str, put: &str, judge: &str, units: &[&str]) -> String {
    let there = programs.join(" ");
    format!(
        "#!/bin/sh\n# Installs {whose}. Run it there as root.\nset -eu\ncd \"$(dirname \"$0\")\"\n\
         [ \"$(id -u)\" = 0 ] || {{ echo \"run this as root\" >&2; exit 1; }}\n\
         for program in {there}; do\n  [ -x \"$program\" ] || {{ echo \"$program is not there: install it first\" >&2; exit 1; }}\ndone\n\
         {before}install -d -m 0700 {ETC}\n{put}{judge}install -m 0644 -t {UNITS} {units}\nsystemctl daemon-reload\nsystemctl enable --now {units}\n",
        units = units.join(" "),
    )
}

/// The files of a node that hold no secret. `accounts` is what the authority says to servers.
pub fn node_files(plan: &Plan, node: &Machine, accounts: &str) -> Result<Vec<Text>, Error> {
    let programs = ["groupcast", "nats-server"].map(|name| format!("{}/{name}", plan.programs));
    let put = format!("install -m 0600 -t {ETC} {}\ninstall -m 0644 -t {ETC} {}\n", NODE_SECRETS.join(" "), NODE_OPEN.join(" "));
    // Whoever copies one node's folder to another finds it out here, and not by servers that refuse each other.
    let before = format!("[ -n \"${{ANYWHERE:-}}\" ] || {} config check --here {}\n", programs[0], node.address);
    let judge = format!("{} config check --offline {ETC}/groupcast.toml\n", programs[0]);
    let whose = format!("node {} of the bus, with its controller and its gateway", node.name);
    let install = install(&whose, &programs, &before, &put, &judge, &NODE_UNITS);
    let mut files = vec![
        ("nats.conf", server(plan, node)?),
        ("accounts.conf", accounts.to_owned()),
        ("groupcast.toml", settings(plan, node)),
        ("install", install),
    ];
    files.extend(NODE_UNITS.map(|name| (name, node_unit(plan, name))));
    Ok(files.into_iter().map(|(name, text)| Text { name: name.to_owned(), text }).collect())
}

/// The files of a host that hold no secret.
pub fn host_files(plan: &Plan, host: &HostId) -> Vec<Text> {
    let agent = format!("{}/groupcast-agent", plan.programs);
    let settings = format!(
        "# The agent of host {host}. `groupcast-agent config check` judges it.\n\n\
         host = \"{host}\"\nservers = {}\n# The agent writes it: it renews itself, through one of the gateways, before it expires.\n\
         credentials = \"{STATE}/host.creds\"\ntls_authority = \"{ETC}/authority.pem\"\n\
         gateway = {}\ngateway_authority = \"{ETC}/authority.pem\"\n\
         # Interfaces of workloads. What is behind them is closed until it has a policy.\nclaims = {}\n",
        list(&plan.servers()),
        list(&plan.gateways()),
        list(&plan.claims),
    );
    // A credential that the agent has renewed since is not put back.
    let put = format!(
        "install -m 0644 -t {ETC} agent.toml authority.pem\ninstall -d -m 0700 {STATE}\n\
         [ -e {STATE}/host.creds ] || install -m 0600 -t {STATE} host.creds\n"
    );
    let judge = format!("{agent} --config {ETC}/agent.toml config check --offline\n");
    let whose = format!("the agent of host {host}");
    let install = install(&whose, std::slice::from_ref(&agent), "", &put, &judge, &AGENT_UNITS);
    let units = AGENT_UNITS.iter().zip(AGENT).map(|(name, text)| (*name, text.replace("/usr/bin/groupcast-agent", &agent)));
    let files = [("agent.toml", settings), ("install", install)].into_iter().chain(units);
    files.map(|(name, text)| Text { name: name.to_owned(), text }).collect()
}

/// With which the operator's own commands reach the bus. `folder` holds what it names.
pub fn operator_settings(plan: &Plan, folder: &str) -> String {
    let folder = folder.replace('\\', "\\\\").replace('"', "\\\"");
    format!(
        "# For commands on the bus itself (`--config`, or GROUPCAST_CONFIG): token add --on-bus, doctor --on-bus, export, import.\n\n\
         [bus]\nservers = {}\ncredentials = \"{folder}/controller.creds\"\ntls_authority = \"{folder}/authority.pem\"\n\n\
         [controller]\nreplicas = {}\n\n[gateway]\ncredentials = \"{folder}/gateway.creds\"\n",
        list(&plan.servers()),
        plan.replicas(),
    )
}

/// What a Prometheus server needs to be told.
pub fn prometheus(plan: &Plan, authority: &str) -> String {
    let authority = authority.replace('\'', "''");
    let job = |name: &str, port: u16| {
        let targets: Vec<String> = plan.nodes.iter().map(|node| format!("'{}'", node.at(port))).collect();
        format!(
            "  - job_name: {name}\n    scheme: https\n    tls_config:\n      ca_file: '{authority}'\n    static_configs:\n      \
             - targets: [{}]\n",
            targets.join(", ")
        )
    };
    format!(
        "# Give this to Prometheus, with authority.pem where it says. /metrics needs no token.\nscrape_configs:\n{}{}",
        job("groupcast-gateway", plan.ports.gateway),
        job("groupcast-controller", plan.ports.controller),
    )
}
