//! `apply`, `delete`, `undo`: what changes something.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use groupcast_policy::written::{Format as Text, Node, nodes};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::{Api, Call, escaped, random_key};
use super::context::Connection;
use super::wait::{WaitOptions, wait_for};
use super::{Code, Failure, Result, output};
use crate::api::changes::AcceptedChange;
use crate::api::documents::WriteResult;

#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  groupcast apply -f web.yaml --wait\n  groupcast apply -f groups/ -r 'open the shop'\n  \
                        groupcast plan -f web.yaml --out web.plan && groupcast apply --plan web.plan")]
pub struct ApplyOptions {
    /// File or folder with documents in YAML or JSON, or - for stdin; may be given several times.
    #[arg(short, long = "file", value_name = "FILE", required_unless_present = "plan", conflicts_with = "plan")]
    files: Vec<PathBuf>,
    /// A plan that `groupcast plan --out` saved; refused if it would mean something else by now.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Why; it is kept with the change.
    #[arg(short, long, default_value = "")]
    reason: String,
    /// Take the change back unless it is confirmed within this time, such as 60s: on the terminal, or with `groupcast confirm`.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    confirm: Option<Duration>,
    #[command(flatten)]
    wait: WaitOptions,
}

/// A change that was planned, to be applied as it is.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedPlan {
    pub format_version: String,
    pub plan: String,
    pub put: Vec<Value>,
}

/// One file at least, by its name's ending; folders are read one level deep, in the order of names.
fn contents(path: &Path) -> Result<Vec<(String, Text, String)>> {
    let failed = |error: std::io::Error| Failure::failed(format!("{} cannot be read: {error}", path.display()));
    let kind = |path: &Path| match path.extension().and_then(|ending| ending.to_str()) {
        Some("json") => Text::Json,
        _ => Text::Yaml,
    };
    if path.as_os_str() == "-" {
        let text = std::io::read_to_string(std::io::stdin()).map_err(failed)?;
        return Ok(vec![("stdin".to_owned(), Text::Yaml, text)]);
    }
    if !path.is_dir() {
        return Ok(vec![(path.display().to_string(), kind(path), std::fs::read_to_string(path).map_err(failed)?)]);
    }
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(path).map_err(failed)?.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    found.retain(|path| path.extension().is_some_and(|ending| ["yaml", "yml", "json"].iter().any(|known| ending == *known)));
    found.sort();
    if found.is_empty() {
        return Err(Failure::failed(format!("{} holds no .yaml, .yml or .json", path.display())));
    }
    found
        .iter()
        .map(|path| Ok((path.display().to_string(), kind(path), std::fs::read_to_string(path).map_err(failed)?)))
        .collect()
}

/// The documents of these files as a gateway takes them. What `groupcast get` prints is taken too, and then only over the version
/// it showed.
pub fn documents(files: &[PathBuf]) -> Result<Vec<Value>> {
    let mut puts = Vec::new();
    for path in files {
        for (name, format, text) in contents(path)? {
            let found = nodes(format, &text).map_err(|problem| Failure::failed(format!("{name}: {}", problem.message)))?;
            found.into_iter().for_each(|node| unwrapped(node, &mut puts));
        }
    }
    if puts.is_empty() {
        return Err(Failure::failed("there is no document in what was given"));
    }
    Ok(puts)
}

fn unwrapped(node: Node, puts: &mut Vec<Value>) {
    if let Some(Node::List(items)) = node.get("items") {
        return items.iter().for_each(|item| unwrapped(item.clone(), puts));
    }
    let value = |node: &Node| serde_json::to_value(node).unwrap_or_default();
    match (node.get("document"), node.get("revision")) {
        (Some(document), Some(Node::Int(revision))) => puts.push(json!({ "document": value(document), "revision": revision })),
        (Some(document), _) => puts.push(json!({ "document": value(document) })),
        (None, _) => puts.push(json!({ "document": value(&node) })),
    }
}

pub fn read_plan(path: &Path) -> Result<SavedPlan> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
    let plan: SavedPlan = serde_json::from_str(&text).map_err(|error| {
        Failure::failed(format!("{} is no saved plan: {error}", path.display()))
            .hint("make one with `groupcast plan -f FILE --out PLAN`")
    })?;
    match plan.format_version.as_str() {
        "1" => Ok(plan),
        other => Err(Failure::failed(format!("{}: format_version {other:?} is not known here", path.display()))),
    }
}

pub async fn apply(connection: &Connection, options: ApplyOptions) -> Result {
    let mut body = json!({ "reason": options.reason });
    match &options.plan {
        Some(path) => {
            let saved = read_plan(path)?;
            (body["put"], body["plan"]) = (saved.put.into(), saved.plan.into());
        }
        None => body["put"] = documents(&options.files)?.into(),
    }
    if let Some(within) = options.confirm {
        body["confirm"] = format!("{}ms", within.as_millis()).into();
    }
    let (api, deadline) = (connection.api()?, options.wait.deadline());
    let call = Call::new(Method::POST, "/v1/changes").json(&body).key(random_key()).until(deadline);
    let accepted: AcceptedChange = api.fetch(&call).await?;
    told(&accepted);
    let finished = finish(&api, connection, accepted.change, &options.wait, deadline).await;
    match options.confirm {
        Some(within) if !accepted.unchanged => confirmed(&api, accepted.change, within).await.and(finished),
        _ => finished,
    }
}

/// Asks whoever sits at the terminal; without one, says how to confirm.
async fn confirmed(api: &Api, change: u64, within: Duration) -> Result {
    let time = humantime::format_duration(within);
    if !std::io::stdin().is_terminal() {
        output::say(&format!("change {change} is taken back in {time} unless you run: groupcast confirm {change}"));
        return Ok(());
    }
    output::say(&format!("change {change} is taken back in {time}; type yes to keep it:"));
    let answer = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map(|_| line)
    });
    match tokio::time::timeout(within, answer).await {
        Ok(Ok(Ok(line))) if line.trim() == "yes" => confirm_change(api, change).await,
        _ => {
            output::say(&format!("change {change} was not confirmed and is taken back"));
            // The reader of the terminal still waits: nothing else would end it.
            std::process::exit(Code::Conflict as i32)
        }
    }
}

async fn confirm_change(api: &Api, change: u64) -> Result {
    let call = Call::new(Method::POST, format!("/v1/changes/{change}/confirm"));
    api.send(&call).await?;
    output::say(&format!("change {change} stays"));
    Ok(())
}

#[derive(Debug, Clone, Args)]
pub struct ConfirmOptions {
    /// The change to keep.
    change: u64,
}

pub async fn confirm(connection: &Connection, options: ConfirmOptions) -> Result {
    confirm_change(&connection.api()?, options.change).await
}

fn told(accepted: &AcceptedChange) {
    for warning in &accepted.warnings {
        output::say(&format!("warning: {}: {}", warning.document, warning.detail));
    }
    let count = accepted.documents.len();
    let documents = if count == 1 { "document" } else { "documents" };
    match accepted.unchanged {
        true => output::say(&format!("nothing to do: {count} {documents} unchanged")),
        false => output::say(&format!("change {} written: {count} {documents}", accepted.change)),
    }
}

/// Prints the change's number, and waits for it if that was asked.
async fn finish(api: &Api, connection: &Connection, change: u64, wait: &WaitOptions, deadline: Option<Instant>) -> Result {
    output::print(&format!("{change}\n"))?;
    // What was written before may not be in force yet. Zero is the number of what was never written.
    if wait.wait && change > 0 {
        return wait_for(api, connection, change, deadline).await;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WritableKind {
    Group,
    Template,
}

impl WritableKind {
    fn path(self) -> &'static str {
        match self {
            Self::Group => "groups",
            Self::Template => "templates",
        }
    }
}

#[derive(Debug, Clone, Args)]
pub struct DeleteOptions {
    kind: WritableKind,
    id: String,
    /// Why; it is kept with the change.
    #[arg(short, long, default_value = "")]
    reason: String,
    #[command(flatten)]
    wait: WaitOptions,
}

pub async fn delete(connection: &Connection, options: DeleteOptions) -> Result {
    let (api, deadline) = (connection.api()?, options.wait.deadline());
    let path = format!("/v1/{}/{}", options.kind.path(), escaped(&options.id));
    let call = Call::new(Method::DELETE, path).key(random_key()).reason(&options.reason).until(deadline);
    let written: WriteResult = api.fetch(&call).await?;
    output::say(&format!("change {} written: {} deleted", written.change, options.id));
    finish(&api, connection, written.change, &options.wait, deadline).await
}

#[derive(Debug, Clone, Args)]
pub struct UndoOptions {
    /// The change to take back.
    change: u64,
    /// Why; it is kept with the change.
    #[arg(short, long, default_value = "")]
    reason: String,
    #[command(flatten)]
    wait: WaitOptions,
}

pub async fn undo(connection: &Connection, options: UndoOptions) -> Result {
    let (api, deadline) = (connection.api()?, options.wait.deadline());
    let call = Call::new(Method::POST, format!("/v1/changes/{}/undo", options.change));
    let call = call.json(&json!({ "reason": options.reason })).key(random_key()).until(deadline);
    let accepted: AcceptedChange = api.fetch(&call).await.map_err(|failure| match failure.code {
        Code::Conflict => {
            Failure { hint: Some("take back what came later first, or write what you want instead".to_owned()), ..failure }
        }
        _ => failure,
    })?;
    told(&accepted);
    finish(&api, connection, accepted.change, &options.wait, deadline).await
}
