//! `agent.toml`: what the operator of a host says. Read once, checked whole, never guessed.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use groupcast_bus_config::connect::Tls;
use groupcast_bus_config::settings::{self, Key, Section};
use groupcast_enforce::interface::{Claim, Interface, InvalidInterface};
use groupcast_enforce::settings::{
    Attached, Attachment, Attachments, FAILSAFE_PORTS_MAX, Failsafe, LogSettings, MarkBits, Mode, Settings,
};
use groupcast_policy::ids::{HostId, InvalidId, WorkloadId};
use groupcast_policy::packet::{TCP, UDP};
use serde::{Deserialize, Serialize};

use crate::enrol::{ENROLMENTS_MAX, WrittenEnrolment};
use crate::join::{self, Gateway};

/// The name of the file.
pub const NAME: &str = "agent.toml";
const ABOUT: &str = "Read by `groupcast-agent`, by default from `/etc/groupcast/agent.toml`; `--config` names another. A key that is not \
    known is an error. `groupcast-agent config check` judges it.";

/// What the file may say.
pub fn sections() -> Vec<Section> {
    let keys = vec![
        Key::new("host", "", "This host's id, as its credential names it. Needed"),
        Key::new("servers", "", "Servers of the bus, such as `[\"nats://bus-1:4222\"]`. Needed"),
        Key::new("credentials", "", "Credentials file, made by `groupcast host add` or `groupcast-agent join`"),
        Key::new(
            "gateway",
            "",
            "Gateway through which this host joins and renews its credential, such as `https://gateway:4270`, or several in a list, \
             of which one that answers is enough; without any the credential expires",
        ),
        Key::new("gateway_authority", "", "Authorities to trust that it is a gateway, in PEM; the system's if not said"),
        Key::new(
            "tls_required",
            "",
            "Refuse servers that offer no TLS; if not said, true unless every server is on this machine",
        ),
        Key::new("tls_authority", "", "Authorities to trust for the servers, in PEM, and no others; if not said, the system's"),
        Key::new("tls_certificate", "", "Certificate to present to the servers, in PEM"),
        Key::new("tls_key", "", "Key of the certificate, in PEM"),
        Key::new(
            "claims",
            "[]",
            "Interfaces of workloads, such as `[\"tap*\"]`; one that is claimed and has no policy is closed",
        ),
        Key::new("table", "gc", "Name of the nftables table"),
        Key::new("owned_table", "true", "Own the table, so that others cannot touch it (kernel 6.9)"),
        Key::new("mark_shift", "0", "Lowest of the 24 bits of the connection mark that are ours, at most 8"),
        Key::new("state", "/var/lib/groupcast/state", "Where the last good state is kept"),
        Key::new("socket", "/run/groupcast/agent.sock", "The local API"),
        Key::new("http", "", "Where `/metrics` and `/livez` are served, such as `127.0.0.1:4290`; nowhere if not said"),
        Key::new("host_workload", "", "The workload that is the machine itself; it is not judged if not said"),
        Key::new("failsafe_inbound", "[]", "Ports of the machine itself that no policy can close, such as `[\"tcp/22\"]`"),
        Key::new("failsafe_outbound", "[]", "Ports that the machine itself always reaches; the bus is among them"),
        Key::new("audit", "false", "Log what would be denied on this host, and let it pass"),
        Key::new("audit_host_workload", "false", "The same for the machine itself alone"),
        Key::new("nflog_group", "5", "Where denied and logged packets are told"),
        Key::new("beat", "15s", "How often the controllers are told that this host lives; their lease is several of it"),
        Key::new("boot_file", BOOT_FILE, "What says which boot of the machine this is, where machines share a kernel"),
    ];
    let enrol = vec![
        Key::new("workload", "", "Its id. Needed"),
        Key::new("template", "", "What a workload of the kind may be. Needed"),
        Key::new("network", "", "The network it is on. Needed"),
        Key::new("addresses", "[]", "Its addresses; of the machine itself those of its interfaces, if none are named"),
        Key::new("labels", "", "Its own labels, as far as the template lets it bring them"),
        Key::new("space", "", "Its space"),
        Key::new("app", "", "Its app"),
        Key::new("staging", "false", "It is being staged, not run"),
    ];
    vec![
        Section::top("At the top of the file.", keys),
        Section::many("enrol", "Workloads that this host enrols by itself, the machine among them if it is one.", enrol),
    ]
}

/// What the reference page says about this file.
pub fn reference() -> String {
    settings::reference(NAME, ABOUT, &sections())
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    host: String,
    servers: Vec<String>,
    credentials: Option<PathBuf>,
    gateway: Option<OneOrMany>,
    gateway_authority: Option<PathBuf>,
    tls_required: Option<bool>,
    tls_authority: Option<PathBuf>,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
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
    #[serde(default, deserialize_with = "settings::optional_duration")]
    beat: Option<Duration>,
    boot_file: Option<PathBuf>,
    #[serde(default)]
    enrol: Vec<WrittenEnrolment>,
}

/// One, or a list.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Gateways of one installation; each may be asked in turn, and each takes its time.
pub const GATEWAYS_MAX: usize = 8;

/// How this host registers itself.
#[derive(Debug, Clone)]
pub struct Enrolling {
    /// How often it says that it lives.
    pub beat: Duration,
    /// What says which boot of the machine this is.
    pub boot_file: PathBuf,
    pub workloads: Vec<WrittenEnrolment>,
}

/// Beats this often unless told otherwise, and at least as often as this.
const BEAT: Duration = Duration::from_secs(15);
const BEAT_MIN: Duration = Duration::from_millis(20);
const BOOT_FILE: &str = "/proc/sys/kernel/random/boot_id";

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
    /// Through any of which this host joins and renews its credential.
    pub gateways: Vec<Gateway>,
    pub tls: Tls,
    pub table: String,
    pub owned_table: bool,
    pub state: PathBuf,
    pub socket: PathBuf,
    pub http: Option<SocketAddr>,
    pub host_workload: Option<WorkloadId>,
    pub audit_host_workload: bool,
    pub enrol: Enrolling,
    pub settings: Settings,
}

impl Config {
    pub fn read(path: &Path) -> Result<Self, settings::Error> {
        let written: Written = settings::read(path, &sections())?;
        Self::check(written).map_err(|what| settings::Error::Wrong { path: path.display().to_string(), what })
    }

    /// What stands in the file and cannot work on this machine.
    pub fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        let pair = self.tls.certificate.as_ref();
        let files = [
            ("credentials", self.credentials.as_ref(), true),
            ("tls_authority", self.tls.authority.as_ref(), false),
            ("gateway_authority", self.gateways.first().and_then(|gateway| gateway.authority.as_ref()), false),
            ("tls_certificate", pair.map(|(certificate, _)| certificate), false),
            ("tls_key", pair.map(|(_, key)| key), true),
        ];
        for (name, path, secret) in files {
            let Some(path) = path else { continue };
            match std::fs::File::open(path).and_then(|file| file.metadata()) {
                Err(error) => found.push(format!("{name} names {}, which cannot be read: {error}", path.display())),
                Ok(about) if secret && about.permissions().mode() & 0o077 != 0 => {
                    found.push(format!("{name} names {}, which others can read: chmod 600 it", path.display()));
                }
                Ok(_) => {}
            }
        }
        if self.servers.is_empty() {
            found.push("servers names none: the agent would never hear of any policy".to_owned());
        }
        found
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
        let gateways = gateways(written.gateway, written.gateway_authority)?;
        // Nor from what renews its credential, without which the bus is out of reach too.
        failsafe.outbound.extend(gateways.iter().map(|gateway| (TCP, gateway.address.port)));
        if failsafe.outbound.len() > FAILSAFE_PORTS_MAX {
            return Err(too_many_ports(failsafe.outbound.len()));
        }
        let mut log = LogSettings::default();
        log.nflog_group = written.nflog_group.unwrap_or(log.nflog_group);
        Ok(Self {
            host: HostId::new(&written.host).map_err(id)?,
            servers: written.servers,
            credentials: written.credentials,
            gateways,
            tls: Tls {
                required: written.tls_required,
                authority: written.tls_authority,
                certificate: pair(written.tls_certificate, written.tls_key)?,
            },
            table: written.table,
            owned_table: written.owned_table,
            state: written.state,
            socket: written.socket,
            http: written.http,
            host_workload: written.host_workload.map(|text| WorkloadId::new(&text)).transpose().map_err(id)?,
            audit_host_workload: written.audit_host_workload,
            enrol: Enrolling {
                beat: written.beat.unwrap_or(BEAT).max(BEAT_MIN),
                boot_file: written.boot_file.unwrap_or_else(|| BOOT_FILE.into()),
                workloads: enrolments(written.enrol)?,
            },
            settings: Settings {
                claims: claims.map_err(|error| error.to_string())?,
                mark,
                mode,
                log,
                failsafe,
                ..Settings::default()
            },
        })
    }

    /// What is attached without anybody asking: the machine itself.
    pub fn attachments(&self) -> Attachments {
        let attached = Attached { attachment: Attachment::Host, audit: self.audit_host_workload };
        let host = self.host_workload.clone().map(|id| (id, attached));
        host.into_iter().collect()
    }
}

fn gateways(named: Option<OneOrMany>, authority: Option<PathBuf>) -> Result<Vec<Gateway>, String> {
    let addresses = match named {
        None => Vec::new(),
        Some(OneOrMany::One(address)) => vec![address],
        Some(OneOrMany::Many(addresses)) => addresses,
    };
    if addresses.is_empty() && authority.is_some() {
        return Err("gateway_authority without gateway: name the gateway too".to_owned());
    }
    if addresses.len() > GATEWAYS_MAX {
        return Err(format!("{} gateways, at most {GATEWAYS_MAX}: one that answers is enough", addresses.len()));
    }
    let gateway = |address: &String| {
        let address = join::address(address).map_err(|error| error.to_string())?;
        Ok(Gateway { address, authority: authority.clone() })
    };
    addresses.iter().map(gateway).collect()
}

/// A certificate is of no use without its key.
fn pair(certificate: Option<PathBuf>, key: Option<PathBuf>) -> Result<Option<(PathBuf, PathBuf)>, String> {
    match (certificate, key) {
        (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
        (None, None) => Ok(None),
        (Some(_), None) => Err("tls_certificate needs tls_key beside it".to_owned()),
        (None, Some(_)) => Err("tls_key needs tls_certificate beside it".to_owned()),
    }
}

fn enrolments(list: Vec<WrittenEnrolment>) -> Result<Vec<WrittenEnrolment>, String> {
    if list.len() > ENROLMENTS_MAX {
        return Err(format!("{} workloads to enrol, at most {ENROLMENTS_MAX}", list.len()));
    }
    for (index, written) in list.iter().enumerate() {
        written.check().map_err(|error| format!("enrol[{index}]: {error}"))?;
    }
    Ok(list)
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
        let written: Written = settings::parse(NAME, text, &sections()).map_err(|error| error.to_string())?;
        Config::check(written)
    }

    #[test]
    fn the_reference_is_current() {
        settings::keys_are_read::<Written>(&sections()).unwrap();
        let page = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md"));
        settings::page_is_current(page, NAME, &reference()).unwrap();
        // What the page calls a default is one.
        let config = parse("host = 'h'\nservers = []").unwrap();
        let default =
            |name: &str| sections()[0].keys.iter().find(|key| key.name == name).and_then(|key| key.default.clone()).unwrap();
        assert_eq!((config.table.clone(), config.owned_table.to_string()), (default("table"), default("owned_table")));
        assert_eq!(config.settings.log.nflog_group.to_string(), default("nflog_group"));
        assert_eq!(config.state.display().to_string(), default("state"));
        assert_eq!(config.socket.display().to_string(), default("socket"));
        assert_eq!(config.problems().len(), 1);
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
            ("host = 'h'\nservers = []\nclaim = []", "did you mean claims?"),
            ("host = 'h'\nservers = []\ntls_key = '/k'", "tls_key needs tls_certificate beside it"),
            ("host = 'h'\nservers = []\ntls_certificate = '/c'", "tls_certificate needs tls_key beside it"),
            ("host = 'h'\nservers = []\ngateway_authority = '/a'", "name the gateway too"),
            ("host = 'h'\nservers = []\ngateway = []\ngateway_authority = '/a'", "name the gateway too"),
            ("host = 'h'\nservers = []\ngateway = ['https://n1:4270', 'n2']", "write https://gateway:4270"),
            ("host = 'h'\nservers = []\ngateway = ['https://n1:4270', 'http://n2:4270']", "plain http is for loopback only"),
            ("servers = []", "host"),
        ];
        for (text, words) in rows {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let tls = "tls_authority = '/nowhere/a'\ntls_certificate = '/nowhere/c'\ntls_key = '/nowhere/k'";
        let config = parse(&format!("host = 'h'\nservers = ['nats://bus-1:4222']\n{tls}")).unwrap();
        assert!(config.tls.is_required(&config.servers), "nobody said that it may do without");
        assert_eq!(config.problems().len(), 3, "{:?}", config.problems());
        let config = parse("host = 'h'\nservers = ['nats://bus-1:4222']\ntls_required = false").unwrap();
        assert!(!config.tls.is_required(&config.servers));
        for (gateway, count, ports) in [
            ("'https://n1:4270'", 1, vec![4270]),
            ("['https://n1:4270', 'https://n2:4270', 'https://n3:4271']", 3, vec![4270, 4271]),
            ("[]", 0, vec![]),
        ] {
            let config = parse(&format!("host = 'h'\nservers = []\ngateway = {gateway}")).unwrap();
            assert_eq!(config.gateways.len(), count, "{gateway}");
            let open: Vec<u16> = config.settings.failsafe.outbound.iter().map(|(_, port)| *port).collect();
            assert_eq!(open, ports, "{gateway}: what renews the credential stays in reach");
        }
        let gateways = |count: usize| format!("host = 'h'\nservers = []\ngateway = {:?}", vec!["https://n:1"; count]);
        assert!(parse(&gateways(GATEWAYS_MAX)).is_ok());
        assert!(parse(&gateways(GATEWAYS_MAX + 1)).unwrap_err().contains("at most"));
        let many: Vec<String> = (1..=FAILSAFE_PORTS_MAX + 1).map(|port| format!("tcp/{port}")).collect();
        assert!(ports(&many[1..]).is_ok());
        assert!(ports(&many).is_err());
    }
}
