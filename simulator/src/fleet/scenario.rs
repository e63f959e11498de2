//! What a run does: read from a TOML file, with single values set on the command line.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

pub const HOSTS_MAX: u32 = 50_000;
pub const GROUPS_MAX: u64 = 1_000_000;
pub const CONTROLLERS_MAX: u32 = 9;
pub const CHANGES_PER_S_MAX: u32 = 20_000;
pub const PHASES_MAX: usize = 100;
pub const FAULTS_MAX: usize = 1_000;
pub const SPACES_MAX: u32 = 100_000;
/// As many as a lab on one machine holds.
pub const AGENTS_MAX: u32 = groupcast_bus_config::lab::HOSTS_MAX as u32;

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    humantime::parse_duration(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

fn some_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    duration(deserializer).map(Some)
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub name: String,
    pub about: String,
    pub hosts: u32,
    #[serde(default = "two")]
    pub controllers: u32,
    #[serde(default = "lease", deserialize_with = "duration")]
    pub lease: Duration,
    pub topology: Topology,
    /// How many hosts enforce on a model kernel that packets are tried on after every change; the others keep their documents only.
    #[serde(default)]
    pub kernels: Option<u32>,
    /// So many of the hosts are real agents in network namespaces, with real kernels; needs root.
    #[serde(default)]
    pub agents: u32,
    /// A Cloud Controller whose groups everybody has too, polled by the controllers.
    #[serde(default)]
    pub source: bool,
    /// A host that lost its connection comes back after a random time of up to this.
    #[serde(default = "reconnect", deserialize_with = "duration")]
    pub reconnect_jitter: Duration,
    /// After the last phase, how long everything may take to be equal again.
    #[serde(default = "settle", deserialize_with = "duration")]
    pub settle: Duration,
    pub phase: Vec<Phase>,
    #[serde(default)]
    pub fault: Vec<Fault>,
    #[serde(default)]
    pub thresholds: Vec<String>,
}

fn two() -> u32 {
    2
}

fn lease() -> Duration {
    Duration::from_secs(3)
}

fn reconnect() -> Duration {
    Duration::from_secs(10)
}

fn settle() -> Duration {
    Duration::from_secs(60)
}

/// Who uses what, drawn from distributions by the seed.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Groups that a host uses, beside those that everybody uses.
    pub groups_per_host: u32,
    /// How many hosts use a group: on average, and at most.
    pub span_mean: u32,
    pub span_max: u32,
    /// Groups that every host uses.
    #[serde(default)]
    pub groups_of_all: u32,
    /// Addresses of each group beside its users' own.
    pub members: u32,
    /// Rules of each group that name addresses, beside the one that names the group.
    #[serde(default)]
    pub rules: u32,
    /// Of a hundred groups, how many have a rule that names another group.
    #[serde(default)]
    pub references_percent: u32,
    /// Spaces that hosts are spread over, and the groups that are bound to each of them.
    #[serde(default)]
    pub spaces: u32,
    #[serde(default)]
    pub groups_per_space: u32,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    pub name: String,
    #[serde(deserialize_with = "duration")]
    pub duration: Duration,
    /// Changes a second, of a member of a group that some use.
    #[serde(default)]
    pub members_per_s: u32,
    /// How long after one another members of groups that all use change.
    #[serde(default, deserialize_with = "some_duration")]
    pub hot_every: Option<Duration>,
    /// Changes a second, of a rule.
    #[serde(default)]
    pub rules_per_s: u32,
    /// Changes a second, of the groups that a workload has.
    #[serde(default)]
    pub workloads_per_s: u32,
    /// What is measured here is left out of the totals.
    #[serde(default)]
    pub warm_up: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    pub kind: FaultKind,
    /// After the first phase began.
    #[serde(deserialize_with = "duration")]
    pub at: Duration,
    /// How long it lasts, where it lasts.
    #[serde(default, deserialize_with = "duration")]
    pub lasts: Duration,
    /// Percent of the hosts, where hosts are meant.
    #[serde(default = "hundred")]
    pub percent: u32,
    /// How much later things arrive, and how many of a hundred do not.
    #[serde(default, deserialize_with = "duration")]
    pub delay: Duration,
    #[serde(default)]
    pub loss: u32,
}

fn hundred() -> u32 {
    100
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// SIGKILL to the controller that leads, and another one in its place.
    KillLeader,
    /// SIGKILL to a controller that does not lead, and another one in its place.
    KillFollower,
    /// SIGSTOP to the controller that leads, SIGCONT when it is over.
    PauseLeader,
    /// SIGTERM to one controller after the other, each replaced before the next.
    RollControllers,
    /// SIGKILL to the server, which is started again when it is over.
    KillServer,
    /// SIGTERM to the server, which is started again when it is over.
    RestartServer,
    /// SIGSTOP to the server, SIGCONT when it is over.
    PauseServer,
    /// Connections of hosts are cut; each host comes back.
    CutHosts,
    /// Hosts end without a word and begin anew, knowing nothing; their kernels go on.
    CrashHosts,
    /// Hosts stand still; SIGSTOP to real agents.
    PauseHosts,
    /// Nothing reaches hosts and nothing leaves them, and nobody is told.
    PartitionHosts,
    /// Hosts do not read what they are sent.
    SlowHosts,
    /// Whatever hosts are sent arrives later by `delay`; by netem for real agents.
    DelayHosts,
    /// Of a hundred deltas `loss` never arrive; packets, by netem, for real agents.
    LoseDeliveries,
    /// Somebody publishes as a leader of an earlier term would, past the stream.
    StaleLeader,
    /// The groups of workloads change, of all chosen hosts at once.
    DeployWave,
    /// The source's server fails every request.
    SourceOutage,
}

impl FaultKind {
    pub fn name(self) -> &'static str {
        match self {
            FaultKind::KillLeader => "kill-leader",
            FaultKind::KillFollower => "kill-follower",
            FaultKind::PauseLeader => "pause-leader",
            FaultKind::RollControllers => "roll-controllers",
            FaultKind::KillServer => "kill-server",
            FaultKind::RestartServer => "restart-server",
            FaultKind::PauseServer => "pause-server",
            FaultKind::CutHosts => "cut-hosts",
            FaultKind::CrashHosts => "crash-hosts",
            FaultKind::PauseHosts => "pause-hosts",
            FaultKind::PartitionHosts => "partition-hosts",
            FaultKind::SlowHosts => "slow-hosts",
            FaultKind::DelayHosts => "delay-hosts",
            FaultKind::LoseDeliveries => "lose-deliveries",
            FaultKind::StaleLeader => "stale-leader",
            FaultKind::DeployWave => "deploy-wave",
            FaultKind::SourceOutage => "source-outage",
        }
    }

    /// Whether hosts are cut off, so that how long all of them need to be back is worth knowing.
    pub fn cuts_off(self) -> bool {
        use FaultKind::*;
        matches!(self, KillServer | RestartServer | PauseServer | CutHosts | CrashHosts | PauseHosts | PartitionHosts | SlowHosts)
    }
}

impl Phase {
    /// Changes a second that are measured one by one.
    pub fn changes_per_s(&self) -> f64 {
        let hot = self.hot_every.map_or(0.0, |every| 1.0 / every.as_secs_f64());
        f64::from(self.members_per_s) + f64::from(self.rules_per_s) + hot
    }
}

impl Scenario {
    /// `sets`: `key=value`, keys as in the file, `phase.0.duration=10s` for what is in a list.
    pub fn read(path: &Path, sets: &[String]) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the scenario {}", path.display()))?;
        Self::parse(&text, sets).with_context(|| format!("scenario {}", path.display()))
    }

    pub fn parse(text: &str, sets: &[String]) -> anyhow::Result<Self> {
        let mut value: toml::Value = toml::from_str(text)?;
        for set in sets {
            apply(&mut value, set)?;
        }
        let scenario: Scenario = value.try_into()?;
        scenario.check()?;
        Ok(scenario)
    }

    fn check(&self) -> anyhow::Result<()> {
        let Topology { groups_per_host, span_mean, span_max, .. } = self.topology;
        ensure!((1..=HOSTS_MAX).contains(&self.hosts), "hosts is {}, and must be from 1 to {HOSTS_MAX}", self.hosts);
        ensure!((1..=CONTROLLERS_MAX).contains(&self.controllers), "controllers must be from 1 to {CONTROLLERS_MAX}");
        ensure!(span_mean >= 1 && span_mean <= span_max, "topology.span_mean must be from 1 to topology.span_max");
        ensure!(span_max <= self.hosts, "topology.span_max is {span_max}, and there are only {} hosts", self.hosts);
        let groups = u64::from(self.hosts) * u64::from(groups_per_host) / u64::from(span_mean);
        ensure!(groups <= GROUPS_MAX, "this makes {groups} groups, and no more than {GROUPS_MAX} are allowed");
        ensure!(self.agents <= AGENTS_MAX.min(self.hosts), "agents must be at most {AGENTS_MAX} of the hosts");
        ensure!(self.topology.spaces <= SPACES_MAX, "topology.spaces must be at most {SPACES_MAX}");
        ensure!(self.topology.spaces > 0 || self.topology.groups_per_space == 0, "groups_per_space without spaces");
        ensure!(self.topology.references_percent <= 100, "topology.references_percent must be at most 100");
        for fault in &self.fault {
            let name = fault.kind.name();
            ensure!(fault.percent <= 100 && fault.loss <= 100, "fault {name}: percent and loss must be at most 100");
            ensure!(fault.kind != FaultKind::DelayHosts || !fault.delay.is_zero(), "fault {name}: delay must be set");
            ensure!(fault.kind != FaultKind::LoseDeliveries || fault.loss > 0, "fault {name}: loss must be set");
            ensure!(fault.kind != FaultKind::SourceOutage || self.source, "fault {name}: there is no source");
        }
        ensure!(!self.phase.is_empty() && self.phase.len() <= PHASES_MAX, "there must be from 1 to {PHASES_MAX} phases");
        ensure!(self.fault.len() <= FAULTS_MAX, "there must be at most {FAULTS_MAX} faults");
        for phase in &self.phase {
            let rate = phase.changes_per_s() + f64::from(phase.workloads_per_s);
            ensure!(rate <= f64::from(CHANGES_PER_S_MAX), "phase {}: at most {CHANGES_PER_S_MAX} changes a second", phase.name);
            ensure!(
                phase.hot_every.is_none() || self.topology.groups_of_all > 0,
                "phase {}: no group is everybody's",
                phase.name
            );
            let some = phase.members_per_s + phase.rules_per_s + phase.workloads_per_s;
            ensure!(some == 0 || groups > 0, "phase {}: there is no group that some use", phase.name);
        }
        Ok(())
    }

    pub fn duration(&self) -> Duration {
        self.phase.iter().map(|phase| phase.duration).sum()
    }

    /// Makes the phases take so long together, each its share of it.
    pub fn stretch(&mut self, total: Duration) {
        let factor = total.as_secs_f64() / self.duration().as_secs_f64().max(1e-9);
        self.phase.iter_mut().for_each(|phase| phase.duration = phase.duration.mul_f64(factor));
        for fault in &mut self.fault {
            fault.at = fault.at.mul_f64(factor);
            fault.lasts = fault.lasts.mul_f64(factor.min(1.0));
        }
    }
}

fn apply(value: &mut toml::Value, set: &str) -> anyhow::Result<()> {
    let (path, text) = set.split_once('=').with_context(|| format!("--set {set}: it must be KEY=VALUE"))?;
    let mut place = value;
    for part in path.split('.') {
        place = match place {
            toml::Value::Table(table) => table.entry(part).or_insert_with(|| toml::Value::Table(Default::default())),
            toml::Value::Array(list) => {
                let index: usize = part.parse().with_context(|| format!("--set {set}: {part:?} is no place in a list"))?;
                let len = list.len();
                list.get_mut(index).with_context(|| format!("--set {set}: the list has only {len}"))?
            }
            _ => bail!("--set {set}: {part:?} is in nothing"),
        };
    }
    // What reads as a number or a truth value is one, everything else is text.
    *place = match (text.parse::<i64>(), text.parse::<bool>()) {
        (Ok(number), _) => toml::Value::Integer(number),
        (_, Ok(truth)) => toml::Value::Boolean(truth),
        _ => toml::Value::String(text.to_owned()),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "name = 'small'\nabout = 'x'\nhosts = 10\n[topology]\ngroups_per_host = 2\nspan_mean = 2\nspan_max = 5\nmembers = 3\n\
                         [[phase]]\nname = 'a'\nduration = '2s'\nmembers_per_s = 5\n";

    #[test]
    fn every_scenario_that_we_ship_is_good() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let scenario = Scenario::read(&path, &[]).unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
            assert_eq!(Some(scenario.name.as_str()), path.file_stem().and_then(|stem| stem.to_str()));
            count += 1;
        }
        assert!(count >= 4);
    }

    #[test]
    fn single_values_are_set() {
        let set = |sets: &[&str]| Scenario::parse(SMALL, &sets.iter().map(|set| (*set).to_owned()).collect::<Vec<_>>());
        let scenario = set(&["hosts=20", "phase.0.duration=500ms", "topology.members=7"]).unwrap();
        assert_eq!((scenario.hosts, scenario.phase[0].duration, scenario.topology.members), (20, Duration::from_millis(500), 7));
        for (sets, words) in [
            (&["hosts"][..], "KEY=VALUE"),
            (&["hosts=0"], "from 1 to"),
            (&["hosts=4"], "only 4 hosts"),
            (&["host=4"], "unknown field `host`"),
            (&["phase.1.duration=1s"], "the list has only 1"),
            (&["phase.0.duration=soon"], "duration"),
            (&["phase.0.hot_every=1s"], "everybody"),
            (&["phase.0.hot_every=0s"], "changes a second"),
            (&["hosts=50001"], "50000"),
            (&["agents=17", "hosts=20"], "at most 16"),
            (&["topology.groups_per_space=1"], "without spaces"),
            (&["topology.references_percent=101"], "at most 100"),
        ] {
            let error = format!("{:#}", set(sets).unwrap_err());
            assert!(error.contains(words), "{sets:?}: {error}");
        }
        let mut scenario = set(&["hosts=50000"]).unwrap();
        scenario.stretch(Duration::from_secs(10));
        assert_eq!(scenario.duration(), Duration::from_secs(10));
    }
}
