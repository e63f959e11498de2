//! `token`: who may use gateways. The first token is made on the bus itself, with a gateway's credential.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use async_nats::Client;
use clap::{Args, Subcommand};
use groupcast_bus_config::accounts::Role as BusRole;
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_bus_config::{alive, connect};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Name;
use reqwest::Method;
use serde_json::Value;

use super::client::{Api, Call, escaped};
use super::context::Connection;
use super::output::{self, Format};
use super::{Code, Failure, Result, get};
use crate::api::access::WhoAmI;
use crate::api::tokens::{MadeToken, NewToken, make};
use crate::bus::{BusArguments, BusOptions};
use crate::gateway::bus_options;
use crate::scope::Scope;
use crate::token::Role;

/// How long the bus has to answer before something is written.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Make a token. Its text is printed once and stored nowhere.
    #[command(after_help = "Examples:\n  groupcast token add root --role admin --on-bus > ~/.groupcast-token\n  \
                            groupcast token add shop-ci --role editor --life 90d --ids shop- --bindings space:shop --members 10.1.0.0/16")]
    Add(AddOptions),
    /// Revoke a token, at every gateway.
    Remove(RemoveOptions),
    /// List tokens, without their secrets.
    List {
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
}

#[derive(Debug, Clone, Args)]
pub struct AddOptions {
    /// What it is called; changes are signed with it.
    id: String,
    #[arg(long, value_enum)]
    role: Role,
    /// How long it lives, such as 90d; without it, for ever.
    #[arg(long)]
    life: Option<String>,
    #[arg(long, default_value = "")]
    description: String,
    /// Scope: groups whose id begins so.
    #[arg(long, value_delimiter = ',')]
    ids: Vec<String>,
    /// Scope: where it may bind: global, space:ID, app:ID, workload:ID; an id may end in *.
    #[arg(long, value_delimiter = ',')]
    bindings: Vec<String>,
    /// Scope: which prefixes it may make members.
    #[arg(long, value_delimiter = ',')]
    members: Vec<String>,
    /// Write the token here, readable by its owner only, instead of to stdout.
    #[arg(long)]
    out: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Clone, Args)]
pub struct RemoveOptions {
    id: String,
    /// Do not ask, also if it is the last administrator's or the one in use.
    #[arg(short, long)]
    yes: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Do it on the bus, with a gateway's credential, not through a gateway: for the first token, and when all are lost.
    #[arg(long)]
    on_bus: bool,
    /// Wait so long for a bus that is not ready yet, such as one that was just set up.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "0s", requires = "on_bus")]
    within: Duration,
    #[command(flatten)]
    bus: BusArguments,
}

/// Pause between two looks at a bus that is not ready yet.
const LOOK_EVERY: Duration = Duration::from_millis(500);

impl Place {
    /// The bus, once it takes writes. What is stored without a word coming back would be a token that nobody knows: first a word has to come back.
    async fn bus(&self, bus: &BusOptions) -> Result<Client> {
        let ready = async || {
            let connected = tokio::time::timeout(SETTLED_WITHIN, connect::connect(bus_options(bus))).await;
            let hint = "name the server with --server and the credential with --credentials, or both with --config; `groupcast config check` \
                        looks closer";
            let silent = || Failure::failed("the bus did not answer in time").hint(hint);
            let (client, _events) =
                connected.map_err(|_| silent())?.map_err(|error| Failure::failed(error.to_string()).hint(hint))?;
            let hint = "are the streams there? a controller makes them";
            let alive = alive::takes_writes(&client, SETTLED_WITHIN).await;
            alive.map_err(|error| Failure::failed(format!("{error}; nothing was written")).hint(hint))?;
            Ok(client)
        };
        let start = Instant::now();
        let mut told = false;
        loop {
            let failure: Failure = match ready().await {
                Ok(client) => return Ok(client),
                Err(failure) => failure,
            };
            if start.elapsed() + LOOK_EVERY > self.within {
                return Err(failure);
            }
            if !std::mem::replace(&mut told, true) {
                output::say(&format!("the bus is not ready yet ({}); waiting", failure.message));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn write(&self, reason: String, write: Write) -> Result<u64> {
        let usage = |error: groupcast_bus_config::held::Error| Failure::usage(error.to_string());
        let bus = self.bus.resolved(BusRole::Gateway).map_err(anyhow::Error::from)?;
        bus.check(BusRole::Gateway, SystemTime::now()).map_err(usage)?;
        let client = self.bus(&bus).await?;
        let (name, catalog) = (write.name.clone(), Catalog::new(client.clone()));
        let change = Change { author: "command line on the bus".to_owned(), reason, key: None, writes: vec![write] };
        let written = catalog.write(&change, None).await.map_err(|error| match error {
            groupcast_control::catalog::Error::Conflict { .. } => Failure::new(Code::Conflict, "there is a token of that name")
                .hint("revoke it first (`groupcast token remove`), or choose another name"),
            error => Failure::failed(error.to_string()).hint("are the streams there? a controller makes them"),
        })?;
        is_kept(&client, &catalog, &name, written.number).await?;
        Ok(written.number)
    }
}

/// Looks before anybody is told that it is done: a server can take a single message while its disk is full.
async fn is_kept(client: &Client, catalog: &Catalog, name: &Name, number: u64) -> Result {
    let hint = "mend the bus first (is the disk of a server full? free room in its store_dir, `df`, and restart it), then revoke this token \
                and make another";
    let there = catalog.read(name).await.map_err(|error| {
        Failure::failed(format!("change {number} of {name} was taken, and cannot be read back: {error}")).hint(hint)
    })?;
    if there.is_none_or(|version| version.revision < number) {
        return Err(Failure::failed(format!("the bus took change {number} of {name}, and does not have it")).hint(hint));
    }
    alive::takes_writes(client, SETTLED_WITHIN).await.map_err(|error| {
        Failure::failed(format!("change {number} of {name} was taken, but the bus takes no more, so it may not be kept: {error}"))
            .hint(hint)
    })?;
    Ok(())
}

pub async fn run(connection: &Connection, command: Command) -> Result {
    match command {
        Command::List { output: format } => {
            let all = connection.api()?.list("/v1/tokens", None).await?;
            output::print(&get::shown(get::Kind::Tokens, false, &all.items, format))
        }
        Command::Add(options) => add(connection, options).await,
        Command::Remove(RemoveOptions { id, yes, place }) => {
            let change = match place.on_bus {
                true => {
                    let name = Name::new(CatalogKind::Token, &id).map_err(|error| Failure::usage(error.to_string()))?;
                    place.write(format!("token {id} revoked"), Write::delete(name, Expected::Any)).await?
                }
                false => {
                    let api = connection.api()?;
                    if !yes {
                        meant(&api, &id).await?;
                    }
                    let call = Call::new(Method::DELETE, format!("/v1/tokens/{}", escaped(&id)));
                    let revoked: Value = api.fetch(&call).await?;
                    revoked["change"].as_u64().unwrap_or(0)
                }
            };
            output::say(&format!("token {id} revoked with change {change}"));
            Ok(())
        }
    }
}

/// Asks before the last token goes with which others could be made, and before the one that is in use does.
async fn meant(api: &Api, id: &str) -> Result {
    let own: WhoAmI = api.fetch(&Call::get("/v1/whoami")).await?;
    let tokens = api.list("/v1/tokens", None).await?.items;
    let is_good_admin = |token: &&Value| token["role"] == "admin" && token["expired"] != true;
    let mut admins = tokens.iter().filter(is_good_admin).map(|token| token["id"].as_str().unwrap_or_default());
    let is_last = admins.clone().any(|admin| admin == id) && admins.all(|admin| admin == id);
    let why = match (is_last, own.id == id) {
        (true, _) => {
            "is the last administrator's token: without it nobody can make another but with a gateway's credential on the bus"
        }
        (false, true) => "is the one you use",
        (false, false) => return Ok(()),
    };
    if !std::io::stdin().is_terminal() {
        return Err(Failure::new(Code::Conflict, format!("token {id} {why}")).hint("make another first, or say --yes"));
    }
    output::say(&format!("token {id} {why}; type yes to revoke it:"));
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line);
    match read.is_ok() && line.trim() == "yes" {
        true => Ok(()),
        false => Err(Failure::new(Code::Conflict, format!("token {id} stays"))),
    }
}

async fn add(connection: &Connection, options: AddOptions) -> Result {
    let AddOptions { id, role, life, description, ids, bindings, members, out, place } = options;
    if let Some(path) = &out {
        // Before anything is made that would be lost with it.
        let failed = |error| Failure::failed(format!("{} cannot be written: {error}; no token was made", path.display()));
        crate::secret::probe(path).map_err(failed)?;
    }
    let scoped = !(ids.is_empty() && bindings.is_empty() && members.is_empty());
    let new = NewToken { id, role, scope: scoped.then_some(Scope { ids, bindings, members }), description, life };
    let token = match place.on_bus {
        true => {
            let (token, text) = make(&new, SystemTime::now()).map_err(|problem| Failure::usage(problem.detail))?;
            place.write(format!("token {} made", token.id()), Write::put(token.document(), Expected::Absent)).await?;
            text
        }
        false => {
            let body = serde_json::to_value(&new).unwrap_or_default();
            let made: MadeToken = connection.api()?.fetch(&Call::new(Method::POST, "/v1/tokens").json(&body)).await?;
            made.token
        }
    };
    output::say(&format!("token {} made; keep it, it is shown only now", new.id));
    match out {
        None => output::print(&(token + "\n")),
        Some(path) => crate::secret::write(&path, &token).map_err(|error| {
            Failure::failed(format!("{} cannot be written: {error}; revoke the token and make another", path.display()))
        }),
    }
}
