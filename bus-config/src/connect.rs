//! Connecting with the manners a fleet needs: jitter on every wait, no give-up, and every event that means "look again" surfaced.
//!
//! A denied subscription or publication is silent where it is made: the call succeeds and nothing ever arrives. The server tells
//! it on the side, and here it becomes [`Event::Denied`], which its holder must treat as fatal. The client library drops events
//! when too many wait; what is dropped here, at least, is told by [`Event::Missed`].

use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::{Client, ConnectOptions, ServerAddr};
use futures::StreamExt;
use groupcast_policy::ids::HostId;
use tokio::sync::mpsc;

use crate::accounts::Role;
use crate::credentials::block;
use crate::held;
use crate::streams::{CATALOG, REGISTRY, Stream, TOPICS};
use choose::Chooser;

mod choose;
mod guard;
mod tls;

pub use choose::{AVOIDED_FOR, GREETED_WITHIN};
pub use guard::{Guard, HOME_AFTER, LEADERLESS_MAX};
pub use tls::{Tls, is_loopback};

/// Longest wait between two attempts to connect, unless told otherwise. Short, because a host that was cut off must be back within seconds
/// of the route's return; the servers refuse an attempt cheaply.
pub const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(5);
/// The first wait after a lost connection is anything up to this: a fleet that lost its server together comes back spread out.
pub const RECONNECT_DELAY_FIRST: Duration = Duration::from_millis(500);
/// Events that wait for their reader; further ones become one [`Event::Missed`].
pub const EVENTS_MAX: usize = 1_024;
/// One attempt to connect to a server that has greeted, TLS and authentication included. A server that thousands reach for at once is slow.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How often an idle connection is tried. The client library opens its sockets itself, sets none of their options and hands none of them out, so
/// this stands for keepalive and `TCP_USER_TIMEOUT`: a peer that vanished without a word is given up on before the kernel's retransmissions
/// are far apart. `docs/operations.md` says what it costs.
pub const PING_EVERY: Duration = Duration::from_secs(1);
/// So long after its last word a silent server counts as gone: the client library gives up at the third ping that finds two unanswered.
pub const SILENCE_MAX: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("credentials {path} cannot be read: {source}", path = path.display())]
    Credentials { path: PathBuf, source: std::io::Error },
    #[error("these are no NATS credentials: {0}")]
    NoCredentials(std::io::Error),
    #[error(transparent)]
    Held(#[from] held::Error),
    #[error("no server to connect to was named")]
    NoServer,
    #[error("the server did not answer within {} s", within.as_secs())]
    NotSettled { within: Duration },
    #[error("server {server:?} cannot be used: {reason}")]
    Server { server: String, reason: String },
    #[error("the TLS settings cannot be used: {0}")]
    Tls(String),
    #[error("connecting to {servers} failed: {source}{}", hint(*tls_required, source.kind()))]
    Connect { servers: String, tls_required: bool, source: async_nats::ConnectError },
}

fn hint(tls_required: bool, kind: async_nats::ConnectErrorKind) -> &'static str {
    if kind == async_nats::ConnectErrorKind::AuthorizationViolation {
        " (the server does not take the credential: it is revoked or expired, or was made with the authority of another installation)"
    } else if tls_required {
        " (TLS is required, as it is by default unless every server is on this machine: check that the server offers it, and name its authority \
         with tls_authority)"
    } else {
        ""
    }
}

impl Error {
    /// What a server says to the login of a client that has reached it.
    pub fn login(&self) -> String {
        match self {
            Self::Connect { source, .. } => source.to_string(),
            other => other.to_string(),
        }
    }
}

/// How a client proves who it is.
#[derive(Clone, Default)]
pub enum Identity {
    /// A server without authentication.
    #[default]
    Nobody,
    /// A credentials file, read again whenever the connection is made anew: whoever replaces it and then revokes the old credential
    /// rotates it without anybody being locked out.
    File(PathBuf),
    /// The contents of a credentials file.
    Text(String),
    /// The seed of a user whose public key the servers' configuration names.
    Seed(String),
}

/// Prints no secret.
impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nobody => f.write_str("Nobody"),
            Self::File(path) => write!(f, "File({})", path.display()),
            Self::Text(_) => f.write_str("Text"),
            Self::Seed(_) => f.write_str("Seed"),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Options {
    pub servers: Vec<String>,
    pub role: Role,
    /// Own name: it is the connection's name for operators and makes the inbox prefix that the credential allows.
    pub name: HostId,
    pub identity: Identity,
    pub tls: Tls,
    pub reconnect_delay_max: Duration,
    /// Who had to leave a server returns to it after so long at the earliest.
    pub home_after: Duration,
    /// Returns at once and connects in the background, for processes that must start without the bus.
    pub in_background: bool,
}

impl Options {
    pub fn new(servers: &[String], role: Role, name: &HostId) -> Self {
        Self {
            servers: servers.to_vec(),
            role,
            name: name.clone(),
            identity: Identity::default(),
            tls: Tls::default(),
            reconnect_delay_max: RECONNECT_DELAY_MAX,
            home_after: HOME_AFTER,
            in_background: false,
        }
    }

    pub fn identity(mut self, identity: Identity) -> Self {
        self.identity = identity;
        self
    }

    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    pub fn reconnect_delay_max(mut self, delay: Duration) -> Self {
        self.reconnect_delay_max = delay;
        self
    }

    pub fn home_after(mut self, after: Duration) -> Self {
        self.home_after = after;
        self
    }

    pub fn in_background(mut self) -> Self {
        self.in_background = true;
        self
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Also after every reconnect: whatever was missed meanwhile must be asked for.
    Connected,
    Disconnected,
    /// A subscription overflowed and messages were dropped; which ones is not known.
    SlowConsumer,
    /// The server refuses what this client does or is. Fatal: it will not get better by itself.
    Denied(String),
    /// The server is about to go; the client moves to another by itself.
    LeavingServer,
    /// The client has ended for good.
    Closed,
    /// Anything else the server or the client library complains about.
    Trouble(String),
    /// Events were lost because nobody read them: assume any of the others.
    Missed,
}

/// Events of one connection, in order.
#[derive(Debug)]
pub struct Events {
    queue: mpsc::Receiver<Event>,
    missed: Arc<AtomicBool>,
    chooser: Arc<Chooser>,
    servers: Vec<ServerAddr>,
    role: Role,
    home_after: Duration,
}

/// The streams whose leaders a client of this role has the right to ask for, and needs.
fn needed(role: Role) -> &'static [&'static Stream] {
    match role {
        Role::Controller => &[&CATALOG, &REGISTRY, &TOPICS],
        Role::Gateway => &[&CATALOG, &REGISTRY],
        Role::Viewer | Role::Host | Role::Edge => &[],
    }
}

impl Events {
    /// Leaves servers that are of no use to this connection, for as long as the guard is kept: also one from which the leaders of the streams
    /// that its role reads cannot be reached. The guard keeps the connection open.
    pub fn guard(&self, client: &Client) -> Guard {
        Guard::start(client.clone(), self.chooser.clone(), self.servers.clone(), needed(self.role), self.home_after)
    }

    /// Goes to another server, where there is one: this one is of no use.
    pub async fn leave(&self, client: &Client, why: &str) {
        if self.servers.len() > 1 {
            guard::leave(client, &self.chooser, why).await;
        }
    }

    /// The next event; `None` when the client is gone.
    pub async fn next(&mut self) -> Option<Event> {
        if self.missed.swap(false, Ordering::AcqRel) {
            return Some(Event::Missed);
        }
        self.queue.recv().await
    }
}

/// What an event of the client library means to us.
pub fn classify(event: &async_nats::Event) -> Event {
    use async_nats::Event as Theirs;
    match event {
        Theirs::Connected => Event::Connected,
        Theirs::Disconnected => Event::Disconnected,
        Theirs::LameDuckMode => Event::LeavingServer,
        Theirs::SlowConsumer(_) => Event::SlowConsumer,
        Theirs::Closed => Event::Closed,
        Theirs::Draining => Event::Trouble("draining".to_owned()),
        Theirs::ServerError(async_nats::ServerError::SlowConsumer(_)) => Event::SlowConsumer,
        Theirs::ServerError(error) => judge(error.to_string()),
        Theirs::ClientError(error) => judge(error.to_string()),
    }
}

/// Sorts an error by the server's words; there are no codes.
fn judge(text: String) -> Event {
    let lower = text.to_lowercase();
    let denials = [
        "permissions violation",
        "authorization violation",
        "authentication revoked",
        "authentication expired",
        "account authentication",
        "user authentication",
    ];
    if denials.iter().any(|denial| lower.contains(denial)) {
        Event::Denied(text)
    } else if lower.contains("slow consumer") {
        Event::SlowConsumer
    } else {
        Event::Trouble(text)
    }
}

/// Full jitter: anything between nothing and an exponentially growing, capped bound. `attempt` counts from 1.
pub fn reconnect_delay(attempt: usize, first: Duration, max: Duration, random: u64) -> Duration {
    let doublings = u32::try_from(attempt.saturating_sub(1)).unwrap_or(u32::MAX);
    let bound = first.checked_mul(2u32.checked_pow(doublings).unwrap_or(u32::MAX)).unwrap_or(max).min(max);
    let bound_us = u64::try_from(bound.as_micros()).unwrap_or(u64::MAX);
    match bound_us.checked_add(1) {
        Some(choices) => Duration::from_micros(random % choices),
        None => Duration::from_micros(random),
    }
}

fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Token and seed of a credentials file.
fn credentials(path: &Path) -> std::io::Result<(String, nkeys::KeyPair)> {
    let text = std::fs::read_to_string(path)?;
    let wrong = |what: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, format!("it holds no {what}"));
    let token = block(&text, "USER JWT").ok_or_else(|| wrong("token"))?;
    let seed = block(&text, "USER NKEY SEED").ok_or_else(|| wrong("seed"))?;
    Ok((token, nkeys::KeyPair::from_seed(&seed).map_err(|_| wrong("seed that can be used"))?))
}

/// Shows the server that the credential in the file, as it is now, is one's own.
fn proof(path: &Path, nonce: &[u8]) -> Result<async_nats::Auth, async_nats::AuthError> {
    let (token, key) = credentials(path).map_err(async_nats::AuthError::new)?;
    let mut auth = async_nats::Auth::new();
    auth.signature = Some(key.sign(nonce).map_err(async_nats::AuthError::new)?);
    auth.jwt = Some(token);
    Ok(auth)
}

/// Connects, and returns the client with everything that happens to it.
pub async fn connect(options: Options) -> Result<(Client, Events), Error> {
    if options.servers.is_empty() {
        return Err(Error::NoServer);
    }
    let servers = tls::judge(&options.servers)?;
    // A file that cannot be used is named at once, and not as one more attempt that failed.
    if let Some(problem) = options.tls.problems().into_iter().next() {
        return Err(Error::Tls(problem));
    }
    let tls_required = options.tls.is_required(&options.servers);
    let (sender, queue) = mpsc::channel(EVENTS_MAX);
    let missed = Arc::new(AtomicBool::new(false));
    let max = options.reconnect_delay_max;
    let chooser = Chooser::new(max, sender.downgrade());
    let (role, home_after) = (options.role, options.home_after);
    let events = Events { queue, missed: missed.clone(), chooser: chooser.clone(), servers: servers.clone(), role, home_after };
    // A process that starts connects at once; only what lost a connection waits.
    let started = AtomicBool::new(false);
    let (choosing, heard, in_background) = (chooser.clone(), chooser.clone(), options.in_background);
    let mut ours = match &options.identity {
        Identity::File(path) => {
            // One that cannot be used is told at once, and not with every attempt.
            credentials(path).map_err(|source| Error::Credentials { path: path.clone(), source })?;
            // Under another name than the credential's nothing would ever be answered.
            held::name(Some(path), Some(&options.name))?;
            let path = path.clone();
            ConnectOptions::with_auth_callback(move |nonce| std::future::ready(proof(&path, &nonce)))
        }
        _ => ConnectOptions::new(),
    };
    ours = ours
        .name(format!("{} {}", options.role.as_str(), options.name))
        .custom_inbox_prefix(options.role.inbox_prefix(&options.name))
        .connection_timeout(CONNECT_TIMEOUT)
        .ping_interval(PING_EVERY)
        // A server names others in its first line, which anybody in between can write, and the client library would connect to them as they are
        // written there, also without encryption. Only servers that an operator has named are connected to.
        .ignore_discovered_servers()
        .max_reconnects(None)
        .reconnect_delay_callback(move |attempt| {
            if started.swap(true, Ordering::Relaxed) {
                reconnect_delay(attempt, RECONNECT_DELAY_FIRST, max, random())
            } else {
                Duration::ZERO
            }
        })
        // Servers that greeted come first; what is lost is found again as `choose` says.
        .retain_servers_order()
        .reconnect_to_server_callback(move |pool, last| {
            // The first attempt of a process that waits for it tries each server once, and says why none would do.
            let is_first = last.server_id.is_empty() && !in_background;
            let next = (!is_first).then(|| {
                let servers = pool.into_iter().map(|server| server.addr).collect();
                tokio::spawn(choosing.clone().next(servers))
            });
            async move {
                match next {
                    Some(next) => next.await.ok(),
                    None => None,
                }
            }
        })
        .event_callback(move |event| {
            let event = classify(&event);
            match &event {
                Event::Connected => heard.connected(),
                Event::LeavingServer => heard.leaving.notify_one(),
                _ => {}
            }
            if let Event::Denied(reason) = &event {
                tracing::error!(%reason, "the bus denies this client something");
            }
            if let Event::Trouble(reason) = &event {
                tracing::warn!(%reason, tls_required, "trouble with the bus");
            }
            if sender.try_send(event).is_err() {
                missed.store(true, Ordering::Release);
            }
            std::future::ready(())
        });
    ours = match options.identity {
        Identity::Nobody | Identity::File(_) => ours,
        Identity::Text(text) => ours.credentials(&text).map_err(Error::NoCredentials)?,
        Identity::Seed(seed) => ours.nkey(seed),
    };
    if tls_required {
        ours = ours.require_tls(true);
    }
    if let Some(authority) = options.tls.authority {
        ours = ours.add_root_certificates(authority);
    }
    if let Some((certificate, key)) = options.tls.certificate {
        ours = ours.add_client_certificate(certificate, key);
    }
    if options.in_background {
        ours = ours.retry_on_initial_connect();
    }
    let mut order = servers;
    if order.len() > 1
        && !options.in_background
        && let Some(first) = chooser.greeting(&order, GREETED_WITHIN).await
    {
        order.sort_by_key(|server| *server != first);
    }
    let servers = options.servers.join(", ");
    let client = ours.connect(order).await.map_err(|source| Error::Connect { servers, tls_required, source })?;
    Ok((client, events))
}

/// Waits until the server has handled everything this client sent before: subscriptions are in force, publications routed.
///
/// The client library's own flush only empties its buffer into the socket and waits for no answer. In a cluster this says
/// nothing about the other nodes. Needs the right to publish to one's own inbox, which viewers lack.
pub async fn settle(client: &Client, within: Duration) -> Result<(), Error> {
    let round_trip = async {
        let inbox = client.new_inbox();
        let mut back = client.subscribe(inbox.clone()).await.ok()?;
        client.publish(inbox, "".into()).await.ok()?;
        back.next().await.map(drop)
    };
    match tokio::time::timeout(within, round_trip).await {
        Ok(Some(())) => Ok(()),
        Ok(None) | Err(_) => Err(Error::NotSettled { within }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_grows_to_its_cap_and_is_anything_below() {
        let (first, max) = (Duration::from_millis(500), Duration::from_secs(30));
        for (attempt, bound) in [(0, 500), (1, 500), (2, 1_000), (3, 2_000), (7, 30_000), (64, 30_000), (usize::MAX, 30_000)] {
            let bound = Duration::from_millis(bound);
            assert_eq!(reconnect_delay(attempt, first, max, 0), Duration::ZERO);
            let bound_us = bound.as_micros() as u64;
            assert_eq!(reconnect_delay(attempt, first, max, bound_us), bound, "attempt {attempt}");
            assert_eq!(reconnect_delay(attempt, first, max, bound_us + 1), Duration::ZERO, "attempt {attempt}");
        }
        assert_eq!(reconnect_delay(9, first, Duration::ZERO, 7), Duration::ZERO);
        assert!(reconnect_delay(9, Duration::MAX, Duration::MAX, u64::MAX) > max);
    }

    #[test]
    fn the_servers_words_are_sorted() {
        let denied = [
            "Permissions Violation for Subscription to \"gc.w.>\"",
            "Permissions Violation for Publish to \"gc.w.leader\"",
            "Authorization Violation",
            "User Authentication Revoked",
            "User Authentication Expired",
            "Account Authentication Expired",
        ];
        for text in denied {
            assert_eq!(judge(text.to_owned()), Event::Denied(text.to_owned()));
        }
        assert_eq!(judge("Slow Consumer".to_owned()), Event::SlowConsumer);
        assert_eq!(judge("Maximum Payload Violation".to_owned()), Event::Trouble("Maximum Payload Violation".to_owned()));
    }

    #[tokio::test]
    async fn a_reader_that_sleeps_is_told_that_it_missed_something() {
        let (sender, queue) = mpsc::channel(1);
        let missed = Arc::new(AtomicBool::new(false));
        let chooser = Chooser::new(Duration::ZERO, sender.downgrade());
        let mut events =
            Events { queue, missed: missed.clone(), chooser, servers: Vec::new(), role: Role::Host, home_after: HOME_AFTER };
        sender.try_send(Event::Connected).unwrap();
        assert!(sender.try_send(Event::SlowConsumer).is_err());
        missed.store(true, Ordering::Release);
        drop(sender);
        assert_eq!(events.next().await, Some(Event::Missed));
        assert_eq!(events.next().await, Some(Event::Connected));
        assert_eq!(events.next().await, None);
    }
}
