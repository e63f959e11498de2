//! The command line, as far as it is asked of a running agent.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::{Parser, Subcommand};

use crate::api::{self, Answer, Request, WITHIN};
use crate::config::{Config, WrittenAttachment};
use crate::enrol::WrittenEnrolment;

use crate::mode::WantedMode;
use crate::netlink::Counted;
use crate::reached;
use crate::report::{Explanation, Status};
use crate::terminal::{print, print_json, say};

/// As everywhere in groupcast.
const EXIT_FAILURE: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_TIMED_OUT: u8 = 5;

#[derive(Parser)]
#[command(name = "groupcast-agent", version, about = "Security groups, enforced on this host")]
pub struct Arguments {
    /// The configuration.
    #[arg(long, global = true, default_value = "/etc/groupcast/agent.toml")]
    pub config: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the agent
    Run {
        /// Print, as nft text, what would be done to the kernel, and touch nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Load the last good ruleset, or close what is claimed, and end: for the boot, before the network is up
    Boot,
    /// Print, as nft text, what the last good state would make of the kernel, and touch nothing
    DryRun,
    /// Take our table away, and nothing else
    Cleanup,
    /// The configuration file
    #[command(subcommand)]
    Config(ConfigCommand),
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
    /// What is in force, what was heard, and what foreign rules interfere
    Status,
    /// What the kernel should hold, and how it differs from what is there
    Ruleset,
    /// Packets and bytes that rules have met
    Counters,
    /// Why a flow passes this host, or not
    Explain {
        /// A workload of this host, or an address
        from: String,
        /// A workload of this host, or an address
        to: String,
        /// tcp/443, udp/53, icmp/8/0
        traffic: String,
        #[arg(long)]
        json: bool,
    },
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
    /// Make a key and have the gateway that agent.toml names sign it, with a token from `groupcast host token`; writes the credentials
    /// file
    Join {
        /// File that holds the token, - for standard input; without it GROUPCAST_JOIN_TOKEN holds the token itself
        #[arg(long)]
        token_file: Option<PathBuf>,
        /// Refused: everybody on the machine can read a command line
        #[arg(long, hide = true)]
        token: Option<String>,
    },
    /// Have the controllers forget this host and its workloads: for the shutdown of the machine, not for a restart of the agent
    Leave,
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Judge the file, the files that it names, and whether the bus and the gateway can be reached
    Check {
        /// Judge the files alone, and reach nobody
        #[arg(long)]
        offline: bool,
    },
    /// Print what the file may say, in Markdown
    Reference,
}

#[derive(Subcommand)]
pub enum WorkloadCommand {
    /// Returns once its policy is in force
    Add {
        workload: String,
        #[arg(long)]
        interface: String,
        /// Only these addresses behind the interface
        #[arg(long = "address")]
        addresses: Vec<std::net::IpAddr>,
        /// Log what would be denied to it, and let it pass
        #[arg(long)]
        audit: bool,
        #[command(flatten)]
        enrol: EnrolOptions,
        /// Have sources read anew first
        #[arg(long)]
        fresh: bool,
        /// Return at the latest after this time, with exit code 5 if its policy is not in force
        #[arg(long, default_value_t = Within::from(WITHIN))]
        within: Within,
    },
    Remove {
        workload: String,
    },
    /// Log what would be denied to it and let it pass, or no longer
    Audit {
        workload: String,
        #[arg(value_parser = ["on", "off"])]
        switch: String,
    },
    List,
}

/// What this host registers a workload as, if it does.
#[derive(Debug, Clone, clap::Args)]
pub struct EnrolOptions {
    /// Register it with this template, with its addresses; otherwise somebody else says what it is
    #[arg(long, requires = "network", requires = "addresses")]
    template: Option<String>,
    #[arg(long, requires = "template")]
    network: Option<String>,
    /// key=value; as far as the template lets it bring labels
    #[arg(long = "label", requires = "template", value_parser = label)]
    labels: Vec<(String, String)>,
    #[arg(long, requires = "template")]
    space: Option<String>,
    #[arg(long, requires = "template")]
    app: Option<String>,
    /// It is being staged, not run
    #[arg(long, requires = "template")]
    staging: bool,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?}: write key=value"))?;
    Ok((key.to_owned(), value.to_owned()))
}

impl EnrolOptions {
    fn written(self, workload: &str, addresses: &[std::net::IpAddr]) -> Option<WrittenEnrolment> {
        let (template, network) = self.template.zip(self.network)?;
        Some(WrittenEnrolment {
            workload: workload.to_owned(),
            template,
            network,
            addresses: addresses.iter().copied().collect(),
            labels: self.labels.into_iter().collect(),
            space: self.space,
            app: self.app,
            staging: self.staging,
        })
    }
}

type Within = humantime::Duration;

fn request(command: Command) -> Option<Request> {
    let mode = |mode, reason| Some(Request::Mode { mode, reason });
    match command {
        Command::Workload(WorkloadCommand::Add { workload, interface, addresses, audit, enrol, fresh, within }) => {
            let enrol = enrol.written(&workload, &addresses);
            let attachment = WrittenAttachment { workload, interface, addresses: addresses.into_iter().collect(), audit };
            let within: Duration = within.into();
            Some(Request::WorkloadAdd { attachment, enrol, fresh, within_ms: within.as_millis() as u64 })
        }
        Command::Workload(WorkloadCommand::Remove { workload }) => Some(Request::WorkloadRemove { workload }),
        Command::Workload(WorkloadCommand::Audit { workload, switch }) => {
            Some(Request::WorkloadAudit { workload, audit: switch == "on" })
        }
        Command::Workload(WorkloadCommand::List) | Command::Status => Some(Request::Status),
        Command::Ruleset => Some(Request::Ruleset),
        Command::Counters => Some(Request::Counters),
        Command::Explain { from, to, traffic, .. } => Some(Request::Explain { from, to, traffic }),
        Command::Freeze { reason } => mode(WantedMode::Freeze, reason),
        Command::Bypass { reason } => mode(WantedMode::Bypass, reason),
        Command::Lockdown { reason } => mode(WantedMode::Lockdown, reason),
        Command::Audit { reason } => mode(WantedMode::Audit, reason),
        Command::Resume { reason } => mode(WantedMode::Resume, reason),
        Command::Leave => Some(Request::Leave),
        Command::Run { .. }
        | Command::Boot
        | Command::DryRun
        | Command::Cleanup
        | Command::Config(_)
        | Command::Join { .. }
        | Command::Bench { .. } => None,
    }
}

pub fn fail(words: &str, code: u8) -> ExitCode {
    say(words);
    ExitCode::from(code)
}

/// Judges the file, what it names, and whether that can be reached.
pub fn config_checked(path: &std::path::Path, offline: bool) -> ExitCode {
    let found = match Config::read(path) {
        Err(error) => vec![error.to_string()],
        Ok(config) => {
            let mut found = config.problems();
            found.extend(reached::credential(&config, SystemTime::now()));
            // What is wrong with the files would only be said once more by every server.
            if found.is_empty() && !offline {
                match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => found = runtime.block_on(reached::unreachable(&config)),
                    Err(error) => found.push(error.to_string()),
                }
            }
            found.iter().map(|problem| format!("{}: {problem}", path.display())).collect()
        }
    };
    if found.is_empty() {
        print(&format!("{} is good\n", path.display()));
        return ExitCode::SUCCESS;
    }
    found.iter().for_each(|problem| say(problem));
    ExitCode::from(EXIT_FAILURE)
}

fn listed(status: &Status) -> String {
    let line = |workload: &WrittenAttachment| {
        let addresses: Vec<String> = workload.addresses.iter().map(ToString::to_string).collect();
        let audit = if workload.audit { "audit" } else { "enforce" };
        format!("{}\t{}\t{}\t{audit}\n", workload.workload, workload.interface, addresses.join(","))
    };
    status.enforced.workloads.iter().map(line).collect()
}

fn explained(told: &Explanation) -> String {
    let mut lines = vec![if told.allowed { "allowed" } else { "denied" }.to_owned()];
    for judged in &told.judgements {
        lines.push(judged.words.clone());
        let revision = |revision: &Option<u64>| revision.map_or("from the disk".into(), |number| format!("revision {number}"));
        lines.extend(judged.topics.iter().map(|(topic, number)| format!("  {topic}: {}", revision(number))));
    }
    lines.extend(told.notes.iter().map(|note| format!("note: {note}")));
    let end = if told.enforced { "the kernel does as it says" } else { "the kernel does not do as it says: see the notes" };
    lines.push(end.to_owned());
    lines.join("\n") + "\n"
}

/// Asks the running agent and prints what it says: data on stdout, words on stderr.
pub fn asked(config: &Config, command: Command) -> ExitCode {
    let list = matches!(command, Command::Workload(WorkloadCommand::List));
    let as_json = matches!(command, Command::Explain { json: true, .. });
    let Some(request) = request(command) else { return fail("nothing to ask", EXIT_USAGE) };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.to_string(), EXIT_FAILURE),
    };
    match runtime.block_on(api::ask(&config.socket, &request)) {
        Ok(Answer::Done { notes }) => {
            notes.iter().for_each(|note| say(note));
            return ExitCode::SUCCESS;
        }
        Ok(Answer::Failed { why }) => return fail(&why, EXIT_FAILURE),
        Ok(Answer::TimedOut { why }) => return fail(&why, EXIT_TIMED_OUT),
        Ok(Answer::Status(status)) if list => print(&listed(&status)),
        Ok(Answer::Status(status)) => print_json(&status),
        Ok(Answer::Counters { counters }) => {
            let line = |counted: &Counted| format!("{}\t{}\t{}\t{}\n", counted.chain, counted.at, counted.packets, counted.bytes);
            print(&format!("CHAIN\tRULE\tPACKETS\tBYTES\n{}", counters.iter().map(line).collect::<String>()));
        }
        Ok(Answer::Explanation(told)) if as_json => print_json(&told),
        Ok(Answer::Explanation(told)) => print(&explained(&told)),
        Ok(Answer::Ruleset(ruleset)) => {
            print(&ruleset.wanted);
            ruleset.differences.iter().for_each(|name| say(&format!("differs in the kernel: {name}")));
            if !ruleset.differences.is_empty() {
                return ExitCode::from(EXIT_FAILURE);
            }
        }
        Err(error) => return fail(&format!("no agent answers on {}: {error}", config.socket.display()), EXIT_FAILURE),
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
        let within = |arguments: &[&str]| {
            let all = [&["groupcast-agent", "workload", "add", "w", "--interface", "i"], arguments].concat();
            let parsed = Arguments::try_parse_from(all).ok()?;
            let Some(Request::WorkloadAdd { within_ms, fresh, .. }) = request(parsed.command) else { return None };
            Some((within_ms, fresh))
        };
        assert_eq!(within(&[]), Some((10_000, false)));
        assert_eq!(within(&["--within", "1m 5s", "--fresh"]), Some((65_000, true)));
        assert_eq!(within(&["--within", "soon"]), None);
    }
}
