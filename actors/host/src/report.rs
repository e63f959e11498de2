//! What the agent says about itself, on the local socket and as metrics.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::WrittenAttachment;
use crate::keeper::Counts;
use crate::netlink::Foreign;
use crate::registration::Registration;
use crate::renew::Credential;

/// What is in force, as whoever enforces knows it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Enforced {
    pub host: String,
    pub stamp: u32,
    /// Of the inbox's commits, the last in force.
    pub commit: u64,
    pub change: u64,
    /// The last change that was heard of; behind it is what is frozen or failed.
    pub heard_change: u64,
    /// How long something that was heard has not been in force.
    pub lag_ms: u64,
    /// When the kernel's table was last changed, in seconds since 1970.
    pub last_change_at: Option<u64>,
    /// Only the safe part of the newest change is in force: topics it names have not arrived.
    pub overdue: bool,
    pub mode: String,
    pub reason: String,
    /// As it is told centrally.
    pub state: String,
    pub topics: Vec<String>,
    pub workloads: Vec<WrittenAttachment>,
    /// Named, with what to do about it.
    pub refused: Vec<String>,
    pub last_error: Option<String>,
    /// Workloads that are attached where there is no interface.
    pub missing_interfaces: Vec<String>,
    /// Why the last good state is not on disk.
    pub unsaved: Option<String>,
    /// What this kernel lacks.
    pub missing_features: Vec<String>,
    #[serde(flatten)]
    pub counts: Counts,
}

/// What was heard, as the inbox knows it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Heard {
    pub connected: bool,
    /// Term and lead; `None` before the first complete sync of this run.
    pub cut: Option<(u64, u64)>,
    /// Deltas that cannot be committed yet.
    pub held_deltas: usize,
    /// What went wrong on the way here and was or will be repaired.
    pub incidents: u64,
    pub last_incident: Option<String>,
    /// A topic that comes from the disk has none.
    pub revisions: BTreeMap<String, u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    #[serde(flatten)]
    pub enforced: Enforced,
    pub heard: Heard,
    pub foreign: Foreign,
    pub registration: Registration,
    /// Of this host on the bus.
    #[serde(default)]
    pub credential: Credential,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ruleset {
    pub wanted: String,
    pub differences: Vec<String>,
}

/// Whether a workload's policy is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    Enforced,
    /// Nothing of it passes until this is over.
    Waiting(String),
    Refused(String),
}

/// Why a flow passes this host, or not.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Explanation {
    /// By the policy in force here. An end elsewhere is judged there.
    pub allowed: bool,
    /// Whether the kernel does what the policy says; if not, the notes say why.
    pub enforced: bool,
    pub judgements: Vec<Judged>,
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Judged {
    pub workload: String,
    pub direction: String,
    pub allowed: bool,
    pub words: String,
    pub group: Option<String>,
    pub rule: Option<String>,
    /// As logs name the rule.
    pub rule_key: Option<String>,
    pub scope: Option<String>,
    /// The topics that say so, and their revisions where they are known.
    pub topics: BTreeMap<String, Option<u64>>,
}

macro_rules! metrics {
    ($(($name:literal, $kind:literal, $help:literal, $value:expr),)*) => {
        [$(format!("# HELP groupcast_agent_{0} {2}\n# TYPE groupcast_agent_{0} {1}\ngroupcast_agent_{0} {3}\n", $name, $kind, $help, $value)),*].concat()
    };
}

impl Enforced {
    /// In the text form of Prometheus. Modes and states are one series each, of which one is 1.
    pub fn metrics(&self, heard: &Heard) -> String {
        let mut text = metrics!(
            ("transactions_total", "counter", "Kernel transactions committed.", self.counts.transactions),
            ("operations_total", "counter", "Operations in committed transactions.", self.counts.operations),
            ("stamp_bumps_total", "counter", "Times that every flow was made to be judged again.", self.counts.bumps),
            ("failures_total", "counter", "Transactions that the kernel refused.", self.counts.failures),
            ("repairs_total", "counter", "Times that our table was not what we had left there.", self.counts.repairs),
            ("unmarked_connections_total", "counter", "Connections whose stamp was taken away.", self.counts.unmarked),
            ("incidents_total", "counter", "What went wrong on the way here and was repaired.", heard.incidents),
            ("topics", "gauge", "Topics in force.", self.topics.len()),
            ("workloads", "gauge", "Workloads attached.", self.workloads.len()),
            ("refused_workloads", "gauge", "Workloads that cannot be enforced.", self.refused.len()),
            ("missing_interfaces", "gauge", "Workloads attached where there is no interface.", self.missing_interfaces.len()),
            ("unsaved", "gauge", "Whether the last good state cannot be written to disk.", u8::from(self.unsaved.is_some())),
            ("missing_features", "gauge", "Kernel features that are missing.", self.missing_features.len()),
            ("change", "gauge", "The last change in force.", self.change),
            ("heard_change", "gauge", "The last change heard of.", self.heard_change),
            ("commit", "gauge", "The last commit in force.", self.commit),
            ("lag_ms", "gauge", "How long something heard has not been in force.", self.lag_ms),
            ("held_deltas", "gauge", "Deltas that cannot be committed yet.", heard.held_deltas),
            ("connected", "gauge", "Whether the bus is connected.", u8::from(heard.connected)),
            ("overdue", "gauge", "Whether only the safe part of the newest change is in force.", u8::from(self.overdue)),
        );
        text.push_str(
            "# HELP groupcast_agent_state What the host does with the policy it has.\n# TYPE groupcast_agent_state gauge\n",
        );
        for state in ["enforcing", "failing", "frozen", "bypassed", "lockdown", "auditing", "auditing-some", "dry-run"] {
            let is = u8::from(self.state == state);
            text.push_str(&format!("groupcast_agent_state{{state=\"{state}\"}} {is}\n"));
        }
        text
    }
}
