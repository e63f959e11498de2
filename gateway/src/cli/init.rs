//! `init`: says that a bus is new, so that controllers lead before anything is written.

use std::time::SystemTime;

use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect;
use groupcast_control::begin::{self, Begun};
use reqwest::Method;

use super::client::{Call, random_key};
use super::context::Connection;
use super::{Code, Failure, Result, output};
use crate::api::init::Initialised;
use crate::bus::BusArguments;
use crate::gateway::bus_options;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Do it on the bus, with a gateway's credential, not through a gateway.
    #[arg(long)]
    on_bus: bool,
    #[command(flatten)]
    bus: BusArguments,
}

pub async fn init(connection: &Connection, options: Options) -> Result {
    let change = match options.on_bus {
        true => {
            let bus = options.bus.resolved(Role::Gateway).map_err(anyhow::Error::from)?;
            let (client, _events) = connect::connect(bus_options(&bus)).await.map_err(|error| {
                Failure::failed(error.to_string()).hint("name the server with --server and the credential with --credentials")
            })?;
            let begun = begin::begin(&client, "command line on the bus", SystemTime::now()).await;
            match begun {
                Ok(Begun::Now { change }) => Some(change),
                Ok(Begun::Before) => None,
                Err(error @ begin::Error::NotNew { .. }) => return Err(Failure::new(Code::Conflict, error.to_string())),
                Err(error) => {
                    return Err(Failure::failed(error.to_string()).hint("are the streams there? a controller makes them"));
                }
            }
        }
        // It has no use for the key: a second time finds the first, and that is as good.
        false => connection.api()?.fetch::<Initialised>(&Call::new(Method::POST, "/v1/init").key(random_key())).await?.change,
    };
    output::say(&match change {
        Some(change) => format!("the bus is new, as change {change} says: controllers lead and sources are read"),
        None => "something was written to this bus before: there is nothing to do".to_owned(),
    });
    Ok(())
}
