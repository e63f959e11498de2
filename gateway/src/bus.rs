//! How the command line says where the bus is and who is asking.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use groupcast_bus_config::connect::{Identity, Tls};
use groupcast_control::controller::Settings;
use groupcast_policy::ids::HostId;

#[derive(Debug, Clone, Args)]
pub struct BusOptions {
    /// A server of the bus; may be given several times.
    #[arg(long = "server", env = "GROUPCAST_SERVERS", value_delimiter = ',', default_value = "nats://127.0.0.1:4222")]
    pub servers: Vec<String>,
    /// Own name: a credential is made for it, and others see it.
    #[arg(long, env = "GROUPCAST_NAME", default_value = "controller")]
    pub name: HostId,
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
    /// Longest wait between two attempts to reach the bus.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "30s")]
    pub reconnect_delay_max: Duration,
}

impl BusOptions {
    pub fn settings(&self) -> Settings {
        let certificate = self.tls_certificate.clone().zip(self.tls_key.clone());
        Settings {
            identity: self.credentials.clone().map_or(Identity::Nobody, Identity::File),
            tls: Tls { required: false, authority: self.tls_authority.clone(), certificate },
            reconnect_delay_max: self.reconnect_delay_max,
            ..Settings::new(self.name.clone(), self.servers.clone())
        }
    }
}
