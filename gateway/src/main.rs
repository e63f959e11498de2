use anyhow::Context;
use clap::{Parser, Subcommand};
use groupcast_gateway::telemetry::{self, LogFormat, TelemetryOptions};
use groupcast_gateway::{controller, transfer};

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

#[derive(Subcommand)]
enum Command {
    /// Compiles what is in CATALOG and REGISTRY, publishes topics while it leads, and serves hosts. Run two or more.
    Controller(controller::Options),
    /// Writes everything that is not derived to a file, from which a bus that lost its data can be restored.
    Export(transfer::ExportOptions),
    /// Writes an export into a bus.
    Import(transfer::ImportOptions),
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let plain = || telemetry::start(arguments.log, &TelemetryOptions::default(), "groupcast");
    match arguments.command {
        Command::Controller(options) => {
            let options = options.with_file()?;
            let _telemetry = telemetry::start(arguments.log, options.telemetry(), options.name().as_str())?;
            controller::run(options)
        }
        Command::Export(options) => {
            let _telemetry = plain()?;
            runtime()?.block_on(transfer::export(options))
        }
        Command::Import(options) => {
            let _telemetry = plain()?;
            runtime()?.block_on(transfer::import(options))
        }
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")
}
