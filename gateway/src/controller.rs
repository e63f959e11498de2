//! `groupcast controller`: starts the actors, shows what they do over HTTP, and hands over when it is told to end.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
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
use crate::telemetry::TelemetryOptions;
use crate::{progress, watch};

/// How often it is checked that all actors answer. One that does not ends the process: whoever runs it starts it again.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Pause between attempts to reach a bus that is not there yet.
const START_PAUSE: Duration = Duration::from_secs(1);

/// How often it is said that the bus is blank, until it is not.
const BLANK_SAID_EVERY: Duration = Duration::from_secs(60);

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
}

impl ControllerOptions {
    /// What is not said here is taken from there.
    pub fn or(self, other: Self) -> Self {
        Self {
            listen: self.listen.or(other.listen),
            replicas: self.replicas.or(other.replicas),
            lease: self.lease.or(other.lease),
            never_lead: self.never_lead.or(other.never_lead),
        }
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

/// Runs until told to end. Actors need an actix system, everything else runs on the threads of one runtime.
pub fn run(options: Options, metrics: PrometheusHandle) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?;
    let handle = runtime.handle().clone();
    let mut runtime = Some(runtime);
    // Called once; a second runtime would be a mistake of actix.
    let system = actix::System::with_tokio_rt(move || match runtime.take() {
        Some(runtime) => runtime,
        None => std::process::abort(),
    });
    system.block_on(serve(options, metrics, handle))
}

async fn serve(options: Options, metrics: PrometheusHandle, runtime: tokio::runtime::Handle) -> anyhow::Result<()> {
    names::describe();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listen = options.controller.listen.unwrap_or(LISTEN);
    let listener = tokio::net::TcpListener::bind(listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {listen}"))?;
    let address = listener.local_addr()?;
    let state = watch::State::new(metrics);
    runtime.spawn(watch::serve(listener, state.clone()));
    tracing::info!(%address, "serving metrics and health");

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
        }
    };
    state.started(controller.clone());
    runtime.spawn(progress::serve(settings.clone(), controller.clone()));
    runtime.spawn(registrations::serve(settings, controller.clone()));
    tracing::info!(name = %options.name(), "controller started");
    runtime.spawn(say_if_blank(controller.clone()));
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
