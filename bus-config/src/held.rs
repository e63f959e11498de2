//! What a credentials file says about whoever holds it: the role and the name it was made for, and how long it is good.
//!
//! A connection under another name than the credential's is let in and hears nothing: its inbox is somebody else's, so every request waits
//! in vain. Whoever connects is told before.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use data_encoding::BASE64URL_NOPAD;
use groupcast_policy::ids::HostId;
use serde::Deserialize;

use crate::accounts::Role;
use crate::credentials::claims::ROLE_TAG;

/// Longest credentials file that is read.
const FILE_BYTES_MAX: u64 = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("credentials {path} cannot be read: {reason}", path = path.display())]
    Read { path: PathBuf, reason: String },
    #[error(
        "credentials {path} are those of {held}, not of {said}: leave the name out and it is taken from there, or use the credentials of {said}",
        path = path.display()
    )]
    Name { path: PathBuf, held: HostId, said: HostId },
    #[error(
        "credentials {path} are those of a {held}, and this is a {wanted}: use those of a {wanted}; \
         `groupcast credential add --role {wanted} --name {name}` makes them",
        path = path.display(), held = held.as_str(), wanted = wanted.as_str()
    )]
    Role { path: PathBuf, name: HostId, held: Role, wanted: Role },
    #[error(
        "credentials {path} expired on {at}: `groupcast credential add` makes new ones, for a host `groupcast host token`; if they should be good, \
         look at the clock of this machine",
        path = path.display(), at = humantime::format_rfc3339_seconds(*at)
    )]
    Expired { path: PathBuf, at: SystemTime },
}

/// Whom a credential was made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub name: HostId,
    /// Nothing in a credential from before they said so.
    pub role: Option<Role>,
    /// Nothing when it does not expire.
    pub expires_at: Option<SystemTime>,
}

#[derive(Deserialize)]
struct Claims {
    name: String,
    #[serde(default)]
    exp: u64,
    #[serde(default)]
    nats: Nats,
}

#[derive(Default, Deserialize)]
struct Nats {
    #[serde(default)]
    tags: Vec<String>,
}

impl Held {
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |reason: String| Error::Read { path: path.to_owned(), reason };
        let about = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?;
        if about.len() > FILE_BYTES_MAX {
            return Err(failed(format!("it is larger than {FILE_BYTES_MAX} bytes, which no credentials are")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(|reason| failed(reason.to_owned()))
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        // The line after the one that begins the token.
        let mut lines = text.lines().skip_while(|line| !(line.contains("BEGIN") && line.contains("USER JWT")));
        let token = lines.nth(1).map(str::trim).ok_or("it holds no token")?;
        let claims = token.split('.').nth(1).ok_or("its token has no claims")?;
        let claims = BASE64URL_NOPAD.decode(claims.as_bytes()).map_err(|_| "the claims of its token are no base64")?;
        let Claims { name, exp, nats } = serde_json::from_slice(&claims).map_err(|_| "the claims of its token cannot be read")?;
        let name = HostId::new(&name).map_err(|_| "it was made for a name that is none of ours")?;
        let expires_at = (exp > 0).then(|| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(exp))).flatten();
        let role = nats.tags.iter().find_map(|tag| Role::parse(tag.strip_prefix(ROLE_TAG)?));
        Ok(Self { name, role, expires_at })
    }
}

/// Whether a credential is good at this time for what is about to use it.
pub fn fits(path: &Path, wanted: Role, now: SystemTime) -> Result<(), Error> {
    let held = Held::read(path)?;
    match (held.role, held.expires_at) {
        (Some(role), _) if role != wanted => Err(Error::Role { path: path.to_owned(), name: held.name, held: role, wanted }),
        (_, Some(at)) if at <= now => Err(Error::Expired { path: path.to_owned(), at }),
        _ => Ok(()),
    }
}

/// The name to connect under: what is said, if the credential was made for it; without a word, the credential's.
pub fn name(credentials: Option<&Path>, said: Option<&HostId>) -> Result<Option<HostId>, Error> {
    let Some(path) = credentials else { return Ok(said.cloned()) };
    let held = Held::read(path)?.name;
    match said {
        Some(said) if *said != held => Err(Error::Name { path: path.to_owned(), held, said: said.clone() }),
        _ => Ok(Some(held)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::Authority;

    #[test]
    fn a_credential_says_whose_it_is_and_until_when() {
        let mut authority = Authority::new();
        let (own, now) = (HostId::new("g1").unwrap(), SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let lasting = authority.mint(Role::Gateway, &own, None, now).unwrap();
        assert_eq!(
            Held::parse(&lasting.file_text()),
            Ok(Held { name: own.clone(), role: Some(Role::Gateway), expires_at: None })
        );
        let life = Duration::from_secs(60);
        let short = authority.mint(Role::Gateway, &own, Some(life), now).unwrap();
        assert_eq!(Held::parse(&short.file_text()).unwrap().expires_at, Some(now + life));
        for text in
            ["", "-----BEGIN NATS USER JWT-----", "-----BEGIN NATS USER JWT-----\na.b.c", "-----BEGIN NATS USER JWT-----\nabc"]
        {
            assert!(Held::parse(text).is_err(), "{text}");
        }
        let path = std::env::temp_dir().join(format!("groupcast-held-{}", std::process::id()));
        short.save(&path).unwrap();
        assert_eq!(name(Some(&path), None).unwrap(), Some(own.clone()));
        assert_eq!(name(Some(&path), Some(&own)).unwrap(), Some(own.clone()));
        assert!(fits(&path, Role::Gateway, now).is_ok());
        let words = fits(&path, Role::Controller, now).unwrap_err().to_string();
        assert!(words.contains("those of a gateway, and this is a controller"), "{words}");
        assert!(fits(&path, Role::Gateway, now + life - Duration::from_secs(1)).is_ok());
        let words = fits(&path, Role::Gateway, now + life).unwrap_err().to_string();
        assert!(words.contains("expired on 2027-01-15T08:01:00Z") && words.contains("clock"), "{words}");
        let other = HostId::new("g2").unwrap();
        let words = name(Some(&path), Some(&other)).unwrap_err().to_string();
        assert!(words.contains("are those of g1, not of g2"), "{words}");
        assert_eq!(name(None, Some(&other)).unwrap(), Some(other));
        std::fs::write(&path, vec![b'x'; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(name(Some(&path), None).unwrap_err().to_string().contains("larger"));
        std::fs::remove_file(&path).unwrap();
        assert!(name(Some(&path), None).is_err());
    }
}
