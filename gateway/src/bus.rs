//! How the command line and the configuration file say where the bus is and who is asking.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{Identity, RECONNECT_DELAY_MAX, Tls};
use groupcast_bus_config::held::{self, Held};
use groupcast_bus_config::settings::{optional_duration, parsed};
use groupcast_control::controller::Settings;
use groupcast_policy::ids::HostId;
use serde::Deserialize;

use crate::config::{self, ConfigOption};

const SERVER: &str = "nats://127.0.0.1:4222";
const NAME: &str = "controller";

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BusOptions {
    /// A server of the bus; may be given several times [default: nats://127.0.0.1:4222]
    #[arg(long = "server", env = "GROUPCAST_SERVERS", value_delimiter = ',')]
    pub servers: Option<Vec<String>>,
    /// Own name, the one that the credential was made for; others see it [default: the credential's, or controller]
    #[arg(long, env = "GROUPCAST_NAME")]
    #[serde(deserialize_with = "parsed")]
    pub name: Option<HostId>,
    /// Credentials file.
    #[arg(long, env = "GROUPCAST_CREDENTIALS")]
    pub credentials: Option<PathBuf>,
    /// Refuse servers that offer no TLS [default: true unless every server is on this machine]
    #[arg(long, env = "GROUPCAST_TLS_REQUIRED", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub tls_required: Option<bool>,
    /// Authorities to trust for the servers of the bus, in PEM, and no others [default: those of the system]
    #[arg(long, env = "GROUPCAST_TLS_AUTHORITY")]
    pub tls_authority: Option<PathBuf>,
    /// Certificate to present to the servers of the bus, in PEM.
    #[arg(long, env = "GROUPCAST_TLS_CERTIFICATE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// Key of the certificate, in PEM.
    #[arg(long, env = "GROUPCAST_TLS_KEY", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// A server's monitoring, such as http://127.0.0.1:8222, which says how soon it flushes to disk and how much room it has; may be given
    /// several times [default: nobody looks]
    #[arg(long, env = "GROUPCAST_MONITOR", value_delimiter = ',', value_name = "URL")]
    pub monitor: Option<Vec<String>>,
    /// Longest wait between two attempts to reach the bus [default: 5s]
    #[arg(long, value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub reconnect_delay_max: Option<Duration>,
}

impl BusOptions {
    /// What is not said here is taken from there.
    pub fn or(self, other: Self) -> Self {
        // A certificate belongs to its key: they come from one place.
        let own = self.tls_certificate.is_some() || self.tls_key.is_some();
        let pair = if own { (self.tls_certificate, self.tls_key) } else { (other.tls_certificate, other.tls_key) };
        Self {
            servers: self.servers.or(other.servers),
            name: self.name.or(other.name),
            credentials: self.credentials.or(other.credentials),
            tls_required: self.tls_required.or(other.tls_required),
            tls_authority: self.tls_authority.or(other.tls_authority),
            tls_certificate: pair.0,
            tls_key: pair.1,
            monitor: self.monitor.or(other.monitor),
            reconnect_delay_max: self.reconnect_delay_max.or(other.reconnect_delay_max),
        }
    }

    /// As it is said; otherwise the one that the credential was made for.
    pub fn name(&self) -> HostId {
        let held = || Held::read(self.credentials.as_deref()?).ok().map(|held| held.name);
        self.name.clone().or_else(held).unwrap_or_else(|| HostId::new(NAME).expect("a constant that a test reads"))
    }

    /// Whether the credential can be read, is the one of this name, under another of which nothing would ever be answered, and of this role, and has
    /// not expired.
    pub fn check(&self, role: Role, now: SystemTime) -> Result<(), held::Error> {
        held::name(self.credentials.as_deref(), self.name.as_ref())?;
        self.credentials.as_deref().map_or(Ok(()), |path| held::fits(path, role, now))
    }

    pub fn tls(&self) -> Tls {
        let certificate = self.tls_certificate.clone().zip(self.tls_key.clone());
        Tls { required: self.tls_required, authority: self.tls_authority.clone(), certificate }
    }

    pub fn settings(&self) -> Settings {
        let servers = self.servers.clone().unwrap_or_else(|| vec![SERVER.to_owned()]);
        let mut settings = Settings::new(self.name(), servers);
        settings.identity = self.credentials.clone().map_or(Identity::Nobody, Identity::File);
        settings.tls = self.tls();
        settings.reconnect_delay_max = self.reconnect_delay_max.unwrap_or(RECONNECT_DELAY_MAX);
        settings
    }
}

/// The bus for a command that an operator types: by flags, by the environment, or by a configuration file.
#[derive(Debug, Clone, Default, Args)]
pub struct BusArguments {
    #[command(flatten)]
    config: ConfigOption,
    #[command(flatten)]
    bus: BusOptions,
}

impl BusArguments {
    /// As a client of this role reaches the bus: a file may name a credential of its own for what gateways do.
    pub fn resolved(&self, role: Role) -> Result<BusOptions, config::Error> {
        let config::File { bus, gateway, .. } = self.config.read()?;
        let mut bus = bus;
        if let Some(own) = gateway.credentials.filter(|_| role == Role::Gateway) {
            // The name that is said is the one of the other credential.
            (bus.credentials, bus.name) = (Some(own), None);
        }
        Ok(self.bus.clone().or(bus))
    }

    /// Copies of each stream, as the file has it.
    pub fn replicas(&self) -> Result<Option<usize>, config::Error> {
        Ok(self.config.read()?.controller.replicas)
    }
}

/// The servers of the bus for a command that brings a credential of its own.
#[derive(Debug, Clone, Args)]
pub struct ServerOptions {
    #[command(flatten)]
    config: ConfigOption,
    /// A server of the bus; may be given several times [default: nats://127.0.0.1:4222]
    #[arg(long = "server", env = "GROUPCAST_SERVERS", value_delimiter = ',')]
    servers: Option<Vec<String>>,
    /// Refuse servers that offer no TLS [default: true unless every server is on this machine]
    #[arg(long, env = "GROUPCAST_TLS_REQUIRED", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tls_required: Option<bool>,
    /// Authorities to trust for the servers of the bus, in PEM, and no others [default: those of the system]
    #[arg(long, env = "GROUPCAST_TLS_AUTHORITY")]
    tls_authority: Option<PathBuf>,
    /// Certificate to present to the servers of the bus, in PEM.
    #[arg(long, env = "GROUPCAST_TLS_CERTIFICATE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// Key of the certificate, in PEM.
    #[arg(long, env = "GROUPCAST_TLS_KEY", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
}

impl ServerOptions {
    /// Where the servers are, and how they are reached.
    pub fn resolved(&self) -> Result<(Vec<String>, Tls), config::Error> {
        let said = BusOptions {
            servers: self.servers.clone(),
            tls_required: self.tls_required,
            tls_authority: self.tls_authority.clone(),
            tls_certificate: self.tls_certificate.clone(),
            tls_key: self.tls_key.clone(),
            ..BusOptions::default()
        };
        let bus = said.or(self.config.read()?.bus);
        Ok((bus.servers.clone().unwrap_or_else(|| vec![SERVER.to_owned()]), bus.tls()))
    }
}
