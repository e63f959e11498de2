//! The part of an authority that signs hosts' credentials and nothing else: for gateways that let hosts join with a token. Whoever
//! takes it can be any host, and nobody else.

use std::fmt;
use std::path::Path;
use std::time::SystemTime;

use groupcast_policy::ids::HostId;
use nkeys::{KeyPair, KeyPairType};
use serde::{Deserialize, Serialize};

use super::{Authority, Error, claims, seconds, write_secret};
use crate::accounts::{Account, Role};

pub struct HostSigner {
    signer: KeyPair,
    account: KeyPair,
}

/// Prints no secret.
impl fmt::Debug for HostSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostSigner({})", self.signer.public_key())
    }
}

/// As [`HostSigner`] is stored.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    format_version: String,
    host_signer: String,
    /// Public.
    account: String,
}

const FORMAT_VERSION: &str = "1";

impl Authority {
    pub fn host_signer(&self) -> Result<HostSigner, Error> {
        let failed = |error: nkeys::error::Error| Error::Key { what: "the signer of hosts", reason: error.to_string() };
        let seed = self.signer(Role::Host).seed().map_err(failed)?;
        let account = KeyPair::from_public_key(&self.account(Account::Hosts).public_key()).map_err(failed)?;
        Ok(HostSigner { signer: KeyPair::from_seed(&seed).map_err(failed)?, account })
    }
}

impl HostSigner {
    /// A host's token for a key that it has made itself; the seed never leaves the host.
    pub fn sign(&self, host: &HostId, public_key: &str, now: SystemTime) -> Result<String, Error> {
        let wrong = |reason: String| Error::Key { what: "the host", reason };
        let user = KeyPair::from_public_key(public_key).map_err(|error| wrong(error.to_string()))?;
        if user.key_pair_type() != KeyPairType::User {
            return Err(wrong("it is no user's key".to_owned()));
        }
        claims::user(&self.signer, &self.account, &user, host.as_str(), seconds(now)?, None)
    }

    /// Writes it so that only its owner can read it, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let failed = |error: nkeys::error::Error| Error::Key { what: "the signer of hosts", reason: error.to_string() };
        let stored = Stored {
            format_version: FORMAT_VERSION.to_owned(),
            host_signer: self.signer.seed().map_err(failed)?,
            account: self.account.public_key(),
        };
        let text = serde_json::to_string_pretty(&stored)
            .map_err(|error| Error::Unreadable { path: path.to_owned(), reason: error.to_string() })?;
        write_secret(path, &text)
    }

    pub fn load(path: &Path) -> Result<Self, Error> {
        let unreadable = |reason: String| Error::Unreadable { path: path.to_owned(), reason };
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::File { what: "reading", path: path.to_owned(), source })?;
        let stored: Stored = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?;
        if stored.format_version != FORMAT_VERSION {
            return Err(unreadable(format!(
                "format_version is {:?}, this version reads {FORMAT_VERSION:?}",
                stored.format_version
            )));
        }
        let signer = KeyPair::from_seed(&stored.host_signer).map_err(|error| unreadable(error.to_string()))?;
        let account = KeyPair::from_public_key(&stored.account).map_err(|error| unreadable(error.to_string()))?;
        if signer.key_pair_type() != KeyPairType::Account || account.key_pair_type() != KeyPairType::Account {
            return Err(unreadable("a key of another kind".to_owned()));
        }
        Ok(Self { signer, account })
    }
}

/// A key that a host makes for itself, to have it signed.
pub struct OwnKey(KeyPair);

impl OwnKey {
    #[expect(clippy::new_without_default, reason = "new keys are made on purpose, never by default")]
    pub fn new() -> Self {
        Self(KeyPair::new_user())
    }

    /// The key whose seed this is.
    pub fn from_seed(seed: &str) -> Result<Self, Error> {
        KeyPair::from_seed(seed).map(Self).map_err(|error| Error::Key { what: "the host", reason: error.to_string() })
    }

    pub fn seed(&self) -> Result<String, Error> {
        self.0.seed().map_err(|error| Error::Key { what: "the host", reason: error.to_string() })
    }

    pub fn public_key(&self) -> String {
        self.0.public_key()
    }

    /// Writes the credentials file that this key and a signed token make.
    pub fn save(&self, host: &HostId, token: &str, path: &Path) -> Result<(), Error> {
        write_secret(path, &super::file_text(Role::Host, host, token, &self.seed()?))
    }

    /// Writes the seed alone, so that joining can be tried again with the same key.
    pub fn save_seed(&self, path: &Path) -> Result<(), Error> {
        write_secret(path, &self.seed()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signer_reads_back_and_signs_users_only() {
        let path = std::env::temp_dir().join(format!("groupcast-signer-{}", std::process::id()));
        let authority = Authority::new();
        authority.host_signer().unwrap().save(&path).unwrap();
        let signer = HostSigner::load(&path).unwrap();
        let (host, now) = ("h1".parse().unwrap(), SystemTime::now());
        let key = OwnKey::new();
        assert_eq!(OwnKey::from_seed(&key.seed().unwrap()).unwrap().public_key(), key.public_key());
        assert_eq!(signer.sign(&host, &key.public_key(), now).unwrap().split('.').count(), 3);
        for wrong in ["", "UAAA", &KeyPair::new_account().public_key(), &key.seed().unwrap()] {
            assert!(signer.sign(&host, wrong, now).is_err(), "{wrong}");
        }
        std::fs::write(&path, "{}").unwrap();
        assert!(HostSigner::load(&path).is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
