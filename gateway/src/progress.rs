//! How far changes are, from the controller that published them to the gateways that are asked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, RequestErrorKind};
use futures::StreamExt;
use groupcast_bus_config::{connect, subjects};
use groupcast_control::controller::{Controller, Settings, Standing};
use groupcast_control::progress as control;
use groupcast_messages::HostState;
use groupcast_policy::ids::HostId;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::api::PAGE_MAX;

/// Hosts behind that are named to gateways.
pub const BEHIND_MAX: usize = 100;
/// Progress that waits for a slow watcher before it is cut off.
const MOVES_MAX: usize = 256;
/// Pauses between questions about a change that is waited for: a quarter of how long it already took, within these bounds. So whoever waits
/// hears of it at most that much later, and questions are few.
const ASK_MIN: Duration = Duration::from_millis(2);
const ASK_MAX: Duration = Duration::from_millis(200);
/// How long the answer to one of them may take.
const ASK_WITHIN_MIN: Duration = Duration::from_millis(5);
/// How long the controllers have to say what they know when nobody waits.
const ASK_ONCE: Duration = Duration::from_millis(300);
/// Pause before something that failed is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Behind {
    pub host: String,
    /// `waiting`, `unreachable`, `error`, `frozen`, `bypassed`, `lockdown`, `auditing`, `auditing-some` or `dry-run`; an agent of a newer
    /// version may say more.
    pub state: String,
    /// In words.
    pub why: String,
}

impl Behind {
    /// The host says itself that it could not put it in force.
    pub fn failed(&self) -> bool {
        ["failing", "error"].contains(&self.state.as_str())
    }

    /// Waiting does not help: somebody has to do something there.
    pub fn is_held(&self) -> bool {
        !["waiting", "unreachable"].contains(&self.state.as_str())
    }

    /// What its state means for the policy, and what to do about it.
    pub fn advice(&self) -> &'static str {
        match self.state.as_str() {
            "waiting" => "it was told, and goes on by itself",
            "unreachable" => "nothing was heard of it since; it gets the change when it is back",
            "failing" | "error" => "it keeps the last good policy; see `groupcast-agent status` there",
            "frozen" => "it takes no changes until `groupcast-agent resume REASON` there",
            "bypassed" => "everything passes there until `groupcast-agent resume REASON` there",
            "lockdown" => "nothing claimed passes there until `groupcast-agent resume REASON` there",
            "auditing" => {
                "what is denied passes there, logged, until `groupcast-agent resume REASON`, or `audit` leaves its agent.toml"
            }
            "auditing-some" => {
                "what is denied to these workloads passes, logged, until `groupcast-agent workload audit WORKLOAD off` there"
            }
            "dry-run" => "its agent touches no kernel: run it without --dry-run",
            _ => "its agent is newer than this side: see `groupcast-agent status` there",
        }
    }
}

/// How far a change is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    pub change: u64,
    /// Hosts it concerns.
    pub span: u32,
    /// Hosts that have it and enforce it.
    pub enforced: u32,
    pub done: bool,
    /// Milliseconds from its publication until so many hosts had it in force.
    pub first_ms: Option<u32>,
    pub p50_ms: Option<u32>,
    pub p99_ms: Option<u32>,
    pub last_ms: Option<u32>,
    /// Up to 100 hosts that have it not, or have it and do something else with it.
    pub behind: Vec<Behind>,
}

impl From<&control::Progress> for Progress {
    fn from(progress: &control::Progress) -> Self {
        let named = |(host, why): &(HostId, control::Why)| Behind {
            host: host.to_string(),
            state: why.name().to_owned(),
            why: why.to_string(),
        };
        let summary = &progress.summary;
        Self {
            change: progress.change,
            span: progress.span,
            enforced: progress.enforced(),
            done: progress.is_done(),
            first_ms: summary.first_ms,
            p50_ms: summary.p50_ms,
            p99_ms: summary.p99_ms,
            last_ms: summary.last_ms,
            behind: progress.behind.iter().take(BEHIND_MAX).map(named).collect(),
        }
    }
}

/// What a host does, as it says itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostStanding {
    /// `enforcing`, `failing`, `frozen`, `bypassed`, `lockdown`, `auditing`, `auditing-some` or `dry-run`; an agent of a newer version may
    /// say more.
    pub state: String,
    /// Why, where it is not enforcing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Workloads of which it lets pass what is denied, as many as it names, ...
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub audited: Vec<String>,
    /// ... and how many there are.
    #[serde(default)]
    pub audited_total: u32,
    /// Milliseconds since it was last heard of.
    pub heard_ms_ago: u64,
    /// Something is published that it has not in force.
    pub behind: bool,
    /// For how many milliseconds at least.
    #[serde(default)]
    pub behind_ms: u64,
}

impl From<&Standing> for HostStanding {
    fn from(standing: &Standing) -> Self {
        let (state, reason) = (standing.state.name().to_owned(), standing.state.reason().to_owned());
        let (audited, audited_total) = match &standing.state {
            HostState::AuditingSome { workloads, total, .. } => (workloads.iter().map(ToString::to_string).collect(), *total),
            _ => (Vec::new(), 0),
        };
        let Standing { heard_ms_ago, is_behind: behind, behind_ms, .. } = *standing;
        Self { state, reason, audited, audited_total, heard_ms_ago, behind, behind_ms }
    }
}

/// What gateways ask.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Ask {
    Change {
        change: u64,
        /// When the stream was made that counts it so, where that is known: another one gives the number to another change.
        #[serde(default)]
        stream: String,
    },
    Hosts {
        hosts: Vec<String>,
    },
}

/// The controller's side: answers what it knows and tells what moves, for as long as the process lasts.
pub async fn serve(settings: Settings, controller: Arc<Controller>) {
    loop {
        if let Err(error) = serve_once(&settings, &controller).await {
            tracing::warn!(%error, "gateways cannot be told how far changes are; trying again");
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn serve_once(settings: &Settings, controller: &Controller) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (client, events) = connect::connect(settings.options()).await?;
    let _guard = events.guard(&client);
    let mut asked = client.subscribe(subjects::PROGRESS).await?;
    let mut moves = controller.watch().await?;
    loop {
        tokio::select! {
            message = asked.next() => {
                let Some(message) = message else { return Ok(()) };
                let (Some(reply), Ok(ask)) = (message.reply, serde_json::from_slice::<Ask>(&message.payload)) else { continue };
                let answer = match ask {
                    // Who did not publish it says nothing: somebody else did.
                    Ask::Change { stream, .. } if !stream.is_empty() && stream != controller.catalog_stream() => continue,
                    Ask::Change { change, .. } => match controller.progress(change).await? {
                        Some(progress) => serde_json::to_vec(&Progress::from(&progress))?,
                        None => continue,
                    },
                    Ask::Hosts { hosts } => {
                        let hosts = hosts.iter().take(PAGE_MAX).filter_map(|host| HostId::new(host).ok()).collect();
                        let known = controller.standings(hosts).await?;
                        let known: BTreeMap<String, HostStanding> = known.iter().map(|(h, s)| (h.to_string(), s.into())).collect();
                        serde_json::to_vec(&known)?
                    }
                };
                client.publish(reply, answer.into()).await?;
            }
            moved = moves.recv() => match moved {
                Ok(progress) => {
                    client.publish(subjects::PROGRESSED, serde_json::to_vec(&Progress::from(&*progress))?.into()).await?;
                }
                // What was missed is asked for.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            }
        }
    }
}

/// The gateway's side.
#[derive(Clone)]
pub struct Watcher {
    client: Client,
    /// When the CATALOG that this gateway follows was made.
    stream: watch::Receiver<String>,
    moves: broadcast::Sender<Arc<Progress>>,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    Published,
    Enforced,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    Progress(Progress),
    /// No controller published it, or those that did have forgotten it.
    Nothing,
    /// No controller listens.
    NoController,
}

impl Watcher {
    pub fn start(client: &Client, stream: watch::Receiver<String>) -> Self {
        let watcher = Self { client: client.clone(), stream, moves: broadcast::channel(MOVES_MAX).0 };
        let listening = watcher.clone();
        tokio::spawn(async move {
            loop {
                if let Ok(mut told) = listening.client.subscribe(subjects::PROGRESSED).await {
                    while let Some(message) = told.next().await {
                        if let Ok(progress) = serde_json::from_slice(&message.payload) {
                            let _ = listening.moves.send(Arc::new(progress)); // nobody watches
                        }
                    }
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        });
        watcher
    }

    pub fn moves(&self) -> broadcast::Receiver<Arc<Progress>> {
        self.moves.subscribe()
    }

    /// What the controllers know now.
    pub async fn ask(&self, change: u64) -> Known {
        self.ask_within(change, ASK_ONCE).await
    }

    /// What controllers know of these hosts, by the first that answers; `None` where none does in time.
    pub async fn hosts(&self, hosts: Vec<String>) -> Option<BTreeMap<String, HostStanding>> {
        let request = async_nats::Request::new()
            .payload(serde_json::to_vec(&Ask::Hosts { hosts }).unwrap_or_default().into())
            .timeout(Some(ASK_ONCE));
        let answer = self.client.send_request(subjects::PROGRESS, request).await;
        serde_json::from_slice(&answer.ok()?.payload).ok()
    }

    async fn ask_within(&self, change: u64, within: Duration) -> Known {
        let stream = self.stream.borrow().clone();
        let request = async_nats::Request::new()
            .payload(serde_json::to_vec(&Ask::Change { change, stream }).unwrap_or_default().into())
            .timeout(Some(within));
        match self.client.send_request(subjects::PROGRESS, request).await {
            Ok(message) => serde_json::from_slice(&message.payload).map_or(Known::Nothing, Known::Progress),
            Err(error) if error.kind() == RequestErrorKind::NoResponders => Known::NoController,
            Err(_) => Known::Nothing,
        }
    }

    async fn ask_from(&self, when: Instant, change: u64, within: Duration) -> Known {
        tokio::time::sleep_until(when).await;
        self.ask_within(change, within).await
    }

    /// Waits until the change is published or enforced everywhere, and says how far it is then or when the time is up.
    pub async fn wait(&self, change: u64, until: Until, deadline: Instant) -> Known {
        let enough = |progress: &Progress| until == Until::Published || progress.done;
        let (mut moves, mut known, begun) = (self.moves(), Known::Nothing, Instant::now());
        // Kept while it is told about others: it must be answered however much happens.
        let ask = self.ask_from(begun, change, ASK_WITHIN_MIN);
        tokio::pin!(ask);
        loop {
            tokio::select! {
                answer = &mut ask => {
                    match answer {
                        Known::Progress(progress) => known = Known::Progress(progress),
                        other if !matches!(known, Known::Progress(_)) => known = other,
                        _ => {}
                    }
                    let pause = (begun.elapsed() / 4).clamp(ASK_MIN, ASK_MAX);
                    ask.set(self.ask_from(Instant::now() + pause, change, pause.max(ASK_WITHIN_MIN)));
                }
                moved = moves.recv() => match moved {
                    Ok(progress) if progress.change == change => known = Known::Progress((*progress).clone()),
                    _ => {}
                },
                _ = tokio::time::sleep_until(deadline) => {}
            }
            match &known {
                Known::Progress(progress) if enough(progress) => return known,
                _ if Instant::now() >= deadline => return known,
                _ => {}
            }
        }
    }
}
