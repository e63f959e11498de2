//! The same accounts and permissions as a plain configuration file with one key per user: for small installations that want no
//! operator. Adding or removing a user means writing the file again and reloading the servers.

use groupcast_policy::ids::HostId;
use nkeys::KeyPair;
use serde_json::json;

use super::Error;
use crate::accounts::{Account, Role, permissions};
use crate::subjects;

/// A user known to the servers by its public key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedUser {
    pub role: Role,
    pub name: HostId,
    pub public_key: String,
}

impl FixedUser {
    /// A new user and the seed with which it connects.
    pub fn new(role: Role, name: &HostId) -> Result<(Self, String), Error> {
        let key = KeyPair::new_user();
        let seed = key.seed().map_err(|error| Error::Key { what: "a new user", reason: error.to_string() })?;
        Ok((Self { role, name: name.clone(), public_key: key.public_key() }, seed))
    }
}

/// Configuration text with both accounts, their exports and imports, and these users.
pub fn fixed_config(users: &[FixedUser]) -> String {
    let exports = subjects::SERVICES_ALL
        .iter()
        .map(|subject| json!({ "service": subject, "accounts": [Account::Hosts.name()] }))
        .chain(subjects::TO_HOSTS.iter().map(|subject| json!({ "stream": subject, "accounts": [Account::Hosts.name()] })));
    let from = |subject: &str| json!({ "account": Account::Control.name(), "subject": subject });
    let imports = subjects::SERVICES_ALL
        .iter()
        .map(|subject| json!({ "service": from(subject) }))
        .chain(subjects::TO_HOSTS.iter().map(|subject| json!({ "stream": from(subject) })));
    let users_of = |account: Account| {
        let mut text = String::new();
        for user in users.iter().filter(|user| user.role.account() == account) {
            let (publish, subscribe) = permissions(user.role, &user.name).render();
            let permissions = json!({ "publish": publish, "subscribe": subscribe });
            text += &format!(
                "      # {} {}\n      {{ nkey: {}, permissions: {permissions} }}\n",
                user.role.as_str(),
                user.name,
                user.public_key
            );
        }
        text
    };
    let lines =
        |items: &mut dyn Iterator<Item = serde_json::Value>| items.map(|item| format!("      {item}\n")).collect::<String>();
    format!(
        "accounts {{\n  {}: {{\n    jetstream: enabled\n    users: [\n{}    ]\n    exports: [\n{}    ]\n  }}\n  {}: {{\n    users: [\n{}    ]\n    \
         imports: [\n{}    ]\n  }}\n}}\n",
        Account::Control.name(),
        users_of(Account::Control),
        lines(&mut { exports }),
        Account::Hosts.name(),
        users_of(Account::Hosts),
        lines(&mut { imports }),
    )
}
