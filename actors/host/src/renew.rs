//! Renews this host's credential before it expires, through one of the gateways, with the key it has and without an operator.
//!
//! The credential at hand stays until the bus has taken the new one: a gateway that signs with a wrong key cuts nobody off. The
//! connection is then made anew with it, at once and not when the server ends the old one. What is in force stays in force.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::credentials::{OwnKey, life_of};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::config::Config;
use crate::host;
use crate::inbox::{self, Inbox};
use crate::join::{Error, Gateway, Tried, in_turn, renewed};

/// The file is looked at this often: an operator may have replaced it.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Longest and shortest wait after a failure.
const RETRY_MAX: Duration = Duration::from_secs(300);
const RETRY_MIN: Duration = Duration::from_secs(1);
/// The bus takes a new credential within this time, or does not.
const TAKEN_WITHIN: Duration = Duration::from_secs(20);

/// What is said about the credential.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credential {
    /// In seconds since 1970; nothing for one that never expires, or where there is none.
    pub expires_at: Option<u64>,
    /// How often this run of the agent has renewed it.
    pub renewals: u64,
    /// Why it is not renewed.
    pub problem: Option<String>,
}

impl Credential {
    /// For `/metrics`.
    pub fn metrics(&self) -> String {
        let rows = [
            (
                "credential_expires_at",
                "When the credential expires, in seconds since 1970; 0: never.",
                self.expires_at.unwrap_or(0),
            ),
            ("credential_renewals", "How often the credential was renewed.", self.renewals),
            ("credential_problem", "Whether the credential cannot be renewed.", u64::from(self.problem.is_some())),
        ];
        let line = |(name, words, value)| {
            format!(
                "# HELP groupcast_agent_{name} {words}\n# TYPE groupcast_agent_{name} gauge\ngroupcast_agent_{name} {value}\n"
            )
        };
        rows.map(line).concat()
    }
}

/// How long to wait before a credential is renewed: until between three fifths and two thirds of its life have passed, so that hosts
/// that joined together do not renew together. `random` is anything.
fn wait(issued_at: u64, expires_at: u64, now: u64, random: u64) -> Duration {
    let life = expires_at.saturating_sub(issued_at);
    let (earliest, latest) = (life / 5 * 3 + life % 5 * 3 / 5, life / 3 * 2 + life % 3 * 2 / 3);
    let after = earliest + random % (latest.saturating_sub(earliest) + 1);
    Duration::from_secs(issued_at.saturating_add(after).saturating_sub(now))
}

/// How long to wait after a failure: a short life leaves less time.
fn retry(issued_at: u64, expires_at: u64) -> Duration {
    Duration::from_secs(expires_at.saturating_sub(issued_at) / 20).clamp(RETRY_MIN, RETRY_MAX)
}

/// Renews for as long as the agent runs.
pub fn start(config: &Config, inbox: Arc<Inbox>) -> watch::Receiver<Credential> {
    let (telling, told) = watch::channel(Credential::default());
    if let Some(path) = config.credentials.clone() {
        let random = host::random().unwrap_or(0);
        tokio::spawn(Task { config: config.clone(), inbox, random, telling }.run(path));
    }
    told
}

struct Task {
    config: Config,
    inbox: Arc<Inbox>,
    random: u64,
    telling: watch::Sender<Credential>,
}

impl Task {
    async fn run(self, path: std::path::PathBuf) {
        loop {
            let pause = match self.look(&path).await {
                Ok(pause) => {
                    self.telling.send_modify(|told| told.problem = None);
                    pause
                }
                Err((pause, error)) => {
                    let problem = error.to_string();
                    if self.telling.borrow().problem.as_ref() != Some(&problem) {
                        tracing::error!(%problem, "the credential is not renewed");
                    }
                    self.telling.send_modify(|told| told.problem = Some(problem));
                    pause
                }
            };
            tokio::time::sleep(pause.min(LOOK_EVERY)).await;
        }
    }

    /// Renews the credential if it is time to; when to look again.
    async fn look(&self, path: &Path) -> Result<Duration, (Duration, Error)> {
        let (key, token) = self.held(path).map_err(|error| (LOOK_EVERY, error))?;
        let life = life_of(&token);
        self.telling.send_if_modified(|told| {
            let expires_at = life.map(|(_, expires_at)| expires_at);
            std::mem::replace(&mut told.expires_at, expires_at) != expires_at
        });
        let Some((issued_at, expires_at)) = life else { return Ok(LOOK_EVERY) };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let pause = wait(issued_at, expires_at, now, self.random);
        if self.config.gateways.is_empty() {
            return Err((LOOK_EVERY, Error::NoGateway(expires_at.saturating_sub(now))));
        }
        if !pause.is_zero() {
            return Ok(pause);
        }
        self.renew(path, &key, &token, expires_at).await.map_err(|error| (retry(issued_at, expires_at), error))?;
        // What there is now says when to look next.
        Ok(Duration::ZERO)
    }

    fn held(&self, path: &Path) -> Result<(OwnKey, String), Error> {
        Ok(OwnKey::of_file(&std::fs::read_to_string(path)?)?)
    }

    /// What this gateway signs, and the bus takes.
    async fn taken(&self, gateway: &Gateway, key: &OwnKey, token: &str, expires_at: u64) -> Result<String, Error> {
        let new = renewed(&self.config.host, gateway, key, token).await?;
        if life_of(&new).is_none_or(|(_, new)| new < expires_at) {
            return Err(Error::Shorter);
        }
        let text = key.file_text(&self.config.host, &new)?;
        let taken = tokio::time::timeout(TAKEN_WITHIN, connect::connect(inbox::options(&self.config, Identity::Text(text))));
        let (probe, _events) = taken.await.map_err(|_| connect::Error::NotSettled { within: TAKEN_WITHIN })??;
        drop(probe);
        Ok(new)
    }

    /// Hosts begin with different gateways, so that one does not sign for all.
    async fn renew(&self, path: &Path, key: &OwnKey, token: &str, expires_at: u64) -> Result<(), Error> {
        let gateways = &self.config.gateways;
        let (mut tried, mut taken) = (Tried::of(gateways), None);
        for gateway in in_turn(gateways, self.random as usize) {
            match self.taken(gateway, key, token, expires_at).await {
                Ok(new) => {
                    taken = Some(new);
                    break;
                }
                Err(error) => tried.failed(gateway, error)?,
            }
        }
        let Some(new) = taken else { return Err(tried.none()) };
        // An operator may have put another one there meanwhile: that one counts.
        if self.held(path)?.1 != token {
            return Ok(());
        }
        key.save(&self.config.host, &new, path)?;
        self.inbox.reconnect().await;
        tracing::info!(expires_at = life_of(&new).map(|(_, at)| at), "the credential is renewed");
        self.telling.send_modify(|told| told.renewals += 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_renewed_between_three_fifths_and_two_thirds_of_its_life() {
        for random in [0, 1, 77, u64::MAX] {
            let pause = wait(1_000, 1_300, 1_000, random).as_secs();
            assert!((180..=200).contains(&pause), "{random}: {pause}");
            assert_eq!(wait(1_000, 1_300, 1_200, random), Duration::ZERO, "{random}");
            assert_eq!(wait(1_000, 1_300, u64::MAX, random), Duration::ZERO, "long expired");
        }
        // Numbers that no gateway of ours writes are no reason to fall over.
        for (issued_at, expires_at) in [(0, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX, 0), (5, 5), (7, 6)] {
            let _ = wait(issued_at, expires_at, 0, u64::MAX);
        }
        assert_eq!(retry(0, 6), RETRY_MIN);
        assert_eq!(retry(0, 2_000), Duration::from_secs(100));
        assert_eq!(retry(0, u64::MAX), RETRY_MAX);
    }
}
