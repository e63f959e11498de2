//! `host`: what hosts are granted, through a gateway; and the credentials with which their agents reach the bus, signed with the
//! installation's authority.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::credentials::Authority;
use groupcast_policy::ids::HostId;
use reqwest::Method;
use serde_json::json;

use super::client::Call;
use super::context::Connection;
use super::output::{self, Format};
use super::{Code, Failure, Result};
use crate::api::host::{MadeJoinToken, NewJoinToken, RemovedHost, ShownGrant};

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
    /// Grant a host its networks, or make a credential for its agent, or both. Servers need not be told.
    #[command(
        after_help = "Examples:\n  groupcast host add h1 --networks 10.1.0.0/16 --authority authority.json --out h1.creds\n  \
                            groupcast host add h1 --networks 10.1.0.0/16,2001:db8:1::/64   # then: groupcast host token h1"
    )]
    Add {
        host: HostId,
        /// Where the addresses of its workloads must lie; several with commas. Written through a gateway.
        #[arg(long, value_delimiter = ',')]
        networks: Vec<String>,
        /// The installation's authority, to make a credential with.
        #[arg(long, env = "GROUPCAST_AUTHORITY", requires = "out")]
        authority: Option<PathBuf>,
        /// Where to write the credential, readable by its owner only.
        #[arg(long, requires = "authority")]
        out: Option<PathBuf>,
        /// How long it lives, such as 365d; without it, for ever.
        #[arg(long, value_parser = humantime::parse_duration)]
        life: Option<Duration>,
    },
    /// Make a token with which the host joins once, with a key of its own: `groupcast-agent join`. Its text is printed once.
    Token {
        host: HostId,
        /// How long it lives, such as 10m, which it is if not said.
        #[arg(long)]
        life: Option<String>,
    },
    /// Write what a gateway needs to sign credentials of hosts that join, and no others.
    Signer {
        #[command(flatten)]
        authority: AuthorityOptions,
        /// Where to write it, readable by its owner only.
        #[arg(long)]
        out: PathBuf,
    },
    /// Revoke all credentials of a host but the newest: the last step of rotating, after its agent has the new file.
    Retire {
        #[command(flatten)]
        authority: AuthorityOptions,
        host: HostId,
        /// A server of the bus; may be given several times.
        #[arg(long = "server", env = "GROUPCAST_SERVERS", value_delimiter = ',', default_value = "nats://127.0.0.1:4222")]
        servers: Vec<String>,
    },
    /// Take a host away: what it was granted and has enrolled, if it was granted anything; and all its credentials, which servers are told.
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

/// Kept before it is told: a revocation that is told but not kept would come undone with the next one.
async fn publish(authority: &Authority, path: &Path, servers: &[String]) -> Result {
    authority.save(path).map_err(failed)?;
    let system = authority.system_credential(SYSTEM_LIFE, SystemTime::now()).map_err(failed)?;
    let options = connect::Options::new(servers, system.role, &system.name).identity(Identity::Text(system.file_text()));
    let hint = "the credential is revoked in the authority; tell the servers by running this again when they answer";
    let (client, _events) = connect::connect(options).await.map_err(|error| failed(error).hint(hint))?;
    authority.publish(&client).await.map_err(|error| failed(error).hint(hint))
}

/// Takes away what a gateway granted, if a gateway is named; how many workloads went, and the key that joined with a token.
async fn ungrant(connection: &Connection, host: &HostId) -> Result<(usize, Option<String>)> {
    let Ok(api) = connection.api() else { return Ok((0, None)) };
    let call = Call::new(Method::DELETE, format!("/v1/hosts/{host}"));
    match api.fetch::<RemovedHost>(&call).await {
        Ok(removed) => Ok((removed.workloads, removed.joined_key)),
        // Granted nothing: there may be a credential all the same.
        Err(failure) if failure.code == Code::NotFound => Ok((0, None)),
        Err(failure) => Err(failure),
    }
}

pub async fn run(connection: &Connection, command: Command) -> Result {
    match command {
        Command::Add { host, networks, authority, out, life } => {
            if networks.is_empty() && authority.is_none() {
                let words = "nothing to do: name its networks, or the authority to make a credential with";
                return Err(Failure::usage(words.to_owned()));
            }
            if !networks.is_empty() {
                let call = Call::new(Method::PUT, format!("/v1/hosts/{host}")).json(&json!({ "networks": networks }));
                let granted: ShownGrant = connection.api()?.fetch(&call).await?;
                output::say(&format!("host {host} granted {} with change {}", granted.networks.join(", "), granted.change));
            }
            if let (Some(path), Some(out)) = (authority, out) {
                let mut authority = load(&path)?;
                let credential = authority.mint(Role::Host, &host, life, SystemTime::now()).map_err(failed)?;
                credential.save(&out).map_err(failed)?;
                authority.save(&path).map_err(failed)?;
                output::say(&format!("credential for host {host} written to {}", out.display()));
            }
            Ok(())
        }
        Command::Token { host, life } => {
            let body = serde_json::to_value(NewJoinToken { life }).unwrap_or_default();
            let call = Call::new(Method::POST, format!("/v1/hosts/{host}/token")).json(&body);
            let made: MadeJoinToken = connection.api()?.fetch(&call).await?;
            output::say(&format!("join token for host {host} made; it works once: groupcast-agent join --token ..."));
            output::print(&(made.token + "\n"))
        }
        Command::Signer { authority: AuthorityOptions { authority: path }, out } => {
            load(&path)?.host_signer().and_then(|signer| signer.save(&out)).map_err(failed)?;
            output::say(&format!("signer of hosts written to {}: give it to gateways with --host-signer", out.display()));
            Ok(())
        }
        Command::Retire { authority: AuthorityOptions { authority: path }, host, servers } => {
            let mut authority = load(&path)?;
            let own = authority.issued().iter().filter(|i| i.role == Role::Host.as_str() && i.name == host.as_str());
            let mut keys: Vec<(u64, String)> = own.map(|issued| (issued.issued_at, issued.public_key.clone())).collect();
            // The last in the list is the last that was made, also within one second.
            let Some((_, newest)) = keys.pop() else {
                let message = format!("host {host} has no valid credential");
                return Err(Failure::new(Code::NotFound, message).hint("see `groupcast host list`"));
            };
            for (_, key) in &keys {
                authority.revoke_key(key, SystemTime::now()).map_err(failed)?;
            }
            publish(&authority, &path, &servers).await?;
            output::say(&format!("{} credentials of host {host} revoked; {newest} stays", keys.len()));
            Ok(())
        }
        Command::Remove { authority: AuthorityOptions { authority: path }, host, servers } => {
            let (workloads, joined) = ungrant(connection, &host).await?;
            let mut authority = load(&path)?;
            let now = SystemTime::now();
            let revoked = authority.revoke(Role::Host, &host, now).map_err(failed)? + usize::from(joined.is_some());
            if let Some(key) = joined {
                authority.revoke_joined(&key, now).map_err(failed)?;
            }
            if revoked == 0 && workloads == 0 {
                let message = format!("host {host} has no valid credential");
                return Err(Failure::new(Code::NotFound, message).hint("see `groupcast host list`"));
            }
            publish(&authority, &path, &servers).await?;
            output::say(&format!("{revoked} credentials of host {host} revoked, {workloads} workloads removed"));
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
