//! `agent.toml`: what the operator of a host says. Read once, checked whole, never guessed.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use groupcast_enforce::interface::{Claim, Interface, InvalidInterface};
use groupcast_enforce::settings::{
    Attached, Attachment, Attachments, FAILSAFE_PORTS_MAX, Failsafe, LogSettings, MarkBits, Mode, Settings,
};
use groupcast_policy::ids::{HostId, InvalidId, WorkloadId};
use groupcast_policy::packet::{TCP, UDP};
use serde::{Deserialize, Serialize};

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{path} cannot be read: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {source}", path = path.display())]
    Parse { path: PathBuf, source: toml::de::Error },
    #[error("{path}: {what}", path = path.display())]
    Wrong { path: PathBuf, what: String },
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    host: String,
    servers: Vec<String>,
    credentials: Option<PathBuf>,
    #[serde(default)]
    claims: Vec<String>,
    #[serde(default = "default_table")]
    table: String,
    #[serde(default = "default_owned")]
    owned_table: bool,
    #[serde(default)]
    mark_shift: u8,
    #[serde(default = "default_state")]
    state: PathBuf,
    #[serde(default = "default_socket")]
    socket: PathBuf,
    /// Where `/metrics` and `/livez` are served.
    http: Option<SocketAddr>,
    /// The workload that is the machine itself.
    host_workload: Option<String>,
    #[serde(default)]
    failsafe_inbound: Vec<String>,
    #[serde(default)]
    failsafe_outbound: Vec<String>,
    /// What would be denied is logged and passes: for the host as a whole, or for the machine itself as a workload.
    #[serde(default)]
    audit: bool,
    #[serde(default)]
    audit_host_workload: bool,
    nflog_group: Option<u16>,
}

fn default_table() -> String {
    "gc".into()
}

fn default_owned() -> bool {
    true
}

fn default_state() -> PathBuf {
    "/var/lib/groupcast/state".into()
}

fn default_socket() -> PathBuf {
    "/run/groupcast/agent.sock".into()
}

#[derive(Debug, Clone)]
pub struct Config {
    pub host: HostId,
    pub servers: Vec<String>,
    pub credentials: Option<PathBuf>,
    pub table: String,
    pub owned_table: bool,
    pub state: PathBuf,
    pub socket: PathBuf,
    pub http: Option<SocketAddr>,
    pub host_workload: Option<WorkloadId>,
    pub audit_host_workload: bool,
    pub settings: Settings,
}

impl Config {
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let written: Written = toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.into(), source })?;
        Self::check(written).map_err(|what| ConfigError::Wrong { path: path.into(), what })
    }

    fn check(written: Written) -> Result<Self, String> {
        let id = |error: InvalidId| error.to_string();
        let claims = written.claims.iter().map(|text| Claim::new(text)).collect::<Result<Vec<_>, InvalidInterface>>();
        let mark = MarkBits::new(written.mark_shift).ok_or("mark_shift: 24 bits of a mark of 32 must remain, so at most 8")?;
        let table_is_name = written.table.starts_with(|c: char| c.is_ascii_alphabetic())
            && written.table.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !table_is_name {
            return Err(format!("table {:?} is not a name: use letters, digits and _", written.table));
        }
        let mode = if written.audit { Mode::Audit } else { Mode::Enforce };
        let mut failsafe = Failsafe { inbound: ports(&written.failsafe_inbound)?, outbound: ports(&written.failsafe_outbound)? };
        // No policy can cut the host off from what could change it.
        for server in &written.servers {
            failsafe.outbound.insert((TCP, bus_port(server)?));
        }
        if failsafe.outbound.len() > FAILSAFE_PORTS_MAX {
            return Err(too_many_ports(failsafe.outbound.len()));
        }
        let mut log = LogSettings::default();
        log.nflog_group = written.nflog_group.unwrap_or(log.nflog_group);
        Ok(Self {
            host: HostId::new(&written.host).map_err(id)?,
            servers: written.servers,
            credentials: written.credentials,
            table: written.table,
            owned_table: written.owned_table,
            state: written.state,
            socket: written.socket,
            http: written.http,
            host_workload: written.host_workload.map(|text| WorkloadId::new(&text)).transpose().map_err(id)?,
            audit_host_workload: written.audit_host_workload,
            settings: Settings { claims: claims.map_err(|error| error.to_string())?, mark, mode, log, failsafe, adopting: false },
        })
    }

    /// What is attached without anybody asking: the machine itself.
    pub fn attachments(&self) -> Attachments {
        let attached = Attached { attachment: Attachment::Host, audit: self.audit_host_workload };
        let host = self.host_workload.clone().map(|id| (id, attached));
        host.into_iter().collect()
    }
}

/// The port of `nats://host:4222`, which is the default.
fn bus_port(server: &str) -> Result<u16, String> {
    const DEFAULT: u16 = 4222;
    let place = server.split_once("://").map_or(server, |(_, place)| place);
    let place = place.split('/').next().unwrap_or_default();
    let after_address = place.rsplit_once(']').map_or(place, |(_, rest)| rest);
    match after_address.rsplit_once(':') {
        Some((_, port)) => port.parse().map_err(|_| format!("server {server:?}: {port:?} is not a port")),
        None => Ok(DEFAULT),
    }
}

fn too_many_ports(count: usize) -> String {
    format!("{count} failsafe ports, at most {FAILSAFE_PORTS_MAX}: what so much depends on belongs into a group")
}

/// `tcp/22`, `udp/53`.
fn ports(list: &[String]) -> Result<BTreeSet<(u8, u16)>, String> {
    if list.len() > FAILSAFE_PORTS_MAX {
        return Err(too_many_ports(list.len()));
    }
    list.iter()
        .map(|text| {
            let wrong = || format!("failsafe port {text:?}: write tcp/22 or udp/53");
            let (protocol, port) = text.split_once('/').ok_or_else(wrong)?;
            let protocol = match protocol {
                "tcp" => TCP,
                "udp" => UDP,
                _ => return Err(wrong()),
            };
            Ok((protocol, port.parse().map_err(|_| wrong())?))
        })
        .collect()
}

/// How a workload is attached, as it is said on the local socket and kept on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenAttachment {
    pub workload: String,
    pub interface: String,
    /// None: by interface.
    #[serde(default)]
    pub addresses: BTreeSet<IpAddr>,
    #[serde(default)]
    pub audit: bool,
}

impl WrittenAttachment {
    pub fn check(&self) -> Result<(WorkloadId, Attached), String> {
        let workload = WorkloadId::new(&self.workload).map_err(|error| error.to_string())?;
        let interface = Interface::new(&self.interface).map_err(|error| error.to_string())?;
        let attachment = if self.addresses.is_empty() {
            Attachment::Interface(interface)
        } else {
            Attachment::Addresses { interface, addresses: self.addresses.clone() }
        };
        Ok((workload, Attached { attachment, audit: self.audit }))
    }

    /// `None` for the machine itself, which only the configuration attaches.
    pub fn of(workload: &WorkloadId, attached: &Attached) -> Option<Self> {
        let (interface, addresses) = match &attached.attachment {
            Attachment::Host => return None,
            Attachment::Interface(interface) => (interface, BTreeSet::new()),
            Attachment::Addresses { interface, addresses } => (interface, addresses.clone()),
        };
        Some(Self { workload: workload.to_string(), interface: interface.to_string(), addresses, audit: attached.audit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let written: Written = toml::from_str(text).map_err(|error| error.to_string())?;
        Config::check(written)
    }

    #[test]
    fn a_configuration_is_checked_whole() {
        let good =
            "host = 'h1'\nservers = ['nats://127.0.0.1:4222']\nclaims = ['tap*', 'veth0']\nfailsafe_inbound = ['tcp/22']\n";
        let config = parse(good).unwrap();
        assert_eq!(config.settings.claims.len(), 2);
        assert_eq!(config.settings.failsafe.inbound, BTreeSet::from([(TCP, 22)]));
        assert_eq!(config.settings.failsafe.outbound, BTreeSet::from([(TCP, 4222)]));
        for (server, port) in [("nats://a", 4222), ("a:5", 5), ("tls://[::1]:7/x", 7), ("[::1]", 4222), ("nats://u:p@h:9", 9)] {
            assert_eq!(bus_port(server), Ok(port), "{server}");
        }
        let rows = [
            ("host = 'a.b'\nservers = []", "host id"),
            ("host = 'h'\nservers = []\nclaims = ['*']", "not a pattern"),
            ("host = 'h'\nservers = []\nmark_shift = 9", "at most 8"),
            ("host = 'h'\nservers = []\nfailsafe_inbound = ['22']", "tcp/22"),
            ("host = 'h'\nservers = []\nfailsafe_inbound = ['tcp/99999']", "tcp/22"),
            ("host = 'h'\nservers = []\ntable = 'a b'", "not a name"),
            ("host = 'h'\nservers = ['nats://a:b']", "not a port"),
            ("host = 'h'\nservers = []\nclaim = []", "unknown field"),
            ("servers = []", "host"),
        ];
        for (text, words) in rows {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let many: Vec<String> = (1..=FAILSAFE_PORTS_MAX + 1).map(|port| format!("tcp/{port}")).collect();
        assert!(ports(&many[1..]).is_ok());
        assert!(ports(&many).is_err());
    }
}
