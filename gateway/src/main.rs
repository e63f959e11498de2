use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use groupcast_gateway::cli::context::Connection;
use groupcast_gateway::cli::{
    self, Failure, apply, audit, bus, config, context, credential, doctor, explain, get, host, init, plan, registrations, setup,
    sources, token, wait,
};
use groupcast_gateway::telemetry::{self, LogFormat, TelemetryOptions};
use groupcast_gateway::{controller, demo, gateway, serve, transfer};

/// With the system's allocator a fifth of a busy controller's processor time was spent in it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Security groups, from the place where they are written to the kernel of every host that uses them.
///
/// Data goes to stdout, words to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 conflict or stale plan, 4 not found, 5 waited
/// too long, 6 a host reported that it failed.
#[derive(Parser)]
#[command(name = "groupcast", version, max_term_width = 120)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    connection: Connection,
    /// How to write logs, which go to stderr. What is logged is set by GROUPCAST_LOG.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Compiles what is in CATALOG and REGISTRY, publishes topics while it leads, and serves hosts. Run two or more.
    Controller(controller::Options),
    /// Serves the HTTP API. Run two or more.
    Gateway(gateway::Options),
    /// Runs a gateway and a controller in one process.
    Serve(serve::ServeOptions),
    /// Says that the bus is new and lost nothing, so that controllers lead before anything is written.
    #[command(
        after_help = "Needed once, where groups come from sources only: nobody leads a bus on which nothing was ever written, since it \
                            may be one that lost its data."
    )]
    Init(init::Options),
    /// Runs everything on one machine: a private bus, a controller and a gateway, with credentials of its own.
    Up(serve::UpOptions),
    /// Says back what it is told: a workload of the demonstration.
    #[command(hide = true)]
    Echo { address: std::net::SocketAddr, name: String },
    /// Writes documents as one change.
    Apply(apply::ApplyOptions),
    /// Shows what documents would change in meaning: flows gained and lost, workloads and hosts concerned.
    Plan(plan::Options),
    /// Shows groups, templates, workloads, hosts, registrations, changes, sources or tokens.
    Get(get::Options),
    /// Says why a flow passes or does not.
    Explain(explain::Options),
    /// Waits until every host that a change concerns has it in force.
    Wait(wait::Options),
    /// Keeps a change that was applied with --confirm.
    Confirm(apply::ConfirmOptions),
    /// Shows who wrote which version of a document, when, and what it changed.
    Audit(audit::Options),
    /// Takes a change back, with a new one.
    Undo(apply::UndoOptions),
    /// Deletes a document.
    Delete(apply::DeleteOptions),
    /// Writes everything that is not derived to a file, from which a bus that lost its data can be restored.
    Export(transfer::ExportOptions),
    /// Writes an export into a bus, or its documents through a gateway.
    Import(transfer::ImportOptions),
    /// Who may use gateways.
    #[command(subcommand)]
    Token(token::Command),
    /// Hosts: what they are granted, and the credentials with which their agents reach the bus.
    #[command(subcommand)]
    Host(host::Command),
    /// Credentials with which controllers, gateways and others reach the bus.
    #[command(subcommand)]
    Credential(credential::Command),
    /// Where groups come from besides gateways.
    #[command(subcommand)]
    Sources(sources::Command),
    /// Hosts that are silent, and what becomes of them.
    #[command(subcommand)]
    Registrations(registrations::Command),
    /// Looks at what may be wrong, and says what to do.
    Doctor(doctor::Options),
    /// Configuration files.
    #[command(subcommand)]
    Config(config::Command),
    /// Gateways by name.
    #[command(subcommand)]
    Context(context::Command),
    /// The bus: setting it up, what goes over it, and a store that nobody can lead with.
    #[command(subcommand)]
    Bus(bus::Command),
    /// Prints completions for a shell.
    Completions { shell: Shell },
    /// Writes man pages into a folder.
    Man { folder: std::path::PathBuf },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            cli::output::say(&failure.to_string());
            failure.exit_code()
        }
    }
}

fn run(Arguments { command, connection, log }: Arguments) -> cli::Result {
    // What runs for long says what it does, and may have a configuration file; what answers a question says only what it was asked.
    let (mut command, mut telemetry, mut name, mut usual) =
        (command, TelemetryOptions::default(), "groupcast".to_owned(), "warn");
    match &mut command {
        Command::Controller(options) => {
            *options = std::mem::take(options).with_file().map_err(anyhow::Error::from)?;
            (telemetry, name, usual) = (options.telemetry.clone(), options.name().to_string(), "info");
        }
        Command::Gateway(options) => {
            *options = std::mem::take(options).with_file().map_err(anyhow::Error::from)?;
            (telemetry, name, usual) = (options.telemetry.clone(), options.bus.name().to_string(), "info");
        }
        Command::Serve(options) => {
            *options = std::mem::take(options).with_file().map_err(anyhow::Error::from)?;
            (telemetry, usual) = (options.telemetry.clone(), "info");
        }
        // A story is told in its own words.
        Command::Up(options) if options.demo.demo => {}
        // What the bus refuses is said in its own words.
        Command::Config(_) => usual = "warn,async_nats=off",
        Command::Up(_) | Command::Export(_) | Command::Import(_) => usual = "info",
        _ => {}
    }
    let _telemetry = telemetry::start(log, &telemetry, &name, usual)?;
    // Actors bring a runtime of their own.
    let command = match command {
        Command::Controller(options) => return Ok(controller::run(options, telemetry::metrics()?)?),
        Command::Serve(options) => return Ok(serve::serve(options)?),
        Command::Up(options) if !options.demo.demo => return Ok(serve::up(options)?),
        Command::Echo { address, name } => return demo::echo::run(address, &name),
        command => command,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        match command {
            Command::Controller(_) | Command::Serve(_) | Command::Echo { .. } => Ok(()),
            Command::Up(options) => demo::run(&options.data, options.demo).await,
            Command::Gateway(options) => Ok(gateway::run(options).await?),
            Command::Init(options) => init::init(&connection, options).await,
            Command::Apply(options) => apply::apply(&connection, options).await,
            Command::Plan(options) => plan::plan(&connection, options).await,
            Command::Get(options) => get::get(&connection, options).await,
            Command::Explain(options) => explain::explain(&connection, options).await,
            Command::Wait(options) => wait::wait(&connection, options).await,
            Command::Confirm(options) => apply::confirm(&connection, options).await,
            Command::Audit(options) => audit::audit(&connection, options).await,
            Command::Undo(options) => apply::undo(&connection, options).await,
            Command::Delete(options) => apply::delete(&connection, options).await,
            Command::Export(options) => cli::transfer::export(&connection, options).await,
            Command::Import(options) => cli::transfer::import(&connection, options).await,
            Command::Token(command) => token::run(&connection, command).await,
            Command::Sources(command) => sources::run(&connection, command).await,
            Command::Host(command) => host::run(&connection, command).await,
            Command::Registrations(command) => registrations::run(&connection, command).await,
            Command::Doctor(options) => doctor::doctor(&connection, options).await,
            Command::Context(command) => context::run(command),
            Command::Config(command) => config::run(command).await,
            Command::Bus(bus::Command::Init(options)) => setup::init(options),
            Command::Bus(bus::Command::Add(options)) => setup::add(options),
            Command::Bus(bus::Command::Renew(options)) => setup::renew(options),
            Command::Credential(command) => credential::run(command).await,
            Command::Bus(bus::Command::Tap(options)) => bus::tap(options).await,
            Command::Bus(bus::Command::RepairTerm(options)) => bus::repair_term(options).await,
            Command::Completions { shell } => {
                let mut text = Vec::new();
                clap_complete::generate(shell, &mut Arguments::command(), "groupcast", &mut text);
                cli::output::print(&String::from_utf8_lossy(&text))
            }
            Command::Man { folder } => std::fs::create_dir_all(&folder)
                .and_then(|()| clap_mangen::generate_to(Arguments::command(), &folder))
                .map_err(|error| Failure::failed(format!("{} cannot be written: {error}", folder.display()))),
        }
    })
}
