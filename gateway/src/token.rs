//! Bearer tokens: who may use a gateway, for what. A token is a CATALOG document that holds a hash of the secret, so that gateways keep
//! nothing of their own, and a token that is revoked at one is revoked at all.
//!
//! A token reads `gct.<id>.<secret>`. The secret is 32 random bytes: nothing is gained by a slow hash, because nobody can try them all.

use std::time::{Duration, SystemTime};

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::document::{Document, Name};
use groupcast_policy::ids::InvalidId;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use utoipa::ToSchema;

use crate::problem::Problem;
use crate::scope::Scope;

const PREFIX: &str = "gct.";
const SECRET_BYTES: usize = 32;
/// Longest description in characters.
pub const DESCRIPTION_LEN_MAX: usize = 250;
/// Longest life: ten years. One that is to live for ever simply says none.
pub const LIFE_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// What a token is good for. Each may do what those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads everything but secrets.
    Viewer,
    /// Also writes groups and templates, as far as its scope goes.
    Editor,
    /// Also tokens, export and import.
    Admin,
}

impl Role {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Editor => "editor",
            Self::Admin => "admin",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub name: Name,
    pub stored: Stored,
}

/// As CATALOG holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    pub role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Of the secret, SHA-256 in hexadecimal digits.
    hash: String,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Seconds since 1970; nothing when it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
}

/// Why a token opens nothing. Whoever shows it is told the same in every case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalid {
    Malformed,
    Unknown,
    Wrong,
    Expired,
}

/// Why a role takes no scope: one that narrows nothing would only look as if it did.
pub fn no_scope(role: Role) -> Option<&'static str> {
    match role {
        Role::Viewer => {
            Some("a scope says what a token may write, and a viewer writes nothing: it reads everything; leave the scope out")
        }
        Role::Editor => None,
        Role::Admin => Some("an administrator has no scope: choose role editor, or leave the scope out"),
    }
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

pub fn seconds(now: SystemTime) -> u64 {
    now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The id and the secret that a token's text names.
pub fn parse(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix(PREFIX)?.split_once('.').filter(|(id, secret)| !id.is_empty() && !secret.is_empty())
}

impl Token {
    /// A new token and its text, which is shown once and stored nowhere.
    pub fn new(
        id: &str,
        role: Role,
        scope: Option<Scope>,
        description: &str,
        life: Option<Duration>,
        now: SystemTime,
    ) -> Result<(Self, String), NotMade> {
        let name = Name::new(CatalogKind::Token, id)?;
        if description.chars().count() > DESCRIPTION_LEN_MAX || description.chars().any(groupcast_policy::text::is_deceptive) {
            return Err(NotMade::Description);
        }
        let mut bytes = [0; SECRET_BYTES];
        getrandom::fill(&mut bytes).map_err(|error| NotMade::NoRandomness(error.to_string()))?;
        let secret = BASE64URL_NOPAD.encode(&bytes);
        let stored = Stored {
            role,
            scope,
            description: description.to_owned(),
            hash: HEXLOWER.encode(&hash(&secret)),
            created_at: seconds(now),
            expires_at: life.map(|life| seconds(now) + life.min(LIFE_MAX).as_secs().max(1)),
        };
        Ok((Self { name, stored }, format!("{PREFIX}{id}.{secret}")))
    }

    pub fn read(name: &Name, body: &serde_json::Value) -> Result<Self, String> {
        let stored: Stored = serde_json::from_value(body.clone()).map_err(|error| error.to_string())?;
        if let Some(why) = no_scope(stored.role).filter(|_| stored.scope.is_some()) {
            return Err(why.to_owned());
        }
        if HEXLOWER.decode(stored.hash.as_bytes()).is_ok_and(|bytes| bytes.len() == 32) {
            return Ok(Self { name: name.clone(), stored });
        }
        Err("its hash is none".to_owned())
    }

    pub fn id(&self) -> &str {
        self.name.id()
    }

    pub fn principal(&self) -> Principal {
        Principal { id: self.id().to_owned(), role: self.stored.role, scope: self.stored.scope.clone() }
    }

    fn body(&self) -> serde_json::Value {
        // Text, numbers and lists of text have no way to fail.
        serde_json::to_value(&self.stored).unwrap_or_default()
    }

    pub fn document(&self) -> Document {
        Document::Other { name: self.name.clone(), body: self.body() }
    }

    pub fn is_expired(&self, now: SystemTime) -> bool {
        self.stored.expires_at.is_some_and(|at| at <= seconds(now))
    }

    /// Whether the secret is this token's, in a time that does not depend on how much of it is right.
    pub fn verify(&self, secret: &str, now: SystemTime) -> Result<(), Invalid> {
        let known = HEXLOWER.decode(self.stored.hash.as_bytes()).unwrap_or_default();
        let right: bool = hash(secret).as_slice().ct_eq(&known).into();
        match right {
            false => Err(Invalid::Wrong),
            true if self.is_expired(now) => Err(Invalid::Expired),
            true => Ok(()),
        }
    }
}

/// Takes as long as a comparison with a token that exists.
pub fn verify_nothing(secret: &str) {
    let _: bool = hash(secret).as_slice().ct_eq(&[0; 32]).into();
}

#[derive(Debug, thiserror::Error)]
pub enum NotMade {
    #[error(transparent)]
    Id(#[from] InvalidId),
    #[error("the description is longer than {DESCRIPTION_LEN_MAX} characters or has control characters: shorten it")]
    Description,
    #[error("the system gives no random numbers: {0}")]
    NoRandomness(String),
}

/// Who makes a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    pub id: String,
    pub role: Role,
    pub scope: Option<Scope>,
}

impl Principal {
    /// Asked before a body is read: who may only read has nothing to send.
    pub fn may_write(&self) -> Result<(), Problem> {
        match self.role {
            Role::Viewer => Err(Problem::forbidden("your token may only read: ask for one with role editor")),
            Role::Editor | Role::Admin => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    fn later(seconds: u64) -> SystemTime {
        NOW + Duration::from_secs(seconds)
    }

    #[test]
    fn only_the_secret_opens_and_only_while_it_lives() {
        let (token, text) = Token::new("ann", Role::Editor, None, "for ann", Some(Duration::from_secs(60)), NOW).unwrap();
        let (id, secret) = parse(&text).unwrap();
        assert_eq!(id, "ann");
        assert_eq!(token.verify(secret, later(59)), Ok(()));
        assert_eq!(token.verify(secret, later(60)), Err(Invalid::Expired));
        for wrong in ["", "x", &secret[1..], &format!("{secret}x"), &secret.to_uppercase()] {
            assert_eq!(token.verify(wrong, NOW), Err(Invalid::Wrong), "{wrong}");
        }
        let (_, other) = Token::new("ann", Role::Editor, None, "", None, NOW).unwrap();
        assert_ne!(text, other);
    }

    #[test]
    fn what_is_stored_reads_back_and_holds_no_secret() {
        let scope = Scope { ids: vec!["shop-".into()], ..Scope::default() };
        let (token, text) = Token::new("ann", Role::Editor, Some(scope), "for ann", None, NOW).unwrap();
        let Document::Other { name, body } = token.document() else { panic!("another kind") };
        assert_eq!((name.kind, name.id()), (CatalogKind::Token, "ann"));
        assert_eq!(Token::read(&name, &body), Ok(token));
        let (_, secret) = parse(&text).unwrap();
        assert!(!body.to_string().contains(secret));
        for broken in [serde_json::json!({}), serde_json::json!({"role": "root", "hash": "00", "created_at": 1})] {
            assert!(Token::read(&name, &broken).is_err());
        }
        let mut short = body;
        short["hash"] = "00".into();
        assert!(Token::read(&name, &short).is_err());
    }

    #[test]
    fn a_scope_that_would_narrow_nothing_is_refused() {
        for role in [Role::Viewer, Role::Admin] {
            let (token, _) = Token::new("ann", role, Some(Scope::default()), "", None, NOW).unwrap();
            assert!(Token::read(&token.name, &token.body()).is_err(), "{role:?}");
        }
    }

    #[test]
    fn malformed_texts_name_nobody() {
        for text in ["", "gct.", "gct.ann", "gct.ann.", "gct..x", "bearer gct.ann.x", "ann.x"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert!(Token::new("a.b", Role::Viewer, None, "", None, NOW).is_err());
        let long = "x".repeat(DESCRIPTION_LEN_MAX);
        assert!(Token::new("a", Role::Viewer, None, &long, None, NOW).is_ok());
        assert!(Token::new("a", Role::Viewer, None, &format!("{long}x"), None, NOW).is_err());
    }
}
