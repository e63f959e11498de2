//! A server for one benchmark, and the parts of JetStream's protocol that the lean client needs to speak.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, bail};
use groupcast_bus_config::server::{Config, Server};
use serde_json::Value;

use crate::lean::{Client, ConnectOptions};

/// A server of its own, so that nothing but the benchmark is on it.
pub async fn start_server() -> anyhow::Result<Server> {
    let server = Server::start(Config::plain()).await.context("starting a nats-server")?;
    super::say(format_args!("nats-server on port {}", server.client_port()));
    Ok(server)
}

pub fn address(server: &Server) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, server.client_port()))
}

pub async fn connect(server: &Server, name: &str) -> anyhow::Result<Client> {
    let options = ConnectOptions { name: name.to_owned(), ..Default::default() };
    Ok(Client::connect(address(server), &options).await?)
}

/// Creates a stream from its JSON configuration.
pub async fn create_stream(client: &mut Client, config: &Value) -> anyhow::Result<()> {
    let name = config["name"].as_str().context("a stream configuration has a name")?;
    let answer = client.request(&format!("$JS.API.STREAM.CREATE.{name}"), &[], config.to_string().as_bytes()).await?;
    let answer: Value = serde_json::from_slice(&answer.payload)?;
    match answer.get("error") {
        None => Ok(()),
        Some(error) => bail!("stream {name} was refused: {error}"),
    }
}
