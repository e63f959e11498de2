//! Who may use the bus: an operator's keys, the credentials signed with them, and their end.
//!
//! Every role has a signing key of its own whose scope is the role's row of [`crate::accounts`], with the holder's name as
//! template. So a credential cannot be given more than its role, adding a host changes nothing on any server, and a stolen signing
//! key of one role mints nothing of another. Revoking changes the account's token, which [`Authority::publish`] brings to running servers.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use groupcast_policy::ids::HostId;
use nkeys::{KeyPair, KeyPairType};
use serde::{Deserialize, Serialize};

use crate::accounts::{Account, Role};

pub(crate) mod claims;
mod fixed;
mod locked;
mod publish;
mod signer;

pub use fixed::{FixedUser, edge_config, fixed_config};
pub use locked::{LOCKED_WITHIN, Locked};
pub use signer::{HostSigner, OwnKey, Presented, Signed, life_of, proven, user_key};

/// How long a host's credential lives unless said otherwise. Its agent renews it when two thirds have passed.
pub const HOST_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// The longest life of a host's credential.
pub const HOST_LIFE_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// A revoked key never works again: what is signed for it later, for instance by a gateway that has not heard of it, is void too.
const FOR_EVER: u64 = 253_402_300_799;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("key for {what} cannot be used: {reason}")]
    Key { what: &'static str, reason: String },
    #[error("{what} {path}: {source}", path = path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not a credential authority: {reason}; restore it from a copy", path = path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error("another command has been writing {path} for {} s: wait for it, or end it, and try again", within.as_secs(), path = path.display())]
    Busy { path: PathBuf, within: Duration },
    #[error("the system clock stands before 1970: set it")]
    Clock,
    #[error("the bus did not take the new version of account {account}: {reason}")]
    NotTaken { account: &'static str, reason: String },
    #[error("a host's credential lives 1 second to {} days, not {} seconds", HOST_LIFE_MAX.as_secs() / 86_400, .0.as_secs())]
    Life(Duration),
    #[error("the account token of {account} has {len} bytes, the server takes {max} in one message: remove expired revocations")]
    TooManyRevocations { account: &'static str, len: usize, max: usize },
}

/// What a client presents: a signed token and the key that proves that it is its own.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    pub role: Role,
    pub name: HostId,
    pub public_key: String,
    /// Seconds since 1970.
    pub issued_at: u64,
    token: String,
    seed: String,
}

impl Credential {
    /// The contents of a credentials file, as every NATS client reads it.
    pub fn file_text(&self) -> String {
        file_text(self.role, &self.name, &self.token, &self.seed)
    }

    /// Writes the credentials file so that only its owner can read it, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        write_secret(path, &self.file_text())
    }
}

fn file_text(role: Role, name: &HostId, token: &str, seed: &str) -> String {
    format!(
        "-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n\
         ************************* IMPORTANT *************************\n\
         Whoever holds this seed is {} {name} on the bus.\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n\n\
         *************************************************************\n",
        role.as_str(),
    )
}

/// What stands in a block of a credentials file: the line after the one that begins it.
pub(crate) fn block(text: &str, name: &str) -> Option<String> {
    let mut lines = text.lines().skip_while(|line| !(line.contains("BEGIN") && line.contains(name)));
    lines.nth(1).map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Prints no secret.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({} {} {})", self.role.as_str(), self.name, self.public_key)
    }
}

/// A credential that was minted and is neither revoked nor expired. Kept so that a host can be revoked by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issued {
    pub role: String,
    pub name: String,
    pub public_key: String,
    /// Seconds since 1970.
    pub issued_at: u64,
    /// Seconds since 1970; nothing when it does not expire.
    pub expires_at: Option<u64>,
}

/// All keys of an installation. Whoever holds it owns the bus: keep it offline or on the gateway's disk only.
pub struct Authority {
    operator: KeyPair,
    system: KeyPair,
    accounts: BTreeMap<Account, KeyPair>,
    signers: BTreeMap<Role, KeyPair>,
    issued: Vec<Issued>,
    /// Public key to the time (seconds since 1970) up to which what was issued for it is void.
    revoked: BTreeMap<String, u64>,
    /// When the accounts were last changed (seconds since 1970), strictly growing: a server keeps the account token with the
    /// later issue time and, of two from the same second, takes the one in its configuration, which may be the older.
    changed_at: u64,
    /// Up to which change the servers were told.
    published_at: u64,
}

/// Prints no secret.
impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({}, {} issued, {} revoked)", self.operator.public_key(), self.issued.len(), self.revoked.len())
    }
}

/// As [`Authority`] is stored.
#[derive(Serialize, Deserialize)]
struct Stored {
    format_version: String,
    operator: String,
    system: String,
    accounts: BTreeMap<String, String>,
    signers: BTreeMap<String, String>,
    issued: Vec<Issued>,
    revoked: BTreeMap<String, u64>,
    changed_at: u64,
    #[serde(default)]
    published_at: u64,
}

const FORMAT_VERSION: &str = "1";

impl Authority {
    /// Makes new keys for everything.
    #[expect(clippy::new_without_default, reason = "new keys are made on purpose, never by default")]
    pub fn new() -> Self {
        Self {
            operator: KeyPair::new_operator(),
            system: KeyPair::new_account(),
            accounts: Account::ALL.into_iter().map(|account| (account, KeyPair::new_account())).collect(),
            signers: Role::ALL.into_iter().map(|role| (role, KeyPair::new_account())).collect(),
            issued: Vec::new(),
            revoked: BTreeMap::new(),
            changed_at: 1,
            published_at: 1,
        }
    }

    /// The accounts differ from before; what was published must be superseded on every server.
    fn changed(&mut self, now: u64) {
        self.changed_at = now.max(self.changed_at + 1);
    }

    pub fn issued(&self) -> &[Issued] {
        &self.issued
    }

    /// Whether something was changed that no server was told yet.
    pub fn is_unpublished(&self) -> bool {
        self.published_at < self.changed_at
    }

    /// The servers were told everything.
    pub fn published(&mut self) {
        self.published_at = self.changed_at;
    }

    pub fn is_revoked(&self, public_key: &str) -> bool {
        self.revoked.contains_key(public_key)
    }

    fn account(&self, account: Account) -> &KeyPair {
        // Every constructor fills the map for all accounts.
        &self.accounts[&account]
    }

    fn signer(&self, role: Role) -> &KeyPair {
        &self.signers[&role]
    }

    /// A new credential; a host's always expires. Earlier ones of the same name go on working until they are revoked: that is how one is rotated (mint,
    /// hand over, [`Authority::revoke_others`], publish).
    pub fn mint(&mut self, role: Role, name: &HostId, lifetime: Option<Duration>, now: SystemTime) -> Result<Credential, Error> {
        let issued_at = seconds(now)?;
        let expires_at = match role {
            Role::Host => Some(expiry(issued_at, lifetime.unwrap_or(HOST_LIFE))?),
            _ => lifetime.map(|lifetime| issued_at.saturating_add(lifetime.as_secs().max(1))),
        };
        let user = KeyPair::new_user();
        let token =
            claims::user(role, self.signer(role), self.account(role.account()), &user, name.as_str(), issued_at, expires_at)?;
        let public_key = user.public_key();
        self.issued.push(Issued {
            role: role.as_str().to_owned(),
            name: name.to_string(),
            public_key: public_key.clone(),
            issued_at,
            expires_at,
        });
        let seed = user.seed().map_err(|error| Error::Key { what: "a new user", reason: error.to_string() })?;
        Ok(Credential { role, name: name.clone(), public_key, issued_at, token, seed })
    }

    /// A credential of the system account, with which account tokens are brought to servers. Short-lived: it is made when needed.
    pub fn system_credential(&self, lifetime: Duration, now: SystemTime) -> Result<Credential, Error> {
        let issued_at = seconds(now)?;
        let expires_at = Some(issued_at.saturating_add(lifetime.as_secs().max(1)));
        let user = KeyPair::new_user();
        let name = HostId::new("system").map_err(|error| Error::Key { what: "the system user", reason: error.to_string() })?;
        let token = claims::system_user(&self.system, &user, name.as_str(), issued_at, expires_at)?;
        let seed = user.seed().map_err(|error| Error::Key { what: "the system user", reason: error.to_string() })?;
        Ok(Credential { role: Role::Controller, name, public_key: user.public_key(), issued_at, token, seed })
    }

    /// Voids every credential of this name; returns how many. Effective on servers after [`Authority::publish`].
    pub fn revoke(&mut self, role: Role, name: &HostId, now: SystemTime) -> Result<usize, Error> {
        self.revoke_where(now, |issued| issued.role == role.as_str() && issued.name == name.as_str())
    }

    /// Voids every credential of the same role and name but this one: the last step of rotating.
    pub fn revoke_others(&mut self, keep: &Credential, now: SystemTime) -> Result<usize, Error> {
        let (role, name) = (keep.role.as_str(), keep.name.as_str());
        self.revoke_where(now, |issued| issued.role == role && issued.name == name && issued.public_key != keep.public_key)
    }

    /// Voids one credential by its public key; false when none of that key is valid.
    pub fn revoke_key(&mut self, public_key: &str, now: SystemTime) -> Result<bool, Error> {
        Ok(self.revoke_where(now, |issued| issued.public_key == public_key)? > 0)
    }

    /// Voids whatever was signed for a key that this authority did not issue itself: that of a host that joined through a gateway.
    pub fn revoke_joined(&mut self, public_key: &str, now: SystemTime) -> Result<(), Error> {
        self.changed(seconds(now)?);
        self.revoked.insert(public_key.to_owned(), FOR_EVER);
        Ok(())
    }

    fn revoke_where(&mut self, now: SystemTime, which: impl Fn(&Issued) -> bool) -> Result<usize, Error> {
        let now = seconds(now)?;
        let (gone, left) = std::mem::take(&mut self.issued).into_iter().partition::<Vec<_>, _>(which);
        self.issued = left;
        if !gone.is_empty() {
            self.changed(now);
        }
        for issued in &gone {
            self.revoked.insert(issued.public_key.clone(), FOR_EVER);
        }
        Ok(gone.len())
    }

    /// Forgets credentials that have expired by themselves.
    pub fn forget_expired(&mut self, now: SystemTime) -> Result<(), Error> {
        let now = seconds(now)?;
        self.issued.retain(|issued| issued.expires_at.is_none_or(|at| at > now));
        Ok(())
    }

    /// Replaces a role's signing key: every credential of the role is void at the next publish. For a key that leaked.
    pub fn replace_signer(&mut self, role: Role, now: SystemTime) -> Result<(), Error> {
        self.changed(seconds(now)?);
        self.signers.insert(role, KeyPair::new_account());
        self.issued.retain(|issued| issued.role != role.as_str());
        Ok(())
    }

    /// Writes all keys so that only their owner can read them, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let seed = |key: &KeyPair| key.seed().map_err(|error| Error::Key { what: "the authority", reason: error.to_string() });
        let mut stored = Stored {
            format_version: FORMAT_VERSION.to_owned(),
            operator: seed(&self.operator)?,
            system: seed(&self.system)?,
            accounts: BTreeMap::new(),
            signers: BTreeMap::new(),
            issued: self.issued.clone(),
            revoked: self.revoked.clone(),
            changed_at: self.changed_at,
            published_at: self.published_at,
        };
        for (account, key) in &self.accounts {
            stored.accounts.insert(account.name().to_owned(), seed(key)?);
        }
        for (role, key) in &self.signers {
            stored.signers.insert(role.as_str().to_owned(), seed(key)?);
        }
        let text = serde_json::to_string_pretty(&stored)
            .map_err(|error| Error::Unreadable { path: path.to_owned(), reason: error.to_string() })?;
        write_secret(path, &text)
    }

    pub fn load(path: &Path) -> Result<Self, Error> {
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::File { what: "reading", path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|reason| Error::Unreadable { path: path.to_owned(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut stored: Stored = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if stored.format_version != FORMAT_VERSION {
            return Err(format!("format_version is {:?}, this version reads {FORMAT_VERSION:?}", stored.format_version));
        }
        let key = |what: &str, seed: &str, kind: KeyPairType| {
            let pair = KeyPair::from_seed(seed).map_err(|error| format!("{what}: {error}"))?;
            if pair.key_pair_type() == kind { Ok(pair) } else { Err(format!("{what}: key of another kind")) }
        };
        let mut accounts = BTreeMap::new();
        for account in Account::ALL {
            let seed = stored.accounts.remove(account.name()).ok_or_else(|| format!("account {} is missing", account.name()))?;
            accounts.insert(account, key(account.name(), &seed, KeyPairType::Account)?);
        }
        let mut signers = BTreeMap::new();
        for role in Role::ALL {
            let seed = stored.signers.remove(role.as_str()).ok_or_else(|| format!("signer {} is missing", role.as_str()))?;
            signers.insert(role, key(role.as_str(), &seed, KeyPairType::Account)?);
        }
        Ok(Self {
            operator: key("operator", &stored.operator, KeyPairType::Operator)?,
            system: key("system", &stored.system, KeyPairType::Account)?,
            accounts,
            signers,
            issued: stored.issued,
            revoked: stored.revoked,
            changed_at: stored.changed_at,
            published_at: stored.published_at,
        })
    }
}

/// When a host's credential of this life expires.
fn expiry(issued_at: u64, life: Duration) -> Result<u64, Error> {
    if life.as_secs() == 0 || life > HOST_LIFE_MAX {
        return Err(Error::Life(life));
    }
    Ok(issued_at.saturating_add(life.as_secs()))
}

fn seconds(time: SystemTime) -> Result<u64, Error> {
    time.duration_since(SystemTime::UNIX_EPOCH).map(|since| since.as_secs()).map_err(|_| Error::Clock)
}

/// Writes beside the file and renames, readable by the owner only, so that nobody sees half a secret or an open one.
fn write_secret(path: &Path, text: &str) -> Result<(), Error> {
    use std::os::unix::fs::OpenOptionsExt;

    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let failed = |source| Error::File { what: "writing", path: path.to_owned(), source };
    let written = (|| {
        let mut options = std::fs::OpenOptions::new();
        // A leftover of an interrupted write may have been made by somebody else with other permissions: never reuse it.
        let _ = std::fs::remove_file(&beside);
        let mut file = options.write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    })();
    written.map_err(failed)
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
