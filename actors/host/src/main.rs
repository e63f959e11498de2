//! `groupcast-agent`: the host agent and its command line.

use std::process::ExitCode;

use clap::Parser;
use groupcast_host::command::{Arguments, Command, asked, fail};
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
    let config = match Config::read(&arguments.config) {
        Ok(config) => config,
        Err(error) => return fail(&error.to_string(), 2),
    };
    let outcome = match arguments.command {
        Command::Run => started(config),
        Command::Boot => run::boot(&config),
        Command::DryRun => run::dry_run(&config).map(|text| print!("{text}")),
        Command::Cleanup => run::cleanup(&config),
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
fn started(config: Config) -> Result<(), Box<dyn std::error::Error>> {
    const WORKERS: usize = 2;
    let system = actix::System::with_tokio_rt(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .enable_all()
            .build()
            .unwrap_or_else(|error| panic!("no runtime: {error}"))
    });
    system.block_on(run::run(config))
}
