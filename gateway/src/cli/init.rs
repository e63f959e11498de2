//! `init`: says that a bus is new, so that controllers lead before anything is written.

use std::time::SystemTime;

use clap::Args;
use groupcast_bus_config::connect;
use groupcast_control::begin::{self, Begun};
use reqwest::Method;

use super::client::Call;
use super::context::Connection;
use super::{Code, Failure, Result, output};
use crate::api::init::Initialised;
use crate::bus::BusOptions;
use crate::gateway::bus_options;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Do it on the bus, with a gateway's credential, not through a gateway.
    #[arg(long)]
    on_bus: bool,
    #[command(flatten)]
    bus: BusOptions,
}

pub async fn init(connection: &Connection, options: Options) -> Result {
    let change = match options.on_bus {
        true => {
            let (client, _events) = connect::connect(bus_options(&options.bus)).await.map_err(|error| {
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
        false => connection.api()?.fetch::<Initialised>(&Call::new(Method::POST, "/v1/init")).await?.change,
    };
    output::say(&match change {
        Some(change) => format!("the bus is new, as change {change} says: controllers lead and sources are read"),
        None => "something was written to this bus before: there is nothing to do".to_owned(),
    });
    Ok(())
}
