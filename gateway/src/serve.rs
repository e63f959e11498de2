//! `groupcast serve`: a gateway and a controller in one process. `groupcast up`: with a private bus beside them, for one machine.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, anyhow};
use clap::Args;
use groupcast_bus_config::accounts::Role as BusRole;
use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::server::{self, Config, Lock, Server};
use groupcast_bus_config::streams;
use groupcast_control::begin;
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_policy::ids::HostId;

use crate::bus::BusOptions;
use crate::config::{self, ConfigOption};
use crate::controller::{self, ControllerOptions};
use crate::demo::DemoOptions;
use crate::gateway::{self, Gateway, GatewayOptions};
use crate::registrations::RegistrationOptions;
use crate::secret;
use crate::telemetry::{self, TelemetryOptions};
use crate::token::{Role, Token};

/// How long everything may take to be ready.
const READY_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Default, Args)]
pub struct ServeOptions {
    #[command(flatten)]
    config: ConfigOption,
    #[command(flatten)]
    bus: BusOptions,
    #[command(flatten)]
    controller: ControllerOptions,
    #[command(flatten)]
    registration: RegistrationOptions,
    #[command(flatten)]
    gateway: GatewayOptions,
    #[command(flatten)]
    pub telemetry: TelemetryOptions,
    #[arg(skip)]
    sources: Vec<groupcast_control::source::config::Table>,
}

impl ServeOptions {
    /// With what the configuration file says, if there is one.
    pub fn with_file(self) -> Result<Self, config::Error> {
        let config::File { bus, controller, registration, gateway, telemetry, source } = self.config.read()?;
        Ok(Self {
            bus: self.bus.or(bus),
            controller: self.controller.or(controller),
            registration: self.registration.or(registration),
            gateway: self.gateway.or(gateway),
            telemetry: self.telemetry.or(telemetry),
            config: self.config,
            sources: source,
        })
    }
}

/// Both until told to end. The gateway has a thread and a runtime of its own: actors bring theirs.
pub fn serve(options: ServeOptions) -> anyhow::Result<()> {
    serve_and(options, |_| (), std::future::pending())
}

/// The same; `started` is told where the API is.
fn serve_and(
    options: ServeOptions,
    started_at: impl FnOnce(SocketAddr),
    over: impl Future<Output = anyhow::Error> + 'static,
) -> anyhow::Result<()> {
    let metrics = telemetry::metrics()?;
    let ServeOptions { config, bus, controller, registration, gateway, telemetry, sources } = options;
    let of_gateway = gateway::Options { config: config.clone(), bus: bus.clone(), gateway, telemetry: telemetry.clone() };
    let of_controller = controller::Options { config, bus, controller, registration, telemetry, sources };
    let seen = metrics.clone();
    let (started, start) = mpsc::channel();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("gateway".into()).spawn(move || {
        let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(started.send(Err(anyhow!("cannot start the runtime: {error}")))),
        };
        runtime.block_on(async move {
            match Gateway::start(&of_gateway, Some(seen)).await {
                Err(error) => drop(started.send(Err(error))),
                Ok(gateway) => {
                    drop(started.send(Ok(gateway.address)));
                    let _ = ended.await; // or whoever would tell is gone
                    gateway.stop().await;
                }
            }
        });
    })?;
    started_at(start.recv().context("the gateway ended")??);
    let outcome = controller::run_until(of_controller, metrics, over);
    let _ = end.send(()); // it may have ended by itself
    let _ = thread.join();
    outcome
}

#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  groupcast up &\n  export GROUPCAST_TOKEN_FILE=.groupcast/token\n  groupcast get groups")]
pub struct UpOptions {
    /// Where everything is kept; made if it is not there.
    #[arg(long, env = "GROUPCAST_DATA", default_value = ".groupcast")]
    pub data: PathBuf,
    /// Take `[[source]]` and `[registration]` from this configuration file; what else it says does not concern this command.
    #[arg(long)]
    config: Option<PathBuf>,
    #[command(flatten)]
    gateway: GatewayOptions,
    /// Port of the private bus on loopback; any that is free if not said.
    #[arg(long)]
    bus_port: Option<u16>,
    #[command(flatten)]
    pub demo: DemoOptions,
}

/// A folder that only its owner can look into.
pub fn private_folder(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    if !path.is_dir() {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.with_context(|| format!("cannot make {}", path.display()))?;
    }
    let owner_only = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(path, owner_only).with_context(|| format!("cannot close {} to others", path.display()))
}

/// Credentials that are made once and never leave the folder.
fn credential(authority: &mut Authority, data: &Path, role: BusRole, name: &HostId) -> anyhow::Result<(PathBuf, bool)> {
    let path = data.join(format!("{}.creds", role.as_str()));
    if path.exists() {
        return Ok((path, false));
    }
    authority.mint(role, name, None, SystemTime::now())?.save(&path)?;
    Ok((path, true))
}

pub fn up(options: UpOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?;
    let config::File { registration, source, .. } = ConfigOption { config: options.config }.read()?;
    let data = std::path::absolute(&options.data)?;
    private_folder(&data)?;
    // Before anything is read or made: two on one folder would each take what the other writes for its own.
    let _lock = Lock::take(&data).map_err(|error| match error {
        server::Error::InUse { holder, .. } => anyhow!(
            "another `groupcast up` (process {holder}) runs on {}: end it first, or give another folder with --data",
            data.display()
        ),
        error => error.into(),
    })?;
    let name = HostId::new("local").map_err(|error| anyhow!("{error}"))?;
    let authority_path = data.join("authority.json");
    if !authority_path.exists() {
        Authority::new().save(&authority_path)?;
    }
    // A command may add a host's credential to it at the same time.
    let mut authority = Authority::lock(&authority_path)?;
    let (controller, made_one) = credential(&mut authority, &data, BusRole::Controller, &name)?;
    let (gateway, made_other) = credential(&mut authority, &data, BusRole::Gateway, &name)?;
    if made_one || made_other {
        authority.save()?;
    }
    let authority = authority.release();
    // What was never there cannot have lost anything.
    let is_new = !data.join("bus").exists() && !data.join("token").exists();
    let mut config = Config::plain().store_dir(data.join("bus")).with(authority.server_config("accounts")?);
    if let Some(port) = options.bus_port {
        config = config.client_port(port);
    }
    let server = Server::start_blocking(config)?;
    let url = server.url();
    let token_file = data.join("token");
    runtime.block_on(first_token(&url, &name, &controller, &gateway, &token_file, is_new))?;
    let scheme = if options.gateway.certificate.is_some() { "https" } else { "http" };
    let bus = url.clone();
    let told = move |address: SocketAddr| {
        let api = format!("{scheme}://{address}");
        println!("bus      {bus}\ngateway  {api}\ntoken    {}\n", token_file.display());
        println!("export GROUPCAST_GATEWAY={api} GROUPCAST_TOKEN_FILE={}", token_file.display());
        println!("groupcast host add h1 --authority {} --out h1.creds   # for an agent", authority_path.display());
    };
    // Everything is on one machine: what signs for hosts is here too.
    let signer = data.join("host-signer.json");
    if !signer.exists() {
        authority.host_signer()?.save(&signer)?;
    }
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let options = ServeOptions {
        bus: BusOptions { servers: Some(vec![url]), name: Some(name), credentials: Some(controller), ..BusOptions::default() },
        controller: ControllerOptions { listen: Some(free), ..ControllerOptions::default() },
        gateway: GatewayOptions { credentials: Some(gateway), host_signer: Some(signer), ..options.gateway },
        registration,
        sources: source,
        ..ServeOptions::default()
    };
    let (server, over) = kept(server)?;
    let outcome = serve_and(options, told, over);
    // Ends the bus after everybody who uses it.
    drop(server);
    outcome
}

/// How often it is looked whether the bus still runs.
const BUS_LOOKED_AT_EVERY: Duration = Duration::from_millis(100);
/// Starts of a bus that ends by itself, within [`BUS_RESTARTS_WITHIN`]; one more is given up.
const BUS_RESTARTS_MAX: usize = 5;
const BUS_RESTARTS_WITHIN: Duration = Duration::from_secs(60);

/// Ends the bus when it is dropped.
struct Kept {
    end: Option<mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it says itself what failed
        }
    }
}

/// Starts a bus again that dies, on a thread of its own; says why when that does not help.
fn kept(mut server: Server) -> anyhow::Result<(Kept, impl Future<Output = anyhow::Error> + 'static)> {
    let (end, ended) = mpsc::channel::<()>();
    let (gave_up, given_up) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("bus".into()).spawn(move || {
        let mut restarts: VecDeque<Instant> = VecDeque::new();
        while ended.recv_timeout(BUS_LOOKED_AT_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            if !server.has_ended() {
                continue;
            }
            restarts.retain(|at| at.elapsed() < BUS_RESTARTS_WITHIN);
            tracing::error!(restarts = restarts.len(), "nats-server has ended; starting it again");
            let outcome =
                if restarts.len() < BUS_RESTARTS_MAX { server.restart_blocking() } else { Err(server::Error::NotRunning) };
            restarts.push_back(Instant::now());
            if let Err(error) = outcome {
                let words = server.last_words();
                // Whoever waits for this is gone only if everything ends anyway.
                let _ = gave_up.send(anyhow!("nats-server ended and cannot be kept running ({error}); its last words:\n{words}"));
                return;
            }
        }
    })?;
    let over = async move {
        match given_up.await {
            Ok(why) => why,
            // It was told to end.
            Err(_) => std::future::pending().await,
        }
    };
    Ok((Kept { end: Some(end), thread: Some(thread) }, over))
}

/// Makes an administrator's token if there is none that this folder knows. There is never a default one.
async fn first_token(
    url: &str,
    name: &HostId,
    controller: &Path,
    gateway: &Path,
    token_file: &Path,
    is_new: bool,
) -> anyhow::Result<()> {
    let servers = [url.to_owned()];
    let as_controller =
        connect::Options::new(&servers, BusRole::Controller, name).identity(Identity::File(controller.to_owned()));
    let (client, _events) = connect::connect(as_controller).await?;
    tokio::time::timeout(READY_DEADLINE, streams::ensure(&client, 1)).await.context("the bus is not ready")??;
    if token_file.exists() {
        return Ok(());
    }
    let as_gateway = connect::Options::new(&servers, BusRole::Gateway, name).identity(Identity::File(gateway.to_owned()));
    let (client, _events) = connect::connect(as_gateway).await?;
    let (token, text) = Token::new("local", Role::Admin, None, "made by groupcast up", None, SystemTime::now())?;
    let change = Change {
        author: "groupcast up".to_owned(),
        reason: "the first token".to_owned(),
        key: None,
        writes: vec![Write::put(token.document(), Expected::Any)],
    };
    Catalog::new(client.clone()).write(&change, None).await?;
    if is_new {
        begin::begin(&client, "groupcast up", SystemTime::now()).await?;
    }
    secret::write(token_file, &text).with_context(|| format!("cannot write {}", token_file.display()))
}
