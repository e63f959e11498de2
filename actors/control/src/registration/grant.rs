//! What an operator has granted to a host: where its addresses may lie, the token with which it joins, and which credentials a gateway
//! has signed for it. A document of CATALOG, so that it is audited, exported and written by compare-and-swap like any other.
//!
//! A credential is given away only after it is written down here, so that none is forgotten. A host that is removed keeps its
//! document, without any grant, until everything that was signed for it is revoked or has expired: so its removal can be resumed.

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
/// Keys of one host that may work at the same time.
pub const CREDENTIALS_MAX: usize = 16;
/// Keys of one host that are remembered, revoked ones that have not expired among them.
pub const REMEMBERED_MAX: usize = 4 * CREDENTIALS_MAX;
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
    /// Keys for which a gateway has signed, by when they were first seen; expired ones are forgotten.
    pub credentials: Vec<Issued>,
    /// An operator has removed the host: it may nothing any more, and what is listed here is still to be revoked.
    pub removing: bool,
}

/// A key of a host for which a gateway has signed a credential.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Issued {
    pub key: String,
    /// When the first credential of this key was issued, in seconds since 1970: renewing makes no key a newer one.
    pub made_at: u64,
    /// When the last one expires, in seconds since 1970.
    pub expires_at: u64,
    /// Kept until it expires, so that it is not renewed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub revoked: bool,
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
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    credentials: Vec<Issued>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    removing: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("host {0} is not known, or was removed: add it with `groupcast host add`, and join with a new token")]
    Removed(HostId),
    #[error("this credential was revoked: join with a new token from `groupcast host token`")]
    Revoked,
    #[error("host {0} has {CREDENTIALS_MAX} keys that work already: void the old ones with `groupcast host retire`")]
    TooMany(HostId),
    #[error("this token is not known: make a new one with `groupcast host token`")]
    Unknown,
    #[error("this token has expired: make a new one with `groupcast host token`")]
    Expired,
    #[error("this token was used by another key: make a new one, and find out who used it")]
    Used,
}

impl Grant {
    pub fn new(host: HostId, networks: Vec<Prefix>) -> Self {
        Self { host, networks, join: None, credentials: Vec::new(), removing: false }
    }

    pub fn name(host: &HostId) -> Result<Name, InvalidId> {
        Name::new(CatalogKind::Host, host.as_str())
    }

    pub fn document(&self) -> Result<Document, InvalidId> {
        let networks = self.networks.iter().map(ToString::to_string).collect();
        let written = Written {
            id: self.host.to_string(),
            networks,
            join: self.join.clone(),
            credentials: self.credentials.clone(),
            removing: self.removing,
        };
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
        Ok(Self {
            host: written.id.parse().map_err(|error: InvalidId| error.to_string())?,
            networks,
            join: written.join,
            credentials: written.credentials,
            removing: written.removing,
        })
    }

    /// Whether the prefix lies where the host's addresses may.
    pub fn covers(&self, address: Prefix) -> bool {
        self.networks.iter().any(|wide| covers(*wide, address))
    }

    /// The credentials that work.
    pub fn live(&self, now_seconds: u64) -> impl Iterator<Item = &Issued> {
        self.credentials.iter().filter(move |issued| !issued.revoked && issued.expires_at > now_seconds)
    }

    /// Whether the host was removed and nothing of it is left to revoke.
    pub fn is_over(&self, now_seconds: u64) -> bool {
        self.removing && self.live(now_seconds).next().is_none()
    }

    /// The grant after this key has joined with the token, and when what is signed for it expires. Equal to what it was when the key
    /// had joined a moment before: whose answer was lost asks again.
    pub fn joined(&self, token: &str, key: &str, now_seconds: u64, life_seconds: u64) -> Result<(Self, u64), Refused> {
        if self.removing {
            return Err(Refused::Removed(self.host.clone()));
        }
        let join = self.join.as_ref().filter(|join| join.hash == hash(token)).ok_or(Refused::Unknown)?;
        if now_seconds >= join.expires_at {
            return Err(Refused::Expired);
        }
        if join.key.as_ref().is_some_and(|bound| bound != key) {
            return Err(Refused::Used);
        }
        let bound = Self { join: Some(Join { key: Some(key.to_owned()), ..join.clone() }), ..self.clone() };
        bound.renewed(key, (now_seconds, 0), now_seconds, life_seconds)
    }

    /// The grant after a credential of this key is signed anew, and when that expires. `held` is when the one was issued that the host
    /// has, and when it expires: one that an authority has made is not known here before. While half of a life is left nothing
    /// changes: a host that asks at full speed writes nothing.
    pub fn renewed(&self, key: &str, held: (u64, u64), now_seconds: u64, life_seconds: u64) -> Result<(Self, u64), Refused> {
        if self.removing {
            return Err(Refused::Removed(self.host.clone()));
        }
        let mut after = self.clone();
        after.credentials.retain(|issued| issued.expires_at > now_seconds);
        let (fresh_at, is_full) = (now_seconds.saturating_add(life_seconds), after.live(now_seconds).count() >= CREDENTIALS_MAX);
        let expires_at = match after.credentials.iter_mut().find(|issued| issued.key == key) {
            Some(issued) if issued.revoked => return Err(Refused::Revoked),
            Some(issued) if issued.expires_at > now_seconds.saturating_add(life_seconds / 2) => issued.expires_at,
            Some(issued) => {
                issued.expires_at = fresh_at;
                fresh_at
            }
            None if is_full => return Err(Refused::TooMany(self.host.clone())),
            None => {
                let (made_at, expires_at) = (held.0, held.1.max(fresh_at));
                after.credentials.push(Issued { key: key.to_owned(), made_at, expires_at, revoked: false });
                after.credentials.sort_by_key(|issued| issued.made_at);
                expires_at
            }
        };
        Ok((after, expires_at))
    }

    /// What is left of the grant of a host that is removed.
    pub fn removed(&self, now_seconds: u64) -> Self {
        let mut credentials = self.credentials.clone();
        credentials.retain(|issued| issued.expires_at > now_seconds);
        Self { credentials, removing: true, ..Self::new(self.host.clone(), Vec::new()) }
    }

    /// The grant after these keys were revoked on the bus; also those for which no gateway has signed, so that none ever will.
    pub fn revoked(&self, keys: &[Issued], now_seconds: u64) -> Result<Self, Refused> {
        let mut after = self.clone();
        after.credentials.retain(|issued| issued.expires_at > now_seconds);
        for key in keys.iter().filter(|key| key.expires_at > now_seconds) {
            let is_full = after.credentials.len() >= REMEMBERED_MAX;
            match after.credentials.iter_mut().find(|issued| issued.key == key.key) {
                Some(issued) => issued.revoked = true,
                None if is_full => return Err(Refused::TooMany(self.host.clone())),
                None => after.credentials.push(Issued { revoked: true, ..key.clone() }),
            }
        }
        after.credentials.sort_by_key(|issued| issued.made_at);
        Ok(after)
    }

    /// With what an older version of the same document knew of credentials: an import must not forget any.
    pub fn with_credentials_of(mut self, other: &Self) -> Self {
        for issued in &other.credentials {
            match self.credentials.iter_mut().find(|own| own.key == issued.key) {
                Some(own) => {
                    own.expires_at = own.expires_at.max(issued.expires_at);
                    own.revoked |= issued.revoked;
                }
                None => self.credentials.push(issued.clone()),
            }
        }
        self.credentials.sort_by_key(|issued| issued.made_at);
        self
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
        let join = |grant: &Grant, token: &str, key: &str, now| grant.joined(token, key, now, 30).map(|(after, _)| after);
        assert_eq!(join(&granted, "gcj_h1.wrong", "KEY", 0), Err(Refused::Unknown));
        assert_eq!(join(&grant(), &secret, "KEY", 0), Err(Refused::Unknown));
        assert_eq!(join(&granted, &secret, "KEY", 100), Err(Refused::Expired));
        let joined = join(&granted, &secret, "KEY", 90).unwrap();
        assert_eq!(join(&joined, &secret, "KEY", 99), Ok(joined.clone()), "whose answer was lost asks again");
        assert_eq!(
            join(&joined, &secret, "KEY", 100),
            Err(Refused::Expired),
            "a bound key joined for ever with a token that had expired"
        );
        assert_eq!(join(&joined, &secret, "OTHER", 99), Err(Refused::Used));
        assert_eq!(join(&joined.removed(99), &secret, "KEY", 99), Err(Refused::Removed("h1".parse().unwrap())));
        for bad in ["", "gcj_", "gcj_h1", "h1.x", "gcj_a b.x"] {
            assert_eq!(host_of(bad), None, "{bad}");
        }
    }

    fn keys(grant: &Grant, now: u64) -> Vec<&str> {
        grant.live(now).map(|issued| issued.key.as_str()).collect()
    }

    #[test]
    fn no_key_is_forgotten_before_it_expires() {
        let host: HostId = "h1".parse().unwrap();
        let (one, join) = token(&host, [1; SECRET_BYTES], 1_000);
        let (first, expires_at) = Grant { join: Some(join), ..grant() }.joined(&one, "A", 10, 100).unwrap();
        assert_eq!(expires_at, 110);
        let (two, join) = token(&host, [2; SECRET_BYTES], 1_000);
        let (both, _) = Grant { join: Some(join), ..first }.joined(&two, "B", 20, 100).unwrap();
        assert_eq!(keys(&both, 20), ["A", "B"], "a second join forgot the first key");
        assert_eq!(Grant::read(&both.document().unwrap()), Ok(both.clone()));
        // Renewed: the same key, as old as before, for longer; and nothing is written before half of its life.
        assert_eq!(both.renewed("A", (999, 0), 59, 100), Ok((both.clone(), 110)));
        let (renewed, expires_at) = both.renewed("A", (999, 0), 60, 100).unwrap();
        assert_eq!((expires_at, renewed.credentials[0].made_at, keys(&renewed, 125)), (160, 10, vec!["A"]));
        let (later, expires_at) = renewed.renewed("C", (5, 400), 130, 100).unwrap();
        assert_eq!(expires_at, 400, "what an authority has made for longer is known for as long as it works");
        assert_eq!(later.credentials.iter().map(|issued| issued.key.as_str()).collect::<Vec<_>>(), ["C", "A"], "B has expired");
    }

    #[test]
    fn a_removed_host_is_over_when_all_its_keys_are_void() {
        let (both, _) = grant().renewed("A", (1, 0), 1, 100).unwrap();
        let (both, _) = both.renewed("B", (2, 0), 2, 100).unwrap();
        let removed = both.removed(50);
        assert!(removed.removing && removed.networks.is_empty() && !removed.is_over(50) && removed.is_over(102));
        assert_eq!(removed.removed(50), removed, "it is resumed");
        assert!(matches!(removed.renewed("A", (1, 0), 60, 100), Err(Refused::Removed(_))));
        let half = removed.revoked(&removed.credentials[..1], 50).unwrap();
        assert_eq!((half.is_over(50), keys(&half, 50)), (false, vec!["B"]));
        assert!(half.revoked(&half.credentials[1..], 50).unwrap().is_over(50));
        assert!(!both.revoked(&both.credentials, 50).unwrap().is_over(50), "its grant stays");
    }

    #[test]
    fn what_was_revoked_is_not_renewed_and_the_number_of_keys_is_bounded() {
        let minted = Issued { key: "M".into(), made_at: 1, expires_at: 500, revoked: false };
        let grant = grant().revoked(std::slice::from_ref(&minted), 10).unwrap();
        assert_eq!((grant.renewed("M", (1, 500), 20, 100), keys(&grant, 20)), (Err(Refused::Revoked), vec![]));
        assert_eq!(grant.revoked(&[Issued { expires_at: 10, ..minted }], 10), Ok(grant.clone()), "expired: nothing to remember");
        let full =
            (0..CREDENTIALS_MAX).try_fold(grant, |grant, n| grant.renewed(&format!("K{n}"), (20, 0), 20, 100).map(|(g, _)| g));
        let full = full.unwrap();
        assert_eq!(full.live(20).count(), CREDENTIALS_MAX);
        assert!(matches!(full.renewed("ONE-MORE", (20, 0), 20, 100), Err(Refused::TooMany(_))));
        assert!(full.renewed("K0", (20, 0), 90, 100).is_ok());
    }

    #[test]
    fn an_import_forgets_no_key_and_revives_none() {
        let (now, _) = grant().renewed("A", (1, 0), 1, 100).unwrap();
        let (now, _) = now.renewed("B", (2, 0), 2, 100).unwrap();
        let now = now.revoked(&now.credentials[..1], 2).unwrap();
        let (old, _) = grant().renewed("A", (1, 0), 1, 50).unwrap();
        let merged = old.with_credentials_of(&now);
        assert_eq!(merged.credentials, now.credentials);
    }
}
