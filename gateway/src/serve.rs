//! `groupcast serve`: a gateway and a controller in one process. `groupcast up`: with a private bus beside them, for one machine.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use clap::{Args, Parser};
use groupcast_bus_config::accounts::Role as BusRole;
use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_policy::ids::HostId;

use crate::bus::BusOptions;
use crate::controller;
use crate::gateway::{self, Gateway, ListenOptions};
use crate::secret;
use crate::token::{Role, Token};

/// How long everything may take to be ready.
const READY_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Args)]
pub struct ServeOptions {
    #[command(flatten)]
    bus: BusOptions,
    #[command(flatten)]
    listen: ListenOptions,
    /// The gateway's own credentials file, where the controller's is not one for both.
    #[arg(long, env = "GROUPCAST_GATEWAY_CREDENTIALS")]
    gateway_credentials: Option<PathBuf>,
    /// Where the controller's /livez, /readyz and /metrics are served.
    #[arg(long, env = "GROUPCAST_LISTEN", default_value = "127.0.0.1:4280")]
    listen_controller: SocketAddr,
    /// Copies of each stream.
    #[arg(long, default_value_t = 1)]
    replicas: usize,
    /// A leader that is not heard of for so long is replaced.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "3s")]
    lease: Duration,
}

/// The controller's options by its own command line, so that there is one place that knows them.
#[derive(Parser)]
struct ControllerArguments {
    #[command(flatten)]
    options: controller::Options,
}

fn controller_options(serve: &ServeOptions) -> anyhow::Result<controller::Options> {
    let settings = serve.bus.settings();
    let mut arguments: Vec<String> = vec!["controller".into()];
    let mut say = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    say("--server", settings.servers.join(","));
    say("--name", settings.name.to_string());
    say("--listen", serve.listen_controller.to_string());
    say("--replicas", serve.replicas.to_string());
    say("--lease", format!("{}ms", serve.lease.as_millis()));
    say("--reconnect-delay-max", format!("{}ms", settings.reconnect_delay_max.as_millis()));
    if let Identity::File(path) = &settings.identity {
        say("--credentials", path.display().to_string());
    }
    if let Some(path) = &settings.tls.authority {
        say("--tls-authority", path.display().to_string());
    }
    if let Some((certificate, key)) = &settings.tls.certificate {
        say("--tls-certificate", certificate.display().to_string());
        say("--tls-key", key.display().to_string());
    }
    let parsed = ControllerArguments::try_parse_from(arguments);
    parsed.map(|parsed| parsed.options).map_err(|error| anyhow!("the controller cannot be started so: {error}"))
}

/// Both until told to end. The gateway has a thread and a runtime of its own: actors bring theirs.
pub fn serve(options: ServeOptions) -> anyhow::Result<()> {
    let controller = controller_options(&options)?;
    let mut bus = options.bus.clone();
    bus.credentials = options.gateway_credentials.clone().or(bus.credentials);
    let gateway = gateway::Options { bus, listen: options.listen.clone() };
    let (started, start) = mpsc::channel();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("gateway".into()).spawn(move || {
        let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(started.send(Err(anyhow!("cannot start the runtime: {error}")))),
        };
        runtime.block_on(async move {
            match Gateway::start(&gateway, None).await {
                Err(error) => drop(started.send(Err(error))),
                Ok(gateway) => {
                    drop(started.send(Ok(gateway.address)));
                    let _ = ended.await; // or whoever would tell is gone
                    gateway.stop().await;
                }
            }
        });
    })?;
    start.recv().context("the gateway ended")??;
    let outcome = controller::run(controller);
    let _ = end.send(()); // it may have ended by itself
    let _ = thread.join();
    outcome
}

#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:\n  groupcast up &\n  export GROUPCAST_TOKEN_FILE=.groupcast/token\n  groupcast get groups")]
pub struct UpOptions {
    /// Where everything is kept; made if it is not there.
    #[arg(long, env = "GROUPCAST_DATA", default_value = ".groupcast")]
    data: PathBuf,
    #[command(flatten)]
    listen: ListenOptions,
    /// Port of the private bus on loopback; any that is free if not said.
    #[arg(long)]
    bus_port: Option<u16>,
}

/// A folder that only its owner can look into.
fn private_folder(path: &Path) -> anyhow::Result<()> {
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
    let data = std::path::absolute(&options.data)?;
    private_folder(&data)?;
    let name = HostId::new("local").map_err(|error| anyhow!("{error}"))?;
    let authority_path = data.join("authority.json");
    let mut authority = if authority_path.exists() { Authority::load(&authority_path)? } else { Authority::new() };
    let (controller, made_one) = credential(&mut authority, &data, BusRole::Controller, &name)?;
    let (gateway, made_other) = credential(&mut authority, &data, BusRole::Gateway, &name)?;
    if made_one || made_other || !authority_path.exists() {
        authority.save(&authority_path)?;
    }
    let mut config = Config::plain().store_dir(data.join("bus")).with(authority.server_config("accounts")?);
    if let Some(port) = options.bus_port {
        config = config.client_port(port);
    }
    let server = Server::start_blocking(config)?;
    let token_file = data.join("token");
    runtime.block_on(first_token(&server.url(), &name, &controller, &gateway, &token_file))?;
    let scheme = if options.listen.api_certificate.is_some() { "https" } else { "http" };
    println!("bus      {}", server.url());
    println!("gateway  {scheme}://{}", options.listen.address);
    println!("token    {}", token_file.display());
    println!();
    println!("export GROUPCAST_GATEWAY={scheme}://{} GROUPCAST_TOKEN_FILE={}", options.listen.address, token_file.display());
    println!("groupcast host add h1 --authority {} --out h1.creds   # for an agent", authority_path.display());
    // Parsed, so that what is not said here is what `serve` says.
    let arguments = ["serve", "--server", &server.url(), "--name", name.as_str(), "--listen-controller"].map(str::to_owned);
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).to_string();
    let credentials = [
        "--credentials".to_owned(),
        controller.display().to_string(),
        "--gateway-credentials".to_owned(),
        gateway.display().to_string(),
    ];
    let parsed = ServeArguments::try_parse_from(arguments.into_iter().chain([free]).chain(credentials))?;
    serve(ServeOptions { listen: options.listen, ..parsed.options })
}

#[derive(Parser)]
struct ServeArguments {
    #[command(flatten)]
    options: ServeOptions,
}

/// Makes an administrator's token if there is none that this folder knows. There is never a default one.
async fn first_token(url: &str, name: &HostId, controller: &Path, gateway: &Path, token_file: &Path) -> anyhow::Result<()> {
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
    Catalog::new(client).write(&change, None).await?;
    secret::write(token_file, &text).with_context(|| format!("cannot write {}", token_file.display()))
}
