//! `token`: who may use gateways. The first token is made on the bus itself, with a gateway's credential.

use std::path::PathBuf;
use std::time::SystemTime;

use clap::{Args, Subcommand};
use groupcast_bus_config::connect;
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Name;
use reqwest::Method;
use serde_json::Value;

use super::client::{Call, escaped};
use super::context::Connection;
use super::output::{self, Format};
use super::{Code, Failure, Result, get};
use crate::api::tokens::{MadeToken, NewToken, make};
use crate::bus::BusOptions;
use crate::gateway::bus_options;
use crate::scope::Scope;
use crate::token::Role;

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
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Do it on the bus, with a gateway's credential, not through a gateway: for the first token, and when all are lost.
    #[arg(long)]
    on_bus: bool,
    #[command(flatten)]
    bus: BusOptions,
}

impl Place {
    async fn write(&self, reason: String, write: Write) -> Result<u64> {
        let (client, _events) = connect::connect(bus_options(&self.bus)).await.map_err(|error| {
            Failure::failed(error.to_string()).hint("name the server with --server and the credential with --credentials")
        })?;
        let change = Change { author: "command line on the bus".to_owned(), reason, key: None, writes: vec![write] };
        let written = Catalog::new(client).write(&change, None).await;
        written.map(|accepted| accepted.number).map_err(|error| match error {
            groupcast_control::catalog::Error::Conflict { .. } => Failure::new(Code::Conflict, "there is a token of that name")
                .hint("revoke it first (`groupcast token remove`), or choose another name"),
            error => Failure::failed(error.to_string()).hint("are the streams there? a controller makes them"),
        })
    }
}

pub async fn run(connection: &Connection, command: Command) -> Result {
    match command {
        Command::List { output: format } => {
            let items = connection.api()?.list("/v1/tokens", usize::MAX).await?;
            output::print(&get::shown(get::Kind::Tokens, false, &items, format))
        }
        Command::Add(options) => add(connection, options).await,
        Command::Remove(RemoveOptions { id, place }) => {
            let change = match place.on_bus {
                true => {
                    let name = Name::new(CatalogKind::Token, &id).map_err(|error| Failure::usage(error.to_string()))?;
                    place.write(format!("token {id} revoked"), Write::delete(name, Expected::Any)).await?
                }
                false => {
                    let call = Call::new(Method::DELETE, format!("/v1/tokens/{}", escaped(&id)));
                    let revoked: Value = connection.api()?.fetch(&call).await?;
                    revoked["change"].as_u64().unwrap_or(0)
                }
            };
            output::say(&format!("token {id} revoked with change {change}"));
            Ok(())
        }
    }
}

async fn add(connection: &Connection, options: AddOptions) -> Result {
    let AddOptions { id, role, life, description, ids, bindings, members, out, place } = options;
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
