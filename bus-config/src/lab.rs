//! Hosts on one machine: network namespaces with agents and workloads in them, for the demonstration, for tests from end to end and for
//! their benchmark.
//!
//! Nothing of it is in the machine's own network: no address, no route, no name. A namespace lives as long as its thread and what runs in
//! it, and what runs in it ends with this process, however that ends; so there is nothing to tidy up after a crash. Hosts reach the
//! bus on their own loopback, by a [`Relay`] whose listening socket was born there.
//!
//! ```text
//! web-1 ──veth── h1 ──veth── fabric ──veth── h2 ──veth── db-1
//! ```

mod agent;
mod namespace;
mod relay;
mod up;

pub use agent::{Agent, AgentSettings, Said};
pub use namespace::{Namespace, is_allowed, mortal};
pub use relay::Relay;
pub use up::{Addresses, Up};

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Hosts of one lab.
pub const HOSTS_MAX: usize = 16;
/// Workloads of one host.
pub const WORKLOADS_MAX: usize = 16;
/// What the interfaces of workloads begin with.
pub const CLAIM: &str = "gcw*";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a network namespace cannot be made ({0}): run as root")]
    NotAllowed(nix::Error),
    #[error("{what}: {reason}")]
    Failed { what: String, reason: String },
    #[error("the lab holds at most {HOSTS_MAX} hosts with {WORKLOADS_MAX} workloads each")]
    Full,
    #[error("there is no {0} in the lab")]
    Unknown(String),
}

pub(crate) fn failed(what: impl Into<String>, reason: impl ToString) -> Error {
    Error::Failed { what: what.into(), reason: reason.to_string() }
}

/// The address of a host's workload; each has a small network of its own, the host has the address before it. Hosts count from 1.
pub fn address(host: usize, workload: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, host as u8, (workload * 4 + 2) as u8)
}

/// A host as it is in the lab: its namespace and the relay to the bus.
pub struct Host {
    pub name: String,
    pub namespace: Namespace,
    /// The bus as it is reached from here.
    pub bus: String,
    /// Of its network, in the order in which hosts were made.
    number: usize,
    workloads: usize,
    _relay: Relay,
}

/// A workload as it is in the lab.
pub struct Workload {
    pub name: String,
    pub host: String,
    pub namespace: Namespace,
    pub address: Ipv4Addr,
    /// The host's end of its wire.
    pub interface: String,
}

/// Hosts, their workloads, and a network between them.
pub struct Lab {
    fabric: Namespace,
    bus: SocketAddr,
    pub hosts: BTreeMap<String, Host>,
    pub workloads: BTreeMap<String, Workload>,
}

impl Lab {
    /// An empty one whose hosts will reach the bus that listens here.
    pub fn new(bus: SocketAddr) -> Result<Self, Error> {
        let fabric = Namespace::new("fabric")?;
        fabric.forward()?;
        Ok(Self { fabric, bus, hosts: BTreeMap::new(), workloads: BTreeMap::new() })
    }

    pub fn host(&mut self, name: &str) -> Result<&Host, Error> {
        let number = self.hosts.len() + 1;
        if number > HOSTS_MAX {
            return Err(Error::Full);
        }
        let namespace = Namespace::new(name)?;
        namespace.forward()?;
        self.fabric.wire(&format!("up{number}"), &namespace, "up0")?;
        let (ours, theirs) = (format!("10.78.{number}.1"), format!("10.78.{number}.2"));
        self.fabric.ip(&format!("address add {ours}/30 dev up{number}"))?;
        namespace.ip(&format!("address add {theirs}/30 dev up0"))?;
        namespace.ip(&format!("route add default via {ours}"))?;
        let [a, b, c, _] = address(number, 0).octets();
        self.fabric.ip(&format!("route add {a}.{b}.{c}.0/24 via {theirs}"))?;
        let relay = Relay::new(&namespace, self.bus)?;
        let bus = format!("nats://{}", relay.address());
        let host = Host { name: name.to_owned(), namespace, bus, number, workloads: 0, _relay: relay };
        Ok(self.hosts.entry(name.to_owned()).or_insert(host))
    }

    /// A connection by real packets, from one workload to another.
    pub fn connect(&self, from: &str, to: &str, port: u16, within: Duration) -> Result<std::io::Result<TcpStream>, Error> {
        let find = |name: &str| self.workloads.get(name).ok_or_else(|| Error::Unknown(name.to_owned()));
        let to = SocketAddr::from((find(to)?.address, port));
        Ok(find(from)?.namespace.connect(to, within))
    }

    pub fn workload(&mut self, name: &str, host: &str) -> Result<&Workload, Error> {
        let on = self.hosts.get_mut(host).ok_or_else(|| Error::Unknown(host.to_owned()))?;
        if on.workloads >= WORKLOADS_MAX {
            return Err(Error::Full);
        }
        let address = address(on.number, on.workloads);
        let gateway = Ipv4Addr::from_bits(address.to_bits() - 1);
        let interface = format!("gcw{}", on.workloads);
        on.workloads += 1;
        let namespace = Namespace::new(name)?;
        on.namespace.wire(&interface, &namespace, "eth0")?;
        on.namespace.ip(&format!("address add {gateway}/30 dev {interface}"))?;
        namespace.ip(&format!("address add {address}/30 dev eth0"))?;
        namespace.ip(&format!("route add default via {gateway}"))?;
        let workload = Workload { name: name.to_owned(), host: host.to_owned(), namespace, address, interface };
        Ok(self.workloads.entry(name.to_owned()).or_insert(workload))
    }
}
