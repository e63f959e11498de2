//! Whether a connection is encrypted, and whom it trusts.
//!
//! A server says in its first line, in the clear, whether it wants encryption. Whoever sits in between can rewrite that line. So the client
//! decides by itself: encryption is required unless every server is on this machine, and what the first line says changes nothing.

use std::net::IpAddr;
use std::path::PathBuf;

use async_nats::ServerAddr;

use super::Error;

/// Encryption, beyond what the servers' URLs say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Refuses a server that offers none. Not said: required unless every server is on this machine.
    pub required: Option<bool>,
    /// Authorities to trust, in PEM, and no others; nothing means the system's.
    pub authority: Option<PathBuf>,
    /// Certificate and key to present, in PEM.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl Tls {
    /// Whether servers that offer no encryption are refused.
    pub fn is_required(&self, servers: &[String]) -> bool {
        self.required.unwrap_or_else(|| !servers.iter().all(|server| is_loopback(server)))
    }

    /// What it names and cannot be read, before anybody connects.
    pub fn problems(&self) -> Vec<String> {
        let pair = self.certificate.iter().flat_map(|(certificate, key)| [certificate, key]);
        let files = self.authority.iter().chain(pair);
        let unreadable = |path: &PathBuf| {
            let error = std::fs::File::open(path).err()?;
            Some(format!("{} cannot be read: {error}", path.display()))
        };
        files.filter_map(unreadable).collect()
    }
}

/// Whether a server is on this machine: nobody sits in between.
pub fn is_loopback(server: &str) -> bool {
    let Ok(address) = server.parse::<ServerAddr>() else { return false };
    let host = address.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Refuses what the client library would connect to in another way than it reads. It takes `ws://` as an address, speaks plain NATS to it and
/// leaves out encryption, even where that is required.
pub(super) fn judge(servers: &[String]) -> Result<Vec<ServerAddr>, Error> {
    let mut addresses = Vec::with_capacity(servers.len());
    for server in servers {
        let wrong = |reason: String| Error::Server { server: server.clone(), reason };
        let address: ServerAddr = server.parse().map_err(|error: std::io::Error| wrong(error.to_string()))?;
        if !matches!(address.scheme(), "nats" | "tls") {
            return Err(wrong(format!("{}:// is not supported: write nats:// or tls://", address.scheme())));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encryption_is_required_unless_every_server_is_on_this_machine() {
        let rows: [(&[&str], bool); 12] = [
            (&["nats://127.0.0.1:4222"], false),
            (&["127.8.9.1"], false),
            (&["nats://[::1]:4222"], false),
            (&["nats://[::ffff:127.0.0.1]:4222"], false),
            (&["nats://LOCALHOST"], false),
            (&["nats://localhost.example:4222"], true),
            (&["nats://127.0.0.1.example"], true),
            (&["nats://10.0.0.1:4222"], true),
            (&["nats://0.0.0.0:4222"], true),
            (&["nats://127.0.0.1:4222", "nats://bus-1:4222"], true),
            (&["nats://127.0.0.1@bus-1:4222"], true),
            (&["not a server"], true),
        ];
        for (servers, required) in rows {
            let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
            assert_eq!(Tls::default().is_required(&servers), required, "{servers:?}");
            for said in [true, false] {
                assert_eq!(Tls { required: Some(said), ..Tls::default() }.is_required(&servers), said);
            }
        }
    }

    #[test]
    fn only_addresses_that_are_connected_to_as_they_read_are_taken() {
        for (server, words) in
            [("ws://bus-1:4222", "ws:// is not supported"), ("wss://bus-1", "wss:// is not supported"), ("http://bus-1", "http")]
        {
            let refused = judge(&["nats://bus-1".to_owned(), server.to_owned()]).unwrap_err().to_string();
            assert!(refused.contains(server) && refused.contains(words), "{refused}");
        }
        assert!(judge(&["bus-1".to_owned(), "tls://bus-2:1".to_owned(), "nats://[::1]:4".to_owned()]).is_ok());
    }

    #[test]
    fn files_that_cannot_be_read_are_named() {
        let here = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let tls = |authority: &PathBuf| Tls {
            authority: Some(authority.clone()),
            certificate: Some((here.clone(), "/nowhere/key.pem".into())),
            ..Tls::default()
        };
        assert_eq!(tls(&here).problems().len(), 1);
        let all = tls(&"/nowhere/authority.pem".into()).problems();
        assert!(all.len() == 2 && all[0].contains("/nowhere/authority.pem") && all[1].contains("/nowhere/key.pem"), "{all:?}");
    }
}
