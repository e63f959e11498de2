//! `groupcast controller`: starts the actors, shows what they do over HTTP, and hands over when it is told to end.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::settings::optional_duration;
use groupcast_control::begin::ADVICE;
use groupcast_control::controller::{Controller, Settings};
use groupcast_control::names;
use groupcast_control::source::config::{Table, sources};
use groupcast_policy::ids::HostId;
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::bus::BusOptions;
use crate::config::{self, ConfigOption};
use crate::registrations::{self, RegistrationOptions};
use crate::server::listening;
use crate::telemetry::TelemetryOptions;
use crate::watch::Access;
use crate::{progress, stores, tls, watch};

/// How often it is checked that all actors answer. One that does not ends the process: whoever runs it starts it again.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Pause between attempts to reach a bus that is not there yet.
const START_PAUSE: Duration = Duration::from_secs(1);

/// How often it is said that the bus is blank, until it is not.
const BLANK_SAID_EVERY: Duration = Duration::from_secs(60);

/// Shortest token that is taken.
const TOKEN_BYTES_MIN: usize = 16;

/// Where the controller is watched, unless said otherwise.
const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4280);

#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    #[command(flatten)]
    pub config: ConfigOption,
    #[command(flatten)]
    pub bus: BusOptions,
    #[command(flatten)]
    pub controller: ControllerOptions,
    #[command(flatten)]
    pub registration: RegistrationOptions,
    #[command(flatten)]
    pub telemetry: TelemetryOptions,
    #[arg(skip)]
    pub sources: Vec<Table>,
}

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControllerOptions {
    /// Where /livez, /readyz, /metrics and /v1 are served [default: 127.0.0.1:4280]
    #[arg(long, env = "GROUPCAST_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Copies of each stream [default: 1]
    #[arg(long)]
    pub replicas: Option<usize>,
    /// A leader that is not heard of for so long is replaced [default: 3s]
    #[arg(long, value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub lease: Option<Duration>,
    /// Follows and serves, but never leads
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub never_lead: Option<bool>,
    /// Certificate chain to show, in PEM; read again when it changes
    #[arg(id = "controller_certificate", long = "controller-certificate", requires = "controller_key")]
    pub certificate: Option<PathBuf>,
    /// Key of the certificate, in PEM; read again when it changes
    #[arg(id = "controller_key", long = "controller-key", requires = "controller_certificate")]
    pub key: Option<PathBuf>,
    /// Serve without TLS on an address that others can reach
    #[arg(id = "controller_allow_plain", long = "controller-allow-plain", num_args = 0..=1, default_missing_value = "true")]
    pub allow_plain: Option<bool>,
    /// File with a token that whoever asks for more than /livez and /readyz must show; without it /metrics is open, and others than this machine are not shown /v1
    #[arg(id = "controller_token_file", long = "controller-token-file", env = "GROUPCAST_CONTROLLER_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

impl ControllerOptions {
    /// What is not said here is taken from there.
    pub fn or(self, other: Self) -> Self {
        // A certificate belongs to its key: they come from one place.
        let own = self.certificate.is_some() || self.key.is_some();
        let (certificate, key) = if own { (self.certificate, self.key) } else { (other.certificate, other.key) };
        Self {
            certificate,
            key,
            allow_plain: self.allow_plain.or(other.allow_plain),
            listen: self.listen.or(other.listen),
            replicas: self.replicas.or(other.replicas),
            lease: self.lease.or(other.lease),
            never_lead: self.never_lead.or(other.never_lead),
            token_file: self.token_file.or(other.token_file),
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
        let config::File { bus, controller, registration, telemetry, source, .. } = self.config.read()?;
        Ok(Self {
            bus: self.bus.or(bus),
            controller: self.controller.or(controller),
            registration: self.registration.or(registration),
            telemetry: self.telemetry.or(telemetry),
            config: self.config,
            sources: source,
        })
    }

    pub fn name(&self) -> HostId {
        self.bus.name()
    }

    fn settings(&self) -> anyhow::Result<Settings> {
        let mut settings = self.bus.settings();
        settings.registration = self.registration.settings()?;
        let ControllerOptions { replicas, lease, never_lead, .. } = &self.controller;
        settings.replicas = replicas.unwrap_or(settings.replicas);
        settings.lease = lease.unwrap_or(settings.lease);
        settings.candidate = !never_lead.unwrap_or(false);
        // The file was judged when it was read.
        settings.sources = sources(&self.sources).unwrap_or_default();
        Ok(settings)
    }
}

/// Who may see more than whether the controller is well. As with a gateway, what others can reach has TLS.
fn access(options: &ControllerOptions) -> anyhow::Result<Access> {
    let listen = options.listen();
    if !listen.ip().is_loopback() && options.certificate.is_none() && !options.allow_plain.unwrap_or(false) {
        anyhow::bail!(
            "{listen} can be reached by others and there is no certificate: what is shown would be readable on the way; listen on \
             loopback, give --controller-certificate and --controller-key, or --controller-allow-plain if something in front of it does TLS"
        );
    }
    match &options.token_file {
        Some(path) => token(path).map(Access::Token),
        None if listen.ip().is_loopback() => Ok(Access::Everything),
        None => Ok(Access::Metrics),
    }
}

fn token(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = text.trim();
    if text.len() < TOKEN_BYTES_MIN {
        anyhow::bail!("{} holds fewer than {TOKEN_BYTES_MIN} characters: that can be guessed", path.display());
    }
    Ok(text.to_owned())
}

/// Runs until told to end. Actors need an actix system, everything else runs on the threads of one runtime.
pub fn run(options: Options, metrics: PrometheusHandle) -> anyhow::Result<()> {
    run_until(options, metrics, std::future::pending())
}

/// The same, or until `over` says why it cannot go on.
pub fn run_until(
    options: Options,
    metrics: PrometheusHandle,
    over: impl Future<Output = anyhow::Error> + 'static,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?;
    let handle = runtime.handle().clone();
    let mut runtime = Some(runtime);
    // Called once; a second runtime would be a mistake of actix.
    let system = actix::System::with_tokio_rt(move || match runtime.take() {
        Some(runtime) => runtime,
        None => std::process::abort(),
    });
    system.block_on(serve(options, metrics, handle, over))
}

async fn serve(
    options: Options,
    metrics: PrometheusHandle,
    runtime: tokio::runtime::Handle,
    over: impl Future<Output = anyhow::Error> + 'static,
) -> anyhow::Result<()> {
    tokio::pin!(over);
    names::describe();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    options.bus.check(Role::Controller, SystemTime::now())?;
    let listen = options.controller.listen();
    let (access, acceptor) = (access(&options.controller)?, options.controller.files().map(tls::acceptor).transpose()?);
    let listener = listening(listen).await?;
    let address = listener.local_addr()?;
    let state = watch::State::new(metrics);
    let secure = acceptor.is_some();
    runtime.spawn(watch::serve(listener, acceptor, state.clone(), access));
    tracing::info!(%address, tls = secure, "serving metrics and health");

    let settings = options.settings()?;
    let controller = loop {
        tokio::select! {
            started = Controller::start(settings.clone(), runtime.clone()) => match started {
                Ok(controller) => break Arc::new(controller),
                Err(error) => {
                    tracing::warn!(%error, "the bus is not ready; trying again");
                    tokio::time::sleep(START_PAUSE).await;
                }
            },
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            why = &mut over => return Err(why),
        }
    };
    state.started(controller.clone());
    runtime.spawn(progress::serve(settings.clone(), controller.clone()));
    runtime.spawn(registrations::serve(settings, controller.clone()));
    tracing::info!(name = %options.name(), "controller started");
    runtime.spawn(say_if_blank(controller.clone()));
    runtime.spawn(stores::say(options.bus.monitor.clone().unwrap_or_default()));
    let mut alive = tokio::time::interval(ALIVE_EVERY);
    let end = loop {
        tokio::select! {
            _ = alive.tick() => if let Err(error) = controller.alive().await {
                // What is left of it must not go on leading: nothing would be published.
                tracing::error!(%error, "a part of the controller failed; ending");
                break Err(error.into());
            },
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            why = &mut over => break Err(why),
        }
    };
    tracing::info!("handing over");
    controller.resign().await;
    end
}

/// An operator who waits for a source to be read looks here.
async fn say_if_blank(controller: Arc<Controller>) {
    loop {
        let Ok(status) = controller.status().await else { return };
        match (status.compiler.loaded, status.compiler.blank) {
            (true, false) => return,
            (true, true) => {
                tracing::warn!("{ADVICE}");
                tokio::time::sleep(BLANK_SAID_EVERY).await;
            }
            (false, _) => tokio::time::sleep(ALIVE_EVERY).await,
        }
    }
}
