//! `groupcast-agent`: the host agent and its command line.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::Parser;
use groupcast_bus_config::shown::Shown;
use groupcast_host::command::{Arguments, Command, ConfigCommand, asked, config_checked, fail};
use groupcast_host::config::Config;
use groupcast_host::{run, terminal};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // What answers a question says only what it was asked.
    let usual = if matches!(arguments.command, Command::Config(_)) { "warn,async_nats=off" } else { "info" };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| usual.into()))
        .with_ansi(false)
        .with_writer(|| Shown::text(std::io::stderr()))
        .init();
    if let Command::Bench { name, json } = &arguments.command {
        return measured(name, *json);
    }
    match &arguments.command {
        Command::Config(ConfigCommand::Check { offline }) => return config_checked(&arguments.config, *offline),
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
        Command::DryRun => run::dry_run(&config).map(|text| terminal::print(&text)),
        Command::Cleanup => run::cleanup(&config),
        Command::Join { token: Some(_), .. } => {
            let words = "--token is refused, because everybody on this machine can read a command line: write the token to a file, or to \
                         standard input, and say --token-file FILE or --token-file -; make a new token, this one may be known to others";
            return fail(words, 2);
        }
        Command::Join { token_file, token: None } => joined(&config, token_file.as_deref()),
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

/// A token is shorter than this, in bytes.
const TOKEN_BYTES_MAX: u64 = 4 << 10;

fn joined(config: &Config, token_file: Option<&Path>) -> Result<(), Box<dyn std::error::Error>> {
    let path = config.credentials.as_deref().ok_or("agent.toml names no credentials file: say where it goes")?;
    if config.gateways.is_empty() {
        return Err("agent.toml names no gateway: write gateway = \"https://gateway:4270\"".into());
    }
    let token = match token_file {
        Some(file) if file == Path::new("-") => read(std::io::stdin())?,
        Some(file) => {
            read(std::fs::File::open(file).map_err(|error| format!("the token in {} cannot be read: {error}", file.display()))?)?
        }
        None => std::env::var("GROUPCAST_JOIN_TOKEN")
            .map_err(|_| "no token: give --token-file FILE, --token-file - for standard input, or set GROUPCAST_JOIN_TOKEN")?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let expires_at = runtime.block_on(groupcast_host::join::join(&config.host, &config.gateways, token.trim(), path))?;
    let days = expires_at.saturating_sub(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs()) / 86_400;
    eprintln!(
        "groupcast-agent: joined as host {}; the credential is in {}, lives {days} days, and the agent renews it before that",
        config.host,
        path.display()
    );
    Ok(())
}

fn read(from: impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    from.take(TOKEN_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}
