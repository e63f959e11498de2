//! A whole installation as a plan, and the text of the files that each of its machines needs. Nothing here makes a key or touches a disk:
//! `groupcast bus init` does, and writes what this says.
//!
//! One folder belongs to one machine, and an `install` script in it puts everything where it belongs. So an operator copies folders and never
//! a single secret.

use std::collections::BTreeSet;
use std::net::IpAddr;

use groupcast_policy::ids::HostId;
use serde::{Deserialize, Serialize};

mod text;

pub use text::{AGENT_UNITS, NODE_UNITS, Text, host_files, node_files, operator_settings, prometheus};

/// Sizes of a bus: one server, or as many as keep a majority when some are lost.
pub const NODE_COUNTS: [usize; 3] = [1, 3, 5];
/// Hosts of one `groupcast bus init`; others are added later, or join with a token.
pub const HOSTS_MAX: usize = 10_000;
/// Longest name that DNS has.
const ADDRESS_BYTES_MAX: usize = 253;
/// Copies of each stream, where there are as many servers.
const REPLICAS: usize = 3;
/// A folder that is no machine's.
pub const OPERATOR: &str = "operator";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{count} nodes: a bus has 1 server, or 3 or 5, so that a majority is left when one is lost")]
    NodeCount { count: usize },
    #[error("{count} hosts: at most {HOSTS_MAX} at once")]
    HostCount { count: usize },
    #[error("{0} is named twice: every machine needs a name of its own")]
    Twice(HostId),
    #[error("{text:?} is an address: write NAME={text}, the name is what the machine is called on the bus")]
    NoName { text: String },
    #[error("{text:?}: {why}; write a host name, or NAME=ADDRESS, where NAME has letters, digits, - and _")]
    Name { text: String, why: String },
    #[error(
        "{text:?}: {address:?} is no host name and no IP address; ports are said with --client-port, --cluster-port and --gateway-port"
    )]
    Address { text: String, address: String },
    #[error("{OPERATOR} is the name of the operator's own folder: call the machine otherwise")]
    Reserved,
    #[error("port {0} is given to two of the servers of one machine: choose another")]
    SamePort(u16),
    #[error("the template of the server's configuration does not say {0:?}")]
    Template(&'static str),
    #[error("{folder:?} cannot be written into a configuration: use an absolute path of letters, digits and ._-/")]
    Folder { folder: String },
    #[error("interfaces {claim:?}: write a name, or the beginning of one and *, such as tap*")]
    Claim { claim: String },
}

/// A machine, and where others reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub name: HostId,
    /// A host name or an IP address.
    pub address: String,
}

impl Machine {
    /// `NAME=ADDRESS`, or a host name, of which the part before the first dot is the name.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let (name, address) = match text.split_once('=') {
            Some(both) => both,
            None if bare(text).parse::<IpAddr>().is_ok() => return Err(Error::NoName { text: text.to_owned() }),
            None => (text.split('.').next().unwrap_or_default(), text),
        };
        let address = bare(address);
        let wrong = || Error::Address { text: text.to_owned(), address: address.to_owned() };
        let name = HostId::new(name).map_err(|why| match text.contains(':') {
            true => wrong(),
            false => Error::Name { text: text.to_owned(), why: why.to_string() },
        })?;
        if name.as_str() == OPERATOR {
            return Err(Error::Reserved);
        }
        let is_label = |label: &str| {
            let middle = label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
            middle && !label.is_empty() && label.len() <= 63 && !label.starts_with('-') && !label.ends_with('-')
        };
        // Four numbers that are no address would be taken for a name by some and for an address by others.
        let is_numbers = address.chars().all(|c| c.is_ascii_digit() || c == '.');
        let is_name = !is_numbers && address.len() <= ADDRESS_BYTES_MAX && address.split('.').all(is_label);
        if !is_name && address.parse::<IpAddr>().is_err() {
            return Err(wrong());
        }
        Ok(Self { name, address: address.to_owned() })
    }

    /// With this port, as a URL has it.
    fn at(&self, port: u16) -> String {
        match self.address.contains(':') {
            true => format!("[{}]:{port}", self.address),
            false => format!("{}:{port}", self.address),
        }
    }

    /// What its servers listen on: all its addresses.
    fn everywhere(&self, port: u16) -> String {
        match self.address.contains(':') {
            true => format!("[::]:{port}"),
            false => format!("0.0.0.0:{port}"),
        }
    }
}

/// An address without the brackets that IPv6 has in URLs.
fn bare(address: &str) -> &str {
    address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address)
}

/// Where the servers of a node listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ports {
    pub client: u16,
    pub cluster: u16,
    pub gateway: u16,
    /// Of controllers: metrics and health.
    pub controller: u16,
}

impl Default for Ports {
    fn default() -> Self {
        Self { client: 4222, cluster: 6222, gateway: 4270, controller: 4280 }
    }
}

/// Where an installation's servers watch themselves, on loopback.
const MONITOR_PORT: u16 = 8222;

/// Everything that is decided before keys are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Plan {
    pub nodes: Vec<Machine>,
    pub hosts: Vec<HostId>,
    pub ports: Ports,
    /// Where programs are on every machine.
    pub programs: String,
    /// Interfaces of workloads on the hosts.
    pub claims: Vec<String>,
}

/// A plan as it is kept.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    /// `NAME=ADDRESS`.
    nodes: Vec<String>,
    hosts: Vec<String>,
    ports: Ports,
    programs: String,
    claims: Vec<String>,
}

impl From<Plan> for Written {
    fn from(plan: Plan) -> Self {
        let Plan { nodes, hosts, ports, programs, claims } = plan;
        let nodes = nodes.iter().map(|node| format!("{}={}", node.name, node.address)).collect();
        Self { nodes, hosts: hosts.iter().map(HostId::to_string).collect(), ports, programs, claims }
    }
}

impl TryFrom<Written> for Plan {
    type Error = Error;

    fn try_from(written: Written) -> Result<Self, Error> {
        let Written { nodes, hosts, ports, programs, claims } = written;
        let machines = |texts: Vec<String>| texts.iter().map(|text| Machine::parse(text)).collect::<Result<Vec<_>, _>>();
        let hosts = machines(hosts)?.into_iter().map(|host| host.name).collect();
        let plan = Self { nodes: machines(nodes)?, hosts, ports, programs, claims };
        plan.check().map(|()| plan)
    }
}

impl Plan {
    /// Whether it can be carried out.
    pub fn check(&self) -> Result<(), Error> {
        if !NODE_COUNTS.contains(&self.nodes.len()) {
            return Err(Error::NodeCount { count: self.nodes.len() });
        }
        if self.hosts.len() > HOSTS_MAX {
            return Err(Error::HostCount { count: self.hosts.len() });
        }
        let mut names = BTreeSet::new();
        for name in self.nodes.iter().map(|node| &node.name).chain(&self.hosts) {
            if !names.insert(name) {
                return Err(Error::Twice(name.clone()));
            }
        }
        let Ports { client, cluster, gateway, controller } = self.ports;
        let mut ports = BTreeSet::new();
        if let Some(port) = [client, cluster, gateway, controller, MONITOR_PORT].into_iter().find(|port| !ports.insert(*port)) {
            return Err(Error::SamePort(port));
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
        if !self.programs.starts_with('/') || !self.programs.chars().all(is_plain) {
            return Err(Error::Folder { folder: self.programs.clone() });
        }
        let is_claim = |claim: &&String| {
            let name = claim.strip_suffix('*').unwrap_or(claim);
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        match self.claims.iter().find(|claim| !is_claim(claim)) {
            Some(claim) => Err(Error::Claim { claim: claim.clone() }),
            None => Ok(()),
        }
    }

    pub fn replicas(&self) -> usize {
        self.nodes.len().min(REPLICAS)
    }

    /// The servers of the bus, as clients name them.
    pub fn servers(&self) -> Vec<String> {
        self.nodes.iter().map(|node| format!("nats://{}", node.at(self.ports.client))).collect()
    }

    /// The gateways, as the command line and agents name them.
    pub fn gateways(&self) -> Vec<String> {
        self.nodes.iter().map(|node| format!("https://{}", node.at(self.ports.gateway))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(nodes: &[&str], hosts: &[&str]) -> Plan {
        Plan {
            nodes: nodes.iter().map(|text| Machine::parse(text).unwrap()).collect(),
            hosts: hosts.iter().map(|text| HostId::new(text).unwrap()).collect(),
            ports: Ports::default(),
            programs: "/usr/bin".to_owned(),
            claims: vec!["tap*".to_owned()],
        }
    }

    #[test]
    fn machines_are_named_as_operators_name_them() {
        for (text, name, address) in [
            ("n1", "n1", "n1"),
            ("bus-1.example.com", "bus-1", "bus-1.example.com"),
            ("n1=10.0.0.1", "n1", "10.0.0.1"),
            ("n1=2001:db8::1", "n1", "2001:db8::1"),
            ("n1=[2001:db8::1]", "n1", "2001:db8::1"),
            ("n1=bus-1.example.com", "n1", "bus-1.example.com"),
        ] {
            assert_eq!(Machine::parse(text), Ok(Machine { name: HostId::new(name).unwrap(), address: address.to_owned() }));
        }
        for (text, words) in [
            ("10.0.0.1", "write NAME=10.0.0.1"),
            ("[::1]", "write NAME="),
            ("n1:4222", "--client-port"),
            ("n1=10.0.0.1:4222", "--client-port"),
            ("n1=10.0.0.300", "no IP address"),
            ("n1=", "no host name"),
            ("=10.0.0.1", "write a host name"),
            ("", "write a host name"),
            ("n 1", "write a host name"),
            ("n1=-x", "no host name"),
            ("n1=a..b", "no host name"),
            ("operator", "operator's own folder"),
        ] {
            let said = Machine::parse(text).unwrap_err().to_string();
            assert!(said.contains(words), "{text}: {said}");
        }
        let longest = format!("n1={}.{}.{}.{}", "a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(61));
        assert!(Machine::parse(&longest).is_ok());
        assert!(Machine::parse(&format!("{longest}d")).is_err());
    }

    #[test]
    fn plans_that_cannot_work_are_refused() {
        for nodes in [&["n1"][..], &["n1", "n2", "n3"], &["n1", "n2", "n3", "n4", "n5"]] {
            assert_eq!(plan(nodes, &["h1"]).check(), Ok(()));
        }
        for nodes in [&[][..], &["n1", "n2"], &["n1", "n2", "n3", "n4"]] {
            assert_eq!(plan(nodes, &[]).check(), Err(Error::NodeCount { count: nodes.len() }));
        }
        assert!(matches!(plan(&["n1"], &["n1"]).check(), Err(Error::Twice(_))));
        assert!(matches!(plan(&["n1", "n2", "n1.example"], &[]).check(), Err(Error::Twice(_))));
        let same = Plan { ports: Ports { gateway: 4222, ..Ports::default() }, ..plan(&["n1"], &[]) };
        assert_eq!(same.check(), Err(Error::SamePort(4222)));
        for programs in ["bin", "/opt/a b", "/x\n"] {
            let odd = Plan { programs: programs.to_owned(), ..plan(&["n1"], &[]) };
            assert!(matches!(odd.check(), Err(Error::Folder { .. })), "{programs}");
        }
        for claim in ["", "*", "a\"b", "t*p"] {
            let odd = Plan { claims: vec![claim.to_owned()], ..plan(&["n1"], &[]) };
            assert!(matches!(odd.check(), Err(Error::Claim { .. })), "{claim}");
        }
        let good = plan(&["n1=2001:db8::1"], &["h1", "h_2"]);
        let kept = serde_json::to_string(&good).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&kept).unwrap(), good);
        assert!(serde_json::from_str::<Plan>(&kept.replace("h_2", "h1")).unwrap_err().to_string().contains("twice"));
        assert_eq!((plan(&["n1"], &[]).replicas(), plan(&["n1", "n2", "n3"], &[]).replicas()), (1, 3));
    }

    #[test]
    fn every_file_says_where_everything_is() {
        let three = plan(&["n1=10.0.0.1", "n2.example", "n3=2001:db8::3"], &["h1"]);
        let of = |files: Vec<Text>, name: &str| files.into_iter().find(|file| file.name == name).unwrap().text;
        let first = node_files(&three, &three.nodes[0], "accounts").unwrap();
        let server = of(first.clone(), "nats.conf");
        for words in [
            "server_name: \"n1\"",
            "\"nats-route://10.0.0.1:6222\", \"nats-route://n2.example:6222\", \"nats-route://[2001:db8::3]:6222\"",
            "sync_interval: always",
            "max_connections: ",
            "max_file_store: ",
            "verify: true",
            "advertise: \"10.0.0.1:6222\"",
        ] {
            assert!(server.contains(words), "{words}: {server}");
        }
        assert!(!server.contains("$GROUPCAST_NODE") && !server.contains("bus-1"), "{server}");
        let third = of(node_files(&three, &three.nodes[2], "accounts").unwrap(), "nats.conf");
        assert!(third.contains("listen: \"[::]:4222\"") && third.contains("listen: \"[::]:6222\""), "{third}");
        let one = plan(&["n1"], &[]);
        let alone = of(node_files(&one, &one.nodes[0], "accounts").unwrap(), "nats.conf");
        assert!(!alone.contains("cluster") && alone.contains("sync_interval: always"), "{alone}");
        let settings = of(first, "groupcast.toml");
        assert!(settings.contains("replicas = 3") && settings.contains("nats://[2001:db8::3]:4222"), "{settings}");
        let agent = of(host_files(&three, &three.hosts[0]), "agent.toml");
        assert!(
            agent.contains("host = \"h1\"")
                && agent.contains(
                    "gateway = [\"https://10.0.0.1:4270\", \"https://n2.example:4270\", \"https://[2001:db8::3]:4270\"]"
                ),
            "{agent}"
        );
        let scraped = prometheus(&three, "/x/authority.pem");
        assert!(scraped.contains("'n2.example:4280'") && scraped.contains("'[2001:db8::3]:4270'"), "{scraped}");
    }
}
