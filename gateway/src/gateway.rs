//! `groupcast gateway`: serves the HTTP API.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::api::{self, App, Shared};
use crate::bus::BusOptions;
use crate::{server, tls};

#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    pub bus: BusOptions,
    #[command(flatten)]
    pub listen: ListenOptions,
}

#[derive(Debug, Clone, Args)]
pub struct ListenOptions {
    /// Where the API is served. Anything but loopback should have TLS.
    #[arg(long = "api-listen", env = "GROUPCAST_API_LISTEN", default_value = "127.0.0.1:4270")]
    pub address: SocketAddr,
    /// Certificate chain to show, in PEM; read again when it changes.
    #[arg(long, requires = "api_key")]
    pub api_certificate: Option<PathBuf>,
    /// Key of the certificate, in PEM; read again when it changes.
    #[arg(long, requires = "api_certificate")]
    pub api_key: Option<PathBuf>,
    /// Serve without TLS on an address that others can reach.
    #[arg(long)]
    pub allow_plain: bool,
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
        let ListenOptions { address, api_certificate, api_key, allow_plain } = &options.listen;
        let files = api_certificate.clone().zip(api_key.clone()).map(|(certificate, key)| tls::Files { certificate, key });
        if files.is_none() && !address.ip().is_loopback() && !allow_plain {
            anyhow::bail!(
                "{address} can be reached by others and there is no certificate: tokens would be readable on the way; \
                 give --api-certificate and --api-key, or --allow-plain if something in front of it does TLS"
            );
        }
        let acceptor = files.map(tls::acceptor).transpose()?;
        let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        let mut bus = bus_options(&options.bus);
        bus.in_background = true;
        let (client, mut events) = connect::connect(bus).await?;
        tokio::spawn(async move {
            while let Some(event) = events.next().await {
                if let connect::Event::Denied(reason) = event {
                    tracing::error!(%reason, "the bus denies something a gateway needs: is this a gateway's credential?");
                }
            }
        });
        let app = Shared::start(client, metrics);
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
    let metrics = PrometheusBuilder::new().install_recorder().context("cannot keep metrics")?;
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
