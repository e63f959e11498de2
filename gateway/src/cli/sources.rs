//! `sources`: has a source read now, or lets deletions pass that were held back. `get sources` shows how they are.

use std::time::Duration;

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::Value;

use super::client::{Call, escaped};
use super::context::Connection;
use super::get::text;
use super::{Result, output};
use crate::api::sources::PolledSource;

/// A poll of a large source takes its time.
const WAITS: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Reads all of a source now; returns when what it says is compiled and published.
    Poll(Options),
    /// Lets the deletions pass that were held back because they are most of what the source owns.
    Confirm(Options),
}

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The source, as `groupcast get sources` names it.
    id: String,
}

pub async fn run(connection: &Connection, command: Command) -> Result {
    let (id, verb) = match &command {
        Command::Poll(options) => (&options.id, "poll"),
        Command::Confirm(options) => (&options.id, "confirm"),
    };
    let call = Call::new(Method::POST, format!("/v1/sources/{}/{verb}", escaped(id))).waits(WAITS);
    let polled: PolledSource = connection.api()?.fetch(&call).await?;
    output::say(&format!("source {} is read; what it says is published (CATALOG up to {})", polled.id, polled.catalog));
    Ok(())
}

/// Narrow and further columns of `get sources`.
pub fn head() -> (Vec<&'static str>, Vec<&'static str>) {
    (
        vec!["id", "kind", "state", "lag", "groups", "workloads", "held back", "withheld", "malformed", "last error"],
        vec!["last success", "polls", "full syncs", "last change", "malformed items", "withheld items"],
    )
}

pub fn row(source: &Value) -> (Vec<String>, Vec<String>) {
    let lag = source["lag_seconds"].as_f64().map_or(String::new(), |lag| format!("{lag:.0}s"));
    let narrow = vec![
        text(&source["id"]),
        text(&source["kind"]),
        text(&source["state"]),
        lag,
        text(&source["groups"]),
        text(&source["workloads"]),
        text(&source["held_back"]["deletions"]),
        text(&source["withheld"]),
        text(&source["malformed"]),
        text(&source["last_error"]["message"]),
    ];
    let items = |field: &str| {
        let items = source[field].as_array().map(Vec::as_slice).unwrap_or_default();
        items.iter().map(text).collect::<Vec<_>>().join("; ")
    };
    let more = vec![
        text(&source["last_success"]),
        text(&source["polls"]),
        text(&source["full_syncs"]),
        text(&source["last_change"]),
        items("malformed_items"),
        items("withheld_items"),
    ];
    (narrow, more)
}
