//! The tokens themselves: JSON claims, signed with an nkey. The format is NATS's version 2 of it.

use std::collections::BTreeMap;

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use groupcast_policy::ids::HostId;
use nkeys::KeyPair;
use serde_json::{Value, json};

use super::{Authority, Error};
use crate::accounts::{
    Account, HOST_PAYLOAD_BYTES_MAX, HOST_SUBSCRIPTIONS_MAX, HOSTS_CONNECTIONS_MAX, REPLY_REMEMBERED, Role, permissions,
};
use crate::subjects;

/// Stands in for the holder's name when the permissions of a role are made into a template; no holder can have it, because
/// [`own_name_template`] replaces it wherever it stands.
const OWN_NAME: &str = "OWN-NAME-OWN-NAME-OWN-NAME-OWN-NAME-OWN-NAME-OWN-NAME-OWN-NAME-O";
const OWN_NAME_TEMPLATE: &str = "{{name()}}";

const UNLIMITED: i64 = -1;

fn sign(issuer: &KeyPair, claims: &Value) -> Result<String, Error> {
    let header = BASE64URL_NOPAD.encode(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let body = BASE64URL_NOPAD.encode(claims.to_string().as_bytes());
    let text = format!("{header}.{body}");
    let signature = issuer.sign(text.as_bytes()).map_err(|error| Error::Key { what: "signing", reason: error.to_string() })?;
    Ok(format!("{text}.{}", BASE64URL_NOPAD.encode(&signature)))
}

/// What a token says, if this key has signed it.
pub(super) fn verified(issuer: &KeyPair, token: &str) -> Result<Value, &'static str> {
    let strange = "the credential is no token";
    let (text, signature) = token.rsplit_once('.').ok_or(strange)?;
    let signature = BASE64URL_NOPAD.decode(signature.as_bytes()).map_err(|_| strange)?;
    issuer.verify(text.as_bytes(), &signature).map_err(|_| "the credential was signed by another")?;
    said(token).ok_or(strange)
}

/// What a token says, whoever signed it.
pub(super) fn said(token: &str) -> Option<Value> {
    let body = token.split('.').nth(1)?;
    serde_json::from_slice(&BASE64URL_NOPAD.decode(body.as_bytes()).ok()?).ok()
}

fn claims(issuer: &KeyPair, subject: &KeyPair, name: &str, issued_at: u64, nats: Value) -> Value {
    // The server wants a unique id and does not compute it; a fresh key's name is one.
    let id = HEXLOWER.encode(&KeyPair::new_user().public_key().as_bytes()[..24]);
    json!({ "jti": id, "iat": issued_at, "iss": issuer.public_key(), "sub": subject.public_key(), "name": name, "nats": nats })
}

fn with_expiry(mut claims: Value, expires_at: Option<u64>) -> Value {
    if let Some(at) = expires_at {
        claims["exp"] = json!(at);
    }
    claims
}

/// What a tag begins with that says the holder's role. The server grants nothing by it, it goes by the signing key: it is for whoever holds the
/// credential, to find a mistaken one before the bus refuses half of what it does.
pub(crate) const ROLE_TAG: &str = "role:";

/// A user under a scoped signing key: the token carries no permissions of its own, they come from the scope.
pub(super) fn user(
    role: Role,
    signer: &KeyPair,
    account: &KeyPair,
    user: &KeyPair,
    name: &str,
    issued_at: u64,
    expires_at: Option<u64>,
) -> Result<String, Error> {
    let tags = [format!("{ROLE_TAG}{}", role.as_str())];
    let nats = json!({ "type": "user", "version": 2, "issuer_account": account.public_key(), "tags": tags });
    sign(signer, &with_expiry(claims(signer, user, name, issued_at, nats), expires_at))
}

/// A user of the system account, signed by the account's own key.
pub(super) fn system_user(
    account: &KeyPair,
    user: &KeyPair,
    name: &str,
    issued_at: u64,
    expires_at: Option<u64>,
) -> Result<String, Error> {
    let nats = json!({ "type": "user", "version": 2, "subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED });
    sign(account, &with_expiry(claims(account, user, name, issued_at, nats), expires_at))
}

fn limits(jetstream: bool) -> Value {
    let mut limits = json!({
        "subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED, "imports": UNLIMITED, "exports": UNLIMITED,
        "wildcards": true, "conn": UNLIMITED, "leaf": UNLIMITED,
    });
    if jetstream {
        for name in ["mem_storage", "disk_storage", "streams", "consumer"] {
            limits[name] = json!(UNLIMITED);
        }
    }
    limits
}

/// The role's permissions with the holder's name as a template.
fn own_name_template(role: Role) -> Result<Value, Error> {
    let name = HostId::new(OWN_NAME).map_err(|error| Error::Key { what: "a scope", reason: error.to_string() })?;
    let (publish, subscribe) = permissions(role, &name).render();
    let (subs, payload) = match role {
        Role::Host => (i64::from(HOST_SUBSCRIPTIONS_MAX), i64::from(HOST_PAYLOAD_BYTES_MAX)),
        _ => (UNLIMITED, UNLIMITED),
    };
    let text = json!({ "pub": publish, "sub": subscribe, "subs": subs, "data": UNLIMITED, "payload": payload }).to_string();
    serde_json::from_str(&text.replace(OWN_NAME, OWN_NAME_TEMPLATE))
        .map_err(|error| Error::Key { what: "a scope", reason: error.to_string() })
}

impl Authority {
    pub(super) fn operator_token(&self) -> Result<String, Error> {
        let nats = json!({ "type": "operator", "version": 2, "system_account": self.system.public_key() });
        sign(&self.operator, &claims(&self.operator, &self.operator, "groupcast", self.changed_at, nats))
    }

    pub(super) fn system_token(&self) -> Result<String, Error> {
        let nats = json!({ "type": "account", "version": 2, "limits": limits(false) });
        sign(&self.operator, &claims(&self.operator, &self.system, "SYS", self.changed_at, nats))
    }

    pub(super) fn account_token(&self, account: Account) -> Result<String, Error> {
        let mut nats = json!({ "type": "account", "version": 2, "limits": limits(account == Account::Control) });
        if account == Account::Hosts {
            nats["limits"]["conn"] = json!(HOSTS_CONNECTIONS_MAX);
        }
        let mut signing_keys = Vec::new();
        for role in Role::ALL.into_iter().filter(|role| role.account() == account) {
            let key = self.signer(role).public_key();
            signing_keys
                .push(json!({ "kind": "user_scope", "key": key, "role": role.as_str(), "template": own_name_template(role)? }));
        }
        nats["signing_keys"] = json!(signing_keys);
        let control = self.account(Account::Control).public_key();
        let services = subjects::SERVICES_ALL.iter().map(|subject| (*subject, "service"));
        let crossing = services.chain(subjects::TO_HOSTS.iter().map(|subject| (*subject, "stream")));
        match account {
            Account::Control => {
                let export = |(subject, kind): (&str, &str)| {
                    let mut export = json!({ "name": subject, "subject": subject, "type": kind });
                    if kind == "service" {
                        export["response_threshold"] = json!(REPLY_REMEMBERED.as_nanos() as u64);
                    }
                    export
                };
                nats["exports"] = crossing.map(export).collect();
            }
            Account::Hosts => {
                nats["imports"] = crossing
                    .map(|(subject, kind)| json!({ "name": subject, "subject": subject, "type": kind, "account": control }))
                    .collect();
            }
        }
        // Every revocation stands in both accounts: a key belongs to one of them and is unknown in the other.
        let revoked: &BTreeMap<String, u64> = &self.revoked;
        if !revoked.is_empty() {
            nats["revocations"] = json!(revoked);
        }
        sign(&self.operator, &claims(&self.operator, self.account(account), account.name(), self.changed_at, nats))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_hold_the_name_and_never_the_stand_in() {
        for role in Role::ALL {
            let text = own_name_template(role).unwrap().to_string();
            assert!(text.contains(OWN_NAME_TEMPLATE) && !text.contains(OWN_NAME), "{text}");
        }
        let host = own_name_template(Role::Host).unwrap();
        assert_eq!(host["pub"]["allow"][0], "gc.snap.{{name()}}");
        assert_eq!(own_name_template(Role::Viewer).unwrap()["pub"], json!({ "deny": [">"] }));
    }
}
