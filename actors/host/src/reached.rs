//! Whether what `agent.toml` names is good for this host, and can be reached: for `config check`. The agent itself starts without any of it.

use std::time::SystemTime;

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity, Tls};
use groupcast_bus_config::{held, reach};

use crate::config::Config;

/// What is wrong with the credential, as far as the file says.
pub fn credential(config: &Config, now: SystemTime) -> Option<String> {
    let path = config.credentials.as_deref().filter(|path| path.exists())?;
    match held::name(Some(path), Some(&config.host)) {
        Err(held::Error::Name { path, held, said }) => Some(format!(
            "credentials: {} are those of host {held}, and host is {said}: set host = \"{held}\", or put those of {said} there",
            path.display()
        )),
        Err(error) => Some(format!("credentials: {error}")),
        Ok(_) => held::fits(path, Role::Host, now).err().map(|error| format!("credentials: {error}")),
    }
}

/// What cannot be reached, and what the bus refuses. Servers are asked at the same time, each for [`reach::WITHIN`].
pub async fn unreachable(config: &Config) -> Vec<String> {
    let mut found = Vec::new();
    let mut first = None;
    for (server, outcome) in reach::servers(&config.servers, &config.tls).await {
        match outcome {
            Ok(_) => _ = first.get_or_insert(server),
            Err(error) => found.push(format!("servers: {error}")),
        }
    }
    if let Some(server) = first {
        let identity = config.credentials.clone().map_or(Identity::Nobody, Identity::File);
        let options = connect::Options::new(std::slice::from_ref(&server), Role::Host, &config.host)
            .identity(identity)
            .tls(config.tls.clone());
        match tokio::time::timeout(reach::WITHIN, connect::connect(options)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => found.push(format!(
                "credentials: {server} refuses them: {}; were they made with the authority of this installation, and not revoked?",
                error.login()
            )),
            Err(_) => found.push(format!("credentials: {server} did not answer the login within {} s", reach::WITHIN.as_secs())),
        }
    }
    for gateway in config.gateways.iter().filter(|gateway| gateway.address.is_secure()) {
        let tls = Tls { authority: gateway.authority.clone(), ..Tls::default() };
        let outcome = reach::secure(gateway.address.name(), gateway.address.port, &tls).await;
        found.extend(outcome.err().map(|error| format!("gateway: {error}")));
    }
    found
}
