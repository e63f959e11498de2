//! `groupcast-agent`: the host agent and its command line.

use std::process::ExitCode;

use clap::Parser;
use groupcast_host::command::{Arguments, Command, ConfigCommand, asked, config_checked, fail};
use groupcast_host::config::Config;
use groupcast_host::run;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .init();
    if let Command::Bench { name, json } = &arguments.command {
        return measured(name, *json);
    }
    match &arguments.command {
        Command::Config(ConfigCommand::Check) => return config_checked(&arguments.config),
        Command::Config(ConfigCommand::Reference) => {
            print!("{}", groupcast_host::config::reference());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let config = match Config::read(&arguments.config) {
        Ok(config) => config,
        Err(error) => return fail(&error.to_string(), 2),
    };
    let outcome = match arguments.command {
        Command::Run { dry_run } => started(config, dry_run),
        Command::Boot => run::boot(&config),
        Command::DryRun => run::dry_run(&config).map(|text| print!("{text}")),
        Command::Cleanup => run::cleanup(&config),
        Command::Join { gateway, token, authority } => joined(&config, &gateway, authority.as_deref(), &token),
        command => return asked(&config, command),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string(), 1),
    }
}

fn measured(name: &str, json: bool) -> ExitCode {
    let figures = match groupcast_host::bench::run(name) {
        Ok(figures) => figures,
        Err(error) => return fail(&error.to_string(), 1),
    };
    if json {
        println!("{}", serde_json::json!({"format_version": "1", "bench": name, "results": figures}));
    } else if let Some(rows) = figures.as_object() {
        rows.iter().for_each(|(name, value)| println!("{name:<22} {:>12.3}", value.as_f64().unwrap_or_default()));
    }
    ExitCode::SUCCESS
}

/// Actors need a system on its thread; tasks beside them run on the runtime's workers.
fn started(config: Config, dry_run: bool) -> Result<(), Box<dyn std::error::Error>> {
    const WORKERS: usize = 2;
    let system = actix::System::with_tokio_rt(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .enable_all()
            .build()
            .unwrap_or_else(|error| panic!("no runtime: {error}"))
    });
    system.block_on(async { if dry_run { run::run_dry(config).await } else { run::run(config).await } })
}

fn joined(
    config: &Config,
    gateway: &str,
    authority: Option<&std::path::Path>,
    token: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let path = config.credentials.as_deref().ok_or("agent.toml names no credentials file: say where it goes")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(groupcast_host::join::join(&config.host, gateway, authority, token, path))?;
    eprintln!("groupcast-agent: joined as host {}; the credential is in {}", config.host, path.display());
    Ok(())
}
