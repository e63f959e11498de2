use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use groupcast_gateway::{controller, gateway, transfer};
use tracing_subscriber::EnvFilter;

/// Security groups, from the place where they are written to the kernel of every host that uses them.
#[derive(Parser)]
#[command(name = "groupcast", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// How to write logs, which go to stderr. What is logged is set by GROUPCAST_LOG (default: info).
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log: LogFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Compiles what is in CATALOG and REGISTRY, publishes topics while it leads, and serves hosts. Run two or more.
    Controller(controller::Options),
    /// Serves the HTTP API.
    Gateway(gateway::Options),
    /// Writes everything that is not derived to a file, from which a bus that lost its data can be restored.
    Export(transfer::ExportOptions),
    /// Writes an export into a bus.
    Import(transfer::ImportOptions),
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    logging(arguments.log);
    match arguments.command {
        Command::Controller(options) => controller::run(options),
        Command::Gateway(options) => runtime()?.block_on(gateway::run(options)),
        Command::Export(options) => runtime()?.block_on(transfer::export(options)),
        Command::Import(options) => runtime()?.block_on(transfer::import(options)),
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")
}

fn logging(format: LogFormat) {
    let filter = EnvFilter::try_from_env("GROUPCAST_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second logger would be a mistake of ours; going on without one is better than not starting.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
