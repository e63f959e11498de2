//! `groupcast gateway`: serves the HTTP API.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect;
use groupcast_bus_config::credentials::HostSigner;
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::api::{self, App, Shared};
use crate::bus::BusOptions;
use crate::config::{self, ConfigOption};
use crate::telemetry::{self, TelemetryOptions};
use crate::{server, tls};

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
        let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        let mut bus = options.bus.clone();
        bus.credentials = options.gateway.credentials.clone().or(bus.credentials);
        let mut bus = bus_options(&bus);
        bus.in_background = true;
        let (client, mut events) = connect::connect(bus).await?;
        tokio::spawn(async move {
            while let Some(event) = events.next().await {
                if let connect::Event::Denied(reason) = event {
                    tracing::error!(%reason, "the bus denies something a gateway needs: is this a gateway's credential?");
                }
            }
        });
        let host_signer = options.gateway.host_signer.as_deref().map(HostSigner::load).transpose()?;
        let app = Shared::start(client, metrics, host_signer);
        let (end, ended) = watch::channel(false);
        let secure = acceptor.is_some();
        let served = tokio::spawn(server::serve(listener, acceptor, api::routes_of(app.clone()), ended));
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
