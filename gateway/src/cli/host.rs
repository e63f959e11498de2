//! `host`: credentials with which agents reach the bus, signed with the installation's authority.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::credentials::Authority;
use groupcast_policy::ids::HostId;
use serde_json::json;

use super::output::{self, Format};
use super::{Code, Failure, Result};

/// How long the credential lives that brings a revocation to the servers.
const SYSTEM_LIFE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Args)]
pub struct AuthorityOptions {
    /// The installation's authority: all its signing keys. Keep it offline, or on one machine that only administrators reach.
    #[arg(long, env = "GROUPCAST_AUTHORITY")]
    authority: PathBuf,
}

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Make a credential for a host's agent. Servers need not be told.
    #[command(after_help = "Example:\n  groupcast host add h1 --authority authority.json --out h1.creds")]
    Add {
        #[command(flatten)]
        authority: AuthorityOptions,
        host: HostId,
        /// Where to write it, readable by its owner only.
        #[arg(long)]
        out: PathBuf,
        /// How long it lives, such as 365d; without it, for ever.
        #[arg(long, value_parser = humantime::parse_duration)]
        life: Option<Duration>,
    },
    /// Revoke all credentials of a host and tell the servers; whoever uses one is cut off.
    Remove {
        #[command(flatten)]
        authority: AuthorityOptions,
        host: HostId,
        /// A server of the bus; may be given several times.
        #[arg(long = "server", env = "GROUPCAST_SERVERS", value_delimiter = ',', default_value = "nats://127.0.0.1:4222")]
        servers: Vec<String>,
    },
    /// List the credentials that are valid.
    List {
        #[command(flatten)]
        authority: AuthorityOptions,
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::failed(error.to_string())
}

fn load(path: &Path) -> Result<Authority> {
    Authority::load(path).map_err(|error| failed(error).hint("`groupcast up` makes one in its data folder"))
}

pub async fn run(command: Command) -> Result {
    match command {
        Command::Add { authority: AuthorityOptions { authority: path }, host, out, life } => {
            let mut authority = load(&path)?;
            let credential = authority.mint(Role::Host, &host, life, SystemTime::now()).map_err(failed)?;
            credential.save(&out).map_err(failed)?;
            authority.save(&path).map_err(failed)?;
            output::say(&format!("credential for host {host} written to {}", out.display()));
            Ok(())
        }
        Command::Remove { authority: AuthorityOptions { authority: path }, host, servers } => {
            let mut authority = load(&path)?;
            let now = SystemTime::now();
            let revoked = authority.revoke(Role::Host, &host, now).map_err(failed)?;
            if revoked == 0 {
                let message = format!("host {host} has no valid credential");
                return Err(Failure::new(Code::NotFound, message).hint("see `groupcast host list`"));
            }
            // Kept before it is told: a revocation that is told but not kept would come undone with the next one.
            authority.save(&path).map_err(failed)?;
            let system = authority.system_credential(SYSTEM_LIFE, now).map_err(failed)?;
            let options = connect::Options::new(&servers, system.role, &system.name).identity(Identity::Text(system.file_text()));
            let hint = "the credential is revoked in the authority; tell the servers by running this again when they answer";
            let (client, _events) = connect::connect(options).await.map_err(|error| failed(error).hint(hint))?;
            authority.publish(&client).await.map_err(|error| failed(error).hint(hint))?;
            output::say(&format!("{revoked} credentials of host {host} revoked"));
            Ok(())
        }
        Command::List { authority: AuthorityOptions { authority: path }, output: format } => {
            let authority = load(&path)?;
            output::print(&listed(&authority, format))
        }
    }
}

fn listed(authority: &Authority, format: Format) -> String {
    let time =
        |seconds: u64| humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
    let expires = |at: Option<u64>| at.map_or("never".to_owned(), time);
    let items: Vec<_> = authority
        .issued()
        .iter()
        .map(|i| json!({ "role": i.role, "name": i.name, "issued": time(i.issued_at), "expires": expires(i.expires_at), "key": i.public_key }))
        .collect();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    match format {
        Format::Json => output::json(&json!({ "format_version": "1", "items": items })),
        Format::Yaml => output::yaml(&json!({ "format_version": "1", "items": items })),
        Format::Jsonl => items.iter().map(|item| item.to_string() + "\n").collect(),
        Format::Name => items.iter().map(|item| format!("{}/{}\n", text(&item["role"]), text(&item["name"]))).collect(),
        Format::Table | Format::Wide => {
            let fields = if format == Format::Wide {
                &["role", "name", "issued", "expires", "key"][..]
            } else {
                &["role", "name", "issued", "expires"]
            };
            let rows = items.iter().map(|item| fields.iter().map(|field| text(&item[*field])).collect()).collect();
            output::table(fields, rows)
        }
    }
}
