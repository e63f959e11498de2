//! What a change would mean: flows gained and lost, workloads and hosts concerned. Pure: a state and writes in, a plan out.

use data_encoding::HEXLOWER;
use groupcast_control::change::{Body, Write};
use groupcast_control::document::Document;
use groupcast_policy::meaning::{Budget, Exceeded, Statement, meaning};
use groupcast_policy::model::Event;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use crate::basis::{Basis, Now};
use crate::problem::Item;
use crate::submit;

/// Statements that are told, of each list.
pub const STATEMENTS_MAX: usize = 1_000;
/// Names that are told, of each list.
pub const NAMES_MAX: usize = 1_000;

/// What would become of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Create,
    Update,
    Delete,
    Unchanged,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedDocument {
    pub kind: String,
    pub id: String,
    pub action: Action,
    /// The revision there is now.
    pub revision: Option<u64>,
}

/// Flows that all change alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Flows {
    /// `ingress` or `egress`: at which end of the flow it is decided.
    pub direction: String,
    /// The ends whose policy it is.
    pub local: String,
    /// The other ends.
    pub remote: String,
    pub traffic: String,
    /// One packet that shows it.
    pub example: String,
    /// How many workloads it is about.
    pub workloads: usize,
}

impl Flows {
    fn of(statement: &Statement) -> Self {
        let witness = &statement.witness;
        let (workload, remote, payload) = (&witness.workload, &witness.remote, &witness.payload);
        let ingress = statement.direction == groupcast_policy::rule::Direction::Ingress;
        Self {
            direction: statement.direction.to_string(),
            local: statement.local.clone(),
            remote: statement.remote.clone(),
            traffic: statement.traffic.to_string(),
            example: match ingress {
                true => format!("{remote} -> {workload} {payload}"),
                false => format!("{workload} -> {remote} {payload}"),
            },
            workloads: statement.workloads.len(),
        }
    }
}

/// What a change would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    pub format_version: String,
    /// Names this plan: a change that is sent with it is refused once it would mean something else.
    pub plan: String,
    /// CATALOG and REGISTRY sequences it was made on.
    pub catalog: u64,
    pub registry: u64,
    pub documents: Vec<PlannedDocument>,
    /// Flows that would newly be allowed.
    pub gained: Vec<Flows>,
    pub gained_total: usize,
    /// Flows that would no longer be allowed.
    pub lost: Vec<Flows>,
    pub lost_total: usize,
    /// Workloads that would begin or cease to keep state for replies.
    pub state_changed: Vec<String>,
    pub workloads: Vec<String>,
    pub workloads_total: usize,
    pub hosts: Vec<String>,
    pub hosts_total: usize,
    /// Allowed, but most probably not meant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Item>,
    /// All of it in one line.
    pub summary: String,
}

/// Rules, bindings and members of one change that are planned: known before anything is computed.
pub const ITEMS_MAX: usize = 500_000;

/// Why there is no plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPlan {
    #[error("{items} rules, bindings and members are too many for one plan, at most {ITEMS_MAX} are taken: split the change")]
    TooMany { items: usize },
    #[error(transparent)]
    TooComplex(#[from] Exceeded),
}

/// How much there is to plan.
pub fn items(writes: &[Write]) -> usize {
    let of = |write: &Write| match &write.body {
        Body::Put(Document::Group(group)) => group.rules.len() + group.bindings.len() + group.members.len(),
        _ => 1,
    };
    writes.iter().map(of).fold(0, usize::saturating_add)
}

/// Takes as long as the change is involved; `goes_on` is asked now and then, and ends it.
pub fn plan(basis: &Basis, writes: &[Write], goes_on: &dyn Fn() -> bool) -> Result<Plan, NoPlan> {
    let items = items(writes);
    if items > ITEMS_MAX {
        return Err(NoPlan::TooMany { items });
    }
    let events: Vec<Event> = writes.iter().filter_map(Write::event).collect();
    let mut after = (*basis.world).clone();
    events.iter().for_each(|event| after.apply(event));
    let meaning = meaning(&basis.world, &after, &mut Budget::new(goes_on))?;
    let documents: Vec<PlannedDocument> = basis.of_each(writes).map(|(write, now)| planned(write, now)).collect();
    let names = |list: &mut dyn Iterator<Item = String>| list.take(NAMES_MAX).collect::<Vec<_>>();
    let flows = |list: &[Statement]| list.iter().take(STATEMENTS_MAX).map(Flows::of).collect::<Vec<_>>();
    let mut plan = Plan {
        format_version: "1".to_owned(),
        plan: String::new(),
        catalog: basis.through.0,
        registry: basis.through.1,
        documents,
        gained: flows(&meaning.gained),
        gained_total: meaning.gained.len(),
        lost: flows(&meaning.lost),
        lost_total: meaning.lost.len(),
        state_changed: names(&mut meaning.state_changed.iter().map(ToString::to_string)),
        workloads: names(&mut meaning.workloads.iter().map(ToString::to_string)),
        workloads_total: meaning.workloads.len(),
        hosts: names(&mut meaning.hosts.iter().map(ToString::to_string)),
        hosts_total: meaning.hosts.len(),
        warnings: submit::warnings(&basis.world, &events),
        summary: String::new(),
    };
    plan.summary = summary(&plan);
    plan.plan = name(&plan, writes);
    Ok(plan)
}

fn planned(write: &Write, now: &Now) -> PlannedDocument {
    let action = match (&write.body, &now.document) {
        (Body::Delete, _) => Action::Delete,
        (Body::Put(next), Some(now)) if next == now => Action::Unchanged,
        (Body::Put(_), Some(_)) => Action::Update,
        (Body::Put(_), None) => Action::Create,
    };
    let revision = now.kept.as_ref().map(|kept| kept.revision);
    PlannedDocument { kind: write.name.kind.as_str().to_owned(), id: write.name.id().to_owned(), action, revision }
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn summary(plan: &Plan) -> String {
    let of = |action: Action| plan.documents.iter().filter(|document| document.action == action).count();
    let documents: Vec<String> = [
        (Action::Create, "to create"),
        (Action::Update, "to update"),
        (Action::Delete, "to delete"),
        (Action::Unchanged, "unchanged"),
    ]
    .into_iter()
    .filter(|(action, _)| of(*action) > 0)
    .map(|(action, word)| format!("{} {word}", of(action)))
    .collect();
    let flows = match plan.gained_total + plan.lost_total {
        0 if plan.state_changed.is_empty() => "no flow changes".to_owned(),
        0 => format!("no flow changes, {} other state", counted(plan.state_changed.len(), "workload keeps", "workloads keep")),
        _ => format!("{} gained, {} lost", counted(plan.gained_total, "flow", "flows"), plan.lost_total),
    };
    let concerned =
        format!("{} on {}", counted(plan.workloads_total, "workload", "workloads"), counted(plan.hosts_total, "host", "hosts"));
    format!("{}; {flows}; {concerned}", documents.join(", "))
}

/// The same only if it would write the same over the same versions, with the same meaning.
fn name(plan: &Plan, writes: &[Write]) -> String {
    let mut hash = Sha256::new();
    let mut put = |text: &str| {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    };
    for (write, document) in writes.iter().zip(&plan.documents) {
        put(&write.name.to_string());
        put(&String::from_utf8_lossy(&write.payload()));
        put(&document.revision.unwrap_or(0).to_string());
    }
    for flows in plan.gained.iter().chain(&plan.lost) {
        [&flows.direction, &flows.local, &flows.remote, &flows.traffic].into_iter().for_each(|text| put(text));
        put(&flows.workloads.to_string());
    }
    for list in [&plan.state_changed, &plan.workloads, &plan.hosts] {
        list.iter().for_each(|text| put(text));
        put(&list.len().to_string());
    }
    put(&format!("{} {} {}", plan.gained_total, plan.lost_total, plan.summary));
    HEXLOWER.encode(&hash.finalize()[..16])
}
