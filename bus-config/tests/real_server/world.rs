//! One server with both accounts and some users of every role, in either way of configuring them.

use std::time::{Duration, SystemTime};

use async_nats::{Client, Message, Subscriber};
use data_encoding::BASE64URL_NOPAD;
use futures::StreamExt;
use groupcast_bus_config::accounts::{Account, Role};
use groupcast_bus_config::connect::{Events, Identity, Options, connect, settle};
use groupcast_bus_config::credentials::{Authority, FixedUser, fixed_config};
use groupcast_bus_config::server::{Config, Server};
use groupcast_bus_config::streams;
use groupcast_policy::ids::HostId;
use nkeys::KeyPair;
use serde_json::{Value, json};

pub const DEADLINE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Operator-signed tokens.
    Signed,
    /// Keys in the configuration file.
    Fixed,
}

/// Who exists: one or two of every role.
pub const USERS: [(Role, &str); 7] = [
    (Role::Controller, "c1"),
    (Role::Controller, "c2"),
    (Role::Gateway, "g1"),
    (Role::Viewer, "v1"),
    (Role::Host, "h1"),
    (Role::Host, "h2"),
    (Role::Edge, "e1"),
];

pub fn name(text: &str) -> HostId {
    HostId::new(text).unwrap()
}

pub struct World {
    pub server: Server,
    identities: Vec<(Role, &'static str, Identity)>,
    unconfined: Vec<(Account, Identity)>,
}

impl World {
    /// Starts the server and makes the streams, as a controller does.
    pub async fn start(mode: Mode) -> Self {
        let mut identities = Vec::new();
        let mut unconfined = Vec::new();
        let config = match mode {
            Mode::Signed => {
                let now = SystemTime::now();
                let mut authority = Authority::new();
                for (role, user) in USERS {
                    let credential = authority.mint(role, &name(user), None, now).unwrap();
                    identities.push((role, user, Identity::Text(credential.file_text())));
                }
                for account in Account::ALL {
                    unconfined.push((account, Identity::Text(unconfined_credentials(&authority, account))));
                }
                authority.server_config("accounts").unwrap()
            }
            Mode::Fixed => {
                let mut users = Vec::new();
                for (role, user) in USERS {
                    let (user_entry, seed) = FixedUser::new(role, &name(user)).unwrap();
                    users.push(user_entry);
                    identities.push((role, user, Identity::Seed(seed)));
                }
                let mut text = fixed_config(&users);
                for account in Account::ALL {
                    let key = KeyPair::new_user();
                    let start = format!("{}: {{", account.name());
                    let at = text.find(&start).unwrap();
                    let users_at = at + text[at..].find("users: [").unwrap() + "users: [".len();
                    text.insert_str(users_at, &format!("\n      {{ nkey: {} }}", key.public_key()));
                    unconfined.push((account, Identity::Seed(key.seed().unwrap())));
                }
                text
            }
        };
        let server = Server::start(Config::plain().with(config)).await.unwrap();
        let world = Self { server, identities, unconfined };
        let (controller, _events) = world.client(Role::Controller, "c1").await;
        streams::ensure(&controller, 1).await.unwrap();
        world
    }

    pub fn identity(&self, role: Role, user: &str) -> &Identity {
        &self.identities.iter().find(|(r, n, _)| *r == role && *n == user).unwrap().2
    }

    pub async fn client(&self, role: Role, user: &str) -> (Client, Events) {
        let identity = self.identity(role, user);
        connect(Options::new(&[self.server.url()], role, &name(user)).identity(identity.clone())).await.unwrap()
    }

    /// A user of the account that may do everything in it: the witness.
    pub async fn unconfined(&self, account: Account) -> Client {
        let (_, identity) = self.unconfined.iter().find(|(a, _)| *a == account).unwrap();
        let options = Options::new(&[self.server.url()], Role::Viewer, &name("witness")).identity(identity.clone());
        connect(options).await.unwrap().0
    }
}

/// A user signed by the account's own key, outside all scopes. Product code cannot make one.
fn unconfined_credentials(authority: &Authority, account: Account) -> String {
    let path = std::env::temp_dir().join(format!("groupcast-witness-{}", KeyPair::new_user().public_key()));
    authority.save(&path).unwrap();
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let account = KeyPair::from_seed(stored["accounts"][account.name()].as_str().unwrap()).unwrap();
    let user = KeyPair::new_user();
    let issued_at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let claims = json!({ "jti": user.public_key(), "iat": issued_at, "iss": account.public_key(), "sub": user.public_key(), "name": "witness",
        "nats": { "type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1 } });
    let header = BASE64URL_NOPAD.encode(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let text = format!("{header}.{}", BASE64URL_NOPAD.encode(claims.to_string().as_bytes()));
    let token = format!("{text}.{}", BASE64URL_NOPAD.encode(&account.sign(text.as_bytes()).unwrap()));
    format!(
        "-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
        user.seed().unwrap()
    )
}

/// The next message, or a failed test.
pub async fn next(subscription: &mut Subscriber, what: &str) -> Message {
    match tokio::time::timeout(DEADLINE, subscription.next()).await {
        Ok(Some(message)) => message,
        other => panic!("{what}: {other:?}"),
    }
}

/// Publishes with an acknowledgement from the stream.
pub async fn store(client: &Client, subject: &str, payload: &'static str) -> u64 {
    let message = client.request(subject.to_owned(), payload.into()).await.unwrap();
    let ack: Value = serde_json::from_slice(&message.payload).unwrap();
    ack["seq"].as_u64().unwrap_or_else(|| panic!("{subject}: {ack}"))
}

pub async fn api(client: &Client, subject: &str, body: Value) -> Value {
    let message = client.request(subject.to_owned(), body.to_string().into()).await.unwrap();
    serde_json::from_slice(&message.payload).unwrap()
}

/// Sees everything that passes in one account, and knows when it has seen everything up to now.
pub struct Witness {
    client: Client,
    all: Subscriber,
    markers: u64,
}

const MARKER: &str = "witness.marker";

impl Witness {
    pub async fn start(world: &World, account: Account) -> Self {
        let client = world.unconfined(account).await;
        let all = client.subscribe(">").await.unwrap();
        settle(&client, DEADLINE).await.unwrap();
        Self { client, all, markers: 0 }
    }

    /// Everything seen since the last call. Whatever a server handled before this call is included: a connection's messages
    /// are delivered in the order in which the server routed them.
    pub async fn seen(&mut self) -> Vec<Message> {
        self.markers += 1;
        self.client.publish(MARKER, self.markers.to_string().into()).await.unwrap();
        let mut seen = Vec::new();
        loop {
            let message = next(&mut self.all, "witness").await;
            if message.subject.as_str() == MARKER {
                if message.payload == self.markers.to_string().as_bytes() {
                    return seen;
                }
            } else {
                seen.push(message);
            }
        }
    }
}
