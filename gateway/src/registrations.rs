//! Registrations between controllers and gateways: how long silence is forgiven, as operators set it; and what gateways ask of the
//! controller that leads, which alone judges silence.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::{Client, RequestErrorKind};
use clap::Args;
use futures::StreamExt;
use groupcast_bus_config::settings::optional_duration;
use groupcast_bus_config::{connect, subjects};
use groupcast_control::actors::liveness::ShownHost;
use groupcast_control::controller::{Controller, Settings};
use groupcast_control::document::GuardRecord;
use groupcast_control::registration::settings as registration;
use groupcast_policy::ids::{HostId, TemplateId};
use serde::{Deserialize, Serialize};

/// Hosts asked about in one message.
pub const HOSTS_MAX: usize = 1_000;
/// How long the leader has to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// How long it has to carry an operator's word out.
const DONE_WITHIN: Duration = Duration::from_secs(10);
/// Pause before something that failed is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RegistrationOptions {
    /// A host that is silent for so long is suspect; several beats of 15 s [default: 60s]
    #[arg(id = "registration_lease", long = "registration-lease", value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub lease: Option<Duration>,
    /// A host that is suspect for so long is deleted [default: 60s]
    #[arg(id = "registration_grace", long = "registration-grace", value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub grace: Option<Duration>,
    /// How often silence is looked at [default: 1s]
    #[arg(id = "registration_sweep", long = "registration-sweep", value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub sweep: Option<Duration>,
    /// How long a deletion counts among what vanished at once [default: 300s]
    #[arg(id = "registration_guard_window", long = "registration-guard-window", value_parser = humantime::parse_duration)]
    #[serde(deserialize_with = "optional_duration")]
    pub guard_window: Option<Duration>,
    /// Percentage of a template's hosts that may be silent at once [default: 5]
    #[arg(id = "registration_guard_percent", long = "registration-guard-percent")]
    pub guard_percent: Option<u32>,
    /// Number of a template's hosts that may be silent at once, where it is more than the percentage [default: 20]
    #[arg(id = "registration_guard_hosts", long = "registration-guard-hosts")]
    pub guard_hosts: Option<u32>,
    /// Hosts deleted in one second at most [default: 10]
    #[arg(id = "registration_deletions_per_second", long = "registration-deletions-per-second")]
    pub deletions_per_second: Option<u32>,
}

impl RegistrationOptions {
    /// What is not said here is taken from there.
    pub fn or(self, other: Self) -> Self {
        Self {
            lease: self.lease.or(other.lease),
            grace: self.grace.or(other.grace),
            sweep: self.sweep.or(other.sweep),
            guard_window: self.guard_window.or(other.guard_window),
            guard_percent: self.guard_percent.or(other.guard_percent),
            guard_hosts: self.guard_hosts.or(other.guard_hosts),
            deletions_per_second: self.deletions_per_second.or(other.deletions_per_second),
        }
    }

    pub fn settings(&self) -> Result<registration::Settings, registration::Invalid> {
        let usual = registration::Settings::default();
        let settings = registration::Settings {
            lease: self.lease.unwrap_or(usual.lease),
            grace: self.grace.unwrap_or(usual.grace),
            sweep: self.sweep.unwrap_or(usual.sweep),
            guard_window: self.guard_window.unwrap_or(usual.guard_window),
            guard_percent: self.guard_percent.unwrap_or(usual.guard_percent),
            guard_hosts: self.guard_hosts.unwrap_or(usual.guard_hosts),
            deletions_per_second: self.deletions_per_second.unwrap_or(usual.deletions_per_second),
        };
        settings.check().map(|()| settings)
    }
}

/// What a gateway asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Ask {
    Hosts(Vec<HostName>),
    Leader,
    Frozen,
    Confirm { template: String },
    Remove { host: HostName, by: String },
}

type HostName = String;

/// What the leader answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Hosts(Vec<ShownHost>),
    Leader(Leader),
    Frozen(Vec<GuardRecord>),
    Done { workloads: usize },
    Failed { why: String },
}

/// Who leads, and what it knows of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    pub name: String,
    pub term: u64,
    /// It has compared what is written with what is published, and publishes.
    pub publishes: bool,
    /// Its clock, in milliseconds since 1970.
    pub now_ms: u64,
    /// Hosts that enrolled themselves and are silent.
    pub suspects: usize,
    /// Templates of which too many hosts are silent at once: none of these is deleted.
    #[serde(default)]
    pub frozen: Vec<String>,
    /// The connection on which it hears hosts is away.
    #[serde(default)]
    pub deaf: bool,
}

impl Leader {
    pub fn at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(self.now_ms)).unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// The controller's side, for as long as the process lasts.
pub async fn serve(settings: Settings, controller: Arc<Controller>) {
    loop {
        if let Err(error) = serve_once(&settings, &controller).await {
            tracing::warn!(%error, "gateways cannot be told who is registered; trying again");
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn serve_once(settings: &Settings, controller: &Controller) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (client, events) = connect::connect(settings.options()).await?;
    let _guard = events.guard(&client);
    let mut asked = client.subscribe(subjects::REGISTRATIONS).await?;
    while let Some(message) = asked.next().await {
        let (Some(reply), Ok(ask)) = (message.reply, serde_json::from_slice::<Ask>(&message.payload)) else { continue };
        // Who does not lead is silent: whoever does answers.
        if let Some(answer) = answer(settings, controller, ask).await? {
            client.publish(reply, serde_json::to_vec(&answer)?.into()).await?;
        }
    }
    Ok(())
}

async fn answer(
    settings: &Settings,
    controller: &Controller,
    ask: Ask,
) -> Result<Option<Answer>, groupcast_control::controller::Error> {
    Ok(match ask {
        Ask::Leader => {
            let status = controller.status().await?;
            let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let leader = |term| Leader {
                name: settings.name.to_string(),
                term,
                publishes: status.compiler.publishing,
                now_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
                suspects: status.liveness.suspects,
                frozen: status.liveness.frozen.iter().map(|record| record.template.clone()).collect(),
                deaf: status.deaf,
            };
            status.compiler.leading.map(|term| Answer::Leader(leader(term)))
        }
        Ask::Hosts(hosts) => {
            let hosts = hosts.iter().take(HOSTS_MAX).filter_map(|host| HostId::new(host).ok()).collect();
            controller.hosts(hosts).await?.map(Answer::Hosts)
        }
        Ask::Frozen => {
            let liveness = controller.status().await?.liveness;
            liveness.acts.then_some(Answer::Frozen(liveness.frozen))
        }
        Ask::Confirm { template } => match TemplateId::new(&template) {
            Ok(template) => controller.confirm(template).await?.then_some(Answer::Done { workloads: 0 }),
            Err(error) => Some(Answer::Failed { why: error.to_string() }),
        },
        Ask::Remove { host, by } => match HostId::new(&host) {
            _ if !controller.status().await?.liveness.acts => None,
            Ok(host) => Some(match controller.expel(host, by).await? {
                Ok(workloads) => Answer::Done { workloads },
                Err(why) => Answer::Failed { why },
            }),
            Err(error) => Some(Answer::Failed { why: error.to_string() }),
        },
    })
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Silent {
    #[error("no controller runs: start one, then try again")]
    NoController,
    #[error("no controller leads at present: try again")]
    NoLeader,
    #[error("the leading controller could not: {0}")]
    Failed(String),
}

/// The gateway's side.
#[derive(Clone)]
pub struct Registrations {
    client: Client,
}

impl Registrations {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    async fn ask(&self, ask: &Ask, within: Duration) -> Result<Answer, Silent> {
        let request =
            async_nats::Request::new().payload(serde_json::to_vec(ask).unwrap_or_default().into()).timeout(Some(within));
        match self.client.send_request(subjects::REGISTRATIONS, request).await {
            Ok(message) => match serde_json::from_slice(&message.payload) {
                Ok(Answer::Failed { why }) => Err(Silent::Failed(why)),
                Ok(answer) => Ok(answer),
                Err(error) => Err(Silent::Failed(format!("its answer cannot be read: {error}"))),
            },
            Err(error) if error.kind() == RequestErrorKind::NoResponders => Err(Silent::NoController),
            Err(_) => Err(Silent::NoLeader),
        }
    }

    /// How these hosts are; those the leader does not know are left out.
    pub async fn hosts(&self, hosts: Vec<String>) -> Result<Vec<ShownHost>, Silent> {
        if hosts.is_empty() {
            return Ok(Vec::new());
        }
        match self.ask(&Ask::Hosts(hosts), ANSWER_WITHIN).await? {
            Answer::Hosts(hosts) => Ok(hosts),
            other => Err(strange(&other)),
        }
    }

    /// Who leads.
    pub async fn leader(&self) -> Result<Leader, Silent> {
        match self.ask(&Ask::Leader, ANSWER_WITHIN).await? {
            Answer::Leader(leader) => Ok(leader),
            other => Err(strange(&other)),
        }
    }

    /// Templates of which nothing is deleted at present.
    pub async fn frozen(&self) -> Result<Vec<GuardRecord>, Silent> {
        match self.ask(&Ask::Frozen, ANSWER_WITHIN).await? {
            Answer::Frozen(frozen) => Ok(frozen),
            other => Err(strange(&other)),
        }
    }

    /// The silent hosts of this template are gone for good.
    pub async fn confirm(&self, template: &TemplateId) -> Result<(), Silent> {
        self.ask(&Ask::Confirm { template: template.to_string() }, DONE_WITHIN).await.map(drop)
    }

    /// Takes away what a host has enrolled; how many workloads.
    pub async fn remove(&self, host: &HostId, by: &str) -> Result<usize, Silent> {
        match self.ask(&Ask::Remove { host: host.to_string(), by: by.to_owned() }, DONE_WITHIN).await? {
            Answer::Done { workloads } => Ok(workloads),
            other => Err(strange(&other)),
        }
    }
}

fn strange(answer: &Answer) -> Silent {
    Silent::Failed(format!("its answer is none to what was asked: {answer:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_first_counts_and_what_cannot_work_is_refused() {
        let flags = RegistrationOptions { lease: Some(Duration::from_secs(1)), ..Default::default() };
        let file = RegistrationOptions { lease: Some(Duration::from_secs(9)), guard_hosts: Some(7), ..Default::default() };
        let settings = flags.or(file).settings().unwrap();
        assert_eq!((settings.lease, settings.guard_hosts, settings.guard_percent), (Duration::from_secs(1), 7, 5));
        let wrong = RegistrationOptions { grace: Some(Duration::ZERO), ..Default::default() };
        assert!(wrong.settings().unwrap_err().to_string().contains("registration.grace"));
    }

    #[test]
    fn what_goes_over_the_bus_reads_back() {
        let asks = [
            Ask::Hosts(vec!["h1".into()]),
            Ask::Leader,
            Ask::Frozen,
            Ask::Confirm { template: "t".into() },
            Ask::Remove { host: "h".into(), by: "me".into() },
        ];
        for ask in asks {
            assert_eq!(serde_json::from_slice::<Ask>(&serde_json::to_vec(&ask).unwrap()).unwrap(), ask);
        }
    }
}
