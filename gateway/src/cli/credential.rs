//! `credential`: what controllers, gateways and others show to the bus, signed with the installation's authority.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::credentials::Issued;
use groupcast_policy::ids::HostId;

use super::host::{listed, load, locked, of_authority, publish};
use super::output::{self, Format};
use super::{Code, Failure, Result};
use crate::bus::ServerOptions;

/// Where `groupcast bus init` puts it, below its folder.
const AUTHORITY: &str = "authority.json";

#[derive(Debug, Clone, Args)]
pub struct AuthorityOption {
    /// The installation's authority: all its signing keys. Keep it offline, or on one machine that only administrators reach.
    #[arg(long, env = "GROUPCAST_AUTHORITY", default_value = AUTHORITY)]
    authority: PathBuf,
}

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Make a credential. Servers need not be told.
    #[command(after_help = "Examples:\n  groupcast credential add --role controller --name c1\n  \
                      groupcast credential add --role gateway --name g1 --life 365d --authority cluster/authority.json --out g1.creds")]
    Add {
        #[command(flatten)]
        authority: AuthorityOption,
        /// controller, gateway, viewer, host or edge.
        #[arg(long, value_parser = role)]
        role: Role,
        /// Whose it is. It is the name on the bus, and need not be said elsewhere.
        #[arg(long)]
        name: HostId,
        /// Where to write it, readable by its owner only [default: ROLE-NAME.creds]
        #[arg(long)]
        out: Option<PathBuf>,
        /// How long it lives, such as 365d; a host's 30d if not said, others until they are revoked.
        #[arg(long, value_parser = humantime::parse_duration)]
        life: Option<Duration>,
    },
    /// List the credentials that were made with the authority and are neither revoked nor expired.
    List {
        #[command(flatten)]
        authority: AuthorityOption,
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Revoke all credentials of a role and name, or one by its key. Servers are told, and whoever uses it is cut off at once.
    Revoke {
        #[command(flatten)]
        authority: AuthorityOption,
        #[arg(long, value_parser = role)]
        role: Role,
        #[arg(long)]
        name: HostId,
        /// Only the one of this public key: see `groupcast credential list`.
        #[arg(long)]
        key: Option<String>,
        #[command(flatten)]
        servers: ServerOptions,
    },
}

fn role(text: &str) -> std::result::Result<Role, String> {
    Role::parse(text).ok_or_else(|| format!("there are {}", Role::ALL.map(Role::as_str).join(", ")))
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::failed(error.to_string())
}

fn of<'a>(issued: &'a [Issued], role: Role, name: &'a HostId) -> impl Iterator<Item = &'a Issued> {
    issued.iter().filter(move |one| one.role == role.as_str() && one.name == name.as_str())
}

pub async fn run(command: Command) -> Result {
    match command {
        Command::Add { authority: AuthorityOption { authority: path }, role, name, out, life } => {
            let out = out.unwrap_or_else(|| format!("{}-{name}.creds", role.as_str()).into());
            let mut authority = locked(&path)?;
            if out.exists() {
                let message = format!("{} is there already, and is not overwritten", out.display());
                return Err(Failure::new(Code::Conflict, message).hint("name another file with --out"));
            }
            authority.forget_expired(SystemTime::now()).map_err(failed)?;
            let before = of(authority.issued(), role, &name).count();
            let credential = authority.mint(role, &name, life, SystemTime::now()).map_err(failed)?;
            // Kept before it is given away: what nobody knows cannot be revoked.
            authority.save().map_err(failed)?;
            credential.save(&out).map_err(failed)?;
            output::say(&format!("credential for {} {name} written to {}", role.as_str(), out.display()));
            if before > 0 {
                output::say(&format!(
                    "{before} made before still work: `groupcast credential list` shows their keys, `groupcast credential revoke --role {} --name \
                     {name} --key KEY` ends one",
                    role.as_str()
                ));
            }
            Ok(())
        }
        Command::List { authority: AuthorityOption { authority: path }, output: format } => {
            let mut authority = load(&path)?;
            authority.forget_expired(SystemTime::now()).map_err(failed)?;
            output::print(&listed(of_authority(&authority), format))?;
            if format == Format::Table || format == Format::Wide {
                output::say("credentials that gateways have signed for hosts are listed by `groupcast host list`");
            }
            Ok(())
        }
        Command::Revoke { authority: AuthorityOption { authority: path }, role, name, key, servers } => {
            let mut authority = locked(&path)?;
            let now = SystemTime::now();
            let known = |key: &String| of(authority.issued(), role, &name).any(|one| one.public_key == *key);
            let count = match key {
                None => authority.revoke(role, &name, now).map_err(failed)?,
                Some(key) if known(&key) => usize::from(authority.revoke_key(&key, now).map_err(failed)?),
                Some(_) => 0,
            };
            if count == 0 && !authority.is_unpublished() {
                let message = format!("no such credential of {} {name} is valid", role.as_str());
                return Err(Failure::new(Code::NotFound, message).hint("see `groupcast credential list`"));
            }
            publish(&mut authority, &servers).await?;
            output::say(&format!("{count} credentials of {} {name} revoked", role.as_str()));
            Ok(())
        }
    }
}
