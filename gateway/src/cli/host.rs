//! `host`: what hosts are granted, through a gateway; and the credentials with which their agents reach the bus, signed with the
//! installation's authority.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::credentials::{self, Authority, HOST_LIFE_MAX, Issued, Locked};
use groupcast_policy::ids::HostId;
use reqwest::Method;
use serde_json::json;

use super::client::{Api, Call};
use super::context::Connection;
use super::output::{self, Format};
use super::{Code, Failure, Result};
use crate::api::credentials::{LeftOfHost, RevokedCredential, RevokedCredentials, ShownCredential};
use crate::api::host::{MadeJoinToken, NewJoinToken, RemovedHost, ShownGrant};
use crate::api::{Listed, PAGE_MAX};
use crate::bus::ServerOptions;

/// How long the credential lives that brings a revocation to the servers.
const SYSTEM_LIFE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Args)]
pub struct AuthorityOptions {
    /// The installation's authority: all its signing keys. Keep it offline, or on one machine that only administrators reach.
    #[arg(long, env = "GROUPCAST_AUTHORITY")]
    pub(super) authority: PathBuf,
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
        /// How long it lives, such as 365d; 30d if not said. Its agent renews it before that through a gateway.
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
    /// Revoke all credentials of a host but that of the newest key: the last step of rotating, after its agent has the new file.
    Retire {
        #[command(flatten)]
        authority: AuthorityOptions,
        host: HostId,
        /// The public key that stays, where it is not the newest: see `groupcast host list -o wide`.
        #[arg(long)]
        keep: Option<String>,
        /// No gateway signs for hosts here: only what was made with the authority is known.
        #[arg(long)]
        without_gateway: bool,
        #[command(flatten)]
        servers: ServerOptions,
    },
    /// Take a host away: what it was granted and has enrolled, and all its credentials, which servers are told. Repeat it if it is
    /// interrupted: it goes on where it was.
    Remove {
        #[command(flatten)]
        authority: AuthorityOptions,
        host: HostId,
        /// No gateway grants or signs anything for this host: only credentials made with the authority are revoked.
        #[arg(long)]
        without_gateway: bool,
        #[command(flatten)]
        servers: ServerOptions,
    },
    /// List the credentials that are valid: those made with the authority, and those that gateways have signed for hosts.
    List {
        /// The installation's authority; without it only what gateways have signed is listed.
        #[arg(long, env = "GROUPCAST_AUTHORITY")]
        authority: Option<PathBuf>,
        /// No gateway signs for hosts here: only what was made with the authority is listed.
        #[arg(long, requires = "authority")]
        without_gateway: bool,
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::failed(error.to_string())
}

fn unusable(error: credentials::Error) -> Failure {
    let hint =
        "`groupcast bus init` makes one in its folder, `groupcast up` in its data folder: name it with --authority, as its owner";
    match error {
        credentials::Error::Busy { .. } => failed(error),
        error => failed(error).hint(hint),
    }
}

pub(super) fn load(path: &Path) -> Result<Authority> {
    Authority::load(path).map_err(unusable)
}

/// The authority, to be written again: nobody else writes it until this one is gone.
pub(super) fn locked(path: &Path) -> Result<Locked> {
    Authority::lock(path).map_err(unusable)
}

/// Kept before it is told: a revocation that is told but not kept would come undone with the next one.
pub(super) async fn publish(authority: &mut Locked, bus: &ServerOptions) -> Result {
    authority.save().map_err(failed)?;
    let system = authority.system_credential(SYSTEM_LIFE, SystemTime::now()).map_err(failed)?;
    let identity = Identity::Text(system.file_text());
    let (servers, tls) = bus.resolved().map_err(anyhow::Error::from)?;
    let options = connect::Options::new(&servers, system.role, &system.name).identity(identity).tls(tls);
    let hint = "the credentials are revoked in the authority, and not on the servers yet: run this again when they answer";
    let (client, _events) = connect::connect(options).await.map_err(|error| failed(error).hint(hint))?;
    authority.publish(&client).await.map_err(|error| failed(error).hint(hint))?;
    authority.published();
    authority.save().map_err(failed)
}

/// The gateway, unless it is said that there is none: what is not known cannot be revoked, and is not said to be.
fn gateway(connection: &Connection, without: bool) -> Result<Option<Api>> {
    if without {
        return Ok(None);
    }
    let hint = "credentials that gateways have signed are known to a gateway only: name one, or say --without-gateway";
    connection.api().map(Some).map_err(|failure| failure.hint(hint))
}

/// Takes away what was granted and enrolled; how many workloads went, and what is to be revoked. `None`: nothing was granted.
async fn ungrant(api: &Api, host: &HostId) -> Result<Option<RemovedHost>> {
    match api.fetch::<RemovedHost>(&Call::new(Method::DELETE, format!("/v1/hosts/{host}"))).await {
        Ok(removed) => Ok(Some(removed)),
        // Granted nothing: there may be a credential all the same.
        Err(failure) if failure.code == Code::NotFound => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// What gateways have signed for hosts; for one host if it is named.
async fn signed(api: &Api, host: Option<&HostId>) -> Result<Vec<ShownCredential>> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let page: Listed<ShownCredential> =
            api.fetch(&Call::new(Method::GET, format!("/v1/credentials?limit={PAGE_MAX}&after={after}"))).await?;
        all.extend(page.items);
        match page.next {
            Some(next) => after = next,
            None => break,
        }
    }
    all.retain(|credential| host.is_none_or(|host| credential.host == host.as_str()));
    Ok(all)
}

/// What the authority has made for this host and has not expired.
fn minted(authority: &Authority, host: &HostId) -> Vec<RevokedCredential> {
    let own = authority.issued().iter().filter(|issued| issued.role == Role::Host.as_str() && issued.name == host.as_str());
    let known = |issued: &Issued| RevokedCredential {
        key: issued.public_key.clone(),
        made_at: issued.issued_at,
        // One from before they all expired is remembered for as long as any other.
        expires_at: issued.expires_at.unwrap_or_else(|| issued.issued_at.saturating_add(HOST_LIFE_MAX.as_secs())),
    };
    own.map(known).collect()
}

/// The credentials of both, each key once, in the order in which they were made.
fn united(made: Vec<RevokedCredential>, signed: &[ShownCredential]) -> Vec<RevokedCredential> {
    let mut all = made;
    for ShownCredential { key, made_at, expires_at, .. } in signed {
        match all.iter_mut().find(|one| one.key == *key) {
            Some(known) => known.expires_at = known.expires_at.max(*expires_at),
            None => all.push(RevokedCredential { key: key.clone(), made_at: *made_at, expires_at: *expires_at }),
        }
    }
    all.sort_by_key(|one| one.made_at);
    all
}

/// Tells the gateway what is void, so that it is not renewed. What is left.
async fn told(api: &Api, host: &HostId, credentials: Vec<RevokedCredential>) -> Result<Option<LeftOfHost>> {
    let body = serde_json::to_value(RevokedCredentials { credentials }).unwrap_or_default();
    match api.fetch::<LeftOfHost>(&Call::new(Method::POST, format!("/v1/hosts/{host}/revoked")).json(&body)).await {
        Ok(left) => Ok(Some(left)),
        Err(failure) if failure.code == Code::NotFound => Ok(None),
        Err(failure) => Err(failure),
    }
}

async fn retire(api: Option<&Api>, path: &Path, host: &HostId, keep: Option<String>, servers: &ServerOptions) -> Result {
    let mut authority = locked(path)?;
    let now = SystemTime::now();
    authority.forget_expired(now).map_err(failed)?;
    let signed = match api {
        Some(api) => signed(api, Some(host)).await?,
        None => Vec::new(),
    };
    let all = united(minted(&authority, host), &signed);
    let newest = match (keep, &all[..]) {
        (_, []) => {
            let message = format!("host {host} has no valid credential");
            return Err(Failure::new(Code::NotFound, message).hint("see `groupcast host list`"));
        }
        (Some(keep), all) if all.iter().any(|one| one.key == keep) => keep,
        (Some(keep), _) => return Err(Failure::new(Code::NotFound, format!("host {host} has no credential of key {keep}"))),
        // Made by two ledgers in one second: which is the newest nobody can say.
        (None, [.., last_but_one, last]) if last_but_one.made_at == last.made_at && !signed.is_empty() => {
            let message = format!("{} and {} were made in the same second", last_but_one.key, last.key);
            return Err(Failure::usage(message).hint("say which one stays, with --keep"));
        }
        (None, [.., last]) => last.key.clone(),
    };
    let gone: Vec<RevokedCredential> = all.into_iter().filter(|one| one.key != newest).collect();
    for one in &gone {
        if !authority.revoke_key(&one.key, now).map_err(failed)? {
            authority.revoke_joined(&one.key, now).map_err(failed)?;
        }
    }
    let count = gone.len();
    publish(&mut authority, servers).await?;
    if let Some(api) = api {
        told(api, host, gone).await?;
    }
    output::say(&format!("{count} credentials of host {host} revoked; {newest} stays"));
    Ok(())
}

/// The order makes it resumable: each step leaves behind what the next needs to know, and only the last forgets the host.
async fn remove(api: Option<&Api>, path: &Path, host: &HostId, servers: &ServerOptions) -> Result {
    let mut authority = locked(path)?;
    let removed = match api {
        Some(api) => ungrant(api, host).await?,
        None => None,
    };
    let now = SystemTime::now();
    let signed = removed.as_ref().map_or(&[][..], |removed| &removed.credentials);
    let all = united(minted(&authority, host), signed);
    if all.is_empty() && removed.is_none() && !authority.is_unpublished() {
        let message = format!("host {host} has no valid credential");
        return Err(Failure::new(Code::NotFound, message).hint("see `groupcast host list`"));
    }
    authority.revoke(Role::Host, host, now).map_err(failed)?;
    for one in signed {
        authority.revoke_joined(&one.key, now).map_err(failed)?;
    }
    let (count, workloads) = (all.len(), removed.as_ref().map_or(0, |removed| removed.workloads));
    if count > 0 || authority.is_unpublished() {
        publish(&mut authority, servers).await?;
    }
    if let Some(api) = api.filter(|_| !signed.is_empty())
        && let Some(left) = told(api, host, all).await?
        && !left.gone
    {
        let message = format!("{} credentials of host {host} still work", left.credentials.len());
        return Err(failed(message).hint("run this again"));
    }
    output::say(&format!("{count} credentials of host {host} revoked, {workloads} workloads removed"));
    Ok(())
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
                let mut authority = locked(&path)?;
                let credential = authority.mint(Role::Host, &host, life, SystemTime::now()).map_err(failed)?;
                // Kept before it is given away: what nobody knows cannot be revoked.
                authority.save().map_err(failed)?;
                credential.save(&out).map_err(failed)?;
                output::say(&format!("credential for host {host} written to {}", out.display()));
            }
            Ok(())
        }
        Command::Token { host, life } => {
            let body = serde_json::to_value(NewJoinToken { life }).unwrap_or_default();
            let call = Call::new(Method::POST, format!("/v1/hosts/{host}/token")).json(&body);
            let made: MadeJoinToken = connection.api()?.fetch(&call).await?;
            output::say(&format!(
                "join token for host {host} made; it works once: `groupcast-agent join --token-file -` there reads it"
            ));
            output::print(&(made.token + "\n"))
        }
        Command::Signer { authority: AuthorityOptions { authority: path }, out } => {
            load(&path)?.host_signer().and_then(|signer| signer.save(&out)).map_err(failed)?;
            output::say(&format!("signer of hosts written to {}: give it to gateways with --host-signer", out.display()));
            Ok(())
        }
        Command::Retire { authority: AuthorityOptions { authority: path }, host, keep, without_gateway, servers } => {
            let api = gateway(connection, without_gateway)?;
            retire(api.as_ref(), &path, &host, keep, &servers).await
        }
        Command::Remove { authority: AuthorityOptions { authority: path }, host, without_gateway, servers } => {
            let api = gateway(connection, without_gateway)?;
            remove(api.as_ref(), &path, &host, &servers).await
        }
        Command::List { authority, without_gateway, output: format } => {
            let mut items = match authority.as_deref().map(load).transpose()? {
                None => Vec::new(),
                Some(mut authority) => {
                    authority.forget_expired(SystemTime::now()).map_err(failed)?;
                    of_authority(&authority)
                }
            };
            if let Some(api) = gateway(connection, without_gateway)? {
                of_gateways(&mut items, signed(&api, None).await?);
            }
            output::print(&listed(items, format))
        }
    }
}

/// A credential as it is listed.
pub(super) struct Item {
    role: String,
    name: String,
    key: String,
    issued: u64,
    expires: Option<u64>,
    /// Who signed: the authority, or a gateway.
    by: &'static str,
    state: &'static str,
}

pub(super) fn of_authority(authority: &Authority) -> Vec<Item> {
    let item = |issued: &Issued| Item {
        role: issued.role.clone(),
        name: issued.name.clone(),
        key: issued.public_key.clone(),
        issued: issued.issued_at,
        expires: issued.expires_at,
        by: "authority",
        state: "valid",
    };
    authority.issued().iter().map(item).collect()
}

/// A key that the authority made and a gateway renewed is one key.
fn of_gateways(items: &mut Vec<Item>, signed: Vec<ShownCredential>) {
    for ShownCredential { host, key, made_at, expires_at, removing } in signed {
        let state = if removing { "removing" } else { "valid" };
        match items.iter_mut().find(|item| item.key == key) {
            Some(item) => (item.expires, item.by, item.state) = (Some(expires_at), "gateway", state),
            None => {
                let (role, expires) = (Role::Host.as_str().to_owned(), Some(expires_at));
                items.push(Item { role, name: host, key, issued: made_at, expires, by: "gateway", state });
            }
        }
    }
}

pub(super) fn listed(items: Vec<Item>, format: Format) -> String {
    // The last second that can be written; an answer may hold any number.
    const LAST_SHOWN: u64 = 253_402_300_799;
    let time = |seconds: u64| {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.min(LAST_SHOWN));
        humantime::format_rfc3339_seconds(at).to_string()
    };
    let expires = |at: Option<u64>| at.map_or("never".to_owned(), time);
    let items: Vec<_> = items
        .iter()
        .map(|i| {
            json!({ "role": i.role, "name": i.name, "issued": time(i.issued), "expires": expires(i.expires), "key": i.key,
                "by": i.by, "state": i.state })
        })
        .collect();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    match format {
        Format::Json => output::json(&json!({ "format_version": "1", "items": items })),
        Format::Yaml => output::yaml(&json!({ "format_version": "1", "items": items })),
        Format::Jsonl => items.iter().map(|item| output::json_line(item) + "\n").collect(),
        Format::Name => items.iter().map(|item| format!("{}/{}\n", text(&item["role"]), text(&item["name"]))).collect(),
        Format::Table | Format::Wide => {
            let fields = if format == Format::Wide {
                &["role", "name", "issued", "expires", "state", "by", "key"][..]
            } else {
                &["role", "name", "issued", "expires", "state"]
            };
            let rows = items.iter().map(|item| fields.iter().map(|field| text(&item[*field])).collect()).collect();
            output::table(fields, rows)
        }
    }
}
