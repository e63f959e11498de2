//! What an operator has granted to a host: where its addresses may lie, and the token with which it joins. A document of CATALOG, so
//! that it is audited, exported and written by compare-and-swap like any other.

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_policy::ids::{HostId, InvalidId};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::prefix_text;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::admit::covers;
use crate::document::{Document, Name};

/// Networks one host may be granted.
pub const NETWORKS_MAX: usize = 1_000;
/// How long a join token may live. It is meant to be used at once.
pub const JOIN_SECONDS_MAX: u64 = 24 * 3600;
/// Random bytes of a join token.
const SECRET_BYTES: usize = 24;
/// What a join token begins with, so that it is recognised where it does not belong.
const PREFIX: &str = "gcj_";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub host: HostId,
    /// Where its workloads' addresses must lie.
    pub networks: Vec<Prefix>,
    pub join: Option<Join>,
}

/// A token with which the host may join once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// Of the token, in hexadecimal.
    pub hash: String,
    /// Seconds since 1970.
    pub expires_at: u64,
    /// The key that joined with it. It may ask again, nobody else may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// As the document is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    id: String,
    networks: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    join: Option<Join>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("this token is not known: make a new one with `groupcast host token`")]
    Unknown,
    #[error("this token has expired: make a new one with `groupcast host token`")]
    Expired,
    #[error("this token was used by another key: make a new one, and find out who used it")]
    Used,
}

impl Grant {
    pub fn new(host: HostId, networks: Vec<Prefix>) -> Self {
        Self { host, networks, join: None }
    }

    pub fn name(host: &HostId) -> Result<Name, InvalidId> {
        Name::new(CatalogKind::Host, host.as_str())
    }

    pub fn document(&self) -> Result<Document, InvalidId> {
        let networks = self.networks.iter().map(ToString::to_string).collect();
        let written = Written { id: self.host.to_string(), networks, join: self.join.clone() };
        // Strings, numbers and lists have no way to fail.
        let body = serde_json::to_value(&written).unwrap_or_default();
        Ok(Document::Other { name: Self::name(&self.host)?, body })
    }

    pub fn read(document: &Document) -> Result<Self, String> {
        let Document::Other { name, body } = document else { return Err("it is no host".to_owned()) };
        let written: Written = serde_json::from_value(body.clone()).map_err(|error| error.to_string())?;
        if name.kind != CatalogKind::Host || written.id != name.id() {
            return Err(format!("it says that it is host {}: write it under its own name", written.id));
        }
        if written.networks.len() > NETWORKS_MAX {
            return Err(format!("{} networks, at most {NETWORKS_MAX}: grant wider ones", written.networks.len()));
        }
        let network = |text: &String| prefix_text(text).map_err(|error| format!("network {text:?}: {error}"));
        let networks = written.networks.iter().map(network).collect::<Result<_, _>>()?;
        Ok(Self { host: written.id.parse().map_err(|error: InvalidId| error.to_string())?, networks, join: written.join })
    }

    /// Whether the prefix lies where the host's addresses may.
    pub fn covers(&self, address: Prefix) -> bool {
        self.networks.iter().any(|wide| covers(*wide, address))
    }

    /// The grant after this key has joined with the token; equal to what it was when the key had joined before.
    pub fn joined(&self, token: &str, key: &str, now_seconds: u64) -> Result<Self, Refused> {
        let join = self.join.as_ref().filter(|join| join.hash == hash(token)).ok_or(Refused::Unknown)?;
        match &join.key {
            Some(bound) if bound == key => Ok(self.clone()),
            Some(_) => Err(Refused::Used),
            None if now_seconds >= join.expires_at => Err(Refused::Expired),
            None => Ok(Self { join: Some(Join { key: Some(key.to_owned()), ..join.clone() }), ..self.clone() }),
        }
    }
}

/// A new token for the host and what is kept of it. The host's name is part of it, so that its holder need not be told.
pub fn token(host: &HostId, random: [u8; SECRET_BYTES], expires_at: u64) -> (String, Join) {
    let token = format!("{PREFIX}{host}.{}", BASE64URL_NOPAD.encode(&random));
    let join = Join { hash: hash(&token), expires_at, key: None };
    (token, join)
}

/// The host that a token is for.
pub fn host_of(token: &str) -> Option<HostId> {
    HostId::new(token.strip_prefix(PREFIX)?.split_once('.')?.0).ok()
}

/// Tokens are random and long, so a fast hash will do; but from it no token may be made.
fn hash(token: &str) -> String {
    HEXLOWER.encode(&Sha256::digest(token.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant() -> Grant {
        Grant::new("h1".parse().unwrap(), vec![prefix_text("10.1.0.0/16").unwrap(), prefix_text("2001:db8::/64").unwrap()])
    }

    #[test]
    fn grants_read_back() {
        let (token, join) = token(&"h1".parse().unwrap(), [7; SECRET_BYTES], 100);
        for grant in [grant(), Grant { join: Some(join), ..grant() }] {
            assert_eq!(Grant::read(&grant.document().unwrap()), Ok(grant.clone()));
            assert!(!format!("{:?}", grant.document().unwrap()).contains(&token), "the token itself is never kept");
        }
        let other = Document::Other {
            name: Grant::name(&"h2".parse().unwrap()).unwrap(),
            body: serde_json::json!({ "id": "h1", "networks": [] }),
        };
        assert!(Grant::read(&other).unwrap_err().contains("its own name"));
        let body = serde_json::json!({ "id": "h1", "networks": ["10.0.0.0/33"] });
        let bad = Document::Other { name: Grant::name(&"h1".parse().unwrap()).unwrap(), body };
        assert!(Grant::read(&bad).unwrap_err().contains("10.0.0.0/33"));
    }

    #[test]
    fn addresses_lie_in_what_was_granted() {
        for (address, covered) in
            [("10.1.2.3/32", true), ("10.2.0.1/32", false), ("10.0.0.0/8", false), ("2001:db8::1/128", true), ("::1/128", false)]
        {
            assert_eq!(grant().covers(prefix_text(address).unwrap()), covered, "{address}");
        }
    }

    #[test]
    fn a_token_joins_once_and_binds_to_the_first_key() {
        let host: HostId = "h1".parse().unwrap();
        let (secret, join) = token(&host, [9; SECRET_BYTES], 100);
        assert_eq!(host_of(&secret), Some(host));
        let granted = Grant { join: Some(join), ..grant() };
        assert_eq!(granted.joined("gcj_h1.wrong", "KEY", 0), Err(Refused::Unknown));
        assert_eq!(grant().joined(&secret, "KEY", 0), Err(Refused::Unknown));
        assert_eq!(granted.joined(&secret, "KEY", 100), Err(Refused::Expired));
        let joined = granted.joined(&secret, "KEY", 99).unwrap();
        assert_eq!(joined.joined(&secret, "KEY", 1_000), Ok(joined.clone()), "whose answer was lost asks again");
        assert_eq!(joined.joined(&secret, "OTHER", 99), Err(Refused::Used));
        for bad in ["", "gcj_", "gcj_h1", "h1.x", "gcj_a b.x"] {
            assert_eq!(host_of(bad), None, "{bad}");
        }
    }
}
