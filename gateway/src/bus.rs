//! How the command line and the configuration file say where the bus is and who is asking.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use groupcast_bus_config::connect::{Identity, RECONNECT_DELAY_MAX, Tls};
use groupcast_bus_config::settings::{optional_duration, parsed};
use groupcast_control::controller::Settings;
use groupcast_policy::ids::HostId;
use serde::Deserialize;

const SERVER: &str = "nats://127.0.0.1:4222";
const NAME: &str = "controller";

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BusOptions {
    /// A server of the bus; may be given several times [default: nats://127.0.0.1:4222]
    #[arg(long = "server", env = "GROUPCAST_SERVERS", value_delimiter = ',')]
    pub servers: Option<Vec<String>>,
    /// Own name: a credential is made for it, and others see it [default: controller]
    #[arg(long, env = "GROUPCAST_NAME")]
    #[serde(deserialize_with = "parsed")]
    pub name: Option<HostId>,
    /// Credentials file.
    #[arg(long, env = "GROUPCAST_CREDENTIALS")]
    pub credentials: Option<PathBuf>,
    /// Authorities to trust, in PEM.
    #[arg(long)]
    pub tls_authority: Option<PathBuf>,
    /// Certificate to present, in PEM.
    #[arg(long, requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// Key of the certificate, in PEM.
    #[arg(long, requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Longest wait between two attempts to reach the bus [default: 30s]
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
            tls_authority: self.tls_authority.or(other.tls_authority),
            tls_certificate: pair.0,
            tls_key: pair.1,
            reconnect_delay_max: self.reconnect_delay_max.or(other.reconnect_delay_max),
        }
    }

    pub fn name(&self) -> HostId {
        self.name.clone().unwrap_or_else(|| HostId::new(NAME).expect("a constant that a test reads"))
    }

    pub fn settings(&self) -> Settings {
        let certificate = self.tls_certificate.clone().zip(self.tls_key.clone());
        let servers = self.servers.clone().unwrap_or_else(|| vec![SERVER.to_owned()]);
        let mut settings = Settings::new(self.name(), servers);
        settings.identity = self.credentials.clone().map_or(Identity::Nobody, Identity::File);
        settings.tls = Tls { required: false, authority: self.tls_authority.clone(), certificate };
        settings.reconnect_delay_max = self.reconnect_delay_max.unwrap_or(RECONNECT_DELAY_MAX);
        settings
    }
}
