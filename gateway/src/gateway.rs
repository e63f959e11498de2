//! `groupcast gateway`: serves the HTTP API.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::alive::Login;
use groupcast_bus_config::connect;
use groupcast_bus_config::credentials::{HOST_LIFE, HostSigner};
use groupcast_bus_config::settings::optional_duration;
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::api::{self, App, Shared};
use crate::bus::BusOptions;
use crate::config::{self, ConfigOption};
use crate::doors::{Doors, Proxies};
use crate::expiry::Expiring;
use crate::telemetry::{self, TelemetryOptions};
use crate::{server, stores, tls};

/// Where the API is served, unless said otherwise.
const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4270);

#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    #[command(flatten)]
    pub config: ConfigOption,
    #[command(flatten)]
    pub bus: BusOptions,
    #[command(flatten)]
    pub gateway: GatewayOptions,
    #[command(flatten)]
    pub telemetry: TelemetryOptions,
}

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayOptions {
    /// Where the API is served; anything but loopback should have TLS [default: 127.0.0.1:4270]
    #[arg(id = "api_listen", long = "api-listen", env = "GROUPCAST_API_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Certificate chain to show, in PEM; read again when it changes
    #[arg(id = "api_certificate", long = "api-certificate", requires = "api_key")]
    pub certificate: Option<PathBuf>,
    /// Key of the certificate, in PEM; read again when it changes
    #[arg(id = "api_key", long = "api-key", requires = "api_certificate")]
    pub key: Option<PathBuf>,
    /// Serve without TLS on an address that others can reach
    #[arg(id = "api_allow_plain", long = "allow-plain", num_args = 0..=1, default_missing_value = "true")]
    pub allow_plain: Option<bool>,
    /// The gateway's own credentials file, where that of the bus is not one for both
    #[arg(id = "api_credentials", long = "gateway-credentials", env = "GROUPCAST_GATEWAY_CREDENTIALS")]
    pub credentials: Option<PathBuf>,
    /// Signs the credentials of hosts that join with a token; made with `groupcast host signer`. Without it none can
    #[arg(id = "api_host_signer", long = "host-signer", env = "GROUPCAST_HOST_SIGNER")]
    pub host_signer: Option<PathBuf>,
    /// How long the credential of a host that joins lives; its agent renews it when two thirds have passed [default: 30days]
    #[arg(id = "api_credential_life", long = "credential-life", value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub credential_life: Option<Duration>,
    /// Proxies and balancers, as addresses or prefixes: what they say in X-Forwarded-For is where a request comes from
    #[arg(id = "api_trusted_proxies", long = "trusted-proxy", value_name = "PREFIX")]
    pub trusted_proxies: Option<Vec<String>>,
    /// Names, besides localhost, under which a gateway on loopback is reached, such as by a proxy beside it
    #[arg(id = "api_hosts", long = "api-host", value_name = "NAME")]
    pub hosts: Option<Vec<String>>,
}

impl GatewayOptions {
    /// What is not said here is taken from there.
    pub fn or(self, other: Self) -> Self {
        // A certificate belongs to its key: they come from one place.
        let own = self.certificate.is_some() || self.key.is_some();
        let (certificate, key) = if own { (self.certificate, self.key) } else { (other.certificate, other.key) };
        Self {
            listen: self.listen.or(other.listen),
            certificate,
            key,
            allow_plain: self.allow_plain.or(other.allow_plain),
            credentials: self.credentials.or(other.credentials),
            host_signer: self.host_signer.or(other.host_signer),
            credential_life: self.credential_life.or(other.credential_life),
            trusted_proxies: self.trusted_proxies.or(other.trusted_proxies),
            hosts: self.hosts.or(other.hosts),
        }
    }

    pub fn listen(&self) -> SocketAddr {
        self.listen.unwrap_or(LISTEN)
    }

    pub fn files(&self) -> Option<tls::Files> {
        self.certificate.clone().zip(self.key.clone()).map(|(certificate, key)| tls::Files { certificate, key })
    }
}

impl Options {
    /// With what the configuration file says, if there is one.
    pub fn with_file(self) -> Result<Self, config::Error> {
        let config::File { bus, gateway, telemetry, .. } = self.config.read()?;
        Ok(Self {
            bus: self.bus.or(bus),
            gateway: self.gateway.or(gateway),
            telemetry: self.telemetry.or(telemetry),
            config: self.config,
        })
    }
}

/// As a gateway reaches the bus.
pub fn bus_options(bus: &BusOptions) -> connect::Options {
    let settings = bus.settings();
    connect::Options::new(&settings.servers, Role::Gateway, &settings.name)
        .identity(settings.identity)
        .tls(settings.tls)
        .reconnect_delay_max(settings.reconnect_delay_max)
}

/// A gateway that serves. Ends when `end` is told.
pub struct Gateway {
    pub address: SocketAddr,
    pub app: App,
    end: watch::Sender<bool>,
    served: tokio::task::JoinHandle<()>,
}

impl Gateway {
    pub async fn start(options: &Options, metrics: Option<PrometheusHandle>) -> anyhow::Result<Self> {
        let (address, files) = (options.gateway.listen(), options.gateway.files());
        if files.is_none() && !address.ip().is_loopback() && !options.gateway.allow_plain.unwrap_or(false) {
            anyhow::bail!(
                "{address} can be reached by others and there is no certificate: tokens would be readable on the way; \
                 give --api-certificate and --api-key, or --allow-plain if something in front of it does TLS"
            );
        }
        let acceptor = files.map(tls::acceptor).transpose()?;
        let proxies = Proxies::read(options.gateway.trusted_proxies.as_deref().unwrap_or_default())?;
        let listener = server::listening(address).await?;
        let address = listener.local_addr()?;
        let mut bus = options.bus.clone();
        if let Some(own) = &options.gateway.credentials {
            // The name that is said is the one of the other credential.
            (bus.credentials, bus.name) = (Some(own.clone()), None);
        }
        bus.check(Role::Gateway, SystemTime::now())?;
        let (held, monitors) = (bus.credentials.clone(), bus.monitor.clone().unwrap_or_default());
        tokio::spawn(stores::say(monitors.clone()));
        let mut bus = bus_options(&bus);
        bus.in_background = true;
        let (client, mut events) = connect::connect(bus).await?;
        let guard = events.guard(&client);
        let login = Login::default();
        let heard = login.clone();
        tokio::spawn(async move {
            let _guard = guard;
            while let Some(event) = events.next().await {
                heard.heard(&event);
                if let connect::Event::Denied(reason) = event {
                    tracing::error!(%reason, "the bus denies something a gateway needs: is this a gateway's credential?");
                }
            }
        });
        let expiring = (options.gateway.certificate.clone().map(Expiring::Certificate).into_iter())
            .chain(held.map(Expiring::Credential))
            .collect();
        let host_signer = options.gateway.host_signer.as_deref().map(HostSigner::load).transpose()?;
        let life = options.gateway.credential_life.unwrap_or(HOST_LIFE);
        let host_signer = host_signer.map(|signer| signer.living(life)).transpose()?;
        let app = Shared::start(client, metrics, host_signer, proxies.clone());
        let _ = app.expiring.set(expiring); // nobody else does
        let _ = app.monitors.set(monitors);
        let _ = app.login.set(login);
        let doors = Doors { loopback: address.ip().is_loopback(), names: options.gateway.hosts.clone().unwrap_or_default() };
        let (end, ended) = watch::channel(false);
        let secure = acceptor.is_some();
        let served = tokio::spawn(server::serve(listener, acceptor, api::routes_of(app.clone(), doors), proxies, ended));
        tracing::info!(%address, tls = secure, "serving the API");
        Ok(Self { address, app, end, served })
    }

    /// Lets requests in flight finish.
    pub async fn stop(self) {
        self.end.send_replace(true);
        let _ = self.served.await;
    }
}

/// Runs until told to end.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let metrics = telemetry::metrics()?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let gateway = Gateway::start(&options, Some(metrics)).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("ending");
    gateway.stop().await;
    Ok(())
}
