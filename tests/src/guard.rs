//! An installation as `groupcast bus init` makes it, for the machines of [`crate::nodes`]: TLS between all of them, accounts, and a credential
//! for everybody. What an administrator revokes, replaces and renews there is replaced here with the same commands.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use groupcast_bus_config::accounts::{Account, Role};
use nkeys::KeyPair;
use serde_json::{Value, json};

use crate::gateway::{Ran, groupcast};

/// Where the files that are made expect their machine's own.
const ETC: &str = "/etc/groupcast";
const STORE: &str = "/var/lib/groupcast/nats";
const ACCOUNTS: &str = "/var/lib/groupcast/accounts";
const MONITOR: &str = "127.0.0.1:8222";

pub struct Guard {
    /// What `groupcast bus init` made.
    folder: PathBuf,
}

impl Guard {
    /// For these nodes and hosts; `named` have a credential each beside those that belong to nodes.
    pub fn new(folder: &Path, nodes: &[(&str, Ipv4Addr)], hosts: &[&str], named: &[(Role, &str)]) -> Self {
        let guard = Self { folder: folder.join("cluster") };
        let nodes: Vec<String> = nodes.iter().map(|(name, address)| format!("{name}={address}")).collect();
        let out = guard.folder.display().to_string();
        let (nodes, hosts) = (nodes.join(","), hosts.join(","));
        done(&["bus", "init", "--nodes", &nodes, "--hosts", &hosts, "--claims", "gcw*", "--out", &out]);
        named.iter().for_each(|(role, name)| guard.credential(*role, name, None));
        guard
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// The file with the credential of whoever has this name; the operator's are those of the role.
    pub fn credential_file(&self, role: Role, name: &str) -> PathBuf {
        match role {
            Role::Host => self.folder.join(name).join("host.creds"),
            _ => self.folder.join(format!("{name}.creds")),
        }
    }

    pub fn operator_file(&self, role: Role) -> PathBuf {
        self.folder.join("operator").join(format!("{}.creds", role.as_str()))
    }

    /// Makes another credential and puts it where that of this name is: it is read again when its user connects.
    pub fn credential(&self, role: Role, name: &str, life: Option<Duration>) {
        let (file, new) = (self.credential_file(role, name), self.folder.join("new.creds"));
        let (authority, out) = (self.path("authority.json"), new.display().to_string());
        let life = life.map(|life| format!("{}s", life.as_secs()));
        let mut arguments =
            vec!["credential", "add", "--role", role.as_str(), "--name", name, "--authority", &authority, "--out", &out];
        arguments.extend(life.iter().flat_map(|life| ["--life", life.as_str()]));
        done(&arguments);
        std::fs::rename(&new, &file).expect("replaced");
    }

    /// Voids every credential of this role and name, and tells the servers.
    pub fn revoke(&self, role: Role, name: &str) -> Ran {
        let (authority, config) = (self.path("authority.json"), self.operator_config());
        let who = ["--role", role.as_str(), "--name", name];
        done(&[&["credential", "revoke", "--authority", &authority, "--config", &config][..], &who].concat())
    }

    /// A credential that no role has, signed with the key of the controllers' account itself: it may have streams change their leaders.
    pub fn breaker(&self) -> String {
        let authority = std::fs::read_to_string(self.folder.join("authority.json")).expect("readable");
        let authority: Value = serde_json::from_str(&authority).expect("JSON");
        let seed = authority["accounts"][Account::Control.name()].as_str().expect("a seed");
        let (account, user) = (KeyPair::from_seed(seed).expect("a key"), KeyPair::new_user());
        let nats = json!({ "type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1 });
        let claims = json!({ "jti": user.public_key(), "iat": 1, "iss": account.public_key(), "sub": user.public_key(), "name": "breaker",
            "nats": nats });
        let encoded = |text: &[u8]| BASE64URL_NOPAD.encode(text);
        let text = format!("{}.{}", encoded(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#), encoded(claims.to_string().as_bytes()));
        let signature = encoded(&account.sign(text.as_bytes()).expect("signed"));
        format!(
            "-----BEGIN NATS USER JWT-----\n{text}.{signature}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
            user.seed().expect("a seed")
        )
    }

    /// Makes new certificates for all nodes. Servers read them when they are told to.
    pub fn renew(&self, life: Duration) {
        let (out, life) = (self.folder.display().to_string(), format!("{}s", life.as_secs()));
        done(&["bus", "renew", "--out", &out, "--certificate-life", &life]);
    }

    pub fn trusted(&self) -> PathBuf {
        self.folder.join("authority.pem")
    }

    /// What the operator's own commands on the bus are told.
    pub fn operator_config(&self) -> String {
        self.path("operator/groupcast.toml")
    }

    /// Writes the configuration of a node's server, which differs from what was made in where it lies, and in that others see its monitoring.
    pub fn server_file(&self, node: &str, address: Ipv4Addr, store: &Path) -> PathBuf {
        let folder = self.folder.join(node);
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("it was made");
        let put = |name: &str, text: String| std::fs::write(folder.join(name), text).expect("written");
        put("accounts.here.conf", read("accounts.conf").replace(ACCOUNTS, &folder.join("accounts").display().to_string()));
        let changes = [
            (ETC, folder.display().to_string()),
            (STORE, store.display().to_string()),
            (MONITOR, format!("{address}:8222")),
            ("accounts.conf", "accounts.here.conf".to_owned()),
        ];
        let mut text = read("nats.conf");
        for (from, to) in changes {
            assert!(text.contains(from), "nats.conf does not say {from}: {text}");
            text = text.replace(from, &to);
        }
        put("here.conf", text);
        folder.join("here.conf")
    }

    /// Flags of a process that has this credential.
    pub fn flags(&self, role: Role, name: &str) -> Vec<String> {
        let credential = self.credential_file(role, name).display().to_string();
        let trusted = self.trusted().display().to_string();
        vec!["--credentials".to_owned(), credential, "--tls-authority".to_owned(), trusted]
    }

    /// The same for an agent's file.
    pub fn agent_lines(&self, host: &str) -> String {
        let credential = self.credential_file(Role::Host, host);
        format!("credentials = '{}'\ntls_authority = '{}'\n", credential.display(), self.trusted().display())
    }
}

fn done(arguments: &[&str]) -> Ran {
    let ran = groupcast(arguments, &[]);
    assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
    ran
}
