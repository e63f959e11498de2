//! The part of an authority that signs hosts' credentials and nothing else: for gateways that let hosts join with a token. Whoever
//! takes it can be any host, and nobody else.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use data_encoding::BASE64URL_NOPAD;
use groupcast_policy::ids::HostId;
use nkeys::{KeyPair, KeyPairType};
use serde::{Deserialize, Serialize};

use super::{Authority, Error, HOST_LIFE, claims, expiry, seconds, write_secret};
use crate::accounts::{Account, Role};

pub struct HostSigner {
    signer: KeyPair,
    account: KeyPair,
    life: Duration,
}

/// A host's token for the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    pub token: String,
    /// Seconds since 1970.
    pub expires_at: u64,
}

/// What a token says that was signed here and has not expired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presented {
    pub host: HostId,
    pub public_key: String,
    /// Seconds since 1970.
    pub issued_at: u64,
    pub expires_at: u64,
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
        Ok(HostSigner { signer: KeyPair::from_seed(&seed).map_err(failed)?, account, life: HOST_LIFE })
    }
}

impl HostSigner {
    /// One whose tokens live this long.
    pub fn living(self, life: Duration) -> Result<Self, Error> {
        expiry(0, life)?;
        Ok(Self { life, ..self })
    }

    pub fn life(&self) -> Duration {
        self.life
    }

    /// When a token expires that is signed now.
    pub fn expiry(&self, now: SystemTime) -> Result<u64, Error> {
        expiry(seconds(now)?, self.life)
    }

    /// A host's token for a key that it has made itself; the seed never leaves the host.
    pub fn sign(&self, host: &HostId, public_key: &str, now: SystemTime, expires_at: u64) -> Result<Signed, Error> {
        let user = user_key(public_key)?;
        let token = claims::user(Role::Host, &self.signer, &self.account, &user, host.as_str(), seconds(now)?, Some(expires_at))?;
        Ok(Signed { token, expires_at })
    }

    /// What a host's token says, if it was signed with this key or by the authority that has it, and has not expired; and if
    /// `proof`, made with [`OwnKey::prove`], shows that whoever presents it holds its key.
    pub fn presented(&self, token: &str, proof: &str, now: SystemTime) -> Result<Presented, Error> {
        let wrong = |reason: &str| Error::Key { what: "the host", reason: reason.to_owned() };
        let claims = claims::verified(&self.signer, token).map_err(wrong)?;
        let number = |name: &str| claims[name].as_u64();
        let (issued_at, expires_at) =
            number("iat").zip(number("exp")).ok_or_else(|| wrong("the credential does not say how long it lives"))?;
        if claims["nats"]["issuer_account"] != self.account.public_key().as_str() {
            return Err(wrong("the credential is for another account"));
        }
        if expires_at <= seconds(now)? {
            return Err(wrong("the credential has expired: join again with a token from `groupcast host token`"));
        }
        let public_key = claims["sub"].as_str().unwrap_or_default().to_owned();
        let host = HostId::new(claims["name"].as_str().unwrap_or_default()).map_err(|error| wrong(&error.to_string()))?;
        proven(&public_key, token, proof)?;
        Ok(Presented { host, public_key, issued_at, expires_at })
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
        Ok(Self { signer, account, life: HOST_LIFE })
    }
}

/// A user's public key.
pub fn user_key(public_key: &str) -> Result<KeyPair, Error> {
    let wrong = |reason: String| Error::Key { what: "the host", reason };
    let user = KeyPair::from_public_key(public_key).map_err(|error| wrong(error.to_string()))?;
    if user.key_pair_type() == KeyPairType::User { Ok(user) } else { Err(wrong("it is no user's key".to_owned())) }
}

/// When a token of one's own was issued and when it expires, in seconds since 1970; nothing for one that never does.
pub fn life_of(token: &str) -> Option<(u64, u64)> {
    let claims = claims::said(token)?;
    claims["iat"].as_u64().zip(claims["exp"].as_u64())
}

/// What a host signs to show that it presents this token, of joining or of the bus, with a key that it holds. A server's nonce cannot be
/// mistaken for it, nor one token for another.
fn proof_of(token: &str) -> String {
    format!("groupcast renew {token}")
}

/// Whether the holder of this key has signed that it presents this token.
pub fn proven(public_key: &str, token: &str, proof: &str) -> Result<(), Error> {
    let wrong = |reason: &str| Error::Key { what: "the host", reason: reason.to_owned() };
    let signature = BASE64URL_NOPAD.decode(proof.as_bytes()).map_err(|_| wrong("the proof is not base64"))?;
    let verified = user_key(public_key)?.verify(proof_of(token).as_bytes(), &signature);
    verified.map_err(|_| wrong("the proof was made with another key"))
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

    /// The key and the token of a credentials file.
    pub fn of_file(text: &str) -> Result<(Self, String), Error> {
        let wrong = |reason: &str| Error::Key { what: "the host", reason: reason.to_owned() };
        let token = super::block(text, "USER JWT").ok_or_else(|| wrong("the credentials file holds no token"))?;
        let seed = super::block(text, "USER NKEY SEED").ok_or_else(|| wrong("the credentials file holds no seed"))?;
        Ok((Self::from_seed(&seed)?, token))
    }

    /// Shows that a token is this key's own.
    pub fn prove(&self, token: &str) -> Result<String, Error> {
        let signature = self.0.sign(proof_of(token).as_bytes());
        let signature = signature.map_err(|error| Error::Key { what: "the host", reason: error.to_string() })?;
        Ok(BASE64URL_NOPAD.encode(&signature))
    }

    pub fn seed(&self) -> Result<String, Error> {
        self.0.seed().map_err(|error| Error::Key { what: "the host", reason: error.to_string() })
    }

    pub fn public_key(&self) -> String {
        self.0.public_key()
    }

    /// The credentials file that this key and a signed token make.
    pub fn file_text(&self, host: &HostId, token: &str) -> Result<String, Error> {
        Ok(super::file_text(Role::Host, host, token, &self.seed()?))
    }

    /// Writes the credentials file that this key and a signed token make.
    pub fn save(&self, host: &HostId, token: &str, path: &Path) -> Result<(), Error> {
        write_secret(path, &self.file_text(host, token)?)
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
        let expires_at = signer.expiry(now).unwrap();
        assert_eq!(signer.sign(&host, &key.public_key(), now, expires_at).unwrap().token.split('.').count(), 3);
        for wrong in ["", "UAAA", &KeyPair::new_account().public_key(), &key.seed().unwrap()] {
            assert!(signer.sign(&host, wrong, now, expires_at).is_err(), "{wrong}");
        }
        std::fs::write(&path, "{}").unwrap();
        assert!(HostSigner::load(&path).is_err());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_token_is_presented_by_its_own_key_until_it_expires() {
        let mut authority = Authority::new();
        let (host, now): (HostId, _) = ("h1".parse().unwrap(), SystemTime::UNIX_EPOCH + Duration::from_secs(1_000));
        let signer = authority.host_signer().unwrap().living(Duration::from_secs(60)).unwrap();
        let (key, other) = (OwnKey::new(), OwnKey::new());
        let signed = signer.sign(&host, &key.public_key(), now, signer.expiry(now).unwrap()).unwrap();
        let (token, proof) = (signed.token.clone(), key.prove(&signed.token).unwrap());
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let presented = signer.presented(&token, &proof, at(1_059)).unwrap();
        let whole = Presented { host: host.clone(), public_key: key.public_key(), issued_at: 1_000, expires_at: 1_060 };
        assert_eq!((presented, signed.expires_at), (whole, 1_060));
        assert_eq!((life_of(&token), life_of("a.b.c"), life_of("")), (Some((1_000, 1_060)), None, None));
        let refused = |token: &str, proof: &str, now| signer.presented(token, proof, now).unwrap_err().to_string();
        assert!(refused(&token, &proof, at(1_060)).contains("expired"));
        assert!(refused(&token, &other.prove(&token).unwrap(), now).contains("another key"));
        assert!(refused(&token, "", now).contains("another key"));
        // What an authority mints itself can be renewed; a token of another role or authority, or a changed one, cannot.
        let minted = authority.mint(Role::Host, &host, None, now).unwrap();
        let (own, token) = OwnKey::of_file(&minted.file_text()).unwrap();
        assert!(signer.presented(&token, &own.prove(&token).unwrap(), now).is_ok());
        let viewer = authority.mint(Role::Viewer, &host, Some(Duration::from_secs(60)), now).unwrap();
        let stranger = Authority::new().mint(Role::Host, &host, None, now).unwrap();
        for theirs in [viewer, stranger] {
            let (own, token) = OwnKey::of_file(&theirs.file_text()).unwrap();
            assert!(refused(&token, &own.prove(&token).unwrap(), now).contains("signed by another"));
        }
        let (head, signature) = token.rsplit_once('.').unwrap();
        for changed in [format!("{head}x.{signature}"), head.to_owned(), String::new(), "a.b.c".to_owned(), "..".to_owned()] {
            assert!(signer.presented(&changed, &own.prove(&changed).unwrap(), now).is_err(), "{changed}");
        }
    }
}
