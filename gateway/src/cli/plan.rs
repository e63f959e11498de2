//! `plan`: what a change would mean.

use std::path::PathBuf;

use clap::Args;
use reqwest::Method;
use serde_json::json;

use super::apply::{SavedPlan, documents};
use super::client::Call;
use super::context::Connection;
use super::output::{self, Format, Paint};
use super::{Failure, Result};
use crate::plan::{Action, Flows, Plan};

/// Names that are listed before the rest is counted.
const LISTED_MAX: usize = 10;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Examples:\n  groupcast plan -f web.yaml\n  groupcast plan -f groups/ --out shop.plan && groupcast apply --plan shop.plan"
)]
pub struct Options {
    /// File or folder with documents in YAML or JSON, or - for stdin; may be given several times.
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Save the plan, for `groupcast apply --plan`.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub async fn plan(connection: &Connection, options: Options) -> Result {
    let put = documents(&options.files)?;
    let call =
        Call::new(Method::POST, "/v1/changes").json(&json!({ "dry_run": true, "put": put })).key(super::client::random_key());
    let plan: Plan = connection.api()?.fetch(&call).await?;
    if let Some(path) = &options.out {
        let saved = SavedPlan { format_version: "1".to_owned(), plan: plan.plan.clone(), put };
        let text = serde_json::to_string_pretty(&saved).unwrap_or_default();
        std::fs::write(path, text).map_err(|error| Failure::failed(format!("{} cannot be written: {error}", path.display())))?;
    }
    let value = || serde_json::to_value(&plan).unwrap_or_default();
    output::print(&match options.output {
        Format::Json => output::json(&value()),
        Format::Jsonl => output::json_line(&value()) + "\n",
        Format::Yaml => output::yaml(&value()),
        Format::Name => plan.plan.clone() + "\n",
        Format::Table | Format::Wide => shown(&plan, connection.color.stdout()),
    })
}

/// For people: documents, flows gained and lost, whom it concerns, and one line that says it all.
pub fn shown(plan: &Plan, paint: Paint) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    for document in &plan.documents {
        let (sign, name) = (sign(document.action), format!("{} {}", document.kind, document.id));
        line(match document.action {
            Action::Create => paint.green(&format!("{sign} {name}")),
            Action::Update => paint.yellow(&format!("{sign} {name}")),
            Action::Delete => paint.red(&format!("{sign} {name}")),
            Action::Unchanged => paint.dim(&format!("{sign} {name}")),
        });
    }
    for (title, flows, total, gained) in
        [("flows gained", &plan.gained, plan.gained_total, true), ("flows lost", &plan.lost, plan.lost_total, false)]
    {
        if flows.is_empty() {
            continue;
        }
        line(String::new());
        line(paint.bold(title));
        for flow in flows {
            let words = format!("  {} {}", if gained { "+" } else { "-" }, flow_text(flow));
            line(if gained { paint.green(&words) } else { paint.red(&words) });
            line(paint.dim(&format!("      for example {}", flow.example)));
        }
        if total > flows.len() {
            line(format!("  and {} more", total - flows.len()));
        }
    }
    if !plan.state_changed.is_empty() {
        line(String::new());
        line(format!("replies: {} begin or cease to pass by themselves", listed(&plan.state_changed, plan.state_changed.len())));
    }
    if plan.workloads_total > 0 {
        line(String::new());
        line(format!("workloads: {}", listed(&plan.workloads, plan.workloads_total)));
        line(format!("hosts:     {}", listed(&plan.hosts, plan.hosts_total)));
    }
    for warning in &plan.warnings {
        let place = warning.rule.map_or(String::new(), |rule| format!("rules[{rule}]: "));
        line(paint.yellow(&format!("warning: {}: {place}{}", warning.document, warning.detail)));
    }
    line(String::new());
    line(format!("{} {}", paint.bold("plan:"), plan.summary));
    text
}

fn sign(action: Action) -> char {
    match action {
        Action::Create => '+',
        Action::Update => '~',
        Action::Delete => '-',
        Action::Unchanged => '=',
    }
}

fn flow_text(flow: &Flows) -> String {
    let Flows { direction, local, remote, traffic, .. } = flow;
    match direction.as_str() {
        "ingress" => format!("{remote} -> {local}: {traffic}  (at the receiver)"),
        _ => format!("{local} -> {remote}: {traffic}  (at the sender)"),
    }
}

fn listed(names: &[String], total: usize) -> String {
    let shown = names.iter().take(LISTED_MAX).cloned().collect::<Vec<_>>();
    match total - shown.len().min(total) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
