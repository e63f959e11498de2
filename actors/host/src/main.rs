//! `groupcast-agent`: the host agent and its command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use groupcast_host::api::{self, Answer, Request};
use groupcast_host::config::{Config, WrittenAttachment};
use groupcast_host::enforcement::WantedMode;
use groupcast_host::run;

#[derive(Parser)]
#[command(name = "groupcast-agent", version, about = "Security groups, enforced on this host")]
struct Arguments {
    /// The configuration.
    #[arg(long, global = true, default_value = "/etc/groupcast/agent.toml")]
    config: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the agent
    Run,
    /// Load the last good ruleset, or close what is claimed, and end: for the boot, before the network is up
    Boot,
    /// Print, as nft text, what the last good state would make of the kernel, and touch nothing
    DryRun,
    /// Take our table away, and nothing else
    Cleanup,
    /// Measure what enforcing costs, in a network namespace of its own
    Bench {
        /// enforce or packets
        #[arg(default_value = "enforce")]
        name: String,
        #[arg(long)]
        json: bool,
    },
    /// Attach and detach workloads
    #[command(subcommand)]
    Workload(WorkloadCommand),
    /// What is in force
    Status,
    /// What the kernel should hold, and how it differs from what is there
    Ruleset,
    /// Packets and bytes that rules have met
    Counters,
    /// Keep what is in force, whatever changes
    Freeze { reason: String },
    /// Judge nothing
    Bypass { reason: String },
    /// Let nothing pass that is claimed
    Lockdown { reason: String },
    /// Log what would be denied, and let it pass
    Audit { reason: String },
    /// Enforce again
    Resume { reason: String },
}

#[derive(Subcommand)]
enum WorkloadCommand {
    /// Returns once it is enforced
    Add {
        workload: String,
        #[arg(long)]
        interface: String,
        /// Only these addresses behind the interface
        #[arg(long = "address")]
        addresses: Vec<std::net::IpAddr>,
        #[arg(long)]
        audit: bool,
    },
    Remove {
        workload: String,
    },
    List,
}

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

fn fail(words: &str, code: u8) -> ExitCode {
    eprintln!("groupcast-agent: {words}");
    ExitCode::from(code)
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

fn request(command: Command) -> Option<Request> {
    let mode = |mode, reason| Some(Request::Mode { mode, reason });
    match command {
        Command::Workload(WorkloadCommand::Add { workload, interface, addresses, audit }) => {
            let addresses = addresses.into_iter().collect();
            Some(Request::WorkloadAdd(WrittenAttachment { workload, interface, addresses, audit }))
        }
        Command::Workload(WorkloadCommand::Remove { workload }) => Some(Request::WorkloadRemove { workload }),
        Command::Workload(WorkloadCommand::List) | Command::Status => Some(Request::Status),
        Command::Ruleset => Some(Request::Ruleset),
        Command::Counters => Some(Request::Counters),
        Command::Freeze { reason } => mode(WantedMode::Freeze, reason),
        Command::Bypass { reason } => mode(WantedMode::Bypass, reason),
        Command::Lockdown { reason } => mode(WantedMode::Lockdown, reason),
        Command::Audit { reason } => mode(WantedMode::Audit, reason),
        Command::Resume { reason } => mode(WantedMode::Resume, reason),
        Command::Run | Command::Boot | Command::DryRun | Command::Cleanup | Command::Bench { .. } => None,
    }
}

fn asked(config: &Config, command: Command) -> ExitCode {
    let list = matches!(command, Command::Workload(WorkloadCommand::List));
    let Some(request) = request(command) else { return fail("nothing to ask", 2) };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.to_string(), 1),
    };
    match runtime.block_on(api::ask(&config.socket, &request)) {
        Ok(Answer::Done) => ExitCode::SUCCESS,
        Ok(Answer::Failed { why }) => fail(&why, 1),
        Ok(Answer::Status(status)) if list => {
            for workload in &status.workloads {
                println!("{}\t{}\t{:?}", workload.workload, workload.interface, workload.addresses);
            }
            ExitCode::SUCCESS
        }
        Ok(Answer::Status(status)) => {
            println!("{}", serde_json::to_string_pretty(&status).unwrap_or_default());
            ExitCode::SUCCESS
        }
        Ok(Answer::Counters { counters }) => {
            for counted in counters {
                println!("{}\t{}\t{}\t{}", counted.chain, counted.at, counted.packets, counted.bytes);
            }
            ExitCode::SUCCESS
        }
        Ok(Answer::Ruleset(ruleset)) => {
            print!("{}", ruleset.wanted);
            ruleset.differences.iter().for_each(|name| eprintln!("differs in the kernel: {name}"));
            if ruleset.differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) }
        }
        Err(error) => fail(&format!("no agent answers on {}: {error}", config.socket.display()), 1),
    }
}
