//! The same accounts and permissions as a plain configuration file with one key per user: for small installations that want no
//! operator. Adding or removing a user means writing the file again and reloading the servers.

use groupcast_policy::ids::HostId;
use nkeys::KeyPair;
use serde_json::{Value, json};

use super::Error;
use crate::accounts::{Account, HOST_PAYLOAD_BYTES_MAX, HOSTS_CONNECTIONS_MAX, REPLY_REMEMBERED, Role, permissions};
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

/// One line per user of the account.
fn users_of(account: Account, users: &[FixedUser]) -> String {
    let mut text = String::new();
    for user in users.iter().filter(|user| user.role.account() == account) {
        let (publish, subscribe) = permissions(user.role, &user.name).render();
        let permissions = json!({ "publish": publish, "subscribe": subscribe });
        let (role, name, key) = (user.role.as_str(), &user.name, &user.public_key);
        text += &format!("      # {role} {name}\n      {{ nkey: {key}, permissions: {permissions} }}\n");
    }
    text
}

fn lines(items: impl Iterator<Item = Value>) -> String {
    items.map(|item| format!("      {item}\n")).collect()
}

/// Configuration text with both accounts, their exports and imports, and these users.
pub fn fixed_config(users: &[FixedUser]) -> String {
    let (control, hosts) = (Account::Control.name(), Account::Hosts.name());
    let crossing = || {
        let services = subjects::SERVICES_ALL.iter().map(|subject| ("service", *subject));
        services.chain(subjects::TO_HOSTS.iter().map(|subject| ("stream", *subject)))
    };
    let exports = lines(crossing().map(|(kind, subject)| {
        let mut export = json!({ kind: subject, "accounts": [hosts] });
        if kind == "service" {
            export["response_threshold"] = json!(format!("{}ms", REPLY_REMEMBERED.as_millis()));
        }
        export
    }));
    let imports = lines(crossing().map(|(kind, subject)| json!({ kind: { "account": control, "subject": subject } })));
    let (control_users, hosts_users) = (users_of(Account::Control, users), users_of(Account::Hosts, users));
    format!(
        "accounts {{\n  {control}: {{\n    jetstream: enabled\n    users: [\n{control_users}    ]\n    exports: [\n{exports}    ]\n  }}\n  \
         {hosts}: {{\n    limits: {{ max_conn: {HOSTS_CONNECTIONS_MAX}, max_payload: {HOST_PAYLOAD_BYTES_MAX} }}\n    users: [\n{hosts_users}    ]\n    imports: [\n{imports}    ]\n  }}\n}}\n"
    )
}

/// Configuration text for a leafnode server: the hosts' account alone, without imports, because what it lacks comes over the
/// leafnode connection. Users of the other account are left out.
pub fn edge_config(users: &[FixedUser]) -> String {
    let hosts = Account::Hosts.name();
    let limits = format!("limits: {{ max_conn: {HOSTS_CONNECTIONS_MAX}, max_payload: {HOST_PAYLOAD_BYTES_MAX} }}");
    format!("accounts {{\n  {hosts}: {{\n    {limits}\n    users: [\n{}    ]\n  }}\n}}\n", users_of(Account::Hosts, users))
}
