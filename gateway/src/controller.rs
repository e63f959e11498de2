//! `groupcast controller`: starts the actors, shows what they do over HTTP, and hands over when it is told to end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use groupcast_control::controller::{Controller, Settings};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::signal::unix::{SignalKind, signal};

use crate::bus::BusOptions;
use crate::{progress, watch};

/// How often it is checked that all actors answer. One that does not ends the process: whoever runs it starts it again.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Pause between attempts to reach a bus that is not there yet.
const START_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    bus: BusOptions,
    /// Where /livez, /readyz, /metrics and /v1 are served.
    #[arg(long, env = "GROUPCAST_LISTEN", default_value = "127.0.0.1:4280")]
    listen: SocketAddr,
    /// Copies of each stream.
    #[arg(long, default_value_t = 1)]
    replicas: usize,
    /// A leader that is not heard of for so long is replaced.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "3s")]
    lease: Duration,
    /// Follows and serves, but never leads.
    #[arg(long)]
    never_lead: bool,
}

impl Options {
    fn settings(&self) -> Settings {
        Settings { replicas: self.replicas, lease: self.lease, candidate: !self.never_lead, ..self.bus.settings() }
    }
}

/// Runs until told to end. Actors need an actix system, everything else runs on the threads of one runtime.
pub fn run(options: Options) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?;
    let handle = runtime.handle().clone();
    let mut runtime = Some(runtime);
    // Called once; a second runtime would be a mistake of actix.
    let system = actix::System::with_tokio_rt(move || match runtime.take() {
        Some(runtime) => runtime,
        None => std::process::abort(),
    });
    system.block_on(serve(options, handle))
}

async fn serve(options: Options, runtime: tokio::runtime::Handle) -> anyhow::Result<()> {
    let recorder = PrometheusBuilder::new();
    let metrics = recorder.install_recorder().context("cannot keep metrics")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = tokio::net::TcpListener::bind(options.listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {}", options.listen))?;
    let address = listener.local_addr()?;
    let state = watch::State::new(metrics);
    runtime.spawn(watch::serve(listener, state.clone()));
    tracing::info!(%address, "serving metrics and health");

    let controller = loop {
        tokio::select! {
            started = Controller::start(options.settings(), runtime.clone()) => match started {
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
    runtime.spawn(progress::serve(options.settings(), controller.clone()));
    tracing::info!(name = %options.bus.name, "controller started");
    let mut alive = tokio::time::interval(ALIVE_EVERY);
    loop {
        tokio::select! {
            _ = alive.tick() => controller.alive().await?,
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    tracing::info!("handing over");
    controller.resign().await;
    Ok(())
}
